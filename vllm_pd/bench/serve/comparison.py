# SPDX-License-Identifier: Apache-2.0
"""Arms beside each other: spread over the rounds, ratios of rounds, goodput, and whether the answers are the same.

A report is a dictionary, ready for JSON: `arms` has for each name its `rounds`, each with the figures of its `points`.
A ratio is that of two arms in the same round, so that what changes with the hour counts for both.
"""

import statistics
from collections.abc import Iterable
from typing import Any

from vllm_pd.bench.serve.drive import ServedLoad
from vllm_pd.bench.serve.figures import value_of
from vllm_pd.bench.serve.settings import ServeLoad

GOOD_SHARE = 0.9  # of the requests at a rate that counts as served
MIXED = ("mixed-rr", "mixed-kv")
ITL_P99, TTFT_SHORT, TTFT_LONG = "short.itl_ms.p99", "short.ttft_ms.p50", "long.ttft_ms.p50"
PAUSE_P90, TOKENS_PER_EVENT = "short.pause_ms.p90", "tokens_per_event"
ANSWER_TOKENS = "answer_rate.tokens_per_s"
FIGURES = {  # of the table, by path: text, digits after the point
    "short.answers": ("short answers in a round", 0), "long.answers": ("long answers in a round", 0),
    ITL_P99: ("ITL p99, ms", 0), "short.itl_ms.p50": ("ITL p50, ms", 0), "short.itl_ms.max": ("ITL max, ms", 0),
    "short.pause_ms.p50": ("longest pause p50, ms", 0), PAUSE_P90: ("longest pause p90, ms", 0),
    TTFT_SHORT: ("TTFT short p50, ms", 0), "short.ttft_ms.p99": ("TTFT short p99, ms", 0),
    TTFT_LONG: ("TTFT long p50, ms", 0), "long.ttft_ms.p99": ("TTFT long p99, ms", 0),
    ANSWER_TOKENS: ("answer tokens/s", 1), TOKENS_PER_EVENT: ("tokens in an event", 2),
    "good_share": ("share within the limits", 2),
    "cpu_share": ("share of the cores in use", 2), "handover.megabytes": ("KV handed over, MB", 0),
    "handover.decode_steps": ("steps of decode engines", 0),
    "handover.kept_blocks.mean": ("blocks kept at prefill engines, mean", 1),
    "handover.kept_blocks.max": ("blocks kept at prefill engines, max", 0)}
RATIOS = (  # text, path, beside what
    ("ITL p99 / alone", ITL_P99, "alone"), ("ITL p99 / mixed", ITL_P99, "mixed"),
    ("longest pause p90 / alone", PAUSE_P90, "alone"), ("longest pause p90 / mixed", PAUSE_P90, "mixed"),
    ("TTFT short p50 / mixed", TTFT_SHORT, "mixed"), ("TTFT long p50 / mixed", TTFT_LONG, "mixed"),
    ("answer tokens/s / mixed", ANSWER_TOKENS, "mixed"))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest; {} where there are none."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)} if found else {}


def labels(report: dict[str, Any]) -> list[str]:
    """Of the points, in their order."""
    return list(dict.fromkeys(point["label"] for arm in report["arms"].values() for turn in arm["rounds"]
                              for point in turn["points"]))


def by_round(report: dict[str, Any], arm: str, label: str, path: str) -> dict[int, float]:
    """A figure of an arm at a point, by the number of the round. Rounds without it are left out."""
    values = {turn["round"]: value_of(point, path) for turn in report["arms"][arm]["rounds"]
              for point in turn["points"] if point["label"] == label}
    return {turn: value for turn, value in values.items() if value is not None}


def over_rounds(report: dict[str, Any], arm: str, label: str, path: str) -> dict[str, float]:
    """The spread of a figure."""
    return spread(by_round(report, arm, label, path).values())


def base_of(report: dict[str, Any], base: str) -> str | None:
    """The arm that stands for `alone` or `mixed`; None where it was not measured."""
    return next((name for name in (MIXED if base == "mixed" else (base, )) if name in report["arms"]), None)


def ratio(report: dict[str, Any], arm: str, base: str, label: str, path: str) -> dict[str, float]:
    """The spread of the ratios of the rounds that both have; {} where there are none."""
    other = base_of(report, base)
    if other is None or other == arm:
        return {}
    below = by_round(report, other, label, path)
    return spread(value / below[turn] for turn, value in by_round(report, arm, label, path).items() if below.get(turn))


def goodput(report: dict[str, Any], arm: str) -> float | None:
    """The highest value of a sweep at which enough requests were good, as at all below it; 0 where it is none of them.
    None for other loads."""
    if report["settings"]["load"]["load"] not in (ServeLoad.RATE, ServeLoad.CONCURRENCY, ServeLoad.TRACE):
        return None
    shares: dict[float, list[float]] = {}
    for turn in report["arms"][arm]["rounds"]:
        for point in turn["points"]:
            shares.setdefault(point["point"], []).append(point["good_share"] or 0.0)
    best = 0.0
    for value in sorted(shares):
        if statistics.median(shares[value]) < GOOD_SHARE:
            break
        best = value
    return best


def compared(report: dict[str, Any]) -> dict[str, Any]:
    """The spreads of all figures and ratios of the table, by the label of the point and then by arm."""
    return {label: {arm: {"figures": {path: over_rounds(report, arm, label, path) for path in FIGURES},
                          "ratios": {text: ratio(report, arm, base, label, path) for text, path, base in RATIOS},
                          "goodput": goodput(report, arm)}
                    for arm in report["arms"]} for label in labels(report)}


class AnswerBook:
    """All answers of a run. The first arm that answers a request sets what the others must say."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], tuple[str, str, tuple[int, ...]]] = {}
        self.compared = 0

    def add(self, arm: str, turn: int, label: str, served: ServedLoad) -> list[str]:
        """One line for each answer that is not the known one, and for each request that failed."""
        wrong = []
        for one in served.requests:
            where = f"round {turn + 1}, {label}, {one.name}"
            if one.answer is None:
                wrong.append(f"{where}: {arm} has failed: {one.error}")
                continue
            own = (one.answer.text, one.answer.token_ids)
            first, *known = self._known.setdefault((turn, label, one.name), (arm, *own))
            if first == arm:
                continue
            self.compared += 1
            if tuple(known) != own:
                wrong.append(f"{where}: {arm} and {first} differ {_where(own, tuple(known))}")
        return wrong


def _where(own: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> str:
    """Where two answers part, in words."""
    kind, ours, theirs = ("token", own[1], other[1]) if own[1] != other[1] else ("character", own[0], other[0])
    same = next((number for number, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(ours), len(theirs)))
    return f"from {kind} {same + 1} on: {ours[same:same + 5]!r} and {theirs[same:same + 5]!r}"
