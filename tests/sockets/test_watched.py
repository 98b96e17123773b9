# SPDX-License-Identifier: Apache-2.0
"""B22: a connection to a peer counts from the peer's first message on it to its end, whoever has the address then."""
import contextlib
import socket
import threading
import time

import pytest
import zmq

from tests.waiting import wait_for
from vllm_pd.rpc import sockets
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.watched import MAX_DOUBTS, WatchedConnection


class Server:
    """A peer, at an address of its own or at that of another."""

    def __init__(self, context, keys, gate, address="tcp://127.0.0.1:0"):
        self.socket = sockets.server(context, address, keys)
        self.address = sockets.endpoint(self.socket)
        self._gate = gate

    def answer(self, connection, times=1):
        """Answer one message of it, and have it receive the first answer."""
        connection.socket.send(b"question")
        wait_for(self._asked)
        route = self.socket.recv_multipart()[0]
        for _ in range(times):
            self.socket.send_multipart([route, b"answer"])
        wait_for(lambda: connection.socket.poll(10))
        assert sockets.receive(connection.socket) == [b"answer"]

    def end(self, connection):
        """Close it; its connections end, with keys only once the gate has let go of them."""
        self.socket.close(linger=0)
        wait_for(lambda: not connection.is_proven(), meanwhile=self.admit)

    def _asked(self):
        self.admit()
        return self.socket.poll(10)

    def admit(self):
        if self._gate is not None:
            self._gate.answer()


@pytest.fixture(params=[False, True], ids=["open", "with keys"])
def keys(request, tmp_path):
    return Keys.load(str(Keys.make(tmp_path / "cluster.keys"))) if request.param else None


@pytest.fixture
def serve(keys):
    """Makes servers; all end with the test."""
    context = zmq.Context()
    gate = None if keys is None else Gate(context, keys)
    yield lambda *address: Server(context, keys, gate, *address)
    context.destroy(linger=0)


def test_b22_a_connection_counts_while_it_is_open_and_the_peer_has_spoken_on_it(keys, serve):
    context, server = zmq.Context(), serve()
    connection = WatchedConnection(context, server.address, keys)
    server.answer(connection)
    assert not connection.is_proven(), "whoever answered was another"
    connection.heard()
    assert connection.is_proven() and connection.is_proven()
    server.end(connection)
    connection.heard()
    assert not connection.is_proven(), "what it had sent before came late"
    server = serve(server.address)
    server.answer(connection)
    assert not connection.is_proven(), "another process may have the address"
    connection.heard()
    assert not connection.is_proven(), "the peer may have sent that on the connection before"
    connection.emptied()
    connection.heard()
    assert connection.is_proven()
    connection.close()
    context.term()  # waits for every socket


def test_b22_what_a_dead_peer_has_sent_does_not_speak_for_who_has_its_address(keys, serve):
    """Its messages are received only after the connection was made anew, to another process."""
    context, server = zmq.Context(), serve()
    connection = WatchedConnection(context, server.address, keys)
    server.answer(connection, 300)
    connection.heard()
    assert connection.may_be_open()
    server.end(connection)
    connection.emptied()  # no effect: there is no connection
    server = serve(server.address)
    wait_for(connection.may_be_open, meanwhile=server.admit)
    for _ in range(299):
        assert sockets.receive(connection.socket) == [b"answer"]
        connection.heard()
        assert not connection.is_proven()
    looks = [connection.may_be_open() for _ in range(MAX_DOUBTS + 1)]
    assert not looks[-1] and not connection.may_be_open()
    assert sockets.receive(connection.socket) is None
    connection.emptied()
    server.answer(connection)
    connection.heard()
    assert connection.may_be_open(), "now somebody has spoken on it; who it was, the sender's name says"
    connection.close()
    context.term()


def test_b81_a_monitor_that_is_full_keeps_nobody_from_closing():
    """libzmq's thread waits in it, until it is read."""
    context, listener = zmq.Context(), socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def accept():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                listener.accept()[0].close()

    accepting = threading.Thread(target=accept)
    accepting.start()
    connection = WatchedConnection(context, f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    connection.monitor.setsockopt(zmq.RCVHWM, 1)
    connection.socket.setsockopt(zmq.RECONNECT_IVL, 1)
    time.sleep(0.5)
    connection.close()
    stop.set()
    listener.close()
    accepting.join(5)
    context.term()


def test_b81_what_is_no_address_leaves_no_socket():
    context = zmq.Context()
    for address in ("tcp://", "nonsense"):
        with pytest.raises(zmq.ZMQError):
            WatchedConnection(context, address)
    context.term()


def test_many_connections_are_opened_and_closed_and_leave_nothing():
    """Also such as reach nobody, and one after the other at the descriptor of the one before."""
    context = zmq.Context()
    for _ in range(5):
        connections = [WatchedConnection(context, "tcp://127.0.0.1:1") for _ in range(20)]
        for one in connections:
            one.close(linger_ms=10)
    context.term()
