# SPDX-License-Identifier: Apache-2.0
"""B102: the order prefill-first. A prefill engine (P) computes the prompt, a decode engine (D) gets what P has said."""
import asyncio
import json

import pytest

from tests.fakes.faulty_engine import Fault, serving
from tests.router.holding import with_index
from tests.router.test_ending import end
from tests.router.test_front import TestMembership as _TestMembership
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.router.fatal_requests import PREFILL_REMEMBERED_S
from vllm_pd.router.options import RequestOrder, RouterOptions
from vllm_pd.router.policy import Policy
from vllm_pd.router.workers import WorkerState

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[4, 5]], "x": 1.5}
OUTCOMES = "vllm:pd_router_prefill_first_total"
EXPLAIN = {"x-vllm-pd-explain": "1"}


def bodies(engine) -> list[dict]:
    return [json.loads(body) for _, _, body in engine.asked]


@pytest.mark.parametrize("path, asked", [("/v1/completions", {"max_tokens": 9}),
                                         ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}],
                                                                   "prompt": None, "max_completion_tokens": 9})])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b102_p_computes_the_prompt_and_d_answers(path, asked, stream):
    async with serving(1, prefills=1) as (served, [d, p]):
        p.params = PARAMS
        if stream:
            asked = asked | {"stream_options": {"include_usage": True}}
        answer = await served.ask(stream, EXPLAIN, path=path, **asked)
        assert answer.status == 200 and (answer.events[-1] == "[DONE]" if stream else answer.json["from"] == d.port)
        [at_p], [at_d] = bodies(p), bodies(d)
        client = {"model": "m", "prompt": "Hello", "stream": stream, **asked}
        assert at_d == client | {"kv_transfer_params": PARAMS}
        assert at_p["max_tokens"] == 1 and at_p["stream"] is False and "stream_options" not in at_p
        assert at_p.get("max_completion_tokens", 1) == 1 and at_p["kv_transfer_params"]["do_remote_decode"] is True
        assert p.asked[0][0] == d.asked[0][0] == path
        assert p.asked[0][1]["x-request-id"] == d.asked[0][1]["x-request-id"]
        assert answer.headers["x-vllm-pd-worker"] == d.url
        assert answer.headers["x-vllm-pd-explain"].endswith(f"; prefill=prefilled at {p.url}")
        assert served.count(OUTCOMES, outcome="prefilled") == 1
        assert served.count("vllm:pd_router_requests_total", path=path, status="200") == 1, "one request, not two"
        assert served.count("vllm:pd_router_decisions_total", policy="round-robin", reason="only") == 1
        assert served.count("vllm:pd_router_tries_total", worker=d.url, outcome="answered") == 1
        assert not served.count("vllm:pd_router_tries_total", worker=p.url, outcome="answered")
        for name in ("prefill", "first_byte", "route"):
            assert served.count(f"vllm:pd_router_{name}_seconds_count") == 1


async def test_b102_both_have_the_clients_headers():
    async with serving(1, prefills=1) as (served, [d, p]):
        p.params = PARAMS
        await served.ask(headers={"x-request-id": "mine", "authorization": "Bearer k", "accept-encoding": "gzip"})
        for engine in (d, p):
            [(_, headers, _)] = engine.asked
            assert headers["x-request-id"] == "mine" and headers["authorization"] == "Bearer k"
        assert "accept-encoding" not in p.asked[0][1] and d.asked[0][1]["accept-encoding"] == "gzip"


