# SPDX-License-Identifier: Apache-2.0
"""The side socket of an engine: who listens, and what they are sent. Belongs to one thread, and never waits.

Everything is bounded: the number of subscribers, what is queued for one that does not read (the socket drops pulses
beyond that; a part of a snapshot is kept until there is room, and the answer dropped where there is none for
`SUBSCRIPTION_S`), and how much of a snapshot is made in one turn.
"""
import collections
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.journal import EventJournal, runs
from vllm_pd.rpc import sockets
from vllm_pd.rpc.codec import BadFrame
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys

MAX_SUBSCRIBERS = 256
MESSAGES_A_TURN = 64
PARTS_A_TURN = 4


@dataclass
class _SnapshotAnswer:
    """A snapshot that is being sent."""
    number: int
    epoch: str
    next_seq: int
    total_blocks: int
    parts: Iterator[list[m.BlockStored]]
    moved_at: float  # when there was room last
    sent_blocks: int = 0
    held: m.SnapshotPart | None = None  # the part that there was no room for


class SidePort:
    """Bound where `bind` says (`tcp://HOST:0` takes a free port). Raises zmq.ZMQError where that can't be had."""

    def __init__(self, bind: str, keys: Keys | None = None) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self._context = zmq.Context()
        self._gate = Gate(self._context, keys) if keys is not None else None
        try:
            self._socket = sockets.server(self._context, bind, keys)
        except zmq.ZMQError:
            self._end()
            raise
        self.address = sockets.endpoint(self._socket)
        self._subscribers: dict[bytes, float] = {}  # until when
        self._greeted: set[bytes] = set()  # those that have had a pulse
        self._answers: dict[bytes, _SnapshotAnswer] = {}

    def watch(self, poller: zmq.Poller) -> None:
        """Have `poller` wake when `turn` has something to read."""
        poller.register(self._socket, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)

    def turn(self, now: float, journal: EventJournal, epoch: str, next_seq: int) -> bool:
        """Read what has come and go on with what was asked for. `journal` must be as the batches before `next_seq` have
        left it. Whether there is more to do at once. It is False, too, where there is no room for more."""
        if self._gate is not None:
            self._gate.answer()
        for _ in range(MESSAGES_A_TURN):
            frames = sockets.receive(self._socket)
            if frames is None:
                break
            self._handle(now, frames, journal, epoch, next_seq)
        else:
            return True
        for peer in [peer for peer, until in self._subscribers.items() if until < now]:
            self._forget(peer)
        return any([self._go_on(now, peer) for peer in list(self._answers)])

    def has_new(self) -> bool:
        """Whether somebody has subscribed who has had no pulse yet."""
        return len(self._greeted) < len(self._subscribers)

    def pulse(self, pulse: m.EngineReport) -> None:
        """Tell all subscribers."""
        if not self._subscribers:
            return
        frame = m.encode(pulse)
        for peer in list(self._subscribers):
            self._send(peer, frame)
        self._greeted = set(self._subscribers)

    def close(self) -> None:
        """Hang up. Idempotent."""
        if not self._context.closed:
            self._socket.close()
            self._end()

    def _end(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _handle(self, now: float, frames: list[bytes], journal: EventJournal, epoch: str, next_seq: int) -> None:
        peer = frames[0]
        try:
            message = m.decode(frames[1:])
        except BadFrame as fault:
            self.counters[f"frame_{fault.fault.value}"] += 1
            return
        if isinstance(message, m.Subscribe | m.SnapshotRequest):
            if peer not in self._subscribers and len(self._subscribers) >= MAX_SUBSCRIBERS:
                self.counters["subscriber_refused"] += 1
                return
            self._subscribers[peer] = now + m.SUBSCRIPTION_S
        else:
            self.counters["frame_unexpected"] += 1
        if isinstance(message, m.SnapshotRequest):
            self.counters["snapshots"] += 1
            blocks = journal.blocks()
            self._answers[peer] = _SnapshotAnswer(message.number, epoch, next_seq, len(blocks),
                                          runs(blocks, journal.block_size, m.PART_BLOCKS), now)

    def _go_on(self, now: float, peer: bytes) -> bool:
        """Whether there is more to send, and room for it."""
        answer = self._answers[peer]
        for _ in range(PARTS_A_TURN):
            part = answer.held or m.SnapshotPart(answer.number, answer.epoch, answer.next_seq, answer.sent_blocks,
                                             answer.total_blocks, next(answer.parts, []))
            result = sockets.send(self._socket, peer, m.encode(part))
            if result is sockets.SendResult.FULL:
                answer.held = part
                if now - answer.moved_at > m.SUBSCRIPTION_S:
                    self.counters["side_dropped"] += 1
                    del self._answers[peer]
                return False
            if result is sockets.SendResult.UNREACHABLE:
                self._forget(peer)
                return False
            answer.held, answer.moved_at = None, now
            answer.sent_blocks += sum(len(run.block_hashes) for run in part.runs)
            if answer.sent_blocks >= answer.total_blocks:
                del self._answers[peer]
                return False
        return True

    def _send(self, peer: bytes, frame: bytes) -> None:
        result = sockets.send(self._socket, peer, frame)
        if result is sockets.SendResult.UNREACHABLE:
            self._forget(peer)
        elif result is sockets.SendResult.FULL:
            self.counters["side_dropped"] += 1

    def _forget(self, peer: bytes) -> None:
        self._subscribers.pop(peer, None)
        self._answers.pop(peer, None)
        self._greeted.discard(peer)
