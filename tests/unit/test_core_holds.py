# SPDX-License-Identifier: Apache-2.0
"""B102: holds and their reads, step by step, in a time that is passed in. All orders of steps: tests/proof."""
import collections
import itertools

import msgspec
import pytest

from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AddPeer,
    Cancelled,
    Disconnect,
    DropPeer,
    Fallback,
    FallbackReason,
    HoldEnd,
    HoldEnded,
    Prefilled,
    ReadHold,
    Released,
    StopRead,
    ToDecode,
    ToPrefill,
)
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import HoldLimits, Holds, asks_for_hold, hold_params, named_hold
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
P = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:1", FINGERPRINT)
D = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:2", FINGERPRINT)
TOKENS = list(range(40))
DIGEST = token_digest(TOKENS)
HOLD = m.Attempt("p", "random", 7)
ONE, TWO = m.Attempt("d", "r", 1), m.Attempt("d", "r", 2)


@pytest.fixture
def holder():
    """A prefill engine that has met d and holds a prompt, from second 0 on."""
    side = PrefillProtocol(P, b"p", PrefillLimits(ttl_s=5.0, holds=HoldLimits(hold_s=30.0, query_s=1.0,
                                                                               query_max_s=3.0)))
    side.members_are(0.0, [D])
    side.receive(0.0, "d", m.HelloReply(D, b"d"))
    side.holds.add(0.0, HOLD, DIGEST, [4, 5, 6])
    return side


@pytest.fixture
def reader():
    """A decode engine that has met p."""
    side = DecodeProtocol(D, b"d", DecodeLimits(lease_s=9.0, deadline_s=60.0, claim_retry_s=2.0, ttl_s=5.0))
    side.receive(0.0, "p", m.Hello(P, b"memory"))
    return side


def claim(attempt=ONE, hold=HOLD, digest=DIGEST):
    return m.ClaimHold(attempt, hold, digest)


def started(reader, now=0.0):
    """An attempt whose ranks read."""
    assert reader.reads.claim(now, ONE, HOLD, DIGEST, [1, 2, 3], 1, 60.0) == [ToPrefill("p", claim())]
    assert reader.receive(now, "p", m.HoldGrant(ONE, HOLD, [4, 5, 6])) == [
        ReadHold(ONE, "p", b"memory", [2, 3], [5, 6])]


def test_a_hold_is_claimed_once_and_freed_by_the_word_of_its_reader(holder):
    granted = [ToDecode("d", m.HoldGrant(ONE, HOLD, [4, 5, 6]))]
    assert holder.receive(1.0, "d", claim()) == granted == holder.receive(2.0, "d", claim())
    for message, reason in ((claim(TWO), m.DenyReason.TAKEN), (claim(digest=token_digest([1])), m.DenyReason.TOKENS),
                            (claim(hold=m.Attempt("p", "random", 8)), m.DenyReason.UNKNOWN),
                            (claim(hold=m.Attempt("earlier p", "random", 7)), m.DenyReason.UNKNOWN)):
        (denied,) = holder.receive(2.0, "d", message)
        assert denied == ToDecode("d", m.HoldDenied(message.attempt, message.hold, reason))
    assert holder.receive(3.0, "d", m.HoldDone(TWO, HOLD)) == []
    assert holder.receive(3.0, "d", m.HoldDone(ONE, HOLD)) == [HoldEnded(HOLD, HoldEnd.DONE)]
    assert holder.receive(3.0, "d", m.HoldDone(ONE, HOLD)) == [] and not holder.holds.states()


def test_one_d_speaks_for_itself_alone(holder):
    holder.members_are(0.0, [D, msgspec.structs.replace(D, incarnation="e")])
    holder.receive(0.0, "e", m.HelloReply(msgspec.structs.replace(D, incarnation="e"), b"e"))
    assert holder.receive(1.0, "e", claim()) == []
    holder.receive(1.0, "d", claim())
    assert holder.receive(1.0, "e", m.HoldDone(ONE, HOLD)) == [] and holder.holds.states() == {HOLD: ONE}
    assert holder.dropped["hold_foreign"] == 2


