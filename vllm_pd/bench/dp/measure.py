# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp`: what the step sync of data-parallel ranks costs, on this tree and on another one, in one run.

For each model and size the groups of all trees run at the same time and get the same requests in the same order. They
take turns, and another one is first each time, so that other work of the machine hits all equally:

1. bursts: one request at a time at rank 0 of an idle group, until the group is idle again. Lengths are drawn evenly
from
   BURST_TOKENS; every third request ends by a stop token instead. A *drain dummy* is a pass that is a dummy on all
   ranks, after the last that was not. The *wake-up* is the time from the request being handed to the front end to the
   start of an idle peer's first forward pass.
2. load: rounds of requests on all ranks at once, of unequal length, four of ten on rank 0. The ranks themselves count
   forward passes, and collectives and messages beside theirs (`probe.StepProbe`). The figures are for one round, which
   is the same work for all groups.
3. unbalanced: the last rank decodes one request, first alone, then while rank 0 only prefills long prompts, one after
   another; with each of them a short request comes to the last rank. ITL of the request that decodes, TTFT of the
   others.
4. silence: CPU time of the idle processes, of all groups over the same seconds.

After each turn the group gets as much time as upstream may still run dummies, before the turn of another begins.
"""

import contextlib
import itertools
import json
import random
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_pd.bench.checks import require_at_least
from vllm_pd.bench.dp.group import Group
from vllm_pd.bench.dp.probe import DUMMY
from vllm_pd.bench.options import DpLoad
from vllm_pd.bench.report import LEAST_P99, MS, ShowLine, summary
from vllm_pd.bench.servers import process_tree
from vllm_pd.errors import ConfigError
from vllm_pd.v0.dp.experts import has_experts

LEAST_BURSTS = 3
BURST_TOKENS = (2, 65)  # evenly over two of upstream's stop intervals, so that its ends meet them anywhere
LONGEST_DRAIN_STEPS = 48  # upstream's 32 and a half more
LEAST_SETTLE_S = 0.3
SILENCE_S = 5.0
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999
LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS, DECODED_TOKENS = 1000, 16, 60  # of the unbalanced phase
ROOM = {"max_model_len": 4096, "max_num_batched_tokens": 2048}  # a long prompt is prefilled in one step
BACKENDS = {"shared-memory": True, "network": False}  # whether ranks use shared memory


@dataclass(frozen=True)
class DpVariant:
    """One column: the vLLM in the folder `tree` (None: the imported one), and the engine arguments of its groups."""
    name: str
    tree: Path | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DpBench(DpLoad):
    """The command line of `vllm-pd bench dp`."""
    models: tuple[Path, ...] = ()
    sizes: tuple[int, ...] = ()
    variants: tuple[DpVariant, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for what can't be measured."""
        require_at_least([("--bursts", self.bursts, LEAST_BURSTS), ("--requests", self.requests, 1),
                          ("--rounds", self.rounds, 1), *(("--size", size, 2) for size in self.sizes)])
        for model in self.models:
            if not (model / "config.json").is_file():
                raise ConfigError("--model", str(model), "there is no config.json: write the folder of a model")
        for tree in {variant.tree for variant in self.variants} - {None}:
            if not (tree / "vllm" / "__init__.py").is_file():
                raise ConfigError("--other", str(tree), "write a folder that holds `vllm/`")


def variants(other: Path | None, backends: Sequence[str], stop_every: int) -> tuple[DpVariant, ...]:
    """The vLLM in `other`, if given; the same with a stop interval of `stop_every` steps, if not 0; the imported vLLM
    with each of `backends`. Raises ConfigError."""
    if stop_every and other is None:
        raise ConfigError("--stop-every", stop_every, "it is for a tree with waves: name that by --other")
    found = [DpVariant("other", other)] if other else []
    found += [DpVariant(f"other, every {stop_every}", other, {"stop_every": stop_every})] if stop_every else []
    for backend in backends:
        sync = {"shared_memory": BACKENDS[checked_backend(backend)]}
        found.append(DpVariant(backend, None, {"additional_config": {"dp_sync": sync}}))
    return tuple(found)


def checked_backend(name: str) -> str:
    """The name. Raises ConfigError unless it is one of BACKENDS."""
    if name not in BACKENDS:
        raise ConfigError("--backend", name, f"write one of {', '.join(BACKENDS)}")
    return name


def measure(bench: DpBench, logs: Path, show: ShowLine = print) -> dict[str, Any]:
    """Runs it all; the engines' output goes to files in the folder `logs`. The report, ready for JSON; `steps` in each
    entry is for the picture: the passes of one drain, rank by rank."""
    bench.check()
    entries = []
    for model in bench.models:
        for size in bench.sizes:
            began = time.monotonic()
            experts = has_experts(json.loads((model / "config.json").read_text()))
            about = {"model": model.name, "experts": experts, "size": size}
            with contextlib.ExitStack() as stack:
                groups = [Group(model, size, each.tree, logs / f"{model.name}-{size}-{each.name}.log",
                                enable_expert_parallel=experts, **ROOM | each.arguments)
                          for each in bench.variants]
                for group in groups:
                    stack.callback(group.close)
                figures = measure_groups(bench, [MeasuredGroup(group.ready()) for group in groups])
            entries += [about | {"tree": variant.name} | each
                        for variant, each in zip(bench.variants, figures, strict=True)]
            show(f"{model.name} x {size}: {time.monotonic() - began:.0f} s")
    return {"settings": {"bursts": bench.bursts, "requests": bench.requests, "rounds": bench.rounds,
                         "seed": bench.seed}, "entries": entries, "same_tokens": same_tokens(entries)}


