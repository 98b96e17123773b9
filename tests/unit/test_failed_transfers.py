# SPDX-License-Identifier: Apache-2.0
"""B21, B22, B27, B34: a transfer whose error comes while a part of it is under way, from the library to D's fence.

`LateAgent` stands for NIXL where it is worst: the first half of a transfer lands, the library reports an error, its
handle is released, and the rest lands when the test says so.
"""
import contextlib
import ctypes
import itertools
import logging
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch

from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.errors import TransferError
from vllm_pd.handover.engine import Handover, close_engine
from vllm_pd.handover.jobs import PrefillCapacity
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.prefill import PrefillHandover
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    DropPeer,
    Fallback,
    FallbackReason,
    HoldEnded,
    Prefill,
    ReadHold,
    Released,
    RenewTransport,
    ToBroker,
    ToDecode,
)
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.nixl import generations, kept
from vllm_pd.transfer.nixl import transport as nixl
from vllm_pd.transfer.nixl.agent import TransferState
from vllm_pd.transfer.nixl.identity import DIGEST_BYTES
from vllm_pd.transfer.ranks.gather import GatheredEnds
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    DropTransferPeer,
    Finished,
    Read,
    TransferProgress,
    Write,
)
from vllm_pd.transfer.transport import RanksMetadata, rank_name
from vllm_pd.transfer.worker import TransferWorker

BLOCK_SIZE, BLOCK_BYTES, BLOCKS = 4, 32, 8
MOST_READS = 8  # of prompts of TOKENS, as half of P's pool has room for
TOKENS = list(range(10, 18))  # two blocks
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "f", "f", BLOCK_SIZE, 1, 1, 64, "hnd")
P = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:1", FINGERPRINT)
D = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:2", FINGERPRINT)


class LateAgent:
    """As `NixlAgent`. `fails`: what `check` finds of the transfers that are open. `posted` counts transfers, or their
    waves, without what proves a peer: that is read at once (`transfer.nixl.identity`)."""
    identities: ClassVar[set[int]] = set()  # where they are, of all agents

    def __init__(self, name: str, progress_thread: bool, host: str) -> None:
        self.name, self.listens = name, ()
        self.fails: TransferState | None = TransferState.FAILED
        self.posted = 0
        self.refuses = False  # to make a further wave
        self._numbers = itertools.count()
        self._lists: dict[int, np.ndarray] = {}
        self._copies: dict[int, list[tuple[int, int, int]]] = {}  # of each transfer: to, from, bytes
        self._late: list[tuple[int, int, int]] = []
        self._proofs: set[int] = set()

    def land(self) -> None:
        """What is left of all transfers arrives."""
        late, self._late = self._late, []
        for copy in late:
            ctypes.memmove(*copy)

    def metadata(self) -> bytes:
        return self.name.encode()

    def register(self, regions: list, memory: Memory) -> None:
        self.identities.update(address for address, size, _ in regions if size == DIGEST_BYTES)

    def deregister(self, registered: object) -> None:
        pass

    def destroy(self) -> bool:
        return True

    def add_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_peer(self, name: str) -> None:
        pass

    def prepare(self, rows: np.ndarray, memory: Memory, peer: str | None = None) -> int:
        number = next(self._numbers)
        self._lists[number] = np.array([(base + block * stride, size) for base, size, _, stride, count in rows.tolist()
                                        for block in range(count)])
        return number

    def release_prepared(self, prepared: int) -> None:
        del self._lists[prepared]

    def make_write(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray,
                   notice: bytes) -> int:
        return self._make(self._lists[remote][remote_indices], self._lists[local][local_indices])

    def make_read(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray) -> int:
        return self._make(self._lists[local][local_indices], self._lists[remote][remote_indices])

    def make_unprepared(self, local: np.ndarray, local_memory: Memory, remote: np.ndarray, remote_memory: Memory,
                        peer: str, notice: bytes | None) -> int:
        if remote[0][0] in self.identities:
            number = self._make(local, remote)
            self._proofs.add(number)
            return number
        if self.refuses and self.posted:
            raise TransferError("it can't be made")
        return self._make(*((local, remote) if notice is None else (remote, local)))

    def _make(self, to: np.ndarray, source: np.ndarray) -> int:
        number = next(self._numbers)
        self._copies[number] = [(a, b, size)
                                for (a, size, *_), (b, *_) in zip(to.tolist(), source.tolist(), strict=True)]
        return number

    def post(self, handle: int) -> TransferState:
        if handle in self._proofs:
            for copy in self._copies[handle]:
                ctypes.memmove(*copy)
            return TransferState.DONE
        self.posted += 1
        copies = self._copies[handle]
        half = len(copies) // 2
        for copy in copies[:half]:
            ctypes.memmove(*copy)
        self._late += copies[half:]
        return TransferState.OPEN

    def check(self, handle: int) -> TransferState:
        assert handle in self._copies
        return self.fails

    def release(self, handle: int) -> None:
        """As NIXL's, it stops nothing."""
        del self._copies[handle]

    def send_notice(self, peer: str, notice: bytes) -> None:
        pass

    def take_notices(self) -> dict[str, list[bytes]]:
        return {}


