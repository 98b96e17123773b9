# SPDX-License-Identifier: Apache-2.0
"""How a server's process ends, by what ends it."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from vllm_pd.rpc.ports import take_free

SERVER = """
import asyncio, sys
from types import SimpleNamespace
from fastapi import FastAPI
from vllm.entrypoints.launcher import serve_http

async def serve():
    app = FastAPI()
    dead = sys.argv[1] == "dead"
    app.state.engine_client = SimpleNamespace(errored=dead, is_running=not dead)
    await (await serve_http(app, None, host="127.0.0.1", port=int(sys.argv[2])))

asyncio.run(serve())
"""
BOUND_S = 120.0


@pytest.mark.parametrize("engine, code", [("dead", 1), ("fine", 0)])
def test_a_server_whose_engine_has_failed_ends_with_an_error_code(engine, code):
    """B73: whatever restarts servers must see it. One that is told to end has not failed."""
    port = take_free("127.0.0.1")
    server = subprocess.Popen([sys.executable, "-c", SERVER, engine, str(port)])
    try:
        if engine == "fine":
            _wait_for(port)
            server.send_signal(signal.SIGTERM)
        assert server.wait(BOUND_S) == code
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + BOUND_S
    while time.monotonic() < until:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not come up")
