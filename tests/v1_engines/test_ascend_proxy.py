# SPDX-License-Identifier: Apache-2.0
"""B100 with vllm-ascend's own proxy before real V1 servers. By hand: `heavy`, and its file is not in this one."""
import concurrent.futures
import functools
import http.client
import json
import os
import signal
import time

import psutil
import pytest

from tests import asking
from tests.fakes.ascend_proxy import AscendProxy
from tests.v1.test_real_engines import prompts
from tests.v1_engines.test_real_metaserver import END_S, MODEL, SERVE_ARGS, START_S, TOKENS, at_rest, gauges, wait_for
from vllm_pd.ops.launch.plan import HOST, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

SCRIPT = os.environ.get("VLLM_PD_ASCEND_PROXY", "")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1800),
              pytest.mark.skipif(not SCRIPT, reason="VLLM_PD_ASCEND_PROXY does not name vllm-ascend's "
                                                    "load_balance_proxy_layerwise_server_example.py")]
LENGTHS = (33, 511, 1000, 1900)
COMPLETIONS, CHAT, METASERVER = "/v1/completions", "/v1/chat/completions", "/v1/metaserver"
DECODERS, PRODUCERS, DEADLINE_S = 1, 2, 100.0
WORDS = {"messages": [{"role": "user", "content": "one two three " * 60}]}
SAMPLED = {"temperature": 1.0, "top_k": 1}  # the likeliest token, and several samples are allowed


class Proxied:
    """The proxy, and the URLs of the engines behind it. `logged`: what the engines have said."""

    def __init__(self, proxy, fleet, logged):
        urls = [engine.url for engine in fleet.plan.engines]
        self.proxy, self.fleet, self.logged = proxy, fleet, logged
        self.decoders, self.producers = urls[:DECODERS], urls[DECODERS:]

    def done(self):
        """The prompts that came to the Ds until now, and those that the proxy has brought to the Ps."""
        return sum(scrape(url).value("vllm:pd_attempts_total", outcome="done") for url in self.decoders), sum(
            " 200" in line for name, line in list(self.logged) if name.startswith("prefill") and '"POST /v1/c' in line)

    def hits(self):
        """Tokens that any engine has found in its prefix cache until now."""
        return sum(scrape(url).value("vllm:prefix_cache_hits_total") for url in (*self.decoders, *self.producers))


@pytest.fixture(scope="module")
def proxied(mono, tmp_path_factory):
    proxy = AscendProxy(SCRIPT, tmp_path_factory.mktemp("proxy") / "log")
    pd = {"max_local_prefill_tokens": 20, "metaservers": proxy.url, "ttl_s": 5.0, "attempt_deadline_s": DEADLINE_S,
          "max_parked_fraction": 1.0}
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], PRODUCERS, DECODERS, pd=pd, serve_args=SERVE_ARGS,
                        port=take_free_run(HOST, DECODERS + PRODUCERS))
    logged = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # vLLM has /reset_prefix_cache only then
            with Fleet(plan_fleet(options, ()), timeout_s=START_S, say=lambda *said: logged.append(said)) as fleet:
                made = Proxied(proxy, fleet, logged)
                proxy.start(made.decoders, made.producers)
                for url in made.decoders:
                    wait_for(lambda url=url: gauges(url)["peers"] == PRODUCERS, "they have not met")
                yield made
    finally:
        proxy.close()
        print(proxy.log_text())
        print("\n".join(f"[{name}] {line}" for name, line in logged))


def ask(url, body, path=COMPLETIONS, stream=False):
    """(prompt, answer) of each choice of an answer: their token ids."""
    body = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "stream": stream, **body}
    status, headers, said = asking.request(url, "POST", path, body, END_S)
    assert status == 200 and said, (status, said)
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    parts = [line.removeprefix("data: ") for line in said.decode().splitlines() if line.startswith("data: {")]
    assert not stream or said.endswith(b"data: [DONE]\n\n")
    found = {}
    for part in map(json.loads, parts if stream else [said]):
        for choice in part["choices"]:
            prompt, answer = found.setdefault(choice["index"], ([], []))
            prompt += choice.get("prompt_token_ids") or part.get("prompt_token_ids") or []
            answer += choice.get("token_ids") or []
    return [found[index] for index in sorted(found)]


