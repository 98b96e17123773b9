# SPDX-License-Identifier: Apache-2.0
"""Two ranks with real collectives in every forward pass, so that a missing one really blocks."""

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from dp_loads import (
    BOUND_S,
    CALL_WAIT_S,
    END_S,
    HORIZON_STEPS,
    MAX_TOKENS,
    PROMPTS,
    at_rest,
    forwards,
    trailing_dummies,
)

from vllm_pd.bench.dp.group import Group, GroupError

CALLS = [("collective_rpc", ("probe_collective",)), ("sleep", (1,)), ("wake_up", ()), ("execute_dummy_batch", ()),
         ("is_sleeping", ()), ("reset_prefix_cache", ())]  # fmt: skip
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def drain_dummies(probes: list[dict]) -> int:
    """Dummies that were run when no rank had anything left to do."""
    return min(trailing_dummies(probe) for probe in probes)


def test_b72_first_request_on_another_rank_51983(experts_pair, expected):
    """B72: a group just started, whose first request ever is not rank 0's: served."""
    assert experts_pair.first.result(BOUND_S)["tokens"] == expected[0][:6] or MAX_TOKENS[0] < 6


def test_b70_unequal_load_gives_the_tokens_of_one_rank(group, expected):
    """B70: 100 mixed requests, four of five at rank 0: as with one rank; equally many forwards, no collective."""
    asked = [group.generate(prompt, rank=0 if number % 5 else 1, max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))]  # fmt: skip
    assert group.tokens(asked) == expected
    probes = at_rest(group)
    assert forwards(probes)[0] > 20
    assert [probe["collectives"] for probe in probes] == [0, 0]


def test_b70_stops_within_the_horizon_and_stays_idle(group):
    """B70: after the last request all ranks stop; idle ranks run nothing and cost nothing."""
    group.tokens([group.generate(PROMPTS[1], rank=0, max_tokens=20)])
    probes = at_rest(group)
    assert drain_dummies(probes) <= HORIZON_STEPS
    group.start_probe()
    time.sleep(2)
    probes = group.take_probe()
    assert forwards(probes) == [0, 0]
    for _ in range(2):
        if all(probe["cpu"] < 0.2 for probe in probes):
            return
        group.start_probe()  # something else may have run in it
        time.sleep(2)
        probes = group.take_probe()
    assert all(probe["cpu"] < 0.2 for probe in probes)


def test_b71_a_request_that_no_front_end_sent(group):
    """B71: a request that enters in the engine itself, on either rank, takes the other one along."""
    for rank in (1, 0):
        group.start_probe()
        group.call("add_request", _request(f"inner{rank}", 7), ranks=[rank])
        deadline = time.monotonic() + BOUND_S
        while forwards(group.take_probe())[rank] < 7 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert min(forwards(at_rest(group))) >= 7


def test_stop_before_the_length_wastes_no_more_than_the_horizon(group):
    """B70: requests that end early, where the agreed step is too far ahead."""
    first = group.tokens([group.generate(PROMPTS[2], rank=0, max_tokens=12)])[0]
    stop = next(token for token in first if token not in first[:3])
    for rank in (0, 1):
        group.start_probe()
        group.tokens([group.generate(PROMPTS[2], rank=rank, max_tokens=100, stop_token_ids=[stop])])
        assert drain_dummies(at_rest(group)) <= HORIZON_STEPS


def test_request_that_meets_the_drain_16277(group):
    """A request sent while, or right after, the group comes to rest: it could belong to a wave that had ended."""
    for number in range(30):
        asked = group.generate(PROMPTS[3], rank=number % 2, max_tokens=1 + number % 3)
        asked.result(BOUND_S)
        time.sleep(0.0007 * number)
    at_rest(group)


def test_sender_is_woken_by_its_own_request_39366(group):
    """Both ranks idle, both get a request at once, again and again: a sender was left out of its own broadcast."""
    for _ in range(10):
        group.tokens([group.generate(PROMPTS[4], rank=rank, max_tokens=2) for rank in (0, 1)])
    at_rest(group)


def test_late_wake_up_meets_a_collective_call_36608(group):
    """A call that runs a collective of its own on all ranks, right behind a request and in the middle of one: a late
    wake-up had one rank in a dummy batch and the other in the call, each waiting for the other. The tokens are the same
    wherever in the request the calls came, and a rank had to rest for them."""
    answers = set()
    for number in range(6):
        asked = group.generate(PROMPTS[2], rank=number % 2, max_tokens=40)
        for _ in range(5):
            assert group.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[2], [2]]
            time.sleep(0.003 * number)
        answers.add(tuple(asked.result(BOUND_S)["tokens"]))
        assert group.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[2], [2]]
    assert len(answers) == 1
    at_rest(group)


