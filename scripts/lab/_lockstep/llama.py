# SPDX-License-Identifier: Apache-2.0
"""A Llama whose forward pass compares its number with those of all ranks of its data-parallel group. vLLM's CPU build
has no kernel for experts of other ranks, but a pass that meets none hangs here as it would there, and one that meets
another pass ends its engine."""
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.config import VllmConfig
from vllm.distributed import get_dp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.llama import LlamaForCausalLM


class LockstepLlama(LlamaForCausalLM):
    """See the module. Counts in a file of the folder LOCKSTEP_FOLDER: its passes, and those of them that were dummies,
    8 bytes each."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        file = Path(os.environ["LOCKSTEP_FOLDER"]) / vllm_config.kv_transfer_config.engine_id
        file.write_bytes(bytes(16))
        with open(file, "r+b") as opened:
            self.counts = memoryview(mmap.mmap(opened.fileno(), 16)).cast("Q")

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Llama's, after this pass has met those of the other ranks. Raises RuntimeError if they have other numbers."""
        self.counts[0] += 1
        self.counts[1] += get_forward_context().attn_metadata is None
        own = self.counts[0]
        met = torch.tensor([own, -own])
        all_reduce(met, op=ReduceOp.MAX, group=get_dp_group().cpu_group)
        if met.tolist() != [own, -own]:
            raise RuntimeError(f"forward pass {own} of this rank meets passes {-met[1]} to {met[0]} of its group")
        return super().forward(*arguments, **keywords)
