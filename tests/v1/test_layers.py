# SPDX-License-Identifier: Apache-2.0
"""B101, B114: how V1 groups layers for PDConnector, and what is refused. In the V1 environment."""
import dataclasses
import os

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from vllm_pd.errors import ConfigError
from vllm_pd.model.layers import check_groups, check_stored_groups
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.groups import block_rows, draft_blocks, states_name

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

SHAPE = dict(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
LATENT = dict(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.float32)
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)
MAMBA = MambaSpec(block_size=32, shapes=((4, 32 * 64), ), dtypes=(torch.float32, ), mamba_cache_mode="align")
NARROW = SlidingWindowSpec(**SHAPE, sliding_window=32)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    """As vLLM makes it with `--disable-hybrid-kv-cache-manager`."""
    made = EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512,
                      enforce_eager=True).create_engine_config()
    made.kv_transfer_config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both",
                                               kv_connector_module_path="vllm_pd.v1.connector")
    made.scheduler_config.disable_hybrid_kv_cache_manager = True
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def connect(config: VllmConfig, *layers: KVCacheSpec) -> list[KVCacheGroupSpec]:
    """What EngineCore does with the layers of its workers, up to its connector."""
    groups = get_kv_cache_groups(config, {f"layers.{number}": spec for number, spec in enumerate(layers)})
    PDConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(10, [], groups))
    return groups


@pytest.mark.parametrize("layers", [
    [FULL, FULL], [WINDOW, FULL, WINDOW, WINDOW], [MLAAttentionSpec(**LATENT)] * 2,
    [FULL, FullAttentionSpec(**{**SHAPE, "num_kv_heads": 2})],  # in one group: what is registered shows the shapes
], ids=["full", "some windows", "MLA", "shapes"])
def test_b101_layers_in_one_group_of_all_tokens(config, layers):
    connect(config, *layers)


@pytest.mark.parametrize("layers, words", [
    ([WINDOW, WINDOW], "SlidingWindowSpec"),
    ([RSWASpec(**SHAPE, rswa_window=64)], "RSWASpec"), ([CrossAttentionSpec(**SHAPE)], "CrossAttentionSpec"),
    ([SlidingWindowMLASpec(**LATENT, sliding_window=64)], "SlidingWindowMLASpec"),
], ids=["windows", "reference windows", "cross", "MLA windows"])
def test_b101_b80_other_groups_are_refused(config, layers, words):
    """B80: where the configuration has not told."""
    with pytest.raises(ConfigError, match=f"kv_cache_groups=.*{words}.*one group"):
        connect(config, *layers)


@pytest.fixture
def grouping(config, monkeypatch):
    """The same with the hybrid KV cache manager."""
    monkeypatch.setattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", False)
    return config


@pytest.mark.parametrize("layers, windows", [
    ([WINDOW, FULL, WINDOW, FULL], (0, 64)), ([FULL, WINDOW, WINDOW, WINDOW], (0, 64, 64, 64)),
    ([FULL, FULL, FULL, WINDOW], (0, 0, 0, 64)), ([WINDOW, FULL, NARROW], (0, 64, 32)), ([FULL, FULL], ()),
    ([WINDOW, FULL] * 12 + [FULL], (0, 64)), ([WINDOW, FULL] * 2 + [FULL], (0, 0, 64)),
    ([WINDOW, FULL] * 2 + [WINDOW], (0, 64, 64)), ([FULL] * 2 + [WINDOW], (0, 0, 64))],
    ids=["half", "more windows", "fewer", "two windows", "none", "a drafter's padded", "a drafter's not padded",
         "a drafter with the target's window", "with one of its own"])
def test_b114_groups_of_blocks(grouping, layers, windows):
    groups = connect(grouping, *layers)
    rows = block_rows(groups)
    assert sorted(rows.windows) == sorted(windows) and rows.block_size == 32
    if windows:
        assert layers[int(groups[rows.lead].layer_names[0].split(".")[1])] == FULL


