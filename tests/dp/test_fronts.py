# SPDX-License-Identifier: Apache-2.0
"""Two front ends over the same two ranks, as with several API servers: neither knows what the other sends."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future

import psutil
import pytest
from dp_loads import BOUND_S, MAX_TOKENS, PROMPTS, at_rest, forwards

from vllm_pd.bench.dp.group import Group

LONGEST = 4096  # tokens of a request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def servers(moe, logs, start_group) -> Iterator[Group]:
    """Each with half of the experts. The group's very first request is the second front end's, to rank 1 (B72)."""
    with start_group(moe, 2, log=logs / "servers.log", enable_expert_parallel=True, front_ends=2,
                     disable_log_stats=False, max_model_len=LONGEST) as group:  # fmt: skip
        group.first = group.generate(PROMPTS[0], rank=1, max_tokens=MAX_TOKENS[0], front=1)
        group.first.exception(BOUND_S)
        yield group


def test_b71_requests_of_two_front_ends(servers, expected):
    """B71, B72: a rank that one front end wakes takes along the rank that only the other one has sent something to."""
    assert servers.first.result(BOUND_S)["tokens"] == expected[0]
    servers.start_probe()
    for number in range(1, 7):
        asked = servers.generate(PROMPTS[number], rank=number % 2, max_tokens=MAX_TOKENS[number], front=number // 2 % 2)
        assert asked.result(BOUND_S)["tokens"] == expected[number]
    asked = [servers.generate(prompt, rank=front, max_tokens=most, front=front)
             for number, (prompt, most) in enumerate(zip(PROMPTS[:30], MAX_TOKENS, strict=False))
             for front in [number % 2]]  # fmt: skip
    assert servers.tokens(asked) == expected[:30]
    probes = at_rest(servers)
    assert forwards(probes)[0] > 20 and not any(probe["collectives"] for probe in probes)


@pytest.mark.parametrize("kind", ["DELTA", "FINAL_ONLY"])
def test_b70_the_load_is_spread_and_then_all_is_still(servers, kind):
    """B70: 100 requests without a rank named: each rank gets its share of them, by the counts that the coordinator
    spreads; then no front end holds a request and no rank runs on. Upstream's own test of a group, over two fronts."""
    before = _finished(servers)
    asked = []
    for number in range(100):
        asked.append(servers.generate(PROMPTS[number % 10], max_tokens=10, front=number % 2, kind=kind))
        time.sleep(0.01)
    assert [len(tokens) for tokens in servers.tokens(asked)] == [10] * 100
    done = [now - then for now, then in zip(_finished(servers), before, strict=True)]
    assert sum(done) == 100 and min(done) > 100 // 3
    assert [servers.submit("chosen", front=front).result(BOUND_S) for front in (0, 1)] == [{}, {}]
    at_rest(servers)
    servers.start_probe()
    time.sleep(1)
    assert forwards(servers.take_probe()) == [0, 0]


def test_requests_are_balanced_by_their_counts(servers):
    """Without a rank named, requests go where fewer are: by what this front end has sent itself, between two words of
    the coordinator's, which here says nothing; and by the counts that the coordinator spreads."""
    _wait_for_counts(servers, [[0, 0], [0, 0]])
    before = _finished(servers)
    with _stopped(servers):
        servers.tokens([servers.generate(PROMPTS[7], max_tokens=20) for _ in range(8)])
    assert [now - then for now, then in zip(_finished(servers), before, strict=True)] == [4, 4]
    _wait_for_counts(servers, [[0, 4], [0, 0]], running=4)
    _wait_for_counts(servers, [[0, 0], [0, 0]])


def test_calls_of_two_front_ends_at_once(servers):
    """Each calls both ranks, with a collective in it, while requests run: the ranks make the calls in one order."""
    busy = [servers.generate(PROMPTS[4], rank=rank, max_tokens=60, front=rank) for rank in (0, 1)]
    for _ in range(4):
        called = [servers.submit("call", method="collective_rpc", args=["probe_collective"], ranks=[0, 1], front=front)
                  for front in (0, 1)]  # fmt: skip
        assert [each.result(BOUND_S) for each in called] == [[[2], [2]]] * 2
    assert [len(tokens) for tokens in servers.tokens(busy)] == [60, 60]


def test_a_request_is_aborted_by_its_own_front_end(servers):
    """The other one's go on."""
    most = LONGEST - len(PROMPTS[2])  # it takes the engines far longer than a front end may be late
    mine = servers.generate(PROMPTS[2], rank=0, max_tokens=most, abort_after=3, front=0)
    others = servers.generate(PROMPTS[3], rank=0, max_tokens=60, front=1)
    assert len(mine.result(BOUND_S)["tokens"]) < most and len(others.result(BOUND_S)["tokens"]) == 60
    servers.start_probe()
    assert forwards(at_rest(servers))[0] < 60


def _wait_for_counts(group: Group, wanted: list, running: int = 0) -> None:
    """Until the first front end has these [waiting, running] counts of the ranks. Meanwhile rank 0 has `running`
    requests, again and again: they may end before everyone has been told of them."""
    deadline = time.monotonic() + BOUND_S
    held: list[Future] = []
    while group.submit("counts").result(BOUND_S) != wanted:
        assert time.monotonic() < deadline, "the counts do not come"
        if all(each.done() for each in held):
            held = [group.generate(PROMPTS[8], rank=0, max_tokens=150) for _ in range(running)]
        time.sleep(0.02)
    group.tokens(held)


@contextlib.contextmanager
def _stopped(group: Group) -> Iterator[None]:
    """The coordinator's process stands still: the driver's only child that is no engine, besides helpers of Python's.
    """
    others = [child for child in psutil.Process(group.process.pid).children() if child.pid not in group.pids.values()]
    assert others
    for child in others:
        child.suspend()
    try:
        yield
    finally:
        for child in others:
            child.resume()


def _finished(group: Group) -> list[int]:
    """By rank, what all front ends together have seen the end of."""
    return [sum(ranks) for ranks in zip(*(group.submit("finished", front=front).result(BOUND_S) for front in (0, 1)),
                                        strict=True)]  # fmt: skip