class CacheRank:
    """A cache of BLOCKS blocks, all bytes of which are `value`, and its transport."""

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.bytes = np.full((BLOCKS, BLOCK_BYTES), value, dtype=np.uint8)
        cache = CacheDescription(
            layout=Layout.HEADS_FIRST, memory=Memory.DRAM, device_id=0, dtype="float32", num_blocks=BLOCKS,
            block_size=BLOCK_SIZE, head_size=1, first_head=0, kv_heads=1, first_layer=0, layers=1,
            block_bytes=BLOCK_BYTES // 2, block_stride_bytes=BLOCK_BYTES,
            planes=(self.bytes.ctypes.data, self.bytes.ctypes.data + BLOCK_BYTES // 2))
        self.transport = nixl.NixlTransport(name, [torch.from_numpy(self.bytes)], cache)
        self.worker = TransferWorker(self.transport)

    @property
    def agent(self) -> LateAgent:
        return self.transport._agent

    def knows(self, *others: "CacheRank") -> None:
        self.worker.execute([AddTransferPeer(other.name, other.transport.metadata()) for other in others])


@pytest.fixture(autouse=True)
def late(monkeypatch):
    monkeypatch.setattr(nixl, "NixlAgent", LateAgent)


@pytest.fixture
def ranks():
    p, d = CacheRank("p", 1), CacheRank("d", 2)
    p.knows(d)
    d.knows(p)
    return p, d


MOVES = [Write("k", "d", [1, 2], [3, 4], [b"n"]), Read("k", "d", [1, 2], [3, 4])]


@pytest.mark.parametrize("request_", MOVES, ids=["write", "read"])
@pytest.mark.parametrize("before", [[], [CancelTransfer("k")], [DropTransferPeer("d")]],
                         ids=["wanted", "cancelled", "dropped"])
def test_b27_the_end_of_a_transfer_that_failed_says_that_it_may_land(ranks, request_, before):
    p, d = ranks
    p.worker.execute([request_, *before])
    [end] = p.worker.take_progress().finished
    assert not end.ok and end.may_land and p.worker.live_handles() == 0
    target = d if isinstance(request_, Write) else p
    seen = target.bytes.copy()
    p.agent.land()
    assert (target.bytes != seen).any(), "the fake does not do what this is about"
    assert not p.worker.close(), "nobody may take the end of this transport for the end of its writes"


@pytest.mark.parametrize("request_", MOVES, ids=["write", "read"])
def test_b27_nothing_is_posted_to_a_broken_peer_until_it_is_added_anew(ranks, request_):
    p, d = ranks
    other = CacheRank("other", 3)
    p.knows(other)
    p.worker.execute([request_])
    assert p.worker.take_progress().finished[0].may_land
    p.agent.fails = TransferState.DONE
    p.knows(d)  # it was never dropped
    for again in MOVES:
        p.worker.execute([again])
        [end] = p.worker.take_progress().finished
        assert not end.ok and not end.may_land and "new transfer agents" in end.error and p.agent.posted == 1
    p.worker.execute([Write("k", "other", [1], [1], [b"n"])])
    assert p.worker.take_progress().finished[0].ok, "another peer's transfers go on"
    p.worker.execute([DropTransferPeer("d")])
    p.knows(d)
    p.worker.execute([request_])
    assert p.worker.take_progress().finished[0].ok


def test_b27_a_transfer_that_could_not_be_made_and_one_that_has_ended_well_land_no_more(ranks):
    p, _ = ranks
    p.agent.fails = TransferState.DONE
    p.worker.execute([Write("good", "d", [1], [1], [b"n"]), Write("bad", "d", [BLOCKS], [1], [b"n"]),
                      Write("nobody", "x", [1], [1], [b"n"])])
    assert {(end.key, end.ok, end.may_land) for end in p.worker.take_progress().finished} == {
        ("bad", False, False), ("good", True, False), ("nobody", False, False)}
    assert p.worker.close()


@pytest.mark.parametrize("request_", MOVES, ids=["write", "read"])
def test_b27_of_a_wave_that_could_not_be_made_nothing_lands(ranks, request_, monkeypatch):
    """The one before has ended, and the peer is as good as before."""
    monkeypatch.setattr(nixl, "by_token", lambda *_: True)
    monkeypatch.setattr(nixl, "WAVE_DESCRIPTORS", 1)
    p, other = ranks[0], CacheRank("other", 3)
    p.agent.fails, p.agent.refuses = TransferState.DONE, True
    p.knows(other)
    p.worker.execute([msgspec.structs.replace(request_, peer="other")])
    [end] = p.worker.take_progress().finished
    assert not end.ok and not end.may_land and "can't be made" in end.error and p.agent.posted == 1
    p.agent.refuses = False
    p.worker.execute([msgspec.structs.replace(request_, peer="other")])
    [end] = [*p.worker.take_progress().finished, *p.worker.take_progress().finished]
    assert end.ok and p.agent.posted == 3 and p.worker.close()


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dead"])
def test_b27_with_its_peers_death_a_transfer_that_failed_lands_no_more(ranks, dies):
    """A peer that is broken is dropped when it is dead."""
    p, _ = ranks
    p.worker.execute([MOVES[0]])
    assert p.worker.take_progress().finished[0].may_land
    p.worker.execute([DropTransferPeer("d")] * dies)
    assert p.worker.close() is dies


def test_b20_an_engine_that_closes_blames_no_peer_for_what_is_open(ranks, caplog):
    logging.getLogger("vllm.pd").propagate = True
    p, _ = ranks
    p.agent.fails = TransferState.OPEN
    p.worker.execute([MOVES[0]])
    assert not p.transport.close(timeout_s=0.0)
    assert p.transport.poll().finished[0].may_land and "none begins until" not in caplog.text


@pytest.mark.parametrize("works", [True, False])
def test_b22_caches_are_kept_once_peers_can_reach_them(monkeypatch, works):
    def make(*arguments, **options):
        if not works:
            raise TransferError("no agent")

    monkeypatch.setattr(generations, "NixlGenerations", make)
    monkeypatch.setattr(kept, "_caches", {})
    with contextlib.suppress(TransferError):
        TransportChoice().make("e/0", [], None, True)
    assert list(kept._caches) == ["e/0"] * works


def test_b27_one_part_and_one_rank_are_enough(ranks):
    """What a rank sends in parts, or an engine from several ranks, may land if any of it may."""
    ends = GatheredEnds(2)
    assert ends.add(0, [Finished("k", ok=False, error="failed", may_land=True)]) == []
    [end] = ends.add(1, [Finished("k", ok=True)])
    assert not end.ok and end.may_land
    p = CacheRank(rank_name("e", 0), 1)
    halves = [CacheRank(rank_name("f", rank), 2) for rank in range(2)]
    ranked = RankedTransport(p.transport, 0, 1, 1)
    ranked.add_peer("f", RanksMetadata([half.transport.metadata() for half in halves]).encode())
    ranked._engines["f"].targets[:] = [half.name for half in halves]
    ranked._engines["f"].known[:] = [half.name for half in halves]
    p.knows(halves[1])
    ranked.write("k", "f", [1], [1], b"n")
    [end] = ranked.poll().finished
    assert not end.ok and end.may_land


# With the protocol.


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Jobs(PrefillHandover):
    """Of an engine whose requests are their job's attempt, and which reads no prefix by itself. As V1's binding, it
    says once of a request that was parked, and is aborted, that it was."""

    @property
    def has_jobs(self):
        return bool(self._jobs)

    def _add_request(self, job):
        return job.prefill.attempt

    def park(self, attempt):
        self.read_prefix(attempt, [5, 6], 0)
        self.parked = {*getattr(self, "parked", ()), attempt}

    def _abort_request(self, job):
        if job.prefill.attempt in getattr(self, "parked", ()):
            self.parked.remove(job.prefill.attempt)
            self.aborted(job.prefill.attempt)

    def lose(self, attempt, progress):
        """The engine itself ends the parked request."""
        self.parked.remove(attempt)
        self.aborted(attempt)
        self.lost(attempt, "its request ended", progress)

    def _is_waiting(self, job):
        return False

    _is_ready = _is_waiting

    def _tokens_left(self, prompt):
        return prompt.tokens

    def _cached_tokens(self, job):
        return 0

    _by_priority = False


class Steps(Handover):
    """What P's engine collects between two steps. It decodes nothing."""

    def __init__(self, pair: "Pair") -> None:
        agent = SimpleNamespace(protocol=pair.p, error=None)
        super().__init__(pair.config, agent, SimpleNamespace(take_progress=lambda: TransferProgress([], [], [])),
                         PDMetrics("m"))
        self.remote_prefills = SimpleNamespace(waiting_for_peers=False, give_back=lambda progress, stalled: None,
                                               quarantined_blocks=3)
        self.prefill_jobs = pair.jobs

    def _to_ranks(self, requests: list[object]) -> None:
        """It never gets new transfer agents."""

    def _load(self) -> m.Load:
        return m.Load()

    def _has_running(self) -> bool:
        return False


class Pair:
    """P and D: the real protocol of both, P's jobs, and both transports over `LateAgent`."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ranks = CacheRank("p", 1), CacheRank("d", 2)
        settings = {"broker": "tcp://127.0.0.1:9"}
        self.config = PDConfig.parse("kv_producer", {**settings, "prefix_reads": "always"})
        self.p = PeerProtocol(self.config, P, self.ranks[0].transport.metadata(), self.clock)
        self.d = PeerProtocol(PDConfig.parse("kv_consumer", {**settings, "max_local_prefill_tokens": "auto"}), D,
                              self.ranks[1].transport.metadata(), self.clock)
        capacity = PrefillCapacity(BlockRows(BLOCK_SIZE), 100, 1, 8, True, 64, 4 * MOST_READS)
        self.jobs = Jobs(self.config, self.p.prefill, capacity, PDMetrics("m"), StepSpeed())
        self.progress = Progress()
        self.events: list[object] = []  # of D
        self.dropped: list[object] = []  # of P
        self.holds_ended: list[object] = []
        self.lost: set[type] = set()  # messages of these types between P and D do not arrive
        self.p.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, [P, D], 0))
        self.d.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, [P, D], 0))
        self.pump()

    def pump(self) -> None:
        """Deliver all messages, and what P's engine gets."""
        moved = True
        while moved:
            moved = False
            for us, them in ((self.p, self.d), (self.d, self.p)):
                while (action := us.control.poll_transmit()) is not None:
                    moved = True
                    if isinstance(action, ToBroker):
                        if isinstance(action.message, m.Put) and "p" not in action.message.job.avoid:
                            self.p.control.receive(MessageSource.BROKER, "b", m.Offer(action.message.job, 1))
                        elif isinstance(action.message, m.Register):
                            us.control.receive(MessageSource.BROKER, "b", m.Heard("b", 0))
                    elif hasattr(action, "message") and type(action.message) not in self.lost:
                        source = MessageSource.PREFILL if isinstance(action, ToDecode) else MessageSource.DECODE
                        them.control.receive(source, us.member.incarnation, action.message)
            while (event := self.p.poll_event()) is not None:
                moved = True
                self.dropped += [event] * isinstance(event, DropPeer)
                self.holds_ended += [event] * isinstance(event, HoldEnded)
                self.jobs.handle(event, self.progress)
            self.events += [event for event in iter(self.d.poll_event, None) if not isinstance(event, RenewTransport)]

    def transfer(self, requests: list) -> None:
        """P's rank runs these, and its engine sees what comes of it."""
        rank = self.ranks[0]
        rank.worker.execute(requests)
        ran = rank.worker.take_progress()
        for refusal in ran.refused:
            self.jobs.refused(refusal, self.progress)
        for end in ran.finished:
            self.jobs.report_end(end)
            self.pump()
            self.jobs.ended(end, self.progress)
        self.jobs.free_unproven(self.progress)
        self.pump()

    def passes(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for side in (self.p, self.d):
                side.control.handle_timeout()
            self.pump()

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


@pytest.fixture
def pair():
    return Pair()


def granted(pair, cached_blocks=0):
    attempt = pair.d.decode.next_attempt("r")
    pair.d.decode.submit(attempt, TOKENS, [3, 4], cached_blocks)
    pair.pump()
    assert pair.jobs._jobs[attempt].prefill.block_ids == [3, 4][cached_blocks:]
    return attempt


def drains(side, pair):
    """Whether this engine has left once it is drained and the broker has listed it so."""
    side.operators.drain()
    side.set_load(m.Load())
    listed = msgspec.structs.replace(side.member, draining=True)
    side.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [listed], 0))
    pair.passes(1)
    return side.state.left


@pytest.fixture
def failed(pair):
    """The attempt whose write has failed."""
    attempt = granted(pair)
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    return attempt


def test_b34_d_reuses_nothing_while_a_write_that_failed_may_land(pair, failed):
    """D falls back at once, in other blocks; those of the attempt stay its own, until P is dead."""
    d = pair.ranks[1]
    assert [(event.attempt, event.reason) for event in pair.events] == [(failed, FallbackReason.FAILED)]
    pair.passes(100)
    assert pair.kinds() == [Fallback]
    pair.ranks[0].agent.land()
    assert (d.bytes[[3, 4]] == 1).any() and (d.bytes[[0, 1, 2, 5, 6, 7]] == 2).all()
    pair.d.deaths.peer_dead("p")
    pair.pump()
    assert pair.kinds() == [Fallback, Released] and pair.d.operators.open_attempts() == []


def test_b34_a_d_that_does_not_hear_of_it_falls_back_with_the_lease(pair):
    """The message may be lost, and an older D does not know it."""
    pair.lost = {m.GaveUp}
    attempt = granted(pair)
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    assert pair.events == []
    pair.passes(100)
    assert [(event.attempt, event.reason) for event in pair.events] == [(attempt, FallbackReason.LEASE)]


def test_b20_p_frees_at_once_what_it_sent_and_its_job_until_d_is_dead(pair, failed):
    assert pair.progress.finished_transfers == [failed] and not pair.jobs.has_jobs
    assert pair.p.operators.open_attempts() == [failed] and "d" in pair.p.deaths.watched_peers().busy
    pair.p.prefill.failed(failed, "again")
    pair.p.prefill.ended(failed)
    pair.passes(5)
    assert pair.p.operators.open_attempts() == [failed] and pair.p.operators.totals()["prefill_unproven"] == 1
    assert pair.dropped == []
    pair.p.deaths.peer_dead("d")
    pair.pump()
    assert pair.p.operators.open_attempts() == [] and pair.dropped == [DropPeer("d")]


def test_b20_of_a_d_that_is_known_to_be_dead_a_failure_is_the_end(pair):
    attempt = granted(pair)
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    requests = pair.jobs.take_requests(pair.progress)
    pair.p.deaths.peer_dead("d")
    pair.transfer(requests)
    assert pair.p.operators.open_attempts() == [] and pair.dropped == [DropPeer("d")]
    assert pair.progress.finished_transfers == [attempt] and not pair.jobs.has_jobs


# Peers that P's transport could not add.


@pytest.fixture
def unadded(pair):
    """The attempts that P had when its rank could not add D: one that is computed, one that reads its beginning, one
    that is being computed, and one that waits for its turn."""
    computed, reading, computing = granted(pair), parked(pair), granted(pair)
    pair.jobs._batch_tokens = len(TOKENS)
    attempts = [computed, reading, computing, granted(pair)]
    assert pair.jobs.computing == [computed, computing] and pair.jobs.queued == [attempts[3]]
    pair.ranks[0].agent.add_peer = refuse_to_add
    pair.jobs.computed(computed, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    del pair.ranks[0].agent.add_peer
    return attempts


def refuse_to_add(metadata):
    raise TransferError("no descriptor is left")


def test_b27_jobs_of_a_d_that_could_not_be_added_go_back_at_once(pair, unadded):
    """Those that P has, and those that are offered later: nothing is computed for them."""
    assert not pair.jobs.has_jobs and sorted(pair.progress.finished_transfers, key=str) == unadded
    assert pair.kinds() == [Fallback, Released] * 4
    assert {event.peer for event in pair.events if isinstance(event, Fallback)} == {"p"}
    assert any("no descriptor is left" in getattr(event, "detail", "") for event in pair.events)
    pair.events.clear()
    pair.d.decode.submit(pair.d.decode.next_attempt("r"), TOKENS, [5, 6], 0)
    pair.pump()
    assert pair.kinds() == [Fallback, Released] and not pair.jobs.has_jobs
    assert "could not add" in pair.events[0].detail
    assert pair.p.operators.open_attempts() == pair.d.operators.open_attempts() == []
    assert pair.d.operators.degraded() is None, "they are not parted"


def test_b27_a_d_that_could_not_be_added_is_added_again_after_a_pause(pair, unadded):
    """With its ranks' state of before gone. Its jobs are computed and written as any."""
    pair.transfer(pair.jobs.take_requests(pair.progress))  # the cancel of a read that has ended
    pair.passes(PrefillLimits().add_retry_s - 1)
    assert pair.dropped == [] and not pair.jobs.has_requests
    pair.passes(1)
    assert pair.dropped == [DropPeer("d")]
    pair.ranks[0].agent.fails = TransferState.DONE
    attempt = granted(pair)
    requests = pair.jobs.take_requests(pair.progress)
    assert [type(request) for request in requests] == [DropTransferPeer, AddTransferPeer]
    pair.transfer(requests)
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    assert pair.p.operators.totals()["prefill_sent"] == 1 and pair.p.operators.open_attempts() == []


def test_b27_a_p_that_could_not_add_any_d_says_so_and_why(pair, unadded):
    """Where an operator looks: /pd/status, `vllm-pd status`, vllm:pd_degraded."""
    degraded = pair.p.operators.degraded()
    assert degraded.reason is DegradedReason.PEER and "add decode engine d: no descriptor is left" in degraded.detail
    status = pair.p.operators.status(0)
    assert status.degraded == f"peer: {degraded.detail}" and status.gauges["unadded"] == 1
    other = msgspec.structs.replace(D, incarnation="d2")
    pair.p.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [P, D, other], 0))
    pair.p.control.receive(MessageSource.DECODE, "d2", m.HelloReply(other, b""))
    assert pair.p.operators.degraded() is None, "there is one that it can work with"
    assert pair.p.operators.counts()["unadded"] == 1
    pair.p.prefill.peer_unadded("d2", "another reason")
    assert pair.p.operators.degraded() is not None and pair.p.operators.counts()["unadded"] == 2
    pair.transfer(pair.jobs.take_requests(pair.progress))
    pair.passes(PrefillLimits().add_retry_s)
    pair.ranks[0].agent.fails = TransferState.DONE
    pair.transfer(pair.jobs.take_requests(pair.progress))
    assert pair.p.operators.degraded() is not None, "that may fail as before"
    pair.passes(PrefillLimits().add_s)
    assert pair.p.operators.degraded() is None and pair.p.operators.counts()["unadded"] < 2


