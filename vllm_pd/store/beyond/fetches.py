# SPDX-License-Identifier: Apache-2.0
"""The reader of blocks of other hosts, pure: what is open, whom to ask, which answers count, who is left alone.

Life of a fetch: `begin` names the blocks that are wanted, one after the other. All hosts that may be asked are asked at
once how many of the next MAX_NAMES they have (`FINDING`). As soon as one has all of them, or all have answered, or
FIND_S has passed, the host with the longest run is asked to write a batch of it into rows of the staging memory
(`SENDING`; `STARVED` while no row is free). What has landed is checked and stored (`CHECKING`), and the next batch of
the run follows. At the end of the run the other hosts are asked for the rest. The fetch ends when it has all, when no
host has more, or at its deadline, with what has been stored by then.

A host that answers late or wrong, or can't be reached, is not asked for a while, and each further time for twice as
long. Each question has a time for its answer, whether its fetch has ended meanwhile or not. A host that sends blocks,
but not all of them before the deadline, is only slow, and is asked again.

Rows whose write may still be under way are set aside until their host answers, or for QUARANTINE_S: what lands later
only makes the block of another fetch fail its check, for the check is made of the bytes in the arena. One host has at
most a part of all rows, with those that are set aside for it (HOST_SHARE), and is asked for nothing while no block fits
into the rest. A fetch does not wait for rows that are set aside: it ends.
"""
from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from vllm_pd.store.beyond.messages import MAX_NAMES, MAX_PARTS

MAX_OPEN = 16
FIND_S = 0.25
BACKOFF_S = 1.0
MAX_BACKOFF_S = 64.0
QUARANTINE_S = 30.0
MAX_SET_ASIDE = 1024  # batches that wait for a late answer; the oldest ones are given up first
MAX_AWAITED = 1024  # questions whose answer may be late; the oldest ones are forgotten first
HOST_SHARE = 4  # one host has at most a quarter of the rows, or one block
MAX_BATCH_BYTES = 128 << 20  # a server sends no more than `sending.MAX_OPEN_BYTES` at a time, to all


class HostFailure(Enum):
    """Why a host is left alone for a while; the label of the counter."""
    LATE = "late"
    UNREACHABLE = "unreachable"
    TORN = "torn"  # what it wrote was not what it said
    GARBAGE = "garbage"  # what it said makes no sense


class FetchPhase(Enum):
    """What a fetch waits for."""
    FINDING = "finding"
    STARVED = "starved"
    SENDING = "sending"
    CHECKING = "checking"


class FindQuestion(NamedTuple):
    """Ask that host."""
    host: int
    number: int
    names: tuple[bytes, ...]


class SendQuestion(NamedTuple):
    """Ask that host to write there: a row for each part."""
    host: int
    number: int
    names: tuple[bytes, ...]
    rows: tuple[int, ...]


class LandedBatch(NamedTuple):
    """The parts of these blocks are in these rows, unchecked: `checked` is to be called for it."""
    number: int
    names: tuple[bytes, ...]
    rows: tuple[int, ...]


class HostReport(NamedTuple):
    """That host is left alone for so long, for this reason; None: it answers again."""
    host: int
    why: HostFailure | None
    wait_s: float


@dataclass
class _HostRecord:
    failures: int = 0  # one after the other
    until_s: float = 0.0  # not asked before
    sends_badly: bool = False  # since blocks of it were stored
    held_rows: int = 0  # into which it may write, with
    aside_rows: int = 0  # those that are set aside


@dataclass
class _Fetch:
    names: tuple[bytes, ...]
    deadline_s: float
    users: int = 1
    done: int = 0  # of its first names, how many are stored
    phase: FetchPhase = FetchPhase.FINDING
    question: int = 0
    asked: set[int] = field(default_factory=set)  # of whom an answer is awaited
    runs: dict[int, int] = field(default_factory=dict)  # by host
    find_until_s: float = 0.0
    host: int = 0
    run_end: int = 0  # of the names, what `host` has
    window_end: int = 0  # of the names, what hosts were asked for
    rows: tuple[int, ...] = ()
    exhausted: set[int] = field(default_factory=set)  # hosts that have no more of it
    senders: set[int] = field(default_factory=set)  # hosts of which blocks were stored

    @property
    def batch(self) -> tuple[bytes, ...]:
        return self.names[self.done:self.run_end]


