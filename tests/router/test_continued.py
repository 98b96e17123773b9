# SPDX-License-Identifier: Apache-2.0
"""B65: an engine dies in the middle of a stream, and the router goes on at another one."""
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from tests.fakes.faulty_engine import Answered, Fault, FaultyEngine, Served, serving
from tests.fakes.token_engine import SCRIPT, TEXT, Plan, TokenEngine, answer, detokenize
from tests.unit.test_continuation import COMPLETIONS, PATHS, USAGE, asked, of_one, undisturbed
from vllm_pd.router.workers import WorkerFailure

BROKEN, CONTINUED = "vllm:pd_router_broken_streams_total", "vllm:pd_router_continued_streams_total"


@contextlib.asynccontextmanager
async def router(count: int, *steps, together: int = 1, **options) -> AsyncIterator[tuple[Served, list[TokenEngine]]]:
    """A router before such engines. The next streams go as the steps say, then as they should."""
    plan = Plan(steps)
    async with serving(count, make=lambda: TokenEngine(plan, together), **{"continue_streams": True, **options}) as (
            served, engines):
        yield served, engines


async def ask(served: Served, path: str = COMPLETIONS, **more) -> Answered:
    async with asyncio.timeout(60), served.session.post(served.url + path, json=asked(
            path.partition("?")[0], **more)) as response:
        return Answered(response.status, dict(response.headers), await response.read())


async def all_up(served: Served, engines: list[FaultyEngine]) -> None:
    await served.until(lambda: served.router.workers.counts() == {"up": len(engines)})
    for worker in served.router.workers:
        worker.strikes = 0  # so that the next probe comes at once, too


def bytes_of(path: str, events: int, **more) -> int:
    return len(b"".join(list(answer(path, asked(path, return_token_ids=True, **more), "12345"))[:events]))


def text_of(got: Answered) -> str:
    choices = [one["choices"][0] for one in got.events if one != "[DONE]" and one.get("choices")]
    return "".join(one["delta"]["content"] if "delta" in one else one["text"] for one in choices)


def total(served: Served, name: str, **labels: str) -> float:
    return sum(served.count(name, worker=one.url, **labels) for one in served.router.workers)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("path", PATHS)
async def test_b65_without_a_break_bytes_are_as_without_the_option(path, together):
    async with router(1, together=together) as (served, [engine]):
        for usage in USAGE:
            got = await ask(served, path, **usage)
            assert got.body == b"".join(answer(path, asked(path, **usage), str(engine.port), together))
            assert json.loads(engine.asked[-1][2])["return_token_ids"] is True
        got = await ask(served, path, return_token_ids=True)
        assert b'"token_ids":[72' in got.body and b'"prompt_token_ids":[' in got.body
        assert not served.count(BROKEN, worker=engine.url)


async def test_b65_off_by_default():
    async with router(2, ("break", None), ("break", bytes_of(COMPLETIONS, 4)), continue_streams=False) as (
            served, engines):
        whole, broken = await ask(served), await ask(served)
        assert text_of(whole) == TEXT and broken.body.endswith(b'"code": 502}}\n\n')
        assert all(b"return_token_ids" not in engine.asked[0][2] and len(engine.asked) == 1 for engine in engines)


@pytest.mark.parametrize("usage", USAGE, ids=str)
@pytest.mark.parametrize("path", PATHS)
async def test_b65_a_break_after_any_event_is_not_seen(path, usage):
    events = len(list(answer(path, asked(path, **usage))))
    async with router(2) as (served, engines):
        for number in range(1, events + 1):
            await all_up(served, engines)
            engines[0].plan.append(("break", bytes_of(path, number, **usage)))
            got = await ask(served, path, **usage)
            ports = [str(engine.port).encode() for engine in engines]
            body = got.body.replace(b'"created":1005', b'"created":1001')
            body = body.replace(ports[0], b"1").replace(ports[1], b"1")
            assert got.status == 200 and of_one(body) == undisturbed(path, asked(path, **usage)), number
        assert total(served, BROKEN) == total(served, "vllm:pd_router_worker_failures_total", kind="broken") == events
        assert 0 < total(served, CONTINUED) < events, "what is missing at the end needs no engine"


