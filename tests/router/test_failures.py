# SPDX-License-Identifier: Apache-2.0
"""B63, B64: workers that refuse, hang, break and lie, and what clients see of it."""
import asyncio
import gzip
import itertools
import json
import math
import random
import time
from types import SimpleNamespace

import aiohttp
import pytest

from tests.fakes.faulty_engine import TOKENS, Fault, serving
from tests.router.holding import with_index
from vllm_pd.router import worker_client
from vllm_pd.router.policy import Policy
from vllm_pd.router.probe import _ProbeDeadline
from vllm_pd.router.subscriptions import WorkerProgress
from vllm_pd.router.workers import WorkerFailure, WorkerSource

TEXTS = [{"choices": [{"text": f" t{number}"}]} for number in range(TOKENS)]
BEFORE_FIRST = [Fault.HANG_UP, Fault.ERROR, Fault.NOISE, Fault.EMPTY, Fault.EMPTY_STREAM, Fault.ERROR_EVENT]


@pytest.mark.parametrize("fault", BEFORE_FIRST, ids=lambda fault: fault.name.lower())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b64_a_try_that_fails_before_the_first_byte_goes_elsewhere_at_once(fault, stream):
    async with serving(3) as (served, engines):
        for engine in engines[:2]:
            engine.fault = engine.sick = fault
        for _ in range(3):
            answer = await asyncio.wait_for(served.ask(stream), 20)
            assert answer.status == 200
            if stream:
                assert answer.events == [*TEXTS, "[DONE]"]
            else:
                assert answer.json["from"] == engines[2].port
        assert [len(engine.asked) for engine in engines] == [1, 1, 3], "B63: out at once, after one failure"
        assert served.router.workers.counts() == {"up": 1, "down": 2}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b64_at_most_three_workers_are_tried(stream):
    async with serving(5) as (served, engines):
        for engine in engines:
            engine.fault = engine.sick = Fault.ERROR
        answer = await served.ask(stream, {"x-vllm-pd-explain": "1"})
        assert answer.status == 500 and answer.json["message"].startswith("broken")
        assert sorted(len(engine.asked) for engine in engines) == [0, 0, 1, 1, 1]
        assert len(json.loads(answer.headers["x-vllm-pd-explain"])["tries"]) == 3


@pytest.mark.parametrize("fault", [Fault.EMPTY, Fault.EMPTY_STREAM, Fault.HANG_UP, Fault.SHORT],
                         ids=lambda fault: fault.name.lower())
async def test_b64_never_success_without_a_body(fault):
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.fault = fault
        for stream in (False, True):
            answer = await served.ask(stream)
            assert answer.status in (502, 503) and answer.json["code"] == answer.status
            await served.until(lambda: served.router.workers.counts() == {"up": 2})


@pytest.mark.parametrize("fault", [Fault.BREAK, Fault.CUT], ids=lambda fault: fault.name.lower())
async def test_b64_a_stream_that_breaks_later_ends_with_an_error_and_is_not_tried_again(fault):
    async with serving(2) as (served, engines):
        engines[0].fault = engines[1].fault = fault
        answer = await served.ask(True)
        assert answer.status == 200
        *begin, last = answer.body.decode().strip().split("\n\n")
        assert json.loads(begin[0].removeprefix("data: ")) == TEXTS[0]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == 502 and "lost" in error["message"]
        assert b"[DONE]" not in answer.body
        assert sum(len(engine.asked) for engine in engines) == 1
        failed = next(engine for engine in engines if engine.asked)
        assert served.count("vllm:pd_router_broken_streams_total", worker=failed.url) == 1


EVENT = b'data: {"choices": [{"text": " t0"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(body: bytes, *headers: bytes, end: bool = True) -> bytes:
    return (HEAD + b"".join(header + b"\r\n" for header in headers) + b"transfer-encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n" % (len(body), body) + b"0\r\n\r\n" * end)


def sized(body: bytes, missing: int = 0) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % (len(body) + missing) + body


GZIPPED = gzip.compress(EVENT + b"data: [DONE]\n\n")
DONE = EVENT + b"data: [DONE]\n\n"


