# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp`: what the step sync of data-parallel ranks costs, on this tree and on another one, in one run.

For each model and size the groups of all trees are there at once and get the same requests in the same order, taking
turns, whose first is another one each time, so that what else the machine does hits all alike:

1. bursts: one request at a time at rank 0 of an idle group, whose end is waited for. Lengths are drawn evenly from
   BURST_TOKENS; every third one ends by a stop token instead. A *drain dummy* is a pass that is a dummy on all ranks,
   after the last that was not; the *wake-up* is the time from the request being handed to the front end to the start
   of an idle peer's first forward pass.
2. load: rounds of requests on all ranks at once, of unequal length, four of ten on rank 0. Collectives and messages
   beside those of the forward passes are counted by the ranks themselves (`probe.StepProbe`).
3. silence: CPU time of the idle processes, of all groups over the same seconds.

After each turn the group gets the time that upstream may still run dummies for before another's turn begins.
"""

import contextlib
import itertools
import json
import os
import random
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .group import Group
from .probe import DUMMY

LEAST_BURSTS = 3
BURST_TOKENS = (2, 65)  # evenly over two of upstream's stop intervals, so that its ends meet them anywhere
LONGEST_DRAIN_STEPS = 48  # upstream's 32 and a half more
LEAST_SETTLE_S = 0.3
SILENCE_S = 5.0
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999


@dataclass(frozen=True)
class DpBench:
    """The command line of `vllm-pd bench dp`. `trees`: name and folder of a vLLM, None for the imported one."""
    models: tuple[Path, ...]
    sizes: tuple[int, ...]
    trees: tuple[tuple[str, Path | None], ...]
    bursts: int = 30
    requests: int = 60
    rounds: int = 5
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for what can't be measured."""
        least_of = [("--bursts", self.bursts, LEAST_BURSTS), ("--requests", self.requests, 1),
                    ("--rounds", self.rounds, 1), *(("--size", size, 2) for size in self.sizes)]  # fmt: skip
        for key, value, least in least_of:
            if value < least:
                raise ConfigError(key, value, f"write at least {least}")
        for model in self.models:
            if not (model / "config.json").is_file():
                raise ConfigError("--model", str(model), "there is no config.json: write the folder of a model")
        for name, tree in self.trees:
            if tree is not None and not (tree / "vllm" / "__init__.py").is_file():
                raise ConfigError(f"--{name}", str(tree), "write a folder that holds `vllm/`")


def has_experts(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text())
    return any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))


def measure(bench: DpBench, logs: Path, say: Any = print) -> dict[str, Any]:
    """Run it all. The report, ready for JSON; `steps` in each entry is the picture's: one drain, rank by rank."""
    bench.check()
    entries = []
    for model in bench.models:
        for size in bench.sizes:
            began = time.monotonic()
            about = {"model": model.name, "experts": has_experts(model), "size": size}
            with contextlib.ExitStack() as stack:
                groups = [Group(model, size, tree, logs / f"{model.name}-{size}-{name}.log",
                                enable_expert_parallel=about["experts"]) for name, tree in bench.trees]  # fmt: skip
                for group in groups:
                    stack.callback(group.close)
                figures = measure_groups(bench, [Turns(group.ready()) for group in groups])
            entries += [about | {"tree": name} | each for (name, _), each in zip(bench.trees, figures, strict=True)]
            say(f"{model.name} x {size}: {time.monotonic() - began:.0f} s")
    return {"settings": {"bursts": bench.bursts, "requests": bench.requests, "rounds": bench.rounds,
                         "seed": bench.seed}, "entries": entries, "same_tokens": same_tokens(entries)}  # fmt: skip


def same_tokens(entries: Sequence[dict]) -> bool:
    """Whether every group of a model, of whatever size and tree, gave the same tokens."""
    return all(len({entry["tokens_digest"] for entry in entries if entry["model"] == model}) == 1
               for model in {entry["model"] for entry in entries})  # fmt: skip


