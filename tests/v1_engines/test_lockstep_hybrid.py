# SPDX-License-Identifier: Apache-2.0
"""Hybrid load balancing: the four ranks of one group are those of two decode servers, each of which balances its own
two; they count their steps (B1, B20, B70, B94). Forward passes compare their numbers with those of the group, as in
`test_lockstep.py`. By hand: `heavy`."""
import dataclasses
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from _lockstep.fleet import Ranks, plan_lockstep, rest

from tests.v1.test_serve import PD, SERVE_ARGS, START_S, prompt, request, status_of, wait_for
from tests.v1_engines.test_dp_groups import answer, several, some_leave
from vllm_pd.ops.launch.plan import HOST, EnginePlan, FleetPlan
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(2400)]
RANKS, HERE = Ranks(prefill=2, decode=4), 2


class Servers(NamedTuple):
    """The URLs of P and of both decode servers, and the folder in which all ranks count."""
    p: str
    d: tuple[str, str]
    folder: Path

    def check(self) -> None:
        """All of a group have made equally many passes, and make none any more. Nobody has a block."""
        found = rest(self.folder)
        assert found.is_equal, found
        for url in (self.p, *self.d):
            wait_for(lambda url=url: not any(
                value for family in ("parked_blocks", "sending_blocks", "quarantined_blocks", "held_blocks")
                for value in scrape(url).by(f"vllm:pd_{family}", "engine").values()), "blocks are left over")


def split(engine: EnginePlan, port: int, master_port: int) -> tuple[EnginePlan, EnginePlan]:
    """The two servers of the group that this one would have alone. `port`: that of the second."""
    def server(start: int, at: int) -> EnginePlan:
        command = list(engine.command)
        command[command.index("--port") + 1] = str(at)
        env = {**engine.env, "VLLM_SERVER_DEV_MODE": "1"}  # for the routes that pause and resume
        return dataclasses.replace(engine, name=f"{engine.name}-{start}", port=at, env=env, command=(
            *command, "--data-parallel-hybrid-lb", "--data-parallel-size-local", str(HERE),
            "--data-parallel-start-rank", str(start), "--data-parallel-address", HOST,
            "--data-parallel-rpc-port", str(master_port)))

    return server(0, engine.port), server(HERE, port)


def in_two(plan: FleetPlan, ports: int) -> FleetPlan:
    """The same fleet with the decode engine's ranks in two servers."""
    d, p = plan.engines
    return dataclasses.replace(plan, engines=(*split(d, ports, ports + 1), p))


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("hybrid")
    ports = take_free_run(HOST, 5)
    plan = in_two(plan_lockstep(folder, os.environ["VLLM_PD_TINY_MODEL"], ports, RANKS,
                                {**PD, "lease_s": 3.0, "heartbeat_s": 1.0, "step_sync": True},
                                [*SERVE_ARGS, "--api-server-count", "1"]), ports + 3)
    with Fleet(plan, timeout_s=START_S) as running:
        one, two, p = (engine.url for engine in running.plan.engines)
        wait_for(lambda: [[rank["degraded"] for rank in status_of(url)["ranks"]] for url in (one, two, p)]
                 == [[None, None]] * 3, "every rank has a peer", timeout_s=START_S)
        yield Servers(p, (one, two), folder)


def test_b1_b70_b94_b118_both_servers_answer_at_once_and_one_after_the_other(mono, servers):
    """Ranks of a server that has no request make the passes of the other's."""
    draw = random.Random(8)
    many = [prompt(100 + number, draw.randrange(20, 1000)) for number in range(24)]
    right = mono.generate(many)
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(several, servers.d, (many[:12], many[12:])))
    assert halves[0] + halves[1] == right
    servers.check()
    for number in range(6):
        assert answer(servers.d[number % 2], many[number]) == right[number]
    assert sum(scrape(servers.p).by("vllm:pd_jobs_total", "engine").values()) >= 10
    servers.check()


def test_b20_b70_clients_of_one_server_leave(mono, servers):
    """The other server's answers are right, and no rank waits for a pass of one that has nothing to do any more."""
    one, two = servers.d
    after = [prompt(400 + number, 300 + 90 * number) for number in range(4)]
    left = [prompt(300 + number, 1900 - number) for number in range(3)]
    assert some_leave(one, left, two, after) == mono.generate(after)
    servers.check()


def test_b70_both_servers_are_paused_and_resumed(mono, servers):
    """Each is asked for it. A resume is a call that all ranks make, so it ends when both have been; so does a pause,
    for no rank may step beside one that is paused."""
    tokens = prompt(500, 400)
    right = mono.generate([tokens])
    with ThreadPoolExecutor(2) as pool:
        for path in ("/pause?mode=wait", "/resume"):
            assert list(pool.map(lambda url, path=path: request(url, "POST", path)[0], servers.d)) == [200, 200]
    assert [answer(url, tokens) for url in servers.d] == right * 2
    servers.check()
