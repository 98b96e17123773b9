# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner --flip` before control agents without an engine: it is a process that gives real orders."""
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.brokers import serving
from tests.fakes.page_server import PageServer, Reply
from tests.sockets.test_planner import page
from tests.waiting import wait_for
from vllm_pd.broker.members import Access, list_members
from vllm_pd.ops import flip_orders
from vllm_pd.ops.flip_orders import FlipOrders
from vllm_pd.ops.flips import CHANGES_ROLE, Flip, roles_of
from vllm_pd.ops.orders import EngineAddress, Operator
from vllm_pd.ops.scrape import parse
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.ports import take_free
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
BOTH, PREFILL, DECODE = m.Role.BOTH, m.Role.PREFILL, m.Role.DECODE
WAIT_S = 60.0
PROGRAM = """
from vllm_pd import cli
from vllm_pd.decisions.splits import SplitChoice
from vllm_pd.ops import planner

class Two(planner.SplitPlanner):
    def receive(self, look, demand, prefills):
        return SplitChoice(2, "two are to prefill")

planner.SplitPlanner = Two
cli.main()
"""


class Fleet:
    """Control agents at one broker, each with a page of metrics."""

    def __init__(self, broker: str) -> None:
        self.broker, self.agents, self.pages = broker, [], contextlib.ExitStack()

    def add(self, born: m.Role, role: m.Role | None = None) -> ControlAgent:
        """One that was started as `born`, and acts as `role` now."""
        server = self.pages.enter_context(PageServer(lambda *_: Reply(b"vllm:num_requests_running 0.0\n")))
        agent = ControlAgent(PDConfig.parse(born.value, {"broker": self.broker, "ttl_s": WAIT_S}),
                             local_member(born, FINGERPRINT), b"", lambda: None)
        agent.start()
        self.agents.append(agent)
        agent.protocol.operators.set_http(server.url)
        if role is not None:
            assert agent.protocol.operators.set_role(role) == ""
        wait_for(lambda: any(one.http == server.url and one.role is (role or born) for one in self.members()))
        return agent

    def members(self) -> list[m.Member]:
        return list(list_members(self.broker, WAIT_S, Access()).members)

    def roles(self) -> list[m.Role]:
        """Sorted."""
        return sorted(one.role for one in self.members())

    def entry(self, agent: ControlAgent) -> m.Member:
        return next(one for one in self.members() if one.incarnation == agent.member.incarnation)

    def order(self, agent: ControlAgent, to: m.Role, seen: list[m.Member] | None = None) -> flip_orders.OrderResult:
        members = self.members() if seen is None else seen
        return asyncio.run(FlipOrders(self.broker, Access()).order(Flip(self.entry(agent), to), roles_of(members)))

    def close(self) -> None:
        for agent in self.agents:
            agent.close(WAIT_S)
            agent.end_lifeline()
        self.pages.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with serving(ttl_s=WAIT_S) as broker:
        fleet = Fleet(broker.address)
        try:
            yield fleet
        finally:
            fleet.close()


@contextlib.contextmanager
def planner(fleet: Fleet, *options: str) -> Iterator[tuple[Callable[[], str], int]]:
    """The command: what it has printed, and its port."""
    port, printed = take_free("127.0.0.1"), []
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "planner", "--broker", fleet.broker, "--port", str(port), "--interval", "0.5",
         "--cool-down-s", "1", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"})
    os.set_blocking(process.stdout.fileno(), False)

    def said() -> str:
        with contextlib.suppress(TypeError):  # nothing new
            printed.append(process.stdout.read() or "")
        return "".join(printed)

    try:
        yield said, port
        assert process.poll() is None and "Traceback" not in said(), said()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_engines_change_one_after_the_other_until_the_split_is_as_wanted(fleet):
    for _ in range(3):
        fleet.add(BOTH)
    with planner(fleet, "--flip") as (said, port):
        wait_for(lambda: said().count("flip done") == 2, said)
        wait_for(lambda: "split: 2 prefill, 1 decode of 3 engines; as now" in said(), said)
        found = parse(page(port))
        assert found.value("vllm:pd_planner_flips_total", to="prefill", outcome="done") == 2
        assert found.value("vllm:pd_split_engines", role="prefill") == 2
    assert fleet.roles() == sorted([PREFILL, PREFILL, BOTH])


def test_half_of_the_engines_change_at_a_time(fleet):
    for _ in range(4):
        fleet.add(BOTH)
    with planner(fleet, "--flip") as (said, _):
        wait_for(lambda: said().count("flip done") == 2, said)
        [line] = [line for line in said().splitlines() if "; flips " in line]
    assert line.count(" to kv_producer") == 2 and fleet.roles() == sorted([PREFILL, PREFILL, BOTH, BOTH])


def test_the_last_engine_of_all_may_decode(fleet):
    """No other prefill engine is left then, and clients come first."""
    agent = fleet.add(BOTH, PREFILL)
    assert fleet.order(agent, DECODE) == (True, "") and fleet.roles() == [DECODE]


def test_an_order_that_the_registry_does_not_show_is_no_success(fleet, monkeypatch):
    monkeypatch.setattr(flip_orders, "SHOWN_S", 0.0)
    fleet.add(DECODE)
    given, problem = fleet.order(fleet.add(BOTH), PREFILL)
    assert given and "does not show the new role yet" in problem