def test_b81_a_transports_reason_of_any_length_fits_a_status(pair):
    granted(pair)
    pair.p.prefill.peer_unadded("d", "x" * 10_000)
    status = pair.p.operators.status(0)
    assert "xxx" in status.degraded
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=m.StatusReply) == status


def test_b102_a_d_that_could_not_be_added_reads_what_is_held_for_it(pair, unadded):
    """Its reads need nothing of P's transport."""
    hold = m.Attempt("p", "h", 1)
    assert pair.p.prefill.hold(hold, token_digest(TOKENS), [1, 2])
    pair.d.decode.claim_hold(pair.d.decode.next_attempt("r"), hold, token_digest(TOKENS), [5, 6], 0, 60.0)
    pair.pump()
    assert isinstance(pair.events[-1], ReadHold)


def parked(pair):
    attempt = granted(pair, cached_blocks=1)
    pair.jobs.park(attempt)
    return attempt


@pytest.fixture
def unread(pair):
    """The attempt whose prefix P could not read."""
    attempt = parked(pair)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    return attempt


@pytest.mark.parametrize("dies", ["before", "after"])
def test_b34_p_reuses_nothing_that_a_read_which_failed_may_fill(pair, dies):
    """P's read of D's prefix: the job's request is given up, its blocks stay set aside until D is dead."""
    attempt = parked(pair)
    requests = pair.jobs.take_requests(pair.progress)
    if dies == "before":
        pair.p.deaths.peer_dead("d")
    pair.transfer(requests)
    if dies == "after":
        pair.passes(30)
        assert not pair.progress and not pair.jobs.has_jobs and not pair.jobs.sending and not pair.jobs.parked
        assert not pair.jobs.has_requests, "there is nothing to cancel"
        pair.ranks[0].agent.land()
        pair.p.deaths.peer_dead("d")
        pair.jobs.free_unproven(pair.progress)
        pair.pump()
    assert pair.progress.finished_transfers == [attempt] and pair.dropped == [DropPeer("d")]
    assert not pair.jobs.has_jobs and pair.p.operators.open_attempts() == []


