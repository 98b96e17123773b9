# SPDX-License-Identifier: Apache-2.0
"""Prefill first, as a graph of states: a P that holds a prompt, and a D whose requests want to read it.

As in `world`: the real core of both engines, a network that never forgets (each letter may arrive at any later moment,
any number of times, or never), engines that rest, die and come back. Beside each core stands a model of its blocks: P
reuses a block the moment that its hold ends, and a read brings what P's block has when it lands, at any moment after it
was posted. Either may believe that the other one is gone while a read is open, and meet it again.

Where the two are on machines of their own (`HoldScene.far`), each has transfer agents, and a read brings something only
while there are the two that it goes through. Then neither knows whether the other one is dead.
"""
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from explorer.model import Violation, generation_of
from explorer.snapshots import NOW, canonical, clone, shift
from vllm_pd.protocol import actions as a
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.hold_reads import HoldReads
from vllm_pd.protocol.holds import HoldLimits, Holds
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.names import generation_name, incarnation_of
from vllm_pd.protocol.peering import PeerState
from vllm_pd.protocol.prefill import PrefillProtocol

PROMPTS = {"A": [1, 2, 3, 4], "B": [5, 6, 7, 8]}
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "f", "f", 2, 1, 1, 64, "hnd")
DECODE = DecodeLimits(lease_s=9.0, deadline_s=30.0, claim_retry_s=8.0, ttl_s=5.0)
PREFILL = PrefillLimits(ttl_s=1000.0, hello_retry_s=3.0,
                        holds=HoldLimits(hold_s=4.0, query_s=3.0, query_max_s=6.0, lease_s=9.0))
NAMES = ("p", "p'", "d", "d'")  # the engines of a state, in its order
P, P_AGAIN, D, D_AGAIN = range(4)
HOLDERS, READERS = (P, P_AGAIN), (D, D_AGAIN)

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
    losses: int = 0  # P believes a D gone that lives; the registry may list it again at any moment
    false_deaths: int = 0  # D takes a P that lives for dead
    strangers: int = 0  # another P greets D, whose table of Ps has room for one that is idle
    partings: int = 0  # a write of P to D fails, and may land
    reborn: bool = False  # P comes back, and holds another prompt by the same number
    reborn_reader: bool = False  # D comes back, with requests of its own that name the hold
    far: bool = False
    generations: type[Generations] = Generations
    holds: type[Holds] = Holds
    reads: type[HoldReads] = HoldReads
    prefill: type[PrefillProtocol] = PrefillProtocol


class Agents:
    """The transfer agents of an engine, and what its protocol says of their generations. `oldest` is the first that
    there is, `newest` the last."""

    side: PrefillProtocol | DecodeProtocol

    def __init__(self, scene: HoldScene):
        self.shape = scene
        self.oldest = self.newest = 0
        self.asked = ""  # of the ranks

    def ready(self) -> str:
        """What the ranks may do now: "renew", "destroy" or nothing."""
        return self.asked

    def renew(self) -> list[Letter]:
        """The ranks make a new agent."""
        self.asked = ""
        self.newest += 1
        return self._do(self.side.generations.renewed(NOW, b"memory", [self.side]))

    def destroy(self) -> list[Letter]:
        """The ranks destroy all but the newest."""
        self.asked = ""
        self.oldest = self.newest
        return self._do(self.side.generations.retired(NOW, True, [self.side]))

    def due(self) -> float | None:
        """When `tick` is next due; None where it is not."""
        when = self.side.next_timeout()
        if not self.shape.far:
            return when
        when = min(NEVER if when is None else when, self.side.generations.next_timeout([self.side]))
        return None if when == NEVER else when

    def see_to(self, actions: list[a.Action]) -> list[a.Action]:
        """These, and what is due of the generations."""
        if self.shape.far:
            actions = actions + self.side.generations.handle_timeout(NOW, [self.side])
        for action in actions:
            self.asked = ("renew" if isinstance(action, a.RenewTransport)
                          else "destroy" if isinstance(action, a.RetireTransport) else self.asked)
        return actions

    def _do(self, actions: list[a.Action]) -> list[Letter]:
        raise NotImplementedError