def test_b102_a_d_that_does_not_want_a_hold_takes_no_block_from_one_that_reads_it():
    """A client may bring the name to several Ds. In whatever order their messages come: from the grant on the hold ends
    with a message of that attempt alone, and nobody is granted what has ended."""
    theirs = m.Attempt("e", "r", 1)
    messages = [("d", claim()), ("e", claim(theirs)), ("d", m.HoldDone(ONE, HOLD)), ("d", m.HoldDone(TWO, HOLD)),
                ("e", m.HoldDone(theirs, HOLD))]
    ended = collections.Counter()
    for order in itertools.product(messages, repeat=5):
        holds = Holds(HoldLimits(), collections.Counter(), Generations("p", b""))
        holds.add(0.0, HOLD, DIGEST, [4, 5, 6])
        reader, is_over = None, False
        for sender, message in order:
            is_claim = isinstance(message, m.ClaimHold)
            for action in holds.claim(0.0, sender, message) if is_claim else holds.done(sender, message):
                if isinstance(action, HoldEnded):
                    assert not is_over and reader in (None, message.attempt)
                    is_over = True
                    ended[action.end] += 1
                elif isinstance(action.message, m.HoldGrant):
                    assert not is_over and reader in (None, message.attempt)
                    reader = message.attempt
    assert ended[HoldEnd.DROPPED] and ended[HoldEnd.DONE]


def test_what_nobody_claims_ends_by_time_and_what_is_claimed_never(holder):
    other = m.Attempt("p", "random", 8)
    holder.holds.add(0.0, other, DIGEST, [7, 8, 9])
    holder.receive(29.0, "d", claim())
    asked = [holder.handle_timeout(float(second)) for second in range(30, 300)]
    assert asked[0] == [HoldEnded(other, HoldEnd.EXPIRED), ToDecode("d", m.HoldQuery(ONE, HOLD))]
    queries = sum(one.count(ToDecode("d", m.HoldQuery(ONE, HOLD))) for one in asked)
    assert 85 <= queries <= 95, "one each three seconds"
    assert holder.holds.states() == {HOLD: ONE}
    (denied,) = holder.receive(300.0, "d", claim(TWO, other))
    assert denied.message.reason is m.DenyReason.UNKNOWN
    assert HoldEnded(HOLD, HoldEnd.LOST) in holder.peer_dead(301.0, "d")


def test_b102_blocks_whose_read_lasts_are_counted_once_each_until_its_end(holder):
    """A read that ends in time is none of them."""
    other = m.Attempt("p", "random", 8)
    holder.holds.add(0.0, other, DIGEST, [6, 7])
    for attempt, hold, counted in ((ONE, HOLD, 0), (ONE, HOLD, 3), (TWO, HOLD, 3), (TWO, other, 4)):
        holder.receive(1.0, "d", claim(attempt, hold))
        if counted:
            holder.handle_timeout(2.5)  # D is asked
        assert holder.holds.lasting_blocks() == counted
    holder.receive(11.0, "d", m.HoldDone(ONE, HOLD))
    assert holder.holds.lasting_blocks() == 2
    holder.peer_dead(12.0, "d")
    assert holder.holds.lasting_blocks() == 0 and not holder.holds._lasting


def test_a_d_that_is_silent_keeps_its_connection_while_it_may_read(holder):
    """B23: its death is still seen, and its word still heard."""
    holder.receive(1.0, "d", claim())
    holder.members_are(2.0, [])
    for second in range(2, 60):
        actions = holder.handle_timeout(float(second))
        assert not any(isinstance(action, DropPeer) for action in actions)
    assert holder.busy_peers() == {"d"} and "d" in holder.peers()
    assert holder.receive(60.0, "d", claim(TWO, m.Attempt("p", "x", 9))) == []  # it is to be met anew first
    assert holder.receive(60.0, "d", claim()) == [ToDecode("d", m.HoldGrant(ONE, HOLD, [4, 5, 6]))], "it reads on"
    freed = holder.receive(61.0, "d", m.HoldDone(ONE, HOLD))
    assert freed[:2] == [HoldEnded(HOLD, HoldEnd.DONE), DropPeer("d")] and not holder.peers()


def test_b102_a_d_that_is_added_again_and_falls_silent_keeps_its_connection_while_it_may_read(holder):
    """B23: our transport could not add it, it is greeted again, and has not answered since."""
    holder.receive(1.0, "d", claim())
    holder.peer_unadded(1.0, "d")
    holder.members_are(2.0, [])
    for second in range(2, 60):
        assert not any(isinstance(action, Disconnect) for action in holder.handle_timeout(float(second))), second
    assert holder.busy_peers() == {"d"} and "d" in holder.peers()
    freed = holder.receive(60.0, "d", m.HoldDone(ONE, HOLD))
    assert freed == [HoldEnded(HOLD, HoldEnd.DONE), Disconnect("d")] and not holder.peers()


