# SPDX-License-Identifier: Apache-2.0
"""B43 at the server's port: the front end before an application of one slow route, and the agent behind it."""
import asyncio
import contextlib
import json
import os
import signal
import uuid
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_pd.errors import ControlError
from vllm_pd.frontend import connection
from vllm_pd.frontend.drain import ServerDrain
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0 import hooks

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
LOCAL = ((b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"))
HERE, AWAY = ("127.0.0.1", 5), ("10.0.0.5", 5)


class AuthenticationMiddleware:
    """Stands in for vLLM's middleware of --api-key, which engine V0 gives `api_token` and engine V1 `tokens`."""

    def __init__(self, app, **asks):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


class Server:
    """What uvicorn's has of all that matters here."""

    def __init__(self, host="127.0.0.1", port=8000):
        self.exits = []
        self.config = SimpleNamespace(host=host, port=port, is_ssl=False, http_protocol_class=HttpToolsProtocol)

    def handle_exit(self, number, frame):
        self.exits.append(number)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A control thread that stands still for some seconds is not silent."""
    monkeypatch.setattr(connection, "ANSWER_S", 60.0)


@contextlib.asynccontextmanager
async def serving(tmp_path, asks=None, host="127.0.0.1", **settings):
    """(ask, agent, on_sigterm, server, stops, release): an application with an agent behind it."""
    extra = {"broker": "tcp://127.0.0.1:1", **settings}
    address = f"ipc://{tmp_path}/{uuid.uuid4().hex}"
    agent = ControlAgent(PDConfig.parse("kv_both", extra), local_member(m.Role.BOTH, FINGERPRINT), b"", lambda: None,
                         front=address)
    agent.start()
    agent.protocol.set_load(m.Load())
    release, stops, server = asyncio.Event(), [], Server(host)

    async def completions(request):
        asked = await request.json() if await request.body() else {}
        if "max_tokens" not in asked:
            await release.wait()
        return JSONResponse({"text": "done", "asked": asked})

    async def health(request):
        return JSONResponse({})

    middleware = [Middleware(AuthenticationMiddleware, **asks)] if asks else []
    app = Starlette(routes=[Route("/v1/completions", completions, methods=["POST"]), Route("/health", health),
                            Route("/tokenize", health, methods=["POST"])], middleware=middleware)
    additional = {hooks.SETTINGS_KEY: {"kv_role": "kv_both", "extra": extra, "front": address}}
    app.state.vllm_config = SimpleNamespace(additional_config=additional, kv_events_config=None)
    on_sigterm = hooks.attach_server(app, server, lambda: stops.append(1))

    async def ask(method, path, body=b"", client=HERE, headers=LOCAL):
        sent = []

        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            sent.append(message)

        await app({"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
                   "headers": list(headers), "client": client, "server": HERE, "scheme": "http", "root_path": ""},
                  receive, send)
        answer = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], json.loads(answer or b"{}"), dict(sent[0]["headers"])

    try:
        yield SimpleNamespace(app=app, ask=ask, agent=agent, on_sigterm=on_sigterm, server=server, stops=stops,
                              release=release, drain=on_sigterm.__self__)
    finally:
        on_sigterm.__self__.close()
        agent.close()
        agent.end_lifeline()


def run(body, *arguments, **options):
    async def main():
        async with serving(*arguments, **options) as served:
            await asyncio.wait_for(body(served), 100)
    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_b66_only_a_server_with_disaggregation_gets_limits_for_headers(tmp_path):
    async def body(served):
        assert served.server.config.http_protocol_class is not HttpToolsProtocol

    run(body, tmp_path)
    plain, app = Server(), Starlette()
    app.state.vllm_config = SimpleNamespace(additional_config=None, kv_events_config=None)
    hooks.attach_server(app, plain, lambda: None)
    assert plain.config.http_protocol_class is HttpToolsProtocol


def test_b43_orders_to_a_silent_control_thread_end_together_and_hold_up_no_drain(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 0.5)

    async def body():
        address = f"ipc://{tmp_path}/silent"
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as silent:
            silent.bind(address)
            engine = connection.EngineConnection(address, lambda status: None)
            try:
                asked = [asyncio.create_task(engine.ask(message, lambda status: True))
                         for message in (*[m.Status()] * 100, m.Drain())]
                ended = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
                assert {type(one) for one in ended} == {ControlError}
                came = [codec.decode((await silent.recv_multipart())[1:])[1] for _ in range(2)]
                assert came == [m.Status(), m.Drain()] and not engine._waiting
            finally:
                engine.close()

    asyncio.run(body())


def test_b119_a_server_says_where_the_prompt_of_a_request_was_prefilled(tmp_path):
    async def body(served):
        session, timings = served.agent.protocol.decode, m.Timings(1.0, bytes=5, measured=True)
        session.prompt_decided("cmpl-abc-0", False, asked="remote", decision="remote", reason="asked", tokens=7)
        session.note_prompt("cmpl-abc-0", peer="p", outcome="done", timings=timings)
        shown = [(await served.ask("GET", f"/pd/prompts/{name}"))[:2] for name in
                 ("abc", "cmpl-abc-0", "other", "x" * 5000, "a%2Fb", "")]
        assert [status for status, _ in shown] == [200, 200, 404, 404, 404, 404]
        assert shown[0] == shown[1] and shown[0][1] == {
            "request_id": "cmpl-abc-0", "asked": "remote", "decision": "remote", "reason": "asked", "tokens": 7,
            "peer": "p", "outcome": "done", "attempts": 0, "cached_tokens": 0, "address": "", "detail": "",
            "parked_s": None, "first_step_s": None, "age_s": None, "timings": {
                "queue_s": 1.0, "claim_s": 0.0, "prefill_s": 0.0, "transfer_s": 0.0, "bytes": 5, "measured": True,
                "last_bytes": 0}}
        assert (await served.ask("POST", "/pd/prompts/abc"))[0] == 405

    run(body, tmp_path)


def test_a_server_says_of_its_last_prompts_to_operators_only(tmp_path):
    """The names of other clients' requests are nobody else's business."""
    async def body(served):
        session = served.agent.protocol.decode
        for number in range(300):
            session.prompt_decided(f"cmpl-r{number}-0", False, decision="local", reason="threshold", tokens=number)
        status, answer, *_ = await served.ask("GET", "/pd/prompts")
        (rank, ) = answer["ranks"]
        assert status == 200 and rank["incarnation"] == served.agent.member.incarnation
        assert [one["tokens"] for one in rank["prompts"]] == list(range(300 - 256, 300))
        assert all(0 <= one["age_s"] < 60 for one in rank["prompts"])
        assert rank["prompts"][0]["age_s"] >= rank["prompts"][-1]["age_s"]
        for more in ((b"origin", b"http://a.example"), (b"x-forwarded-for", b"10.0.0.9")):
            assert (await served.ask("GET", "/pd/prompts", headers=(*LOCAL, more)))[0] == 403
        assert (await served.ask("GET", "/pd/prompts", client=AWAY))[0] == 403

    run(body, tmp_path)


def test_b119_each_of_several_questions_about_requests_gets_its_own_answer(tmp_path):
    """Statuses also come unasked, and to others' questions."""
    async def body(agents, drains, stops):
        for number, agent in enumerate(agents):
            agent.protocol.decode.prompt_decided(f"cmpl-r{number}-0", False, decision="remote")

        async def find(drain, name):
            answers = await drain.ask(m.Status(prompt=name), lambda status: status.prompt is not None
                                      and status.prompt.is_of(name))
            return [(status.prompt.request_id, status.prompt.decision) for status in answers]

        found = await asyncio.gather(*(find(drain, name) for drain in drains for name in ("r0", "r1", "r2")))
        assert found == 2 * [[("cmpl-r0-0", "remote"), ("r0", "")], [("r1", ""), ("cmpl-r1-0", "remote")],
                             [("r2", ""), ("r2", "")]]

    run_several(body, tmp_path)


def test_b43_a_drain_beside_an_order_that_is_refused_is_no_refused_drain(tmp_path):
    async def body(served):
        served.agent.protocol.state.weights_replaced()
        (refused, ), (drained, ) = await asyncio.gather(
            served.drain.ask(m.SetRole(m.Role.PREFILL), lambda status: False), served.drain.begin())
        assert "were replaced" in refused.problem and drained.member.draining and not drained.problem

    run(body, tmp_path)


def test_b43_sigterm_refuses_new_requests_and_waits_for_the_open_one(tmp_path):
    async def body(served):
        served.server.handle_exit(signal.SIGTERM, None)
        assert served.server.exits == [], "the server goes on accepting"
        served.agent.protocol.set_load(m.Load(running=1))
        asked = asyncio.create_task(served.ask("POST", "/v1/completions"))
        await until(lambda: served.drain.open_requests)
        served.on_sigterm()
        await until(lambda: served.drain.draining)
        status, said, headers = await served.ask("POST", "/v1/completions")
        assert (status, headers[b"retry-after"]) == (503, b"5") and "drained" in said["message"]
        assert (await served.ask("GET", "/health"))[0] == (await served.ask("POST", "/tokenize"))[0] == 200
        status, said, _ = await served.ask("GET", "/pd/status")
        assert (status, said["draining"], said["drained"], said["open_requests"]) == (200, True, False, 1)
        served.agent.protocol.set_load(m.Load())
        await until(lambda: served.agent.protocol.state.left)
        await asyncio.sleep(0.1)
        assert served.stops == [], "a client still reads"
        served.release.set()
        assert (await asked)[0] == 200
        await until(lambda: served.stops)
        assert served.server.exits == [signal.SIGTERM]

    run(body, tmp_path)


def test_b43_the_second_sigterm_and_the_timeout_end_it(tmp_path):
    async def impatient(served):
        served.agent.protocol.set_load(m.Load(running=1))
        served.on_sigterm()
        await asyncio.sleep(0.1)
        assert served.stops == []
        served.on_sigterm()
        assert served.stops == [1]

    async def late(served):
        served.agent.protocol.set_load(m.Load(running=1))
        served.on_sigterm()
        await until(lambda: served.stops)

    run(impatient, tmp_path)
    run(late, tmp_path, drain_timeout_s=0.3)


def test_b43_what_a_stopped_server_leaves_open_is_cut_off(tmp_path, monkeypatch):
    async def body(served):
        monkeypatch.setattr(served.drain, "_cut_s", 0.2)
        asked = asyncio.create_task(served.ask("POST", "/v1/completions"))
        await until(lambda: served.drain.open_requests)
        served.on_sigterm()
        await until(asked.done)
        assert served.stops and asked.cancelled() and not served.drain.open_requests

    run(body, tmp_path, drain_timeout_s=0.3)


def test_b43_an_engine_that_does_not_answer_ends_all_the_same(tmp_path):
    async def body(served):
        served.agent.close()
        served.on_sigterm()
        await until(lambda: served.stops)

    run(body, tmp_path, drain_timeout_s=0.3)


def test_b43_a_silent_control_thread_cuts_no_open_request(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)

    async def body(served):
        asked = asyncio.create_task(served.ask("POST", "/v1/completions"))
        await until(lambda: served.drain.open_requests)
        served.agent.close()
        served.on_sigterm()
        await asyncio.sleep(1.0)
        assert served.stops == [], "a client still reads, and the engine serves on"
        assert (await served.ask("POST", "/v1/completions"))[0] == 503
        served.release.set()
        assert (await asked)[0] == 200
        await until(lambda: served.stops)

    run(body, tmp_path)


def test_b43_an_operators_drain_that_nobody_answers_refuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 0.2)

    async def body(served):
        served.agent.close()
        served.release.set()
        answers = await asyncio.gather(*(served.ask("POST", "/pd/drain") for _ in range(2)))
        assert [status for status, *_ in answers] == [504, 504]
        assert (await served.ask("POST", "/v1/completions"))[0] == 200

    run(body, tmp_path)


def test_b82_the_front_socket_is_this_users_alone(tmp_path):
    async def body(served):
        (file,) = [path for path in tmp_path.iterdir() if path.is_socket()]
        assert file.stat().st_mode & 0o777 == 0o600

    before = os.umask(0)
    try:
        run(body, tmp_path)
    finally:
        os.umask(before)


def test_b82_an_address_that_a_header_may_have_made_up_is_not_believed(tmp_path):
    async def body(served):
        for name in (b"x-forwarded-for", b"forwarded", b"via", b"x-real-ip"):
            for path in ("drain", "role"):
                assert (await served.ask("POST", f"/pd/{path}", headers=[(name, b"127.0.0.1")]))[0] == 403
        assert (await served.ask("GET", "/pd/status", headers=[(b"forwarded", b"for=127.0.0.1")]))[0] == 200

    run(body, tmp_path)


def test_b43_what_an_operator_asks_elsewhere_is_seen_here(tmp_path):
    async def body(served):
        await until(lambda: served.agent.thread.sockets.front_routes)
        served.agent.protocol.operators.drain()
        served.agent.protocol.set_load(m.Load())
        while (await served.ask("GET", "/pd/status"))[1].get("drained") is not True:
            await asyncio.sleep(0.01)
        assert (await served.ask("POST", "/v1/completions"))[0] == 503
        served.on_sigterm()
        await until(lambda: served.stops)

    run(body, tmp_path)


@contextlib.asynccontextmanager
async def several(tmp_path, ranks=2, processes=2):
    """(agents, drains, stops): the server of so many data-parallel ranks, in so many processes."""
    config = PDConfig.parse("kv_both", {"broker": "tcp://127.0.0.1:1"})
    addresses = [f"ipc://{tmp_path}/{uuid.uuid4().hex}" for _ in range(ranks)]
    agents = [ControlAgent(config, local_member(m.Role.BOTH, FINGERPRINT), b"", lambda: None, front=address)
              for address in addresses]
    stops = []
    for agent in agents:
        agent.start()
        agent.protocol.set_load(m.Load())
    drains = [ServerDrain(addresses, 60.0, lambda number=number: stops.append(number), "http://127.0.0.1:8000")
              for number in range(processes)]
    await until(lambda: all(len(agent.thread.sockets.front_routes) == processes for agent in agents))
    try:
        yield agents, drains, stops
    finally:
        for one in (*drains, *agents):
            one.close()
        for agent in agents:
            agent.end_lifeline()


def run_several(body, tmp_path):
    async def main():
        async with several(tmp_path) as served:
            await asyncio.wait_for(body(*served), 100)
    asyncio.run(main())


@pytest.mark.parametrize("begin", ["sigterm", "http", "engine"])
def test_b43_all_ranks_behind_one_server_drain_together(tmp_path, begin):
    async def body(agents, drains, stops):
        answers = await drains[0].ask(m.Status(), lambda status: True)
        assert [status.member.http for status in answers] == ["http://127.0.0.1:8000", ""], "a router sees one worker"
        agents[1].protocol.set_load(m.Load(running=1))
        if begin == "sigterm":
            drains[1].on_sigterm()
        elif begin == "http":
            assert [status.member.draining for status in await drains[0].begin()] == [True, True]
        else:
            agents[1].protocol.operators.drain()
        await until(lambda: all(agent.protocol.state.draining for agent in agents))
        await until(lambda: all(drain.draining for drain in drains))
        agents[0].protocol.set_load(m.Load())
        await until(lambda: agents[0].protocol.state.left)
        assert stops == [] and not any(drain.drained for drain in drains), "the second rank has a request"
        agents[1].protocol.set_load(m.Load())
        await until(lambda: all(drain.drained for drain in drains))
        await until(lambda: stops == ([1] if begin == "sigterm" else []))

    run_several(body, tmp_path)


def test_b43_each_process_of_a_server_gets_its_own_answers(tmp_path):
    async def body(agents, drains, stops):
        names = [agent.protocol.member.incarnation for agent in agents]
        for role in (m.Role.PREFILL, m.Role.DECODE, m.Role.BOTH):
            changed, seen = await asyncio.gather(
                drains[0].ask(m.SetRole(role), lambda status, role=role: status.member.role is role),
                drains[1].ask(m.Status(), lambda status: True))
            for answers in (changed, seen):
                assert [status.member.incarnation for status in answers] == names
                assert not any(status.problem for status in answers)

    run_several(body, tmp_path)


def test_b43_requests_of_an_operator(tmp_path):
    async def body(served):
        for path, body, status, word in (("role", b'{"role": "kv_consumer"}', 200, None),
                                         ("role", b'{"role": "decode"}', 400, "kv_producer"),
                                         ("role", b"", 400, "kv_producer"),
                                         ("role", b'{"role": "\xff"}', 400, "kv_producer"),
                                         ("role", b"x" * 5000, 400, "more than"),
                                         ("nothing", b"", 404, "/pd/nothing")):
            got, said, _ = await served.ask("POST", f"/pd/{path}", body)
            assert got == status and (word is None or word in said["message"])
        assert (await served.ask("GET", "/pd/drain"))[0] == 405
        assert (await served.ask("GET", "/pd/status"))[1]["role"] == "kv_consumer"
        assert (await served.ask("POST", "/pd/drain", client=AWAY))[0] == 403
        assert (await served.ask("POST", "/pd/role", b'{"role": "kv_both"}', client=None))[0] == 403
        assert (await served.ask("GET", "/pd/status", client=AWAY))[1]["draining"] is False
        assert (await served.ask("POST", "/pd/drain"))[0] == 200

    run(body, tmp_path)


def test_b42_the_status_says_why_an_engine_is_degraded(tmp_path):
    async def body(served):
        said = (await served.ask("GET", "/pd/status"))[1]["degraded"]
        assert said == "broker: the broker tcp://127.0.0.1:1 does not answer"
        assert (await served.ask("POST", "/pd/drain"))[1]["degraded"] is None

    run(body, tmp_path)


HOST, JSON = LOCAL
OPERATORS = [[HOST, JSON], [(b"host", b"localhost"), JSON], [(b"host", b"[::1]:8000"), JSON],
             [HOST, (b"content-type", b"Application/JSON; charset=utf-8")]]
OTHERS = [[HOST, JSON, (b"origin", b"http://evil.example")], [HOST, JSON, (b"origin", b"null")], [HOST], [JSON],
          [HOST, (b"content-type", b"text/plain")], [(b"host", b"evil.example:8000"), JSON],
          [(b"host", b"127.0.0.1.evil.example"), JSON], [(b"host", b"10.0.0.5:8000"), JSON],
          [HOST, JSON, (b"x-forwarded-for", b"127.0.0.1")], [HOST, JSON, (b"forwarded", b"for=127.0.0.1")]]


def test_b82_without_a_key_no_web_page_drains_an_engine(tmp_path):
    async def body(served):
        role = b'{"role": "kv_consumer"}'
        for headers in OTHERS:
            for name in ("drain", "role"):
                status, said, _ = await served.ask("POST", f"/pd/{name}", role, headers=headers)
                assert status == 403 and "--api-key" in said["message"], headers
        assert (await served.ask("GET", "/pd/status"))[1]["role"] == "kv_both"
        for headers in OPERATORS:
            assert (await served.ask("POST", "/pd/role", role, headers=headers))[0] == 200
        assert (await served.ask("GET", "/pd/status"))[1]["draining"] is False
        assert (await served.ask("POST", "/pd/drain"))[0] == 200

    run(body, tmp_path)


@pytest.mark.parametrize("asks", [{"api_token": "secret"}, {"tokens": ["another", "secret"]}])
def test_b82_the_api_key_is_asked_for(tmp_path, asks):
    async def body(served):
        for path, method in (("status", "GET"), ("drain", "POST"), ("role", "POST")):
            for given in ((), [(b"authorization", b"Bearer wrong")]):
                assert (await served.ask(method, f"/pd/{path}", headers=given))[0] == 401
        key = [(b"authorization", b"Bearer secret")]
        assert (await served.ask("GET", "/pd/status", client=AWAY, headers=key))[1]["draining"] is False
        assert (await served.ask("POST", "/pd/drain", client=AWAY, headers=key))[0] == 200

    run(body, tmp_path, asks=asks)


@pytest.mark.parametrize("asks", [{"secrets": ["secret"]}, {"tokens": [b"secret"]}, {"tokens": []}, {"api_token": 5}])
def test_b82_where_the_api_key_can_not_be_found_everybody_is_refused(tmp_path, asks, caplog):
    async def body(served):
        for headers in ([], [(b"authorization", b"Bearer secret")], [(b"authorization", b"Bearer ")], LOCAL):
            assert (await served.ask("GET", "/pd/status", headers=headers))[0] == 401
            assert (await served.ask("POST", "/pd/drain", headers=headers))[0] == 401
        (line, ) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert "AuthenticationMiddleware" in line and next(iter(asks)) in line

    run(body, tmp_path, asks=asks)


@pytest.mark.parametrize("additional", [None, {}, {"another": 1}])
def test_b50_a_server_without_disaggregation_keeps_its_handler(additional):
    def stop():
        raise AssertionError

    app = Starlette()
    assert hooks.attach_server(app, Server(), stop) is stop
    app.state.vllm_config = SimpleNamespace(additional_config=additional, kv_events_config=None)
    assert hooks.attach_server(app, Server(), stop) is stop
    assert app.user_middleware == []


def test_b63_health_generate_goes_a_completions_way(tmp_path):
    async def body(served):
        status, said, _ = await served.ask("GET", "/health_generate", headers=[(b"accept", b"*/*")])
        assert (status, said["text"], said["asked"]["max_tokens"]) == (200, "done", 1)
        assert said["asked"]["kv_transfer_params"] == {"pd": "local"}, "it is this engine that is asked about"
        assert served.drain.open_requests == 0
        served.agent.protocol.set_load(m.Load(running=1))
        served.on_sigterm()
        await until(lambda: served.agent.protocol.state.draining)
        assert (await served.ask("GET", "/health_generate"))[0] == 503

    run(body, tmp_path)


def test_b63_health_generate_wants_the_servers_key(tmp_path):
    async def body(served):
        assert (await served.ask("GET", "/health_generate"))[0] == 401
        keyed = await served.ask("GET", "/health_generate", headers=[(b"authorization", b"Bearer secret")])
        assert keyed[0] == 200

    run(body, tmp_path, asks={"api_token": "secret"})


@pytest.mark.parametrize("host, url", [("127.0.0.1", "http://127.0.0.1:8000"), (None, "http://127.0.0.1:8000"),
                                       ("0.0.0.0", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")])
def test_the_registry_hears_where_the_server_is(tmp_path, host, url):
    async def body(served):
        await until(lambda: served.agent.protocol.state.member().http == url)

    run(body, tmp_path, host=host)
