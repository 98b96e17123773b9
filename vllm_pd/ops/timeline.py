# SPDX-License-Identifier: Apache-2.0
"""The prompts of a fleet as a timeline that Chrome's and Perfetto's viewers show. Pure: from reports to events.

An engine is a process of the timeline. A prompt is a slice on its decode engine, from the decision to the first token,
with the stages of the hand-over inside it, and one on the prefill engine that computed it; an arrow joins the two.
Slices that overlap lie on rows (threads) of their own. A decode engine says how long ago it decided about a prompt and
how long each stage took, so all times are those of the reader's clock, and no two engines need agree on one. A prefill
engine's stages are placed by what it has reported to the decode engine, as in a trace (`vllm_pd.v1.spans`).

The form: "Trace Event Format", a JSON object with `traceEvents`; `ts` and `dur` in microseconds, `ph` X: a slice, i: a
moment, s and f: the ends of an arrow, M: a name.
"""
from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from vllm_pd.ops.printing import printable
from vllm_pd.ops.trial import PromptReport
from vllm_pd.protocol.messages import MAX_ID_CHARS, MAX_PROMPTS

MAX_KEPT = 100_000  # prompts of one timeline
MAX_ENGINES = 4096
MAX_RANKS = 256  # of one server
MAX_USES = 16  # of one request id, and decisions about it, at one engine
MAX_S = 1e6  # that a stage may have taken
MAX_TEXT_CHARS = 200
SAME_S = 1e-3  # two reports of one decision are no further from each other, beside their errors
_STAGES = ("queue", "claim", "prefill", "transfer")
_US = 1e6


class ReportedPrompt(PromptReport, frozen=True, kw_only=True):
    """One of `/pd/prompts`: what `/pd/prompts/NAME` says of it, and how long ago it was decided about."""
    request_id: str
    age_s: float


class ReportedRank(msgspec.Struct, frozen=True):
    """One rank of an engine's server, and its last prompts."""
    incarnation: str
    role: str = ""
    prompts: list[ReportedPrompt] = []


class PromptsPage(msgspec.Struct, frozen=True):
    """The answer of `/pd/prompts`."""
    ranks: list[ReportedRank]


@dataclass
class _Seen:
    """A prompt of one engine: as last reported, when it was decided about, as the report with the smallest error says,
    and when it was first reported as ended."""
    prompt: ReportedPrompt
    decided_at: float
    error_s: float
    ended_at: float | None = None


@dataclass
class _Engine:
    """An engine, and the prompts that it has reported, by request: several where an id was used, or decided about,
    again."""
    label: str
    prompts: dict[str, list[_Seen]] = field(default_factory=dict)


class _Slice(NamedTuple):
    """A prompt on one engine: from when to when, and the stages inside. Sorted by time."""
    began_at: float
    ended_at: float
    name: str
    about: dict[str, Any]
    stages: list[tuple[str, float, float]]
    arrow: str = ""  # of the hand-over that it belongs to
    is_job: bool = False


class Timeline:
    """What is known of a fleet's prompts from `began_at` on, by the reader's clock, in seconds. Reports may come in any
    order and repeat what was said; a prompt is kept as it was last reported. What engines say is bounded, in number and
    in length, before it is kept."""

    def __init__(self, began_at: float) -> None:
        self._began_at = self._last_at = began_at
        self._engines: dict[str, _Engine] = {}
        self.prompts = 0
        self.left_out = 0  # prompts beyond the bounds, and reports whose times are none

    def add(self, url: str, page: PromptsPage, asked_at: float, answered_at: float) -> None:
        """The answer of the server at this URL to a question between these two moments."""
        self._last_at = max(self._last_at, answered_at)
        ranks = {rank.incarnation[:MAX_TEXT_CHARS]: rank for rank in page.ranks[:MAX_RANKS]}
        for name, rank in ranks.items():
            if name not in self._engines and len(self._engines) >= MAX_ENGINES:
                self.left_out += len(rank.prompts)
                continue
            label = _text(f"{rank.role[:MAX_TEXT_CHARS]} {name[:12]} {url}")
            engine = self._engines.setdefault(name, _Engine(label))
            for prompt in rank.prompts[-MAX_PROMPTS:]:
                self._note(engine, _bounded(prompt), (asked_at + answered_at) / 2 - prompt.age_s,
                           (answered_at - asked_at) / 2)

    def as_json(self) -> dict[str, Any]:
        """The whole timeline."""
        slices: dict[str, list[_Slice]] = {name: [] for name in self._engines}
        arrows = itertools.count()
        for name, engine in self._engines.items():
            for seen, until in _with_ends(engine, self._last_at):
                ours, theirs = _slices(seen, until, str(next(arrows)))
                slices[name].append(ours)
                if theirs is not None:
                    slices.setdefault(seen.prompt.peer, []).append(theirs)
        return {"displayTimeUnit": "ms",
                "traceEvents": [event for number, (name, found) in enumerate(slices.items(), 1) for event in
                                self._events(number, self._label(name), sorted(found, key=lambda one: one[:2]))]}

    def _note(self, engine: _Engine, prompt: ReportedPrompt, decided_at: float, error_s: float) -> None:
        """One report of a prompt: of a new one, or of one that is known."""
        times = (prompt.age_s, prompt.parked_s or 0.0, prompt.first_step_s or 0.0,
                 *(getattr(prompt.timings, f"{stage}_s") for stage in _STAGES))
        if not all(0 <= seconds <= MAX_S for seconds in times):  # nan neither
            self.left_out += 1
            return
        if decided_at < self._began_at:
            return
        known = engine.prompts.setdefault(prompt.request_id, [])
        seen = next((one for one in known if abs(one.decided_at - decided_at) <= one.error_s + error_s + SAME_S), None)
        if seen is None:
            if self.prompts >= MAX_KEPT or len(known) >= MAX_USES:
                self.left_out += 1
                return
            self.prompts += 1
            known.append(seen := _Seen(prompt, decided_at, error_s))
        seen.prompt = prompt
        if error_s < seen.error_s:
            seen.decided_at, seen.error_s = decided_at, error_s
        if prompt.outcome and seen.ended_at is None:
            seen.ended_at = decided_at + prompt.age_s

    def _label(self, name: str) -> str:
        """What an engine is called; of one that was not read only its incarnation is known."""
        engine = self._engines.get(name)
        return _text(f"{name[:12]}, which was not read") if engine is None else engine.label

    def _events(self, process: int, label: str, slices: list[_Slice]) -> Iterator[dict[str, Any]]:
        """The events of one engine. A slice is on the row that has been free for longest, or on a new one."""
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": label}}
        rows: list[tuple[float, int]] = []  # a heap: when each is free
        for one in slices:
            row = heapq.heappop(rows)[1] if rows and rows[0][0] <= one.began_at else len(rows) + 1
            heapq.heappush(rows, (one.ended_at, row))
            where = {"pid": process, "tid": row, "cat": "pd"}
            if one.ended_at <= one.began_at:
                yield {"ph": "i", "s": "t", "name": one.name, "ts": self._us(one.began_at), "args": one.about, **where}
                continue
            yield {"ph": "X", "name": one.name, "args": one.about, **where, **self._span(one.began_at, one.ended_at)}
            for name, began_at, ended_at in one.stages:
                yield {"ph": "X", "name": name, **where, **self._span(began_at, ended_at)}
            if one.arrow:
                end = {"ph": "f", "bp": "e"} if one.is_job else {"ph": "s"}
                yield {**end, "id": one.arrow, "name": "job", **where, "ts": self._us(one.began_at)}

    def _span(self, began_at: float, ended_at: float) -> dict[str, float]:
        return {"ts": self._us(began_at), "dur": max(0.0, self._us(ended_at) - self._us(began_at))}

    def _us(self, at: float) -> float:
        return round((at - self._began_at) * _US, 1)


