# SPDX-License-Identifier: Apache-2.0
"""B3, B28, B44: engines of several ranks over NIXL and torch, each rank a transport of its own, all in this process."""
import itertools
import time

import pytest
import torch

from tests.verdict import same_bytes
from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import describe
from vllm_pd.transfer.nixl.transport import NixlTransport
from vllm_pd.transfer.plan import head_range
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.torch.transport import TorchTransport
from vllm_pd.transfer.transport import RanksMetadata, rank_name

BLOCKS, BLOCK_SIZE, HEAD_SIZE, KV_HEADS, LAYERS = 12, 16, 32, 4, 2
SHARE = BLOCK_SIZE * HEAD_SIZE  # elements of one head in one block
_names = itertools.count()


class Rank:
    """Keys and values as vLLM's CPU cache has them, of the heads of this rank."""

    def __init__(self, kind: str, engine: str, rank: int, ranks: int, filled: bool):
        heads = head_range(rank, ranks, KV_HEADS)
        shape = (2, BLOCKS, len(heads), SHARE)
        whole = torch.arange(LAYERS * 2 * BLOCKS * KV_HEADS * SHARE, dtype=torch.float32)
        self.expected = list(whole.view(LAYERS, 2, BLOCKS, KV_HEADS, SHARE)[:, :, :, heads.start:heads.stop])
        self.layers = [layer.clone() if filled else torch.full(shape, -1.0) for layer in self.expected]
        caches = [layer.view(2, BLOCKS, len(heads) * SHARE) for layer in self.layers]
        description = describe(caches, num_blocks=BLOCKS, block_size=BLOCK_SIZE, kv_heads=len(heads),
                               head_size=HEAD_SIZE, platform="cpu", backend="TORCH_SDPA", first_head=heads.start)
        name = rank_name(engine, rank)
        transport = (NixlTransport(name, caches, description, progress_thread=not filled) if kind == "nixl" else
                     TorchTransport(name, caches, description, "127.0.0.1", receives=not filled))
        self.transport = RankedTransport(transport, rank, ranks, KV_HEADS)
        self.transport.open_grant("g", list(range(BLOCKS)))


@pytest.fixture(params=["nixl", "torch"])
def kind(request):
    return request.param


@pytest.fixture(params=[(1, 1), (1, 2), (2, 1), (2, 2)], ids="{0[0]} to {0[1]}".format)
def engines(kind, request):
    """(ranks of P, ranks of D), acquainted."""
    p_ranks, d_ranks = request.param
    p_name, d_name = f"p{next(_names)}", f"d{next(_names)}"
    p = [Rank(kind, p_name, rank, p_ranks, True) for rank in range(p_ranks)]
    d = [Rank(kind, d_name, rank, d_ranks, False) for rank in range(d_ranks)]
    metadata = RanksMetadata([rank.transport.metadata() for rank in d]).encode()
    for rank in p:
        rank.transport.add_peer(d_name, metadata)
    yield p_name, p, d_name, d
    for rank in p + d:
        assert rank.transport.live_handles() == 0
        rank.transport.close()


def settle(ranks: list[Rank], keys: int, notices_at: Rank, notices: int) -> tuple[list[Finished], list[Notice]]:
    """Poll until so many writes have ended and so many notices have come."""
    ends: list[Finished] = []
    arrived: list[Notice] = []
    deadline_s = time.monotonic() + 60
    while len(ends) < keys or len(arrived) < notices:
        assert time.monotonic() < deadline_s, (ends, arrived)
        for rank in ranks:
            ends += rank.transport.poll().finished
        arrived += notices_at.transport.poll().notices
        time.sleep(0.001)
    return ends, arrived


def test_b44_real_bytes_land_where_they_belong(engines):
    p_name, p, d_name, d = engines
    local, remote = [3, 4, 9, 0], [7, 8, 2, 11]
    for number, rank in enumerate(p):
        rank.transport.write("k", d_name, local, remote, b"from %d" % number, "g")
    ends, arrived = settle(p, len(p), d[0], len(p))
    assert all(end.ok for end in ends)
    assert sum(end.bytes for end in ends) == len(local) * LAYERS * 2 * KV_HEADS * SHARE * 4
    assert sorted(arrived, key=lambda n: n.peer) == [Notice(f"{p_name}/{n}", b"from %d" % n) for n in range(len(p))]
    assert not any(rank.transport.poll().notices for rank in d)
    untouched = [block for block in range(BLOCKS) if block not in remote]
    for rank in d:
        for layer, expected in zip(rank.layers, rank.expected, strict=True):
            same_bytes(torch.equal(layer[:, remote], expected[:, local]))
            assert (layer[:, untouched] == -1).all()


def test_b28_a_notice_without_blocks_reaches_rank_0(engines):
    _, p, d_name, d = engines
    for rank in p:
        rank.transport.write("k", d_name, [], [], b"n")
    ends, arrived = settle(p, len(p), d[0], len(p))
    assert all(end.ok and end.bytes == 0 for end in ends) and {n.payload for n in arrived} == {b"n"}


def test_b5_a_read_brings_the_heads_of_the_rank(engines, kind):
    _, p, d_name, d = engines
    if kind == "torch":
        for rank in p:
            try:
                rank.transport.read("k", d_name, [1], [6])
            except TransferError as error:
                assert "can't read" in str(error)
            else:  # it was split over several ranks
                end, = rank.transport.poll().finished
                assert not end.ok and "can't read" in end.error
        return
    for rank in d:
        for layer, expected in zip(rank.layers, rank.expected, strict=True):
            layer.copy_(-expected)
    for rank in p:
        rank.transport.read("k", d_name, [1, 5], [6, 7])
    ends, _ = settle(p, len(p), d[0], 0)
    assert all(end.ok for end in ends)
    for rank in p:
        for layer, expected in zip(rank.layers, rank.expected, strict=True):
            same_bytes(torch.equal(layer[:, [1, 5]], -expected[:, [6, 7]]))
            same_bytes(torch.equal(layer[:, 2:5], expected[:, 2:5]))


def test_b23_a_peer_that_was_dropped_can_be_met_again(engines):
    _, p, d_name, d = engines
    metadata = RanksMetadata([rank.transport.metadata() for rank in d]).encode()
    for rank in p:
        rank.transport.drop_peer(d_name)
        rank.transport.add_peer(d_name, metadata)
        rank.transport.write("k", d_name, [1], [1], b"n", "g")
    ends, _ = settle(p, len(p), d[0], len(p))
    assert all(end.ok for end in ends)
