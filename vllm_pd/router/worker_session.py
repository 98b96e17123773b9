# SPDX-License-Identifier: Apache-2.0
"""The router's own requests to workers (probes, models, where events are), by the client that forwards requests.

It has as much of the interface of `aiohttp.ClientSession` as those requests use, with the bounds of `WorkerClient` in
place of aiohttp's: aiohttp keeps every interim response, 48 MiB of them hold the loop for seconds. It follows no
redirect, asks for no compression, and uses a connection for one request only.
"""
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Literal

from vllm_pd.router.worker_client import TryFailed, WorkerClient, WorkerResponse, WorkerResponseBroken
from vllm_pd.router.workers import WorkerFailure


class WorkerAnswer:
    """The answer to a request of the router's own. `content` is the answer, too."""

    def __init__(self, reply: WorkerResponse) -> None:
        self.status = reply.status
        self.headers = reply.headers
        self.content = self
        self._reply = reply

    async def readany(self) -> bytes:
        """Further bytes of the body; empty at its end. Raises OSError."""
        try:
            return await self._reply.chunk()
        except WorkerResponseBroken as broken:
            raise ConnectionError(str(broken)) from broken


class WorkerSession:
    """See the module. Connections are made within `connect_timeout_s`, `tls` is used for https. Belongs to the router's
    event loop."""

    def __init__(self, connect_timeout_s: float, tls: ssl.SSLContext) -> None:
        self._client = WorkerClient(connect_timeout_s, tls, max_connections=0)  # so that none is kept

    def get(self, url: str, headers: Mapping[str, str],
            allow_redirects: Literal[False]) -> contextlib.AbstractAsyncContextManager[WorkerAnswer]:
        """As `request`."""
        return self.request("GET", url, None, headers)

    @contextlib.asynccontextmanager
    async def request(self, method: str, url: str, data: bytes | None,
                      headers: Mapping[str, str]) -> AsyncIterator[WorkerAnswer]:
        """Send a request. The context gives the answer when its head has come, and ends the connection. Raises OSError,
        the kernel's own where it has made no connection, TimeoutError where there is none in time."""
        parts = urllib.parse.urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        sent = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        try:
            reply = await self._client.send(method.encode(), base, parts.path.encode(),
                                            [*sent, (b"connection", b"close")], data or b"")
        except TryFailed as failure:
            cause = failure.__cause__
            if isinstance(cause, OSError):
                raise cause from None
            raise (TimeoutError if failure.kind is WorkerFailure.CONNECT else ConnectionError)(str(failure)) from None
        finally:
            self._client.forget(base)  # none is idle, but the client remembers each worker
        try:
            yield WorkerAnswer(reply)
        finally:
            reply.close()
