# SPDX-License-Identifier: Apache-2.0
"""How an engine and its HTTP server are asked for events: the hooks, the file between the two, the answer."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from vllm.config import KVEventsConfig, ParallelConfig

from tests.fakes.simulated_engine import SimulatedEngine
from vllm_pd.errors import ConfigError
from vllm_pd.events import notice
from vllm_pd.frontend.routes import RoutesMiddleware, events_route
from vllm_pd.rpc.ports import is_free, take_free
from vllm_pd.v0 import events as binding
from vllm_pd.v0 import hooks


class FakeLLMEngine:
    """What `attach_events` looks at."""

    def __init__(self, events: KVEventsConfig | None, stages: int = 1, additional: dict | None = None) -> None:
        self.simulated = SimulatedEngine(wants_remote=lambda group: False, disagg=False)
        self.scheduler = [self.simulated.scheduler]
        self.model_config = SimpleNamespace(served_model_name="simulated")
        self.vllm_config = SimpleNamespace(
            kv_events_config=events, instance_id="abcde", additional_config=additional,
            parallel_config=ParallelConfig(pipeline_parallel_size=stages),
            cache_config=self.simulated.scheduler.cache_config)


def events_at(endpoint: str, **changes) -> KVEventsConfig:
    on = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
    return dataclasses.replace(on, **changes)


@pytest.fixture
def endpoint(monkeypatch, tmp_path) -> str:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    return f"tcp://*:{take_free('127.0.0.1')}"


@pytest.mark.parametrize("config", [None, KVEventsConfig(), KVEventsConfig(enable_kv_cache_events=True),
                                    KVEventsConfig(publisher="zmq")], ids=["none", "off", "null", "not enabled"])
def test_b50_without_events_nothing_is_attached(config, monkeypatch):
    """B50: the scheduler and the allocator have no sink, the server no route."""
    monkeypatch.setattr(binding, "attach_events", lambda engine: pytest.fail("attached"))
    engine = FakeLLMEngine(config)
    assert hooks.attach_engine(engine) is None
    assert engine.scheduler[0].event_sink is None
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=engine.vllm_config))
    assert hooks.attach_server(app, None, print) is print


def test_an_engine_leaves_word_of_itself_and_takes_it_back(endpoint, tmp_path):
    """The engine's socket is found by its front end, for as long as the engine lives."""
    engine = FakeLLMEngine(events_at(endpoint, topic="t"))
    config = engine.vllm_config
    assert notice.find(config).side is None
    hooks.attach_engine(engine)
    found = notice.find(config)
    assert found.events == endpoint and found.topic == "t" and found.block_size == 4
    assert found.side.startswith("tcp://127.0.0.1:") and len(found.epoch) == 32
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    del engine
    assert not list(tmp_path.iterdir()) and notice.find(config).side is None


def test_a_port_that_is_not_named_is_told_as_what_it_is(endpoint):
    engine = FakeLLMEngine(events_at("tcp://*:0", replay_endpoint="tcp://127.0.0.1:0"))
    assert (notice.find(engine.vllm_config).events, notice.find(engine.vllm_config).replay) == ("", None)
    hooks.attach_engine(engine)
    found = notice.find(engine.vllm_config)
    ports = [int(at.rpartition(":")[2]) for at in (found.events, found.replay)]
    assert found.events == f"tcp://*:{ports[0]}" and found.replay == f"tcp://127.0.0.1:{ports[1]}"
    assert len({0, *ports}) == 3 and not any(is_free("0.0.0.0", port) for port in ports)


def test_a_publisher_that_connects_is_warned_of_and_nobody_is_sent_to_it(endpoint, caplog, monkeypatch):
    """Upstream's listens at wildcards only. At the address that it connects to there may be another engine."""
    port = endpoint.rpartition(":")[2]
    engine = FakeLLMEngine(events_at(f"tcp://127.0.0.1:{port}"))
    monkeypatch.setattr(binding.logger, "propagate", True)
    hooks.attach_engine(engine)
    assert f"connects to tcp://127.0.0.1:{port}" in caplog.text and "tcp://*:PORT" in caplog.text
    found = notice.find(engine.vllm_config)
    assert found.events == "" and found.side
    listening = binding.zmq.Context.instance().socket(binding.zmq.PUB)
    listening.bind(endpoint)  # it is free
    listening.close(linger=0)


def test_b80_what_cannot_be_is_refused_by_name(endpoint):
    """Before the model is loaded; a port that is taken while it is loaded, after that."""
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        hooks.check_engine(FakeLLMEngine(events_at(endpoint), stages=2).vllm_config)
    taken, late = FakeLLMEngine(events_at(endpoint)), FakeLLMEngine(events_at(endpoint))
    hooks.check_engine(late.vllm_config)
    hooks.check_engine(taken.vllm_config)
    hooks.attach_engine(taken)
    for refuse in (lambda: hooks.check_engine(late.vllm_config), lambda: hooks.attach_engine(late)):
        with pytest.raises(ConfigError, match=f"kv_events_config.*{endpoint.rpartition(':')[2]}.*free endpoint"):
            refuse()
    with pytest.raises(ConfigError, match="nonesuch"):
        hooks.check_engine(FakeLLMEngine(events_at(endpoint, publisher="nonesuch")).vllm_config)


async def ask(middleware, path: str = "/pd/events", method: str = "GET", key: str | None = None) -> tuple[int, bytes]:
    sent: list[dict] = []

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    await middleware({"type": "http", "path": path, "method": method, "headers": headers}, None, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def test_the_server_says_where_to_whom_it_may(endpoint):
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})

    config = SimpleNamespace(kv_events_config=events_at(endpoint), instance_id="abcde",
                             cache_config=SimpleNamespace(block_size=16), parallel_config=ParallelConfig())
    middleware = RoutesMiddleware(app, [events_route(lambda: notice.find(config), ("secret", ))], notice.PATH)
    status, body = await ask(middleware, key="secret")
    assert status == 200
    assert json.loads(body) == {"events": endpoint, "block_size": 16, "replay": None, "topic": "", "side": None,
                                "epoch": None, "ranks": 1, "loads": []}
    config.parallel_config = ParallelConfig(data_parallel_size=4)
    assert json.loads((await ask(middleware, key="secret"))[1])["ranks"] == 4
    assert (await ask(middleware))[0] == (await ask(middleware, key="guess"))[0] == 401
    status, body = await ask(middleware, method="POST", key="secret")
    assert (status, json.loads(body)["message"]) == (405, "use GET or HEAD")
    assert (await ask(middleware, path="/pd/status"))[0] == 299
    assert (await ask(RoutesMiddleware(app, [events_route(lambda: notice.find(config), ())], notice.PATH)))[0] == 200


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"side": 5, "epoch": ""}', b"[" * 4000])
def test_b81_a_file_that_says_nothing_is_no_file(endpoint, tmp_path, content):
    config = FakeLLMEngine(events_at(endpoint)).vllm_config
    path = notice.leave(notice.path_of(config), notice.SideNotice("tcp://127.0.0.1:1", "e"))
    assert notice.find(config).side == "tcp://127.0.0.1:1"
    path.write_bytes(content)
    assert notice.find(config).side is None
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert notice.find(config).side is None
