# SPDX-License-Identifier: Apache-2.0
"""The coordinator over the network: a ROUTER socket on a thread of rank 0's process, around `core.Coordinator`.

It sends the current values to every rank that does not know them: once when they change, and again every beat until
that rank has confirmed them. While there are steps to run, it asks all ranks for a sign of life every beat. In a quiet
group the thread sleeps until a message arrives or a connection is lost. After a lost connection it asks all ranks once
more. A rank that it can't reach for `lost_s` counts as dead.
"""
import logging
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_pd.dp.calls import CallRegisters
from vllm_pd.dp.core import Coordinator
from vllm_pd.dp.interface import GroupFailed, SyncSettings
from vllm_pd.dp.liveness import SHUTDOWN_SPREAD_S, GroupLiveness
from vllm_pd.dp.messages import CoordinatorUpdate, Keys, RankReport, decode, encode, rank_identity, router
from vllm_pd.rpc.codec import BadFrame
from vllm_pd.rpc.poller import SocketPoller
from vllm_pd.rpc.sockets import SendResult, endpoint, receive, send

log = logging.getLogger("vllm.pd")

THREAD = "vllm-pd-dp-coordinator"


class CoordinatorServer:
    """Binds a port of `host` at once, or raises GroupFailed. Serves `size` ranks until `close`."""

    def __init__(self, size: int, host: str, settings: SyncSettings, keys: Keys):
        self._size = size
        self._settings = settings
        self._core = Coordinator.of(size)
        self._liveness = GroupLiveness(list(range(size)), settings.timeout_s, settings.stall_s)
        self._beat_s = self._liveness.beat_s
        self.lost_s = settings.timeout_s / 4
        self._sent: list[tuple[tuple[int, bool, CallRegisters], float]] = [((-1, False, CallRegisters()), 0.0)] * size
        self._lost: dict[int, float] = {}
        self._closed: dict[int, float] = {}  # by rank, since when
        self._fault = ""
        self._closing = threading.Event()
        self._poller = SocketPoller()
        self._context = zmq.Context()
        self.dropped = 0  # frames that are not reports of this group's ranks
        self.messages = 0  # updates sent
        self.end_expected = False  # see GroupMember.expect_end
        try:
            self._socket = router(self._context, host, keys, settings.timeout_s)
        except zmq.ZMQError as error:
            self._context.term()
            raise GroupFailed(f"data_parallel_master_ip={host!r} can't be bound by rank 0: {error}; set an address "
                              f"of this machine that all ranks can reach") from error
        self.address = endpoint(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. If all ranks have left, wait up to `timeout_s` until all of them know it."""
        self._closing.set()
        self._poller.waker.set()
        self._thread.join(2 * self._settings.timeout_s)
        if self._thread.is_alive():
            log.error("thread %s does not end", self._thread.name)

    def _run(self) -> None:
        """The thread: serve until the end, and say so where it breaks."""
        try:
            self._serve()
        except Exception as error:  # without this, the ranks would find out only after timeout_s
            log.exception("unexpected error in the coordinator of a data-parallel group")
            self._fault = f"unexpected error in the coordinator: {error!r}"
            self._send_all(time.monotonic())
        finally:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(500)  # leave queued messages half a second to be sent
            self._context.term()
            self._poller.close()

    def _serve(self) -> None:
        """Serve until `close`, and then, where all ranks have left, up to `timeout_s` more until all of them know it.
        The last message to every rank says that the coordinator has closed."""
        self._poller.watch(self._socket)
        self._poller.watch(self._monitor)
        closing_until = None
        while True:
            ready = self._poller.wait(self._wait_s())
            now = time.monotonic()
            if self._monitor in ready:
                while self._monitor.poll(0):
                    recv_monitor_message(self._monitor)
                self._send_all(now)  # finds out which ranks can't be reached
            while (frames := receive(self._socket)) is not None:
                self._receive(frames, now)
            self._send_outdated(now)
            if not self._fault:
                self._check(now)
            if self._closing.is_set():
                closing_until = closing_until or now + self._settings.timeout_s
                if not self._core.over or not self._core.outdated_ranks() or self._fault or now > closing_until:
                    break
        self._send_all(time.monotonic(), closed=True)

    def _wait_s(self) -> float | None:
        """How long to sleep, in s. None: until something arrives, in a quiet group."""
        if self._fault:
            return None if not self._closing.is_set() else 0
        if self._core.quiet and all(self._core.joined) and not self._lost and not self._closed:
            return None
        wait_s = self._beat_s / 2 if self._lost else self._beat_s
        return min(wait_s, SHUTDOWN_SPREAD_S) if self._closed else wait_s

    def _receive(self, frames: list[bytes], now: float) -> None:
        """A rank's report; anything else is counted, logged and dropped. The rank is answered where it asks for that,
        or where the group has failed."""
        try:
            message = decode(frames[1:])
        except BadFrame as error:
            self.dropped += 1
            log.warning("dropped a frame: %s", error)
            return
        if not isinstance(message, RankReport) or message.rank >= self._size:
            self.dropped += 1
            log.warning("dropped %s: not a report to the coordinator of %d ranks", message, self._size)
            return
        self._core.receive(message.rank, message.state)
        self._liveness.heard(message.rank, now)
        if message.closed:
            self._closed.setdefault(message.rank, now)
        if message.answer or self._fault:
            self._send_update(message.rank, now)

    def _send_outdated(self, now: float) -> None:
        """Send the current values to the ranks that do not know them, at once when they have changed and then every
        beat. While there are steps to run, all ranks are asked for a sign of life every beat. One that can't be reached
        is asked every half beat in any case."""
        state = (self._core.step, self._core.over, self._core.registers)
        for rank in self._core.outdated_ranks():
            before, at = self._sent[rank]
            if before != state:
                self._send_update(rank, now)
            elif now - at >= self._beat_s:
                self._send_update(rank, now, answer=True)
        if not self._core.quiet:
            for rank, (_, at) in enumerate(self._sent):
                if now - at >= self._beat_s:
                    self._send_update(rank, now, answer=True)
        for rank in list(self._lost):
            if now - self._sent[rank][1] >= self._beat_s / 2:
                self._send_update(rank, now, answer=True)

    def _send_all(self, now: float, closed: bool = False) -> None:
        for rank in reversed(range(self._size)):  # rank 0 last: a fault may make it end this process
            self._send_update(rank, now, answer=not closed, closed=closed)

    def _send_update(self, rank: int, now: float, answer: bool = False, closed: bool = False) -> None:
        """Send a rank the current values, if it has joined. `answer` asks for a report, `closed` says that the
        coordinator ends. Notes since when the rank can't be reached."""
        if not self._core.joined[rank]:
            return
        core = self._core
        self._sent[rank] = ((core.step, core.over, core.registers), now)
        self.messages += 1
        state = core.states[rank]
        update = CoordinatorUpdate(core.step, core.over, state.left, core.registers, state.ready, answer, self._fault,
                                   closed)
        result = send(self._socket, rank_identity(rank), encode(update))
        if result is SendResult.UNREACHABLE:
            self._lost.setdefault(rank, now)
        else:
            self._lost.pop(rank, None)

    def _check(self, now: float) -> None:
        """Look for failures, and end the group at the first one. Before all ranks have joined, only the time for that
        counts. In a quiet group no sign of life is expected, but a rank that can't be reached, or was shut down too
        early, counts."""
        core = self._core
        if not all(core.joined):
            if now - self._started > self._settings.join_s:
                absent = [rank for rank, joined in enumerate(core.joined) if not joined]
                self._give_up(f"ranks {absent} have not joined within {self._settings.join_s:g} s", now)
            return
        for rank, since in self._lost.items():
            done = core.over and not core.needs(rank)
            if done or rank in self._closed:
                continue
            if now - since > self.lost_s:
                return self._give_up(f"rank {rank}: its process has ended or can't be reached", now)
        missed = [rank for rank, since in self._closed.items()
                  if core.needs(rank) or not core.over and not self.end_expected and now - since >= SHUTDOWN_SPREAD_S]
        if missed:
            return self._give_up(f"rank {missed[0]}: it has been shut down, and the others can't go on without it", now)
        if core.quiet:
            return self._liveness.reset()
        for rank in self._closed:
            self._liveness.heard(rank, now)
        ended = [state.ended for state in core.states]
        if failure := self._liveness.check(now, sum(ended), min(ended) < core.step):
            whom = f"rank {failure.rank}: " if failure.rank is not None else ""
            self._give_up(whom + failure.text, now)
        return None

    def _give_up(self, fault: str, now: float) -> None:
        self._fault = fault[:1000]
        log.error("data-parallel group failed: %s", fault)
        self._send_all(now)
