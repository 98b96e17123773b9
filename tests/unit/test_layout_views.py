# SPDX-License-Identifier: Apache-2.0
"""B3, B44, B101: every order of the axes of V1's cache is mapped to the bytes of its views, or refused.

A cache is one buffer with the axes layer, block, head, token and content in some order. A layer's view has the other
four in their logical order, as V1's runner registers it.
"""
import ctypes
import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.errors import ConfigError, PeerMismatch
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory, describe_views, distinct_caches, regions
from vllm_pd.transfer.plan import descriptor_indices, descriptor_rows, head_range, heads_to_write, plan

torch.set_num_threads(1)  # these tensors are too small for more
AXES = "LBHNC"
HEADS_FIRST = ("LBHNC", "BLHNC", "LHBNC", "BHLNC")
TOKENS_FIRST = ("LBNHC", "BLNHC")
SIZES = dict(L=3, B=5, H=4, N=6, C=2)
ORDERS = ["".join(order) for order in itertools.permutations(AXES)]


class ViewedCache:
    """A buffer in this order, with a number of its own in each element if `filled`, otherwise -1."""

    def __init__(self, order: str, filled: bool = True, first_head: int = 0, padding: int = 0, **sizes):
        sizes = {**SIZES, **sizes}
        shape = [sizes[axis] for axis in order]
        self.buffer = torch.full([shape[0], torch.Size(shape[1:]).numel() + padding], -1, dtype=torch.int32)
        held = self.buffer[:, :self.buffer.shape[1] - padding].unflatten(1, shape[1:])
        logical = held.permute([order.index(axis) for axis in AXES])
        if filled:
            logical.copy_(self.expected(range(first_head, first_head + sizes["H"]), sizes))
        self.views = list(logical)
        self.description = describe_views(self.views, num_blocks=sizes["B"], block_size=sizes["N"],
                                          first_head=first_head)

    @staticmethod
    def expected(heads: range, sizes: dict[str, int]) -> torch.Tensor:
        """What these heads of the model hold, [layers, blocks, heads, tokens, content]."""
        of = [torch.arange(sizes[axis]) if axis != "H" else torch.tensor(heads) for axis in AXES]
        places = torch.cartesian_prod(*of) @ torch.tensor([160_000, 8_000, 400, 20, 1])
        return places.reshape([len(axis) for axis in of])


def run(cache: CacheDescription, layer: int, block: int, head: int) -> bytes:
    """The bytes of a head that the description names."""
    return ctypes.string_at(cache.address(layer, 0, head) + block * cache.block_stride_bytes, cache.head_bytes)


@pytest.mark.parametrize("order", [*HEADS_FIRST, *TOKENS_FIRST])
def test_b114_groups_of_three_and_of_two_layers_share_their_memory(order):
    """What V1 makes of a pool for two groups: the same views, but where the layers stand between head and token, as
    many as the group has. Then heads would be taken from the wrong place, so it is refused."""
    pool = ViewedCache(order)
    fewer = [ViewedCache(order, L=2).views[layer].stride() for layer in range(2)]
    strides = fewer[0] if order == "BHLNC" else pool.views[0].stride()  # a block stays as wide as the widest group
    second = {f"layers.{1 + 2 * number}": view.as_strided(view.shape, (pool.views[0].stride(0), *strides[1:]),
                                                          view.storage_offset())
              for number, view in enumerate(pool.views[:2])}
    caches = {f"layers.{2 * number}": view for number, view in enumerate(pool.views)} | second
    if order == "BHLNC":
        with pytest.raises(ConfigError, match="kv_cache='layers.1 of shape.*layers.0, .* same memory.*LBHNC"):
            distinct_caches(caches)
    else:
        assert list(distinct_caches(caches)) == ["layers.0", "layers.2", "layers.4"]


@pytest.mark.parametrize("sizes", [{}, dict(L=1), dict(B=2), dict(H=1), dict(C=1), dict(H=1, L=1), dict(N=1)],
                         ids=lambda sizes: str(sizes) or "all")
