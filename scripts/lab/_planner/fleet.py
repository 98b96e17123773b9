# SPDX-License-Identifier: Apache-2.0
"""A fleet of engines that prefill or decode, in simulated time.

A request takes a seat and KV blocks at the decode engine with the fewest requests, its prompt is computed by the first
prefill engine that is free, and then its tokens come, all the slower the more requests the engine decodes. An engine
that changes its role takes nothing new and acts in its new one when all that it had is done.

Time goes in ticks. Within one, all requests of a decode engine get the same part of a token, so an engine counts the
tokens that each of its requests has got since the beginning, and a request is done when that count has grown by its
answer.
"""
import collections
import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from _planner.loads import LoadRequest
from vllm_pd.decisions.wanted import DecodeReading, PrefillReading, WantedEngines
from vllm_pd.protocol.messages import Role

TICK_S = 0.1
PATIENCE_S = 20.0  # a client that has no token by then goes away
END_S = 600.0  # after the last request: what is not done by then has failed


@dataclass(frozen=True)
class FleetSpeed:
    """Of one engine: prompt tokens a second, seconds of a step that decodes, alone and for each request, what it has
    room for. `send_s`: what a prompt's KV takes to come."""
    tokens_per_s: float = 12_000.0
    step_s: float = 0.012
    request_s: float = 0.0005
    seats: int = 96
    kv_tokens: int = 600_000
    send_s: float = 0.03


@dataclass(frozen=True)
class Targets:
    """What a request must meet to count, in seconds: to its first token, and from one token to the next on average."""
    ttft_s: float = 3.0
    itl_s: float = 0.05


SPEED, TARGETS, ENGINES = FleetSpeed(), Targets(), 8


class Ticked(NamedTuple):
    """What an engine has done in a tick: tokens of answers, the time between two of them, prompts whose KV has
    come."""
    tokens: float
    step_s: float
    computed: list[LoadRequest]


class SimulatedEngine:
    """An engine. `role` is what it acts as for new work."""

    def __init__(self, number: int, role: Role, speed: FleetSpeed) -> None:
        self.number, self.role = number, role
        self._speed = speed
        self.seated = 0  # with a seat, parked or decoding
        self.parked_tokens = 0
        self.kv_tokens = 0
        self._decoding: list[tuple[float, int, LoadRequest]] = []  # by the count at which each is done
        self._count = 0.0
        self._numbers = itertools.count()
        self._free_at_s = 0.0  # when the prompt that it computes is done
        self._sent: collections.deque[tuple[float, LoadRequest, SimulatedEngine]] = collections.deque()

    @property
    def decoding(self) -> int:
        """How many requests get tokens."""
        return len(self._decoding)

    def has_room(self, request: LoadRequest) -> bool:
        """Whether a request may take a seat."""
        tokens = request.prompt_tokens + request.answer_tokens
        return self.seated < self._speed.seats and self.kv_tokens + tokens <= self._speed.kv_tokens

    def seat(self, request: LoadRequest) -> None:
        """A request takes a seat, and is parked."""
        self.seated += 1
        self.kv_tokens += request.prompt_tokens + request.answer_tokens
        self.parked_tokens += request.prompt_tokens + request.answer_tokens

    def leave(self, request: LoadRequest) -> None:
        """The client of a parked request has gone away."""
        self.seated -= 1
        self.kv_tokens -= request.prompt_tokens + request.answer_tokens
        self.parked_tokens -= request.prompt_tokens + request.answer_tokens

    def decode(self, now: float, request: LoadRequest) -> None:
        """The KV of a parked request has come; its first token comes with the next step."""
        self.parked_tokens -= request.prompt_tokens + request.answer_tokens
        request.first_s = now + self._step_s(self.decoding + 1)
        request.ttft_s = request.first_s - request.arrives_s
        heapq.heappush(self._decoding, (self._count + request.answer_tokens, next(self._numbers), request))

    def begin(self, queued_s: float, job: LoadRequest, owner: "SimulatedEngine") -> float:
        """Compute a prompt, as soon as the last one is done. Returns since when."""
        begun_s = max(self._free_at_s, queued_s)
        self._free_at_s = begun_s + job.prompt_tokens / self._speed.tokens_per_s
        self._sent.append((self._free_at_s + self._speed.send_s, job, owner))
        return begun_s

    def takes_job(self, now: float) -> bool:
        """Whether the next prompt may begin."""
        return self.role is Role.PREFILL and self._free_at_s <= now and self.seated == 0

    def takes_request(self, now: float) -> bool:
        """Whether a request may take a seat, as far as it has room."""
        return self.role is Role.DECODE and self._free_at_s <= now

    @property
    def open(self) -> int:
        """How many requests and jobs it has."""
        return self.seated + len(self._sent)

    def backlog_tokens(self, now: float) -> float:
        """Prompt tokens that it has begun and not computed."""
        return max(0.0, self._free_at_s - now) * self._speed.tokens_per_s

    def tick(self, now: float, seconds: float) -> Ticked:
        """So much time passes until now."""
        computed: list[LoadRequest] = []
        while self._sent and self._sent[0][0] <= now:
            arrived_s, request, owner = self._sent.popleft()
            owner.decode(arrived_s, request)
            computed.append(request)
        if not self._decoding:
            return Ticked(0, 0.0, computed)
        step_s, running = self._step_s(self.decoding), self.decoding
        self._count += seconds / step_s
        while self._decoding and self._decoding[0][0] <= self._count:
            _, _, request = heapq.heappop(self._decoding)
            request.itl_s = max(0.0, now - request.first_s) / (request.answer_tokens - 1)
            self.seated -= 1
            self.kv_tokens -= request.prompt_tokens + request.answer_tokens
        return Ticked(running * seconds / step_s, step_s, computed)

    def _step_s(self, requests: int) -> float:
        return self._speed.step_s + self._speed.request_s * requests


