# SPDX-License-Identifier: Apache-2.0
"""Prefill first, as a graph of states: a P that holds a prompt, and a D whose requests want to read it.

As in `world`: the real core of both engines, a network that never forgets (each letter may arrive at any later moment,
any number of times, or never), engines that rest, die and come back. Beside each core stands a model of its blocks: P
reuses a block the moment that its hold ends, and a read brings what P's block has when it lands, at any moment after it
was posted.
"""
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from explorer.model import Violation
from explorer.snapshots import NOW, canonical, clone, shift
from vllm_pd.core import actions as a
from vllm_pd.core import messages as m
from vllm_pd.core.decode import DecodeLimits, DecodeProtocol
from vllm_pd.core.hashes import token_digest
from vllm_pd.core.hold_reads import HoldReads
from vllm_pd.core.holds import HoldLimits, Holds
from vllm_pd.core.prefill import PrefillLimits, PrefillProtocol

PROMPTS = {"A": [1, 2, 3, 4], "B": [5, 6, 7, 8]}
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "f", "f", 2, 1, 1, 64, "hnd")
DECODE = DecodeLimits(lease_s=9.0, deadline_s=30.0, claim_retry_s=8.0, ttl_s=5.0)
PREFILL = PrefillLimits(ttl_s=1000.0, holds=HoldLimits(hold_s=4.0, query_s=3.0, query_max_s=6.0))

Letter = tuple[str, str, m.Message]  # to, from, what


@dataclass(frozen=True)
class HoldScene:
    """The prompt of each request of D; all name the one hold, of prompt A. How often what may happen."""
    requests: str = "A"
    pauses: int = 0
    aborts: int = 0
    errors: int = 0
    drifts: int = 0  # reads that fail, and may land later
    kills: int = 0
    mistakes: int = 0  # P takes a D that lives for dead
    reborn: bool = False  # P comes back, and holds another prompt by the same number
    holds: type[Holds] = Holds
    reads: type[HoldReads] = HoldReads


class HoldingEngine:
    """P: its half of the protocol, and which prompt each of its holds keeps."""

    def __init__(self, name: str, prompt: str, scene: HoldScene):
        self.name = name
        self.side = PrefillProtocol(m.Member(name, m.Role.PREFILL, "", FINGERPRINT), b"", PREFILL)
        self.side.holds = scene.holds(PREFILL.holds, self.side.dropped)
        self.hold = m.Attempt(name, "h", 1)
        self.kept = {self.hold: prompt}
        self.side.holds.add(NOW, self.hold, token_digest(PROMPTS[prompt]), [7, 8])
        member = m.Member("d", m.Role.DECODE, "tcp://d", FINGERPRINT)
        self.side.members_are(NOW, [member])
        self.side.receive(NOW, "d", m.HelloReply(member, b""))

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    def dead(self, peer: str) -> list[Letter]:
        return self._do(self.side.peer_dead(NOW, peer))

    def _do(self, actions: list[a.Action]) -> list[Letter]:
        for action in actions:
            if isinstance(action, a.HoldEnded) and self.kept.pop(action.hold, None) is None:
                raise Violation("a hold ends twice")
        return [(one.peer, self.name, one.message) for one in actions if isinstance(one, a.ToDecode)]


