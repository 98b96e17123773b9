# SPDX-License-Identifier: Apache-2.0
"""B20, B21, B28: the ranks of one engine report over their own line, and end with their engine."""
import collections
import contextlib
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from vllm_pd.errors import ConfigError, ControlError, PeerMismatch
from vllm_pd.peer.liveness import process
from vllm_pd.protocol import messages as m
from vllm_pd.transfer.engine import EngineTransfer
from vllm_pd.transfer.ranks.gather import (
    ENTRIES_PER_MESSAGE,
    MAX_NOTICE_BYTES,
    GatheredTransfer,
    RankListener,
    RankProgress,
    encode_progress,
)
from vllm_pd.transfer.ranks.packets import HOLD, LAST, MAX_MESSAGE_BYTES, PacketSocket
from vllm_pd.transfer.ranks.process import RankThread
from vllm_pd.transfer.requests import Finished, Notice, PeerRefusal, TransferProgress, Write


class Transfers:
    """A `TransferWorker` whose writes end when the test says so."""

    def __init__(self) -> None:
        self.requests: list = []
        self.ended: collections.deque[TransferProgress] = collections.deque()
        self.busy = False
        self.looks = 0
        self.closed = 0
        self.errors = 0

    def execute(self, requests: list) -> None:
        self.requests += requests
        self.busy = True

    def end(self, *finished: Finished, refused: tuple[PeerRefusal, ...] = (), notices: tuple[Notice, ...] = ()) -> None:
        self.ended.append(TransferProgress(list(finished), list(notices), list(refused)))

    def take_progress(self) -> TransferProgress:
        self.looks += 1
        if self.errors:
            self.errors -= 1
            raise RuntimeError("injected")
        progress = self.ended.popleft() if self.ended else TransferProgress()
        if progress.finished:
            self.busy = False
        return progress

    @property
    def moving(self) -> bool:
        return self.busy

    youngest_s = 0.0

    def synchronize(self) -> None:
        pass

    def live_handles(self) -> int:
        return int(self.busy)

    def close(self) -> bool:
        self.closed += 1
        return True


class Engine:
    """An engine of three ranks, all in this process."""

    def __init__(self) -> None:
        self.own, self.others = Transfers(), [Transfers(), Transfers()]
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in self.others]
        self.wires = [theirs for _, theirs in pairs]  # the ends of the ranks
        self.ranks = [RankThread(transfer, PacketSocket(wire))
                      for transfer, wire in zip(self.others, self.wires, strict=True)]
        lines = (PacketSocket(ours) for ours, _ in pairs)
        self.gathered = GatheredTransfer(self.own, dict(enumerate(lines, 1)))

    def until(self, done, timeout_s: float = 60.0) -> TransferProgress:
        """Take progress until `done` of all that has come."""
        everything = TransferProgress([], [], [])
        deadline_s = time.monotonic() + timeout_s
        while not done(everything):
            assert time.monotonic() < deadline_s, everything
            progress = self.gathered.take_progress()
            everything.finished.extend(progress.finished)
            everything.notices.extend(progress.notices)
            everything.refused.extend(progress.refused)
            time.sleep(0.002)
        return everything


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    if not engine.own.closed:  # by the test
        engine.gathered.close()
    assert [transfer.closed for transfer in (engine.own, *engine.others)] == [1, 1, 1]
    for rank in engine.ranks:
        assert rank._thread.join(60)


def start(engine: Engine, key: str = "k") -> None:
    for rank in (engine.own, *engine.ranks):
        rank.execute([Write(key, "d", [0], [0], [b"0", b"1", b"2"])])


def test_b28_a_write_ends_when_every_rank_has_ended(engine):
    start(engine)
    engine.own.end(Finished("k", True, bytes=10, seconds=0.1))
    engine.others[1].end(Finished("k", True, bytes=30, seconds=0.3))
    assert engine.until(lambda p: engine.gathered.live_handles() and not engine.others[1].busy).finished == []
    for _ in range(20):
        assert not engine.gathered.take_progress().finished
        time.sleep(0.002)
    engine.others[0].end(Finished("k", True, bytes=20, seconds=0.2))
    (end,) = engine.until(lambda p: p.finished).finished
    assert end == Finished("k", True, bytes=60, seconds=0.3)
    assert engine.gathered.live_handles() == 0


