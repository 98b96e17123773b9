# SPDX-License-Identifier: Apache-2.0
"""B101: sparse attention by an index (DeepSeek-V3.2, GLM-5.2): what a rank makes of the caches that vLLM allocates.

The specs are those of vLLM 0.32 and 0.33: of `MLAAttention`, also for fp8_ds_mla, and `DeepseekV32IndexerCache`.
Groups, memory and views are made by vLLM itself. The model does not run on a CPU.
"""
import copy
import dataclasses
import time
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.utils import allocate_kv_cache

from tests.v1.test_worker import BLOCKS, WAIT_S, description, finished, make_config, place, write_model
from tests.verdict import same_bytes
from vllm_pd.errors import ConfigError
from vllm_pd.model.layers import check_groups
from vllm_pd.protocol.messages import Role
from vllm_pd.transfer.requests import AddTransferPeer, Read, Write
from vllm_pd.v1 import worker as v1_worker
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.fingerprint import token_bytes
from vllm_pd.v1.groups import block_rows, index_layers
from vllm_pd.v1.worker import RankHandshake, RankWorker, attach_ranks

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

TOKENS, LAYERS = 64, 4
MLA = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.bfloat16,
                       cache_dtype_str="auto", is_index_group_leader=True)
DS_MLA = dataclasses.replace(MLA, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656,
                             kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
INDEX = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8,
                         cache_role=SparseCacheRole.INDEXER)
INDEX_BYTES = TOKENS * 132


def layers_of(mla: KVCacheSpec = MLA, indexed: tuple[int, ...] = tuple(range(LAYERS)), layers: range = range(LAYERS),
              index: KVCacheSpec = INDEX) -> dict[str, KVCacheSpec]:
    """What the layers of a model say. Those without an index use that of a layer before (`index_topk_freq`)."""
    specs: dict[str, KVCacheSpec] = {}
    for layer in layers:
        specs[f"model.layers.{layer}.self_attn.attn"] = dataclasses.replace(mla, is_index_group_leader=layer in indexed)
        if layer in indexed:
            specs[f"model.layers.{layer}.self_attn.indexer.k_cache"] = index
    return specs


def allocate(config: VllmConfig, specs: dict[str, KVCacheSpec], order: str = "LBNHC",
             blocks: int = BLOCKS) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """As a worker does."""
    config.cache_config.kv_cache_layout = order
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = blocks
    groups = get_kv_cache_groups(config, specs)
    made = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    return made, allocate_kv_cache(made, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(),
                                   [TOKENS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def plain(folder) -> VllmConfig:
    """To be copied."""
    return make_config(folder, dtype="bfloat16", block_size=TOKENS)


@pytest.fixture
def ranks(plain, monkeypatch):
    """Makes registered ranks; closes them."""
    monkeypatch.setattr(v1_worker, "engine_name", lambda config, layers: "vllm 0.32 " + (
        "INDEXER" if any("indexer" in layer for layer in layers) else f"SPARSE of {len(layers)}"))
    made = []

    def make(specs: dict[str, KVCacheSpec], order: str = "LBNHC", tp_rank: int = 0, ranks: int = 1, stage: int = 0,
             stages: int = 1, cache_dtype: str = "auto",
             blocks: int = BLOCKS) -> tuple[RankWorker, dict[str, torch.Tensor], VllmConfig]:
        config = copy.deepcopy(plain)
        config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = ranks, stages
        monkeypatch.setattr(type(config.model_config), "use_mla", True)
        kv, caches = allocate(config, specs, order, blocks)
        config.cache_config.cache_dtype = cache_dtype  # as MLAAttention sets it
        place(monkeypatch, tp_rank, stage)
        config.kv_transfer_config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both",
                                                     kv_connector_module_path="vllm_pd.v1.connector")
        connector = PDConnector(config, KVConnectorRole.WORKER, kv)
        made.append(connector._rank)
        connector.register_kv_caches(caches)
        return made[-1], caches, config

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("mla", [MLA, DS_MLA], ids=["bfloat16", "fp8_ds_mla"])
def test_b101_what_a_rank_says_of_its_caches(ranks, mla, order):
    one, caches, _ = ranks(layers_of(mla), order)
    cache = description(one.handshake())
    assert (cache.layers, cache.kv_heads, cache.num_blocks, cache.block_size) == (LAYERS, 1, BLOCKS, TOKENS)
    assert (cache.dtype, cache.head_size) == (("uint8", 656) if mla is DS_MLA else ("bfloat16", 576))
    assert [(region.layer, region.block_bytes) for region in cache.whole] == [(at, INDEX_BYTES) for at in range(LAYERS)]
    assert [region.address for region in cache.whole] == [
        caches[f"model.layers.{at}.self_attn.indexer.k_cache"].data_ptr() for at in range(LAYERS)]
    packed = order.startswith("B")
    assert {region.block_stride_bytes == cache.block_stride_bytes for region in cache.whole} == {packed}
    assert cache.whole[0].block_stride_bytes == (
        LAYERS * (cache.block_bytes + INDEX_BYTES) if packed else INDEX_BYTES)


def test_b101_blocks_whose_distance_is_padded(ranks):
    """As backends for whose kernels a cache is rows of one size have it."""
    aligned = align_blocks_to_rows(INDEX, 48)
    one, *_ = ranks(layers_of(index=aligned))
    region = description(one.handshake()).whole[1]
    assert region.block_bytes == INDEX_BYTES < region.block_stride_bytes == 2 * 48 * 132


def test_b101_layers_that_use_the_index_of_another(ranks):
    one, *_ = ranks(layers_of(indexed=(0, 1, 3)))
    cache = description(one.handshake())
    assert cache.layers == LAYERS and [region.layer for region in cache.whole] == [0, 1, 3]


def test_b115_a_drafters_layer_has_an_index_as_any_other(ranks):
    """MTP: a further layer, whose index vLLM always makes."""
    one, *_ = ranks(layers_of(indexed=(0, 2, 4), layers=range(LAYERS + 1)))
    cache = description(one.handshake())
    assert cache.layers == LAYERS + 1 and [region.layer for region in cache.whole] == [0, 2, 4]


def test_b101_the_scheduler_sees_one_group(plain):
    """Whose blocks are the same for all layers."""
    config = copy.deepcopy(plain)
    for specs in (layers_of(), layers_of(DS_MLA, (0, 2))):
        made, _ = allocate(config, specs)
        (group, ) = made.kv_cache_groups
        assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) and set(group.layer_names) == set(specs)
        assert index_layers(made.kv_cache_groups) == [name for name in specs if "indexer" in name]
        for groups in (made.kv_cache_groups, generate_scheduler_kv_cache_config([made]).kv_cache_groups):
            check_groups(groups)
            rows = block_rows(groups)
            assert (rows.block_size, rows.windows, rows.state_tokens) == (TOKENS, (), 0)


