# SPDX-License-Identifier: Apache-2.0
"""`FarStore`: an engine's way to the arenas of other hosts, and theirs to this one's.

A thread owns the sockets, the NIXL agent, and all copies. The scheduler's thread asks `ask`, which takes a lock and
never waits for the thread: what `wait_s` bounds is bounded by the clock alone.
"""
from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

import zmq

from vllm_pd.errors import ConfigError, TransferError
from vllm_pd.extras import require_extra
from vllm_pd.rpc import sockets
from vllm_pd.rpc.addresses import is_name
from vllm_pd.rpc.codec import BadFrame, FrameFault
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.locality import address_towards, is_own, resolve
from vllm_pd.rpc.poller import SocketPoller, receive_batch
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import PAGE, BlockArena
from vllm_pd.store.beyond.fetches import (
    BlockFetches,
    FindQuestion,
    HostFailure,
    HostReport,
    LandedBatch,
    SendQuestion,
)
from vllm_pd.store.beyond.messages import (
    MAX_BYTES,
    MAX_MODELS,
    FindBlocks,
    FoundBlocks,
    SendBlocks,
    questions,
    replies,
)
from vllm_pd.store.beyond.sending import BlockSender, Budget
from vllm_pd.store.beyond.staging import BlockAgent, StagingMemory
from vllm_pd.store.beyond.waits import RequestWaits, WaitAnswer
from vllm_pd.store.blocks import BlockKey
from vllm_pd.store.slots import PutResult

logger = logging.getLogger("vllm.pd")

BOUNDS = sockets.Bounds(messages=64, frame_bytes=MAX_BYTES)  # 16 MiB each way of a connection
BATCH_MESSAGES = 16
QUESTION_BYTES_PER_S = 32 << 20  # that are read of other hosts together, each question with
QUESTION_BYTES = 4096  # more, for what it costs in any case
REPLY_BYTES_PER_S = 8 << 20  # that are read of one host, each answer with QUESTION_BYTES more
CLOSE_S = 10.0  # the thread may be adding a reader that does not answer
ERROR_S = 1.0  # the pause after an unexpected error
NAMES_S = 10.0  # in which names are looked up at the start


