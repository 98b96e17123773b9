# SPDX-License-Identifier: Apache-2.0
"""B101: what layers have in each block beside their KV heads goes with them as whole bytes, or is refused."""
import ctypes
import itertools
import random

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.transport import FakeFabric, FakeTransport, Faults
from vllm_pd.errors import ConfigError, PeerMismatch, TransferError, UnmappableSplit
from vllm_pd.transfer.layout import MAX_DESCRIPTORS, MAX_REGIONS, CacheDescription, WholeRegion, describe_views
from vllm_pd.transfer.plan import (
    by_token,
    descriptor_indices,
    descriptor_rows,
    head_range,
    plan,
    run_descriptors,
    said_regions,
)
from vllm_pd.transfer.ranks.split import layer_range
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.torch.blocks import BlockCopier
from vllm_pd.transfer.transport import PeerMetadata, RanksMetadata, rank_name
from vllm_pd.transfer.whole import regions_beside

BLOCKS, TOKENS, CONTENT, INDEX, LAYERS = 6, 4, 8, 12, 4
INDEXED = (0, 1, 3)  # layer 2 uses the index of layer 1


class Cache:
    """Of one rank, as vLLM allocates it: all KV, then all indices, or, where `packed`, all of a block together. Blocks
    of an index are `pad` bytes further from each other than they are large. A cache of several heads has these apart
    from each other's tokens."""

    def __init__(self, layers: range = range(LAYERS), heads: range = range(1), indexed: tuple[int, ...] = INDEXED,
                 pad: int = 0, packed: bool = False, blocks: int = BLOCKS, index: int = INDEX) -> None:
        kv, beside = len(heads) * TOKENS * CONTENT * 2, TOKENS * index
        mine = [layer for layer in layers if layer in indexed]
        block = len(layers) * kv + len(mine) * beside
        self.memory = torch.zeros(blocks * (block + len(mine) * pad), dtype=torch.uint8)
        self.kv, self.beside, start = {}, {}, 0
        for names, nbytes, gap in ((layers, kv, 0), (mine, beside, pad)):
            for layer in names:
                stride = block if packed else nbytes + gap
                raw = self.memory[start:].as_strided((blocks, nbytes), (stride, 1))
                if nbytes == kv and names is layers:
                    view = self.memory.view(torch.int16).as_strided(
                        (blocks, len(heads), TOKENS, CONTENT), (stride // 2, TOKENS * CONTENT, CONTENT, 1), start // 2)
                    self.kv[f"model.layers.{layer}.self_attn.attn"] = view
                else:
                    self.beside[f"model.layers.{layer}.self_attn.indexer.k_cache"] = raw.as_strided(
                        (blocks, 1, TOKENS, index), (stride, nbytes, index, 1))
                start += nbytes if packed else blocks * stride
        described = describe_views(list(self.kv.values()), num_blocks=blocks, block_size=TOKENS,
                                   first_head=heads.start, first_layer=layers.start)
        self.description = msgspec.structs.replace(
            described, whole=regions_beside(self.beside, self.kv, layers.start) if self.beside else ())

    def parts(self, block: int) -> dict[str, bytes]:
        """What each layer has of that block."""
        return {name: one[block].contiguous().view(torch.uint8).numpy().tobytes()
                for name, one in (self.kv | self.beside).items()}

    def fill(self) -> None:
        """With what is nowhere else."""
        self.memory.copy_(torch.from_numpy(np.random.default_rng(5).integers(1, 256, len(self.memory), np.uint8)))


def copy(lanes, ours: Cache, theirs: Cache, pairs: dict[int, int]) -> None:
    """A write, by the descriptors that NIXL would get."""
    lists = []
    for runs, cache, ids in (([lane.ours for lane in lanes], ours, pairs), ([lane.theirs for lane in lanes], theirs,
                                                                           pairs.values())):
        rows = [(base + block * stride, nbytes) for base, nbytes, _, stride, count in
                descriptor_rows(runs, cache.description).tolist() for block in range(count)]
        chosen = [rows[at] for at in descriptor_indices(list(ids), lanes, cache.description)]
        unprepared = run_descriptors(list(ids), np.array(runs, dtype=np.uint64), cache.description)
        assert sorted(chosen) == sorted((address, nbytes) for address, nbytes, _ in unprepared.tolist())
        lists.append(chosen)
    for (source, nbytes), (target, same) in zip(*lists, strict=True):
        assert nbytes == same
        ctypes.memmove(target, source, nbytes)


PAIRS = {3: 2, 0: 5, 1: 0}


@pytest.mark.parametrize("mine, other", [
    ({}, {}), ({"pad": 20}, {}), ({}, {"packed": True}), ({"packed": True}, {"packed": True, "blocks": 9}),
    ({"heads": range(2)}, {"heads": range(2), "pad": 4}),
], ids=str)
def test_b101_regions_go_with_the_planes_of_their_layers(mine, other):
    """B3: between caches whose blocks are at other distances. No other byte changes."""
    ours, theirs = Cache(**mine), Cache(**other)
    ours.fill()
    before = [theirs.parts(block) for block in range(theirs.description.num_blocks)]
    lanes = plan(ours.description, theirs.description)
    assert not by_token(lanes, ours.description, theirs.description)
    copy(lanes, ours, theirs, PAIRS)
    there = {target: source for source, target in PAIRS.items()}
    for block, held in enumerate(before):
        assert theirs.parts(block) == (ours.parts(there[block]) if block in there else held)
    moved = sum(len(part) for block in PAIRS for part in ours.parts(block).values())
    assert int((theirs.memory != 0).sum()) == moved, "and nothing between the blocks"


def test_b101_packed_regions_are_part_of_the_planes_descriptor():
    ours = Cache(packed=True).description
    (lane, ) = plan(ours, ours)
    assert lane.bytes == lane.local_stride_bytes == ours.block_stride_bytes
    assert len(plan(ours, Cache().description)) == LAYERS + len(INDEXED)


def test_b3_a_cache_without_regions_has_the_lanes_that_it_had():
    ours = Cache(indexed=()).description
    assert [lane.local for lane in plan(ours, ours)] == list(ours.planes) and not ours.whole
    with_regions = Cache().description
    assert plan(with_regions, with_regions)[:LAYERS] == [
        lane._replace(local=at, remote=at) for lane, at in zip(plan(ours, ours), with_regions.planes, strict=True)]


@pytest.mark.parametrize("ours, theirs", [(range(LAYERS), range(2, LAYERS)), (range(2), range(LAYERS))], ids=str)
def test_b101_b44_only_regions_of_layers_that_both_hold_are_moved(ours, theirs):
    mine, other = Cache(ours), Cache(theirs)
    mine.fill()
    copy(plan(mine.description, other.description), mine, other, PAIRS)
    shared = {name for name in mine.parts(0) if int(name.split(".")[2]) in set(ours) & set(theirs)}
    for source, target in PAIRS.items():
        for name, part in other.parts(target).items():
            assert part == (mine.parts(source)[name] if name in shared else bytes(len(part))), name


def test_nothing_is_beside_heads_that_another_rank_sends():
    assert plan(Cache().description, Cache().description, range(0)) == []


@pytest.mark.parametrize("other, said", [
    ({"indexed": (0, 1)}, "3 x 48 bytes.*2 x 48 bytes"), ({"indexed": ()}, "3 x 48 bytes.*''"),
    ({"index": 16}, "3 x 48 bytes.*3 x 64 bytes"), ({"indexed": (0, 2, 3)}, "3 x 48 bytes.*3 x 48 bytes"),
], ids=str)
def test_b42_engines_whose_regions_differ_refuse_each_other(other, said):
    """Both values are said, and they differ also where only the layers do."""
    ours, theirs = Cache().description, Cache(**other).description
    for one, two, words in ((ours, theirs, said), (theirs, ours, ".*".join(reversed(said.split(".*"))))):
        for heads in (None, range(0)):
            with pytest.raises(PeerMismatch, match=f"beside the KV of a block differs: ours is .*{words}") as raised:
                plan(one, two, heads)
            assert raised.value.ours != raised.value.theirs


def test_b42_what_is_said_of_regions():
    assert said_regions([]) == ""
    regions = Cache(pad=4).description.whole
    assert said_regions(regions).startswith("3 x 48 bytes (") and said_regions(regions) == said_regions(
        Cache(packed=True).description.whole)
    mixed = [*regions, WholeRegion(3, 1, 8, 8)]
    assert said_regions(mixed).startswith("1 x 8 bytes, 3 x 48 bytes (")


def test_b44_b80_regions_beside_heads_that_are_split_are_refused():
    two, four = Cache(heads=range(2)).description, Cache(heads=range(4)).description
    for ours, theirs in ((two, four), (four, two)):
        with pytest.raises(UnmappableSplit, match="KV heads 0..[13], theirs is .*KV heads 0..[13]"):
            plan(ours, theirs)
    with pytest.raises(UnmappableSplit, match="the same heads"):
        plan(two, two, range(1))


# What a peer may say.


def bad(**changes) -> dict:
    """A description with one region, and a change of it, as a peer may send it."""
    made = Cache(indexed=(1, )).description
    (region, ) = made.whole
    return {**msgspec.to_builtins(made), "whole": [list(msgspec.structs.astuple(
        msgspec.structs.replace(region, **changes)))]}


@pytest.mark.parametrize("changes, words", [
    ({"layer": LAYERS}, "layer 4 is none"), ({"layer": -1}, "layer -1 is none"),
    ({"block_bytes": 0}, "can't be addressed"), ({"block_bytes": -8}, "can't be addressed"),
    ({"block_bytes": 49}, "can't be addressed"), ({"block_stride_bytes": 47}, "can't be addressed"),
    ({"address": 0}, "can't be addressed"), ({"address": -5}, "can't be addressed"),
    ({"address": 2**63 - 48 * BLOCKS}, "address space"), ({"block_stride_bytes": 2**62}, "overlap|address space"),
], ids=str)
def test_b81_values_that_no_region_can_have_are_refused(changes, words):
    for decode in (lambda given: msgspec.convert(given, CacheDescription),
                   lambda given: msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=CacheDescription)):
        assert decode(bad()).whole
        with pytest.raises(msgspec.ValidationError, match=words):
            decode(bad(**changes))


@pytest.mark.parametrize("at, fits", [
    (lambda plane, end: plane, False), (lambda plane, end: plane + 1, False), (lambda plane, end: plane - 1, False),
    (lambda plane, end: plane - 48 * BLOCKS, True), (lambda plane, end: end - 1, False), (lambda plane, end: end, True),
])
def test_b81_regions_that_overlap_planes_are_refused(at, fits):
    cache = Cache(indexed=())
    plane, end = min(cache.description.planes), max(cache.description.planes)
    end += BLOCKS * cache.description.block_stride_bytes
    whole = (WholeRegion(0, at(plane, end), 48, 48), )
    if fits:
        assert msgspec.structs.replace(cache.description, whole=whole).whole == whole
    else:
        with pytest.raises(ValueError, match="overlap"):
            msgspec.structs.replace(cache.description, whole=whole)


def test_b81_any_regions_are_refused_unless_no_byte_is_in_two():
    """Against every byte of every block. Of those that fit, only such may be refused as no cache has."""
    maker, accepted, refused = random.Random(4), 0, 0
    plain = Cache(indexed=(), layers=range(1), blocks=3).description
    base, stride = plain.planes[0], plain.block_stride_bytes
    for _ in range(4000):
        step = maker.choice([stride, 2 * stride])
        kv = msgspec.structs.replace(plain, block_stride_bytes=step)
        regions = [WholeRegion(0, max(1, base + maker.randrange(-2 * step, 4 * step, 8)), maker.randrange(8, 80, 8),
                               maker.choice([step, step, 80])) for _ in range(maker.randrange(1, 4))]
        runs = [(base, kv.block_bytes, step), *((one.address, one.block_bytes, one.block_stride_bytes)
                                               for one in regions)]
        taken = [byte for address, nbytes, apart in runs for block in range(3)
                 for byte in range(address + block * apart, address + block * apart + nbytes, 8)]
        try:
            msgspec.structs.replace(kv, whole=tuple(regions))
        except ValueError:
            refused += 1
            continue
        accepted += 1
        assert len(set(taken)) == len(taken), runs
    assert accepted > 100 and refused > 100, (accepted, refused)


def test_b81_more_regions_than_can_be_addressed_are_refused():
    plain = Cache(indexed=()).description
    few = msgspec.structs.replace(plain, num_blocks=MAX_DESCRIPTORS // (LAYERS + 1), planes=tuple(
        plane + 2**56 * layer for layer, plane in enumerate(plain.planes)))
    region = WholeRegion(0, 2**60, 8, 8)
    assert msgspec.structs.replace(few, whole=(region, )).whole
    with pytest.raises(ValueError, match="more than can be addressed"):
        msgspec.structs.replace(few, whole=(region, WholeRegion(1, 2**61, 8, 8)))


