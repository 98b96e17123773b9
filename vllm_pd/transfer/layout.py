# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a KV cache lie.

A peer writes KV blocks directly into our memory, so both sides must agree on what is at which address. A
`CacheDescription` describes that for one rank. It is made once, after the cache tensors exist, and is sent to peers
in the transport's metadata. It holds numbers only; the worker keeps the tensors.

The address of a block is always

    planes[plane] + block * block_stride_bytes

and a block is one contiguous run of `block_bytes` in each plane. Layouts differ in the planes of a layer and in the
order *inside* a block. V0 has two planes for each layer, keys and values (`describe`):

    HEADS_FIRST     [head, token, channel]                  IPEX on the CPU; CUDA with an HND stride order
    TOKENS_FIRST    [token, head, channel]                  CUDA FlashAttention and FlashInfer by default (NHD)
    PACKED          K [head, channel/x, token, x]           paged attention kernels (CPU without IPEX, xFormers)
                    V [head, channel, token]

V1 has the keys and values of a head together (`describe_views`). Its name for the order of all axes, with L layers, B
blocks, H heads, N tokens and C content, is on the right:

    KV_HEADS_FIRST  [head, token, content]                  LBHNC, BLHNC: one plane for each layer
                                                            LHBNC, BHLNC: one plane for each head of each layer
    KV_TOKENS_FIRST [token, head, content]                  LBNHC, BLNHC: one plane for each layer

What a head's run contains is up to the attention backend: `Fingerprint.engine` names it.

A layer may have more in each block than its KV heads: with sparse attention the keys of its index. What is there is
not split over ranks, and only goes as whole bytes: a `WholeRegion`, which has addresses as a plane has, but a size and
a stride of its own.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    import torch

KEY, VALUE = 0, 1
MAX_REGIONS = 4096  # of a rank: a layer has one, at most
MAX_DESCRIPTORS = 2**31 - 1  # a descriptor's index is an int32


class Layout(Enum):
    """How a block is stored: the planes of a layer, and the order of the dimensions inside one block of a plane."""
    HEADS_FIRST = "heads-first"
    TOKENS_FIRST = "tokens-first"
    PACKED = "packed"
    KV_HEADS_FIRST = "kv-heads-first"
    KV_TOKENS_FIRST = "kv-tokens-first"

    @property
    def heads_are_runs(self) -> bool:
        """Whether each head of a block is one contiguous run, and so are neighbouring heads of one plane."""
        return self not in (Layout.TOKENS_FIRST, Layout.KV_TOKENS_FIRST)

    @property
    def parts(self) -> int:
        """In how many parts a layer is stored: 2 if keys and values are apart, else 1."""
        return 1 if self in (Layout.KV_HEADS_FIRST, Layout.KV_TOKENS_FIRST) else 2


class Memory(Enum):
    """Memory type, with NIXL's names."""
    DRAM = "DRAM"
    VRAM = "VRAM"


class AttentionBackend(Enum):
    """Attention backends whose cache layout is known. `describe` takes the values."""
    IPEX = "IPEX"
    TORCH_SDPA = "TORCH_SDPA"
    XFORMERS = "XFORMERS"
    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"


_FLAT = {AttentionBackend.IPEX: Layout.HEADS_FIRST, AttentionBackend.TORCH_SDPA: Layout.PACKED,
         AttentionBackend.XFORMERS: Layout.PACKED}
_MEMORY = {"cpu": Memory.DRAM, "cuda": Memory.VRAM}


class WholeRegion(msgspec.Struct, frozen=True, array_like=True):
    """What a layer has in each block beside its KV heads. Sizes are in bytes."""
    layer: int  # global index
    address: int  # of block 0
    block_bytes: int
    block_stride_bytes: int


