# SPDX-License-Identifier: Apache-2.0
"""How a subscriber gets and keeps the correct state of one engine. The time is passed in; nothing waits.

`SideFollower` uses the side socket of our own engines: a snapshot first, then batches of events. It requests another
snapshot when the epoch changes or a batch is lost. A report names the number of the next batch, so it also notices the
loss of the last batch.

`ReplayFollower` uses only vLLM's own events, as of a V1 engine. It starts with the batches that the publisher's replay
still holds, and fills gaps from it. Every `CHECK_S`, and with each gap, it requests the last batch again: if the answer
differs, the engine has restarted. Where the replay does not reach back far enough, or there is none, everything known
is forgotten, and only later events count: the index then has too few blocks for a time, never wrong ones.
"""
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.formats import BatchReader, adapter_of
from vllm_pd.router.events.stream import BatchStream
from vllm_pd.rpc import sockets
from vllm_pd.rpc.codec import BadFrame

SNAPSHOT_RETRY_S = 0.4  # without a part of a snapshot it is requested again; doubled each time
SNAPSHOT_RETRY_MOST_S = 6.4
BEHIND_S = 0.15  # a report may overtake the batches before it
LOST_S = 2.0  # without a message the engine is lost
HUNG_UP_S = 0.4  # the same, after the connection has ended
REPLAY_TIMEOUT_S = 0.8
CHECK_S = 0.5
MESSAGES_A_TURN = 8  # a part of a snapshot takes about 0.4 ms
END = b"\xff" * 8  # of a replay, in place of a number
MAX_REPLAY_BYTES = 16 << 20  # of an answer that is read at once
MAX_SNAPSHOT_TOKENS = 1 << 26  # 3 GB while they are read

Blocks = Iterator[tuple[m.Hash, m.Hash | None, list[int], int | str | None]]


class EngineLost(Exception):
    """The engine is silent, or another one has its address: the subscriber must look for it again."""


class FollowerTarget(Protocol):
    """What a follower does to the index. The target carries it out between two turns of the follower. `clear` and
    `replace` discard batches that are not applied yet."""

    def apply(self, batches: list[m.EventBatch]) -> None:
        """Apply these batches, in this order."""

    def clear(self) -> None:
        """Forget all blocks of the engine."""

    def replace(self, blocks: Blocks, then: Callable[[], None]) -> None:
        """The engine holds exactly these blocks. Call `then` when the index has them."""

    def reported(self, report: m.EngineReport) -> None:
        """The engine has sent this report."""


class EventFollower(Protocol):
    """Follows one engine's publisher, through several lives of it where it restarts."""

    more: bool  # whether the last turn left messages unread

    @property
    def live(self) -> bool:
        """Whether the index has the engine's state, apart from messages under way."""

    @property
    def waits(self) -> bool:
        """Whether a turn is due soon."""

    def batch(self, now: float, frames: list[bytes]) -> None:
        """The subscription has given these frames. Raises BadFrame."""

    def turn(self, now: float) -> None:
        """Read from the other socket, and do what is due."""


def read_messages(received: Iterable[list[bytes]], counters: Counter[str]) -> Iterator[m.Message]:
    """The messages in what a side socket has received. One that can't be read is counted and left out."""
    for frames in received:
        try:
            message = m.decode(frames)
        except BadFrame as fault:
            count_malformed(counters, fault)
        else:
            yield message


def count_malformed(counters: Counter[str], fault: BadFrame) -> None:
    """Count a message or batch that can't be read, altogether and by its fault."""
    counters["malformed"] += 1
    counters[f"malformed_{fault.fault.value}"] += 1


