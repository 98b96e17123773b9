# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker, by gRPC, before faulty engines: the protocol, its bounds, and what is counted as open where."""
import asyncio
import contextlib
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request

import msgspec
import pytest

if not os.environ.get("CI"):
    pytest.importorskip("grpc_health", reason="the packages of the extra `picker` are not installed")

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fakes import certificates
from tests.fakes.faulty_engine import Fault, FaultyEngine
from tests.fakes.gateway import ASKED, NAME, Mode, Picking, destination, endpoint, picking
from tests.router.holding import with_index
from vllm_pd.errors import ConfigError
from vllm_pd.picker import server as server_module
from vllm_pd.picker import wire
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.picking import PickRequest
from vllm_pd.picker.server import EXT_PROC, PickerServer
from vllm_pd.router.options import RequestOrder
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.tokenizer import Prompt, Tokenizer
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.ports import take_free

MODEL = os.environ["VLLM_PD_MODEL"]
MODES = [Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED, Mode.BUFFERED_PARTIAL, Mode.STREAMED, Mode.NONE]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


# How a request gets its engine.

async def test_nothing_is_answered_before_a_streamed_body_has_ended_and_then_all_of_it_goes_back():
    data = json.dumps({"model": "m", "prompt": "word " * 40_000}).encode()
    assert len(data) > 3 * wire.MAX_CHUNK_BYTES
    async with picking(2) as (gateway, engines):
        call = gateway.call()
        await call.head()
        await call.body(data[:100_000], last=False)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.2)
        assert not reading.done(), "the prompt is not known"
        await call.body(data[100_000:])
        assert destination(await reading) in {endpoint(engine) for engine in engines}
        back, ends = b"", []
        while not ends or not ends[-1]:
            chunk = (await call.read()).request_body.response.body_mutation.streamed_response
            assert len(chunk.body) <= wire.MAX_CHUNK_BYTES
            back += chunk.body
            ends.append(chunk.end_of_stream)
        assert back == data and ends == [False] * (len(ends) - 1) + [True]
        await call.end()


async def test_a_gateway_that_buffers_gets_the_engine_with_the_body():
    async with picking(2) as (gateway, engines):
        assert await gateway.picked(mode=Mode.BUFFERED) in {endpoint(engine) for engine in engines}


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED])
async def test_a_body_that_is_not_shown_is_not_waited_for(mode):
    async with picking(2) as (gateway, engines):
        call = gateway.call()
        await call.head(mode=mode)
        assert destination(await call.read()) in {endpoint(engine) for engine in engines}
        if mode == Mode.STREAMED:
            await call.body()
            answer = await call.read()
            assert answer.WhichOneof("response") == "request_body" and not answer.request_body.HasField("response")
        await call.end()


@pytest.mark.parametrize("mode", [*MODES, None])
async def test_a_request_without_a_body_gets_its_engine_at_once(mode):
    async with picking(2) as (gateway, engines):
        found = [await gateway.picked(path="/v1/models?a=b", method="GET", mode=mode, ended=True) for _ in range(4)]
        assert sorted(found) == sorted(2 * [endpoint(engine) for engine in engines]), "in turn"


async def test_a_gateway_that_does_not_say_how_it_sends_bodies_streams_them_both_ways():
    async with picking(1) as (gateway, [engine]):
        call = gateway.call()
        assert await call.picked(mode=None, response_mode=Mode.NONE) == endpoint(engine)
        await call.response_head()
        for data, last in ((b"data: 1\n\n", False), (b"", True)):
            message = ext_proc.ProcessingRequest()
            message.response_body.body, message.response_body.end_of_stream = data, last
            await call.send(message)
            chunk = (await call.read()).response_body.response.body_mutation.streamed_response
            assert (chunk.body, chunk.end_of_stream) == (data, last)
        await call.end()


async def test_trailers_end_a_streamed_body_and_go_back():
    trailers = ext_proc.ProcessingRequest()
    trailers.request_trailers.trailers.headers.add(key="x-sum", raw_value=b"1")
    async with picking(1) as (gateway, [engine]):
        call = gateway.call()
        await call.head()
        await call.body(last=False)
        await call.send(trailers)
        assert destination(await call.read()) == endpoint(engine)
        chunk = (await call.read()).request_body.response.body_mutation.streamed_response
        assert chunk.body == ASKED and not chunk.end_of_stream
        assert (await call.read()).WhichOneof("response") == "request_trailers"
        response_trailers = ext_proc.ProcessingRequest()
        response_trailers.response_trailers.SetInParent()
        await call.send(response_trailers)
        assert (await call.read()).WhichOneof("response") == "response_trailers"
        await call.end()


