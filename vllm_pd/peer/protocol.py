# SPDX-License-Identifier: Apache-2.0
"""The protocol of one engine: both halves, the cluster view, the engine's state and its job credits, in one object.

A sans-IO object. Messages go in with `receive` and come out of `poll_transmit`; events for the engine come out of
`poll_event`; `handle_timeout` does what is due, `next_timeout` says when. It locks itself: the engine's threads and the
control thread may call it at any time. The lock is held for dictionary work only, never for socket I/O. The time is
read under the lock, from the clock that is passed in, so it never runs backwards between two calls.
"""
import collections
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection
from enum import Enum
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec

from vllm_pd.errors import PeerMismatch
from vllm_pd.peer.cluster import ClusterView, QueueView
from vllm_pd.peer.credits import JobCredits
from vllm_pd.peer.degraded import Cause, Degraded
from vllm_pd.peer.own_jobs import OwnJobs, PrefillLoads
from vllm_pd.peer.posted_jobs import PostedJobs
from vllm_pd.peer.state import EngineState
from vllm_pd.peer.step_watch import HUNG_S, StepWatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    EVENTS,
    Action,
    AttemptEnd,
    Event,
    Fallback,
    FallbackReason,
    Prefill,
    Released,
    ToBroker,
    ToPrefill,
)
from vllm_pd.protocol.decode import AttemptState, DecodeLimits, DecodeProtocol
from vllm_pd.protocol.holds import HoldLimits
from vllm_pd.protocol.prefill import PrefillLimits, PrefillProtocol

if TYPE_CHECKING:
    from vllm_pd.settings.engine import PDConfig

logger = logging.getLogger("vllm.pd")

MAX_REASON_CHARS = 500  # of a transport, in a status
RECONNECT_POLL_S = 0.1  # while the broker is away
_OTHER_WEIGHTS = ("the weights of this engine were replaced while it ran: it takes no jobs of others and hands none "
                  "over; restart it")

P = ParamSpec("P")
R = TypeVar("R")


class MessageSource(Enum):
    """The kind of sender of a message, known by the socket that it came from."""
    BROKER = "broker"
    DECODE = "decode"
    PREFILL = "prefill"
    OPERATOR = "operator"
    FRONT = "front"


class WatchedPeers(msgspec.Struct, frozen=True):
    """Whose deaths matter. `known` are all other engines that are not known to be dead, `introduced` those of them that
    greeted us or answered us, `busy` the names of those whose death would end something of ours."""
    known: dict[str, m.Member]
    introduced: dict[str, m.Member]
    busy: set[str]


