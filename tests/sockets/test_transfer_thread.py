# SPDX-License-Identifier: Apache-2.0
"""The thread that carries out an engine's transfers: no end waits for the step loop, which waits for no transfer."""

import collections
import os
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.slow_write import is_open_at_each_write
from tests.waiting import wait_for
from vllm_pd.errors import TransferError
from vllm_pd.transfer import thread
from vllm_pd.transfer.engine import EngineTransfer, RemoteEngineTransfer
from vllm_pd.transfer.ranks.gather import RankTransfers
from vllm_pd.transfer.ranks.packets import PacketSocket
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    Finished,
    Look,
    Notice,
    Read,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.transport import TransportProgress
from vllm_pd.transfer.worker import TransferWorker

WAIT_S = 60.0
WRITE = Write("k", "d", [0], [0], [b"n"])


class Wire:
    """A transport whose calls take as long as the test wants, and may be made by one thread at a time."""

    needs_polls = False

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.done: list[Finished] = []
        self.notices: list[Notice] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.inside = 0
        self.overlaps = 0
        self.polls = 0
        self.errors = 0
        self.closed = 0
        self.threads: set[str] = set()

    def _enter(self, hangs: bool = False) -> None:
        self.inside += 1
        self.overlaps += self.inside > 1
        self.threads.add(threading.current_thread().name)
        if hangs:
            assert self.go_on.wait(WAIT_S)
        time.sleep(0)
        self.inside -= 1

    def write(self, key: str, *_) -> None:
        self._enter(hangs=True)
        if key == "refused":
            raise TransferError("refused")
        self.open.add(key)

    read = write

    def add_peer(self, *_) -> None:
        self._enter()

    def cancel(self, key: str) -> None:
        self._enter()
        self.end(key, ok=False)

    def end(self, key: str, ok: bool = True) -> None:
        if key in self.open:
            self.open.discard(key)
            self.done.append(Finished(key, ok))

    def poll(self) -> TransportProgress:
        self._enter()
        self.polls += 1
        if self.errors:
            self.errors -= 1
            raise RuntimeError("injected")
        done, self.done = self.done, []
        notices, self.notices = self.notices, []
        return TransportProgress(done, notices)

    def live_handles(self) -> int:
        return len(self.open)

    def close(self) -> bool:
        self._enter(hangs=True)
        self.closed += 1
        return not self.open


class Clock:
    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def waits() -> list[str]:
    """The threads that have waited for the device."""
    return []


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def transfer(wire, waits, told, clock) -> Iterator[EngineTransfer]:
    """Started; `woken` is set whenever the step loop is."""
    worker = TransferWorker(wire, lambda: waits.append(threading.current_thread().name), clock=clock)
    made = EngineTransfer(worker)
    made.woken = threading.Event()
    made.start(made.woken.set, lambda end: told.append(end.key))
    yield made
    wire.go_on.set()
    made.close()
    assert wire.closed == 1 and not wire.overlaps


def test_b27_an_end_leaves_while_the_step_loop_computes(transfer, wire, told):
    """Nobody asks; the peer is told, and the step loop woken."""
    transfer.execute([WRITE])
    wait_for(lambda: wire.open, "it is posted")
    assert not told and not transfer.woken.is_set()
    wire.end("k", ok=False)
    assert transfer.woken.wait(WAIT_S)
    assert told == ["k"]
    assert transfer.take_progress().finished == [Finished("k", False)]
    assert transfer.take_progress().finished == []


def test_the_step_loop_waits_for_no_post(transfer, wire):
    """Nor for a poll, nor for anything that comes after them; all of it runs in order later."""
    wire.go_on.clear()
    transfer.execute([WRITE])
    wait_for(lambda: wire.inside, "the post has begun")
    transfer.execute([CancelTransfer("k"), Read("r", "d", [0], [0])])
    transfer.poll()
    assert transfer.take_progress().finished == [] and wire.inside == 1
    assert transfer.live_handles() == 1  # the read has not begun
    wire.go_on.set()
    wait_for(lambda: wire.open == {"r"}, "the rest runs")
    wait_for(transfer.woken.is_set, "it is cancelled")
    assert transfer.take_progress().finished == [Finished("k", False)]
    wire.end("r")


def test_device_work_is_waited_for_by_the_thread_that_computes_and_before_data_moves_only(transfer, waits):
    transfer.execute([AddTransferPeer("d", b""), CancelTransfer("k")])
    assert waits == []
    transfer.execute([WRITE, Read("r", "d", [1], [1])])
    assert waits == [threading.current_thread().name]


