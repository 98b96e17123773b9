# SPDX-License-Identifier: Apache-2.0
"""The decode engine's side of an attempt, step by step, in a time that is passed in."""

import msgspec
import pytest

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AttemptEnd,
    Fallback,
    FallbackReason,
    Prefilled,
    Released,
    Timed,
    ToBroker,
    ToPrefill,
)
from vllm_pd.protocol.attempts import AttemptState, DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol

BLOCK = 16
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK, 2, 2, 64, "hnd")
LIMITS = DecodeLimits(lease_s=10.0, deadline_s=60.0, claim_retry_s=2.0, ttl_s=5.0)
TOKENS = list(range(40))


def member(name, role, fingerprint=FINGERPRINT):
    return m.Member(name, role, "tcp://127.0.0.1:1", fingerprint)


def attempt(number, request_id="r"):
    return m.Attempt("d", request_id, number)


@pytest.fixture
def side():
    """A decode engine that knows two prefill engines."""
    side = DecodeProtocol(member("d", m.Role.DECODE), b"memory", LIMITS)
    for name in ("p", "q"):
        (reply,) = side.receive(0.0, name, m.Hello(member(name, m.Role.PREFILL), b""))
        assert reply == ToPrefill(name, m.HelloReply(side.member, b"memory"))
    return side


def granted(side, number=1, now=0.0, claim=7, ranks=1):
    """Submit and grant to p, which has so many ranks."""
    side.peers["p"] = member("p", m.Role.PREFILL, msgspec.structs.replace(FINGERPRINT, tp=ranks))
    side.submit(now, attempt(number), TOKENS, [5, 6, 9], 1)
    (grant,) = side.receive(now + 0.5, "p", m.Claim(attempt(number), claim, ranks))
    assert grant == ToPrefill("p", m.Grant(attempt(number), claim, [5, 6, 9], 1, LIMITS.lease_s))
    return attempt(number)


def assert_empty(side):
    assert side.states() == {} and side.fenced() == {} and side.next_timeout() is None
    assert side.writing_since() is None and side.queued() == 0


def test_b98_a_job_has_the_priority_of_its_request(side):
    (put,) = side.submit(1.0, attempt(1), TOKENS, [5, 6, 9], 1, priority=-7)
    assert put.message.job.priority == -7
    for number, priority, sent in ((2, 2**64, m.MAX_PRIORITY), (3, -2**70, -m.MAX_PRIORITY)):
        (other,) = side.submit(1.0, attempt(number), TOKENS, [5, 6, 9], 1, priority=priority)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(other.message.job), type=m.Job).priority == sent
    frame = msgspec.msgpack.encode(put.message.job)
    *older, priority, _, _, _ = msgspec.msgpack.decode(frame)
    assert priority == -7
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.Job).priority == 0, "of an older engine"


@pytest.mark.parametrize("leases", [True, False])
def test_b22_the_limits_of_open_attempts_are_brought_forward(side, leases):
    """What the tests of whole engines do instead of a wait: a lease, or a deadline, is over at the given time."""
    granted(side)
    assert side.bring_forward(3.0, leases) == 1
    side.handle_timeout(2.9)
    assert side.states() == {attempt(1): AttemptState.GRANTED}
    side.handle_timeout(3.0)
    assert side.states() == {attempt(1): AttemptState.EXPIRED} and side.bring_forward(3.0, leases) == 0


def test_life_of_an_attempt_that_is_done(side):
    # 1. The job carries no block id, only how much is cached.
    (put,) = side.submit(1.0, attempt(1), TOKENS, [5, 6, 9], 1)
    assert put == ToBroker(m.Put(m.Job(attempt(1), "tcp://127.0.0.1:1", TOKENS, BLOCK, 60.0)))
    assert side.states() == {attempt(1): AttemptState.QUEUED}
    # 2. The claim brings the blocks.
    side.receive(3.0, "p", m.Claim(attempt(1), 7))
    assert side.fenced() == {attempt(1): "p"} and side.writing_since() == float("-inf")
    # 3. P begins to write: from now on the notice may come.
    assert side.receive(3.5, "p", m.Writing(attempt(1), 7)) == [] and side.writing_since() == 3.5
    # 4. P's word is a wake-up, not the end.
    assert side.receive(4.0, "p", m.Sent(attempt(1), 7, m.Timings(0.0, 0.25, 0.5, 0.125, 99))) == []
    assert side.writing_since() == 4.0
    # 5. The notice is the end, with everybody's timings.
    timings = m.Timings(2.0, 0.25, 0.5, 0.125, 99, True)
    assert side.arrived(4.0, attempt(1), 0) == [Prefilled(attempt(1), timings, "p", len(TOKENS) - 16)]
    assert_empty(side)
    assert not side.dropped


