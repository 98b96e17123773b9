# SPDX-License-Identifier: Apache-2.0
"""The thread that speaks for an engine. It owns the sockets and keeps the deadlines; what is said, and why, is decided
by the `PeerProtocol`, under their lock.
"""
import logging
import threading
from collections.abc import Callable

from vllm_pd.control.degraded import DegradedLog
from vllm_pd.control.notices import Notices
from vllm_pd.control.protocol import PeerProtocol
from vllm_pd.control.sockets import ControlSockets, MessageSource
from vllm_pd.core import messages as m
from vllm_pd.core.actions import Action, Connect, Disconnect, ToBroker, ToDecode, ToPrefill
from vllm_pd.errors import ControlError, PeerMismatch
from vllm_pd.liveness import process
from vllm_pd.liveness.lifeline import Lifeline
from vllm_pd.liveness.monitor import LivenessMonitor
from vllm_pd.rpc.sockets import SendResult

logger = logging.getLogger("vllm.pd")

WARNING_S = 5.0
LINGER_MS = 100


class ControlThread:
    """Owns `links`, which it closes at its end, and borrows `lifeline`. `wake` is called from the thread, without the
    lock, when there are new events, and now and then while a transfer's notice is due, which only the engine can see.
    `error` is what the thread died of; from then on nothing is sent."""

    def __init__(self, sides: PeerProtocol, links: ControlSockets, lifeline: Lifeline, wake: Callable[[], None],
                 clock: Callable[[], float], is_gone: Callable[[m.Member], bool]):
        self.error: BaseException | None = None
        self._sides = sides
        self._links: ControlSockets | None = links
        self._link_counters = links.counters
        self._lifeline = lifeline
        self._liveness = LivenessMonitor()
        self._notices = Notices()
        self._wake = wake
        self._clock = clock
        self._is_gone = is_gone
        self._stopping = False
        self._shown: tuple[m.Role, bool, bool] | None = None  # what the front end was last told
        self._warned: str | None = None
        self._next_warning = 0.0
        self._degraded_log = DegradedLog(sides.patience_s)
        for source in (lifeline, self._liveness):
            links.watch(source.fileno())
        self._thread = threading.Thread(target=self._main, name="vllm-pd-control", daemon=True)

    # For the engine's threads.

    def start(self) -> None:
        """Run until `stop`."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Have it leave the registry and end, and wait for that: not in the thread itself, where the garbage collector
        may close an engine."""
        if threading.current_thread() is self._thread:
            self._stopping = True  # without the lock, which it may hold
            return
        with self._sides.lock:
            self._stopping = True
            if self._links is not None:
                self._links.waker.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def rouse(self) -> None:
        """There is something new in the sides. With the lock."""
        if self._links is not None and threading.current_thread() is not self._thread and self.error is None:
            self._links.waker.set()

    def count_sockets(self) -> int:
        """Open sockets. With the lock."""
        return self._links.count() if self._links is not None else 0

    # The thread.

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            self._farewell()
        except BaseException as error:  # whatever it is, the engine must learn of it and go on alone
            logger.exception("the control thread ended; all prefills stay local from now on")
            with self._sides.lock:
                self.error = error
                self._sides.shut(self._clock(), f"the control thread ended: {error!r}")
            self._wake()
        finally:
            with self._sides.lock:
                links, self._links = self._links, None
            links.close(LINGER_MS)
            self._liveness.close()

    def _farewell(self) -> None:
        """Last words: what the engine still had to say, no more of what it had asked for, and goodbye."""
        with self._sides.lock:
            self._sides.abort_all(self._clock())
        self._send()
        self._links.to_broker(m.Leave())

    def _turn(self) -> None:
        """Wait and receive, pass on what comes of it, as others wait for that; do what is due, pass that on."""
        for source, sender, message in self._links.receive(self._links.poll(self._patience_s())):
            with self._sides.lock:
                try:
                    self._on_message(self._clock(), source, sender, message)
                except Exception:  # one peer's message must not silence the engine for all others
                    self._link_counters["frame_stumble"] += 1
                    logger.exception("stumbled over %s from %s", type(message).__name__, sender)
        self._send()
        self._tell()
        self._lifeline.accept_waiting()
        self._leave_if_drained()
        self._heartbeat()
        self._check_liveness()
        self._warn()
        with self._sides.lock:
            now = self._clock()
            self._sides.tick(now)
            line = self._degraded_log.line(now, self._sides.degraded(now))
            held = self._sides.prefill.states().keys()
        if line is not None:
            logger.warning(line)
        self._send()
        self._links.holding(held)
        self._show()
        self._tell()

    def _patience_s(self) -> float:
        with self._sides.lock:
            due = [self._sides.next_timeout(), self._notices.next_look, self._liveness.next_timeout()]
            return max(0.0, min(when for when in due if when is not None) - self._clock())

    # What comes in.

    def _on_message(self, now: float, source: MessageSource, sender: str, message: m.Message) -> None:
        sides = self._sides
        if source in (MessageSource.PREFILL, MessageSource.DECODE):
            if sides.cluster.is_dead(sender):  # late; let in again, it would never be watched
                self._link_counters["dead_sender"] += 1
                return
            self._liveness.heard(now, sender)
            if isinstance(message, (m.Hello, m.HelloReply)):
                self._liveness.watch_soon(now)
        if source is MessageSource.PREFILL:
            sides.from_prefill(now, sender, message)
            if isinstance(message, (m.Writing, m.Sent)):
                self._notices.hasten(now)
        elif source is MessageSource.DECODE:
            sides.from_decode(now, sender, message)
        elif source is MessageSource.BROKER:
            sides.from_broker(now, sender, message)
        else:
            self._on_operator(now, source, sender, message)

    def _on_operator(self, now: float, source: MessageSource, sender: str, message: m.Message) -> None:
        problem = ""
        if isinstance(message, m.Drain):
            self._sides.drain(now)
        elif isinstance(message, m.SetRole):
            problem = self._sides.set_role(now, message.role)
        elif source is MessageSource.FRONT and message.http:
            self._sides.serves(now, message.http)
        if source is MessageSource.FRONT:
            self._links.to_front(self._status(problem))
        else:
            self._links.to_operator(sender, self._status(problem))

    def _status(self, problem: str = "") -> m.StatusReply:
        state = self._sides.state
        gauges = {**self._sides.counts(), "sockets": self.count_sockets(), **state.gauges()}
        degraded = self._sides.degraded(self._clock())
        return m.StatusReply(state.member(), problem, gauges,
                             "" if degraded is None else f"{degraded.cause}: {degraded.detail}")

    # What is due.

    def _leave_if_drained(self) -> None:
        with self._sides.lock:
            if not self._sides.leave_if_drained():
                return
        logger.info("drained: nothing is open any more")
        self._links.to_broker(m.Leave())

    def _heartbeat(self) -> None:
        now = self._clock()
        with self._sides.lock:
            register = self._sides.registration(now)
            if register is None:
                self._sides.check_broker(now)
                return
        sent = self._links.to_broker(register) is SendResult.SENT
        with self._sides.lock:
            self._sides.registered(now, sent)
            self._sides.check_broker(now)

    def _check_liveness(self) -> None:
        """See whether the processes that matter now still exist."""
        now, sides = self._clock(), self._sides
        gone: list[str] = []
        if self._liveness.is_due(now):
            rank = process.lost(sides.member) if len(sides.member.processes) > 1 else None
            if rank is not None:  # what it was to write never will be; the others may wait for it for ever
                raise ControlError(f"the process {rank.pid} of a rank of this engine has ended")
            with sides.lock:
                peers, busy, members = sides.living_peers(), sides.busy_peers(), sides.cluster.members()
            candidates = {member.incarnation: member for member in (*members, *peers.values())}
            self._liveness.watch(now, peers, busy)
            gone = self._liveness.confirm_gone(now, [name for name, one in candidates.items() if self._is_gone(one)])
        gone += self._liveness.poll_probes(now, self._is_connected)
        with sides.lock:
            for incarnation in gone:
                sides.peer_dead(now, incarnation)

    def _is_connected(self, incarnation: str) -> bool:
        return self._links.is_connected(incarnation, self._sides.decode.hello_reply)

    def _warn(self) -> None:
        """Say once, for each, why a peer does not fit; not more often than every `WARNING_S`, whoever may call."""
        with self._sides.lock:
            now, links = self._clock(), self._links
            if links.other_protocol is not None:
                self._sides.cluster.refused(now, str(PeerMismatch("protocol", m.PROTOCOL, links.other_protocol)))
                links.other_protocol = None
            mismatch = self._sides.mismatch(now)
            if mismatch == self._warned or now < self._next_warning:
                return
            self._warned = mismatch
            if mismatch is not None:
                self._next_warning = now + WARNING_S
        if mismatch is not None:
            logger.warning("a peer does not fit: %s", mismatch)

    # What goes out.

    def _send(self) -> None:
        with self._sides.lock:
            outbox, take = self._sides.to_send()
        for action in outbox:
            self._carry_out(action)
        if take is not None and self._sides.cluster.up and self._links.to_broker(take) is SendResult.SENT:
            with self._sides.lock:
                self._sides.room_told(take)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, ToBroker):
            if self._links.to_broker(action.message) is not SendResult.SENT:
                with self._sides.lock:
                    self._sides.unsent(self._clock(), action.message)
        elif isinstance(action, ToDecode):
            self._links.to_decode(action.peer, action.message)
        elif isinstance(action, ToPrefill):
            self._links.to_prefill(action.peer, action.message)
        elif isinstance(action, Connect):
            self._links.connect(action.peer, action.address)
        elif isinstance(action, Disconnect):
            self._links.disconnect(action.peer)

    def _show(self) -> None:
        """Tell the front end when something has changed that it goes by."""
        with self._sides.lock:
            state = self._sides.state
            shown = (state.role, state.draining, state.left)
            if shown == self._shown:
                return
            self._shown = shown
            status = self._status()
        self._links.to_front(status)

    def _tell(self) -> None:
        """Wake the engine if there is something for it to see."""
        with self._sides.lock:
            look = self._notices.are_due(self._clock(), self._sides.decode)
            wake = self._sides.announce() or look
        if wake:
            self._wake()
