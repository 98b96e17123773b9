# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pd planner`: its page, its log, how it ends, what it refuses."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.brokers import serving
from tests.waiting import wait_for
from vllm_pd.ops.client import fetch
from vllm_pd.ops.scrape import parse
from vllm_pd.rpc.ports import take_free

HOST = "127.0.0.1"


@contextlib.contextmanager
def planner(broker: str, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command, and where its page is."""
    port = take_free(HOST)
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", "planner", "--broker", broker, "--port",
                                    str(port), "--interval-s", "0.5", "--cool-down-s", "1", *arguments],
                                   stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, f"http://{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


def wanted(url: str) -> dict[str, float]:
    """What its page says, nothing before the first decision."""
    try:
        page = parse(fetch(url, "/metrics")[1])
    except OSError:
        return {}
    found = page.by("vllm:pd_wanted_engines", "role")
    return {role: value for (role, ), value in found.items()} if page.value("vllm:pd_planner_decided_seconds") else {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_what_is_wanted_and_ends_by_a_signal(number, tmp_path):
    """Of a fleet without engines one of each is wanted."""
    log = tmp_path / "log"
    with serving() as broker, planner(broker.address, log, "--flip") as (process, url):
        wait_for(lambda: wanted(url) == {"prefill": 1.0, "decode": 1.0}, log.read_text)
        wait_for(lambda: log.read_text().count("prefill: 0 of 1 wanted, pressure inf by no_engine") >= 2, log.read_text)
        process.send_signal(number)
        assert process.wait(60) == 0, log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_broker_that_goes_away_is_said_and_waited_for(tmp_path):
    log, address = tmp_path / "log", f"tcp://{HOST}:{take_free(HOST)}"
    with contextlib.ExitStack() as first:
        first.enter_context(serving(address))
        with planner(address, log) as (process, url):
            wait_for(lambda: wanted(url), log.read_text)
            first.close()
            wait_for(lambda: "no decision: no broker answers" in log.read_text(), log.read_text)
            assert wanted(url), "its page stays"
            before = log.read_text().count("no_engine")
            with serving(address):
                wait_for(lambda: log.read_text().count("no_engine") > before, log.read_text)
            assert process.poll() is None


def refused(*arguments: str) -> str:
    """What the command says that ends with status 2."""
    found = subprocess.run([sys.executable, "-m", "vllm_pd.cli", "planner", *arguments], capture_output=True, text=True,
                           timeout=120, env=os.environ)
    assert found.returncode == 2, found
    return found.stderr


def test_what_cannot_be_used_is_refused():
    with serving() as broker, socket.create_server((HOST, 0)) as taken:
        at = ("--broker", broker.address)
        assert "that port is in use" in refused(*at, "--port", str(taken.getsockname()[1]))
        assert "--interval-s=0.1 can't be used" in refused(*at, "--interval-s", "0.1")
    assert "no broker answers" in refused("--broker", f"tcp://{HOST}:{take_free(HOST)}", "--port", str(take_free(HOST)))
