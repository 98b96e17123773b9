# SPDX-License-Identifier: Apache-2.0
"""A group of prefill engines and one of decode engines, each two data-parallel ranks of a model with experts (B20, B21,
B25, B43, B94): vLLM's own `DPEngineCoreProc.run_busy_loop` of all four over simulated memory.

Each forward pass of a rank waits for one of its group's other rank, as the collectives of the experts make it, and so
does the exchange after each step. So a rank that makes one too many, or one too few, ends the test. This test is the
coordinator of both groups, and what is between them: jobs, writes, messages.
"""
import random
import threading
import time

import pytest
from vllm.config import ParallelConfig
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

from tests.v1.step_sync_group import BarrierExecutor, keep_in_flight, kill
from tests.v1.test_engine_access import Loop
from tests.v1.test_hazards import prompt
from vllm_pd.protocol.actions import Cancelled, FallbackReason, Prefill, Prefilled, Released
from vllm_pd.protocol.messages import Attempt, Timings

MEET_S = 20.0
RANKS = 2
SYNC_INTERVAL = 16  # steps; vLLM's default


class LockstepExecutor(BarrierExecutor):
    """Its forward passes, dummies included, are those of all ranks. A step without tokens makes none."""

    def __init__(self, engine, meeting: threading.Barrier) -> None:
        super().__init__(engine, meeting)
        self.is_killed = False
        self.in_empty_step = lambda: None  # what happens during a step without tokens

    def execute_model(self, output, non_block=False):
        if not output.total_num_scheduled_tokens:
            self.in_empty_step()
        return super().execute_model(output, non_block)

    def _meet(self):
        if self.is_killed:
            self.barrier.abort()
        super()._meet()


class Exchange:
    """In the place of a process group: what `sync_dp_state` reduces over."""

    def __init__(self) -> None:
        self.meeting, self.rows = threading.Barrier(RANKS), [(False, False)] * RANKS
        self.reduced = 0  # how often, by both ranks

    def reduce(self, rank: int, has_unfinished: bool, pending_pause: bool) -> tuple[bool, bool]:
        self.rows[rank] = has_unfinished, pending_pause
        self.meeting.wait(MEET_S)
        unfinished, pauses = zip(*self.rows, strict=True)
        self.reduced += rank == 0
        self.meeting.wait(MEET_S)
        return any(unfinished) or 0 < sum(pauses) < RANKS, all(pauses)


class Rank(Loop):
    """One rank, whose loop runs in a thread."""

    def __init__(self, folder, rank: int, group: "Group", **settings) -> None:
        self.rank, self.group = rank, group
        super().__init__(folder, DPEngineCoreProc, **settings)

    def _run(self) -> None:
        core = self.core
        core.dp_rank = core.engine_index = self.rank
        core.dp_group = self
        core.dp_sync_interval = SYNC_INTERVAL
        core.model_executor = self.executor = LockstepExecutor(self.engine, self.group.meeting)
        keep_in_flight(core, self.engine.in_flight)
        self.group.started.wait(MEET_S)
        super()._run()


class Group:
    """The ranks of one server. This is also their front end, and vLLM's coordinator of their waves, which acts when
    `follow` is called: who gets the first request is not started, for it steps by itself."""

    def __init__(self, folder, **settings) -> None:
        self.meeting, self.exchange = threading.Barrier(RANKS), Exchange()
        self.started = threading.Barrier(RANKS)
        self.ranks = [Rank(folder, rank, self, **settings) for rank in range(RANKS)]
        self.wave, self.runs = 0, False  # as the ranks have said
        self.is_started = False  # as the front end believes until a rank reports; vLLM's looks again later
        self.starts = 0  # messages

    def add(self, rank: int, request_id: str, token_ids: list[int], tokens: int) -> None:
        """A client's request comes."""
        self.ranks[rank].add(request_id, token_ids, tokens, self.wave)
        if not self.is_started:
            self.is_started = True
            self._start(rank)

    def follow(self) -> None:
        """Hear what the ranks say. Raises what has ended one of them."""
        for loop in self.ranks:
            assert loop.error is None, loop.error
            seen = len(loop.waves)
            loop.take()
            for said in loop.waves[seen:]:
                if said.wave_complete is not None and self.wave <= said.wave_complete:
                    self.wave, self.runs = said.wave_complete + 1, False
                elif said.start_wave is not None and (said.start_wave > self.wave
                                                      or said.start_wave == self.wave and not self.runs):
                    self.wave, self.runs = said.start_wave, True
                    self._start(loop.rank)
                self.is_started = self.runs

    def _start(self, but: int) -> None:
        for loop in self.ranks:
            if loop.rank != but:
                self.starts += 1
                loop.core.input_queue.put_nowait((EngineCoreRequestType.START_DP_WAVE, (self.wave, but)))

    def rests(self) -> bool:
        """Whether no rank makes a step, as far as can be seen from here, and all have made equally many."""
        return len({loop.executor.forwards for loop in self.ranks}) == 1 and not any(
            loop.core.engines_running or loop.core.scheduler.has_requests() or not loop.core.input_queue.empty()
            or not loop.core.output_queue.empty() for loop in self.ranks)

    def stop(self) -> None:
        for loop in self.ranks:
            loop.stop()

    def end(self) -> None:
        """End all loops, wherever they are."""
        self.meeting.abort()
        self.exchange.meeting.abort()
        for loop in self.ranks:
            kill(loop)
        for loop in self.ranks:
            loop.thread.join(MEET_S)


