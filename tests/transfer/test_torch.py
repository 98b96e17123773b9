# SPDX-License-Identifier: Apache-2.0
"""What the torch transport does beyond the contract: grants (B22, B25), deadlines (B21, B23), restarts (B24), and
senders that are not to be trusted. Real processes, and sockets of the loopback."""
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
import torch
from nixl_receiver import receiver
from writes import connect, finish

from tests.forked import freeze
from tests.verdict import same_bytes
from tests.waiting import wait_for
from vllm_pd.errors import ConfigError, TransferError
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import is_free
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice, TransportKind
from vllm_pd.transfer.layout import Memory
from vllm_pd.transfer.plan import Run
from vllm_pd.transfer.requests import AddTransferPeer, CancelTransfer, CloseGrant, DropTransferPeer, OpenGrant, Write
from vllm_pd.transfer.torch.blocks import _PIECE_WORDS, BlockCopier
from vllm_pd.transfer.torch.link import (
    DEFAULT_LIMITS,
    JOIN_BYTES,
    MAX_UNPROVED_BYTES,
    ControlConnection,
    Join,
    Joined,
    prove,
)
from vllm_pd.transfer.torch.receiver import MAX_CONNECTIONS, Grants
from vllm_pd.transfer.torch.sender import TorchAddress
from vllm_pd.transfer.torch.transport import TorchTransport
from vllm_pd.transfer.transport import PeerMetadata, kv_addresses

STALL_S = 3.0  # in the tests of stopped processes; a busy machine stops a process for 1 s
MANY = list(range(1000))  # 100 MB: several stages of each buffer


@pytest.fixture
def rank(rank):
    return partial(rank, transport="torch")


def torch_receiver(name, **options):
    return receiver(name, transport="torch", **options)


def send(rank, peer, key, ids, grant="", notice=b"n"):
    rank.worker.execute([Write(key, peer.name, ids, ids, [notice], grant=grant)])
    return finish(rank, [key])[key]


def test_b22_only_blocks_of_an_open_grant_are_written(rank):
    p = rank("p-grants", start=5)
    with torch_receiver("d-grants", granted=False) as d:
        before = torch.from_numpy(d.ask("memory"))
        p.worker.execute([AddTransferPeer(d.name, d.metadata)])
        d.ask("open", "one", [1, 2, 3])
        d.ask("open", "two", [4])
        refused = {"unknown": [1], "": [1], "one": [1, 4], "two": [1]}
        for grant, ids in refused.items():
            end = send(p, d, "k", ids, grant)
            assert not end.ok and f"grant {grant!r}" in end.error
        assert d.ask("poll", 1, 0.1) == []
        same_bytes(torch.equal(torch.from_numpy(d.ask("memory")), before))
        assert send(p, d, "k", [1, 3], "one").ok
        assert d.ask("close", "one") is True
        assert "closed" in send(p, d, "k", [1, 3], "one").error
        d.ask("open", "one", [1])
        assert not send(p, d, "k", [1], "one").ok, "a grant that was closed stays closed"
        assert send(p, d, "k", [4], "two").ok
        before[:, :, [1, 3, 4]] = p.blocks([1, 3, 4])
        same_bytes(torch.equal(torch.from_numpy(d.ask("memory")), before))


@pytest.mark.skipif(not is_free("::1", 0), reason="no IPv6 here")
def test_a_write_over_ipv6(rank):
    p, d = rank("p-six", host="::1"), rank("d-six", start=5, host="::1")
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    assert send(p, d, "k", [1, 3]).ok
    same_bytes(torch.equal(p.blocks([1, 3]), d.blocks([1, 3])))


def test_b41_a_write_waits_for_a_grant_that_comes_later(rank):
    p, d = rank("p-early"), rank("d-early", granted=False)
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata()), Write("k", d.name, [1], [1], [b"n"], grant="g")])
    time.sleep(0.05)
    d.worker.execute([OpenGrant("g", [1])])
    assert finish(p, ["k"])["k"].ok
    same_bytes(torch.equal(p.blocks([1]), d.blocks([1])))


