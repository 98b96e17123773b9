# SPDX-License-Identifier: Apache-2.0
"""Whether a model has experts, by its configuration alone. This is decided before any weight is loaded.

In doubt the answer is yes. Then the ranks run equally many forwards, which costs time and nothing else. A model with
experts that is taken for one without them runs correctly too, with all experts on every rank.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

WORDS = ("expert", "moe")  # one of these is in some key of every model with experts that vLLM runs
NAMES = ("model_type", "architectures")  # keys whose values are names


def has_experts(config: Mapping[Any, Any]) -> bool:
    """Whether a model's `config.json`, as a mapping, names experts at any depth, or holds anything but plain data.

    A key that names experts and whose value is None, 0, false or empty means that there are none.
    """
    return any(_names_experts(str(key), value) or _holds_experts(value) for key, value in config.items())


def any_experts(config: VllmConfig) -> bool:
    """Whether the model, or its draft model, has experts or an architecture that vLLM does not ship."""
    drafting = config.speculative_config
    models = [config.model_config, drafting.draft_model_config if drafting is not None else None]
    return config.model_config is None or any(_may_have_experts(model) for model in models if model is not None)


def _may_have_experts(model: ModelConfig) -> bool:
    from vllm.model_executor.models.registry import _VLLM_MODELS
    config = model.hf_config.to_dict()
    architectures = config.get("architectures") or []
    return not architectures or any(name not in _VLLM_MODELS for name in architectures) or has_experts(config)


def _names_experts(key: str, value: Any) -> bool:
    names = f"{value}" if key in NAMES else key
    return bool(value) and any(word in names.lower() for word in WORDS)


def _holds_experts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return has_experts(value)
    if isinstance(value, (list, tuple)):
        return any(_holds_experts(each) for each in value)
    return not (value is None or isinstance(value, (str, int, float)))