def same_tokens(entries: Sequence[dict]) -> bool:
    """Whether every group of a model, of whatever size and tree, gave the same tokens."""
    return all(len({entry["tokens_digest"] for entry in entries if entry["model"] == model}) == 1
               for model in {entry["model"] for entry in entries})


class MeasuredGroup:
    """One group and the results of its turns. Times in seconds."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.settle_s = 0.0
        self.dummies: dict[bool, list[int]] = {False: [], True: []}  # by whether the request ended early
        self.messages, self.collectives = [], []  # of each burst
        self.wakes_s, self.ttfts_s, self.tokens_per_s = [], [], []
        self.load_probes: list[list[dict]] = []
        self.itls_s: dict[bool, list[float]] = {False: [], True: []}  # by whether another rank prefilled meanwhile
        self.beside_s: dict[int, list[float]] = {SHORT_PROMPT_TOKENS: [], LONG_PROMPT_TOKENS: []}  # TTFT by length
        self.picture: list = []
        self.digest = 0

    def warm_up(self, prompt: list[int]) -> list[int]:
        """Measures how long a drain may take. The tokens that follow `prompt`, as many as any burst has."""
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
        """One request at rank 0, whose sampling parameters are `params`, and the drain after it. `early`: whether it is
        to end by a stop token."""
        self.group.start_probe()
        result = self.group.generate(prompt, rank=0, **params).result(60)
        time.sleep(self.settle_s)
        probes = self.group.take_probe()
        self.dummies[early].append(min(map(trailing_dummies, probes)))
        self.messages.append(sum(probe["messages"] for probe in probes))
        self.collectives.append(probes[0]["collectives"])
        self.wakes_s += [probe["steps"][0][0] - result["sent"] for probe in probes[1:] if probe["steps"]]
        self.ttfts_s.append(result["first"] - result["sent"])
        self.digest = zlib.crc32(str(result["tokens"]).encode(), self.digest)
        if early and len(result["tokens"]) < 16 or not self.picture:
            self.picture = [[(step[0] - result["sent"], step[1] - result["sent"], step[2]) for step in probe["steps"]]
                            for probe in probes]

    def load(self, asked: Sequence[tuple[list[int], int, int]]) -> None:
        """One round. `asked`: prompt, rank and length of each request."""
        self.group.start_probe()
        began = time.monotonic()
        tokens = self.group.tokens([self.group.generate(each, rank=rank, max_tokens=most)
                                    for each, rank, most in asked])
        self.tokens_per_s.append(sum(map(len, tokens)) / (time.monotonic() - began))
        time.sleep(self.settle_s)
        self.load_probes.append(self.group.take_probe())
        self.digest = zlib.crc32(str(tokens).encode(), self.digest)

    def unbalanced(self, asked: list[int], seed: int) -> None:
        """One round. `asked`: the prompt of the request that the last rank decodes. Those beside it are drawn from
        `seed`, so they are the same for every group."""
        draw, last = random.Random(seed), self.group.size - 1
        answers = [self.group.generate(asked, rank=last, max_tokens=DECODED_TOKENS).result(120)]
        decoding = self.group.generate(asked, rank=last, max_tokens=DECODED_TOKENS)
        while not decoding.done() or not self.beside_s[LONG_PROMPT_TOKENS]:
            beside = {tokens: self.group.generate(prompt_of(draw, tokens), rank=rank, max_tokens=1)
                      for tokens, rank in ((LONG_PROMPT_TOKENS, 0), (SHORT_PROMPT_TOKENS, last))}
            for tokens, request in beside.items():
                self.beside_s[tokens].append(request.result(120)["first"] - request.result()["sent"])
        answers.append(decoding.result(120))
        for answer, beside in zip(answers, (False, True), strict=True):
            self.itls_s[beside] += [later - time for time, later in itertools.pairwise(answer["times"])]
        self.digest = zlib.crc32(str([answer["tokens"] for answer in answers]).encode(), self.digest)
        time.sleep(self.settle_s)

    def figures(self) -> dict[str, Any]:
        """All results, for the report."""
        rounds = len(self.load_probes)
        kinds = [step[2] for probes in self.load_probes for probe in probes for step in probe["steps"]]
        counted = {key: sum(probe[key] for probes in self.load_probes for probe in probes) / rounds
                   for key in ("collectives", "messages")}
        return {
            "drain_dummies": spread(self.dummies[False] + self.dummies[True], 1),
            "drain_dummies_by_length": spread(self.dummies[False], 1),
            "drain_dummies_early": spread(self.dummies[True], 1),
            "messages_per_burst": statistics.mean(self.messages),
            "collectives_per_burst": statistics.mean(self.collectives),
            "wake_up_ms": spread(self.wakes_s) if self.wakes_s else None, "ttft_idle_ms": spread(self.ttfts_s),
            "tokens_per_s": statistics.median(self.tokens_per_s), "tokens_per_s_rounds": self.tokens_per_s,
            "passes_per_load": len(kinds) / rounds, "dummies_per_load": kinds.count(DUMMY) / rounds,
            "collectives_per_load": counted["collectives"] / self.group.size,
            "messages_per_load": counted["messages"], "itl_alone_ms": spread(self.itls_s[False]),
            "itl_beside_ms": spread(self.itls_s[True]), "ttft_beside_ms": spread(self.beside_s[SHORT_PROMPT_TOKENS]),
            "ttft_long_ms": spread(self.beside_s[LONG_PROMPT_TOKENS]), "steps": self.picture,
            "tokens_digest": f"{self.digest:08x}"}


def prompt_of(draw: random.Random, tokens: int) -> list[int]:
    """Random token ids."""
    return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]


def measure_groups(bench: DpBench, all_turns: Sequence[MeasuredGroup]) -> list[dict[str, Any]]:
    """All figures of groups that are ready and of one size, measured in turns."""
    draw = random.Random(bench.seed)
    size = all_turns[0].group.size
    asked = prompt_of(draw, 24)
    answer = [turns.warm_up(asked) for turns in all_turns][0]
    stops = [token for number, token in enumerate(answer[:32]) if token not in answer[:number] and number] or answer[:1]
    for number in range(bench.bursts):
        early = number % 3 == 2
        params = ({"max_tokens": 100, "stop_token_ids": [draw.choice(stops)]} if early
                  else {"max_tokens": draw.randint(*BURST_TOKENS)})
        for turns in _rotated(all_turns, number):
            turns.burst(asked, params, early)
    load = [(prompt_of(draw, draw.choice([4, 30, 90])), 0 if number % 10 < 4 else number % size,
             draw.choice([4, 16, 48])) for number in range(bench.requests)]
    for number in range(bench.rounds):
        for turns in _rotated(all_turns, number):
            turns.load(load)
        for turns in _rotated(all_turns, number):
            turns.unbalanced(asked, bench.seed + number)
    idle = _silence([turns.group for turns in all_turns])
    return [turns.figures() | silent | {"tokens_per_s_ratio": _ratio(turns.tokens_per_s, all_turns[0].tokens_per_s)}
            for turns, silent in zip(all_turns, idle, strict=True)]


def _ratio(rates: Sequence[float], to: Sequence[float]) -> float:
    """The median ratio of two groups' rounds, each to the one next to it in time, so that other work of the machine in
    those seconds cancels out."""
    return statistics.median(rate / base for rate, base in zip(rates, to, strict=True))


def trailing_dummies(probe: dict) -> int:
    """Dummy passes after this rank's last real one."""
    return sum(1 for _ in itertools.takewhile(lambda step: step[2] == DUMMY, reversed(probe["steps"])))


