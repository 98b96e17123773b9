# SPDX-License-Identifier: Apache-2.0
"""What one engine holds and how busy it is, kept up to date in a prefix index: one `Subscriber` for each engine.

It finds out by itself where the engine's events are (`GET /pd/events`), follows them (`vllm_pd.events.followers`), and
begins again when the engine is silent or gone. Nothing that an engine sends, or fails to send, ends it: what was wrong
is counted, and what the index says of the engine is taken back until it is known again. One task of one event loop does
it all, in small pieces.
"""
from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import aiohttp
import zmq
import zmq.asyncio

from vllm_pd.errors import PDError
from vllm_pd.events import messages as m
from vllm_pd.events import reach
from vllm_pd.events.followers import BEHIND_S, Blocks, EngineLost, ReplayFollower, SideFollower
from vllm_pd.events.formats import REMOVED, STORED, Event, Unreadable, count_unread
from vllm_pd.events.holdings import Holdings
from vllm_pd.events.notice import MAX_NOTICE_BYTES, PATH, EventsNotice
from vllm_pd.rpc import sockets
from vllm_pd.rpc.codec import MAX_FRAME_BYTES, BadFrame

if TYPE_CHECKING:
    from vllm_pd.rpc.keys import Keys

logger = logging.getLogger("vllm.pd")

TICK_S = 0.02
IDLE_TICK_S = 0.1  # where nothing is awaited
MAX_SOCKETS = 16384  # of all subscribers of a loop, four each
MESSAGES_A_TURN = 32
SLICE_S = 0.002  # of the loop's time in one piece
QUEUED_BATCHES = 20_000
FIND_S = 2.0  # for an answer to GET /pd/events
RETRY_MIN_S = 0.25
RETRY_S = 0.5
POLLED_S = 1.0  # between snapshots, where there are no events
REFUSED_RETRY_S = 5.0  # where the engine has no events, or can't be understood


class SubscriberState(Enum):
    """How much the index can be relied on about the engine."""
    SEARCHING = "searching"  # nothing is known
    SYNCING = "syncing"  # something is known and being made right
    LIVE = "live"