@pytest.mark.parametrize("raw, goes_on, body", [
    (chunked(GZIPPED, b"content-encoding: gzip"), True, GZIPPED),
    (chunked(EVENT + b"data:[DONE]\n\n"), True, EVENT + b"data:[DONE]\n\n"),
    (chunked(DONE + b": a comment that is rather long, after all of it\n\n"), True, None),
    (chunked(EVENT + b"event: response.completed\ndata: {}\n\n"), True, None),
    (sized(EVENT), True, EVENT),
    (HEAD + b"connection: close\r\n\r\n" + EVENT + b"data:[DONE]\r\n\r\n", False, None),
    (HEAD + b"content-encoding: gzip\r\nconnection: close\r\n\r\n" + GZIPPED, False, GZIPPED),
], ids=["gzip", "no space", "comment", "no done", "length", "connection", "gzip and connection"])
async def test_b64_a_stream_is_complete_where_its_framing_ends(raw, goes_on, body):
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.raw = raw, goes_on
        for _ in range(4):
            answer = await served.ask(True)
            assert answer.status == 200 and b"error" not in answer.body
            assert answer.body == body or body is None and EVENT in answer.body
        assert served.router.workers.counts() == {"up": 2}
        assert not sum(served.count("vllm:pd_router_broken_streams_total", worker=engine.url) for engine in engines)


async def test_b64_a_stream_that_never_has_a_done_needs_none():
    async with serving(1) as (served, [engine]):
        events = b'event: response.completed\ndata: {"type": "response.completed"}\n\n'
        engine.raw = HEAD + b"connection: close\r\n\r\n" + events, False
        assert (await served.ask(True, path="/v1/responses")).body == events
        assert not served.count("vllm:pd_router_broken_streams_total", worker=engine.url)


@pytest.mark.parametrize("raw", [chunked(DONE, end=False), HEAD + b"connection: close\r\n\r\n" + EVENT],
                         ids=["chunked", "connection"])
async def test_b64_a_stream_that_ends_before_its_framing_does_is_broken(raw):
    async with serving(1) as (served, [engine]):
        engine.raw = raw, False
        answer = await served.ask(True)
        assert answer.events[-1]["error"]["code"] == 502
        assert served.count("vllm:pd_router_broken_streams_total", worker=engine.url) == 1


@pytest.mark.parametrize("raw", [chunked(GZIPPED[:20], b"content-encoding: gzip", end=False), sized(DONE, missing=7)],
                         ids=["compressed", "length"])
async def test_b64_no_event_goes_into_a_stream_that_has_no_place_for_it(raw):
    async with serving(1) as (served, [engine]):
        engine.raw = raw, False
        with pytest.raises(aiohttp.ClientPayloadError):
            await served.ask(True)
        assert served.count("vllm:pd_router_broken_streams_total", worker=engine.url) == 1


async def test_b63_a_broken_stream_does_not_take_the_last_worker_out():
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.fault, engine.sick = Fault.BREAK, Fault.HANG  # so that it is the stream that decides
        for _ in range(4):
            assert (await served.ask(True)).events[-1]["error"]["code"] == 502
        assert sorted(served.worker(engine).state.value for engine in engines) == ["down", "up"]
        for engine in engines:
            engine.fault = Fault.NONE
        answers = await asyncio.gather(*(served.ask() for _ in range(27)))
        assert {answer.status for answer in answers} == {200}
        for engine in engines:
            engine.sick = Fault.ERROR  # the probe decides
        await served.until(lambda: served.router.workers.counts() == {"down": 2})


async def test_b63_the_last_worker_of_a_model_is_spared_too():
    async with serving(2) as (served, engines):
        engines[1].model, engines[1].fault, engines[1].sick = "other", Fault.BREAK, Fault.NONE
        served.worker(engines[1]).probe_soon()
        await served.until(lambda: served.worker(engines[1]).models == {"other"})
        engines[1].sick = Fault.HANG
        assert (await served.ask(True, model="other")).events[-1]["error"]["code"] == 502
        assert served.router.workers.counts() == {"up": 2}


async def test_b64_an_answer_in_one_piece_that_breaks_is_tried_elsewhere():
    """Nothing of it has gone to the client yet."""
    async with serving(2) as (served, engines):
        engines[0].fault = engines[0].sick = Fault.SHORT
        for _ in range(2):
            assert (await served.ask()).json["from"] == engines[1].port
        assert len(engines[0].asked) == 1


