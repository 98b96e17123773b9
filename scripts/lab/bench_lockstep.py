#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two fleets of the same model, whose data-parallel ranks run in lockstep: one by vLLM's waves, one with the step sync.

    python scripts/lab/bench_lockstep.py --model MODEL --json docs/results/lockstep_engines.json

Each fleet is a prefill engine and a decode engine of a stock vLLM, with --ranks data-parallel ranks each. The model is
a Llama (MODEL: its folder) whose forward passes compare their numbers over the group, so a pass that meets none hangs,
and one that meets another ends its engine. Both fleets get the same requests, in turns: short prompts that are
prefilled where they come, and long ones that go to the prefill engine, at drawn times. Counted are the forward passes
of all ranks and the dummies among them; the times between two tokens are measured at the client. On a CPU both fleets
share its cores, so compare ratios. V1's environment.
"""
from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from _lockstep.fleet import Counted, Ranks, plan_lockstep, rest

from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.ops.launch.plan import HOST
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.rpc.ports import take_free_run

SERVE_ARGS = ("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager",
              "--served-model-name", "lockstep", "--num-gpu-blocks-override", "512", "--max-num-seqs", "8",
              "--api-server-count", "1")
PD = {"max_local_prefill_tokens": 200, "attempt_deadline_s": 300.0, "ttl_s": 120}
START_S, ANSWER_S = 1800.0, 300.0


class Request(NamedTuple):
    """One request of a round. `after_s`: since its beginning."""
    after_s: float
    prompt: list[int]
    tokens: int


class Figures(NamedTuple):
    """One round of one fleet. Passes and dummies of all ranks, by engine; the times between tokens, in seconds."""
    passes: int
    dummies: int
    between_s: list[float]
    answers: list[list[int]]


def draw_round(draw: random.Random, count: int, gap_s: float) -> list[Request]:
    """A round: every third prompt is long."""
    after_s, found = 0.0, []
    for number in range(count):
        after_s += draw.expovariate(1 / gap_s)
        length = draw.randrange(400, 900) if number % 3 == 0 else draw.randrange(10, 150)
        found.append(Request(after_s, [draw.randrange(100, 20000) for _ in range(length)], draw.randrange(4, 24)))
    return found


def ask(url: str, request: Request) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and when each came."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    connection.request("POST", "/v1/completions", json.dumps({
        "model": "lockstep", "prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read()[:500]!r}")
    tokens, times = [], []
    for line in response:
        if line.startswith(b"data: {"):
            new = json.loads(line[6:])["choices"][0].get("token_ids") or []
            tokens += new
            times += [time.monotonic()] * len(new)
    connection.close()
    return tokens, times


class Side:
    """One of the two fleets, and its figures of each round."""

    def __init__(self, model: str, ranks: Ranks, step_sync: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-"))
        plan = plan_lockstep(self.folder, model, take_free_run(HOST, 2), ranks, {**PD, "step_sync": step_sync},
                             SERVE_ARGS)
        self.url = plan.engines[0].url
        self.fleet = Fleet(plan, timeout_s=START_S)
        self.rounds: list[Figures] = []

    def run(self, requests: list[Request]) -> None:
        """One round, from rest to rest."""
        before = rest(self.folder)
        found: list[Any] = [None] * len(requests)
        began = time.monotonic()

        def one(number: int) -> None:
            time.sleep(max(0.0, began + requests[number].after_s - time.monotonic()))
            found[number] = ask(self.url, requests[number])

        threads = [threading.Thread(target=one, args=(number, )) for number in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if None in found:
            raise RuntimeError("a request failed: see above")
        after = rest(self.folder)
        if not after.is_equal:
            raise RuntimeError(f"the ranks of a group have made different numbers of passes: {after}")
        self.rounds.append(Figures(
            _sum(after, 0) - _sum(before, 0), _sum(after, 1) - _sum(before, 1),
            [later - earlier for _, times in found for earlier, later in zip(times, times[1:], strict=False)],
            [tokens for tokens, _ in found]))

    def summary(self) -> dict[str, Any]:
        """Of all rounds."""
        between_ms = [1000 * one for figures in self.rounds for one in figures.between_s]
        cuts = statistics.quantiles(between_ms, n=100)
        return {"passes": [one.passes for one in self.rounds], "dummies": [one.dummies for one in self.rounds],
                "itl_ms": {"samples": len(between_ms), "p50": round(cuts[49], 1), "p99": round(cuts[98], 1),
                           "max": round(max(between_ms), 1)}}


def _sum(counted: Counted, field: int) -> int:
    return sum(rank[field] for ranks in counted for rank in ranks)


def main() -> None:
    """Run the rounds and print what they give."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=12, help="of a round")
    parser.add_argument("--gap-s", type=float, default=0.6, help="between two requests, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=argument_file)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    ranks = Ranks(options.ranks, options.ranks)
    sides = {"waves": Side(options.model, ranks, False), "step_sync": Side(options.model, ranks, True)}
    with sides["waves"].fleet, sides["step_sync"].fleet:
        for number in range(options.rounds + 1):
            requests = draw_round(draw, options.requests, options.gap_s)
            for name in sorted(sides, reverse=bool(number % 2)):
                sides[name].run(requests)
                last = sides[name].rounds[-1]
                print(f"round {number}, {name}: {last.passes} passes, {last.dummies} dummies", flush=True)
            if not number:
                for side in sides.values():
                    side.rounds.clear()  # the first one warms up
                continue
            waves, ours = (sides[name].rounds[-1].answers for name in ("waves", "step_sync"))
            if waves != ours:
                raise RuntimeError(f"round {number}: the answers differ")
    result = {"machine": {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count(),
                          "load": round(os.getloadavg()[0], 1)},
              "ranks": ranks._asdict(), "requests_a_round": options.requests, "gap_s": options.gap_s,
              "seed": options.seed, **{name: side.summary() for name, side in sides.items()}}
    print(json.dumps(result, indent=1))
    if options.json is not None:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
