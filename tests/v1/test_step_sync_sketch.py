# SPDX-License-Identifier: Apache-2.0
"""B70, B94: vLLM 0.32's data-parallel engine loop, sketched with the step sync in the place of waves: two real loops,
whose forward passes wait for each other."""
import random
import threading
import time

import pytest

from tests.v1 import step_sync_sketch
from tests.v1.step_sync_sketch import CountedGroup
from tests.v1.test_engine_access import park
from tests.v1.test_hazards import prompt
from vllm_pd.dp.interface import StepDecision

QUIET_S = 0.1


@pytest.fixture
def group(model_folder):
    group = CountedGroup(model_folder, threshold=10_000)
    yield group
    group.close()


def check(group: CountedGroup) -> None:
    """All answers are right, nothing is held, no rank makes a step any more, and nobody spoke of waves."""
    group.rest()
    before = group.forwards()
    time.sleep(QUIET_S)
    assert group.forwards() == before
    for loop in group.loops:
        loop.take()
        loop.engine.check_answers()
        assert not [one for one in loop.waves if one.start_wave is not None or one.wave_complete is not None]


@pytest.mark.parametrize("rank", [0, 1])
def test_b70_a_request_at_one_rank_is_all_that_the_others_need(group, rank):
    """Between bursts the group is at rest. A request that ends by its length leaves no dummy behind."""
    busy, idle = group.loops[rank], group.loops[1 - rank]
    for burst in range(3):
        before = group.forwards()[rank]
        busy.add(f"r{burst}", prompt(200), 10)  # two steps of the prompt, nine of the other tokens
        group.wait(lambda name=f"r{burst}": name in busy.engine.ended)
        check(group)
        assert group.forwards()[rank] == before + 11
    assert idle.executor.dummies == group.forwards()[0] and not busy.executor.dummies


@pytest.mark.parametrize("seed", range(3))
def test_b70_requests_at_both_ranks_at_any_time(group, seed):
    draw = random.Random(seed)
    for burst in range(4):
        for number in range(draw.randint(1, 6)):
            group.loops[draw.randint(0, 1)].add(f"{burst}-{number}", prompt(draw.randint(1, 300)), draw.randint(1, 12))
            time.sleep(draw.choice([0, 0, 0.001, 0.01]))
        group.wait(lambda: all(set(loop.engine.ended) == set(loop.engine.prompts) for loop in group.loops))
        check(group)


def test_b94_a_prompt_that_a_peer_prefills_costs_the_group_no_step_and_no_wave(model_folder):
    """What the peer says reaches one rank alone. The others learn of it by the step that this one requests."""
    group = CountedGroup(model_folder)
    park(group.loops[1])
    group.rest()
    before = group.forwards()
    time.sleep(QUIET_S)
    assert group.forwards() == before
    group.loops[1].engine.prefilled("a")
    group.wait(lambda: "a" in group.loops[1].engine.ended)
    check(group)
    assert group.forwards()[0] > before[0]
    group.close()


def test_b70_a_rank_that_does_not_keep_up_is_found(model_folder, monkeypatch):
    """The sketch can fail: a forward pass that the other rank does not make never ends."""
    group = CountedGroup(model_folder, threshold=10_000)
    monkeypatch.setattr(step_sync_sketch, "BARRIER_S", 1.0)
    idle = group.loops[1].core.member
    before_step = idle.before_step
    idle.before_step = lambda has_work, *most: before_step(True, *most) if has_work else StepDecision.IDLE
    group.loops[0].add("a", prompt(20))
    with pytest.raises(AssertionError) as found:
        group.wait(lambda: "a" in group.loops[0].engine.ended)
    assert isinstance(group.loops[0].error, threading.BrokenBarrierError), found.value
    for loop in group.loops:
        loop.core.member.expect_end()
        loop.core.member.close()
