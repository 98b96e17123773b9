# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with layers that keep a recurrent state, over the memory of tests/v1/simulated.py.

V1 keeps such layers in groups of their own, beside those with full attention. A block of such a group has one state,
that after some token, which a step changes in place, or copies first where its last token is in another block. A state
and KV in the same block destroy each other.

How V1 keeps states (`mode`) is its `mamba_cache_mode`: "align" with prefix caching, where a table has an entry for each
block of tokens, and states at the ends of some; "none" without prefix caching, where a request has one block.
`checkpoints`: the kernel leaves the state at a block's end behind, too, if a
step goes past it.
"""
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput

from tests.v1.simulated import BLOCK_SIZE, WrongRead, WrongWrite
from tests.v1.windows import NULL, WindowEngine
from vllm_pd.protocol.rows import STATE

MODEL_TOKENS = 1024
_PLACE = -1  # in a block, of its state


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
                         num_prefill_checkpoint_blocks=self.checkpoints,
                         prefill_checkpoint_alignment=1 if self.checkpoints else None)
        return [KVCacheGroupSpec(group.layer_names, spec) if window == STATE else group
                for group, window in zip(full, self.windows, strict=True)]

    def scheduler_block_size(self) -> int:
        return self.state_tokens  # the least common multiple

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
            for at in (_PLACE, *range(self.block_size)):
                self.slots.pop((block, at), None)
        return super().run_workers(output, work)

    def _fill(self, group: int, number: int, block: int, found: list[int], tokens: int) -> None:
        if self.windows[group] != STATE:
            super()._fill(group, number, block, found, tokens)
            self.slots.pop((block, _PLACE), None)
        elif tokens >= len(found):
            self._put_state(group, block, found[-1])

    def _sent(self, group: int, block: int, at: int) -> Any:
        return self.slots.get((block, _PLACE)) if self.windows[group] == STATE else self._content(block, at)

    def _compute_group(self, group: int, request_id: str, start: int, count: int, table: list[int],
                       found: list[int]) -> None:
        if self.windows[group] != STATE:
            super()._compute_group(group, request_id, start, count, table, found)
            for at in range(start, start + count):
                self.slots.pop((table[at // self.block_size], _PLACE), None)
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
        for at in range(self.block_size):
            self.slots.pop((block, at), None)
        self.slots[block, _PLACE] = group, content
