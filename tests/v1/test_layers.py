# SPDX-License-Identifier: Apache-2.0
"""B101: which layers V1 puts into one group of blocks for PDConnector, and what is refused. In the V1 environment."""
import os

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from vllm_pd.errors import ConfigError
from vllm_pd.v1.connector import PDConnector

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

SHAPE = dict(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
LATENT = dict(block_size=32, num_kv_heads=1, head_size=576, dtype=torch.float32)
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    """As vLLM makes it for a connector that does not know groups."""
    made = EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512,
                      enforce_eager=True).create_engine_config()
    made.kv_transfer_config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both",
                                               kv_connector_module_path="vllm_pd.v1.connector")
    made.scheduler_config.disable_hybrid_kv_cache_manager = True
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def connect(config: VllmConfig, *layers: KVCacheSpec) -> None:
    """What EngineCore does with the layers of its workers, up to its connector."""
    groups = get_kv_cache_groups(config, {f"layers.{number}": spec for number, spec in enumerate(layers)})
    PDConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(10, [], groups))


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


def test_b101_b80_groups_of_the_hybrid_manager_are_refused(config, monkeypatch):
    """B80: vLLM does not let it be on with our connector; if it did, block ids of one group would stand for all."""
    monkeypatch.setattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", False)
    with pytest.raises(ConfigError, match="kv_cache_groups="):
        connect(config, WINDOW, FULL, WINDOW, FULL)


def test_b101_b80_layers_of_two_kinds_in_one_group_are_refused(config):
    group = KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], FULL)
    with pytest.raises(ConfigError, match="kv_cache_groups="):
        PDConnector(config, KVConnectorRole.WORKER, KVCacheConfig(10, [], list(group)))
