# SPDX-License-Identifier: Apache-2.0
"""What a prompt is turned into, and what placing makes of it: with a tokenizer of words and engines that only tell."""
import asyncio
import collections
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.router.holding import index_of, with_index
from vllm_pd.events.messages import EngineLoad
from vllm_pd.router import placing as placing_module
from vllm_pd.router import tokens
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.outline import MAX_SCANNED_BYTES, parse
from vllm_pd.router.placing import MAX_WEIGHED, Placer
from vllm_pd.router.policy import ChoiceReason, Policy, RoutingPolicyConfig, choose
from vllm_pd.router.tokenizer import Prompt, Tokenizer
from vllm_pd.router.tokens import (
    LOOP_REST,
    MAX_LOOP_BYTES,
    MAX_QUEUED,
    MAX_REST_S,
    MAX_TEXT_BYTES,
    Tokenized,
    TokenizeRequest,
    TokenPool,
)
from vllm_pd.router.workers import Workers, WorkerSource

BLOCK = 4


class Words:
    """Stands in for a model's tokenizer: one token a word, which is its number."""
    is_fast = True

    def __init__(self, name):
        if name == "missing":
            raise OSError("there is no such folder")

    def partial(self, prompt, chars):
        return None

    def tokens(self, prompt):
        if prompt.messages is not None:
            return [int(word) for message in prompt.messages for word in message["content"].split()]
        return [int(word) for word in prompt.prompt.split()]


@contextlib.asynccontextmanager
async def placing(policy=Policy.KV, loads=None, tokenizer="words", load=Words, workers=("http://a:1", "http://b:1"),
                  **options):
    checked = RouterOptions(port=1, tokenizer=tokenizer, **options).checked()
    metrics = RouterMetrics()
    known = Workers(metrics, 100)
    pool = TokenPool(checked, load)
    placer = Placer(checked, RoutingPolicyConfig(policy=policy), known, pool, metrics,
                    lambda url: (loads or {}).get(url, (None, math.inf)), random.Random(1))
    for url in workers:
        known.add(url, WorkerSource.STATIC).probe_passed()
    with_index(placer, BLOCK)
    async with asyncio.timeout(50):
        while not (pool.loaded or pool.problem):
            await asyncio.sleep(0.01)
    try:
        yield placer, known, pool, metrics
    finally:
        pool.close()


def body(words=range(16), **more):
    return json.dumps({"model": "m", "prompt": " ".join(map(str, words)), **more}).encode()


async def test_b62_what_was_just_sent_draws_its_like_until_its_time_is_over():
    async with placing(expected_s=0.2) as (placer, _, _, metrics):
        plan = await placer.plan([], body(), True)
        assert (plan.request.prompt_tokens, plan.request.prompt_blocks) == (16, 4)
        first, choice = placer.place(plan, ())
        assert choice.overlap_blocks == 0 and choice.reason is ChoiceReason.TIE
        longer = await placer.plan([], body(range(24)), True)
        again, choice = placer.place(longer, ())
        assert again is first and (choice.overlap_blocks, choice.prompt_blocks) == (4, 6)
        other = await placer.plan([], body(range(1, 25)), True)
        assert placer.place(other, ())[1].overlap_blocks == 0, "contiguous from the start only"
        await asyncio.sleep(0.25)
        assert placer.place(longer, ())[1].overlap_blocks == 0
        assert metrics.registry.get_sample_value("vllm:pd_router_overlap_blocks_total") == 4


async def test_what_the_engines_announce_counts_and_a_tried_one_does_not():
    async with placing() as (placer, known, _, _):
        index_of(placer).stored("http://b:1", [1, 2, 3], None, list(range(12)), BLOCK)
        plan = await placer.plan([], body(), True)
        worker, choice = placer.place(plan, ())
        assert (worker.url, choice.reason, choice.overlap_blocks) == ("http://b:1", ChoiceReason.OVERLAP, 3)
        assert placer.place(plan, [worker])[0].url == "http://a:1"
        assert placer.place(plan, list(known)) is None
        known.remove("http://b:1")
        assert placer.place(plan, ())[0].url == "http://a:1"