@pytest.mark.parametrize("path", PATHS)
async def test_b65_two_breaks_in_one_stream_and_no_third(path):
    cut = ("break", bytes_of(path, 4))
    async with router(4, cut, cut) as (served, engines):
        got = await ask(served, path, **USAGE[1])
        assert text_of(got) == TEXT and got.events[-2]["usage"]["completion_tokens"] == len(SCRIPT)
        assert sorted(len(engine.asked) for engine in engines) == [0, 1, 1, 1], "never the same engine again"
        await all_up(served, engines)
        engines[0].plan += [cut, cut, cut]
        got = await ask(served, path)
        assert got.events[-1]["error"]["code"] == 502 and b"[DONE]" not in got.body and TEXT.startswith(text_of(got))


FAULTS = [Fault.FULL, Fault.BUSY, Fault.ERROR, Fault.HANG_UP, Fault.REFUSE, Fault.EMPTY, Fault.ERROR_EVENT, Fault.NOISE]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.lower())
async def test_b65_an_engine_that_does_not_take_it(fault):
    cut = ("break", bytes_of(COMPLETIONS, 4))
    async with router(3, cut, fault) as (served, engines):
        assert text_of(await ask(served)) == TEXT
        assert sum(len(engine.asked) for engine in engines) == 3
        await all_up(served, engines)
        await served.until(lambda: all(worker.paused_until_s < worker.now() for worker in served.router.workers))
        engines[0].plan += [cut, fault, fault, fault]  # one more, for an idle connection that ends
        got = await ask(served)
        assert got.status == 200 and got.events[-1]["error"]["code"] == 502 and b"[DONE]" not in got.body
        assert sum(len(engine.asked) for engine in engines) >= 6
        if fault in (Fault.FULL, Fault.BUSY, Fault.REFUSE):
            assert served.router.workers.counts()["up"] >= 2, "only that which broke is out"
        assert total(served, CONTINUED) == 1 and total(served, BROKEN) == 2


@pytest.mark.parametrize("says", [None, lambda tokens: "other", lambda tokens: detokenize(tokens) + "<"],
                         ids=["no route", "other", "more"])
async def test_b65_an_engine_with_another_tokenizer_does_not_take_it(says):
    cut = ("break", bytes_of(COMPLETIONS, 4))
    async with router(2, cut, cut) as (served, engines):
        for engine in engines:
            engine.detokenize = says
        got = await ask(served)
        assert got.events[-1]["error"]["code"] == 502 and TEXT.startswith(text_of(got)) and text_of(got)
        assert sum(len(engine.asked) for engine in engines) == 1 and not total(served, CONTINUED)
        assert total(served, "vllm:pd_router_tries_total", outcome="refused") == 1
        assert sum(served.count("vllm:pd_router_worker_failures_total", worker=engine.url, kind=kind)
                   for engine in engines for kind in WorkerFailure) == 1, "only that which broke is blamed"


async def test_b65_no_other_engine():
    async with router(1, ("break", bytes_of(COMPLETIONS, 4))) as (served, [engine]):
        assert (await ask(served)).events[-1]["error"] == {
            "object": "error", "message": "the worker was lost after the answer had begun: the connection ended",
            "type": "Bad Gateway", "param": None, "code": 502}
        assert len(engine.asked) == 1 and not served.count(CONTINUED, worker=engine.url)


async def test_b65_an_engine_that_reports_an_error_or_falls_silent():
    async with router(2, stream_timeout_s=0.5) as (served, engines):
        for step in ("error", 4), ("stall", 4):
            engines[0].plan.append(step)
            got = await ask(served)
            assert text_of(got) == TEXT and got.events[-1] == "[DONE]"
            assert served.router.workers.counts() == {"up": 2}, "a probe decides"
        assert total(served, CONTINUED) == 2
    async with router(1, ("error", 4)) as (served, [engine]):
        assert "EngineCore died" in (await ask(served)).events[-1]["error"]["message"]


async def test_b65_a_probe_takes_the_engine_out():
    async with router(2, ("stall", 4), probe_interval_s=0.3) as (served, engines):
        for engine in engines:
            engine.sick = Fault.HANG
        open_one = asyncio.create_task(ask(served))
        await served.until(lambda: any(engine.asked for engine in engines))
        [well] = [engine for engine in engines if not engine.asked]
        well.sick = Fault.NONE
        assert text_of(await open_one) == TEXT and len(well.asked) == 1


