# SPDX-License-Identifier: Apache-2.0
"""B100: the metaserver form over real sockets: D's control thread and its posts, a proxy, P's server and its control
thread. The engines are played by the test.
"""
import asyncio
import contextlib
import json
import threading
import time
import uuid
from types import SimpleNamespace

import aiohttp
import pytest
import uvicorn
import zmq
from aiohttp import web
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.fakes.brokers import serving
from tests.fakes.metaserver_proxy import BODY, LoopThread, MetaserverProxy
from tests.sockets.test_agent import FINGERPRINT, TOKENS, WAIT_S, Engine, Settings
from tests.unit.test_metaserver import URL, naming
from tests.waiting import wait_for
from vllm_pd.frontend import connection
from vllm_pd.frontend.drain import ServerDrain
from vllm_pd.frontend.metaserver import DirectJobMiddleware, SeveralAnswersMiddleware, without_metaserver
from vllm_pd.peer import posted_jobs, poster
from vllm_pd.peer.poster import MetaserverPoster
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    Cancelled,
    Fallback,
    FallbackReason,
    PostJob,
    Prefill,
    Prefilled,
    Released,
    RenewTransport,
    StopPost,
)
from vllm_pd.protocol.metaserver import post_params, posted_name
from vllm_pd.rpc import codec
from vllm_pd.rpc.ports import take_free
from vllm_pd.rpc.sockets import HIGH_WATER_MESSAGES

ID, SECRET = "cmpl-1-0", "0123456789abcdef" * 2


@pytest.fixture
def loop():
    loop = LoopThread()
    yield loop
    loop.close()


class Producer:
    """P: its control thread, and its server, whose application answers what is not a job."""

    def __init__(self, settings, loop, folder):
        front = f"ipc://{folder}/{uuid.uuid4().hex}"
        self.engine = Engine(settings, m.Role.PREFILL, front=front)
        self.engine.protocol.set_load(m.Load())
        self.port = take_free("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.port}"
        self.others = []
        self._loop = loop
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(front), loop.loop)

    async def _serve(self, front):
        async def completions(request):
            self.others.append(await request.json())
            return JSONResponse({"text": "of vLLM"})

        self.drain = ServerDrain([front], 5.0, lambda: None, self.url)
        app = DirectJobMiddleware(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]),
                                                    Route("/v1/chat/completions", completions, methods=["POST"])]),
                                  self.drain.run_job)
        self.server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", self.port, log_level="error", lifespan="off"))
        self.server.install_signal_handlers = lambda: None
        await self.server._serve()
        self.drain.close()

    def ask(self, body, path="/v1/completions"):
        async def post():
            async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as answer:
                return answer.status, await answer.json()
        return self._loop.run(post())

    def computes(self):
        """It computes and writes the next prompt. Returns its event."""
        job = self.engine.expect(Prefill)
        assert self.engine.protocol.prefill.may_write(job.attempt)
        self.engine.protocol.prefill.sent(job.attempt, m.Timings())
        return job

    def close(self):
        self.server.should_exit = True
        self._serving.result(WAIT_S)
        self.engine.close()


@pytest.fixture
def fleet(loop, tmp_path):
    """D, a proxy and two Ps, which have met."""
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(serving(ttl_s=60.0))
        proxy = MetaserverProxy(loop)
        stack.callback(proxy.close)
        settings = Settings(broker.address, metaserver_urls=(proxy.url,))
        decode = Engine(settings, m.Role.DECODE)
        stack.callback(decode.close)
        producers = []
        for _ in range(2):
            producers.append(Producer(settings, loop, tmp_path))
            stack.callback(producers[-1].close)
        decode.expect_view(lambda view: view.prefill_peers == 2)
        wait_for(lambda: all(one.engine.protocol.operators.counts()["peers"] == 1 and getattr(one, "server", None)
                             and one.server.started for one in producers))
        proxy.producers = [producers[0].url]
        yield SimpleNamespace(decode=decode, proxy=proxy, producers=producers)


def posted(fleet, request_id=ID, url=None):
    attempt = fleet.decode.protocol.decode.next_attempt(posted_name(request_id, SECRET))
    fleet.decode.protocol.decode.post_job(attempt, url or fleet.proxy.url, request_id)
    fleet.decode.protocol.decode.submit(attempt, TOKENS, [10, 11, 12], 1)
    return attempt


