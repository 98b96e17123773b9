# SPDX-License-Identifier: Apache-2.0
"""TCP without waiting: connections that are only begun, and where a process listens."""
import errno
import os
import socket
from urllib.parse import urlsplit

import psutil

from vllm_pd.rpc.addresses import url_of


def begin_connect(url: str) -> socket.socket:
    """A connection to `tcp://ADDRESS:PORT` that is being made. Once it can be written to, its SO_ERROR says what has
    come of it. Looks no name up. Raises OSError with the kernel's number where it has failed at once, or no descriptor
    is left for it, ValueError for what is no address."""
    parts = urlsplit(url)
    if not (parts.hostname and parts.port):
        raise ValueError(f"{url} is no address and port")
    family, kind, protocol, _, where = socket.getaddrinfo(
        parts.hostname, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    code = connection.connect_ex(where)
    if code not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(code, os.strerror(code), url)
    return connection


def listening(pid: int | None = None) -> set[str]:
    """The addresses at which this process listens, or that one, as `tcp://ADDRESS:PORT`. Raises psutil.AccessDenied for
    one of another user, psutil.NoSuchProcess."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {url_of(*one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}