class HoldingEngine(Agents):
    """P: its half of the protocol, which prompt each of its holds keeps, and which Ds it has connections to."""

    def __init__(self, name: str, prompt: str, scene: HoldScene):
        super().__init__(scene)
        self.name = name
        us = m.Member(name, m.Role.PREFILL, "", FINGERPRINT, host_id="p" if scene.far else "")
        self.side = scene.prefill(us, b"", PREFILL, scene.generations(name, b"memory", 9.0, NEVER))
        self.side.holds = scene.holds(PREFILL.holds, self.side.dropped, self.side.generations)
        self.hold = m.Attempt(name, "h", 1)
        self.kept = {self.hold: prompt}
        self.connected: set[str] = set()
        self.added: set[str] = set()  # to the transport
        self.side.holds.add(NOW, self.hold, token_digest(PROMPTS[prompt]), [7, 8])
        self.listed(["d"])
        self.deliver("d", m.HelloReply(reader("d", scene), b""))

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    def dead(self, peer: str) -> list[Letter]:
        """It is; or, on another machine, it can't be reached, which nobody takes for a fact."""
        return self._do((self.side.peer_seems_dead if self.shape.far else self.side.peer_dead)(NOW, peer))

    def reconnected(self) -> list[Letter]:
        """The connections to its peers were made anew."""
        return self._do(self.side._peering.introduce_again(NOW))

    def lost(self, peer: str) -> list[Letter]:
        return self._do(self.side.peer_lost(NOW, peer))

    def listed(self, names: list[str]) -> list[Letter]:
        """The registry lists these decode engines."""
        return self._do(self.side.members_are(NOW, [reader(name, self.shape) for name in names]))

    def part(self, peer: str) -> list[Letter]:
        """A write of a job of that D has failed, and may land."""
        self.side.parted.add(peer)
        return []

    def has_met(self, peer: str) -> bool:
        """Whether a new claim of that D would be looked at."""
        found = self.side._peering.find(peer)
        return found is not None and found.state is PeerState.PEER

    def _do(self, actions: list[a.Action]) -> list[Letter]:
        actions = self.see_to(actions)
        for action in actions:
            if isinstance(action, a.HoldEnded) and self.kept.pop(action.hold, None) is None:
                raise Violation("a hold ends twice")
            if isinstance(action, a.Connect):
                self.connected.add(action.peer)
            elif isinstance(action, a.Disconnect):
                self.connected.discard(action.peer)
            elif isinstance(action, a.AddPeer):
                if action.name in self.added:
                    raise Violation(f"{action.name} is added twice")
                self.added.add(action.name)
            elif isinstance(action, a.DropPeer):
                self.added.remove(action.name)
        return [(one.peer, self.name, one.message) for one in actions if isinstance(one, a.ToDecode)]


class PostedRead(NamedTuple):
    """A read that was posted: of which hold, through which agent of P, and of ours."""
    hold: m.Attempt
    there: int
    here: int