async def test_b63_a_dead_worker_gets_nothing_and_comes_back_when_it_lives():
    async with serving(2) as (served, engines):
        await engines[0].stop()
        answers = await asyncio.gather(*(served.ask() for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        assert served.worker(engines[0]).state.value == "down"
        assert (await served.ask()).json["from"] == engines[1].port
        await engines[0].start()
        await served.until(lambda: served.worker(engines[0]).state.value == "up")
        assert {(await served.ask()).json["from"] for _ in range(4)} == {engine.port for engine in engines}


async def test_b63_a_wedged_worker_loses_its_requests_to_others():
    """It accepts, and says nothing: the probe finds out, and what waits there goes elsewhere before its first byte."""
    async with serving(2, probe_interval_s=0.2, policy="least-load") as (served, engines):
        engines[0].fault = engines[0].sick = Fault.HANG
        answers = await asyncio.wait_for(asyncio.gather(*(served.ask(stream) for stream in (True, False) * 4)), 50)
        assert {answer.status for answer in answers} == {200}
        assert served.worker(engines[0]).state.value == "down"
        asked = len(engines[0].asked)
        assert asked >= 1
        for _ in range(5):  # although it has the fewest connections
            assert (await served.ask()).status == 200
        assert len(engines[0].asked) == asked
        await served.until(lambda: engines[0].cancelled >= asked)


@pytest.mark.parametrize("fault", [Fault.HANG_UP, Fault.HANG, Fault.ERROR], ids=lambda fault: fault.name.lower())
async def test_b63_the_best_prefix_match_saves_no_failing_worker(fault):
    async with serving(3, Policy.KV, probe_interval_s=0.2) as (served, engines):
        index = with_index(served.router.placer, 4)
        index.stored(engines[0].url, [1, 2, 3], None, list(range(12)), 4)
        index.stored(engines[1].url, [1], None, list(range(4)), 4)
        tokens = list(range(14))
        assert (await served.ask(prompt=tokens)).json["from"] == engines[0].port
        engines[0].fault = engines[0].sick = fault
        for _ in range(4):
            answer = await asyncio.wait_for(served.ask(prompt=tokens), 50)
            assert answer.json["from"] == engines[1].port
        assert len(engines[0].asked) == 2 + (fault is Fault.HANG_UP)  # once more, on a new connection
        engines[0].fault = engines[0].sick = Fault.NONE
        await served.until(lambda: served.worker(engines[0]).state.value == "up")
        index.cleared(engines[1].url)
        assert (await served.ask(prompt=[*tokens, 77, 78])).json["from"] == engines[0].port


async def test_b63_b64_a_stream_of_a_worker_that_wedges_ends_with_an_error():
    async with serving(1, probe_interval_s=0.2) as (served, [engine]):
        engine.fault = Fault.STALL
        engine.sick = Fault.HANG
        answer = await asyncio.wait_for(served.ask(True), 50)
        assert answer.events[0] == TEXTS[0] and answer.events[-1]["error"]["code"] == 502


async def test_b63_a_wedged_worker_that_has_left_loses_its_requests_too():
    async with serving(2, probe_interval_s=0.2) as (served, engines):
        engines[0].fault = Fault.HANG
        asked = asyncio.gather(*(served.ask() for _ in range(4)))
        await served.until(lambda: len(engines[0].asked) == 2)
        engines[0].sick = Fault.HANG
        worker = served.worker(engines[0])
        served.router.workers.remove(engines[0].url)
        answers = await asyncio.wait_for(asked, 50)
        assert {answer.json["from"] for answer in answers} == {engines[1].port}
        assert not worker.in_flight
        probes = engines[0].probes
        await asyncio.sleep(0.5)
        assert engines[0].probes == probes, "nobody asks for it any more"


async def test_one_that_ends_leaves_the_connections_of_the_next_worker_at_its_url():
    async with serving(1) as (served, [engine]):
        engine.gap_s = 0.5
        slow = asyncio.create_task(served.ask())
        await served.until(lambda: served.worker(engine).in_flight)
        served.router.workers.remove(engine.url)
        served.router.workers.add(engine.url, WorkerSource.OPERATOR)
        await served.until(lambda: served.worker(engine).state.value == "up")
        engine.gap_s = 0.0
        assert (await served.ask()).status == 200
        [idle] = served.router.worker_client._idle.values()
        [connection] = idle
        assert not slow.done() and (await slow).status == 200
        assert connection.usable
        served.router.workers.remove(engine.url)
        assert not connection.usable


async def test_b43_a_worker_that_drains_finishes_what_is_open():
    """It refuses probes as it refuses requests, and answers slowly what it has."""
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.1) as (served, engines):
        for engine in engines:
            engine.gap_s = 0.8
        asked = asyncio.gather(*(served.ask() for _ in range(4)))
        await served.until(lambda: all(len(engine.asked) == 2 for engine in engines))
        engines[0].fault = engines[0].sick = Fault.BUSY
        await served.until(lambda: served.worker(engines[0]).state.value == "down")
        assert [answer.status for answer in await asked] == [200] * 4
        assert len(engines[0].asked) == 2 and served.count("vllm:pd_router_probes_total", outcome="failed",
                                                           worker=engines[0].url) >= 1


async def test_b63_a_slow_worker_that_generates_is_no_wedged_one():
    async with serving(1, probe_interval_s=0.1) as (served, [engine]):
        engine.sick = Fault.HANG  # a queue before the probe
        engine.gap_s, engine.chunks = 0.05, 25
        answer = await served.ask(True)
        assert answer.events[-1] == "[DONE]" and len(answer.events) == 26
        assert served.count("vllm:pd_router_probes_total", worker=engine.url, outcome="failed") == 0


async def test_b63_a_busy_worker_whose_events_go_on_is_not_out_though_nothing_is_heard_for_long():
    """Answers in one piece, and a queue before the probe: all that shows is what the engine tells of itself."""
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.3) as (served, engines):
        batches = itertools.count()
        served.router.subscriptions.progress_of = lambda url: WorkerProgress(next(batches))
        for engine in engines:
            engine.sick, engine.gap_s = Fault.HANG, 1.0
        answers = await asyncio.gather(*(served.ask() for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert sum(len(engine.asked) for engine in engines) == 4, "each went to one worker only"
        assert served.router.workers.counts() == {"up": 2}
        assert all(served.count("vllm:pd_router_probes_total", worker=engine.url, outcome="inconclusive")
                   for engine in engines)


async def test_b63_a_probe_without_a_connection_does_not_count_while_an_answer_comes(monkeypatch):
    """The worker's queue of new connections is full, which drops packets."""
    async with serving(1, probe_interval_s=0.1, probe_timeout_s=15.0, connect_timeout_s=0.1) as (served, [engine]):
        engine.gap_s, engine.chunks = 0.3, 8
        asked = asyncio.create_task(served.ask(True))
        await served.until(lambda: engine.asked)
        monkeypatch.setattr(worker_client, "connect", lambda *given: asyncio.sleep(60.0))
        answer = await asked
        assert answer.events[-1] == "[DONE]" and len(answer.events) == 9
        assert served.count("vllm:pd_router_probes_total", worker=engine.url, outcome="inconclusive")
        assert not served.count("vllm:pd_router_probes_total", worker=engine.url, outcome="failed")
        assert served.router.workers.counts() == {"up": 1}


async def test_b63_events_alone_save_no_worker_for_ever():
    """It is out after four periods; what is open there ends with `timeout_s`."""
    async with serving(1, probe_interval_s=0.1, probe_timeout_s=0.1, timeout_s=1.0) as (served, [engine]):
        load = itertools.count()
        served.router.subscriptions.progress_of = lambda url: WorkerProgress(0, (next(load), ))
        engine.fault = engine.sick = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: served.worker(engine).state.value == "down")
        assert served.worker(engine).in_flight
        assert (await asyncio.wait_for(asked, 50)).status == 503
        assert "timeout" in served.worker(engine).problem


async def answers_of_a_long_queue(served, engines):
    """Each comes in one piece, later than a probe may wait for its token."""
    for engine in engines:
        engine.sick, engine.gap_s = Fault.HANG, 0.8
    asked = asyncio.gather(*(served.ask() for _ in range(4)))
    await served.until(lambda: served.router.workers.counts() == {"down": 2})
    assert [answer.status for answer in await asked] == [200] * 4
    assert sum(len(engine.asked) for engine in engines) == 4, "each went to one worker only"


async def test_b63_a_worker_that_computes_is_taken_out_and_keeps_its_requests():
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.1) as (served, engines):
        batches = itertools.count()
        served.router.subscriptions.progress_of = lambda url: WorkerProgress(next(batches))
        await answers_of_a_long_queue(served, engines)


