# SPDX-License-Identifier: Apache-2.0
"""V1's ranks: processes of their own, which get requests over a socket and carry them out without an engine step.

B3, B5, B44, B101 (bytes), B20, B21, B22 (deaths and stops), B81, B95 (noise). This process is EngineCore of both
engines.
"""
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from remote_rank import (
    BLOCKS,
    GAP,
    LAYERS,
    NO_INDEX,
    WAIT_S,
    Heads,
    RemoteEngine,
    RemoteRank,
    expected,
    expected_index,
)

from tests.verdict import same_bytes
from vllm_pd.errors import ControlError
from vllm_pd.transfer.plan import head_range
from vllm_pd.transfer.ranks.packets import LAST, MORE, PACKET_BYTES
from vllm_pd.transfer.ranks.process import AttachRank, RankReady, connect_ranks
from vllm_pd.transfer.ranks.split import layer_range
from vllm_pd.transfer.requests import CancelTransfer, DropTransferPeer, Read, Write

OURS, THEIRS = [3, 4, 9, 0], [7, 8, 2, 11]


@pytest.fixture
def pair(engine) -> tuple[RemoteEngine, RemoteEngine]:
    """P and D of one rank each; P knows D."""
    p, d = engine(1, True), engine(1, False)
    p.meet(d)
    return p, d


def write(key: str = "k", peer: RemoteEngine | None = None, ranks: int = 1, **more) -> Write:
    return Write(key, peer.name, OURS, THEIRS, [b"from %d" % rank for rank in range(ranks)], **more)


