# SPDX-License-Identifier: Apache-2.0
"""What a decode engine measures to decide by itself where a prompt is prefilled (`max_local_prefill_tokens: auto`).

How each estimate starts, stays fresh and ages:

    step_s          0. Each step of running decodes renews it
    speed here      each step with at least MIN_TOKENS prompt tokens renews it. Never measured: that of the peers
    speed of a P    with each of its reports, as it measured it. Never measured: that of here
    transfer        START_MOVED_PER_S; each hand-over renews it. It is what follows the computation. Where prefill
                    engines send while they compute that is the last write, and of a shorter prompt the only one
    overhead        START_OVERHEAD_S; the least of the last hand-overs, because what is more was waiting for a long
                    step of an engine, which this engine may have caused by its own decision

An engine that always hands over does not measure itself, and one that never does measures no hand-over. So what was
measured moves back: a speed to the mean of all speeds known, here and there, the overhead and the transfer to their
start, halfway in `HALF_LIFE_S`; a rate halfway in its logarithm. A wrong estimate can keep prompts from a place for
some half-lives, not for ever.
Until any speed is known nothing is estimated, and a fixed number decides.
"""
import collections
import math
from collections.abc import Iterable

from vllm_pd.decisions.expected import Here, There
from vllm_pd.decisions.job_order import JobOrder

KEPT = 0.8  # the weight of all earlier observations together, after each new one
KEPT_STEPS = 0.95  # the same of steps with prompts: their tokens are the weights, and few of them are long
MIN_LIFE_S = 1.0  # of a rate of arrivals
MIN_TOKENS = 64  # steps with fewer prompt tokens tell about latencies, not about rates
HALF_LIFE_S = 30.0
MIN_PROMPT_SHARE = 0.1  # of a step's time, that its prompt tokens take at the least: a decode step is never exact
START_MOVED_PER_S = 1e5  # tokens whose KV is written
START_OVERHEAD_S = 0.01
STEPS_IN_FLIGHT = 64  # more than any engine has
LAST_HAND_OVERS = 8
LAST_PROMPTS = 32  # that are taken for those that come later


class MeasuredRate:
    """Amount per second; the latest observations have the most weight. Starts as if `start` had been measured. `kept`:
    the weight of all earlier observations together, after each new one."""

    def __init__(self, start: float, kept: float = KEPT) -> None:
        self._amount, self._seconds = start / 10, 0.1
        self._kept = kept

    def observe(self, amount: float, seconds: float) -> None:
        """This amount took so many seconds."""
        self._amount = self._kept * self._amount + amount
        self._seconds = self._kept * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """The rate, by all observations."""
        return self._amount / self._seconds


def aged(measured: float, reference: float, age_s: float) -> float:
    """What was measured so many seconds ago, on its way to `reference`."""
    return reference + (measured - reference) * 0.5 ** (max(0.0, age_s) / HALF_LIFE_S)


def aged_rate(measured: float, reference: float, age_s: float) -> float:
    """The same for a rate, above 0: by its logarithm, or a fast reference would replace a slow rate within a moment."""
    return reference * (measured / reference) ** 0.5 ** (max(0.0, age_s) / HALF_LIFE_S)


class ArrivalRate:
    """How many come per second, by those of the last half-lives."""

    def __init__(self) -> None:
        self._count, self._at = 0.0, 0.0
        self._first_at: float | None = None

    def came(self, now: float) -> None:
        """One more has come."""
        self._first_at = now if self._first_at is None else self._first_at
        self._count, self._at = aged(self._count, 0.0, now - self._at) + 1, now

    def per_s(self, now: float) -> float:
        """The rate at present."""
        if self._first_at is None:
            return 0.0
        lived_s = max(MIN_LIFE_S, now - self._first_at)
        window_s = HALF_LIFE_S / math.log(2) * (1 - 0.5 ** (lived_s / HALF_LIFE_S))
        return aged(self._count, 0.0, now - self._at) / window_s


class StepSpeed:
    """How long the steps of this engine take. `step_s`: one that computes no prompt, 0 where there was none."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.measured_at = 0.0  # the speed
        self._computed: MeasuredRate | None = None

    def stepped(self, now: float, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step has taken so long. It computed so many tokens of prompts and one of each of the `decodes` requests."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            if decodes:
                self.step_s = seconds if not self.step_s else KEPT * self.step_s + (1 - KEPT) * seconds
        elif prompt_tokens >= MIN_TOKENS:
            prompt_s = max(MIN_PROMPT_SHARE * seconds, seconds - self.step_s)
            if self._computed is None:
                self._computed = MeasuredRate(prompt_tokens / prompt_s, KEPT_STEPS)
            self._computed.observe(prompt_tokens, prompt_s)
            self.measured_at = now

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second, beyond `step_s`; 0 where nothing was measured."""
        return 0.0 if self._computed is None else self._computed.per_s


