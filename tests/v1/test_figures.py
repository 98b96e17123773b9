# SPDX-License-Identifier: Apache-2.0
"""Our figures go from EngineCore to the front end's registry by V1's own way."""
import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from tests.v1.simulated import Engine
from tests.v1.test_hazards import parked
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.protocol.actions import Released
from vllm_pd.v1 import metrics
from vllm_pd.v1.connector import PDConnector


def value(name: str, **labels) -> float:
    return REGISTRY.get_sample_value(f"vllm:pd_{name}", {"model_name": "the-model", "engine": "0", **labels}) or 0.0


def front_end(model_folder):
    config = Engine(model_folder).config
    config.model_config.served_model_name = "the-model"
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    return PDConnector.build_prom_metrics(config, types, [], {0: [], 1: []})


def test_every_method_and_gauge_is_recorded():
    recorder = metrics.MetricsRecorder()
    public = {name for name in vars(PDMetrics) if not name.startswith("_")}
    assert public == {*metrics._COUNTS, *metrics._STATES}
    for name in {*public, *metrics._GAUGES}:
        assert hasattr(recorder, name) and hasattr(PDMetrics("x", 0), name)


def test_what_an_engine_counts_appears_on_the_front_ends_page(model_folder, in_flight):
    prom, engine = front_end(model_folder), Engine(model_folder, in_flight)
    attempt = parked(engine)
    before = value("attempts_total", outcome="cancelled")
    engine.binding._publish_stats()
    for one in engine.figures:
        prom.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(one)))
    assert value("parked_blocks") == 7
    assert value("decisions_total", decision="remote", reason="length") >= 1
    engine.figures.clear()
    engine.abort("a")
    engine.run()
    engine.tell(Released(attempt))
    engine.run()  # which makes no step for it
    for one in engine.figures:
        prom.observe(one)
    assert value("parked_blocks") == value("quarantined_blocks") == 0
    assert value("attempts_total", outcome="cancelled") == before + 1


def test_each_rank_has_its_own_figures(model_folder):
    prom = front_end(model_folder)
    for engine, blocks in ((0, 5), (1, 0), (0, 3)):
        recorder = metrics.MetricsRecorder()
        recorder.parked_blocks.set(blocks)
        recorder.job(10)
        recorder.engine_state("kv_both", engine == 1, False)
        before = value("jobs_total", engine=str(engine))
        prom.observe(recorder.take().data, engine)
        assert value("jobs_total", engine=str(engine)) == before + 1
    assert (value("parked_blocks"), value("parked_blocks", engine="1")) == (3, 0)
    assert (value("draining"), value("draining", engine="1")) == (0, 1)


def test_statistics_add_up_and_say_how_attempts_ended():
    recorder = metrics.MetricsRecorder()
    assert recorder.take() is None
    recorder.attempt("done")
    first = recorder.take()
    recorder.attempt("done")
    recorder.attempt("failed")
    both = first.aggregate(recorder.take())
    assert both.reduce() == {"attempts done": 2, "attempts failed": 1} and not both.is_empty()
    assert PDConnector.build_kv_connector_stats(both.to_dict()).reduce() == both.reduce()
    for _ in range(metrics.MAX_CALLS + 10):
        recorder.job(1)
    assert len(recorder.take().data["calls"]) == metrics.MAX_CALLS


def test_figures_and_load_of_the_last_step_leave_an_engine_that_rests(model_folder, in_flight):
    """No later step takes them along."""
    prom, engine = front_end(model_folder), Engine(model_folder, in_flight)
    before = value("handover_seconds_count", stage="first_step")
    parked(engine)
    engine.prefilled("a")
    engine.run()
    for one in engine.figures:
        prom.observe(one)
    assert value("handover_seconds_count", stage="first_step") == before + 1
    assert (engine.protocol.load.running, engine.protocol.load.waiting) == (0, 0)
    published = len(engine.figures)
    for _ in range(3):
        assert not engine.scheduler.has_requests()
    assert len(engine.figures) == published


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("asks", [(0, 1), (1, 1)])
def test_b43_the_states_of_an_engine_that_rests_are_right_whichever_front_end_is_late(model_folder, in_flight, order,
                                                                                     asks):
    """B43: of two processes' gauges the one that was set last counts. So it is where only the second one has requests.
    """
    engine = Engine(model_folder, in_flight)
    parked(engine, client_index=asks[0])
    engine.add("b", [5] * 9, client_index=asks[1])
    engine.run()
    engine.prefilled("a")
    engine.run()
    for front_end in order:
        assert engine.figures_of[front_end], f"front end {front_end} hears of it"
        shown = [value for data in engine.figures_of[front_end] for name, *value in data["calls"]
                 if name == "parked_blocks"]
        assert shown[-1] == [0]
    counts = [name for data in engine.figures for name, *_ in data["calls"] if name == "attempt"]
    assert len(counts) == 1, "a count is counted once"
    published = len(engine.figures)
    for _ in range(3):
        assert not engine.scheduler.has_requests()
    assert len(engine.figures) == published
