# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with layers that look back a window of tokens only, over the memory of tests/v1/simulated.py.

V1 keeps such layers in groups of blocks of their own, of one pool. A slot holds which group has written it, and what. A
step may read all keys that its tokens see: in a group with a window no others need to be there, or may be asked for.

Which blocks a peer is granted, and sends, is worked out here from what the next token reads, token by token, and not by
`vllm_pd.protocol.rows`.
"""
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tests.v1.drafting import DraftingEngine
from tests.v1.simulated import BLOCK_SIZE, PEER, VOCAB, Engine, WrongRead, WrongWrite, contents
from vllm_pd.protocol import actions
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope
from vllm_pd.transfer.requests import Write

NULL = 0  # V1's filler in a block table
REMOTE = 100  # the first block id of a peer


class WindowEngine(Engine):
    """An engine with these groups of layers: the window of each in tokens, 0 with full attention. `sizes`: the tokens
    of a block of each, where they differ; that of the first with full attention is `block_size`. It neither reads
    prefixes nor keeps prompts, as `vllm_pd.v1.start` has it."""

    def __init__(self, folder: Path, in_flight: int = 1, *, windows: tuple[int, ...], sizes: tuple[int, ...] = (),
                 **more: Any) -> None:
        self.windows, self.sizes = windows, sizes or (more.get("block_size", BLOCK_SIZE), ) * len(windows)
        super().__init__(folder, in_flight, **{**more, "prefix_reads": "never", "hold_s": 0.0})
        self._cached_of: dict[str, int] = {}  # blocks of a job's prompt that its peer has, by its attempt
        self.sent_rows = 0

    def make_groups(self) -> list[KVCacheGroupSpec]:
        shapes = [self.shape() | {"block_size": size} for size in self.sizes]
        return [KVCacheGroupSpec([f"l{group}"], SlidingWindowSpec(sliding_window=window, **shape)
                                 if window else FullAttentionSpec(**shape))
                for group, (window, shape) in enumerate(zip(self.windows, shapes, strict=True))]

    def scheduler_block_size(self) -> int:
        return math.lcm(*self.sizes)

    def hash_block_size(self) -> int:
        return math.gcd(*self.sizes)

    def rows(self, tokens: int, cached: int) -> list[tuple[int, int]]:
        """(group, number of its block) of each block that a peer writes, of which D has `cached` already: those whose
        KV the token after these `tokens` reads. The first group with full attention comes first."""
        lead, hit, sizes = self.windows.index(0), cached * self.block_size, self.sizes
        order = [lead, *(group for group in range(len(self.windows)) if group != lead)]
        return [(group, number) for group in order for number in range(hit // sizes[group], -(-tokens // sizes[group]))
                if any(self._reads(group, tokens, key) for key in self._keys(group, number, tokens))]

    def _keys(self, group: int, number: int, tokens: int) -> range:
        """The positions of a block of this group, as far as there are tokens."""
        return range(number * self.sizes[group], min(tokens, (number + 1) * self.sizes[group]))

    def _reads(self, group: int, query: int, key: int) -> bool:
        """Whether the token at the position `query` reads the one at `key`, which is before it, in this group."""
        return not self.windows[group] or key > query - self.windows[group]

    # Peers.

    def write(self, attempt: Attempt, tokens: int | None = None) -> None:
        token_ids, block_ids, cached = self.protocol.jobs[attempt]
        if attempt in self.released:
            raise WrongWrite(f"{attempt} was released")
        rows = self.rows(len(token_ids), cached)
        assert len(rows) == len(block_ids) - cached, f"{len(block_ids) - cached} blocks were granted, not {len(rows)}"
        found = contents(token_ids)
        for (group, number), block in zip(rows, block_ids[cached:], strict=True):
            if block == NULL:
                raise WrongWrite("the filler is granted")
            self._fill(group, number, block, found, len(token_ids) if tokens is None else tokens)

    def _fill(self, group: int, number: int, block: int, found: list[int], tokens: int) -> None:
        """A peer's write of this row, as far as it has come: up to so many tokens."""
        for at in self._keys(group, number, min(tokens, len(found))):
            self.slots[block, at % self.sizes[group]] = group, found[at]

    def job(self, prompt: list[int], cached_blocks: int = 0, number: int = 0, scope: PromptScope = NO_SCOPE) -> Attempt:
        attempt = Attempt(PEER, "r", number)
        self._cached_of[str(attempt)] = cached_blocks
        count = len(self.rows(len(prompt), cached_blocks))
        ids = list(range(REMOTE, REMOTE + cached_blocks + count))
        self.tell(actions.Prefill(attempt, list(prompt), ids[cached_blocks:], cached_blocks, ids[:cached_blocks], PEER,
                                  scope=scope))
        return attempt

    def check_sent_write(self, write: Write, prompt: list[int]) -> None:
        cached, found = self._cached_of[write.grant], contents(prompt)
        rows = dict(enumerate(self.rows(len(prompt), cached), REMOTE + cached))
        assert len(write.local_block_ids) == len(write.remote_block_ids)
        if write.key == write.grant:
            assert not rows or write.remote_block_ids[-1:] in ([], [max(rows)]), "it is the last one"
        for block, remote in zip(write.local_block_ids, write.remote_block_ids, strict=True):
            group, number = rows[remote]
            self.sent_rows += 1
            for at in self._keys(group, number, len(prompt)):
                if self._reads(group, len(prompt), at) and self._sent(group, block, at) != (group, found[at]):
                    raise WrongRead(f"position {at} of group {group} is sent from block {block}, which holds something "
                                    f"else; {len(prompt)} tokens, {cached} blocks cached")

    def _sent(self, group: int, block: int, at: int) -> Any:
        """What a peer gets for this position of a group, with this block."""
        return self._content(group, block, at)

    # Steps.

    def capture(self, output) -> list[tuple]:
        tables = {name: [list(table) for table in self.manager.get_block_ids(name)]
                  for name in output.num_scheduled_tokens}
        return [(name, start, count, tables[name], known, is_chunk)
                for name, start, count, _, known, is_chunk in super().capture(output)]

    def _compute(self, request_id: str, start: int, count: int, tables: list[list[int]], known: list[int],
                 is_chunk: bool) -> list[int]:
        found = contents(known[:start + count])
        assert len(found) == start + count, f"{request_id}: a token is computed that is not known"
        for group, table in enumerate(tables):
            self._compute_group(group, request_id, start, count, table, found)
        return self._sample(found, start, count, known, is_chunk)

    def _compute_group(self, group: int, request_id: str, start: int, count: int, table: list[int],
                       found: list[int]) -> None:
        size = self.sizes[group]
        for key in range(start):
            block = table[key // size]
            if self._reads(group, start, key) and self._content(group, block, key) != (group, found[key]):
                raise WrongRead(f"{request_id} reads position {key} of group {group} at {start} from {block}, "
                                "which holds something else")
        for at in range(start, start + count):
            block = table[at // size]
            if block == NULL:
                raise WrongWrite(f"{request_id} writes position {at} of group {group} into the filler")
            self.slots[block, at % size] = group, found[at]

    def _content(self, group: int, block: int, at: int) -> Any:
        return None if block == NULL else self.slots.get((block, at % self.sizes[group]))

    def _blocks_of(self, request: Request) -> list[int]:
        return [block for table in self.manager.get_block_ids(request.request_id) for block in table if block != NULL]


class DraftingWindowEngine(DraftingEngine, WindowEngine):
    """One with a drafter, too: what it guesses wrongly is computed, and taken back. The layers of one with KV are in
    the group `drafters`; other layers of the same blocks destroy what these hold. `is_flagged`: V1 knows which group
    that is, as with `mtp`; otherwise it drops the last block of a hit in each."""

    def __init__(self, folder: Path, in_flight: int = 1, *, windows: tuple[int, ...], drafters: int | None = None,
                 is_flagged: bool = False, **more: Any) -> None:
        self.drafters, self.is_flagged = windows.index(0) if drafters is None else drafters, is_flagged
        super().__init__(folder, in_flight, windows=windows, **more)
        self._next_of: dict[str, int] = {}  # the token after a job's, by its attempt

    def make_groups(self) -> list[KVCacheGroupSpec]:
        groups = super().make_groups()
        groups[self.drafters].is_eagle_group = self.is_flagged
        return groups

    # Peers.

    def job(self, prompt: list[int], cached_blocks: int = 0, number: int = 0, scope: PromptScope = NO_SCOPE) -> Attempt:
        attempt = super().job(prompt, cached_blocks, number, scope)
        if self.keeps_kv:
            event, next_token = self.protocol.events.pop(), (7 * sum(prompt) + number) % (VOCAB - 1)
            self._next_of[str(attempt)] = next_token
            self.protocol.events.append(msgspec.structs.replace(event, next_token=next_token))
        return attempt

    def check_sent_write(self, write: Write, prompt: list[int]) -> None:
        WindowEngine.check_sent_write(self, write, prompt)
        if not self.keeps_kv:
            return
        cached, size = self._cached_of[write.grant], self.block_size
        rows = dict(enumerate(self.rows(len(prompt), cached), REMOTE + cached))
        known, found = [*prompt, self._next_of[write.grant]], contents(prompt)
        for block, remote in zip(write.local_block_ids, write.remote_block_ids, strict=True):
            group, number = rows[remote]
            if group == self.drafters:
                first = max(number * size, self._first_read(len(prompt)))
                self._check_drafts("sent", [block], found, known, first, min(len(prompt), (number + 1) * size),
                                   number * size)

    def _granted(self, token_ids: list[int], block_ids: list[int], cached: int) -> Iterator[tuple[int, int]]:
        rows = zip(self.rows(len(token_ids), cached), block_ids[cached:], strict=True)
        for number, block in [(number, block) for (group, number), block in rows if group == self.drafters]:
            for at in range(number * self.block_size, min(len(token_ids), (number + 1) * self.block_size)):
                yield at, block

    def _fill(self, group: int, number: int, block: int, found: list[int], tokens: int) -> None:
        super()._fill(group, number, block, found, tokens)
        if group != self.drafters:
            self._destroy_entries(block)

    # Steps.

    def _compute_group(self, group: int, request_id: str, start: int, count: int, table: list[int],
                       found: list[int]) -> None:
        super()._compute_group(group, request_id, start, count, table, found)
        for at in range(start, start + count) if group != self.drafters else ():
            self._destroy_entries(table[at // self.sizes[group]])

    def _drafters_table(self, tables: list) -> list[int]:
        return tables[self.drafters]

    def _first_read(self, query: int) -> int:
        return next((key for key in range(query) if self._reads(self.drafters, query, key)), query)

    def _destroy_entries(self, block: int) -> None:
        for at in range(self.block_size):
            self.slots.pop(self._slot([block], at), None)
