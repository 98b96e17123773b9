# SPDX-License-Identifier: Apache-2.0
"""B43: `vllm-pd planner --flip` with three real engines that were started as kv_both, behind a router: their roles
follow the load, no request fails, and all tokens are those of one plain engine.
"""
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

from _connectors.pair import ENVIRONMENT, OURS, EngineShape
from _connectors.questions import VOCABULARY, answer_all
from _connectors.serve import ForkedServer, ServerFactory

from tests.waiting import becomes, wait_for
from vllm_pd.bench.connection import LoadConnection
from vllm_pd.bench.load import GenerationRequest, generate
from vllm_pd.bench.servers import HOST, Servers
from vllm_pd.broker.members import Access, list_members
from vllm_pd.ops.flips import CHANGES_ROLE
from vllm_pd.ops.launch.plan import BROKER, ROUTER, transfer_config
from vllm_pd.ops.orders import Operator, find_engine
from vllm_pd.ops.scrape import scrape
from vllm_pd.protocol.messages import Role, Status
from vllm_pd.rpc.ports import take_free

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]
FLIP = re.compile(r"^flip done: \w+ at \S+ from \w+ to (\w+): ", re.MULTILINE)
OPEN = ("decode_queued", "decode_granted", "decode_fenced", "prefill_jobs", "holds", "running", "waiting")
COMPARED, LEAST_COMPARED = 20, 5  # answers of each phase


@dataclass(frozen=True)
class Mix:
    """What so many clients ask for, each a new prompt after the last answer."""
    clients: int
    prompt_tokens: int
    answer_tokens: int


# Engines hand over what is longer than a block. An answer of one token is no work for a decode engine.
LONG_PROMPTS, LONG_ANSWERS = Mix(4, 300, 1), Mix(12, 16, 24)


@dataclass
class Clients:
    """Clients of one kind, and all that they have got."""
    url: str
    model: str
    mix: Mix
    answers: list[tuple[list[int], tuple[int, ...]]] = field(default_factory=list)

    async def until(self, holds: Callable[[], object], what: Callable[[], str]) -> None:
        """They ask until this holds; then each waits for its answer. Raises where a request fails."""
        over = asyncio.Event()
        clients = [asyncio.ensure_future(self._ask(random.Random(f"{self.mix} {number}"), over))
                   for number in range(self.mix.clients)]
        try:
            await becomes(lambda: holds() or any(one.done() for one in clients), what)
        finally:
            over.set()
            await asyncio.gather(*clients)

    async def _ask(self, draw: random.Random, over: asyncio.Event) -> None:
        while not over.is_set():
            prompt = draw.choices(VOCABULARY, k=self.mix.prompt_tokens)
            with await LoadConnection.open(self.url) as connection:
                answer = await generate(connection, self.model, GenerationRequest(
                    prompt, self.mix.answer_tokens, ignore_eos=True))
            self.answers.append((prompt, answer.token_ids))


