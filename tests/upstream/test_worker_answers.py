# SPDX-License-Identifier: Apache-2.0
"""Each call to the workers of a V1 engine takes the answers to itself, all of them and no others."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
BOUND_S = 60.0


class Answers(queue.Queue):
    """A worker's answers. `timeouts` has how long was waited for each."""

    def __init__(self):
        super().__init__()
        self.timeouts = []
        self.late = False  # whether nobody waits for it for as long as it takes

    def dequeue(self, timeout=None, cancel=None):
        self.timeouts.append(timeout)
        if timeout is not None and self.late:
            raise TimeoutError
        return self.get(timeout=BOUND_S)


@pytest.fixture
def executor():
    """Two workers; what is asked of them is answered by the test."""
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.io_thread_pool = False, None
    executor.shutdown_event = threading.Event()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=lambda call: None)
    executor.workers = [SimpleNamespace(worker_response_mq=Answers()) for _ in range(2)]
    yield executor
    executor.shutting_down = True
    assert all(worker.worker_response_mq.empty() for worker in executor.workers)


def answer(executor, *answers):
    for worker, given in zip(executor.workers, answers, strict=True):
        worker.worker_response_mq.put(given)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_call_that_fails_takes_the_answers_of_all_workers(executor, bad):
    """Or the next call would take them for its own."""
    given = [(SUCCESS, "adapter"), (SUCCESS, "adapter")]
    given[bad] = (FAILURE, "no such adapter")
    answer(executor, *given)
    with pytest.raises(RuntimeError, match="no such adapter"):
        executor.collective_rpc("add_lora")
    answer(executor, (SUCCESS, 1), (SUCCESS, 2))
    assert executor.collective_rpc("list_loras") == [1, 2]


def test_of_two_failures_the_first_is_told(executor):
    answer(executor, (FAILURE, "first"), (FAILURE, "second"))
    with pytest.raises(RuntimeError, match="first"):
        executor.collective_rpc("profile")


def test_after_a_failure_the_others_are_not_waited_for_without_bound(executor):
    """They may be in a collective that the failed one does not join. Where nothing fails a call may take its time."""
    answer(executor, (FAILURE, "bad"), (SUCCESS, 2))
    with pytest.raises(RuntimeError, match="bad"):
        executor.collective_rpc("add_lora")
    answer(executor, (SUCCESS, 1), (SUCCESS, 2))
    executor.collective_rpc("add_lora")
    first, second = (worker.worker_response_mq.timeouts for worker in executor.workers)
    assert first == [None, None] and second[0] > 0 and second[1] is None


def test_an_answer_that_is_missing_after_a_failure_ends_the_executor(executor):
    """The next call would take it for its own. The first error is what the caller gets."""
    executor.workers[0].worker_response_mq.put((FAILURE, "bad"))
    executor.workers[1].worker_response_mq.late = True
    with pytest.raises(RuntimeError, match="bad"):
        executor.collective_rpc("add_lora")
    with pytest.raises(RuntimeError, match="failed"):
        executor.collective_rpc("list_loras")


class TimedAnswers:
    """A worker whose one answer comes at a time of the given clock, or never."""

    def __init__(self, clock, status=SUCCESS, at_s=None):
        self.clock, self.status, self.at_s = clock, status, at_s

    def dequeue(self, timeout=None, cancel=None):
        limit_s = BOUND_S if timeout is None else self.clock.now_s + timeout
        if self.at_s is None or self.at_s > limit_s:
            assert timeout is not None, "it is waited for without a limit"
            self.clock.now_s = max(self.clock.now_s, limit_s)
            raise TimeoutError
        self.clock.now_s = max(self.clock.now_s, self.at_s)
        return self.status, f"at {self.at_s}"


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(multiproc_executor, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def call(executor, clock):
    """Call workers that answer as given, which may end the executor. Returns when the call has ended."""

    def run(*workers, timeout=None, error):
        present = executor.workers
        executor.workers = [SimpleNamespace(worker_response_mq=TimedAnswers(clock, *worker)) for worker in workers]
        with pytest.raises(error):
            executor.collective_rpc("add_lora", timeout=timeout)
        executor.workers = present
        return clock.now_s

    return run


def test_the_ten_seconds_begin_with_the_first_failure(executor, call):
    """However many workers fail after it, and one is silent."""
    ended_s = call((FAILURE, 0.1), (FAILURE, 7.1), (FAILURE, 14.1), (SUCCESS, None), error=RuntimeError)
    assert ended_s == pytest.approx(10.1) and executor.is_failed


def test_all_that_answer_within_the_ten_seconds_leave_the_executor_whole(executor, call):
    assert call((SUCCESS, 3.0), (FAILURE, 3.5), (FAILURE, 13.0), (SUCCESS, 13.4), error=RuntimeError) == 13.4
    assert not executor.is_failed


def test_a_failure_never_lengthens_the_callers_limit(executor, call):
    ended_s = call((FAILURE, 0.1), (SUCCESS, 7.1), (SUCCESS, 0.2), (SUCCESS, None), timeout=1.0, error=RuntimeError)
    assert ended_s == pytest.approx(1.0) and executor.is_failed


def test_a_failure_shortens_a_longer_limit_of_the_caller(executor, call):
    assert call((FAILURE, 1.0), (SUCCESS, None), timeout=60.0, error=RuntimeError) == pytest.approx(11.0)
    assert executor.is_failed


def test_a_call_that_times_out_ends_the_executor(executor, call):
    """The answer may still come, and the next call would take it for its own."""
    assert call((SUCCESS, 0.5), (SUCCESS, None), (SUCCESS, 2.0), timeout=1.0, error=TimeoutError) == pytest.approx(1.0)
    with pytest.raises(RuntimeError, match="failed"):
        executor.collective_rpc("list_loras")


def test_no_wait_is_negative(executor, call, clock):
    """A negative wait of a ZeroMQ socket, by which long answers come, has no end."""
    seen = []
    wait = TimedAnswers.dequeue

    def dequeue(self, timeout=None, cancel=None):
        seen.append(timeout)
        clock.now_s += 0.75  # the call itself takes some time
        return wait(self, timeout, cancel)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TimedAnswers, "dequeue", dequeue)
        call((SUCCESS, 0.1), (SUCCESS, 0.1), (SUCCESS, 0.1), (FAILURE, 0.1), timeout=1.0, error=RuntimeError)
    assert len(seen) == 4 and min(seen) == 0


def test_a_call_beside_forward_passes_of_a_pipeline_takes_its_own_answers(executor):
    """The pass was asked for before, so its answer comes first, however late the thread is that waits for it."""
    gate = threading.Event()
    with ThreadPoolExecutor(1) as executor.io_thread_pool, ThreadPoolExecutor(1) as front_end:
        executor.io_thread_pool.submit(gate.wait, BOUND_S)
        answer(executor, (SUCCESS, "adapters"), (SUCCESS, "tokens"))
        executor.workers[1].worker_response_mq.put((SUCCESS, "adapters"))
        [forward] = executor.collective_rpc("execute_model", non_block=True, unique_reply_rank=1)
        called = front_end.submit(executor.collective_rpc, "list_loras")
        with pytest.raises(TimeoutError):
            called.result(0.5)
        gate.set()
        assert forward.result(BOUND_S) == "tokens" and called.result(BOUND_S) == ["adapters", "adapters"]
