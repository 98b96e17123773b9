# SPDX-License-Identifier: Apache-2.0
"""Both servers have data-parallel ranks, two at P and two at D, each an engine of its own (B1, B20, B21, B25, B43). By
hand: `heavy`.

Once with a dense model, whose ranks know nothing of each other. Twice with one that says that it has experts: then vLLM
runs the ranks of a server in lockstep, and each forward pass of one waits for one of the other, a dummy where that has
nothing to do: once by waves, and once with the step sync (B70). vLLM's CPU build has no kernel that sends tokens to
experts of other ranks, so the layers are those of the dense model all the same.
"""
import http.client
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
import pytest

from tests.v1.test_serve import END_S, MODEL, PD, SERVE_ARGS, START_S, prompt, request, status_of, wait_for
from vllm_pd.ops.launch.plan import HOST, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(2400)]
RANKS = ("0", "1")
BLOCKS = int(SERVE_ARGS[SERVE_ARGS.index("--num-gpu-blocks-override") + 1])
LOCKSTEP = ("--enable-expert-parallel", "--hf-overrides", json.dumps({"num_local_experts": 2}))


class Groups(NamedTuple):
    """The URLs of both servers, and P's port."""
    p: str
    d: str
    p_port: int
    in_lockstep: bool


@pytest.fixture(scope="module", params=["independent", "waves", "step_sync"])
def groups(request) -> Iterator[Groups]:
    in_lockstep = request.param != "independent"
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 1, 1, port=take_free_run(HOST, 3),
                        pd={**PD, "lease_s": 3.0, "heartbeat_s": 1.0, "step_sync": request.param == "step_sync"},
                        serve_args=[*SERVE_ARGS, "--data-parallel-size", "2", *(LOCKSTEP if in_lockstep else ())])
    with Fleet(plan_fleet(options, ()), timeout_s=START_S) as running:
        d, p = running.plan.engines
        wait_for(lambda: [rank["degraded"] for url in (d.url, p.url) for rank in status_of(url)["ranks"]] == [None] * 4,
                 "every rank has a peer", timeout_s=START_S)
        yield Groups(p.url, d.url, p.port, in_lockstep)