@pytest.mark.parametrize("generated", [itertools.count(), iter(())], ids=["metrics", "nothing"])
async def test_b63_a_worker_without_events_keeps_its_requests_too(generated):
    """Its /metrics shows that it computes, or it tells nothing at all."""
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.1) as (served, engines):
        for engine in engines:
            engine.generated = generated
        await answers_of_a_long_queue(served, engines)


async def test_b63_a_wedged_engine_behind_a_server_that_answers_loses_its_requests():
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.1) as (served, engines):
        engines[0].generated = itertools.repeat(7)
        engines[0].fault = engines[0].sick = Fault.HANG
        answers = await asyncio.wait_for(asyncio.gather(*(served.ask() for _ in range(2))), 50)
        assert [answer.json["from"] for answer in answers] == [engines[1].port] * 2
        assert len(engines[0].asked) == 1


async def test_b63_what_a_wedged_worker_that_tells_nothing_has_goes_elsewhere_in_the_end():
    async with serving(2, probe_interval_s=0.1, probe_timeout_s=0.1, timeout_s=0.6) as (served, engines):
        engines[0].generated = iter(())
        engines[0].fault = engines[0].sick = Fault.HANG
        answers = await asyncio.wait_for(asyncio.gather(*(served.ask() for _ in range(2))), 50)
        assert [answer.json["from"] for answer in answers] == [engines[1].port] * 2
        assert len(engines[0].asked) == 1


