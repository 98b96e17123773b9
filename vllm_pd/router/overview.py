# SPDX-License-Identifier: Apache-2.0
"""What the router shows of the fleet at `/fleet`, for the page at `/`: its workers, those that leave, and the other
engines of the registry, with what it knows of each and with figures of their pages of metrics.

Engines are read only when somebody asks, and then at most once in PERIOD_S for all who ask: these get the same answer.
Without anybody who asks nothing is read. MAX_READ engines are, READERS at a time. Pages are parsed in a thread of the
overview's own, one at a time: one that takes long holds up the overview, and nothing else of the router.
"""
import asyncio
import concurrent.futures
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_pd.errors import ConfigError
from vllm_pd.events.messages import EngineLoad
from vllm_pd.protocol.messages import Member, Role
from vllm_pd.router.events.subscriber import read_whole
from vllm_pd.router.options import parse_worker
from vllm_pd.router.outline import UNREADABLE
from vllm_pd.router.worker_session import WorkerSession
from vllm_pd.router.workers import RouterWorker, Workers, WorkerState

logger = logging.getLogger("vllm.pd.router")

PERIOD_S = 2.0
READ_TIMEOUT_S = 1.5  # of one engine's page
ALL_TIMEOUT_S = 5.0
READERS = 16
MAX_READ = 256
MAX_ROWS = 1024
MAX_PAGE_BYTES = 4 << 20
MAX_OWN_LINES = 1 << 16  # of all figures of vLLM: thousands for each data-parallel rank
MAX_LINES = 4096  # of those that are shown: some dozens for each data-parallel rank
MAX_LINE_BYTES = 512
MAX_WANTED_BYTES = 256 << 10  # of these lines together: the parser takes some tenths of a second for so many
MAX_CHARS = 300
MAX_MODELS = 16
ROWS_A_TURN = 64  # of the event loop
FORGOTTEN_S = 60.0  # after so long, a rate since the last reading says nothing of now
_STAGES = ("queue", "prefill", "transfer", "first_step")
_COUNTED = {"remote_per_s": ("vllm:pd_decisions_total", {"decision": "remote"}),
            "local_per_s": ("vllm:pd_decisions_total", {"decision": "local"}),
            "jobs_per_s": ("vllm:pd_jobs_total", {}), "bytes_per_s": ("vllm:pd_transfer_bytes_total", {})}
_PRESENT = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting",
            "parked_blocks": "vllm:pd_parked_blocks", "fenced_blocks": "vllm:pd_quarantined_blocks",
            "sending_blocks": "vllm:pd_sending_blocks", "held_blocks": "vllm:pd_held_blocks"}
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_ATTEMPTS, _HANDOVER = "vllm:pd_attempts_total", "vllm:pd_handover_seconds"
_DEGRADED, _DEAD = "vllm:pd_degraded", "vllm:pd_control_dead"
_FAILED = tuple({"outcome": outcome} for outcome in ("failed", "expired"))
_WANTED = tuple(name.encode() for name in (*_PRESENT.values(), *_KV_USED, _HITS, _QUERIES, _ATTEMPTS,
                                           f"{_HANDOVER}_sum", f"{_HANDOVER}_count", _DEGRADED, _DEAD,
                                           *(name for name, _ in _COUNTED.values())))
_OURS = b"\nvllm:"  # what all of them begin with
# What of a reading is needed after it: for the rates of the next one, and for an engine's state.
_KEPT: tuple[tuple[str, Mapping[str, str]], ...] = (
    *_COUNTED.values(), (_HITS, {}), (_QUERIES, {}), (_DEAD, {}), *((_ATTEMPTS, labels) for labels in _FAILED),
    *((f"{_HANDOVER}_{part}", {"stage": stage}) for part in ("sum", "count") for stage in _STAGES))