def answer(url: str, tokens: list[int], **headers: str) -> list[int]:
    status, _, body = request(url, "POST", "/v1/completions", {
        "model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}, **headers)
    assert status == 200, body
    return json.loads(body)["choices"][0]["token_ids"]


def by_rank(url: str, family: str, **labels: str) -> list[float]:
    return [scrape(url).value(family, engine=rank, **labels) or 0.0 for rank in RANKS]


def several(url: str, many: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda one: answer(url, one), many))


def nothing_is_left(url: str) -> bool:
    """Nobody has a block, as the engines' figures and their free blocks say."""
    found = scrape(url)
    return (not any(value for family in ("parked_blocks", "sending_blocks", "quarantined_blocks", "held_blocks")
                    for value in found.by(f"vllm:pd_{family}", "engine").values())
            and [rank["gauges"]["free_blocks"] for rank in status_of(url)["ranks"]] == [BLOCKS - 1] * 2)


def processes_of_p(groups: Groups) -> list[psutil.Process]:
    """All of its server, the first process last."""
    server = next(one for one in psutil.Process().children(recursive=True)
                  if ["--port", str(groups.p_port)] in [one.cmdline()[at:at + 2] for at in range(len(one.cmdline()))])
    return [*server.children(recursive=True), server]


def leave(url: str, tokens: list[int], asked: Callable[[], bool]) -> None:
    """Ask, and go away as soon as that holds."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=END_S)
    connection.request("POST", "/v1/completions", json.dumps({
        "model": MODEL, "prompt": tokens, "max_tokens": 8, "temperature": 0}), {"Content-Type": "application/json"})
    wait_for(asked, "nothing is asked for")
    connection.close()


def some_leave(url: str, left: list[list[int]], others: str, asked: list[list[int]]) -> list[list[int]]:
    """The answers of `others` to these prompts, while the clients that ask `url` the prompts of `left` go away."""
    with ThreadPoolExecutor(10) as pool:
        gone = [pool.submit(leave, url, one, lambda: any(
            rank["gauges"]["decode_granted"] for rank in status_of(url)["ranks"])) for one in left]
        answers = [pool.submit(answer, others, one) for one in asked]
        for one in gone:
            one.result(END_S)
        return [one.result(END_S) for one in answers]


def test_b1_b43_each_rank_hands_over_to_each(mono, groups):
    """All four ranks take part, and every answer is that of one stock engine."""
    draw = random.Random(77)
    many = [prompt(100 + number, draw.randrange(110, 1200)) for number in range(40)]
    assert several(groups.d, many) == mono.generate(many)
    assert min(by_rank(groups.d, "vllm:pd_attempts_total", outcome="done")) >= 5
    jobs = by_rank(groups.p, "vllm:pd_jobs_total")
    assert min(jobs) >= 5 and sum(jobs) >= 36
    wait_for(lambda: nothing_is_left(groups.d) and nothing_is_left(groups.p), "blocks are left over")


def test_b20_b25_clients_leave_while_their_prompts_are_prefilled(mono, groups):
    """Other answers are right, and all blocks are back."""
    for turn in range(3):
        before = sum(by_rank(groups.d, "vllm:pd_decisions_total", decision="remote"))
        after = [prompt(400 + 10 * turn + number, 700 + number) for number in range(6)]
        left = [prompt(300 + 10 * turn + number, 1900 - number) for number in range(4)]
        assert some_leave(groups.d, left, groups.d, after) == mono.generate(after)
        assert sum(by_rank(groups.d, "vllm:pd_decisions_total", decision="remote")) > before
        wait_for(lambda: nothing_is_left(groups.d) and nothing_is_left(groups.p), "blocks are left over")


def test_b22_b94_a_prompt_that_waits_for_a_p_that_stands_still_keeps_no_other_waiting(mono, groups):
    """At the other rank. What vLLM's front end does about requests that come soon after the first one is in
    `test_lockstep_groups`."""
    long, short = prompt(600, 900), [prompt(610 + number, 50) for number in range(4)]
    at = [{"X-data-parallel-rank": rank} for rank in RANKS]
    right = mono.generate([long]), mono.generate(short)
    wait_for(lambda: nothing_is_left(groups.d) and nothing_is_left(groups.p), "blocks are left over")
    with ThreadPoolExecutor(1) as pool:
        try:
            for process in processes_of_p(groups):
                process.suspend()
            asked = pool.submit(answer, groups.d, long, **at[0])
            wait_for(lambda: [rank["gauges"]["decode_queued"] + rank["gauges"]["decode_granted"]
                              for rank in status_of(groups.d)["ranks"]] == [1, 0], "it is not parked at rank 0")
            began = time.monotonic()
            assert [answer(groups.d, one, **at[1]) for one in short] == right[1]
            assert time.monotonic() - began < 60.0 and not asked.done(), "they have waited for it"
        finally:
            for process in processes_of_p(groups):
                process.resume()
        assert [asked.result(END_S)] == right[0]


def test_b94_one_prompt_takes_the_other_ranks_along(mono, groups):
    """While all are idle: the rank that computes it, and the one that asked, start a wave; afterwards all rest."""
    for number in range(6):
        one = prompt(500 + number, 900)
        before = sum(by_rank(groups.p, "vllm:pd_jobs_total"))
        assert several(groups.d, [one]) == mono.generate([one])
        wait_for(lambda before=before: sum(by_rank(groups.p, "vllm:pd_jobs_total")) == before + 1, "P has not done it")
    wait_for(lambda: nothing_is_left(groups.d) and nothing_is_left(groups.p), "blocks are left over")
    engines = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(one.cmdline())]
    assert len(engines) == 4

    def used(process: psutil.Process) -> float:
        return sum(process.cpu_times()[:2])

    time.sleep(2.0)
    before_s = [used(one) for one in engines]
    time.sleep(4.0)
    used_s = [used(one) - was for one, was in zip(engines, before_s, strict=True)]
    assert max(used_s) < 1.0, f"a group makes steps for nothing: {used_s}"


def test_b21_ranks_of_p_are_killed(mono, groups):
    """All of them, or one of a group in lockstep, without which the other one can't go on. Both Ds answer by
    themselves, and keep no block."""
    many = [prompt(200 + number, 1000 + number) for number in range(16)]
    right, before = mono.generate(many), sum(by_rank(groups.p, "vllm:pd_jobs_total"))
    victims = processes_of_p(groups)
    if groups.in_lockstep:
        victims = [one for one in victims if "EngineCore_DP1" in " ".join(one.cmdline())]
        assert victims
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(several, groups.d, many)
        wait_for(lambda: sum(by_rank(groups.p, "vllm:pd_jobs_total")) >= before + 2, "P has no job", timeout_s=END_S)
        for process in victims:
            process.kill()
        assert answers.result(END_S) == right
    wait_for(lambda: nothing_is_left(groups.d), "blocks are left over")
    wait_for(lambda: by_rank(groups.d, "vllm:pd_degraded", reason="peer") == [1.0, 1.0], "both have no peer")
