# SPDX-License-Identifier: Apache-2.0
"""The virtual clock, the order of events, processes that stop and die, and a network that is not kind.

One generator, seeded, decides everything, and events of one moment come in the order in which they were made; so a seed
is a history. `Kernel.trace` is its fingerprint.
"""
import collections
import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Faults:
    """Probabilities for each letter, write and notice; delays in seconds; how many of the rest there are in a run."""
    loss: float = 0.0
    twice: float = 0.0
    delay_s: float = 0.002  # the usual longest
    late: float = 0.0  # this share of the letters takes up to `late_s` instead
    late_s: float = 3.0
    slow_writes: float = 0.0  # this share of the writes takes up to `slow_write_s`
    slow_write_s: float = 8.0
    write_error: float = 0.0
    notice_loss: float = 0.0
    notice_twice: float = 0.0
    kills: int = 0  # of engines, which come back as other incarnations
    stops: int = 0  # SIGSTOP, and SIGCONT up to `stop_s` later
    stop_s: float = 20.0
    broker_restarts: int = 0
    aborts: float = 0.0  # share of the requests whose client goes away
    # Between machines.
    cuts: int = 0  # of two engines, through which no letter comes, and no write, for up to `cut_s`
    cut_s: float = 15.0
    false_deaths: int = 0  # an engine can't reach another one, which lives
    drifts: float = 0.0  # this share of the writes that fail lands all the same, up to `late_s` later
    agent_problems: float = 0.0  # agents that can't be made, or destroyed


class Process:
    """Something that receives events until it is killed; while it is stopped they wait."""

    def __init__(self, name: str):
        self.name = name
        self.alive = True
        self.stopped = False
        self.backlog: collections.deque[tuple[str, Callable, tuple]] = collections.deque()


class Kernel:
    """Runs events in the order of their moments."""

    def __init__(self, seed: int, faults: Faults):
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 1_000.0
        self.steps: collections.Counter[str] = collections.Counter()
        self._events: list[tuple[float, int, Process | None, str, Callable, tuple]] = []
        self._made = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._cuts: dict[frozenset[str], float] = {}  # names of two: until when

    @property
    def trace(self) -> str:
        """The same for two runs in which the same happened at the same moments."""
        return self._hash.hexdigest()

    def at(self, delay_s: float, process: Process | None, kind: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Let this happen to the process, so long from now. `kind` is what it is counted as."""
        self._made += 1
        heapq.heappush(self._events, (self.now + delay_s, self._made, process, kind, call, arguments))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Until the condition holds (looked at every 64 events); False where the time is over before, or all is."""
        deadline = self.now + limit_s
        while self._events:
            for _ in range(64):
                if not self._events:
                    break
                if self._events[0][0] > deadline:
                    return False
                self.now, _, process, kind, call, arguments = heapq.heappop(self._events)
                self._dispatch(process, kind, call, arguments)
            if until():
                return True
        return until()

    def _dispatch(self, process: Process | None, kind: str, call: Callable, arguments: tuple) -> None:
        if process is not None:
            if not process.alive:
                return
            if process.stopped:
                process.backlog.append((kind, call, arguments))
                return
            self._hash.update(f"{self.now:.6f} {process.name} {kind}\n".encode())
        else:
            self._hash.update(f"{self.now:.6f} {kind}\n".encode())
        self.steps[kind] += 1
        call(*arguments)

    def note(self, text: str) -> None:
        """Put something into the trace."""
        self._hash.update(text.encode())

    # Processes.

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        process.alive = False
        process.backlog.clear()

    def stop(self, process: Process) -> None:
        """SIGSTOP."""
        process.stopped = True

    def go_on(self, process: Process) -> None:
        """SIGCONT: what has waited happens now, in its order."""
        process.stopped = False
        while process.backlog:
            kind, call, arguments = process.backlog.popleft()
            self.at(0.0, process, kind, call, *arguments)

    # The network.

    def cut(self, one: Process, other: Process, until: float) -> None:
        """Until that moment nothing passes between the two."""
        self._cuts[frozenset((one.name, other.name))] = until

    def heal(self) -> None:
        """No cut is left."""
        self._cuts.clear()

    def cut_for(self, one: str, other: str) -> float:
        """For how long nothing will pass between these two; 0 where it does."""
        return max(0.0, self._cuts.get(frozenset((one, other)), 0.0) - self.now)

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def send(self, to: Process, kind: str, call: Callable[..., Any], *arguments: Any, sender: str = "") -> None:
        """A letter, which may be lost, doubled, late, and overtaken. One that comes to a cut waits there, or is lost
        with its connection."""
        cut_s = self.cut_for(sender, to.name)
        if self.happens(self.faults.loss) or cut_s and self.happens(0.5):
            return
        for _ in range(2 if self.happens(self.faults.twice) else 1):
            longest = self.faults.late_s if self.happens(self.faults.late) else self.faults.delay_s
            self.at(cut_s + self.random.uniform(0.0, longest), to, kind, call, *arguments)
