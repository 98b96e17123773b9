# SPDX-License-Identifier: Apache-2.0
"""Batches of events in their order, whatever the network does to them. Pure; the caller brings the time.

A batch that comes too early waits for those before it; if they do not come within `REORDER_S`, or too many wait, they
are *missed*, and somebody has to `start` the stream anew. One that has come before is a duplicate; one that has come
before with another content is from another life of the engine.
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


class BatchStream:
    """One per subscription. `next_seq` is the number of the batch that is due, None before `start`: then everything
    waits."""

    def __init__(self, counters: Counter[str]) -> None:
        self.next_seq: int | None = None
        self._counters = counters
        self._early: dict[int, _Early] = {}
        self._contents: OrderedDict[int, int] = OrderedDict()  # of the last batches, hashed
        self._waiting_since: float | None = None
        self._restarted = False

    def offer(self, now: float, seq: int, batch: EventBatch, content: int) -> list[EventBatch]:
        """What this batch lets through, in order. `content` is a hash of its bytes."""
        if self.next_seq is None or self._restarted:
            self._wait(now, seq, batch, content)
            return []
        if seq < self.next_seq:
            if self._contents.get(seq, content) == content:
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
        """Everything before `next_seq` is accounted for, by what was asked for then; the batches that follow at once.
        A batch that had come by then and has that number or a later one is from another life of the engine."""
        self._restarted = False
        self.next_seq = next_seq
        self._early = {seq: early for seq, early in self._early.items() if seq >= next_seq and early.came_at > asked_at}
        return self._follow(now)

    def stop(self) -> None:
        """Nothing that has come up to now is of use; everything waits for `start`."""
        self.next_seq = None
        self._early.clear()
        self._contents.clear()
        self._waiting_since = None
        self._restarted = False

    def skip(self, now: float) -> list[EventBatch]:
        """Give up what was missed: go on with the first batch that waits. What it lets through."""
        self._restarted = False
        if not self._early:
            self.next_seq = None
            return []
        self.next_seq = min(self._early)
        return self._follow(now)

    def missed(self, now: float) -> bool:
        """Whether batches have to be given up."""
        return self._waiting_since is not None and (now - self._waiting_since > REORDER_S
                                                    or len(self._early) >= MAX_AHEAD)

    @property
    def waits(self) -> bool:
        """Whether batches wait for others."""
        return self._waiting_since is not None

    @property
    def restarted(self) -> bool:
        """Whether a batch was seen that can't be of the same life of the engine."""
        return self._restarted

    def content(self, seq: int) -> int | None:
        """The hash that the batch of this number had, where it is known."""
        return self._contents.get(seq)

    def _wait(self, now: float, seq: int, batch: EventBatch, content: int) -> None:
        if len(self._early) >= MAX_AHEAD:
            self._early.pop(next(iter(self._early)))
        self._early[seq] = _Early(now, batch)
        self._remember(seq, content)
        if self._waiting_since is None:
            self._waiting_since = now

    def _follow(self, now: float) -> list[EventBatch]:
        ready = []
        while (early := self._early.pop(self.next_seq, None)) is not None:
            ready.append(early.batch)
            self.next_seq += 1
        self._waiting_since = now if self._early else None
        return ready

    def _remember(self, seq: int, content: int) -> None:
        self._contents[seq] = content
        while len(self._contents) > REMEMBERED:
            self._contents.popitem(last=False)