def test_b22_b25_nothing_lands_after_the_grant_was_closed(rank):
    """In the middle of a write, again and again. The same connection carries the next write."""
    d = rank("d-closes", blocks=len(MANY), layers=2)
    with torch_receiver("p-closes", blocks=len(MANY), layers=2, start=1 << 28) as p:
        for number in range(8):
            for layer in d.memory:
                layer.zero_()
            grant = f"grant {number}"
            d.worker.execute([OpenGrant(grant, MANY)])
            p.tell("write", d.name, d.transport.metadata(), MANY, grant)
            p.answer()
            wait_for(lambda: p.pipe.poll() or int(d.memory[0][0, 0, 0]))
            assert not p.pipe.poll(), p.answer()
            time.sleep(0.003 * number)
            d.worker.execute([CloseGrant(grant)])
            now = d.blocks(MANY)
            end, = d.worker.take_progress().finished
            assert end.key == grant and end.ok
            time.sleep(0.05)
            same_bytes(torch.equal(d.blocks(MANY), now))
            p.answer()
        d.worker.execute([OpenGrant("last", MANY)])
        p.tell("write", d.name, d.transport.metadata(), MANY, "last")
        p.answer()
        wait_for(lambda: d.worker.take_progress().notices)
        p.ask("stop")
        same_bytes(torch.equal(d.blocks(MANY), torch.from_numpy(p.ask("memory"))))
        assert d.transport.debug_state()["connections"] == 1


def test_b21_a_sender_killed_in_the_middle_leaves_its_grant_to_be_closed(rank):
    d, other = rank("d-orphan", blocks=len(MANY)), rank("p-other")
    with torch_receiver("p-killed", blocks=len(MANY), start=1 << 28) as p:
        d.worker.execute([OpenGrant("g", MANY), OpenGrant("other", [5])])
        other.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
        p.tell("write", d.name, d.transport.metadata(), MANY, "g")
        p.answer()
        wait_for(lambda: int(d.memory[0][0, 0, 0]) == 1 << 28)
        p.kill()
        wait_for(lambda: d.transport.debug_state()["connections"] == 1)
        d.worker.execute([CloseGrant("g")])
        assert send(other, d, "k", [5], "other").ok
    assert [end.key for end in d.worker.take_progress().finished] == ["g"]


def test_b22_a_receiver_stopped_past_the_deadline_costs_one_connection(rank):
    p = rank("p-waits", blocks=len(MANY), stall_s=STALL_S)
    with torch_receiver("d-stops", blocks=len(MANY), start=1 << 28, stall_s=STALL_S) as d:
        connect(p, d)
        for number in range(3):
            p.worker.execute([Write("k", d.name, MANY, MANY, [b"late"])])
            time.sleep(0.01 * number)  # before it, at its beginning, in its middle
            freeze(d.process.pid)
            began_s = time.monotonic()
            end = finish(p, ["k"])["k"]
            assert end.ok or time.monotonic() - began_s < 10
            os.kill(d.process.pid, signal.SIGCONT)
            assert send(p, d, "next", MANY, notice=b"next").ok
            assert (p.name, b"next") in d.ask("poll", 2, 0.3)
        same_bytes(torch.equal(torch.from_numpy(d.ask("memory")), torch.stack(p.memory)))


def test_b22_a_sender_stopped_past_the_deadline_writes_nothing_later(rank):
    d = rank("d-moves-on", blocks=len(MANY), stall_s=STALL_S)
    with torch_receiver("p-sleeps", blocks=len(MANY), start=1 << 28) as p:
        d.worker.execute([OpenGrant("g", MANY)])
        p.tell("write", d.name, d.transport.metadata(), MANY, "g")
        p.answer()
        wait_for(lambda: int(d.memory[0][0, 0, 0]) == 1 << 28)
        freeze(p.process.pid)
        d.worker.execute([CloseGrant("g")])
        assert d.worker.take_progress().finished[0].ok, "it needs no answer of the sender"
        for layer in d.memory:
            layer.zero_()
        time.sleep(2 * STALL_S)
        os.kill(p.process.pid, signal.SIGCONT)
        p.answer()
        assert not any(layer.any() for layer in d.memory)
        d.worker.execute([OpenGrant("h", MANY)])
        p.tell("write", d.name, d.transport.metadata(), MANY, "h")
        p.answer()
        wait_for(lambda: d.worker.take_progress().notices)
        p.ask("stop")


