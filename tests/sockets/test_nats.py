# SPDX-License-Identifier: Apache-2.0
"""What only a queue on a NATS server does: who works on a job, who may log in, and a thread that may die."""
import asyncio
import base64
import collections
import contextlib
import dataclasses
import datetime
import hashlib
import json
import random
import socket
import time
from types import SimpleNamespace

import msgspec
import nats
import nkeys
import pytest
from nats.js import api

from tests.fakes import certificates
from tests.fakes.brokers import NatsServer, patience  # noqa: F401
from tests.sockets import test_agent, test_broker_contract
from tests.sockets.test_broker_contract import FINGERPRINT, Settings, Speaker, know_each_other, live
from tests.waiting import wait_for
from vllm_pd.broker import nats_backend, nats_members, nats_reach, nats_session, nats_store
from vllm_pd.broker.directory import Directory
from vllm_pd.broker.members import Access, list_members
from vllm_pd.errors import ControlError
from vllm_pd.ops import doctor
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Fallback, FallbackReason
from vllm_pd.rpc import codec
from vllm_pd.rpc.sockets import SendResult

pytestmark = pytest.mark.usefixtures("patience")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


@pytest.fixture
def prefix():
    return f"n{next(test_broker_contract._NUMBERS)}"


@pytest.fixture
def quick(monkeypatch):
    """A server that waits less for a word."""
    monkeypatch.setattr(nats_store, "ACK_WAIT_S", 4.0)
    monkeypatch.setattr(nats_session, "PROGRESS_S", 0.3)
    monkeypatch.setattr(nats_session, "TICK_S", 0.05)


@pytest.fixture
def speaker(server, prefix):
    speakers = []

    def make(role, **more):
        speakers.append(Speaker(Settings(server.url, prefix, **more), role))
        return speakers[-1]

    yield make
    for one in speakers:
        one.close()
        assert one.line.error is None or one in speaker_exempt


speaker_exempt = []


def ask(server, work, **options):
    """Run `work(client, js)` on a connection of its own."""
    async def run():
        client = await nats.connect(server.url, connect_timeout=50, **options)
        try:
            return await work(client, client.jetstream(timeout=50))
        finally:
            await client.close()
    return asyncio.run(asyncio.wait_for(run(), 100))


def stored(server, prefix):
    """Jobs that the server still has."""
    return ask(server, lambda client, js: js.stream_info(f"{prefix}_jobs")).state.messages


# A job's life.


def test_a_job_is_acknowledged_at_its_end_and_not_before(server, prefix, quick, speaker):
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    p.take(3)
    for number in range(2):
        d.put(number)
    assert [p.offer(), p.offer()] == [0, 1]
    attempts = [m.Attempt(d.name, "r", number) for number in range(2)]
    for _ in range(55):  # longer than the server waits for a word
        p.line.holding(set(attempts))
        live(0.1, d, p)
    assert stored(server, prefix) == 2 and not p.attempts(), "held for long, and not delivered again"
    for held in (1, 0):
        p.line.holding(set(attempts[2 - held:]))
        wait_for(lambda held=held: stored(server, prefix) == held, meanwhile=lambda: live(0.1, d, p))


def test_a_connection_that_sends_nothing_any_more_is_closed_in_time(monkeypatch):
    """Until then the backend connects to no other server."""
    async def never(*arguments):
        await asyncio.sleep(3600)

    monkeypatch.setattr(nats_store, "REQUEST_S", 0.1)
    client = SimpleNamespace(is_closed=False, close=never, jetstream=lambda timeout: None,
                             connected_url=SimpleNamespace(netloc="a:1"))
    servers = nats_reach.NatsServers(["nats://a:1", "nats://b:1"], 2.0)
    asyncio.run(asyncio.wait_for(nats_store.Store(client, "x", servers).close(), 30))
    assert servers.urls == ["nats://b:1", "nats://a:1"]


def test_a_job_that_ends_while_too_many_commands_wait_is_acknowledged_later(server, prefix, speaker):
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    p.take(1)
    d.put(0)
    assert p.offer() == 0
    p.line.commands._limit, limit = 0, p.line.commands._limit
    p.line.holding(set())
    p.line.commands._limit = limit
    wait_for(lambda: stored(server, prefix) == 0, meanwhile=lambda: (p.line.holding(set()), live(0.1, d, p)),
             timeout_s=30)  # its own time, after which the server forgets it, is 60 s


def test_an_offer_that_was_not_fetched_yet_has_not_ended(server, prefix, speaker):
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    p.take(1)
    d.put(1)
    time.sleep(0.1)
    p.line.holding(set())
    time.sleep(0.1)
    assert stored(server, prefix) == 1 and p.offer() == 1


