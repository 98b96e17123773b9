# SPDX-License-Identifier: Apache-2.0
"""One request to a server that may be slow, broken or hostile: with a deadline for all of it and a bound for its bytes.
"""
import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_pd.errors import ConfigError
from vllm_pd.router.responses import Headers, find
from vllm_pd.router.worker_session import WorkerSession

API_KEY_VARIABLE = "VLLM_API_KEY"
MIB = 1 << 20


@dataclass(frozen=True)
class Page:
    """An answer, whatever its status."""
    status: int
    body: bytes
    headers: Headers

    def header(self, name: str) -> str | None:
        """The value of the first header of this name, which is in small letters."""
        value = find(self.headers, name.encode())
        return None if value is None else value.decode("latin-1")


class PageReader:
    """Reads pages. Belongs to one event loop."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._session = WorkerSession(connect_timeout_s, ssl.create_default_context())

    async def read(self, url: str, timeout_s: float, max_bytes: int, body: bytes | None = None,
                   headers: Mapping[str, str] | None = None) -> Page:
        """GET, or with a body of JSON POST. Raises OSError where there is no whole answer: TimeoutError after
        `timeout_s`, ConnectionError where it has more than `max_bytes`."""
        sent = {**(headers or {}), **({} if body is None else {"content-type": "application/json"})}
        parts: list[bytes] = []
        left = max_bytes
        async with asyncio.timeout(timeout_s):
            method = "GET" if body is None else "POST"
            async with self._session.request(method, url, body, sent) as answer:
                while part := await answer.readany():
                    left -= len(part)
                    if left < 0:
                        raise ConnectionError(f"the answer has more than {max_bytes / MIB:g} MiB")
                    parts.append(part)
                return Page(answer.status, b"".join(parts), answer.headers)


def authorization(key: str | None) -> dict[str, str]:
    """The header with a server's API key; none without one."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def api_key(option: str, given: str | None) -> str | None:
    """The API key of an option, or of $VLLM_API_KEY where the option is not given. Raises ConfigError for one that no
    header can hold."""
    key = given if given is not None else os.environ.get(API_KEY_VARIABLE) or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        raise ConfigError(option, "***", "write a key of printable ASCII, or leave the option out")
    return key