async def test_a_client_names_no_engine():
    async with picking(1) as (gateway, [engine]):
        headers = ((NAME, "10.6.6.6:80"), (NAME, "10.6.6.7:80"), (f"{NAME}-subset", "10.6.6.6:80"))
        assert await gateway.picked(headers=headers) == endpoint(engine)


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
async def test_trailers_in_place_of_a_body_do_not_keep_a_clients_own_header(mode):
    """Envoy sends no message of a body then, and would send the request to where the client says."""
    trailers = ext_proc.ProcessingRequest()
    trailers.request_trailers.trailers.headers.add(key="x-sum", raw_value=b"1")
    async with picking(1) as (gateway, _):
        call = gateway.call()
        await call.head(mode=mode, headers=((NAME, "10.6.6.6:80"),))
        answer = await call.read()
        assert list(answer.request_headers.response.header_mutation.remove_headers) == [NAME]
        await call.send(trailers)
        status, body, _ = await call.refusal()
        assert status == 400 and b"no body" in body
        assert gateway.count("vllm:pd_router_refused_total", reason="trailers") == 1


async def test_a_prompt_goes_where_its_blocks_are():
    """By the router's own index and tokens; the tokens are sent here, as is every other form by the router's tests."""
    async with picking(3, Policy.KV) as (gateway, engines):
        index = with_index(gateway.server.judgement.placer, 4)
        prompts = [list(range(start, start + 40)) for start in (0, 1000, 2000)]
        for prompt, engine in zip(prompts, engines, strict=True):
            index.stored(engine.url, list(range(prompt[0], prompt[0] + 10)), None, prompt, 4)
        for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
            for prompt, engine in zip(prompts, engines, strict=True):
                data = json.dumps({"model": "m", "prompt": prompt}).encode()
                assert await gateway.picked(data=data, mode=mode) == endpoint(engine)
        assert gateway.count("vllm:pd_router_decisions_total", policy="kv", reason="overlap") == 6
        assert gateway.count("vllm:pd_router_overlap_blocks_total") == 60


async def test_b69_a_prompt_goes_where_the_windows_hold_its_end():
    """All engines hold all of it in the groups with full attention."""
    async with picking(3, Policy.KV) as (gateway, engines):
        index, prompt = with_index(gateway.server.judgement.placer, 4), list(range(40))
        for number, engine in enumerate(engines):
            index.stored(engine.url, list(range(1, 11)), None, prompt, 4)
            index.mark(engine.url, 2, [[], [9, 10], [2, 3]][number])
        for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
            data = json.dumps({"model": "m", "prompt": prompt}).encode()
            assert await gateway.picked(data=data, mode=mode) == endpoint(engines[1])
        assert gateway.count("vllm:pd_router_overlap_blocks_total") == 20


async def test_texts_and_chats_are_tokenised_as_the_engines_do():
    """With the model's own tokenizer and chat template. What is no text goes by the load."""
    tokenizer = Tokenizer(MODEL)
    chat = [{"role": "system", "content": "You know all of geography. " * 20}, {"role": "user", "content": "Paris?"}]
    text = "The capital of France " * 20
    asked = [("/v1/chat/completions", {"messages": chat}), ("/v1/completions", {"prompt": text})]
    async with picking(3, Policy.KV, tokenizer=MODEL) as (gateway, engines):
        await gateway.until(lambda: gateway.server.judgement.pool.loaded)
        index = with_index(gateway.server.judgement.placer, 4)
        for number, (path, body) in enumerate(asked):
            ids = tokenizer.tokens(msgspec.convert(body, Prompt))
            blocks = len(ids) // 4
            assert blocks > 10
            index.stored(engines[number].url, list(range(100 * number, 100 * number + blocks)), None, ids[:4 * blocks],
                         4)
            for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
                for _ in range(3):
                    assert endpoint(engines[number]) == await gateway.picked(
                        path=path, data=json.dumps({"model": "m", **body}).encode(), mode=mode)
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        await gateway.picked(path="/v1/chat/completions", data=json.dumps({"model": "m", "messages": image}).encode())
        assert gateway.count("vllm:pd_router_tokenized_total", outcome="none") == 1
        assert gateway.count("vllm:pd_router_decisions_total", policy="kv", reason="overlap") == 12


async def test_a_session_keeps_its_engine():
    async with picking(3, Policy.CONSISTENT_HASH) as (gateway, _):
        assert len({await gateway.picked(headers=(("X-Session-Id", "s"),)) for _ in range(6)}) == 1
        assert len({await gateway.picked(headers=(("x-session-id", f"s{n}"),)) for n in range(30)}) == 3


async def test_fallbacks_are_the_next_choices():
    async with picking(3, fallbacks=2) as (gateway, engines):
        candidates, left_out = gateway.server.workers.candidates, []

        def watched(model, tried=(), prefills=False):
            left_out.append(tried)
            return candidates(model, tried, prefills)

        gateway.server.workers.candidates = watched
        found = (await gateway.picked()).split(",")
        assert len(left_out) == 3 and all(isinstance(tried, set) for tried in left_out), "a look-up takes no search"
        assert sorted(found) == sorted(endpoint(engine) for engine in engines)
        picked = gateway.server.workers.get(f"http://{found[0]}")
        assert sum(1 for _ in picked.in_flight) == 0
        assert gateway.count("vllm:pd_router_decisions_total", policy="round-robin", reason="turn") == 1, "none counts"


# From which engines.

