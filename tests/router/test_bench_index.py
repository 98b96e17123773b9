# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab/bench_index.py` does what it says; how fast is not for a test to say."""
import argparse

import bench_index as bench

ARGS = argparse.Namespace(blocks=600, prompt_blocks=12, workers=3, rounds=2, lookups=10)


def test_the_events_are_whole_chains_and_the_prompts_share():
    events, prompts = bench.work(600, 4, 12, 3, 0)
    known: dict[int, set[int]] = {worker: set() for worker in range(3)}
    for event in events:
        assert event.parent is None or event.parent in known[event.worker]
        assert len(event.token_ids) == len(event.hashes) * bench.BLOCK_SIZE and len(event.hashes) <= 4
        assert not known[event.worker].intersection(event.hashes)
        known[event.worker].update(event.hashes)
    assert sum(map(len, known.values())) >= 600
    assert known[0] & known[1]
    ours = bench.Ours()
    ours.stored(events)
    assert len(ours.looked_up(prompts)[-1]) >= 1
    assert max(found[max(found, key=found.get)] for found in ours.looked_up(prompts)) == 12
    assert bench.same([{"w1": 2}, {"w0": 1}], [{(1, 0): 2}, {(0, 0): 2}]) == 1


def test_a_round_measures_everything():
    report = bench.rounds(ARGS, [bench.Ours], 4)
    figures = report["blocks_per_s"]["vllm-pd"]
    assert set(figures) == {"stored", "looked up", "matched", "removed", "wire"} and report["agree"] == []
    assert all(figure["low"] <= figure["median"] <= figure["high"] for figure in figures.values())


def test_look_ups_with_windows_are_measured():
    assert bench.windows(ARGS).keys() == {"none", "at the end", "nowhere"}


def test_memory_is_that_of_a_fresh_process():
    args = argparse.Namespace(memory_blocks=24_000, workers=2, prompt_blocks=12, theirs=None)
    assert bench.memory(args, bench.Ours, shared=True) > 10_000  # bytes per 1,000 blocks; less can't hold them
