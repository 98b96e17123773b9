# SPDX-License-Identifier: Apache-2.0
"""B81: whatever comes in on a socket, nothing breaks, nothing grows, all of it is counted, and work goes on.

235,000 frames, all derived from `VLLM_PD_FUZZ_SEED` (printed); `VLLM_PD_FUZZ_FRAMES` scales how many there are. Threads
run as they like, so the same seed gives the same frames, not the same interleaving.
"""
import asyncio
import collections
import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import random
import threading
import time

import msgspec
import nats
import pytest
import zmq
from nats.aio.msg import Msg

from tests.fakes.brokers import NatsServer, serving
from tests.sockets import fuzz
from tests.sockets.test_agent import FINGERPRINT, Engine, Settings, hand_over, peered, take_events
from tests.waiting import wait_for
from vllm_pd.broker import nats_store
from vllm_pd.broker.server import Broker
from vllm_pd.errors import TransferError
from vllm_pd.handover.progress import ArrivalNotice
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Cancelled, Prefill
from vllm_pd.rpc import codec
from vllm_pd.transfer.transport import RanksMetadata

SEED = int(os.environ.get("VLLM_PD_FUZZ_SEED", "20240717"))
SCALE = float(os.environ.get("VLLM_PD_FUZZ_FRAMES", "1"))
GROWTH_BYTES = 48 << 20
GROWTH_OBJECTS = 60_000
OTHER = msgspec.structs.replace(FINGERPRINT, kv_dtype="fp8")


def frames(count):
    return max(200, int(count * SCALE))


