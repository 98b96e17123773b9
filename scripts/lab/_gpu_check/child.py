# SPDX-License-Identifier: Apache-2.0
"""`python -m _gpu_check.child MODULE:FUNCTION FILE SETTINGS DEADLINE_S`: runs one part in this process.

The function gets a `PartRun` and returns nothing. SIGTERM becomes SystemExit, so that `with` blocks end what they have
started.
"""
from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _gpu_check.harness import CheckSettings
from _gpu_check.results import PartFailed, PartOutcome, PartResult, PartSkipped, write_json

ROOT = Path(__file__).resolve().parents[3]


class PartRun:
    """What a part's function gets: the settings, a place for its figures, and its deadline."""

    def __init__(self, settings: CheckSettings, file: Path, deadline_s: float) -> None:
        self.settings = settings
        self.file = file
        self._ends_s = time.monotonic() + deadline_s
        self.figures: dict[str, Any] = {}  # ready for JSON; `note` adds to them

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._ends_s - time.monotonic()

    def note(self, **figures: Any) -> None:
        """Add figures, ready for JSON. They are kept whatever happens to the part."""
        self.figures |= figures
        self.write(PartResult(PartOutcome.RUNNING))

    def write(self, result: PartResult) -> None:
        """Replace what the harness will read."""
        write_json(self.file, asdict(PartResult(result.outcome, result.reason, self.figures)))


def require(*modules: str) -> None:
    """Raises PartSkipped naming those that are not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise PartSkipped(f"not installed here: {', '.join(missing)}")


def run_target(target: str, run: PartRun) -> PartResult:
    """Import the function and call it. Any exception becomes the result."""
    module, _, function = target.partition(":")
    try:
        getattr(importlib.import_module(module), function)(run)
    except PartSkipped as skipped:
        return PartResult(PartOutcome.SKIPPED, str(skipped))
    except PartFailed as failed:
        return PartResult(PartOutcome.FAILED, str(failed))
    except Exception as error:
        traceback.print_exc()
        return PartResult(PartOutcome.FAILED, f"{type(error).__name__}: {error}")
    return PartResult(PartOutcome.PASSED)


def main(arguments: list[str]) -> int:
    target, file, settings, deadline_s = arguments
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if importlib.util.find_spec("vllm_pd") is None:
        sys.path.append(str(ROOT))  # a machine without vLLM: the package beside this script
    run = PartRun(CheckSettings(**json.loads(settings)), Path(file), float(deadline_s))
    run.note()
    run.write(run_target(target, run))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
