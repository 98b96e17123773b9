# SPDX-License-Identifier: Apache-2.0
"""When the first token is expected here and there: by hand where cases are few, and what each input may do."""
import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pd.decisions.expected import Here, There, _others_s, expect
from vllm_pd.decisions.job_order import JobOrder
from vllm_pd.decisions.policy import PolicyConfig, PolicyInput, Reason, decide

HERE = Here(tokens_before=0, tokens_per_s=1000.0, step_s=0.0, decodes=0, batch_tokens=512)
THERE = There(queued_tokens=0, busy=((0, 1000.0), ), transfer_s=0.0, overhead_s=0.0)
AUTO = PolicyConfig(auto=True)
REQUEST = PolicyInput(prompt_tokens=1, cached_tokens=0, blocks=1, can_go_remote=True, attempts_made=0, time_left_s=60.0,
                      broker_up=True, prefill_peers=1, queue_length=0, parked_blocks=0, total_blocks=100,
                      parked_requests=0, total_requests=32)

tokens = st.integers(0, 4_000_000)
rates = st.floats(0.5, 1e7)
seconds = st.floats(0.0, 1e4)
heres = st.builds(Here, tokens, rates, seconds, st.integers(0, 512), st.integers(1, 1 << 17), st.floats(0, 1e4))
theres = st.builds(There, tokens, st.lists(st.tuples(tokens, rates), min_size=1, max_size=5).map(tuple), seconds,
                   seconds, st.floats(0, 1e4))
prompts = st.integers(1, 1_000_000)


def at_most(one: float, other: float) -> bool:
    """But for rounding."""
    return one <= other * (1 + 1e-9) + 1e-9


def test_a_prompt_here_waits_for_what_is_before_it_and_shares_its_steps():
    def here_s(tokens, **more):
        return expect(tokens, msgspec.structs.replace(HERE, **more), THERE).here_s

    assert here_s(100) == pytest.approx(0.1)
    assert here_s(100, tokens_before=400) == pytest.approx(0.5)
    assert here_s(100, step_s=0.02) == pytest.approx(0.12)
    assert here_s(1024, step_s=0.02) == pytest.approx(1.024 + 2 * 0.02)
    assert here_s(1024, step_s=0.02, decodes=12) == pytest.approx(1.024 + 3 * 0.02), "500 prompt tokens a step"
    assert here_s(100, batch_tokens=1, decodes=5) == pytest.approx(0.1), "one token a step at the least"


@pytest.mark.parametrize("queued, busy, there_s", [
    (0, ((0, 1000.0), ), 0.1), (400, ((0, 1000.0), ), 0.5), (0, ((400, 1000.0), ), 0.5), (300, ((100, 1000.0), ), 0.5),
    (0, ((400, 1000.0), (0, 1000.0)), 0.1), (400, ((0, 1000.0), (0, 1000.0)), 0.3),
    (400, ((400, 1000.0), (0, 1000.0)), 0.5), (600, ((400, 1000.0), (0, 1000.0)), 0.6),
    (0, ((0, 1000.0), (0, 500.0)), 0.1), (0, ((400, 1000.0), (0, 500.0)), 0.2), (300, ((0, 2000.0), (0, 1000.0)), 0.15),
])
def test_a_prompt_there_waits_for_the_first_engine_that_is_free(queued, busy, there_s):
    there = There(queued, busy, 0.0, 0.0)
    assert expect(100, HERE, there).there_s == pytest.approx(there_s)
    slow = msgspec.structs.replace(there, transfer_s=0.25, overhead_s=0.5)
    assert expect(100, msgspec.structs.replace(HERE, step_s=0.01), slow).there_s == pytest.approx(there_s + 0.77)


def test_later_prompts_count_where_they_come():
    here, there = (msgspec.structs.replace(one, prompts_per_s=2.0) for one in (HERE, THERE))
    found = expect(1000, here, there)
    assert found.others_here_s == found.others_there_s == pytest.approx(2 * 1 * 0.5)
    found = expect(1000, msgspec.structs.replace(here, tokens_before=3000), there)
    assert found.others_here_s == pytest.approx(2 * 1 * 3.5), "those that come in the 3 s before wait for all of it"
    found = expect(1000, here, msgspec.structs.replace(there, busy=((0, 1000.0), ) * 4))
    assert found.others_there_s == pytest.approx(2 * 1 * 0.5 / 4)


