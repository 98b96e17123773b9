# SPDX-License-Identifier: Apache-2.0
"""What an engine's step loop does with the protocol, without a scheduler: the life of requests and of peers' jobs.

`Engine` is either role or both. It holds the writes it has under way, and asks its subclass for blocks. A light one has
a pool and a queue (`LightEngine`); `scheduled.ScheduledEngine` has vLLM's patched scheduler.
"""
import collections
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm_pd.decisions.policy import PolicyConfig, PolicyInput, decide
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AddPeer,
    Cancelled,
    DropPeer,
    Event,
    Fallback,
    Prefill,
    Prefilled,
    Released,
    RenewTransport,
    RetireTransport,
    Timed,
)
from vllm_pd.protocol.names import incarnation_of
from vllm_pd.protocol.writes import AttemptWrites

from .agents import TransferAgents, Write
from .kernel import Kernel
from .node import BLOCK_SIZE, Node, Post

STEP_S = 0.02
JOBS = 4  # that a prefill engine holds at a time
CHUNK_BLOCKS = 2  # of a step, where prompts leave as they are computed
FINISH_BOUND_STEPS = 60  # from the KV's arrival to the first token, with seats free


class Broken(Exception):
    """What must never happen has happened."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise Broken(text)


@dataclass
class Job:
    """A peer's prompt here."""
    prefill: Prefill
    writes: AttemptWrites
    blocks: list[int] = field(default_factory=list)
    filled: int = 0  # how many of them hold their KV
    cancelled: bool = False
    unproven: bool = False  # a write of it has failed, and may land

    @property
    def computed(self) -> bool:
        """Whether all of them do."""
        return bool(self.blocks) and self.filled == len(self.blocks)

    @property
    def flying(self) -> bool:
        """Whether a write is under way."""
        return self.writes.open is not None


