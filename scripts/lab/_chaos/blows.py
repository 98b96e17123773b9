# SPDX-License-Identifier: Apache-2.0
"""The plan of a run, drawn from its seed: requests and blows. A blow kills or stops one process."""
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Blow(Enum):
    """SIGKILL or SIGSTOP to a prefill engine (P), a decode engine (D) or the broker."""
    KILL_P = "kill P"
    STOP_P = "stop P"
    KILL_D = "kill D"
    STOP_D = "stop D"
    KILL_BROKER = "kill broker"
    STOP_BROKER = "stop broker"

    @property
    def is_kill(self) -> bool:
        return self in (Blow.KILL_P, Blow.KILL_D, Blow.KILL_BROKER)


WEIGHTS = {Blow.KILL_P: 34, Blow.STOP_P: 24, Blow.KILL_D: 14, Blow.STOP_D: 8, Blow.KILL_BROKER: 12, Blow.STOP_BROKER: 8}
BURST_S = 1.2  # an episode's requests and its blow come within this time
# Of the broker's kills this share is followed by so long an absence, in a run of at least so many episodes.
LONG_ABSENCES, LONG_ABSENCE_S, LONG_RUN = 0.15, 30.0, 60
SPARED_AFTER = 1 / 3  # of the run: later the first P and the first D are only stopped


@dataclass
class GivenBlow:
    """A blow that was given, at `at` (monotonic) to the slot `place`. `pause_s`: how long a process stays stopped, or
    how long the broker is away. `felt_by`: the numbers of the requests that it affected."""
    number: int
    blow: Blow
    place: str
    incarnation: str
    at: float
    pause_s: float
    felt_by: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class PlannedBlow:
    """A blow to be given `offset_s` into its episode. `pick` in [0, 1) chooses among those that are eligible."""
    blow: Blow
    offset_s: float
    pick: float
    pause_s: float
    spare_first: bool


@dataclass(frozen=True)
class PlannedRequest:
    """A request that comes `offset_s` into its episode. `pick` in [0, 1) chooses its decode engine. After `abort_s`, if
    given, its client goes away."""
    number: int
    offset_s: float
    pick: float
    abort_s: float | None


@dataclass(frozen=True)
class Episode:
    """A burst of requests and at most one blow."""
    asks: Sequence[PlannedRequest]
    blow: PlannedBlow | None


def plan(seed: int, requests: int, episodes: int, abort_share: float, lease_s: float, ttl_s: float,
         first_number: int = 0, calm: bool = False) -> list[Episode]:
    """The episodes of a run. A `calm` run has the same requests at the same moments and no blow."""
    draw = random.Random(f"plan {seed}")
    numbers = iter(range(first_number, first_number + requests))
    result = []
    for index in range(episodes):
        share = requests * (index + 1) // episodes - requests * index // episodes
        asks = [PlannedRequest(next(numbers), draw.uniform(0, BURST_S), draw.random(),
                    draw.uniform(0, 0.6) if draw.random() < abort_share else None) for _ in range(share)]
        [blow] = draw.choices(list(WEIGHTS), WEIGHTS.values())
        if not blow.is_kill:
            # From a short pause to far beyond the lease, or beyond the broker's time to live.
            pause_s = draw.uniform(0.3, 2.2 * (ttl_s if blow is Blow.STOP_BROKER else lease_s))
        else:
            pause_s = draw.uniform(0.2, 2 * ttl_s) if blow is Blow.KILL_BROKER else 0.0
            if blow is Blow.KILL_BROKER and draw.random() < LONG_ABSENCES and episodes >= LONG_RUN:
                pause_s = LONG_ABSENCE_S
        planned = PlannedBlow(blow, draw.uniform(0.1, BURST_S), draw.random(), pause_s,
                              index >= SPARED_AFTER * episodes)
        result.append(Episode(asks, None if calm else planned))
    return result
