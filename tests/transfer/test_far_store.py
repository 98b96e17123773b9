# SPDX-License-Identifier: Apache-2.0
"""The store beyond one host: real arenas in two folders, real NIXL, processes that are killed, and hosts that lie."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from far_host import BLOCK, MODELS, FarHost, count_right, name_of, put

from tests.waiting import wait_for
from vllm_pd.errors import ConfigError
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import take_free
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.beyond import fetches, sending
from vllm_pd.store.beyond.messages import FoundBlocks, SentBlocks, questions, replies
from vllm_pd.store.blocks import BlockKey

GIB = 0.1
PROGRAM = Path(__file__).with_name("far_host.py")
Serve = Callable[..., "Server"]


class Server:
    """Another host."""

    def __init__(self, folder: Path, count: int, first: int = 0, environment: dict[str, str] | None = None,
                 **settings: object) -> None:
        self.folder, self.url = folder, f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
        self._settings = {"folder": str(folder), "memory_gib": GIB, "listen": self.url, **settings}
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
        self.start(first, count)

    def start(self, first: int = 0, count: int = 0) -> None:
        self.process = subprocess.Popen([sys.executable, str(PROGRAM), json.dumps(self._settings), str(first),
                                         str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=self._environment)
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, count: int) -> None:
        """Begin a fetch of its own."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        return int(self.process.stdout.readline())

    def kill(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)

    def close(self) -> None:
        """End it in its own way, or find that it has ended."""
        self.process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture
def folder() -> Iterator[Callable[[str], Path]]:
    """Folders in shared memory, one for each host."""
    root = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    yield lambda name: root / name
    shutil.rmtree(root)


