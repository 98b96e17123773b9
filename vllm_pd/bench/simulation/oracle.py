# SPDX-License-Identifier: Apache-2.0
"""The prefix hits that a trace allows at all, computed offline: no router can beat this bound.

It pools the blocks of all workers into one cache, knows every later request, keeps what it likes, evicts what is needed
last, has each block the moment its request arrives, and may hit a block whose predecessors are gone. Routing over real
workers is worse for four reasons that the bound leaves out: prefixes that several workers must hold, caches that evict
what was used least recently, blocks that are not computed yet when the next request comes, and blocks that running
requests hold.

Why it is a bound: each use of a block after an earlier one is an interval in which the block must be kept for a hit. A
cache of N blocks keeps at most N at a time. So no cache has more hits than there can be intervals of which no more than
N overlap anywhere. Dropping the interval that ends last, wherever there are more than N, gives that greatest number
(Faigle and Nawijn, "Note on scheduling intervals on-line", Discrete Applied Mathematics 58, 1995; for pages it is the
rule of Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966). A
block is never needed before its predecessors. So a cache that drops the end of a prompt first never has a block without
its predecessors, and attains the bound.
"""
import heapq
from array import array
from collections.abc import Sequence

from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.bench.simulation.uses import BlockNames, BlockUses
from vllm_pd.router.index import PrefixIndex


def most_hits(uses: BlockUses, pool_blocks: int | None) -> int:
    """The most prompt blocks that a cache of `pool_blocks` (None: any number) can hit."""
    if pool_blocks is None:
        pool_blocks = uses.distinct
    next_uses = uses.next_uses()
    kept = array("i", [-1]) * uses.distinct  # by block: the request that needs it next, -1 where it is not kept
    furthest: list[int] = []  # heap: minus (that request times `distinct`, plus the block)
    held = hits = position = 0
    for blocks, prompt_blocks in uses:
        for block in blocks[:prompt_blocks]:
            if kept[block] >= 0:
                kept[block] = -1
                held -= 1
                hits += 1
        for block in blocks:
            needed = next_uses[position]
            position += 1
            if needed >= 0 and kept[block] != needed:
                held += kept[block] < 0
                kept[block] = needed
                heapq.heappush(furthest, -(needed * uses.distinct + block))
        while held > pool_blocks:
            needed, block = divmod(-heapq.heappop(furthest), uses.distinct)
            if kept[block] == needed:
                kept[block] = -1
                held -= 1
    return hits


def bound(trace: Sequence[Arrival], block_size: int, pool_blocks: int | None) -> float:
    """The share of the trace's prompt tokens that a clairvoyant pool of `pool_blocks` (None: any number) would hit."""
    hits = most_hits(block_uses(trace, block_size), pool_blocks)
    return hits * block_size / max(1, sum(len(arrival.prompt) for arrival in trace))


def footprint_blocks(trace: Sequence[Arrival], block_size: int) -> int:
    """The number of distinct blocks of a trace."""
    return block_uses(trace, block_size).distinct


def block_uses(trace: Sequence[Arrival], block_size: int) -> BlockUses:
    """The blocks of a trace's prompts and answers."""
    namer, names = PrefixIndex(block_size), BlockNames()
    for arrival in trace:
        # the key and value of the last token of an answer are never computed
        names.add(namer.hashes(arrival.prompt + arrival.answer[:-1]), len(arrival.prompt) // block_size)
    return names.uses()