def test_b20_reads_that_failed_take_no_place_of_other_jobs(pair):
    attempts = [parked(pair) for _ in range(pair.config.max_prefill_jobs)]
    pair.jobs.set_credits()
    assert pair.p._core.credits.jobs == 0
    pair.transfer(pair.jobs.take_requests(pair.progress))
    pair.jobs.set_credits()
    assert pair.p._core.credits.jobs == len(attempts) and pair.p.operators.counts()["prefill_jobs"] == 0


def test_b20_reads_that_may_fail_leave_blocks_for_others(pair):
    """Not more than a part of the pool, for it may be long until their peers are dead."""
    def may_read():
        return pair.jobs.wants_prefix(granted(pair, cached_blocks=1), 0)

    for _ in range(MOST_READS):
        assert may_read()
        pair.jobs.park(list(pair.jobs._jobs)[-1])
    assert not may_read() and pair.jobs.unproven_blocks == 0
    pair.transfer(pair.jobs.take_requests(pair.progress))
    job = list(pair.jobs._jobs)[-1]
    assert not pair.jobs.wants_prefix(job, 0) and pair.jobs.unproven_blocks == 2 * MOST_READS
    pair.p.deaths.peer_dead("d")
    pair.jobs.free_unproven(pair.progress)
    assert pair.jobs.wants_prefix(job, 0) and pair.jobs.unproven_blocks == 0


