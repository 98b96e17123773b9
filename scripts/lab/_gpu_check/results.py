# SPDX-License-Identifier: Apache-2.0
"""How a part ended, what it found, and the JSON of both. Standard library only.

A part's process writes its `PartResult` to a file whenever it has found something, so that a part that is killed leaves
what it had. A file is replaced as a whole; a reader never sees half of one.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class PartOutcome(StrEnum):
    """How a part ended. RUNNING: it has not."""
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    TIMED_OUT = "timed out"
    RUNNING = "running"


BAD = (PartOutcome.FAILED, PartOutcome.TIMED_OUT)


class PartSkipped(Exception):
    """The part can't run here. The message says why, in words."""


class PartFailed(Exception):
    """The part has found something wrong. The message says what."""


@dataclass(frozen=True)
class PartResult:
    """`reason` says why a part did not pass; it is empty for one that did. `figures`: what it measured, for JSON."""
    outcome: PartOutcome
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    took_s: float = 0.0


def write_json(path: Path, value: Any) -> None:
    """Replace the file by this value, as a whole."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(unfinished, path)


def read_result(path: Path) -> PartResult | None:
    """What a part's process has written last; None where there is nothing that can be read."""
    try:
        found = json.loads(path.read_text())
        return PartResult(PartOutcome(found["outcome"]), str(found["reason"]), dict(found["figures"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def exit_status(results: dict[str, PartResult], about: str) -> int:
    """1 where a part failed or timed out, 0 where none did and one has passed, 2 where nothing was checked. `about` is
    the part that only describes the machine."""
    if any(result.outcome in BAD for result in results.values()):
        return 1
    passed = [name for name, result in results.items() if result.outcome is PartOutcome.PASSED and name != about]
    return 0 if passed else 2
