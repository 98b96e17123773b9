# SPDX-License-Identifier: Apache-2.0
"""B101, B114: layers of several shapes in each block, as vLLM itself groups and allocates them: compressed attention
(DeepSeek-V4), and windows with other heads. What the scheduler does with such groups: tests/v1/test_windows.py.

The specs are those of vLLM 0.32 and 0.33: of DeepSeek-V4's attention, windows, compressor and indexer. The model runs
on CPUs with AMX only.
"""
import copy
import dataclasses
import time
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from tests.v1.test_worker import WAIT_S, description, finished, make_config, place, write_model
from tests.verdict import same_bytes
from vllm_pd.errors import ConfigError
from vllm_pd.model.layers import check_groups, check_stored_groups
from vllm_pd.protocol.messages import Role
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.transfer.mixed import own_caches
from vllm_pd.transfer.requests import AddTransferPeer, Write
from vllm_pd.v1 import worker as v1_worker
from vllm_pd.v1.beside.config import check_kept_groups
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.groups import block_rows, mixed_groups
from vllm_pd.v1.worker import RankHandshake, RankWorker, attach_ranks

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

BLOCKS, TOKENS = 12, 256
LATENT = dict(num_kv_heads=1, max_tp_shards=1, alignment=576)
DS_MLA = dict(LATENT, head_size=512, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=584,
              model_version="deepseek_v4")
SWA = SlidingWindowMLASpec(block_size=64, sliding_window=128, **DS_MLA)
HEADS = dict(block_size=64, head_size=32, dtype=torch.bfloat16)


def compressed(*ratios: int, swa: KVCacheSpec = SWA) -> dict[str, KVCacheSpec]:
    """What the layers of DeepSeek-V4 say, of which each keeps one state for so many tokens; 0: its window only."""
    specs: dict[str, KVCacheSpec] = {}
    for layer, ratio in enumerate(ratios):
        name = f"model.layers.{layer}.attn"
        specs[f"{name}.swa_cache"] = swa
        if not ratio:
            continue
        specs[f"{name}.mla"] = MLAAttentionSpec(block_size=TOKENS, tokens_per_state=ratio, **DS_MLA)
        specs[f"{name}.compressor.state_cache"] = state(ratio, 512)
        if ratio == 4:
            specs[f"{name}.indexer.k_cache"] = MLAAttentionSpec(block_size=TOKENS, tokens_per_state=ratio,
                                                                head_size=132, dtype=torch.uint8, **LATENT)
            specs[f"{name}.indexer.compressor.state_cache"] = state(ratio, 128)
    return specs


def state(ratio: int, size: int) -> SlidingWindowMLASpec:
    """The tokens that are yet to be compressed."""
    overlap = 2 if ratio == 4 else 1
    return SlidingWindowMLASpec(block_size=4 if ratio == 4 else 8, head_size=2 * overlap * size, dtype=torch.float32,
                                sliding_window=overlap * ratio, **LATENT)


def other_heads(heads: int = 4, window_heads: int = 2) -> dict[str, KVCacheSpec]:
    """Layers with windows that have other KV heads than those without."""
    return {f"model.layers.{layer}.attn": SlidingWindowSpec(num_kv_heads=window_heads, sliding_window=100, **HEADS)
            if layer % 2 else FullAttentionSpec(num_kv_heads=heads, **HEADS) for layer in range(4)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> VllmConfig:
    """To be copied."""
    folder: Path = write_model(tmp_path_factory.mktemp("model"))
    return make_config(folder, dtype="bfloat16", block_size=TOKENS)


def allocate(config: VllmConfig, specs: dict[str, KVCacheSpec], order: str = "BLHNC",
             blocks: int = BLOCKS) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
    """As a worker does."""
    config.cache_config.kv_cache_layout = order
    config.cache_config.block_size = max(spec.block_size for spec in specs.values())
    config.cache_config.num_gpu_blocks_override = config.cache_config.num_gpu_blocks = blocks
    groups = get_kv_cache_groups(config, specs)
    made = get_kv_cache_config_from_groups(config, groups, 1 << 30)
    caches = allocate_kv_cache(made, torch.device("cpu"), config.cache_config.get_resolved_kv_cache_layout(),
                               [group.kv_cache_spec.block_size for group in groups])
    return made, caches


@pytest.fixture
def ranks(plain, monkeypatch):
    """Makes registered ranks; closes them."""
    monkeypatch.setattr(v1_worker, "engine_name", lambda config, layers: f"vllm 0.32 of {len(layers)}")
    made = []

    def make(specs: dict[str, KVCacheSpec], order: str = "BLHNC", blocks: int = BLOCKS, tp_rank: int = 0,
             ranks: int = 1, stages: int = 1,
             use_mla: bool = True) -> tuple[RankWorker, dict[str, torch.Tensor], KVCacheConfig, VllmConfig]:
        config = copy.deepcopy(plain)
        config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size = ranks, stages
        monkeypatch.setattr(type(config.model_config), "use_mla", use_mla)
        kv, caches = allocate(config, specs, order, blocks)
        place(monkeypatch, tp_rank)
        config.kv_transfer_config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both",
                                                     kv_connector_module_path="vllm_pd.v1.connector")
        connector = PDConnector(config, KVConnectorRole.WORKER, kv)
        made.append(connector._rank)
        connector.register_kv_caches(caches)
        return made[-1], caches, kv, config

    yield make
    for one in made:
        one.close()


