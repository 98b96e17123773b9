# SPDX-License-Identifier: Apache-2.0
"""Whole fleets under a virtual clock and seeded faults (`simulation`): letters lost, doubled, late, overtaken; engines
killed, restarted, stopped, continued; brokers restarted; clients that leave; writes that fail. Between machines
also: cuts, engines that can't be reached and live, writes that fail and land later, agents that can't be made.

After each step what is read is looked at, and where a write lands; after the storm all must end (B20). A seed is a
history: to see one again, `Fleet(seed, storm(seed)).run()`. VLLM_PD_SEEDS=N makes that many more runs.
"""
import collections
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
from explorer import broken
from simulation.agents import TransferAgents
from simulation.engine import LightEngine
from simulation.fleet import Fleet, Outcome, Plan
from simulation.kernel import Faults
from simulation.storms import AUTO, BOTH, SPLIT, counted_decisions, storm, storm_between_machines

from vllm_pd.decisions.policy import Reason

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "1000"))
SCHEDULED_SEEDS = SEEDS // 12
MACHINES_SEEDS = SEEDS // 8


def life_cycle_steps(steps: collections.Counter) -> int:
    """Everything that happened but the expiry of timers."""
    return sum(steps.values()) - steps["timer"]


@pytest.mark.search
def test_b34_a_million_steps_of_the_life_cycle(capsys: pytest.CaptureFixture):
    """B20-B23, B25-B29, B34: no wrong KV is read, no write lands outside its fence, each request ends once, and when
    all has ended nothing is held."""
    steps: collections.Counter = collections.Counter()
    attempts: collections.Counter = collections.Counter()
    requests = 0
    for seed in range(SEEDS):
        outcome = Fleet(seed, storm(seed)).run()
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        steps.update(outcome.steps)
        attempts.update(outcome.attempts)
        requests += outcome.requests
    with capsys.disabled():
        print(f"\n  {SEEDS} runs, {requests:,} requests, {life_cycle_steps(steps):,} life-cycle steps "
              f"{dict(steps)}, attempts {dict(attempts)}", end="")
    assert life_cycle_steps(steps) >= 1000 * SEEDS, "less has happened than there should have"
    assert min(steps[kind] for kind in ("kill", "stop", "broker ends", "abort", "restart")) > SEEDS
    assert min(attempts[end] for end in ("done", "failed", "cancelled", "expired")) > SEEDS // 4


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_b34_a_seed_is_a_history(seed: int):
    """B34: the same happens again, at the same moments."""
    one, two = (Fleet(seed, storm(seed)).run() for _ in range(2))
    assert one == two and one.trace != Fleet(seed + 5, storm(seed + 5)).run().trace


class SendsEarly(LightEngine):
    """A prefill engine that sends blocks which it computes with its next step."""
    sends_early = True


class AnswersEarly(LightEngine):
    """A prefill engine for which a job is over although a write is under way."""
    writes_type = broken.AnswersTooSoon