class ReadingEngine:
    """D: its half of the protocol, its requests, and the reads that are posted."""

    def __init__(self, name: str, holders: list[str], scene: HoldScene):
        self.name = name
        self.side = DecodeProtocol(m.Member(name, m.Role.DECODE, "", FINGERPRINT), b"", DECODE)
        self.side.reads = scene.reads(self.side.member, DECODE.ttl_s, DECODE.claim_retry_s / 4, DECODE.lease_s,
                                      self.side.counters, self.side.dropped)
        self.asked: dict[int, m.Attempt] = {}  # by the number of the request
        self.open: dict[m.Attempt, m.Attempt] = {}  # reads that may land: the hold of each
        self.adrift: dict[m.Attempt, m.Attempt] = {}  # those that have failed, and land all the same while P lives
        self.ended: dict[int, str] = {}
        self.blocks: set[m.Attempt] = set()  # attempts whose blocks are set aside
        self.shape = scene
        for one in holders:
            self.side.receive(NOW, one, m.Hello(m.Member(one, m.Role.PREFILL, "", FINGERPRINT), b"memory"))

    def ask(self, number: int) -> list[Letter]:
        """The request comes, and is parked."""
        attempt = self.asked[number] = m.Attempt(self.name, "r", number)
        self.blocks.add(attempt)
        return self._do(self.side.reads.claim(NOW, attempt, m.Attempt("p", "h", 1),
                                              token_digest(PROMPTS[self.shape.requests[number]]), [1, 2], 0, 30.0))

    def abort(self, number: int) -> list[Letter]:
        self.ended[number] = "aborted"
        return self._do(self.side.reads.abort(self.asked[number]))

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    def dead(self, peer: str) -> list[Letter]:
        self.adrift = {attempt: hold for attempt, hold in self.adrift.items() if hold.incarnation != peer}
        return self._do(self.side.peer_dead(NOW, peer))

    def fail(self, attempt: m.Attempt) -> list[Letter]:
        """The read ends in an error, and nobody knows whether more of it lands."""
        self.adrift[attempt] = self.open.pop(attempt)
        return self._do(self.side.reads.unproven(attempt, "failed"))

    def drift(self, attempt: m.Attempt) -> list[Letter]:
        """It lands."""
        del self.adrift[attempt]
        if attempt not in self.blocks:
            raise Violation("a read lands in blocks that D has reused")
        return []

    def land(self, attempt: m.Attempt, found: str) -> list[Letter]:
        """All of the read is over. `found`: the prompt whose KV it brought; "" if it failed."""
        del self.open[attempt]
        if attempt not in self.blocks:
            raise Violation("a read lands in blocks that D has reused")
        return self._do(self.side.reads.ended(attempt, "" if found else "failed"), found)

    def _do(self, actions: list[a.Action], found: str = "") -> list[Letter]:
        for action in actions:
            if isinstance(action, a.ReadHold):
                self.open[action.attempt] = m.Attempt(action.peer, "h", 1)
            elif isinstance(action, a.Prefilled | a.Fallback):
                number = action.attempt.number
                if number in self.ended:
                    raise Violation("an attempt ends twice")
                self.ended[number] = type(action).__name__
                if isinstance(action, a.Prefilled):
                    self.blocks.discard(action.attempt)
                    if found != self.shape.requests[number]:
                        raise Violation("a request gets the KV of another prompt")
            elif isinstance(action, a.Released):
                self.blocks.discard(action.attempt)
                if action.attempt in self.open or action.attempt in self.adrift:
                    raise Violation("D reuses blocks that a read may fill")
        return [(one.peer, self.name, one.message) for one in actions if isinstance(one, a.ToPrefill)]