async def test_only_endpoints_that_the_gateway_allows_are_picked():
    async with picking(3, fallbacks=2) as (gateway, engines):
        for subset in ([endpoint(engines[1]), "10.0.0.9:80"], f"10.0.0.9:80, {endpoint(engines[1])}"):
            for _ in range(4):
                assert await gateway.picked(subset=subset) == endpoint(engines[1])
        for subset in ([], ["10.0.0.9:80"], "", [endpoint(engines[0]) + "0"], [7, None, ["x"]], {"a": 1}, True):
            status, body, headers = await gateway.refused(subset=subset)
            assert status == 503 and json.loads(body)["code"] == 503 and headers["retry-after"] == "1", subset
        assert gateway.count("vllm:pd_router_refused_total", reason="subset") == 7


async def test_an_engine_that_is_down_gets_nothing():
    async with picking(2, probe_interval_s=0.2) as (gateway, engines):
        await engines[0].stop()
        await gateway.until(lambda: gateway.worker(engines[0]).state is WorkerState.DOWN)
        for _ in range(4):
            assert await gateway.picked() == endpoint(engines[1])
        assert (await gateway.refused(subset=[endpoint(engines[0])]))[0] == 503
        await engines[1].stop()
        await gateway.until(lambda: gateway.worker(engines[1]).state is WorkerState.DOWN)
        status, body, headers = await gateway.refused()
        assert status == 503 and b"no worker is up" in body and headers["content-type"] == "application/json"
        assert gateway.count("vllm:pd_router_refused_total", reason="none_up") == 1


async def test_engines_that_are_full_are_429():
    async with picking(1, max_in_flight=1) as (gateway, [engine]):
        call = gateway.call()
        assert await call.picked() == endpoint(engine)
        status, _, headers = await gateway.refused()
        assert status == 429 and headers["retry-after"] == "1"
        await call.end()
        await gateway.until(lambda: gateway.open() == [0])
        assert await gateway.picked() == endpoint(engine)


async def test_names_are_looked_up_and_an_engine_without_an_address_gets_nothing():
    engine = FaultyEngine()
    await engine.start()
    workers = (f"http://localhost:{engine.port}", f"http://no-such-name.invalid:{engine.port}")
    try:
        async with picking(0, up=False, workers=workers) as (gateway, _):
            await gateway.until(lambda: gateway.server.ready)
            await gateway.until(lambda: gateway.server._endpoints.worker_at(endpoint(engine)) is not None)
            assert [await gateway.picked() for _ in range(3)] == 3 * [endpoint(engine)]
            unknown = gateway.server.workers.get(workers[1])
            unknown.probe_passed()
            assert [await gateway.picked() for _ in range(3)] == 3 * [endpoint(engine)]
            gateway.server.workers.remove(workers[0])
            assert (await gateway.refused())[0] == 503
            with_path = gateway.server.workers.add(f"http://127.0.0.1:{engine.port}/below", unknown.source)
            with_path.probe_passed()
            assert (await gateway.refused())[0] == 503
    finally:
        await engine.stop()


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/below", "https://127.0.0.1:{port}"])
async def test_an_engine_that_no_gateway_could_reach_makes_nothing_ready(url, caplog):
    async with picking(1) as (gateway, [engine]):
        unreachable = gateway.server.workers.add(url.format(port=engine.port), gateway.worker(engine).source)
        assert unreachable.url in caplog.text
        assert gateway.server.ready and await health(gateway.channel) == SERVING
        gateway.server.workers.remove(engine.url)
        unreachable.probe_passed()
        assert not gateway.server.ready and await health(gateway.channel) == NOT_SERVING
        status, body, _ = await gateway.refused()
        assert status == 503 and b"no worker is up" in body


async def test_a_subset_without_the_model_is_not_full():
    names = iter(("m", "n"))
    async with picking(2, make=lambda: FaultyEngine(next(names))) as (gateway, engines):
        await gateway.until(lambda: all(worker.models for worker in gateway.server.workers))
        data = json.dumps({"model": "n", "prompt": "a"}).encode()
        assert await gateway.picked(data=data) == endpoint(engines[1])
        assert (await gateway.refused(data=data, subset=[endpoint(engines[0])]))[0] == 503
        assert gateway.count("vllm:pd_router_refused_total", reason="subset") == 1


# What is open where, and what an answer shows.

async def test_a_request_is_open_until_its_stream_ends():
    async with picking(1) as (gateway, [engine]):
        calls = [gateway.call() for _ in range(3)]
        for call in calls:
            await call.picked()
            await call.response_head()
        assert gateway.open() == [3] and gateway.count("vllm:pd_router_in_flight", worker=engine.url) == 3
        await calls[0].end()
        await gateway.until(lambda: gateway.open() == [2])
        calls[1].call.cancel()  # the client has gone
        await gateway.until(lambda: gateway.open() == [1])
        await gateway.channel.close()  # the gateway has gone
        await gateway.until(lambda: gateway.open() == [0])
        assert gateway.count("vllm:pd_router_tries_total", worker=engine.url, outcome="answered") == 3


