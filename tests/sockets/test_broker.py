# SPDX-License-Identifier: Apache-2.0
"""The queue and the registry, first pure, then behind a real socket."""
import collections
import contextlib
import random
import time

import msgspec
import psutil
import pytest
import zmq

from tests.fakes.brokers import serving
from tests.fakes.noise import send_noise
from tests.waiting import wait_for
from vllm_pd.broker import server
from vllm_pd.broker.changes import RegistryView
from vllm_pd.broker.members import list_members
from vllm_pd.broker.registry import GATHER_S, MAX_INCARNATION_BYTES, QueueLimits, Registry
from vllm_pd.broker.server import Broker
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
BOUNDS = QueueLimits()
OTHER = msgspec.structs.replace(FINGERPRINT, model="other")


def member(name, role, fingerprint=FINGERPRINT):
    return m.Member(name, role, "tcp://127.0.0.1:1", fingerprint)


def job(number, decode="d", tokens=3, deadline_s=60.0):
    return m.Job(m.Attempt(decode, "r", number), "tcp://127.0.0.1:1", list(range(tokens)), 0, deadline_s)


def registered(*members, limits=BOUNDS):
    registry = Registry("b", limits)
    for one in members:
        registry.receive(0.0, one.incarnation, m.Register(one))
    return registry


@pytest.fixture
def registry():
    return registered(member("d", m.Role.DECODE), member("p", m.Role.PREFILL), member("q", m.Role.PREFILL))


def put(registry, number, now=0.0, decode="d", **more):
    """(offers, the answer)"""
    *offers, (to, reply) = registry.receive(now, decode, m.Put(job(number, decode, **more)))
    assert to == decode
    return offers, reply


def offered(letters):
    return [(to, letter.job.attempt.number) for to, letter in letters if isinstance(letter, m.Offer)]


def test_jobs_wait_in_order_for_room(registry):
    for number in range(3):
        assert put(registry, number) == ([], m.PutReply(m.Attempt("d", "r", number), None, number + 1, True))
    assert offered(registry.receive(1.0, "p", m.Credit(2, 0))) == [("p", 0), ("p", 1)]
    assert registry.receive(1.0, "p", m.Credit(0, 2)) == [] and len(registry) == 1
    assert offered(registry.receive(1.0, "q", m.Credit(5, 0))) == [("q", 2)] and len(registry) == 0
    assert offered(put(registry, 3)[0]) == [("q", 3)]


def test_offers_count_their_time_and_number(registry):
    put(registry, 1, deadline_s=10.0)
    ((_, offer),) = registry.receive(4.0, "p", m.Credit(1, 0))
    assert offer.job.deadline_s == 6.0 and offer.serial == 1


def test_room_that_crosses_an_offer_on_the_wire_is_not_counted_twice(registry):
    registry.receive(0.0, "p", m.Credit(1, 0))
    assert offered(put(registry, 1)[0]) == [("p", 1)]
    put(registry, 2)
    # p said this before it saw offer 1
    assert registry.receive(0.1, "p", m.Credit(1, 0)) == []
    assert offered(registry.receive(0.2, "p", m.Credit(1, 1))) == [("p", 2)]


def test_an_offer_lost_with_its_connection_does_not_hold_room_for_ever(registry):
    registry.receive(0.0, "p", m.Credit(1, 0))
    put(registry, 1)
    put(registry, 2)
    assert registry.receive(1.0, "p", m.Credit(1, 0)) == []
    assert offered(registry.receive(6.0, "p", m.Credit(1, 0))) == [("p", 2)]


def test_a_member_that_was_dropped_and_came_back_gets_no_more_than_its_room(registry):
    for number in range(9):
        put(registry, number)
    registry.receive(6.0, "p", m.Leave())
    registry.receive(7.0, "p", m.Register(member("p", m.Role.PREFILL)))
    assert len(offered(registry.receive(7.0, "p", m.Credit(2, 900)))) == 2
    # said before it saw these offers: two more at most, not the whole queue
    assert len(offered(registry.receive(7.1, "p", m.Credit(2, 900)))) == 2


