# SPDX-License-Identifier: Apache-2.0
"""Trying ports before anything is started, so that a taken one is an error of the first second and not of the last."""

import socket
from collections.abc import Iterable

from vllm_pd.errors import ConfigError


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen at (host, port) now. A port in TIME_WAIT counts as free, as it does for servers."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def require_free(key: str, host: str, ports: Iterable[int]) -> None:
    """Raises ConfigError naming `key` and the first of `ports` on which something listens already."""
    for port in ports:
        if not is_free(host, port):
            raise ConfigError(key, f"{host}:{port}", "that port is in use: stop what listens there, or write another "
                              "one")


def take_free_run(host: str, count: int) -> int:
    """The first of `count` ports in a row that were free a moment ago."""
    while True:
        first = take_free(host)
        if first + count <= 65536 and all(is_free(host, port) for port in range(first, first + count)):
            return first


def take_free(host: str) -> int:
    """A port that was free a moment ago. The caller listens on it at once; another process might come first."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
