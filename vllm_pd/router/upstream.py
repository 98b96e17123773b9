# SPDX-License-Identifier: Apache-2.0
"""The connections to the workers: one request out, one answer back, in the bytes in which it comes."""
import asyncio
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from vllm_pd.router.answers import Answer, Headers
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.workers import Failure

KEEP_ALIVE_S = 4.0  # less than the 5 s after which vLLM's server hangs up
READ_BYTES = 1 << 18
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")


class TryFailed(Exception):
    """No answer came from this worker. `stale`: on a connection that had been used before and may have been closed
    meanwhile, so that it says nothing about the worker. `answer`: what it said instead, where it said something."""

    def __init__(self, kind: Failure, detail: str, stale: bool = False, answer: Answer | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.stale = stale
        self.answer = answer


class StreamBroken(Exception):
    """The answer ended before its end."""


class Reply:
    """An answer whose head has come. It must be read to its end or closed."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = list(response.raw_headers)

    async def chunk(self) -> bytes:
        """What has come since the last call, waited for; empty at the end. Raises StreamBroken."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise StreamBroken(repr(error)) from error

    def close(self) -> None:
        """Hang up, unless the answer has been read to its end: the worker then gives the request up."""
        if not self._response.closed:
            self._response.close()


class Upstream:
    """The client of all workers. Belongs to the router's event loop."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, skip_auto_headers=_NOT_ADDED,
            trust_env=False, trace_configs=[_reuse_trace()], read_bufsize=READ_BYTES)

    async def send(self, method: str, url: str, headers: Headers, body: bytes) -> Reply:
        """Send a request and wait for the head of its answer. Raises TryFailed."""
        context = SimpleNamespace(reused=False)
        pairs = CIMultiDict([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])
        try:
            response = await self._session.request(method, URL(url, encoded=True), headers=pairs, data=body or None,
                                                  allow_redirects=False, trace_request_ctx=context)
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise TryFailed(Failure.CONNECT, str(error)) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TryFailed(Failure.BROKEN, repr(error), stale=context.reused) from error
        return Reply(response)

    async def close(self) -> None:
        """Hang up everywhere."""
        await self._session.close()


def _reuse_trace() -> aiohttp.TraceConfig:
    async def on_reuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(on_reuse)
    return trace