def test_b21_the_job_of_an_engine_that_died_goes_to_another(quick, speaker):
    d, p, q = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL), speaker(m.Role.PREFILL))
    p.take(1)
    begun = time.monotonic()
    d.put(1)
    assert p.offer() == 1
    p.line._call(p.line._loop.stop)  # as a process that is gone: no word any more
    speaker_exempt.append(p)
    q.take(1)
    while not q.attempts():
        assert time.monotonic() - begun < 60
        live(0.05, d, q)
    assert time.monotonic() - begun > 0.9 * nats_store.ACK_WAIT_S, "only when the server has waited"


def test_the_job_of_an_engine_that_leaves_goes_to_another_at_once(speaker):
    d, p, q = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL), speaker(m.Role.PREFILL))
    p.take(1)
    d.put(1)
    assert p.offer() == 1
    q.take(1)
    p.say(m.Leave())
    assert q.offer(within_s=0.9 * nats_store.ACK_WAIT_S) == 1


def test_jobs_that_nobody_can_want_are_struck_off(server, prefix, speaker):
    """Of an incarnation that is not there (any more), past their deadline, in bytes that say nothing."""
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    job = m.Job(m.Attempt("gone", "r", 1), "tcp://127.0.0.1:1", [1], 0, 60.0)
    late = msgspec.structs.replace(job, attempt=m.Attempt(d.name, "r", 2), deadline_s=0.0)
    group = nats_store.group(FINGERPRINT)

    async def publish(client, js):
        for name, frame in (("gone.1", codec.encode("gone", m.Put(job))), ("late.2", codec.encode(d.name, m.Put(late))),
                            ("noise.3", b"\x00noise"), ("false.4", codec.encode("somebody", m.Put(job))),
                            ("odd.5", codec.encode(d.name, m.Leave())), ("empty.6", b"")):
            await js.publish(f"{prefix}.jobs.{group}.{name}", frame)

    ask(server, publish)
    p.take(9)
    wait_for(lambda: not stored(server, prefix), meanwhile=lambda: live(0.1, d, p))
    assert not p.attempts()
    counts = p.line.counters
    assert counts["job_expired"] == 1 and counts["job_orphaned"] == 1
    assert counts["frame_shape"] == 2 and counts["frame_unexpected"] == 2
    d.put(7)
    assert p.offer() == 7


def test_a_job_that_everybody_hands_back_does_not_live_for_ever(server, prefix, speaker, monkeypatch):
    monkeypatch.setattr(nats_session, "PAUSE_S", 0.01)
    monkeypatch.setattr(nats_session, "PAUSE_MAX_S", 0.02)
    d, p, q = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL), speaker(m.Role.PREFILL))
    p.take(1)
    assert d.put(1, avoid=(p.name,)).refusal is None
    wait_for(lambda: not stored(server, prefix), meanwhile=lambda: live(0.1, d, p, q))
    assert p.line.counters["job_passed_on"] == nats_store.MAX_DELIVER
    d.put(2)
    assert p.offer() == 2


def test_a_job_too_large_for_the_server_is_refused(speaker):
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    job = m.Job(m.Attempt(d.name, "r", 1), "tcp://127.0.0.1:1", [70_000] * 250_000, 0, 60.0)
    d.say(m.Put(job))
    assert d.expect(m.PutReply).refusal is m.PutRefusal.FULL
    assert d.line.counters["job_too_large"] == 1


def test_what_an_operator_has_made_is_used(server, prefix, speaker):
    async def make(client, js):
        await js.add_stream(api.StreamConfig(
            name=f"{prefix}_jobs", subjects=[f"{prefix}.jobs.>"], retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE, discard=api.DiscardPolicy.NEW, discard_new_per_subject=True,
            max_msgs_per_subject=1, max_msgs=1))

    ask(server, make)
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    assert d.put(1).refusal is None
    assert d.put(2).refusal is m.PutRefusal.FULL
    p.take(2)
    assert p.offer() == 1


def test_what_does_not_fit_is_named_and_the_broker_counts_as_away(server, prefix, speaker, caplog, monkeypatch):
    opened, open_store = [], nats_store.Store.open

    def counted_open(*arguments, **more):
        opened.append(time.monotonic())
        return open_store(*arguments, **more)

    monkeypatch.setattr(nats_store.Store, "open", counted_open)
    stream = api.StreamConfig(name=f"{prefix}_jobs", subjects=[f"{prefix}.jobs.>"])
    ask(server, lambda client, js: js.add_stream(stream))
    d = speaker(m.Role.DECODE)
    def words():
        return [record.getMessage() for record in caplog.records if f"{prefix}_jobs" in record.getMessage()]

    wait_for(words)
    time.sleep(0.3)
    assert d.line.send(m.ListMembers()) is SendResult.UNREACHABLE
    assert len(opened) <= 1 + (time.monotonic() - opened[0]) / nats_backend.RETRY_S, "with a pause before each"
    told = words()
    assert len(told) == 1 and "no work queue" in told[0] and "nats_prefix" in told[0], "said once"


