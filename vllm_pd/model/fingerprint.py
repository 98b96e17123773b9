# SPDX-License-Identifier: Apache-2.0
"""What distinguishes a model from others, for both engines: architecture, configuration, and the weights loaded.

The configurations are vLLM's, of any release that this package supports.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd.errors import ConfigError
from vllm_pd.model.weights import SUFFIXES, digest_code, digest_weights, state_of_weights, weight_files
from vllm_pd.settings.store import DIGEST_KEY

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "architectures"})
_AS_AUTO = frozenset({"safetensors", "fastsafetensors", "runai_streamer"})  # other ways to read the same files
_ELSEWHERE = frozenset({"tensorizer", "ipc_cache", "modelexpress"})  # read no files of the model
_FROM_BUCKETS = frozenset({"runai_streamer", "runai_streamer_sharded", "sharded_state"})  # read `model_weights`
_OF_FILES = _AS_AUTO | _FROM_BUCKETS | {"auto", "hf", "pt", "npcache", "mistral", "instanttensor", "gguf",
                                        "bitsandbytes", "dummy"}  # any other is a loader of the user's
_VOUCH = f'vouch for them with "{DIGEST_KEY}": "..." in the connector\'s settings (`vllm-pd digest FOLDER`)'
_COMMIT = re.compile("[0-9a-f]{40}")


def model_digest(config: VllmConfig, given: str | None = None) -> str:
    """Architecture and a digest of configuration and weights, the same wherever the same model lies.

    Of a local folder or file every tensor counts (`vllm_pd.model.weights`), of a hub's model its name and commit, of
    weights from elsewhere the `given` digest, the setting `weights_digest`. What it can't see was refused by
    `pin_weights`.
    """
    model = config.model_config
    settings = {k: v for k, v in model.hf_config.to_dict().items() if k not in IGNORED_KEYS}
    settings = [settings, model.quantization, _long_rope(model), *_chosen_at_start(config)]
    return f"{model.architecture}:{digest_settings(model, settings, config.load_config, given)}"


def digest_settings(model: ModelConfig, settings: list[Any], load_config: LoadConfig,
                    given: str | None = None) -> str:
    """16 hexadecimal digits of these settings and of the model's weights, as they are loaded."""
    digest = hashlib.sha256()
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(_weights(model, load_config, given))
    return digest.hexdigest()[:16]


def weights_state(config: VllmConfig, given: str | None = None) -> str:
    """What the KV store has to know of the weights beside `model_digest`, which reads only a part of each tensor: a
    folder's weights may be replaced between two lives of an engine, and the store outlives both.

    Of a local folder or file this is a digest of the name, size and time of the last change of each weight and index
    file, and of the content of the folder's Python files. A copy has the same one only if the times were preserved. It
    is empty for a hub's model, whose commit is in `model_digest`, and does not depend on weight files that are not read
    (dummy weights, and those from elsewhere, of which the `given` digest is all that is known). Raises OSError for a
    file that can't be read.
    """
    path = Path(config.model_config.model)
    if not path.exists():
        return ""
    if given is not None and is_elsewhere(config.model_config, config.load_config):
        files = []  # the digest is in `model_digest`
    else:
        files = [] if _load_format(config.load_config) == "dummy" else state_of_weights(path)
    return hashlib.sha256(json.dumps([files, digest_code(path)]).encode()).hexdigest()


def _chosen_at_start(config: VllmConfig) -> list[dict[str, Any]]:
    """What the operator may have chosen beside the model's own configuration: how weights are quantized as they are
    loaded (by `--quantization-config`, or by a short name, like `--quantization fp8_per_tensor`, for which vLLM fills
    in the same field) and other classes, which V0 can't, the revision of remote code, and which of a folder's files are
    loaded. Empty where none is set, so that digests stay what they were."""
    model, loader = config.model_config, config.load_config.model_loader_extra_config
    quantized = getattr(model, "quantization_config", None)
    chosen = {
        "quantization_config": dataclasses.asdict(quantized) if dataclasses.is_dataclass(quantized) else quantized,
        "model_class_overrides": getattr(model, "model_class_overrides", None),
        "code_revision": model.code_revision,
        "pattern": loader.get("pattern") if isinstance(loader, dict) else None,  # of formats that keep a rank's shard
    }
    found = {key: value for key, value in chosen.items() if value}
    return [found] if found else []


