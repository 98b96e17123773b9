# SPDX-License-Identifier: Apache-2.0
"""Part `bits`: blocks go both ways between two processes, in every layout, while kernels run on both sides.

After each write D compares its whole cache bit by bit: the blocks that were written with P's, all others with what they
were. After a read P does the same.
"""
from __future__ import annotations

import random
from typing import Any

from _gpu_check.caches import LAYOUTS
from _gpu_check.child import PartRun, require
from _gpu_check.results import PartFailed

NEEDS = ("torch", "nixl", "msgspec", "numpy")
P_SEED, D_SEED = 1, 2


def check(run: PartRun) -> None:
    """Raises PartFailed for the first block that is wrong."""
    require(*NEEDS)
    from _gpu_check.ends import two_ends

    with two_ends(run.settings.device) as (p, d):
        found: dict[str, Any] = {}
        for layout in LAYOUTS:
            found[layout.name] = check_layout(p, d, layout.name)
            run.note(layouts=found)


def check_layout(p: Any, d: Any, layout: str) -> dict[str, Any]:
    """One layout, with fresh caches. Returns its figures."""
    from vllm_pd.transfer.requests import Read, Write

    p.open(layout, P_SEED)
    peer, metadata = d.ask("open", layout, D_SEED)
    p.connect(peer, metadata)
    p.start_kernels()
    d.ask("start_kernels")
    blocks, rates, compared = p.cache.shape.blocks, [], 0
    for key, (ours, theirs) in draw_pairs(blocks).items():
        d.tell("receive", theirs, ours, P_SEED)
        end = p.transfer(Write(key, peer, ours, theirs, [key.encode()]), ordered=False)
        refuse_wrong(layout, f"D, write {key}", d.answer())
        rates.append(end.bytes / end.seconds / 1e9)
        compared += blocks - 1
    # What D has now is P's pattern where P wrote, else its own: P reads some of both.
    written = draw_pairs(blocks)["scattered"]
    for key, (source, seed, theirs) in {"read of D's own": (d_untouched(blocks), D_SEED, None),
                                        "read of what P wrote": (written[1], P_SEED, written[0])}.items():
        target = list(range(1, 1 + len(source)))
        p.cache.expected[target] = p.cache.pattern_of(seed)[theirs or source]
        p.transfer(Read(key, peer, target, source), ordered=False)
        p.steps.device.flush()
        refuse_wrong(layout, f"P, {key}", p.cache.wrong_blocks())
        compared += blocks - 1
    turns = {"P": p.stop_kernels(), "D": d.ask("stop_kernels")}
    if not all(turns.values()):
        raise PartFailed(f"{layout}: no kernels ran beside the transfers: {turns}")
    p.disconnect(peer)
    return {"blocks_compared": compared, "kernel_turns": turns, "best_gb_per_s": round(max(rates), 3)}


def refuse_wrong(layout: str, where: str, wrong: list[int]) -> None:
    """Raises PartFailed where there are wrong blocks."""
    if wrong:
        raise PartFailed(f"{layout}: {where}: {len(wrong)} blocks are wrong: {wrong[:20]}")


def draw_pairs(blocks: int) -> dict[str, tuple[list[int], list[int]]]:
    """P's and D's block ids of each write. Block 0 belongs to the kernels; the last quarter of D's is left alone but
    for its last block."""
    draw = random.Random(blocks)
    quarter = blocks // 4
    pairs = {
        "rising": (list(range(1, quarter)), list(range(quarter, 2 * quarter - 1))),
        "falling": (list(range(quarter, 1, -1)), list(range(1, quarter))),
        "ends": ([1, blocks - 1], [blocks - 1, 1]),
        "scattered": (draw.sample(range(1, blocks), quarter), draw.sample(range(1, 3 * quarter), quarter)),
    }
    return {key: (ours, theirs[:len(ours)]) for key, (ours, theirs) in pairs.items()}


def d_untouched(blocks: int) -> list[int]:
    """Blocks of D that no write goes to."""
    return list(range(3 * blocks // 4, blocks - 1))