class EngineFigures:
    """The figures of one page of metrics that are shown, read at `at_s`: the labels and values of each, by name."""

    def __init__(self, samples: Mapping[str, list[tuple[Mapping[str, str], float]]], at_s: float) -> None:
        self.at_s = at_s
        self._samples = samples

    @classmethod
    def of(cls, page: bytes, at_s: float) -> "EngineFigures":
        """Raises ValueError for a page that can't be read, or has more figures than any engine."""
        lines = _wanted_lines(page)
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode()):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(samples, at_s)

    def values(self, name: str, **labels: str) -> list[float]:
        """Those of all samples of this name and labels."""
        return [value for have, value in self._samples.get(name, ()) if labels.items() <= have.items()]

    def sum(self, name: str, **labels: str) -> float:
        """Their sum; 0 where there is none."""
        return sum(self.values(name, **labels))

    def kept(self) -> "EngineFigures":
        """What of it is needed after it has been shown: some dozens of sums, however many samples there are."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for name, labels in _KEPT:
            if values := self.values(name, **labels):
                samples.setdefault(name, []).append((labels, sum(values)))
        if reason := self.degraded():
            samples[_DEGRADED] = [({"reason": reason}, 1.0)]
        return EngineFigures(samples, self.at_s)

    def degraded(self) -> str:
        """Why the engine says that it is degraded; empty where it is not."""
        return next((have.get("reason", "") or "degraded" for have, value in self._samples.get(_DEGRADED, ())
                     if value), "")


class FleetRow(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One engine. None: not known. `well`: nothing is wrong with it; `why` says what is, or what of it is not known.
    Rates, times and `failed_attempts` are of what was counted since the last reading, without one since its start."""
    engine: str = ""  # its incarnation in the registry
    url: str
    role: str
    source: str
    state: str
    why: str
    well: bool
    models: list[str] = []
    in_flight: int | None = None  # requests through this router
    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None  # 0 to 1
    parked_blocks: float | None = None
    fenced_blocks: float | None = None
    sending_blocks: float | None = None
    held_blocks: float | None = None
    remote_per_s: float | None = None
    local_per_s: float | None = None
    jobs_per_s: float | None = None
    bytes_per_s: float | None = None
    failed_attempts: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    first_step_s: float | None = None
    hit_rate: float | None = None


def figures_of(before: EngineFigures | None, now: EngineFigures) -> dict[str, float | None]:
    """The fields of a row that come from metrics. Pure."""
    shown: dict[str, float | None] = {field: now.sum(name) for field, name in _PRESENT.items() if now.values(name)}
    used = [value for name in _KV_USED for value in now.values(name)]
    shown["kv_used"] = max(used, default=None)

    def added(name: str, **labels: str) -> float:
        """Below 0 where the engine's counters have begun anew."""
        return now.sum(name, **labels) - (before.sum(name, **labels) if before is not None else 0.0)

    if before is not None and now.at_s > before.at_s:
        for field, (name, labels) in _COUNTED.items():
            if now.values(name) and (count := added(name, **labels)) >= 0:
                shown[field] = count / (now.at_s - before.at_s)
    if now.values(_ATTEMPTS):
        shown["failed_attempts"] = sum(max(0.0, added(_ATTEMPTS, **labels)) for labels in _FAILED)
    for stage in _STAGES:
        count, seconds = (added(f"{_HANDOVER}_{part}", stage=stage) for part in ("count", "sum"))
        shown[f"{stage}_s"] = seconds / count if count > 0 and seconds >= 0 else None
    hits, queries = added(_HITS), added(_QUERIES)
    shown["hit_rate"] = hits / queries if queries > 0 and 0 <= hits <= queries else None
    return shown


def load_shown(load: EngineLoad) -> dict[str, float | None]:
    """The fields of a row that come from a worker's reports of its load. Pure."""
    return {"running": load.running, "waiting": load.waiting, "parked_blocks": load.parked_blocks,
            "fenced_blocks": load.quarantined_blocks, "sending_blocks": load.sending_blocks,
            "kv_used": load.used_blocks / load.total_blocks if load.total_blocks else None}


