# SPDX-License-Identifier: Apache-2.0
"""Workers behind TLS, and behind a path: probed, asked and given up as others are, and never without a certificate."""
import asyncio
import contextlib
import json
import ssl

import pytest

from tests.fakes import certificates
from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from vllm_pd.router.policy import Policy
from vllm_pd.router.workers import WorkerState


class SecureEngine(FaultyEngine):
    """At `https://127.0.0.1:PORT/engine`; counts its connections."""

    def __init__(self, folder) -> None:
        super().__init__()
        self.url = f"https://127.0.0.1:{self.port}/engine"
        self.connections = 0
        (folder / "key.pem").write_text(certificates.KEY)
        (folder / "cert.pem").write_text(certificates.CERTIFICATE)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._context)

    async def _serve(self, reader, writer) -> None:
        self.connections += 1
        await super()._serve(reader, writer)

    async def _answer(self, method, target, headers, body, reader, writer) -> bool:
        assert target.startswith("/engine/"), target
        return await super()._answer(method, target.removeprefix("/engine"), headers, body, reader, writer)


@contextlib.asynccontextmanager
async def secured(tmp_path, monkeypatch, believed=certificates.CERTIFICATE):
    """(router, engine): a router that believes this certificate, before an engine that it does not know yet."""
    (tmp_path / "believed.pem").write_text(believed)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "believed.pem"))
    engine = SecureEngine(tmp_path)
    await engine.start()
    try:
        async with serving(0, Policy.KV) as (served, _):
            async with served.session.post(served.url + "/workers", json={"url": engine.url}) as answer:
                assert answer.status == 201
            yield served, engine
    finally:
        await engine.stop()


async def test_a_worker_behind_tls_and_a_path_is_probed_and_asked(tmp_path, monkeypatch):
    async with secured(tmp_path, monkeypatch) as (served, engine):
        await served.until(lambda: served.worker(engine).state is WorkerState.UP)
        assert served.worker(engine).models == {"m"}
        await served.until(lambda: engine.connections == 4)  # for models, version, probe, events
        before = engine.connections
        for stream in (False, True, False):
            answer = await served.ask(stream, prompt="é" * 100_000)
            assert answer.status == 200
            assert answer.events[-1] == "[DONE]" if stream else answer.json["from"] == engine.port
        assert engine.connections == before + 1, "a connection is used again"
        target, headers, body = engine.asked[-1]
        assert (target, headers["host"]) == ("/v1/completions", f"127.0.0.1:{engine.port}")
        assert json.loads(body)["prompt"] == "é" * 100_000


async def test_b11_a_worker_behind_tls_learns_that_its_client_has_gone(tmp_path, monkeypatch):
    async with secured(tmp_path, monkeypatch) as (served, engine):
        await served.until(lambda: served.worker(engine).state is WorkerState.UP)
        engine.gap_s = 30.0
        async with served.session.post(served.url + "/v1/completions", json={"stream": True}) as response:
            assert b"t0" in await response.content.readany()
        await served.until(lambda: engine.cancelled == 1)


async def test_b64_a_stream_that_breaks_behind_tls_ends_with_an_error(tmp_path, monkeypatch):
    async with secured(tmp_path, monkeypatch) as (served, engine):
        await served.until(lambda: served.worker(engine).state is WorkerState.UP)
        engine.fault = Fault.BREAK
        answer = await served.ask(stream=True)
        assert answer.events[-1]["error"]["code"] == 502


@pytest.mark.parametrize("what", ["another certificate", "no tls"])
async def test_who_can_not_show_its_certificate_gets_nothing(tmp_path, monkeypatch, what):
    monkeypatch.setattr(SecureEngine, "start", SecureEngine.start if what == "another certificate"
                        else FaultyEngine.start)
    async with secured(tmp_path, monkeypatch, certificates.OTHER) as (served, engine):
        await served.until(lambda: served.worker(engine).failures > 1)
        problem = served.worker(engine).problem
        assert ("certificate" in problem) is (what == "another certificate") and problem
        assert (await served.ask()).status == 503
        assert not engine.asked and not engine.probes
