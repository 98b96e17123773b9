# SPDX-License-Identifier: Apache-2.0
"""Reading a page of a server: its metrics, its health. No proxy is ever used: the engines are on this machine."""

import http.client
import urllib.parse


def fetch(url: str, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Status and body of GET `path`. Raises OSError when the server does not answer."""
    parsed = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parsed.hostname, parsed.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode(errors="replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}{path}: {error!r}") from error
    finally:
        connection.close()


def is_healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether the server at `url` answers /health with success."""
    try:
        return fetch(url, "/health", timeout_s)[0] == 200
    except OSError:
        return False