class FleetOverview:
    """Belongs to the router's event loop. `members` returns the engines in the registry, `load_of` a worker's load and
    its age, `about` what else is shown of the router. `headers` go to engines."""

    def __init__(self, workers: Workers, session: WorkerSession, headers: Mapping[str, str],
                 members: Callable[[], Iterable[Member]], load_of: Callable[[str], tuple[EngineLoad | None, float]],
                 about: Callable[[], dict[str, Any]]) -> None:
        self._workers = workers
        self._session = session
        self._headers = headers
        self._members = members
        self._load_of = load_of
        self._about = about
        self._figures: dict[str, EngineFigures] = {}  # of the last reading, by URL
        self._fields: dict[str, dict[str, float | None]] = {}  # what they show
        self._problems: dict[str, str] = {}
        self._parsing = asyncio.Lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fleet")
        # The page that is being parsed, perhaps of a reading that has ended: the thread can't be stopped.
        self._parsed: asyncio.Future[tuple[EngineFigures, dict[str, float | None]]] | None = None
        self._body = b""
        self._read_s = -math.inf
        self._task: asyncio.Task[None] | None = None

    async def page(self) -> bytes:
        """The present overview as JSON, at most PERIOD_S old. Whoever asks while engines are read waits for that, for
        ALL_TIMEOUT_S at most."""
        if self._task is None and asyncio.get_running_loop().time() < self._read_s + PERIOD_S:
            return self._body
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._read(), name="fleet")
        await asyncio.shield(self._task)
        return self._body

    async def close(self) -> None:
        """End a reading that is under way. A page that is being parsed is bounded, so its thread ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self) -> None:
        try:
            began_s = asyncio.get_running_loop().time()
            before = {url: one for url, one in self._figures.items() if began_s - one.at_s < FORGOTTEN_S}
            self._figures, self._fields, self._problems = {}, {}, {}
            try:
                async with asyncio.timeout(ALL_TIMEOUT_S):
                    await self._scrape(self._urls(), before)
            except TimeoutError:
                logger.debug("the metrics of some engines were not read in %g s", ALL_TIMEOUT_S)
            rows = await self._make_rows()
            self._body = msgspec.json.encode({**self._about(), "engines": len(rows), "rows": rows[:MAX_ROWS]})
            self._read_s = asyncio.get_running_loop().time()
        finally:
            self._task = None

    async def _make_rows(self) -> list[FleetRow]:
        members = {_url_of(member) or member.address: member for member in self._members()}
        workers = [*self._workers, *self._workers.leaving]
        others = [(url, members[url]) for url in members.keys() - {worker.url for worker in workers}]
        rows: list[FleetRow] = []
        for start in range(0, max(len(workers), len(others)), ROWS_A_TURN):
            turn = slice(start, start + ROWS_A_TURN)
            rows += [self._row_of(worker, members.get(worker.url)) for worker in workers[turn]]
            rows += [self._row_of_member(url, member) for url, member in others[turn]]
            await asyncio.sleep(0)
        return sorted(rows, key=lambda row: (row.well, row.role == Role.PREFILL.value, row.url))

    def _urls(self) -> list[str]:
        """Whose metrics are read: of a large fleet, those of MAX_READ engines."""
        urls = dict.fromkeys(worker.url for worker in [*self._workers, *self._workers.leaving])
        urls |= dict.fromkeys(filter(None, map(_url_of, self._members())))
        return list(urls)[:MAX_READ]

    async def _scrape(self, urls: list[str], before: Mapping[str, EngineFigures]) -> None:
        waiting = iter(urls)

        async def work() -> None:
            for url in waiting:
                await self._scrape_one(url, before.get(url))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(READERS, len(urls))):
                group.create_task(work())

    async def _scrape_one(self, url: str, before: EngineFigures | None) -> None:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._session.get(
                    f"{url}/metrics", headers=self._headers, allow_redirects=False) as response:
                body = await read_whole(response.content, MAX_PAGE_BYTES)
            if response.status != 200:
                raise ConnectionError(str(response.status))
            now_s = asyncio.get_running_loop().time()
            self._figures[url], self._fields[url] = await self._parse(body, now_s, before)
        except TimeoutError:
            self._problems[url] = f"no answer in {READ_TIMEOUT_S:g} s"
        except (OSError, ValueError, *UNREADABLE) as error:
            self._problems[url] = str(error) or repr(error)
        except Exception as error:  # whatever an engine sends, the others are shown
            logger.debug("unexpected error while the metrics of %s are read", url, exc_info=True)
            self._problems[url] = repr(error)

    async def _parse(self, page: bytes, at_s: float,
                     before: EngineFigures | None) -> tuple[EngineFigures, dict[str, float | None]]:
        """One page at a time, so that none waits in the executor, where the end of its reading would leave it. Raises
        ValueError."""
        async with self._parsing:
            if self._parsed is not None:
                await asyncio.wait({self._parsed})
            self._parsed = asyncio.get_running_loop().run_in_executor(self._thread, _read_page, page, at_s, before)
            try:
                return await asyncio.shield(self._parsed)
            finally:
                if self._parsed.done():
                    self._parsed = None

    def _row_of(self, worker: RouterWorker, member: Member | None) -> FleetRow:
        role = member.role if member is not None else Role.PREFILL if worker.prefills else Role.DECODE
        load, age_s = self._load_of(worker.url)
        fields = load_shown(load) if load is not None and age_s < FORGOTTEN_S else {}
        fields |= self._fields.get(worker.url, {})
        state, why = self._state_of(worker)
        return FleetRow(engine=_shown(worker.incarnation or ""), url=_shown(worker.url),
                        role=role.value, source=worker.source.value, state=state, why=_shown(why),
                        well=state == WorkerState.UP.value,
                        models=[_shown(model) for model in sorted(worker.models)[:MAX_MODELS]],
                        in_flight=len(worker.in_flight), **fields)

    def _state_of(self, worker: RouterWorker) -> tuple[str, str]:
        """The worst that is known of a worker, and why. That its metrics can't be read is no fault of a worker."""
        if worker.leaving:
            return "leaving", f"{len(worker.in_flight)} open requests go on to their end"
        if worker.state is not WorkerState.UP:
            return worker.state.value, worker.problem
        if (own := self._own_state(worker.url)) is not None:
            return own
        return worker.state.value, self._unread(worker.url)

    def _own_state(self, url: str) -> tuple[str, str] | None:
        """What an engine says of itself, where it is not well."""
        figures = self._figures.get(url)
        if figures is None:
            return None
        if figures.sum(_DEAD):
            return "dead", "its control thread has ended: restart it"
        reason = figures.degraded()
        return ("degraded", reason) if reason else None

    def _unread(self, url: str) -> str:
        problem = self._problems.get(url) or ("" if url in self._figures else "not read")
        return problem and f"its metrics: {problem}"

    def _row_of_member(self, url: str, member: Member) -> FleetRow:
        """An engine of the registry that is no worker; `url` is its address where it has no URL."""
        fields = {"running": member.load.running, "waiting": member.load.waiting, **self._fields.get(url, {})}
        own = self._own_state(url)
        if own is not None:
            state, why = own
        elif member.draining:
            state, why = "draining", ""
        elif member.unreached:
            state, why = "unreached", f"{len(member.unreached)} decode engines do not answer it"
        else:
            state, why = "registered", self._unread(url)
        return FleetRow(engine=_shown(member.incarnation), url=_shown(url), role=member.role.value, source="registry",
                        state=state, why=_shown(why), well=state == "registered", **fields)


