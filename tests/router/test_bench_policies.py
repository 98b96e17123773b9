# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench policies`: conversations share what they should, and the figures are those of the engines."""

import asyncio
import dataclasses
import json

import pytest
from typer.testing import CliRunner

from vllm_pd.bench import policies
from vllm_pd.bench.conversations import ConversationTurn, hold, make
from vllm_pd.bench.dummy import DummyConnection, DummyEngine, answer_text
from vllm_pd.bench.options import ConversationShape
from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.router.policy import Policy

CHATS = ConversationShape(conversations=6, conversations_per_s=200, system_prompts=2, system_words=20, turns=3,
                          pause_s=0.01)


def test_equal_seeds_give_equal_conversations():
    assert make(CHATS) == make(CHATS) != make(dataclasses.replace(CHATS, seed=1))


def test_conversations_share_their_system_prompts_and_nothing_else():
    found = make(CHATS)
    systems = [each.system for each in found]
    questions = [question for each in found for question in each.questions]
    assert 1 < len(set(systems)) <= CHATS.system_prompts < len(systems)
    assert len(set(questions)) == len(questions) == CHATS.conversations * CHATS.turns
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)


async def test_each_prompt_is_all_that_was_said():
    bodies = []

    class Heard(DummyConnection):

        def on_message_complete(self) -> None:
            bodies.append(b"".join(self._body))
            super().on_message_complete()

    server = await asyncio.get_running_loop().create_server(lambda: Heard(DummyEngine()), "127.0.0.1", 0)
    async with server:
        turns = await hold(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "dummy", CHATS, make(CHATS))
    assert len(turns) == len(bodies) == CHATS.conversations * CHATS.turns
    for conversation in make(CHATS):
        own = sorted((turn for turn in turns if turn.conversation == conversation.number), key=lambda turn: turn.turn)
        assert [turn.turn for turn in own] == [0, 1, 2]
        answer = ("assistant", answer_text(CHATS.answer_tokens))
        for number, turn in enumerate(own):
            said = [("system", conversation.system)]
            for question in conversation.questions[:number + 1]:
                said += [("user", question), answer]
            assert list(turn.messages) == said
            assert 0 < turn.ttft_s <= turn.total_s and turn.answer_tokens == CHATS.answer_tokens


async def test_an_answer_without_usage_is_an_error(monkeypatch):
    monkeypatch.setattr("vllm_pd.bench.dummy.DummyAnswer._usage", lambda self: None)
    server = await asyncio.get_running_loop().create_server(lambda: DummyConnection(DummyEngine()), "127.0.0.1", 0)
    async with server:
        with pytest.raises(PDError, match="without usage"):
            await hold(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "dummy", CHATS, make(CHATS))


async def test_a_router_that_is_gone_is_an_error():
    with pytest.raises(PDError, match="can't go on.*127.0.0.1"):
        await hold("http://127.0.0.1:1", "dummy", CHATS, make(CHATS))


def test_what_was_measured_before_a_failure_is_kept(tmp_path, monkeypatch):
    """The second turn finds an engine gone."""
    taken: list[Policy] = []

    def take_turn(bench, policy, *_):
        taken.append(policy)
        if len(taken) == 2:
            raise ConnectionRefusedError(111, "refused")
        return [turn(0, 8)], 2, []

    monkeypatch.setattr(policies, "require_healthy", lambda *_: None)
    monkeypatch.setattr(policies, "served_model", lambda url: "m")
    monkeypatch.setattr(policies, "_pools", lambda urls: {"block_size": 4, "pool_blocks": 100})
    monkeypatch.setattr(policies, "_tokenizer", lambda name: lambda one: Arrival(0.0, 0, 0, tuple(range(8)), ()))
    monkeypatch.setattr(policies, "_take_turn", take_turn)
    bench = policies.PolicyBench(("http://a", "http://b"), "t", (Policy.KV, Policy.ROUND_ROBIN), rounds=2)
    found = policies.measure(bench, tmp_path / "log", lambda text: None)
    assert [run["policy"] for run in found["runs"]] == [taken[0], *taken[2:]] and len(taken) == 4
    assert found["failed"] == [f"{taken[1].value}, round 0: [Errno 111] refused"]
    monkeypatch.setattr(policies, "measure", lambda *_: found)
    options = ["bench", "policies", "--tokenizer", "t", "--worker", "http://a", "--worker", "http://b"]
    assert CliRunner().invoke(app, options).exit_code == 1
    found["failed"] = []
    assert CliRunner().invoke(app, options).exit_code == 0


def test_an_engine_that_is_gone_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(policies, "require_healthy", lambda *_: None)
    with pytest.raises(PDError, match="an engine does not answer.*127.0.0.1"):
        policies.measure(policies.PolicyBench(("http://127.0.0.1:1", ) * 2, "t"), tmp_path / "log")


def turn(number: int, prompt: int, answer: int = 1, worker: str = "a") -> ConversationTurn:
    return ConversationTurn(number, 0, float(number), 0.1 * (number + 1), 1.0, prompt, answer, worker, ())


def test_an_answer_fills_blocks_with_all_but_its_last_token():
    assert [policies.answer_blocks(turn(0, 6, answer), 4) for answer in (1, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]


def test_hits_are_the_blocks_that_were_not_computed(tmp_path):
    texts = {0: range(8), 1: range(8), 2: range(100, 108)}  # the second prompt is all in the first

    def run(policy: Policy, computed: int, *turns: ConversationTurn) -> dict:
        return policies._run(policy, 0, turns, computed, {"block_size": 4, "pool_blocks": 100},
                             lambda one: Arrival(one.at_s, one.conversation, 0, tuple(texts[one.conversation]), ()))

    runs = [run(Policy.KV, 4 + 1, turn(0, 8, answer=5), turn(1, 8), turn(2, 8, worker="b")),
            run(Policy.ROUND_ROBIN, 5, turn(0, 8), turn(1, 8, worker="b"), turn(2, 8))]
    found = policies.by_policy(runs)
    assert runs[0]["workers"] == {"a": 2, "b": 1}
    assert found["kv"]["hit_rate"] == pytest.approx(8 / 24) and found["kv"]["bound"] == pytest.approx(8 / 24)
    assert found["round-robin"]["of_bound"] == pytest.approx(0.5)
    assert found["kv"]["ttft_ms"]["p50"] == pytest.approx(200)
    policies.picture({"policies": found, "runs": runs}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("changes, key", [
    ({"workers": ("http://127.0.0.1:1", )}, "--worker"), ({"rounds": 0}, "--rounds"),
    ({"chats": ConversationShape(conversations_per_s=0)}, "--conversations-per-s"),
    ({"chats": ConversationShape(system_prompts=0)}, "--system-prompts"),
    ({}, "--worker.*no healthy engine")])
def test_what_measures_nothing_is_refused(changes, key):
    with pytest.raises(ConfigError, match=key):
        policies.PolicyBench(**{"workers": ("http://127.0.0.1:1", ) * 2, "tokenizer": "t", **changes}).check()


def test_the_engines_may_come_from_a_state_file(tmp_path):
    engines = [{"role": role, "url": f"http://127.0.0.1:{port}"} for port, role in enumerate(("decode", "prefill"), 1)]
    (tmp_path / "state.json").write_text(json.dumps({"engines": engines}))
    caught = CliRunner().invoke(app, ["bench", "policies", "--tokenizer", "t", "--state", str(tmp_path / "state.json")])
    assert isinstance(caught.exception, ConfigError) and "--worker=1" in str(caught.exception), "one decode engine"
