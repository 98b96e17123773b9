# SPDX-License-Identifier: Apache-2.0
"""What speaks for an engine, and the broker: all that the real ones decide by, on simulated wires.

`Node` does what the control thread does, without the thread; its methods for the engine are those of the protocol and
its sessions.
"""
import collections
from collections.abc import Callable, Collection
from typing import Any

from vllm_pd.broker.registry import QueueLimits, Registry
from vllm_pd.peer.cluster import QueueView
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.own_jobs import PrefillLoads
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.peer.state import EngineState
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Connect, Disconnect, Event, ToBroker, ToDecode, ToPrefill
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations, is_elsewhere
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.scope import NO_SCOPE, SALT, PromptScope
from vllm_pd.settings.engine import PDConfig

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
        self._deliver(self.registry.handle_timeout(self._post.kernel.now))
        self._post.kernel.at(BROKER_TICK_S, self, "timer", self._tick)

    def _deliver(self, letters: list) -> None:
        queue = collections.deque(letters)
        while queue:
            to, message = queue.popleft()
            node = self._post.nodes.get(to)
            if node is None or not node.alive:
                queue.extend(self.registry.undeliverable(self._post.kernel.now, to, message, True))
            else:
                self._post.kernel.send(node, "letter", node.receive, MessageSource.BROKER, self.name, message)