def test_of_a_very_long_request_only_its_model_and_session_are_read():
    sent = body(prompt=list(range(300_000)), user="u", session_id="s", cache_salt="c")
    assert len(sent) > MAX_SCANNED_BYTES
    outline = parse(sent)
    assert (outline.model, outline.user, outline.session_id, outline.is_scanned) == ("m", "u", "s", False)
    other = parse(sent.replace(b"[0, 1,", b"[0, 2,"))
    assert other.begin != outline.begin, "what is hashed consistently tells them apart"


async def test_the_page_says_what_the_index_has_seen_and_holds():
    async with placing() as (placer, _, _, metrics):
        index_of(placer).stored("http://b:1", [1, 2, 3], None, list(range(12)), BLOCK)
        index_of(placer).removed("http://b:1", [3, 4])
        index_of(placer).drop("http://b:1")
        index_of(placer).stored("http://a:1", [1], None, list(range(4)), BLOCK)
        value = metrics.registry.get_sample_value
        kinds = {kind: value("vllm:pd_router_index_blocks_total", {"kind": kind})
                 for kind in ("stored", "removed", "unknown_removed", "waited", "refused")}
        assert kinds == {"stored": 4, "removed": 1, "unknown_removed": 1, "waited": 0, "refused": 0}
        assert value("vllm:pd_router_index_drops_total") == 1
        for table, size in index_of(placer).sizes().items():
            assert value("vllm:pd_router_index_entries", {"table": table}) == size
        assert value("vllm:pd_router_index_entries", {"table": "workers"}) == 1


async def test_a_load_that_is_told_counts_with_what_was_sent_after_it_and_an_old_one_does_not():
    loads = {"http://a:1": (EngineLoad(total_blocks=100), 0.1),
             "http://b:1": (EngineLoad(total_blocks=100, queued_prefill_tokens=40), 0.1)}
    async with placing(loads=loads) as (placer, _, _, _):
        chosen = []
        for number in range(6):  # prompts of 16 tokens that have nothing in common
            plan = await placer.plan([], body(range(100 * number, 100 * number + 16)), True)
            chosen.append(placer.place(plan, ())[0].url)
        assert chosen[:3] == ["http://a:1"] * 3, "40 tokens wait at b"
        assert "http://b:1" in chosen[3:], "as many have been sent to a since"
        loads["http://a:1"] = (EngineLoad(total_blocks=100, queued_prefill_tokens=10**6), 60.0)
        loads["http://b:1"] = (EngineLoad(total_blocks=100, queued_prefill_tokens=10**6), 0.0)
        plan = await placer.plan([], body(range(5000, 5016)), True)
        assert placer.place(plan, ())[0].url == "http://a:1"


async def test_an_adapter_has_prefixes_of_its_own():
    async with placing() as (placer, known, _, _):
        for worker in known:
            worker.models, worker.base_models = frozenset(("m", "lora")), frozenset(("m", ))
        index_of(placer).stored("http://a:1", [1, 2], None, list(range(8)), BLOCK)
        index_of(placer).stored("http://b:1", [1, 2], None, list(range(8)), BLOCK, lora="lora")
        assert placer.place(await placer.plan([], body(), True), ())[0].url == "http://a:1"
        assert placer.place(await placer.plan([], body(model="lora"), True), ())[0].url == "http://b:1"


