# SPDX-License-Identifier: Apache-2.0
"""What an engine decides as a peer, in a time that is passed in: heartbeats, room for jobs, news, leaving."""
import msgspec
import pytest

from vllm_pd.config import PDConfig
from vllm_pd.control.credits import JobCredits
from vllm_pd.control.degraded import Cause, Degraded, DegradedLog
from vllm_pd.control.protocol import RECONNECT_POLL_S, PeerProtocol
from vllm_pd.core import messages as m
from vllm_pd.core.actions import Prefill, ToBroker

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
US = m.Member("us", m.Role.BOTH, "tcp://127.0.0.1:1", FINGERPRINT)
CONFIG = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"})


@pytest.fixture
def roused():
    return []


@pytest.fixture
def sides(roused):
    """An engine of both roles whose broker lists it alone."""
    sides = PeerProtocol(CONFIG, US, b"memory", 0.0, lambda: roused.append(None))
    sides.registered(0.0, sent=True)
    sides.from_broker(0.0, "b", m.Peers("b", 1, [US], 0))
    sides.to_send()
    roused.clear()
    return sides


def submitted(sides, now=1.0):
    attempt = sides.next_attempt("r")
    sides.do(sides.decode.submit(now, attempt, [1] * 20, [1, 2], 0))
    return attempt


def test_the_broker_is_sent_credits_once_and_a_new_broker_again():
    credits = JobCredits()
    credits.set(3)
    credits.offered(7)
    assert credits.update(3) == m.Credit(3, 7)
    credits.sent(m.Credit(3, 7))
    assert credits.update(3) is None and credits.update(2) == m.Credit(2, 7)
    credits.send_again()
    assert credits.update(3) == m.Credit(3, 7)
    credits.send_again(new_broker=True)
    assert credits.update(3) == m.Credit(3, 0)
    credits.use(5)
    assert credits.jobs == 0


def test_jobs_that_come_count_until_the_engine_has_room_again(sides, roused):
    sides.set_credits(2)
    assert roused and sides.to_send()[1].jobs == 2
    sides.do([Prefill(m.Attempt("d", "r", 0), [1], [1], 0, [], "d")])
    assert sides.to_send()[1].jobs == 1
    sides.take_events()
    assert sides.to_send()[1].jobs == 1, "it was told of what it took"
    sides.room_told(sides.to_send()[1])
    roused.clear()
    sides.set_credits(1)
    assert not roused and sides.to_send()[1] is None


def test_b43_one_that_drains_has_no_room_and_leaves_when_nothing_is_open(sides):
    attempt = submitted(sides)
    sides.set_credits(2)
    sides.drain(2.0)
    assert sides.to_send()[1].jobs == 0
    assert sides.registration(2.0).member.draining, "everybody hears of it soon"
    sides.registered(2.0, sent=True)
    sides.from_broker(2.0, "b", m.Peers("b", 2, [sides.state.member()], 0))
    sides.set_load(m.Load())
    assert not sides.leave_if_drained(), "an attempt is open"
    sides.do(sides.decode.abort(3.0, attempt))
    sides.to_send()
    assert not sides.leave_if_drained(), "the engine has not heard its end"
    sides.take_events()
    sides.do([ToBroker(m.Withdraw(attempt))])
    assert not sides.leave_if_drained(), "the broker has not heard its end"
    sides.to_send()
    assert sides.leave_if_drained() and not sides.leave_if_drained()
    assert sides.registration(100.0) is None


def test_a_heartbeat_that_did_not_leave_is_tried_again_soon(sides):
    assert sides.registration(0.5 * CONFIG.heartbeat_s) is None
    assert sides.registration(CONFIG.heartbeat_s) == m.Register(US, "b", 1)
    sides.registered(CONFIG.heartbeat_s, sent=False)
    assert not sides.cluster.up and sides.registration(CONFIG.heartbeat_s + RECONNECT_POLL_S) is not None


