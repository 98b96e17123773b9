# SPDX-License-Identifier: Apache-2.0
"""What an engine counts about handing prefills over, as it appears on /metrics beside upstream's own figures.

Under `vllm serve` the engine is a process of its own: prometheus_client writes its values to PROMETHEUS_MULTIPROC_DIR,
and the front end adds them up.
"""

import functools
from collections.abc import Iterator
from typing import Self

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_pd.control.degraded import Cause

STAGES = ("queue", "claim", "prefill", "transfer", "first_step")
OUTCOMES = ("done", "failed", "cancelled", "expired")
READ_OUTCOMES = ("done", "failed", "late")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
HANDOVER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)


class FamilyCollector(Collector):
    """A collector of all metric families that a subclass has as attributes. They live as long as the process. All its
    engines share them and differ in the label `model_name`.

    The families are not registered one by one: upstream's stat logger, which is built after the scheduler, drops every
    collector whose `_name` contains "vllm", and a second engine in the process would register the same names twice.
    """
    counter = staticmethod(functools.partial(prometheus_client.Counter, registry=None))
    gauge = staticmethod(functools.partial(prometheus_client.Gauge, labelnames=["model_name"], registry=None,
                                           multiprocess_mode="sum"))

    @classmethod
    @functools.cache
    def of_process(cls) -> Self:
        """The process's only object of this class, registered for /metrics."""
        families = cls()
        prometheus_client.REGISTRY.register(families)
        return families

    def collect(self) -> Iterator[Metric]:
        """The families with their samples."""
        for family in vars(self).values():
            yield from family.collect()

    def describe(self) -> Iterator[Metric]:
        """The families without samples."""
        for family in vars(self).values():
            yield from family.describe()


class HandoverFamilies(FamilyCollector):
    """What is counted about hand-overs; docs/operations.md says what each means."""

    def __init__(self) -> None:
        labels, counter, gauge = ["model_name"], self.counter, self.gauge
        self.decisions = counter("vllm:pd_decisions_total", "Where prompts were prefilled, and why.",
                                 labels + ["decision", "reason"])
        self.attempts = counter("vllm:pd_attempts_total", "Remote prefills by how they ended.", labels + ["outcome"])
        self.handover = prometheus_client.Histogram(
            "vllm:pd_handover_seconds", "Time of a remote prefill by stage: queue (submitted to taken by a prefill "
            "engine), claim (taken to granted), prefill, transfer, first_step (scheduled again to first token).",
            labels + ["stage"], buckets=HANDOVER_BUCKETS_S, registry=None)
        self.parked = prometheus_client.Histogram(
            "vllm:pd_parked_seconds", "How long a request was parked that was prefilled remotely, until it was "
            "scheduled again.", labels, buckets=HANDOVER_BUCKETS_S, registry=None)
        self.parked_blocks = gauge("vllm:pd_parked_blocks", "KV blocks of requests that wait for a remote prefill.")
        self.quarantined_blocks = gauge("vllm:pd_quarantined_blocks", "KV blocks of given-up attempts that a prefill "
                                        "engine might still write.")
        self.sending_blocks = gauge("vllm:pd_sending_blocks", "KV blocks that this engine is sending to a decode one.")
        self.role = prometheus_client.Gauge("vllm:pd_role", "1 for the role in which this engine acts at present.",
                                            labels + ["role"], registry=None, multiprocess_mode="livesum")
        self.draining = gauge("vllm:pd_draining", "1 once this engine takes nothing new.")
        self.control_dead = gauge("vllm:pd_control_dead", "1 once this engine's control thread has ended.")
        self.degraded = prometheus_client.Gauge(
            "vllm:pd_degraded", "1 for the reason why this engine has nobody to work with, if there is one.",
            labels + ["reason"], registry=None, multiprocess_mode="livesum")
        self.transfer_bytes = counter("vllm:pd_transfer_bytes_total", "KV bytes of completed hand-overs.", labels)
        self.jobs = counter("vllm:pd_jobs_total", "Prompts of other engines' clients that were prefilled here.", labels)
        self.job_tokens = counter("vllm:pd_job_tokens_total", "Their tokens, prefix hits and reads included.", labels)
        self.prefix_reads = counter("vllm:pd_prefix_reads_total", "Reads of a prompt's beginning from the decode "
                                    "engine's cache by how they ended: done, failed, or late (over after its use).",
                                    labels + ["outcome"])
        self.prefix_read_bytes = counter("vllm:pd_prefix_read_bytes_total", "KV bytes of completed prefix reads.",
                                         labels)
        self.frames_dropped = counter("vllm:pd_frames_dropped_total", "Control messages that were refused.",
                                      labels + ["kind"])


