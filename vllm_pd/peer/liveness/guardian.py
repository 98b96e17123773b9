# SPDX-License-Identifier: Apache-2.0
"""The guardian of an engine that has ranks on other nodes: a small process on the engine's host.

Peers reuse blocks that an engine may write to only when all its processes are gone, which they see by its lifeline:
for all peers it is on another host. The guardian makes that hold for ranks elsewhere: it holds the lifeline's file, and
ends only when each of those ranks has

- said farewell: its transfers are closed, and nothing of it can land any more; or
- ended as a fact. Each has a lifeline of its own, and what proves its end is what proves that of a peer
  (`vllm_pd.peer.liveness.rules`): its own greeting has come once, the connection between it and the guardian has ended,
  and its lifeline is refused twice. Silence proves nothing, so the guardian stays, and the peers keep the blocks.

Its life:

1. `start_guardian` starts it as a program of its own, which is a child of no process of the engine: who ends the engine
   with all its children does not end the guardian (but where vLLM is process 1 of a container, the kernel does). It has
   no open file of EngineCore but their connection.
2. It connects to each rank and is greeted by each lifeline. Then it answers, and EngineCore may attach to the ranks.
3. EngineCore sends it the lifeline's file. Until then it ends with EngineCore: nothing can have been written.
4. It ends as above, whether or not EngineCore is there.

A rank ends when its connection to the guardian does. So if the guardian is killed the ranks end, as does the engine.
"""
from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from vllm_pd.errors import ControlError
from vllm_pd.peer.liveness.probe import TcpProbes
from vllm_pd.peer.liveness.process import this_process
from vllm_pd.peer.liveness.rules import LivenessRules, ProbeAnswer
from vllm_pd.protocol.messages import Process
from vllm_pd.rpc.codec import UNREADABLE
from vllm_pd.transfer.ranks.packets import PacketSocket
from vllm_pd.transfer.ranks.remote import GUARDIAN, RankAddress, TcpPackets, connect_to

GREET_S = 20.0  # how long the lifelines may take to greet
START_S = 180.0  # how long the guardian may take in all: a crowded machine needs long for a new process
LOOK_S = 0.1  # the longest pause between two looks while a rank is being probed


class GuardianReady(msgspec.Struct, frozen=True, array_like=True):
    """The guardian's only message: which process it is, or why it can't guard."""
    process: Process = Process(0, 0)
    error: str = ""


class RankWatch:
    """Whether each of these ranks has said farewell or has ended. Owns the connections to them, by rank. `lifelines`
    are (name, URL), by rank."""

    def __init__(self, connections: dict[int, TcpPackets], lifelines: Mapping[int, tuple[str, str]]) -> None:
        self._connections = dict(connections)
        self._open = dict(lifelines)
        self._unheard = {name for name, _ in lifelines.values()}  # that have not greeted yet
        self._rules = LivenessRules()
        self._probes = TcpProbes()

    @property
    def ranks(self) -> list[int]:
        """Those that may still write."""
        return sorted(self._open)

    def unheard(self) -> list[str]:
        """The URLs of the lifelines that have not greeted yet."""
        return [url for name, url in self._open.values() if name in self._unheard]

    def filenos(self) -> list[int]:
        """What to poll for reading."""
        return [self._probes.fileno(), *(connection.fileno() for connection in self._connections.values())]

    def next_timeout(self) -> float | None:
        """When `look` is due although nothing is readable."""
        due = [self._probes.next_timeout(), self._rules.next_timeout() if self._probes.count_free() else None]
        return min((when for when in due if when is not None), default=None)

    def look(self, now: float) -> None:
        """Take in what has come, and go on with the probes."""
        for rank, connection in list(self._connections.items()):
            with contextlib.suppress(OSError):
                connection.receive()
                if not connection.farewell:
                    continue
            connection.close()
            del self._connections[rank]
            if connection.farewell:
                del self._open[rank]
        ended = {name for rank, (name, _) in self._open.items() if rank not in self._connections}
        self._rules.watch(now, dict(self._open.values()), ended)
        for name, answer in self._probes.poll(now):
            if answer is ProbeAnswer.GREETED:
                self._unheard.discard(name)
            if self._rules.answered(now, name, answer) and name in ended:
                self._open = {rank: one for rank, one in self._open.items() if one[0] != name}
        for name, url in self._rules.due(now, self._probes.count_free()):
            self._probes.start(now, name, url)

    def close(self) -> None:
        """Close everything."""
        for connection in self._connections.values():
            connection.close()
        self._probes.close()