def _locked(method: "Callable[Concatenate[PeerProtocol, P], R]") -> "Callable[Concatenate[PeerProtocol, P], R]":
    """Let the method hold the lock. Its caller may hold it already."""

    @functools.wraps(method)
    def locked(self: "PeerProtocol", *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class PeerProtocol:
    """The protocol of one engine. `member` is its registry entry as it was born, with its addresses. To be read only:
    `state`, what the engine is at present, and `last_degraded`, what `degraded` was at the last `handle_timeout`."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, clock: Callable[[], float]):
        self.member = member
        self.state = EngineState(member)
        self.last_degraded: Degraded | None = None
        self._clock = clock
        self._lock = threading.RLock()
        self._parted: set[str] = set()  # see DecodeProtocol
        self._decode = DecodeProtocol(member, transfer_metadata, DecodeLimits(
            lease_s=config.lease_s, deadline_s=config.attempt_deadline_s, claim_retry_s=config.claim_retry_s,
            ttl_s=config.ttl_s, own_fence=config.is_two_sided), self._parted)
        self._prefill = PrefillProtocol(member, transfer_metadata, PrefillLimits(
            ttl_s=config.ttl_s, holds=HoldLimits(hold_s=config.hold_s)), self._parted, self._decode.reads)
        self._cluster = ClusterView(member, config.heartbeat_s, config.ttl_s)
        self._credits = JobCredits(config.max_prefill_tokens)
        self._refusal = ""  # why every job is refused
        self.ttl_s = config.ttl_s
        self._own_jobs = OwnJobs() if config.decides_by_time else None
        self._posted = PostedJobs()
        self._posts = True
        self._broker = config.broker
        self._wakeup: Callable[[], None] | None = None
        self._events: collections.deque[Event] = collections.deque()
        self._outbox: collections.deque[Action] = collections.deque()
        self._announced = True
        self._last_number = -1
        self._shut_detail = ""
        self._steps = StepWatch()
        self._decode.broker_is(clock(), False)

    @_locked
    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """From now on call this, under the lock, when there is something to transmit or to wake the engine for. None:
        call nothing any more."""
        self._wakeup = wakeup

    @_locked
    def wake(self) -> None:
        """Call the wakeup, so that the thread that transmits looks what is new."""
        if self._wakeup is not None:
            self._wakeup()

    # For a decode engine.

    @_locked
    def next_attempt(self, request_id: str) -> m.Attempt:
        """A new attempt for this request; its number is larger than that of any before it."""
        self._last_number += 1
        return m.Attempt(self.member.incarnation, request_id, self._last_number)

    @_locked
    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None, priority: int = 0) -> None:
        """Have this prompt prefilled elsewhere, into `block_ids[cached_blocks:]`, by a P that is not to `avoid`. The
        blocks stay the caller's to keep until `Prefilled` or `Released`; exactly one of `Prefilled`, `Fallback` and the
        caller's own `abort` ends it, at the latest after `deadline_s` (the configured deadline where None)."""
        if self._shut_detail:
            end = Fallback(attempt, FallbackReason.CONTROL, AttemptEnd.FAILED, self._shut_detail)
            self._do([end, Released(attempt)])
            return
        self._do(self._decode.submit(self._clock(), attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s,
                                     priority))

    @_locked
    def post_job(self, attempt: m.Attempt, url: str, request_id: str) -> None:
        """The job of this attempt, which is submitted next, goes to the metaserver at `url`, whose proxy knows the
        request as `request_id`, and not to the broker. To the broker all the same after `stop_posting`."""
        if self._posts:
            self._posted.add(attempt, url, request_id)

    @_locked
    def stop_posting(self) -> None:
        """Nothing can be posted any more."""
        self._posts = False

    @_locked
    def unclaimable(self, attempt: m.Attempt, detail: str) -> None:
        """Nobody will claim this attempt, whose job was posted. No effect once somebody has."""
        self._do(self._decode.unclaimable(self._clock(), attempt, detail))

    @_locked
    def abort(self, attempt: m.Attempt) -> None:
        """The client is gone; `Released` follows. No effect on an attempt that has ended."""
        self._do(self._decode.abort(self._clock(), attempt) + self._decode.reads.abort(attempt))

    @_locked
    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        """The transfer's notice: all of this rank's data is in our blocks."""
        self._do(self._decode.arrived(self._clock(), attempt, rank))

    @_locked
    def grant_closed(self, attempt: m.Attempt) -> None:
        """Our own ranks receive nothing for this attempt any more. Only with a two-sided transport."""
        self._do(self._decode.grant_closed(self._clock(), attempt))

    @_locked
    def knows_holder(self, incarnation: str) -> bool:
        """Whether this engine can read from that prefill engine: over a two-sided transport from none."""
        return self._reaches_holder(incarnation) and incarnation not in self._parted

    @_locked
    def claim_hold(self, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int], cached_blocks: int,
                   deadline_s: float) -> None:
        """Read what that prefill engine holds into `block_ids[cached_blocks:]`. As `submit`; `digest` is that of the
        prompt's tokens, which fill all of `block_ids`."""
        if self._shut_detail:
            end = Fallback(attempt, FallbackReason.CONTROL, AttemptEnd.FAILED, self._shut_detail)
            self._do([end, Released(attempt)])
            return
        self._do(self._decode.reads.claim(self._clock(), attempt, hold, digest, block_ids, cached_blocks, deadline_s))

    @_locked
    def read_ended(self, attempt: m.Attempt, error: str, may_land: bool = False) -> None:
        """The answer to `ReadHold`: no byte of it lands any more, unless it failed and `may_land`. `error`: empty if
        all has arrived."""
        reads, peer = self._decode.reads, self._decode.reads.peer_of(attempt)
        if may_land and peer and not self._cluster.is_dead(peer):
            self._parted.add(peer)
            self._do(reads.unproven(attempt, error))
        else:
            self._do(reads.ended(attempt, error))
            self._do(self._prefill.read_ended(self._clock(), peer))

    @_locked
    def drop_hold(self, hold: m.Attempt) -> None:
        """This hold, which a client named, is not wanted. Its prefill engine learns it, if it is known."""
        message = m.HoldDone(self.next_attempt(hold.request_id), hold)
        if hold.incarnation == self.member.incarnation:
            self._do(self._prefill.holds.done(hold.incarnation, message))
        elif self._reaches_holder(hold.incarnation):
            self._do([ToPrefill(hold.incarnation, message)])

    @_locked
    def view(self, avoid: Collection[str] = ()) -> QueueView:
        """The cluster as the policy needs it, for a request that is not to go to the Ps in `avoid` again."""
        return self._cluster.view(self._clock(), self._decode.queued(), self._greeted(), avoid)

    @_locked
    def prefill_loads(self, avoid: Collection[str] = ()) -> PrefillLoads:
        """What the prefill engines have to compute at present, without those in `avoid`. What others have queued is as
        old as the last reports; what this engine has is exact. Raises ValueError with a fixed
        `max_local_prefill_tokens`."""
        if self._own_jobs is None:
            raise ValueError("loads are followed with max_local_prefill_tokens auto only")
        cluster, taken = self._cluster, self._decode.taken(self._clock())
        reported = cluster.prefill_loads(self._greeted(), avoid)
        found = self._own_jobs.corrected(self._decode.uncomputed(), cluster.queue_tokens, cluster.queue_length,
                                         reported)
        return msgspec.structs.replace(found, ours=tuple(tuple(taken.get(one.incarnation, ())) for one in reported))

    @_locked
    def writing_since(self) -> float | None:
        """Since when a P writes into our blocks, as it reported; -inf where one may write and has reported nothing;
        None where none may."""
        return self._decode.writing_since()

    # For a prefill engine.

    @_locked
    def set_credits(self, jobs: int, queued_tokens: int | None = None, is_paused: bool = False) -> None:
        """The engine could take so many jobs beyond those that it has got from `poll_event`, for which it has so many
        prompt tokens to compute; None: it does not count them. `is_paused`: it computes nothing until the next call
        without. This ends `refuse_jobs`."""
        self._refusal = ""
        self._credits.set(jobs, queued_tokens)
        if self.state.set_paused(is_paused):
            self._state_changed()
        if self._new_credit() is not None:
            self.wake()

    @_locked
    def refuse_jobs(self, reason: str) -> None:
        """The engine does not poll for now, and nobody is to wait for it: it is paused until `set_credits`. Jobs that
        it has not polled, and those that are on their way, are given back for this reason."""
        self.set_credits(0, is_paused=True)
        self._refusal = reason
        events, self._events = self._events, collections.deque()
        self._do(list(events))

    @_locked
    def take_job(self, job: m.Job) -> str:
        """A client brought this job, past the queue: claim it. Returns why not, empty where it has a record now.
        Nothing is connected to because a client says so: a decode engine of the registry must be at that address."""
        if not self.state.takes_jobs:
            return f"this engine takes no jobs: it {self._why_no_jobs()}"
        if not any(member.role.decodes and (member.incarnation, member.address)
                   == (job.attempt.incarnation, job.address) for member in self._cluster.members()):
            return "the registry has no such decode engine at that address"
        self._do(self._prefill.offer(self._clock(), job))
        return "" if job.attempt in self._prefill.states() else "it has too many jobs, or the two don't fit or meet"

    @_locked
    def may_write(self, attempt: m.Attempt) -> bool:
        """Whether the lease stands. To be asked right before the last write of an attempt is posted; D then gets a
        message that the notice comes. Before another write: `lease_stands`."""
        now = self._clock()
        allowed = self._prefill.may_write(now, attempt)
        if allowed:
            self._do(self._prefill.writing(now, attempt))
        return allowed

    @_locked
    def lease_stands(self, attempt: m.Attempt) -> bool:
        """Whether the job is still wanted, and a write that is not its last may be posted. D keeps what it granted
        either way."""
        return self._prefill.may_write(self._clock(), attempt)

    @_locked
    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        """The job was written: all transfer handles of all ranks are done and released."""
        self._do(self._prefill.sent(self._clock(), attempt, timings))

    @_locked
    def failed(self, attempt: m.Attempt, reason: str) -> None:
        """The engine gave the job up; no transfer handle of it exists any more."""
        self._do(self._prefill.failed(self._clock(), attempt, reason))

    @_locked
    def ended(self, attempt: m.Attempt) -> None:
        """The answer to `Cancelled`: no transfer handle of the job exists any more."""
        self._do(self._prefill.ended(self._clock(), attempt))

    @_locked
    def unproven(self, attempt: m.Attempt, reason: str) -> None:
        """A write of the job has failed, and its bytes may land until this engine or D has ended. To be called while
        the engine still has that write as open: what it reports of the job later has no effect."""
        if self._cluster.is_dead(attempt.incarnation):
            self._do(self._prefill.ended(self._clock(), attempt))
        else:
            self._do(self._prefill.unproven(attempt, reason))

    @_locked
    def read_unproven(self, attempt: m.Attempt, reason: str) -> None:
        """The job has failed, for the read of D's prefix has, and that may land in our blocks until D has ended
        (`is_dead`). To be called while the job is the protocol's: D may be forgotten afterwards."""
        if self._cluster.is_dead(attempt.incarnation):
            self._do(self._prefill.failed(self._clock(), attempt, reason))
        else:
            self._do(self._prefill.read_unproven(self._clock(), attempt, reason))

    @_locked
    def peer_unadded(self, incarnation: str, reason: str) -> None:
        """The transport could not add this engine, of which an `AddPeer` was polled."""
        self._prefill.peer_unadded(self._clock(), incarnation, reason[:MAX_REASON_CHARS])
        self.wake()

    @_locked
    def is_dead(self, incarnation: str) -> bool:
        """Whether the process of this engine is known to be gone."""
        return self._cluster.is_dead(incarnation)

    @_locked
    def hold(self, hold: m.Attempt, digest: bytes, block_ids: list[int]) -> bool:
        """Let a decode engine read these blocks of a whole prompt, whose tokens have this digest. False: not in this
        engine's state. Else the caller keeps them until the `HoldEnded` of this name, which must be new."""
        if self._shut_detail or self.state.draining or self.state.has_other_weights:
            return False
        self._prefill.holds.add(self._clock(), hold, digest, block_ids)
        self.wake()
        return True

    @_locked
    def make_room(self) -> None:
        """A request waits for blocks, and nothing runs that would free some: end the holds that nobody has claimed for
        a few seconds."""
        self._do(self._prefill.holds.make_room(self._clock()))
        self.wake()

    @_locked
    def close_unclaimed_holds(self) -> None:
        """End the holds that nobody has claimed."""
        self._do(self._prefill.holds.close_unclaimed())

    @_locked
    def lasting_hold_blocks(self) -> int:
        """How many blocks decode engines have claimed here and not read for some time. They come free with the messages
        or deaths of these."""
        return self._prefill.holds.lasting_blocks()

    @_locked
    def close_holds(self) -> None:
        """The memory of this engine's blocks is about to end: what a decode engine reads there is not to be used any
        more."""
        self._do(self._prefill.holds.close())

    @_locked
    def is_read(self) -> bool:
        """Whether a decode engine may read here."""
        return bool(self._prefill.holds.readers())

    @_locked
    def is_reached(self) -> bool:
        """Whether a peer may read or write this engine's memory by itself, or a read of ours that has failed may still
        fill it."""
        writers = self._decode.fenced() if not self._decode.limits.own_fence else ()
        return (self.is_read() or bool(writers) or bool(self._prefill.unproven_reads())
                or bool(self._decode.reads.unproven_reads()))

    @_locked
    def jobs(self) -> set[m.Attempt]:
        """The jobs of peers that something is still done for here."""
        return self._prefill.states().keys() - self._prefill.unproven_jobs()

    # For either engine.

    @_locked
    def poll_event(self) -> Event | None:
        """The next event for the engine; None where there is none. An engine that was woken polls until None."""
        self._announced = True
        self._steps.asked()
        if self.state.hangs:
            self._set_hanging(False)
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, Prefill):
            self._credits.use(1, event.new_tokens(self.member.fingerprint.block_size))
        return event

    @_locked
    def set_load(self, load: m.Load) -> None:
        """How busy the engine is, after each look at its events."""
        if self.state.set_load(load) or self.state.draining and not (load.running or load.waiting):
            self.wake()

    @_locked
    def degraded(self) -> Degraded | None:
        """Why this engine can't hand prefills over, or get any; None where it can, or drains."""
        if self._shut_detail:
            return Degraded(Cause.CONTROL, self._shut_detail)
        if self.state.has_other_weights:
            return Degraded(Cause.WEIGHTS, _OTHER_WEIGHTS)
        if self.state.draining:
            return None
        if not self._cluster.up:
            return Degraded(Cause.BROKER, f"the broker {self._broker} does not answer")
        decodes, unadded = self.state.role.decodes, self._prefill.unadded_peers()
        if (self._cluster.prefills(self._greeted()) if decodes
                else self._prefill.peers().keys() - self._parted - unadded.keys()):
            return None
        for name, reason in unadded.items():
            if not decodes and name not in self._parted:
                return Degraded(Cause.PEER, f"the transport can't add decode engine {name}: {reason}")
        mismatch = self._cluster.find_mismatch(self._clock())
        if mismatch is not None and not self._parted:
            return Degraded(Cause.MISMATCH, f"no peer fits: {mismatch}")
        parted = ", but one whose transfers with this one have failed: restart one of the two" if self._parted else ""
        return Degraded(Cause.PEER, f"no {'prefill' if decodes else 'decode'} engine is there{parted}")

    @_locked
    def lasting_attempts(self) -> set[m.Attempt]:
        """The open ones that nothing ends but a death: a peer's, or that of this engine."""
        return (self._prefill.unproven_jobs() | self._prefill.unproven_reads() | self._decode.given_up()
                | self._decode.reads.unproven_reads())

    @_locked
    def open_attempts(self) -> list[m.Attempt]:
        """Every attempt with a record, in either half, and every read that may still land: empty when all has ended and
        all fences are down."""
        return [*self._decode.states(), *self._decode.reads.states(), *self._prefill.states(),
                *self._prefill.holds.states(), *self._prefill.unproven_reads()]

    @_locked
    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers."""
        states = collections.Counter(self._decode.states().values())
        return {
            "decode_queued": states[AttemptState.QUEUED],
            "decode_granted": states[AttemptState.GRANTED],
            "decode_fenced": len(self._decode.fenced()),
            "prefill_jobs": len(self._prefill.states()),
            "holds": len(self._prefill.holds),
            "peers": len(self._prefill.peers()) + len(self._decode.peers),
            "parted": len(self._parted),
            "unadded": len(self._prefill.unadded_peers()),
        }

    @_locked
    def totals(self) -> dict[str, int]:
        """Counters of what happened to attempts and jobs since the start."""
        return merged(decode=self._decode.counters, prefill=self._prefill.counters)

    @_locked
    def dropped(self) -> dict[str, int]:
        """Counters of messages that changed nothing: late, duplicate, unknown, refused."""
        return merged(decode=self._decode.dropped, prefill=self._prefill.dropped)

    @_locked
    def debug_state(self) -> dict[str, Any]:
        """What tests and chaos look at, as plain values; not for the product."""
        return {
            "decode": self._decode.debug_state(),
            "prefill": self._prefill.debug_state(),
            "awaited_timings": self._decode.awaited_timings(),
            "peers": {*self._decode.peers, *self._prefill.peers()},
            "prefill_peers": sorted(self._cluster.prefills(self._decode.peers)),
            "members": sorted(member.incarnation for member in self._cluster.members()),
            "queue_length": self._cluster.queue_length,
        }

    @_locked
    def bring_forward(self, until: float, leases: bool) -> int:
        """For tests alone, see `DecodeProtocol`. `until`: by this engine's clock."""
        return self._decode.bring_forward(until, leases)

    # For an operator and the front end.

    @_locked
    def drain(self) -> None:
        """Take nothing new from others, finish what is open, then leave the registry for good. To refuse the clients of
        this engine is its front end's part. What nobody has claimed is held for a few seconds more, and not at all
        where nobody could claim it."""
        if not self.state.draining:
            logger.info("draining: no new work, what is open is finished")
            self.state.drain()
            if self._prefill.peers():
                self._prefill.holds.drain(self._clock())
            else:
                self.close_unclaimed_holds()
            self._state_changed()

    @_locked
    def weights_replaced(self) -> None:
        """The weights of this engine are not those of its fingerprint any more. It hands nothing over and takes no
        jobs, for good; for others a `kv_both` engine is a decode engine, and a prefill engine drains. To give back what
        it has of others, and to abort what others have of it, is the engine's part."""
        logger.error("%s", _OTHER_WEIGHTS)
        self.state.weights_replaced()
        self.close_unclaimed_holds()
        if self.state.role is m.Role.PREFILL:
            self.drain()
        else:
            self._state_changed()

    @_locked
    def set_role(self, role: m.Role) -> str:
        """Act as `role` from now on; what is open is finished. Returns why not, empty where it is done."""
        problem = self.state.set_role(role)
        self._state_changed()
        return problem

    @_locked
    def set_http(self, http: str) -> None:
        """The front end serves at this URL."""
        if self.state.set_http(http):
            self._state_changed()

    @_locked
    def status(self, sockets: int, problem: str = "") -> m.StatusReply:
        """The answer to an operator or the front end. `sockets` are open."""
        gauges = {**self.counts(), "sockets": sockets, **self.state.gauges()}
        degraded = self.degraded()
        return m.StatusReply(self.state.member(), problem, gauges,
                             "" if degraded is None else f"{degraded.cause}: {degraded.detail}")

    # For the control thread: messages and time.

    @_locked
    def receive(self, source: MessageSource, sender: str, message: m.Message) -> bool:
        """A message from a peer or the broker. False: it came too late, for its sender is known to be dead; let in
        again, it would never be watched."""
        if source is MessageSource.BROKER:
            self._receive_from_broker(sender, message)
            return True
        if self._cluster.is_dead(sender):
            return False
        half = self._decode if source is MessageSource.PREFILL else self._prefill
        self._do(half.receive(self._clock(), sender, message))
        return True

    @_locked
    def poll_transmit(self) -> Action | None:
        """The next message to send, or connection to open or to close; None where there is none. What could not be sent
        to the broker goes back with `transmit_failed`."""
        if self._outbox:
            return self._outbox.popleft()
        if not (self._cluster.up and self.member.role.prefills):
            return None
        credit = self._new_credit()
        if credit is None:
            return None
        self._credits.sent(credit)
        return ToBroker(credit)

    @_locked
    def transmit_failed(self, message: m.Message) -> None:
        """This could not be sent to the broker."""
        now = self._clock()
        if isinstance(message, m.Credit):
            self._credits.failed = True
        elif not isinstance(message, m.Leave):
            self._cluster.up = False
        if isinstance(message, m.Put):
            self._do(self._decode.put_failed(now, message.job.attempt))
        elif isinstance(message, m.Register):
            self._cluster.next_heartbeat = now + min(RECONNECT_POLL_S, self._cluster.heartbeat_s)
            self._check_broker(now)

    @_locked
    def handle_timeout(self) -> None:
        """Do what is due. May be called at any time."""
        now = self._clock()
        self._leave_if_drained()
        self._check_steps(now)
        self._heartbeat(now)
        self._check_broker(now)
        listed = [member.incarnation for member in self._cluster.members()] if self._parted else ()
        self._decode.peers_are(now, self._cluster.prefills(self._greeted()), listed)
        self._do(self._decode.handle_timeout(now))
        self._do(self._prefill.handle_timeout(now))
        degraded = self.degraded()
        if degraded != self.last_degraded:
            self.last_degraded = degraded
            self._announced = False

    @_locked
    def next_timeout(self) -> float:
        """When there is next something to do, by the clock or at once (-inf)."""
        if self._outbox or not self._announced:
            return float("-inf")
        due = [self._decode.next_timeout(), self._prefill.next_timeout(), self._cluster.next_timeout()]
        return min(when for when in due if when is not None)

    @_locked
    def announce(self) -> bool:
        """Whether there is something that the engine has neither polled nor been woken for; now it will be."""
        announced, self._announced = self._announced, True
        return not announced

    # For the control thread: who fits, who is dead, the end.

    @property
    def hello(self) -> m.Hello:
        """How this engine introduces itself to every D."""
        return self._prefill.hello

    @property
    def hello_reply(self) -> m.HelloReply:
        """The answer to every P that fits."""
        return self._decode.hello_reply

    @_locked
    def watched_peers(self) -> WatchedPeers:
        """The engines whose deaths matter."""
        introduced = {name: peer for name, peer in {**self._decode.peers, **self._prefill.peers()}.items()
                      if not self._cluster.is_dead(name)}
        listed = {member.incarnation: member for member in self._cluster.members()}
        busy = self._decode.busy_peers() | self._prefill.busy_peers() | self._parted
        return WatchedPeers(listed | introduced, introduced, busy)

    @_locked
    def peer_dead(self, incarnation: str) -> None:
        """That process is gone, as a fact."""
        now = self._clock()
        self._cluster.dead(incarnation)
        self._do(self._decode.peer_dead(now, incarnation))
        self._do(self._prefill.peer_dead(now, incarnation))

    @_locked
    def mismatch(self, other_protocol: int | None = None) -> str | None:
        """Why a peer does not fit, or did not when it last spoke to us. `other_protocol` is the version of a peer that
        speaks another protocol."""
        now = self._clock()
        if other_protocol is not None:
            self._cluster.refused(now, str(PeerMismatch("protocol", m.PROTOCOL, other_protocol)))
        for half in (self._decode, self._prefill):
            if half.mismatch is not None:
                self._cluster.refused(now, half.mismatch)
                half.mismatch = None
        return self._cluster.find_mismatch(now)

    @_locked
    def abort_all(self) -> None:
        """The engine ends: nothing that it asked for is wanted any more."""
        for attempt in [*self._decode.states(), *self._decode.reads.states()]:
            self.abort(attempt)

    @_locked
    def shut(self, detail: str) -> None:
        """Nobody will send or receive any more: what is open ends, and all that is submitted later, for the reason that
        `detail` gives."""
        self._shut_detail = detail
        now = self._clock()
        self._cluster.up = False
        self._do(self._decode.shut(now, detail))
        self._do(self._prefill.shut(now))
        self._outbox.clear()

    # Inside.

    def _greeted(self) -> set[str]:
        """The prefill engines that have greeted this one and can hand a prefill over to it."""
        return self._decode.peers.keys() - self._parted

    def _reaches_holder(self, incarnation: str) -> bool:
        """Whether that prefill engine may hold something for this one, and can be told of it."""
        return not (self._shut_detail or self._decode.limits.own_fence) and self._decode.reads.knows(incarnation)

    def _receive_from_broker(self, sender: str, message: m.Message) -> None:
        now = self._clock()
        if isinstance(message, m.Refused):
            self._cluster.refused(now, str(PeerMismatch(message.key, message.theirs, message.ours)))
            return
        length = self._cluster.queue_length if isinstance(message, m.Offer) else message.queue_length
        if self._cluster.heard(now, sender, length):
            self._credits.send_again(new_broker=True)
            if not isinstance(message, m.PutReply):
                self._do(self._decode.requeue(now))
        self._do(self._decode.broker_is(now, True))
        if isinstance(message, m.Heard):
            self._cluster.loads(message)
        elif isinstance(message, m.Peers):
            self._cluster.peers(message)
            self.state.listed(self._cluster.listed())
            if self.member.role.prefills:
                self._do(self._prefill.members_are(now, self._cluster.members()))
        elif isinstance(message, m.PutReply):
            if message.refusal is m.PutRefusal.UNREGISTERED:
                self._cluster.next_heartbeat = now
            self._do(self._decode.put_reply(now, message))
        elif isinstance(message, m.Offer):
            self._credits.offered(message.serial)
            if self.member.role.prefills:
                self._do(self._prefill.offer(now, message.job))
            if message.job.attempt not in self._prefill.states():
                self._credits.send_again()  # it takes no place here: the broker need not wait for the next heartbeat

    def _leave_if_drained(self) -> None:
        """Send goodbye once the drain is complete: nothing is open, nothing waits to be sent or to be polled."""
        if not self.state.draining or self.state.left:
            return
        attempts = set(self.open_attempts()) - self.lasting_attempts()
        is_open = bool(attempts or self._outbox or self._events)
        if self.state.is_drained(is_open, self._cluster.up):
            self.state.left = True
            self._outbox.append(ToBroker(m.Leave()))
            logger.info("drained: nothing is open any more")

    def _check_steps(self, now: float) -> None:
        """Notice a prefill engine whose step loop hangs: its leases would be renewed for ever. A decode engine that
        nobody steps for long may be one without a loop of its own."""
        if self._steps.check(now, self.member.role.prefills and bool(self._events or self.jobs())):
            self._announced = False
        if self._steps.hangs is not self.state.hangs:
            self._set_hanging(self._steps.hangs)

    def _set_hanging(self, hangs: bool) -> None:
        if hangs:
            logger.error("the step loop of this engine has not looked for events for %.0f s: it takes no jobs, and "
                         "leases are not renewed, until it does", HUNG_S)
        else:
            logger.warning("the step loop of this engine goes on")
        self.state.hangs = hangs
        self._prefill.renews = not hangs
        self._state_changed()

    def _heartbeat(self, now: float) -> None:
        cluster = self._cluster
        if self._credits.failed:
            self._credits.send_again()
        if now < cluster.next_heartbeat:
            return
        cluster.next_heartbeat = now + cluster.heartbeat_s
        if self._own_jobs is not None:
            self._own_jobs.heartbeat(self._decode.uncomputed())
        listed = {member.incarnation for member in cluster.members()}
        needed = self._decode.busy_peers() | self._prefill.peers().keys() | self._parted
        self._do(self._decode.reads.known_are(now, listed | needed))
        if not self.state.left:
            self._credits.send_again()
            self._outbox.append(ToBroker(m.Register(self.state.entry(), cluster.broker, cluster.version)))

    def _check_broker(self, now: float) -> None:
        """A broker that has been silent for too long is away."""
        self._cluster.check(now)
        if not self._cluster.up:
            self._do(self._decode.broker_is(max(self._cluster.heard_at, now - self.ttl_s), False))

    def _state_changed(self) -> None:
        """Everybody is to know soon, the engine included."""
        self._cluster.next_heartbeat = self._clock()
        self._announced = False
        self.wake()

    def _do(self, actions: list[Action]) -> None:
        """Sort what a half answered: events for the engine, the rest to be sent."""
        for action in itertools.chain.from_iterable(map(self._posted.divert, actions)):
            if isinstance(action, Prefill) and self._refusal:
                self._do(self._prefill.failed(self._clock(), action.attempt, self._refusal))
            elif isinstance(action, EVENTS):
                self._events.append(action)
                self._announced = False
            else:
                self._outbox.append(action)
        if actions:
            self.wake()

    def _why_no_jobs(self) -> str:
        state = self.state
        return ("drains" if state.draining else "is paused" if state.paused else "hangs" if state.hangs
                else "only decodes")

    def _new_credit(self) -> m.Credit | None:
        """What the broker should know and does not."""
        if not self.state.takes_jobs:
            return self._credits.update(0)
        coming = self._prefill.waiting_tokens()
        block_size = self.member.fingerprint.block_size
        coming += [event.new_tokens(block_size) for event in self._events if isinstance(event, Prefill)]
        return self._credits.update(max(0, self._credits.jobs - len(coming)), sum(coming))


def merged(**counters: m.Counters) -> dict[str, int]:
    """All counters in one dictionary, their names prefixed by the keywords."""
    return {f"{prefix}_{name}": count for prefix, counter in counters.items() for name, count in counter.items()}
