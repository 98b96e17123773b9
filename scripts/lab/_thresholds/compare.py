# SPDX-License-Identifier: Apache-2.0
"""The loads of `vllm-pd bench serve` over a simulated fleet, with one threshold after the other, and the comparison."""
import collections
import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.bench.serve.settings import LoadShape, ServeLoad
from vllm_pd.bench.serve.traffic import LoadPoint, LoadRequest, PromptKind, RequestChain, points
from vllm_pd.bench.serve.words import TOKENS_PER_WORD
from vllm_pd.decisions.policy import PolicyConfig

from .engine import BLOCK_TOKENS, EngineSpeed, SimClock, SimRequest
from .fleet import ModelFleet

FIXED = {"0": 0, "200": 200, "1000": 1000, "infinite": 1 << 40}
ITL_SLACK = 1.05  # two ITL p99 within this are the same
MOST_S = 1800.0  # of simulated time, for one load


@dataclass(frozen=True)
class Machine:
    """A fleet and the loads that fit it. `itl_targets_ms`: what `auto` is tried with, beside no target."""
    name: str
    text: str
    decode: EngineSpeed
    prefill: EngineSpeed
    prefills: int
    loads: tuple[LoadShape, ...]
    itl_targets_ms: tuple[float, ...]


@dataclass
class Figures:
    """What one run has seen: seconds to the first token and between tokens, all requests and the short ones."""
    ttft_s: list[float] = field(default_factory=list)
    ttft_kind_s: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    gaps_s: list[float] = field(default_factory=list)
    unfinished: int = 0

    def report(self) -> dict[str, Any]:
        """Milliseconds, ready for JSON."""
        return {"requests": len(self.ttft_s), "unfinished": self.unfinished, "ttft_p50": _ms(self.ttft_s, 0.5),
                "ttft_p99": _ms(self.ttft_s, 0.99), "itl_p50": _ms(self.gaps_s, 0.5),
                "itl_p99": _ms(self.gaps_s, 0.99),
                **{f"ttft_{kind}_p50": _ms(found, 0.5) for kind, found in self.ttft_kind_s.items()}}


def _ms(values_s: Sequence[float], share: float) -> float | None:
    """A quantile, nearest rank."""
    if not values_s:
        return None
    return round(1000 * sorted(values_s)[min(len(values_s) - 1, math.ceil(share * len(values_s)) - 1)], 2)


def arms(machine: Machine) -> dict[str, PolicyConfig]:
    """The policies that are compared, by name."""
    bounds = {"max_queue_length": 64, "max_parked_fraction": 1.0}
    found = {name: PolicyConfig(max_local_prefill_tokens=tokens, **bounds) for name, tokens in FIXED.items()}
    found["auto"] = PolicyConfig(auto=True, **bounds)
    for target_ms in machine.itl_targets_ms:
        found[f"auto, ITL {target_ms:g} ms"] = PolicyConfig(auto=True, itl_target_s=target_ms / 1000, **bounds)
    return found


def simulate(machine: Machine, point: LoadPoint, policy: PolicyConfig) -> dict[str, Any]:
    """The figures of one point of a load."""
    clock, figures = SimClock(), Figures()
    fleet = ModelFleet(clock, [machine.decode, *[machine.prefill] * machine.prefills], policy)
    clients = [_Client(clock, fleet, chain, point.for_s, figures) for chain in point.chains()]
    clock.run(lambda: all(client.over for client in clients) or clock.now > MOST_S)
    figures.unfinished = sum(not client.over for client in clients)
    error = {"expected_error": round(1000 * statistics.fmean(fleet.errors_s), 2)} if fleet.errors_s else {}
    return {**figures.report(), **error, "decisions": dict(sorted(fleet.decisions.items()))}


class _Client:
    """One chain of requests."""

    def __init__(self, clock: SimClock, fleet: ModelFleet, chain: RequestChain, until_s: float,
                 figures: Figures) -> None:
        self._clock, self._fleet, self._until_s, self._figures = clock, fleet, until_s, figures
        self._requests: Iterator[LoadRequest] = iter(chain.requests)
        self.over = False
        clock.after(chain.at_s, self._next)

    def _next(self) -> None:
        asked = next(self._requests, None)
        if asked is None or self._clock.now >= self._until_s:
            self.over = True
        else:
            self._clock.after(asked.pause_s, lambda: self._send(asked))

    def _send(self, asked: LoadRequest) -> None:
        clock, figures = self._clock, self._figures
        tokens, hashes = prompt_of(asked.prompt)
        sent_at = last_at = clock.now
        left = asked.max_tokens

        def token_came() -> None:
            nonlocal last_at, left
            if left == asked.max_tokens:
                figures.ttft_s.append(clock.now - sent_at)
                figures.ttft_kind_s[asked.kind.value].append(clock.now - sent_at)
            elif asked.kind is PromptKind.SHORT:
                figures.gaps_s.append(clock.now - last_at)
            last_at = clock.now
            left -= 1
            if not left:
                self._next()

        self._fleet.decode.add(SimRequest(asked.name, tokens, hashes, asked.max_tokens, token_came))


