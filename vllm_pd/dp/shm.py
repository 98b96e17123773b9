# SPDX-License-Identifier: Apache-2.0
"""The shared-memory backend, for groups on one host: a page with one slot per rank, and one wakeup FIFO per rank.

There is no coordinator and no message. The agreed step is the highest number in the slots, and each rank writes only
its own slot. Every rank reads the page at every step, so the number is never late, and only one step is requested
ahead.

Only urgent requests wake the other ranks. A request made ahead of need, at the beginning of a forward that was already
agreed, needs no wakeup: no rank ends that forward before the requesting rank has begun it, and each reads the slots
after it.

A pidfd shows that a rank's process has died. A stopped process is found by its beat, a number that every rank's
watching thread increases while there are steps to run. In a quiet group the threads sleep.
"""
import contextlib
import mmap
import os
import secrets
import select
import shutil
import tempfile
import time
from enum import IntEnum

from vllm_pd.dp.calls import NAME_BITS, CallRegisters
from vllm_pd.dp.core import Lookahead, StepRequest
from vllm_pd.dp.interface import Abort, SyncSettings, Wake
from vllm_pd.dp.liveness import SHUTDOWN_SPREAD_S, GroupLiveness
from vllm_pd.dp.member import AWAY, BaseMember

_SLOT_WORDS = 16  # two cache lines, so that no two ranks write to the same one
_WORD_BYTES = 8
_NUMBER_BITS = 64 - NAME_BITS  # the bits of a call's number that fit into a word beside a name or a step
_LEADER = 0  # the rank that decides about calls
_ONLY_NEXT = Lookahead(1, 1)


class _Word(IntEnum):
    """The words of a slot: aligned, 8 bytes each, written by one process and in one store."""
    ASKED = 0  # twice the highest requested step, plus 1 if the rank has left: both must change together
    ENDED = 1  # how many forwards have ended
    BEAT = 2  # increases while the watching thread runs
    FAULT = 3  # 16 * (the rank at fault) + _FailureCode; 0: none
    CLOSED = 4  # 1 if the rank's process ends
    READY = 5  # the call number that the rank is ready for; on rank 0 the last dropped number
    PROPOSED = 6  # on rank 0: number (its low bits) and name of the proposed call
    RELEASED = 7  # on rank 0: number (its low bits) of the released call, and the step after which it is made
    DONE = 8  # the rank has nothing more to do with calls up to this number


class _FailureCode(IntEnum):
    """Why a rank has found that the group has failed."""
    DEAD = 1
    CLOSED = 2
    SILENT = 3
    STALLED = 4
    BROKEN = 5
    AWAY = 6


_FAILURE_TEXTS = {
    _FailureCode.DEAD: "its process has ended",
    _FailureCode.CLOSED: "it has been shut down, and the others can't go on without it",
    _FailureCode.SILENT: "it does not answer",
    _FailureCode.STALLED: "its forwards do not end",
    _FailureCode.BROKEN: "unexpected error in the thread that watches the group",
    _FailureCode.AWAY: AWAY,
}


class SharedPage:
    """The shared files: `slots`, and the FIFOs `wakeup.0`, `wakeup.1`... Rank 0 creates them in a folder of its own and
    removes them when all ranks have opened them. From then on nothing is left behind, however the processes end. If
    rank 0 is killed before, some kilobytes are left.

    `slots` holds a uint64 array [size, _SLOT_WORDS]; see `_Word` for the columns.
    """

    def __init__(self, folder: str, rank: int, size: int):
        """Open the files in `folder`. Raises OSError if they are not there."""
        self.rank = rank
        self.size = size
        self._wakeups: list[int] = []
        self._map: mmap.mmap | None = None
        try:
            for peer in range(size):  # for reading and writing, so that opening and writing never wait for a reader
                self._wakeups.append(os.open(os.path.join(folder, f"wakeup.{peer}"), os.O_RDWR | os.O_NONBLOCK))
            with open(os.path.join(folder, "slots"), "r+b") as file:
                self._map = mmap.mmap(file.fileno(), size * _SLOT_WORDS * _WORD_BYTES)
        except (OSError, ValueError):
            self.close()
            raise
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create(size: int) -> str:
        """Create the files of a new group of `size` ranks. Returns their folder. Raises OSError, and leaves nothing."""
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = tempfile.mkdtemp(prefix=f"vllm-pd-dp-{secrets.token_hex(4)}-", dir=parent)
        try:
            with open(os.path.join(folder, "slots"), "wb") as file:
                # Take the memory now. Where there is none left, the first store to the page would end the process.
                os.posix_fallocate(file.fileno(), 0, size * _SLOT_WORDS * _WORD_BYTES)
            for rank in range(size):
                os.mkfifo(os.path.join(folder, f"wakeup.{rank}"), 0o600)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def read(self, rank: int, field: _Word) -> int:
        """Read a word of that rank's slot."""
        return self._words[rank * _SLOT_WORDS + field]

    def write(self, field: _Word, value: int) -> None:
        """Write a word of this rank's own slot."""
        self._words[self.rank * _SLOT_WORDS + field] = value

    def column(self, field: _Word) -> list[int]:
        """That word of all ranks, in order of rank."""
        return self._words[field::_SLOT_WORDS].tolist()

    @property
    def wakeup_fd(self) -> int:
        """The file descriptor to poll for this rank's wakeups."""
        return self._wakeups[self.rank]

    def wake_all(self) -> int:
        """Wake the watching threads of all ranks, this one included. Returns how many. Never blocks: a full FIFO is
        readable, which is all that a wakeup needs."""
        for wakeup in self._wakeups:
            with contextlib.suppress(BlockingIOError):
                os.write(wakeup, b"\0")
        return self.size

    def clear_wakeup(self) -> None:
        """Remove the wakeups that have arrived for this rank."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.wakeup_fd, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close the files. Idempotent."""
        for wakeup in self._wakeups:
            os.close(wakeup)
        self._wakeups = []
        if self._map is not None:
            self._words = memoryview(b"")
            self._map.close()
            self._map = None


