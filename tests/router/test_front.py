# SPDX-License-Identifier: Apache-2.0
"""The router's own routes, what passes through it unchanged, and B80, B82 for its settings."""
import asyncio
import contextlib
import itertools
import json
import re
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import prometheus_client
import pytest
import zmq

from tests.fakes.event_engine import FakeEngine
from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from tests.router.holding import index_of, with_index
from vllm_pd.broker.members import Access, MemberList
from vllm_pd.broker.server import Broker
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.router import membership as membership_module
from vllm_pd.router import probe, subscriptions
from vllm_pd.router.events import subscriber
from vllm_pd.router.membership import Membership
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions, parse_worker
from vllm_pd.router.policy import Policy
from vllm_pd.router.workers import InFlightTry, WorkerFailure, Workers, WorkerSource, WorkerState
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import is_free, take_free

WITHIN_S = 60
JSON = {"Content-Type": "application/json"}
ROOT = Path(__file__).parents[2]
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "m", "float32", "float32", 16, 2, 2, 64, "hnd")


async def test_headers_ids_query_and_body_go_on_and_come_back():
    async with serving(1) as (served, [engine]):
        place = {"kv_transfer_params": {"pd": "local"}}  # B103
        asked = json.dumps({"model": "m", "prompt": "Hé", "stream": True, **place})
        async with served.session.post(served.url + "/v1/completions?a=%20b&c", data=asked.encode(), headers={
                "X-Request-Id": "r-7", "Authorization": "Bearer theirs", "Connection": "keep-alive, X-Hop",
                "X-Hop": "1", "Accept-Encoding": "gzip", "X-Vllm-Pd-Explain": "1"}) as response:
            body = await response.read()
            assert response.headers["x-from"] == str(engine.port)
            assert response.headers["x-vllm-pd-worker"] == engine.url
            assert "reason=only" in response.headers["x-vllm-pd-explain"]
        target, headers, arrived = engine.asked[0]
        assert target == "/v1/completions?a=%20b&c" and arrived == asked.encode()
        assert headers["x-request-id"] == "r-7" and headers["authorization"] == "Bearer theirs"
        assert headers["host"] == f"127.0.0.1:{engine.port}" and headers["accept-encoding"] == "gzip"
        assert not {"x-hop", "x-vllm-pd-explain", "transfer-encoding"} & headers.keys()
        async with served.session.post(engine.url + "/v1/completions", data=asked.encode()) as bare:
            assert await bare.read() == body
        plain = await served.ask()
        assert "x-vllm-pd-explain" not in plain.headers and "x-vllm-pd-worker" not in plain.headers


async def test_b66_a_router_has_one_context_for_events_all_the_time():
    """As for the registry's readings."""
    async with serving(1):
        [(context, _)] = subscriber._contexts.values()
        assert not context.closed
    assert context.closed and not subscriber._contexts


async def test_a_stream_is_not_held_back():
    """Each event is there before the next one is made."""
    async with serving(1) as (served, [engine]):
        engine.gap_s = 0.3
        loop = asyncio.get_running_loop()
        async with served.session.post(served.url + "/v1/completions", json={"stream": True}) as response:
            times = [loop.time() async for chunk in response.content.iter_any() if b"text" in chunk]
        assert len(times) == 5 and all(later - earlier > 0.15 for earlier, later in zip(times, times[1:], strict=False))


async def test_a_large_body_and_a_large_answer_pass():
    async with serving(1) as (served, [engine]):
        engine.chunks = 20_000
        answer = await served.ask(True, prompt="x" * 3_000_000)
        assert len(answer.events) == 20_001 and answer.events[-1] == "[DONE]"
        assert len(json.loads(engine.asked[0][2])["prompt"]) == 3_000_000


async def test_a_body_beyond_the_bound_is_refused():
    async with serving(1, max_body_bytes=1000) as (served, [engine]):
        assert (await served.ask(prompt="x" * 2000)).status == 413 and not engine.asked


@pytest.mark.parametrize("path, method", [("/v1/completions", "OPTIONS"), ("/tokenize", "POST")])
async def test_a_request_before_each_completion_shifts_no_turn(path, method):
    async with serving(2) as (served, engines):
        chosen = []
        for _ in range(4):
            assert (await served.ask(path=path, method=method)).status == 200
            chosen.append((await served.ask()).json["from"])
        assert sorted(chosen) == sorted(2 * [engine.port for engine in engines])


async def test_a_preflight_with_a_body_is_no_completion():
    """It needs no key, so it must not count as what engines hold."""
    async with serving(2, Policy.KV) as (served, engines):
        index = with_index(served.router.placer, 4)
        body = json.dumps({"model": "m", "prompt": list(range(16))})
        for method, blocks in (("OPTIONS", 0), ("POST", 4)):
            async with served.session.request(method, served.url + "/v1/completions", data=body) as response:
                assert response.status == 200
            assert index.sizes()["expected"] == blocks


async def test_other_paths_and_methods_are_refused():
    async with serving(1) as (served, [engine]):
        assert (await served.ask(path="/v1/load_lora_adapter")).status == 404
        assert (await served.ask(path="/pd/drain")).status == 404
        assert (await served.ask(path="/v1/completions", method="DELETE")).status == 405
        assert (await served.ask(path="/health", method="PUT")).status == 405
        assert not engine.asked
        models = await served.ask(path="/v1/models", method="GET")
        assert models.json["data"][0]["id"] == "m"
        for path in ("/v1/embeddings", "/v1/responses", "/pooling", "/classify", "/score", "/v1/score", "/rerank",
                     "/v1/rerank", "/v2/rerank", "/tokenize", "/detokenize", "/v1/chat/completions"):
            assert (await served.ask(path=path)).status == 200