def short_rope_tokens(model: ModelConfig) -> int | None:
    """Up to which context a model with LongRoPE uses its short factors, in tokens. None for any other model."""
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    original = getattr(config, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    return original if "longrope" in str(rope) else None


def _long_rope(model: ModelConfig) -> bool:
    """Whether a model with LongRoPE uses its long factors: V1 chooses by the longest context that the engine serves,
    and the keys depend on it."""
    tokens = short_rope_tokens(model)
    return tokens is not None and model.max_model_len > tokens


def hub_commit(model: ModelConfig) -> str:
    """The commit of a hub's model, whose configuration was read at that commit. Raises ConfigError if it is unknown."""
    inner = getattr(model.hf_config, "model", None)  # of an EAGLE head: its checkpoint's own configuration
    commit = model.hf_config._commit_hash or getattr(inner, "_commit_hash", None) or model.revision or ""
    if not _COMMIT.fullmatch(commit):
        raise ConfigError("revision", model.revision, f"the commit of {model.model} is not known, so its weights can't "
                          "be told from a peer's: write --revision with the whole commit, or serve a local folder")
    return commit


def pin_weights(config: VllmConfig, given: str | None = None) -> None:
    """Make sure, before the model is loaded, that the digest is going to see what is loaded: the files of a folder, or
    of a hub's model that very commit by which it will be known. Of other weights there must be a `given` digest, and of
    files it must not be wrong. Raises ConfigError where none of these can be."""
    pin_files(config.model_config, config.load_config, given)


def pin_files(model: ModelConfig, load_config: LoadConfig, given: str | None = None) -> None:
    """As `pin_weights`, of a model and the way in which it is loaded."""
    if given is not None and is_elsewhere(model, load_config):
        return
    _refuse_bucket(model, load_config)
    load_format, path = _load_format(load_config), Path(model.model)
    if given is not None:
        _check_given(given, load_format, path)
    if load_format == "dummy":
        return
    if not path.exists():
        model.revision = hub_commit(model)
    elif not weight_files(path):
        raise ConfigError("model", model.model, "serve a folder or file with the weights in it, or a model of the hub: "
                          f"there is no {', '.join(SUFFIXES)} file, so its weights can't be told from a peer's")


def is_elsewhere(model: ModelConfig, load_config: LoadConfig) -> bool:
    """Whether the weights are, or may be, no files of the model: they come from a bucket, by a format that has files of
    its own, or by a loader of the user's."""
    load_format = load_config.load_format
    return not isinstance(load_format, str) or load_format.lower() not in _OF_FILES or _bucket(model, load_config) != ""


def _bucket(model: ModelConfig, load_config: LoadConfig) -> str:
    """The URI that weights are read from in place of `model`; empty where there is none."""
    load_format = load_config.load_format
    reads = isinstance(load_format, str) and load_format.lower() in _FROM_BUCKETS
    return getattr(model, "model_weights", "") if reads else ""


def _refuse_bucket(model: ModelConfig, load_config: LoadConfig) -> None:
    if bucket := _bucket(model, load_config):
        raise ConfigError("model", bucket, f"its weights can't be told from a peer's: {_VOUCH}, or serve a folder")


def _check_given(given: str, load_format: str, path: Path) -> None:
    """Raises ConfigError for a `weights_digest` of weights that are known without it, unless it is the right one."""
    if load_format == "dummy":
        raise ConfigError(DIGEST_KEY, given, "leave it out: --load-format dummy loads no weights")
    if not path.exists():
        raise ConfigError(DIGEST_KEY, given, f"leave it out: {path} is known by its name and commit on the hub; to "
                          "work with engines that have this digest, serve a folder with its files")
    if weight_files(path) and (found := digest_weights(path).hex()) != given:
        raise ConfigError(DIGEST_KEY, given, f"the files in {path} have {found}: write that, or leave it out")


def _load_format(load_config: LoadConfig) -> str:
    load_format = load_config.load_format
    if not isinstance(load_format, str) or load_format.lower() in _ELSEWHERE:
        raise ConfigError("load_format", load_format, "use one that reads the model's own files, or "
                          f"{_VOUCH}: weights from elsewhere can't be told from a peer's")
    value = load_format.lower()  # a plain string, also of an enum's member
    return "auto" if value in _AS_AUTO else value


def _weights(model: ModelConfig, load_config: LoadConfig, given: str | None) -> bytes:
    if given is not None and is_elsewhere(model, load_config):
        is_in_bucket = _bucket(model, load_config) != ""
        load_format = _load_format(load_config) if is_in_bucket else "auto"  # as of a folder with these weights
        return load_format.encode() + bytes.fromhex(given)
    load_format = _load_format(load_config)
    if load_format == "dummy":
        return b"dummy"  # from the shapes alone, with a constant seed
    path = Path(model.model)
    if not path.exists():
        return f"{load_format} {model.model}@{hub_commit(model)}".encode()
    return load_format.encode() + digest_weights(path)
