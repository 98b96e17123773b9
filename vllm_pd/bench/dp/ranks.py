# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp-ranks`: the step sync of groups with more ranks than this machine could run engines.

Each rank is a process with a real member of the group, and an engine loop whose forward pass is a barrier of all ranks
followed by a pause of `step_s`. Nothing else is simulated: the messages, their senders, and the CPU time of the
coordinator's thread are real. The first `busy` ranks serve requests of `tokens` passes each, one after another, and
begin together; the others run the dummy passes that those need.
"""

import itertools
import multiprocessing
import queue
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from vllm_pd import dp
from vllm_pd.bench.checks import require_at_least
from vllm_pd.bench.dp.measure import BACKENDS, checked_backend, thread_cpu_s
from vllm_pd.bench.report import ShowLine, side_by_side
from vllm_pd.dp.coordinator import THREAD
from vllm_pd.dp.interface import StepDecision, SyncSettings
from vllm_pd.errors import ConfigError, PDError

WAIT_S = 300.0  # for all ranks, on a machine with far fewer cores
SETTINGS = SyncSettings(timeout_s=60.0, join_s=WAIT_S)  # a rank may wait long for a core
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class RanksBench:
    """The command line of `vllm-pd bench dp-ranks`."""
    sizes: tuple[int, ...]
    backend: str = "network"
    busy: int = 1
    requests: int = 5
    tokens: int = 40
    step_s: float = 0.02

    def check(self) -> None:
        """Raises ConfigError for what can't be measured."""
        checked_backend(self.backend)
        require_at_least([("--requests", self.requests, 1), ("--tokens", self.tokens, 1), ("--busy", self.busy, 1),
                          ("--step-ms", 1000 * self.step_s, 0), *(("--ranks", size, 2) for size in self.sizes)])
        if self.busy > min(self.sizes):
            raise ConfigError("--busy", self.busy, f"there are but {min(self.sizes)} ranks")


class RankCounters(NamedTuple):
    """What one rank has done so far. `messages`: those of its process, so rank 0's are also the coordinator's. CPU
    times are in seconds, 0 where there is no coordinator."""
    forwards: int
    dummies: int
    asks: int
    messages: int
    coordinator_cpu_s: float
    cpu_s: float


def measure(bench: RanksBench, show: ShowLine = print) -> list[dict[str, Any]]:
    """Runs it all. One entry for each size, ready for JSON. Raises PDError where a rank hangs."""
    bench.check()
    entries = []
    for size in bench.sizes:
        entries.append(_measure(bench, size))
        show(f"{size} ranks: {entries[-1]['wall_s']:.1f} s")
    return entries


def table(entries: list[dict[str, Any]]) -> Table:
    """One line for each figure, one column for each size."""
    lines = [
        ("forward passes", lambda e: f"{e['forwards']}"),
        ("ms a pass", lambda e: f"{1000 * e['wall_s'] / e['forwards']:.1f}"),
        ("dummies, a rank", lambda e: f"{e['dummies'] / e['ranks']:.1f}"),
        ("asks a pass, all ranks", lambda e: f"{e['asks'] / e['forwards']:.2f}"),
        ("messages a pass, all ranks", lambda e: f"{e['messages'] / e['forwards']:.1f}"),
        ("CPU of the coordinator, us a pass", lambda e: f"{1e6 * e['coordinator_cpu_s'] / e['forwards']:.0f}"),
        ("... its share of a core, %", lambda e: f"{100 * e['coordinator_cpu_s'] / e['wall_s']:.1f}"),
        ("CPU of all ranks, us a pass", lambda e: f"{1e6 * e['cpu_s'] / e['forwards']:.0f}"),
    ]
    return side_by_side([f"{entry['ranks']} ranks" for entry in entries], entries, lines)


