# SPDX-License-Identifier: Apache-2.0
"""One decode engine, its prefill engines and the broker between them, with the real policy.

What is real: `policy.decide`, `DecodeMeasures`, `StepTimer`, `OwnJobs`, when a job is due and how long a step with jobs
is (`job_order`), and the loads of `vllm_pd.bench.serve`. What is simulated: the engines, hops of `HOP_S`, and reports,
which wait for the heartbeat of a prefill engine and then for that of the decode engine. An aged or missing report is so
as old here as there. No block pool: nothing is preempted.
"""
import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_pd.decisions.expected import expect
from vllm_pd.decisions.job_order import JobOrder, step_tokens
from vllm_pd.decisions.measured import DecodeMeasures, StepSpeed, StepTimer
from vllm_pd.decisions.policy import PolicyConfig, PolicyInput, decide
from vllm_pd.peer.own_jobs import QUEUED, OwnJobs
from vllm_pd.protocol import messages as m

from .engine import BLOCK_TOKENS, EngineSpeed, SimClock, SimEngine, SimRequest

HOP_S = 0.001
HEARTBEAT_S = 1.0
JOBS_AT_A_TIME = 8
READ_S = 0.005  # of a prefix, before its bytes
WRITE_S = 0.002  # the same of a write
DEADLINE_S = 120.0
ORDER = JobOrder(overtaking=8.0, step_s=0.75, most_s=DEADLINE_S / 4)  # the defaults


@dataclass(eq=False)
class SimJob:
    """A hand-over. `tokens`: to be computed, as the decode engine sees it."""
    request: SimRequest
    tokens: int
    cached_tokens: int
    submitted_at: float
    expected_s: float | None = None  # to the first token
    taken_at: float = 0.0
    computed_at: float = 0.0
    twin: SimRequest | None = None  # of its request, on the prefill engine


@dataclass(eq=False)
class ModelPrefill:
    """A prefill engine."""
    name: str
    engine: SimEngine
    jobs: set[SimJob] = field(default_factory=set)
    speed: StepSpeed = field(default_factory=StepSpeed)
    reported: m.PrefillLoad = m.PrefillLoad("")

    def load(self) -> m.PrefillLoad:
        """At this moment."""
        return m.PrefillLoad(self.name, sum(job.tokens for job in self.jobs if not job.computed_at),
                             self.speed.tokens_per_s)


