# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd up`: a broker, some engines and perhaps a router on this machine, started together and ended together.

Start: first the broker; then the engines, at most two at a time because starting needs mostly the CPU (one at a time
where they share a GPU); when all engines are healthy, the router, where there is one. Then the addresses are printed
and the state file is written. Until then, a child that dies ends all the others. Afterwards its death is reported, the
others go on (a decode engine that loses its peers prefills by itself), and the exit status of `up` is 1.

End: a signal ends everything. The router is asked to end first, while all engines still work for it; then the decode
engines, which drain; then the prefill engines; then the broker. What does not end in time is killed. A second signal
kills all of them at once.
"""

import collections
import json
import math
import os
import queue
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.client import is_healthy
from vllm_pd.ops.launch.child import Child, Exited
from vllm_pd.ops.launch.plan import HOST, ROLE_NAMES, EnginePlan, FleetPlan, starting_at_once
from vllm_pd.ops.launch.printer import LinePrinter, Say, say_aloud
from vllm_pd.ops.launch.progress import StartProgress
from vllm_pd.rpc.ports import release, reserve

CHECK_PERIOD_S = 0.25
BROKER_START_S = 30.0
BROKER_STOP_S = 3.0
ROUTER_START_S = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StartError(PDError):
    """The fleet could not be started. The message names the cause."""


@dataclass(frozen=True)
class SignalReceived:
    """Signal `number` has asked this process to end."""
    number: int


def check_times(plan: FleetPlan, timeout_s: float, stop_timeout_s: float | None) -> None:
    """Raises ConfigError for times in which no fleet comes up, or in which this one could not end by itself."""
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError("--timeout-s", timeout_s, "write a number of seconds above 0")
    if stop_timeout_s is not None and not (math.isfinite(stop_timeout_s) and stop_timeout_s > plan.ending_s):
        raise ConfigError("--stop-timeout-s", stop_timeout_s, f"open requests may take {plan.ending_s:g} s (by --pd "
                          "drain_timeout_s, or the router's --unready-s and --grace-s): write more, or leave it out")


class Fleet:
    """The running processes of one plan. Used from the main thread only, by `run` or as a context manager: inside the
    `with` block every engine is healthy, and after it every process has ended.

    `state`: the file to write once all is healthy. `timeout_s`: how long the start may take, or longer while an engine
    that is starting prints lines (StartProgress). `stop_timeout_s`: how long the router, the decode engines and the
    prefill engines may each take to end before they are killed; None: as the plan says. `stop_on_death`: end everything
    when one process dies. `say` prints a line of a named process.
    """

    def __init__(self, plan: FleetPlan, *, state: Path | None = None, timeout_s: float = 600.0,
                 stop_timeout_s: float | None = None, stop_on_death: bool = False, say: Say = say_aloud) -> None:
        self.plan = plan
        self._state = state
        self._timeout_s = timeout_s
        self._stop_timeout_s = plan.stop_timeout_s if stop_timeout_s is None else stop_timeout_s
        self._stop_on_death = stop_on_death
        self._printer = LinePrinter(say)
        put = self._printer.put
        self._events: queue.SimpleQueue[SignalReceived | Exited] = queue.SimpleQueue()
        self._broker = Child("broker", plan.broker_command, say=put)
        self._engines = {engine: Child(engine.name, engine.command, env=engine.env, cores=engine.cores, say=put)
                         for engine in plan.engines}
        self._router = (None if plan.router is None
                        else Child("router", plan.router.command, env=plan.router.env, say=put))
        self._dead: list[Child] = []
        self._reserved: list[socket.socket] = []  # the ports of this fleet

    def run(self) -> int:
        """Start the fleet, keep it until a signal comes, end it. Returns the exit status: 1 where something failed."""
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # by nohup
        handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS if number not in ignored}
        try:
            try:
                self.start()
                self._say("everything is up; Ctrl-C takes it down")
                self._watch()
            except KeyboardInterrupt:
                self._say("taking everything down")
            except StartError as error:
                self._say(f"error: {error}")
                return 1
            finally:
                self.stop()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return 1 if self._dead else 0

    def __enter__(self) -> "Fleet":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns when every engine is healthy. Raises StartError, ConfigError where another fleet
        has one of the ports or the state file can't be written, or KeyboardInterrupt for a signal. The caller calls
        `stop` afterwards in any case."""
        router = () if self.plan.router is None else (self.plan.router.port, )
        self._reserved += reserve("--port", HOST, (*router, *(engine.port for engine in self._engines)))
        self._reserved += reserve("--broker-port", HOST, (self.plan.broker_port, ))
        self._clear_state()
        deadline = time.monotonic() + self._timeout_s
        self._broker.start(self._events)
        self._await_broker(min(deadline, time.monotonic() + BROKER_START_S))
        waiting, at_once = collections.deque(self._engines), starting_at_once(self.plan.engines)
        starting: list[EnginePlan] = []
        progress = StartProgress(time.monotonic(), self._timeout_s)
        while waiting or starting:
            while waiting and len(starting) < at_once:
                engine = waiting.popleft()
                self._say(f"starting {engine.name} at {engine.url}"
                          + (f" on core {','.join(map(str, engine.cores))}" if engine.cores else ""))
                self._engines[engine].start(self._events)
                starting.append(engine)
            self._raise_on_event(CHECK_PERIOD_S)
            starting = [engine for engine in starting if not is_healthy(engine.url)]
            late = [engine.name for engine in (*starting, *waiting)]
            progress.see(sum(self._engines[engine].printed for engine in starting), time.monotonic())
            if late and progress.has_stopped:
                raise StartError(f"not healthy after {progress.waited_s:.1f} s: {', '.join(late)}; see the lines "
                                 "above, or allow more time with --timeout-s")
        if self._router is not None:
            self._router.start(self._events)
            self._await_router(time.monotonic() + ROUTER_START_S)
        self._announce()

    def stop(self) -> None:
        """End every process: the router, while all engines still work for it; the decode engines, while the prefill
        engines do; the prefill engines. Each kind has `stop_timeout_s` and the broker 3 s; then they are killed, or at
        once when a signal comes. At last 5 s for lines that are not printed yet."""
        router = [] if self._router is None else [self._router]
        patient = True
        for children in (router, self._children(decodes=True), self._children(decodes=False)):
            patient = self._end(children, self._stop_timeout_s if patient else 0.0) and patient
        self._end([self._broker], BROKER_STOP_S)
        release(self._reserved)
        self._printer.close()

    def _children(self, *, decodes: bool) -> list[Child]:
        return [child for engine, child in self._engines.items() if engine.role.decodes is decodes]

    def state(self) -> dict:
        """The content of the state file: URL and process id of each process."""
        router = ({} if self._router is None else
                  {"router": {"url": self.plan.router.url, "pid": self._router.pid}})
        return {"broker": {"url": self.plan.broker_url, "pid": self._broker.pid}, **router,
                "engines": [{"role": ROLE_NAMES[engine.role], "url": engine.url, "pid": child.pid}
                            for engine, child in self._engines.items()]}

    def _announce(self) -> None:
        """Say where everything is, and write the state file. Raises StartError."""
        for engine in self._engines:
            self._say(f"{engine.name:<10} {engine.url}")
        if self.plan.router is not None:
            self._say(f"{'router':<10} {self.plan.router.url}")
        self._say(f"{'broker':<10} {self.plan.broker_url}")
        if self._state is not None:
            try:
                self._unfinished.write_text(json.dumps(self.state(), indent=2) + "\n")
                os.replace(self._unfinished, self._state)
            except OSError as error:
                raise StartError(f"the state file can't be written: {error}") from error

    @property
    def _unfinished(self) -> Path:
        return Path(f"{self._state}.part")

    def _clear_state(self) -> None:
        """Remove an older state file, and find out now, not when all is up, whether a new one can be written."""
        if self._state is None:
            return
        try:
            self._state.unlink(missing_ok=True)
            self._unfinished.touch()
            self._unfinished.unlink()
        except OSError as error:
            raise ConfigError("--state", str(self._state), f"{error.strerror}: name a file in a folder that is there "
                              "and that you may write to") from error

    def _watch(self) -> None:
        while True:
            event = self._next_event(CHECK_PERIOD_S)
            if event is None:
                continue
            if isinstance(event, SignalReceived):
                raise KeyboardInterrupt
            self._report(event)
            if self._stop_on_death or not any(child.alive for child in self._engines.values()):
                return

    def _await_broker(self, deadline: float) -> None:
        while True:
            try:
                socket.create_connection((HOST, self.plan.broker_port), timeout=1.0).close()
                return
            except OSError:
                self._raise_on_event(CHECK_PERIOD_S / 5)
            if time.monotonic() > deadline:
                raise StartError(f"the broker does not listen at {self.plan.broker_url}")

    def _await_router(self, deadline: float) -> None:
        while not is_healthy(self.plan.router.url):
            self._raise_on_event(CHECK_PERIOD_S)
            if time.monotonic() > deadline:
                raise StartError(f"the router at {self.plan.router.url} has no engine: see the lines above")

    def _raise_on_event(self, timeout_s: float) -> None:
        event = self._next_event(timeout_s)
        if event is None:
            return
        if isinstance(event, SignalReceived):
            raise KeyboardInterrupt
        self._report(event)
        raise StartError(f"{event.child.name} ended while the engines were starting")

    def _report(self, event: Exited) -> None:
        self._dead.append(event.child)
        how = f"was ended by {signal.Signals(-event.code).name}" if event.code < 0 else f"ended with {event.code}"
        self._say(f"{event.child.name} {how}; its last lines:")
        for line in event.child.last_lines():
            self._say(f"    {line}")

    def _end(self, children: list[Child], timeout_s: float) -> bool:
        """End these processes. Returns False if a signal came meanwhile, which means: kill the rest at once."""
        for child in children:
            child.stop()
        patient = True
        deadline = time.monotonic() + timeout_s
        while patient and any(child.alive for child in children) and time.monotonic() < deadline:
            event = self._next_event(min(CHECK_PERIOD_S, max(0.0, deadline - time.monotonic())))
            patient = not isinstance(event, SignalReceived)
        for child in children:
            if child.alive:
                self._say(f"{child.name} does not end by itself: killed")
            child.kill()
            child.wait(time.monotonic() + 5.0)
        return patient

    def _next_event(self, timeout_s: float) -> SignalReceived | Exited | None:
        """What happened, None where nothing did. Waits are short, as a signal that comes at the very beginning of one
        is handled only at its end."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _on_signal(self, number: int, frame: object) -> None:
        self._events.put(SignalReceived(number))

    def _say(self, text: str) -> None:
        self._printer.put("up", text)
