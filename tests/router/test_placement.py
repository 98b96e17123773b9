# SPDX-License-Identifier: Apache-2.0
"""The placement that the hit rates are measured against: what it reckons with, and that the search finds it."""
import itertools
import random
from collections import OrderedDict

import msgspec
import pytest

from vllm_pd.bench.simulation.placement import BlockRuns, PlacementSearch
from vllm_pd.bench.simulation.trace import Arrival, TraceConfig, make
from vllm_pd.router.index import PrefixIndex

SMALL = TraceConfig(conversations=40, system_tokens=50, document_tokens=200, system_prompts=2, documents=2)


def block_by_block(trace: list[Arrival], size: int, requests: list[int], cache_blocks: int) -> int:
    """What `Runs.hits` reckons with runs of blocks."""
    namer, hits = PrefixIndex(size), 0
    cache: OrderedDict[int, None] = OrderedDict()
    for request in requests:
        arrival = trace[request]
        names = namer.hashes(arrival.prompt + arrival.answer[:-1])
        hits += len(list(itertools.takewhile(cache.__contains__, names[:len(arrival.prompt) // size])))
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > cache_blocks:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cache_blocks", [0, 7, 150, 900, 10**6])
def test_runs_hit_as_blocks_do(seed, cache_blocks):
    trace = make(msgspec.structs.replace(SMALL, seed=seed))
    runs = BlockRuns.of(trace, 4)
    some = sorted(random.Random(seed).sample(range(len(trace)), len(trace) // 2))
    for requests in (range(len(trace)), some):
        assert runs.hits(requests, cache_blocks) == block_by_block(trace, 4, requests, cache_blocks)


def chats(*letters: str, times: int) -> list[Arrival]:
    """Conversations of one block each that come again and again, in turn; a block is one token."""
    return [Arrival(float(number), number % len(letters), 0, (ord(letters[number % len(letters)]), ), (0, ))
            for number in range(times * len(letters))]


def test_what_drives_each_other_out_is_kept_apart():
    """Five chats in two caches of two: three come in turn where there is room for two, unless all three go with one."""
    trace = chats(*"abcde", times=12)
    search = PlacementSearch(trace, 1, 2, [0] * len(trace), 2, seed=1)
    assert search.hits == 0
    placed = search.best(3000)
    runs = BlockRuns.of(trace, 1)
    hits = [runs.hits([number for number, worker in enumerate(placed) if worker == mine], 2) for mine in (0, 1)]
    assert sum(hits) >= 22, "what two blocks with one cache to themselves hit"


def test_the_start_is_the_least_that_is_found():
    trace = make(SMALL)
    start = [arrival.conversation % 3 for arrival in trace]
    search = PlacementSearch(trace, 4, 300, start, 3, seed=2)
    before = search.hits
    assert search.best(0) == start
    placed = search.best(200)
    found = PlacementSearch(trace, 4, 300, placed, 3, seed=2)
    assert found.hits >= before and search.hits == sum(
        search._runs.hits([number for number, worker in enumerate(search._placed) if worker == mine], 300)
        for mine in range(3)), "what is counted is what is placed"
    assert set(placed) <= {0, 1, 2} and len(placed) == len(trace)
