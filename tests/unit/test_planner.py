# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner` without a socket: what it makes of readings, which engine it chooses, when it gives no order."""
import itertools
import re
from pathlib import Path

import pytest

from vllm_pd.decisions.wanted import WantedRules
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.ops.options import PlannerOptions
from vllm_pd.ops.planner import Planner, PlannerMetrics
from vllm_pd.ops.planner_readings import WANTED, choose, read_roles
from vllm_pd.ops.scrape import parse
from vllm_pd.ops.top import FleetReading, MemberReading, wanted_lines
from vllm_pd.protocol import messages as m

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
RULES = WantedRules(ttft_s=2.0, itl_s=0.05, cool_down_s=30.0)
BOTH, PREFILL, DECODE = m.Role.BOTH, m.Role.PREFILL, m.Role.DECODE
STEP_S = 10.0


def page(**figures: float) -> str:
    """A page of an engine: names without `vllm:`; what follows `__` is the value of the figure's label."""
    labels = {"stage": "stage", "reason": "reason", "engine": "engine", "blocks": "num_gpu_blocks"}
    lines = []
    for name, value in figures.items():
        name, _, label = name.partition("__")
        key, _, text = label.partition("_")
        lines.append(f"vllm:{name}" + (f'{{{labels[key]}="{text}"}}' if label else "") + f" {value}")
    return "\n".join(lines) + "\n"


def engine(name: str, role: m.Role, at_s: float = 0.0, fault: str = "", load: m.Load | None = None,
           draining: bool = False, **figures: float) -> MemberReading:
    member = m.Member(name, role, f"tcp://127.0.0.1:{1 + sum(name.encode())}", FINGERPRINT, load or m.Load(),
                      draining=draining, http=f"http://{name}")
    read = None if fault else parse(wanted_lines(page(**{"num_requests_running": 0.0, **figures}), WANTED))
    return MemberReading(member, at_s, read, fault)


def fleet(*engines: MemberReading, queue: int = 0, fault: str = "") -> FleetReading:
    return FleetReading(engines, queue, fault)


def test_what_prefill_engines_had_to_do():
    """Two, 1,000 tokens a second each: in 10 s they have computed 12,000 tokens in 12 jobs, and 4 more have come."""
    before = fleet(*(engine(name, PREFILL, load=m.Load(tokens_per_s=1000.0), pd_jobs_total=5, pd_job_tokens_total=5e3)
                     for name in ("p", "q")))
    after = fleet(*(engine(name, PREFILL, 10.0, load=m.Load(tokens_per_s=1000.0, job_tokens=1000), pd_jobs_total=11,
                           pd_job_tokens_total=11e3) for name in ("p", "q")), queue=2)
    prefill, decode = read_roles(before, after)
    assert (prefill.present, prefill.unread, decode.present) == (2, 0, 0)
    assert prefill.busy == pytest.approx(16_000 / 20_000)
    assert prefill.wait_s == pytest.approx(4000 / 2000), "what has piled up"
    assert prefill.compute_s == 0, "no hand-over has ended"


def test_one_that_has_computed_nothing_yet_is_as_fast_as_the_others():
    loads = m.Load(tokens_per_s=1000.0), m.Load()
    before, after = (fleet(*(engine(name, PREFILL, at_s, load=load, pd_job_tokens_total=at_s * 500, pd_jobs_total=at_s)
                             for name, load in zip("pq", loads, strict=True))) for at_s in (0.0, 10.0))
    assert read_roles(before, after)[0].busy == pytest.approx(10_000 / 20_000)


def test_prefill_engines_that_were_not_read_could_do_nothing():
    loads = {"load": m.Load(tokens_per_s=1000.0)}
    before, after = (fleet(engine("p", PREFILL, at_s, **loads, pd_job_tokens_total=at_s * 500),
                           engine("q", PREFILL, at_s, fault="no answer within 1 s", **loads)) for at_s in (0.0, 10.0))
    prefill, _ = read_roles(before, after)
    assert (prefill.present, prefill.unread) == (2, 1) and prefill.busy == pytest.approx(0.5)