def at_rest(fleet):
    """Nothing is open anywhere."""
    thread = fleet.decode.agent.thread
    wait_for(lambda: not thread._poster.count() or thread._poster.error, "a post is open")
    for one in fleet.producers:
        operators, direct = one.engine.protocol.operators, one.engine.agent.thread._direct
        wait_for(lambda operators=operators, direct=direct: not operators.open_attempts() and not len(direct),
                 "P has a job")
        wait_for(lambda one=one: not any(connection._jobs for connection in one.drain._connections), "a client waits")
    wait_for(lambda: not fleet.decode.protocol.operators.open_attempts(), "D has an attempt")
    assert not len(fleet.decode.protocol._core.posted) and thread.is_alive() and thread._poster.error is None


def test_b100_through_the_proxy_to_the_prefill_engine_that_it_chooses(fleet):
    fleet.proxy.producers = [fleet.producers[1].url]
    attempt = posted(fleet)
    job = fleet.producers[1].computes()
    assert (job.attempt, job.token_ids, job.block_ids, job.cached_blocks) == (attempt, TOKENS, [11, 12], 1)
    fleet.decode.protocol.decode.arrived(attempt, 0)
    assert fleet.decode.expect(Prefilled).attempt == attempt
    wait_for(lambda: fleet.proxy.answers, "P does not answer")
    ((status, said),) = fleet.proxy.answers
    assert status == 200 and (said["object"], said["model"]) == ("text_completion", "tiny")
    assert said["choices"][0]["finish_reason"] == "length" and said["kv_transfer_params"] is None
    assert said["usage"] == {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
    (post,) = fleet.proxy.posts
    assert post["request_id"] == ID and post["remote_engine_id"] == attempt.incarnation
    assert fleet.producers[0].engine.protocol.operators.totals() == {} and not fleet.producers[1].others
    at_rest(fleet)


def test_b100_a_chat_is_answered_as_a_chat(fleet):
    fleet.proxy.producers = []
    attempt = posted(fleet)
    wait_for(lambda: fleet.proxy.posts)
    worker = threading.Thread(target=fleet.producers[0].computes)
    worker.start()
    status, said = fleet.producers[0].ask({"messages": [], "kv_transfer_params": fleet.proxy.posts[0]},
                                          "/v1/chat/completions")
    worker.join()
    assert status == 200 and said["object"] == "chat.completion"
    assert said["choices"][0]["message"] == {"role": "assistant", "content": ""}
    fleet.decode.protocol.decode.arrived(attempt, 0)
    fleet.decode.expect(Prefilled)
    at_rest(fleet)


def test_b100_p_s_control_thread_dies_and_its_server_lives(fleet, loop, monkeypatch):
    """What is open ends at once. What comes later ends soon, also when nothing more fits into the socket."""
    monkeypatch.setattr(connection, "ANSWER_S", 0.3)
    producer = fleet.producers[0]
    attempt = posted(fleet)
    producer.engine.expect(Prefill)

    def die():
        raise MemoryError("full")

    monkeypatch.setattr(producer.engine.agent.thread, "_check_liveness", die)
    producer.engine.protocol.control.wake()
    wait_for(lambda: fleet.proxy.answers, "P does not answer")
    ((status, said),) = fleet.proxy.answers
    assert status == 409 and "control thread" in said["message"]
    wait_for(lambda: not producer.engine.agent.thread.is_alive())
    carrier = {**BODY, "kv_transfer_params": fleet.proxy.posts[0]}
    assert producer.ask(carrier)[0] == 503
    (speaks,) = producer.drain._connections

    async def fill():
        with pytest.raises(zmq.Again):
            for _ in range(10 * HIGH_WATER_MESSAGES):
                await speaks._socket.send(b"more", zmq.NOBLOCK)

    loop.run(fill())
    status, said = producer.ask(carrier)
    assert status == 503 and "does not answer" in said["message"]
    assert not speaks._jobs
    fleet.decode.protocol.decode.abort(attempt)


def test_b100_two_prefill_engines_and_a_request_that_comes_twice(fleet):
    """One gets the blocks. The other learns that it did not, and both requests of the first one are answered."""
    first, second = fleet.producers
    fleet.proxy.producers = [first.url, first.url]
    attempt = posted(fleet)
    first.engine.expect(Prefill)
    status, said = second.ask({**BODY, "kv_transfer_params": fleet.proxy.posts[0]})
    assert status == 409 and "another prefill engine has it" in said["message"]
    wait_for(lambda: len(first.engine.agent.thread._direct) == 1)
    first.engine.protocol.prefill.sent(attempt, m.Timings())
    fleet.decode.protocol.decode.arrived(attempt, 0)
    fleet.decode.expect(Prefilled)
    wait_for(lambda: [status for status, _ in fleet.proxy.answers] == [200, 200])
    status, said = first.ask({**BODY, "kv_transfer_params": fleet.proxy.posts[0]})
    assert status == 409, "a request that comes after the end is denied"
    at_rest(fleet)


def test_b100_b27_a_job_whose_write_may_land_is_over_for_its_client(fleet):
    """B27: D falls back at once, P's client is answered, and P leaves when it is drained: nobody waits for what only a
    death ends."""
    first, decode = fleet.producers[0].engine, fleet.decode
    attempt = posted(fleet)
    first.expect(Prefill)
    first.protocol.prefill.unproven(attempt, "the transfer failed")
    fallback = decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.FAILED)
    wait_for(lambda: fleet.proxy.answers)
    [(status, said)] = fleet.proxy.answers
    assert status == 409 and "the transfer failed" in said["message"]
    assert first.protocol.operators.open_attempts() == decode.protocol.operators.open_attempts() == [attempt]
    first.expect(RenewTransport)  # which its engine would pass on
    first.protocol.operators.drain()
    first.protocol.set_load(m.Load())
    wait_for(lambda: first.protocol.state.left)
    for us, them in ((first, decode), (decode, first)):
        us.protocol.deaths.peer_dead(them.agent.member.incarnation)
    assert decode.expect(Released).attempt == attempt
    at_rest(fleet)


