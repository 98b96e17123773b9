# SPDX-License-Identifier: Apache-2.0
"""How a subscriber comes to be right, and stays right, about one engine. No clock of its own, no waiting.

`SideFollower` has the engine's side socket: a snapshot first, then batches; another snapshot whenever a batch is
missed, also the last one (a pulse names the number of the next), or the epoch changes.

`ReplayFollower` has vLLM's own events only, as of a V1 engine. What the replay still holds is the start; a gap is
filled from it. Now and then it is asked for the last batch again: a publisher that gives something else in its place is
another one. Where the replay no longer reaches back far enough, or there is none, nothing that was known can be
trusted, and only what follows counts: what is known is too little then for a time, never wrong.
"""
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.formats import BatchReader, adapter_of
from vllm_pd.events.stream import BatchStream
from vllm_pd.rpc import sockets
from vllm_pd.rpc.codec import BadFrame

SNAPSHOT_RETRY_S = 0.4  # without a part of the answer; twice as long each time
SNAPSHOT_RETRY_MOST_S = 6.4
BEHIND_S = 0.15  # a pulse may overtake the batches before it
LOST_S = 2.0  # without a pulse
HUNG_UP_S = 0.4  # after the engine's end of the line was closed
REPLAY_TIMEOUT_S = 0.8
CHECK_S = 0.5
MESSAGES_A_TURN = 8  # a part of a snapshot takes about 0.4 ms
END = b"\xff" * 8  # in place of a number
MAX_SNAPSHOT_BLOCKS = 50_000_000

Blocks = Iterator[tuple[m.Hash, m.Hash | None, list[int], int | str | None]]


class EngineLost(Exception):
    """The engine is silent, or somebody else is where it was: it has to be found anew."""


class FollowerTarget(Protocol):
    """What a follower has the index do. It is carried out between two turns of the follower; clearing and a replacement
    make what was to be applied before them void."""

    def apply(self, batches: list[m.EventBatch]) -> None: ...

    def clear(self) -> None: ...

    def replace(self, blocks: Blocks, then: Callable[[], None]) -> None: ...

    def told(self, pulse: m.EngineReport) -> None: ...


