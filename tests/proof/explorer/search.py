# SPDX-License-Identifier: Apache-2.0
"""Breadth first through a `World`: every interleaving up to a depth, each state once."""
import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from explorer.healing import Healer
from explorer.model import Violation
from explorer.world import Scene, State, Step, World

MOST_HEALING = 24  # steps that are shown of a healing that failed


@dataclass
class Exploration:
    """What was seen. `trace` is empty where every state was good; else it leads from the start to the violation."""
    states: int = 0
    transitions: int = 0
    depth: int = 0
    complete: bool = False  # no state was left out
    core_steps: int = 0
    healed: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        reach = "all there are" if self.complete else f"depth {self.depth}"
        return (f"{self.states:,} states ({reach}), {self.transitions:,} transitions, {self.core_steps:,} steps of the "
                f"core, {self.healed:,} healings, {self.seconds:.1f} s")


def explore(scene: Scene, depth: int, *, most_states: int = 2_000_000, heal: bool = True) -> Exploration:
    """Visit every state that at most `depth` steps lead to. Stops at the first violation, which is a shortest one.

    With `heal`, it is also checked from each state that all ends well once nothing goes wrong any more.
    """
    with _without_collector():
        return _explore(scene, depth, most_states, heal)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing here is ever garbage, and looking for it takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _explore(scene: Scene, depth: int, most_states: int, heal: bool) -> Exploration:
    began = time.process_time()
    world = World(scene)
    healer = Healer(world)
    found = Exploration()
    parents: dict[State, tuple[State, Step] | None] = {world.start: None}
    layer = [world.start]
    while layer and found.depth < depth and not found.violation and len(parents) < most_states:
        following: list[State] = []
        for state in layer:
            for step in world.steps(state):
                found.transitions += 1
                try:
                    after = world.after(state, step)
                    if after in parents:
                        continue
                    parents[after] = (state, step)
                    if heal:
                        healer.check(after)
                except Violation as violation:
                    found.violation = str(violation)
                    found.trace = [*_way(world, parents, state), world.describe(step)]
                    if healer.trace:
                        found.trace += ["from here on nothing goes wrong any more", *healer.trace[:MOST_HEALING], "..."]
                    break
                following.append(after)
            if found.violation:
                break
        else:
            found.depth += 1
        layer = following
    found.complete = not layer and not found.violation
    found.states, found.core_steps, found.healed = len(parents), world.core_steps, healer.runs
    found.seconds = time.process_time() - began
    return found


def _way(world: World, parents: dict, state: State) -> list[str]:
    steps: list[str] = []
    while parents[state] is not None:
        state, step = parents[state]
        steps.append(world.describe(step))
    return steps[::-1]