def test_timings_that_come_after_the_end_come_once(side):
    one = granted(side)
    (done,) = side.arrived(1.0, one, 0)
    assert not done.timings.measured and done.timings.queue_s == 0.5
    (timed,) = side.receive(1.0, "p", m.Sent(one, 7, m.Timings(bytes=3)))
    assert timed == Timed(one, m.Timings(queue_s=0.5, bytes=3, measured=True), "p", len(TOKENS) - 16)
    assert side.receive(1.0, "p", m.Sent(one, 7, m.Timings(bytes=3))) == []
    assert side.dropped["sent_unknown"] == 1


def test_b28_every_rank_must_give_notice(side):
    one = granted(side, ranks=3)
    assert side.arrived(1.0, one, 0) == side.arrived(1.0, one, 2) == []
    # B29: doubled, and from ranks that there are not
    assert side.arrived(1.0, one, 2) == side.arrived(1.0, one, 3) == side.arrived(1.0, one, -1) == []
    assert side.dropped == {"notice_duplicate": 1, "notice_unknown": 2}
    # at the end of the lease D moves on; the missing notice only lifts the fence
    fallback, cancel = side.handle_timeout(11.0)
    assert fallback == Fallback(one, FallbackReason.LEASE, AttemptEnd.EXPIRED, fallback.detail, "p")
    assert cancel == ToPrefill("p", m.Cancel(one, 7))
    assert side.arrived(12.0, one, 1) == [Released(one)]
    assert_empty(side)


def test_b28_b101_the_ranks_of_all_stages_give_notice(side):
    """B101: D goes on with the notice of the last one."""
    side.peers["p"] = member("p", m.Role.PREFILL, msgspec.structs.replace(FINGERPRINT, tp=2, pp=2))
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1)
    side.receive(0.5, "p", m.Claim(attempt(1), 7, 4))
    assert [bool(side.arrived(1.0, attempt(1), rank)) for rank in (3, 0, 2, 0, 4, 1)] == [False] * 5 + [True]


@pytest.mark.parametrize("ranks", [1, 3])
def test_b28_a_claim_for_another_number_of_ranks_is_dropped(side, ranks):
    side.peers["p"] = member("p", m.Role.PREFILL, msgspec.structs.replace(FINGERPRINT, tp=2))
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1)
    assert side.receive(0.5, "p", m.Claim(attempt(1), 7, ranks)) == []
    assert side.dropped == {"claim_ranks": 1} and side.fenced() == {}


def test_the_word_that_all_is_sent_renews_the_lease(side):
    """P renews no more, while the engine may be in a step that lasts longer than the lease."""
    one = granted(side)
    side.receive(9.0, "p", m.Sent(one, 7, m.Timings()))
    assert side.handle_timeout(18.9) == []
    (prefilled, ) = side.arrived(18.9, one, 0)
    assert prefilled.attempt == one
    two = granted(side, 2)
    side.receive(9.0, "p", m.Sent(two, 7, m.Timings()))
    fallback, _ = side.handle_timeout(19.0)
    assert fallback.reason is FallbackReason.LEASE


def test_b22_no_release_by_time_alone(side):
    one = granted(side)
    assert Released(one) not in side.handle_timeout(11.0)
    cancels = 0
    for second in range(12, 4000):
        actions = side.handle_timeout(float(second))
        assert all(action == ToPrefill("p", m.Cancel(one, 7)) for action in actions)
        cancels += len(actions)
    assert 300 < cancels < 500, "asked again and again, at a bounded rate"
    assert side.fenced() == {one: "p"}
    assert side.receive(4000.0, "p", m.Stopped(one, 7)) == [Released(one)]
    assert_empty(side)


