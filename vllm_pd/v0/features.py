# SPDX-License-Identifier: Apache-2.0
"""Which requests can have their prompt prefilled by another engine.

All sampling stays on the decode engine, so whatever only shapes the choice of tokens (penalties, bias, guides, seeds,
stop conditions) goes remote unharmed. What a prompt step computes beside KV, or needs beside token ids, does not.
"""
from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from vllm_pd.protocol.messages import MAX_ID_CHARS

if TYPE_CHECKING:
    from vllm.sequence import SequenceGroup


def can_go_remote(seq_group: SequenceGroup, split_request_ids: Container[str]) -> bool:
    """Whether another engine may prefill this group. `split_request_ids` holds the parts of requests with n > 1 that
    can't share a prefill, as there is no prefix cache to share it by."""
    params = seq_group.sampling_params
    if params is None or params.prompt_logprobs is not None:
        return False  # pooled, or computed in the prompt step only
    if params.n != 1 or not seq_group.is_single_seq or seq_group.request_id in split_request_ids:
        return False  # each would need a transfer of its own
    if seq_group.lora_request is not None or seq_group.prompt_adapter_request is not None:
        return False  # the peer may have another adapter of that name
    if seq_group.multi_modal_data or seq_group.uses_prompt_embeds() or seq_group.is_encoder_decoder():
        return False  # the prompt is more than token ids
    return len(seq_group.request_id) <= MAX_ID_CHARS
