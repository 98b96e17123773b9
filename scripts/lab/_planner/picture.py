# SPDX-License-Identifier: Apache-2.0
"""The picture of `planner_splits.py`: of each load, how each run compares with the best fixed split."""
from __future__ import annotations

from pathlib import Path
from typing import Any

MOST = 3.0


def draw_picture(found: list[dict[str, Any]], goal: float, path: Path) -> None:
    """One dot a run, by load; a line at the goal."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    names = list(dict.fromkeys(one["load"] for one in found))
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for start, color in zip(found[0]["starts"], ("tab:blue", "tab:green", "tab:red"), strict=True):
        axes.plot([min(MOST, one["starts"][start]["ratio"]) for one in found],
                  [names.index(one["load"]) for one in found], "o", color=color, alpha=0.6,
                  label=f"begins with {start} prefill engines of 8")
    axes.axvline(goal, color="gray", linestyle=":")
    axes.axvline(1.0, color="gray")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, MOST + 0.1)
    axes.set_xlabel("good requests, to those of the best fixed split in hindsight")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