@pytest.mark.parametrize("answer, posts", [(500, 1), (404, 1), (302, 1), ("nobody", 0)])
def test_b100_a_post_that_fails_is_a_fallback_and_no_redirect_is_followed(fleet, monkeypatch, answer, posts):
    monkeypatch.setattr(poster, "PAUSE_S", 0.001)
    fleet.proxy.answer = answer
    if answer == "nobody":
        fleet.proxy.close()
    attempt = posted(fleet)
    fallback = fleet.decode.expect(Fallback)
    assert (fallback.attempt, fallback.reason) == (attempt, FallbackReason.PEER)
    assert ("can't be reached" if answer == "nobody" else str(answer)) in fallback.detail
    assert fleet.decode.expect(Released).attempt == attempt
    assert len(fleet.proxy.posts) == posts and not fleet.proxy.strayed
    at_rest(fleet)


def test_b100_an_url_that_is_not_listed_is_posted_to_by_nobody(fleet):
    attempt = posted(fleet, url=fleet.proxy.url.replace("/v1/metaserver", "/elsewhere"))
    fallback = fleet.decode.expect(Fallback)
    assert fallback.attempt == attempt and "not listed" in fallback.detail
    assert not fleet.proxy.strayed
    fleet.decode.expect(Released)
    at_rest(fleet)


def test_b100_an_answer_without_a_claim_is_a_fallback_soon(fleet):
    """Whatever `ttl_s` is, which is 60 here."""
    fleet.proxy.answer = 200
    posted(fleet)
    assert fleet.decode.expect(Fallback).detail == poster.ANSWERED
    fleet.decode.expect(Released)
    at_rest(fleet)


def silence(proxy):
    """Its metaserver answers no post from now on."""
    async def never(request):
        proxy.posts.append(await request.json())
        await asyncio.Event().wait()

    proxy.handle = never


def test_b100_the_client_of_d_goes_before_the_claim_and_the_post_ends(fleet):
    silence(fleet.proxy)
    attempt = posted(fleet)
    wait_for(lambda: fleet.proxy.posts)
    assert fleet.decode.agent.thread._poster.count() == 1
    fleet.decode.protocol.decode.abort(attempt)
    assert fleet.decode.expect(Released).attempt == attempt
    at_rest(fleet)


def test_b100_the_client_of_d_goes_after_the_claim_and_p_is_stopped_and_the_proxy_learns_it(fleet):
    attempt, producer = posted(fleet), fleet.producers[0]
    producer.engine.expect(Prefill)
    fleet.decode.protocol.decode.abort(attempt)
    assert producer.engine.expect(Cancelled).attempt == attempt
    assert not fleet.proxy.answers and fleet.decode.protocol.operators.open_attempts() == [attempt]
    producer.engine.protocol.prefill.ended(attempt)
    assert fleet.decode.expect(Released).attempt == attempt
    wait_for(lambda: fleet.proxy.answers)
    ((status, said),) = fleet.proxy.answers
    assert status == 409 and "gave it up" in said["message"]
    at_rest(fleet)


