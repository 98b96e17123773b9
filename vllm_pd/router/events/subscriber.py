# SPDX-License-Identifier: Apache-2.0
"""Keeps a prefix index up to date about the blocks of one engine, and reads its load: one `Subscriber` for each engine.

It finds the engine's events (`GET /pd/events`), follows them (`vllm_pd.router.events.followers`), and starts again when
the engine is silent or gone. Nothing that an engine sends, or fails to send, ends it: errors are counted, and the
engine's blocks are removed from the index until they are known again. One task does all the work, in short slices.
"""
from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import zmq
import zmq.asyncio

from vllm_pd.errors import PDError
from vllm_pd.events import messages as m
from vllm_pd.events import reach
from vllm_pd.events.formats import REMOVED, STORED, Event, Unreadable, count_unread
from vllm_pd.events.notice import MAX_NOTICE_BYTES, PATH, EventsNotice
from vllm_pd.router.events.followers import (
    BEHIND_S,
    Blocks,
    EngineLost,
    EventFollower,
    LoadFollower,
    ReplayFollower,
    SideFollower,
    count_malformed,
)
from vllm_pd.router.events.holdings import Holdings, SubscribedIndex
from vllm_pd.rpc import sockets
from vllm_pd.rpc.codec import MAX_FRAME_BYTES, BadFrame

if TYPE_CHECKING:
    from vllm_pd.rpc.keys import Keys

logger = logging.getLogger("vllm.pd")

TICK_S = 0.02
IDLE_TICK_S = 0.1  # where nothing is due soon
MAX_SOCKETS = 16384  # of all subscribers of an event loop, four each
MESSAGES_A_TURN = 32
SLICE_S = 0.002  # of the event loop's time at once
QUEUED_BATCHES = 20_000
FIND_TIMEOUT_S = 2.0  # for an answer to GET /pd/events
RETRY_MIN_S = 0.25
RETRY_S = 0.5
POLLED_S = 1.0  # between two snapshots where there are no events
REFUSED_RETRY_S = 5.0  # where the engine has no events, or can't be understood
MAX_WARNINGS = 16  # different ones that are logged while the engine is not followed without one
QUIET_S = 60.0  # so long it must have been followed without one until they are logged again


class SubscriberState(Enum):
    """How much the index knows about the engine."""
    SEARCHING = "searching"  # nothing
    SYNCING = "syncing"  # not the whole current state; it is being read
    LIVE = "live"  # the current state, apart from messages under way


