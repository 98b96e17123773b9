# SPDX-License-Identifier: Apache-2.0
"""Each call to the workers of a V1 engine takes the answers to itself, all of them and no others."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
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
