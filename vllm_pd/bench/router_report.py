# SPDX-License-Identifier: Apache-2.0
"""The report of `vllm-pd bench router` for people: a table and a picture."""

from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_pd.bench.report import LEAST_P99, side_by_side
from vllm_pd.bench.router import DIRECT

PHASES = (("alone", "plain"), ("alone", "stream"), ("paced", "stream"), ("busy", "plain"), ("busy", "stream"))
LINEAR_MS = 1.0  # of a picture's axis that goes far; beyond that it is logarithmic
Entries = dict[tuple[str, str], dict[str, Any]]  # of one target, by phase and kind


def table(report: dict[str, Any]) -> Table:
    """One line for each figure, one column for each target."""
    targets = _targets(report)
    lines = []
    for key in PHASES:
        phase, kind = key
        if phase != "busy":
            lines.append((f"{phase} {kind}: requests", lambda name, key=key: str(targets[name][key]["requests"])))
            lines.append((f"{phase} {kind}: added ms", lambda name, key=key: _pair(targets[name][key], "total")))
            if kind == "stream":
                lines.append(("    to the first event, ms", lambda name, key=key: _pair(targets[name][key], "first")))
        if phase != "alone":
            lines.append((f"{phase} {kind}: requests/s", lambda name, key=key: f"{_rate(targets[name][key]):.0f}"))
            lines.append(("    its CPU ms per request", lambda name, key=key: "-" if name == DIRECT else
                          f"{targets[name][key].get('router_cpu_ms_per_request', 0):.3f}"))
    memory = report["memory_bytes"]
    lines += [("errors", lambda name: str(sum(entry["errors"] for entry in targets[name].values()))),
              ("memory MB", lambda name: f"{memory[name] / 1e6:.0f}" if name in memory else "-")]
    return side_by_side(list(targets), list(targets), lines, "added: p50 / p99")


def picture(report: dict[str, Any], path: Path) -> None:
    """What is added to a request, as a distribution for each phase, and requests/s as bars."""
    from matplotlib.figure import Figure

    targets = _targets(report)
    colours = dict(zip(targets, ["0.6", *(f"C{number}" for number in range(len(targets) - 1))], strict=True))
    figure = Figure(figsize=(15, 3.8))
    *distributions, rates = figure.subplots(1, 4)
    for axis, key in zip(distributions, PHASES, strict=False):
        grids = {name: entries[key].get("added_grid_ms", []) for name, entries in targets.items()}
        for name, grid in grids.items():
            axis.plot(grid, [number / max(1, len(grid) - 1) for number in range(len(grid))], label=name,
                      color=colours[name])
        drawn = [grid for grid in grids.values() if grid] or [[0.0, 1.0]]
        most = 1.1 * max(grid[-1 - len(grid) // 50] for grid in drawn)
        if most > 10 * LINEAR_MS:
            axis.set_xscale("symlog", linthresh=LINEAR_MS)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(min(grid[len(grid) // 100] for grid in drawn), most)
        axis.set_title(", ".join(key), fontsize=9, loc="left")
        axis.set_xlabel("ms added until the end of the answer")
        axis.grid(alpha=0.3)
    distributions[0].set_ylabel("share of the requests")
    figure.legend(*distributions[0].get_legend_handles_labels(), loc="lower center", ncol=len(targets), fontsize=8)
    busy = PHASES[3:]
    for place, key in enumerate(busy):
        for number, (name, entries) in enumerate(targets.items()):
            bar = rates.barh(place + (number + 0.5) / (len(targets) + 1), _rate(entries[key]), 0.9 / (len(targets) + 1),
                             color=colours[name])
            rates.bar_label(bar, fmt="%.0f", fontsize=7, padding=2)
    rates.set_yticks([0.45, 1.45], [kind for _, kind in busy])
    rates.invert_yaxis()
    rates.margins(x=0.15)
    rates.set_title(f"busy, {report['settings']['clients']} clients", fontsize=9, loc="left")
    rates.set_xlabel("requests/s")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=110)


def _targets(report: dict[str, Any]) -> dict[str, Entries]:
    """The entries of each target, in the report's order."""
    found: dict[str, Entries] = {}
    for entry in report["entries"]:
        found.setdefault(entry["router"], {})[entry["phase"], entry["kind"]] = entry
    return found


def _pair(entry: dict[str, Any], key: str) -> str:
    """The median and the 99th percentile, or the largest value of few."""
    if f"{key}_added_ms" not in entry:
        return "-"
    most = "max " if entry["requests"] < LEAST_P99 else ""
    return f"{{p50:.2f}} / {most}{{p99:.2f}}".format(**entry[f"{key}_added_ms"])


def _rate(entry: dict[str, Any]) -> float:
    return entry.get("requests_per_s", {}).get("median", 0)