def test_late_word_of_an_older_claim_lifts_no_fence(side):
    """P gave claim 6 up, said so, claimed anew, and was granted 7; its first word is late."""
    one = granted(side, claim=7)
    for word in (m.Failed(one, 6, "timeout"), m.Stopped(one, 6), m.Sent(one, 6, m.Timings()), m.Writing(one, 6)):
        assert side.receive(1.0, "p", word) == []
    assert side.states() == {one: AttemptState.GRANTED} and side.fenced() == {one: "p"}
    assert sum(side.dropped.values()) == 4


def test_b29_words_of_others_change_nothing(side):
    one = granted(side)
    before = (side.states(), side.fenced(), side.next_timeout())
    words = [("q", m.Failed(one, 7, "")), ("q", m.Stopped(one, 7)), ("q", m.Sent(one, 7, m.Timings())),
             ("p", m.Failed(attempt(99), 7, "")), ("p", m.Stopped(attempt(99), 7)), ("p", m.Heard("b", 0)),
             ("p", m.Sent(m.Attempt("old", "r", 1), 7, m.Timings())), ("d", m.Hello(side.member, b""))]
    for count, (sender, word) in enumerate(words, 1):
        assert side.receive(1.0, sender, word) == []
        assert sum(side.dropped.values()) == count
    for late in (attempt(0), m.Attempt("d", "r2", 1), m.Attempt("old", "r", 1)):
        assert side.arrived(1.0, late, 0) == []
    assert (side.states(), side.fenced(), side.next_timeout()) == before


def test_a_grant_is_repeated_to_its_holder_and_denied_to_all_others(side):
    one = granted(side)
    assert side.receive(1.0, "p", m.Claim(one, 7)) == [ToPrefill("p", m.Grant(one, 7, [5, 6, 9], 1, 10.0))]
    assert side.receive(1.0, "q", m.Claim(one, 7)) == [ToPrefill("q", m.Deny(one, 7, m.DenyReason.TAKEN))]
    assert side.receive(1.0, "p", m.Claim(one, 8)) == [ToPrefill("p", m.Deny(one, 8, m.DenyReason.TAKEN))]
    assert side.receive(1.0, "p", m.Claim(attempt(9), 9)) == [ToPrefill("p", m.Deny(attempt(9), 9, "unknown"))]
    side.submit(1.0, attempt(2), TOKENS, [1, 2, 3], 0)
    assert side.receive(1.0, "stranger", m.Claim(attempt(2), 1)) == [
        ToPrefill("stranger", m.Deny(attempt(2), 1, m.DenyReason.UNPEERED))]
    side.abort(2.0, one)
    assert side.receive(2.0, "p", m.Claim(one, 7)) == [ToPrefill("p", m.Deny(one, 7, m.DenyReason.ENDED))]


def test_b25_abort_while_queued_releases_at_once(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 3], 0)
    assert side.abort(1.0, attempt(1)) == [ToBroker(m.Withdraw(attempt(1))), Released(attempt(1))]
    assert side.abort(1.0, attempt(1)) == []
    assert side.receive(1.0, "p", m.Claim(attempt(1), 1))[0].message.reason is m.DenyReason.UNKNOWN
    assert_empty(side)


@pytest.mark.parametrize("word", [m.Stopped(attempt(1), 7), m.Failed(attempt(1), 7, "no")])
def test_b25_abort_while_granted_releases_on_ps_word(side, word):
    one = granted(side)
    assert side.abort(1.0, one) == [ToPrefill("p", m.Cancel(one, 7))]
    assert side.states() == {one: AttemptState.CANCELLED}
    assert side.receive(2.0, "p", word) == [Released(one)]
    assert_empty(side)


def test_p_gives_up_means_fallback_and_release(side):
    one = granted(side)
    assert side.receive(1.0, "p", m.Failed(one, 7, "too long")) == [
        Fallback(one, FallbackReason.FAILED, AttemptEnd.FAILED, "too long", "p"), Released(one)]
    assert_empty(side)


def test_b21_death_of_p_ends_and_releases_what_it_held(side):
    one = granted(side, 1)
    two = granted(side, 2)
    side.submit(0.6, attempt(3), TOKENS, [7, 8, 10], 0)
    side.abort(1.0, two)
    actions = side.peer_dead(2.0, "p")
    assert [a for a in actions if isinstance(a, Released)] == [Released(one), Released(two)]
    assert [a.attempt for a in actions if isinstance(a, Fallback)] == [one]
    assert side.states() == {attempt(3): AttemptState.QUEUED}
    assert side.peer_dead(2.0, "p") == []


