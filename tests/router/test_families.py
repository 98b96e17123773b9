# SPDX-License-Identifier: Apache-2.0
"""B68: two models behind one router, each routed by its own tokenizer, block size and engines."""
import asyncio
import contextlib
import math
import random
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from tests.fakes.faulty_engine import FaultyEngine, serving
from tests.router.test_event_formats import Publisher
from tests.router.test_placing import Words
from vllm_pd.router import tokens
from vllm_pd.router.families import Families
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.placing import Placer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.tokens import TokenPool
from vllm_pd.router.workers import WorkerFailure, Workers, WorkerSource

WORDS = list(range(100, 128))
TEXT = " ".join(map(str, WORDS))


class Doubled(Words):
    """Another model's: the same words have other tokens."""

    def tokens(self, prompt):
        return [2 * token for token in super().tokens(prompt)]


def load(name):
    return {"/models/one": Words, "/models/two": Doubled}[name](name)


def body(model):
    return msgspec.json.encode({"model": model, "prompt": TEXT})


@contextlib.asynccontextmanager
async def fleet(**served):
    """A placer over workers of these models: name of the worker -> (model, root)."""
    options, metrics = RouterOptions(port=1).checked(), RouterMetrics()
    workers, pool = Workers(metrics, 100), TokenPool(options, load)
    placer = Placer(options, RoutingPolicyConfig(policy=Policy.KV), workers, pool, metrics,
                    lambda url: (None, math.inf), random.Random(1))
    try:
        for name, (model, root) in served.items():
            worker = workers.add(f"http://{name}:1", WorkerSource.STATIC)
            worker.models = worker.base_models = frozenset({model})
            worker.root = root
            worker.probe_passed()
            pool.load_for(placer.families.join(worker).name, root)
        for loading in pool._loading.values():
            await loading
        yield placer, workers, metrics
    finally:
        placer.close()
        pool.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The loop tokenises by itself, and never has to rest."""
    monkeypatch.setattr(tokens, "time", SimpleNamespace(monotonic=lambda: 100.0, thread_time=lambda: 0.0))


def held(placer, worker, token_ids, size):
    """The worker announces these."""
    index = placer.families.join(worker).index(size)
    blocks = [*range(1, len(token_ids) // size + 1)]
    index.stored(worker.url, blocks, None, token_ids[:len(blocks) * size], size)


async def test_b68_each_model_has_its_own_tokenizer():
    async with fleet(a=("one", "/models/one"), b=("two", "/models/two"),
                     c=("two", "/models/two")) as (placer, workers, _):
        held(placer, workers.get("http://a:1"), WORDS, 4)
        held(placer, workers.get("http://c:1"), [2 * token for token in WORDS], 4)
        for model, url in (("one", "http://a:1"), ("two", "http://c:1")) * 2:
            worker, choice = placer.place(await placer.plan([], body(model), True), ())
            assert (worker.url, choice.overlap_blocks, choice.prompt_blocks) == (url, 7, 7)


async def test_b68_equal_tokens_of_another_model_are_no_hit():
    async with fleet(a=("one", "/models/one"), b=("two", "/models/one")) as (placer, workers, _):
        held(placer, workers.get("http://a:1"), WORDS, 4)
        worker, choice = placer.place(await placer.plan([], body("two"), True), ())
        assert worker.url == "http://b:1" and choice.overlap_blocks == 0


async def test_b68_engines_of_one_model_may_have_blocks_of_different_sizes():
    async with fleet(a=("one", "/models/one"), b=("one", "/models/one")) as (placer, workers, metrics):
        held(placer, workers.get("http://a:1"), WORDS[:20], 4)  # 20 of 28 tokens
        held(placer, workers.get("http://b:1"), WORDS, 8)  # 24 of them
        worker, choice = placer.place(await placer.plan([], body("one"), True), ())
        assert (worker.url, choice.overlap_blocks, choice.prompt_blocks) == ("http://b:1", 3, 3)
        held(placer, workers.get("http://a:1"), WORDS, 4)
        [worker, other] = [placer.place(await placer.plan([], body("one"), True), tried)[0]
                           for tried in ((), (workers.get("http://b:1"), ))]
        assert other.url == "http://a:1"
        assert metrics.page().count(b'index_entries{table="workers"} 2.0') == 1


async def test_b68_what_was_just_sent_counts_for_its_own_model():
    async with fleet(a=("one", "/models/one"), b=("one", "/models/one"),
                     c=("two", "/models/two"), d=("two", "/models/two")) as (placer, workers, _):
        for name in "abcd":
            placer.families.join(workers.get(f"http://{name}:1")).index(4)
        sent = {}
        for model in ("one", "two"):
            sent[model] = placer.place(await placer.plan([], body(model), True), ())[0]
        for model in ("one", "two"):
            worker, choice = placer.place(await placer.plan([], body(model), True), ())
            assert worker is sent[model] and choice.overlap_blocks == 7


async def test_b68_a_model_that_is_gone_leaves_nothing():
    async with fleet(a=("one", "/models/one"), b=("two", "/models/two")) as (placer, workers, metrics):
        held(placer, workers.get("http://a:1"), WORDS, 4)
        placer.forget("http://a:1")
        assert not placer.families._by_name.keys() - {"two"} and "one" not in placer.pool._tokenizers
        assert metrics.registry.get_sample_value("vllm:pd_router_index_blocks_total", {"kind": "stored"}) == 7
        assert not list(placer.families.indexes())


async def test_b68_workers_that_share_a_name_are_one_family():
    families, metrics = Families(), RouterMetrics()
    workers = Workers(metrics, 10)
    joined = []
    for url, names in (("http://a:1", {"m", "alias"}), ("http://b:1", {"m"}), ("http://c:1", {"alias"}),
                       ("http://d:1", {"n"})):
        worker = workers.add(url, WorkerSource.STATIC)
        worker.models = worker.base_models = frozenset(names)
        joined.append(families.join(worker))
    assert joined[0] is joined[1] is joined[2] is not joined[3]
    assert families.of_model("m", ()) is joined[0] and families.of_model("n", ()) is joined[3]
    assert families.of_model(None, ()) is families.of_model("unknown", ()) is None
    worker.models = frozenset({"n", "ada"})
    assert families.of_model("ada", workers) is joined[3]


async def test_b68_two_models_by_their_events_without_a_block_size():
    context = zmq.Context()
    publishers = [Publisher(context) for _ in range(2)]
    try:
        async with serving(0, Policy.KV, up=False) as (served, _):
            engines = [FaultyEngine(model) for model in ("one", "two")]
            for engine in engines:
                await engine.start()
            subscriptions = served.router.subscriptions
            for engine, publisher in zip(engines, publishers, strict=True):
                subscriptions._configured[engine.url] = [(publisher.endpoint, None)]
                served.router._membership.add(engine.url)
            await served.until(lambda: served.router.workers.counts().get("up") == 2)
            families = served.router.placer.families

            def known(engine, size):
                family = families.of_model(engine.model, ())
                return size in family.indexes and family.indexes[size].blocks(engine.url)

            for engine, publisher, size in zip(engines, publishers, (4, 8), strict=True):
                while not known(engine, size):
                    stored = ["BlockStored", [1], None, WORDS[:size], size, None]
                    publisher.send(msgspec.msgpack.encode([1.0, [stored]]))
                    await asyncio.sleep(0.02)
            for engine, size in zip(engines, (4, 8), strict=True):
                answer = await served.ask(prompt=WORDS[:16], model=engine.model, headers={"x-vllm-pd-explain": "1"})
                explained = answer.headers["x-vllm-pd-explain"]
                assert answer.headers["x-vllm-pd-worker"] == engine.url and f"hit=1/{16 // size}" in explained
            engines[0].model = "two"  # started anew with the other model, at the same port
            served.worker(engines[0]).models = served.worker(engines[0]).base_models = frozenset()
            served.worker(engines[0]).fail(WorkerFailure.PROBE, "away")
            await served.until(lambda: families.of_model("one", ()) is families.of_model("two", ()) or
                               engines[0].url in families.of_model("two", ()).members)
            for engine in engines:
                await engine.stop()
    finally:
        context.destroy(linger=0)
