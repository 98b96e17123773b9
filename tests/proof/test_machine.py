# SPDX-License-Identifier: Apache-2.0
"""A random walk through a bigger world than can be searched to its end: two decode and two prefill engines that die and
come back, two ranks, ids that are used again, second attempts.

After each step the invariants of B34 hold, and at its end, wherever that is, all can still end well. With B21, B22,
B23, B25, B27, B28, B29. Set VLLM_PD_EXAMPLES for a longer run.
"""
import dataclasses
import os

import msgspec
import pytest
from explorer.broken import CHUNKS, AnswersTooSoon, NoFence
from explorer.healing import Healer
from explorer.model import Shape, Violation
from explorer.snapshots import NOW, clone
from explorer.world import Scene, State, Step, World
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from vllm_pd.protocol import messages as m

SCENE = Scene(decodes=2, prefills=2, reborn_decodes=2, reborn_prefills=2, pauses=1000, kills=3, errors=4, aborts=8,
              losses=3, refusals=2, outages=4, shape=Shape(ranks=2, requests=2, lives=3, blocks=4, prefill_blocks=2))
CHUNKED = dataclasses.replace(SCENE, shape=dataclasses.replace(SCENE.shape, **{**CHUNKS, "blocks": 6},
                                                               prefill_blocks=4))
RARE = {"kill", "begin", "lost", "break", "broker", "dead", "abort"}


class Walk(RuleBasedStateMachine):
    """Rules draw what happens next. `fresh` holds what was sent and has not arrived once."""

    scene = SCENE

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.scene)
        self.healer = Healer(self.world)
        self.state: State = self.world.start
        self.fresh: list[int] = []

    def go(self, step: Step) -> None:
        """Take a step; `World.after` checks what must hold."""
        before = self.state[self.world.letters_at]
        self.state = self.world.after(self.state, step)
        news, number = self.state[self.world.letters_at] & ~before, 0
        while news:
            if news & 1:
                self.fresh.append(number)
            news >>= 1
            number += 1
        if step[0] == "arrive" and step[2] in self.fresh:
            self.fresh.remove(step[2])

    def draw(self, data: st.DataObject, wanted: set[str] | None, other_than: bool = False) -> bool:
        """Take one of the steps of these kinds, or of all other kinds; False where there is none."""
        steps = [step for step in self.world.steps(self.state)
                 if wanted is None or (step[0] in wanted) != other_than]
        if steps:
            kinds = sorted({step[0] for step in steps})
            kind = data.draw(st.sampled_from(kinds))
            step = data.draw(st.sampled_from([step for step in steps if step[0] == kind]))
            event(kind)
            self.go(step)
        return bool(steps)

    @rule(data=st.data())
    def something(self, data):
        self.draw(data, RARE, other_than=True)

    @rule(data=st.data())
    def engines_go_on(self, data):
        self.draw(data, {"post", "land", "compute", "unleased", "say", "tick", "submit"})

    @rule(data=st.data())
    def something_rare(self, data):
        self.draw(data, RARE)

    @rule(offers=st.integers(0, 3))
    def the_network_works(self, offers):
        """What was sent arrives, in order, and what that brings about; a job is offered to so many."""
        offered: dict = {}
        for _ in range(40):
            if not self.fresh:
                return
            number = self.fresh.pop(0)
            to, kind, content = self.world.letter(number)
            if kind == "put_reply" or to not in self.world.living(self.state):
                continue
            if kind == "offer":
                offered[content.attempt] = offered.get(content.attempt, 0) + 1
                if offered[content.attempt] > offers:
                    continue
            self.go(("arrive", to, number))

    @rule(data=st.data())
    @precondition(lambda self: self.state[self.world.letters_at])
    def noise(self, data):
        """B29: what nobody asked for, or of an older claim, another sender, another attempt, changes no state."""
        sent = self.state[self.world.letters_at]
        number = data.draw(st.sampled_from([bit for bit in range(sent.bit_length()) if sent >> bit & 1]))
        to, kind, content = self.world.letter(number)
        engine = clone(self.world.engine(self.state, to))
        if engine is None or kind != "deliver":
            return
        sender, message = content
        if "claim" not in message.__struct_fields__ or isinstance(message, m.Claim):
            return
        wrong = data.draw(st.sampled_from(["claim", "attempt", "sender"]))
        if wrong == "claim":
            message = msgspec.structs.replace(message, claim=message.claim + 1_000_000)
        elif wrong == "attempt":
            message = msgspec.structs.replace(message, attempt=msgspec.structs.replace(message.attempt, number=10**6))
        else:
            sender = "stranger"
        before = (engine.side.states(), sum(engine.side.dropped.values()))
        letters = engine.deliver(sender, message)
        assert engine.side.states() == before[0] and sum(engine.side.dropped.values()) == before[1] + 1
        assert all(isinstance(letter[2][1], m.Cancel | m.Stopped) for letter in letters)
        engine.check()

    @rule(data=st.data(), rank=st.sampled_from([-1, 2, 4096]))
    @precondition(lambda self: any(name[0] == "d" for name in self.world.living(self.state)))
    def noise_of_a_transport(self, data, rank):
        """B28, B29: a notice of a rank that there is not, or for an attempt that there is not."""
        name = data.draw(st.sampled_from([name for name in self.world.living(self.state) if name[0] == "d"]))
        engine = clone(self.world.engine(self.state, name))
        before = engine.side.states()
        for attempt in (*before, m.Attempt(name, "r0", 10**6)):
            assert engine.side.arrived(NOW, attempt, rank) == []
        assert engine.side.states() == before

    def teardown(self):
        self.healer.check(self.state)


TestWalk = Walk.TestCase
TestWalk.settings = settings(
    max_examples=int(os.environ.get("VLLM_PD_EXAMPLES", "200")), stateful_step_count=80, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
TestWalk.pytestmark = [pytest.mark.search]


class ChunkedWalk(Walk):
    """The same, where prompts leave in two chunks (B100)."""

    scene = CHUNKED


TestChunkedWalk = ChunkedWalk.TestCase
TestChunkedWalk.settings = settings(TestWalk.settings, max_examples=TestWalk.settings.max_examples // 2)
TestChunkedWalk.pytestmark = [pytest.mark.search]


class WalkWithoutFence(Walk):
    """The same, in a world where blocks are free with the end of their attempt."""

    scene = dataclasses.replace(SCENE, shape=dataclasses.replace(SCENE.shape, decode_type=NoFence))


class WalkOverTooSoon(Walk):
    """The same, where a job is over although a chunk of it is under way."""

    scene = dataclasses.replace(CHUNKED, shape=dataclasses.replace(CHUNKED.shape, writes_type=AnswersTooSoon))


class WalkThatAsksOnce(Walk):
    """The same, where the lease is asked for before the first chunk alone."""

    scene = dataclasses.replace(CHUNKED, shape=dataclasses.replace(CHUNKED.shape, asks_once=True))


@pytest.mark.parametrize("walk, says", [
    (WalkWithoutFence, "may reuse|outside its fence"), (WalkOverTooSoon, "may reuse|while it was written to"),
    (WalkThatAsksOnce, "saw its lease end")])
def test_b34_the_walk_can_fail(walk, says):
    """B34: a missing fence does not stay hidden from it, nor a lease that ends between two chunks (B22)."""
    with pytest.raises(Violation, match=says):
        run_state_machine_as_test(walk, settings=settings(
            TestWalk.settings, max_examples=500, database=None, derandomize=True, report_multiple_bugs=False,
            phases=[Phase.generate]))
