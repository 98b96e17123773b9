# SPDX-License-Identifier: Apache-2.0
"""B102, every interleaving of a P that holds a prompt and a D that reads it, up to a depth (`explorer.holds`).

After each step: P keeps the blocks that a read may take bytes from, and its connection to the D that reads; D keeps the
blocks that a read may fill; a request gets the KV of its own prompt or none; an attempt and a hold end once. From each
state on, once nothing goes wrong any more, all ends and nobody holds anything, also where the registry does not list D
any more. Where it does, the two have met in the end. Then the same with one thing left out, which must be found.
"""
from dataclasses import dataclass

import msgspec
import pytest
from explorer.broken import FencesWithTheRenewal, MeetsOnce
from explorer.holds import HoldScene, search

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import HoldEnd, Released
from vllm_pd.protocol.hold_reads import HoldReads, ReadState
from vllm_pd.protocol.holds import Holds
from vllm_pd.protocol.prefill import PrefillProtocol


@dataclass(frozen=True)
class HoldCase:
    """A scene, how deep it is searched, and at least how many states that must be."""
    name: str
    scene: HoldScene
    depth: int
    least: int


CASES = [
    HoldCase("hold: one request, time passes", HoldScene(pauses=6, aborts=1, errors=1), 14, 5_000),
    HoldCase("hold: two requests want it", HoldScene("AA", pauses=2, aborts=1, errors=1), 11, 5_000),
    HoldCase("hold: a request of another prompt wants it", HoldScene("BA", pauses=2, aborts=1), 12, 3_000),
    HoldCase("hold: engines are killed", HoldScene("AA", pauses=2, aborts=1, kills=2), 10, 5_000),
    HoldCase("hold: a read fails, and lands later", HoldScene("AA", pauses=2, aborts=1, drifts=1, kills=1), 10, 5_000),
    HoldCase("hold: P comes back with another one", HoldScene("A", pauses=3, aborts=1, kills=1, reborn=True), 11,
             2_000),
    HoldCase("hold: P believes D gone while it reads, and meets it again",
             HoldScene("AA", pauses=1, aborts=1, losses=2), 9, 5_000),
    HoldCase("hold: the two are parted by a read, P believes D gone, and meets it again",
             HoldScene("AA", pauses=1, losses=1, drifts=1, kills=1, reborn=True), 9, 5_000),
    HoldCase("hold: the two are parted by a write while D reads, P believes D gone, and meets it again",
             HoldScene("AA", pauses=1, aborts=1, losses=1, partings=1), 9, 5_000),
    HoldCase("hold: D believes P gone while it reads, or forgets it, and P greets it again",
             HoldScene("AA", pauses=1, aborts=1, losses=1, false_deaths=1, strangers=1), 8, 5_000),
    HoldCase("hold: D is killed while it reads, and comes back",
             HoldScene("AA", pauses=1, aborts=1, kills=1, reborn_reader=True), 9, 5_000),
    HoldCase("hold, far: time passes, D falls silent", HoldScene("A", pauses=4, aborts=1, errors=1, far=True), 11,
             3_000),
    HoldCase("hold, far: each believes the other one dead",
             HoldScene("AA", pauses=1, mistakes=1, false_deaths=1, far=True), 9, 10_000),
    HoldCase("hold, far: a read fails, and lands later, while P believes D dead",
             HoldScene("AA", pauses=1, drifts=1, mistakes=1, far=True), 8, 5_000),
    HoldCase("hold, far: both are killed, and P comes back",
             HoldScene("A", pauses=2, kills=2, reborn=True, far=True), 10, 2_000),
]


@pytest.mark.search
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_b102_no_interleaving_breaks_a_hold(case, capsys):
    found = search(case.scene, case.depth, heal_each=20)
    with capsys.disabled():
        print(f"\n  {case.name}: {found.states:,} states, depth {found.depth}, {found.transitions:,} transitions, "
              f"{found.healed:,} healings", end="")
    assert not found.violation, (found.violation, *found.trace)
    assert found.states >= case.least, "the search has found less than there was"


