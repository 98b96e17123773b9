# SPDX-License-Identifier: Apache-2.0
"""`max_local_prefill_tokens: auto` on V1's real schedulers, under a clock that the steps move."""
from types import SimpleNamespace

import pytest

from tests.v1.fleet_engine import virtual_time
from tests.v1.simulated import Engine
from tests.v1.test_hazards import PARKED, prompt
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.peer.own_jobs import PrefillLoads
from vllm_pd.protocol.actions import Prefilled, Released, Timed
from vllm_pd.protocol.messages import Timings

STEP_S, TOKENS_PER_S = 0.02, 1000.0
IDLE, FULL = 0, 10**9  # tokens that wait at the broker


class TimedEngine(Engine):
    """A step takes `STEP_S`, and its prompt tokens take theirs."""

    def __init__(self, clock, *arguments, **more):
        self.clock = clock
        super().__init__(*arguments, **more)

    def execute(self, work):
        self.clock.now += STEP_S + sum(one[2] for one in work if one[2] > 1) / TOKENS_PER_S
        return super().execute(work)

    def decisions(self):
        return [tuple(call[1:]) for call in self.counted() if call[0] == "decision"]


@pytest.fixture
def clock():
    clock = SimpleNamespace(now=1000.0)
    with virtual_time(clock):
        yield clock


@pytest.fixture
def make(clock, model_folder, in_flight):
    def made(**more):
        settings = {"threshold": "auto", "role": "kv_consumer", "blocks": 200, **more}
        return TimedEngine(clock, model_folder, in_flight, **settings)

    return made


@pytest.fixture
def measured(make):
    """An engine that has computed a prompt and decoded."""
    engine = make()
    compute(engine, "first", 128)
    return engine


def compute(engine, request_id, tokens):
    """Prefill it here, and answer it."""
    queued, engine.protocol.queued_tokens = engine.protocol.queued_tokens, FULL
    engine.add(request_id, prompt(tokens), 8)
    engine.run()
    engine.protocol.queued_tokens = queued


def test_an_engine_measures_its_steps(measured):
    speed = measured.binding.speed
    assert speed.step_s == pytest.approx(STEP_S)
    assert speed.tokens_per_s == pytest.approx(TOKENS_PER_S, rel=0.2)  # its first prompt came before any decode
    compute(measured, "second", 128)
    before = abs(speed.tokens_per_s - TOKENS_PER_S)
    for number in range(20):
        compute(measured, f"more {number}", 128)
    assert abs(speed.tokens_per_s - TOKENS_PER_S) < max(1.0, before)


@pytest.mark.parametrize("role, measures", [("kv_consumer", False), ("kv_both", True), ("kv_producer", True)])
def test_with_a_fixed_number_only_those_measure_who_report_it(make, role, measures):
    engine = make(threshold=40, role=role)
    engine.protocol.prefill_loads = None  # not asked
    engine.add("a", prompt(30))
    engine.run()
    for number in range(3):
        if role != "kv_consumer":
            engine.job(prompt(100), number=number)
            engine.run()
    assert (engine.binding.speed.tokens_per_s > 0) is measures
    assert engine.binding.remote_prefills.measures is None
    if measures:
        assert engine.protocol.load.tokens_per_s == engine.binding.speed.tokens_per_s


def test_the_fixed_number_of_tokens_decides_until_something_is_measured(make):
    engine = make()
    engine.protocol.prefill_loads = lambda *asked: PrefillLoads(0, ((0, 0.0), ))
    engine.add("a", prompt(200))
    engine.run()
    engine.check_answers()
    assert engine.decisions() == [("local", "threshold")]


def test_the_better_place_is_taken(measured):
    """A peer there is far slower than this engine, so that an idle engine keeps what it has."""
    measured.add("idle", prompt(150))
    measured.run()
    measured.protocol.prefill_loads = lambda *asked: PrefillLoads(IDLE, ((0, 1e5), ))
    measured.add("slower here", prompt(150))
    measured.run()
    assert measured.status("slower here") is PARKED
    assert measured.decisions()[-2:] == [("local", "ttft"), ("remote", "ttft")]
    measured.prefilled("slower here")
    measured.run()
    measured.check_answers()
    measured.check_at_rest()