async def test_what_others_ask_of_a_server_is_served():
    async with serving(1) as (served, [engine]):
        for method, path in (("HEAD", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/ping"),
                             ("HEAD", "/metrics")):
            answer = await served.ask(path=path, method=method)
            assert answer.status == 200 and bool(answer.body) is (method != "HEAD")
        assert not engine.asked
        assert (await served.ask(path="/version", method="GET")).status == 200
        engine.asked.clear()
        engine.fault = Fault.HANG
        waiting = asyncio.create_task(served.ask())
        await served.until(lambda: engine.asked)
        assert (await served.ask(path="/load", method="GET")).json == {"server_load": 1}
        waiting.cancel()
        await engine.stop()
        await served.ask()
        await served.until(lambda: served.worker(engine).state.value == "down")
        assert (await served.ask(path="/ping", method="GET")).status == 503
        assert (await served.ask(path="/health", method="HEAD")).status == 503


@pytest.mark.parametrize("path", ["/rerank", "/v1/responses", "/score"])
async def test_b63_other_work_of_an_engine_counts_as_such(path):
    async with serving(2) as (served, engines):
        engines[0].fault = engines[0].sick = Fault.ERROR
        for _ in range(2):
            assert (await served.ask(path=path)).json["from"] == engines[1].port
        assert served.router.workers.counts() == {"up": 1, "down": 1}


async def ask_raw(served, sent: bytes) -> bytes:
    """All that is answered until the router hangs up."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("keep", [b"", b"connection: keep-alive\r\n"], ids=["close", "keep-alive"])
async def test_a_client_of_http_1_0_gets_no_chunks(keep):
    async with serving(1) as (served, [engine]):
        for asked in ({"stream": True}, {}):
            body = json.dumps({"model": "m", "prompt": "Hello", **asked}).encode()
            answer = await ask_raw(served, b"POST /v1/completions HTTP/1.0\r\nhost: a\r\n" + keep +
                                   b"content-length: %d\r\n\r\n%b" % (len(body), body))
            head, _, found = answer.partition(b"\r\n\r\n")
            assert b" 200 " in head and b"transfer-encoding" not in head and b"connection: close" in head
            async with served.session.post(engine.url + "/v1/completions", data=body) as bare:
                assert found == await bare.read()
        engine.fault = Fault.BREAK
        body = json.dumps({"model": "m", "prompt": "Hello", "stream": True}).encode()
        answer = await ask_raw(served, b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b"
                               % (len(body), body))
        assert b'"code": 502' in answer.rpartition(b"data: ")[2]


async def test_a_client_of_http_1_0_sees_that_an_answer_is_not_whole():
    """The end of its connection would look like the end of the answer."""
    async with serving(1) as (served, [engine]):
        engine.raw = (b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
                      b'5\r\n{"a":\r\n', False)
        with pytest.raises(ConnectionResetError):
            await ask_raw(served, b"POST /v1/completions HTTP/1.0\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")


async def test_two_host_headers_are_refused():
    async with serving(1) as (served, [engine]):
        for path in ("/health", "/v1/completions"):
            answer = await ask_raw(served, f"GET {path} HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 400 ") and b"Host" in answer
        assert not engine.asked


async def test_the_api_key_is_asked_for_as_vllm_does():
    async with serving(1, api_key="secret") as (served, [engine]):
        key = {"authorization": "Bearer secret"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = await served.ask(headers=headers)
            assert answer.status == 401 and answer.json == {"error": "Unauthorized"}
            assert (await served.ask(path="/workers", method="GET", headers=headers)).status == 401
            for path in ("/tokenize", "/detokenize"):
                assert (await served.ask(path=path, headers=headers)).status == 401
        assert not engine.asked
        assert (await served.ask(headers=key)).status == 200
        assert engine.asked[0][1]["authorization"] == "Bearer secret"
        assert (await served.ask(path="/health", method="GET")).status == 200
        assert (await served.ask(path="/v1/completions", method="OPTIONS")).status != 401
        assert (await served.ask(path="/workers", method="GET", headers=key)).status == 200


async def test_the_workers_own_key_takes_the_clients_place():
    async with serving(1, api_key="front", worker_api_key="back") as (served, [engine]):
        assert (await served.ask(headers={"authorization": "Bearer front"})).status == 200
        assert engine.asked[0][1]["authorization"] == "Bearer back"
        assert (await served.ask(path="/v1/completions", method="OPTIONS")).status == 200
        assert "authorization" not in engine.asked[1][1]
        assert (await served.ask(path="/v1/completions", method="OPTIONS",
                                 headers={"authorization": "Bearer front"})).status == 200
        assert "authorization" not in engine.asked[2][1]


async def test_a_router_among_its_own_workers_gets_no_request():
    async with serving(1) as (served, [engine]):
        served.router._membership.add(served.url)
        itself = served.router.workers.get(served.url)
        await served.until(lambda: itself.failures >= 2)
        assert itself.state is not WorkerState.UP and "508" in itself.problem and "router itself" in itself.problem
        assert {(await served.ask()).json["from"] for _ in range(4)} == {engine.port}
        assert engine.asked[0][1]["via"].startswith("1.1 vllm-pd-")
        again = await served.ask(headers={"via": f"1.1 elsewhere, {engine.asked[0][1]['via']}"})
        assert again.status == 508 and len(engine.asked) == 4
        assert (await served.ask(headers={"via": "1.1 elsewhere"})).status == 200
        assert engine.asked[4][1]["via"] != "1.1 elsewhere", "it stays, and ours comes after it"


async def test_b65_a_worker_that_leaves_does_not_show_its_successor_as_down():
    async with serving(1) as (served, [engine]):
        engine.gap_s = 1.0
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: engine.asked)
        before = served.worker(engine)
        served.router._membership.remove(engine.url)
        served.router._membership.add(engine.url)
        after = served.worker(engine)
        await served.until(lambda: after is not before and after.state is WorkerState.UP)
        before.probe_passed()
        page = (await served.ask(path="/metrics", method="GET")).body.decode()
        assert f'vllm:pd_router_worker_up{{worker="{engine.url}"}} 1.0' in page
        assert (await asked).status == 200


async def test_workers_come_and_go_by_request():
    async with serving(1) as (served, [engine]):
        more = FaultyEngine()
        await more.start()
        try:
            async def workers(method, body):
                async with served.session.request(method, served.url + "/workers", data=body, headers=JSON) as response:
                    return response.status, await response.json()

            assert (await workers("POST", json.dumps({"url": more.url + "/"})))[0] == 201
            await served.until(lambda: served.router.workers.counts() == {"up": 2})
            status, shown = await workers("GET", None)
            assert status == 200 and [one["url"] for one in shown["workers"]] == [engine.url, more.url]
            assert {(await served.ask()).json["from"] for _ in range(4)} == {engine.port, more.port}
            more.gap_s = 0.3
            slow = asyncio.gather(*(served.ask() for _ in range(2)))
            await served.until(lambda: served.worker(more).in_flight)
            assert await workers("DELETE", json.dumps({"url": more.url})) == (200, {"removed": more.url})
            assert {(await served.ask()).json["from"] for _ in range(3)} == {engine.port}
            assert {answer.status for answer in await slow} == {200}, "what is open there is finished"
            assert (await workers("DELETE", json.dumps({"url": more.url})))[0] == 404
            for wrong in ("", "{}", '{"url": "ftp://x"}', '{"url": 5}', '{"url": "http://u:p@h"}'):
                status, said = await workers("POST", wrong)
                assert status == 400 and "http://" in said["message"] and "u:p" not in said["message"]
        finally:
            await more.stop()


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
async def test_workers_are_not_changed_through_a_proxy_without_a_key(header):
    async with serving(1) as (served, [engine]):
        async with served.session.delete(served.url + "/workers", json={"url": engine.url},
                                         headers={header: "127.0.0.1"}) as response:
            assert response.status == 403
        assert len(served.router.workers) == 1


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {**JSON, "Origin": "http://evil.example"},
                                     {**JSON, "Origin": "null"}, {**JSON, "Host": "evil.example:8000"}], ids=str)
async def test_b82_without_a_key_no_web_page_changes_workers(headers):
    async with serving(1) as (served, [engine]):
        for method, url in (("POST", "http://127.0.0.1:9"), ("DELETE", engine.url)):
            async with served.session.request(method, served.url + "/workers", data=json.dumps({"url": url}),
                                              headers=headers) as response:
                assert response.status == 403 and "--operator-key" in (await response.json())["message"]
        assert [worker.url for worker in served.router.workers] == [engine.url]


AWAY = {"Host": "router.example", "X-Forwarded-For": "10.0.0.5"}


async def change_workers(served, engine, headers):
    """The statuses and messages of a POST and a DELETE, which have the same answer."""
    answers = set()
    for method, url in (("POST", "http://127.0.0.1:9"), ("DELETE", engine.url)):
        async with served.session.request(method, served.url + "/workers", data=json.dumps({"url": url}),
                                          headers=headers) as response:
            said = await response.json()
            answers.add((response.status, said.get("message", said.get("error"))) if response.status >= 400 else 200)
    return answers


async def test_b82_with_the_operators_key_workers_are_changed_from_anywhere():
    for options in ({}, {"api_key": "clients"}):
        async with serving(1, operator_key="operators", **options) as (served, [engine]):
            for headers in (JSON, {"Authorization": "Bearer clients", **JSON}, {"Authorization": "Bearer wrong"}, AWAY):
                answers = await change_workers(served, engine, headers)
                if options and headers.get("Authorization") != "Bearer clients":
                    assert answers == {(401, "Unauthorized")}
                else:
                    [(status, message)] = answers
                    assert status == 403 and "--operator-key" in message
            assert [worker.url for worker in served.router.workers] == [engine.url]
            key = {"Authorization": "Bearer operators"}
            assert (await served.ask(path="/workers", method="GET", headers=key)).status == 200
            assert (await served.ask(headers=key)).status == (401 if options else 200), "it is no client's key"
            assert await change_workers(served, engine, {**key, **AWAY}) == {200}
            assert [worker.url for worker in served.router.workers] == ["http://127.0.0.1:9"]


async def test_b82_the_clients_key_changes_no_workers():
    """Who adds a worker gets the other clients' prompts, and the workers' key with the first probe. A proxy on
    this machine may send the last request here for a client elsewhere."""
    key = {"Authorization": "Bearer secret"}
    async with serving(1, api_key="secret", worker_api_key="back") as (served, [engine]):
        assert await change_workers(served, engine, JSON) == {(401, "Unauthorized")}
        for headers in ({**key, **JSON, **AWAY}, {**key, **JSON, "X-Forwarded-For": "127.0.0.1"}, key,
                        {**key, **JSON, "Origin": "http://evil.example"}, {**key, **JSON}):
            [(status, message)] = await change_workers(served, engine, headers)
            assert status == 403 and "--operator-key" in message
        assert [worker.url for worker in served.router.workers] == [engine.url]


async def test_a_model_goes_to_those_who_have_it():
    async with serving(2) as (served, engines):
        engines[1].model = "other"
        served.router.workers.remove(engines[1].url)
        served.router.workers.add(engines[1].url, WorkerSource.OPERATOR)
        await served.until(lambda: served.router.workers.counts() == {"up": 2})
        assert {(await served.ask(model="other")).json["from"] for _ in range(4)} == {engines[1].port}
        assert {(await served.ask(model="m")).json["from"] for _ in range(4)} == {engines[0].port}
        assert {(await served.ask(model="unknown")).json["from"] for _ in range(4)} == {one.port for one in engines}


async def test_a_model_whose_workers_are_down_is_not_said_to_be_full():
    async with serving(2, probe_interval_s=0.1) as (served, engines):
        engines[1].model = "other"
        await served.until(lambda: served.worker(engines[1]).models == {"other"})
        await engines[1].stop()
        for _ in range(2):
            answer = await served.ask(model="other")
            assert answer.status == 503 and "up" in answer.json["message"]
        assert (await served.ask(model="m")).status == 200


async def test_an_empty_answer_to_what_needs_no_step_of_the_engine_is_one():
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.fault = Fault.EMPTY
        for path, method in (("/v1/completions", "OPTIONS"), ("/tokenize", "POST")):
            answer = await served.ask(path=path, method=method)
            assert (answer.status, answer.body) == (200, b"")
        assert served.router.workers.counts() == {"up": 2}


async def test_adapters_of_either_kind_are_told_from_base_models():
    async with serving(1) as (served, [engine]):
        engine.cards = [{"id": "m", "root": "r", "parent": None, "max_model_len": 64},
                        {"id": "alias", "root": "r", "parent": None, "max_model_len": 64},
                        {"id": "lora", "root": "l", "parent": "m", "max_model_len": None},
                        {"id": "prompt adapter", "root": "m", "parent": None, "max_model_len": None}]
        worker = served.worker(engine)
        worker.probe_soon()
        await served.until(lambda: len(worker.models) == 4)
        assert worker.base_models == {"m", "alias"} and worker.root == "r"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_model_that_one_worker_turns_out_to_lack_is_asked_for_elsewhere(stream):
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.strict = True
        engines[1].model = "adapter"  # loaded since it was asked
        for _ in range(2):
            answer = await served.ask(stream, model="adapter")
            assert answer.status == 200 and len(engines[1].asked) > 0
        engines[1].asked.clear()
        answer = await served.ask(stream, model="unknown", headers={"x-vllm-pd-explain": "1"})
        assert answer.status == 404 and answer.json["message"] == "The model does not exist."
        assert answer.headers["x-vllm-pd-explain"].count("no_model") == 2
        assert served.router.workers.counts() == {"up": 2}


@pytest.mark.parametrize("probed", [True, False])
async def test_models_that_come_at_run_time_are_learned(probed, monkeypatch):
    if not probed:
        monkeypatch.setattr(probe, "MODELS_PERIOD_S", 0.1)
    async with serving(1, probe_interval_s=0.1 if probed else 30.0) as (served, [engine]):
        assert served.worker(engine).models == {"m"}
        engine.model = "adapter"
        await served.until(lambda: served.worker(engine).models == {"adapter"})


async def test_a_worker_that_lacks_a_model_is_asked_for_its_models():
    async with serving(1) as (served, [engine]):
        served.worker(engine).models_asked_s -= 1.0
        engine.strict, engine.model = True, "other"
        assert (await served.ask(model="m")).status == 404
        await served.until(lambda: served.worker(engine).models == {"other"})


async def test_a_stock_engines_events_draw_its_prefixes():
    """V1's messages as they are on the wire, from an engine that has no route that tells of them."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(2)]
    endpoints = [f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in sockets]
    try:
        async with serving(2, Policy.KV, events=endpoints, block_size=4) as (served, engines):
            async def sent(number, *events):
                payload = msgspec.msgpack.encode([time.time(), events])
                sockets[number].send_multipart([b"", next(numbers[number]).to_bytes(8, "big"), payload])
                await asyncio.sleep(0.02)

            async def chosen(tokens):
                answer = await served.ask(prompt=tokens, headers={"x-vllm-pd-explain": "1"})
                hit = answer.headers["x-vllm-pd-explain"].partition("hit=")[2].split(";")[0]
                return answer.headers["x-vllm-pd-worker"], hit

            numbers, begins = [itertools.count() for _ in sockets], itertools.count(1000, 4)
            index = next(served.router.placer.families.indexes(), None) or with_index(served.router.placer, 4)
            async with asyncio.timeout(100):  # until the subscriptions stand
                while not all(index.blocks(engine.url) for engine in engines):
                    for number in range(2):
                        begin = next(begins)
                        await sent(number, ["BlockStored", [begin], None, [*range(begin, begin + 4)], 4, None])
            before = served.router.subscriptions.progress_of(engines[1].url)
            for number in range(2):
                first = 100 * number
                await sent(number, ["BlockStored", [first + 1, first + 2], None, [*range(first, first + 8)], 4, None])
            def hits(number):
                return index.matches(index.hashes([*range(100 * number, 100 * number + 8)])).get(engines[number].url, 0)

            await served.until(lambda: hits(0) == hits(1) == 2)
            assert before.differs(served.router.subscriptions.progress_of(engines[1].url))
            for number, engine in ((0, engines[0]), (1, engines[1])) * 2:
                assert await chosen([*range(100 * number, 100 * number + 10)]) == (engine.url, "2/2")
            await sent(1, ["BlockRemoved", [102]])
            await served.until(lambda: hits(1) == 1)
            assert await chosen([*range(100, 108)]) == (engines[1].url, "1/2")
    finally:
        context.destroy(linger=0)


async def test_nothing_is_left_on_the_page_of_workers_that_have_gone():
    async with serving(2) as (served, engines):
        kept = len((await served.ask(path="/metrics", method="GET")).body.splitlines())
        for number in range(20):
            engine = FaultyEngine()
            await engine.start()
            engine.fault = (Fault.BREAK, Fault.ERROR, Fault.BUSY)[number % 3]
            served.router._membership.add(engine.url)
            await served.until(lambda: served.router.workers.counts() == {"up": 3})
            for _ in range(3):
                await served.ask(True)
            served.router._membership.remove(engine.url)
            await served.until(lambda: not served.router.workers._leaving)
            await engine.stop()
            page = (await served.ask(path="/metrics", method="GET")).body.decode()
            assert engine.url not in page
        assert len(page.splitlines()) < kept + 40  # what the first failures have brought


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.BREAK, Fault.HANG], ids=lambda fault: fault.name.lower())
async def test_nothing_comes_back_to_the_page_with_the_last_request_of_a_worker_that_has_left(fault):
    async with serving(1) as (served, [engine]):
        engine.fault, engine.gap_s = fault, 0.5
        asked = asyncio.create_task(served.ask(stream=fault is Fault.BREAK))
        await served.until(lambda: engine.asked)
        served.router._membership.remove(engine.url)
        if fault is Fault.HANG:
            await engine.stop()
        await asked
        await served.until(lambda: not served.router.workers._leaving)
        assert engine.url not in (await served.ask(path="/metrics", method="GET")).body.decode()


