# SPDX-License-Identifier: Apache-2.0
"""The prefix hits that a trace allows at all, computed offline: no router can beat this bound.

It pools the blocks of all workers into one cache, knows every later request, keeps what it likes, evicts what is needed
last, has each block the moment its request arrives, and may hit a block whose predecessors are gone. Each use of a
block after an earlier one is an interval in which the block must be kept. The bound is the greatest number of such
intervals of which no more than the pool's size overlap anywhere; evicting what is needed last attains it (the classic
interval argument). Routing over real workers is worse for four reasons that the bound leaves out: prefixes that several
workers must hold, caches that evict what was used least recently, blocks that are not computed yet when the next
request comes, and blocks that running requests hold.
"""
import heapq
from collections.abc import Sequence

from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.router.index import PrefixIndex


def bound(trace: Sequence[Arrival], block_size: int, pool_blocks: int | None) -> float:
    """The share of the trace's prompt tokens that a clairvoyant pool of `pool_blocks` (None: any number) would hit."""
    namer = PrefixIndex(block_size)
    uses = []  # per request: the prompt's blocks, and how many its answer adds to them
    for arrival in trace:
        # the key and value of the last token of an answer are never computed
        names = namer.hashes(arrival.prompt + arrival.answer[:-1])
        uses.append((names, len(arrival.prompt) // block_size))
    later: dict[int, int] = {}
    next_use: list[list[int | None]] = [[] for _ in trace]
    for number in range(len(uses) - 1, -1, -1):
        names, prompt_blocks = uses[number]
        next_use[number] = [later.get(name) for name in names]
        for name in names[:prompt_blocks]:
            later[name] = number
    kept: dict[int, int] = {}  # name -> the request that needs it next
    furthest: list[tuple[int, int]] = []  # heap: minus that request, name
    hits = 0
    for number, (names, prompt_blocks) in enumerate(uses):
        hits += sum(kept.pop(name, None) is not None for name in names[:prompt_blocks])
        for name, needed in zip(names, next_use[number], strict=True):
            if needed is not None and kept.get(name) != needed:
                kept[name] = needed
                heapq.heappush(furthest, (-needed, name))
        while pool_blocks is not None and len(kept) > pool_blocks:
            needed, name = heapq.heappop(furthest)
            if kept.get(name) == -needed:
                del kept[name]
    return hits * block_size / max(1, sum(len(arrival.prompt) for arrival in trace))


def footprint_blocks(trace: Sequence[Arrival], block_size: int) -> int:
    """The number of distinct blocks of a trace."""
    namer = PrefixIndex(block_size)
    return len({name for arrival in trace for name in namer.hashes(arrival.prompt + arrival.answer[:-1])})
