# SPDX-License-Identifier: Apache-2.0
"""A rank in a process of its own, with an engine loop as vLLM's, but forwards that are only a barrier. Like a real
collective, that barrier waits for a dead rank for ever."""
import multiprocessing
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.dp_protocol import wire
from vllm_pd import dp
from vllm_pd.dp.group import join
from vllm_pd.dp.interface import CallOutcome, GroupFailed, StepDecision, SyncSettings

_FORK = multiprocessing.get_context("fork")
BOUND_S = 100.0  # far more than any of what follows: a machine may be busy
SETTINGS = SyncSettings(timeout_s=10.0, grace_s=5.0, join_s=BOUND_S)  # where no rank dies, on a busy machine
CALM = SyncSettings(timeout_s=4.0, grace_s=BOUND_S, join_s=BOUND_S)  # where a test waits for a beat
QUICK = SyncSettings(timeout_s=1.5, grace_s=0.3, join_s=BOUND_S)  # where ranks have to end for one that does not answer
SLOW_CALL = 8  # takes SLOW_S
SLOW_S = 5.0
FAILED = 3


def file_exchange(folder: Path, rank: int, size: int) -> Callable[[bytes], list[bytes]]:
    """An all-gather by files."""
    rounds = iter(range(100))

    def exchange(mine: bytes) -> list[bytes]:
        number = next(rounds)
        (folder / f"{number}.{rank}.part").write_bytes(mine)
        os.rename(folder / f"{number}.{rank}.part", folder / f"{number}.{rank}")
        paths = [folder / f"{number}.{peer}" for peer in range(size)]
        until = time.monotonic() + BOUND_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > until:
                raise GroupFailed("not all ranks are there")
            time.sleep(0.01)
        return [path.read_bytes() for path in paths]

    return exchange


def engine_loop(member: dp.GroupMember, inbox: queue.Queue, forward: Callable[[], None], report: Callable) -> None:
    """Until END. Reports ("served",) for each request, ("made", name, forwards) for each call, which waits for all as a
    forward does (and before SLOW_CALL ("makes", name)), ("put off", name), ("sticks",), and, when asked, ("state",
    counters, cpu_s, switches, whether it has something to run), ("engaged", whether it is) and ("given up", whether it
    was)."""
    work: list[int] = []
    while True:
        while not inbox.empty() or not (work and member.may_step) and not member.due:
            kind, *rest = inbox.get()
            if kind == "request":
                work.append(rest[0])
            elif kind == "stick":
                report(("sticks",))
                time.sleep(BOUND_S * 2)
            elif kind == "leave":
                member.leave()
            elif kind == "end":
                member.expect_end()
            elif kind == "shut down":
                return
            elif kind == "call":
                member.hold(rest[0])
            elif kind == "give up":
                report(("given up", member.give_up(rest[0])))
            elif kind == "state":
                usage = resource.getrusage(resource.RUSAGE_SELF)
                report(("state", member.counters, time.process_time(), usage.ru_nvcsw, bool(work) or member.due))
            elif kind == "engaged":
                report(("engaged", member.engaged))
        while end := member.next_call():
            what, name = end
            if what is CallOutcome.MAKE:
                if name == SLOW_CALL:
                    report(("makes", name))
                    time.sleep(SLOW_S)
                forward()
                report(("made", name, member.counters.forwards))
            else:
                report(("put off", name))
        works = work and member.may_step
        decision = member.before_step(True, max(work)) if works else member.before_step(False)
        if decision is StepDecision.END:
            return
        if decision is StepDecision.IDLE:
            continue
        forward()
        member.after_step()
        if decision is StepDecision.FORWARD:
            work = [left - 1 for left in work]
            for _ in range(work.count(0)):
                report(("served",))
            work = [left for left in work if left]


