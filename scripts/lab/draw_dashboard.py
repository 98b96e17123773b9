#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draw what the dashboard of deploy/grafana shows of a real fleet, by its own expressions.

    VLLM_PD_ENGINE=v1; export VLLM_PD_ENGINE; . scripts/env.sh
    python scripts/lab/draw_dashboard.py --out build/dashboard     # about six minutes; wants Prometheus' own program

A router, a decode and a prefill engine with the tiny model get short and long prompts. The prefill engine gets SIGKILL
and is started again, then the broker. A Prometheus reads them with deploy/prometheus's files and evaluates each panel's
expressions afterwards. Grafana is not there: the drawing is ours.

Exit status 1 where a request failed or nothing was handed over; 2 where the run could not be made. Lines of panels
without a sample are named.
"""
import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _connectors.program import begin
from _dashboard.picture import draw
from _dashboard.prometheus import RATE_INTERVAL, SCRAPE_S, find_prometheus
from _dashboard.session import DashboardRecord, DashboardSettings, run

from vllm_pd.errors import PDError

DIGITS = 4


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_TINY_MODEL"),
                        help="folder; default: $VLLM_PD_TINY_MODEL")
    parser.add_argument("--prometheus", metavar="FILE", help="the program; default: the one on the PATH")
    parser.add_argument("--phase-s", type=float, default=45.0, help="of load after each change, in seconds")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for dashboard.json and dashboard.png")
    parser.add_argument("--log", type=Path, default=Path("build/dashboard.log"), help="the servers' lines")
    return parser


def phases_of(record: DashboardRecord) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of each."""
    ends = [*(at_s for _, at_s in record.phases[1:]), record.ended_s]
    for (name, begun_s), ended_s in zip(record.phases, ends, strict=True):
        yield name, begun_s, ended_s


def figures(record: DashboardRecord) -> dict[str, Any]:
    """The record for a file: of each time series its mean in each phase, None where it had no sample."""
    phases = list(phases_of(record))

    def means(series: Any) -> list[float | None]:
        found = [series.mean(begun_s, ended_s) for _, begun_s, ended_s in phases]
        return [None if value is None else float(f"{value:.{DIGITS}g}") for value in found]

    shown: dict[str, Any] = {}
    for reading in record.readings:
        lines = shown.setdefault(f"{reading.panel.row}: {reading.panel.title}", {})
        lines[reading.line.expression] = {reading.line.name(one.labels): means(one) for one in reading.series}
    return {
        "prometheus": record.version, "scrape_s": SCRAPE_S, "rate_interval": RATE_INTERVAL,
        "phases": {name: round(ended_s - begun_s, 1) for name, begun_s, ended_s in phases},
        "answers": record.answers, "errors": record.errors,
        "alerts": sorted({" ".join([one.labels["alertname"], one.labels["alertstate"], one.labels.get("reason", "")])
                          .strip() for one in record.alerts}),
        "lines_without_samples": [f"{one.panel.title}: {one.line.legend}" for one in record.readings if not one.series],
        "panels": shown,
    }


def handed_over(record: DashboardRecord) -> bool:
    """Whether a prefill engine has computed a prompt."""
    return any(value > 0 for one in record.readings if "vllm:pd_jobs_total" in one.line.expression
               for series in one.series for value in series.values)


def main() -> int:
    """The program."""
    parser = arguments()
    args = parser.parse_args()
    begin(parser, args.model)
    try:
        record = run(DashboardSettings(args.model, args.log, find_prometheus(args.prometheus), phase_s=args.phase_s),
                     lambda text: print(time.strftime("%H:%M:%S "), text, flush=True))
    except (PDError, OSError) as error:
        print(f"draw_dashboard: {error}\ndraw_dashboard: the servers' lines are in {args.log}", file=sys.stderr)
        return 2
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    found = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "model": Path(args.model).name, **figures(record)}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "dashboard.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(record, args.out / "dashboard.png", f"{found['model']}, {record.answers} answers, {machine}")
    print(json.dumps({name: value for name, value in found.items() if name != "panels"}, indent=1))
    faults = [*record.errors, *([] if handed_over(record) else ["no prompt was handed over"])]
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
