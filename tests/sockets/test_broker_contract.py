# SPDX-License-Identifier: Apache-2.0
"""What any broker does for an engine: one suite over the embedded broker and a real nats-server."""
import asyncio
import time
from dataclasses import dataclass

import msgspec
import nats
import pytest
import zmq

from tests.fakes.brokers import KINDS, EmbeddedBroker, patience, running  # noqa: F401
from tests.waiting import wait_for
from vllm_pd.broker import nats_session
from vllm_pd.broker.changes import RegistryView
from vllm_pd.peer.sockets import open_backend
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.sockets import SendResult

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
OTHER = msgspec.structs.replace(FINGERPRINT, model="other")
TTL_S = 60.0  # speakers say that they are there only while a test listens to them

pytestmark = pytest.mark.usefixtures("patience")


@dataclass(frozen=True)
class Settings:
    """What an uplink wants to know."""
    broker: str
    nats_prefix: str
    ttl_s: float = TTL_S
    nats_credentials: str | None = None
    nats_ca: str | None = None


class Speaker:
    """An engine that says and hears only what a test wants; it answers for its heartbeats itself."""

    def __init__(self, settings, role, fingerprint=FINGERPRINT, **more):
        self.settings = settings
        self.context = zmq.Context()
        self.name = f"{role.value.replace('_', '-')}-{next(_NUMBERS)}"
        self.member = m.Member(self.name, role, "tcp://127.0.0.1:1", fingerprint, **more)
        self.line = open_backend(self.context, self.name, settings, None)
        self.heard = []
        self.view = RegistryView()
        self.serial = 0
        self._due = 0.0

    @property
    def members(self):
        return list(self.view.members.values())

    def say(self, message):
        wait_for(lambda: self.line.send(message) is SendResult.SENT, message)

    def register(self, **changes):
        self.member = msgspec.structs.replace(self.member, **changes)
        self._due = 0.0
        return self.expect(m.Peers, lambda peers: self.member in map(without_queue, peers.members))

    def listen(self, for_s):
        """Heartbeats go on meanwhile."""
        end = time.monotonic() + for_s
        while (now := time.monotonic()) < end:
            if now >= self._due:
                sent = self.line.send(m.Register(self.member, self.view.broker, self.view.version)) is SendResult.SENT
                self._due = now + (0.1 if sent else 0.02)
            poller = zmq.Poller()
            poller.register(self.line.pollable, zmq.POLLIN)
            poller.poll(max(1, int(1000 * (min(end, self._due) - now))))
            while (received := self.line.receive()) is not None:
                self._hear(received[1])
                return

    def _hear(self, message):
        if isinstance(message, m.Peers):
            self.view.follow(message.broker)
            if not self.view.apply(message):
                self._due = 0.0
                return
            message = msgspec.structs.replace(message, members=self.members)  # as whole lists, for the tests
        self.heard.append(message)
        if isinstance(message, m.Offer):
            self.serial = message.serial

    def expect(self, kind, condition=lambda message: True, within_s=60.0):
        deadline = time.monotonic() + within_s
        while True:
            for index, message in enumerate(self.heard):
                if isinstance(message, kind) and condition(message):
                    return self.heard.pop(index)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{self.name} heard no {kind.__name__}, but {self.heard}"
            self.listen(left_s)

    def expect_peers(self, *others, within_s=60.0):
        """Until the last list has just these. One from before may come twice: it is the answer to a heartbeat, too."""
        names, deadline = sorted(other.name for other in others), time.monotonic() + within_s
        while sorted(one.incarnation for one in self.members) != names:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{self.name} does not hear of {names}, but {self.members}"
            self.listen(left_s)

    def expect_nothing(self, kind, for_s):
        end = time.monotonic() + for_s
        while (left_s := end - time.monotonic()) > 0:
            self.listen(left_s)
        assert not [message for message in self.heard if isinstance(message, kind)], self.heard

    def put(self, number, deadline_s=60.0, cached_tokens=0, **more):
        attempt = m.Attempt(self.name, "r", number)
        job = m.Job(attempt, "tcp://127.0.0.1:1", [1, 2, 3], cached_tokens, deadline_s, **more)
        self.say(m.Put(job))
        return self.expect(m.PutReply, lambda reply: reply.attempt == job.attempt)

    def take(self, room):
        self.say(m.Credit(room, self.serial))

    def offer(self, within_s=60.0):
        offer = self.expect(m.Offer, within_s=within_s)
        return offer.job.attempt.number

    def attempts(self):
        return {message.job.attempt for message in self.heard if isinstance(message, m.Offer)}

    def close(self):
        self.line.close(100)
        self.context.destroy(linger=0)


def without_queue(member):
    """Over NATS its session adds what it has queued."""
    return msgspec.structs.replace(member, load=msgspec.structs.replace(member.load, queued_tokens=None))


