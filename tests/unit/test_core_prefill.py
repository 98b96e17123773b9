# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's side of a job, step by step, in a time that is passed in."""
import msgspec
import pytest

from vllm_pd.peer.core import PeerCore
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import AddPeer, Cancelled, Connect, Disconnect, DropPeer, Prefill, ToDecode
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.jobs import JobState, PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.settings.engine import PDConfig

BLOCK = 16
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK, 2, 2, 64, "hnd")
TOKENS = list(range(40))
ONE = m.Attempt("d", "r", 1)


def member(name, role, address="tcp://127.0.0.1:1"):
    return m.Member(name, role, address, FINGERPRINT)


D = member("d", m.Role.DECODE)


def job(number=1, incarnation="d"):
    return m.Job(m.Attempt(incarnation, "r", number), "tcp://127.0.0.1:1", TOKENS, BLOCK, 60.0)


def grant(claim=1, lease_s=9.0, blocks=(5, 6, 9), cached=1, attempt=ONE):
    return m.Grant(attempt, claim, list(blocks), cached, lease_s)


@pytest.fixture
def stranger():
    """A prefill engine that knows nobody."""
    return PrefillProtocol(member("p", m.Role.PREFILL), b"p", PrefillLimits())


@pytest.fixture
def side(stranger):
    """One that has peered with d."""
    connect, hello = stranger.members_are(0.0, [D, stranger.member])
    assert connect == Connect("d", D.address) and hello == ToDecode("d", m.Hello(stranger.member, b"p"))
    assert stranger.receive(0.0, "d", m.HelloReply(D, b"memory")) == [AddPeer("d", b"memory")]
    return stranger


def running(side, now=0.0):
    assert side.offer(now, job()) == [ToDecode("d", m.Claim(ONE, 1, 1))]
    assert side.receive(now, "d", grant()) == [Prefill(ONE, TOKENS, [6, 9], 1, [5], "d")]


@pytest.mark.parametrize("windows, tokens, cached, right", [
    ((), 40, 1, 3), ((0, 17), 40, 0, 3 + 2), ((0, 17), 40, 2, 3 + 1), ((17, 0, 64), 40, 1, 3 + 2 + 2),
    ((0, 8), 33, 0, 3 + 2)])
def test_b114_a_grant_names_the_rows_of_a_prompt(windows, tokens, cached, right):
    """As many as `protocol.rows` says, each once; one more or less is an error of D's, and nothing is computed."""
    fingerprint = msgspec.structs.replace(FINGERPRINT, windows=windows)
    p = msgspec.structs.replace(member("p", m.Role.PREFILL), fingerprint=fingerprint)
    d = msgspec.structs.replace(D, fingerprint=fingerprint)
    for count in (right - 1, right, right + 1):
        side = PrefillProtocol(p, b"p", PrefillLimits())
        side.members_are(0.0, [d, p])
        side.receive(0.0, "d", m.HelloReply(d, b"memory"))
        side.offer(0.0, msgspec.structs.replace(job(), token_ids=list(range(tokens)), cached_tokens=cached * BLOCK))
        (answer,) = side.receive(0.0, "d", grant(blocks=range(5, 5 + count), cached=cached))
        assert isinstance(answer, Prefill) is (count == right), answer
    assert len(answer.message.reason) and f"{right + 1} blocks granted for {tokens} tokens" in answer.message.reason


def test_b98_a_prefill_has_the_priority_of_its_job(side):
    side.offer(0.0, msgspec.structs.replace(job(), priority=3))
    (prefill,) = side.receive(0.0, "d", grant())
    assert prefill.priority == 3


def test_life_of_a_job(side):
    side.offer(1.0, job())
    assert side.states() == {ONE: JobState.CLAIMING} and not side.may_write(1.0, ONE)
    assert side.receive(1.5, "d", grant()) == [Prefill(ONE, TOKENS, [6, 9], 1, [5], "d")]
    assert side.may_write(1.5, ONE)
    assert side.writing(1.5, ONE) == [ToDecode("d", m.Writing(ONE, 1))] and side.writing(1.6, ONE) == []
    timings = m.Timings(prefill_s=2.0, transfer_s=1.0, bytes=8)
    assert side.sent(4.0, ONE, timings) == [ToDecode("d", m.Sent(ONE, 1, m.Timings(0.0, 0.5, 2.0, 1.0, 8)))]
    assert side.states() == {} and not side.may_write(4.0, ONE)
    assert side.sent(4.0, ONE, timings) == []


