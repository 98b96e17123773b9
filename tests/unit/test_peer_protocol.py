# SPDX-License-Identifier: Apache-2.0
"""What an engine decides as a peer, in a time that is passed in: heartbeats, credits, events, leaving."""
import msgspec
import pytest

from vllm_pd.peer.control import RECONNECT_POLL_S, MessageSource
from vllm_pd.peer.credits import JobCredits
from vllm_pd.peer.degraded import Degraded, DegradedLog, DegradedReason
from vllm_pd.peer.own_jobs import PERIODS, PrefillLoads
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Fallback, FallbackReason, HoldEnded, Prefill, ToBroker, ToDecode
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
US = m.Member("us", m.Role.BOTH, "tcp://127.0.0.1:1", FINGERPRINT)
CONFIG = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"})


class Clock:
    """Stands where a test has put it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def woken():
    return []


@pytest.fixture
def protocol(clock, woken):
    """An engine of both roles whose broker lists it alone."""
    protocol = PeerProtocol(CONFIG, US, b"memory", clock)
    protocol.control.set_wakeup(lambda: woken.append(None))
    protocol.control.handle_timeout()
    from_broker(protocol, m.Peers("b", 1, [US], 0))
    transmitted(protocol)
    protocol.control.announce()
    woken.clear()
    return protocol


def from_broker(protocol, message, broker="b"):
    assert protocol.control.receive(MessageSource.BROKER, broker, message)


def transmitted(protocol):
    """All messages to the broker that are to leave now."""
    return [action.message for action in iter(protocol.control.poll_transmit, None) if isinstance(action, ToBroker)]


def events(protocol):
    return list(iter(protocol.poll_event, None))


def submitted(protocol):
    attempt = protocol.decode.next_attempt("r")
    protocol.decode.submit(attempt, [1] * 20, [1, 2], 0)
    return attempt


AUTO = PDConfig.parse("kv_consumer", {"broker": "tcp://127.0.0.1:9", "max_local_prefill_tokens": "auto"})
P = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, m.Load(job_tokens=300, tokens_per_s=50.0))


@pytest.fixture
def auto(clock):
    """A decode engine with `auto`, which one of two prefill engines has greeted."""
    us = msgspec.structs.replace(US, role=m.Role.DECODE)
    protocol = PeerProtocol(AUTO, us, b"memory", clock)
    protocol.control.handle_timeout()
    assert protocol.control.receive(MessageSource.PREFILL, "p", m.Hello(P, b""))
    from_broker(protocol, m.Peers("b", 1, [us, P, msgspec.structs.replace(P, incarnation="q")], 0))
    return protocol


def heartbeats(protocol, clock, count):
    for _ in range(count):
        clock.now += 1.0
        protocol.control.handle_timeout()


def test_the_loads_of_those_that_have_greeted_are_known_from_the_list_and_then_from_heartbeats(auto):
    assert auto.decode.prefill_loads() == PrefillLoads(0, ((300, 50.0), ), ((), ))
    assert auto.decode.prefill_loads(("p", )) == PrefillLoads(0, ())
    from_broker(auto, m.Heard("b", 2, 80, (m.PrefillLoad("p", 100, 60.0), m.PrefillLoad("stranger", 1, 1.0))))
    assert auto.decode.prefill_loads() == PrefillLoads(80, ((100, 60.0), ), ((), ))
    from_broker(auto, m.Heard("b", 2))  # an older broker, or NATS
    assert auto.decode.prefill_loads() == PrefillLoads(2000, ((100, 60.0), ), ((), ))


def test_our_own_jobs_count_where_they_are_until_they_are_computed(auto, clock):
    from_broker(auto, m.Heard("b", 0, 0, (m.PrefillLoad("p", 0, 50.0), )))
    attempt = auto.decode.next_attempt("r")
    auto.decode.submit(attempt, [1] * 100, list(range(7)), 2)  # two blocks of 16 are cached
    assert auto.decode.prefill_loads() == PrefillLoads(68, ((0, 50.0), ), ((), ))
    auto.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 1))
    clock.now += 0.5
    assert auto.decode.prefill_loads() == PrefillLoads(0, ((68, 50.0), ), (((68, 0.5), ), ))
    clock.now -= 0.5
    from_broker(auto, m.Heard("b", 0, 68, (m.PrefillLoad("p", 68, 50.0), )))
    once = PrefillLoads(0, ((68, 50.0), ), (((68, 0.0), ), ))
    assert auto.decode.prefill_loads() == once, "and not in the queue of before"
    auto.control.receive(MessageSource.PREFILL, "p", m.Writing(attempt, 1))
    assert auto.decode.prefill_loads() == PrefillLoads(0, ((0, 50.0), ), ((), ))
    heartbeats(auto, clock, PERIODS)
    assert auto.decode.prefill_loads() == PrefillLoads(68, ((68, 50.0), ), ((), )), "by now these are others'"


def test_with_a_fixed_number_nobody_follows_loads(protocol):
    with pytest.raises(ValueError, match="auto only"):
        protocol.decode.prefill_loads()


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


def test_jobs_that_come_count_until_the_engine_has_credits_again(protocol, woken, clock):
    protocol.prefill.set_credits(2)
    assert woken and transmitted(protocol) == [m.Credit(2, 0)]
    protocol._core.do([Prefill(m.Attempt("d", "r", 0), [1], [1], 0, [], "d")])
    assert transmitted(protocol) == [m.Credit(1, 0)]
    assert len(events(protocol)) == 1
    assert transmitted(protocol) == [], "the broker knows: what waited has been taken"
    woken.clear()
    protocol.prefill.set_credits(1)
    assert not woken and transmitted(protocol) == []


def test_b30_jobs_of_an_engine_that_polls_no_more_are_given_back(protocol):
    """B30: one that it has not polled, one whose claim is on its way, one that is offered too late."""

    def offer(number):
        from_broker(protocol, m.Offer(m.Job(attempts[number], decoder.address, [1] * 20, 0, 60.0), number))

    def grant(number):
        """The last claim of it."""
        sent.extend(iter(protocol.control.poll_transmit, None))
        claim = [action.message for action in sent if isinstance(action, ToDecode)
                 and isinstance(action.message, m.Claim) and action.message.attempt == attempts[number]][-1].claim
        protocol.control.receive(MessageSource.DECODE, "d", m.Grant(attempts[number], claim, [3, 4], 0, 9.0))

    decoder = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:3", FINGERPRINT)
    attempts = [m.Attempt("d", "r", number) for number in range(4)]
    sent = []
    protocol.prefill.set_credits(8)
    offer(0)
    protocol.control.receive(MessageSource.DECODE, "d", m.HelloReply(decoder, b"memory"))
    offer(1)
    grant(0)
    sent.extend(iter(protocol.control.poll_transmit, None))
    protocol.prefill.refuse_jobs("no steps")
    assert protocol.state.paused
    grant(1)
    offer(2)
    grant(2)
    assert not any(isinstance(event, Prefill) for event in events(protocol)) and not protocol.operators.open_attempts()
    sent += iter(protocol.control.poll_transmit, None)
    credits = [action.message.jobs for action in sent if isinstance(action, ToBroker)
               and isinstance(action.message, m.Credit)]
    assert credits[-1] == 0
    assert [action.message.attempt for action in sent
            if isinstance(action, ToDecode) and isinstance(action.message, m.Failed)] == attempts[:3]
    protocol.prefill.set_credits(8)
    assert not protocol.state.paused
    offer(3)
    grant(3)
    assert [event.attempt for event in events(protocol)] == attempts[3:]


def test_credits_that_did_not_leave_are_sent_again(protocol):
    protocol.prefill.set_credits(2)
    (credit,) = transmitted(protocol)
    protocol.control.transmit_failed(credit)
    assert transmitted(protocol) == [] and protocol.decode.view().broker_up
    protocol.control.handle_timeout()
    assert transmitted(protocol) == [credit]
    protocol.control.handle_timeout()
    assert transmitted(protocol) == []


def test_b43_one_that_drains_takes_no_jobs_and_leaves_when_nothing_is_open(protocol, clock):
    def leaves():
        protocol.control.handle_timeout()
        return m.Leave() in transmitted(protocol)

    attempt = submitted(protocol)
    protocol.prefill.set_credits(2)
    clock.now = 0.5
    protocol.operators.drain()
    protocol.control.handle_timeout()
    sent = transmitted(protocol)
    assert [message.member.draining for message in sent if isinstance(message, m.Register)] == [True], "at once"
    assert m.Credit(0, 0) in sent
    from_broker(protocol, m.Peers("b", 2, [protocol.state.member()], 0))
    protocol.set_load(m.Load())
    assert not leaves(), "an attempt is open"
    protocol.decode.abort(attempt)
    assert not leaves(), "the engine has not heard its end"
    events(protocol)
    assert leaves() and not leaves()
    clock.now = 100.0
    protocol.control.handle_timeout()
    assert not any(isinstance(message, m.Register) for message in transmitted(protocol))


def test_b115_what_an_engine_can_do_jobs_of_is_listed_at_once(protocol, clock):
    """Of an adapter that it has loaded, and does not offer any more later."""
    for scopes in (("salt", "lora:7"), ("salt", )):
        clock.now += 0.1
        protocol.prefill.set_scopes(scopes)
        protocol.control.handle_timeout()
        assert [one.member.scopes for one in transmitted(protocol) if isinstance(one, m.Register)] == [scopes]
        assert protocol.state.member().scopes == scopes


def test_a_heartbeat_that_did_not_leave_is_tried_again_soon(protocol, clock):
    clock.now = 0.5 * CONFIG.heartbeat_s
    protocol.control.handle_timeout()
    assert transmitted(protocol) == []
    clock.now = CONFIG.heartbeat_s
    protocol.control.handle_timeout()
    register = protocol.control.poll_transmit().message
    assert register == m.Register(US, "b", 1)
    protocol.control.transmit_failed(register)
    assert transmitted(protocol) == [] and not protocol.decode.view().broker_up
    protocol.control.announce()
    assert protocol.control.next_timeout() == clock.now + RECONNECT_POLL_S
    clock.now += RECONNECT_POLL_S
    protocol.control.handle_timeout()
    assert transmitted(protocol) == [register]


def test_the_engine_is_woken_once_for_what_it_has_not_polled(protocol):
    assert not protocol.control.announce()
    protocol.decode.abort(submitted(protocol))
    assert protocol.control.next_timeout() == float("-inf")
    assert protocol.control.announce() and not protocol.control.announce()
    assert len(events(protocol)) == 1


def test_a_put_that_did_not_leave_falls_back_at_once_and_the_broker_is_away(protocol):
    submitted(protocol)
    put = protocol.control.poll_transmit().message
    assert isinstance(put, m.Put) and protocol.decode.view().broker_up
    protocol.control.transmit_failed(put)
    assert not protocol.decode.view().broker_up
    assert [type(event).__name__ for event in events(protocol)] == ["Fallback", "Released"]


def test_a_new_broker_is_told_of_all_jobs_and_the_same_one_of_none_twice(protocol, clock):
    attempt = submitted(protocol)
    transmitted(protocol)
    from_broker(protocol, m.Offer(m.Job(attempt, "", [1], 0, 1.0), 4))
    assert transmitted(protocol) == [m.Credit(0, 4)], "an offer that P drops takes no place"
    from_broker(protocol, m.Peers("c", 1, [US], 0), broker="c")
    put, credit = transmitted(protocol)
    assert isinstance(put, m.Put) and credit == m.Credit(0, 0)


def test_b111_an_engine_that_its_broker_does_not_know_registers_before_it_puts_its_jobs_again(protocol, clock):
    """B111: what an unregistered engine sends is not decoded. Its broker has forgotten it, or is a new one."""
    submitted(protocol)
    transmitted(protocol)
    from_broker(protocol, m.Peers("b", 9, [], 0, 9))
    assert [type(one) for one in transmitted(protocol)] == [m.Register, m.Put, m.Credit]
    from_broker(protocol, m.Peers("b", 9, [], 0, 9))
    assert transmitted(protocol) == [], "the answer to the Register is on its way"
    clock.now += RECONNECT_POLL_S
    from_broker(protocol, m.Peers("c", 1, [], 0, 1), broker="c")
    register, put, _ = transmitted(protocol)
    assert (register.broker, register.version) == ("c", 0) and isinstance(put, m.Put)
    assert protocol._core.cluster.listed() is not None, "what it knew stays until the whole registry comes"


def test_b111_an_engine_that_its_broker_refuses_asks_with_its_heartbeats_and_waits_for_nothing(protocol, clock):
    """B111: as where the registry is full. What it sends besides Register is answered by an empty update."""
    from_broker(protocol, m.Refused("members", "1024", "one more"))
    for _ in range(5):
        from_broker(protocol, m.Peers("b", 9, [], 0, 9))
        assert not protocol.decode.view().broker_up and transmitted(protocol) == []
        clock.now += RECONNECT_POLL_S
    clock.now = CONFIG.heartbeat_s
    protocol.control.handle_timeout()
    assert [type(one) for one in transmitted(protocol)] == [m.Register]
    from_broker(protocol, m.Peers("b", 10, [US], 0))
    assert protocol.decode.view().broker_up


def prefill_engine(**difference) -> m.Member:
    return m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", msgspec.structs.replace(FINGERPRINT, **difference))


def listed(protocol, *others):
    """The broker's list, with us and these."""
    from_broker(protocol, m.Peers("b", protocol._core.cluster.version + 1, [US, *others], 0))
    due(protocol)


