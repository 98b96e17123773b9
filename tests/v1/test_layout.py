# SPDX-License-Identifier: Apache-2.0
"""B101: the order of a cache's axes that PDConnector asks V1 for, and what V1 makes of it. In the V1 environment."""
import os

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.store.connector import PDStoreConnector


@pytest.fixture
def config(monkeypatch) -> VllmConfig:
    """An engine whose connector is ours, without the plugin's checks."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    made = EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512,
                      enforce_eager=True).create_engine_config()
    made.kv_transfer_config = KVTransferConfig(kv_connector="PDConnector", kv_role="kv_both",
                                               kv_connector_module_path="vllm_pd.v1.connector")
    return made


def resolved(config: VllmConfig, backend: type) -> str:
    """The order that EngineCore chooses where all workers have this attention backend."""
    supported = [layout.name for layout in get_supported_kv_cache_layouts([backend])]
    return resolve_kv_cache_layout(config, [supported]).name


def test_b101_heads_come_first_where_the_backend_can(config):
    """FlashAttention takes tokens first by itself."""
    assert resolved(config, FlashAttentionBackend) == "LBHNC"
    config.cache_config.kv_cache_layout = config.kv_transfer_config = None
    assert resolved(config, FlashAttentionBackend) == "LBNHC"


def test_b101_on_cuda_a_block_is_in_one_piece(config, monkeypatch):
    """There each descriptor costs a copy of its own."""
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    assert resolved(config, FlashAttentionBackend) == "BLHNC"
    assert PDStoreConnector.get_required_kvcache_layout(config) == "BLHNC"


def test_b101_a_backend_without_it_keeps_its_own(config):
    assert resolved(config, FlexAttentionBackend) == "LBNHC"


def test_b101_the_cpu_has_no_other(config):
    assert resolved(config, CPUAttentionBackend) == "LBHNC"


def test_b101_the_users_order_wins(config, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert resolved(config, FlashAttentionBackend) == "LBNHC"


def test_b101_mla_has_no_order_of_heads(config, monkeypatch):
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    assert PDConnector.get_required_kvcache_layout(config) is None
    assert resolved(config, FlashAttentionBackend) == "LBNHC"
