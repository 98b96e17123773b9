# SPDX-License-Identifier: Apache-2.0
"""Simulated prefill engines beside the workers of a trace, which are then decode engines.

The broker's own registry gives them the jobs, or a queue without a choice (`nats_queue`), in simulated time. A decode
engine hands a prompt over by the rules of `vllm_pd.decisions.policy` that matter here: enough tokens that it has not
cached, a short queue, few parked blocks. The prompt's blocks are set aside there until the prefill engine has computed
it. That one has an allocator and a queue of its own, computes one prompt at a time, and what it holds is its hit.
Messages and transfers take no time.
"""
from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from vllm_pd.bench.simulation.nats_queue import SimNatsQueue
from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.bench.simulation.workers import SimRun, SimSpeed, SimWorker
from vllm_pd.broker.registry import QueueLimits, Registry
from vllm_pd.protocol import messages as m

HEARTBEAT_S = 1.0
DEADLINE_S = 1e6  # no job is given up


class PrefillFleet(msgspec.Struct, frozen=True):
    """The prefill engines, each as fast as `speeds` says, in prompt tokens per second. Without `count_tokens` their
    credits say job slots alone, as those of older releases: then the one with the most free slots gets a job. With
    `nats` no broker chooses, but each decode engine for itself."""
    speeds: tuple[float, ...] = (8000.0, 8000.0)
    blocks: int = 4096
    block_size: int = 16
    max_local_prefill_tokens: int = 1000
    max_queue_length: int = 64
    max_parked_fraction: float = 0.5
    max_prefill_jobs: int = 8
    max_prefill_tokens: int = 65536
    count_tokens: bool = True
    nats: bool = False


class PrefillFigures(msgspec.Struct, frozen=True):
    """What the prefill engines did. `hit_share`: tokens of the jobs' prompts that they had cached, of 1; `skew`: the
    most prompt tokens that one of them computed, over the mean of all."""
    jobs: int
    prompt_tokens: int
    computed_tokens: int
    hit_share: float
    skew: float
    mean_s: float  # from the job's way into the queue to the end of its prefill
    p99_s: float


class SimPrefill:
    """One prefill engine, and its messages to the registry."""

    def __init__(self, name: str, fleet: PrefillFleet, speed: float, fingerprint: m.Fingerprint) -> None:
        self.worker = SimWorker(name, fleet.blocks, fleet.block_size, SimSpeed(speed, 0.0), _ignore, _ignore)
        self.jobs: dict[int, m.Job] = {}  # by the conversation of the run, which has the job's number
        self._fleet = fleet
        self._speed = speed
        self._fingerprint = fingerprint
        self._serial = 0

    def register(self) -> m.Register:
        """Its heartbeat."""
        load = m.Load(free_blocks=self.worker.allocator.get_num_free_blocks(), tokens_per_s=self._speed,
                      job_tokens=sum(job.new_tokens for job in self.jobs.values()))
        return m.Register(m.Member(self.worker.name, m.Role.PREFILL, "", self._fingerprint, load))

    def credit(self) -> m.Credit:
        """What it could take."""
        free = max(0, self._fleet.max_prefill_jobs - len(self.jobs))
        if not self._fleet.count_tokens:
            return m.Credit(free, self._serial)
        queued = sum(job.new_tokens for job in self.jobs.values())
        return m.Credit(free, self._serial, max(0, self._fleet.max_prefill_tokens - queued), queued)

    def offer(self, now_s: float, offer: m.Offer) -> None:
        """It gets a job."""
        job = offer.job
        self._serial = offer.serial
        self.jobs[job.attempt.number] = job
        self.worker.submit(Arrival(now_s, job.attempt.number, 0, tuple(job.token_ids), ()), now_s, job.cached_tokens)


