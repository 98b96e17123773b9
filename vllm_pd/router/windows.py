# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt is a prefix hit at engines whose layers are in several KV cache groups.

A layer with full attention reads all blocks before a position. A layer with a sliding window reads only the last ones
before it, and a recurrent state is in the last one. So the first n blocks of a prompt are a hit where all groups with
full attention hold all of them, and each other group holds the last `reach` of them, or all where these are fewer. This
is what V1's `HybridKVCacheCoordinator.find_longest_cache_hit` finds.
"""
from collections.abc import Callable, Collection, Mapping


def longest_hits(lengths: Mapping[int, int], reaches: Collection[int],
                 lacks: Callable[[int, int], int]) -> dict[int, int]:
    """The longest hit of each of several engines. An engine is one bit; all lengths are in blocks, 1 or more.

    `lengths` maps a length to the engines whose groups with full attention hold exactly so many of the prompt's first
    blocks. `reaches` are those of the other groups of all these engines. `lacks(number, reach)` gives the engines that
    have a group with this reach which does not hold the prompt's block of this number, counted from 0. Returns a
    dictionary like `lengths` with the hits. Engines without a hit are not in it.

    The blocks are looked at from the last one to the first. Where an engine lacks a block that a hit of some length
    needs, each shorter hit that ends behind this block would need it, too. So the next possible hit ends before it.
    """
    hits: dict[int, int] = {}
    possible: dict[int, int] = {}  # length -> engines that lack no block looked at so far of those that it needs
    later = sorted(lengths)  # those that are not in `possible` yet
    at = 0
    while possible or later:
        if not possible:
            at = later[-1]
        if later and later[-1] == at:
            possible[at] = possible.get(at, 0) | lengths[later.pop()]
        if at == 0:
            break
        at -= 1
        fallen = 0
        for length in tuple(possible):
            lacking, is_over = 0, True
            for reach in reaches:
                if length - at <= reach:
                    lacking |= lacks(at, reach)
                    is_over = False
            if is_over:
                hits[length] = possible.pop(length)
            elif lacking := lacking & possible[length]:
                fallen |= lacking
                if lacking == possible[length]:
                    del possible[length]
                else:
                    possible[length] ^= lacking
        if fallen:
            possible[at] = fallen
    possible.pop(0, None)
    return hits | possible
