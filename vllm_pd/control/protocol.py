# SPDX-License-Identifier: Apache-2.0
"""All that an engine knows and decides as a peer: its two sides, its cluster view and its state, which play together.

No sockets, no clock, no thread. What is to be sent waits in the outbox for the control thread, what the engine is to
learn waits for `take_events`. Both use it, under `lock`, which is held for dictionary work only, never for I/O: so
neither ever waits long for the other, and nothing waits for a peer.
"""
import collections
import logging
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from vllm_pd.control.cluster import ClusterView, QueueView
from vllm_pd.control.credits import JobCredits
from vllm_pd.control.degraded import Cause, Degraded
from vllm_pd.control.state import EngineState
from vllm_pd.core import messages as m
from vllm_pd.core.actions import EVENTS, Action, Event, Prefill
from vllm_pd.core.decode import AttemptState, DecodeLimits, DecodeProtocol
from vllm_pd.core.prefill import PrefillLimits, PrefillProtocol
from vllm_pd.errors import PeerMismatch

if TYPE_CHECKING:
    from vllm_pd.config import PDConfig

logger = logging.getLogger("vllm.pd")

RECONNECT_POLL_S = 0.1  # while the broker is away


class PeerProtocol:
    """Of one engine. `member` is its registry entry as it was born, with its addresses. `rouse` is called, with the
    lock, when there is something new for whoever sends and tells."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, now: float,
                 rouse: Callable[[], None]):
        self.lock = threading.Lock()
        self.member = member
        self.decode = DecodeProtocol(member, transfer_metadata, DecodeLimits(
            lease_s=config.lease_s, deadline_s=config.attempt_deadline_s, claim_retry_s=config.claim_retry_s,
            ttl_s=config.ttl_s))
        self.prefill = PrefillProtocol(member, transfer_metadata, PrefillLimits(ttl_s=config.ttl_s))
        self.cluster = ClusterView(member, config.heartbeat_s, config.ttl_s)
        self.state = EngineState(member)
        self._credits = JobCredits()
        self._ttl_s = config.ttl_s
        self.patience_s = config.ttl_s  # for a state of the world that may be over in a moment
        self._broker = config.broker
        self._degraded: Degraded | None = None  # as the engine was last woken for it
        self._rouse = rouse
        self._events: list[Event] = []
        self._outbox: collections.deque[Action] = collections.deque()
        self._announced = True
        self._last_number = -1
        self.decode.broker_is(now, False)

    # For the engine.

    def next_attempt(self, request_id: str) -> m.Attempt:
        """A new attempt for this request; its number is larger than that of any before it."""
        self._last_number += 1
        return m.Attempt(self.member.incarnation, request_id, self._last_number)

    def begin_write(self, now: float, attempt: m.Attempt) -> bool:
        """Whether a write of this attempt may be posted; if so, D is told that it comes."""
        allowed = self.prefill.may_write(now, attempt)
        if allowed:
            self.do(self.prefill.writing(now, attempt))
        return allowed

    def take_events(self) -> list[Event]:
        """All events since the last call, in order."""
        events, self._events = self._events, []
        self._announced = True
        self._credits.use(_jobs(events))
        return events

    def set_credits(self, jobs: int) -> None:
        """How many jobs the engine could take beyond those that it has taken from `take_events`."""
        self._credits.set(jobs)
        if self._credits.update(self._free_credits()) is not None:
            self._rouse()

    def set_load(self, load: m.Load) -> None:
        """How busy the engine is."""
        if self.state.told_load(load) or self.state.draining and not (load.running or load.waiting):
            self._rouse()

    def do(self, actions: list[Action]) -> None:
        """Sort what a side answered: events for the engine, the rest to be sent."""
        for action in actions:
            if isinstance(action, EVENTS):
                self._events.append(action)
                self._announced = False
            else:
                self._outbox.append(action)
        if actions:
            self._rouse()

    # To be looked at.

    def view(self, now: float, avoid: Collection[str] = ()) -> QueueView:
        """What the policy wants to know of the world, for a request that shall not go to these Ps again."""
        return self.cluster.view(now, self.decode.queued(), self.decode.peers, avoid)

    def open_attempts(self) -> list[m.Attempt]:
        """Every attempt with a record, on either side."""
        return [*self.decode.states(), *self.prefill.states()]

    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers."""
        states = collections.Counter(self.decode.states().values())
        return {
            "decode_queued": states[AttemptState.QUEUED],
            "decode_granted": states[AttemptState.GRANTED],
            "decode_fenced": len(self.decode.fenced()),
            "prefill_jobs": len(self.prefill.states()),
            "peers": len(self.prefill.peers()) + len(self.decode.peers),
        }

    def mismatch(self, now: float) -> str | None:
        """Why a peer does not fit, or did not when it last spoke to us."""
        for side in (self.decode, self.prefill):
            if side.mismatch is not None:
                self.cluster.refused(now, side.mismatch)
                side.mismatch = None
        return self.cluster.view(now, 0, ()).mismatch

    def degraded(self, now: float) -> Degraded | None:
        """Why this engine has nobody to hand prefills to, or to take them from; None where it has, or is to leave."""
        if self.state.draining:
            return None
        if not self.cluster.up:
            return Degraded(Cause.BROKER, f"the broker {self._broker} does not answer")
        decodes = self.state.role.decodes
        if self.cluster.prefills(self.decode.peers) if decodes else self.prefill.peers():
            return None
        mismatch = self.cluster.view(now, 0, ()).mismatch
        if mismatch is not None:
            return Degraded(Cause.MISMATCH, f"no peer fits: {mismatch}")
        return Degraded(Cause.PEER, f"no {'prefill' if decodes else 'decode'} engine is there")

    def living_peers(self) -> dict[str, m.Member]:
        """Those who have been introduced, on either side, and are not known to be dead."""
        peers = {**self.decode.peers, **self.prefill.peers()}
        return {name: peer for name, peer in peers.items() if not self.cluster.is_dead(name)}

    def busy_peers(self) -> set[str]:
        """Those whose death would end something of ours."""
        return self.decode.busy_peers() | self.prefill.busy_peers()

    # What others say.

    def from_prefill(self, now: float, sender: str, message: m.Message) -> None:
        """A message from a P."""
        self.do(self.decode.receive(now, sender, message))

    def from_decode(self, now: float, sender: str, message: m.Message) -> None:
        """A message from a D."""
        self.do(self.prefill.receive(now, sender, message))

    def from_broker(self, now: float, sender: str, message: m.Message) -> None:
        """A message from the broker."""
        if isinstance(message, m.Refused):
            self.cluster.refused(now, str(PeerMismatch(message.key, message.theirs, message.ours)))
            return
        length = self.cluster.queue_length if isinstance(message, m.Offer) else message.queue_length
        if self.cluster.heard(now, sender, length):
            self._credits.send_again(new_broker=True)
            if not isinstance(message, m.PutReply):
                self.do(self.decode.requeue(now))
        self.do(self.decode.broker_is(now, True))
        if isinstance(message, m.Peers):
            self.cluster.peers(message)
            self.state.listed(self.cluster.listed())
            if self.member.role.prefills:
                self.do(self.prefill.members_are(now, self.cluster.members()))
        elif isinstance(message, m.PutReply):
            if message.refusal is m.PutRefusal.UNREGISTERED:
                self.cluster.next_heartbeat = now
            self.do(self.decode.put_reply(now, message))
        elif isinstance(message, m.Offer):
            self._credits.offered(message.serial)
            if self.member.role.prefills:
                self.do(self.prefill.offer(now, message.job))

    def unsent(self, now: float, message: m.Message) -> None:
        """This did not reach the broker."""
        self.cluster.up = False
        if isinstance(message, m.Put):
            self.do(self.decode.put_failed(now, message.job.attempt))

    def peer_dead(self, now: float, incarnation: str) -> None:
        """That process is gone, as a fact."""
        self.cluster.dead(incarnation)
        self.do(self.decode.peer_dead(now, incarnation))
        self.do(self.prefill.peer_lost(now, incarnation))

    # What operators say.

    def drain(self, now: float) -> None:
        """Take nothing new from others, finish what is open, then leave the registry for good."""
        if not self.state.draining:
            logger.info("draining: no new work, what is open is finished")
            self.state.drain()
            self._changed(now)

    def set_role(self, now: float, role: m.Role) -> str:
        """Act as `role` from now on; what is open is finished. Returns why not, empty where it is done."""
        problem = self.state.set_role(role)
        self._changed(now)
        return problem

    def serves(self, now: float, http: str) -> None:
        """The front end says where it serves."""
        if self.state.serves(http):
            self._changed(now)

    def _changed(self, now: float) -> None:
        """Tell everybody soon, the engine included."""
        self.cluster.next_heartbeat = now
        self._announced = False
        self._rouse()

    # For whoever sends and tells.

    def tick(self, now: float) -> None:
        """Do what is due."""
        self.decode.peers_are(now, self.cluster.prefills(self.decode.peers))
        self.do(self.decode.handle_timeout(now))
        self.do(self.prefill.handle_timeout(now))
        degraded = self.degraded(now)
        if degraded != self._degraded:
            self._degraded = degraded
            self._announced = False

    def next_timeout(self) -> float:
        """When there is next something to do, by the clock or at once (-inf)."""
        if self._outbox or not self._announced:
            return float("-inf")
        due = [self.decode.next_timeout(), self.prefill.next_timeout(), self.cluster.next_timeout()]
        return min(when for when in due if when is not None)

    def to_send(self) -> tuple[collections.deque[Action], m.Credit | None]:
        """What is to leave now, and after it, if the broker is there then, how much room there is."""
        outbox, self._outbox = self._outbox, collections.deque()
        take = self._credits.update(self._free_credits()) if self.member.role.prefills else None
        return outbox, take

    def room_told(self, take: m.Credit) -> None:
        """The broker has been sent this."""
        self._credits.sent(take)

    def announce(self) -> bool:
        """Whether there is something that the engine has neither taken nor been woken for; now it will be."""
        announced, self._announced = self._announced, True
        return not announced

    def registration(self, now: float) -> m.Register | None:
        """The heartbeat, where it is due."""
        cluster = self.cluster
        if now < cluster.next_heartbeat:
            return None
        if self.state.left:
            cluster.next_heartbeat = now + cluster.heartbeat_s
            return None
        return m.Register(self.state.member(), cluster.broker, cluster.version)

    def registered(self, now: float, sent: bool) -> None:
        """Whether the heartbeat left."""
        period_s = self.cluster.heartbeat_s
        self.cluster.next_heartbeat = now + (period_s if sent else min(RECONNECT_POLL_S, period_s))
        self._credits.send_again()
        if not sent:
            self.cluster.up = False

    def check_broker(self, now: float) -> None:
        """A broker that has been silent for too long is away."""
        self.cluster.check(now)
        if not self.cluster.up:
            self.do(self.decode.broker_is(max(self.cluster.heard_at, now - self._ttl_s), False))

    def leave_if_drained(self) -> bool:
        """Whether this moment has ended the drain: nothing is open any more, and goodbye may be said."""
        is_open = bool(self.open_attempts() or self._outbox or self._events)
        if self.state.left or not self.state.is_drained(is_open, self.cluster.up):
            return False
        self.state.left = True
        return True

    def abort_all(self, now: float) -> None:
        """The engine ends: nothing that it asked for is wanted any more."""
        for attempt in self.decode.states():
            self.do(self.decode.abort(now, attempt))

    def shut(self, now: float, detail: str) -> None:
        """Nobody will send or tell any more: what is open ends, for the reason that `detail` gives."""
        self.cluster.up = False
        self.do(self.decode.shut(now, detail))
        self.do(self.prefill.shut(now))
        self._outbox.clear()

    def _free_credits(self) -> int:
        if not self.state.takes_jobs:
            return 0
        return max(0, self._credits.jobs - self.prefill.waiting() - _jobs(self._events))


def _jobs(events: list[Event]) -> int:
    return sum(isinstance(event, Prefill) for event in events)