class SimFleet:
    """The workers of a trace and, with a `PrefillFleet`, the prefill engines behind them. Times must not decrease."""

    def __init__(self, workers: Sequence[SimWorker], fleet: PrefillFleet | None) -> None:
        self._decodes = workers
        self._fleet = fleet
        self._prefills: dict[str, SimPrefill] = {}
        self._parked: dict[int, tuple[SimWorker, SimRun, float]] = {}  # by the number of the attempt
        self._parked_blocks: dict[str, int] = dict.fromkeys((worker.name for worker in workers), 0)
        self._numbers = 0
        self._registry = SimNatsQueue() if fleet is not None and fleet.nats else Registry("b", QueueLimits())
        self._next_beat_s = 0.0
        self._waits_s: list[float] = []
        if fleet is None:
            return
        self._fingerprint = m.Fingerprint(m.PROTOCOL, "m", "f", "f", fleet.block_size, 1, 1, 1, "l")
        for number, speed in enumerate(fleet.speeds):
            prefill = SimPrefill(f"p{number}", fleet, speed, self._fingerprint)
            prefill.worker.on_end = self._on_computed
            self._prefills[prefill.worker.name] = prefill
        for worker in workers:
            worker.hand_over = self._hand_over

    def advance(self, until_s: float) -> None:
        """Simulates until `until_s`, all engines in the order of what happens."""
        if self._fleet is None:
            for worker in self._decodes:
                worker.advance(until_s)
            return
        everyone = [*self._decodes, *(prefill.worker for prefill in self._prefills.values())]
        while ends := [(end_s, number) for number, worker in enumerate(everyone)
                       if (end_s := worker.next_s()) is not None and end_s <= until_s]:
            next_s, number = min(ends)
            self._beat(next_s)
            everyone[number].advance(next_s)
        if until_s < float("inf"):
            self._beat(until_s)
            for worker in everyone:
                worker.advance(until_s)

    def figures(self) -> PrefillFigures | None:
        """What the prefill engines did, once everything is finished."""
        runs = [run for prefill in self._prefills.values() for run in prefill.worker.done]
        if not runs:
            return None
        computed = [sum(_left(run) for run in prefill.worker.done) for prefill in self._prefills.values()]
        prompts = sum(len(run.arrival.prompt) for run in runs)
        waits_s = sorted(self._waits_s)
        return PrefillFigures(len(runs), prompts, sum(computed), sum(run.hit_tokens for run in runs) / prompts,
                              max(computed) / statistics.fmean(computed), statistics.fmean(waits_s),
                              waits_s[(99 * len(waits_s) - 1) // 100])

    def _hand_over(self, worker: SimWorker, run: SimRun, now_s: float) -> bool:
        """Whether this prompt, whose blocks are allocated, is computed elsewhere."""
        fleet, blocks = self._fleet, len(run.blocks) + run.reserved_blocks
        parked = self._parked_blocks[worker.name] + blocks
        if (len(run.arrival.prompt) - run.hit_tokens <= fleet.max_local_prefill_tokens
                or len(self._registry) >= fleet.max_queue_length
                or parked > fleet.max_parked_fraction * worker.allocator.get_num_total_blocks()):
            return False
        self._numbers += 1
        number = self._numbers
        self._parked[number] = worker, run, now_s
        self._parked_blocks[worker.name] = parked
        job = m.Job(m.Attempt(worker.name, "r", number), "", list(run.arrival.prompt), run.hit_tokens, DEADLINE_S)
        self._send(now_s, worker.name, m.Put(job))
        return True

    def _on_computed(self, prefill: SimWorker, run: SimRun, now_s: float) -> None:
        number = run.arrival.conversation
        engine = self._prefills[prefill.name]
        del engine.jobs[number]
        worker, parked, put_s = self._parked.pop(number)
        self._waits_s.append(now_s - put_s)
        self._parked_blocks[worker.name] -= len(parked.blocks) + parked.reserved_blocks
        worker.arrived(parked, now_s)
        self._send(now_s, prefill.name, engine.credit())

    def _send(self, now_s: float, sender: str, message: m.Message) -> None:
        """A message to the registry, and those with which it answers."""
        for to, answer in self._registry.receive(now_s, sender, message):
            if isinstance(answer, m.Offer):
                self._prefills[to].offer(now_s, answer)
                self._send(now_s, to, self._prefills[to].credit())

    def _beat(self, until_s: float) -> None:
        """The heartbeats up to then."""
        while self._next_beat_s <= until_s:
            for worker in self._decodes:
                member = m.Member(worker.name, m.Role.DECODE, "", self._fingerprint)
                self._send(self._next_beat_s, worker.name, m.Register(member))
            for name, prefill in self._prefills.items():
                self._send(self._next_beat_s, name, prefill.register())
                self._send(self._next_beat_s, name, prefill.credit())
            self._next_beat_s += HEARTBEAT_S


def _left(run: SimRun) -> int:
    return max(1, len(run.arrival.prompt) - max(run.hit_tokens, run.given_tokens))


def _ignore(*event: object) -> None:
    """Nobody follows the events of a prefill engine."""
