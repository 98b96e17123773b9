# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is prefilled, and the reason that is counted."""
import msgspec
import pytest

from vllm_pd.core.policy import Decision, PolicyConfig, PolicyInput, Reason, decide

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
    assert {reason for _, reason in CASES} | {Reason.LENGTH} | by_time == set(Reason)
