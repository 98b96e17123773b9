# SPDX-License-Identifier: Apache-2.0
"""What is seen in a run."""
from dataclasses import dataclass, field

from _chaos.blows import Struck
from _chaos.load import Request


@dataclass
class Sample:
    """One look at one engine."""
    place: str
    time: float
    gauges: dict


@dataclass
class Fallback:
    """An attempt that ended without the KV, and the blow to its prefill engine that made it."""
    request: int
    reason: str
    time: float
    cause: Struck | None


@dataclass
class Record:
    """What was seen in one run."""
    requests: dict[int, Request] = field(default_factory=dict)
    struck: list[Struck] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)  # how long each engine took to come up
    counters: dict[str, float] = field(default_factory=dict)  # of engines that are dead by now, as last told
    began_at: float = 0.0
    ended_at: float = 0.0