def check(d: RemoteEngine, tp: int, blocks: int = BLOCKS, ours: list[int] = OURS,
          theirs: list[int] = THEIRS, of: Heads = Heads()) -> None:  # noqa: B008
    """D's blocks have what P's had, and no other block was written."""
    untouched = [block for block in range(blocks) if block not in theirs]
    for number, rank in enumerate(d.processes):
        held = rank.memory()
        heads = head_range(number % tp, tp, of.count)
        layers = layer_range(number // tp, len(d.processes) // tp, LAYERS)
        same_bytes(torch.equal(held[:, theirs], expected(heads, blocks, of, layers)[:, ours]))
        assert (held[:, untouched] == of.untouched).all()


@pytest.mark.parametrize("p_ranks,d_ranks,p_order,d_order", [
    (1, 1, "LBHNC", "LBHNC"), (2, 2, "LBHNC", "LBHNC"), (1, 2, "LBHNC", "BLHNC"), (2, 1, "LBHNC", "BHLNC"),
    (1, 2, "LBNHC", "LBNHC"), (2, 1, "LBNHC", "BLNHC"), (2, 4, "BLNHC", "LBNHC")])
def test_b44_b101_real_bytes_land_where_they_belong(engine, p_ranks, d_ranks, p_order, d_order):
    """B3: between caches of one order and of another. The notices reach D's EngineCore, which does not step."""
    p, d = engine(p_ranks, True, p_order), engine(d_ranks, False, d_order)
    p.meet(d)
    p.transfer.execute([write(peer=d, ranks=p_ranks)])
    (end,) = p.until(lambda progress: progress.finished).finished
    assert end.ok and p.ends == ["k"] and p.transfer.live_handles() == 0
    assert end.bytes == len(OURS) * expected(range(4))[:, 0].numel() * 4
    notices = d.until(lambda progress: len(progress.notices) == p_ranks, look=True).notices
    assert sorted(notice.payload for notice in notices) == [b"from %d" % rank for rank in range(p_ranks)]
    check(d, d_ranks)


def test_b94_one_word_makes_a_rank_look_until_the_notice_is_there(engine):
    p, d = engine(1, True), engine(1, False)
    p.meet(d)
    d.transfer.watch(0.001, WAIT_S)
    p.transfer.execute([write(peer=d, ranks=1)])
    (notice,) = d.until(lambda progress: progress.notices).notices
    assert notice.payload == b"from 0"


@pytest.mark.parametrize("of", [Heads(1, 576, torch.int16), Heads(1, 576, torch.uint8)], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("p_ranks,d_ranks,p_order,d_order", [
    (1, 1, "LBNHC", "BLNHC"), (1, 2, "LBNHC", "LBNHC"), (2, 1, "LBNHC", "LBNHC"), (2, 4, "BLNHC", "LBNHC")])
def test_b101_mla_has_one_head_that_every_rank_holds(engine, p_ranks, d_ranks, p_order, d_order, of):
    """Each rank of D gets it once, however many of P hold it."""
    p, d = engine(p_ranks, True, p_order, of=of), engine(d_ranks, False, d_order, of=of)
    p.meet(d)
    p.transfer.execute([write(peer=d, ranks=p_ranks)])
    (end,) = p.until(lambda progress: progress.finished).finished
    assert end.ok and end.bytes == d_ranks * expected(range(1), len(OURS), of).nbytes
    d.until(lambda progress: len(progress.notices) == p_ranks, look=True)
    check(d, d_ranks, of=of)


SPARSE = Heads(1, 656, torch.uint8, index=132)


def check_index(d: RemoteEngine, tp: int, ours: list[int], theirs: list[int]) -> None:
    """D has what P had beside the KV of its blocks, and nothing else was written."""
    untouched = [block for block in range(BLOCKS) if block not in theirs]
    for number, rank in enumerate(d.processes):
        has, layers = rank.index(), layer_range(number // tp, len(d.processes) // tp, LAYERS)
        same_bytes(torch.equal(has[:, theirs, :-GAP], expected_index(SPARSE, layers)[:, ours]))
        assert len(has) == len([layer for layer in layers if layer != NO_INDEX])
        same_bytes(not has[:, untouched].any() and not has[..., -GAP:].any())


@pytest.mark.parametrize("p,d,p_order,d_order", [
    ((1, 1), (1, 1), "LBNHC", "BLNHC"), ((1, 1), (2, 1), "LBNHC", "LBNHC"), ((2, 1), (1, 1), "LBNHC", "LBNHC"),
    ((2, 1), (2, 1), "BLNHC", "LBNHC"), ((1, 2), (1, 1), "LBNHC", "LBNHC"), ((1, 1), (2, 2), "LBNHC", "LBNHC")])
def test_b101_an_index_goes_with_the_kv_of_its_layers(engine, p, d, p_order, d_order):
    """B3, B44: between ranks and stages, (ranks of a stage, stages). Each rank of D gets it once."""
    p_engine, d_engine = (engine(tp, filled, order, stages=stages, of=SPARSE) for (tp, stages), filled, order in (
        (p, True, p_order), (d, False, d_order)))
    p_engine.meet(d_engine)
    ranks = p[0] * p[1]
    p_engine.transfer.execute([write(peer=d_engine, ranks=ranks)])
    (end,) = p_engine.until(lambda progress: progress.finished).finished
    assert end.ok and end.bytes == d[0] * len(OURS) * 8 * (LAYERS * 656 + (LAYERS - 1) * 132)
    d_engine.until(lambda progress: len(progress.notices) == ranks, look=True)
    check(d_engine, d[0], of=SPARSE)
    check_index(d_engine, d[0], OURS, THEIRS)


@pytest.mark.parametrize("reads, holds", [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (1, 1))])
def test_b5_b102_a_read_brings_the_index(engine, reads, holds):
    p = engine(reads[0], False, "LBNHC", stages=reads[1], of=SPARSE)
    d = engine(holds[0], True, "LBNHC", receives=True, stages=holds[1], of=SPARSE)
    p.meet(d)
    p.transfer.execute([Read("r", d.name, THEIRS, OURS)])
    assert p.until(lambda progress: progress.finished).finished[0].ok
    check(p, reads[0], of=SPARSE)
    check_index(p, reads[0], OURS, THEIRS)


@pytest.mark.parametrize("other", [Heads(1, 656, torch.uint8), Heads(1, 656, torch.uint8, index=136)], ids=str)
def test_b42_b101_engines_with_another_index_do_not_meet(engine, other):
    p, d = engine(1, True, "LBNHC", of=SPARSE), engine(1, False, "LBNHC", of=other)
    for one, two, said in ((p, d, "2 x 1056 bytes"), (d, p, "2 x 1088 bytes" if other.index else "''")):
        one.meet(two)
        (refused,) = one.until(lambda progress: progress.refused).refused
        assert "beside the KV of a block differs: ours is " in str(refused) and said in str(refused)
    assert not d.processes[0].index().any()


@pytest.mark.parametrize("p_ranks,d_ranks,order", [(1, 2, "LBHNC"), (2, 1, "LBNHC"), (2, 2, "BLHNC")])
def test_b101_elements_of_8_bits_land_where_they_belong(engine, p_ranks, d_ranks, order):
    """What an fp8 cache is for a transfer."""
    of = Heads(dtype=torch.uint8)
    p, d = engine(p_ranks, True, order, of=of), engine(d_ranks, False, order, of=of)
    p.meet(d)
    p.transfer.execute([write(peer=d, ranks=p_ranks)])
    (end,) = p.until(lambda progress: progress.finished).finished
    assert end.ok and end.bytes == expected(range(4), len(OURS), of).nbytes
    d.until(lambda progress: len(progress.notices) == p_ranks, look=True)
    check(d, d_ranks, of=of)


@pytest.mark.parametrize("p_tp,p_stages,d_tp,d_stages,p_order,d_order", [
    (1, 2, 1, 1, "LBHNC", "LBHNC"), (1, 1, 1, 2, "LBHNC", "BLHNC"), (1, 2, 1, 3, "BLHNC", "BHLNC"),
    (2, 2, 1, 1, "LBHNC", "LBHNC"), (1, 2, 2, 1, "LBNHC", "BLNHC"), (1, 3, 2, 2, "LHBNC", "LBHNC")])
def test_b101_real_bytes_of_every_stage_land_where_they_belong(engine, p_tp, p_stages, d_tp, d_stages, p_order,
                                                               d_order):
    """B28: every rank of every stage gives notice, also one that shares no layer with D's rank 0."""
    p, d = engine(p_tp, True, p_order, stages=p_stages), engine(d_tp, False, d_order, stages=d_stages)
    ranks = p_tp * p_stages
    p.meet(d)
    p.transfer.execute([write(peer=d, ranks=ranks)])
    (end,) = p.until(lambda progress: progress.finished).finished
    assert end.ok and end.bytes == len(OURS) * expected(range(4))[:, 0].numel() * 4
    notices = d.until(lambda progress: len(progress.notices) == ranks, look=True).notices
    assert sorted(notice.payload for notice in notices) == [b"from %d" % rank for rank in range(ranks)]
    check(d, d_tp)


def test_b5_b101_a_read_brings_the_blocks_of_all_stages(engine):
    p, d = engine(1, False, stages=3), engine(2, True, receives=True, stages=2)
    p.meet(d)
    p.transfer.execute([Read("r", d.name, THEIRS, OURS)])
    assert p.until(lambda progress: progress.finished).finished[0].ok
    check(p, 1)


def test_b5_a_read_brings_the_peers_blocks(engine):
    p, d = engine(2, False), engine(1, True, receives=True)
    p.meet(d)
    p.transfer.execute([Read("r", d.name, THEIRS, OURS)])
    assert p.until(lambda progress: progress.finished).finished[0].ok
    check(p, 2)


@pytest.mark.parametrize("reads, holds", [(2, 1), (4, 2), (2, 2)])
def test_b102_replicated_heads_are_read_by_each_rank(engine, reads, holds):
    """MLA: every rank of the reader gets the one head, from one rank of the other engine."""
    of = Heads(1, 576, torch.int16)
    p, d = engine(reads, False, "LBNHC", of=of), engine(holds, True, "LBNHC", receives=True, of=of)
    p.meet(d)
    p.transfer.execute([Read("r", d.name, THEIRS, OURS)])
    (end,) = p.until(lambda progress: progress.finished).finished
    assert end.ok and end.bytes == reads * expected(range(1), len(OURS), of).nbytes
    check(p, reads, of=of)


def test_requests_and_answers_of_any_size_pass(engine):
    """4,000 blocks are more than one packet in each direction has room for."""
    blocks = 4_100
    p, d = engine(1, True, blocks=blocks), engine(1, False, blocks=blocks)
    p.meet(d)
    ours, theirs = list(range(blocks - 1, 99, -1)), list(range(blocks - 100))
    big = Write("k", d.name, ours, theirs, [b"n"])
    assert len(msgspec.msgpack.encode([big])) > PACKET_BYTES / 2
    p.transfer.execute([big])
    assert p.until(lambda progress: progress.finished).finished[0].ok
    check(d, 1, blocks, ours, theirs)


def test_b95_each_request_ends_once_and_what_cannot_be_done_is_said(pair):
    """Unknown peer, metadata that is none, blocks out of range, a key twice, a cancel of nothing, a drop of nobody."""
    p, d = pair
    p.transfer.execute([Write("a", "nobody", [1], [1], [b"n"]), CancelTransfer("none"), DropTransferPeer("nobody"),
                        Write("b", d.name, [BLOCKS], [1], [b"n"]), write("c", d), Read("e", d.name, [1, 1], [2, 3])])
    progress = p.until(lambda progress: len(progress.finished) == 4)
    assert {end.key: end.ok for end in progress.finished} == {"a": False, "b": False, "c": True, "e": False}
    assert sorted(p.ends) == ["a", "b", "c", "e"] and p.transfer.live_handles() == 0
    p.transfer.execute([DropTransferPeer(d.name), write("f", d)])
    assert not p.until(lambda progress: len(progress.finished) == 5).finished[-1].ok


def test_a_peer_that_does_not_fit_is_refused_by_every_rank(engine):
    p, d = engine(2, True), engine(1, False, order="LBNHC")
    p.meet(d)
    refused = p.until(lambda progress: len(progress.refused) == 2).refused
    assert all(refusal.peer == d.name and "layout" in refusal.reason for refusal in refused)


def test_a_write_waits_on_each_rank_for_the_step_that_computes_it(engine):
    p, d = engine(2, True), engine(1, False)
    p.meet(d)
    p.transfer.execute([write(peer=d, ranks=2, after_step=2)])
    for step, number in ((1, 0), (2, 0), (1, 1)):  # rank 1 has not launched step 2 yet
        p.processes[number].ask("step", step)
    d.until(lambda progress: progress.notices, look=True)
    time.sleep(0.1)
    assert [notice.payload for notice in d.progress.notices] == [b"from 0"]
    assert not p.transfer.take_progress().finished and p.transfer.live_handles() == 1
    p.processes[1].ask("step", 2)
    assert p.until(lambda progress: progress.finished).finished[0].ok
    d.until(lambda progress: len(progress.notices) == 2, look=True)
    check(d, 1)


def test_b22_a_stopped_rank_delays_its_engine_in_nothing(pair):
    """No call waits for it; what was asked for meanwhile is done when it goes on."""
    p, d = pair
    os.kill(p.processes[0].pid, signal.SIGSTOP)
    p.transfer.execute([write(f"k{number}", d) for number in range(300)])
    for _ in range(1000):
        p.transfer.poll()
    assert p.transfer.live_handles() <= 300 and not p.transfer.take_progress().finished
    os.kill(p.processes[0].pid, signal.SIGCONT)
    ends = p.until(lambda progress: len(progress.finished) == 300).finished
    assert all(end.ok for end in ends) and {end.key for end in ends} == {f"k{number}" for number in range(300)}


def test_b21_a_killed_rank_is_noticed_and_ends_nothing_else(engine, caplog):
    """Of P: its writes never end, for bytes may have been under way; the other rank goes on."""
    p, d = engine(2, True), engine(1, False)
    p.meet(d)
    p.processes[1].kill()
    p.transfer.execute([write(peer=d, ranks=2)])
    d.until(lambda progress: progress.notices, look=True)
    deadline_s = time.monotonic() + WAIT_S
    while "rank 1 is gone" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert p.transfer.live_handles() == 1 and not p.transfer.take_progress().finished
    assert not p.transfer.close()
    assert p.processes[0].process.is_alive()


def test_b23_a_write_to_a_killed_rank_of_d_ends_as_failed(engine):
    p, d = engine(1, True), engine(2, False)
    p.meet(d)
    p.transfer.execute([write("a", d)])
    assert p.until(lambda progress: progress.finished).finished[0].ok
    d.processes[1].kill()
    p.transfer.execute([write("b", d)])
    assert not p.until(lambda progress: len(progress.finished) == 2).finished[1].ok


def test_b21_a_rank_ends_with_its_engine(engine):
    """At once, whatever its main thread does: a peer waits for the end of all processes."""
    p = engine(2, True)
    for connection in p.connections.values():  # a close would wait for the thread that polls it; the kernel's does not
        connection._connection.shutdown(socket.SHUT_RDWR)
    for rank in p.processes:
        rank.process.join(60)
        assert rank.process.exitcode == 1


def test_b20_every_rank_holds_the_lifeline_until_it_can_write_no_more(engine):
    p = engine(2, True)
    with socket.create_server(("127.0.0.1", 0)) as lifeline:
        p.transfer.hold(lifeline.fileno())
        address = lifeline.getsockname()
        deadline_s = time.monotonic() + WAIT_S
        held = f"socket:[{os.fstat(lifeline.fileno()).st_ino}]"
        while not all(held in descriptors(rank.pid) for rank in p.processes):
            assert time.monotonic() < deadline_s
    socket.create_connection(address, 60).close()
    p.processes[0].kill()
    socket.create_connection(address, 60).close()  # rank 1 can still write
    p.transfer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 60)
    assert p.processes[1].process.is_alive()


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def test_b20_a_rank_that_ends_first_is_no_error(engine, caplog):
    """So it is when an executor ends its workers before the engine closes."""
    p = engine(1, True)
    before = len(descriptors(os.getpid()))
    p.processes[0].ask("close")
    p.processes[0].ask("close")
    deadline_s = time.monotonic() + WAIT_S
    while p.transfer._gathered.filenos():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert "gone" not in caplog.text
    assert not p.transfer.close() and not p.transfer.close()
    assert len(descriptors(os.getpid())) < before


def test_b81_noise_of_the_engine_is_counted_and_dropped(pair):
    """B95: unknown kinds, no msgpack, a list of something else, an endless message. The next request is carried out."""
    p, d = pair
    p.transfer.execute([CancelTransfer("none"), Write("first", "nobody", [], [], [b""])])
    p.until(lambda progress: progress.finished)  # the thread has sent all that it had
    wire = p.connections[0]._connection
    frames = [b"?", b"noise", bytes(range(128, 256)), LAST + b"\xc1", LAST + b"\x01", LAST + os.urandom(1000) + b"\xc1",
              LAST + msgspec.msgpack.encode([{"type": "Write"}]), LAST + msgspec.msgpack.encode([["Write"]])]
    for frame in frames:
        send_all(wire, frame)
    for _ in range(2 + (32 << 20) // PACKET_BYTES):
        send_all(wire, MORE + bytes(PACKET_BYTES))
    send_all(wire, LAST + bytes(PACKET_BYTES + 100))  # longer than a packet may be
    send_all(wire, LAST)
    p.transfer.execute([write(peer=d)])
    assert p.until(lambda progress: len(progress.finished) == 2).finished[1].ok
    assert p.processes[0].ask("dropped") >= len(frames) + 2
    check(d, 1)


def send_all(wire: socket.socket, packet: bytes) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            wire.send(packet)
            return
        except BlockingIOError:
            time.sleep(0.001)


STRANGER = """
import socket, sys
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stranger.connect(bytes.fromhex(sys.argv[1]))
try:
    stranger.send(b"noise")
    assert stranger.recv(100) == b""
except (BrokenPipeError, ConnectionResetError):
    pass
"""


def test_b81_another_process_is_turned_away():
    """The kernel says who connects; the engine is accepted after it."""
    rank = RemoteRank(0, 1, True, "LBHNC", BLOCKS)
    try:
        subprocess.run([sys.executable, "-c", STRANGER, rank.address.hex()], check=True, timeout=WAIT_S)
        connections, _ = connect_ranks({0: (rank.pid, rank.address)}, AttachRank("p", True))
        connections[0].close()
    finally:
        rank.kill()


def test_b80_a_rank_that_cannot_be_attached_is_named():
    rank = RemoteRank(0, 1, True, "LBHNC", BLOCKS)
    try:
        with pytest.raises(ControlError, match=f"rank 0 is process 1, but {rank.pid}"):
            connect_ranks({0: (1, rank.address)}, AttachRank("p", True))
        with pytest.raises(ControlError, match="rank 0"):  # it was there for one engine
            connect_ranks({0: (rank.pid, rank.address)}, AttachRank("p", True))
        rank.kill()
        with pytest.raises(ControlError, match=f"rank 0, process {rank.pid}"):
            connect_ranks({0: (rank.pid, rank.address)}, AttachRank("p", True))
    finally:
        rank.kill()


def test_b80_a_rank_that_does_not_answer_or_cannot_is_named(monkeypatch):
    from vllm_pd.transfer.ranks.gather import RankListener
    listener = RankListener()
    try:
        with pytest.raises(ControlError, match="rank 0: no answer in time"):
            connect_ranks({0: (os.getpid(), listener.address)}, AttachRank("p", True), timeout_s=0.2)
    finally:
        listener.close()


def test_b80_why_a_rank_has_no_transport_is_said():
    """In this process: V1 has it so with one rank on a GPU. The end of the connection then ends no process."""
    from vllm_pd.errors import TransferError
    from vllm_pd.transfer.ranks.process import RankServer

    def make(order: AttachRank):
        raise TransferError(f"no memory for {order.incarnation}")

    server = RankServer(make, {os.getpid()})
    with pytest.raises(ControlError, match="rank 0 can't make its transport: no memory for p"):
        connect_ranks({0: (os.getpid(), server.address)}, AttachRank("p", True))
    server.close()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(RankReady(b"m")), type=RankReady) == RankReady(b"m")


def test_b20_a_rank_that_nobody_attached_to_is_closed():
    from vllm_pd.transfer.ranks.process import RankServer
    server = RankServer(lambda order: None, {os.getpid()})
    server.close()
    with pytest.raises(ControlError, match="rank 0"):
        connect_ranks({0: (os.getpid(), server.address)}, AttachRank("p", True))
    server.close()
