# SPDX-License-Identifier: Apache-2.0
"""A decode engine's spans, as OpenTelemetry's own SDK exports them. Those of real servers: tests/v1/test_serve.py."""
import logging
import socket
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.tracing.otel import get_span_exporter

from tests.v1.simulated import Engine
from tests.v1.test_hazards import end, prompt
from vllm_pd.protocol.actions import FallbackReason, Prefilled, Released, Timed
from vllm_pd.protocol.messages import Timings
from vllm_pd.v1 import spans

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
TIMINGS = Timings(queue_s=1.0, claim_s=0.5, prefill_s=2.0, transfer_s=0.25, bytes=4096, measured=True)
STAGES = ["pd_queue", "pd_claim", "pd_prefill", "pd_transfer"]


@pytest.fixture
def exported(monkeypatch):
    """All spans that have ended, the first one first."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


def names(exported) -> list[str]:
    return [span.name for span in exported()]


def test_a_remote_prefill_and_its_stages_are_in_the_clients_trace(engine, exported):
    engine.add("a", prompt(100), trace_headers=HEADERS)
    engine.run()
    assert names(exported) == ["pd_decide"], "the other one is open while it is parked"
    attempt = engine.attempt("a")
    engine.write(attempt)
    engine.tell(Prefilled(attempt, TIMINGS, "the-p", 100))
    end(engine)
    decided, parked, *stages = exported()
    assert all(span.context.trace_id == int(TRACE, 16) for span in exported())
    assert [span.parent.span_id for span in (decided, parked)] == [int(PARENT, 16)] * 2
    assert dict(decided.attributes) == {"pd.decision": "remote", "pd.reason": "length", "pd.tokens": 100}
    assert dict(parked.attributes) == {"pd.attempt": attempt.number, "pd.tokens": 100, "pd.cached_tokens": 0,
                                       "pd.outcome": "done", "pd.peer": "the-p"}
    assert parked.status.is_ok or parked.status.is_unset
    assert decided.start_time == decided.end_time <= parked.start_time <= parked.end_time
    assert [span.name for span in stages] == STAGES
    assert {span.parent.span_id for span in stages} == {parked.context.span_id}
    assert stages[0].start_time == parked.start_time
    assert [one.end_time for one in stages[:-1]] == [one.start_time for one in stages[1:]]
    assert [(one.end_time - one.start_time) / 1e9 for one in stages] == [1.0, 0.5, 2.0, 0.25]
    assert stages[-1].attributes == {"pd.bytes": 4096}


def test_stages_that_come_later_are_added_once(engine, exported):
    engine.add("a", prompt(100), trace_headers=HEADERS)
    engine.run()
    attempt = engine.attempt("a")
    engine.write(attempt)
    engine.tell(Prefilled(attempt, Timings(queue_s=1.0), "the-p", 100))
    engine.run()
    assert names(exported) == ["pd_decide", "pd_remote_prefill"]
    for _ in range(2):
        engine.tell(Timed(attempt, TIMINGS, "the-p", 100))
    end(engine)
    assert names(exported)[2:] == STAGES


def test_an_attempt_that_fails_says_why_and_the_next_one_is_another(engine, exported):
    engine.add("a", prompt(100), trace_headers=HEADERS)
    engine.run()
    first = engine.attempt("a")
    engine.lost(first, FallbackReason.PEER, "the-p")
    engine.tell(Released(first))
    engine.run()
    failed = exported()[1]
    assert failed.name == "pd_remote_prefill" and not failed.status.is_ok and not failed.status.is_unset
    assert (failed.attributes["pd.fault"], failed.attributes["pd.peer"]) == ("peer", "the-p")
    assert names(exported)[2:] == ["pd_decide"]
    if engine.attempt("a") != first:
        engine.prefilled("a")
    end(engine)
    assert not engine.binding.remote_prefills._spans._parked


def test_an_abort_ends_the_span(engine, exported):
    engine.add("a", prompt(100), trace_headers=HEADERS)
    engine.run()
    attempt = engine.attempt("a")
    engine.abort("a")
    engine.run()
    assert exported()[-1].attributes["pd.outcome"] == "cancelled"
    engine.tell(Released(attempt))
    end(engine)
    assert names(exported) == ["pd_decide", "pd_remote_prefill"]


def test_a_prompt_that_stays_has_its_reason_and_one_without_a_trace_nothing(engine, exported):
    engine.add("a", prompt(10), trace_headers=HEADERS)
    engine.add("b", prompt(100))
    engine.run()
    engine.prefilled("b")
    end(engine)
    assert [(span.name, span.attributes["pd.reason"]) for span in exported()] == [("pd_decide", "threshold")]


def test_a_prompt_that_is_refused_says_so(model_folder, in_flight, exported):
    engine = Engine(model_folder, in_flight, fallback="refuse", fallback_wait_s=0)
    engine.protocol.peers = 0
    engine.add("a", prompt(100), trace_headers=HEADERS)
    end(engine)
    assert [dict(span.attributes) for span in exported()] == [
        {"pd.decision": "refused", "pd.reason": "peer", "pd.tokens": 100}]


def test_a_trace_that_is_not_sampled_is_not_sent(engine, exported):
    engine.add("a", prompt(100), trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    engine.run()
    engine.prefilled("a")
    end(engine)
    assert not exported()


def test_a_client_can_send_anything_as_its_trace(engine, exported):
    for number, header in enumerate(("", "x", "00-" + "f" * 100_000, f"00-{'0' * 32}-{'0' * 16}-01", "\0")):
        engine.add(f"r{number}", prompt(100 + number), trace_headers={"traceparent": header})
    engine.run()
    for number in range(5):
        engine.prefilled(f"r{number}")
    end(engine)
    assert all(span.parent is None for span in exported() if span.name == "pd_decide"), "each is a trace of its own"


def test_an_error_in_opentelemetry_ends_no_step(monkeypatch, engine, caplog):
    def fails(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(trace, "get_tracer", fails)
    engine.add("a", prompt(100), trace_headers=HEADERS)
    engine.run()
    engine.prefilled("a")
    end(engine)
    assert caplog.text.count("a span could not be made") == 2


def test_attempts_whose_stages_never_come_are_forgotten(monkeypatch, engine, exported):
    monkeypatch.setattr(spans, "MAX_UNTIMED", 3)
    for number in range(5):
        engine.add(f"r{number}", [number, *prompt(99)], trace_headers=HEADERS)
        engine.run()
        attempt = engine.attempt(f"r{number}")
        engine.write(attempt)
        engine.tell(Prefilled(attempt, Timings(), "p", 100))
        engine.run()
    end(engine)
    assert len(engine.binding.remote_prefills._spans._untimed) == 3


@pytest.fixture
def listener():
    """A port where connections are taken and nothing is answered; once it is closed, nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


