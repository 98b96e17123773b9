# SPDX-License-Identifier: Apache-2.0
"""B7: requests with a LoRA adapter stay local and are right."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import BrokerProcess, EngineProcess, prompt

# Upstream's CPU runner maps adapters to the tokens of the whole prompt, also where a part of it is a prefix hit: with
# prefix caching the second request of a prompt ends it, with disaggregation or without.
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "enable_prefix_caching": False}
HIDDEN, KV_WIDTH, LAYERS, RANK = 256, 128, 4, 8  # of the tiny model


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """An adapter of the tiny model's attention, strong enough to change what it says."""
    import torch
    from safetensors.torch import save_file
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        for module, width in (("q_proj", HIDDEN), ("v_proj", KV_WIDTH)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
                "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def engines(zygote, starting) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """A decode engine that sends everything away if it may, and one with disaggregation off."""
    broker = BrokerProcess()
    starting.callback(broker.stop)
    d = EngineProcess(zygote, "kv_consumer", 1, broker.url, {"max_local_prefill_tokens": 0}, **LORA)
    mono = EngineProcess(zygote, None, 0, **LORA)
    yield d.ready(), mono.ready()
    for process in (d, mono, broker):
        process.stop()


def adapted(engine: EngineProcess, tokens: list[int], adapter: Path, name: str) -> list[int]:
    engine.execute("from vllm import SamplingParams; from vllm.lora.request import LoRARequest; "
                   f"engine.add_request({name!r}, {{'prompt_token_ids': {tokens!r}}}, "
                   "SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), "
                   f"lora_request=LoRARequest('adapter', 1, {str(adapter)!r}))")
    [result] = engine.wait([name])
    return result["outputs"][0]["token_ids"]


def test_b7_lora_stays_local_and_is_right(engines, adapter):
    """B7: twice each, and between requests without the adapter."""
    d, mono = engines
    tokens = prompt(70, "lora")
    before = d.counters()
    expected = adapted(mono, tokens, adapter, "expected")
    plain = mono.tokens([tokens])[0]
    assert expected != plain
    for number in range(2):
        assert adapted(d, tokens, adapter, f"adapted {number}") == expected
        assert d.tokens([tokens])[0] == plain
    counted = d.counters().since(before)
    assert counted["decisions_total:local,feature"] == 2
    assert counted["decisions_total:remote,length"] == 0
    d.at_rest()
