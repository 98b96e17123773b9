# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of a comparison, from its JSON."""
from pathlib import Path
from typing import Any

from rich.table import Table

from _connectors.faults import FAULTS, AnswerEnd
from _connectors.pair import ConnectorName
from vllm_pd.bench.report import table

COLOURS = {AnswerEnd.RIGHT: "tab:green", AnswerEnd.ABORTED: "lightgray", AnswerEnd.ERROR: "tab:orange",
           AnswerEnd.HANG: "tab:purple", AnswerEnd.WRONG: "tab:red"}
QUOTIENTS = {"ours_to_theirs": "ours / theirs", "prefill_first_to_theirs": "ours, prefill first / theirs",
             "own_cache_to_theirs": "no transfer / theirs"}
COLUMNS = [end.value for end in AnswerEnd] + ["dead", "leaked"]


def rows(results: dict[str, Any]) -> list[list[str]]:
    """A row for each fault and connector, and one for all faults of a connector."""
    found = []
    for connector in ConnectorName:
        tallies = results["faults"].get(connector.value, {})
        cells = {FAULTS[name].name: _cells(tally) for name, tally in tallies.items()}
        if cells:
            cells["all"] = [sum(column) for column in zip(*cells.values(), strict=True)]
        found += [[f"{connector.value}: {name}", *map(str, cell)] for name, cell in cells.items()]
    return found


def _cells(tally: dict[str, Any]) -> list[int]:
    return [*(tally[end.value] for end in AnswerEnd), len(tally["dead"]), tally["leaked_blocks"]]


def counts(results: dict[str, Any]) -> Table:
    """The counts of all faults."""
    return table(["fault", *COLUMNS], rows(results))


def legs(results: dict[str, Any]) -> Table:
    """D's leg in milliseconds."""
    lines = []
    for prompt, found in results["legs"].items():
        for name, ms in found["ms"].items():
            figures = [f"{ms[key]:.1f}" for key in ("p10", "p50", "p90")]
            quotients = [_shown(found.get(key, {}).get(name)) for key in QUOTIENTS]
            lines.append([f"{prompt}, {name}", *figures, *quotients])
    return table(["D's leg, ms", "p10", "p50", "p90", *QUOTIENTS.values()], lines)


def _shown(quotient: dict[str, float] | None) -> str:
    return f"{quotient['p50']:.2f} ({quotient['p10']:.2f} to {quotient['p90']:.2f})" if quotient else ""


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes the picture: how the requests of each fault ended, and D's leg."""
    from matplotlib.figure import Figure

    connectors = [name for name in ConnectorName if results["faults"].get(name.value)]
    samples = [(f"{prompt}, {name}", [one[name] for one in found["samples_ms"]])
               for prompt, found in results["legs"].items() for name in found["ms"]]
    figure = Figure(figsize=(15, 5 + 3 * bool(samples)), layout="constrained")
    heights = (3, 1.8)[:1 + bool(samples)]
    above, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, connector in zip(above.subplots(1, max(1, len(connectors)), squeeze=False, sharey=True)[0], connectors,
                               strict=False):
        tallies = results["faults"][connector.value]
        for row, name in enumerate(FAULTS):
            tally, at = tallies.get(name), 0
            if tally is None:
                axes.text(0.5, row, "not run", va="center", color="gray", fontsize=8)
                continue
            for end in COLOURS:
                axes.barh(row, tally[end.value], left=at, color=COLOURS[end], label=end.value)
                at += tally[end.value]
            notes = [f"{tally['leaked_blocks']} blocks leaked"] * bool(tally["leaked_blocks"])
            notes += [f"{' and '.join(tally['dead'])} dead"] * bool(tally["dead"])
            axes.text(at + 0.5, row, ", ".join(notes), va="center", color="tab:red", fontsize=8)
        axes.set_yticks(range(len(FAULTS)), [fault.name for fault in FAULTS.values()])
        axes.set_xlim(0, 80)
        axes.set_title(connector.value)
        axes.set_xlabel("requests")
    if connectors:
        axes.invert_yaxis()
        handles, labels = axes.get_legend_handles_labels()
        above.legend(*zip(*dict(zip(labels, zip(handles, labels, strict=True), strict=True)).values(), strict=True),
                     loc="outside lower center", ncols=5)
    for part in below:
        axes = part.subplots()
        axes.boxplot([values for _, values in samples], orientation="horizontal", whis=(10, 90), showfliers=False)
        axes.set_yticks(range(1, 1 + len(samples)), [name for name, _ in samples])
        axes.invert_yaxis()
        axes.set_xlabel("D's leg, ms (quartiles, p10 and p90)")
        axes.set_xlim(0)
    figure.savefig(path, dpi=80)
