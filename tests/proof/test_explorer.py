# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of a few engines, up to a depth, through the real core (`explorer`).

B34 after each step: the sum of block references, no block of another request's that a peer may write, one end for each
attempt. From each state on: once nothing goes wrong any more, all requests end and nothing is held (B20). With it B21,
B22, B23, B25, B27, B28, B29 as far as the protocol decides them.
"""
from dataclasses import dataclass

import pytest
from explorer.broken import CHUNKS, VARIANTS, Variant
from explorer.model import Shape
from explorer.search import explore
from explorer.world import Scene


@dataclass(frozen=True)
class Case:
    """A scene, how deep it is searched, and at least how many states that must be."""
    name: str
    scene: Scene
    depth: int
    least: int


FAR = Shape(far=True)
CASES = [
    Case("one request, a network that loses, doubles and reorders", Scene(), 45, 50_000),
    Case("errors and an abort", Scene(errors=1, aborts=1), 25, 50_000),
    Case("time passes, engines rest", Scene(pauses=3, aborts=1), 14, 100_000),
    Case("an id is used again", Scene(pauses=1, aborts=1, shape=Shape(lives=2)), 15, 40_000),
    Case("P is killed and comes back", Scene(pauses=2, kills=1, reborn_prefills=1, aborts=1), 12, 30_000),
    Case("a second attempt on a second P, one P is killed", Scene(prefills=2, pauses=2, kills=1, aborts=1), 10, 50_000),
    Case("D is killed and comes back", Scene(pauses=2, kills=1, reborn_decodes=1, aborts=1), 12, 35_000),
    Case("two ranks, one write fails", Scene(pauses=1, errors=1, aborts=1, shape=Shape(ranks=2)), 16, 20_000),
    Case("two requests", Scene(pauses=1, aborts=1, shape=Shape(requests=2)), 11, 20_000),
    Case("the broker goes away and says no, a D is believed dead",
         Scene(pauses=3, aborts=1, outages=2, refusals=1, losses=1), 10, 50_000),
    Case("two requests, their D is believed dead", Scene(losses=1, shape=Shape(requests=2)), 12, 1_000),
    Case("two requests, two Ps", Scene(prefills=2, shape=Shape(requests=2)), 13, 15_000),
    Case("two Ds", Scene(decodes=2, pauses=1, aborts=1), 12, 30_000),
    Case("two Ds, two Ps", Scene(decodes=2, prefills=2), 14, 10_000),
    Case("two chunks, one write fails", Scene(errors=1, aborts=1, shape=Shape(**CHUNKS)), 25, 100_000),
    Case("two chunks, time passes, their D is believed dead",
         Scene(pauses=2, aborts=1, losses=1, shape=Shape(**CHUNKS)), 12, 20_000),
    Case("two chunks, two ranks, one write fails",
         Scene(errors=1, aborts=1, shape=Shape(ranks=2, **CHUNKS)), 20, 10_000),
    Case("two chunks, P is killed and comes back",
         Scene(pauses=1, kills=1, reborn_prefills=1, aborts=1, shape=Shape(**CHUNKS)), 14, 10_000),
    Case("a write fails, and lands later", Scene(pauses=2, kills=1, aborts=1, drifts=1), 14, 50_000),
    Case("two chunks, two ranks, a write fails, and lands later, their D is believed dead",
         Scene(losses=1, aborts=1, drifts=1, shape=Shape(ranks=2, **CHUNKS)), 16, 10_000),
    Case("two ranks, one could not add D", Scene(pauses=2, aborts=1, unadded=1, shape=Shape(ranks=2)), 12, 10_000),
    Case("two requests, P could not add D, and believes it dead",
         Scene(pauses=2, losses=1, unadded=1, shape=Shape(requests=2)), 8, 10_000),
    Case("far: a P that lives can't be reached", Scene(pauses=1, aborts=1, false_deaths=1, shape=FAR), 13, 20_000),
    Case("far: a write fails, and lands later", Scene(pauses=2, aborts=1, drifts=1, shape=FAR), 12, 10_000),
    Case("far: P is killed and comes back", Scene(pauses=2, kills=1, reborn_prefills=1, shape=FAR), 12, 5_000),
    Case("far: two ranks, a write fails, and lands later, P can't be reached",
         Scene(false_deaths=1, drifts=1, shape=Shape(far=True, ranks=2)), 13, 10_000),
    Case("far: two requests, P can't be reached twice",
         Scene(pauses=1, false_deaths=2, shape=Shape(far=True, requests=2)), 9, 20_000),
    Case("far: two Ps, one can't be reached, the other one's write fails, and lands later",
         Scene(prefills=2, false_deaths=1, drifts=1, shape=Shape(far=True, requests=2)), 9, 20_000),
]


@pytest.mark.search
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b34_no_interleaving_breaks_an_invariant(case: Case, capsys: pytest.CaptureFixture):
    """B34, B20-B23, B25, B27-B29: and each state that was seen is counted."""
    found = explore(case.scene, case.depth)
    with capsys.disabled():
        print(f"\n  {case.name}: {found}", end="")
    assert not found.violation, "\n".join([found.violation, *found.trace])
    assert found.states >= case.least, "the search has found less than there was"
    assert found.depth == case.depth


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_b34_a_broken_protocol_is_found(variant: Variant, capsys: pytest.CaptureFixture):
    """B34: the search can fail. Each variant leaves out one thing, and the shortest way to harm is found; the same
    scene with the real protocol has none."""
    found = explore(variant.scene, variant.depth, heal=variant.heal)
    assert variant.says in found.violation
    assert found.trace
    with capsys.disabled():
        print(f"\n  {variant.name}: {found.violation}; {found.states:,} states\n    " + "; ".join(found.trace), end="")
    mended = explore(variant.mended, found.depth + 1, heal=variant.heal)
    assert not mended.violation and mended.states > 1
