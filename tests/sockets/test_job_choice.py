# SPDX-License-Identifier: Apache-2.0
"""Who gets a job, by agents over sockets and a broker in a process of its own."""
import collections
import time

import pytest

from tests.sockets.test_agent import WAIT_S, Settings, engine, take_events  # noqa: F401
from tests.sockets.test_cli import broker
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Prefill
from vllm_pd.rpc.ports import take_free

MAX_TOKENS = 2000
JOBS = 8


@pytest.fixture
def settings():
    """Those of engines at a broker that runs."""
    port = take_free("127.0.0.1")
    with broker(port) as process:
        assert "listening" in process.stdout.readline()
        yield Settings(f"tcp://127.0.0.1:{port}", max_prefill_tokens=MAX_TOKENS)


@pytest.fixture
def fleet(settings, engine):  # noqa: F811
    """(decode, two prefill engines) that know each other."""
    decode, *prefills = (engine(settings, role) for role in (m.Role.DECODE, m.Role.PREFILL, m.Role.PREFILL))
    for one in prefills:
        one.protocol.prefill.set_credits(JOBS, 0)
    decode.expect_view(lambda view: view.broker_up and view.prefill_peers == 2)
    return decode, prefills


def jobs_of(prefills, count, held):
    """Wait until the prefill engines have got so many jobs together; each reports what it holds."""
    deadline = time.monotonic() + WAIT_S
    while sum(map(len, held.values())) < count:
        assert time.monotonic() < deadline, held
        for number, one in enumerate(prefills):
            held[number] += [event for event in take_events(one) if isinstance(event, Prefill)]
            tokens = sum(len(job.token_ids) - 16 * job.cached_blocks for job in held[number])
            one.protocol.prefill.set_credits(JOBS - len(held[number]), tokens)
        time.sleep(0.005)
    return held


def prompt(beginning, own):
    return [1000 * beginning + number for number in range(640)] + [own] * 60


def test_b5_jobs_with_a_common_beginning_go_to_the_engine_that_got_it_first(fleet):
    decode, prefills = fleet
    held = collections.defaultdict(list)
    for count, beginning in enumerate((1, 2, 1, 2, 1), start=1):
        decode.submit(f"r{count}", prompt(beginning, count), cached_blocks=0)
        jobs_of(prefills, count, held)
    assert sorted(len(jobs) for jobs in held.values()) == [2, 3]
    assert all(len({job.token_ids[0] for job in jobs}) == 1 for jobs in held.values())


def test_jobs_wait_at_the_broker_while_the_engines_have_no_room_in_tokens(fleet):
    decode, prefills = fleet
    held = collections.defaultdict(list)
    for count in range(1, 9):
        decode.submit(f"r{count}", prompt(count, count), cached_blocks=0)
    jobs_of(prefills, 6, held)  # three of 700 tokens are the first that are more than 2,000
    time.sleep(0.3)
    jobs_of(prefills, 6, held)
    assert [len(held[number]) for number in range(2)] == [3, 3]
    done = held[0].pop(0)
    jobs_of(prefills, 6, held)
    assert [len(held[number]) for number in range(2)] == [3, 3] and done not in held[0]
