# SPDX-License-Identifier: Apache-2.0
"""Engines that decode and prefill never wait for each other: two or a ring of them, at any setting.

Real schedulers and real bindings; memory, transfers and the control plane are simulated. No deadline ends anything.
"""
import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_pd.v0.engine
from tests.fakes.simulated_engine import BLOCK_SIZE, RemoteWork, SimulatedEngine
from vllm_pd.peer.cluster import QueueView
from vllm_pd.protocol.actions import (
    AttemptEnd,
    Cancelled,
    Event,
    Fallback,
    FallbackReason,
    Prefill,
    Prefilled,
    Released,
)
from vllm_pd.protocol.messages import Attempt, Role, Timings
from vllm_pd.transfer.device import HostDevice
from vllm_pd.transfer.requests import Finished, TransferProgress, Write
from vllm_pd.v0.engine import V0Handover
from vllm_pd.v0.prefill import PrefillJobs

CLOCK = time.monotonic
ROUND_S = 0.05
ROUNDS = 1000  # far more than any test here takes


class Transfer:
    """The worker's transfers: what a step carries down has ended by the next one."""

    def __init__(self) -> None:
        self.finished: list[Finished] = []

    def start(self, wake: Callable[[], None], tell: Callable[[Finished], None]) -> None:
        self._tell = tell

    def hold(self, descriptor: int) -> None:
        pass

    def poll(self) -> None:
        pass

    def take_progress(self) -> TransferProgress:
        finished, self.finished = self.finished, []
        for end in finished:
            self._tell(end)
        return TransferProgress(finished=finished)

    def synchronize(self) -> None:
        pass

    def close(self) -> bool:
        return True


class Node:
    """One engine, which is its own control agent, and its own protocol with all sessions."""
    error = None
    ROLE = "kv_both"
    PREFIX_READS = "never"

    def __init__(self, ring: "Ring", name: str, fraction: float, **sizes) -> None:
        self.ring, self.name = ring, name
        self.sim = SimulatedEngine(**sizes)
        self.scheduler = [self.sim.scheduler]
        self.scheduler_contexts = [SimpleNamespace(output_queue=[])]
        worker = SimpleNamespace(transfer=SimpleNamespace(device=HostDevice()))
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.cache_config = self.sim.scheduler.cache_config
        self.parallel_config = SimpleNamespace(world_size=1)
        self.model_config = SimpleNamespace(
            served_model_name="simulated", get_vocab_size=lambda: 1 << 30, dtype=torch.float32,
            get_num_layers=lambda parallel: 2, get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 8,
            uses_mrope=False)
        self.vllm_config = self
        self.seq_id_to_seq_group: dict = {}
        self.member = SimpleNamespace(incarnation=name, address="")
        self.state = SimpleNamespace(role=Role.BOTH, draining=False, hands_over=True,
                                     has_other_weights=False)
        self.transfer, self.events, self.room, self.failures = self.make_transfer(), list[Event](), 0, 0
        self._numbers = 0
        self.protocol = self.decode = self.prefill = self.operators = self
        extra = {"broker": "tcp://127.0.0.1:5700", "max_local_prefill_tokens": BLOCK_SIZE,
                 "prefix_reads": self.PREFIX_READS, "max_parked_fraction": fraction, "attempt_deadline_s": 86400}
        self.disagg = V0Handover(self, {"kv_role": self.ROLE, "extra": extra})
        self.disagg.in_loop = True  # it is stepped, and does not sleep
        self.input = False
        self._after_schedule, self.disagg.after_schedule = self.disagg.after_schedule, self._carry

    def make_transfer(self) -> Transfer:
        return Transfer()

    def ask(self, request_id: str, token_ids: list[int], **more) -> None:
        """A client's request: input, after which the loop takes a step."""
        self.sim.add(request_id, token_ids, **more)
        self.input = True

    def step(self) -> list[str]:
        """As an engine loop does: only where there is input or work. The ids of the requests in the batch."""
        if not (self.disagg.has_work() or self.input):
            return []
        self.input = False
        batch = self.sim.step(**self.disagg.take_progress())
        self.sim.check_references()
        self.sim.check_writers()
        return batch

    def _carry(self, outputs) -> None:
        self._after_schedule(outputs)
        for request in outputs.memory_transfer_requests:
            assert isinstance(request, Write)
            self.ring.write(self, request)

    # LLMEngine's part.

    scheduler_config = SimpleNamespace(policy="fcfs", max_num_batched_tokens=256)

    def add_request(self, request_id, prompt, params, priority) -> None:
        self.sim.add(request_id, prompt["prompt_token_ids"], max_tokens=params.max_tokens)

    def abort_request(self, request_id: str) -> None:
        self.sim.abort(request_id)

    # The control agent's part, and that of the protocol and its sessions.

    def start(self) -> None:
        pass

    close = end_lifeline = start

    def is_reached(self) -> bool:
        return False

    def view(self, avoid=()) -> QueueView:
        others = {node.name for node in self.ring.nodes if node is not self}
        return QueueView(True, len(self.ring.queue), len(others.difference(avoid)), None)

    def next_attempt(self, request_id: str) -> Attempt:
        self._numbers += 1
        return Attempt(self.name, request_id, self._numbers)

    def prompt_decided(self, request_id: str, again: bool = False, **fields: object) -> None:
        pass

    note_prompt = prompt_decided

    def submit(self, attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope) -> None:
        self.sim.peers.work[attempt] = RemoteWork(token_ids, block_ids, cached_blocks * BLOCK_SIZE)
        self.ring.queue.append((Prefill(attempt, token_ids, block_ids[cached_blocks:], cached_blocks,
                                        block_ids[:cached_blocks], self.name), avoid))

    def poll_event(self) -> Event | None:
        return self.events.pop(0) if self.events else None

    def lifeline_fileno(self) -> int:
        return -1

    def degraded(self) -> None:
        pass

    def abort(self, attempt: Attempt) -> None:
        pass

    def ended(self, attempt: Attempt) -> None:
        pass

    def set_credits(self, jobs: int, queued_tokens: int | None = None) -> None:
        self.room = jobs

    def refuse_jobs(self, reason: str) -> None:
        self.room = 0

    def set_load(self, load) -> None:
        pass

    def dropped(self) -> dict[str, int]:
        return {}

    def may_write(self, attempt: Attempt) -> bool:
        return True

    def lasting_hold_blocks(self) -> int:
        return 0

    def sent(self, attempt: Attempt, timings: Timings) -> None:
        pass

    def failed(self, attempt: Attempt, reason: str) -> None:
        self.failures += 1
        self.ring.find(attempt.incarnation).events += [
            Fallback(attempt, FallbackReason.FAILED, AttemptEnd.FAILED, reason, self.name), Released(attempt)]


