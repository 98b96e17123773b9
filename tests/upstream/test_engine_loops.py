# SPDX-License-Identifier: Apache-2.0
"""The answers that an engine's loop gets on whether steps follow, and what becomes of jobs if none do. The real binding
and scheduler, as in `test_mutual_waits`."""
import asyncio

import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE
from tests.upstream.test_mutual_waits import AsyncEngine, Node, Ring, arrived, job, parked, tokens
from vllm_pd.handover.jobs import JobStage


@pytest.fixture
def node(monkeypatch) -> Node:
    """An engine of both roles. Its writes never end."""
    ring = Ring(monkeypatch)
    node, peer = ring.add_engine(0.9, blocks=20), ring.add_engine(0.9)
    monkeypatch.setattr(ring, "find", lambda name: peer)
    monkeypatch.setattr(ring, "write", lambda source, write: None)
    return node


def test_b32_no_step_follows_while_all_that_is_left_waits_for_a_peer(node):
    """B32: other ranks would wait for it, a core each, and answer no call."""
    [attempt] = parked(node, "remote")
    assert not node.disagg.expects_steps()
    node.ask("short", tokens(0, 2), max_tokens=2)
    assert node.step() == ["short"] and node.disagg.expects_steps()
    assert node.step() == ["short"] and not node.disagg.expects_steps()
    arrived(node, attempt)
    assert node.step() == ["remote"] and node.disagg.expects_steps()


def test_b32_no_step_follows_while_those_that_wait_find_no_room_beside_it(node):
    parked(node, *(f"remote{number}" for number in range(3)))
    node.ask("large", tokens(0, 15 * BLOCK_SIZE))
    assert node.step() == node.step() == [] and node.scheduler[0].waiting
    assert not node.disagg.expects_steps() and not node.disagg.has_work()


def test_b32_a_step_follows_for_a_write_and_none_while_it_lasts(node):
    node.events.append(job(1, 2))
    assert node.step() and node.disagg.expects_steps(), "the write goes with the next step"
    assert node.step() == [] and node.scheduler[0].prefill_sending
    assert not node.disagg.expects_steps() and not node.disagg.has_work()


def test_b30_an_engine_that_is_not_stepped_yet_takes_no_jobs(node):
    """B30: an idle `LLM`, or an AsyncLLMEngine before its first request."""
    assert node.room == 0
    node.step()
    assert node.room > 0


def test_b30_the_jobs_that_generate_leaves_behind_are_given_back(node):
    """B30: those that wait for room, and one that is computed and not sent. One that is on its way ends by itself."""
    jobs = node.disagg.prefill_jobs
    node.disagg.in_loop = False
    sending = job(1, 2)
    node.events.append(sending)
    node.ask("own", tokens(0, 3), max_tokens=2)
    assert len(node.step()) == 2
    node.events += [job(2, 3), job(3, 19)]
    assert node.step() == [f"pd-{job(2, 3).attempt}"]
    assert jobs.unsent and jobs.computing and node.disagg.has_client_requests() and not node.failures
    node.sim.abort("own")
    assert not node.disagg.has_client_requests()
    assert node.failures == 2 and jobs.find(sending.attempt) is JobStage.SENDING and node.room == 0
    assert node.step() == [] and node.room > 0, "until the next step"
    assert len(node.scheduler[0].prefill_sending) == 1 and not node.scheduler[0].waiting


def test_b30_an_engine_loop_goes_on_with_the_jobs_of_peers(node):
    node.events.append(job(1, 19))
    node.disagg.has_work()
    assert not node.disagg.has_client_requests()
    assert node.room > 0 and not node.failures and node.step()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_b21_an_engine_whose_async_loop_has_died_leaves_its_peers(node, cancelled):
    async def loop() -> None:
        await asyncio.sleep(60 if cancelled else 0)
        raise RuntimeError("a forward pass failed")

    closed: list[None] = []
    node.close = lambda: closed.append(None)
    engine = AsyncEngine()
    engine._background_loop_unshielded.cancel()
    task = engine._background_loop_unshielded = asyncio.get_running_loop().create_task(loop())
    node.disagg.serve(engine)
    if cancelled:
        task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert closed == [] if cancelled else closed and task.exception()
