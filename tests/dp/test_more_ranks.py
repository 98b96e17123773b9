# SPDX-License-Identifier: Apache-2.0
"""Four ranks; ranks with front ends of their own; a rank on a head-less node."""

import os
import signal
import time

import pytest

from dp_loads import END_S, MAX_TOKENS, PROMPTS, at_rest, forwards
from vllm_pd.dpbench.group import GroupError


def test_b70_four_ranks_give_the_tokens_of_one(quad, expected):
    """B70: DP 4 without expert parallelism, load 6:2:1:1."""
    quad.ready().start_probe()
    loads = [0, 0, 1, 0, 0, 2, 0, 1, 0, 3]
    asked = [quad.generate(prompt, rank=loads[number % 10], max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS))]  # fmt: skip
    assert quad.tokens(asked) == expected
    probes = at_rest(quad)
    assert forwards(probes)[0] > 20 and not any(probe["collectives"] for probe in probes)


def test_b73_rank_0_dies_while_all_step(quad):
    """B73: the process of rank 0 is killed in the middle of a request of rank 2: an error, within a bound. Ends the group."""
    asked = quad.generate(PROMPTS[0], rank=2, max_tokens=400)
    time.sleep(0.3)
    os.kill(quad.pids["EngineCore_0"], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(GroupError):
        asked.result(END_S)
    assert time.monotonic() < began + END_S
