# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench router` measures what it says, and takes no wrong answer for a fast one."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator

import msgspec
import pytest
from typer.testing import CliRunner

from vllm_pd.bench import router as measure
from vllm_pd.bench import router_report as report
from vllm_pd.bench.checks import parse_cores
from vllm_pd.bench.connection import HttpAnswer, LoadConnection, LoadError
from vllm_pd.bench.dummy import REQUEST, DummyAnswer, DummyConnection, DummyDelays, DummyEngine, answer_text
from vllm_pd.bench.dummy_client import RequestShape
from vllm_pd.bench.dummy_events import MadeUpEvents
from vllm_pd.bench.load import RequestTiming, closed_loop
from vllm_pd.bench.servers import RouterCommand
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.events.notice import EventsNotice
from vllm_pd.router.events.subscriber import Subscriber
from vllm_pd.router.index import PrefixIndex

SHAPES = [RequestShape(3, 8, stream, chat) for stream in (False, True) for chat in (False, True)]
WORKER = f"{sys.executable} -m vllm_pd.bench.dummy --port"


@contextlib.asynccontextmanager
async def listening(dummy: DummyEngine) -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(lambda: DummyConnection(dummy), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def body_of(shape: RequestShape) -> bytes:
    return next(shape.bodies(random.Random(0)))


async def test_a_dummy_says_what_was_asked_for_over_one_connection():
    async with listening(dummy := DummyEngine()) as url:
        connection = await LoadConnection.open(url)
        for shape in SHAPES:
            timing = await shape.send(connection, body_of(shape))
            assert 0 < timing.first_s <= timing.total_s
        connection.close()
    assert (dummy.requests, dummy.answered, dummy.cancelled, dummy.open) == (4, 4, 0, 0)


async def test_a_dummy_takes_its_time():
    shape = RequestShape(5, 8, stream=True)
    async with listening(DummyEngine(delays=DummyDelays(0.1, 0.05))) as url:
        connection = await LoadConnection.open(url)
        timing = await shape.send(connection, body_of(shape))
        connection.close()
    assert timing.first_s >= 0.1 and timing.total_s >= 0.1 + 4 * 0.05


async def test_a_dummy_notices_that_its_client_has_gone():
    async with listening(dummy := DummyEngine(delays=DummyDelays(30.0))) as url:
        connection = await LoadConnection.open(url)
        asking = asyncio.create_task(SHAPES[0].send(connection, body_of(SHAPES[0])))
        async with asyncio.timeout(50):
            while not dummy.open:
                await asyncio.sleep(0.01)
            connection.close()
            with pytest.raises(LoadError, match="ended before"):
                await asking
            while not dummy.cancelled:
                await asyncio.sleep(0.01)
    assert (dummy.answered, dummy.open) == (0, 0)


def whole_answer(shape: RequestShape) -> bytes:
    answer = DummyAnswer(DummyEngine(), REQUEST.decode(body_of(shape)), shape.chat, "name")
    return b"".join(answer.events()) if shape.stream else answer.whole()


def came(body: bytes) -> HttpAnswer:
    """An answer that came in pieces of 7 bytes."""
    return HttpAnswer(0.0, [], [(start, body[start:start + 7]) for start in range(0, len(body), 7)], 200)


def test_an_event_has_come_when_its_end_has():
    answer = came(b'data: {"a": 1}\n\ndata: [1]\n\ndata: [DONE]\n\n')
    assert (answer.parts(), list(answer.arrivals())) == ([{"a": 1}, [1]], [14, 21])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_answer_passes_and_a_damaged_one_does_not(shape):
    whole = whole_answer(shape)
    shape.check(came(whole))
    damaged = {"a lost token": whole.replace(b" t1", b""), "a doubled one": whole.replace(b" t1", b" t1 t1"),
               "two in the wrong order": whole.replace(b" t1", b" tX").replace(b" t2", b" t1").replace(b" tX", b" t2"),
               "a cut one": whole[:len(whole) // 2], "nothing": b"", "another one": b"{}", "twice": whole * 2}
    for answer in damaged.values():
        with pytest.raises(LoadError):
            shape.check(came(answer))


def test_a_stream_without_its_end_is_an_error():
    with pytest.raises(LoadError, match="ends with"):
        SHAPES[2].check(came(whole_answer(SHAPES[2]).removesuffix(b"data: [DONE]\n\n")))


@pytest.mark.parametrize("raw, message", [
    (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull", "status 503.*full"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "not an answer"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{", "ended before"),
    (b"good morning\r\n\r\n", "not an HTTP answer"),
])
async def test_what_is_no_answer_is_an_error(raw, message):

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        body = body_of(SHAPES[0])
        found = await closed_loop([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"],
                                  lambda connection, name: SHAPES[0].send(connection, body, name), 2, 0.01)
    assert (found.timings, len(found.errors)) == ([], 2)
    assert all(re.search(message, error) for error in found.errors)


def test_a_launch_fills_its_places():
    launch = RouterCommand.parse("name=run 'a b' --port {port} --more {free} --url={worker} --all {workers}")
    words = launch.arguments(81, ["http://a", "http://b"])
    assert launch.name == "name"
    assert words[:5] == ["run", "a b", "--port", "81", "--more"] and 0 < int(words[5]) < 65536
    assert words[6:] == ["--url=http://a", "--url=http://b", "--all", "http://a", "http://b"]
    assert RouterCommand("a", "/somebodys/folder/run --flag /other/file {port}").shown() == "run --flag file {port}"
    assert RouterCommand.ours("ours=--policy kv").arguments(81, ["http://a"])[-2:] == ["--policy", "kv"]


@pytest.mark.parametrize("text", ["", "run {port} {workers}", "n=run {workers}", "n=run {port}",
                                  "=run {port} {workers}"])
def test_a_launch_that_lacks_a_place_is_refused(text):
    with pytest.raises(ConfigError, match="--router"):
        RouterCommand.parse(text)


def test_added_is_the_time_less_the_bare_workers_median():
    def tally(name: str, *times_s: float) -> measure.PhaseFigures:
        timings = [RequestTiming(time_s / 2, time_s) for time_s in times_s]
        return measure.PhaseFigures(name, "alone", "plain", timings, ["what"])

    bench = measure.RouterBench(routers=(RouterCommand("a", ""), ))
    found = measure.report(bench, [tally("no router", 0.001, 0.002, 0.009), tally("a", 0.004, 0.005, 0.007)], {})
    bare, routed = found["entries"]
    assert bare["total_added_ms"]["p50"] == 0 and bare["total_added_ms"]["p99"] == pytest.approx(7)
    assert routed["total_added_ms"]["p50"] == pytest.approx(3)
    assert routed["total_added_ms"]["p99"] == pytest.approx(5)
    assert routed["first_added_ms"]["p50"] == pytest.approx(1.5)
    assert report._pair(routed, "total") == "3.00 / max 5.00", "of three requests"
    assert report._pair(routed | {"requests": 100}, "total") == "3.00 / 5.00" and report._pair({}, "total") == "-"
    assert routed["errors"] == 1 and routed["added_grid_ms"][-1] == pytest.approx(5)
    assert msgspec.json.decode(json.dumps(found)) is not None


def test_one_run_shows_every_router_in_every_phase(tmp_path):
    bench = measure.RouterBench(routers=(RouterCommand.parse(f"stand-in={WORKER} {{port}} --model {{worker}}"), ),
                                workers=1, requests=10, tokens=4, clients=2, streams=2, slice_s=0.05, rounds=1,
                                first_s=0.01, gap_s=0.001)
    found = measure.measure(bench, tmp_path / "log", lambda text: None)
    assert {(e["router"], e["phase"], e["kind"]) for e in found["entries"]} == {
        (name, *phase) for name in ("no router", "stand-in") for phase in report.PHASES}
    assert all(e["requests"] > 0 and e["errors"] == 0 for e in found["entries"])
    assert all("router_cpu_ms_per_request" in e for e in found["entries"] if e["phase"] == "busy")
    assert "stand-in" in [str(column.header) for column in report.table(found).columns]
    report.picture(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_router_that_ends_in_the_middle_loses_no_other_figure(tmp_path, monkeypatch):
    bench = measure.RouterBench(routers=(RouterCommand.parse(f"stand-in={WORKER} {{port}} --model {{worker}}"), ),
                                workers=1, requests=10, tokens=4, clients=2, streams=2, slice_s=0.05, rounds=1,
                                first_s=0.01, gap_s=0.001)
    pids: list[int] = []

    def kill_after_the_first_phase(text: str) -> None:
        pids.extend(map(int, re.findall(r"^stand-in: pid (\d+)", text)))
        if text == "alone, plain: done":
            os.kill(pids[0], signal.SIGKILL)

    found = measure.measure(bench, tmp_path / "log", kill_after_the_first_phase)
    shown = {(e["router"], e["phase"], e["kind"]): e for e in found["entries"]}
    assert shown["stand-in", "alone", "plain"]["errors"] == 0 and shown["stand-in", "alone", "plain"]["requests"] == 10
    for phase in report.PHASES[1:]:
        dead, bare = shown["stand-in", *phase], shown["no router", *phase]
        assert (dead["requests"], bare["errors"]) == (0, 0) and dead["errors"] and bare["requests"], phase
    assert "stand-in" not in found["memory_bytes"]
    report.table(found)
    report.picture(found, tmp_path / "picture.png")
    monkeypatch.setattr(measure, "measure", lambda *_: found)
    assert CliRunner().invoke(app, ["bench", "router"]).exit_code == 1
    found["entries"] = [entry | {"errors": 0} for entry in found["entries"]]
    assert CliRunner().invoke(app, ["bench", "router"]).exit_code == 0


def test_a_router_that_ends_is_an_error_with_its_last_words():
    words = f"{sys.executable} -c \"import sys; print('no such thing'); sys.exit(3)\" {{port}} {{workers}}"
    with pytest.raises(PDError, match="short-lived has ended.*\n.*no such thing"):
        measure.measure(measure.RouterBench(routers=(RouterCommand("short-lived", words), ), workers=1), None)


@pytest.mark.parametrize("changes, key", [({"requests": 0}, "--requests"), ({"slice_s": 0}, "--slice-s"),
                                          ({"routers": (RouterCommand("no router", ""), )}, "--router")])
def test_what_measures_nothing_is_refused(changes, key):
    with pytest.raises(ConfigError, match=key):
        measure.RouterBench(**{"routers": (), **changes}).check()


def test_cores_are_numbers():
    own = sorted(os.sched_getaffinity(0))
    assert parse_cores("--load-cores", ",".join(map(str, own))) == tuple(own) and parse_cores("--load-cores", "") == ()
    for text in ("a", "4711"):
        with pytest.raises(ConfigError, match=f"--load-cores.*'{text}'"):
            parse_cores("--load-cores", text)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_two_prompts_begin_alike(shape):
    asked = [REQUEST.decode(body) for body in itertools.islice(shape.bodies(random.Random(0)), 600)]
    prompts = [ask.messages[0]["content"] if shape.chat else ask.prompt for ask in asked]
    assert [prompt.split(" ", 1)[0] for prompt in prompts] == [str(number) for number in range(600)]
    assert all(len(prompt.split()) == 7 for prompt in prompts)


def test_the_text_tells_each_token():
    assert answer_text(3) == " t0 t1 t2"


async def test_made_up_events_keep_a_router_busy():
    events = MadeUpEvents(block_size=4, pool_blocks=5)
    index = PrefixIndex(4)
    subscriber = Subscriber("http://127.0.0.1:1", index, None, configured=EventsNotice(events.notice().events, 0))
    subscriber.start()
    try:
        async with asyncio.timeout(100):
            while not subscriber.counters["blocks_stored"]:  # a subscription takes a while to be known
                events.answered(13)
                await asyncio.sleep(0.02)
            seen = subscriber.counters["blocks_stored"]
            for _ in range(10):
                events.answered(13)
            while subscriber.counters["blocks_stored"] < seen + 30:
                await asyncio.sleep(0.01)
        assert subscriber.counters["blocks_removed"] >= 25
        assert not subscriber.counters["malformed"]
    finally:
        await subscriber.close()
        events.close()