def test_b27_one_rank_that_fails_fails_the_write(engine):
    start(engine)
    engine.own.end(Finished("k", True, bytes=10))
    engine.others[0].end(Finished("k", False, error="the transfer failed"))
    engine.others[1].end(Finished("k", True, bytes=10))
    (end,) = engine.until(lambda p: p.finished).finished
    assert (end.ok, end.bytes, end.error) == (False, 0, "rank 1: the transfer failed")


def test_b28_the_peer_is_told_when_the_last_rank_has_ended_whatever_the_engine_does(engine):
    """Nobody takes progress: rank 0's thread hears the other ranks by itself."""
    told, woken = [], threading.Event()
    transfer = EngineTransfer(engine.own, engine.gathered)
    transfer.start(woken.set, told.append)
    for rank in (transfer, *engine.ranks):
        rank.execute([Write("k", "d", [0], [0], [b"0", b"1", b"2"])])
    engine.own.end(Finished("k", True, bytes=10))
    engine.others[0].end(Finished("k", True, bytes=10))
    assert not woken.wait(0.05) and not told
    engine.others[1].end(Finished("k", False, error="broken"))
    assert woken.wait(60)
    assert told == transfer.take_progress().finished == [Finished("k", False, error="rank 2: broken")]
    assert not transfer.close()  # of several ranks only their processes' end says that nothing lands any more


def test_notices_and_refusals_come_through(engine):
    engine.own.end(notices=(Notice("p/0", b"n"),), refused=(PeerRefusal("d", "0"),))
    engine.others[0].end(refused=(PeerRefusal("d", "1" * 10_000),))
    engine.ranks[0].execute([])
    progress = engine.until(lambda p: len(p.refused) == 2)
    assert progress.notices == [Notice("p/0", b"n")]
    assert [r.reason for r in progress.refused] == ["0", "1" * 500]


def test_b33_a_rank_with_nothing_open_sleeps(engine):
    start(engine)
    for transfer in (engine.own, *engine.others):
        transfer.end(Finished("k", True))
    engine.until(lambda p: p.finished)
    deadline_s, looks = time.monotonic() + 60, -1
    while engine.others[0].looks != looks:
        assert time.monotonic() < deadline_s, "it looks again and again"
        looks = engine.others[0].looks
        time.sleep(0.1)


def test_b20_an_error_ends_no_rank(engine, caplog, monkeypatch):
    monkeypatch.setattr("vllm_pd.transfer.thread.ERROR_PAUSE_S", 0.01)
    engine.others[0].errors = 1
    start(engine)
    for transfer in (engine.own, *engine.others):
        transfer.end(Finished("k", True))
    assert engine.until(lambda p: p.finished).finished[0].ok
    assert "unexpected error" in caplog.text


def test_b20_an_engine_that_stands_still_is_told_later(engine):
    """More ends than the line can hold: none is lost, and the rank does not wait in the middle of a step."""
    count = 20_000
    start(engine)
    engine.others[0].end(*(Finished(f"k{i}", True) for i in range(count)))
    engine.others[1].end(*(Finished(f"k{i}", True) for i in range(count)))
    engine.ranks[0].execute([])
    engine.ranks[1].execute([])
    time.sleep(0.05)
    engine.own.end(*(Finished(f"k{i}", True) for i in range(count)))
    finished = engine.until(lambda p: len(p.finished) >= count).finished
    assert {end.key for end in finished} == {f"k{i}" for i in range(count)} and len(finished) == count


def test_b20_every_message_fits_its_bound():
    wide = str(m.Attempt("i" * 32, "\U0001f600" * m.MAX_ID_CHARS, 1 << 61))
    ends = [Finished(wide, False, error="\U0001f600" * 5000)] * 600
    notices = [Notice(wide, b"n" * MAX_NOTICE_BYTES), Notice("p/0", b"n" * (MAX_NOTICE_BYTES + 1))] * 300
    refused = [PeerRefusal("i" * 32, "\U0001f600" * 5000)] * 300
    messages = encode_progress(TransferProgress(ends, notices, refused))
    assert max(map(len, messages)) < MAX_MESSAGE_BYTES
    parts = [msgspec.msgpack.decode(message, type=RankProgress) for message in messages]
    assert [sum(len(getattr(part, kind)) for part in parts) for kind in ("finished", "notices", "refused")] == [
        600, 300, 300]
    assert all(len(part.finished) <= ENTRIES_PER_MESSAGE for part in parts)
    assert encode_progress(TransferProgress([], [], [])) == []