def test_what_a_worker_leaves_on_the_page_is_not_looked_for_among_all_others(monkeypatch):
    metrics = RouterMetrics()
    for url in ("http://a:1", "http://b:1"):
        metrics.of(url, metrics.worker_up).set(1)
        metrics.of(url, metrics.tries, "broken").inc()
        metrics.of(url, metrics.tries, "broken").inc()
    with monkeypatch.context() as patch:
        patch.setattr(prometheus_client.metrics.MetricWrapperBase, "collect", lambda _: pytest.fail("collected"))
        metrics.forget("http://a:1")
        metrics.forget("http://c:1")
    page = metrics.page().decode()
    assert "http://a:1" not in page and 'worker="http://b:1",outcome="broken"} 2.0' in page.replace(
        'outcome="broken",worker="http://b:1"', 'worker="http://b:1",outcome="broken"')


async def test_the_page_of_metrics_and_the_documentation_name_the_same():
    async with serving(2) as (served, engines):
        engines[0].fault, engines[0].sick = Fault.BREAK, Fault.ERROR
        for _ in range(4):
            await served.ask(True)
        page = (await served.ask(path="/metrics", method="GET")).body.decode()
        assert f'vllm:pd_router_worker_up{{worker="{engines[1].url}"}} 1.0' in page
        assert f'vllm:pd_router_broken_streams_total{{worker="{engines[0].url}"}} 1.0' in page
        assert 'vllm:pd_router_requests_total{path="/v1/completions",status="200"} 4.0' in page
    registered = {family.name for family in RouterMetrics().registry.collect()}
    documented = set(re.findall(r"vllm:pd_router_\w+", (ROOT / "docs" / "router.md").read_text()))
    assert {name.removesuffix("_total") for name in documented} == registered


