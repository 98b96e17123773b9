# SPDX-License-Identifier: Apache-2.0
"""Responses that the router itself writes, and which headers it passes on."""
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
                        b"trailers", b"transfer-encoding", b"upgrade", b"proxy-connection"))
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
MAX_PAUSE_S = 60.0  # for a worker's Retry-After
_EXPLANATIONS = frozenset((b"x-vllm-pd-explain", b"x-vllm-pd-worker"))
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-vllm-pd-explain"}


@dataclass(frozen=True)
class RouterResponse:
    """A complete response: status, body, headers with names in lower case."""
    status: int
    body: bytes
    headers: Headers = field(default_factory=list)

    @classmethod
    def of_json(cls, value: object, status: int = 200) -> "RouterResponse":
        """A response with this value as its JSON body."""
        return cls(status, json.dumps(value).encode(), [(b"content-type", b"application/json")])


def request_headers(headers: Iterable[tuple[bytes, bytes]], authorization: bytes | None = None) -> Headers:
    """The headers to send to a worker: all except those of one connection. `authorization` replaces the client's;
    an empty one only removes it."""
    drop = _NOT_FORWARDED | _named_by_connection(headers)
    kept = [(name, value) for name, value in headers if name not in drop]
    if authorization is not None:
        kept = [(name, value) for name, value in kept if name != b"authorization"]
        if authorization:
            kept.append((b"authorization", authorization))
    return kept


def response_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers to send back to the client, names in lower case: all except those of one connection, and those in
    which only the router explains itself."""
    lower = [(name.lower(), value) for name, value in headers]
    drop = HOP_BY_HOP | _EXPLANATIONS | _named_by_connection(lower)
    return [(name, value) for name, value in lower if name not in drop]


def find(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of the header `name` (lower case), None where there is none."""
    return next((value for have, value in headers if have == name), None)


def retry_after_s(headers: Iterable[tuple[bytes, bytes]], default_s: float) -> float:
    """For how many seconds a worker's Retry-After asks for a pause, MAX_PAUSE_S at most; `default_s` without one."""
    after = find(headers, b"retry-after")
    return min(float(after) if after is not None and after.isdigit() else default_s, MAX_PAUSE_S)


def compact(value: Mapping[str, object]) -> bytes:
    """JSON for use in a header: one line of ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    return {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
