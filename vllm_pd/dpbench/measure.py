# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp`: what the step sync of data-parallel ranks costs, on this tree and on another one, in one run.

Each group is measured alone, the two trees in turn for each model and size, with the same requests in the same order:

1. bursts: one request at a time at rank 0 of an idle group, whose end is waited for. Every third one ends by a stop
   token, the others by their length. A *drain dummy* is a dummy forward pass that began after the last real one of
   any rank; the *wake-up* is the time from the request being handed to the front end to the start of the idle peer's
   first forward pass.
2. load: requests on all ranks at once, of unequal length, four of ten on rank 0. Collectives and messages beside
   those of the forward passes are counted by the ranks themselves (`probe.StepProbe`).
3. silence: CPU time of the idle engine processes.
"""

import json
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
from .probe import DUMMY, FORWARD

LEAST_BURSTS = 3
SETTLE_S = 1.2  # longer than upstream's 32 steps of a tiny model
SILENCE_S = 3.0
ROUNDS = 3  # of load; the median counts
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999


@dataclass(frozen=True)
class DpBench:
    """The command line of `vllm-pd bench dp`. `trees`: name and folder of a vLLM, None for the imported one."""
    models: tuple[Path, ...]
    sizes: tuple[int, ...]
    trees: tuple[tuple[str, Path | None], ...]
    bursts: int = 30
    requests: int = 80
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for what can't be measured."""
        for key, value, least in (("--bursts", self.bursts, LEAST_BURSTS), ("--requests", self.requests, 1),
                                  *(("--size", size, 2) for size in self.sizes)):  # fmt: skip
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
            for name, tree in bench.trees:
                began = time.monotonic()
                entry = {"model": model.name, "experts": has_experts(model), "size": size, "tree": name}
                log = logs / f"{model.name}-{size}-{name}.log"
                with Group(model, size, tree, log, enable_expert_parallel=entry["experts"]) as group:
                    entry |= measure_group(bench, group)
                entries.append(entry)
                say(f"{model.name} x {size} on {name}: {time.monotonic() - began:.0f} s")
    return {"settings": {"bursts": bench.bursts, "requests": bench.requests, "seed": bench.seed}, "entries": entries,
            "same_tokens": same_tokens(entries)}  # fmt: skip


def same_tokens(entries: Sequence[dict]) -> bool:
    """Whether every tree gave the same tokens for each model."""
    return all(len({entry["tokens_digest"] for entry in entries if entry["model"] == model}) == 1
               for model in {entry["model"] for entry in entries})  # fmt: skip


def measure_group(bench: DpBench, group: Group) -> dict[str, Any]:
    """All figures of one group that is ready."""
    draw = random.Random(bench.seed)

    def prompt(tokens: int) -> list[int]:
        return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(tokens)]

    group.start_probe()
    group.tokens([group.generate(prompt(20), rank=rank, max_tokens=4) for rank in range(group.size)])
    return {**_bursts(bench, group, prompt), **_load(bench, group, prompt, draw), **_silence(group)}


def _bursts(bench: DpBench, group: Group, prompt: Any) -> dict[str, Any]:
    asked = prompt(24)
    answer = group.tokens([group.generate(asked, rank=0, max_tokens=12)])[0]
    stop = next((token for token in answer[4:] if token not in answer[:4]), answer[-1])
    dummies, messages, collectives, wakes_s, ttfts_s, picture = [], [], [], [], [], []
    for number in range(bench.bursts):
        group.start_probe()
        early = number % 3 == 2
        more = {"max_tokens": 100, "stop_token_ids": [stop]} if early else {"max_tokens": 8 + number % 5}
        result = group.generate(asked, rank=0, **more).result(60)
        time.sleep(SETTLE_S)
        probes = group.take_probe()
        last = max(step[0] for probe in probes for step in probe["steps"] if step[2] == FORWARD)
        dummies.append(max(sum(step[2] == DUMMY and step[0] > last for step in probe["steps"]) for probe in probes))
        messages.append(sum(probe["messages"] for probe in probes))
        collectives.append(probes[0]["collectives"])
        wakes_s += [probe["steps"][0][0] - result["sent"] for probe in probes[1:]]
        ttfts_s.append(result["first"] - result["sent"])
        picture = [[(step[0] - result["sent"], step[1] - result["sent"], step[2]) for step in probe["steps"]]
                   for probe in probes] if early or not picture else picture  # fmt: skip
    return {"drain_dummies": spread(dummies, 1), "drain_dummies_by_length": spread(dummies[0::3] + dummies[1::3], 1),
            "messages_per_burst": statistics.mean(messages), "collectives_per_burst": statistics.mean(collectives),
            "wake_up_ms": spread(wakes_s), "ttft_idle_ms": spread(ttfts_s), "steps": picture}  # fmt: skip


def _load(bench: DpBench, group: Group, prompt: Any, draw: random.Random) -> dict[str, Any]:
    asked = [(prompt(draw.choice([4, 30, 90])), 0 if number % 10 < 4 else number % group.size, draw.choice([4, 16, 48]))
             for number in range(bench.requests)]  # fmt: skip
    group.start_probe()
    rates = []
    for _ in range(ROUNDS):
        began = time.monotonic()
        tokens = group.tokens([group.generate(each, rank=rank, max_tokens=most) for each, rank, most in asked])
        rates.append(sum(map(len, tokens)) / (time.monotonic() - began))
    time.sleep(SETTLE_S)
    probes = group.take_probe()
    steps = len(probes[0]["steps"])
    return {"tokens_per_s": statistics.median(rates), "load_steps": [len(probe["steps"]) for probe in probes],
            "collectives_per_step": probes[0]["collectives"] / steps,
            "messages_per_1000_steps": 1000 * sum(probe["messages"] for probe in probes) / steps,
            "tokens_digest": f"{zlib.crc32(str(tokens).encode()):08x}"}  # fmt: skip


def _silence(group: Group) -> dict[str, Any]:
    pids = [pid for name, pid in group.pids.items() if name.startswith("EngineCore")]
    time.sleep(SETTLE_S)
    before = [_cpu_s(pid) for pid in pids]
    time.sleep(SILENCE_S)
    used_s = max(_cpu_s(pid) - since for pid, since in zip(pids, before, strict=True))
    return {"idle_cpu_percent": 100 * used_s / SILENCE_S}


def _cpu_s(pid: int) -> float:
    """CPU time of a process, of all its threads that still run."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def spread(values: Sequence[float], factor: float = 1000.0) -> dict[str, float]:
    """Mean, median, 99th percentile and largest; seconds become milliseconds by the default factor."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"mean": factor * statistics.mean(ordered), "p50": factor * statistics.median(ordered),
            "p99": factor * p99, "max": factor * ordered[-1]}  # fmt: skip
