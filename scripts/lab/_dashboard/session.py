# SPDX-License-Identifier: Apache-2.0
"""One run: a router, a decode and a prefill engine under load. The prefill engine is killed and comes back, then the
broker. A Prometheus reads them all the time, and is asked at the end what each panel showed."""
import asyncio
import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from _dashboard import panels, prometheus
from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.load import GenerationRequest, generate
from vllm_pd.bench.servers import HOST, Server, Servers, log_to
from vllm_pd.errors import PDError
from vllm_pd.ops.launch.plan import EnginePlan, UpOptions, plan_fleet
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free, take_free_run

NAME = "tiny"
ENGINE_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # there may be fewer cores than engines
SERVE_ARGS = ("--served-model-name", NAME, "--dtype", "float32", "--enforce-eager", "--block-size", "32",
              "--max-num-seqs", "16", "--max-model-len", "4096", "--num-gpu-blocks-override", "512",
              "--disable-uvicorn-access-log")
PD = {"max_local_prefill_tokens": 200, "lease_s": 10.0, "ttl_s": 5.0}
START_S, STOP_S = 240.0, 20.0
ANSWER_S = 120.0
TOKENS = range(1000, 20000)  # ids that prompts are drawn from
SHORT_TOKENS, LONG_TOKENS = (20, 100), (600, 2000)


@dataclass(frozen=True)
class DashboardSettings:
    """What is run. `phase_s`: how long the load goes on after each change; `warm_s`: before the first phase.
    One of `long_every` prompts is long."""
    model: str
    log: Path
    program: str
    clients: int = 4
    pause_s: float = 0.5
    long_every: int = 3
    answer_tokens: int = 24
    warm_s: float = 40.0
    phase_s: float = 45.0
    seed: int = 41


@dataclass(frozen=True)
class PanelReading:
    """What one line of a panel showed."""
    panel: panels.DashboardPanel
    line: panels.PanelLine
    series: list[prometheus.PanelSeries]


@dataclass
class DashboardRecord:
    """A run. `phases`: what was changed, and when (`time.time()`)."""
    phases: list[tuple[str, float]] = field(default_factory=list)
    ended_s: float = 0.0
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    readings: list[PanelReading] = field(default_factory=list)
    alerts: list[prometheus.PanelSeries] = field(default_factory=list)
    version: str = ""


class DashboardLoad:
    """Clients that ask the router, each one request after the other, from `start` to `stop`."""

    def __init__(self, url: str, settings: DashboardSettings, record: DashboardRecord) -> None:
        self._url, self._settings, self._record = url, settings, record
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), name="load")

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def stop(self) -> None:
        """Sends nothing new. Returns when all requests have ended."""
        self._ending.set()
        self._thread.join()

    async def _send(self) -> None:
        await asyncio.gather(*(self._follow(number) for number in range(self._settings.clients)))

    async def _follow(self, client: int) -> None:
        draw = random.Random(f"{self._settings.seed} {client}")
        for turn in itertools.count(client):
            await asyncio.sleep(draw.uniform(0, 2 * self._settings.pause_s))
            if self._ending.is_set():
                return
            length = draw.randint(*(SHORT_TOKENS if turn % self._settings.long_every else LONG_TOKENS))
            request = GenerationRequest(draw.choices(TOKENS, k=length), self._settings.answer_tokens, stream=True,
                                        ignore_eos=True)
            try:
                with await LoadConnection.open(self._url) as connection:
                    await generate(connection, NAME, request, timeout_s=ANSWER_S)
                self._record.answers += 1
            except (OSError, LoadError) as error:
                self._record.errors.append(str(error))


def run(settings: DashboardSettings, say: Callable[[str], None]) -> DashboardRecord:
    """Starts everything, goes through the phases, asks Prometheus, ends everything. Raises PDError, OSError."""
    settings.log.parent.mkdir(parents=True, exist_ok=True)
    plan = plan_fleet(UpOptions(model=settings.model, port=take_free_run(HOST, 3), pd=PD, serve_args=SERVE_ARGS,
                                router=True), ())
    record = DashboardRecord()
    with (tempfile.TemporaryDirectory() as folder, settings.log.open("w", buffering=1) as file,
          Servers(log_to(file), STOP_S) as servers):
        def start(engine: EnginePlan) -> Server:
            return servers.start(engine.name, engine.port, engine.command, env={**engine.env, **ENGINE_ENV})

        def start_broker() -> Server:
            return servers.start("broker", plan.broker_port, plan.broker_command)

        broker = start_broker()
        engines = {engine.role: start(engine) for engine in plan.engines}
        for server in engines.values():
            servers.await_ready(server, timeout_s=START_S)
        router = servers.start("router", plan.router.port, plan.router.command, env=plan.router.env)
        servers.await_ready(router)
        (prefill, ) = (engine for engine in plan.engines if engine.role is Role.PREFILL)
        config = prometheus.write_config(Path(folder), {
            "vllm-pd-engine": [f"{HOST}:{engine.port}" for engine in plan.engines],
            "vllm-pd-router": [f"{HOST}:{router.port}"]})
        port = take_free(HOST)
        watching = servers.start("prometheus", port, prometheus.command(settings.program, config, port))
        servers.await_ready(watching, prometheus.is_ready)

        def phase(name: str) -> None:
            say(name)
            record.phases.append((name, time.time()))

        load = DashboardLoad(router.url, settings, record)
        load.start()
        try:
            time.sleep(settings.warm_s)
            phase("all there")
            time.sleep(settings.phase_s)
            phase("prefill engine killed")
            _kill(engines[Role.PREFILL])
            time.sleep(settings.phase_s)
            phase("it starts")
            servers.await_ready(start(prefill), timeout_s=START_S)
            phase("it serves")
            time.sleep(settings.phase_s)
            phase("broker killed")
            _kill(broker)
            time.sleep(settings.phase_s / 2)
            phase("broker back")
            start_broker()
            time.sleep(settings.phase_s)
        finally:
            load.stop()
        record.ended_s = time.time()
        _read(record, watching.url)
    return record


def _kill(server: Server) -> None:
    server.child.kill()
    if not server.child.wait(time.monotonic() + STOP_S):
        raise PDError(f"{server.name} does not end")


def _read(record: DashboardRecord, url: str) -> None:
    dashboard = panels.read_dashboard()
    names, begun_s = panels.variables_of(dashboard), record.phases[0][1]
    for panel in panels.panels_of(dashboard):
        for line in panel.lines:
            expression = panels.filled(line.expression, names, prometheus.RATE_INTERVAL)
            series = prometheus.ask_range(url, expression, begun_s, record.ended_s)
            record.readings.append(PanelReading(panel, line, series))
    record.alerts = prometheus.ask_range(url, "max by (alertname, alertstate, reason) (ALERTS)", begun_s,
                                         record.ended_s)
    record.version = prometheus.version(url)