def test_lease_counts_from_before_the_claim_and_from_before_the_renewal(side):
    side.offer(0.0, job())
    side.receive(2.0, "d", grant())  # of 9 s, asked for at 0
    assert side.may_write(8.99, ONE) and not side.may_write(9.0, ONE)
    (renew,) = side.handle_timeout(5.0)
    assert renew == ToDecode("d", m.Renew(ONE, 1, 1))
    assert side.receive(7.0, "d", m.Renewed(ONE, 1, 1, 9.0)) == []  # asked for at 5
    assert side.may_write(13.99, ONE) and not side.may_write(14.0, ONE)
    # B29: the answer to an older renewal holds nothing
    side.handle_timeout(8.0)
    assert side.receive(8.5, "d", m.Renewed(ONE, 1, 1, 900.0)) == []
    assert not side.may_write(14.0, ONE) and side.dropped["renewed_unknown"] == 1


def test_b22_answers_that_take_longer_than_a_renewal_period_still_renew_the_lease(side):
    running(side)  # a lease of 9 s, so a renewal each 3 s
    sent_at, answered = {}, 0
    for now in [0.5 * half for half in range(1, 91)]:
        for action in side.handle_timeout(now):
            sent_at[action.message.stamp] = now
        assert side.states() == {ONE: JobState.RUNNING}
        if answered + 1 in sent_at and now >= sent_at[answered + 1] + 4.5:
            answered += 1
            assert side.receive(now, "d", m.Renewed(ONE, 1, answered, 9.0)) == []
            assert side.debug_state()[ONE]["lease_until"] == sent_at[answered] + 9.0
    assert answered > 10 and not side.dropped


def test_b29_renewals_that_are_not_answered_have_a_bound(side):
    running(side)
    side.handle_timeout(3.0)
    side.receive(3.0, "d", m.Renewed(ONE, 1, 1, 900.0))
    for number in range(2, 8):
        assert side.handle_timeout(3.0 * number) == [ToDecode("d", m.Renew(ONE, 1, number))]
    side.receive(22.0, "d", m.Renewed(ONE, 1, 3, 9000.0))  # one too old
    assert side.debug_state()[ONE]["lease_until"] == 903.0 and side.dropped["renewed_unknown"] == 1
    side.receive(22.0, "d", m.Renewed(ONE, 1, 5, 9000.0))
    side.receive(22.0, "d", m.Renewed(ONE, 1, 4, 9900.0))  # older than one that was answered
    assert side.debug_state()[ONE]["lease_until"] == 9015.0 and side.dropped["renewed_unknown"] == 2


def test_b22_end_of_the_lease_stops_the_job(side):
    running(side)
    assert side.handle_timeout(20.0) == [Cancelled(ONE)]
    assert side.receive(20.0, "d", m.Renewed(ONE, 1, 0, 100.0)) == [] and not side.may_write(20.0, ONE)
    assert side.handle_timeout(25.0) == []
    assert side.ended(26.0, ONE) == [ToDecode("d", m.Stopped(ONE, 1))]
    assert side.states() == {}


def test_b41_job_before_its_peer_waits_for_it(stranger):
    connect, hello = stranger.offer(0.0, job())
    assert isinstance(connect, Connect) and isinstance(hello.message, m.Hello)
    assert stranger.states() == {ONE: JobState.PEERING} and stranger.waiting_tokens() == [24]
    assert stranger.handle_timeout(0.6) == [connect, hello], "it may not have been possible to connect"
    assert stranger.receive(0.7, "d", m.HelloReply(D, b"memory")) == [
        AddPeer("d", b"memory"), ToDecode("d", m.Claim(ONE, 1, 1))]


def test_b41_the_wait_is_bounded(stranger):
    stranger.offer(0.0, job())
    for tenth in range(60):
        stranger.handle_timeout(tenth / 10)
    assert stranger.states() == {} and stranger.counters["peering_timeout"] == 1
    for number in range(1000):
        stranger.offer(0.0, job(number))
    assert len(stranger.states()) == PrefillLimits().max_jobs
    assert stranger.dropped["offer_too_many"] == 1000 - PrefillLimits().max_jobs
    # a peer that neither answers nor is registered is forgotten too
    for second in range(2, 20):
        actions = stranger.handle_timeout(float(second))
    assert actions == [] and stranger.next_timeout() is None