def test_how_long_jobs_waited_is_what_they_were_not_computed():
    """In the queue, and at the prefill engine behind others: 0.5 s + 1.5 s - 1,000 tokens at 1,000 a second."""
    stages = {"queue": 5.0, "claim": 0.1, "prefill": 15.0, "transfer": 1.0}
    figures = {f"pd_handover_seconds_sum__stage_{stage}": seconds for stage, seconds in stages.items()}
    counts = {f"pd_handover_seconds_count__stage_{stage}": 10.0 for stage in stages}
    more = {"time_to_first_token_seconds_sum": 40.0, "time_to_first_token_seconds_count": 20.0,
            "time_per_output_token_seconds_sum": 10.0, "time_per_output_token_seconds_count": 400.0,
            "gpu_cache_usage_perc": 0.6, "pd_parked_blocks": 50.0, "cache_config_info__blocks_500": 1.0}
    load = m.Load(running=7, waiting=3)
    none = dict.fromkeys([*figures, *counts, *more], 0.0)
    p = {"load": m.Load(tokens_per_s=1000.0)}
    before = fleet(engine("p", PREFILL, **p, pd_job_tokens_total=0.0, pd_jobs_total=0.0),
                   engine("d", BOTH, load=m.Load(running=9, waiting=5), **none))
    after = fleet(engine("p", PREFILL, 10.0, **p, pd_job_tokens_total=1e4, pd_jobs_total=10.0),
                  engine("d", BOTH, 10.0, load=load, **figures, **counts, **more))
    prefill, decode = read_roles(before, after)
    assert prefill.wait_s == pytest.approx(1.0) and prefill.compute_s == pytest.approx(1.1)
    assert (decode.present, decode.running, decode.waiting) == (1, 7, 3), "one that acts as kv_both has clients"
    assert decode.ttft_s == pytest.approx(2.0) and decode.itl_s == pytest.approx(0.025)
    assert decode.handover_s == pytest.approx(21.1 / 20) and decode.cache == 0.6 and decode.parked == 0.1


@pytest.mark.parametrize("before, now", [
    (engine("d", DECODE), engine("d", DECODE, 10.0, fault="no answer within 1 s")),
    (engine("d", DECODE, fault="no answer within 1 s"), engine("d", DECODE, 10.0)),
    (engine("e", DECODE), engine("d", DECODE, 10.0)),
    (engine("d", DECODE, pd_jobs_total=5.0), engine("d", DECODE, 10.0, pd_jobs_total=1.0)),
    (engine("d", DECODE), engine("d", DECODE, 10.0, pd_control_dead=1.0))])
def test_an_engine_that_is_not_read_twice_is_unread_and_present(before, now):
    _, decode = read_roles(fleet(before), fleet(now))
    assert (decode.present, decode.unread) == (1, 1)
    assert read_roles(None, fleet(now))[1].unread == 1
    assert choose(fleet(before), fleet(now, engine("p", PREFILL, 10.0)), PREFILL, ()) is None


def test_an_engine_that_drains_counts_for_nothing():
    both = [fleet(engine("d", DECODE, at_s, draining=True)) for at_s in (0.0, 10.0)]
    assert read_roles(*both)[1].present == 0
    assert choose(*both, PREFILL, ()) is None


def test_the_engine_with_the_least_to_do_is_chosen():
    engines = {"a": {"num_requests_running": 3.0}, "b": {"num_requests_running": 1.0, "num_requests_waiting": 1.0},
               "c": {"num_requests_running": 2.0, "num_requests_waiting": 2.0}}
    both = [fleet(engine("p", PREFILL, at_s), *(engine(name, DECODE, at_s, **figures)
                                               for name, figures in engines.items())) for at_s in (0.0, 10.0)]
    assert choose(*both, PREFILL, ()).incarnation == "b"
    assert choose(*both, PREFILL, ("b", )).incarnation == "a"
    assert choose(*both, PREFILL, ("a", "b", "c")) is None
    assert choose(*both, DECODE, ()) is None, "the last one of its role stays"


