# SPDX-License-Identifier: Apache-2.0
"""Which clients may connect to a server with keys: the answers to libzmq's requests (ZAP, zeromq.org RFC 27).

The requests come over a socket inside the context, and the thread that owns the server answers them in its own loop.
"""
import collections

import zmq
from zmq.utils import z85

from vllm_pd.rpc.keys import Keys

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"vllm-pd"
MAX_REQUESTS = 64
_VERSION = b"1.0"
_REQUEST_FRAMES = 7  # version, id, domain, address, identity, mechanism, key


class Gate:
    """To be made before the servers of the context are bound. When its socket is readable, call `answer`."""

    def __init__(self, context: zmq.Context, keys: Keys):
        self.counters: collections.Counter[str] = collections.Counter()
        self._known = z85.decode(keys.public)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def answer(self) -> None:
        """Answer all requests that wait, a bounded number of them."""
        for _ in range(MAX_REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            allowed = (len(frames) == _REQUEST_FRAMES and frames[0] == _VERSION and frames[2] == DOMAIN
                       and frames[5] == b"CURVE" and frames[6] == self._known)
            self.counters["peer_admitted" if allowed else "peer_refused"] += 1
            number = frames[1] if len(frames) > 1 else b""
            code, text = (b"200", b"OK") if allowed else (b"400", b"another key")
            self.socket.send_multipart([_VERSION, number, code, text, b"", b""])

    def close(self) -> None:
        """Close the socket. No connection is admitted afterwards."""
        self.socket.close()
