# SPDX-License-Identifier: Apache-2.0
"""B7: which requests may have their prompt prefilled elsewhere."""

from types import SimpleNamespace

import pytest

from vllm_pd.protocol.messages import MAX_ID_CHARS
from vllm_pd.v0.features import can_go_remote


def group(request_id="r", single=True, encoder=False, embeds=False, **changes):
    """A sequence group as far as the predicate looks at it; `changes` are to the group or its sampling parameters."""
    params = SimpleNamespace(prompt_logprobs=None, n=1)
    group = SimpleNamespace(request_id=request_id, sampling_params=params, is_single_seq=single, lora_request=None,
                            prompt_adapter_request=None, multi_modal_data={}, uses_prompt_embeds=lambda: embeds,
                            is_encoder_decoder=lambda: encoder)
    for name, value in changes.items():
        setattr(params if name in vars(params) else group, name, value)
    return group


def test_b7_a_plain_request_may():
    assert can_go_remote(group(), {})


@pytest.mark.parametrize("feature", [
    {"sampling_params": None}, {"prompt_logprobs": 0}, {"prompt_logprobs": 5}, {"n": 2}, {"single": False},
    {"lora_request": object()}, {"prompt_adapter_request": object()}, {"multi_modal_data": {"image": object()}},
    {"embeds": True}, {"encoder": True}, {"request_id": "r" * (MAX_ID_CHARS + 1)},
], ids=str)
def test_b7_what_a_prompt_step_does_beside_kv_stays(feature):
    assert not can_go_remote(group(**feature), {})


def test_b7_a_part_of_a_request_with_n_above_one_stays():
    assert not can_go_remote(group("r_parallel_sample_0"), {"r_parallel_sample_0": object()})
