# SPDX-License-Identifier: Apache-2.0
"""B102: the prompts that clients bring to a prefill engine, to be kept, are computed in their turn among the jobs, on
V1's real schedulers. All other requests are as far as V1 itself has brought them.
"""
import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import PARKED, prompt
from tests.v1.test_holds import ASKS
from tests.v1.test_job_order import STEP, engine_with, sizes
from vllm_pd.decisions.job_order import START_TOKENS_PER_S
from vllm_pd.handover import prefill
from vllm_pd.protocol.actions import HoldEnd, HoldEnded, Released
from vllm_pd.v1.prefill import InternalRequests


@pytest.fixture
def engine(model_folder, in_flight, monkeypatch):
    """Its prompts come within milliseconds of each other, also on a busy machine: their turns go by that."""
    ticks = itertools.count()
    monkeypatch.setattr(prefill, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 1000))
    return engine_with(model_folder, in_flight)


def add(engine: Engine, name: str, tokens: int | list[int], count: int = 1, asks: dict | None = ASKS, **fields) -> None:
    """A client's request, which asks that its prompt be kept unless `asks` says something else."""
    engine.add(name, tokens if isinstance(tokens, list) else prompt(tokens), count, params=SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, extra_args=asks and {"kv_transfer_params": asks}), **fields)


def finish(engine: Engine, order: list[str]) -> None:
    """Let all requests end; they do so in this order."""
    engine.run()
    assert list(engine.ended) == order
    for one in engine.last_writes():
        engine.transfer.end(one.key)
    engine.tell(*(HoldEnded(one, HoldEnd.DONE) for one in engine.protocol.held))
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def begun(steps: list[dict[str, int]]) -> list[str]:
    """All requests in the order in which they began."""
    return list(dict.fromkeys(itertools.chain(*steps)))