def test_b24_a_restart_under_the_same_name_is_another_peer(rank):
    p = rank("p-stays")
    with torch_receiver("d-again") as first:
        connect(p, first)
        old = first.metadata
        first.kill()
    with torch_receiver("d-again", start=1 << 28) as second:
        assert not send(p, second, "old", [0]).ok
        p.worker.execute([DropTransferPeer("d-again"), AddTransferPeer("d-again", second.metadata)])
        assert send(p, second, "new", [0]).ok
        moved = msgspec.structs.replace(address_of(old), port=address_of(second.metadata).port)
        p.worker.execute([DropTransferPeer("d-again"), AddTransferPeer("d-again", with_address(second, moved))])
        assert not send(p, second, "old token", [1]).ok
        memory = torch.from_numpy(second.ask("memory"))
        same_bytes(torch.equal(memory[:, :, [0]], p.blocks([0])))
        assert int(memory[0, 0, 1, 0]) >= 1 << 28


def address_of(metadata):
    return msgspec.msgpack.decode(PeerMetadata.decode_any(metadata).agent, type=TorchAddress)


def with_address(peer, address):
    metadata = PeerMetadata.decode_any(peer.metadata)
    return msgspec.structs.replace(metadata, agent=msgspec.msgpack.encode(address)).encode()


def test_b25_two_attempts_at_once_and_one_of_them_is_aborted(rank):
    first, second, d = rank("p-1", blocks=200), rank("p-2", blocks=200, start=1 << 20), rank("d-two", blocks=200)
    one, two = list(range(100)), list(range(100, 200))
    d.worker.execute([OpenGrant("one", one), OpenGrant("two", two)])
    for p in (first, second):
        p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    first.worker.execute([Write("k", d.name, one, one, [b"1"], grant="one")])
    second.worker.execute([Write("k", d.name, two, two, [b"2"], grant="two")])
    d.worker.execute([CloseGrant("one")])
    before = d.blocks(one)
    assert finish(second, ["k"])["k"].ok
    end = finish(first, ["k"])["k"]
    assert not end.ok and "one" in end.error
    same_bytes(torch.equal(d.blocks(one), before))
    same_bytes(torch.equal(d.blocks(two), second.blocks(two)))
    assert [notice.payload for notice in d.worker.take_progress().notices] == [b"2"]


@pytest.mark.parametrize("request_", [CancelTransfer("k2"), DropTransferPeer("d-held")], ids=["cancel", "drop"])
def test_b25_a_write_that_has_not_begun_ends_without_being_sent(rank, request_):
    p = rank("p-queue")
    with torch_receiver("d-held") as d:
        connect(p, d)
        freeze(d.process.pid)
        p.worker.execute([Write("k1", d.name, [0], [0], [b"1"]), Write("k2", d.name, [1], [1], [b"2"]), request_])
        os.kill(d.process.pid, signal.SIGCONT)
        ends = finish(p, ["k1", "k2"])
        assert not ends["k2"].ok and ends["k2"].error in ("cancelled", "peer dropped")
        assert (p.name, b"2") not in d.ask("poll", 2, 0.3)


def test_b23_a_connection_that_ended_between_two_writes_costs_none(rank):
    p, d = rank("p-idle-end"), rank("d-idle-end")
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    for number in range(3):
        assert send(p, d, "k", [number]).ok
        d.transport._receiver.abort_connections()
        wait_for(lambda: d.transport.debug_state()["connections"] == 0)
    same_bytes(torch.equal(p.blocks([0, 1, 2]), d.blocks([0, 1, 2])))


def test_b29_junk_at_the_socket_harms_nobody(rank):
    p, d = rank("p-good"), rank("d-junk")
    address = address_of(d.transport.metadata())
    assert kv_addresses(d.transport.metadata()) == [url_of(address.host, address.port)], "where all may try it"
    junk = []
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x05junk!", b"\x00\x00\x00\x00"):
        junk.append(socket.create_connection((address.host, address.port)))
        junk[-1].sendall(data)
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    assert send(p, d, "k", [1]).ok
    for each in junk:
        each.close()
    wait_for(lambda: d.transport.debug_state()["connections"] == 1)


def test_b29_a_stranger_can_send_no_long_frame(rank):
    """Its connection ends when the length is read, and not when the time to join is over."""
    d = rank("d-frugal")
    address = address_of(d.transport.metadata())
    began_s = time.monotonic()
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.settimeout(60.0)
        stranger.sendall((1 << 20).to_bytes(4, "big"))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1 << 16):  # the challenge, and the end
                pass
    assert time.monotonic() - began_s < DEFAULT_LIMITS.join_s / 2