def test_b20_jobs_that_may_land_take_no_place_of_other_jobs(side):
    """They stay until their D is dead. The broker would offer jobs, and each would be dropped."""
    for number in range(PrefillLimits().max_jobs):
        side.offer(0.0, job(number))
        side.receive(0.0, "d", grant(number + 1, attempt=m.Attempt("d", "r", number)))
    for number in range(PrefillLimits().max_jobs):
        side.unproven(0.0, m.Attempt("d", "r", number), "why")
    assert len(side.unproven_jobs()) == PrefillLimits().max_jobs
    side.offer(0.0, job(999))
    assert m.Attempt("d", "r", 999) in side.states() and not side.dropped


@pytest.mark.parametrize("is_met", [True, False])
def test_b22_jobs_of_a_d_that_does_not_answer_take_no_place(stranger, is_met):
    stranger.members_are(0.0, [D])
    if is_met:
        stranger.receive(0.0, "d", m.HelloReply(D, b"memory"))
    stranger.offer(0.0, job(1))
    for tenth in range(51):
        stranger.handle_timeout(tenth / 10)
    assert stranger.states() == {}
    assert stranger.offer(5.1, job(1)) == [] and stranger.dropped["offer_silent_peer"] == 1
    assert stranger.states() == {} and stranger.waiting_tokens() == []
    hellos = [action for second in range(6, 10) for action in stranger.handle_timeout(float(second))]
    assert hellos == [Connect("d", D.address), ToDecode("d", stranger.hello)] * 4, "it is greeted until it answers"
    stranger.receive(10.0, "d", m.HelloReply(D, b"memory"))
    assert stranger.handle_timeout(11.0) == []
    (claim,) = stranger.offer(11.0, job(1))
    assert isinstance(claim.message, m.Claim)


def test_b42_refused_once_and_not_asked_again(stranger):
    stranger.offer(0.0, job())
    assert stranger.receive(0.1, "d", m.Refused("dtype", "float32", "bfloat16")) == [Disconnect("d")]
    assert "'float32'" in stranger.mismatch and "'bfloat16'" in stranger.mismatch and "dtype" in stranger.mismatch
    assert stranger.states() == {}
    assert stranger.offer(1.0, job(2)) == [] and stranger.dropped["offer_refused_peer"] == 1
    other = m.Member("e", m.Role.DECODE, "tcp://127.0.0.1:2", m.Fingerprint(1, "other", "", "", 16, 1, 1, 1, ""))
    assert stranger.members_are(1.0, [other]) == []


def test_claims_are_repeated_then_given_up_with_a_word(side):
    side.offer(0.0, job())
    *claims, failed, connect, hello = [action for tenth in range(1, 51) for action in side.handle_timeout(tenth / 10)]
    assert [claim.message for claim in claims] == [m.Claim(ONE, 1, 1)] * 9
    assert failed.message == m.Failed(ONE, 1, failed.message.reason)  # D may have granted it
    assert (connect, hello) == (Connect("d", D.address), ToDecode("d", side.hello))
    assert side.receive(6.0, "d", grant()) == [] and side.dropped["grant_unknown"] == 1


def test_b110_no_other_process_can_guess_a_claim_number():
    """B110: who names a claim may end it. An engine draws each anew, and D takes no word about another one."""
    config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700"})
    p = PeerCore(config, member("p", m.Role.PREFILL), b"p", lambda: 0.0).prefill_half
    p.members_are(0.0, [D])
    p.receive(0.0, "d", m.HelloReply(D, b"memory"))
    claims = [p.offer(0.0, job(number))[0].message.claim for number in range(32)]
    assert len({claim >> 20 for claim in claims}) == 32 and max(claims).bit_length() > 50
    d = DecodeProtocol(D, b"d", DecodeLimits())
    d.receive(0.0, "p", m.Hello(p.member, b"p"))
    d.submit(0.0, ONE, TOKENS, [5, 6, 9], 0)
    assert d.receive(0.0, "p", m.Claim(ONE, claims[0], 1))[0].message.claim == claims[0]
    for number in (0, 1, 2, claims[1]):
        d.receive(0.0, "p", m.Failed(ONE, number, "forged"))
        d.receive(0.0, "p", m.Stopped(ONE, number))
        assert d.fenced() == {ONE: "p"}
    d.receive(0.0, "p", m.Failed(ONE, claims[0], "by P"))
    assert not d.fenced()