class SubscribedIndex(Protocol):
    """What is kept up to date: `vllm_pd.router.index.PrefixIndex`."""

    block_size: int

    def stored(self, worker: str, block_hashes: Sequence[m.Hash], parent: m.Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool: ...

    def removed(self, worker: str, block_hashes: Iterable[m.Hash]) -> None: ...

    def set_lookahead(self, worker: str, blocks: int) -> None: ...

    def cleared(self, worker: str) -> None: ...

    def drop(self, worker: str) -> None: ...

    def replacing(self, worker: str, blocks: Iterable[tuple]) -> Iterator[int]: ...


class Subscriber:
    """Of the engine at `url`. `events`, `replay` and `side` are endpoints where the engine can't be asked for them;
    `keys` is the cluster's key where the side socket has one. `rank` is the data-parallel rank that it follows, whose
    ports are the engine's and so many; each rank needs a `worker` of its own, its name in the index. `on_load` is
    called with that name and each load that the engine tells.

    `start` needs a running event loop; `close` ends it and takes the worker out of the index. Everything else may be
    read at any time: `worker`, `state`, `epoch`, `load`, `load_age_s`, `counters`, and `unread`, which says what of its
    events could not be read, and how often.
    """

    def __init__(self, url: str, index: SubscribedIndex, session: aiohttp.ClientSession | None,
                 headers: Mapping[str, str] | None = None, *, events: str | None = None, replay: str | None = None,
                 side: str | None = None, topic: str = "", keys: Keys | None = None,
                 on_load: Callable[[str, m.EngineLoad], None] | None = None, rank: int = 0,
                 worker: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.worker = self.url if worker is None else worker
        self.state = SubscriberState.SEARCHING
        self.epoch: str | None = None
        self.load: m.EngineLoad | None = None
        self.counters: collections.Counter[str] = collections.Counter()
        self.unread: collections.Counter[str] = collections.Counter()
        self._index = index
        self._holdings = Holdings(index, self.worker, self._note)
        self._rank = rank
        self._session = session
        self._headers = dict(headers or {})
        self._given = EventsNotice(events, 0, replay, topic, side) if events is not None else None
        self._keys = keys
        self._on_load = on_load
        self._load_at = -math.inf
        self._task: asyncio.Task | None = None
        self._replacement: tuple[Blocks, Callable[[], None]] | None = None
        self._batches: collections.deque[m.EventBatch] = collections.deque()  # empty between two turns
        self._incomplete = False
        self._said: str | None = None
        self._unread_said: set[str] = set()

    @property
    def connected(self) -> bool:
        """Whether the index is right about this engine, as far as can be known."""
        return self.state is SubscriberState.LIVE

    @property
    def load_age_s(self) -> float:
        """How long ago the engine told its load; infinite where it did not."""
        return time.monotonic() - self._load_at

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End, and forget the worker. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._forget()

    # What a follower wants done.

    def apply(self, batches: list[m.EventBatch]) -> None:
        self._batches.extend(batches)

    def clear(self) -> None:
        self._replacement = None
        self._batches.clear()
        self._holdings.forget()
        self._index.cleared(self.worker)

    def replace(self, blocks: Blocks, then: Callable[[], None]) -> None:
        self._replacement = (blocks, then)
        self._batches.clear()
        self._holdings.forget()

    def told(self, pulse: m.EngineReport) -> None:
        self.epoch, self.load, self._load_at = pulse.epoch, pulse.load, time.monotonic()
        if self._on_load is not None:
            self._on_load(self.worker, pulse.load)

    # The task.

    async def _run(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                notice = self._given or await self._find()
                if notice is None:
                    pause_s = REFUSED_RETRY_S
                else:
                    pause_s = RETRY_MIN_S
                    notice = await self._from_here(notice)
                    with _context() as context:
                        await self._follow(context, notice)
            except EngineLost as fault:
                self._say(str(fault))
                pause_s = RETRY_MIN_S
            except (OSError, TimeoutError) as fault:
                self._say(f"{type(fault).__name__} {fault}".strip())
                pause_s = min(2 * pause_s, RETRY_S)
            except PDError as fault:  # an engine that does not fit the index
                self._say(str(fault))
                pause_s = REFUSED_RETRY_S
            except Exception:
                logger.exception("the subscriber of %s stumbled and begins anew", self.worker)
                self.counters["stumbles"] += 1
                pause_s = RETRY_S
            self._forget()
            self.counters["searches"] += 1
            await asyncio.sleep(pause_s)

    async def _find(self) -> EventsNotice | None:
        """None where the engine answers that it has none. OSError, TimeoutError where it does not answer."""
        try:
            async with asyncio.timeout(FIND_S), self._session.get(self.url + PATH, headers=self._headers) as answer:
                body = await answer.content.read(MAX_NOTICE_BYTES)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        notice = EventsNotice.decode(body) if answer.status == 200 else None
        if notice is None:
            self._say(f"GET {PATH} gave status {answer.status} and no endpoints: is --kv-events-config on?")
        return notice

    async def _from_here(self, notice: EventsNotice) -> EventsNotice:
        """With its addresses as they are seen from here, and without those that another machine keeps to itself."""
        host = urlsplit(self.url).hostname or "127.0.0.1"
        if not notice.events:
            self._say("its publisher does not listen, so a snapshot a second has to do: start it with "
                      '"endpoint": "tcp://*:PORT" in --kv-events-config')
        seen = {name: reach.of_rank(reach.seen_from(host, address), self._rank) for name in ("events", "replay", "side")
                if (address := getattr(notice, name))}
        local = [name for name, address in seen.items() if sockets.is_local(address)]
        if local and notice is not self._given and not await reach.is_here(host, FIND_S):
            self._say(", ".join(f"{name} {seen[name]}" for name in local) + " can be reached on the engine's own "
                      'machine only and are left out; have it listen elsewhere ("endpoint": "tcp://*:PORT", bind)')
            seen |= dict.fromkeys(local)
        if not any(seen.values()):
            raise PDError("nothing that it tells can be read from here")
        return EventsNotice(seen.get("events") or "", notice.block_size, seen.get("replay"), notice.topic,
                            seen.get("side"), notice.epoch)

    async def _follow(self, context: zmq.Context, notice: EventsNotice) -> None:
        """Until the engine is lost."""
        opened: list[zmq.Socket] = []
        replay: ReplayFollower | None = None
        line: zmq.Socket | None = None  # on which libzmq says that the connection has ended
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
                line = side.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                poller.register(line, zmq.POLLIN)
                follower: SideFollower | ReplayFollower = SideFollower(
                    side, self, self.counters, now, notice.epoch, BEHIND_S if notice.events else POLLED_S, self.unread)
            else:
                connect = None
                if notice.replay is not None:
                    connect = lambda: _client(context, notice.replay)
                follower = replay = ReplayFollower(connect, self, self.counters, now, self.unread)
            while True:
                tick_s = 0 if follower.more else TICK_S if follower.waits else IDLE_TICK_S
                await poller.poll(tick_s * 1000)
                while line is not None and sockets.receive(line) is not None:
                    follower.hung_up(time.monotonic())
                await self._turn(events, follower)
        finally:
            if replay is not None:
                replay.close()
            if line is not None:
                side.disable_monitor()
                line.close(linger=0)
            for socket in opened:
                socket.close()

    async def _turn(self, events: zmq.Socket | None, follower: SideFollower | ReplayFollower) -> None:
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(events) if events is not None else None
            if frames is None:
                break
            try:
                follower.batch(time.monotonic(), frames)
            except BadFrame as fault:
                self.counters["malformed"] += 1
                self.counters[f"malformed_{fault.fault.value}"] += 1
        follower.turn(time.monotonic())
        if len(self._unread_said) < len(self.unread):
            self._say_unread()
        if self._replacement is not None:
            blocks, then = self._replacement
            self._replacement = None
            for _ in self._index.replacing(self.worker, blocks):
                await asyncio.sleep(0)
            then()
        await self._carry_out()
        if self._incomplete and isinstance(follower, SideFollower):
            self._incomplete = False
            follower.ask(time.monotonic())
        self.state = SubscriberState.LIVE if follower.live else SubscriberState.SYNCING
        await asyncio.sleep(0)

    async def _carry_out(self) -> None:
        """What the batches say, in slices."""
        until = time.monotonic() + SLICE_S
        while self._batches:
            self.counters["batches"] += 1
            for event in self._batches.popleft().events:
                self._apply(event)
            if time.monotonic() > until:
                await asyncio.sleep(0)
                until = time.monotonic() + SLICE_S

    # Inside.

    def _apply(self, event: Event) -> None:
        if isinstance(event, STORED):
            self.counters["blocks_stored"] += len(event.block_hashes)
        elif isinstance(event, REMOVED):
            self.counters["blocks_removed"] += len(event.block_hashes)
        else:
            self.counters["unreadable" if isinstance(event, Unreadable) else "cleared"] += 1
        if not self._holdings.apply(event):
            self.counters["not_kept"] += 1
            self._incomplete = True

    def _subscription(self, context: zmq.Context, notice: EventsNotice) -> zmq.Socket:
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
            raise PDError(f"{notice.events} can't be subscribed to: {error}") from error
        return socket

    def _forget(self) -> None:
        self.state = SubscriberState.SEARCHING
        self.epoch, self.load, self._load_at = None, None, -math.inf
        self._replacement = None
        self._batches.clear()
        self._incomplete = False
        self._holdings.forget()
        self._index.drop(self.worker)

    def _say(self, text: str) -> None:
        """Once, until it is something else."""
        if text != self._said:
            self._said = text
            logger.warning("events of %s: %s", self.worker, text)

    def _note(self, reason: str) -> None:
        count_unread(self.unread, reason)

    def _say_unread(self) -> None:
        """Each reason once."""
        for reason in self.unread.keys() - self._unread_said:
            self._unread_said.add(reason)
            logger.warning("events of %s: what can't be read does not count: %s (what vLLM 0.9.2 to 0.33 writes can be "
                           "read)", self.worker, reason)


_contexts: dict[asyncio.AbstractEventLoop, tuple[zmq.Context, list[None]]] = {}  # with its users


@contextlib.contextmanager
def _context() -> Iterator[zmq.Context]:
    """One for all subscribers of the running loop, for each brings two threads along. The last user ends it and must
    have closed its sockets."""
    loop = asyncio.get_running_loop()
    if loop not in _contexts:
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _contexts[loop] = context, []
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
        raise PDError(f"{address} can't be connected to: {error}") from error