@pytest.fixture
def serve(folder) -> Iterator[Serve]:
    made: list[Server] = []

    def make(count: int, **options: object) -> Server:
        made.append(Server(folder(f"server{len(made)}"), count, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def read(folder) -> Iterator[Callable[..., FarHost]]:
    made: list[FarHost] = []

    def make(*urls: str, **settings: object) -> FarHost:
        made.append(FarHost({"folder": str(folder("reader")), "memory_gib": GIB, "hosts": ",".join(urls),
                             "staging_mib": 8, **settings}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def connected(host: FarHost) -> FarHost:
    """Once its connections stand, a first question reaches the others: until then they count as unreachable."""
    wait_for(lambda: all(client.poll(0, zmq.POLLOUT) for client in host.far._clients), "no connection")
    return host


def counts(host: FarHost) -> dict[str, int]:
    return host.far.take_counts()


def test_b104_blocks_of_another_host_are_here_and_right(serve, read):
    """B104: more of them than the staging memory holds; what is missing at the end is missing."""
    server = serve(20)
    reader = connected(read(server.url))
    assert reader.fetch(23) == 20
    found = counts(reader)
    assert found.pop("far_found") == 40
    assert found == {"far_fetched": 40, "far_part": 1}
    assert reader.fetch(20) == 20 and counts(reader) == {}, "nobody was asked"
    wait_for(lambda: reader.far.debug_state() == {"fetches": 0, "waits": 0, "free_rows": 27, "sends": 0}, "rows")


def test_the_two_serve_each_other_and_use_keys(folder, serve, read, tmp_path):
    keys = str(Keys.make(tmp_path / "keys"))
    url = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
    server = serve(5, keys=keys, hosts=url)
    reader = connected(read(server.url, url, keys=keys, listen=url))  # its own address is left out
    assert reader.fetch(5) == 5
    put(reader.arena, 5, 5)
    wait_for(lambda: server.ask(10) or server.answer() == 10, "the way back", meanwhile=lambda: time.sleep(1.0))
    strange = str(Keys.make(tmp_path / "strange"))
    with contextlib.closing(FarHost({"folder": str(folder("third")), "memory_gib": GIB, "hosts": url,
                                     "keys": strange})) as stranger:
        time.sleep(0.3)
        assert stranger.fetch(5) == 0 and counts(stranger) == {"far_none": 1, "far_host_unreachable": 1}


def test_each_of_several_hosts_gives_what_it_has(serve, read):
    one, other = serve(6), serve(12, first=4)
    reader = connected(read(one.url, other.url))
    assert reader.fetch(16) == 16
    assert counts(reader)["far_whole"] == 1


def test_b104_a_torn_block_is_a_miss(serve, read, caplog):
    """B104: some byte of a part of block 3 is another one: blocks 0 to 2 are used, and the host is left alone."""
    server = serve(6)
    reader = connected(read(server.url))
    with contextlib.closing(BlockArena(server.folder, BLOCK, int(GIB * 2**30))) as arena:
        held = arena.hold(BlockKey(MODELS[1], name_of(3)), BLOCK)
        held.bytes[77] ^= 1
        held.release()
    number = 100
    while reader.arena.blocks() < reader.arena.shape.slots:  # each block takes the place of another one
        put(reader.arena, number, 1)
        number += 1
    evicted = {name_of(one) for one in range(100, number)}
    with caplog.at_level(logging.WARNING, "vllm.pd"):
        assert reader.fetch(6) == 3
    assert counts(reader) == {"far_found": 12, "far_fetched": 7, "far_torn": 1, "far_host_torn": 1, "far_part": 1}
    left = sum(len(reader.arena.models_of(name)) for name in evicted)
    assert left == reader.arena.shape.slots - 7 and reader.arena.blocks() == reader.arena.shape.slots, "its slot"
    assert f"host {server.url} is not asked for 1 s: torn" in caplog.text
    assert reader.fetch(6) == 3 and counts(reader) == {}, "nobody was asked"


def test_a_block_that_changes_after_it_was_checked_is_not_stored(serve, read, monkeypatch):
    """A late write into a row, while the row is being stored: the bytes are checked where they have arrived."""
    reader = read("tcp://127.0.0.1:9")
    part, key = np.zeros(BLOCK, np.uint8), BlockKey(MODELS[0], name_of(0))
    right = np.ones(BLOCK, np.uint8)
    reader.arena.put(BlockKey(MODELS[0], name_of(1)), [right])
    from vllm_pd.store import arena as module
    from vllm_pd.store.blocks import checksummer
    summed = checksummer(key, BLOCK)
    summed.update(part)
    real = module._sum

    def sum_then_change(*arguments: object) -> int:
        found = real(*arguments)
        part[5] = 1
        return found

    monkeypatch.setattr(module, "_sum", sum_then_change)
    assert reader.arena.put_checked(key, part, summed.intdigest()).value == "torn"
    assert not reader.arena.contains(key)


@pytest.mark.parametrize("transports", ["", "tcp"])
def test_b104_a_server_is_killed_at_any_moment(serve, read, transports, monkeypatch):
    """B104: the reader goes on in time, with right blocks only."""
    if transports:
        monkeypatch.setenv("UCX_TLS", transports)
    server = serve(40)
    reader, chance = read(server.url, wait_s=1.0), random.Random(7)
    for turn in range(5):
        connected(reader)
        wait_for(lambda turn=turn: reader.fetch(1 + turn * 4) > turn * 4, "the host is asked again",
                 meanwhile=lambda: time.sleep(0.2))
        killer = threading.Timer(chance.random() * 0.03, server.kill)
        killer.start()
        reader.fetch(1 + turn * 4 + 3)
        killer.join()
        server.process.wait(30)
        server.start()
    assert count_right(reader.arena, 40) >= 17


def test_b104_a_reader_that_is_killed_ends_no_server(serve, read, monkeypatch):
    """B104: over TCP. A server that is read would be ended by UCX (`vllm_pd.transfer.nixl.transport`)."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    server, chance = serve(60), random.Random(8)
    for turn in range(6):
        with tempfile.TemporaryDirectory(prefix="vllm-pd-test-", dir="/dev/shm") as memory:
            victim = Server(Path(memory) / "victim", 0, hosts=server.url, staging_mib=64)
            time.sleep(0.2)
            victim.ask(60)
            time.sleep(0.005 + 0.06 * chance.random())
            victim.kill()
            victim.process.wait(30)
            victim.close()
        assert server.process.poll() is None, turn
    assert connected(read(server.url)).fetch(20) == 20


def test_b104_a_server_that_is_stopped_costs_no_more_than_wait_s(serve, read):
    """B104: and nobody waits for it again before it answers. Then it serves."""
    server = serve(4)
    reader = connected(read(server.url, wait_s=1.0))
    server.kill(signal.SIGSTOP)
    assert reader.fetch(4) == 0
    begin = time.monotonic()
    assert reader.fetch(4) == 0 and time.monotonic() - begin < 60
    found = counts(reader)
    assert found["far_host_late"] == 1
    server.kill(signal.SIGCONT)
    wait_for(lambda: reader.fetch(4) == 4, "it serves again", meanwhile=lambda: time.sleep(0.3))


def test_b104_a_reader_that_is_stopped_holds_nothing_of_a_server(serve, read, folder, monkeypatch):
    """B104: the leases end, the slots are replaced, and other readers are served."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    server = serve(60)
    victim = Server(folder("victim"), 0, hosts=server.url, staging_mib=64)
    time.sleep(0.3)
    victim.ask(60)
    time.sleep(0.01)
    victim.kill(signal.SIGSTOP)
    with contextlib.closing(BlockArena(server.folder, BLOCK, int(GIB * 2**30))) as arena:
        def is_free() -> bool:
            taken = [slot for slot in range(arena.shape.slots) if not arena._locks.lock(slot, True)]
            for slot in set(range(arena.shape.slots)) - set(taken):
                arena.unlock(slot)
            return not taken
        wait_for(is_free, "leases", meanwhile=lambda: time.sleep(0.5))
    assert connected(read(server.url)).fetch(10) == 10
    victim.kill()
    victim.process.wait(30)
    victim.close()


def test_a_reader_with_little_staging_memory_gets_all_in_turns(serve, read):
    server = serve(30)
    reader = connected(read(server.url, staging_mib=2 * BLOCK * 1.02 / 2**20))
    assert reader.far._fetches.free_rows() == 2
    done = []
    threads = [threading.Thread(target=lambda first=first: done.append(ask_for(reader, first, 10)))
               for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count_right(reader.arena, 30) == 30 and reader.far._fetches.free_rows() == 2


def ask_for(reader: FarHost, first: int, count: int) -> None:
    names = [name_of(number) for number in range(first, first + count)]
    while reader.far.ask(f"r{first}", lambda: names).value == "wait":
        time.sleep(0.001)
    reader.far.end_request(f"r{first}")


class Liar:
    """A host that answers what a test says. `answer`: of a question, the frames of each answer."""

    def __init__(self, answer: Callable[[object], list[bytes]]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.url, self._answer = f"tcp://127.0.0.1:{port}", answer
        self.sent = 0
        self._ending = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            if self._socket.poll(50):
                route, frame = self._socket.recv_multipart()
                for one in self._answer(questions.decode([frame])):
                    with contextlib.suppress(zmq.Again):
                        self._socket.send_multipart([route, one], zmq.NOBLOCK)
                        self.sent += 1

    def close(self) -> None:
        self._ending = True
        self._thread.join()
        self._socket.close(0)
        self._context.term()


def found_all(question: object) -> bytes:
    return replies.encode(FoundBlocks(question.number, len(question.names)))


def is_find(question: object) -> bool:
    return not hasattr(question, "addresses")


LIES = {
    "noise": lambda question: [os.urandom(100)],
    "another protocol": lambda question: [b"PD\x01" + os.urandom(50)],
    "more than was asked for": lambda question: [replies.encode(FoundBlocks(question.number, 10**9))],
    "another number": lambda question: [replies.encode(FoundBlocks(question.number + 1, 1))],
    "sent, and nothing was": lambda question: [
        found_all(question) if is_find(question) else
        replies.encode(SentBlocks(question.number, (0, ) * len(question.addresses)))],
    "more parts than rows": lambda question: [
        found_all(question) if is_find(question) else replies.encode(SentBlocks(question.number, (1, ) * 4096))],
    "half a block": lambda question: [
        found_all(question) if is_find(question) else replies.encode(SentBlocks(question.number, (1, )))],
    "it has, and never sends": lambda question: [found_all(question)] if is_find(question) else [],
    "it has, and then has not": lambda question: [
        found_all(question) if is_find(question) else replies.encode(SentBlocks(question.number, ()))],
    "nothing": lambda question: [],
    "the same again and again": lambda question: [found_all(question)] * 500,
    "a huge frame": lambda question: [b"PS\x01" + bytes(1 << 20)],
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_b104_a_host_that_lies(lie, serve, read):
    """B104: no wrong block, no wait beyond `wait_s`, and the good host serves what it has."""
    server = serve(3)
    with contextlib.closing(Liar(LIES[lie])) as liar:
        reader = connected(read(liar.url, server.url, wait_s=1.0))
        assert reader.fetch(3) in (0, 3)
        wait_for(lambda: reader.fetch(3) == 3, "the good host serves", meanwhile=lambda: time.sleep(0.1))
        for number in range(5):
            reader.fetch(4 + number)
        found = counts(reader)
        assert found["far_fetched"] == 6
        if lie not in ("another number", "it has, and then has not"):
            assert any(name.startswith("far_host_") for name in found), found
        if lie == "the same again and again":
            liar.sent = 0
            time.sleep(1.0)
            assert reader.far._paused, "it is not read"


def test_b104_noise_of_a_host_that_is_left_alone_is_not_read(read):
    """B104: it is late, and left alone for 8 s. Noise that comes then is not reported, and only its first is read."""
    def late_noise(question: object) -> list[bytes]:
        time.sleep(0.6)
        return [os.urandom(100)] * 400

    with contextlib.closing(Liar(late_noise)) as liar:
        reader = connected(read(liar.url, wait_s=0.5))
        read_at, real = [], reader.far._fetches.spoke_garbage
        reader.far._fetches.spoke_garbage = lambda now, host: read_at.append(now) or real(now, host)
        reader.far._fetches._hosts[0].failures = 3
        assert reader.fetch(1) == 0 and counts(reader)["far_host_late"] == 1
        wait_for(lambda: read_at, "noise")
        time.sleep(0.5)
        assert len(read_at) == 1 and reader.far._paused


def test_b104_a_host_that_promises_and_sends_nothing_is_blamed_each_time(read):
    """B104: however the request that asks at its deadline and the thread meet."""
    liar = Liar(LIES["it has, and never sends"])
    with contextlib.closing(liar):
        reader = connected(read(liar.url, wait_s=0.3))
        record = reader.far._fetches._hosts[0]
        for number in range(8):
            ask_for(reader, 10 * number, 1)
            wait_for(lambda: record.failures, "blame")
            with reader.far._lock:
                record.failures, record.until_s = 0, 0.0
                for one in list(reader.far._fetches._set_aside):
                    reader.far._fetches._recover(time.monotonic(), one)


def test_a_host_that_is_flooded_goes_on(serve, read):
    """Questions that are noise, and ones for names that it lacks: they are counted, and bounded."""
    server = serve(3)
    context = zmq.Context()
    flood = context.socket(zmq.DEALER)
    flood.connect(server.url)
    for _ in range(3000):
        with contextlib.suppress(zmq.Again):
            flood.send(os.urandom(60), zmq.NOBLOCK)
    reader = connected(read(server.url))
    wait_for(lambda: reader.fetch(3) == 3, "it serves", meanwhile=lambda: time.sleep(0.2))
    flood.close(0)
    context.term()


def test_settings_that_can_not_be(serve, read, folder):
    server = serve(0)
    with pytest.raises(ConfigError, match=r"staging_mib=0.5 can't be used: a block has 606208 bytes in 2 parts, and "
                                          "not one fits: give at least 0.578"):
        read(server.url, staging_mib=0.5)
    with pytest.raises(ConfigError, match=f"listen='{server.url}' can't be used: Address already in use.*free port"):
        FarHost({"folder": str(folder("other")), "memory_gib": GIB, "listen": server.url})


def test_bounds_are_what_the_docs_say():
    assert fetches.MAX_OPEN * 2 <= sending.MAX_SENDS and sending.LEASE_S < fetches.QUARANTINE_S
