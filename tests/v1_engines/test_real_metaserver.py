# SPDX-License-Identifier: Apache-2.0
"""B100 with real V1 servers behind a proxy of the metaserver form. By hand: `heavy`, for its servers take minutes."""
import concurrent.futures
import dataclasses
import functools
import json
import os

import psutil
import pytest

from tests import asking, waiting
from tests.fakes.metaserver_proxy import LoopThread, MetaserverProxy
from tests.v1.real_engines import kill
from tests.v1.test_real_engines import prompts
from vllm_pd.ops.launch.plan import HOST, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1800)]
MODEL, TOKENS, START_S, END_S = "tiny", 8, 900.0, 200.0
SERVE_ARGS = ["--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager",
              "--served-model-name", MODEL, "--num-gpu-blocks-override", "1024", "--max-num-seqs", "24",
              "--max-num-batched-tokens", "512"]
LENGTHS = (33, 64, 65, 200, 511, 513, 1000, 1900)
wait_for = functools.partial(waiting.wait_for, timeout_s=END_S)


@pytest.fixture
def proxied(mono):
    """(proxy, fleet): one D and one P behind a proxy of the form; `mono` answers rightly."""
    loop = LoopThread()
    proxy = MetaserverProxy(loop)
    pd = {"max_local_prefill_tokens": 0, "metaservers": proxy.url, "ttl_s": 5.0, "attempt_deadline_s": 100.0,
          "max_parked_fraction": 1.0}
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 1, port=take_free_run(HOST, 2), pd=pd,
                        serve_args=SERVE_ARGS)
    try:
        with Fleet(plan_fleet(options, ()), timeout_s=START_S) as fleet:
            *proxy.decodes, producer = (engine.url for engine in fleet.plan.engines)
            proxy.producers = [producer]
            yield proxy, fleet
    finally:
        proxy.close()
        loop.close()


def complete(url, tokens, **headers):
    status, _, said = asking.request(url, "POST", "/v1/completions", {
        "model": MODEL, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}, END_S, **headers)
    assert status == 200, said
    return json.loads(said)["choices"][0]["token_ids"]


def chat(url):
    status, _, said = asking.request(url, "POST", "/v1/chat/completions", {
        "model": MODEL, "messages": [{"role": "user", "content": "one two three " * 60}], "max_tokens": TOKENS,
        "temperature": 0, "ignore_eos": True}, END_S)
    assert status == 200, said
    return json.loads(said)["choices"][0]["message"]["content"]


def gauges(url):
    return json.loads(asking.request(url, "GET", "/pd/status")[2])["gauges"]


def at_rest(*urls):
    for url in urls:
        wait_for(lambda url=url: not any(gauges(url)[name] for name in (
            "decode_queued", "decode_granted", "decode_fenced", "prefill_jobs", "holds", "running", "waiting")),
            lambda url=url: gauges(url))


def test_b100_answers_of_a_stock_engine_and_p_is_killed_in_the_middle(mono, proxied):
    proxy, fleet = proxied
    decode, producer = (engine.url for engine in fleet.plan.engines)
    wait_for(lambda: gauges(decode)["peers"] and complete(proxy.base, prompts(0, (100, ))[0]) and proxy.answers,
             "nothing goes through the proxy")
    free = gauges(decode)["free_blocks"], gauges(producer)["free_blocks"]
    del proxy.posts[:], proxy.answers[:]
    before, its = scrape(decode), scrape(producer)
    for one in prompts(1, LENGTHS):
        assert complete(proxy.base, one) == mono.generate([one], TOKENS)[0], len(one)
    assert len(proxy.posts) == len(LENGTHS) and [status for status, _ in proxy.answers] == [200] * len(LENGTHS)
    wait_for(lambda: scrape(decode).since(before).value("vllm:pd_attempts_total", outcome="done") == len(LENGTHS))
    wait_for(lambda: scrape(producer).since(its).value("vllm:pd_jobs_total") == len(LENGTHS),
             lambda: scrape(producer).since(its))
    many = prompts(2, (700, 300, 900, 500, 1000, 65, 1500, 400))
    right = mono.generate(many, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(len(many)) as pool:
        assert list(pool.map(functools.partial(complete, proxy.base), many)) == right
    posted = len(proxy.posts)
    assert chat(proxy.base) == chat(producer)
    assert len(proxy.posts) == posted + 1 and proxy.posts[-1]["request_id"].startswith("chatcmpl-")
    wait_for(lambda: len(proxy.answers) == len(proxy.posts))
    assert proxy.answers[-1][1]["object"] == "chat.completion"
    at_rest(decode, producer)
    assert (gauges(decode)["free_blocks"], gauges(producer)["free_blocks"]) == free

    last = prompts(3, (1900, 1901, 1902, 1903, 1904, 1905, 1906, 1907))
    right = mono.generate(last, TOKENS)
    posted = len(proxy.posts)
    with concurrent.futures.ThreadPoolExecutor(len(last)) as pool:
        asked = [pool.submit(complete, proxy.base, one) for one in last]
        wait_for(lambda: len(proxy.posts) > posted and gauges(decode)["decode_fenced"], "no prompt is being written")
        pid = next(one["pid"] for one in fleet.state()["engines"] if one["url"] == producer)
        kill([*psutil.Process(pid).children(recursive=True), psutil.Process(pid)])
        assert [one.result(END_S) for one in asked] == right
    at_rest(decode)
    assert gauges(decode)["free_blocks"] == free[0]
    assert complete(proxy.base, last[0]) == right[0]


KEY = "sk-engines"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def keyed(mono):
    """(proxy, fleet): two Ds, and a P of two data-parallel ranks, all of which ask for a key, behind such a proxy."""
    loop = LoopThread()
    proxy = MetaserverProxy(loop, KEY)
    pd = {"max_local_prefill_tokens": 0, "metaservers": proxy.url, "ttl_s": 20.0, "attempt_deadline_s": 100.0,
          "max_parked_fraction": 1.0}
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 2, port=take_free_run(HOST, 3), pd=pd,
                        serve_args=[*SERVE_ARGS, "--api-key", KEY])
    plan = plan_fleet(options, ())
    *decodes, producer = plan.engines
    ranks = dataclasses.replace(producer, command=(*producer.command, "--data-parallel-size", "2"))
    try:
        with Fleet(dataclasses.replace(plan, engines=(*decodes, ranks)), timeout_s=START_S) as fleet:
            proxy.decodes, proxy.producers = [engine.url for engine in decodes], [producer.url]
            yield proxy, fleet
    finally:
        proxy.close()
        loop.close()


