# SPDX-License-Identifier: Apache-2.0
"""What the groups are asked, and what their probes say."""

import os
import random
import time
from pathlib import Path

from vllm_pd.bench.dp.group import Group

HORIZON_STEPS = 8  # vllm_pd.dp.interface.Settings
_tree = os.environ.get("VLLM_PD_DP_TREE")
TREE = Path(_tree) if _tree else None
LOCKSTEP = {"dp_sync": {"lockstep": True}}  # has ranks without experts keep in step, too
CALL_WAIT_S = 4.0
BOUND_S = 100.0  # for whatever comes at once, unless the machine is busy
END_S = 60.0  # the longest that a group may take to end when one of its processes is dead


def _prompts() -> list[list[int]]:
    generator = random.Random(70)
    lengths = [1, 2, 15, 16, 17, 40, 90, 127, 128, 129, 200]
    return [[generator.randrange(100, 49000) for _ in range(generator.choice(lengths))] for _ in range(100)]


PROMPTS = _prompts()
MAX_TOKENS = [random.Random(seed).choice([1, 2, 5, 9, 16]) for seed in range(100)]


def forwards(probes: list[dict]) -> list[int]:
    """How many forward passes each rank has run, dummies included."""
    return [len(probe["steps"]) for probe in probes]


def at_rest(group: Group, within_s: float = BOUND_S) -> list[dict]:
    """The probes, once the ranks have run equally many forward passes and run no more."""
    deadline = time.monotonic() + within_s
    before = None
    while True:
        probes = group.take_probe()
        if forwards(probes) == before and len(set(before)) == 1:
            return probes
        before = forwards(probes)
        assert time.monotonic() < deadline, f"ranks do not come to rest: {before}"
        time.sleep(0.2)


def trailing_dummies(probe: dict) -> int:
    """Dummy forward passes after this rank's last real one."""
    kinds = [step[2] for step in probe["steps"]]
    return next((count for count, kind in enumerate(reversed(kinds)) if kind == "forward"), len(kinds))