@pytest.mark.parametrize("end", ["done", "failed", "no broker"])
def test_b100_a_post_that_nobody_answers_ends_with_its_attempt(fleet, monkeypatch, end):
    """Its own deadline is a minute away."""
    monkeypatch.setattr(posted_jobs, "ANSWER_S", 0.1)
    silence(fleet.proxy)
    attempt, producer = posted(fleet), fleet.producers[0]
    wait_for(lambda: fleet.proxy.posts)
    if end == "no broker":  # then nothing is withdrawn
        fleet.decode.protocol._core.decode_half.broker_is(time.monotonic(), False)
        fleet.decode.protocol.decode.abort(attempt)
    else:
        asked = threading.Thread(target=producer.ask, args=[{**BODY, "kv_transfer_params": fleet.proxy.posts[0]}])
        asked.start()
        producer.engine.expect(Prefill)
        if end == "done":
            producer.engine.protocol.prefill.sent(attempt, m.Timings())
            fleet.decode.protocol.decode.arrived(attempt, 0)
            fleet.decode.expect(Prefilled)
        else:
            producer.engine.protocol.prefill.failed(attempt, "no room")
            fleet.decode.expect(Fallback)
        asked.join()
    at_rest(fleet)


def test_b100_p_gives_it_up_and_the_proxy_learns_why(fleet):
    attempt = posted(fleet)
    fleet.producers[0].engine.expect(Prefill)
    fleet.producers[0].engine.protocol.prefill.failed(attempt, "no room")
    fallback = fleet.decode.expect(Fallback)
    assert fallback.reason is FallbackReason.FAILED
    assert fallback.peer == fleet.producers[0].engine.agent.member.incarnation
    wait_for(lambda: fleet.proxy.answers)
    ((status, said),) = fleet.proxy.answers
    assert status == 409 and "no room" in said["message"]
    fleet.decode.expect(Released)
    at_rest(fleet)


@pytest.mark.parametrize("changed, status, said", [
    (None, 400, "kv_transfer_params.pd_job can't be used"), ({"number": 9}, 409, "did not grant it"),
    ({"incarnation": "x" * 32}, 409, "no such decode engine"),
    ({"address": "tcp://127.0.0.1:1"}, 409, "no such decode engine")],
    ids=["no job", "wrong attempt", "wrong engine", "wrong address"])
def test_b100_a_job_that_is_made_up_ends_with_an_error_and_changes_nothing(fleet, changed, status, said):
    made_up = "AAAA" if changed is None else job_of(fleet.decode.agent.member, **changed)
    fleet.proxy.change = lambda params: {**params, "pd_job": made_up}
    attempt = posted(fleet)
    assert fleet.decode.expect(Fallback).attempt == attempt
    fleet.decode.expect(Released)
    assert fleet.proxy.answers[0][0] == status and said in fleet.proxy.answers[0][1]["message"]
    at_rest(fleet)


def job_of(decode, number=0, incarnation=None, address=None):
    """A job of D's present attempt, or of another one, as a client might make it up."""
    attempt = m.Attempt(incarnation or decode.incarnation, posted_name(ID, SECRET), number)
    return post_params(m.Job(attempt, address or decode.address, TOKENS, 16, 60.0), ID, FINGERPRINT)["pd_job"]


def test_b100_all_other_requests_are_vllms(fleet):
    """Also one that only has the word in its prompt, one whose parameters are those of prefill first, and no JSON."""
    producer = fleet.producers[0]
    others = [BODY, {**BODY, "prompt": "pd_job"}, {**BODY, "kv_transfer_params": {"do_remote_decode": True}},
              {**BODY, "kv_transfer_params": {"pd_job": "AAAA"}}, {**BODY, "kv_transfer_params": "pd_job"},
              {**BODY, "kv_transfer_params": {"pd_job": None, "do_remote_decode": True}}]
    for body in others:
        assert producer.ask(body) == (200, {"text": "of vLLM"})
    assert producer.others == others