@pytest.fixture(params=["grpc", "http/protobuf"])
def exporter(request, listener, monkeypatch):
    """vLLM's own exporter to that port, behind OpenTelemetry's queue, here of eight spans. Has `entered`, which is set
    when it begins to send, and `results`."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", request.param)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "3")
    exporter = get_span_exporter(f"http://127.0.0.1:{listener.getsockname()[1]}")
    exporter.entered, exporter.results, export = threading.Event(), [], exporter.export

    def noted(batch):
        exporter.entered.set()
        exporter.results.append(export(batch))
        return exporter.results[-1]

    monkeypatch.setattr(exporter, "export", noted)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=8, max_export_batch_size=8,
                                                   schedule_delay_millis=1))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    exporter.provider = provider
    yield exporter
    provider.shutdown()


def run_remotely(engine) -> None:
    """Twelve requests, with more spans than that queue has places."""
    for number in range(0, 12, 4):
        ids = [f"r{number + more}" for more in range(4)]
        for more, request_id in enumerate(ids):
            engine.add(request_id, prompt(100 + number + more), trace_headers=HEADERS)
        engine.run()
        for request_id in ids:
            engine.prefilled(request_id)
        end(engine)


@pytest.mark.parametrize("in_flight", ["sync"], indirect=True)
def test_a_collector_that_does_not_answer_holds_no_request(engine, exporter):
    """All requests end while the exporter waits for its first answer. What its queue has no space for is dropped."""
    engine.add("a", prompt(99), trace_headers=HEADERS)
    engine.run()
    assert exporter.entered.wait(60)
    engine.prefilled("a")
    run_remotely(engine)
    assert exporter.results == [], "nothing was sent before all requests had ended"
    assert not engine.binding.remote_prefills._spans._parked


@pytest.mark.parametrize("in_flight", ["sync"], indirect=True)
def test_a_port_where_nobody_listens_holds_no_request_and_is_named_in_the_log(engine, listener, exporter, caplog):
    listener.close()
    with caplog.at_level(logging.WARNING):
        run_remotely(engine)
        exporter.provider.shutdown()  # after its last attempt
    assert exporter.results and not any(result.value == 0 for result in exporter.results)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")]
    port = str(exporter._endpoint).rpartition(":")[2].strip("/")
    assert any("exporting" in line and port in line and "refused" in line for line in lines), lines
    assert any(line.startswith("Failed to export") for line in lines), lines
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