def test_the_target_sends_long_prompts_away_while_others_decode(make):
    engine = make(itl_target_ms=80)
    compute(engine, "first", 128)
    engine.add("alone", prompt(150))
    engine.run()
    engine.add("decoding", prompt(20), 40)
    for _ in range(6):
        engine.turn()
    engine.add("short", prompt(20))
    engine.add("long", prompt(150))
    engine.run()
    assert engine.status("long") is PARKED and engine.ended.keys() >= {"alone", "decoding", "short"}
    assert engine.decisions()[-4:] == [("local", "ttft")] * 3 + [("remote", "itl")]
    engine.abort("long")
    engine.tell(Released(engine.attempt("long")))
    engine.run()
    engine.check_at_rest()


def test_prompts_before_it_are_waited_for(measured):
    """Of the same step and of earlier ones; as many of their tokens as are left."""
    seen = []
    prefills = measured.binding.remote_prefills
    measure, measured.protocol.queued_tokens = prefills.measures.here, FULL

    def here(now, before, decodes, rates):
        seen.append((before, decodes))
        return measure(now, before, decodes, rates)

    prefills.measures.here = here
    for name, tokens in (("a", 40), ("b", 50), ("c", 100)):  # 128 tokens a step
        measured.add(name, prompt(tokens), 30)
    measured.schedule()
    assert seen == [(0, 0), (40, 0), (90, 0)]
    measured.process()
    measured.add("d", prompt(10))
    measured.schedule()
    assert seen[-1] == (62, 2), "c's, which this step computes"
    measured.run()
    measured.check_answers()
    assert not prefills._expected(1, ()).here.tokens_before


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("last_bytes, half_s", [(0, 0.25), (1 << 20, 0.25), (1 << 18, 0.5)])
def test_b100_hand_overs_are_measured(measured, clock, late, last_bytes, half_s):
    """Timings come with the arrival or after it. Of prompts whose last write had a quarter of their bytes, half a
    prompt takes as long as a whole one."""
    measured.protocol.prefill_loads = lambda *asked: PrefillLoads(0, ((0, 1.0), ))
    speed, measured.binding.speed.stepped = measured.binding.speed, lambda *step: None
    for _ in range(300):  # so slow that all goes to the peer
        StepSpeed.stepped(speed, clock.now, 100, 0, 1000.0)
    timings = Timings(queue_s=1.0, claim_s=0.25, prefill_s=2.0, transfer_s=0.5, bytes=1 << 20, measured=True,
                      last_bytes=last_bytes)
    measures = measured.binding.remote_prefills.measures
    for number in range(30):
        measured.add(f"r{number}", prompt(160))
        measured.run()
        attempt = measured.attempt(f"r{number}")
        clock.now += 4.0
        measured.write(attempt)
        measured.tell(Prefilled(attempt, Timings() if late else timings))
        measured.run()
        if late:
            measured.tell(Timed(attempt, timings))
            measured.run()
    found = measures.there(clock.now, 160, 0, [(0, 1.0)])
    assert found.overhead_s == pytest.approx(4.0 - 1.0 - 2.0 - 0.5, rel=0.15)
    assert found.transfer_s == pytest.approx(0.5, rel=0.15)
    assert measures.there(clock.now, 80, 0, [(0, 1.0)]).transfer_s == pytest.approx(half_s, rel=0.15)
    assert not measured.binding.remote_prefills._unmeasured


def test_the_log_names_all_that_was_compared(make, caplog):
    caplog.set_level("INFO", logger="vllm.pd")
    engine = make(log_decisions=True)
    compute(engine, "first", 128)
    engine.add("second", prompt(150))
    engine.run()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert lines[0].startswith("request first, 128 tokens to compute: local, reason ttft: here "), "the peers' speed"
    assert "150 tokens to compute: local, reason ttft: here " in lines[1]
    assert "(0 tokens queued, prefill engines: 0 tokens at 2/s, 0 tokens at 2/s; transfer" in lines[1]
    silent = make()
    caplog.clear()
    compute(silent, "first", 128)
    assert not [record for record in caplog.records if record.getMessage().startswith("request ")]


def test_with_a_fixed_number_the_log_says_the_reason(make, caplog):
    caplog.set_level("INFO", logger="vllm.pd")
    engine = make(threshold=40, log_decisions=True)
    engine.add("a", prompt(30))
    engine.run()
    assert "request a, 30 tokens: local, reason threshold" in caplog.messages
