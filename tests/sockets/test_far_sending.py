# SPDX-License-Identifier: Apache-2.0
"""The server of an arena to other hosts, with an agent that does what a test says."""
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from vllm_pd.errors import TransferError
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.beyond import sending
from vllm_pd.store.beyond.messages import FindBlocks, SendBlocks, SentBlocks
from vllm_pd.store.beyond.sending import LEASE_S, MAX_READER_SENDS, MAX_READERS, UNMET_S, BlockSender
from vllm_pd.store.blocks import BlockKey
from vllm_pd.transfer.nixl.agent import TransferState
from vllm_pd.transfer.nixl.identity import DIGEST_BYTES, Proofs, digest

BLOCK, CAPACITY = 10_000, 70 * (1 << 14)
MODELS = (b"a" * 16, b"b" * 16)


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class FakeAgent:
    """Transfers end when `ends` has their state. A proof finds the bytes of `found`, by default the right ones."""

    def __init__(self, proofs: Proofs) -> None:
        self._proofs = proofs
        self.peers: list[str] = []
        self.posted: dict[int, tuple[str, int, bool]] = {}  # by handle: the peer, descriptors, whether it is a write
        self.released: list[int] = []
        self.ends: dict[int, TransferState] = {}
        self.found: dict[str, str] = {}
        self.unreachable: set[str] = set()
        self.adds = 0
        self.waits: Callable[[], None] = lambda: None  # for a reader that is unreachable

    def add_peer(self, metadata: bytes) -> str:
        self.adds += 1
        name = metadata.decode().partition("/")[0]
        if name in self.unreachable:
            self.waits()
            raise TransferError("nothing answers")
        self.peers.append(name)
        return name

    def remove_peer(self, name: str) -> None:
        self.peers.remove(name)

    def make_unprepared(self, local, memory, remote, peer_memory, peer, notice) -> int:
        assert len(local) == len(remote)
        handle = len(self.posted) + 1
        self.posted[handle] = (peer, len(local), notice is not None)
        if notice is None:
            place = (int(local[0][0]) - self._proofs.address) // DIGEST_BYTES
            read = np.frombuffer(digest(self.found.get(peer, peer)), np.uint8)
            self._proofs._memory[place] = read
            self.ends[handle] = TransferState.DONE
        return handle

    def post(self, handle: int) -> TransferState:
        return TransferState.OPEN

    def check(self, handle: int) -> TransferState:
        return self.ends.get(handle, TransferState.OPEN)

    def release(self, handle: int) -> None:
        self.released.append(handle)

    def writes(self) -> list[int]:
        return [handle for handle, (_, _, is_write) in self.posted.items() if is_write]


class Served:
    """A server with an arena of `blocks` blocks."""

    def __init__(self, folder: Path, blocks: int) -> None:
        self.arena, self.now = BlockArena(folder, BLOCK, CAPACITY), 100.0
        for number in range(blocks):
            for model in MODELS:
                self.arena.put(BlockKey(model, name_of(number)), [np.full(BLOCK, number, np.uint8)])
        proofs = Proofs()
        self.agent = FakeAgent(proofs)
        self.sender = BlockSender(self.arena, self.agent, proofs, lambda: self.now)

    def ask(self, first: int, count: int, reader: str = "r", number: int = 1, **more: object) -> SentBlocks | None:
        message = SendBlocks(number, BLOCK, MODELS, tuple(name_of(one) for one in range(first, first + count)),
                             tuple(range(1, 2 * count + 1)), reader, f"{reader}/agent".encode(), 77)
        return self.sender.send(b"route", msgspec.structs.replace(message, **more))

    def begin(self, *arguments: int, **more: object) -> int:
        """Ask for what it has, let the proof end, and return the handle of the write."""
        before = len(self.agent.writes())
        assert self.ask(*arguments, **more) is None
        assert self.sender.poll() == []
        write, = self.agent.writes()[before:]
        return write

    def end(self, write: int, state: TransferState = TransferState.DONE) -> SentBlocks:
        self.agent.ends[write] = state
        (route, message), = self.sender.poll()
        assert route == b"route" and write in self.agent.released
        return message

    def leases(self) -> int:
        return len(self.arena._locks._held)


@pytest.fixture
def served() -> Iterator[Served]:
    folder = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    one = Served(folder, 8)
    yield one
    one.sender.close()
    assert one.leases() == 0 and one.agent.peers == []
    assert sorted(one.agent.released) == sorted(one.agent.posted), "each handle is released, once"
    one.arena.close()
    shutil.rmtree(folder)


def test_b104_what_is_here_is_found_up_to_the_first_that_is_not(served):
    names = tuple(map(name_of, (0, 1, 2, 99, 3)))
    assert served.sender.find(FindBlocks(5, BLOCK, MODELS, names)).blocks == 3
    assert served.sender.find(FindBlocks(5, BLOCK, (*MODELS, b"c" * 16), names)).blocks == 0, "a part of it is not here"
    assert served.sender.find(FindBlocks(5, BLOCK + 1, MODELS, names)).blocks == 0


def test_b104_a_send_is_leased_proven_written_and_reported(served):
    assert served.ask(6, 4) is None
    assert served.leases() == 4, "two blocks of two parts; the others are not here"
    assert served.agent.posted == {1: ("r", 1, False)}, "the proof comes first"
    assert served.sender.poll() == [] and served.agent.posted[2] == ("r", 4, True)
    message = served.end(2)
    held = served.arena.hold(BlockKey(MODELS[1], name_of(6)), BLOCK)
    assert len(message.checksums) == 4 and message.checksums[1] == held.header.checksum
    held.release()
    assert served.leases() == 0 and served.sender.counts["sent"] == 4
    served.end(served.begin(0, 1))
    assert [one for one in served.agent.posted.values() if not one[2]] == [("r", 1, False)], "it is proven once"


