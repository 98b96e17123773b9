# SPDX-License-Identifier: Apache-2.0
"""Engines with several workers each. What one worker answers must reach the call that asked, and no other."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from dp_loads import BOUND_S, PROMPTS

from vllm_pd.dpbench.group import Group, GroupError

NOWHERE = ["adapter", 1, "/nowhere"]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def sliced(logs, start_group) -> Iterator[Group]:
    """A Llama sliced over two workers, which may have adapters (LoRA)."""
    model = Path(os.environ["VLLM_PD_TINY_MODEL"])
    with start_group(model, 1, log=logs / "sliced.log", tensor_parallel_size=2, enable_lora=True,
                     max_loras=1) as group:  # fmt: skip
        yield group


def test_a_call_that_fails_at_one_worker_and_all_does_not_end_the_engine(sliced):
    """An adapter that is not there, and a profiler that is not configured."""
    before = sliced.generate(PROMPTS[1], max_tokens=8).result(BOUND_S)["tokens"]
    for method, args, why in (("add_lora", [NOWHERE], "adapter"), ("profile", [True], "[Pp]rofiler")):
        with pytest.raises(GroupError, match=why):
            sliced.call(method, *args, timeout_s=BOUND_S)
        assert sliced.generate(PROMPTS[1], max_tokens=8).result(BOUND_S)["tokens"] == before
    assert sliced.call("list_loras", timeout_s=BOUND_S) == [[]]
