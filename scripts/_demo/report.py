# SPDX-License-Identifier: Apache-2.0
"""The results of the demo: a line for each question, tables of times, a verdict, JSON and a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from _demo.pause import PauseComparison
from _demo.questions import DemoCase
from vllm_pd.bench.load import GenerationAnswer
from vllm_pd.bench.report import MS, table
from vllm_pd.handover.metrics import STAGES

WHY = {
    "length": "a long prompt", "ttft": "the first token comes sooner", "itl": "others decode",
    "threshold": "few new tokens", "queue": "the queue is long", "peer": "no prefill engine",
    "cap": "too much is parked", "feature": "it asks for something that can't go remote", "retry": "it has been remote",
    "broker": "no broker",
}
STAGE_TEXT = {"queue": "queue", "claim": "claim", "prefill": "prefill on P", "transfer": "transfer",
              "first_step": "first step on D"}


@dataclass(frozen=True)
class DemoOutcome:
    """One question, its answers with PD on and off, and what the decode engine counted for it: decisions as (decision,
    reason), the ends of its attempts, the stages of its hand-over."""
    case: DemoCase
    answer: GenerationAnswer
    reference: GenerationAnswer
    decisions: list[tuple[str, ...]]
    ends: list[str]
    stages_s: dict[str, float]
    transfer_bytes: int

    @property
    def remote(self) -> bool:
        return self.ends == ["done"] and [decision for decision, _ in self.decisions] == ["remote"]

    @property
    def same(self) -> bool:
        return self.answer.same_as(self.reference)

    def faults(self) -> list[str]:
        """What is wrong with it; empty where all is well."""
        faults = []
        if not self.same:
            faults.append(f"another answer than with PD off: {self.answer.text!r} {list(self.answer.token_ids)} "
                          f"instead of {self.reference.text!r} {list(self.reference.token_ids)}")
        if len(self.decisions) != 1:
            faults.append(f"{len(self.decisions)} decisions were counted for it")
        if self.remote != self.case.remote:
            wanted = "prefill" if self.case.remote else "decode"
            faults.append(f"the {wanted} engine should have prefilled it; attempts ended: {self.ends or 'none'}")
        return [f"{self.case.name}: {fault}" for fault in faults]

    def line(self) -> str:
        """Who prefilled, why, and whether the answer is right."""
        who = "prefill engine" if self.remote else "decode engine"
        why = ", ".join(WHY.get(reason, reason) for _, reason in self.decisions) or "unknown"
        return (f"  {self.case.name:<25} {self.case.manner:<21} {self.answer.usage[0]:>5} tokens   "
                f"prefilled by the {who:<14} ({why})   {'same tokens' if self.same else 'DIFFERENT'}")

    def as_json(self) -> dict[str, Any]:
        """Its figures, times in seconds."""
        streamed = self.case.request.stream
        return {"name": self.case.name, "manner": self.case.manner, "prompt_tokens": self.answer.usage[0],
                "remote": self.remote, "decisions": self.decisions, "attempts": self.ends, "same": self.same,
                "text": self.answer.text, "token_ids": self.answer.token_ids,
                "ttft_s": self.answer.ttft_s if streamed else None,
                "ttft_off_s": self.reference.ttft_s if streamed else None,
                "stages_s": self.stages_s if self.remote else None, "transfer_bytes": self.transfer_bytes}


@dataclass(frozen=True)
class DemoReport:
    """All results. `leaks` are the gauges that did not go back to 0."""
    outcomes: Sequence[DemoOutcome]
    leaks: Sequence[str]
    started_s: float
    total_s: float
    pause: PauseComparison

    @property
    def faults(self) -> list[str]:
        found = [fault for outcome in self.outcomes for fault in outcome.faults()]
        return found + self.pause.faults() + [f"left over: {leak}" for leak in self.leaks]

    @property
    def good(self) -> bool:
        return not self.faults

    @property
    def remote(self) -> list[DemoOutcome]:
        return [outcome for outcome in self.outcomes if outcome.remote]

    @property
    def streamed(self) -> list[DemoOutcome]:
        return [outcome for outcome in self.outcomes if outcome.case.request.stream]

    @property
    def transfer_gb_per_s(self) -> float | None:
        return _gb_per_s(self.remote)

    def show(self) -> None:
        """Prints tables and verdict."""
        console = Console(highlight=False, width=110)
        console.print()
        console.print(self._first_tokens())
        console.print(self._handovers())
        for fault in self.faults:
            console.print(f"FAULT  {fault}", markup=False, soft_wrap=True)
        console.print(f"{sum(outcome.same for outcome in self.outcomes)} of {len(self.outcomes)} answers are token by "
                      f"token those with PD off; {len(self.remote)} prompts were prefilled remotely; "
                      f"{'nothing is' if not self.leaks else 'SOMETHING IS'} left over; {self.total_s:.0f} s in all.",
                      soft_wrap=True)

    def as_json(self) -> dict[str, Any]:
        """All figures, times in seconds."""
        return {"good": self.good, "faults": self.faults, "started_s": self.started_s, "total_s": self.total_s,
                "transfer_gb_per_s": self.transfer_gb_per_s, "pause": self.pause.as_json(),
                "questions": [outcome.as_json() for outcome in self.outcomes]}

    def plot(self, path: Path) -> None:
        """A picture: time to first token with PD on and off, and the stages of each hand-over."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 5), layout="constrained")
        first, stages = figure.subplots(1, 2)
        places = range(len(self.streamed))
        colours = ["tab:orange" if outcome.remote else "tab:blue" for outcome in self.streamed]
        first.barh([place - 0.2 for place in places], [o.answer.ttft_s for o in self.streamed], 0.4, color=colours)
        first.barh([place + 0.2 for place in places], [o.reference.ttft_s for o in self.streamed], 0.4,
                   color="lightgrey")
        first.set(title="Time to first token: remote (orange), local (blue), PD off (grey)", xlabel="seconds",
                  xscale="log")
        left = [0.0] * len(self.remote)
        for stage in STAGES:
            widths = [outcome.stages_s[stage] for outcome in self.remote]
            stages.barh(range(len(widths)), widths, left=left, label=STAGE_TEXT[stage])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        stages.set(title="The hand-over by stage", xlabel="seconds")
        if self.remote:
            stages.legend()
        for axis, shown in ((first, self.streamed), (stages, self.remote)):
            axis.set_yticks(range(len(shown)), [f"{o.case.name} ({o.answer.usage[0]})" for o in shown])
            axis.invert_yaxis()
        figure.savefig(path, dpi=120)

    def _first_tokens(self) -> Table:
        rows = []
        for outcome in self.streamed:
            own = f"{outcome.answer.ttft_s:.3f} s"
            rows.append((outcome.case.name, str(outcome.answer.usage[0]), own if outcome.remote else "",
                         "" if outcome.remote else own, f"{outcome.reference.ttft_s:.3f} s"))
        return table(["question", "prompt tokens", "remote", "local", "PD off"], rows,
                     "Time to first token, streamed answers (PD off: one engine on all cores)")

    def _handovers(self) -> Table:
        def row(name: str, stages_s: dict[str, float], outcomes: Sequence[DemoOutcome]) -> list[str]:
            rate = _gb_per_s(outcomes)
            return [name, *(f"{MS * stages_s[stage]:.1f} ms" for stage in STAGES),
                    f"{sum(o.transfer_bytes for o in outcomes) / 1e6:.1f}", "" if rate is None else f"{rate:.2f}"]

        shown = table(["question", *map(STAGE_TEXT.get, STAGES), "MB", "GB/s"],
                      [row(o.case.name, o.stages_s, [o]) for o in self.remote], "The hand-over by stage")
        if self.remote:
            shown.add_section()
            medians = {stage: statistics.median(o.stages_s[stage] for o in self.remote) for stage in STAGES}
            shown.add_row(*row("median, sum", medians, self.remote))
        return shown


def _gb_per_s(outcomes: Sequence[DemoOutcome]) -> float | None:
    """Bytes by seconds of these transfers; None where there are none."""
    seconds = sum(outcome.stages_s["transfer"] for outcome in outcomes)
    return sum(outcome.transfer_bytes for outcome in outcomes) / seconds / 1e9 if seconds else None
