# SPDX-License-Identifier: Apache-2.0
"""B42: what only V1's configuration has of a model. What both engines have: tests/upstream/test_fingerprint.py."""
import os
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.engine.arg_utils import EngineArgs

from vllm_pd.model.fingerprint import model_digest

COMMIT = "0123456789abcdef" * 2 + "01234567"
SPECS = [(None, {"linear": "fp8_per_tensor"}), (None, {"linear": "fp8_per_block"}), (None, {"linear": "mxfp8"}),
         (None, {"linear": "fp8_per_block", "ignore": ["*.q_proj"]}),
         (None, {"targets": {"*.q_proj": "fp8_per_block"}}), ("int8_per_channel_weight_only", None)]


@pytest.fixture
def config() -> VllmConfig:
    made = EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512,
                      enforce_eager=True).create_engine_config()
    made.model_config.model = "some/model"
    made.model_config.hf_config = SimpleNamespace(_commit_hash=COMMIT, to_dict=lambda: {"hidden_size": 64})
    return made


def quantized(config: VllmConfig, method: str | None, spec: dict | None) -> str:
    """The digest with the specification that vLLM makes of these two flags."""
    config.model_config.quantization = "online"
    config.model_config.quantization_config = resolve_quantization_config(method, spec)
    return model_digest(config)


def test_b42_weights_that_are_quantized_in_another_way_are_other_weights(config):
    """By `--quantization-config`, where `quantization` is "online" for all."""
    found = [quantized(config, *one) for one in SPECS]
    assert len({model_digest(config), *found}) == len(found)
    assert found == [quantized(config, *one) for one in SPECS], "an equal specification in other objects"


@pytest.mark.parametrize("key, value", [("model_class_overrides", {"LlamaForCausalLM": "my.models:Llama"}),
                                        ("code_revision", "other")], ids=str)
def test_b42_other_classes_of_the_same_name_are_another_model(config, key, value):
    before = model_digest(config)
    setattr(config.model_config, key, value)
    assert model_digest(config) != before


def test_b42_other_files_of_a_folder_are_another_model(config):
    """By the pattern of files with a rank's shard."""
    config.load_config.load_format = "sharded_state"
    found = set()
    for pattern in (None, "a-{rank}-{part}", "b-{rank}-{part}"):
        config.load_config.model_loader_extra_config = {"pattern": pattern} if pattern else {}
        found.add(model_digest(config))
    assert len(found) == 3


def test_b42_a_model_without_either_keeps_its_digest(config):
    """Files of the store are known by it. V0's configuration has no such fields."""
    model = config.model_config
    plain = model_digest(config)
    assert plain == "LlamaForCausalLM:d889aea87c282770"
    of_v0 = SimpleNamespace(**{key: getattr(model, key) for key in (
        "hf_config", "hf_text_config", "quantization", "architecture", "model", "revision", "max_model_len",
        "code_revision")})
    assert model_digest(SimpleNamespace(model_config=of_v0, load_config=config.load_config)) == plain
