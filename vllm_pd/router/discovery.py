# SPDX-License-Identifier: Apache-2.0
"""Workers that the router finds by itself: by DNS names, which it looks up again and again, and in a file that changes.

A worker that a source names is added, and gets requests once a probe has passed. One that no source names any more
leaves: it gets no new requests and finishes its open ones. A source that can't be read changes nothing.

- DNS: a worker leaves when it has been absent from MISSES answers in a row and for ABSENT_S. A resolver may answer with
  some of the addresses only. Where one does, which is seen by workers that live and come back, a worker that lives
  stays. AAAA is asked for only where there is no A: of an engine with both addresses one URL is enough.
- The file: a worker leaves at once. A file in which anything is wrong, or that names nobody, changes nothing. It is
  read when it has been the same at two looks, since it may be half-written.

`SourceView` decides who leaves, and is pure. Answers of DNS are read in threads: a long one takes tens of milliseconds.
The file is looked at in a thread of its own, which may wait without end, as at a file server that is gone.
"""
import asyncio
import concurrent.futures
import ipaddress
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, NamedTuple

import dns.exception
import dns.resolver

from vllm_pd.errors import ConfigError
from vllm_pd.router.metrics import RouterMetrics
from vllm_pd.router.options import (
    DnsSource,
    RouterOptions,
    is_dns_name,
    parse_dns,
    parse_dns_server,
    parse_worker,
    parse_worker_lines,
)
from vllm_pd.router.workers import Workers, WorkerSource, WorkerState
from vllm_pd.rpc.addresses import url_of

logger = logging.getLogger("vllm.pd.router")

