# SPDX-License-Identifier: Apache-2.0
"""What the demo found: a line for each question, a table of times, a verdict, JSON and a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from _demo.questions import DemoCase
from vllm_pd.client import Answer
from vllm_pd.metrics import STAGES

WHY = {
    "length": "a long prompt", "threshold": "few new tokens", "queue": "the queue is long", "peer": "no prefill engine",
    "cap": "too much is parked", "feature": "it asks for something that can't go remote", "retry": "it has been remote",
    "broker": "no broker",
}
STAGE_TEXT = {"queue": "queue", "claim": "claim", "prefill": "prefill on P", "transfer": "transfer",
              "first_step": "first step on D"}


@dataclass(frozen=True)
class DemoOutcome:
    """One question, its answer with PD on and off, and what the decode engine counted for it: its decisions as
    (decision, reason), the ends of its attempts, the stages of its hand-over."""
    case: DemoCase
    answer: Answer
    reference: Answer
    decisions: list[tuple[str, ...]]
    ends: list[str]
    stages_s: dict[str, float]
    transfer_bytes: int

    @property
    def remote(self) -> bool:
        return self.ends == ["done"] and [decision for decision, _ in self.decisions] == ["remote"]

    def faults(self) -> list[str]:
        """What is wrong with it; empty where all is well."""
        faults = []
        if not self.answer.same_as(self.reference):
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
        verdict = "same tokens" if self.answer.same_as(self.reference) else "DIFFERENT"
        return (f"  {self.case.name:<25} {self.case.manner:<21} {self.answer.usage[0]:>5} tokens   "
                f"prefilled by the {who:<14} ({why})   {verdict}")


@dataclass(frozen=True)
class DemoReport:
    """The end of a demonstration. `leaks` are the gauges that did not go back to 0."""
    outcomes: Sequence[DemoOutcome]
    leaks: Sequence[str]
    started_s: float
    total_s: float

    @property
    def faults(self) -> list[str]:
        found = [fault for outcome in self.outcomes for fault in outcome.faults()]
        return found + [f"left over: {leak}" for leak in self.leaks]

    @property
    def good(self) -> bool:
        return not self.faults

    @property
    def remote(self) -> list[DemoOutcome]:
        return [outcome for outcome in self.outcomes if outcome.remote]

    @property
    def transfer_gb_per_s(self) -> float | None:
        seconds = sum(outcome.stages_s["transfer"] for outcome in self.remote)
        return sum(outcome.transfer_bytes for outcome in self.remote) / seconds / 1e9 if seconds else None

    def show(self) -> None:
        """Prints tables and verdict."""
        console = Console(highlight=False, width=110)
        console.print()
        console.print(self._first_tokens())
        console.print(self._handovers())
        for fault in self.faults:
            console.print(f"FAULT  {fault}", markup=False, soft_wrap=True)
        same = sum(outcome.answer.same_as(outcome.reference) for outcome in self.outcomes)
        console.print(f"{same} of {len(self.outcomes)} answers are token by token those with PD off; "
                      f"{len(self.remote)} prompts were prefilled remotely; "
                      f"{'nothing is' if not self.leaks else 'SOMETHING IS'} left over; {self.total_s:.0f} s in all.",
                      soft_wrap=True)

    def as_json(self) -> dict[str, Any]:
        """All figures, times in seconds."""
        return {
            "good": self.good, "faults": self.faults, "started_s": self.started_s, "total_s": self.total_s,
            "transfer_gb_per_s": self.transfer_gb_per_s,
            "questions": [{
                "name": o.case.name, "manner": o.case.manner, "prompt_tokens": o.answer.usage[0], "remote": o.remote,
                "decisions": o.decisions, "attempts": o.ends, "same": o.answer.same_as(o.reference),
                "text": o.answer.text, "token_ids": o.answer.token_ids,
                "ttft_s": o.answer.ttft_s if o.case.question.stream else None,
                "ttft_off_s": o.reference.ttft_s if o.case.question.stream else None,
                "stages_s": o.stages_s if o.remote else None, "transfer_bytes": o.transfer_bytes,
            } for o in self.outcomes],
        }

    def plot(self, path: Path) -> None:
        """A picture: time to first token with PD on and off, and where it goes in a hand-over."""
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        figure, (first, stages) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
        streamed = [outcome for outcome in self.outcomes if outcome.case.question.stream]
        places = range(len(streamed))
        colours = ["tab:orange" if outcome.remote else "tab:blue" for outcome in streamed]
        first.barh([place - 0.2 for place in places], [o.answer.ttft_s for o in streamed], 0.4, color=colours)
        first.barh([place + 0.2 for place in places], [o.reference.ttft_s for o in streamed], 0.4, color="lightgrey")
        first.set_yticks(places, [f"{o.case.name} ({o.answer.usage[0]})" for o in streamed])
        first.invert_yaxis()
        first.set(title="Time to first token: remote (orange), local (blue), PD off (grey)", xlabel="seconds",
                  xscale="log")
        left = [0.0] * len(self.remote)
        for stage in STAGES:
            widths = [outcome.stages_s[stage] for outcome in self.remote]
            stages.barh(range(len(widths)), widths, left=left, label=STAGE_TEXT[stage])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        stages.set_yticks(range(len(self.remote)), [f"{o.case.name} ({o.answer.usage[0]})" for o in self.remote])
        stages.invert_yaxis()
        stages.set(title="The hand-over by stage", xlabel="seconds")
        if self.remote:
            stages.legend()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def _first_tokens(self) -> Table:
        table = Table(title="Time to first token, streamed answers (PD off: one engine on all cores)", box=box.SIMPLE)
        for name, side in (("question", "left"), ("prompt tokens", "right"), ("remote", "right"), ("local", "right"),
                           ("PD off", "right")):
            table.add_column(name, justify=side)
        for outcome in self.outcomes:
            if outcome.case.question.stream:
                own = f"{outcome.answer.ttft_s:.3f} s"
                table.add_row(outcome.case.name, str(outcome.answer.usage[0]), own if outcome.remote else "",
                              "" if outcome.remote else own, f"{outcome.reference.ttft_s:.3f} s")
        return table

    def _handovers(self) -> Table:
        table = Table(title="The hand-over by stage", box=box.SIMPLE)
        table.add_column("question", no_wrap=True)
        for stage in STAGES:
            table.add_column(STAGE_TEXT[stage], justify="right")
        table.add_column("MB", justify="right")
        table.add_column("GB/s", justify="right")
        for outcome in self.remote:
            table.add_row(outcome.case.name, *(f"{1e3 * outcome.stages_s[stage]:.1f} ms" for stage in STAGES),
                          f"{outcome.transfer_bytes / 1e6:.1f}", _rate(outcome))
        if self.remote:
            table.add_section()
            medians = (statistics.median(o.stages_s[stage] for o in self.remote) for stage in STAGES)
            speed = self.transfer_gb_per_s
            table.add_row("median, sum", *(f"{1e3 * median:.1f} ms" for median in medians),
                          f"{sum(o.transfer_bytes for o in self.remote) / 1e6:.1f}",
                          f"{speed:.2f}" if speed is not None else "")
        return table


def _rate(outcome: DemoOutcome) -> str:
    seconds = outcome.stages_s["transfer"]
    return f"{outcome.transfer_bytes / seconds / 1e9:.2f}" if seconds else ""