def test_b80_impossible_settings():
    for wrong, key in (({"port": 0}, "--port"), ({"host": "no.invalid"}, "--host"), ({"workers": ("x", )}, "--worker"),
                       ({"host": "[::1]"}, "--host"), ({"workers": ("http://fd00::6:8000", )}, "--worker"),
                       ({"workers": ("http://::1", )}, "--worker"), ({"broker": "tcp://::1:5700"}, "--broker"),
                       ({"workers": ("http://a:1", "http://a:1/")}, "--worker"), ({"timeout_s": -1}, "--timeout-s"),
                       ({"max_in_flight": 0}, "--max-in-flight"), ({"api_key": ""}, "--api-key"),
                       ({"operator_key": ""}, "--operator-key"),
                       ({"api_key": "k", "operator_key": "k"}, "--operator-key"),
                       ({"probe_interval_s": float("nan")}, "--probe-interval-s"),
                       ({"events": ("http://a:1=b:2", )}, "--worker-events"), ({"block_size": 0}, "--block-size"),
                       ({"events": ("http://a:1", ), "block_size": 16}, "--worker-events"),
                       ({"events": ("http://a:1=b:2", ), "block_size": 16}, "--worker-events"),
                       ({"events": ("http://a:1=tcp://b:0", ), "block_size": 16}, "--worker-events"),
                       ({"grace_s": -1}, "--grace-s"), ({"max_connections": 0}, "--max-connections"),
                       ({"header_timeout_s": 0}, "--header-timeout-s"),
                       ({"stream_timeout_s": -1}, "--stream-timeout-s"),
                       ({"broker": "nowhere"}, "--broker"), ({"broker": "tcp://10.0.0.1:5700"}, "--broker"),
                       ({"broker": "nats://10.0.0.1:4222"}, "--broker"),
                       ({"access": Access(keys="/no/such/file")}, "--keys"),
                       ({"probe_timeout_s": 0}, "--probe-timeout-s")):
        with pytest.raises(ConfigError) as caught:
            RouterOptions(**{"port": 1, **wrong}).checked()
        assert caught.value.key == key and caught.value.cure
    assert parse_worker("--worker", "http://LocalHost:80/v/") == "http://localhost:80/v"
    assert parse_worker("--worker", "https://h") == "https://h:443"
    assert parse_worker("--worker", "http://[FD00::6]:8000/v") == "http://[fd00::6]:8000/v"
    assert RouterOptions(port=1, host="localhost", broker="tcp://[::1]:5700").checked().host == "127.0.0.1"