class Wires:
    """Two groups, and the jobs between them. `jobs`: the attempts that a P has, and at which rank under which name."""

    def __init__(self, folder, group=Group, in_flight: int = 1, seed: int = 14, **of_d) -> None:
        """`group`: makes each of the two."""
        self.p = group(folder, role="kv_producer", push_chunks=False, batch_tokens=256, in_flight=in_flight)
        self.d = group(folder, role="kv_consumer", batch_tokens=256, in_flight=in_flight, **of_d)
        self.draw = random.Random(seed)
        self.jobs: dict[Attempt, tuple[Rank, Attempt]] = {}
        self.over: set[Attempt] = set()
        self.cancelled: set[Attempt] = set()
        self.done = [0, 0]  # jobs, by the rank of P
        self.aborted: set[str] = set()
        self.holds_writes = False  # until then P's writes do not end

    def carry(self) -> None:
        """Jobs from D to P, writes from P to D, and both sides' messages."""
        self.d.follow()
        self.p.follow()
        for loop in self.d.ranks:
            protocol = loop.engine.protocol
            for attempt in list(protocol.jobs):
                if attempt not in self.jobs:
                    self._give(loop, attempt)
                elif attempt in protocol.aborted and attempt not in self.cancelled | self.over:
                    self.cancelled.add(attempt)
                    rank, name = self.jobs[attempt]
                    rank.engine.tell(Cancelled(name))
        for attempt in self.open_jobs():
            self._end(attempt)

    def _give(self, loop: Rank, attempt: Attempt) -> None:
        """The job of this attempt to a rank of P, as its grant comes."""
        token_ids, block_ids, cached_blocks = loop.engine.protocol.jobs[attempt]
        rank = self.p.ranks[self.draw.randrange(RANKS)]
        name = Attempt(f"d{loop.rank}", attempt.request_id, attempt.number)
        self.jobs[attempt] = rank, name
        blocks = -(-len(token_ids) // rank.engine.block_size)
        rank.engine.tell(Prefill(name, list(token_ids), list(range(100 + cached_blocks, 100 + blocks)), cached_blocks,
                                 list(range(100, 100 + cached_blocks)), name.incarnation))

    def _end(self, attempt: Attempt) -> None:
        """What P says of a job, once nothing of it can land any more."""
        rank, name = self.jobs[attempt]
        said = [word for word, *about in list(rank.engine.protocol.calls) if about and about[0] == name]
        key = str(name)
        if key in rank.engine.transfer.open_writes and not self.holds_writes:
            if attempt not in self.cancelled:
                rank.engine.check_sent_write(rank.engine.transfer.open_writes[key], rank.engine._jobs[key])
            rank.engine.transfer.end(key)
        if not said:
            return
        self.over.add(attempt)
        self.done[rank.rank] += said[-1] == "sent"
        loop = next(one for one in self.d.ranks if attempt in one.engine.protocol.jobs)
        if attempt in loop.engine.protocol.aborted:
            loop.engine.tell(Released(attempt))
        elif said[-1] == "sent":
            self._resume(loop, attempt)
        else:
            raise AssertionError(f"P gave {attempt} up: {said}")

    def _resume(self, loop: Rank, attempt: Attempt) -> None:
        """All KV of this attempt is there."""
        loop.engine.write(attempt)
        loop.engine.tell(Prefilled(attempt, Timings()))

    def open_jobs(self) -> list[Attempt]:
        """Those of which P has not said the last word."""
        return [attempt for attempt in self.jobs if attempt not in self.over]

    def until(self, holds, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline
            self.carry()
            time.sleep(0.0005)

    def ended(self) -> bool:
        """Whether each request has its answer, or its client has left, and no job is left over."""
        return not self.open_jobs() and all(
            set(loop.engine.ended) | self.aborted >= set(loop.engine.prompts) and not len(loop.engine.binding.fence)
            for loop in self.d.ranks)

    def abort(self, rank: int, request_id: str) -> None:
        loop = self.d.ranks[rank]
        self.aborted.add(request_id)
        loop.core.aborts_queue.put_nowait([request_id])  # vLLM puts it into both
        loop.core.input_queue.put_nowait((EngineCoreRequestType.ABORT, [request_id]))

    def check_d(self) -> None:
        """Every answer is right, no rank makes a step any more, and nothing is held."""
        self.until(lambda: self.ended() and self.d.rests())
        before = [loop.executor.forwards for loop in self.d.ranks]
        time.sleep(0.1)
        assert before == [loop.executor.forwards for loop in self.d.ranks]
        self.d.stop()
        for loop in self.d.ranks:
            for request_id in self.aborted & (set(loop.engine.prompts) - set(loop.engine.ended)):
                loop.engine.ended[request_id] = "aborted"
            loop.engine.check_answers()
            loop.engine.check_at_rest()


def exchange_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of each Group reduce over its Exchange."""
    def sync(rank: Rank, has_unfinished: bool, pending_pause: bool = False) -> tuple[bool, bool]:
        return rank.group.exchange.reduce(rank.rank, has_unfinished, pending_pause)

    monkeypatch.setattr(ParallelConfig, "sync_dp_state", staticmethod(sync))
    monkeypatch.setattr(ParallelConfig, "has_unfinished_dp", staticmethod(lambda *given: sync(*given)[0]))


@pytest.fixture
def wires(model_folder, monkeypatch, request):
    exchange_here(monkeypatch)
    wires = Wires(model_folder, **getattr(request, "param", {}))
    yield wires
    for group in (wires.p, wires.d):
        group.end()


def ask(wires: Wires, names: list[str], longest: int = 200) -> None:
    """Requests at D's ranks, some of which are short enough to stay there."""
    for name in names:
        length, tokens = wires.draw.randrange(2, longest), wires.draw.randint(1, 9)
        wires.d.add(wires.draw.randrange(RANKS), name, prompt(length), tokens)
        if wires.draw.random() < 0.5:
            wires.carry()


@pytest.mark.parametrize("rank", range(RANKS))
def test_b94_a_parked_prompt_keeps_no_other_rank_waiting(wires, rank):
    """The front end has the other ranks started for it, and they make a forward pass at once. Also where the client
    leaves while it is parked."""
    wires.holds_writes = True
    for number in range(3):
        parked, other = f"parked-{number}", f"other-{number}"
        wires.d.add(rank, parked, prompt(150), 3)
        wires.until(lambda parked=parked: any(one.request_id == parked for one in wires.jobs))
        if number:
            wires.until(wires.d.rests, limit_s=MEET_S)
            before = [loop.executor.forwards for loop in wires.d.ranks]
            wires.abort(rank, parked)
            time.sleep(0.1)
            wires.until(wires.d.rests, limit_s=MEET_S)
            assert before == [loop.executor.forwards for loop in wires.d.ranks], "a step is made for one that leaves"
        wires.d.add(1 - rank, other, prompt(10), 3)
        wires.until(lambda other=other: other in wires.d.ranks[1 - rank].engine.ended, limit_s=MEET_S)
        wires.until(wires.d.rests, limit_s=MEET_S)
    wires.holds_writes = False
    wires.check_d()


def park_two(wires: Wires, rank: int) -> None:
    """The prompts "stays" and "leaves" wait at this rank of D, and its group rests."""
    wires.holds_writes = True
    for name in ("stays", "leaves"):
        wires.d.add(rank, name, prompt(150), 3)
    wires.until(lambda: len(wires.jobs) == 2)
    wires.until(wires.d.rests, limit_s=MEET_S)


@pytest.mark.parametrize("rank, leaves", [(0, "leaves"), (1, "leaves"), (1, "one that V1 has forgotten")])
def test_b25_b94_a_client_leaves_a_rank_where_another_prompt_is_parked(wires, rank, leaves):
    """V1 makes each abort twice: the second time within the empty step of the first, where there is nothing to abort.
    This rank would make a forward pass that the others do not join."""
    park_two(wires, rank)
    before = [loop.executor.forwards for loop in wires.d.ranks]
    wires.abort(rank, leaves)
    time.sleep(0.1)
    wires.until(wires.d.rests, limit_s=MEET_S)
    assert before == [loop.executor.forwards for loop in wires.d.ranks]
    wires.holds_writes = False
    wires.check_d()


def test_b94_the_kv_comes_during_an_empty_step_of_a_group_that_rests(wires):
    """V1's loop then makes a dummy forward pass, which the other rank must join."""
    park_two(wires, 1)
    executor, has_come = wires.d.ranks[1].executor, threading.Event()

    def deliver() -> None:
        executor.in_empty_step = lambda: None
        wires.holds_writes = False
        wires.until(lambda: not wires.open_jobs(), limit_s=MEET_S)
        has_come.set()

    executor.in_empty_step = deliver
    wires.abort(1, "leaves")
    assert has_come.wait(MEET_S)
    wires.check_d()


def test_b94_b96_a_drain_while_the_group_rests_ends_parked_prompts(wires):
    """One rank has no requests and leaves its loop at once. Without it the other can make no forward pass."""
    park_two(wires, 1)
    before = [loop.executor.forwards for loop in wires.d.ranks]
    for loop in wires.d.ranks:
        loop.core.vllm_config.shutdown_timeout = 30
        loop.stop()
        loop.take()
    assert before == [loop.executor.forwards for loop in wires.d.ranks]
    engine = wires.d.ranks[1].engine
    assert engine.ended == {"stays": "abort", "leaves": "abort"}
    assert set(engine.protocol.aborted) == set(wires.jobs) and not engine.scheduler.requests


@pytest.mark.parametrize("wires", [{"fallback": "refuse", "fallback_wait_s": 1.0}], indirect=True)
@pytest.mark.parametrize("rank", range(RANKS))
def test_b94_prompts_that_wait_for_a_prefill_engine_end_while_the_group_rests(wires, rank):
    """The first is refused while the second waits, and for the third there is a prefill engine in time."""
    protocol = wires.d.ranks[rank].engine.protocol
    protocol.peers = 0
    engine = wires.d.ranks[rank].engine
    wires.d.add(rank, "first", prompt(150), 3)
    time.sleep(0.5)
    wires.d.add(rank, "second", prompt(150), 3)
    wires.until(lambda: len(engine.binding.remote_prefills.waiting_fallbacks()) == 2, limit_s=MEET_S)
    wires.until(lambda: "first" in engine.ended, limit_s=MEET_S)
    assert "second" not in engine.ended
    wires.until(lambda: "second" in engine.ended, limit_s=MEET_S)
    wires.until(wires.d.rests, limit_s=MEET_S)
    wires.d.add(rank, "third", prompt(150), 3)
    wires.until(lambda: engine.binding.remote_prefills.waiting_fallbacks(), limit_s=MEET_S)
    wires.until(wires.d.rests, limit_s=MEET_S)
    protocol.peers = 1
    wires.until(lambda: "third" in engine.ended, limit_s=MEET_S)
    assert engine.ended == {"first": "error", "second": "error", "third": "length"}
    wires.check_d()


def test_b94_b96_a_request_that_comes_while_the_group_is_paused_starts_no_step(wires):
    """The others would not join it: they heed no start then."""

    def call(name: str, *arguments) -> None:
        for loop in wires.d.ranks:
            loop.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, name, arguments)))
        wires.until(lambda: wires.d.rests() and not any(loop.core._idle_state_callbacks for loop in wires.d.ranks))

    ask(wires, ["before"])
    wires.until(lambda: wires.ended() and wires.d.rests())
    call("pause_scheduler", "keep", False)
    before = [loop.executor.forwards for loop in wires.d.ranks]
    for rank in range(RANKS):
        wires.d.add(rank, f"stays-{rank}", prompt(150), 3)
        wires.d.add(rank, f"leaves-{rank}", prompt(150), 3)
        wires.abort(rank, f"leaves-{rank}")
        time.sleep(0.1)
        wires.carry()
    assert before == [loop.executor.forwards for loop in wires.d.ranks]
    call("resume_scheduler")
    wires.check_d()


