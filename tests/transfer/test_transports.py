# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport, in two real processes, for NIXL and torch: B3 (bytes), B20 (nothing leaks), B21, B23,
B24, B27, B29, B42."""
import os
import random
import time
from functools import partial

import pytest
import torch
from nixl_receiver import Rank, receiver
from writes import connect, finish, send

from tests.forked import freeze
from tests.idle import least_used_s
from tests.verdict import same_bytes
from vllm_pd.transfer.requests import AddTransferPeer, DropTransferPeer, Notice, Write


@pytest.fixture(scope="module", params=["nixl", "torch"])
def kind(request):
    return request.param


@pytest.fixture
def rank(rank, kind):
    return partial(rank, transport=kind)


@pytest.fixture(scope="module")
def peer(kind):
    with receiver("d", blocks=50, start=1 << 28, transport=kind) as process:
        yield process


@pytest.mark.parametrize("layout", ["IPEX", "NHD", "HND"])
def test_b3_exactly_the_blocks_named_are_written(rank, kind, layout):
    p = rank(f"p-{layout}", layout=layout, progress_thread=layout != "IPEX")
    with receiver(f"d-{layout}", blocks=50, start=1 << 28, layout=layout, transport=kind) as peer:
        expected = torch.from_numpy(peer.ask("memory"))
        connect(p, peer)
        shuffled = random.Random(0)
        writes = {
            "rising": ([0, 1, 2, 3], [10, 11, 12, 13]),
            "falling": ([9, 8, 7, 6], [23, 22, 21, 20]),
            "crossed": ([10, 11, 12], [32, 31, 30]),
            "scattered": (shuffled.sample(range(13, 40), 8), shuffled.sample(range(40, 50), 8)),
            "ends": ([39, 0], [0, 49] if layout != "IPEX" else [0, 1]),
        }
        for key, (local, remote) in writes.items():
            send(p, peer, key, local, remote, key.encode())
            peer.tell("poll", 1, 60.0)
            end = finish(p, [key])[key]
            assert end.ok and end.bytes == len(local) * p.cache.block_bytes * len(p.cache.planes)
            assert peer.answer() == [(p.name, key.encode())]
            expected[:, :, remote] = torch.stack(p.memory)[:, :, local]
        same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), expected))


def test_b101_what_is_beside_the_heads_of_a_block_is_written_with_them(rank, kind):
    """B3: of more blocks than a staging buffer has room for, and nothing between them."""
    p = rank("p-index", blocks=60, index=132 * 16 + 4, layout="HND")
    with receiver("d-index", blocks=70, start=7, index=132 * 16 + 4, layout="HND", transport=kind) as peer:
        expected, beside = (torch.from_numpy(peer.ask(what)) for what in ("memory", "index"))
        connect(p, peer)
        ours, theirs = list(range(2, 58)), list(range(69, 13, -1))
        send(p, peer, "k", ours, theirs)
        peer.tell("poll", 1, 60.0)
        end = finish(p, ["k"])["k"]
        assert end.ok and end.bytes == len(ours) * (p.cache.block_bytes * len(p.cache.planes) + 2 * (132 * 16 + 4))
        assert len(peer.answer()) == 1
        expected[:, :, theirs] = torch.stack(p.memory)[:, :, ours]
        beside[:, theirs, :-8] = p.index[:, ours, :-8]
        same_bytes(torch.equal(torch.from_numpy(peer.ask("memory")), expected))
        same_bytes(torch.equal(torch.from_numpy(peer.ask("index")), beside))


@pytest.mark.parametrize("progress_thread", [False, True], ids=["no thread", "thread"])
def test_b3_the_data_is_there_whenever_the_notice_is_seen(rank, kind, progress_thread):
    p = rank("p-order", layers=8, progress_thread=progress_thread)
    ids = [0, 1, 2, 3, 7, 9, 30]
    with receiver("d-order", layers=8, transport=kind) as peer:
        connect(p, peer)
        for number in range(1, 151):
            for layer in p.memory:
                layer[:, ids] = number
            peer.tell("verify", ids, number)
            send(p, peer, "k", ids, ids, b"n")
            assert finish(p, ["k"])["k"].ok
            assert peer.answer(), f"round {number}"


@pytest.mark.parametrize("progress_thread", [False, True], ids=["no thread", "thread"])
def test_b33_a_write_ends_without_a_poll_of_the_receiver(rank, peer, progress_thread):
    """It may be in the middle of a long model step. The sender looks, for its notice leaves when it finds the end."""
    p = rank(f"p-looks-{progress_thread}", progress_thread=progress_thread)
    connect(p, peer)
    for number in range(20):
        send(p, peer, "k", list(range(40)), list(range(40)), b"%d" % number)
        assert finish(p, ["k"])["k"].ok
        assert peer.ask("poll", 1, 60.0) == [(p.name, b"%d" % number)]


@pytest.mark.parametrize("size_bytes", [0, 1, 512, 60_000])
def test_b29_a_notice_arrives_as_it_was_sent(rank, peer, size_bytes):
    p = rank(f"p-size-{size_bytes}")
    connect(p, peer)
    notice = random.Random(0).randbytes(size_bytes)
    # NIXL sends nothing for an empty notice. A write always carries one.
    expected = [(p.name, notice)] if notice else []
    peer.tell("poll", len(expected), 60.0)
    send(p, peer, "k", [1], [1], notice)
    assert finish(p, ["k"])["k"].ok
    assert peer.answer() == expected
    assert peer.ask("poll", 1, 0.5) == [], "more than was sent"


def test_b29_the_same_notice_twice_arrives_twice(rank, peer):
    p = rank("p-twice")
    connect(p, peer)
    peer.tell("poll", 2, 60.0)
    for key in ("a", "b"):
        send(p, peer, key, [1], [1], b"same")
    finish(p, ["a", "b"])
    assert peer.answer() == [(p.name, b"same")] * 2
    assert peer.ask("poll", 1, 0.5) == []


def test_b29_notices_of_an_unknown_sender_are_handed_on_by_its_name(rank):
    receiver_, sender = rank("d-unknown"), rank("p-unknown")
    sender.worker.execute([AddTransferPeer("d-unknown", receiver_.transport.metadata()),
                           Write("k", "d-unknown", [1], [1], [b"\xff\x00junk"])])
    notices, ended = [], []
    deadline_s = time.monotonic() + 60
    while not (notices and ended) and time.monotonic() < deadline_s:
        ended += sender.worker.take_progress().finished
        notices += receiver_.worker.take_progress().notices
    assert notices == [Notice("p-unknown", b"\xff\x00junk")] and ended[0].ok


@pytest.mark.parametrize("local,remote", [([40], [0]), ([0], [50]), ([0, 1], [0])])
def test_b27_a_write_out_of_range_ends_as_not_ok(rank, peer, local, remote):
    p = rank(f"p-range-{local}-{remote}")
    connect(p, peer)
    send(p, peer, "bad", local, remote)
    send(p, peer, "good", [0], [0])
    peer.tell("poll", 1, 60.0)
    ends = finish(p, ["bad", "good"])
    assert not ends["bad"].ok and ends["good"].ok
    assert peer.answer() == [(p.name, b"n")]


def test_b42_a_peer_of_another_kind_is_refused(rank, peer):
    p = rank("p-other", dtype=torch.float32)
    p.worker.execute([AddTransferPeer(peer.name, peer.metadata), Write("k", peer.name, [0], [0], [b"n"])])
    progress = p.worker.take_progress()
    assert "int32" in progress.refused[0].reason and "float32" in progress.refused[0].reason
    assert not progress.finished[0].ok


def test_b24_another_life_under_a_known_name_is_refused(rank, peer):
    p, other = rank("p-lives"), rank(peer.name)
    connect(p, peer)
    p.worker.execute([AddTransferPeer(peer.name, peer.metadata),
                      AddTransferPeer(peer.name, other.transport.metadata())])
    assert "new incarnation" in p.worker.take_progress().refused[0].reason
    peer.tell("poll", 1, 60.0)
    send(p, peer, "k", [0], [0])
    assert finish(p, ["k"])["k"].ok and peer.answer() == [(p.name, b"n")]


def test_b23_a_peer_that_dies_costs_its_own_writes_only(rank, kind, peer):
    p = rank("p-kill", progress_thread=False)
    connect(p, peer)
    with receiver("d-kill", transport=kind) as doomed:
        connect(p, doomed)
        for number in range(4):
            send(p, doomed, f"before-{number}", list(range(40)), list(range(40)))
        doomed.kill()
        for number in range(4):
            send(p, doomed, f"after-{number}", [0], [0])
        peer.tell("poll", 1, 60.0)
        send(p, peer, "other", [0], [0])
        ends = finish(p, [f"{when}-{n}" for when in ("before", "after") for n in range(4)] + ["other"])
        assert not any(ends[f"after-{number}"].ok for number in range(4))
        assert ends["other"].ok and peer.answer() == [(p.name, b"n")]
        p.worker.execute([DropTransferPeer("d-kill")])
    assert p.worker.live_handles() == 0


def test_b23_a_peer_that_dies_before_it_ever_answered_ends_the_write(rank, kind):
    p = rank("p-cold")
    with receiver("d-cold", transport=kind) as doomed:
        freeze(doomed.process.pid)
        p.worker.execute([AddTransferPeer(doomed.name, doomed.metadata), Write("k", doomed.name, [0], [0], [b"n"])])
        time.sleep(0.05)
        doomed.kill()
        assert not finish(p, ["k"])["k"].ok


def test_b20_closing_with_an_open_write_ends_in_bounded_time(rank, kind):
    p = rank("p-close")
    with receiver("d-close", transport=kind) as peer:
        freeze(peer.process.pid)
        p.worker.execute([AddTransferPeer(peer.name, peer.metadata), Write("k", peer.name, [0], [0], [b"n"])])
        started_s = time.monotonic()
        p.worker.close()
        assert time.monotonic() - started_s < 30 and p.worker.live_handles() == 0


def test_b20_b24_peers_that_come_and_go_leave_nothing(rank, kind, peer):
    p = rank("p-many")
    connect(p, peer)

    def life(number):
        other = Rank(f"d-many-{number}", layers=1, transport=kind)
        sender = Rank(f"p-many-{number}", layers=1, transport=kind)
        sender.worker.execute([AddTransferPeer(other.name, other.transport.metadata()),
                               Write("k", other.name, [0, 2], [1, 0], [b"n"])])
        ended = []
        while not ended:
            ended = sender.worker.take_progress().finished
            other.worker.take_progress()
        assert ended[0].ok
        sender.worker.execute([DropTransferPeer(other.name)])
        for each in (sender, other):
            each.worker.close()

    life(0)
    life(1)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(2, 22):
        life(number)
    deadline_s = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert p.worker.live_handles() == 0


def test_b33_an_idle_transport_takes_no_cpu(rank, peer):
    p = rank("p-idle")
    connect(p, peer)
    assert least_used_s(1.0) < 0.02, "2 % of a core"
