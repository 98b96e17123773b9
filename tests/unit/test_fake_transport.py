# SPDX-License-Identifier: Apache-2.0
"""B3, B44: bytes over the fake fabric, for every layout and split. B20-B29: its faults are the ones it promises."""
import numpy as np
import pytest

from tests.fakes.transport import FakeFabric, FakeTransport, Faults
from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.requests import Notice

TOKENS, SIZE, LAYERS, HEADS = 4, 2, 2, 4

NO_FAULTS = Faults()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rank:
    """A worker's cache in numpy, (layer, part, block, head, bytes of a head), and its transport."""

    def __init__(self, fabric, name, *, blocks=8, heads=range(HEADS), layers=range(LAYERS), seed=0,
                 layout=Layout.HEADS_FIRST):
        head_bytes = TOKENS * SIZE * 4
        random = np.random.default_rng(seed)
        self.heads, self.layers = heads, layers
        shape = (len(layers), layout.parts, blocks, len(heads), head_bytes)
        self.bytes = random.integers(0, 256, shape, dtype=np.uint8)
        block_bytes = len(heads) * head_bytes
        planes = tuple(self.bytes[layer, kv].ctypes.data for layer in range(len(layers)) for kv in range(layout.parts))
        self.cache = CacheDescription(layout=layout, memory=Memory.DRAM, device_id=0, dtype="float32",
                                      num_blocks=blocks, block_size=TOKENS, head_size=SIZE, first_head=heads.start,
                                      kv_heads=len(heads), first_layer=layers.start, layers=len(layers),
                                      block_bytes=block_bytes, block_stride_bytes=block_bytes, planes=planes)
        self.name = name
        self.transport = FakeTransport(fabric, name, [self.bytes], self.cache)

    def knows(self, *others):
        for other in others:
            self.transport.add_peer(other.name, other.transport.metadata())

    def write(self, key, peer, local, remote, notice=b"n"):
        self.transport.write(key, peer.name, local, remote, notice)


def pair(faults=NO_FAULTS, seed=0):
    clock = Clock()
    fabric = FakeFabric(seed, faults, clock)
    p, d = Rank(fabric, "p", seed=1), Rank(fabric, "d", seed=2, blocks=12)
    p.knows(d)
    return clock, fabric, p, d


def splits(parts, layers=False):
    """The shares of `parts` ranks, by layers or by heads; more ranks than heads hold replicas."""
    total = LAYERS if layers else HEADS
    each = max(1, total // parts)
    return [range(r * each % total, r * each % total + each) for r in range(parts)]


@pytest.mark.parametrize("layout", list(Layout))
def test_b3_the_pairs_are_copied_and_nothing_else_is_touched(layout):
    fabric = FakeFabric()
    p, d = Rank(fabric, "p", seed=1, layout=layout), Rank(fabric, "d", seed=2, blocks=12, layout=layout)
    p.knows(d)
    expected = d.bytes.copy()
    local, remote = [7, 0, 1, 5], [3, 11, 10, 4]
    expected[:, :, remote] = p.bytes[:, :, local]
    p.write("k", d, local, remote, b"done")
    ended = p.transport.poll().finished
    moved = 4 * p.cache.block_bytes * len(p.cache.planes)
    assert [(end.key, end.ok, end.bytes) for end in ended] == [("k", True, moved)]
    assert d.transport.poll().notices == [Notice("p", b"done")]
    np.testing.assert_array_equal(d.bytes, expected)
    assert p.transport.live_handles() == 0


@pytest.mark.parametrize("senders,receivers", [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2), (8, 4),
                                               (4, 8)])
@pytest.mark.parametrize("layers", [1, 2])
def test_b44_every_head_of_every_layer_lands_where_it_belongs(senders, receivers, layers):
    fabric = FakeFabric()
    truth = np.random.default_rng(0).integers(0, 256, (LAYERS, 2, 8, HEADS, TOKENS * SIZE * 4), dtype=np.uint8)
    prefill = [Rank(fabric, f"p{i}.{j}", heads=heads, layers=part) for i, heads in enumerate(splits(senders))
               for j, part in enumerate(splits(layers, layers=True))]
    decode = [Rank(fabric, f"d{i}", heads=heads, blocks=12) for i, heads in enumerate(splits(receivers))]
    for rank in prefill:
        rank.bytes[:] = truth[rank.layers.start:rank.layers.stop, :, :, rank.heads.start:rank.heads.stop]
    local, remote = [0, 1, 6], [9, 10, 2]
    expected = [0] * len(decode)
    for p in prefill:
        for number, d in enumerate(decode):
            if set(p.heads) & set(d.heads):
                p.knows(d)
                p.write(f"k{number}", d, local, remote)
                expected[number] += 1
    for p in prefill:
        assert all(end.ok for end in p.transport.poll().finished)
    for number, d in enumerate(decode):
        assert len(d.transport.poll().notices) == expected[number] > 0
        np.testing.assert_array_equal(d.bytes[:, :, remote], truth[:, :, local, d.heads.start:d.heads.stop])


