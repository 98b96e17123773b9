# SPDX-License-Identifier: Apache-2.0
"""What a fleet with another split would have made of a demand: queues as a fluid. Pure.

Prompts wait in their order, so of a prefill overload all are late once the queue is longer than the target, and stay so
until the queue is gone. That is why this has queues: a share of what is served, `engines / demand`, says of a fleet
with a tenth too little prefill that a tenth is late, and it is nearly all. Decode engines run all that comes, slower
the more there is. An engine that changes is missing at its old role at once and comes to its new one `change_s` later.
"""
import math
from collections import deque

import msgspec

from vllm_pd.decisions.demand import Demand, Targets

STEP_S = 2.0
MAX_STEPS = 30  # of one demand
MAX_BATCHES = 300  # what waits longer than so many steps is late anyhow
MIN_SLACK = 0.1  # of the engines: a queue that only begins to grow has few late ones as yet
VARIETY = 1.3  # 1 + the squared deviation of the prompts' lengths over their mean, about
MAX_RUNNING = 1e6
TINY = 1e-9


class _Batch(msgspec.Struct):
    """Prompts that arrived in one step: how many, seconds of an engine for all, tokens of an answer."""
    at_s: float
    requests: float
    work_s: float
    answer_tokens: float
    prefill_s: float


class FluidFleet:
    """A fleet that had `prefills` of `count` engines from the beginning. Owned by one caller."""

    def __init__(self, count: int, prefills: int, targets: Targets, change_s: float) -> None:
        self.goal = prefills
        self._targets, self._change_s = targets, change_s
        self._working = [prefills, count - prefills]
        self._coming: list[tuple[float, int, int]] = []  # (when, which role, how many)
        self._batches: deque[_Batch] = deque()
        self._running = self._in_time = self._tokens = self._itl_s = 0.0
        self._now = 0.0

    def change(self, prefills: int) -> None:
        """Have so many prefill engines from now on. No more can begin to change than work at present."""
        role, more = (1, prefills - self.goal) if prefills > self.goal else (0, self.goal - prefills)
        more = min(more, self._working[role])
        if not more:
            return
        if role == 1:  # those that run there end there
            left = 1 - more / self._working[1]
            self._running, self._in_time, self._tokens = (
                self._running * left, self._in_time * left, self._tokens * left)
        self._working[role] -= more
        self._coming.append((self._now + self._change_s, 1 - role, more))
        self.goal += more if role == 1 else -more

    def advance(self, demand: Demand) -> float:
        """How many requests that met their targets end in the demand's time."""
        steps = max(1, min(MAX_STEPS, round(min(demand.seconds, 1e6) / STEP_S)))
        step_s = demand.seconds / steps
        return math.fsum(self._step(demand, demand.at_s - demand.seconds + step_s * (number + 1), step_s)
                         for number in range(steps))

    def _step(self, demand: Demand, now: float, step_s: float) -> float:
        self._now = now
        for when, role, more in self._coming:
            if when <= now:
                self._working[role] += more
        self._coming = [one for one in self._coming if one[0] > now]
        requests = demand.requests_per_s * step_s
        self._batches.append(_Batch(now, requests, requests * demand.prefill_s, demand.answer_tokens,
                                    demand.prefill_s))
        if len(self._batches) > MAX_BATCHES:
            self._batches.popleft()
        self._prefill(now, self._working[0] * step_s, demand)
        return self._decode(demand, step_s)

    def _prefill(self, now: float, left_s: float, demand: Demand) -> None:
        while self._batches and left_s > TINY:
            batch = self._batches[0]
            done = 1.0 if batch.work_s <= left_s else left_s / batch.work_s
            share = in_time(now - batch.at_s, batch.prefill_s, demand.prefill_engines(), self._working[0],
                            self._targets.ttft_s)
            out = batch.requests * done
            self._running += out
            self._in_time += out * share
            self._tokens += out * batch.answer_tokens
            left_s -= batch.work_s * done
            if done == 1.0:
                self._batches.popleft()
            else:
                batch.requests, batch.work_s = batch.requests * (1 - done), batch.work_s * (1 - done)

    def _decode(self, demand: Demand, step_s: float) -> float:
        if not self._running > TINY or not self._working[1]:
            return 0.0
        self._running = min(self._running, MAX_RUNNING)
        now_s = demand.base_s + demand.slope_s * max(1.0, self._running / self._working[1])
        answer_s = now_s * max(1.0, self._tokens / self._running)
        self._itl_s += (now_s - (self._itl_s or now_s)) * min(1.0, 2 * step_s / answer_s) if self._itl_s else now_s
        ended = min(1.0, step_s / answer_s)
        good = self._in_time * ended * even_enough(self._itl_s, self._running, self._working[1], demand.slope_s,
                                                   self._targets.itl_s)
        self._running, self._in_time, self._tokens = (
            self._running * (1 - ended), self._in_time * (1 - ended), self._tokens * (1 - ended))
        return good


def in_time(waited_s: float, prefill_s: float, offered: float, engines: int, ttft_s: float) -> float:
    """The share of prompts with their first token in time, where the queue alone takes `waited_s`: others came just
    before some of them (the tail of a queue with several servers, about)."""
    slack_s = ttft_s - waited_s - prefill_s
    if slack_s <= 0 or engines <= 0:
        return 0.0
    busy = min(1.0, offered / engines)
    waits = busy**(math.sqrt(2 * (engines + 1)) - 1)
    return 1 - waits * math.exp(-2 * max(MIN_SLACK, 1 - busy) * engines * slack_s / (max(TINY, prefill_s) * VARIETY))


def even_enough(itl_s: float, running: float, engines: int, slope_s: float, target_s: float) -> float:
    """The share of answers whose mean time between tokens meets the target, where it is `itl_s` in the mean."""
    spread_s = max(TINY, 0.7 * slope_s * math.sqrt(running) / engines)
    return 0.5 * math.erfc((itl_s - target_s) / spread_s / math.sqrt(2))


def steady_share(demand: Demand, prefills: int, decodes: int, targets: Targets) -> float:
    """The share of good requests of a fleet that had this demand for long, without a queue from before. Where nothing
    is enough, splits that lack less have a little more."""
    prefill, decode = demand.prefill_engines(), demand.decode_engines(targets.itl_s)
    least = min(1.0, prefills / max(TINY, prefill), decodes / max(TINY, decode))
    if not prefills or not decodes:
        return 0.0
    made = demand.requests_per_s * demand.answer_tokens / decodes  # tokens a second of one engine
    itl_s = demand.base_s / max(0.05, 1 - made * demand.slope_s)
    running = made * itl_s * decodes
    early = in_time(0.0, demand.prefill_s, prefill, prefills, targets.ttft_s) if prefill < prefills else 0.0
    return 0.1 * least + 0.9 * early * even_enough(itl_s, running, decodes, demand.slope_s, targets.itl_s)
