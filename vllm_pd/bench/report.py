# SPDX-License-Identifier: Apache-2.0
"""The report of every benchmark: figures of a distribution, and tables. Pictures are drawn with
`matplotlib.figure.Figure`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
from rich import box
from rich.table import Table

MS = 1000.0  # the scale from seconds to milliseconds
LEAST_P99 = 100  # of fewer values the 99th percentile is the largest by another name
ShowLine = Callable[[str], object]  # gets a line about how far a benchmark is


def summary(values: Iterable[float], figures: str, scale: float = 1.0) -> dict[str, float]:
    """The named figures of `values` times `scale`, rounded to 4 digits; {} where there are no values.

    `figures` are names with spaces between: `mean`, `min`, `max`, and percentiles like `p99`. A percentile is the
    nearest rank: the smallest of the values that at least so many percent of them do not exceed.
    """
    found = scale * numpy.fromiter(values, float)
    return {name: round(float(_figure(found, name)), 4) for name in figures.split()} if found.size else {}


def quantile_grid(values: Iterable[float], steps: int, scale: float = 1.0) -> list[float]:
    """`steps` + 1 evenly spaced quantiles of `values` times `scale`, from the smallest to the largest: a distribution
    to draw. `values` may not be empty."""
    found = numpy.quantile(numpy.fromiter(values, float), numpy.linspace(0, 1, steps + 1), method="inverted_cdf")
    return [round(float(value), 4) for value in scale * found]


def _figure(values: numpy.ndarray, name: str) -> float:
    if name in ("mean", "min", "max"):
        return getattr(values, name)()
    return numpy.quantile(values, int(name.removeprefix("p")) / 100, method="inverted_cdf")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, text: int = 0) -> Table:
    """A table of figures, but for the column number `text`."""
    shown = Table(box=box.SIMPLE, title=title)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == text else "right", no_wrap=number == text)
    for row in rows:
        shown.add_row(*row)
    return shown


def side_by_side(columns: Sequence[str], entries: Sequence[Any], lines: Iterable[tuple[str, Callable[[Any], str]]],
                 corner: str = "") -> Table:
    """A table with a column for each entry, and a line for each of `lines`: its text, and the function that makes the
    cell of an entry. `corner` is the header of the texts."""
    return table([corner, *columns], ([text, *map(cell, entries)] for text, cell in lines))
