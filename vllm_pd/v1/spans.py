# SPDX-License-Identifier: Apache-2.0
"""What a decode engine does with a prompt, as OpenTelemetry spans in the trace of its client.

vLLM makes its own span of a request (`llm_request`) in the front end. Ours are made in EngineCore, with the tracer that
vLLM has set up there, and have the same parent, the client's:

    pd_decide             no time passes: where the prompt is prefilled, and the reason
    pd_remote_prefill     from the moment it is parked until its KV has come, or will not; in it the stages
      pd_queue, pd_claim, pd_prefill, pd_transfer     as the prefill engine measured and reported them

A request has headers of a trace only where its client sent some and the engine has `--otlp-traces-endpoint`: else
nothing is done here. A prefill engine sends no spans: D has its measurements, and a trace has the clock of one host.
"""
from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace  # which vLLM requires
from vllm.tracing import extract_trace_context

from vllm_pd.protocol.actions import Event, Fallback, Prefilled, Timed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from vllm_pd.decisions.policy import Decision
    from vllm_pd.protocol.messages import Attempt, Timings

logger = logging.getLogger("vllm.pd")

MAX_UNTIMED = 256  # attempts that are done, and whose stages may still come
STAGES = ("queue", "claim", "prefill", "transfer")


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Nothing that OpenTelemetry raises may end a step, and with it the engine."""

    @functools.wraps(method)
    def guarded(*arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception:
            logger.exception("a span could not be made")

    return guarded


class PromptSpans:
    """The spans of one engine's prompts. Used from its step loop only; the exporter has a thread and a bounded queue of
    its own, which are vLLM's. A span that is open when the engine ends is not sent."""

    def __init__(self) -> None:
        self._parked: dict[Attempt, tuple[Span, int]] = {}  # and when it began, in ns
        self._untimed: dict[Attempt, tuple[Span, int]] = {}

    @_guarded
    def decided(self, headers: Mapping[str, str] | None, decision: Decision, tokens: int,
                refused: bool = False) -> None:
        """A prompt of so many tokens stays, or goes to a prefill engine, or is `refused`. `headers`: of the client's
        trace."""
        if headers:
            at = time.time_ns()
            where = "refused" if refused else "remote" if decision.remote else "local"
            self._begin("pd_decide", headers, at, {"pd.decision": where, "pd.reason": decision.reason.value,
                                                   "pd.tokens": tokens}).end(at)

    @_guarded
    def parked(self, attempt: Attempt, headers: Mapping[str, str] | None, tokens: int, cached_tokens: int) -> None:
        """Its prompt waits for a peer from now on, which is to compute all tokens but the cached ones."""
        if headers:
            at = time.time_ns()
            self._parked[attempt] = self._begin("pd_remote_prefill", headers, at, {
                "pd.attempt": attempt.number, "pd.tokens": tokens, "pd.cached_tokens": cached_tokens}), at

    @_guarded
    def handle(self, event: Event) -> None:
        """An event of the protocol ends the attempt, or says where its time went."""
        if isinstance(event, Prefilled):
            self._end(event.attempt, "done", event.peer, event.timings)
        elif isinstance(event, Timed) and event.attempt in self._untimed:
            self._add_stages(*self._untimed.pop(event.attempt), event.timings)
        elif isinstance(event, Fallback):
            self._end(event.attempt, event.outcome.value, event.peer, fault=event.reason.value, detail=event.detail)

    @_guarded
    def aborted(self, attempt: Attempt) -> None:
        """The client is gone, or its blocks are needed."""
        self._end(attempt, "cancelled", "")

    def _end(self, attempt: Attempt, outcome: str, peer: str, timings: Timings | None = None, fault: str = "",
             detail: str = "") -> None:
        """The span of an attempt ends, with its stages as soon as they are known."""
        span, began = self._parked.pop(attempt, (None, 0))
        if span is None:
            return
        span.set_attributes({"pd.outcome": outcome, "pd.peer": peer})
        if fault:
            span.set_attributes({"pd.fault": fault})
            span.set_status(trace.StatusCode.ERROR, detail)
        span.end(time.time_ns())
        if timings is not None and timings.measured:
            self._add_stages(span, began, timings)
        elif timings is not None:
            self._untimed[attempt] = span, began
            if len(self._untimed) > MAX_UNTIMED:
                del self._untimed[next(iter(self._untimed))]

    def _add_stages(self, span: Span, began: int, timings: Timings) -> None:
        inside, at = trace.set_span_in_context(span), began
        for stage in STAGES:
            until = at + round(getattr(timings, f"{stage}_s") * 1e9)
            more = {"pd.bytes": timings.bytes} if stage == "transfer" else {}
            trace.get_tracer(__name__).start_span(f"pd_{stage}", inside, start_time=at, attributes=more).end(until)
            at = until

    def _begin(self, name: str, headers: Mapping[str, str], at: int, attributes: dict[str, Any]) -> Span:
        return trace.get_tracer(__name__).start_span(name, extract_trace_context(headers), start_time=at,
                                                     attributes=attributes)
