# SPDX-License-Identifier: Apache-2.0
"""V1: a transfer waits for the step that computes what it sends, and for no other."""
import pytest

from vllm_pd.transfer.requests import AddTransferPeer, CancelTransfer, Finished, Notice, Read, TransferProgress, Write
from vllm_pd.transfer.steps import STEP_S, ComputedSteps, StepOrderedTransfer


class Event:
    """An event of the device, done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Stream:
    """A device whose work ends in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waits = 0

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]

    def synchronize(self) -> None:
        self.waits += 1


class Worker:
    """A `TransferWorker` that only notes what it is to do."""

    def __init__(self) -> None:
        self.requests: list = []
        self.progress = TransferProgress([], [Notice("p/0", b"n")], [])
        self.moving = self.busy = self.closed = False
        self.youngest_s = 7.0

    def execute(self, requests: list) -> None:
        self.requests += requests

    def take_progress(self) -> TransferProgress:
        return self.progress

    def live_handles(self) -> int:
        return len(self.requests)

    def close(self) -> bool:
        self.closed = True
        return True


class Rank:
    def __init__(self) -> None:
        self.now = 100.0
        self.device, self.worker = Stream(), Worker()
        self.steps = ComputedSteps(self.device)
        self.transfer = StepOrderedTransfer(self.worker, self.steps, lambda: self.now)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def write(step: int, key: str = "k") -> Write:
    return Write(key, "d", [1], [2], [b"n"], step)


def test_a_step_is_reached_when_its_event_is_done_whatever_comes_after_it(rank):
    for step in (1, 2, 3):
        rank.steps.launched(step)
    assert not rank.steps.reached(1)
    rank.device.events[0].done = True
    assert rank.steps.reached(1) and not rank.steps.reached(2) and not rank.steps.reached(4)
    rank.device.events[2].done = True  # no stream does that
    assert not rank.steps.reached(3)
    rank.device.events[1].done = True
    assert rank.steps.reached(3) and rank.device.waits == 0


def test_steps_may_be_left_out_and_old_events_are_let_go(rank):
    for step in range(1, 10_000, 7):
        rank.steps.launched(step)
        rank.device.events[-1].done = True
    assert len(rank.steps._in_flight) <= 1
    assert rank.steps.reached(9_995) and not rank.steps.reached(9_999)


def test_an_unknown_step_is_all_that_the_device_was_told_to_do(rank):
    assert rank.steps.reached(0) and rank.device.waits == 1


@pytest.mark.parametrize("request_", [write(2), Read("k", "d", [1], [2], 2)], ids=["write", "read"])
def test_data_moves_when_its_step_is_done_and_not_before(rank, request_):
    rank.transfer.execute([request_])
    rank.steps.launched(1)
    rank.steps.launched(2)
    rank.device.events[0].done = True
    assert rank.transfer.take_progress().notices and rank.worker.requests == []
    assert rank.transfer.moving and rank.transfer.busy and rank.transfer.youngest_s == 0.0
    rank.device.events[1].done = True
    rank.transfer.take_progress()
    assert rank.worker.requests == [request_] and not rank.transfer.moving and not rank.transfer.busy
    assert rank.transfer.youngest_s == 7.0


def test_b95_nothing_is_sent_after_a_step_that_failed(rank):
    """What later steps compute from it is as wrong as it is."""
    rank.steps.launched(1)
    rank.device.events[0].done = True
    rank.steps.fail()
    rank.steps.launched(3)
    rank.device.events[-1].done = True
    rank.transfer.execute([write(1)])
    assert rank.worker.requests == [write(1)]
    rank.transfer.execute([write(2), write(0), write(3)])
    assert rank.worker.requests == [write(1)]


def test_requests_keep_their_order(rank):
    requests = [write(1), CancelTransfer("k"), AddTransferPeer("e", b"m"), write(0, "other")]
    rank.transfer.execute(requests)
    rank.transfer.take_progress()
    assert rank.worker.requests == []
    rank.steps.launched(1)
    rank.device.events[0].done = True
    rank.transfer.execute([])
    assert rank.worker.requests == requests


def test_b95_a_step_that_is_never_done_fails_its_transfers_only(rank):
    """B27: each ends once, and what stands behind them goes on."""
    rank.transfer.execute([write(7), write(8, "l"), CancelTransfer("k")])
    rank.now += STEP_S - 0.1
    assert rank.transfer.take_progress().finished == [] and rank.worker.requests == []
    rank.now += 0.2
    ends = rank.transfer.take_progress().finished
    assert [(end.key, end.ok) for end in ends] == [("k", False), ("l", False)] and "step 7" in ends[0].error
    assert rank.worker.requests == [CancelTransfer("k")]
    rank.worker.progress = TransferProgress([Finished("m", True)], [], [])
    assert [end.key for end in rank.transfer.take_progress().finished] == ["m"]


def test_b20_what_waits_is_never_posted_after_the_close(rank):
    rank.transfer.execute([write(1)])
    assert rank.transfer.close() and rank.worker.closed
    rank.steps.launched(1)
    rank.device.events[0].done = True
    rank.transfer.take_progress()
    assert rank.worker.requests == []


def test_b82_a_request_that_raises_does_not_hold_up_those_behind_it(rank):
    execute = rank.worker.execute

    def refuses_cancels(requests: list) -> None:
        if isinstance(requests[0], CancelTransfer):
            raise RuntimeError("planted")
        execute(requests)

    rank.worker.execute = refuses_cancels
    with pytest.raises(RuntimeError, match="planted"):
        rank.transfer.execute([CancelTransfer("k"), write(0)])
    rank.transfer.take_progress()
    assert rank.worker.requests == [write(0)] and not rank.transfer.moving
