# SPDX-License-Identifier: Apache-2.0
"""What NIXL alone does, in two real processes: B22, B25, B33. What every transport does: test_transports."""
import os
import signal
import time
from pathlib import Path

import pytest
from nixl_receiver import receiver
from writes import connect, finish, send

from tests.forked import freeze
from vllm_pd.transfer.nixl.transport import MEET_S
from vllm_pd.transfer.requests import AddTransferPeer, CancelTransfer, DropTransferPeer, Write


@pytest.fixture(scope="module")
def peer():
    with receiver("d", blocks=50, start=1 << 28) as process:
        yield process


def test_b33_a_receiver_sleeps_while_its_new_sender_does_nothing(rank):
    """A sender without a thread that stops polling in the middle of a connection has the receiver's thread spin."""
    with receiver("d-new") as peer:
        for number in range(5):
            p = rank(f"p-new-{number}", progress_thread=False)
            p.worker.execute([AddTransferPeer(peer.name, peer.metadata)])
            for _ in range(1 + number):
                p.worker.take_progress()
            while p.worker.busy:  # as an engine that sleeps, and nothing else
                time.sleep(0.02)
                p.worker.take_progress()
        used_s = []
        for _ in range(3):  # a connection may be made for a while yet
            began_s = cpu_s(peer.process.pid)
            time.sleep(1.0)
            used_s.append(cpu_s(peer.process.pid) - began_s)
        assert min(used_s) < 0.3, used_s


def test_b33_a_sender_makes_a_new_connection_in_one_poll(rank, peer):
    """Its next poll may be a whole model step away."""
    for progress_thread in (False, True):
        p = rank(f"p-meets-{progress_thread}", progress_thread=progress_thread)
        p.worker.execute([AddTransferPeer(peer.name, peer.metadata)])
        lasted_s = []
        for _ in range(20):
            began_s = time.monotonic()
            p.worker.take_progress()
            lasted_s.append(time.monotonic() - began_s)
        assert progress_thread or lasted_s[0] >= MEET_S
        assert min(lasted_s[1:]) < MEET_S


def test_b34_a_notice_without_data_is_polled_for(rank, peer):
    """Without a thread NIXL sends it when the connection stands, which may come later, and only while it is polled."""
    p = rank("p-tells", progress_thread=False)
    p.worker.execute([AddTransferPeer(peer.name, peer.metadata)])
    for blocks in ([], [1], []):
        while p.worker.busy:
            p.worker.take_progress()
            time.sleep(0.001)
        send(p, peer, "k", blocks, blocks)
        assert finish(p, ["k"])["k"].ok and p.worker.settling == (not blocks)


def cpu_s(pid):
    """CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("request_", [CancelTransfer("k"), DropTransferPeer("d-stopped")], ids=["cancel", "drop"])
def test_b22_b25_a_write_given_up_is_not_reported_ended_while_it_may_land(rank, monkeypatch, request_):
    """The peer stands still, so a write over TCP can't end. Once it goes on, it does."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    p = rank("p-stopped", progress_thread=isinstance(request_, DropTransferPeer))
    with receiver("d-stopped", environ={"UCX_TLS": "tcp"}) as peer:
        connect(p, peer)
        freeze(peer.process.pid)
        p.worker.execute([Write("k", peer.name, [0], [0], [b"n"]), request_])
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:
            assert p.worker.take_progress().finished == []
        assert p.worker.live_handles() == 1
        os.kill(peer.process.pid, signal.SIGCONT)
        peer.tell("poll", 1, 60.0)
        end = finish(p, ["k"])["k"]
        assert not end.ok and end.error in ("cancelled", "peer dropped") and p.worker.live_handles() == 0
        assert peer.answer() == [(p.name, b"n")], "it did land: whoever gave it up must not believe otherwise"


def test_b22_of_a_write_given_up_before_the_connection_is_made_nothing_lands(rank):
    """The peer stands still meanwhile. Once it goes on, it is seen who it is, and that is all."""
    p = rank("p-early", start=7)
    with receiver("d-early") as peer:
        before = peer.ask("memory")
        freeze(peer.process.pid)
        p.worker.execute([AddTransferPeer(peer.name, peer.metadata), Write("k", peer.name, [0], [0], [b"n"]),
                          CancelTransfer("k")])
        deadline_s = time.monotonic() + 0.5
        while time.monotonic() < deadline_s:
            assert p.worker.take_progress().finished == []
        os.kill(peer.process.pid, signal.SIGCONT)
        end = finish(p, ["k"])["k"]
        assert (end.ok, end.error, end.may_land) == (False, "cancelled", False) and p.worker.live_handles() == 0
        assert peer.ask("poll", 1, 0.2) == [] and (peer.ask("memory") == before).all()


@pytest.mark.parametrize("connected", [False, True], ids=["new", "connected"])
def test_b27_a_write_whose_peer_is_killed_in_the_middle_says_that_it_may_land(rank, monkeypatch, connected):
    """Of what was under way the library knows nothing any more. Then nothing more is posted to this peer."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    p = rank("p-middle", progress_thread=False)
    with receiver("d-middle", environ={"UCX_TLS": "tcp"}) as peer:
        if connected:
            connect(p, peer)
        else:
            p.worker.execute([AddTransferPeer(peer.name, peer.metadata)])
        freeze(peer.process.pid)
        send(p, peer, "k", list(range(40)), list(range(40)))
        deadline_s = time.monotonic() + 0.2
        while time.monotonic() < deadline_s:
            assert p.worker.take_progress().finished == [], "it is not in the middle"
        peer.kill()
        end = finish(p, ["k"])["k"]
        assert not end.ok and end.may_land and p.worker.live_handles() == 0
        send(p, peer, "again", [0], [0])
        again = finish(p, ["again"])["again"]
        assert not again.ok and not again.may_land and "new transfer agents" in again.error
