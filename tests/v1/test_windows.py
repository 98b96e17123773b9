# SPDX-License-Identifier: Apache-2.0
"""B114: layers with a sliding window in groups of blocks of their own: only what the next token reads goes from a
prefill engine to a decode engine, and every answer is that of one engine (tests/v1/windows.py)."""
import collections

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from tests.v1 import simulated
from tests.v1.drafting import count_together, with_drafter
from tests.v1.simulated import BLOCK_SIZE, VOCAB, Engine, WrongRead, answer
from tests.v1.walk import failure, history, shrink
from tests.v1.windows import DraftingWindowEngine, WindowEngine
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.v1.decode import ParkedRequests
from vllm_pd.v1.prefill import InternalRequests

WINDOW = 40
GROUPS = [(0, WINDOW), (WINDOW, 0, 23), (0, 0, BLOCK_SIZE)]
# With blocks of other sizes: as of compressed attention (DeepSeek-V4), with fewer tokens or more than the leading group
# has, and beside a second group with full attention.
MIXED = [((24, 0, 8, 32), (8, BLOCK_SIZE, 4, 8)), ((0, WINDOW), (BLOCK_SIZE, 32)), ((0, 24, 0), (BLOCK_SIZE, 8, 32))]
SIZED = [(windows, ()) for windows in GROUPS] + MIXED
HISTORIES = 100
EQUAL_BLOCKS = 1 / 200  # of what drafters read: more than stock V1 has of them, see tests/v1/drafting.py
MOST = 400  # histories until a planted defect is found
LENGTHS = range(BLOCK_SIZE + 2, 141)
DRAFTERS = [((0, WINDOW), 0), ((WINDOW, 0, 23), 1), ((0, WINDOW), 1)]  # groups, and that of a drafter's layers


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


def prompt_of(length: int) -> list[int]:
    return [(7 * length + 3 * at) % 4000 + 1 for at in range(length)]


@pytest.fixture
def counts(monkeypatch) -> collections.Counter:
    return count_together(monkeypatch, DraftingWindowEngine)


def drafting(folder, **more) -> DraftingWindowEngine:
    """An engine with an EAGLE head; the rest as of DraftingWindowEngine."""
    config = with_drafter(Engine(folder).config, folder, "eagle")
    config.scheduler_config.max_num_batched_tokens = more.get("batch_tokens", 128)
    config.cache_config.enable_prefix_caching = more.get("caching", True)
    return DraftingWindowEngine(folder, config=config, **more)


def hand_over(engine: WindowEngine, name: str, prompt: list[int]) -> None:
    """From its coming to its end."""
    engine.add(name, prompt, 4)
    engine.run()
    engine.prefilled(name)
    engine.run()
    assert engine.outputs[name] == answer(prompt, 4)