@pytest.mark.parametrize("fault, outcome, state", [
    (Fault.HANG_UP, "broken", "down"), (Fault.NOISE, "broken", "down"), (Fault.SHORT, "broken", "down"),
    (Fault.HANG, "timeout", "down"), (Fault.ERROR, "server_error", "up"), (Fault.BUSY, "busy", "up"),
    (Fault.FULL, "busy", "up"), (Fault.REFUSE, "refused", "up"), (Fault.EMPTY, "bad_params", "up"),
    (Fault.LONG, "bad_params", "up"), (Fault.NONE, "no_params", "up")], ids=lambda value: str(value).lower())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b102_whatever_goes_wrong_at_p_the_request_goes_to_d_as_it_came(fault, outcome, state, stream):
    async with serving(1, prefills=1, prefill_timeout_s=0.5) as (served, [d, p]):
        p.fault = fault
        p.sick = Fault.ERROR if state == "down" else Fault.NONE
        answer = await served.ask(stream, EXPLAIN)
        assert answer.status == 200 and (answer.events[-1] == "[DONE]" if stream else answer.json["from"] == d.port)
        [(_, _, body)] = d.asked
        assert body == json.dumps({"model": "m", "prompt": "Hello", "stream": stream}).encode()
        assert f"prefill={outcome} at" in answer.headers["x-vllm-pd-explain"]
        assert served.count(OUTCOMES, outcome=outcome) == 1 and not served.count("vllm:pd_router_prefill_seconds_count")
        assert served.worker(p).state.value == state and served.worker(d).state is WorkerState.UP
        if state == "down":
            assert (await served.ask(stream)).status == 200
            assert served.count(OUTCOMES, outcome="no_prefill") == 1
            p.fault = p.sick = Fault.NONE
            p.params = PARAMS
            await served.until(lambda: served.worker(p).state is WorkerState.UP)
            await served.ask(stream)
            assert bodies(d)[-1]["kv_transfer_params"] == PARAMS, "it is back"


@pytest.mark.parametrize("params, outcome", [
    ("x", "bad_params"), ([1], "bad_params"), ({}, "no_params"), ({"a": "b" * (1 << 19)}, "bad_params")],
    ids=["text", "list", "empty", "long"])
async def test_b102_parameters_that_d_can_not_use_are_dropped(params, outcome):
    async with serving(1, prefills=1) as (served, [d, p]):
        p.params = params
        assert (await served.ask()).json["from"] == d.port
        assert "kv_transfer_params" not in bodies(d)[0] and served.count(OUTCOMES, outcome=outcome) == 1


