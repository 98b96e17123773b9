# SPDX-License-Identifier: Apache-2.0
"""What the sessions of one engine's protocol share: both halves, the cluster view, the engine's state and its job
credits, what waits to be polled, and the lock over all of them.
"""
import collections
import functools
import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec

from vllm_pd.decisions.paths import PathCosts
from vllm_pd.peer.cluster import ClusterView
from vllm_pd.peer.credits import JobCredits
from vllm_pd.peer.failed_paths import FailedPaths
from vllm_pd.peer.own_jobs import OwnJobs
from vllm_pd.peer.posted_jobs import PostedJobs
from vllm_pd.peer.prompt_records import PromptRecords
from vllm_pd.peer.state import EngineState
from vllm_pd.peer.step_watch import HUNG_S, StepWatch
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    EVENTS,
    Action,
    AddPeer,
    DropPeer,
    Event,
    Fallback,
    FallbackReason,
    Prefill,
    Prefilled,
    Timed,
    ToBroker,
)
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.holds import HoldLimits
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol

if TYPE_CHECKING:
    from vllm_pd.settings.engine import PDConfig

logger = logging.getLogger("vllm.pd")

SECRET_BYTES = 32  # behind the numbers of claims

P = ParamSpec("P")
R = TypeVar("R")