def test_b26_storage_that_is_taken_away_is_made_again(server, prefix, speaker, monkeypatch):
    monkeypatch.setattr(nats_store, "REQUEST_S", 5.0)  # each waits for one that nobody answers any more
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    before = d.view.broker

    async def remove(client, js):
        await js.delete_stream(f"{prefix}_jobs")
        await js.delete_stream(f"KV_{prefix}_members")

    ask(server, remove)
    wait_for(lambda: all(any(isinstance(word, m.Peers) and word.broker != before and len(word.members) == 2
                             for word in one.heard) for one in (d, p)), meanwhile=lambda: live(0.05, d, p))
    number, deadline = 1, time.monotonic() + 60
    while (refusal := d.put(number).refusal) is m.PutRefusal.UNREGISTERED:  # its entry lapsed on a crowded machine
        assert time.monotonic() < deadline
        live(0.05, d, p)
        number += 1
    assert refusal is None
    p.take(1)
    assert p.offer() == number


# The thread.


class Death(BaseException):
    """What nobody expects."""


def test_a_fault_of_ours_ends_one_connection_only(speaker, monkeypatch):
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    register, first = nats_session.NatsSession._register, iter([True])

    async def fail(self, message):
        if next(first, False):
            raise KeyError("a fault of ours")
        await register(self, message)

    monkeypatch.setattr(nats_session.NatsSession, "_register", fail)
    wait_for(lambda: d.line.counters["nats_error"] + p.line.counters["nats_error"],
             meanwhile=lambda: live(0.05, d, p))
    live(1.0, d, p)
    assert d.line.counters["nats_error"] + p.line.counters["nats_error"] == 1
    wait_for(lambda: d.put(1).refusal is None, "after an unexpected error a heartbeat comes first",
             meanwhile=lambda: live(0.05, d, p))
    p.take(1)
    assert p.offer() == 1


async def test_a_cancellation_that_is_lost_does_not_keep_a_session(monkeypatch):
    """As asyncio.wait_for does it where its result has come in the same moment."""
    async def stubborn(self):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(1000)

    async def listen(callback):
        return "inbox"

    monkeypatch.setattr(nats_session.NatsSession, "_watch", stubborn)
    commands = nats_session.Mailbox(asyncio.get_running_loop(), 1)
    session = nats_session.NatsSession(SimpleNamespace(listen=listen), "b", 1.0, None, collections.Counter(), None)
    commands.put(None)
    await asyncio.wait_for(session.run(commands), 60)


def test_a_servers_clock_that_was_set_back_is_taken_anew(speaker, monkeypatch):
    now_s, looks = nats_store.Store.now_s, []

    async def ahead(self):
        seconds = await now_s(self)
        looks.append(self)
        return seconds + 1000.0  # as it showed before the step

    monkeypatch.setattr(nats_store.Store, "now_s", ahead)
    d, p = speaker(m.Role.DECODE), speaker(m.Role.PREFILL)
    wait_for(lambda: all(any(isinstance(word, m.Peers) and len(word.members) == 2 for word in one.heard)
                         for one in (d, p)), meanwhile=lambda: live(0.05, d, p))
    live(0.5, d, p)
    assert d.put(1).refusal is None and len(looks) == 2, "and no session began anew"


def test_no_task_is_left_behind_by_a_reconnect(server, prefix, speaker, monkeypatch):
    monkeypatch.setattr(nats_backend, "RETRY_S", 0.01)
    monkeypatch.setattr(nats_backend, "RETRY_MAX_S", 0.01)
    tries = []

    async def fail(self):
        tries.append(self)
        raise ConnectionError("away")

    monkeypatch.setattr(nats_backend.NatsBackend, "_connected", fail)
    d = speaker(m.Role.DECODE)
    wait_for(lambda: len(tries) >= 20)
    assert len(asyncio.all_tasks(d.line._loop)) <= 2  # the thread's own, and its wait


