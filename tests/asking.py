# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to a server, and its answer."""
import http.client
import json


def request(url: str, method: str, path: str, body: dict | None = None, timeout_s: float = 120.0,
            **headers: str) -> tuple[int, dict, bytes]:
    """Status, headers with names in small letters, and body."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body),
                           {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()