class Engine:
    """The step loop of one engine. `wake` makes it step; it steps on while there is work."""
    writes_type = AttemptWrites
    agents_type = TransferAgents

    def __init__(self, node: Node, post: Post):
        self.node = node
        self.kernel: Kernel = post.kernel
        self.engines: dict[str, Engine] = {}
        self.jobs: dict[m.Attempt, Job] = {}
        self.results: collections.Counter[str] = collections.Counter()  # by request id: how often it ended
        self.agents = self.agents_type(self)
        self._stepping = False
        node.wake = self.wake
        node.set_credits(JOBS, 0)

    @property
    def is_stepping(self) -> bool:
        """Whether it has a step to make, as the one after the last token of a request, by which the ranks learn it."""
        return self._stepping

    def wake(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.kernel.at(self.kernel.random.uniform(0.2, 1.0) * STEP_S, self.node, "engine step", self._step)

    def _step(self) -> None:
        self._stepping = False
        for event in list(iter(self.node.poll_event, None)):
            self.handle(event)
        self.step()
        queued_tokens = sum(len(job.prefill.token_ids) for job in self.jobs.values() if not job.computed)
        self.node.set_credits(max(0, JOBS - len(self.jobs)), queued_tokens)
        if self.has_work():
            self.wake()

    def handle(self, event: Event) -> None:
        """Take what the protocol has for this engine."""
        if isinstance(event, Prefill):
            require(event.attempt not in self.jobs, "a job was given twice")
            self.jobs[event.attempt] = Job(event, self.writes_type(event.block_ids))
        elif isinstance(event, Cancelled):
            job = self.jobs.get(event.attempt)
            if job is None:
                self.node.ended(event.attempt)
            else:
                job.cancelled = True
                job.writes.close()
        elif isinstance(event, AddPeer | DropPeer):
            require(isinstance(event, AddPeer) or not any(j.flying and j.prefill.peer == event.name
                                                          for j in self.jobs.values()), "dropped while written to")
        elif isinstance(event, RenewTransport):
            self.agents.renew(event.name)
        elif isinstance(event, RetireTransport):
            self.agents.retire()
        else:
            self.decode_event(event)

    # Writes.

    def post(self, job: Job) -> None:
        """Post the job's next write, if one is due and its lease stands."""
        attempt = job.prefill.attempt
        if not (job.writes.is_due and self.node.may_write(attempt)):
            return
        part = job.writes.begin()
        there = self.engines.get(incarnation_of(job.prefill.peer))
        is_elsewhere = bool(self.node.member.host_id) if there is None else self.node.is_elsewhere(there.node)
        write = Write(attempt, job.prefill.peer, part.local_block_ids, part.remote_block_ids, part.is_last,
                      self.agents.newest, is_elsewhere)
        self.agents.writes.append(write)
        longest_s = self.kernel.faults.slow_write_s if self.kernel.happens(self.kernel.faults.slow_writes) else 0.1
        self.kernel.at(self.kernel.random.uniform(0.001, longest_s), None, "write", self._land, write)

    def _land(self, write: Write) -> None:
        """The hardware's doing: it needs no process but must have one, and may wait for it."""
        node, faults = self.node, self.kernel.faults
        if not node.alive or write not in self.agents.writes:
            return
        if node.stopped and self.kernel.random.random() < 0.5:
            node.backlog.append(("write", self._land, (write,)))
            return
        there = self.engines.get(incarnation_of(write.peer))
        if cut_s := self.kernel.cut_for(node.name, incarnation_of(write.peer)):
            if self.kernel.happens(0.3):
                self.kernel.at(self.kernel.random.uniform(0.0, cut_s), node, "write ended", self.write_ended, write,
                               False)
            else:
                self.kernel.at(cut_s + 0.001, None, "write", self._land, write)
            return
        broken = self.kernel.happens(faults.write_error)
        if there is None or not there.node.alive or write.peer not in there.agents.names:
            self.kernel.at(0.001, node, "write ended", self.write_ended, write, False)
            return
        if broken:
            there.written(write.attempt, write.target[:1], self.read(write.source[:1]))
        else:
            there.written(write.attempt, write.target, self.read(write.source))
            if write.is_last and not self.kernel.happens(faults.notice_loss):
                for _ in range(2 if self.kernel.happens(faults.notice_twice) else 1):
                    self.kernel.at(self.kernel.random.uniform(0.0, faults.delay_s), there.node, "notice",
                                   there.node.arrived, write.attempt, 0)
        self.kernel.at(0.001, node, "write ended", self.write_ended, write, not broken)

    def _drift(self, write: Write) -> None:
        """A write that has failed lands: with what its source holds now, whether or not its engine lives."""
        there = self.engines.get(incarnation_of(write.peer))
        if there is not None and there.node.alive and write.peer in there.agents.names:
            there.written(write.attempt, write.target, self.read(write.source))

    def write_ended(self, write: Write, ok: bool) -> None:
        """It has; not `ok`: with an error."""
        if write not in self.agents.writes:
            return
        self.agents.writes.remove(write)
        job = self.jobs.get(write.attempt)
        if job is None:
            return  # only where the rules are broken on purpose
        if not ok and write.is_elsewhere:
            job.unproven = True
            if self.kernel.happens(self.kernel.faults.drifts):
                self.kernel.at(self.kernel.random.uniform(0.0, self.kernel.faults.late_s), None, "drift", self._drift,
                               write)
        job.writes.end(ok, error="the transfer failed")
        if job.writes.is_over:
            del self.jobs[write.attempt]
            self.release_job(job)
            if job.unproven:
                self.node.unproven(write.attempt, job.writes.error)
            elif job.cancelled:
                self.node.ended(write.attempt)
            elif job.writes.error:
                self.node.failed(write.attempt, job.writes.error)
            else:
                self.node.sent(write.attempt, m.Timings())
        else:
            self.post(job)
        self.wake()

    def _end_cancelled(self) -> None:
        for attempt, job in list(self.jobs.items()):
            if job.cancelled and job.writes.is_over:
                del self.jobs[attempt]
                self.release_job(job)
                self.node.ended(attempt)

    # What a subclass knows.

    def client_asks(self, request_id: str, token_ids: list[int], max_tokens: int) -> None:
        """A request comes."""
        raise NotImplementedError

    def client_leaves(self, request_id: str) -> None:
        """It is aborted."""
        raise NotImplementedError

    def decode_event(self, event: Event) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def release_job(self, job: Job) -> None:
        raise NotImplementedError

    def read(self, blocks: list[int]) -> Any:
        raise NotImplementedError

    def written(self, attempt: m.Attempt, blocks: list[int], kv: Any) -> None:
        """A peer's write reaches our memory."""
        raise NotImplementedError

    def check_at_rest(self) -> None:
        """B20."""
        node = self.node
        require(not node.decode.states() and not node.decode.fenced(), f"{node.name} has open attempts")
        require(not node.prefill.states() and not self.jobs, f"{node.name} has jobs")
        require(all(count == 1 for count in self.results.values()), f"a request of {node.name} ended more than once")


class Stage(Enum):
    """Where a request of a light engine is."""
    WAITING = "waiting"
    PARKED = "parked"
    RUNNING = "running"


@dataclass
class _Request:
    request_id: str
    token_ids: list[int]
    left: int  # tokens to be decoded
    stage: Stage = Stage.WAITING
    attempt: m.Attempt | None = None
    tries: int = 0
    avoid: tuple[str, ...] = ()
    blocks: list[int] = field(default_factory=list)
    began: float = 0.0


class LightEngine(Engine):
    """A pool of blocks, a queue, and batches without a limit. The KV of a block is whose prompt lies in it. With
    `push_chunks` a job is computed some blocks at a step, which leave then."""
    sends_early = False  # what is to be computed with the next step

    def __init__(self, node: Node, post: Post, blocks: int):
        super().__init__(node, post)
        self.blocks = blocks
        self.free: list[int] = list(range(blocks))
        self.kv: dict[int, Any] = {}
        self.requests: dict[str, _Request] = {}
        self.quarantined: dict[m.Attempt, list[int]] = {}
        self._by_attempt: dict[m.Attempt, _Request] = {}
        config = node.config
        self._policy = PolicyConfig(max_local_prefill_tokens=config.max_local_prefill_tokens,
                                    max_queue_length=config.max_queue_length,
                                    max_parked_fraction=config.max_parked_fraction)

    def client_asks(self, request_id: str, token_ids: list[int], max_tokens: int) -> None:
        self.requests[request_id] = _Request(request_id, token_ids, max_tokens, began=self.kernel.now)
        self.wake()

    def client_leaves(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self.results[request_id] += 1
        blocks, request.blocks = request.blocks, []
        if request.stage is Stage.PARKED:
            del self._by_attempt[request.attempt]
            self.quarantined[request.attempt] = blocks
            self.node.abort(request.attempt)
        else:
            self._give_back(blocks)
        self.wake()

    def has_work(self) -> bool:
        return (any(r.stage is Stage.RUNNING for r in self.requests.values())
                or any(job.writes.is_due or not job.computed for job in self.jobs.values())
                or any(r.stage is Stage.WAITING and len(self.free) >= self._need(r) for r in self.requests.values()))

    @staticmethod
    def _need(request: _Request) -> int:
        return -(-len(request.token_ids) // BLOCK_SIZE)

    def step(self) -> None:
        self._end_cancelled()
        for job in list(self.jobs.values()):
            self._advance(job)
        for request in list(self.requests.values()):
            if request.stage is Stage.RUNNING:
                self._check(request)
                request.left -= 1
                if request.left <= 0:
                    del self.requests[request.request_id]
                    self.results[request.request_id] += 1
                    self._give_back(request.blocks)
        for request in list(self.requests.values()):
            if request.stage is Stage.WAITING:
                if len(self.free) < self._need(request):
                    break  # first in, first out
                self._admit(request)

    def _advance(self, job: Job) -> None:
        if not job.blocks:
            need = -(-len(job.prefill.token_ids) // BLOCK_SIZE)
            if len(self.free) < need:
                if need > self.blocks:
                    del self.jobs[job.prefill.attempt]
                    self.node.failed(job.prefill.attempt, "it does not fit")
                return
            job.blocks = self._take(need)
        else:
            self.post(job)
        if not job.computed:
            whole, first = len(job.blocks), job.filled
            job.filled = min(whole, first + CHUNK_BLOCKS) if self.node.config.push_chunks else whole
            self._fill(job.blocks[first:job.filled], job.prefill.token_ids, first)
            ready = min(whole, job.filled + CHUNK_BLOCKS * self.sends_early)
            job.writes.add(job.blocks[job.writes.added:ready], is_last=ready == whole)

    def _admit(self, request: _Request) -> None:
        view = self.node.view(request.avoid)
        parked = sum(len(r.blocks) for r in self._by_attempt.values()) + sum(map(len, self.quarantined.values()))
        decision = decide(PolicyInput(
            prompt_tokens=len(request.token_ids), cached_tokens=0, blocks=self._need(request), can_go_remote=True,
            attempts_made=request.tries, time_left_s=self.node.config.attempt_deadline_s - (
                self.kernel.now - request.began), broker_up=view.broker_up, prefill_peers=view.prefill_peers,
            queue_length=view.queue_length, parked_blocks=parked, total_blocks=self.blocks,
            parked_requests=len(self._by_attempt), total_requests=64,
            whole_blocks=len(request.token_ids) // BLOCK_SIZE), self._policy)
        request.blocks = self._take(self._need(request))
        if self.node.member.role.decodes and decision.remote:
            attempt = request.attempt = self.node.next_attempt(request.request_id)
            request.stage = Stage.PARKED
            request.tries += 1
            self._by_attempt[attempt] = request
            require(parked + len(request.blocks) <= self.node.config.max_parked_fraction * self.blocks,
                    "B31: more is parked than may be")
            self.node.submit(attempt, request.token_ids, request.blocks, 0, request.avoid)
        else:
            request.stage = Stage.RUNNING
            self._fill(request.blocks, request.token_ids)

    def decode_event(self, event: Event) -> None:
        if isinstance(event, Timed):
            return
        attempt = event.attempt
        if isinstance(event, Released):
            require(attempt in self.quarantined, "released without having ended")
            self._give_back(self.quarantined.pop(attempt))
            return
        request = self._by_attempt.pop(attempt, None)
        if request is None:  # aborted since the event was made; after Prefilled nobody will release its blocks
            if isinstance(event, Prefilled):
                self._give_back(self.quarantined.pop(attempt))
            return
        if isinstance(event, Prefilled):
            request.stage = Stage.RUNNING
            self._check(request)
        else:
            require(isinstance(event, Fallback), f"{event} is nothing for this engine")
            self.quarantined[attempt], request.blocks = request.blocks, []
            request.stage = Stage.WAITING
            if not event.reason.another_may_help:
                request.tries = self._policy.attempts
            elif event.peer:
                request.avoid += (event.peer, )

    # Blocks.

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        require(not set(blocks) & set(self.free), "a block was freed twice")
        self.free = blocks + self.free  # soon used again, as is worst

    def _fill(self, blocks: list[int], token_ids: list[int], first: int = 0) -> None:
        for index, block in enumerate(blocks, first):
            self.kv[block] = (token_ids[0], index)

    def _check(self, request: _Request) -> None:
        for index, block in enumerate(request.blocks):
            require(self.kv.get(block) == (request.token_ids[0], index),
                    f"request {request.request_id} of {self.node.name} reads KV that is not its own")

    def release_job(self, job: Job) -> None:
        self._give_back(job.blocks)

    def read(self, blocks: list[int]) -> Any:
        return [self.kv.get(block) for block in blocks]

    def written(self, attempt: m.Attempt, blocks: list[int], kv: Any) -> None:
        request = self._by_attempt.get(attempt)
        table = self.quarantined.get(attempt) if request is None else request.blocks
        require(table is not None and set(blocks) <= set(table), f"a write for {attempt} landed outside its fence")
        self.kv.update(zip(blocks, kv, strict=True))

    def check_at_rest(self) -> None:
        super().check_at_rest()
        require(not self.requests, f"requests of {self.node.name} never end")
        require(sorted(self.free) == list(range(self.blocks)), f"{self.node.name} has lost blocks")
