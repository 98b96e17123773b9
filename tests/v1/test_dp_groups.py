# SPDX-License-Identifier: Apache-2.0
"""Both servers have data-parallel ranks, two at P and two at D, each an engine of its own (B1, B21, B43). By hand:
`heavy`.
"""
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest

from tests.v1.test_serve import END_S, MODEL, PD, SERVE_ARGS, START_S, prompt, request, status_of, wait_for
from vllm_pd.admin.scrape import scrape
from vllm_pd.launch.plan import HOST, UpOptions, plan_fleet
from vllm_pd.launch.up import Fleet
from vllm_pd.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(2400)]
RANKS = ("0", "1")


class Groups(NamedTuple):
    """The URLs of both servers, and P's port."""
    p: str
    d: str
    p_port: int


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 1, port=take_free_run(HOST, 3),
                        pd={**PD, "lease_s": 3.0, "heartbeat_s": 1.0},
                        serve_args=[*SERVE_ARGS, "--data-parallel-size", "2"])
    with Fleet(plan_fleet(options, ()), timeout_s=START_S) as running:
        d, p = running.plan.engines
        wait_for(lambda: [rank["degraded"] for url in (d.url, p.url) for rank in status_of(url)["ranks"]] == [None] * 4,
                 "every rank has a peer", timeout_s=START_S)
        yield Groups(p.url, d.url, p.port)


def answer(url: str, tokens: list[int]) -> list[int]:
    status, _, body = request(url, "POST", "/v1/completions", {
        "model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True})
    assert status == 200, body
    return json.loads(body)["choices"][0]["token_ids"]


def by_rank(url: str, family: str, **labels: str) -> list[float]:
    return [scrape(url).value(family, engine=rank, **labels) or 0.0 for rank in RANKS]


def several(url: str, many: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: answer(url, one), many))


def nothing_is_left(url: str) -> bool:
    found = scrape(url)
    return not any(value for family in ("parked_blocks", "sending_blocks", "quarantined_blocks", "held_blocks")
                   for value in found.by(f"vllm:pd_{family}", "engine").values())


def test_b1_b43_each_rank_hands_over_to_each(mono, groups):
    """All four ranks take part, and every answer is that of one stock engine."""
    draw = random.Random(77)
    many = [prompt(100 + number, draw.randrange(110, 1200)) for number in range(40)]
    assert several(groups.d, many) == mono.generate(many)
    assert min(by_rank(groups.d, "vllm:pd_attempts_total", outcome="done")) >= 5
    jobs = by_rank(groups.p, "vllm:pd_jobs_total")
    assert min(jobs) >= 5 and sum(jobs) >= 36
    wait_for(lambda: nothing_is_left(groups.d) and nothing_is_left(groups.p), "blocks are left over")


def test_b21_all_ranks_of_p_are_killed(mono, groups):
    """Both Ds answer by themselves, and keep no block."""
    many = [prompt(200 + number, 1000 + number) for number in range(16)]
    right, before = mono.generate(many), sum(by_rank(groups.p, "vllm:pd_jobs_total"))
    server = next(one for one in psutil.Process().children(recursive=True)
                  if ["--port", str(groups.p_port)] in [one.cmdline()[at:at + 2] for at in range(len(one.cmdline()))])
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(several, groups.d, many)
        wait_for(lambda: sum(by_rank(groups.p, "vllm:pd_jobs_total")) >= before + 2, "P has no job", timeout_s=END_S)
        for process in [*server.children(recursive=True), server]:
            process.kill()
        assert answers.result(END_S) == right
    wait_for(lambda: nothing_is_left(groups.d), "blocks are left over")
    wait_for(lambda: by_rank(groups.d, "vllm:pd_degraded", reason="peer") == [1.0, 1.0], "both have no peer")
