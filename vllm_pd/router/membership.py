# SPDX-License-Identifier: Apache-2.0
"""Which engines are behind the router: from the command line, from an operator, from a broker's registry.

An engine in the registry joins if it decodes, has an HTTP address and does not drain. In the order prefill-first, and
for a metaserver, those that only prefill join too, as prefill engines. An engine leaves at once when it drains or
changes between the two. One that is missing from the registry stays while its probes succeed, and leaves after
`registry_patience_s` if they don't: a broker that has just started knows no engines yet, and a broker may have lost its
connection to one. While the broker does not answer, all workers stay. A worker that the command line or an operator has
named leaves while the registry has its engine as one that drains or only prefills, and comes back after that.
"""
import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

import zmq

from vllm_pd.broker.changes import RegistryView
from vllm_pd.broker.members import list_members
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.protocol.messages import Member
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import RouterOptions, parse_worker
from vllm_pd.router.workers import RouterWorker, Workers, WorkerSource, WorkerState
from vllm_pd.rpc import sockets
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.locality import is_here

logger = logging.getLogger("vllm.pd.router")

MAX_DISMISSED = 4096
_NAMED = (WorkerSource.STATIC, WorkerSource.OPERATOR)


class Membership:
    """Adds and removes workers. `problem` says why the registry can't be read; empty where it can. `members`: the
    engines in it that can be reached, of any role; `unwanted`: the URLs of those among them that must get no clients'
    requests, also where another source names them. `on_update` are called when these may have changed. Belongs to the
    router's event loop."""

    def __init__(self, options: RouterOptions, workers: Workers, metrics: RouterMetrics) -> None:
        self._options = options
        self._workers = workers
        self._metrics = metrics
        self._missing_since: dict[str, float] = {}
        self._dismissed: OrderedDict[str, None] = OrderedDict()  # incarnations that an operator has removed
        self._left_out: dict[str, WorkerSource] = {}  # of `_NAMED`, while the registry has no use for them
        self._task: asyncio.Task | None = None
        self._context: zmq.Context | None = None  # for all readings of the registry
        self._known = RegistryView()
        self._elsewhere: tuple[str, ...] = ()
        self._unreachable: tuple[str, ...] = ()
        self.problem = ""
        self.members: tuple[Member, ...] = ()
        self.unwanted: frozenset[str] = frozenset()
        self.on_update: list[Callable[[], None]] = []

    def start(self) -> None:
        """Add the static workers, and begin to follow the registry."""
        for url in self._options.workers:
            self._workers.add(url, WorkerSource.STATIC)
        for url in self._options.prefill_workers:
            self._workers.add(url, WorkerSource.STATIC, prefills=True)
        if self._options.broker is not None:
            self._context = sockets.started_context()
            self._task = asyncio.get_running_loop().create_task(self._follow(), name="registry")
            self._task.add_done_callback(_ended)

    async def close(self) -> None:
        """Stop following the registry."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._context is not None:  # also ends a reading that its thread has not finished
            await asyncio.to_thread(self._context.term)

    def add(self, url: object) -> RouterWorker | None:
        """Add a worker for an operator. Returns None where there are too many. Raises ConfigError for an invalid URL,
        and for an engine that would be left out at once."""
        name = parse_worker("url", url)
        if name in self.unwanted and not self.problem and self._workers.get(name) is None:
            raise ConfigError("url", name, "by the registry this engine drains or only prefills: add it when it "
                              "decodes, or to a router without --broker")
        worker = self._workers.add(name, WorkerSource.OPERATOR)
        if worker is not None and worker.incarnation is not None:
            self._dismissed.pop(worker.incarnation, None)
        return worker

    def remove(self, url: object) -> bool:
        """Remove a worker for an operator. Returns whether it existed. If it came from the registry, it does not join
        again while its process lives. Raises ConfigError for an invalid URL."""
        name = parse_worker("url", url)
        worker = self._workers.get(name)
        was_left_out = self._left_out.pop(name, None) is not None
        if was_left_out:
            for member in self.members:
                if member.http.rstrip("/") == name:
                    self._dismiss(member.incarnation)
        elif worker is not None and worker.incarnation is not None:
            self._dismiss(worker.incarnation)
        return self._workers.remove(name) or was_left_out

    def _dismiss(self, incarnation: str) -> None:
        self._dismissed[incarnation] = None
        if len(self._dismissed) > MAX_DISMISSED:
            self._dismissed.popitem(last=False)

    def update(self, members: list[Member], now_s: float) -> None:
        """Add and remove workers so that they fit the registry's present `members`."""
        members = self._reachable(members)
        self.members = tuple(members)
        wanted: dict[str, Member] = {}
        unwanted: set[str] = set()
        for member in filter(lambda member: member.http, members):
            is_wanted = self._has_use_for(member) and not member.draining
            try:
                url = parse_worker("http", member.http)
            except ConfigError as error:
                if is_wanted:
                    logger.warning("engine %s can't be reached: %s", member.incarnation, error)
                continue
            if is_wanted:
                wanted[url] = member
            if not is_wanted or not member.role.decodes:
                unwanted.add(url)
        self.unwanted = frozenset(url for url in unwanted if url not in wanted or not wanted[url].role.decodes)
        self._follow_named(self.unwanted)
        present = {member.incarnation for member in members}
        taken = {member.http.rstrip("/") for member in members if member.http} - wanted.keys()
        for url, member in wanted.items():
            self._join(url, member)
        for worker in self._workers:
            if worker.source is not WorkerSource.REGISTRY or self._fits(worker, wanted.get(worker.url)):
                self._missing_since.pop(worker.url, None)
            elif (worker.url in wanted or worker.incarnation in present or worker.url in taken
                  or self._is_missing_too_long(worker, now_s)):
                logger.info("worker %s has left", worker.url)
                self._missing_since.pop(worker.url, None)
                self._workers.remove(worker.url)
        for callback in self.on_update:
            callback()

    def _reachable(self, members: list[Member]) -> list[Member]:
        unreachable = [member for member in members if _keeps_to_its_loopback(member)]
        addresses = tuple(member.address for member in unreachable)
        if addresses and addresses != self._unreachable:
            logger.warning("engines of other machines are left out, whose servers listen at the loopback there, %s: "
                           "give each the --host by which this machine reaches it", ", ".join(addresses[:8]))
        self._unreachable = addresses
        return [member for member in members if member not in unreachable]

    def _note_elsewhere(self, addresses: tuple[str, ...]) -> None:
        if addresses and addresses != self._elsewhere:
            logger.warning("engines with addresses of other machines are left out: the registry is read without "
                           "keys, so anybody on this machine may have named them, %s: run vllm-pd keys FILE and give "
                           "every broker, engine and router that file", ", ".join(addresses[:8]))
        self._elsewhere = addresses

    def _follow_named(self, unwanted: frozenset[str]) -> None:
        """Of the workers that the command line or an operator has named, leave out those that must get no clients'
        requests, and take back those that may again."""
        for worker in self._workers:
            if worker.source in _NAMED and not worker.prefills and worker.url in unwanted:
                logger.info("worker %s is left out: by the registry it drains or only prefills", worker.url)
                self._left_out[worker.url] = worker.source
                self._workers.remove(worker.url)
        for url, source in list(self._left_out.items()):
            if url not in unwanted and self._workers.get(url) is None and self._workers.add(url, source):
                logger.info("worker %s is back", url)
                del self._left_out[url]

    def _join(self, url: str, member: Member) -> None:
        worker = self._workers.get(url)
        if worker is not None:
            worker.incarnation = member.incarnation
            self._dismissed.pop(member.incarnation, None)  # an operator has added it again
        elif member.incarnation not in self._dismissed:
            logger.info("worker %s has joined", url)
            self._workers.add(url, WorkerSource.REGISTRY, member.incarnation, prefills=not member.role.decodes)

    def _has_use_for(self, member: Member) -> bool:
        return member.role.decodes or self._options.asks_prefills

    @staticmethod
    def _fits(worker: RouterWorker, member: Member | None) -> bool:
        """Whether the registry has the worker's engine, for what it is used here."""
        return member is not None and worker.prefills is not member.role.decodes

    def _is_missing_too_long(self, worker: RouterWorker, now_s: float) -> bool:
        since_s = self._missing_since.setdefault(worker.url, now_s)
        return worker.state is not WorkerState.UP and now_s - since_s >= self._options.registry_patience_s

    async def _follow(self) -> None:
        """The task that reads the registry every `registry_period_s`, in another thread, and updates the workers. While
        it can't be read, nobody counts as missing from it, and after a while no named one as unwanted."""
        loop = asyncio.get_running_loop()
        answered_at = loop.time()
        while True:
            try:
                listed = await asyncio.to_thread(list_members, self._options.broker, self._options.registry_timeout_s,
                                                 self._options.access, context=self._context, known=self._known)
                self._note_elsewhere(listed.elsewhere)
                self.update(list(listed.members), answered_at := loop.time())
                self.problem = ""
            except Exception as error:  # of a broker, a socket, a key file: the next reading may succeed
                if not self.problem:
                    logger.warning("the registry does not answer, all workers stay: %s", error,
                                   exc_info=not isinstance(error, PDError))
                self.problem = str(error) or repr(error)
                self._missing_since.clear()
                if loop.time() - answered_at >= self._options.registry_patience_s:
                    self._follow_named(frozenset())  # they may be new engines by now; probes say whether they answer
            self._metrics.registry_silent.set(bool(self.problem))
            await asyncio.sleep(self._options.registry_period_s)


def _keeps_to_its_loopback(member: Member) -> bool:
    """Whether this engine is on another machine, and says that its server is on the loopback: at ours is something
    else."""
    try:
        host = urlsplit(member.http).hostname or ""
    except ValueError:
        return False
    return (host == "localhost" or is_loopback(host)) and not is_here(member.address)


def _ended(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("unexpected error: the registry is not followed any more", exc_info=task.exception())