def test_b20_a_death_that_is_seen_while_the_engine_collects_frees_in_the_same_turn(pair, unread):
    """Its event is among those, and nothing would wake the engine again."""
    poll = pair.p.poll_event
    dies = iter([lambda: pair.p.deaths.peer_dead("d")])
    pair.p.poll_event = lambda: (next(dies, lambda: None)(), poll())[1]
    steps = Steps(pair)
    steps._collect()
    assert steps._progress.finished_transfers == [unread] and not pair.p.control.announce()


def test_b34_both_halves_of_an_engine_know_what_is_set_aside(pair, unread):
    """So that they set aside no more than `max_parked_fraction` of the pool together."""
    steps = Steps(pair)
    steps._collect()
    assert steps.remote_prefills.unproven_blocks == 2 and pair.jobs.quarantined_blocks == 3


def test_b20_reads_count_what_decode_engines_have_claimed(pair):
    hold, blocks = pair.p.decode.next_attempt("h"), list(range(2 * MOST_READS - 1))
    assert pair.p.prefill.hold(hold, b"digest", blocks)
    assert pair.jobs.wants_prefix(granted(pair, cached_blocks=1), 0)
    pair.d.decode.claim_hold(pair.d.decode.next_attempt("r"), hold, b"digest", blocks, 0, 60.0)
    pair.pump()
    assert pair.p.prefill.lasting_hold_blocks() == 0, "the read has just begun"
    pair.clock.now += 2.0
    pair.p.control.handle_timeout()
    assert pair.p.prefill.lasting_hold_blocks() == len(blocks)
    assert not pair.jobs.wants_prefix(granted(pair, cached_blocks=1), 0)


def test_b20_reads_count_what_the_other_half_has_in_quarantine(pair):
    pair.jobs.quarantined_blocks = 2 * MOST_READS - 2
    assert pair.jobs.wants_prefix(granted(pair, cached_blocks=1), 0)
    pair.jobs.quarantined_blocks += 1
    assert not pair.jobs.wants_prefix(granted(pair, cached_blocks=1), 0)


@pytest.mark.parametrize("lasting, has_room", [(0, True), (29, True), (30, False)])
def test_b10_a_job_that_would_wait_for_a_death_is_refused_at_once(pair, lasting, has_room):
    """Of 32 blocks, of which one is nobody's, it needs 2. Its decode engine tries another prefill engine."""
    pair.jobs.quarantined_blocks = lasting
    pair.d.decode.submit(pair.d.decode.next_attempt("r"), TOKENS, [3, 4], 0)
    pair.pump()
    assert (pair.kinds() == []) is has_room and pair.jobs.has_jobs is has_room
    if not has_room:
        assert "set aside" in pair.events[0].detail


def test_b34_what_may_land_is_kept_whatever_the_scheduler_raises(pair):
    attempt = parked(pair)
    pair.jobs._abort_request = lambda job: 1 / 0
    with pytest.raises(ZeroDivisionError):
        pair.transfer(pair.jobs.take_requests(pair.progress))
    assert not pair.jobs.has_jobs and pair.progress.finished_transfers == []
    pair.p.deaths.peer_dead("d")
    pair.jobs.free_unproven(pair.progress)
    assert pair.progress.finished_transfers == [attempt]


