# SPDX-License-Identifier: Apache-2.0
"""The side socket of an engine: its subscribers, and the reports and snapshots sent to them. Belongs to one thread, and
never waits.

Everything is bounded: the number of subscribers, the messages queued for one that does not read, and the parts of a
snapshot made in one turn. When a subscriber's queue is full, reports to it are dropped. A part of a snapshot is kept
until there is room; after `SUBSCRIPTION_S` without room the answer is dropped.
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
from vllm_pd.rpc.poller import SocketPoller, receive_batch

MAX_SUBSCRIBERS = 256
MESSAGES_A_TURN = 64
PARTS_A_TURN = 4


@dataclass
class _SnapshotAnswer:
    """A snapshot that is being sent to one subscriber."""
    number: int
    epoch: str
    next_seq: int
    total_blocks: int
    parts: Iterator[list[m.BlockStored]]
    moved_at: float  # when the last part was sent
    sent_blocks: int = 0
    held: m.SnapshotPart | None = None  # a part for which there was no room


class SidePort:
    """The side socket, bound to `bind`; `tcp://HOST:0` takes a free port. Raises zmq.ZMQError where that fails."""

    def __init__(self, bind: str, keys: Keys | None = None) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self._context = zmq.Context()
        self._poller = SocketPoller(Gate(self._context, keys) if keys is not None else None)
        self.waker = self._poller.waker
        try:
            self._socket = sockets.server(self._context, bind, keys)
        except zmq.ZMQError:
            self._end()
            raise
        self._poller.watch(self._socket)
        self.address = sockets.endpoint(self._socket)
        self._subscribers: dict[bytes, float] = {}  # routing id -> until when
        self._reported_to: set[bytes] = set()  # subscribers that have been sent a report
        self._answers: dict[bytes, _SnapshotAnswer] = {}

    def wait(self, timeout_s: float) -> None:
        """Sleep until `turn` has something to read or `waker` is set, at most for `timeout_s`."""
        self._poller.wait(timeout_s)

    def turn(self, now: float, journal: EventJournal, epoch: str, next_seq: int) -> bool:
        """Read messages, and send further parts of snapshots. `journal` must be in its state after the batches before
        `next_seq`. Returns whether there is more to do at once, which is False also where there is no room to send."""
        batch = list(receive_batch(self._socket, MESSAGES_A_TURN))
        for frames in batch:
            self._handle(now, frames, journal, epoch, next_seq)
        if len(batch) == MESSAGES_A_TURN:
            return True
        for peer in [peer for peer, until in self._subscribers.items() if until < now]:
            self._forget(peer)
        return any([self._send_parts(now, peer) for peer in list(self._answers)])

    def has_new_subscriber(self) -> bool:
        """Whether there is a subscriber that was not sent a report yet."""
        return len(self._reported_to) < len(self._subscribers)

    def send_report(self, report: m.EngineReport) -> None:
        """Send a report to all subscribers."""
        if not self._subscribers:
            return
        frame = m.encode(report)
        for peer in list(self._subscribers):
            self._send(peer, frame)
        self._reported_to = set(self._subscribers)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._context.closed:
            self._socket.close()
            self._end()

    def _end(self) -> None:
        self._poller.close()
        self._context.term()

    def _handle(self, now: float, frames: list[bytes], journal: EventJournal, epoch: str, next_seq: int) -> None:
        """A message of a subscriber; it begins or renews its subscription. A snapshot request replaces the answer to an
        earlier one that is still being sent. Messages that are bad or not expected, and new subscribers beyond
        MAX_SUBSCRIBERS, are counted."""
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

    def _send_parts(self, now: float, peer: bytes) -> bool:
        """Send some parts of a snapshot. Returns whether there are more and room for them."""
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
        self._reported_to.discard(peer)