class FarStore:
    """Owns a thread, the sockets and a NIXL agent; `close` ends them. The arena is the caller's, and must stay open
    until then. `ask`, `end_request`, `end_requests`, `take_counts` are for any thread."""

    def __init__(self, settings: StoreSettings, arena: BlockArena, models: Collection[bytes]) -> None:
        """`models`: those of the engine's ranks. Raises ConfigError where an address can't be used, MissingPackage
        without NIXL."""
        require_extra("engine", "nixl")
        self._arena, self._models, self._urls = arena, tuple(sorted(models)), without_own_names(settings)
        self._length = arena.shape.slot_bytes
        self._staging, regions = self._make_staging(settings), []
        if self._staging is not None:
            regions.append((self._staging.address, self._staging.size_bytes))
        if settings.listen is not None:
            regions.append((arena.address, arena.shape.file_bytes))
        self._agent = _make_agent(settings, regions)
        self._fetches = BlockFetches(len(self._urls), self._staging.rows if self._staging else 0, len(self._models),
                                     settings.wait_s, self._length)
        self._waits = RequestWaits(self._fetches, settings.wait_s)
        self._lock = threading.Lock()  # of fetches and waits; held for work on dictionaries only, but see `ask`
        self._sender = BlockSender(arena, self._agent.nixl, self._agent.proofs) if settings.listen else None
        self._counts: Counter[str] = Counter()
        self._owed = [0] * len(self._urls)  # answers, by host
        self._questions = Budget(time.monotonic(), QUESTION_BYTES_PER_S)
        self._replies = [Budget(time.monotonic(), REPLY_BYTES_PER_S) for _ in self._urls]
        self._paused: dict[zmq.Socket, float] = {}  # sockets that are not read, and until when
        self._ending = False
        self._open_sockets(settings)
        self._thread = threading.Thread(target=self._run, name="vllm-pd-far-store", daemon=True)
        self._thread.start()
        logger.info("store: %s", ", ".join([*([f"served to other hosts at {settings.listen}"] if settings.listen else
                                              []), *([f"asks {', '.join(self._urls)}"] if self._urls else [])]))

    def ask(self, request_id: str, find_absent: Callable[[], Sequence[bytes]]) -> WaitAnswer:
        """Whether this request waits for blocks of other hosts (`RequestWaits.ask`)."""
        if not self._urls:
            return WaitAnswer.GO_ON
        now = time.monotonic()
        with self._lock:
            needs_names = self._waits.needs_names(now, request_id)
        if needs_names:  # thousands of names take tens of milliseconds, in which the thread goes on
            names = find_absent()
        with self._lock:
            before = len(self._fetches)
            # Where another request's fetch has ended just now, the names are looked up under the lock.
            answer = self._waits.ask(now, request_id, (lambda: names) if needs_names else find_absent)
            is_new = len(self._fetches) > before
        if is_new:
            self._poller.waker.set()
        return answer

    def end_request(self, request_id: str) -> None:
        """The request has ended."""
        with self._lock:
            self._waits.end(time.monotonic(), request_id)

    def end_requests(self) -> None:
        """No request waits any more."""
        with self._lock:
            self._waits.end_all(time.monotonic())

    @property
    def is_waited_for(self) -> bool:
        """Whether any request waits, so that steps are to be made."""
        with self._lock:
            return self._waits.any_at(time.monotonic())

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call, by the names of `vllm_pd.store.metrics`."""
        with self._lock:
            self._add(self._fetches.counts)
            counts, self._counts = self._counts, Counter()
        return {name: number for name, number in counts.items() if number}

    def close(self) -> bool:
        """End all of it. Idempotent. Returns False if the thread did not end in time: then it still uses the arena."""
        self._ending = True
        self._poller.waker.set()
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def debug_state(self) -> dict[str, int]:
        """For tests alone."""
        with self._lock:
            return {"fetches": len(self._fetches), "waits": len(self._waits), "free_rows": self._fetches.free_rows(),
                    "sends": len(self._sender) if self._sender is not None else 0}

    def _add(self, counts: Counter[str]) -> None:
        """Move these to ours. The lock is held."""
        for name, number in counts.items():
            self._counts[f"far_{name}"] += number
        counts.clear()

    def _make_staging(self, settings: StoreSettings) -> StagingMemory | None:
        if not self._urls:
            return None
        row_bytes = -(-self._length // PAGE) * PAGE
        need = row_bytes * len(self._models)
        if settings.staging_bytes < need or len(self._models) > MAX_MODELS:
            raise ConfigError("staging_mib", settings.staging_mib, f"a block has {need} bytes in {len(self._models)} "
                              f"parts, and not one fits: give at least {need / 2**20:.3g}")
        return StagingMemory(row_bytes, settings.staging_bytes)

    def _open_sockets(self, settings: StoreSettings) -> None:
        keys = None if settings.keys is None else Keys.load(settings.keys)
        self._context = sockets.started_context()
        self._poller = SocketPoller(None if keys is None else Gate(self._context, keys))
        self._server, self._clients = None, []
        try:
            if settings.listen is not None:
                self._server = sockets.server(self._context, settings.listen, keys, ends_when_silent=True,
                                              bounds=BOUNDS)
                self._poller.watch(self._server)
        except zmq.ZMQError as error:
            self._close_all()
            raise ConfigError("listen", settings.listen, f"{error}: write a free port at an address of this machine"
                              ) from error
        try:
            for url in self._urls:
                self._clients.append(sockets.client(self._context, url, only_connected=True, keys=keys, bounds=BOUNDS))
                self._poller.watch(self._clients[-1])
        except zmq.ZMQError as error:
            self._close_all()
            raise ConfigError("hosts", url, f"{error}: write addresses like tcp://10.0.0.5:5900") from error

    def _close_all(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._agent.close()
        for socket in (*self._clients, *([self._server] if self._server is not None else [])):
            socket.close()
        self._poller.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        """The thread's loop."""
        has_failed = False
        try:
            while not self._ending:
                try:
                    self._turn()
                except Exception:
                    if not has_failed:
                        logger.exception("store: unexpected error with other hosts; further ones are not logged")
                    has_failed = True
                    time.sleep(ERROR_S)
        finally:
            self._close_all()

    def _turn(self) -> None:
        """Send what is to be sent, wait, and handle what has come."""
        self._transmit()
        ready = self._poller.wait(self._timeout_s())
        for host, socket in enumerate(self._clients):
            if socket in ready:
                self._read_replies(host, socket)
        if self._server is not None:
            self._serve(self._server in ready)
        now = time.monotonic()
        with self._lock:
            self._fetches.handle_timeout(now)
            reports = self._fetches.poll_reports()
        for report in reports:
            self._report(report)
        for socket in [socket for socket, until_s in self._paused.items() if now >= until_s]:
            del self._paused[socket]
            self._poller.watch(socket)

    def _read_replies(self, host: int, socket: zmq.Socket) -> None:
        budget = self._replies[host]
        for frames in receive_batch(socket, BATCH_MESSAGES):
            budget.spend(sum(map(len, frames)) + QUESTION_BYTES)
            self._on_reply(host, frames)
            if socket in self._paused:
                return
        now = time.monotonic()
        if not budget.has(now):
            self._pause(socket, now + budget.again_in_s())

    def _serve(self, is_readable: bool) -> None:
        """Answer other hosts."""
        now = time.monotonic()
        for frames in receive_batch(self._server, BATCH_MESSAGES if is_readable else 0):
            self._questions.spend(sum(map(len, frames)) + QUESTION_BYTES)
            self._on_question(frames)
            if self._sender.take_met() or self._ending:  # the next one waits until the other hosts' answers are read
                break
        if not self._questions.has(now):
            self._pause(self._server, now + self._questions.again_in_s())
        for route, message in self._sender.poll():
            sockets.send(self._server, route, replies.encode(message))
        with self._lock:
            self._add(self._sender.counts)

    def _report(self, report: HostReport) -> None:
        host = self._urls[report.host]
        if report.why is None:
            logger.info("store: host %s answers again", host)
            return
        logger.warning("store: host %s is not asked for %g s: %s", host, report.wait_s, report.why.value)
        if report.why is HostFailure.GARBAGE:
            self._pause(self._clients[report.host], time.monotonic() + report.wait_s)
            self._owed[report.host] = 0

    def _pause(self, socket: zmq.Socket, until_s: float) -> None:
        """Read nothing from there until then. What comes meanwhile waits at its sender, but for what `BOUNDS` say."""
        if socket not in self._paused:
            self._poller.forget(socket)
        self._paused[socket] = max(until_s, self._paused.get(socket, 0.0))

    def _timeout_s(self) -> float | None:
        with self._lock:
            times = [self._fetches.next_timeout(), *self._paused.values()]
        left_s = [max(0.0, when - time.monotonic()) for when in times if when is not None]
        poll_s = None if self._sender is None else self._sender.next_timeout()
        return min([*left_s, *([] if poll_s is None else [poll_s])], default=None)

    def _transmit(self) -> None:
        with self._lock:
            asked = self._fetches.poll_transmit()
        while asked:
            for question in asked:
                frame = questions.encode(self._message(question))
                if sockets.send(self._clients[question.host], frame) is sockets.SendResult.SENT:
                    self._owed[question.host] += 1
                    continue
                with self._lock:
                    self._fetches.unreachable(time.monotonic(), question.host, question.number)
            with self._lock:
                asked = self._fetches.poll_transmit()  # what follows from hosts that can't be reached

    def _message(self, question: FindQuestion | SendQuestion) -> FindBlocks | SendBlocks:
        if isinstance(question, FindQuestion):
            return FindBlocks(question.number, self._length, self._models, question.names)
        return SendBlocks(question.number, self._length, self._models, question.names,
                          tuple(map(self._staging.address_of, question.rows)), self._agent.name, self._agent.metadata,
                          self._agent.identity)

    def _on_reply(self, host: int, frames: list[bytes]) -> None:
        now, batch, checksums = time.monotonic(), None, ()
        self._owed[host] -= 1
        try:
            message = replies.decode(frames)
            if self._owed[host] < 0:
                raise BadFrame(FrameFault.CONTENT, "an answer without a question")
        except BadFrame:
            with self._lock:
                until_s = self._fetches.spoke_garbage(now, host)
            self._pause(self._clients[host], until_s)  # each time: nothing is reported while it is left alone
            self._owed[host] = 0
            return
        with self._lock:
            if isinstance(message, FoundBlocks):
                self._fetches.found(now, host, message.number, message.blocks)
            else:
                checksums = message.checksums
                batch = self._fetches.sent(now, host, message.number, len(checksums))
        if batch is not None:
            right = self._store(batch, checksums)
            with self._lock:
                self._fetches.checked(time.monotonic(), batch, right)
        self._transmit()

    def _store(self, batch: LandedBatch, checksums: Sequence[int]) -> int:
        """Put what has landed into the arena. Returns how many parts, one after the other, are there now."""
        keys = [BlockKey(model, name) for name in batch.names for model in self._models]
        for number, (key, row, checksum) in enumerate(zip(keys, batch.rows, checksums, strict=True)):
            part = self._staging.row(row, self._length)
            if self._arena.put_checked(key, part, checksum) is PutResult.TORN:
                return number
        return len(keys)

    def _on_question(self, frames: list[bytes]) -> None:
        route = frames[0]
        try:
            message = questions.decode(frames[1:])
        except BadFrame:
            with self._lock:
                self._counts["far_bad_frame"] += 1
            return
        answer = self._sender.find(message) if isinstance(message, FindBlocks) else self._sender.send(route, message)
        if answer is not None:
            sockets.send(self._server, route, replies.encode(answer))


