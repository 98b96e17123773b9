# SPDX-License-Identifier: Apache-2.0
"""The timeline of a fleet's prompts: what viewers of traces take, from what engines say."""
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.ops import timeline as module
from vllm_pd.ops.timeline import PromptsPage, ReportedPrompt, ReportedRank, Timeline
from vllm_pd.ops.trial import StageTimes

D, P = "d" * 32, "p" * 32
BEGAN = 1000.0


def handed_over(name: str = "cmpl-a-0", age_s: float = 2.0, **changes) -> ReportedPrompt:
    return ReportedPrompt(**{"request_id": name, "age_s": age_s, "tokens": 500, "decision": "remote",
                             "reason": "length", "attempts": 1, "peer": P, "outcome": "done", "parked_s": 1.2,
                             "first_step_s": 0.1,
                             "timings": StageTimes(0.1, 0.05, 0.8, 0.2, 7000, True)} | changes)


def page(*prompts: ReportedPrompt, name: str = D, role: str = "kv_consumer") -> PromptsPage:
    return PromptsPage([ReportedRank(name, role, list(prompts))])


def events_of(timeline: Timeline, kind: str, process: str = "") -> list[dict]:
    """Those of this kind, of the engine whose name has this in it."""
    events = json.loads(json.dumps(timeline.as_json()))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    return [one for one in events if one["ph"] == kind and process in names[one["pid"]]]


def spans(timeline: Timeline, process: str) -> dict[str, tuple[float, float]]:
    """The slices of an engine by name, in seconds from the beginning to their end."""
    return {one["name"]: (one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in events_of(timeline, "X", process)}


def test_a_prompt_is_on_both_engines_with_its_stages_and_an_arrow():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(handed_over()), 1004.9, 1005.1)
    timeline.add("http://b:1", page(name=P, role="kv_producer"), 1004.9, 1005.1)
    ours = spans(timeline, "kv_consumer")
    whole = ours.pop("remote length: cmpl-a-0")
    assert whole == pytest.approx((3.0, 4.3))
    assert ours == {"queue": pytest.approx((3.0, 3.1)), "claim": pytest.approx((3.1, 3.15)),
                    "prefill": pytest.approx((3.15, 3.95)), "transfer": pytest.approx((3.95, 4.15)),
                    "first step": pytest.approx((4.2, 4.3))}
    assert spans(timeline, "kv_producer") == {"job: cmpl-a-0": pytest.approx((3.15, 4.15)), "prefill": ours["prefill"],
                                              "transfer": ours["transfer"]}
    (start, ), (finish, ) = events_of(timeline, "s"), events_of(timeline, "f")
    assert start["id"] == finish["id"] and start["pid"] != finish["pid"] and finish["bp"] == "e"
    assert timeline.prompts == 1 and not timeline.left_out


def test_a_peer_that_was_not_read_has_its_jobs_all_the_same():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(handed_over()), 1005.0, 1005.0)
    assert spans(timeline, "not read").keys() == {"job: cmpl-a-0", "prefill", "transfer"}


def test_what_stays_is_a_moment_and_what_is_open_goes_on_to_the_end():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(
        ReportedPrompt(5, "local", "threshold", request_id="cmpl-s-0", age_s=1.0),
        handed_over(parked_s=None, first_step_s=None, outcome="", timings=StageTimes(), peer="")), 1005.0, 1005.0)
    timeline.add("http://a:1", page(), 1009.0, 1009.0)
    (moment, ) = events_of(timeline, "i")
    assert moment["ts"] == pytest.approx(4e6) and "local threshold" in moment["name"]
    assert spans(timeline, "") == {"remote length: cmpl-a-0": pytest.approx((3.0, 9.0))}


def test_an_attempt_that_failed_ends_when_that_is_seen_and_the_next_one_is_another_slice():
    timeline = Timeline(BEGAN)
    lost = {"parked_s": None, "first_step_s": None, "timings": StageTimes()}
    timeline.add("http://a:1", page(handed_over(age_s=1.0, outcome="", **lost)), 1003.0, 1003.0)
    timeline.add("http://a:1", page(handed_over(age_s=2.0, outcome="failed", detail="peer: it is dead", **lost)),
                 1004.0, 1004.0)
    timeline.add("http://a:1", page(handed_over(age_s=0.5, attempts=2)), 1006.0, 1006.0)
    whole = [(one["ts"] / 1e6, one["dur"] / 1e6, one["args"]["detail"]) for one in events_of(timeline, "X", "kv_con")
             if one["name"].startswith("remote")]
    assert whole == [(2.0, pytest.approx(2.0), "peer: it is dead"), (5.5, pytest.approx(1.3), "")]


def test_reports_of_one_prompt_are_one_slice_by_the_best_of_them():
    timeline = Timeline(BEGAN)
    for asked, answered, age_s in ((1004.0, 1006.0, 1.5), (1006.0, 1006.02, 2.0), (1008.0, 1009.0, 4.9)):
        timeline.add("http://a:1", page(handed_over(age_s=age_s)), asked, answered)
    assert timeline.prompts == 1
    assert spans(timeline, "kv_consumer")["remote length: cmpl-a-0"][0] == pytest.approx(4.01)


