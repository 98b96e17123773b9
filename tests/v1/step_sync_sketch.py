# SPDX-License-Identifier: Apache-2.0
"""A sketch: vLLM 0.32's `DPEngineCoreProc` with the step sync (`vllm_pd.dp`) in the place of waves.

What a port would change in that class is what `CountedCore` overrides; docs/dp.md says what that leaves out. The
scheduler, the parts of the loop and the member of the step sync are the real ones. A forward pass is a barrier over the
ranks, as its collectives are: a rank that makes one too many, or one too few, hangs the group until the barrier's
deadline.
"""
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

from tests.v1.simulated import Engine
from tests.v1.test_engine_access import Loop, StubExecutor
from vllm_pd import dp
from vllm_pd.dp.interface import GroupMember, StepDecision, SyncSettings
from vllm_pd.v0.dp.engine import most_steps

BARRIER_S = 10.0


class CountedCore(DPEngineCoreProc):
    """The engine core of a rank. `member` is its part of the step sync."""

    member: GroupMember

    @property
    def engines_running(self) -> bool:
        """In the place of the flag of waves: whether other ranks wait for a forward pass of this one. `has_work` reads
        it, so the loop does not block on its queue then."""
        return self.member.due

    @engines_running.setter
    def engines_running(self, running: bool) -> None:
        """Nobody says so: it follows from the steps that were requested."""

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """A request may enter at any rank: no other has to know."""
        EngineCoreProc.add_request(self, request, request_wave)

    def run_busy_loop(self) -> None:
        """`DPEngineCoreProc.run_busy_loop` without waves and without its all-reduce."""
        while self._handle_shutdown():
            self._process_input_queue()
            self._maybe_publish_request_counts()
            if self._process_engine_step():
                self.member.after_step()
            elif self.member.before_step(False) is StepDecision.DUMMY:
                self.execute_dummy_batch()
                self.member.after_step()
            self._maybe_publish_request_counts()
        raise SystemExit


class BarrierExecutor(StubExecutor):
    """Each forward pass waits for those of the other ranks, dummies included."""

    core: CountedCore

    def __init__(self, engine: Engine, barrier: threading.Barrier) -> None:
        super().__init__(engine)
        self.barrier = barrier
        self.forwards = 0

    def execute_model(self, output: Any, non_block: bool = False) -> Future:
        """A port would request the step here, right before the forward pass. A step without tokens makes none."""
        if output.total_num_scheduled_tokens:
            self.core.member.before_step(True, most_steps(self.engine.scheduler,
                                                          self.engine.scheduler.max_num_scheduled_tokens))
            self._meet()
        return super().execute_model(output, non_block)

    def execute_dummy_batch(self) -> None:
        super().execute_dummy_batch()
        self._meet()

    def _meet(self) -> None:
        self.forwards += 1
        self.barrier.wait(BARRIER_S)


class CountedLoop(Loop):
    """One rank, whose loop runs in a thread."""

    def __init__(self, folder: Any, rank: int, group: "CountedGroup", **settings: Any) -> None:
        self.rank, self.group = rank, group
        super().__init__(folder, CountedCore, **settings)

    def _run(self) -> None:
        core = self.core
        core.dp_rank = core.engine_index = self.rank
        core.model_executor = self.executor = BarrierExecutor(self.engine, self.group.barrier)
        self.executor.core = core
        try:
            core.member = self.group.join(self.rank, lambda: core.input_queue.put_nowait(
                (EngineCoreRequestType.WAKEUP, None)))
            self.engine.access.start_wave = lambda: None  # `EngineAccess`: no wave has to be started
            self.group.joined.wait(BARRIER_S)
            super()._run()
        except BaseException as error:
            self.error = error


class CountedGroup:
    """The ranks of one group, in one process, over the network backend of the step sync."""

    def __init__(self, folder: Any, ranks: int = 2, **settings: Any) -> None:
        self.barrier = threading.Barrier(ranks)
        self.joined = threading.Barrier(ranks + 1)
        self._ranks = ranks
        self._rows: list[bytes] = [b""] * ranks
        self._exchanged = threading.Barrier(ranks)
        self._errors: list[Exception] = []
        self.loops = [CountedLoop(folder, rank, self, **settings) for rank in range(ranks)]
        self.joined.wait(BARRIER_S)

    def join(self, rank: int, wake: Callable[[], None]) -> GroupMember:
        """The member of a rank. Blocks until all are there."""

        def exchange(mine: bytes) -> list[bytes]:
            self._rows[rank] = mine
            self._exchanged.wait(BARRIER_S)
            rows = list(self._rows)
            self._exchanged.wait(BARRIER_S)
            return rows

        return dp.join(rank, self._ranks, "127.0.0.1", wake=wake, exchange=exchange, abort=self._errors.append,
                       settings=SyncSettings(call_wait_s=0.0), shared_memory=False)

    def forwards(self) -> list[int]:
        """How many forward passes each rank has begun."""
        return [loop.executor.forwards for loop in self.loops]

    def wait(self, holds: Callable[[], bool]) -> None:
        """Until it holds. The loops' outputs are delivered meanwhile."""
        def all_looked_at() -> bool:
            for loop in self.loops:
                assert loop.error is None, loop.error
                loop.take()
            return holds()

        self.loops[0].wait(all_looked_at)

    def rest(self) -> None:
        """Until no rank has a step to make, and all have made equally many."""
        self.wait(lambda: len(set(self.forwards())) == 1 and not any(
            loop.core.member.due or loop.core.scheduler.has_requests() or not loop.core.input_queue.empty()
            for loop in self.loops))

    def close(self) -> None:
        """End all loops, then the step sync."""
        for loop in self.loops:
            loop.core.member.expect_end()
        for loop in self.loops:
            loop.stop()
        for loop in self.loops:
            loop.core.member.close()
        assert not self._errors, self._errors