class CacheDescription(msgspec.Struct, frozen=True):
    """The KV cache of one rank: the addresses and shapes that a peer needs to write into it. Sizes are in bytes."""
    layout: Layout
    memory: Memory
    device_id: int
    dtype: str  # torch's name for it, e.g. "bfloat16"
    num_blocks: int
    block_size: int  # tokens per block
    head_size: int  # elements that a plane has for one token of one head
    first_head: int  # global index of this rank's first KV head
    kv_heads: int  # KV heads on this rank
    first_layer: int  # global index of this rank's first layer
    layers: int
    block_bytes: int  # one block of one plane
    block_stride_bytes: int  # from one block of a plane to the next
    planes: tuple[int, ...]  # base addresses: by layer, then keys before values, then by head if heads have their own
    whole: tuple[WholeRegion, ...] = ()  # by layer

    def __post_init__(self) -> None:
        """Raise ValueError for values that no cache can have: peers send descriptions, and we compute addresses from
        them."""
        for name in ("num_blocks", "block_size", "head_size", "kv_heads", "layers", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if min(self.device_id, self.first_head, self.first_layer) < 0:
            raise ValueError("device_id, first_head and first_layer must not be negative")
        parts = self.layers * self.layout.parts
        if len(self.planes) != parts and (len(self.planes) != parts * self.kv_heads
                                          or self.layout is not Layout.KV_HEADS_FIRST):
            raise ValueError(f"{self.layers} layers need {parts} planes, not {len(self.planes)}")
        if len(self.whole) > MAX_REGIONS:
            raise ValueError(f"{len(self.whole)} regions are more than {MAX_REGIONS}")
        if (len(self.planes) + len(self.whole)) * self.num_blocks > MAX_DESCRIPTORS:
            raise ValueError(f"{self.num_blocks} blocks of {self.layers} layers are more than can be addressed")
        if self.block_bytes % (self.block_size * self.plane_heads * self.head_size):
            raise ValueError(f"block_bytes {self.block_bytes} is no multiple of the elements in a block")
        span = (self.num_blocks - 1) * self.block_stride_bytes + self.block_bytes
        if self.block_stride_bytes < self.block_bytes or min(self.planes) < 1 or max(self.planes) + span >= 2**63:
            raise ValueError("blocks overlap or lie outside the address space")
        if self.whole:
            self._check_whole()

    def _check_whole(self) -> None:
        """Raise ValueError for regions of other layers than this rank's, and where blocks of two regions, or of one and
        a plane, have a byte in common, or may have: where both lie between each other's blocks, with other strides."""
        for region in self.whole:
            if not 0 <= region.layer - self.first_layer < self.layers:
                raise ValueError(f"a region of layer {region.layer} is none of this rank's")
            if not 1 <= region.block_bytes <= region.block_stride_bytes or region.address < 1:
                raise ValueError(f"{region} can't be addressed")
        if list(self.whole) != sorted(self.whole, key=lambda region: region.layer):
            raise ValueError("regions must be in the order of their layers")
        runs = sorted([(plane, self.block_bytes, self.block_stride_bytes) for plane in self.planes]
                      + [(region.address, region.block_bytes, region.block_stride_bytes) for region in self.whole])
        end, start, before = 0, 0, (0, 0, 0)  # of all so far; of those between each other's blocks; the last one
        for address, nbytes, stride in runs:
            is_apart = address >= end
            if is_apart:
                start = address
            fits = is_apart or (stride == before[2] and address >= before[0] + before[1])
            end, before = max(end, address + (self.num_blocks - 1) * stride + nbytes), (address, nbytes, stride)
            if not fits or address + nbytes > start + stride or end >= 2**63:
                raise ValueError(f"the blocks of {nbytes} bytes from {address:#x}, one every {stride} bytes, overlap "
                                 "others or lie outside the address space")

    @property
    def plane_heads(self) -> int:
        """How many KV heads a plane has: all of this rank, or one."""
        return self.kv_heads * self.layers * self.layout.parts // len(self.planes)

    @property
    def head_bytes(self) -> int:
        """The size of one head in one block of one plane."""
        return self.block_bytes // self.plane_heads

    @property
    def head_runs(self) -> int:
        """In how many contiguous runs a head, or a range of heads, lies in one block of a plane: 1, or one for each
        token."""
        return 1 if self.layout.heads_are_runs else self.block_size

    def address(self, layer: int, part: int, head: int, run: int = 0) -> int:
        """The address of a head, or of one of its `head_runs`, in block 0. `layer` and `head` are global indices.
        `part` is KEY or VALUE, or 0 if the layout does not separate them."""
        plane, rest = divmod(head - self.first_head, self.plane_heads)
        part += (layer - self.first_layer) * self.layout.parts
        offset = (run * self.block_bytes + rest * self.head_bytes) // self.head_runs
        return self.planes[part * (self.kv_heads // self.plane_heads) + plane] + offset


def describe(kv_caches: list[torch.Tensor], *, num_blocks: int, block_size: int, kv_heads: int, head_size: int,
             platform: str, backend: str, first_head: int = 0, first_layer: int = 0) -> CacheDescription:
    """Describe the cache tensors of a worker: one per layer, in layer order.

    Each tensor is [2, num_blocks, ...], keys first; with FLASHINFER it is [num_blocks, 2, ...]. `platform` is "cpu" or
    "cuda". `backend` is a value of `AttentionBackend` (on the CPU "IPEX" if IPEX is used, else "TORCH_SDPA"). The
    tensors must stay alive and in place as long as a transport uses the description. Raises ConfigError if the layout
    can't be transferred.
    """
    kind = check_backend(backend)
    if platform not in _MEMORY:
        raise ConfigError("platform", platform, f"use one of {sorted(_MEMORY)}")
    if not kv_caches:
        raise ConfigError("kv_cache", "no layers", "a model without attention has no KV to transfer")
    first = kv_caches[0]
    element_bytes = first.element_size()
    block_bytes = block_size * kv_heads * head_size * element_bytes
    planes: list[int] = []
    for number, tensor in enumerate(kv_caches):
        if tensor.shape != first.shape or tensor.stride() != first.stride() or tensor.dtype != first.dtype:
            raise ConfigError("kv_cache", f"layer {number} of shape {tuple(tensor.shape)}",
                              f"every layer must have the shape {tuple(first.shape)} of layer 0")
        planes += [_plane(tensor, kind, kv).data_ptr() for kv in (KEY, VALUE)]
    plane = _plane(first, kind, KEY)
    if plane.shape[0] != num_blocks or plane[0].numel() * element_bytes != block_bytes:
        raise ConfigError("kv_cache", f"shape {tuple(first.shape)}",
                          f"expected {num_blocks} blocks of {block_size} tokens, {kv_heads} heads of {head_size}")
    return CacheDescription(layout=_order(plane, kind, block_size, kv_heads, head_size),
                            memory=_MEMORY[platform],
                            device_id=max(0, first.get_device()),
                            dtype=str(first.dtype).removeprefix("torch."),
                            num_blocks=num_blocks,
                            block_size=block_size,
                            head_size=head_size,
                            first_head=first_head,
                            kv_heads=kv_heads,
                            first_layer=first_layer,
                            layers=len(kv_caches),
                            block_bytes=block_bytes,
                            block_stride_bytes=plane.stride(0) * element_bytes,
                            planes=tuple(planes))


def describe_views(views: list[torch.Tensor], *, num_blocks: int, block_size: int, first_head: int = 0,
                   first_layer: int = 0) -> CacheDescription:
    """Describe the cache of a V1 worker: one view [blocks, heads, tokens, content] per layer, in layer order, with any
    strides that `Layout` lists.

    `num_blocks` and `block_size` (in tokens) are the scheduler's. The tensors must stay alive and in place as long as a
    transport uses the description. Raises ConfigError if the layout can't be transferred.
    """
    if not views:
        raise ConfigError("kv_cache", "no layers", "a model without attention has no KV to transfer")
    first = views[0]
    for number, view in enumerate(views):
        if view.shape != first.shape or view.stride() != first.stride() or view.dtype != first.dtype:
            raise ConfigError("kv_cache", f"layer {number} of shape {tuple(view.shape)}, strides {view.stride()}",
                              f"every layer must have the shape {tuple(first.shape)} and strides {first.stride()} of "
                              "layer 0: models with several kinds of layers can only be transferred with "
                              "VLLM_KV_CACHE_LAYOUT=BLHNC, if the attention backend has it")
    if first.device.type not in _MEMORY:
        raise ConfigError("device", first.device.type, f"use one of {sorted(_MEMORY)}")
    if first.dim() != 4 or first.shape[0] != num_blocks or first.shape[2] != block_size:
        raise ConfigError("kv_cache", f"shape {tuple(first.shape)}",
                          f"expected {num_blocks} blocks of {block_size} tokens as [blocks, heads, tokens, content]; "
                          "if the attention backend splits blocks, set --block-size to the tokens in this shape, or "
                          "choose another backend if vLLM has set it (recurrent states)")
    layout, plane_heads = _strided(first)
    _, heads, tokens, content = first.shape
    element_bytes = first.element_size()
    return CacheDescription(layout=layout,
                            memory=_MEMORY[first.device.type],
                            device_id=max(0, first.get_device()),
                            dtype=str(first.dtype).removeprefix("torch."),
                            num_blocks=num_blocks,
                            block_size=block_size,
                            head_size=content,
                            first_head=first_head,
                            kv_heads=heads,
                            first_layer=first_layer,
                            layers=len(views),
                            block_bytes=plane_heads * tokens * content * element_bytes,
                            block_stride_bytes=first.stride(0) * element_bytes,
                            planes=tuple(view.data_ptr() + head * view.stride(1) * element_bytes
                                         for view in views for head in range(0, heads, plane_heads)))


def distinct_caches(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caches in the order of their layers' numbers, without those of layers that share another layer's cache, or,
    in another group of blocks, its memory. Raises ConfigError where such two lie otherwise in it."""
    views: dict[int, tuple[str, torch.Tensor]] = {}
    for name in sorted(kv_caches, key=numbers_in):
        cache = kv_caches[name]
        first, other = views.setdefault(cache.data_ptr(), (name, cache))
        if (cache.shape, cache.stride(), cache.dtype) != (other.shape, other.stride(), other.dtype):
            raise ConfigError("kv_cache", f"{name} of shape {tuple(cache.shape)}, strides {cache.stride()}",
                              f"{first}, which has the same memory, has the strides {other.stride()}: set "
                              "VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC, or write --disable-hybrid-kv-cache-manager")
    return dict(views.values())


def numbers_in(name: str) -> list[tuple[int, str]]:
    """A sort key by which "layers.10" comes after "layers.9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def regions(caches: list[torch.Tensor]) -> list[tuple[int, int]]:
    """The memory that these tensors cover, as (address, bytes), sorted. Tensors that overlap, as views of one buffer
    may, share a region."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((cache.data_ptr(), cache.data_ptr() + extent_bytes(cache)) for cache in caches):
        if merged and start < sum(merged[-1]):
            start, end = merged[-1][0], max(end, sum(merged.pop()))
        merged.append((start, end - start))
    return merged


def extent_bytes(tensor: torch.Tensor) -> int:
    """From the first to the end of the last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def check_backend(name: str) -> AttentionBackend:
    """The attention backend of this name. Raises ConfigError if its layout is not known."""
    try:
        return AttentionBackend(name)
    except ValueError:
        known = [each.value for each in AttentionBackend]
        raise ConfigError("attention backend", name, f"its KV layout is not known; use one of {known}") from None


def _plane(tensor: torch.Tensor, backend: AttentionBackend, kv: int) -> torch.Tensor:
    """The keys or values of one layer: [num_blocks, ...]."""
    return tensor.select(1 if backend is AttentionBackend.FLASHINFER else 0, kv)


def _order(plane: torch.Tensor, backend: AttentionBackend, block_size: int, kv_heads: int, head_size: int) -> Layout:
    """The layout of a plane: by its backend if its blocks are flat, [num_blocks, elements], otherwise by its strides.
    Raises ConfigError."""
    if backend in _FLAT:
        if plane.stride()[1:] == (1, ):
            return _FLAT[backend]
    elif plane.shape[1:] == (block_size, kv_heads, head_size):
        strides = plane.stride()[1:]
        if strides == (kv_heads * head_size, head_size, 1):
            return Layout.TOKENS_FIRST
        if strides == (head_size, block_size * head_size, 1):
            return Layout.HEADS_FIRST
    raise ConfigError("kv_cache", f"shape {tuple(plane.shape)}, strides {plane.stride()}",
                      f"this layout of {backend.value} is not known here")


def _strided(view: torch.Tensor) -> tuple[Layout, int]:
    """The layout of a view [blocks, heads, tokens, content], and how many heads one of its planes has. Raises
    ConfigError."""
    blocks, heads, tokens, content = view.shape
    to_block, to_head, to_token, to_content = view.stride()
    run = tokens * content
    if to_content == 1 or content == 1:
        # Of one head both are the same bytes. The name must be that of an engine with several heads on a rank.
        if tokens > 1 and to_head == content and to_token == heads * content and to_block >= heads * run:
            return Layout.KV_TOKENS_FIRST, heads
        if to_token == content or tokens == 1:
            if (to_head == run or heads == 1) and to_block >= heads * run:
                return Layout.KV_HEADS_FIRST, heads
            apart = to_block >= (heads - 1) * to_head + run or to_head >= (blocks - 1) * to_block + run
            if apart and min(to_block, to_head) >= run:
                return Layout.KV_HEADS_FIRST, 1
    raise ConfigError("kv_cache", f"shape {tuple(view.shape)}, strides {view.stride()}",
                      "this order of [blocks, heads, tokens, content] is not known here; set VLLM_KV_CACHE_LAYOUT to "
                      "LBHNC, BLHNC, LHBNC, BHLNC, LBNHC or BLNHC")