async def test_b65_a_probe_takes_the_next_engine_out_before_it_has_begun():
    """Which is no break of the stream: the third one gets the rest."""
    async with router(3, ("break", bytes_of(COMPLETIONS, 4)), Fault.HANG, probe_interval_s=0.3) as (served, engines):
        open_one = asyncio.create_task(ask(served))
        await served.until(lambda: sum(len(engine.asked) for engine in engines) == 2)
        hung = max(engines, key=lambda engine: len(served.worker(engine).in_flight))
        hung.sick = Fault.HANG
        assert text_of(await open_one) == TEXT and total(served, BROKEN) == 1
        assert served.count("vllm:pd_router_tries_total", worker=hung.url, outcome="probe") == 1


async def gone_at_the_second(served: Served, engines: list[TokenEngine], number: int) -> None:
    """The client of the request of this number goes when the second engine has it. That one gets to know."""
    task = asyncio.create_task(ask(served))
    await served.until(lambda: sum(len(engine.asked) for engine in engines) == 2 * number)
    await asyncio.sleep(0.05)
    task.cancel()
    await served.until(lambda: sum(engine.cancelled for engine in engines) == number)
    await served.until(lambda: served.count("vllm:pd_router_clients_gone_total") == number)


async def test_b65_the_client_goes_during_the_continuation():
    cut = ("break", bytes_of(COMPLETIONS, 4))
    async with router(2, cut, ("stall", 2), cut, Fault.HANG) as (served, engines):
        for number in 1, 2:  # after the second engine's first event, and before
            await all_up(served, engines)
            await gone_at_the_second(served, engines, number)


async def test_b65_a_request_that_kills_engines_does_not_get_a_third():
    die = ("die", bytes_of(COMPLETIONS, 4))
    async with router(3, die, die) as (served, engines):
        assert (await ask(served)).events[-1]["error"]["code"] == 502
        assert (await ask(served)).status == 502, "refused, as ever"
        assert sorted(len(engine.asked) for engine in engines) == [0, 1, 1]


async def test_b65_the_router_shuts_down_meanwhile():
    async with router(2, ("break", bytes_of(COMPLETIONS, 4)), ("stall", 2)) as (served, engines):
        open_one = asyncio.create_task(ask(served))
        await served.until(lambda: total(served, CONTINUED) == 1)
        served.router.cut()
        assert (await open_one).events[-1]["error"]["code"] == 503


@pytest.mark.parametrize("more", [{"n": 2}, {"stop": "x"}, {"seed": 3}], ids=str)
async def test_b65_what_cannot_be_continued_ends_with_an_error_and_passes_unread(more):
    cut = bytes_of(COMPLETIONS, 4) + 7
    async with router(2, ("break", cut)) as (served, engines):
        got = await ask(served, **more)
        [first] = [engine for engine in engines if engine.asked]
        assert b"return_token_ids" not in first.asked[0][2]
        plain = b"".join(answer(COMPLETIONS, asked(COMPLETIONS), str(first.port)))
        assert got.body.startswith(plain[:cut]) and got.body.endswith(b'"code": 502}}\n\n')


async def test_b65_an_engine_without_token_ids():
    """As vLLM 0.9.2, which does not know the field."""
    async with serving(2, continue_streams=True) as (served, engines):
        for engine in engines:
            engine.fault = Fault.BREAK
        got = await served.ask(True)
        assert got.events[0] == {"choices": [{"text": " t0"}]} and got.events[-1]["error"]["code"] == 502
        assert sum(len(engine.asked) for engine in engines) == 1


async def test_b65_prefill_first_the_next_engine_gets_no_parameters():
    async with router(2, ("break", bytes_of(COMPLETIONS, 4)), prefills=1) as (served, [*engines, prefill]):
        prefill.params = {"remote": 1}
        assert text_of(await ask(served)) == TEXT
        params = [json.loads(engine.asked[0][2]).get("kv_transfer_params") for engine in engines]
        assert sorted(params, key=str) == [None, {"remote": 1}]


async def test_b65_the_rest_of_a_query_is_kept():
    async with router(2, ("break", bytes_of(PATHS[1], 4))) as (served, engines):
        got = await ask(served, f"{PATHS[1]}?a=/v1/chat/completions")
        targets = sorted(engine.asked[0][0] for engine in engines)
        assert text_of(got) == TEXT
        assert targets == ["/v1/chat/completions?a=/v1/chat/completions", "/v1/completions?a=/v1/chat/completions"]
