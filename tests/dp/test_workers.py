# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers. What one worker answers must reach the call that asked, and no other."""

from collections.abc import Iterator

import pytest
from dp_loads import BOUND_S, MAX_TOKENS, PROMPTS, at_rest, forwards

from vllm_pd.bench.dp.group import Group, GroupError

NOWHERE = ["adapter", 1, "/nowhere"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture(scope="module")
def sliced(moe, logs, start_group) -> Iterator[Group]:
    """Two ranks, each sliced over two workers, which may have adapters (LoRA)."""
    with start_group(moe, 2, log=logs / "sliced.log", tensor_parallel_size=2, enable_lora=True,
                     max_loras=1) as group:  # fmt: skip
        yield group


def test_a_call_that_fails_at_one_worker_and_all_does_not_end_the_engine(sliced):
    """An adapter that is not there, and a profiler that is not configured."""
    before = sliced.generate(PROMPTS[1], max_tokens=8).result(BOUND_S)["tokens"]
    for method, args, why in (("add_lora", [NOWHERE], "adapter"), ("profile", [True], "[Pp]rofiler")):
        with pytest.raises(GroupError, match=why):
            sliced.call(method, *args, timeout_s=BOUND_S)
        for rank in range(2):
            assert sliced.generate(PROMPTS[1], rank=rank, max_tokens=8).result(BOUND_S)["tokens"] == before
    assert sliced.call("list_loras", timeout_s=BOUND_S) == [[], []]


@pytest.fixture(scope="module")
def pipelines(moe, logs, start_group) -> Iterator[Group]:
    """Two ranks with two layers' workers each, that may have several forward passes on their way."""
    with start_group(moe, 2, log=logs / "pipelines.log", pipeline_parallel_size=2, enable_lora=True,
                     max_loras=1) as group:  # fmt: skip
        yield group


def test_b70_pipelines_give_the_tokens_of_one_worker(pipelines, expected):
    """B70: DP 2 x PP 2, four of five requests at rank 0, which the other one keeps company; calls to the workers in the
    middle of it, good ones and bad. Equally many forward passes, and no more dummies than without a pipeline."""
    pipelines.start_probe()
    asked = [pipelines.generate(prompt, rank=0 if number % 5 else 1, max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS[:40], MAX_TOKENS, strict=False))]  # fmt: skip
    for _ in range(5):
        assert pipelines.call("list_loras", timeout_s=BOUND_S) == [[], []]
        with pytest.raises(GroupError, match="adapter"):
            pipelines.call("add_lora", NOWHERE, timeout_s=BOUND_S)
    assert pipelines.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[2, 2], [2, 2]]
    assert pipelines.tokens(asked) == expected[:40]
    assert forwards(at_rest(pipelines))[0] > 10


def test_b70_a_lone_request_in_a_pipeline_costs_no_dummy_of_its_own_rank(pipelines, expected):
    """B70: its next forward pass is not kept waiting for a dummy that nobody needs."""
    pipelines.start_probe()
    tokens = pipelines.generate(PROMPTS[2], rank=1, max_tokens=20).result(BOUND_S)["tokens"]
    idle, busy = at_rest(pipelines)
    assert len(tokens) == 20
    assert [kind for *_, kind, _ in busy["steps"]].count("dummy") <= 1 and len(idle["steps"]) <= 21
