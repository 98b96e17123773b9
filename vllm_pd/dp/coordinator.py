# SPDX-License-Identifier: Apache-2.0
"""The coordinator's rim: a ROUTER on a thread of rank 0's process, around `core.Coordinator`.

It tells every rank whatever that rank is owed, once when it is news and again every beat until the rank has said that
it knows. While there are steps to run it asks all for a sign of life each beat. In a quiet group the thread sleeps;
what wakes it is a message, or a connection that is lost: then it asks everyone once more, and who can't be reached for
`lost_s` is dead.
"""
import logging
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from vllm_pd.dp.calls import Calls
from vllm_pd.dp.core import Coordinator
from vllm_pd.dp.interface import GroupFailed, Settings
from vllm_pd.dp.liveness import TOLD_S, Liveness
from vllm_pd.dp.messages import Keys, Say, Tell, decode, encode, rank_identity, router
from vllm_pd.rpc.codec import BadFrame
from vllm_pd.rpc.sockets import SendResult, Waker, endpoint, receive, send

log = logging.getLogger("vllm.pd")

THREAD = "vllm-pd-dp-coordinator"


class CoordinatorServer:
    """Binds at once (raises GroupFailed where it can't), serves until `close`."""

    def __init__(self, size: int, host: str, settings: Settings, keys: Keys):
        self._size = size
        self._settings = settings
        self._core = Coordinator.of(size)
        self._liveness = Liveness(list(range(size)), settings.timeout_s, settings.stall_s)
        self._beat_s = self._liveness.beat_s
        self.lost_s = settings.timeout_s / 4
        self._sent: list[tuple[tuple[int, bool, Calls], float]] = [((-1, False, Calls()), 0.0)] * size
        self._lost: dict[int, float] = {}
        self._closed: dict[int, float] = {}  # since when
        self._fault = ""
        self._closing = threading.Event()
        self._waker = Waker()
        self._context = zmq.Context()
        self.dropped = 0  # frames that were none of ours
        self.messages = 0
        self.ends = False  # this process has been told to end, see interface.Member
        try:
            self._socket = router(self._context, host, keys, settings.timeout_s)
        except zmq.ZMQError as error:
            self._context.term()
            raise GroupFailed(f"data_parallel_master_ip={host!r} can't be bound by rank 0: {error}; name an address "
                              f"of this machine that all ranks reach") from error
        self.address = endpoint(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; if all ranks have left, after all of them know it (or `timeout_s`)."""
        self._closing.set()
        self._waker.set()
        self._thread.join(2 * self._settings.timeout_s)
        if self._thread.is_alive():
            log.error("the thread %s does not end", self._thread.name)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # its silence makes every rank fail, within timeout_s where one is working
            log.exception("the coordinator of a data-parallel group broke")
            self._fault = f"the coordinator broke: {error!r}"
            self._tell_all(time.monotonic())
        finally:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(500)  # what has been sent may still leave
            self._context.term()
            self._waker.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._waker):
            poller.register(source, zmq.POLLIN)
        closing_until = None
        while True:
            ready = dict(poller.poll(self._wait_ms()))
            now = time.monotonic()
            if self._monitor in ready:
                while self._monitor.poll(0):
                    recv_monitor_message(self._monitor)
                self._tell_all(now)  # who has gone?
            while (frames := receive(self._socket)) is not None:
                self._hear(frames, now)
            self._tell_owed(now)
            if not self._fault:
                self._check(now)
            if self._closing.is_set():
                self._waker.clear()
                closing_until = closing_until or now + self._settings.timeout_s
                if not self._core.over or not self._core.owed() or self._fault or now > closing_until:
                    break
        self._tell_all(time.monotonic(), closed=True)

    def _wait_ms(self) -> float | None:
        """Nothing to do before that. None in a quiet group."""
        if self._fault:
            return None if not self._closing.is_set() else 0
        if self._core.quiet and all(self._core.here) and not self._lost and not self._closed:
            return None
        wait_s = self._beat_s / 2 if self._lost else self._beat_s
        return 1000 * (min(wait_s, TOLD_S) if self._closed else wait_s)

    def _hear(self, frames: list[bytes], now: float) -> None:
        try:
            message = decode(frames[1:])
        except BadFrame as error:
            self.dropped += 1
            log.warning("dropped a frame: %s", error)
            return
        if not isinstance(message, Say) or message.rank >= self._size:
            self.dropped += 1
            log.warning("dropped %s: not for the coordinator of %d ranks", message, self._size)
            return
        self._core.hear(message.rank, message.known)
        self._liveness.heard(message.rank, now)
        if message.closed:
            self._closed.setdefault(message.rank, now)
        if message.answer or self._fault:
            self._tell(message.rank, now)

    def _tell_owed(self, now: float) -> None:
        state = (self._core.step, self._core.over, self._core.calls)
        for rank in self._core.owed():
            before, at = self._sent[rank]
            if before != state:
                self._tell(rank, now)
            elif now - at >= self._beat_s:
                self._tell(rank, now, answer=True)
        if not self._core.quiet:
            for rank, (_, at) in enumerate(self._sent):
                if now - at >= self._beat_s:
                    self._tell(rank, now, answer=True)
        for rank in list(self._lost):
            if now - self._sent[rank][1] >= self._beat_s / 2:
                self._tell(rank, now, answer=True)

    def _tell_all(self, now: float, closed: bool = False) -> None:
        for rank in reversed(range(self._size)):  # rank 0 last: it may end this process when it hears of a fault
            self._tell(rank, now, answer=not closed, closed=closed)

    def _tell(self, rank: int, now: float, answer: bool = False, closed: bool = False) -> None:
        if not self._core.here[rank]:
            return
        core = self._core
        self._sent[rank] = ((core.step, core.over, core.calls), now)
        self.messages += 1
        known = core.known[rank]
        tell = Tell(core.step, core.over, known.left, core.calls, known.ready, answer, self._fault, closed)
        result = send(self._socket, rank_identity(rank), encode(tell))
        if result is SendResult.UNREACHABLE:
            self._lost.setdefault(rank, now)
        else:
            self._lost.pop(rank, None)

    def _check(self, now: float) -> None:
        core = self._core
        if not all(core.here):
            if now - self._started > self._settings.join_s:
                absent = [rank for rank, here in enumerate(core.here) if not here]
                self._give_up(f"ranks {absent} have not joined within {self._settings.join_s:g} s", now)
            return
        for rank, since in self._lost.items():
            done = core.over and not core.needs(rank)
            if done or rank in self._closed:
                continue
            if now - since > self.lost_s:
                return self._give_up(f"rank {rank}: its process has ended or can't be reached", now)
        missed = [rank for rank, since in self._closed.items()
                  if core.needs(rank) or not core.over and not self.ends and now - since >= TOLD_S]
        if missed:
            return self._give_up(f"rank {missed[0]}: it has been shut down, and the others can't go on without it", now)
        if core.quiet:
            return self._liveness.quiet()
        for rank in self._closed:
            self._liveness.heard(rank, now)
        ended = [known.ended for known in core.known]
        if wrong := self._liveness.look(now, sum(ended), min(ended) < core.step):
            whom = f"rank {wrong.rank}: " if wrong.rank is not None else ""
            self._give_up(whom + wrong.text, now)
        return None

    def _give_up(self, fault: str, now: float) -> None:
        self._fault = fault[:1000]
        log.error("data-parallel group failed: %s", fault)
        self._tell_all(now)