def memory():
    """(resident bytes, objects)."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())


class Growth:
    """Looked at once it is warm, and in the end."""

    def __init__(self, total):
        self._warm_at, self._done, self._warm = total // 3, 0, None

    def note(self, count):
        self._done += count
        if self._warm is None and self._done >= self._warm_at:
            self._warm = memory()

    def check(self):
        now = memory()
        print(f"seed {SEED}, {self._done} frames: {(now[0] - self._warm[0]) >> 10} KiB and {now[1] - self._warm[1]} "
              "objects more than when it was warm")
        assert now[0] - self._warm[0] < GROWTH_BYTES and now[1] - self._warm[1] < GROWTH_OBJECTS


@pytest.fixture(autouse=True)
def log():
    """What is logged meanwhile is bounded too."""
    lines = []
    handler = logging.Handler()
    handler.emit = lines.append
    logger = logging.getLogger("vllm.pd")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    yield
    logger.removeHandler(handler)
    logger.propagate = propagate
    assert len(lines) < 100, [record.getMessage() for record in lines[:20]]


def connect(context, address, count):
    sockets = []
    for _ in range(count):
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndtimeo = 10_000
        socket.connect(address)
        sockets.append(socket)
    return sockets


def member(name, role, address="tcp://127.0.0.1:1", fingerprint=FINGERPRINT, **more):
    return m.Member(name, role, address, fingerprint, **more)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextlib.contextmanager
def closing(*engines):
    try:
        yield
    finally:
        for one in engines:
            one.agent.close(10.0)
            one.agent.end_lifeline()


# Codecs.


def test_b81_codecs_give_a_message_or_a_fault():
    dice = random.Random(SEED)
    names = ["d", "p", "ä" * 300]
    words = fuzz.Words(dice, names, [member(name, role) for name in names for role in m.Role],
                       [m.Attempt(name, "r", number) for name in names for number in range(3)])
    fuzzer = fuzz.Fuzzer(words, list(m.Message.__args__), good=0.2)
    growth, total = Growth(frames(60_000)), frames(60_000)
    seen, faults = collections.Counter(), collections.Counter()
    for _ in range(total):
        data = fuzzer.frames()
        try:
            sender, message = codec.decode(data)
        except codec.BadFrame as fault:
            faults[fault.fault] += 1
        else:
            seen[type(message)] += 1
            assert codec.decode([codec.encode(sender, message)]) == (sender, message)
        growth.note(1)
    growth.check()
    assert seen.keys() == set(m.Message.__args__), "each kind came through"
    assert all(faults[fault] > total / 1000 for fault in (codec.FrameFault.SHAPE, codec.FrameFault.CONTENT,
                                                          codec.FrameFault.VERSION)), faults


def test_b81_notices_and_metadata_give_a_value_or_a_refusal():
    dice = random.Random(SEED + 1)
    attempt = m.Attempt("incarnation", "request", 7)
    notices = [ArrivalNotice(attempt, rank).encode() for rank in (0, 1, 2**31)]
    results = collections.Counter(type(ArrivalNotice.decode(data)) for data in
                                  fuzz.payloads(dice, notices, frames(20_000)))
    assert set(results) == {ArrivalNotice, type(None)} and min(results.values()) > frames(20_000) / 50
    good = [RanksMetadata([b"first rank", b"second"]).encode()]
    refused = 0
    for data in fuzz.payloads(dice, good, frames(10_000)):
        try:
            RanksMetadata.decode("peer", data)
        except TransferError:
            refused += 1
    assert frames(10_000) / 10 < refused < frames(10_000)


# The broker's socket.


def test_b81_the_brokers_socket(context):
    dice = random.Random(SEED + 2)
    broker = Broker("tcp://127.0.0.1:0", ttl_s=0.6)
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        sockets = connect(context, broker.address, 6)
        names = [f"n{number}" for number in range(12)]
        members = [member(name, dice.choice(list(m.Role)), fingerprint=dice.choice([FINGERPRINT] * 3 + [OTHER]))
                   for name in names]
        words = fuzz.Words(dice, names, members, [m.Attempt(name, "r", number) for name in names
                                                  for number in range(6)])
        fuzzer = fuzz.Fuzzer(words, m.TO_BROKER, [m.Claim, m.Heard, m.Offer, m.Drain], owners=("member", "attempt"))
        total = frames(40_000)
        growth, answers = Growth(total), 0
        for number in range(total):
            dice.choice(sockets).send_multipart(fuzzer.frames())
            growth.note(1)
            if number % 50 == 0:
                answers += fuzz.drain(*sockets)
        fresh, = connect(context, broker.address, 1)
        fresh.send(codec.encode("fresh", m.ListMembers()))
        deadline = time.monotonic() + 60
        while not fresh.poll(20):
            assert time.monotonic() < deadline and thread.is_alive()
            answers += fuzz.drain(*sockets)
        assert isinstance(codec.decode(fresh.recv_multipart())[1], m.Peers)
        growth.check()
        counts = broker.counts()
        assert answers > total / 20 and all(counts[f"frame_{fault}"] for fault in ("shape", "content", "version"))
        assert counts["unexpected"] and counts["foreign"] and len(counts) < 40, counts
        registry = broker._registry
        assert len(registry) <= registry.limits.max_jobs and len(broker._routes) < 1200
        wait_for(lambda: not (broker.members() or broker.queue_length() or registry._tokens or broker._routes),
                 "everybody is silent now")
    finally:
        broker.stop()
        thread.join(60)
    assert not thread.is_alive()


# An engine's sockets.


@pytest.fixture
def broker():
    with serving(ttl_s=2.0) as broker:
        yield broker


def test_b81_a_decode_engines_socket(broker, context):
    """As prefill engines and operators speak to it."""
    dice = random.Random(SEED + 3)
    settings = dataclasses.replace(Settings(broker.address), ttl_s=2.0, lease_s=2.0)
    decode, prefill = Engine(settings, m.Role.DECODE), Engine(settings, m.Role.PREFILL)
    with closing(decode, prefill):
        peered(decode, prefill)
        prefill.protocol.prefill.set_credits(0)
        time.sleep(0.2)
        agent = decode.agent
        sockets = connect(context, agent.member.address, 6)
        names = [f"x{number}" for number in range(8)]
        members = [member(name, m.Role.PREFILL) for name in names] + [
            member("y", m.Role.BOTH, fingerprint=OTHER), member("z", m.Role.DECODE)]
        words = fuzz.Words(dice, names, members, [])
        kinds = [kind for kind in (*m.TO_DECODE, *m.TO_ENGINE) if kind is not m.Drain]
        fuzzer = fuzz.Fuzzer(words, kinds, [m.Cancel, m.Grant, m.Put, m.Peers])
        total = frames(45_000)
        growth, answers, submitted, ends = Growth(total), 0, 0, collections.Counter()
        attempts: collections.deque[m.Attempt] = collections.deque()

        def said_enough() -> bool:
            return ends["Prefilled"] > 0 and agent.protocol.operators.totals()["decode_granted"] > 10

        # On a busy machine the engine hears few frames while their attempts are open: then there are more of them.
        for number in itertools.takewhile(lambda number: number < total or number < 3 * total and not said_enough(),
                                          itertools.count()):
            if number % 50 == 0:
                submitted += 1
                answers += fuzz.drain(*sockets)
                ends.update(type(event).__name__ for event in take_events(agent))
                attempts.append(decode.submit(f"r{number % 7}"))
                agent.protocol.decode.arrived(dice.choice(attempts), dice.choice([0, 0, 1, -1, 2**40]))
                if len(attempts) > 200:  # what was sent is heard some thousand frames later
                    agent.protocol.decode.abort(attempts.popleft())
                words.attempts = [*attempts, m.Attempt(agent.member.incarnation, "r1", 2**61), m.Attempt("z", "r1", 1)]
            # A name is that of the first connection that has used it: mostly the same one.
            (sockets[0] if dice.random() < 0.9 else dice.choice(sockets)).send_multipart(fuzzer.frames())
            growth.note(1)
        for attempt in attempts:
            agent.protocol.decode.abort(attempt)
        # Those who were granted something say at last that they write no more: whatever claim they had.
        deadline = time.monotonic() + 100
        while agent.protocol.operators.open_attempts():
            assert time.monotonic() < deadline and agent.error is None
            for attempt, known in agent.protocol.operators.debug_state()["decode"].items():
                for socket in sockets:
                    socket.send(codec.encode(known["peer"] or "x0", m.Stopped(attempt, max(0, known["claim"]))))
            time.sleep(0.05)
            answers += fuzz.drain(*sockets)
        ends.update(type(event).__name__ for event in take_events(agent))
        growth.check()
        print(dict(ends), agent.protocol.operators.totals(), agent.dropped())
        assert ends["Released"] + ends["Prefilled"] == submitted, "each attempt came to its end"
        assert said_enough() and answers > total / 20
        dropped = agent.dropped()
        assert all(dropped[f"link_frame_{fault}"] for fault in ("shape", "content", "version", "unexpected")), dropped
        assert "link_frame_error" not in dropped and len(dropped) < 60 and dropped["link_name_taken"], dropped
        assert len(agent.protocol.operators.debug_state()["peers"]) <= agent.protocol._core.decode_half.limits.max_peers
        decode.bell.clear()
        decode.events.clear()
        for event in take_events(prefill):  # it may have got one before it heard that it has no room
            if isinstance(event, Cancelled):
                prefill.protocol.prefill.ended(event.attempt)
        prefill.events.clear()
        prefill.protocol.prefill.set_credits(4)
        half = agent.protocol._core.decode_half
        half.limits = msgspec.structs.replace(half.limits, lease_s=60.0)
        hand_over(decode, prefill, "afterwards")


def test_b81_an_engine_that_is_told_to_drain_again_and_again(broker, context):
    dice = random.Random(SEED + 4)
    engine = Engine(dataclasses.replace(Settings(broker.address), ttl_s=2.0), m.Role.BOTH)
    with closing(engine):
        sockets = connect(context, engine.agent.member.address, 2)
        words = fuzz.Words(dice, ["operator", "x"], [member("x", m.Role.BOTH)], [m.Attempt("x", "r", 1)])
        fuzzer = fuzz.Fuzzer(words, m.TO_ENGINE, m.TO_DECODE)
        for number in range(frames(5_000)):
            dice.choice(sockets).send_multipart(fuzzer.frames())
            if number % 50 == 0:
                fuzz.drain(*sockets)
                take_events(engine)
        fresh, = connect(context, engine.agent.member.address, 1)
        fresh.send(codec.encode("fresh", m.Status()))
        assert fresh.poll(60_000)
        reply = codec.decode(fresh.recv_multipart())[1]
        assert isinstance(reply, m.StatusReply) and reply.member.draining and engine.agent.error is None
        assert "link_frame_error" not in engine.agent.dropped()


def test_b81_a_prefill_engines_lines_to_its_broker_and_to_decode_engines(context):
    dice = random.Random(SEED + 5)
    broker, *decodes = (context.socket(zmq.ROUTER) for _ in range(3))
    for socket in (broker, *decodes):
        socket.linger, socket.sndtimeo = 0, 10_000
        socket.router_mandatory = True
        socket.bind("tcp://127.0.0.1:*")
    addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in decodes]
    settings = Settings(broker.getsockopt_string(zmq.LAST_ENDPOINT))
    engine = Engine(settings, m.Role.BOTH)
    with closing(engine):
        agent = engine.agent
        assert broker.poll(60_000)
        route = broker.recv_multipart()[0]
        us = agent.member.incarnation
        members = [member("d0", m.Role.DECODE, addresses[0]), member("d1", m.Role.BOTH, addresses[1]), agent.member,
                   member("other", m.Role.BOTH, addresses[1], OTHER), member("liar", m.Role.DECODE, "ipc:///tmp/x"),
                   member("away", m.Role.DECODE, "tcp://127.0.0.1:1")]
        names = [one.incarnation for one in members] + ["b1", "b2"]
        words = fuzz.Words(dice, names, members, [])
        of_broker = fuzz.Fuzzer(words, m.FROM_BROKER, [m.Grant, m.Hello, m.ListMembers])
        of_decode = fuzz.Fuzzer(words, m.TO_PREFILL, [m.Offer, m.Claim, m.Drain], good=0.6,
                                owners=("member", "attempt"))
        total = frames(45_000)
        growth, ends, heard = Growth(total), collections.Counter(), 0
        routes: dict[int, list[bytes]] = {0: [], 1: []}
        claims: collections.deque[m.Claim] = collections.deque(maxlen=8)
        for number in range(total):
            if number % 25 == 0:
                while broker.poll(0):
                    broker.recv_multipart()
                for index, socket in enumerate(decodes):
                    while socket.poll(0):
                        heard += 1
                        back, frame = socket.recv_multipart()
                        if back not in routes[index]:
                            routes[index] = [*routes[index][-7:], back]
                        message = codec.decode([frame])[1]
                        if isinstance(message, m.Hello):
                            with contextlib.suppress(zmq.ZMQError):  # it has hung up since
                                socket.send_multipart([back, codec.encode(f"d{index}", m.HelloReply(members[index],
                                                                                                   b"memory"))])
                        elif isinstance(message, m.Claim):
                            claims.append(message)
                            if dice.random() < 0.5:
                                grant = m.Grant(message.attempt, message.claim, [1, 2, 3], 1, 0.2)
                                with contextlib.suppress(zmq.ZMQError):
                                    socket.send_multipart([back, codec.encode(f"d{index}", grant)])
                for event in take_events(agent):
                    ends[type(event).__name__] += 1
                    if isinstance(event, Cancelled):
                        agent.protocol.prefill.ended(event.attempt)
                    elif isinstance(event, Prefill) and dice.random() < 0.7:
                        agent.protocol.prefill.may_write(event.attempt)
                        if dice.random() < 0.5:
                            agent.protocol.prefill.sent(event.attempt, m.Timings())
                        else:
                            agent.protocol.prefill.failed(event.attempt, "no")
                agent.protocol.prefill.set_credits(8)
                low = number // 25
                words.attempts = [*(m.Attempt(dice.choice(["d0", "d1", us]), f"r{low + i}", low + i) for i in range(3)),
                                  *(claim.attempt for claim in claims)]
                offer = m.Offer(m.Job(words.attempts[0], addresses[words.attempts[0].incarnation == "d1"],
                                      list(range(40)), 16, 60.0), number)
                broker.send_multipart([route, codec.encode("b1", m.Peers("b1", 1 + number, members, 0))])
                broker.send_multipart([route, codec.encode("b1", offer)])
            index = dice.randrange(2)
            if dice.random() < 0.5 and routes[index]:
                try:
                    decodes[index].send_multipart([dice.choice(routes[index]), *of_decode.frames()])
                except zmq.ZMQError as error:
                    assert error.errno == zmq.EHOSTUNREACH  # it has hung up
                    routes[index] = []
            else:
                broker.send_multipart([route, *of_broker.frames()])
            growth.note(1)
        deadline = time.monotonic() + 100
        while agent.protocol.operators.open_attempts():  # leases end by themselves
            assert time.monotonic() < deadline and agent.error is None, agent.protocol.operators.open_attempts()
            for event in take_events(agent):
                if isinstance(event, Cancelled):
                    agent.protocol.prefill.ended(event.attempt)
            for attempt in agent.protocol.operators.open_attempts():
                agent.protocol.prefill.failed(attempt, "the end")
            time.sleep(0.05)
        growth.check()
        print(dict(ends), agent.protocol.operators.totals(), f"{heard} words heard")
        assert ends["AddPeer"] and ends["Prefill"] > 10 and ends["Cancelled"]
        assert agent.protocol.operators.totals()["prefill_granted"] > 10
        dropped = agent.dropped()
        assert all(dropped[f"link_frame_{fault}"] for fault in ("shape", "content", "version", "unexpected")), dropped
        assert "link_frame_error" not in dropped and len(dropped) < 60, dropped
        assert agent.counts()["sockets"] < 1100


# NATS.


def test_b81_nats_subjects_values_and_inboxes(tmp_path):
    """Anybody with the fleet's credentials may write everything there, and answer in the server's place."""
    dice = random.Random(SEED + 6)
    server = NatsServer(tmp_path)
    settings = dataclasses.replace(Settings(server.address), ttl_s=3.0, nats_prefix="fuzz")
    decode, prefill = Engine(settings, m.Role.DECODE), Engine(settings, m.Role.PREFILL)
    group = nats_store.group(FINGERPRINT)
    names = [f"n{number}" for number in range(6)]
    ours = [decode.agent.member, prefill.agent.member]
    words = fuzz.Words(dice, [*names, *(one.incarnation for one in ours)],
                       [*(member(name, dice.choice(list(m.Role))) for name in names)],
                       [m.Attempt(name, "r", number) for name in [*names, ours[0].incarnation] for number in range(4)])
    jobs = fuzz.Fuzzer(words, [m.Put], [m.Register, m.Credit, m.Offer])
    values = fuzz.Fuzzer(words, [m.Register], [m.Put, m.Leave])
    replies = [b"", b"{}", b"[]", b"null", b'{"error": {"code": 503, "err_code": 1, "description": "x"}}', b"\xff",
               b'{"type": "x"}', b'{"stream": 1, "seq": "x"}', b'{"error": 1}', b'{"error": {}}', b'{"seq": -1}']
    tails = ["", "", "fuzz.reply", "fuzz.JS.ACK.fuzz_jobs.g.1.2.3.4.5"]  # a client's $JS.ACK the server refuses
    total = frames(10_000)

    inboxes: collections.deque[str] = collections.deque(maxlen=20)

    async def sniff(message):
        if isinstance(message, Msg):
            inboxes.append(message.reply if message.reply.startswith("_INBOX.") else message.subject)

    async def spray():
        client = await nats.connect(server.url, error_cb=sniff)
        for subject in ("_INBOX.>", "$JS.API.>"):
            await client.subscribe(subject, cb=sniff)
        for number in range(total):
            kind, payload = dice.randrange(10), b""
            if kind < 4:
                subject = f"fuzz.jobs.{group}.{dice.choice(names)}.{dice.randrange(300)}"
                payload = jobs.frames()[0]
            elif kind < 8:
                keys = [*names, decode.agent.member.incarnation, "a.b.c", "_" + "0" * 40]
                subject, payload = f"$KV.fuzz_members.{dice.choice(keys)}", values.frames()[0]
            else:
                subject = dice.choice(inboxes) if inboxes else "fuzz.nobody"
                payload = dice.choice([*replies, dice.randbytes(20), jobs.frames()[0]])
            await client.publish(subject, payload, reply=dice.choice(tails) if kind >= 8 else "")
            if number % 100 == 0:
                await client.flush()
                await asyncio.sleep(0.01)
                prefill.protocol.prefill.set_credits(4)
                for event in take_events(prefill):
                    if isinstance(event, Prefill):
                        prefill.protocol.prefill.failed(event.attempt, "")
                    elif isinstance(event, Cancelled):
                        prefill.protocol.prefill.ended(event.attempt)
            growth.note(1)
        await client.close()

    growth = Growth(total)
    try:
        with closing(decode, prefill):
            decode.expect_view(lambda view: view.prefill_peers == 1)
            asyncio.run(spray())
            deadline = time.monotonic() + 100
            for one in (decode, prefill):
                while prefill.protocol.operators.open_attempts() or not one.protocol.decode.view().broker_up:
                    assert time.monotonic() < deadline, prefill.protocol.operators.open_attempts()
                    take_events(prefill)
                    time.sleep(0.05)
                line = one.agent.thread.sockets.backend
                assert line.error is None and one.agent.error is None
            growth.check()
            counts = prefill.agent.dropped()
            print(counts)
            assert all(counts[f"link_frame_{fault}"] for fault in ("shape", "content", "version", "unexpected")), counts
            assert "link_frame_error" not in counts and len(counts) < 60
            decode.expect_view(lambda view: view.broker_up and view.prefill_peers >= 1)
            take_events(prefill), take_events(decode)
            prefill.events.clear(), decode.events.clear()
            prefill.protocol.prefill.set_credits(4)
            hand_over(decode, prefill, "afterwards")
    finally:
        server.kill()
