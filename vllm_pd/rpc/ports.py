# SPDX-License-Identifier: Apache-2.0
"""Checking and choosing ports before anything is started, so that one in use is an error within the first second."""

import errno
import itertools
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from vllm_pd.errors import ConfigError

_LOWEST = 10_000
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count(int.from_bytes(os.urandom(4), "big"))  # random, so that processes try different ports


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen at (host, port) now. A port in TIME_WAIT counts as free, as it does for servers."""
    return _bind_error(host, port) is None


def require_free(key: str, host: str, ports: Iterable[int]) -> None:
    """Raises ConfigError, naming `key` and the port, if no server could listen at one of `ports` now."""
    for port in ports:
        error = _bind_error(host, port)
        if error is not None:
            raise ConfigError(key, _shown(host, port), _bind_cure(error))


def _bind_error(host: str, port: int) -> OSError | None:
    """Why no server could listen at (host, port) now; None where one could."""
    try:
        with _probe(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def _probe(host: str) -> socket.socket:
    """A TCP socket of the family of this address. Raises OSError where the system lacks it."""
    if ":" not in host:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # `::` as servers have it
    return probe


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind_cure(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "that port is in use: stop what listens there, or write another one"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{error.strerror}: write a port at which you may listen"
    return f"{error.strerror}: write an address of this machine"


def require_free_front(address: str, engine_id: str) -> None:
    """Raises ConfigError where another engine listens at this `ipc://` address: ZeroMQ would take it away from it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except (FileNotFoundError, ConnectionRefusedError):  # what a dead engine has left is no engine
            return
        except OSError:  # another user's
            pass
    raise ConfigError("engine_id", engine_id, "another engine of this machine has it: leave it out of "
                      "--kv-transfer-config, or make a KVTransferConfig for each engine")


def reserve(key: str, host: str, ports: Iterable[int]) -> list[socket.socket]:
    """Keep these ports from all others on this machine that reserve theirs, until the returned sockets are closed. A
    port in use is not enough to see: engines need long until they listen, and vLLM's may share a port (SO_REUSEPORT),
    so that each of two fleets would get requests of the other. Raises ConfigError, naming `key` and the port."""
    reserved: list[socket.socket] = []
    for port in ports:
        reserved.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            reserved[-1].bind(f"\0vllm-pd-port-{host}:{port}")  # no file: the name ends with the socket
        except OSError as error:
            release(reserved)
            raise ConfigError(key, _shown(host, port), "another `vllm-pd up` has that port: end it, or write another "
                              "one") from error
    return reserved


def release(reserved: Iterable[socket.socket]) -> None:
    """Let others have the ports that `reserve` has reserved."""
    for each in reserved:
        each.close()


def take_free_run(host: str, count: int) -> int:
    """The first of `count` consecutive ports that were free a moment ago."""
    while True:
        first = take_free(host)
        if first + count <= 65536 and all(is_free(host, port) for port in range(first, first + count)):
            for _ in range(count - 1):
                next(_turns)
            return first


def take_free(host: str) -> int:
    """A port that was free a moment ago, to be listened on soon. It is outside of the range from which the kernel gives
    ports to connections, and this process does not return it again for a long time."""
    count = _kernels_first() - _LOWEST
    for turn in itertools.islice(_turns, 1000 if count > 1000 else 0):
        port = _LOWEST + turn % count
        if is_free(host, port):
            return port
    with _probe(host) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _kernels_first() -> int:
    """The lowest port that the kernel gives to sockets that ask for any port."""
    try:
        return int(_KERNELS_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's own default
