# SPDX-License-Identifier: Apache-2.0
"""Groups of V1's engine loops that count their steps: the real loop, scheduler, member and coordinator, over simulated
memory. A forward pass is a barrier over the ranks, as its collectives are: a rank that makes one too many, or one too
few, hangs the group until the barrier's deadline."""
import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed import HashStore
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineShutdownState

from tests.v1.simulated import Engine
from tests.v1.test_engine_access import Loop, StubExecutor
from vllm_pd.v1.lockstep.core import StepSyncCore, adopt
from vllm_pd.v1.lockstep.options import StepSyncOptions

BARRIER_S = 20.0
WAIT_S = 60.0


class LateFuture(Future):
    """As those of V1's executor of several processes: an answer is read where its result is asked for, after all that
    were to come before it, and nowhere else."""

    def __init__(self, pending: collections.deque, value: Any) -> None:
        super().__init__()
        self._pending, self._value = pending, value
        pending.append(self)

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            earliest = self._pending.popleft()
            earliest.set_result(earliest._value)
        return super().result(timeout)


class BarrierExecutor(StubExecutor):
    """Each forward pass waits for those of the other ranks, dummies included. With two steps in flight it samples
    apart, as V1's asynchronous scheduling has it."""

    def __init__(self, engine: Engine, barrier: threading.Barrier) -> None:
        super().__init__(engine)
        self.barrier, self.forwards, self.calls = barrier, 0, []
        self.before_pass: Callable[[], None] = lambda: None
        self.preempted = 0
        self._computed: Any = None
        self._pending: collections.deque = collections.deque()

    def execute_model(self, output: Any, non_block: bool = False) -> Future:
        self.preempted += len(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            return super().execute_model(output, non_block)
        self._meet()
        if self.engine.in_flight == 1:
            return super().execute_model(output, non_block)
        self._computed = super().execute_model(output, non_block).result()
        return LateFuture(self._pending, None)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Future:
        return LateFuture(self._pending, self._computed)

    def execute_dummy_batch(self) -> None:
        super().execute_dummy_batch()
        self._meet()

    def collective_rpc(self, method: Any, *arguments: Any, **keywords: Any) -> list:
        """A call of the workers that runs collectives: all ranks must be in it."""
        if method == "meet":
            self.calls.append(self.forwards)
            self.barrier.wait(BARRIER_S)
        return []

    def sleep(self, level: int) -> None:
        """As a call of the workers, with collectives. After it the weights are gone."""
        self._change("sleep")

    def wake_up(self, tags: list[str] | None) -> None:
        """As `sleep`, back."""
        self._change("wake_up")

    def _change(self, kind: str) -> None:
        assert self.is_sleeping is (kind == "wake_up")
        self.calls.append((kind, self.forwards))
        self.barrier.wait(BARRIER_S)
        self.is_sleeping = not self.is_sleeping

    def reset_mm_cache(self) -> None:
        """It has none."""

    def reset_encoder_cache(self) -> None:
        """It has none."""

    def _meet(self) -> None:
        assert not self.is_sleeping, "a forward pass without weights"
        self.before_pass()
        self.forwards += 1
        self.barrier.wait(BARRIER_S)


def keep_in_flight(core: Any, steps: int) -> None:
    """Give an engine so many steps in flight."""
    if steps > 1:
        core.batch_queue, core.batch_queue_size = collections.deque(maxlen=2), 2
        core.step_fn, core.async_scheduling = core.step_with_batch_queue, True


def kill(loop: Loop) -> None:
    """End the loop at its next turn, whatever it has."""
    def die() -> None:
        raise SystemExit

    loop.core._handle_shutdown = loop.core._process_engine_step = die
    loop.core.shutdown_state = EngineShutdownState.REQUESTED
    loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


class CountedLoop(Loop):
    """One rank, whose loop runs in a thread."""

    def __init__(self, folder: Any, rank: int, group: "CountedGroup", **settings: Any) -> None:
        self.rank, self.group = rank, group
        super().__init__(folder, StepSyncCore, **settings)  # vLLM makes a DPEngineCoreProc, and its access later

    def _run(self) -> None:
        core = self.core
        core.dp_rank = core.engine_index = self.rank
        core.dp_size, core.dp_store = len(self.group.ranks), self.group.store
        core.publish_dp_lb_stats = True  # as with one front end for all ranks
        core.last_counts = (0, 0)
        core.model_executor = self.executor = BarrierExecutor(self.engine, self.group.barrier)
        keep_in_flight(core, self.engine.in_flight)
        try:
            adopt(core, self.engine.config, self.group.options)
            self.group.started.wait(BARRIER_S)
            super()._run()
        except BaseException as error:
            self.error = error
            self.group.barrier.abort()


class CountedGroup:
    """The ranks of one group, in one process, and their front end. `first`: what comes to them before any of their
    loops has begun."""

    def __init__(self, folder: Any, ranks: int = 2, options: StepSyncOptions | None = None,
                 first: Callable[["CountedGroup"], None] = lambda group: None, **settings: Any) -> None:
        self.barrier = threading.Barrier(ranks)
        self.started = threading.Barrier(ranks + 1)
        self.store = HashStore()
        self.options = options or StepSyncOptions(shared_memory=False)
        self.ranks: list[CountedLoop] = [None] * ranks
        self.answers: dict[int, list[Any]] = collections.defaultdict(list)  # by the number of a call
        for rank in range(ranks):
            self.ranks[rank] = CountedLoop(folder, rank, self, **settings)
            self.ranks[rank].answers = self.answers
        first(self)
        self.started.wait(BARRIER_S)

    def forwards(self) -> list[int]:
        """How many forward passes each rank has begun."""
        return [loop.executor.forwards for loop in self.ranks]

    def add(self, rank: int, request_id: str, token_ids: list[int], tokens: int) -> None:
        """A client's request comes."""
        self.ranks[rank].add(request_id, token_ids, tokens)

    def call(self, number: int, method: str, *arguments: Any) -> None:
        """A call of the front end, to all ranks."""
        for loop in self.ranks:
            loop.call(number, method, *arguments)

    def follow(self) -> None:
        """Deliver what the loops have said. Raises what has ended one of them."""
        for loop in self.ranks:
            assert loop.error is None, loop.error
            loop.take()

    def wait(self, holds: Callable[[], bool]) -> None:
        """Until it holds."""
        deadline = time.monotonic() + WAIT_S
        while True:
            self.follow()
            if holds():
                return
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def rests(self) -> bool:
        """Whether no rank has a step to make, and all have made equally many."""
        return len(set(self.forwards())) == 1 and not any(
            loop.core.step_sync.due or loop.core.scheduler.has_requests() or not loop.core.input_queue.empty()
            for loop in self.ranks)

    def stop(self) -> None:
        """As `close`."""
        self.close()

    def end(self) -> None:
        """End all loops, wherever they are."""
        self.barrier.abort()
        for loop in self.ranks:
            loop.core.step_sync.member.expect_end()
            kill(loop)
        for loop in self.ranks:
            loop.thread.join(WAIT_S)
        for loop in self.ranks:
            loop.core.step_sync.close()

    def close(self) -> None:
        """End all loops, as a signal to their processes does."""
        for loop in self.ranks:
            loop.core.shutdown_state = EngineShutdownState.REQUESTED
            loop.core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        for loop in self.ranks:
            loop.thread.join(WAIT_S)
        for loop in self.ranks:
            loop.core.step_sync.close()
            assert not loop.thread.is_alive() and loop.error is None, loop.error