def test_the_control_thread_s_end_frees_what_nobody_has_claimed(holder):
    other = m.Attempt("p", "random", 8)
    holder.holds.add(0.0, other, DIGEST, [7])
    holder.receive(1.0, "d", claim())
    assert holder.shut(2.0) == [HoldEnded(other, HoldEnd.CLOSED)] and holder.holds.states() == {HOLD: ONE}


def test_b22_an_engine_that_ends_has_its_readers_stop(holder, reader):
    """Its memory ends with it: what a read brings after the denial is not used, however it ends."""
    other = m.Attempt("p", "random", 8)
    holder.holds.add(0.0, other, DIGEST, [7])
    holder.receive(1.0, "d", claim())
    started(reader)
    ended, denied = holder.holds.close()
    assert ended == HoldEnded(other, HoldEnd.CLOSED) and denied.peer == "d"
    fallback, stop = reader.receive(2.0, "p", denied.message)
    assert fallback.reason is FallbackReason.HOLD and stop == StopRead(ONE)
    (again,) = holder.receive(3.0, "d", claim())
    assert isinstance(again.message, m.HoldDenied) and holder.holds.readers() == {"d"}
    released, done = reader.reads.ended(ONE, "")
    assert released == Released(ONE)
    assert holder.receive(4.0, "d", done.message) == [HoldEnded(HOLD, HoldEnd.DONE)] and not holder.holds.readers()


def test_a_read_that_ends_well_is_the_end_of_the_attempt(reader):
    started(reader)
    assert reader.reads.ended(ONE, "") == [Prefilled(ONE, m.Timings()), ToPrefill("p", m.HoldDone(ONE, HOLD))]
    assert reader.next_timeout() is None
    assert reader.receive(9.0, "p", m.HoldQuery(ONE, HOLD)) == [ToPrefill("p", m.HoldDone(ONE, HOLD))]


def test_b27_a_read_that_fails(reader):
    started(reader)
    fallback, released, done = reader.reads.ended(ONE, "broken")
    assert (fallback.reason, fallback.detail, fallback.peer) == (FallbackReason.FAILED, "broken", "p")
    assert (released, done) == (Released(ONE), ToPrefill("p", m.HoldDone(ONE, HOLD)))


def ends(reader, how):
    if how == "abort":
        return reader.reads.abort(0.0, ONE)
    if how == "silence":
        return reader.handle_timeout(9.0)
    if how == "denied":
        return reader.receive(1.0, "p", m.HoldDenied(ONE, HOLD, m.DenyReason.UNKNOWN))
    return reader.peer_dead(1.0, "p") if how == "death" else reader.shut(1.0, "ended")


@pytest.mark.parametrize("how", ["abort", "silence", "denied", "death", "shut"])
def test_b22_blocks_are_released_when_the_ranks_have_ended(reader, how):
    started(reader)
    actions = ends(reader, how)
    assert actions[-1] == StopRead(ONE) and len(actions) == (1 if how == "abort" else 2)
    assert reader.receive(10.0, "p", m.HoldQuery(ONE, HOLD)) == [], "it may still read"
    assert reader.reads.abort(0.0, ONE) == [] and reader.handle_timeout(1e6) == []
    after = reader.reads.ended(ONE, "")  # all of it has come, too late
    assert after[:2] == [Released(ONE), ToPrefill("p", m.HoldDone(ONE, HOLD))]
    assert (DropPeer("p", was_read=True) in after) is (how == "death")
    assert not reader.reads.states() and not reader.busy_peers()


@pytest.mark.parametrize("how, reason", [("abort", None), ("silence", FallbackReason.LEASE),
                                         ("denied", FallbackReason.HOLD), ("death", FallbackReason.PEER),
                                         ("shut", FallbackReason.CONTROL)])
def test_what_reads_nothing_yet_is_released_at_once(reader, how, reason):
    reader.reads.claim(0.0, ONE, HOLD, DIGEST, [1, 2, 3], 0, 60.0)
    assert reader.next_timeout() == 0.5
    found = ends(reader, how)
    assert [one.reason for one in found if isinstance(one, Fallback)] == ([reason] if reason else [])
    told = [] if how == "denied" else [ToPrefill("p", m.HoldDone(ONE, HOLD))]  # it may be another's
    assert found[reason is not None:] == [Released(ONE), *told]
    late = reader.receive(9.0, "p", m.HoldGrant(ONE, HOLD, [4, 5, 6]))
    assert late == [ToPrefill("p", m.HoldDone(ONE, HOLD))]