def test_a_new_claim_never_takes_the_grant_of_an_older_one(side):
    side.offer(0.0, job())
    side.handle_timeout(5.5)
    side.receive(5.9, "d", m.HelloReply(D, b"memory"))
    (claim,) = side.offer(6.0, job())
    assert claim.message == m.Claim(ONE, 2, 1)
    assert side.receive(6.0, "d", grant(claim=1)) == [] and side.states() == {ONE: JobState.CLAIMING}
    # and D's cancel of the older one is answered, and leaves the new one alone
    assert side.receive(6.0, "d", m.Cancel(ONE, 1)) == [ToDecode("d", m.Stopped(ONE, 1))]
    assert side.states() == {ONE: JobState.CLAIMING}
    assert isinstance(side.receive(6.0, "d", grant(claim=2))[0], Prefill)


@pytest.mark.parametrize("bad", [
    grant(blocks=(5, 6)), grant(blocks=(5, 6, 6)), grant(blocks=(5, 6, 9, 10)), grant(cached=3), grant(cached=2**40),
    grant(lease_s=0.0), grant(blocks=(), cached=0)])
def test_a_grant_that_makes_no_sense_is_answered_with_failed(side, bad):
    side.offer(0.0, job())
    (failed,) = side.receive(0.0, "d", bad)
    assert isinstance(failed.message, m.Failed) and side.states() == {} and side.dropped["grant_bad"] == 1


def test_b30_failed_by_the_engine(side):
    running(side)
    assert side.failed(1.0, ONE, "x" * 10_000) == [ToDecode("d", m.Failed(ONE, 1, "x" * 1000))]
    assert side.states() == {} and side.failed(1.0, ONE, "again") == []


def test_cancel_reaches_a_job_in_every_state(side, stranger):
    stopped = [ToDecode("d", m.Stopped(ONE, 1))]
    # unknown
    assert side.receive(0.0, "d", m.Cancel(ONE, 1)) == stopped
    # claiming: the grant that is under way is void
    side.offer(0.0, job())
    assert side.receive(0.0, "d", m.Cancel(ONE, 1)) == stopped
    assert side.receive(0.0, "d", grant()) == []
    # running: the engine has the word
    side.offer(0.0, job())
    side.receive(0.0, "d", grant(claim=2))
    assert side.receive(0.0, "d", m.Cancel(ONE, 2)) == [Cancelled(ONE)]
    assert side.receive(0.0, "d", m.Cancel(ONE, 2)) == [] and not side.may_write(0.0, ONE)
    assert side.ended(0.0, ONE) == [ToDecode("d", m.Stopped(ONE, 2))]
    # ended
    assert side.receive(0.0, "d", m.Cancel(ONE, 2)) == [ToDecode("d", m.Stopped(ONE, 2))]
    # somebody else's
    assert side.receive(0.0, "d", m.Cancel(m.Attempt("e", "r", 1), 1)) == []


@pytest.mark.parametrize("end", ["sent", "failed", "ended"])
def test_any_end_after_a_cancel_is_ps_last_word(side, end):
    running(side)
    side.receive(0.0, "d", m.Cancel(ONE, 1))
    (word,) = {"sent": lambda: side.sent(1.0, ONE, m.Timings()), "failed": lambda: side.failed(1.0, ONE, "no"),
               "ended": lambda: side.ended(1.0, ONE)}[end]()
    assert isinstance(word.message, m.Stopped | m.Failed) and side.states() == {}


def test_denied(side):
    side.offer(0.0, job())
    assert side.receive(0.0, "e", m.Deny(ONE, 1, m.DenyReason.TAKEN)) == []
    assert side.receive(0.0, "d", m.Deny(ONE, 2, m.DenyReason.TAKEN)) == []
    assert side.states() == {ONE: JobState.CLAIMING}
    assert side.receive(0.0, "d", m.Deny(ONE, 1, m.DenyReason.TAKEN)) == []
    assert side.states() == {}