class HoldWorld:
    """The states and steps of a scene. A state: (P, P again, D) as numbers, 0 for dead or unborn; the letters, as bits
    of one number; what is left of each budget."""

    BUDGETS = ("pauses", "aborts", "errors", "kills", "drifts", "mistakes")

    def __init__(self, scene: HoldScene):
        self.scene = scene
        self._engines: list[Any] = [None]
        self._numbers: dict[Any, int] = {}
        self._letters: list[Letter] = []
        self._letter_numbers: dict[Any, int] = {}
        self._known: dict[Any, tuple[int, int]] = {}
        self.sent = 0  # the letters of the last step
        holders = ["p", "p'"] if scene.reborn else ["p"]
        self.start = (self._number(HoldingEngine("p", "A", scene)), 0, self._number(ReadingEngine("d", holders, scene)),
                      0, *(getattr(scene, budget) for budget in self.BUDGETS))

    def engine(self, state: tuple, index: int) -> Any:
        """A glance; not to be changed."""
        return self._engines[state[index]]

    def _number(self, engine: Any) -> int:
        key = (engine.name, canonical(engine))
        if key not in self._numbers:
            self._numbers[key] = len(self._engines)
            self._engines.append(engine)
        return self._numbers[key]

    def steps(self, state: tuple) -> Iterator[tuple]:
        """All that can happen next: the kind, and its details."""
        d = self.engine(state, 2)
        left = dict(zip(self.BUDGETS, state[4:], strict=True))
        for index in range(3):
            engine = self.engine(state, index)
            if engine is not None and (engine.side.next_timeout() or 1e9) <= NOW:
                yield "tick", index
        letters, number = state[3], 0
        while letters:
            if letters & 1:  # what is for P may find the one that has its address now
                indices = {"p": (0, 1), "p'": (1, ), "d": (2, )}[self._letters[number][0]]
                yield from (("arrive", index, number) for index in indices if state[index])
            letters >>= 1
            number += 1
        if d is not None:
            for one in range(len(self.scene.requests)):
                if one not in d.asked:
                    yield "ask", one
                elif one not in d.ended and left["aborts"]:
                    yield "abort", one
            for attempt, hold in d.open.items():
                alive = state[self._index_of(hold)]
                if alive:
                    yield "land", attempt
                if not alive or left["errors"]:
                    yield "break", attempt
                if left["drifts"]:
                    yield "fail", attempt
            for attempt in d.adrift:
                yield "drift", attempt
        if left["pauses"] and self.pause_s(state) is not None:
            yield ("pass", )
        if left["kills"]:
            yield from (("kill", index) for index in (0, 2) if state[index])
        if not state[0] and state[2]:
            yield "dead", 2, "p"
        if not state[2] or left["mistakes"]:
            yield from (("dead", index, "d") for index in (0, 1) if state[index])
        if self.scene.reborn and not state[0] and not state[1]:
            yield ("begin", )

    def pause_s(self, state: tuple) -> float | None:
        """How long until somebody has something to do."""
        due = [self.engine(state, index).side.next_timeout() for index in range(3) if state[index]]
        return min((when - NOW for when in due if when is not None and when > NOW), default=None)

    def after(self, state: tuple, step: tuple) -> tuple:
        """The state after a step. Raises Violation."""
        after, kind = list(state), step[0]
        budget = {"abort": "aborts", "pass": "pauses", "kill": "kills", "fail": "drifts"}.get(kind)
        if kind == "break" and state[self._index_of(self.engine(state, 2).open[step[1]])]:
            budget = "errors"
        if kind == "dead" and state[2] and step[2] == "d":
            budget = "mistakes"
        if budget:
            after[4 + self.BUDGETS.index(budget)] -= 1
        if kind == "pass":
            seconds = self.pause_s(state)
            for index in range(3):
                if state[index]:
                    after[index] = self._number(self._shifted(self.engine(state, index), seconds))
        elif kind == "kill":
            after[step[1]] = 0
        elif kind == "begin":
            after[1] = self._number(HoldingEngine("p'", "B", self.scene))
        else:
            self._move(after, state, step)
        self._check(after)
        return tuple(after)

    def _move(self, after: list, state: tuple, step: tuple) -> None:
        kind, *content = step
        index = content[0] if kind in ("tick", "arrive", "dead") else 2
        found = ""
        if kind == "land":
            hold = self.engine(state, 2).open[content[0]]
            found = self.engine(state, self._index_of(hold)).kept.get(hold, "other KV")
        key = (after[index], step, found)
        if key not in self._known:
            engine = clone(self.engine(state, index))
            sent = 0
            for letter in self._act(engine, kind, content, found):
                sent |= 1 << self._letter_number(letter)
            self._known[key] = self._number(engine), sent
        after[index], self.sent = self._known[key]
        after[3] |= self.sent

    def _act(self, engine: Any, kind: str, content: list, found: str) -> list[Letter]:
        if kind == "arrive":
            _, sender, message = self._letters[content[1]]
            return engine.deliver(sender, message)
        acts: dict[str, Callable[[], list[Letter]]] = {
            "tick": engine.tick, "dead": lambda: engine.dead(content[1]), "ask": lambda: engine.ask(content[0]),
            "abort": lambda: engine.abort(content[0]), "land": lambda: engine.land(content[0], found),
            "break": lambda: engine.land(content[0], ""), "fail": lambda: engine.fail(content[0]),
            "drift": lambda: engine.drift(content[0])}
        return acts[kind]()

    def _letter_number(self, letter: Letter) -> int:
        key = canonical(letter)
        if key not in self._letter_numbers:
            self._letter_numbers[key] = len(self._letters)
            self._letters.append(letter)
        return self._letter_numbers[key]

    @staticmethod
    def _shifted(engine: Any, seconds: float) -> Any:
        engine = clone(engine)
        shift(engine.side, seconds)
        return engine

    def _check(self, state: list) -> None:
        """While a read of D may take bytes from P's blocks, P keeps them."""
        d = self._engines[state[2]]
        for attempt, hold in d.open.items() if d is not None else ():
            p = self._engines[state[self._index_of(hold)]]
            if p is not None and hold not in p.kept:
                raise Violation(f"P reuses blocks that {attempt} reads")

    @staticmethod
    def _index_of(hold: m.Attempt) -> int:
        return int(hold.incarnation == "p'")

    def heal(self, state: tuple) -> None:
        """From here on nothing goes wrong any more: what is sent arrives, once, and a P is ended by its operator where
        nobody knows whether a read of it lands. Raises Violation unless all ends, and nobody holds anything."""
        for read in self.engine(state, 2).side.reads._reads.values() if state[2] else ():
            if read.unproven:
                index = self._index_of(read.hold)
                state = (*state[:index], 0, *state[index + 1:])
        due = 0  # the letters on their way
        for _ in range(200):
            p, again, d = (self.engine(state, index) for index in range(3))
            if not ((p and p.kept) or (again and again.kept) or (d and (d.blocks or d.side.reads.states()))):
                return
            arrived, due = due, 0
            for number in range(arrived.bit_length()):
                index = {"p": 0, "p'": 1, "d": 2}[self._letters[number][0]]
                if arrived >> number & 1 and state[index]:
                    state, due = self.after(state, ("arrive", index, number)), due | self.sent
            steps = [one for one in self.steps(state) if one[0] in ("tick", "dead", "land")]
            if state[2]:
                steps += [("break", attempt) for attempt, hold in self.engine(state, 2).open.items()
                          if not state[self._index_of(hold)]]
            for step in steps:
                state, due = self.after(state, step), due | self.sent
            moved = due or any(step[0] != "dead" for step in steps)  # a death may be seen again and again
            seconds = None if moved else self.pause_s(state)
            if seconds is not None:
                state = (*(self._number(self._shifted(self.engine(state, index), seconds)) if state[index] else 0
                           for index in range(3)), *state[3:])
        raise Violation("it never ends")