def test_renewal_holds_the_lease_and_ends_with_the_attempt(side):
    one = granted(side)
    for second in range(5, 60, 5):
        assert side.handle_timeout(float(second)) == []
        assert side.receive(float(second), "p", m.Renew(one, 7, second)) == [
            ToPrefill("p", m.Renewed(one, 7, second, 10.0))]
    (fallback, _) = side.handle_timeout(60.0)
    assert (fallback.reason, fallback.outcome) == (FallbackReason.DEADLINE, AttemptEnd.EXPIRED)
    assert side.receive(61.0, "p", m.Renew(one, 7, 99)) == [ToPrefill("p", m.Cancel(one, 7))]


def test_unclaimed_job_is_put_again_until_its_deadline(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 3], 0)
    puts = [now for now in range(1, 60) for action in side.handle_timeout(float(now))
            if isinstance(action.message, m.Put)]
    assert puts == list(range(2, 60, 2))
    fallback, withdraw, released = side.handle_timeout(60.0)
    assert (fallback.reason, fallback.outcome) == (FallbackReason.DEADLINE, AttemptEnd.EXPIRED)
    assert withdraw == ToBroker(m.Withdraw(attempt(1))) and released == Released(attempt(1))
    assert_empty(side)


def test_b22_a_job_that_is_taken_again_and_again_and_not_claimed_ends_before_its_deadline(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 3], 0)
    for _ in range(2):  # a broker that has lost its jobs has given them to nobody
        side.requeue(0.0)
        for number in range(LIMITS.max_unclaimed):
            assert side.put_reply(2.0 * number, m.PutReply(attempt(1), None, 1, True)) == []
            assert side.put_reply(2.0 * number, m.PutReply(attempt(1), None, 1)) == [], "it still waits"
    fallback, withdraw, released = side.put_reply(10.0, m.PutReply(attempt(1), None, 1, True))
    assert (fallback.reason, fallback.outcome, fallback.peer) == (FallbackReason.PEER, AttemptEnd.FAILED, "")
    assert withdraw == ToBroker(m.Withdraw(attempt(1))) and released == Released(attempt(1))
    # a claim that is late is denied
    (deny,) = side.receive(10.1, "p", m.Claim(attempt(1), 1))
    assert deny.message == m.Deny(attempt(1), 1, m.DenyReason.UNKNOWN)
    assert_empty(side)


def test_b26_no_broker_at_submit(side):
    side.broker_is(0.0, False)
    fallback, released = side.submit(0.0, attempt(1), TOKENS, [1, 2, 3], 0)
    assert fallback.reason is FallbackReason.BROKER and released == Released(attempt(1))
    # known only when the put was to leave
    side.broker_is(1.0, True)
    side.submit(1.0, attempt(2), TOKENS, [1, 2, 3], 0)
    assert side.put_failed(1.0, attempt(2))[0].reason is FallbackReason.BROKER
    assert_empty(side)


def test_b26_broker_lost_while_waiting(side):
    one = granted(side, 1)
    side.submit(0.5, attempt(2), TOKENS, [1, 2, 4], 0)
    side.broker_is(1.0, False)
    assert not any(isinstance(action, Fallback) for now in (2.0, 4.0, 5.9) for action in side.handle_timeout(now))
    fallback, released = side.handle_timeout(6.0)
    assert fallback == Fallback(attempt(2), FallbackReason.BROKER, AttemptEnd.FAILED, fallback.detail)
    assert released == Released(attempt(2))
    assert side.states() == {one: AttemptState.GRANTED}, "what is granted needs no broker"


def test_b26_broker_back_in_time(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 4], 0)
    side.broker_is(1.0, False)
    (put,) = side.broker_is(4.0, True)
    assert put.message.job.attempt == attempt(1) and put.message.job.deadline_s == 56.0
    assert not any(isinstance(action, Fallback) for action in side.handle_timeout(6.5))


def test_no_prefill_engine_left(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 4], 0)
    side.peers_are(1.0, [])
    side.peers_are(2.0, [])
    side.handle_timeout(2.0)
    fallback, *_ = side.handle_timeout(6.0)
    assert fallback.reason is FallbackReason.PEER


