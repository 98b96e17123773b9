# SPDX-License-Identifier: Apache-2.0
"""What a load sends and when. Everything is drawn from a seed, before or while it is sent, without a clock.

A load has points: one of `chat+long`, one for each number of streams or each rate of a sweep. A point has chains. A
chain is one client: it sends a request, waits for the end of the answer, pauses, and sends the next one. So a stream of
a closed loop is a chain without end, a request of an open loop a chain of one, a conversation a chain of its turns.

A request's name and its prompt depend on the seed, the round and the point only. So the same request goes to every arm,
and the answers can be compared. No prompt is sent in two rounds or at two points: a prefix cache would have it.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from vllm_pd.bench.serve.settings import LoadShape, ServeLoad
from vllm_pd.bench.serve.words import prose, tokens_of

MOST_LONG = 1000
STREAMS = "streams"  # the unit of points whose clients send one request after another


class PromptKind(StrEnum):
    """Short: the running answers that must not pause. Long: what makes them pause."""
    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True)
class LoadRequest:
    """One request. `pause_s`: how long its client waits after the answer before, or after the chain's begin."""
    name: str
    kind: PromptKind
    prompt: str
    max_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class RequestChain:
    """The requests of one client. It begins `at_s` seconds after the load. `requests` can be iterated once."""
    at_s: float
    requests: Iterable[LoadRequest]


@dataclass(frozen=True)
class LoadPoint:
    """One point of a load. `value`: the number of streams, or the requests a second. No request is sent later than
    `for_s` seconds after the begin. `chains` makes the chains, anew at each call."""
    value: float
    unit: str
    for_s: float
    chains: Callable[[], list[RequestChain]]

    @property
    def label(self) -> str:
        """The point in words."""
        return f"{self.value:g} {self.unit}"


def points(shape: LoadShape, turn: int, with_long: bool = True) -> list[LoadPoint]:
    """The points of the load in round number `turn`. Without long prompts, all others stay as they are."""
    makers = {ServeLoad.CHAT_LONG: _chat_and_long, ServeLoad.CONCURRENCY: _closed_loop, ServeLoad.RATE: _open_loop,
              ServeLoad.CONVERSATIONS: _conversations,
              ServeLoad.TRACE: lambda shape, value, _: _traced(shape, turn, value)}
    make = makers[shape.load]
    streamed = shape.load in (ServeLoad.CHAT_LONG, ServeLoad.CONCURRENCY)
    unit = STREAMS if streamed else "conversations/s" if shape.load is ServeLoad.CONVERSATIONS else "requests/s"

    def chains(value: float) -> list[RequestChain]:
        found = make(shape, value, _seed(shape, turn, value))
        return found if with_long else [RequestChain(chain.at_s, _short_only(chain.requests)) for chain in found]

    # A conversation may end as late as it likes: all its turns belong to the load.
    limit_s = math.inf if shape.load is ServeLoad.CONVERSATIONS else shape.duration_s
    return [LoadPoint(value, unit, limit_s, lambda value=value: chains(value)) for value in shape.values]


def _seed(shape: LoadShape, turn: int, value: float) -> str:
    return f"{shape.seed}.{turn}.{value:g}"


def _short_only(requests: Iterable[LoadRequest]) -> Iterator[LoadRequest]:
    """Without the long prompts. It ends where MOST_LONG of them follow each other: a stream may have nothing else."""
    skipped = 0
    for request in requests:
        if request.kind is PromptKind.SHORT:
            skipped = 0
            yield request
        else:
            skipped += 1
            if skipped == MOST_LONG:
                return


def _request(shape: LoadShape, name: str, seed: str, kind: PromptKind) -> LoadRequest:
    draw = random.Random(f"{seed} {name}")
    long = kind is PromptKind.LONG
    return LoadRequest(name, kind, prose(draw, shape.long_tokens if long else shape.short_tokens),
                       shape.long_answer_tokens if long else shape.answer_tokens)


def _arrivals_s(draw: random.Random, per_s: float, until_s: float) -> Iterator[float]:
    """A Poisson process."""
    at_s = draw.expovariate(per_s)
    while at_s < until_s:
        yield at_s
        at_s += draw.expovariate(per_s)


