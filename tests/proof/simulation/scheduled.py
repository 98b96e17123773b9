# SPDX-License-Identifier: Apache-2.0
"""An engine with vLLM's patched scheduler and block manager, and with the real binding of a decode engine, over memory
that notices every wrong read (tests/fakes/simulated_engine.py).
"""
import contextlib
import types
from collections.abc import Iterator
from typing import Any

import vllm.core.scheduler

import vllm_pd.handover.decode
from tests.fakes.simulated_engine import BLOCK_SIZE, FakePeers, RemoteWork, SimulatedEngine
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import Progress
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Event, Prefilled
from vllm_pd.v0.decode import RemotePrefills

from .engine import Engine, Job, require
from .kernel import Kernel
from .node import Node, Post

MAX_NUM_SEQS = 6
MAX_MODEL_LEN = 64


class _Binding(FakePeers):
    """In the place of `V0Handover`: decode engine's half for real, the other half by `ScheduledEngine`."""

    def __init__(self, engine: "ScheduledEngine"):
        super().__init__(engine.scheduler, lambda group: True)
        self._engine = engine

    def choose_remote_prefill(self, seq_group, num_cached_tokens):
        if not self._engine.node.member.role.decodes or seq_group.first_seq.remote_decode is not None:
            return None
        return self._engine.prefills.decide_and_commit(seq_group, num_cached_tokens)

    def waits_for_sibling(self, seq_group):
        return self._engine.prefills.waits_for_sibling(seq_group)

    def start_remote_prefill(self, attempt, seq_group, block_ids, num_cached_tokens):
        super().start_remote_prefill(attempt, seq_group, block_ids, num_cached_tokens)
        self._engine.prefills.start(attempt, seq_group, block_ids, num_cached_tokens)

    def abort_remote_prefill(self, attempt):
        super().abort_remote_prefill(attempt)
        self._engine.prefills.abort(attempt)

    def start_transfer(self, attempt, block_ids):
        self._engine.computed(attempt, block_ids)


