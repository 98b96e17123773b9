# SPDX-License-Identifier: Apache-2.0
"""The figures of one point in one round, from what was sent. All of it is pure.

TTFT runs from the moment before the connection is opened to the first token. ITL is each time between two events of a
stream. An event is usually one token; a server may put several into one (`tokens_per_event`). TPOT is the time from the
first to the last event of an answer for each of its tokens but the first, so a pause counts less there. The pause of an
answer is its longest ITL. About one token in a hundred waits for a whole long prompt, so the p99 of all ITLs may or may
not show it; the pauses do. A request is *good* where its TTFT and each of its ITLs are within the limits.

Rates are over the time to the last answer, as those of vLLM's tool. Where streams send until a time is over, that has
an end in which only the last long prompts are computed, and which is longer where they wait for longer. So
`answer_rate` counts the tokens that came while the streams sent, by that time. Of loads without streams it counts all
tokens, by the time to the last answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_pd.bench.load import GenerationAnswer
from vllm_pd.bench.report import MS, quantile_grid, summary
from vllm_pd.bench.serve.drive import ServedLoad, ServedRequest
from vllm_pd.bench.serve.traffic import STREAMS, LoadPoint, PromptKind

FIGURES = "mean p50 p99 max"
PAUSES = "mean p50 p90 p99 max"
GRID_STEPS = 1000


@dataclass(frozen=True)
class SloLimits:
    """What makes a request good."""
    ttft_ms: float
    itl_ms: float

    def keeps(self, answer: GenerationAnswer | None) -> bool:
        """Whether an answer came, and within the limits."""
        return (answer is not None and MS * answer.ttft_s <= self.ttft_ms
                and MS * max(answer.gaps_s, default=0.0) <= self.itl_ms)


def point_figures(point: LoadPoint, served: ServedLoad, limits: SloLimits, cpu_share: float | None = None
                  ) -> dict[str, Any]:
    """All figures, ready for JSON. `cpu_share`: the share of the arm's cores that its engines have used."""
    answers = [one.answer for one in served.requests if one.answer is not None]
    prompt, answer = (sum(one.usage[side] for one in answers) for side in (0, 1))
    events = sum(len(one.arrivals_s) for one in answers)
    good = sum(limits.keeps(one.answer) for one in served.requests)
    return {
        "point": point.value, "label": point.label, "requests": len(answers),
        "failed": len(served.requests) - len(answers), "took_s": round(served.took_s, 3), "prompt_tokens": prompt,
        "answer_tokens": answer, "tokens_per_event": answer / events if events else None,
        "requests_per_s": len(answers) / served.took_s,
        "answer_tokens_per_s": answer / served.took_s, "tokens_per_s": (prompt + answer) / served.took_s,
        "good_share": good / len(served.requests) if served.requests else None, "good_per_s": good / served.took_s,
        "answer_rate": _answer_rate(point, served),
        "cpu_share": cpu_share, **_latencies(answers),
        **{kind.value: _latencies([one.answer for one in served.requests if one.answer and one.kind is kind])
           for kind in PromptKind},
        "itl_grid_ms": _grid(served.requests),
    }


def _answer_rate(point: LoadPoint, served: ServedLoad) -> dict[str, float]:
    """Tokens of answers in a second of `for_s`. The events of an answer count as if all had as many tokens."""
    for_s = min(point.for_s, served.took_s) if point.unit == STREAMS else served.took_s
    tokens = sum(one.answer.usage[1] * sum(one.at_s + arrived_s <= for_s for arrived_s in one.answer.arrivals_s)
                 / len(one.answer.arrivals_s) for one in served.requests if one.answer is not None)
    return {"for_s": round(for_s, 3), "tokens_per_s": tokens / for_s}


def _latencies(answers: Sequence[GenerationAnswer]) -> dict[str, Any]:
    tpots_s = ((one.arrivals_s[-1] - one.arrivals_s[0]) / (one.usage[1] - 1) for one in answers
               if one.gaps_s and one.usage[1] > 1)
    return {"answers": len(answers),
            "ttft_ms": summary((one.ttft_s for one in answers), FIGURES, MS),
            "tpot_ms": summary(tpots_s, FIGURES, MS),
            "pause_ms": summary((max(one.gaps_s) for one in answers if one.gaps_s), PAUSES, MS),
            "itl_ms": summary((gap_s for one in answers for gap_s in one.gaps_s), FIGURES, MS)}


def _grid(requests: Iterable[ServedRequest]) -> list[float]:
    """The distribution of the ITLs of short prompts' answers, to draw."""
    gaps_s = [gap_s for one in requests if one.answer and one.kind is PromptKind.SHORT for gap_s in one.answer.gaps_s]
    return quantile_grid(gaps_s, GRID_STEPS, MS) if gaps_s else []


def timeline(served: ServedLoad) -> dict[str, list]:
    """To draw: `itl` has (seconds since the load began, ms) of each token of the short prompts' answers, `long` when
    long prompts were sent and when each had its first token, in seconds."""
    found: dict[str, list] = {"itl": [], "long": []}
    for one in served.requests:
        if one.answer is None:
            continue
        if one.kind is PromptKind.LONG:
            found["long"].append([round(one.at_s, 2), round(one.at_s + one.answer.ttft_s, 2)])
            continue
        for arrived_s, gap_s in zip(one.answer.arrivals_s[1:], one.answer.gaps_s, strict=True):
            found["itl"].append([round(one.at_s + arrived_s, 2), round(MS * gap_s, 1)])
    return found


def value_of(figures: dict[str, Any], path: str) -> float | None:
    """The figure at `short.itl_ms.p99`; None where there is none."""
    found: Any = figures
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found