class Ring:
    """Engines, each of which has its jobs done by the next one that may, and a clock that moves with each round."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(vllm_pd.v0.engine, "attach_transfer",
                            lambda node, role, transport: (node.member, node, node.transfer))
        monkeypatch.setattr(vllm_pd.v0.engine, "ControlAgent", lambda config, member, node, **more: node)
        self.nodes: list[Node] = []
        self.queue: list[tuple[Prefill, tuple[str, ...]]] = []

    def add_engine(self, fraction: float, **sizes) -> Node:
        self.nodes.append(Node(self, f"engine {len(self.nodes)}", fraction, caching=False, **sizes))
        return self.nodes[-1]

    def find(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def write(self, source: Node, write: Write) -> None:
        """The data lands, its notice too, and the writer learns it."""
        target = self.find(write.peer)
        attempt = next(attempt for attempt in target.sim.peers.work if str(attempt) == write.key)
        target.sim.write_remotely(attempt)
        target.events.append(Prefilled(attempt, Timings()))
        source.transfer.finished.append(Finished(write.key, True, 1, 0.01))

    def offer(self) -> None:
        """Each job goes to the next engine with room, after its owner."""
        for entry in list(self.queue):
            prefill, avoid = entry
            owner = self.nodes.index(self.find(prefill.peer))
            for node in (*self.nodes[owner + 1:], *self.nodes[:owner]):
                if node.name not in avoid and node.room > 0:
                    node.room -= 1
                    node.events.append(prefill)
                    self.queue.remove(entry)
                    break

    def round(self) -> None:
        self.now += ROUND_S
        for node in self.nodes:
            node.step()
        self.offer()

    def is_done(self) -> bool:
        return not any(node.sim.groups or node.scheduler[0].has_unfinished_seqs() or node.scheduler[0].quarantined
                       for node in self.nodes)

    def run(self) -> int:
        """Until every request has ended. How many rounds that took."""
        for number in range(ROUNDS):
            if self.is_done():
                for node in self.nodes:
                    node.sim.check_at_rest()
                return number
            self.round()
        raise AssertionError("they wait for each other")


def tokens(number: int, count: int) -> list[int]:
    return [1000 * (number + 1) + position for position in range(count)]


def full_ring(monkeypatch, size: int, seats: int) -> Ring:
    """Each engine has parked a request that takes most of its pool, or with one seat all seats."""
    ring = Ring(monkeypatch)
    for number in range(size):
        ring.add_engine(0.9, blocks=20, max_num_seqs=seats).ask(f"r{number}", tokens(number, 12 * BLOCK_SIZE))
    for node in ring.nodes:
        node.step()
        assert len(node.scheduler[0].remote_prefilling) == 1
    return ring


@pytest.mark.parametrize("seats", [1, 4])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_of_full_engines_goes_on_at_once(monkeypatch, size, seats):
    """For want of blocks, or of seats."""
    ring = full_ring(monkeypatch, size, seats)
    assert ring.run() < 40
    assert sum(node.failures for node in ring.nodes) >= 1


@pytest.mark.parametrize("size", [2, 3])
def test_without_the_rule_it_stands_still(monkeypatch, size):
    """The simulation can show it."""
    monkeypatch.setattr(PrefillJobs, "give_back", lambda jobs, attempts: None)
    with pytest.raises(AssertionError, match="wait for each other"):
        full_ring(monkeypatch, size, 4).run()


def test_a_job_behind_a_prompt_that_waits_for_parked_blocks(monkeypatch):
    """The job itself would fit, and something runs all the time on both."""
    ring = Ring(monkeypatch)
    for number in range(2):
        node = ring.add_engine(0.5, blocks=40, max_num_seqs=8)
        node.ask(f"short{number}", tokens(number, 3), max_tokens=100)
        node.step()
        node.ask(f"parked{number}", tokens(10 + number, 14 * BLOCK_SIZE))
        node.step()
        node.ask(f"head{number}", tokens(20 + number, 25 * BLOCK_SIZE))
    for _ in range(60):  # 3 s
        ring.round()
    assert all("short" in name for node in ring.nodes for name in node.sim.groups if "parked" not in name), "ran"
    ring.run()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside another"])
def test_b30_a_job_that_its_engine_aborts_by_itself_is_answered(monkeypatch, others):
    """vLLM does so where a worker can't make the input of a request. No message of the peer and no step says so, and
    the next step may be far off."""
    ring = Ring(monkeypatch)
    decoder, prefiller = ring.add_engine(0.9), ring.add_engine(0.9)
    decoder.ask("r", tokens(0, 4 * BLOCK_SIZE))
    if others:
        prefiller.ask("client", tokens(1, 3), max_tokens=50)
    decoder.step()
    prefiller.disagg.has_work()  # its loop runs, so it takes jobs
    ring.offer()
    [job] = ring.nodes[1].events
    prefiller.disagg.has_work()
    prefiller.sim.abort(f"pd-{job.attempt}")
    for _ in range(4):
        ring.round()
    assert prefiller.failures == 1 and prefiller.disagg.prefill_jobs.idle
    ring.run()


def parked(node: Node, *request_ids: str) -> list[Attempt]:
    """Park these requests. Their attempts."""
    for number, request_id in enumerate(request_ids):
        node.ask(request_id, tokens(50 + number, 2 * BLOCK_SIZE))
    assert node.step() == []
    return [node.sim.attempt_of(request_id) for request_id in request_ids]


def arrived(node: Node, attempt: Attempt) -> None:
    """A peer has written the whole prompt."""
    node.sim.write_remotely(attempt)
    node.events.append(Prefilled(attempt, Timings()))


def test_b32_a_group_that_was_aborted_in_the_meantime_holds_back_no_prompt(monkeypatch):
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9), ring.add_engine(0.9)
    gone, _ = parked(node, "gone", "stays")
    node.sim.abort("gone")
    node.ask("short", tokens(0, 2))
    arrived(node, gone)
    assert node.step() == ["short"]


def test_b33_a_step_that_takes_no_prompt_for_a_resumed_group_is_no_stall(monkeypatch):
    """The group is aborted after it resumed and before it decodes: the step that was kept for it is empty."""
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9), ring.add_engine(0.9)
    first, second, _ = parked(node, "first", "second", "stays")
    arrived(node, first)
    assert node.step() == ["first"]
    arrived(node, second)
    node.ask("short", tokens(0, 2), max_tokens=1)
    assert node.step() == ["short"], "no two steps without prompts follow each other"
    node.sim.abort("first")
    node.sim.abort("second")
    node.ask("next", tokens(1, 2))
    assert node.step() == []
    assert node.step() == ["next"]


def run_here(node: Node) -> None:
    """Step until the loop goes to sleep."""
    for _ in range(100):
        if not (node.disagg.has_work() or node.input):
            return
        node.step()
    raise AssertionError("it does not sleep")


def test_b32_no_loop_sleeps_while_the_next_step_can_run_a_request_that_preempts(monkeypatch):
    """With priorities V0 preempts after it has looked at the prompts: the urgent one begins a step later."""
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9, max_num_seqs=2, policy="priority"), ring.add_engine(0.9)
    parked(node, "stays")
    node.ask("low", tokens(0, 2), max_tokens=8, priority=5)
    assert node.step() == ["low"]
    node.ask("urgent", tokens(1, 2), priority=0)
    assert node.step() == [] and not node.scheduler[0].running
    run_here(node)
    assert node.sim.groups.keys() == {"stays"}


@pytest.mark.parametrize("sleeps", [False, True])
def test_b32_no_loop_sleeps_while_the_next_step_can_run_a_request_that_goes_ahead(monkeypatch, sleeps):
    """With priorities V0 sorts after it has looked at the prompts. The quarantined blocks may stay."""
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9, blocks=20, policy="priority"), ring.add_engine(0.9)
    parked(node, "gone")
    node.sim.abort("gone")
    node.ask("large", tokens(1, 19 * BLOCK_SIZE), priority=9)
    assert node.step() == [] and len(node.scheduler[0].quarantined) == 1
    if sleeps:
        run_here(node)
    node.ask("urgent", tokens(2, 2), priority=0)
    run_here(node)
    assert node.sim.groups.keys() == {"large"}


@pytest.mark.parametrize("chunk", [None, 16])
def test_b32_no_loop_sleeps_while_the_next_step_can_run_a_group_that_preempted_itself(monkeypatch, chunk):
    """V0 keeps no block free in a pool of less than 100: the group takes back what it has just left."""
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9, blocks=12, chunk=chunk), ring.add_engine(0.9)
    parked(node, "stays")
    node.ask("grows", tokens(0, 9 * BLOCK_SIZE), max_tokens=5)
    while "grows" in node.sim.groups and (batch := node.step()):
        assert batch == ["grows"]
    assert node.scheduler[0].num_cumulative_preemption == 1 and node.step()


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_b32_a_loop_sleeps_with_a_scheduler_delay_too(monkeypatch, delay):
    """A prompt waits for others only while a group runs."""
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9, blocks=12), ring.add_engine(0.9)
    node.scheduler[0].scheduler_config.delay_factor = delay
    parked(node, "stays")
    node.ask("short", tokens(0, 2), max_tokens=2)
    node.ask("large", tokens(1, 11 * BLOCK_SIZE))
    run_here(node)
    assert node.sim.groups.keys() == {"stays", "large"}


def job(number: int, blocks: int) -> Prefill:
    """Of a peer that is not in the ring."""
    return Prefill(Attempt("peer", f"r{number}", number), tokens(number, blocks * BLOCK_SIZE), list(range(blocks)), 0,
                   [], "peer")


@pytest.mark.parametrize("way", ["given back", "cancelled"])
def test_b30_a_job_is_tried_whatever_became_of_the_one_before_it(monkeypatch, way):
    """On an engine that does nothing else."""
    ring = Ring(monkeypatch)
    node, peer = ring.add_engine(0.9, blocks=20), ring.add_engine(0.9)
    monkeypatch.setattr(ring, "find", lambda name: peer)
    parked(node, "stays")
    large, small = job(1, 19), job(2, 2)
    node.events.append(large)
    assert node.step() == []
    if way == "cancelled":
        node.events.append(Cancelled(large.attempt))
    assert node.step() == []
    assert node.failures == (way == "given back")
    node.events.append(small)
    assert node.step() == [f"pd-{small.attempt}"]


def test_b30_a_prompt_behind_a_job_that_is_given_back_begins(monkeypatch):
    ring = Ring(monkeypatch)
    node, peer = ring.add_engine(0.9, blocks=20), ring.add_engine(0.9)
    monkeypatch.setattr(ring, "find", lambda name: peer)
    parked(node, "stays")
    node.events.append(job(1, 19))
    node.disagg.has_work()  # the job is in the queue
    node.ask("short", tokens(0, 2))
    assert node.step() == []
    assert node.step() == ["short"]


@pytest.fixture
def with_a_write_that_hangs(monkeypatch) -> Node:
    """An engine with a parked request and a write under way, which a large job has found no room beside. Behind that
    job a small request waits."""
    ring = Ring(monkeypatch)
    node, peer = ring.add_engine(0.9, blocks=20), ring.add_engine(0.9)
    monkeypatch.setattr(ring, "find", lambda name: peer)
    monkeypatch.setattr(ring, "write", lambda source, write: None)
    monkeypatch.setattr(time, "monotonic", CLOCK)
    monkeypatch.setattr("vllm_pd.decisions.mutual.BLOCKED_S", 2.0)
    parked(node, "stays")
    node.events.append(job(1, 2))
    assert node.step() == [f"pd-{job(1, 2).attempt}"]
    node.events.append(job(2, 17))
    node.disagg.has_work()  # the job is in the queue
    node.ask("short", tokens(0, 2))
    assert node.step() == node.step() == []
    assert not node.disagg.has_work() and not node.failures, "the write may end and make room"
    return node


def test_b30_a_sleeping_loop_wakes_to_give_a_job_back(with_a_write_that_hangs):
    """No event comes, and no input."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    try:
        began = CLOCK()
        assert with_a_write_that_hangs.disagg.poll(socket, 40_000) == 1
        assert CLOCK() - began < 30.0
    finally:
        socket.close(0)
        context.term()
    assert with_a_write_that_hangs.failures == 1
    assert with_a_write_that_hangs.step() == ["short"]


