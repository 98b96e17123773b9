# SPDX-License-Identifier: Apache-2.0
"""The picture of `vllm-pd bench serve`: how ITLs are distributed and when they were long, or what a sweep does."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd.bench.serve.comparison import ITL_P99, TTFT_SHORT, labels, over_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

SWEEP_PANELS = (("TTFT of short prompts, p50, ms", TTFT_SHORT, True), ("ITL p99, ms", ITL_P99, True),
                ("share within the limits", "good_share", False))


def picture(report: dict[str, Any], path: Path) -> None:
    """Draws the report as PNG: a load of one point, or a sweep."""
    from matplotlib.figure import Figure
    if len(labels(report)) > 1:
        figure = Figure(figsize=(14, 4), layout="tight")
        _sweep(figure, report)
    else:
        figure = Figure(figsize=(12, 2.6 + 1.3 * len(report["arms"])), layout="constrained")
        _one_point(figure, report)
    figure.savefig(path, dpi=110)


def _one_point(figure: "Figure", report: dict[str, Any]) -> None:
    """Left the distribution of the ITLs, right a timeline of the first round for each arm."""
    left, right = figure.subfigures(1, 2, width_ratios=[2, 3])
    _distribution(left.subplots(), report)
    draw_timelines(right, {name: arm.get("timeline", {"itl": [], "long": []}) for name, arm in report["arms"].items()})


def draw_timelines(figure: "FigureBase", timelines: dict[str, dict[str, list]], line: str = "") -> None:
    """One under the other, by name, each as `vllm_pd.bench.serve.figures.timeline` gives it. `line`: matplotlib's style
    of the line between two tokens; "" draws none, as the tokens of several answers do not follow each other."""
    axes = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for number, (axis, (name, shown)) in enumerate(zip(axes, timelines.items(), strict=True)):
        for sent_s, first_s in shown["long"]:
            axis.axvspan(sent_s, first_s, color="0.88")
            axis.axvline(sent_s, color="0.5", linewidth=0.8)
        if shown["itl"]:
            axis.plot(*zip(*shown["itl"], strict=True), f".{line}", markersize=4 if line else 2, linewidth=0.8,
                      color=f"C{number}")
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(name, fontsize=9, loc="left")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("s since the load began; grey: from the arrival of a long prompt to its first token")
    figure.supylabel("ITL of running answers, ms", fontsize=10)


def _distribution(axis: "Axes", report: dict[str, Any]) -> None:
    """How many ITLs are longer than so much, on logarithmic axes, of all rounds."""
    for number, (name, arm) in enumerate(report["arms"].items()):
        gaps_ms = sorted(gap for turn in arm["rounds"] for point in turn["points"] for gap in point["itl_grid_ms"])
        if gaps_ms:
            axis.plot(gaps_ms, [1 - rank / len(gaps_ms) for rank in range(len(gaps_ms))], color=f"C{number}",
                      label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("ITL of running answers, ms")
    axis.set_ylabel("share of the ITLs that are at least so long")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _sweep(figure: "Figure", report: dict[str, Any]) -> None:
    """A panel for each figure, a line for each arm, the spread of the rounds as bars."""
    shown = labels(report)
    values = [float(label.split()[0]) for label in shown]
    for axis, (text, path, logarithmic) in zip(figure.subplots(1, len(SWEEP_PANELS)), SWEEP_PANELS, strict=True):
        for number, arm in enumerate(report["arms"]):
            found = [(value, over_rounds(report, arm, label, path))
                     for value, label in zip(values, shown, strict=True)]
            drawn = [(value, at["median"], at["median"] - at["min"], at["max"] - at["median"])
                     for value, at in found if at]
            if drawn:
                at, medians, below, above = zip(*drawn, strict=True)
                axis.errorbar(at, medians, [below, above], marker="o", markersize=4, capsize=3, color=f"C{number}",
                              label=arm)
        if logarithmic:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
        else:
            axis.set_ylim(-0.02, 1.05)
        axis.set_xlabel(shown[0].split(maxsplit=1)[1])
        axis.set_ylabel(text)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