def test_a_long_prompt_leaves_where_many_come_and_a_short_one_stays():
    """Here and there are equally fast and idle: the prompt itself is a little better here."""
    here = msgspec.structs.replace(HERE, prompts_per_s=5.0)
    there = msgspec.structs.replace(THERE, overhead_s=0.05)
    assert not expect(50, here, there).sooner_there
    assert expect(2000, here, there).sooner_there
    assert not expect(2000, HERE, there).sooner_there, "nobody else comes"


# Their order of jobs.

ORDER = JobOrder(overtaking=8.0, step_s=0.5, most_s=30.0)
ORDERED = msgspec.structs.replace(THERE, order=ORDER)


@pytest.mark.parametrize("count, ours, change, there_s", [
    (100, ((2000, 0.0), ), {}, 0.35),  # due in 0.8 s, the other in 16 s: it waits for half a step
    (100, ((2000, 15.5), ), {}, 2.1),  # which has waited long
    (2000, ((100, 0.0), (1900, 0.0)), {}, 4.0),
    (1950, ((100, 0.0), (1900, 0.0)), {"order": None}, 3.95),
    (100, ((1500, 0.0), ), {}, 0.85),  # 500 are another engine's, and may be short
    (100, (), {}, 2.1),
    (100, ((2000, 0.0), ), {"queued_tokens": 1}, 2.101),
    (100, ((2000, 0.0), ), {"order": msgspec.structs.replace(ORDER, overtaking=0.0)}, 2.1),
    (100, ((2000, 0.0), ), {"order": msgspec.structs.replace(ORDER, step_s=3600.0)}, 2.1),
    (100, ((4000, 0.0), ), {}, 0.35),  # more than it is known to have: some is computed
])
def test_a_prompt_passes_our_longer_jobs_there(count, ours, change, there_s):
    there = msgspec.structs.replace(ORDERED, busy=((2000, 1000.0), ), ours=(ours, ), **change)
    assert expect(count, HERE, there).there_s == pytest.approx(there_s)


def test_it_goes_where_its_turn_comes_first():
    there = msgspec.structs.replace(ORDERED, busy=((2000, 1000.0), (600, 1000.0)), ours=(((2000, 0.0), ), ()))
    assert expect(100, HERE, there).there_s == pytest.approx(0.35)
    assert expect(3000, HERE, there).there_s == pytest.approx(3.6)


def test_later_prompts_that_are_shorter_pass_it_and_lose_little():
    there = msgspec.structs.replace(ORDERED, prompts_per_s=2.0, later_tokens=(100, ))
    found = expect(1000, HERE, there)
    assert found.there_s == pytest.approx(1.2), "two that take 0.1 s"
    assert found.others_there_s == pytest.approx(2 * (0.25 * 0.75 + 0.25 * 0.25 / 2)), "half a step, or what is left"
    found = expect(1000, HERE, msgspec.structs.replace(there, later_tokens=(1000, )))
    assert (found.there_s, found.others_there_s) == (pytest.approx(1.0), pytest.approx(1.0)), "nobody passes"
    both = expect(1000, HERE, msgspec.structs.replace(there, later_tokens=(100, 1000)))
    assert both.there_s == pytest.approx(1.1), "half of them"


@given(st.floats(0, 50), st.floats(0.01, 20), st.floats(0, 80), st.floats(0, 40))
@settings(max_examples=50)
def test_what_later_prompts_wait_is_the_mean_over_the_times_at_which_they_come(before_s, takes_s, until_s, step_s):
    def waits_s(at_s):
        left_s = before_s + takes_s - max(before_s, at_s)
        return left_s if at_s >= until_s else min(step_s / 2, left_s) if at_s >= before_s else 0.0

    end_s, parts = before_s + takes_s, 4000
    by_hand = sum(waits_s((part + 0.5) * end_s / parts) for part in range(parts)) * end_s / parts
    assert _others_s(before_s, takes_s, 1.0, until_s, step_s) == pytest.approx(by_hand, abs=2e-3 * end_s * takes_s)


orders = st.builds(JobOrder, st.floats(0, 1000), st.floats(1e-6, 3600), st.floats(0.1, 1e4))
jobs = st.lists(st.tuples(tokens, seconds), max_size=4).map(tuple)
ordered = st.builds(lambda there, order, ours, later: msgspec.structs.replace(
    there, order=order, ours=tuple(ours[:len(there.busy)]), later_tokens=tuple(later)),
    theres, orders, st.lists(jobs, min_size=5, max_size=5), st.lists(prompts, max_size=4))