@pytest.mark.parametrize("body, found", [
    ({"pd_job": 7}, 400), ({"pd_job": {"job": "AAAA"}}, 400), ({"pd_job": []}, 400), ({}, 409), ({"model": None}, 409),
    ({"model": 7}, 409)], ids=str)
def test_b100_what_carries_a_job_is_never_vllms(fleet, body, found):
    """vLLM would compute it, and hold its blocks. 409: it is a job, of an attempt that D does not know."""
    producer, fields = fleet.producers[0], dict(body)
    params = {"do_remote_decode": True, "pd_job": fields.pop("pd_job", job_of(fleet.decode.agent.member))}
    status, said = producer.ask({**BODY, **fields, "kv_transfer_params": params})
    assert status == found and ("is not a string" in said["message"]) == (found == 400)
    assert not producer.others
    at_rest(fleet)


@pytest.mark.parametrize("change", [
    lambda body: body, lambda body: body.replace(b'"m"', b"NaN"), lambda body: body.replace(b'"m"', b"1e999"),
    lambda body: body.replace(b'"m"', b'"\\ud800"'), lambda body: body.replace(b"pd_job", b"pd\\u005fjob"),
    lambda body: body.decode().encode("utf-16")], ids=["plain", "NaN", "1e999", "surrogate", "escaped", "UTF-16"])
def test_b100_a_job_in_a_body_that_vllm_would_read_is_never_vllms(change):
    """vLLM would compute it as a client's prompt, and keep its blocks for a decode engine that does not come."""
    its_job = m.Job(m.Attempt("d", posted_name(ID, SECRET), 3), "tcp://127.0.0.1:3", TOKENS, 16, 60.0)
    params = post_params(its_job, "cmpl-1-0", FINGERPRINT)
    body = change(json.dumps({"model": "m", "kv_transfer_params": params}).encode())
    jobs, answers = [], []

    async def vllm(scope, receive, send):
        raise AssertionError("vLLM has got it")

    async def run(found):
        jobs.append(found)
        return ""

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        answers.append(message)

    asyncio.run(DirectJobMiddleware(vllm, run)(
        {"type": "http", "method": "POST", "path": "/v1/completions",
         "headers": [(b"content-type", b"application/json")]}, receive, send))
    assert jobs == [its_job] and answers[0]["status"] == 200
    assert json.loads(answers[1]["body"])["model"] in ("m", "", "?")


def test_b100_a_job_that_comes_twice_goes_to_the_same_rank():
    """Of a server with several: the other one would be denied it while the first one does it."""
    async def ask():
        drain = ServerDrain(["inproc://0", "inproc://1"], 5.0, lambda: None, "")
        ranks = [[], []]
        for made, one in zip(ranks, drain._connections, strict=True):
            async def run_job(job, made=made):
                made.append(job.attempt.number)
                return ""
            one.run_job = run_job
        try:
            for number in (3, 3, 4, 4, 3):
                await drain.run_job(post_to("", number).job)
        finally:
            drain.close()
        return ranks

    assert sorted(asyncio.run(ask())) == [[3, 3, 3], [4, 4]]


def test_b100_a_job_comes_from_the_front_end_and_from_no_other_socket(fleet):
    """Whoever reaches the control socket is not asked for a name with a secret."""
    engine = fleet.producers[0].engine
    job = m.Job(m.Attempt(fleet.decode.agent.member.incarnation, "r", 1), fleet.decode.agent.member.address, TOKENS, 0,
                60.0)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(engine.agent.member.address)
        socket.send(codec.encode("me", m.DirectJob(job)))
        wait_for(lambda: engine.agent.dropped().get("link_frame_unexpected"))
    assert engine.protocol.operators.totals() == {}
    at_rest(fleet)


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", naming(n=2)), ("/v1/chat/completions", naming(n=2)), ("/v1/completions", naming()),
    ("/v1/responses", naming(n=2))])
def test_b100_the_application_gets_the_body_that_is_left_and_then_what_follows(path, body):
    rest = [{"type": "http.request", "body": body[:9], "more_body": True}, {"type": "http.request", "body": body[9:]},
            {"type": "http.disconnect"}]
    seen = []

    async def application(scope, receive, send):
        while not seen or seen[-1]["type"] != "http.disconnect":
            seen.append(await receive())

    async def receive():
        return rest.pop(0)

    asyncio.run(SeveralAnswersMiddleware(application)(
        {"type": "http", "method": "POST", "path": path, "headers": [(b"content-type", b"application/json")]}, receive,
        None))
    got = b"".join(message.get("body", b"") for message in seen)
    changes = b'"n": 2' in body and path != "/v1/responses"
    assert got == (without_metaserver(body) if changes else body) and (URL.encode() in got) != changes
    assert not seen[-2].get("more_body")


