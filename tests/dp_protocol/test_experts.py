# SPDX-License-Identifier: Apache-2.0
"""Which models have experts: those whose ranks run in lockstep."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_pd.v0.dp.experts import any_experts, has_experts

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "rope_scaling": None,
         "torch_dtype": "float32", "id2label": {0: "LABEL_0"}, "tie_word_embeddings": True}  # fmt: skip


@pytest.mark.parametrize("said", [
    {}, {"num_experts": 0}, {"n_routed_experts": None}, {"text_config": LLAMA}, {"layers": [LLAMA, 3]},
    {"moe": {}}, {"use_mixed_mlp_moe": False},
])  # fmt: skip
def test_a_model_without_experts(said):
    assert not has_experts(LLAMA | said)


@pytest.mark.parametrize("said", [
    {"num_local_experts": 8}, {"num_experts": 1}, {"n_routed_experts": 64}, {"moe_num_experts": [64, 64]},
    {"ffn_config": {"moe_num_experts": 16}}, {"layers": [{"num_experts": 0}, {"num_experts": 4}]},
    {"model_type": "made_up_moe"}, {"architectures": ["Qwen3MoeForCausalLM"]}, {"moe_intermediate_size": 1407},
    {"block_configs": [object()]},
])  # fmt: skip
def test_a_model_with_experts_or_in_doubt(said):
    assert has_experts(LLAMA | said)


def config(model: dict | None, draft: dict | None = None) -> SimpleNamespace:
    def known(said):
        return SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: said)) if said is not None else None
    return SimpleNamespace(model_config=known(model),
                           speculative_config=SimpleNamespace(draft_model_config=known(draft)) if draft else None)


@pytest.mark.parametrize("model, draft, found", [
    (LLAMA, None, False), (LLAMA, LLAMA, False), (LLAMA, LLAMA | {"num_experts": 8}, True),
    (LLAMA | {"num_local_experts": 8}, None, True), (None, None, True),
    (LLAMA | {"architectures": ["SomebodyElsesForCausalLM"]}, None, True),
    (LLAMA | {"architectures": None}, None, True),
])  # fmt: skip
def test_the_models_of_an_engine(model, draft, found):
    """A model that drafts counts, too; one that is not vLLM's own may have anything in it."""
    assert any_experts(config(model, draft)) is found


def test_every_model_of_experts_in_vllm_reads_a_key_that_counts():
    """A model that came with another vLLM, and names its experts otherwise, shows here."""
    from vllm.model_executor import models
    silent, read = [], 0
    for file in Path(models.__file__).parent.glob("*.py"):
        text = file.read_text()
        if not re.search(r"import .*FusedMoE|fused_moe import", text):
            continue
        keys = re.findall(r"config\.([\w.]+)|getattr\(\s*(?:self\.)?config,\s*\"(\w+)\"", text)
        read += 1
        if not any(has_experts({key: 8}) for pair in keys for key in pair if key):
            silent.append(file.name)
    assert read > 10 and silent == []