@dataclass
class _Counted:
    """What was counted since the last decision."""
    tokens: float = 0.0
    itl_sum_s: float = 0.0
    offered_tokens: int = 0
    waits_s: list[float] = field(default_factory=list)
    computed: list[LoadRequest] = field(default_factory=list)


class SimulatedFleet:
    """A fleet and the requests that come to it. `prefill` of its engines begin as prefill engines."""

    def __init__(self, prefill: int, engines: int = ENGINES, speed: FleetSpeed = SPEED) -> None:
        self.now = 0.0
        self.speed = speed
        self.engines = [SimulatedEngine(number, Role.PREFILL if number < prefill else Role.DECODE, speed)
                        for number in range(engines)]
        self._at_door: collections.deque[LoadRequest] = collections.deque()
        self._jobs: collections.deque[tuple[float, LoadRequest, SimulatedEngine]] = collections.deque()
        self._queued_tokens = 0
        self._counted = _Counted()

    def of_role(self, role: Role) -> list[SimulatedEngine]:
        """The engines that act so."""
        return [engine for engine in self.engines if engine.role is role]

    def run(self, requests: Sequence[LoadRequest], planner: "SimulatedPlanner | None" = None) -> None:
        """All requests, to the end."""
        coming = iter(requests)
        upcoming = next(coming, None)
        until_s = requests[-1].arrives_s + END_S
        for tick in itertools.count(1):
            self.now = tick * TICK_S
            if self.now > until_s or (upcoming is None and not self._is_busy()):
                return
            while upcoming is not None and upcoming.arrives_s <= self.now:
                self._at_door.append(upcoming)
                upcoming = next(coming, None)
            self._tick()
            if planner is not None:
                planner.look(self)

    def readings(self, passed_s: float) -> tuple[PrefillReading, DecodeReading]:
        """What a planner sees of the last interval, and of this moment. The next interval begins."""
        counted, self._counted = self._counted, _Counted()
        prefill, decode = self.of_role(Role.PREFILL), self.of_role(Role.DECODE)
        rate = len(prefill) * self.speed.tokens_per_s
        backlog_s = (self._queued_tokens + sum(one.backlog_tokens(self.now) for one in prefill)) / max(1.0, rate)
        computed, tokens = counted.computed, counted.tokens
        seats, kv = (max(1, len(decode)) * each for each in (self.speed.seats, self.speed.kv_tokens))
        return (PrefillReading(
            len(prefill), 0, counted.offered_tokens / max(1.0, rate * passed_s), max(_mean(counted.waits_s), backlog_s),
            _mean([one.prompt_tokens for one in computed]) / self.speed.tokens_per_s + self.speed.send_s),
                DecodeReading(
            len(decode), 0, sum(one.kv_tokens for one in decode) / kv, sum(one.parked_tokens for one in decode) / kv,
            sum(one.seated for one in decode), len(self._at_door), counted.itl_sum_s / tokens if tokens else None,
            _mean([one.ttft_s for one in computed]) if computed else None,
            _mean(counted.waits_s) + _mean([one.prompt_tokens for one in computed]) / self.speed.tokens_per_s))

    def _is_busy(self) -> bool:
        return bool(self._at_door or self._jobs or any(one.open for one in self.engines))

    def _tick(self) -> None:
        decoders = [one for one in self.engines if one.takes_request(self.now)]
        while self._at_door and self._at_door[0].arrives_s + PATIENCE_S <= self.now:
            self._at_door.popleft()
        while self._jobs and self._jobs[0][1].arrives_s + PATIENCE_S <= self.now:
            _, request, owner = self._jobs.popleft()
            self._queued_tokens -= request.prompt_tokens
            owner.leave(request)
        while self._at_door and decoders:
            chosen = min(decoders, key=lambda one: (one.seated, one.number))
            if not chosen.has_room(self._at_door[0]):
                break
            request = self._at_door.popleft()
            chosen.seat(request)
            self._jobs.append((self.now, request, chosen))
            self._queued_tokens += request.prompt_tokens
            self._counted.offered_tokens += request.prompt_tokens
        for engine in self.engines:
            while self._jobs and engine.takes_job(self.now):
                queued_s, request, owner = self._jobs.popleft()
                self._queued_tokens -= request.prompt_tokens
                self._counted.waits_s.append(engine.begin(queued_s, request, owner) - queued_s)
            ticked = engine.tick(self.now, TICK_S)
            self._counted.tokens += ticked.tokens
            self._counted.itl_sum_s += ticked.tokens * ticked.step_s
            self._counted.computed += ticked.computed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class SimulatedPlanner:
    """`vllm-pd planner --flip` of a simulated fleet. `rule`: makes the decisions. `trace`: at each decision the time,
    the prefill engines, and both pressures. `changed_s`: when an engine changed its role."""

    def __init__(self, rule: WantedEngines, interval_s: float) -> None:
        self.rule, self.interval_s = rule, interval_s
        self.trace: list[tuple[float, int, float, float]] = []
        self.changed_s: list[float] = []
        self._looked_s = 0.0

    def look(self, fleet: SimulatedFleet) -> None:
        """Decide, if it is time."""
        if fleet.now < self._looked_s + self.interval_s:
            return
        found = self.rule.decide(fleet.now, *fleet.readings(fleet.now - self._looked_s))
        self._looked_s = fleet.now
        self.trace.append((fleet.now, found.prefill.present, found.prefill.pressure, found.decode.pressure))
        if found.flip_to is None:
            return
        gives = Role.DECODE if found.flip_to is Role.PREFILL else Role.PREFILL
        chosen = min(fleet.of_role(gives), key=lambda one: (one.open, one.number))
        chosen.role = found.flip_to
        self.changed_s.append(fleet.now)
        self.rule.role_changed(fleet.now)


def goodput(requests: Iterable[LoadRequest], seconds: float, targets: Targets) -> float:
    """The requests a second that met both targets."""
    return sum(one.ttft_s is not None and one.itl_s is not None and one.ttft_s <= targets.ttft_s
               and one.itl_s <= targets.itl_s for one in requests) / seconds
