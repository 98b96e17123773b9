# SPDX-License-Identifier: Apache-2.0
"""The picture: each panel of the dashboard where it is in Grafana, with what it showed in the run."""
import io
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from _dashboard.session import DashboardRecord, PanelReading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
HEADROOM = 1.3  # for the legend
UNITS = {"s": (1.0, "s"), "reqps": (1.0, "1/s"), "cps": (1.0, "1/s"), "percentunit": (100.0, "%"),
         "Bps": (1e-6, "MB/s"), "short": (1.0, "")}


def draw(record: DashboardRecord, path: Path, title: str) -> None:
    """Writes the PNG."""
    from matplotlib.figure import Figure
    from PIL import Image

    found = [list(lines) for _, lines in groupby(record.readings, key=lambda one: one.panel.title)]
    rows = -(-len(found) // COLUMNS)
    figure = Figure(figsize=(18, 3.1 * rows), layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes, lines in zip(grid.flat, found, strict=False):
        _draw_panel(axes, lines, record)
    for axes in list(grid.flat)[len(found):]:
        axes.set_axis_off()
    for row, lines in zip(grid, found[::COLUMNS], strict=True):
        row[0].set_ylabel(lines[0].panel.row, fontsize=10, fontweight="bold")
    for number, (name, _) in enumerate(record.phases):
        title += f"{';' if number else ':'} {chr(ord('a') + number)} {name}"
    figure.suptitle(title, fontsize=11)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=75)
    # A third of the bytes. The octree keeps the colours of thin lines; the default takes one for another.
    few = Image.open(drawn).convert("RGB").quantize(method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def _draw_panel(axes: "Axes", lines: Sequence[PanelReading], record: DashboardRecord) -> None:
    panel, begun_s = lines[0].panel, record.phases[0][1]
    factor, unit = UNITS[panel.unit]
    drawn = [(reading.line.name(series.labels), series) for reading in lines for series in reading.series]
    if panel.stacked:
        times = sorted({at_s for _, series in drawn for at_s in series.at_s})
        heights = [dict(zip(series.at_s, series.values, strict=True)) for _, series in drawn]
        axes.stackplot([at_s - begun_s for at_s in times],
                       [[factor * height.get(at_s, 0.0) for at_s in times] for height in heights],
                       labels=[name for name, _ in drawn], alpha=0.7)
    else:
        for name, series in drawn:
            times, values = series.with_gaps()
            axes.plot([at_s - begun_s for at_s in times], [factor * value for value in values], linewidth=1.2,
                      label=name)
    for number, (_, at_s) in enumerate(record.phases):
        axes.axvline(at_s - begun_s, color="0.7", linewidth=0.8)
        axes.text(at_s - begun_s, 1.0, f" {chr(ord('a') + number)}", transform=axes.get_xaxis_transform(), fontsize=7,
                  va="top", color="0.4")
    axes.set_xlim(0, record.ended_s - begun_s)
    axes.set_ylim(0, HEADROOM * axes.get_ylim()[1])
    axes.set_title(panel.title + (f" ({unit})" if unit else ""), fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend(fontsize=7, loc="upper right", framealpha=0.6, ncols=2)
    else:
        axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center", color="0.5")
