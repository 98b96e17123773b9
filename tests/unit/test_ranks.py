# SPDX-License-Identifier: Apache-2.0
"""B3, B28, B42, B44, B101: engines of several ranks and pipeline stages. Every layer and KV head lands where it
belongs, each rank gives notice."""
import ctypes
import itertools

import msgspec
import numpy as np
import pytest

from tests.fakes.transport import FakeFabric, FakeTransport, Faults
from vllm_pd.errors import TransferError, UnmappableSplit
from vllm_pd.protocol import messages as m
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.plan import head_range, heads_to_write
from vllm_pd.transfer.ranks.split import layer_range
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import AddTransferPeer, Finished, Write
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport
from vllm_pd.transfer.transport import RanksMetadata, Transport, rank_name
from vllm_pd.transfer.worker import TransferWorker

BLOCKS, BLOCK_SIZE, HEAD_SIZE, LAYERS = 5, 4, 2, 3
HEAD_BYTES = BLOCK_SIZE * HEAD_SIZE  # of one byte each
NO_FAULTS = Faults()
SPLITS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (4, 4)]


class Rank:
    """One rank's cache, of bytes, and its transport. `tp`: the ranks of each stage."""

    def __init__(self, fabric: FakeFabric, engine: str, rank: int, tp: int, kv_heads: int, layout: Layout,
                 stages: int = 1):
        self.heads = head_range(rank % tp, tp, kv_heads)
        self.layers = layer_range(rank // tp, stages, LAYERS)
        planes = 2 * len(self.layers)
        self.planes = range(2 * self.layers.start, 2 * self.layers.stop)  # by their numbers in the model
        block_bytes = HEAD_BYTES * len(self.heads)
        plane_bytes = BLOCKS * block_bytes
        self.memory = bytearray(planes * plane_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        cache = CacheDescription(layout=layout, memory=Memory.DRAM, device_id=0, dtype="int8", num_blocks=BLOCKS,
                                 block_size=BLOCK_SIZE, head_size=HEAD_SIZE, first_head=self.heads.start,
                                 kv_heads=len(self.heads), first_layer=self.layers.start,
                                 layers=len(self.layers), block_bytes=block_bytes,
                                 block_stride_bytes=block_bytes,
                                 planes=tuple(base + plane * plane_bytes for plane in range(planes)))
        self.own = FakeTransport(fabric, rank_name(engine, rank), [self.memory], cache)
        self.transport = RankedTransport(self.own, rank, tp, kv_heads)

        shape = (planes, BLOCKS, len(self.heads), BLOCK_SIZE, HEAD_SIZE)
        stored = np.frombuffer(self.memory, np.uint8)
        self.view = (stored.reshape(shape) if layout.heads_are_runs else  # [plane, block, head, token, channel]
                     stored.reshape([shape[axis] for axis in (0, 1, 3, 2, 4)]).swapaxes(2, 3))

    def head(self, plane: int, block: int, head: int) -> bytes:
        """The bytes of one head in one block, token by token. `plane` and `head` are numbers in the model."""
        return self.view[plane - self.planes.start, block, head - self.heads.start].tobytes()

    def fill(self) -> None:
        for plane, block, head in itertools.product(self.planes, range(BLOCKS), self.heads):
            found = self.view[plane - self.planes.start, block, head - self.heads.start]
            found.flat = list(pattern(plane, block, head))


def pattern(plane: int, block: int, head: int) -> bytes:
    """What this head of that block holds; no two are alike, and none is zero."""
    return bytes((1 + 17 * plane + 5 * block + 71 * head + 3 * i) % 251 + 1 for i in range(HEAD_BYTES))


class Engines:
    """P with its caches filled, D with its caches empty, and P's ranks know D."""

    def __init__(self, p_ranks: int, d_ranks: int, kv_heads: int, faults: Faults = NO_FAULTS,
                 layout: Layout = Layout.HEADS_FIRST, p_stages: int = 1, d_stages: int = 1):
        self.fabric = FakeFabric(0, faults)
        self.kv_heads = kv_heads
        self.p, self.d = ([Rank(self.fabric, name, rank, tp, kv_heads, layout, stages) for rank in range(tp * stages)]
                          for name, tp, stages in (("p", p_ranks, p_stages), ("d", d_ranks, d_stages)))
        self.metadata = RanksMetadata([rank.transport.metadata() for rank in self.d]).encode()
        for rank in self.p:
            rank.transport.add_peer("d", self.metadata)

    def run(self, rank: Rank) -> list[Finished]:
        """Poll until nothing is open."""
        finished: list[Finished] = []
        for _ in range(10):
            finished += rank.transport.poll().finished
        assert rank.transport.live_handles() == 0
        return finished


@pytest.mark.parametrize("layout", [Layout.HEADS_FIRST, Layout.TOKENS_FIRST], ids=lambda layout: layout.value)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("p_ranks, d_ranks", SPLITS)
@pytest.mark.parametrize("p_stages, d_stages", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_b44_b101_every_layer_and_head_lands_where_it_belongs(p_ranks, d_ranks, kv_heads, layout, p_stages, d_stages):
    """B44, B101, B3: also where there are fewer heads than ranks. No byte is written twice, or beside its place."""
    engines = Engines(p_ranks, d_ranks, kv_heads, layout=layout, p_stages=p_stages, d_stages=d_stages)
    local, remote = [3, 1, 0], [2, 4, 1]
    written = 0
    for rank in engines.p:
        rank.fill()
        rank.transport.write("k", "d", local, remote, b"n")
        (end,) = engines.run(rank)
        assert end.ok and end.key == "k"
        written += end.bytes
    assert written == sum(3 * len(rank.planes) * HEAD_BYTES * len(rank.heads) for rank in engines.d)
    there = dict(zip(remote, local, strict=True))
    for rank in engines.d:
        for plane, block, head in itertools.product(rank.planes, range(BLOCKS), rank.heads):
            expected = pattern(plane, there[block], head) if block in there else bytes(HEAD_BYTES)
            assert rank.head(plane, block, head) == expected, (rank.heads, plane, block, head)


@pytest.mark.parametrize("p_ranks, d_ranks", SPLITS)
@pytest.mark.parametrize("p_stages, d_stages", [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_b28_b101_each_rank_gives_one_notice_and_gives_it_to_rank_0(p_ranks, d_ranks, p_stages, d_stages):
    """B28: D hears as many notices as P has ranks, over all its stages, at its rank 0, whoever wrote where."""
    engines = Engines(p_ranks, d_ranks, kv_heads=2, p_stages=p_stages, d_stages=d_stages)
    for number, rank in enumerate(engines.p):
        rank.transport.write("k", "d", [0], [0], b"from %d" % number)
        engines.run(rank)
    arrived = [[(n.peer, n.payload) for n in rank.transport.poll().notices] for rank in engines.d]
    assert sorted(arrived[0]) == [(f"p/{number}", b"from %d" % number) for number in range(p_ranks * p_stages)]
    assert not any(arrived[1:])


def test_b28_the_notice_waits_for_the_last_rank_that_is_written_to():
    engines = Engines(1, 2, kv_heads=2)
    (p,) = engines.p
    engines.fabric.stop("p/0")
    p.transport.write("k", "d", [0], [0], b"n")
    p.fill()
    assert not p.transport.poll().finished and p.transport.live_handles()
    engines.fabric.resume("p/0")
    assert not engines.d[0].transport.poll().notices  # the data has landed, and P has not looked yet
    assert [bytes(rank.head(0, 0, head)) for rank in engines.d for head in rank.heads] == [pattern(0, 0, 0),
                                                                                          pattern(0, 0, 1)]
    assert [end.ok for end in engines.run(p)] == [True]
    assert [n.payload for n in engines.d[0].transport.poll().notices] == [b"n"]


@pytest.mark.parametrize("p_ranks, d_ranks", [(1, 2), (2, 1), (2, 2)])
def test_b27_a_write_that_fails_in_part_gives_no_notice(p_ranks, d_ranks):
    """B27, B20: it ends once, as not ok, when its last part has ended."""
    engines = Engines(p_ranks, d_ranks, kv_heads=4, faults=Faults(error=1.0))
    for rank in engines.p:
        rank.transport.write("k", "d", [0], [0], b"n")
        (end,) = engines.run(rank)
        assert not end.ok and "injected error" in end.error and end.bytes == 0
    assert not any(rank.transport.poll().notices for rank in engines.d)


@pytest.mark.parametrize("posted", [False, True])
def test_b27_a_part_with_which_something_unexpected_goes_wrong_ends_the_write(posted, monkeypatch):
    """B20: once, as not ok and without a notice, when no part of it can land any more."""
    (p,) = (engines := Engines(1, 2, kv_heads=2)).p
    write, calls = p.own.write, []

    def broken(*arguments) -> None:
        calls.append(arguments)
        if len(calls) < 2 or posted:
            write(*arguments)
        if len(calls) == 2:
            raise MemoryError("injected")

    monkeypatch.setattr(p.own, "write", broken)
    engines.fabric.stop("p/0")
    p.transport.write("k", "d", [0], [0], b"n")
    assert not p.transport.poll().finished and p.own.live_handles() == 1 + posted
    engines.fabric.resume("p/0")
    (end,) = engines.run(p)
    assert not end.ok and "injected" in end.error
    assert not engines.d[0].transport.poll().notices


def test_b25_a_cancelled_write_ends_as_not_ok_in_all_its_parts():
    engines = Engines(1, 4, kv_heads=4)
    (p,) = engines.p
    p.transport.write("k", "d", [0], [0], b"n")
    p.transport.cancel("k")
    (end,) = engines.run(p)
    assert not end.ok and "cancelled" in end.error
    assert not engines.d[0].transport.poll().notices


def test_b29_a_key_in_use_and_an_unknown_peer_are_refused():
    (p,) = (engines := Engines(1, 2, kv_heads=2)).p
    p.transport.write("k", "d", [0], [0], b"n")
    with pytest.raises(TransferError, match="already open"):
        p.transport.write("k", "d", [1], [1], b"n")
    with pytest.raises(TransferError, match="not known"):
        p.transport.write("l", "x", [1], [1], b"n")
    assert len(engines.run(p)) == 1


def test_b2_blocks_that_are_out_of_range_end_the_write():
    (p,) = (engines := Engines(1, 2, kv_heads=2)).p
    p.transport.write("k", "d", [BLOCKS], [0], b"n")
    (end,) = engines.run(p)
    assert not end.ok and "outside" in end.error


def test_b23_a_dropped_peer_is_dropped_with_all_its_ranks():
    (p,) = (engines := Engines(1, 2, kv_heads=2)).p
    engines.fabric.stop("p/0")
    p.transport.write("k", "d", [0], [0], b"n")
    p.transport.drop_peer("d")
    engines.fabric.resume("p/0")
    assert [end.ok for end in engines.run(p)] == [False]
    for rank in ("d/0", "d/1"):
        with pytest.raises(TransferError, match="not known"):
            p.own.write("l", rank, [0], [0], b"")
    p.transport.add_peer("d", engines.metadata)
    p.transport.write("k", "d", [0], [0], b"n")
    assert [end.ok for end in engines.run(p)] == [True]


@pytest.mark.parametrize("layout", [Layout.HEADS_FIRST, Layout.TOKENS_FIRST], ids=lambda layout: layout.value)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("p_ranks, d_ranks", [*SPLITS, (8, 2), (2, 8)])
@pytest.mark.parametrize("p_stages, d_stages", [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2)])
def test_b5_b101_b102_a_read_brings_every_layer_and_head_of_the_rank(p_ranks, d_ranks, kv_heads, layout, p_stages,
                                                                     d_stages):
    """Also where several ranks hold the same heads, here or there: each byte once."""
    engines = Engines(p_ranks, d_ranks, kv_heads, layout=layout, p_stages=p_stages, d_stages=d_stages)
    for rank in engines.d:
        rank.fill()
    for rank in engines.p:
        rank.transport.read("k", "d", [4, 2], [0, 3])
        (end,) = engines.run(rank)
        assert end.ok and end.bytes == 2 * len(rank.planes) * len(rank.heads) * HEAD_BYTES
        for plane, head in itertools.product(rank.planes, rank.heads):
            assert rank.head(plane, 4, head) == pattern(plane, 0, head)
            assert rank.head(plane, 2, head) == pattern(plane, 3, head)
    assert not any(rank.transport.poll().notices for rank in engines.d)


def test_b102_ranks_that_hold_the_same_read_from_different_ranks():
    """MLA: each of D's ranks has all of it, and so has each of P's."""
    engines = Engines(4, 2, kv_heads=1)
    found = []
    for rank in engines.p:
        read = rank.own.read
        rank.own.read = lambda key, peer, *blocks, read=read: (found.append(peer), read(key, peer, *blocks))
        rank.transport.read("k", "d", [0], [0])
        assert [end.ok for end in engines.run(rank)] == [True]
    assert found == ["d/0", "d/1", "d/0", "d/1"]


@pytest.mark.parametrize("ours, theirs", [(3, 2), (2, 3)])
def test_b44_what_cannot_be_mapped_is_refused_with_both_values(ours, theirs):
    with pytest.raises(UnmappableSplit, match=f"{ours} over {theirs}"):
        heads_to_write(0, ours, 0, theirs, kv_heads=6)
    with pytest.raises(UnmappableSplit, match=f"{ours} over {theirs}"):
        Engines(ours, theirs, kv_heads=6)


def test_b44_heads_that_do_not_divide_are_refused():
    with pytest.raises(UnmappableSplit, match="3 KV heads.*2 ranks"):
        head_range(0, 2, 3)


def test_b42_a_rank_that_holds_other_heads_than_it_should_is_refused():
    engines = Engines(2, 2, kv_heads=4)
    swapped = RanksMetadata(RanksMetadata.decode("d", engines.metadata).ranks[::-1]).encode()
    with pytest.raises(TransferError, match="other metadata"):
        engines.p[0].transport.add_peer("d", swapped)
    other = Rank(engines.fabric, "e", 0, 1, 4, Layout.HEADS_FIRST), Rank(engines.fabric, "e", 1, 2, 4,
                                                                         Layout.HEADS_FIRST)
    metadata = RanksMetadata([rank.transport.metadata() for rank in other]).encode()
    with pytest.raises(UnmappableSplit, match=r"peer e: rank 0 of 2 has.*KV heads 0\.\.3;.*KV heads 0\.\.1"):
        engines.p[0].transport.add_peer("e", metadata)


@pytest.mark.parametrize("metadata", [b"", b"\xc1", RanksMetadata([]).encode(), RanksMetadata([b""] * 65).encode(),
                                      msgspec.msgpack.encode("d")], ids=str)
def test_b81_metadata_that_is_none_is_refused(metadata):
    (p,) = Engines(1, 1, kv_heads=1).p
    with pytest.raises(TransferError, match="metadata of peer x"):
        p.transport.add_peer("x", metadata)


def fingerprint(tp: int, layout: str = "packed", **more) -> m.Fingerprint:
    return m.Fingerprint(**{**dict(protocol=m.PROTOCOL, model="m", dtype="float32", kv_dtype="float32", block_size=16,
                                   layers=4, kv_heads=4, head_size=32, layout=layout, tp=tp), **more})


@pytest.mark.parametrize("ours, theirs", SPLITS)
@pytest.mark.parametrize("layout", m.SPLIT_LAYOUTS)
def test_b42_b101_engines_of_other_ranks_fit_where_the_heads_can_be_mapped(ours, theirs, layout):
    assert fingerprint(ours, layout).first_difference(fingerprint(theirs, layout)) is None


@pytest.mark.parametrize("ours, theirs, layout", [(3, 2, "packed"), (2, 3, "heads-first"), (3, 2, "tokens-first"),
                                                  (2, 1, "unheard of"), (0, 1, "packed")])
def test_b42_others_do_not_and_both_values_are_named(ours, theirs, layout):
    assert fingerprint(ours, layout).first_difference(fingerprint(theirs, layout)) == ("tp", ours, theirs)


def test_b42_another_engine_is_named_before_what_differs_because_of_it():
    """V0 and V1 differ in block size and layout as well; the cure is not another block size."""
    one = fingerprint(1, engine="vllm 0.32", block_size=128)
    assert one.first_difference(fingerprint(1)) == ("engine", "vllm 0.32", "")


def test_b42_b101_stages_may_differ_as_long_as_each_has_a_layer():
    assert fingerprint(2, pp=2).first_difference(fingerprint(1)) is None
    assert fingerprint(1).first_difference(fingerprint(1, pp=4)) is None
    for pp in (0, 5):
        assert fingerprint(1).first_difference(fingerprint(1, pp=pp)) == ("pp", 1, pp)
    assert fingerprint(1, pp=2, layers=4).first_difference(fingerprint(1, layers=2)) == ("layers", 4, 2)


def test_all_layouts_can_be_split():
    """The core knows layouts by name only."""
    assert set(m.SPLIT_LAYOUTS) == {layout.value for layout in Layout}


@pytest.mark.parametrize("wrap", [lambda own: own, lambda own: RankedTransport(own, 0, 1, 1),
                                  lambda own: SlowTransport(own, EmulatedWire(), 1),
                                  lambda own: RankedTransport(SlowTransport(own, EmulatedWire(), 1), 0, 1, 1)],
                         ids=["the transport", "of a rank", "slow", "both"])
def test_what_stands_for_a_transport_has_all_of_one(wrap):
    own = Rank(FakeFabric(0, NO_FAULTS), "p", 0, 1, 1, Layout.HEADS_FIRST).own
    wanted = {name for name in (*vars(Transport), *Transport.__annotations__) if not name.startswith("_")}
    assert {"needs_polls", "write"} <= wanted and wanted <= set(dir(wrap(own)))


@pytest.mark.parametrize("needs_polls", [False, True])
def test_a_rank_s_transfer_that_lasts_says_how_rarely_to_poll(needs_polls):
    engines = Engines(1, 1, 1, Faults(delay_s=10.0))
    (rank, ) = engines.p
    rank.own.needs_polls = needs_polls
    now_s = [0.0]
    worker = TransferWorker(rank.transport, clock=lambda: now_s[0])
    worker.execute([AddTransferPeer("d", engines.metadata), Write("k", "d", [0], [0], [b"n"])])
    now_s[0] = 4.0
    assert worker.moving and worker.youngest_s == (0.0 if needs_polls else 4.0)