def attach(config: VllmConfig, kv: KVCacheConfig, *handshakes: RankHandshake):
    """As EngineCore does, whose groups have the spec of one of their layers."""
    groups = generate_scheduler_kv_cache_config([kv]).kv_cache_groups
    return attach_ranks(config, Role.BOTH, {(0, at): one for at, one in enumerate(handshakes)}, is_read=True,
                        rows=block_rows(groups))


RATIOS = (0, 4, 128, 4, 128)


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_b101_b114_what_a_rank_of_compressed_attention_says(ranks, order):
    one, caches, kv, config = ranks(compressed(*RATIOS), order)
    cache, handshake = description(one.handshake()), one.handshake()
    assert (cache.layers, cache.kv_heads, cache.num_blocks, cache.dtype) == (1, 1, BLOCKS, "uint8")
    assert cache.block_stride_bytes == kv.kv_cache_tensors[0].block_stride >= cache.block_bytes
    assert cache.planes == (min(one.data_ptr() for one in caches.values()), )
    assert handshake.mixed.startswith(f"{len(caches)} layers of several shapes in {len(kv.kv_cache_groups)} groups ")
    member, _, transfer = attach(config, kv, handshake)
    transfer.close()
    fingerprint = member.fingerprint
    assert (fingerprint.block_size, fingerprint.layers) == (TOKENS, 1) and fingerprint.states == handshake.mixed
    kinds = {window: size for window, size in zip(fingerprint.windows, fingerprint.sizes, strict=True)}
    assert kinds == {0: TOKENS, 128: 64, 8: 4} or kinds == {0: TOKENS, 128: 8, 8: 4}
    assert sorted(zip(fingerprint.windows, fingerprint.sizes, strict=True))[:2] == [(0, TOKENS), (8, 4)]
    assert fingerprint.rows == block_rows(kv.kv_cache_groups)
    assert fingerprint.rows.block_size == resolve_kv_cache_block_sizes(kv, config)[0], "hits end where blocks do"


