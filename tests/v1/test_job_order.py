# SPDX-License-Identifier: Apache-2.0
"""A V1 engine computes its jobs in their turn: on V1's real schedulers, short ones pass long ones, inside a prompt too.
"""
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.v1 import simulated
from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import prompt
from vllm_pd.protocol.actions import Cancelled, Prefill
from vllm_pd.protocol.messages import Attempt

STEP = 64  # tokens: the least that a step of jobs has, whatever the speed


def engine_with(model_folder, in_flight, **settings) -> Engine:
    """A prefill engine whose steps with jobs have 64 tokens, and without have 256."""
    return Engine(model_folder, in_flight, **{"role": "kv_producer", "batch_tokens": 256, "blocks": 128,
                                              "prefill_step_s": 1e-6, "prefill_overtaking": 1000,
                                              "attempt_deadline_s": 86400, **settings})


@pytest.fixture
def engine(model_folder, in_flight):
    return engine_with(model_folder, in_flight)


def sizes(engine: Engine) -> list[dict[str, int]]:
    """From now on: the tokens of each request in each step that has any."""
    found, schedule = [], engine.scheduler.schedule

    def noting(*arguments):
        output = schedule(*arguments)
        if output.num_scheduled_tokens:
            found.append(dict(output.num_scheduled_tokens))
        return output

    engine.scheduler.schedule = noting
    return found


