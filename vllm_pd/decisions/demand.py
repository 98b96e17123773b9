# SPDX-License-Identifier: Apache-2.0
"""What the clients of a fleet ask for, as work for prefill and for decode engines. Pure.

A look at a fleet says what was counted since the look before. `DemandMeter` makes a `Demand` of it: requests a second,
the seconds that a prefill engine needs for one, the tokens of an answer, and the line `base + slope * running` of the
time between two tokens. It is about what arrives and not about what is served, so it is the same whatever the split of
the fleet into prefill and decode engines is.

No history is needed: what was never seen is guessed (GUESSED_*), and each figure is kept in bounds.
"""
import math

import msgspec

POINTS_A_DOUBLING, NEW_SHARE = 3, 0.2  # of running requests; of a new time between tokens in what was seen there
KEPT_S = 6 * 3600.0
FULL_COUNT = 30.0  # requests whose mean is trusted without older ones
MIN_SPREAD = 0.2  # of the running requests, of their mean: with less the line has no slope of its own
MAX_NUMBER = 1e12
MIN_ITL_S, MAX_ITL_S, MIN_SPEED = 1e-5, 10.0, 1e-3
GUESSED_SPEED, GUESSED_SEATS = 10_000.0, 16.0  # tokens a second of a prefill engine; requests of a decode engine
GUESSED_PROMPT, GUESSED_ANSWER = 2000.0, 200.0  # tokens
BASE_SHARE = 0.5  # of the ITL that is there without other requests, where no line can be drawn


class Targets(msgspec.Struct, frozen=True):
    """What the clients are to see: seconds to the first token, and between two tokens."""
    ttft_s: float = 2.0
    itl_s: float = 0.05


class FleetLook(msgspec.Struct, frozen=True):
    """The fleet at `at_s`, and what was counted since the look before, at all its engines. `arrived`: requests of
    clients. `prompt_tokens`: those of prompts that were prefilled, without prefix hits of the decode engine.
    `answers`, `answer_tokens`: requests that ended, `slow`: those of them whose mean time between two tokens missed the
    target. `itl_s`: the mean time between two tokens, 0: there were none.
    `first_tokens`, `late`: requests with a first token, and those of them after the target. Now: `running` requests
    that decode, `waiting` ones without a first token with `waiting_tokens` to prefill, `decodes`: decode engines;
    `tokens_per_s`: of one busy prefill engine, 0: not known."""
    at_s: float
    arrived: float = 0.0
    prompt_tokens: float = 0.0
    answers: float = 0.0
    answer_tokens: float = 0.0
    itl_s: float = 0.0
    first_tokens: float = 0.0
    late: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    decodes: int = 0
    tokens_per_s: float = 0.0
    waiting_tokens: float = 0.0
    slow: float = 0.0


def bounded(look: FleetLook) -> FleetLook:
    """The same look with numbers that are finite and not below 0. Its `at_s` is left as it is."""
    counted = msgspec.structs.asdict(look)
    return msgspec.structs.replace(look, **{name: _bounded(value) for name, value in counted.items()
                                            if name not in ("at_s", "decodes")})


class Demand(msgspec.Struct, frozen=True):
    """What was asked for in `seconds`. `prefill_s`: seconds of a prefill engine for one request; `answer_tokens` of
    one. The time between two tokens of a decode engine with r requests is `base_s + slope_s * r`. `late`: the share of
    first tokens after the target; `waiting`: requests that have none yet; `running`: those that decode. `good`:
    requests that ended and met both targets, about."""
    at_s: float
    seconds: float
    requests_per_s: float
    prefill_s: float
    answer_tokens: float
    base_s: float
    slope_s: float
    late: float = 0.0
    waiting: float = 0.0
    running: float = 0.0
    good: float = 0.0

    def prefill_engines(self) -> float:
        """How many prefill engines would be busy all the time."""
        return self.requests_per_s * self.prefill_s

    def seats(self, itl_s: float) -> float:
        """How many requests a decode engine can have at this time between two tokens; 1 at least."""
        return max(1.0, (itl_s - self.base_s) / self.slope_s)

    def decode_engines(self, itl_s: float) -> float:
        """How many decode engines would run as many requests as they can at this time between two tokens."""
        return self.requests_per_s * self.answer_tokens * itl_s / self.seats(itl_s)