@given(prompts, heres, ordered)
def test_with_their_order_no_time_is_nan_or_negative_or_endless(count, here, there):
    found, fifo = (expect(count, here, one) for one in (there, msgspec.structs.replace(there, order=None)))
    for value in (found.there_s, found.others_there_s):
        assert 0 <= value < math.inf
    assert at_most(found.others_there_s, fifo.others_there_s), "who passes it loses less"


@given(prompts, heres, ordered, tokens)
def test_with_their_order_more_queue_there_never_speaks_for_a_peer(count, here, there, more):
    longer = msgspec.structs.replace(there, queued_tokens=there.queued_tokens + more)
    if len(there.busy) == 1:  # of several it may begin at another
        assert at_most(expect(count, here, there).there_s, expect(count, here, longer).there_s)


@pytest.mark.parametrize("here, there", [
    (msgspec.structs.replace(HERE, tokens_per_s=0.0), THERE), (HERE, msgspec.structs.replace(THERE, busy=())),
    (HERE, msgspec.structs.replace(THERE, busy=((0, 0.0), )))])
def test_nothing_is_expected_where_nothing_is_measured(here, there):
    assert expect(100, here, there) is None


@given(prompts, heres, theres)
def test_no_time_is_nan_or_negative_or_endless(count, here, there):
    found = expect(count, here, there)
    for value in (found.here_s, found.there_s, found.others_here_s, found.others_there_s, found.step_s):
        assert 0 <= value < math.inf
    assert found.explained()


@given(prompts, heres, theres, tokens)
def test_more_queue_there_never_speaks_for_a_peer(count, here, there, more):
    before = expect(count, here, there)
    longer = expect(count, here, msgspec.structs.replace(there, queued_tokens=there.queued_tokens + more))
    assert at_most(before.there_s, longer.there_s) and longer.here_s == before.here_s
    if len(there.busy) == 1:
        assert at_most(before.others_there_s, longer.others_there_s)


@given(prompts, heres, theres, tokens, st.data())
def test_a_busier_or_slower_engine_there_never_speaks_for_a_peer(count, here, there, more, data):
    number = data.draw(st.integers(0, len(there.busy) - 1))
    taken, rate = there.busy[number]
    worse = data.draw(st.sampled_from([(taken + more, rate), (taken, max(0.5, rate / 3))]))
    busy = (*there.busy[:number], worse, *there.busy[number + 1:])
    assert at_most(expect(count, here, there).there_s, expect(count, here, msgspec.structs.replace(there, busy=busy)
                                                              ).there_s)


@given(prompts, heres, theres, tokens, rates)
def test_one_more_engine_there_never_speaks_against_a_peer(count, here, there, taken, rate):
    more = msgspec.structs.replace(there, busy=(*there.busy, (taken, rate)))
    assert at_most(expect(count, here, more).there_s, expect(count, here, there).there_s)


@given(prompts, heres, theres, st.integers(0, 1_000_000))
def test_a_longer_hit_here_never_speaks_for_a_peer(count, here, there, hit):
    """The same prompt with fewer tokens to compute, here and there; equally fast engines, as in a fleet of one kind."""
    there = msgspec.structs.replace(there, busy=tuple((taken, here.tokens_per_s) for taken, _ in there.busy),
                                    prompts_per_s=0.0)
    fewer = max(1, count - hit)
    long, short = expect(count, here, there), expect(fewer, here, there)
    gain_here, gain_there = long.here_s - short.here_s, long.there_s - short.there_s
    assert gain_there <= gain_here + 1e-9 * (long.here_s + long.there_s)
    assert at_most(short.others_here_s, long.others_here_s) and at_most(short.step_s, long.step_s)
    for target_s in (0.01, 0.1, 1.0):
        assert long.breaks(target_s) or not short.breaks(target_s) or short.step_s > long.step_s


@given(prompts, heres, theres, tokens)
def test_more_to_do_here_never_speaks_against_a_peer(count, here, there, more):
    busier = expect(count, msgspec.structs.replace(here, tokens_before=here.tokens_before + more), there)
    before = expect(count, here, there)
    assert at_most(before.here_s, busier.here_s) and busier.there_s == before.there_s
    assert at_most(before.step_s, busier.step_s)
    slower = expect(count, msgspec.structs.replace(here, tokens_per_s=max(0.5, here.tokens_per_s / 2)), there)
    assert at_most(before.here_s, slower.here_s) and slower.there_s == before.there_s


