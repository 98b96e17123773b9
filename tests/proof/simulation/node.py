# SPDX-License-Identifier: Apache-2.0
"""What speaks for an engine, and the broker: the real sides, the real outlook, the real registry, on simulated wires.

`Node` does what the control agent's thread does, without the thread; its methods for the engine are the agent's.
"""
import collections
from collections.abc import Callable, Collection

from vllm_pd.config import PDConfig
from vllm_pd.control.outlook import Outlook, QueueView
from vllm_pd.control.registry import QueueLimits, Registry
from vllm_pd.core import messages as m
from vllm_pd.core.decode import DecodeLimits, DecodeSide
from vllm_pd.core.events import (
    EVENTS,
    Action,
    Connect,
    Disconnect,
    Event,
    Prefill,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.core.prefill import PrefillLimits, PrefillSide

from .kernel import Kernel, Process

BLOCK_SIZE = 4
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK_SIZE, 2, 2, 64, "hnd")
BROKER_TICK_S = 0.5


class Post:
    """Who can be written to: the processes that exist, by incarnation."""

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.nodes: dict[str, Node] = {}
        self.broker: BrokerProcess | None = None


class BrokerProcess(Process):
    """A broker's life: a registry, and its clock."""

    def __init__(self, name: str, post: Post, ttl_s: float):
        super().__init__(name)
        self.registry = Registry(name, QueueLimits(ttl_s=ttl_s))
        self._post = post
        post.kernel.at(BROKER_TICK_S, self, "timer", self._tick)

    def receive(self, sender: str, message: m.Message) -> None:
        self._deliver(self.registry.receive(self._post.kernel.now, sender, message))

    def _tick(self) -> None:
        self._deliver(self.registry.tick(self._post.kernel.now))
        self._post.kernel.at(BROKER_TICK_S, self, "timer", self._tick)

    def _deliver(self, letters: list) -> None:
        queue = collections.deque(letters)
        while queue:
            to, message = queue.popleft()
            node = self._post.nodes.get(to)
            if node is None or not node.alive:
                queue.extend(self.registry.undeliverable(self._post.kernel.now, to, message, True))
            else:
                self._post.kernel.send(node, "letter", node.from_broker, self.name, message)