def test_b80_names_that_the_router_does_not_know(monkeypatch, tmp_path):
    names = {"router.lab": ["10.0.0.9", "127.0.0.1"], "other.lab": ["203.0.113.9"]}

    def look_up(host, *_, **__):
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 1, 6, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert RouterOptions(port=1, host="router.lab").checked().host == "127.0.0.1"
    access = Access(keys=str(Keys.make(tmp_path)))
    for wrong, said in (({"host": "other.lab"}, "--host='other.lab' can't be used: other.lab is 203.0.113.9, and no i"),
                        ({"host": "no.lab"}, "--host='no.lab' can't be used: no.lab has no address"),
                        ({"broker": "tcp://no.lab:1", "access": access},
                         "--broker='tcp://no.lab:1' can't be used: no.lab has no address")):
        with pytest.raises(ConfigError, match=re.escape(said)):
            RouterOptions(**{"port": 1, **wrong}).checked()


@pytest.mark.skipif(not is_free("::1", 0), reason="no IPv6 here")
async def test_a_router_and_its_engines_on_ipv6():
    async with serving(2, make=partial(FaultyEngine, host="::1"), host="::1") as (served, engines):
        for _ in range(2):
            assert (await served.ask()).status == 200
        assert [len(engine.asked) for engine in engines] == [1, 1]
        assert all(headers["host"] == f"[::1]:{engine.port}" for engine in engines for _, headers, _ in engine.asked)


def test_b82_beyond_the_loopback_it_needs_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="--api-key"):
        RouterOptions(port=1, host="0.0.0.0").checked()
    assert RouterOptions(port=1, host="0.0.0.0", api_key="k").checked().host == "0.0.0.0"
    monkeypatch.setenv("VLLM_API_KEY", "k")
    assert RouterOptions(port=1, host="0.0.0.0").checked().api_key == "k"
    monkeypatch.setenv("VLLM_PD_OPERATOR_KEY", "o")
    assert RouterOptions(port=1).checked().operator_key == "o"
    assert RouterOptions(port=1, operator_key="p").checked().operator_key == "p"
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(ConfigError, match="--api-key"):
        RouterOptions(port=1, host="0.0.0.0").checked()