def test_a_name_that_is_used_again_is_another_prompt_and_one_from_before_the_timeline_is_none():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(handed_over(age_s=30.0), handed_over("b", 1.0)), 1005.0, 1005.0)
    timeline.add("http://a:1", page(handed_over("b", 1.0)), 1015.0, 1015.0)
    assert timeline.prompts == 2


@pytest.mark.parametrize("spoiled", [{"age_s": float("nan")}, {"age_s": -1.0}, {"parked_s": float("inf")},
                                     {"timings": StageTimes(prefill_s=1e30, measured=True)}])
def test_times_that_are_none_are_left_out_and_counted(spoiled):
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(handed_over(**spoiled)), 1005.0, 1005.0)
    assert (timeline.prompts, timeline.left_out) == (0, 1) and events_of(timeline, "X") == []


def test_what_engines_say_is_bounded_and_has_no_control_characters():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1\x1b[2J", page(handed_over("\x1b[2J" + "x" * 10_000, detail="\x00" * 9999),
                                          name="\x1b" * 5000), 1005.0, 1005.0)
    assert "\\u001b" not in json.dumps(timeline.as_json()) and len(json.dumps(timeline.as_json())) < 10_000


def test_only_so_many_prompts_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 10)
    timeline = Timeline(BEGAN)
    for number in range(30):
        timeline.add("http://a:1", page(handed_over(f"r{number}")), 1005.0, 1005.0)
    assert (timeline.prompts, timeline.left_out) == (10, 20)


def test_one_engine_that_says_too_much_takes_no_time_and_no_memory_of_the_others(monkeypatch):
    """As many ranks, prompts, uses of one id, and letters as fit into its answer."""
    monkeypatch.setattr(module, "MAX_ENGINES", 20)
    timeline = Timeline(BEGAN)
    many = PromptsPage([ReportedRank(f"e{number}", "r" * 1000, []) for number in range(5000)])
    timeline.add("http://a:1", many, 1005.0, 1005.0)
    assert len(timeline._engines) == 20
    same = [ReportedRank("e1", "kv_both", [handed_over("one", age_s=0.01 * number) for number in range(256)])] * 200
    timeline.add("http://a:1", PromptsPage(same), 1005.0, 1005.0)
    assert timeline.prompts == module.MAX_USES
    timeline.add("http://a:1", page(handed_over("r" * 10**6, detail="d" * 10**6, peer="p" * 10**6), name="e2"), 1005.0,
                 1005.0)
    kept = timeline._engines["e2"].prompts
    assert sum(len(name) + len(str(seen)) for name, all_seen in kept.items() for seen in all_seen) < 10_000
    assert len(timeline.as_json()["traceEvents"]) < 1000


def test_slices_that_overlap_lie_on_rows_of_their_own_and_rows_are_used_again():
    timeline = Timeline(BEGAN)
    timeline.add("http://a:1", page(*(handed_over(f"r{number}", age_s=9.0 - number) for number in range(6))), 1010.0,
                 1010.0)
    rows = {one["name"]: one["tid"] for one in events_of(timeline, "X", "kv_consumer") if "remote" in one["name"]}
    assert set(rows.values()) == {1, 2} and len(rows) == 6  # each takes 1.3 s, one begins each second


SECONDS = st.floats(0, 20)
PROMPTS = st.builds(
    ReportedPrompt, tokens=st.just(9), reason=st.just("length"), age_s=SECONDS,
    request_id=st.sampled_from(["a", "b", "c", "d"]),
    decision=st.sampled_from(["remote", "local"]), outcome=st.sampled_from(["", "done", "failed"]),
    peer=st.sampled_from(["", P, D]), parked_s=st.none() | SECONDS, first_step_s=st.none() | SECONDS,
    timings=st.builds(StageTimes, SECONDS, SECONDS, SECONDS, SECONDS, st.just(1), st.booleans()))


@given(st.lists(st.tuples(st.lists(PROMPTS, max_size=6), SECONDS), max_size=5))
def test_slices_of_one_row_lie_inside_or_after_each_other(rounds):
    """Else a viewer shows none of them, or too long ones."""
    timeline, now = Timeline(BEGAN), BEGAN
    for prompts, passed_s in rounds:
        now += passed_s
        timeline.add("http://a:1", page(*prompts), now, now + 0.01)
    rows = {}
    for one in events_of(timeline, "X"):
        rows.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for found in rows.values():
        open_until = []
        for began, ended in sorted(found, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= began + 0.2:
                open_until.pop()
            assert not open_until or ended <= open_until[-1] + 0.2  # rounded to 0.1 us
            open_until.append(ended)
    arrows = [[one["id"] for one in events_of(timeline, kind)] for kind in "sf"]
    assert sorted(arrows[0]) == sorted(arrows[1]) and len(set(arrows[0])) == len(arrows[0])