def test_progress_is_what_changed_and_is_known():
    assert WorkerProgress(1).differs(WorkerProgress(2)) and WorkerProgress(0, (1, )).differs(WorkerProgress(0, (2, )))
    assert not WorkerProgress(1, (1, )).differs(WorkerProgress(1, (1, )))
    assert not WorkerProgress(0, None).differs(WorkerProgress(0, (1, )))
    assert not WorkerProgress(0, (1, )).differs(WorkerProgress())


async def test_a_probe_whose_time_ends_while_it_is_looked_after_is_left_alone():
    loop, problems = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: problems.append(context))
    worker = SimpleNamespace(url="u", heard_s=0.0, now=loop.time)
    async def read_counters(worker, within_s):
        return []

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01) as limit:
            watch = _ProbeDeadline(worker, limit, 0.01, lambda url: WorkerProgress(), read_counters, None)
            await asyncio.sleep(0.006)
            time.sleep(0.02)  # so that the limit and the period end in the same turn
            await asyncio.sleep(1)
    await watch._task
    assert not problems


async def test_b63_a_request_that_takes_too_long_at_a_worker_that_generates_is_its_own_affair():
    async with serving(2, timeout_s=0.5, probe_interval_s=0.1) as (served, engines):
        for engine in engines:
            engine.fault = Fault.HANG
        answer = await served.ask()
        assert answer.status == 504 and "0.5 s" in answer.json["message"]
        assert sum(len(engine.asked) for engine in engines) == 1
        assert served.router.workers.counts() == {"up": 2}


async def test_b63_a_worker_that_only_fails_probes_is_out():
    async with serving(2, probe_interval_s=0.1) as (served, engines):
        engines[0].sick = Fault.ERROR
        await served.until(lambda: served.worker(engines[0]).state.value == "down")
        assert {(await served.ask()).json["from"] for _ in range(4)} == {engines[1].port}
        engines[0].sick = Fault.NONE
        await served.until(lambda: served.worker(engines[0]).state.value == "up")


async def test_b63_a_front_end_that_answers_by_itself_hides_no_wedged_engine():
    async with serving(1, probe_interval_s=0.2) as (served, [engine]):
        engine.sick = Fault.HANG
        async with asyncio.timeout(50):
            while served.worker(engine).state.value == "up":
                await served.ask(path="/tokenize")
                engine.fault = Fault.REFUSE
                await served.ask()
                engine.fault = Fault.NONE
                await asyncio.sleep(0.02)


async def test_b63_probes_of_a_dead_worker_come_less_and_less_often():
    async with serving(1, probe_backoff_s=(0.05, 10.0)) as (served, [engine]):
        engine.fault = engine.sick = Fault.ERROR
        await served.ask()
        probes = engine.probes
        await asyncio.sleep(1.0)
        assert 2 <= engine.probes - probes <= 6  # 0.05, 0.1, 0.2, 0.4 ... and not 20


async def test_b63_one_that_passes_probes_and_fails_requests_gets_fewer_and_fewer():
    async with serving(2, probe_backoff_s=(0.1, 1.0)) as (served, engines):
        engines[0].fault = Fault.ERROR
        began = asyncio.get_running_loop().time()
        asked = 0
        while asyncio.get_running_loop().time() < began + 1.2:
            assert (await served.ask()).json["from"] == engines[1].port
            asked += 1
            await asyncio.sleep(0.005)
        assert asked > 20 and 2 <= len(engines[0].asked) <= 8  # at 0, 0, 0.1, 0.3, 0.7 s


async def test_b63_a_request_that_no_worker_can_answer_takes_none_out():
    async with serving(4) as (served, engines):
        over = False

        async def poison():
            while not over:
                assert (await served.ask(prompt="poison")).status == 500

        poisoning = asyncio.gather(*(poison() for _ in range(4)))
        for _ in range(100):
            assert (await served.ask()).status == 200
        over = True
        await poisoning
        await served.until(lambda: served.router.workers.counts() == {"up": 4})
        assert not any(worker.strikes for worker in served.router.workers)


async def test_b63_the_last_worker_that_works_stays_unless_its_probe_fails():
    async with serving(1) as (served, [engine]):
        probes = engine.probes
        assert (await served.ask(prompt="poison")).status == 500
        assert served.worker(engine).state.value == "up"
        await served.until(lambda: engine.probes == probes + 1)
        assert (await served.ask()).status == 200
        served.worker(engine)._doubted_s = 0.0  # it was not just now
        engine.fault = engine.sick = Fault.ERROR
        assert (await served.ask()).status == 500
        await served.until(lambda: served.worker(engine).state.value == "down")


async def test_b63_workers_that_answer_500_where_another_one_does_not_are_out():
    async with serving(3) as (served, engines):
        good, *bad = sorted(engines, key=lambda engine: engine.url)  # the first turn is the second's
        for engine in bad:
            engine.fault, engine.sick = Fault.ERROR, Fault.HANG  # so that it is the request that decides
        assert (await served.ask()).json["from"] == good.port
        assert [len(engine.asked) for engine in bad] == [1, 1]
        assert [served.worker(engine).state.value for engine in (good, *bad)] == ["up", "down", "down"]


