# SPDX-License-Identifier: Apache-2.0
"""What a user meets: `vllm-pd up` with a router, the commands of an operator, the routes and the drain of a server, and
a server of two data-parallel ranks (B11, B43, B67, B80, B91, B97, B119). Real servers of the tiny model, started
once."""
import functools
import http.client
import http.server
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests import asking, waiting
from tests.v1.quick import SERVE
from vllm_pd.ops.launch.child import Child
from vllm_pd.ops.launch.plan import HOST, EnginePlan, UpOptions, plan_fleet, transfer_config
from vllm_pd.ops.launch.printer import say_aloud
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free, take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]
MODEL = "tiny"
SERVE_ARGS = ["--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager",
              "--served-model-name", MODEL, "--num-gpu-blocks-override", "512", "--max-num-seqs", "8"]
PD = {"max_local_prefill_tokens": 100, "attempt_deadline_s": 300.0, "ttl_s": 120, "drain_timeout_s": 600.0}
START_S, END_S = 1200.0, 600.0
request = functools.partial(asking.request, timeout_s=END_S)
wait_for = functools.partial(waiting.wait_for, timeout_s=END_S)
BLOCK = 32
DRAINED = 400  # tokens of an answer that is open when its server gets SIGTERM: seconds, and minutes on a busy machine


class SpanCollector(http.server.ThreadingHTTPServer):
    """What OpenTelemetry's exporters send their spans to."""

    def __init__(self) -> None:
        super().__init__((HOST, 0), CollectorHandler)
        self.requests: list[ExportTraceServiceRequest] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self, trace_id: str) -> dict:
        """Those of this trace that have come, by name."""
        return {span.name: span for one in list(self.requests) for resource in one.resource_spans
                for scope in resource.scope_spans for span in scope.spans if span.trace_id.hex() == trace_id}


class CollectorHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    with SpanCollector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")  # ms
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def fleet(collector) -> Iterator[Fleet]:
    traced = ["--otlp-traces-endpoint", f"http://{HOST}:{collector.server_port}/v1/traces"]
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 2, port=take_free_run(HOST, 4), pd=PD,
                        serve_args=[*SERVE_ARGS, *traced], router=True)
    lines: list[str] = []

    def say(name: str, line: str) -> None:
        lines.append(line)
        say_aloud(name, line)

    with Fleet(plan_fleet(options, (), serve=SERVE), timeout_s=START_S, say=say) as running:
        running.lines = lines
        wait_for(lambda: [(one["state"], (one["events"] or {}).get("state")) for one in workers(running)]
                 == [("up", "live")] * 2, "the router follows both decode engines", timeout_s=START_S)
        yield running


def complete(url: str, tokens: list[int], count: int = 4, **headers: str) -> tuple[int, dict, dict]:
    status, found, body = request(url, "POST", "/v1/completions", {
        "model": MODEL, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}, **headers)
    return status, found, json.loads(body)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 20000) for _ in range(length)]


def workers(fleet: Fleet) -> list[dict]:
    return json.loads(request(fleet.plan.router.url, "GET", "/workers")[2])["workers"]


def status_of(url: str) -> dict:
    status, _, body = request(url, "GET", "/pd/status")
    assert status == 200, body
    return json.loads(body)


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "vllm_pd.cli", *arguments], capture_output=True, text=True,
                          timeout=END_S)


def text_of(answer: dict) -> tuple:
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["completion_tokens"]


class OpenStream:
    """A streaming request that is open until `end`."""

    def __init__(self, url: str, tokens: list[int], count: int) -> None:
        self._body = {"model": MODEL, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True,
                      "stream": True}
        self._url = url
        self.lines: list[bytes] = []
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(END_S)

    def _read(self) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=END_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.strip():
                    self.lines.append(line.strip())
                    self.begun.set()
        finally:
            connection.close()
            self.begun.set()

    def end(self) -> list[bytes]:
        self._thread.join(END_S)
        return self.lines


def test_b91_the_commands_know_the_engines(fleet):
    """B91: status and role, with V1 engines."""
    broker = fleet.plan.broker_url
    listed = command("status", "--broker", broker)
    assert sorted(line.split()[1] for line in listed.stdout.splitlines()) == [
        "(kv_consumer", "(kv_consumer", "(kv_producer"], listed
    name = listed.stdout.split()[0]
    shown = command("status", name, "--broker", broker)
    assert shown.returncode == 0 and "serving" in shown.stdout
    refused = command("role", name, "kv_both", "--broker", broker)
    assert refused.returncode == 2 and "kv_both" in refused.stderr