def test_b29_a_cache_that_fits_into_no_join_is_refused(rank):
    join = Join(b"x" * (MAX_UNPROVED_BYTES - JOIN_BYTES), (1 << 32, 1 << 32), b"x" * 32, b"x" * 32)
    assert len(msgspec.msgpack.encode(join)) <= MAX_UNPROVED_BYTES
    p = rank("p-large")
    cache = msgspec.structs.replace(p.cache, layers=20_000, planes=(1 << 47, ) * 40_000)
    with pytest.raises(TransferError, match="can't describe a cache of 40000 planes"):
        TorchTransport("large", p.memory, cache, "127.0.0.1")


def test_b29_no_more_connections_than_the_bound(rank):
    d = rank("d-many")
    address = address_of(d.transport.metadata())
    connections = [socket.create_connection((address.host, address.port)) for _ in range(MAX_CONNECTIONS + 10)]
    wait_for(lambda: d.transport.debug_state()["connections"] == MAX_CONNECTIONS)
    assert threading.active_count() < MAX_CONNECTIONS + 20
    for each in connections:
        each.close()
    wait_for(lambda: d.transport.debug_state()["connections"] == 0)


def test_b29_a_rank_that_can_accept_nothing_says_so_once_until_it_can(rank, caplog):
    p, d = rank("p-few"), rank("d-few")
    accepting = d.transport._receiver
    real, tries = accepting._socket, []

    def accept():
        tries.append(None)
        if len(tries) not in (4, 6):
            raise OSError(errno.EMFILE, "too many open files")
        return real.accept()

    accepting._socket = SimpleNamespace(accept=accept, shutdown=real.shutdown, close=real.close)
    address = address_of(d.transport.metadata())
    with socket.create_connection((address.host, address.port)):  # which ends the call that waits
        p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
        assert send(p, d, "k", [1]).ok
        wait_for(lambda: len(tries) >= 6)
    assert caplog.text.count("can't accept a connection") == 2
    accepting._socket = real


def test_b29_a_sender_beyond_the_bound_learns_it(rank, monkeypatch, caplog):
    monkeypatch.setattr("vllm_pd.transfer.torch.receiver.MAX_CONNECTIONS", 1)
    first, second, d = rank("p-first"), rank("p-second"), rank("d-full")
    for p, key in ((first, "k"), (second, "l"), (second, "m"), (first, "n")):
        p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
        end = send(p, d, key, [1])
        assert end.ok == (p is first) and (end.ok or "1 senders are connected to this rank" in end.error)
    assert caplog.text.count("1 senders are connected") == 1, "it is logged once"