def test_neither_a_degraded_engine_nor_one_of_several_ranks_is_chosen():
    ill = {"pd_degraded__reason_broker": 1.0}
    ranks = {"num_requests_running__engine_0": 0.0, "num_requests_running__engine_1": 0.0}
    for figures in (ill, ranks):
        both = [fleet(engine("p", PREFILL, at_s), engine("d", DECODE, at_s, **figures), engine("e", DECODE, at_s),
                      engine("f", DECODE, at_s)) for at_s in (0.0, 10.0)]
        assert choose(*both, PREFILL, ()).incarnation == "e"
        assert choose(*both, PREFILL, ("e", "f")) is None


def test_the_last_engine_of_its_role_that_is_well_is_not_chosen():
    ill = {"pd_degraded__reason_broker": 1.0}
    both = [fleet(engine("p", PREFILL, at_s), engine("d", DECODE, at_s, **ill), engine("e", DECODE, at_s))
            for at_s in (0.0, 10.0)]
    assert choose(*both, PREFILL, ()) is None


def test_an_engine_without_anybody_to_work_with_is_chosen_where_that_mends_it():
    alone = {"pd_degraded__reason_peer": 1.0}
    lonely = [fleet(*(engine(name, DECODE, at_s, **alone) for name in "de")) for at_s in (0.0, 10.0)]
    assert choose(*lonely, PREFILL, ()).incarnation == "d"
    others = [fleet(engine("p", PREFILL, at_s), *(engine(name, DECODE, at_s, **alone) for name in "de"))
              for at_s in (0.0, 10.0)]
    assert choose(*others, PREFILL, ()) is None


class PlayedFleet:
    """Engines whose decode engines are idle, and whose prefill engines have too much to do; a planner of them."""

    def __init__(self, roles: dict[str, m.Role], flip: bool = True, refusing: tuple[str, ...] = ()) -> None:
        self.now, self.roles, self.orders = 0.0, dict(roles), []
        self.refusing = refusing
        self.metrics = PlannerMetrics()
        self.planner = Planner(RULES, self.metrics, lambda: dict(self.roles), self._order if flip else None,
                               lambda: self.now)

    def _order(self, member: m.Member, role: m.Role) -> None:
        self.orders.append((self.now, member.incarnation, role))
        if member.incarnation in self.refusing:
            raise ControlError("this engine was started as kv_consumer")
        self.roles[member.incarnation] = role

    def reading(self) -> FleetReading:
        load = m.Load(tokens_per_s=1000.0)
        return fleet(*(engine(name, role, self.now, load=load, pd_jobs_total=self.now, pd_job_tokens_total=self.now * (
            4000.0 if role is PREFILL else 0.0)) for name, role in self.roles.items()))

    def run(self, intervals: int) -> list[str]:
        """The lines of so many intervals."""
        lines = []
        for _ in range(intervals):
            self.now += STEP_S
            lines.append(self.planner.plan(self.reading()))
        return lines


FOUR = {"p": PREFILL, "a": DECODE, "b": BOTH, "c": DECODE}


def test_one_engine_at_a_time_changes_and_none_within_a_cool_down():
    played = PlayedFleet(FOUR)
    lines = played.run(8)
    assert [(name, role) for _, name, role in played.orders] == [("a", PREFILL), ("b", PREFILL)]
    assert played.orders[1][0] - played.orders[0][0] >= RULES.cool_down_s
    assert sum("; flipped a at tcp://" in line for line in lines) == 1 and len(lines) == 8, "one line a decision"
    assert played.metrics.flips.labels("prefill", "done")._value.get() == 2
    assert [name for name, role in played.roles.items() if role.decodes] == ["c"], "the last one stays"
    assert len(PlayedFleet(FOUR).run(20)) == 20