class PlannerProcess:
    """The command, with a log that is read again and again."""

    def __init__(self, broker: str, log: Path) -> None:
        self.port, self._log = take_free(HOST), log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_pd.cli", "planner", "--broker", broker, "--flip", "--interval", "1",
                 "--cool-down-s", "2", "--itl-ms", "200", "--port", str(self.port)], stdout=output,
                stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"})

    def prefills(self) -> int:
        """How many engines prefill, by the changes that are over."""
        roles = FLIP.findall(str(self))
        return roles.count("kv_producer") - roles.count("kv_consumer")

    def lives(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def __str__(self) -> str:
        return self._log.read_text()


def test_b43_engines_change_their_role_as_the_load_shifts_and_no_request_fails(tmp_path):
    shape = EngineShape(os.environ["VLLM_PD_TINY_MODEL"], pool_blocks=256, context=512)
    with ServerFactory(ENVIRONMENT, tmp_path / "engines.log") as servers:
        mono = servers.start("one engine", take_free(HOST), shape.arguments(), {})
        with Servers(lambda *_: None) as others:
            broker, port = f"tcp://{HOST}:{take_free(HOST)}", take_free(HOST)
            others.start("broker", 0, [*BROKER, "--bind", broker])
            engines = [servers.start(f"engine {number}", take_free(HOST), [
                *shape.arguments(), "--kv-transfer-config", transfer_config(Role.BOTH, broker, OURS)], {})
                for number in range(3)]
            for one in engines:
                one.await_ready()
            # Two are known by the registry, and one by the command line, too.
            router = others.start("router", port, [
                *ROUTER, "--port", str(port), "--broker", broker, "--worker", engines[0].url, "--tokenizer", "none",
                "--policy", "least-load", "--probe-timeout-s", "120"])
            others.await_ready(router, lambda one: one.is_healthy() and all(scrape(one.url).value(
                "vllm:pd_router_worker_up", worker=each.url) == 1 for each in engines))
            phases = [Clients(router.url, shape.model, mix) for mix in (LONG_PROMPTS, LONG_ANSWERS)]
            planner = PlannerProcess(broker, tmp_path / "planner.log")
            try:
                asyncio.run(follow(planner, phases))
                phases.append(asyncio.run(ask_a_prefill_engine(broker, shape.model)))
                page = scrape(f"http://{HOST}:{planner.port}")
                assert page.value("vllm:pd_planner_flips_total", to="prefill", outcome="done") >= 2
                assert sum(page.value("vllm:pd_split_engines", role=role) for role in ("prefill", "decode")) == 3
                assert planner.lives() and "Traceback" not in str(planner), str(planner)
            finally:
                planner.kill()
            check_rest(broker, engines)
        for one in engines:
            one.kill()
        mono.await_ready()
        check_tokens(mono, shape, phases)


async def follow(planner: PlannerProcess, phases: list[Clients]) -> None:
    """A load of long prompts, for which all but one engine become prefill engines, and one of long answers."""
    prompts, answers = phases
    await prompts.until(lambda: planner.prefills() == 2, lambda: str(planner))
    await answers.until(lambda: planner.prefills() == 1, lambda: str(planner))


async def ask_a_prefill_engine(broker: str, model: str) -> Clients:
    """It answers clients too: those of gateways that know nothing of roles, and requests that come before the router's
    next look at the registry."""
    url = next(one.http for one in list_members(broker, 5.0, Access()).members if not one.role.decodes)
    client = Clients(url, model, Mix(2, 200, 8))
    await client.until(lambda: len(client.answers) >= 2 * LEAST_COMPARED, "it does not answer")
    return client


def check_rest(broker: str, engines: list[ForkedServer]) -> None:
    """Nothing is left open at any engine."""
    members = list_members(broker, 5.0, Access()).members
    assert sorted(one.http for one in members) == sorted(one.url for one in engines)
    assert sum(scrape(one.url).value("vllm:pd_jobs_total") for one in engines) > 0, "nothing was handed over"
    for member in members:
        with Operator(find_engine(member.incarnation, broker, Access()), Access()) as operator:
            def gauges(operator: Operator = operator) -> dict[str, int]:
                return operator.tell(Status(), 60.0).gauges
            wait_for(lambda gauges=gauges: not any(gauges()[name] for name in OPEN), gauges)
            assert gauges()[CHANGES_ROLE]


def check_tokens(mono: ForkedServer, shape: EngineShape, phases: list[Clients]) -> None:
    """A stock engine alone says the same to each prompt, as far as no rounding can change that."""
    for one in phases:
        asked = one.answers[::max(1, len(one.answers) // COMPARED)]
        right = asyncio.run(answer_all(mono.url, shape.model, [prompt for prompt, _ in asked],
                                       tokens=one.mix.answer_tokens))
        compared = [(found, question.expected) for (_, found), question in zip(asked, right, strict=True)
                    if question is not None]
        assert len(compared) >= LEAST_COMPARED, f"{len(compared)} of {len(asked)} of {one.mix}"
        assert all(found == expected for found, expected in compared)
