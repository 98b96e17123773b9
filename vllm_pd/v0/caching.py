# SPDX-License-Identifier: Apache-2.0
"""Prefix caching of an engine with disaggregation, where the user did not choose.

V0 has it off by default. Without it there are no prefix hits, no prefix reads, and the samples of a request with n > 1
can't share a prefill: most of what disaggregation saves would silently be lost. So it is on unless the user says
otherwise, or unless V0's prefix cache is not right for what the engine serves.
"""
from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.pd")


def choose_prefix_caching(engine_args: EngineArgs) -> None:
    """Switch prefix caching on if the user did not choose, and log that, or why not."""
    if engine_args.enable_prefix_caching is not None:
        return
    obstacle = _obstacle(engine_args)
    if obstacle is None:
        engine_args.enable_prefix_caching = True
        logger.info("prefix caching is on, as disaggregation needs it for prefix hits and n > 1; "
                    "--no-enable-prefix-caching switches it off")
    else:
        logger.warning("prefix caching stays off, so there are no prefix hits, and requests with n > 1 stay local: %s",
                       obstacle)


def _obstacle(engine_args: EngineArgs) -> str | None:
    """Why V0 can't cache prefixes with these arguments; None where it can."""
    from vllm.platforms import current_platform

    if engine_args.prefix_caching_hash_algo != "builtin":
        return f"V0 does not know prefix_caching_hash_algo={engine_args.prefix_caching_hash_algo}"
    if engine_args.enable_prompt_embeds:
        return "V0 knows cached blocks by token ids, which a prompt of embeddings (enable_prompt_embeds) has not"
    if engine_args.enable_prompt_adapter:
        return "V0 takes the tokens after a prefix hit for those of the prompt adapter (enable_prompt_adapter)"
    if not current_platform.is_cpu():
        return None
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        return "on the CPU V0 needs intel_extension_for_pytorch for it"
    if engine_args.enable_lora:
        return "on the CPU V0 maps adapters (enable_lora) to whole prompts, also where a part is a prefix hit"
    if engine_args.kv_cache_dtype != "auto":
        return f"on the CPU V0 has it for kv_cache_dtype=auto only, not {engine_args.kv_cache_dtype}"
    return None
