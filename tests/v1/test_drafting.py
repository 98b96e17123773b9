# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on V1's real schedulers: a drafter's KV is there wherever the model's is, wrong drafts harm
nobody, and nothing is counted as what it is not (B20, B34, B113).

VLLM_PD_V1_EXAMPLES=N plays N / 8 histories of tests/v1/walk.py with each drafter, VLLM_PD_SEEDS=N runs N / 60 of the
fleets. Real engines: tests/v1_engines/test_real_drafting.py.
"""
import collections

import pytest
from simulation.storms import storm

from tests.v1 import fleet_engine, test_fleets, test_machine, walk
from tests.v1.drafting import TOKENS, DraftingEngine, count_together, with_drafter
from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import PARKED, prompt
from vllm_pd.decisions.job_order import MIN_STEP_TOKENS
from vllm_pd.protocol.actions import FallbackReason, Released
from vllm_pd.v1.contract import StepShare

HISTORIES = test_machine.HISTORIES // 8
SEEDS = test_fleets.SEEDS // 5
EQUAL_BLOCKS = 1 / 200  # of what drafters read: more than stock V1 has of them, see tests/v1/drafting.py
EACH = pytest.mark.parametrize("drafter, in_flight", [("ngram", 1), ("ngram_gpu", 2), ("eagle", 1), ("eagle", 2)])


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


@pytest.fixture
def counts(monkeypatch) -> collections.Counter:
    return count_together(monkeypatch, DraftingEngine)


def drafting(folder, in_flight: int = 1, drafter: str = "eagle", **settings) -> DraftingEngine:
    """An engine with this drafter; `settings` as of `Engine`."""
    config = with_drafter(Engine(folder, in_flight, **settings).config, folder, drafter)
    return DraftingEngine(folder, in_flight, config=config, **settings)


def one_decodes_and_one_is_parked(folder, in_flight: int) -> DraftingEngine:
    """An engine that decodes "a", and where "b" has just been parked."""
    engine = drafting(folder, in_flight)
    engine.protocol.peers = 0
    engine.add("a", prompt(40), 60)
    for _ in range(6):
        engine.turn()
    engine.protocol.peers = 1
    engine.add("b", prompt(100), 20)
    engine.turn()
    return engine


# Searches.


@pytest.mark.search
@EACH
def test_b113_b20_b34_any_order_with_a_drafter(model_folder, drafter, in_flight, counts):
    for seed in range(HISTORIES):
        setting, steps = walk.history(seed)
        setting = setting._replace(in_flight=in_flight, stages=1, drafter=drafter)
        if seed % 2:
            setting = setting._replace(blocks=(20, 30, 64)[seed // 2 % 3], batch_tokens=64, seats=4)
        found = walk.failure(model_folder, setting, steps)
        assert not found, "\n".join(map(str, (seed, found, setting, *walk.shrink(model_folder, setting, steps))))
    assert 0.2 * counts["drafts"] < counts["accepted"] < 0.8 * counts["drafts"] and counts["drafts"] > 40 * HISTORIES
    if drafter == "eagle":
        assert counts["sent"] > 40 * HISTORIES and counts["read"] > 400 * HISTORIES
        assert counts["read of an equal block"] < EQUAL_BLOCKS * counts["read"]


def storm_of_drafters(folder, in_flight: int, seed: int):
    """A fleet of engines that all have an EAGLE head."""
    return test_fleets.run(folder, in_flight, seed, storm(seed), blocks=(24, 40)[seed % 2], caching=seed % 3 != 0,
                           chunk=8 if seed % 4 == 1 else 64, drafter="eagle")


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b113_b20_b34_storms_with_drafters(model_folder, in_flight, counts):
    done = 0
    for seed in range(SEEDS):
        outcome = storm_of_drafters(model_folder, in_flight, seed)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        done += outcome.done_remotely
    assert done >= 10 * SEEDS and counts["accepted"] > 10 * SEEDS
    assert counts["read of an equal block"] < EQUAL_BLOCKS * counts["read"]


def test_b113_a_drafter_whose_layers_are_not_sent_is_found(model_folder, monkeypatch):
    """Every answer is right then."""
    monkeypatch.setattr(fleet_engine, "SLOTS", tuple(range(fleet_engine.BLOCK_SIZE)))
    assert "the drafter's entry of position 0 is read" in storm_of_drafters(model_folder, 1, 0).broken


# Hazards.


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b113_only_the_last_token_of_a_prompt_is_computed_here_and_drafts_follow(model_folder, in_flight, counts):
    engine, one = drafting(model_folder, in_flight), prompt(100)
    engine.add("a", one, 30)
    engine.run()
    assert engine.status("a") is PARKED and len(engine.grant(engine.attempt("a"))) == 7, "no block is for drafts"
    engine.prefilled("a")
    engine.run()
    engine.check_answers()
    engine.check_at_rest()
    assert counts["accepted"] and engine.tokens_computed == 30 + counts["drafts"] - counts["accepted"]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b20_b113_a_prompt_that_leaves_no_block_for_drafts_is_computed_here(model_folder, in_flight):
    """V1 parks none without a block for them, and would wait for it for ever."""
    engine = drafting(model_folder, in_flight, blocks=10)
    engine.add("a", prompt(8 * BLOCK_SIZE + 1), 2)
    engine.run()
    engine.check_answers()
    engine.check_at_rest()
    assert not engine.protocol.jobs


@pytest.mark.parametrize("more, fits", [(0, True), (1, False)])
def test_b20_b113_a_job_that_leaves_no_room_for_drafts_is_refused(model_folder, more, fits):
    engine = drafting(model_folder, role="kv_producer", blocks=10)
    one = prompt(9 * BLOCK_SIZE - TOKENS + more)
    attempt = engine.job(one)
    engine.run()
    if fits:
        engine.check_sent(attempt, one)
    else:
        assert ("failed", attempt) in engine.protocol.calls


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b113_a_step_with_jobs_has_room_for_the_drafts_of_clients(model_folder, in_flight):
    """Else those of many clients would take what the jobs are to have."""
    engine = drafting(model_folder, in_flight, batch_tokens=512, max_num_seqs=24, blocks=256, prefill_step_s=1e-6,
                      threshold=10**6)
    for number in range(20):
        engine.add(f"c{number}", prompt(20), 200)
    for _ in range(6):
        engine.turn()
    found, schedule = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda *given: found.append(schedule(*given)) or found[-1]
    engine.job(prompt(400))
    for _ in range(12):
        engine.turn()
    jobs = [count for step in found for name, count in step.num_scheduled_tokens.items() if name not in engine.prompts]
    assert sum(jobs) == 400 and jobs[:6] == [MIN_STEP_TOKENS] * 6, jobs


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b20_b113_a_small_share_of_a_step_has_room_for_the_drafts_of_one(model_folder, in_flight, monkeypatch):
    """V1 schedules a request's last token together with places for drafts, and ends where these are cut off."""
    engine = one_decodes_and_one_is_parked(model_folder, in_flight)
    engine.turn()
    engine.prefilled("b")
    monkeypatch.setattr(engine.binding, "before_schedule", lambda: StepShare(64, 1))
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b113_drafts_are_not_measured_as_tokens_of_prompts(model_folder, in_flight, monkeypatch):
    engine = drafting(model_folder, in_flight, max_num_seqs=24, blocks=256, threshold="auto")
    engine.protocol.peers = 0
    measured = []
    monkeypatch.setattr(engine.binding.speed, "stepped", lambda now, *counts: measured.append(counts[:2]))
    for number in range(20):
        engine.add(f"c{number}", prompt(20), 60)
    engine.run()
    engine.check_answers()
    assert sum(tokens for tokens, _ in measured) == 20 * 20
    assert (0, 20) in measured


def test_b113_an_attempt_that_is_lost_while_drafts_are_in_flight(model_folder):
    """Of another request, which keeps its blocks, and whose step is processed after the fallback."""
    engine = one_decodes_and_one_is_parked(model_folder, 2)
    attempt = engine.attempt("b")
    engine.lost(attempt, FallbackReason.PEER)
    engine.turn()
    engine.write(attempt)
    engine.tell(Released(attempt))
    engine.run()
    engine.check_answers()
    engine.check_at_rest()
