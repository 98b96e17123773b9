# SPDX-License-Identifier: Apache-2.0
"""The rim for groups on one host: a page of shared memory with one slot a rank, and one bell (a FIFO) a rank.

There is no coordinator and no message: the agreed step is the highest number in the slots, each of which only its own
rank writes. Being read at every step it is never late, so nothing more than the next step is ever agreed ahead.

Bells are rung only for urgent asks. One made ahead of need, at the beginning of a forward that was agreed before, is
seen by everyone without: no rank ends that forward before the asking rank has begun it, and each reads the slots
after it.

A rank's death is a fact that its pidfd tells. A rank that is stopped is found by its beat, a number that every rank's
watching thread moves while there are steps to run. In a quiet group the threads sleep.
"""
import contextlib
import mmap
import os
import secrets
import select
import tempfile
import time
from enum import IntEnum

from vllm_pd.dp.calls import NAME_BITS, Calls
from vllm_pd.dp.core import Ask, Reach
from vllm_pd.dp.interface import Abort, Settings, Wake
from vllm_pd.dp.liveness import TOLD_S, Liveness
from vllm_pd.dp.member import AWAY, BaseMember

_SLOT_WORDS = 16  # two cache lines, so that ranks don't disturb each other
_WORD_BYTES = 8
_NUMBER_BITS = 64 - NAME_BITS  # of a call's number, beside a name or a step: all that a word has room for
_LEADER = 0  # the rank that decides about calls
_ONLY_NEXT = Reach(1, 1)


class _Word(IntEnum):
    """What is where in a slot. Aligned words of 8 bytes, each written by one process and written at once."""
    ASKED = 0  # twice the step asked for, plus one if the rank has left: both change together
    ENDED = 1
    BEAT = 2
    FAULT = 3  # _Fault, and 16 times the rank that it is about
    CLOSED = 4
    READY = 5  # the call that the rank is ready for; on rank 0 the last dropped
    PROPOSED = 6  # by rank 0: number (its last bits) and name of a call
    RELEASED = 7  # by rank 0: number of a call (its last bits) and the step after which it is made
    DONE = 8  # the call up to which the rank has nothing more to do with any


class _Fault(IntEnum):
    """Why a rank gave the group up."""
    DEAD = 1
    CLOSED = 2
    SILENT = 3
    STALLED = 4
    BROKEN = 5
    AWAY = 6


_SAYS = {
    _Fault.DEAD: "its process has ended",
    _Fault.CLOSED: "it has been shut down, and the others can't go on without it",
    _Fault.SILENT: "it does not answer",
    _Fault.STALLED: "its forwards do not end",
    _Fault.BROKEN: "its watch over the group broke",
    _Fault.AWAY: AWAY,
}


class Board:
    """The shared files: `slots`, and `bell.0`, `bell.1`... Made by rank 0 in a folder of its own, opened by all, then
    removed by rank 0: what is left needs no clean-up, however the processes end."""

    def __init__(self, folder: str, rank: int, size: int):
        """Open. Raises OSError where the files are not there."""
        self.rank = rank
        self.size = size
        self._bells: list[int] = []
        self._map: mmap.mmap | None = None
        try:
            for peer in range(size):  # for both ends, so that no end is ever missing
                self._bells.append(os.open(os.path.join(folder, f"bell.{peer}"), os.O_RDWR | os.O_NONBLOCK))
            with open(os.path.join(folder, "slots"), "r+b") as file:
                self._map = mmap.mmap(file.fileno(), size * _SLOT_WORDS * _WORD_BYTES)
        except (OSError, ValueError):
            self.close()
            raise
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create(size: int) -> str:
        """Make the files of a new group. Returns their folder. Raises OSError."""
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
        folder = tempfile.mkdtemp(prefix=f"vllm-pd-dp-{secrets.token_hex(4)}-", dir=parent)
        with open(os.path.join(folder, "slots"), "wb") as file:
            file.truncate(size * _SLOT_WORDS * _WORD_BYTES)
        for rank in range(size):
            os.mkfifo(os.path.join(folder, f"bell.{rank}"), 0o600)
        return folder

    def read(self, rank: int, word: _Word) -> int:
        """A word of anyone's."""
        return self._words[rank * _SLOT_WORDS + word]

    def write(self, word: _Word, value: int) -> None:
        """A word of one's own."""
        self._words[self.rank * _SLOT_WORDS + word] = value

    def column(self, word: _Word) -> list[int]:
        """That word of all ranks."""
        return self._words[word::_SLOT_WORDS].tolist()

    @property
    def bell(self) -> int:
        """What to poll for one's own bell."""
        return self._bells[self.rank]

    def ring(self) -> int:
        """Ring all bells, one's own too: its watch has to begin. Returns how many. Never blocks: a full FIFO rings
        too."""
        for bell in self._bells:
            with contextlib.suppress(BlockingIOError):
                os.write(bell, b"\0")
        return self.size

    def silence(self) -> None:
        """One's own bell has been heard."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.bell, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Let go."""
        for bell in self._bells:
            os.close(bell)
        self._bells = []
        if self._map is not None:
            self._words = memoryview(b"")
            self._map.close()
            self._map = None