class ReadingEngine(Agents):
    """D: its half of the protocol, its requests, and the reads that are posted."""

    def __init__(self, name: str, holders: list[str], scene: HoldScene):
        super().__init__(scene)
        self.name = name
        limits = msgspec.structs.replace(DECODE, max_peers=1) if scene.strangers else DECODE
        self.side = DecodeProtocol(reader(name, scene), b"", limits, scene.generations(name, b"", 9.0, NEVER))
        self.side.reads = scene.reads(self.side.member, DECODE.ttl_s, DECODE.claim_retry_s / 4, DECODE.lease_s,
                                      self.side.counters, self.side.dropped, self.side.generations)
        self.attempts: dict[int, m.Attempt] = {}  # by the number of the request
        self.open: dict[m.Attempt, PostedRead] = {}  # reads that may land
        self.adrift: dict[m.Attempt, PostedRead] = {}  # those that have failed, and land all the same while P lives
        self.ended: dict[int, str] = {}
        self.blocks: set[m.Attempt] = set()  # attempts whose blocks are set aside
        for one in holders:
            self.greeted(one)

    def greeted(self, holder: str) -> list[Letter]:
        """A P greets it."""
        host = "p" if self.shape.far else ""
        return self.deliver(holder, m.Hello(m.Member(holder, m.Role.PREFILL, "", FINGERPRINT, host_id=host), b"memory"))

    def ask(self, number: int) -> list[Letter]:
        """The request comes, and is parked; or, where the two are parted, it stays here, and P learns that its hold is
        not wanted."""
        attempt, hold = m.Attempt(self.name, "r", number), m.Attempt("p", "h", 1)
        self.attempts[number] = attempt
        if hold.incarnation in self.side.parted:
            self.ended[number] = "stays"
            return [(hold.incarnation, self.name, m.HoldDone(attempt, hold))]
        self.blocks.add(attempt)
        return self._do(self.side.reads.claim(NOW, attempt, hold, token_digest(PROMPTS[self.shape.requests[number]]),
                                              [1, 2], 0, 30.0))

    def abort(self, number: int) -> list[Letter]:
        self.ended[number] = "aborted"
        return self._do(self.side.reads.abort(NOW, self.attempts[number]))

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    def dead(self, peer: str) -> list[Letter]:
        self.adrift = {attempt: read for attempt, read in self.adrift.items() if read.hold.incarnation != peer}
        return self.taken_for_dead(peer)

    def taken_for_dead(self, peer: str) -> list[Letter]:
        """It need not be: what it reads there may still land."""
        return self._do((self.side.peer_seems_dead if self.shape.far else self.side.peer_dead)(NOW, peer))

    def destroy(self) -> list[Letter]:
        """What goes through the older agents ends in an error."""
        self.adrift = {attempt: read for attempt, read in self.adrift.items() if read.here >= self.newest}
        letters: list[Letter] = []
        for attempt in [one for one, read in self.open.items() if read.here < self.newest]:
            letters += self.land(attempt, "")
        return letters + super().destroy()

    def fail(self, attempt: m.Attempt) -> list[Letter]:
        """The read ends in an error, and nobody knows whether more of it lands. The two are parted."""
        read = self.adrift[attempt] = self.open.pop(attempt)
        self.side.parted.add(read.hold.incarnation)
        return self._do(self.side.reads.unproven(NOW, attempt, "failed"))

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
        actions = self.see_to(actions)
        for action in actions:
            if isinstance(action, a.ReadHold):
                self.open[action.attempt] = PostedRead(m.Attempt(incarnation_of(action.peer), "h", 1),
                                                       generation_of(action.peer), self.newest)
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
            elif isinstance(action, a.DropPeer) and action.name in {
                    generation_name(read.hold.incarnation, read.there)
                    for read in (*self.open.values(), *self.adrift.values())}:
                raise Violation("D's ranks forget a P that they read from")
        return [(one.peer, self.name, one.message) for one in actions if isinstance(one, a.ToPrefill)]


def reader(name: str, scene: HoldScene) -> m.Member:
    """The registry entry of a D."""
    return m.Member(name, m.Role.DECODE, f"tcp://{name}", FINGERPRINT, host_id="d" if scene.far else "")


