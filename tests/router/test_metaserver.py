# SPDX-License-Identifier: Apache-2.0
"""B100: the router as a metaserver. A decode engine (D) gets each request first, and posts the job of a prompt that a
prefill engine (P) is to compute."""
import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from tests.router.holding import with_index
from tests.router.test_ending import end
from tests.router.test_front import TestMembership as _TestMembership
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.router import app, metaserver
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import Policy
from vllm_pd.router.prefill_form import PrefillOutcome
from vllm_pd.router.workers import WorkerFailure, WorkerState

POSTS = "vllm:pd_router_posts_total"
CHAT = "/v1/chat/completions"
MESSAGES = {"messages": [{"role": "user", "content": "a"}], "prompt": None}


class PostingEngine(FaultyEngine):
    """`log` is one for all engines: who did what, in that order. As D it posts what `change` makes of its job, `times`
    times one after the other, unless that is 0, and answers when all posts are answered, or when it `may_answer`;
    `answers` are the statuses and bodies that it got. Each post ends after `patience_s`. As P it answers when `go` is
    set."""

    def __init__(self, log: list[tuple[int, str]]) -> None:
        super().__init__()
        self.log, self.times, self.patience_s = log, 1, 60.0
        self.may_answer = asyncio.Event()
        self.change = lambda post: json.dumps(post).encode()
        self.answers: list[tuple[int, dict | None]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.posting: set[asyncio.Task] = set()

    async def _do(self, fault, asked, reader, writer) -> bool:
        params = asked.get("kv_transfer_params") or {}
        if "metaserver" in params and fault is Fault.NONE:
            target, headers, _ = self.asked[-1]
            self.log.append((self.port, "asked"))
            name = headers.get("x-request-id")
            request_id = f"chatcmpl-{name}" if target.startswith(CHAT) else f"cmpl-{name}-0"
            task = asyncio.create_task(self._post(params["metaserver"], request_id))
            self.posting.add(task)
            waiting = asyncio.create_task(self.may_answer.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            self.log.append((self.port, "answers"))
        elif params.get("do_remote_decode"):
            self.log.append((self.port, "asked"))
            await self.go.wait()
            self.log.append((self.port, "answers"))
        return await super()._do(fault, asked, reader, writer)

    async def _post(self, url: str, request_id: str) -> None:
        post = {"request_id": request_id, "do_remote_decode": True, "do_remote_prefill": False, "pd_job": "j"}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.patience_s)) as session:
            for _ in range(self.times):
                self.log.append((self.port, "posts"))
                try:
                    async with session.post(url, data=self.change(post)) as answer:
                        self.answers.append((answer.status, await answer.json()))
                except TimeoutError:
                    self.answers.append((0, None))
                self.log.append((self.port, "has its answer"))

    async def stop(self) -> None:
        for task in self.posting:
            task.cancel()
        await super().stop()


def posting(count: int, prefills: int, *args, **options):
    """So many Ds and Ps behind a router that is their metaserver."""
    log: list[tuple[int, str]] = []
    return serving(count, *args, prefills=prefills, make=lambda: PostingEngine(log), metaserver=True, **options)


def bodies(engine) -> list[dict]:
    return [json.loads(body) for _, _, body in engine.asked]


def outcomes(served) -> dict[str, float]:
    return {sample.labels["outcome"]: sample.value for family in served.router.metrics.registry.collect()
            for sample in family.samples if sample.name == POSTS}


def empty(served) -> bool:
    """Nothing is kept of any request."""
    return not len(served.router.proxy.metaserver) and not served.router.proxy.metaserver.bodies.held_bytes