@functools.lru_cache(maxsize=4096)
def prompt_of(text: str) -> tuple[int, tuple[int, ...]]:
    """Its tokens, about, and the hash of each full block with all before it."""
    words, found, chain = text.split(), [], 0
    tokens = max(1, round(len(words) * TOKENS_PER_WORD))
    for block in range(tokens // BLOCK_TOKENS):
        first, last = (round(edge * BLOCK_TOKENS / TOKENS_PER_WORD) for edge in (block, block + 1))
        chain = hash((chain, tuple(words[first:last])))
        found.append(chain)
    return tokens, tuple(found)


def compare(machine: Machine, rounds: int) -> dict[str, Any]:
    """All arms over all loads of one machine: {load: {arm: medians of the rounds}}."""
    found: dict[str, Any] = {}
    for shape in machine.loads:
        turns = [points(shape, turn) for turn in range(rounds)]
        for number, point in enumerate(turns[0]):
            label = f"{shape.load.value}, {point.label}"
            found[label] = {name: _median([simulate(machine, turn[number], policy) for turn in turns])
                            for name, policy in arms(machine).items()}
    return found


def _median(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key for one in reports for key, value in one.items() if isinstance(value, int | float)}
    decisions: collections.Counter[str] = collections.Counter()
    for one in reports:
        decisions.update(one["decisions"])
    known = {key: [one[key] for one in reports if one.get(key) is not None] for key in sorted(numbers)}
    return {**{key: round(statistics.median(values), 2) for key, values in known.items()}, "decisions": dict(decisions)}


def verdicts(loads: dict[str, Any], arm: str) -> dict[str, Any]:
    """`arm` against the fixed thresholds. By load: the best TTFT p50 of those whose ITL p99 is not above that of the
    arm, and the ratio of the arm's to it. Over all: for each threshold, the geometric mean of the ratios of its TTFT
    p50 to the arm's, and of its ITL p99 to the arm's: above 1, the arm is better."""
    by_load = {}
    for label, figures in loads.items():
        ours = figures[arm]
        rivals = {name: figures[name] for name in FIXED if figures[name]["itl_p99"] <= ITL_SLACK * ours["itl_p99"]}
        best = min(rivals, key=lambda name: rivals[name]["ttft_p50"], default=None)
        by_load[label] = {"best": best, "ratio": None if best is None else round(
            ours["ttft_p50"] / rivals[best]["ttft_p50"], 3)}
    overall = {name: {figure: round(_mean(one[name][figure] / one[arm][figure] for one in loads.values()), 3)
                      for figure in ("ttft_p50", "itl_p99")} for name in FIXED}
    return {"by_load": by_load, "overall": overall}


def _mean(ratios: Iterable[float]) -> float:
    return statistics.geometric_mean(list(ratios))


CPU = Machine(
    "cpu", "as SmolLM2-135M on one core an engine: steps and speeds as measured by bench serve (docs/results)",
    EngineSpeed(0.040, 0.0012, 0.0027, 4096, 40_000), EngineSpeed(0.040, 0.0012, 0.0027, 4096, 40_000), 1,
    (LoadShape(ServeLoad.CHAT_LONG), LoadShape(ServeLoad.CONCURRENCY), LoadShape(ServeLoad.RATE),
     LoadShape(ServeLoad.CONVERSATIONS)), (150.0, 400.0))
_GPU = EngineSpeed(0.008, 0.00005, 0.00005, 2048, 150_000)
GPU = Machine(
    "gpu", "as a model of 8 billion parameters on one GPU an engine; assumed, not measured", _GPU, _GPU, 1,
    (LoadShape(ServeLoad.CHAT_LONG, streams=(32, ), short_tokens=300, answer_tokens=200, long_tokens=8000,
               long_every_s=0.8),
     LoadShape(ServeLoad.CONCURRENCY, streams=(4, 16, 64), short_tokens=300, answer_tokens=200, long_tokens=8000),
     LoadShape(ServeLoad.RATE, rates=(2, 6, 12), short_tokens=300, answer_tokens=200, long_tokens=8000),
     LoadShape(ServeLoad.CONVERSATIONS, rates=(2, 6), short_tokens=300, answer_tokens=200, system_tokens=2000,
               conversations=120, turns=5)), (20.0, 50.0))
MACHINES = {machine.name: machine for machine in (CPU, GPU)}
