# SPDX-License-Identifier: Apache-2.0
"""Addresses that an operator has this engine try, to see which path between two machines is broken.

There is no thread: the caller polls `fileno` together with its other sockets; `poll` never blocks. One order is carried
out at a time, with all its connections at once; a bounded number of others wait. Nothing is sent to anybody: a listener
sees a connection that ends.
"""
import collections
import errno
import select
import socket
from collections.abc import Sequence
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from vllm_pd.protocol.messages import Trial
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.tcp import begin_connect

TRIAL_S = 3.0  # then an address is silent: as long as UCX tries (`vllm_pd.transfer.nixl.agent`)
MAX_ORDERS = 64  # that wait
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)

T = TypeVar("T")


class _Order(Generic[T]):
    """One order that is carried out until that time."""

    def __init__(self, asker: T, until: float):
        self.asker = asker
        self.until = until
        self.trials: dict[str, Trial] = {}
        self.open: dict[int, tuple[str, socket.socket]] = {}  # by descriptor: its address, and the connection


class AddressTrials(Generic[T]):
    """Used by one thread. `local_only`: nothing beyond the loopback is tried. `asker` is the caller's name for whoever
    is to get the answer."""

    def __init__(self, local_only: bool) -> None:
        self._local_only = local_only
        self._epoll = select.epoll()
        self._waiting: collections.deque[tuple[T, Sequence[str]]] = collections.deque(maxlen=MAX_ORDERS)
        self._empty: list[tuple[T, dict[str, Trial]]] = []  # answers to orders without addresses
        self._order: _Order[T] | None = None

    def fileno(self) -> int:
        """What to poll for reading: it is readable when a connection was made, or was not."""
        return self._epoll.fileno()

    def add(self, asker: T, addresses: Sequence[str]) -> None:
        """Try these addresses; `poll` returns what has come of it. Of more than MAX_ORDERS that wait the oldest is
        forgotten: whoever gave it has gone by now."""
        if addresses:
            self._waiting.append((asker, addresses))
        else:
            self._empty = [*self._empty, (asker, {})][-MAX_ORDERS:]  # it waits for nobody's

    def poll(self, now: float) -> list[tuple[T, dict[str, Trial]]]:
        """(asker, what has come of each address) of the orders that have been carried out since the last call. At most
        one of them had addresses: each call begins one order, however many wait."""
        done, self._empty = self._empty, []
        if self._goes_on(now):
            done.append((self._order.asker, self._order.trials))
            self._order = None
        return done

    def next_timeout(self) -> float | None:
        """When `poll` is due although nothing is readable."""
        if self._empty:
            return 0.0
        if self._order is None:
            return 0.0 if self._waiting else None
        return self._order.until

    def close(self) -> None:
        """Give everything up."""
        self._waiting.clear()
        if self._order is not None:
            self._end_open()
        self._epoll.close()

    def _goes_on(self, now: float) -> bool:
        """Go on with the present order, or the next one. Returns whether one has been carried out."""
        if self._order is None:
            if not self._waiting:
                return False
            asker, addresses = self._waiting.popleft()
            self._order = _Order(asker, now + TRIAL_S)
            self._order.trials = {address: self._begin(address) for address in dict.fromkeys(addresses)}
        for descriptor, _ in self._epoll.poll(0):
            address, connection = self._order.open[descriptor]
            self._order.trials[address] = _meaning(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            self._end(descriptor)
        if now >= self._order.until:
            self._end_open()
        return not self._order.open

    def _begin(self, address: str) -> Trial:
        """Begin to connect. Returns what is known of it now."""
        try:
            if not address.startswith("tcp://") or self._local_only and not is_loopback(
                    urlsplit(address).hostname or ""):
                return Trial.FAILED
            connection = begin_connect(address)
        except OSError as error:
            return _meaning(error.errno)
        except ValueError:
            return Trial.FAILED
        try:
            self._epoll.register(connection.fileno(), select.EPOLLOUT)
        except OSError:  # the kernel has no room
            connection.close()
            return Trial.FAILED
        self._order.open[connection.fileno()] = address, connection
        return Trial.SILENT

    def _end_open(self) -> None:
        for descriptor in list(self._order.open):
            self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        self._order.open.pop(descriptor)[1].close()


def _meaning(code: int | None) -> Trial:
    if code == 0:
        return Trial.OPEN
    if code in _NO_ROUTE:
        return Trial.NO_ROUTE
    return {errno.ECONNREFUSED: Trial.REFUSED, errno.ETIMEDOUT: Trial.SILENT}.get(code, Trial.FAILED)