class ScheduledEngine(Engine):
    """One scheduler, of either role or both."""

    def __init__(self, node: Node, post: Post, *, blocks: int, caching: bool = True, chunk: int | None = None):
        super().__init__(node, post)
        self.simulated = SimulatedEngine(blocks=blocks, caching=caching, chunk=chunk, max_num_seqs=MAX_NUM_SEQS,
                                         max_model_len=MAX_MODEL_LEN)
        self.scheduler = self.simulated.scheduler
        self.peers = self.simulated.peers = self.scheduler.disagg = _Binding(self)
        self.speed = StepSpeed()
        self.speed.stepped(self.kernel.now, 1000, 0, 10.0)  # for max_local_prefill_tokens auto
        self.prefills = RemotePrefills(node.config, node, self.scheduler, PDMetrics("simulated"), {}, self.speed)
        self.progress = Progress()
        self.preempted = 0  # before their first token
        self.longest_wait = 0  # steps from the KV's arrival to the first token
        self._resumed: dict[str, int] = {}
        self._clients: set[str] = set()
        self._steps = 0
        self._added: set[m.Attempt] = set()

    # Clients.

    def client_asks(self, request_id: str, token_ids: list[int], max_tokens: int) -> None:
        self._clients.add(request_id)
        self.simulated.add(request_id, token_ids, max_tokens=max_tokens)
        self.wake()

    def client_leaves(self, request_id: str) -> None:
        if request_id in self._clients:
            self._clients.remove(request_id)
            self._resumed.pop(request_id, None)
            self.results[request_id] += 1
            self.simulated.abort(request_id)
            self.wake()

    # Steps.

    def has_work(self) -> bool:
        return bool(self.scheduler.has_schedulable_seqs() or self.jobs or self.prefills.waiting_for_peers
                    or self.progress)

    def decode_event(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            group = self.scheduler.remote_prefilling.get(event.attempt)
            if group is not None:
                self._resumed[group.request_id] = self._steps
        self.prefills.handle(event, self.progress)

    def step(self) -> None:
        self._steps += 1
        self._take_up_jobs()
        self.prefills.give_back(self.progress, False)
        progress, self.progress = self.progress, Progress()
        batch = self.simulated.step(**progress.arguments())
        self.simulated.check_references()
        self.simulated.check_writers()
        self._check_progress(batch)
        for request_id in self._clients - self.simulated.groups.keys():
            self._clients.remove(request_id)
            self.results[request_id] += 1
        for attempt, job in list(self.jobs.items()):
            if job.computed and not job.flying and not job.cancelled:
                self.post(job)
            elif attempt in self._added and not job.computed and _name(attempt) not in self.simulated.groups:
                del self.jobs[attempt]
                self.node.failed(attempt, "it does not fit")

    def _take_up_jobs(self) -> None:
        for attempt, job in list(self.jobs.items()):
            if job.cancelled and not job.flying:
                del self.jobs[attempt]
                if job.computed:
                    self.release_job(job)
                elif attempt in self._added:
                    self.simulated.abort(_name(attempt))
                self.node.ended(attempt)
            elif attempt not in self._added:
                self._added.add(attempt)
                self.simulated.add(_name(attempt), job.prefill.token_ids, max_tokens=1, remote_decode=attempt)

    def _check_progress(self, batch: list[str]) -> None:
        """B32: who got its KV first starts first, and soon. One that is preempted in that moment, for want of a block
        for its first token, starts anew as upstream has it."""
        running = {group.request_id for group in self.scheduler.running}
        for request_id in [r for r in self._resumed if r not in batch and r not in running]:
            if self._resumed.pop(request_id) < self._steps:
                self.preempted += 1
        begun = [request_id for request_id in self._resumed if request_id in batch]
        waiting = [request_id for request_id in self._resumed if request_id not in batch]
        for request_id in begun:
            since = self._resumed.pop(request_id)
            self.longest_wait = max(self.longest_wait, self._steps - since)
            overtaken = [other for other in waiting if self._resumed[other] < since]
            require(not overtaken, f"B32: {request_id} overtook {overtaken}")

    # Jobs of peers.

    def computed(self, attempt: m.Attempt, block_ids: list[int]) -> None:
        """A job's prompt is done; the scheduler holds its blocks."""
        job = self.jobs.get(attempt)
        if job is None:
            self.progress.finished_transfers.append(attempt)
            return
        first = job.prefill.cached_blocks
        job.blocks = list(block_ids[first:first + len(job.prefill.block_ids)])
        job.filled = len(job.blocks)
        job.writes.add(job.blocks, is_last=True)

    def release_job(self, job: Job) -> None:
        self.progress.finished_transfers.append(job.prefill.attempt)

    # Memory.

    def read(self, blocks: list[int]) -> Any:
        return [self.simulated.slots.get((block, slot)) for block in blocks for slot in range(BLOCK_SIZE)]

    def written(self, attempt: m.Attempt, blocks: list[int], kv: Any) -> None:
        work: RemoteWork | None = self.peers.work.get(attempt)
        fenced = attempt in self.scheduler.remote_prefilling or attempt in self.scheduler.quarantined
        require(work is not None and fenced and set(blocks) <= set(work.block_ids[work.cached_tokens // BLOCK_SIZE:]),
                f"a write for {attempt} landed outside its fence")
        addresses = [(block, slot) for block in blocks for slot in range(BLOCK_SIZE)]
        self.simulated.slots.update({at: tag for at, tag in zip(addresses, kv, strict=True) if tag is not None})

    def check_at_rest(self) -> None:
        super().check_at_rest()
        if self.progress:
            self.simulated.step(**self.progress.arguments())
            self.progress = Progress()
        self.simulated.check_at_rest()
        require(not self.prefills.waiting_for_peers, "blocks are still held")


def _name(attempt: m.Attempt) -> str:
    return f"pd-{attempt}"


@contextlib.contextmanager
def virtual_time(kernel: Kernel) -> Iterator[None]:
    """Scheduler and binding read the kernel's clock."""
    clock = types.SimpleNamespace(**dict.fromkeys(("time", "monotonic", "perf_counter"), lambda: kernel.now))
    modules = (vllm.core.scheduler, vllm_pd.handover.decode)
    real = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module, before in zip(modules, real, strict=True):
            module.time = before
