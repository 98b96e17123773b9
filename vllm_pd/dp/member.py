# SPDX-License-Identifier: Apache-2.0
"""What both backends share: the lock around the participant, the watching thread, and what happens at a failure.

The watching thread learns of a failure first. It wakes the engine loop, whose next call raises GroupFailed. If the loop
does not come within `grace_s`, because it is stuck in a collective with a dead rank, `abort` ends the process.
"""
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from vllm_pd.dp.calls import CallAction, CallState
from vllm_pd.dp.core import Lookahead, Participant, StepRequest
from vllm_pd.dp.horizon import Meter
from vllm_pd.dp.interface import Abort, CallOutcome, GroupFailed, StepDecision, SyncCounters, SyncSettings, Wake
from vllm_pd.dp.liveness import GroupLiveness
from vllm_pd.rpc.sockets import Waker

log = logging.getLogger("vllm.pd")

PATIENCE_S = 1.0  # how long rank 0 lets a call that not all ranks are ready for block other calls

AWAY = ("its engine loop has not returned to its steps for stall_s, although a call for all ranks waits for it: "
        "find out what blocks the loop")


def end_process(error: GroupFailed) -> None:
    """The default `abort`: end this process with exit code 1. Nothing gentler reaches a thread in a collective."""
    sys.stderr.write(f"vllm-pd: data-parallel group failed, ending this process: {error}\n")
    sys.stderr.flush()
    os._exit(1)


def end_engine(engine: Any) -> None:
    """An `abort` for vLLM's engine, whose loop is stuck in a collective with a dead rank: report that to its front
    ends, and end this process."""
    try:
        engine._send_engine_dead()
    finally:
        os._exit(1)