def _measure(bench: RanksBench, size: int) -> dict[str, Any]:
    """Measures one size, from when all ranks have met to the end of their work. All figures but `forwards` and
    `wall_s`, which are the same for all, are sums over the ranks. Raises PDError where a rank hangs; no process is
    left."""
    barrier = _FORK.Barrier(size)
    pipes = [_FORK.Pipe() for _ in range(size)]
    ranks = [_FORK.Process(target=_run_rank, args=(bench, rank, barrier, pipes), daemon=True) for rank in range(size)]
    ours = [mine for mine, _ in pipes]
    try:
        for process in ranks:
            process.start()
        _gather(ours)  # all have met
        before = _ask(ours, "tally")
        began = time.monotonic()
        _ask(ours, "work")
        wall_s = time.monotonic() - began
        done = [RankCounters(*(now - then for now, then in zip(*pair, strict=True)))
                for pair in zip(_ask(ours, "tally"), before, strict=True)]
        _ask(ours, "leave")
    finally:
        for process in ranks:
            process.kill()
            process.join()
        for pipe in itertools.chain.from_iterable(pipes):
            pipe.close()
    assert len({each.forwards for each in done}) == 1
    return {"ranks": size, "backend": bench.backend, "busy": bench.busy, "step_s": bench.step_s, "wall_s": wall_s,
            "forwards": done[0].forwards} | {
                key: sum(getattr(each, key) for each in done)
                for key in ("dummies", "asks", "messages", "coordinator_cpu_s", "cpu_s")}


def _gather(pipes: list[Connection]) -> list[Any]:
    """The answer of every rank, in order. Until then it performs each all-gather of byte strings that they ask for."""
    while True:
        until = time.monotonic() + WAIT_S
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(until - time.monotonic()):
                raise PDError(f"rank {rank} of {len(pipes)} has not answered within {WAIT_S:g} s")
        answers = [pipe.recv() for pipe in pipes]
        if not isinstance(answers[0], bytes):
            return answers
        for pipe in pipes:
            pipe.send(answers)


def _ask(pipes: list[Connection], command: str) -> list[Any]:
    for pipe in pipes:
        pipe.send(command)
    return _gather(pipes)


def _run_rank(bench: RanksBench, rank: int, barrier: Barrier, pipes: list[tuple[Connection, Connection]]) -> None:
    """The process of a rank. Its commands are `work`, `tally` and `leave`."""
    pipe = pipes[rank][1]
    for each in itertools.chain.from_iterable(pipes):
        if each is not pipe:
            each.close()
    inbox: queue.SimpleQueue = queue.SimpleQueue()

    def exchange(mine: bytes) -> list[bytes]:
        pipe.send(mine)
        return pipe.recv()

    def listen() -> None:
        while True:
            inbox.put(pipe.recv())

    def forward() -> None:
        barrier.wait(WAIT_S)
        time.sleep(bench.step_s)

    member = dp.join(rank, barrier.parties, "127.0.0.1", wake=lambda: inbox.put(""), exchange=exchange,
                     settings=SETTINGS, shared_memory=BACKENDS[bench.backend])
    threading.Thread(target=listen, daemon=True).start()
    pipe.send("met")
    left = 0  # forward passes of this rank's own requests
    while True:
        while not inbox.empty() or not left and not member.due:
            command = inbox.get()
            if command == "work":
                left = bench.requests * bench.tokens if rank < bench.busy else 0
            elif command == "leave":
                member.leave()
            if command == "tally":
                pipe.send(_tally(member))
            elif command and not left:
                pipe.send("done")
        decision = member.before_step(left > 0, (left - 1) % bench.tokens + 1 if left else None)
        if decision is StepDecision.END:
            return
        if decision is not StepDecision.IDLE:
            forward()
            member.after_step()
        if left:
            left -= 1
            if not left:
                pipe.send("done")


def _tally(member: dp.GroupMember) -> RankCounters:
    counters = member.counters
    coordinators = [thread.native_id for thread in threading.enumerate() if thread.name == THREAD]
    return RankCounters(counters.forwards, counters.dummies, counters.asks, member.messages,
                        sum(thread_cpu_s(Path(f"/proc/self/task/{thread}")) for thread in coordinators),
                        time.process_time())
