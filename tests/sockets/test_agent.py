# SPDX-License-Identifier: Apache-2.0
"""The control thread over real sockets, with a real broker, and real processes that die, stop and come back."""
import contextlib
import errno
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from tests.fakes.brokers import KINDS, NatsServer, patience, running, serving  # noqa: F401
from tests.fakes.noise import send_noise
from tests.forked import ForkedProcess
from tests.idle import least_used_s
from tests.waiting import wait_for
from vllm_pd.errors import ConfigError
from vllm_pd.handover.engine import close_engine, finalize
from vllm_pd.peer import sockets as control_sockets
from vllm_pd.peer import thread as control_thread
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.lifeline import greeting
from vllm_pd.peer.liveness.probe import TcpProbes
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.peer.liveness.rules import GRACE_S, ProbeAnswer
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AddPeer,
    AttemptEnd,
    Cancelled,
    DropPeer,
    Fallback,
    FallbackReason,
    HoldEnd,
    HoldEnded,
    Prefill,
    Prefilled,
    ReadHold,
    Released,
    StopRead,
)
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import is_free, take_free
from vllm_pd.rpc.sockets import SendResult
from vllm_pd.rpc.watched import WatchedConnection
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.nixl import generations, kept
from vllm_pd.transfer.requests import TransferProgress
from vllm_pd.transfer.transport import rank_name

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
TOKENS = list(range(40))
WAIT_S = 50.0
SILENT_S = 30.0  # and not 3 heartbeats, for which a broker may stand still on a busy machine

pytestmark = pytest.mark.usefixtures("patience")


def take_events(engine):
    """All events of an agent, or of a test's engine, since the last call, in order."""
    return list(iter(engine.protocol.poll_event, None))


@dataclass(frozen=True)
class Settings:
    """As vllm_pd.settings.engine.PDConfig. Heartbeats are many, and nobody is gone because the machine is busy with
    others."""
    broker: str
    bind: str = "tcp://127.0.0.1:0"
    lifeline_port: int = 0
    lease_s: float = 30.0
    attempt_deadline_s: float = 60.0
    claim_retry_s: float = 10.0
    max_prefill_tokens: int = 65536
    decides_by_time: bool = False
    is_two_sided: bool = False
    metaserver_urls: tuple[str, ...] = ()
    zone: str | None = None
    hold_s: float = 30.0
    heartbeat_s: float = 0.1
    ttl_s: float = 60.0
    keys: str | None = None
    nats_prefix: str = "test"
    nats_credentials: str | None = None
    nats_ca: str | None = None


