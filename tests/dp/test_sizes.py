# SPDX-License-Identifier: Apache-2.0
"""The groups that the other tests do not have: a model without experts whose ranks keep in step all the same, experts
sliced and experts spread."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from dp_loads import LOCKSTEP, MAX_TOKENS, PROMPTS, at_rest, forwards

from vllm_pd.bench.dp.group import Group, GroupEnded, GroupError

# Whether the model has experts, how many ranks, whether the experts are spread over them.
GROUPS = [(False, 2, False), (False, 4, False), (True, 2, False), (True, 4, True)]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def started(dense, moe, logs, start_group) -> Iterator[Callable[[int], Group]]:
    """Gives the group GROUPS[number], while the one after it starts already."""
    groups: list[Group] = []
    with contextlib.ExitStack() as stack:

        def group(number: int) -> Group:
            for experts, size, spread in GROUPS[len(groups) : number + 2]:
                model = moe if experts else dense
                groups.append(start_group(model, size, log=logs / f"{model.name}-{size}-{spread}.log",
                                          enable_expert_parallel=spread,
                                          additional_config={} if experts else LOCKSTEP))  # fmt: skip
                stack.callback(groups[-1].close)
            return groups[number].ready()

        yield group


@pytest.mark.parametrize("number", range(len(GROUPS)), ids=[
    f"{'experts' if experts else 'dense'}-{size}{'-spread' if spread else ''}" for experts, size, spread in GROUPS
])  # fmt: skip
def test_b70_unequally_loaded_ranks_give_the_tokens_of_one(started, number, request):
    """B70: 100 mixed requests, half of them at the last rank; equally many forward passes, and then rest."""
    expected = request.getfixturevalue("expected" if GROUPS[number][0] else "dense_expected")
    group = started(number)
    group.start_probe()
    last = group.size - 1
    asked = [group.generate(prompt, rank=last if place % 2 else place // 2 % group.size, max_tokens=most)
             for place, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))]  # fmt: skip
    assert group.tokens(asked) == expected
    probes = at_rest(group)
    assert forwards(probes)[0] > 20 and not any(probe["collectives"] for probe in probes)
    group.close()


def test_a_group_that_does_not_start_says_why(logs, start_group, tmp_path):
    """Which is no crash of one that works: it may be a port that somebody else took meanwhile."""
    with pytest.raises(GroupError, match="before it was up; its log ends with.*Error") as found:
        start_group(tmp_path, 2, log=logs / "no-model.log").ready()
    assert not isinstance(found.value, GroupEnded)
