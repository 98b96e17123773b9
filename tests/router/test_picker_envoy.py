# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker behind a real Envoy, with the configurations of docs/picker.md. Where Envoy can't be installed
the tests are skipped, and in CI they fail."""
import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

if not os.environ.get("CI"):
    pytest.importorskip("grpc_health", reason="the packages of the extra `picker` are not installed")

from _behind.gateways import FOLDER_VARIABLE
from _picker.engine import CachingEngine
from _picker.envoy import HEADER, EnvoyBodyMode, picker_envoy_config, start_envoy_command
from _picker.replay import ReplaySettings
from bench_picker import compare

from tests.fakes import certificates
from vllm_pd.bench.simulation.trace import TraceConfig, make
from vllm_pd.picker import server as server_module
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.server import PickerServer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.ports import is_free, take_free

pytestmark = pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE) and not os.environ.get("CI"),
                                reason="no gateways are installed")
ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16
QUICK = {"probe_interval_s": 0.3, "probe_timeout_s": 2.0, "probe_backoff_s": (0.05, 0.2), "connect_timeout_s": 0.5,
         "tokenizer": "none", "metrics_port": 0}
MODES = list(EnvoyBodyMode)
WITHIN_S = 60.0


@dataclass
class BehindEnvoy:
    """A client of Envoy, before a picker in this loop and engines with a cache."""
    server: PickerServer
    engines: list[CachingEngine]
    envoy: subprocess.Popen
    session: aiohttp.ClientSession
    url: str

    def request(self, prompt: list[int] | None = None, headers: dict[str, str] | None = None, **body: object):
        asked = {"model": "cached", "prompt": prompt or [1, 2, 3], **body}
        return self.session.post(f"{self.url}/v1/completions", json=asked, headers=headers)

    async def ask(self, prompt: list[int] | None = None, headers: dict[str, str] | None = None,
                  **body: object) -> tuple[int, str]:
        """(status, which engine has answered)"""
        async with self.request(prompt, headers, **body) as response:
            await response.read()
            return response.status, response.headers.get("x-upstream", "")

    def worker(self, engine: CachingEngine):
        return self.server.workers.get(engine.url)

    def open(self) -> list[int]:
        return [len(self.worker(engine).in_flight) for engine in self.engines]

    async def until(self, condition, within_s: float = WITHIN_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def index_is_current(self) -> None:
        """The index has what the engines have published."""
        await self.until(lambda: all(self.server.judgement.subscriptions.progress_of(one.url).batches >= one.batches
                                     for one in self.engines))


def at(engine: CachingEngine) -> str:
    return f"127.0.0.1:{engine.port}"


@contextlib.asynccontextmanager
async def running_envoy(config: dict, folder, port: int) -> AsyncIterator[subprocess.Popen]:
    envoy = subprocess.Popen(start_envoy_command(config, folder))
    try:
        async with asyncio.timeout(WITHIN_S):
            while is_free("127.0.0.1", port):
                assert envoy.poll() is None, "Envoy has ended"
                await asyncio.sleep(0.05)
        yield envoy
    finally:
        envoy.kill()
        envoy.wait()


@contextlib.asynccontextmanager
async def behind_envoy(folder, count: int = 3, mode: EnvoyBodyMode = EnvoyBodyMode.DUPLEX, policy: Policy = Policy.KV,
                       known: bool = False, tls: dict | None = None, response_mode: str = "NONE", subset: int = 0,
                       ping: str | None = None, admin: int = 0, trailers: str | None = None,
                       buffer_bytes: int | None = None, **options) -> AsyncIterator[BehindEnvoy]:
    """`known`: Envoy knows the engines itself. `subset`: Envoy allows only the first so many. `trailers`: another
    request_trailer_mode than the page's. `buffer_bytes`: Envoy's buffer."""
    engines = [CachingEngine(BLOCK, 1000) for _ in range(count)]
    for engine in engines:
        await engine.start()
    port, picker = take_free("127.0.0.1"), take_free("127.0.0.1")
    settings = {**QUICK, "port": picker, "workers": tuple(engine.url for engine in engines), **options}
    server = PickerServer(PickerOptions(**settings), RoutingPolicyConfig(policy=policy))
    await server.start()
    config = picker_envoy_config(port, picker, mode, engines=[one.port for one in engines] if known else (), tls=tls,
                                 response_mode=response_mode, subset=[at(one) for one in engines[:subset]] or None)
    if ping is not None:
        [protocol] = config["static_resources"]["clusters"][0]["typed_extension_protocol_options"].values()
        http2 = protocol["explicit_http_config"]["http2_protocol_options"]
        http2["connection_keepalive"] = {"interval": ping, "timeout": "1s"}
    [listener] = config["static_resources"]["listeners"]
    if buffer_bytes is not None:
        listener["per_connection_buffer_limit_bytes"] = buffer_bytes
    if trailers is not None:
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][0]["typed_config"]["processing_mode"]["request_trailer_mode"] = trailers
    if admin:
        config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}}
    try:
        async with running_envoy(config, folder, port) as envoy, aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(WITHIN_S)) as session:
            behind = BehindEnvoy(server, engines, envoy, session, f"http://127.0.0.1:{port}")
            await behind.until(lambda: all(one.state is WorkerState.UP for one in server.workers))
            if policy is Policy.KV:
                await behind.until(lambda: all(
                    (one["events"] or {}).get("state") == "live" for one in server.judgement.workers_json()))
            yield behind
            await behind.until(lambda: not any(behind.open()) and not server._open)
            assert server._bodies.held_bytes == 0
    finally:
        await server.close()
        for engine in engines:
            await engine.close()


@pytest.mark.parametrize("mode", MODES)
async def test_prompts_go_where_their_prefix_is(tmp_path, mode):
    """By real KV events, over the seconds in which a block that was just sent counts without one."""
    async with behind_envoy(tmp_path, mode=mode, expected_s=0.01) as behind:
        prefixes = [list(range(start, start + 20 * BLOCK)) for start in range(0, 6000, 1000)]
        first = {}
        for number, prefix in enumerate(prefixes):
            status, first[number] = await behind.ask(prefix)
            assert status == 200
        await behind.index_is_current()
        assert {*first.values()} <= {at(engine) for engine in behind.engines}
        before = sum(engine.hit_blocks for engine in behind.engines)
        for turn in range(3):
            for number, prefix in enumerate(prefixes):
                assert await behind.ask(prefix + [9000 + turn] * BLOCK) == (200, first[number])
        assert sum(engine.hit_blocks for engine in behind.engines) - before == 3 * 6 * 20


@pytest.mark.parametrize("mode, response_mode", [(mode, "NONE") for mode in MODES]
                         + [(EnvoyBodyMode.DUPLEX, "FULL_DUPLEX_STREAMED"), (EnvoyBodyMode.DUPLEX, "STREAMED")])
async def test_a_stream_passes_as_it_comes_and_counts_until_its_end(tmp_path, mode, response_mode):
    async with behind_envoy(tmp_path, 2, mode, response_mode=response_mode) as behind:
        for engine in behind.engines:
            engine.token_s = 0.3
        async with behind.request(stream=True, max_tokens=5) as response:
            events = []
            async for line in response.content:
                if line.strip():
                    events.append((line.strip().decode(), sum(behind.open())))
        assert [text for text, _ in events[:-1]] == [
            "data: " + json.dumps({"choices": [{"index": 0, "text": f" t{number}"}]}) for number in range(5)]
        assert events[-1][0] == "data: [DONE]"
        assert [count for _, count in events[:-1]] == [1] * 5, "it is open there from the first event to the last"
        await behind.until(lambda: sum(behind.open()) == 0)


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_that_leaves_takes_its_load_with_it(tmp_path, mode):
    async with behind_envoy(tmp_path, 2, mode) as behind:
        for engine in behind.engines:
            engine.token_s = 0.05
        response = await behind.request(stream=True, max_tokens=2000)
        await response.content.readline()
        assert sum(behind.open()) == 1
        response.close()
        await behind.until(lambda: sum(behind.open()) == 0)
        await behind.until(lambda: sum(engine.cancelled for engine in behind.engines) == 1)


async def test_when_envoy_is_killed_its_requests_are_not_open_any_more(tmp_path):
    async with behind_envoy(tmp_path, 1) as behind:
        behind.engines[0].token_s = 0.05
        responses = [await behind.request(stream=True, max_tokens=2000) for _ in range(3)]
        await behind.until(lambda: behind.open() == [3])
        behind.envoy.send_signal(signal.SIGKILL)
        await behind.until(lambda: behind.open() == [0])
        for response in responses:
            response.close()


async def test_an_envoy_that_stops_without_a_word_has_no_open_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "KEEPALIVE_S", 1.0)
    monkeypatch.setattr(server_module, "KEEPALIVE_TIMEOUT_S", 1.0)
    async with behind_envoy(tmp_path, 1) as behind:
        behind.engines[0].token_s = 1.0
        response = await behind.request(stream=True, max_tokens=300)
        await response.content.readline()
        assert behind.open() == [1]
        behind.envoy.send_signal(signal.SIGSTOP)
        await behind.until(lambda: behind.open() == [0])
        response.close()


@pytest.mark.slow
async def test_an_idle_envoy_may_look_whether_the_picker_lives(tmp_path):
    """Its pings must not end the connection (GOAWAY), which would show as failed requests now and then."""
    admin = take_free("127.0.0.1")
    async with behind_envoy(tmp_path, 1, ping="1.2s", admin=admin) as behind:
        assert (await behind.ask())[0] == 200
        await asyncio.sleep(9)
        assert (await behind.ask())[0] == 200
        async with behind.session.get(f"http://127.0.0.1:{admin}/stats?filter=cluster.picker.upstream_cx_(total|destr)"
                                      ) as response:
            stats = await response.text()
        assert "upstream_cx_total: 1\n" in stats and "upstream_cx_destroy: 0\n" in stats, stats


@pytest.mark.parametrize("mode", MODES)
async def test_a_client_names_no_engine(tmp_path, mode):
    async with behind_envoy(tmp_path, 2, mode, Policy.ROUND_ROBIN) as behind:
        stranger = CachingEngine(BLOCK, 10)
        await stranger.start()
        try:
            for named in (at(stranger), "169.254.169.254:80", "x", ""):
                found = [await behind.ask(headers={HEADER: named}) for _ in range(4)]
                assert sorted(found) == sorted(2 * [(200, at(engine)) for engine in behind.engines])
            assert stranger.requests == 0
        finally:
            await stranger.close()


def http2(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def fields(**given: str) -> bytes:
    """A block of header fields, none of them compressed."""
    return b"".join(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
                    for name, value in given.items())


@pytest.mark.parametrize("mode, trailers", [(mode, None) for mode in MODES] + [(EnvoyBodyMode.BUFFERED, "SKIP")])
@pytest.mark.parametrize("empty_data", [False, True])
async def test_a_client_names_no_engine_by_trailers_without_a_body(tmp_path, mode, trailers, empty_data):
    """By HTTP/2 as no usual client speaks it: a head that does not end the stream, then trailers that do."""
    async with behind_envoy(tmp_path, 1, mode, Policy.ROUND_ROBIN, trailers=trailers) as behind:
        asked = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.read(4000))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret")
            await writer.drain()

        stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
        named = f"127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(behind.url.rpartition(":")[2]))
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2(4, 0, 0) + http2(1, 4, 1, fields(**{
                ":method": "POST", ":scheme": "http", ":path": "/v1/completions", ":authority": "x", HEADER: named}))
                + (http2(0, 0, 1) if empty_data else b"") + http2(1, 5, 1, fields(**{"x-sum": "1"})))
            await writer.drain()
            async with asyncio.timeout(WITHIN_S):
                while True:  # until its answer has begun
                    size, kind = int.from_bytes(await reader.readexactly(3)), (await reader.readexactly(1))[0]
                    await reader.readexactly(5 + size)
                    if kind in (1, 3):
                        break
            assert not asked
            assert (await behind.ask())[0] == 200
        finally:
            writer.close()
            stranger.close()


async def test_what_envoy_refuses_itself_the_client_reads(tmp_path):
    """413, where the body exceeds its buffer, comes by the picker before a pick."""
    async with behind_envoy(tmp_path, 1, EnvoyBodyMode.BUFFERED, buffer_bytes=65536) as behind:
        async with behind.request(list(range(100_000, 200_000))) as response:
            assert response.status == 413 and await response.read()
        assert behind.server.metrics.registry.get_sample_value(
            "vllm:pd_router_refused_total", {"reason": "gateway"}) == 1
        assert (await behind.ask())[0] == 200


@pytest.mark.parametrize("mode", MODES)
async def test_a_large_prompt_arrives_whole(tmp_path, mode):
    async with behind_envoy(tmp_path, 1, mode) as behind:
        prompt = list(range(100_000, 700_000))  # 4.8 MB
        assert (await behind.ask(prompt))[0] == 200
        assert behind.engines[0].prompt_blocks == len(prompt) // BLOCK
        async with behind.session.get(f"{behind.url}/v1/models") as response:
            assert response.status == 200 and (await response.json())["data"][0]["id"] == "cached"


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_picker_refuses_the_client_reads(tmp_path, mode):
    async with behind_envoy(tmp_path, 1, mode, max_body_bytes=10_000) as behind:
        async with behind.session.post(f"{behind.url}/pd/drain", data=b"{}") as response:
            assert response.status == 404 and (await response.json())["error"]["code"] == 404
        async with behind.request([1] * 20_000) as response:
            assert response.status == 413 and "10000 bytes" in (await response.json())["error"]["message"]
        await behind.engines[0].stop()
        await behind.until(lambda: behind.worker(behind.engines[0]).state is WorkerState.DOWN)
        async with behind.request() as response:
            assert response.status == 503 and response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["message"] == "no worker is up: try again later"
        assert behind.engines[0].requests == 0


async def test_a_dead_engine_gets_nothing_until_it_is_back(tmp_path):
    async with behind_envoy(tmp_path, 3, policy=Policy.ROUND_ROBIN) as behind:
        dead, *others = behind.engines
        await dead.stop()
        await behind.until(lambda: behind.worker(dead).state is WorkerState.DOWN)
        found = [await behind.ask() for _ in range(6)]
        assert sorted(found) == sorted(3 * [(200, at(engine)) for engine in others])
        await dead.start()
        await behind.until(lambda: behind.worker(dead).state is WorkerState.UP)
        assert (200, at(dead)) in [await behind.ask() for _ in range(3)]


async def test_a_failed_request_has_its_engine_probed(tmp_path):
    """Between two probes an engine dies: the first request that meets it fails, and shows it."""
    async with behind_envoy(tmp_path, 2, policy=Policy.ROUND_ROBIN, probe_interval_s=100.0) as behind:
        await behind.engines[0].stop()
        found = [(await behind.ask())[0] for _ in range(3)]
        assert 503 in found, "Envoy has no connection for one"
        await behind.until(lambda: behind.worker(behind.engines[0]).state is WorkerState.DOWN)
        assert [(await behind.ask())[0] for _ in range(4)] == [200] * 4


async def test_an_envoy_that_knows_the_engines_goes_on_to_the_next(tmp_path):
    """The address is in metadata. Where the first one can't be reached, the request is counted where it went."""
    async with behind_envoy(tmp_path, 3, policy=Policy.ROUND_ROBIN, known=True, fallbacks=2,
                            probe_interval_s=100.0) as behind:
        found = [await behind.ask() for _ in range(3)]
        assert sorted(found) == sorted((200, at(engine)) for engine in behind.engines)
        dead = behind.engines[0]
        await dead.stop()
        found = [await behind.ask() for _ in range(3)]
        assert [status for status, _ in found] == [200] * 3 and at(dead) not in {where for _, where in found}
        passed_over = behind.server.metrics.registry.get_sample_value(
            "vllm:pd_router_tries_total", {"worker": dead.url, "outcome": "passed_over"})
        assert passed_over == 1, "Envoy says who has served"
        await behind.until(lambda: behind.worker(dead).state is WorkerState.DOWN)