@pytest.mark.parametrize("d_falls_silent", [False, True])
def test_b27_d_has_its_blocks_back_after_a_failed_read_of_its_prefix(pair, unread, d_falls_silent):
    """Nothing was written there. P watches D, and its ranks know it, until it is dead."""
    assert pair.kinds() == [Fallback, Released] and pair.d.operators.open_attempts() == []
    assert pair.p.operators.open_attempts() == [unread] and pair.p.operators.is_reached()
    assert "d" in pair.p.deaths.watched_peers().busy
    if d_falls_silent:
        pair.p._core.do(pair.p._core.prefill_half.peer_lost(pair.clock.now, "d"))
    pair.passes(30)
    assert pair.dropped == [] and pair.p.operators.totals()["prefill_read_unproven"] == 1
    pair.p.deaths.peer_dead("d")
    pair.pump()
    assert pair.dropped == [DropPeer("d")]
    assert pair.p.operators.open_attempts() == [] and not pair.p.operators.is_reached()


@pytest.mark.parametrize("d_is_leaving", [False, True])
@pytest.mark.parametrize("what", ["failed", "unread"])
def test_b27_a_job_of_a_d_that_p_is_parted_from_goes_back_at_once(pair, request, what, d_is_leaving):
    """P does not compute what it could not send. D, whom the first message has not reached, learns it now, and need not
    wait for another P to take the job."""
    request.getfixturevalue(what)
    pair.events.clear()
    pair.d._core.decode_half.parted.clear()
    if d_is_leaving:
        pair.p._core.do(pair.p._core.prefill_half.peer_lost(pair.clock.now, "d"))
    attempt = pair.d.decode.next_attempt("r")
    pair.d.decode.submit(attempt, TOKENS, [5, 6], 0)
    pair.pump()
    assert not pair.jobs.has_jobs and pair.kinds() == [Fallback, Released]
    assert (pair.events[0].attempt, pair.events[0].reason, pair.events[0].peer) == (attempt, FallbackReason.FAILED, "p")
    assert "not begun anew" in pair.events[0].detail and pair.d._core.decode_half.parted == {"p"}
    pair.p.deaths.peer_dead("d")
    reborn = m.Attempt("d2", "r", 0)
    pair.p.control.receive(MessageSource.BROKER, "b", m.Offer(m.Job(reborn, "tcp://127.0.0.1:3", TOKENS, 0, 60.0), 3))
    assert pair.p.prefill.jobs() == {reborn}, "one that has come back is another one"


@pytest.mark.parametrize("what", ["failed", "unread", "unheld"])
def test_b27_d_takes_its_prompts_to_other_ps_than_the_one_that_it_is_parted_from(pair, request, what):
    """That one looks idle. D says so where it has no other one, and knows better when P is dead."""
    def put():
        pair.d.decode.submit(pair.d.decode.next_attempt("r"), TOKENS, [5, 6], 0, ("x",))
        [job] = [action.message.job for action in iter(pair.d.control.poll_transmit, None)
                 if isinstance(action, ToBroker) and isinstance(action.message, m.Put)]
        return job

    pair.passes(1)
    assert pair.d.decode.view().prefill_peers == len(pair.d.decode.prefill_loads().busy) == 1
    assert pair.d.operators.degraded() is None
    assert put().avoid == ("x",) and pair.d.decode.knows_holder("p")
    pair.d.decode.abort_all()
    pair.pump()
    request.getfixturevalue(what)
    pair.events.clear()
    assert pair.d.decode.view().prefill_peers == len(pair.d.decode.prefill_loads().busy) == 0
    degraded = pair.d.operators.degraded()
    assert degraded.reason is DegradedReason.PEER and "both make new agents" in degraded.detail
    assert "p" in pair.d.deaths.watched_peers().busy and not pair.d.decode.knows_holder("p")
    job = put()
    assert job.avoid == ("x", "p")
    pair.passes(pair.d.control.ttl_s + 1)
    assert [(event.attempt, event.reason) for event in pair.events if isinstance(event, Fallback)] == [
        (job.attempt, FallbackReason.PEER)], "nobody else comes"
    again = msgspec.structs.replace(P, incarnation="p2")
    pair.d.deaths.peer_dead("p")
    pair.d.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [again, D], 0))
    pair.d.control.receive(MessageSource.PREFILL, "p2", m.Hello(again, b""))
    assert pair.d.decode.view().prefill_peers == 1 and pair.d.operators.degraded() is None and put().avoid == ("x",)


def test_b27_a_p_that_is_parted_from_every_d_says_so(pair, unread):
    pair.p.operators.set_role(m.Role.PREFILL)
    degraded = pair.p.operators.degraded()
    assert degraded.reason is DegradedReason.PEER and "both make new agents" in degraded.detail
    other = msgspec.structs.replace(D, incarnation="d2")
    pair.p.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [P, D, other], 0))
    pair.p.control.receive(MessageSource.DECODE, "d2", m.HelloReply(other, b""))
    assert pair.p.operators.degraded() is None


def test_b27_a_job_names_no_more_ps_to_avoid_than_a_broker_reads(pair):
    """Those that are parted beyond that may get the job, and give it back."""
    pair.d._core.decode_half.parted.update(f"p{number:02}" for number in range(2 * m.MAX_AVOIDED))
    pair.d.decode.submit(pair.d.decode.next_attempt("r"), TOKENS, [5, 6], 0, ("x", "p01"))
    [put] = [action.message for action in iter(pair.d.control.poll_transmit, None)
             if isinstance(action, ToBroker) and isinstance(action.message, m.Put)]
    assert put.job.avoid[:3] == ("x", "p01", "p00") and len(set(put.job.avoid)) == m.MAX_AVOIDED


def test_b27_a_job_avoids_the_ps_that_may_be_offered_it_before_those_that_are_gone(pair):
    """Of a host that has lost its power nobody knows that its P is dead: it stays parted for good."""
    pair.d._core.decode_half.parted.update(f"a{number:02}" for number in range(2 * m.MAX_AVOIDED))
    pair.d._core.decode_half.parted.add("p")
    pair.passes(1)
    pair.d.decode.submit(pair.d.decode.next_attempt("r"), TOKENS, [5, 6], 0, ("x", ))
    [put] = [action.message for action in iter(pair.d.control.poll_transmit, None)
             if isinstance(action, ToBroker) and isinstance(action.message, m.Put)]
    assert put.job.avoid[:3] == ("x", "p", "a00") and len(put.job.avoid) == m.MAX_AVOIDED