class FreesByTime(Holds):
    """A claimed hold ends by time, as an unclaimed one."""

    def _query(self, now, hold):
        return self._end(hold, HoldEnd.EXPIRED)


class GrantsTwice(Holds):
    """Another attempt may claim what is claimed."""

    @staticmethod
    def _reason_to_deny(hold, message):
        reason = Holds._reason_to_deny(hold, message)
        return None if reason is m.DenyReason.TAKEN else reason


class IgnoresTokens(Holds):
    """The prompt of the claim may be any."""

    @staticmethod
    def _reason_to_deny(hold, message):
        reason = Holds._reason_to_deny(hold, message)
        return None if reason is m.DenyReason.TOKENS else reason


class NeverAsks(Holds):
    """D's message is not asked for, so a lost one is lost."""

    def _query(self, now, hold):
        self._wait(now, hold, 1e6)
        return []


class ForgetsIncarnation(Holds):
    """A name is a number alone, and tokens are not checked: after a restart it is another hold's."""

    def claim(self, now, sender, message, is_elsewhere=False):
        ours = next((name for name in self._holds if name.number == message.hold.number), message.hold)
        hold = self._holds.get(ours)
        if hold is not None:
            hold.digest = message.digest
        return super().claim(now, sender, m.ClaimHold(message.attempt, ours, message.digest),
                             is_elsewhere)


class IgnoresSender(HoldReads):
    """It does not matter who answers a claim."""

    def receive(self, now, sender, message):
        read = self._reads.get(message.attempt)
        if isinstance(message, m.HoldGrant) and read is not None and read.state is ReadState.CLAIMING:
            read.hold = message.hold
            return super().receive(now, read.peer, message)
        return super().receive(now, sender, message)


class SaysDoneEarly(HoldReads):
    """P gets its message at the end of the attempt, not of its read."""

    def _end(self, now, read, outcome, reason, detail=""):
        early = self._done(read.peer, read.attempt, read.hold) if read.state is ReadState.READING else []
        return super()._end(now, read, outcome, reason, detail) + early


class AnswersWhileItStops(HoldReads):
    """A question about a read that stops is answered as one about an unknown attempt."""

    def receive(self, now, sender, message):
        read = self._reads.get(message.attempt)
        if isinstance(message, m.HoldQuery) and read is not None and read.state is ReadState.STOPPING:
            return self._done(sender, message.attempt, message.hold)
        return super().receive(now, sender, message)


class ReleasesEarly(HoldReads):
    """D's blocks are given back with the end of the attempt."""

    def _end(self, now, read, outcome, reason, detail=""):
        early = [Released(read.attempt)] if read.state is ReadState.READING else []
        return super()._end(now, read, outcome, reason, detail) + early


class TrustsErrors(HoldReads):
    """A read that has failed has ended."""

    def unproven(self, now, attempt, error):
        return self.ended(attempt, error)


class TakesSilenceForDeath(PrefillProtocol):
    """A D that nothing was heard of reads nothing any more."""

    def peer_lost(self, now, incarnation):
        return self.holds.peer_dead(incarnation) + super().peer_lost(now, incarnation)


class DropsReaders(PrefillProtocol):
    """A D that is gone is dropped, whatever it reads."""

    def _drop_idle(self, now, incarnation):
        return self._peering.drop_if_leaving(now, incarnation)


class ForgetsAtOnce(HoldReads):
    """D's ranks forget a P that is gone, whatever they read from it."""

    def open_names(self):
        return set()


class TakesSeemingForDeath(PrefillProtocol):
    """A D on another machine that can't be reached reads nothing any more."""

    def peer_seems_dead(self, now, incarnation):
        return self.holds.peer_dead(incarnation) + super().peer_seems_dead(now, incarnation)