def test_a_short_prompt_passes_a_long_one_that_is_being_computed(engine):
    add(engine, "long", 640)
    engine.turn()
    add(engine, "short", 40)
    steps = sizes(engine)
    engine.run()
    at = next(number for number, step in enumerate(steps) if "short" in step)
    assert steps[at] == {"long": STEP // 2, "short": STEP // 2} and at <= engine.in_flight
    assert sum("short" in step for step in steps) == 2
    assert max(sum(step.values()) for step in steps) <= STEP + 1, "a prompt that a step in flight ends has a token more"
    finish(engine, ["short", "long"])


def test_prompts_that_wait_are_begun_one_after_the_other_the_shortest_first(engine):
    for tokens in (200, 500, 300, 400):
        add(engine, str(tokens), tokens)
        engine.turn() if tokens == 200 else None
    finish(engine, ["200", "300", "400", "500"])


def test_without_overtaking_prompts_are_computed_in_the_order_of_their_arrival(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, prefill_overtaking=0)
    for tokens in (640, 40, 300, 20):
        add(engine, str(tokens), tokens)
    finish(engine, ["640", "40", "300", "20"])


@pytest.mark.parametrize("overtaking, passes_until", [(100, 10), (50, 6.4)], ids=["at most", "by its own time"])
def test_a_long_prompt_is_passed_until_it_is_due_and_no_longer(model_folder, in_flight, monkeypatch, overtaking,
                                                              passes_until):
    """In each second comes a short prompt that fills a step; the long one is due a quarter of the deadline after it
    came, or earlier."""
    now, engine = itertools.count(), engine_with(model_folder, in_flight, prefill_overtaking=overtaking,
                                                 attempt_deadline_s=40, blocks=512)
    engine.binding._timer = None  # the speed is that of an engine that has not measured any
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("vllm_pd.handover.prefill.time", SimpleNamespace(monotonic=lambda: clock.now))
    add(engine, "first", STEP)
    add(engine, "long", 640)
    for clock.now in itertools.takewhile(lambda second: second < 20, now):
        add(engine, str(clock.now), STEP)
        engine.turn()
    engine.run()
    order, own_s = list(engine.ended), overtaking * STEP / START_TOKENS_PER_S
    assert order[0] == "first"
    for second in range(20):
        passes = order.index(str(second)) < order.index("long")
        assert passes is (second + own_s < passes_until), f"that of second {second}"
    finish(engine, order)


def test_jobs_and_prompts_to_keep_are_in_one_order(engine):
    """And a job that V1 has got does not begin before a client's prompt whose turn is first."""
    first = engine.job(prompt(640), number=1)
    engine.turn()
    add(engine, "40", 40)
    add(engine, "500", 500)
    engine.job(prompt(550), number=2)
    short = engine.job(prompt(60), number=3)
    steps = sizes(engine)
    engine.run()
    names = [next(number for number, step in enumerate(steps) if name in step)
             for name in ("40", f"pd-{short}", "500", "pd-" + str(first).replace("#1", "#2"))]
    assert names == sorted(names)
    ends = [one.key for one in engine.last_writes()]
    assert [key.rpartition("#")[2] for key in ends] == ["3", "2", "1"]
    finish(engine, ["40", "500"])


def test_a_prompt_whose_beginning_is_cached_is_as_short_as_its_rest(engine):
    common = prompt(30 * BLOCK_SIZE)
    add(engine, "first", common)
    engine.run()
    add(engine, "other", 200)
    add(engine, "long", 300)
    add(engine, "cached", [*common, *prompt(20)])
    finish(engine, ["first", "cached", "other", "long"])


def test_nobody_passes_a_client_that_asks_for_nothing(engine):
    """In the queue it keeps its place, and those of both sides stay there."""
    add(engine, "first", 100)
    engine.turn()
    for name, tokens, asks in (("before long", 300, ASKS), ("before short", 40, ASKS), ("plain", 200, None),
                               ("after long", 250, ASKS), ("after short", 30, ASKS)):
        add(engine, name, tokens, asks=asks)
    steps = sizes(engine)
    engine.run()
    assert begun(steps) == ["first", "before short", "before long", "plain", "after short", "after long"]
    finish(engine, list(engine.ended))


def test_a_prompt_that_is_computed_has_no_turn_and_its_answer_goes_on_with_each_step(engine):
    add(engine, "chat", 40, count=30)
    while not engine.outputs["chat"]:
        engine.turn()
    assert not engine.binding.prefill_jobs.begun
    add(engine, "long", 640)
    steps = sizes(engine)
    engine.run()
    with_long = [step for step in steps if "long" in step]
    assert len(with_long) >= 10 and sum("chat" in step for step in with_long) >= len(with_long) // engine.in_flight - 1
    finish(engine, list(engine.ended))


def test_priority_comes_before_length_and_arrival_times_go_with_the_places(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, policy="priority")
    add(engine, "first", 100, arrival_time=0.0)
    engine.turn()
    for at, (name, tokens, priority, asks) in enumerate([
            ("long", 300, 0, ASKS), ("short", 40, 0, ASKS), ("plain", 200, 0, None), ("behind", 30, 0, ASKS),
            ("urgent", 250, -1, ASKS), ("last", 20, 1, ASKS)], 1):
        add(engine, name, tokens, asks=asks, arrival_time=float(at), priority=priority)
    requests = dict(engine.scheduler.requests)
    steps = sizes(engine)
    engine.run()
    assert begun(steps)[1:] == ["urgent", "short", "long", "plain", "behind", "last"]
    finish(engine, list(engine.ended))
    assert {name: one.arrival_time for name, one in requests.items()} == {
        "first": 0, "short": 1, "long": 2, "plain": 3, "behind": 4, "urgent": 5, "last": 6}


def test_a_request_that_is_aborted_has_no_turn(engine):
    for name in ("computed", "waits"):
        add(engine, name, 640)
    engine.turn()
    engine.abort("computed", "waits")
    assert not engine.binding.prefill_jobs.begun
    finish(engine, list(engine.ended))


def test_one_that_v1_has_preempted_waits_for_its_turn(engine):
    add(engine, "long", 640)
    engine.turn()
    add(engine, "short", 200)
    for _ in range(engine.in_flight + 1):
        engine.turn()
    while engine.begun_steps:
        engine.process()
    for request in list(engine.scheduler.running):
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
    assert engine.status("long") is engine.status("short") is RequestStatus.PREEMPTED
    engine._known.clear()
    finish(engine, ["short", "long"])


@pytest.mark.parametrize("settings", [{"hold_s": 0}, {"role": "kv_consumer"}], ids=["no holds", "no prefill engine"])
def test_an_engine_that_keeps_nothing_leaves_all_to_v1(model_folder, in_flight, settings):
    engine = engine_with(model_folder, in_flight, threshold=10_000, **settings)
    add(engine, "long", 640)
    engine.turn()
    add(engine, "short", 40)
    steps = sizes(engine)
    engine.run()
    assert max(sum(step.values()) for step in steps) == 256
    finish(engine, ["long", "short"])


@pytest.mark.parametrize("fenced", [False, True], ids=["parked", "quarantined"])
def test_b31_a_job_does_not_wait_behind_a_prompt_that_finds_no_room_beside_parked_requests(model_folder, in_flight,
                                                                                          fenced):
    """The peer whose job it is may hold blocks for requests that wait for this engine's in turn."""
    engine = engine_with(model_folder, in_flight, blocks=64, role="kv_both", prefill_overtaking=0)
    engine.add("parked", prompt(900))
    engine.run()
    attempt = engine.attempt("parked")
    engine.protocol.peers = 0
    if fenced:
        engine.abort("parked")
    add(engine, "held", 300)
    engine.run()
    assert engine.status("held") is RequestStatus.WAITING
    jobs = [engine.job(prompt(300), number=number) for number in range(2)]
    engine.run()
    assert [call for call in engine.protocol.calls if call[0] == "failed"] == [("failed", job) for job in jobs]
    engine.tell(Released(attempt)) if fenced else engine.prefilled("parked")
    finish(engine, ["parked", "held"])


def test_no_room_is_left_in_a_step_for_a_prompt_whose_grammar_is_not_there(engine):
    job = engine.job(prompt(640))
    engine.turn()
    guided = engine.add("guided", prompt(40), params=SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": ASKS},
        structured_outputs=StructuredOutputsParams(regex="a*")))
    steps = sizes(engine)
    for _ in range(20):
        engine.turn()
    assert guided.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert len(steps) >= 8 and all(step == {f"pd-{job}": STEP} for step in steps)
    engine.abort("guided")
    finish(engine, ["guided"])