@pytest.mark.parametrize("layers, words", [
    ([FULL, SlidingWindowSpec(**{**SHAPE, "num_kv_heads": 2}, sliding_window=64)], "one shape.*--disable-hybrid"),
    ([FULL, dataclasses.replace(WINDOW, extra_retained_tokens=3)], "one shape"),
    ([WINDOW, NARROW], "all tokens in one group"),
    ([FULL, WINDOW, MAMBA], "all tokens in one group"),
    ([FULL, dataclasses.replace(MAMBA, mamba_cache_mode="all")], "--mamba-cache-mode align or none.*'all'"),
    ([FULL, dataclasses.replace(MAMBA, mamba_type=MambaAttentionBackendEnum.LINEAR, num_speculative_blocks=2)],
     "speculative_config=.'LINEAR'..*MAMBA2"),
], ids=["heads", "kept tokens", "windows only", "windows and states", "a state for each block", "drafts"])
def test_b114_b80_other_groups_are_refused(grouping, layers, words):
    with pytest.raises(ConfigError, match=words if words.startswith("spec") else f"kv_cache_groups=.*{words}"):
        connect(grouping, *layers)


def test_b114_b80_no_flag_is_named_that_does_not_help():
    """With states one group is refused, too."""
    groups = [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], dataclasses.replace(FULL, num_kv_heads=2)),
              KVCacheGroupSpec(["c"], MAMBA)]
    with pytest.raises(ConfigError, match="one shape") as refused:
        check_groups(groups)
    assert "--disable-hybrid" not in str(refused.value)


@pytest.mark.parametrize("layers, windows, name", [
    ([MAMBA, FULL, MAMBA, FULL], (0, 2), "MAMBA2 4x2048:float32 in 2 groups "),
    ([MAMBA, FULL, MAMBA, MAMBA], (0, 2, 2, 2), "MAMBA2 4x2048:float32 in 4 groups "),
    ([FULL, FULL], (), ""),
], ids=["half", "more states", "none"])
def test_b114_groups_of_states(grouping, layers, windows, name):
    groups = connect(grouping, *layers)
    rows = block_rows(groups)
    assert sorted(rows.windows) == sorted(windows) and rows.block_size == 32
    assert rows.state_tokens == (32 if name else 0) and states_name(groups)[:len(name)] == name
    assert not name or states_name(groups) != states_name(groups[::-1]), "layers of other places share other memory"
    if windows:
        assert layers[int(groups[rows.lead].layer_names[0].split(".")[1])] == FULL


def test_b114_engines_that_draft_other_numbers_of_tokens_differ(grouping):
    """Even where a state has the same shape. What a peer is granted is the same."""
    groups = {drafts: connect(grouping, FULL, dataclasses.replace(MAMBA, num_speculative_blocks=drafts))
              for drafts in (0, 2, 3)}
    assert block_rows(groups[0]) == block_rows(groups[2]) == block_rows(groups[3])
    assert [draft_blocks(each) for each in groups.values()] == [0, 2, 3]
    names = [states_name(each) for each in groups.values()]
    assert names[0].startswith("MAMBA2 4x2048:float32 in 2 groups") and len(set(names)) == 3
    assert names[1].startswith("MAMBA2 4x2048:float32 for 2 drafts in 2 groups")


def test_b114_a_state_for_all_tokens_of_a_request(grouping):
    """As V1 keeps it without prefix caching."""
    rows = block_rows(connect(grouping, FULL, dataclasses.replace(MAMBA, block_size=512, mamba_cache_mode="none")))
    assert (rows.block_size, rows.state_tokens) == (32, 512)


def test_b114_b80_the_store_takes_one_group():
    groups = [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], WINDOW)]
    check_stored_groups(groups[:1])
    with pytest.raises(ConfigError, match="kv_cache_groups=2.*--disable-hybrid-kv-cache-manager"):
        check_stored_groups(groups)
