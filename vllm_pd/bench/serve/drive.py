# SPDX-License-Identifier: Apache-2.0
"""Sends a load and notes how each request went."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest, generate
from vllm_pd.bench.prefill_first import prefill_at
from vllm_pd.bench.serve.traffic import LoadPoint, LoadRequest, PromptKind, RequestChain


@dataclass(frozen=True)
class ServedRequest:
    """One request. `at_s`: when it was sent, in seconds since the load began. `answer` is None where it failed, and
    `error` says why."""
    name: str
    kind: PromptKind
    at_s: float
    answer: GenerationAnswer | None
    error: str = ""


@dataclass(frozen=True)
class EntryPoint:
    """Where a request goes: to the server at `url`, and before it to the prefill engine, where clients ask that
    first."""
    url: str
    prefill_url: str = ""


@dataclass(frozen=True)
class ServedLoad:
    """All requests of one point, in the order in which they were sent, and how long it took to the last answer."""
    requests: tuple[ServedRequest, ...]
    took_s: float


async def send_load(entries: Sequence[EntryPoint], model: str, point: LoadPoint, token_ids: bool) -> ServedLoad:
    """Sends a point's load to the servers in turn. A request that fails ends its chain, and no other."""
    served: list[ServedRequest] = []
    turns = itertools.cycle(entries)
    began_s = time.perf_counter()

    def since_s() -> float:
        return time.perf_counter() - began_s

    async def follow(chain: RequestChain) -> None:
        await asyncio.sleep(max(0.0, chain.at_s - since_s()))
        for request in chain.requests:
            await asyncio.sleep(request.pause_s)
            if since_s() > point.for_s:
                return
            served.append(await send_one(next(turns), model, request, token_ids, began_s))
            if served[-1].answer is None:
                return

    async with asyncio.TaskGroup() as group:
        for chain in point.chains():
            group.create_task(follow(chain))
    return ServedLoad(tuple(sorted(served, key=lambda one: one.at_s)), since_s())


async def send_one(entry: EntryPoint, model: str, request: LoadRequest, token_ids: bool,
                   began_s: float) -> ServedRequest:
    """Sends one request over a connection of its own, which counts as part of it, as does a prefill before. `began_s`
    (perf_counter): when the load began."""
    sent_s = time.perf_counter()
    answer, error, params, headers = None, "", None, {"X-Request-Id": f"bench-{uuid.uuid4().hex}"}
    try:
        if entry.prefill_url:
            params = await prefill_at(entry.prefill_url, model, request.prompt, headers)
        asked = GenerationRequest(request.prompt, request.max_tokens, stream=True, ignore_eos=True, token_ids=token_ids,
                                  kv_transfer_params=params)
        with await LoadConnection.open(entry.url) as connection:
            answer = await generate(connection, model, asked, headers, sent_s)
        if answer.usage[1] != request.max_tokens:
            raise LoadError(f"{request.max_tokens} tokens were asked for, {answer.usage[1]} came")
    except (OSError, LoadError) as failed:
        answer, error = None, f"{entry.url}: {failed}"
    return ServedRequest(request.name, request.kind, sent_s - began_s, answer, error)


async def send_each(entries: Sequence[EntryPoint], model: str, requests: Iterable[LoadRequest],
                    token_ids: bool) -> None:
    """Sends requests one after another, each to every server. Raises LoadError for the first that fails."""
    for request, entry in itertools.product(requests, entries):
        served = await send_one(entry, model, request, token_ids, time.perf_counter())
        if served.answer is None:
            raise LoadError(f"{request.name}: {served.error}")
