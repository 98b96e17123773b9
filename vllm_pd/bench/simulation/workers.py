# SPDX-License-Identifier: Apache-2.0
"""Simulated workers: V0's real block allocator, with its real eviction, under a simulated clock.

A worker prefills one prompt at a time, first come first served, at its configured speed, and decodes all its requests
at a fixed pace. A prompt begins when the blocks for it and for its whole answer are free; what is cached by then is its
hit. Its blocks become hits for others when the prefill is over, those of the answer when the answer is. Everything else
is the allocator's decision: which block is found, shared, kept, evicted.
"""
from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.errors import ConfigError
from vllm_pd.events.messages import EngineLoad

if TYPE_CHECKING:
    from vllm.core.block.interfaces import Block
    from vllm.core.block.prefix_caching_block import PrefixCachingBlockAllocator


class SimEvents:
    """Turns the allocator's calls into events of whole chains: `stored(hashes, parent, token_ids)` and
    `removed(hashes)`. (An engine has `vllm_pd.events.sink` here, which waits for its steps and its other thread.)"""

    def __init__(self, stored: Callable[[list[int], int | None, list[int]], None],
                 removed: Callable[[list[int]], None]):
        self._stored = stored
        self._removed = removed
        self._registered: dict[int, Block] = {}  # by block id, until it is computed

    def registered(self, block: Block) -> None:
        """Called by the allocator when a block is full."""
        self._registered[block.block_id] = block

    def computed(self, block_ids: set[int]) -> None:
        """Called by the allocator when the data of these blocks is there."""
        chains: list[list[Block]] = []
        for block_id in [known for known in self._registered if known in block_ids]:
            block = self._registered.pop(block_id)
            if chains and chains[-1][-1] is block.prev_block:
                chains[-1].append(block)
            else:
                chains.append([block])
        for chain in chains:
            first = chain[0].prev_block
            self._stored([block.content_hash for block in chain], first.content_hash if first else None,
                         [token for block in chain for token in block.token_ids])

    def removed(self, content_hash: int, block_id: int) -> None:
        """Called by the allocator when a block is evicted."""
        if self._registered.pop(block_id, None) is None:
            self._removed([content_hash])

    def cleared(self) -> None:
        """Called by the allocator when it is reset, which never happens here."""


class SimSpeed(msgspec.Struct, frozen=True):
    """How fast a worker is."""
    prefill_tokens_per_s: float = 8000.0
    decode_s_per_token: float = 0.02


@dataclass
class SimRun:
    """One request on its worker."""
    arrival: Arrival
    given_tokens: int = 0  # that are not computed here, cached or not
    hit_tokens: int = 0
    first_token_s: float = 0.0
    blocks: list = field(default_factory=list)
    reserved_blocks: int = 0