def test_b3_every_order_is_mapped_or_refused(sizes):
    """An order that is described names the bytes of the views, whatever its name is."""
    for order in ORDERS:
        try:
            cache = ViewedCache(order, **sizes)
        except ConfigError as refusal:
            assert order not in HEADS_FIRST + TOKENS_FIRST
            assert "strides" in str(refusal) and "VLLM_KV_CACHE_LAYOUT" in str(refusal)
        else:
            check_bytes(cache)


def check_bytes(cache: ViewedCache) -> None:
    """Each run that the description names has the bytes of the view."""
    described = cache.description
    for layer, view in enumerate(cache.views):
        for block in range(described.num_blocks):
            if described.layout is Layout.KV_TOKENS_FIRST:
                at = described.address(layer, 0, 0) + block * described.block_stride_bytes
                whole = view[block].permute(1, 0, 2).contiguous()
                assert ctypes.string_at(at, described.block_bytes) == whole.numpy().tobytes()
                continue
            for head in range(described.kv_heads):
                assert run(described, layer, block, head) == view[block, head].contiguous().numpy().tobytes()


@pytest.mark.parametrize("order", HEADS_FIRST + TOKENS_FIRST)
def test_b3_the_layouts_that_vllm_has_are_all_described(order):
    cache = ViewedCache(order).description
    assert cache.layout is (Layout.KV_HEADS_FIRST if order in HEADS_FIRST else Layout.KV_TOKENS_FIRST)
    assert (cache.layers, cache.kv_heads, cache.block_size, cache.head_size) == (3, 4, 6, 2)
    assert cache.memory is Memory.DRAM and cache.dtype == "int32"
    assert len(cache.planes) == (12 if order in ("LHBNC", "BHLNC") else 3)
    assert msgspec.convert(msgspec.to_builtins(cache), CacheDescription) == cache


def test_b3_the_cpu_back_end_of_0_32():
    """Section 5 of what was measured: 3 KV heads of 64, blocks of 128 tokens."""
    buffer = torch.zeros(2, 7, 3, 128, 128)
    cache = describe_views(list(buffer), num_blocks=7, block_size=128)
    assert buffer[0].stride() == (49152, 16384, 128, 1)
    assert (cache.block_bytes, cache.block_stride_bytes, cache.planes) == (
        49152 * 4, 49152 * 4, (buffer.data_ptr(), buffer[1].data_ptr()))


@pytest.mark.parametrize("order", ["BLHNC", "BHLNC", "BLNHC"])
def test_b3_blocks_may_be_padded(order):
    cache = ViewedCache(order, padding=7)
    assert cache.description.block_stride_bytes == 4 * (3 * 4 * 6 * 2 + 7)
    assert run(cache.description, 2, 4, 0)[:8] == cache.views[2][4, 0, 0].numpy().tobytes()


def move(ours: ViewedCache, theirs: ViewedCache, pairs: dict[int, int], heads: range | None = None) -> int:
    """Carry out a write by the plan and the descriptors that NIXL would get. Returns the number of descriptors."""
    lanes = plan(ours.description, theirs.description, heads)
    if not lanes:
        return 0
    lists = []
    local, remote = [lane.ours for lane in lanes], [lane.theirs for lane in lanes]
    for cache, bases, ids in ((ours, local, list(pairs)), (theirs, remote, list(pairs.values()))):
        cache = cache.description
        every = [(base + block * stride, nbytes) for base, nbytes, _, stride, count in
                 descriptor_rows(bases, cache).tolist() for block in range(count)]
        lists.append([every[index] for index in descriptor_indices(ids, lanes, cache)])
    for (source, nbytes), (target, same) in zip(*lists, strict=True):
        assert nbytes == same
        ctypes.memmove(target, source, nbytes)
    return len(lists[0])


PAIRS = {0: 4, 3: 1, 4: 2}


