# SPDX-License-Identifier: Apache-2.0
"""What an engine counts about handing prefills over, as it appears on /metrics."""

from vllm_pd.metrics import FamilyCollector
from vllm_pd.peer.degraded import DegradedReason

STAGES = ("queue", "claim", "prefill", "transfer", "first_step")
OUTCOMES = ("done", "failed", "cancelled", "expired")
READ_OUTCOMES = ("done", "failed", "late")
HOLD_EVENTS = ("made", "full", "done", "dropped", "expired", "lost", "closed", "unused")
ROLES = ("kv_both", "kv_producer", "kv_consumer")


class HandoverFamilies(FamilyCollector):
    """What is counted about hand-overs; docs/operations.md says what each means."""

    def __init__(self, by_engine: bool = False) -> None:
        super().__init__(by_engine)
        counter, gauge, histogram = self.counter, self.gauge, self.histogram
        self.decisions = counter("vllm:pd_decisions_total", "Where prompts were prefilled, or that they were "
                                 "refused, and why.",
                                 "decision", "reason")
        self.asked = counter("vllm:pd_asked_total", "Requests that asked for a place, and where they were prefilled.",
                             "asked", "decision")
        self.attempts = counter("vllm:pd_attempts_total", "Remote prefills by how they ended.", "outcome")
        self.handover = histogram(
            "vllm:pd_handover_seconds", "Time of a remote prefill by stage: queue (submitted to taken by a prefill "
            "engine), claim (taken to granted), prefill, transfer, first_step (scheduled again to first token).",
            "stage")
        self.parked = histogram(
            "vllm:pd_parked_seconds", "How long a request was parked that was prefilled remotely, until it was "
            "scheduled again.")
        self.parked_blocks = gauge("vllm:pd_parked_blocks", "KV blocks of requests that wait for a remote prefill.")
        self.quarantined_blocks = gauge("vllm:pd_quarantined_blocks", "KV blocks of given-up attempts and jobs that a "
                                        "transfer might still fill.")
        self.waiting_fallbacks = gauge("vllm:pd_waiting_fallbacks", "Prompts that can't be prefilled remotely at "
                                       "present and may not be prefilled here (fallback: bounded or refuse).")
        self.sending_blocks = gauge("vllm:pd_sending_blocks", "KV blocks that this engine is sending to a decode one.")
        self.held_blocks = gauge("vllm:pd_held_blocks", "KV blocks that this engine keeps for decode engines to read.")
        self.holds = counter("vllm:pd_holds_total", "Prompts kept for decode engines to read, by what became of them.",
                             "event")
        self.role = gauge("vllm:pd_role", "1 for the role in which this engine acts at present.", "role", ended=False)
        self.draining = gauge("vllm:pd_draining", "1 once this engine takes nothing new.")
        self.control_dead = gauge("vllm:pd_control_dead", "1 once this engine's control thread has ended.")
        self.degraded = gauge("vllm:pd_degraded", "1 for the reason why this engine has nobody to work with, if there "
                              "is one.", "reason", ended=False)
        self.transfer_bytes = counter("vllm:pd_transfer_bytes_total", "KV bytes of completed hand-overs.")
        self.jobs = counter("vllm:pd_jobs_total", "Prompts of other engines' clients that were prefilled here.")
        self.job_tokens = counter("vllm:pd_job_tokens_total", "Their tokens, prefix hits and reads included.")
        self.prefix_reads = counter("vllm:pd_prefix_reads_total", "Reads of a prompt's beginning from the decode "
                                    "engine's cache by how they ended: done, failed, or late (over after its use).",
                                    "outcome")
        self.prefix_read_bytes = counter("vllm:pd_prefix_read_bytes_total", "KV bytes of completed prefix reads.")
        self.frames_dropped = counter("vllm:pd_frames_dropped_total", "Control messages that were refused.", "kind")


class PDMetrics:
    """The figures of one engine. Created and used by the engine binding, in the thread of the step loop.

    Gauges are attributes with `.set(number)`. No method raises for a new label value. `engine` is its number in the
    front end; None: the figures have no such label.
    """

    def __init__(self, model_name: str, engine: int | None = None) -> None:
        self._families, self._labels = families, labels = HandoverFamilies.of_engine(model_name, engine)
        self.parked_blocks = families.parked_blocks.labels(*labels)
        self.quarantined_blocks = families.quarantined_blocks.labels(*labels)
        self.sending_blocks = families.sending_blocks.labels(*labels)
        self.held_blocks = families.held_blocks.labels(*labels)
        self.waiting_fallbacks = families.waiting_fallbacks.labels(*labels)
        for event in HOLD_EVENTS:
            families.holds.labels(*labels, event)
        self._transfer_bytes = families.transfer_bytes.labels(*labels)
        self._handover = {stage: families.handover.labels(*labels, stage) for stage in STAGES}
        self._parked = families.parked.labels(*labels)
        for one in DegradedReason:
            families.degraded.labels(*labels, one.value)
        for outcome in OUTCOMES:
            families.attempts.labels(*labels, outcome)
        self._jobs = families.jobs.labels(*labels)
        self._job_tokens = families.job_tokens.labels(*labels)
        self._prefix_read_bytes = families.prefix_read_bytes.labels(*labels)
        for outcome in READ_OUTCOMES:
            families.prefix_reads.labels(*labels, outcome)

    def degraded(self, reason: str | None) -> None:
        """Set why the engine is degraded (a value of `peer.degraded.DegradedReason`); None where it is not."""
        for one in DegradedReason:
            self._families.degraded.labels(*self._labels, one.value).set(one.value == reason)

    def engine_state(self, role: str, draining: bool, control_dead: bool) -> None:
        """Set the engine's present role, whether it drains, and whether its control thread has ended."""
        for one in ROLES:
            self._families.role.labels(*self._labels, one).set(one == role)
        self._families.draining.labels(*self._labels).set(draining)
        self._families.control_dead.labels(*self._labels).set(control_dead)

    def decision(self, decision: str, reason: str) -> None:
        """Count one prompt's final decision, "remote", "local" or "refused". `reason` is a value of
        `decisions.policy.Reason`."""
        self._families.decisions.labels(*self._labels, decision, reason).inc()

    def asked(self, asked: str, decision: str) -> None:
        """Count one such decision of a prompt whose request asks for a place (`decisions.policy.AskedPlace`)."""
        self._families.asked.labels(*self._labels, asked, decision).inc()

    def attempt(self, outcome: str) -> None:
        """Count one attempt that has ended. `outcome` is one of OUTCOMES."""
        self._families.attempts.labels(*self._labels, outcome).inc()

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
        self._families.prefix_reads.labels(*self._labels, outcome).inc()
        self._prefix_read_bytes.inc(count)

    def hold(self, event: str) -> None:
        """Count what became of a hold (see HOLD_EVENTS), here or, for `unused`, of one that a request named."""
        self._families.holds.labels(*self._labels, event).inc()

    def frames_dropped(self, kind: str, count: int = 1) -> None:
        """Count control messages that changed nothing. docs/operations.md lists the kinds."""
        self._families.frames_dropped.labels(*self._labels, kind).inc(count)