class SideFollower:
    """`socket` is a client of the side socket. `epoch` is the one in the answer to GET /pd/events: an engine that
    reports another life is not the right one. With None any engine is. Batches whose numbers a report implies are lost
    after `behind_s`."""

    def __init__(self, socket: zmq.Socket, target: FollowerTarget, counters: Counter[str], now: float,
                 epoch: str | None = None, behind_s: float = BEHIND_S, unread: Counter[str] | None = None) -> None:
        self.epoch: str | None = None
        self.more = False
        self._behind_s = behind_s
        self._life = m.life_of(epoch) if epoch is not None else None
        self._socket = socket
        self._target = target
        self._counters = counters
        self._stream = BatchStream(counters)
        self._reader = BatchReader(unread if unread is not None else Counter())
        self._lost_at = now + LOST_S
        self._hung_up = False
        self._subscribe_at = now
        self._reported_seq = 0  # the next number in the last report
        self._behind_since: float | None = None
        self._number = 0  # of the last snapshot request
        self._asked_at: float | None = None  # when a snapshot was requested that is not complete yet
        self._part_at = now  # when its last part came
        self._retry_s = SNAPSHOT_RETRY_S
        self._runs: list[m.BlockStored] = []
        self._received = self._received_tokens = 0

    @property
    def live(self) -> bool:
        """See `EventFollower`."""
        return self._stream.next_seq is not None and self._asked_at is None

    @property
    def waits(self) -> bool:
        """See `EventFollower`."""
        return not self.live or self._hung_up or self._stream.waits or self._behind_since is not None

    def batch(self, now: float, frames: list[bytes]) -> None:
        """See `EventFollower`."""
        seq, batch = self._reader.read(frames)
        self._target.apply(self._stream.offer(now, seq, batch, hash(frames[2])))

    def turn(self, now: float) -> None:
        """Read from the side socket, and do what is due. Raises EngineLost where the engine is silent or another
        one."""
        for message in read_messages(self._read(), self._counters):
            self._lost_at = now + LOST_S
            self._hung_up = False
            if isinstance(message, m.EngineReport):
                self._on_report(now, message)
            elif isinstance(message, m.SnapshotPart):
                self._on_part(now, message)
        if now > self._lost_at:
            raise EngineLost("its reports have stopped")
        if now >= self._subscribe_at:
            self._subscribe_at = now + m.SUBSCRIBE_S
            sockets.send(self._socket, m.encode(m.Subscribe()))
        self._catch_up(now)

    def hung_up(self, now: float) -> None:
        """The connection has ended. ZeroMQ connects again, to this engine or to another one that does not know us."""
        self._hung_up = True
        self._lost_at = min(self._lost_at, now + HUNG_UP_S)
        self._subscribe_at = now

    def ask(self, now: float) -> None:
        """Request a snapshot, because what is known of the engine can't be trusted."""
        self._number += 1
        self._asked_at = self._part_at = now
        self._behind_since = None
        self._runs, self._received, self._received_tokens = [], 0, 0
        self._stream.stop()
        self._counters["snapshots_asked"] += 1
        sockets.send(self._socket, m.encode(m.SnapshotRequest(self._number)))

    def _read(self) -> Iterator[list[bytes]]:
        """At most MESSAGES_A_TURN messages."""
        self.more = False
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(self._socket)
            if frames is None:
                return
            yield frames
        self.more = True

    def _on_report(self, now: float, report: m.EngineReport) -> None:
        """A report. Another epoch of the same life means that the engine's announcer has begun anew: a snapshot is
        requested. Raises EngineLost for another life."""
        if self._life is not None and m.life_of(report.epoch) != self._life:
            self._counters["strangers" if self.epoch is None else "restarts"] += 1
            raise EngineLost("another engine, or another life of this one, answers at its side socket")
        self._reported_seq = report.next_seq
        if report.epoch != self.epoch:
            if self.epoch is not None:
                self._counters["restarts"] += 1
                self._target.clear()
            self.epoch = report.epoch
            self.ask(now)
        self._target.reported(report)

    def _on_part(self, now: float, part: m.SnapshotPart) -> None:
        """A part of a snapshot. It is counted and dropped unless it is the next one of the last request. With the last
        part the target replaces what it knows, in steps, and then calls `_complete`."""
        tokens = self._received_tokens + sum(len(run.token_ids) for run in part.runs)
        if (self._asked_at is None or part.number != self._number or part.epoch != self.epoch
                or part.first_block != self._received or tokens > MAX_SNAPSHOT_TOKENS
                or not all(run.block_hashes for run in part.runs) or not (part.runs or part.total_blocks == 0)):
            self._counters["snapshot_parts_unused"] += 1
            return
        self._part_at = now
        self._retry_s = SNAPSHOT_RETRY_S
        self._runs.extend(part.runs)
        self._received += sum(len(run.block_hashes) for run in part.runs)
        self._received_tokens = tokens
        if self._received >= part.total_blocks:
            runs, asked_at, number = self._runs, self._asked_at, self._number
            self._runs = []
            self._target.replace(blocks_of(runs), lambda: self._complete(now, number, part.next_seq, asked_at))

    def _complete(self, now: float, number: int, next_seq: int, asked_at: float) -> None:
        """The index has the whole snapshot: go on with the batches after it."""
        if number == self._number and self._asked_at is not None:
            self._asked_at = None
            self._counters["snapshots"] += 1
            self._target.apply(self._stream.start(now, next_seq, asked_at))

    def _catch_up(self, now: float) -> None:
        """Request a snapshot where a batch is lost: the stream has a gap, or has been behind the reports for
        `behind_s`. Request it again when its parts have stopped, each time after a longer pause."""
        if self.epoch is None:
            return
        if self._asked_at is not None:
            if now - self._part_at > self._retry_s:
                self._retry_s = min(2 * self._retry_s, SNAPSHOT_RETRY_MOST_S)
                self.ask(now)
            return
        behind = self._stream.next_seq is not None and self._stream.next_seq < self._reported_seq
        if not behind:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        if self._stream.missed(now) or (behind and now - self._behind_since > self._behind_s):
            self._counters["gaps"] += 1
            self.ask(now)