class PeerCore:
    """Belongs to a `PeerProtocol`. Only its sessions use it, with `lock` held, which is how its methods are called. The
    lock is held for dictionary work only, never for socket I/O. `clock` is read under the lock, so it never runs
    backwards between two calls."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, clock: Callable[[], float]):
        self.lock = threading.RLock()
        self.clock = clock
        self.member = member
        self.state = EngineState(member)
        self.generations = Generations(member.incarnation, transfer_metadata, config.lease_s,
                                       can_renew=not config.is_two_sided)
        self.decode_half = DecodeProtocol(member, transfer_metadata, DecodeLimits(
            lease_s=config.lease_s, deadline_s=config.attempt_deadline_s, claim_retry_s=config.claim_retry_s,
            ttl_s=config.ttl_s, own_fence=config.is_two_sided), self.generations)
        self.prefill_half = PrefillProtocol(member, transfer_metadata, PrefillLimits(
            ttl_s=config.ttl_s, holds=HoldLimits(hold_s=config.hold_s, lease_s=config.lease_s)), self.generations,
            self.decode_half.reads, secrets.token_bytes(SECRET_BYTES))
        self.cluster = ClusterView(member, config.heartbeat_s, config.ttl_s, local_only=config.keys is None)
        self.credits = JobCredits(config.max_prefill_tokens)
        self.refusal = ""  # why every job is refused
        self.own_jobs = OwnJobs() if config.decides_by_time else None
        self.posted = PostedJobs()
        self.prompts = PromptRecords(clock)
        self.paths = PathCosts(member.zone)
        self.failed_paths = FailedPaths(config.attempt_deadline_s)
        self.last_number = -1  # of this engine's attempts
        self.ttl_s = config.ttl_s
        self.broker = config.broker
        self.wakeup: Callable[[], None] | None = None
        self.events: collections.deque[Event] = collections.deque()
        self.outbox: collections.deque[Action] = collections.deque()
        self._written: set[str] = set()  # transport names of Ds that the ranks were asked to add
        self.announced = True  # whether the engine has polled, or was woken for, all that there is
        self.shut_detail = ""  # why nothing is sent or received any more
        self.steps = StepWatch()
        self.decode_half.broker_is(clock(), False)

    def wake(self) -> None:
        """Call the wakeup, so that the thread that transmits looks what is new."""
        if self.wakeup is not None:
            self.wakeup()

    def do(self, actions: list[Action]) -> None:
        """Sort what a half answered: events for the engine, the rest to be sent."""
        for action in itertools.chain.from_iterable(map(self.posted.divert, actions)):
            if isinstance(action, Prefill) and self.refusal:
                self.do(self.prefill_half.failed(self.clock(), action.attempt, self.refusal))
            elif isinstance(action, EVENTS):
                self._note_path(action)
                if self._is_for_ranks(action):
                    self.events.append(action)
                    self.announced = False
            else:
                self.outbox.append(self._with_detours(action))
        if actions:
            self.wake()

    def _note_path(self, event: Event) -> None:
        """What the end of an attempt says of the path to the prefill engine that had it."""
        if isinstance(event, Fallback) and self._failed_on_the_way(event):
            self.failed_paths.failed(self.clock(), event.peer, event.attempt.number, self.last_number)
        elif isinstance(event, Prefilled | Timed) and event.peer:
            self.failed_paths.arrived(event.peer, event.attempt.number)
            if event.timings.measured:
                self.paths.handed_over(self.clock(), event.peer, self._zone(event.peer), event.tokens, event.timings)

    def _with_detours(self, action: Action) -> Action:
        """The same; a job for the broker with what is known of the paths to the prefill engines."""
        if not (isinstance(action, ToBroker) and isinstance(action.message, m.Put)):
            return action
        job = action.message.job
        zones = self.cluster.zones(self.greeted(), job.avoid)
        detours = self.paths.detours(self.clock(), job.new_tokens, zones)
        return ToBroker(m.Put(msgspec.structs.replace(job, detours=detours))) if detours else action

    def _zone(self, peer: str) -> str:
        """That of a prefill engine that has greeted this one, or did."""
        member = self.decode_half.peers.get(peer)
        return "" if member is None else member.zone

    def _failed_on_the_way(self, end: Fallback) -> bool:
        """Whether it is not P's own word that ended it, or that word was that a transfer has failed."""
        return bool(end.peer) and (end.reason in (FallbackReason.LEASE, FallbackReason.DEADLINE)
                                   or end.peer in self.generations.parted)

    def _is_for_ranks(self, event: Event) -> bool:
        """False for the drop of a P that was read from and, as a D, is written to."""
        if isinstance(event, AddPeer):
            self._written.add(event.name)
        elif isinstance(event, DropPeer):
            if event.was_read:
                return event.name not in self._written
            self._written.discard(event.name)
        return True

    @property
    def halves(self) -> tuple[DecodeProtocol, PrefillProtocol]:
        """Both halves."""
        return self.decode_half, self.prefill_half

    def greeted(self) -> set[str]:
        """The prefill engines that have greeted this one and can hand a prefill over to it."""
        return self.decode_half.peers.keys() - self.generations.parted - self.failed_paths.avoided(self.clock())

    def jobs(self) -> set[m.Attempt]:
        """The jobs of peers that something is still done for here."""
        return self.prefill_half.states().keys() - self.prefill_half.unproven_jobs()

    def state_changed(self) -> None:
        """Everybody is to know soon, the engine included."""
        self.cluster.next_heartbeat = self.clock()
        self.announced = False
        self.wake()

    def set_hanging(self, hangs: bool) -> None:
        """The step loop of the engine hangs, or goes on."""
        if hangs:
            logger.error("the step loop of this engine has not looked for events for %.0f s: it takes no jobs, and "
                         "leases are not renewed, until it does", HUNG_S)
        else:
            logger.warning("the step loop of this engine goes on")
        self.state.hangs = hangs
        self._update_renewals()

    def set_lost_address(self, lost: str) -> None:
        """The machine of this engine does not have its address any more; empty: it has."""
        if lost:
            logger.error("this machine does not have the address %s of this engine any more, at which others reach it: "
                         "it takes no jobs, and leases are not renewed, until the machine has it again", lost)
        else:
            logger.warning("this machine has the address of this engine again")
        self.state.lost_address = lost
        self._update_renewals()

    def _update_renewals(self) -> None:
        """Let decode engines wait for the jobs that they have here, or not."""
        self.prefill_half.renews = not (self.state.hangs or self.state.lost_address)
        self.state_changed()

    def new_credit(self) -> m.Credit | None:
        """What the broker should know and does not."""
        if not self.state.takes_jobs:
            return self.credits.update(0)
        coming = self.prefill_half.waiting_tokens()
        block_size = self.member.fingerprint.block_size
        coming += [event.new_tokens(block_size) for event in self.events if isinstance(event, Prefill)]
        return self.credits.update(max(0, self.credits.jobs - len(coming)), sum(coming))


class Session:
    """What one kind of caller may say and ask. Each public method holds the lock of the core. To be read only:
    `member`, the engine's registry entry as it was born, with its addresses, and `state`, what it is at present."""

    def __init__(self, core: PeerCore):
        self.member = core.member
        self.state = core.state
        self._core = core
        self._clock = core.clock
        self._cluster = core.cluster
        self._parted = core.generations.parted
        self._do = core.do

    @property
    def _decode(self) -> DecodeProtocol:
        """The half of D."""
        return self._core.decode_half

    @property
    def _prefill(self) -> PrefillProtocol:
        """The half of P."""
        return self._core.prefill_half


S = TypeVar("S", bound=Session)


def locked(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let the method of a session hold the lock of its core. Its caller may hold it already."""

    @functools.wraps(method)
    def holding(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._core.lock:
            return method(self, *args, **kwargs)

    return holding