def test_answers_of_p_renew_the_lease_until_the_deadline(reader):
    started(reader)
    for second in range(3, 60, 3):
        assert reader.handle_timeout(float(second)) == [ToPrefill("p", claim())]
        assert reader.receive(second + 0.0, "p", m.HoldGrant(ONE, HOLD, [4, 5, 6])) == []
    fallback, _ = reader.handle_timeout(60.0)
    assert fallback.reason is FallbackReason.DEADLINE


@pytest.mark.parametrize("block_ids", [[], [4, 5], [4, 5, 6, 7], [4, 5, 5]])
def test_blocks_that_are_not_the_prompt_s_are_not_read(reader, block_ids):
    reader.reads.claim(0.0, ONE, HOLD, DIGEST, [1, 2, 3], 0, 60.0)
    fallback, *rest = reader.receive(1.0, "p", m.HoldGrant(ONE, HOLD, block_ids))
    assert fallback.reason is FallbackReason.HOLD and fallback.peer == ""
    assert rest == [Released(ONE), ToPrefill("p", m.HoldDone(ONE, HOLD))]


def test_only_the_p_that_was_asked_answers(reader):
    reader.receive(0.0, "q", m.Hello(msgspec.structs.replace(P, incarnation="q"), b"other"))
    reader.reads.claim(0.0, ONE, HOLD, DIGEST, [1, 2, 3], 0, 60.0)
    for sender, message in (("q", m.HoldGrant(ONE, HOLD, [4, 5, 6])), ("q", m.HoldDenied(ONE, HOLD, "taken")),
                            ("p", m.HoldGrant(ONE, m.Attempt("p", "other", 1), [4, 5, 6]))):
        assert reader.receive(1.0, sender, message) == []
    assert reader.receive(1.0, "p", m.HoldQuery(m.Attempt("d before", "r", 1), HOLD)) == []
    assert reader.dropped["hold_foreign"] == 4 and reader.reads.states()


def test_a_p_that_is_not_known_is_asked_nothing(reader):
    fallback, released, _ = reader.reads.claim(0.0, ONE, m.Attempt("made up", "x", 1), DIGEST, [1, 2, 3], 0, 60.0)
    assert fallback.reason is FallbackReason.PEER and released == Released(ONE)


def test_peers_that_are_forgotten_are_forgotten_with_their_memory(reader):
    reader.limits = msgspec.structs.replace(reader.limits, max_peers=1)
    started(reader)
    reader.reads.ended(ONE, "")
    forgotten, _ = reader.receive(1.0, "q", m.Hello(msgspec.structs.replace(P, incarnation="q"), b"other"))
    assert forgotten == DropPeer("p", was_read=True) and not reader.reads.knows("p") and reader.reads.knows("q")


def test_b102_ranks_forget_an_idle_p_that_the_registry_does_not_list(reader):
    """One that died on another host while nothing was read from it: no death is seen there."""
    started(reader)
    assert reader.reads.known_are(0.0, ["p"]) == reader.reads.known_are(1.0, []) == []
    for second in range(2, 20):
        assert reader.reads.known_are(float(second), []) == [], "it is read from"
    reader.reads.unproven(0.0, ONE, "failed")
    assert reader.reads.known_are(20.0, []) == reader.reads.known_are(30.0, []) == [], "it may land"
    reader.reads.ended(ONE, "")
    assert reader.reads.known_are(31.0, []) == reader.reads.known_are(35.0, []) == []
    assert reader.reads.known_are(35.5, ["p"]) == reader.reads.known_are(36.0, []) == [], "it is back for a moment"
    assert reader.reads.known_are(40.9, []) == []
    assert reader.reads.known_are(41.0, []) == [DropPeer("p", was_read=True)] and reader.reads.known_are(99.0, []) == []
    reader.reads.claim(99.0, TWO, HOLD, DIGEST, [1, 2, 3], 1, 60.0)
    assert isinstance(reader.receive(99.0, "p", m.HoldGrant(TWO, HOLD, [4, 5, 6]))[0], ReadHold), "it was not dead"
    reader.reads.ended(TWO, "")
    assert reader.reads.known_are(100.0, []) == [] and reader.reads.known_are(105.0, []) == [
        DropPeer("p", was_read=True)]


