# SPDX-License-Identifier: Apache-2.0
"""The parts with the KV store: its copies from and to the device without an engine, and two engines that use it."""
from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from _gpu_check.child import PartRun, require
from _gpu_check.engines import (
    GPU_SHARE,
    PAIR_S,
    RUNNER_LINES,
    EngineVariant,
    answer_faults,
    await_count,
    await_peer,
    judge_engines,
    known_answers,
    memory,
    metrics_of,
    plain_pair,
    prepare,
    started_pair,
    wrong_answers,
)
from _gpu_check.results import PartFailed, PartSkipped

NEEDS = ("torch", "msgspec", "numpy", "xxhash")
ARENA_GIB = 2.0
STEPS, FILLED = 100, 8  # steps, and blocks that each of them fills: the arena has room for all
AFTER_S = 30.0  # how long copies may take after the last step
KV_BYTES = str(384 << 20)  # less than all prompts together need: the first are evicted for the last
CPU_TOKENS = 3200


@contextmanager
def arena_folder() -> Iterator[str]:
    """A folder in shared memory, gone at the end."""
    folder = tempfile.mkdtemp(prefix="vllm-pd-gpu-check-", dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_copies(run: PartRun) -> None:
    """Steps fill blocks, some of which the next steps fill anew at once; all are stored, and read back into other
    blocks. In two layouts. Raises PartFailed for a block that is wrong."""
    require(*NEEDS)
    if run.settings.device == "cpu":
        raise PartSkipped("it is for a GPU: copies through pinned memory")
    found: dict[str, Any] = {}
    for axes in ("LBHNC", "BLHNC"):
        with arena_folder() as folder:
            found[axes] = copies_of(axes, folder)
        run.note(layouts=found)
        if found[axes]["wrong"] or found[axes]["not_stored"]:
            raise PartFailed(f"{axes}: {found[axes]['wrong']} blocks came back wrong, {found[axes]['not_stored']} were "
                             "not stored")


def copies_of(axes: str, folder: str) -> dict[str, Any]:
    """The figures of one layout: an 8 B model's blocks of 2 MiB."""
    import torch

    from _gpu_check.caches import LAYOUTS, PatternCache, PatternShape
    from vllm_pd.settings.store import StoreSettings
    from vllm_pd.store.plan import NamedBlock
    from vllm_pd.store.worker import StoreWorker, byte_rows

    layout = next(one for one in LAYOUTS if one.axes == axes and not one.backend)
    cache = PatternCache(layout, PatternShape(32, 256, 8, 16, 128), 0, "cuda")
    worker = StoreWorker(StoreSettings(folder, ARENA_GIB), b"m" * 16, byte_rows(cache.views), ())
    draw, rows = random.Random(0), worker.copies.rows
    weights = torch.randn(2048, 2048, device="cuda")
    sent: dict[bytes, int] = {}  # the value of each stored block by its name
    launch_s = 0.0
    began_s = time.monotonic()
    for step in range(1, STEPS + 1):
        block_ids = draw.sample(range(1, cache.shape.blocks), FILLED)
        for _ in range(8):  # the device is busy for longer than it takes to launch this
            weights = (weights @ weights).tanh()
        values = [step * FILLED + number for number in range(FILLED)]
        cache.blocks[block_ids] = torch.tensor(values, dtype=torch.int32, device="cuda").view(-1, 1, 1, 1, 1)
        while rows - (len(sent) - worker.copies.ended) < FILLED:
            time.sleep(0.0005)
        named = [NamedBlock(value.to_bytes(32, "little"), block)
                 for value, block in zip(values, block_ids, strict=True)]
        at_s = time.monotonic()
        worker.end_step(step, True, named)
        launch_s += time.monotonic() - at_s
        sent |= {block.name: value for block, value in zip(named, values, strict=True)}
    await_count(lambda: worker.copies.ended, len(sent), AFTER_S)
    put_s = time.monotonic() - began_s
    wrong, load_s = read_back(worker, cache, sent)
    stored = worker.store.take_stock()["stored"]
    worker.close()
    moved = len(sent) * worker.slot_bytes / 1e9
    return {"parts_of_a_block": len(byte_rows(cache.views)), "blocks": len(sent), "mb": round(1e3 * moved),
            "rows": rows, "wrong": wrong, "not_stored": len(sent) - stored,
            "launch_us": round(1e6 * launch_s / STEPS, 1),
            "put_gb_per_s": round(moved / put_s, 2), "load_gb_per_s": round(moved / load_s, 2)}


def read_back(worker: Any, cache: Any, sent: dict[bytes, int]) -> tuple[int, float]:
    """How many of the blocks are not as they were, or are gone, and the seconds that the loads took."""
    from vllm_pd.store.plan import NamedBlock

    names, wrong, load_s = list(sent), 0, 0.0
    room = cache.shape.blocks - 1
    for first in range(0, len(names), room):
        some = names[first:first + room]
        began_s, ended = time.monotonic(), None
        worker.begin_loads({"load": [NamedBlock(name, 1 + at) for at, name in enumerate(some)]})
        while not (ended := worker.take_ended()).ended and time.monotonic() - began_s < AFTER_S:
            time.sleep(0.001)
        load_s += time.monotonic() - began_s
        values = cache.blocks[1:1 + len(some)].flatten(1)
        wrong += sum(not bool((row == sent[name]).all()) for row, name in zip(values, some, strict=True))
        wrong += len(ended.failed)
    return wrong, load_s


def check_store(run: PartRun) -> None:
    """A decode and a prefill engine with the key `store`, and less cache than all prompts need. Each prompt is asked
    twice: the second time its KV comes out of the store. Raises PartFailed for a different token, and where nothing was
    loaded."""
    from _connectors.questions import answer_all
    from _demo.rest import left_over

    from vllm_pd.bench.connection import served_model

    v1 = prepare(run)
    if not run.settings.at_once:
        known_answers(run, run.settings.prompts)
    variant = store_variant(run, v1)
    with arena_folder() as folder, started_pair(
            run, variant, {"store": {"folder": folder, "memory_gib": ARENA_GIB}}) as pair:
        url, model = pair.urls[0], served_model(pair.urls[0])
        questions = known_answers(run, run.settings.prompts)
        run.note(engines=await_peer(url, model, pair.broker, PAIR_S), prompts=len(questions))
        wrong: list[list[int]] = []
        for turn in range(2):
            began_s = time.monotonic()
            answers = asyncio.run(answer_all(url, model, [prompt for prompt, _ in questions], margin=0.0))
            wrong.append(wrong_answers(questions, answers))
            run.note(wrong=wrong, **{f"took_{turn + 1}_s": round(time.monotonic() - began_s, 2)})
        await_count(lambda: loads_of(url), 1)
        urls = dict(zip(("decode", "prefill"), pair.urls, strict=True))
        run.note(metrics={name: metrics_of(one, ("vllm:pd_store_", )) for name, one in urls.items()})
        leaks = left_over(urls, model)
        loaded = loads_of(url)
    faults = answer_faults(len(questions), sorted({*wrong[0], *wrong[1]}), leaks)
    if not loaded:
        faults.append("the decode engine has loaded nothing out of the store")
    if faults:
        raise PartFailed("; ".join(faults))
    judge_engines(run, variant, pair.lines)


def store_variant(run: PartRun, v1: bool) -> EngineVariant:
    """How the engines run: on a GPU with model runner V2, graphs and async scheduling."""
    if run.settings.device == "cpu":
        plain, blocks = plain_pair(run, v1), CPU_TOKENS // (32 if v1 else 16)
        return replace(plain, arguments=(*plain.arguments, "--num-gpu-blocks-override", str(blocks)))
    if not v1:
        raise PartSkipped("the store of the patched vLLM is for caches in host memory")
    return EngineVariant({"VLLM_USE_V2_MODEL_RUNNER": "1"},
                         ("--async-scheduling", *memory(run, GPU_SHARE, KV_BYTES)), lines=RUNNER_LINES)


def loads_of(url: str) -> int:
    """How many requests of the engine at `url` were loaded."""
    from vllm_pd.ops.scrape import scrape

    return int(scrape(url).value("vllm:pd_store_loads_total", outcome="loaded"))