def _streams(shape: LoadShape, count: int, seed: str, long_share: float) -> list[RequestChain]:
    """Streams without end. They begin within the first second, so that they do not run in step."""

    def stream(number: int) -> Iterator[LoadRequest]:
        kinds = random.Random(f"{seed} kinds {number}")
        for turn in itertools.count():
            kind = PromptKind.LONG if kinds.random() < long_share else PromptKind.SHORT
            yield _request(shape, f"stream {number}, request {turn}", seed, kind)

    return [RequestChain(number / count, stream(number)) for number in range(count)]


def _chat_and_long(shape: LoadShape, value: float, seed: str) -> list[RequestChain]:
    draw = random.Random(f"{seed} long")
    arrivals_s = _arrivals_s(draw, 1 / shape.long_every_s, shape.duration_s)
    return _streams(shape, int(value), seed, 0.0) + [
        RequestChain(at_s, [_request(shape, f"long {number}", seed, PromptKind.LONG)])
        for number, at_s in enumerate(arrivals_s)]


def _closed_loop(shape: LoadShape, value: float, seed: str) -> list[RequestChain]:
    return _streams(shape, int(value), seed, shape.long_share)


def _open_loop(shape: LoadShape, value: float, seed: str) -> list[RequestChain]:
    draw = random.Random(f"{seed} arrivals")
    found = []
    for number, at_s in enumerate(_arrivals_s(draw, value, shape.duration_s)):
        kind = PromptKind.LONG if draw.random() < shape.long_share else PromptKind.SHORT
        found.append(RequestChain(at_s, [_request(shape, f"request {number}", seed, kind)]))
    return found


def _conversations(shape: LoadShape, value: float, seed: str) -> list[RequestChain]:
    """Each prompt is the whole conversation so far. What the other one has said is drawn like the questions, so that
    the prompts are the same whatever an engine answers."""
    draw = random.Random(f"{seed} conversations")
    systems = [prose(draw, shape.system_tokens) for _ in range(shape.system_prompts)]
    weights = [1 / rank for rank in range(1, len(systems) + 1)]
    at_s, found = 0.0, []
    for number in range(shape.conversations):
        said, turns = draw.choices(systems, weights)[0], []
        for turn in range(shape.turns):
            said += f"\n\nUser: {prose(draw, shape.short_tokens)}\n\nAssistant:"
            pause_s = draw.expovariate(1 / shape.pause_s) if turn and shape.pause_s else 0.0
            turns.append(LoadRequest(f"conversation {number}, turn {turn}", PromptKind.SHORT, said,
                                     shape.answer_tokens, pause_s))
            said += f" {prose(draw, shape.answer_tokens)}"
        found.append(RequestChain(at_s, turns))
        at_s += draw.expovariate(value)
    return found


def trace_prompts(shape: LoadShape, rounds: int) -> int:
    """How many prompts of a trace are sent in so many rounds."""
    return sum(len(_trace_times_s(shape, turn, value)) for turn in range(rounds) for value in shape.values)


def _trace_times_s(shape: LoadShape, turn: int, value: float) -> list[float]:
    return list(_arrivals_s(random.Random(f"{_seed(shape, turn, value)} arrivals"), value, shape.duration_s))


def _traced(shape: LoadShape, turn: int, value: float) -> list[RequestChain]:
    """The prompts of the trace in their order, as many as arrive in time, after those of earlier rounds and points."""
    earlier = shape.values[:shape.values.index(value)]
    first = trace_prompts(shape, turn) + sum(len(_trace_times_s(shape, turn, one)) for one in earlier)
    found = []
    for one, at_s in zip(shape.trace[first:], _trace_times_s(shape, turn, value), strict=False):
        kind = PromptKind.LONG if 2 * tokens_of(one.prompt) >= shape.long_tokens else PromptKind.SHORT
        found.append(RequestChain(at_s, [LoadRequest(one.name, kind, one.prompt, one.answer_tokens)]))
    return found


def warm_up(shape: LoadShape, count: int) -> list[LoadRequest]:
    """Requests before the load, which do not count: `count` short ones, then as many long ones. If the kinds took
    turns, a round robin over two engines would give each engine one kind only."""
    return [_request(shape, f"warm-up {number} {kind}", str(shape.seed), kind)
            for kind in PromptKind for number in range(count)]