def test_the_death_of_the_thread_is_logged_and_counts_as_a_broker_that_is_away(server, prefix, monkeypatch, caplog):
    settings = dataclasses.replace(test_agent.Settings(server.url), nats_prefix=prefix)
    decode, prefill = (test_agent.Engine(settings, role) for role in (m.Role.DECODE, m.Role.PREFILL))
    try:
        test_agent.peered(decode, prefill)
        line = decode.agent.thread.sockets.backend

        async def fail():
            raise Death

        monkeypatch.setattr(line, "_connected", fail)
        line._call(line._closed.set)
        line._thread.join(60)  # while it lives it may be between two connections
        decode.expect_view(lambda view: not view.broker_up)
        attempt = decode.submit()
        fallback = decode.expect(Fallback)
        assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.BROKER)
        assert isinstance(line.error, Death) and decode.agent.error is None
        assert decode.agent.dropped()["link_nats_thread"] == 1
        assert any("the thread that speaks to NATS ended" in record.getMessage() for record in caplog.records)
    finally:
        for one in (decode, prefill):
            one.close()


def test_both_ways_are_bounded(speaker, monkeypatch):
    d = speaker(m.Role.DECODE)
    d.register()
    wait_for(lambda: not d.line.commands._waiting)  # heartbeats of one that was answered late
    gate, limit = asyncio.Event(), nats_backend.MAX_WAITING

    async def wait(self, command):
        await gate.wait()

    monkeypatch.setattr(nats_session.NatsSession, "do", wait)
    results = collections.Counter(d.line.send(m.ListMembers()) for _ in range(limit + 500))
    assert limit <= results[SendResult.SENT] <= limit + 1 and results[SendResult.FULL] >= 499, "one may be in work"
    monkeypatch.setattr(nats_backend, "MAX_WAITING", 3)
    d.line._inbox.extend([("b", m.Heard("b", 0))] * 3)
    with pytest.raises(nats_backend.InboxFull):
        d.line._report(type("Any", (), {"generation": "b"}), m.Heard("b", 1))
    d.line._inbox.clear()
    d.line._call(gate.set)


class DeliveredJob:
    """As the server delivers it. `answers`: what the session has said to the server about it."""
    headers, reply, subject = None, "reply", "inbox.1"

    def __init__(self, number: int, stamp_s: float = 5000.0, deliveries: int = 1, **more: object) -> None:
        more = {"deadline_s": 60.0, **more}
        job = m.Job(m.Attempt("d", "r", number), "tcp://127.0.0.1:1", [1, 2, 3], 0, **more)
        self.data = codec.encode("d", m.Put(job))
        self.metadata = SimpleNamespace(timestamp=datetime.datetime.fromtimestamp(stamp_s), num_delivered=deliveries)
        self.answers = []

    async def nak(self, delay=None):
        self.answers.append("nak" if delay is None else delay)


async def taking_session(pull, report, *others):
    """Of P, which can take one job. D is there, and these others; the server's clock shows 5000 s."""
    session = nats_session.NatsSession(SimpleNamespace(pull=pull), "p", 5.0, report, collections.Counter(), None)
    session._member, session._complete = m.Member("p", m.Role.PREFILL, "", FINGERPRINT), True
    now = time.monotonic()
    session._directory.clock_is(now, 5000.0)
    for member in (session._member, m.Member("d", m.Role.DECODE, "", FINGERPRINT), *others):
        session._directory.heard(now, member.incarnation, member, 5000.0)
    await session.do(m.Credit(1, 0))
    return session


@pytest.mark.parametrize("deliveries, waited_s, more, answer", [
    (1, 0.0, {}, "nak"),  # it goes to the others at once
    (2, 0.0, {}, nats_session.PAUSE_MAX_S),  # it has been to all, and the preferred one has no room
    (2, 9.0, {}, nats_session.PAUSE_MAX_S),
    (2, 11.0, {}, None),  # now it takes longer to wait than to cross the link
    (2, 4.0, {"deadline_s": 13.0}, None),  # it would be too late after that
    (2, 0.0, {"detours": ()}, None),
    (2, 0.0, {"detours": (("p", 10.0), ("near", 10.0))}, None),
    (2, 0.0, {"prefer": "gone"}, None),
    (2, 0.0, {"prefer": "p"}, None),
    (nats_session.MAX_PREFERRED_PASSES + 1, 0.0, {}, None)])
async def test_b112_a_job_waits_for_a_nearer_engine_as_long_as_the_link_takes(deliveries, waited_s, more, answer):
    """B112: as at the embedded broker."""
    async def pull(*terms):
        pass

    offers = []
    session = await taking_session(pull, offers.append, m.Member("near", m.Role.PREFILL, "", FINGERPRINT))
    job = DeliveredJob(1, 5000.0 - waited_s, deliveries, **{"prefer": "near", "detours": (("p", 10.0), ), **more})
    await session._on_delivered(job)
    assert job.answers == ([] if answer is None else [answer])
    assert len(offers) == (answer is None)


