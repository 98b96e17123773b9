# SPDX-License-Identifier: Apache-2.0
"""The thread that speaks for an engine. It owns the sockets and waits for the deadlines; what is sent, and why, is
decided by the `PeerProtocol`.
"""
import contextlib
import logging
import threading
from collections.abc import Callable, Set
from urllib.parse import urlsplit

from vllm_pd.errors import ControlError
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.degraded import DegradedLog
from vllm_pd.peer.direct_jobs import NOT_CLAIMED, DirectJobs
from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.peer.liveness.monitor import LivenessMonitor
from vllm_pd.peer.notices import Notices
from vllm_pd.peer.poster import MetaserverPoster
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.peer.sockets import ControlSockets
from vllm_pd.peer.trials import AddressTrials
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, Connect, Disconnect, PostJob, StopPost, ToBroker, ToDecode, ToPrefill
from vllm_pd.rpc.locality import is_own
from vllm_pd.rpc.sockets import SendResult

logger = logging.getLogger("vllm.pd")

WARNING_S = 5.0
LINGER_MS = 100
ADDRESS_S = 1.0  # how often it is seen whether this machine still has the engine's address
READS_S = 1.0  # how long the end of this engine waits for decode engines to end their reads of its blocks


class ControlThread:
    """Owns `sockets` and `poster`, which it closes at its end, and borrows `lifeline`. `wake` is called from the thread
    when there are new events. `look` is called from the thread while the notice of a transfer is due, which only the
    engine can see; its arguments are those of a `Watch`. Without it, the engine is woken for each look. `error` is what
    the thread died of; from then on nothing is sent."""

    def __init__(self, protocol: PeerProtocol, sockets: ControlSockets, lifeline: Lifeline, wake: Callable[[], None],
                 clock: Callable[[], float], is_gone: Callable[[m.Member], bool],
                 look: Callable[[float, float], None] | None = None, poster: MetaserverPoster | None = None):
        self.error: BaseException | None = None
        self._protocol = protocol
        self._control = protocol.control
        self._deaths = protocol.deaths
        self.sockets = sockets
        self._lifeline = lifeline
        self.liveness = LivenessMonitor()
        self._notices = Notices(lasting=look is not None)
        self._direct = DirectJobs()
        self._trials: AddressTrials[tuple[MessageSource, str]] = AddressTrials(local_only=not sockets.has_keys)
        self._poster = poster
        self._wake = wake
        self._look = look or (lambda pause_s, lasts_s: wake())
        self._clock = clock
        self._is_gone = is_gone
        self._stopping = False
        self._shown: tuple[m.Role, bool, bool] | None = None  # what the front end was last sent
        self._warned: str | None = None
        self._next_warning = 0.0
        self._host = urlsplit(protocol.member.address).hostname or ""
        self._next_address_look, self._had_address = 0.0, False
        self._degraded_log = DegradedLog(protocol.control.ttl_s)
        for source in (lifeline, self.liveness, self._trials):
            sockets.watch(source.fileno())
        self._thread = threading.Thread(target=self._main, name="vllm-pd-control", daemon=True)
        self._control.set_wakeup(self._wakeup)

    # For the engine's threads.

    def start(self) -> None:
        """Run until `stop`."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Have it leave the registry and end, and wait for that: not in the thread itself, where the garbage collector
        may close an engine."""
        self._stopping = True
        if threading.current_thread() is self._thread:
            return
        self._control.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def count_sockets(self) -> int:
        """Open sockets."""
        return self.sockets.count()

    def _wakeup(self) -> None:
        """There is something new in the protocol, whose lock is held: so the sockets are open."""
        if threading.current_thread() is not self._thread:
            self.sockets.waker.set()

    # The thread.

    def _main(self) -> None:
        """The thread: turns until `stop`, then `_leave`. At its end, also by an error, it closes the sockets and all
        else that it owns."""
        try:
            while not self._stopping:
                self._turn()
            self._leave()
        except BaseException as error:  # whatever it is, the engine must learn of it and go on alone
            logger.exception("the control thread ended; all prefills stay local from now on")
            self.error = error
            self._control.shut(f"the control thread ended: {error!r}")
            self._wake()
            self._end_direct(frozenset(), "the control thread of this engine has ended")
        finally:
            self._control.set_wakeup(None)
            if self._poster is not None:
                self._poster.close()
            self.sockets.close(LINGER_MS)
            self.liveness.close()
            self._trials.close()

    def _leave(self) -> None:
        """Send what the engine still has to say, cancel what it had asked for, have others end their reads, and say
        goodbye."""
        self._protocol.decode.abort_all()
        self._protocol.prefill.close_holds()
        self._transmit()
        until = self._clock() + READS_S
        while self._protocol.prefill.is_read() and (left_s := until - self._clock()) > 0:
            self._receive_all(left_s)
            self._transmit()
        self._end_direct(frozenset(), "this engine ends")
        self.sockets.to_broker(m.Leave())

    def _turn(self) -> None:
        """Wait and receive. First send what comes of it, for which others wait; then do what is due, and send that."""
        self._receive_all(self._timeout_s())
        for peer in self.sockets.take_disconnected():
            self._deaths.disconnected(peer)
        self._transmit()
        self._wake_engine()
        self._lifeline.accept_waiting()
        self._report_trials()
        self._check_liveness()
        self._check_address()
        self._warn()
        self._control.handle_timeout()
        line = self._degraded_log.line(self._clock(), self._control.last_degraded)
        if line is not None:
            logger.warning(line)
        jobs = self._protocol.prefill.jobs()
        self._transmit()
        self._end_direct(jobs)
        self.sockets.holding(self._protocol.prefill.jobs())
        self._show_state()
        self._wake_engine()

    def _timeout_s(self) -> float:
        due = [self._control.next_timeout(), self._notices.next_look, self.liveness.next_timeout(),
               self._trials.next_timeout(), self._next_address_look if self._host else None]
        return max(0.0, min(when for when in due if when is not None) - self._clock())

    # What comes in.

    def _receive_all(self, timeout_s: float) -> None:
        """Wait for messages, at most so long, and receive what has come."""
        for source, sender, message in self.sockets.receive(self.sockets.poll(timeout_s)):
            try:
                self._receive(source, sender, message)
            except Exception:  # one peer's message must not silence the engine for all others
                self.sockets.counters["frame_error"] += 1
                logger.exception("unexpected error in a %s from %s", type(message).__name__, sender)

    def _receive(self, source: MessageSource, sender: str, message: m.Message) -> None:
        if isinstance(message, m.DirectJob):
            self._take_job(sender, message.job)
        elif isinstance(message, m.TryAddresses):
            self._trials.add((source, sender), message.addresses)
        elif source in (MessageSource.OPERATOR, MessageSource.FRONT):
            self._answer_operator(source, sender, message)
        elif not self._control.receive(source, sender, message):
            self.sockets.counters["dead_sender"] += 1
        elif source is not MessageSource.BROKER:
            self._note_peer(source, sender, message)

    def _note_peer(self, source: MessageSource, sender: str, message: m.Message) -> None:
        now = self._clock()
        self.liveness.heard(now, sender)
        if isinstance(message, (m.Hello, m.HelloReply)):
            self.liveness.watch_soon(now)
        if source is MessageSource.PREFILL and isinstance(message, (m.Writing, m.Sent)):
            self._notices.look_soon(now)

    def _take_job(self, front: str, job: m.Job) -> None:
        problem = self._protocol.prefill.take_job(job)
        self.sockets.to_front(front, m.DirectJobTaken(job.attempt))
        if problem:
            self.sockets.to_front(front, m.DirectJobEnd(job.attempt, problem))
        else:
            self._direct.add(job.attempt, front)

    def _answer_operator(self, source: MessageSource, sender: str, message: m.Message) -> None:
        """Carry out what an operator or our own front end asks for. Each message is answered with the engine's status,
        as it is after that; `problem` in it says what was refused."""
        problem = ""
        if isinstance(message, m.Drain):
            self._protocol.operators.drain()
        elif isinstance(message, m.SetRole):
            problem = self._protocol.operators.set_role(message.role)
        elif isinstance(message, m.Gone):
            problem = self._deaths.operator_says_gone(message.incarnation)
        elif source is MessageSource.FRONT and message.http:
            self._protocol.operators.set_http(message.http)
        asked = message if isinstance(message, m.Status) else m.Status()
        self._to_operator(source, sender, self._protocol.operators.status(self.count_sockets(), problem, asked))

    def _report_trials(self) -> None:
        """Say what has come of the addresses that this engine was to try."""
        for (source, sender), trials in self._trials.poll(self._clock()):
            operators = self._protocol.operators
            self._to_operator(source, sender, m.AddressesTried(trials, operators.listens(), operators.pair_faults()))

    def _to_operator(self, source: MessageSource, sender: str, message: m.Message) -> None:
        if source is MessageSource.FRONT:
            self.sockets.to_front(sender, message)
        else:
            self.sockets.to_operator(sender, message)

    # What is due.

    def _check_liveness(self) -> None:
        """See whether the processes that matter now still exist."""
        now = self._clock()
        gone: list[str] = []
        if self.liveness.is_due(now):
            member = self._protocol.member
            rank = process.lost(member) if len(member.processes) > 1 else None
            if rank is not None:  # what it was to write never will be; the others may wait for it for ever
                raise ControlError(f"the process {rank.pid} of a rank of this engine has ended")
            peers = self._deaths.watched_peers()
            self.liveness.watch(now, peers.introduced, peers.busy)
            gone = self.liveness.confirm_gone(now, [name for name, one in peers.known.items() if self._is_gone(one)])
        for incarnation in gone:
            self._deaths.peer_dead(incarnation)
        for incarnation in self.liveness.poll_probes(now, self._is_connected):
            self._deaths.lifeline_gone(incarnation)

    def _check_address(self) -> None:
        """See whether this machine still has the address of this engine."""
        now = self._clock()
        if now < self._next_address_look or not self._host:
            return
        self._next_address_look = now + ADDRESS_S
        with contextlib.suppress(OSError, ValueError):  # it is not known, or it is a name
            is_here = is_own(self._host)
            self._had_address |= is_here  # else the kernel lets it listen at one that no interface has
            if self._had_address:
                self._deaths.address_is_here(self._host, is_here)

    def _is_connected(self, incarnation: str) -> bool:
        return self.sockets.is_connected(incarnation, self._control.hello, self._control.hello_reply)

    def _warn(self) -> None:
        """Log once, for each, why a peer does not fit; not more often than every `WARNING_S`, whoever may call."""
        version = self.sockets.other_protocol
        if version is not None:
            self.sockets.other_protocol = None
        mismatch = self._control.mismatch(version)
        now = self._clock()
        if mismatch == self._warned or now < self._next_warning:
            return
        self._warned = mismatch
        if mismatch is not None:
            self._next_warning = now + WARNING_S
            logger.warning("a peer does not fit: %s", mismatch)

    # What goes out.

    def _transmit(self) -> None:
        while (action := self._control.poll_transmit()) is not None:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        """Do what the protocol wants done outside of it."""
        if isinstance(action, ToBroker):
            if self.sockets.to_broker(action.message) is not SendResult.SENT:
                self._control.transmit_failed(action.message)
        elif isinstance(action, ToDecode):
            self.sockets.to_decode(action.peer, action.message)
            self._direct.transmitted(action.message)
        elif isinstance(action, ToPrefill):
            self.sockets.to_prefill(action.peer, action.message)
        elif isinstance(action, Connect):
            self.sockets.connect(action.peer, action.address, action.is_elsewhere)
        elif isinstance(action, Disconnect):
            self.sockets.disconnect(action.peer)
        elif isinstance(action, PostJob | StopPost) and self._poster is not None:
            self._poster.carry_out(action)

    def _end_direct(self, jobs: Set[m.Attempt], otherwise: str = NOT_CLAIMED) -> None:
        """Tell the front end which jobs of its clients have ended; `jobs` are open."""
        for front, end in self._direct.poll(jobs, otherwise):
            self.sockets.to_front(front, end)

    def _show_state(self) -> None:
        """Send the status to the front end when something has changed that it goes by."""
        state = self._protocol.state
        shown = (state.role, state.draining, state.left)
        if shown != self._shown:
            self._shown = shown
            self.sockets.to_fronts(self._protocol.operators.status(self.count_sockets()))

    def _wake_engine(self) -> None:
        """Wake the engine if there is something for it to see, or to look for."""
        watch = self._notices.take_due(self._clock(), self._control.writing_since())
        if watch is not None:
            self._look(*watch)
        if self._control.announce():
            self._wake()
