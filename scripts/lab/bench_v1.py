#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The figures of engine V1 in one run: step times, an engine that waits, and the hand-over's overhead.

    VLLM_PD_ENGINE=v1 . scripts/env.sh
    python scripts/lab/bench_v1.py --json figures.json
    python scripts/lab/bench_v1.py --part scheduler         schedule() and update_from_output() alone: no engine, a
    minute

All with the tiny model. Everything is compared within the run: the step times in pairs of rounds on processes that take
turns on one core (as bench_step.py does for V0), the waiting engine with a stock one whose requests wait as well.

    scheduler, engine   one step of: stock vLLM, again (the noise), with vllm-pd installed and off (goal 1.00), and on
                        without a job (goal 1.02); CPU time of the process, its threads included. Processes of one kind
                        differ by more than that goal, so `engine` also compares rounds of one process, in which the
                        plugin is taken out of the steps and put back; its threads then run in both
    waiting             the CPU of each process of an engine, idle and with parked requests only, TP 1 and TP 2 (goal
                        0.05 of a core), and of the prefill engine whose writes do not end; stock vLLM with a connector
                        that never delivers
    handover            parked - prefill - transfer of single remote prompts (goals 5 ms p50, 15 ms p99), by stage, and
                        from the engine's wake-up to its step (goal 5 ms)
    push                what `push_chunks` brings and costs: TTFT without the prefill at P of long remote prompts (goal
                        10 ms and the transfer of one step's tokens), and the inter-token latency of running chats
                        while a prompt arrives; not among the parts that are measured without --part

Speeds decide nothing here: the exit status is 1 only where tokens or decisions differ, or the plugin that is off has
changed the process (B91).
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # _series, _upstream_tests, _wheel

from _bench_v1 import pushing, waiting
from _bench_v1.installations import find_installations
from _bench_v1.servers import BenchServer, install_probe, start_broker
from _bench_v1.steps import STEPS, StepComparison, goals_of, untouched
from _series.errors import Refusal
from _wheel import cache
from _wheel.process import BuildError

from vllm_pd.bench.handover import HandoverBench, measure
from vllm_pd.bench.outputs import argument_file
from vllm_pd.bench.report import LEAST_P99, summary
from vllm_pd.bench.servers import exit_on_signals
from vllm_pd.errors import PDError
from vllm_pd.ops.scrape import scrape

WAITING_GOAL, WAKE_GOAL_MS = 0.05, 5.0
CONTROL_GOALS_MS = {"p50": 5.0, "p99": 15.0}
LEASE_S = 120.0  # a stopped prefill engine stays a peer for so long
PARTS = (*STEPS, "waiting", "handover")
PUSH = "push"


class V1Bench:
    """The run. Servers that it starts end with `stack`."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.args, self.out, self._stack = args, args.out, stack
        self.stock, self.plugin = find_installations(self.out)
        broker, self.broker = start_broker(self.plugin, self.out / "broker.log")
        stack.callback(broker.close)

    def steps(self, kind: str) -> dict[str, Any]:
        """Part `scheduler` or `engine`."""
        comparison = StepComparison(self.stock, self.plugin, self.broker, self.args.model, self.args.core,
                                    self.args.processes, self.args.rounds, self.out / "steps.log")
        return comparison.measure(kind, cache.say).as_dict()

    def measure(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each part that was asked for, as soon as it is there."""
        for kind in STEPS:
            if kind in self.args.part:
                yield kind, self.steps(kind)
        if {"waiting", "handover"} & set(self.args.part):
            yield from self.fleet()
        if PUSH in self.args.part:
            yield self._push_name(), self.push()

    def push(self) -> dict[str, Any]:
        """Part `push`: two fleets, with a broker each."""
        args, fleets = self.args, {}
        for arm in pushing.ARMS:
            broker, address = start_broker(self.plugin, self.out / f"broker_{arm}.log")
            self._stack.callback(broker.close)
            size = ("--max-model-len", str(args.push_tokens + 2048))
            fleets[arm] = (self._server(f"d_{arm}", "kv_consumer", 1, broker=address, options=size),
                           self._server(f"p_{arm}", "kv_producer", 1, broker=address, push_chunks=arm == "chunks",
                                        options=(*size, "--max-num-batched-tokens", str(args.chunk_tokens))))
        for server in (one for fleet in fleets.values() for one in fleet):
            server.wait_ready()
        for decode, _ in fleets.values():
            self._await_peer(decode)
        return {"wire_gb_per_s": args.wire_gb_per_s, "model": Path(args.model).name, "worker_spin_s": args.worker_spin,
                **pushing.PushComparison(fleets, args.push_tokens, args.chunk_tokens, args.push_rounds).measure()}

    def _push_name(self) -> str:
        wire = self.args.wire_gb_per_s
        return f"{PUSH}, {Path(self.args.model).name}" + (f", a wire of {wire:g} GB/s" if wire else "")

    def fleet(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Parts `waiting` and `handover`, which share their engines."""
        ours = {1: self._server("d1", "kv_consumer", 1)}
        prefill = self._server("p", "kv_producer", 1)
        if "waiting" in self.args.part:
            ours[2] = self._server("d2", "kv_consumer", 2)
        for server in (prefill, *ours.values()):
            server.wait_ready()
        for server in ours.values():
            self._await_peer(server)
        if "handover" in self.args.part:
            name = "handover" if self.args.worker_spin is None else "handover, workers that spin less"
            yield name, self._handover(ours[1], prefill)
        if "waiting" in self.args.part:
            stock = {tp: self._stock_server(tp) for tp in (1, 2)}  # CPU time is the same beside their start
            shares = {f"ours, TP {tp}": {"idle": waiting.cpu_shares(one, self.args.window)} for tp, one in ours.items()}
            prefill.close()
            slow = self._server("p_slow", "kv_producer", 1, bytes_per_s=1.0).wait_ready()  # no transfer ends
            for tp, server in ours.items():
                shares[f"ours, TP {tp}"]["parked"] = self._parked(server, waiting.granted)
            shares["ours, the prefill engine"] = {"sending": waiting.cpu_shares(slow, self.args.window)}
            slow.kill()
            for server in ours.values():
                server.close()
            for tp, server in stock.items():
                server.wait_ready().complete([100] * 8, 4, 300.0)
                shares[f"stock, TP {tp}"] = {"parked": self._parked(server, waiting.waiting_requests)}
            yield "waiting", {"shares": shares, "window_s": self.args.window}

    def _server(self, name: str, role: str, tp: int, options: tuple[str, ...] = (),
                bytes_per_s: float | None = None, **more: Any) -> BenchServer:
        settings = {"broker": self.broker, "max_local_prefill_tokens": 40, "lease_s": LEASE_S,
                    "attempt_deadline_s": 600.0, **more}
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": settings}
        probe = install_probe(self.out / "probe")
        server = BenchServer(self.plugin, self.args.model, transfer, tp, self.out / f"{name}.log", probe, options,
                             WAKE_PROBE=str(self._wakes(name)), **self._probe_settings(bytes_per_s))
        self._stack.callback(server.close)
        return server

    def _probe_settings(self, bytes_per_s: float | None) -> dict[str, str]:
        spin = {} if self.args.worker_spin is None else {"WORKER_SPIN_S": str(self.args.worker_spin)}
        if bytes_per_s is None and self.args.wire_gb_per_s:
            bytes_per_s = 1e9 * self.args.wire_gb_per_s
        return spin | ({"WIRE_BYTES_PER_S": str(bytes_per_s)} if bytes_per_s else {})

    def _stock_server(self, tp: int) -> BenchServer:
        server = BenchServer(self.stock, self.args.model, waiting.PARKING, tp, self.out / f"stock{tp}.log",
                             (Path(waiting.__file__).parent, ))
        self._stack.callback(server.close)
        return server

    def _wakes(self, name: str) -> Path:
        return self.out / f"wakes_{name}"

    def _await_peer(self, server: BenchServer) -> None:

        deadline = time.monotonic() + 300.0
        while not scrape(server.url).value("vllm:pd_attempts_total", outcome="done"):
            if time.monotonic() > deadline:
                raise BuildError(f"{server.log}: no prompt is prefilled remotely")
            server.complete([int(time.monotonic() * 1000) % 800 + 100] * 100, 4, 300.0)
            time.sleep(0.2)

    def _parked(self, server: BenchServer, count: Callable[[BenchServer], int]) -> dict[str, float]:
        return waiting.parked_shares(server, lambda: count(server), self.args.window)

    def _handover(self, decode: BenchServer, prefill: BenchServer) -> dict[str, Any]:

        self._wakes("d1").write_text("")
        hops = waiting.hop_times_ms()
        report = measure(HandoverBench(decode.url, (prefill.url, ), self.args.requests, self.args.prompt_tokens, 8))
        if report["failed"]:
            raise BuildError(f"the hand-over: {report['failed']}; see {decode.log}")
        samples = report.pop("samples_ms")
        wakes = [1000 * float(line) for line in self._wakes("d1").read_text().split()]
        rest = [one["control_plane"] - one["queue"] - one["claim"] for one in samples]
        figures = "p50 p99 mean min max"
        return report | {"worker_spin_s": self.args.worker_spin, "rest_ms": summary(rest, figures),
                         "wake_to_step_ms": summary(wakes, figures),
                         "hop_ms": summary(hops + waiting.hop_times_ms(), figures)}


def machine() -> dict[str, Any]:
    """When, and how busy the machine is with other work as well."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1), "nice": os.nice(0)}


def show(found: dict[str, Any]) -> None:
    """Prints the summary."""
    for kind in STEPS:
        for name, one in found.get(kind, {}).get("verdicts", {}).items():
            goal = "" if goals_of(kind)[name] is None else f", goal {goals_of(kind)[name]:.2f}"
            print(f"{kind:10} {name:18} {one['step_a_s'] * 1e6:8.1f} us stock {one['step_b_s'] * 1e6:8.1f} us  ratio "
                  f"{one['cpu_ratio']:.4f} [{one['low']:.4f}, {one['high']:.4f}], wall {one['wall_ratio']:.4f}{goal}; "
                  f"{'same' if one['same_decisions'] else 'DIFFERENT'} decisions")
    for name, shares in found.get("waiting", {}).get("shares", {}).items():
        for state, processes in shares.items():
            print(f"waiting    {name}, {state}: " + ", ".join(f"{one} {share:.3f}" for one, share in processes.items())
                  + (f" (goal {WAITING_GOAL})" if name.startswith("ours, TP") else ""))
    for part, handover in found.items():
        if part.startswith("handover"):
            show_handover(handover)
        elif part.startswith(PUSH):
            show_push(handover)
    for part, one in found.items():
        print(f"{part:10} load average {one['machine'][0]['load']} before, {one['machine'][1]['load']} after, on "
              f"{one['machine'][0]['cores']} cores")


def show_handover(handover: dict[str, Any]) -> None:
    """Prints the stages of one measurement of the hand-over."""
    def line(name: str, spread: dict[str, float], goal: str = "") -> None:
        p99 = f"p99 {spread['p99']:8.2f}  " if handover["measured"] >= LEAST_P99 else ""
        print(f"handover   {name:22} p50 {spread['p50']:8.2f}  {p99}max {spread['max']:8.2f} ms{goal}")

    print(f"handover   {handover['measured']} remote prompts")
    line("control plane", handover["control_plane_ms"], " (goals {p50:g}, p99 {p99:g})".format(**CONTROL_GOALS_MS))
    for stage in ("queue", "claim"):
        line(f"  {stage}", handover["stages_ms"][stage])
    line("  end, notice, resume", handover["rest_ms"])
    line("    wake-up to step", handover["wake_to_step_ms"], f" (goal {WAKE_GOAL_MS:g})")
    for stage in ("prefill", "transfer", "first_step"):
        line(stage, handover["stages_ms"][stage])
    line("this machine: one hop", handover["hop_ms"])


def show_push(push: dict[str, Any]) -> None:
    """Prints the comparison of prompts that leave whole and in chunks."""
    print(f"push       {push['tokens']} tokens, {push['chunk_tokens']} at a step, {push['rounds']} rounds; goal "
          f"{push['goal_ms']:.1f} ms for TTFT - prefill")
    for name in ("ttft_minus_prefill_ms", "transfer_ms", "prefill_ms", "itl_ms"):
        for arm, spread in push[name].items():
            print(f"push       {name.removesuffix('_ms').replace('_', ' '):20} {arm:20} "
                  + "  ".join(f"{figure} {value:8.2f}" for figure, value in spread.items()
                              if figure != "p99" or name == "itl_ms" or push["rounds"] >= LEAST_P99) + " ms")


def right(found: dict[str, Any]) -> bool:
    """Whether all processes decided the same, and those with the plugin off were left alone."""
    kinds = [found[kind] for kind in STEPS if kind in found]
    return all(one["same_decisions"] for kind in kinds for one in kind["verdicts"].values()) and all(
        untouched(kind["about"]["off"], kind["about"]["stock"]) for kind in kinds)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=(*PARTS, PUSH), action="append", help="only this; may be repeated")
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_TINY_MODEL"), metavar="DIR",
                        help="the tiny model (default: $VLLM_PD_TINY_MODEL)")
    for name, default, what in (("processes", 2, "sets of processes that time steps"), ("rounds", 60, "rounds of each"),
                                ("core", max(os.sched_getaffinity(0)), "where they run"),
                                ("requests", 150, "remote prompts that are measured"),
                                ("prompt-tokens", 256, "their length"),
                                ("push-tokens", 4000, "tokens of a prompt of part push"),
                                ("chunk-tokens", 512, "how many of them are computed at a step"),
                                ("push-rounds", 12, "rounds of part push")):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--worker-spin", type=float, metavar="SECONDS", help="how long a worker spins after each step, "
                        "for part handover where there are fewer cores than processes (default: vLLM's 1 s)")
    parser.add_argument("--wire-gb-per-s", type=float, metavar="GB", help="transfers go over an emulated wire of that "
                        "speed (default: none)")
    parser.add_argument("--window", type=float, default=30.0, metavar="SECONDS", help="how long CPU use is measured")
    parser.add_argument("--json", type=argument_file, metavar="FILE",
                        help="write the figures there; parts that were not measured now stay as they are")
    parser.add_argument("--out", type=Path, metavar="DIR", default=cache.root() / "bench_v1",
                        help="each run makes a folder for its logs there (default: in the cache folder)")
    return parser


def fresh_folder(parent: Path) -> Path:
    """A new folder in `parent` for the files of this run. Nothing that is there is touched."""
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{datetime.now(UTC):%Y-%m-%d-%H%M%S}-", dir=parent))


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.model is None or not (Path(args.model) / "config.json").is_file():
        parser.error("no tiny model: source scripts/env.sh, or --model DIR")
    args.part = args.part or list(PARTS)
    found: dict[str, Any] = {}
    exit_on_signals()
    try:
        args.out = fresh_folder(args.out.absolute())
        cache.say(f"logs are in {args.out}")
        with contextlib.ExitStack() as stack:
            began = machine()
            for part, one in V1Bench(args, stack).measure():
                found[part] = one | {"machine": [began, machine()]}
                began = found[part]["machine"][1]
                if args.json:
                    others = json.loads(args.json.read_text()) if args.json.exists() else {}
                    args.json.write_text(json.dumps(others | found, indent=1) + "\n")
    except (Refusal, BuildError, PDError, OSError) as error:
        print(f"bench_v1: {error}", file=sys.stderr)
        return 2
    show(found)
    return 0 if right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
