# SPDX-License-Identifier: Apache-2.0
"""B3 (where bytes lie), B81 (descriptions from a peer): every address equals that of the back end's own view."""
import msgspec
import pytest
import torch

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory, describe

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 2, 5, 16, 3, 8
SHAPE = dict(num_blocks=BLOCKS, block_size=TOKENS, kv_heads=HEADS, head_size=SIZE)


def block_address(cache: CacheDescription, layer: int, kv: int, block: int, head: int = 0) -> int:
    """The first byte of a head in a block, as the layout's docstring has it."""
    head_stride = cache.head_bytes if cache.layout.heads_are_runs else cache.head_bytes // cache.block_size
    return cache.planes[2 * layer + kv] + block * cache.block_stride_bytes + head * head_stride


def flat(dtype=torch.float32):
    return [torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE), dtype=dtype) for _ in range(LAYERS)]


def heads_first_views(cache, kv):
    return cache[kv].view(BLOCKS, HEADS, TOKENS, SIZE).permute(0, 2, 1, 3)


def test_b3_ipex_addresses_are_those_of_its_view():
    caches = flat()
    cache = describe(caches, **SHAPE, platform="cpu", backend="IPEX")
    assert cache.layout is Layout.HEADS_FIRST and cache.memory is Memory.DRAM and cache.dtype == "float32"
    for layer in range(LAYERS):
        for kv in (0, 1):
            view = caches[layer][kv].view(BLOCKS, HEADS, TOKENS, SIZE)
            for block in range(BLOCKS):
                for head in range(HEADS):
                    assert block_address(cache, layer, kv, block, head) == view[block, head].data_ptr()


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "XFORMERS"])
def test_b3_packed_addresses_are_those_of_its_views(backend):
    caches = flat(torch.bfloat16)
    cache = describe(caches, **SHAPE, platform="cpu", backend=backend)
    assert cache.layout is Layout.PACKED and cache.dtype == "bfloat16"
    x = 16 // 2
    for layer in range(LAYERS):
        keys = caches[layer][0].view(BLOCKS, HEADS, SIZE // x, TOKENS, x)
        values = caches[layer][1].view(BLOCKS, HEADS, SIZE, TOKENS)
        for kv, view in enumerate((keys, values)):
            assert block_address(cache, layer, kv, 4, 2) == view[4, 2].data_ptr()
            assert cache.head_bytes == view[4, 2].numel() * 2


@pytest.mark.parametrize("backend,order", [("FLASH_ATTN", "NHD"), ("FLASH_ATTN", "HND"), ("FLASHINFER", "NHD"),
                                           ("FLASHINFER", "HND")])
def test_b3_cuda_layouts_follow_the_strides(backend, order):
    lead = (BLOCKS, 2) if backend == "FLASHINFER" else (2, BLOCKS)
    if order == "NHD":
        caches = [torch.empty((*lead, TOKENS, HEADS, SIZE)) for _ in range(LAYERS)]
    else:
        caches = [torch.empty((*lead, HEADS, TOKENS, SIZE)).permute(0, 1, 3, 2, 4) for _ in range(LAYERS)]
    cache = describe(caches, **SHAPE, platform="cuda", backend=backend)
    assert cache.layout is (Layout.TOKENS_FIRST if order == "NHD" else Layout.HEADS_FIRST)
    assert cache.memory is Memory.VRAM
    for kv in (0, 1):
        plane = caches[1][:, kv] if backend == "FLASHINFER" else caches[1][kv]
        for block in range(BLOCKS):
            for head in range(HEADS):
                assert block_address(cache, 1, kv, block, head) == plane[block, 0, head].data_ptr()


def test_b3_a_block_is_the_bytes_from_its_address_on():
    caches = flat()
    cache = describe(caches, **SHAPE, platform="cpu", backend="IPEX")
    assert cache.block_bytes == TOKENS * HEADS * SIZE * 4 == cache.block_stride_bytes
    assert len(cache.planes) == 2 * LAYERS
    assert block_address(cache, 0, 1, 2) - block_address(cache, 0, 1, 1) == cache.block_bytes


@pytest.mark.parametrize("change,word", [
    (dict(backend="TRITON_MLA"), "TRITON_MLA"),
    (dict(platform="tpu"), "tpu"),
    (dict(num_blocks=BLOCKS + 1), "expected 6 blocks"),
    (dict(block_size=TOKENS * 2), "of 32 tokens"),
    (dict(kv_heads=HEADS + 1), "4 heads"),
])
def test_b80_what_does_not_fit_is_refused_by_name(change, word):
    with pytest.raises(ConfigError, match=word):
        describe(flat(), **{**SHAPE, "platform": "cpu", "backend": "IPEX", **change})


@pytest.mark.parametrize("caches", [
    [],
    [torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE)), torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE * 2))],
    [torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE)), torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE)).half()],
    [torch.empty((2, BLOCKS, TOKENS * HEADS * SIZE * 2))[:, :, ::2]],
], ids=["none", "other shape", "other dtype", "holes"])
def test_b80_caches_that_are_no_planes_are_refused(caches):
    with pytest.raises(ConfigError):
        describe(caches, **SHAPE, platform="cpu", backend="IPEX")


def test_b80_a_cuda_order_that_is_not_known_is_refused():
    caches = [torch.empty((2, BLOCKS, SIZE, HEADS, TOKENS)).permute(0, 1, 4, 3, 2)]
    with pytest.raises(ConfigError, match="strides"):
        describe(caches, **SHAPE, platform="cuda", backend="FLASH_ATTN")


@pytest.mark.parametrize("change", [
    dict(num_blocks=0), dict(layers=3), dict(kv_heads=-1), dict(block_bytes=1), dict(block_stride_bytes=8),
    dict(planes=(1, 2, 3)), dict(planes=(-1, 1, 1, 1)), dict(planes=(2**63 - 1, 1, 1, 1)), dict(num_blocks=2**40),
    dict(device_id=-1), dict(first_layer=-1), dict(layout="sideways"), dict(planes=None), dict(head_size="8"),
])
def test_b81_a_description_that_no_cache_has_is_refused(change):
    cache = describe(flat(), **SHAPE, platform="cpu", backend="IPEX")
    good = msgspec.to_builtins(cache)
    assert msgspec.convert(good, CacheDescription) == cache
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **change}, CacheDescription)