def _read_page(page: bytes, at_s: float,
               before: EngineFigures | None) -> tuple[EngineFigures, dict[str, float | None]]:
    """For a thread: what of a page of metrics is kept, and what is shown. Raises ValueError."""
    now = EngineFigures.of(page, at_s)
    return now.kept(), figures_of(before, now)


def _wanted_lines(page: bytes) -> list[bytes]:
    """The lines that are shown. Jumps from one of vLLM's to the next, as a page may have millions of others. Raises
    ValueError where there are more than any engine has."""
    page = b"\n" + page
    lines: list[bytes] = []
    bytes_left, number = MAX_WANTED_BYTES, 0
    at = page.find(_OURS)
    while at >= 0:
        number += 1
        end = page.find(b"\n", at + 1)
        end = len(page) if end < 0 else end
        if page.startswith(_WANTED, at + 1):
            bytes_left -= end - at
            if end - at > MAX_LINE_BYTES or bytes_left < 0 or len(lines) == MAX_LINES:
                raise ValueError(f"more than {MAX_LINES} figures or {MAX_WANTED_BYTES} bytes of them, or one longer "
                                 f"than {MAX_LINE_BYTES} bytes")
            lines.append(page[at + 1:end])
        if number == MAX_OWN_LINES:
            raise ValueError(f"more than {MAX_OWN_LINES} figures")
        at = page.find(_OURS, end)
    return lines


def _url_of(member: Member) -> str | None:
    """Its base URL as the router writes it; None where it has none."""
    try:
        return parse_worker("http", member.http) if member.http else None
    except ConfigError:
        return None


def _shown(text: str) -> str:
    """Without what moves a cursor or changes the direction of text; bounded."""
    text = text[:MAX_CHARS + 1]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else "?" for one in text)
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS - 3] + "..."