# The thread that posts, alone.


def alone(urls, ended):
    return MetaserverPoster(urls, FINGERPRINT, lambda attempt, why: ended.append((attempt, why)),
                            lambda: ended.append("died"))


def post_to(url, number=0, deadline_s=60.0):
    job = m.Job(m.Attempt("d", posted_name(ID, SECRET), number), "tcp://127.0.0.1:1", TOKENS, 0, deadline_s)
    return PostJob(url, ID, job)


def test_b100_posts_have_a_bound_a_deadline_and_an_end(loop, monkeypatch):
    monkeypatch.setattr(poster, "MAX_POSTS", 2)
    release = asyncio.Event()

    async def never(request):
        await request.read()
        await release.wait()

    async def start():
        app = web.Application()
        app.router.add_post("/v1/metaserver", never)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        port = take_free("127.0.0.1")
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner, f"http://127.0.0.1:{port}/v1/metaserver"

    runner, url = loop.run(start())
    ended = []
    made = alone([url], ended)
    made.start()
    try:
        actions = [post_to(url, number, 0.2 if number == 1 else 60.0) for number in range(3)]
        for action in actions:
            made.carry_out(action)
        wait_for(lambda: len(ended) == 2)
        assert [attempt.number for attempt, _ in ended] == [2, 1]
        assert "more than 2 posts" in ended[0][1] and "in time" in ended[1][1]
        made.carry_out(StopPost(actions[2].job.attempt))  # which is none: no effect
        made.carry_out(StopPost(actions[0].job.attempt))
        wait_for(lambda: not made.count())
        assert len(ended) == 2, "who stops it knows that"
        unwanted = post_to(url, 9)
        made._loop.call_soon_threadsafe(lambda: (made._begin(unwanted), made._stop(StopPost(unwanted.job.attempt))))
        wait_for(lambda: not made.count(), "one that ended before it began stays")
        made.carry_out(post_to(url, 3))
        wait_for(lambda: made.count() == 1)
    finally:
        made.close()
        loop.loop.call_soon_threadsafe(release.set)
        loop.run(runner.cleanup())
    assert not made._thread.is_alive() and ended[-1][0].number == 3
    made.carry_out(post_to(url, 4))
    made.close()
    assert ended[-1] == (post_to(url, 4).job.attempt, poster.ENDED) and "died" not in ended


def test_b100_a_thread_that_dies_ends_what_it_has_and_all_that_comes(monkeypatch):
    url, ended = "http://127.0.0.1:9/v1/metaserver", []
    made = alone([url], ended)
    held = threading.Event()

    async def die():
        while not made.count():
            await asyncio.sleep(0.001)
        held.wait(WAIT_S)  # a second one comes during this turn, a third one after the last turn
        raise MemoryError("full")

    close = made._loop.close
    monkeypatch.setattr(made._loop, "close", lambda: (made.carry_out(post_to(url, 3)), close()))
    monkeypatch.setattr(made._ended, "wait", die)
    made.start()
    made.carry_out(post_to(url, 1))
    wait_for(lambda: made.count() == 1)
    made.carry_out(post_to(url, 2))
    held.set()
    made._thread.join(WAIT_S)
    assert len(ended) == 4 and isinstance(made.error, MemoryError)
    made.carry_out(post_to(url, 4))
    refused = [(post_to(url, number).job.attempt, poster.ENDED) for number in (1, 2, 3, 4)]
    assert ended == [*refused[:2], "died", *refused[2:]]


def test_b100_after_that_thread_has_died_all_jobs_go_through_the_broker(fleet):
    posts = fleet.decode.agent.thread._poster
    posts._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(posts._loop)])
    posts._thread.join(WAIT_S)
    attempt = posted(fleet)
    fleet.producers[0].engine.protocol.prefill.set_credits(1)
    assert fleet.producers[0].engine.expect(Prefill).attempt == attempt
    fleet.producers[0].engine.protocol.prefill.sent(attempt, m.Timings())
    fleet.decode.protocol.decode.arrived(attempt, 0)
    fleet.decode.expect(Prefilled)
    assert not fleet.proxy.posts