class ShmMember(BaseMember):
    """A rank of a group on one host. Takes over the board and the pidfds (by rank, its own excepted)."""

    def __init__(self, board: Board, pidfds: dict[int, int], settings: Settings, wake: Wake, abort: Abort):
        super().__init__(board.rank, board.size, settings, wake, abort)
        self._board = board
        self._pidfds = pidfds
        self._dead: set[int] = set()
        self._closed: dict[int, float] = {}  # since when
        self._liveness = Liveness(sorted(pidfds), settings.timeout_s, settings.stall_s)
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._call_words: tuple[list[int], int, int] | None = None
        self._thread.start()

    def _reach(self) -> Reach:
        return _ONLY_NEXT

    def _refresh(self) -> None:
        # In that order: who is ready has stored its last ask before, and asks again only after it has read that the
        # call is released.
        ready = self._board.column(_Word.READY)
        asked = self._board.column(_Word.ASKED)
        words = (ready, self._board.read(_LEADER, _Word.PROPOSED), self._board.read(_LEADER, _Word.RELEASED))
        calls = None
        if words != self._call_words:
            self._call_words, calls = words, _calls(self._participant.turns.known, *words)
        self._participant.told(max(asked) >> 1, all(word & 1 for word in asked), calls=calls)

    def _publish(self, ask: Ask) -> None:
        self._board.write(_Word.ASKED, ask.step << 1)
        if ask.urgent:
            self.counters.messages += self._board.ring()

    def _publish_end(self) -> None:
        self._board.write(_Word.ENDED, self._participant.ended)
        self._board.write(_Word.DONE, self._participant.done)

    def _publish_call(self) -> None:
        turns = self._participant.turns
        if turns.leads:
            self._board.write(_Word.PROPOSED, _packed(turns.known.proposed, turns.known.name))
            self._board.write(_Word.RELEASED, _packed(turns.known.released, turns.known.final))
        self._board.write(_Word.READY, turns.known.dropped if turns.leads else turns.ready)
        self._board.ring()

    def _publish_leave(self) -> None:
        self._board.write(_Word.ASKED, self._participant.agreed << 1 | 1)
        self.counters.messages += self._board.ring()

    def _before_close(self) -> None:
        self._board.write(_Word.CLOSED, 1)
        self._board.ring()

    def _release(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._board.close()

    def _watch(self) -> None:
        try:
            self._poll()
        except Exception:
            self._board.write(_Word.FAULT, self.rank * 16 + _Fault.BROKEN)
            raise
        finally:
            if self._failed or self._board.read(self.rank, _Word.FAULT):
                self._board.ring()

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self._board.bell, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        ranks = {pidfd: rank for rank, pidfd in self._pidfds.items()}
        for pidfd in ranks:
            poll.register(pidfd, select.POLLIN)
        timeout_ms = None
        calm = 0
        while not self._closing.is_set() and not self._failed:
            events = poll.poll(timeout_ms)
            for fd, _ in events:
                if fd == self._board.bell:
                    self._board.silence()
                elif fd in ranks:
                    self._dead.add(ranks[fd])
                    poll.unregister(fd)
            if self._is_due():
                self._wake_engine()
            steps = not self._quiet()
            busy = steps or self._called()
            self._board.write(_Word.BEAT, self._board.read(self.rank, _Word.BEAT) + 1)
            self._look(steps, busy)
            # Twice, a beat apart: what another processor has written may be seen in another order.
            calm = 0 if busy else calm + 1
            timeout_ms = None if calm > 1 else self._liveness.beat_s * 1000
            if self._closed:
                timeout_ms = min(self._liveness.beat_s, TOLD_S) * 1000

    def _quiet(self) -> bool:
        ended = self._board.column(_Word.ENDED)
        return min(ended) >= max(self._board.column(_Word.ASKED)) >> 1

    def _called(self) -> bool:
        """Whether a call waits for someone, or is under way."""
        calls = self._participant.turns.known
        return calls.open or min(self._board.column(_Word.DONE)) < calls.released

    def _look(self, steps: bool, busy: bool) -> None:
        """`steps`: there are some to run. `busy`: or there is a call."""
        board = self._board
        for rank in self._pidfds:
            if fault := board.read(rank, _Word.FAULT):
                return self._give_up(_Fault(fault % 16), fault // 16, f" (says rank {rank})")
        with self._lock:
            over = self._participant.over
            calls = self._participant.turns.known
        for rank in self._pidfds:
            closed = board.read(rank, _Word.CLOSED)
            called = board.read(rank, _Word.DONE) < calls.released or rank == _LEADER and calls.open
            if over and board.read(rank, _Word.ENDED) >= self._participant.agreed and not called:
                continue  # has done its part
            if closed and (steps or called or self._misses(rank)):
                return self._give_up(_Fault.CLOSED, rank)
            if rank in self._dead and not closed:
                return self._give_up(_Fault.DEAD, rank)
        if not busy:
            return self._liveness.quiet()
        now = time.monotonic()
        if self._loop_is_away(now):
            return self._give_up(_Fault.AWAY, self.rank)
        for rank in self._pidfds:
            seen = (board.read(rank, _Word.BEAT), board.read(rank, _Word.ENDED), board.read(rank, _Word.ASKED))
            if self._seen.get(rank) != seen or board.read(rank, _Word.CLOSED):
                self._seen[rank] = seen
                self._liveness.heard(rank, now)
        ended = board.column(_Word.ENDED)
        if wrong := self._liveness.look(now, sum(ended), steps):
            if wrong.rank is None:
                return self._give_up(_Fault.STALLED, ended.index(min(ended)), f": {wrong.text}")
            return self._give_up(_Fault.SILENT, wrong.rank, f": {wrong.text}")
        return None

    def _misses(self, rank: int) -> bool:
        """Whether this process goes on although that rank, which is closed, can't."""
        return not self._ends and time.monotonic() - self._closed.setdefault(rank, time.monotonic()) >= TOLD_S

    def _give_up(self, fault: _Fault, rank: int, detail: str = "") -> None:
        self._board.write(_Word.FAULT, rank * 16 + fault)
        self._fail(f"rank {rank}: {_SAYS[fault]}{detail}")


def _packed(number: int, rest: int) -> int:
    """A word for both."""
    return (number & (1 << _NUMBER_BITS) - 1) << NAME_BITS | rest


def _unpacked(word: int, known: int) -> tuple[int, int]:
    """The number and what was beside it, where the number was `known` when it was last read."""
    ahead = (word >> NAME_BITS) - known & (1 << _NUMBER_BITS) - 1
    return known + ahead, word & (1 << NAME_BITS) - 1


def _calls(known: Calls, ready: list[int], proposed: int, released: int) -> Calls:
    """What the words say to who knew that before."""
    number, name = _unpacked(proposed, known.proposed)
    last, final = _unpacked(released, known.released)
    return Calls(number, name, ready[_LEADER], last, final, min(ready[_LEADER + 1:], default=number))


def open_pidfds(pids: list[int], rank: int) -> dict[int, int]:
    """By rank, of all but one's own. Raises OSError where a process can't be watched."""
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