@pytest.mark.parametrize("path, asked", [("/v1/completions", {"max_tokens": 9}),
                                         (CHAT, MESSAGES | {"max_completion_tokens": 9})])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b100_the_order_of_calls(path, asked, stream):
    """The client's request to D, D's post to P, P's answer to D, and then D's answer to the client."""
    async with posting(1, 1) as (served, [d, p]):
        if stream:
            asked = asked | {"stream_options": {"include_usage": True}}
        answer = await served.ask(stream, path=path, **asked)
        assert answer.status == 200 and (answer.events[-1] == "[DONE]" if stream else answer.json["from"] == d.port)
        assert d.log == [(d.port, "asked"), (d.port, "posts"), (p.port, "asked"), (p.port, "answers"),
                         (d.port, "has its answer"), (d.port, "answers")]
        client = {"model": "m", "prompt": "Hello", "stream": stream, **asked}
        [at_d], [at_p] = bodies(d), bodies(p)
        url = served.url + "/v1/metaserver"
        assert at_d == client | {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True,
                                                        "metaserver": url}}
        posted = at_p["kv_transfer_params"]
        assert posted["pd_job"] == "j" and posted["do_remote_decode"] is True, "as D has posted it"
        assert at_p["max_tokens"] == at_p["min_tokens"] == at_p.get("max_completion_tokens", 1) == 1
        assert at_p["stream"] is False and "stream_options" not in at_p and at_p["prompt"] == client["prompt"]
        assert at_p.get("messages") == client.get("messages")
        assert p.asked[0][0] == d.asked[0][0] == path
        assert p.asked[0][1]["x-request-id"] == d.asked[0][1]["x-request-id"]
        assert d.answers == [(200, None)] and outcomes(served) == {"done": 1} and empty(served)
        assert served.count("vllm:pd_router_requests_total", path="/v1/metaserver", status="200") == 1
        assert served.count("vllm:pd_router_requests_total", path=path, status="200") == 1


async def test_b100_a_d_that_does_not_post_needs_no_p():
    async with posting(1, 1) as (served, [d, p]):
        d.times = 0
        assert (await served.ask()).json["from"] == d.port
        assert not p.asked and not outcomes(served) and empty(served)


async def test_b100_the_id_of_a_request_can_not_be_guessed_and_has_the_clients_in_it():
    async with posting(1, 1) as (served, [d, p]):
        for mine in ("mine", "mine", 'odd"', "x" * 129, ""):
            await served.ask(headers={"x-request-id": mine, "authorization": "Bearer k", "accept-encoding": "gzip"})
        names = [headers["x-request-id"] for _, headers, _ in d.asked]
        assert [len(name) for name in names] == [37, 37, 32, 32, 32] and len(set(names)) == 5
        assert names[0].startswith("mine-") and names[1].startswith("mine-")
        assert outcomes(served) == {"done": 5}, "each was found by its id"
        assert p.asked[0][1]["authorization"] == "Bearer k" and "accept-encoding" not in p.asked[0][1]