async def test_an_engine_that_can_not_say_where_its_events_are_is_asked_again(monkeypatch):
    monkeypatch.setattr(subscriptions, "RETRY_S", (0.05, 0.1))
    async with serving(1, Policy.KV) as (served, [engine]):
        engine.notices = [(503, {}), (200, {"no": "size"}), (500, {}),
                          (200, {"events": "tcp://127.0.0.1:9", "block_size": 4})]
        served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment")
        await served.until(lambda: served.router.subscriptions.as_json())
        assert index_of(served.router.placer).block_size == 4 and not served.router.subscriptions._asking


async def test_an_engine_that_comes_up_again_is_asked_at_once(monkeypatch, caplog):
    """Whatever the pause after its last answer, which was that of a server that had just begun."""
    monkeypatch.setattr(subscriptions, "RETRY_S", (1000.0, 1000.0))
    async with serving(1, Policy.KV) as (served, [engine]):
        engine.notices = [(503, {})]
        served.worker(engine).fail(WorkerFailure.PROBE, "it restarts")
        await served.until(lambda: served.router.subscriptions._asking and served.worker(engine).state.value == "up")
        await served.until(lambda: f"{engine.url}/pd/events: 503" in caplog.text)
        engine.notices = [(200, {"events": "tcp://127.0.0.1:9", "block_size": 4})]
        served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment")
        await served.until(lambda: served.router.subscriptions.as_json() and not served.router.subscriptions._asking)


def _notice(block_size: int, ranks: int, **more) -> tuple[int, dict]:
    return 200, {"events": "tcp://127.0.0.1:9", "block_size": block_size, "ranks": ranks, **more}


@pytest.mark.parametrize("block_size, ranks", [(8, 1), (4, 2), (4, 3)])
async def test_b61_an_engine_that_restarts_with_another_block_size_or_number_of_ranks_is_read_anew(block_size, ranks):
    """One of --worker: no registry says that it is another life."""
    async with serving(2, Policy.KV) as (served, [engine, other]):
        followed = served.router.subscriptions._subscribers
        for one in (engine, other):
            one.notices = [_notice(4, 2 if ranks != 2 else 1)]
            served.worker(one).fail(WorkerFailure.PROBE, "away for a moment")
        await served.until(lambda: len(followed) == 2)
        before, untouched = followed[engine.url], followed[other.url]
        with_index(served.router.placer, 4).stored(engine.url, [1], None, [0] * 4)
        engine.notices = [_notice(block_size, ranks)]
        served.worker(engine).fail(WorkerFailure.PROBE, "it restarts")
        await served.until(lambda: followed.get(engine.url) not in (None, before))
        index = with_index(served.router.placer, block_size)
        assert [one._index for one in followed[engine.url]] == [index] * ranks
        assert served.router.placer.ranks.get(engine.url) == (
            None if ranks == 1 else [engine.url, *(f"{engine.url}#{rank}" for rank in range(1, ranks))])
        assert engine.url not in with_index(served.router.placer, 4), "blocks of its earlier life"
        assert all(one._task is None for one in before) and not served.router.subscriptions._closing
        now = followed[engine.url]
        served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment, the same one")
        await served.until(lambda: served.worker(engine).state.value == "up" and
                           not served.router.subscriptions._asking)
        assert followed[engine.url] is now and followed[other.url] is untouched


async def test_b61_an_engine_that_restarts_between_two_probes_is_read_anew(tmp_path):
    """Its side socket shows another epoch, while no request and no probe has failed."""
    async with serving(1, Policy.KV) as (served, [engine]):
        lives = [FakeEngine(f"ipc://{tmp_path}/{life}") for life in (1, 2)]
        try:
            engine.notices = [(200, msgspec.to_builtins(lives[0].notice))]
            served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment")
            followed = served.router.subscriptions._subscribers
            await served.until(lambda: engine.url in followed and followed[engine.url][0].connected)
            engine.notices = [(200, msgspec.to_builtins(lives[1].notice) | {"ranks": 2})]
            lives[0].close()
            await served.until(lambda: len(followed.get(engine.url, ())) == 2 and followed[engine.url][0].connected)
            assert served.worker(engine).state.value == "up"
            assert followed[engine.url][0].epoch == lives[1].announcer.epoch
        finally:
            for life in lives:
                life.close()


FOLLOWS = """
import asyncio, os, resource, sys
from vllm_pd.router import membership as module
from vllm_pd.router.membership import Membership
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.workers import Workers

tries, read = [], module.list_members

def count(*values, **named):
    try:
        return read(*values, **named)
    finally:
        tries.append(1)

async def main():
    module.list_members = count
    metrics = RouterMetrics()
    options = RouterOptions(broker=sys.argv[1], registry_timeout_s=0.3, registry_period_s=0.2).checked()
    membership, readings = Membership(options, Workers(metrics, 1), metrics), []
    membership.update = lambda *_: readings.append(1)
    membership.start()
    while not readings:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # its socket ends
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        [os.close(held.pop()) for _ in range(int(sys.argv[2]))]
    tries.clear()
    while len(tries) < 3:
        await asyncio.sleep(0.01)
    [os.close(one) for one in held]
    readings.clear()
    while not readings:
        await asyncio.sleep(0.01)
    await membership.close()

asyncio.run(asyncio.wait_for(main(), 60))
"""