_ENDED = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
DECLINED = {False: b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\n"
                   b"content-length: %d\r\n\r\n%s" % (len(_ENDED), _ENDED),
            True: b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
                  b"data: %s\n\ndata: [DONE]\n\n" % _ENDED}


@pytest.mark.parametrize("stream", [False, True])
async def test_b63_an_engine_that_has_ended_one_request_is_well_and_another_one_is_tried(stream):
    """As vLLM does where a prompt's KV could not be loaded, or may not be computed there (the key `fallback`)."""
    async with serving(3) as (served, engines):
        *declining, good = sorted(engines, key=lambda engine: engine.url)
        for engine in declining:
            engine.raw = DECLINED[stream], False
        for _ in range(6):
            answer = await served.ask(stream=stream)
            assert answer.status == 200 and b"error" not in answer.body
        good.raw = DECLINED[stream], False
        answer = await served.ask(stream=stream)
        assert answer.status == (200 if stream else 500) and b"Internal server error" in answer.body
        assert all(engine.asked for engine in engines)
        assert served.router.workers.counts() == {"up": 3} and not any(one.strikes for one in served.router.workers)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_b63_what_needs_no_step_of_the_engine_takes_no_worker_out(path):
    async with serving(3) as (served, engines):
        assert (await served.ask(path=path, prompt="poison")).status == 500
        assert served.router.workers.counts() == {"up": 3}
        assert not sum(served.count("vllm:pd_router_worker_failures_total", worker=engine.url, kind="server_error")
                       for engine in engines)


async def test_b63_an_engine_without_the_probes_route_is_asked_for_a_completion():
    async with serving(1, up=False, probe_interval_s=0.1) as (served, [engine]):
        engine.generate_route = False
        await served.until(lambda: served.worker(engine).state.value == "up" and engine.probes >= 2)
        engine.sick = Fault.EMPTY
        await served.until(lambda: served.worker(engine).state.value == "down")


async def test_b63_a_timeout_takes_the_worker_out():
    async with serving(2, timeout_s=0.3) as (served, engines):
        engines[0].fault = engines[0].sick = Fault.HANG
        for _ in range(3):
            assert (await asyncio.wait_for(served.ask(), 20)).json["from"] == engines[1].port
        assert len(engines[0].asked) == 1


@pytest.mark.parametrize("fault, status", [(Fault.BUSY, 503), (Fault.FULL, 429)])
async def test_full_workers_are_left_alone_for_a_while_and_the_client_hears_when_to_come_back(fault, status):
    async with serving(2) as (served, engines):
        engines[0].fault = fault
        for _ in range(3):
            assert (await served.ask()).json["from"] == engines[1].port
        assert len(engines[0].asked) == 1 and served.worker(engines[0]).state.value == "up"
        engines[1].fault = fault
        answer = await served.ask()
        assert answer.status == status and int(answer.headers["retry-after"]) >= 1
        asked = [len(engine.asked) for engine in engines]
        answer = await served.ask()
        assert answer.status == status and int(answer.headers["retry-after"]) >= 1
        assert [len(engine.asked) for engine in engines] == [number + 1 for number in asked]


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.FULL], ids=lambda fault: fault.name.lower())
async def test_b63_one_request_that_all_refuse_shuts_nobody_for_others(fault):
    async with serving(4) as (served, engines):
        for engine in engines:
            engine.refuses = fault
        for _ in range(3):
            assert (await served.ask(prompt="refuse me")).status == (503 if fault is Fault.BUSY else 429)
        for _ in range(8):
            assert (await served.ask()).status == 200
        assert not any(served.worker(engine).paused_until_s for engine in engines)


async def test_b63_a_worker_that_is_busy_still_gets_what_no_other_can_take():
    async with serving(2) as (served, engines):
        engines[0].fault = Fault.BUSY
        assert (await served.ask()).json["from"] == (await served.ask()).json["from"] == engines[1].port
        assert served.worker(engines[0]).paused_until_s > served.worker(engines[0]).now()
        engines[0].fault = Fault.NONE
        served.worker(engines[1]).fail(WorkerFailure.PROBE, "away")
        assert (await served.ask()).json["from"] == engines[0].port


async def test_all_full_or_none_up_is_said_at_once():
    async with serving(1, max_in_flight=1) as (served, [engine]):
        engine.gap_s = 0.2
        first = asyncio.create_task(served.ask())
        await served.until(lambda: served.worker(engine).in_flight)
        answer = await served.ask()
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert (await first).status == 200
        await engine.stop()
        assert (await served.ask()).status == 503
        answer = await served.ask()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        health = await served.ask(path="/health", method="GET")
        assert health.status == 503