@pytest.mark.parametrize("asked", [
    {"kv_transfer_params": {"pd": "local"}}, {"n": 2}, {"prompt": ["a b", "c"]}, {"echo": True}, {"prompt": None},
    {"kv_transfer_params": {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:9/v1/metaserver"}}])
async def test_b100_what_is_not_one_prompt_for_one_answer_goes_to_d_as_it_came(asked):
    async with posting(1, 1) as (served, [d, p]):
        d.times = 0
        body = {"model": "m", "prompt": "Hello", "stream": False, **asked}
        assert (await served.ask(**asked)).status == 200
        assert bodies(d) == [body] and "x-request-id" not in d.asked[0][1] and not p.asked


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/tokenize"])
async def test_b100_other_endpoints_know_no_metaserver(path):
    async with posting(1, 1) as (served, [d, p]):
        assert (await served.ask(path=path)).status == 200
        assert bodies(d) == [{"model": "m", "prompt": "Hello", "stream": False}] and not p.asked


@pytest.mark.parametrize("change, status, outcome, said", [
    (lambda post: json.dumps(post | {"request_id": "cmpl-other-0"}), 404, "unknown", "'cmpl-other-0'"),
    (lambda post: json.dumps(post | {"request_id": post["request_id"].removesuffix("-0")}), 404, "unknown", "waits"),
    (lambda post: b"{", 400, "unread", "JSON"), (lambda post: b"[]", 400, "unread", "request_id"),
    (lambda post: b"", 400, "unread", "JSON"), (lambda post: b"\xff\xfe", 400, "unread", "JSON"),
    (lambda post: json.dumps({"request_id": 1}), 400, "unread", "request_id"),
    (lambda post: b'{"request_id":' + b"[" * 100_000, 400, "unread", "request_id"),
    (lambda post: b" " * (metaserver.MAX_POST_BYTES + 1), 413, "unread", "bytes")],
    ids=["unknown", "almost", "broken", "list", "empty", "binary", "number", "deep", "giant"])
async def test_b66_b100_posts_that_no_request_of_this_router_has(change, status, outcome, said):
    async with posting(1, 1) as (served, [d, p]):
        d.change = change
        assert (await served.ask()).json["from"] == d.port
        [(got, body)] = d.answers
        assert got == status and said in body["message"] and not p.asked
        assert outcomes(served) == {outcome: 1} and empty(served)


async def test_b66_b100_bodies_of_posts_have_a_bound_together(monkeypatch):
    monkeypatch.setattr(metaserver, "MAX_POSTS_BYTES", 50)
    async with posting(1, 1) as (served, [d, p]):
        assert (await served.ask()).json["from"] == d.port
        assert [status for status, _ in d.answers] == [503] and not p.asked and empty(served)


async def test_b66_b100_a_body_that_does_not_come_is_not_awaited_for_long(monkeypatch):
    monkeypatch.setattr(app, "POST_BODY_S", 0.2)
    async with posting(1, 1) as (served, [_, p]):
        p.go.clear()
        waiting = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(b"POST /v1/metaserver HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                     b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        p.go.set()
        assert (await waiting).status == 200 and outcomes(served) == {"unread": 1, "done": 1} and empty(served)


async def test_b66_b100_without_an_open_request_no_body_is_read():
    async with posting(1, 1) as (served, [d, _]):
        answer = await served.ask(path="/v1/metaserver", request_id="cmpl-1-0")
        assert answer.status == 404 and "no request is open" in answer.json["message"]
        assert (await served.ask(path="/v1/metaserver", method="GET")).status == 405


async def test_b100_a_router_without_the_option_has_no_metaserver():
    async with serving(1) as (served, [d]):
        answer = await served.ask(path="/v1/metaserver", request_id="cmpl-1-0")
        assert answer.status == 404 and "--metaserver" in answer.json["message"]
        await served.ask()
        assert "kv_transfer_params" not in bodies(d)[0]


async def test_b100_a_request_is_posted_once():
    async with posting(1, 1) as (served, [d, p]):
        d.times = 3
        assert (await served.ask()).json["from"] == d.port
        assert [status for status, _ in d.answers] == [200, 409, 409] and "before" in d.answers[1][1]["message"]
        assert len(p.asked) == 1 and outcomes(served) == {"done": 1, "again": 2}


async def test_b100_after_the_first_byte_of_ds_answer_nobody_posts():
    """The client may read the id in the answer."""
    async with posting(1, 1) as (served, [d, p]):
        d.times, d.go_on = 0, asyncio.Event()
        other = asyncio.create_task(served.ask(True))
        await served.until(lambda: d.asked and empty(served))
        [(_, headers, _)] = d.asked
        d.go_on, held = None, d.go_on
        d.times = 1
        p.go.clear()
        waiting = asyncio.create_task(served.ask())  # so that posts are read
        await served.until(lambda: p.asked)
        answer = await served.ask(path="/v1/metaserver", request_id=f"cmpl-{headers['x-request-id']}-0")
        assert answer.status == 404 and outcomes(served) == {"unknown": 1} and len(p.asked) == 1
        p.go.set()
        held.set()
        assert (await waiting).status == (await other).status == 200


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY, Fault.REFUSE], ids=lambda value: str(value).lower())
async def test_b100_where_p_refuses_another_p_does_the_job(fault):
    async with posting(1, 2) as (served, [d, *ps]):
        ps[0].fault = ps[1].fault = fault
        answer = await self_healing(served, ps)
        assert answer.json["from"] == d.port and d.answers == [(200, None)]
        assert [len(p.asked) for p in ps] == [1, 1] and outcomes(served) == {"done": 1}
        assert {served.worker(one).state for one in (d, *ps)} == {WorkerState.UP}


@pytest.mark.parametrize("fault, outcome", [(Fault.HANG_UP, "broken"), (Fault.NOISE, "broken"),
                                            (Fault.HANG, "timeout")], ids=lambda value: str(value).lower())
async def test_b100_where_p_may_have_claimed_the_job_no_other_p_gets_it(fault, outcome):
    """D would let no other one have it, so the post is answered at once."""
    async with posting(1, 2, prefill_timeout_s=0.5) as (served, [d, *ps]):
        for p in ps:
            p.sick, p.fault = Fault.ERROR, fault
        assert (await served.ask()).json["from"] == d.port
        assert [status for status, _ in d.answers] == [502] and outcomes(served) == {outcome: 1}
        [failed] = [p for p in ps if p.asked]
        assert served.worker(failed).state is WorkerState.DOWN and served.worker(d).state is WorkerState.UP


async def self_healing(served, ps):
    """Ask, where the P that comes second works."""
    first = served.router.placer.place_prefill
    turn = []

    def place(plan, tried=()):
        worker = first(plan, tried)
        if tried and worker is not None and not turn:
            turn.append(worker)
            next(p for p in ps if p.url == worker.url).fault = Fault.NONE
        return worker

    served.router.placer.place_prefill = place
    return await served.ask()


async def test_b100_two_ps_at_most_and_then_an_error_with_which_d_goes_on():
    async with posting(1, 3) as (served, [d, *ps]):
        for p in ps:
            p.fault = Fault.ERROR
        assert (await served.ask()).json["from"] == d.port
        assert [status for status, _ in d.answers] == [502] and "server_error" in d.answers[0][1]["message"]
        assert sum(len(p.asked) for p in ps) == 2 and outcomes(served) == {"server_error": 1} and empty(served)


async def test_b100_without_a_p_the_post_has_an_error():
    async with posting(1, 1) as (served, [d, p]):
        p.sick = Fault.ERROR
        served.worker(p).probe_soon()
        await served.until(lambda: served.worker(p).state is WorkerState.DOWN)
        assert (await served.ask()).json["from"] == d.port
        assert [status for status, _ in d.answers] == [502] and outcomes(served) == {"no_prefill": 1}
        assert not p.asked


async def test_b100_a_p_that_dies_with_the_job():
    async with posting(1, 2) as (served, [d, *ps]):
        for p in ps:
            p.go.clear()
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: any(p.asked for p in ps))
        [dead] = [p for p in ps if p.asked]
        [other] = [p for p in ps if p is not dead]
        await dead.stop()
        assert (await asked).json["from"] == d.port and not other.asked and outcomes(served) == {"broken": 1}
        assert served.worker(dead).state is WorkerState.DOWN


async def test_b63_b100_a_prompt_that_kills_ps_kills_no_third_one():
    async with posting(1, 4) as (served, [d, *ps]):
        d.survives = True
        for wanted, killed in (({"broken": 1}, 1), ({"broken": 2}, 2), ({"broken": 2, "fatal": 1}, 2)):
            assert (await served.ask(prompt="kill")).json["from"] == d.port
            assert outcomes(served) == wanted and sum(len(p.asked) for p in ps) == killed
        assert (await served.ask()).status == 200 and outcomes(served)["done"] == 1, "other prompts still go there"


async def test_b63_b100_a_prompt_that_has_killed_a_d_kills_one_p_at_most():
    async with posting(2, 3) as (served, [first, second, *ps]):
        served.worker(second).pause(60)  # so that it gets the request after the other one
        second.survives = True
        assert (await served.ask(prompt="kill")).json["from"] == second.port
        assert len(first.asked) == 1 and sum(len(p.asked) for p in ps) == 1 and outcomes(served) == {"broken": 1}


async def test_b100_a_d_that_dies_ends_ps_request_and_the_next_d_posts_itself():
    async with posting(2, 1) as (served, [*ds, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        [dead] = [d for d in ds if d.asked]
        [other] = [d for d in ds if d is not dead]
        p.fault = Fault.NONE
        await dead.stop()
        assert (await asked).json["from"] == other.port and other.answers == [(200, None)]
        await served.until(lambda: p.cancelled == 1)
        assert len({headers["x-request-id"] for d in ds for _, headers, _ in d.asked}) == 2, "an id for each try"
        await served.until(lambda: outcomes(served).get("done") == 1 and sum(outcomes(served).values()) == 2)
        assert outcomes(served).keys() <= {"done", "ended", "gone"} and empty(served)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_b100_a_client_that_leaves_ends_ps_request(stream):
    async with posting(1, 1) as (served, [d, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask(stream))
        await served.until(lambda: p.asked)
        asked.cancel()
        await served.until(lambda: p.cancelled == 1)
        await served.until(lambda: served.count("vllm:pd_router_clients_gone_total") == 1)
        await served.until(lambda: [status for status, _ in d.answers] == [409])
        assert outcomes(served) == {"ended": 1} and empty(served) and served.worker(p).state is WorkerState.UP


async def test_b100_a_d_that_ends_its_post_ends_ps_request():
    async with posting(1, 2) as (served, [d, *ps]):
        for p in ps:
            p.fault = Fault.HANG
        d.patience_s = 0.3
        assert (await served.ask()).json["from"] == d.port and d.answers == [(0, None)]
        await served.until(lambda: outcomes(served) == {"gone": 1})
        await served.until(lambda: sum(p.cancelled for p in ps) == 1)
        assert sum(len(p.asked) for p in ps) == 1, "no other P is asked"
        assert all(served.worker(p).state is WorkerState.UP for p in ps)


async def test_b100_ps_answer_may_come_after_ds():
    """D has the KV when P has written it, which is before P answers."""
    async with posting(1, 1) as (served, [d, p]):
        p.go.clear()
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        d.may_answer.set()
        assert (await asked).json["from"] == d.port and not d.answers
        p.go.set()
        await served.until(lambda: d.answers == [(200, None)])
        assert outcomes(served) == {"done": 1} and not p.cancelled and empty(served)


async def test_b100_the_end_of_the_router_ends_posts():
    async with posting(1, 1, grace_s=0.3) as (served, [d, p]):
        p.fault = Fault.HANG
        asked = asyncio.create_task(served.ask())
        await served.until(lambda: p.asked)
        end(served)
        assert (await asked).status == 503
        await served.until(lambda: p.cancelled == 1)


async def test_b100_a_connection_that_d_had_closed_costs_no_post():
    """The request goes to the same D again, under the same id."""
    async with posting(1, 1) as (served, [d, _]):
        await served.ask()
        for task in list(d._open):
            task.cancel()
        await served.until(lambda: not d._open)
        assert (await served.ask()).json["from"] == d.port
        assert outcomes(served) == {"done": 2}


async def test_b100_p_is_chosen_by_its_prefix():
    async with posting(1, 3, Policy.KV) as (served, [d, *ps]):
        index = with_index(served.router.placer, 4)
        for holder in (ps[1], d):
            index.stored(holder.url, [1, 2, 3], None, list(range(12)), 4)
        for _ in range(3):
            await served.ask(prompt=list(range(14)))
        assert [len(p.asked) for p in ps] == [0, 3, 0]
        ps[1].fault = Fault.BUSY
        await served.ask(prompt=list(range(14)))
        assert len(ps[1].asked) == 4 and len(ps[0].asked) + len(ps[2].asked) == 1, "then one without the prefix"


async def test_b100_p_is_chosen_by_its_open_requests():
    async with posting(1, 3, Policy.LEAST_LOAD) as (served, [_, *ps]):
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


def test_each_outcome_is_documented():
    page = (Path(__file__).parents[2] / "docs/router.md").read_text()
    row = next(line for line in page.splitlines() if "posts_total{outcome}" in line)
    named = set(re.findall(r"`(\w+)`", row))
    prefills = {PrefillOutcome.NO_PREFILL, PrefillOutcome.FATAL, PrefillOutcome.CUT, PrefillOutcome.REFUSED,
                PrefillOutcome.BAD_PARAMS}
    failures = set(WorkerFailure) - {WorkerFailure.NOT_LOADED, WorkerFailure.EMPTY, WorkerFailure.DECLINED}
    assert {one.value for one in (*metaserver.PostOutcome, *prefills, *failures)} <= named


def test_b80_metaservers_that_can_not_be():
    p, url = ("http://127.0.0.1:1", ), "http://10.0.0.5:8000/v1/metaserver"
    for wrong in ("x", "ftp://a/v1/metaserver", "http://a:8000", "http://a:8000/v1/metaserver/", "http:///v1/metaserver",
                  "http://a:8000/v1/metaserver?x=1", "http://a:0/v1/metaserver", "http://u:p@a:1/v1/metaserver", ""):
        with pytest.raises(ConfigError, match="/v1/metaserver") as caught:
            RouterOptions(metaserver=wrong, prefill_workers=p).checked()
        assert caught.value.key == "--metaserver" and "u:p" not in str(caught.value)
    with pytest.raises(ConfigError, match="--prefill-worker"):
        RouterOptions(metaserver=url).checked()
    with pytest.raises(ConfigError, match="leave out one"):
        RouterOptions(metaserver=url, order="prefill-first", prefill_workers=p).checked()
    for right in ({"prefill_workers": p}, {"broker": "tcp://127.0.0.1:1"}):
        assert RouterOptions(metaserver=url, **right).checked().asks_prefills
    assert not RouterOptions().checked().asks_prefills


async def test_b100_prefill_engines_join_with_the_registry():
    options = {"metaserver": "http://10.0.0.5:8000/v1/metaserver", "broker": "tcp://127.0.0.1:1"}
    async with _TestMembership.following(**options) as (membership, workers):
        membership.update([_TestMembership.member("a", "http://h:1", m.Role.PREFILL, False)], 0.0)
        assert [(worker.url, worker.prefills) for worker in workers] == [("http://h:1", True)]