class LoadFollower:
    """Reads the load of an engine without snapshots. `socket` is a client of its side socket. Without any report the
    engine's events count all the same."""

    def __init__(self, socket: zmq.Socket, target: FollowerTarget, counters: Counter[str], now: float) -> None:
        self._socket = socket
        self._target = target
        self._counters = counters
        self._subscribe_at = now
        self._epoch: str | None = None
        self._lost_at = math.inf

    def turn(self, now: float) -> None:
        """Read from the side socket, and do what is due. Raises EngineLost where the engine has become silent, or
        another one."""
        if now >= self._subscribe_at:
            self._subscribe_at = now + m.SUBSCRIBE_S
            sockets.send(self._socket, m.encode(m.Subscribe()))
        received = iter(lambda: sockets.receive(self._socket), None)
        for message in read_messages(itertools.islice(received, MESSAGES_A_TURN), self._counters):
            if isinstance(message, m.EngineReport):
                self._lost_at = now + LOST_S
                self._epoch = self._epoch or message.epoch
                if m.life_of(message.epoch) != m.life_of(self._epoch):
                    raise EngineLost("another engine, or another life of this one, reports its load there")
                self._target.reported(message)
        if now > self._lost_at:
            raise EngineLost("its load reports have stopped")


class ReplayPurpose(Enum):
    """What a replay is requested for."""
    BEGIN = "begin"  # all batches that it holds
    FILL = "fill"  # the last batch before a gap again, and the lost ones after it
    CHECK = "check"  # the last batch again, and those after it


_Numbered = tuple[int, m.EventBatch, int]  # number, batch, hash of its bytes