async def test_the_clients_own_fault_is_passed_on_and_no_workers():
    async with serving(2) as (served, engines):
        engines[0].fault = engines[1].fault = Fault.REFUSE
        answer = await served.ask()
        assert answer.status == 400 and answer.json["message"] == "no such thing"
        assert sum(len(engine.asked) for engine in engines) == 1
        assert served.router.workers.counts() == {"up": 2}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_away_takes_its_request_along(stream):
    async with serving(1) as (served, [engine]):
        engine.gap_s = 0.5
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.post(served.url + "/v1/completions",
                                                     json={"prompt": "Hello", "stream": stream}))
            await served.until(lambda: engine.asked)
            await asyncio.sleep(0.05)
            asked.cancel()
        await served.until(lambda: engine.cancelled == 1)
        await served.until(lambda: not served.worker(engine).in_flight)
        assert served.count("vllm:pd_router_clients_gone_total") == 1
        assert served.worker(engine).state.value == "up"


@pytest.mark.parametrize("leaves", [True, False], ids=["client", "worker"])
async def test_what_happens_while_a_client_hears_that_its_stream_broke_is_no_error(leaves):
    """The client leaves, or the worker's probe fails."""
    async with serving(1) as (served, [engine]):
        engine.fault = Fault.BREAK
        body = json.dumps({"model": "m", "prompt": "a b", "stream": True}).encode()
        received = [{"type": "http.request", "body": body}]
        gone = asyncio.Event()

        async def receive():
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if b"error" in message.get("body", b""):
                gone.set() if leaves else served.worker(engine).interrupt_silent(math.inf)
                await asyncio.sleep(0.05)  # it does not read

        asked = asyncio.create_task(served.router(
            {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []},
            receive, send))
        await asyncio.wait([asked])
        assert gone.is_set() is leaves and not asked.cancelled() and asked.exception() is None


async def test_an_idle_connection_that_the_worker_closed_is_no_failure():
    async with serving(1) as (served, [engine]):
        for _ in range(3):
            assert (await served.ask()).status == 200
            for task in list(engine._open):  # hangs up as uvicorn does after its keep-alive time
                task.cancel()
        assert served.count("vllm:pd_router_worker_failures_total", worker=engine.url, kind="broken") == 0


async def test_b64_a_worker_that_dies_of_a_request_does_not_get_it_again():
    async with serving(2) as (served, engines):
        await asyncio.gather(*(served.ask() for _ in range(4)))  # leaves idle connections
        for engine in engines:
            engine.asked.clear()
            engine.fault = Fault.DIE_LATER
        assert (await served.ask()).status in (502, 503)
        assert [len(engine.asked) for engine in engines] == [1, 1]
        assert not sum(served.count("vllm:pd_router_tries_total", worker=engine.url, outcome="stale")
                       for engine in engines)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b63_a_request_that_kills_engines_is_not_sent_to_a_third(stream):
    async with serving(4) as (served, engines):
        answer = await served.ask(stream, prompt="kill")
        assert answer.status == 502 and "engines were lost while they had this request" in answer.json["message"]
        assert sum(bool(engine.asked) for engine in engines) == 2
        again = await served.ask(stream, prompt="kill")  # as clients do by themselves
        assert again.status == 502 and sum(bool(engine.asked) for engine in engines) == 2
        assert served.count("vllm:pd_router_refused_total", reason="fatal") == 1
        for _ in range(4):
            assert (await served.ask(stream)).status == 200
        assert served.router.workers.counts() == {"up": 2, "down": 2}


async def test_b63_a_request_that_kills_engines_at_once_over_an_idle_connection_is_counted():
    """The end of such a connection alone is no crash, but nothing listens at the engine's port any more."""
    async with serving(4) as (served, engines):
        await asyncio.gather(*(served.ask() for _ in range(8)))  # leaves idle connections
        for engine in engines:
            engine.asked.clear()
        for _ in range(2):
            answer = await served.ask(prompt="kill")
            assert answer.status == 502 and "engines were lost while they had this request" in answer.json["message"]
            assert sum(bool(engine.asked) for engine in engines) == 2
        assert sum(served.count("vllm:pd_router_tries_total", worker=engine.url, outcome="stale")
                   for engine in engines) == 1