def finish(engine: Engine, order: list[Attempt]) -> None:
    """Let all jobs be computed; they are sent in this order."""
    engine.run()
    written = engine.last_writes()
    assert [one.key for one in written] == list(map(str, order))
    for one in written:
        engine.transfer.end(one.key)
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def test_a_short_job_passes_a_long_one_that_is_being_computed(engine):
    long_prompt, short_prompt = prompt(640), prompt(40)
    long = engine.job(long_prompt, number=1)
    engine.turn()
    short = engine.job(short_prompt, number=2)
    steps = sizes(engine)
    engine.run()
    engine.check_sent(short, short_prompt)
    engine.check_sent(long, long_prompt)
    at = next(number for number, step in enumerate(steps) if f"pd-{short}" in step)
    assert steps[at] == {f"pd-{long}": STEP // 2, f"pd-{short}": STEP // 2} and at <= engine.in_flight
    assert sum(f"pd-{short}" in step for step in steps) == 2 and max(sum(step.values()) for step in steps) == STEP
    finish(engine, [short, long])


def test_a_job_that_passes_is_first_in_every_step_until_it_is_done(engine):
    long = engine.job(prompt(640), number=1)
    engine.turn()
    middle = engine.job(prompt(300), number=2)
    steps = sizes(engine)
    engine.run()
    first, last = (find(number for number, step in enumerate(steps) if f"pd-{middle}" in step) for find in (min, max))
    alone = steps[first + 1:last]
    assert len(alone) >= 3 and all(set(step) == {f"pd-{middle}"} for step in alone)
    finish(engine, [middle, long])


def test_without_overtaking_jobs_are_computed_in_the_order_of_their_arrival(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, prefill_overtaking=0)
    jobs = [engine.job(prompt(tokens), number=number) for number, tokens in enumerate((640, 40, 300, 20))]
    finish(engine, jobs)


def test_queued_jobs_begin_one_after_the_other_the_shortest_first(engine):
    """And none is known to V1 before its turn."""
    first = engine.job(prompt(200), number=1)
    others = [engine.job(prompt(tokens), number=tokens) for tokens in (500, 300, 400)]
    engine.turn()
    assert set(engine.scheduler.requests) == {f"pd-{first}"} and len(engine.binding.prefill_jobs.queued) == 3
    assert engine.binding.prefill_jobs.job_tokens == 1400
    finish(engine, [first, others[1], others[2], others[0]])
    assert engine.binding.prefill_jobs.job_tokens == 0


def test_small_jobs_share_a_step(engine):
    jobs = [engine.job(prompt(15), number=number) for number in range(4)]
    steps = sizes(engine)
    engine.run()
    assert steps[0] == {f"pd-{job}": 15 for job in jobs}
    finish(engine, jobs)


def test_jobs_whose_beginning_is_cached_share_a_step(engine):
    """What is cached here is not computed, so it leaves room for others in the step."""
    common = prompt(10 * BLOCK_SIZE)
    first = engine.job(common, number=1)
    engine.run()
    jobs = [engine.job([*common, *prompt(15)], number=number) for number in range(2, 6)]
    other = engine.job(prompt(600), number=6)
    steps = sizes(engine)
    engine.run()
    assert steps[0] == {f"pd-{job}": 15 for job in jobs} | {f"pd-{other}": STEP - 4 * 15}
    finish(engine, [first, *jobs, other])


def test_a_job_whose_beginning_is_being_computed_begins_beside_its_end(engine):
    common = prompt(10 * BLOCK_SIZE)
    jobs = [engine.job([*common, *prompt(15)], number=number) for number in range(1, 6)]
    steps = sizes(engine)
    engine.run()
    assert len(steps) <= 5, "175 tokens of the first job, and 60 of the others, by 64"
    finish(engine, jobs)


def test_b5_a_beginning_that_is_worth_reading_is_not_counted_as_one_to_compute(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, prefix_reads="always")
    handover, one = engine.binding.prefill_jobs, prompt(10 * BLOCK_SIZE + 15)
    reads = engine.job(one, cached_blocks=10, number=1)
    engine.binding._collect()
    assert handover.tokens_left(handover._jobs[reads]) == 15
    engine.run()
    engine.fill(one)
    finish(engine, [reads])


def test_b98_priority_comes_before_length(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, policy="priority")
    first = engine.job(prompt(200), number=1)
    jobs = {}
    for number, (tokens, priority) in enumerate([(100, 0), (500, -1), (300, 1)], 2):
        jobs[priority] = Attempt("peer", "r", number)
        engine.tell(Prefill(jobs[priority], prompt(tokens), list(range(100, 100 - (-tokens // BLOCK_SIZE))), 0, [],
                            "peer", priority))
    engine.run()
    finish(engine, [jobs[-1], *sorted((first, jobs[0]), key=lambda one: one is first), jobs[1]])


def test_b97_a_client_has_its_token_in_each_step_beside_jobs(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, role="kv_both", threshold=10_000)
    engine.add("a", prompt(30), 40, params=SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    engine.wanted["a"] = 40
    engine.turn()
    steps = sizes(engine)
    job = engine.job(prompt(640))
    engine.run()
    with_job = [step for step in steps if f"pd-{job}" in step]
    stages = simulated.STAGES  # with two, a client has its next token two steps later
    assert len(with_job) >= 10 and all(step[f"pd-{job}"] <= STEP + stages - 1 for step in with_job)
    assert sum("a" in step for step in with_job) >= len(with_job) // stages - 1
    finish(engine, [job])


def test_v1s_own_limits_are_as_before_after_a_step_of_jobs(engine):
    scheduler = engine.scheduler
    before = scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold
    long, short = engine.job(prompt(640), number=1), None
    for _ in range(3):
        engine.turn()
        assert (scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold) == before
        short = short or engine.job(prompt(40), number=2)
    finish(engine, [short, long])


def test_b25_a_queued_job_that_is_cancelled_leaves_nothing(engine):
    first, queued = engine.job(prompt(300), number=1), engine.job(prompt(640), number=2)
    engine.turn()
    engine.tell(Cancelled(queued))
    engine.turn()
    assert ("ended", queued) in engine.protocol.calls
    finish(engine, [first])


def test_b96_queued_jobs_are_given_back_when_the_engine_is_paused(engine):
    first, queued = engine.job(prompt(300), number=1), engine.job(prompt(640), number=2)
    engine.turn()
    engine.access.takes_requests = False
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert ("failed", queued) in engine.protocol.calls
    engine.run()
    engine.access.takes_requests = True
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    finish(engine, [first])


def test_b25_a_queued_job_begins_when_the_one_before_it_is_cancelled(engine):
    first, queued = engine.job(prompt(300), number=1), engine.job(prompt(640), number=2)
    engine.turn()
    engine.tell(Cancelled(first))
    finish(engine, [queued])


def test_the_speed_of_an_engine_is_measured_by_its_steps(engine):
    assert engine.binding.speed.tokens_per_s == 0
    job = engine.job(prompt(300))
    engine.run()
    engine.binding.rest()
    assert engine.protocol.load.tokens_per_s == engine.binding.speed.tokens_per_s > 0, "an engine at rest tells it too"
    finish(engine, [job])


def test_b31_a_job_that_waits_for_its_turn_is_not_given_back(model_folder, in_flight, monkeypatch):
    """Only one that had its turn, and finds no room beside parked requests, is."""
    monkeypatch.setattr("vllm_pd.decisions.mutual.BLOCKED_S", 0.0)
    engine = engine_with(model_folder, in_flight, role="kv_both", prefill_overtaking=0)
    engine.add("a", prompt(100))
    engine.run()
    assert engine.attempt("a") in engine.protocol.jobs
    first, queued = engine.job(prompt(640), number=1), engine.job(prompt(300), number=2)
    for _ in range(8):
        engine.turn()
        assert engine.binding.prefill_jobs.queued == [queued]
    engine.run()
    engine.prefilled("a")
    finish(engine, [first, queued])


def test_steps_are_not_cut_for_models_that_take_images(engine, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "max_num_encoder_input_tokens", 1000)
    job = engine.job(prompt(640))
    steps = sizes(engine)
    engine.run()
    assert max(sum(step.values()) for step in steps) == 256
    finish(engine, [job])


def test_a_prompt_is_computed_whole_where_v1_does_not_chunk_it(engine):
    engine.config.scheduler_config.enable_chunked_prefill = False
    jobs = [engine.job(prompt(tokens), number=tokens) for tokens in (250, 200)]
    steps = sizes(engine)
    engine.run()
    assert [list(step.values()) for step in steps] == [[250], [200]]
    finish(engine, jobs)


def test_a_job_passes_two_that_are_being_computed(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, batch_tokens=512, prefill_step_s=1e-6)
    longest = engine.job(prompt(900), number=1)
    engine.turn()
    middle = engine.job(prompt(500), number=2)
    for _ in range(in_flight + 1):
        engine.turn()
    short = engine.job(prompt(40), number=3)
    steps = sizes(engine)
    finish(engine, [short, middle, longest])
    at = next(number for number, step in enumerate(steps) if f"pd-{short}" in step)
    assert at <= in_flight and len(steps[at]) == 3


def test_a_job_that_finds_no_blocks_does_not_hold_up_the_one_it_would_pass(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, blocks=60, caching=False)
    long = engine.job(prompt(800), number=1)  # 50 of 59 blocks
    engine.turn()
    short = engine.job(prompt(300), number=2)  # 19 blocks
    steps = sizes(engine)
    for _ in range(8):
        engine.turn()
    assert steps and all(step == {f"pd-{long}": STEP} for step in steps)
    engine.run()
    engine.transfer.end(engine.sent(long).key)
    finish(engine, [long, short])


def test_b97_a_client_has_its_token_though_it_came_after_the_job(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, role="kv_both", threshold=10_000)
    job = engine.job(prompt(900))
    engine.turn()
    engine.add("a", prompt(20), 30, params=SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.wanted["a"] = 30
    short = engine.job(prompt(30), number=2)
    steps = sizes(engine)
    engine.run()
    first = next(number for number, step in enumerate(steps) if "a" in step)
    after = [step for step in steps[first + 1:] if f"pd-{job}" in step]
    assert len(after) >= 5 and sum("a" in step for step in after) >= len(after) // simulated.STAGES - 1
    finish(engine, [short, job])


def test_b31_a_job_that_v1_has_preempted_is_given_back_where_parked_requests_have_its_room(model_folder, in_flight):
    engine = engine_with(model_folder, in_flight, role="kv_both")
    job = engine.job(prompt(300))
    engine.turn()
    request = engine.scheduler.requests[f"pd-{job}"]
    assert engine.binding.prefill_jobs.waiting == []
    request.status = RequestStatus.PREEMPTED
    assert engine.binding.prefill_jobs.waiting == [job]
    request.status = RequestStatus.RUNNING
    finish(engine, [job])