def test_a_dry_run_gives_no_order(fleet):
    for _ in range(3):
        fleet.add(BOTH)
    with planner(fleet) as (said, port):
        wait_for(lambda: "would flip" in said(), said)
        wait_for(lambda: parse(page(port)).value("vllm:pd_planner_looks_total", outcome="done") >= 8, said)
        assert said().count("would flip") == 1
    assert fleet.roles() == [BOTH] * 3


def test_an_engine_that_was_started_with_one_role_is_not_asked_to_change(fleet):
    fixed = fleet.add(DECODE)
    for role in (PREFILL, DECODE):
        fleet.add(BOTH, role)
    with planner(fleet, "--flip") as (said, _):
        wait_for(lambda: said().count("flip done") == 1, said)
    assert fleet.entry(fixed).role is DECODE and fleet.roles() == sorted([DECODE, PREFILL, PREFILL])


def test_an_order_is_carried_out_and_shown(fleet):
    fleet.add(DECODE)
    agent = fleet.add(BOTH)
    assert fleet.order(agent, PREFILL) == (True, "") and fleet.entry(agent).role is PREFILL


def test_no_order_is_given_where_the_registry_has_changed(fleet):
    fleet.add(DECODE)
    agent = fleet.add(BOTH)
    seen = fleet.members()
    fleet.add(BOTH)
    given, problem = fleet.order(agent, PREFILL, seen)
    assert not given and "changed since the reading" in problem and fleet.entry(agent).role is BOTH


def test_an_engine_that_refuses_is_reported(fleet):
    fleet.add(DECODE)
    agent = fleet.add(DECODE)
    given, problem = fleet.order(agent, PREFILL)
    assert given and "was started as kv_consumer" in problem and fleet.entry(agent).role is DECODE


def test_of_two_planners_that_order_at_once_one_takes_its_order_back(fleet, monkeypatch):
    """Both have looked into the registry before either gave its order, so none would decode any more."""
    fleet.add(PREFILL)
    one, other = fleet.add(BOTH, DECODE), fleet.add(BOTH, DECODE)
    seen = fleet.members()
    assert fleet.order(one, PREFILL, seen) == (True, "")
    late, listed = FlipOrders(fleet.broker, Access()), []
    real = late._list

    def list_late() -> tuple[m.Member, ...]:
        listed.append(1)
        return tuple(seen) if len(listed) == 1 else real()

    monkeypatch.setattr(late, "_list", list_late)
    before = next(member for member in seen if member.incarnation == other.member.incarnation)
    given, problem = asyncio.run(late.order(Flip(before, PREFILL), roles_of(seen)))
    assert given and "taken back: no other decode engine was left" in problem
    wait_for(lambda: fleet.roles() == sorted([PREFILL, PREFILL, DECODE]), fleet.roles)


def test_without_a_broker_there_is_no_order(fleet, monkeypatch):
    agent = fleet.add(BOTH)
    monkeypatch.setattr(flip_orders, "REGISTRY_S", 0.2)
    flip = Flip(fleet.entry(agent), PREFILL)
    given, problem = asyncio.run(FlipOrders("tcp://127.0.0.1:1", Access()).order(flip, {}))
    assert not given and problem and agent.protocol.state.role is BOTH


def test_statuses_come_in_the_background_and_those_without_an_answer_are_left_out(fleet, monkeypatch):
    agent = fleet.add(BOTH)
    monkeypatch.setattr(flip_orders, "ASK_S", 5.0)

    async def ask() -> dict[str, m.StatusReply]:
        orders = FlipOrders(fleet.broker, Access())
        dead = m.Member("d" * 32, DECODE, f"tcp://127.0.0.1:{take_free('127.0.0.1')}", FINGERPRINT)
        began_s = time.monotonic()
        assert orders.poll([fleet.entry(agent), dead]) == {}
        async with asyncio.timeout(WAIT_S):
            while not (found := orders.poll([])):
                await asyncio.sleep(0.01)
        assert time.monotonic() - began_s < WAIT_S
        return found

    found = asyncio.run(ask())
    assert found.keys() == {agent.member.incarnation}
    assert found[agent.member.incarnation].gauges[CHANGES_ROLE] == 1


@pytest.mark.parametrize("address", ["", "garbage", "tcp://", "tcp://127.0.0.1:99999", "tcp://no.host.invalid:1",
                                     "tcp://127.0.0.1:1\0x", "tcp://\u00e9:1"])
def test_b64_an_engine_with_a_bad_address_ends_no_planner(fleet, monkeypatch, address):
    monkeypatch.setattr(flip_orders, "ASK_S", 0.2)
    monkeypatch.setattr(flip_orders, "ORDER_S", 0.2)
    hostile = m.Member("e" * 32, BOTH, address, FINGERPRINT, http="http://127.0.0.1:1")
    orders = FlipOrders(fleet.broker, Access())
    assert orders._ask(hostile) is None
    monkeypatch.setattr(orders, "_list", lambda: (hostile, ))
    given, problem = asyncio.run(orders.order(Flip(hostile, PREFILL), roles_of([hostile])))
    assert given and problem


def test_the_status_says_whether_an_engine_can_change(fleet):
    for born, changes in ((BOTH, 1), (DECODE, 0), (PREFILL, 0)):
        agent = fleet.add(born)
        with Operator(EngineAddress(fleet.entry(agent).address, agent.member.incarnation), Access()) as operator:
            assert operator.tell(m.Status(), WAIT_S).gauges[CHANGES_ROLE] == changes
