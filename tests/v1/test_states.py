# SPDX-License-Identifier: Apache-2.0
"""B114: layers with a recurrent state: of each of their groups one block goes from a prefill engine to a decode engine,
and every answer is that of one engine (tests/v1/states.py)."""
import functools

import pytest

from tests.v1 import simulated
from tests.v1.drafting import WrongDraft, with_drafter
from tests.v1.simulated import BLOCK_SIZE, Engine, WrongRead
from tests.v1.states import DraftingStateEngine, StateEngine
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


def drafting(folder, in_flight: int = 1, *, drafter: str, mode: str = "align", batch_tokens: int = 128,
             **settings) -> DraftingStateEngine:
    """An engine with this drafter; `settings` as of `StateEngine`."""
    config = Engine(folder, in_flight, caching=mode != "none", batch_tokens=batch_tokens).config
    return DraftingStateEngine(folder, in_flight, config=with_drafter(config, folder, drafter), mode=mode, **settings)


MAKERS = {"": StateEngine, "ngram": functools.partial(drafting, drafter="ngram"),
          "eagle": functools.partial(drafting, drafter="eagle", is_flagged=False),
          "mtp": functools.partial(drafting, drafter="eagle")}
WITH_GROUPS = pytest.mark.parametrize("maker, groups", [
    *(("", groups) for groups in GROUPS), *((maker, GROUPS[1]) for maker in MAKERS if maker)])
EACH = pytest.mark.parametrize("drafter, in_flight", [("ngram", 1), ("ngram_gpu", 2), ("eagle", 1), ("eagle", 2)])


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