class PDMetrics:
    """The figures of one engine. Created and used by the engine binding, in the thread of the step loop.

    Gauges are attributes with `.set(blocks)`. No method raises for a new label value.
    """

    def __init__(self, model_name: str) -> None:
        self._families = families = HandoverFamilies.of_process()
        self._model_name = model_name
        self.parked_blocks = families.parked_blocks.labels(model_name)
        self.quarantined_blocks = families.quarantined_blocks.labels(model_name)
        self.sending_blocks = families.sending_blocks.labels(model_name)
        self._transfer_bytes = families.transfer_bytes.labels(model_name)
        self._handover = {stage: families.handover.labels(model_name, stage) for stage in STAGES}
        self._parked = families.parked.labels(model_name)
        for cause in Cause:
            families.degraded.labels(model_name, cause.value)
        for outcome in OUTCOMES:
            families.attempts.labels(model_name, outcome)
        self._jobs = families.jobs.labels(model_name)
        self._job_tokens = families.job_tokens.labels(model_name)
        self._prefix_read_bytes = families.prefix_read_bytes.labels(model_name)
        for outcome in READ_OUTCOMES:
            families.prefix_reads.labels(model_name, outcome)

    def degraded(self, reason: str | None) -> None:
        """Set why the engine is degraded (a value of `control.degraded.Cause`); None where it is not."""
        for cause in Cause:
            self._families.degraded.labels(self._model_name, cause.value).set(cause.value == reason)

    def standing(self, role: str, draining: bool, control_dead: bool) -> None:
        """Set the engine's present role, whether it drains, and whether its control thread has ended."""
        for one in ROLES:
            self._families.role.labels(self._model_name, one).set(one == role)
        self._families.draining.labels(self._model_name).set(draining)
        self._families.control_dead.labels(self._model_name).set(control_dead)

    def decision(self, decision: str, reason: str) -> None:
        """Count one prompt's final decision, "remote" or "local". `reason` is a value of `core.policy.Reason`."""
        self._families.decisions.labels(self._model_name, decision, reason).inc()

    def attempt(self, outcome: str) -> None:
        """Count one attempt that has ended. `outcome` is one of OUTCOMES."""
        self._families.attempts.labels(self._model_name, outcome).inc()

    def handover(self, stage: str, seconds: float) -> None:
        """Record the duration of one stage (see STAGES) of one hand-over."""
        self._handover[stage].observe(seconds)

    def parked(self, seconds: float) -> None:
        """Record for how long a request was parked whose KV has arrived."""
        self._parked.observe(seconds)

    def transfer_bytes(self, count: int) -> None:
        """Count the KV bytes of a hand-over that is done."""
        self._transfer_bytes.inc(count)

    def job(self, tokens: int) -> None:
        """Count a peer's prompt of so many tokens that was prefilled here."""
        self._jobs.inc()
        self._job_tokens.inc(tokens)

    def prefix_read(self, outcome: str, count: int) -> None:
        """Count one prefix read that has ended (see READ_OUTCOMES), and its bytes that are used."""
        self._families.prefix_reads.labels(self._model_name, outcome).inc()
        self._prefix_read_bytes.inc(count)

    def frames_dropped(self, kind: str, count: int = 1) -> None:
        """Count control messages that changed nothing. docs/operations.md lists the kinds."""
        self._families.frames_dropped.labels(self._model_name, kind).inc(count)
