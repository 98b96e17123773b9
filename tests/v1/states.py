# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with layers that keep a recurrent state, over the memory of tests/v1/simulated.py.

V1 keeps such layers in groups of their own, beside those with full attention. A block of such a group has one state,
that after some token, which a step changes in place, or copies first where its last token is in another block. A state
and KV in the same block destroy each other.

How V1 keeps states (`mode`) is its `mamba_cache_mode`: "align" with prefix caching, where a table has an entry for each
block of tokens, and states at the ends of some; "none" without prefix caching, where a request has one block.
`checkpoints`: the kernel leaves the state at a block's end behind, too, if a
step goes past it.

With a drafter a request has blocks for the states after drafted tokens, too, behind that of its running state. A state
has two parts then: the recurrent one, of which the step that verifies drafts leaves one behind in each of these blocks,
and the convolution's, which has in the running block so many more tokens that it can begin at any of them. How many
drafts were accepted says where the next step finds both. `DraftingStateEngine` does what vLLM's model runner does
(`vllm/v1/worker/mamba_utils.py`): `preprocess_mamba`, the kernels, `postprocess_mamba_fused_kernel`.
"""
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput

from tests.v1.drafting import ENTRIES
from tests.v1.simulated import BLOCK_SIZE, WrongRead, WrongWrite
from tests.v1.windows import NULL, DraftingWindowEngine, WindowEngine
from vllm_pd.protocol.rows import STATE

MODEL_TOKENS = 1024
_PLACE = -1  # in a block, of its state
_TAIL = -2  # with drafts, of the convolution's part: the states that it can begin with, in their order


class StateEngine(WindowEngine):
    """An engine with these groups of layers: 0 with full attention, STATE with states."""

    def __init__(self, folder: Path, in_flight: int = 1, *, mode: str = "align", checkpoints: int = 0,
                 **more: Any) -> None:
        self.mode, self.checkpoints = mode, checkpoints
        self.state_tokens = MODEL_TOKENS if mode == "none" else more.get("block_size", BLOCK_SIZE)
        super().__init__(folder, in_flight, **{"caching": mode != "none", **more})
        self._left_behind: dict[tuple[str, int, int], list[tuple[int, int]]] = {}  # (block of the table, tokens)

    def make_groups(self) -> list[KVCacheGroupSpec]:
        self.config.cache_config.mamba_cache_mode = self.mode
        full = super().make_groups()
        page = full[self.windows.index(0)].kv_cache_spec.page_size_bytes
        dtype = self.shape()["dtype"]
        spec = MambaSpec(block_size=self.state_tokens, shapes=((page // dtype.itemsize // 2, ), ), dtypes=(dtype, ),
                         page_size_padded=page, mamba_cache_mode=self.mode,
                         num_speculative_blocks=self.config.num_speculative_tokens,
                         num_prefill_checkpoint_blocks=self.checkpoints,
                         prefill_checkpoint_alignment=1 if self.checkpoints else None)
        return [KVCacheGroupSpec(group.layer_names, spec) if window == STATE else group
                for group, window in zip(full, self.windows, strict=True)]

    def scheduler_block_size(self) -> int:
        return self.state_tokens  # the least common multiple

    def hash_block_size(self) -> int:
        return self.state_tokens

    def capture(self, output) -> list[tuple]:
        work = super().capture(output)
        for request_id, start, count, *_ in work if self.checkpoints and self.mode == "align" else ():
            for group, manager in enumerate(self.manager.coordinator.single_type_managers):
                found = manager._checkpoints.get(request_id) if self.windows[group] == STATE else None
                if found and start < found[0] < start + count:
                    self._left_behind[request_id, start + count, group] = [(found[1], found[0])]
        return work

    def run_workers(self, output, work: list[tuple]) -> ModelRunnerOutput:
        for block in output.new_block_ids_to_zero or ():
            self._clear(block)
        return super().run_workers(output, work)

    def _fill(self, group: int, number: int, block: int, found: list[int], tokens: int) -> None:
        if self.windows[group] != STATE:
            super()._fill(group, number, block, found, tokens)
            self._clear(block, (_PLACE, _TAIL))
        elif tokens >= len(found):
            self._put_state(group, block, found[-1])

    def _sent(self, group: int, block: int, at: int) -> Any:
        return self.slots.get((block, _PLACE)) if self.windows[group] == STATE else self._content(group, block, at)

    def _compute_group(self, group: int, request_id: str, start: int, count: int, table: list[int],
                       found: list[int]) -> None:
        if self.windows[group] != STATE:
            super()._compute_group(group, request_id, start, count, table, found)
            for at in range(start, start + count):
                self._clear(table[at // self.block_size], (_PLACE, _TAIL))
            return
        end, size = start + count, self.state_tokens
        first, last = (start - 1) // size, (end - 1) // size
        if start and self.slots.get((table[first], _PLACE)) != (group, found[start - 1]):
            raise WrongRead(f"{request_id} reads the state of group {group} after {start} tokens from block "
                            f"{table[first]}, which holds something else")
        for number, tokens in (*self._left_behind.pop((request_id, end, group), ()), (last, end)):
            if table[number] == NULL:
                raise WrongWrite(f"{request_id} writes a state of group {group} into the filler")
            self._put_state(group, table[number], found[tokens - 1])

    def _put_state(self, group: int, block: int, content: int) -> None:
        self._clear(block)
        self.slots[block, _PLACE] = group, content

    def _clear(self, block: int, places: tuple[int, ...] | None = None) -> None:
        for at in (_PLACE, _TAIL, *range(self.block_size),
                   *range(ENTRIES, ENTRIES + self.block_size)) if places is None else places:
            self.slots.pop((block, at), None)


class DraftingStateEngine(DraftingWindowEngine, StateEngine):
    """One with a drafter. V1 knows the group of one with KV, as that of `mtp`, unless not `is_flagged`."""

    def __init__(self, folder: Path, in_flight: int = 1, *, is_flagged: bool = True, **more: Any) -> None:
        super().__init__(folder, in_flight, is_flagged=is_flagged, **more)
        self._running: dict[str, int] = {}  # the entry of the table with the running state, by request
        self._taken: dict[str, int] = {}  # how many tokens of the last step count: 1, and the accepted drafts
        self._drafts = 0  # of the request that is being computed

    def _compute_drafted(self, name: str, start: int | None, count: int, tables: list[list[int]], known: list[int],
                         is_chunk: bool, drafts: list[int]) -> list[int]:
        begin, size = self._computed[name] if start is None else start, self.state_tokens
        if start is not None:
            self._taken[name], self._running[name] = 1, (begin - 1) // size
        before, now = self._running[name], -(-(begin + count) // size) - 1
        if before not in (-1, now) and self.mode == "align":
            self._copy(tables, before, self._taken[name] - 1, now)
            self._taken[name] = 1
        self._running[name], self._drafts = now, len(drafts)
        sampled = super()._compute_drafted(name, start, count, tables, known, is_chunk, drafts)
        taken = self._taken[name] = max(1, len(sampled))
        plain = begin + count - len(drafts)
        last = (plain + taken - 1) // size * size  # at this block's end others may find a state
        if last >= plain and self.mode == "align":
            self._copy(tables, now, last - plain, last // size - 1)
            if last // size - 1 == now:
                self._taken[name] = 1
        return sampled

    def _compute_group(self, group: int, request_id: str, start: int, count: int, table: list[int],
                       found: list[int]) -> None:
        if self.windows[group] != STATE:
            super()._compute_group(group, request_id, start, count, table, found)
            return
        end, now, skip = start + count, self._running[request_id], self._taken[request_id] - 1
        if start and not (self.slots.get((table[now + skip], _PLACE)) == (group, found[start - 1])
                          == self._tail(group, table[now], skip)):
            raise WrongRead(f"{request_id} reads the state of group {group} after {start} tokens, {skip} behind block "
                            f"{table[now]}, which holds something else")
        verifies = count == 1 + self._drafts  # else prompt tokens, of which the last state alone is left
        assert verifies or (not self._drafts and not skip)
        after = found[start:end] if verifies else found[end - 1:]
        if NULL in table[now:now + len(after)]:
            raise WrongWrite(f"{request_id} writes a state of group {group} into the filler")
        for number, tokens in self._left_behind.pop((request_id, end, group), ()):
            self._put_state(group, table[number], found[tokens - 1])
        for number, content in enumerate(after, now):
            StateEngine._put_state(self, group, table[number], content)
        self.slots[table[now], _TAIL] = group, tuple(after)

    def _copy(self, tables: list[list[int]], first: int, skip: int, to: int) -> None:
        """What was accepted of the states at this entry: `skip` tokens behind the first one."""
        for group, table in enumerate(tables) if (first, 0) != (to, skip) else ():
            if self.windows[group] == STATE:
                state, tail = self.slots.get((table[first + skip], _PLACE)), self._tail_of(table[first])
                if table[to] == NULL:
                    raise WrongWrite(f"a state of group {group} is copied into the filler")
                self._clear(table[to])
                self.slots[table[to], _PLACE], self.slots[table[to], _TAIL] = state, (tail[0], tail[1][skip:])

    def _put_state(self, group: int, block: int, content: int) -> None:
        super()._put_state(group, block, content)
        self.slots[block, _TAIL] = group, (content, )

    def _sent(self, group: int, block: int, at: int) -> Any:
        found = super()._sent(group, block, at)
        return found if self.windows[group] != STATE or found == self._tail(group, block, 0) else None

    def _tail_of(self, block: int) -> tuple[int, tuple[int, ...]]:
        return self.slots.get((block, _TAIL), (-1, ()))

    def _tail(self, group: int, block: int, skip: int) -> tuple[int, int] | None:
        """The state with which the convolution's part begins so many tokens later."""
        owner, states = self._tail_of(block)
        return (owner, states[skip]) if skip < len(states) else None
