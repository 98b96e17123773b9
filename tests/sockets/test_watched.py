# SPDX-License-Identifier: Apache-2.0
"""B22: a connection to a peer counts from the peer's first message on it to its end, whoever has the address then."""
import pytest
import zmq

from tests.waiting import wait_for
from vllm_pd.rpc import sockets
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.watched import WatchedConnection


class Server:
    """A peer, at an address of its own or at that of another."""

    def __init__(self, context, keys, gate, address="tcp://127.0.0.1:0"):
        self.socket = sockets.server(context, address, keys)
        self.address = sockets.endpoint(self.socket)
        self._gate = gate

    def answer(self, connection):
        """Answer one message of it, and have it receive that."""
        connection.socket.send(b"question")
        wait_for(self._asked)
        self.socket.send_multipart([self.socket.recv_multipart()[0], b"answer"])
        wait_for(lambda: connection.socket.poll(10))
        assert sockets.receive(connection.socket) == [b"answer"]

    def end(self, connection):
        """Close it; its connections end, with keys only once the gate has let go of them."""
        self.socket.close(linger=0)
        wait_for(lambda: not connection.is_proven(), meanwhile=self._admit)

    def _asked(self):
        self._admit()
        return self.socket.poll(10)

    def _admit(self):
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
    connection.heard()
    assert not connection.is_proven(), "there is none yet"
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
    assert connection.is_proven()
    connection.close()
    context.term()  # waits for every socket


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