def test_b33_with_nothing_open_it_sleeps(transfer, wire):
    transfer.execute([WRITE])
    wait_for(lambda: wire.open, "it is posted")
    polls = wire.polls
    wait_for(lambda: wire.polls > polls + 5, "it polls while a write is open")
    wire.end("k")
    assert transfer.woken.wait(WAIT_S)
    deadline_s, polls = time.monotonic() + WAIT_S, -1
    while wire.polls != polls:
        assert time.monotonic() < deadline_s, "it polls again and again"
        polls = wire.polls
        time.sleep(0.1)


def test_notices_are_looked_for_by_whoever_wants_them(transfer, wire):
    wire.notices.append(Notice("p", b"n"))
    transfer.poll()
    assert transfer.take_progress().notices == [Notice("p", b"n")]
    assert wire.threads == {threading.current_thread().name}


def test_b20_two_threads_never_use_the_transport_at_once(transfer, wire):
    """And each write ends once."""
    ended: list[str] = []
    for number in range(300):
        transfer.execute([Write(f"k{number}", "d", [0], [0], [b"n"])])
        for key in list(wire.open)[::2]:
            wire.end(key)
        transfer.poll()
        ended += [end.key for end in transfer.take_progress().finished]

    def rest() -> bool:
        for key in list(wire.open):
            wire.end(key)
        transfer.poll()
        ended.extend(end.key for end in transfer.take_progress().finished)
        return len(ended) >= 300

    wait_for(rest, "all end")
    assert sorted(ended) == sorted(f"k{number}" for number in range(300))
    assert len(wire.threads) == 2 and not wire.overlaps


def test_b27_a_write_that_cannot_be_posted_ends(transfer, told):
    transfer.execute([Write("refused", "d", [0], [0], [b"n"])])
    assert transfer.woken.wait(WAIT_S)
    assert told == ["refused"]
    assert not transfer.take_progress().finished[0].ok


def test_b20_an_unexpected_error_ends_no_thread(transfer, wire, caplog, monkeypatch):
    monkeypatch.setattr("vllm_pd.transfer.thread.ERROR_PAUSE_S", 0.01)
    wire.errors = 3
    transfer.execute([WRITE])
    wait_for(lambda: wire.open, "it is posted")
    wire.end("k")
    assert transfer.woken.wait(WAIT_S)
    assert caplog.text.count("unexpected error") == 3


def test_b20_an_error_before_the_wait_is_paced(transfer, wire, caplog, monkeypatch):
    """And a request does not wait for the end of the pause."""
    monkeypatch.setattr("vllm_pd.transfer.thread.ERROR_PAUSE_S", 1000.0)
    looks = []

    def filenos() -> list[int]:
        looks.append(0)
        if len(looks) < 100:
            raise OSError("injected")
        return []

    monkeypatch.setattr(transfer, "filenos", filenos)
    transfer.execute([CancelTransfer("none")])
    wait_for(lambda: looks, "it fails")
    time.sleep(0.2)
    assert len(looks) == 1 and caplog.text.count("unexpected error") == 1
    looks += [0] * 100
    transfer.execute([WRITE])
    wait_for(lambda: wire.open, "it is posted")
    wire.end("k")
    assert transfer.woken.wait(WAIT_S)


def test_b20_without_the_device_all_is_released(wire, caplog):
    entered = []

    def enter() -> None:
        entered.append(0)
        raise RuntimeError("injected")

    transfer = EngineTransfer(TransferWorker(wire), enter=enter)
    transfer.start(lambda: None, lambda end: None)
    wait_for(lambda: wire.closed, "it is released")
    assert transfer.close() and len(entered) == 1 and wire.closed == 1
    assert caplog.text.count("nothing is transferred") == 1


def test_b20_a_close_in_the_thread_itself_does_not_wait_for_it(wire, caplog):
    """The garbage collector may run anywhere."""
    closed = []
    transfer = EngineTransfer(TransferWorker(wire))
    transfer.start(lambda: None, lambda end: closed.append(transfer.close()))
    transfer.execute([Write("refused", "d", [0], [0], [b"n"])])
    wait_for(lambda: wire.closed, "the thread has ended")
    assert closed == [False] and "error" not in caplog.text
    assert transfer.close()


def test_b20_a_close_ends_the_thread_and_says_what_may_still_land(transfer, wire):
    transfer.execute([WRITE])
    wait_for(lambda: wire.open, "it is posted")
    assert not transfer.close()  # the write is open
    assert not transfer.close() and wire.closed == 1
    transfer.execute([CancelTransfer("none")])  # of no use, and no error