class SimWorker:
    """One worker. Times are simulated seconds, and those given to `advance` must not decrease. Its events are the calls
    `stored(worker, hashes, parent, token_ids, at_s)` and `removed(worker, hashes, at_s)`. Two more calls may be set:
    `hand_over(worker, run, at_s)`, before a prompt is computed; where it returns True, the prompt is not computed here,
    until `arrived`. `on_end(worker, run, at_s)`, when a request has ended."""

    def __init__(self, name: str, blocks: int, block_size: int, speed: SimSpeed, stored: Callable, removed: Callable):
        self.name = name
        self.speed = speed
        self.done: list[SimRun] = []
        self.hand_over: Callable[[SimWorker, SimRun, float], bool] | None = None
        self.on_end: Callable[[SimWorker, SimRun, float], None] | None = None
        self._block_size = block_size
        self._now_s = 0.0
        self._waiting: deque[SimRun] = deque()
        self._prefilling: SimRun | None = None
        self._decoding: list[tuple[float, int, SimRun]] = []  # heap: end, number, run
        self._count = 0
        self._remote = 0
        self._reserved_blocks = 0
        self.allocator = _new_allocator(blocks, block_size)
        self.allocator.event_sink = SimEvents(lambda *what: stored(self, *what, self._now_s),
                                              lambda hashes: removed(self, hashes, self._now_s))

    def submit(self, arrival: Arrival, at_s: float, given_tokens: int = 0) -> None:
        """Takes a request, with so many tokens of its prompt that need not be computed. Raises ValueError if it can
        never fit."""
        if blocks_of(arrival, self._block_size) > self.allocator.get_num_total_blocks():
            raise ValueError(f"{len(arrival.prompt)} prompt tokens don't fit {self.name}")
        self.advance(at_s)
        self._waiting.append(SimRun(arrival, given_tokens))
        self._begin()

    def arrived(self, run: SimRun, at_s: float) -> None:
        """The prompt of a run that was handed over is computed."""
        self.advance(at_s)
        self._remote -= 1
        run.first_token_s = at_s
        self._decode(run)
        self._begin()

    def advance(self, until_s: float) -> None:
        """Simulates until `until_s`."""
        while (next_s := self.next_s()) is not None and next_s <= until_s:
            self._now_s = max(self._now_s, next_s)
            if self._prefilling is not None and self._prefilling.first_token_s <= next_s:
                self._end_prefill()
            else:
                self._end(heapq.heappop(self._decoding)[2])
            self._begin()
        self._now_s = max(self._now_s, until_s)

    def next_s(self) -> float | None:
        """When the next prefill or decode ends; None if nothing runs."""
        times = [self._decoding[0][0]] if self._decoding else []
        if self._prefilling is not None:
            times.append(self._prefilling.first_token_s)
        return min(times, default=None)

    def load(self) -> EngineLoad:
        """The load now. A prompt in prefill counts in full until it is done, as in an engine without chunks."""
        queued = sum(len(run.arrival.prompt) for run in self._waiting)
        if self._prefilling is not None:
            queued += len(self._prefilling.arrival.prompt) - self._prefilling.hit_tokens
        total = self.allocator.get_num_total_blocks()
        used = total - self.allocator.get_num_free_blocks() + self._reserved_blocks
        return EngineLoad(remote_prefilling=self._remote, queued_prefill_tokens=queued, used_blocks=used,
                          total_blocks=total)

    def table(self) -> set[int]:
        """The allocator's hashes of the blocks that it holds and that are computed."""
        return {content_hash for content_hash, block_id in self.allocator._cached_blocks.items()
                if self.allocator.block_is_computed(block_id)}

    def _begin(self) -> None:
        while self._prefilling is None and self._waiting:
            run = self._allocate()
            if run is None:
                return
            if self.hand_over is not None and self.hand_over(self, run, self._now_s):
                self._remote += 1
                continue
            left = max(1, len(run.arrival.prompt) - max(run.hit_tokens, run.given_tokens))
            run.first_token_s = self._now_s + left / self.speed.prefill_tokens_per_s
            self._prefilling = run

    def _allocate(self) -> SimRun | None:
        """The first that waits, with the blocks of its prompt; None where there are not enough."""
        run = self._waiting[0]
        needed = blocks_of(run.arrival, self._block_size)
        if self.allocator.get_num_free_blocks() - self._reserved_blocks < needed:
            return None
        self._waiting.popleft()
        prompt = run.arrival.prompt
        held = True
        for start in range(0, len(prompt) - self._block_size + 1, self._block_size):
            block = self.allocator.allocate_immutable_block(run.blocks[-1] if run.blocks else None,
                                                            list(prompt[start:start + self._block_size]))
            run.blocks.append(block)
            held = held and self.allocator.block_is_computed(block.block_id)
            run.hit_tokens += self._block_size if held else 0
        run.reserved_blocks = needed - len(run.blocks)
        self._reserved_blocks += run.reserved_blocks
        self.allocator.mark_blocks_as_accessed([block.block_id for block in run.blocks], self._now_s)
        return run

    def _end_prefill(self) -> None:
        run, self._prefilling = self._prefilling, None
        self._decode(run)

    def _decode(self, run: SimRun) -> None:
        """The prompt's KV is there."""
        self.allocator.mark_blocks_as_computed([block.block_id for block in run.blocks])
        self._count += 1
        heapq.heappush(self._decoding, (self._now_s + len(run.arrival.answer) * self.speed.decode_s_per_token,
                                        self._count, run))

    def _end(self, run: SimRun) -> None:
        """The answer is complete: its full blocks become hits for others, and all of the request's blocks are freed.
        Its last token has no KV, because nothing was computed from it."""
        self._reserved_blocks -= run.reserved_blocks
        text = run.arrival.prompt + run.arrival.answer[:-1]
        for start in range(len(run.blocks) * self._block_size, len(text) - self._block_size + 1, self._block_size):
            run.blocks.append(self.allocator.allocate_immutable_block(
                run.blocks[-1] if run.blocks else None, list(text[start:start + self._block_size])))
        self.allocator.mark_blocks_as_accessed([block.block_id for block in run.blocks], self._now_s)
        self.allocator.mark_blocks_as_computed([block.block_id for block in run.blocks])
        for block in run.blocks:
            self.allocator.free(block)
        run.blocks.clear()
        self.done.append(run)
        if self.on_end is not None:
            self.on_end(self, run, self._now_s)


def blocks_of(arrival: Arrival, block_size: int) -> int:
    """How many blocks a request needs, with its whole answer."""
    return (len(arrival.prompt) + len(arrival.answer)) // block_size + 1


def require_fit(key: str, workers: int, blocks: float, longest: int) -> None:
    """Raises ConfigError naming `key` where a request that needs `longest` blocks never fits one of `workers`, which
    have so many `blocks` together."""
    if round(blocks / workers) < longest:
        raise ConfigError(key, workers, f"write at most {int(blocks // longest)}: the longest request of the trace "
                          f"needs {longest} of the {blocks:.0f} blocks that all of them have together")


def _new_allocator(blocks: int, block_size: int) -> PrefixCachingBlockAllocator:
    """V0's block allocator. Raises ConfigError where there is none."""
    try:
        from vllm.core.block.prefix_caching_block import PrefixCachingBlockAllocator
    except ModuleNotFoundError as error:
        raise ConfigError("vllm", None, "simulated workers need the block allocator of engine V0: install the patched "
                          "vllm of this project (`. scripts/env.sh`)") from error
    return PrefixCachingBlockAllocator(blocks, block_size)