VARIANTS = {
    "no fence": {"decode_type": broken.NoFence},
    "reuse by time": {"decode_type": broken.ReuseByTime},
    "granted to all": {"decode_type": broken.GrantsToAll},
    "stopped before the writes have ended": {"prefill_type": broken.StopsTooSoon},
    "a chunk before it is computed": {"engine_type": SendsEarly},
    "over while a chunk is under way": {"engine_type": AnswersEarly},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_b34_a_broken_protocol_is_found_and_its_seed_replays(variant: str, capsys: pytest.CaptureFixture):
    """B34: each variant does harm under some seed, the same harm whenever that seed is run; the real protocol none."""
    seed, outcome = _first_broken(VARIANTS[variant])
    with capsys.disabled():
        print(f"\n  {variant}: seed {seed}: {outcome.broken}", end="")
    assert Fleet(seed, storm(seed, **VARIANTS[variant])).run() == outcome
    assert not Fleet(seed, storm(seed)).run().broken


def _first_broken(variant: dict, plan: Callable[..., Plan] = storm) -> tuple[int, Outcome]:
    for seed in range(400):
        outcome = Fleet(seed, plan(seed, **variant)).run()
        if outcome.broken:
            return seed, outcome
    raise AssertionError("no seed up to 400 shows it")


class DestroysNothing(TransferAgents):
    """The old agents count as destroyed, and peers reach this engine through them."""

    def destroy(self):
        pass


class KeepsOldAgents(LightEngine):
    """An engine with such agents."""
    agents_type = DestroysNothing


VARIANTS_BETWEEN_MACHINES = {
    "a P that can't be reached is taken for dead": {"decode_type": broken.TakesSeemingForDeath},
    "the new agents taken for the end of the old ones": {"generations_type": broken.FencesWithTheRenewal},
    "agents that are not destroyed": {"engine_type": KeepsOldAgents},
}


class TestBetweenMachines:
    """Engines on two or three machines."""

    @pytest.fixture(autouse=True)
    def quiet(self, caplog):
        caplog.set_level("CRITICAL", logger="vllm.pd")

    @pytest.mark.search
    def test_b34_b105_b106_storms(self, capsys: pytest.CaptureFixture):
        """B20-B23, B25-B29, B34, B105, B106: as on one machine, where nobody's death is a fact."""
        steps: collections.Counter = collections.Counter()
        attempts: collections.Counter = collections.Counter()
        renewals = 0
        for seed in range(MACHINES_SEEDS):
            outcome = Fleet(seed, storm_between_machines(seed)).run()
            assert not outcome.broken, f"seed {seed}: {outcome.broken}"
            steps.update(outcome.steps)
            attempts.update(outcome.attempts)
            renewals += outcome.renewals
        with capsys.disabled():
            print(f"\n  {MACHINES_SEEDS} runs, {life_cycle_steps(steps):,} life-cycle steps {dict(steps)}, {renewals} "
                  f"renewals, attempts {dict(attempts)}", end="")
        assert min(steps[kind] for kind in ("kill", "cut", "seems dead", "stop")) > MACHINES_SEEDS
        assert min(renewals, attempts["fenced_by_retiring"], steps["drift"]) > MACHINES_SEEDS // 8

    @pytest.mark.parametrize("variant", VARIANTS_BETWEEN_MACHINES)
    def test_b34_a_broken_protocol_is_found(self, variant: str, capsys: pytest.CaptureFixture):
        """B34: each variant does harm under some seed; the real protocol none."""
        seed, outcome = _first_broken(VARIANTS_BETWEEN_MACHINES[variant], storm_between_machines)
        with capsys.disabled():
            print(f"\n  {variant}: seed {seed}: {outcome.broken}", end="")
        assert not Fleet(seed, storm_between_machines(seed)).run().broken

    def test_b106_the_word_that_a_generation_has_ended_is_lost(self):
        """B106: P asks until it knows, and nothing is left of a job whose write had failed (seeds that showed it)."""
        for seed in (163, 191):
            outcome = Fleet(seed, storm_between_machines(seed)).run()
            assert not outcome.broken and outcome.seconds < 200, (seed, outcome)


class TestScheduled:
    """With vLLM's patched scheduler and the real binding of the decode engine."""

    @pytest.fixture(autouse=True)
    def quiet(self, caplog):
        caplog.set_level("CRITICAL", logger="vllm.pd")

    @staticmethod
    def run(seed: int, plan: Plan, *, blocks: int, caching: bool = True, chunk: int | None = None) -> tuple:
        """The outcome, and the most steps that a group waited between its KV's arrival and its first token."""
        if find_spec("vllm") is None:
            pytest.skip("needs vLLM")
        from simulation import scheduled

        fleet = Fleet(seed, plan, lambda node, post: scheduled.ScheduledEngine(
            node, post, blocks=blocks, caching=caching, chunk=chunk))
        with scheduled.virtual_time(fleet.kernel):
            outcome = fleet.run()
        return outcome, max(engine.longest_wait for engine in fleet.engines.values())

    @pytest.mark.search
    def test_b20_b34_storms(self, capsys):
        """B20-B23, B25-B29, B31, B32, B34: with and without prefix cache and chunked prefill, block tables and
        reference counts compared after each step."""
        steps: collections.Counter = collections.Counter()
        done = requests = 0
        for seed in range(SCHEDULED_SEEDS):
            outcome, waited = self.run(seed, storm(seed), blocks=(24, 40)[seed % 2], caching=seed % 3 != 0,
                                       chunk=8 if seed % 4 == 1 else None)
            assert not outcome.broken, f"seed {seed}: {outcome.broken}"
            assert waited <= 8, f"seed {seed}: B32: its KV was there for {waited} steps"
            steps.update(outcome.steps)
            requests += outcome.requests
            done += outcome.done_remotely
        with capsys.disabled():
            print(f"\n  {SCHEDULED_SEEDS} runs, {requests:,} requests, {done:,} remote prefills, "
                  f"{life_cycle_steps(steps):,} life-cycle steps {dict(steps)}", end="")
        assert life_cycle_steps(steps) >= 1000 * SCHEDULED_SEEDS and done >= 10 * SCHEDULED_SEEDS

    def test_b34_a_seed_is_a_history(self):
        """B34: with the scheduler, too."""
        one, two = (self.run(7, storm(7), blocks=24) for _ in range(2))
        assert one == two

    @pytest.mark.search
    def test_b20_b34_storms_with_auto(self):
        """B20, B34: where expected times decide, and no fixed number."""
        reasons: collections.Counter = collections.Counter()
        for seed in range(SCHEDULED_SEEDS // 4):
            plan = storm(seed)
            with counted_decisions(reasons):
                outcome, waited = self.run(seed, replace(plan, settings={**plan.settings, **AUTO}), blocks=24,
                                           chunk=8 if seed % 4 == 1 else None)
            assert not outcome.broken and waited <= 8, f"seed {seed}: {outcome.broken}, {waited} steps"
        assert {Reason.TTFT, Reason.ITL} <= {reason for _, reason in reasons}, reasons
        assert {True, False} == {remote for remote, reason in reasons if reason is Reason.TTFT}, reasons

    @pytest.mark.parametrize("roles", [BOTH, SPLIT], ids=["two of both roles", "split"])
    @pytest.mark.parametrize("chunk", [None, 8])
    def test_b31_b32_nearly_full_engines_make_progress(self, roles, chunk):
        """B31, B32: many more prompts than fit, at half of the blocks parked; two engines that wait for each other
        too."""
        plan = Plan(roles=roles, requests=150, load_s=3.0, settings={"max_parked_fraction": 0.5}, faults=Faults())
        outcome, waited = self.run(11, plan, blocks=20, chunk=chunk)
        assert not outcome.broken
        assert outcome.requests == 150 and outcome.done_remotely > 10
        assert outcome.seconds < 120.0 and waited <= 8
