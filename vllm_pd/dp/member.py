# SPDX-License-Identifier: Apache-2.0
"""What both rims have in common: the lock around the participant, the watching thread, and what a failure does.

A failure is known on the watching thread first. It wakes the engine loop, whose next call raises GroupFailed; if the
loop does not come, being stuck in a collective with a dead peer, `abort` ends the process after `grace_s`.
"""
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod

from vllm_pd.dp.calls import Move, Turns
from vllm_pd.dp.core import Ask, Participant, Reach
from vllm_pd.dp.horizon import Meter
from vllm_pd.dp.interface import Abort, CallEnd, Counters, Decision, GroupFailed, Settings, Wake
from vllm_pd.dp.liveness import Liveness
from vllm_pd.rpc.sockets import Waker

log = logging.getLogger("vllm.pd")

PATIENCE_S = 1.0  # for how long rank 0 keeps others waiting for a call that not all ranks are ready for

AWAY = ("its engine loop has not come back to its steps for stall_s while a call that all ranks make waits for it: "
        "look for what holds it elsewhere")


def end_process(error: GroupFailed) -> None:
    """The default `abort`. Nothing gentler reaches a thread that is stuck in a collective."""
    sys.stderr.write(f"vllm-pd: data-parallel group failed, ending this process: {error}\n")
    sys.stderr.flush()
    os._exit(1)