class ShmMember(BaseMember):
    """A rank of a group on one host. Owns the page and the pidfds of the other ranks, by rank."""

    def __init__(self, page: SharedPage, pidfds: dict[int, int], settings: SyncSettings, wake: Wake, abort: Abort):
        super().__init__(page.rank, page.size, settings, wake, abort)
        self._page = page
        self._pidfds = pidfds
        self._dead: set[int] = set()
        self._closed: dict[int, float] = {}  # by rank, since when
        self._liveness = GroupLiveness(sorted(pidfds), settings.timeout_s, settings.stall_s)
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._call_fields: tuple[list[int], int, int] | None = None
        self._thread.start()

    def _lookahead(self) -> Lookahead:
        return _ONLY_NEXT

    def _refresh(self) -> None:
        # In this order: a rank stores its last request before it stores that it is ready, and requests again only after
        # it has read that the call is released.
        ready = self._page.column(_Word.READY)
        asked = self._page.column(_Word.ASKED)
        words = (ready, self._page.read(_LEADER, _Word.PROPOSED), self._page.read(_LEADER, _Word.RELEASED))
        registers = None
        if words != self._call_fields:
            self._call_fields, registers = words, _registers(self._participant.call_state.registers, *words)
        self._participant.update(max(asked) >> 1, all(word & 1 for word in asked), registers=registers)

    def _publish_request(self, request: StepRequest) -> None:
        self._page.write(_Word.ASKED, request.step << 1)
        if request.urgent:
            self.counters.messages += self._page.wake_all()

    def _publish_end(self) -> None:
        self._page.write(_Word.ENDED, self._participant.ended)
        self._page.write(_Word.DONE, self._participant.done)

    def _publish_call(self) -> None:
        call_state = self._participant.call_state
        if call_state.leads:
            self._page.write(_Word.PROPOSED, _packed(call_state.registers.proposed, call_state.registers.name))
            self._page.write(_Word.RELEASED, _packed(call_state.registers.released, call_state.registers.final))
        self._page.write(_Word.READY, call_state.registers.dropped if call_state.leads else call_state.ready)
        self._page.wake_all()

    def _publish_leave(self) -> None:
        self._page.write(_Word.ASKED, self._participant.agreed << 1 | 1)
        self.counters.messages += self._page.wake_all()

    def _before_close(self) -> None:
        self._page.write(_Word.CLOSED, 1)
        self._page.wake_all()

    def _release(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._page.close()

    def _watch(self) -> None:
        try:
            self._poll()
        except Exception:
            self._page.write(_Word.FAULT, self.rank * 16 + _FailureCode.BROKEN)
            raise
        finally:
            if self._failed or self._page.read(self.rank, _Word.FAULT):
                self._page.wake_all()

    def _poll(self) -> None:
        """Until `close` or a failure, wake the engine loop where something is due, write this rank's beat, and look for
        failures: every beat while there are steps or calls, and in a quiet group when a wakeup comes or a rank's
        process dies."""
        poll = select.poll()
        poll.register(self._page.wakeup_fd, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        ranks = {pidfd: rank for rank, pidfd in self._pidfds.items()}
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        timeout_ms = None
        calm = 0
        while not self._closing.is_set() and not self._failed:
            events = poll.poll(timeout_ms)
            for fd, _ in events:
                if fd == self._page.wakeup_fd:
                    self._page.clear_wakeup()
                elif fd in ranks:
                    self._dead.add(ranks[fd])
                    poll.unregister(fd)
            if self._is_due():
                self._wake_engine()
            steps = not self._quiet()
            busy = steps or self._called()
            self._page.write(_Word.BEAT, self._page.read(self.rank, _Word.BEAT) + 1)
            self._check(steps, busy)
            # Sleep only after two quiet rounds, a beat apart: another CPU's stores may become visible in another order.
            calm = 0 if busy else calm + 1
            timeout_ms = None if calm > 1 else self._liveness.beat_s * 1000
            if self._closed:
                timeout_ms = min(self._liveness.beat_s, SHUTDOWN_SPREAD_S) * 1000

    def _quiet(self) -> bool:
        ended = self._page.column(_Word.ENDED)
        return min(ended) >= max(self._page.column(_Word.ASKED)) >> 1

    def _called(self) -> bool:
        """Whether a call is open, or some rank has yet to end it."""
        registers = self._participant.call_state.registers
        return registers.open or min(self._page.column(_Word.DONE)) < registers.released

    def _check(self, steps: bool, busy: bool) -> None:
        """Look for failures. `steps`: there are steps to run. `busy`: there are steps or a call."""
        page = self._page
        for rank in self._pidfds:
            if fault := page.read(rank, _Word.FAULT):
                return self._give_up(_FailureCode(fault % 16), fault // 16, f" (reported by rank {rank})")
        with self._lock:
            over = self._participant.over
            registers = self._participant.call_state.registers
        for rank in self._pidfds:
            closed = page.read(rank, _Word.CLOSED)
            called = page.read(rank, _Word.DONE) < registers.released or rank == _LEADER and registers.open
            if over and page.read(rank, _Word.ENDED) >= self._participant.agreed and not called:
                continue  # the group does not need it any more
            if closed and (steps or called or self._misses(rank)):
                return self._give_up(_FailureCode.CLOSED, rank)
            if rank in self._dead and not closed:
                return self._give_up(_FailureCode.DEAD, rank)
        if not busy:
            return self._liveness.reset()
        now = time.monotonic()
        if self._loop_is_away(now):
            return self._give_up(_FailureCode.AWAY, self.rank)
        for rank in self._pidfds:
            seen = (page.read(rank, _Word.BEAT), page.read(rank, _Word.ENDED), page.read(rank, _Word.ASKED))
            if self._seen.get(rank) != seen or page.read(rank, _Word.CLOSED):
                self._seen[rank] = seen
                self._liveness.heard(rank, now)
        ended = page.column(_Word.ENDED)
        if failure := self._liveness.check(now, sum(ended), steps):
            if failure.rank is None:
                return self._give_up(_FailureCode.STALLED, ended.index(min(ended)), f": {failure.text}")
            return self._give_up(_FailureCode.SILENT, failure.rank, f": {failure.text}")
        return None

    def _misses(self, rank: int) -> bool:
        """Whether this process keeps running although that rank was closed SHUTDOWN_SPREAD_S ago."""
        if self._end_expected:
            return False
        return time.monotonic() - self._closed.setdefault(rank, time.monotonic()) >= SHUTDOWN_SPREAD_S

    def _give_up(self, fault: _FailureCode, rank: int, detail: str = "") -> None:
        self._page.write(_Word.FAULT, rank * 16 + fault)
        self._fail(f"rank {rank}: {_FAILURE_TEXTS[fault]}{detail}")


def _packed(number: int, rest: int) -> int:
    """A 64-bit word with the low bits of a call's number, and a name or a step."""
    return (number & (1 << _NUMBER_BITS) - 1) << NAME_BITS | rest


def _unpacked(word: int, known: int) -> tuple[int, int]:
    """The full number of a call, and the name or step beside it. `known`: the number at the previous read."""
    ahead = (word >> NAME_BITS) - known & (1 << _NUMBER_BITS) - 1
    return known + ahead, word & (1 << NAME_BITS) - 1


def _registers(known: CallRegisters, ready: list[int], proposed: int, released: int) -> CallRegisters:
    """The registers as read from the page. `known`: those of the previous read. `ready`: the READY word of each rank.
    `proposed`, `released`: these words of rank 0."""
    number, name = _unpacked(proposed, known.proposed)
    last, final = _unpacked(released, known.released)
    return CallRegisters(number, name, ready[_LEADER], last, final, min(ready[_LEADER + 1:], default=number))


def open_pidfds(pids: list[int], rank: int) -> dict[int, int]:
    """Open pidfds of the other ranks' processes. Returns them by rank; the caller owns them. `pids` has one entry per
    rank. Raises OSError if a process can't be watched."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this build of Python has no os.pidfd_open")
    pidfds: dict[int, int] = {}
    try:
        for peer, pid in enumerate(pids):
            if peer != rank:
                pidfds[peer] = os.pidfd_open(pid)
    except OSError:
        for pidfd in pidfds.values():
            os.close(pidfd)
        raise
    return pidfds