class DemandMeter:
    """Makes demands of looks. Owned by one caller."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._speed = GUESSED_SPEED
        self._prompt = _Mean(GUESSED_PROMPT)
        self._answer = _Mean(GUESSED_ANSWER)
        self._line = _Line(targets.itl_s)
        self._at_s: float | None = None
        self._waiting_tokens = 0.0

    def receive(self, look: FleetLook) -> Demand | None:
        """The demand since the look before. None for the first look, and for one that is not after the last."""
        before, now = self._at_s, look.at_s
        if not math.isfinite(now) or before is not None and now <= before:
            return None
        self._at_s = now
        if _known(look.tokens_per_s):
            self._speed = max(MIN_SPEED, _bounded(look.tokens_per_s))
        grown = _bounded(look.waiting_tokens) - self._waiting_tokens
        self._waiting_tokens += grown
        self._prompt.add(_bounded(look.arrived), _bounded(look.prompt_tokens) + (grown if before is not None else 0.0))
        self._answer.add(_bounded(look.answers), _bounded(look.answer_tokens))
        if look.decodes > 0 and _known(look.itl_s):
            itl_s = min(MAX_ITL_S, max(MIN_ITL_S, _bounded(look.itl_s)))
            self._line.add(now, _bounded(look.running) / look.decodes, itl_s)
        if before is None:
            return None
        base_s, slope_s = self._line.fit()
        late, slow = _share(look.late, look.first_tokens), _share(look.slow, look.answers)
        return Demand(now, now - before, _bounded(look.arrived) / (now - before), self._prompt.value / self._speed,
                      self._answer.value, base_s, slope_s, late, _bounded(look.waiting), _bounded(look.running),
                      _bounded(look.answers) * (1 - late) * (1 - slow))


class _Line:
    """The time between two tokens over the running requests of an engine: `base + slope * running`. An engine that is
    full is seen at one number of requests only, and one with little to do at few. So what was seen at others is kept,
    one point for about as many requests, for KEPT_S."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._points: dict[int, tuple[float, float, float]] = {}  # (seen at, running, seconds)

    def add(self, at_s: float, running: float, itl_s: float) -> None:
        """Of one look."""
        place = round(POINTS_A_DOUBLING * math.log2(max(1.0, running)))
        _, r, mean_s = self._points.get(place, (at_s, running, itl_s))
        self._points[place] = at_s, r + (running - r) * NEW_SHARE, mean_s + (itl_s - mean_s) * NEW_SHARE
        self._points = {key: point for key, point in self._points.items() if point[0] > at_s - KEPT_S}

    def fit(self) -> tuple[float, float]:
        """(base, slope): by least squares where there are points far enough from each other; else through their mean,
        or as the guess says."""
        points = [(r, itl_s) for _, r, itl_s in self._points.values()]
        if not points:
            return BASE_SHARE * self._target_s, (1 - BASE_SHARE) * self._target_s / GUESSED_SEATS
        mean_r = math.fsum(point[0] for point in points) / len(points)
        mean_s = math.fsum(point[1] for point in points) / len(points)
        square = math.fsum((point[0] - mean_r)**2 for point in points) / len(points)
        if mean_r > 0 and square > (MIN_SPREAD * mean_r)**2:
            slope_s = math.fsum((r - mean_r) * (itl - mean_s) for r, itl in points) / len(points) / square
            slope_s = min(max(slope_s, 0.05 * mean_s / mean_r), mean_s / mean_r)
            return mean_s - slope_s * mean_r, slope_s
        loaded_s = mean_s - BASE_SHARE * min(mean_s, self._target_s)  # many requests make it long, few do not
        slope_s = loaded_s / max(GUESSED_SEATS, mean_r)
        return mean_s - slope_s * mean_r, slope_s


class _Mean:
    """A mean over requests in which older ones fade."""

    def __init__(self, guess: float) -> None:
        self._count, self._sum = 0.1, guess * 0.1

    @property
    def value(self) -> float:
        return self._sum / self._count

    def add(self, count: float, total: float) -> None:
        """So many requests with so many tokens in all."""
        if count <= 0 or total <= 0:
            return
        fade = min(1.0, max(0.0, FULL_COUNT - count) / self._count)
        self._count, self._sum = self._count * fade + count, self._sum * fade + total


def _share(part: float, whole: float) -> float:
    whole = _bounded(whole)
    return min(1.0, _bounded(part) / whole) if whole else 0.0


def _known(number: float) -> bool:
    return math.isfinite(number) and number > 0


def _bounded(number: float) -> float:
    """Neither below 0 nor infinite; 0 for what is no number."""
    return min(max(0.0, number), MAX_NUMBER) if not math.isnan(number) else 0.0