def live(for_s, *speakers):
    """All go on for so long."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        for one in speakers:
            one.listen(0.02)


_NUMBERS = iter(range(1, 10_000))


@pytest.fixture(scope="module", params=KINDS)
def server(request, tmp_path_factory):
    with running(request.param, tmp_path_factory.mktemp("broker"), ttl_s=TTL_S) as server:
        yield server


@pytest.fixture
def speaker(server, request):
    """A factory. Each test has names of its own on a NATS server."""
    speakers = []
    prefix = f"t{next(_NUMBERS)}"

    def make(role, *arguments, server=server, ttl_s=TTL_S, **more):
        speakers.append(Speaker(Settings(server.url, prefix, ttl_s), role, *arguments, **more))
        return speakers[-1]

    yield make
    for one in speakers:
        one.line.send(m.Leave())
        one.close()


@pytest.fixture
def pair(speaker):
    """(d, p) that are registered and know it."""
    return know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))


def know_each_other(*speakers):
    for one in speakers:
        one.register()
    for one in speakers:
        one.expect_peers(*speakers) if one is not speakers[-1] else one.listen(0.01)
        one.heard.clear()
    return speakers


def test_heartbeats_are_answered_with_news_or_with_none(pair, speaker):
    d, p = pair
    heard = d.expect(m.Heard)
    assert heard.broker == d.view.broker and heard.queue_length == 0
    third = speaker(m.Role.PREFILL)
    third.register()
    d.expect_peers(d, p, third)
    p.expect_peers(d, p, third)
    third.say(m.Leave())
    third._due = float("inf")
    d.expect_peers(d, p)
    d.register(draining=True)
    peers = p.expect(m.Peers, lambda peers: any(one.draining for one in peers.members))
    assert len(peers.members) == 2
    d.register(draining=False, load=m.Load(1, 2, 3))


def test_b112_heartbeats_say_how_many_tokens_wait(speaker):
    """B112: for any prefill engine that the asker's jobs could go to, in jobs of all decode engines."""
    d, e, p = engines = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    for cached_tokens in (0, 2):
        d.put(cached_tokens, cached_tokens=cached_tokens)
    e.put(1)

    def hear(tokens):
        for one in engines:
            one.heard = [message for message in one.heard if not isinstance(message, m.Heard)]
        wait_for(lambda: all(any(isinstance(message, m.Heard) and message.queue_tokens == tokens
                                 for message in one.heard) for one in (d, e)),
                 f"{tokens} tokens", meanwhile=lambda: live(0.05, *engines))

    hear(3 + 1 + 3)
    p.take(1)
    assert p.offer() == 0
    hear(1 + 3)
    e.say(m.Withdraw(m.Attempt(e.name, "r", 1)))
    hear(1)


@pytest.fixture
def forgetful(server):
    """One that forgets who is silent for 5 s. On a NATS server everybody does so for himself."""
    if not isinstance(server, EmbeddedBroker):
        yield server
        return
    broker = EmbeddedBroker(ttl_s=5.0)
    yield broker
    broker.kill()


def test_silence_ends_a_membership(forgetful, speaker):
    d, p = know_each_other(*(speaker(role, server=forgetful, ttl_s=5.0) for role in (m.Role.DECODE, m.Role.PREFILL)))
    begun = time.monotonic()
    d.expect_peers(d)
    assert time.monotonic() - begun > 0.3
    assert p.line.send(m.Register(p.member)) is SendResult.SENT, "and it may come back"
    d.expect_peers(d, p)


def test_a_decode_engine_hears_how_busy_the_prefill_engines_are(pair, speaker):
    d, p = pair
    other = speaker(m.Role.PREFILL, OTHER)
    other.register(load=m.Load(job_tokens=5))
    d.expect_peers(d, p, other)
    p.member = msgspec.structs.replace(p.member, load=m.Load(job_tokens=70, tokens_per_s=12.5))
    p.say(m.Register(p.member))  # no new list of members need follow
    wanted = (m.PrefillLoad(p.name, 70, 12.5), )
    d.expect(m.Heard, lambda heard: heard.loads == wanted)
    assert d.put(1).refusal is None
    found = d.expect(m.Heard, lambda heard: heard.queue_length == 1)
    assert found.loads == wanted and found.queue_tokens in (3, None), "NATS counts jobs only"
    p._due = 0.0
    p.heard.clear()
    assert p.expect(m.Heard).loads == ()


def test_a_census(pair):
    d, p = pair
    d.say(m.ListMembers())
    assert {one.incarnation for one in d.expect(m.Peers).members} == {d.name, p.name}


