# SPDX-License-Identifier: Apache-2.0
"""Every state of small groups (B70-B73): equally many forwards on all ranks, nobody waits for ever, every request is
served, all stop within the horizon, and after a death everyone ends. The numbers of states are asserted: a model that
has silently become smaller proves less."""
import pytest

from tests.dp_protocol import broken
from tests.dp_protocol.explorer import Violation, explore
from tests.dp_protocol.models import RpcModel, Setting, ShmModel, Spare
from vllm_pd.dp.core import Lookahead

pytestmark = pytest.mark.exact
SPARE = Spare


def no_hint(work):
    """Nothing is known about what is left."""


def too_low(work):
    """A rank that expects less than it gets."""
    return 1


ALL_LEAVE = Setting(2, Spare(requests=1, aborts=1), leaves=True)
A_CALL = Setting(2, Spare(requests=1, calls=1), tokens=(2,))
A_CALL_AND_A_STOP = Setting(2, Spare(requests=1, calls=1, stops=1), tokens=(1,))
A_CALL_WHILE_ALL_LEAVE_AND_A_DEATH = Setting(2, Spare(calls=1, crashes=1), leaves=True, expire=True)
A_CALL_BEHIND_ONE_THAT_NOT_ALL_RECEIVE = Setting(2, Spare(calls=1, lone_calls=1), names=(2,))
A_POSTPONED_CALL = Setting(2, Spare(calls=1, lone_calls=1, postpones=1), names=(2,))
ONE_IS_SHUT_DOWN = Setting(2, Spare(requests=1, closes=1))
ALL_LEAVE_AND_ONE_ENDS_EARLY = Setting(2, Spare(requests=1, closes=1), leaves=True)
PARKED = Setting(2, Spare(parks=2, aborts=1))
PARKED_BESIDE_ANOTHER = Setting(2, Spare(requests=1, parks=1, aborts=1))
A_PARKED_ONE_WHILE_ALL_LEAVE = Setting(2, Spare(parks=1, aborts=1), leaves=True)
A_CALL_AND_ALL_LEAVE = Setting(2, Spare(calls=1), leaves=True, expire=True)

