# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd bench serve` does with its options, and its exit status."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from vllm_pd.bench.checks import parse_cores
from vllm_pd.bench.outputs import require_file, require_picture, write_json
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.serve import pictures, report, sharegpt
from vllm_pd.bench.serve.choices import shape_of
from vllm_pd.bench.serve.comparison import labels
from vllm_pd.bench.serve.measure import ServeRun, good
from vllm_pd.bench.serve.settings import ServeBench
from vllm_pd.errors import ConfigError


def run(bench: ServeBench, log: Path, picture: Path | None, output: Path | None, show: ShowLine,
        show_table: Callable[[Table], object]) -> int:
    """Exports the load, or measures and reports. The exit status: 1 where an arm failed, an answer was not that of the
    other arms, or a file could not be written. Raises ConfigError."""
    if bench.export is not None:
        entries = sharegpt.exported(shape_of(bench))
        try:
            write_json(bench.export, entries)
        except OSError as error:
            raise ConfigError("--export", str(bench.export), f"{error}: write another file") from None
        show(f"{bench.export}: {len(entries)} prompts")
        return 0
    for key, path in (("--log", log), ("--output", output)):
        require_file(key, path)
    require_picture("--picture", picture)
    written = True

    def keep(found: dict[str, Any]) -> None:
        nonlocal written
        written = output is None or _tried(lambda: write_json(output, found), output, show)

    with _opened(log) as file:
        run = ServeRun(bench, show, file)
        with _on_cores(parse_cores("--load-cores", bench.load_cores)):
            found = run.measure(keep)
    for label in labels(found):
        for arm in found["arms"]:
            show(report.block(found, arm, label) + "\n")
    for label in labels(found):
        show_table(report.table(found, label))
    if picture is not None and found["arms"]:
        written &= _tried(lambda: pictures.picture(found, picture), picture, show)
    show("\n".join(report.summary(found)))
    return 0 if good(found) and written else 1


@contextlib.contextmanager
def _opened(log: Path) -> Iterator[TextIO]:
    """The file for what servers print, which no failing write ends the run."""
    file = log.open("w", buffering=1)
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # it writes what it could not write before
            file.close()


@contextlib.contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Runs this program on these cores, and what it starts without cores of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _tried(write: Callable[[], object], path: Path, show: ShowLine) -> bool:
    """Whether `path` could be written. What was measured is worth more than its file, so the run goes on."""
    try:
        write()
    except (OSError, ValueError) as error:  # ValueError: matplotlib has no such format
        show(f"{path} was not written: {error}")
        return False
    return True
