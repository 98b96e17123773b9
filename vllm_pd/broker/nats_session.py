# SPDX-License-Identifier: Apache-2.0
"""One connection of an engine to a JetStream server, in the messages of the embedded broker.

What the embedded broker does for all engines, each engine does here for itself: it keeps the list of members from the
changes of the bucket, decides whether a job can be queued, and asks for jobs while it has room. A job names the prefill
engine that its decode engine prefers; the others hand it back at once, until it has been to all of them, and one across
a slow link for as long as that link takes longer. A job is acknowledged when it has ended here, whatever its end. Until
then the session reports to the server every `PROGRESS_S` that it is in progress, so the job of a P that died is given
to another one. A job that is not for this engine is handed back after a growing pause, or terminated where no engine
can want it any more.
"""
import asyncio
import collections
import logging
import time
from collections.abc import Callable, Iterable

import msgspec
from nats.aio.msg import Msg

from vllm_pd.broker.choice import JobTaker
from vllm_pd.broker.directory import Directory
from vllm_pd.broker.nats_store import (
    ACK_WAIT_S,
    HEARTBEAT,
    MAX_DELIVER,
    PULL_HEARTBEAT_S,
    TIMED_OUT,
    Full,
    Store,
    group,
    is_status,
    origin,
    status,
    token,
)
from vllm_pd.broker.preference import PrefillPreference
from vllm_pd.broker.queued_jobs import QueuedJobs
from vllm_pd.broker.registry import may_take, prefill_loads
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec

logger = logging.getLogger("vllm.pd")

TICK_S = 0.5
PROGRESS_S = ACK_WAIT_S / 5
PULL_S = 5.0
PULL_SILENT_S = 3 * PULL_HEARTBEAT_S
CANCEL_S = 0.02
PAUSE_S = 0.1
PAUSE_MAX_S = 0.5
MOST_WAITING_IN_TURN = 4  # jobs that wait for a nearer engine, before a pause
STRANGE_DELIVERIES = 4  # so often a job of a D that is not known, yet, is handed back
MAX_PREFERRED_PASSES = MAX_DELIVER // 2  # so often a job is handed back because another engine is preferred

Command = m.Message | frozenset[m.Attempt] | None  # a message, attempts that have ended here, or the end of the session