@pytest.mark.parametrize("mode", MODES)
@WITH_GROUPS
def test_b114_every_length_of_a_remote_prompt(model_folder, groups, mode, maker):
    """Around each border of a block. Blocks for the states of drafts are no peer's matter."""
    engine = MAKERS[maker](model_folder, windows=groups, mode=mode, blocks=400)
    for length in LENGTHS:
        hand_over(engine, f"r{length}", prompt_of(length))
        token_ids, block_ids, cached = engine.protocol.jobs[engine.attempt(f"r{length}")]
        assert len(token_ids) == length - 1, "the last token is D's"
        assert not cached and len(block_ids) == -(-len(token_ids) // BLOCK_SIZE) + groups.count(STATE)
    engine.check_answers()
    engine.check_at_rest()


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("maker, batch_tokens", [("", 16), ("", 33), ("", 512), ("ngram", 33), ("mtp", 512)])
@pytest.mark.parametrize("mode, chunks", [("align", False), ("align", True), ("none", True)])
def test_b114_every_length_of_a_job(model_folder, groups, batch_tokens, mode, chunks, checkpoints, maker):
    """P sends the state after the prompt, with D's prefix hit or without, whole or in chunks."""
    send_every_length(MAKERS[maker](model_folder, windows=groups, mode=mode, checkpoints=checkpoints, blocks=200,
                                    push_chunks=chunks, batch_tokens=batch_tokens))


@WITH_GROUPS
def test_b114_a_prefix_hit_of_every_length(model_folder, groups, maker):
    """D has the KV of the beginning, mostly without the state after it: P writes the rest, and the state."""
    hand_over_with_hits(MAKERS[maker](model_folder, windows=groups, blocks=400))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("mode", MODES)
@EACH
def test_b114_b113_drafts_after_a_state_of_a_peer(model_folder, drafter, in_flight, groups, mode):
    """Of all lengths, all numbers of them accepted, with answers over several blocks."""
    engine = drafting(model_folder, in_flight, drafter=drafter, windows=groups, mode=mode, blocks=400)
    for length in range(BLOCK_SIZE + 2, 3 * BLOCK_SIZE + 3):
        engine.add(f"r{length}", prompt_of(length), 40)
        engine.run()
        engine.prefilled(f"r{length}")
        engine.run()
    engine.check_answers()
    engine.check_at_rest()
    assert 0.3 * engine.counts["drafts"] < engine.counts["accepted"] < 0.7 * engine.counts["drafts"]


@pytest.mark.parametrize("mode", MODES)
def test_b20_b113_b114_a_prompt_that_leaves_no_block_for_states_of_drafts_is_computed_here(model_folder, mode):
    """Or V1 would wait for blocks for ever. `here`: by how many blocks an engine has, which do for the prompt alone."""
    here = {}
    for blocks in range(8, 32):
        make = functools.partial(MAKERS["ngram"], model_folder, windows=GROUPS[1], mode=mode, blocks=blocks)
        if not _ends(make(threshold=10**6)):
            assert not here
            continue
        engine = make()
        assert _ends(engine), f"no end with {blocks} blocks"
        engine.check_answers()
        engine.check_at_rest()
        here[blocks] = not engine.protocol.jobs
    assert list(here.values()) == [mode == "none", *[False] * (len(here) - 1)], "align keeps a block more for later"


@pytest.mark.parametrize("mode", MODES)
def test_b20_b113_b114_a_job_that_leaves_no_block_for_states_of_drafts_is_refused(model_folder, mode):
    """Or it would wait at P for ever."""
    refused = []
    for blocks in range(8, 32):
        engine = MAKERS["ngram"](model_folder, windows=GROUPS[1], mode=mode, blocks=blocks, role="kv_producer")
        attempt = engine.job(prompt_of(4 * BLOCK_SIZE))
        for _ in range(40):
            engine.turn()
        refused.append(("failed", attempt) in engine.protocol.calls)
        assert refused[-1] or [write for write in engine.last_writes() if write.key == str(attempt)], f"{blocks} blocks"
    assert refused == sorted(refused, reverse=True) and {*refused} == {True, False}


def _ends(engine: DraftingStateEngine) -> bool:
    """Whether a prompt of some blocks does, with a peer's help where it is asked for."""
    engine.add("a", prompt_of(4 * BLOCK_SIZE + 1), 2)
    for _ in range(100):
        if engine.has_work():
            engine.turn()
        elif engine.binding.remote_prefills.parked_ids():
            engine.prefilled("a")
    return "a" in engine.ended


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


def settings(seed: int, in_flight: int, drafter: str = ""):
    """Of an engine that a history is played on."""
    drawn, steps = history(seed)
    mode = MODES[seed // 2 % 4 == 3]
    blocks = drawn.blocks + (10 if seed % 4 else 34) + (8 if drafter else 0)
    return drawn._replace(in_flight=in_flight, stages=simulated.STAGES, windows=GROUPS[seed % len(GROUPS)],
                          states=mode, checkpoints=seed // 10 % 2, caching=mode != "none", reads="never",
                          drafter=drafter, blocks=blocks), steps


def first_failure(folder, in_flight: int, histories: int, drafter: str = "") -> str:
    for seed in range(histories):
        setting, steps = settings(seed, in_flight, drafter)
        if found := failure(folder, setting, steps):
            return "\n".join(map(str, (f"seed {seed}: {found}", setting, *shrink(folder, setting, steps))))
    return ""


@pytest.mark.search
def test_b114_b20_b34_any_order(model_folder, in_flight):
    assert not first_failure(model_folder, in_flight, HISTORIES)


@pytest.mark.search
@EACH
def test_b114_b113_b20_b34_any_order_with_a_drafter(model_folder, drafter, in_flight):
    assert not first_failure(model_folder, in_flight, HISTORIES, drafter)


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


def states_at(monkeypatch, place):
    """Those of another entry of the table, by where the right one is."""
    pick = BlockRows.pick

    def mistaken(rows, tables, tokens, cached):
        right = (tokens - 1) // (rows.state_tokens or 1)
        tables = [table if not window else [*table[:right], table[place(table, right)], *table[right + 1:]]
                  for window, table in zip(rows.windows, tables, strict=True)]
        return pick(rows, tables, tokens, cached)

    monkeypatch.setattr(BlockRows, "pick", mistaken)


def the_first_state_of_a_draft(monkeypatch):
    states_at(monkeypatch, lambda table, right: right + 1)


def the_last_block_of_the_table(monkeypatch):
    states_at(monkeypatch, lambda table, right: -1)


def the_block_before(monkeypatch):
    states_at(monkeypatch, lambda table, right: right - 1)


@pytest.mark.parametrize("defect", [whole_prompts, jobs_go_on_after_their_prompt, the_first_state_of_a_draft,
                                    the_last_block_of_the_table, the_block_before])
@EACH
def test_b114_b113_the_search_finds_planted_defects_with_a_drafter(model_folder, drafter, in_flight, defect,
                                                                   monkeypatch):
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_states.shrink", lambda *history: ())
    assert first_failure(model_folder, in_flight, MOST, drafter)


def next_token_left_to_the_model(monkeypatch):
    """P samples it, as without a drafter."""
    monkeypatch.setattr("vllm_pd.v1.decode.ParkedRequests._next_token", lambda prefills, request: None)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b114_b113_a_drafter_reads_the_entry_of_the_last_token_before(model_folder, in_flight, monkeypatch):
    next_token_left_to_the_model(monkeypatch)
    engine = drafting(model_folder, in_flight, drafter="eagle", windows=(0, STATE), blocks=400)
    with pytest.raises(WrongDraft, match="position 49 is read"):
        hand_over(engine, "a", prompt_of(51))