class AsyncEngine:
    """What the binding knows of an AsyncLLMEngine."""

    def __init__(self) -> None:
        self._background_loop_unshielded = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        self._request_tracker = SimpleNamespace(new_requests_event=asyncio.Event())

    def start_background_loop(self) -> None:
        """It runs."""


async def test_b30_a_sleeping_async_loop_wakes_to_give_a_job_back(with_a_write_that_hangs):
    engine = AsyncEngine()
    event = engine._request_tracker.new_requests_event
    with_a_write_that_hangs.disagg.serve(engine)
    await asyncio.sleep(0)
    assert not with_a_write_that_hangs.disagg.has_work() and not event.is_set()
    await asyncio.wait_for(event.wait(), 20)
    assert with_a_write_that_hangs.failures == 1
    engine._background_loop_unshielded.cancel()


requests = st.tuples(st.integers(0, 4), st.integers(1, 100), st.integers(1, 20), st.integers(0, 30))
engines = st.tuples(st.integers(8, 40), st.integers(1, 5), st.floats(0.05, 1.0), st.sampled_from([None, 16]))


@settings(max_examples=20)
@given(shapes=st.lists(engines, min_size=2, max_size=4), work=st.lists(requests, min_size=2, max_size=16))
def test_nobody_waits_for_ever_at_any_setting(shapes, work):
    """A prompt leaves two blocks of the smallest pool: where one fills a whole pool, upstream's chunked prefill
    preempts it again and again, with disaggregation or without."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ring = Ring(monkeypatch)
        for blocks, seats, fraction, chunk in shapes:
            ring.add_engine(fraction, blocks=blocks, max_num_seqs=seats, chunk=chunk)
        due = sorted(enumerate(work), key=lambda entry: entry[1][3])
        for number, (index, length, outputs, at) in due:
            while (ring.now - 1000.0) / ROUND_S < at:
                ring.round()
            node = ring.nodes[index % len(ring.nodes)]
            longest = (min(blocks for blocks, *_ in shapes) - 2) * BLOCK_SIZE - outputs
            node.ask(f"r{number}", tokens(number, max(1, min(length, longest))), max_tokens=outputs)
        ring.run()