def without_own_names(settings: StoreSettings) -> tuple[str, ...]:
    """The other hosts, without names of this machine with the port of `listen`: the engine would ask itself. A name
    that has no address yet stays. After NAMES_S no further name is looked up."""
    until_s = time.monotonic() + NAMES_S
    if settings.listen is None:
        return settings.other_hosts
    port = urlsplit(settings.listen).port
    return tuple(url for url in settings.other_hosts if not (
        urlsplit(url).port == port and is_name(urlsplit(url).hostname) and time.monotonic() < until_s
        and _names_this_machine(url)))


def _names_this_machine(url: str) -> bool:
    try:
        return any(map(is_own, resolve("hosts", url, urlsplit(url).hostname)))
    except (ConfigError, OSError):
        return False


def _make_agent(settings: StoreSettings, regions: list[tuple[int, int]]) -> BlockAgent:
    """The agent, at the address of `listen`, or else at that which leads to the first of the hosts. Raises ConfigError.
    """
    key, value = ("listen", settings.listen) if settings.listen is not None else ("hosts", settings.hosts)
    host = urlsplit(value.split(",")[0]).hostname
    if key == "hosts":
        host = address_towards(resolve(key, value, host)[0])
        if host is None:
            raise ConfigError(key, value, "this machine has no route there: mend that, or write listen, an address of "
                              "this machine, too")
    try:
        return BlockAgent(f"store-{uuid.uuid4().hex}", host, regions)
    except TransferError as error:
        raise ConfigError(key, value, str(error)) from error
