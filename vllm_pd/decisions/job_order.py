# SPDX-License-Identifier: Apache-2.0
"""In which order a prefill engine computes its jobs, and how many tokens in one step. Pure.

Jobs are the prompts that decode engines have asked for, and those that clients bring so that a decode engine reads them
(prefill first): here all of them are alike. Other prompts have no turn, and no job passes one that waits.

A job is due when `overtaking` times its own computing time has passed since it arrived, a given time at most, and the
job that is due first comes first. So a short job passes a long one, but only if it arrives within that time after it:
nobody is passed without end. With `overtaking` 0 the order is that of arrival.

A step is as long as may be computed in `step_s`, so that a job that arrives waits for no more than that before its
turn comes.
"""
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec

START_TOKENS_PER_S = 5e3  # of an engine that has not measured any
MIN_STEP_TOKENS = 64  # below, the cost of a step itself counts
T = TypeVar("T")


class JobOrder(msgspec.Struct, frozen=True):
    """What a prefill engine's order depends on: the settings `prefill_overtaking` and `prefill_step_s`, and `most_s`,
    by which every job is due."""
    overtaking: float
    step_s: float
    most_s: float

    def due_s(self, arrived_s: float, tokens: int, tokens_per_s: float) -> float:
        """See `due_s`."""
        return due_s(arrived_s, tokens, tokens_per_s, self.overtaking, self.most_s)


class Turn(NamedTuple):
    """The place of a job: the lowest is the next. Where the engine does not go by priority, `priority` is 0."""
    priority: int
    due_s: float


class BegunJob(NamedTuple):
    """A job that the engine has begun, and how many of its tokens are left to be computed."""
    turn: Turn
    tokens_left: int


def due_s(arrived_s: float, tokens: int, tokens_per_s: float, overtaking: float, most_s: float) -> float:
    """When a job of so many tokens is due, on the clock of `arrived_s`; `most_s` after it arrived at the latest.
    `tokens_per_s` 0: not measured yet."""
    return arrived_s + min(most_s, overtaking * tokens / (tokens_per_s or START_TOKENS_PER_S))


def in_turn(queue: Iterable[T], turn: Callable[[T], Turn | None]) -> list[T]:
    """The queue, in which jobs that wait next to each other are in their turn. Those without a turn (None) keep their
    places: no job passes one of them, in either direction."""
    ordered: list[T] = []
    for has_turn, those in itertools.groupby(queue, lambda one: turn(one) is not None):
        group = list(those)
        ordered += sorted(group, key=turn) if has_turn else group
    return ordered


def step_tokens(tokens_per_s: float, step_s: float, most: int) -> int:
    """How many tokens to compute in a step; `most` is the engine's own limit. A multiple of `MIN_STEP_TOKENS` below
    that, so that it does not change with every measurement."""
    tokens = int((tokens_per_s or START_TOKENS_PER_S) * step_s)
    return min(most, max(MIN_STEP_TOKENS, tokens - tokens % MIN_STEP_TOKENS))


def may_begin(turn: Turn, begun: Iterable[BegunJob], tokens: int) -> bool:
    """Whether a job would get any of the `tokens` of the next step. Those whose turn is later would let it pass."""
    return sum(job.tokens_left for job in begun if job.turn <= turn) < tokens


def tokens_of_each(tokens: int, passing: int, begun: int) -> int:
    """How many of the `tokens` of a step each job may have, where one of `passing` tokens is to pass `begun` ones that
    are being computed: an equal share at most, and little more than the one needs, because it waits for the whole
    step."""
    return max(1, min(tokens // (begun + 1), max(passing, MIN_STEP_TOKENS)))
