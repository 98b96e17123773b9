#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a registry of many engines costs its broker, by their number: `vllm-pd broker`, or a nats-server.

The members are light: all run in this process, without a model and without connections to each other. To the broker
each is an engine, with an entry, heartbeats and a connection of its own. Half of them prefill, half decode. By size:

- `joined`: all connect and register at once, until each of them lists all. Wall time, and the CPU time of the broker
  and of this process, which does the work of all engines.
- `idle`: nothing but heartbeats, for `--seconds`. The broker's share of a core, and the bytes that it sends a second.
- `one join`: one more registers. All bytes that the broker sends until everybody lists it, without the answers to
  heartbeats. Of a nats-server they are not known: it sends every heartbeat to everybody.
- `jobs`: 20 jobs of 1,000 tokens a second, for `--seconds`, put by the decode engines in turn. A prefill engine has
  done its job at once. `lost`: heartbeats that were not answered before the next one, and jobs that nobody was offered.
"""
from __future__ import annotations

import argparse
import asyncio
import collections
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil
from _chaos.fleet import nats_server
from rich.console import Console

from vllm_pd.bench.outputs import argument_file, write_json
from vllm_pd.bench.report import table
from vllm_pd.broker import nats_store
from vllm_pd.broker.changes import RegistryView
from vllm_pd.broker.members import list_members
from vllm_pd.broker.nats_session import Mailbox, NatsSession
from vllm_pd.broker.nats_store import Store
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.rpc.ports import take_free

HOST = "127.0.0.1"
STEP_S, SETTLE_S, START_S, DEADLINE_S = 0.02, 20.0, 30.0, 600.0
JOBS_PER_S, JOB_TOKENS = 20, 1000
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "meta-llama/Llama-3.1-8B-Instruct", "bfloat16", "bfloat16", 16, 32, 8, 128,
                            "heads-first", engine="v1/0.32.0")


class ZmqLink:
    """A member's connection to `vllm-pd broker`. Counts the bytes of what comes, by kind."""

    def __init__(self, broker: ZmqBroker, name: str):
        self._name = name
        self._socket = sockets.client(broker.context, broker.url, only_connected=True)
        self.received_bytes: collections.Counter[type] = collections.Counter()

    def send(self, message: m.Message) -> bool:
        """Whether it left."""
        return sockets.send(self._socket, codec.encode(self._name, message)) is sockets.SendResult.SENT

    def receive(self) -> Iterator[m.Message]:
        """All that has come."""
        while (frames := sockets.receive(self._socket)) is not None:
            _, message = codec.decode(frames)
            self.received_bytes[type(message)] += len(frames[0])
            yield message

    def ended(self, attempt: m.Attempt) -> None:
        """The broker need not know."""

    async def close(self) -> None:
        """Close the connection."""
        self._socket.close(linger=0)


class NatsLink:
    """A member's connection to a nats-server: the session of a real engine, in this event loop."""

    def __init__(self, store: Store, name: str, ttl_s: float):
        self._inbox: collections.deque[m.Message] = collections.deque()
        self._store = store
        self._commands = Mailbox(asyncio.get_running_loop(), 1000)
        session = NatsSession(store, name, ttl_s, self._inbox.append, collections.Counter(), lambda version: None)
        self._task = asyncio.create_task(session.run(self._commands))
        self.received_bytes: collections.Counter[type] = collections.Counter()

    def send(self, message: m.Message) -> bool:
        """Whether it is on its way."""
        if self._task.done():
            self._task.result()
        return self._commands.put(message)

    def receive(self) -> Iterator[m.Message]:
        """All that has come."""
        while self._inbox:
            yield self._inbox.popleft()

    def ended(self, attempt: m.Attempt) -> None:
        """The server is to forget that job."""
        self._commands.put(frozenset({attempt}))

    async def close(self) -> None:
        """End the session."""
        self._commands.put(None)
        await self._task
        await self._store.close()


class ZmqBroker:
    """`vllm-pd broker`, in a process of its own."""

    def __init__(self, folder: Path, ttl_s: float):
        self.url = f"tcp://{HOST}:{take_free(HOST)}"
        self.context = sockets.started_context(16384)
        self.process = psutil.Process(subprocess.Popen(
            [sys.executable, "-m", "vllm_pd.cli", "broker", "--bind", self.url, "--ttl-s", f"{ttl_s:g}"]).pid)
        list_members(self.url, START_S)

    async def link(self, name: str) -> ZmqLink:
        """A connection for the member of this name."""
        return ZmqLink(self, name)

    def sent_bytes(self, members: list[LightMember]) -> int:
        """All that it has sent to them."""
        return sum(sum(one.link.received_bytes.values()) for one in members)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.context.term()