def test_most_room_first(registry):
    registry.receive(0.0, "p", m.Credit(1, 0))
    registry.receive(0.0, "q", m.Credit(3, 0))
    assert [offered(put(registry, number)[0])[0][0] for number in range(4)] == ["q", "q", "p", "q"]


def test_put_again_of_a_queued_job_changes_nothing(registry):
    put(registry, 1)
    put(registry, 2)
    assert put(registry, 1)[1].queue_length == 2
    assert offered(registry.receive(0.0, "p", m.Credit(1, 0))) == [("p", 1)]


def test_refusals_of_a_put():
    registry = registered(member("d", m.Role.DECODE), member("x", m.Role.PREFILL, OTHER),
                          limits=QueueLimits(max_jobs=2, max_tokens=100))
    assert put(registry, 1)[1].refusal is m.PutRefusal.NO_PEER
    assert put(registry, 1, decode="nobody")[1].refusal is m.PutRefusal.UNREGISTERED
    registry.receive(0.0, "p", m.Register(member("p", m.Role.PREFILL)))
    assert put(registry, 1, tokens=101)[1].refusal is m.PutRefusal.FULL
    assert put(registry, 1)[1].refusal is put(registry, 2)[1].refusal is None
    assert put(registry, 3)[1].refusal is m.PutRefusal.FULL
    assert put(registry, 2)[1].refusal is None, "that one is in"


def test_b42_jobs_go_only_to_engines_that_fit():
    registry = registered(member("d", m.Role.DECODE), member("x", m.Role.PREFILL, OTHER), member("p", m.Role.PREFILL))
    registry.receive(0.0, "x", m.Credit(9, 0))
    assert put(registry, 1)[0] == []
    assert offered(registry.receive(0.0, "p", m.Credit(9, 0))) == [("p", 1)]


def test_nobody_gets_its_own_job():
    registry = registered(member("d", m.Role.BOTH))
    registry.receive(0.0, "d", m.Credit(9, 0))
    assert put(registry, 1)[1].refusal is m.PutRefusal.NO_PEER
    registry.receive(0.0, "e", m.Register(member("e", m.Role.BOTH)))
    assert put(registry, 1) == ([], m.PutReply(m.Attempt("d", "r", 1), None, 1, True))
    assert put(registry, 1) == ([], m.PutReply(m.Attempt("d", "r", 1), None, 1))
    assert offered(registry.receive(0.0, "e", m.Credit(1, 0))) == [("e", 1)]
    assert put(registry, 1)[1].is_new, "it was taken, and D puts it again"


def test_withdrawn_expired_and_orphaned_jobs_go(registry):
    for number in range(4):
        put(registry, number, deadline_s=60.0 if number else 0.5)
    assert registry.receive(0.0, "p", m.Withdraw(m.Attempt("d", "r", 1))) == [] and len(registry) == 4
    registry.receive(0.0, "d", m.Withdraw(m.Attempt("d", "r", 1)))
    assert len(registry) == 3
    registry.handle_timeout(1.0)
    assert len(registry) == 2
    registry.receive(1.0, "d", m.Leave())
    assert len(registry) == 0 and registry.queued_tokens == 0
    assert [one.incarnation for one in registry.members()] == ["p", "q"]


def test_change_is_told_to_all_and_a_gap_is_filled(registry):
    registry.handle_timeout(0.5)
    known = registry.version
    z = member("z", m.Role.PREFILL)
    ((to, whole), ) = registry.receive(1.0, "z", m.Register(z))
    assert to == "z" and [one.incarnation for one in whole.members] == ["d", "p", "q", "z"]
    letters = registry.handle_timeout(1.5)
    assert [to for to, _ in letters] == ["d", "p", "q", "z"]
    assert letters[0][1] == m.Peers("b", whole.version, [z], 0, known)
    heartbeat = m.Register(z, "b", whole.version)
    assert registry.receive(2.0, "z", heartbeat) == [("z", m.Heard("b", 0))]
    assert registry.receive(2.0, "z", m.Register(z, "b", known)) == [("z", letters[0][1])]
    assert registry.receive(2.0, "z", m.Register(z, "older", whole.version)) == [("z", whole)]
    busy = msgspec.structs.replace(z, load=m.Load(5, 5, 5))
    assert registry.receive(2.0, "z", m.Register(busy, "b", whole.version)) == [("z", m.Heard("b", 0))]
    assert busy in registry.members(), "load is news for the next who asks, not for all"
    assert registry.handle_timeout(2.5) == []


