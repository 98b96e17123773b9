# SPDX-License-Identifier: Apache-2.0
"""The prefix caches of a fleet, as far as a trace without times can tell: each request ends before the next one comes.

D's cache gets the blocks of prompt and answer, P's cache those of the prompt. Both evict what was used least recently,
and of that the end first, as vLLM does. Behind the Ds stands one P with a cache of the same size; it has seen every
prompt that lacked a block on its D.
"""
from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from vllm_pd.bench.simulation.uses import BlockUses

MAX_IMBALANCE = 1.25


class Routing(StrEnum):
    """How a request's D is chosen. PREFIX: the D that has most of the prompt; of equal ones, the one that has computed
    least. A D gets nothing while it has computed more than MAX_IMBALANCE times the mean and this prompt (after
    Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018)."""
    ROUND_ROBIN = "round_robin"
    PREFIX = "prefix"


class FleetHits(NamedTuple):
    """Hits in prompt blocks. `d_blocks`: on the Ds. `p_blocks`: what P's cache had beyond those. `imbalance`: the most
    prompt blocks that one D lacked, over the mean of all."""
    d_blocks: int
    p_blocks: int
    imbalance: float


class LruCache:
    """The block numbers in one cache of `size_blocks`. `distinct`: how many block numbers there are.

    Each use is appended to a log. A block is cached while its last use is in the part of the log that was not yet
    evicted. So a use takes 4 bytes, and a block 4 bytes."""

    def __init__(self, size_blocks: int, distinct: int) -> None:
        self._size_blocks = size_blocks
        self._last = array("i", [-1]) * distinct  # by block: where the log has its last use; -1: it is not cached
        self._log = array("i")
        self._evicted = 0  # how much of the log
        self._held = 0

    def hits(self, blocks: Sequence[int]) -> int:
        """How many blocks from the start are cached."""
        last = self._last
        return next((count for count, block in enumerate(blocks) if last[block] < 0), len(blocks))

    def use(self, blocks: Sequence[int]) -> None:
        """Caches the blocks of a request, and evicts for that what was used least recently."""
        last, log = self._last, self._log
        place = len(log)
        log.extend(reversed(blocks))  # the end is evicted first
        for block in reversed(blocks):
            self._held += last[block] < 0
            last[block] = place
            place += 1
        while self._held > self._size_blocks:
            block = log[self._evicted]
            if last[block] == self._evicted:
                last[block] = -1
                self._held -= 1
            self._evicted += 1


def replay(uses: BlockUses, engines: int, cache_blocks: int, routing: Routing) -> FleetHits:
    """The hits of `engines` Ds and one P, each with a cache of `cache_blocks`."""
    caches = [LruCache(cache_blocks, uses.distinct) for _ in range(engines)]
    prefill = LruCache(cache_blocks, uses.distinct)
    computed = [0] * engines
    d_blocks = p_blocks = 0
    for number, (blocks, prompt_blocks) in enumerate(uses):
        prompt = blocks[:prompt_blocks]
        chosen = number % engines
        if routing is Routing.PREFIX:
            chosen = _by_prefix(caches, computed, prompt)
        hits = caches[chosen].hits(prompt)
        caches[chosen].use(blocks)
        d_blocks += hits
        computed[chosen] += prompt_blocks - hits
        if hits < prompt_blocks:
            p_blocks += max(0, prefill.hits(prompt) - hits)
            prefill.use(prompt)
    return FleetHits(d_blocks, p_blocks, max(computed) * engines / max(1, sum(computed)))


def _by_prefix(caches: Sequence[LruCache], computed: Sequence[int], prompt: Sequence[int]) -> int:
    most = MAX_IMBALANCE * sum(computed) / len(caches) + len(prompt)
    open_to = [number for number, done in enumerate(computed) if done <= most]
    return min(open_to, key=lambda number: (-caches[number].hits(prompt), computed[number], number))
