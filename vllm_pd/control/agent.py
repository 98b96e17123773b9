# SPDX-License-Identifier: Apache-2.0
"""An engine's door to its control thread: it calls in (`submit`, `abort`, `sent`, ...) and fetches events."""
import collections
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from vllm_pd.control.cluster import QueueView
from vllm_pd.control.degraded import Cause, Degraded
from vllm_pd.control.protocol import PeerProtocol
from vllm_pd.control.sockets import ControlSockets
from vllm_pd.control.state import EngineState
from vllm_pd.control.thread import ControlThread
from vllm_pd.core import messages as m
from vllm_pd.core.actions import Event, Fallback, FallbackReason, Outcome, Released
from vllm_pd.liveness import process
from vllm_pd.liveness.lifeline import Lifeline

if TYPE_CHECKING:
    from vllm_pd.config import PDConfig


class ControlAgent:
    """Built with the engine, `start`ed before its first step, `close`d after its last. All methods but these two may be
    called from any thread and don't block. After the thread has died (`error`) every request is told to stay local."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, wake: Callable[[], None],
                 clock: Callable[[], float] = time.monotonic,
                 is_gone: Callable[[m.Member], bool] = process.is_gone, front: str | None = None):
        self._config = config
        self._metadata = transfer_metadata
        self._wake = wake
        self._clock = clock
        self._is_gone = is_gone
        self._front = front
        self._lifeline: Lifeline | None = None
        self._thread: ControlThread | None = None
        self._link_counters: m.Counters = collections.Counter()
        self._sides = self._sides_of(member)

    def _sides_of(self, member: m.Member) -> PeerProtocol:
        return PeerProtocol(self._config, member, self._metadata, self._clock(), self._rouse)

    # Life.

    def start(self) -> None:
        """Bind, fill in the addresses of `member`, and run. ConfigError where `bind` or `broker` can't be used."""
        links = ControlSockets(self.member.incarnation, self._config, self._front)
        self._link_counters = links.counters
        self._lifeline = Lifeline(self.member.incarnation, urlsplit(links.address).hostname)
        self._sides = self._sides_of(msgspec.structs.replace(self.member, address=links.address,
                                                             lifeline=self._lifeline.address))
        self._thread = ControlThread(self._sides, links, self._lifeline, self._wake, self._clock, self._is_gone)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Leave the registry and end the thread. Open attempts are not waited for."""
        if self._thread is not None:
            self._thread.stop(timeout_s)

    def lifeline_fileno(self) -> int:
        """The lifeline's socket, for every other process of this engine that can write to a peer's memory: it holds it
        for as long as it can. After `start`."""
        return self._lifeline.fileno()

    def end_lifeline(self) -> None:
        """After `close`, once nothing of this engine can write to a peer's memory any more: the proof for its peers.
        Where this is never called, the end of the process is."""
        if self._lifeline is not None and not (self._thread is not None and self._thread.is_alive()):
            self._lifeline.close()

    @property
    def member(self) -> m.Member:
        """The registry entry as it was born; with addresses after `start`."""
        return self._sides.member

    @property
    def error(self) -> BaseException | None:
        """What the thread died of; None while it lives."""
        return None if self._thread is None else self._thread.error

    # For an operator.

    def drain(self) -> None:
        """Take nothing new from others, finish what is open, then leave the registry for good. Refusing the clients of
        this engine is its front end's part."""
        with self._lock:
            self._sides.drain(self._clock())

    def set_role(self, role: m.Role) -> str:
        """Act as `role` from now on; what is open is finished. Returns why not, empty where it is done."""
        with self._lock:
            return self._sides.set_role(self._clock(), role)

    @property
    def state(self) -> EngineState:
        """The present role, and whether the engine drains. To be read only."""
        return self._sides.state

    def set_load(self, load: m.Load) -> None:
        """How busy the engine is, after each look at its events."""
        with self._lock:
            self._sides.set_load(load)

    # For the engine, either role.

    def take_events(self) -> list[Event]:
        """All events since the last call, in order."""
        with self._lock:
            return self._sides.take_events()

    def view(self, avoid: Collection[str] = ()) -> QueueView:
        """What the policy wants to know of the world, for a request that shall not go to these Ps again."""
        with self._lock:
            return self._sides.view(self._clock(), avoid)

    def degraded(self) -> Degraded | None:
        """Why this engine can't do its part at present; None where it can."""
        with self._lock:
            if self.error is not None:
                return Degraded(Cause.CONTROL, f"the control thread ended: {self.error!r}")
            return self._sides.degraded(self._clock())

    def open_attempts(self) -> list[m.Attempt]:
        """Every attempt with a record, on either side: empty when all has ended and all fences are down."""
        with self._lock:
            return self._sides.open_attempts()

    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers, sockets."""
        with self._lock:
            return {**self._sides.counts(), "sockets": self._thread.count_sockets() if self._thread else 0}

    def totals(self) -> dict[str, int]:
        """Counters of what happened to attempts and jobs since the start."""
        with self._lock:
            return _merged(decode=self._sides.decode.counters, prefill=self._sides.prefill.counters)

    def dropped(self) -> dict[str, int]:
        """Counters of messages that changed nothing: malformed, late, duplicate, unknown, refused, unsent."""
        with self._lock:
            return _merged(decode=self._sides.decode.dropped, prefill=self._sides.prefill.dropped,
                           link=self._link_counters)

    # For a decode engine.

    def next_attempt(self, request_id: str) -> m.Attempt:
        """A new attempt for this request; its number is larger than that of any before it."""
        with self._lock:
            return self._sides.next_attempt(request_id)

    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None) -> None:
        """Have this prompt prefilled elsewhere, into `block_ids[cached_blocks:]`, by a P that is not to `avoid`. The
        blocks stay the caller's to keep until `Prefilled` or `Released`; exactly one of `Prefilled`, `Fallback` and the
        caller's own `abort` ends it, at the latest after `deadline_s` (the configured deadline where None)."""
        sides = self._sides
        with self._lock:
            if self.error is not None:
                sides.do([Fallback(attempt, FallbackReason.CONTROL, Outcome.FAILED, str(self.error)),
                          Released(attempt)])
                return
            sides.do(sides.decode.submit(self._clock(), attempt, token_ids, block_ids, cached_blocks, avoid,
                                         deadline_s))

    def abort(self, attempt: m.Attempt) -> None:
        """The request is gone; `Released` follows. No effect on an attempt that has ended."""
        with self._lock:
            self._sides.do(self._sides.decode.abort(self._clock(), attempt))

    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        """The transfer's notice: all of this rank's data is in our blocks."""
        with self._lock:
            self._sides.do(self._sides.decode.arrived(self._clock(), attempt, rank))

    # For a prefill engine.

    def set_credits(self, jobs: int) -> None:
        """How many jobs the engine could take beyond those that it has taken from `take_events`."""
        with self._lock:
            self._sides.set_credits(jobs)

    def may_write(self, attempt: m.Attempt) -> bool:
        """Whether the lease stands. To be asked right before each post of a write, and D is told that it comes."""
        with self._lock:
            return self._sides.begin_write(self._clock(), attempt)

    def lease_stands(self, attempt: m.Attempt) -> bool:
        """Whether the job is still wanted. D keeps what it granted either way."""
        with self._lock:
            return self._sides.prefill.may_write(self._clock(), attempt)

    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        """All handles of all ranks are done and released."""
        with self._lock:
            self._sides.do(self._sides.prefill.sent(self._clock(), attempt, timings))

    def failed(self, attempt: m.Attempt, reason: str) -> None:
        """The engine gave it up; no handle of it exists any more."""
        with self._lock:
            self._sides.do(self._sides.prefill.failed(self._clock(), attempt, reason))

    def ended(self, attempt: m.Attempt) -> None:
        """The answer to `Cancelled`: no handle of it exists any more."""
        with self._lock:
            self._sides.do(self._sides.prefill.ended(self._clock(), attempt))

    # Both.

    @property
    def _lock(self) -> threading.Lock:
        return self._sides.lock

    def _rouse(self) -> None:
        if self._thread is not None:
            self._thread.rouse()


def _merged(**counters: m.Counters) -> dict[str, int]:
    return {f"{prefix}_{name}": count for prefix, counter in counters.items() for name, count in counter.items()}
