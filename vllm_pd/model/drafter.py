# SPDX-License-Identifier: Apache-2.0
"""The drafter of speculative decoding, as far as it concerns KV that goes from one V1 engine to another.

A drafter that guesses by tokens alone has no state: the decode engine has the whole prompt, and its prefill engines
need none. One that is a model has layers of its own. Where their KV has the target's shape, or all layers are in each
block (`vllm_pd.transfer.mixed`), V1 keeps it in the target's blocks, so it is registered, sent, held and read as that
of any other layer. Then both engines must have the same drafter, or its KV of a prompt is missing or another's: every
answer would be right, and fewer drafts accepted, which nobody would see. So it is in the fingerprint. How many tokens
are drafted at a time is each engine's own matter, but beside recurrent states, whose size depends on it.

What a drafter writes for a token may depend on the next one. Of a prompt's last token the decode engine computes it
itself, with the token that it samples. Of the last one of a prefix hit V1 has it computed again (it drops a block).
Where a job is the prompt without its last token (`vllm_pd.protocol.rows`), the grant says that token, and it is the
only one that the prefill engine may sample.

Where V1 keeps the target's layers in several groups of blocks, it puts the drafter's into those of their kind, or into
further ones. Their blocks are sent with these groups.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd.errors import ConfigError
from vllm_pd.model.fingerprint import IGNORED_KEYS, digest_settings, pin_files
from vllm_pd.model.layers import OR_IN_BLOCKS, may_be_mixed

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
WITH_KV = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
_REFUSED = {
    "dspark": "it drafts a block of tokens at once, and what its layers need of a prompt's end was not tried",
    "dflash": "it drafts a block of tokens at once, and what its layers need of a prompt's end was not tried",
    "extract_hidden_states": "the hidden states of a prompt that a peer computes are not transferred",
    "custom_class": "whether a class of your own keeps KV is not known here",
}
# vLLM raises the length to that of the target, and writes how many tokens are drafted; both may be each engine's own.
_IGNORED_KEYS = IGNORED_KEYS | {"max_position_embeddings", "num_lookahead_tokens"}


def check_drafter(config: VllmConfig) -> None:
    """Raises ConfigError for a drafter whose KV, if it has any, can't go with that of a prompt."""
    drafting = config.speculative_config
    if drafting is None or drafting.method in WITHOUT_KV:
        return
    if drafting.method not in WITH_KV:
        raise ConfigError("speculative_config.method", drafting.method,
                          f"use one of {sorted(WITHOUT_KV | WITH_KV)}, or none: "
                          f"{_REFUSED.get(drafting.method, 'this one was not tried with disaggregation')}")
    if config.num_prefill_lookahead_tokens > 1:
        raise ConfigError("speculative_config.num_speculative_tokens", drafting.num_speculative_tokens,
                          "write 1: with more, this model drafts by several modules, of which the later ones read "
                          "tokens after the prompt that a peer does not have")
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", config.parallel_config.pipeline_parallel_size,
                          f"use 1 with the drafter {drafting.method}: its layers are on the last stage only, which was "
                          "not tried")
    if drafting.draft_model_config.has_inner_state:
        raise ConfigError("speculative_config.model", drafting.draft_model_config.model, "use a drafter without "
                          "recurrent states: which of its states a peer needs is not known here")
    own, target = drafting.kv_cache_dtype, config.cache_config.cache_dtype
    if own not in (None, target):
        raise ConfigError("speculative_config.kv_cache_dtype", own,
                          f"remove it: a drafter's KV goes with the target's, whose type is {target}")
    drafters, targets = _kv_shape(drafting.draft_model_config), _kv_shape(config.model_config)
    if drafters != targets and not may_be_mixed(config):
        raise ConfigError("speculative_config.model", drafting.draft_model_config.model, "use a drafter whose KV has "
                          f"the target's shape: (KV heads, head size) are {drafters}, of the target {targets}"
                          f"{OR_IN_BLOCKS}")


def keeps_kv(config: VllmConfig) -> bool:
    """Whether this engine has a drafter with layers whose KV goes with that of a prompt."""
    return config.speculative_config is not None and config.speculative_config.method in WITH_KV


def drafter_layers(config: VllmConfig) -> int:
    """How many layers a drafter adds to those of the target."""
    return config.speculative_config.draft_model_config.get_total_num_hidden_layers() if keeps_kv(config) else 0


def drafter_digest(config: VllmConfig) -> str:
    """The drafter's method, and a digest of its configuration and weights, as of a model's own. Empty for an engine
    without a drafter, or with one without KV."""
    if not keeps_kv(config):
        return ""
    drafting = config.speculative_config
    draft = drafting.draft_model_config
    settings = [_settings(draft.hf_config.to_dict()), draft.quantization, draft.code_revision,
                drafting.parallel_drafting, drafting.use_heterogeneous_vocab]
    return f"{drafting.method}:{digest_settings(draft, settings, _load_config(config))}"


def pin_drafter(config: VllmConfig) -> None:
    """As `pin_weights`, for the drafter's. Raises ConfigError."""
    if keeps_kv(config):
        pin_files(config.speculative_config.draft_model_config, _load_config(config))


def _load_config(config: VllmConfig) -> LoadConfig:
    return config.speculative_config.draft_load_config or config.load_config


def _settings(value: Any) -> Any:
    """Without what does not tell two drafters apart; a configuration may be inside another."""
    if not isinstance(value, dict):
        return value
    return {key: _settings(one) for key, one in value.items() if key not in _IGNORED_KEYS}


def _kv_shape(model: ModelConfig) -> tuple[int, int]:
    return 1 if model.use_mla else model.get_total_num_kv_heads(), model.get_head_size()
