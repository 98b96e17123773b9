# SPDX-License-Identifier: Apache-2.0
"""Loads that shift between long prompts and long answers. A load is a list of phases; its requests are drawn by a seed.
"""
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Traffic(NamedTuple):
    """Requests a second, and the mean tokens of their prompts and answers."""
    per_s: float
    prompt_tokens: float
    answer_tokens: float


@dataclass(frozen=True)
class Phase:
    """Traffic that goes evenly from one mix to another; the same one: it stays."""
    lasts_s: float
    begins: Traffic
    ends: Traffic

    def at(self, share: float) -> Traffic:
        """The traffic after this share of the phase."""
        return Traffic(*(a + share * (b - a) for a, b in zip(self.begins, self.ends, strict=True)))


class LoadRequest(msgspec.Struct, eq=False):
    """A request, and what came of it: the time to its first token, and the mean time between two tokens."""
    arrives_s: float
    prompt_tokens: int
    answer_tokens: int
    first_s: float = 0.0
    ttft_s: float | None = None
    itl_s: float | None = None


def stays(traffic: Traffic, lasts_s: float) -> Phase:
    """The same traffic for so long."""
    return Phase(lasts_s, traffic, traffic)


def draw(phases: Sequence[Phase], seed: int) -> list[LoadRequest]:
    """Its requests in the order in which they arrive: a Poisson process, lengths that spread around their means."""
    return list(_draw(phases, random.Random(seed)))


def _draw(phases: Sequence[Phase], chance: random.Random) -> Iterator[LoadRequest]:
    begun_s = 0.0
    for phase in phases:
        at_s = 0.0
        while True:
            at_s += chance.expovariate(phase.at(at_s / phase.lasts_s).per_s)
            if at_s >= phase.lasts_s:
                break
            now = phase.at(at_s / phase.lasts_s)
            yield LoadRequest(begun_s + at_s, max(1, int(now.prompt_tokens * chance.uniform(0.5, 1.5))),
                              max(2, int(now.answer_tokens * chance.uniform(0.5, 1.5))))
        begun_s += phase.lasts_s


def lasts_s(phases: Sequence[Phase]) -> float:
    """All phases together."""
    return sum(phase.lasts_s for phase in phases)


# For the fleet of `fleet.SPEED`, of eight engines: each of these needs about seven of them.
PROMPTS = Traffic(10.0, 5000.0, 60.0)  # five for prefill, two for decode
EVEN = Traffic(13.0, 2600.0, 300.0)
ANSWERS = Traffic(16.0, 900.0, 420.0)
LIGHT = Traffic(5.0, 1500.0, 150.0)
SLOW_PROMPTS = Traffic(3.2, 14_000.0, 900.0)  # an engine needs most of a minute until it has drained
SLOW_ANSWERS = Traffic(3.6, 1500.0, 2000.0)

LOADS: dict[str, tuple[Phase, ...]] = {
    "steady, even": (stays(EVEN, 1800), ),
    "steady, long prompts": (stays(PROMPTS, 1800), ),
    "steady, long answers": (stays(ANSWERS, 1800), ),
    "one step": (stays(PROMPTS, 1200), stays(ANSWERS, 1200)),
    "steps each 10 minutes": tuple(stays(one, 600) for one in (PROMPTS, ANSWERS) * 3),
    "steps each 20 minutes, light between": tuple(
        phase for one in (PROMPTS, ANSWERS) * 2 for phase in (stays(one, 1200), stays(LIGHT, 300))),
    "ramps of 15 minutes": tuple(
        phase for a, b in ((PROMPTS, ANSWERS), (ANSWERS, PROMPTS)) * 2 for phase in (stays(a, 300), Phase(900, a, b))),
    "long drains, steps each 20 minutes": tuple(stays(one, 1200) for one in (SLOW_PROMPTS, SLOW_ANSWERS) * 2),
    "bursts of a minute": tuple(phase for _ in range(6) for phase in (stays(EVEN, 240), stays(PROMPTS, 60))),
    "bursts of ten seconds": tuple(
        phase for _ in range(12) for phase in (stays(EVEN, 140), stays(PROMPTS._replace(per_s=16.0), 10))),
}
SHIFTING = ("one step", "steps each 10 minutes", "steps each 20 minutes, light between", "ramps of 15 minutes",
            "long drains, steps each 20 minutes")
