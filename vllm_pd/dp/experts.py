# SPDX-License-Identifier: Apache-2.0
"""Whether a model has experts, by its configuration alone: ranks are told apart before any weight is loaded.

In doubt the answer is yes. Then the ranks run equally many forward passes, which costs time and nothing else. A model
with experts that is taken for one without would run all the same, with all experts on every rank.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

WORDS = ("expert", "moe")  # in the name of some key of every model of experts that vLLM runs
NAMES = ("model_type", "architectures")  # keys whose values are names


def has_experts(config: Mapping[Any, Any]) -> bool:
    """Whether a model's `config.json`, as a mapping, speaks of experts at any depth, or holds what is not plain data.

    A key that does so and is None, 0, false or empty says that there are none.
    """
    return any(_speaks_of_experts(str(key), value) or _holds_experts(value) for key, value in config.items())


def any_experts(config: VllmConfig) -> bool:
    """Whether the model, or the one that drafts for it, has experts, or is none of vLLM's own."""
    drafting = config.speculative_config
    models = [config.model_config, drafting.draft_model_config if drafting is not None else None]
    return config.model_config is None or any(_may_have_experts(model) for model in models if model is not None)


def _may_have_experts(model: ModelConfig) -> bool:
    from vllm.model_executor.models.registry import _VLLM_MODELS
    known = model.hf_config.to_dict()
    architectures = known.get("architectures") or []
    return not architectures or any(name not in _VLLM_MODELS for name in architectures) or has_experts(known)


def _speaks_of_experts(key: str, value: Any) -> bool:
    names = f"{value}" if key in NAMES else key
    return bool(value) and any(word in names.lower() for word in WORDS)


def _holds_experts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return has_experts(value)
    if isinstance(value, (list, tuple)):
        return any(_holds_experts(each) for each in value)
    return not (value is None or isinstance(value, (str, int, float)))