def send_every_length(engine: WindowEngine) -> None:
    """Jobs, one after the other, of which D has more or less in its cache."""
    for number, length in enumerate(LENGTHS):
        prompt = prompt_of(length)
        cached = number % (-(-length // BLOCK_SIZE))
        attempt = engine.job(prompt, cached, number)
        engine.run()
        engine.check_sent(attempt, prompt)
        engine.transfer.end(str(attempt))
        engine.run()
    assert engine.sent_rows > len(LENGTHS) * len(engine.windows)
    engine.check_at_rest()


def hand_over_with_hits(engine: WindowEngine, kinds: int = 3, least: int = 10) -> None:
    """Prompts whose beginning was a prompt before. At `least` so many hit, with so many `kinds` of lengths."""
    hits = []
    for length in range(3 * BLOCK_SIZE, 140, 5):
        whole = [length] * 3 + prompt_of(length)
        hand_over(engine, f"first {length}", whole[:length // 2])
        hand_over(engine, f"second {length}", whole)
        hits.append(engine.protocol.jobs[engine.attempt(f"second {length}")][2])
    assert len(set(hits)) >= kinds and sum(map(bool, hits)) >= least, "others were evicted"
    engine.check_at_rest()


@pytest.mark.parametrize("windows, sizes", SIZED)
def test_b114_every_length_of_a_remote_prompt(model_folder, windows, sizes):
    """Around each border of a block and of a window."""
    engine = WindowEngine(model_folder, windows=windows, sizes=sizes, blocks=160, caching=False)
    for length in LENGTHS:
        hand_over(engine, f"r{length}", prompt_of(length))
        token_ids, block_ids, _ = engine.protocol.jobs[engine.attempt(f"r{length}")]
        assert len(token_ids) == length - 1, "the last token is D's"
        sized = list(zip(windows, engine.sizes, strict=True))
        most = sum(-(-(window - 1) // size) + 1 for window, size in sized if window)
        full = sum(-(-len(token_ids) // size) for window, size in sized if not window)
        assert full < len(block_ids) <= full + most, "of a window group only its end"
    engine.check_answers()
    engine.check_at_rest()


def test_b114_a_whole_prompt_would_miss_a_key_at_one_of_so_many_lengths(model_folder, monkeypatch):
    """Why the last token is not taken from a peer: V1 lays the window's blocks out for the token after it. A connector
    that does take it, as upstream's NixlConnector, reads a key from no block where that token's window begins a new
    one."""
    monkeypatch.setattr(BlockRows, "own_tokens", 0)
    wrong = []
    for length in LENGTHS:
        engine = WindowEngine(model_folder, windows=(0, WINDOW), blocks=96, caching=False)
        try:
            hand_over(engine, "r", prompt_of(length))
        except WrongRead:
            wrong.append(length)
    assert wrong == [length for length in LENGTHS
                     if length >= WINDOW and (length - WINDOW + 1) % BLOCK_SIZE == 0 and length > WINDOW]


@pytest.mark.parametrize("windows, sizes", SIZED)
@pytest.mark.parametrize("batch_tokens", [16, 33, 512])
@pytest.mark.parametrize("chunks", [False, True])
def test_b114_every_length_of_a_job(model_folder, windows, sizes, batch_tokens, chunks):
    """P sends what the next token reads, with D's prefix hit or without, whole or in chunks."""
    send_every_length(WindowEngine(model_folder, windows=windows, sizes=sizes, blocks=224, push_chunks=chunks,
                                   batch_tokens=batch_tokens))


@pytest.mark.parametrize("windows, sizes", SIZED)
def test_b114_a_prefix_hit_of_every_length(model_folder, windows, sizes):
    """D has the beginning: P writes the rest, and of a window what lies behind the hit."""
    engine = WindowEngine(model_folder, windows=windows, sizes=sizes, blocks=512)
    # Blocks of a window that end where a hit may end come only with prompts that end there, or near.
    hand_over_with_hits(engine, *((2, 2) if sizes else ()))


@pytest.mark.parametrize("length", [3 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE])
def test_b114_b20_requests_that_need_a_block_more_when_they_are_resumed(model_folder, length):
    """D's own token begins a block, of each group, and the parked prompts have all there are: every request ends."""
    for windows, sizes in SIZED:
        for blocks in range(24, 60, 3) if not sizes else range(60, 100, 4):
            engine = WindowEngine(model_folder, windows=windows, sizes=sizes, blocks=blocks, batch_tokens=64,
                                  caching=False)
            for number in range(6):
                engine.add(f"r{number}", [number + 1] * length, 6)
            for _ in range(6):
                engine.run()
                for name in engine.binding.remote_prefills.parked_ids():
                    engine.prefilled(name)
            engine.run()
            engine.check_answers()
            engine.check_at_rest()


@pytest.mark.parametrize("windows, sizes", [SIZED[0], *MIXED])
def test_b114_nobody_waits_for_a_hit_that_will_not_be(model_folder, windows, sizes):
    """Two equal prompts at a time. With blocks of several sizes what comes for the first is rarely a hit."""
    engine = WindowEngine(model_folder, windows=windows, sizes=sizes, blocks=256)
    for name in ("first", "second"):
        engine.add(name, prompt_of(100), 4)
    engine.run()
    assert len(engine.protocol.jobs) == (2 if sizes else 1)
    for _ in range(2):
        for name in engine.binding.remote_prefills.parked_ids():
            engine.prefilled(name)
        engine.run()
    engine.check_answers()
    engine.check_at_rest()


def settings(seed: int, in_flight: int, windows: tuple[int, ...], sizes: tuple[int, ...], drafter: str):
    """Of an engine that a history is played on."""
    drawn, steps = history(seed)
    more = (20 if seed % 4 else 44) + (60 if sizes else 0)
    return drawn._replace(in_flight=in_flight, stages=simulated.STAGES, windows=windows, sizes=sizes, reads="never",
                          drafter=drafter, blocks=drawn.blocks + more), steps


def first_failure(folder, in_flight: int, histories: int, drafter: str = "", groups=tuple(SIZED[:3])) -> str:
    for seed in range(histories):
        setting, steps = settings(seed, in_flight, *groups[seed % len(groups)], drafter)
        if found := failure(folder, setting, steps):
            return "\n".join(map(str, (f"seed {seed}: {found}", setting, *shrink(folder, setting, steps))))
    return ""


@pytest.mark.parametrize("windows, drafters", DRAFTERS)
@pytest.mark.parametrize("is_flagged", [False, True])
def test_b113_b114_a_drafter_of_every_length(model_folder, windows, drafters, is_flagged, counts):
    """Its KV of each token that is sent, and that it reads after a hand-over, was made with the prompt's own next
    token, with a prefix hit or without."""
    def engine(**more):
        return drafting(model_folder, windows=windows, drafters=drafters, is_flagged=is_flagged, **more)

    send_every_length(engine(blocks=120, role="kv_both", push_chunks=True, batch_tokens=33))
    hand_over_with_hits(engine(blocks=256), 2, 2)  # V1 drops a block for each kind of group
    every = engine(blocks=96, caching=False)
    for length in LENGTHS:
        hand_over(every, f"r{length}", prompt_of(length))
    every.check_at_rest()
    assert counts["sent"] > 1000 and counts["read"] > 1000 and not counts["read of an equal block"]


@pytest.mark.parametrize("token", [VOCAB - 1, VOCAB])
def test_b80_b113_a_peer_s_next_token_is_one_of_the_vocabulary(model_folder, token):
    """V1 would use any other as an index."""
    engine = drafting(model_folder, windows=(0, WINDOW), role="kv_producer")
    attempt = engine.job(prompt_of(100))
    engine.protocol.events.append(msgspec.structs.replace(engine.protocol.events.pop(), next_token=token))
    engine.run()
    assert (("failed", attempt) in engine.protocol.calls) is (token >= VOCAB)


@pytest.mark.parametrize("drafter, has_one", [("", False), ("ngram", False), ("eagle", True)])
def test_b113_the_next_token_is_said_only_where_a_drafter_needs_it(model_folder, drafter, has_one):
    prompt = prompt_of(100)
    for windows in ((0, WINDOW), (0, )):
        config = Engine(model_folder).config
        config = with_drafter(config, model_folder, drafter) if drafter else config
        make = DraftingWindowEngine if drafter else WindowEngine
        engine = make(model_folder, windows=windows, config=config)
        engine.add("r", prompt, 4)
        engine.run()
        said = engine.protocol.next_tokens[engine.attempt("r")]
        assert said == (prompt[-1] if has_one and len(windows) > 1 else None)


@pytest.mark.search
@pytest.mark.parametrize("drafter", ["", "ngram", "eagle"])
def test_b114_b20_b34_any_order(model_folder, in_flight, drafter, counts):
    """With a drafter, too: what it guesses wrongly goes back behind a window's beginning, whose blocks are free."""
    assert not first_failure(model_folder, in_flight, HISTORIES, drafter)
    if drafter == "eagle":
        assert counts["sent"] > 40 * HISTORIES and counts["read"] > 400 * HISTORIES
        assert counts["read of an equal block"] < EQUAL_BLOCKS * counts["read"]


@pytest.mark.search
@pytest.mark.parametrize("drafter", ["", "ngram"])
def test_b114_b20_b34_groups_with_blocks_of_other_sizes(model_folder, in_flight, drafter):
    assert not first_failure(model_folder, in_flight, HISTORIES, drafter, MIXED)


def hit_in_blocks_of_the_first_group(monkeypatch):
    entries = BlockRows._entries

    def mistaken(rows, tokens, cached):
        found = entries(rows, tokens, cached)
        return found[:1] + [(group, range(max(min(cached, each.stop), each.start), each.stop))
                            for group, each in found[1:]]

    monkeypatch.setattr(BlockRows, "_entries", mistaken)


def one_size_for_all(monkeypatch):
    monkeypatch.setattr(BlockRows, "size", lambda rows, group: rows.block_size)


@pytest.mark.parametrize("defect", [hit_in_blocks_of_the_first_group, one_size_for_all])
def test_b114_the_search_finds_sizes_that_are_not_heeded(model_folder, in_flight, defect, monkeypatch):
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_windows.shrink", lambda *history: ())
    assert first_failure(model_folder, in_flight, MOST, groups=MIXED)


def whole_prompts(monkeypatch):
    monkeypatch.setattr(BlockRows, "own_tokens", 0)


def windows_a_block_later(monkeypatch):
    monkeypatch.setattr("vllm_pd.protocol.rows.first_needed",
                        lambda window, tokens: max(0, tokens - window + 1 + BLOCK_SIZE) if window else 0)


def chunks_of_another_group(monkeypatch):
    """Not of the one whose rows come first."""
    step_done = InternalRequests.step_done

    def mistaken(jobs, step):
        jobs._scheduler.kv_cache_manager, manager = _Swapped(jobs), jobs._scheduler.kv_cache_manager
        try:
            return step_done(jobs, step)
        finally:
            jobs._scheduler.kv_cache_manager = manager

    monkeypatch.setattr(InternalRequests, "step_done", mistaken)


class _Swapped:
    """A manager whose first two tables have changed places."""

    def __init__(self, jobs: InternalRequests) -> None:
        self._manager, self._lead = jobs._scheduler.kv_cache_manager, jobs._rows.lead

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        tables = list(self._manager.get_block_ids(request_id))
        other = int(self._lead == 0)
        tables[self._lead], tables[other] = tables[other], tables[self._lead]
        return tables


def hit_ignored_by_windows(monkeypatch):
    pick = BlockRows.pick
    monkeypatch.setattr(BlockRows, "pick", lambda rows, tables, tokens, cached: pick(rows, tables, tokens, 0))


def only_the_first_group_is_fenced(monkeypatch):
    allocated = ParkedRequests.allocated

    def without_windows(prefills, request, tables, remote_tokens):
        hold = prefills._fence.hold
        lead = set(tables[prefills._rows.lead])
        prefills._fence.hold = lambda attempt, ids: hold(attempt, [one for one in ids if one in lead])
        try:
            allocated(prefills, request, tables, remote_tokens)
        finally:
            prefills._fence.hold = hold

    monkeypatch.setattr(ParkedRequests, "allocated", without_windows)


def p_samples_what_it_likes(monkeypatch):
    """As if it had no sampling parameter for it."""
    def without(**fields):
        return SamplingParams(**{**fields, "allowed_token_ids": None})

    monkeypatch.setattr("vllm_pd.v1.prefill.SamplingParams", without)


def d_says_no_next_token(monkeypatch):
    monkeypatch.setattr(ParkedRequests, "_next_token", lambda prefills, request: None)


@pytest.mark.parametrize("defect", [p_samples_what_it_likes, d_says_no_next_token])
def test_b113_the_search_finds_a_drafter_that_reads_another_next_token(model_folder, in_flight, defect, monkeypatch):
    """Every answer is right then."""
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_windows.shrink", lambda *history: ())
    assert "the drafter's entry of position" in first_failure(model_folder, in_flight, MOST, "eagle")


@pytest.mark.parametrize("defect", [whole_prompts, windows_a_block_later, chunks_of_another_group,
                                    hit_ignored_by_windows, only_the_first_group_is_fenced])
def test_b114_the_search_finds_planted_defects(model_folder, in_flight, defect, monkeypatch):
    defect(monkeypatch)
    monkeypatch.setattr("tests.v1.test_windows.shrink", lambda *history: ())
    assert first_failure(model_folder, in_flight, MOST)
