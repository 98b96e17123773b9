# SPDX-License-Identifier: Apache-2.0
"""One run: a steady load through a gateway, while the fleet behind it changes phase by phase."""
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from _connectors.serve import ServerFactory

from _behind.fleet import ENVIRONMENT, BehindFleet, EnginePlace
from _behind.gateways import GatewayName, gateway_command, require_streams
from _behind.load import LoadShape, SteadyLoad, draw_questions
from _behind.report import BehindRecord, KilledEngine, RunPhase
from _behind.watch import EngineWatch, is_busy, read
from vllm_pd.bench.servers import HOST, Servers, log_to
from vllm_pd.errors import PDError
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free

USED_S = 120.0  # until a new engine has its first request or job
BROKER_AWAY_S = 10.0
STEADY = 3.0  # so many times as long as after a change is the load where nothing changes
POLL_S = 0.1
OTHER_RELEASE = "0.99"


class PhaseName(StrEnum):
    """What happens, in the order of a whole run."""
    ALONE = "no prefill engines"
    COME = "two prefill engines come"
    STEADY = "two prefill engines"
    ROLL_P = "prefill engines rolled"
    ROLL_D = "decode engines rolled"
    OTHER_PROTOCOL = "all rolled to another protocol"
    OTHER_RELEASE = "all rolled to another release"
    KILL_BROKER = "broker killed"
    KILL_P = "prefill engine killed"
    KILL_D = "decode engine killed"
    LEAVE = "prefill engines leave"
    ALONE_AGAIN = "no prefill engines again"


UNCHANGED = {PhaseName.ALONE: 0, PhaseName.STEADY: 2, PhaseName.ALONE_AGAIN: 0}  # how many prefill engines are there
SHORT = (PhaseName.ALONE, PhaseName.COME, PhaseName.OTHER_PROTOCOL, PhaseName.KILL_BROKER, PhaseName.KILL_P,
         PhaseName.KILL_D, PhaseName.LEAVE)


@dataclass(frozen=True)
class BehindSettings:
    """What is run. `calm_s`: how long the load goes on after each change."""
    model: str
    log: Path
    gateway: GatewayName = GatewayName.ENVOY
    phases: tuple[PhaseName, ...] = tuple(PhaseName)
    calm_s: float = 20.0
    seed: int = 41
    load: LoadShape = field(default_factory=lambda: LoadShape(3, 48, 700, 8.0, 14))
    context: int = 2048


def behind(settings: BehindSettings, say: Callable[[str], None]) -> BehindRecord:
    """Starts everything, goes through the phases, ends everything. Raises PDError, and OSError, where a phase can't be
    gone through; what happened to the requests is in the record."""
    settings.log.parent.mkdir(parents=True, exist_ok=True)
    settings.log.write_text("")
    with (tempfile.TemporaryDirectory() as folder, settings.log.open("a", buffering=1) as file,
          ServerFactory(ENVIRONMENT, settings.log) as engines, Servers(log_to(file)) as beside):
        fleet = BehindFleet(engines, beside, settings.model, settings.context)
        say("the right answers, from one stock engine")
        alone = engines.start("one engine", take_free(HOST), fleet.arguments(), ENVIRONMENT)
        alone.await_ready()
        questions = asyncio.run(draw_questions(alone.url, settings.model, settings.load, settings.seed))
        alone.kill()
        fleet.start_broker()
        fleet.start("D0", "D1")
        port = take_free(HOST)
        gateway = gateway_command(settings.gateway, port, [place.url for place in fleet.of(Role.DECODE)], Path(folder))
        server = beside.start(settings.gateway, port, gateway.command, env=gateway.env)
        beside.await_ready(server)
        require_streams(server.url, settings.model)
        load = SteadyLoad(server.url, settings.model, settings.load, questions, settings.seed)
        watch = EngineWatch(list(fleet.places.values()))
        run = BehindRun(settings, fleet, say)
        with _running(load, watch):
            run.carry_out()
        return replace(run.record, gateway=gateway.version, asked=load.asked, readings=watch.readings)


@contextlib.contextmanager
def _running(load: SteadyLoad, watch: EngineWatch) -> Iterator[None]:
    watch.start()
    load.start()
    try:
        yield
    finally:
        load.stop()
        watch.stop()


