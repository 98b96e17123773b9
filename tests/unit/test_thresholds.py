# SPDX-License-Identifier: Apache-2.0
"""The simulation behind scripts/lab/compare_thresholds.py: by hand where it can be, and the same for the same seed."""
import dataclasses

import pytest
from _thresholds import fleet
from _thresholds.compare import CPU, FIXED, arms, compare, prompt_of, simulate, verdicts
from _thresholds.engine import BLOCK_TOKENS, EngineSpeed, SimClock, SimEngine, SimRequest

from vllm_pd.bench.serve.settings import LoadShape, ServeLoad
from vllm_pd.bench.serve.traffic import points

SPEED = EngineSpeed(step_s=0.1, decode_s=0.01, token_s=0.001, batch_tokens=100, moved_per_s=1e4)
SMALL = dataclasses.replace(CPU, loads=(LoadShape(ServeLoad.RATE, duration_s=20, rates=(1.0, )), ))


def run(*requests):
    """When each token of each came, on one engine, all sent at once."""
    clock, came = SimClock(), {name: [] for name, *_ in requests}
    engine = SimEngine(clock, SPEED)
    for name, tokens, hashes, answer_tokens in requests:
        engine.add(SimRequest(name, tokens, hashes, answer_tokens, lambda name=name: came[name].append(clock.now)))
    clock.run(lambda: all(len(came[name]) == answer_tokens for name, _, _, answer_tokens in requests))
    return came


def test_a_prompt_takes_its_chunks_and_a_token_a_step():
    assert run(("a", 250, (), 3))["a"] == pytest.approx([0.2 + 0.2 + 0.15, 0.55 + 0.11, 0.66 + 0.11])


def test_prompts_share_the_steps_in_their_order():
    came = run(("a", 60, (), 2), ("b", 90, (), 1))
    assert came["a"][0] == pytest.approx(0.2), "60 tokens of a, 40 of b"
    assert came["a"][1] == came["b"][0] == pytest.approx(0.2 + 0.1 + 0.01 + 0.05)


def test_a_prefix_that_was_computed_is_a_hit():
    clock, came = SimClock(), []
    engine = SimEngine(clock, SPEED)
    for _ in range(2):
        engine.add(SimRequest("a", 70, (1, 2, 3, 4), 1, lambda: came.append(clock.now)))
        clock.run(lambda: not engine.running and not engine.waiting)
    assert came == pytest.approx([0.17, 0.17 + 0.1 + 0.001 * (70 - 4 * BLOCK_TOKENS)])


def test_prompts_share_the_blocks_of_their_common_beginning():
    tokens, hashes = prompt_of("word " * 100)
    more_tokens, more = prompt_of("word " * 100 + "another " * 100)
    assert tokens == 114 and more_tokens == 228 and len(more) == 228 // BLOCK_TOKENS
    assert more[:len(hashes)] == hashes and more[len(hashes)] not in hashes


def test_the_thresholds_do_what_they_say():
    point = points(SMALL.loads[0], 0)[0]
    found = {name: simulate(SMALL, point, policy) for name, policy in arms(SMALL).items()}
    assert set(found["0"]["decisions"]) == {"remote, length"}
    assert set(found["infinite"]["decisions"]) == {"local, threshold"}
    assert {"remote, length", "local, threshold"} == set(found["200"]["decisions"])
    assert any("ttft" in name for name in found["auto"]["decisions"])
    for one in found.values():
        assert one["unfinished"] == 0 and one["requests"] == found["0"]["requests"] > 10
        assert sum(one["decisions"].values()) == one["requests"]
    assert found["0"]["itl_p99"] < found["infinite"]["itl_p99"]


def test_the_order_of_jobs_is_expected_as_it_is(monkeypatch):
    """Where short and long prompts are handed over: what is expected of them is far from first in, first out."""
    machine = dataclasses.replace(CPU, loads=(LoadShape(ServeLoad.RATE, rates=(2.0, )), ))
    point, policy = points(machine.loads[0], 0)[0], arms(machine)["auto, ITL 150 ms"]
    ordered = simulate(machine, point, policy)["expected_error"]
    measures = fleet.DecodeMeasures
    monkeypatch.setattr(fleet, "DecodeMeasures", lambda batch_tokens, speed, order: measures(batch_tokens, speed))
    assert ordered < simulate(machine, point, policy)["expected_error"] / 3


def test_a_prefill_engine_computes_what_is_due_first():
    clock, came = SimClock(), []
    engine = SimEngine(clock, SPEED, step_tokens=lambda: 50)
    for name, tokens, due_s in (("long", 200, 9.0), ("short", 60, 1.0)):
        engine.add(SimRequest(name, tokens, (), 1, lambda name=name: came.append((name, round(clock.now, 3))),
                              due_s=due_s))
    clock.run(lambda: len(came) == 2)
    assert came[0] == ("short", 2 * 0.15), "two steps of 50 tokens, the second with 40 of the long one"
    assert came[1][0] == "long"


def test_the_same_again():
    assert compare(SMALL, 1) == compare(SMALL, 1)


def test_the_best_fixed_one_keeps_the_itl():
    def figures(ttft, itl):
        return {"ttft_p50": ttft, "itl_p99": itl}

    loads = {"load": {"0": figures(400, 40), "200": figures(100, 100), "1000": figures(80, 104), "infinite":
                      figures(10, 900), "auto": figures(90, 100)}}
    found = verdicts(loads, "auto")
    assert found["by_load"]["load"] == {"best": "1000", "ratio": round(90 / 80, 3)}
    assert set(found["overall"]) == set(FIXED) and found["overall"]["infinite"] == {"ttft_p50": 0.111, "itl_p99": 9.0}