class Subscriber:
    """Follows the engine whose front end is at `url`.

    `configured` says where the events of an engine without GET /pd/events are. `keys` are the cluster's keys, where
    the side socket uses them. `rank` is the data-parallel rank to follow: its ports are the engine's plus the rank.
    `worker` is the engine's name in the index, by default `url`; each rank needs its own. `on_load` is called with that
    name and each load report, `on_notice` with each answer to GET /pd/events, also that of a later life.

    `start` needs a running event loop; `close` stops everything and removes the worker from the index. These may be
    read at any time: `worker`, `state`, `epoch`, `load`, `load_age_s`, `counters`, and `unread`, which counts the
    events that could not be read by reason.
    """

    def __init__(self, url: str, index: SubscribedIndex, session: aiohttp.ClientSession | None,
                 headers: Mapping[str, str] | None = None, *, configured: EventsNotice | None = None,
                 keys: Keys | None = None, on_load: Callable[[str, m.EngineLoad], None] | None = None, rank: int = 0,
                 worker: str | None = None, on_notice: Callable[[EventsNotice], None] | None = None) -> None:
        self.url = url.rstrip("/")
        self.worker = self.url if worker is None else worker
        self.state = SubscriberState.SEARCHING
        self.epoch: str | None = None
        self.load: m.EngineLoad | None = None
        self.counters: collections.Counter[str] = collections.Counter()
        self.unread: collections.Counter[str] = collections.Counter()
        self._index = index
        self.holdings = Holdings(index, self.worker, self._note)
        self._rank = rank
        self._session = session
        self._headers = dict(headers or {})
        self._configured = configured
        self._keys = keys
        self._on_load = on_load
        self._on_notice = on_notice
        self._load_at = -math.inf
        self._task: asyncio.Task | None = None
        self._loads: list[LoadFollower] = []
        self._replacement: tuple[Blocks, Callable[[], None]] | None = None
        self._batches: collections.deque[m.EventBatch] = collections.deque()  # empty between two turns
        self._incomplete = False  # the index could not keep some blocks: a snapshot is needed
        self._warnings: set[str] = set()  # that were logged
        self._warned_at = -math.inf
        self._unread_logged: set[str] = set()

    @property
    def connected(self) -> bool:
        """Whether the state is LIVE."""
        return self.state is SubscriberState.LIVE

    @property
    def load_age_s(self) -> float:
        """The age of `load` in seconds; infinite where there is none."""
        return time.monotonic() - self._load_at

    def start(self) -> None:
        """Start the task in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop the task and remove the worker from the index. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._forget()

    # Called by the follower, see `FollowerTarget`.

    def apply(self, batches: list[m.EventBatch]) -> None:
        """See `FollowerTarget`."""
        self._batches.extend(batches)

    def clear(self) -> None:
        """See `FollowerTarget`."""
        self._replacement = None
        self._batches.clear()
        self.holdings.forget()
        self._index.cleared(self.worker)

    def replace(self, blocks: Blocks, then: Callable[[], None]) -> None:
        """See `FollowerTarget`."""
        self._replacement = (blocks, then)
        self._batches.clear()
        self.holdings.forget()

    def reported(self, report: m.EngineReport) -> None:
        """See `FollowerTarget`."""
        self.epoch, self.load, self._load_at = report.epoch, report.load, time.monotonic()
        if self._on_load is not None:
            self._on_load(self.worker, report.load)

    # The task.

    async def _run(self) -> None:
        """The task: finds the engine's events and follows them, for ever. Whatever ends that, the engine's blocks are
        forgotten and the search begins again, after a pause that depends on the cause."""
        pause_s = RETRY_MIN_S
        while True:
            try:
                notice = self._configured or await self._find()
                if notice is None:
                    pause_s = REFUSED_RETRY_S
                else:
                    pause_s = RETRY_MIN_S
                    notice = await self._reachable(notice)
                    with shared_context() as context:
                        await self._follow(context, notice)
            except EngineLost as fault:
                self._warn(str(fault))
                pause_s = RETRY_MIN_S
            except (OSError, TimeoutError) as fault:
                self._warn(f"{type(fault).__name__} {fault}".strip())
                pause_s = min(2 * pause_s, RETRY_S)
            except PDError as fault:  # an engine that does not fit the index or can't be reached
                self._warn(str(fault))
                pause_s = REFUSED_RETRY_S
            except Exception:
                logger.exception("unexpected error in the subscriber of %s; it starts again", self.worker)
                self.counters["errors"] += 1
                pause_s = RETRY_S
            self._forget()
            self.counters["searches"] += 1
            await asyncio.sleep(pause_s)

    async def _find(self) -> EventsNotice | None:
        """Ask the engine where its events are. None where it answers that it has none. Raises OSError, TimeoutError."""
        try:
            async with asyncio.timeout(FIND_TIMEOUT_S), self._session.get(
                    self.url + PATH, headers=self._headers, allow_redirects=False) as answer:
                body = await read_whole(answer.content, MAX_NOTICE_BYTES)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        notice = EventsNotice.decode(body) if answer.status == 200 else None
        if notice is None:
            self._warn(f"GET {PATH} gave status {answer.status} and no endpoints: is --kv-events-config on?")
        elif self._on_notice is not None:
            self._on_notice(notice)
        return notice

    async def _reachable(self, notice: EventsNotice) -> EventsNotice:
        """The notice with the addresses to use from this machine, without those that only the engine's machine can
        reach. Raises PDError where none is left, OSError for an unknown name, TimeoutError."""
        host = urlsplit(self.url).hostname or "127.0.0.1"
        if not notice.events:
            self._warn("its publisher does not listen, so only a snapshot is read every second: start the engine with "
                       '"endpoint": "tcp://*:PORT" in --kv-events-config')
        seen = {name: reach.of_rank(reach.seen_from(host, address), self._rank) for name in ("events", "replay", "side")
                if (address := getattr(notice, name))}
        for address in notice.loads[self._rank:self._rank + 1]:
            seen["load"] = reach.seen_from(host, address)
        seen = {name: await reach.looked_up(address, FIND_TIMEOUT_S) for name, address in seen.items()}
        local = [name for name, address in seen.items() if sockets.is_local(address)]
        if local and notice is not self._configured and not await reach.is_here(host, FIND_TIMEOUT_S):
            self._warn(", ".join(f"{name} {seen[name]}" for name in local) + " can be reached from the engine's own "
                       'machine only and are not used: let it listen for others ("endpoint": "tcp://*:PORT", bind)')
            seen |= dict.fromkeys(local)
        if not any(seen.values()):
            raise PDError("none of its addresses can be reached from this machine")
        return EventsNotice(seen.get("events") or "", notice.block_size, seen.get("replay"), notice.topic,
                            seen.get("side"), notice.epoch, loads=[*filter(None, [seen.get("load")])])

    async def _follow(self, context: zmq.Context, notice: EventsNotice) -> None:
        """Follow the engine until it is lost. Raises EngineLost, PDError."""
        opened: list[zmq.Socket] = []
        replay: ReplayFollower | None = None
        monitor: zmq.Socket | None = None  # libzmq reports there that the connection has ended
        try:
            poller = zmq.asyncio.Poller()
            events: zmq.Socket | None = None
            if notice.events:
                events = self._subscription(context, notice)
                opened.append(events)
                poller.register(events, zmq.POLLIN)
            now = time.monotonic()
            if notice.side is not None:
                side = _client(context, notice.side, self._keys)
                opened.append(side)
                poller.register(side, zmq.POLLIN)
                monitor = side.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                poller.register(monitor, zmq.POLLIN)
                follower: SideFollower | ReplayFollower = SideFollower(
                    side, self, self.counters, now, notice.epoch, BEHIND_S if notice.events else POLLED_S, self.unread)
            else:
                connect = None
                if notice.replay is not None:
                    connect = lambda: _client(context, notice.replay)
                follower = replay = ReplayFollower(connect, self, self.counters, now, self.unread,
                                                   found=self._configured is None)
            for address in notice.loads:
                socket = _client(context, address, self._keys)
                opened.append(socket)
                poller.register(socket, zmq.POLLIN)
                self._loads.append(LoadFollower(socket, self, self.counters, now))
            while True:
                tick_s = 0 if follower.more else TICK_S if follower.waits else IDLE_TICK_S
                await poller.poll(tick_s * 1000)
                while monitor is not None and sockets.receive(monitor) is not None:
                    follower.hung_up(time.monotonic())
                await self._turn(events, follower)
        finally:
            self._loads.clear()
            if replay is not None:
                replay.close()
            if monitor is not None:
                side.disable_monitor()
                monitor.close(linger=0)
            for socket in opened:
                socket.close()

    async def _turn(self, events: zmq.Socket | None, follower: EventFollower) -> None:
        """Read messages, have the follower do what is due, and apply the results to the index."""
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(events) if events is not None else None
            if frames is None:
                break
            try:
                follower.batch(time.monotonic(), frames)
            except BadFrame as fault:
                count_malformed(self.counters, fault)
        follower.turn(time.monotonic())
        for load in self._loads:
            load.turn(time.monotonic())
        if len(self._unread_logged) < len(self.unread):
            self._warn_unread()
        if self._replacement is not None:
            blocks, then = self._replacement
            self._replacement = None
            for _ in self._index.replacing(self.worker, blocks):
                await asyncio.sleep(0)
            then()
        await self._apply_batches()
        if self._incomplete and isinstance(follower, SideFollower):
            self._incomplete = False
            follower.ask(time.monotonic())
        self.state = SubscriberState.LIVE if follower.live else SubscriberState.SYNCING
        if self.connected and time.monotonic() - self._warned_at > QUIET_S:
            self._warnings.clear()
        await asyncio.sleep(0)

    async def _apply_batches(self) -> None:
        """Apply the waiting batches to the index, in slices of SLICE_S."""
        until = time.monotonic() + SLICE_S
        while self._batches:
            self.counters["batches"] += 1
            for event in self._batches.popleft().events:
                self._apply(event)
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + SLICE_S

    # Internals.

    def _apply(self, event: Event) -> None:
        if isinstance(event, STORED):
            self.counters["blocks_stored"] += len(event.block_hashes)
        elif isinstance(event, REMOVED):
            self.counters["blocks_removed"] += len(event.block_hashes)
        else:
            self.counters["unreadable" if isinstance(event, Unreadable) else "cleared"] += 1
        if not self.holdings.apply(event):
            self.counters["not_kept"] += 1
            self._incomplete = True

    def _subscription(self, context: zmq.Context, notice: EventsNotice) -> zmq.Socket:
        """A socket that receives the engine's batches. The caller owns it. Raises PDError for an address that can't be
        used."""
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.IPV6, int("[" in notice.events))
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, sockets.RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, sockets.RECONNECT_MAX_MS)
            socket.setsockopt_string(zmq.SUBSCRIBE, notice.topic)
            socket.connect(notice.events)
        except zmq.ZMQError as error:
            socket.close()
            raise PDError(f"can't subscribe to {notice.events}: {error}") from error
        return socket

    def _forget(self) -> None:
        self.state = SubscriberState.SEARCHING
        self.epoch, self.load, self._load_at = None, None, -math.inf
        self._replacement = None
        self._batches.clear()
        self._incomplete = False
        self.holdings.forget()
        self._index.drop(self.worker)

    def _warn(self, text: str) -> None:
        """Log a warning, unless it was logged since the engine was last followed for some time without any."""
        self._warned_at = time.monotonic()
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            logger.warning("events of %s: %s", self.worker, text)

    def _note(self, reason: str) -> None:
        count_unread(self.unread, reason)

    def _warn_unread(self) -> None:
        """Log each reason once."""
        for reason in self.unread.keys() - self._unread_logged:
            self._unread_logged.add(reason)
            logger.warning("events of %s: some can't be read and are ignored: %s (events of vLLM 0.9.2 to 0.33 can be "
                           "read)", self.worker, reason)


async def read_whole(content: aiohttp.StreamReader, most_bytes: int) -> bytes:
    """The body of an answer, which may come in several pieces. One of more than `most_bytes` is cut off somewhere
    behind them. Raises whatever aiohttp raises."""
    body = bytearray()
    while len(body) < most_bytes and (piece := await content.readany()):
        body += piece
    return bytes(body)


_contexts: dict[asyncio.AbstractEventLoop, tuple[zmq.Context, list[None]]] = {}  # context, its users


@contextlib.contextmanager
def shared_context() -> Iterator[zmq.Context]:
    """The ZeroMQ context that all subscribers of the running loop share, because each context has two threads. A user
    must have closed its sockets before it leaves; the last one ends the context. Whoever can't run out of descriptors
    without harm uses it all the time, see `sockets.started_context`."""
    loop = asyncio.get_running_loop()
    if loop not in _contexts:
        _contexts[loop] = sockets.started_context(MAX_SOCKETS), []
    context, users = _contexts[loop]
    users.append(None)
    try:
        yield context
    finally:
        users.pop()
        if not users:
            del _contexts[loop]
            context.term()


def _client(context: zmq.Context, address: str, keys: Keys | None = None) -> zmq.Socket:
    try:
        return sockets.client(context, address, only_connected=False, keys=keys)
    except zmq.ZMQError as error:
        raise PDError(f"can't connect to {address}: {error}") from error