# name: model, setting, states
EXPLORED = {
    "network, 2 ranks, early ends and pauses": (RpcModel, Setting(2, Spare(requests=1, aborts=1, pauses=2)), 7_961),
    "network, 2 ranks, nothing known ahead": (RpcModel, Setting(2, Spare(requests=2, aborts=1), hint=no_hint), 33_421),
    "network, 2 ranks, less expected": (RpcModel, Setting(2, Spare(requests=2), tokens=(1, 3), hint=too_low), 20_834),
    "network, 2 ranks, a far horizon": (
        RpcModel, Setting(2, Spare(requests=2, aborts=1), tokens=(3,), lookahead=Lookahead(2, 2)), 13_178),
    "network, 2 ranks, late to join": (RpcModel, Setting(2, Spare(requests=2), joined=False), 14_811),
    "network, 2 ranks, messages lost": (
        RpcModel, Setting(2, Spare(requests=1, losses=1), tokens=(1,), joined=False), 45_870),
    "network, 2 ranks, messages doubled": (RpcModel, Setting(2, Spare(requests=2, doubles=1)), 12_042),
    "network, 2 ranks, all leave": (RpcModel, ALL_LEAVE, 13_701),
    "network, 2 ranks, all leave, lost": (RpcModel, Setting(2, Spare(losses=2), leaves=True), 8_862),
    "network, 2 ranks, a death": (RpcModel, Setting(2, Spare(requests=2, crashes=1)), 21_092),
    "network, 2 ranks, all leave, a death": (RpcModel, Setting(2, Spare(requests=1, crashes=1), leaves=True), 17_876),
    "network, 2 ranks, one is shut down": (RpcModel, ONE_IS_SHUT_DOWN, 1_281),
    "network, 2 ranks, all leave, one waits long enough or is shut down": (
        RpcModel, ALL_LEAVE_AND_ONE_ENDS_EARLY, 17_876),
    "network, 2 ranks, only parked requests": (RpcModel, PARKED, 19_008),
    "network, 2 ranks, a parked request beside another": (RpcModel, PARKED_BESIDE_ANOTHER, 20_134),
    "network, 2 ranks, a parked request, all leave": (RpcModel, A_PARKED_ONE_WHILE_ALL_LEAVE, 13_845),
    "network, 3 ranks, a parked request beside another": (
        RpcModel, Setting(3, Spare(requests=1, parks=1), tokens=(1,)), 21_775),
    "network, 3 ranks": (RpcModel, Setting(3, Spare(requests=2), tokens=(1,)), 15_888),
    "network, 3 ranks, a death": (RpcModel, Setting(3, Spare(requests=1, crashes=1)), 14_792),
    "network, 4 ranks": (RpcModel, Setting(4, Spare(requests=1), tokens=(2,)), 5_067),
    "network, 2 ranks, a call": (RpcModel, A_CALL, 16_619),
    "network, 2 ranks, calls of two front ends": (RpcModel, Setting(2, Spare(calls=2), names=(1, 2)), 46_230),
    "network, 2 ranks, calls that not all receive": (RpcModel, Setting(2, Spare(lone_calls=2), expire=True), 4_200),
    "network, 2 ranks, a call behind one that not all receive": (
        RpcModel, A_CALL_BEHIND_ONE_THAT_NOT_ALL_RECEIVE, 6_657),
    "network, 3 ranks, a call": (RpcModel, Setting(3, Spare(calls=1)), 9_816),
    "memory, 2 ranks, early ends and pauses": (ShmModel, Setting(2, Spare(requests=1, aborts=1, pauses=2)), 12_697),
    "memory, 2 ranks, nothing known ahead": (ShmModel, Setting(2, Spare(requests=2, aborts=1), hint=no_hint), 26_748),
    "memory, 2 ranks, all leave": (ShmModel, ALL_LEAVE, 11_124),
    "memory, 2 ranks, a death": (ShmModel, Setting(2, Spare(requests=2, aborts=1, crashes=1)), 33_499),
    "memory, 2 ranks, all leave, a death": (ShmModel, Setting(2, Spare(requests=1, crashes=1), leaves=True), 7_978),
    "memory, 2 ranks, one is shut down": (ShmModel, ONE_IS_SHUT_DOWN, 1_102),
    "memory, 2 ranks, all leave, one waits long enough or is shut down": (
        ShmModel, ALL_LEAVE_AND_ONE_ENDS_EARLY, 7_978),
    "memory, 2 ranks, only parked requests": (ShmModel, PARKED, 29_230),
    "memory, 2 ranks, a parked request beside another": (ShmModel, PARKED_BESIDE_ANOTHER, 30_815),
    "memory, 2 ranks, a parked request, all leave": (ShmModel, A_PARKED_ONE_WHILE_ALL_LEAVE, 11_384),
    "memory, 2 ranks, a parked request and a call": (
        ShmModel, Setting(2, Spare(parks=1, calls=1), tokens=(1,)), 22_612),
    "memory, 3 ranks": (ShmModel, Setting(3, Spare(requests=2), tokens=(1,)), 37_221),
    "memory, 3 ranks, a death": (ShmModel, Setting(3, Spare(requests=1, crashes=1)), 13_047),
    "memory, 2 ranks, a call": (ShmModel, A_CALL, 21_495),
    "memory, 2 ranks, calls that not all receive": (ShmModel, Setting(2, Spare(lone_calls=2), expire=True), 8_572),
    "memory, 2 ranks, a postponed call": (ShmModel, A_POSTPONED_CALL, 42_540),
    "memory, 2 ranks, a call, all leave": (
        ShmModel, A_CALL_AND_ALL_LEAVE, 71_897),
    "memory, 2 ranks, a call and a death": (
        ShmModel, Setting(2, Spare(requests=1, calls=1, crashes=1), tokens=(1,)), 25_514),
    "memory, 2 ranks, a call and a stop": (ShmModel, A_CALL_AND_A_STOP, 42_832),
    "memory, 2 ranks, a call, all leave, a death": (ShmModel, A_CALL_WHILE_ALL_LEAVE_AND_A_DEATH, 90_702),
    "memory, 4 ranks": (ShmModel, Setting(4, Spare(requests=1), tokens=(2,)), 11_705),
}


