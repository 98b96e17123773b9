# SPDX-License-Identifier: Apache-2.0
"""B101, B80: models whose layers can't be transferred are refused by their configuration."""
from types import SimpleNamespace

import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.model.layers import CACHE_DTYPES, MLA_DTYPES, check_layers


def configured(cache_dtype: str = "auto", **keys) -> SimpleNamespace:
    """What is looked at of vLLM's configuration: the cache's type, and these keys of the model's."""
    return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache_dtype),
                           model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**keys)))


@pytest.mark.parametrize("cache_dtype", sorted(CACHE_DTYPES))
def test_b101_types_of_which_a_block_has_nothing_but_keys_and_values(cache_dtype):
    check_layers(configured(cache_dtype))


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "int8_per_token_head", "nvfp4", "turboquant_k8v4", "fp8_inc"])
def test_b101_other_types_of_the_cache_are_refused(cache_dtype):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{cache_dtype}'.*'auto', 'bfloat16'"):
        check_layers(configured(cache_dtype))


@pytest.mark.parametrize("keys, words", [
    ({"index_topk": 2048}, "index_topk=2048.*sparse"), ({"compress_ratios": [1, 4]}, "compress_ratios=.*compressed"),
    ({"compress_ratios": [1, 4], "index_topk": 2048}, "compress_ratios=.*compressed"),
    ({"index_kpool": 4, "index_topk": 2048}, "index_kpool=4.*key of each token"),
    ({"rswa_window": 128}, "rswa_window=128.*windows"),
    ({"blocksparse_block_size": 64}, "blocksparse_block_size=64.*block-sparse"),
    ({"swa_num_key_value_heads": 8, "num_key_value_heads": 4}, "swa_num_key_value_heads=8.*num_key_value_heads is 4"),
    ({"global_head_dim": 512, "head_dim": 256}, "global_head_dim=512.*head_dim is 256"),
    ({"swa_v_head_dim": 64, "v_head_dim": 128}, "swa_v_head_dim=64.*v_head_dim is 128"),
], ids=str)
def test_b101_layers_of_several_kinds_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        check_layers(configured(**keys))


def v1(cache_dtype: str = "auto", use_mla: bool = True, **keys) -> SimpleNamespace:
    config = configured(cache_dtype, **keys)
    config.model_config.use_mla = use_mla
    return config


@pytest.mark.parametrize("index_topk", [None, 2048])
@pytest.mark.parametrize("cache_dtype", sorted(MLA_DTYPES))
def test_b101_what_moves_as_whole_bytes_where_it_does(cache_dtype, index_topk):
    """V1: MLA, also with an index."""
    check_layers(v1(cache_dtype, index_topk=index_topk), with_bytes=True)


@pytest.mark.parametrize("config, words", [
    (v1(use_mla=False, index_topk=2048), "index_topk=2048.*beside MLA"),
    (v1(index_topk=2048, index_kpool=4), "index_kpool=4"),
    (v1("nvfp4_ds_mla", index_topk=2048), "kv_cache_dtype='nvfp4_ds_mla'.*'fp8_ds_mla'"),
    (v1("fp8_ds_mla", use_mla=False), "kv_cache_dtype='fp8_ds_mla'.*'fp8_e5m2'"),
], ids=["no MLA", "pooled keys", "another type", "the type without MLA"])
def test_b101_b80_bytes_that_are_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        check_layers(config, with_bytes=True)


@pytest.mark.parametrize("keys", [
    {}, {"index_topk": None}, {"swa_num_key_value_heads": 4, "num_key_value_heads": 4}, {"swa_head_dim": 64},
    {"global_head_dim": None, "head_dim": 256}, {"block_configs": None},
    {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
], ids=str)
def test_b101_layers_of_one_kind_pass(keys):
    check_layers(configured(**keys))


@pytest.mark.parametrize("made", [lambda **fields: fields, lambda **fields: SimpleNamespace(**fields)],
                         ids=["mappings", "objects"])
def test_b101_layers_that_are_configured_one_by_one(made):
    def blocks(*attentions):
        return configured(block_configs=[made(attention=attention and made(**attention)) for attention in attentions])

    none, four, eight = {"no_op": True}, {"no_op": False, "n_heads_in_group": 4}, {"n_heads_in_group": 8}
    check_layers(blocks(four, none, {**eight, "no_op": True}, four, None))
    with pytest.raises(ConfigError, match=r"block_configs='n_heads_in_group \[4, 8\]'.*one shape"):
        check_layers(blocks(four, none, eight))


@pytest.mark.parametrize("key", ["compress_ratios", "compress_rates"])
def test_b101_compressed_attention_is_refused_on_v0(key):
    """Whether vLLM has a configuration of its own for it, as 0.32, or that of Transformers, as 0.33."""
    config = v1(index_topk=2048, **{key: [1, 4]})
    check_layers(config, with_bytes=True)
    with pytest.raises(ConfigError, match="compress_ratios=.*use V1"):
        check_layers(config)


@pytest.mark.parametrize("order, is_cuda, fits", [("BLHNC", False, True), ("LBHNC", True, False), (None, False, False),
                                                  (None, True, True)])
def test_b101_layers_of_several_shapes_where_all_are_in_each_block(monkeypatch, order, is_cuda, fits):
    """By what is asked for: elsewhere than on CUDA our connector does not, for vLLM's backends have it in part only."""
    monkeypatch.setattr("vllm.envs.VLLM_KV_CACHE_LAYOUT", order)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cuda=lambda: is_cuda))
    config = v1(use_mla=False, swa_head_dim=64, head_dim=32)
    if fits:
        check_layers(config, with_bytes=True)
        return
    with pytest.raises(ConfigError, match="swa_head_dim=64.*one shape.*BLHNC"):
        check_layers(config, with_bytes=True)
