# SPDX-License-Identifier: Apache-2.0
"""Reads of a peer's blocks over NIXL, two real processes: B3 (bytes), B5, B21, B22, B27."""
import os
import signal
import time

import pytest
import torch
from nixl_receiver import receiver

from tests.forked import freeze
from tests.verdict import same_bytes
from vllm_pd.transfer.requests import AddTransferPeer, CancelTransfer, DropTransferPeer, Finished, Read


def end_of(rank, key, timeout_s=60.0) -> Finished:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for end in rank.worker.take_progress().finished:
            assert end.key == key
            return end
        time.sleep(0.0005)
    raise AssertionError(f"{key} has not ended in {timeout_s} s")


def add(rank, peer) -> None:
    rank.worker.execute([AddTransferPeer(peer.name, peer.metadata)])


@pytest.mark.parametrize("progress_thread", [False, True], ids=["no thread", "thread"])
@pytest.mark.parametrize("layout", ["IPEX", "NHD", "HND"])
def test_b3_b5_exactly_the_blocks_named_are_read(rank, layout, progress_thread):
    """B3, B5: while the peer is busy with something else, and without a byte of it being changed."""
    p = rank("p", layout=layout, progress_thread=progress_thread)
    with receiver("d", blocks=50, start=1 << 28, layout=layout) as peer:
        theirs = torch.from_numpy(peer.ask("memory"))
        expected = torch.stack(p.memory).clone()
        add(p, peer)
        for key, local, remote in (("rising", [0, 1, 2], [10, 11, 12]), ("falling", [9, 8, 7], [32, 33, 34]),
                                   ("scattered", [20, 13, 39], [49, 0, 7])):
            p.worker.execute([Read(key, peer.name, local, remote)])
            end = end_of(p, key)
            assert end.ok and end.bytes == len(local) * p.cache.block_bytes * len(p.cache.planes)
            expected[:, :, local] = theirs[:, :, remote]
        same_bytes(torch.equal(torch.stack(p.memory), expected))
        same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), theirs))
        assert peer.ask("poll", 1, 0.1) == []  # nobody is told


def test_b27_a_read_that_can_not_be_made_ends_as_not_ok(rank):
    p = rank("p")
    with receiver("d", blocks=50) as peer:
        add(p, peer)
        for read in (Read("k", "nobody", [0], [0]), Read("k", peer.name, [40], [0]), Read("k", peer.name, [0], [50]),
                     Read("k", peer.name, [1, 1], [2, 3]), Read("k", peer.name, [1], [2, 3])):
            p.worker.execute([read])
            assert not end_of(p, "k").ok


def test_b21_a_read_from_a_dead_peer_ends_as_not_ok(rank):
    p = rank("p", progress_thread=False)
    with receiver("d") as peer:
        add(p, peer)
        p.worker.execute([Read("before", peer.name, [0], [0])])
        assert end_of(p, "before").ok
        peer.kill()
        p.worker.execute([Read("after", peer.name, [1], [1])])
        end = end_of(p, "after")
        assert not end.ok and end.may_land, "part of a read may be under way when the library reports an error"
        p.worker.execute([Read("again", peer.name, [1], [1])])
        end = end_of(p, "again")
        assert not end.ok and not end.may_land
        p.worker.execute([DropTransferPeer(peer.name), Read("later", peer.name, [1], [1])])
        assert not end_of(p, "later").ok


@pytest.mark.parametrize("request_", [CancelTransfer("k"), DropTransferPeer("d")], ids=["cancel", "drop"])
def test_b22_a_read_from_a_peer_that_stands_still_ends_once(rank, request_):
    """B22: with or without that peer's help, when it goes on at the latest; given up, it does not end as ok unless it
    had ended before."""
    p = rank("p", progress_thread=False)
    with receiver("d") as peer:
        add(p, peer)
        p.worker.execute([Read("first", peer.name, [0], [0])])
        assert end_of(p, "first").ok
        freeze(peer.process.pid)
        try:
            p.worker.execute([Read("k", peer.name, list(range(40)), list(range(40)))])
            ended = p.worker.take_progress().finished
            p.worker.execute([request_])
        finally:
            os.kill(peer.process.pid, signal.SIGCONT)
        if ended:
            assert ended[0].ok and p.worker.take_progress().finished == []
        else:
            assert not end_of(p, "k").ok
