# SPDX-License-Identifier: Apache-2.0
"""The picture of a run over time: pauses and what went wrong; decisions by reason; which engines were there."""
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from _behind.load import AskedRequest
from _behind.report import BehindRecord
from _behind.watch import added
from vllm_pd.bench.report import MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BIN_S = 4.0
SHORTEST_MS = 2.0  # tokens that come together with the one before are not shown
GREY = "local: threshold"  # the short prompts, nearly all of the decisions
PLACES = ("P1", "P0", "D1", "D0")


def draw(record: BehindRecord, path: Path, title: str) -> None:
    """Writes the PNG."""
    from matplotlib.figure import Figure

    begun_s, ended_s = record.phases[0].begun_s, record.phases[-1].ended_s
    figure = Figure(figsize=(15, 9), layout="constrained")
    pauses, decisions, engines = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 1.2))
    _draw_pauses(pauses, record, begun_s, ended_s)
    _draw_decisions(decisions, record, begun_s, ended_s)
    _draw_engines(engines, record, begun_s, ended_s)
    for axes in (pauses, decisions, engines):
        for phase in record.phases:
            axes.axvline(phase.begun_s - begun_s, color="0.6", linewidth=0.8)
    for phase in record.phases:
        pauses.text(phase.begun_s - begun_s, 1.01, f" {phase.name}", transform=pauses.get_xaxis_transform(),
                    rotation=20, fontsize=8)
    engines.set_xlabel("seconds")
    engines.set_xlim(0, ended_s - begun_s)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=80)


def _draw_pauses(axes: "Axes", record: BehindRecord, begun_s: float, ended_s: float) -> None:
    found = record.pauses(begun_s, ended_s)
    axes.plot([at_s - begun_s for at_s, _ in found], [MS * pause_s for _, pause_s in found], ".", markersize=2,
              color="tab:blue", label="time between two tokens of an answer")
    longest: dict[int, float] = {}
    for at_s, pause_s in found:
        number = int((at_s - begun_s) / BIN_S)
        longest[number] = max(longest.get(number, 0.0), MS * pause_s)
    axes.step([(number + 1) * BIN_S for number in sorted(longest)], [longest[number] for number in sorted(longest)],
              color="black", linewidth=1, label=f"longest in {BIN_S:g} s")
    for name, requests, colour in (("failed", record.failed(), "tab:red"), ("changed", record.changed(), "tab:purple"),
                                   ("cut by a kill", record.cut(), "tab:orange")):
        _mark(axes, requests, begun_s, f"{len(requests)} {name}", colour)
    axes.set_yscale("log")
    axes.set_ylim(bottom=SHORTEST_MS / 2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper right", ncols=5)


def _mark(axes: "Axes", requests: Sequence[AskedRequest], begun_s: float, label: str, colour: str) -> None:
    axes.plot([one.ended_s - begun_s for one in requests], [SHORTEST_MS] * len(requests), "x", color=colour,
              label=label)


def _draw_decisions(axes: "Axes", record: BehindRecord, begun_s: float, ended_s: float) -> None:
    """Bars: remote decisions upwards, local ones downwards."""
    bins = [begun_s + BIN_S * number for number in range(1 + int((ended_s - begun_s) / BIN_S))]
    counts = [added(record.readings, "decisions", at_s, at_s + BIN_S) for at_s in bins]
    names = sorted(set().union(*counts), key=lambda name: (name == GREY, name))
    for sign in (1, -1):
        base = [0.0] * len(bins)
        for name in names:
            if name.startswith("remote") == (sign > 0):
                heights = [sign * one[name] for one in counts]
                axes.bar([at_s - begun_s for at_s in bins], heights, BIN_S, base, align="edge", label=name,
                         color="0.8" if name == GREY else None)
                base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel(f"decisions in {BIN_S:g} s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right", ncols=6)


def _draw_engines(axes: "Axes", record: BehindRecord, begun_s: float, ended_s: float) -> None:
    since: dict[str, float] = {}
    for at_s, place, there in [*record.engines, *((ended_s, place, False) for place in PLACES)]:
        if there:
            since[place] = at_s
        elif place in since:
            axes.plot([since.pop(place) - begun_s, at_s - begun_s], [PLACES.index(place)] * 2, linewidth=5,
                      solid_capstyle="butt", color="tab:green" if place.startswith("P") else "tab:blue")
    for killed in record.killed:
        axes.plot(killed.at_s - begun_s, PLACES.index(killed.place), "x", color="red")
    axes.set_yticks(range(len(PLACES)), PLACES)
    axes.set_ylim(-0.7, len(PLACES) - 0.3)
    axes.set_ylabel("engines")
