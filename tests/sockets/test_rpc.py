# SPDX-License-Identifier: Apache-2.0
"""Frames and sockets: what is not a message is told apart from one, and nothing ever blocks."""
import contextlib
import threading

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.slow_write import is_open_at_each_write
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.scope import MediaItem, PromptScope
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.codec import BadFrame, FrameFault
from vllm_pd.rpc.sockets import SendResult

ATTEMPT = m.Attempt("d", "r", 3)
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
MEMBER = m.Member("d", m.Role.BOTH, "tcp://127.0.0.1:1", FINGERPRINT, m.Load(1, 2, 3), "host", (m.Process(4, 5),),
                  "tcp://127.0.0.1:2", True)
IMAGE = MediaItem(bytes(32), "image", 1, 2, 5)
JOB = m.Job(ATTEMPT, "tcp://127.0.0.1:1", [1, 2, 3], 0, 1.5, ("p",), scope=PromptScope("s", b"", (IMAGE, ), "e"))
MESSAGES = [
    m.Hello(MEMBER, b"x"), m.HelloReply(MEMBER, b""), m.Refused("k", "a", "b"), m.Claim(ATTEMPT, 1, 2, scope=b"s" * 32),
    m.Grant(ATTEMPT, 1, [1, 2], 1, 2.5), m.Grant(ATTEMPT, 1, [1, 2], 1, 2.5, (b"image", b"video")),
    m.Grant(ATTEMPT, 1, [1, 2], 1, 2.5, (), 7),
    m.Deny(ATTEMPT, 1, m.DenyReason.TAKEN), m.Renew(ATTEMPT, 1, 2),
    m.Renewed(ATTEMPT, 1, 2, 3.0), m.Sent(ATTEMPT, 1, m.Timings(1.0, 2.0, 3.0, 4.0, 5, True)),
    m.ClaimHold(ATTEMPT, ATTEMPT, b"d" * 32), m.HoldGrant(ATTEMPT, ATTEMPT, [1]), m.HoldQuery(ATTEMPT, ATTEMPT),
    m.HoldDenied(ATTEMPT, ATTEMPT, m.DenyReason.TOKENS), m.HoldDone(ATTEMPT, ATTEMPT),
    m.Failed(ATTEMPT, 1, "w"), m.Cancel(ATTEMPT, 1), m.Writing(ATTEMPT, 1), m.Stopped(ATTEMPT, 1),
    m.GaveUp(ATTEMPT, 1, "w"),
    m.Register(MEMBER, "b", 2), m.Heard("b", 1),
    m.Peers("b", 3, [MEMBER], 2, 1, ["p"]), m.Leave(), m.Put(JOB), m.PutReply(ATTEMPT, m.PutRefusal.FULL, 3),
    m.Withdraw(ATTEMPT), m.Credit(1, 2), m.Offer(JOB, 3), m.ListMembers("b", 3), m.Drain(), m.Gone("p"),
    m.SetRole(m.Role.PREFILL), m.Status(), m.Status("", "r"),
    m.StatusReply(MEMBER, "why", {"peers": 1}),
    m.StatusReply(MEMBER, paths={"p": (1e6, 0.5, 12.0)}),
    m.StatusReply(MEMBER, prompt=m.PromptRecord("r", timings=m.Timings(1.0), parked_s=1.0)), m.TryAddresses(("tcp://127.0.0.1:1",)),
    m.AddressesTried({"tcp://127.0.0.1:1": m.Trial.OPEN}, ("tcp://127.0.0.1:2",), {"p": "why"}),
    m.DirectJob(JOB), m.DirectJobTaken(ATTEMPT), m.DirectJobEnd(ATTEMPT, "why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message):
    assert codec.decode([codec.encode("me", message)]) == ("me", message)


@pytest.mark.parametrize("name", ["d", "d" * 31, "d" * 32, "é" * 200, "d" * m.MAX_ID_CHARS])
def test_the_sender_and_the_tag_are_seen_without_decoding(name):
    for message in MESSAGES:
        frame = codec.encode(name, message)
        assert codec.peek([frame]) == (name, type(message).__struct_config__.tag)
        end = 3 + 1 + len(msgspec.msgpack.encode(name)) + 1 + len(msgspec.msgpack.encode(codec.peek([frame])[1]))
        assert codec.peek([frame[:end]]) == codec.peek([frame]), "whatever follows"
        for cut in range(end):
            with pytest.raises(BadFrame):
                codec.peek([frame[:cut]])


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_whatever_can_be_decoded_is_seen_before(content):
    """And nothing but BadFrame is raised for the rest."""
    frame = b"PD" + bytes((m.PROTOCOL,)) + content
    try:
        sender, message = codec.decode([frame])
    except BadFrame:
        with contextlib.suppress(BadFrame):
            codec.peek([frame])
    else:
        assert codec.peek([frame]) == (sender, type(message).__struct_config__.tag)


def test_every_message_is_listed_and_has_a_direction():
    kinds = {type(message) for message in MESSAGES}
    assert kinds == set(m.Message.__args__) == {*m.TO_DECODE, *m.TO_PREFILL, *m.TO_BROKER, *m.FROM_BROKER,
                                                    *m.FROM_FRONT, *m.TO_OPERATOR, m.DirectJobTaken, m.DirectJobEnd}


def raw(*parts, version=m.PROTOCOL):
    return b"PD" + bytes((version,)) + msgspec.msgpack.encode(parts)


@pytest.mark.parametrize("frames, fault", [
    ([], FrameFault.SHAPE),
    ([b""], FrameFault.SHAPE),
    ([b"PD"], FrameFault.SHAPE),
    ([b"GET / HTTP/1.1"], FrameFault.SHAPE),
    ([codec.encode("me", MESSAGES[0])] * 2, FrameFault.SHAPE),
    ([b"PD" + bytes((m.PROTOCOL + 1,)) + b"whatever"], FrameFault.VERSION),
    ([b"PD" + bytes((m.PROTOCOL,))], FrameFault.CONTENT),
    ([codec.encode("me", MESSAGES[0])[:-1]], FrameFault.CONTENT),
    ([codec.encode("me", MESSAGES[0]) + b"\0"], FrameFault.CONTENT),
    ([raw("me", ["NoSuchMessage", 1])], FrameFault.CONTENT),
    ([raw("me", ["Take", 1])], FrameFault.CONTENT),
    ([raw("me", ["Take", -1, 0])], FrameFault.CONTENT),
    ([raw("me", ["Take", "1", 0])], FrameFault.CONTENT),
    ([raw("me", ["Take", 1 << 63, 0])], FrameFault.CONTENT),
    ([raw("", ["Leave"])], FrameFault.CONTENT),
    ([raw("x" * 5000, ["Leave"])], FrameFault.CONTENT),
    ([raw("me", ["Claim", ["d", "r", -3], 1, 1])], FrameFault.CONTENT),
    ([raw("me", ["Claim", ["d", "r", 3], 1, 0])], FrameFault.CONTENT),
    ([raw("me", ["Grant", ["d", "r", 3], 1, [-1], 0, 1.0])], FrameFault.CONTENT),
    ([raw("me", ["Grant", ["d", "r", 3], 1, [1], 0, float("nan")])], FrameFault.CONTENT),
    ([raw("me", ["Grant", ["d", "r", 3], 1, [1], 0, float("inf")])], FrameFault.CONTENT),
    ([raw("me", ["Put", [["d", "r", 3], "a", [], 0, 1.0, None]])], FrameFault.CONTENT),
    ([b"PD" + bytes((m.PROTOCOL,)) + b"\x91" * 100_000], FrameFault.CONTENT),
    ([b"PD" + bytes((m.PROTOCOL,)) + b"\xdd\xff\xff\xff\xff"], FrameFault.CONTENT),
    ([bytes(codec.MAX_FRAME_BYTES + 1)], FrameFault.SIZE),
])
def test_b81_bad_frames_are_told_apart(frames, fault):
    with pytest.raises(BadFrame) as raised:
        codec.decode(frames)
    assert raised.value.fault is fault
    assert (raised.value.theirs == m.PROTOCOL + 1) == (fault is FrameFault.VERSION)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_b81_damaged_frames_raise_nothing_else(data):
    frame = bytearray(codec.encode("me", data.draw(st.sampled_from(MESSAGES))))
    for _ in range(data.draw(st.integers(0, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = bytes(frame[:data.draw(st.integers(0, len(frame)))])
    frame += data.draw(st.binary(max_size=8))
    try:
        sender, message = codec.decode([frame])
    except BadFrame:
        return
    assert sender and isinstance(message, m.WireMessage)


def test_too_large_a_message_is_refused_before_it_leaves():
    with pytest.raises(BadFrame) as raised:
        codec.encode("me", m.Hello(MEMBER, bytes(codec.MAX_FRAME_BYTES)))
    assert raised.value.fault is FrameFault.SIZE


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_sends_never_block_and_say_what_became_of_them(context):
    server = sockets.server(context, "tcp://127.0.0.1:0")
    assert sockets.send(server, b"nobody", b"x") is SendResult.UNREACHABLE
    address = sockets.endpoint(server)
    client = sockets.client(context, address, only_connected=True)
    assert client.poll(60_000, zmq.POLLOUT)
    assert sockets.receive(client) is None
    results = {sockets.send(client, bytes(100_000)) for _ in range(10_000)}  # nobody reads
    assert results == {SendResult.SENT, SendResult.FULL}
    nobody = sockets.client(context, "tcp://127.0.0.1:1", only_connected=True)
    assert sockets.send(nobody, b"x") is SendResult.FULL


def test_b22_idle_connections_are_kept_and_end_no_sooner_than_those_with_data(context):
    """Without TCP_MAXRT: an open connection shows that a peer lives whose new connections a firewall refuses."""
    server = sockets.server(context, "tcp://127.0.0.1:0")
    for socket in (server, sockets.client(context, sockets.endpoint(server), only_connected=False)):
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1 and 0 < socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) <= 60
        ends_s = socket.getsockopt(zmq.TCP_KEEPALIVE_INTVL) * socket.getsockopt(zmq.TCP_KEEPALIVE_CNT)
        assert ends_s >= 900 and socket.getsockopt(zmq.TCP_MAXRT) == 0


def test_address_that_is_taken_or_none_raises(context):
    server = sockets.server(context, "tcp://127.0.0.1:0")
    with pytest.raises(zmq.ZMQError):
        sockets.server(context, sockets.endpoint(server))
    with pytest.raises(zmq.ZMQError):
        sockets.client(context, "nonsense", only_connected=True)


def test_b82_only_loopback_is_local():
    assert all(map(sockets.is_local, ["tcp://127.0.0.1:0", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x"]))
    assert not any(map(sockets.is_local, ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1", ""]))


def test_waker_wakes_from_another_thread_and_holds_any_number():
    waker = sockets.Waker()
    poller = zmq.Poller()
    poller.register(waker.fileno(), zmq.POLLIN)
    assert not poller.poll(0)
    for _ in range(100_000):
        waker.set()
    assert poller.poll(0)
    waker.clear()
    assert not poller.poll(0)
    threading.Timer(0.05, waker.set).start()
    assert poller.poll(60_000)
    waker.close()


def test_b33_a_waker_writes_to_no_descriptor_that_was_closed(monkeypatch):
    waker = sockets.Waker()
    assert is_open_at_each_write(monkeypatch, "write", waker.set, waker.close)
    waker.set()
