# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd up` with the real model, and beside it a decode engine whose front end runs in the engine's own process."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
from harness import START_S, WAIT_S, core, engine_env, model_folder

from tests.forked import freeze
from tests.verdict import WrongAnswer, same_answer
from tests.waiting import wait_for
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.ops.client import is_healthy
from vllm_pd.ops.launch.plan import SERVE, UpOptions, plan_fleet, transfer_config
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free, take_free_run

MODEL = "real"
SERVE_ARGS = ["--dtype", "float32", "--max-model-len", "2048", "--block-size", "16", "--enable-prefix-caching",
              "--served-model-name", MODEL, "--num-gpu-blocks-override", "512", "--max-num-seqs", "8",
              "--disable-log-requests"]
PD = {"max_local_prefill_tokens": 40, "ttl_s": 120, "heartbeat_s": 2,  # a P that stands still keeps its jobs waiting
      "drain_timeout_s": 200}


@dataclass
class Servers:
    """Base URLs, and the process ids of their first processes."""
    p: str
    d: str
    async_d: str
    pids: dict[str, int]

    def engine_processes(self, url: str) -> list[psutil.Process]:
        server = psutil.Process(self.pids[url])
        return [server, *server.children(recursive=True)]

    @contextlib.contextmanager
    def p_stands_still(self) -> Iterator[None]:
        """Every process of P is stopped."""
        processes = self.engine_processes(self.p)
        for process in processes:
            freeze(process.pid)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    model = model_folder("VLLM_PD_MODEL")
    os.environ.update({k: v for k, v in engine_env(0).items() if k.startswith(("VLLM_CPU_KV", "VLLM_CPU_CI", "VLLM_NO",
                                                                               "HF_", "TOKENIZERS", "VLLM_LOGGING"))})
    plan = plan_fleet(UpOptions(model, 1, 1, port=take_free_run("127.0.0.1", 2), pd=PD, serve_args=SERVE_ARGS),
                      sorted(os.sched_getaffinity(0)))
    fleet = Fleet(plan)
    with fleet:
        port = take_free("127.0.0.1")
        alone = subprocess.Popen(
            ["taskset", "-c", str(core(1)), *SERVE, model, "--host", "127.0.0.1", "--port", str(port), *SERVE_ARGS,
             "--disable-frontend-multiprocessing", "--kv-transfer-config",
             transfer_config(Role.DECODE, plan.broker_url, PD)], env=engine_env(1))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: alone.poll() is not None or is_healthy(url), "it serves", START_S)
            assert alone.poll() is None
            d, p = plan.engines
            pids = {engine.url: fleet._engines[engine].pid for engine in plan.engines}
            yield Servers(p.url, d.url, url, {**pids, url: alone.pid})
        finally:
            alone.send_signal(signal.SIGTERM)
            try:
                alone.wait(60)
            except subprocess.TimeoutExpired:
                alone.kill()
                pytest.fail("the server does not end upon SIGTERM")


@pytest.fixture(params=["d", "async_d"], ids=["MQLLMEngine", "AsyncLLMEngine"])
def decode(request, servers) -> Iterator[str]:
    """The URL of a decode engine, of either kind. It holds no blocks for anybody in the end (B20), and has counted
    what was done; a peer tells of a transfer after its end."""
    url = getattr(servers, request.param)
    await_value(url, "vllm:pd_degraded", 0, reason="peer")  # P may have stood still in the test before
    yield url
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:pd_parked_blocks",
                 "vllm:pd_quarantined_blocks", "vllm:gpu_cache_usage_perc"):
        await_value(url, name, 0)
    await_value(url, "vllm:pd_handover_seconds_count", scrape(url).value("vllm:pd_attempts_total", outcome="done"),
                stage="transfer")


def gauge(url: str, name: str) -> float:
    return scrape(url).value(name)


def held_blocks(url: str) -> float:
    return gauge(url, "vllm:pd_parked_blocks") + gauge(url, "vllm:pd_quarantined_blocks")


def await_value(url: str, name: str, value: float, timeout_s: float = WAIT_S, **labels: str) -> None:
    wait_for(lambda: scrape(url).value(name, **labels) == value,
             lambda: f"{name} is {scrape(url).value(name, **labels)}, not {value}", timeout_s)


def text(sentences: int, start: int) -> str:
    numbers = range(start, start + sentences)
    return " ".join(f"Item {number} of the list costs {7 * number - 6 * start} coins." for number in numbers)


def question(sentences: int, start: int, **options) -> GenerationRequest:
    content = text(sentences, start) + " The next item costs"
    if options.get("chat"):
        return GenerationRequest([{"role": "user", "content": content}], 8, **options)
    return GenerationRequest(content, 8, **options)