class NatsBroker:
    """A nats-server with JetStream, in memory."""

    def __init__(self, folder: Path, ttl_s: float):
        port, self._monitor = take_free(HOST), take_free(HOST)
        self._ttl_s = ttl_s
        # One thread does the work of all engines, and so is late.
        nats_store.REQUEST_S = nats_store.PING_S = nats_store.ACK_WAIT_S = START_S
        self._address = NatsAddress.of(f"nats://{HOST}:{port}", "vllm_pd", None, None)
        config = folder / "server.conf"
        config.write_text(f'listen: "{HOST}:{port}"\nhttp: "{HOST}:{self._monitor}"\nmax_payload: 1MB\n'
                          f'jetstream {{store_dir: "{folder}", max_memory_store: 1GB}}\n')
        with (folder / "log").open("w") as log:
            self.process = psutil.Process(subprocess.Popen([nats_server(), "-c", config], stdout=log, stderr=log).pid)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((HOST, port), START_S).close()
                return
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)

    async def link(self, name: str) -> NatsLink:
        """A connection for the member of this name."""
        return NatsLink(await Store.open(self._address, lambda: None, lambda error: None), name, self._ttl_s)

    def sent_bytes(self, members: list[LightMember]) -> int:
        """All that it has sent."""
        with urllib.request.urlopen(f"http://{HOST}:{self._monitor}/varz", timeout=START_S) as answer:
            return json.load(answer)["out_bytes"]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


BROKERS: dict[str, type[ZmqBroker | NatsBroker]] = {"vllm-pd": ZmqBroker, "nats": NatsBroker}


class LightMember:
    """One engine, as far as its broker sees."""

    def __init__(self, number: int, link: ZmqLink | NatsLink, due_s: float, heartbeat_s: float):
        role = m.Role.PREFILL if number % 2 else m.Role.DECODE
        self.member = m.Member(f"{number:032x}", role, f"tcp://{HOST}:{10_000 + number}", FINGERPRINT,
                               m.Load(3, 1, 900), "8c1ad6f0-7d4e-4a0b-9c55-0f4b0a9d8e11",
                               (m.Process(1000 + number, 123456789), ) * 2, f"tcp://{HOST}:{20_000 + number}", False,
                               f"http://{HOST}:{30_000 + number}")
        self.link = link
        self.view = RegistryView()
        self.counts: collections.Counter[str] = collections.Counter()
        self._due_s, self._heartbeat_s = due_s, heartbeat_s
        self._first_part = (number % 97 + 1) / 97
        self._waits = False  # for the answer to the last heartbeat

    def step(self, now: float) -> None:
        """Hear what has come, and say what is due."""
        for message in self.link.receive():
            self._hear(now, message)
        if now >= self._due_s and self.link.send(m.Register(self.member, self.view.broker, self.view.version)):
            self.counts["sent"] += 1
            self.counts["lost"] += self._waits
            self._waits = True
            self._due_s = now + self._heartbeat_s * (1.0 if self.counts["sent"] > 1 else self._first_part)

    def put(self, number: int) -> None:
        """Queue a job."""
        attempt = m.Attempt(self.member.incarnation, "r", number)
        self.link.send(m.Put(m.Job(attempt, self.member.address, [number % 1000] * JOB_TOKENS, 0, 60.0)))

    def _hear(self, now: float, message: m.Message) -> None:
        if isinstance(message, m.Peers):
            self._waits = False
            first, before = not self.view.version, len(self.view.members)
            self.view.follow(message.broker)
            if not self.view.apply(message):
                self._due_s = now
            elif first and self.member.role.prefills:
                self.link.send(m.Credit(1, 0))
            self.counts["expelled"] += max(0, before - len(self.view.members))
        elif isinstance(message, m.Heard):
            self._waits = False
        elif isinstance(message, m.PutReply):
            self.counts["refused"] += message.refusal is not None
        elif isinstance(message, m.Offer):
            self.counts["offers"] += 1
            self.link.ended(message.job.attempt)
            self.link.send(m.Credit(1, message.serial))


@dataclass
class Fleet:
    """The members of one broker."""
    broker: ZmqBroker | NatsBroker
    heartbeat_s: float
    members: list[LightMember] = field(default_factory=list)

    async def add(self, count: int) -> None:
        """So many more, which register at the same moment; their later heartbeats are spread."""
        links = []
        for number in range(len(self.members), len(self.members) + count):
            links.append((number, await self.broker.link(f"{number:032x}")))
        now = time.monotonic()
        self.members += [LightMember(number, link, now, self.heartbeat_s) for number, link in links]

    async def run(self, until: Callable[[float], bool]) -> float:
        """Let time pass until that is so at a moment. Returns the seconds."""
        began = time.monotonic()
        while True:
            now = time.monotonic()
            for one in self.members:
                one.step(now)
            if until(now):
                return now - began
            if now > began + DEADLINE_S:
                raise TimeoutError(f"not within {DEADLINE_S:g} s")
            await asyncio.sleep(STEP_S)

    async def run_for(self, seconds: float) -> tuple[float, float]:
        """Let so much time pass. Returns the broker's CPU seconds and the seconds of the clock."""
        began, cpu_s = time.monotonic(), cpu(self.broker.process)
        took_s = await self.run(lambda now: now >= began + seconds)
        return cpu(self.broker.process) - cpu_s, took_s

    async def run_until_all_know(self) -> float:
        """Until everybody lists everybody."""
        return await self.run(lambda now: all(len(one.view.members) == len(self.members) for one in self.members))

    def count(self, name: str) -> int:
        """Over all members."""
        return sum(one.counts[name] for one in self.members)

    def update_bytes(self) -> int:
        """Of all updates of the registry that have come."""
        return sum(one.link.received_bytes[m.Peers] for one in self.members)

    async def close(self) -> None:
        """Close all connections, and end the broker."""
        try:
            await asyncio.gather(*(one.link.close() for one in self.members))
        finally:
            self.broker.close()


