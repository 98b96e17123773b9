#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks on one GPU what the tests can't: blocks in its memory, kernels that run beside transfers, graphs.

    python scripts/lab/gpu_check.py --model DIR --out build/gpu         all that this machine can run, in ten minutes
    python scripts/lab/gpu_check.py --model DIR --at-once               side by side, where it has more cores than time
    python scripts/lab/gpu_check.py --part bits --part order            only these
    python scripts/lab/gpu_check.py --device cpu                        the same parts without a GPU, where they can

Each part runs in a process of its own with a deadline of its own; one that fails or hangs does not end the others. OUT
gets `gpu_check.json`, written after each part, and the log of each part. The exit status: 0 where nothing failed, 1
where a part failed or timed out, 2 where nothing could be checked.
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _gpu_check.harness import ANSWERS, STOCK, CheckSettings, GpuPart, adopting_orphans, run_parts
from _gpu_check.results import PartOutcome, PartResult, exit_status, write_json

BUDGET_S = 600.0
ABOUT = "machine"
PARTS = (
    GpuPart(ABOUT, "_gpu_check.machine:describe", "what this machine has", 90, 5),
    GpuPart("bits", "_gpu_check.bits:check", "every bit of every block, in all layouts, beside kernels", 120, 20),
    GpuPart("order", "_gpu_check.order:check", "transfers that are requested while a step computes their blocks", 90,
            20),
    GpuPart("rates", "_gpu_check.rates:check", "what a write costs in each layout of V1", 90, 20),
    GpuPart("store-copies", "_gpu_check.stored:check_copies", "the KV store's copies, beside kernels", 90, 20),
    GpuPart(STOCK, "_gpu_check.engines:ask_stock", "what one stock engine answers, for the parts below", 200, 60),
    GpuPart("b1", "_gpu_check.engines:check_b1", "two engines at 0.4 of the GPU each: the tokens of a stock one", 260,
            60),
    GpuPart("runner-v2", "_gpu_check.engines:check_runner", "model runner V2, CUDA graphs, async scheduling", 150, 60),
    GpuPart("layers-first", "_gpu_check.engines:check_layers_first", "b1 with a descriptor for each layer of a block",
            200, 60),
    GpuPart("flashinfer", "_gpu_check.engines:check_flashinfer", "FlashInfer with heads first", 130, 60),
    GpuPart("death", "_gpu_check.deaths:check_death", "the prefill engine is killed under load", 200, 60),
    GpuPart("store", "_gpu_check.stored:check_store", "two engines with the KV store and little cache", 200, 60),
    GpuPart("serve", "_gpu_check.engines:check_serve", "vllm-pd bench serve, small", 200, 100),
)
ON_STOCK = {"b1", "runner-v2", "layers-first", "flashinfer", "death", "store"}  # compare with what `stock` leaves


class GpuReport:
    """The report as it grows. `file` is replaced after each part."""

    def __init__(self, settings: CheckSettings, budget_s: float, file: Path) -> None:
        self._settings, self._budget_s, self._file = settings, budget_s, file
        self._began_s = time.monotonic()
        self._date = datetime.now(UTC).isoformat(timespec="seconds")
        self.results: dict[str, PartResult] = {}

    def keep(self, name: str, result: PartResult) -> str:
        """Add a part, print its line and write the file. Returns why no other part can run here, or ""."""
        self.results[name] = result
        print(f"{name:<12} {result.outcome:<10} {result.took_s:6.1f} s   {result.reason}", flush=True)
        write_json(self._file, self.as_json())
        if name != ABOUT or self._settings.device == "cpu" or result.figures.get("gpu"):
            return ""
        return "there is no GPU that torch can use (--device cpu runs what needs none)"

    def as_json(self) -> dict[str, Any]:
        """All results, and what the machine has."""
        about = self.results.get(ABOUT, PartResult(PartOutcome.SKIPPED)).figures
        return {"date": self._date, "device": about.get("device"), "budget_s": self._budget_s,
                "took_s": round(time.monotonic() - self._began_s, 1), "prompts": self._settings.prompts,
                "status": exit_status(self.results, ABOUT),
                "parts": {name: asdict(result) for name, result in self.results.items()}}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    names = [part.name for part in PARTS[1:]]
    shown = "\n".join(f"    {part.name:<12} {part.what}" for part in PARTS)
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"parts:\n{shown}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=names, action="append", help="only this one; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_MODEL", ""), metavar="DIR",
                        help="for the parts with engines; default: $VLLM_PD_MODEL")
    parser.add_argument("--prompts", type=int, default=50, metavar="N", help="of part b1; default 50")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="ARG",
                        help="for every engine, as --engine-arg=--load-format --engine-arg=dummy; may be repeated")
    parser.add_argument("--at-once", action="store_true", help="run the parts side by side, each with two engines of "
                        "V1, where a machine has the cores and the memory, but not the time for one after the other")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S",
                        help=f"for all parts together; default {BUDGET_S:g}. With more, each part may take longer")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"), metavar="DIR",
                        help="folder for the results; default build/gpu_check")
    return parser


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.prompts < 1:
        parser.error("--prompts: write 1 or more")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and end the part that runs
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in (ANSWERS, f"{STOCK}.json", "gpu_check.json"):
        (out / old).unlink(missing_ok=True)
    settings = CheckSettings(options.device, str(out), options.model, options.prompts, tuple(options.engine_arg),
                             options.at_once)
    report = GpuReport(settings, options.budget_s, out / "gpu_check.json")
    longer = max(1.0, options.budget_s / BUDGET_S)
    names = {ABOUT, *(options.part or [part.name for part in PARTS])}
    names |= {STOCK} if names & ON_STOCK else set()
    wanted = [part._replace(deadline_s=longer * part.deadline_s) for part in PARTS if part.name in names]
    with adopting_orphans():
        run_parts(wanted, settings, options.budget_s, report.keep)
    status = exit_status(report.results, ABOUT)
    if status == 2:
        print("nothing was checked: the reasons are above")
    print(f"written: {out / 'gpu_check.json'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