class HoldWorld:
    """The states and steps of a scene. A state: `NAMES` as numbers, 0 for dead or unborn; the letters, as bits of one
    number; what is left of each budget."""

    BUDGETS = ("pauses", "aborts", "errors", "kills", "drifts", "mistakes", "losses", "false_deaths", "strangers",
               "partings")
    LETTERS = len(NAMES)
    SPENT = {"abort": "aborts", "pass": "pauses", "kill": "kills", "fail": "drifts", "mistake": "mistakes",
             "lost": "losses", "taken_for_dead": "false_deaths", "meet": "strangers", "part": "partings"}
    TO = {"p": HOLDERS, "p'": (P_AGAIN, ), "d": READERS, "d'": (D_AGAIN, )}  # who may have the address of the name

    def __init__(self, scene: HoldScene):
        self.scene = scene
        self._engines: list[Any] = [None]
        self._numbers: dict[Any, int] = {}
        self._letters: list[Letter] = []
        self._letter_numbers: dict[Any, int] = {}
        self._known: dict[Any, tuple[int, int]] = {}
        self.sent = 0  # the letters of the last step
        self.start = (self._number(HoldingEngine("p", "A", scene)), 0, self._number(self._reader("d")), 0,
                      0, *(getattr(scene, budget) for budget in self.BUDGETS))

    def _reader(self, name: str) -> ReadingEngine:
        return ReadingEngine(name, ["p", "p'"] if self.scene.reborn else ["p"], self.scene)

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
        """All that can happen next: the kind, to whom (an index), and its details."""
        left = dict(zip(self.BUDGETS, state[self.LETTERS + 1:], strict=True))
        living = [index for index in range(self.LETTERS) if state[index]]
        for index in living:
            engine = self.engine(state, index)
            if (engine.due() or 1e9) <= NOW:
                yield "tick", index
            if engine.ready():
                yield engine.ready(), index
        letters, number = state[self.LETTERS], 0
        while letters:
            if letters & 1:  # what is for P may find the one that has its address now
                yield from (("arrive", index, number) for index in self.TO[self._letters[number][0]] if state[index])
            letters >>= 1
            number += 1
        for index in READERS:
            if state[index]:
                yield from self._steps_of_reader(state, index, left)
        if left["pauses"] and self.pause_s(state) is not None:
            yield "pass", -1
        if left["kills"]:
            yield from (("kill", index) for index in (P, D) if state[index])
        for index in HOLDERS:
            if state[index]:
                yield from self._steps_of_holder(state, index, left)
        if self.scene.reborn and not state[P] and not state[P_AGAIN]:
            yield "begin", P_AGAIN
        if self.scene.reborn_reader and not state[D] and not state[D_AGAIN]:
            yield "begin", D_AGAIN

    def _steps_of_reader(self, state: tuple, index: int, left: dict[str, int]) -> Iterator[tuple]:
        d = self.engine(state, index)
        for one in range(len(self.scene.requests)):
            if one not in d.attempts:
                yield "ask", index, one
            elif one not in d.ended and left["aborts"]:
                yield "abort", index, one
        for attempt, read in d.open.items():
            alive = self._serves(state, read)
            if alive:
                yield "land", index, attempt
            if not alive or left["errors"]:
                yield "break", index, attempt
            if left["drifts"]:
                yield "fail", index, attempt
        for attempt, read in d.adrift.items():
            if not self.scene.far or self._serves(state, read):
                yield "drift", index, attempt
        if not state[P]:
            yield "dead", index, "p"
        elif left["false_deaths"]:
            yield "taken_for_dead", index, "p"
        if left["strangers"]:
            yield "meet", index, "q"

    def _steps_of_holder(self, state: tuple, index: int, left: dict[str, int]) -> Iterator[tuple]:
        if not state[D]:
            yield "dead", index, "d"
        else:
            yield from ((kind, index, "d") for kind in ("mistake", "lost", "part") if left[self.SPENT[kind]])
        if self.scene.losses or self.scene.reborn_reader:
            yield "list", index, tuple(NAMES[one] for one in READERS if state[one])

    def pause_s(self, state: tuple) -> float | None:
        """How long until somebody has something to do."""
        due = [self.engine(state, index).due() for index in range(self.LETTERS) if state[index]]
        return min((when - NOW for when in due if when is not None and when > NOW), default=None)

    def after(self, state: tuple, step: tuple) -> tuple:
        """The state after a step. Raises Violation."""
        after, (kind, index, *_) = list(state), step
        budget = self.SPENT.get(kind)
        if kind == "break" and self._serves(state, self.engine(state, index).open[step[2]]):
            budget = "errors"
        if budget:
            after[self.LETTERS + 1 + self.BUDGETS.index(budget)] -= 1
        if kind == "pass":
            after[:self.LETTERS] = self._later(state, self.pause_s(state))
        elif kind == "kill":
            after[index] = 0
        elif kind == "begin":
            made = HoldingEngine("p'", "B", self.scene) if index == P_AGAIN else self._reader(NAMES[index])
            after[index] = self._number(made)
        else:
            self._move(after, state, step)
        self._check(after)
        return tuple(after)

    def _move(self, after: list, state: tuple, step: tuple) -> None:
        kind, index, content = (*step, None)[:3]
        found = ""
        if kind == "land":
            hold = self.engine(state, index).open[content].hold
            found = self.engine(state, self._index_of(hold)).kept.get(hold, "other KV")
        key = (after[index], step, found)
        if key not in self._known:
            engine = clone(self.engine(state, index))
            sent = 0
            for letter in self._act(engine, kind, content, found):
                if letter[0] in self.TO:
                    sent |= 1 << self._letter_number(letter)
            self._known[key] = self._number(engine), sent
        after[index], self.sent = self._known[key]
        after[self.LETTERS] |= self.sent

    def _act(self, engine: Any, kind: str, content: Any, found: str) -> list[Letter]:
        if kind == "arrive":
            _, sender, message = self._letters[content]
            return engine.deliver(sender, message)
        acts: dict[str, Callable[[], list[Letter]]] = {
            "tick": lambda: engine.tick(), "renew": lambda: engine.renew(), "destroy": lambda: engine.destroy(),
            "reconnected": lambda: engine.reconnected(), "mistake": lambda: engine.dead(content),
            "list": lambda: engine.listed(list(content)), "meet": lambda: engine.greeted(content),
            "land": lambda: engine.land(content, found), "break": lambda: engine.land(content, "")}
        return acts[kind]() if kind in acts else getattr(engine, kind)(content)

    def _letter_number(self, letter: Letter) -> int:
        key = canonical(letter)
        if key not in self._letter_numbers:
            self._letter_numbers[key] = len(self._letters)
            self._letters.append(letter)
        return self._letter_numbers[key]

    def _later(self, state: tuple, seconds: float) -> list[int]:
        """The engines when so much time has passed."""
        later = []
        for index in range(self.LETTERS):
            engine = clone(self.engine(state, index))
            if engine is not None:
                shift(engine.side, seconds)
            later.append(0 if engine is None else self._number(engine))
        return later

    def _check(self, state: list) -> None:
        """While a read of D may take bytes from P's blocks, P keeps them, and the connection on which D reports its
        end."""
        for d in (self._engines[state[index]] for index in READERS):
            for attempt, read in d.open.items() if d is not None else ():
                p = self._engines[state[self._index_of(read.hold)]]
                if not self._serves(state, read):
                    continue
                if read.hold not in p.kept:
                    raise Violation(f"P reuses blocks that {attempt} reads")
                if not self.scene.far and d.name not in p.connected & p.added:
                    raise Violation("P drops a D that reads")

    def _serves(self, state: Sequence[int], read: PostedRead) -> bool:
        """Whether P has the agent that the read goes to."""
        p = self._engines[state[self._index_of(read.hold)]]
        return p is not None and read.there >= p.oldest

    @staticmethod
    def _index_of(hold: m.Attempt) -> int:
        return int(hold.incarnation == "p'")

    def heal(self, state: tuple) -> None:
        """From here on nothing goes wrong any more: what is sent arrives, once, and a P is ended by its operator where
        nobody knows whether a read of it lands. Raises Violation unless all ends, and nobody holds anything. Where P
        may have lost a D, so it is without the registry; and once that lists the D again, P has met it in the end."""
        self._heal(state)
        if self.scene.losses or self.scene.reborn_reader:
            names = tuple(NAMES[index] for index in READERS if state[index])
            sent = 0
            for index in HOLDERS:
                if state[index]:
                    state, sent = self.after(state, ("list", index, names)), sent | self.sent
            self._heal(state, sent, names)

    def _heal(self, state: tuple, due: int = 0, listed: tuple[str, ...] = ()) -> None:
        """`due`: the letters on their way. `listed`: whom the Ps have met in the end, unless they are parted."""
        if self.scene.far:
            for index in HOLDERS:
                if state[index]:
                    state, due = self.after(state, ("reconnected", index)), due | self.sent
        for index in READERS:
            for read in self.engine(state, index).side.reads._reads.values() if state[index] else ():
                if read.unproven and not self.scene.far:
                    holder = self._index_of(read.hold)
                    state = (*state[:holder], 0, *state[holder + 1:])
        for _ in range(200):
            holders = [self.engine(state, index) for index in HOLDERS if state[index]]
            readers = [self.engine(state, index) for index in READERS if state[index]]
            if not (any(p.kept for p in holders) or any(d.blocks or d.side.reads.states() for d in readers)
                    or any(not p.has_met(name) for p in holders for name in listed if name not in p.side.parted)):
                return
            arrived, due = due, 0
            for number in range(arrived.bit_length()):
                index = NAMES.index(self._letters[number][0])
                if arrived >> number & 1 and state[index]:
                    state, due = self.after(state, ("arrive", index, number)), due | self.sent
            steps = [one for one in self.steps(state) if one[0] in ("tick", "dead", "land", "renew", "destroy")]
            steps += [("break", index, attempt) for index in READERS if state[index]
                      for attempt, read in self.engine(state, index).open.items() if not self._serves(state, read)]
            for step in steps:
                if step[0] in ("land", "break"):  # since then an agent that it goes through may have been destroyed
                    read = self.engine(state, step[1]).open.get(step[2])
                    if read is None:
                        continue
                    step = ("land" if self._serves(state, read) else "break", *step[1:])
                state, due = self.after(state, step), due | self.sent
            moved = due or any(step[0] != "dead" for step in steps)  # a death may be seen again and again
            seconds = None if moved else self.pause_s(state)
            if seconds is not None:
                state = (*self._later(state, seconds), *state[self.LETTERS:])
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
