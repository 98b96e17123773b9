# SPDX-License-Identifier: Apache-2.0
"""Drawn histories of a group of prefill engines and one of decode engines, two ranks each, with either way to keep the
ranks of a group in lockstep: the step sync, and vLLM's waves.

A history is drawn from its number alone, so both ways get the same one. When things happen is up to the threads, which
are delayed at random. A group goes through several histories, with a rest after each.
"""
import random
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tests.v1.step_sync_group import CountedGroup
from tests.v1.test_lockstep_groups import RANKS, Group, Rank, Wires
from vllm_pd.handover.jobs import read_key
from vllm_pd.protocol.messages import Attempt
from vllm_pd.transfer.requests import Read

LIMIT_S = 60.0  # how long a part of a history may take; more is a hang
QUIET_S = 0.03  # how long a group that rests is watched
FORMS = ((1, 18), (2, 18), (1, 64), (2, 64))  # steps in flight, blocks of D: the longest request needs 16
PER_FLEET = 10  # histories
LATE = 0.4  # how often a message is not carried yet, each time
_SHARED = [[start, *range(start, start + 95)] for start in (1000, 2000)]  # beginnings that prompts have in common


class Moment(Enum):
    """When a client leaves."""
    NOW = 0
    BEFORE_RESUME = 1  # right before the KV of its prompt is there
    AFTER_RESUME = 2


class Ask(NamedTuple):
    """A request at a rank of D."""
    rank: int
    name: str
    token_ids: list[int]
    tokens: int


class Leave(NamedTuple):
    """The client of this request leaves."""
    rank: int
    name: str
    moment: Moment


class CallAll(NamedTuple):
    """A call of all ranks' workers, which has collectives. It reaches the first rank `gap_s` before the other one."""
    of_p: bool
    first: int
    gap_s: float


class Pause(NamedTuple):
    """All ranks of D are paused, and resumed after some further events."""
    mode: str
    first: int
    gap_s: float
    meanwhile: tuple[Any, ...]


class Hold(NamedTuple):
    """From now on P's writes do not end, or do."""
    on: bool


class Carry(NamedTuple):
    """Time passes: so many looks at what the engines have said."""
    looks: int


class Rest(NamedTuple):
    """All requests end, and both groups come to rest."""


def draw_history(number: int, calls: bool) -> list[Any]:
    """The events of that history. `calls`: with calls and pauses of all ranks."""
    return list(_draw(random.Random(f"history {number}"), number, calls))


def _draw(draw: random.Random, number: int, calls: bool) -> Iterator[Any]:
    asked: list[tuple[int, str]] = []
    for _ in range(draw.randint(1, 2)):
        for _ in range(draw.randint(3, 14)):
            yield from _draw_event(draw, number, asked)
            if calls and draw.random() < 0.1:
                yield CallAll(draw.random() < 0.3, draw.randrange(RANKS), draw.choice([0, 0, 0.001, 0.004]))
        if calls and draw.random() < 0.3:
            meanwhile = tuple(event for _ in range(draw.randint(0, 4)) for event in _draw_event(draw, number, asked))
            yield Pause(draw.choice(["abort", "wait", "keep"]), draw.randrange(RANKS), draw.choice([0, 0, 0.002]),
                        meanwhile)
        yield Rest()


def _draw_event(draw: random.Random, number: int, asked: list[tuple[int, str]]) -> Iterator[Any]:
    kind = draw.random()
    if kind < 0.08:  # more at one rank than its blocks are enough for, where it has few
        rank = draw.randrange(RANKS)
        for _ in range(6):
            asked.append((rank, f"{number}-{len(asked)}"))
            yield Ask(*asked[-1], [draw.randrange(900) for _ in range(draw.randint(1, 15))], 60)
    elif kind < 0.6 or not asked:
        rank, name = draw.randrange(RANKS), f"{number}-{len(asked)}"
        beginning = draw.choice([*_SHARED, []])[:draw.randrange(96)]
        token_ids = beginning + [draw.randrange(900) for _ in range(draw.randint(1, 110))]
        asked.append((rank, name))
        yield Ask(rank, name, token_ids, draw.choice([1, 2, 5, 20, 50]))
        if draw.random() < 0.2:
            yield Leave(rank, name, draw.choice([*Moment]))
    elif kind < 0.68:
        yield Leave(*draw.choice(asked), Moment.NOW)
    elif kind < 0.8:
        yield Hold(draw.random() < 0.6)
    else:
        yield Carry(draw.choice([1, 2, 5, 20]))


