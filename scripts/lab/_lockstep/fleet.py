# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of several ranks each, which serve the model of `llama.py`, and what they count."""
from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _lockstep.plugin import FOLDER_VARIABLE, OVERRIDES, Counts, make_plugin, read_counts
from vllm_pd.ops.launch.plan import FleetPlan, UpOptions, plan_fleet
from vllm_pd.protocol.messages import Role

LOOK_S = 1.0
_ROLES = (Role.PREFILL, Role.DECODE)


class Ranks(NamedTuple):
    """How many data-parallel ranks each engine has."""
    prefill: int
    decode: int


class Counted(NamedTuple):
    """What the ranks of both engines have counted, in the order of the ranks."""
    prefill: list[Counts]
    decode: list[Counts]

    @property
    def is_equal(self) -> bool:
        """Whether the ranks of each engine have made equally many passes."""
        return all(len({rank.passes for rank in ranks}) == 1 for ranks in self)


def plan_lockstep(folder: Path, model: str, port: int, ranks: Ranks, pd: Mapping[str, Any],
                  serve_args: Sequence[str]) -> FleetPlan:
    """The plan of both engines, decode first. `folder` is a new one for what they need and write."""
    plugin = make_plugin(folder / "plugin")
    for role in _ROLES:
        (folder / role.value).mkdir()
    plan = plan_fleet(UpOptions(model, port=port, pd=pd, serve_args=[
        *serve_args, "--hf-overrides", json.dumps(OVERRIDES), "--enable-expert-parallel"]), ())
    path = os.pathsep.join([str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
    sizes = {Role.PREFILL: ranks.prefill, Role.DECODE: ranks.decode}
    return dataclasses.replace(plan, engines=tuple(dataclasses.replace(
        engine, command=(*engine.command, "--data-parallel-size", str(sizes[engine.role])),
        env={**engine.env, "PYTHONPATH": path, FOLDER_VARIABLE: str(folder / engine.role.value)})
        for engine in plan.engines))


def count(folder: Path) -> Counted:
    """What they have counted so far. `folder`: that of `plan_lockstep`."""
    return Counted(*(read_counts(folder / role.value) for role in _ROLES))


def rest(folder: Path) -> Counted:
    """Wait until no rank makes a pass any more. Returns what they have counted then."""
    found = count(folder)
    while (later := (time.sleep(LOOK_S), count(folder))[1]) != found:
        found = later
    return found