def test_b91_the_routes_of_a_server(fleet):
    """B91: each engine's routes beside vLLM's own."""
    for engine in fleet.plan.engines:
        status, _, body = request(engine.url, "GET", "/health_generate")
        assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 1
        shown = status_of(engine.url)
        assert (shown["role"], shown["draining"], shown["degraded"]) == (engine.role.value, False, None)
        assert "ranks" not in shown
        assert request(engine.url, "GET", "/pd/events")[0] == (200 if engine.role.decodes else 404)


def test_b11_b97_a_prompt_goes_remote_and_the_figures_say_so(fleet):
    """B11: as the prefill engine by itself answers. B97: P's clients have asked nothing more."""
    decode, producer = fleet.plan.engines[0].url, fleet.plan.engines[-1].url
    one = prompt(1, 700)
    before = scrape(decode), scrape(producer)
    status, _, ours = complete(decode, one, 8)
    assert status == 200
    wait_for(lambda: scrape(decode).since(before[0]).value("vllm:pd_attempts_total", outcome="done", engine="0") == 1,
             "the attempt is counted")
    wait_for(lambda: scrape(producer).since(before[1]).value("vllm:pd_jobs_total", engine="0") == 1,
             "the job is counted")
    after = scrape(producer).since(before[1])
    for figure in ("vllm:prefix_cache_queries_total", "vllm:external_prefix_cache_queries_total",
                   "vllm:prompt_tokens_total", "vllm:request_success_total"):
        assert after.value(figure) == 0, figure
    assert text_of(complete(producer, one, 8)[2]) == text_of(ours)


def test_one_trace_from_the_client_to_the_prefill_engine(fleet, collector):
    """By way of the router. vLLM's own span is the front end's, ours are EngineCore's. Who names no trace has none."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    status, _, _ = complete(fleet.plan.router.url, prompt(2, 700), traceparent=f"00-{trace_id}-00f067aa0ba902b7-01")
    assert status == 200
    wait_for(lambda: {"llm_request", "pd_transfer"} <= collector.spans(trace_id).keys(), "the spans have come")
    found = collector.spans(trace_id)
    assert found.keys() == {"llm_request", "pd_decide", "pd_remote_prefill", "pd_queue", "pd_claim", "pd_prefill",
                            "pd_transfer"}
    whole, remote = found["llm_request"], found["pd_remote_prefill"]
    assert {found[name].parent_span_id for name in ("pd_queue", "pd_transfer")} == {remote.span_id}
    assert whole.parent_span_id == remote.parent_span_id == found["pd_decide"].parent_span_id
    assert whole.start_time_unix_nano < remote.start_time_unix_nano
    assert remote.start_time_unix_nano < remote.end_time_unix_nano < whole.end_time_unix_nano
    attributes = {one.key: one.value for one in remote.attributes}
    assert attributes["pd.outcome"].string_value == "done" and attributes["pd.tokens"].int_value == 700
    assert attributes["pd.peer"].string_value == status_of(fleet.plan.engines[-1].url)["incarnation"]
    assert len({span.trace_id for one in collector.requests for resource in one.resource_spans
                for scope in resource.scope_spans for span in scope.spans if span.name.startswith("pd_")}) == 1


def test_a_collector_that_is_gone_costs_no_request(fleet, collector):
    """From here on nobody listens at the endpoint, in the tests below, too. Answers are those of a prompt without a
    trace, and the engines' logs say which endpoint it is."""
    url, headers = fleet.plan.router.url, {"traceparent": f"00-{'5' * 32}-{'7' * 16}-01"}
    plain = [text_of(complete(url, prompt(seed, 300))[2]) for seed in (21, 22)]
    collector.shutdown()
    collector.server_close()
    with pytest.raises(OSError):
        socket.create_connection((HOST, collector.server_port), timeout=5)
    before = [scrape(engine.url) for engine in fleet.plan.engines]
    for _ in range(3):
        for seed, expected in zip((21, 22), plain, strict=True):
            status, _, answer = complete(url, prompt(seed, 300), **headers)
            assert status == 200 and text_of(answer) == expected
        status, _, answer = complete(url, prompt(time.monotonic_ns(), 300), **headers)
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
    wait_for(lambda: any("exporting" in line and str(collector.server_port) in line and "refused" in line
                         for line in list(fleet.lines)), "the log names the endpoint")
    assert sum(scrape(engine.url).since(one).value("vllm:pd_attempts_total", outcome="done")
               for engine, one in zip(fleet.plan.engines, before, strict=True)) >= 1


