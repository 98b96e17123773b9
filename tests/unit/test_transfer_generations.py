# SPDX-License-Identifier: Apache-2.0
"""B105, the ranks' part of a renewal without NIXL: what a worker answers, what the ranks' answers make together, and
what of it reaches the engine."""
import ctypes

import msgspec
import pytest

from tests.fakes.transport import FakeFabric, FakeTransport, Faults
from vllm_pd.errors import TransferError
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.nixl import generations
from vllm_pd.transfer.nixl.generations import MAX_GENERATIONS, NixlGenerations
from vllm_pd.transfer.ranks.gather import (
    ENTRIES_PER_MESSAGE,
    GatheredRenewals,
    GatheredTransfer,
    RankProgress,
    encode_progress,
)
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    DestroyOlder,
    Finished,
    GenerationMade,
    MakeGeneration,
    Read,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport
from vllm_pd.transfer.transport import PeerMetadata, RanksMetadata, TransportProgress
from vllm_pd.transfer.worker import TransferWorker

BLOCKS = 4


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rank:
    """The only rank of an engine, over a fake transport."""

    def __init__(self, fabric: FakeFabric, engine: str, slow: bool = False):
        self.engine, self.memory = engine, bytearray(2 * BLOCKS * 64)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.cache = CacheDescription(layout=Layout.HEADS_FIRST, memory=Memory.DRAM, device_id=0, dtype="int8",
                                      num_blocks=BLOCKS, block_size=4, head_size=16, first_head=0, kv_heads=1,
                                      first_layer=0, layers=1, block_bytes=64, block_stride_bytes=64,
                                      planes=(base, base + BLOCKS * 64))
        own = FakeTransport(fabric, f"{engine}/0", [self.memory], self.cache)
        self.own = SlowTransport(own, EmulatedWire(), 64, fabric.clock) if slow else own
        self.worker = TransferWorker(RankedTransport(self.own, 0, 1, 1), clock=fabric.clock)

    def added(self, metadata: bytes | None = None, name: str = "") -> AddTransferPeer:
        """As a peer."""
        return AddTransferPeer(name or self.engine, RanksMetadata([metadata or self.own.metadata()]).encode())


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=[False, True], ids=["at once", "slow"])
def ranks(request, clock):
    fabric = FakeFabric(0, Faults(), clock)
    return Rank(fabric, "p", request.param), Rank(fabric, "d")


def test_b105_a_rank_says_under_which_name_and_how_it_is_reached(ranks):
    p, d = ranks
    p.worker.execute([d.added(), MakeGeneration("p~1")])
    assert p.worker.busy
    [made] = p.worker.take_progress().made
    assert (made.name, made.error) == ("p~1", "") and PeerMetadata.decode("p~1/0", made.metadata).cache == p.cache
    p.worker.execute([Write("k", "d", [1], [2], [b"n"])])
    assert p.worker.take_progress().finished[0].ok and d.worker.take_progress().notices[0].peer == "p~1/0"
    assert p.worker.take_progress() == TransferProgress()


def test_b105_d_is_written_in_the_generation_that_it_has_told_and_in_no_older_one_later(ranks):
    p, d = ranks
    d.worker.execute([MakeGeneration("d~1")])
    [made] = d.worker.take_progress().made
    p.worker.execute([d.added(made.metadata, "d~1"), Write("new", "d~1", [1], [1], [b"n"])])
    assert p.worker.take_progress().finished[0].ok
    d.worker.execute([DestroyOlder("retire")])
    assert d.worker.moving and d.worker.take_progress().finished == [Finished("retire", ok=True)]
    assert not d.worker.moving
    p.worker.execute([Write("newer", "d~1", [1], [1], [b"n"])])
    assert p.worker.take_progress().finished[0].ok


@pytest.mark.parametrize("moves,may_land", [(Write("k", "d", [1], [1], [b"n"]), True),
                                            (Read("k", "d", [1], [1]), False)])