def _rank(rank: int, size: int, folder: Path, barrier, pipe, shared: bool, settings: SyncSettings,
          between: wire.Wire | None) -> None:
    inbox: queue.Queue = queue.Queue()
    if between is not None:
        between.enter(rank % 2)
    host = "127.0.0.1" if between is None else wire.ADDRESSES[0]

    def read() -> None:
        while True:
            inbox.put(pipe.recv())

    try:
        member = join(rank, size, host, wake=lambda: inbox.put(("wake",)), exchange=file_exchange(folder, rank,
        size), settings=settings, shared_memory=shared)
        pipe.send(("joined", type(member).__name__))
        threading.Thread(target=read, daemon=True).start()
        engine_loop(member, inbox, lambda: (barrier.wait(), time.sleep(0.003)), pipe.send)
        member.close()
    except GroupFailed as error:
        pipe.send(("failed", str(error)))
        os._exit(FAILED)
    pipe.send(("ended", member.counters))
    os._exit(0)


class Group:
    """Ranks in processes. `kill`, `stop` and `ask` name them by number. `between`: every other rank is on the other
    side of that wire."""

    def __init__(self, size: int, folder: Path, shared: bool, settings: SyncSettings = SETTINGS, start: bool = True,
                 between: wire.Wire | None = None):
        self.size = size
        barrier = _FORK.Barrier(size)
        self._pipes, self.processes = [], []
        self._reports: list[list[tuple]] = [[] for _ in range(size)]
        for rank in range(size):
            ours, theirs = _FORK.Pipe()
            arguments = (rank, size, folder, barrier, theirs, shared, settings, between)
            self.processes.append(_FORK.Process(target=_rank, args=arguments, daemon=True))
            self._pipes.append(ours)
        if start:
            for rank in range(size):
                self.start(rank)
            kinds = {self.wait(rank, "joined")[1] for rank in range(size)}
            assert kinds == {"ShmMember" if shared else "RpcMember"}

    def start(self, rank: int) -> None:
        """Start one process."""
        self.processes[rank].start()

    def ask(self, rank: int, *what: object) -> None:
        """Put something into a rank's input queue."""
        self._pipes[rank].send(what)

    def wait(self, rank: int, kind: str) -> tuple:
        """The oldest report of that kind that has not been waited for. Those of other kinds may come before it: which
        comes first is often up to the other ranks."""
        until = time.monotonic() + BOUND_S
        reports = self._reports[rank]
        while True:
            for at, report in enumerate(reports):
                if report[0] == kind:
                    return reports.pop(at)
            if not self._pipes[rank].poll(max(0.0, until - time.monotonic())):
                break
            reports.append(self._pipes[rank].recv())
        raise AssertionError(f"rank {rank} has not said {kind!r}; its process: {self.processes[rank].exitcode}")

    def states(self) -> list[tuple]:
        """(counters, processor seconds, waits) of each rank, when the group has come to rest."""
        seen = None
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:
            for rank in range(self.size):
                self.ask(rank, "state")
            states = [self.wait(rank, "state")[1:] for rank in range(self.size)]
            forwards = [state[0].forwards for state in states]
            if forwards == seen and len(set(forwards)) == 1 and not any(busy for *_, busy in states):
                return [tuple(state) for *state, _ in states]
            seen = forwards
            time.sleep(0.1)
        raise AssertionError(f"the group does not come to rest: {seen}")

    def wait_engaged(self, rank: int) -> None:
        """Until others can't make a call, or know that it is off, without that rank."""
        until = time.monotonic() + BOUND_S
        while time.monotonic() < until:
            self.ask(rank, "engaged")
            if self.wait(rank, "engaged")[1]:
                return
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} does not become ready for a call")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def exit_codes(self, *ranks: int) -> list[int | None]:
        """Of those ranks, when they have ended."""
        for rank in ranks:
            self.processes[rank].join(BOUND_S)
        return [self.processes[rank].exitcode for rank in ranks]

    def close(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            if process.pid is not None:
                if process.is_alive():
                    process.kill()
                process.join(BOUND_S)
        for pipe in self._pipes:
            pipe.close()
