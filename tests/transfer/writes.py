# SPDX-License-Identifier: Apache-2.0
"""What the tests of the transports do with two ranks."""
import time

from vllm_pd.transfer.nixl.generations import NixlGenerations
from vllm_pd.transfer.requests import AddTransferPeer, Read, Write


def finish(rank, keys, timeout_s=60.0):
    """Poll until all keys have ended; each must end exactly once."""
    ends = {}
    deadline_s = time.monotonic() + timeout_s
    while set(ends) != set(keys) and time.monotonic() < deadline_s:
        for end in rank.worker.take_progress().finished:
            assert end.key not in ends
            ends[end.key] = end
        time.sleep(0.0005)
    assert set(ends) == set(keys)
    return ends


def send(rank, peer, key, local, remote, notice=b"n"):
    rank.worker.execute([Write(key, peer.name, local, remote, [notice])])


def connect(rank, peer):
    """Add the peer, let a first notice through and read a block, so that the connection stands on both sides and is
    proven (`transfer.nixl.identity`). No memory is changed."""
    rank.worker.execute([AddTransferPeer(peer.name, peer.metadata)])
    peer.tell("poll", 1, 60.0)
    send(rank, peer, "hello", [], [])
    finish(rank, ["hello"])
    while not peer.pipe.poll(0.001):
        rank.worker.take_progress()
    assert peer.answer() == [(rank.name, b"n")]
    if not isinstance(rank.transport, NixlGenerations):
        return
    before = [layer.clone() for layer in rank.memory]
    rank.worker.execute([Read("proof", peer.name, [0], [0])])
    assert finish(rank, ["proof"])["proof"].ok
    for layer, had in zip(rank.memory, before, strict=True):
        layer.copy_(had)
