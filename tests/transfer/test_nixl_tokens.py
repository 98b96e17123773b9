# SPDX-License-Identifier: Apache-2.0
"""Token-major caches of other heads over NIXL, two real processes: B101, B3 (bytes), B20, B22, B23, B25, B27, B28.

Each transfer goes in waves of one block, which only a poll of the sender follows up.
"""
import time

import pytest
import torch
from nixl_receiver import Rank, receiver
from writes import connect, finish, send

from tests.verdict import same_bytes
from vllm_pd.errors import TransferError
from vllm_pd.transfer.nixl import transport as nixl
from vllm_pd.transfer.nixl.agent import NixlAgent
from vllm_pd.transfer.requests import CancelTransfer, DropTransferPeer, Read

LOCAL, REMOTE = [9, 3, 4, 0, 20, 39], [8, 7, 2, 49, 30, 11]
OTHER_HEADS = [(range(4), range(2, 4)), (range(2, 4), range(4)), (range(4), range(1, 2)), (range(1), range(2)),
               (range(8), range(4))]


@pytest.fixture(autouse=True)
def small_waves(monkeypatch):
    monkeypatch.setattr(nixl, "WAVE_DESCRIPTORS", 1)


def shared(ours: range, theirs: range) -> tuple[slice, slice]:
    """Where the heads that both have are in each."""
    heads = range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
    return tuple(slice(heads.start - each.start, heads.stop - each.start) for each in (ours, theirs))


@pytest.mark.parametrize("ours,theirs,dtype", [*((*each, torch.int32) for each in OTHER_HEADS),
                                               (range(4), range(2), torch.int16), (range(4), range(2), torch.uint8)])
def test_b101_each_head_of_each_token_lands_where_it_belongs(rank, ours, theirs, dtype):
    """B101, B3, B28: and one notice comes, after all waves."""
    p = rank("p-tokens", layout="NHD", heads=ours, progress_thread=False, dtype=dtype)
    with receiver("d-tokens", blocks=50, start=1 << 28, layout="NHD", heads=theirs, dtype=dtype) as peer:
        expected = torch.from_numpy(peer.ask("memory"))
        connect(p, peer)
        send(p, peer, "k", LOCAL, REMOTE, b"all")
        mine, other = shared(ours, theirs)
        peer.tell("poll", 1, 60.0)
        end = finish(p, ["k"])["k"]
        expected[:, :, REMOTE, :, other] = torch.stack(p.memory)[:, :, LOCAL][..., mine, :]
        assert end.ok and end.bytes == expected[:, :, REMOTE, :, other].numel() * expected.element_size()
        assert peer.answer() == [(p.name, b"all")]
        same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), expected))
        assert peer.ask("poll", 1, 0.05) == []


@pytest.mark.parametrize("ours,theirs", OTHER_HEADS[:2])
def test_b101_b5_a_read_brings_the_heads_that_both_have(rank, ours, theirs):
    p = rank("p-read", layout="NHD", heads=ours, progress_thread=False)
    with receiver("d-read", blocks=50, start=1 << 28, layout="NHD", heads=theirs) as peer:
        source, expected = torch.from_numpy(peer.ask("memory")), torch.stack(p.memory).clone()
        connect(p, peer)
        p.worker.execute([Read("r", peer.name, LOCAL, REMOTE)])
        assert finish(p, ["r"])["r"].ok
        mine, other = shared(ours, theirs)
        expected[:, :, LOCAL, :, mine] = source[:, :, REMOTE][..., other, :]
        same_bytes(torch.equal(torch.stack(p.memory), expected))


def test_b3_the_data_of_all_waves_is_there_whenever_the_notice_is_seen(rank):
    p = rank("p-last", layout="NHD", heads=range(4), progress_thread=False)
    with receiver("d-last", layout="NHD", heads=range(2, 4)) as peer:
        connect(p, peer)
        for number in range(1, 31):
            for layer in p.memory:
                layer[:, LOCAL] = number
            peer.tell("verify", LOCAL, number)
            send(p, peer, "k", LOCAL, LOCAL)
            assert finish(p, ["k"])["k"].ok
            assert peer.answer(), f"round {number}"


@pytest.mark.parametrize("request_", [CancelTransfer("k"), DropTransferPeer("d-waves")], ids=["cancel", "drop"])
def test_b22_b25_a_transfer_given_up_between_waves_ends_with_the_present_one(rank, request_):
    """Its end is the last of it: no further block is written, and no notice comes."""
    p = rank("p-waves", layout="NHD", heads=range(4), progress_thread=False)
    with receiver("d-waves", blocks=50, start=1 << 28, layout="NHD", heads=range(2)) as peer:
        connect(p, peer)
        before = torch.from_numpy(peer.ask("memory"))
        send(p, peer, "k", LOCAL, LOCAL)
        p.worker.execute([request_])
        end = finish(p, ["k"])["k"]
        assert not end.ok and end.bytes == 0 and p.worker.live_handles() == 0
        after = torch.from_numpy(peer.ask("memory"))
        changed = [block for block in range(50) if not torch.equal(after[:, :, block], before[:, :, block])]
        assert changed and set(changed) < set(LOCAL)
        for _ in range(20):
            assert p.worker.take_progress().finished == []
        assert peer.ask("poll", 1, 0.2) == []
        same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), after))


def test_b23_a_peer_that_dies_between_waves_ends_the_transfer(rank):
    p = rank("p-dies", layout="NHD", heads=range(4), progress_thread=False)
    with receiver("d-dies", blocks=50, layout="NHD", heads=range(2)) as peer:
        connect(p, peer)
        send(p, peer, "k", LOCAL, LOCAL)
        peer.kill()
        assert not finish(p, ["k"])["k"].ok and p.worker.live_handles() == 0


def test_b20_closing_between_waves_ends_in_bounded_time():
    p = Rank("p-closes", layout="NHD", heads=range(4), progress_thread=False)
    with receiver("d-closes", blocks=50, layout="NHD", heads=range(2)) as peer:
        connect(p, peer)
        send(p, peer, "k", list(range(40)), list(range(40)))
        started_s = time.monotonic()
        p.worker.close()
        assert time.monotonic() - started_s < 30 and p.worker.live_handles() == 0


@pytest.mark.parametrize("error", [MemoryError("injected"), TransferError("injected")], ids=repr)
def test_b27_a_wave_that_can_not_be_made_is_not_left_out(rank, monkeypatch, error):
    """The library's errors end the transfer; after any other the same wave is made again."""
    p = rank("p-made", layout="NHD", heads=range(4), progress_thread=False)
    with receiver("d-made", blocks=50, start=1 << 28, layout="NHD", heads=range(2)) as peer:
        connect(p, peer)
        expected = torch.from_numpy(peer.ask("memory"))
        make, calls = NixlAgent.make_unprepared, []

        def make_some(self, *arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise error
            return make(self, *arguments)

        monkeypatch.setattr(NixlAgent, "make_unprepared", make_some)
        send(p, peer, "k", LOCAL, REMOTE)
        if isinstance(error, MemoryError):
            with pytest.raises(MemoryError):
                finish(p, ["k"])
        assert finish(p, ["k"])["k"].ok is isinstance(error, MemoryError)
        assert len(calls) == (len(LOCAL) + 1 if isinstance(error, MemoryError) else 3)
        if isinstance(error, MemoryError):
            expected[:, :, REMOTE] = torch.stack(p.memory)[:, :, LOCAL][..., :2, :]
            same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), expected))
        else:
            assert peer.ask("poll", 1, 0.2) == []
