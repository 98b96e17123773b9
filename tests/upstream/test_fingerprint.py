# SPDX-License-Identifier: Apache-2.0
"""B42: two models never have one fingerprint, and one model has one wherever it lies."""
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from vllm.config import LoadConfig, LoadFormat, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_pd.errors import ConfigError
from vllm_pd.model.fingerprint import model_digest, pin_weights, weights_state
from vllm_pd.model.weights import digest_weights
from vllm_pd.v0.fingerprint import fingerprint

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture(autouse=True)
def v0(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")


def config_of(model: Path | str, **more) -> VllmConfig:
    return EngineArgs(model=str(model), dtype="float32", max_model_len=512, **more).create_engine_config()


@pytest.fixture
def copy(tmp_path) -> Path:
    return Path(shutil.copytree(os.environ["VLLM_PD_TINY_MODEL"], tmp_path / "copy"))


def test_b42_a_fine_tune_of_the_middle_tensors_has_another_fingerprint(copy):
    """Same configuration, names, shapes and sizes; the first and the last mebibyte of the file are equal, too."""
    original = fingerprint(config_of(os.environ["VLLM_PD_TINY_MODEL"]), "")
    assert fingerprint(config_of(copy), "") == original
    file = copy / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    changed = [name for name, _ in sorted(tensors.items()) if ".1.mlp." in name]
    save_file(tensors | {name: tensors[name] * 1.5 for name in changed}, file, metadata={"format": "pt"})
    after = file.read_bytes()
    assert changed and len(after) == len(before) and after != before
    assert (after[:1 << 20], after[-1 << 20:]) == (before[:1 << 20], before[-1 << 20:])
    assert fingerprint(config_of(copy), "").first_difference(original)[0] == "model"


def test_dummy_weights_are_other_weights(copy):
    digests = {model_digest(config_of(copy, load_format=load)) for load in ("auto", "safetensors", "dummy", "pt")}
    assert len(digests) == 3  # `safetensors` reads what `auto` reads


@pytest.mark.parametrize("load_format", [LoadFormat.PT, "pt"])
def test_the_way_of_writing_a_load_format_does_not_count(copy, load_format):
    config = config_of(copy)
    config.load_config = LoadConfig(load_format=load_format)
    assert model_digest(config) == model_digest(config_of(copy, load_format="pt"))


def hub_model(commit: str | None, revision: str | None = None, name: str = "some/model") -> VllmConfig:
    config = config_of(os.environ["VLLM_PD_TINY_MODEL"])
    config.model_config.model, config.model_config.revision = name, revision
    config.model_config.hf_config = LlamaConfig(_commit_hash=commit)
    return config


def test_b42_a_hub_model_is_its_commit():
    one = model_digest(hub_model(COMMIT))
    assert one == model_digest(hub_model(COMMIT, revision="main")) == model_digest(hub_model(None, revision=COMMIT))
    assert len({one, model_digest(hub_model(OTHER)), model_digest(hub_model(COMMIT, name="other/model"))}) == 3


def test_b42_models_of_another_class_and_other_rope_factors_differ():
    """vLLM chooses the class (`--model-impl`), and for LongRoPE the factors by the longest context it serves."""
    config = hub_model(COMMIT)
    before = model_digest(config)
    config.model_config.__dict__["_architecture"] = "TransformersForCausalLM"
    assert model_digest(config) != before
    digests = {}
    for rope_type in ("longrope", "yarn"):
        for max_model_len in (512, 4096, 8192):
            config = hub_model(COMMIT)
            config.model_config.hf_text_config = LlamaConfig(original_max_position_embeddings=2048)
            config.model_config.hf_text_config.rope_scaling = {"rope_type": rope_type}
            config.model_config.max_model_len = max_model_len
            digests[rope_type, max_model_len] = model_digest(config)
    assert digests["longrope", 512] != digests["longrope", 4096] == digests["longrope", 8192]
    assert len({digests["yarn", one] for one in (512, 4096, 8192)}) == 1


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:7]])
def test_b80_a_hub_model_without_a_known_commit_is_refused(revision):
    with pytest.raises(ConfigError, match=f"(?s)revision={revision!r}.*some/model.*--revision"):
        model_digest(hub_model(None, revision))


@pytest.mark.parametrize("load_format", ["tensorizer", type("Loader", (), {}), "loader of the user's"])
def test_b42_weights_from_elsewhere_with_the_digest_of_a_folder_are_those_of_the_folder(copy, load_format):
    of_files, right = model_digest(config_of(copy)), digest_weights(copy).hex()
    (copy / "model.safetensors").unlink()
    config = config_of(copy)
    config.load_config.load_format = load_format
    pin_weights(config, right)
    assert model_digest(config, right) == of_files != model_digest(config, right[::-1])
    config.additional_config = {"vllm_pd": {"extra": {"weights_digest": right}}}
    assert fingerprint(config, "").model == of_files
    before = weights_state(config, right)
    (copy / "modeling.py").write_text("a = 1")
    assert weights_state(config, right) != before, "a model's own code is looked at"


def test_b42_weights_in_a_bucket_need_a_digest(copy):
    of_files, right = model_digest(config_of(copy)), digest_weights(copy).hex()
    (copy / "model.safetensors").unlink()
    config = config_of(copy, load_format="runai_streamer")
    config.model_config.model_weights = "s3://bucket/model"  # as vLLM sets it; `model` is a folder without weights
    with pytest.raises(ConfigError, match="model='s3://bucket/model'.*peer.*weights_digest"):
        pin_weights(config)
    pin_weights(config, right)
    assert model_digest(config, right) == of_files


def test_b42_a_digest_of_files_that_are_there_must_be_theirs(copy):
    config, right = config_of(copy), digest_weights(copy).hex()
    pin_weights(config, right)
    assert model_digest(config, right) == model_digest(config) and weights_state(config, right) == weights_state(config)
    for load_format in ("auto", "runai_streamer", "pt"):
        config.load_config.load_format = load_format
        with pytest.raises(ConfigError, match=f"weights_digest='{right[::-1]}'.*{copy} have {right}"):
            pin_weights(config, right[::-1])
    config.load_config.load_format = "dummy"
    with pytest.raises(ConfigError, match="weights_digest=.*dummy"):
        pin_weights(config, right)
    with pytest.raises(ConfigError, match="weights_digest=.*some/model.*commit"):
        pin_weights(hub_model(COMMIT), right)


def test_b80_weights_from_elsewhere_are_refused(copy):
    with pytest.raises(ConfigError, match="load_format.*weights_digest.*peer"):
        pin_weights(config_of(copy, load_format="tensorizer"))
    pin_weights(config_of(copy))
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model=.*copy.*\.safetensors"):
        pin_weights(config_of(copy))
