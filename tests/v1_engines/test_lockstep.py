# SPDX-License-Identifier: Apache-2.0
"""Real engines whose forward passes compare their numbers with those of their group (B1, B20, B21, B70, B94, B118): a
prefill engine of two data-parallel ranks and a decode engine of four, with the step sync. By hand: `heavy`.

A pass that meets none hangs, and one that meets another pass ends its engine. So right answers say that no rank made a
pass that another did not make.
"""
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from _lockstep.fleet import Ranks, plan_lockstep, rest

from tests.v1.test_serve import END_S, PD, SERVE_ARGS, START_S, prompt, status_of, wait_for
from tests.v1_engines.test_dp_groups import answer, several, some_leave
from vllm_pd.ops.launch.plan import HOST
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(2400)]
RANKS = Ranks(prefill=2, decode=4)


class Lockstep(NamedTuple):
    """The URLs of both servers, P's port, and the folder in which their ranks count."""
    p: str
    d: str
    p_port: int
    folder: Path

    def check(self) -> None:
        """All of a group have made equally many passes, and make none any more. Nobody has a block."""
        found = rest(self.folder)
        assert found.is_equal, found
        for url in (self.p, self.d):
            wait_for(lambda url=url: not any(
                value for family in ("parked_blocks", "sending_blocks", "quarantined_blocks", "held_blocks")
                for value in scrape(url).by(f"vllm:pd_{family}", "engine").values()), "blocks are left over")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Lockstep]:
    folder = tmp_path_factory.mktemp("lockstep")
    plan = plan_lockstep(folder, os.environ["VLLM_PD_TINY_MODEL"], take_free_run(HOST, 3), RANKS,
                         {**PD, "lease_s": 3.0, "heartbeat_s": 1.0, "step_sync": True},
                         [*SERVE_ARGS, "--api-server-count", "1"])
    with Fleet(plan, timeout_s=START_S) as running:
        d, p = running.plan.engines
        wait_for(lambda: [rank["degraded"] for url in (d.url, p.url) for rank in status_of(url)["ranks"]]
                 == [None] * sum(RANKS), "every rank has a peer", timeout_s=START_S)
        yield Lockstep(p.url, d.url, p.port, folder)


def jobs(fleet: Lockstep) -> float:
    return sum(scrape(fleet.p).by("vllm:pd_jobs_total", "engine").values())


def test_b1_b70_b94_b118_every_answer_is_right_and_every_pass_meets_those_of_its_group(mono, fleet):
    """At once and one after another, with shared beginnings, some prefilled here and some by peers."""
    draw = random.Random(5)
    begin = prompt(1, 320)
    many = [begin[:draw.randrange(0, 320, 32)] + prompt(100 + number, draw.randrange(20, 1000)) for number in range(40)]
    right, before = mono.generate(many), jobs(fleet)
    assert several(fleet.d, many) == right
    fleet.check()
    for number in range(0, 8):
        assert answer(fleet.d, many[number]) == right[number]
        time.sleep(draw.choice([0.0, 0.3]))
    assert jobs(fleet) >= before + 20
    fleet.check()


def test_b20_b70_b118_clients_leave_at_any_time(mono, fleet):
    """Other answers are right, and no rank waits for a pass of one that has nothing to do any more."""
    draw = random.Random(6)
    for turn in range(3):
        after = [prompt(400 + 10 * turn + number, draw.randrange(50, 800)) for number in range(4)]
        left = [prompt(300 + 10 * turn + number, 1900 - number) for number in range(4)]
        assert some_leave(fleet.d, left, fleet.d, after) == mono.generate(after)
        fleet.check()


def test_b21_b70_b118_a_rank_of_p_is_killed(mono, fleet):
    """The other one of its group ends, too. D's ranks answer by themselves, in lockstep."""
    many = [prompt(200 + number, 1000 + number) for number in range(12)]
    right, before = mono.generate(many), jobs(fleet)
    server = next(one for one in psutil.Process().children(recursive=True) if str(fleet.p_port) in one.cmdline())
    ranks = [one for one in server.children(recursive=True) if "EngineCore_DP" in " ".join(one.cmdline())]
    assert len(ranks) == RANKS.prefill
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(several, fleet.d, many)
        wait_for(lambda: jobs(fleet) >= before + 2, "P has no job", timeout_s=END_S)
        ranks[1].kill()
        assert answers.result(END_S) == right
    wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in ranks),
             "a rank goes on without its group", timeout_s=60)
    assert len({rank.passes for rank in rest(fleet.folder).decode}) == 1
