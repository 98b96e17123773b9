# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill of an engine that only prefills, where the user did not choose.

V0 computes a prompt whole by default, and a short job would wait for the end of a long one. So such an engine computes
prompts in chunks, two of them at a time, unless the user says otherwise.
"""
from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.pd")

CPU_CHUNK_TOKENS = 384  # a step of less than a second on a core or two; fewer make the prompt slower
SEATS = 256  # V0's default


def choose_chunks(engine_args: EngineArgs) -> None:
    """Switch chunked prefill on if the user chose nothing about chunks, and log that. To be called after
    `choose_prefix_caching`: on the CPU both take the same way through V0, so they have the same obstacles."""
    from vllm.config import SchedulerConfig
    from vllm.platforms import current_platform

    chosen = (engine_args.enable_chunked_prefill is not None or engine_args.max_num_batched_tokens is not None
              or any(getattr(engine_args, name) != getattr(SchedulerConfig, name)
                     for name in ("max_num_partial_prefills", "max_long_partial_prefills",
                                  "long_prefill_token_threshold")))
    if chosen or (current_platform.is_cpu() and not engine_args.enable_prefix_caching) or _obstacle(engine_args):
        return
    engine_args.enable_chunked_prefill = True
    engine_args.max_num_partial_prefills = engine_args.max_long_partial_prefills = 2
    if current_platform.is_cpu():
        engine_args.max_num_batched_tokens = max(CPU_CHUNK_TOKENS, engine_args.max_num_seqs or SEATS)
    logger.info("chunked prefill is on, two prompts at a time, so that a short job need not wait for a long one; "
                "--no-enable-chunked-prefill switches it off")


def _obstacle(engine_args: EngineArgs) -> bool:
    """Whether V0 can't compute in chunks what clients of this engine may send. It applies a prompt adapter to the
    beginning of each chunk. Of multimodal input it gives a chunk those parts only that are in it, from which M-RoPE
    can't tell positions; so V0 itself has no chunks by default for such models."""
    return engine_args.enable_prompt_adapter or engine_args.create_model_config().is_multimodal_model
