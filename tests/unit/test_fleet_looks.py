# SPDX-License-Identifier: Apache-2.0
"""From pages of metrics to looks and to what `vllm-pd planner` says."""
import msgspec
import pytest
from prometheus_client import generate_latest

from vllm_pd.decisions.demand import Targets
from vllm_pd.errors import ConfigError
from vllm_pd.ops.fleet_looks import WANTED, look_at
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.planner import FleetPlanner, PlannerFamilies
from vllm_pd.ops.scrape import parse
from vllm_pd.ops.top import FleetReading, MemberReading, wanted_lines
from vllm_pd.protocol import messages as m

TARGETS = Targets(0.5, 0.04)
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
D = m.Member("d" * 32, m.Role.DECODE, "tcp://127.0.0.1:1", FINGERPRINT, http="http://127.0.0.1:8000")
P = m.Member("a" * 32, m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, m.Load(tokens_per_s=5000.0))


def page(requests: float, itl="inter_token_latency", running: object = 4, hits: float = 0.0) -> str:
    """After so many requests of 1,000 and 100 tokens, a quarter of them late, at 30 ms between tokens."""
    return f"""vllm:num_requests_running {running}
vllm:num_requests_waiting 2.0
vllm:pd_parked_blocks 100.0
vllm:prompt_tokens_total {1000 * requests}
vllm:prefix_cache_hits_total {hits}
vllm:request_generation_tokens_sum {100 * requests}
vllm:request_generation_tokens_count {requests}
vllm:{itl}_seconds_sum {3 * requests}
vllm:{itl}_seconds_count {100 * requests}
vllm:{itl}_seconds_bucket{{le="0.05"}} {90 * requests}
vllm:{itl}_seconds_bucket{{le="+Inf"}} {100 * requests}
vllm:time_to_first_token_seconds_count {requests}
vllm:time_to_first_token_seconds_bucket{{le="0.5"}} {0.75 * requests}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {requests}
"""


def reading(at_s: float, text: str | None, member=D) -> FleetReading:
    figures = None if text is None else parse(wanted_lines(text, WANTED))
    return FleetReading((MemberReading(member, at_s, figures), MemberReading(P, at_s)))


@pytest.mark.parametrize("itl", ["inter_token_latency", "time_per_output_token"])
def test_a_look_has_what_was_counted_between_two_readings_of_either_engine(itl):
    look = look_at(reading(0.0, page(100, itl)), reading(10.0, page(140, itl, hits=4000)), TARGETS)
    assert (look.arrived, look.answers, look.first_tokens) == (40, 40, 40)
    assert look.prompt_tokens == 36_000, "prefix hits are no work"
    assert look.answer_tokens == 4000 and look.itl_s == pytest.approx(0.03)
    assert look.late == pytest.approx(10) and look.slow == pytest.approx(4)
    assert (look.running, look.waiting, look.waiting_tokens) == (4, 2, 1600)
    assert (look.decodes, look.tokens_per_s) == (1, 5000.0)


def test_what_comes_and_waits_has_arrived():
    look = look_at(reading(0.0, page(100, running=4)), reading(10.0, page(140, running=24)), TARGETS)
    assert look.arrived == 60


@pytest.mark.parametrize("before, after", [(page(100), page(3)), (None, page(100)), (page(100), None)],
                         ids=["restarted", "not read before", "not read now"])
def test_nothing_is_made_up_of_an_engine_that_began_anew_or_was_not_read(before, after):
    look = look_at(reading(0.0, before), reading(10.0, after), TARGETS)
    assert (look.answers, look.prompt_tokens, look.itl_s) == (0, 0, 0)


def planner(**options) -> tuple[FleetPlanner, PlannerFamilies, list[str]]:
    said, families = [], PlannerFamilies()
    return FleetPlanner(PlannerOptions(ttft_ms=500.0, itl_ms=40.0, **options), families, said.append), families, said


def test_a_decision_is_said_once_and_is_on_the_page():
    plan, families, said = planner()
    assert not plan.receive(reading(0.0, page(100)))
    for number in range(1, 5):
        assert plan.receive(reading(10.0 * number, page(100 + 40 * number)))
    assert len(said) == 1 and said[0].startswith("wanted: 2 prefill, "), said
    assert 'vllm:pd_wanted_engines{role="prefill"} 2.0' in generate_latest(families.registry).decode()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-5.0", "1e300"])
def test_b80_a_page_of_nonsense_neither_ends_the_planner_nor_asks_for_more_than_is_allowed(value):
    plan, families, said = planner(most=7)
    hostile = "\n".join(line.rpartition(" ")[0] + f" {value}" for line in page(1).splitlines()) + "\n"
    for number, text in enumerate((page(1), hostile, page(50), None, hostile, hostile, page(3))):
        plan.receive(reading(10.0 * number, text))
    for line in generate_latest(families.registry).decode().splitlines():
        if line.startswith("vllm:pd_wanted_engines{"):
            assert 1 <= float(line.rpartition(" ")[2]) <= 7


def test_a_fleet_of_no_engines_and_one_that_grows():
    plan, _, said = planner()
    plan.receive(FleetReading())
    assert not plan.receive(FleetReading(fault="no broker answers"))
    for number in range(3):
        plan.receive(reading(10.0 * number, page(100 + 40 * number)))
    third = msgspec.structs.replace(D, incarnation="e" * 32)
    more = reading(50.0, page(400))
    plan.receive(FleetReading((*more.engines, MemberReading(third, 50.0))))
    assert said


@pytest.mark.parametrize("options", [{"ttft_ms": 0.0}, {"itl_ms": float("nan")}, {"use": 2.0}, {"most": 0},
                                     {"port": 0}, {"interval_s": 0.0}, {"hold_s": -1.0}])
def test_an_option_that_cannot_be_used_is_refused(options):
    with pytest.raises(ConfigError, match="write"):
        PlannerOptions(**options).checked()