@pytest.mark.parametrize("models", ["mn", "mmn"])
async def test_each_model_has_turns_of_its_own(models):
    """With one count for both, requests that alternate would all get the first engine of one and the last of another.
    """
    async with placing(Policy.ROUND_ROBIN, workers=[f"http://{n}:1" for n in "abcd"]) as (placer, known, _, _):
        for worker, model in zip(known, "mmnn", strict=True):
            worker.models = worker.base_models = frozenset((model, ))
        chosen = collections.Counter()
        for model in models * 12:
            chosen[placer.place(await placer.plan([], body(model=model), True), ())[0].url] += 1
        for first, second, model in (("a", "b", "m"), ("c", "d", "n")):
            assert chosen[f"http://{first}:1"] == chosen[f"http://{second}:1"] == 6 * models.count(model)
        for number in range(10):
            await placer.plan([], body(model=f"unknown {number}"), True)
        assert len(placer._turns) == 3


async def test_a_session_keeps_its_worker():
    async with placing(Policy.CONSISTENT_HASH, workers=[f"http://w:{n}" for n in range(1, 9)]) as (placer, _, _, _):
        async def chosen(headers, **more):
            return placer.place(await placer.plan(headers, body(**more), True), ())[0].url

        for headers, more in (([(b"x-session-id", b"s")], {}), ([], {"session_id": "s"}), ([], {"user": "s"})):
            assert {await chosen(headers, prompt=str(n), **more) for n in range(10)} == {await chosen(headers, **more)}
        assert len({await chosen([], user=str(n)) for n in range(50)}) > 4
        assert placer.place(await placer.plan([], b"no json", True), ()) is not None


