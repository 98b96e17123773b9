# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench handover` subtracts what it says, and the client hears the tokens that were sent."""

import json
import random

import pytest
from typer.testing import CliRunner

from tests.fakes.http_engine import FakeEngine, _Handler
from vllm_pd.bench import handover
from vllm_pd.bench.connection import LoadError
from vllm_pd.bench.handover import HandoverBench, HandoverSample, measure, report
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.bench.report import quantile_grid, summary
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.scrape import parse


def bench(engine: FakeEngine, **changes) -> HandoverBench:
    return HandoverBench(**{"decode": engine.url, "prefill": (engine.url, ), "requests": 4, "prompt_tokens": 200,
                            "max_tokens": 4, "warm_up": 1, **changes})


def test_control_plane_is_what_parking_takes_beside_prefill_and_transfer():
    stages_s = {"queue": 0.001, "claim": 0.002, "prefill": 0.2, "transfer": 0.03, "first_step": 0.04}
    samples = [HandoverSample(0.3, stages_s, 0.236, 3e6, (0.04, 0.05, 0.06), 0.012),
               HandoverSample(0.31, stages_s | {"first_step": 0.05}, 0.236, 3e6, (0.05, ), 0.012)]
    found = report(HandoverBench("d", ("p", )), samples, {})
    assert found["control_plane_ms"]["max"] == pytest.approx(236 - 200 - 30)
    assert found["overhead_ms"]["min"] == pytest.approx(300 - 200 - 30 - 40)
    assert found["overhead_ms"]["max"] == pytest.approx(310 - 200 - 30 - 50), "less its own first step"
    assert found["outside_ms"]["p50"] == pytest.approx(30 - 6)
    assert found["decode_step_ms"]["p50"] == pytest.approx(50)
    assert found["front_end_ms"]["p50"] == pytest.approx(12)
    assert found["fencing_share_of_ttft"] == pytest.approx((2 / 300 + 2 / 310) / 2)
    assert found["transfer_gb_per_s"] == pytest.approx(0.1)
    assert found["samples_ms"][1]["control_plane"] == pytest.approx(6)


def test_percentiles_are_nearest_ranks():
    found = summary([number / 1000 for number in range(100, 0, -1)], "p50 p90 p99 min max mean", 1000)
    assert found == {"p50": 50, "p90": 90, "p99": 99, "min": 1, "max": 100, "mean": 50.5}
    assert summary([0.007], "p99", 1000) == {"p99": 7} and summary([], "p50 mean") == {}
    assert summary(range(1000), "p50 p99 max") == {"p50": 499, "p99": 989, "max": 999}
    assert quantile_grid([3, 1, 2], 2) == [1, 2, 3]


def test_remote_requests_are_measured():
    with FakeEngine() as engine:
        found = measure(bench(engine))
    assert (found["measured"], found["local"]) == (4, {})
    assert found["stages_ms"]["prefill"]["p50"] == pytest.approx(20)
    assert found["transfer_bytes"] == 4 * 200_000
    assert 25 <= found["front_end_ms"]["min"] < 500, "its TTFT less its prefill"
    assert found["transfer_gb_per_s"] == pytest.approx(200_000 / 0.005 / 1e9)
    assert 50 <= found["ttft_ms"]["min"] < 500
    assert found["decode_step_ms"]["max"] >= 10 and found["decode_step_ms"]["min"] < 100
    assert [sample["ttft"] - sample["overhead"] for sample in found["samples_ms"]] == pytest.approx([20 + 5 + 10] * 4)
    assert found["control_plane_ms"]["p50"] == pytest.approx(30 - 25)
    prompts = [tuple(body["prompt"]) for body in engine.bodies]
    assert len({prompt for prompt in prompts if len(prompt) == 200}) == 5
    assert sum(len(prompt) == 4 for prompt in prompts) == 5, "a short one after each"
    assert all(body["ignore_eos"] for body in engine.bodies)


def test_the_engines_may_come_from_a_state_file(tmp_path):
    with FakeEngine() as engine:
        engines = [{"role": role, "url": engine.url, "pid": 1} for role in ("decode", "prefill")]
        (tmp_path / "state.json").write_text(json.dumps({"engines": engines}))
        done = CliRunner().invoke(app, ["bench", "handover", "--state", str(tmp_path / "state.json"), "--requests", "1",
                                        "--warm-up", "0"])
    assert done.exit_code == 0 and json.loads(done.output)["settings"]["decode"] == engine.url


@pytest.mark.parametrize("options, key", [
    ([], "--decode"), (["--decode", "http://a"], "--prefill"), (["--decode", "http://a", "--state", "s"], "--decode"),
    (["--state", "nonesuch"], "--state")])
def test_b80_the_engines_must_be_named_once(options, key):
    caught = CliRunner().invoke(app, ["bench", "handover", *options]).exception
    assert isinstance(caught, ConfigError) and caught.key == key


