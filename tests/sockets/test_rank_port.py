# SPDX-License-Identifier: Apache-2.0
"""The TCP connections to a rank on another node: framing, and who is let in."""
from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
import types
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.guarded import HOST, NoTransfers
from tests.waiting import wait_for
from vllm_pd.errors import ControlError
from vllm_pd.peer.liveness.lifeline import GREETING_BYTES, Lifeline, greeting
from vllm_pd.transfer.ranks import process, remote
from vllm_pd.transfer.ranks.packets import FAREWELL, LAST, MAX_MESSAGE_BYTES, MAX_UNSENT_BYTES, MORE, PACKET_BYTES
from vllm_pd.transfer.ranks.process import AttachRank, RankServer, connect_ranks
from vllm_pd.transfer.ranks.remote import ENGINE, GUARDIAN, RankAddress, RankEnd, RankPort, TcpPackets, connect_to
from vllm_pd.transfer.thread import Transfers

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def pair() -> Iterator[tuple[TcpPackets, TcpPackets]]:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        ends = TcpPackets(one), TcpPackets(listener.accept()[0])
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, TcpPackets]]:
    """A plain socket that speaks to a `TcpPackets`."""
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        end = TcpPackets(listener.accept()[0])
        yield one, end
        end.close()


def received(end: TcpPackets, count: int, others: tuple[TcpPackets, ...] = ()) -> list[bytes]:
    messages: list[bytes] = []

    def has_come() -> bool:
        for other in others:
            other.flush()
        end.wait(0.01)
        messages.extend(end.receive())
        return len(messages) >= count

    wait_for(has_come, "the messages", 60.0)
    return messages


def frame(packet: bytes) -> bytes:
    return struct.pack("!I", len(packet)) + packet


def test_messages_of_any_size_arrive_whole_and_in_order(pair):
    one, other = pair
    sizes = [0, 1, PACKET_BYTES - 1, PACKET_BYTES, PACKET_BYTES + 1, 5 * PACKET_BYTES, 8 << 20, 3]
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    for message in sent:
        one.send(message)
    assert received(other, len(sent), (one,)) == sent
    assert one.flush() and other.dropped == 0 and other.pid == 0 and other.filenos() == [other.fileno()]


def test_a_farewell_follows_what_is_unsent(pair):
    one, other = pair
    while one.send(b"x" * (1 << 20)):
        pass
    one.send_farewell()
    assert not one.flush()
    messages: list[bytes] = []
    wait_for(lambda: other.farewell, "the farewell", 60.0, lambda: (one.flush(), messages.extend(other.receive())))
    assert messages and all(len(one) == 1 << 20 for one in messages)


def test_a_packet_that_comes_byte_by_byte(raw):
    one, end = raw
    got: list[bytes] = []
    for byte in frame(MORE + b"ab") + frame(LAST + b"c") + frame(FAREWELL):
        one.sendall(bytes([byte]))
        end.wait(1.0)
        got += end.receive()
    assert got == [b"abc"] and end.farewell


@pytest.mark.parametrize("bad", [frame(LAST + b"x" * (PACKET_BYTES + 1)), frame(b"")], ids=["too long", "empty"])
def test_b29_a_packet_of_no_allowed_size_is_dropped_and_the_next_one_read(raw, bad):
    """B29"""
    one, end = raw
    one.sendall(bad + frame(LAST + b"next"))
    assert received(end, 1) == [b"next"] and end.dropped == 1


def test_b29_a_size_of_gigabytes_keeps_no_memory(raw):
    """B29"""
    one, end = raw
    one.sendall(struct.pack("!I", 0xFFFFFFFF))
    for _ in range(64):
        one.sendall(b"x" * (1 << 16))
        end.wait(1.0)
        assert end.receive() == []
    assert end.dropped == 1 and len(end._arriving) == 0


def test_b29_a_message_that_is_too_long_is_dropped(raw):
    """B29"""
    one, end = raw
    packets = MAX_MESSAGE_BYTES // PACKET_BYTES + 1
    sender = threading.Thread(target=lambda: one.sendall(
        b"".join(frame(MORE + b"x" * PACKET_BYTES) for _ in range(packets)) + frame(LAST) + frame(LAST + b"next")))
    sender.start()
    assert received(end, 1) == [b"next"] and end.dropped == 1
    sender.join()


def test_more_than_may_be_unsent_is_refused(pair):
    one, _ = pair
    with pytest.raises(ControlError, match="has not read"):
        for _ in range(2 + (MAX_UNSENT_BYTES >> 24)):
            one.send(b"x" * (1 << 24))


