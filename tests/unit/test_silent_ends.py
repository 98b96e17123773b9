# SPDX-License-Identifier: Apache-2.0
"""B22: what becomes of prompts while a prefill engine and a decode engine can't reach each other any more, or while a
prefill engine's step loop hangs, and of those of everybody else. The real protocols and registry, in virtual time."""
import collections
import statistics

import pytest

from vllm_pd.broker.registry import QueueLimits, Registry
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.peer.step_watch import HUNG_S, StepWatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    Cancelled,
    Fallback,
    FallbackReason,
    Prefill,
    Prefilled,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
TICK_S = 0.1
PREFILL_S = 0.5
ROOM = 8  # jobs
ROLES = {"p": (m.Role.PREFILL, "kv_producer"), "d": (m.Role.DECODE, "kv_consumer"), "e": (m.Role.DECODE, "kv_consumer")}


class Fleet:
    """One prefill engine, p, and two decode engines. `cut`: nothing goes between p and these. `hangs`: p's engine looks
    for nothing and computes nothing; its protocol lives."""

    def __init__(self):
        self.now = 0.0
        self.registry = Registry("b", QueueLimits())
        self.nodes = {
            name: PeerProtocol(PDConfig.parse(role, {"broker": "tcp://127.0.0.1:9"}),
                               m.Member(name, kind, "tcp://127.0.0.1:1", FINGERPRINT), b"memory", lambda: self.now)
            for name, (kind, role) in ROLES.items()}
        self.cut: set[str] = set()
        self.hangs = False
        self.submitted: dict[m.Attempt, float] = {}
        self.ends: dict[m.Attempt, Prefilled | Fallback] = {}
        self.waits: dict[str, list[float]] = collections.defaultdict(list)
        self.running: dict[m.Attempt, float] = {}
        self.runs(1.5)

    def submit(self, name):
        attempt = self.nodes[name].decode.next_attempt("r")
        self.submitted[attempt] = self.now
        self.nodes[name].decode.submit(attempt, list(range(2000)), list(range(125)), 0)
        return attempt

    def runs(self, seconds, **every):
        """Let time pass. Meanwhile each of these decode engines gets a prompt every so many seconds."""
        due = dict.fromkeys(every, self.now)
        until = self.now + seconds
        while self.now < until:
            for name, period in every.items():
                if self.now >= due[name]:
                    due[name] += period
                    self.submit(name)
            self._tick()
            self.now = round(self.now + TICK_S, 3)

    def _tick(self):
        self._deliver(self.registry.handle_timeout(self.now))
        for node in self.nodes.values():
            node.control.handle_timeout()
        if not self.hangs:
            self._step()
        moved = True
        while moved:
            moved = False
            for name, node in self.nodes.items():
                while (action := node.control.poll_transmit()) is not None:
                    moved = True
                    self._carry(name, action)
        for name in ("d", "e"):
            for event in iter(self.nodes[name].poll_event, None):
                if isinstance(event, (Prefilled, Fallback)):
                    assert event.attempt not in self.ends
                    self.ends[event.attempt] = event
                    self.waits[name].append(self.now - self.submitted[event.attempt])

    def _carry(self, name, action):
        if isinstance(action, ToBroker):
            self._deliver(self.registry.receive(self.now, name, action.message))
        elif isinstance(action, ToDecode) and action.peer not in self.cut:
            self.nodes[action.peer].control.receive(MessageSource.PREFILL, name, action.message)
        elif isinstance(action, ToPrefill) and name not in self.cut:
            self.nodes[action.peer].control.receive(MessageSource.DECODE, name, action.message)

    def _deliver(self, letters):
        for to, message in letters:
            self.nodes[to].control.receive(MessageSource.BROKER, "b", message)

    def _step(self):
        p = self.nodes["p"]
        for event in iter(p.poll_event, None):
            if isinstance(event, Prefill):
                self.running[event.attempt] = self.now + PREFILL_S
            elif isinstance(event, Cancelled):
                del self.running[event.attempt]
                p.prefill.ended(event.attempt)
        for attempt in [attempt for attempt, until in self.running.items() if self.now >= until]:
            del self.running[attempt]
            if p.prefill.may_write(attempt):
                p.prefill.sent(attempt, m.Timings())
                self.nodes[attempt.incarnation].decode.arrived(attempt, 0)
            else:
                p.prefill.failed(attempt, "the lease is over")
        p.prefill.set_credits(ROOM - len(self.running), 2000 * len(self.running))

    def counted(self, name):
        """How many prefill engines that one counts."""
        return self.nodes[name].decode.view().prefill_peers

    def reasons(self, since):
        """Of the prompts that came since then and have ended: why, None for those that were prefilled."""
        return [getattr(end, "reason", None) for attempt, end in self.ends.items() if self.submitted[attempt] >= since]