class EventFollower(Protocol):
    """One session with one life, or several, of an engine's publisher."""

    more: bool  # whether the last turn has left something unread

    @property
    def live(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """Whether something is due soon."""

    def batch(self, now: float, frames: list[bytes]) -> None: ...

    def turn(self, now: float) -> None: ...


class SideFollower:
    """`socket` is a client of the side socket. `epoch` is what the engine's front end says; who has another life is
    not that engine. None where nobody could say: then whoever is there is. After `behind_s` without the batches that a
    pulse has told of they are taken to be lost."""

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
        self._told_seq = 0
        self._behind_since: float | None = None
        self._number = 0
        self._asked_at: float | None = None  # for a snapshot that is not complete yet
        self._part_at = now
        self._retry_s = SNAPSHOT_RETRY_S
        self._runs: list[m.BlockStored] = []
        self._received = 0

    @property
    def live(self) -> bool:
        return self._stream.next_seq is not None and self._asked_at is None

    @property
    def waits(self) -> bool:
        return not self.live or self._hung_up or self._stream.waits or self._behind_since is not None

    def batch(self, now: float, frames: list[bytes]) -> None:
        """What the subscription gave."""
        seq, batch = self._reader.read(frames)
        self._target.apply(self._stream.offer(now, seq, batch, hash(frames[2])))

    def turn(self, now: float) -> None:
        """Read from the side socket, and do what is due. Raises EngineLost where the engine is silent, or
        another one."""
        for frames in self._read():
            try:
                message = m.decode(frames)
            except BadFrame as fault:
                self._counters["malformed"] += 1
                self._counters[f"malformed_{fault.fault.value}"] += 1
                continue
            self._lost_at = now + LOST_S
            self._hung_up = False
            if isinstance(message, m.EngineReport):
                self._pulse(now, message)
            elif isinstance(message, m.SnapshotPart):
                self._part(now, message)
        if now > self._lost_at:
            raise EngineLost("no pulse comes any more")
        if now >= self._subscribe_at:
            self._subscribe_at = now + m.SUBSCRIBE_S
            sockets.send(self._socket, m.encode(m.Subscribe()))
        self._catch_up(now)

    def hung_up(self, now: float) -> None:
        """The connection has ended. It may come back, with this engine or another one, which knows nothing of us."""
        self._hung_up = True
        self._lost_at = min(self._lost_at, now + HUNG_UP_S)
        self._subscribe_at = now

    def ask(self, now: float) -> None:
        """For a snapshot: whatever is known is not to be relied on."""
        self._number += 1
        self._asked_at = self._part_at = now
        self._behind_since = None
        self._runs, self._received = [], 0
        self._stream.stop()
        self._counters["snapshots_asked"] += 1
        sockets.send(self._socket, m.encode(m.SnapshotRequest(self._number)))

    def _read(self) -> Iterator[list[bytes]]:
        """As much as one turn may."""
        self.more = False
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(self._socket)
            if frames is None:
                return
            yield frames
        self.more = True

    def _pulse(self, now: float, pulse: m.EngineReport) -> None:
        if self._life is not None and m.life_of(pulse.epoch) != self._life:
            self._counters["strangers" if self.epoch is None else "restarts"] += 1
            raise EngineLost("another engine, or another life of it, is at its side socket")
        self._told_seq = pulse.next_seq
        if pulse.epoch != self.epoch:
            if self.epoch is not None:
                self._counters["restarts"] += 1
                self._target.clear()
            self.epoch = pulse.epoch
            self.ask(now)
        self._target.told(pulse)

    def _part(self, now: float, part: m.SnapshotPart) -> None:
        if (self._asked_at is None or part.number != self._number or part.epoch != self.epoch
                or part.first_block != self._received or part.total_blocks > MAX_SNAPSHOT_BLOCKS):
            self._counters["snapshot_parts_unused"] += 1
            return
        self._part_at = now
        self._retry_s = SNAPSHOT_RETRY_S
        self._runs.extend(part.runs)
        self._received += sum(len(run.block_hashes) for run in part.runs)
        if self._received >= part.total_blocks:
            runs, asked_at, number = self._runs, self._asked_at, self._number
            self._runs = []
            self._target.replace(blocks_of(runs), lambda: self._complete(now, number, part.next_seq, asked_at))

    def _complete(self, now: float, number: int, next_seq: int, asked_at: float) -> None:
        """The index holds the snapshot."""
        if number == self._number and self._asked_at is not None:
            self._asked_at = None
            self._counters["snapshots"] += 1
            self._target.apply(self._stream.start(now, next_seq, asked_at))

    def _catch_up(self, now: float) -> None:
        if self.epoch is None:
            return
        if self._asked_at is not None:
            if now - self._part_at > self._retry_s:
                self._retry_s = min(2 * self._retry_s, SNAPSHOT_RETRY_MOST_S)
                self.ask(now)
            return
        behind = self._stream.next_seq is not None and self._stream.next_seq < self._told_seq
        if not behind:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        if self._stream.missed(now) or (behind and now - self._behind_since > self._behind_s):
            self._counters["gaps"] += 1
            self.ask(now)


class ReplayPurpose(Enum):
    """Of a replay."""
    BEGIN = "begin"  # all there is
    FILL = "fill"  # what was missed
    CHECK = "check"  # the last batch again, and what came after it


@dataclass
class _ReplayRequest:
    """One request, and what has come of it."""
    purpose: ReplayPurpose
    asked_at: float
    heard_at: float
    batches: list[tuple[int, m.EventBatch, int]] = field(default_factory=list)  # number, batch, hash of its bytes


class ReplayFollower:
    """`connect` makes a client of the replay socket; None where there is none. A request that is not answered in time
    is given up with its socket, and with the second one in a row all that was known."""

    def __init__(self, connect: Callable[[], zmq.Socket] | None, target: FollowerTarget, counters: Counter[str],
                 now: float, unread: Counter[str] | None = None) -> None:
        self.more = False
        self._connect = connect
        self._socket = connect() if connect is not None else None
        self._target = target
        self._counters = counters
        self._stream = BatchStream(counters)
        self._reader = BatchReader(unread if unread is not None else Counter())
        self._replay: _ReplayRequest | None = None
        self._next_ask = now
        self._unanswered = 0  # in a row
        self._live = connect is None

    @property
    def live(self) -> bool:
        return self._live

    @property
    def waits(self) -> bool:
        return self._replay is not None or self._stream.waits

    def batch(self, now: float, frames: list[bytes]) -> None:
        """What the subscription gave."""
        seq, batch = self._reader.read(frames)
        ready = self._stream.offer(now, seq, batch, hash(frames[2]))
        if ready:
            self._next_ask = max(self._next_ask, now + CHECK_S / 2)  # it is there, and the same
            self._target.apply(ready)

    def turn(self, now: float) -> None:
        """Read the replay, and do what is due."""
        if self._socket is None:
            self._go_on_without(now)
            return
        self.more = False
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(self._socket) if self._replay is not None else None
            if frames is None:
                break
            self._answer(now, frames)
        else:
            self.more = True
        stream = self._stream
        if self._replay is not None:
            if now - self._replay.heard_at > REPLAY_TIMEOUT_S:
                self._give_up(now)
        elif stream.restarted:
            self._counters["restarts"] += 1
            self._begin_anew(now)
        elif stream.next_seq is not None and stream.missed(now):
            self._counters["gaps"] += 1
            self._ask(now, ReplayPurpose.FILL, stream.next_seq)
        elif now >= self._next_ask:
            if stream.next_seq is None:
                self._ask(now, ReplayPurpose.BEGIN, 0)
            else:
                self._ask(now, ReplayPurpose.CHECK, max(0, stream.next_seq - 1))

    def close(self) -> None:
        """The replay's socket is its own."""
        if self._socket is not None:
            self._socket.close()

    def _give_up(self, now: float) -> None:
        self._counters["replays_unanswered"] += 1
        self._socket.close()
        self._socket = self._connect()
        self._replay = None
        self._next_ask = now
        self._live = False
        self._unanswered += 1
        if self._unanswered == 2:
            self._target.clear()
            self._stream.stop()

    def _go_on_without(self, now: float) -> None:
        if self._stream.restarted or self._stream.missed(now):
            self._counters["restarts" if self._stream.restarted else "gaps"] += 1
            self._target.clear()
            self._target.apply(self._stream.skip(now))

    def _begin_anew(self, now: float) -> None:
        """Nothing that was known can be trusted."""
        self._target.clear()
        self._stream.stop()
        self._ask(now, ReplayPurpose.BEGIN, 0)

    def _ask(self, now: float, purpose: ReplayPurpose, first: int) -> None:
        self._replay = _ReplayRequest(purpose, now, now)
        self._next_ask = now + CHECK_S
        self._counters[f"replays_{purpose.value}"] += 1
        sockets.send(self._socket, b"", first.to_bytes(8, "big"))

    def _answer(self, now: float, frames: list[bytes]) -> None:
        replay = self._replay
        if len(frames) == 4:  # since 0.27 with the topic
            frames = [frames[0], *frames[2:]]
        if len(frames) == 3 and frames[1] == END:
            self._replay = None
            self._unanswered = 0
            self._live = True
            self._complete(now, replay)
            return
        try:
            seq, batch = self._reader.read(frames)
        except BadFrame:
            self._counters["malformed"] += 1
            return
        replay.heard_at = now
        replay.batches.append((seq, batch, hash(frames[2])))

    def _complete(self, now: float, replay: _ReplayRequest) -> None:
        stream, batches = self._stream, replay.batches
        if replay.purpose is ReplayPurpose.BEGIN:
            self._begin(now, replay)
            return
        if replay.purpose is ReplayPurpose.CHECK and stream.next_seq:
            same = bool(batches) and batches[0][2] == stream.content(batches[0][0])
            if not same:
                self._counters["restarts"] += 1
                self._begin_anew(now)
                return
        for seq, batch, content in batches:
            self._target.apply(stream.offer(now, seq, batch, content))
        if replay.purpose is ReplayPurpose.FILL and stream.missed(now):  # the replay does not have it either
            self._counters["replays_too_short"] += 1
            self._begin_anew(now)

    def _begin(self, now: float, replay: _ReplayRequest) -> None:
        """All that the replay holds, after the last gap in it."""
        batches = replay.batches
        for index in range(len(batches) - 1, 0, -1):
            if batches[index][0] != batches[index - 1][0] + 1:
                batches = batches[index:]
                break
        first = batches[0][0] if batches else 0
        if first:
            self._counters["incomplete"] += 1
        self._target.clear()
        self._target.apply(self._stream.start(now, first, replay.asked_at))
        for seq, batch, content in batches:
            self._target.apply(self._stream.offer(now, seq, batch, content))


def blocks_of(runs: list[m.BlockStored]) -> Blocks:
    """Block by block: its hash, its predecessor's, its tokens, its adapter."""
    for run in runs:
        parent, size, adapter = run.parent_block_hash, run.block_size, adapter_of(run)
        for number, block_hash in enumerate(run.block_hashes):
            yield block_hash, parent, run.token_ids[number * size:(number + 1) * size], adapter
            parent = block_hash