def test_each_run_has_prompts_of_its_own_unless_a_seed_is_given():
    with FakeEngine() as engine:
        seeds = [measure(bench(engine, requests=1, warm_up=0, seed=seed))["settings"]["seed"]
                 for seed in (None, None, 3)]
    assert len(set(seeds)) == 3 and seeds[2] == 3
    prompts = [body["prompt"] for body in engine.bodies if len(body["prompt"]) == 200]
    draws = map(random.Random, seeds)
    assert prompts == [[draw.randint(10, 999) for _ in range(200)] for draw in draws], "the report has what was drawn"


@pytest.mark.parametrize("seed, words", [(None, "prefill engine$"), (3, r"same seed \(3\), leave out --seed$")])
def test_nothing_remote_is_an_error_with_the_reasons(seed, words):
    with FakeEngine(max_local=500) as engine, pytest.raises(PDError, match=f"2 x threshold.*below 200.*{words}"):
        measure(bench(engine, requests=2, seed=seed))


def test_what_was_measured_before_a_failure_is_kept(monkeypatch):
    """An engine that is gone ends the run; exit status 1."""
    real, asked = handover.ask, []

    def ask_twice(*arguments):
        asked.append(arguments)
        if len(asked) > 4:
            raise ConnectionRefusedError(111, "refused")
        return real(*arguments)

    monkeypatch.setattr(handover, "ask", ask_twice)
    with FakeEngine() as engine:
        done = CliRunner().invoke(app, ["bench", "handover", "--decode", engine.url, "--prefill", engine.url,
                                        "--requests", "4", "--warm-up", "1"])
        found = json.loads(done.output)
        assert done.exit_code == 1 and found["measured"] == 1
        assert found["failed"] == f"{engine.url}: [Errno 111] refused"
        with pytest.raises(PDError, match=f"{engine.url}: .*refused"):
            measure(bench(engine))


@pytest.mark.parametrize("changes, key", [({"requests": 0}, "--requests"), ({"max_tokens": 2}, "--max-tokens"),
                                          ({"prompt_tokens": 1}, "--prompt-tokens"), ({"warm_up": -1}, "--warm-up"),
                                          ({"prefill": ("http://127.0.0.1:1", )}, "--prefill")])
def test_b80_impossible_options(changes, key):
    with FakeEngine() as engine, pytest.raises(ConfigError) as caught:
        measure(bench(engine, **changes))
    assert caught.value.key == key


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_client_hears_every_token(chat, stream):
    prompt = [{"role": "user", "content": "?"}] if chat else [1, 2, 3]
    with FakeEngine() as engine:
        answer = ask(engine.url, "fake", GenerationRequest(prompt, 4, chat=chat, stream=stream))
        other = ask(engine.url, "fake", GenerationRequest(prompt, 4, chat=chat, stream=stream))
        engine.token_ids = (11, 12, 13, 15)
        different = ask(engine.url, "fake", GenerationRequest(prompt, 4, chat=chat, stream=stream))
    assert answer.token_ids == (11, 12, 13, 14) and answer.text == "<11><12><13><14>"
    assert (answer.finish_reason, answer.usage) == ("length", (10 if chat else 3, 4))
    assert len(answer.arrivals_s) == (4 if stream else 1)
    assert answer.ttft_s >= 0.05 and all(gap > 0 for gap in answer.gaps_s)
    assert answer.same_as(other) and not answer.same_as(different)


@pytest.mark.parametrize("logprobs, said", [
    ({"tokens": ["token_id:1", " the"]}, "' the': the server ignores return_tokens_as_token_ids.*--compare text"),
    ({"tokens": ["7"]}, "'7': the server ignores"), (None, "no log-probabilities.*--compare text")])
def test_b80_a_server_without_token_ids_is_named(monkeypatch, logprobs, said):
    monkeypatch.setattr(_Handler, "_choice", lambda *_, **__: {"text": " the", "logprobs": logprobs})
    with FakeEngine(first_s=0.0, gap_s=0.0) as engine:
        for stream in (False, True):
            with pytest.raises(LoadError, match=said):
                ask(engine.url, "fake", GenerationRequest([1, 2, 3], 4, stream=stream))
        assert ask(engine.url, "fake", GenerationRequest([1, 2, 3], 4, token_ids=False)).text == " the"


def test_client_says_what_the_server_said():
    with FakeEngine() as engine, pytest.raises(LoadError, match="404.*no such model"):
        ask(engine.url, "wrong", GenerationRequest("x", 1))


def test_snapshots_sum_over_labels_and_subtract():
    page = 'a_total{x="1",y="1"} 2\na_total{x="1",y="2"} 3\na_total{x="2",y="1"} 5\nb 7\n'
    before, after = parse(page), parse(page.replace("} 3", "} 10").replace("b 7", "b 8"))
    assert before.value("a_total") == 10 and before.value("a_total", x="1") == 5 and before.value("c") == 0
    assert before.by("a_total", "x") == {("1", ): 5, ("2", ): 5}
    assert after.since(before).value("a_total", y="2") == 7
    assert after.since(before).by("a_total", "y") == {("1", ): 0, ("2", ): 7}