def test_silence_ends_a_membership(registry):
    for second in range(1, 8):
        registry.receive(float(second), "d", m.Register(member("d", m.Role.DECODE), "b", registry.version))
        registry.handle_timeout(float(second))
    assert [one.incarnation for one in registry.members()] == ["d"]


def test_what_can_not_be_delivered_comes_back_to_the_front(registry):
    registry.receive(0.0, "p", m.Credit(1, 0))
    ((to, offer),) = put(registry, 1)[0]
    put(registry, 2)
    letters = registry.undeliverable(0.0, to, offer, gone=True)
    assert [one.incarnation for one in registry.members()] == ["d", "q"] and not letters
    assert registry.handle_timeout(1.0)[0][1].gone == ["p"]
    assert offered(registry.receive(0.0, "q", m.Credit(2, 0))) == [("q", 1), ("q", 2)] and registry.queued_tokens == 0


def test_an_offer_that_came_back_waits_as_any_other_job(registry):
    def come_back(number):
        registry.receive(0.0, "p", m.Register(member("p", m.Role.PREFILL)))
        registry.receive(0.0, "p", m.Credit(1, 0))
        ((to, offer), ) = put(registry, number)[0]
        registry.undeliverable(0.0, to, offer, gone=True)
        assert len(registry) == 1 and registry.queued_tokens == len(offer.job.token_ids)
        return to, offer

    come_back(1)
    registry.receive(0.0, "q", m.Withdraw(m.Attempt("d", "r", 1)))  # which is not its own
    assert len(registry) == 1
    registry.receive(0.0, "d", m.Withdraw(m.Attempt("d", "r", 1)))
    assert len(registry) == 0 == registry.queued_tokens
    come_back(2)
    registry.receive(59.9, "d", m.Register(member("d", m.Role.DECODE)))
    registry.handle_timeout(59.9)
    assert len(registry) == 1
    registry.handle_timeout(60.0)
    assert len(registry) == 0 == registry.queued_tokens and registry.counters["job_expired"] == 1
    to, offer = come_back(3)
    assert put(registry, 3) == ([], m.PutReply(m.Attempt("d", "r", 3), None, 1)), "put again, it is there once"
    registry.undeliverable(0.0, to, offer, gone=False)
    assert len(registry) == 1
    registry.receive(0.0, "d", m.Leave())
    assert len(registry) == 0 == registry.queued_tokens


def test_foreign_words_change_nothing(registry):
    registry.receive(0.0, "p", m.Register(member("someone else", m.Role.PREFILL)))
    assert registry.receive(0.0, "p", m.Put(job(1))) == []
    registry.receive(0.0, "nobody", m.Credit(4, 0))
    registry.receive(0.0, "p", m.Heard("b", 1))
    assert registry.counters == {"foreign": 2, "unregistered": 1, "unexpected": 1}
    assert len(registry) == 0 and len(registry.members()) == 3


def test_b80_bind_that_is_taken_or_public_is_refused():
    broker = Broker("tcp://127.0.0.1:0")
    try:
        with pytest.raises(ConfigError, match="bind=.*choose a free address"):
            Broker(broker.address)
        with pytest.raises(ConfigError, match="loopback"):
            Broker("tcp://0.0.0.0:5700")  # B82
    finally:
        broker.stop()
        broker.run()