async def test_b112_a_job_that_is_put_again_has_waited_already(monkeypatch):
    """B112: D puts what nobody claims again and again. It waits for the nearer engine no longer than once."""
    now, frames, numbers = 100.0, [], iter(range(1, 100))

    async def put_job(group, job, frame):
        frames.append(frame)
        return next(numbers)

    monkeypatch.setattr(nats_session, "time", SimpleNamespace(monotonic=lambda: now))
    store = SimpleNamespace(put_job=put_job, max_bytes=1 << 20)
    session = nats_session.NatsSession(store, "d", 5.0, lambda message: None, collections.Counter(), None)
    session._member = m.Member("d", m.Role.DECODE, "", FINGERPRINT)
    session._directory.clock_is(now, 5000.0)
    session._directory.heard(now, "p", m.Member("p", m.Role.PREFILL, "", FINGERPRINT), 5000.0)
    job = m.Job(m.Attempt("d", "r", 1), "tcp://127.0.0.1:1", [1, 2, 3], 0, 60.0, detours=(("p", 5.0), ("q", 3.0)))
    left = []
    for _ in range(4):
        await session.do(m.Put(job))
        left.append(dict(codec.decode([frames[-1]])[1].job.detours))
        now += 2.0
    assert left == [{"p": 5.0, "q": 3.0}, {"p": 3.0, "q": 1.0}, {"p": 1.0}, {}]


async def test_b112_who_gets_nothing_but_jobs_that_wait_pauses():
    """B112: each hand-back brings the next one at once, over the slow link."""
    pulls = []

    async def pull(*terms):
        pulls.append(terms)

    session = await taking_session(pull, None, m.Member("near", m.Role.PREFILL, "", FINGERPRINT))
    for number in range(1, nats_session.MOST_WAITING_IN_TURN + 1):
        await session._on_delivered(DeliveredJob(number, deliveries=2, prefer="near", detours=(("p", 10.0), )))
        assert len(pulls) == min(1 + number, nats_session.MOST_WAITING_IN_TURN)
    await session._pull()
    assert len(pulls) == nats_session.MOST_WAITING_IN_TURN


async def test_a_pull_of_which_nothing_is_heard_is_made_again(monkeypatch):
    """The server that knew of it leads the queue no longer, and the one that does gives no job to this engine."""
    now, pulls = 100.0, []

    async def pull(group, inbox, number, expires_s):
        pulls.append(number)

    session = await taking_session(pull, None)
    monkeypatch.setattr(nats_session, "time", SimpleNamespace(monotonic=lambda: now))
    session._pull_until = 0.0
    await session._pull()
    began = len(pulls)
    for _ in range(10):
        now += nats_store.PULL_HEARTBEAT_S
        await session._on_delivered(SimpleNamespace(subject=f"inbox.{pulls[-1]}", headers={"Status": "100"}))
        await session._pull()
    assert len(pulls) == began
    now += nats_session.PULL_SILENT_S
    await session._on_delivered(SimpleNamespace(subject="inbox.0", headers={"Status": "100"}))
    await session._pull()
    assert len(pulls) == began + 1


async def test_an_offer_that_finds_no_place_in_the_inbox_takes_no_credit():
    """The control thread is stopped. Its job goes to another engine, and this one gets the next one."""
    pulls, offers, full = [], [], True

    async def pull(*terms):
        pulls.append(terms)

    def report(message):
        if full:
            raise nats_backend.InboxFull("1000 messages wait")
        offers.append(message)

    session = await taking_session(pull, report)
    assert len(pulls) == 1
    lost = DeliveredJob(1)
    await session._on_delivered(lost)
    assert lost.answers == [nats_session.PAUSE_S] and not session._held and session._counters == {"job_passed_on": 1}
    full = False
    await session._pull()
    assert len(pulls) == 2, "its only credit is still there"
    await session._on_delivered(DeliveredJob(2))
    assert [(offer.job.attempt.number, offer.serial) for offer in offers] == [(2, 1)] and len(pulls) == 2


# Who may log in.

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()


def public(seed):
    return nkeys.from_seed(bytearray(seed.encode())).public_key.decode()


def secret_file(path, text):
    path.touch(0o600)
    path.write_text(text)
    return str(path)


@contextlib.contextmanager
def nkey_server(folder):
    server = NatsServer(folder, f'authorization {{users: [{{nkey: {public(SEED)}}}]}}')
    try:
        yield server
    finally:
        server.kill()