async def test_a_client_that_goes_before_its_answer_is_counted_and_leaves_nothing():
    async with picking(1) as (gateway, [engine]):
        for ends_with in ("head", "body", "pick"):
            call = gateway.call()
            await call.head()
            if ends_with != "head":
                await call.body(last=ends_with == "pick")
            if ends_with == "pick":
                await call.read()
            await asyncio.sleep(0.05)
            call.call.cancel()
            await gateway.until(lambda: gateway.server._open == 0)
            assert gateway.open() == [0] and gateway.server._bodies.held_bytes == 0
        assert gateway.count("vllm:pd_router_clients_gone_total") == 1
        assert gateway.count("vllm:pd_router_tries_total", worker=engine.url, outcome="client_gone") == 1


async def test_the_load_of_open_requests_is_the_routers():
    """Engines that report none are chosen by their open requests, here as in the router."""
    async with picking(2, Policy.LEAST_LOAD) as (gateway, engines):
        calls = [gateway.call() for _ in range(6)]
        found = [await call.picked() for call in calls]
        assert {found.count(endpoint(engine)) for engine in engines} == {3}
        for call, at in zip(calls, found, strict=True):
            if at == endpoint(engines[0]):
                await call.end()
        await gateway.until(lambda: sorted(gateway.open()) == [0, 3])
        assert await gateway.picked() == endpoint(engines[0])
        for call, at in zip(calls, found, strict=True):
            if at == endpoint(engines[1]):
                await call.end()


async def test_what_an_answer_shows_of_its_engine():
    async with picking(2) as (gateway, engines):
        first, second = (gateway.worker(engine) for engine in engines)
        subset = [endpoint(engines[0])]

        async def answered(status: int, **more: object) -> None:
            call = gateway.call()
            await call.picked(subset=subset)
            await call.response_head(status, **more)
            await call.end()

        heard_s = first.heard_s
        await asyncio.sleep(0.02)
        await answered(400)
        assert first.heard_s == heard_s, "the front end answers that"
        await answered(200)
        assert first.heard_s > heard_s
        await answered(503, headers=(("Retry-After", "4"),), served=subset[0])
        assert first.paused_until_s > first.now() + 2
        assert [await gateway.picked() for _ in range(3)] == 3 * [endpoint(engines[1])]
        await asyncio.sleep(1.1)  # a probe for each failure, but not more often
        probes = engines[0].probes
        await answered(500)
        await gateway.until(lambda: engines[0].probes > probes)
        assert first.state is second.state is WorkerState.UP, "the probe decides"
        engines[0].sick = Fault.ERROR
        await asyncio.sleep(1.1)
        await answered(500)
        await gateway.until(lambda: first.state is WorkerState.DOWN)
        tries = {outcome: gateway.count("vllm:pd_router_tries_total", worker=first.url, outcome=outcome)
                 for outcome in ("answered", "busy", "server_error")}
        assert tries == {"answered": 2, "busy": 1, "server_error": 2}


async def test_the_engine_that_has_served_has_the_load():
    async with picking(2, fallbacks=1) as (gateway, engines):
        call = gateway.call()
        first, second = (await call.picked()).split(",")
        at = {endpoint(engine): gateway.worker(engine) for engine in engines}
        await call.response_head(served=second)
        assert (len(at[first].in_flight), len(at[second].in_flight)) == (0, 1)
        await call.end()
        await gateway.until(lambda: gateway.open() == [0, 0])
        assert gateway.count("vllm:pd_router_tries_total", worker=at[first].url, outcome="passed_over") == 1
        assert gateway.count("vllm:pd_router_tries_total", worker=at[second].url, outcome="answered") == 1
        call = gateway.call()
        await call.picked()
        await call.response_head(served="10.9.9.9:1")  # of none
        await call.end()


async def test_where_two_workers_have_one_address_the_picked_one_has_served():
    engine = FaultyEngine()
    await engine.start()
    urls = (f"http://127.0.0.1:{engine.port}", f"http://localhost:{engine.port}")
    try:
        async with picking(0, workers=urls, fallbacks=1) as (gateway, _):
            workers = [gateway.server.workers.get(url) for url in urls]
            await gateway.until(lambda: None not in map(gateway.server._endpoints.of, workers))
            for _ in workers:  # each is the first one once
                call = gateway.call()
                assert await call.picked() == endpoint(engine)
                before = gateway.open()
                await call.response_head(served=endpoint(engine))
                assert gateway.open() == before
                await call.end()
            for url in urls:
                assert gateway.count("vllm:pd_router_tries_total", worker=url, outcome="answered") == 1
                assert gateway.count("vllm:pd_router_tries_total", worker=url, outcome="passed_over") == 0
    finally:
        await engine.stop()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_retry_after_that_may_be_the_gateways_own_hardly_pauses_an_engine(status):
    async with picking(1) as (gateway, [engine]):
        worker = gateway.worker(engine)
        for served, longest_s in ((None, 1.0), (endpoint(engine), 50.0)):
            call = gateway.call()
            await call.picked()
            probes = engine.probes
            await call.response_head(status, served=served, headers=(("retry-after", "50"),))
            assert longest_s - 10 < worker.paused_until_s - worker.now() <= longest_s
            if served is None:
                await gateway.until(lambda probes=probes: engine.probes > probes)
            await call.end()