def test_b105_what_is_open_in_an_older_generation_ends_before_it(clock, moves, may_land):
    fabric = FakeFabric(0, Faults(delay_s=1.0), clock)
    p, d = Rank(fabric, "p"), Rank(fabric, "d")
    p.worker.execute([d.added(), moves, MakeGeneration("p~1"), msgspec.structs.replace(moves, key="new"),
                      DestroyOlder("retire")])
    old, end = p.worker.take_progress().finished
    assert (old.key, old.ok, old.may_land) == ("k", False, may_land) and end == Finished("retire", ok=True)
    clock.now_s = 5.0
    assert [(end.key, end.ok) for end in p.worker.take_progress().finished] == [("new", True)]


def test_b105_where_nothing_is_left_to_destroy_that_has_ended_at_once(ranks):
    p, _ = ranks
    p.worker.execute([MakeGeneration("p~1"), DestroyOlder("retire")])
    assert [end.key for end in p.worker.take_progress().finished] == ["retire"]
    p.worker.execute([DestroyOlder("retire")])
    assert p.worker.take_progress().finished == [Finished("retire", ok=True)]


@pytest.mark.parametrize("error,text", [(TransferError("no memory"), "no memory"), (RuntimeError(), "RuntimeError()")])
def test_b105_a_rank_that_cannot_says_why_and_goes_on(ranks, monkeypatch, error, text):
    p, d = ranks

    def broken(*_) -> None:
        raise error

    for name in ("renew", "retire"):
        monkeypatch.setattr(p.own, name, broken)
    p.worker.execute([d.added(), MakeGeneration("p~1"), DestroyOlder("retire"), Write("k", "d", [1], [1], [b"n"])])
    progress = p.worker.take_progress()
    assert progress.made == [GenerationMade("p~1", error=text)]
    assert Finished("retire", ok=False, error=text) in progress.finished
    assert [end.key for end in progress.finished if end.ok] == ["k"] and not p.worker.moving


def test_b105_the_engine_has_an_answer_when_every_rank_has(clock):
    renewals = GatheredRenewals(3)
    assert renewals.add(2, [GenerationMade("e~1", b"2")]) == renewals.add(0, [GenerationMade("e~1", b"0")]) == []
    [made] = renewals.add(1, [GenerationMade("e~1", b"1")])
    assert made.name == "e~1" and RanksMetadata.decode("e~1", made.metadata).ranks == [b"0", b"1", b"2"]
    assert renewals.add(0, [GenerationMade("e~2", b"0")]) == [], "the next one begins anew"


def test_b105_an_error_of_one_rank_is_that_of_the_engine_once_all_have_answered():
    renewals = GatheredRenewals(2)
    for again in range(2):
        assert renewals.add(0, [GenerationMade("e~1", error="full")]) == [], again
        [made] = renewals.add(1, [GenerationMade("e~1", b"1")])
        assert made == GenerationMade("e~1", error="rank 0: full")


class Transfers:
    """Of the only rank of an engine."""
    moving, youngest_s, busy = False, 0.0, False

    def __init__(self, progress: TransferProgress) -> None:
        self.progress = progress

    def take_progress(self) -> TransferProgress:
        return self.progress


@pytest.mark.parametrize("gathered", [False, True])
def test_b105_the_engine_of_one_rank_has_the_metadata_of_all_ranks(gathered):
    own = Transfers(TransferProgress(made=[GenerationMade("e~1", b"m"), GenerationMade("e~2", error="full")]))
    transfers = GatheredTransfer(own, {}) if gathered else own
    engine, woken = EngineTransfer(own, transfers if gathered else None), []
    engine._wake = lambda: woken.append(True)
    engine.deliver(transfers.take_progress())
    one, other = engine.take_progress().made
    assert RanksMetadata.decode("e~1", one.metadata).ranks == [b"m"] and other.error == "rank 0: full" and woken
    assert engine.take_progress().made == []


def test_b105_answers_reach_an_engine_in_another_process():
    many = [GenerationMade(f"e~{number}", b"m" * number, "why" * number) for number in range(ENTRIES_PER_MESSAGE + 1)]
    messages = [msgspec.msgpack.decode(message, type=RankProgress)
                for message in encode_progress(TransferProgress(made=many))]
    read = [made for message in messages for made in message.made]
    assert [made.name for made in read] == [made.name for made in many] and read[9] == many[9]
    assert all(len(made.error) <= 500 for made in read) and [len(message.made) for message in messages] == [256, 1]
    for request in (MakeGeneration("e~1"), DestroyOlder("retire")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode([request]), type=list[TransferRequest]) == [request]


