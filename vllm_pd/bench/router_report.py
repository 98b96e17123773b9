# SPDX-License-Identifier: Apache-2.0
"""The report of `vllm-pd bench router` for people: a table and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from vllm_pd.bench.router import DIRECT

PHASES = (("alone", "plain"), ("alone", "stream"), ("paced", "stream"), ("busy", "plain"), ("busy", "stream"))
LINEAR_MS = 1.0  # of a picture's axis that goes far; beyond that it is logarithmic


def table(report: dict[str, Any]) -> Table:
    """One line for each figure, one column for each target."""
    names = _names(report)
    shown = Table(box=box.SIMPLE)
    shown.add_column("added: p50 / p99", no_wrap=True)
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for phase, kind in PHASES:
        entries = [_entry(report, name, phase, kind) for name in names]
        if phase != "busy":
            shown.add_row(f"{phase} {kind}: added ms", *(_pair(e, "total_added_ms") for e in entries))
            if kind == "stream":
                shown.add_row("    to the first event, ms", *(_pair(e, "first_added_ms") for e in entries))
        if phase != "alone":
            shown.add_row(f"{phase} {kind}: requests/s", *(f"{e.get('requests_per_s', {}).get('median', 0):.0f}"
                                                           for e in entries))
            shown.add_row("    its CPU ms per request", *(
                "-" if e["router"] == DIRECT else f"{e.get('router_cpu_ms_per_request', 0):.3f}" for e in entries))
    shown.add_row("errors", *(str(sum(e["errors"] for e in report["entries"] if e["router"] == name))
                              for name in names))
    shown.add_row("memory MB", *(f"{report['memory_bytes'][name] / 1e6:.0f}" if name in report["memory_bytes"] else "-"
                                 for name in names))
    return shown


def picture(report: dict[str, Any], path: Path) -> None:
    """What is added to a request, as a distribution for each phase, and requests/s as bars."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = _names(report)
    colours = dict(zip(names, ["0.6", *(f"C{number}" for number in range(len(names) - 1))], strict=True))
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8))
    for axis, (phase, kind) in zip(axes, PHASES[:3], strict=False):
        for name in names:
            grid = _entry(report, name, phase, kind).get("added_grid_ms", [])
            axis.plot(grid, [number / max(1, len(grid) - 1) for number in range(len(grid))], label=name,
                      color=colours[name])
        if _high(report, phase, kind) > 10 * LINEAR_MS:
            axis.set_xscale("symlog", linthresh=LINEAR_MS)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(_low(report, phase, kind), _high(report, phase, kind))
        axis.set_title(f"{phase}, {kind}", fontsize=9, loc="left")
        axis.set_xlabel("ms added until the end of the answer")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of the requests")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncol=len(names), fontsize=8)
    for place, (phase, kind) in enumerate(PHASES[3:]):
        for number, name in enumerate(names):
            rate = _entry(report, name, phase, kind).get("requests_per_s", {}).get("median", 0)
            bar = axes[3].barh(place + (number + 0.5) / (len(names) + 1), rate, 0.9 / (len(names) + 1),
                               color=colours[name])
            axes[3].bar_label(bar, [f"{rate:.0f}"], fontsize=7, padding=2)
    axes[3].set_yticks([0.45, 1.45], [kind for _, kind in PHASES[3:]])
    axes[3].invert_yaxis()
    axes[3].margins(x=0.15)
    axes[3].set_title(f"busy, {report['settings']['clients']} clients", fontsize=9, loc="left")
    axes[3].set_xlabel("requests/s")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _names(report: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(entry["router"] for entry in report["entries"]))


def _entry(report: dict[str, Any], name: str, phase: str, kind: str) -> dict[str, Any]:
    return next(entry for entry in report["entries"]
                if (entry["router"], entry["phase"], entry["kind"]) == (name, phase, kind))


def _grids(report: dict[str, Any], phase: str, kind: str) -> Sequence[list[float]]:
    grids = [_entry(report, name, phase, kind).get("added_grid_ms") for name in _names(report)]
    return [grid for grid in grids if grid] or [[0.0, 1.0]]


def _low(report: dict[str, Any], phase: str, kind: str) -> float:
    return min(grid[len(grid) // 100] for grid in _grids(report, phase, kind))


def _high(report: dict[str, Any], phase: str, kind: str) -> float:
    return 1.1 * max(grid[-1 - len(grid) // 50] for grid in _grids(report, phase, kind))


def _pair(entry: dict[str, Any], key: str) -> str:
    return "{p50:.2f} / {p99:.2f}".format(**entry[key]) if key in entry else "-"
