# SPDX-License-Identifier: Apache-2.0
"""A listening socket whose only message is that its process exists, and non-blocking probes of those of others.

The socket stays open as long as anything of the engine can write to a peer's memory. It does not die with the control
thread: then nobody accepts, which is no proof of anything. A child that was forked, and so could write as well, shares
it; a program that was started by `exec` does not. `close` is for an engine that ends while its process goes on.

Who connects is told a digest of the incarnation: it proves the name to those who know it and tells it to nobody else.
No thread: `fileno` is to be polled together with the caller's other sockets, and `turn` never blocks.
"""
import contextlib
import errno
import hashlib
import os
import select
import socket
from urllib.parse import urlsplit

from vllm_pd.liveness.rules import Answer

PROBE_TIMEOUT_S = 0.5
MAX_PROBES = 64
BACKLOG = 128
ACCEPTS_A_TURN = 64
_MAGIC = b"vllm-pd lifeline\n"
GREETING_BYTES = len(_MAGIC) + hashlib.sha256().digest_size

_open: set[socket.socket] = set()  # so that no forgotten reference closes one


def greeting(incarnation: str) -> bytes:
    """What that engine's lifeline says."""
    return _MAGIC + hashlib.sha256(_MAGIC + incarnation.encode()).digest()


class Lifeline:
    """The one of this engine, on a free port of `host`. Raises OSError where that host can't be listened at."""

    def __init__(self, incarnation: str, host: str):
        self._greeting = greeting(incarnation)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._spare = _spare()
        _open.add(self._socket)
        bound = f"[{host}]" if family == socket.AF_INET6 else host
        self.address = f"tcp://{bound}:{self._socket.getsockname()[1]}"

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._socket.fileno()

    def turn(self) -> None:
        """Greet those who wait, a bounded number of them."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                guest, _ = self._socket.accept()
            except OSError as error:  # nobody waits, or who waited is gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return
            try:
                guest.setblocking(False)
                guest.send(self._greeting)
            except OSError:
                pass  # its probe ends without an answer
            finally:
                guest.close()

    def close(self) -> None:
        """Nothing of this engine can write any more, although its process lives. Idempotent."""
        _open.discard(self._socket)
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _turn_away(self) -> None:
        """No descriptor is left. Who waits would keep the socket readable, and its poller awake, for ever."""
        if self._spare >= 0:
            os.close(self._spare)
            with contextlib.suppress(OSError):
                self._socket.accept()[0].close()
            self._spare = _spare()


def _spare() -> int:
    """A descriptor to give away when there are no more; -1 where there is none now."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class _Probe:
    """One connection attempt, until its answer or its deadline."""

    def __init__(self, incarnation: str, until: float, connection: socket.socket):
        self.incarnation = incarnation
        self.until = until
        self.connection = connection
        self.connected = False
        self.received = b""


class Prober:
    """Probes of other engines' lifelines, `MAX_PROBES` at a time. Used by one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._probes: dict[int, _Probe] = {}
        self._answers: list[tuple[str, Answer]] = []

    def fileno(self) -> int:
        """What to poll for reading: it is ready when a probe has news."""
        return self._epoll.fileno()

    def room(self) -> int:
        """How many more probes may be begun."""
        return MAX_PROBES - len(self._probes)

    def begin(self, now: float, incarnation: str, address: str) -> None:
        """Connect to that lifeline; `turn` will have the answer."""
        try:
            url = urlsplit(address)
            family, kind, protocol, _, where = socket.getaddrinfo(
                url.hostname, url.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        except (OSError, ValueError):  # no address of a socket, or no descriptor left for one
            self._answers.append((incarnation, Answer.NOTHING))
            return
        code = connection.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._answers.append((incarnation, _meaning(code)))
            return
        self._probes[connection.fileno()] = _Probe(incarnation, now + PROBE_TIMEOUT_S, connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def turn(self, now: float) -> list[tuple[str, Answer]]:
        """(incarnation, answer) of every probe that has ended since the last call."""
        for descriptor, _ in self._epoll.poll(0):
            self._advance(self._probes[descriptor])
        for probe in [probe for probe in self._probes.values() if probe.until <= now]:
            self._end(probe, Answer.NOTHING)
        answers, self._answers = self._answers, []
        return answers

    def next_deadline(self) -> float | None:
        """When `turn` is due although nothing came."""
        if self._answers:
            return 0.0
        return min((probe.until for probe in self._probes.values()), default=None)

    def close(self) -> None:
        """Give all probes up."""
        for probe in list(self._probes.values()):
            self._end(probe, Answer.NOTHING)
        self._epoll.close()

    def _advance(self, probe: _Probe) -> None:
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
            self._end(probe, Answer.NOTHING)
            return
        probe.received += data
        if not data or len(probe.received) > GREETING_BYTES:
            self._end(probe, _reading(probe))

    def _end(self, probe: _Probe, answer: Answer) -> None:
        del self._probes[probe.connection.fileno()]
        self._epoll.unregister(probe.connection.fileno())
        probe.connection.close()
        self._answers.append((probe.incarnation, answer))


def _meaning(code: int) -> Answer:
    return Answer.REFUSED if code == errno.ECONNREFUSED else Answer.NOTHING


def _reading(probe: _Probe) -> Answer:
    if len(probe.received) != GREETING_BYTES or not probe.received.startswith(_MAGIC):
        return Answer.NOTHING
    return Answer.GREETED if probe.received == greeting(probe.incarnation) else Answer.OTHER
