# SPDX-License-Identifier: Apache-2.0
"""What an engine's scheduler asks of the store, pure: which blocks of a request to load, and which to put after a step.

Life of a request here: it is `added`; each time that it could start, `loadable_tokens` tells how much of it the store
has. V1 asks that about the head of its queue in each step, and to look up all its blocks takes long; so what was found
counts for COUNT_S seconds. When it has its blocks, `loads` names them for the workers, which load all of them or report
that they failed: then the request starts anew and is not offered a load again. After each step `puts` names the blocks
that this step filled.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COUNT_S = 1.0
LATE_BYTES = 64 << 20  # put with one step of what earlier steps did not compute, as a prompt that came from a peer


class NamedBlock(NamedTuple):
    """A block by the chain hash of its tokens, and where it is in this engine's cache."""
    name: bytes
    block_id: int


class _Found(NamedTuple):
    """What the store was found to have, at `at_s`, of a request of `tokens` tokens after its `computed_tokens`."""
    tokens: int
    computed_tokens: int
    loadable_tokens: int
    at_s: float


@dataclass
class _Tracked:
    found: _Found | None = None
    put_blocks: int = 0  # of its first blocks, how many are in the store as far as is known
    first_load: int = 0  # the block that a load begins with
    loaded: range = range(0)  # the blocks of its load, unless that failed: the store has them
    loads: bool = True


class StorePlan:
    """The requests of one engine. All counts are in tokens or blocks, from the beginning of the request."""

    def __init__(self, block_size: int, contains: Callable[[bytes], bool], late_blocks: int,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`block_size` in tokens. `contains`: whether the store seems to have a block with this name. `late_blocks`: of
        those that earlier steps could have put, how many are put with one step: where the step's thread copies them,
        no more than take it a moment."""
        self._block_size = block_size
        self._contains = contains
        self._clock = clock
        self._late_blocks = self._late_left = late_blocks
        self._left: int | None = None  # of all that are put with this step; None: as many as there are
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
            tracked.loads, tracked.loaded = False, range(0)

    def first_name(self, request_id: str, names: Sequence[bytes], tokens: int, computed_tokens: int) -> bytes | None:
        """The name of the block after the first `computed_tokens` tokens; None where a load must not begin with it. As
        `loadable_tokens`, but the store is not asked."""
        tracked = self._requests.get(request_id)
        if tracked is None or not tracked.loads or computed_tokens % self._block_size:
            return None
        first, last = computed_tokens // self._block_size, (tokens - 1) // self._block_size
        return names[first] if first < min(last, len(names)) else None

    def loadable_tokens(self, request_id: str, names: Sequence[bytes], tokens: int, computed_tokens: int) -> int:
        """How many tokens after the first `computed_tokens` the store seems to have: whole blocks, and not the last of
        the request's `tokens` tokens, which is always computed. `names`: those of the request's full blocks."""
        if self.first_name(request_id, names, tokens, computed_tokens) is None:
            return 0
        tracked, now = self._requests[request_id], self._clock()
        known = tracked.found
        if (known is not None and known[:2] == (tokens, computed_tokens) and known.loadable_tokens
                and now - known.at_s < COUNT_S):
            return known.loadable_tokens
        first, last = computed_tokens // self._block_size, (tokens - 1) // self._block_size
        found = first
        while found < min(last, len(names)) and self._contains(names[found]):
            found += 1
        tracked.first_load = first
        tracked.found = _Found(tokens, computed_tokens, (found - first) * self._block_size, now)
        return tracked.found.loadable_tokens

    def absent_names(self, request_id: str, names: Sequence[bytes], tokens: int,
                     computed_tokens: int) -> Sequence[bytes]:
        """The names of the blocks that follow those of `loadable_tokens`, as far as a load could have them. The store
        is looked at anew."""
        if self.first_name(request_id, names, tokens, computed_tokens) is None:
            return ()
        self._requests[request_id].found = None
        found = self.loadable_tokens(request_id, names, tokens, computed_tokens)
        return names[(computed_tokens + found) // self._block_size:(tokens - 1) // self._block_size]

    def look_anew(self, request_id: str) -> None:
        """What the store was found to have of it does not count any more."""
        if (tracked := self._requests.get(request_id)) is not None:
            tracked.found = None

    def loads(self, request_id: str, names: Sequence[bytes], block_ids: Sequence[int],
              tokens: int) -> list[NamedBlock]:
        """The blocks of a load of `tokens` tokens, as `loadable_tokens` has answered last for this request.
        `block_ids`: all its blocks, from its first token on."""
        tracked = self._requests[request_id]
        tracked.loaded = range(tracked.first_load, tracked.first_load + tokens // self._block_size)
        return [NamedBlock(names[index], block_ids[index]) for index in tracked.loaded]

    def begin_step(self, most: int | None = None) -> None:
        """The `puts` that follow are those of one step. `most`: how many blocks they may name together."""
        self._late_left, self._left = self._late_blocks, most

    def puts(self, request_id: str, names: Sequence[bytes], find_blocks: Callable[[], Sequence[int]],
             before_tokens: int, computed_tokens: int) -> list[NamedBlock]:
        """The blocks to put after a step that brings the request from `before_tokens` computed tokens to
        `computed_tokens`: those that it fills; of earlier ones, which came from a peer or did not fit, at most
        `late_blocks` a step; and of all together at most `most` of `begin_step`. The others are put with later steps. A
        block whose tokens are not all known yet has no name, and is put later, too. `find_blocks` gives all blocks of
        the request; it is called only if needed."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return []
        first, full = tracked.put_blocks, min(computed_tokens // self._block_size, len(names))
        if full <= first:
            return []
        missing = [index for index in range(first, full) if index not in tracked.loaded]
        late = sum(index < before_tokens // self._block_size for index in missing)
        left_out = max(0, late - self._late_left, 0 if self._left is None else len(missing) - self._left)
        self._late_left -= max(0, late - left_out)
        if self._left is not None:
            self._left -= len(missing) - left_out
        if left_out:
            missing = missing[:len(missing) - left_out]
            full = missing[-1] + 1 if missing else first
        tracked.put_blocks = full
        block_ids = find_blocks() if missing else ()
        return [NamedBlock(names[index], block_ids[index]) for index in missing]