def test_b101_models_without_an_index_have_none(plain):
    config = copy.deepcopy(plain)
    made, _ = allocate(config, layers_of(indexed=()))
    assert index_layers(made.kv_cache_groups) == []


# Engines.


def attach(config: VllmConfig, *handshakes: RankHandshake):
    stages = config.parallel_config.pipeline_parallel_size
    tp = len(handshakes) // stages
    return attach_ranks(config, Role.BOTH, {divmod(at, tp): one for at, one in enumerate(handshakes)}, is_read=True)


def test_b42_the_fingerprint_tells_engines_with_other_regions_apart(ranks):
    """The type of the cache is what the layers have chosen, which EngineCore's configuration does not say."""
    seen = {}
    for name, specs in (("four", layers_of(DS_MLA)), ("two", layers_of(DS_MLA, (0, 2))),
                        ("others", layers_of(DS_MLA, (0, 3))), ("none", layers_of(DS_MLA, ())),
                        ("larger", layers_of(DS_MLA, index=dataclasses.replace(INDEX, head_size=136)))):
        one, _, config = ranks(specs, cache_dtype="fp8_ds_mla")
        assert token_bytes(config)  # where EngineCore and the rank are one process
        config.cache_config.cache_dtype = "fp8"
        member, _, transfer = attach(config, one.handshake())
        transfer.close()
        seen[name] = member.fingerprint
        assert member.fingerprint.kv_dtype == "fp8_ds_mla"
    assert seen["none"].engine == "vllm 0.32 SPARSE of 4"
    assert seen["four"].engine.startswith("vllm 0.32 SPARSE of 4, beside KV 4 x 8448 bytes (")
    assert seen["four"].engine.endswith(") by vllm 0.32 INDEXER in float8_e4m3fn")
    assert len({one.engine for one in seen.values()}) == 5
    assert seen["four"].first_difference(seen["two"]) == ("engine", seen["four"].engine, seen["two"].engine)


def test_b101_keys_of_another_type_are_another_engine_s(ranks, monkeypatch):
    """Their size says nothing: on some machines the same bytes are other numbers."""
    seen = []
    for name in ("float8_e4m3fn", "float8_e4m3fnuz"):
        monkeypatch.setattr(v1_worker, "index_type", lambda name=name: name)
        worker, _, config = ranks(layers_of())
        member, _, transfer = attach(config, worker.handshake())
        transfer.close()
        seen.append(member.fingerprint)
    assert seen[0].first_difference(seen[1])[0] == "engine"