class Raw:
    """A client that may send anything."""

    def __init__(self, address, most_unread=1000):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.RCVHWM, most_unread)
        self.socket.connect(address)

    def say(self, sender, message):
        self.socket.send(codec.encode(sender, message))

    def ask(self, sender, message):
        self.say(sender, message)
        return self.answer()

    def answer(self):
        assert self.socket.poll(60_000), "no answer"
        return codec.decode(self.socket.recv_multipart())[1]

    def next_of(self, kind):
        while not isinstance(message := self.answer(), kind):
            pass
        return message

    def close(self):
        self.socket.close()
        self.context.term()


class Clock:
    """Stands still between two words of a test."""
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def broker(clock):
    with serving(ttl_s=4.0, clock=clock) as broker:
        yield broker


@pytest.fixture
def raw(broker):
    raw = Raw(broker.address)
    yield raw
    raw.close()


def test_through_a_socket(broker, raw, clock):
    peers = raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    assert [one.incarnation for one in peers.members] == ["d"]
    other = Raw(broker.address)
    assert len(other.ask("p", m.Register(member("p", m.Role.PREFILL))).members) == 2
    clock.now_s += GATHER_S
    assert [one.incarnation for one in raw.answer().members] == ["p", "d"]
    assert raw.ask("d", m.Put(job(1))).queue_length == 1
    other.say("p", m.Credit(1, 0))
    offer = other.next_of(m.Offer)
    assert offer.job.attempt.number == 1
    other.close()  # gone without a word: its silence ends its membership, and the other is told
    deadline = time.monotonic() + 60
    while [one.incarnation for one in broker.members()] != ["d"]:
        assert time.monotonic() < deadline
        raw.ask("d", m.Register(member("d", m.Role.DECODE), peers.broker, 99))
        clock.now_s += 0.5
        time.sleep(0.05)


def test_b111_a_broker_that_stood_still_takes_nobody_for_silent(broker, raw, clock):
    raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    other = Raw(broker.address)
    other.ask("p", m.Register(member("p", m.Role.PREFILL)))
    clock.now_s += GATHER_S
    assert raw.answer().since, "it has looked for the first time"
    clock.now_s += 10.0
    deadline = time.monotonic() + 60
    while not broker.counts().get("late"):
        assert time.monotonic() < deadline
        broker._poller.waker.set()
        time.sleep(0.01)
    assert len(broker.members()) == 2
    raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    while [one.incarnation for one in broker.members()] != ["d"]:  # the other one has its time, and no more
        assert time.monotonic() < deadline and clock.now_s < 115.0
        clock.now_s += 0.5
        broker._poller.waker.set()
        time.sleep(0.05)
        raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    other.close()


def test_a_broker_that_is_always_late_looks_all_the_same(broker, raw, clock):
    raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    deadline = time.monotonic() + 60
    while broker.members():
        assert time.monotonic() < deadline
        clock.now_s += 10.0
        broker._poller.waker.set()
        time.sleep(0.01)
    assert broker.counts()["late"] >= 1


def test_b111_a_broker_that_falls_behind_expels_nobody_whose_heartbeats_wait(monkeypatch, broker, clock):
    """B111: three passes take longer than `ttl_s` each, and more waits than one pass reads."""
    monkeypatch.setattr(server, "BATCH_MESSAGES", 4)
    heartbeats, receive = collections.Counter(), broker._registry.receive

    def receive_slowly(now, sender, message):
        heartbeats[sender] += isinstance(message, m.Register)
        clock.now_s += 10.0 * isinstance(message, m.Withdraw)
        return receive(now, sender, message)

    monkeypatch.setattr(broker._registry, "receive", receive_slowly)
    with contextlib.ExitStack() as closing:
        names = [f"d{number}" for number in range(12)]
        speakers = {name: closing.enter_context(contextlib.closing(Raw(broker.address))) for name in names}
        for name, speaker in speakers.items():
            speaker.ask(name, m.Register(member(name, m.Role.DECODE)))
        for _ in range(3):
            speakers["d0"].say("d0", m.Withdraw(m.Attempt("d0", "r", 1)))
            for name, speaker in speakers.items():
                speaker.say(name, m.Register(member(name, m.Role.DECODE)))
        wait_for(lambda: all(heartbeats[name] == 4 for name in names), heartbeats)
        clock.now_s += 0.5
        broker._poller.waker.set()
        wait_for(lambda: broker._registry._looked_at == clock.now_s)
        assert len(broker.members()) == 12 and not broker.counts().get("member_silent")