class Engine:
    """What an engine does with its agent, on the test's thread."""

    def __init__(self, settings, role, fingerprint=FINGERPRINT, member=None, silent_s=SILENT_S, **more):
        self.bell = threading.Event()
        self.wakes = 0
        self.events = []
        self.agent = ControlAgent(settings, member or local_member(role, fingerprint), b"memory of " + role.encode(),
                                  self._wake, **more)
        self.agent.start()
        self.protocol = self.agent.protocol
        cluster = self.protocol._core.cluster
        cluster.silent_s = min(silent_s, settings.ttl_s)

    def close(self):
        """Its thread may take its time."""
        self.agent.close(WAIT_S)
        self.agent.end_lifeline()
        assert not self.agent.thread.is_alive()

    def _wake(self):
        self.wakes += 1
        self.bell.set()

    def submit(self, request_id="r", tokens=TOKENS, cached_blocks=1):
        attempt = self.protocol.decode.next_attempt(request_id)
        self.protocol.decode.submit(attempt, tokens, list(range(10, 10 + -(-len(tokens) // 16))), cached_blocks)
        return attempt

    def state_of(self, attempt):
        """What the half of the protocol that has a record of this attempt knows of it."""
        state = self.protocol.operators.debug_state()
        return (state["decode"] | state["prefill"])[attempt]

    def expect(self, kind, timeout_s=WAIT_S):
        """The next event of this kind; events that came before it stay in `events`."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.events += take_events(self)
            for index, event in enumerate(self.events):
                if isinstance(event, kind):
                    return self.events.pop(index)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} in {timeout_s} s, but {self.events}"
            self.bell.wait(left_s)
            self.bell.clear()

    def expect_holder(self, other):
        """The other engine may hold a prompt for this one, which can read it."""
        wait_for(lambda: self.protocol.decode.knows_holder(other.agent.member.incarnation),
                 self.protocol.operators.debug_state, WAIT_S)

    def expect_view(self, condition, timeout_s=WAIT_S):
        wait_for(lambda: condition(self.protocol.decode.view()), self.protocol.decode.view, timeout_s)

    def assert_clean(self):
        assert self.agent.error is None
        assert self.protocol.operators.open_attempts() == [] and self.events == [] and take_events(self) == []


@pytest.fixture(params=KINDS)
def broker(request, tmp_path):
    with running(request.param, tmp_path, ttl_s=60.0) as broker:
        yield broker


@pytest.fixture
def engine(request):
    """A factory of engines that are closed, and whose threads must still have lived, at the end."""
    engines = []

    def make(*arguments, **more):
        engines.append(Engine(*arguments, **more))
        return engines[-1]

    yield make
    for one in engines:
        one.close()
        assert one.agent.error is None or isinstance(one.agent.error, Planned)
        assert "link_frame_error" not in one.agent.dropped()


class Planned(Exception):
    """What a test throws into a thread."""


class Clock:
    """As time goes by, and faster where a test says so."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead_s


def fall_back_soon(decode):
    """Where there is no P for a second. The same of a broker is not enough."""
    side = decode.protocol._core.decode_half
    side.limits = msgspec.structs.replace(side.limits, ttl_s=1.0)


@pytest.fixture
def pair(broker, engine):
    """(decode, prefill) that know each other."""
    settings = Settings(broker.address)
    return peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL))


def peered(decode, prefill, room=4):
    prefill.protocol.prefill.set_credits(room)
    decode.expect_view(lambda view: view.broker_up and view.prefill_peers == 1)
    assert prefill.expect(AddPeer) == AddPeer(decode.agent.member.incarnation, b"memory of kv_consumer")
    return decode, prefill


def hand_over(decode, prefill, request_id="r"):
    """A whole hand-over; returns D's timings."""
    attempt = decode.submit(request_id)
    job = prefill.expect(Prefill)
    assert job == Prefill(attempt, TOKENS, [11, 12], 1, [10], decode.agent.member.incarnation)
    assert prefill.protocol.prefill.may_write(attempt)  # D gets a message of it
    decode.bell.wait(2)
    prefill.protocol.prefill.set_credits(4)
    prefill.protocol.prefill.sent(attempt, m.Timings(prefill_s=0.5, transfer_s=0.25, bytes=7))
    wait_for(lambda: decode.state_of(attempt)["measured"], "its word that all was sent has not come")
    decode.protocol.decode.arrived(attempt, 0)
    return decode.expect(Prefilled).timings


@pytest.mark.parametrize("broker, warned", [("tcp://192.0.2.1:4500", True), ("tcp://127.0.0.1:4500", False)])
def test_a_loopback_that_engines_of_other_hosts_cannot_reach_is_warned_of(engine, caplog, broker, warned):
    engine(Settings(broker), m.Role.DECODE)
    warning = "bind=tcp://127.0.0.1:0: engines of other hosts can't reach this one, and the broker is at " + broker
    assert (warning in caplog.text) == warned


def test_an_engine_has_its_lifeline_at_the_port_of_its_settings(engine):
    """Also where one that has ended had it, and visitors. B80: where another one has it, it is refused."""
    settings = Settings("tcp://127.0.0.1:4500", lifeline_port=take_free("127.0.0.1"))
    for _ in range(2):
        first = Engine(settings, m.Role.DECODE)
        assert first.agent.member.lifeline == f"tcp://127.0.0.1:{settings.lifeline_port}"
        with socket.create_connection(("127.0.0.1", settings.lifeline_port), WAIT_S) as visitor:
            said = visitor.recv(100, socket.MSG_WAITALL)
            assert said == greeting(first.agent.member.incarnation)
        first.close()
    engine(settings, m.Role.DECODE)
    with pytest.raises(ConfigError, match=f"lifeline_port={settings.lifeline_port} can't be used: .*write a free port"):
        Engine(settings, m.Role.PREFILL)


@pytest.mark.skipif(not is_free("::1", 0), reason="no IPv6 here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "auto"])
def test_a_hand_over_over_ipv6(kind, bind, tmp_path, engine):
    """With keys. Each sees the other's lifeline there."""
    keys = str(Keys.make(tmp_path))
    with contextlib.ExitStack() as ends:
        if kind == "nats":
            server = NatsServer(tmp_path, host="::1")
            ends.callback(server.kill)
        else:
            server = ends.enter_context(serving("tcp://[::1]:0", ttl_s=60.0, keys=Keys.load(keys)))
        config = PDConfig.parse("kv_both", {"broker": server.address, "bind": bind, "keys": keys, "ttl_s": 60.0})
        decode, prefill = peered(*(engine(config, role, silent_s=60.0) for role in (m.Role.DECODE, m.Role.PREFILL)))
        assert all(url.startswith("tcp://[::1]:") for one in (decode, prefill)
                   for url in (one.agent.member.address, one.agent.member.lifeline))
        hand_over(decode, prefill)
        probes = TcpProbes()
        probes.start(0.0, decode.agent.member.incarnation, decode.agent.member.lifeline)
        wait_for(lambda: probes.poll(0.0) == [(decode.agent.member.incarnation, ProbeAnswer.GREETED)], timeout_s=WAIT_S)
        probes.close()


# By one that had no answer for half a second.
SAID_AGAIN = {"decode_claim_duplicate", "prefill_grant_unknown", "prefill_hello_reply_duplicate"}


def test_a_hand_over_over_the_wire(pair):
    decode, prefill = pair
    begun = time.monotonic()
    timings = hand_over(decode, prefill)
    took_s = time.monotonic() - begun
    assert (timings.prefill_s, timings.transfer_s, timings.bytes, timings.measured) == (0.5, 0.25, 7, True)
    assert 0 < timings.queue_s < took_s and 0 < timings.claim_s < took_s, "a claim that is on its way counts for both"
    for one in pair:
        one.assert_clean()
        assert one.agent.dropped().keys() <= {"link_unsent", *SAID_AGAIN}, "nothing odd was said"
    assert decode.protocol.operators.totals() == {"decode_granted": 1, "decode_done": 1}
    assert prefill.protocol.operators.totals() == {"prefill_granted": 1, "prefill_sent": 1}


def test_b20_many_hand_overs_leave_nothing_behind(pair):
    """And none waits for a heartbeat."""
    decode, prefill = pair
    hand_over(decode, prefill)
    for one in pair:
        cluster = one.protocol._core.cluster
        cluster.heartbeat_s, cluster.silent_s = 10 * WAIT_S, 20 * WAIT_S
    before = [one.agent.counts() for one in pair]
    for number in range(100):
        hand_over(decode, prefill, f"r{number % 3}")
    assert [one.agent.counts() for one in pair] == before


def test_broker_and_peers_are_bounded_by_room(pair):
    decode, prefill = pair
    attempts = [decode.submit(f"r{number}") for number in range(7)]
    taken = [prefill.expect(Prefill).attempt for _ in range(4)]
    time.sleep(0.3)
    assert taken == attempts[:4] and take_events(prefill) == []
    decode.expect_view(lambda view: view.queue_length == 3)
    prefill.protocol.prefill.set_credits(2)
    assert [prefill.expect(Prefill).attempt for _ in range(2)] == attempts[4:6]
    for attempt in attempts:
        decode.protocol.decode.abort(attempt)
    cancelled = [prefill.expect(Cancelled).attempt for _ in range(6)]
    assert set(cancelled) == set(attempts[:6])
    assert decode.expect(Released).attempt == attempts[6], "the one that nobody had"
    for attempt in cancelled:
        prefill.protocol.prefill.ended(attempt)
    assert {decode.expect(Released).attempt for _ in range(6)} == set(attempts[:6])
    decode.assert_clean()
    prefill.assert_clean()


def test_b96_no_prompt_waits_for_a_prefill_engine_that_is_paused(broker, engine):
    """Until it goes on. It stays a member, so what it computes already is finished."""
    settings = Settings(broker.address)
    decode, prefill = peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL), room=0)
    fall_back_soon(decode)
    attempt = decode.submit()
    prefill.protocol.prefill.set_credits(0, is_paused=True)
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.PEER)
    assert decode.expect(Released).attempt == attempt
    assert decode.protocol.decode.view().prefill_peers == 0
    assert not prefill.protocol.state.member().draining, "its front end goes on"
    prefill.protocol.prefill.set_credits(4)
    decode.expect_view(lambda view: view.prefill_peers == 1)
    hand_over(decode, prefill)
    decode.assert_clean()
    prefill.assert_clean()