@pytest.mark.parametrize("ours,theirs", [*itertools.product(HEADS_FIRST, HEADS_FIRST),
                                         *itertools.product(TOKENS_FIRST, TOKENS_FIRST)])
@pytest.mark.parametrize("ranks,others", [(1, 1), (1, 2), (2, 1), (2, 4), (4, 4), (4, 1)])
def test_b44_b101_every_head_lands_where_it_belongs_between_any_two_orders(ours, theirs, ranks, others):
    """B3, B101: and nothing else is written, whatever the order of the axes is at either end."""
    kv_heads = 4
    source = {rank: ViewedCache(ours, first_head=head_range(rank, ranks, kv_heads).start, H=kv_heads // ranks)
              for rank in range(ranks)}
    for rank in range(others):
        heads = head_range(rank, others, kv_heads)
        target = ViewedCache(theirs, filled=False, first_head=heads.start, H=len(heads), padding=3 * (theirs[0] == "B"))
        for each in source.values():
            if set(heads) & set(range(each.description.first_head, each.description.first_head + kv_heads // ranks)):
                move(each, target, PAIRS)
        expected = torch.full((3, 5, len(heads), 6, 2), -1)
        written = ViewedCache.expected(heads, SIZES)
        for ours_block, theirs_block in PAIRS.items():
            expected[:, theirs_block] = written[:, ours_block]
        assert torch.equal(torch.stack(target.views), expected.int())
        assert int((target.buffer != -1).sum()) == 3 * len(PAIRS) * len(heads) * 12


@pytest.mark.parametrize("order", HEADS_FIRST + TOKENS_FIRST)
def test_b101_the_order_of_a_rank_with_one_head_has_the_name_of_one_with_several(order):
    """Its bytes would be the same by either name, but peers compare names."""
    assert ViewedCache(order, H=1).description.layout is ViewedCache(order).description.layout


@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_b101_token_major_caches_of_any_two_sizes_against_a_copy_element_by_element(data):
    """Any heads, ranks, sizes and blocks; every element of D is compared, also those that nobody may write."""
    kv_heads, ranks, others = (data.draw(st.sampled_from([1, 2, 4, 8]), name) for name in ("heads", "ranks", "others"))
    sizes = dict(L=data.draw(st.integers(1, 3)), N=data.draw(st.integers(1, 6)), C=data.draw(st.integers(1, 3)), B=5)
    ours, theirs = (data.draw(st.sampled_from(TOKENS_FIRST)) for _ in range(2))
    blocks = data.draw(st.integers(1, 5))
    pairs = dict(zip(data.draw(st.permutations(range(5)))[:blocks], data.draw(st.permutations(range(5))), strict=False))
    padding = data.draw(st.sampled_from([0, 3])) * (theirs[0] == "B")
    senders = [ViewedCache(ours, first_head=heads.start, **{**sizes, "H": len(heads)})
               for heads in (head_range(rank, ranks, kv_heads) for rank in range(ranks))]
    for rank in range(others):
        held = head_range(rank, others, kv_heads)
        target = ViewedCache(theirs, filled=False, first_head=held.start, padding=padding,
                             **{**sizes, "H": len(held)})
        for number, sender in enumerate(senders):
            move(sender, target, pairs, heads_to_write(number, ranks, rank, others, kv_heads))
        wanted, source = torch.full_like(target.buffer, -1), {}
        for sender in senders:
            described = sender.description
            for head in range(described.first_head, described.first_head + described.kv_heads):
                source[head] = torch.stack([view[:, head - described.first_head] for view in sender.views])
        places = twin(target, wanted)
        for layer, (mine, other), token, head in itertools.product(
                range(sizes["L"]), pairs.items(), range(sizes["N"]), range(len(held))):
            places[layer][other, head, token] = source[held[head]][layer, mine, token]
        assert torch.equal(target.buffer, wanted)


def twin(cache: ViewedCache, buffer: torch.Tensor) -> list[torch.Tensor]:
    """The views of `cache` on another buffer."""
    first = cache.buffer.data_ptr()
    return [torch.as_strided(buffer, view.shape, view.stride(), (view.data_ptr() - first) // 4) for view in cache.views]


def test_b42_orders_inside_a_block_must_be_equal():
    with pytest.raises(PeerMismatch, match="kv-tokens-first"):
        plan(ViewedCache("LBHNC").description, ViewedCache("LBNHC").description)


@pytest.mark.parametrize("order,descriptors", [("LBHNC", 3), ("BLHNC", 1), ("BHLNC", 1), ("LHBNC", 12), ("BLNHC", 1)])
def test_adjacent_planes_are_one_descriptor_a_block(order, descriptors):
    source, target = ViewedCache(order), ViewedCache(order, filled=False)
    assert move(source, target, {1: 2}) == descriptors
    assert all(torch.equal(a[1], b[2]) for a, b in zip(source.views, target.views, strict=True))


def test_b44_heads_that_several_ranks_hold_are_limited_by_the_writer():
    source, target = ViewedCache("BHLNC"), ViewedCache("LBHNC", filled=False)
    move(source, target, {1: 1}, range(1, 3))
    assert (target.views[0][1, [0, 3]] == -1).all() and torch.equal(target.views[2][1, 1:3], source.views[2][1, 1:3])
    assert move(source, target, {1: 1}, range(0)) == 0


@pytest.mark.parametrize("order", HEADS_FIRST + TOKENS_FIRST)
def test_regions_cover_each_block_and_no_byte_outside_of_the_buffer(order):
    cache = ViewedCache(order, padding=5 * (order[0] == "B"))
    held = regions(cache.views)
    start, size = cache.buffer.data_ptr(), cache.buffer.numel() * 4
    assert all(start <= at and at + n <= start + size for at, n in held)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(held))
    described = cache.description
    for plane, block in itertools.product(described.planes, range(described.num_blocks)):
        at = plane + block * described.block_stride_bytes
        assert any(first <= at and at + described.block_bytes <= first + n for first, n in held)
    if order[0] == "B":
        assert len(held) == 1


def test_b80_layers_of_several_kinds_are_refused():
    views = ViewedCache("LBHNC").views
    for other in (torch.zeros(5, 4, 6, 4), views[0].float(), ViewedCache("BLHNC").views[1]):
        with pytest.raises(ConfigError, match="layer 3"):
            describe_views([*views, other.to(torch.int32) if other.shape[-1] == 4 else other], num_blocks=5,
                           block_size=6)
    with pytest.raises(ConfigError, match="no layers"):
        describe_views([], num_blocks=5, block_size=6)


@pytest.mark.parametrize("change", [dict(num_blocks=4), dict(block_size=12)])
def test_b80_blocks_that_the_back_end_splits_are_refused(change):
    with pytest.raises(ConfigError, match="--block-size"):
        describe_views(ViewedCache("LBHNC").views, **{"num_blocks": 5, "block_size": 6, **change})


def test_b80_views_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="blocks, heads, tokens, content"):
        describe_views([torch.zeros(2, 5, 6, 4, 2)], num_blocks=5, block_size=6)
    with pytest.raises(ConfigError, match="strides"):
        describe_views([torch.zeros(5, 4, 6, 4)[..., ::2]], num_blocks=5, block_size=6)
    with pytest.raises(ConfigError, match="strides"):
        describe_views([torch.zeros(1, 4, 6, 2).expand(5, 4, 6, 2)], num_blocks=5, block_size=6)


@pytest.mark.parametrize("change", [
    dict(planes=(1, 2)), dict(planes=(1, ) * 6), dict(layout="heads-first"), dict(kv_heads=5), dict(block_bytes=3),
])
def test_b81_a_description_that_no_cache_has_is_refused(change):
    good = msgspec.to_builtins(ViewedCache("LBHNC").description)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**good, **change}, CacheDescription)