class Guardian:
    """The guardian's process. Owns `engine`, the connection to EngineCore, and the files that come over it."""

    def __init__(self, engine: PacketSocket) -> None:
        self._engine: PacketSocket | None = engine
        self._held: list[int] = engine.held

    def run(self) -> None:
        """Returns when no guarded rank can write any more, or when there was nothing to guard."""
        try:
            watch = self._begin()
        except (ControlError, *UNREADABLE) as error:
            if self._engine is not None:
                self._engine.send(msgspec.msgpack.encode(GuardianReady(error=str(error)[:2000])))
            return
        while watch.ranks and (self._engine is not None or self._held):
            self._wait(watch)
        watch.close()

    def _begin(self) -> RankWatch:
        """Connect to the ranks and hear their greetings. Raises ControlError."""
        deadline_s = time.monotonic() + GREET_S
        while not (messages := self._messages()):
            if self._engine is None or time.monotonic() > deadline_s:
                raise ControlError("EngineCore has said nothing")
            self._engine.wait(1.0)
        ranks = msgspec.msgpack.decode(messages[0], type=dict[int, RankAddress])
        watch = RankWatch({rank: connect_to(rank, one, GUARDIAN) for rank, one in ranks.items()},
                          {rank: (one.name, one.lifeline) for rank, one in ranks.items()})
        deadline_s = time.monotonic() + GREET_S
        watch.look(time.monotonic())
        while unheard := watch.unheard():
            if time.monotonic() > deadline_s:
                raise ControlError(f"the lifeline at {unheard[0]} does not greet: open its port for this host")
            self._wait(watch)
        if self._engine is None:
            raise ControlError("EngineCore has ended")
        self._engine.send(msgspec.msgpack.encode(GuardianReady(this_process())))
        return watch

    def _wait(self, watch: RankWatch) -> None:
        """Wait for input or the next probe, and take in what has come."""
        poll = select.poll()
        for fileno in [*watch.filenos(), *(self._engine.filenos() if self._engine is not None else [])]:
            poll.register(fileno, select.POLLIN)
        due = watch.next_timeout()
        now = time.monotonic()
        poll.poll(None if due is None else 1000 * min(max(0.0, due - now), LOOK_S))
        self._messages()
        watch.look(time.monotonic())

    def _messages(self) -> list[bytes]:
        """What EngineCore has sent. Its farewell changes nothing, nor does its end."""
        if self._engine is not None:
            try:
                return self._engine.receive()
            except OSError:
                self._engine.close()
                self._engine = None
        return []


def start_guardian(ranks: Mapping[int, RankAddress]) -> tuple[PacketSocket, Process]:
    """Start a guardian for these ranks. Returns the connection to it, which the caller owns and over which it must send
    the lifeline's file, and the process. Raises ControlError if it can't connect to a rank, or does not hear it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guardian = PacketSocket(ours)
    try:
        with theirs:
            program = [sys.executable, "-m", __name__, str(theirs.fileno()), *(one.url for one in ranks.values())]
            begun = subprocess.Popen(program, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        guardian.send(msgspec.msgpack.encode(dict(ranks)))
        ready = _await_ready(guardian)
        begun.wait(START_S)  # its child is the guardian
    except (OSError, subprocess.SubprocessError) as error:
        guardian.close()
        raise ControlError(f"the guardian of the ranks on other nodes does not start: {error}; see what `python -m "
                           f"{__name__}` says here, and whether this host has memory and processes left") from error
    except Exception:
        guardian.close()
        raise
    if ready.error:
        guardian.close()
        raise ControlError(ready.error)
    return guardian, ready.process


def _await_ready(guardian: PacketSocket) -> GuardianReady:
    deadline_s = time.monotonic() + START_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        guardian.wait(left_s)
        if messages := guardian.receive():
            return msgspec.msgpack.decode(messages[0], type=GuardianReady)
    raise ControlError(f"the guardian of the ranks on other nodes has not answered in {START_S:g} s: see whether this "
                       "host is busy, and whether it reaches the address and ports of the other nodes")


def main() -> None:
    """The program: its parent is to be no process of the engine, and a signal to all of them is not for it."""
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Guardian(PacketSocket(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    main()
