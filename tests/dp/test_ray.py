# SPDX-License-Identifier: Apache-2.0
"""Ranks that are Ray actors, on this machine: nothing but who starts the processes differs."""

import contextlib
import functools
import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest
from dp_loads import BOUND_S, END_S, MAX_TOKENS, PROMPTS, TREE, at_rest, forwards

from vllm_pd.bench.dp.group import Group, GroupError, environment, start_process

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("VLLM_PD_RAY") and importlib.util.find_spec("ray") is None,
                       reason="Ray is not installed: scripts/env.sh could not"),
]  # fmt: skip


@pytest.fixture(scope="module")
def actors(moe, logs) -> Group:
    """Two actors, half of the experts each; the very first request went to rank 1."""
    with contextlib.ExitStack() as stack:
        start = functools.partial(start_process, environment(TREE), [str(Path(__file__).with_name("dp_driver.py"))])
        group = Group(moe, 2, TREE, logs / "ray.log", start=start, data_parallel_backend="ray",
                      enable_expert_parallel=True)
        stack.callback(group.close)
        group.ready()
        group.first = group.generate(PROMPTS[0], rank=1, max_tokens=MAX_TOKENS[0])
        group.first.exception(BOUND_S)
        yield group


def test_b72_b70_actors_give_the_tokens_of_one_rank(actors, expected):
    """B72: the first request is rank 1's. B70: then 40 mixed ones, four of five at rank 0; equally many forwards."""
    assert actors.first.result(BOUND_S)["tokens"] == expected[0]
    actors.start_probe()
    asked = [actors.generate(prompt, rank=0 if number % 5 else 1, max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS[:40], MAX_TOKENS, strict=False))]  # fmt: skip
    assert actors.tokens(asked) == expected[:40]
    probes = at_rest(actors)
    assert forwards(probes)[0] > 10 and [probe["collectives"] for probe in probes] == [0, 0]


def test_b70_idle_actors_run_nothing(actors):
    """B70: and one request at either rank takes the other along."""
    actors.start_probe()
    time.sleep(1)
    assert forwards(actors.take_probe()) == [0, 0]
    for rank in (1, 0):
        actors.generate(PROMPTS[1], rank=rank, max_tokens=6).result(BOUND_S)
    assert min(forwards(at_rest(actors))) >= 12


def test_b73_an_actor_dies(actors):
    """B73: rank 1's process is killed while rank 0 has a request: an error, within a bound. Ends the group."""
    actors.start_probe()
    pids = [probe["pid"] for probe in actors.take_probe()]
    asked = actors.generate(PROMPTS[0], rank=0, max_tokens=400)
    while not all(forwards(actors.take_probe())) and not asked.done():
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(GroupError):
        while time.monotonic() < began + END_S:  # it may have ended before the kill
            asked.result(END_S)
            asked = actors.generate(PROMPTS[0], rank=0, max_tokens=3)
    assert time.monotonic() < began + END_S
