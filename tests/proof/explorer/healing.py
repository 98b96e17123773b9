# SPDX-License-Identifier: Apache-2.0
"""What becomes of a world in which nothing goes wrong any more.

All letters of before are lost. From then on letters arrive once and in order, writes land, engines do as told, the dead
are seen to be dead, the broker is an honest one. A P whose writes have failed, so that nobody knows whether they land,
is ended by its operator; but not on another machine than D's, where D needs nobody's help. Then every request must end,
nothing may be held by anybody (B20), and a job that nobody had claimed yet must not die of age while a prefill engine
is there to take it.
"""
import collections

from explorer.model import DecodeEngine, PrefillEngine, Violation, require
from explorer.snapshots import NOW
from explorer.world import DEAD, State, World
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.attempts import AttemptState
from vllm_pd.protocol.jobs import JobState

MAX_ROUNDS = 400


class Healer:
    """Runs each combination of engine states at most once."""

    def __init__(self, world: World):
        self.world = world
        self.runs = 0
        self.trace: list[str] = []  # of the healing that failed
        self._good: set[tuple[int, ...]] = set()

    def check(self, state: State) -> None:
        """Raises Violation where it does not end well."""
        if state[:self.world.letters_at] in self._good:
            return
        self.runs += 1
        healing = _Healing(self.world, state, self._good)
        try:
            self._good |= healing.run()
        except Violation:
            self.trace = healing.trace
            raise


class _Healing:
    """One run."""

    def __init__(self, world: World, state: State, good: set[tuple[int, ...]]):
        self.world = world
        self.now = list(state[:world.letters_at])
        self.good = good
        self.trace: list[str] = []
        self.letters: collections.deque[int] = collections.deque()
        for p in self.engines(PrefillEngine):
            engine = self.engine(p)
            if world.scene.shape.far:
                continue
            if JobState.UNPROVEN in engine.side.states().values() or any(w.may_land for w in engine.work.values()):
                self.now[world.index[p]] = DEAD
        self.must_be_claimed = self._unclaimed() if any(self.engines(PrefillEngine)) else {}

    def engines(self, kind: type) -> list[str]:
        """Names of the living ones."""
        engines = self.world._engines
        return [name for i, name in enumerate(self.world.names) if isinstance(engines[self.now[i]], kind)]

    def living(self) -> list[str]:
        """Names of all that run."""
        return self.engines(DecodeEngine) + self.engines(PrefillEngine)

    def engine(self, name: str) -> DecodeEngine | PrefillEngine:
        return self.world._engines[self.now[self.world.index[name]]]

    def run(self) -> set[tuple[int, ...]]:
        seen: set[tuple[int, ...]] = set()
        self._tell_facts()
        for _ in range(MAX_ROUNDS):
            if not self.letters:
                if tuple(self.now) in self.good and not self.must_be_claimed:
                    return seen
                seen.add(tuple(self.now))
            if not self._work():
                if self._at_rest():
                    break
                require(self._pass(), "nobody has anything left to do, and yet not all has ended")
            self._check_claims()
        else:
            left = {name: self.engine(name).side.states() for name in self.living()}
            require(False, f"not over after {MAX_ROUNDS} rounds: {left}; lately {self.trace[-12:]}")
        for name in self.living():
            self.engine(name).check_at_rest()
        return seen

    def _work(self) -> bool:
        """Whatever can be done without time passing; False where there is nothing."""
        if self.letters:
            while self.letters:
                number = self.letters.popleft()
                to, kind, content = self.world.letter(number)
                if self._alive(to) and (kind != "offer" or self._is_for(to, content)) and kind != "put_reply":
                    self._step(to, "arrive", number)
            return True
        busy = False
        for p in self.engines(PrefillEngine):
            for attempt, rank in self.engine(p).flights():
                lands = self.world._can_land(tuple(self.now), attempt, self.engine(p).generation(attempt), rank)
                self._step(p, "landed" if lands else "failed", attempt, rank)
                busy = True
            for given in self.engine(p).inputs()[:1]:
                self._step(p, *given)
                busy = True
        for d in self.engines(DecodeEngine):
            for given in [g for g in self.engine(d).inputs() if g[0] in ("finish", "renew", "destroy")]:
                self._step(d, *given)
                busy = True
        for name in self.living():
            due = self.engine(name).next_timeout()
            if due is not None and due <= NOW:
                self._step(name, "tick")
                busy = True
        return busy

    def _step(self, name: str, kind: str, *content: object) -> None:
        self.trace.append(self.world.describe((kind, name, *content)))
        at = self.world.index[name]
        self.now[at], sent = self.world.engine_step(self.now[at], kind, *content)
        for number in sent:
            to, what, inside = self.world.letter(number)
            if what != "land":
                self.letters.append(number)
            elif self._alive(to):
                there = self.world.index[to]
                self.now[there], _ = self.world.engine_step(self.now[there], "land", *inside)

    def _alive(self, name: str) -> bool:
        return self.now[self.world.index[name]] > DEAD

    def _is_for(self, p: str, job: m.Job) -> bool:
        """An honest broker offers a job to one P: the first that the job does not avoid."""
        fitting = [name for name in self.engines(PrefillEngine) if name not in job.avoid]
        return bool(fitting) and fitting[0] == p

    def _tell_facts(self) -> None:
        """Who is dead, and who is registered."""
        for d in self.engines(DecodeEngine):
            for p in self.world.prefills:
                if not self._alive(p):
                    self._step(d, "dead", p)
            if self.engine(d).side._broker_lost_at is not None:
                self._step(d, "broker", True)
        for p in self.engines(PrefillEngine):
            for d in self.world.decodes:
                if not self._alive(d):
                    self._step(p, "dead", d)
            self._step(p, "members", *self.engines(DecodeEngine))
            if self.world.scene.shape.far:
                self._step(p, "reconnected")

    def _pass(self) -> bool:
        seconds = self.world.pause_s(tuple(self.now))
        if seconds is None:
            return False
        self.trace.append(f"{seconds:g} s pass")
        for index, number in enumerate(self.now):
            if number > DEAD:
                self.now[index] = self.world._passed(number, seconds)
        return True

    def _at_rest(self) -> bool:
        return not any(self.engine(name).side.states() or self._renews(name) for name in self.living())

    def _renews(self, name: str) -> bool:
        engine = self.engine(name)
        return isinstance(engine, DecodeEngine) and engine.next_timeout() is not None

    # An unclaimed job does not die of age.

    def _unclaimed(self) -> dict[m.Attempt, str]:
        """Jobs that have enough time left to be put again and be claimed, by a P that they need not avoid."""
        found: dict[m.Attempt, str] = {}
        for d in self.engines(DecodeEngine):
            side = self.engine(d).side
            for attempt, record in side._records.items():
                patience = side.limits.claim_retry_s + 2.0
                takers = [p for p in self.engines(PrefillEngine) if p not in record.avoid]
                if (record.state is AttemptState.QUEUED and record.deadline - NOW > patience and takers
                        and side._broker_lost_at is None and record.peers_lost_at is None):
                    found[attempt] = d
        return found

    def _check_claims(self) -> None:
        for attempt, d in self.must_be_claimed.items():
            require(attempt not in self.engine(d).died_of_age,
                    f"{attempt} was never claimed although a prefill engine was there")