class BehindRun:
    """Carries the phases out. `record` has when each was, and which engines were there."""

    def __init__(self, settings: BehindSettings, fleet: BehindFleet, say: Callable[[str], None]) -> None:
        self.record = BehindRecord()
        self._settings, self._fleet, self._say = settings, fleet, say
        self._actions: dict[PhaseName, Callable[[], None]] = {
            **dict.fromkeys(UNCHANGED, lambda: None),
            PhaseName.COME: lambda: self._start("P0", "P1"),
            PhaseName.ROLL_P: lambda: self._roll("P0", "P1"), PhaseName.ROLL_D: lambda: self._roll("D0", "D1"),
            PhaseName.OTHER_PROTOCOL: self._roll_to_protocol, PhaseName.OTHER_RELEASE: self._roll_to_release,
            PhaseName.KILL_BROKER: self._kill_broker, PhaseName.KILL_P: lambda: self._kill("P0"),
            PhaseName.KILL_D: lambda: self._kill("D0"), PhaseName.LEAVE: self._leave}

    def carry_out(self) -> None:
        """All phases. Raises PDError, OSError."""
        self._note("D0", "D1", there=True)
        for name in self._settings.phases:
            self._say(name)
            begun_s = time.perf_counter()
            self._actions[name]()
            time.sleep(self._settings.calm_s * (STEADY if name in UNCHANGED else 1.0))
            self.record.phases.append(RunPhase(name, begun_s, time.perf_counter(), UNCHANGED.get(name)))

    # What happens.

    def _start(self, *names: str) -> None:
        self._fleet.start(*names)
        self._note(*names, there=True)
        for name in names:
            self._await_use(self._fleet.places[name])

    def _stop(self, *names: str) -> None:
        self._fleet.stop(*names)
        self._note(*names, there=False)

    def _roll(self, *names: str) -> None:
        """One after the other: SIGTERM, and a new engine at the same address."""
        for name in names:
            self._stop(name)
            self._start(name)

    def _roll_to_protocol(self) -> None:
        """The broker first, because an engine of another protocol can't register; then as `_roll_to_release`."""
        self._fleet.version = replace(self._fleet.version, protocol=self._fleet.version.protocol + 1)
        self._fleet.stop_broker(kill=False)
        self._fleet.start_broker()
        self._roll_to_other()

    def _roll_to_release(self) -> None:
        self._fleet.version = replace(self._fleet.version, release=OTHER_RELEASE)
        self._roll_to_other()

    def _roll_to_other(self) -> None:
        """Prefill engines, then decode engines. Nobody fits the new prefill engines until a decode engine is new."""
        for place in self._fleet.of(Role.PREFILL):
            self._stop(place.name)
            self._fleet.start(place.name)
            self._note(place.name, there=True)
        self._await_degraded(self._fleet.of(Role.DECODE))
        self._roll(*(place.name for place in self._fleet.of(Role.DECODE)))
        for place in self._fleet.of(Role.PREFILL):
            self._await_use(place)

    def _kill_broker(self) -> None:
        self._fleet.stop_broker(kill=True)
        time.sleep(BROKER_AWAY_S)
        self._fleet.start_broker()

    def _kill(self, name: str) -> None:
        """A prefill engine while it computes a prompt."""
        place = self._fleet.places[name]
        if place.role is Role.PREFILL:
            self._await(lambda: is_busy(place), f"{name} gets no prompt")
        killed_s = time.perf_counter()
        self._fleet.kill(name)
        self.record.killed.append(KilledEngine(name, place.address, killed_s, time.perf_counter()))
        self.record.engines.append((killed_s, name, False))
        self._start(name)

    def _leave(self) -> None:
        self._stop(*(place.name for place in self._fleet.of(Role.PREFILL)))

    # What is waited for.

    def _await_use(self, place: EnginePlace) -> None:
        """Until the gateway sends a new decode engine requests, or a new prefill engine has computed a prompt. Raises
        PDError."""
        def is_used() -> bool:
            reading = read(place)
            return bool(reading.jobs or reading.decisions)

        self._await(is_used, f"{place.name} gets nothing to do")

    def _await_degraded(self, places: list[EnginePlace]) -> None:
        """Until these engines say that they have nobody to work with. Raises PDError."""
        self._await(lambda: all(read(place).degraded for place in places), "an engine of an older version still works "
                    "with those of the new one")

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.perf_counter() + USED_S
        while True:
            with contextlib.suppress(OSError):
                if holds():
                    return
            if time.perf_counter() > deadline_s:
                raise PDError(f"{what} after {USED_S:g} s")
            time.sleep(POLL_S)

    def _note(self, *names: str, there: bool) -> None:
        self.record.engines += [(time.perf_counter(), name, there) for name in names]
