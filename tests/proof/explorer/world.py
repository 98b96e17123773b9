# SPDX-License-Identifier: Apache-2.0
"""All that can happen to a few engines, as a graph of states.

The network never forgets: a letter once sent may arrive at any later moment, as often as it likes, in any order with
all others, or never. The broker is the worst one imaginable: it may offer any job that was ever put, to anybody, again
and again, or not at all; so whatever a broker does, restarts included, is among it. An engine may rest for as long as
it likes (SIGSTOP) and is killed or restarted as another incarnation where the budget says so. A write that was posted
lands or fails at any moment, also while its engine rests. One that has failed may land all the same, later.

A state is a tuple of small numbers: an engine in one of its states is a number, the letters are bits of one number. An
engine's step from one state with one input is worked out once, by the real core, and remembered; so exploring costs
little more than combining numbers.
"""
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from explorer.model import (
    BROKER,
    DecodeEngine,
    Letter,
    PrefillEngine,
    Shape,
    Violation,
    check_pair,
)
from explorer.snapshots import NOW, canonical, clone, shift
from vllm_pd.protocol import messages as m

UNBORN, DEAD = 0, 1
State = tuple[int, ...]  # the engines, the letters, what is left of each budget
Step = tuple[Any, ...]

BUDGETS = ("pauses", "kills", "errors", "aborts", "losses", "refusals", "outages", "drifts",
           "unadded", "false_deaths")


@dataclass(frozen=True)
class Scene:
    """Who is there, and how often what may happen. An engine `d` may be killed and come back as `d'`."""
    decodes: int = 1
    prefills: int = 1
    reborn_decodes: int = 0
    reborn_prefills: int = 0
    pauses: int = 0  # how often time passes
    kills: int = 0
    errors: int = 0  # writes that fail, jobs that an engine gives up
    aborts: int = 0
    losses: int = 0  # P is told, wrongly, that a D is gone
    refusals: int = 0  # the broker says that its queue is full
    outages: int = 0  # the broker goes away, and comes back
    drifts: int = 0  # writes that fail, and may land later
    unadded: int = 0  # a rank of a P could not add a D
    false_deaths: int = 0  # a D, far away, can't reach a P that lives
    peered: bool = True  # whether the first incarnations have met when it begins
    shape: Shape = field(default_factory=Shape)


