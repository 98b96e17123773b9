# SPDX-License-Identifier: Apache-2.0
"""The picture of a comparison: for each load how many prefill engines there were over time, and what came of it."""
import math
from collections.abc import Mapping
from pathlib import Path

from _planner.compare import Compared
from _planner.fleet import ENGINES
from _planner.loads import LOADS

COLUMNS = 2
MINUTE_S = 60.0


def draw_shifts(found: Mapping[str, Compared], path: Path) -> None:
    """Writes the PNG."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(found) / COLUMNS)
    figure = Figure(figsize=(15, 2.4 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
    for axes, (load, one) in zip(panels, found.items(), strict=False):
        at = [at_s / MINUTE_S for at_s, *_ in one.trace]
        axes.step(at, [engines for _, engines, _, _ in one.trace], where="post", color="tab:blue",
                  label="prefill engines with the planner")
        axes.axhline(one.best, color="tab:orange", linestyle="--", label="those of the best fixed ratio")
        begun_s = 0.0
        for phase in LOADS[load][:-1]:
            begun_s += phase.lasts_s
            axes.axvline(begun_s / MINUTE_S, color="0.85", linewidth=0.8, zorder=0)
        axes.set_ylim(0, ENGINES)
        axes.set_title(f"{load}: {one.planned:.1f} of {one.offered:.1f} requests/s met their targets; best fixed ratio "
                       f"{one.static[one.best]:.1f}", fontsize=9)
        axes.set_xlabel("minutes", fontsize=8)
    for axes in panels[len(found):]:
        axes.set_axis_off()
    panels[0].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{ENGINES} simulated engines; grey lines: a phase of the load ends", fontsize=11)
    figure.savefig(path, dpi=80)