def jwt(claims, name, subject, issuer):
    """A token as NATS has them."""
    def part(value):
        return base64.urlsafe_b64encode(value).rstrip(b"=")

    pair = nkeys.from_seed(bytearray(issuer.encode()))
    body = {"iss": pair.public_key.decode(), "sub": subject, "name": name, "iat": 1, "jti": "", "nats": claims}
    body["jti"] = base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest()).decode().rstrip("=")
    words = part(b'{"typ":"JWT","alg":"ed25519-nkey"}') + b"." + part(json.dumps(body).encode())
    return (words + b"." + part(pair.sign(words))).decode()


def test_b82_an_nkey_opens_the_server_and_nothing_else_does(tmp_path):
    good = secret_file(tmp_path / "seed", SEED + "\n")
    bad = secret_file(tmp_path / "bad", nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_USER).decode())
    with nkey_server(tmp_path) as server:
        d = Speaker(Settings(server.url, "x", nats_credentials=good), m.Role.DECODE)
        strangers = [Speaker(Settings(server.url, "x", nats_credentials=file), m.Role.DECODE) for file in (bad, None)]
        d.register()
        for stranger in strangers:
            wait_for(lambda stranger=stranger: stranger.line._problem, "it does not hear why")
            assert stranger.line.send(m.Register(stranger.member)) is SendResult.UNREACHABLE
            stranger.close()
        access = Access(nats_credentials=good, nats_prefix="x", ttl_s=600.0)
        listed = list_members(server.url, timeout_s=60.0, access=access)
        assert [one.incarnation for one in listed.members] == [d.name]
        with pytest.raises(ControlError):
            list_members(server.url, access=Access(nats_credentials=bad, nats_prefix="x"))
        d.close()


def test_b82_a_credentials_file_opens_the_server(tmp_path):
    operator, account, user = (nkeys.encode_seed(bytes([number]) * 32, kind).decode() for number, kind in (
        (1, nkeys.PREFIX_BYTE_OPERATOR), (2, nkeys.PREFIX_BYTE_ACCOUNT), (3, nkeys.PREFIX_BYTE_USER)))
    storage = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    anything = {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1}
    account_token = jwt({"type": "account", "version": 2, "limits": {**anything, **storage}}, "a", public(account),
                        operator)
    user_token = jwt({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}, "u", public(user), account)
    operator_token = jwt({"type": "operator", "version": 2}, "o", public(operator), operator)
    system = nkeys.encode_seed(bytes([4]) * 32, nkeys.PREFIX_BYTE_ACCOUNT).decode()
    system_token = jwt({"type": "account", "version": 2, "limits": anything}, "s", public(system), operator)
    accounts = f'{public(account)}: "{account_token}", {public(system)}: "{system_token}"'
    server = NatsServer(tmp_path, f'operator: "{operator_token}"\nresolver: MEMORY\n'
                        f'system_account: {public(system)}\nresolver_preload: {{{accounts}}}')
    try:
        file = secret_file(tmp_path / "user.creds", f"-----BEGIN NATS USER JWT-----\n{user_token}\n------END NATS USER "
                           f"JWT------\n\n-----BEGIN USER NKEY SEED-----\n{user}\n------END USER NKEY SEED------\n")
        d = Speaker(Settings(server.url, "x", nats_credentials=file), m.Role.DECODE)
        d.register()
        d.close()
    finally:
        server.kill()


def test_b82_tls_is_checked(tmp_path):
    key, certificate, other = (tmp_path / name for name in ("key.pem", "cert.pem", "other.pem"))
    for file, text in ((key, certificates.KEY), (certificate, certificates.CERTIFICATE), (other, certificates.OTHER)):
        file.write_text(text)
    server = NatsServer(tmp_path, f'tls {{cert_file: "{certificate}", key_file: "{key}"}}', scheme="tls")
    try:
        d = Speaker(Settings(server.url, "x", nats_ca=str(certificate)), m.Role.DECODE)
        d.register()
        d.close()
        for ca in (str(other), None):
            stranger = Speaker(Settings(server.url, "x", nats_ca=ca), m.Role.DECODE)
            wait_for(lambda stranger=stranger: "CERTIFICATE_VERIFY_FAILED" in stranger.line._problem)
            assert stranger.line.send(m.ListMembers()) is SendResult.UNREACHABLE
            stranger.close()
    finally:
        server.kill()


# Looking from outside.