def due(protocol):
    protocol.control.handle_timeout()
    transmitted(protocol)


def reason(protocol):
    degraded = protocol.operators.degraded()
    return None if degraded is None else degraded.reason


def test_b42_an_engine_says_why_it_has_nobody_to_work_with(protocol):
    """B42: and its engine is woken for each change, for the gauge."""
    listed(protocol)
    assert reason(protocol) is DegradedReason.PEER and protocol.control.announce()
    listed(protocol, prefill_engine(block_size=32))
    assert reason(protocol) is DegradedReason.MISMATCH and protocol.control.announce()
    assert all(word in protocol.operators.degraded().detail for word in ("block_size", "16", "32"))
    listed(protocol, prefill_engine())
    assert reason(protocol) is DegradedReason.PEER, "it has not reached us yet"
    protocol.control.receive(MessageSource.PREFILL, "p", m.Hello(prefill_engine(), b"its memory"))
    due(protocol)
    assert reason(protocol) is None and protocol.control.announce()
    due(protocol)
    assert not protocol.control.announce(), "nothing is new"
    protocol.control.transmit_failed(m.Withdraw(m.Attempt("us", "r", 0)))
    assert reason(protocol) is DegradedReason.BROKER and CONFIG.broker in protocol.operators.degraded().detail
    protocol.operators.drain()
    assert reason(protocol) is None, "it is to have none"