def test_b23_a_connection_to_a_host_that_is_gone_ends_within_minutes():
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    with ours, theirs:
        control = ControlConnection(theirs, STALL_S)
        idle_s, pause_s, probes = (theirs.getsockopt(socket.IPPROTO_TCP, option) for option in
                                   (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and idle_s + pause_s * probes <= 120
        control.close()


@pytest.mark.parametrize("words", [_PIECE_WORDS, _PIECE_WORDS + 1, 3 * _PIECE_WORDS + 8])
def test_wide_lanes_are_copied_by_the_calling_thread_alone(words):
    """torch starts threads of its own for each thread that copies more at once. The bytes keep their order."""
    source, target = torch.arange(2 * 4 * words).view(2, 4, words), torch.zeros(2, 4, words, dtype=torch.int64)
    reads, writes = (BlockCopier([memory], [Run(lane.data_ptr(), 8 * words, 8 * words) for lane in memory], 4)
                     for memory in (source, target))
    ids, buffer = torch.tensor([3, 1]), torch.empty(2 * 2 * 8 * words, dtype=torch.uint8)
    started = []

    def copy() -> None:
        threads = len(os.listdir("/proc/self/task"))
        reads.gather(ids, buffer)
        writes.scatter(ids, buffer)
        started.append(len(os.listdir("/proc/self/task")) - threads)

    allowed = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(allowed)
    same_bytes(torch.equal(buffer.view(torch.int64), source[:, ids].flatten()))
    same_bytes(torch.equal(target[:, ids], source[:, ids]))
    assert started == [0]


def test_b29_strangers_that_hold_all_connections_keep_no_peer_out(rank):
    p, d = rank("p-late"), rank("d-crowded")
    address = address_of(d.transport.metadata())
    strangers = [socket.create_connection((address.host, address.port)) for _ in range(MAX_CONNECTIONS)]
    wait_for(lambda: d.transport.debug_state()["connections"] == MAX_CONNECTIONS)
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    assert send(p, d, "k", [1]).ok
    more = [socket.create_connection((address.host, address.port)) for _ in range(2 * MAX_CONNECTIONS)]
    assert send(p, d, "l", [2]).ok, "one that is proved never gives way"
    assert d.transport.debug_state()["connections"] <= MAX_CONNECTIONS
    for each in strangers + more:
        each.close()
    wait_for(lambda: d.transport.debug_state() == {"connections": 1, "unproved": 0})  # some may yet be accepted


def test_b25_a_write_that_is_cancelled_ends_with_the_stage_under_way(rank):
    p, d = rank("p-cancels", blocks=len(MANY)), rank("d-cancels", blocks=len(MANY))
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    copier, stages = p.transport._peers[d.name].sender._copier, []
    gather = copier.gather

    def cancelling_gather(block_ids, buffer):
        gather(block_ids, buffer)
        stages.append(len(block_ids))
        if len(stages) == 2:
            p.transport.cancel("k")

    copier.gather = cancelling_gather
    end = send(p, d, "k", MANY)
    assert not end.ok and "cancelled" in end.error and len(stages) == 2
    assert d.worker.take_progress().notices == []
    assert send(p, d, "l", [1]).ok, "over another connection"


@pytest.mark.parametrize("token,larger,problem", [(b"wrong", 1, "closed"), (None, 2, "head"), (None, 1, "")])
def test_b42_a_sender_is_asked_for_its_token_and_the_size_of_its_heads(rank, token, larger, problem):
    d = rank("d-asks")
    address, cache = address_of(d.transport.metadata()), d.cache
    cache = msgspec.structs.replace(cache, block_bytes=larger * cache.block_bytes,
                                    block_stride_bytes=larger * cache.block_stride_bytes)
    control = ControlConnection(socket.create_connection((address.host, address.port)), STALL_S)
    nonce = control.receive(time.monotonic() + 5).nonce
    control.send(Join(PeerMetadata("p", b"", cache).encode(), None, b"x" * 32,
                      prove(token or address.token, nonce, b"sender")))
    if problem == "closed":
        with pytest.raises(TransferError, match="closed"):
            control.receive(time.monotonic() + 5)
    else:
        joined = control.receive(time.monotonic() + 5)
        assert isinstance(joined, Joined) and (problem in joined.error if problem else not joined.error)
        assert problem or joined.proof == prove(address.token, b"x" * 32, b"receiver")
    control.close()


def test_b42_a_peer_with_another_transport_is_refused(rank):
    p, nixl = rank("p-torch"), rank("d-nixl", transport="nixl")
    p.worker.execute([AddTransferPeer(nixl.name, nixl.transport.metadata())])
    assert "no torch transport" in p.worker.take_progress().refused[0].reason


def test_b5_it_does_not_read(rank):
    p, d = rank("p-reads"), rank("d-read")
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    with pytest.raises(TransferError, match="can't read"):
        p.transport.read("k", d.name, [0], [0])


def test_b20_the_grants_that_are_remembered_have_a_bound():
    grants = Grants()
    for number in range(10_000):
        grants.open(str(number), [1])
        grants.close(str(number))
    assert len(grants) == 0 and len(grants._closed) < 5000


def test_a_cache_on_a_gpu_is_refused(rank):
    p = rank("p-device")
    with pytest.raises(TransferError, match="can't carry a cache in VRAM"):
        TorchTransport("gpu", p.memory, msgspec.structs.replace(p.cache, memory=Memory.VRAM), "127.0.0.1")


def test_the_values_of_the_setting_are_the_transports():
    for kind in TransportKind:
        config = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:5700", "transport": kind.value})
        assert TransportChoice.of(config.transport, config.transport_host) == TransportChoice(kind, "127.0.0.1")
        assert config.is_two_sided == (kind is TransportKind.TORCH)
    with pytest.raises(ConfigError, match="write one of nixl, torch"):
        PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:5700", "transport": "ucx"})


def test_b80_the_setting_is_refused_on_a_gpu():
    TransportChoice(TransportKind.TORCH).check_device("cpu")
    TransportChoice(TransportKind.NIXL).check_device("cuda")
    with pytest.raises(ConfigError, match="transport='torch'.* a cache on cuda, .*write nixl"):
        TransportChoice(TransportKind.TORCH).check_device("cuda")