def test_jobs_wait_in_order_for_room(pair):
    d, p = pair
    for number in range(4):
        assert d.put(number).refusal is None
    d.listen(0.15)
    d.heard.clear()
    assert d.expect(m.Heard, lambda heard: heard.queue_length == 4)
    p.take(2)
    assert [p.offer(), p.offer()] == [0, 1]
    p.expect_nothing(m.Offer, 0.3)
    d.expect(m.Heard, lambda heard: heard.queue_length == 2)
    p.take(1)
    assert p.offer() == 2
    p.take(5)
    assert p.offer() == 3
    assert d.put(4).refusal is None
    assert p.offer() == 4, "at once, for there was room"


def test_room_is_shared(pair, speaker):
    d, p = pair
    q = speaker(m.Role.PREFILL)
    q.register()
    d.expect_peers(d, p, q)
    p.take(2)
    q.take(2)
    time.sleep(0.05)
    for number in range(4):
        assert d.put(number).refusal is None
    assert {p.offer(), p.offer(), q.offer(), q.offer()} == {0, 1, 2, 3}


def test_b22_the_answer_says_whether_a_job_was_queued_before(pair):
    d, p = pair
    assert [d.put(1).is_new for _ in range(3)] == [True, False, False]
    p.take(1)
    assert p.offer() == 1
    p.line.holding(frozenset())  # it has given the job up
    p.register(http="http://127.0.0.1:2")  # by then that is known
    assert d.put(1).is_new


def long_job(d, number, beginning, tokens=1000):
    """One whose prompt has a beginning of so many tokens, the same for the same `beginning`, and some of its own."""
    token_ids = [*range(10_000 * beginning, 10_000 * beginning + tokens), *[number] * 24]
    return m.Job(m.Attempt(d.name, "r", number), "tcp://127.0.0.1:1", token_ids, 0, 60.0)


def put(d, job):
    d.say(m.Put(job))
    return d.expect(m.PutReply, lambda reply: reply.attempt == job.attempt)


def taken_by(*engines):
    """Who is offered the next job."""
    deadline = time.monotonic() + 60
    while True:
        for one in engines:
            one.listen(0.01)
            if any(isinstance(message, m.Offer) for message in one.heard):
                one.offer()
                return one
        assert time.monotonic() < deadline, "nobody is offered the job"


def test_room_in_tokens(pair):
    d, p = pair
    p.say(m.Credit(8, 0, 100, 0))
    for number in range(3):
        assert put(d, long_job(d, number, number, tokens=36)).refusal is None
    assert [p.offer(), p.offer()] == [0, 1]
    p.say(m.Credit(6, p.serial, 0, 120))
    p.expect_nothing(m.Offer, 0.3)
    p.say(m.Credit(7, p.serial, 40, 60))
    assert p.offer() == 2, "some room is left, and a job of any length may take it"


def ask_for_jobs(*engines):
    """Wait until each of these, which have room, has asked its broker for the next job. One that has not, by NATS, is
    one without room: the job goes to another. The embedded broker knows the room of all by itself."""
    settings = engines[0].settings

    async def count():
        client = await nats.connect(settings.broker)
        try:
            queues = await client.jetstream().consumers_info(f"{settings.nats_prefix}_jobs")
            return sum(queue.num_waiting for queue in queues)
        finally:
            await client.close()

    if settings.broker.startswith("nats"):
        wait_for(lambda: asyncio.run(count()) == len(engines), "not all of them ask for a job")


def test_b5_a_prompt_goes_where_its_beginning_went(speaker, monkeypatch):
    monkeypatch.setattr(nats_session, "PULL_S", TTL_S)  # nobody's request ends before the test
    slow = m.Load(tokens_per_s=1.0)  # what was queued is there as long as the test lasts
    d, p, q = know_each_other(speaker(m.Role.DECODE), *(speaker(m.Role.PREFILL, load=slow) for _ in range(2)))
    for one in (p, q):
        one.say(m.Credit(8, 0, 65536, 0))
        one.register(http="http://127.0.0.1:2")  # by then the credit is known
    first = None
    for number, beginning in enumerate((1, 2, 2, 2, 1, 1, 2, 1)):  # not in turn, as NATS would give them
        ask_for_jobs(p, q)
        put(d, long_job(d, number, beginning))
        taker = taken_by(p, q)
        first = first or taker
        assert (taker is first) is (beginning == 1), "at the second, the first has something to do"
    other = q if first is p else p
    first.say(m.Credit(0, first.serial, 65536, 0))
    first.register(http="http://127.0.0.1:3")
    for number in range(8, 10):
        put(d, long_job(d, number, 1))
        assert taken_by(p, q) is other, "nobody waits for one that has no room"