class Node(Process):
    """An engine's process, as the others see it."""

    def __init__(self, name: str, role: m.Role, config: PDConfig, post: Post, *,
                 machine: str = "", decode_type: type[DecodeProtocol] = DecodeProtocol,
                 prefill_type: type[PrefillProtocol] = PrefillProtocol,
                 generations_type: type[Generations] = Generations, scopes: tuple[str, ...] = (SALT, )):
        super().__init__(name)
        self.config = config
        self.member = m.Member(name, role, "tcp://127.0.0.1:1", FINGERPRINT, host_id=machine, scopes=scopes)
        self.wake: Callable[[], None] = lambda: None
        self._post, self._kernel = post, post.kernel
        self._timer: float | None = None
        self.protocol = PeerProtocol(config, self.member, b"memory", lambda: self.now)
        self._core = core = self.protocol._core
        core.generations.__class__ = generations_type  # all sessions have this one object already
        core.decode_half = decode_type(self.member, b"d", self.decode.limits, core.generations)
        core.prefill_half = prefill_type(self.member, b"p", self.prefill.limits, core.generations)
        self.decode.broker_is(self.now, False)
        post.nodes[name] = self
        self._kernel.at(0.0, self, "timer", self._turn)

    @property
    def now(self) -> float:
        return self._post.kernel.now

    @property
    def decode(self) -> DecodeProtocol:
        return self._core.decode_half

    @property
    def prefill(self) -> PrefillProtocol:
        return self._core.prefill_half

    @property
    def generation(self) -> int:
        """The present one of its transfer agents."""
        return self._core.generations.current

    @property
    def has_news(self) -> bool:
        """Whether the engine has still to take something."""
        return bool(self._core.events)

    # For the engine: the methods of the protocol and its sessions.

    def poll_event(self) -> Event | None:
        return self.protocol.poll_event()

    def view(self, avoid: Collection[str] = ()) -> QueueView:
        return self.protocol.decode.view(avoid)

    @property
    def state(self) -> EngineState:
        return self.protocol.state

    def prefill_loads(self, avoid: Collection[str] = (), tokens: int = 0) -> PrefillLoads:
        return self.protocol.decode.prefill_loads(avoid, tokens)

    def prompt_decided(self, request_id: str, again: bool, **fields: Any) -> None:
        self.protocol.decode.prompt_decided(request_id, again, **fields)

    def note_prompt(self, request_id: str, **fields: Any) -> None:
        self.protocol.decode.note_prompt(request_id, **fields)

    def next_attempt(self, request_id: str) -> m.Attempt:
        return self.protocol.decode.next_attempt(request_id)

    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None, priority: int = 0,
               scope: PromptScope = NO_SCOPE, media: tuple[bytes, ...] = ()) -> None:
        self.protocol.decode.submit(attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope,
                                    media)
        self._speak()

    def abort(self, attempt: m.Attempt) -> None:
        self.protocol.decode.abort(attempt)
        self._speak()

    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        self.protocol.decode.arrived(attempt, rank)
        self._speak()

    def set_credits(self, jobs: int, queued_tokens: int) -> None:
        self.protocol.prefill.set_credits(jobs, queued_tokens)
        self._speak()

    def may_write(self, attempt: m.Attempt) -> bool:
        allowed = self.protocol.prefill.may_write(attempt)
        self._speak()
        return allowed

    def sent(self, attempt: m.Attempt, timings: m.Timings) -> None:
        self.protocol.prefill.sent(attempt, timings)
        self._speak()

    def failed(self, attempt: m.Attempt, reason: str) -> None:
        self.protocol.prefill.failed(attempt, reason)
        self._speak()

    def ended(self, attempt: m.Attempt) -> None:
        self.protocol.prefill.ended(attempt)
        self._speak()

    def unproven(self, attempt: m.Attempt, reason: str) -> None:
        self.protocol.prefill.unproven(attempt, reason)
        self._speak()

    def renewed(self, name: str) -> None:
        self.protocol.transport.renewed(name, b"memory")
        self._speak()

    def not_renewed(self, problem: str) -> None:
        self.protocol.transport.not_renewed(problem)
        self._speak()

    def retired(self, is_done: bool) -> None:
        self.protocol.transport.retired(is_done, "an agent can't be destroyed")
        self._speak()

    # From others.

    def receive(self, source: MessageSource, sender: str, message: m.Message) -> None:
        self.protocol.control.receive(source, sender, message)
        self._speak()

    def is_dead(self, incarnation: str) -> None:
        """That process is gone, as a fact."""
        self.protocol.deaths.peer_dead(incarnation)
        self._speak()

    def is_unreachable(self, incarnation: str) -> None:
        """No connection to that engine is left, and its lifeline refuses."""
        self.protocol.deaths.lifeline_gone(incarnation)
        self._speak()

    def disconnected(self, incarnation: str) -> None:
        """The connection to that D has ended."""
        self.protocol.deaths.disconnected(incarnation)
        self._speak()

    def is_elsewhere(self, other: "Node") -> bool:
        """Whether that engine is on another machine."""
        return is_elsewhere(self.member, other.member)

    # Time.

    def _turn(self) -> None:
        self._timer = None
        self.protocol.control.handle_timeout()
        self._speak()

    def _plan(self) -> None:
        when = self.protocol.control.next_timeout()
        if self._timer is None or when < self._timer - 1e-9:
            self._timer = when
            self._kernel.at(max(0.0, when - self.now) + 1e-6, self, "timer", self._on_timer, when)

    def _on_timer(self, when: float) -> None:
        if when == self._timer:
            self._turn()

    # What is to leave.

    def _speak(self) -> None:
        while (action := self.protocol.control.poll_transmit()) is not None:
            if isinstance(action, ToBroker):
                if not self._to_broker(action.message):
                    self.protocol.control.transmit_failed(action.message)
            elif isinstance(action, ToDecode | ToPrefill):
                there = self._post.nodes.get(action.peer)
                if there is not None and there.alive:
                    source = MessageSource.PREFILL if isinstance(action, ToDecode) else MessageSource.DECODE
                    self._kernel.send(there, "letter", there.receive, source, self.name, action.message,
                                      sender=self.name)
            else:
                assert isinstance(action, Connect | Disconnect)
        news = self.protocol.control.announce()
        self._plan()
        if news:
            self.wake()

    def _to_broker(self, message: m.Message) -> bool:
        broker = self._post.broker
        if broker is None or not broker.alive:
            return False
        self._kernel.send(broker, "letter", broker.receive, self.name, message)
        return True