def test_b111_an_update_is_encoded_once_for_all(monkeypatch, broker, clock):
    encoded, encode = [], codec.encode
    monkeypatch.setattr(codec, "encode", lambda sender, message: encoded.append(message) or encode(sender, message))
    with contextlib.ExitStack() as closing:
        speakers = [closing.enter_context(contextlib.closing(Raw(broker.address))) for _ in range(5)]
        for number, speaker in enumerate(speakers):
            assert speaker.ask(f"d{number}", m.Register(member(f"d{number}", m.Role.DECODE))).since == 0
        clock.now_s += GATHER_S
        for speaker in speakers:
            assert len(speaker.next_of(m.Peers).members) == 5
        speakers[0].say("d0", m.Leave())
        wait_for(lambda: len(broker.members()) == 4)
        clock.now_s += GATHER_S
        for speaker in speakers[1:]:
            assert speaker.next_of(m.Peers).gone == ["d0"]
        assert len([one for one in encoded if isinstance(one, m.Peers) and one.since]) == 2


def test_b111_a_reader_gets_what_has_changed(broker, raw):
    known = RegistryView()
    raw.ask("d", m.Register(member("d", m.Role.DECODE)))
    first = list_members(broker.address, 60.0, known=known)
    raw.ask("p", m.Register(member("p", m.Role.PREFILL)))
    second = list_members(broker.address, 60.0, known=known)
    assert [one.incarnation for one in second.members] == ["d", "p"]
    assert second.members[0] is first.members[0], "it was not sent again"
    raw.say("d", m.Leave())
    wait_for(lambda: len(broker.members()) == 1)
    assert list_members(broker.address, 60.0, known=known).members == (second.members[1], )
    assert list_members(broker.address, 60.0).members == (second.members[1], ), "and all for one that knows nothing"


def test_a_stranger_can_only_register_and_list(broker, raw):
    """What else it sends is not decoded: it may be large, or bad. An engine sees by the answer that it is not known."""
    for message in (b"\x92\xa1d\x92\xa3Put\xc1", codec.encode("d", m.Put(job(1, tokens=100_000)))[3:]):
        raw.socket.send(b"PD" + bytes((m.PROTOCOL,)) + message)
        assert raw.answer() == m.Peers(broker._registry.incarnation, 1, [], 0, 1)
    assert broker.counts() == {"unregistered": 2}
    large = msgspec.structs.replace(member("d", m.Role.DECODE), processes=(m.Process(1 << 30, 1 << 40), ) * 1500)
    monstrous = codec.encode("d", m.Register(large))
    assert len(monstrous) < server.MAX_STRANGER_BYTES, "the largest that an engine would send"
    raw.socket.send(monstrous + bytes(server.MAX_STRANGER_BYTES))
    assert raw.answer().since and broker.counts() == {"unregistered": 3}
    raw.socket.send(monstrous)
    assert raw.answer().members == [large]
    raw.say("d", m.Put(job(1)))
    assert raw.next_of(m.PutReply).refusal is m.PutRefusal.NO_PEER


def test_b110_answers_that_nobody_reads_take_the_memory_of_a_few(broker, raw):
    """A stranger asks a thousand times for the whole registry of 2 MB, or for as much of what has changed since."""
    large = msgspec.structs.replace(member("", m.Role.DECODE), processes=(m.Process(1 << 30, 1 << 40), ) * 1500)
    for number in range(100):
        raw.ask(name := f"d{number}", m.Register(msgspec.structs.replace(large, incarnation=name)))
    reader = Raw(broker.address, most_unread=1)
    before = psutil.Process().memory_info().rss
    for number in range(1000):
        known = (broker._registry.incarnation, 1 + number % 50) if number % 2 else ("", 0)
        reader.say("stranger", m.ListMembers(*known))
    reader.say("stranger", m.Withdraw(m.Attempt("stranger", "r", 1)))
    wait_for(lambda: broker.counts().get("unregistered"), timeout_s=120)
    assert psutil.Process().memory_info().rss - before < 200 << 20
    reader.close()


