# SPDX-License-Identifier: Apache-2.0
"""The simulated fleets of tests/proof, with V1's real schedulers and the whole binding: messages lost, doubled, late;
engines killed, restarted, stopped, continued; clients that leave; writes that fail (B20-B23, B25-B29, B31, B34).

A seed is a history. VLLM_PD_SEEDS=N runs N / 12 of them, as for V0's scheduler.
"""
import collections
import os
from dataclasses import replace

import pytest
from explorer import broken
from simulation.fleet import Fleet, Plan
from simulation.kernel import Faults
from simulation.storms import AUTO, BOTH, SPLIT, counted_decisions, storm

from tests.v1.fleet_engine import V1FleetEngine, virtual_time
from vllm_pd.decisions.policy import Reason

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "480")) // 12


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


def run(folder, in_flight: int, seed: int, plan: Plan, *, blocks: int, caching: bool = True, chunk: int = 64,
        drafter: str = "", pushed: collections.Counter | None = None, ended: collections.Counter | None = None):
    """`chunk`: tokens of a step. Where that is less than 64, prompts leave as they are computed (B100); `pushed` counts
    such writes. `drafter`: the method of all engines' drafters. `ended` counts how requests end."""
    plan = replace(plan, settings={**plan.settings, "push_chunks": chunk < 64})
    fleet = Fleet(seed, plan, lambda node, post: V1FleetEngine(
        node, post, folder=folder, in_flight=in_flight, blocks=blocks, caching=caching, chunk=chunk, drafter=drafter))
    with virtual_time(fleet.kernel):
        outcome = fleet.run()
    if pushed is not None:
        for engine in fleet.engines.values():
            pushed.update(engine.landed)
    if ended is not None:
        for engine in fleet.engines.values():
            ended.update(engine.simulated.ended.values())
    return outcome


def test_b20_b34_storms(model_folder, in_flight, capsys):
    steps: collections.Counter = collections.Counter()
    pushed: collections.Counter = collections.Counter()
    done = requests = 0
    for seed in range(SEEDS):
        outcome = run(model_folder, in_flight, seed, storm(seed), blocks=(24, 40)[seed % 2], caching=seed % 3 != 0,
                      chunk=8 if seed % 4 == 1 else 64, pushed=pushed)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        steps.update(outcome.steps)
        requests += outcome.requests
        done += outcome.done_remotely
    with capsys.disabled():
        print(f"\n  {in_flight} in flight: {SEEDS} runs, {requests:,} requests, {done:,} remote prefills, "
              f"{dict(steps)}, chunks {pushed[False]:,}", end="")
    assert done >= 10 * SEEDS and pushed[False] >= SEEDS, "few chunks were sent"


def test_b20_b34_storms_with_auto(model_folder, in_flight):
    reasons: collections.Counter = collections.Counter()
    for seed in range(SEEDS // 4):
        plan = storm(seed)
        with counted_decisions(reasons):
            outcome = run(model_folder, in_flight, seed, replace(plan, settings={**plan.settings, **AUTO}), blocks=24,
                          chunk=8 if seed % 4 == 1 else 64)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
    assert {Reason.TTFT, Reason.ITL} <= {reason for _, reason in reasons}, reasons
    assert {True, False} == {remote for remote, reason in reasons if reason is Reason.TTFT}, reasons


@pytest.mark.parametrize("rule", ["bounded", "refuse"])
def test_b20_b34_storms_in_which_prompts_are_refused(model_folder, in_flight, rule):
    """Each request ends once, by an answer or an error, and nothing is held at the end."""
    ended: collections.Counter = collections.Counter()
    for seed in range(SEEDS // 4):
        plan = storm(seed)
        settings = {"fallback": rule, "fallback_tokens": 1, "fallback_wait_s": (0.0, 0.5, 4.0)[seed % 3]}
        outcome = run(model_folder, in_flight, seed, replace(plan, settings={**plan.settings, **settings}), blocks=24,
                      chunk=8 if seed % 2 == 1 else 64, ended=ended)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
    assert ended["length"] > 20 * SEEDS // 4
    # A step takes no time here: with a bound only those are refused that must not wait.
    assert ended["error"] > (SEEDS // 4 if rule == "refuse" else 0), ended


def test_b34_a_seed_is_a_history(model_folder, in_flight):
    one, two = (run(model_folder, in_flight, 7, storm(7), blocks=24) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("roles", [BOTH, SPLIT], ids=["two of both roles", "split"])
def test_b31_nearly_full_engines_make_progress(model_folder, in_flight, roles):
    plan = Plan(roles=roles, requests=150, load_s=3.0, settings={"max_parked_fraction": 0.5}, faults=Faults())
    outcome = run(model_folder, in_flight, 11, plan, blocks=20)
    assert not outcome.broken
    assert outcome.requests == 150 and outcome.done_remotely > 10
    assert outcome.seconds < 120.0


@pytest.mark.parametrize("variant, first", [
    ({"decode_type": broken.NoFence}, 0), ({"decode_type": broken.ReuseByTime}, 110),
    ({"prefill_type": broken.StopsTooSoon}, 0)], ids=["no fence", "by time", "too soon"])
def test_b34_a_broken_protocol_is_found(model_folder, variant, first):
    """What these fleets would show, if the protocol were wrong. `first`: the seeds before have not shown it."""
    for seed in (*range(first, 400), *range(first)):
        if run(model_folder, 1 + seed % 2, seed, storm(seed, **variant), blocks=24).broken:
            return
    raise AssertionError("no seed up to 400 shows it")