def test_steps_are_not_cut_for_a_prompt_that_is_computed_elsewhere(model_folder, in_flight):
    """It is to be kept, and its client has asked that a peer compute it first."""
    engine = engine_with(model_folder, in_flight, role="kv_both")
    add(engine, "elsewhere", 300, asks={**ASKS, "pd": "remote"})
    engine.run()
    assert engine.status("elsewhere") is PARKED
    engine.protocol.peers = 0
    steps = sizes(engine)
    add(engine, "plain", 640, asks=None)
    engine.run()
    assert max(sum(step.values()) for step in steps) == 256
    engine.prefilled("elsewhere")
    finish(engine, ["plain", "elsewhere"])


TRAFFIC = st.lists(st.tuples(st.booleans(), st.sampled_from([1, 20, 40, 64, 90, 300, 500]), st.integers(0, 3)),
                   min_size=2, max_size=12)


def run_traffic(folder, in_flight: int, traffic, policy: str) -> tuple[list, dict[str, int], dict[str, int]]:
    """Requests that ask for a hold, or do not (`plain`), with so many tokens, and turns of the engine after each.
    Returns the steps; in which step each plain one began, and in which it had its whole prompt, both in that order."""
    engine = engine_with(folder, in_flight, blocks=640, policy=policy, role="kv_both", threshold=10_000,
                         max_num_seqs=16)
    steps = sizes(engine)
    for number, (asks, tokens, turns) in enumerate(traffic):
        add(engine, f"{'held' if asks else 'plain'} {number}", tokens, 3, ASKS if asks else None,
            arrival_time=float(number))
        for _ in range(turns):
            engine.turn()
    engine.run()
    begun: dict[str, int] = {}
    computed: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in filter(lambda name: name.startswith("plain"), step):
            begun.setdefault(name, at)
            if sum(one.get(name, 0) for one in steps[:at + 1]) >= len(engine.prompts[name]):
                computed.setdefault(name, at)
    finish(engine, list(engine.ended))
    return steps, begun, computed


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traffic=TRAFFIC)
@example(traffic=[(True, 500, 1), (False, 300, 0), (False, 20, 0), (True, 30, 0)])
@example(traffic=[(False, 300, 1), (True, 500, 0), (False, 20, 0), (True, 30, 0)])
def test_plain_requests_are_served_in_v1_s_own_order(model_folder, in_flight, policy, traffic):
    """The same requests with V1's own decisions throughout: no plain one is begun, or has its prompt computed, before
    another one that V1 itself serves before it."""
    steps, *ours = run_traffic(model_folder, in_flight, traffic, policy)
    with pytest.MonkeyPatch.context() as upstream:
        upstream.setattr(InternalRequests, "arrange", lambda jobs: None)
        its_steps, *its = run_traffic(model_folder, in_flight, traffic, policy)
    if not any(asks for asks, *_ in traffic):
        assert steps == its_steps
    for mine, upstreams in zip(ours, its, strict=True):
        for one, other in itertools.combinations(upstreams, 2):
            assert mine[one] <= mine[other], f"{other} has passed {one}"


@pytest.mark.parametrize("waits", [False, True], ids=["end queued", "end at once"])
def test_the_end_of_a_streaming_input_has_no_turn(engine, waits):
    """It is a request with the session's id that V1 never schedules: it queues it behind the input before, or finishes
    the session while that waits for input."""
    add(engine, "session", 40, resumable=True)
    if waits:
        engine.run()
        assert engine.status("session") is RequestStatus.WAITING_FOR_STREAMING_REQ
    add(engine, "session", [0])
    assert not engine.binding.prefill_jobs.begun and not engine.binding.prefill_jobs._to_keep
    add(engine, "other", 40)
    engine.run()
    assert not engine.scheduler.requests and not engine.binding.prefill_jobs._to_keep
