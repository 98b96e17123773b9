# SPDX-License-Identifier: Apache-2.0
"""What a decode engine does with a prompt that belongs at a prefill engine and can't go there: a *fallback*. Pure.

    local      it is computed here. None of this is used
    bounded    it is computed here if the fallbacks that are here leave room for it, else it waits for room or a peer
    refuse     it waits for a peer

It waits `wait_s` at most, each time, and is refused then; at once where `MAX_WAITING` wait already. In between its
engine decides anew with each step, so it goes to a peer as soon as one is there. While one waits for room, those that
are asked about after it in the same round wait too, however short they are: a stream of short ones must not keep a long
one from its turn.
"""
import itertools
from collections.abc import Callable, Collection
from enum import Enum, StrEnum
from typing import Generic, TypeVar

import msgspec

from vllm_pd.decisions.policy import Decision, Reason

MAX_WAITING = 256  # each is asked about in every step
P = TypeVar("P")  # a prompt, as the engine knows it; can be hashed

_FALLBACKS = frozenset((Reason.RETRY, Reason.BROKER, Reason.PEER, Reason.QUEUE, Reason.CAP))


class FallbackRule(StrEnum):
    """What becomes of fallbacks."""
    LOCAL = "local"
    BOUNDED = "bounded"
    REFUSE = "refuse"


class FallbackConfig(msgspec.Struct, frozen=True):
    """The operator's rule; see the configuration keys `fallback`, `fallback_tokens` and `fallback_wait_s`."""
    rule: FallbackRule = FallbackRule.LOCAL
    tokens: int = 8192
    wait_s: float = 10.0


class FallbackAnswer(Enum):
    """What a fallback may do now."""
    LOCAL = "local"  # be computed here
    WAIT = "wait"
    REFUSE = "refuse"


def is_fallback(decision: Decision) -> bool:
    """Whether the prompt stays only because it can't go to a peer that it belongs to."""
    return not decision.remote and decision.reason in _FALLBACKS


class Fallbacks(Generic[P]):
    """The fallbacks of one decode engine whose rule is not `local`: those that wait, and those that it computes. Times
    are seconds of the caller's clock. `uncomputed`: how many tokens of a prompt, which was begun here, are to be
    computed yet; 0 for one that has ended."""

    def __init__(self, config: FallbackConfig, uncomputed: Callable[[P], int]) -> None:
        self._config = config
        self._uncomputed = uncomputed
        self._deadlines: dict[P, float] = {}  # of those that wait, in order: all wait equally long
        self._here: dict[P, int] = {}  # and how many tokens were to be computed when each was begun
        self._room_awaited = False  # by one that was asked about in this round

    @property
    def waiting(self) -> Collection[P]:
        """Those that wait, the first one first. A view: copy it before one is taken out."""
        return self._deadlines.keys()

    @property
    def next_deadline(self) -> float | None:
        """When the next of them is to be asked about at the latest; None where none waits."""
        return next(iter(self._deadlines.values()), None)

    def overdue(self, now: float) -> list[P]:
        """Those that have waited as long as they may: each is to be asked about, and forgotten."""
        return [prompt for prompt, _ in itertools.takewhile(lambda one: one[1] <= now, self._deadlines.items())]

    def begin_round(self) -> None:
        """The engine asks about its prompts again, in their order."""
        self._room_awaited = False

    def ask(self, now: float, prompt: P, tokens: int, reason: Reason) -> FallbackAnswer:
        """What a fallback of so many `tokens` to compute may do, which can't go to a peer for this `reason`. May be
        asked any number of times; it waits from the first time on, until it is begun, refused or forgotten."""
        bounded = self._config.rule is FallbackRule.BOUNDED
        if bounded and not self._room_awaited and self._has_room(tokens):
            return FallbackAnswer.LOCAL
        crowded = prompt not in self._deadlines and len(self._deadlines) >= MAX_WAITING
        deadline = self._deadlines.setdefault(prompt, now + self._config.wait_s)
        if crowded or now >= deadline or not bounded and reason is Reason.RETRY:  # no peer would have it later
            self.forget(prompt)
            return FallbackAnswer.REFUSE
        self._room_awaited = True
        return FallbackAnswer.WAIT

    def begin(self, prompt: P, tokens: int) -> None:
        """It is computed here from now on, by the answer LOCAL."""
        self.forget(prompt)
        self._here[prompt] = tokens

    def forget(self, prompt: P) -> None:
        """It does not wait any more: it goes to a peer, is refused, or has ended. No effect on any other."""
        self._deadlines.pop(prompt, None)

    def tokens_here(self) -> int:
        """How many tokens of fallbacks are to be computed here yet."""
        left = ((prompt, min(tokens, self._uncomputed(prompt))) for prompt, tokens in self._here.items())
        self._here = {prompt: tokens for prompt, tokens in left if tokens}
        return sum(self._here.values())

    def _has_room(self, tokens: int) -> bool:
        """A prompt that is larger than the bound has room where nothing else is: else it would wait in vain."""
        before = self.tokens_here()
        return not before or before + tokens <= self._config.tokens
