# SPDX-License-Identifier: Apache-2.0
"""Data-parallel groups of real engine processes, started once and off one process that has imported vLLM.

VLLM_PD_DP_TREE names another vLLM to run the same tests on, to see what it does.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dp_forked import Forks
from dp_loads import BOUND_S, MAX_TOKENS, PROMPTS, TREE

from tests import stacks
from tests.stacks import pytest_runtest_makereport  # noqa: F401
from tests.verdict import TokenIds, count_as_crash
from vllm_pd.bench.dp.group import Group, GroupEnded

count_as_crash(GroupEnded)
stacks.prepare()


class AnsweringGroup(Group):
    """A group whose tokens are known as answers."""

    def tokens(self, *arguments: Any, **named: Any) -> list[list[int]]:
        return [TokenIds(tokens) for tokens in super().tokens(*arguments, **named)]


@pytest.fixture(scope="session")
def moe() -> Path:
    """The tiny mixture of experts, beside the tiny Llama."""
    return Path(os.environ["VLLM_PD_TINY_MODEL"]).parent / "tiny-mixtral"


@pytest.fixture(scope="session")
def dense() -> Path:
    """The tiny Llama, which has no experts."""
    return Path(os.environ["VLLM_PD_TINY_MODEL"])


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def starting() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def forks(starting) -> Forks:
    forks = Forks(TREE)
    starting.callback(forks.close)
    return forks


@pytest.fixture(scope="session")
def start_group(forks) -> Callable[..., Group]:
    """Makes a Group."""
    return functools.partial(AnsweringGroup, tree=TREE, start=forks.driver)


@pytest.fixture(scope="session")
def mono(moe, logs, starting, start_group) -> Group:
    """The same model without data parallelism."""
    group = start_group(moe, 1, log=logs / "mono.log")
    starting.callback(group.close)
    return group


@pytest.fixture(scope="session")
def experts_pair(moe, logs, starting, mono, start_group) -> Group:
    """Two ranks, half of the experts each. Its very first request went to rank 1; `first` has what came of it (B72)."""
    group = start_group(moe, 2, log=logs / "experts.log", enable_expert_parallel=True,
                        worker_extension_cls="call_wait.CallWaitProbe")  # fmt: skip
    starting.callback(group.close)
    group.ready()
    group.first = group.generate(PROMPTS[0], rank=1, max_tokens=6)
    group.first.exception(BOUND_S)
    return group


@pytest.fixture
def group(experts_pair) -> Group:
    """The pair of ranks, at rest, with its probes at zero."""
    experts_pair.start_probe()
    return experts_pair


@pytest.fixture(scope="session")
def quad(moe, logs, starting, start_group) -> Group:
    """Four ranks, each with a slice of every expert."""
    group = start_group(moe, 4, log=logs / "quad.log")
    starting.callback(group.close)
    return group


@pytest.fixture(scope="session")
def expected(mono) -> list[list[int]]:
    """What one rank alone answers to each of PROMPTS."""
    mono.ready()
    asked = [mono.generate(prompt, max_tokens=most) for prompt, most in zip(PROMPTS, MAX_TOKENS, strict=True)]
    return mono.tokens(asked)


@pytest.fixture(scope="session")
def dense_expected(dense, logs, start_group) -> list[list[int]]:
    """What one rank of the Llama alone answers to each of PROMPTS."""
    with start_group(dense, 1, log=logs / "dense.log") as alone:
        asked = [alone.generate(prompt, max_tokens=most) for prompt, most in zip(PROMPTS, MAX_TOKENS, strict=True)]
        return alone.tokens(asked)