def test_b21_a_job_waits_for_no_peer_that_it_avoids(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 4], 0, ("p",), 30.0)
    (put, ) = side.requeue(0.0)
    assert put.message.job.avoid == ("p",) and put.message.job.deadline_s == 30.0
    claim = m.Claim(attempt(1), 1)
    assert side.receive(0.5, "p", claim) == [ToPrefill("p", m.Deny(attempt(1), 1, m.DenyReason.AVOIDED))]
    side.peers_are(1.0, ["p"])
    side.peers_are(2.0, ["p", "q"])
    side.peers_are(3.0, ["p"])
    assert not any(isinstance(action, Fallback) for action in side.handle_timeout(7.9))
    fallback, *_ = side.handle_timeout(8.0)
    assert fallback.reason is FallbackReason.PEER and fallback.peer == ""


def test_put_into_a_full_queue(side):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 4], 0)
    assert side.put_reply(0.1, m.PutReply(attempt(1), None, 1)) == []
    fallback, _, released = side.put_reply(0.1, m.PutReply(attempt(1), m.PutRefusal.FULL, 0))
    assert fallback.reason is FallbackReason.QUEUE and released == Released(attempt(1))
    assert side.put_reply(0.2, m.PutReply(attempt(1), m.PutRefusal.FULL, 0)) == []
    assert_empty(side)


@pytest.mark.parametrize("refusal", [m.PutRefusal.UNREGISTERED, m.PutRefusal.NO_PEER])
def test_b26_broker_that_knows_nobody_yet_gets_the_job_again_soon(side, refusal):
    side.submit(0.0, attempt(1), TOKENS, [1, 2, 4], 0)
    assert side.put_reply(0.1, m.PutReply(attempt(1), refusal, 0)) == []
    (put,) = side.handle_timeout(0.4)
    assert isinstance(put.message, m.Put)


def test_numbers_must_grow_so_that_a_reused_request_id_is_another_attempt(side):
    one = granted(side, 1)
    side.arrived(1.0, one, 0)
    with pytest.raises(ValueError, match="not newer"):
        side.submit(2.0, one, TOKENS, [1, 2, 3], 0)
    with pytest.raises(ValueError, match="not newer"):
        side.submit(2.0, m.Attempt("other", "r", 5), TOKENS, [1, 2, 3], 0)
    side.submit(2.0, attempt(2), TOKENS, [1, 2, 3], 0)
    assert side.arrived(2.0, one, 0) == [], "an old notice is not for the new attempt of the same request"
    assert side.states() == {attempt(2): AttemptState.QUEUED}


def test_b42_other_fingerprint_is_refused_with_both_values(side):
    for key, theirs in [("protocol", 9), ("model", "other"), ("dtype", "bfloat16"), ("kv_dtype", "fp8"),
                        ("block_size", 32), ("layers", 3), ("kv_heads", 1), ("head_size", 128), ("layout", "nhd"),
                        ("tp", 2), ("pp", 3), ("transport", "torch"), ("windows", (0, 64))]:
        fingerprint = m.Fingerprint(**{**{k: getattr(FINGERPRINT, k) for k in FINGERPRINT.__struct_fields__},
                                       key: theirs})
        (refused,) = side.receive(0.0, "x", m.Hello(member("x", m.Role.PREFILL, fingerprint), b""))
        ours = getattr(FINGERPRINT, key)
        assert refused == ToPrefill("x", m.Refused(key, str(ours), str(theirs)))
        assert "x" not in side.peers
        assert key in side.mismatch and repr(ours) in side.mismatch and repr(theirs) in side.mismatch
    assert side.dropped["hello_refused"] == 13


def test_b114_engines_with_states_have_as_many_ranks():
    """A rank holds its part of a state, which is not known here."""
    ours = msgspec.structs.replace(FINGERPRINT, windows=(2, 0), states="MAMBA2 4:float32 in 2+2 layers")
    theirs = msgspec.structs.replace(ours, tp=2, states="MAMBA2 2:float32 in 2+2 layers")
    assert ours.first_difference(theirs) == ("tp", 1, 2) and theirs.first_difference(ours) == ("tp", 2, 1)
    assert ours.first_difference(msgspec.structs.replace(ours, tp=2)) == ("tp", 1, 2)
    other = msgspec.structs.replace(ours, states="GDN_ATTN 4:float32 in 2+2 layers")
    assert ours.first_difference(other) == ("states", ours.states, other.states)
    assert FINGERPRINT.first_difference(ours) == ("windows", (), (2, 0))