@pytest.mark.parametrize("more", [{"addresses": (1, )}, {"length": BLOCK + 1}, {"length": 0}, {"length": BLOCK - 1},
                                  {"names": (name_of(99), )}, {"agent": b"other/agent"},
                                  {"addresses": (1 << 64, 2)}], ids=str)
def test_b104_what_makes_no_sense_is_answered_with_nothing(served, more):
    assert served.ask(0, 1, **more) == SentBlocks(1, ())
    assert served.leases() == 0 and not served.agent.writes()


def test_b104_nothing_is_written_to_another_agent(served):
    served.agent.found["r"] = "somebody else"
    assert served.ask(0, 1) is None
    (_, message), = served.sender.poll()
    assert message.checksums == () and not served.agent.writes()
    del served.agent.found["r"]
    served.end(served.begin(0, 1))
    assert served.agent.adds == 2, "it was added anew"


def test_after_a_write_that_failed_the_reader_is_added_anew_when_all_have_ended(served):
    one, other = served.begin(0, 1), served.begin(1, 1)
    assert served.end(one, TransferState.FAILED).checksums == ()
    assert served.ask(2, 1) == SentBlocks(1, ()), "a write to it is open"
    assert served.end(other).checksums
    served.end(served.begin(2, 1))
    assert served.agent.adds == 2 and served.agent.peers == ["r"]


def test_b104_leases_end_though_the_write_does_not(served):
    """B104: of a reader that is stopped. It gets nothing more, and others do."""
    write = served.begin(0, 8)
    served.now += LEASE_S + 0.1
    assert served.sender.poll() == [] and served.leases() == 0
    assert served.ask(0, 1) == SentBlocks(1, ())
    served.end(served.begin(0, 1, reader="another"))
    assert served.end(write).checksums


def test_a_reader_has_so_many_sends_at_a_time(served):
    writes = [served.begin(0, 1, number=number) for number in range(MAX_READER_SENDS)]
    assert served.ask(0, 1) == SentBlocks(1, ()) and served.sender.counts["busy"] == 1
    served.end(writes[0])
    assert served.ask(0, 1) is None


def test_all_readers_have_so_many_bytes_at_a_time(served, monkeypatch):
    monkeypatch.setattr(sending, "MAX_OPEN_BYTES", 5 * BLOCK)
    write = served.begin(0, 2)
    assert served.ask(0, 1, reader="another") == SentBlocks(1, ())
    served.now += LEASE_S + 0.1
    served.sender.poll()
    assert served.ask(0, 1, reader="another") is None, "what hangs does not count"
    served.end(write)


def test_a_reader_that_does_not_answer_is_left_alone(served):
    served.agent.unreachable.add("r")
    for _ in range(3):
        assert served.ask(0, 1) == SentBlocks(1, ())
    assert served.agent.adds == 1
    served.agent.unreachable.clear()
    served.now += UNMET_S
    assert served.ask(0, 1) is None


@pytest.mark.parametrize("readers", [1, 5, 63])
def test_b104_readers_that_can_not_be_reached_take_a_small_share_of_the_thread(served, readers):
    """B104: each takes 3 s of the thread, and asks again and again, in ten minutes. A known reader is served."""
    spent = [0.0]

    def wait() -> None:
        served.now += 3.0
        spent[0] += 3.0

    served.end(served.begin(0, 1, reader="known"))
    served.agent.waits, served.agent.unreachable = wait, {f"r{number}" for number in range(readers)}
    end = served.now + 600
    while served.now < end:
        for number in range(readers):
            before, _ = served.agent.adds, served.ask(0, 1, reader=f"r{number}")
            assert served.sender.take_met() == (served.agent.adds > before)
        served.end(served.begin(0, 1, reader="known"))
        served.now += 5.0
    assert spent[0] <= 600 / sending.UNMET_PAUSE and served.agent.adds > 3
    served.agent.unreachable.clear()
    served.now += 3.0 * sending.MAX_UNMET_PAUSE
    assert served.ask(0, 1, reader="r0") is None and served.ask(0, 1, reader="new") is None, "and others, at once"
    served.sender.poll()
    for write in served.agent.writes()[-2:]:
        served.agent.ends[write] = TransferState.DONE
    served.sender.poll()


def test_of_a_large_question_the_first_blocks_that_fit_are_sent(served, monkeypatch):
    monkeypatch.setattr(sending, "MAX_OPEN_BYTES", 7 * BLOCK)
    write = served.begin(0, 8)
    assert served.ask(0, 1, reader="another") == SentBlocks(1, ())
    assert len(served.end(write).checksums) == 6, "three blocks of two parts"


def test_readers_are_bounded_and_the_idle_ones_go(served):
    busy = served.begin(0, 1, reader="busy")
    for number in range(MAX_READERS + 5):
        served.end(served.begin(0, 1, reader=f"r{number}"))
    assert len(served.agent.peers) == MAX_READERS and "busy" in served.agent.peers
    served.end(busy)


def test_what_others_make_this_engine_do_is_bounded(served, monkeypatch):
    monkeypatch.setattr(sending, "NAMES_PER_S", 10)
    sender = BlockSender(served.arena, served.agent, served.sender._proofs, lambda: served.now)
    question = FindBlocks(5, BLOCK, MODELS, tuple(map(name_of, range(8))))
    assert [sender.find(question).blocks for _ in range(4)] == [8, 8, 0, 0] and sender.counts["busy"] == 2
    served.now += 2.0
    assert sender.find(question).blocks == 8
