# SPDX-License-Identifier: Apache-2.0
"""One trace through the router, and through Envoy with the picker: the prefix hits of each.

Both stand before the same engines with emptied caches. The engines count hits themselves.
`open` requests are open at a time: the next one is sent when the oldest has ended, and when the index has what the
engines have published. So each request is placed by the same blocks and loads, and the two can differ only where their
judgement does.
"""
import asyncio
import collections
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from _picker.engine import MODEL, CachingEngine
from _picker.envoy import EnvoyBodyMode, picker_envoy_config, start_envoy_command
from vllm_pd.bench.servers import HOST
from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.errors import PDError
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.server import PickerServer
from vllm_pd.router.app import RouterApp
from vllm_pd.router.options import NO_TOKENIZER, RouterOptions
from vllm_pd.router.placing import Placer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.server import RouterServer
from vllm_pd.router.subscriptions import EventSubscriptions
from vllm_pd.router.workers import Workers, WorkerState
from vllm_pd.rpc.ports import is_free, take_free

WITHIN_S = 60.0
LIVE = "live"


@dataclass(frozen=True)
class ReplaySettings:
    """`open`: how many requests are open at a time. `seed`: of what the policy draws."""
    policy: Policy = Policy.KV
    open: int = 1
    seed: int = 0
    mode: EnvoyBodyMode = EnvoyBodyMode.DUPLEX


@dataclass(frozen=True)
class ReplayFigures:
    """What came of one replay. `placed`: how many requests each engine got."""
    requests: int
    failed: int
    prompt_blocks: int
    hit_blocks: int
    placed: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """Of the blocks of the prompts, those that were hits."""
        return self.hit_blocks / max(1, self.prompt_blocks)


@dataclass(frozen=True)
class _Placing:
    """What places requests: where clients reach it, and its parts that the replay looks at."""
    url: str
    workers: Workers
    placer: Placer
    subscriptions: EventSubscriptions


async def through_router(trace: Sequence[Arrival], engines: Sequence[CachingEngine],
                         settings: ReplaySettings) -> ReplayFigures:
    """The figures of the router. Raises PDError where it does not get ready."""
    port = take_free(HOST)
    options = RouterOptions(port=port, workers=tuple(engine.url for engine in engines), tokenizer=NO_TOKENIZER,
                            unready_s=0.0, grace_s=1.0)
    router = RouterApp(options, RoutingPolicyConfig(policy=settings.policy))
    server = RouterServer(router)
    serving = asyncio.create_task(server.serve())
    try:
        await _until(lambda: server.started)
        return await _replay(trace, engines, settings, _Placing(f"http://{HOST}:{port}", router.workers,
                                                                router.placer, router.subscriptions))
    finally:
        server.should_exit = True
        await serving


async def through_picker(trace: Sequence[Arrival], engines: Sequence[CachingEngine], settings: ReplaySettings,
                         folder: Path) -> ReplayFigures:
    """The figures of Envoy with the picker; Envoy's configuration is written into `folder`. Raises PDError where they
    do not get ready, ConfigError without an Envoy."""
    port, picker = take_free(HOST), take_free(HOST)
    options = PickerOptions(port=picker, metrics_port=0, workers=tuple(engine.url for engine in engines),
                            tokenizer=NO_TOKENIZER)
    server = PickerServer(options, RoutingPolicyConfig(policy=settings.policy))
    await server.start()
    try:
        async with _envoy(picker_envoy_config(port, picker, settings.mode), folder, port):
            return await _replay(trace, engines, settings, _Placing(
                f"http://{HOST}:{port}", server.workers, server.judgement.placer, server.judgement.subscriptions))
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def _envoy(config: dict[str, Any], folder: Path, port: int) -> AsyncIterator[None]:
    envoy = await asyncio.create_subprocess_exec(*start_envoy_command(config, folder))
    try:
        await _until(lambda: envoy.returncode is not None or not is_free(HOST, port))
        if envoy.returncode is not None:
            raise PDError(f"Envoy has ended with {envoy.returncode}")
        yield
    finally:
        if envoy.returncode is None:
            envoy.kill()
        await envoy.wait()


async def _replay(trace: Sequence[Arrival], engines: Sequence[CachingEngine], settings: ReplaySettings,
                  placing: _Placing) -> ReplayFigures:
    informed = settings.policy in (Policy.KV, Policy.LEAST_LOAD)  # by the engines' events
    await _until(lambda: sum(worker.state is WorkerState.UP for worker in placing.workers) == len(engines))
    if informed:
        await _until(lambda: all((state or {}).get("state") == LIVE for state in (
            placing.subscriptions.as_json().get(engine.url) for engine in engines)))
    for engine in engines:
        engine.empty()
        engine.holds = True
    before = [engine.batches for engine in engines]
    placing.placer._rng = random.Random(settings.seed)  # equal draws, so that equal judgements place alike
    await asyncio.sleep(0.1)
    read = [placing.subscriptions.progress_of(engine.url).batches for engine in engines]
    async def is_known() -> None:
        await _until(lambda: all(placing.subscriptions.progress_of(engine.url).batches - had >= engine.batches - was
                                 for engine, had, was in zip(engines, read, before, strict=True)))

    async def send(session: aiohttp.ClientSession, arrival: Arrival) -> bool:
        asked = {"model": MODEL, "prompt": arrival.prompt, "answer": arrival.answer, "max_tokens": 1}
        async with session.post(f"{placing.url}/v1/completions", json=asked) as response:
            await response.read()
            return response.status == 200

    async def arrive(answer: asyncio.Task[bool]) -> CachingEngine | None:
        """Wait until a request is at an engine: that engine, or None where its answer came at once."""
        counts = [engine.requests for engine in engines]
        await _until(lambda: answer.done() or counts != [engine.requests for engine in engines])
        return next((engine for engine, count in zip(engines, counts, strict=True) if engine.requests != count), None)

    failed = 0
    opened: collections.deque[tuple[CachingEngine, asyncio.Task[bool]]] = collections.deque()

    async def end_oldest() -> None:
        nonlocal failed
        engine, answer = opened.popleft()
        engine.release()
        failed += not await answer
        await _until(lambda: sum(len(worker.in_flight) for worker in placing.workers) == len(opened))

    async with aiohttp.ClientSession() as session:
        for arrival in trace:
            if len(opened) == settings.open:
                await end_oldest()
            answer = asyncio.create_task(send(session, arrival))
            engine = await arrive(answer)
            if engine is None:  # refused
                failed += 1
                continue
            opened.append((engine, answer))
            if informed:
                await is_known()
        while opened:
            await end_oldest()
    return ReplayFigures(len(trace), failed, sum(engine.prompt_blocks for engine in engines),
                         sum(engine.hit_blocks for engine in engines), tuple(engine.requests for engine in engines))


async def _until(condition: Callable[[], bool]) -> None:
    """Raises PDError where it does not come true in time."""
    try:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise PDError(f"not ready within {WITHIN_S:g} s") from None