def _with_ends(engine: _Engine, last_at: float) -> Iterator[tuple[_Seen, float]]:
    """Each prompt of an engine, and when its slice ends: with its first token, the end of its last attempt, the next
    decision about it, or `last_at` where it is open."""
    for known in engine.prompts.values():
        known.sort(key=lambda one: one.decided_at)
        for number, seen in enumerate(known):
            prompt = seen.prompt
            if prompt.decision != "remote":
                yield seen, seen.decided_at
                continue
            until = (seen.decided_at + prompt.parked_s + (prompt.first_step_s or 0.0) if prompt.parked_s is not None
                     else last_at if seen.ended_at is None else seen.ended_at)
            if number + 1 < len(known):
                until = min(until, known[number + 1].decided_at)
            yield seen, max(until, seen.decided_at)


def _slices(seen: _Seen, until: float, arrow: str) -> tuple[_Slice, _Slice | None]:
    """A prompt at the engine that decided about it, and at its prefill engine, if one has computed it."""
    prompt, at = seen.prompt, seen.decided_at
    name = _text(f"{prompt.decision} {prompt.reason}: {prompt.request_id}")
    about = {"request": _text(prompt.request_id), "tokens": prompt.tokens, "cached_tokens": prompt.cached_tokens,
             "reason": _text(prompt.reason), "attempts": prompt.attempts, "peer": _text(prompt.peer),
             "outcome": _text(prompt.outcome), "detail": _text(prompt.detail), "bytes": prompt.timings.bytes}
    stages = [*_stages(seen, until)]
    computed = [one for one in stages if one[0] in ("prefill", "transfer")]
    if not (computed and prompt.peer):
        return _Slice(at, until, name, about, stages), None
    return (_Slice(at, until, name, about, stages, arrow),
            _Slice(computed[0][1], computed[-1][2], _text(f"job: {prompt.request_id}"), about, computed, arrow, True))


def _stages(seen: _Seen, until: float) -> Iterator[tuple[str, float, float]]:
    """The stages of a prompt that was handed over, one after the other, within its slice."""
    prompt, at = seen.prompt, seen.decided_at
    came_at = until if prompt.parked_s is None else min(until, at + prompt.parked_s)
    for stage in _STAGES if prompt.timings.measured else ():
        ended_at = min(came_at, at + getattr(prompt.timings, f"{stage}_s"))
        if ended_at > at:
            yield stage, at, ended_at
        at = ended_at
    if prompt.parked_s is not None and until > came_at:
        yield "first step", came_at, until


def _text(text: str) -> str:
    """What an engine says, for people: of bounded length, without control characters."""
    return printable(text[:MAX_TEXT_CHARS])[:MAX_TEXT_CHARS]


def _bounded(prompt: ReportedPrompt) -> ReportedPrompt:
    """The same without texts that are longer than any engine's."""
    return msgspec.structs.replace(prompt, request_id=prompt.request_id[:MAX_ID_CHARS], **{
        name: getattr(prompt, name)[:MAX_TEXT_CHARS] for name in ("decision", "reason", "peer", "address", "outcome",
                                                                  "detail")})