class World:
    """The graph. Everything is deterministic: the same scene gives the same numbers."""

    def __init__(self, scene: Scene):
        self.scene = scene
        names = [f"d{i}" for i in range(scene.decodes)] + [f"d{i}'" for i in range(scene.reborn_decodes)]
        self.decodes = tuple(names)
        names = [f"p{i}" for i in range(scene.prefills)] + [f"p{i}'" for i in range(scene.reborn_prefills)]
        self.prefills = tuple(names)
        self.names = self.decodes + self.prefills
        self.index = {name: index for index, name in enumerate(self.names)}
        self.letters_at = len(self.names)
        self.core_steps = 0
        self._engines: list[DecodeEngine | PrefillEngine | None] = [None, None]
        self._numbers: dict[Any, int] = {}
        self._letters: list[Letter] = []
        self._letter_numbers: dict[Any, int] = {}
        self._steps: dict[Any, tuple[int, tuple[int, ...]]] = {}
        self._inputs: dict[int, list[tuple]] = {}
        self._due: dict[int, float | None] = {}
        self._good_pairs: set[tuple[int, int]] = set()
        self._addressed: dict[int, tuple[int, int]] = {}
        self.start = self._begin()

    # States.

    def engine(self, state: State, name: str) -> DecodeEngine | PrefillEngine | None:
        """A glance; not to be changed. None where it is dead or has not begun."""
        return self._engines[state[self.index[name]]]

    def letter(self, number: int) -> Letter:
        """A letter by the number of its bit."""
        return self._letters[number]

    def living(self, state: State) -> list[str]:
        """Who runs."""
        return [name for index, name in enumerate(self.names) if state[index] > DEAD]

    def left(self, state: State, budget: str) -> int:
        """How often it may still happen."""
        return state[self.letters_at + 1 + BUDGETS.index(budget)]

    def _begin(self) -> State:
        engines = [self._number(self._new(name)) if not name.endswith("'") else UNBORN for name in self.names]
        state = (*engines, 0, *(getattr(self.scene, budget) for budget in BUDGETS))
        if not self.scene.peered:
            return state
        listed = [name for name in self.decodes if not name.endswith("'")]
        state_list = list(state)
        for p in [name for name in self.prefills if not name.endswith("'")]:
            at = self.index[p]
            engine = clone(self._engines[state_list[at]])
            hellos = engine.members(*listed)
            for d, kind, content in hellos:
                assert kind == "deliver"
                host = clone(self._engines[state_list[self.index[d]]])
                for _, _, (sender, message) in host.deliver(*content):
                    engine.deliver(sender, message)
                state_list[self.index[d]] = self._number(host)
            state_list[at] = self._number(engine)
        return tuple(state_list)

    def _new(self, name: str) -> DecodeEngine | PrefillEngine:
        return (DecodeEngine if name in self.decodes else PrefillEngine)(name, self.scene.shape)

    def _number(self, engine: DecodeEngine | PrefillEngine) -> int:
        key = (engine.name, canonical(engine))
        number = self._numbers.get(key)
        if number is None:
            engine.check()
            number = self._numbers[key] = len(self._engines)
            self._engines.append(engine)
        return number

    # What can happen.

    def steps(self, state: State) -> Iterator[Step]:
        """Every step that may come next. Its first item says what happens, its second to whom."""
        for index, name in enumerate(self.names):
            if state[index] > DEAD:
                for given in self._inputs_of(state[index]):
                    if given[0] != "abort" or self.left(state, "aborts"):
                        yield given[0], name, *given[1:]
                due = self._due_of(state[index])
                if due is not None and due <= NOW:
                    yield "tick", name
        yield from self._arrivals(state)
        yield from self._transfers(state)
        yield from self._fates(state)

    def _arrivals(self, state: State) -> Iterator[Step]:
        letters, number = state[self.letters_at], 0
        while letters:
            if letters & 1:
                to = self._letters[number][0]
                kind = self._letters[number][1]
                if state[self.index[to]] > DEAD and (kind != "put_reply" or self.left(state, "refusals")):
                    yield "arrive", to, number
            letters >>= 1
            number += 1

    def _transfers(self, state: State) -> Iterator[Step]:
        for name in self.prefills:
            if state[self.index[name]] > DEAD:
                p = self.engine(state, name)
                for attempt, rank in p.flights():
                    if not self._can_land(state, attempt, p.generation(attempt), rank):
                        yield "cut", name, attempt, rank
                        continue
                    yield "land", name, attempt, rank
                    if self.left(state, "errors"):
                        yield "break", name, attempt, rank
                    if self.left(state, "drifts"):
                        yield "fail", name, attempt, rank
                for write in p.adrift:
                    if self._can_land(state, write.attempt, write.generation, write.rank):
                        yield "drift", name, write

    def _can_land(self, state: State, attempt: m.Attempt, generation: int, rank: int) -> bool:
        """Whether D has, or had at its end, the agent that such a write goes to."""
        d = self.engine(state, attempt.incarnation)
        return d is None or d.can_land(generation, rank)

    def _fates(self, state: State) -> Iterator[Step]:
        if self.left(state, "pauses") and self.pause_s(state) is not None:
            yield ("pass", "")
        for name in self.names:
            here = state[self.index[name]]
            if here > DEAD and self.left(state, "kills"):
                yield "kill", name
            if here == UNBORN and state[self.index[name[:-1]]] == DEAD:
                yield "begin", name
        for d in self.decodes:
            for p in self.prefills:
                at_d, at_p = state[self.index[d]], state[self.index[p]]
                if at_d > DEAD and at_p == DEAD:
                    yield "dead", d, p
                if at_p > DEAD and at_d == DEAD:
                    yield "dead", p, d
                if at_p > DEAD and at_d > DEAD and self.left(state, "losses"):
                    yield "lost", p, d
                if at_p > DEAD and at_d > DEAD and self.left(state, "false_deaths"):
                    yield "seems", d, p
                if at_p > DEAD and self.left(state, "unadded") and self.engine(state, p).can_reach(d):
                    yield "unadd", p, d
        if self.scene.outages:
            for d in self.decodes:
                if state[self.index[d]] > DEAD:
                    away = self.engine(state, d).side._broker_lost_at is not None
                    if away or self.left(state, "outages"):
                        yield "broker", d, away

    def pause_s(self, state: State) -> float | None:
        """How long it is until somebody has something to do that is not due yet."""
        due = [self._due_of(state[index]) for index in range(self.letters_at) if state[index] > DEAD]
        waits = [when - NOW for when in due if when is not None and when > NOW]
        return min(waits, default=None)

    # What it leads to.

    def after(self, state: State, step: Step) -> State:
        """The state after a step; raises Violation where an invariant breaks."""
        kind, name, *content = step
        after = list(state)
        if kind == "pass":
            seconds = self.pause_s(state)
            for index in range(self.letters_at):
                if after[index] > DEAD:
                    after[index] = self._passed(after[index], seconds)
            self._spend(after, "pauses")
        elif kind == "kill":
            after[self.index[name]] = DEAD
            self._spend(after, "kills")
        elif kind == "begin":
            after[self.index[name]] = self._number(self._new(name))
        elif kind == "land":
            self._advance(after, name, "landed", *content)
        elif kind == "arrive":
            if self._letters[content[0]][1] == "put_reply":
                self._spend(after, "refusals")
            self._advance(after, name, "arrive", content[0])
        elif kind == "break":
            self._spend(after, "errors")
            self._advance(after, name, "broke", *content)
        elif kind == "fail":
            self._spend(after, "drifts")
            self._advance(after, name, "failed", *content)
        elif kind == "cut":  # the other end is gone
            self._advance(after, name, "failed", *content)
        elif kind == "seems":
            self._spend(after, "false_deaths")
            self._advance(after, name, "dead", *content)
        elif kind == "drift":
            self._advance(after, name, "drifted", *content)
        else:
            if kind == "abort":
                self._spend(after, "aborts")
            elif kind == "lost":
                self._spend(after, "losses")
            elif kind == "unadd":
                self._spend(after, "unadded")
            elif kind == "broker" and not content[0]:
                self._spend(after, "outages")
            self._advance(after, name, kind, *content)
        self._check_pairs(after)
        return tuple(after)

    def _spend(self, after: list[int], budget: str) -> None:
        after[self.letters_at + 1 + BUDGETS.index(budget)] -= 1

    def _advance(self, after: list[int], name: str, kind: str, *content: Any) -> None:
        """One engine takes a step; what it sends is added to the letters, but a landing write is not a letter."""
        at = self.index[name]
        after[at], sent = self.engine_step(after[at], kind, *content)
        for number in sent:
            to, what, inside = self._letters[number]
            if what == "land":
                there = self.index[to]
                if after[there] > DEAD:
                    after[there], _ = self.engine_step(after[there], "land", *inside)
            else:
                after[self.letters_at] |= 1 << number

    def engine_step(self, number: int, kind: str, *content: Any) -> tuple[int, tuple[int, ...]]:
        """The state of an engine after an input, and the numbers of the letters that it sends."""
        key = (number, kind, *content)
        known = self._steps.get(key)
        if known is None:
            self.core_steps += 1
            engine = clone(self._engines[number])
            if kind == "arrive":
                _, kind, content = self._letters[content[0]]
            if kind == "deliver":
                letters = engine.deliver(*content)
            elif kind in ("offer", "put_reply"):
                letters = getattr(engine, kind)(content)
            else:
                letters = getattr(engine, kind)(*content)
            known = self._steps[key] = (self._number(engine), tuple(self._post(letters)))
        return known

    def _passed(self, number: int, seconds: float) -> int:
        key = (number, "pass", seconds)
        known = self._steps.get(key)
        if known is None:
            engine = clone(self._engines[number])
            shift(engine, seconds)
            known = self._steps[key] = (self._number(engine), ())
        return known[0]

    def _post(self, letters: list[Letter]) -> Iterator[int]:
        for to, kind, content in letters:
            if to != BROKER:
                if to in self.index:
                    yield self._letter_number(to, kind, content)
                continue
            sender, message = content
            if isinstance(message, m.Put):
                for p in self.prefills:
                    yield self._letter_number(p, "offer", message.job)
                if self.scene.refusals:
                    yield self._letter_number(sender, "put_reply",
                                              m.PutReply(message.job.attempt, m.PutRefusal.FULL, 0))

    def _letter_number(self, to: str, kind: str, content: Any) -> int:
        key = (to, kind, msgspec.msgpack.encode(content))
        number = self._letter_numbers.get(key)
        if number is None:
            number = self._letter_numbers[key] = len(self._letters)
            self._letters.append((to, kind, content))
        return number

    # Looking.

    def _inputs_of(self, number: int) -> list[tuple]:
        found = self._inputs.get(number)
        if found is None:
            found = self._inputs[number] = self._engines[number].inputs()
        return found

    def _due_of(self, number: int) -> float | None:
        if number not in self._due:
            self._due[number] = self._engines[number].next_timeout()
        return self._due[number]

    def _check_pairs(self, after: list[int]) -> None:
        for d in range(len(self.decodes)):
            for p in range(len(self.decodes), self.letters_at):
                pair = (after[d], after[p])
                if pair not in self._good_pairs:
                    if after[d] > DEAD and after[p] > DEAD:
                        check_pair(self._engines[after[d]], self._engines[after[p]])
                    self._good_pairs.add(pair)

    def describe(self, step: Step) -> str:
        """A step, for people."""
        kind, name, *content = step
        if kind == "arrive":
            _, what, inside = self._letters[content[0]]
            if what == "deliver":
                sender, message = inside
                detail = f"{type(message).__name__} of {sender}"
                detail += f" about {message.attempt}" if hasattr(message, "attempt") else ""
            elif what == "offer":
                detail = f"the offer of {inside.attempt}"
            elif what == "notice":
                detail = f"the notice of rank {inside[1]} for {inside[0]}"
            else:
                detail = f"the refusal of {inside.attempt}"
            return f"{name} gets {detail}"
        return " ".join([name or "time", kind if name else "passes", *map(str, content)])


__all__ = ["BUDGETS", "DEAD", "UNBORN", "Scene", "State", "Step", "Violation", "World"]