def test_b107_an_engine_with_clients_that_has_lost_its_peers_only_decodes(protocol):
    """B107: a router that sees it drain would send it no prompts, which it can answer alone."""
    listed(protocol, prefill_engine())
    for is_here, role in ((False, m.Role.DECODE), (True, m.Role.BOTH)):
        protocol.deaths.address_is_here("10.0.0.6", is_here)
        protocol.control.handle_timeout()
        found = transmitted(protocol)
        members = [one.member for one in found if isinstance(one, m.Register)]
        assert [(member.role, member.draining) for member in members] == [(role, False)]
        assert protocol.state.hands_over is protocol.state.takes_jobs is is_here


def test_b42_b107_an_engine_whose_machine_has_lost_its_address_says_so(protocol, caplog):
    """B42, B107: nothing comes of what others want of it. So it takes no jobs, as one that drains, and lets the leases
    of those that it has run out, until its machine has the address again."""
    protocol.operators.set_role(m.Role.PREFILL)
    protocol.prefill.set_credits(3)
    other = msgspec.structs.replace(prefill_engine(), role=m.Role.DECODE)
    listed(protocol, other)
    protocol.control.receive(MessageSource.DECODE, "p", m.HelloReply(other, b"its memory"))
    assert reason(protocol) is None
    for is_here in (False, True):
        for _ in range(2):
            protocol.deaths.address_is_here("10.0.0.6", is_here)
        protocol.control.handle_timeout()
        found = transmitted(protocol)
        assert [one.jobs for one in found if isinstance(one, m.Credit)] == [3 if is_here else 0]
        assert [one.member.draining for one in found if isinstance(one, m.Register)] == [not is_here]
        assert protocol._core.prefill_half.renews is is_here
        assert reason(protocol) is (None if is_here else DegradedReason.ADDRESS)
        assert caplog.text.count("does not have the address 10.0.0.6 of this engine") == 1
        assert caplog.text.count("of this engine again") == is_here
        if not is_here:
            assert "10.0.0.6" in protocol.operators.degraded().detail
    protocol.deaths.address_is_here("10.0.0.6", False)
    protocol.operators.drain()
    assert reason(protocol) is None, "it is to have nobody"


