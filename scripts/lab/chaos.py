#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill and stop real engines under load, disturb their messages, and compare every answer with that of one engine alone
(B20 to B34).

    . scripts/env.sh
    python scripts/lab/chaos.py --requests 2000 --episodes 120 --calm-episodes 30 --out chaos

With `--engine v1`, in the environment of VLLM_PD_ENGINE=v1, the engines are those of a stock vLLM with the plugin.

Each episode is a burst of requests and one blow: SIGKILL or SIGSTOP of a prefill engine, a decode engine or the broker.
Meanwhile a proxy loses, doubles and delays control messages, and some clients go away. A request whose decode engine is
killed is sent to another one, as a client would do, and counted as such. Before that come the same bursts without any
blow or fault: the calm run. All that is drawn depends on the seed alone; how the machine schedules the processes does
not.

Exit status 1, with the seed, if an answer was wrong, a request did not end, something is left open in an engine, or no
prompt was handed over: during the blows, or in the warm-up after them. Also if a process ends by itself.
"""
import argparse
import dataclasses
import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path

from _chaos.fleet import ProcessLost
from _chaos.page import page
from _chaos.session import ChaosSettings, chaos

from vllm_pd.errors import ConfigError

OPTIONS = [field for field in dataclasses.fields(ChaosSettings) if field.metadata]
LONG = ("counters", "settings", "at_rest", "at_rest_after_calm")  # in the JSON only


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_TINY_MODEL"), help="folder; the tiny random model")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="default: from the clock")
    for field in OPTIONS:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default,
                            choices=list(field.type) if issubclass(field.type, StrEnum) else None, **field.metadata)
    parser.add_argument("--no-proxy", action="store_true", help="engines connect to each other directly")
    parser.add_argument("--keys", action="store_true", help="sockets that need the cluster's key; with --no-proxy")
    parser.add_argument("--async-output", action="store_true", help="asynchronous output processing where an engine "
                        "does not switch it off, as on CUDA")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for chaos.json, chaos.png and README.md")
    arguments = vars(parser.parse_args())
    folder: Path | None = arguments.pop("out")
    if not arguments["model"]:
        parser.error("--model is missing, and VLLM_PD_TINY_MODEL is not set: source scripts/env.sh first")
    try:
        settings = ChaosSettings(proxy=not arguments.pop("no_proxy"), **arguments)
    except ConfigError as error:
        parser.error(str(error))
    try:
        result = chaos(settings, print_line)
    except (ProcessLost, TimeoutError) as error:
        print(f"FAILED with seed {settings.seed}: {error}", file=sys.stderr)
        return 1
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chaos.json").write_text(json.dumps(result.figures, indent=1) + "\n")
        result.draw(folder / "chaos.png")
        (folder / "README.md").write_text(page(result.figures, repeating_command(settings), "chaos.png"))
    for name, value in result.figures.items():
        if name not in LONG:
            print(f"{name:45}", json.dumps(value))
    for fault in result.faults:
        print(f"FAILED with seed {settings.seed}: {fault}", file=sys.stderr)
    return 1 if result.faults else 0


def repeating_command(settings: ChaosSettings) -> str:
    """The command that repeats this run, without the model and the folder."""
    words = [f"--seed {settings.seed}"]
    words += [f"--{field.name.replace('_', '-')} {value}" for field in OPTIONS
              if (value := getattr(settings, field.name)) != field.default]
    words += ["--no-proxy"] * (not settings.proxy) + ["--keys"] * settings.keys
    words += ["--async-output"] * settings.async_output
    return " ".join(["python scripts/lab/chaos.py", *words])


def print_line(text: str) -> None:
    print(time.strftime("%H:%M:%S "), text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
