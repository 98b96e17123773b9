# SPDX-License-Identifier: Apache-2.0
"""Puts batches of events in order, although the network may reorder, repeat or lose them. Pure; time is passed in.

A batch that comes too early waits for those before it. If they don't come within `REORDER_S`, or too many batches wait,
they are *missed*, and the caller must `start` the stream again. A number that has come before is a duplicate; with
another content it shows that the engine has restarted. So does, where nothing else shows a restart, a number below all
that are remembered.
"""
from collections import Counter, OrderedDict
from dataclasses import dataclass

from vllm_pd.events.messages import EventBatch

REORDER_S = 0.05
MAX_AHEAD = 4096
REMEMBERED = 1024


@dataclass(frozen=True)
class _Early:
    came_at: float
    batch: EventBatch
    content: int


class BatchStream:
    """One per subscription. `next_seq` is the number of the next batch, None before `start`: then all batches wait.
    `old_is_restart`: a number below the REMEMBERED last ones is no duplicate, but of another life of the engine."""

    def __init__(self, counters: Counter[str], old_is_restart: bool = False) -> None:
        self.next_seq: int | None = None
        self._old_is_restart = old_is_restart
        self._counters = counters
        self._early: dict[int, _Early] = {}
        self._contents: OrderedDict[int, int] = OrderedDict()  # number -> hash, of the last batches in order
        self._waiting_since: float | None = None
        self._restarted = False

    def offer(self, now: float, seq: int, batch: EventBatch, content: int) -> list[EventBatch]:
        """A batch has come. Returns the batches that are now in order. `content` is a hash of its bytes."""
        if self.next_seq is None or self._restarted:
            self._wait(now, seq, batch, content)
            return []
        if seq < self.next_seq:
            is_old = self._old_is_restart and seq < min(self._contents, default=seq)
            if self._contents.get(seq, content) == content and not is_old:
                self._counters["duplicates"] += 1
            else:
                self._restarted = True
                self._early.clear()
                self._wait(now, seq, batch, content)
            return []
        if seq > self.next_seq:
            self._counters["duplicates" if seq in self._early else "early"] += 1
            self._wait(now, seq, batch, content)
            return []
        self._remember(seq, content)
        self.next_seq += 1
        return [batch, *self._follow(now)]

    def start(self, now: float, next_seq: int, asked_at: float) -> list[EventBatch]:
        """The caller has the state after all batches before `next_seq`, in answer to a request sent at `asked_at`.
        Returns the waiting batches that follow. Of those with such numbers, batches that came before `asked_at` are of
        an earlier life of the engine and are dropped."""
        self._restarted = False
        self.next_seq = next_seq
        self._early = {seq: early for seq, early in self._early.items() if seq >= next_seq and early.came_at > asked_at}
        return self._follow(now)

    def stop(self) -> None:
        """Drop all batches that have come. Later ones wait for `start`."""
        self.next_seq = None
        self._early.clear()
        self._contents.clear()
        self._waiting_since = None
        self._restarted = False

    def skip(self, now: float) -> list[EventBatch]:
        """Give up missed batches and go on with the first waiting one. Returns the batches that are now in order."""
        self._restarted = False
        if not self._early:
            self.next_seq = None
            return []
        self.next_seq = min(self._early)
        return self._follow(now)

    def missed(self, now: float) -> bool:
        """Whether batches were missed."""
        return self._waiting_since is not None and (now - self._waiting_since > REORDER_S
                                                    or len(self._early) >= MAX_AHEAD)

    @property
    def waits(self) -> bool:
        """Whether batches wait for others."""
        return self._waiting_since is not None

    @property
    def restarted(self) -> bool:
        """Whether a batch came that can only be of another life of the engine."""
        return self._restarted

    def content(self, seq: int) -> int | None:
        """The hash of the batch with this number, which may still wait; None where it is not known."""
        early = self._early.get(seq)
        return self._contents.get(seq) if early is None else early.content

    def _wait(self, now: float, seq: int, batch: EventBatch, content: int) -> None:
        if len(self._early) >= MAX_AHEAD:
            self._early.pop(next(iter(self._early)))
        self._early[seq] = _Early(now, batch, content)
        if self._waiting_since is None:
            self._waiting_since = now

    def _follow(self, now: float) -> list[EventBatch]:
        ready = []
        while (early := self._early.pop(self.next_seq, None)) is not None:
            ready.append(early.batch)
            self._remember(self.next_seq, early.content)
            self.next_seq += 1
        self._waiting_since = now if self._early else None
        return ready

    def _remember(self, seq: int, content: int) -> None:
        self._contents[seq] = content
        self._contents.move_to_end(seq)
        while len(self._contents) > REMEMBERED:
            self._contents.popitem(last=False)