def test_b114_groups_on_one_side_only_are_named_by_their_windows():
    """Layers of several groups share memory, so `layers` differs, too."""
    grouped = msgspec.structs.replace(FINGERPRINT, windows=(0, 64), layers=FINGERPRINT.layers // 2)
    assert FINGERPRINT.first_difference(grouped) == ("windows", (), (0, 64))
    assert grouped.first_difference(FINGERPRINT) == ("windows", (0, 64), ())
    assert grouped.first_difference(msgspec.structs.replace(grouped, windows=(64, 0)))[0] == "windows"


def test_peers_are_bounded_and_those_at_work_are_kept():
    side = DecodeProtocol(member("d", m.Role.DECODE), b"", DecodeLimits(lease_s=LIMITS.lease_s, max_peers=3))
    side.receive(0.0, "p", m.Hello(member("p", m.Role.PREFILL), b""))
    granted(side)
    for number in range(50):
        side.receive(0.0, f"x{number}", m.Hello(member(f"x{number}", m.Role.PREFILL), b""))
    assert "p" in side.peers and len(side.peers) <= 4


def test_hello_of_the_wrong_role_or_name_is_dropped(side):
    assert side.receive(0.0, "x", m.Hello(member("x", m.Role.DECODE), b"")) == []
    assert side.receive(0.0, "x", m.Hello(member("y", m.Role.PREFILL), b"")) == []
    assert side.dropped == {"hello_role": 1, "hello_foreign": 1} and len(side.peers) == 2


def test_end_of_the_control_thread_ends_every_attempt(side):
    one = granted(side, 1)
    side.submit(0.5, attempt(2), TOKENS, [1, 2, 4], 0)
    actions = side.shut(1.0, "why")
    assert [(a.attempt, a.reason) for a in actions if isinstance(a, Fallback)] == [
        (one, FallbackReason.CONTROL), (attempt(2), FallbackReason.CONTROL)]
    assert [a for a in actions if isinstance(a, Released)] == [Released(attempt(2))]


@pytest.fixture
def two_sided():
    """As `side`, with a two-sided transport."""
    side = DecodeProtocol(member("d", m.Role.DECODE), b"memory", msgspec.structs.replace(LIMITS, own_fence=True))
    side.receive(0.0, "p", m.Hello(member("p", m.Role.PREFILL), b""))
    return side


ENDS = {
    "failed": lambda side, one: side.receive(1.0, "p", m.Failed(one, 7, "why")),
    "stopped": lambda side, one: side.receive(1.0, "p", m.Stopped(one, 7)),
    "dead": lambda side, one: side.peer_dead(1.0, "p"),
    "aborted": lambda side, one: side.abort(1.0, one),
    "lease": lambda side, one: side.handle_timeout(11.0),
}


@pytest.mark.parametrize("how", ENDS)
def test_b22_with_a_two_sided_transport_our_own_ranks_bring_the_fence_down(two_sided, how):
    side, one = two_sided, granted(two_sided)
    actions = ENDS[how](side, one)
    assert how == "aborted" or any(isinstance(action, Fallback) for action in actions)
    assert [action.message for action in actions if isinstance(action, ToPrefill)] == [m.Cancel(one, 7)]
    for late in (m.Failed(one, 7, "late"), m.Stopped(one, 7)):
        actions += side.receive(12.0, "p", late)
    actions += side.arrived(12.0, one, 0) + side.peer_dead(12.0, "p")
    assert not any(isinstance(action, Released) for action in actions) and side.fenced() == {one: "p"}
    assert side.grant_closed(12.5, one) == [Released(one)]
    assert side.grant_closed(12.5, one) == []
    assert_empty(side)


def test_b22_the_word_of_our_ranks_ends_no_attempt_and_counts_for_nothing_with_one_sided_writes(side, two_sided):
    one = granted(two_sided)
    assert two_sided.grant_closed(1.0, one) == []
    assert isinstance(two_sided.arrived(1.0, one, 0)[0], Prefilled)
    two = granted(side)
    side.abort(1.0, two)
    assert side.grant_closed(1.0, two) == [] and side.fenced() == {two: "p"}
