# SPDX-License-Identifier: Apache-2.0
"""The connection to a JetStream server: a thread with an event loop between the control thread and the server.

Both directions are bounded. The thread connects again by itself, for ever; each connection is a new `NatsSession`.
Without a connection a send fails at once, so the engine knows that its broker is away. The same holds for good if the
thread dies, which is logged.
"""
import asyncio
import collections
import contextlib
import logging
import threading
from collections.abc import Set

from vllm_pd.broker import nats_store
from vllm_pd.broker.backend import BrokerBackend
from vllm_pd.broker.nats_reach import NatsServers
from vllm_pd.broker.nats_session import Command, Mailbox, NatsSession
from vllm_pd.broker.nats_store import AWAY, Store
from vllm_pd.broker.queued_jobs import QueuedJobs
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.rpc.sockets import SendResult, Waker

logger = logging.getLogger("vllm.pd")

MAX_WAITING = 1000  # messages, each way
RETRY_S = 0.1
RETRY_MAX_S = 0.5
JOIN_S = 1.0


class InboxFull(ConnectionError):
    """The control thread does not fetch its messages."""


class NatsBackend(BrokerBackend):
    """Owns its thread from the constructor to `close`. `error` is what the thread died of."""

    def __init__(self, incarnation: str, address: NatsAddress, ttl_s: float):
        super().__init__()
        self.error: BaseException | None = None
        self._incarnation = incarnation
        self._address = address
        self._servers = NatsServers(address.urls, nats_store.REQUEST_S)
        self._queued = QueuedJobs()
        self._ttl_s = ttl_s
        self._waker = Waker()
        self._inbox: collections.deque[tuple[str, m.Message]] = collections.deque()
        self._offered: set[m.Attempt] = set()
        self.commands: Mailbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = threading.Event()
        self._closed: asyncio.Event | None = None
        self._problem = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="vllm-pd-nats", daemon=True)
        self._thread.start()
        self._ready.wait(JOIN_S)

    # For the control thread.

    @property
    def pollable(self) -> int:
        return self._waker.fileno()

    def send(self, message: m.Message) -> SendResult:
        return self._command(message)

    def receive(self) -> tuple[str, m.Message] | None:
        if not self._inbox:
            self._waker.clear()
            if not self._inbox:
                return None
        sender, message = self._inbox.popleft()
        if isinstance(message, m.Offer):
            self._offered.add(message.job.attempt)
        return sender, message

    def holding(self, attempts: Set[m.Attempt]) -> None:
        ended = self._offered - attempts
        # Without a connection the server gives the job to another engine, which is denied. With one that has no room
        # for the command, the session would report the job as in progress for good: so try again with the next call.
        if ended and self._command(frozenset(ended)) is not SendResult.FULL:
            self._offered -= ended

    def close(self, linger_ms: int) -> None:
        self._closing.set()
        self._command(None)
        self._thread.join(linger_ms / 1000)
        if self._thread.is_alive():
            self._call(self._end)
            self._thread.join(JOIN_S)
        self._waker.close()

    def _command(self, command: Command) -> SendResult:
        commands = self.commands
        if commands is None or self.error is not None:
            return SendResult.UNREACHABLE
        try:
            return SendResult.SENT if commands.put(command) else SendResult.FULL
        except RuntimeError:  # the loop is no more
            return SendResult.UNREACHABLE

    def _call(self, function: object, *arguments: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except (AttributeError, RuntimeError):  # the loop is not there yet, or no more
            return False
        return True

    # The thread.

    def _main(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:  # whatever it is, the engine must see that its broker is away
            self.error = error
            self.counters["nats_thread"] += 1
            logger.exception("the thread that speaks to NATS ended; no prefill is queued from now on")
        finally:
            self.commands = None
            self._ready.set()
            self._waker.set()

    def _end(self) -> None:
        if self._closed is not None:
            self._closed.set()

    async def _live(self) -> None:
        """Connect again and again until `close`. The pause before another try grows from RETRY_S to RETRY_MAX_S.
        Without a connection `commands` is None, so a send fails at once."""
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        pause_s = RETRY_S
        while not self._closing.is_set():
            self._closed = asyncio.Event()
            try:
                if await self._connected():
                    pause_s = RETRY_S
            except AWAY as error:
                self._log(f"NATS at {', '.join(self._address.urls)} can't be used: {error or type(error).__name__}")
            except Exception as error:  # an error of a server ends one connection only
                self.counters["nats_error"] += 1
                self._log(f"unexpected error in the connection to NATS: {error!r}", exc_info=True)
            finally:
                self.commands = None
                self._waker.set()
            self._closed = asyncio.Event()  # the end of the connection has set the other one
            if not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), pause_s)
                pause_s = min(RETRY_MAX_S, 2 * pause_s)

    async def _connected(self) -> bool:
        """One connection, from its beginning to its end. True where it was up."""
        closed = self._closed
        store = await Store.open(self._address, closed.set, self._on_error, servers=self._servers)
        try:
            session = NatsSession(store, self._incarnation, self._ttl_s, lambda message: self._report(store, message),
                                  self.counters, self._note_protocol, self._queued)
            self.commands = Mailbox(self._loop, MAX_WAITING)
            self._problem = ""
            work = {asyncio.create_task(session.run(self.commands)), asyncio.create_task(closed.wait())}
            try:
                done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await task
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        finally:
            self.commands = None
            await store.close()
        return True

    def _report(self, store: Store, message: m.Message) -> None:
        if isinstance(message, m.Peers) and self._inbox and isinstance(self._inbox[-1][1], m.Peers):
            self._inbox.pop()
        if len(self._inbox) >= MAX_WAITING:
            raise InboxFull(f"{MAX_WAITING} messages wait for the control thread")
        self._inbox.append((store.generation, message))
        self._waker.set()

    def _note_protocol(self, version: int) -> None:
        self.other_protocol = version
        self._waker.set()

    def _on_error(self, error: Exception) -> None:
        self.counters["nats_error"] += 1

    def _log(self, problem: str, **more: bool) -> None:
        """Log it once, not with every try."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s", problem, **more)
