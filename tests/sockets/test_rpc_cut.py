# SPDX-License-Identifier: Apache-2.0
"""A connection to the broker whose network is cut for a while, and comes back: TCP may take as long again to notice."""
from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from vllm_pd.rpc import sockets
from vllm_pd.rpc.sockets import SendResult
from vllm_pd.rpc.watched import WatchedConnection

WAIT_S = 30.0


class CutWire:
    """Passes connections on to an address. What it has when it is cut stays silent for ever, as a connection does whose
    packets are lost, and whose next retry is far away. New ones wait until it is mended."""

    def __init__(self, to: str) -> None:
        self._to = int(to.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._is_cut = self._ends = False
        self._selector = selectors.DefaultSelector()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut = True

    def mend(self) -> None:
        """For connections that are made from now on."""
        self._selector, self._is_cut = selectors.DefaultSelector(), False

    def close(self) -> None:
        self._ends = True
        self._thread.join(WAIT_S)
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            end.close()

    def _run(self) -> None:
        self._listener.settimeout(0.01)
        while not self._ends:
            if self._is_cut:
                time.sleep(0.01)
                continue
            with contextlib.suppress(TimeoutError):
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self.accepted += 1
                self._pairs.append((near, far))
                for end, other in ((near, far), (far, near)):
                    self._selector.register(end, selectors.EVENT_READ, other)
            for key, _ in self._selector.select(0.01) if self._selector.get_map() else ():
                data = key.fileobj.recv(1 << 16)
                if data and not self._is_cut:
                    key.data.sendall(data)
                else:
                    self._selector.unregister(key.fileobj)


@pytest.fixture(autouse=True)
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SILENT_MS", 2000)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server(context: zmq.Context) -> zmq.Socket:
    return sockets.server(context, "tcp://127.0.0.1:0")


@pytest.fixture
def wire(server: zmq.Socket) -> Iterator[CutWire]:
    wire = CutWire(sockets.endpoint(server))
    yield wire
    wire.close()


def arrives(client: zmq.Socket, server: zmq.Socket, word: bytes, within_s: float) -> bool:
    """Whether the server gets this word, which the client sends again and again."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        sockets.send(client, word)
        if server.poll(50) and sockets.receive(server)[1] == word:
            return True
    return False


def test_b107_a_silent_connection_to_the_broker_is_replaced(context, server, wire):
    """B107: by heartbeats. While it is silent long enough nothing can be sent, so its owner knows that it is away."""
    client = sockets.client(context, wire.address, only_connected=True)
    assert arrives(client, server, b"before", WAIT_S)
    wire.cut()
    deadline_s = time.monotonic() + WAIT_S
    while sockets.send(client, b"lost") is not SendResult.FULL:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    wire.mend()
    assert arrives(client, server, b"after", 10.0) and wire.accepted == 2


def test_b107_one_to_an_engine_on_another_machine_is_replaced(context, server, wire):
    """B107: and it is known at once that it has ended."""
    changes = []
    connection = WatchedConnection(context, wire.address, None, lambda: changes.append(connection.is_open()), True)
    assert arrives(connection.socket, server, b"before", WAIT_S)
    wire.cut()
    deadline_s = time.monotonic() + WAIT_S
    while changes != [True, False]:
        assert time.monotonic() < deadline_s, changes
        connection.read_monitor()
        time.sleep(0.05)
    wire.mend()
    assert arrives(connection.socket, server, b"after", 10.0) and wire.accepted == 2
    connection.read_monitor()
    assert changes == [True, False, True]
    connection.close()


def test_b22_one_between_engines_of_a_machine_is_kept(context, server, wire):
    """B22: it shows that the peer lives, so only TCP ends it."""
    client = sockets.client(context, wire.address, only_connected=False)
    assert arrives(client, server, b"before", WAIT_S)
    wire.cut()
    time.sleep(sockets.SILENT_MS / 1000 + 2)
    wire.mend()
    assert not arrives(client, server, b"after", 3.0) and wire.accepted == 1


def test_a_broker_whose_thread_is_busy_is_not_silent(context, server):
    """libzmq's own threads answer."""
    client = sockets.client(context, sockets.endpoint(server), only_connected=True)
    assert arrives(client, server, b"before", WAIT_S)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    time.sleep(sockets.SILENT_MS / 1000 + 2)  # nobody reads or writes
    assert sockets.receive(monitor) is None and sockets.send(client, b"still") is SendResult.SENT
    client.disable_monitor()
