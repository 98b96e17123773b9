# SPDX-License-Identifier: Apache-2.0
"""The engine's own figures reach /metrics. Over the multiprocess files of `vllm serve`: tests/sockets."""

import prometheus_client
import pytest

from vllm_pd.handover.metrics import OUTCOMES, STAGES, PDMetrics
from vllm_pd.ops.scrape import parse


def exposed() -> dict:
    return parse(prometheus_client.generate_latest().decode())


def drop_upstream_collectors() -> int:
    """What upstream's stat logger does when it is built."""
    registry = prometheus_client.REGISTRY
    doomed = [c for c in list(registry._collector_to_names) if "vllm" in getattr(c, "_name", "")]
    for collector in doomed:
        registry.unregister(collector)
    return len(doomed)


def test_counts_appear_under_their_labels():
    metrics = PDMetrics("labels")
    metrics.decision("remote", "length")
    metrics.decision("local", "queue")
    metrics.decision("local", "queue")
    metrics.asked("remote", "local")
    metrics.attempt("done")
    metrics.handover("transfer", 0.25)
    metrics.parked(0.5)
    metrics.transfer_bytes(4096)
    metrics.frames_dropped("malformed", 3)
    metrics.parked_blocks.set(7)
    metrics.quarantined_blocks.set(2)
    metrics.sending_blocks.set(1)
    metrics.engine_state("kv_both", draining=False, control_dead=True)
    seen = exposed()
    assert seen.value("vllm:pd_decisions_total", model_name="labels", decision="local", reason="queue") == 2
    assert seen.value("vllm:pd_decisions_total", model_name="labels", decision="remote", reason="length") == 1
    assert seen.value("vllm:pd_asked_total", model_name="labels", asked="remote", decision="local") == 1
    assert seen.value("vllm:pd_attempts_total", model_name="labels", outcome="done") == 1
    assert seen.value("vllm:pd_handover_seconds_sum", model_name="labels", stage="transfer") == 0.25
    assert seen.value("vllm:pd_handover_seconds_count", model_name="labels", stage="transfer") == 1
    assert seen.value("vllm:pd_parked_seconds_sum", model_name="labels") == 0.5
    assert seen.value("vllm:pd_transfer_bytes_total", model_name="labels") == 4096
    assert seen.value("vllm:pd_frames_dropped_total", model_name="labels", kind="malformed") == 3
    assert seen.value("vllm:pd_parked_blocks", model_name="labels") == 7
    assert seen.value("vllm:pd_quarantined_blocks", model_name="labels") == 2
    assert seen.value("vllm:pd_sending_blocks", model_name="labels") == 1
    assert seen.value("vllm:pd_draining", model_name="labels") == 0
    assert seen.value("vllm:pd_control_dead", model_name="labels") == 1


def test_known_labels_exist_before_the_first_event():
    PDMetrics("early")
    seen = exposed()
    for outcome in OUTCOMES:
        assert seen.value("vllm:pd_attempts_total", model_name="early", outcome=outcome) == 0
    for stage in STAGES:
        assert seen.value("vllm:pd_handover_seconds_count", model_name="early", stage=stage) == 0


def test_survives_upstreams_clean_up_and_a_second_engine():
    first = PDMetrics("first")
    victim = prometheus_client.Gauge("vllm:someone_elses", "Dropped by upstream.")
    assert drop_upstream_collectors() == 1, "the clean-up must really drop something"
    assert victim not in prometheus_client.REGISTRY._collector_to_names
    second = PDMetrics("second")
    first.attempt("failed")
    second.attempt("failed")
    second.attempt("failed")
    seen = exposed()
    assert seen.value("vllm:pd_attempts_total", model_name="first", outcome="failed") == 1
    assert seen.value("vllm:pd_attempts_total", model_name="second", outcome="failed") == 2


@pytest.mark.parametrize("page", ['vllm:pd_degraded{, ={a="b"} 1\n', "vllm:a{\n", 'a{b="\n', "a b c d\n", "\x00"])
def test_what_is_no_page_of_metrics_is_a_valueerror_whatever_the_parser_raises(page):
    """Of a hostile engine: `vllm-pd top` goes on with the others."""
    with pytest.raises(ValueError):
        parse(page)