class Turns:
    """One group and what its turns have shown. Times in seconds."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.settle_s = 0.0
        self.dummies: dict[bool, list[int]] = {False: [], True: []}  # by whether the request ended early
        self.messages, self.collectives = [], []  # of each burst
        self.wakes_s, self.ttfts_s, self.tokens_per_s = [], [], []
        self.load_probes: list[list[dict]] = []
        self.picture: list = []
        self.digest = 0

    def warm_up(self, prompt: list[int]) -> list[int]:
        """Learn how long a drain may take. The tokens that follow `prompt`, as many as any burst has."""
        size = self.group.size
        self.group.tokens([self.group.generate(prompt, rank=rank, max_tokens=4) for rank in range(size)])
        self.group.start_probe()
        answer = self.group.tokens([self.group.generate(prompt, rank=0, max_tokens=BURST_TOKENS[1])])[0]
        steps = self.group.take_probe()[0]["steps"]
        step_s = statistics.median(later[0] - step[0] for step, later in itertools.pairwise(steps))
        self.settle_s = max(LEAST_SETTLE_S, LONGEST_DRAIN_STEPS * step_s)
        time.sleep(self.settle_s)
        return answer

    def burst(self, prompt: list[int], params: dict, early: bool) -> None:
        self.group.start_probe()
        result = self.group.generate(prompt, rank=0, **params).result(60)
        time.sleep(self.settle_s)
        probes = self.group.take_probe()
        self.dummies[early].append(min(map(trailing_dummies, probes)))
        self.messages.append(sum(probe["messages"] for probe in probes))
        self.collectives.append(probes[0]["collectives"])
        self.wakes_s += [probe["steps"][0][0] - result["sent"] for probe in probes[1:]]
        self.ttfts_s.append(result["first"] - result["sent"])
        self.digest = zlib.crc32(str(result["tokens"]).encode(), self.digest)
        if early and len(result["tokens"]) < 16 or not self.picture:
            self.picture = [[(step[0] - result["sent"], step[1] - result["sent"], step[2]) for step in probe["steps"]]
                            for probe in probes]  # fmt: skip

    def load(self, asked: Sequence[tuple[list[int], int, int]]) -> None:
        """asked: prompt, rank and length of each request."""
        self.group.start_probe()
        began = time.monotonic()
        tokens = self.group.tokens([self.group.generate(each, rank=rank, max_tokens=most)
                                    for each, rank, most in asked])  # fmt: skip
        self.tokens_per_s.append(sum(map(len, tokens)) / (time.monotonic() - began))
        time.sleep(self.settle_s)
        self.load_probes.append(self.group.take_probe())
        self.digest = zlib.crc32(str(tokens).encode(), self.digest)

    def figures(self) -> dict[str, Any]:
        steps = sum(len(probes[0]["steps"]) for probes in self.load_probes)
        counted = {key: sum(probe[key] for probes in self.load_probes for probe in probes)
                   for key in ("collectives", "messages")}  # fmt: skip
        return {
            "drain_dummies": spread(self.dummies[False] + self.dummies[True], 1),
            "drain_dummies_by_length": spread(self.dummies[False], 1),
            "drain_dummies_early": spread(self.dummies[True], 1),
            "messages_per_burst": statistics.mean(self.messages),
            "collectives_per_burst": statistics.mean(self.collectives), "wake_up_ms": spread(self.wakes_s),
            "ttft_idle_ms": spread(self.ttfts_s), "tokens_per_s": statistics.median(self.tokens_per_s),
            "tokens_per_s_rounds": self.tokens_per_s, "load_steps": steps,
            "collectives_per_step": counted["collectives"] / self.group.size / steps,
            "messages_per_1000_steps": 1000 * counted["messages"] / steps, "steps": self.picture,
            "tokens_digest": f"{self.digest:08x}"}  # fmt: skip


def measure_groups(bench: DpBench, all_turns: Sequence[Turns]) -> list[dict[str, Any]]:
    """All figures of groups that are ready and of one size, in turns."""
    draw = random.Random(bench.seed)
    size = all_turns[0].group.size

    def prompt(tokens: int) -> list[int]:
        return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]

    asked = prompt(24)
    answer = [turns.warm_up(asked) for turns in all_turns][0]
    stops = [token for number, token in enumerate(answer[:32]) if token not in answer[:number] and number] or answer[:1]
    for number in range(bench.bursts):
        early = number % 3 == 2
        params = ({"max_tokens": 100, "stop_token_ids": [draw.choice(stops)]} if early
                  else {"max_tokens": draw.randint(*BURST_TOKENS)})  # fmt: skip
        for turns in _rotated(all_turns, number):
            turns.burst(asked, params, early)
    load = [(prompt(draw.choice([4, 30, 90])), 0 if number % 10 < 4 else number % size, draw.choice([4, 16, 48]))
            for number in range(bench.requests)]  # fmt: skip
    for number in range(bench.rounds):
        for turns in _rotated(all_turns, number):
            turns.load(load)
    idle = _silence([turns.group for turns in all_turns])
    return [turns.figures() | silent | {"tokens_per_s_ratio": _ratio(turns.tokens_per_s, all_turns[0].tokens_per_s)}
            for turns, silent in zip(all_turns, idle, strict=True)]  # fmt: skip


def _ratio(rates: Sequence[float], to: Sequence[float]) -> float:
    """Of two groups' rounds, each to the one beside it: what else the machine did in these seconds falls out."""
    return statistics.median(rate / base for rate, base in zip(rates, to, strict=True))


def trailing_dummies(probe: dict) -> int:
    """Dummy passes after this rank's last real one."""
    return sum(1 for _ in itertools.takewhile(lambda step: step[2] == DUMMY, reversed(probe["steps"])))


def _rotated(all_turns: Sequence[Turns], number: int) -> list[Turns]:
    first = number % len(all_turns)
    return [*all_turns[first:], *all_turns[:first]]


def _silence(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Percent of a core that each idle group's busiest engine uses, and its front end and coordinator together."""
    engines = [[pid for name, pid in group.pids.items() if name.startswith("EngineCore")] for group in groups]
    others = [sorted(set(_session(group.process.pid)) - set(own)) for group, own in zip(groups, engines, strict=True)]

    def used() -> list[list[list[float]]]:
        return [[[_cpu_s(pid) for pid in pids] for pids in kind] for kind in (engines, others)]

    before = used()
    time.sleep(SILENCE_S)
    percents = [[[100 * (now - then) / SILENCE_S for now, then in zip(*pair, strict=True)]
                 for pair in zip(*kinds, strict=True)] for kinds in zip(used(), before, strict=True)]  # fmt: skip
    return [{"idle_cpu_percent": max(own), "idle_front_cpu_percent": sum(rest)}
            for own, rest in zip(*percents, strict=True)]  # fmt: skip


def _session(leader: int) -> list[int]:
    """The processes of a session, which are a group's: its front end begins one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            if os.getsid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


def _cpu_s(pid: int) -> float:
    """CPU time of a process, of all its threads that still run."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def spread(values: Sequence[float], factor: float = 1000.0) -> dict[str, float]:
    """Mean, median, 99th percentile and largest; seconds become milliseconds by the default factor."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"mean": factor * statistics.mean(ordered), "p50": factor * statistics.median(ordered),
            "p99": factor * p99, "max": factor * ordered[-1]}  # fmt: skip