def test_b81_regions_have_the_order_of_their_layers():
    made = Cache().description
    with pytest.raises(ValueError, match="order of their layers"):
        msgspec.structs.replace(made, whole=made.whole[::-1])


def test_b42_a_description_of_an_older_release_has_none():
    made = Cache(indexed=()).description
    older = {key: value for key, value in msgspec.to_builtins(made).items() if key != "whole"}
    assert msgspec.convert(older, CacheDescription) == made


# What vLLM registers.


def test_b101_layers_that_share_an_index_are_known_by_their_numbers():
    made = Cache(range(2, LAYERS))
    assert [region.layer for region in made.description.whole] == [3]
    assert [region.layer for region in Cache().description.whole] == list(INDEXED)
    names = ["model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn"]  # as where layers share caches
    kv = {name: made.kv[name] if name in made.kv else next(iter(made.kv.values())) for name in names}
    assert [region.layer for region in regions_beside(made.beside, kv, 5)] == [6]


@pytest.mark.parametrize("change, words", [
    (lambda one: one[:-1], "5, 1, 4, 12.*expected 6 blocks of 1 head and 4 tokens.*--block-size"),
    (lambda one: one.reshape(2 * BLOCKS, 1, TOKENS // 2, INDEX), "12, 1, 2, 12.*--block-size"),
    (lambda one: one.reshape(BLOCKS, 2, TOKENS, INDEX // 2), "1 head"), (lambda one: one[:, 0], "1 head"),
    (lambda one: one[..., ::2], "not contiguous"), (lambda one: one[:1].expand(BLOCKS, -1, -1, -1), "not contiguous"),
], ids=["blocks", "split blocks", "heads", "no heads", "gaps", "one block"])
def test_b80_an_index_of_another_kind_is_refused(change, words):
    made = Cache()
    name, one = next(iter(made.beside.items()))
    with pytest.raises(ConfigError, match=f"kv_cache='{name} .*{words}"):
        regions_beside({**made.beside, name: change(one)}, made.kv, 0)


def test_b80_an_index_of_no_layer_is_refused():
    made = Cache()
    one = next(iter(made.beside.values()))
    for name in ("model.layers.9.self_attn.indexer.k_cache", "k_cache"):
        with pytest.raises(ConfigError, match=f"kv_cache='{name}'.*no layer"):
            regions_beside({name: one}, made.kv, 0)


# Between ranks.


class Rank:
    """With what is replicated on every rank, as MLA and its index are, or with several heads."""

    def __init__(self, fabric: FakeFabric, engine: str, rank: int, tp: int, stages: int, kv_heads: int) -> None:
        self.cache = Cache(layer_range(rank // tp, stages, LAYERS), head_range(rank % tp, tp, kv_heads),
                           pad=8 * (engine == "p"))
        own = FakeTransport(fabric, rank_name(engine, rank), [self.cache.memory.numpy()], self.cache.description)
        self.transport = RankedTransport(own, rank, tp, kv_heads)

    def ends(self):
        return [end for _ in range(10) for end in self.transport.poll().finished]


def engines(p: tuple[int, int], d: tuple[int, int], kv_heads: int = 1) -> tuple[list[Rank], list[Rank]]:
    """Of these (ranks of a stage, stages)."""
    fabric = FakeFabric(0, Faults())
    return tuple([Rank(fabric, name, rank, tp, stages, kv_heads) for rank in range(tp * stages)]
                 for name, (tp, stages) in (("p", p), ("d", d)))


def meet(ours: list[Rank], name: str, theirs: list[Rank]) -> None:
    metadata = RanksMetadata([rank.transport.metadata() for rank in theirs]).encode()
    for rank in ours:
        rank.transport.add_peer(name, metadata)


SHAPES = [((1, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 1)), ((2, 1), (2, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 1)),
          ((1, 1), (1, 2)), ((2, 2), (1, 3)), ((1, 3), (2, 2))]


@pytest.mark.parametrize("p, d", SHAPES)
def test_b44_b101_every_rank_gets_the_regions_of_its_layers_once(p, d):
    senders, receivers = engines(p, d)
    meet(senders, "d", receivers)
    for rank in senders:
        rank.cache.fill()
    sent = {name: part for rank in senders for name, part in ((at, held) for block in PAIRS for at, held in (
        ((block, layer), part) for layer, part in rank.cache.parts(block).items()))}
    moved = 0
    for rank in senders:
        rank.transport.write("k", "d", list(PAIRS), list(PAIRS.values()), b"n")
        (end, ) = rank.ends()
        assert end.ok
        moved += end.bytes
    # All ranks of a sender's stage are filled alike where they hold the same layers.
    for rank in receivers:
        for source, target in PAIRS.items():
            for name, part in rank.cache.parts(target).items():
                assert part == sent[source, name], (name, source)
        assert not any(any(part) for block in set(range(BLOCKS)) - set(PAIRS.values())
                       for part in rank.cache.parts(block).values())
    assert moved == sum(len(part) for rank in receivers for block in PAIRS.values()
                        for part in rank.cache.parts(block).values())


@pytest.mark.parametrize("p, d", [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (2, 2))])
def test_b5_b102_a_read_brings_the_regions(p, d):
    readers, holders = engines(p, d)
    meet(readers, "d", holders)
    for rank in holders:
        rank.cache.fill()
    for rank in readers:
        rank.transport.read("r", "d", list(PAIRS), list(PAIRS.values()))
        (end, ) = rank.ends()
        assert end.ok
        held = [{name: part for each in holders for name, part in each.cache.parts(block).items()}
                for block in range(BLOCKS)]
        for ours, theirs in PAIRS.items():
            assert rank.cache.parts(ours) == held[theirs]


def test_b44_several_heads_need_as_many_ranks():
    """Equal sizes go; others are refused when the engines meet, also where the heads of two ranks are the same."""
    senders, receivers = engines((2, 1), (2, 1), kv_heads=4)
    meet(senders, "d", receivers)
    for rank, other in zip(senders, receivers, strict=True):
        rank.cache.fill()
        rank.transport.write("k", "d", list(PAIRS), list(PAIRS.values()), b"n")
        assert rank.ends()[0].ok
        for source, target in PAIRS.items():
            assert other.cache.parts(target) == rank.cache.parts(source)
    for (p, d), heads in itertools.product([((1, 1), (2, 1)), ((4, 1), (2, 1)), ((2, 1), (4, 1))], [2, 4]):
        senders, receivers = engines(p, d, heads)
        with pytest.raises(UnmappableSplit, match=f"peer d: tensor parallel size {p[0]} over {d[0]}: .*same"):
            meet(senders, "d", receivers)


def test_b42_engines_with_other_regions_do_not_meet():
    (sender, ), (receiver, ) = engines((1, 1), (1, 1))
    other = Cache(indexed=(0, 1)).description
    metadata = RanksMetadata([PeerMetadata("d/0", b"", other).encode()]).encode()
    with pytest.raises(PeerMismatch, match="beside the KV"):
        sender.transport.add_peer("d", metadata)


# The torch transport's copies.


@pytest.mark.parametrize("mine, other", [({}, {"pad": 12}), ({"packed": True}, {})], ids=str)
def test_b101_regions_are_gathered_and_scattered(mine, other):
    ours, theirs = Cache(**mine), Cache(**other)
    ours.fill()
    lanes = plan(ours.description, theirs.description)
    gather = BlockCopier([*ours.kv.values(), *ours.beside.values()], [lane.ours for lane in lanes], BLOCKS)
    scatter = BlockCopier([*theirs.kv.values(), *theirs.beside.values()], [lane.theirs for lane in lanes], BLOCKS)
    buffer = torch.empty(gather.block_bytes * len(PAIRS), dtype=torch.uint8)
    gather.gather(torch.tensor(list(PAIRS)), buffer)
    scatter.scatter(torch.tensor(list(PAIRS.values())), buffer)
    there = {target: source for source, target in PAIRS.items()}
    for block in range(BLOCKS):
        expected = ours.parts(there[block]) if block in there else {name: bytes(len(part)) for name, part in
                                                                     theirs.parts(block).items()}
        assert theirs.parts(block) == expected
    with pytest.raises(TransferError, match="outside of this rank's caches"):
        BlockCopier([torch.zeros(8)], [lane.ours for lane in lanes], BLOCKS)


def test_b29_a_peer_can_not_claim_regions_without_number():
    """Each of them costs time in the thread that transfers."""
    description = Cache().description
    region = description.whole[0]
    many = tuple(msgspec.structs.replace(region, address=region.address + number) for number in range(MAX_REGIONS + 1))
    with pytest.raises(ValueError, match=f"{MAX_REGIONS + 1} regions are more than {MAX_REGIONS}"):
        msgspec.structs.replace(description, whole=many)
    said = said_regions([WholeRegion(number, 1, number + 1, number + 1) for number in range(1000)])
    assert len(said) < 120 and ", ... (" in said