def test_b43_b94_each_rank_of_d_gets_prompts_from_each_of_p(wires):
    """In bursts. While the jobs of one are written, the ranks of D that wait for them make no step."""
    for burst in range(5):
        ask(wires, [f"{burst}-{number}" for number in range(8)])
        wires.until(lambda: wires.ended() and wires.d.rests() and wires.p.rests())
    wires.holds_writes = True
    ask(wires, [f"last-{number}" for number in range(4)], longest=100)
    for number, loop in enumerate(wires.d.ranks):
        wires.d.add(loop.rank, f"parked-{number}", prompt(150), 3)
    wires.until(lambda: all(any(loop.engine.transfer.open_writes for loop in wires.p.ranks) and wires.p.rests()
                            and not loop.core.engines_running for loop in wires.d.ranks))
    before = [loop.executor.forwards for group in (wires.p, wires.d) for loop in group.ranks]
    time.sleep(0.1)
    assert before == [loop.executor.forwards for group in (wires.p, wires.d) for loop in group.ranks]
    wires.holds_writes = False
    wires.check_d()
    assert min(wires.done) >= 5, "a rank of P has computed few jobs"
    wires.until(wires.p.rests)
    wires.p.stop()
    for loop in wires.p.ranks:
        loop.engine.check_at_rest()


