#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo.sh`: a real model answers; one engine computes its prompts and another one continues them.

The same wheel with PD off, a decode engine and a prefill engine are started together. The questions go to the first,
which is then ended, and to the decode engine, one at a time, so that what its counters gain belongs to that question.
Then each set-up gets a chapter while an answer is running, for the last line: how long that answer pauses. Every answer
must equal the one with PD off token by token, every question must be prefilled where it should be, and nothing may be
left over in the end; anything else is a failure. How long a pause is decides nothing.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from _demo.pause import CHAPTER_TOKENS, PauseComparison, PauseTrial, try_pause
from _demo.questions import DemoCase, cases, pause_prompts
from _demo.report import DemoOutcome, DemoReport
from _demo.rest import left_over

from vllm_pd.bench.load import GenerationAnswer, ask
from vllm_pd.bench.servers import Server, Servers, log_to
from vllm_pd.errors import PDError
from vllm_pd.handover.metrics import STAGES
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.launch.plan import HOST, SERVE, UpOptions, plan_fleet
from vllm_pd.ops.launch.printer import Say
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape, scrape_after_request
from vllm_pd.rpc.ports import take_free, take_free_run

NAME = "demo"
MAX_LOCAL_PREFILL_TOKENS = 400
V1 = find_installation().world is World.PLUGIN
SERVE_ARGS = ("--served-model-name", NAME, "--dtype", "float32", "--max-model-len", "4608", "--enable-prefix-caching",
              *(("--block-size", "32", "--enforce-eager") if V1 else ("--block-size", "16", "--disable-log-requests")))
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
COUNTED_S = 5.0  # an engine counts an attempt shortly after the client has its answer


def lines_to(file: TextIO) -> Say:
    """What writes the servers' lines into a file, and those of `up` to the terminal as well."""
    write = log_to(file)

    def say(name: str, line: str) -> None:
        write(name, line)
        if name == "up":
            print(f"  {line}", flush=True)

    return say


def start_pd_off(servers: Servers, model: str, cores: list[int]) -> Server:
    """Starts the same vLLM without PD: one engine of the same kind, on all cores."""
    port = take_free(HOST)
    env = {**({} if V1 else {"VLLM_USE_V1": "0"}), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
           "OMP_NUM_THREADS": str(len(cores)),
           "OMP_WAIT_POLICY": "passive",  # threads that spin for each other are slow where cores are shared
           "VLLM_ENGINE_ITERATION_TIMEOUT_S": str(int(START_TIMEOUT_S))}
    # Not in the front end's process: there the threads of its steps would all be bound to the first core.
    return servers.start("PD off", port, [*SERVE, model, "--host", HOST, "--port", str(port), *SERVE_ARGS], env=env)


def main() -> int:
    """The program. Returns its exit status: 0 only where every answer is the same and nothing is left over."""
    parser = argparse.ArgumentParser(prog="demo.sh", description="Prefill on one engine, decode on another.")
    parser.add_argument("output", type=Path, nargs="?", default=Path("build/demo"), help="folder for the results")
    parser.add_argument("--model", default=os.environ.get("VLLM_PD_MODEL"), help="default: $VLLM_PD_MODEL")
    arguments = parser.parse_args()
    if not arguments.model:
        parser.error("there is no model: enter the environment (. scripts/env.sh) or write --model")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.output.mkdir(parents=True, exist_ok=True)
    log = arguments.output / "servers.log"
    try:
        with log.open("w", buffering=1) as file:
            report = run(arguments.model, lines_to(file))
    except KeyboardInterrupt:
        return 130
    except (PDError, OSError) as error:
        print(f"demo: {error}\ndemo: the servers' lines are in {log}", file=sys.stderr)
        return 1
    report.show()
    (arguments.output / "demo.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    report.plot(arguments.output / "demo.png")
    picture = arguments.output / "pause.png"
    report.pause.plot(picture)
    print(f"\nwritten: demo.json, demo.png and servers.log in {arguments.output}")
    print(f"{report.pause.line()} ({picture})")
    return 0 if report.good else 1


def run(model: str, say: Say) -> DemoReport:
    """The whole demonstration; every server has ended when it returns or raises."""
    begin = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    plan = plan_fleet(UpOptions(model=model, prefill=1, decode=1, port=take_free_run(HOST, 2),
                                pd={"max_local_prefill_tokens": MAX_LOCAL_PREFILL_TOKENS}, serve_args=SERVE_ARGS),
                      cores)
    decode, prefill = (engine.url for engine in plan.engines)
    print(f"starting the same vLLM with PD off on {len(cores)} cores, and", flush=True)
    fleet = Fleet(plan, timeout_s=START_TIMEOUT_S, stop_timeout_s=STOP_TIMEOUT_S, say=say)
    with Servers(say, STOP_TIMEOUT_S) as servers:
        off = start_pd_off(servers, model, cores)
        with fleet:
            servers.await_ready(off, timeout_s=START_TIMEOUT_S)
            started_s = time.monotonic() - begin
            questions = cases(off.url, NAME)
            print(f"all healthy after {started_s:.0f} s; asking PD off {len(questions)} questions ...", flush=True)
            references = [ask(off.url, NAME, case.request) for case in questions]
            prompts = pause_prompts(off.url, NAME, CHAPTER_TOKENS)
            pause_off = try_pause(off.url, NAME, prompts)  # on the cores that both engines have together
            off.child.stop()
            print(f"asking the decode engine the same; up to {MAX_LOCAL_PREFILL_TOKENS} new prompt tokens it prefills "
                  "itself\n", flush=True)
            outcomes = []
            for case, reference in zip(questions, references, strict=True):
                outcomes.append(hand_over(case, decode, reference))
                print(outcomes[-1].line(), flush=True)
            print("  and a chapter while an answer is running", flush=True)
            trial, remote = pause_with_pd(decode, prompts)
            pause = PauseComparison(trial, pause_off, remote)
            leaks = left_over({"decode": decode, "prefill": prefill}, NAME)
    return DemoReport(outcomes, leaks, started_s, time.monotonic() - begin, pause)


def pause_with_pd(url: str, prompts: Sequence[str]) -> tuple[PauseTrial, int]:
    """The trial at the decode engine, and how many prompts were prefilled remotely in it."""
    def remote() -> int:
        return int(scrape(url).value("vllm:pd_attempts_total", outcome="done"))

    before = remote()
    trial = try_pause(url, NAME, prompts)
    deadline = time.monotonic() + COUNTED_S
    while (count := remote() - before) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    return trial, count


def hand_over(case: DemoCase, url: str, reference: GenerationAnswer) -> DemoOutcome:
    """Asks the decode engine, and reads from its counters what it did."""
    before = scrape(url)
    answer = ask(url, NAME, case.request)
    added = scrape_after_request(url, before).since(before)
    made = [key for key, count in added.by("vllm:pd_decisions_total", "decision", "reason").items() if count]
    ended = [outcome for (outcome, ), count in added.by("vllm:pd_attempts_total", "outcome").items() if count]
    return DemoOutcome(case, answer, reference, decisions=made, ends=ended,
                       stages_s={stage: added.value("vllm:pd_handover_seconds_sum", stage=stage) for stage in STAGES},
                       transfer_bytes=int(added.value("vllm:pd_transfer_bytes_total")))


if __name__ == "__main__":
    sys.exit(main())