def test_b96_a_paused_engine_with_clients_is_listed_as_before(broker, engine):
    """They may wait for it, at its front end or behind a router."""
    both = engine(Settings(broker.address), m.Role.BOTH)
    both.protocol.prefill.set_credits(0, is_paused=True)
    assert not both.protocol.state.entry().draining and not both.protocol.state.takes_jobs


def test_b30_failed_at_once_is_not_delivered_again(broker, engine):
    settings = Settings(broker.address, claim_retry_s=0.5)
    decode, prefill = peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL))
    attempt = decode.submit()
    assert prefill.expect(Prefill).attempt == attempt
    prefill.protocol.prefill.set_credits(4)
    prefill.protocol.prefill.failed(attempt, "token id 99999 is not in the vocabulary")
    assert decode.expect(Fallback) == Fallback(attempt, FallbackReason.FAILED, AttemptEnd.FAILED,
                                               "token id 99999 is not in the vocabulary",
                                               prefill.agent.member.incarnation)
    assert decode.expect(Released).attempt == attempt
    time.sleep(0.7)  # longer than claim_retry_s
    decode.assert_clean()
    prefill.assert_clean()


def test_last_words_leave_before_the_sockets_close(pair, monkeypatch):
    monkeypatch.setattr(control_thread, "LINGER_MS", 1000 * WAIT_S)  # who hears them may take its time
    decode, prefill = pair
    attempt = decode.submit()
    prefill.expect(Prefill)
    prefill.protocol.prefill.failed(attempt, "closing")
    prefill.agent.close(WAIT_S)
    assert decode.expect(Fallback).detail == "closing"
    decode.expect_view(lambda view: view.prefill_peers == 0)  # it said goodbye


def test_leases_are_renewed_while_work_goes_on(broker, engine):
    settings = Settings(broker.address, attempt_deadline_s=1000.0)
    clock = Clock()
    decode, prefill = peered(*(engine(settings, role, clock=clock) for role in (m.Role.DECODE, m.Role.PREFILL)))
    attempt = decode.submit()
    prefill.expect(Prefill)
    for _ in range(8):
        clock.ahead_s += 0.4 * settings.lease_s
        for one in (decode, prefill):
            wait_for(lambda one=one: one.state_of(attempt)["lease_until"] - clock() > 0.7 * settings.lease_s)
        assert prefill.protocol.prefill.may_write(attempt) and take_events(prefill) == []
    assert take_events(decode) == []


def test_wakes_come_for_notices_that_are_due_and_never_otherwise(pair):
    decode, prefill = pair

    def woken(times):
        """Wait for so many wakes; how long that takes."""
        begun, wanted = time.monotonic(), decode.wakes + times
        while decode.wakes < wanted:
            assert time.monotonic() < begun + WAIT_S
            time.sleep(0.005)
        return time.monotonic() - begun

    def comes_to_rest():
        """Heartbeats are none of the engine's business."""
        deadline, wakes = time.monotonic() + WAIT_S, -1
        while decode.wakes != wakes:
            assert time.monotonic() < deadline, "it is woken again and again"
            wakes = decode.wakes
            time.sleep(0.4)

    hand_over(decode, prefill)
    comes_to_rest()
    attempt = decode.submit()
    prefill.expect(Prefill)
    woken(2)
    assert woken(3) > 0.15, "while P computes"
    assert prefill.protocol.prefill.may_write(attempt)
    woken(2)
    assert 0.01 < min(woken(20) for _ in range(4)) < 0.8, "while P writes"
    quiet = decode.wakes
    prefill.protocol.prefill.sent(attempt, m.Timings())
    woken(1)
    assert decode.wakes > quiet
    decode.protocol.decode.arrived(attempt, 0)
    decode.expect(Prefilled)
    comes_to_rest()


def test_b33_idle_costs_next_to_nothing(pair):
    decode, prefill = pair
    attempt = decode.submit()
    prefill.expect(Prefill)
    assert least_used_s(0.7) < 0.07, "a broker and two agents, heartbeats ten times as fast as by default"
    prefill.protocol.prefill.failed(attempt, "")


def test_kv_both_engines_serve_each_other_and_never_themselves(broker, engine):
    settings = Settings(broker.address)
    one, two = engine(settings, m.Role.BOTH), engine(settings, m.Role.BOTH)
    for this, other in ((one, two), (two, one)):
        this.protocol.prefill.set_credits(4)
        this.expect_view(lambda view: view.prefill_peers == 1)
        assert this.expect(AddPeer).name == other.agent.member.incarnation
    attempts = one.submit(), two.submit()
    assert two.expect(Prefill).attempt == attempts[0] and one.expect(Prefill).attempt == attempts[1]
    one.protocol.prefill.failed(attempts[1], "")
    two.protocol.prefill.failed(attempts[0], "")
    one.expect(Released), two.expect(Released)


def test_b40_second_engines_join_and_all_are_served(broker, engine):
    settings = Settings(broker.address)
    decodes = [engine(settings, m.Role.DECODE) for _ in range(2)]
    prefills = [engine(settings, m.Role.PREFILL) for _ in range(2)]
    for prefill in prefills:
        prefill.protocol.prefill.set_credits(2)
        prefill.expect(AddPeer), prefill.expect(AddPeer)
    for decode in decodes:  # which a P may know before the broker has answered it
        decode.expect_view(lambda view: view.broker_up and view.prefill_peers == 2)
    attempts = {one.submit(f"r{number}") for number in range(2) for one in decodes}
    assert {prefill.expect(Prefill).attempt for prefill in prefills for _ in range(2)} == attempts


# B26: the broker comes and goes.


def test_b26_gone_at_submit_and_back_without_a_restart_of_anything(broker, engine):
    settings = Settings(broker.address, ttl_s=5.0)  # so long it may be waited for
    decode, prefill = peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL))
    broker.kill()
    attempt = decode.submit()
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.BROKER)
    assert decode.expect(Released).attempt == attempt
    decode.expect_view(lambda view: not view.broker_up)
    broker.start()
    decode.expect_view(lambda view: view.broker_up and view.prefill_peers == 1)
    hand_over(decode, prefill)
    decode.assert_clean()
    prefill.assert_clean()