@pytest.mark.search
@pytest.mark.parametrize("name", EXPLORED)
def test_b70_all_states_are_good(name):
    model, setting, states = EXPLORED[name]
    explored = explore(model(setting))
    print(f"{name}: {explored.states} states, {explored.moves} moves, {explored.ends} ends, {explored.depth} deep")
    assert explored.states == states


BROKEN = {
    broken.HorizonOnOneSide: (Setting(2, Spare(requests=1, aborts=1)), "hangs|unequal"),
    broken.SenderExcluded: (Setting(2, Spare(requests=1)), "hangs|unequal"),
    broken.EdgeTriggeredWake: (Setting(2, Spare(requests=1)), "hangs|unequal"),
    broken.LatchedRunning: (Setting(2, Spare(requests=1)), "beyond|ahead|hangs|unequal"),
    broken.ParkedIsWork: (PARKED, "only parked"),
    broken.RunsForParked: (PARKED, "only parked"),
    broken.ResumesBesideTheQueue: (PARKED, "not served"),
    broken.ResumesBesideTheQueueInMemory: (PARKED, "not served"),
    broken.ResumesUnrequested: (PARKED, "hangs|unequal"),
    broken.CachedStop: (Setting(2, Spare(requests=2)), "hangs|unequal"),
    broken.LeavesAtOnce: (Setting(2, Spare(requests=1), leaves=True), "hangs|unequal"),
    broken.EndsWhenNobodyNeedsIt: (ALL_LEAVE, "before all had left"),
    broken.MissesNobodyWhoWasShutDown: (ONE_IS_SHUT_DOWN, "goes on, after another's end"),
    broken.MissesNobodyWhoClosed: (ALL_LEAVE_AND_ONE_ENDS_EARLY, "goes on, after another's end"),
    broken.NoWakeup: (Setting(2, Spare(requests=1)), "hangs|unequal"),
    broken.OnlyLateWakeups: (Setting(2, Spare(requests=1)), "hangs|unequal"),
    broken.EdgeTriggeredWakeInMemory: (Setting(2, Spare(requests=1)), "hangs|unequal"),
    broken.ReadyRankRequests: (A_CALL, "hangs|unequal|alike"),
    broken.CallsBeforeTheFinalStep: (A_CALL, "hangs|unequal|alike"),
    broken.IgnoresTheFinalStep: (Setting(2, Spare(requests=1, calls=1), tokens=(2,), collective=False), "hangs|alike"),
    broken.ReleasedBeforeAllAreReady: (A_CALL, "hangs|unequal|alike"),
    broken.LeavesAfterItsPromise: (A_CALL_AND_ALL_LEAVE, "hangs"),
    broken.WatchesNoCall: (A_CALL_AND_A_STOP, "hangs beside"),
    broken.MissesNobodyWhoHasLeft: (A_CALL_WHILE_ALL_LEAVE_AND_A_DEATH, "hangs, or goes on"),
    broken.NeverPostpones: (A_CALL_BEHIND_ONE_THAT_NOT_ALL_RECEIVE, "by all"),
    broken.ForgetsPostponedCall: (A_POSTPONED_CALL, "by all"),
    broken.GivesUpAfterItsPromise: (Setting(2, Spare(calls=1), expire=True), "hangs|by all"),
}


@pytest.mark.parametrize("model", BROKEN, ids=lambda model: model.__name__)
def test_a_broken_protocol_is_found(model):
    setting, wrong = BROKEN[model]
    with pytest.raises(Violation, match=wrong) as found:
        explore(model(setting))
    print(f"{model.__name__}: {found.value}")


UNBROKEN = dict.fromkeys((ShmModel if issubclass(model, ShmModel) else RpcModel, setting)
                         for model, (setting, _) in BROKEN.items()
                         if setting not in [one for _, one, _ in EXPLORED.values()])


@pytest.mark.search
@pytest.mark.parametrize("model, setting", UNBROKEN)
def test_unbroken_it_is_good_in_the_same_setting(model, setting):
    explore(model(setting))