@pytest.mark.parametrize("d_is_leaving", [False, True])
def test_b102_a_d_that_p_is_parted_from_is_denied_a_hold_at_once(pair, unread, d_is_leaving):
    """It could not read it, and one that is leaving is never met anew."""
    if d_is_leaving:
        pair.p._core.do(pair.p._core.prefill_half.peer_lost(pair.clock.now, "d"))
    hold, attempt = m.Attempt("p", "h", 1), pair.d.decode.next_attempt("r")
    assert pair.p.prefill.hold(hold, token_digest(TOKENS), [1, 2])
    pair.events.clear()
    pair.d.decode.claim_hold(attempt, hold, token_digest(TOKENS), [5, 6], 0, 60.0)
    pair.pump()
    assert [(type(event), event.attempt) for event in pair.events] == [(Fallback, attempt), (Released, attempt)]
    assert pair.events[0].reason is FallbackReason.HOLD and pair.p._core.prefill_half.holds.states() == {hold: None}
    pair.d.decode.drop_hold(hold)
    pair.pump()
    assert not pair.p._core.prefill_half.holds.states(), "P hears what D does not want"


def test_b102_what_d_reads_already_it_may_read_on(pair, reading):
    """P's read of D's prefix fails meanwhile."""
    attempt, _ = reading
    job = parked(pair)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    assert pair.p._core.prefill_half.unproven_reads() == {job}
    pair.passes(40)  # longer than the lease
    assert attempt not in [event.attempt for event in pair.events]
    assert len(pair.p._core.prefill_half.holds.states()) == 1


@pytest.fixture
def both():
    """An engine of both roles, beside another one, `o`: the two have met in both directions."""
    us, other = (msgspec.structs.replace(D, incarnation=name, role=m.Role.BOTH) for name in "uo")
    protocol = PeerProtocol(PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:9"}), us, b"", Clock())
    protocol.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, [us, other], 0))
    protocol.control.receive(MessageSource.PREFILL, "o", m.Hello(other, b""))
    protocol.control.receive(MessageSource.DECODE, "o", m.HelloReply(other, b""))
    return protocol


def told(protocol, kind):
    """What it sends of this kind now."""
    return [action.message for action in iter(protocol.control.poll_transmit, None)
            if isinstance(getattr(action, "message", None), kind)]


def begin_read(both):
    """An attempt that reads a hold of the other one."""
    attempt, hold = both.decode.next_attempt("r"), m.Attempt("o", "h", 1)
    both.decode.claim_hold(attempt, hold, token_digest(TOKENS), [3, 4], 0, 60.0)
    both.control.receive(MessageSource.PREFILL, "o", m.HoldGrant(attempt, hold, [1, 2]))
    return attempt


def begin_job(both, number=0):
    """A job of the other one that was granted."""
    attempt = m.Attempt("o", "r", number)
    job = m.Job(attempt, "tcp://127.0.0.1:2", TOKENS, 0, 60.0)
    both.control.receive(MessageSource.BROKER, "b", m.Offer(job, number + 1))
    [claim] = told(both, m.Claim)
    both.control.receive(MessageSource.DECODE, "o", m.Grant(attempt, claim.claim, [1, 2], 0, 60.0))
    return attempt


def test_b34_an_engine_of_both_roles_writes_nothing_to_one_that_it_could_not_read_from(both):
    """Nor does its half that prefills have the ranks forget what has failed, while the other one lives."""
    both.decode.read_ended(begin_read(both), "failed", may_land=True)
    attempt = begin_job(both)
    [end] = told(both, m.Failed)
    assert end.attempt == attempt and end.parted and not any(isinstance(one, Prefill) for one in events(both))
    both._core.do(both._core.prefill_half.peer_lost(0.0, "o"))
    assert not any(isinstance(one, DropPeer) for one in events(both))
    both.deaths.peer_dead("o")
    assert DropPeer("o") in events(both)


def test_b34_an_engine_of_both_roles_does_not_forget_whom_a_write_may_still_reach(both):
    """Its half that decodes knows too many. The transport would count what has failed as ended."""
    both.decode.read_ended(begin_read(both), "")
    both.prefill.unproven(begin_job(both), "failed")
    events(both)
    both._core.decode_half.limits = msgspec.structs.replace(both._core.decode_half.limits, max_peers=1)
    for number in range(5):
        name = f"x{number}"
        both.control.receive(MessageSource.PREFILL, name, m.Hello(msgspec.structs.replace(P, incarnation=name), b""))
    assert not any(isinstance(one, DropPeer) for one in events(both)) and not both.decode.knows_holder("o")
    assert len(both._core.decode_half.peers) == 2 and not both.decode.view(("x4",)).prefill_peers


def events(protocol):
    return list(iter(protocol.poll_event, None))


@pytest.mark.parametrize("fails", [False, True])
def test_b34_of_a_job_that_was_lost_while_it_read_d_hears_when_the_read_has_ended(pair, fails):
    """Until then the job is the protocol's: P watches D, and keeps it and its own memory."""
    attempt = parked(pair)
    requests = pair.jobs.take_requests(pair.progress)
    pair.jobs.lose(attempt, pair.progress)
    pair.pump()
    pair.passes(3)
    assert pair.events == [] and pair.p.operators.open_attempts() == [attempt]
    assert "d" in pair.p.deaths.watched_peers().busy
    if not fails:
        pair.ranks[0].agent.fails = TransferState.DONE
    pair.p._core.do(pair.p._core.prefill_half.peer_lost(pair.clock.now, "d"))
    pair.pump()
    pair.transfer(requests + pair.jobs.take_requests(pair.progress))
    assert pair.kinds() == [Fallback, Released] and not pair.jobs.has_jobs
    assert pair.p.operators.open_attempts() == [attempt] * fails and (pair.progress.finished_transfers == []) is fails
    assert pair.dropped == [DropPeer("d")] * (not fails)
    pair.p.deaths.peer_dead("d")
    pair.transfer([])
    assert pair.progress.finished_transfers == [attempt] and pair.dropped == [DropPeer("d")]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("side", "pd")