@dataclass
class _Awaited:
    """A question without an answer of `hosts`, who are late from `until_s` on."""
    hosts: set[int]
    until_s: float
    parts: int = 0  # that were asked for; 0: of a FindQuestion
    senders: set[int] = field(default_factory=set)  # who are slow only; the set of the fetch


class _SetAside(NamedTuple):
    host: int
    rows: tuple[int, ...]
    until_s: float


class BlockFetches:
    """All fetches of one engine. Times are of a clock that is passed in. `counts`: parts by what became of them
    ("found", "fetched", "torn", "late"), fetches by their end ("whole", "part", "none", "starved": because of rows that
    are set aside it ended early, or did not begin), hosts by `HostFailure`."""

    def __init__(self, hosts: int, rows: int, models: int, wait_s: float, part_bytes: int = 1) -> None:
        """`rows` of staging memory, each for one part of so many bytes; at least `models`. `wait_s`: of one fetch, at
        most."""
        self._hosts = [_HostRecord() for _ in range(hosts)]
        self._models, self._wait_s, self._rows = models, wait_s, rows
        self._free = collections.deque(range(rows))
        self._host_rows = max(models, rows // HOST_SHARE)
        self._batch_blocks = min(max(1, min(self._host_rows, MAX_BATCH_BYTES // part_bytes) // models), MAX_NAMES,
                                 MAX_PARTS // models)
        self._numbers = itertools.count(1)
        self._fetches: dict[int, _Fetch] = {}
        self._questions: dict[int, int] = {}  # of the fetches, by the number of the question that counts
        self._by_first: dict[bytes, int] = {}
        self._set_aside: dict[int, _SetAside] = {}  # by the number of the question
        self._awaited: dict[int, _Awaited] = {}  # by the number of the question
        self._out: list[FindQuestion | SendQuestion] = []
        self._reports: list[HostReport] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, now: float, names: Sequence[bytes]) -> tuple[int | None, bool]:
        """(the number of a fetch of these blocks, whether it is another one's that is open and begins with the same
        block). None where nobody is to be asked now. Each number that is given wants a `leave`; after the end of the
        fetch that does nothing."""
        known = self._by_first.get(names[0])
        if known is not None:
            self._fetches[known].users += 1
            return known, True
        willing = self._willing(now)
        if len(self._fetches) >= MAX_OPEN or not willing:
            return None, False
        if self._is_out_of_rows() or all(map(self._is_full, willing)):
            self.counts["starved"] += 1
            return None, False
        number = next(self._numbers)
        self._fetches[number] = fetch = _Fetch(tuple(names), now + self._wait_s)
        self._by_first[names[0]] = number
        self._find(now, number, fetch)
        return number, False

    def is_open(self, number: int) -> bool:
        """Whether this fetch has not ended."""
        return number in self._fetches

    def leave(self, now: float, number: int) -> None:
        """One of those who began it does not wait any more."""
        fetch = self._fetches.get(number)
        if fetch is not None:
            fetch.users -= 1
            if not fetch.users:
                self._end(now, number)
        self._blame_late(now)

    def found(self, now: float, host: int, number: int, blocks: int) -> None:
        """That host has answered a `FindQuestion`."""
        self._answered(host, number, is_send=False)
        fetch = self._asked(number, FetchPhase.FINDING)
        if fetch is None or host not in fetch.asked:
            return
        fetch.asked.discard(host)
        if blocks > fetch.window_end - fetch.done:
            self._fail(now, host, HostFailure.GARBAGE)
            blocks = 0
        else:
            self._succeeded(host)
        fetch.runs[host] = blocks
        if not fetch.asked or blocks == fetch.window_end - fetch.done:
            self._choose(now, self._questions[number], fetch)

    def sent(self, now: float, host: int, number: int, parts: int) -> LandedBatch | None:
        """That host has answered a `SendQuestion`: so many parts have landed. Returns what is to be checked."""
        self._answered(host, number, is_send=True)
        aside = self._set_aside.get(number)
        if aside is not None and aside.host == host:
            self._recover(now, number)
            return None
        fetch = self._asked(number, FetchPhase.SENDING)
        if fetch is None or fetch.host != host:
            return None
        if parts > len(fetch.rows) or parts % self._models:
            self._fail(now, host, HostFailure.GARBAGE)
            parts = 0
        if not parts:
            fetch.exhausted.add(host)
            rows, fetch.rows = fetch.rows, ()
            self._find(now, self._questions[number], fetch)
            self._give_rows(now, host, rows)
            return None
        fetch.phase = FetchPhase.CHECKING
        return LandedBatch(number, fetch.batch[:parts // self._models], fetch.rows[:parts])

    def checked(self, now: float, batch: LandedBatch, parts: int) -> None:
        """Of a `LandedBatch` so many parts, one after the other, were right and are stored."""
        self.counts["fetched"] += parts
        fetch = self._fetches.get(self._questions.get(batch.number, 0))
        if fetch is None:  # it has ended meanwhile
            self._recover(now, batch.number)
            return
        number, rows, host = self._questions[batch.number], fetch.rows, fetch.host
        fetch.rows = ()
        fetch.done += parts // self._models
        if parts < len(batch.rows):
            self.counts["torn"] += 1
            self._fail(now, host, HostFailure.TORN, is_sender=True)
        else:
            fetch.senders.add(host)
            self._succeeded(host, is_sender=True)
        if parts < len(rows):  # it has no more, or what it has is wrong
            fetch.exhausted.add(host)
            fetch.run_end = fetch.done
        self._go_on(now, number, fetch)
        self._give_rows(now, host, rows)

    def unreachable(self, now: float, host: int, number: int) -> None:
        """A question could not be sent to that host."""
        self._fail(now, host, HostFailure.UNREACHABLE)
        self._answered(host, number, is_send=number in self._awaited and bool(self._awaited[number].parts))
        self._recover(now, number)
        known = self._questions.get(number, 0)
        fetch = self._fetches.get(known)
        if fetch is None:
            return
        fetch.exhausted.add(host)
        if fetch.phase is FetchPhase.FINDING and host in fetch.asked:
            fetch.asked.discard(host)
            if not fetch.asked:
                self._choose(now, known, fetch)
        elif fetch.phase is FetchPhase.SENDING and fetch.host == host:
            rows, fetch.rows = fetch.rows, ()  # nothing was asked for, so nothing lands
            self._find(now, known, fetch)
            self._give_rows(now, host, rows)

    def spoke_garbage(self, now: float, host: int) -> float:
        """That host has sent what is no answer. What it was asked stays open until its time is over. Returns until when
        it is not asked: for BACKOFF_S at least."""
        self._fail(now, host, HostFailure.GARBAGE)
        record = self._hosts[host]
        record.until_s = max(record.until_s, now + BACKOFF_S)
        return record.until_s

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is to be called; None: not because of time."""
        times = [one.until_s for one in (*self._set_aside.values(), *self._awaited.values())]
        for fetch in self._fetches.values():
            times.append(fetch.deadline_s)
            if fetch.phase is FetchPhase.FINDING:
                times.append(fetch.find_until_s)
        return min(times, default=None)

    def handle_timeout(self, now: float) -> None:
        """So late it is."""
        self._blame_late(now)
        for number, fetch in list(self._fetches.items()):
            if number not in self._fetches:  # it has ended because of another one's end
                continue
            if now >= fetch.deadline_s:
                self._end(now, number)
            elif fetch.phase is FetchPhase.FINDING and now >= fetch.find_until_s:
                self._choose(now, number, fetch)
        for number, aside in list(self._set_aside.items()):
            if now >= aside.until_s:
                self._recover(now, number)

    def poll_transmit(self) -> list[FindQuestion | SendQuestion]:
        """What is to be sent. Each is given once."""
        out, self._out = self._out, []
        return out

    def poll_reports(self) -> list[HostReport]:
        """What has changed for hosts since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def free_rows(self) -> int:
        """How many rows may be written to."""
        return len(self._free)

    def _asked(self, number: int, phase: FetchPhase) -> _Fetch | None:
        """The fetch that awaits an answer to this question; None where it is of the past, or never was."""
        fetch = self._fetches.get(self._questions.get(number, 0))
        return fetch if fetch is not None and fetch.phase is phase else None

    def _ask(self, number: int, fetch: _Fetch, phase: FetchPhase) -> int:
        """The number of a new question of this fetch, which counts from now on."""
        self._questions.pop(fetch.question, None)
        fetch.question, fetch.phase = next(self._numbers), phase
        self._questions[fetch.question] = number
        return fetch.question

    def _await(self, number: int, awaited: _Awaited) -> None:
        if len(self._awaited) >= MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        self._awaited[number] = awaited

    def _answered(self, host: int, number: int, is_send: bool) -> None:
        """That host is not late with this question."""
        awaited = self._awaited.get(number)
        if awaited is not None and bool(awaited.parts) == is_send:
            awaited.hosts.discard(host)
            if not awaited.hosts:
                del self._awaited[number]

    def _willing(self, now: float) -> set[int]:
        """The hosts that are not left alone."""
        return {index for index, host in enumerate(self._hosts) if now >= host.until_s}

    def _is_full(self, host: int) -> bool:
        """Whether so much is set aside for that host that it is to be asked for nothing more."""
        return self._hosts[host].aside_rows + self._models > self._host_rows

    def _is_out_of_rows(self) -> bool:
        """Whether no block fits into the rows that are not set aside."""
        return self._rows - sum(host.aside_rows for host in self._hosts) < self._models

    def _may_send(self, now: float, fetch: _Fetch, host: int) -> bool:
        """Whether that host may be asked for blocks now. It may have been blamed since it was asked what it has."""
        return not self._is_full(host) and (now >= self._hosts[host].until_s or host in fetch.senders)

    def _find(self, now: float, number: int, fetch: _Fetch) -> None:
        """Ask who has the next names."""
        willing = self._willing(now) - fetch.exhausted
        hosts = {host for host in willing if not self._is_full(host)}
        if not hosts or fetch.done == len(fetch.names) or now >= fetch.deadline_s:
            self._end(now, number, is_starved=bool(willing) and not hosts)
            return
        fetch.window_end = min(len(fetch.names), fetch.done + MAX_NAMES)
        fetch.asked, fetch.runs = hosts, {}
        fetch.find_until_s = min(fetch.deadline_s, now + FIND_S)
        question = self._ask(number, fetch, FetchPhase.FINDING)
        names = fetch.names[fetch.done:fetch.window_end]
        self._await(question, _Awaited(set(hosts), now + FIND_S))
        self._out += [FindQuestion(host, question, names) for host in sorted(hosts)]

    def _choose(self, now: float, number: int, fetch: _Fetch) -> None:
        """Take the host with the longest run; of equal ones, one that has sent blocks of this fetch before."""
        best = max((host for host, run in fetch.runs.items() if run and self._may_send(now, fetch, host)),
                   key=lambda host: (fetch.runs[host], host in fetch.senders, -host), default=None)
        if best is None:
            self._end(now, number)
            return
        self.counts["found"] += fetch.runs[best] * self._models
        fetch.host, fetch.run_end = best, fetch.done + fetch.runs[best]
        if fetch.run_end < fetch.window_end:
            fetch.exhausted.add(best)
        self._send(now, number, fetch)

    def _send(self, now: float, number: int, fetch: _Fetch) -> None:
        """Ask its host for the next batch of the run, if there are rows for a block, or will be."""
        host = self._hosts[fetch.host]
        if self._is_out_of_rows():
            self._end(now, number, is_starved=True)
            return
        if not self._may_send(now, fetch, fetch.host):
            fetch.exhausted.add(fetch.host)
            self._find(now, number, fetch)
            return
        blocks = min(fetch.run_end - fetch.done, self._batch_blocks,
                     min(len(self._free), self._host_rows - host.held_rows) // self._models)
        if blocks:
            self._ask_to_send(now, number, fetch, blocks)
        elif fetch.phase is not FetchPhase.STARVED:
            self._ask(number, fetch, FetchPhase.STARVED)

    def _ask_to_send(self, now: float, number: int, fetch: _Fetch, blocks: int) -> None:
        fetch.rows = tuple(self._free.popleft() for _ in range(blocks * self._models))
        self._hosts[fetch.host].held_rows += len(fetch.rows)
        question = self._ask(number, fetch, FetchPhase.SENDING)
        until_s = max(fetch.deadline_s, now + FIND_S)  # rows may have come at the last moment
        self._await(question, _Awaited({fetch.host}, until_s, len(fetch.rows), fetch.senders))
        self._out.append(SendQuestion(fetch.host, question, fetch.batch[:blocks], fetch.rows))

    def _go_on(self, now: float, number: int, fetch: _Fetch) -> None:
        """A batch is stored."""
        if fetch.done < fetch.run_end:
            self._send(now, number, fetch)
        else:
            self._find(now, number, fetch)

    def _give_rows(self, now: float, host: int, rows: Sequence[int]) -> None:
        """Nothing of that host is expected to land there any more: the longest unused row is used first."""
        self._free.extend(rows)
        self._hosts[host].held_rows -= len(rows)
        self._try_starved(now)

    def _try_starved(self, now: float) -> None:
        """Rows are free, or will not be for long: each fetch without rows goes on, waits on, or ends."""
        for number, fetch in list(self._fetches.items()):
            if number in self._fetches and fetch.phase is FetchPhase.STARVED:
                self._send(now, number, fetch)

    def _recover(self, now: float, number: int) -> None:
        """Rows that were set aside with this question can be used again."""
        if (aside := self._set_aside.pop(number, None)) is not None:
            self._hosts[aside.host].aside_rows -= len(aside.rows)
            self._give_rows(now, aside.host, aside.rows)

    def _end(self, now: float, number: int, is_starved: bool = False) -> None:
        fetch = self._fetches.pop(number)
        del self._by_first[fetch.names[0]]
        self._questions.pop(fetch.question, None)
        self.counts["whole" if fetch.done == len(fetch.names) else "starved" if is_starved else
                    "part" if fetch.done else "none"] += 1
        if fetch.rows:
            if len(self._set_aside) >= MAX_SET_ASIDE:
                self._recover(now, next(iter(self._set_aside)))
            self._set_aside[fetch.question] = _SetAside(fetch.host, fetch.rows, now + QUARANTINE_S)
            self._hosts[fetch.host].aside_rows += len(fetch.rows)
            self._try_starved(now)

    def _blame_late(self, now: float) -> None:
        """Fail the hosts whose time to answer is over, whether anybody still waits for them or not."""
        for number, awaited in list(self._awaited.items()):
            if now >= awaited.until_s:
                del self._awaited[number]
                self.counts["late"] += awaited.parts
                for host in sorted(awaited.hosts - awaited.senders):
                    self._fail(now, host, HostFailure.LATE, is_sender=bool(awaited.parts))

    def _fail(self, now: float, host: int, why: HostFailure, is_sender: bool = False) -> None:
        """Leave that host alone for a while. `is_sender`: for what it has sent, or has not. Then an answer alone does
        not clear it: each request would wait for it again."""
        record = self._hosts[host]
        record.sends_badly = record.sends_badly or is_sender
        if now < record.until_s:  # of several questions to one host that fail together
            return
        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2**record.failures)
        record.failures, record.until_s = record.failures + 1, now + wait_s
        self.counts[f"host_{why.value}"] += 1
        self._reports.append(HostReport(host, why, wait_s))

    def _succeeded(self, host: int, is_sender: bool = False) -> None:
        record = self._hosts[host]
        if record.failures and (is_sender or not record.sends_badly):
            record.failures, record.sends_badly = 0, False
            self._reports.append(HostReport(host, None, 0.0))
