# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the side socket, turned by hand, before a reader that is slower than it."""

import functools
import time

import pytest
import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.journal import EventJournal
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import HeldBlock
from vllm_pd.rpc import sockets

BLOCKS = 20_000  # half a MB in messages of a few blocks: by the defaults of Linux a socket queues 200 kB
BOUNDS = sockets.Bounds(messages=2)
PATIENCE_S = 80.0


@pytest.fixture
def journal() -> EventJournal:
    made = EventJournal(4)
    made.apply(HeldBlock(number + 1, number or None, [number] * 4, None, None, number) for number in range(BLOCKS))
    made.take()
    return made


@pytest.fixture
def port(tmp_path, monkeypatch):
    """With room for less than a snapshot in its queues."""
    monkeypatch.setattr(sockets, "server", functools.partial(sockets.server, bounds=BOUNDS))
    monkeypatch.setattr(m, "PART_BLOCKS", 4)
    made = SidePort(f"ipc://{tmp_path}/side")
    yield made
    made.close()


@pytest.fixture
def reader(port):
    context = zmq.Context()
    made = sockets.client(context, port.address, only_connected=False, bounds=BOUNDS)
    made.send(m.encode(m.SnapshotRequest(1)))
    yield made
    made.close()
    context.term()


def fill(port: SidePort, journal: EventJournal, now: float) -> None:
    """Until there is room for nothing more."""
    deadline = time.monotonic() + PATIENCE_S
    while not port._answers:
        assert time.monotonic() < deadline
        port.turn(now, journal, "e", 1)
        time.sleep(0.01)
    sent, still = -1, 0
    while still < 20:  # looks in a row that found no room: what was sent goes into the kernel's queues a little later
        assert time.monotonic() < deadline
        port.turn(now, journal, "e", 1)
        before, sent = sent, sum(answer.sent_blocks for answer in port._answers.values())
        still = still + 1 if sent == before else 0
        time.sleep(0.01)
    assert port._answers, "the whole snapshot has gone: the queues are too long for this test"


def test_b61_a_slow_reader_gets_the_whole_snapshot(port, journal, reader):
    """B61: what there is no room for is kept, and not left out, nor begun again."""
    fill(port, journal, 0.0)
    received, deadline = 0, time.monotonic() + PATIENCE_S
    while received < BLOCKS:
        assert time.monotonic() < deadline, received
        port.turn(0.1, journal, "e", 1)
        frames = sockets.receive(reader)
        if frames is not None:
            part = m.decode(frames)
            assert part.first_block == received and part.total_blocks == BLOCKS
            received += sum(len(run.block_hashes) for run in part.runs)
    assert not port.counters["side_dropped"] and port.counters["snapshots"] == 1


def test_b60_a_reader_that_never_reads_costs_nothing_for_long(port, journal, reader):
    """Neither turns without a pause nor, after a while, the blocks of its snapshot, though it says that it is there."""
    fill(port, journal, 0.0)
    assert not port.turn(0.1, journal, "e", 1)
    port._subscribers = dict.fromkeys(port._subscribers, 1e9)
    port.turn(m.SUBSCRIPTION_S + 0.1, journal, "e", 1)
    assert not port._answers and port._subscribers and port.counters["side_dropped"] == 1