class ModelFleet:
    """The fleet. `decisions` counts (remote, reason). `errors_s`: by how much the time that was expected of each
    hand-over was wrong, as it was known when the KV arrived."""

    def __init__(self, clock: SimClock, speeds: list[EngineSpeed], policy: PolicyConfig) -> None:
        self._clock = clock
        self._policy = policy
        self.decisions: collections.Counter[str] = collections.Counter()
        self.errors_s: list[float] = []
        self.decode = SimEngine(clock, speeds[0], self._admits)
        self._prefills = [ModelPrefill(f"p{number}", SimEngine(clock, speed))
                          for number, speed in enumerate(speeds[1:])]
        self._queue: collections.deque[SimJob] = collections.deque()
        self._jobs: dict[SimJob, str] = {}  # not computed, by who has them
        self._own = OwnJobs()
        speed = StepSpeed()
        self._measures = DecodeMeasures(speeds[0].batch_tokens, speed, ORDER)
        self.decode.stepped = timed(clock, speed)
        for prefill in self._prefills:
            prefill.engine.stepped = timed(clock, prefill.speed)
            prefill.engine.step_tokens = lambda one=prefill: step_tokens(one.speed.tokens_per_s, ORDER.step_s,
                                                                         one.engine.speed.batch_tokens)
        self._local: list[SimRequest] = []
        self._seen: tuple[int, int, list[m.PrefillLoad]] = (0, 0, [one.load() for one in self._prefills])
        for number, prefill in enumerate(self._prefills):
            clock.after(HEARTBEAT_S * (number + 1) / (len(self._prefills) + 1), lambda one=prefill: self._report(one))
        self._heartbeat()

    # What is known at the decode engine, and how it decides.

    def _report(self, prefill: ModelPrefill) -> None:
        prefill.reported = prefill.load()
        self._clock.after(HEARTBEAT_S, lambda: self._report(prefill))

    def _heartbeat(self) -> None:
        self._own.heartbeat(self._open_jobs())
        self._seen = (sum(job.tokens for job in self._queue), len(self._queue),
                      [one.reported if one.reported.incarnation else one.load() for one in self._prefills])
        self._clock.after(HEARTBEAT_S, self._heartbeat)

    def _open_jobs(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for job, taken_by in self._jobs.items():
            found.setdefault(taken_by, []).append(job.tokens)
        return found

    def _admits(self, request: SimRequest, cached_tokens: int) -> bool:
        now, tokens = self._clock.now, request.prompt_tokens - cached_tokens
        self._local = [one for one in self._local if one.left and not one.answered]
        expected = None
        if self._policy.auto:
            loads = self._own.corrected(self._open_jobs(), *self._seen)
            here = self._measures.here(now, sum(one.left for one in self._local), self.decode.decodes,
                                       [rate for _, rate in loads.busy])
            ours = tuple(tuple((job.tokens, now - job.taken_at) for job, name in self._jobs.items() if name == one.name)
                         for one in self._prefills)
            expected = expect(tokens, here, self._measures.there(now, tokens, loads.queued_tokens, loads.busy, ours))
        decision = decide(PolicyInput(
            prompt_tokens=request.prompt_tokens, cached_tokens=cached_tokens, blocks=0, can_go_remote=True,
            attempts_made=0, time_left_s=DEADLINE_S, broker_up=True, prefill_peers=len(self._prefills),
            queue_length=len(self._queue), parked_blocks=0, total_blocks=1, parked_requests=0, total_requests=1 << 20,
            expected=expected,
            whole_blocks=request.prompt_tokens // BLOCK_TOKENS - -(-cached_tokens // BLOCK_TOKENS)), self._policy)
        self.decisions[f"{'remote' if decision.remote else 'local'}, {decision.reason.value}"] += 1
        self._measures.decided(now, decision.remote, tokens)
        if decision.remote:
            job = SimJob(request, tokens, cached_tokens, now, None if expected is None else expected.there_s)
            self._jobs[job] = QUEUED
            self._clock.after(HOP_S, lambda: self._put(job))
        else:
            self._local.append(request)
        return not decision.remote

    # A hand-over.

    def _put(self, job: SimJob) -> None:
        self._queue.append(job)
        self._offer()

    def _offer(self) -> None:
        while self._queue:
            prefill = min(self._prefills, key=lambda one: len(one.jobs))
            if len(prefill.jobs) >= JOBS_AT_A_TIME:
                return
            job = self._queue.popleft()
            prefill.jobs.add(job)
            self._jobs[job] = prefill.name
            job.taken_at = self._clock.now
            self._clock.after(2 * HOP_S, lambda job=job, prefill=prefill: self._take(job, prefill))

    def _take(self, job: SimJob, prefill: ModelPrefill) -> None:
        """It reads what only the decode engine has cached, where that is quicker, and computes the rest."""
        request, engine = job.request, prefill.engine
        missing = job.cached_tokens - engine.hit(request.hashes, request.prompt_tokens)
        read_s = READ_S + missing / engine.speed.moved_per_s if missing > 0 else 0.0
        if 0 < read_s < missing * engine.speed.token_s:
            engine.cached.update(request.hashes[:job.cached_tokens // BLOCK_TOKENS])
        else:
            read_s = 0.0
        job.twin = SimRequest(request.name, request.prompt_tokens, request.hashes, 1,
                              lambda: self._computed(job, prefill))
        job.twin.due_s = ORDER.due_s(self._clock.now, job.tokens, prefill.speed.tokens_per_s)
        self._clock.after(read_s, lambda: engine.add(job.twin))

    def _computed(self, job: SimJob, prefill: ModelPrefill) -> None:
        now = self._clock.now
        job.computed_at = now
        del self._jobs[job]
        write_s = WRITE_S + job.tokens / prefill.engine.speed.moved_per_s
        self._clock.after(write_s, lambda: self._arrived(job, prefill, write_s))

    def _arrived(self, job: SimJob, prefill: ModelPrefill, write_s: float) -> None:
        now = self._clock.now
        prefill.jobs.discard(job)
        if job.expected_s is not None:
            self.errors_s.append(abs(now - job.submitted_at - job.expected_s))
        self._offer()
        self._measures.handed_over(now, job.tokens, now - job.submitted_at,
                                   job.computed_at - job.submitted_at, write_s)
        job.request.settled = True
        job.request.computed = job.request.prompt_tokens - 1
        self.decode.add(job.request, first=True)


def timed(clock: SimClock, speed: StepSpeed) -> Callable[[float, list[int]], None]:
    """What to call at the end of each step, so that it is measured."""
    timer, numbers = StepTimer(speed), itertools.count()

    def stepped(began_at: float, tokens: list[int]) -> None:
        number = next(numbers)
        timer.began(began_at, number, tokens)
        timer.ended(clock.now, number)

    return stepped