def test_calls_on_all_ranks_meet_requests_at_both_36608(group):
    """Requests enter at either rank and calls at both, none waited for: all are served, made and answered."""
    chance = random.Random(36608)
    asked, calls = [], []
    for number in range(50):
        asked.append(group.generate(PROMPTS[number % 20], rank=chance.randrange(2), max_tokens=chance.randint(1, 9)))
        method, args = chance.choice(CALLS)
        calls.append(group.submit("call", method=method, args=args, ranks=[0, 1]))
        time.sleep(chance.choice([0, 0, 0.001, 0.01, 0.03]))
    assert all(len(call.result(BOUND_S)) == 2 for call in calls)
    group.tokens(asked)
    group.call("wake_up")
    at_rest(group)


@pytest.fixture
def impatient(group) -> Iterator[Group]:
    """The group while a call waits no longer than CALL_WAIT_S for ranks that are not told of it."""
    before = group.call("collective_rpc", "probe_call_wait", None, [CALL_WAIT_S])[0][0]
    yield group
    group.call("collective_rpc", "probe_call_wait", None, [before])


def test_a_call_that_does_not_reach_all_ranks_fails_and_harms_nobody(impatient):
    """Each rank is called alone: an error in time, that says what to do. Requests are served meanwhile, and the next
    call is made. Who asked for a call may have gone away when it fails."""
    group = impatient
    began = time.monotonic()
    gone = [group.submit("call", method="wake_up", args=(), ranks=[0], patience_s=0.2)]
    lone = [group.submit("call", method="collective_rpc", args=("probe_collective",), ranks=[0]),
            group.submit("call", method="collective_rpc", args=("probe_take",), ranks=[1])]  # fmt: skip
    behind = group.submit("call", method="is_sleeping", args=(), ranks=[1])
    group.tokens([group.generate(PROMPTS[2], rank=rank, max_tokens=5) for rank in (0, 1)])
    for call in lone:
        with pytest.raises(GroupError, match=r"made by no rank.*call_wait_s"):
            call.result(BOUND_S)
    assert time.monotonic() > began + CALL_WAIT_S
    assert behind.result(BOUND_S) == [False]
    # The same calls to all ranks are made, after these and beside another one.
    late = group.submit("call", method="collective_rpc", args=("probe_collective",), ranks=[1])
    for _ in range(2):
        assert group.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[2], [2]]
    with pytest.raises(GroupError, match="made by no rank"):
        late.result(BOUND_S)
    with pytest.raises(GroupError, match="made by no rank"):
        group.call("collective_rpc", "probe_take", ranks=[0], timeout_s=BOUND_S)
    for call in gone:
        with pytest.raises(GroupError, match="TimeoutError"):
            call.result(BOUND_S)
    assert len(group.call("collective_rpc", "probe_take", timeout_s=BOUND_S)) == 2


def test_aborted_request_leaves_nothing_running_51476(group):
    """A request that is gone before, or while, its first step runs: the group comes to rest as if it had never been."""
    for number in range(8):
        name = f"gone{number}"
        asked = group.generate(PROMPTS[5], rank=number % 2, max_tokens=200, name=name, abort_after=1 + number)
        assert len(asked.result(BOUND_S)["tokens"]) >= 1 + number
    for rank in (0, 1):
        group.call("add_request", _request("early", 50), ranks=[rank])
        group.call("abort_requests", ["early"], ranks=[rank])
    at_rest(group)
    group.start_probe()
    time.sleep(1)
    assert forwards(group.take_probe()) == [0, 0]


def test_ranks_never_act_on_different_stop_decisions_45223(group):
    """Load that comes and goes on each rank for longer than upstream cached its decision (32 steps), never in step."""
    asked = [group.generate(PROMPTS[number % 20], rank=number % 3 % 2, max_tokens=1 + number * 7 % 40)
             for number in range(60)]  # fmt: skip
    group.tokens(asked)
    assert forwards(at_rest(group))[0] > 40


@pytest.mark.parametrize("busy", [False, True])
def test_utility_calls_while_idle_and_while_stepping(group, busy):
    """Sleep, wake, caches, collective RPC: answered by every rank, and the request beside them ends."""
    asked = [group.generate(PROMPTS[6], rank=0, max_tokens=200)] if busy else []
    for method, args in (("reset_prefix_cache", ()), ("sleep", (1,)), ("is_sleeping", ()), ("wake_up", ()),
                         ("reset_mm_cache", ()), ("execute_dummy_batch", ())):  # fmt: skip
        group.call(method, *args, timeout_s=BOUND_S)
    assert len(group.call("collective_rpc", "probe_take", timeout_s=BOUND_S)) == 2
    for tokens in group.tokens(asked):
        assert len(tokens) == 200
    at_rest(group)


def test_b73_an_idle_rank_dies(experts_pair):
    """B73: rank 1 is killed while nothing runs: the others end with an error, within a bound. Ends the group."""
    os.kill(experts_pair.pids["EngineCore_1"], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(GroupError):
        while time.monotonic() < began + END_S:
            experts_pair.generate(PROMPTS[9], rank=0, max_tokens=3).result(END_S)
            time.sleep(0.1)
    assert time.monotonic() < began + END_S


def _request(name: str, tokens: int) -> list:
    """An EngineCoreRequest as a utility call may have it, on any tree: by position, with what follows left out."""
    params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "detokenize": False}
    return [name, PROMPTS[10], None, None, None, params, None, None, 0.0, None, None, None]
