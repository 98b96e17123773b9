# SPDX-License-Identifier: Apache-2.0
"""What waits at the prefill engines: old reports, corrected by what a decode engine has there itself."""
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.peer.own_jobs import PERIODS, QUEUED, START_JOB_TOKENS, OwnJobs
from vllm_pd.protocol.messages import PrefillLoad


def load(name="p", tokens=0, rate=100.0):
    return PrefillLoad(name, tokens, rate)


def test_a_job_that_no_report_knows_counts_at_once():
    own = OwnJobs()
    found = own.corrected({QUEUED: [500], "p": [300, 100]}, 0, 0, [load("p"), load("q", 50)])
    assert found.queued_tokens == 500 and found.busy == ((400, 100.0), (50, 100.0))


def test_a_job_of_ours_in_a_report_counts_once_and_not_when_it_is_done():
    own = OwnJobs()
    own.heartbeat({"p": [400]})
    assert own.corrected({"p": [400]}, 0, 0, [load("p", 400)]).busy == ((400, 100.0), )
    assert own.corrected({"p": [400]}, 0, 0, [load("p", 1000)]).busy == ((1000, 100.0), ), "600 are others'"
    assert own.corrected({}, 0, 0, [load("p", 400)]).busy == ((0, 100.0), ), "computed since"


def test_a_job_between_two_heartbeats_counts_too():
    own = OwnJobs()
    own.corrected({"p": [400]}, 0, 0, [load("p")])  # what `heartbeat` has never seen
    assert own.corrected({}, 0, 0, [load("p", 400)]).busy == ((0, 100.0), )


def test_a_report_that_must_be_younger_than_our_jobs_is_others():
    own = OwnJobs()
    own.heartbeat({"p": [400], QUEUED: [70]})
    for _ in range(PERIODS):
        own.heartbeat({})
    found = own.corrected({}, 70, 1, [load("p", 400)])
    assert found.queued_tokens == 70 and found.busy == ((400, 100.0), )


def test_jobs_that_are_only_counted_are_like_ours():
    own = OwnJobs()
    assert own.corrected({}, None, 3, []).queued_tokens == 3 * START_JOB_TOKENS
    own = OwnJobs()
    own.heartbeat({"p": [100, 300]})
    assert own.corrected({}, None, 3, []).queued_tokens == 3 * 200
    assert own.corrected({}, 50, 3, []).queued_tokens == 50, "the broker knows"


jobs = st.dictionaries(st.sampled_from([QUEUED, "p", "q"]), st.lists(st.integers(0, 1000), min_size=1, max_size=3))


@given(st.lists(jobs, max_size=6), jobs, st.integers(0, 5000), st.integers(0, 5000))
def test_ours_are_never_missing_and_others_never_more_than_reported(history, present, queued, taken):
    own = OwnJobs()
    for past in history:
        own.heartbeat(past)
    found = own.corrected(present, queued, 1, [load("p", taken)])
    for value, reported, mine in ((found.queued_tokens, queued, present.get(QUEUED, ())),
                                  (found.busy[0][0], taken, present.get("p", ()))):
        assert sum(mine) <= value <= sum(mine) + reported