def test_the_end_of_a_connection_is_an_error_after_all_that_has_come(pair):
    one, other = pair
    one.send(b"last")
    one.close()
    assert received(other, 1) == [b"last"]
    with pytest.raises(OSError):
        other.receive()


def test_a_cut_ends_a_connection(pair):
    one, _ = pair
    options = {name: one._connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
               for name in ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")}
    assert options == {"TCP_USER_TIMEOUT": 1000 * remote.CUT_S, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5}
    assert one._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


# Who is let in.


class Rank:
    """A rank that waits for its engine, in a thread."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.lifeline = Lifeline(name, HOST)
        self.port = RankPort(HOST, 0, self.lifeline, self.lifeline.address, name)
        self.address: RankAddress = self.port.address
        self.where = (HOST, urlsplit(self.address.url).port)
        self._threads = ThreadPoolExecutor(1)
        self._closing = False
        self.end: Future[RankEnd | None] = self._threads.submit(self._accept)

    def _accept(self) -> RankEnd | None:
        while not self._closing:
            if (end := self.port.accept_one((), 0.1)) is not None:
                return end
        return None

    def close(self) -> None:
        self._closing = True
        end = self.end.result(60)
        if end is not None:
            end.release(True)
        self.port.close()
        self.lifeline.close()
        self._threads.shutdown()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.close()


def test_b81_the_engine_and_its_guardian(rank):
    """B81: the rank is attached when both have connected, and not before."""
    guardian = connect_to(1, rank.address, GUARDIAN)
    with pytest.raises(TimeoutError):
        rank.end.result(0.3)
    engine = connect_to(1, rank.address, ENGINE)
    end = rank.end.result(60)
    engine.send(b"order")
    assert received(end, 1) == [b"order"]
    assert len(end.filenos()) == 3
    end.send(b"answer")
    assert received(engine, 1) == [b"answer"]
    guardian.close()
    end.wait(1.0)
    with pytest.raises(OSError, match="guardian of the engine is gone"):
        wait_for(end.receive, "the guardian's end")
    engine.close()


def test_an_engine_that_waits_for_its_guardian_costs_no_time(rank, monkeypatch):
    turns = []
    serve = RankPort._serve
    monkeypatch.setattr(RankPort, "_serve", lambda port, timeout_s: (turns.append(0), serve(port, timeout_s)))
    engine = connect_to(1, rank.address, ENGINE)
    engine.send(b"order")
    turns.clear()
    time.sleep(0.5)
    assert len(turns) < 20
    guardian = connect_to(1, rank.address, GUARDIAN)
    assert received(rank.end.result(60), 1) == [b"order"]
    for one in (engine, guardian):
        one.close()


def test_strangers_in_the_way_are_outwaited(rank, monkeypatch):
    """They may have this connection closed. There is time for another one."""
    connect, answers = RankAddress.connect, iter([ConnectionResetError(), ConnectionResetError()])

    def fails_twice(address: RankAddress, purpose: bytes, timeout_s: float) -> TcpPackets:
        if (error := next(answers, None)) is not None:
            raise error
        return connect(address, purpose, timeout_s)

    monkeypatch.setattr(RankAddress, "connect", fails_twice)
    connect_to(1, rank.address, GUARDIAN).close()


def test_b21_a_rank_elsewhere_to_which_its_engine_can_not_attach_ends(monkeypatch):
    """Nobody on its node would end it. Its guardian need not wait for it. B21."""
    ended: Future[int] = Future()
    monkeypatch.setattr(os, "_exit", ended.set_result)
    name = uuid.uuid4().hex
    lifeline = Lifeline(name, HOST)
    port = RankPort(HOST, 0, lifeline, lifeline.address, name)

    def fails(order: AttachRank) -> tuple[Transfers, bytes]:
        raise ValueError("no network card")

    server = RankServer(fails, (), port=port, meeting=lambda: None)
    guardian = connect_to(1, port.address, GUARDIAN)
    with pytest.raises(ControlError, match="rank 1 can't make its transport: no network card"):
        connect_ranks({1: (0, port.address)}, AttachRank("p", True))
    assert ended.result(60) == 1

    def is_over() -> bool:
        with contextlib.suppress(OSError):
            guardian.receive()
        return guardian.farewell

    wait_for(is_over, "the farewell to the guardian")
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, urlsplit(lifeline.address).port), 60)


@pytest.fixture
def store() -> Iterator[socket.socket]:
    """In the place of torch's, in the process of the first node's rank 0."""
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(60)
        yield listener


class Waiting:
    """A rank elsewhere that no engine has connected to. `ended`: the exit code of its process."""

    def __init__(self, store: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended: Future[int] = Future()
        monkeypatch.setattr(os, "_exit", self.ended.set_result)
        monkeypatch.setattr(process, "LISTEN_S", 0.1)
        name = uuid.uuid4().hex
        lifeline = Lifeline(name, HOST)
        self.port = RankPort(HOST, 0, lifeline, lifeline.address, name)
        self.server = RankServer(lambda order: (NoTransfers(), b"metadata"), (), port=self.port,
                                 meeting=store.getsockname)


def test_b21_a_rank_elsewhere_ends_with_the_first_node(store, monkeypatch):
    """B21: no engine will connect to it. Before that it waits, however long a model is warmed up."""
    waiting = Waiting(store, monkeypatch)
    rank_0, _ = store.accept()
    with pytest.raises(TimeoutError):
        waiting.ended.result(1.0)
    rank_0.close()
    assert waiting.ended.result(60) == 1
    waiting.server.close()


def test_b21_a_rank_elsewhere_of_a_first_node_that_it_can_not_see_waits(monkeypatch, caplog):
    """That is not known to be its end. B21."""
    caplog.set_level("WARNING", "vllm.pd")
    monkeypatch.setattr(logging.getLogger("vllm.pd"), "propagate", True)
    waiting = Waiting(types.SimpleNamespace(getsockname=lambda: (HOST, 1)), monkeypatch)
    ends = [waiting.port.address.connect(GUARDIAN)]
    connections, _ = connect_ranks({1: (0, waiting.port.address)}, AttachRank("p", True))
    assert "can't see whether the first node runs" in caplog.text and not waiting.ended.done()
    waiting.server.close()
    for end in (*ends, *connections.values()):
        end.close()


def test_an_attached_rank_elsewhere_needs_the_store_no_more(store, monkeypatch):
    """The engine's own connection says more."""
    waiting = Waiting(store, monkeypatch)
    rank_0, _ = store.accept()
    guardian = connect_to(1, waiting.port.address, GUARDIAN)
    connections, _ = connect_ranks({1: (0, waiting.port.address)}, AttachRank("p", True))
    rank_0.settimeout(60)
    assert rank_0.recv(1) == b"" and not waiting.ended.done()
    waiting.server.close()
    for one in (rank_0, guardian, *connections.values()):
        one.close()


def test_b21_the_lifeline_greets_while_nobody_has_connected(rank):
    with socket.create_connection((HOST, urlsplit(rank.address.lifeline).port), 60) as probe:
        said = b""
        while len(said) < GREETING_BYTES:
            said += probe.recv(GREETING_BYTES)
    assert said == greeting(rank.address.name)


def attach(rank: Rank) -> None:
    """The right ones are let in all the same."""
    ends = [rank.address.connect(purpose) for purpose in (GUARDIAN, ENGINE)]
    rank.end.result(60)
    for end in ends:
        end.close()


def test_b81_a_wrong_secret_is_turned_away(rank):
    """B81"""
    stranger = RankAddress(rank.address.url, "", "", bytes(32))
    for purpose in (ENGINE, GUARDIAN):
        with pytest.raises(ControlError, match="can't connect to rank 7 at tcp://.*bind"):
            connect_to(7, stranger, purpose)
    attach(rank)


def claim(rank: Rank, said: bytes) -> bytes:
    """What a rank answers to one that has said that, after its hello."""
    with socket.create_connection(rank.where, 60) as stranger:
        stranger.settimeout(60)
        assert len(remote._receive(stranger, remote._HELLO_BYTES, time.monotonic() + 60)) == remote._HELLO_BYTES
        try:
            stranger.sendall(said)
            return stranger.recv(100)
        except ConnectionError:
            return b""


class Overheard:
    """A listener that speaks to the rank for somebody else, and hears all."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.listener = socket.create_server((HOST, 0))
        self.address = RankAddress(f"tcp://{HOST}:{self.listener.getsockname()[1]}", "", "", rank.address.secret)
        self.said = b""

    def carry(self) -> None:
        near, _ = self.listener.accept()
        with near, socket.create_connection(self._rank.where, 60) as far:
            near.sendall(remote._receive(far, remote._HELLO_BYTES, time.monotonic() + 60))
            self.said = remote._receive(near, remote._CLAIM_BYTES, time.monotonic() + 60)
            far.sendall(self.said)
            near.sendall(remote._receive(far, remote.PROOF_BYTES, time.monotonic() + 60))


def test_b81_what_was_overheard_is_worth_nothing_later(rank):
    """B81"""
    between = Overheard(rank)
    with between.listener, ThreadPoolExecutor(1) as threads:
        carried = threads.submit(between.carry)
        between.address.connect(ENGINE).close()
        carried.result(60)
    assert claim(rank, between.said) == b""
    attach(rank)


def test_b81_a_proof_of_one_is_none_of_the_other(rank):
    """B81: of a guardian's connection no engine's is made, nor from a rank's own proof one of a caller."""
    secret = rank.address.secret
    with socket.create_connection(rank.where, 60) as stranger:
        hello = remote._receive(stranger, remote._HELLO_BYTES, time.monotonic() + 60)
        nonces = hello[len(remote.MAGIC):], b"n" * remote.NONCE_BYTES
        stranger.sendall(ENGINE + nonces[1] + remote._proof(secret, b"c", GUARDIAN, *nonces))
        assert stranger.recv(100) == b""
    with socket.create_connection(rank.where, 60) as stranger:
        hello = remote._receive(stranger, remote._HELLO_BYTES, time.monotonic() + 60)
        nonces = hello[len(remote.MAGIC):], b"n" * remote.NONCE_BYTES
        stranger.sendall(ENGINE + nonces[1] + remote._proof(secret, b"s", ENGINE, *nonces))
        assert stranger.recv(100) == b""
    assert claim(rank, b"x" * remote._CLAIM_BYTES) == b"", "another purpose"
    attach(rank)


@pytest.mark.parametrize("answer", [lambda said: bytes(remote.PROOF_BYTES), lambda said: said[-remote.PROOF_BYTES:],
                                    lambda said: b""], ids=["guess", "echo", "nothing"])
def test_b81_a_rank_that_does_not_know_its_secret_is_no_rank(answer):
    """B81: another program has the port of a rank that has ended."""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as threads:
        address = RankAddress(f"tcp://{HOST}:{listener.getsockname()[1]}", "", "", b"s" * 32)

        def pretend() -> None:
            near, _ = listener.accept()
            with near:
                near.sendall(remote.MAGIC + bytes(remote.NONCE_BYTES))
                near.sendall(answer(remote._receive(near, remote._CLAIM_BYTES, time.monotonic() + 60)))

        pretended = threads.submit(pretend)
        with pytest.raises(ConnectionError):
            address.connect(ENGINE)
        pretended.result(60)


def test_b81_another_program_at_the_port_is_no_rank():
    """B81"""
    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: listener.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 9))
        with pytest.raises(ConnectionError, match="another program"):
            RankAddress(f"tcp://{HOST}:{listener.getsockname()[1]}", "", "", b"").connect(ENGINE)