@dataclass
class HoldsFound:
    """What a search has seen; `violation` is empty where every state was good."""
    states: int = 0
    transitions: int = 0
    depth: int = 0
    healed: int = 0
    violation: str = ""
    trace: tuple = ()


def search(scene: HoldScene, depth: int, heal_each: int = 0) -> HoldsFound:
    """Every state that at most `depth` steps lead to; stops at the first violation. `heal_each`: it is checked of each
    state of this many that all ends well from there (0: of none)."""
    world, found = HoldWorld(scene), HoldsFound()
    ways: dict[tuple, tuple] = {world.start: ()}
    layer = [world.start]
    while layer and found.depth < depth:
        following = []
        for state in layer:
            for step in list(world.steps(state)):
                found.transitions += 1
                try:
                    after = world.after(state, step)
                    if after not in ways:
                        ways[after] = (state, step)
                        following.append(after)
                        if heal_each and len(ways) % heal_each == 0:
                            found.healed += 1
                            world.heal(after)
                except Violation as violation:
                    found.violation, trace = str(violation), [step]
                    while ways[state]:
                        state, step = ways[state]
                        trace.append(step)
                    found.states, found.trace = len(ways), tuple(reversed(trace))
                    return found
        layer = following
        found.depth += 1
    found.states = len(ways)
    return found
