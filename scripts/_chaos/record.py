# SPDX-License-Identifier: Apache-2.0
"""What is seen in a run."""
from dataclasses import dataclass, field

from _chaos.blows import GivenBlow
from _chaos.load import ChaosRequest


@dataclass
class GaugeSample:
    """One look at one engine."""
    place: str
    time: float
    gauges: dict


@dataclass
class SeenFallback:
    """An attempt that ended without the KV, and the blow to its prefill engine that made it."""
    request: int
    reason: str
    time: float
    cause: GivenBlow | None


@dataclass
class RunRecord:
    """What was seen in one run."""
    requests: dict[int, ChaosRequest] = field(default_factory=dict)
    struck: list[GivenBlow] = field(default_factory=list)
    fallbacks: list[SeenFallback] = field(default_factory=list)
    samples: list[GaugeSample] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # how long each engine took to come up
    counters: dict[str, float] = field(default_factory=dict)  # of engines that are dead by now, as last told
    began_at: float = 0.0
    ended_at: float = 0.0
