#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our connector and upstream's own, side by side on stock vLLM: the same prompts, the same faults.

    export VLLM_PD_ENGINE=v1; . scripts/env.sh
    python scripts/lab/compare_connectors.py --out results                         all connectors, all faults, D's leg
    python scripts/lab/compare_connectors.py --connector NixlConnector --fault d-stopped --out results
    python scripts/lab/compare_connectors.py --legs --out results                  D's leg only

Every answer is compared with that of one stock engine without a connector. Leases are shortened by each connector's own
settings, so that a run is short. What is in the folder already and was not run now stays in the JSON, so a comparison
can be made in parts; each result has its settings. Exit status 1 where an answer of ours was wrong, something of ours
hung, died, leaked or was given up, D got no KV from P in a fault, or a request failed decode first although D was not
killed.
"""
import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _connectors import report
from _connectors.faults import FAULTS, AnswerEnd, FaultTally, strike
from _connectors.legs import measure_legs
from _connectors.pair import ENVIRONMENT, LEASE_S, OURS, UPSTREAM, ConnectorName, EnginePair, EngineShape
from _connectors.questions import SPARE, Question, answer_all, draw_prompts_between
from _connectors.serve import ServerFactory
from rich.console import Console

from vllm_pd.bench.checks import argument_count
from vllm_pd.bench.connection import LoadError
from vllm_pd.bench.servers import HOST, exit_on_signals
from vllm_pd.errors import PDError
from vllm_pd.rpc.ports import take_free

SHAPE = {"pool_blocks": 96, "context": 1024}
LEG_SHAPE = {"pool_blocks": 192, "context": 2560}
LEG_TOKENS = (500, 2000)
ALL = [one.value for one in ConnectorName]
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


def ask_one_engine(servers: ServerFactory, shape: EngineShape, faults: Sequence[str],
                   rounds: int, seed: int) -> dict[str, list[Question]]:
    """The questions of each fault, with the answers of one stock engine without a connector."""
    mono = servers.start("one engine", take_free(HOST), shape.arguments(), {})
    mono.await_ready()
    found = {}
    for name in faults:
        prompts = FAULTS[name].prompts(seed, rounds, SPARE)
        found[name] = FAULTS[name].kept(asyncio.run(answer_all(mono.url, shape.model, prompts)))
        say(f"{name}: {len(found[name])} of {len(prompts)} prompts are left, whose answers no rounding changes")
    mono.kill()
    return found


def right_answers(servers: ServerFactory, shape: EngineShape, faults: Sequence[str], rounds: int, seed: int,
                  kept: Path | None) -> dict[str, list[Question]]:
    """The questions of each fault, from the file `kept` where that has all of them, else from one engine."""
    known = json.loads(kept.read_text()) if kept is not None and kept.is_file() else {}
    keys = {name: f"{Path(shape.model).name} {rounds} {seed} {name}" + " in pairs" * FAULTS[name].shares_prefixes
            for name in faults}
    missing = [name for name in faults if keys[name] not in known]
    for name, asked in (ask_one_engine(servers, shape, missing, rounds, seed) if missing else {}).items():
        known[keys[name]] = [(one.prompt, one.expected) for one in asked]
    if kept is not None:
        kept.write_text(json.dumps(known))
    return {name: [Question(prompt, tuple(expected)) for prompt, expected in known[keys[name]]] for name in faults}


def compare_faults(servers: ServerFactory, connector: ConnectorName, shape: EngineShape, policy: str,
                   questions: dict[str, list[Question]], rounds: int, seed: int, results: "Results") -> None:
    """Carries out the faults with one connector."""
    pair = EnginePair(servers, connector, shape, policy)
    fresh, name = False, ""
    try:
        for name, asked in questions.items():
            if not fresh:
                pair.start()
                asyncio.run(pair.warm_up(draw_prompts_between(f"warm-up {seed} {name}", 5, 150, 450)))
                say(f"{connector.value}: P and D are up; a request needs {1000 * pair.decode_leg_s:.0f} ms at D")
            tally = asyncio.run(strike(FAULTS[name], pair, asked, rounds, seed))
            fresh = not tally.dead and not tally.left
            results.add_fault(connector, name, tally)
            say(f"{connector.value}, {FAULTS[name].name}: {json.dumps(tally.as_dict())}")
    except (LoadError, PDError, OSError) as error:
        say(f"{connector.value}: given up: {error}")
        results.give_up(connector, name, str(error))
    finally:
        pair.stop()


def compare_legs(servers: ServerFactory, connectors: Sequence[ConnectorName], shape: EngineShape, policy: str,
                 count: int, seed: int, results: "Results") -> None:
    """Measures D's leg of all connectors in turn."""
    pairs = [EnginePair(servers, connector, shape, policy) for connector in connectors]
    try:
        for pair in pairs:
            pair.start()
            say(f"{pair.connector.value}: P and D are up")
        for tokens in LEG_TOKENS:
            results.add_legs(asyncio.run(measure_legs(pairs, tokens, count, seed, say)) | {"model": shape.model})
    finally:
        for pair in pairs:
            pair.stop()


