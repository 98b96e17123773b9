# SPDX-License-Identifier: Apache-2.0
"""The protocol of one engine: both halves, the cluster view, the engine's state and its job credits, in one object.

A sans-IO object. Messages go in with `control.receive` and come out of `control.poll_transmit`; events for the engine
come out of `poll_event`; `control.handle_timeout` does what is due, `control.next_timeout` says when. It locks itself:
the engine's threads and the control thread may call any session at any time; there is one lock, that of the core. The
lock is held for dictionary work only, never for socket I/O. The time is read under the lock, from the clock that is
passed in, so it never runs backwards between two calls.
"""
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_pd.peer.control import ControlSession
from vllm_pd.peer.core import PeerCore, Session, locked
from vllm_pd.peer.deaths import DeathSession
from vllm_pd.peer.decode import DecodeSession
from vllm_pd.peer.operators import OperatorSession
from vllm_pd.peer.prefill import PrefillSession
from vllm_pd.peer.transport import TransportSession
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Event, Prefill

if TYPE_CHECKING:
    from vllm_pd.settings.engine import PDConfig


class PeerProtocol(Session):
    """The protocol of one engine, made of sessions: `decode` has what a decode engine calls, `prefill` what a prefill
    engine calls, `transport` what an engine says of its ranks' transfer agents, `operators` what operators and the
    front end ask, `control` what the control thread calls, and `deaths` what it says of deaths. What an engine of
    either role calls is here."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, clock: Callable[[], float]):
        core = PeerCore(config, member, transfer_metadata, clock)
        super().__init__(core)
        self.decode = DecodeSession(core)
        self.prefill = PrefillSession(core)
        self.transport = TransportSession(core)
        self.operators = OperatorSession(core)
        self.control = ControlSession(core, self.operators)
        self.deaths = DeathSession(core)

    @locked
    def poll_event(self) -> Event | None:
        """The next event for the engine; None where there is none. An engine that was woken polls until None."""
        core = self._core
        core.announced = True
        core.steps.asked()
        if core.state.hangs:
            core.set_hanging(False)
        if not core.events:
            return None
        event = core.events.popleft()
        if isinstance(event, Prefill):
            core.credits.use(1, event.new_tokens(core.member.fingerprint.block_size))
        return event

    @locked
    def set_load(self, load: m.Load) -> None:
        """How busy the engine is, after each look at its events."""
        if self.state.set_load(load) or self.state.draining and not (load.running or load.waiting):
            self._core.wake()