async def test_an_engine_that_is_silent_and_down_has_no_open_requests():
    """Their streams go on: the gateway may believe in the connection for hours."""
    async with picking(1, probe_interval_s=0.2) as (gateway, [engine]):
        answered, waiting = gateway.call(), gateway.call()
        for call in (answered, waiting):
            await call.picked()
        await answered.response_head()
        assert gateway.open() == [2]
        engine.sick = Fault.HANG
        await gateway.until(lambda: gateway.open() == [0])
        assert gateway.worker(engine).state is WorkerState.DOWN and gateway.server._open == 2
        engine.sick = Fault.NONE
        await gateway.until(lambda: gateway.worker(engine).state is WorkerState.UP)
        assert (await waiting.response_head()).WhichOneof("response") == "response_headers"
        for call in (answered, waiting):
            await call.end()
        await gateway.until(lambda: gateway.server._open == 0)
        for outcome in ("answered", "timeout"):
            assert gateway.count("vllm:pd_router_tries_total", worker=engine.url, outcome=outcome) == 1
        assert gateway.count("vllm:pd_router_clients_gone_total") == 0


@pytest.mark.parametrize("mode", [Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED])
async def test_a_gateway_may_answer_before_the_pick(mode):
    """For example 413, where its own buffer is full."""
    async with picking(1) as (gateway, _):
        call = gateway.call()
        await call.head(mode=mode, headers=(("content-length", "1000"),))
        if mode == Mode.BUFFERED:
            await call.read()
        else:
            await call.body(b"x" * 1000, last=False)
        await gateway.until(lambda: gateway.server._bodies.held_bytes == 1000)
        assert (await call.response_head(413)).WhichOneof("response") == "response_headers"
        await gateway.until(lambda: gateway.server._bodies.held_bytes == 0)
        if mode == Mode.FULL_DUPLEX_STREAMED:
            await call.body(b"x")  # was under way
        trailers = ext_proc.ProcessingRequest()
        trailers.response_trailers.SetInParent()
        await call.send(trailers)
        assert (await call.read()).WhichOneof("response") == "response_trailers"
        await call.end()
        assert gateway.count("vllm:pd_router_refused_total", reason="gateway") == 1
        assert gateway.count("vllm:pd_router_requests_total", path="/v1/completions", status="413") == 1
        assert gateway.count("vllm:pd_router_clients_gone_total") == 0


# What no gateway or client should send.

async def test_other_routes_and_methods_get_no_engine():
    async with picking(1) as (gateway, _):
        for path in ("/", "/metrics", "/pd/drain", "/v1/completions/x", "", "/V1/COMPLETIONS", "/health"):
            assert (await gateway.refused(path=path))[0] == 404, path
        for method in ("DELETE", "PUT", "", "post"):
            assert (await gateway.refused(method=method))[0] == 405, method
        assert gateway.count("vllm:pd_router_refused_total", reason="route") == 7
        assert gateway.count("vllm:pd_router_requests_total", path="other", status="404") == 7


async def test_bodies_have_bounds():
    async with picking(1, max_body_bytes=200_000, max_bodies_bytes=300_000) as (gateway, [engine]):
        for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
            call = gateway.call()
            await call.head(mode=mode, headers=(("content-length", "200001"),))
            assert (await call.refusal())[0] == 413, "before it has come"
        assert (await gateway.refused(data=b"x" * 200_001))[0] == 413
        call = gateway.call()
        await call.head(mode=Mode.BUFFERED, headers=(("content-length", "9" * 500),))
        await call.read()
        await call.body(b"x" * 200_001)
        assert (await call.refusal())[0] == 413
        waiting = gateway.call()
        await waiting.head()
        await waiting.body(b"x" * 150_000, last=False)
        await gateway.until(lambda: gateway.server._bodies.held_bytes == 150_000)
        status, _, headers = await gateway.refused(data=b"x" * 160_000)
        assert status == 503 and headers["retry-after"] == "1", "together they are too large"
        await waiting.body(b"x")
        assert destination(await waiting.read()) == endpoint(engine)
        waiting.call.cancel()
        await gateway.until(lambda: gateway.server._open == 0)
        assert gateway.server._bodies.held_bytes == 0