def test_b110_a_connection_that_reads_nothing_ends(monkeypatch):
    """And with it what waits for it. One that only listens stays."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "SILENT_MS", 2000)
    large = msgspec.structs.replace(member("", m.Role.DECODE), processes=(m.Process(1 << 30, 1 << 40), ) * 1500)
    with serving() as broker, contextlib.ExitStack() as stack:
        reader, listener = Raw(broker.address, most_unread=1), Raw(broker.address)
        for one in (reader, listener):
            stack.callback(one.close)
        for number in range(50):
            listener.ask(name := f"d{number}", m.Register(msgspec.structs.replace(large, incarnation=name)))
        for _ in range(100):  # more than TCP holds
            reader.say("stranger", m.ListMembers("", 0))
        port = int(broker.address.rpartition(":")[2])

        def connections() -> int:
            return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
                       for one in psutil.Process().net_connections("tcp"))

        assert connections() == 2
        wait_for(lambda: connections() == 1, "the connection stands, and 100 answers wait for it", timeout_s=60)
        time.sleep(2.5)
        assert connections() == 1
        listener.say("d0", m.ListMembers("", 0))
        while len(listener.next_of(m.Peers).members) < 50:  # updates came before
            pass


def test_b107_a_late_reader_loses_nothing(monkeypatch):
    """Neither end ends a connection because the other one's process is busy: libzmq's threads answer for it."""
    monkeypatch.setattr(sockets, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(sockets, "SILENT_MS", 500)
    context, frames = zmq.Context(), [bytes([number]) for number in range(100)]
    listening = sockets.server(context, "tcp://127.0.0.1:0", ends_when_silent=True)
    connected = sockets.client(context, sockets.endpoint(listening), only_connected=True)
    wait_for(lambda: sockets.send(connected, b"begin") is sockets.SendResult.SENT)
    assert listening.poll(60_000)
    route, _ = sockets.receive(listening)
    for frame in frames:
        assert sockets.send(connected, frame) is sockets.send(listening, route, frame) is sockets.SendResult.SENT
    time.sleep(2.0)
    assert sockets.send(listening, route, b"end") is sockets.send(connected, b"end") is sockets.SendResult.SENT
    for reader in (listening, connected):
        found = []
        while found[-1:] != [b"end"]:
            assert reader.poll(60_000)
            found.append(sockets.receive(reader)[-1])
        assert found == [*frames, b"end"]
    context.destroy(linger=0)


def test_b110_a_name_belongs_to_the_first_connection_that_stands(broker, clock, caplog):
    """B110: nobody else takes its jobs, speaks for it or makes it leave; when the connection is gone, another may."""
    with contextlib.ExitStack() as closing:
        p, d, thief = (closing.enter_context(contextlib.closing(Raw(broker.address))) for _ in range(3))
        p.ask("p", m.Register(member("p", m.Role.PREFILL)))
        d.ask("d", m.Register(member("d", m.Role.DECODE)))
        for message in (m.Register(member("p", m.Role.DECODE)), m.Credit(8, 0), m.Leave()):
            thief.say("p", message)
        wait_for(lambda: broker.counts().get("name_taken") == 3)
        assert {one.incarnation: one.role for one in broker.members()} == {"p": m.Role.PREFILL, "d": m.Role.DECODE}
        assert caplog.text.count("something else uses the name of engine p") == 1
        p.socket.close()
        deadline = time.monotonic() + 60
        while not thief.socket.poll(200):
            thief.say("p", m.Register(member("p", m.Role.PREFILL)))
            clock.now_s += 0.2
            assert time.monotonic() < deadline
        d.say("d", m.Put(job(1)))
        thief.say("p", m.Credit(1, 0))
        thief.next_of(m.Offer)


def test_b110_without_keys_no_member_is_beyond_the_loopback(raw, broker, caplog):
    """B110: a forged one would make others connect there."""
    elsewhere = msgspec.structs.replace(member("p", m.Role.PREFILL), address="tcp://203.0.113.7:1")
    assert raw.ask("p", m.Register(elsewhere)) == m.Refused("keys", "none, so no address beyond the loopback",
                                                            "tcp://203.0.113.7:1")
    hidden = msgspec.structs.replace(member("p", m.Role.PREFILL), lifeline="tcp://203.0.113.7:2")
    assert isinstance(raw.ask("p", m.Register(hidden)), m.Refused)
    assert broker.members() == [] and broker.counts()["beyond_loopback"] == 2
    assert caplog.text.count("engine p is refused: keys") == 1
    assert Registry("b", BOUNDS).receive(0.0, "p", m.Register(elsewhere))[0][1].members == [elsewhere]


def test_b110_a_full_registry_says_so():
    registry = registered(member("d", m.Role.DECODE), limits=QueueLimits(max_members=1))
    assert registry.receive(0.0, "p", m.Register(member("p", m.Role.PREFILL))) == [
        ("p", m.Refused("members", "1", "one more"))]


def test_b110_no_entry_is_so_large_that_a_full_registry_can_not_be_sent():
    """B110: and an engine that can't reach any of as many others as it may name is let in."""
    limits, longest = QueueLimits(), MAX_INCARNATION_BYTES
    names = tuple(f"{number:0{longest}x}" for number in range(m.MAX_UNREACHED))
    registry, lonely = Registry("b", limits), msgspec.structs.replace(member("p", m.Role.PREFILL), unreached=names)
    assert registry.receive(0.0, "p", m.Register(lonely))[0][1].members == [lonely]
    large = msgspec.structs.replace(lonely, processes=tuple(m.Process(1 << 40, 1 << 40) for _ in range(1024)))
    (_, answer), = registry.receive(0.0, "p", m.Register(large))
    assert isinstance(answer, m.Refused) and answer.key == "entry" and registry.members() == [lonely]
    assert limits.max_members * limits.max_entry_bytes < codec.MAX_FRAME_BYTES
    (_, answer), = registry.receive(0.0, "x" * (longest + 1), m.Register(member("x" * (longest + 1), m.Role.DECODE)))
    assert isinstance(answer, m.Refused) and answer.key == "incarnation"


