# SPDX-License-Identifier: Apache-2.0
"""D's leg: from the request to D, when P has the prompt's KV, to the first token.

For each pair of measurements a new prompt of the same length goes to each connector, one after the other on idle
engines, in alternating order. The engines of the other connectors are stopped (SIGSTOP) meanwhile: stock engines that
hold blocks for a peer keep stepping, and would slow all others down. First P computes the prompt, for a client of its
own (upstream's connectors: the proxy's first request). Then the clock starts when the request is written to D, and
stops when the first token of the stream is here. A measurement in which D got no KV from P is made again.

So upstream's leg is: D's front end, the scheduler, the read of P's blocks, the last token's step. Ours is the same,
where P is asked first. Else it is that and more: the job goes through the broker, P claims it, finds its prefix hit,
computes what a hit leaves out (the rest of the last block), and writes.

What no connector can save is measured in the same turns: a D that has computed the prompt itself gets it again, so that
its own prefix cache has all but the last block (`OWN_CACHE`).
"""
import asyncio
import random
import signal
import statistics
import time
from typing import Any

from _chaos.load import VOCABULARY

from _connectors.pair import ConnectorName, EnginePair
from vllm_pd.bench.connection import LoadError
from vllm_pd.bench.report import MS, ShowLine, summary
from vllm_pd.ops.launch.plan import ROLE_NAMES

SETTLE_S = 1.5  # until an engine that was stopped has answered its peers and the broker
TRIES, COUNTED_S = 3, 3.0
FIGURES = "p10 p50 p90 min max"
OWN_CACHE = "no transfer: D's own cache"


async def measure_leg(pair: EnginePair, prompt: list[int]) -> float:
    """D's leg of one request in seconds. Raises LoadError and OSError."""
    headers = {"X-Request-Id": f"leg-{random.getrandbits(64):x}"}
    params = await pair.prefill(prompt, headers)
    return (await pair.decode(prompt, 2, params, headers, stream=True)).ttft_s


async def measure_own_cache(pair: EnginePair, prompt: list[int]) -> float:
    """The seconds of a request to D, which has computed the prompt before. Raises LoadError and OSError."""
    await pair.decode(prompt, 2, None, {}, stream=True)
    return (await pair.decode(prompt, 2, None, {}, stream=True)).ttft_s


def leave_running(pair: EnginePair, pairs: list[EnginePair]) -> None:
    """Stops the engines of all other `pairs`; those of `pair` go on."""
    for one in pairs:
        for role in ROLE_NAMES:
            one.signal(role, signal.SIGCONT if one is pair else signal.SIGSTOP)


async def measure_alone(pair: EnginePair, pairs: list[EnginePair], tokens: int, draw: random.Random) -> float:
    """D's leg of `pair` in seconds. Stops the engines of all other `pairs` before, and leaves them stopped. Raises
    LoadError, also where D gets no KV from P, and OSError."""
    leave_running(pair, pairs)
    for _ in range(TRIES):
        await asyncio.sleep(SETTLE_S)
        before = await asyncio.to_thread(pair.loaded_tokens)
        took_s = await measure_leg(pair, draw.choices(VOCABULARY, k=tokens))
        deadline = time.monotonic() + COUNTED_S
        while time.monotonic() < deadline:
            if await asyncio.to_thread(pair.loaded_tokens) > before:
                return took_s
            await asyncio.sleep(0.1)
    raise LoadError(f"{pair.connector.value}: D got no KV from P in {TRIES} requests of {tokens} tokens")


async def measure_legs(pairs: list[EnginePair], tokens: int, count: int, seed: int, say: ShowLine) -> dict[str, Any]:
    """`count` pairs of measurements with prompts of `tokens` tokens. Milliseconds by connector, and the quotients of
    each order of ours, and of no transfer, and each of upstream's connectors."""
    draw = random.Random(f"legs {tokens} {seed}")
    stock = next((pair for pair in pairs if not pair.connector.is_ours), None)
    taken: list[dict[str, float]] = []
    for number in range(count + 1):
        order = pairs if number % 2 else pairs[::-1]
        taken.append({})
        for pair in order:
            taken[-1][pair.connector.value] = await measure_alone(pair, pairs, tokens, draw)
            if pair is stock:
                await asyncio.sleep(SETTLE_S)
                taken[-1][OWN_CACHE] = await measure_own_cache(pair, draw.choices(VOCABULARY, k=tokens))
        say(f"D's leg at {tokens} tokens, {number}/{count}: "
            + ", ".join(f"{name} {MS * took_s:.1f} ms" for name, took_s in taken[-1].items()))
    taken = taken[1:]  # the first connects the engines
    names = [pair.connector.value for pair in pairs] + [OWN_CACHE] * (stock is not None)
    theirs = [pair.connector.value for pair in pairs if not pair.connector.is_ours]
    return {"tokens": tokens, "pairs": count,
            "ms": {name: summary((one[name] for one in taken), FIGURES, MS) for name in names},
            "ours_to_theirs": {name: _quotients(taken, ConnectorName.OURS.value, name) for name in theirs
                               if ConnectorName.OURS.value in names},
            "prefill_first_to_theirs": {name: _quotients(taken, ConnectorName.OURS_FIRST.value, name) for name in theirs
                                        if ConnectorName.OURS_FIRST.value in names},
            "own_cache_to_theirs": {name: _quotients(taken, OWN_CACHE, name) for name in theirs},
            "samples_ms": [{name: round(MS * took_s, 2) for name, took_s in one.items()} for one in taken]}


def _quotients(taken: list[dict[str, float]], ours: str, theirs: str) -> dict[str, float]:
    return {"p50": round(statistics.median(one[ours] / one[theirs] for one in taken), 3),
            **summary((one[ours] / one[theirs] for one in taken), "p10 p90")}