def test_b20_a_transport_that_hangs_does_not_keep_its_engine(transfer, wire, monkeypatch):
    monkeypatch.setattr("vllm_pd.transfer.thread.CLOSE_S", 0.05)
    wire.go_on.clear()
    transfer.execute([WRITE])
    wait_for(lambda: wire.inside, "the post hangs")
    assert not transfer.close()
    wire.go_on.set()


def test_b20_what_was_never_started_is_closed_as_well(wire):
    assert EngineTransfer(TransferWorker(wire)).close()
    assert wire.closed == 1 and wire.threads == {threading.current_thread().name}


def test_b33_requests_wake_no_descriptor_that_was_closed(monkeypatch):
    transfer = EngineTransfer(TransferWorker(Wire()))
    transfer.start(lambda: None, lambda end: None)
    assert is_open_at_each_write(monkeypatch, "eventfd_write", lambda: transfer.execute([]), transfer.close)
    transfer.execute([])  # after it: no wake-up, no error


@pytest.mark.parametrize("needs_polls", [False, True])
def test_a_transfer_that_lasts_is_looked_at_rarely_and_a_short_one_beside_it_often(transfer, wire, clock, told,
                                                                                   needs_polls, monkeypatch):
    """If its data moves by itself: an old transfer whose data moves only in polls needs them as before."""
    pauses, wait = collections.deque([0.0], maxlen=1), thread.TransferThread._wait
    monkeypatch.setattr(thread.TransferThread, "_wait", lambda self, pause_s, filenos: (
        pauses.append(pause_s), wait(self, pause_s, filenos))[1])
    wire.needs_polls = needs_polls
    transfer.execute([WRITE])
    wait_for(lambda: wire.polls > 10)
    clock.ahead_s = 100.0
    longest_s = thread.POLL_MAX_S if needs_polls else thread.IDLE_POLL_S
    wait_for(lambda: pauses[0] == longest_s)
    transfer.execute([Write("short", "d", [0], [0], [b"n"])])
    wait_for(lambda: "short" in wire.open and pauses[0] == thread.POLL_MAX_S)
    wire.end("short")
    wait_for(lambda: told == ["short"] and pauses[0] == longest_s)
    wire.end("k")
    wait_for(lambda: told == ["short", "k"])


def test_the_end_of_a_short_transfer_is_seen_within_2_ms_and_of_a_long_one_a_little_late():
    for age_s in (0.0, 0.001, 0.05):
        assert thread.longest_pause_s(age_s) == thread.POLL_MAX_S
    for age_s in (0.06, 0.1, 0.5, 1.0):
        assert thread.longest_pause_s(age_s) == pytest.approx(0.02 * age_s)
    assert thread.longest_pause_s(2.0) == thread.longest_pause_s(1e6) == thread.IDLE_POLL_S


class Sockets:
    """Transfers like those of ranks in other processes: any thread may run requests, one at a time."""

    moving, youngest_s, busy = False, 0.0, False

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []  # thread, and key
        self.go_on = threading.Event()
        self.go_on.set()
        self.inside, self.overlaps, self.polls = 0, 0, 0

    def execute(self, requests: list[TransferRequest]) -> None:
        self.inside += 1
        self.overlaps += self.inside > 1
        time.sleep(0)
        self.ran += [(threading.current_thread().name, request.key) for request in requests]
        self.inside -= 1
        if any(request.key == "bad" for request in requests):
            raise RuntimeError("injected")

    def take_progress(self) -> TransferProgress:
        self.inside += 1
        self.overlaps += self.inside > 1
        self.polls += 1
        assert self.go_on.wait(WAIT_S)
        self.inside -= 1
        return TransferProgress([], [], [])

    def synchronize(self) -> None:
        pass

    def live_handles(self) -> int:
        return 0

    def close(self) -> bool:
        return True


class Owner:
    """The owner of a thread, with nothing but a pipe."""

    def __init__(self) -> None:
        self.read, self.written = os.pipe()
        self.received = lambda: None

    def deliver(self, progress: TransferProgress) -> bool:
        return True

    def filenos(self) -> list[int]:
        return [self.read]

    def receive(self) -> bool:
        os.read(self.read, 100)
        self.received()
        return True

    def released(self, ended: bool) -> None:
        pass


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    os.close(made.read)
    os.close(made.written)


