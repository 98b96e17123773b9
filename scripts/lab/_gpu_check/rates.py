# SPDX-License-Identifier: Apache-2.0
"""Part `rates`: what a write costs in each layout of V1, with blocks of a real model's shape.

A transport moves a block in as many pieces as it has lanes (`vllm_pd.transfer.plan`), unless neighbouring blocks make
them one. "rising": both sides' blocks are neighbours, as in a pool that was never used. "scattered": the receiver's are
not. Beside them a copy of as many bytes within one process, which reads and writes the same memory.
"""
from __future__ import annotations

import random
import time
from typing import Any

import torch

from _gpu_check.bits import D_SEED, NEEDS, P_SEED, refuse_wrong
from _gpu_check.caches import LAYOUTS, PatternShape
from _gpu_check.child import PartRun, require

# Content: keys and values of 128 elements in 16 bits, in elements of 4 bytes. cuda: an 8 B model's block of 2 MiB.
SHAPES = {"cuda": PatternShape(32, 512, 8, 16, 128), "cpu": PatternShape(30, 128, 3, 16, 64)}
ROUNDS = 7


def check(run: PartRun) -> None:
    """Raises PartFailed for a block that is wrong."""
    require(*NEEDS)
    from _gpu_check.ends import two_ends

    found: dict[str, Any] = {}
    with two_ends(run.settings.device) as (p, d):
        for layout in (one.name for one in LAYOUTS if not one.backend):
            found[layout] = rate(p, d, layout, SHAPES[run.settings.device])
            run.note(layouts=found)


def rate(p: Any, d: Any, layout: str, shape: PatternShape) -> dict[str, Any]:
    """The figures of one layout: descriptors of a block, and GB/s of the fastest of ROUNDS writes of both orders."""
    from vllm_pd.transfer.plan import plan
    from vllm_pd.transfer.requests import Write

    p.open(layout, P_SEED, shape)
    peer, metadata = d.ask("open", layout, D_SEED, shape)
    p.connect(peer, metadata)
    ours = list(range(1, 3 * shape.blocks // 4))
    orders = {"rising": ours, "scattered": random.Random(0).sample(range(1, shape.blocks), len(ours))}
    figures: dict[str, Any] = {"pieces_of_a_block": len(plan(p.cache.description, p.cache.description)),
                               "mb": round(len(ours) * p.cache.blocks[0].nbytes / 1e6, 1)}
    for order, theirs in orders.items():
        d.tell("receive", theirs, ours, P_SEED)  # the first write, which also warms up, is compared
        p.transfer(Write(order, peer, ours, theirs, [b"n"]), ordered=False)
        refuse_wrong(layout, f"D, {order}", d.answer())
        best_s = float("inf")
        for number in range(ROUNDS):
            d.tell("await_notice")
            end = p.transfer(Write(f"{order} {number}", peer, ours, theirs, [b"n"]), ordered=False)
            d.answer()
            best_s = min(best_s, end.seconds)
        figures[f"{order}_gb_per_s"] = round(end.bytes / best_s / 1e9, 2)
    figures["copy_gb_per_s"] = round(end.bytes / copy_s(p.cache.blocks[ours].contiguous()) / 1e9, 2)
    p.disconnect(peer)
    return figures


def copy_s(source: torch.Tensor) -> float:
    """Seconds of the fastest of ROUNDS copies of this tensor within its device."""
    target, best_s = torch.empty_like(source), float("inf")
    for _ in range(ROUNDS):
        if source.is_cuda:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