def right(mono, answers):
    """Each answer is that of a stock engine to its prompt."""
    for prompt, answer in answers:
        assert prompt and answer == mono.generate([prompt], TOKENS)[0], len(prompt)
    return len(answers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_b100_answers_are_those_of_a_stock_engine(mono, proxied, stream):
    base, before, posted = proxied.proxy.base, proxied.done(), len(proxied.proxy.answers(METASERVER))
    ask_it = functools.partial(ask, base, stream=stream)
    asked = prompts(10 + stream, LENGTHS)
    for one in asked:
        ((prompt, answer), ) = ask_it({"prompt": one})
        assert (prompt, answer) == (one, mono.generate([one], TOKENS)[0])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for answers in pool.map(ask_it, [{"prompt": one} for one in prompts(20 + stream, LENGTHS)]):
            right(mono, answers)
    right(mono, ask_it({"messages": [{"role": "user", "content": f"{stream} two three " * 60}]}, CHAT))
    count = 2 * len(LENGTHS) + 1
    wait_for(lambda: proxied.done() == (before[0] + count, before[1] + count), lambda: (before, proxied.done()))
    assert proxied.proxy.answers(METASERVER)[posted:] == [200] * count
    at_rest(*proxied.decoders, *proxied.producers)


SHORT, LONG, OTHER = prompts(30, (3, 700, 900))  # the first one stays at D


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path, body, count", [
    (COMPLETIONS, {"prompt": [LONG, OTHER]}, 2), (COMPLETIONS, {"prompt": [SHORT, LONG]}, 2),
    (COMPLETIONS, {"prompt": [LONG, LONG, LONG]}, 3), (COMPLETIONS, {"prompt": LONG, "n": 2, **SAMPLED}, 2),
    (CHAT, {**WORDS, "n": 2, **SAMPLED}, 2), (COMPLETIONS, {"prompt": SHORT}, 1), (COMPLETIONS, {"prompt": [LONG]}, 1)],
    ids=["two prompts", "one stays", "the same thrice", "two samples", "two answers of a chat", "short", "list of one"])
def test_b100_several_answers_wait_for_no_post(mono, proxied, path, body, count, stream):
    """The proxy may keep the post of one prompt until the others were posted, too: so none is."""
    posted, began = proxied.proxy.answers(METASERVER), time.monotonic()
    assert right(mono, ask(proxied.proxy.base, body, path, stream)) == count
    assert time.monotonic() - began < DEADLINE_S, "an attempt waited for its deadline"
    wait_for(lambda: len(proxied.proxy.answers(METASERVER)) == len(posted) + (body == {"prompt": [LONG]}))
    at_rest(*proxied.decoders, *proxied.producers)


def test_b100_the_proxy_s_other_routes(proxied):
    status, _, said = asking.request(proxied.proxy.base, "GET", "/healthcheck")
    assert status == 200 and json.loads(said) == {"status": "ok", "prefill_instances": PRODUCERS,
                                                  "decode_instances": DECODERS}


def test_b100_prefix_caches_are_reset_through_the_proxy(mono, proxied):
    asked = {"prompt": prompts(31, (1900, ))[0]}
    before = proxied.hits()
    right(mono, ask(proxied.proxy.base, asked))
    assert proxied.hits() == before
    right(mono, ask(proxied.proxy.base, asked))
    wait_for(lambda: proxied.hits() > before, "the figure shows no hit")
    at_rest(*proxied.decoders, *proxied.producers)
    status, _, said = asking.request(proxied.proxy.base, "POST", "/reset_prefix_cache")
    if status == 404:
        pytest.skip("this version of the proxy has no such route")
    assert status == 200, said
    before = proxied.hits()
    right(mono, ask(proxied.proxy.base, asked))
    at_rest(*proxied.decoders, *proxied.producers)
    assert proxied.hits() == before


def test_b100_a_client_that_leaves_leaves_nothing(mono, proxied):
    at_rest(*proxied.decoders, *proxied.producers)
    free = [gauges(url)["free_blocks"] for url in (*proxied.decoders, *proxied.producers)]
    for number, one in enumerate(prompts(40, (1900, 1800, 1700, 1600))):
        connection = http.client.HTTPConnection(HOST, proxied.proxy.port, timeout=END_S)
        connection.request("POST", COMPLETIONS, json.dumps({
            "model": MODEL, "prompt": one, "max_tokens": 100, "ignore_eos": True, "stream": number % 2 == 0}),
            {"Content-Type": "application/json"})
        wait_for(lambda: any(gauges(url)["decode_fenced"] or gauges(url)["running"] for url in proxied.decoders))
        connection.close()
    at_rest(*proxied.decoders, *proxied.producers)
    assert [gauges(url)["free_blocks"] for url in (*proxied.decoders, *proxied.producers)] == free
    right(mono, ask(proxied.proxy.base, {"prompt": prompts(41, (1000, ))[0]}))


def test_b100_a_p_is_killed_and_the_other_one_does_its_prompts(mono, proxied):
    asked = prompts(50, (1900, 1901, 1902, 1903, 1904, 1905))
    wanted = mono.generate(asked, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(ask, proxied.proxy.base, {"prompt": one}) for one in asked]
        wait_for(lambda: gauges(proxied.producers[0])["prefill_jobs"], "it has no job")
        pid = next(one["pid"] for one in proxied.fleet.state()["engines"] if one["url"] == proxied.producers[0])
        for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
            os.kill(process.pid, signal.SIGKILL)
        assert [future.result(END_S)[0][1] for future in futures] == wanted
    at_rest(*proxied.decoders, proxied.producers[1])
    before = scrape(proxied.producers[1])
    for one in prompts(51, (300, 301, 302)):
        ((_, answer), ) = ask(proxied.proxy.base, {"prompt": one})
        assert answer == mono.generate([one], TOKENS)[0]
    done = scrape(proxied.producers[1]).since(before)
    assert done.value("vllm:pd_jobs_total") == 3, "D computed them itself"