@given(prompts, heres, theres, st.floats(0.001, 10), st.floats(0.001, 10))
def test_a_tighter_target_never_speaks_against_a_peer(count, here, there, one, other):
    found = expect(count, here, there)
    assert found.breaks(min(one, other)) or not found.breaks(max(one, other))
    assert not found.breaks(None)


def test_the_target_is_for_those_that_decode_and_for_what_a_prompt_adds():
    here = msgspec.structs.replace(HERE, step_s=0.05, decodes=2)
    assert expect(100, here, THERE).breaks(0.1)  # 0.15 s
    assert not expect(100, here, THERE).breaks(0.2)
    assert not expect(100, msgspec.structs.replace(here, decodes=0), THERE).breaks(0.1)
    assert not expect(4, here, THERE).breaks(0.01), "the decodes alone take longer"
    assert expect(6, here, THERE).breaks(0.01)
    assert expect(10_000, here, THERE).step_s == pytest.approx(0.05 + 0.51), "a step has 512 tokens, two of decodes"


# The policy.


def chosen(count, here=HERE, there=THERE, config=AUTO, **request):
    return decide(msgspec.structs.replace(REQUEST, prompt_tokens=count, expected=expect(count, here, there), **request),
                  config)


def test_auto_is_the_fixed_number_until_something_is_measured():
    for count in (1, 999, 1000, 1001, 5000):
        assert chosen(count, there=msgspec.structs.replace(THERE, busy=())) == decide(
            msgspec.structs.replace(REQUEST, prompt_tokens=count), PolicyConfig()), count


def test_a_fixed_number_asks_for_no_time():
    found = chosen(1001, there=msgspec.structs.replace(THERE, overhead_s=1e3), config=PolicyConfig())
    assert (found.remote, found.reason) == (True, Reason.LENGTH)


def test_every_small_case_is_the_better_place():
    """All combinations of few values of each input: remote exactly where it is sooner, with what others lose."""
    seen = set()
    for count, before, own, queued, peer, overhead_s, prompts_per_s in itertools.product(
            (1, 100, 1000), (0, 500), (500.0, 1000.0), (0, 500), (500.0, 2000.0), (0.0, 0.5), (0.0, 3.0)):
        here = Here(before, own, 0.01, 1, 512, prompts_per_s)
        there = There(queued, ((0, peer), ), 0.0, overhead_s, 0.0)
        work_s = math.ceil((before + count) / 511) * 0.01 + (before + count) / own
        before_s = math.ceil(before / 511) * 0.01 + before / own
        cost_here_s = work_s + prompts_per_s * (work_s - before_s) * (work_s + before_s) / 2
        cost_there_s = (queued + count) / peer + overhead_s + 0.02
        if abs(cost_here_s - cost_there_s) < 1e-9:
            continue  # rounding decides
        found = chosen(count, here, there)
        assert (found.remote, found.reason) == (cost_there_s < cost_here_s, Reason.TTFT)
        seen.add(found.remote)
    assert seen == {True, False}


def test_the_target_goes_first_but_not_for_ever():
    here = msgspec.structs.replace(HERE, step_s=0.05, decodes=2)
    config = PolicyConfig(auto=True, itl_target_s=0.1)
    slow = msgspec.structs.replace(THERE, overhead_s=20.0)
    found = chosen(1000, here, slow, config)
    assert (found.remote, found.reason) == (True, Reason.ITL)
    found = chosen(1000, here, slow, config, time_left_s=20.0)
    assert (found.remote, found.reason) == (False, Reason.QUEUE), "it would come back, and wait anew"
    assert chosen(1000, here, slow, config, time_left_s=0.0).reason is Reason.RETRY
    found = chosen(20, here, slow, config)
    assert (found.remote, found.reason) == (False, Reason.TTFT)


@pytest.mark.parametrize("change, reason", [
    ({"can_go_remote": False}, Reason.FEATURE), ({"attempts_made": 2}, Reason.RETRY),
    ({"broker_up": False}, Reason.BROKER), ({"prefill_peers": 0}, Reason.PEER), ({"queue_length": 64}, Reason.QUEUE),
    ({"parked_blocks": 50}, Reason.CAP)])
@pytest.mark.parametrize("target_s", [None, 0.1])
def test_a_better_place_that_may_not_be_used_is_not(change, reason, target_s):
    here = Here(10_000, 100.0, 0.05, 2, 512)
    found = chosen(1000, here, THERE, PolicyConfig(auto=True, itl_target_s=target_s), **change)
    assert (found.remote, found.reason) == (False, reason) and found.expected is not None