def test_the_engine_is_woken_once_for_what_it_has_not_taken(sides):
    assert not sides.announce()
    sides.do(sides.decode.abort(1.0, submitted(sides)))
    assert sides.next_timeout() == float("-inf")
    assert sides.announce() and not sides.announce()
    assert len(sides.take_events()) == 1


def test_a_put_that_did_not_leave_falls_back_at_once_and_the_broker_is_away(sides):
    submitted(sides)
    (put,), _ = sides.to_send()
    assert isinstance(put, ToBroker) and sides.view(1.0).broker_up
    sides.unsent(1.0, put.message)
    assert not sides.view(1.0).broker_up and [type(event).__name__ for event in sides.take_events()] == [
        "Fallback", "Released"]


def test_a_new_broker_is_told_of_all_jobs_and_the_same_one_of_none_twice(sides):
    attempt = submitted(sides)
    sides.to_send()
    sides.from_broker(1.5, "b", m.Offer(m.Job(attempt, "", [1], 0, 1.0), 4))
    outbox, take = sides.to_send()
    assert not outbox and take == m.Credit(0, 4)
    sides.room_told(take)
    sides.from_broker(2.0, "c", m.Peers("c", 1, [US], 0))
    outbox, take = sides.to_send()
    assert [type(action.message) for action in outbox] == [m.Put] and take == m.Credit(0, 0)


def prefill_engine(**difference) -> m.Member:
    return m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", msgspec.structs.replace(FINGERPRINT, **difference))


def listed(sides, *others, now=1.0):
    """The broker's list, with us and these."""
    sides.from_broker(now, "b", m.Peers("b", sides.cluster.version + 1, [US, *others], 0))
    sides.tick(now)


def cause(sides, now=1.0):
    degraded = sides.degraded(now)
    return None if degraded is None else degraded.cause


def test_b42_an_engine_says_why_it_has_nobody_to_work_with(sides):
    """B42: and its engine is woken for each change, for the gauge."""
    listed(sides)
    assert cause(sides) is Cause.PEER and sides.announce()
    listed(sides, prefill_engine(block_size=32))
    assert cause(sides) is Cause.MISMATCH and sides.announce()
    assert all(word in sides.degraded(1.0).detail for word in ("block_size", "16", "32"))
    listed(sides, prefill_engine())
    assert cause(sides) is Cause.PEER, "it has not reached us yet"
    sides.from_prefill(1.0, "p", m.Hello(prefill_engine(), b"its memory"))
    sides.tick(1.0)
    assert cause(sides) is None and sides.announce()
    sides.tick(1.0)
    assert not sides.announce(), "nothing is new"
    sides.unsent(1.0, m.Leave())
    assert cause(sides) is Cause.BROKER and CONFIG.broker in sides.degraded(1.0).detail
    sides.drain(2.0)
    assert cause(sides) is None, "it is to have none"


def test_b42_a_prefill_engine_wants_decode_engines(sides):
    """B42: those that have answered it."""
    sides.set_role(1.0, m.Role.PREFILL)
    listed(sides, prefill_engine())
    assert cause(sides) is Cause.PEER
    other = msgspec.structs.replace(prefill_engine(), role=m.Role.DECODE)
    listed(sides, other)
    sides.from_decode(1.0, "p", m.HelloReply(other, b"its memory"))
    assert cause(sides) is None


def test_b42_the_log_says_each_cause_once_when_it_lasts():
    """B42: not at every restart of somebody, and not at every request."""
    log, peer = DegradedLog(5.0), Degraded(Cause.PEER, "no prefill engine is there")
    assert [log.line(now, peer) for now in (0.0, 4.0)] == [None, None]
    assert "degraded (peer): no prefill engine is there" in log.line(5.0, peer)
    assert log.line(6.0, peer) is log.line(60.0, peer) is None
    assert log.line(61.0, None) is log.line(62.0, peer) is log.line(80.0, peer) is None, "it was away for a moment"
    assert log.line(90.0, None) is None and "no longer degraded" in log.line(95.0, None)
    assert DegradedLog(5.0).line(100.0, None) is None
