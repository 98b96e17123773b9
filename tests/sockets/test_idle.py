# SPDX-License-Identifier: Apache-2.0
"""The bell that wakes a step loop (B33): rung from any thread, heard wherever the loop waits, never lost."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import zmq

from vllm_pd.v0.idle import Bell


@pytest.fixture
def bell():
    bell = Bell()
    yield bell
    bell.close()


def test_b33_a_ring_before_the_wait_is_not_lost(bell):
    bell.ring()
    began = time.monotonic()
    assert not bell.wait(100.0)  # no socket, so no input; but it returned at once
    assert time.monotonic() - began < 50.0


def test_b33_a_wait_without_a_ring_lasts_its_time(bell):
    began = time.monotonic()
    assert not bell.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_b33_one_ring_ends_one_wait(bell):
    for _ in range(1000):
        bell.ring()  # more than a pipe holds would block or fail if it were not for the bell
    assert not bell.wait(0.0)
    began = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_b33_rung_by_another_thread(bell):
    threading.Timer(0.05, bell.ring).start()
    began = time.monotonic()
    bell.wait(100.0)
    assert time.monotonic() - began < 50.0


def test_b33_rung_at_a_time(bell):
    """However long the wait; the last time counts, and a loop that is told of none sleeps on."""
    began = time.monotonic()
    bell.ring_at(began)
    bell.ring_at(began + 0.05)
    bell.wait(100.0)
    assert 0.04 < time.monotonic() - began < 50.0
    bell.ring_at(None)
    began = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - began > 0.04


def test_input_on_the_socket_ends_the_wait_and_is_told_apart(bell):
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        pull.bind("inproc://input")
        push.connect("inproc://input")
        bell.ring()
        assert not bell.wait(50.0, pull)
        push.send(b"request")
        assert bell.wait(50.0, pull)
        assert pull.recv() == b"request"
        assert not bell.wait(0.0, pull)
    finally:
        pull.close(0)
        push.close(0)
        context.term()


def test_a_closed_bell_may_be_rung_and_closed_again():
    bell = Bell()
    bell.close()
    bell.ring()
    bell.close()


class AsyncEngine:
    """What the bell knows of an AsyncLLMEngine."""

    def __init__(self) -> None:
        self._background_loop_unshielded = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        self._request_tracker = SimpleNamespace(new_requests_event=asyncio.Event())


@pytest.mark.parametrize("worth", [True, False])
async def test_b33_an_async_loop_is_woken_only_for_a_step_that_is_worth_it(bell, worth):
    engine = AsyncEngine()
    bell.serve(engine, lambda: worth)
    threading.Thread(target=bell.ring).start()
    event = engine._request_tracker.new_requests_event
    if worth:
        await asyncio.wait_for(event.wait(), 50)
    else:
        await asyncio.sleep(0.1)
        assert not event.is_set()
    engine._background_loop_unshielded.cancel()


async def test_b33_an_async_loop_is_woken_at_a_time(bell):
    engine = AsyncEngine()
    bell.serve(engine, lambda: True)
    event = engine._request_tracker.new_requests_event
    bell.ring_at(time.monotonic())
    bell.ring_at(None)
    await asyncio.sleep(0.1)
    assert not event.is_set(), "it was taken back"
    bell.ring_at(time.monotonic() + 0.05)
    await asyncio.wait_for(event.wait(), 50)
    engine._background_loop_unshielded.cancel()


async def test_an_engine_that_is_gone_is_not_kept_alive(bell):
    engine = AsyncEngine()
    engine._background_loop_unshielded.cancel()
    bell.serve(engine, lambda: True)
    del engine
    bell.ring()
    await asyncio.sleep(0)