async def test_a_subset_is_kept(tmp_path):
    async with behind_envoy(tmp_path, 3, policy=Policy.ROUND_ROBIN, subset=1) as behind:
        assert [await behind.ask() for _ in range(4)] == [(200, at(behind.engines[0]))] * 4
        await behind.engines[0].stop()
        await behind.until(lambda: behind.worker(behind.engines[0]).state is WorkerState.DOWN)
        assert (await behind.ask())[0] == 503


async def test_envoy_checks_the_pickers_certificate(tmp_path):
    for name, text in (("cert", certificates.CERTIFICATE), ("key", certificates.KEY), ("other", certificates.OTHER)):
        (tmp_path / name).write_text(text)
    files = {"tls_cert": str(tmp_path / "cert"), "tls_key": str(tmp_path / "key")}
    for trusted, status in (("cert", 200), ("other", 500)):
        tls = {"trusted_ca": {"filename": str(tmp_path / trusted)}}
        async with behind_envoy(tmp_path, 1, tls=tls, **files) as behind:
            assert (await behind.ask())[0] == status


@pytest.mark.parametrize("mode", MODES)
async def test_while_the_picker_is_dead_nothing_passes_and_then_all_does(tmp_path, mode):
    """A process that is killed: clients get 500, and none of their requests goes anywhere, whatever they name."""
    engine = CachingEngine(BLOCK, 100)
    await engine.start()
    port, picker = take_free("127.0.0.1"), take_free("127.0.0.1")
    command = [sys.executable, "-m", "vllm_pd.cli", "picker", "--port", str(picker), "--metrics-port", "0", "--worker",
               engine.url, "--tokenizer", "none"]
    environment = {**os.environ, "PYTHONPATH": os.environ.get("VLLM_PD_PICKER", "")}
    processes = [subprocess.Popen(command, env=environment)]
    try:
        async with running_envoy(picker_envoy_config(port, picker, mode), tmp_path, port), \
                aiohttp.ClientSession() as session:

            async def status() -> int:
                async with session.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": [1]},
                                        headers={HEADER: at(engine)}) as response:
                    await response.read()
                    return response.status

            async def until(wanted: int) -> None:
                async with asyncio.timeout(WITHIN_S):
                    while await status() != wanted:
                        await asyncio.sleep(0.1)

            for _ in range(2):
                await until(200)
                processes[-1].kill()
                processes[-1].wait()
                await until(500)
                before = engine.requests
                assert [await status() for _ in range(5)] == [500] * 5 and engine.requests == before
                processes.append(subprocess.Popen(command, env=environment))
            await until(200)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await engine.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 1])