async def test_b64_an_engine_that_is_lost_by_chance_costs_no_request():
    async with serving(3) as (served, engines):
        engines[0].fault = Fault.HANG_UP
        for _ in range(4):
            assert (await served.ask()).status == 200
        served.router.proxy.fatal._now = lambda: 0.0
        await engines[0].stop()
        fatal = served.router.proxy.fatal
        assert not await fatal.connection_broke(served.worker(engines[0]), "/v1/completions", b"once")
        fatal.answered("/v1/completions", b"once")
        assert not await fatal.connection_broke(served.worker(engines[0]), "/v1/completions", b"once")
        for number in range(1100):
            served.router.proxy.fatal._crashes[number] = (frozenset(), 0.0)
        await served.router.proxy.fatal.connection_broke(served.worker(engines[0]), "/v1/completions", b"another")
        assert len(served.router.proxy.fatal._crashes) == 1000


async def test_b63_two_equal_requests_over_which_one_engine_is_lost_count_it_once():
    async with serving(1) as (served, [engine]):
        engine.fault = Fault.HANG
        both = [asyncio.create_task(served.ask()) for _ in range(2)]
        await served.until(lambda: len(engine.asked) == 2)
        await engine.stop()
        for answer in await asyncio.gather(*both):
            assert answer.status in (502, 503) and "engines were lost" not in answer.json["message"]
        engine.fault = Fault.NONE
        await engine.start()
        await served.until(lambda: served.router.workers.counts() == {"up": 1})
        assert (await served.ask()).status == 200


async def test_b63_an_engine_that_is_lost_twice_counts_twice():
    async with serving(1) as (served, [engine]):
        for _ in range(2):
            engine.fault = Fault.NONE
            if engine._server is None:
                await engine.start()
            await served.until(lambda: served.router.workers.counts() == {"up": 1})
            engine.asked.clear()
            engine.fault = Fault.HANG
            asked = asyncio.create_task(served.ask())
            await served.until(lambda: engine.asked)
            await engine.stop()
            answer = await asked
        assert "engines were lost" in answer.json["message"]


async def test_b63_a_stream_that_is_answered_makes_an_earlier_loss_chance():
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.fault = Fault.HANG
        asked = asyncio.create_task(served.ask(True))
        await served.until(lambda: any(engine.asked for engine in engines))
        lost, other = sorted(engines, key=lambda engine: not engine.asked)
        other.fault = Fault.NONE
        await lost.stop()
        assert (await asked).events == [*TEXTS, "[DONE]"]
        assert not served.router.proxy.fatal._crashes


async def test_b63_an_engine_lost_in_an_answer_without_room_for_an_event_counts():
    async with serving(1) as (served, [engine]):
        assert (await served.ask()).status == 200  # leaves an idle connection
        engine._server.close()
        engine.raw = chunked(GZIPPED[:20], b"content-encoding: gzip", end=False), False
        with pytest.raises(aiohttp.ClientPayloadError):
            await served.ask(True)
        await served.until(lambda: served.router.proxy.fatal._crashes)


async def test_b64_a_request_is_sent_three_times_at_most_idle_connections_included():
    async with serving(4) as (served, engines):
        await asyncio.gather(*(served.ask() for _ in range(8)))
        for engine in engines:
            engine.asked.clear()
            engine.fault = Fault.HANG_UP
        assert (await served.ask()).status == 502
        assert sorted(len(engine.asked) for engine in engines) == [0, 0, 1, 2]


async def test_b63_b64_random_faults_under_load():
    """Whatever workers do, as long as one is well every client gets a whole answer, or hears that it is not whole."""
    rng = random.Random(7)
    early = [*BEFORE_FIRST, Fault.SHORT, Fault.BUSY, Fault.HANG]
    async with serving(4, probe_interval_s=0.1, probe_timeout_s=0.2, max_in_flight=200) as (served, engines):
        async def disturb():
            while True:
                engine = rng.choice(engines[1:])
                engine.fault = rng.choice([*early, Fault.BREAK, Fault.STALL, Fault.NONE])
                engine.sick = engine.fault if engine.fault not in (Fault.BUSY, Fault.STALL, Fault.BREAK) else Fault.NONE
                await asyncio.sleep(0.03)
                if sum(one.fault is not Fault.NONE for one in engines) > 2:
                    engine.fault = engine.sick = Fault.NONE

        disturber = asyncio.create_task(disturb())
        answers = []
        for _ in range(12):
            answers += await asyncio.wait_for(
                asyncio.gather(*(served.ask(stream) for stream in (True, False) * 10)), 200)
        disturber.cancel()
        whole = broken = 0
        for answer in answers:
            assert answer.status == 200, answer.body
            if not answer.headers["content-type"].startswith("text/event-stream"):
                whole += answer.json["choices"][0]["text"] == "all"
            elif answer.body.endswith(b"[DONE]\n\n"):
                assert answer.events == [*TEXTS, "[DONE]"]
                whole += 1
            else:
                broken += "error" in answer.events[-1]
        assert whole + broken == len(answers) and whole > len(answers) / 2