def test_b20_b25_clients_leave_while_jobs_are_under_way(wires):
    """At any point: before P has the job, while it is computed, while it is written, after the KV has come."""
    for burst in range(8):
        wires.holds_writes = burst % 2 == 1
        ask(wires, [f"{burst}-{number}" for number in range(6)])
        for _ in range(wires.draw.randrange(20)):
            wires.carry()
            time.sleep(0.0005)
        wires.until(lambda: not wires.holds_writes or wires.open_jobs())
        sure = {attempt.request_id for attempt in wires.open_jobs()[:1]}
        for loop in wires.d.ranks:
            for name in loop.engine.prompts:
                if name in sure or (name.startswith(f"{burst}-") and wires.draw.random() < 0.5):
                    wires.abort(loop.rank, name)
        wires.holds_writes = False
        if burst % 4 == 3:
            wires.until(lambda: wires.ended() and wires.d.rests() and wires.p.rests())
    assert len(wires.cancelled) >= 4 and sum(wires.done) >= 8
    wires.check_d()
    wires.until(wires.p.rests)
    wires.p.stop()
    for loop in wires.p.ranks:
        loop.engine.check_at_rest()


@pytest.mark.parametrize("killed", range(RANKS))
def test_b21_a_rank_of_p_is_killed_and_with_it_its_group(wires, killed):
    """The other rank waits for its forward pass, for ever on a GPU: vLLM's server ends it. All Ds go on by
    themselves."""
    ask(wires, [f"before-{number}" for number in range(6)])
    wires.until(wires.ended)
    wires.p.ranks[killed].executor.is_killed = True
    names = [f"after-{number}" for number in range(6)]
    for number, name in enumerate(names):
        wires.d.add(number % RANKS, name, prompt(100 + number), 5)
    follow, wires.p.follow = wires.p.follow, lambda: None  # there is nobody to ask
    wires.until(lambda: all(loop.error for loop in wires.p.ranks))
    assert all(isinstance(loop.error, threading.BrokenBarrierError) for loop in wires.p.ranks)
    wires.until(lambda: sum(attempt.request_id in names for attempt in wires.jobs) == len(names))
    for attempt in wires.open_jobs():
        wires.over.add(attempt)
        loop = next(one for one in wires.d.ranks if attempt in one.engine.protocol.jobs)
        loop.engine.protocol.peers = 0
        loop.engine.lost(attempt, FallbackReason.PEER)
        loop.engine.tell(Released(attempt))
    wires.check_d()
    wires.p.follow = follow