def test_b42_other_protocol_is_answered_with_both_versions(raw):
    raw.socket.send(b"PD" + bytes((m.PROTOCOL + 1,)) + b"from the future")
    assert raw.answer() == m.Refused("protocol", str(m.PROTOCOL), str(m.PROTOCOL + 1))


def test_b81_noise_is_counted_and_dropped(broker, raw):
    dice = random.Random(7)
    good = [codec.encode("d", message) for message in (
        m.Register(member("d", m.Role.DECODE)), m.Put(job(1)), m.Credit(1, 0), m.Withdraw(m.Attempt("d", "r", 1)))]
    odd = [codec.encode("d", m.Cancel(m.Attempt("d", "r", 1), 1)), codec.encode("d", m.Heard("b", 1))]
    send_noise(raw.socket, dice, good, odd, 1500)
    huge = Raw(broker.address)
    huge.socket.send(bytes(codec.MAX_FRAME_BYTES + 1))  # the socket itself refuses, and drops the connection
    fresh = Raw(broker.address)
    assert isinstance(fresh.ask("new", m.Register(member("new", m.Role.DECODE))), m.Peers)
    wanted = {"frame_shape": 300, "frame_content": 100, "unexpected": 200}
    wait_for(lambda: all(broker.counts().get(kind, 0) > count for kind, count in wanted.items()), broker.counts)
    huge.close()
    fresh.close()