class BaseMember(ABC):
    """Implements `interface.GroupMember`, except how to read and publish the state, which is up to a backend. Runs the
    backend's `_watch` on a thread of its own."""

    def __init__(self, rank: int, size: int, settings: SyncSettings, wake: Wake, abort: Abort):
        self.rank = rank
        self.size = size
        self.counters = SyncCounters()
        self._settings = settings
        self._wake_engine = wake
        self._abort = abort
        self._lock = threading.Lock()
        self._participant = Participant(call_state=CallState(leads=rank == 0))
        self._meter = Meter(size, settings.horizon)
        self._error: GroupFailed | None = None
        self._noticed = threading.Event()
        self._waker = Waker()
        self._closing = threading.Event()
        self._end_expected = False
        self._visits = 0  # how often the engine loop has called this member
        self._visits_checked = 0
        self._loop_watch = GroupLiveness([], settings.timeout_s, settings.stall_s)
        self._proposed_s = 0.0
        self._begun_at = 0.0
        self._had_work = False
        self._thread = threading.Thread(target=self._run, name=f"vllm-pd-dp-{rank}", daemon=True)

    # For the engine loop: see interface.GroupMember.
    @property
    def due(self) -> bool:
        """See GroupMember."""
        self._visits += 1
        return self._is_due()

    def _is_due(self) -> bool:
        if self._error is not None:
            return True
        if self._closing.is_set():
            return False
        with self._lock:
            self._refresh()
            return self._participant.due or self._call_blocks_others

    @property
    def _call_blocks_others(self) -> bool:
        """Whether rank 0 has let its proposed call block others for too long. Locked."""
        return self._participant.call_state.blocks_others and time.monotonic() > self._proposed_s + PATIENCE_S

    def before_step(self, has_work: bool, max_remaining_tokens: int | None = None) -> StepDecision:
        """See GroupMember."""
        self._raise_error()
        with self._lock:
            self._ended_call()
            self._refresh()
            participant = self._participant
            early = self._had_work and not has_work and participant.local < participant.agreed
            decision, request = participant.begin(has_work, max_remaining_tokens, self._lookahead())
            if request is not None:
                self._publish_request(request)
        self._count(decision, request)
        if has_work:
            self._meter.worked()
        elif self._had_work:
            self._meter.ran_out(early)
        self._had_work = has_work
        self._begun_at = time.monotonic()
        return decision

    def after_step(self) -> None:
        """See GroupMember."""
        self._meter.stepped(time.monotonic() - self._begun_at)
        with self._lock:
            self._participant.end()
            self._publish_end()

    @property
    def may_step(self) -> bool:
        """See GroupMember."""
        with self._lock:
            return self._participant.may_step

    @property
    def engaged(self) -> bool:
        """See GroupMember."""
        with self._lock:
            return self._participant.engaged

    def hold(self, name: int) -> None:
        """See GroupMember."""
        with self._lock:
            self._participant.hold(name)

    def next_call(self) -> tuple[CallOutcome, int] | None:
        """See GroupMember."""
        self._raise_error()
        with self._lock:
            self._ended_call()
            self._refresh()
            if self._call_blocks_others and self._participant.postpone():
                self._publish_call()
            while advanced := self._participant.advance():
                action, name = advanced
                if action is CallAction.MAKE:
                    self.counters.calls += 1
                    return CallOutcome.MAKE, name
                if action is CallAction.RESUME:
                    return CallOutcome.POSTPONED, name
                if action is CallAction.PROPOSE:
                    self._proposed_s = time.monotonic()
                self._publish_call()
            return None

    def give_up(self, name: int) -> bool:
        """See GroupMember."""
        with self._lock:
            given_up = self._participant.give_up(name)
            if given_up:
                self._publish_call()
            return given_up

    def leave(self) -> None:
        """See GroupMember."""
        self._raise_error()
        with self._lock:
            self._participant.leave()
            self._publish_leave()

    def expect_end(self) -> None:
        """See GroupMember."""
        self._end_expected = True

    def close(self) -> None:
        """See GroupMember."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._noticed.set()
        self._before_close()
        self._waker.set()
        self._thread.join(self._settings.timeout_s)
        if self._thread.is_alive():
            log.error("the thread %s does not end", self._thread.name)
            return
        self._release()
        self._waker.close()

    @property
    def messages(self) -> int:
        """See GroupMember."""
        return self.counters.messages

    # For the backends. `_lock` is held during each of them, except `_before_close`, `_watch` and `_release`.
    def _lookahead(self) -> Lookahead:
        return self._meter.lookahead

    @abstractmethod
    def _refresh(self) -> None:
        """Update the participant, as far as that needs no message."""

    @abstractmethod
    def _publish_request(self, request: StepRequest) -> None:
        """Publish a step request. Must not block."""

    def _ended_call(self) -> None:
        """The engine loop has called, so a call that it made has ended. Locked."""
        self._visits += 1
        if self._participant.calling:
            self._participant.made()
            self._publish_end()

    @abstractmethod
    def _publish_end(self) -> None:
        """Publish that a forward or a call has ended. Must not block."""

    @abstractmethod
    def _publish_call(self) -> None:
        """Publish a change of the call state. Must not block."""

    @abstractmethod
    def _publish_leave(self) -> None:
        """Publish that the rank leaves. Must not block."""

    @abstractmethod
    def _before_close(self) -> None:
        """Publish that this rank closes."""

    @abstractmethod
    def _watch(self) -> None:
        """The loop of the watching thread. Returns after `_closing` is set or `_fail` was called."""

    @abstractmethod
    def _release(self) -> None:
        """Close what the backend holds. The thread has ended."""

    def _loop_is_away(self, now: float) -> bool:
        """Whether the engine loop has not called for `stall_s` although the other ranks wait for it to handle a call.
        Wakes the loop, because an idle one would not call otherwise. The watching thread must call this at least every
        `beat_s` while there is a call.
        """
        with self._lock:
            awaited = self._participant.awaited
        visits, seen = self._visits, self._visits_checked
        self._visits_checked = visits
        if not awaited:
            self._loop_watch.reset()
            return False
        if visits == seen:
            self._wake_engine()
        return self._loop_watch.check(now, visits) is not None

    def _fail(self, text: str) -> None:
        """Record that the group has failed, and wake the engine loop. Called on the watching thread."""
        if self._error is None:
            self._error = GroupFailed(f"rank {self.rank} of {self.size}: {text}")
            log.error("data-parallel group failed: %s", self._error)
            self._wake_engine()

    @property
    def _failed(self) -> bool:
        return self._error is not None

    def _raise_error(self) -> None:
        if self._closing.is_set():
            raise GroupFailed(f"rank {self.rank} of {self.size} has been closed; it can't run another forward")
        if self._error is not None:
            self._noticed.set()
            raise self._error

    def _count(self, decision: StepDecision, request: StepRequest | None) -> None:
        if decision in (StepDecision.FORWARD, StepDecision.DUMMY):
            self.counters.forwards += 1
        if decision is StepDecision.DUMMY:
            self.counters.dummies += 1
        if request is not None:
            self.counters.asks += 1
            self.counters.urgent += request.urgent

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the group must not go on without its watching thread
            log.exception("unexpected error in the thread that watches a data-parallel group")
            self._fail(f"unexpected error in the thread that watches the group: {error!r}")
        if self._error is not None and not self._noticed.wait(self._settings.grace_s):
            self._abort(self._error)