def cpu(process: psutil.Process) -> float:
    """CPU seconds of a process."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(kind: str, size: int, heartbeat_s: float, ttl_s: float, seconds: float) -> dict[str, float]:
    """All figures of one size."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(BROKERS[kind](Path(folder), ttl_s), heartbeat_s)
        try:
            broker_s, members_s, began = cpu(fleet.broker.process), cpu(psutil.Process()), time.monotonic()
            await fleet.add(size)
            await fleet.run_until_all_know()
            figures = {"members": size, "heartbeat_s": heartbeat_s, "ttl_s": ttl_s,
                       "entry_bytes": len(msgspec.msgpack.encode(fleet.members[0].member)),
                       "joined_s": time.monotonic() - began}
            figures["joined_broker_cpu_s"] = cpu(fleet.broker.process) - broker_s
            figures["joined_members_cpu_s"] = cpu(psutil.Process()) - members_s
            await fleet.run_for(3.0)

            sent_bytes = fleet.broker.sent_bytes(fleet.members)
            cpu_s, took_s = await fleet.run_for(seconds)
            figures["idle_percent"] = 100 * cpu_s / took_s
            figures["idle_bytes_per_s"] = (fleet.broker.sent_bytes(fleet.members) - sent_bytes) / took_s

            update_bytes = fleet.update_bytes()
            await fleet.add(1)
            figures["one_join_s"] = await fleet.run_until_all_know()
            await fleet.run_for(1.0)
            if kind == "vllm-pd":
                figures["one_join_bytes"] = fleet.update_bytes() - update_bytes

            decodes = [one for one in fleet.members if one.member.role.decodes]
            before = {name: fleet.count(name) for name in ("offers", "expelled", "lost", "sent")}
            cpu_before_s, began, jobs = cpu(fleet.broker.process), time.monotonic(), 0

            def put_due(now: float) -> bool:
                nonlocal jobs
                while jobs < min(now - began, seconds) * JOBS_PER_S:
                    decodes[jobs % len(decodes)].put(jobs)
                    jobs += 1
                return now >= began + seconds

            took_s = await fleet.run(put_due)
            figures["jobs_percent"] = 100 * (cpu(fleet.broker.process) - cpu_before_s) / took_s
            settled = time.monotonic() + SETTLE_S
            await fleet.run(lambda now: now >= settled or fleet.count("offers") - before["offers"] == jobs)
            since = {name: fleet.count(name) - value for name, value in before.items()}
            figures |= {"jobs": jobs, "lost_jobs": jobs - since["offers"], "heartbeats": since["sent"],
                        "lost_heartbeats": since["lost"], "expelled": since["expelled"]}
            return {name: round(value, 3) for name, value in figures.items()}
        finally:
            await fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", choices=list(BROKERS), default="vllm-pd")
    parser.add_argument("--members", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--heartbeat-s", type=float, default=1.0)
    parser.add_argument("--ttl-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--json", type=argument_file, metavar="FILE",
                        help="also write the figures to this file; those in it of other sizes and brokers stay")
    arguments = parser.parse_args()
    if min(arguments.members) < 2 or min(arguments.heartbeat_s, arguments.ttl_s, arguments.seconds) <= 0:
        parser.error("--members must be at least 2, all times more than 0")
    console, found = Console(width=150), []
    for size in arguments.members:
        found.append(asyncio.run(measure(arguments.broker, size, arguments.heartbeat_s, arguments.ttl_s,
                                         arguments.seconds)))
        console.print(str(found[-1]), style="dim")
    names = [name for name in found[0] if name not in ("heartbeat_s", "ttl_s", "entry_bytes")]
    console.print(table([name.replace("_", " ") for name in names],
                        [[f"{one[name]:,.10g}" for name in names] for one in found]))
    if arguments.json:
        path = Path(arguments.json)
        before = json.loads(path.read_text()) if path.is_file() and path.stat().st_size else {}
        by_size = before.get(arguments.broker, {}) | {str(one["members"]): one for one in found}
        write_json(path, before | {arguments.broker: by_size})


if __name__ == "__main__":
    main()
