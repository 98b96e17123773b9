# SPDX-License-Identifier: Apache-2.0
"""B107, B108: the health of a path is a fact of the two engines at its ends: who knows it, who goes by it, who says it.
"""
import msgspec
import pytest

from vllm_pd.broker.registry import may_prefill_for
from vllm_pd.ops.orders import describe
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.failed_paths import MAX_PATHS, MAX_PAUSE_S, PAUSE_S, FailedPaths
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AddPeer,
    Connect,
    Fallback,
    FallbackReason,
    Prefill,
    Released,
    RenewTransport,
    RetireTransport,
    ToBroker,
    ToDecode,
)
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
ANSWER_S = PrefillLimits().answer_s
LEASE_S = 9.0
FAILS_S = 120.0
SETTINGS = {"broker": "tcp://127.0.0.1:9", "lease_s": LEASE_S, "ttl_s": 3.0}


def member(name, role, boot="", port=1):
    return m.Member(name, role, f"tcp://127.0.0.1:{port}", FINGERPRINT, host_id=boot)


P, D, E = member("p", m.Role.PREFILL, "one"), member("d", m.Role.DECODE, "two", 2), member("e", m.Role.DECODE, "one", 3)


class Engine:
    """One engine, of whose time and messages a test disposes."""

    def __init__(self, ours, *others):
        self.now = 0.0
        role = "kv_producer" if ours.role is m.Role.PREFILL else "kv_consumer"
        self.peer = PeerProtocol(PDConfig.parse(role, SETTINGS), ours, b"memory", lambda: self.now)
        self._ours, self._version = ours, 0
        self.lists(*others)

    def lists(self, *others):
        """The broker's list has these."""
        self._version += 1
        self.peer.control.receive(MessageSource.BROKER, "b", m.Peers("b", self._version, [self._ours, *others], 0))
        return self.passes(0.0)

    def hears(self, sender, message):
        source = MessageSource.DECODE if self._ours.role is m.Role.PREFILL else MessageSource.PREFILL
        assert self.peer.control.receive(source, sender, message)
        return self.passes(0.0)

    def passes(self, seconds):
        """Time passes, in which the broker answers. Returns what is sent to others."""
        sent, until = [], self.now + seconds
        while True:
            self.peer.control.receive(MessageSource.BROKER, "b", m.Heard("b", 0))
            self.peer.control.handle_timeout()
            sent += iter(self.peer.control.poll_transmit, None)
            if self.now >= until:
                return sent
            self.now = min(until, self.now + 0.1)

    def registered(self, sent):
        """The last entry for the registry among these."""
        entries = [one.message.member for one in sent if isinstance(one, ToBroker)
                   and isinstance(one.message, m.Register)]
        return entries[-1] if entries else None

    def degraded(self):
        found = self.peer.operators.degraded()
        return "" if found is None else found.detail


@pytest.fixture
def p():
    engine = Engine(P, D, E)
    for one in (D, E):
        engine.hears(one.incarnation, m.HelloReply(one, b"its memory"))
    return engine


@pytest.fixture
def d():
    engine = Engine(D, P)
    engine.hears("p", m.Hello(P, b"its memory"))
    return engine


def test_b107_one_that_does_not_answer_is_named_to_everybody_until_it_does(p):
    assert p.peer.deaths.watched_peers().introduced.keys() == {"d", "e"}
    p.peer.deaths.disconnected("d")
    sent = p.passes(ANSWER_S - 0.2)
    assert sum(one == ToDecode("d", p.peer.control.hello) for one in sent) == 6, "it is asked, and asked again"
    assert p.registered(sent) is None or not p.registered(sent).unreached
    entry = p.registered(p.passes(0.5))
    assert entry.unreached == ("d",) and not p.degraded(), "there is another one"
    assert "  can't reach decode engine d" in describe(p.peer.operators.status(0))
    p.peer.deaths.disconnected("e")
    p.passes(ANSWER_S + 0.1)
    assert "but d, e, which this one can't reach" in p.degraded()
    p.hears("d", m.HelloReply(D, b"its memory"))
    entry = p.registered(p.passes(0.1))
    assert entry.unreached == ("e",) and not p.degraded()
    assert not any(isinstance(one, ToDecode) and one.peer == "d" for one in p.passes(2.0)), "it is asked no more"


def test_b107_one_that_answers_in_time_is_not_named(p):
    p.peer.deaths.disconnected("d")
    p.passes(ANSWER_S - 0.1)
    p.hears("d", m.HelloReply(D, b"its memory"))
    assert all(entry is None or not entry.unreached for entry in [p.registered(p.passes(10.0))])


def test_b107_one_that_was_never_reached_is_named_too():
    engine = Engine(P, D)
    entry = engine.registered(engine.passes(ANSWER_S + 0.2))
    assert entry.unreached == ("d",) and "but d, which this one can't reach" in engine.degraded()


