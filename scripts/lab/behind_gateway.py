#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put two decode engines behind a gateway that knows nothing of prefill engines, and change all that is behind it under
a steady load (B117).

    VLLM_PD_ENGINE=v1; export VLLM_PD_ENGINE; . scripts/env.sh
    python scripts/lab/behind_gateway.py --out build/behind                          # Envoy; about ten minutes
    python scripts/lab/behind_gateway.py --gateway vllm-router --out build/behind_router

Phases: no prefill engine; two come; each engine is replaced; all of them by such that name another protocol of ours,
then another release of vLLM; the broker, a prefill engine, a decode engine get SIGKILL; the prefill engines leave. Only
one version is installed: the other ones differ in what they say that they are. All answers are compared with those of
one stock engine.

Exit status 1, and each fault on a line, where a request failed, an answer has changed, or no prompt was handed over. A
stream that ended because its decode engine was killed is `cut`, which no gateway can help; 2 where a phase could not be
gone through.
"""
import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path

from _behind.gateways import GatewayName
from _behind.picture import draw
from _behind.session import BehindSettings, PhaseName, behind
from _connectors.program import begin

from vllm_pd.errors import PDError


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_MODEL"), help="folder; default: $VLLM_PD_MODEL")
    parser.add_argument("--gateway", type=GatewayName, choices=list(GatewayName), default=GatewayName.ENVOY)
    parser.add_argument("--phase", action="append", type=PhaseName, choices=list(PhaseName), metavar="NAME",
                        help="only this one; may be repeated; in order: " + ", ".join(PhaseName))
    parser.add_argument("--calm-s", type=float, default=20.0, help="of load after each change, in seconds")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for behind_gateway.json and behind_gateway.png")
    parser.add_argument("--log", type=Path, default=Path("build/behind.log"), help="the servers' lines")
    return parser


def main() -> int:
    """The program."""
    parser = arguments()
    args = parser.parse_args()
    begin(parser, args.model)
    settings = BehindSettings(model=args.model, log=args.log, gateway=args.gateway, calm_s=args.calm_s, seed=args.seed,
                              phases=tuple(args.phase or PhaseName))
    try:
        record = behind(settings, print_line)
    except (PDError, OSError) as error:
        print(f"behind_gateway: {error}\nbehind_gateway: the servers' lines are in {args.log}", file=sys.stderr)
        return 2
    figures = {"date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
               "model": Path(args.model).name, "seed": args.seed, "load": dataclasses.asdict(settings.load),
               **record.figures()}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "behind_gateway.json").write_text(json.dumps(figures, indent=1) + "\n")
        draw(record, args.out / "behind_gateway.png",
             f"{figures['gateway']} before two decode engines, {figures['model']}: {figures['requests']} requests, "
             f"{figures['failed']} failed, {figures['changed']} changed answers, {figures['cut']} cut by a kill")
    for phase in figures["phases"]:
        print(json.dumps(phase))
    print(json.dumps({name: value for name, value in figures.items() if name != "phases"}, indent=1))
    faults = record.faults()
    for fault in faults:
        print(f"FAILED: {fault}", file=sys.stderr)
    return 1 if faults else 0


def print_line(text: str) -> None:
    print(time.strftime("%H:%M:%S "), text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
