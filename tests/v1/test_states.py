# SPDX-License-Identifier: Apache-2.0
"""B114: layers with a recurrent state: of each of their groups one block goes from a prefill engine to a decode engine,
and every answer is that of one engine (tests/v1/states.py)."""
import pytest

from tests.v1 import simulated
from tests.v1.simulated import BLOCK_SIZE, WrongRead
from tests.v1.states import StateEngine
from tests.v1.test_windows import (
    LENGTHS,
    hand_over,
    hand_over_with_hits,
    only_the_first_group_is_fenced,
    prompt_of,
    send_every_length,
    whole_prompts,
)
from tests.v1.walk import failure, history, shrink
from vllm_pd.protocol.rows import STATE, BlockRows
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.prefill import InternalRequests

GROUPS = [(0, STATE), (STATE, 0, STATE)]
MODES = ["align", "none"]
HISTORIES = 100
MOST = 400  # histories until a planted defect is found


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", GROUPS)
def test_b114_every_length_of_a_remote_prompt(model_folder, groups, mode):
    """Around each border of a block."""
    engine = StateEngine(model_folder, windows=groups, mode=mode, blocks=400)
    for length in LENGTHS:
        hand_over(engine, f"r{length}", prompt_of(length))
        token_ids, block_ids, cached = engine.protocol.jobs[engine.attempt(f"r{length}")]
        assert len(token_ids) == length - 1, "the last token is D's"
        assert not cached and len(block_ids) == -(-len(token_ids) // BLOCK_SIZE) + groups.count(STATE)
    engine.check_answers()
    engine.check_at_rest()


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("batch_tokens", [16, 33, 512])
@pytest.mark.parametrize("mode, chunks", [("align", False), ("align", True), ("none", True)])
def test_b114_every_length_of_a_job(model_folder, groups, batch_tokens, mode, chunks, checkpoints):
    """P sends the state after the prompt, with D's prefix hit or without, whole or in chunks."""
    send_every_length(StateEngine(model_folder, windows=groups, mode=mode, checkpoints=checkpoints, blocks=200,
                                  push_chunks=chunks, batch_tokens=batch_tokens))


@pytest.mark.parametrize("groups", GROUPS)
def test_b114_a_prefix_hit_of_every_length(model_folder, groups):
    """D has the KV of the beginning, mostly without the state after it: P writes the rest, and the state."""
    hand_over_with_hits(StateEngine(model_folder, windows=groups, blocks=400))


def test_b114_b97_a_hit_of_kv_without_its_state_is_no_hit_of_a_job(model_folder):
    """V1 looks up with the KV, and begins where it has a state, too: its figures would become negative."""
    engine = StateEngine(model_folder, windows=(0, STATE), blocks=200, batch_tokens=512)
    seen, make = [], engine.scheduler.make_stats
    engine.scheduler.make_stats = lambda *values, **more: seen.append(make(*values, **more)) or seen[-1]
    shared = prompt_of(3 * BLOCK_SIZE)
    for number, tail in enumerate((200, 90, 120)):
        attempt = engine.job(shared + prompt_of(tail), 0, number)
        engine.run()
        engine.transfer.end(str(attempt))
        engine.run()
    figures = [figure for stats in seen for figure in (stats.prefix_cache_stats, stats.connector_prefix_cache_stats)]
    assert len(seen) > 2
    assert {getattr(figure, key) for figure in figures for key in ("requests", "queries", "hits")} == {0}
    engine.check_at_rest()


def test_b114_a_job_goes_on_beside_many_that_decode(model_folder, monkeypatch):
    """A step with jobs has so few tokens that less than a block is left beside the decodes: V1 would compute no token
    of a prompt, which it has end with a block."""
    monkeypatch.setattr("vllm_pd.decisions.job_order.step_tokens", lambda *measured: 64)
    decoding, size = 40, 96
    engine = StateEngine(model_folder, windows=(0, STATE), block_size=size, blocks=200, batch_tokens=512,
                         max_num_seqs=decoding + 8, threshold=4000)
    for number in range(decoding):
        engine.add(f"r{number}", [number + 1] * 5, 400)
    for _ in range(6):
        engine.turn()
    assert engine.binding.prefill_jobs.step_tokens == size
    prompt = prompt_of(300)
    attempt = engine.job(prompt)
    for _ in range(20):
        engine.turn()
    engine.check_sent(attempt, prompt)
    assert len(engine.scheduler.running) == decoding
    engine.transfer.end(str(attempt))
    engine.run(2000)
    engine.check_answers()
    engine.check_at_rest()


def test_b114_whole_prompts_would_be_wrong_everywhere(model_folder, monkeypatch):
    """A state after the last token is of no use to D, which computes that token itself."""
    monkeypatch.setattr(BlockRows, "own_tokens", 0)
    for length in LENGTHS:
        engine = StateEngine(model_folder, windows=(0, STATE), blocks=96)
        with pytest.raises(WrongRead):
            hand_over(engine, "r", prompt_of(length))


def settings(seed: int, in_flight: int):
    """Of an engine that a history is played on."""
    drawn, steps = history(seed)
    mode = MODES[seed // 2 % 4 == 3]
    return drawn._replace(in_flight=in_flight, stages=simulated.STAGES, windows=GROUPS[seed % len(GROUPS)],
                          states=mode, checkpoints=seed // 10 % 2, caching=mode != "none", reads="never",
                          blocks=drawn.blocks + (10 if seed % 4 else 34)), steps


def first_failure(folder, in_flight: int, histories: int) -> str:
    for seed in range(histories):
        setting, steps = settings(seed, in_flight)
        if found := failure(folder, setting, steps):
            return "\n".join(map(str, (f"seed {seed}: {found}", setting, *shrink(folder, setting, steps))))
    return ""


@pytest.mark.search
def test_b114_b20_b34_any_order(model_folder, in_flight):
    assert not first_failure(model_folder, in_flight, HISTORIES)


def states_of_another_group(monkeypatch):
    """On P alone."""
    finished = InternalRequests.finished

    def mistaken(jobs, request, tables, progress):
        lead = jobs._rows.lead
        swapped = [table for group, table in enumerate(tables) if group != lead][::-1]
        swapped.insert(lead, tables[lead])
        finished(jobs, request, tuple(swapped), progress)

    monkeypatch.setattr(InternalRequests, "finished", mistaken)


def zeroed_while_a_peer_writes(monkeypatch):
    """V1 would have its workers zero them with the next step."""
    monkeypatch.setattr(PDConnector, "get_loaded_kv_cache_group_ids", lambda connector, request: ())


def jobs_go_on_after_their_prompt(monkeypatch):
    """As if a job computed its answer, too: a state is changed in place."""
    import vllm_pd.v1.prefill as module
    made = module.SamplingParams
    monkeypatch.setattr(module, "SamplingParams", lambda **fields: made(**{**fields, "max_tokens": 2}))


@pytest.mark.parametrize("defect", [whole_prompts, only_the_first_group_is_fenced, states_of_another_group,
                                    zeroed_while_a_peer_writes, jobs_go_on_after_their_prompt])
def test_b114_the_search_finds_planted_defects(model_folder, in_flight, defect, monkeypatch):
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_states.shrink", lambda *history: ())
    assert first_failure(model_folder, in_flight, MOST)