class StepTimer:
    """How long each step takes, where several may be in flight: from its begin, or from the end of the one before it
    if that came later. Steps have numbers that grow."""

    def __init__(self, speed: StepSpeed) -> None:
        self._speed = speed
        self._open: collections.deque[tuple[int, float, int, int]] = collections.deque(maxlen=STEPS_IN_FLIGHT)
        self._ended_at = float("-inf")

    def began(self, now: float, number: int, token_counts: Iterable[int]) -> None:
        """A step was scheduled with so many tokens of each request; 1 is a decode."""
        counts = list(token_counts)
        decodes = counts.count(1)
        self._open.append((number, now, sum(counts) - decodes, decodes))

    def ended(self, now: float, number: int) -> None:
        """The output of this step is there. No effect for one that is not known."""
        while self._open and self._open[0][0] <= number:
            known, began_at, prompt_tokens, decodes = self._open.popleft()
            if known == number:
                self._speed.stepped(now, prompt_tokens, decodes, now - max(began_at, self._ended_at))
        self._ended_at = now


class DecodeMeasures:
    """One per decode engine. Times are seconds of the caller's clock. `batch_tokens`: the most tokens of a step.
    `speed`: of this engine. `order`: that of the prefill engines' jobs."""

    def __init__(self, batch_tokens: int, speed: StepSpeed, order: JobOrder | None = None) -> None:
        self._order = order
        self._later_tokens: collections.deque[int] = collections.deque(maxlen=LAST_PROMPTS)
        self._batch_tokens = batch_tokens
        self._speed = speed
        self._moved = MeasuredRate(START_MOVED_PER_S)  # tokens of a prompt, in the time of its writing afterwards
        self._sent_last = MeasuredRate(START_MOVED_PER_S)  # tokens of its last write, in that time
        self._last_tokens = 0.0  # of such a write
        self._overheads_s: collections.deque[float] = collections.deque(maxlen=LAST_HAND_OVERS)
        self._handed_over_at: float | None = None  # or when it was first asked for
        self._prompts = ArrivalRate()
        self._handed_over = ArrivalRate()

    def decided(self, now: float, remote: bool, tokens: int) -> None:
        """One more prompt goes to a peer, or stays; so many tokens of it are to be computed."""
        self._prompts.came(now)
        if remote:
            self._handed_over.came(now)
            self._later_tokens.append(tokens)

    def handed_over(self, now: float, tokens: int, total_s: float, known_s: float, transfer_s: float,
                    last_tokens: float | None = None) -> None:
        """A prefill engine has computed and written so many tokens. It took `total_s` from the submission to the notice
        of arrival, of which `known_s` are waiting and computing there, and `transfer_s` what was left of the writing
        then: the last write, of `last_tokens`; None: of all."""
        if tokens >= MIN_TOKENS and transfer_s > 0:
            last_tokens = tokens if last_tokens is None else last_tokens
            self._moved.observe(tokens, transfer_s)
            self._sent_last.observe(last_tokens, transfer_s)
            self._last_tokens = KEPT * (self._last_tokens or last_tokens) + (1 - KEPT) * last_tokens
        if self._hand_over_age_s(now) > HALF_LIFE_S:
            self._overheads_s.clear()
        self._overheads_s.append(max(0.0, total_s - known_s - transfer_s))
        self._handed_over_at = now

    def here(self, now: float, tokens_before: int, decodes: int, peer_rates: Iterable[float]) -> Here:
        """This engine now. `peer_rates`: tokens per second of the prefill engines, 0 where not measured."""
        own, mean = self._speeds(peer_rates)
        rate = aged_rate(own, mean, now - self._speed.measured_at) if own else mean
        return Here(tokens_before, rate, self._speed.step_s, decodes, self._batch_tokens, self._prompts.per_s(now))

    def there(self, now: float, tokens: int, queued_tokens: int, busy: Iterable[tuple[int, float]],
              ours: tuple[tuple[tuple[int, float], ...], ...] = (), paths_s: tuple[float, ...] = ()) -> There:
        """The prefill engines now, for a prompt with so many tokens to compute. `busy`, `ours` and `paths_s`: see
        `There`, with rate 0 where it is not measured."""
        engines = tuple(busy)
        own, mean = self._speeds(rate for _, rate in engines)
        age_s = self._hand_over_age_s(now)
        found = tuple((taken, aged_rate(rate, mean, age_s) if rate else own or mean) for taken, rate in engines)
        transfer_s = max(tokens / aged_rate(self._moved.per_s, START_MOVED_PER_S, age_s),
                         min(tokens, self._last_tokens) / aged_rate(self._sent_last.per_s, START_MOVED_PER_S, age_s))
        overhead_s = aged(min(self._overheads_s, default=START_OVERHEAD_S), START_OVERHEAD_S, age_s)
        return There(queued_tokens, found, transfer_s, overhead_s, self._handed_over.per_s(now), self._order,
                     ours, tuple(self._later_tokens), paths_s)

    def _hand_over_age_s(self, now: float) -> float:
        if self._handed_over_at is None:
            self._handed_over_at = now
        return now - self._handed_over_at

    def _speeds(self, peer_rates: Iterable[float]) -> tuple[float, float]:
        """Tokens per second, as measured: here, 0 where nothing was; and the mean of all engines that have measured
        any, 0 where none has."""
        own = self._speed.tokens_per_s
        known = [rate for rate in (own, *peer_rates) if rate > 0]
        return own, sum(known) / len(known) if known else 0.0
