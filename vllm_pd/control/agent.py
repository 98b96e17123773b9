# SPDX-License-Identifier: Apache-2.0
"""The thread that speaks for an engine.

The engine calls in (`submit`, `abort`, `sent`, ...) and fetches events; the thread owns the sockets and the clock's
deadlines. One lock guards the two pure sides; it is held for dictionary work only, never for I/O, so neither ever waits
long for the other, and nothing waits for a peer. `wake` is called from the thread, without the lock, when there are new
events, and now and then while a transfer's notice is due, which only the engine can see.
"""
import collections
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from vllm_pd.control import process
from vllm_pd.control.lifeline import Lifeline
from vllm_pd.control.links import Links, Source
from vllm_pd.control.outlook import Outlook, QueueView
from vllm_pd.control.standing import Standing
from vllm_pd.control.vitals import Vitals
from vllm_pd.core import messages as m
from vllm_pd.core.decode import DecodeLimits, DecodeSide, State
from vllm_pd.core.events import (
    EVENTS,
    Action,
    Connect,
    Disconnect,
    Event,
    Fallback,
    FallbackReason,
    Outcome,
    Prefill,
    Released,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.core.prefill import PrefillLimits, PrefillSide
from vllm_pd.errors import ControlError, PeerMismatch
from vllm_pd.rpc.sockets import SendResult

if TYPE_CHECKING:
    from vllm_pd.config import PDConfig

logger = logging.getLogger("vllm.pd")

WRITING_POLL_S = 0.002
LONG_WRITE_POLL_S = 0.020
LONG_WRITE_S = 2.0
WORKING_POLL_S = 0.100  # while P computes: only in case its word gets lost
WARNING_S = 5.0
RECONNECT_POLL_S = 0.1  # while the broker is away
LINGER_MS = 100


class ControlAgent:
    """Built with the engine, `start`ed before its first step, `close`d after its last. All methods but these two may be
    called from any thread and don't block. After the thread has died (`error`) every request is told to stay local."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, wake: Callable[[], None],
                 clock: Callable[[], float] = time.monotonic,
                 is_gone: Callable[[m.Member], bool] = process.is_gone, front: str | None = None):
        self.config = config
        self.member = member
        self.error: BaseException | None = None
        self._metadata = transfer_metadata
        self._wake = wake
        self._clock = clock
        self._is_gone = is_gone
        self._front = front
        self._lifeline: Lifeline | None = None
        self._vitals = Vitals()
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._outbox: collections.deque[Action] = collections.deque()
        self._announced = True
        self._stopping = False
        self._last_number = -1
        self._room = 0
        self._told_room = -1
        self._serial = 0
        self._shown: tuple[m.Role, bool, bool] | None = None  # what the front end was last told
        self._warned: str | None = None
        self._next_warning = 0.0
        self._next_notice_poll: float | None = None
        self._thread = threading.Thread(target=self._main, name="vllm-pd-control", daemon=True)
        self._links: Links | None = None
        self._link_counters: m.Counters = collections.Counter()
        self._build(member)

    def _build(self, member: m.Member) -> None:
        config = self.config
        self.member = member
        self._decode = DecodeSide(member, self._metadata, DecodeLimits(
            lease_s=config.lease_s, deadline_s=config.attempt_deadline_s, claim_retry_s=config.claim_retry_s,
            ttl_s=config.ttl_s))
        self._prefill = PrefillSide(member, self._metadata, PrefillLimits(ttl_s=config.ttl_s))
        self._outlook = Outlook(member, config.heartbeat_s, config.ttl_s)
        self._standing = Standing(member)
        self._decode.broker_is(self._clock(), False)

    # Life.

    def start(self) -> None:
        """Bind, fill in the addresses of `member`, and run. ConfigError where `bind` or `broker` can't be used."""
        self._links = Links(self.member.incarnation, self.config, self._front)
        self._link_counters = self._links.counters
        self._lifeline = Lifeline(self.member.incarnation, urlsplit(self._links.address).hostname)
        for source in (self._lifeline, self._vitals):
            self._links.watch(source.fileno())
        self._build(msgspec.structs.replace(self.member, address=self._links.address,
                                            lifeline=self._lifeline.address))
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Leave the registry and end the thread. Open attempts are not waited for."""
        with self._lock:
            self._stopping = True
            if self._links is not None:
                self._links.waker.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def lifeline_fileno(self) -> int:
        """The lifeline's socket, for every other process of this engine that can write to a peer's memory: it holds it
        for as long as it can. After `start`."""
        return self._lifeline.fileno()

    def end_lifeline(self) -> None:
        """After `close`, once nothing of this engine can write to a peer's memory any more: the proof for its peers.
        Where this is never called, the end of the process is."""
        if self._lifeline is not None and not self._thread.is_alive():
            self._lifeline.close()

    # For an operator.

    def drain(self) -> None:
        """Take nothing new from others, finish what is open, then leave the registry for good. Refusing the clients of
        this engine is its front end's part."""
        with self._lock:
            self._drain()

    def set_role(self, role: m.Role) -> str:
        """Act as `role` from now on; what is open is finished. Returns why not, empty where it is done."""
        with self._lock:
            return self._set_role(role)

    @property
    def standing(self) -> Standing:
        """The present role, and whether the engine drains. To be read only."""
        return self._standing

    def set_load(self, load: m.Load) -> None:
        """How busy the engine is, after each look at its events."""
        with self._lock:
            if self._standing.told_load(load) or self._standing.draining and not (load.running or load.waiting):
                self._rouse()

    # For the engine, either role.

    def take_events(self) -> list[Event]:
        """All events since the last call, in order."""
        with self._lock:
            events, self._events = self._events, []
            self._announced = True
            self._room = max(0, self._room - sum(isinstance(event, Prefill) for event in events))
        return events

    def view(self, avoid: Collection[str] = ()) -> QueueView:
        """What the policy wants to know of the world, for a request that shall not go to these Ps again."""
        with self._lock:
            return self._outlook.view(self._clock(), self._decode.queued(), self._decode.peers, avoid)

    def open_attempts(self) -> list[m.Attempt]:
        """Every attempt with a record, on either side: empty when all has ended and all fences are down."""
        with self._lock:
            return [*self._decode.states(), *self._prefill.states()]

    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers, sockets."""
        with self._lock:
            return self._counts()

    def _counts(self) -> dict[str, int]:
        states = collections.Counter(self._decode.states().values())
        return {
            "decode_queued": states[State.QUEUED],
            "decode_granted": states[State.GRANTED],
            "decode_fenced": len(self._decode.fenced()),
            "prefill_jobs": len(self._prefill.states()),
            "peers": len(self._prefill.peers()) + len(self._decode.peers),
            "sockets": self._links.count() if self._links else 0,
        }

    def totals(self) -> dict[str, int]:
        """Counters of what happened to attempts and jobs since the start."""
        with self._lock:
            return _merged(decode=self._decode.counters, prefill=self._prefill.counters)

    def dropped(self) -> dict[str, int]:
        """Counters of messages that changed nothing: malformed, late, duplicate, unknown, refused, unsent."""
        with self._lock:
            return _merged(decode=self._decode.dropped, prefill=self._prefill.dropped, link=self._link_counters)

    # For a decode engine.

    def next_attempt(self, request_id: str) -> m.Attempt:
        """A new attempt for this request; its number is larger than that of any before it."""
        with self._lock:
            self._last_number += 1
            return m.Attempt(self.member.incarnation, request_id, self._last_number)

    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None) -> None:
        """Have this prompt prefilled elsewhere, into `block_ids[cached_blocks:]`, by a P that is not to `avoid`. The
        blocks stay the caller's to keep until `Prefilled` or `Released`; exactly one of `Prefilled`, `Fallback` and the
        caller's own `abort` ends it, at the latest after `deadline_s` (the configured deadline where None)."""
        with self._lock:
            if self.error is not None:
                self._do([Fallback(attempt, FallbackReason.CONTROL, Outcome.FAILED, str(self.error)),
                          Released(attempt)])
                return
            self._do(self._decode.submit(self._clock(), attempt, token_ids, block_ids, cached_blocks, avoid,
                                         deadline_s))

    def abort(self, attempt: m.Attempt) -> None:
        """The request is gone; `Released` follows. No effect on an attempt that has ended."""
        with self._lock:
            self._do(self._decode.abort(self._clock(), attempt))

    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        """The transfer's notice: all of this rank's data is in our blocks."""
        with self._lock:
            self._do(self._decode.arrived(self._clock(), attempt, rank))

    # For a prefill engine.

    def set_room(self, jobs: int) -> None:
        """How many jobs the engine could take beyond those that it has taken from `take_events`."""
        with self._lock:
            self._room = max(0, jobs)
            if self._free_room() != self._told_room:
                self._rouse()

    def may_write(self, attempt: m.Attempt) -> bool:
        """Whether the lease stands. To be asked right before each post of a write, and D is told that it comes."""
        with self._lock:
            now = self._clock()
            allowed = self._prefill.may_write(now, attempt)
            if allowed:
                self._do(self._prefill.writing(now, attempt))
        return allowed

    def lease_stands(self, attempt: m.Attempt) -> bool:
        """Whether the job is still wanted. D keeps what it granted either way."""
        with self._lock:
            return self._prefill.may_write(self._clock(), attempt)

    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        """All handles of all ranks are done and released."""
        with self._lock:
            self._do(self._prefill.sent(self._clock(), attempt, timings))

    def failed(self, attempt: m.Attempt, reason: str) -> None:
        """The engine gave it up; no handle of it exists any more."""
        with self._lock:
            self._do(self._prefill.failed(self._clock(), attempt, reason))

    def ended(self, attempt: m.Attempt) -> None:
        """The answer to `Cancelled`: no handle of it exists any more."""
        with self._lock:
            self._do(self._prefill.ended(self._clock(), attempt))

    # Between the two threads; the lock is held.

    def _do(self, actions: list[Action]) -> None:
        """Sort what a side answered: events for the engine, the rest for the thread."""
        for action in actions:
            if isinstance(action, EVENTS):
                self._events.append(action)
                self._announced = False
            else:
                self._outbox.append(action)
        if actions:
            self._rouse()

    def _rouse(self) -> None:
        if self._links is not None and threading.current_thread() is not self._thread and self.error is None:
            self._links.waker.set()

    def _free_room(self) -> int:
        coming = self._prefill.waiting() + sum(isinstance(event, Prefill) for event in self._events)
        return max(0, self._room - coming) if self._standing.takes_jobs else 0

    # The thread.

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._farewell()
        except BaseException as error:  # whatever it is, the engine must learn of it and go on alone
            logger.exception("the control thread ended; all prefills stay local from now on")
            with self._lock:
                self.error = error
                self._outlook.up = False
                self._do(self._decode.shut(self._clock(), f"the control thread ended: {error!r}"))
                self._do(self._prefill.shut(self._clock()))
                self._outbox.clear()
            self._wake()
        finally:
            with self._lock:
                links, self._links = self._links, None
            links.close(LINGER_MS)
            self._vitals.close()

    def _farewell(self) -> None:
        """Last words: what the engine still had to say, no more of what it had asked for, and goodbye."""
        with self._lock:
            for attempt in self._decode.states():
                self._do(self._decode.abort(self._clock(), attempt))
        self._send()
        self._links.to_broker(m.Leave())

    def _turn(self) -> None:
        """Wait, receive, do what is due, send, tell the engine."""
        for source, sender, message in self._links.receive(self._links.poll(self._patience_s())):
            with self._lock:
                try:
                    self._on_message(self._clock(), source, sender, message)
                except Exception:  # one peer's message must not silence the engine for all others
                    self._link_counters["frame_stumble"] += 1
                    logger.exception("stumbled over %s from %s", type(message).__name__, sender)
        self._lifeline.turn()
        self._leave_if_drained()
        self._heartbeat()
        self._liveness()
        self._warn()
        with self._lock:
            now = self._clock()
            self._decode.peers_are(now, self._outlook.prefills(self._decode.peers))
            self._do(self._decode.tick(now))
            self._do(self._prefill.tick(now))
            held = self._prefill.states().keys()
        self._send()
        self._links.holding(held)
        self._show()
        self._tell()

    def _warn(self) -> None:
        """Say once, for each, why a peer does not fit; not more often than every `WARNING_S`, whoever may call."""
        with self._lock:
            now, links, outlook = self._clock(), self._links, self._outlook
            if links.other_protocol is not None:
                outlook.refused(now, str(PeerMismatch("protocol", m.PROTOCOL, links.other_protocol)))
                links.other_protocol = None
            for side in (self._decode, self._prefill):
                if side.mismatch is not None:
                    outlook.refused(now, side.mismatch)
                    side.mismatch = None
            mismatch = outlook.view(now, 0, ()).mismatch
            if mismatch == self._warned or now < self._next_warning:
                return
            self._warned = mismatch
            if mismatch is not None:
                self._next_warning = now + WARNING_S
        if mismatch is not None:
            logger.warning("a peer does not fit: %s", mismatch)

    def _patience_s(self) -> float | None:
        with self._lock:
            if self._outbox or not self._announced:
                return 0.0
            due = [self._decode.next_deadline(), self._prefill.next_deadline(), self._outlook.next_deadline(),
                   self._next_notice_poll, self._vitals.next_deadline()]
            return max(0.0, min(when for when in due if when is not None) - self._clock())

    def _on_message(self, now: float, source: Source, sender: str, message: m.Message) -> None:
        if source in (Source.PREFILL, Source.DECODE):
            if self._outlook.is_dead(sender):  # late; let in again, it would never be watched
                self._link_counters["dead_sender"] += 1
                return
            self._vitals.heard(now, sender)
            if isinstance(message, (m.Hello, m.HelloReply)):
                self._vitals.hasten(now)
        if source is Source.PREFILL:
            self._do(self._decode.receive(now, sender, message))
            if isinstance(message, (m.Writing, m.Sent)):
                self._next_notice_poll = now
        elif source is Source.DECODE:
            self._do(self._prefill.receive(now, sender, message))
        elif source in (Source.OPERATOR, Source.FRONT):
            self._on_operator(source, sender, message)
        elif isinstance(message, m.Refused):
            self._outlook.refused(now, str(PeerMismatch(message.key, message.theirs, message.ours)))
        else:
            self._on_broker(now, sender, message)

    def _on_broker(self, now: float, sender: str, message: m.Message) -> None:
        length = self._outlook.queue_length if isinstance(message, m.Offer) else message.queue_length
        if self._outlook.heard(now, sender, length):
            self._serial, self._told_room = 0, -1
            if not isinstance(message, m.PutReply):
                self._do(self._decode.requeue(now))
        self._do(self._decode.broker_is(now, True))
        if isinstance(message, m.Peers):
            self._outlook.peers(message)
            self._standing.listed(self._outlook.listed())
            if self.member.role.prefills:
                self._do(self._prefill.members_are(now, self._outlook.members()))
        elif isinstance(message, m.PutReply):
            if message.refusal is m.PutRefusal.UNREGISTERED:
                self._outlook.next_heartbeat = now
            self._do(self._decode.put_reply(now, message))
        elif isinstance(message, m.Offer):
            self._serial = message.serial
            if self.member.role.prefills:
                self._do(self._prefill.offer(now, message.job))

    def _heartbeat(self) -> None:
        now = self._clock()
        if now < self._outlook.next_heartbeat:
            with self._lock:
                self._check_broker(now)
            return
        outlook = self._outlook
        with self._lock:
            if self._standing.left:
                outlook.next_heartbeat = now + outlook.heartbeat_s
                self._check_broker(now)
                return
            member = self._standing.member()
        result = self._links.to_broker(m.Register(member, outlook.broker, outlook.version))
        sent = result is SendResult.SENT
        outlook.next_heartbeat = now + (outlook.heartbeat_s if sent else min(RECONNECT_POLL_S, outlook.heartbeat_s))
        self._told_room = -1
        with self._lock:
            if not sent:
                outlook.up = False
            self._check_broker(now)

    def _check_broker(self, now: float) -> None:
        self._outlook.check(now)
        if not self._outlook.up:
            self._do(self._decode.broker_is(max(self._outlook.heard_at, now - self.config.ttl_s), False))

    def _liveness(self) -> None:
        """See whether the processes that matter now still exist."""
        now = self._clock()
        gone: list[str] = []
        if self._vitals.is_due(now):
            rank = process.lost(self.member) if len(self.member.processes) > 1 else None
            if rank is not None:  # what it was to write never will be; the others may wait for it for ever
                raise ControlError(f"the process {rank.pid} of a rank of this engine has ended")
            with self._lock:
                peers = {**self._decode.peers, **self._prefill.peers()}
                candidates = {member.incarnation: member for member in (*self._outlook.members(), *peers.values())}
                busy = self._decode.busy_peers() | self._prefill.busy_peers()
            self._vitals.look(now, {name: one for name, one in peers.items() if not self._outlook.is_dead(name)}, busy)
            gone = self._vitals.buried(now, self._outlook.gone(list(candidates.values()), self._is_gone))
        gone += self._vitals.probe(now, self._is_connected)
        with self._lock:
            for incarnation in gone:
                self._outlook.dead(incarnation)
                self._do(self._decode.peer_dead(now, incarnation))
                self._do(self._prefill.peer_lost(now, incarnation))

    def _is_connected(self, incarnation: str) -> bool:
        return self._links.is_connected(incarnation, m.HelloReply(self.member, self._metadata))

    # Operators.

    def _on_operator(self, source: Source, sender: str, message: m.Message) -> None:
        problem = ""
        if isinstance(message, m.Drain):
            self._drain()
        elif isinstance(message, m.SetRole):
            problem = self._set_role(message.role)
        elif source is Source.FRONT and message.http and self._standing.serves(message.http):
            self._changed()
        reply = m.StatusReply(self._standing.member(), problem, {**self._counts(), **self._standing.gauges()})
        if source is Source.FRONT:
            self._links.to_front(reply)
        else:
            self._links.to_operator(sender, reply)

    def _drain(self) -> None:
        if not self._standing.draining:
            logger.info("draining: no new work, what is open is finished")
            self._standing.drain()
            self._changed()

    def _set_role(self, role: m.Role) -> str:
        problem = self._standing.set_role(role)
        self._changed()
        return problem

    def _changed(self) -> None:
        """Tell everybody soon, the engine included."""
        self._outlook.next_heartbeat = self._clock()
        self._announced = False
        self._rouse()

    def _leave_if_drained(self) -> None:
        with self._lock:
            standing = self._standing
            is_open = bool(self._decode.states() or self._prefill.states() or self._outbox or self._events)
            if standing.left or not standing.is_drained(is_open, self._outlook.up):
                return
            standing.left = True
        logger.info("drained: nothing is open any more")
        self._links.to_broker(m.Leave())

    def _show(self) -> None:
        """Tell the front end when something has changed that it goes by."""
        with self._lock:
            standing = self._standing
            shown = (standing.role, standing.draining, standing.left)
            if shown == self._shown:
                return
            self._shown = shown
            reply = m.StatusReply(standing.member(), "", {**self._counts(), **standing.gauges()})
        self._links.to_front(reply)

    def _send(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, collections.deque()
            room = self._free_room()
        for action in outbox:
            if isinstance(action, ToBroker):
                self._to_broker(action.message)
            elif isinstance(action, ToDecode):
                self._links.to_decode(action.peer, action.message)
            elif isinstance(action, ToPrefill):
                self._links.to_prefill(action.peer, action.message)
            elif isinstance(action, Connect):
                self._links.connect(action.peer, action.address)
            elif isinstance(action, Disconnect):
                self._links.disconnect(action.peer)
        if (room != self._told_room and self.member.role.prefills and self._outlook.up
                and self._links.to_broker(m.Take(room, self._serial)) is SendResult.SENT):
            self._told_room = room

    def _to_broker(self, message: m.Message) -> None:
        if self._links.to_broker(message) is SendResult.SENT:
            return
        with self._lock:
            self._outlook.up = False
            if isinstance(message, m.Put):
                self._do(self._decode.put_failed(self._clock(), message.job.attempt))

    def _tell(self) -> None:
        """Wake the engine if there is something for it to see."""
        now = self._clock()
        with self._lock:
            due = self._notice_due(now)
            if due is None or self._next_notice_poll is None:
                self._next_notice_poll = due
            elif now >= self._next_notice_poll:
                self._next_notice_poll = due
                self._announced = False
            announce, self._announced = not self._announced, True
        if announce:
            self._wake()

    def _notice_due(self, now: float) -> float | None:
        """When the engine is to look for a notice next. While a P writes it looks often, for the transport makes no
        progress of its own; a write that takes long needs less of that."""
        if not self._decode.fenced():
            return None
        since = self._decode.writing_since()
        if since is None:
            return now + WORKING_POLL_S
        return now + (WRITING_POLL_S if now - since < LONG_WRITE_S else LONG_WRITE_POLL_S)


def _merged(**counters: m.Counters) -> dict[str, int]:
    return {f"{prefix}_{name}": count for prefix, counter in counters.items() for name, count in counter.items()}