def test_a_dry_run_changes_nothing_and_says_so():
    played = PlayedFleet(FOUR, flip=False)
    lines = played.run(8)
    assert not played.orders and played.roles == FOUR
    assert sum("would flip a at" in line and "from kv_consumer to kv_producer" in line for line in lines) == 2
    assert played.metrics.wanted.labels("prefill")._value.get() == 2
    assert played.metrics.present.labels("decode")._value.get() == 3


def test_an_engine_that_refuses_is_left_alone_for_longer_each_time_and_another_is_asked():
    played = PlayedFleet(FOUR, refusing=("a", ))
    lines = played.run(10)
    assert [name for _, name, _ in played.orders][:2] == ["a", "b"]
    assert played.orders[1][0] - played.orders[0][0] >= RULES.cool_down_s
    assert any("not flipped: a at" in line and "started as kv_consumer" in line for line in lines)
    assert played.metrics.flips.labels("prefill", "failed")._value.get() >= 1
    alone = PlayedFleet({"p": PREFILL, "a": DECODE, "b": DECODE}, refusing=("a", "b"))
    alone.run(200)
    times = [at_s for at_s, name, _ in alone.orders if name == "a"]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) >= 3 and gaps == sorted(gaps) and gaps[-1] > 2 * gaps[0]


def test_what_somebody_else_has_changed_is_waited_for():
    """A second planner, or an operator."""
    played = PlayedFleet(FOUR)
    played.run(2)
    played.roles["c"] = PREFILL
    played.run(3)
    assert not played.orders
    played.run(2)
    assert len(played.orders) == 1


def test_no_order_is_given_where_roles_have_changed_since_the_reading():
    played = PlayedFleet(FOUR)
    played.run(2)
    played.now += STEP_S
    reading = played.reading()
    played.roles["c"] = PREFILL
    assert "roles have changed since the reading" in played.planner.plan(reading)
    assert not played.orders


def test_two_planners_do_not_work_against_each_other():
    played = PlayedFleet(FOUR)
    second = Planner(RULES, PlannerMetrics(), lambda: dict(played.roles), played._order, lambda: played.now)
    for _ in range(30):
        played.run(1)
        second.plan(played.reading())
    times = [at_s for at_s, _, _ in played.orders]
    assert len(times) == 2 and times[1] - times[0] >= RULES.cool_down_s


def test_a_broker_that_does_not_answer_decides_nothing():
    played = PlayedFleet(FOUR)
    played.run(1)
    line = played.planner.plan(faulty(played.reading(), "no broker answers"))
    assert line == "no decision: no broker answers"
    assert played.metrics.present.labels("decode")._value.get() == 3
    assert "not read" not in played.run(1)[0], "the reading before that one counts"


def faulty(reading: FleetReading, fault: str) -> FleetReading:
    return FleetReading(reading.engines, reading.queue_length, fault)


@pytest.mark.parametrize("options, key", [
    ({"interval_s": 0.1}, "--interval-s"), ({"interval_s": float("nan")}, "--interval-s"),
    ({"ttft_target_ms": 0.0}, "--ttft-target-ms"), ({"itl_target_ms": float("nan")}, "--itl-target-ms"),
    ({"cool_down_s": 5.0}, "--cool-down-s"), ({"lower_after_s": 1e9}, "--lower-after-s"), ({"port": 0}, "--port")])
def test_options_that_cannot_be_used_are_refused(options, key):
    with pytest.raises(ConfigError, match=f"{key}=.* can't be used: write"):
        PlannerOptions(**options).checked()
    assert PlannerOptions().checked() == PlannerOptions()


def test_every_figure_of_a_planner_is_described():
    document = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    ticked = set(re.findall(r"`(vllm:pd_\w+)`", document))
    families = list(PlannerMetrics().registry.collect())
    names = {f"{one.name}_total" if one.type == "counter" else one.name for one in families}
    assert len(names) >= 6 and names <= ticked, names - ticked