async def test_a_body_in_one_piece_has_its_room_before_it_comes():
    """It is in memory before it can be counted. Without its length the longest is taken."""
    async with picking(1, max_body_bytes=200_000, max_bodies_bytes=300_000) as (gateway, [engine]):
        waiting = gateway.call()
        await waiting.head(mode=Mode.BUFFERED, headers=(("content-length", "180000"),))
        await waiting.read()
        assert gateway.server._bodies.held_bytes == 180_000
        for headers in ((), (("content-length", "-1"),), (("content-length", "120001"),)):
            status, _, headers = await gateway.refused(mode=Mode.BUFFERED, headers=headers)
            assert status == 503 and headers["retry-after"] == "1"
        assert await gateway.picked(mode=Mode.BUFFERED, headers=(("content-length", "120000"),)) == endpoint(engine)
        await waiting.body()
        assert destination(await waiting.read()) == endpoint(engine)
        assert gateway.server._bodies.held_bytes == 0
        await waiting.end()
        longer = gateway.call()
        await longer.head(mode=Mode.BUFFERED, headers=(("content-length", "5"),))
        await longer.read()
        await longer.body(b"x" * 200_001)
        assert (await longer.refusal())[0] == 413


async def test_a_message_beyond_all_bounds_ends_its_stream_only():
    async with picking(1, max_body_bytes=100_000) as (gateway, [engine]):
        call = gateway.call()
        await call.head()
        await call.body(b"x" * (3 << 20))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        at = f"127.0.0.1:{gateway.server.options.port}"
        async with grpc.aio.insecure_channel(at, compression=grpc.Compression.Gzip) as packed:
            call = Picking(gateway.server, packed).call()
            await call.head()
            await call.body(bytes(64 << 20))  # 64 KiB on the wire
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await gateway.picked() == endpoint(engine)


async def test_a_body_that_does_not_come_is_408_and_a_head_that_does_not_ends_the_stream():
    async with picking(1, body_timeout_s=0.3) as (gateway, [engine]):
        for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
            call = gateway.call()
            await call.head(mode=mode)
            if mode == Mode.BUFFERED:
                await call.read()
            assert (await call.refusal())[0] == 408
        call = gateway.call()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = gateway.call()
        await call.picked()
        await asyncio.sleep(0.5)
        assert (await call.response_head()).WhichOneof("response") == "response_headers", "answers may take long"
        await call.end()


def deep(count: int) -> bytes:
    return b'{"model": "m", "messages": ' + b"[" * count + b"]" * count + b"}"


HOSTILE = [b"", b"{", b"\xff\xfe\x00", b"null", b"[]", b"7", b'{"model": 7, "prompt": {}}', b'{"prompt": "\\ud800"}',
           deep(100_000),
           b'{"model": "' + b"m" * 300_000 + b'"}', b'{"prompt": [' + b"1," * 200_000 + b"-1]}", b"{" * 1_000_000,
           b'{"prompt": [99999999999999999999999999]}', b'{"prompt": [1e400]}', b"\x1f\x8b\x08" + bytes(5000),
           b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}']


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions"])
async def test_no_body_keeps_a_request_from_an_engine(path):
    """It is for the engine to refuse them, as behind the router: they are placed by load."""
    async with picking(2, Policy.KV) as (gateway, engines):
        with_index(gateway.server.judgement.placer, 4)
        for data in HOSTILE:
            assert await gateway.picked(path=path, data=data) in {endpoint(engine) for engine in engines}


async def test_a_peer_that_does_not_speak_the_protocol_is_refused_and_ends_nothing():
    message = ext_proc.ProcessingRequest
    many = message()
    for number in range(wire.MAX_HEADERS + 1):
        many.request_headers.headers.headers.add(key=f"x-{number}", value="1")
    large = message()
    large.request_headers.headers.headers.add(key="x", raw_value=b"x" * (wire.MAX_HEADERS_BYTES + 1))
    observing = message(observability_mode=True)
    observing.request_headers.SetInParent()
    subset = message()
    subset.request_headers.SetInParent()
    subset.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {f"{NAME}-subset": "a:1," * (wire.MAX_SUBSET + 5)})
    body, trailers, response = message(), message(), message()
    body.request_body.body = b"x"
    trailers.request_trailers.SetInParent()
    response.response_headers.SetInParent()
    async with picking(1) as (gateway, [engine]):
        for bad in (message(), many, large, observing, subset, body, trailers, response):
            call = gateway.call()
            await call.send(bad)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, bad
        for mode in (Mode.FULL_DUPLEX_STREAMED, Mode.BUFFERED):
            call = gateway.call()
            await call.head(mode=mode)
            await call.head(mode=mode)
            with pytest.raises(grpc.aio.AioRpcError):
                while await call.read() is not None:
                    pass
        for then in (message(), body, many):
            call = gateway.call()
            await call.picked()
            await call.send(then)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        empty = gateway.call()
        await empty.end()
        assert await gateway.picked() == endpoint(engine)


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x12\xff\xff\xff\xff\x7f", os.urandom(5000), b"\x0a\x02\x08"])
async def test_bytes_that_are_no_message_end_their_stream_only(data):
    async with picking(1) as (gateway, [engine]):
        process = gateway.channel.stream_stream(f"/{EXT_PROC}/Process")  # bytes as they are
        call = process()
        await call.write(data)
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await gateway.picked() == endpoint(engine)


async def test_an_answer_without_a_status_is_no_failure():
    async with picking(1) as (gateway, [engine]):
        for text in ("", "abc", "²²²", "99999999"):
            call = gateway.call()
            await call.picked()
            message = ext_proc.ProcessingRequest()
            message.response_headers.headers.headers.add(key=":status", raw_value=text.encode())
            await call.send(message)
            await call.read()
            await call.end()
        assert gateway.worker(engine).state is WorkerState.UP