# Through `PeerProtocol`.


@pytest.fixture
def both():
    """An engine of both roles that has met p as a prefill engine."""
    config = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"})
    protocol = PeerProtocol(config, msgspec.structs.replace(D, role=m.Role.BOTH), b"memory", lambda: 0.0)
    protocol.control.receive(MessageSource.PREFILL, "p", m.Hello(P, b"p"))
    drain(protocol)
    return protocol


class Meeting:
    """A prefill and decode engine `d` that has met another one, `e`, in all its roles, and reads a hold of it."""

    def __init__(self, role=m.Role.BOTH):
        self.now = 0.0
        us, self.e = (msgspec.structs.replace(D, role=one, incarnation=name)
                      for name, one in (("d", m.Role.BOTH), ("e", role)))
        config = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"})
        self.protocol = PeerProtocol(config, us, b"memory", lambda: self.now)
        self.listed(self.e)
        self.protocol.control.receive(MessageSource.DECODE, "e", m.HelloReply(self.e, b"e"))
        self.protocol.control.receive(MessageSource.PREFILL, "e", m.Hello(self.e, b"e"))
        self.attempt, self.hold = self.protocol.decode.next_attempt("r"), m.Attempt("e", "random", 1)
        self.protocol.decode.claim_hold(self.attempt, self.hold, DIGEST, [1, 2, 3], 0, 60.0)
        self.events()

    def listed(self, *members):
        version = 1 + int(self.now * 10)
        self.protocol.control.receive(MessageSource.BROKER, "broker", m.Peers("b", version, list(members), 0))

    def granted(self):
        self.protocol.control.receive(MessageSource.PREFILL, "e", m.HoldGrant(self.attempt, self.hold, [4, 5, 6]))

    def passes(self, seconds):
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            self.protocol.control.receive(MessageSource.BROKER, "broker", m.Heard("b", 0))
            self.protocol.control.handle_timeout()

    def events(self):
        drain(self.protocol)
        return list(iter(self.protocol.poll_event, None))


@pytest.mark.parametrize("stops", [False, True], ids=["no job", "a job of it stops meanwhile"])
def test_b102_ranks_of_an_engine_of_both_roles_forget_no_peer_that_they_read_from(stops):
    """The other one has lost the broker only. It is met again, where the registry lists it later."""
    one = Meeting()
    job = m.Job(m.Attempt("e", "r", 7), one.e.address, TOKENS, 0, 60.0)
    if stops:
        one.protocol.control.receive(MessageSource.BROKER, "broker", m.Offer(job, 1))
        (claimed,) = [action.message for action in drain(one.protocol) if isinstance(action, ToDecode)]
        one.protocol.control.receive(MessageSource.DECODE, "e", m.Grant(job.attempt, claimed.claim, [7, 8, 9], 0, 30.0))
    one.granted()
    one.now = 1.0
    one.listed()
    one.passes(6.0)
    assert (Cancelled(job.attempt) in one.events()) is stops
    one.protocol.prefill.ended(job.attempt)
    for _ in range(4):
        one.passes(5.0)
        one.granted()
        assert one.events() == [], "it reads on"
    one.now += 0.5
    one.listed(one.e)
    one.protocol.decode.read_ended(one.attempt, "")
    sent = [action.message for action in drain(one.protocol) if isinstance(action, ToDecode)]
    assert one.events() == [Prefilled(one.attempt, m.Timings()), DropPeer("e")] and sent == [one.protocol.control.hello]


def test_b102_ranks_keep_a_p_that_may_write_here():
    one = Meeting(m.Role.PREFILL)
    one.granted()
    one.protocol.decode.read_ended(one.attempt, "")
    one.listed(one.e)
    attempt = one.protocol.decode.next_attempt("r")
    one.protocol.decode.submit(attempt, TOKENS, [4, 5, 6], 0)
    one.protocol.control.receive(MessageSource.PREFILL, "e", m.Claim(attempt, 1))
    one.now += 0.5
    one.listed()
    one.passes(100.0)
    assert DropPeer("e") not in one.events()
    one.protocol.control.receive(MessageSource.PREFILL, "e", m.Stopped(attempt, 1))
    one.passes(8.0)
    assert one.events() == [Released(attempt), DropPeer("e", was_read=True)]