class EndsWithP(HoldReads):
    """The read from a P that can't be reached has ended."""

    def peer_seems_dead(self, now, peer):
        actions = super().peer_seems_dead(now, peer)
        stopped = [read.attempt for read in self._reads.values() if read.state is ReadState.STOPPING]
        return actions + [action for attempt in stopped for action in self.ended(attempt, "")]


class ReadsInAnother(HoldReads):
    """A grant counts in whatever generation of P."""

    def receive(self, now, sender, message):
        known = self._holders.get(sender)
        if isinstance(message, m.HoldGrant) and known is not None:
            message = msgspec.structs.replace(message, generation=known.generation)
        return super().receive(now, sender, message)


REUSES, OTHER = "P reuses blocks", "the KV of another prompt"
REBORN = HoldScene(kills=1, reborn=True)
BROKEN = {  # what is broken, the scene, how deep, what is found
    "by time while claimed": ({"holds": FreesByTime}, HoldScene(pauses=4), 10, REUSES),
    "a second claim granted": ({"holds": GrantsTwice}, HoldScene("AA"), 10, REUSES),
    "the tokens are not checked": ({"holds": IgnoresTokens}, HoldScene("B"), 10, OTHER),
    "a name means another hold after a restart": ({"holds": ForgetsIncarnation, "reads": IgnoresSender}, REBORN, 10,
                                                  OTHER),
    "a D that lives is taken for dead": ({"mistakes": 1}, HoldScene(), 8, REUSES),
    "D's message is not asked for": ({"holds": NeverAsks}, HoldScene(pauses=2), 8, "never ends"),
    "done before the read has ended": ({"reads": SaysDoneEarly}, HoldScene(aborts=1), 10, REUSES),
    "a question is answered while the read stops": ({"reads": AnswersWhileItStops}, HoldScene(pauses=3, aborts=1), 12,
                                                    REUSES),
    "an error taken for the end of the read": ({"reads": TrustsErrors}, HoldScene(drifts=1), 10, "D reuses blocks"),
    "D is silent, and P takes it for dead": ({"prefill": TakesSilenceForDeath}, HoldScene(losses=1), 8, REUSES),
    "P drops a D that reads": ({"prefill": DropsReaders}, HoldScene(losses=1), 8, "P drops a D"),
    "P does not meet the D again that it stopped believing in": ({"prefill": MeetsOnce}, HoldScene(losses=1), 8,
                                                                "never ends"),
    "D's ranks forget a P that they read from": ({"reads": ForgetsAtOnce}, HoldScene(false_deaths=1), 8, "forget a P"),
    "a P that lives is taken for dead after a read that failed": ({"false_deaths": 1}, HoldScene(drifts=1), 8,
                                                                 "D reuses blocks"),
    "far: a D that can't be reached is taken for dead": ({"prefill": TakesSeemingForDeath},
                                                         HoldScene(mistakes=1, far=True), 8, REUSES),
    "far: P's new agents taken for the end of the old ones": ({"generations": FencesWithTheRenewal},
                                                              HoldScene(mistakes=1, far=True), 8, REUSES),
    "far: the read from a P that can't be reached has ended": ({"reads": EndsWithP},
                                                               HoldScene(false_deaths=1, far=True), 8,
                                                               "D reuses blocks"),
    "far: granted in one generation, read in another": ({"reads": ReadsInAnother}, HoldScene(mistakes=1, far=True), 10,
                                                        REUSES),
    "D's blocks before the read has ended": ({"reads": ReleasesEarly}, HoldScene(aborts=1), 10, "D reuses blocks"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_b102_a_broken_hold_is_found(name, capsys):
    broken, scene, depth, says = BROKEN[name]
    heal_each = 1 if "never" in says else 0
    found = search(HoldScene(**{**vars(scene), **broken}), depth, heal_each)
    assert says in found.violation, found
    with capsys.disabled():
        print(f"\n  {name}: {found.violation}, {len(found.trace)} steps", end="")
    assert not search(scene, len(found.trace) + 1, heal_each).violation
