# SPDX-License-Identifier: Apache-2.0
"""Non-blocking TCP probes of other engines' lifelines.

There is no thread: the caller polls `fileno` together with its other sockets; `poll` never blocks.
"""
import errno
import select
import socket

from vllm_pd.peer.liveness.lifeline import GREETING_BYTES, MAGIC, greeting
from vllm_pd.peer.liveness.rules import ProbeAnswer
from vllm_pd.rpc.tcp import begin_connect

PROBE_TIMEOUT_S = 0.5
MAX_PROBES = 64


class _Probe:
    """One connection attempt, until its answer or its deadline."""

    def __init__(self, incarnation: str, until: float, connection: socket.socket):
        self.incarnation = incarnation
        self.until = until
        self.connection = connection
        self.connected = False
        self.received = b""


class TcpProbes:
    """Probes of other engines' lifelines, `MAX_PROBES` at a time. Used by one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._probes: dict[int, _Probe] = {}
        self._answers: list[tuple[str, ProbeAnswer]] = []

    def fileno(self) -> int:
        """What to poll for reading: it is readable when a probe has made progress."""
        return self._epoll.fileno()

    def count_free(self) -> int:
        """How many more probes may be started."""
        return MAX_PROBES - len(self._probes)

    def start(self, now: float, incarnation: str, address: str) -> None:
        """Connect to this lifeline; `poll` returns the answer."""
        try:
            connection = begin_connect(address)
        except (OSError, ValueError) as error:
            self._answers.append((incarnation, _meaning(getattr(error, "errno", None))))
            return
        self._probes[connection.fileno()] = _Probe(incarnation, now + PROBE_TIMEOUT_S, connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def poll(self, now: float) -> list[tuple[str, ProbeAnswer]]:
        """(incarnation, answer) of every probe that has ended since the last call."""
        for descriptor, _ in self._epoll.poll(0):
            self._advance(self._probes[descriptor])
        for probe in [probe for probe in self._probes.values() if probe.until <= now]:
            self._end(probe, ProbeAnswer.NOTHING)
        answers, self._answers = self._answers, []
        return answers

    def next_timeout(self) -> float | None:
        """When `poll` is due although nothing is readable."""
        if self._answers:
            return 0.0
        return min((probe.until for probe in self._probes.values()), default=None)

    def close(self) -> None:
        """Give all probes up."""
        for probe in list(self._probes.values()):
            self._end(probe, ProbeAnswer.NOTHING)
        self._epoll.close()

    def _advance(self, probe: _Probe) -> None:
        """The connection has an event: it is made, refused or closed by the other end, or bytes have come. Bytes end
        the probe only where they are more than a greeting; else it is judged when the other end has closed."""
        connection = probe.connection
        if not probe.connected:
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(probe, _meaning(code))
                return
            probe.connected = True
            self._epoll.modify(connection.fileno(), select.EPOLLIN)
        try:
            data = connection.recv(GREETING_BYTES + 1 - len(probe.received))
        except BlockingIOError:
            return
        except OSError:
            self._end(probe, ProbeAnswer.NOTHING)
            return
        probe.received += data
        if not data or len(probe.received) > GREETING_BYTES:
            self._end(probe, _reading(probe))

    def _end(self, probe: _Probe, answer: ProbeAnswer) -> None:
        del self._probes[probe.connection.fileno()]
        self._epoll.unregister(probe.connection.fileno())
        probe.connection.close()
        self._answers.append((probe.incarnation, answer))


def _meaning(code: int | None) -> ProbeAnswer:
    return ProbeAnswer.REFUSED if code == errno.ECONNREFUSED else ProbeAnswer.NOTHING


def _reading(probe: _Probe) -> ProbeAnswer:
    if len(probe.received) != GREETING_BYTES or not probe.received.startswith(MAGIC):
        return ProbeAnswer.NOTHING
    return ProbeAnswer.GREETED if probe.received == greeting(probe.incarnation) else ProbeAnswer.OTHER