class Node(Process):
    """An engine's process, as the others see it."""

    def __init__(self, name: str, role: m.Role, config: PDConfig, post: Post, *,
                 decode_type: type[DecodeSide] = DecodeSide, prefill_type: type[PrefillSide] = PrefillSide):
        super().__init__(name)
        self.config = config
        self.member = m.Member(name, role, f"tcp://{name}", FINGERPRINT)
        self.decode = decode_type(self.member, b"d", DecodeLimits(
            lease_s=config.lease_s, deadline_s=config.attempt_deadline_s, claim_retry_s=config.claim_retry_s,
            ttl_s=config.ttl_s))
        self.prefill = prefill_type(self.member, b"p", PrefillLimits(ttl_s=config.ttl_s))
        self.outlook = Outlook(self.member, config.heartbeat_s, config.ttl_s)
        self.wake: Callable[[], None] = lambda: None
        self._post, self._kernel = post, post.kernel
        self._events: list[Event] = []
        self._last_number = -1
        self._room, self._told_room, self._serial = 0, -1, 0
        self._timer: float | None = None
        self.decode.broker_is(self.now, False)
        post.nodes[name] = self
        self._kernel.at(0.0, self, "timer", self._turn)

    @property
    def now(self) -> float:
        return self._post.kernel.now

    @property
    def has_news(self) -> bool:
        """Whether the engine has still to take something."""
        return bool(self._events)

    # For the engine: the control agent's methods.

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        self._room = max(0, self._room - sum(isinstance(event, Prefill) for event in events))
        return events

    def view(self, avoid: Collection[str] = ()) -> QueueView:
        return self.outlook.view(self.now, self.decode.queued(), self.decode.peers, avoid)

    def next_attempt(self, request_id: str) -> m.Attempt:
        self._last_number += 1
        return m.Attempt(self.name, request_id, self._last_number)

    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None) -> None:
        self._done(self.decode.submit(self.now, attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s))

    def abort(self, attempt: m.Attempt) -> None:
        self._done(self.decode.abort(self.now, attempt))

    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        self._done(self.decode.arrived(self.now, attempt, rank))

    def set_room(self, jobs: int) -> None:
        self._room = jobs
        self._tell_room()

    def may_write(self, attempt: m.Attempt) -> bool:
        allowed = self.prefill.may_write(self.now, attempt)
        if allowed:
            self._done(self.prefill.writing(self.now, attempt))
        return allowed

    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        self._done(self.prefill.sent(self.now, attempt, timings))

    def failed(self, attempt: m.Attempt, reason: str) -> None:
        self._done(self.prefill.failed(self.now, attempt, reason))

    def ended(self, attempt: m.Attempt) -> None:
        self._done(self.prefill.ended(self.now, attempt))

    # From others.

    def from_prefill(self, sender: str, message: m.Message) -> None:
        self._done(self.decode.receive(self.now, sender, message))

    def from_decode(self, sender: str, message: m.Message) -> None:
        self._done(self.prefill.receive(self.now, sender, message))

    def from_broker(self, sender: str, message: m.Message) -> None:
        now = self.now
        length = self.outlook.queue_length if isinstance(message, m.Offer) else message.queue_length
        actions: list[Action] = []
        if self.outlook.heard(now, sender, length):
            self._serial, self._told_room = 0, -1
            if not isinstance(message, m.PutReply):
                actions += self.decode.requeue(now)
        actions += self.decode.broker_is(now, True)
        if isinstance(message, m.Peers):
            self.outlook.peers(message)
            if self.member.role.prefills:
                actions += self.prefill.members_are(now, self.outlook.members())
        elif isinstance(message, m.PutReply):
            if message.refusal is m.PutRefusal.UNREGISTERED:
                self.outlook.next_heartbeat = now
            actions += self.decode.put_reply(now, message)
        elif isinstance(message, m.Offer):
            self._serial = message.serial
            if self.member.role.prefills:
                actions += self.prefill.offer(now, message.job)
        self._done(actions)

    def is_dead(self, incarnation: str) -> None:
        """That process is gone, as a fact."""
        self.outlook.dead(incarnation)
        self._done(self.decode.peer_dead(self.now, incarnation) + self.prefill.peer_lost(self.now, incarnation))

    # Time.

    def _turn(self) -> None:
        self._timer = None
        now, outlook = self.now, self.outlook
        if now >= outlook.next_heartbeat:
            outlook.next_heartbeat = now + outlook.heartbeat_s
            self._told_room = -1
            self._to_broker(m.Register(self.member, outlook.broker, outlook.version))
        outlook.check(now)
        if not outlook.up:
            self.decode.broker_is(max(outlook.heard_at, now - self.config.ttl_s), False)
        self.decode.peers_are(now, outlook.prefills(self.decode.peers))
        self._done(self.decode.tick(now) + self.prefill.tick(now))

    def _plan(self) -> None:
        due = [self.decode.next_deadline(), self.prefill.next_deadline(), self.outlook.next_deadline()]
        when = min(at for at in due if at is not None)
        if self._timer is None or when < self._timer - 1e-9:
            self._timer = when
            self._kernel.at(max(0.0, when - self.now) + 1e-6, self, "timer", self._on_timer, when)

    def _on_timer(self, when: float) -> None:
        if when == self._timer:
            self._turn()

    # What the sides answer.

    def _done(self, actions: list[Action]) -> None:
        news = False
        for action in actions:
            if isinstance(action, EVENTS):
                self._events.append(action)
                news = True
            elif isinstance(action, ToBroker):
                self._to_broker(action.message)
            elif isinstance(action, ToDecode | ToPrefill):
                there = self._post.nodes.get(action.peer)
                if there is not None and there.alive:
                    receive = there.from_prefill if isinstance(action, ToDecode) else there.from_decode
                    self._kernel.send(there, "letter", receive, self.name, action.message)
            else:
                assert isinstance(action, Connect | Disconnect)
        if self.member.role.prefills:
            self._tell_room()
        self._plan()
        if news:
            self.wake()

    def _to_broker(self, message: m.Message) -> None:
        broker = self._post.broker
        if broker is not None and broker.alive:
            self._kernel.send(broker, "letter", broker.receive, self.name, message)
            return
        self.outlook.up = False
        if isinstance(message, m.Put):
            self._kernel.at(0.0, self, "timer", self._put_failed, message.job.attempt)

    def _put_failed(self, attempt: m.Attempt) -> None:
        self._done(self.decode.put_failed(self.now, attempt))

    def _tell_room(self) -> None:
        coming = self.prefill.waiting() + sum(isinstance(event, Prefill) for event in self._events)
        room = max(0, self._room - coming)
        if room != self._told_room and self.outlook.up:
            self._told_room = room
            self._to_broker(m.Take(room, self._serial))