def test_b101_stages_have_the_regions_of_their_layers(ranks):
    first, _, config = ranks(layers_of(layers=range(2)), stages=2)
    second, *_ = ranks(layers_of(layers=range(2, 4), indexed=(3, )), stage=1, stages=2)
    assert [[region.layer for region in description(one.handshake()).whole] for one in (first, second)] == [[0, 1], [3]]
    member, _, transfer = attach(config, first.handshake(), second.handshake())
    transfer.close()
    one, _, alone = ranks(layers_of(indexed=(0, 1, 3)))
    other, _, transfer = attach(alone, one.handshake())
    transfer.close()
    assert member.fingerprint.layers == LAYERS and ", beside KV 3 x 8448 bytes (" in member.fingerprint.engine
    assert member.fingerprint.engine.partition(",")[2] == other.fingerprint.engine.partition(",")[2]


def whole_blocks(caches: dict[str, torch.Tensor], ids: list[int]) -> dict[str, torch.Tensor]:
    """What each layer has in these blocks, as bytes."""
    return {name: cache[ids].contiguous().view(torch.uint8) for name, cache in caches.items()}


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for cache in caches.values():
        cache.copy_(torch.randint(1, 255, (*cache.shape[:3], cache.shape[3] * cache.element_size()),
                                  dtype=torch.uint8).view(cache.dtype))


@pytest.mark.parametrize("mla, p_order, d_order, indexed", [
    (MLA, "LBNHC", "LBNHC", tuple(range(LAYERS))), (DS_MLA, "LBNHC", "BLNHC", (0, 2)),
], ids=["bfloat16", "fp8_ds_mla, packed at D, shared"])
def test_b101_b5_real_bytes_of_an_index_go_and_are_read(ranks, mla, p_order, d_order, indexed):
    """Over NIXL, from the claim to the bytes: written by P, then read by P. No other block changes."""
    p, ours, p_config = ranks(layers_of(mla, indexed), p_order)
    d, theirs, d_config = ranks(layers_of(mla, indexed), d_order, blocks=BLOCKS + 3)
    p_member, _, sends = attach(p_config, p.handshake())
    d_member, metadata, receives = attach(d_config, d.handshake())
    assert p_member.fingerprint.first_difference(d_member.fingerprint) is None
    for transfer in (sends, receives):
        transfer.start(lambda: None, lambda end: None)
    fill(ours, 1)
    fill(theirs, 2)
    before = whole_blocks(theirs, list(range(BLOCKS + 3)))
    sends.execute([AddTransferPeer(d_member.incarnation, metadata),
                   Write("w", d_member.incarnation, [3, 1], [0, 7], [b"n"])])
    (end, ) = finished(sends, 1)
    assert end.ok and end.bytes == 2 * (LAYERS * TOKENS * (656 if mla is DS_MLA else 1152) + len(indexed) * INDEX_BYTES)
    deadline_s = time.monotonic() + WAIT_S
    while not receives.take_progress().notices:
        receives.poll()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    untouched = [block for block in range(BLOCKS + 3) if block not in (0, 7)]
    for name, held in whole_blocks(theirs, [0, 7]).items():
        same_bytes(torch.equal(held, whole_blocks(ours, [3, 1])[name]))
        same_bytes(torch.equal(whole_blocks(theirs, untouched)[name], before[name][untouched]))
    kept = whole_blocks(ours, [0, 1, 3])
    sends.execute([Read("r", d_member.incarnation, [4, 2], [5, 6])])
    (end, ) = finished(sends, 1)
    assert end.ok
    for name, held in whole_blocks(ours, [4, 2]).items():
        same_bytes(torch.equal(held, before[name][[5, 6]]))
        same_bytes(torch.equal(whole_blocks(ours, [0, 1, 3])[name], kept[name]))
    for transfer in (sends, receives):
        transfer.close()


# What is refused.


def test_b80_blocks_that_the_kernels_split(ranks):
    with pytest.raises(ConfigError, match="--block-size"):
        ranks({name: dataclasses.replace(spec, block_size=2 * TOKENS) for name, spec in layers_of().items()})


def test_b80_a_second_cache_that_is_no_index(ranks):
    other = dataclasses.replace(INDEX, cache_role=SparseCacheRole.SPARSE)
    with pytest.raises(ConfigError, match="indexer.k_cache|every layer must have the shape"):
        ranks(layers_of(index=other))


@pytest.mark.parametrize("also", [
    MambaSpec(block_size=TOKENS, shapes=((4, 64), ), dtypes=(torch.float32, ), mamba_cache_mode="align"),
], ids=["states"])
def test_b80_an_index_beside_states_is_refused(also):
    """vLLM has no such model. In a worker, before anything is registered."""
    specs = layers_of(indexed=(0, ), layers=range(1))
    groups = [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)),
              KVCacheGroupSpec(["model.layers.1.mixer"], also)]
    with pytest.raises(ConfigError, match="kv_cache_groups=.*one shape"):
        check_groups(groups)