def until_queued(decode, jobs):
    """The broker has said that it has so many."""
    debug_state = decode.protocol.operators.debug_state
    wait_for(lambda: debug_state()["queue_length"] == jobs, debug_state)


def test_b26_gone_while_a_job_waits(broker, engine):
    settings = Settings(broker.address, ttl_s=4.0)
    decode, prefill = peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL), room=1)
    granted = decode.submit()
    prefill.expect(Prefill)
    until_queued(decode, 0)
    waiting = decode.submit()
    until_queued(decode, 1)
    broker.kill()
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (waiting, FallbackReason.BROKER)
    assert decode.expect(Released).attempt == waiting
    # what was granted goes on without a broker
    prefill.protocol.prefill.sent(granted, m.Timings())
    decode.protocol.decode.arrived(granted, 0)
    assert decode.expect(Prefilled).attempt == granted
    broker.start()  # for the end of it all


def test_b26_back_in_time_the_job_is_still_done(broker, engine):
    settings = Settings(broker.address)
    decode, prefill = peered(engine(settings, m.Role.DECODE), engine(settings, m.Role.PREFILL), room=0)
    waiting = decode.submit()
    until_queued(decode, 1)
    broker.kill()
    decode.expect_view(lambda view: not view.broker_up)
    broker.start()
    decode.expect_view(lambda view: view.broker_up and view.queue_length == 1)
    prefill.protocol.prefill.set_credits(1)
    assert prefill.expect(Prefill).attempt == waiting


def test_broker_that_is_silent_but_connected_counts_as_away(broker, engine):
    """As when it is stopped by a signal."""
    decode = engine(Settings(broker.address), m.Role.DECODE, silent_s=0.3)
    decode.expect_view(lambda view: view.broker_up)
    with broker.silent():
        decode.expect_view(lambda view: not view.broker_up)
    decode.expect_view(lambda view: view.broker_up)


# Real processes.

PROGRAM = """
import sys, threading
sys.path.insert(0, sys.argv[3])
from dataclasses import dataclass
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import *
import msgspec
@dataclass
class Settings:
    broker: str = sys.argv[2]; bind: str = "tcp://127.0.0.1:0"; lease_s: float = 30.0; attempt_deadline_s: float = 60.0
    max_prefill_tokens: int = 65536; decides_by_time: bool = False; is_two_sided: bool = False; hold_s: float = 30.0
    claim_retry_s: float = 10.0; heartbeat_s: float = 0.1; ttl_s: float = 60.0; keys: str | None = None
    nats_prefix: str = "test"; nats_credentials: str | None = None; nats_ca: str | None = None
    metaserver_urls: tuple = (); lifeline_port: int = 0; zone: str | None = None
bell = threading.Event()
fingerprint = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
agent = ControlAgent(Settings(), local_member(m.Role(sys.argv[1]), fingerprint), b"m", bell.set)
agent.start()
agent.protocol.prefill.set_credits(4)
while True:
    bell.wait(0.05)
    bell.clear()
    for event in iter(agent.protocol.poll_event, None):
        if isinstance(event, Cancelled):
            agent.protocol.prefill.ended(event.attempt)
        print(type(event).__name__, flush=True)
    protocol = agent.protocol
    is_idle = protocol.decode.view().prefill_peers and not protocol.operators.open_attempts()
    if agent.member.role is m.Role.DECODE and is_idle:
        protocol.decode.submit(protocol.decode.next_attempt("r"), list(range(40)), [1, 2, 3], 0)
"""


@contextlib.contextmanager
def other_process(role, broker):
    """An engine in a process of its own, which prints the names of its events."""
    root = os.path.dirname(os.path.dirname(sys.modules["vllm_pd"].__path__[0] + "/"))
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, role.value, broker.address, root],
                             stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait(WAIT_S)
        child.stdout.close()


def until_said(child, event):
    for line in iter(child.stdout.readline, ""):
        if line == f"{event}\n":
            return
    raise AssertionError(f"it has ended without {event}")


def test_b21_prefill_engine_killed(broker, engine):
    decode = engine(Settings(broker.address), m.Role.DECODE)
    with other_process(m.Role.PREFILL, broker) as child:
        decode.expect_view(lambda view: view.prefill_peers == 1)
        attempt = decode.submit()
        until_said(child, "Prefill")
        child.kill()  # and not yet waited for: what is left of it is no process
        fallback = decode.expect(Fallback, timeout_s=20.0)  # neither the lease, of 30 s, nor the registry, of 60
        assert fallback.attempt == attempt
        assert (fallback.reason, fallback.outcome) == (FallbackReason.PEER, AttemptEnd.FAILED)
        assert decode.expect(Released).attempt == attempt
        decode.expect_view(lambda view: view.prefill_peers == 0, timeout_s=20.0)
    decode.assert_clean()


def test_b21_death_is_believed_at_a_second_look_and_what_comes_late_is_dropped(broker, engine):
    gone, looks, shown = set(), [], {}

    def clock():
        """Remembers what it has shown to each thread: its look is of that moment, however long it takes."""
        shown[threading.get_ident()] = now = time.monotonic()
        return now

    def is_gone(member):
        if member.incarnation in gone:
            looks.append(shown[threading.get_ident()])
        return member.incarnation in gone

    settings = Settings(broker.address)
    decode = engine(settings, m.Role.DECODE, is_gone=is_gone, clock=clock)
    peered(decode, prefill := engine(settings, m.Role.PREFILL))
    attempt = decode.submit()
    prefill.expect(Prefill)
    name = prefill.agent.member.incarnation
    gone.add(name)
    assert decode.expect(Fallback).attempt == attempt
    assert decode.expect(Released).attempt == attempt
    assert len(looks) >= 2 and looks[-1] - looks[0] >= GRACE_S - 0.01
    line = Raw(decode.agent.member.address)
    line.socket.send(codec.encode(name, m.Hello(prefill.agent.member, b"")))
    wait_for(lambda: decode.agent.dropped().get("link_dead_sender"))
    assert not line.socket.poll(300), "a dead one is not let in again, for nothing would watch it"
    line.close()
    assert name not in decode.protocol.operators.debug_state()["peers"]
    assert decode.protocol.decode.view().prefill_peers == 0
    decode.assert_clean()