def test_b42_a_prefill_engine_wants_decode_engines(protocol):
    """B42: those that have answered it."""
    protocol.operators.set_role(m.Role.PREFILL)
    listed(protocol, prefill_engine())
    assert reason(protocol) is DegradedReason.PEER
    other = msgspec.structs.replace(prefill_engine(), role=m.Role.DECODE)
    listed(protocol, other)
    protocol.control.receive(MessageSource.DECODE, "p", m.HelloReply(other, b"its memory"))
    assert reason(protocol) is None


def test_after_its_thread_has_died_an_engine_stays_alone(protocol):
    open_attempt = submitted(protocol)
    protocol.control.shut("the control thread ended: an error")
    late = submitted(protocol)
    ends = events(protocol)
    assert [event.attempt for event in ends] == [open_attempt, open_attempt, late, late]
    assert {event.reason for event in ends if isinstance(event, Fallback)} == {FallbackReason.CONTROL}
    assert transmitted(protocol) == [] and reason(protocol) is DegradedReason.CONTROL


@pytest.mark.parametrize("role", m.Role)
def test_b96_an_engine_with_other_weights_works_with_nobody(protocol, role):
    """B96: a decode engine hands nothing over, a prefill engine drains; one of both roles goes on as a decode engine.
    Nobody can change that but a restart."""
    protocol.operators.set_role(role)
    protocol.prefill.set_credits(3)
    assert any(isinstance(one, m.Credit) and one.jobs for one in transmitted(protocol)) is role.prefills
    hold = m.Attempt("us", "kept", 0)
    assert protocol.prefill.hold(hold, b"digest", [1, 2])
    protocol.operators.weights_replaced()
    assert [event.hold for event in events(protocol) if isinstance(event, HoldEnded)] == [hold]
    assert not protocol.prefill.hold(m.Attempt("us", "later", 0), b"digest", [1, 2])
    assert not protocol.state.hands_over
    assert reason(protocol) is DegradedReason.WEIGHTS and "restart" in protocol.operators.degraded().detail
    protocol.control.handle_timeout()
    found = transmitted(protocol)
    assert not any(one.jobs for one in found if isinstance(one, m.Credit))
    entry = next(one.member for one in found if isinstance(one, m.Register))
    assert entry.draining if role is m.Role.PREFILL else not (entry.draining or entry.role.prefills)
    assert "restart" in protocol.operators.set_role(m.Role.PREFILL if role is not m.Role.PREFILL else m.Role.DECODE)


def test_what_a_dead_engine_said_comes_too_late(protocol):
    hello = m.Hello(prefill_engine(), b"its memory")
    control, deaths = protocol.control, protocol.deaths
    assert control.receive(MessageSource.PREFILL, "p", hello) and deaths.watched_peers().introduced.keys() == {"p"}
    deaths.peer_dead("p")
    assert not control.receive(MessageSource.PREFILL, "p", hello) and not deaths.watched_peers().introduced


def test_b42_the_log_says_each_cause_once_when_it_lasts():
    """B42: not at every restart of somebody, and not at every request."""
    log, peer = DegradedLog(5.0), Degraded(DegradedReason.PEER, "no prefill engine is there")
    assert [log.line(now, peer) for now in (0.0, 4.0)] == [None, None]
    assert "degraded (peer): no prefill engine is there" in log.line(5.0, peer)
    assert log.line(6.0, peer) is log.line(60.0, peer) is None
    assert log.line(61.0, None) is log.line(62.0, peer) is log.line(80.0, peer) is None, "it was away for a moment"
    assert log.line(90.0, None) is None and "no longer degraded" in log.line(95.0, None)
    assert DegradedLog(5.0).line(100.0, None) is None