def test_b20_ends_of_requests_with_long_ids_arrive(engine):
    ends = [Finished("\U0001f600" * m.MAX_ID_CHARS + str(number), True) for number in range(32)]
    for transfer in (engine.own, *engine.others):
        transfer.end(*ends)
    for rank in engine.ranks:
        rank.execute([])
    assert len(engine.until(lambda p: len(p.finished) == 32).finished) == 32


def test_b29_noise_on_the_line_is_dropped(engine, caplog):
    for packet in (LAST + b"\xc1", LAST + b"noise", LAST + b"\x95\x90\x90\x90\x90\x90", b"noise"):
        engine.wires[0].send(packet)
        engine.until(lambda p: "can't be read" in caplog.text)
        caplog.clear()


CHILD = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1])
from test_gather import Transfers
from vllm_pd.transfer.ranks.gather import connect
from vllm_pd.transfer.ranks.process import RankThread
rank = RankThread(Transfers(), connect(bytes.fromhex(sys.argv[2])))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def child():
    """Another process with a rank in it, its connection, and what the listener thought of it."""
    listener = RankListener()
    program = [sys.executable, "-c", CHILD, os.path.dirname(__file__), listener.address.hex()]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as running:
        assert int(running.stdout.readline()) == running.pid
        yield listener, running
        running.kill()
    listener.close()


def test_b21_a_rank_ends_with_its_engine_and_only_then_is_the_engine_gone(child):
    """B21: the engine's process is gone, its other rank is not: the fence stays. Then it goes by itself."""
    listener, running = child
    connections = listener.accept({running.pid})
    with subprocess.Popen(["true"]) as gone:
        engine = m.Process(gone.pid, process.start_time(gone.pid) or 1)
    rank = m.Process(running.pid, process.start_time(running.pid))
    member = m.Member("p", m.Role.PREFILL, "", m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""), m.Load(),
                      process.host_id(), (engine, rank))
    assert not process.is_gone(member)
    connections[running.pid].close()
    assert running.wait(60) == 1
    assert process.is_gone(member)


def test_b20_a_rank_that_was_told_goodbye_lives_and_lets_go_of_what_it_held(child):
    listener, running = child
    gathered = GatheredTransfer(Transfers(), {1: listener.accept({running.pid})[running.pid]})
    with socket.create_server(("127.0.0.1", 0)) as held:
        gathered.hold(held.fileno())
        address = held.getsockname()
    socket.create_connection(address, 60).close()  # the rank has it
    gathered.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 60)
    assert running.poll() is None


def test_b21_a_rank_that_cannot_hold_the_lifeline_ends(child):
    """It has no file descriptor left, so the kernel drops the file."""
    listener, running = child
    gathered = GatheredTransfer(Transfers(), {1: listener.accept({running.pid})[running.pid]})
    used = max(map(int, os.listdir(f"/proc/{running.pid}/fd")))
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (used + 1, used + 1))
    with contextlib.suppress(ControlError):  # it has ended already
        for _ in range(used + 2):  # the first ones fill the gaps
            gathered.hold(0)
    assert running.wait(60) == 1
    gathered.close()


def test_a_file_that_was_dropped_is_no_silent_loss(monkeypatch):
    ours, theirs = (PacketSocket(one) for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (HOLD, [], socket.MSG_CTRUNC, None))
    with pytest.raises(OSError, match="ulimit -n"):
        ours.receive()
    ours.close()
    theirs.close()


def test_b80_a_worker_that_does_not_come_is_named(child):
    listener, running = child
    with pytest.raises(ControlError, match=r"\[1\].*1.5 s"):
        listener.accept({running.pid, 1}, timeout_s=1.5)


@pytest.mark.parametrize("error", [ConfigError("kv_cache", "no layers", "use attention"), PeerMismatch("tp", 3, 2),
                                   ControlError("gone")], ids=lambda error: type(error).__name__)
def test_b80_an_error_of_a_worker_reaches_its_engine_whole(error):
    """Upstream's queue pickles it; one that can't be unpickled would end the thread that waits for the answer."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_b81_another_process_is_turned_away(child):
    """The kernel says who connects."""
    listener, running = child
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with stranger:
        stranger.connect(listener.address)
        assert running.pid in listener.accept({running.pid})
