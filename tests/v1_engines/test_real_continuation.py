# SPDX-License-Identifier: Apache-2.0
"""B65 on real engines: stock V1 servers of the tiny model behind a router, killed in the middle of streams."""
import http.client
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

from _connectors.pair import ENVIRONMENT, EngineShape
from _connectors.serve import ForkedServer, ServerFactory

from vllm_pd.bench.servers import HOST, Servers
from vllm_pd.ops.launch.plan import ROUTER
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1800)]
CONTEXT = 512
TIMEOUT_S = 600.0
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True,
          "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
REQUESTS = {  # the chat goes on until the model's longest context
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 300, "return_token_ids": True, **GREEDY},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Tell me of the sea: 你好 🦄"}], **GREEDY}}


def stream(url: str, path: str, model: str, at_event: Callable[[int, str], None] = lambda number, worker: None
           ) -> list[dict]:
    """The events of an answer; `at_event` is called with each one's number and the engine that the answer began at."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S)
    body = json.dumps({"model": model, **REQUESTS[path]})
    connection.request("POST", path, body, {"Content-Type": "application/json", "X-Vllm-Pd-Explain": "1"})
    answer = connection.getresponse()
    assert answer.status == 200
    found = []
    for line in answer:
        if line.startswith(b"data: {"):
            found.append(json.loads(line[6:]))
            at_event(len(found), answer.headers.get("X-Vllm-Pd-Worker", ""))
    assert line.strip() == b"" and found[-1].get("usage"), found[-1]
    return found


def said(events: list[dict]) -> dict:
    """What must be equal in two runs: all but the ids, and which tokens came in one event."""
    choices = [one["choices"][0] for one in events if one["choices"]]
    assert len({(one["id"], one["created"], one["object"], one["model"]) for one in events}) == 1
    return {"text": "".join(one["delta"].get("content") or "" if "delta" in one else one["text"] for one in choices),
            "roles": [one["delta"]["role"] for one in choices if "delta" in one and "role" in one["delta"]],
            "ids": [token for one in choices for token in one.get("token_ids") or []],
            "prompt": [one["prompt_token_ids"] for one in choices if one.get("prompt_token_ids")],
            "end": [one["finish_reason"] for one in choices if one["finish_reason"]],
            "usage": [events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]}


def kill_core(engine: ForkedServer) -> None:
    """SIGKILL to what computes. The server that is left says so in the stream."""
    for process in psutil.Process(engine.pid).children(recursive=True):
        process.send_signal(signal.SIGKILL)


def test_b65_engines_killed_in_the_middle_of_streams(tmp_path):
    shape = EngineShape(os.environ["VLLM_PD_TINY_MODEL"], pool_blocks=256, context=CONTEXT)
    with ServerFactory(ENVIRONMENT, tmp_path / "engines.log") as servers, Servers(lambda *_: None) as others:
        engines = {one.url: one for one in (servers.start(f"engine {number}", take_free(HOST), shape.arguments(), {})
                                            for number in range(3))}
        for one in engines.values():
            one.await_ready()
        port = take_free(HOST)
        workers = [word for url in engines for word in ("--worker", url)]
        router = others.start("router", port, [*ROUTER, "--port", str(port), *workers, "--policy", "round-robin",
                                               "--tokenizer", "none", "--continue-streams", "--probe-timeout-s", "120"])
        others.await_ready(router, lambda one: one.is_healthy() and all(
            scrape(one.url).value("vllm:pd_router_worker_up", worker=url) == 1 for url in engines))
        wanted = {path: said(stream(next(iter(engines)), path, shape.model)) for path in REQUESTS}
        for path, kill in zip(REQUESTS, (ForkedServer.kill, kill_core), strict=True):

            def at_event(number: int, worker: str, kill: Callable[[ForkedServer], None] = kill) -> None:
                if number == 40:
                    kill(engines[worker])

            assert said(stream(router.url, path, shape.model, at_event)) == wanted[path]
            assert wanted[path]["usage"][1] > 250
        page = scrape(router.url)
        assert sum(page.value("vllm:pd_router_continued_streams_total", worker=url) for url in engines) == 2