@dataclass
class _ReplayRequest:
    """A request to the replay socket, and its answer so far."""
    purpose: ReplayPurpose
    asked_at: float
    heard_at: float
    batches: list[_Numbered] = field(default_factory=list)
    received_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more of the answer may be kept. The first batch of most answers is known already."""
        return self.received_bytes >= MAX_REPLAY_BYTES and len(self.batches) > 1


class ReplayFollower:
    """`connect` makes a client of the replay socket; None where there is none. A request whose answer has not ended in
    time is given up together with its socket. After two in a row to which nothing has come, everything known of the
    engine is forgotten. With `found` the addresses are the engine's answer to GET /pd/events, and another life of it
    may have others: then `turn` raises EngineLost where the replay shows a restart or does not answer."""

    def __init__(self, connect: Callable[[], zmq.Socket] | None, target: FollowerTarget, counters: Counter[str],
                 now: float, unread: Counter[str] | None = None, found: bool = False) -> None:
        self.more = False
        self._found = found
        self._connect = connect
        self._socket = connect() if connect is not None else None
        self._target = target
        self._counters = counters
        self._stream = BatchStream(counters, old_is_restart=connect is None)
        self._reader = BatchReader(unread if unread is not None else Counter())
        self._replay: _ReplayRequest | None = None
        self._next_ask = now
        self._unanswered = 0  # in a row
        self._live = connect is None

    @property
    def live(self) -> bool:
        """See `EventFollower`."""
        return self._live

    @property
    def waits(self) -> bool:
        """See `EventFollower`."""
        return self._replay is not None or self._stream.waits

    def batch(self, now: float, frames: list[bytes]) -> None:
        """See `EventFollower`."""
        seq, batch = self._reader.read(frames)
        ready = self._stream.offer(now, seq, batch, hash(frames[2]))
        if ready:
            self._next_ask = max(self._next_ask, now + CHECK_S / 2)  # the engine is there, and the same one
            self._target.apply(ready)

    def turn(self, now: float) -> None:
        """Read the answer of the replay, and do what is due. Raises EngineLost, see the class."""
        if self._socket is None:
            self._turn_without_replay(now)
            return
        self.more = False
        for _ in range(MESSAGES_A_TURN):
            reading = self._replay is not None and not self._replay.is_full
            frames = sockets.receive(self._socket) if reading else None
            if frames is None:
                break
            self._on_replayed(now, frames)
        else:
            self.more = True
        stream = self._stream
        if self._replay is not None:
            if now - self._replay.heard_at > REPLAY_TIMEOUT_S or self._replay.is_full:
                self._give_up(now)
        elif stream.restarted:
            self._restarted(now)
        elif stream.next_seq is not None and stream.missed(now):
            self._counters["gaps"] += 1
            self._ask(now, ReplayPurpose.FILL, max(0, stream.next_seq - 1))
        elif now >= self._next_ask:
            if stream.next_seq is None:
                self._ask(now, ReplayPurpose.BEGIN, 0)
            else:
                self._ask(now, ReplayPurpose.CHECK, max(0, stream.next_seq - 1))

    def close(self) -> None:
        """Close the replay socket, which belongs to this follower."""
        if self._socket is not None:
            self._socket.close()

    def _give_up(self, now: float) -> None:
        """No end of the answer has come, or it is too long. The batches after those that have come are requested
        next."""
        replay, self._replay = self._replay, None
        self._socket.close()
        self._socket = self._connect()
        self._next_ask = now
        self._live = False
        if replay.batches:
            self._counters["replays_cut"] += 1
            self._unanswered = 0
            self._complete(now, replay)
            return
        self._counters["replays_unanswered"] += 1
        self._unanswered += 1
        if self._unanswered == 2:
            self._target.clear()
            self._stream.stop()
            if self._found:
                raise EngineLost("its replay does not answer")

    def _turn_without_replay(self, now: float) -> None:
        if self._stream.restarted or self._stream.missed(now):
            self._counters["restarts" if self._stream.restarted else "gaps"] += 1
            self._target.clear()
            self._target.apply(self._stream.skip(now))

    def _restarted(self, now: float) -> None:
        """The replay is that of another life of the engine."""
        self._counters["restarts"] += 1
        if self._found:
            raise EngineLost("it has restarted")
        self._start_again(now)

    def _start_again(self, now: float) -> None:
        """Forget everything known, because it can't be trusted."""
        self._target.clear()
        self._stream.stop()
        self._ask(now, ReplayPurpose.BEGIN, 0)

    def _ask(self, now: float, purpose: ReplayPurpose, first: int) -> None:
        self._replay = _ReplayRequest(purpose, now, now)
        self._next_ask = now + CHECK_S
        self._counters[f"replays_{purpose.value}"] += 1
        sockets.send(self._socket, b"", first.to_bytes(8, "big"))

    def _on_replayed(self, now: float, frames: list[bytes]) -> None:
        """A message of the replay's answer: one more batch, or the end, with which the answer is used. Then the
        follower is live, unless numbers are missing in the answer."""
        replay = self._replay
        if len(frames) == 4:  # with the topic, since vLLM 0.27
            frames = [frames[0], *frames[2:]]
        if len(frames) == 3 and frames[1] == END:
            self._replay = None
            self._unanswered = 0
            self._live = not _gaps(replay.batches)
            self._complete(now, replay)
            return
        try:
            seq, batch = self._reader.read(frames)
        except BadFrame:
            self._counters["malformed"] += 1
            return
        replay.heard_at = now
        replay.batches.append((seq, batch, hash(frames[2])))
        replay.received_bytes += len(frames[2])

    def _complete(self, now: float, replay: _ReplayRequest) -> None:
        """A publisher drops the messages of a long answer that its queue has no room for. So the answer is used up to
        the first gap, and the batches after that are requested next. A gap that stays is the publisher's own."""
        stream, batches = self._stream, replay.batches
        if replay.purpose is ReplayPurpose.BEGIN:
            self._begin(now, replay.asked_at, _before_gap(batches))
            if not self._live:  # there are more
                self._next_ask = now
            return
        if stream.next_seq:
            same = bool(batches) and batches[0][2] == stream.content(batches[0][0])
            if not same:
                self._restarted(now)
                return
        known = stream.next_seq
        for seq, batch, content in batches:
            self._target.apply(stream.offer(now, seq, batch, content))
        if replay.purpose is ReplayPurpose.FILL and stream.next_seq == known and stream.missed(now):
            self._counters["replays_too_short"] += 1  # the replay lacks them, too
            later = [one for one in batches if one[0] >= known]
            if 0 < len(later) < len(batches):  # it has those before and after them
                self._begin(now, replay.asked_at, _after_gap(later))
            else:
                self._start_again(now)

    def _begin(self, now: float, asked_at: float, batches: list[_Numbered]) -> None:
        """Forget everything known, and start with these batches, whose numbers follow each other."""
        first = batches[0][0] if batches else 0
        if first:
            self._counters["incomplete"] += 1
        self._target.clear()
        self._target.apply(self._stream.start(now, first, asked_at))
        for seq, batch, content in batches:
            self._target.apply(self._stream.offer(now, seq, batch, content))


def _before_gap(batches: list[_Numbered]) -> list[_Numbered]:
    """The first batches, whose numbers follow each other."""
    return batches[:min(_gaps(batches), default=len(batches))]


def _after_gap(batches: list[_Numbered]) -> list[_Numbered]:
    """The last batches, whose numbers follow each other."""
    return batches[max(_gaps(batches), default=0):]


def _gaps(batches: list[_Numbered]) -> list[int]:
    """The indexes of the batches whose numbers do not follow the ones before them."""
    return [index for index in range(1, len(batches)) if batches[index][0] != batches[index - 1][0] + 1]


def blocks_of(runs: list[m.BlockStored]) -> Blocks:
    """The single blocks of these runs: hash, parent's hash, token ids, adapter."""
    for run in runs:
        parent, size, adapter = run.parent_block_hash, run.block_size, adapter_of(run)
        for number, block_hash in enumerate(run.block_hashes):
            yield block_hash, parent, run.token_ids[number * size:(number + 1) * size], adapter
            parent = block_hash