@pytest.fixture
def fleet():
    fleet = Fleet()
    fleet.runs(1.0, d=0.5, e=0.5)
    fleet.runs(1.0)
    assert fleet.reasons(0.0) == [None] * 4
    fleet.waits.clear()
    return fleet


def test_b22_jobs_that_can_not_be_claimed_end_soon_and_keep_no_place_from_others(fleet):
    cut_at = fleet.now
    fleet.cut = {"d"}
    fleet.runs(10.0, d=0.5, e=2.0)
    assert fleet.counted("d") == 0 and fleet.counted("e") == 1, "everybody knows, and d decides by it"
    fleet.runs(10.0, d=0.5, e=2.0)
    fleet.runs(40.0, e=2.0)
    limits = DecodeLimits()
    bound = PrefillLimits().claim_wait_s + limits.ttl_s + 2 * TICK_S  # until P knows, and as if there were none
    assert len(fleet.waits["d"]) == 40 and max(fleet.waits["d"]) <= bound < limits.lease_s
    assert collections.Counter(fleet.reasons(cut_at)) == {None: 30, FallbackReason.PEER: 40}
    assert statistics.median(fleet.waits["e"]) < 1.0 and max(fleet.waits["e"]) < 6.0
    assert not fleet.nodes["p"].operators.open_attempts() and not fleet.nodes["d"].operators.open_attempts()
    # they meet again without anybody's help
    fleet.cut.clear()
    fleet.runs(1.0)
    healed_at = fleet.now
    fleet.runs(5.0, d=0.5)
    fleet.runs(1.0)
    assert fleet.reasons(healed_at) == [None] * 10 and fleet.counted("d") == 1


def test_b22_granted_jobs_of_a_d_that_is_cut_off_end_with_the_lease(fleet):
    attempt = fleet.submit("d")
    fleet._tick()
    fleet.cut = {"d"}
    fleet.hangs = True  # so that it is not computed at once
    fleet.runs(DecodeLimits().lease_s + 2 * TICK_S)
    assert fleet.ends[attempt].reason is FallbackReason.LEASE


def test_b22_nobody_waits_for_an_engine_that_hangs(fleet):
    fleet.hangs = True
    first = fleet.submit("d")
    fleet.runs(HUNG_S + 2.0, e=10.0)
    assert [one.incarnation for one in fleet.registry.members() if one.draining] == ["p"]
    late = fleet.submit("e")
    fleet.runs(DecodeLimits().lease_s + 2.0)
    assert fleet.ends[first].reason is FallbackReason.LEASE
    assert fleet.ends[late].reason is FallbackReason.PEER
    assert max(fleet.waits["e"]) < HUNG_S + DecodeLimits().lease_s + 1.0
    assert first in fleet.nodes["d"].operators.open_attempts(), "its fence is up"
    # P goes on: its messages take the fences down, and the broker offers it jobs again
    fleet.hangs = False
    fleet._step()
    assert not fleet.nodes["p"].state.hangs
    fleet.runs(12.0)
    assert not any(node.operators.open_attempts() for node in fleet.nodes.values())
    assert fleet.ends.keys() == fleet.submitted.keys()
    again_at = fleet.now
    fleet.runs(2.0, d=1.0, e=1.0)
    fleet.runs(1.0)
    assert fleet.reasons(again_at) == [None] * 4


def test_b22_an_engine_that_sleeps_beside_its_job_is_woken_and_its_lease_renewed(fleet):
    p, attempt = fleet.nodes["p"], fleet.submit("d")
    fleet.runs(3 * TICK_S)
    assert attempt in fleet.running
    fleet.hangs = True  # it does not look, until it is woken
    p.control.announce()
    for _ in range(3):
        fleet.runs(HUNG_S / 2 - 1.0)
        assert not p.control.announce()
        fleet.runs(2.0)
        assert p.control.announce() and p.poll_event() is None
    assert not p.state.hangs and attempt not in fleet.ends and p.prefill.lease_stands(attempt)


def test_b22_an_engine_in_a_long_step_or_asleep_does_not_hang():
    watch = StepWatch()
    for second in range(200):  # nothing is open, it sleeps
        assert not watch.check(float(second), False) and not watch.hangs
    watch.asked()
    assert not watch.check(1000.0, True) and not watch.check(1029.0, True)
    assert watch.check(1030.0, True) and not watch.check(1031.0, True), "woken once: it may sleep beside a long write"
    watch.asked()
    for second in range(1031, 1061):
        assert not watch.check(float(second), True) and not watch.hangs
    # this process was stopped: it is woken first
    assert watch.check(5000.0, True) and not watch.hangs
    assert not watch.check(5029.0, True) and not watch.hangs
    assert not watch.check(5030.0, True) and watch.hangs
    watch.asked()
    assert not watch.hangs