class Mailbox:
    """From one thread to the event loop of another. A bounded number waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int):
        self._loop = loop
        self._limit = limit
        self._waiting: collections.deque[Command] = collections.deque()
        self._some = asyncio.Event()

    def put(self, command: Command) -> bool:
        """From any thread. Returns whether it was taken; None always is. Raises RuntimeError where the loop has
        ended."""
        if command is not None and len(self._waiting) >= self._limit:
            return False
        self._waiting.append(command)
        self._loop.call_soon_threadsafe(self._some.set)
        return True

    async def get(self) -> Command:
        """The next command; waits for it. In the loop."""
        while not self._waiting:
            self._some.clear()
            await self._some.wait()
        return self._waiting.popleft()


class NatsSession:
    """`report` is called with each message for the engine, and raises ConnectionError where too many wait there.
    `counters` counts what was dropped. All runs in one event loop. A method that raises ends the session; the caller
    then closes it."""

    def __init__(self, store: Store, incarnation: str, ttl_s: float, report: Callable[[m.Message], None],
                 counters: m.Counters, note_protocol: Callable[[int], None], queued: QueuedJobs | None = None):
        self._store = store
        self._incarnation = incarnation
        self._ttl_s = ttl_s
        self._report = report
        self._counters = counters
        self._note_protocol = note_protocol
        self._directory = Directory(ttl_s)
        # The leader of the cluster makes queues and watches. A request for a watch is not idempotent, so the queue,
        # whose request is, comes first.
        self._prepared = asyncio.Event()
        self._complete = False  # whether the bucket has been read
        self._member: m.Member | None = None
        self._group = ""
        self._queue_length = 0
        self._queued = QueuedJobs() if queued is None else queued
        self._taken = JobTaker()  # this engine's own room
        self._preference = PrefillPreference()
        self._inbox = ""
        self._pull_number = 0
        self._pull_until = 0.0  # one job has been requested, and may come until then; each heartbeat of it moves this
        self._held: dict[m.Attempt, Msg] = {}
        self._waiting_in_turn = 0  # so many jobs came one after another that wait for a nearer engine
        self._next_progress = 0.0
        self._seen_at = time.monotonic()
        self._sent_at: float | None = None  # when our entry was last sent, after its earlier ones had been read

    async def run(self, commands: Mailbox) -> None:
        """Serve until the command None. Raises where the connection can't be used any more."""
        self._inbox = await self._store.listen(self._on_delivered)
        tasks = [asyncio.create_task(work) for work in (self._watch(), self._tick(), self._serve(commands))]
        try:
            for ended in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                await ended
        finally:
            while not all(task.done() for task in tasks):  # wait_for may lose a cancellation
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=CANCEL_S)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, commands: Mailbox) -> None:
        while (command := await commands.get()) is not None:
            await self.do(command)

    async def do(self, command: "Command") -> None:
        """Carry out a command of the engine."""
        match command:
            case m.Register():
                await self._register(command)
            case m.Put():
                await self._put(command.job)
            case m.Withdraw():
                await self._withdraw(command.attempt)
            case m.Credit():
                self._taken.set_credit(command)
                await self._pull()
            case m.ListMembers():
                self._report(self._peers())
            case m.Leave():
                await self._leave()
            case frozenset():
                await self._ended(command)
            case _:
                self._counters["unexpected"] += 1

    # Members.

    async def _register(self, message: m.Register) -> None:
        """The engine's heartbeat: renew its entry and, once the bucket has been read, answer with the members, or with
        Heard where it knows them. Makes the queue of its group where that is another one than before. Raises
        TimeoutError where our entries have not come back for `ttl_s`: then those of others do not come either."""
        member = message.member
        if member.incarnation != self._incarnation:
            self._counters["foreign"] += 1
            return
        if self._member is None or self._member.fingerprint != member.fingerprint:
            self._group = group(member.fingerprint)
            self._queued.use(f"{self._store.generation} {self._group}")
            await self._store.prepare_group(self._group)
            self._prepared.set()
        load = msgspec.structs.replace(member.load, queued_tokens=self._queued.waiting_tokens())
        member = msgspec.structs.replace(member, load=load)
        self._member = member
        self._sent_at = time.monotonic() if self._complete else None
        await self._store.put_member(self._incarnation, codec.encode(self._incarnation, m.Register(member)))
        await self._count_waiting()
        if time.monotonic() - self._seen_at >= max(self._ttl_s, 2 * TICK_S):
            raise TimeoutError("entries are stored, but their changes do not come back, or with stamps of the past")
        if not self._complete:
            return
        if (message.broker, message.version) == (self._store.generation, self._directory.version):
            self._report(m.Heard(self._store.generation, self._queue_length, self._queue_tokens(),
                                 prefill_loads(member, self._directory.members())))
        else:
            self._report(self._peers())
        await self._pull()

    async def _count_waiting(self) -> None:
        self._queue_length, given = await self._store.waiting(self._group)
        self._queued.heard(given)

    def _queue_tokens(self) -> int | None:
        """What waits in our queue, as each decode engine that uses it said last; None where one does not say."""
        others = [member.load.queued_tokens for member in self._directory.members() if member.role.decodes
                  and member.incarnation != self._incarnation and group(member.fingerprint) == self._group]
        return None if None in others else sum(others, self._member.load.queued_tokens)

    def _peers(self) -> m.Peers:
        return m.Peers(self._store.generation, self._directory.version, self._directory.members(), self._queue_length)

    async def _watch(self) -> None:
        """Follow the bucket while the connection lasts. Report the members once all entries have been read, and after
        each later change."""
        await self._prepared.wait()
        self._seen_at = time.monotonic()
        server_s = await self._store.now_s()
        self._directory.clock_is(time.monotonic(), server_s)
        async for change in self._store.watch_members():
            now = time.monotonic()
            if change is None:
                self._complete = changed = True
            elif change.frame is None:
                changed = self._directory.left(change.key)
            else:
                changed = self._hear(now, change.key, change.frame, change.stamp_s)
            if changed and self._complete:
                self._report(self._peers())

    def _hear(self, now: float, key: str, frame: bytes, stamp_s: float) -> bool:
        """An entry of a member, perhaps our own. Returns whether this changes the members. Our own ones prove that
        entries come back (`_seen_at`), and their stamps show a server's clock that was set back."""
        member = open_entry(key, frame, self._counters, self._note_protocol)
        if member is None:
            return False
        is_own = member.incarnation == self._incarnation
        if is_own and self._sent_at is not None:
            self._directory.stamped_since(self._sent_at, stamp_s)
        changed = self._directory.heard(now, key, member, stamp_s)
        self._preference.heard(member)
        if is_own and self._directory.age_s(now, stamp_s) < self._ttl_s:  # not one of an earlier session
            self._seen_at = now
        return changed

    async def _leave(self) -> None:
        for delivered in self._held.values():
            await delivered.nak()
        self._held.clear()
        await self._store.remove_member(self._incarnation)

    # D's jobs.

    async def _put(self, job: m.Job) -> None:
        """Put a job of ours into the queue of the engine that is to have it, and report whether it waits there."""
        fitting = self._fitting(job, self._member) if self._member is not None else []
        is_new = False
        if self._member is None:
            refusal = m.PutRefusal.UNREGISTERED
        elif not fitting:
            refusal = m.PutRefusal.NO_PEER
        else:
            now = time.monotonic()
            preferred = self._preference.prefer(now, job, fitting)
            since = queued.since if (queued := self._queued.find(job.attempt)) is not None else now
            # A job that is put again has already waited for a nearer engine.
            left = tuple((name, longer_s) for name, more_s in job.detours if (longer_s := more_s - (now - since)) > 0)
            refusal, is_new = await self._publish(msgspec.structs.replace(job, prefer=preferred, detours=left), since)
        self._report(m.PutReply(job.attempt, refusal, self._queue_length, is_new))

    def _fitting(self, job: m.Job, owner: m.Member) -> list[m.Member]:
        """Everybody who may do that job of the owner's."""
        return [member for member in self._directory.members() if may_take(member, job, owner)]

    async def _publish(self, job: m.Job, since: float) -> tuple[m.PutRefusal | None, bool]:
        """Also returns whether the job was neither waiting nor at an engine before."""
        frame = codec.encode(self._incarnation, m.Put(job))
        if len(frame) > self._store.max_bytes:
            self._counters["job_too_large"] += 1
            return m.PutRefusal.FULL, False
        try:
            number = await self._store.put_job(self._group, job, frame)
            is_new = number is not None
            if not is_new:
                number = await self._replace(job, frame)
        except Full:
            return m.PutRefusal.FULL, False
        if number is not None:
            self._queue_length += 1
            self._queued.put(job, number, since)
        return None, is_new

    async def _replace(self, job: m.Job, frame: bytes) -> int | None:
        """The job is queued already. It keeps its place if no engine has got it; else the one that did has not claimed
        it, and another one is to get it."""
        queued = self._queued.find(job.attempt)
        await self._count_waiting()
        if queued is None:
            await self._store.remove_jobs_of(self._group, job.attempt)
        elif queued.number > self._queued.given:
            return None
        else:
            await self._store.remove_job(queued.number)
        return await self._store.put_job(self._group, job, frame)

    async def _withdraw(self, attempt: m.Attempt) -> None:
        if attempt.incarnation != self._incarnation or not self._group:
            self._counters["foreign"] += 1
            return
        queued = self._queued.withdraw(attempt)
        if queued is None:
            await self._store.remove_jobs_of(self._group, attempt)
        else:
            await self._store.remove_job(queued.number)

    # P's jobs.

    async def _pull(self) -> None:
        """Request a job where there is a credit for one. One at a time: so a job that was handed back goes to all
        others that wait before it comes here again, and none comes once there is no credit."""
        if (not self._taken.has_room() or time.monotonic() < self._pull_until or not self._complete
                or self._member is None or not self._member.role.prefills or self._member.draining):
            return
        self._pull_number += 1
        self._pull_until = time.monotonic() + PULL_SILENT_S
        await self._store.pull(self._group, self._inbox, self._pull_number, PULL_S)

    async def _on_delivered(self, delivered: Msg) -> None:
        try:
            if is_status(delivered):
                await self._on_pull_status(delivered)
            elif delivered.reply:
                await self._on_job(delivered)
            else:
                self._counters["frame_unexpected"] += 1
        except Exception:  # one message must not silence the queue
            self._counters["frame_error"] += 1
            logger.exception("unexpected error in a message on %s", delivered.subject)

    async def _on_pull_status(self, delivered: Msg) -> None:
        if delivered.subject.rpartition(".")[2] != str(self._pull_number):
            return
        if status(delivered) == HEARTBEAT:
            self._pull_until = time.monotonic() + PULL_SILENT_S
        else:
            ended = status(delivered) == TIMED_OUT
            self._pull_until = 0.0 if ended else time.monotonic() + TICK_S  # else there is an error at the moment
            await self._pull()

    async def _on_job(self, delivered: Msg) -> None:
        """A job of the queue, for the first time or again: offer it to our engine, hand it back, or terminate it where
        no engine can want it. Then request the next one, unless our engine does not fetch its messages."""
        now, came_from = time.monotonic(), origin(delivered)
        if came_from is None:
            self._counters["frame_unexpected"] += 1
            return
        stamp_s, deliveries = came_from
        self._pull_until = 0.0
        put = _open(delivered.data, m.Put, self._counters, self._note_protocol)
        if put is None:
            await delivered.term()
            await self._pull()
            return
        job = put.job
        if job.attempt in self._held:  # the server took it for forgotten here
            self._held[job.attempt] = delivered
            await delivered.in_progress()
            await self._pull()
            return
        waited_s = self._directory.age_s(now, stamp_s)
        left_s = job.deadline_s - waited_s
        theirs = self._directory.find(job.attempt.incarnation)
        if left_s <= 0 or (theirs is None and deliveries >= STRANGE_DELIVERIES):
            self._counters["job_expired" if left_s <= 0 else "job_orphaned"] += 1
            await delivered.term()
        elif theirs is None or not self._taken.has_room() or not may_take(self._member, job, theirs):
            self._counters["job_passed_on"] += 1
            await self._pass_on(delivered, deliveries)
        elif (pause_s := self._pause_for_another(job, theirs, deliveries, waited_s)) is not None:
            await self._hand_back(delivered, now, pause_s)
        else:
            try:
                self._report(m.Offer(msgspec.structs.replace(job, deadline_s=left_s), self._taken.offered + 1))
            except ConnectionError:  # the engine does not fetch its messages: it keeps its credit, another gets the job
                self._counters["job_passed_on"] += 1
                await self._pass_on(delivered, deliveries)
                return  # the next tick requests another one
            self._waiting_in_turn = 0
            self._taken.offer(now, job, ())
            self._held[job.attempt] = delivered
        await self._pull()

    def _pause_for_another(self, job: m.Job, owner: m.Member, deliveries: int, waited_s: float) -> float | None:
        """After how many seconds a job is to be delivered again because its decode engine prefers an engine that is
        there; None: it is done here. At once until it has been to all the others: one that has no room does not ask for
        jobs. Then it waits for the preferred one as long as the path from here to the decode engine takes longer than
        that one's, if it would be done here in time after that."""
        if job.prefer in ("", self._incarnation) or deliveries > MAX_PREFERRED_PASSES:
            return None
        fitting = self._fitting(job, owner)
        if not any(member.incarnation == job.prefer for member in fitting):
            return None
        if deliveries < len(fitting):
            return 0.0
        detours = dict(job.detours)
        longer_s = detours.get(self._incarnation, 0.0) - detours.get(job.prefer, 0.0)
        return PAUSE_MAX_S if waited_s < longer_s < job.deadline_s - waited_s else None

    async def _hand_back(self, delivered: Msg, now: float, pause_s: float) -> None:
        """For another engine. Where only jobs that wait for one come, they are all there is, and would come again and
        again: the next one is not requested at once."""
        await delivered.nak(delay=pause_s or None)
        if pause_s:
            self._waiting_in_turn += 1
            if self._waiting_in_turn >= MOST_WAITING_IN_TURN:
                self._waiting_in_turn = 0
                self._pull_until = now + PAUSE_MAX_S

    async def _pass_on(self, delivered: Msg, deliveries: int) -> None:
        if deliveries >= MAX_DELIVER:
            await delivered.term()
        else:
            await delivered.nak(delay=min(PAUSE_MAX_S, PAUSE_S * 2 ** (deliveries - 1)))

    async def _ended(self, attempts: Iterable[m.Attempt]) -> None:
        for attempt in attempts:
            delivered = self._held.pop(attempt, None)
            if delivered is not None:
                await delivered.ack()

    # Time.

    async def _tick(self) -> None:
        """What is due by time, every TICK_S: members that fell silent; jobs that must be reported as in progress; a
        pull where our engine has credit and none is open."""
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self._directory.expire(now):
                self._report(self._peers())
            self._preference.retain({member.incarnation for member in self._directory.members()})
            if now >= self._next_progress:
                self._next_progress = now + PROGRESS_S
                for delivered in list(self._held.values()):
                    await delivered.in_progress()
            await self._pull()


def open_entry(key: str, frame: bytes, counters: m.Counters,
               note_protocol: Callable[[int], None] = lambda version: None) -> m.Member | None:
    """The member of an entry of the bucket; None, and counted, where another one than its owner wrote it."""
    register = _open(frame, m.Register, counters, note_protocol)
    if register is not None and token(register.member.incarnation) != key:
        counters["foreign"] += 1
        return None
    return None if register is None else register.member


def _open(frame: bytes, kind: type[m.WireMessage], counters: m.Counters,
          note_protocol: Callable[[int], None]) -> m.Message | None:
    """The message of a stored value; None, and counted, where it is bad or its sender is not its owner."""
    try:
        sender, message = codec.decode([frame])
    except codec.BadFrame as fault:
        counters["frame_" + fault.fault.value] += 1
        if fault.theirs is not None:
            note_protocol(fault.theirs)
        return None
    owner = (message.member.incarnation if isinstance(message, m.Register) else
             message.job.attempt.incarnation if isinstance(message, m.Put) else None)
    if not isinstance(message, kind) or owner != sender:
        counters["frame_unexpected"] += 1
        return None
    return message
