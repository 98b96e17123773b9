# SPDX-License-Identifier: Apache-2.0
"""B102: the router's order prefill-first before engines of ours, and before some that know nothing of us: those with
upstream's NIXL connectors.
"""
import asyncio
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

from _connectors.pair import BLOCK_SIZE, ENVIRONMENT, ConnectorName, EnginePair, EngineShape
from _connectors.questions import ANSWER_TOKENS, Question, answer_all, draw_prompts_between
from _connectors.serve import ServerFactory

from vllm_pd.bench.connection import LoadConnection
from vllm_pd.bench.load import GenerationRequest, generate
from vllm_pd.bench.servers import HOST, Server, Servers
from vllm_pd.ops.launch.plan import ROUTER
from vllm_pd.ops.scrape import scrape
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import take_free

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(600)]
SHAPE = {"pool_blocks": 256, "context": 1024}  # of which ours holds at most half for others
OUTCOMES = "vllm:pd_router_prefill_first_total"


def questions(servers: ServerFactory, shape: EngineShape) -> list[Question]:
    """Prompts, with the answers of one stock engine alone."""
    mono = servers.start("one engine", take_free(HOST), shape.arguments(), {})
    mono.await_ready()
    asked = asyncio.run(answer_all(mono.url, shape.model, draw_prompts_between("order", 20, 150, 450)))
    mono.kill()
    return [one for one in asked if one is not None]


async def all_answers(url: str, model: str, asked: list[Question]) -> list[tuple[int, ...]]:
    """Those of the router, asked for at once, every second as a stream."""
    async def one(number: int, question: Question) -> tuple[int, ...]:
        with await LoadConnection.open(url) as connection:
            request = GenerationRequest(question.prompt, ANSWER_TOKENS, ignore_eos=True, stream=number % 2 == 1)
            return (await generate(connection, model, request)).token_ids
    return await asyncio.gather(*(one(number, question) for number, question in enumerate(asked)))


def outcomes(router: Server) -> dict[str, float]:
    page = scrape(router.url)
    return {name: page.value(OUTCOMES, outcome=name) for name in ("prefilled", "no_prefill", "connect", "broken")}


@pytest.mark.parametrize("connector", [ConnectorName.OURS_FIRST, ConnectorName.PULL, ConnectorName.PUSH],
                         ids=lambda one: one.value)
def test_b102_any_engines_that_speak_the_form_work(connector, tmp_path):
    shape = EngineShape(os.environ["VLLM_PD_TINY_MODEL"], **SHAPE)
    with ServerFactory(ENVIRONMENT, tmp_path / "engines.log") as servers, Servers(lambda *_: None) as others:
        asked = questions(servers, shape)
        assert len(asked) >= 12
        pair = EnginePair(servers, connector, shape, "fail")
        pair.start()
        port = take_free(HOST)
        router = others.start("router", port, [
            *ROUTER, "--port", str(port), "--order", "prefill-first", "--worker", pair.d.url, "--prefill-worker",
            pair.p.url, "--policy", "least-load", "--probe-timeout-s", "120"])  # a busy machine is no fault here
        others.await_ready(router, lambda one: one.is_healthy() and scrape(one.url).value(
            "vllm:pd_router_worker_up", worker=pair.p.url) == 1)
        with_p, without_p = asked[:8], asked[8:12]
        for some in (with_p[:4], with_p[4:]):  # ours lets half of the 8 seats wait for KV
            assert asyncio.run(all_answers(router.url, shape.model, some)) == [one.expected for one in some]
        assert outcomes(router)["prefilled"] == 8
        loaded = pair.loaded_tokens()
        assert loaded >= sum(len(one.prompt) - BLOCK_SIZE for one in with_p), "D has read all of P's blocks"
        pair.kill(Role.PREFILL)
        assert asyncio.run(all_answers(router.url, shape.model, without_p)) == [one.expected for one in without_p]
        assert outcomes(router)["prefilled"] == 8 and pair.loaded_tokens() == loaded, "D has computed them"
        assert pair.left() == {}
