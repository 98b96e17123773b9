# SPDX-License-Identifier: Apache-2.0
"""The rim for groups over several hosts: each rank talks to the coordinator in rank 0's process.

An ask leaves from the engine loop's own socket, at once: handing it to the thread would cost a switch of threads before
every step that is waited for. Everything else is the thread's: it hears the coordinator, wakes the engine loop,
answers, says again what has not been answered for a beat, and finds out that the coordinator is dead. In a quiet group
it sleeps.
"""
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_pd.dp.coordinator import CoordinatorServer
from vllm_pd.dp.core import Ask
from vllm_pd.dp.interface import Abort, GroupFailed, Settings, Wake
from vllm_pd.dp.liveness import TOLD_S, Liveness
from vllm_pd.dp.member import AWAY, BaseMember, log
from vllm_pd.dp.messages import Say, Tell, dealer, decode, encode, rank_identity
from vllm_pd.rpc.codec import BadFrame
from vllm_pd.rpc.sockets import receive, send

_COORDINATOR = 0  # the rank in whose process it is


class RpcMember(BaseMember):
    """A rank that reaches its coordinator over the network. Rank 0 brings the coordinator along and closes it last."""

    def __init__(self, rank: int, size: int, address: str, server_key: bytes, settings: Settings, wake: Wake,
                 abort: Abort, coordinator: CoordinatorServer | None = None):
        super().__init__(rank, size, settings, wake, abort)
        self._coordinator = coordinator
        self._liveness = Liveness([_COORDINATOR], settings.timeout_s, settings.stall_s)
        self._beat_s = self._liveness.beat_s
        self._joined = threading.Event()
        self._asleep = False  # the thread waits without a time limit; under the lock
        self._pending: tuple[int, float] | None = None  # step asked for, when
        self._said_at = 0.0
        self._lost_at: float | None = None
        self._coordinator_closed: float | None = None  # since when
        self._context = zmq.Context()
        try:
            ipv6 = "[" in address
            self._asking = dealer(self._context, server_key, settings.timeout_s, ipv6=ipv6)
            self._listening = dealer(self._context, server_key, settings.timeout_s, rank_identity(rank), ipv6)
            self._monitor = self._listening.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._asking.connect(address)
            self._listening.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise GroupFailed(f"the coordinator's address {address!r} can't be used: {error}") from error
        self._thread.start()

    def wait_joined(self) -> None:
        """Until the coordinator has answered. Raises GroupFailed."""
        if not self._joined.wait(self._settings.join_s):
            raise GroupFailed(f"rank {self.rank} of {self.size}: the coordinator has not answered within "
                              f"{self._settings.join_s:g} s; can this machine reach data_parallel_master_ip?")

    @property
    def messages(self) -> int:
        """Sent by this process, the coordinator's among them."""
        return super().messages + (self._coordinator.messages if self._coordinator is not None else 0)

    def _refresh(self) -> None:
        pass  # the thread does it as word arrives

    def _publish(self, ask: Ask) -> None:
        self._pending = self._pending or (ask.step, time.monotonic())
        self._say(self._asking)

    def _publish_end(self) -> None:
        pass  # goes with the next word

    def _publish_call(self) -> None:
        self._say(self._asking)

    def _publish_leave(self) -> None:
        self._say(self._asking)

    def _say(self, socket: zmq.Socket, answer: bool = False, closed: bool = False) -> None:
        """Locked. What can't be sent is said again after a beat."""
        self.counters.messages += 1
        self._said_at = time.monotonic()
        send(socket, encode(Say(self.rank, self._participant.known(), answer, closed)))
        if self._asleep:
            self._asleep = False
            self._waker.set()

    def ends(self) -> None:
        """See interface.Member."""
        super().ends()
        if self._coordinator is not None:
            self._coordinator.ends = True

    def _before_close(self) -> None:
        with self._lock:
            self._say(self._asking, closed=True)

    def _release(self) -> None:
        self._listening.disable_monitor()
        self._monitor.close(0)
        self._listening.close(0)
        self._asking.close(500)  # the good-bye may still leave
        if self._coordinator is not None:
            self._coordinator.close()
        self._context.term()

    def _watch(self) -> None:
        poller = zmq.Poller()
        for source in (self._listening, self._monitor, self._waker):
            poller.register(source, zmq.POLLIN)
        with self._lock:
            self._say(self._listening, answer=True)
        while not self._closing.is_set() and not self._failed:
            ready = dict(poller.poll(self._wait_ms()))
            if self._waker.fileno() in ready:
                self._waker.clear()
            now = time.monotonic()
            if self._monitor in ready:
                self._connection_changed(now)
            while (frames := receive(self._listening)) is not None:
                self._hear(frames, now)
            self._check(now)

    def _wait_ms(self) -> float | None:
        with self._lock:
            self._asleep = not self._busy() and self._lost_at is None and self._coordinator_closed is None
            return None if self._asleep else min(self._beat_s / 2, TOLD_S) * 1000

    def _busy(self) -> bool:
        """Locked. There are steps to run, or words to be answered."""
        participant = self._participant
        return (participant.ended < participant.agreed or participant.unanswered or participant.turns.known.open
                or participant.called)

    def _connection_changed(self, now: float) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._lost_at = self._lost_at or now
            else:
                self._lost_at = None
                with self._lock:
                    self._say(self._listening, answer=True)

    def _hear(self, frames: list[bytes], now: float) -> None:
        try:
            tell = decode(frames)
        except BadFrame as error:
            log.warning("dropped a frame: %s", error)
            return
        if not isinstance(tell, Tell):
            log.warning("dropped %s: not for a rank", tell)
            return
        self._liveness.heard(_COORDINATOR, now)
        if tell.fault:
            self._fail(tell.fault)
            return
        if tell.closed:
            self._coordinator_closed = self._coordinator_closed or now
        with self._lock:
            became_due = self._participant.told(tell.step, tell.over, tell.left, tell.calls, tell.ready)
            if self._pending and tell.step >= self._pending[0]:
                self._meter.answered(now - self._pending[1])
                self._pending = None
            if tell.answer:
                self._say(self._listening)
        self._joined.set()
        if became_due:
            self._wake_engine()

    def _check(self, now: float) -> None:
        with self._lock:
            busy = self._busy()
            ended = self._participant.ended
            steps = ended < self._participant.agreed
            if busy and self._participant.unanswered and now - self._said_at >= self._beat_s:
                self._say(self._listening, answer=True)
            done = self._participant.over and not busy
        if self._failed or done:
            return
        if self._loop_is_away(now):
            return self._fail(f"rank {self.rank}: {AWAY}")
        closed = self._coordinator_closed
        if closed is not None and now - closed >= TOLD_S and not self._ends:
            self._fail(f"rank {_COORDINATOR}: it has been shut down, and the others can't go on without it")
        elif self._lost_at is not None and now - self._lost_at > self._beat_s and (busy or closed is None):
            self._fail(f"the coordinator (rank {_COORDINATOR}): its process has ended or can't be reached")
        elif not busy or not self._joined.is_set():
            self._liveness.quiet()
        elif wrong := self._liveness.look(now, ended, steps):
            self._fail(f"the coordinator (rank {_COORDINATOR}): {wrong.text}" if wrong.rank is not None else wrong.text)
