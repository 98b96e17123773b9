# SPDX-License-Identifier: Apache-2.0
"""Prompts whose first blocks show where they go: the rest is found when another one begins alike, and counts then."""
import asyncio
import contextlib
import json
import threading

import pytest

from tests.router.test_placing import BLOCK, Words, placing
from vllm_pd.router import placing as placing_module
from vllm_pd.router.pieces import Beginning
from vllm_pd.router.placing import CHARS_PER_TOKEN, OPENING_BLOCKS
from vllm_pd.router.tokens import MAX_BEGUN_BYTES, MAX_BEGUN_MESSAGES
from vllm_pd.router.workers import Source

OPENING = OPENING_BLOCKS * BLOCK  # tokens
LONG = range(100, 100 + 10 * OPENING)


class Openings(Words):
    """Of texts with more than its words, the beginning can be had."""
    def __init__(self, name):
        super().__init__(name)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def beginning(self, prompt, chars):
        ids = Words.tokens(self, prompt)
        count = chars // CHARS_PER_TOKEN
        return Beginning(ids[:count], len(ids)) if len(ids) > 2 * count else None

    def tokens(self, prompt):
        if threading.current_thread() is not threading.main_thread():
            self.may_go_on.wait(100)
        return super().tokens(prompt)


def body(words):
    return json.dumps({"model": "m", "prompt": " ".join(map(str, words))}).encode()


def sample(metrics, outcome):
    return metrics.registry.get_sample_value("vllm:pd_router_tokenized_total", {"outcome": outcome}) or 0


def held(placer, words):
    return placer.index.matches(placer.index.hashes(words), 0.0)


async def test_a_new_prompt_is_placed_by_its_beginning_and_draws_its_like_to_its_end():
    async with placing(load=Openings, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        plan = await placer.plan([], body(LONG), True)
        worker, choice = placer.place(plan, ())
        assert (plan.request.prompt_tokens, choice.prompt_blocks) == (len(LONG), len(LONG) // BLOCK)
        assert len(plan.hashes) == OPENING_BLOCKS and held(placer, LONG) == {worker.url: OPENING_BLOCKS}
        again = await placer.plan([], body(LONG), True)
        assert again.rest is None and held(placer, LONG) == {worker.url: len(LONG) // BLOCK}
        assert placer.place(again, ())[1].overlap_blocks == len(LONG) // BLOCK
        assert (sample(metrics, "begun"), sample(metrics, "done")) == (1, 1)
        assert not placer._begun


async def test_where_prompts_part_decides_and_not_how_much_was_read_first():
    """Many with a common beginning, of any length, come after each other: each is placed as if all were read."""
    async with placing(load=Openings, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        for number, shared in enumerate((1, BLOCK, OPENING - 1, OPENING, OPENING + 1, 2 * OPENING, len(LONG) - 1)):
            common = range(1000 * number, 1000 * number + shared)
            first = None
            for tail in range(4):
                start = 50_000 + 1000 * (10 * number + tail)
                words = [*common, *range(start, start + len(LONG) - shared)]
                plan = await placer.plan([], body(words), True)
                known = max(held(placer, words).values(), default=0)
                assert known == (shared // BLOCK if tail else 0)
                others = [one for one in placer._workers if one is not first] if first else ()
                worker, choice = placer.place(plan, others)
                first = first or worker
                assert worker is first and choice.overlap_blocks == known
        assert sample(metrics, "begun") >= 7 and sample(metrics, "done") > 7


async def test_of_many_at_once_all_wait_for_the_first_ones_rest():
    async with placing(load=Openings, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, pool, _):
        worker, _ = placer.place(await placer.plan([], body(LONG), True), ())
        pool._rests_until_s = float("inf")
        plans = await asyncio.gather(*(placer.plan([], body(LONG), True) for _ in range(10)))
        assert held(placer, LONG) == {worker.url: len(LONG) // BLOCK}
        assert [len(plan.hashes) for plan in plans] == [len(LONG) // BLOCK] * 10 and not placer._begun


async def test_the_rest_counts_where_the_request_went_last_and_not_at_one_that_has_left():
    async with placing(load=Openings, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, workers, _, _):
        plan = await placer.plan([], body(LONG), True)
        first, _ = placer.place(plan, ())
        second, _ = placer.place(plan, [first])
        await placer.plan([], body(LONG), True)
        assert held(placer, LONG) == {first.url: OPENING_BLOCKS, second.url: len(LONG) // BLOCK}
        other = range(9000, 9000 + len(LONG))
        worker, _ = placer.place(await placer.plan([], body(other), True), ())
        workers.add("http://c:1", Source.STATIC).good()
        workers.remove(worker.url)
        placer.index.drop(worker.url)
        await placer.plan([], body(other), True)
        assert held(placer, other) == {} and not placer._begun


@pytest.mark.parametrize("case", ["late", "failed", "closed"])
async def test_a_rest_that_does_not_come_harms_nobody(case):
    async with placing(load=Openings, tokenize_timeout_s=0.05, expected_s=1000.0) as (placer, _, pool, _):
        plan = await placer.plan([], body(LONG), True)
        worker, _ = placer.place(plan, ())
        pool._tokenizer.may_go_on.clear()
        if case == "failed":
            pool._tokenizer.tokens = None
        if case == "closed":
            pool.close()
        with contextlib.suppress(RuntimeError if case == "closed" else ()):
            await placer._go_on(plan.hashes)
        pool._tokenizer.may_go_on.set()
        assert held(placer, LONG) == {worker.url: OPENING_BLOCKS} and not placer._begun
        assert placer.place(plan, [worker]) is not None


async def test_what_nobody_asked_for_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(placing_module, "MAX_BEGUN", 3)
    async with placing(load=Openings, expected_s=1000.0) as (placer, _, _, _):
        for number in range(5):
            placer.place(await placer.plan([], body(range(1000 * number, 1000 * number + len(LONG))), True), ())
        assert len(placer._begun) == 3
        placer._now = lambda: asyncio.get_running_loop().time() + 2000.0
        placer.place(await placer.plan([], body(LONG), True), ())
        assert len(placer._begun) == 1


async def test_a_huge_request_or_one_of_many_messages_is_for_the_threads():
    async with placing(load=Openings, tokenize_timeout_s=50.0) as (placer, _, _, metrics):
        assert (await placer.plan([], body(LONG) + b" " * MAX_BEGUN_BYTES, True)).rest is None
        said = [{"role": "user", "content": str(number)} for number in LONG][:MAX_BEGUN_MESSAGES + 1]
        assert (await placer.plan([], json.dumps({"messages": said}).encode(), True)).rest is None
        assert (await placer.plan([], json.dumps({"messages": said[1:]}).encode(), True)).rest is not None
        assert sample(metrics, "done") == 2
