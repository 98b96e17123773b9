# SPDX-License-Identifier: Apache-2.0
"""Visits every state that a model can be in. A model gives its first state and, for each state, what may happen next.

States are tuples. A path that can't go on must have come to a good end, and no path may run in a circle: together that
says that nobody waits for ever and that everything comes to rest.
"""
import gc
from collections.abc import Iterator
from typing import NamedTuple, Protocol


class Model(Protocol):
    """What is explored."""

    def first(self) -> tuple:
        """The state at the beginning."""

    def after(self, state: tuple) -> Iterator[tuple[str, tuple]]:
        """(what happens, next state), for everything that may happen. Raises Violation."""

    def check(self, state: tuple) -> str | None:
        """What is wrong with this state, in passing."""

    def check_end(self, state: tuple) -> str | None:
        """What is wrong with this state, in which nothing happens any more."""


class Violation(Exception):
    """A property does not hold; with the way there."""


class Explored(NamedTuple):
    """What was seen. `depth`: the most things that can happen one after another."""
    states: int
    moves: int
    ends: int
    depth: int


def explore(model: Model, limit: int = 2_000_000) -> Explored:
    """All states. Raises Violation, and OverflowError beyond `limit` states."""
    collects = gc.isenabled()
    gc.disable()  # nothing here refers to itself, and there is more and more to look through
    try:
        return _explore(model, limit)
    finally:
        if collects:
            gc.enable()


def _explore(model: Model, limit: int) -> Explored:
    first = model.first()
    number = {first: 0}
    parent: list[tuple[int, str]] = [(-1, "")]
    order = [first]
    edges: list[list[int]] = []
    ends = 0

    def way(index: int) -> str:
        steps = []
        while index > 0:
            index, what = parent[index]
            steps.append(what)
        return " > ".join(reversed(steps))

    index = 0
    while index < len(order):
        state = order[index]
        if wrong := model.check(state):
            raise Violation(f"{wrong}\nafter {way(index)}\nin {state}")
        following = []
        for what, after in model.after(state):
            known = number.get(after)
            if known is None:
                known = number[after] = len(order)
                if known >= limit:
                    raise OverflowError(f"more than {limit} states")
                order.append(after)
                parent.append((index, what))
            following.append(known)
        if not following:
            ends += 1
            if wrong := model.check_end(state):
                raise Violation(f"{wrong}\nafter {way(index)}\nin {state}")
        edges.append(following)
        order[index] = ()  # only its hash was wanted again, and that is in `number`
        index += 1
    return Explored(len(order), sum(map(len, edges)), ends, _depth(edges, way))


def _depth(edges: list[list[int]], way) -> int:
    """The longest path. Raises Violation where there is a circle."""
    incoming = [0] * len(edges)
    for following in edges:
        for one in following:
            incoming[one] += 1
    depth = [0] * len(edges)
    ready = [index for index, count in enumerate(incoming) if not count]
    done = 0
    while ready:
        index = ready.pop()
        done += 1
        for one in edges[index]:
            depth[one] = max(depth[one], depth[index] + 1)
            incoming[one] -= 1
            if not incoming[one]:
                ready.append(one)
    if done < len(edges):
        circle = next(index for index, count in enumerate(incoming) if count)
        raise Violation(f"it can go round for ever\nafter {way(circle)}")
    return max(depth)