# `NixlGenerations`, over transports that note what they are to do.


class OneTransport:
    """Of a generation, as NixlTransport."""
    needs_polls, refuses_to_go = True, False

    def __init__(self, name, caches, description, progress_thread, host) -> None:
        if name in self.broken:
            raise TransferError(f"no {name}")
        self.name, self.added, self.open, self.closed = name, {}, [], []
        self.all.append(self)

    def metadata(self) -> bytes:
        return self.name.encode()

    def add_peer(self, name, metadata, heads=None) -> None:
        self.added[name] = (metadata, heads)

    def drop_peer(self, name) -> None:
        self.added.pop(name, None)

    def write(self, key, *arguments) -> None:
        self.open.append(key)

    read = write

    def cancel(self, key) -> None:
        pass

    def is_open(self, key) -> bool:
        return key in self.open

    def live_handles(self) -> int:
        return len(self.open)

    def poll(self) -> TransportProgress:
        ended, self.open = (self.open, []) if self.closed else ([], self.open)
        return TransportProgress([Finished(key, ok=False) for key in ended], [])

    def close(self, timeout_s: float, reads_end: bool = False) -> bool:
        self.closed.append((timeout_s, reads_end))
        return False

    @property
    def is_gone(self) -> bool:
        return bool(self.closed) and not self.refuses_to_go


@pytest.fixture
def made(monkeypatch):
    """A `NixlGenerations`; `all` are the transports that it has made."""
    class Recorded(OneTransport):
        all, broken = [], set()

    monkeypatch.setattr(generations, "NixlTransport", Recorded)
    cache = type("Cache", (), {"memory": Memory.DRAM})
    made = NixlGenerations("e/0", [], cache)
    made.all, made.broken = Recorded.all, Recorded.broken
    return made


def test_b105_a_peer_is_met_with_the_first_transfer_in_a_generation(made):
    made.add_peer("d", b"m", range(2))
    made.renew("e~1/0")
    first, second = made.all
    assert second.added == {}, "whoever is gone costs nothing"
    made.write("k", "d", [1], [1], b"")
    assert second.added == first.added == {"d": (b"m", range(2))} and (first.open, second.open) == ([], ["k"])
    made.drop_peer("d")
    made.read("r", "d", [1], [1])
    assert second.added == first.added == {}


def test_b105_an_agent_that_is_not_gone_is_no_fence(made):
    made.write("k", "d", [1], [1], b"")
    made.renew("e~1/0")
    first = made.all[0]
    first.refuses_to_go = True
    made.retire("retire")
    one, end = made.poll().finished
    assert one.key == "k" and not end.ok and "still in use" in end.error and first.closed == [(0.0, True)]
    made.retire("retire")
    assert not made.poll().finished[0].ok
    first.refuses_to_go = False
    made.retire("retire")
    assert made.poll().finished == [Finished("retire", ok=True)] and made.live_handles() == 0


def test_b105_a_generation_that_cannot_be_made_changes_nothing(made):
    made.broken.add("e~1/0")
    for _ in range(2 * MAX_GENERATIONS):
        with pytest.raises(TransferError, match="no e~1/0"):
            made.renew("e~1/0")
    assert made.metadata() == b"e/0" and made.newest is made.all[0] and len(made.all) == 1


def test_b105_there_is_a_bound_on_generations_and_a_name_that_is_repeated_does_not_count(made):
    for number in range(1, MAX_GENERATIONS):
        for _ in range(2):
            assert made.renew(f"e~{number}/0") == f"e~{number}/0".encode()
    with pytest.raises(TransferError, match="have not been destroyed"):
        made.renew("e~9/0")
    assert len(made.all) == MAX_GENERATIONS
    made.retire("retire")
    assert made.renew("e~9/0") == b"e~9/0"


def test_b20_closing_shares_the_time_and_nothing_is_made_afterwards(made):
    made.renew("e~1/0")
    assert not made.close(timeout_s=0.0) and [one.closed for one in made.all] == [[(0.0, False)]] * 2
    with pytest.raises(TransferError, match="closed"):
        made.renew("e~2/0")