@pytest.mark.parametrize("sent, outcome", [
    (body(), Tokenized.DONE), (body(prompt=[1, 2, 3, 4]), Tokenized.GIVEN), (body(prompt=[[1, 2, 3, 4], [5]]),
                                                                              Tokenized.GIVEN),
    (body(prompt="no numbers"), Tokenized.FAILED), (b"no json", Tokenized.NONE), (b"[1]", Tokenized.NONE),
    (body(cache_salt="s"), Tokenized.NONE), (body(prompt=None), Tokenized.NONE), (body(prompt=[]), Tokenized.NONE),
    (body(prompt=[1, -1]), Tokenized.FAILED), (body(prompt=[1, "2"]), Tokenized.FAILED),
    (body(prompt=[-1]), Tokenized.FAILED), (body(prompt=[True]), Tokenized.FAILED),
    (body(prompt=None, messages=[{"content": "1 2 3"}]), Tokenized.DONE),
    (body(prompt=None, messages=[{"content": "1"}], chat_template="{{ 1 }}"), Tokenized.NONE),
    (body(prompt=None, messages=[{"content": "1"}], chat_template_kwargs={"a": "x" * MAX_TEXT_BYTES}), Tokenized.LONG),
    (body(range(MAX_TEXT_BYTES // 5)), Tokenized.LONG), (body(prompt=[100] * (MAX_TEXT_BYTES // 4)), Tokenized.GIVEN),
    (body(prompt=[100] * (MAX_SCANNED_BYTES // 5)), Tokenized.LONG),
    (body(prompt=None, messages=[5]), Tokenized.FAILED), (body(prompt=None, messages={"a": 1}), Tokenized.NONE),
], ids=lambda value: str(value[:90]))
async def test_whatever_is_sent_is_routed_and_counted(sent, outcome):
    async with placing() as (placer, _, _, metrics):
        assert placer.place(await placer.plan([], sent, True), ()) is not None
        assert metrics.registry.get_sample_value("vllm:pd_router_tokenized_total", {"outcome": outcome.value}) == 1


@pytest.mark.parametrize("policy", [Policy.KV, Policy.LEAST_LOAD])
async def test_of_a_thousand_workers_some_are_weighed_and_the_header_stays_short(policy, monkeypatch):
    urls = tuple(f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(1000))
    weighed = []

    def chosen(config, request, candidates, rng):
        weighed.append(len(candidates))
        return choose(config, request, candidates, rng)

    monkeypatch.setattr(placing_module, "choose", chosen)
    load = EngineLoad(used_blocks=1, total_blocks=10)
    async with placing(policy, workers=urls, loads={url: (load, 0.0) for url in urls}) as (placer, known, _, _):
        for number, url in enumerate(urls):  # all have the first block, one has all
            held = 4 if number == 777 else 1
            index_of(placer).stored(url, list(range(1, held + 1)), None, list(range(4 * held)), BLOCK)
        used = set()
        for _ in range(5):
            worker, choice = placer.place(await placer.plan([], body(prompt=" ".join(map(str, range(16)))), True), ())
            assert len(choice.header()) < 1000 and "others=" in choice.header()
            assert policy is not Policy.KV or (worker.url, choice.overlap_blocks) == (urls[777], 4)
            used.add(worker.url)
        assert max(weighed) <= MAX_WEIGHED
        assert policy is Policy.KV or len(used) > 1


async def test_a_tokenizer_that_is_missing_slow_or_busy_holds_nobody_up():
    async with placing(tokenizer="missing") as (_, _, pool, _):
        assert "missing" in pool.problem and not pool.loaded
        assert (await pool.tokenize(TokenizeRequest(parse(body()), len, 100)))[0] is Tokenized.NOT_LOADED

    heard = threading.Event()

    class Slow(Words):
        is_fast = False

        def tokens(self, prompt):
            heard.wait(100)
            return super().tokens(prompt)

    async with placing(load=Slow, tokenize_timeout_s=0.05, tokenize_threads=1) as (_, _, pool, _):
        outcomes = await asyncio.gather(*(pool.tokenize(TokenizeRequest(parse(body()), len, 100))
                                          for _ in range(MAX_QUEUED + 5)))
        heard.set()
        assert [found.outcome for found in outcomes].count(Tokenized.BUSY) == 5
        assert {found.outcome for found in outcomes} == {Tokenized.BUSY, Tokenized.LATE}


@pytest.mark.parametrize("size_bytes, quick, in_the_loop", [
    (MAX_LOOP_BYTES, True, [True, False, False, True]), (MAX_LOOP_BYTES + 1, True, [False] * 4),
    (100, False, [False] * 4)])
async def test_the_loop_does_what_is_short_and_leaves_itself_time(monkeypatch, size_bytes, quick, in_the_loop):
    now = [100.0]
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: 0.0))
    done_by = []

    class Noted(Words):
        def tokens(self, prompt):
            done_by.append(threading.current_thread())
            now[0] += 0.005
            return super().tokens(prompt)

    Noted.is_fast = quick
    async with placing(load=Noted, tokenize_timeout_s=50.0) as (_, _, pool, _):
        for wait_s in (0, 0, 0, LOOP_REST * 0.006):
            now[0] += wait_s
            assert (await pool.tokenize(TokenizeRequest(parse(body()), len, size_bytes)))[:2] == (Tokenized.DONE, 16)
    assert [thread is threading.main_thread() for thread in done_by] == in_the_loop


async def test_a_pause_of_the_process_does_not_keep_the_loop_from_its_work_for_long(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: 0.0))

    class Paused(Words):
        def tokens(self, prompt):
            now[0] += 5.0
            return super().tokens(prompt)

    async with placing(load=Paused, tokenize_timeout_s=50.0) as (_, _, pool, _):
        await pool.tokenize(TokenizeRequest(parse(body()), len, 100))
        assert now[0] < pool._rests_until_s <= now[0] + MAX_REST_S + 1e-9


async def test_a_tokenizer_that_could_not_be_loaded_is_tried_again(monkeypatch):
    monkeypatch.setattr(tokens, "RETRY_S", (0.02, 0.05))
    left = [OSError("no network"), OSError("no network"), ValueError("half a file")]

    def load(name):
        if left:
            raise left.pop()
        return Words(name)

    async with placing(load=load) as (_, _, pool, _):
        async with asyncio.timeout(50):
            while not pool.loaded:
                await asyncio.sleep(0.01)
        assert not pool.problem and (await pool.tokenize(TokenizeRequest(parse(body()), len, 100)))[0] is Tokenized.DONE


class TestTokenizer:
    """What is asked of the library, which is replaced by one that only remembers."""

    @pytest.fixture
    def tokenizer(self):
        class Library:
            def __call__(self, text, add_special_tokens, **options):
                return type("Encoding", (), {"input_ids": [int(add_special_tokens), *map(ord, text)]})

            def apply_chat_template(self, messages, **options):
                self.messages, self.options = messages, options
                return "".join(message["content"] for message in messages)

        made = Tokenizer.__new__(Tokenizer)
        made._tokenizer, made._backend, made.cache = Library(), None, None
        return made

    def test_prompts_get_special_tokens_and_chats_do_not_unless_told(self, tokenizer):
        assert tokenizer.tokens(Prompt(prompt="a")) == [1, 97]
        assert tokenizer.tokens(Prompt(prompt=["a", "b"], add_special_tokens=False)) == [0, 97]
        assert tokenizer.tokens(Prompt(messages=[{"content": "a"}])) == [0, 97]
        assert tokenizer.tokens(Prompt(messages=[{"content": "a"}], add_special_tokens=True)) == [1, 97]

    def test_text_parts_are_joined_and_pictures_go_without(self, tokenizer):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert tokenizer.tokens(Prompt(messages=[{"content": parts}])) == [0, 97, 10, 98]
        assert tokenizer.tokens(Prompt(messages=[{"content": [*parts, {"type": "image_url"}]}])) is None

    def test_tool_calls_and_missing_content_are_as_vllm_gives_them_to_templates(self, tokenizer):
        call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
        asked = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "a"}]
        assert tokenizer.tokens(Prompt(messages=asked)) == [0, 97]
        [first, _] = tokenizer._tokenizer.messages
        assert first["content"] == ""
        assert first["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": {"x": 1}}}]
        assert asked[0]["tool_calls"] == [call] and call["function"]["arguments"] == '{"x": 1}'

    def test_the_end_of_a_prompt_is_kept(self, tokenizer):
        assert tokenizer.tokens(Prompt(prompt="abc", truncate_prompt_tokens=2)) == [98, 99]
        assert tokenizer.tokens(Prompt(prompt="abc", truncate_prompt_tokens=-1)) is None

    def test_the_template_hears_what_vllms_does(self, tokenizer):
        tokenizer.tokens(Prompt(messages=[{"content": "a"}], tools=[{"t": 1}], chat_template_kwargs={"k": 1},
                                continue_final_message=True))
        assert tokenizer._tokenizer.options == {
            "tools": [{"t": 1}], "chat_template": None, "tokenize": False, "add_generation_prompt": False,
            "continue_final_message": True, "k": 1}
        tokenizer.tokens(Prompt(messages=[{"content": "a"}], tools=[{"t": 1}], tool_choice="none"))
        assert tokenizer._tokenizer.options["tools"] is None
        assert tokenizer._tokenizer.options["add_generation_prompt"] is True


def test_the_fast_way_gives_the_librarys_ids():
    """In a process of its own, which can do without torch."""
    program = """if True:
        import os, sys
        from vllm_pd.router.tokenizer import LIBRARY
        os.environ.update(LIBRARY)
        from vllm_pd.router.tokenizer import Tokenizer
        tokenizer = Tokenizer(sys.argv[1])
        assert tokenizer._backend is not None and "torch" not in sys.modules
        for text in ("", "a", "The capital of France is", "\u00e9\U0001f600 <|im_start|>user\\n x", "7" * 300):
            for special in (True, False):
                library = tokenizer._tokenizer(text, add_special_tokens=special).input_ids
                assert list(tokenizer._ids(text, special)) == library, text
    """
    subprocess.run([sys.executable, "-c", program, os.environ["VLLM_PD_TINY_MODEL"]], check=True, timeout=300)