def test_b25_a_prefill_engine_that_is_listed_but_does_not_reach_us_is_not_waited_for(broker, engine, monkeypatch):
    """Its hello is lost, as behind a firewall, or with other keys."""
    monkeypatch.setattr(PrefillProtocol, "members_are", lambda *_: [])
    decode, prefill = (engine(Settings(broker.address), role) for role in (m.Role.DECODE, m.Role.PREFILL))
    fall_back_soon(decode)
    wait_for(lambda: decode.protocol.operators.debug_state()["members"])
    assert decode.protocol.decode.view().broker_up and decode.protocol.decode.view().prefill_peers == 0
    attempt = decode.submit()
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.PEER)
    assert decode.expect(Released).attempt == attempt
    prefill.assert_clean()


def test_b41_a_decode_engine_is_met_although_no_descriptor_was_left_when_it_came(broker, engine, monkeypatch):
    connected = []

    def connection(context, address, keys, changed, **options):
        connected.append(address)
        if len(connected) == 1:
            raise zmq.ZMQError(errno.EMFILE)
        return WatchedConnection(context, address, keys, changed, **options)

    monkeypatch.setattr(control_sockets, "WatchedConnection", connection)
    prefill, decode = (engine(Settings(broker.address), role) for role in (m.Role.PREFILL, m.Role.DECODE))
    assert prefill.expect(AddPeer).name == decode.agent.member.incarnation
    assert prefill.agent.dropped()["link_address_bad"] == 1 and prefill.protocol.operators.counts()["peers"] == 1
    assert connected[:2] == [decode.agent.member.address] * 2, "and no more than one is open"