def _rotated(all_turns: Sequence[MeasuredGroup], number: int) -> list[MeasuredGroup]:
    first = number % len(all_turns)
    return [*all_turns[first:], *all_turns[:first]]


def _silence(groups: Sequence[Group]) -> list[dict[str, float]]:
    """Percent of a core that each idle group's busiest engine uses, and its front end and coordinator together."""
    engines = [[pid for name, pid in group.pids.items() if name.startswith("EngineCore")] for group in groups]
    others = [sorted({process.pid for process in process_tree(group.process.pid)} - set(own))
              for group, own in zip(groups, engines, strict=True)]

    def used() -> list[list[list[float]]]:
        return [[[_cpu_s(pid) for pid in pids] for pids in kind] for kind in (engines, others)]

    before = used()
    time.sleep(SILENCE_S)
    percents = [[[100 * (now - then) / SILENCE_S for now, then in zip(*pair, strict=True)]
                 for pair in zip(*kinds, strict=True)] for kinds in zip(used(), before, strict=True)]
    return [{"idle_cpu_percent": max(own), "idle_front_cpu_percent": sum(rest)}
            for own, rest in zip(*percents, strict=True)]


def _cpu_s(pid: int) -> float:
    """CPU seconds of the threads of a process that still run."""
    return sum(map(thread_cpu_s, Path(f"/proc/{pid}/task").iterdir()))


def thread_cpu_s(task: Path) -> float:
    """CPU seconds of a thread, by its folder /proc/PID/task/TID."""
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def spread(values: Sequence[float], scale: float = MS) -> dict[str, float]:
    """How many values there are, mean, median and largest, and of LEAST_P99 and more the 99th percentile."""
    figures = "mean p50 max p99" if len(values) >= LEAST_P99 else "mean p50 max"
    return {"samples": len(values), **summary(values, figures, scale)}
