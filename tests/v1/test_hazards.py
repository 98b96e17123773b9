# SPDX-License-Identifier: Apache-2.0
"""The hazards of V1's connector path, on the real scheduler, sync and async with two steps in flight (B34, B93-B98).

The memory under it notices a wrong read (tests/v1/simulated.py); every test ends with right answers and an empty pool.
"""
import itertools
import time

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import RequestStatus

from tests.v1.simulated import BLOCK_SIZE, Engine, answer
from vllm_pd.protocol.actions import Cancelled, FallbackReason, Prefilled, Released
from vllm_pd.protocol.messages import Timings
from vllm_pd.v1.binding import FENCES_S

PARKED = RequestStatus.WAITING_FOR_REMOTE_KVS
_fresh = itertools.count(1)


def prompt(tokens: int) -> list[int]:
    """A prompt that no other one shares a block with."""
    return [next(_fresh) % 900, *(i % 900 for i in range(tokens - 1))]


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


def end(engine: Engine) -> None:
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def parked(engine: Engine, request_id: str = "a", tokens: int = 100, **fields):
    engine.add(request_id, prompt(tokens), **fields)
    engine.run()
    assert engine.status(request_id) is PARKED
    return engine.attempt(request_id)


@pytest.mark.parametrize("tokens", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 6 * BLOCK_SIZE - 1, 100, 900])
def test_b2_b90_a_remote_prefill_needs_one_token_computed_here(engine, tokens):
    attempt = parked(engine, tokens=tokens)
    assert len(engine.grant(attempt)) == -(-tokens // BLOCK_SIZE)
    engine.prefilled("a")
    end(engine)
    assert engine.tokens_computed == 4, "the prompt's last token, and three of the answer"


def test_b93_hazard_1_a_fallback_computes_in_fresh_blocks_while_the_peer_writes_on(engine):
    attempt = parked(engine)
    engine.protocol.peers = 0
    engine.lost(attempt)
    while engine.has_work():
        engine.turn()
        engine.write(attempt, 50)  # late
        if "a" in engine.scheduler.requests:
            assert not set(engine.block_ids("a")) & set(engine.grant(attempt))
    assert engine.ended["a"] and len(engine.binding.fence) == 1
    engine.tell(Released(attempt))
    end(engine)


def test_b20_hazard_2_a_fence_comes_down_once(engine):
    attempt = parked(engine)
    engine.protocol.peers = 0
    engine.lost(attempt)
    engine.tell(Released(attempt), Released(attempt))
    while engine.has_work():
        engine.turn()
        engine.tell(Released(attempt), Prefilled(attempt, Timings()))
    end(engine)


def test_b95_hazard_4_a_late_word_about_a_request_that_runs_changes_nothing(engine):
    attempt = parked(engine, tokens=100)
    engine.prefilled("a")
    for _ in range(3):
        engine.turn()
        engine.tell(Prefilled(attempt, Timings()), Released(attempt))
        engine.lost(attempt)
    assert not engine.scheduler.finished_recving_kv_req_ids
    end(engine)


def test_b98_hazard_8_preempted_after_its_resume_it_stays_here(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, blocks=18)
    engine.add("b", prompt(16), 100)
    engine.add("c", prompt(16), 100)
    engine.turn()
    engine.add("a", prompt(100), 80)
    while not engine.protocol.jobs:
        engine.turn()
    attempt = engine.attempt("a")
    engine.prefilled("a")
    preempted = False
    while engine.has_work():
        engine.turn()
        preempted |= any(request.num_preemptions for request in engine.scheduler.requests.values())
        engine.tell(Prefilled(attempt, Timings()))  # late: the fourth hazard again
    assert preempted, "the pool is too large for this test"
    assert len([one for one in engine.protocol.jobs if one.request_id == "a"]) == 1
    engine.check_answers()
    engine.check_at_rest()


def test_b95_hazard_5_a_storm_of_double_and_unknown_words(engine):
    attempts = [parked(engine, name) for name in "abcd"]
    unknown = engine.protocol.next_attempt("zz")
    for attempt in (*attempts[:2], unknown):
        for _ in range(3):
            if attempt is not unknown:
                engine.write(attempt)
            engine.protocol.events.append(Prefilled(attempt, Timings()))
    engine.access.wake()
    engine.run()
    assert {"a", "b"} <= engine.ended.keys() and engine.status("c") is PARKED
    engine.abort("c", "c", "zz")
    engine.tell(Released(attempts[2]), Released(attempts[2]), Released(unknown))
    engine.prefilled("d")
    end(engine)


def test_b20_hazard_6_a_fence_that_comes_down_in_an_idle_engine_needs_no_step(engine):
    attempt = parked(engine)
    engine.abort("a")
    engine.run()
    assert not engine.scheduler.requests and len(engine.binding.fence) == 1
    assert not engine.has_work()
    engine.tell(Released(attempt))
    steps = engine.steps
    assert not engine.has_work() and len(engine.binding.fence) == 0
    assert engine.steps == steps
    end(engine)


def test_b25_hazard_7_abort_between_the_word_and_the_step(engine):
    attempt = parked(engine)
    engine.prefilled("a")
    engine.scheduler.has_requests()  # the word is applied
    assert "a" in engine.scheduler.finished_recving_kv_req_ids
    engine.abort("a")
    engine.tell(Prefilled(attempt, Timings()))
    end(engine)


def test_b25_hazard_7_abort_of_all_while_queued_parked_failed_and_running(engine):
    names = "abcdef"
    attempts = {name: parked(engine, name) for name in names}
    engine.prefilled("a")
    engine.lost(attempts["b"])
    engine.lost(attempts["c"], FallbackReason.DEADLINE)
    engine.turn()
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.ended |= dict.fromkeys(engine.prompts.keys() - engine.ended.keys(), "aborted")
    engine.tell(*(Released(attempt) for attempt in engine.protocol.jobs if attempt not in engine.released))
    end(engine)


def test_b95_the_word_comes_before_its_request_is_aborted_and_is_applied_after(engine):
    attempt = parked(engine)
    engine.write(attempt)
    engine.protocol.events.append(Prefilled(attempt, Timings()))  # nobody woke the engine yet
    engine.abort("a")
    engine.access.wake()
    end(engine)


@pytest.mark.parametrize("role, right", [("kv_both", True), ("kv_producer", False)])
def test_hazard_11_freed_blocks_are_deferred_only_where_v1_sees_kv_both(model_folder, role, right):
    engine = Engine(model_folder, 2, vllm_role=role)
    engine.add("a", prompt(BLOCK_SIZE), 8)
    engine.schedule()
    engine.schedule()
    free = engine.pool.get_num_free_blocks()
    engine.abort("a")
    assert (engine.pool.get_num_free_blocks() == free) is right
    engine.process()
    engine.process()
    end(engine)


def test_hazard_11_the_write_in_flight_would_land_in_a_grant(model_folder):
    engine = Engine(model_folder, 2, blocks=12, vllm_role="kv_producer")
    engine.add("a", prompt(BLOCK_SIZE), 8)
    engine.schedule()
    engine.schedule()
    engine.abort("a")
    engine.add("b", prompt(10 * BLOCK_SIZE))
    engine.schedule()
    engine.prefilled("b")
    with pytest.raises(AssertionError, match="b reads position"):
        while engine.has_work():
            engine.process() if engine.begun_steps else engine.turn()


def test_b9_hazard_12_a_prefix_hit_is_offered_to_a_peer_when_it_is_computed(engine):
    shared = prompt(5 * BLOCK_SIZE)
    engine.protocol.peers = 0
    engine.add("a", shared + [1] * 10)
    engine.schedule()
    engine.protocol.peers = 1
    engine.add("b", shared + [2] * 60)
    if engine.in_flight > 1:
        engine.schedule()  # the first step is in flight
        assert engine.status("b") is RequestStatus.WAITING, "its hit is not in memory yet"
    engine.process()
    engine.run()
    attempt = engine.attempt("b")
    token_ids, block_ids, cached_blocks = engine.protocol.jobs[attempt]
    assert cached_blocks == 5
    from tests.v1.simulated import contents
    right = contents(token_ids)
    assert all(engine.slots[block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE] == right[i] for i in range(5 * BLOCK_SIZE))
    engine.prefilled("b")
    end(engine)


def test_b9_hazard_12_also_within_the_step_that_computes_it(engine):
    shared = prompt(5 * BLOCK_SIZE)
    engine.protocol.peers = 0
    engine.add("a", shared + [1] * 10, 40)
    engine.add("b", shared + [2] * 60)
    decide = engine.binding.remote_prefills.decide

    def only_b(request, cached):
        engine.protocol.peers = int(request.request_id == "b")
        return decide(request, cached)

    engine.binding.remote_prefills.decide = only_b
    output = engine.schedule()
    assert "a" in output.num_scheduled_tokens and engine.status("b") is RequestStatus.WAITING
    while "b" not in {one.request_id for one in engine.protocol.jobs}:
        engine.turn()
    engine.prefilled("b")
    end(engine)


@pytest.mark.parametrize("of_peer", [False, True])
def test_b9_hazard_12_also_when_the_request_has_ended_that_computes_it(engine, of_peer):
    if engine.in_flight < 2:
        return  # nothing ends between a step and its output
    shared = prompt(5 * BLOCK_SIZE)
    engine.protocol.peers = 0
    if of_peer:
        job = engine.job(shared + [1] * 10)
    else:
        engine.add("a", shared + [1] * 10)
    engine.schedule()
    engine.protocol.peers = 1
    if of_peer:
        engine.tell(Cancelled(job))
    else:
        engine.abort("a")
    engine.add("b", shared + [2] * 60)
    engine.schedule()
    assert engine.status("b") is RequestStatus.WAITING, "its hit is not in memory yet"
    engine.process()
    engine.schedule()
    assert engine.status("b") is PARKED and engine.protocol.jobs[engine.attempt("b")][2] == 5
    engine.prefilled("b")
    end(engine)


def test_b20_a_prompt_with_a_prefix_hit_is_parked_although_others_end_in_each_step(engine):
    """B20: other requests that end while a step computes them say nothing about this hit, which is in memory."""
    shared = prompt(5 * BLOCK_SIZE)
    engine.protocol.peers = 0
    engine.add("a", shared + [1] * 10)
    engine.run()
    engine.protocol.peers = 1
    for number in range(10):
        short = [number, *range(7)]
        *_, last = answer(short, 3)
        engine.add(f"{number}_short", short, 3, params=SamplingParams(max_tokens=50, temperature=0, ignore_eos=True,
                                                                      stop_token_ids=[last]))
        if number == 6:
            engine.add("b", shared + [2] * 60)
        engine.turn()
        if engine.config.scheduler_config.async_scheduling and number > 5:
            assert engine.scheduler.deferred_frees, "the next step of one that has ended is in flight"
    assert engine.status("b") is PARKED
    engine.prefilled("b")
    end(engine)


@pytest.mark.parametrize("running", [False, True])
def test_b96_hazard_13_a_reset_of_the_prefix_cache_falls_back_first(engine, running):
    attempt = parked(engine)
    if running:
        engine.add("b", prompt(10), 30)
        for _ in range(3):
            engine.turn()
    engine.tell(Released(attempt))  # as the peer answers to the abort
    assert bool(engine.begun_steps) is (engine.in_flight > 1 and running)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert attempt in engine.protocol.aborted
    engine.run()
    if "a" not in engine.ended:
        engine.prefilled("a")
    end(engine)


@pytest.mark.parametrize("is_applied", [False, True])
def test_b96_an_engine_with_other_weights_takes_no_kv_of_others(engine, monkeypatch, is_applied):
    """B96: neither what is being written, nor what has arrived and is not used yet, nor later."""
    monkeypatch.setattr("vllm_pd.v1.binding.FENCES_S", 0.01)
    for name in "ab":
        engine.add(name, prompt(100))
    engine.run()
    engine.prefilled("a")
    if is_applied:
        engine.scheduler.has_requests()
    engine.binding.weights_replaced()
    engine.tell(Released(engine.attempt("b")))
    engine.add("c", prompt(100))
    engine.run()
    engine.check_answers()
    engine.check_at_rest()
    assert engine.tokens_computed == 3 * (100 + 3) and len(engine.protocol.jobs) == 2


def test_b96_hazard_13_also_between_the_word_and_the_step(engine):
    parked(engine)
    engine.prefilled("a")
    engine.scheduler.has_requests()  # the word is applied
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    end(engine)


def test_b96_a_reset_with_a_fence_that_stays_up_fails_as_v1_says(engine, monkeypatch):
    monkeypatch.setattr("vllm_pd.v1.binding.FENCES_S", 0.01)
    attempt = parked(engine)
    assert not engine.scheduler.reset_prefix_cache()
    with pytest.raises(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.tell(Released(attempt))
    engine.run()
    engine.prefilled("a")
    end(engine)


def test_b96_a_reset_does_not_wait_for_a_fence_that_only_a_death_takes_down(engine):
    """B96, B34: it would be FENCES_S long, and in vain."""
    attempt = parked(engine)
    engine.protocol.lasting.add(attempt)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert time.monotonic() - began < FENCES_S / 2
    engine.tell(Released(attempt))
    engine.run()
    engine.prefilled("a")
    end(engine)


def test_b96_after_it_the_request_is_computed_although_the_fence_stays_up(engine, monkeypatch):
    monkeypatch.setattr("vllm_pd.v1.binding.FENCES_S", 0.01)
    attempt = parked(engine)
    engine.protocol.peers = 0
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.ended["a"] == "length"
    engine.tell(Released(attempt))
    end(engine)


def test_b94_an_engine_with_parked_requests_only_makes_no_step(engine):
    parked(engine)
    steps = engine.steps
    for _ in range(100):
        engine.access.wake()
        assert not engine.scheduler.has_requests() and not engine.scheduler.has_unfinished_requests()
    assert engine.steps == steps
    engine.access.may_sleep = False  # a drain: all requests are to end
    assert engine.scheduler.has_requests() and engine.scheduler.has_unfinished_requests()
    engine.access.may_sleep = True
    engine.add("b", prompt(10))
    assert engine.scheduler.has_requests()
    engine.run()
    assert "b" in engine.ended and "a" not in engine.ended
    engine.prefilled("a")
    assert engine.scheduler.has_requests() and engine.scheduler.has_unfinished_requests()
    end(engine)


def test_b94_a_resume_starts_a_wave_and_a_new_request_joins_the_one_that_is_started_for_it(engine):
    """Once, and not while it is parked."""
    parked(engine)
    assert engine.access.waves == 1
    engine.access.engines_running = False  # all ranks have made a dummy pass
    for _ in range(10):
        engine.access.wake()
        assert not engine.scheduler.has_requests()
    assert engine.access.waves == 1
    engine.prefilled("a")
    end(engine)
    assert engine.access.waves == 2


def test_b90_samples_of_one_prompt_share_its_prefill(engine):
    one = prompt(100)
    for sample in range(3):
        engine.add(f"{sample}_a", one)
    engine.run()
    assert len(engine.protocol.jobs) == 1
    engine.prefilled("0_a")
    end(engine)
    assert len(engine.protocol.jobs) == 1


def test_b90_samples_share_it_also_where_no_more_can_be_parked(model_folder, in_flight):
    engine, one = Engine(model_folder, in_flight, max_parked_fraction=7 / 64), prompt(100)
    for sample in range(3):
        engine.add(f"{sample}_a", one)
    engine.run()
    assert engine.status("0_a") is PARKED and not engine.tokens_computed
    engine.prefilled("0_a")
    end(engine)


@pytest.mark.parametrize("cached_blocks, threshold, peers", [(4, 3 * BLOCK_SIZE, 2), (6, BLOCK_SIZE, 2), (6, 1, 0)])
def test_b20_a_prompt_that_is_cached_here_waits_for_no_peer_that_computes_an_equal_one(
        model_folder, in_flight, cached_blocks, threshold, peers):
    """B20: neither for the last block, nor for so little that no peer would be asked for it."""
    engine = Engine(model_folder, in_flight, threshold=threshold)
    parked(engine)
    engine.protocol.peers = 0
    engine.add("b", engine.prompts["a"][:cached_blocks * BLOCK_SIZE] + [1] * 40)
    engine.run()
    engine.protocol.peers = peers
    engine.add("c", engine.prompts["a"])
    engine.run()
    assert set(engine.ended) == {"b", "c"} and len(engine.protocol.jobs) == 1
    assert engine.cached["c"] == cached_blocks * BLOCK_SIZE
    engine.prefilled("a")
    end(engine)


def test_b97_a_clients_cached_tokens_are_its_prefix_hit(engine):
    one = prompt(5 * BLOCK_SIZE)
    engine.add("a", one + [1] * 40)
    engine.run()
    engine.prefilled("a")
    engine.run()
    engine.add("b", one + [2] * 40)
    engine.run()
    engine.prefilled("b")
    end(engine)
    assert engine.cached == {"a": 0, "b": 5 * BLOCK_SIZE}


@pytest.mark.parametrize("outcome", ["lost", "aborted"])
def test_b90_samples_go_on_when_the_first_one_can_not(engine, outcome):
    one = prompt(100)
    for sample in range(2):
        engine.add(f"{sample}_a", one)
    engine.run()
    first = engine.attempt("0_a")
    engine.protocol.peers = 0
    if outcome == "lost":
        engine.lost(first)
    else:
        engine.abort("0_a")
    engine.run()
    engine.tell(Released(first))
    end(engine)


@pytest.mark.parametrize("fields, goes", [
    ({}, True),
    ({"priority": 3}, True),
    ({"cache_salt": "s"}, True),
    ({"cache_salt": "s" * 513}, False),
    ({"resumable": True}, False),
    ({"params": SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1)}, False),
    ({"params": SamplingParams(max_tokens=4, temperature=0.7, seed=3, ignore_eos=True)}, True),
], ids=["plain", "priority", "salt", "long salt", "streaming input", "prompt logprobs", "seed"])
def test_b98_what_goes_remote(model_folder, in_flight, fields, goes):
    engine = Engine(model_folder, in_flight)
    engine.add("a", prompt(100), **fields)
    engine.turn()
    assert bool(engine.protocol.jobs) is goes


def test_b98_a_grammar_is_waited_for_first_and_keeps_the_engine_awake(model_folder, in_flight):
    engine = Engine(model_folder, in_flight)
    parked(engine, "a")
    guided = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                            structured_outputs=StructuredOutputsParams(regex="a*"))
    request = engine.add("b", prompt(100), params=guided)
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for _ in range(3):
        engine.turn()
    assert engine.scheduler.has_requests(), "nobody would wake it for the grammar"


def test_b31_the_cap_on_parked_blocks_counts_fenced_ones(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, max_parked_fraction=0.2)  # 12 blocks of 64
    first = parked(engine, "a", 100)  # 7 blocks
    engine.abort("a")
    engine.add("b", prompt(100))
    engine.run()
    assert "b" in engine.ended, "it had to stay"
    engine.tell(Released(first))
    engine.run()
    parked(engine, "c", 100)
    engine.prefilled("c")
    end(engine)


def test_b31_prompts_that_wait_for_blocks_that_are_fenced_go_on_when_they_are_free(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, blocks=20)
    first = parked(engine, "a", 200)
    engine.abort("a")
    engine.protocol.peers = 0
    engine.add("b", prompt(200))
    engine.run()
    assert "b" not in engine.ended, "there is no room"
    engine.tell(Released(first))
    end(engine)


def test_b6_answers_are_those_of_a_model(engine):
    """The bench itself: it says what it should."""
    engine.protocol.peers = 0
    one = prompt(100)
    engine.add("a", one)
    end(engine)
    assert engine.outputs["a"] == answer(one, 4)
