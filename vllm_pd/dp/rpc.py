# SPDX-License-Identifier: Apache-2.0
"""The network backend, for groups over several hosts: each rank talks to the coordinator in rank 0's process.

The engine loop sends step requests from a socket of its own, at once. Handing them to the thread would cost a switch of
threads before every step that other ranks wait for. The thread does everything else. It receives updates, wakes the
engine loop, answers, reports again what the coordinator has not confirmed for a beat, and finds out that the
coordinator is dead. In a quiet group it sleeps.
"""
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_pd.dp.coordinator import CoordinatorServer
from vllm_pd.dp.core import StepRequest
from vllm_pd.dp.interface import Abort, GroupFailed, SyncSettings, Wake
from vllm_pd.dp.liveness import SHUTDOWN_SPREAD_S, GroupLiveness
from vllm_pd.dp.member import AWAY, BaseMember, log
from vllm_pd.dp.messages import CoordinatorUpdate, RankReport, dealer, decode, encode, rank_identity
from vllm_pd.rpc.codec import BadFrame
from vllm_pd.rpc.sockets import receive, send

_COORDINATOR = 0  # the rank in whose process it is


class RpcMember(BaseMember):
    """A rank that reaches its coordinator over the network at `address`, whose CURVE key is `server_key`. On rank 0
    the member owns the `coordinator` and closes it last. Raises GroupFailed if the address can't be used."""

    def __init__(self, rank: int, size: int, address: str, server_key: bytes, settings: SyncSettings, wake: Wake,
                 abort: Abort, coordinator: CoordinatorServer | None = None):
        super().__init__(rank, size, settings, wake, abort)
        self._coordinator = coordinator
        self._liveness = GroupLiveness([_COORDINATOR], settings.timeout_s, settings.stall_s)
        self._beat_s = self._liveness.beat_s
        self._joined = threading.Event()
        self._asleep = False  # whether the thread waits without a time limit; needs the lock
        self._pending: tuple[int, float] | None = None  # the oldest unanswered step request: step, when
        self._reported_at = 0.0
        self._lost_at: float | None = None
        self._coordinator_closed: float | None = None  # since when
        self._context = zmq.Context()
        try:
            ipv6 = "[" in address
            self._loop_socket = dealer(self._context, server_key, settings.timeout_s, ipv6=ipv6)
            self._thread_socket = dealer(self._context, server_key, settings.timeout_s, rank_identity(rank), ipv6)
            self._monitor = self._thread_socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._loop_socket.connect(address)
            self._thread_socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise GroupFailed(f"the coordinator's address {address!r} can't be used: {error}") from error
        self._thread.start()

    def wait_joined(self) -> None:
        """Block until the coordinator has answered. Raises GroupFailed after `join_s`."""
        if not self._joined.wait(self._settings.join_s):
            raise GroupFailed(f"rank {self.rank} of {self.size}: the coordinator has not answered within "
                              f"{self._settings.join_s:g} s; can this machine reach data_parallel_master_ip?")

    @property
    def messages(self) -> int:
        """See GroupMember."""
        return super().messages + (self._coordinator.messages if self._coordinator is not None else 0)

    def _refresh(self) -> None:
        pass  # the thread does it when an update arrives

    def _publish_request(self, request: StepRequest) -> None:
        self._pending = self._pending or (request.step, time.monotonic())
        self._report(self._loop_socket)

    def _publish_end(self) -> None:
        pass  # goes with the next report

    def _publish_call(self) -> None:
        self._report(self._loop_socket)

    def _publish_leave(self) -> None:
        self._report(self._loop_socket)

    def _report(self, socket: zmq.Socket, answer: bool = False, closed: bool = False) -> None:
        """Send this rank's state. Locked. If it can't be sent, the thread sends it again after a beat."""
        self.counters.messages += 1
        self._reported_at = time.monotonic()
        send(socket, encode(RankReport(self.rank, self._participant.state(), answer, closed)))
        if self._asleep:
            self._asleep = False
            self._waker.set()

    def expect_end(self) -> None:
        """See GroupMember."""
        super().expect_end()
        if self._coordinator is not None:
            self._coordinator.end_expected = True

    def _before_close(self) -> None:
        with self._lock:
            self._report(self._loop_socket, closed=True)

    def _release(self) -> None:
        self._thread_socket.disable_monitor()
        self._monitor.close(0)
        self._thread_socket.close(0)
        self._loop_socket.close(500)  # leave the last report half a second to be sent
        if self._coordinator is not None:
            self._coordinator.close()
        self._context.term()

    def _watch(self) -> None:
        """The thread: reports this rank to the coordinator, then receives and checks until `close` or a failure. It
        sleeps while nothing is due (`_asleep`); a report of the engine loop wakes it."""
        poller = zmq.Poller()
        for source in (self._thread_socket, self._monitor, self._waker):
            poller.register(source, zmq.POLLIN)
        with self._lock:
            self._report(self._thread_socket, answer=True)
        while not self._closing.is_set() and not self._failed:
            ready = dict(poller.poll(self._wait_ms()))
            if self._waker.fileno() in ready:
                self._waker.clear()
            now = time.monotonic()
            if self._monitor in ready:
                self._connection_changed(now)
            while (frames := receive(self._thread_socket)) is not None:
                self._receive(frames, now)
            self._check(now)

    def _wait_ms(self) -> float | None:
        with self._lock:
            self._asleep = not self._busy() and self._lost_at is None and self._coordinator_closed is None
            return None if self._asleep else min(self._beat_s / 2, SHUTDOWN_SPREAD_S) * 1000

    def _busy(self) -> bool:
        """Whether there are steps to run, calls to make, or reports to be confirmed. Locked."""
        participant = self._participant
        return (participant.ended < participant.agreed or participant.unconfirmed
                or participant.call_state.registers.open or participant.call_pending)

    def _connection_changed(self, now: float) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._lost_at = self._lost_at or now
            else:
                self._lost_at = None
                with self._lock:
                    self._report(self._thread_socket, answer=True)

    def _receive(self, frames: list[bytes], now: float) -> None:
        """An update of the coordinator; anything else is logged and dropped. Wakes the engine loop if it makes
        something due. A fault in it ends the group for this rank."""
        try:
            update = decode(frames)
        except BadFrame as error:
            log.warning("dropped a frame: %s", error)
            return
        if not isinstance(update, CoordinatorUpdate):
            log.warning("dropped %s: not an update for a rank", update)
            return
        self._liveness.heard(_COORDINATOR, now)
        if update.fault:
            self._fail(update.fault)
            return
        if update.closed:
            self._coordinator_closed = self._coordinator_closed or now
        with self._lock:
            became_due = self._participant.update(update.step, update.over, update.left, update.registers, update.ready)
            if self._pending and update.step >= self._pending[0]:
                self._meter.answered(now - self._pending[1])
                self._pending = None
            if update.answer:
                self._report(self._thread_socket)
        self._joined.set()
        if became_due:
            self._wake_engine()

    def _check(self, now: float) -> None:
        """Report what is due, and fail where a rank or the coordinator is gone or silent."""
        with self._lock:
            busy = self._busy()
            ended = self._participant.ended
            steps = ended < self._participant.agreed
            if busy and self._participant.unconfirmed and now - self._reported_at >= self._beat_s:
                self._report(self._thread_socket, answer=True)
            done = self._participant.over and not busy
        if self._failed or done:
            return
        if self._loop_is_away(now):
            return self._fail(f"rank {self.rank}: {AWAY}")
        closed = self._coordinator_closed
        if closed is not None and now - closed >= SHUTDOWN_SPREAD_S and not self._end_expected:
            self._fail(f"rank {_COORDINATOR}: it has been shut down, and the others can't go on without it")
        elif self._lost_at is not None and now - self._lost_at > self._beat_s and (busy or closed is None):
            self._fail(f"the coordinator (rank {_COORDINATOR}): its process has ended or can't be reached")
        elif not busy or not self._joined.is_set():
            self._liveness.reset()
        elif failure := self._liveness.check(now, ended, steps):
            whom = f"the coordinator (rank {_COORDINATOR}): " if failure.rank is not None else ""
            self._fail(whom + failure.text)