def test_b42_doctor_asks_a_nats_server(server, prefix, speaker):
    access = Access(nats_prefix=prefix, ttl_s=600.0)  # nobody says a word meanwhile
    with pytest.raises(ControlError, match="no engine has ever been here"):
        list_members(server.url, access=access)
    d, p = know_each_other(speaker(m.Role.DECODE), speaker(m.Role.PREFILL))
    d.put(1)
    d.put(2)
    p.take(1)
    assert p.offer() == 1
    census = list_members(server.url, timeout_s=60.0, access=access)
    assert {one.incarnation for one in census.members} == {d.name, p.name} and census.queue_length == 1
    found = list(doctor.check_peers(server.url, access))
    assert all(finding.ok for finding in found)
    [kept] = [finding for finding in found if finding.check == "nats"]
    assert kept.fact.startswith(f"one server keeps KV_{prefix}_members and {prefix}_jobs: ")
    assert kept.hint == ("make it a cluster of three servers, any one of which may go; then nats stream update "
                         f"KV_{prefix}_members --replicas=3, nats stream update {prefix}_jobs --replicas=3")
    assert kept.lines[0].startswith("-- ")
    broken = list(doctor.check_peers("nats://127.0.0.1:1"))
    assert [finding.ok for finding in broken] == [False] and "nats-server" in broken[0].cure


class SlowStore:
    """Of a server whose clock shows what ours does, and is a second away. Somebody was there `age_s` ago."""

    def __init__(self, monkeypatch, age_s=0.5):
        self.time_s, self.age_s = 100.0, age_s
        for module in (nats_session, nats_members):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.time_s))

    async def open(self, *_, **__):
        return self

    async def now_s(self):
        self.time_s += 1.0
        return self.time_s

    async def watch_members(self):
        frame = codec.encode("a", m.Register(m.Member("a", m.Role.DECODE, "", FINGERPRINT)))
        yield nats_store.BucketEntry("a", frame, self.time_s - self.age_s)
        yield None

    async def all_waiting(self):
        return 0

    async def close(self):
        pass


def test_b42_commands_list_engines_with_slow_heartbeats_by_their_own_ttl(monkeypatch):
    monkeypatch.setattr(nats_members, "Store", SlowStore(monkeypatch, age_s=6.0))
    for ttl_s, count in ((5.0, 0), (30.0, 1)):
        assert len(list_members("nats://127.0.0.1:4222", access=Access(ttl_s=ttl_s)).members) == count


async def test_a_server_that_is_slow_to_say_its_time_makes_nobody_old(monkeypatch):
    store, told = SlowStore(monkeypatch), []
    store.generation = "g"
    assert len((await nats_members._read(store, ttl_s=1.0))[0]) == 1
    session = nats_session.NatsSession(store, "b", 1.0, told.append, collections.Counter(), None)
    session._prepared.set()
    await session._watch()
    assert [len(peers.members) for peers in told] == [1]


async def test_b112_tokens_are_not_known_where_an_older_engine_does_not_say_them():
    """B112: then a decode engine takes the jobs for as long as its own."""
    async def put_member(incarnation, frame):
        session._hear(time.monotonic(), incarnation, frame, time.monotonic())

    async def waiting(group):
        return 3, 0

    async def prepare_group(group):
        pass

    def enter(name, queued_tokens, role=m.Role.DECODE, fingerprint=FINGERPRINT):
        member = m.Member(name, role, "", fingerprint, m.Load(queued_tokens=queued_tokens))
        session._hear(time.monotonic(), name, codec.encode(name, m.Register(member)), time.monotonic())

    store = SimpleNamespace(put_member=put_member, waiting=waiting, prepare_group=prepare_group, generation="g")
    session = nats_session.NatsSession(store, "a", 5.0, lambda message: None, collections.Counter(), None)
    await session._register(m.Register(m.Member("a", m.Role.DECODE, "", FINGERPRINT)))
    enter("b", 30)
    enter("c", 12)
    enter("p", None, m.Role.PREFILL)
    enter("elsewhere", None, fingerprint=msgspec.structs.replace(FINGERPRINT, model="other"))
    assert session._queue_tokens() == 42
    enter("d", None)
    assert session._queue_tokens() is None


