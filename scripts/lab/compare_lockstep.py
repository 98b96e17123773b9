#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The step sync and vLLM's waves through the same drawn histories: forward passes, dummies, messages, and hangs.

    export VLLM_PD_ENGINE=v1; . scripts/env.sh
    python scripts/lab/compare_lockstep.py --histories 100 --json docs/results/lockstep.json

Two groups of two ranks each, one that prefills and one that decodes: vLLM's engine loop and scheduler, and our binding,
over simulated memory (`tests/v1/lockstep_histories.py`). What lies between them is simulated, as is the coordinator of
the waves. A history that breaks off counts as a hang; its groups are replaced. The figures are those of the histories
that have ended with both. `--calls`: with calls and pauses of all ranks. Waves agree on pauses only: a call reaches
each rank between two steps of its own.

No time is measured: a simulated forward pass takes none. Exit status 1 where the step sync has hung.
"""
import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests

from tests.v1 import lockstep_histories, step_sync_group, test_lockstep_groups
from tests.v1.lockstep_histories import FORMS, PER_FLEET, HistoryFleet, draw_history
from tests.v1.simulated import write_model
from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.outputs import argument_file, write_json

WAYS = {"step sync": step_sync_group.CountedGroup, "waves": test_lockstep_groups.Group}
PASS_S = 5.0  # a forward pass that some rank has not joined by then hangs
LIMIT_S = 10.0  # the same for a part of a history


class Way:
    """One way to keep ranks in lockstep. `figures`: by the number of a history that has ended."""

    def __init__(self, folder: Path, group: type) -> None:
        self._folder, self._group = folder, group
        self._fleet: HistoryFleet | None = None
        self.figures: dict[int, Counter[str]] = {}
        self.hangs: dict[int, str] = {}

    def run(self, number: int, calls: bool) -> None:
        """One history. The first of each PER_FLEET gets new groups."""
        if number % PER_FLEET == 0:
            self.close()
        if self._fleet is None:
            fleet = number // PER_FLEET
            self._fleet = HistoryFleet(self._folder, self._group, fleet % len(FORMS), fleet)
        before = self._counted()
        try:
            self._fleet.run(draw_history(number, calls))
        except AssertionError as error:
            ended = [repr(loop.error) for group in self._fleet.groups for loop in group.ranks if loop.error]
            self.hangs[number] = ", ".join(ended) or str(error) or "it came to no end"
            self._fleet.end()
            self._fleet = None
        else:
            self.figures[number] = Counter({key: count - before[key] for key, count in self._counted().items()})

    def _counted(self) -> Counter[str]:
        passes, dummies, messages = self._fleet.figures()
        return Counter(passes=passes, dummies=dummies, requests=sum(self._fleet.ended.values()), **messages)

    def close(self) -> None:
        """End the groups."""
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None


def compare(folder: Path, histories: int, calls: bool) -> dict[str, Any]:
    """The report."""
    ways = {name: Way(folder, group) for name, group in WAYS.items()}
    for number in range(histories):
        for way in ways.values():
            way.run(number, calls)
    for way in ways.values():
        way.close()
    common = [number for number in range(histories) if all(number in way.figures for way in ways.values())]
    return {"histories": histories, "calls": calls, "counted": len(common), "ways": {
        name: {"hangs": way.hangs, **sum((way.figures[number] for number in common), Counter())}
        for name, way in ways.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=argument_count, default=100, help="default: %(default)s")
    parser.add_argument("--calls", action="store_true", help="with calls and pauses of all ranks")
    parser.add_argument("--json", type=argument_file, help="write the report there")
    args = parser.parse_args()
    step_sync_group.BARRIER_S = test_lockstep_groups.MEET_S = PASS_S
    lockstep_histories.LIMIT_S = LIMIT_S
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patches:
        test_lockstep_groups.exchange_here(patches)
        report = compare(write_model(Path(folder)), args.histories, args.calls)
    print(json.dumps(report, indent=1))
    if args.json:
        write_json(args.json, report)
    return bool(report["ways"]["step sync"]["hangs"])


if __name__ == "__main__":
    sys.exit(main())