def test_b22_memory_that_a_failed_read_may_fill_outlives_the_engine(pair, request, monkeypatch, side, dies):
    request.getfixturevalue("unread" if side == "p" else "unheld")
    us, them = (pair.p, "d") if side == "p" else (pair.d, "p")
    if dies:
        us.deaths.peer_dead(them)
    monkeypatch.setattr(kept, "_caches", {f"{side}/0": []})
    ended = []
    close_engine(SimpleNamespace(close=lambda: None, protocol=us, member=us.member,
                                 end_lifeline=lambda: ended.append(True)), SimpleNamespace(close=lambda: True))
    assert bool(kept._caches) is not dies and ended == [True] * dies


@pytest.mark.parametrize("what, side", [("failed", "p"), ("failed", "d"), ("unread", "p"), ("unheld", "d")])
def test_b54_an_engine_that_keeps_something_of_a_failed_transfer_can_be_drained(pair, request, what, side):
    """Both live, and neither waits for what ends with it."""
    attempt = request.getfixturevalue(what)
    assert getattr(pair, side).operators.open_attempts() == [attempt] and drains(getattr(pair, side), pair)


def test_b54_a_d_that_did_not_hear_that_p_gave_up_asks_and_can_be_drained(pair):
    pair.lost = {m.GaveUp}
    attempt = granted(pair)
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    pair.passes(10)
    assert not drains(pair.d, pair), "as far as it knows P may end it"
    pair.lost = set()
    pair.passes(100)
    assert pair.d.state.left and pair.d.operators.open_attempts() == [attempt]
    cancels = pair.p.operators.totals(), pair.d.operators.dropped()
    pair.passes(100)
    assert cancels == (pair.p.operators.totals(), pair.d.operators.dropped()), "D asks no more"


def test_b102_a_hold_whose_reader_could_not_say_so_ends_with_a_question(pair, reading):
    attempt, _ = reading
    pair.lost = {m.HoldDone}
    pair.d.decode.read_ended(attempt, "failed", may_land=True)
    pair.pump()
    assert pair.holds_ended == []
    pair.lost = set()
    pair.passes(20)
    assert len(pair.holds_ended) == 1


@pytest.fixture
def unheld(pair, reading):
    """The attempt whose read of a hold has failed."""
    pair.d.decode.read_ended(reading[0], "failed", may_land=True)
    pair.pump()
    return reading[0]


@pytest.fixture
def reading(pair):
    """The attempt that reads a hold of P."""
    hold = m.Attempt("p", "h", 1)
    assert pair.p.prefill.hold(hold, token_digest(TOKENS), [1, 2])
    attempt = pair.d.decode.next_attempt("r")
    pair.d.decode.claim_hold(attempt, hold, token_digest(TOKENS), [3, 4], 0, 60.0)
    pair.pump()
    [read] = [event for event in pair.events if isinstance(event, ReadHold)]
    pair.events.clear()
    return attempt, Read("k", "p", read.block_ids, read.remote_block_ids)


@pytest.mark.parametrize("stops", [False, True], ids=["wanted", "aborted"])
def test_b102_d_reuses_nothing_that_a_read_which_failed_may_fill(pair, reading, stops):
    attempt, read = reading
    d = pair.ranks[1]
    d.knows(pair.ranks[0])
    if stops:
        pair.d.decode.abort(attempt)
        pair.pump()
        pair.events.clear()
    d.worker.execute([read])
    [end] = d.worker.take_progress().finished
    pair.d.decode.read_ended(attempt, end.error, end.may_land)
    pair.passes(30)
    assert Released not in pair.kinds() and (Fallback in pair.kinds()) is not stops
    assert len(pair.holds_ended) == 1, "what D still reads there it does not use"
    d.agent.land()
    assert (d.bytes[[3, 4]] == 1).any()
    pair.d.deaths.peer_dead("p")
    pair.pump()
    assert pair.kinds()[-2:] == [Released, DropPeer] and pair.d.operators.open_attempts() == []


def test_b102_of_a_p_that_is_known_to_be_dead_a_failed_read_is_the_end(pair, reading):
    attempt, _ = reading
    pair.d.deaths.peer_dead("p")
    pair.d.decode.read_ended(attempt, "failed", may_land=True)
    pair.pump()
    assert Released in pair.kinds() and pair.d.operators.open_attempts() == []


def test_the_job_of_a_test_is_what_it_says(pair):
    """A guard of this file: without failures the same way ends with the KV at D."""
    attempt = granted(pair)
    pair.ranks[0].agent.fails = TransferState.DONE
    pair.jobs.computed(attempt, [1, 2], pair.progress)
    pair.transfer(pair.jobs.take_requests(pair.progress))
    assert pair.p.operators.open_attempts() == [] and pair.p.operators.totals()["prefill_sent"] == 1
    pair.ranks[0].agent.land()
    assert (pair.ranks[1].bytes[[3, 4]] == 1).all()


def test_b27_d_grants_nothing_to_a_p_that_it_could_not_read_from(both):
    """B27: P does not know it, and may have the job from before."""
    attempt = both.decode.next_attempt("early")
    both.decode.submit(attempt, TOKENS, [5, 6], 0)
    both.decode.read_ended(begin_read(both), "failed", may_land=True)
    told(both, m.Deny)
    both.control.receive(MessageSource.PREFILL, "o", m.Claim(attempt, 1, 1))
    assert told(both, m.Deny) == [m.Deny(attempt, 1, m.DenyReason.AVOIDED)]
    assert both.operators.counts()["parted"] == 1


def test_b42_an_engine_that_is_parted_from_its_only_peer_says_so_beside_one_that_does_not_fit(both):
    other = msgspec.structs.replace(P, incarnation="x", fingerprint=msgspec.structs.replace(FINGERPRINT, model="y"))
    both.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [both.member, other], 0))
    both.decode.read_ended(begin_read(both), "failed", may_land=True)
    degraded = both.operators.degraded()
    assert degraded.reason is DegradedReason.PEER and "both make new agents" in degraded.detail