def count_asked(urls, before, place, decision):
    return sum(scrape(url).since(one).value("vllm:pd_asked_total", asked=place, decision=decision)
               for url, one in zip(urls, before, strict=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_b103_a_request_asks_where_it_is_prefilled(fleet, path):
    """B103: through the router. A place that does not exist is refused at once; what else may be written there ends no
    engine."""
    urls = [engine.url for engine in fleet.plan.engines]
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    for place, words, decision in (("remote", 12, "remote"), ("local", 200, "local")):
        said = " ".join(f"{path[4:7]}{number}{place}" for number in range(words))
        body = {"model": MODEL, "max_output_tokens" if field == "input" else "max_tokens": 4, "temperature": 0,
                field: [{"role": "user", "content": said}] if field == "messages" else said}
        before = [scrape(url) for url in urls]
        status, _, answer = request(fleet.plan.router.url, "POST", path, body | {"kv_transfer_params": {"pd": place}})
        assert status == 200, answer
        counts = functools.partial(count_asked, urls, before, place, decision)
        wait_for(lambda counts=counts: counts() >= 1, f"{place} is counted")  # the router's probes ask for local, too
        assert place == "local" or counts() == 1
    for other in ("fast", "x" * 100_000, None, {"a": [[]]}, 7):
        status, _, answer = request(urls[0], "POST", path, body | {"kv_transfer_params": {"pd": other}, "stream": True})
        assert status == 400 and json.loads(answer)["error"]["message"].startswith("kv_transfer_params.pd="), answer
    for unread in ({"kv_transfer_params": "fast"}, {"kv_transfer_params": {"pd": "auto", "x": 10**400}},
                   {"vllm_xargs": {"kv_transfer_params": "remote"}}, {"kv_transfer_params": {"x": [[[]]] * 1000}}):
        request(urls[0], "POST", path, body | unread)  # vLLM's own answer, whichever it is
    assert request(urls[0], "POST", path, body)[0] == 200


def as_one(raw: bytes) -> bytes | dict:
    """An answer as it was sent, without ids and times. Of a stream: its last parts, and what its parts are together,
    because how many tokens a part has depends on how fast it is read."""
    raw = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', raw)
    if not raw.startswith(b"data: "):
        return raw
    *parts, done = raw.strip().split(b"\n\n")
    joined = {"done": done}
    for part in map(json.loads, (part.removeprefix(b"data: ") for part in parts)):
        for choice in part.pop("choices"):
            one = joined.setdefault(choice.pop("index"), {"text": ""})
            delta = choice.pop("delta", {})
            one["text"] += choice.pop("text", "") + (delta.pop("content", "") or "")
            one |= {name: value for name, value in (choice | delta).items() if value is not None}
        joined |= part
    return joined


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
DRAWN = {"n": 3, "temperature": 0.9, "seed": 5}


@pytest.mark.parametrize("more", [{}, STREAM, DRAWN, DRAWN | STREAM, {"echo": True}, {"stop": ["e"]}, {"min_tokens": 5},
                                  {"structured_outputs": {"choice": ["red", "green"]}}, {"user": "somebody"}], ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_b11_answers_are_byte_for_byte_those_of_one_engine(fleet, path, more):
    """B11: as P answers when a client asks it, which computes it all by itself."""
    if path.endswith("chat/completions") and "echo" in more:
        more = {"max_completion_tokens": 7}
    text = " ".join(f"{path[4:7]}{number} {sorted(more)}" for number in range(60))[:600]
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body = {"model": MODEL, "max_tokens": 12, "temperature": 0, **asked, **more}
    decode, producer = fleet.plan.engines[0].url, fleet.plan.engines[-1].url
    before = scrape(decode)
    (status, headers, ours), (_, expected, theirs) = (request(url, "POST", path, body) for url in (decode, producer))
    assert status == 200, ours
    wait_for(lambda: scrape(decode).since(before).value("vllm:pd_decisions_total", decision="remote", engine="0") > 0,
             "it went remote")
    assert headers["content-type"] == expected["content-type"] and as_one(ours) == as_one(theirs)


@pytest.mark.parametrize("bad", [{"model": "other"}, {"prompt": "x" * 20000}, {"prompt": []}, {"temperature": -1},
                                 {"max_tokens": 5000}], ids=lambda bad: str(bad)[:30])
def test_b11_errors_are_byte_for_byte_those_of_one_engine(fleet, bad):
    """B11"""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 3, **bad}
    (status, _, ours), (expected, _, theirs) = (request(engine.url, "POST", "/v1/completions", body)
                                                for engine in (fleet.plan.engines[0], fleet.plan.engines[-1]))
    assert 400 <= status == expected < 500 and as_one(ours) == as_one(theirs)


def test_b67_the_router_finds_a_prefix_and_the_load(fleet):
    """B67: KV events of V1, which the router learns of by itself, and B66's load of each engine."""
    router = fleet.plan.router.url
    for number, engine in enumerate(fleet.plan.engines[:2]):
        begin = prompt(10 + number, 8 * BLOCK)
        known = blocks_known(router)
        assert complete(engine.url, begin)[0] == 200
        wait_for(lambda known=known: blocks_known(router) >= known + 8, "the router has heard of it")
        for turn in range(3):
            status, headers, _ = complete(router, begin + prompt(20 + turn, 70), **{"X-Vllm-Pd-Explain": "1"})
            assert status == 200 and headers["x-vllm-pd-worker"] == engine.url, headers["x-vllm-pd-explain"]
    for worker in workers(fleet):
        assert worker["events"]["load"]["total_blocks"] == 511 and worker["events"]["unread"] == {}


def blocks_known(router: str) -> float:
    return scrape(router).value("vllm:pd_router_index_entries", table="names")


def test_b91_doctor_says_which_engine_it_is(fleet):
    """B91"""
    doctor = command("doctor", "--broker", fleet.plan.broker_url)
    assert "engine V1" in doctor.stdout and doctor.stdout.count("fit each other") == 2
    assert doctor.returncode == 0, doctor.stdout


def test_b119_one_command_says_whether_the_fleet_disaggregates(fleet):
    """B119: at an engine and at the router. What it compares with is no prefix hit: P has written that."""
    decode, producer = fleet.plan.engines[0].url, fleet.plan.engines[-1].url
    before = scrape(decode)
    for url, words in ((decode, "engine"), (fleet.plan.router.url, "router")):
        tried = command("doctor", "--try", url, "--prompt-tokens", "500")
        assert tried.returncode == 0 and "BAD" not in tried.stdout, tried
        assert f"ok   server    {words} {url}, model {MODEL}" in tried.stdout
        for part in (status_of(producer)["incarnation"][:12], "500 tokens", "queue", "prefill", "MB/s", "all 16 are"):
            assert part in tried.stdout, (part, tried.stdout)
    assert scrape(decode).since(before).value("vllm:prefix_cache_hits_total") == 0
    stayed = command("doctor", "--try", producer)
    assert stayed.returncode == 1 and "reason role" in stayed.stdout and "-> write the URL of a decode" in stayed.stdout
    assert command("doctor", "--try", decode, "--prompt-tokens", "2040").returncode == 2
    table = command("top", "--broker", fleet.plan.broker_url)
    assert table.returncode == 0 and table.stdout.count("kv_consumer") == 2 and "MB/s" not in table.stdout
    assert all(engine.url in table.stdout for engine in fleet.plan.engines), table.stdout
    wanted = command("planner", "--broker", fleet.plan.broker_url, "--once", "--interval", "0.5")
    assert wanted.returncode == 0 and wanted.stdout.startswith("wanted: 1 prefill, 1 decode; "), wanted


def test_a_timeline_of_the_fleet_has_prompts_on_both_engines(fleet, tmp_path):
    decode, output = fleet.plan.engines[0].url, tmp_path / "trace.json"
    ended = threading.Event()

    def ask() -> None:
        for number in itertools.count(70):
            complete(decode, prompt(number, 300))
            if ended.is_set():
                return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        traced = command("trace", "--broker", fleet.plan.broker_url, "--seconds", "4", "--output", str(output))
    finally:
        ended.set()
        asking.join(END_S)
    assert traced.returncode == 0 and "3 engines" in traced.stdout, traced
    events = json.loads(output.read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    where = {kind: {names[one["pid"]].split()[0] for one in events if one["name"].startswith(kind)}
             for kind in ("remote length: cmpl-", "prefill", "transfer", "job: cmpl-", "first step")}
    assert where == {"remote length: cmpl-": {"kv_consumer"}, "prefill": {"kv_consumer", "kv_producer"},
                     "transfer": {"kv_consumer", "kv_producer"}, "job: cmpl-": {"kv_producer"},
                     "first step": {"kv_consumer"}}
    assert all(0 <= one["ts"] <= 60e6 for one in events if one["ph"] == "X")


def test_b43_sigterm_drains_a_server(fleet):
    """B43: what is open ends well, what comes is refused, the router leaves it, and the server ends by itself."""
    engine = fleet.plan.engines[1]
    child = fleet._engines[engine]
    stream = OpenStream(engine.url, prompt(30, 200), DRAINED)
    child.stop()
    wait_for(lambda: complete(engine.url, prompt(31, 5))[0] == 503, "new requests are refused")
    assert status_of(engine.url)["draining"]
    lines = stream.end()
    assert lines[-1] == b"data: [DONE]" and len(lines) == DRAINED + 2 or b"length" in lines[-2]
    assert child.wait(time.monotonic() + END_S)
    wait_for(lambda: len(workers(fleet)) == 1, "the router has let it go")
    assert child._process.returncode == 0


def test_b43_b70_the_ranks_of_one_server(fleet):
    """B43, with two data-parallel ranks, whose server has two processes: status, figures, drain."""
    port = take_free(HOST)
    url = f"http://{HOST}:{port}"
    server = serve(fleet, port, "--data-parallel-size", "2")
    try:
        wait_for(lambda: healthy(url) or not server.alive, "the server is up", timeout_s=START_S)
        assert server.alive, server.last_lines()
        wait_for(lambda: [rank["degraded"] for rank in status_of(url)["ranks"]] == [None, None], "both have a peer")
        shown = status_of(url)
        assert len({rank["incarnation"] for rank in shown["ranks"]}) == 2
        listed = command("status", "--broker", fleet.plan.broker_url).stdout
        assert all(rank["incarnation"][:12] in listed for rank in shown["ranks"])
        wait_for(lambda: sorted(one["url"] for one in workers(fleet)).count(url) == 1, "the router sees one worker")
        asked = [threading.Thread(target=complete, args=(url, prompt(40 + number, 300), 4)) for number in range(6)]
        for thread in asked:
            thread.start()
        for thread in asked:
            thread.join(END_S)
        wait_for(lambda: all(scrape(url).value("vllm:pd_attempts_total", engine=rank, outcome="done")
                             for rank in ("0", "1")), "both ranks have handed over")
        wait_for(lambda: not any(scrape(url).by("vllm:pd_parked_blocks", "engine").values()), "nothing is parked")
        assert scrape(url).by("vllm:pd_role", "engine", "role") == {
            (rank, role): float(role == "kv_consumer") for rank in ("0", "1")
            for role in ("kv_both", "kv_producer", "kv_consumer")}
        stream = OpenStream(url, prompt(50, 200), DRAINED)
        server.stop()
        wait_for(lambda: listens_no_more(url), "new requests are refused")
        assert b"length" in stream.end()[-2], "the open one ends as it should"
        assert server.wait(time.monotonic() + END_S) and server._process.returncode == 0
    finally:
        server.kill()
        server.wait(time.monotonic() + 30)


def test_b43_an_operator_drains_the_last_engine(fleet):
    """B43, by `vllm-pd drain`: it stays up, and says so."""
    engine = fleet.plan.engines[0]
    name = status_of(engine.url)["incarnation"]
    done = command("drain", name, "--broker", fleet.plan.broker_url)
    assert done.returncode == 0 and "drained" in done.stdout, done
    assert complete(engine.url, prompt(60, 5))[0] == 503
    assert status_of(engine.url)["drained"]


def serve(fleet: Fleet, port: int, *more: str) -> Child:
    import queue
    engine: EnginePlan = fleet.plan.engines[0]
    child = Child("ranks", [*SERVE, os.environ["VLLM_PD_TINY_MODEL"], "--host", HOST, "--port", str(port),
                            "--kv-transfer-config", transfer_config(engine.role, fleet.plan.broker_url, PD),
                            *SERVE_ARGS, *more], env=engine.env, say=say_aloud)
    child.start(queue.SimpleQueue())
    return child


def healthy(url: str) -> bool:
    try:
        return request(url, "GET", "/health")[0] == 200
    except OSError:
        return False


def listens_no_more(url: str) -> bool:
    """Of several processes the one that is asked may have ended by now."""
    try:
        return complete(url, prompt(51, 5))[0] == 503
    except OSError:
        return True
