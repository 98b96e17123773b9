# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp`: what the step sync of data-parallel ranks costs, on this tree and on another one, in one run.

For each model and size the groups of all trees are there at once and get the same requests in the same order, taking
turns, whose first is another one each time, so that what else the machine does hits all alike:

1. bursts: one request at a time at rank 0 of an idle group, whose end is waited for. Lengths are drawn evenly from
   BURST_TOKENS; every third one ends by a stop token instead. A *drain dummy* is a pass that is a dummy on all ranks,
   after the last that was not; the *wake-up* is the time from the request being handed to the front end to the start
   of an idle peer's first forward pass.
2. load: rounds of requests on all ranks at once, of unequal length, four of ten on rank 0. Forward passes, and
   collectives and messages beside theirs, are counted by the ranks themselves (`probe.StepProbe`), and given for one
   round, the same work for all groups.
3. unbalanced: the last rank decodes one request, alone, and then again while rank 0 does nothing but prefill long
   prompts, one after another, each of which a short request at the last rank comes with. ITL of the one that decodes,
   TTFT of the others.
4. silence: CPU time of the idle processes, of all groups over the same seconds.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_pd.bench.dp.group import Group
from vllm_pd.bench.dp.probe import DUMMY
from vllm_pd.dp.experts import has_experts
from vllm_pd.errors import ConfigError

LEAST_BURSTS = 3
BURST_TOKENS = (2, 65)  # evenly over two of upstream's stop intervals, so that its ends meet them anywhere
LONGEST_DRAIN_STEPS = 48  # upstream's 32 and a half more
LEAST_SETTLE_S = 0.3
SILENCE_S = 5.0
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999
LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS, DECODED_TOKENS = 1000, 16, 60  # of what is unbalanced
ROOM = {"max_model_len": 4096, "max_num_batched_tokens": 2048}  # a long prompt is prefilled in one step
LEAST_P99 = 100  # samples
RIMS = {"shared-memory": True, "network": False}


@dataclass(frozen=True)
class DpVariant:
    """One column: the vLLM in the folder `tree` (None: the imported one), and what its groups are started with."""
    name: str
    tree: Path | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DpBench:
    """The command line of `vllm-pd bench dp`."""
    models: tuple[Path, ...]
    sizes: tuple[int, ...]
    variants: tuple[DpVariant, ...]
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
        for tree in {variant.tree for variant in self.variants} - {None}:
            if not (tree / "vllm" / "__init__.py").is_file():
                raise ConfigError("--other", str(tree), "write a folder that holds `vllm/`")


def variants(other: Path | None, rims: Sequence[str], stop_every: int) -> tuple[DpVariant, ...]:
    """`other` as it is, and with that interval if it is not 0; and the imported vLLM on each of these rims. Raises
    ConfigError."""
    if stop_every and other is None:
        raise ConfigError("--stop-every", stop_every, "it is for a tree with waves: name that by --other")
    found = [DpVariant("other", other)] if other else []
    found += [DpVariant(f"other, every {stop_every}", other, {"stop_every": stop_every})] if stop_every else []
    for rim in rims:
        if rim not in RIMS:
            raise ConfigError("--rim", rim, f"write one of {', '.join(RIMS)}")
        found.append(DpVariant(rim, None, {"additional_config": {"dp_sync": {"shared_memory": RIMS[rim]}}}))
    return tuple(found)


def measure(bench: DpBench, logs: Path, say: Any = print) -> dict[str, Any]:
    """Run it all. The report, ready for JSON; `steps` in each entry is the picture's: one drain, rank by rank."""
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
                          for each in bench.variants]  # fmt: skip
                for group in groups:
                    stack.callback(group.close)
                figures = measure_groups(bench, [MeasuredGroup(group.ready()) for group in groups])
            entries += [about | {"tree": variant.name} | each
                        for variant, each in zip(bench.variants, figures, strict=True)]  # fmt: skip
            say(f"{model.name} x {size}: {time.monotonic() - began:.0f} s")
    return {"settings": {"bursts": bench.bursts, "requests": bench.requests, "rounds": bench.rounds,
                         "seed": bench.seed}, "entries": entries, "same_tokens": same_tokens(entries)}  # fmt: skip