def test_b81_who_says_nothing_or_not_enough_is_closed_in_time(monkeypatch):
    """B81"""
    monkeypatch.setattr(remote, "HALF_OPEN_S", 0.3)
    rank = Rank()
    try:
        with socket.create_connection(rank.where, 60) as silent, socket.create_connection(rank.where, 60) as slow:
            slow.sendall(ENGINE)
            for one in (silent, slow):
                remote._receive(one, remote._HELLO_BYTES, time.monotonic() + 60)
                assert one.recv(1) == b""
        attach(rank)
    finally:
        rank.close()


def test_b81_strangers_without_number_keep_nobody_out(rank):
    """B81: the oldest end where there are too many."""
    strangers = [socket.create_connection(rank.where, 60) for _ in range(2 * remote.MAX_HALF_OPEN)]
    attach(rank)
    assert len(rank.port._half_open) <= remote.MAX_HALF_OPEN
    for one in strangers:
        one.close()


def test_a_guardian_that_ends_before_the_engine_comes_may_come_again(rank):
    connect_to(0, rank.address, GUARDIAN).close()
    engine = connect_to(0, rank.address, ENGINE)
    with pytest.raises(TimeoutError):
        rank.end.result(0.5)
    guardian = connect_to(0, rank.address, GUARDIAN)
    rank.end.result(60)
    engine.close()
    guardian.close()


def test_a_secret_is_in_no_log():
    assert "6173" not in repr(RankAddress("u", "l", "n", b"as")) and "as" not in repr(RankAddress("u", "l", "n", b"as"))