async def test_it_hits_as_often_as_the_router(tmp_path, mode, seed):
    """A short run of scripts/lab/bench_picker.py, with caches that are too small for all of it, and by loads too: six
    requests are open at a time."""
    trace = make(TraceConfig(seed=seed, conversations=15, system_prompts=4, documents=4, turns=3.0))
    router, picker = await compare(trace, ReplaySettings(open=6, mode=mode, seed=seed), 3, 400, tmp_path)
    assert router.failed == picker.failed == 0
    assert router.requests == picker.requests == len(trace) > 30
    assert router.prompt_blocks == picker.prompt_blocks
    assert 0.2 < router.hit_rate < 0.95, "there is something to hit, and something to miss"
    assert picker.hit_rate == pytest.approx(router.hit_rate, rel=0.01)
    blind = await compare(trace, ReplaySettings(Policy.ROUND_ROBIN, 6, seed), 3, 400, tmp_path)
    assert max(figures.hit_rate for figures in blind) < 0.9 * picker.hit_rate, "a choice in turn hits less"


def test_the_page_has_the_configurations_that_are_tested():
    """Without the header of answers by which the tests know the engine."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "picker.md").read_text(), re.DOTALL)
    shown, known = (list(yaml.safe_load_all(block)) for block in blocks[:2])
    tested = picker_envoy_config(8080, 9002, EnvoyBodyMode.DUPLEX)
    [listener] = tested["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["route_config"]["virtual_hosts"][0]["response_headers_to_add"]
    assert shown == [tested]
    with_engines = picker_envoy_config(8080, 9002, EnvoyBodyMode.DUPLEX, engines=[8000, 8001])
    assert known == [with_engines["static_resources"]["clusters"][1:]]
