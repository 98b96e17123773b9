#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Step time with PD off: the patched tree against the unpatched one, in pairs (B50; the goal is within 1 %).

    . scripts/env.sh
    python scripts/lab/bench_step.py --json step.json
    python scripts/lab/bench_step.py --null                 unpatched against itself: the noise of the machine

Two processes, one for each tree, share a core and take turns: a short round of decode steps on one tree, then on the
other, in alternating order. After some rounds both are replaced by new ones. There are two kinds of steps: `engine`,
LLMEngine.step with the tiny model; `scheduler`, schedule() alone, where the model can't hide a difference. Each round's
tokens (engine) or decisions and block tables (scheduler) must be the same on both trees. Exit status 1 if they are not,
or if the patched tree is slower than the goal with 95 % confidence.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # _series, _upstream_tests, _wheel

from _bench_step.pairs import StepPair, StepVerdict, judge
from _bench_step.turns import StepWorker
from _bench_step.worker import StepLoad
from _series.errors import Refusal
from _upstream_tests import trees
from _wheel import cache, process

from vllm_pd.bench.outputs import argument_file

WORKER = Path(__file__).resolve().parent / "_bench_step" / "worker.py"
STEPS = {"engine": 8, "scheduler": 400}  # of a round: short, so that other work on the machine hits both of a pair


def start_worker(tree: Path, load: StepLoad, core: int, log: Path) -> StepWorker:
    """A process that times steps on one tree."""
    settings = {"VLLM_USE_V1": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    worker = StepWorker([sys.executable, str(WORKER), json.dumps(asdict(load))], trees.environment([tree], settings),
                        core, log)
    try:
        if Path(worker.ready().about["vllm"]) != tree / "vllm":
            raise Refusal(f"expected vLLM from {tree}, found {worker.about['vllm']}")
    except BaseException:
        worker.close()
        raise
    return worker


def measure(kind: str, a: Path, b: Path, args: argparse.Namespace) -> StepVerdict:
    """The verdict on one kind of steps on the trees `a` (unpatched) and `b`."""
    load = StepLoad(kind, str(args.model), args.batch, args.prompt_tokens, args.context_tokens, 16, args.prefix_caching)
    pairs: list[StepPair] = []
    for number in range(args.processes):
        workers: dict[str, StepWorker] = {}
        try:
            for side in "ab" if number % 2 == 0 else "ba":
                workers[side] = start_worker(a if side == "a" else b, load, args.core, args.out / "workers.log")
            for turn in range(args.rounds):
                timed = {side: workers[side].steps(STEPS[kind]) for side in ("ab" if turn % 2 == 0 else "ba")}
                pairs.append(StepPair.of(number, timed["a"], timed["b"]))
        finally:
            for worker in workers.values():
                worker.close()
        last = judge(kind, [pair for pair in pairs if pair.process == number])
        cache.say(f"{kind}: processes {number + 1} of {args.processes}: {last.step_a_s * 1e6:.1f} us unpatched, "
                  f"{last.step_b_s * 1e6:.1f} us patched, ratio {last.cpu_ratio:.4f}")
    return judge(kind, pairs)


def show(verdict: StepVerdict, goal: float, null: bool) -> None:
    """Prints a verdict."""
    print(f"{verdict.kind:10} {verdict.step_a_s * 1e6:9.1f} us unpatched {verdict.step_b_s * 1e6:9.1f} us "
          f"{'unpatched again' if null else 'patched'}   ratio {verdict.cpu_ratio:.4f} "
          f"[{verdict.low:.4f}, {verdict.high:.4f}], wall {verdict.wall_ratio:.4f}, {verdict.pairs} pairs")
    slower = verdict.slower_than(1 + goal)
    print(f"{'':10} by process {', '.join(f'{ratio:.4f}' for ratio in verdict.by_process)}; "
          f"{'same' if verdict.same_decisions else 'DIFFERENT'} tokens and decisions; "
          f"{'SLOWER than the goal' if slower else f'not shown to be more than {goal:.0%} slower'}")


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[*STEPS, "both"], default="both")
    trees.add_options(parser)
    parser.add_argument("--null", action="store_true", help="the unpatched tree on both sides")
    for name, default, what in (("processes", 3, "new processes on each side"), ("batch", 8, "requests in the batch"),
                                ("rounds", 50, "pairs of rounds with each pair of processes"),
                                ("prompt-tokens", 32, "length of a prompt"),
                                ("context-tokens", 1024, "sequences start again at this length"),
                                ("core", max(os.sched_getaffinity(0)), "where both processes run")):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--goal", type=float, default=0.01, metavar="SHARE",
                        help="how much slower the patched tree may be (default 0.01)")
    parser.add_argument("--json", type=argument_file, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--out", type=Path, metavar="DIR", default=cache.root() / "bench_step",
                        help="folder for trees and logs (default: in the cache folder)")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    if args.model is None or not (args.model / "config.json").is_file():
        parser.error("no tiny model: source scripts/env.sh, or --model DIR")
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with cache.lock():
            a = trees.stage(trees.plain(args.tree_a), args.out / "a", ours=False)
            b = a if args.null else trees.stage(trees.patched(args.tree_b), args.out / "b", ours=True)
        kinds = list(STEPS) if args.kind == "both" else [args.kind]
        verdicts = [measure(kind, a, b, args) for kind in kinds]
    except (Refusal, process.BuildError, OSError) as error:
        print(f"bench_step: {error}", file=sys.stderr)
        return 2
    for verdict in verdicts:
        show(verdict, args.goal, args.null)
    if args.json:
        args.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=2) + "\n")
    return 0 if all(v.same_decisions and not v.slower_than(1 + args.goal) for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