@pytest.mark.parametrize("lock", ["protocol", "waker", "transfer"])
def test_b20_a_forked_child_that_ends_waits_for_no_lock_of_its_parent(broker, engine, lock):
    """A thread of the parent held it at the fork, and the child does not have that thread."""
    decode = engine(Settings(broker.address), m.Role.DECODE)
    transfer = EngineTransfer(SimpleNamespace(moving=False, busy=False, close=lambda: True,
                                              take_progress=lambda: TransferProgress([], [], [])))
    transfer.start(lambda: None, lambda end: None)
    holds, forked = threading.Event(), threading.Event()
    ended = finalize(forked, close_engine, decode.agent, transfer)
    locks = {"protocol": decode.protocol._core.lock, "waker": decode.agent.thread.sockets.waker._lock,
             "transfer": transfer._thread._wakeup_lock}

    def hold():
        with locks[lock]:
            holds.set()
            forked.wait()

    threading.Thread(target=hold).start()
    holds.wait()
    child = os.fork()
    if not child:
        ended()
        os._exit(7)
    forked.set()
    with contextlib.closing(ForkedProcess(child)) as forked_process:
        forked_process.wait(WAIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ended.alive and decode.agent.thread.is_alive()
    ended()
    assert not decode.agent.thread.is_alive()


def test_b22_prefill_engine_stopped_for_longer_than_its_lease(broker, engine):
    clock = Clock()
    settings = Settings(broker.address)
    decode = engine(settings, m.Role.DECODE, clock=clock)
    with other_process(m.Role.PREFILL, broker) as child:
        decode.expect_view(lambda view: view.prefill_peers == 1)
        attempt = decode.submit()
        until_said(child, "Prefill")
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        clock.ahead_s += settings.lease_s
        fallback = decode.expect(Fallback)
        assert fallback.attempt == attempt
        assert (fallback.reason, fallback.outcome) == (FallbackReason.LEASE, AttemptEnd.EXPIRED)
        clock.ahead_s += 10_000.0
        wait_for(lambda: decode.state_of(attempt)["next_cancel"] > clock())
        assert take_events(decode) == [] and decode.protocol.operators.open_attempts() == [attempt], "not by time alone"
        child.send_signal(signal.SIGCONT)
        assert decode.expect(Released).attempt == attempt
        assert child.stdout.readline() == "Cancelled\n"
    decode.assert_clean()


def test_b23_decode_engine_killed(broker, engine):
    prefill = engine(Settings(broker.address), m.Role.PREFILL)
    prefill.protocol.prefill.set_credits(4)
    with other_process(m.Role.DECODE, broker) as child:
        peer = prefill.expect(AddPeer).name
        attempt = prefill.expect(Prefill).attempt
        child.kill()
        assert prefill.expect(Cancelled, timeout_s=20.0).attempt == attempt
        assert not prefill.protocol.prefill.may_write(attempt)
        assert DropPeer(peer) not in take_events(prefill)
        prefill.protocol.prefill.ended(attempt)
        assert prefill.expect(DropPeer).name == peer
    prefill.assert_clean()


def test_what_counts_as_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = local_member(m.Role.PREFILL, FINGERPRINT)
    assert not process.is_gone(here)
    alive = m.Process(child.pid, process.start_time(child.pid))
    reused = msgspec.structs.replace(alive, start_time=1)
    member = msgspec.structs.replace(here, processes=(alive,))
    assert not process.is_gone(member)
    assert process.is_gone(msgspec.structs.replace(member, processes=(reused,))), "the pid has a new owner"
    elsewhere = msgspec.structs.replace(member, host_id="another boot", processes=(reused,))
    assert not process.is_gone(elsewhere), "silence across hosts is no death"
    assert not process.is_gone(msgspec.structs.replace(member, host_id="", processes=(reused,)))
    assert not process.is_gone(msgspec.structs.replace(member, processes=(reused, alive))), "one of its ranks lives"
    child.kill()
    wait_for(lambda: process.is_gone(member))  # a zombie is
    child.wait(WAIT_S)
    child.stdin.close()
    assert process.is_gone(member)


# Peers that don't fit, noise, and our own faults.


def test_b42_mismatch_names_both_values_and_traffic_stays_local(broker, engine):
    settings = Settings(broker.address)
    decode = engine(settings, m.Role.DECODE)
    fall_back_soon(decode)
    prefill = engine(settings, m.Role.PREFILL, msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8"))
    prefill.protocol.prefill.set_credits(4)
    for one, words in ((decode, ["kv_dtype", "'float32'", "'fp8'"]), (prefill, ["kv_dtype", "'fp8'", "'float32'"])):
        one.expect_view(lambda view: view.mismatch is not None)
        assert all(word in one.protocol.decode.view().mismatch for word in words)
        assert one.protocol.decode.view().prefill_peers == 0
    decode.submit()
    assert decode.expect(Fallback).reason is FallbackReason.PEER


class Raw:
    """A socket that may say anything to an engine."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.connect(address)

    def ask(self, sender, message):
        self.socket.send(codec.encode(sender, message))
        assert self.socket.poll(1000 * WAIT_S)
        return codec.decode(self.socket.recv_multipart())[1]

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def raw(pair):
    raw = Raw(pair[0].agent.member.address)
    yield raw
    raw.close()


def test_b42_refused_at_peering_even_if_the_registry_is_not_asked(pair, raw):
    stranger = m.Member("x", m.Role.PREFILL, "", msgspec.structs.replace(FINGERPRINT, protocol=9))
    assert raw.ask("x", m.Hello(stranger, b"")) == m.Refused("protocol", str(m.PROTOCOL), "9")
    attempt = pair[0].protocol.decode.next_attempt("r")
    assert raw.ask("x", m.Claim(attempt, 1)).reason is m.DenyReason.UNKNOWN
    pair[0].expect_view(lambda view: "theirs is 9" in (view.mismatch or ""))


def test_b42_frames_of_another_protocol_show_in_the_view(pair, raw, monkeypatch):
    warnings = []
    monkeypatch.setattr(control_thread.logger, "warning", lambda *words: warnings.append(words))
    raw.socket.send(b"PD" + bytes((m.PROTOCOL + 1,)) + b"from the future")
    pair[0].expect_view(lambda view: f"ours is {m.PROTOCOL}, theirs is {m.PROTOCOL + 1}" in (view.mismatch or ""))
    raw.socket.send(b"PD" + bytes((m.PROTOCOL + 1,)) + b"again")
    wait_for(lambda: pair[0].agent.dropped()["link_frame_version"] == 2)
    time.sleep(0.05)
    assert len(warnings) == 1, "said once"


def test_b29_a_stranger_can_neither_claim_nor_end_anything(pair, raw):
    decode, prefill = pair
    attempt = decode.submit()
    prefill.expect(Prefill)
    assert raw.ask("x", m.Claim(attempt, 1)).reason is m.DenyReason.UNPEERED
    for word in (m.Failed(attempt, 1, ""), m.Stopped(attempt, 1), m.Sent(attempt, 1, m.Timings())):
        raw.socket.send(codec.encode("x", word))
    assert raw.ask("x", m.Renew(attempt, 1, 1)) == m.Cancel(attempt, 1)
    assert take_events(decode) == [] and decode.protocol.operators.open_attempts() == [attempt]
    dropped = decode.agent.dropped()
    assert [dropped[f"decode_{word}_unknown"] for word in ("failed", "stopped", "sent", "renew")] == [1, 1, 1, 1]


def test_b81_noise_is_counted_and_dropped(pair, raw):
    decode, prefill = pair
    dice = random.Random(11)
    attempt = decode.submit()
    prefill.expect(Prefill)
    good = [codec.encode("x", message) for message in (
        m.Hello(prefill.agent.member, b""), m.Claim(attempt, 1), m.Renew(attempt, 1, 1), m.Failed(attempt, 2, "w"))]
    other = [codec.encode("x", m.Leave()), codec.encode("x", m.Cancel(attempt, 1)),
             b"PD" + bytes((m.PROTOCOL + 1,)) + b"from the future"]
    send_noise(raw.socket, dice, good, other, 1000)
    huge = Raw(decode.agent.member.address)
    huge.socket.send(bytes(codec.MAX_FRAME_BYTES + 1))
    fresh = Raw(decode.agent.member.address)
    stranger = msgspec.structs.replace(prefill.agent.member, incarnation="new")
    assert isinstance(fresh.ask("new", m.Hello(stranger, b"")), m.HelloReply)
    huge.close()
    fresh.close()
    wanted = {"unexpected": 59, "shape": 30, "content": 30, "version": 30}
    wait_for(lambda: all(decode.agent.dropped().get(f"link_frame_{kind}", 0) > count for kind, count in wanted.items()),
             decode.agent.dropped)
    assert decode.protocol.operators.open_attempts() == [attempt]
    prefill.protocol.prefill.sent(attempt, m.Timings())
    decode.protocol.decode.arrived(attempt, 0)
    assert decode.expect(Prefilled).attempt == attempt


def test_b81_noise_from_a_broker_and_from_a_decode_engine(engine):
    dice = random.Random(13)
    context = zmq.Context()
    broker, decode = (context.socket(zmq.ROUTER) for _ in range(2))
    for router in (broker, decode):
        router.setsockopt(zmq.LINGER, 0)
        router.bind("tcp://127.0.0.1:*")
    address = decode.getsockopt_string(zmq.LAST_ENDPOINT)
    prefill = engine(Settings(broker.getsockopt_string(zmq.LAST_ENDPOINT)), m.Role.PREFILL)
    d = m.Member("d", m.Role.DECODE, address, FINGERPRINT)
    attempt = m.Attempt("d", "r", 1)

    def noise(socket, route, frames):
        for _ in range(400):
            frame = bytearray(dice.choice(frames))
            frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
            cut = dice.choice([len(frame), dice.randrange(len(frame))])
            socket.send_multipart([route, bytes(frame[:cut])])
            socket.send_multipart([route, dice.randbytes(dice.randrange(100))])

    assert broker.poll(1000 * WAIT_S)
    route = broker.recv_multipart()[0]
    noise(broker, route, [codec.encode("b", m.Heard("b", 1)), codec.encode("b", m.Cancel(attempt, 1))])
    broker.send_multipart([route, codec.encode("b", m.Peers("b", 5, [d], 0))])
    assert decode.poll(1000 * WAIT_S)
    route = decode.recv_multipart()[0]
    words = [codec.encode("d", word) for word in (
        m.Grant(attempt, 1, [1, 2, 3], 0, 9.0), m.Deny(attempt, 1, m.DenyReason.TAKEN), m.Cancel(attempt, 1),
        m.Renewed(attempt, 1, 1, 9.0), m.Claim(attempt, 1))]
    noise(decode, route, words)
    decode.send_multipart([route, codec.encode("other", m.HelloReply(d, b"x"))])  # another process at that address
    decode.send_multipart([route, codec.encode("d", m.HelloReply(d, b"x"))])
    assert prefill.expect(AddPeer) == AddPeer("d", b"x")
    assert prefill.agent.error is None
    assert prefill.protocol.operators.open_attempts() == [] and take_events(prefill) == []
    assert prefill.agent.dropped()["link_frame_shape"] > 400
    prefill.agent.close()
    context.destroy()


def test_death_of_the_thread_is_told_and_all_stays_local(pair):
    decode, prefill = pair
    granted = decode.submit()
    prefill.expect(Prefill)

    def fail(now):
        raise Planned("a fault of ours")

    decode.protocol._core.decode_half.handle_timeout = fail
    decode.agent.thread.sockets.waker.set()
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (granted, FallbackReason.CONTROL)
    assert isinstance(decode.agent.error, Planned) and not decode.protocol.decode.view().broker_up
    later = decode.submit()
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (later, FallbackReason.CONTROL)
    assert decode.expect(Released).attempt == later
    decode.protocol.decode.abort(granted), decode.protocol.decode.arrived(granted, 0)
    decode.protocol.prefill.set_credits(1)
    decode.agent.counts()
    decode.agent.close()


def test_one_message_with_an_unexpected_error_does_not_end_the_thread(pair, raw):
    decode, _ = pair

    def fail(now, sender, message):
        raise Planned("a fault of ours")

    receive, decode.protocol._core.decode_half.receive = decode.protocol._core.decode_half.receive, fail
    raw.socket.send(codec.encode("x", m.Renew(decode.protocol.decode.next_attempt("r"), 1, 1)))
    wait_for(lambda: "link_frame_error" in decode.agent.dropped())
    decode.protocol._core.decode_half.receive = receive
    assert decode.agent.error is None
    del decode.agent._socket_counters["frame_error"]
    assert isinstance(raw.ask("x", m.Renew(decode.protocol.decode.next_attempt("r"), 1, 1)), m.Cancel)


def test_b80_addresses_that_can_not_be_used_are_refused_at_start(broker):
    for key, settings in (("bind", Settings(broker.address, bind=broker.address)), ("broker", Settings("nonsense")),
                          ("broker", Settings("tcp://127.0.0.1:x"))):
        agent = ControlAgent(settings, local_member(m.Role.DECODE, FINGERPRINT), b"", lambda: None)
        with pytest.raises(ConfigError, match=f"^{key}="):
            agent.start()
        agent.close()


def test_b24_restarts_leave_no_descriptor_and_no_thread(broker, engine, monkeypatch):
    monkeypatch.setattr(control_thread, "LINGER_MS", 1000 * WAIT_S)  # each says goodbye to a broker that may be slow
    settings = Settings(broker.address)
    decode = engine(settings, m.Role.DECODE)
    decode.expect_view(lambda view: view.broker_up)

    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def restart():
        prefill = Engine(settings, m.Role.PREFILL)
        prefill.expect(AddPeer)
        prefill.close()

    restart()
    time.sleep(0.3)
    before = held()
    for _ in range(12):
        restart()
    wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), lambda: (before, held()))
    decode.expect_view(lambda view: view.prefill_peers == 0)


@pytest.mark.parametrize("answers", [True, False])
def test_b22_b102_an_engine_that_ends_waits_for_those_that_read_its_blocks(pair, monkeypatch, answers):
    """Not longer than it may: a D that is stopped does not hold it up."""
    monkeypatch.setattr(control_thread, "READS_S", WAIT_S if answers else 0.2)
    d, p = pair
    d.expect_holder(p)
    hold, attempt = p.protocol.decode.next_attempt("random"), d.protocol.decode.next_attempt("r")
    assert p.protocol.prefill.hold(hold, b"d" * 32, [4, 5, 6])
    d.protocol.decode.claim_hold(attempt, hold, b"d" * 32, [1, 2, 3], 0, 60.0)
    assert d.expect(ReadHold).remote_block_ids == [4, 5, 6]
    ending = threading.Thread(target=p.close)
    ending.start()
    assert d.expect(Fallback).reason is FallbackReason.HOLD and d.expect(StopRead).attempt == attempt
    if answers:
        assert p.agent.thread.is_alive()
        d.protocol.decode.read_ended(attempt, "")
        assert d.expect(Released).attempt == attempt
    ending.join(WAIT_S)
    assert not p.agent.thread.is_alive() and p.protocol.prefill.is_read() is not answers
    assert (HoldEnded(hold, HoldEnd.DONE) in take_events(p)) is answers


def cut(address):
    """End the connections of this process to that address, as a firewall may."""
    port = int(address.rpartition(":")[2])
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket, or no connection
            one = socket.socket(fileno=number)
            try:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    one.shutdown(socket.SHUT_RDWR)
            finally:
                one.detach()


def replies(prefill):
    """How often a decode engine that knows it has answered its Hello."""
    return prefill.agent.dropped().get("prefill_hello_reply_duplicate", 0)


def test_b102_a_p_whose_connection_was_cut_while_it_was_idle_is_reached(pair):
    """D knows it by its connection, and with prefill first D speaks first."""
    d, p = pair
    d.expect_holder(p)
    hold, attempt = p.protocol.decode.next_attempt("random"), d.protocol.decode.next_attempt("r")
    assert p.protocol.prefill.hold(hold, b"d" * 32, [4, 5, 6])
    greetings = replies(p)
    cut(d.agent.member.address)
    wait_for(lambda: replies(p) > greetings, "it has not greeted D again", 10.0)
    d.protocol.decode.claim_hold(attempt, hold, b"d" * 32, [1, 2, 3], 0, 60.0)
    assert d.expect(ReadHold).remote_block_ids == [4, 5, 6]
    d.protocol.decode.read_ended(attempt, "")
    assert p.expect(HoldEnded) == HoldEnded(hold, HoldEnd.DONE)


@pytest.fixture
def control():
    """A factory of the sockets of engines, by name; the test does what their threads would do."""
    made = []

    def make(name, keys=None):
        made.append(control_sockets.ControlSockets(name, Settings("tcp://127.0.0.1:1", keys=keys)))
        return made[-1]

    yield make
    for one in made:
        one.close(0)


P_HELLO = m.Hello(m.Member("P", m.Role.PREFILL, "", FINGERPRINT), b"memory of P")


def test_a_decode_engine_that_began_anew_at_its_address_reaches_p(control, tmp_path):
    """libzmq opens P's connection to the one before again, after that to the new one. The reply to the Hello on the
    former has P speak on the latter. Without keys the first one that stands counts, until P has closed it."""
    keys = str(Keys.make(tmp_path / "keys"))
    d, p = control("new D", keys), control("P", keys)

    def turn():
        for one in (p, d):
            list(one.receive(one.poll(0.01)))

    p.connect("new D", d.address)
    p.to_decode("new D", P_HELLO)
    wait_for(lambda: "P" in d._routes, meanwhile=turn)
    right = d._routes["P"]
    p.connect("old D", d.address)
    wait_for(lambda: d._routes["P"] != right, meanwhile=turn)
    member = m.Member("new D", m.Role.DECODE, "", FINGERPRINT)
    d.to_prefill("P", m.HelloReply(member, b"memory of D"))
    wait_for(lambda: d._routes["P"] == right, meanwhile=turn)
    assert p.counters["frame_other_sender"] == 1


def test_b110_a_name_belongs_to_the_first_connection_of_a_prefill_engine_that_stands(control):
    """B110: nobody else gets what D sends to P, or says in its name that it writes no more. Once that connection is
    gone, another may be P's."""
    d, p, thief = control("D"), control("P"), control("P")
    got = []

    def turn():
        for one in (p, thief):
            list(one.receive(one.poll(0.01)))
        got.extend(message for _, _, message in d.receive(d.poll(0.01)))

    for one in (p, thief):
        one.connect("D", d.address)
    p.to_decode("D", P_HELLO)
    wait_for(lambda: got == [P_HELLO], meanwhile=turn)
    assert d.to_prefill("P", m.HelloReply(m.Member("D", m.Role.DECODE, "", FINGERPRINT), b"")) is SendResult.SENT
    right = d._routes["P"]
    for message in (P_HELLO, m.Stopped(m.Attempt("D", "r", 0), 1)):
        thief.to_decode("D", message)
    wait_for(lambda: d.counters["name_taken"] == 2, meanwhile=turn)
    assert got == [P_HELLO] and d._routes["P"] == right
    p.disconnect("D")

    def thief_is_heard():
        thief.to_decode("D", P_HELLO)
        return len(got) == 2

    wait_for(thief_is_heard, meanwhile=turn)


def test_operators_take_no_place_of_a_prefill_engine(control, monkeypatch):
    monkeypatch.setattr(control_sockets, "MAX_ROUTES", 10)
    d, p = control("D"), control("P")
    p.connect("D", d.address)
    p.to_decode("D", P_HELLO)
    wait_for(lambda: "P" in d._routes, meanwhile=lambda: [list(one.receive(one.poll(0.01))) for one in (p, d)])
    for number in range(300):
        d._open(d._router, [b"gone", codec.encode(f"operator-{number}", m.Status())])
    assert d.to_prefill("P", P_HELLO) is SendResult.SENT and len(d._operators) == control_sockets.MAX_OPERATORS


def test_no_hello_waits_for_a_decode_engine_that_is_not_reached(control):
    """One is sent as soon as it is, and one more for each new connection."""
    p, address = control("P"), f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
    p.connect("D", address)
    for _ in range(10):
        assert p.to_decode("D", P_HELLO) is SendResult.FULL
    context = zmq.Context()
    d = sockets.server(context, address)

    def hellos(at_least):
        """The messages that D gets, with their routes."""
        found = []
        wait_for(lambda: found.extend(iter(lambda: sockets.receive(d), None)) or len(found) >= at_least,
                 meanwhile=lambda: list(p.receive(p.poll(0.01))))
        return [(route, codec.decode([frame])) for route, frame in found]

    (first, message), = hellos(1)
    assert message == ("P", P_HELLO)
    cut(address)
    (second, message), = hellos(1)
    assert message == ("P", P_HELLO) and second != first
    context.destroy(linger=0)


@pytest.mark.parametrize("ended", [True, False])
def test_b22_what_a_p_may_write_outlives_the_engine(pair, ended):
    """D's engine closes while a P has its grant."""
    d, p = pair
    attempt = d.submit()
    p.expect(Prefill)
    kept.keep(rank_name(d.agent.member.incarnation, 0), [])
    if ended:
        p.protocol.prefill.failed(attempt, "a fault of ours")
        assert d.expect(Released).attempt == attempt
    close_engine(d.agent, SimpleNamespace(close=lambda: True))
    assert (rank_name(d.agent.member.incarnation, 0) in kept._caches) is not ended
    assert (d.agent._lifeline.fileno() < 0) is ended
    kept.release(d.agent.member.incarnation)


@pytest.mark.parametrize("how", ["its thread died", "D has not said so", "D has read it"])
def test_b22_b102_what_a_d_may_read_outlives_the_engine(pair, monkeypatch, how):
    """P's engine closes, and its process lives on: D's read, which it knows nothing of, may still succeed. So the
    memory is not freed, and P is not dead for others, unless D has said that it reads nothing any more."""
    monkeypatch.setattr(control_thread, "READS_S", 0.2)
    d, p = pair
    d.expect_holder(p)
    hold, attempt = p.protocol.decode.next_attempt("random"), d.protocol.decode.next_attempt("r")
    assert p.protocol.prefill.hold(hold, b"d" * 32, [4, 5, 6])
    d.protocol.decode.claim_hold(attempt, hold, b"d" * 32, [1, 2, 3], 0, 60.0)
    d.expect(ReadHold)
    if how == "D has read it":
        d.protocol.decode.read_ended(attempt, "")
        assert p.expect(HoldEnded) == HoldEnded(hold, HoldEnd.DONE)
    elif how == "its thread died":
        def fail(now):
            raise Planned("a fault of ours")

        p.protocol._core.prefill_half.handle_timeout = fail
        p.agent.thread.sockets.waker.set()
        wait_for(lambda: not p.agent.thread.is_alive(), "the thread has not ended")
        assert take_events(p) == [], "P's engine goes on, and holds what is claimed"
    monkeypatch.setattr(generations, "NixlGenerations", lambda name, caches, description, progress_thread, host: None)
    cache = CacheTensor()
    TransportChoice().make(rank_name(p.agent.member.incarnation, 0), [cache], None, True)
    freed = weakref.ref(cache)
    del cache
    close_engine(p.agent, SimpleNamespace(close=lambda: True))
    gc.collect()
    ended = how == "D has read it"
    assert (freed() is None) is ended and (p.agent._lifeline.fileno() < 0) is ended
    kept.release(p.agent.member.incarnation)


class CacheTensor:
    """In the place of a tensor."""