def test_an_offer_has_the_time_that_is_left(pair):
    d, p = pair
    d.put(1, deadline_s=60.0)
    d.expect_nothing(m.Offer, 0.3)
    p.take(1)
    offer = p.expect(m.Offer)
    assert 50 < offer.job.deadline_s < 59.95 and offer.serial == 1 and offer.job.token_ids == [1, 2, 3]


def test_put_again_of_a_waiting_job_changes_nothing(pair):
    d, p = pair
    assert d.put(1).refusal is d.put(2).refusal is d.put(1).refusal is None
    d.expect(m.Heard, lambda heard: heard.queue_length == 2)
    p.take(4)
    assert [p.offer(), p.offer()] == [1, 2]
    p.expect_nothing(m.Offer, 0.2)


def test_put_again_of_an_offered_job_offers_it_again(pair, speaker):
    """Whoever got it has not claimed it."""
    d, p = pair
    q = speaker(m.Role.PREFILL)
    q.register()
    d.expect_peers(d, p, q)
    p.take(1)
    d.put(1)
    assert p.offer() == 1
    q.take(1)
    assert d.put(1).refusal is None
    assert q.offer() == 1


def test_withdrawn_and_expired_jobs_are_offered_to_nobody(pair):
    d, p = pair
    d.put(1)
    d.say(m.Withdraw(m.Attempt(d.name, "r", 1)))
    for number, deadline_s in ((2, 0.3), (3, 60.0)):  # whose answers come when the withdrawal has been heard
        d.put(number, deadline_s=deadline_s)
    p.say(m.Withdraw(m.Attempt(d.name, "r", 3)))  # which is not its own
    live(0.5, d, p)
    p.take(4)
    assert p.offer() == 3
    p.expect_nothing(m.Offer, 0.3)


def test_jobs_of_those_who_left_go(pair):
    d, p = pair
    d.put(1)
    d.say(m.Withdraw(m.Attempt(d.name, "r", 1)))  # as an agent does that closes
    d.say(m.Leave())
    p.expect_peers(p)
    p.take(4)
    p.expect_nothing(m.Offer, 0.3)


def test_refusals_of_a_put(speaker):
    d = speaker(m.Role.DECODE)
    d.register()
    assert d.put(1).refusal is m.PutRefusal.NO_PEER
    p = speaker(m.Role.PREFILL, OTHER)
    p.register()
    d.expect_peers(d, p)
    assert d.put(1).refusal is m.PutRefusal.NO_PEER
    q = speaker(m.Role.PREFILL)
    q.register()
    d.expect_peers(d, p, q)
    assert d.put(1).refusal is None
    assert d.put(2, avoid=(q.name,)).refusal is m.PutRefusal.NO_PEER
    q.register(draining=True)
    d.expect(m.Peers, lambda peers: any(one.draining for one in peers.members))
    assert d.put(3).refusal is m.PutRefusal.NO_PEER


def test_b42_jobs_go_only_to_engines_that_fit(speaker):
    d, x, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL, OTHER), speaker(m.Role.PREFILL))
    x.take(9)
    d.expect_peers(d, x, p) if not d.view.version else None
    assert d.put(1).refusal is None
    p.take(9)
    assert p.offer() == 1
    x.expect_nothing(m.Offer, 0.2)


def test_b44_jobs_go_to_engines_of_other_ranks_and_stages(speaker):
    """Whose heads can be mapped."""
    ranks = [msgspec.structs.replace(FINGERPRINT, layout="kv-heads-first", tp=tp, pp=pp) for tp, pp in ((1, 1), (2, 2))]
    d, p = know_each_other(speaker(m.Role.DECODE, ranks[0]), speaker(m.Role.PREFILL, ranks[1]))
    assert d.put(1).refusal is None
    p.take(9)
    assert p.offer() == 1


def test_a_job_goes_round_those_that_it_avoids(pair, speaker):
    """And round its owner, who can prefill too."""
    d, p = pair
    q = speaker(m.Role.PREFILL)
    q.register()
    d.register(role=m.Role.BOTH)
    d.expect_peers(d, p, q)
    d.take(5)
    p.take(5)
    live(0.1, p, q)
    assert d.put(1, avoid=(p.name,)).refusal is None
    live(0.3, d, p, q)
    q.take(1)
    begun = time.monotonic()
    while not q.attempts():
        assert time.monotonic() - begun < 60
        live(0.05, d, p, q)
    assert not p.attempts() and not d.attempts()


def test_a_draining_engine_gets_no_job(pair, speaker):
    d, p = pair
    q = speaker(m.Role.PREFILL)
    q.register()
    p.register(draining=True)
    d.expect(m.Peers, lambda peers: len(peers.members) == 3 and any(one.draining for one in peers.members))
    p.take(3)
    assert d.put(1).refusal is None
    p.expect_nothing(m.Offer, 0.3)
    q.take(3)
    assert q.offer() == 1