async def test_no_more_requests_are_open_than_allowed():
    async with picking(1, max_streams=2) as (gateway, [engine]):
        calls = [gateway.call() for _ in range(2)]
        for call in calls:
            await call.picked()
        refused = gateway.call()
        status, _, headers = await refused.refusal()
        assert status == 503 and headers["retry-after"] == "1"
        await calls[0].end()
        await gateway.until(lambda: gateway.server._open == 1)
        assert await gateway.picked() == endpoint(engine)
        await calls[1].end()


async def test_a_refusal_that_nobody_reads_has_a_deadline():
    class Unread:
        async def write(self, answer: ext_proc.ProcessingResponse) -> None:
            await asyncio.Event().wait()

        async def abort(self, code: grpc.StatusCode, text: str) -> None:
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED

    async with picking(1, max_streams=1, write_timeout_s=0.2) as (gateway, _):
        call = gateway.call()
        await call.picked()
        await asyncio.wait_for(gateway.server.Process(None, Unread()), 20)
        assert gateway.server._open == 1
        await call.end()


async def test_headers_are_kept_for_the_choice_only():
    async with picking(1) as (gateway, _):
        call = gateway.call()
        await call.picked(headers=(("x-session-id", "only here"),))
        await call.response_head()
        gc.collect()
        assert not [one for one in gc.get_objects() if isinstance(one, PickRequest) and one.headers]
        await call.end()


# Health, metrics, TLS, the end.

async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status


async def test_health_is_that_of_the_engines():
    port = take_free("127.0.0.1")
    async with (picking(1, probe_interval_s=0.2, health_port=port) as (gateway, [engine]),
                grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain):

        async def all_are(status: int) -> None:
            for channel in (gateway.channel, plain):
                async with asyncio.timeout(60):
                    while {await health(channel, name) for name in ("", "readiness", EXT_PROC)} != {status}:
                        await asyncio.sleep(0.05)
                assert await health(channel, "liveness") == SERVING

        await all_are(SERVING)
        await engine.stop()
        await all_are(NOT_SERVING)
        await engine.start()
        await all_are(SERVING)
        with pytest.raises(grpc.aio.AioRpcError):
            await health(plain, "nothing")


def http2(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


async def test_a_peer_that_asks_to_watch_and_reads_nothing_keeps_nothing_up():
    port = take_free("127.0.0.1")
    fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/grpc.health.v1.Health/Watch"),
              (b":authority", b"x"), (b"te", b"trailers"), (b"content-type", b"application/grpc"))
    head = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    async with picking(1, health_port=port, probe_interval_s=0.2, unready_s=0.1, grace_s=1.0) as (gateway, [engine]):
        for to in (port, gateway.server.options.port):
            _, writer = await asyncio.open_connection("127.0.0.1", to)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0, struct.pack(">HI", 4, 0))
                         + http2(1, 4, 1, head) + http2(0, 1, 1, b"\0\0\0\0\0"))
            await writer.drain()
        await asyncio.sleep(0.5)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await health_pb2_grpc.HealthStub(gateway.channel).Watch(health_pb2.HealthCheckRequest()).read()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await engine.stop()
        async with asyncio.timeout(20):
            while await health(gateway.channel) == SERVING:
                await asyncio.sleep(0.05)
        await asyncio.wait_for(gateway.server.drain(0.1), 20)


async def test_the_metrics_port_has_bounds(monkeypatch):
    monkeypatch.setattr(server_module, "PAGE_CONNECTIONS", 3)
    monkeypatch.setattr(server_module, "PAGE_S", 1.5)
    port = take_free("127.0.0.1")
    async with picking(1, metrics_port=port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.1)
        reader, _ = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 1.0) == b"", "one too many"
        for reader, _ in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b"", "it asks nothing"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200"), "one request each"