def test_b3_a_notice_never_comes_before_its_data():
    clock, fabric, p, d = pair(Faults(delay_s=1.0))
    open_writes = {f"{block}".encode(): block for block in range(8)}
    for notice, block in open_writes.items():
        p.write(notice.decode(), d, [block], [block + 1], notice)
    order = []
    for clock.now_s in np.arange(0.0, 3.0, 0.01):
        p.transport.poll()
        for notice in d.transport.poll().notices:
            block = open_writes.pop(notice.payload)
            order.append(block)
            np.testing.assert_array_equal(d.bytes[:, :, block + 1], p.bytes[:, :, block])
    assert not open_writes
    assert order != sorted(order), "delays must put notices out of order"


def test_b27_an_error_ends_the_write_without_a_notice():
    _, _, p, d = pair(Faults(error=1.0))
    p.write("k", d, [1], [1])
    end, = p.transport.poll().finished
    assert (end.ok, end.error, end.bytes) == (False, "injected error", 0)
    assert d.transport.poll().notices == [] and p.transport.live_handles() == 0


@pytest.mark.parametrize("faults,count", [(Faults(notice_lost=1.0), 0), (Faults(notice_twice=1.0), 2), (Faults(), 1)])
def test_b29_notices_are_lost_and_doubled_on_demand(faults, count):
    _, _, p, d = pair(faults)
    p.write("k", d, [1], [1])
    assert p.transport.poll().finished[0].ok
    assert len(d.transport.poll().notices) == count
    assert d.transport.poll().notices == []


def test_b22_a_stopped_peers_write_lands_late():
    _, fabric, p, d = pair()
    before = d.bytes.copy()
    p.write("k", d, [1], [1])
    fabric.stop("p")
    assert d.transport.poll().notices == []
    np.testing.assert_array_equal(d.bytes, before)
    fabric.resume("p")
    assert len(d.transport.poll().notices) == 1
    np.testing.assert_array_equal(d.bytes[:, :, 1], p.bytes[:, :, 1])


def test_b21_a_killed_senders_write_never_lands():
    _, fabric, p, d = pair(Faults())
    before = d.bytes.copy()
    p.write("k", d, [1], [1])
    fabric.kill("p")
    assert d.transport.poll().notices == []
    np.testing.assert_array_equal(d.bytes, before)


def test_b23_a_write_to_a_dead_peer_ends_as_not_ok():
    _, fabric, p, d = pair()
    fabric.kill("d")
    p.write("k", d, [1], [1])
    end, = p.transport.poll().finished
    assert (end.ok, end.error) == (False, "peer is gone") and p.transport.live_handles() == 0


@pytest.mark.parametrize("give_up,error", [(lambda t: t.cancel("k"), "cancelled"),
                                           (lambda t: t.drop_peer("d"), "peer dropped")])
def test_b25_a_write_given_up_ends_once_and_only_when_it_can_no_longer_land(give_up, error):
    clock, _, p, d = pair(Faults(delay_s=1.0))
    p.write("k", d, [1], [1])
    give_up(p.transport)
    assert p.transport.poll().finished == [] and p.transport.live_handles() == 1
    clock.now_s = 2.0
    end, = p.transport.poll().finished
    assert (end.ok, end.error, end.bytes) == (False, error, 0)
    after = d.bytes.copy()
    clock.now_s = 9.0
    assert p.transport.poll().finished == []
    np.testing.assert_array_equal(d.bytes, after)
    give_up(p.transport)


def test_b24_a_name_is_one_life():
    _, fabric, p, d = pair()
    with pytest.raises(TransferError, match="taken"):
        Rank(fabric, "d")
    fabric.kill("d")
    reborn = Rank(fabric, "d", blocks=3)
    with pytest.raises(TransferError, match="new incarnation"):
        p.knows(reborn)


def test_b20_the_same_seed_tells_the_same_story():
    def story(seed):
        clock, _, p, d = pair(Faults(error=0.3, notice_lost=0.3, notice_twice=0.3, delay_s=1.0), seed)
        seen = []
        for step in range(40):
            clock.now_s = step / 10
            if step < 20:
                p.write(f"{step}", d, [step % 8], [step % 12], b"%d" % step)
            seen += [(step, end.key, end.ok) for end in p.transport.poll().finished]
            seen += [(step, notice.payload) for notice in d.transport.poll().notices]
        assert p.transport.live_handles() == 0
        return seen

    assert story(1) == story(1) != story(2)


def test_b20_closing_ends_every_write():
    _, _, p, d = pair(Faults(delay_s=1.0))
    p.write("k", d, [1], [1])
    p.transport.close()
    assert p.transport.live_handles() == 0
    with pytest.raises(TransferError, match="not known"):
        p.write("again", d, [1], [1])
