# SPDX-License-Identifier: Apache-2.0
"""What clients hear when a signal ends the router: nobody gets half an answer that looks whole."""
import asyncio
import json
import os
import shlex
import signal
import sys

import aiohttp
import pytest

from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from tests.router.test_edge import BODY, WITHIN_S, connected, request, said
from vllm_pd.rpc.ports import take_free


def end(served, number=signal.SIGTERM):
    served.server.handle_exit(number, None)
    served.server._captured_signals.clear()  # which uvicorn gives to the process in the end, here that of the tests


async def ended(served):
    """Until the router has stopped listening."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                async with connected(served):
                    await asyncio.sleep(0.02)
            except OSError:
                return


@pytest.mark.parametrize("seconds", [0.3, 0.0])
async def test_what_must_be_cut_hears_why(seconds):
    async with serving(1, grace_s=seconds) as (served, [engine]):
        engine.fault = Fault.STALL
        stream = asyncio.create_task(served.ask(True))
        await served.until(lambda: engine.asked)
        engine.fault = Fault.HANG
        plain = asyncio.create_task(served.ask())
        async with connected(served) as (reader, writer):
            writer.write(request(BODY[:5], length=500))
            await served.until(lambda: len(engine.asked) == 2 and served.count("vllm:pd_router_body_bytes") > 60)
            end(served)
            answer = await asyncio.wait_for(stream, WITHIN_S)
            assert answer.status == 200 and len(answer.events) == 2
            error = answer.events[-1]["error"]
            assert error["code"] == 503 and "shutting down" in error["message"]
            answer = await asyncio.wait_for(plain, WITHIN_S)
            assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, 503, "1")
            half = await said(reader)
            assert b" 503 " in half and json.loads(half.partition(b"\r\n\r\n")[2])["code"] == 503
        await served.until(lambda: not served.worker(engine) or not served.worker(engine).in_flight)
        assert served.count("vllm:pd_router_tries_total", worker=engine.url, outcome="cut") == 2
        assert served.count("vllm:pd_router_broken_streams_total", worker=engine.url) == 0


async def test_what_is_open_is_finished_first():
    async with serving(1, grace_s=60.0) as (served, [engine]):
        engine.gap_s = 0.2
        asked = asyncio.gather(served.ask(True), served.ask())
        await served.until(lambda: len(engine.asked) == 2)
        end(served)
        stream, plain = await asyncio.wait_for(asked, WITHIN_S)
        assert stream.events[-1] == "[DONE]" and plain.json["choices"][0]["text"] == "all"


async def test_health_says_so_before_anything_is_refused():
    async with serving(1, unready_s=60.0, grace_s=60.0) as (served, [engine]):
        async with connected(served) as (reader, writer):  # an old connection is served too
            end(served)
            health = await served.ask(path="/health", method="GET")
            while health.status == 200:
                await asyncio.sleep(0.02)
                health = await served.ask(path="/health", method="GET")
            assert health.status == 503 and "shutting down" in health.json["message"]
            answer = await served.ask()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            writer.write(request(BODY))
            assert b" 200 " in await said(reader)
        engine.fault = Fault.HANG
        plain = asyncio.create_task(served.ask())
        await served.until(lambda: len(engine.asked) == 3)
        end(served)  # a second one: no more time
        assert (await asyncio.wait_for(plain, WITHIN_S)).status == 503
        await ended(served)


async def test_sigint_stops_listening_at_once():
    async with serving(1, unready_s=60.0, grace_s=60.0) as (served, [engine]):
        engine.gap_s = 2.0
        plain = asyncio.create_task(served.ask())
        await served.until(lambda: engine.asked)
        end(served, signal.SIGINT)
        await ended(served)
        assert (await asyncio.wait_for(plain, WITHIN_S)).status == 200


async def test_a_client_that_does_not_read_holds_up_no_end():
    async with serving(1, grace_s=0.2, write_timeout_s=600.0) as (served, [engine]):
        engine.fault, engine.chunks = Fault.LONG, 1 << 14
        async with connected(served) as (reader, writer):
            writer.transport.pause_reading()
            writer.write(request(json.dumps({"model": "m", "prompt": "a", "stream": True}).encode()))
            await served.until(lambda: engine.asked)
            await asyncio.sleep(0.3)
            end(served)
            await ended(served)
            await served.until(lambda: not served.worker(engine) or not served.worker(engine).in_flight)


async def test_a_process_is_ended_by_the_signal_and_says_no_traceback():
    engine = FaultyEngine()
    engine.fault = Fault.HANG
    await engine.start()
    port = take_free("127.0.0.1")
    process = await asyncio.create_subprocess_shell(
        f"exec {shlex.quote(sys.executable)} -m vllm_pd.cli router --port {port} --tokenizer none --unready-s 0.2 "
        f"--grace-s 0.3 --worker {engine.url}", stderr=asyncio.subprocess.PIPE)
    try:
        async with aiohttp.ClientSession() as session:
            async def health():
                try:
                    async with session.get(f"http://127.0.0.1:{port}/health") as response:
                        return response.status
                except aiohttp.ClientError:
                    return 0

            async with asyncio.timeout(100):
                while await health() != 200:
                    await asyncio.sleep(0.1)
                asked = asyncio.create_task(session.post(f"http://127.0.0.1:{port}/v1/completions", data=BODY))
                while not engine.asked:
                    await asyncio.sleep(0.01)
                os.kill(process.pid, signal.SIGTERM)
                response = await asked
                assert response.status == 503 and (await response.json())["code"] == 503
                _, said_aloud = await process.communicate()
        assert b"Traceback" not in said_aloud and process.returncode == -signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.stop()