def test_d_that_forgot_us_is_greeted_and_asked_again(side):
    side.offer(0.0, job())
    (hello,) = side.receive(0.0, "d", m.Deny(ONE, 1, m.DenyReason.UNPEERED))
    assert isinstance(hello.message, m.Hello)
    assert side.receive(0.01, "d", m.HelloReply(D, b"memory")) == []
    assert side.handle_timeout(0.1) == [ToDecode("d", m.Claim(ONE, 2, 1))]


def test_offers_of_ourselves_and_twice_are_dropped(side):
    running(side)
    assert side.offer(0.0, job()) == [] and side.offer(0.0, job(1, "p")) == []
    assert side.dropped == {"offer_duplicate": 1, "offer_own": 1}


def test_b23_lost_d_is_dropped_when_nothing_of_it_is_open(side):
    running(side)
    side.offer(0.0, job(2))
    assert side.peer_lost(1.0, "d") == [Cancelled(ONE)]
    assert side.states() == {ONE: JobState.STOPPING}
    assert side.peer_lost(1.0, "d") == []
    assert side.ended(2.0, ONE) == [ToDecode("d", m.Stopped(ONE, 1)), DropPeer("d"), Disconnect("d")]
    assert side.states() == {} and side.peers() == {} and side.next_timeout() is None


def test_b23_a_d_that_is_heard_of_while_it_is_dropped_is_met_anew(side):
    """It waits for our word about its jobs, and that may have been lost: it must be able to ask again."""
    running(side)
    assert side.peer_lost(1.0, "d") == [Cancelled(ONE)]
    assert side.members_are(1.5, [D]) == []
    stopped, drop, disconnect, connect, hello = side.ended(2.0, ONE)
    assert stopped == ToDecode("d", m.Stopped(ONE, 1)) and (drop, disconnect) == (DropPeer("d"), Disconnect("d"))
    assert connect == Connect("d", D.address) and isinstance(hello.message, m.Hello)
    assert side.receive(3.0, "d", m.Cancel(ONE, 1)) == [ToDecode("d", m.Stopped(ONE, 1))]
    assert side.receive(3.0, "d", m.HelloReply(D, b"memory")) == [AddPeer("d", b"memory")]
    side.handle_timeout(60.0)
    assert side.peers() == {"d": D}, "it is listed"


def unadded(side):
    """The transport could not add d. Returns when that is tried again."""
    side._peering.limits = PrefillLimits(add_retry_s=1.5)
    side.peer_unadded(1.0, "d")
    assert side.next_timeout() == 2.5 and side.handle_timeout(2.4) == []
    return 2.5


def test_b107_a_d_that_can_not_be_added_is_tried_ever_more_rarely_until_a_write_went_well(side):
    """B107: each try takes time of all others. Meanwhile everybody knows that nothing can be written there."""
    limits, now = side.limits, 0.0
    pauses = []
    for _ in range(6):
        side.peer_unadded(now, "d")
        assert side.unreached_peers(now) == ["d"]
        pauses.append(side.next_timeout() - now)
        now += pauses[-1]
        side.handle_timeout(now)
        side.receive(now, "d", m.HelloReply(D, b"memory"))
        assert side.unreached_peers(now) == ["d"], "it is tried"
        assert side.unreached_peers(now + limits.add_s) == []
    assert pauses == [limits.add_retry_s, 8.0, 16.0, *[limits.add_retry_max_s] * 3]
    running(side, now)
    side.sent(now, ONE, m.Timings())
    assert side.unreached_peers(now) == []
    side.peer_unadded(now, "d")
    assert side.next_timeout() == now + limits.add_retry_s
    e = msgspec.structs.replace(D, incarnation="e")
    side.members_are(now, [D, e])
    side.receive(now, "e", m.HelloReply(e, b"memory"))
    side.peer_unadded(now, "e")
    assert side._peering.find("e").next_hello == now + 2 * limits.add_retry_s, "two take no more time than one"


