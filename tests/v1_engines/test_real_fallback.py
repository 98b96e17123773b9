# SPDX-License-Identifier: Apache-2.0
"""`fallback` `refuse` with real V1 servers: what a client gets for a prompt that can't go to a prefill engine."""
import concurrent.futures
import functools
import json
import os
import time

import psutil
import pytest

from tests import asking, waiting
from tests.v1.real_engines import kill
from tests.v1.test_real_engines import prompts
from vllm_pd.ops.launch.plan import HOST, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1500)]
MODEL, START_S, END_S, WAIT_S = "tiny", 900.0, 200.0, 3.0
SERVE_ARGS = ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--enforce-eager",
              "--served-model-name", MODEL, "--num-gpu-blocks-override", "512", "--max-num-seqs", "8"]
PD = {"fallback": "refuse", "fallback_wait_s": WAIT_S, "max_local_prefill_tokens": 64, "ttl_s": 5.0}
wait_for = functools.partial(waiting.wait_for, timeout_s=END_S)


@pytest.fixture
def fleet():
    """One D and one P."""
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 1, port=take_free_run(HOST, 2), pd=PD,
                        serve_args=SERVE_ARGS)
    with Fleet(plan_fleet(options, ()), timeout_s=START_S) as running:
        yield running


def ask(url: str, tokens: list[int], name: str = "", path: str = "/v1/completions", **fields) -> tuple[int, bytes]:
    field = {"prompt": tokens} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "one two three " * 60}]}
    status, _, said = asking.request(url, "POST", path, {
        "model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **field, **fields}, END_S,
        **({"X-Request-Id": name} if name else {}))
    return status, said


def state(url: str) -> dict[str, int]:
    return json.loads(asking.request(url, "GET", "/pd/status")[2])["gauges"]


def is_refused(status: int, said: bytes) -> bool:
    """Whether this is a plain answer that says nothing but that there is an error, as V1 puts an engine's."""
    error = json.loads(said)["error"]
    return status == error["code"] == 500 and error["type"] == "InternalServerError"


def events(said: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in said.decode().splitlines() if line.startswith("data: ")]


def test_what_a_client_gets_where_the_prefill_engine_is_killed(fleet):
    decode, producer = (engine.url for engine in fleet.plan.engines)
    long, short, *others = prompts(1, (300, 20, 400, 401, 402, 403, 404))
    wait_for(lambda: ask(decode, long)[0] == 200, "nothing goes remote")
    wait_for(lambda: scrape(decode).value("vllm:pd_attempts_total", outcome="done") >= 1, "nothing went remote")
    free, before = state(decode)["free_blocks"], scrape(decode)
    pid = next(one["pid"] for one in fleet.state()["engines"] if one["url"] == producer)
    kill([*psutil.Process(pid).children(recursive=True), psutil.Process(pid)])

    began = time.monotonic()
    plain = ask(decode, others[0], "mine")
    assert is_refused(*plain) and time.monotonic() - began >= WAIT_S - 0.5, plain
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # short ones are answered while long ones wait
        waiting_one = pool.submit(ask, decode, others[1], stream=True)
        chat = pool.submit(ask, decode, [], path="/v1/chat/completions")
        samples = pool.submit(ask, decode, others[2], n=2, temperature=1.0)
        assert ask(decode, short)[0] == 200 and not waiting_one.done()
        assert is_refused(*chat.result(END_S)) and is_refused(*samples.result(END_S))
        status, said = waiting_one.result(END_S)
    *first, error, last = events(said)
    assert status == 200 and not first and last == "[DONE]", said
    assert json.loads(error)["error"]["code"] == 500 and "choices" not in json.loads(error), said

    _, _, record = asking.request(decode, "GET", "/pd/prompts/mine")
    record = json.loads(record)
    assert (record["decision"], record["reason"]) == ("refused", "peer") and record["attempts"] <= 1, record
    wait_for(lambda: scrape(decode).since(before).value("vllm:pd_decisions_total", decision="refused") == 5,
             lambda: scrape(decode).since(before))
    wait_for(lambda: not any(state(decode)[name] for name in ("decode_queued", "decode_granted", "decode_fenced",
                                                              "running", "waiting")), lambda: state(decode))
    assert state(decode)["free_blocks"] == free
    assert ask(decode, short)[0] == 200