class TestMembership:

    @staticmethod
    @contextlib.asynccontextmanager
    async def following(**options):
        metrics = RouterMetrics()
        workers = Workers(metrics, 10)
        checked = RouterOptions(port=take_free("127.0.0.1"), **options).checked()
        yield Membership(checked, workers, metrics), workers

    @staticmethod
    def member(name, http, role=m.Role.DECODE, draining=False):
        return m.Member(name, role, "tcp://127.0.0.1:1", FINGERPRINT, draining=draining, http=http)

    async def test_those_that_decode_join_and_leave_with_the_registry(self):
        async with self.following() as (membership, workers):
            one, two = self.member("a", "http://h:1"), self.member("b", "http://h:2", m.Role.BOTH)
            prefill = self.member("p", "http://h:3", m.Role.PREFILL)
            membership.update([one, two, prefill, self.member("old", "")], 0.0)
            assert [worker.url for worker in workers] == ["http://h:1", "http://h:2"]
            membership.update([self.member("a", "http://h:1", draining=True), two], 1.0)
            assert [worker.url for worker in workers] == ["http://h:2"]
            membership.update([self.member("b", "http://h:2", m.Role.PREFILL)], 2.0)
            assert not len(workers)

    async def test_b110_a_loopback_of_another_machine_is_not_taken_for_this_one_s(self, caplog):
        """Whatever listens here at that port would get the prompts."""
        async with self.following() as (membership, workers):
            here = self.member("a", "http://127.0.0.1:1")
            elsewhere = [msgspec.structs.replace(self.member(name, f"http://{host}"), address="tcp://203.0.113.7:1")
                         for name, host in (("b", "127.0.0.1:1"), ("c", "localhost:2"), ("d", "[::1]:3"), ("e", "h:4"))]
            for _ in range(2):
                membership.update([here, *elsewhere], 0.0)
            assert [worker.url for worker in workers] == ["http://127.0.0.1:1", "http://h:4"]
            assert workers.get("http://127.0.0.1:1").incarnation == "a"
            assert caplog.text.count("left out, whose servers listen at the loopback there") == 1

    async def test_one_that_is_missing_gets_time(self):
        async with self.following(registry_patience_s=10.0) as (membership, workers):
            one = self.member("a", "http://h:1")
            membership.update([one], 0.0)
            membership.update([], 5.0)  # a broker that has just started
            membership.update([one], 7.0)
            membership.update([], 8.0)
            membership.update([], 17.0)
            assert len(workers) == 1
            membership.update([], 18.5)
            assert not len(workers)

    async def test_one_that_is_missing_and_works_stays(self):
        async with self.following(registry_patience_s=10.0) as (membership, workers):
            membership.update([self.member("a", "http://h:1"), self.member("b", "http://h:2")], 0.0)
            for worker in workers:
                worker.probe_passed()
            membership.update([], 1.0)
            membership.update([], 60.0)
            assert len(workers) == 2
            membership.update([self.member("c", "http://h:2", m.Role.PREFILL)], 61.0)  # another engine in its place
            assert [worker.url for worker in workers] == ["http://h:1"]
            workers.get("http://h:1").fail(WorkerFailure.PROBE, "dead")
            membership.update([], 62.0)
            assert not len(workers)

    async def test_static_ones_stay_and_a_removed_one_stays_away(self):
        async with self.following(workers=("http://h:9", )) as (membership, workers):
            membership.start()
            one = self.member("a", "http://h:1")
            membership.update([one], 0.0)
            assert membership.remove("http://h:1/")
            membership.update([one], 1.0)
            assert [worker.url for worker in workers] == ["http://h:9"]
            membership.update([], 1.5)  # the broker has started anew, or has not heard from it for a while
            membership.update([one], 1.6)
            assert [worker.url for worker in workers] == ["http://h:9"]
            membership.update([self.member("b", "http://h:1")], 2.0)  # another life of it
            assert [worker.url for worker in workers] == ["http://h:9", "http://h:1"]
            assert membership.add("http://h:1") is workers.get("http://h:1")

    async def test_one_that_was_named_is_left_out_while_the_registry_has_no_use_for_it(self):
        """B43: the command line names one, an operator the other; `vllm-pd planner --flip` changes their roles."""
        async with self.following(workers=("http://h:9", )) as (membership, workers):
            membership.start()
            membership.add("http://h:8")
            named = {"http://h:9", "http://h:8"}
            for role, draining, known in ((m.Role.BOTH, False, named), (m.Role.PREFILL, False, set()),
                                          (m.Role.DECODE, False, named), (m.Role.DECODE, True, set()),
                                          (m.Role.BOTH, False, named)):
                membership.update([self.member("a", "http://h:9/", role, draining),
                                   self.member("b", "http://h:8", role, draining)], 0.0)
                assert {worker.url for worker in workers} == known
            assert {worker.source for worker in workers} == {WorkerSource.STATIC, WorkerSource.OPERATOR}
            membership.update([self.member("c", "http://h:7", m.Role.PREFILL)], 0.5)
            with pytest.raises(ConfigError, match="http://h:7.*only prefills"):
                membership.add("http://h:7/")
            membership.problem = "the broker is silent"
            assert membership.add("http://h:7") is not None and membership.remove("http://h:7"), "it may decode by now"
            membership.problem = ""
            membership.update([self.member("a", "http://h:9", m.Role.PREFILL)], 1.0)
            assert membership.remove("http://h:9") and not membership.remove("http://h:9")
            for role in (m.Role.PREFILL, m.Role.DECODE):
                membership.update([self.member("a", "http://h:9", role)], 2.0)
                assert [worker.url for worker in workers] == ["http://h:8"], "an operator has removed the other"

    async def test_one_that_was_named_comes_back_while_the_registry_is_silent(self):
        """It may have been drained, and be a new engine by now."""
        async with self.following(broker=f"tcp://127.0.0.1:{take_free('127.0.0.1')}", workers=("http://h:9", ),
                                  registry_period_s=0.05, registry_timeout_s=0.1,
                                  registry_patience_s=0.5) as (membership, workers):
            membership.start()
            membership.update([self.member("a", "http://h:9", m.Role.PREFILL)], 0.0)
            assert not len(workers)
            async with asyncio.timeout(50):
                while not len(workers):
                    await asyncio.sleep(0.02)
            assert membership.problem and [worker.source for worker in workers] == [WorkerSource.STATIC]
            await membership.close()

    async def test_an_open_request_goes_on_at_one_that_becomes_a_prefill_engine(self):
        async with self.following(workers=("http://h:9", )) as (membership, workers):
            membership.start()
            worker = workers.get("http://h:9")
            worker.in_flight.add(one := InFlightTry(worker))
            membership.update([self.member("a", "http://h:9", m.Role.PREFILL)], 0.0)
            assert workers.leaving == [worker] and one.interruption is None
            membership.update([self.member("a", "http://h:9")], 1.0)
            assert workers.get("http://h:9") is not worker and workers.leaving == [worker]
            workers.try_ended(one)
            assert workers.leaving == []

    async def test_one_that_was_named_is_a_prefill_engine_in_the_order_prefill_first(self):
        async with self.following(workers=("http://h:9", ), prefill_workers=("http://h:7", ),
                                  order="prefill-first") as (membership, workers):
            membership.start()
            for role in (m.Role.DECODE, m.Role.PREFILL, m.Role.DECODE, m.Role.DECODE):
                membership.update([self.member("a", "http://h:9", role)], 0.0)
                found = workers.get("http://h:9")
                assert found is None or found.prefills is (role is m.Role.PREFILL)
            assert found.source is WorkerSource.STATIC

    async def test_one_that_is_removed_and_added_again_is_as_any_other(self):
        async with self.following() as (membership, workers):
            one = self.member("a", "http://h:1")
            membership.update([one], 0.0)
            assert membership.remove("http://h:1") and membership.add("http://h:1") is not None
            membership.update([one], 1.0)
            assert workers.get("http://h:1").incarnation == "a"
            workers.remove("http://h:1")
            membership.update([one], 2.0)
            assert [worker.url for worker in workers] == ["http://h:1"]

    async def test_a_bounded_number_stays_away(self, monkeypatch):
        monkeypatch.setattr(membership_module, "MAX_DISMISSED", 2)
        async with self.following() as (membership, workers):
            members = [self.member(name, f"http://h:{number}") for number, name in enumerate("abc", 1)]
            membership.update(members, 0.0)
            for number in (1, 2, 3):
                assert membership.remove(f"http://h:{number}")
            membership.update(members, 1.0)
            assert [worker.url for worker in workers] == ["http://h:1"], "the first one is forgotten"

    async def test_a_broker_that_is_away_changes_nothing(self):
        async with self.following(broker=f"tcp://127.0.0.1:{take_free('127.0.0.1')}", workers=("http://h:9", ),
                                  registry_period_s=0.05, registry_timeout_s=0.1) as (membership, workers):
            membership.start()
            async with asyncio.timeout(50):
                while not membership.problem:
                    await asyncio.sleep(0.02)
            assert len(workers) == 1
            await membership.close()

    async def test_b66_a_reading_without_descriptors_ends_no_process(self):
        """libzmq ends a process that lacks descriptors for the threads of a new context. The next reading succeeds."""
        broker = Broker("tcp://127.0.0.1:0")
        threading.Thread(target=broker.run, daemon=True).start()
        readers = {free: await asyncio.create_subprocess_exec(
            sys.executable, "-c", FOLLOWS, broker.address, str(free), stderr=asyncio.subprocess.PIPE, cwd=ROOT)
            for free in range(9)}
        try:
            async with asyncio.timeout(WITHIN_S):
                ends = {free: await reader.communicate() for free, reader in readers.items()}
        finally:
            broker.stop()
        assert {free: reader.returncode for free, reader in readers.items()} == dict.fromkeys(readers, 0), ends

    async def test_no_error_ends_the_following(self, monkeypatch):
        """Too many open files, for instance."""
        errors = [OSError(24, "Too many open files"), zmq.ZMQError(24), msgspec.ValidationError("bad")]

        def census(*_, **__):
            if errors:
                raise errors.pop()
            return MemberList((self.member("a", "http://h:1"), ), 0)

        monkeypatch.setattr(membership_module, "list_members", census)
        async with self.following(broker="tcp://127.0.0.1:1", registry_period_s=0.02) as (membership, workers):
            membership.start()
            async with asyncio.timeout(50):
                while not len(workers):
                    await asyncio.sleep(0.01)
            assert not errors and not membership.problem
            await membership.close()


