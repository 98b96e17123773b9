# SPDX-License-Identifier: Apache-2.0
"""What the control thread calls: messages and time, who fits, and the end. `deaths` has who is dead.

Messages go in with `receive` and come out of `poll_transmit`; `handle_timeout` does what is due, `next_timeout` says
when. Sans-IO; each method holds the lock.
"""
import logging
from collections.abc import Callable
from enum import Enum

from vllm_pd.errors import PeerMismatch
from vllm_pd.peer.broker import RECONNECT_POLL_S, BrokerSession
from vllm_pd.peer.core import PeerCore, Session, locked
from vllm_pd.peer.degraded import Degraded
from vllm_pd.peer.operators import OperatorSession
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, ToBroker
from vllm_pd.protocol.generations import Phase

logger = logging.getLogger("vllm.pd")


class MessageSource(Enum):
    """The kind of sender of a message, known by the socket that it came from."""
    BROKER = "broker"
    DECODE = "decode"
    PREFILL = "prefill"
    OPERATOR = "operator"
    FRONT = "front"


class ControlSession(Session):
    """The calls of the control thread. To be read only: `last_degraded`, what `OperatorSession.degraded` was at the
    last `handle_timeout`, and `ttl_s` of the configuration."""

    def __init__(self, core: PeerCore, operators: OperatorSession):
        super().__init__(core)
        self.ttl_s = core.ttl_s
        self.last_degraded: Degraded | None = None
        self._operators = operators
        self._broker = BrokerSession(core)

    @locked
    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """From now on call this, under the lock, when there is something to transmit or to wake the engine for. None:
        call nothing any more."""
        self._core.wakeup = wakeup

    @locked
    def wake(self) -> None:
        """Call the wakeup, so that the thread that transmits looks what is new."""
        self._core.wake()

    @locked
    def receive(self, source: MessageSource, sender: str, message: m.Message) -> bool:
        """A message from a peer or the broker. False: it came too late, for its sender is known to be dead; let in
        again, it would never be watched."""
        if source is MessageSource.BROKER:
            self._broker.receive(sender, message)
            return True
        if self._cluster.is_dead(sender):
            return False
        if self._cluster.heard_of(sender):
            logger.error("engine %s, on another machine, seemed dead and lives: something between the two cuts "
                         "connections off, or somebody said that it was gone. They work together again", sender)
        half = self._decode if source is MessageSource.PREFILL else self._prefill
        self._do(half.receive(self._clock(), sender, message))
        return True

    @locked
    def poll_transmit(self) -> Action | None:
        """The next message to send, or connection to open or to close; None where there is none. What could not be sent
        to the broker goes back with `transmit_failed`."""
        if self._core.outbox:
            return self._core.outbox.popleft()
        if not (self._cluster.up and self.member.role.prefills):
            return None
        credit = self._core.new_credit()
        if credit is None:
            return None
        self._core.credits.sent(credit)
        return ToBroker(credit)

    @locked
    def transmit_failed(self, message: m.Message) -> None:
        """This could not be sent to the broker."""
        now = self._clock()
        if isinstance(message, m.Credit):
            self._core.credits.failed = True
        elif not isinstance(message, m.Leave):
            self._cluster.up = False
        if isinstance(message, m.Put):
            self._do(self._decode.put_failed(now, message.job.attempt))
        elif isinstance(message, m.Register):
            self._cluster.next_heartbeat = now + min(RECONNECT_POLL_S, self._cluster.heartbeat_s)
            self._broker.check(now)

    @locked
    def handle_timeout(self) -> None:
        """Do what is due. May be called at any time."""
        now = self._clock()
        self._leave_if_drained()
        self._check_steps(now)
        self._broker.heartbeat(now)
        self._broker.check(now)
        listed = [member.incarnation for member in self._cluster.members()] if self._parted else ()
        self._decode.peers_are(now, self._cluster.prefills(self._core.greeted()), listed)
        self._do(self._decode.handle_timeout(now))
        self._do(self._prefill.handle_timeout(now))
        self._check_generations(now)
        if self.state.set_unreached(self._prefill.unreached_peers(now)):
            self._core.state_changed()
        degraded = self._operators.degraded()
        if degraded != self.last_degraded:
            self.last_degraded = degraded
            self._core.announced = False

    @locked
    def next_timeout(self) -> float:
        """When there is next something to do, by the clock or at once (-inf)."""
        if self._core.outbox or not self._core.announced:
            return float("-inf")
        due = [self._decode.next_timeout(), self._prefill.next_timeout(), self._cluster.next_timeout(),
               self._core.generations.next_timeout(self._core.halves)]
        return min(when for when in due if when is not None)

    @locked
    def announce(self) -> bool:
        """Whether there is something that the engine has neither polled nor been woken for; now it will be."""
        announced, self._core.announced = self._core.announced, True
        return not announced

    @locked
    def writing_since(self) -> float | None:
        """Since when a P writes into our blocks, as it reported; -inf where one may write and has reported nothing;
        None where none may."""
        return self._decode.writing_since()

    @property
    def hello(self) -> m.Hello:
        """How this engine introduces itself to every D."""
        return self._prefill.hello

    @property
    def hello_reply(self) -> m.HelloReply:
        """The answer to every P that fits."""
        return self._decode.hello_reply

    @locked
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

    @locked
    def shut(self, detail: str) -> None:
        """Nobody will send or receive any more: what is open ends, and all that is submitted later, for the reason that
        `detail` gives."""
        self._core.shut_detail = detail
        now = self._clock()
        self._cluster.up = False
        self._do(self._decode.shut(now, detail))
        self._do(self._prefill.shut(now))
        self._core.outbox.clear()

    def _leave_if_drained(self) -> None:
        """Send goodbye once the drain is complete: nothing is open, nothing waits to be sent or to be polled."""
        if not self.state.draining or self.state.left:
            return
        attempts = set(self._operators.open_attempts()) - self._operators.unproven_attempts()
        is_open = bool(attempts or self._core.outbox or self._core.events)
        if self.state.is_drained(is_open, self._cluster.up):
            self.state.left = True
            self._core.outbox.append(ToBroker(m.Leave()))
            logger.info("drained: nothing is open any more")

    def _check_generations(self, now: float) -> None:
        ours, halves = self._core.generations, self._core.halves
        was = ours.phase
        self._do(ours.handle_timeout(now, halves))
        if (problem := ours.renewal_problem(halves)) != self.state.agents_problem:
            self.state.agents_problem = problem
            self._core.state_changed()
        if was is Phase.STEADY and ours.phase is Phase.RENEWING:
            failed = f" (a transfer failed with {', '.join(sorted(ours.parted))})" if ours.parted else ""
            logger.warning("in doubt about what peers do with this engine's memory%s: it makes new transfer agents, "
                           "and then destroys the present ones", failed)

    def _check_steps(self, now: float) -> None:
        """Notice a prefill engine whose step loop hangs: its leases would be renewed for ever. A decode engine that
        nobody steps for long may be one without a loop of its own."""
        core, steps = self._core, self._core.steps
        if steps.check(now, self.member.role.prefills and bool(core.events or core.jobs())):
            core.announced = False
        if steps.hangs is not self.state.hangs:
            core.set_hanging(steps.hangs)