@contextlib.contextmanager
def asked_and_left(url: str, body: dict) -> Iterator[http.client.HTTPConnection]:
    """A client that asks and goes away without waiting for the answer."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"chat": True}, {"chat": True, "stream": True}], ids=str)
def test_b1_b11_answers_equal_those_of_one_engine(options, decode, servers):
    """B1, B11: text, tokens, usage and finish reason of the real model, over either front end; P asked directly is one
    engine that computes it all by itself."""
    start = 100 * len(str(options)) + 10 * len(decode)
    before = scrape(decode)
    for number, sentences in enumerate((1, 5, 12, 30)):
        asked = question(sentences, start + number, **options)
        ours, theirs = ask(decode, MODEL, asked), ask(servers.p, MODEL, asked)
        same_answer(ours, theirs)
        assert ours.usage[0] > 0 and len(ours.token_ids) == ours.usage[1]
    counted = scrape(decode).since(before)
    remote = counted.value("vllm:pd_decisions_total", decision="remote")
    assert remote + counted.value("vllm:pd_decisions_total", decision="local", reason="threshold") == 4
    assert remote == 3 or (options.get("chat") and remote == 4)  # the template makes the short one long, until cached
    done = before.value("vllm:pd_attempts_total", outcome="done") + remote
    await_value(decode, "vllm:pd_attempts_total", done, outcome="done")
    for stage in ("first_step", "queue", "claim", "prefill", "transfer"):
        stages = before.value("vllm:pd_handover_seconds_count", stage=stage) + remote
        await_value(decode, "vllm:pd_handover_seconds_count", stages, stage=stage)
    await_value(decode, "vllm:time_to_first_token_seconds_count",
                before.value("vllm:time_to_first_token_seconds_count") + 4)
    assert scrape(decode).since(before).value("vllm:pd_transfer_bytes_total") > 0


@pytest.mark.parametrize("options", [{"echo": True}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 1},
                                     {"n": 3, "temperature": 0.9, "seed": 5},
                                     {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 5},
                                     {"guided_choice": ["red", "green"]}], ids=str)
def test_b7_b11_what_a_client_may_ask_for(options, decode, servers):
    """B7, B11: the answers are those of P asked directly, whether the prompt went there or not, and both live on."""
    prompt = text(12, 20_000 + len(str(options)) + 100 * len(decode)) + " The next item costs"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, **options}
    before = scrape(decode)
    (ours_code, ours), (theirs_code, theirs) = (operator_request(url, "POST", "/v1/completions", body)
                                                for url in (decode, servers.p))
    assert (ours_code, theirs_code) == (200, 200), (ours, theirs)
    assert len(ours["choices"]) == options.get("n", 1)
    for choice in (*ours["choices"], *theirs["choices"]):
        for figures in ("logprobs", "prompt_logprobs"):  # equal but for the last digits
            choice.pop(figures, None)
    if ours["choices"] != theirs["choices"]:
        raise WrongAnswer(f"{ours['choices']} where one engine gives {theirs['choices']}")
    assert ours["usage"] == theirs["usage"]
    remote = scrape(decode).since(before).value("vllm:pd_decisions_total", decision="remote")
    assert remote == (0 if "prompt_logprobs" in options or {"echo", "logprobs"} <= options.keys() else 1)


@pytest.mark.parametrize("path, asked", [("/v1/completions", {"prompt": None}), ("/v1/chat/completions", {})],
                         ids=["completions", "chat"])
def test_b103_a_request_asks_where_it_is_prefilled(path, asked, decode, servers):
    """B103: long and short prompts go where they ask to, a place that does not exist is refused at once, and the
    answers are those of P asked directly, which hands nothing over whatever is asked."""
    for number, (place, sentences, remote) in enumerate([("remote", 2, 1), ("local", 30, 0), ("auto", 30, 1)]):
        said = text(sentences, 50_000 + 100 * number + len(path) + 10 * len(decode))
        body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "kv_transfer_params": {"pd": place},
                **({"prompt": said} if asked else {"messages": [{"role": "user", "content": said}]})}
        before = scrape(decode)
        (code, ours), (_, theirs) = (operator_request(url, "POST", path, body) for url in (decode, servers.p))
        assert code == 200, ours
        if ours["choices"] != theirs["choices"]:
            raise WrongAnswer(f"{ours['choices']} where one engine gives {theirs['choices']}")
        counted = scrape(decode).since(before)
        assert counted.value("vllm:pd_decisions_total", decision="remote") == remote, place
        assert counted.value("vllm:pd_decisions_total", reason="asked") == (place != "auto")
    body |= {"stream": True}
    for other in ("fast", "x" * 100_000, None, {"a": [[]]}, 7):
        code, said = operator_request(decode, "POST", path, body | {"kv_transfer_params": {"pd": other}})
        assert code == 400 and said["message"].startswith("kv_transfer_params.pd="), said
    for unread in ("fast", [1], {"pd": "remote", "x": 10**400}):  # vLLM's own answer, whichever it is
        operator_request(decode, "POST", path, body | {"kv_transfer_params": unread, "stream": False})
    operator_request(decode, "POST", path, body | {"vllm_xargs": {"kv_transfer_params": "remote"}, "stream": False})
    assert operator_request(decode, "POST", path, body | {"stream": False})[0] == 200


def test_b25_the_client_disconnects_while_its_prompt_waits(decode, servers):
    """B25: from the disconnect on; the same prompt is then answered as ever."""
    asked = question(20, 7000 + len(decode))
    before = scrape(decode)
    with servers.p_stands_still():
        with asked_and_left(decode, asked.body(MODEL)):
            wait_for(lambda: held_blocks(decode), "the prompt waits")
        await_value(decode, "vllm:pd_attempts_total", before.value("vllm:pd_attempts_total", outcome="cancelled") + 1,
                    outcome="cancelled")
    same_answer(ask(decode, MODEL, asked), ask(servers.p, MODEL, asked))


def test_b33_a_waiting_engine_sleeps_and_still_answers(decode, servers):
    """B33: only a parked request for some seconds: next to no CPU; a short prompt is answered at once meanwhile."""
    asked = question(20, 8000 + len(decode))
    short = GenerationRequest("The capital of France is", 2)
    ask(decode, MODEL, short)
    with servers.p_stands_still(), asked_and_left(decode, asked.body(MODEL)):
        wait_for(lambda: held_blocks(decode), "the prompt waits")
        processes = servers.engine_processes(decode)
        began, before = time.monotonic(), [process.cpu_times() for process in processes]
        time.sleep(6)
        used = sum(sum(process.cpu_times()[:2]) for process in processes) - sum(sum(times[:2]) for times in before)
        share = used / (time.monotonic() - began)
        assert share < 0.10, f"{share:.0%} of a core"
        waits = []
        for _ in range(3):  # what the engine makes a request wait, it makes each of them
            began = time.monotonic()
            assert ask(decode, MODEL, short).text.strip().startswith("Paris")
            waits.append(time.monotonic() - began)
        assert min(waits) < 3, waits
        assert held_blocks(decode)


def test_b80_a_wrong_setting_ends_vllm_serve_with_its_reason():
    """B80: before a model is loaded, with the key and what to write."""
    wrong = json.dumps({"kv_connector": "PDConnector", "kv_role": "kv_consumer",
                        "kv_connector_extra_config": {"broker": "tcp://127.0.0.1:1", "max_local_prefil_tokens": 5}})
    ended = subprocess.run([*SERVE, model_folder("VLLM_PD_TINY_MODEL"), "--port", str(take_free("127.0.0.1")),
                            "--kv-transfer-config", wrong],
                           env=engine_env(0), capture_output=True, text=True, timeout=START_S)
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert "max_local_prefil_tokens" in said and "did you mean max_local_prefill_tokens" in said


@pytest.mark.parametrize("which", ["d", "async_d"], ids=["MQLLMEngine", "AsyncLLMEngine"])
def test_b43_sigterm_drains_a_server_and_nothing_fails(which, servers):
    """B43, the last test here, for it ends the server: what is open when the signal comes is answered, remote prefills
    and long decodes alike; new requests are refused, and the server ends by itself."""
    decode = getattr(servers, which)
    process = psutil.Process(servers.pids[decode])
    asked = [dataclasses.replace(question(12 + number, 9000 + 40 * number + len(which)), max_tokens=30,
                                 ignore_eos=True) for number in range(4)]
    asked.append(GenerationRequest("One short prompt that", 60, ignore_eos=True))
    before = scrape(decode)
    with ThreadPoolExecutor(len(asked)) as pool:
        with servers.p_stands_still():  # so that something is open as long as is looked
            answers = [pool.submit(ask, decode, MODEL, one) for one in asked]
            for decision, count in (("remote", 4), ("local", 1)):
                await_value(decode, "vllm:pd_decisions_total", decision=decision,
                            value=before.value("vllm:pd_decisions_total", decision=decision) + count)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: operator_request(decode, "GET", "/pd/status")[1].get("draining"), "it drains")
            code, said = operator_request(decode, "POST", "/v1/completions", {"model": MODEL, "prompt": "x"})
            assert code == 503 and "drained" in said["message"]
        answers = [answer.result(WAIT_S) for answer in answers]
    psutil.wait_procs([process], WAIT_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    for one, answer in zip(asked, answers, strict=True):
        assert answer.usage[1] == one.max_tokens
        same_answer(answer, ask(servers.p, MODEL, one))


def operator_request(url: str, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    connection.request(method, path, json.dumps(body or {}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    return response.status, said