def test_b102_ranks_keep_a_p_that_is_needed_otherwise():
    one = Meeting()
    one.granted()
    one.protocol.decode.read_ended(one.attempt, "")
    one.events()
    one.listed()
    for _ in range(4):  # it is not in the registry, but claims of it say that it lives
        one.passes(4.0)
        one.protocol.control.receive(MessageSource.DECODE, "e", m.HoldDone(one.attempt, one.hold))
        assert one.events() == []
    one.passes(12.0)
    assert {event.name for event in one.events()} == {"e"}


def test_b102_a_dead_peer_is_dropped_when_the_read_of_its_hold_has_ended():
    one = Meeting()
    one.granted()
    one.protocol.deaths.peer_dead("e")
    assert DropPeer("e") not in one.events()
    one.protocol.decode.read_ended(one.attempt, "broken")
    assert DropPeer("e") in one.events() and "e" not in one.protocol.operators.debug_state()["peers"]


def test_b102_a_peer_that_could_not_be_added_is_not_dropped_while_it_is_read_from():
    one = Meeting()
    one.granted()
    one.protocol.prefill.peer_unadded("e", "one rank could not")
    one.events()
    for _ in range(8):
        one.passes(5.0)
        one.granted()
        assert one.events() == []
    one.protocol.decode.read_ended(one.attempt, "")
    one.passes(1.0)
    assert DropPeer("e") in one.events()


def drain(protocol):
    return [one for one in iter(protocol.control.poll_transmit, None) if isinstance(one, ToPrefill | ToDecode)]


def test_a_hold_that_is_not_wanted_is_given_up(both):
    both.decode.drop_hold(HOLD)
    (message,) = drain(both)
    assert message.peer == "p" and message.message.hold == HOLD and message.message.attempt.incarnation == "d"
    both.decode.drop_hold(m.Attempt("made up", "x", 1))
    assert drain(both) == []
    ours = both.decode.next_attempt("random")
    assert both.prefill.hold(ours, DIGEST, [1, 2, 3])
    assert both.operators.counts()["holds"] == 1 and both.operators.open_attempts() == [ours]
    both.decode.drop_hold(ours)
    assert both.poll_event() == HoldEnded(ours, HoldEnd.DROPPED)


def test_b102_b10_what_nobody_has_claimed_makes_room(holder):
    """At once after 3 s, else within 3 s, so that a client which has just got the name can bring it. What is claimed
    stays."""
    old, late, last = (m.Attempt("p", "random", number) for number in (8, 9, 10))
    for at, name in ((10.0, old), (11.0, late), (13.5, last)):
        holder.holds.add(at, name, DIGEST, [7, 8])
    holder.receive(9.0, "d", claim())
    assert holder.holds.end_old(14.0) == [HoldEnded(old, HoldEnd.CLOSED), HoldEnded(late, HoldEnd.CLOSED)]
    assert holder.holds.end_old(16.5) == []
    (denied,) = holder.receive(16.6, "d", claim(TWO, old))
    assert denied.message.reason is m.DenyReason.UNKNOWN
    assert HoldEnded(last, HoldEnd.CLOSED) in holder.handle_timeout(17.0)
    assert holder.holds.end_old(1e6) == [] and holder.holds.states() == {HOLD: ONE}


def test_many_holds_cost_no_more_a_turn_than_one(holder):
    """A turn looks at the first of each queue; so many that looking at all of them each turn would take minutes."""
    looked = []

    class Seen(dict):

        def __getitem__(self, name):
            looked.append(name)
            return super().__getitem__(name)

        def values(self):
            raise AssertionError("all holds are looked at")

        items = values

    holder.holds._holds = Seen(holder.holds._holds)
    for number in range(10, 30_010):
        holder.holds.add(number / 1e4, m.Attempt("p", "random", number), DIGEST, [7, 8, 9])
    holder.receive(4.0, "d", claim())
    looked.clear()
    for _ in range(100):
        holder.next_timeout()
        holder.handle_timeout(4.5)
        holder.busy_peers()
    assert len(looked) <= 1000 and len(holder.holds) == 30_001
    assert holder.holds.next_timeout() == 5.0 and holder.holds.has_claimed(ONE, HOLD)
    ended = holder.handle_timeout(30.0 + 1.0)
    assert sum(isinstance(one, HoldEnded) for one in ended) == 9_991, "those of the first second, in their order"