async def test_metrics_and_health_by_http():
    port = take_free("127.0.0.1")

    def get(path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
            return answer.read()

    async with picking(1, metrics_port=port) as (gateway, [engine]):
        call = gateway.call()
        await call.picked()
        page = (await asyncio.to_thread(get, "/metrics")).decode()
        assert f'vllm:pd_router_in_flight{{worker="{engine.url}"}} 1.0' in page
        assert "vllm:pd_router_connections 1.0" in page
        assert json.loads(await asyncio.to_thread(get, "/health")) == {"status": "ok", "workers": {"up": 1}}
        await call.end()


async def test_tls_and_gateways_with_a_certificate(tmp_path):
    for name, text in (("cert", certificates.CERTIFICATE), ("key", certificates.KEY), ("other", certificates.OTHER)):
        (tmp_path / name).write_text(text)
    files = {"tls_cert": str(tmp_path / "cert"), "tls_key": str(tmp_path / "key")}
    root, key = certificates.CERTIFICATE.encode(), certificates.KEY.encode()
    async with picking(1, credentials=grpc.ssl_channel_credentials(root), **files) as (gateway, [engine]):
        assert await gateway.picked() == endpoint(engine)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.server.options.port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(plain)
    own = grpc.ssl_channel_credentials(root, key, root)
    async with picking(1, credentials=own, tls_client_ca=str(tmp_path / "cert"), **files) as (gateway, [engine]):
        assert await gateway.picked() == endpoint(engine)
        at = f"127.0.0.1:{gateway.server.options.port}"
        async with grpc.aio.secure_channel(at, grpc.ssl_channel_credentials(root)) as nobody:
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(health(nobody), 60)
    with pytest.raises(ConfigError, match="--tls-cert=.* it is no PEM certificate"):
        PickerOptions(tls_cert=str(tmp_path / "other"), tls_key=str(tmp_path / "key")).checked()
    with pytest.raises(ConfigError, match="--tls-client-ca"):
        PickerOptions(**files, tls_client_ca=str(tmp_path / "key")).checked()


async def test_a_port_in_use_is_an_error():
    async with picking(1) as (gateway, _):
        port = gateway.server.options.port
        for options, flag in (({"port": port, "metrics_port": 0}, "--port"),
                              ({"port": take_free("127.0.0.1"), "metrics_port": port}, "--metrics-port")):
            with pytest.raises(ConfigError, match=flag):
                await PickerServer(PickerOptions(**options), RoutingPolicyConfig()).start()


async def test_an_unexpected_error_ends_one_stream(monkeypatch):
    async with picking(1) as (gateway, [engine]):
        async def broken(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patched:
            patched.setattr(gateway.server.picker._placer, "plan", broken)
            call = gateway.call()
            await call.head()
            await call.body()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INTERNAL
        assert await gateway.picked() == endpoint(engine)


@pytest.mark.parametrize("signals, open_request", [((signal.SIGTERM,), False), ((signal.SIGTERM,), True),
                                                   ((signal.SIGINT, signal.SIGTERM), True)])
async def test_it_ends_in_order(signals, open_request):
    """A process. After SIGTERM health checks fail, what is open goes on, and it ends when that has; after a second
    signal at once."""
    engine = FaultyEngine()
    await engine.start()
    port = take_free("127.0.0.1")
    environment = {**os.environ, "PYTHONPATH": os.environ.get("VLLM_PD_PICKER", "")}
    process = subprocess.Popen([
        sys.executable, "-m", "vllm_pd.cli", "picker", "--port", str(port), "--metrics-port", "0", "--worker",
        engine.url, "--unready-s", "0.5", "--grace-s", "40"], env=environment)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            gateway = Picking(None, channel)
            async with asyncio.timeout(60):
                while True:
                    try:
                        if await health(channel) == SERVING:
                            break
                    except grpc.aio.AioRpcError:
                        pass
                    await asyncio.sleep(0.1)
            call = gateway.call()
            assert await call.picked() == endpoint(engine)
            if not open_request:
                await call.end()
            process.send_signal(signals[0])
            if signals[0] == signal.SIGTERM:
                async with asyncio.timeout(30):
                    while await health(channel) == SERVING:
                        await asyncio.sleep(0.02)
            began_s = time.monotonic()
            if open_request:
                await asyncio.sleep(1.0)
                assert process.poll() is None
            if len(signals) > 1:
                process.send_signal(signals[1])
            elif open_request:
                assert (await call.response_head()).WhichOneof("response") == "response_headers"
                await call.end()
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert time.monotonic() - began_s < 30
    finally:
        process.kill()
        process.wait()
        await engine.stop()


# Settings.

@pytest.mark.parametrize("options, error", [
    ({"order": RequestOrder.PREFILL_FIRST, "broker": "tcp://127.0.0.1:5700"}, "--order=.*a picker changes no request"),
    ({"metrics_port": 9002}, "--port=.*different numbers"), ({"port": 0}, "--port"),
    ({"health_port": 70000}, "--health-port"), ({"fallbacks": 9}, "--fallbacks"),
    ({"max_streams": 0}, "--max-streams"), ({"tls_cert": "x"}, "--tls-cert.*together"),
    ({"tls_cert": "/no/such", "tls_key": "/no/such"}, "--tls-cert=.*can't be read \\("),
    ({"tls_client_ca": "x"}, "--tls-client-ca"), ({"host": "no-such-name.invalid"}, "--host"),
    ({"workers": ("ftp://x",)}, "--worker"), ({"body_timeout_s": 0}, "--body-timeout-s")])
def test_settings_that_are_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        PickerOptions(**options).checked()


def test_a_picker_may_listen_beyond_the_loopback_without_a_key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    checked = PickerOptions(host="0.0.0.0", workers=("http://127.0.0.1:1/",)).checked()
    monkeypatch.setenv("VLLM_PD_OPERATOR_KEY", "k")  # a router's: it would have to be another one than clients'
    assert PickerOptions().checked().operator_key is None
    assert checked.host == "0.0.0.0" and checked.key_for_workers == "k" and checked.workers == ("http://127.0.0.1:1",)