def every_gauge(url):
    """The gauges of each rank of a server that asks for the key."""
    status, _, said = asking.request(url, "GET", "/pd/status", None, END_S, **HEADERS)
    assert status == 200, said
    shown = json.loads(said)
    return [rank["gauges"] for rank in shown.get("ranks", [shown])]


def keyed_at_rest(*urls):
    for url in urls:
        wait_for(lambda url=url: not any(rank[name] for rank in every_gauge(url) for name in (
            "decode_queued", "decode_granted", "decode_fenced", "prefill_jobs", "holds", "running", "waiting")),
            lambda url=url: every_gauge(url))


def count_of(urls, name, **labels):
    return [scrape(url).by(name, "engine", *labels).get((rank, *labels.values()), 0.0)
            for url, rank in urls]


def test_b100_two_ds_and_a_p_of_two_ranks_that_ask_for_a_key(mono, keyed):
    """Each D posts its prompts, each rank of P computes some, and nobody without the key gets anything from P."""
    proxy, _ = keyed
    decodes, producer = proxy.decodes, proxy.producers[0]
    wait_for(lambda: all(rank["peers"] == 2 for url in (*decodes, producer) for rank in every_gauge(url)),
             lambda: [every_gauge(url) for url in (*decodes, producer)])
    everybody = (*decodes, producer)
    free = [rank["free_blocks"] for url in everybody for rank in every_gauge(url)]
    ds, ranks = [(url, "0") for url in decodes], [(producer, rank) for rank in "01"]
    before = count_of(ds, "vllm:pd_attempts_total", outcome="done"), count_of(ranks, "vllm:pd_jobs_total")
    for one in prompts(60, LENGTHS):
        assert complete(proxy.base, one) == mono.generate([one], TOKENS)[0], len(one)
    many = prompts(61, (700, 300, 900, 500, 1000, 65, 1500, 400))
    right = mono.generate(many, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(len(many)) as pool:
        assert list(pool.map(functools.partial(complete, proxy.base), many)) == right
    count = len(LENGTHS) + len(many)
    assert len(proxy.posts) == count
    wait_for(lambda: [status for status, _ in proxy.answers] == [200] * count, lambda: proxy.answers)

    def grown(urls, were, name, **labels):
        return [now - was for now, was in zip(count_of(urls, name, **labels), were, strict=True)]

    wait_for(lambda: grown(ds, before[0], "vllm:pd_attempts_total", outcome="done") == [count / 2, count / 2],
             lambda: grown(ds, before[0], "vllm:pd_attempts_total", outcome="done"))
    wait_for(lambda: sum(grown(ranks, before[1], "vllm:pd_jobs_total")) == count,
             lambda: grown(ranks, before[1], "vllm:pd_jobs_total"))
    assert min(grown(ranks, before[1], "vllm:pd_jobs_total")) >= 2, "one rank has done it all"

    taken = dict(proxy.posts[-1])
    for headers in ({}, {"Authorization": "Bearer sk-other"}):
        status, _, said = asking.request(producer, "POST", "/v1/completions", {
            "model": MODEL, "prompt": "x", "max_tokens": 1, "kv_transfer_params": taken}, END_S, **headers)
        assert status == 401, said
        assert asking.request(producer, "GET", "/pd/status", None, END_S, **headers)[0] == 401
    keyed_at_rest(*everybody)
    assert [rank["free_blocks"] for url in everybody for rank in every_gauge(url)] == free

    last = prompts(62, (1900, 1901, 1902, 1903, 1904, 1905))
    right = mono.generate(last, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(len(last)) as pool:
        asked = [pool.submit(complete, proxy.base, one) for one in last]
        wait_for(lambda: all(rank["prefill_jobs"] for rank in every_gauge(producer)), "a rank has no job")
        pid = next(one["pid"] for one in keyed[1].state()["engines"] if one["url"] == producer)
        kill([*psutil.Process(pid).children(recursive=True), psutil.Process(pid)])
        assert [one.result(END_S) for one in asked] == right
    keyed_at_rest(*decodes)
    assert [rank["free_blocks"] for url in decodes for rank in every_gauge(url)] == free[:2]
    assert complete(proxy.base, last[0]) == right[0]
