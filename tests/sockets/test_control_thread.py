# SPDX-License-Identifier: Apache-2.0
"""In which order a turn of the control thread does things, and how often it has its engine look for notices."""
import contextlib
import threading

import pytest
import zmq

from tests.fakes.brokers import serving
from tests.sockets.test_agent import FINGERPRINT, Engine, Settings
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.peer.notices import LONG_WRITE_POLL_S, SHORT_WRITE_POLL_S, SHORT_WRITE_S, Notices
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.rpc import codec

ANSWER_S = 60


@pytest.fixture
def greeted():
    """Have a decode engine look after a peer: (the engine, the peer's socket). `is_gone` is what the look asks."""
    peer = local_member(m.Role.PREFILL, FINGERPRINT)
    with contextlib.ExitStack() as stack:

        def greet(is_gone):
            broker, context = stack.enter_context(serving()), stack.enter_context(zmq.Context())
            decode = Engine(Settings(broker.address), m.Role.DECODE, is_gone=is_gone)
            stack.callback(decode.close)
            socket = stack.enter_context(context.socket(zmq.DEALER))
            socket.linger = 0
            socket.connect(decode.agent.member.address)
            socket.send(codec.encode(peer.incarnation, m.Hello(peer, b"memory")))
            return decode, socket

        yield greet


def test_a_peer_has_its_answer_before_the_thread_looks_after_others(greeted):
    """The look at the processes of all peers, which each introduction hastens, takes as long as there are peers."""
    answered, looked, in_time = threading.Event(), threading.Event(), []

    def is_gone(member: m.Member) -> bool:
        in_time.append(answered.wait(2 * ANSWER_S))
        looked.set()
        return False

    _, socket = greeted(is_gone)
    try:
        assert socket.poll(1000 * ANSWER_S), "the answer waits for the look"
        assert isinstance(codec.decode(socket.recv_multipart())[1], m.HelloReply)
    finally:
        answered.set()
    assert looked.wait(ANSWER_S) and all(in_time)


def test_a_stop_in_the_thread_itself_does_not_wait_for_it(greeted):
    """The garbage collector may run anywhere."""
    stopped, greets = threading.Event(), threading.Event()

    def is_gone(member: m.Member) -> bool:
        greets.wait(ANSWER_S)
        decode.agent.close()
        stopped.set()
        return False

    decode, _ = greeted(is_gone)
    greets.set()
    assert stopped.wait(ANSWER_S)
    decode.close()
    assert decode.agent.error is None


@pytest.fixture
def granted():
    """A decode side, and its one attempt, which `p` was granted."""
    side = DecodeProtocol(local_member(m.Role.DECODE, FINGERPRINT), b"", DecodeLimits())
    attempt = m.Attempt(side.member.incarnation, "r", 0)
    side.submit(0.0, attempt, [1] * 20, [1, 2], 0)
    side.receive(0.0, "p", m.Hello(m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:1", FINGERPRINT), b""))
    side.receive(0.0, "p", m.Claim(attempt, 0))
    return side, attempt


def looks(decode: DecodeProtocol, begin: float, seconds: float = SHORT_WRITE_S) -> int:
    """How often the engine is woken, if the thread asks each tenth of a millisecond."""
    notices = Notices()
    notices.look_soon(begin)
    return sum(notices.take_due(begin + tick * 1e-4, decode.writing_since()) is not None
               for tick in range(int(seconds * 1e4)))


def test_the_younger_a_write_the_more_often_its_notice_is_looked_for(granted):
    decode, attempt = granted
    computing = looks(decode, 1.0)
    decode.receive(1.0, "p", m.Writing(attempt, 0))
    assert 1 == computing < looks(decode, 1.5) < looks(decode, 1.0)
    assert looks(decode, 10.0) == 1, "a write that takes long"


def single_pause_s(now: float, writing_since: float) -> float:
    """The pause after a single look at `now`."""
    notices = Notices()
    notices.look_soon(now)
    return notices.take_due(now, writing_since).pause_s


def test_where_a_look_lasts_the_next_one_is_due_at_its_end_with_the_same_pauses(granted):
    decode, attempt = granted
    decode.receive(1.0, "p", m.Writing(attempt, 0))
    lasting, single = Notices(lasting=True), Notices()
    asked, covered, ticks = 0, None, 30_000
    for notices in (lasting, single):
        notices.look_soon(1.0)
    for now in (1.0 + tick * 1e-4 for tick in range(ticks)):
        watch, once = (notices.take_due(now, decode.writing_since()) for notices in (lasting, single))
        if watch is not None:
            asked += 1
            covered = now + watch.lasts_s
            assert watch.lasts_s > watch.pause_s
            assert watch.pause_s == single_pause_s(now, decode.writing_since()), "as often as single looks"
        assert now < covered + 2e-4, "a write is watched without a gap"
        if once is not None:
            assert once.lasts_s == 0
    assert asked < 40, "3 s of a write"


def test_a_young_write_beside_an_old_one_is_watched_closely(granted):
    decode, attempt = granted
    decode.receive(1.0, "p", m.Writing(attempt, 0))
    notices = Notices(lasting=True)
    notices.look_soon(4.0)
    assert notices.take_due(4.0, decode.writing_since()).pause_s == LONG_WRITE_POLL_S
    younger = m.Attempt(decode.member.incarnation, "s", 1)
    decode.submit(4.0, younger, [1] * 20, [3, 4], 0)
    decode.receive(4.0, "p", m.Claim(younger, 0))
    decode.receive(4.05, "p", m.Writing(younger, 0))
    notices.look_soon(4.05)
    assert notices.take_due(4.05, decode.writing_since()) == (SHORT_WRITE_POLL_S, SHORT_WRITE_S)


def test_nobody_looks_where_nobody_may_write(granted):
    decode, attempt = granted
    decode.receive(1.0, "p", m.Failed(attempt, 0, "no"))
    assert looks(decode, 1.0, 1.0) == 0
