# SPDX-License-Identifier: Apache-2.0
"""B21: the guardian of ranks on other nodes. The blocks that a peer has set aside are reused only when the engine's
processes are gone, or its lifeline is refused: neither may be so while a rank elsewhere lives."""
from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.forked import freeze
from tests.guarded import HOST, from_words, to_words
from tests.waiting import wait_for
from vllm_pd.errors import ControlError
from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.guardian import RankWatch, start_guardian
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.addresses import url_of

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0
STAYS_S = 2.0  # a guardian that were to end would within this time: twice the grace and the pauses between probes


class Light:
    """A process of `tests.guarded`."""

    def __init__(self, *words: str) -> None:
        self.running = subprocess.Popen([sys.executable, "-m", "tests.guarded", *words], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hear(self) -> dict:
        line = self.running.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def say(self, words: object = None) -> None:
        self.running.stdin.write(json.dumps(words) + "\n")
        self.running.stdin.flush()

    def close(self) -> None:
        self.running.kill()
        self.running.wait(WAIT_S)
        for pipe in (self.running.stdin, self.running.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class Relay:
    """A port that leads to another one, until it is cut: then nothing passes, and nobody is refused."""

    def __init__(self, url: str) -> None:
        self._target = (urlsplit(url).hostname, urlsplit(url).port)
        self._listener = socket.create_server((HOST, 0))
        self.url = url_of(HOST, self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._is_cut = True

    def end_connections(self) -> None:
        """As a timeout does."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.end_connections()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                if not self._is_cut:
                    far = socket.create_connection(self._target)
                    self._open.append(far)
                    for one, other in ((near, far), (far, near)):
                        threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if not self._is_cut:
                    other.sendall(data)
        if not self._is_cut:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)


class Guarded:
    """An engine with ranks elsewhere. With `relayed`, the guardian and the engine reach them through relays."""

    def __init__(self, ranks: int = 1, kind: str = "", relayed: bool = False) -> None:
        self.ranks = [Light("rank", *([kind] if kind else [])) for _ in range(ranks)]
        addresses = [from_words(one.hear()) for one in self.ranks]
        self.relays: list[Relay] = []
        words = []
        for one in addresses:
            words.append(to_words(one))
            if relayed:
                pair = [Relay(one.url), Relay(one.lifeline)]
                self.relays += pair
                words[-1] |= {"url": pair[0].url, "lifeline": pair[1].url}
        self.engine = Light("engine")
        self.engine.say(words)
        self.said = self.engine.hear()
        (_, _), (self.guardian, _) = self.said["processes"]
        self.member = m.Member("p", m.Role.PREFILL, self.said["lifeline"], m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""),
                               m.Load(), process.host_id(), tuple(m.Process(*one) for one in self.said["processes"]))

    def is_proven_gone(self) -> tuple[bool, bool]:
        """By its processes, and by its lifeline."""
        where = urlsplit(self.said["lifeline"])
        try:
            socket.create_connection((where.hostname, where.port), WAIT_S).close()
        except ConnectionRefusedError:
            return process.is_gone(self.member), True
        return process.is_gone(self.member), False

    def assert_stays(self) -> None:
        until = time.monotonic() + STAYS_S
        while time.monotonic() < until:
            assert self.is_proven_gone() == (False, False)
            time.sleep(0.05)

    def wait_gone(self) -> None:
        wait_for(lambda: self.is_proven_gone() == (True, True), "the proof of its end", WAIT_S)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.guardian, signal.SIGKILL)
        for one in [*self.ranks, self.engine]:
            one.close()
        for relay in self.relays:
            relay.close()


@pytest.fixture
def make() -> Iterator[type[Guarded]]:
    made: list[Guarded] = []

    def guarded(*arguments, **options) -> Guarded:
        made.append(Guarded(*arguments, **options))
        return made[-1]

    yield guarded
    for one in made:
        one.close()


def test_b21_the_engine_is_killed_and_a_rank_elsewhere_lives_on(make):
    """It is stopped, so it has not seen the end of the engine yet: it may still write when it goes on. B21."""
    guarded = make(ranks=2)
    freeze(guarded.ranks[0].running.pid)
    guarded.engine.running.kill()
    assert guarded.ranks[1].running.wait(WAIT_S) == 1, "one that sees it ends"
    guarded.engine.running.wait(WAIT_S)
    guarded.assert_stays()
    guarded.ranks[0].running.send_signal(signal.SIGCONT)
    assert guarded.ranks[0].running.wait(WAIT_S) == 1
    guarded.wait_gone()


def test_b21_the_engine_with_all_its_children_is_killed(make):
    """As vLLM does with the process tree of an engine that does not end: the guardian is in no tree of it. B21."""
    import psutil
    guarded = make()
    assert psutil.Process(guarded.engine.running.pid).children(recursive=True) == []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guarded.guardian, number)
    guarded.assert_stays()
    assert os.getsid(guarded.guardian) == guarded.guardian


def test_b21_a_rank_that_is_killed_is_proven_gone_and_its_engine_hears_of_it(make):
    guarded = make()
    guarded.engine.say("watch")
    guarded.ranks[0].running.kill()
    assert guarded.engine.hear()["lost"].startswith("rank 0 is gone")
    wait_for(lambda: process.start_time(guarded.guardian) is None, "the guardian's end", WAIT_S)
    assert guarded.is_proven_gone() == (False, False), "the engine holds its lifeline, too"
    guarded.engine.running.kill()
    guarded.engine.running.wait(WAIT_S)
    guarded.wait_gone()


@pytest.mark.parametrize("connection", ["open", "ended"])
def test_b21_a_cut_proves_nothing(make, connection):
    """The rank is gone, and its engine, but nobody can know the former. B21."""
    guarded = make(relayed=True)
    for relay in guarded.relays:
        relay.cut()
    guarded.ranks[0].running.kill()
    guarded.engine.running.kill()
    guarded.engine.running.wait(WAIT_S)
    if connection == "ended":
        for relay in guarded.relays:
            relay.end_connections()
    guarded.assert_stays()
    for relay in guarded.relays:
        relay.close()  # from now on it is refused
    guarded.wait_gone()


def test_b20_after_a_farewell_nobody_is_waited_for(make):
    guarded = make(ranks=2)
    guarded.engine.say("close")
    assert guarded.engine.hear() == {"closed": True}
    wait_for(lambda: process.start_time(guarded.guardian) is None, "the guardian's end", WAIT_S)
    assert [one.running.wait(WAIT_S) for one in guarded.ranks] == [0, 0], "nobody on their node would end them"


def test_b21_a_rank_that_can_not_close_its_transfers_ends_with_its_engine(make):
    guarded = make(kind="hangs")
    guarded.engine.say("close")
    assert guarded.engine.hear() == {"closed": True}
    assert guarded.ranks[0].running.wait(WAIT_S) == 1
    guarded.engine.running.kill()
    guarded.engine.running.wait(WAIT_S)
    guarded.wait_gone()


@pytest.mark.parametrize("kind", ["hangs", "lingers"])
def test_b21_a_rank_that_can_not_close_its_transfers_is_waited_for(make, kind):
    """Bytes may still land until its process ends, also after Python's end in it. B21."""
    guarded = make(kind=kind)
    guarded.ranks[0].say()
    assert guarded.ranks[0].hear() == {"closed": False}
    if kind == "lingers":
        wait_for(lambda: "pause" in Path(f"/proc/{guarded.ranks[0].running.pid}/wchan").read_text(), "Python's end",
                 WAIT_S)
    guarded.engine.running.kill()
    guarded.engine.running.wait(WAIT_S)
    guarded.assert_stays()
    guarded.ranks[0].running.kill()
    guarded.wait_gone()


def test_more_silent_ranks_than_can_be_probed_at_once_cost_no_time():
    silent = socket.create_server((HOST, 0))
    watch = RankWatch({}, {number: (f"rank {number}", url_of(HOST, silent.getsockname()[1])) for number in range(200)})
    now = time.monotonic()
    watch.look(now)
    assert watch.next_timeout() > now + 0.1
    watch.close()
    silent.close()


def test_b21_the_guardian_is_killed_so_ranks_and_engine_end(make):
    guarded = make(ranks=2)
    guarded.engine.say("watch")
    os.kill(guarded.guardian, signal.SIGKILL)
    assert guarded.engine.hear()["lost"]
    assert [one.running.wait(WAIT_S) for one in guarded.ranks] == [1, 1]
    assert process.lost(guarded.member) == guarded.member.processes[1], "the control thread finds it, too"


def test_the_guardian_has_no_other_file_of_its_engine(make):
    """A socket or a memory file that it kept open would outlive the engine."""
    guarded = make(ranks=2)
    lifeline = urlsplit(guarded.said["lifeline"]).port
    inodes = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
              if line.split()[1].endswith(f":{lifeline:04X}") and line.split()[3] == "0A"}

    def files(pid: int) -> set[str]:
        return {Path(f"/proc/{pid}/fd/{name}").resolve().name for name in os.listdir(f"/proc/{pid}/fd")}

    def shared() -> set[str]:
        return files(guarded.guardian) & files(guarded.engine.running.pid) - {"null"}

    assert len(inodes) == 1
    wait_for(lambda: shared() == {f"socket:[{inode}]" for inode in inodes}, lambda: f"its lifeline, not {shared()}",
             WAIT_S)
    assert Path(f"/proc/{guarded.guardian}/cwd").resolve() == Path("/")


def test_b80_a_rank_that_can_not_be_guarded_is_named(make):
    rank = Light("rank")
    try:
        address = from_words(rank.hear())
        with socket.create_server((HOST, 0)) as silent:
            where = url_of(HOST, silent.getsockname()[1])
            other = type(address)(address.url, where, address.name, address.secret)
            import vllm_pd.peer.liveness.guardian as guardian
            assert guardian.GREET_S > 5
            with pytest.raises(ControlError, match=f"{where} does not greet: open its port"):
                start_guardian({0: other})
        stranger = type(address)(address.url, address.lifeline, address.name, bytes(32))
        with pytest.raises(ControlError, match=f"can't connect to rank 0 at {address.url}.*bind"):
            start_guardian({0: stranger})
    finally:
        rank.close()