MAX_WORKERS_OF_SOURCE = 1024  # of one question to DNS, or of the file
MAX_FILE_BYTES = 1 << 20
MISSES = 3
ABSENT_S = 30.0
PARTIAL_S = 600.0  # for so long answers count as partial after one was
LEFT_S = 120.0  # a worker that is named again so soon after it has left shows that too
EDNS_BYTES = 1232  # of an answer over UDP: fits any path without fragments
FILE_TIMEOUT_S = 5.0
FILE_OPTION = "--workers-file"
_DISCOVERED = (WorkerSource.DNS, WorkerSource.FILE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # an address of IPv4 in its last four bytes
_UNUSABLE = tuple(map(ipaddress.ip_network, ("0.0.0.0/8", "240.0.0.0/4")))
_NO_EDNS = ("FORMERR", "NOTIMP")  # answers of a server that does not know it
_Signature = tuple[int, int, int, int, int]


class _Absence(NamedTuple):
    """A worker that the last answers lack: so many, since then. `others`: one of these named other workers."""
    answers: int
    since_s: float
    others: bool


class SourceView:
    """The workers of one source, by its answers. One leaves when `misses` answers in a row lack it, and it has been
    absent for `absent_s`. The source is partial for PARTIAL_S after it has named a worker again that lives all the
    time, or that left less than LEFT_S ago: from a partial one, a worker that lives leaves only when an answer names
    nobody. `lives` says whether a worker with this URL does. Pure: times are passed in, of one clock."""

    def __init__(self, misses: int = 1, absent_s: float = 0.0,
                 lives: Callable[[str], bool] = lambda url: False) -> None:
        self.urls: frozenset[str] = frozenset()
        self._misses = misses
        self._absent_s = absent_s
        self._lives = lives
        self._absent: dict[str, _Absence] = {}
        self._left_s: dict[str, float] = {}  # when a worker left that answers with others lacked
        self._partial_until_s = -math.inf

    def answered(self, urls: Collection[str], now_s: float) -> None:
        """The source has named these workers, and only these."""
        back = [url for url in urls if url in self._absent and self._absent[url].others and self._lives(url)]
        self._left_s = {url: at_s for url, at_s in self._left_s.items() if now_s - at_s < LEFT_S}
        if back or not self._left_s.keys().isdisjoint(urls):
            self._partial_until_s = now_s + PARTIAL_S
        absent = {}
        for url in self.urls.difference(urls):
            before = self._absent.get(url, _Absence(0, now_s, False))
            now = _Absence(before.answers + 1, before.since_s, before.others or bool(urls))
            if not self._is_absent_too_long(url, now, bool(urls), now_s):
                absent[url] = now
            elif now.others:
                self._left_s[url] = now_s
        self._absent = absent
        self.urls = frozenset(urls).union(absent)

    def _is_absent_too_long(self, url: str, absence: _Absence, others: bool, now_s: float) -> bool:
        if absence.answers < self._misses or now_s - absence.since_s < self._absent_s:
            return False
        return not (others and now_s < self._partial_until_s and self._lives(url))


class SourceState(StrEnum):
    """Whether a source can be read."""
    WAITING = "waiting"  # for its first answer
    OK = "ok"
    EMPTY = "empty"
    FAILED = "failed"


class _Source:
    """One source as operators see it. `text`: the option. `problem` names it too, and is empty where there is none."""

    def __init__(self, text: str, metrics: RouterMetrics) -> None:
        self.text = text
        self.state = SourceState.WAITING
        self.problem = f"{text} is not read yet"
        self._metric = metrics.source_problem.labels(text)
        self._metric.set(0)

    def note(self, state: SourceState, problem: str, *, again: bool = False) -> None:
        """It is in this state now. `again`: to be logged also if it was in that state already."""
        before, self.state, self.problem = self.state, state, problem
        self._metric.set(state is not SourceState.OK)
        if state is SourceState.OK:
            if before in (SourceState.EMPTY, SourceState.FAILED):
                logger.info("%s names workers again", self.text)
        elif state is not before or again:
            logger.warning("%s", problem)


class _DnsQuestions(_Source):
    """What is asked for one --worker-dns, and what has been answered: `views` by the kind of record, of which a later
    one is asked for only where the earlier one names nobody."""

    def __init__(self, source: DnsSource, options: RouterOptions, metrics: RouterMetrics,
                 lives: Callable[[str], bool]) -> None:
        super().__init__(f"--worker-dns {source.text}", metrics)
        self._source = source
        self._options = options
        kinds = ("A", "AAAA") if source.port is not None else ("SRV", )
        self.views = {kind: SourceView(MISSES, ABSENT_S, lives) for kind in kinds}

    async def ask(self, executor: concurrent.futures.Executor) -> None:
        """Ask once, and note the answer. A failure changes nothing."""
        loop = asyncio.get_running_loop()
        found = False
        for kind, view in self.views.items():
            try:
                urls = frozenset() if found else await loop.run_in_executor(executor, look_up, self._options,
                                                                            self._source, kind)
            except Exception as error:  # of a resolver, a socket, a library
                self._note_failure(kind, error)
                return
            view.answered(urls, loop.time())
            found = found or bool(urls)
            if not found and view.urls:  # they may be named again, so their other addresses must not join
                break
        if found:
            self.note(SourceState.OK, "")
        else:
            self.note(SourceState.EMPTY, f"{self.text} has no address that an engine can have" + (
                f": its workers leave in {ABSENT_S:.0f} s" if self._has_workers() else
                ", and no worker until it has one"))

    def _note_failure(self, kind: str, error: Exception) -> None:
        if not isinstance(error, (dns.exception.DNSException, OSError, ConfigError)) and (
                self.state is not SourceState.FAILED):
            logger.error("unexpected error while %s is looked up", self._source.name, exc_info=error)
        self.note(SourceState.FAILED, f"{self.text}: {kind} can't be looked up ({_brief(error)}): " + (
            "its workers stay" if self._has_workers() else "it has no worker yet"))

    def _has_workers(self) -> bool:
        return any(view.urls for view in self.views.values())


class WatchedFile:
    """The file of --workers-file. Its methods block; one thread at a time may call them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._before: _Signature | None = None
        self._done: _Signature | None = None

    def look(self) -> tuple[str, ...] | None:
        """The URLs in it, if it has changed since it was read and is the same as at the last look; else None. Raises
        ConfigError for what is in it, once, and OSError each time."""
        try:
            now = _signature(os.stat(self.path))
            settled, self._before = now == self._before, now
            return self.read() if settled and now != self._done else None
        except OSError:
            self._before = self._done = None
            raise

    def read(self) -> tuple[str, ...]:
        """The URLs in it, at least one. Raises ConfigError, OSError."""
        file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(file)
            self._done = _signature(found)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(FILE_OPTION, self.path, "it is no regular file: write the path of one")
            with open(file, "rb", closefd=False) as opened:
                content = opened.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(file)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(FILE_OPTION, self.path, f"it is longer than {MAX_FILE_BYTES} bytes: write one URL on "
                              "each line")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{FILE_OPTION} {self.path}, line {line}", content[error.start:error.end],
                              "it is no UTF-8: write URLs, and comments after #") from None
        urls = parse_worker_lines(f"{FILE_OPTION} {self.path}", text)
        if len(urls) > MAX_WORKERS_OF_SOURCE:
            raise ConfigError(FILE_OPTION, self.path, f"it names {len(urls)} workers: write {MAX_WORKERS_OF_SOURCE} at "
                              "most")
        if not urls:
            raise NoWorkers(FILE_OPTION, self.path, "it names no worker: write a URL on a line, like "
                            "http://10.0.0.5:8000")
        return urls


class NoWorkers(ConfigError):
    """The file can be read, and names nobody."""


class Discovery:
    """Adds and removes the workers that the sources name. `unwanted` returns URLs that are not to join by any source.
    Belongs to the router's event loop. Raises ConfigError for a file that exists and can't be used."""

    def __init__(self, options: RouterOptions, workers: Workers, metrics: RouterMetrics,
                 unwanted: Callable[[], Collection[str]]) -> None:
        self._options = options
        self._workers = workers
        self._unwanted = unwanted
        self._dns = [_DnsQuestions(parse_dns("--worker-dns", text), options, metrics, self._lives)
                     for text in options.worker_dns]
        self._file = WatchedFile(options.workers_file) if options.workers_file is not None else None
        self._file_view = SourceView()
        self._file_source: _Source | None = None
        self._dismissed: set[str] = set()  # whom an operator has removed while a source names them
        self._tasks: list[asyncio.Task] = []
        self._executor: concurrent.futures.Executor | None = None
        self._look: asyncio.Future[tuple[str, ...] | None] | None = None  # at the file; may never end
        self._full = False
        if self._file is not None:
            self._file_source = _Source(f"{FILE_OPTION} {self._file.path}", metrics)
            self._read_first()

    def start(self) -> None:
        """Begin to follow the sources."""
        loop = asyncio.get_running_loop()
        if self._dns:
            # One for each name, so that none waits for another one's resolver.
            self._executor = concurrent.futures.ThreadPoolExecutor(len(self._dns), thread_name_prefix="dns")
            self._tasks += [loop.create_task(self._follow_dns(one), name=one.text) for one in self._dns]
        if self._file is not None:
            self.apply()
            self._tasks.append(loop.create_task(self._follow_file(), name=self._file_source.text))
        for task in self._tasks:
            task.add_done_callback(_ended)

    async def close(self) -> None:
        """Stop following the sources. A thread that waits for a resolver ends by itself, within `dns_timeout_s`; one
        that waits for the file ends with the process at the latest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def dismiss(self, url: object) -> None:
        """An operator removes this worker: it does not join again until its sources have stopped naming it. Raises
        ConfigError for an invalid URL."""
        name = parse_worker("url", url)
        if name in self._named():
            self._dismissed.add(name)

    def as_json(self) -> dict[str, str]:
        """Each source, and what is wrong with it, or `ok`; for /workers."""
        sources = [*self._dns, *([self._file_source] if self._file_source is not None else [])]
        return {source.text: source.problem or SourceState.OK.value for source in sources}

    def _lives(self, url: str) -> bool:
        """Whether there is a worker that answers. One that an operator has removed counts as such: it must not be
        forgotten by a partial answer, and join at the next one."""
        worker = self._workers.get(url)
        return url in self._dismissed or worker is not None and worker.state is WorkerState.UP

    def _named(self) -> dict[str, WorkerSource]:
        """By URL: who names a worker."""
        named = dict.fromkeys(self._file_view.urls, WorkerSource.FILE)
        for questions in self._dns:
            for view in questions.views.values():
                named |= dict.fromkeys(view.urls, WorkerSource.DNS)
        return named

    def apply(self) -> None:
        """Add and remove workers so that they fit what the sources have named, and who is unwanted. To be called
        when the latter changes, too."""
        named = self._named()
        self._dismissed &= named.keys()
        wanted = named.keys() - self._dismissed - set(self._unwanted())
        for worker in self._workers:
            if worker.source in _DISCOVERED and worker.url not in wanted:
                logger.info("worker %s, known by %s, has left", worker.url, worker.source.value)
                self._workers.remove(worker.url)
        refused = False
        for url in sorted(wanted):
            if self._workers.get(url) is None:
                refused = self._workers.add(url, named[url]) is None
                if refused:
                    break
                logger.info("worker %s has joined, by %s", url, named[url].value)
        if refused and not self._full:
            logger.warning("there are %d workers, as many as there may be: the others that DNS or the file name are "
                           "left out", len(self._workers))
        self._full = refused

    async def _follow_dns(self, questions: _DnsQuestions) -> None:
        while True:
            await questions.ask(self._executor)
            self.apply()
            await asyncio.sleep(self._options.dns_period_s)

    async def _follow_file(self) -> None:
        while True:
            await asyncio.sleep(self._options.file_period_s)
            try:
                urls = await self._look_at_file()
            except (ConfigError, OSError) as error:
                self._note_file(error)
            else:
                if urls is not None:
                    self._file_view.answered(urls, asyncio.get_running_loop().time())
                    self._file_source.note(SourceState.OK, "")
            self.apply()

    async def _look_at_file(self) -> tuple[str, ...] | None:
        """As `WatchedFile.look`. Raises TimeoutError while a look takes longer than FILE_TIMEOUT_S; until it has ended
        there is no other one."""
        if self._look is None:
            self._look = _in_thread(self._file.look, "workers-file")
        done, _ = await asyncio.wait({self._look}, timeout=FILE_TIMEOUT_S)
        if not done:
            raise TimeoutError(f"it does not answer in {FILE_TIMEOUT_S:g} s: mend the file system that it is on")
        look, self._look = self._look, None
        return look.result()

    def _read_first(self) -> None:
        """A file that does not exist yet, or names nobody yet, is waited for."""
        try:
            self._file_view.answered(self._file.read(), 0.0)
            self._file_source.note(SourceState.OK, "")
        except (FileNotFoundError, NoWorkers) as error:
            self._note_file(error)
        except OSError as error:
            raise ConfigError(FILE_OPTION, self._file.path, f"{error.strerror or error}: write the path of a file that "
                              "the router may read") from None

    def _note_file(self, error: Exception) -> None:
        stay = "its workers stay" if self._file_view.urls else "it has no worker yet"
        state = SourceState.EMPTY if isinstance(error, NoWorkers) else SourceState.FAILED
        source = "" if isinstance(error, ConfigError) else f"{self._file_source.text}: "
        problem = f"{source}{_brief(error)} ({stay})"
        self._file_source.note(state, problem, again=problem != self._file_source.problem)


def look_up(options: RouterOptions, source: DnsSource, kind: str) -> frozenset[str]:
    """The URLs that the present answer to one question stands for; none where the name has no such record. Blocks for
    `dns_timeout_s` at most. Raises DNSException, OSError where there is no answer, ConfigError for one with too
    many."""
    resolver = dns.resolver.Resolver(configure=options.dns_server is None)
    if options.dns_server is not None:
        address, resolver.port = parse_dns_server("--dns-server", options.dns_server)
        resolver.nameservers = [address]
    resolver.timeout = options.dns_timeout_s / 3
    # Without it some servers answer with as many records as 512 bytes have room for, and don't say that there are more.
    resolver.use_edns(0, 0, EDNS_BYTES)
    until_s = time.monotonic() + options.dns_timeout_s
    try:
        answer = _ask(resolver, source.name, kind, until_s)
    except dns.resolver.NXDOMAIN:
        return frozenset()
    records = [] if answer.rrset is None else list(answer.rrset)
    if len(records) > MAX_WORKERS_OF_SOURCE:
        raise ConfigError("--worker-dns", source.text, f"it has {len(records)} records, and {MAX_WORKERS_OF_SOURCE} "
                          "may be: divide the engines among several names")
    if source.port is None:
        urls = [_url_of_target(str(one.target), one.port, source.scheme) for one in records]
    else:
        urls = [_url_of_address(one.address, source.port, source.scheme) for one in records]
    return frozenset(url for url in urls if url is not None)


def _ask(resolver: dns.resolver.Resolver, name: str, kind: str, until_s: float) -> dns.resolver.Answer:
    """Of servers that don't know EDNS, without it."""
    try:
        return _resolve(resolver, name, kind, until_s)
    except dns.resolver.NoNameservers as error:
        if not any(why in _NO_EDNS for _, _, _, why, _ in error.kwargs["errors"]):
            raise
        resolver.use_edns(False)
        return _resolve(resolver, name, kind, until_s)


def _resolve(resolver: dns.resolver.Resolver, name: str, kind: str, until_s: float) -> dns.resolver.Answer:
    return resolver.resolve(name, kind, raise_on_no_answer=False, lifetime=max(0.0, until_s - time.monotonic()),
                            search=True)


def _url_of_address(text: str, port: int, scheme: str) -> str | None:
    """None where no engine can be reached by this address from another machine."""
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    meant = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address
    if (meant.is_unspecified or meant.is_multicast or meant.is_link_local
            or any(meant in network for network in _UNUSABLE)):
        return None
    return url_of(str(address), port, scheme)


def _url_of_target(target: str, port: int, scheme: str) -> str | None:
    """None where a record of SRV says that there is no such service, or is invalid."""
    name = target.removesuffix(".").lower()
    return url_of(name, port, scheme) if port and is_dns_name(name, len(name)) else None


def _signature(found: os.stat_result) -> _Signature:
    """What changes when a file is written or another one takes its place."""
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _brief(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file: write it"
    if isinstance(error, ConfigError):
        return str(error)  # short, and its cure comes last
    return str(error)[:300] or repr(error)


def _in_thread(function: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """Call it in a thread that the end of the process does not wait for, as it would for one of an executor."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)


def _ended(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("unexpected error: %s is not followed any more", task.get_name(), exc_info=task.exception())
