# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd bench serve` does with its options, and its exit status."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_pd.bench.checks import parse_cores
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.serve import pictures, report, sharegpt
from vllm_pd.bench.serve.choices import shape_of
from vllm_pd.bench.serve.comparison import labels
from vllm_pd.bench.serve.measure import ServeRun, good
from vllm_pd.bench.serve.settings import ServeBench
from vllm_pd.errors import ConfigError


def run(bench: ServeBench, log: Path, picture: Path | None, output: Path | None, show: ShowLine,
        show_table: Callable[[Table], object]) -> int:
    """Exports the load, or measures and reports. The exit status: 1 where an arm failed or an answer was not that of
    the other arms. Raises ConfigError."""
    if bench.export is not None:
        entries = sharegpt.exported(shape_of(bench))
        _write(bench.export, "--export", entries)
        show(f"{bench.export}: {len(entries)} prompts")
        return 0
    for key, path in (("--output", output), ("--picture", picture)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(key, str(path), "there is no such folder: make it, or write another file")

    def keep(found: dict[str, Any]) -> None:
        if output is not None:
            _write(output, "--output", found)

    with log.open("w", buffering=1) as file:
        run = ServeRun(bench, show, file)
        with _on_cores(parse_cores("--load-cores", bench.load_cores)):
            found = run.measure(keep)
    for label in labels(found):
        for arm in found["arms"]:
            show(report.block(found, arm, label) + "\n")
    for label in labels(found):
        show_table(report.table(found, label))
    if picture is not None and found["arms"]:
        pictures.picture(found, picture)
    show("\n".join(report.summary(found)))
    return 0 if good(found) else 1


@contextlib.contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Runs this program on these cores, and what it starts without cores of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _write(path: Path, key: str, value: Any) -> None:
    try:
        path.write_text(json.dumps(value) + "\n")
    except OSError as error:
        raise ConfigError(key, str(path), f"{error}: write another file") from None