def test_b107_no_job_is_offered_across():
    cut = msgspec.structs.replace(P, unreached=("d",))
    assert may_prefill_for(P, D) and not may_prefill_for(cut, D) and may_prefill_for(cut, E)


def test_b107_a_decode_engine_does_not_count_one_that_can_not_reach_it(d):
    assert d.peer.decode.view().prefill_peers == 1 and not d.degraded()
    d.lists(msgspec.structs.replace(P, unreached=("d",)))
    assert d.peer.decode.view().prefill_peers == 0
    assert f"but p, which can't reach this one at {D.address}" in d.degraded()
    d.lists(msgspec.structs.replace(P, unreached=("e",)))
    assert d.peer.decode.view().prefill_peers == 1 and not d.degraded()


def test_the_first_of_very_many_that_can_not_be_reached_are_named():
    """Where they are more it takes no jobs at all: it could not say from whom."""
    others = [member(f"d{number}", m.Role.DECODE, port=number + 10) for number in range(m.MAX_UNREACHED + 1)]
    engine = Engine(P, *others)
    entry = engine.registered(engine.passes(ANSWER_S + 0.2))
    assert len(entry.unreached) == m.MAX_UNREACHED and entry.draining
    assert f"and {m.MAX_UNREACHED - 2} more" in engine.degraded()
    engine.hears("d0", m.HelloReply(others[0], b"its memory"))
    assert not engine.registered(engine.passes(0.2)).draining


@pytest.mark.parametrize("is_listed", [True, False])
def test_b107_the_connection_to_another_machine_ends_when_it_is_silent(is_listed):
    """B107: from the first on where the registry tells; a job may come before that."""
    side = PrefillProtocol(P, b"p", PrefillLimits())
    if is_listed:
        connects = side.members_are(0.0, [D, E])
    else:
        connects = [action for number, one in enumerate((D, E)) for action in side.offer(
            0.0, m.Job(m.Attempt(one.incarnation, "r", number), one.address, [1] * 16, 0, 30.0))]
    assert [one for one in connects if isinstance(one, Connect)] == [
        Connect("d", D.address, is_listed), Connect("e", E.address, False)]
    met = [side.receive(0.0, one.incarnation, m.HelloReply(one, b"memory")) for one in (D, E)]
    expected = [] if is_listed else [Connect("d", D.address, True)]
    assert met[0][:1] == [AddPeer("d", b"memory")] and met[0][1:2] == (expected or met[0][1:2])
    assert [one for one in met[0] + met[1] if isinstance(one, Connect)] == expected


# Transfers that fail.

def test_b107_after_a_second_failure_there_is_a_pause_which_doubles():
    paths = FailedPaths(FAILS_S)
    now = 0.0
    pauses = []
    for number in range(9):
        paths.failed(now, "p", number, number)
        begin = now
        while "p" in paths.avoided(now):
            now += 0.5
        pauses.append(now - begin)
    assert pauses == [0.0, PAUSE_S, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S]
    paths.failed(now + FAILS_S, "p", 9, 9)
    assert paths.avoided(now + FAILS_S), "so long one may take that was handed over after the pause"
    now += FAILS_S + 2 * MAX_PAUSE_S + FAILS_S
    paths.failed(now, "p", 10, 10)
    assert not paths.avoided(now), "it has been calm"


def test_b107_a_prompt_that_arrives_ends_what_was_counted():
    paths = FailedPaths(FAILS_S)
    for number in range(6):
        paths.failed(100.0 * number, "p", number, number)
        paths.arrived("p", number)  # it was on its way before that failure, or with it
        assert bool(paths.avoided(100.0 * number)) is (number > 0)
    paths.arrived("p", 6)
    paths.failed(700.0, "p", 7, 7)
    assert not paths.avoided(700.0)
    paths.arrived("q", 8)


def test_b107_a_path_that_fails_for_ever_has_a_longest_pause():
    paths = FailedPaths(FAILS_S)
    for number in range(3000):
        paths.failed(100.0 * number, "p", number, number)
    assert paths.avoided(100.0 * 2999 + MAX_PAUSE_S - 1) and not paths.avoided(100.0 * 2999 + MAX_PAUSE_S)


def test_what_was_on_its_way_together_fails_once():
    paths = FailedPaths(FAILS_S)
    for number in range(5):
        paths.failed(0.0, "p", number, 4)
    assert not paths.avoided(0.0)
    paths.failed(1.0, "p", 5, 8)
    assert paths.avoided(1.0) == {"p"}
    for number in range(6, 9):
        paths.failed(1.5, "p", number, 8)
    assert not paths.avoided(1.0 + PAUSE_S)


