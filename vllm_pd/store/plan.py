# SPDX-License-Identifier: Apache-2.0
"""What an engine's scheduler asks of the store, pure: which blocks of a request to load, and which to put after a step.

Life of a request here: it is `added`; each time that it could start, `loadable_tokens` tells how much of it the store
has. When it has its blocks, `loads` names them for the workers, which load all of them or report that they failed: then
the request starts anew and is not offered a load again. After each step `puts` names the blocks that this step filled.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class NamedBlock(NamedTuple):
    """A block by the chain hash of its tokens, and where it is in this engine's cache."""
    name: bytes
    block_id: int


@dataclass
class _Tracked:
    put_blocks: int = 0  # of its first blocks, how many are in the store as far as is known
    first_load: int = 0  # the block that a load begins with
    loads: bool = True


class StorePlan:
    """The requests of one engine. All counts are in tokens or blocks, from the beginning of the request."""

    def __init__(self, block_size: int, contains: Callable[[bytes], bool]) -> None:
        """`block_size` in tokens. `contains`: whether the store seems to have a block with this name."""
        self._block_size = block_size
        self._contains = contains
        self._requests: dict[str, _Tracked] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request_id: str) -> None:
        """A request whose KV follows from its tokens alone has come."""
        self._requests[request_id] = _Tracked()

    def end(self, request_id: str) -> None:
        """It has ended."""
        self._requests.pop(request_id, None)

    def failed(self, request_id: str) -> None:
        """Its load failed."""
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.loads = False

    def loadable_tokens(self, request_id: str, names: Sequence[bytes], tokens: int, computed_tokens: int) -> int:
        """How many tokens after the first `computed_tokens` the store seems to have: whole blocks, and not the last of
        the request's `tokens` tokens, which is always computed. `names`: those of the request's full blocks."""
        tracked = self._requests.get(request_id)
        if tracked is None or not tracked.loads or computed_tokens % self._block_size:
            return 0
        first, last = computed_tokens // self._block_size, (tokens - 1) // self._block_size
        found = first
        while found < min(last, len(names)) and self._contains(names[found]):
            found += 1
        tracked.first_load = first
        return (found - first) * self._block_size

    def loads(self, request_id: str, names: Sequence[bytes], block_ids: Sequence[int],
              tokens: int) -> list[NamedBlock]:
        """The blocks of a load of `tokens` tokens, as `loadable_tokens` has answered last for this request.
        `block_ids`: all its blocks, from its first token on."""
        first = self._requests[request_id].first_load
        last = first + tokens // self._block_size
        return [NamedBlock(names[index], block_ids[index]) for index in range(first, last)]

    def puts(self, request_id: str, names: Sequence[bytes], find_blocks: Callable[[], Sequence[int]],
             computed_tokens: int) -> list[NamedBlock]:
        """The blocks to put when `computed_tokens` tokens are computed. A block whose tokens are not all known yet has
        no name, and is put later. `find_blocks` gives all blocks of the request; it is called only if needed."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return []
        first, full = tracked.put_blocks, min(computed_tokens // self._block_size, len(names))
        if full <= first:
            return []
        tracked.put_blocks, block_ids = full, find_blocks()
        return [NamedBlock(names[index], block_ids[index]) for index in range(first, full)]