def same_tokens(entries: Sequence[dict]) -> bool:
    """Whether every group of a model, of whatever size and tree, gave the same tokens."""
    return all(len({entry["tokens_digest"] for entry in entries if entry["model"] == model}) == 1
               for model in {entry["model"] for entry in entries})  # fmt: skip


class MeasuredGroup:
    """One group and what its turns have shown. Times in seconds."""

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
        self.wakes_s += [probe["steps"][0][0] - result["sent"] for probe in probes[1:] if probe["steps"]]
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

    def unbalanced(self, asked: list[int], seed: int) -> None:
        """`asked`: what the last rank decodes. The prompts beside it are drawn anew, and alike for every group."""
        draw, last = random.Random(seed), self.group.size - 1
        answers = [self.group.generate(asked, rank=last, max_tokens=DECODED_TOKENS).result(120)]
        decoding = self.group.generate(asked, rank=last, max_tokens=DECODED_TOKENS)
        while not decoding.done() or not self.beside_s[LONG_PROMPT_TOKENS]:
            beside = {tokens: self.group.generate(prompt_of(draw, tokens), rank=rank, max_tokens=1)
                      for tokens, rank in ((LONG_PROMPT_TOKENS, 0), (SHORT_PROMPT_TOKENS, last))}  # fmt: skip
            for tokens, request in beside.items():
                self.beside_s[tokens].append(request.result(120)["first"] - request.result()["sent"])
        answers.append(decoding.result(120))
        for answer, beside in zip(answers, (False, True), strict=True):
            self.itls_s[beside] += [later - time for time, later in itertools.pairwise(answer["times"])]
        self.digest = zlib.crc32(str([answer["tokens"] for answer in answers]).encode(), self.digest)
        time.sleep(self.settle_s)

    def figures(self) -> dict[str, Any]:
        rounds = len(self.load_probes)
        kinds = [step[2] for probes in self.load_probes for probe in probes for step in probe["steps"]]
        counted = {key: sum(probe[key] for probes in self.load_probes for probe in probes) / rounds
                   for key in ("collectives", "messages")}  # fmt: skip
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
            "tokens_digest": f"{self.digest:08x}"}  # fmt: skip


def prompt_of(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]


def measure_groups(bench: DpBench, all_turns: Sequence[MeasuredGroup]) -> list[dict[str, Any]]:
    """All figures of groups that are ready and of one size, in turns."""
    draw = random.Random(bench.seed)
    size = all_turns[0].group.size
    asked = prompt_of(draw, 24)
    answer = [turns.warm_up(asked) for turns in all_turns][0]
    stops = [token for number, token in enumerate(answer[:32]) if token not in answer[:number] and number] or answer[:1]
    for number in range(bench.bursts):
        early = number % 3 == 2
        params = ({"max_tokens": 100, "stop_token_ids": [draw.choice(stops)]} if early
                  else {"max_tokens": draw.randint(*BURST_TOKENS)})  # fmt: skip
        for turns in _rotated(all_turns, number):
            turns.burst(asked, params, early)
    load = [(prompt_of(draw, draw.choice([4, 30, 90])), 0 if number % 10 < 4 else number % size,
             draw.choice([4, 16, 48])) for number in range(bench.requests)]  # fmt: skip
    for number in range(bench.rounds):
        for turns in _rotated(all_turns, number):
            turns.load(load)
        for turns in _rotated(all_turns, number):
            turns.unbalanced(asked, bench.seed + number)
    idle = _silence([turns.group for turns in all_turns])
    return [turns.figures() | silent | {"tokens_per_s_ratio": _ratio(turns.tokens_per_s, all_turns[0].tokens_per_s)}
            for turns, silent in zip(all_turns, idle, strict=True)]  # fmt: skip


def _ratio(rates: Sequence[float], to: Sequence[float]) -> float:
    """Of two groups' rounds, each to the one beside it: what else the machine did in these seconds falls out."""
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
    """How many there are, mean, median, largest, and of LEAST_P99 and more the 99th percentile; seconds become
    milliseconds by the default factor."""
    ordered = sorted(values)
    found = {"samples": len(ordered), "mean": factor * statistics.mean(ordered),
             "p50": factor * statistics.median(ordered), "max": factor * ordered[-1]}  # fmt: skip
    if len(ordered) >= LEAST_P99:
        found["p99"] = factor * ordered[int(0.99 * len(ordered))]
    return found