@pytest.mark.parametrize("end", ["ended", "failed", "sent"])
def test_b27_a_d_that_could_not_be_added_is_not_dropped_while_a_rank_may_write_there(side, end):
    """One that has added it, as others have not."""
    running(side)
    again = unadded(side)
    if end == "ended":
        assert side.receive(1.0, "d", m.Cancel(ONE, 1)) == [Cancelled(ONE)]
    assert not any(isinstance(one, DropPeer) for one in side.handle_timeout(again))
    getattr(side, end)(again, ONE, *{"failed": ["why"], "sent": [m.Timings()]}.get(end, []))
    retry = again + PrefillLimits().hello_retry_s
    assert side.handle_timeout(retry) == [DropPeer("d"), ToDecode("d", side.hello)]
    assert side.receive(retry, "d", m.HelloReply(D, b"memory")) == [AddPeer("d", b"memory")]
    assert side.handle_timeout(retry + 100) == [], "it is a peer"


def test_b27_a_job_that_is_granted_while_its_d_is_added_again_fails(side):
    """Before that it is not known whether anything can be written there."""
    again = unadded(side)
    assert side.offer(again - 0.1, job()) == [ToDecode("d", m.Claim(ONE, 1, 1))]
    assert side.handle_timeout(again)[:2] == [DropPeer("d"), ToDecode("d", side.hello)]
    [failed] = side.receive(again, "d", grant())
    assert isinstance(failed.message, m.Failed) and not failed.message.parted and not side.states()


def test_b23_a_d_that_could_not_be_added_and_is_lost_is_dropped(side):
    """Some ranks may have added it."""
    unadded(side)
    assert side.peer_lost(2.0, "d") == [DropPeer("d"), Disconnect("d")] and side.next_timeout() is None


def test_b27_what_a_transport_says_late_of_a_d_changes_nothing(side):
    """It is leaving, or greeted again, or gone."""
    running(side)
    side.peer_lost(1.0, "d")
    side.peer_unadded(1.0, "d")
    assert side.ended(2.0, ONE)[1:] == [DropPeer("d"), Disconnect("d")]
    side.peer_unadded(2.0, "d")
    assert side.peers() == {} and side.next_timeout() is None


def test_b23_a_d_that_was_met_is_greeted_again_whatever_its_role_is_by_now(side):
    """It switched to prefilling while a fence of ours was up, and can ask about it only on a connection of ours."""
    running(side)
    side.peer_lost(1.0, "d")
    side.ended(2.0, ONE)
    relisted = member("d", m.Role.PREFILL)
    connect, hello = side.members_are(3.0, [relisted, member("p2", m.Role.PREFILL)])
    assert connect == Connect("d", D.address) and isinstance(hello.message, m.Hello)
    assert side.receive(3.0, "d", m.Cancel(ONE, 1)) == [ToDecode("d", m.Stopped(ONE, 1))]


def test_what_is_kept_of_those_that_were_met_is_bounded():
    side = PrefillProtocol(member("p", m.Role.PREFILL), b"p", PrefillLimits(max_peers=3))
    for number in range(10):
        one = member(f"d{number}", m.Role.DECODE)
        side.members_are(0.0, [one])
        side.receive(0.0, one.incarnation, m.HelloReply(one, b"memory"))
        side.peer_lost(0.0, one.incarnation)
    known = [number for number in range(10) if side.members_are(1.0, [member(f"d{number}", m.Role.PREFILL)])]
    assert known == [7, 8, 9]


def test_b41_a_job_that_comes_while_its_d_is_dropped_is_claimed_when_they_have_met_anew(side):
    running(side)
    side.peer_lost(1.0, "d")
    assert side.offer(1.5, job(2)) == []
    assert DropPeer("d") in side.ended(2.0, ONE)
    two = m.Attempt("d", "r", 2)
    assert side.receive(2.1, "d", m.HelloReply(D, b"memory")) == [
        AddPeer("d", b"memory"), ToDecode("d", m.Claim(two, 2, 1))]


def test_d_is_lost_when_the_registry_and_itself_are_silent_for_long(side):
    side.members_are(10.0, [])
    assert side.handle_timeout(14.9) == []
    side.members_are(14.9, [D])
    assert side.handle_timeout(30.0) == []
    side.members_are(30.0, [])
    side.receive(33.0, "d", m.Cancel(ONE, 9))  # it lives
    assert side.handle_timeout(36.0) == []
    assert side.handle_timeout(38.0) == [DropPeer("d"), Disconnect("d")]
    connect, hello = side.members_are(40.0, [D])  # and if it was only slow, it is greeted anew
    assert isinstance(connect, Connect) and isinstance(hello.message, m.Hello)