class BaseMember(ABC):
    """See interface.Member. A rim says how to read and to publish the agreed step, and runs `_watch` on its thread."""

    def __init__(self, rank: int, size: int, settings: Settings, wake: Wake, abort: Abort):
        self.rank = rank
        self.size = size
        self.counters = Counters()
        self._settings = settings
        self._engine_wake = wake
        self._abort = abort
        self._lock = threading.Lock()
        self._participant = Participant(turns=Turns(leads=rank == 0))
        self._meter = Meter(size, settings.horizon)
        self._error: GroupFailed | None = None
        self._noticed = threading.Event()
        self._waker = Waker()
        self._closing = threading.Event()
        self._ends = False
        self._visits = 0  # of the engine loop
        self._visits_seen = 0
        self._loop_watch = Liveness([], settings.timeout_s, settings.stall_s)
        self._proposed_s = 0.0
        self._begun_at = 0.0
        self._had_work = False
        self._thread = threading.Thread(target=self._run, name=f"vllm-pd-dp-{rank}", daemon=True)

    # For the engine loop.
    @property
    def due(self) -> bool:
        """See interface.Member."""
        self._visits += 1
        return self._is_due()

    def _is_due(self) -> bool:
        if self._error is not None:
            return True
        if self._closing.is_set():
            return False
        with self._lock:
            self._refresh()
            return self._participant.due or self._is_in_the_way

    @property
    def _is_in_the_way(self) -> bool:
        """Whether the call that this rank, rank 0, has proposed keeps others waiting. Locked."""
        return self._participant.turns.in_the_way and time.monotonic() > self._proposed_s + PATIENCE_S

    def before_step(self, has_work: bool, max_remaining_tokens: int | None = None) -> Decision:
        """See interface.Member."""
        self._raise_error()
        with self._lock:
            self._ended_call()
            self._refresh()
            participant = self._participant
            early = self._had_work and not has_work and participant.local < participant.agreed
            decision, ask = participant.begin(has_work, max_remaining_tokens, self._reach())
            if ask is not None:
                self._publish(ask)
        self._count(decision, ask)
        if has_work:
            self._meter.worked()
        elif self._had_work:
            self._meter.ran_out(early)
        self._had_work = has_work
        self._begun_at = time.monotonic()
        return decision

    def after_step(self) -> None:
        """See interface.Member."""
        self._meter.stepped(time.monotonic() - self._begun_at)
        with self._lock:
            self._participant.end()
            self._publish_end()

    @property
    def may_step(self) -> bool:
        """See interface.Member."""
        with self._lock:
            return self._participant.may_step

    @property
    def engaged(self) -> bool:
        """See interface.Member."""
        with self._lock:
            return self._participant.engaged

    def hold(self, name: int) -> None:
        """See interface.Member."""
        with self._lock:
            self._participant.hold(name)

    def next_call(self) -> tuple[CallEnd, int] | None:
        """See interface.Member."""
        self._raise_error()
        with self._lock:
            self._ended_call()
            self._refresh()
            if self._is_in_the_way and self._participant.put_off():
                self._publish_call()
            while moved := self._participant.advance():
                move, name = moved
                if move is Move.MAKE:
                    self.counters.calls += 1
                    return CallEnd.MAKE, name
                if move is Move.RELAX:
                    return CallEnd.PUT_OFF, name
                if move is Move.PROPOSE:
                    self._proposed_s = time.monotonic()
                self._publish_call()
            return None

    def give_up(self, name: int) -> bool:
        """See interface.Member."""
        with self._lock:
            given_up = self._participant.give_up(name)
            if given_up:
                self._publish_call()
            return given_up

    def leave(self) -> None:
        """See interface.Member."""
        self._raise_error()
        with self._lock:
            self._participant.leave()
            self._publish_leave()

    def ends(self) -> None:
        """See interface.Member."""
        self._ends = True

    def close(self) -> None:
        """See interface.Member."""
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
        """Sent by this process."""
        return self.counters.messages

    # For the rims.
    def _reach(self) -> Reach:
        return self._meter.reach

    @abstractmethod
    def _refresh(self) -> None:
        """Bring the participant up to date, where that needs no message. Locked."""

    @abstractmethod
    def _publish(self, ask: Ask) -> None:
        """Make an ask known. Locked; must not block."""

    def _ended_call(self) -> None:
        """The engine loop is here, so it is in no call. Locked."""
        self._visits += 1
        if self._participant.calling:
            self._participant.made()
            self._publish_end()

    @abstractmethod
    def _publish_end(self) -> None:
        """A forward has ended, or a call. Locked; must not block."""

    @abstractmethod
    def _publish_call(self) -> None:
        """There is news about a call. Locked; must not block."""

    @abstractmethod
    def _publish_leave(self) -> None:
        """The rank leaves. Locked; must not block."""

    @abstractmethod
    def _before_close(self) -> None:
        """Say good-bye, if there is anyone to say it to."""

    @abstractmethod
    def _watch(self) -> None:
        """The thread's loop, until `_closing` or `_fail`."""

    @abstractmethod
    def _release(self) -> None:
        """Close what the rim holds. The thread has ended."""

    def _wake_engine(self) -> None:
        self.counters.wakes += 1
        self._engine_wake()

    def _loop_is_away(self, now: float) -> bool:
        """Whether the engine loop has not come by for `stall_s` while others can't go on with a call without it. Wakes
        it, as an idle one comes by only then. On the watching thread, at least every `beat_s` while there is a call.
        """
        with self._lock:
            awaited = self._participant.awaited
        visits, seen = self._visits, self._visits_seen
        self._visits_seen = visits
        if not awaited:
            self._loop_watch.quiet()
            return False
        if visits == seen:
            self._wake_engine()
        return self._loop_watch.look(now, visits) is not None

    def _fail(self, text: str) -> None:
        """The group is lost. On the watching thread."""
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

    def _count(self, decision: Decision, ask: Ask | None) -> None:
        if decision in (Decision.FORWARD, Decision.DUMMY):
            self.counters.forwards += 1
        if decision is Decision.DUMMY:
            self.counters.dummies += 1
        if ask is not None:
            self.counters.asks += 1
            self.counters.urgent += ask.urgent

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a thread must not die silently, and a group without its watch must not go on
            log.exception("the watch over a data-parallel group broke")
            self._fail(f"the watch over the group broke: {error!r}")
        if self._error is not None and not self._noticed.wait(self._settings.grace_s):
            self._abort(self._error)