class HistoryWires(Wires):
    """Two groups, between which messages are late at random."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.leave_at_resume: dict[str, Moment] = {}
        self.left_at_resume = 0
        self.reads = 0  # of P, of what D has of a prompt
        self._seen = [0] * RANKS  # requests to the transfer, by the rank of P
        for group in (self.p, self.d):
            for loop in group.ranks:
                loop.executor.before_pass = self._delay

    def carry(self) -> None:
        if self.draw.random() < LATE:
            self.p.follow()
        else:
            super().carry()
            self._read()

    def _give(self, loop: Rank, attempt: Attempt) -> None:
        if self.draw.random() >= LATE:
            super()._give(loop, attempt)

    def _end(self, attempt: Attempt) -> None:
        if self.draw.random() >= LATE:
            super()._end(attempt)

    def _read(self) -> None:
        """End P's reads of D's blocks, in their order."""
        for loop in self.p.ranks:
            requests = loop.engine.transfer.requests
            while self._seen[loop.rank] < len(requests) and self.draw.random() >= LATE:
                read = requests[self._seen[loop.rank]]
                self._seen[loop.rank] += 1
                if isinstance(read, Read):
                    self.reads += 1
                    name = next(name for _, name in self.jobs.values() if read_key(name) == read.key)
                    loop.engine.fill(loop.engine._jobs[str(name)], read=read)

    def _resume(self, loop: Rank, attempt: Attempt) -> None:
        moment = self.leave_at_resume.pop(attempt.request_id, None)
        if moment is Moment.BEFORE_RESUME:
            self.abort(loop.rank, attempt.request_id)
        self.left_at_resume += moment is not None
        super()._resume(loop, attempt)
        if moment is Moment.AFTER_RESUME:
            self.abort(loop.rank, attempt.request_id)

    def _delay(self) -> None:
        """A rank is late for a forward pass."""
        if random.random() < 0.1:
            time.sleep(random.choice([0, 0.0005, 0.002]))


class Figures(NamedTuple):
    """What both groups of a fleet have done. `passes`: of one rank each. `dummies`, `messages`: of all ranks."""
    passes: int
    dummies: int
    messages: dict[str, int]


class HistoryFleet:
    """A group P and a group D that go through histories one after another."""

    def __init__(self, folder: Path, group: type, form: int, seed: int) -> None:
        """`group`: CountedGroup or Group, for which `exchange_here` must hold. `form`: one of FORMS."""
        in_flight, blocks = FORMS[form]
        self.wires = HistoryWires(folder, group, in_flight, seed, blocks=blocks)
        self.groups = self.wires.p, self.wires.d
        self.ended: dict[str, int] = {}  # requests, by how they ended
        self.late_messages = 0  # how often one came after both groups had come to rest
        self._calls = 0
        self._open: list[tuple[Any, int]] = []  # calls that not all ranks have answered

    def run(self, history: list[Any]) -> None:
        """Raises AssertionError for what must not be, a hang among it."""
        for event in history:
            self._apply(event)
        self.wires.leave_at_resume.clear()

    def _apply(self, event: Any) -> None:
        wires = self.wires
        match event:
            case Ask(rank, name, token_ids, tokens):
                wires.d.add(rank, name, token_ids, tokens)
            case Leave(rank, name, Moment.NOW):
                wires.abort(rank, name)
            case Leave(_, name, moment):
                wires.leave_at_resume[name] = moment
            case Hold(on):
                wires.holds_writes = on
            case Carry(looks):
                for _ in range(looks):
                    wires.carry()
                    time.sleep(0.0005)
            case CallAll(of_p, first, gap_s):
                self._call(wires.p if of_p else wires.d, "collective_rpc", ("meet", ), first, gap_s)
            case Pause(mode, first, gap_s, meanwhile):
                wires.holds_writes = False  # until a pause waits for nothing that this test holds back
                self._call(wires.d, "pause_scheduler", (mode, False), first, gap_s)
                wires.until(self._called, LIMIT_S)
                before = passes(wires.d)
                for other in meanwhile:
                    self._apply(other)
                assert passes(wires.d) == before, "a group that is paused makes a forward pass"
                self._call(wires.d, "resume_scheduler", (), 1 - first, gap_s)
                wires.until(self._called, LIMIT_S)
            case Rest():
                self._rest()

    def _call(self, group: Any, method: str, arguments: tuple, first: int, gap_s: float) -> None:
        self._calls += 1
        group.ranks[first].call(self._calls, method, *arguments)
        if gap_s:
            time.sleep(gap_s)
        group.ranks[1 - first].call(self._calls, method, *arguments)
        self._open.append((group, self._calls))

    def _called(self) -> bool:
        """Whether all calls have their answers. Raises AssertionError for one that has failed."""
        for one in list(self._open):
            group, number = one
            answers = [answer for loop in group.ranks for answer in loop.answers.get(number, ())][:RANKS]
            assert not any(answers), answers
            if len(answers) == RANKS:
                self._open.remove(one)
        return not self._open

    def _rest(self) -> None:
        wires = self.wires
        wires.holds_writes = False
        wires.until(lambda: wires.ended() and self._called() and all(map(at_rest, self.groups)), LIMIT_S)
        before = self.figures()
        time.sleep(QUIET_S)
        wires.carry()
        after = self.figures()
        # A message that confirms the last step may still be under way.
        assert after[:2] == before[:2], f"a group that rests goes on: {before}, then {after}"
        self.late_messages += after.messages != before.messages
        for group in self.groups:
            for loop in group.ranks:
                self._check(loop.engine)

    def _check(self, engine: Any) -> None:
        """The requests of this engine have right answers, and it holds nothing."""
        for name in engine.prompts:
            if name in self.wires.aborted and name not in engine.ended or engine.ended.get(name) == "abort":
                engine.ended[name] = "aborted"
        engine.check_answers()
        engine.check_at_rest()
        for name in engine.prompts:
            self.ended[engine.ended[name]] = self.ended.get(engine.ended[name], 0) + 1
        for known in (engine.prompts, engine.wanted, engine.outputs, engine.ended, engine.cached):
            known.clear()

    def figures(self) -> Figures:
        """So far."""
        loops = [loop for group in self.groups for loop in group.ranks]
        messages: dict[str, int] = {}
        for group in self.groups:
            for kind, count in spoken(group).items():
                messages[kind] = messages.get(kind, 0) + count
        return Figures(sum(passes(group)[0] for group in self.groups), sum(loop.executor.dummies for loop in loops),
                       messages)

    def close(self) -> None:
        """End all loops, as a shutdown does; where one has failed, wherever they are. Raises AssertionError."""
        if any(loop.error for group in self.groups for loop in group.ranks) or not all(map(at_rest, self.groups)):
            self.end()
            return
        for group in self.groups:
            group.stop()

    def end(self) -> None:
        """End all loops, wherever they are."""
        for group in self.groups:
            group.end()


def passes(group: Any) -> list[int]:
    """The forward passes of each rank."""
    return [loop.executor.forwards for loop in group.ranks]


def at_rest(group: Any) -> bool:
    """Whether no rank has anything left, and all have made equally many forward passes, before and after this look:
    one that has begun a pass since the look at the other one waits in it for that. Changes nothing: `has_requests` of
    a scheduler is for its own thread."""
    before = passes(group)
    return len(set(before)) == 1 and not any(
        loop.core.engines_running or loop.core.scheduler.requests or loop.core.scheduler.finished_req_ids
        or loop.core.batch_queue or loop.core.input_queue.queue or loop.core.output_queue.queue
        for loop in group.ranks) and passes(group) == before


def spoken(group: Any) -> dict[str, int]:
    """The messages of this group, by kind."""
    waves = [said for loop in group.ranks for said in loop.waves]
    of_waves = {"start_wave": sum(one.start_wave is not None for one in waves),
                "wave_complete": sum(one.wave_complete is not None for one in waves)}
    if isinstance(group, CountedGroup):
        assert not any(of_waves.values()), "a rank speaks of a wave"
        return {"step_sync": sum(loop.core.step_sync.member.messages for loop in group.ranks)}
    assert isinstance(group, Group)
    return of_waves | {"START_DP_WAVE": group.starts, "all_reduces": group.exchange.reduced}