async def test_where_events_are_may_come_in_several_pieces(monkeypatch):
    """As from an engine with many ranks, whose answer does not fit one packet."""
    async with serving(1, Policy.KV) as (served, [engine]):
        notice = json.dumps({"events": f"tcp://127.0.0.1:{take_free('127.0.0.1')}", "block_size": 16,
                             "topic": "t" * 2000}).encode()
        monkeypatch.setattr(subscriptions, "RETRY_S", (0.05, 0.1))
        answer, asked = engine._answer, []

        async def in_pieces(method, target, headers, body, reader, writer) -> bool:
            if target != "/pd/events":
                return await answer(method, target, headers, body, reader, writer)
            asked.append(target)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(notice) + notice[:1000])
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(notice[1000:])
            return True

        monkeypatch.setattr(engine, "_answer", in_pieces)
        served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment")
        followed = served.router.subscriptions.as_json
        await served.until(lambda: len(asked) > 2 or followed().get(engine.url, {}).get("state") == "live")
        assert len(asked) == 2  # by the router and by the subscriber


async def test_no_error_of_its_own_ends_the_probing_or_the_sweeping():
    async with serving(1, Policy.KV) as (served, [engine]):
        errors = [ValueError("a bug")] * 3

        def came_up(worker):
            if errors:
                worker.fail(WorkerFailure.PROBE, "again")
                raise errors.pop()

        served.router.probes._on_up = came_up
        served.worker(engine).fail(WorkerFailure.PROBE, "away for a moment")
        await served.until(lambda: not errors and served.worker(engine).state.value == "up")
        assert served.count("vllm:pd_router_probes_total", worker=engine.url, outcome="error") == 3

        class Index:
            sweeps = 0

            def sweep(self):
                self.sweeps += 1
                raise ValueError("a bug")

        index, families = Index(), served.router.placer.families
        served.router.placer.families = SimpleNamespace(indexes=lambda: [index])
        sweeper = asyncio.create_task(served.router.subscriptions._sweep())
        await served.until(lambda: index.sweeps == 3)
        sweeper.cancel()
        served.router.placer.families = families