def test_failures_of_many_have_a_bound_and_those_of_the_dead_are_forgotten():
    paths = FailedPaths(FAILS_S)
    for number in range(MAX_PATHS + 5):
        for turn in range(2):
            paths.failed(0.0, f"p{number}", 2 * number + turn, 2 * number + turn)
    assert len(paths.avoided(0.0)) == MAX_PATHS and "p0" not in paths.avoided(0.0)
    paths.forget("p9")
    assert "p9" not in paths.avoided(0.0)


def hand_over(d, claim):
    """A prompt of d is claimed by p. Returns its attempt."""
    attempt = d.peer.decode.next_attempt("r")
    d.peer.decode.submit(attempt, [1] * 32, [1, 2], 0)
    d.hears("p", m.Claim(attempt, claim, 1))
    return attempt


def test_b107_prompts_that_come_to_nothing_at_one_engine_stay_here_for_a_while(d):
    for claim in range(2):
        hand_over(d, claim)
        for _ in range(int(LEASE_S) + 1):
            d.passes(1.0)
            d.lists(P)
    assert [event.reason for event in iter(d.peer.poll_event, None)
            if isinstance(event, Fallback)] == [FallbackReason.LEASE] * 2
    assert d.peer.decode.view().prefill_peers == 1, "the pause is over"
    hand_over(d, 2)
    d.passes(LEASE_S - 0.1)
    d.lists(P)
    d.passes(0.3)
    assert d.peer.decode.view().prefill_peers == 0
    assert "but p, to which prompts went in vain" in d.degraded()
    late = d.peer.decode.next_attempt("r")
    d.peer.decode.submit(late, [1] * 32, [1, 2], 0)
    (put,) = [one.message for one in d.passes(0.0) if isinstance(one, ToBroker) and isinstance(one.message, m.Put)]
    assert put.job.avoid == ("p",)
    d.passes(2.0)
    d.lists(P)
    assert d.peer.decode.view().prefill_peers == 1 and not d.degraded()


def test_what_an_engine_says_itself_is_no_failure_of_the_path(d):
    for claim in range(4):
        attempt = hand_over(d, claim)
        d.hears("p", m.Failed(attempt, claim, "no room"))
        assert d.peer.decode.view().prefill_peers == 1


# What an operator knows.

def test_b108_an_operator_says_that_a_host_is_gone(d):
    """B108: D ends by its own act what that engine could still do, and has its blocks back, long before the lease."""
    attempt = hand_over(d, 0)
    assert d.peer.operators.status(0).fences == {"p": 1}
    assert "  1 fenced for engine p" in describe(d.peer.operators.status(0))
    assert d.peer.deaths.operator_says_gone("p") == ""
    d.passes(0.1)
    events = list(iter(d.peer.poll_event, None))
    assert [type(event) for event in events if isinstance(event, Fallback | Released | RenewTransport)] == [
        Fallback, RenewTransport], "the word is no proof: the fence stays up until the new agents are made"
    d.peer.transport.renewed(next(one.name for one in events if isinstance(one, RenewTransport)), b"anew")
    assert any(isinstance(event, RetireTransport) for event in iter(d.peer.poll_event, None))
    d.peer.transport.retired(True)
    assert [event for event in iter(d.peer.poll_event, None) if isinstance(event, Released)] == [Released(attempt)]
    assert d.now < 1.0 and d.peer.operators.status(0).fences == {}
    assert d.peer.decode.view().prefill_peers == 0
    d.hears("p", m.Hello(P, b"its memory"))
    assert d.peer.decode.view().prefill_peers == 1, "it was a mistake"


def test_b108_a_prefill_engine_stops_the_jobs_of_one_that_is_gone(p):
    attempt = m.Attempt("d", "r", 0)
    p.peer.prefill.set_credits(4)
    p.peer.control.receive(MessageSource.BROKER, "b", m.Offer(m.Job(attempt, D.address, [1] * 32, 0, 30.0), 1))
    claim = next(one.message for one in p.passes(0.0) if isinstance(one, ToDecode) and isinstance(one.message, m.Claim))
    p.hears("d", m.Grant(attempt, claim.claim, [1, 2], 0, LEASE_S))
    assert any(isinstance(event, Prefill) for event in iter(p.peer.poll_event, None))
    assert p.peer.deaths.operator_says_gone("d") == ""
    assert not p.peer.prefill.lease_stands(attempt)
    assert p.registered(p.passes(0.2)).unreached == ("d",)


def test_who_has_nothing_to_do_with_it_or_sees_for_itself_says_so(p, d):
    assert "nothing to do with it" in d.peer.deaths.operator_says_gone("x")
    assert "on the machine of this engine" in p.peer.deaths.operator_says_gone("e")
    p.peer.deaths.peer_dead("e")
    assert p.peer.deaths.operator_says_gone("e") == "", "it knew already"