def test_b81_members_that_fit_into_no_frame_do_not_end_the_broker(monkeypatch, broker, raw):
    """As a client with larger ones might try (B110: a full registry fits)."""
    monkeypatch.setattr(codec, "_framing", codec.Framing(b"PD", m.PROTOCOL, m.Envelope, "protocol", max_bytes=1500))
    for number in range(20):
        raw.socket.send(codec.encode("d", m.Register(member("d", m.Role.DECODE))))
        raw.socket.send(codec.encode(f"p{number}", m.Register(member(f"p{number}", m.Role.PREFILL))))
    wait_for(lambda: broker.counts().get("frame_too_large"), broker.counts)
    raw.socket.send(codec.encode("d", m.Put(job(1))))
    assert raw.next_of(m.PutReply) == m.PutReply(job(1).attempt, None, 1, True)


def heard(registry, name):
    """The answer to this member's next heartbeat."""
    registered_as = next(one for one in registry.members() if one.incarnation == name)
    ((to, answer),) = registry.receive(0.0, name, m.Register(registered_as, registry.incarnation, registry.version))
    assert to == name and isinstance(answer, m.Heard)
    return answer


def test_a_decode_engine_hears_what_waits_for_the_prefill_engines_that_fit_it():
    busy = msgspec.structs.replace(member("p", m.Role.PREFILL), load=m.Load(job_tokens=70, tokens_per_s=12.5))
    registry = registered(member("d", m.Role.DECODE), busy, member("both", m.Role.BOTH),
                          msgspec.structs.replace(member("leaves", m.Role.PREFILL), draining=True),
                          member("x", m.Role.DECODE, OTHER), member("y", m.Role.PREFILL, OTHER))
    put(registry, 1, tokens=30)
    registry.receive(0.0, "d", m.Put(msgspec.structs.replace(job(2, tokens=30), cached_tokens=20)))
    put(registry, 3, decode="both", tokens=5)
    put(registry, 4, decode="x", tokens=1000)
    answer = heard(registry, "d")
    assert (answer.queue_length, answer.queue_tokens) == (4, 30 + 10 + 5)
    assert answer.loads == (m.PrefillLoad("p", 70, 12.5), m.PrefillLoad("both"))
    assert [one.incarnation for one in heard(registry, "both").loads] == ["p"], "not itself"
    answer = heard(registry, "x")
    assert answer.queue_tokens == 1000 and answer.loads == (m.PrefillLoad("y"), )
    assert (heard(registry, "p").queue_tokens, heard(registry, "p").loads) == (None, ())


def test_the_loads_are_those_of_the_last_heartbeats(registry):
    before = heard(registry, "d")
    loaded = msgspec.structs.replace(member("p", m.Role.PREFILL), load=m.Load(job_tokens=9))
    registry.receive(1.0, "p", m.Register(loaded, "b", registry.version))
    assert [one.job_tokens for one in before.loads] == [0, 0]
    assert [one.job_tokens for one in heard(registry, "d").loads] == [9, 0]


def test_no_load_is_left_out():
    """One of 500 prefill engines would seem idle to a decode engine that does not hear of it."""
    registry = registered(member("d", m.Role.DECODE), *(member(f"p{number}", m.Role.PREFILL) for number in range(500)))
    assert len(heard(registry, "d").loads) == 500


def test_an_offered_job_waits_no_more(registry):
    put(registry, 1, tokens=30)
    assert heard(registry, "d").queue_tokens == 30
    registry.receive(0.0, "p", m.Credit(1, 0))
    assert heard(registry, "d").queue_tokens == 0


def test_an_older_broker_and_an_older_engine_understand_the_answer():
    """Trailing fields with defaults: absent from the one, ignored by the other."""
    assert msgspec.convert(["Heard", "b", 3], m.Heard) == m.Heard("b", 3, None, ())

    class OldHeard(m.WireMessage, tag="Heard"):
        broker: str
        queue_length: int

    sent = msgspec.msgpack.encode(m.Heard("b", 3, 70, (m.PrefillLoad("p", 70, 12.5), )))
    assert msgspec.msgpack.decode(sent, type=OldHeard) == OldHeard("b", 3)
    assert msgspec.msgpack.decode(sent, type=m.Heard).loads[0].tokens_per_s == 12.5