def read_by_next_token(kv: KVCacheConfig, tokens: int) -> list[tuple[int, int]]:
    """(group, entry of its table) of each block with something that the token after these reads."""
    found = []
    for number, group in enumerate(kv.kv_cache_groups):
        spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
        first = max(0, tokens - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        found += [(number, entry) for entry in range(first // spec.block_size, -(-tokens // spec.block_size))]
    return found


@pytest.mark.parametrize("tokens", [1, 7, 255, 256, 257, 1000])
def test_b114_what_goes_of_a_prompt(plain, tokens):
    """Counted by what the next token reads, in each group."""
    kv, _ = allocate(copy.deepcopy(plain), compressed(*RATIOS))
    rows, needed = block_rows(kv.kv_cache_groups), read_by_next_token(kv, tokens)
    tables = [[1000 * group + entry for entry in range(-(-tokens // size))] for group, size in enumerate(rows.sizes)]
    assert sorted(rows.pick(tables, tokens, 0)) == [1000 * group + entry for group, entry in needed]
    assert rows.count(tokens, 0) == len(needed)


def as_bytes(caches: dict[str, torch.Tensor], ids: list[int]) -> dict[str, torch.Tensor]:
    """What each layer has in these blocks."""
    return {name: cache[ids].contiguous().view(torch.uint8) for name, cache in caches.items()}


def fill(caches: dict[str, torch.Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    storage = next(iter(caches.values())).untyped_storage()
    every = torch.empty(0, dtype=torch.uint8).set_(storage)
    every.copy_(torch.randint(1, 100, every.shape, dtype=torch.uint8))


@pytest.mark.parametrize("specs, use_mla", [(compressed(*RATIOS), True), (other_heads(), False)],
                         ids=["compressed", "other heads"])
def test_b101_b5_real_bytes_of_all_layers_of_a_block(ranks, specs, use_mla):
    """Over NIXL, with other numbers of blocks. No other block changes."""
    p, ours, p_kv, p_config = ranks(specs, use_mla=use_mla)
    d, theirs, d_kv, d_config = ranks(specs, blocks=BLOCKS + 3, use_mla=use_mla)
    p_member, _, sends = attach(p_config, p_kv, p.handshake())
    d_member, metadata, receives = attach(d_config, d_kv, d.handshake())
    assert p_member.fingerprint.first_difference(d_member.fingerprint) is None
    for transfer in (sends, receives):
        transfer.start(lambda: None, lambda end: None)
    fill(ours, 1)
    fill(theirs, 2)
    before = as_bytes(theirs, list(range(BLOCKS + 3)))
    sends.execute([AddTransferPeer(d_member.incarnation, metadata),
                   Write("w", d_member.incarnation, [3, 1, 11], [0, 7, 14], [b"n"])])
    (end, ) = finished(sends, 1)
    assert end.ok and end.bytes == 3 * description(p.handshake()).block_bytes
    deadline_s = time.monotonic() + WAIT_S
    while not receives.take_progress().notices:
        receives.poll()
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    untouched = [block for block in range(BLOCKS + 3) if block not in (0, 7, 14)]
    for name, held in as_bytes(theirs, [0, 7, 14]).items():
        same_bytes(torch.equal(held, as_bytes(ours, [3, 1, 11])[name]))
        same_bytes(torch.equal(as_bytes(theirs, untouched)[name], before[name][untouched]))
    for transfer in (sends, receives):
        transfer.close()


def fingerprint_of(ranks, *arguments, **more):
    rank, _, kv, config = ranks(*arguments, **more)
    member, _, transfer = attach(config, kv, rank.handshake())
    transfer.close()
    return member.fingerprint


def test_b42_engines_whose_blocks_hold_something_else_differ(ranks, monkeypatch):
    ours = fingerprint_of(ranks, compressed(*RATIOS))
    assert ours.first_difference(fingerprint_of(ranks, compressed(*RATIOS), blocks=BLOCKS + 1)) is None
    swapped = fingerprint_of(ranks, compressed(0, 128, 4, 128, 4))
    assert ours.first_difference(swapped)[0] in ("windows", "states"), "the same numbers of layers, in other places"
    larger = fingerprint_of(ranks, compressed(*RATIOS, swa=dataclasses.replace(SWA, block_size=32)))
    assert ours.first_difference(larger)[0] in ("windows", "states", "sizes")
    monkeypatch.setattr(v1_worker, "index_type", lambda: "float8_e4m3fnuz")
    assert ours.first_difference(fingerprint_of(ranks, compressed(*RATIOS)))[0] == "states", "uint8 says nothing"


@pytest.mark.parametrize("use_mla, heads", [(True, [range(0, 1)] * 2), (False, [range(0, 1), range(1, 2)])])
def test_b114_two_ranks_go_to_two_ranks_only(ranks, use_mla, heads):
    """From each rank to that of the same number, whether they hold the same or not."""
    specs = compressed(*RATIOS) if use_mla else other_heads(2, 1)
    made = [ranks(specs, tp_rank=rank, ranks=2, use_mla=use_mla) for rank in range(2)]
    caches = [description(one.handshake()) for one, *_ in made]
    assert [range(cache.first_head, cache.first_head + cache.kv_heads) for cache in caches] == heads
    _, _, kv, config = made[0]
    member, _, transfer = attach(config, kv, *(one.handshake() for one, *_ in made))
    transfer.close()
    alone = fingerprint_of(ranks, compressed(*RATIOS) if use_mla else other_heads(2, 1), use_mla=use_mla)
    assert member.fingerprint.first_difference(alone) == ("tp", 2, 1)


def test_b80_ranks_whose_blocks_hold_something_else_are_refused(ranks):
    one, _, kv, config = ranks(other_heads(2, 1), ranks=2, use_mla=False)
    other, *_ = ranks(other_heads(4, 1), tp_rank=1, ranks=2, use_mla=False)
    with pytest.raises(ConfigError, match="kv_cache=.*blocks of all ranks must hold the same"):
        attach(config, kv, one.handshake(), other.handshake())


def test_b101_one_group_with_layers_of_several_shapes(ranks):
    """A drafter with other heads: prompts are kept and read as with layers of one shape."""
    specs = {f"model.layers.{layer}.attn": FullAttentionSpec(num_kv_heads=4 - layer // 3, **HEADS)
             for layer in range(4)}
    one, _, kv, config = ranks(specs, use_mla=False)
    assert len(kv.kv_cache_groups) == 1 and block_rows(kv.kv_cache_groups) == BlockRows(64)
    assert description(one.handshake()).block_bytes == (3 * 4 + 3) * 64 * 2 * 32 * 2
    member, _, transfer = attach(config, kv, one.handshake())
    transfer.close()
    assert member.fingerprint.rows == BlockRows(64) and "4 layers of several shapes" in member.fingerprint.states


def test_b3_layers_that_use_the_cache_of_another(ranks, monkeypatch):
    """vLLM puts them into no group before it has made the connector, and registers them all the same."""
    specs = other_heads()
    one, caches, kv, _ = ranks(specs, use_mla=False)
    more = {**caches, "model.layers.4.attn": caches["model.layers.1.attn"]}
    assert own_caches(more, mixed_groups(kv.kv_cache_groups)).keys() == caches.keys()
    monkeypatch.setattr(PDConnector, "register_kv_caches", lambda connector, caches: connector._rank.register_kv_caches(
        {**caches, "model.layers.4.attn": caches["model.layers.1.attn"]}))
    two, *_ = ranks(specs, use_mla=False)
    assert two.handshake().mixed == one.handshake().mixed
    with pytest.raises(ConfigError, match="kv_cache='model.layers.4.attn'.*none of vLLM's groups"):
        own_caches({**caches, "model.layers.4.attn": torch.zeros(BLOCKS, 1, 4, 4)}, mixed_groups(kv.kv_cache_groups))


def test_b101_one_group_of_all_tokens_with_windows_and_other_shapes(plain):
    """As vLLM makes it with --disable-hybrid-kv-cache-manager: a window that frees nothing."""
    full = FullAttentionSpec(num_kv_heads=4, **HEADS)
    specs = {"layers.0": full, "layers.1": dataclasses.replace(full, sliding_window=100),
             "layers.2": FullAttentionSpec(num_kv_heads=2, **HEADS)}
    kv, _ = allocate(copy.deepcopy(plain), specs)
    assert len(kv.kv_cache_groups) == 1
    check_groups(kv.kv_cache_groups, is_block_outermost=True)
    assert mixed_groups(kv.kv_cache_groups) == dict.fromkeys(specs, 0)


# What is refused.


def test_b80_layers_that_lie_one_after_the_other(ranks):
    """In an order in which a block of all layers is no run of bytes."""
    with pytest.raises(ConfigError, match="kv_cache_groups=.*one shape.*BLHNC"):
        ranks(other_heads(4, 4) | {"model.layers.4.attn": SlidingWindowSpec(
            num_kv_heads=2, sliding_window=100, **{**HEADS, "block_size": 128})}, "LBHNC", use_mla=False)


@pytest.mark.parametrize("specs, words", [
    ({"model.layers.0.swa_cache": SWA, "model.layers.0.state": state(4, 512)}, "all tokens in one group"),
    (compressed(0, 4, swa=dataclasses.replace(SWA, bounded_replay=True)), "prefix_replay_tokens': 128"),
    (compressed(0, 4, swa=dataclasses.replace(SWA, extra_retained_tokens=3)), "extra_retained_tokens': 3"),
], ids=["windows only", "a window that is replayed", "a window that keeps more"])
def test_b80_groups_that_are_refused(ranks, specs, words):
    with pytest.raises(ConfigError, match=f"kv_cache_groups=.*{words}"):
        ranks(specs)


def test_b80_what_was_not_tried_with_layers_of_several_shapes(ranks, plain):
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2.*several shapes"):
        ranks(compressed(*RATIOS), stages=2)
    kv, _ = allocate(copy.deepcopy(plain), {f"layers.{layer}": FullAttentionSpec(num_kv_heads=4 - layer, **HEADS)
                                            for layer in range(2)})
    assert mixed_groups(kv.kv_cache_groups) == {"layers.0": 0, "layers.1": 0}
    with pytest.raises(ConfigError, match="OffloadingConnector=.*several shapes"):
        check_kept_groups(kv.kv_cache_groups)
    groups = allocate(copy.deepcopy(plain), compressed(*RATIOS))[0].kv_cache_groups
    with pytest.raises(ConfigError, match="kv_cache_groups="):
        check_stored_groups(groups)
