# SPDX-License-Identifier: Apache-2.0
"""The addresses of the workers as a gateway wants them: `IP:PORT`, and `[IP]:PORT` for IPv6.

A worker whose URL has a name is looked up when it joins, and every `dns_period_s` after that, by the system's resolver.
While that fails the last address stays. A worker without an address gets no requests, nor does one whose URL has a
path, which a gateway would not add, or is https, which a gateway would not see in an address.
"""
import asyncio
import ipaddress
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from vllm_pd.router.workers import RouterWorker, Workers

logger = logging.getLogger("vllm.pd.picker")

THREADS = 4  # for look-ups, which may wait for a server


class WorkerEndpoints:
    """See the module. Follows `workers` from when it is made. Belongs to the event loop."""

    def __init__(self, workers: Workers, period_s: float, timeout_s: float) -> None:
        self._workers = workers
        self._period_s, self._timeout_s = period_s, timeout_s
        self._by_url: dict[str, str] = {}
        self._following: dict[str, asyncio.Task] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="picker-names")
        workers.on_join.append(self._joined)
        workers.on_end.append(self._ended)

    def of(self, worker: RouterWorker) -> str | None:
        """Where a gateway reaches the worker; None where that is not known."""
        return self._by_url.get(worker.url)

    def worker_at(self, endpoint: str) -> RouterWorker | None:
        """The worker with this endpoint; None where there is none."""
        return next((self._workers.get(url) for url, have in self._by_url.items() if have == endpoint), None)

    async def close(self) -> None:
        """Stop looking up."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _joined(self, worker: RouterWorker) -> None:
        parts = urlsplit(worker.url)
        if parts.path or parts.scheme == "https":
            logger.warning("worker %s gets no requests: a gateway would not %s", worker.url,
                           "add the path of its URL" if parts.path else "know from its address that it has TLS")
            return
        try:
            self._by_url[worker.url] = _endpoint(str(ipaddress.ip_address(parts.hostname)), parts.port)
        except ValueError:
            if worker.url not in self._following:
                self._following[worker.url] = asyncio.get_running_loop().create_task(
                    self._follow(worker.url, parts.hostname, parts.port), name=f"address of {worker.url}")

    def _ended(self, worker: RouterWorker) -> None:
        if self._workers.get(worker.url) is None:  # else another one has this URL
            self._by_url.pop(worker.url, None)
            following = self._following.pop(worker.url, None)
            if following is not None:
                following.cancel()

    async def _follow(self, url: str, name: str, port: int) -> None:
        """The task that looks a name up again and again. A problem is logged once."""
        loop, problem = asyncio.get_running_loop(), ""
        while True:
            try:
                found = await asyncio.wait_for(loop.run_in_executor(self._threads, _addresses, name, port),
                                               self._timeout_s)
                endpoints = [_endpoint(address, port) for address in found]
                if self._by_url.get(url) not in endpoints:  # of several the first one is kept
                    self._by_url[url] = endpoints[0]
                problem = ""
            except (OSError, UnicodeError, TimeoutError) as error:
                if not problem:
                    logger.warning("the address of worker %s is not found (%s): %s", url, error or "no answer in time",
                                   "it keeps the last one" if url in self._by_url else "it gets no requests")
                problem = str(error) or "late"
            await asyncio.sleep(self._period_s)


def _addresses(name: str, port: int) -> list[str]:
    """The addresses behind a name, those of IPv4 first. Raises OSError, UnicodeError. May take seconds."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [where[0].partition("%")[0]
            for family, *_, where in sorted(found, key=lambda one: one[0] != socket.AF_INET)]


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
