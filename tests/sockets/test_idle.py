# SPDX-License-Identifier: Apache-2.0
"""What wakes a step loop (B33): from any thread, wherever the loop waits, and never lost."""

import asyncio
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import zmq

from tests.slow_write import is_open_at_each_write
from vllm_pd.v0.idle import LoopWakeup


@pytest.fixture
def wakeup():
    wakeup = LoopWakeup()
    yield wakeup
    wakeup.close()


def test_b33_a_wake_up_before_the_wait_is_not_lost(wakeup):
    wakeup.wake()
    began = time.monotonic()
    assert not wakeup.wait(100.0)  # no socket, so no input; but it returned at once
    assert time.monotonic() - began < 50.0


def test_b33_a_wait_without_a_wake_up_lasts_its_time(wakeup):
    began = time.monotonic()
    assert not wakeup.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_b33_one_wake_up_ends_one_wait(wakeup):
    for _ in range(1000):
        wakeup.wake()  # more than fits into a pipe
    assert not wakeup.wait(0.0)
    began = time.monotonic()
    wakeup.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_b33_woken_by_another_thread(wakeup):
    threading.Timer(0.05, wakeup.wake).start()
    began = time.monotonic()
    wakeup.wait(100.0)
    assert time.monotonic() - began < 50.0


def test_b33_woken_at_a_time(wakeup):
    """However long the wait; the last time counts, and a loop that is told of none sleeps on."""
    began = time.monotonic()
    wakeup.wake_at(began)
    wakeup.wake_at(began + 0.05)
    wakeup.wait(100.0)
    assert 0.04 < time.monotonic() - began < 50.0
    wakeup.wake_at(None)
    began = time.monotonic()
    wakeup.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_input_on_the_socket_ends_the_wait_and_is_told_apart(wakeup):
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        pull.bind("inproc://input")
        push.connect("inproc://input")
        wakeup.wake()
        assert not wakeup.wait(50.0, pull)
        push.send(b"request")
        assert wakeup.wait(50.0, pull)
        assert pull.recv() == b"request"
        assert not wakeup.wait(0.0, pull)
    finally:
        pull.close(0)
        push.close(0)
        context.term()


def test_a_closed_bell_may_be_rung_and_closed_again():
    wakeup = LoopWakeup()
    wakeup.close()
    wakeup.wake()
    wakeup.close()


class AsyncEngine:
    """What the wakeup knows of an AsyncLLMEngine."""

    def __init__(self) -> None:
        self._background_loop_unshielded = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        self._request_tracker = SimpleNamespace(new_requests_event=asyncio.Event())


@pytest.mark.parametrize("worth", [True, False])
async def test_b33_an_async_loop_is_woken_only_for_a_step_that_is_worth_it(wakeup, worth):
    engine = AsyncEngine()
    wakeup.serve(engine, lambda: worth)
    threading.Thread(target=wakeup.wake).start()
    event = engine._request_tracker.new_requests_event
    if worth:
        await asyncio.wait_for(event.wait(), 50)
    else:
        await asyncio.sleep(0.1)
        assert not event.is_set()
    engine._background_loop_unshielded.cancel()


async def test_b33_an_async_loop_is_woken_at_a_time(wakeup):
    engine = AsyncEngine()
    wakeup.serve(engine, lambda: True)
    event = engine._request_tracker.new_requests_event
    wakeup.wake_at(time.monotonic())
    wakeup.wake_at(None)
    await asyncio.sleep(0.1)
    assert not event.is_set(), "it was taken back"
    wakeup.wake_at(time.monotonic() + 0.05)
    await asyncio.wait_for(event.wait(), 50)
    engine._background_loop_unshielded.cancel()


async def test_b33_an_engine_that_is_gone_is_not_kept_alive(wakeup):
    engine = AsyncEngine()
    engine._background_loop_unshielded.cancel()
    wakeup.serve(engine, lambda: True)
    wakeup.wake_at(time.monotonic() + 1000.0)
    wakeup.wake()
    await asyncio.sleep(0)  # what the wake-up has put into the loop has run
    gone = weakref.ref(engine)
    del engine
    assert gone() is None, gc.get_referrers(gone())
    wakeup.wake()  # nothing is left to be woken
    await asyncio.sleep(0)


def test_b33_a_wake_up_writes_to_no_descriptor_that_was_closed(monkeypatch, wakeup):
    assert is_open_at_each_write(monkeypatch, "write", wakeup.wake, wakeup.close)
    wakeup.wake()
