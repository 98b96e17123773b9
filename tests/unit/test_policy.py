# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is prefilled, and the reason that is counted."""
import msgspec
import pytest

from vllm_pd.decisions.expected import Here, There, expect
from vllm_pd.decisions.policy import (
    AskedPlace,
    Decision,
    PolicyConfig,
    PolicyInput,
    Reason,
    asked_place,
    decide,
    may_read_hold,
)

CONFIG = PolicyConfig(max_local_prefill_tokens=1000, max_queue_length=4, max_parked_fraction=0.5)
GOOD = PolicyInput(prompt_tokens=1500, cached_tokens=0, blocks=94, can_go_remote=True, attempts_made=1, time_left_s=1.0,
                   broker_up=True, prefill_peers=1, queue_length=3, parked_blocks=6, total_blocks=200,
                   parked_requests=15, total_requests=32)
CASES = [
    ({"prompt_tokens": 1000}, Reason.THRESHOLD),
    ({"cached_tokens": 500}, Reason.THRESHOLD),
    ({"can_go_remote": False}, Reason.FEATURE),
    ({"attempts_made": 2}, Reason.RETRY),
    ({"time_left_s": 0.0}, Reason.RETRY),
    ({"broker_up": False}, Reason.BROKER),
    ({"prefill_peers": 0}, Reason.PEER),
    ({"queue_length": 4}, Reason.QUEUE),
    ({"parked_blocks": 7}, Reason.CAP),
    ({"parked_requests": 16}, Reason.CAP),
]


def test_all_is_well_goes_remote():
    assert decide(GOOD, CONFIG) == Decision(True, Reason.LENGTH)
    assert decide(msgspec.structs.replace(GOOD, prompt_tokens=1001), CONFIG).remote


@pytest.mark.parametrize("change, reason", CASES)
def test_each_no_has_its_reason(change, reason):
    assert decide(msgspec.structs.replace(GOOD, **change), CONFIG) == Decision(False, reason)


def test_an_engine_of_one_request_may_park_it():
    alone = msgspec.structs.replace(GOOD, parked_requests=0, total_requests=1)
    assert decide(alone, CONFIG).remote


def test_the_first_no_counts():
    bad = GOOD
    for change, reason in reversed(CASES):
        bad = msgspec.structs.replace(bad, **change)
        assert decide(bad, CONFIG).reason is reason


def test_every_reason_is_reached():
    by_time = {Reason.TTFT, Reason.ITL}  # tests/unit/test_expected.py
    asked = {Reason.ASKED, Reason.ROLE, Reason.OWN}  # ROLE: decided before the policy is asked; OWN: test_own_policy
    assert {reason for _, reason in CASES} | {Reason.LENGTH, Reason.HELD} | by_time | asked == set(Reason)


@pytest.mark.parametrize("change, reads", [
    ({}, True), ({"asked": AskedPlace.LOCAL}, False), ({"asked": AskedPlace.REMOTE}, True), ({"blocks": 1}, False),
    ({"broker_up": False, "queue_length": 10**6, "prompt_tokens": 33}, True), ({"prefill_peers": 0}, False),
    ({"can_go_remote": False}, False), ({"attempts_made": 2}, False), ({"time_left_s": 0.0}, False),
    ({"parked_blocks": 10**6}, False), ({"parked_requests": 10**6}, True)])
def test_b102_a_held_prompt_is_read_unless_this_engine_has_no_blocks(change, reads):
    assert may_read_hold(msgspec.structs.replace(GOOD, **change), CONFIG) is reads


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("tokens, whole_blocks", [(16, 1), (1500, 93)])
def test_b103_a_request_is_prefilled_where_it_asks_to_be(tokens, whole_blocks, auto):
    config = msgspec.structs.replace(CONFIG, auto=auto)
    request = msgspec.structs.replace(GOOD, prompt_tokens=tokens, whole_blocks=whole_blocks)
    assert decide(msgspec.structs.replace(request, asked=AskedPlace.REMOTE), config) == Decision(True, Reason.ASKED)
    assert decide(msgspec.structs.replace(request, asked=AskedPlace.LOCAL), config) == Decision(False, Reason.ASKED)
    for none in (AskedPlace.AUTO, AskedPlace.OTHER):
        assert decide(msgspec.structs.replace(request, asked=none), config) == decide(request, config)


@pytest.mark.parametrize("place", [AskedPlace.REMOTE, AskedPlace.AUTO, AskedPlace.OTHER])
@pytest.mark.parametrize("config", [CONFIG, msgspec.structs.replace(CONFIG, max_local_prefill_tokens=0),
                                    msgspec.structs.replace(CONFIG, auto=True)], ids=["1000", "0", "auto"])
def test_b103_less_than_a_block_is_not_worth_a_hand_over(config, place):
    expected = expect(15, Here(10**6, 1.0, 0.0, 0, 512), There(0, ((0, 1e6), ), 0.0, 0.0)) if config.auto else None
    request = msgspec.structs.replace(GOOD, prompt_tokens=1502, cached_tokens=1488, blocks=1, asked=place,
                                      expected=expected)
    assert decide(msgspec.structs.replace(request, whole_blocks=0), config) == Decision(False, Reason.THRESHOLD,
                                                                                       expected)
    if config.max_local_prefill_tokens == 0 or config.auto or place is AskedPlace.REMOTE:
        assert decide(msgspec.structs.replace(request, whole_blocks=1), config).remote, "or nothing is shown here"


@pytest.mark.parametrize("change, reason", [case for case in CASES if case[1] is not Reason.THRESHOLD])
def test_b103_what_can_t_be_handed_over_stays_although_it_is_asked_for(change, reason):
    asked = msgspec.structs.replace(GOOD, asked=AskedPlace.REMOTE, **change)
    assert decide(asked, CONFIG) == Decision(False, reason)


@pytest.mark.parametrize("extra_args, place", [
    (None, AskedPlace.AUTO), ({}, AskedPlace.AUTO), ({"kv_transfer_params": {}}, AskedPlace.AUTO),
    ({"kv_transfer_params": None}, AskedPlace.AUTO), ({"kv_transfer_params": "remote"}, AskedPlace.AUTO),
    ({"kv_transfer_params": [1]}, AskedPlace.AUTO), ("remote", AskedPlace.AUTO), ({"pd": "remote"}, AskedPlace.AUTO),
    ({"kv_transfer_params": {"pd": "remote"}}, AskedPlace.REMOTE),
    ({"kv_transfer_params": {"pd": "local", "do_remote_prefill": True}}, AskedPlace.LOCAL),
    ({"kv_transfer_params": {"pd": "auto"}}, AskedPlace.AUTO),
    *(({"kv_transfer_params": {"pd": value}}, AskedPlace.OTHER)
      for value in ("", "Remote", "other", "x" * 10**6, None, 1, 1.5, True, b"remote", [], ["remote"], {},
                    {"remote": 1}, object(), type))])
def test_b103_anything_may_be_asked(extra_args, place):
    assert asked_place(extra_args) is place