class Asked:
    """A server that answers one question after another: after so many seconds, with that error, or never (None)."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.count = 0

    async def __call__(self):
        answer = self._answers[min(self.count, len(self._answers) - 1)]
        self.count += 1
        if isinstance(answer, BaseException):
            raise answer
        await asyncio.sleep(1000 if answer is None else answer)
        return self.count


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(nats_reach, "AGAIN_S", 0.05)


@pytest.mark.parametrize("first", [None, nats.errors.TimeoutError(), nats.js.errors.ServiceUnavailableError(),
                                   nats.js.errors.NoStreamResponseError()])
async def test_b112_a_question_is_asked_again_where_nobody_answers(soon, first):
    """B112: a leader that is elected knows of no earlier one."""
    asked = Asked(first, first, 0.0)
    assert await nats_reach.insist(asked, 60.0) == 3


async def test_b112_a_slow_server_answers_the_first_question(soon):
    assert await nats_reach.insist(asked := Asked(0.12, None), 60.0) > 1 and asked.count < 10


async def test_b112_an_error_that_is_an_answer_ends_it(soon):
    asked = Asked(None, nats.js.errors.NotFoundError(code=404))
    with pytest.raises(nats.js.errors.NotFoundError):
        await nats_reach.insist(asked, 60.0)
    assert asked.count == 2


async def test_b112_who_is_never_answered_gives_up(soon):
    unable = nats.js.errors.ServiceUnavailableError()
    for answer, error in ((None, TimeoutError), (unable, type(unable))):
        with pytest.raises(error):
            await nats_reach.insist(Asked(answer), 0.2)
    assert len(asyncio.all_tasks()) == 1, "nothing is left"


def test_b112_a_server_that_is_of_no_use_is_tried_last():
    servers = nats_reach.NatsServers(urls := [f"nats://10.0.0.{number}:4222" for number in range(1, 4)], 2.0)
    assert sorted(servers.urls) == urls
    servers.connection_ended("10.0.0.2:4222")
    assert servers.urls[-1] == urls[1]
    first, *others = servers.urls
    servers.connect_failed()
    assert servers.urls == [*others, first]
    times = [servers.connect_s]
    for _ in range(3):
        servers.connect_failed()
        times.append(servers.connect_s)
    assert times == [1.0, 2.0, 2.0, 2.0], "all may be slow"
    servers.connection_ended("10.0.0.1:4222")
    assert servers.connect_s == 0.5


def test_b112_an_engine_that_starts_while_a_server_stands_still_reaches_another(server, prefix, monkeypatch):
    """B112: its kernel takes connections, and nobody says anything."""
    monkeypatch.setattr(nats_store, "REQUEST_S", 2.0)
    monkeypatch.setattr(random, "shuffle", lambda urls: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = f"nats://127.0.0.1:{silent.getsockname()[1]},{server.url}"
        d = Speaker(Settings(urls, prefix), m.Role.DECODE)
        try:
            d.register()
        finally:
            d.close()


@pytest.mark.parametrize("back_s", [0.0, 3.0, 3.9, 4.1, 4.5, 4.9, 5.1, 1000.0])
async def test_members_stay_however_far_the_servers_clock_is_set_back(monkeypatch, back_s):
    """Two engines with heartbeats of 1 s are listed again soon, and then for good."""
    now, told, server_s = 0.0, [], 5000.0
    us, other = (m.Member(name, m.Role.DECODE, "", FINGERPRINT) for name in "ab")
    monkeypatch.setattr(nats_session, "time", SimpleNamespace(monotonic=lambda: now))

    async def put_member(incarnation, frame):
        nonlocal now
        now += 0.01
        session._hear(now, incarnation, frame, server_s + now)
        session._hear(now, "b", codec.encode("b", m.Register(other)), server_s + now - 0.5)

    async def waiting(group):
        return 0, 0

    async def prepare_group(group):
        pass

    store = SimpleNamespace(put_member=put_member, waiting=waiting, prepare_group=prepare_group, generation="g")
    session = nats_session.NatsSession(store, "a", 5.0, told.append, collections.Counter(), None)
    session._complete = True
    session._directory.clock_is(now, server_s)
    versions = []
    for second in range(30):
        if second == 5:
            server_s -= back_s
        await session.do(m.Register(us))
        for _ in range(2):
            now += 0.495
            session._directory.expire(now)
        versions.append(session._directory.version)
    assert sorted(member.incarnation for member in session._directory.members()) == ["a", "b"]
    assert len(set(versions[6:])) == 1


def test_the_directory_trusts_one_clock_and_counts_from_its_stamps():
    directory = Directory(5.0, max_members=2)
    one, two, three = (m.Member(name, m.Role.DECODE, "", FINGERPRINT) for name in "abc")
    directory.clock_is(100.0, 5000.0)
    assert directory.heard(100.0, "a", one, 4998.0)
    assert not directory.heard(100.0, "b", two, 4994.0), "it has been silent for longer than that"
    assert not directory.heard(101.0, "a", one, 5001.0) and directory.members() == [one]
    assert directory.heard(101.0, "b", two, 5001.0) and not directory.heard(101.0, "c", three, 5001.0), "bounded"
    assert not directory.heard(102.0, "a", msgspec.structs.replace(one, draining=True), 4000.0), "an old word"
    assert directory.find("a") == one
    assert directory.find("b") == two and directory.find("c") is None
    version = directory.version
    assert not directory.expire(105.9) and directory.next_timeout() <= 106.0
    assert directory.expire(106.1) and len(directory) == 0 and directory.version == version + 1
    assert not directory.left("a")
    assert directory.age_s(106.1, 9000.0) == 0.0