class Results:
    """The JSON of a comparison. It is written after each part. `settings`: of this run; each result of it has them."""

    def __init__(self, folder: Path | None, settings: dict[str, Any]) -> None:
        self.values: dict[str, Any] = {"faults": {}, "legs": {}, "given_up": {}}
        self._folder, self._settings = folder, settings
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "connectors_v1.json").is_file():
                self.values |= json.loads((folder / "connectors_v1.json").read_text())

    def add_fault(self, connector: ConnectorName, name: str, tally: FaultTally) -> None:
        """What a fault did; it was not given up this time."""
        given_up = self.values["given_up"].get(connector.value, {})
        given_up.pop(name, None)
        if not given_up:
            self.values["given_up"].pop(connector.value, None)
        fault = FAULTS[name]
        self.values["faults"].setdefault(connector.value, {})[name] = {
            **tally.as_dict(), "prompt_tokens": [fault.shortest, fault.longest], **self._settings, **SHAPE}
        self.write()

    def give_up(self, connector: ConnectorName, name: str, error: str) -> None:
        """Keeps why a fault was given up, until it is carried out."""
        self.values["given_up"].setdefault(connector.value, {})[name] = error[-2000:]
        self.write()

    def add_legs(self, legs: dict[str, Any]) -> None:
        model = Path(legs["model"]).name
        self.values["legs"][f"{model}, {legs['tokens']} tokens"] = {**legs, **self._settings, **LEG_SHAPE,
                                                                   "model": model}
        self.write()

    def write(self) -> None:
        if self._folder is not None:
            (self._folder / "connectors_v1.json").write_text(json.dumps(self.values, indent=1) + "\n")
            report.draw(self.values, self._folder / "connectors_v1.png")

    def is_as_promised(self) -> bool:
        """Whether none of our answers was wrong, nothing of ours hung, died, leaked or was given up, D got KV from P
        in each fault, and decode first no request ended with an error but those of a killed D."""
        ours = [one.value for one in ConnectorName if one.is_ours]
        return not any(_is_broken(connector, name, tally) for connector in ours
                       for name, tally in self.values["faults"].get(connector, {}).items()) and not any(
            connector in self.values["given_up"] for connector in ours)


def _is_broken(connector: str, name: str, tally: dict[str, Any]) -> bool:
    """Whether one fault did to one of our connectors what it may not, or has shown nothing."""
    may_fail = connector != ConnectorName.OURS.value or name == "d-restarted"
    return bool(tally[AnswerEnd.WRONG.value] or tally[AnswerEnd.HANG.value] or tally["dead"] or tally["left"]
                or not tally["loaded_tokens"] or tally[AnswerEnd.ERROR.value] and not may_fail)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", action="append", choices=ALL, help="default: all; may be repeated")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="default: all; may be repeated")
    parser.add_argument("--rounds", type=argument_count, default=2, help="of each fault (default 2)")
    parser.add_argument("--legs", action="store_true", help="measure D's leg, and carry out no fault")
    parser.add_argument("--pairs", type=argument_count, default=20, help="of measurements of D's leg (default 20)")
    parser.add_argument("--policy", choices=["fail", "recompute"], default="fail",
                        help="upstream's kv_load_failure_policy (default: fail, as upstream's)")
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_TINY_MODEL"), help="folder, for the faults")
    parser.add_argument("--legs-model", default=os.environ.get("VLLM_PD_MODEL"), help="folder, for D's leg")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for connectors_v1.json and connectors_v1.png")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep the right answers there, for the next run")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), metavar="FILE", help="of the engines' lines")
    return parser


def main() -> int:
    parser = arguments()
    chosen = parser.parse_args()
    if not chosen.model or not chosen.legs_model:
        parser.error("no model: source scripts/env.sh first, with VLLM_PD_ENGINE=v1, or give --model and --legs-model")
    connectors = [one for one in ConnectorName if one.value in (chosen.connector or ALL)]
    faults = [] if chosen.legs else [name for name in FAULTS if name in (chosen.fault or FAULTS)]
    settings = {"lease_s": LEASE_S, "ours": OURS, "upstream": UPSTREAM, "kv_load_failure_policy": chosen.policy,
                "seed": chosen.seed, "rounds": chosen.rounds, "model": Path(chosen.model).name}
    results = Results(chosen.out, settings)
    exit_on_signals()
    with ServerFactory(ENVIRONMENT, chosen.log) as servers:
        if faults:
            shape = EngineShape(chosen.model, **SHAPE)
            questions = right_answers(servers, shape, faults, chosen.rounds, chosen.seed, chosen.answers)
            for connector in connectors:
                compare_faults(servers, connector, shape, chosen.policy, questions, chosen.rounds, chosen.seed, results)
        if chosen.legs or not chosen.fault:
            compare_legs(servers, connectors, EngineShape(chosen.legs_model, **LEG_SHAPE), chosen.policy, chosen.pairs,
                         chosen.seed, results)
    console = Console(width=160)
    if results.values["faults"]:
        console.print(report.counts(results.values))
    if results.values["legs"]:
        console.print(report.legs(results.values))
    return 0 if results.is_as_promised() else 1


if __name__ == "__main__":
    sys.exit(main())
