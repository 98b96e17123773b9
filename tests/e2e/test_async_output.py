# SPDX-License-Identifier: Apache-2.0
"""Asynchronous output processing, CUDA's default: an engine processes the output of a step during the next one."""

import contextlib
from collections.abc import Iterator

import pytest
from harness import RUNNING_JOBS, Pair, lend, prompt, start_pair
from test_states import GRANTED, TestAbort, granted
from test_tokens import test_b1_greedy_tokens_equal_those_of_one_engine as greedy

STATES = "[job.state.value for job in disagg.prefill_jobs._jobs.values()]"
LOOP = "while disagg.has_work():\n    driver.step()"  # as that of MQLLMEngine, which sleeps when there is no work


@pytest.fixture(scope="module")
def processes(zygote) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield start_pair(zygote, stack, p_options={"max_num_batched_tokens": 1024}, async_output=True)


@pytest.fixture
def pair(processes) -> Iterator[Pair]:
    """A pair on a platform that has it. At rest before and after each test (B20)."""
    yield from lend(processes)


class TestAsyncAbort(TestAbort):
    """B25, with it on D."""


del TestAbort  # those with the other pair are in their own module


def test_an_engine_that_prefills_has_it_off(pair):
    is_on = "engine.model_config.use_async_output_proc"
    assert pair.d.evaluate(is_on) and not pair.p.evaluate(is_on)


def test_b1_with_it_on_d(pair, mono):
    greedy(pair, mono)


def test_p_may_send_a_job_after_the_step_that_computed_it(pair):
    """Three jobs of one step each: none waits for the next one's step, and the last one takes no step of its own."""
    pair.p.do("hold", held=True)
    names = pair.d.add_all([prompt(513 + number, "in a row") for number in range(3)])
    pair.d.wait_until(GRANTED.format(3))
    pair.p.wait_until(f"{RUNNING_JOBS} == 3")  # D counts a grant when it sends it
    pair.p.do("step", count=1)
    first, *others = pair.p.evaluate(STATES)
    assert first == "computed" and len(others) == 2 and {*others} <= {"queued", "computing"}
    pair.p.do("step", count=1)
    assert pair.p.evaluate(STATES)[-2:] in (["computed", "queued"], ["computed", "computing"])
    pair.p.do("step", count=1)
    assert pair.p.evaluate(STATES)[-1:] == ["computed"]
    pair.p.do("hold", held=False)
    pair.d.wait(names)


@pytest.fixture
def tiny_pool(pair) -> Iterator[None]:
    """D takes every prompt of more than 100 tokens for one that will never fit, and steps only when told."""
    pool = pair.d.evaluate("scheduler.block_manager.num_total_gpu_blocks")
    yield
    pair.d.execute(f"scheduler.block_manager.num_total_gpu_blocks = {pool}")


def test_b30_a_prompt_too_long_for_the_pool_is_answered_while_another_is_parked(pair, tiny_pool):
    granted(pair, "parked", prompt(70, "parked"))
    pair.d.do("hold", held=True)
    pair.d.execute("scheduler.block_manager.num_total_gpu_blocks = 8")
    pair.d.add(prompt(200, "too long"), "too long")
    pair.d.do("step", count=1)  # that loop steps after each message
    pair.d.execute(LOOP)
    assert "too long" in pair.d.evaluate("list(driver.finished)")
    pair.d.do("hold", held=False)
    pair.p.do("hold", held=False)
    assert [len(result["outputs"][0]["token_ids"]) for result in pair.d.wait(["too long", "parked"])] == [0, 8]


def test_b30_it_is_answered_although_those_it_was_scheduled_with_are_aborted(pair, tiny_pool):
    granted(pair, "parked", prompt(70, "parked beside"))
    pair.d.do("hold", held=True)
    pair.d.add(prompt(40, "beside"), "beside", prompt_logprobs=0, max_tokens=100)
    pair.d.do("step", count=3)
    pair.d.execute("scheduler.block_manager.num_total_gpu_blocks = 8")
    pair.d.add(prompt(200, "too long beside"), "too long")
    pair.d.do("step", count=1)
    pair.d.abort("beside")
    pair.d.execute(LOOP)
    assert "too long" in pair.d.evaluate("list(driver.finished)")
    pair.d.do("hold", held=False)
    pair.p.do("hold", held=False)
    pair.d.wait(["too long", "parked"])