@pytest.fixture
def driven(sockets, owner) -> Iterator[thread.TransferThread]:
    """Started, and asleep."""
    made = thread.TransferThread(sockets, owner, at_once=True)
    made.start()
    yield made
    sockets.go_on.set()
    made.close()
    assert not sockets.overlaps


def cancels(*keys: str) -> list[TransferRequest]:
    return [CancelTransfer(key) for key in keys]


def test_b94_what_never_blocks_runs_in_the_callers_thread_unless_it_would_overtake(driven, sockets):
    driven.execute(cancels("a"))
    assert sockets.ran == [(threading.current_thread().name, "a")]
    sockets.go_on.clear()
    driven._wake()
    wait_for(lambda: sockets.inside, "it polls")
    driven.execute(cancels("b"))  # neither waits for the poll
    driven.execute(cancels("c"))
    assert len(sockets.ran) == 1
    sockets.go_on.set()
    wait_for(lambda: len(sockets.ran) == 3, "they run")
    assert [key for _, key in sockets.ran] == ["a", "b", "c"]
    driven._requests.extend(cancels("queued"))  # and the thread has not been woken yet
    driven.execute(cancels("next"))
    wait_for(lambda: len(sockets.ran) == 5, "they run")
    assert [key for _, key in sockets.ran][3:] == ["queued", "next"]


def test_b20_each_callers_requests_run_in_its_order_whoever_runs_them(driven, sockets):
    def call(name: str) -> None:
        for number in range(300):
            driven.execute(cancels(f"{name}{number}"))
            if number % 7 == 0:
                driven._wake()

    callers = [threading.Thread(target=call, args=name) for name in "xyz"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    wait_for(lambda: len(sockets.ran) == 900, "all run")
    for name in "xyz":
        assert [key for _, key in sockets.ran if key[0] == name] == [f"{name}{number}" for number in range(300)]


def test_b20_an_error_at_once_does_not_reach_the_step_loop(driven, sockets, caplog):
    driven.execute(cancels("bad"))
    driven.execute(cancels("next"))
    assert [key for _, key in sockets.ran] == ["bad", "next"] and "unexpected error" in caplog.text


def test_b20_what_could_not_be_sent_at_once_is_sent_by_the_thread(driven, sockets):
    sockets.busy = True
    before = sockets.polls
    driven.execute(cancels("a"))
    wait_for(lambda: sockets.polls > before + 1, "the thread polls until it is sent")
    sockets.busy = False


def test_nothing_runs_after_the_release(driven, sockets):
    assert driven.close()
    driven.execute(cancels("late"))
    assert not sockets.ran


def test_b94_a_watch_polls_by_itself_and_ends(driven, sockets, owner):
    received: list[float] = []

    def watch() -> None:
        driven.poll_until(time.monotonic() + 0.5, 0.0)
        received.append(time.monotonic())

    owner.received = watch
    before = sockets.polls
    os.write(owner.written, b"x")
    wait_for(lambda: sockets.polls > before + 20, "it polls without another word")
    time.sleep(max(0.0, received[0] + 0.7 - time.monotonic()))
    polled = sockets.polls
    time.sleep(0.2)
    assert sockets.polls == polled, "and not after its end"
    owner.received = lambda: driven.poll_until(time.monotonic() - 1.0, 0.001)
    os.write(owner.written, b"x")
    wait_for(lambda: sockets.polls == polled + 1, "a single look")
    time.sleep(0.1)
    assert sockets.polls == polled + 1


def test_b20_a_request_for_a_rank_whose_socket_is_full_arrives_when_it_reads():
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = PacketSocket(far)
    engine = RemoteEngineTransfer(RankTransfers({0: PacketSocket(near)}))
    engine.start(lambda: None, lambda end: None)
    sent = 0
    while not engine.own.busy:
        engine.execute([Write(f"k{sent}", "d", list(range(1000)), list(range(1000)), [b"n"])])
        sent += 1
    engine.execute([CancelTransfer("last")])
    engine.watch(0.001, 1.0)
    engine.watch(0.002, 1.0)
    read: list[TransferRequest] = []
    deadline_s = time.monotonic() + WAIT_S
    while not read or not isinstance(read[-1], Look):
        assert time.monotonic() < deadline_s, len(read)
        rank.wait(0.01)
        for message in rank.receive():
            read += msgspec.msgpack.decode(message, type=list[TransferRequest])
    assert [request.key for request in read[:-1]] == [*(f"k{number}" for number in range(sent)), "last"]
    assert read[-1] == Look(0.002, 1.0), "and the last look, not lost"
    rank.close()
    engine.close()