def test_the_next_deadline_is_the_first_of_all(holder):
    """Unclaimed ones, claimed ones with pauses of any length, and those that a drain cut short."""
    for at in range(10):
        name = m.Attempt("p", "one of many", at)
        holder.holds.add(float(at), name, DIGEST, [1, 2])
        if at % 3 == 0:
            holder.receive(float(at), "d", claim(m.Attempt("d", "r", at), name))
    holder.holds.drain(9.0)
    assert holder.holds.next_timeout() == 1.0
    for second in range(9, 60):
        holder.handle_timeout(float(second))
        due = [hold.due for hold in holder.holds._holds.values()]
        assert holder.holds.next_timeout() == min(due) > second
        assert len(due) == (11 if second < 12 else 4)


def test_b43_a_draining_engine_keeps_what_nobody_has_claimed_a_few_seconds(holder):
    early, late = m.Attempt("p", "random", 8), m.Attempt("p", "random", 9)
    holder.holds.add(0.0, early, DIGEST, [7, 8])
    holder.holds.add(20.0, late, DIGEST, [9, 10])
    holder.receive(28.0, "d", claim())
    holder.holds.drain(28.0)
    ended = {action.hold: second for second in range(28, 60) for action in holder.handle_timeout(float(second))
             if isinstance(action, HoldEnded)}
    assert ended == {early: 30, late: 31} and holder.holds.states() == {HOLD: ONE}


@pytest.mark.parametrize("peers", [True, False], ids=["a D is there", "nobody could claim"])
def test_b43_a_draining_engine_holds_nothing_new_and_waits_for_what_it_holds(both, peers):
    if peers:
        other = msgspec.structs.replace(D, incarnation="d2")
        both.control.receive(MessageSource.BROKER, "broker", m.Peers("b", 1, [other], 0))
        both.control.receive(MessageSource.DECODE, "d2", m.HelloReply(other, b"d2"))
        drain(both)
    ours = both.decode.next_attempt("random")
    assert both.prefill.hold(ours, DIGEST, [1])
    both.operators.drain()
    assert not both.prefill.hold(both.decode.next_attempt("random"), DIGEST, [2])
    if peers:
        assert both.operators.open_attempts() == [ours] and isinstance(both.poll_event(), AddPeer)
        assert both._core.prefill_half.holds.next_timeout() == 3.0, "at second 0"
        both.prefill.close_unclaimed_holds()
    assert both.poll_event() == HoldEnded(ours, HoldEnd.CLOSED) and not both.operators.open_attempts()


def test_an_attempt_ends_where_nobody_speaks_any_more(both):
    both.decode.claim_hold(ONE, HOLD, DIGEST, [1, 2, 3], 0, 60.0)
    assert drain(both) == [ToPrefill("p", claim())] and "p" in both.deaths.watched_peers().busy
    both.decode.abort_all()
    assert both.poll_event() == Released(ONE)
    both.control.shut("the control thread ended")
    assert not both.decode.knows_holder("p") and not both.prefill.hold(HOLD, DIGEST, [1])
    both.decode.claim_hold(TWO, HOLD, DIGEST, [1, 2, 3], 0, 60.0)
    assert both.poll_event().reason is FallbackReason.CONTROL and both.poll_event() == Released(TWO)


def test_the_name_of_a_hold_travels_with_a_client():
    assert named_hold({"kv_transfer_params": hold_params(HOLD)}) == HOLD
    assert not asks_for_hold({"kv_transfer_params": hold_params(HOLD)})
    assert asks_for_hold({"kv_transfer_params": {"do_remote_decode": True}})
    for nothing in (None, {}, [], {"kv_transfer_params": None}, {"kv_transfer_params": []}, 7):
        assert named_hold(nothing) is None and not asks_for_hold(nothing)


@pytest.mark.parametrize("engine, name", [
    ("p", "\ud800#1"), ("\ud800", "h#1"), ("p", "h#\N{SUPERSCRIPT TWO}"), ("p", "#1"), ("", "h#1"), ("p", "h"),
    ("p", "h#-1"), ("p", 1), (None, "h#1")])
def test_b82_a_name_that_no_engine_gives_is_none(engine, name):
    """One that can't be sent would end the control thread, which has to tell its prefill engine."""
    params = hold_params(HOLD) | {"remote_engine_id": engine, "remote_request_id": name}
    assert named_hold({"kv_transfer_params": params}) is None