async def test_b102_ps_connection_ends_with_its_deadline():
    async with serving(1, prefills=1, prefill_timeout_s=0.3) as (served, [d, p]):
        p.raw = b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{", True  # and nothing more
        assert (await served.ask()).json["from"] == d.port and served.count(OUTCOMES, outcome="timeout") == 1
        await served.until(lambda: served.router.worker_client.connections == 1)  # D's, which is idle


async def test_b102_a_dead_p_costs_no_answer():
    async with serving(1, prefills=2) as (served, [d, *ps]):
        for p in ps:
            await p.stop()
        for outcome in ("connect", "connect", "no_prefill"):
            before = served.count(OUTCOMES, outcome=outcome)
            assert (await served.ask()).json["from"] == d.port
            assert served.count(OUTCOMES, outcome=outcome) == before + 1


async def test_b102_p_dies_while_it_computes():
    async with serving(1, prefills=1) as (served, [d, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        await p.stop()
        assert (await asked).json["from"] == d.port and served.count(OUTCOMES, outcome="broken") == 1


async def test_b102_a_p_that_wedges_loses_its_requests_to_d():
    async with serving(1, prefills=1, probe_interval_s=0.2) as (served, [d, p]):
        p.fault = p.sick = Fault.HANG
        assert (await asyncio.wait_for(served.ask(), 50)).json["from"] == d.port
        assert served.count(OUTCOMES, outcome="probe") == 1 and served.worker(p).state is WorkerState.DOWN


async def test_b102_a_slow_p_that_computes_for_others_is_not_out():
    async with serving(1, prefills=1, prefill_timeout_s=0.5) as (served, [d, p]):
        p.params, p.fault = PARAMS, Fault.HANG
        slow = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        p.fault = Fault.NONE
        assert (await served.ask()).json["from"] == (await slow).json["from"] == d.port
        assert served.count(OUTCOMES, outcome="timeout") == served.count(OUTCOMES, outcome="prefilled") == 1
        assert served.worker(p).state is WorkerState.UP


async def test_b102_the_clients_own_errors_are_ds():
    async with serving(1, prefills=1) as (served, [d, p]):
        d.refuses = p.refuses = Fault.REFUSE
        answer = await served.ask(prompt="refuse me")
        assert answer.status == 400 and len(d.asked) == len(p.asked) == 1
        assert served.count(OUTCOMES, outcome="refused") == 1
        assert served.worker(p).state is WorkerState.UP


async def test_b102_a_client_that_leaves_ends_ps_request():
    async with serving(1, prefills=1) as (served, [d, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        asked.cancel()
        await served.until(lambda: p.cancelled == 1)
        await served.until(lambda: served.count("vllm:pd_router_clients_gone_total") == 1)
        assert not d.asked and served.count(OUTCOMES, outcome="client_gone") == 1
        assert served.worker(p).state is WorkerState.UP


async def test_b102_the_end_of_the_router_ends_ps_request():
    async with serving(1, prefills=1, grace_s=0.3) as (served, [d, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        end(served)
        answer = await asked
        assert answer.status == 503 and "shutting down" in answer.json["message"] and not d.asked
        assert served.count(OUTCOMES, outcome="cut") == 1
        await served.until(lambda: p.cancelled == 1)


@pytest.mark.parametrize("asked, outcome", [
    ({"kv_transfer_params": {"pd": "local"}}, "asked"), ({"kv_transfer_params": {"pd": "remote"}}, "asked"),
    ({"n": 2}, "samples"), ({"prompt": ["a b", "c"]}, "several"), ({"model": "adapter"}, "adapter"),
    ({"model": "of d only"}, "no_prefill")])
async def test_b102_what_is_not_covered_is_as_in_the_other_order(asked, outcome):
    async with serving(1, prefills=1) as (served, [d, p]):
        d.cards = [{"id": "m", "root": "none", "parent": None, "max_model_len": 9},
                   {"id": "adapter", "root": "none", "parent": "m"}, {"id": "of d only", "max_model_len": 9}]
        served.worker(d).probe_soon()
        await served.until(lambda: "adapter" in served.worker(d).models)
        assert (await served.ask(**asked)).status == 200
        assert not p.asked and served.count(OUTCOMES, outcome=outcome) == 1
        assert bodies(d) == [{"model": "m", "prompt": "Hello", "stream": False, **asked}]
        assert "x-request-id" not in d.asked[0][1]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize", "/pooling"])
async def test_b102_other_endpoints_know_no_order(path):
    async with serving(1, prefills=1) as (served, [d, p]):
        assert (await served.ask(path=path)).status == 200
        assert not p.asked and len(d.asked) == 1
        assert OUTCOMES + "{" not in served.router.metrics.page().decode()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.HANG_UP, Fault.BUSY], ids=lambda fault: fault.name.lower())
async def test_b102_what_p_has_said_goes_to_one_d_only(fault):
    """P's blocks may be gone when the second one reads them."""
    async with serving(2, prefills=1) as (served, [*ds, p]):
        p.params = PARAMS
        for d in ds:
            d.refuses = fault
        await served.ask(prompt="refuse me")
        got = [body for d in ds for body in bodies(d)]
        assert all(d.asked for d in ds) and len(p.asked) == 1
        assert sum("kv_transfer_params" in body for body in got) == 1


@pytest.mark.parametrize("ds", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b102_a_d_that_can_not_load_gets_the_request_as_it_came(ds, stream):
    """With upstream's default a request whose load fails is answered with 500. P's death is no fault of D's."""
    async with serving(ds, prefills=1) as (served, [*decodes, p]):
        p.params = PARAMS | {"remote_host": "refuse me"}
        for d in decodes:
            d.refuses = Fault.ERROR_EVENT if stream else Fault.ERROR
        answer = await served.ask(stream, EXPLAIN)
        assert answer.status == 200
        [first, second] = [body for d in decodes for body in bodies(d)]
        assert "kv_transfer_params" in first and second == {"model": "m", "prompt": "Hello", "stream": stream}
        [asked] = [d for d in decodes if d.asked]
        assert f"tried {asked.url}: not_loaded" in answer.headers["x-vllm-pd-explain"]
        assert served.count("vllm:pd_router_tries_total", worker=asked.url, outcome="not_loaded") == 1
        assert all(served.worker(d).state is WorkerState.UP for d in decodes)


async def test_b102_without_a_d_no_p_computes():
    async with serving(1, prefills=1) as (served, [d, p]):
        d.sick = Fault.ERROR
        served.worker(d).probe_soon()
        await served.until(lambda: served.worker(d).state is WorkerState.DOWN)
        assert (await served.ask()).status == 503 and not p.asked
        assert served.count(OUTCOMES, outcome="no_decode") == 1
        assert (await served.ask(path="/health", method="GET")).status == 503, "a P serves no client"


async def test_b102_a_request_that_crashes_p_and_d_crashes_no_third_engine():
    async with serving(2, prefills=1) as (served, engines):
        answer = await served.ask(prompt="kill")
        assert answer.status == 502 and "engines were lost" in answer.json["message"]
        assert sum(len(engine.asked) for engine in engines) == 2
        assert (await served.ask(prompt="kill")).status == 502
        assert sum(len(engine.asked) for engine in engines) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b63_b102_a_request_that_crashes_ps_alone_crashes_no_third_p(stream):
    """D's answers say nothing of the next P. Other requests still go there."""
    async with serving(1, prefills=4) as (served, [d, *ps]):
        d.survives = True
        for p in ps:
            p.params = PARAMS
        for lost in (1, 2, 2, 2):
            assert (await served.ask(stream, prompt="kill")).status == 200
            assert sum(p._server.is_serving() for p in ps) == 4 - lost
        assert served.count(OUTCOMES, outcome="broken") == served.count(OUTCOMES, outcome="fatal") == 2
        assert all("kv_transfer_params" not in body for body in bodies(d))
        for p in ps:
            p.survives = True
            if not p._server.is_serving():
                await p.start()
        await served.until(lambda: all(served.worker(p).state is WorkerState.UP for p in ps))
        assert (await served.ask(stream, prompt="another")).status == 200
        assert served.count(OUTCOMES, outcome="prefilled") == 1
        assert (await served.ask(stream, prompt="kill")).status == 200
        assert served.count(OUTCOMES, outcome="fatal") == 3
        now_s = served.router.proxy.fatal._now
        served.router.proxy.fatal._now = lambda: now_s() + PREFILL_REMEMBERED_S
        assert (await served.ask(stream, prompt="kill")).status == 200
        assert served.count(OUTCOMES, outcome="prefilled") == 2


async def test_b63_b102_a_request_that_crashes_ps_at_once_over_an_idle_connection_is_counted():
    async with serving(1, prefills=3) as (served, [d, *ps]):
        d.survives = True
        for p in ps:
            p.params = PARAMS
        await asyncio.gather(*(served.ask() for _ in range(9)))  # leaves idle connections
        for lost in (1, 2, 2):
            assert (await served.ask(prompt="kill")).status == 200
            assert sum(p._server.is_serving() for p in ps) == 3 - lost
        assert served.count(OUTCOMES, outcome="broken") == 2 and served.count(OUTCOMES, outcome="fatal") == 1


async def test_b63_b102_a_p_that_computes_a_request_makes_an_earlier_loss_chance():
    async with serving(1, prefills=4) as (served, [d, *ps]):
        d.survives = True
        for survives, outcome in ((False, "broken"), (True, "prefilled"), (False, "broken"), (True, "prefilled")):
            for p in ps:
                p.params, p.survives = PARAMS, survives
            before = served.count(OUTCOMES, outcome=outcome)
            assert (await served.ask(prompt="kill")).status == 200
            assert served.count(OUTCOMES, outcome=outcome) == before + 1


async def test_b102_p_is_chosen_by_its_prefix():
    async with serving(1, Policy.KV, prefills=3) as (served, [d, *ps]):
        for p in ps:
            p.params = PARAMS
        placer = served.router.placer
        index = with_index(placer, 4)
        for holder in (ps[1], d):
            index.stored(holder.url, [1, 2, 3], None, list(range(12)), 4)
        for _ in range(3):
            await served.ask(prompt=list(range(14)))
        assert [len(p.asked) for p in ps] == [0, 3, 0]
        assert placer._recent[ps[1].url].tokens == 3 * 2, "what it has to compute"
        assert placer._recent[d.url].tokens == 0, "D computes none of it"
        assert served.count("vllm:pd_router_prompt_blocks_total") == 3 * 3, "each request counts once"


async def test_b102_p_is_chosen_by_its_open_requests():
    async with serving(1, Policy.LEAST_LOAD, prefills=3) as (served, [_, *ps]):
        for p in ps:
            p.fault = Fault.HANG
        asked = []
        for count in range(1, 4):
            asked.append(asyncio.create_task(served.ask()))
            await served.until(lambda count=count: sum(len(p.asked) for p in ps) == count)
        assert [len(p.asked) for p in ps] == [1, 1, 1]
        for task in asked:
            task.cancel()
        await served.until(lambda: sum(p.cancelled for p in ps) == 3)


async def test_b102_ps_take_turns_and_one_that_refuses_pauses():
    async with serving(1, prefills=2) as (served, [d, *ps]):
        for p in ps:
            p.params = PARAMS
        for _ in range(4):
            await served.ask()
        assert [len(p.asked) for p in ps] == [2, 2]
        ps[0].fault = Fault.BUSY  # for 7 s
        for _ in range(6):
            await served.ask()
        assert len(ps[0].asked) == 3 and len(ps[1].asked) == 7
        assert len(d.asked) == 10 and served.count(OUTCOMES, outcome="prefilled") == 9


async def test_b102_the_list_of_workers_says_which_prefill():
    async with serving(1, prefills=1) as (served, [d, p]):
        listed = (await served.ask(path="/workers", method="GET")).json["workers"]
        assert {one["url"]: one["prefills"] for one in listed} == {d.url: False, p.url: True}


def test_b80_orders_that_can_not_be():
    p = ("http://127.0.0.1:1", )
    for wrong, key in (({"order": "both"}, "--order"), ({"order": "prefill-first"}, "--order"),
                       ({"prefill_workers": p}, "--prefill-worker"), ({"prefill_timeout_s": 0}, "--prefill-timeout-s"),
                       ({"order": "prefill-first", "prefill_workers": ("x", )}, "--prefill-worker"),
                       ({"order": "prefill-first", "prefill_workers": p, "workers": p}, "--prefill-worker")):
        with pytest.raises(ConfigError) as caught:
            RouterOptions(**wrong).checked()
        assert caught.value.key == key and caught.value.cure
    checked = RouterOptions(order="prefill-first", broker="tcp://127.0.0.1:1").checked()
    assert checked.order is RequestOrder.PREFILL_FIRST


async def test_b102_prefill_engines_join_and_leave_with_the_registry():
    def of_role(role, draining=False, incarnation="a"):
        return _TestMembership.member(incarnation, "http://h:1", role, draining)

    async with _TestMembership.following(order="prefill-first", broker="tcp://127.0.0.1:1") as (membership, workers):
        def present():
            return [(worker.url, worker.prefills) for worker in workers]

        membership.update([of_role(m.Role.PREFILL)], 0.0)
        assert present() == [("http://h:1", True)] and not workers.has_choice and workers.counts() == {}
        membership.update([of_role(m.Role.PREFILL, draining=True)], 1.0)
        assert present() == []
        for role, prefills in ((m.Role.PREFILL, True), (m.Role.BOTH, False), (m.Role.PREFILL, True),
                               (m.Role.DECODE, False)):
            for _ in range(2):  # it leaves, it joins
                membership.update([of_role(role)], 2.0)
            assert present() == [("http://h:1", prefills)]
        membership.update([of_role(m.Role.PREFILL, incarnation="b")], 3.0)
        assert present() == []
