# SPDX-License-Identifier: Apache-2.0
"""Prompts whose first blocks show where they go: the rest is found when another one begins alike, and counts then."""
import asyncio
import json
import random
import threading
from types import SimpleNamespace

import pytest

from tests.router.holding import index_of, with_index
from tests.router.test_placing import BLOCK, Words, placing
from vllm_pd.router import deferred, tokens
from vllm_pd.router.deferred import DeferredPrompt
from vllm_pd.router.placing import CHARS_PER_TOKEN, PARTIAL_BLOCKS
from vllm_pd.router.token_cache import PartialTokens
from vllm_pd.router.tokens import LOOP_REST, MAX_PARTIAL_BYTES, MAX_QUEUED
from vllm_pd.router.workers import WorkerSource

PARTIAL = PARTIAL_BLOCKS * BLOCK  # tokens
LONG = range(100, 100 + 10 * PARTIAL)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing takes long, whatever the machine does meanwhile: so the loop has never to rest."""
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: 100.0, thread_time=lambda: 0.0))


class DeferringTokenizer(Words):
    """Of texts with more than its words, the beginning can be had."""
    def __init__(self, name):
        super().__init__(name)
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def partial(self, prompt, chars):
        ids = Words.tokens(self, prompt)
        count = chars // CHARS_PER_TOKEN
        return PartialTokens(ids[:count], len(ids)) if len(ids) > 2 * count else None

    def tokens(self, prompt):
        if threading.current_thread() is not threading.main_thread():
            self.may_go_on.wait(100)
        return super().tokens(prompt)


def body(words):
    return json.dumps({"model": "m", "prompt": " ".join(map(str, words))}).encode()


def sample(metrics, outcome):
    return metrics.registry.get_sample_value("vllm:pd_router_tokenized_total", {"outcome": outcome}) or 0


def held(placer, words):
    return index_of(placer).matches(index_of(placer).hashes(words), 0.0)


async def test_a_new_prompt_is_placed_by_its_beginning_and_draws_its_like_to_its_end():
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        plan = await placer.plan([], body(LONG), True)
        worker, choice = placer.place(plan, ())
        assert (plan.request.prompt_tokens, choice.prompt_blocks) == (len(LONG), len(LONG) // BLOCK)
        assert len(plan.hashes[BLOCK]) == PARTIAL_BLOCKS and held(placer, LONG) == {worker.url: PARTIAL_BLOCKS}
        again = await placer.plan([], body(LONG), True)
        assert again.deferred is None and held(placer, LONG) == {worker.url: len(LONG) // BLOCK}
        assert placer.place(again, ())[1].overlap_blocks == len(LONG) // BLOCK
        assert (sample(metrics, "begun"), sample(metrics, "done")) == (1, 1)
        assert not len(placer.deferred)


async def test_where_prompts_part_decides_and_not_how_much_was_read_first():
    """Many with a common beginning, of any length, come after each other: each is placed as if all were read."""
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        for number, shared in enumerate((1, BLOCK, PARTIAL - 1, PARTIAL, PARTIAL + 1, 2 * PARTIAL, len(LONG) - 1)):
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
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, pool, _):
        worker, _ = placer.place(await placer.plan([], body(LONG), True), ())
        pool._rests_until_s = float("inf")
        plans = await asyncio.gather(*(placer.plan([], body(LONG), True) for _ in range(10)))
        assert held(placer, LONG) == {worker.url: len(LONG) // BLOCK}
        assert [len(plan.hashes[BLOCK]) for plan in plans] == [len(LONG) // BLOCK] * 10 and not len(placer.deferred)


async def test_the_rest_counts_where_the_request_went_last():
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        plan = await placer.plan([], body(LONG), True)
        first, _ = placer.place(plan, ())
        second, _ = placer.place(plan, [first])
        await placer.plan([], body(LONG), True)
        assert held(placer, LONG) == {first.url: PARTIAL_BLOCKS, second.url: len(LONG) // BLOCK}
        assert (plan.request.prompt_tokens, plan.request.prompt_blocks) == (len(LONG), len(LONG) // BLOCK)
        assert placer.place(plan, [first])[1].overlap_blocks == len(LONG) // BLOCK
        assert metrics.registry.get_sample_value("vllm:pd_router_rests_total", {"outcome": "done"}) == 1


async def test_b102_the_rest_counts_at_the_prefill_engine_and_at_the_decode_engine():
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, known, _, _):
        for url in ("http://p:1", "http://q:1"):
            known.add(url, WorkerSource.STATIC, prefills=True).probe_passed()
        with_index(placer, BLOCK)
        plan = await placer.plan([], body(LONG), True)
        p, (d, _) = placer.place_prefill(plan), placer.place(plan, ())
        assert p.prefills and not d.prefills
        assert held(placer, LONG) == {p.url: PARTIAL_BLOCKS, d.url: PARTIAL_BLOCKS}
        again = await placer.plan([], body(LONG), True)
        assert held(placer, LONG) == {p.url: len(LONG) // BLOCK, d.url: len(LONG) // BLOCK}
        assert placer.place_prefill(again) is p and placer.place(again, ())[0] is d


async def test_b69_a_prompt_of_which_a_window_keeps_only_the_end_is_read_to_its_end():
    """Its first blocks are no hit, and yet not unknown."""
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, _, metrics):
        index, blocks = index_of(placer), len(LONG) // BLOCK
        index.stored("http://b:1", list(range(1, blocks + 1)), None, list(LONG))
        index.mark("http://b:1", 2, [blocks - 1, blocks])
        assert held(placer, LONG[:PARTIAL]) == {} and held(placer, LONG) == {"http://b:1": blocks}
        worker, choice = placer.place(await placer.plan([], body(LONG), True), ())
        assert (worker.url, choice.overlap_blocks) == ("http://b:1", blocks) and sample(metrics, "begun") == 0


@pytest.mark.parametrize("happens", ["left", "dropped", "cleared", "evicted"])
async def test_what_is_gone_does_not_come_back(happens):
    """Between a prompt that was begun and its like the worker has lost the first blocks: so it has lost the others."""
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, workers, _, _):
        plan = await placer.plan([], body(LONG), True)
        worker, _ = placer.place(plan, ())
        if happens == "left":
            workers.add("http://c:1", WorkerSource.STATIC).probe_passed()
            workers.remove(worker.url)
            index_of(placer).drop(worker.url)
        elif happens == "dropped":
            index_of(placer).drop(worker.url)
        elif happens == "cleared":
            index_of(placer).cleared(worker.url)
        else:
            index_of(placer).stored(worker.url, [1, 2, 3], None, LONG[:PARTIAL])
            index_of(placer).removed(worker.url, [3])
        await placer.plan([], body(LONG), True)
        assert held(placer, LONG) == ({worker.url: 2} if happens == "evicted" else {})
        assert not len(placer.deferred)


@pytest.mark.parametrize("case, outcome", [("late", "late"), ("failed", "failed"), ("closed", "failed"),
                                           ("full", "busy")])
async def test_a_rest_that_does_not_come_harms_nobody(case, outcome):
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=0.05,
                       expected_s=1000.0) as (placer, _, pool, metrics):
        plan = await placer.plan([], body(LONG), True)
        worker, _ = placer.place(plan, ())
        pool._tokenizers[""].may_go_on.clear()
        if case == "failed":
            pool._tokenizers[""].tokens = None
        if case == "closed":
            pool.close()
        if case == "full":
            pool._queued = MAX_QUEUED
        await asyncio.gather(*placer.deferred.finish_matching(plan.hashes[BLOCK]))
        pool._tokenizers[""].may_go_on.set()
        assert metrics.registry.get_sample_value("vllm:pd_router_rests_total", {"outcome": outcome}) == 1
        assert held(placer, LONG) == {worker.url: PARTIAL_BLOCKS} and not len(placer.deferred)
        assert placer.place(plan, [worker]) is not None


async def test_one_who_goes_away_while_he_waits_leaves_the_others_their_rest():
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0, expected_s=1000.0) as (placer, _, pool, _):
        worker, _ = placer.place(await placer.plan([], body(LONG), True), ())
        pool._tokenizers[""].may_go_on.clear()
        pool._rests_until_s = float("inf")
        waiting = [asyncio.create_task(placer.plan([], body(LONG), True)) for _ in range(3)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        pool._tokenizers[""].may_go_on.set()
        await asyncio.gather(*waiting[1:])
        assert held(placer, LONG) == {worker.url: len(LONG) // BLOCK}


async def test_a_beginning_that_took_long_is_not_tried_again_at_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: now[0]))

    class Odd(DeferringTokenizer):
        def partial(self, prompt, chars):
            now[0] += 0.01
            return super().partial(prompt, chars)

    async with placing(load=Odd, tokenize_timeout_s=50.0) as (placer, _, _, _):
        begun = []
        for number, wait_s in enumerate((0, 0, LOOP_REST * 0.011)):
            now[0] += wait_s
            plan = await placer.plan([], body(range(1000 * number, 1000 * number + len(LONG))), True)
            begun.append(plan.deferred is not None)
        assert begun == [True, False, True]


async def test_a_huge_request_is_for_the_threads():
    async with placing(load=DeferringTokenizer, tokenize_timeout_s=50.0) as (placer, _, _, metrics):
        assert (await placer.plan([], body(LONG) + b" " * MAX_PARTIAL_BYTES, True)).deferred is None
        assert sample(metrics, "done") == 1


async def nothing():
    """A rest."""


async def test_what_nobody_asks_for_is_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(deferred, "MAX_DEFERRED", 3)
    kept, now = deferred.DeferredPrompts(), asyncio.get_running_loop().time
    one, again = DeferredPrompt(7, nothing), DeferredPrompt(8, nothing)
    kept.add(one, now() + 0.05)
    kept.add(again, now() + 0.05)
    kept.add(one, now() + 0.1)  # a second try
    async with asyncio.timeout(50):
        while len(kept):
            await asyncio.sleep(0.01)
    for number in range(5):
        kept.add(DeferredPrompt(number, nothing), now() + 1000)
    assert len(kept) == 3 and not kept.finish_matching([0, 1, 9])
    kept.add(DeferredPrompt(4, nothing), now() + 1000)  # the older one stays
    tasks = kept.finish_matching([2, 4])
    assert len(tasks) == 2 and kept.finish_matching([2]) == tasks[:1]
    await asyncio.gather(*tasks)
    await asyncio.sleep(0)
    assert len(kept) == 1
    kept.add(DeferredPrompt(5, nothing), now())
    assert not kept.finish_matching([5]), "its time is over"
    kept.close()
    assert not len(kept)


@pytest.mark.parametrize("seed", range(30))
async def test_placers_that_read_the_beginning_and_the_whole_see_the_same(seed):
    """Two take the same prompts, many of which begin as earlier ones do, while time passes and events come: in the end
    both know the same of each prompt at each worker."""
    draw = random.Random(seed)
    urls = ("http://a:1", "http://b:1", "http://c:1")
    now = [100.0]

    class Uneven(DeferringTokenizer):
        def partial(self, prompt, chars):
            return super().partial(prompt, chars + draw.choice([0, 0, 4, 40, 80]))

    def prompt(earlier):
        start = draw.randrange(1, 10 ** 6)
        new = range(start, start + draw.randint(1, 120))
        old = draw.choice(earlier) if earlier and draw.random() < 0.75 else []
        return [*old[:draw.randint(0, len(old))], *new] if draw.random() < 0.85 or not old else old

    async with (placing(load=Uneven, workers=urls, tokenize_timeout_s=50.0) as (begins, _, _, metrics),
                placing(workers=urls, tokenize_timeout_s=50.0) as (reads, all_workers, _, _)):
        begins._now = reads._now = lambda: now[0]
        begins.deferred._loop = SimpleNamespace(time=lambda: now[0], create_task=asyncio.create_task,
                                                 call_at=lambda *given: None)
        earlier, sent, stored = [], [], []
        for _ in range(60):
            chance = draw.random()
            if chance < 0.65 or not sent:
                words = prompt(earlier)
                plans = [await placer.plan([], body(words), True) for placer in (begins, reads)]
                names = index_of(reads).hashes(words)
                assert index_of(begins).matches(names, now[0]) == index_of(reads).matches(names, now[0])
                worker, choice = begins.place(plans[0], ())
                same = [other for other in all_workers if other.url != worker.url]
                assert reads.place(plans[1], same)[1].overlap_blocks == choice.overlap_blocks
                earlier.append(words)
                sent.append((worker.url, words))
            elif chance < 0.8:
                now[0] += draw.choice([0.1, 1, 3, 6])
            elif chance < 0.95:
                url, words = draw.choice(sent[-5:])
                names = index_of(reads).hashes(words)
                for placer in (begins, reads):
                    index_of(placer).stored(url, names, None, words[:len(names) * BLOCK])
                stored.append((url, names))
            elif stored:
                url, names = draw.choice(stored)
                gone = [name for name in names if name in index_of(reads).engine_hashes(url)]
                for placer in (begins, reads):
                    index_of(placer).removed(url, gone)
        assert sample(metrics, "begun") > 3
