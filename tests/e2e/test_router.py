# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd up --router` with the real model: a decode engine, a prefill engine, and the router in front. Before the
same engines: a second router without a registry, for which the prefill engine, which answers requests too, is another
worker, one without events; and Envoy with the endpoint picker; where one of these can't be installed that is skipped,
and in CI it fails."""
import dataclasses
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest
from _behind.gateways import FOLDER_VARIABLE
from _picker.envoy import EnvoyBodyMode, picker_envoy_config, start_envoy_command
from harness import engine_env, model_folder

from tests.asking import request
from tests.forked import freeze
from tests.router.openai_talk import client, conversation
from tests.verdict import same_answer
from tests.waiting import wait_for
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.bench.servers import HOST, RouterCommand, Server, Servers
from vllm_pd.ops.launch.plan import UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import is_free, take_free, take_free_run

MODEL = "real"
needs_envoy = pytest.mark.skipif(
    not (os.environ.get(FOLDER_VARIABLE) and os.environ.get("VLLM_PD_PICKER")) and not os.environ.get("CI"),
    reason="Envoy or the picker's packages are not installed")
SERVE_ARGS = ["--dtype", "float32", "--max-model-len", "2048", "--block-size", "16", "--enable-prefix-caching",
              "--served-model-name", MODEL, "--num-gpu-blocks-override", "512", "--max-num-seqs", "8",
              "--disable-log-requests"]
QUICK = ("--probe-interval-s", "1", "--probe-timeout-s", "15")  # engines of other tests run beside these
PD = {"max_local_prefill_tokens": 200, "heartbeat_s": 2, "ttl_s": 120}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    os.environ.update({k: v for k, v in engine_env(0).items() if k.startswith(("VLLM_CPU_KV", "VLLM_CPU_CI", "VLLM_NO",
                                                                               "HF_", "TOKENIZERS", "VLLM_LOGGING"))})
    options = UpOptions(model_folder("VLLM_PD_MODEL"), 1, 1, port=take_free_run("127.0.0.1", 3), pd=PD,
                        serve_args=SERVE_ARGS, router=True)
    plan = plan_fleet(options, sorted(os.sched_getaffinity(0)))
    plan = dataclasses.replace(plan, router=dataclasses.replace(plan.router, command=(*plan.router.command, *QUICK)))
    with Fleet(plan) as running:
        wait_for(lambda: has_all_it_needs(workers(plan.router.url)), "the router has all that it needs")
        yield running


@pytest.fixture(scope="module")
def two(fleet) -> Iterator[str]:
    """The URL of a router with both engines as workers."""
    engines = [engine.url for engine in fleet.plan.engines]
    with Servers(print) as servers:
        router = servers.router(RouterCommand.ours(f"two={' '.join(QUICK)}"), engines, Server.is_healthy)
        wait_for(lambda: (shown := workers(router.url))["tokenizer"] == "ok"
                   and {one["state"] for one in shown["workers"]} == {"up"}, "both are up, and it has the tokenizer")
        yield router.url


def has_all_it_needs(shown: dict) -> bool:
    """Whether the decode engine is known with its events, and its tokenizer."""
    return (shown["tokenizer"] == "ok"
            and [(one["state"], (one["events"] or {}).get("state")) for one in shown["workers"]] == [("up", "live")])


def workers(router: str) -> dict:
    status, _, body = request(router, "GET", "/workers")
    assert status == 200
    return json.loads(body)


def known_blocks(url: str) -> float:
    """Different blocks that a router has heard of, or a picker, whose metrics are here: by events, or, where a pulse
    overtakes those, by a snapshot."""
    return scrape(url).value("vllm:pd_router_index_entries", table="names")


def tokenises(gateway: str, picker: str) -> bool:
    """Whether this picker tokenises what it is asked about now."""
    request(gateway, "POST", "/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    page = scrape(picker)
    return any(page.value("vllm:pd_router_tokenized_total", outcome=outcome) for outcome in ("done", "begun"))


def text(sentences: int, start: int) -> str:
    return " ".join(f"Item {number} of the list costs {7 * number - 6 * start} coins."
                    for number in range(start, start + sentences)) + " The next item costs"


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"chat": True}, {"chat": True, "stream": True}], ids=str)
def test_b11_answers_equal_those_of_one_engine(options, fleet):
    """B11, through the router: text, tokens, usage and finish reason, whoever prefills."""
    decode, mono = (engine.url for engine in fleet.plan.engines)  # asked directly, P computes it all
    before = scrape(decode)
    for sentences in (1, 12, 30):
        content = text(sentences, 100 * len(str(options)))
        prompt = [{"role": "user", "content": content}] if options.get("chat") else content
        asked = GenerationRequest(prompt, 8, **options)
        ours, theirs = ask(fleet.plan.router.url, MODEL, asked), ask(mono, MODEL, asked)
        same_answer(ours, theirs)
    counted = scrape(decode).since(before)
    assert min(counted.value("vllm:pd_decisions_total", decision=where) for where in ("remote", "local")) >= 1


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": "The capital of France is"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Name a colour."}]}),
    ("/tokenize", {"prompt": "Hello there"}), ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/completions", {"prompt": 5}), ("/v1/completions", {"model": "unknown", "prompt": "x"}),
    ("/v1/models", None)], ids=str)
def test_b11_bytes_are_those_of_the_engine(path, body, fleet):
    """B11, byte for byte except ids and times."""
    if body is not None:
        body = {"model": MODEL, **body}
        if path.startswith("/v1/") and "tokens" not in body:
            body |= {"max_tokens": 5, "temperature": 0}
    method = "GET" if body is None else "POST"
    ours, theirs = (request(url, method, path, body, **{"X-Request-Id": "r1"})
                    for url in (fleet.plan.router.url, fleet.plan.engines[0].url))
    assert ours[0] == theirs[0]
    assert plain(ours[2]) == plain(theirs[2])
    assert ours[1].keys() == theirs[1].keys()
    if path.startswith("/v1/") and ours[0] == 200 and body is not None:
        assert json.loads(ours[2])["id"].endswith("r1")


def test_b11_an_openai_client_hears_the_same(fleet):
    routed, bare = (dict(conversation(client(url), MODEL))
                    for url in (fleet.plan.router.url, fleet.plan.engines[0].url))
    assert routed == bare


def plain(body: bytes) -> object:
    """Without times, and what differs with them."""
    def clean(value: object) -> object:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in ("created", "id")}
        return [clean(one) for one in value] if isinstance(value, list) else value

    return clean(json.loads(body))


def test_a_prompt_goes_where_its_prefix_is(fleet, two):
    """Tokens and templates agree with the engines': what one has computed is found there again, block for block."""
    decode = fleet.plan.engines[0].url
    makes = [lambda content: ("/v1/completions", {"prompt": content}),
             lambda content: ("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})]
    for number, make in enumerate(makes):
        begin = text(25, 50_000 + 1000 * number)
        path, body = make(begin)
        known = known_blocks(two)
        assert request(decode, "POST", path, {"model": MODEL, "max_tokens": 4, **body})[0] == 200
        wait_for(lambda known=known: known_blocks(two) >= known + 20, "the router has heard of it")
        for turn in range(1, 4):
            path, body = make(begin + " and" * 40 * turn)
            status, headers, _ = request(two, "POST", path, {"model": MODEL, "max_tokens": 4, "temperature": 0, **body},
                                         **{"X-Vllm-Pd-Explain": "1"})
            assert status == 200 and headers["x-vllm-pd-worker"] == decode
            explained = headers["x-vllm-pd-explain"]
            hit, blocks = map(int, explained.partition("hit=")[2].split(";")[0].split("/"))
            assert "reason=overlap" in explained and 20 <= hit < blocks, explained


@needs_envoy
@pytest.mark.heavy
@pytest.mark.parametrize("offset, mode", list(enumerate(EnvoyBodyMode)))
def test_behind_envoy_a_prompt_goes_where_its_prefix_is(fleet, offset, mode, tmp_path):
    """Envoy with `vllm-pd picker`, which tokenises texts and chats as the engines do, and reads their events: what one
    has computed is found there again. Answers, whole and as streams, are the engine's."""
    decode, other = (engine.url for engine in fleet.plan.engines)
    port, picker, metrics = (take_free(HOST) for _ in range(3))
    with Servers(print) as servers:
        page = servers.start("picker", metrics, [
            sys.executable, "-m", "vllm_pd.cli", "picker", "--port", str(picker), "--metrics-port", str(metrics),
            "--worker", decode, "--worker", other, "--probe-interval-s", "1"],
            env={**os.environ, "PYTHONPATH": os.environ.get("VLLM_PD_PICKER", "")})
        servers.await_ready(page, Server.is_healthy)
        envoy = servers.start("envoy", port, start_envoy_command(picker_envoy_config(port, picker, mode), tmp_path))
        servers.await_ready(envoy, lambda server: not is_free(HOST, server.port))
        wait_for(lambda: all(scrape(page.url).value("vllm:pd_router_worker_up", worker=url) == 1
                             for url in (decode, other)), "both are up")
        before = scrape(decode)
        for stream in (False, True):
            for sentences in (2, 30):
                asked = GenerationRequest(text(sentences, 100_000 + 1000 * (10 * offset + stream)), 8, stream=stream)
                same_answer(ask(envoy.url, MODEL, asked), ask(other, MODEL, asked))
        makes = [lambda content: ("/v1/completions", {"prompt": content}),
                 lambda content: ("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})]
        for number, make in enumerate(makes):
            begin = text(25, 200_000 + 1000 * (10 * offset + number))
            path, body = make(begin)
            known = known_blocks(page.url)
            assert request(decode, "POST", path, {"model": MODEL, "max_tokens": 4, **body})[0] == 200
            wait_for(lambda known=known: known_blocks(page.url) >= known + 20, "the picker has read its events")
            wait_for(lambda: tokenises(envoy.url, page.url), "it has the tokenizer")
            overlap = scrape(page.url).value("vllm:pd_router_overlap_blocks_total")
            for turn in range(1, 4):
                path, body = make(begin + " and" * 40 * turn)
                status, headers, _ = request(envoy.url, "POST", path, {"model": MODEL, "max_tokens": 4, **body})
                assert status == 200 and headers["x-upstream"] == urlsplit(decode).netloc
            assert scrape(page.url).value("vllm:pd_router_overlap_blocks_total") >= overlap + 3 * 20
        assert scrape(page.url).value("vllm:pd_router_refused_total") == 0
        wait_for(lambda: scrape(page.url).value("vllm:pd_router_in_flight") == 0, "nothing is open")
        assert scrape(decode).since(before).value("vllm:pd_decisions_total", decision="local") >= 1


def test_b63_an_engine_that_is_stopped_is_left_out(fleet, two):
    """Its requests are answered by the other one; it comes back."""
    stopped, other = fleet.plan.engines
    server = psutil.Process(fleet._engines[stopped].pid)
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        freeze(process.pid)
    try:
        for number in range(3):
            status, headers, _ = request(two, "POST", "/v1/completions", {
                "model": MODEL, "prompt": f"Number {number} is", "max_tokens": 2}, **{"X-Vllm-Pd-Explain": "1"})
            assert status == 200 and headers["x-vllm-pd-worker"] == other.url
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
    wait_for(lambda: [one["state"] for one in workers(two)["workers"]] == ["up", "up"], "both are up")


def test_b25_a_client_that_goes_away_frees_the_engine(fleet):
    """Through the router: the engine has nothing to do soon after, long before it would have said all."""
    decode = fleet.plan.engines[0].url
    host, port = fleet.plan.router.url.removeprefix("http://").split(":")
    for stream in (True, False):
        connection = http.client.HTTPConnection(host, int(port), timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(
            {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": stream}),
            {"Content-Type": "application/json"})
        wait_for(lambda: scrape(decode).value("vllm:num_requests_running") == 1, "it is computed")
        said = scrape(decode).value("vllm:generation_tokens_total")
        connection.close()
        wait_for(lambda: scrape(decode).value("vllm:num_requests_running") == 0, "it is given up")
        assert scrape(decode).value("vllm:generation_tokens_total") - said < 1200
