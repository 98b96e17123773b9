# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with other models and types than a Llama in float32. Tokens as one stock engine says them (B1, B2,
B101). `heavy`; windows in some layers run always in tests/v1_engines/test_real_windows.py.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0}
LENGTHS = (1, 31, 63, 64, 65, 200, 511, 513, 700, 1300)  # three of them are within a window of 64
LONG = 8  # of which so many are sent away
WINDOWS = {"hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}}
TINY = Path(__file__).parents[2] / "scripts" / "tiny_model.py"


@pytest.fixture(scope="module")
def latent(tmp_path_factory) -> dict[str, object]:
    """The arguments of an engine whose model has MLA. vLLM computes it on a CPU with AMX in bfloat16 only, and on one
    without it in blocks of 16, which it sets by itself, and a whole prompt in one step."""
    folder = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    subprocess.run([sys.executable, TINY, folder, "--tokenizer", os.environ["VLLM_PD_MODEL"], "--latent"], check=True,
                   timeout=300)
    return {"model": str(folder), "dtype": "bfloat16", "max_num_batched_tokens": 2048}


@pytest.fixture
def start(logs, request):
    """start(role, ranks, arguments): a ready engine, with a broker that all of a test share."""
    broker, engines = BrokerProcess(), []

    def begin(role: str | None, ranks: int, arguments: dict[str, object]) -> RealEngine:
        log = logs / f"{request.node.name}.{len(engines)}.log"
        engines.append(RealEngine(role, log, broker.url, SETTINGS, tensor_parallel_size=ranks, **arguments))
        return engines[-1].ready()

    yield begin
    for engine in engines:
        engine.stop()
    broker.stop()


@pytest.fixture
def check(start):
    """check(p_ranks, d_ranks, arguments of all engines): P and D answer as one stock engine with these arguments."""

    def compare(p_ranks: int, d_ranks: int, arguments: dict[str, object]) -> list[list[int]]:
        many = prompts(2026, LENGTHS)
        mono = start(None, 1, arguments)
        right = [mono.generate([one], tokens=12)[0] for one in many]  # in the same steps, so with the same rounding
        start("kv_producer", p_ranks, arguments)
        d = start("kv_consumer", d_ranks, arguments)
        wait_for(lambda: d.generate(prompts(1, (300, ))) and done(d), "nothing goes remote")
        before = done(d)
        assert [d.generate([one], tokens=12) for one in many] == [[tokens] for tokens in right]
        assert done(d) == before + LONG
        return right

    return compare


@pytest.mark.heavy
def test_b101_a_sliding_window_in_some_layers(check, mono):
    """All layers in one group. Prompts longer than the window, by whole blocks. Without the window the answers are
    others. In groups of their own: tests/v1_engines/test_real_windows.py."""
    right = check(1, 1, {**WINDOWS, "disable_hybrid_kv_cache_manager": True})
    others = mono.generate(prompts(2026, LENGTHS), tokens=12)
    assert others[0] == right[0] and sum(one != other for one, other in zip(others, right, strict=True)) >= 4


@pytest.mark.heavy
@pytest.mark.parametrize("p_ranks, d_ranks", [(1, 2), (2, 1)])
def test_b114_windows_over_ranks(check, p_ranks, d_ranks):
    """Each rank has its heads of both groups."""
    check(p_ranks, d_ranks, WINDOWS)


@pytest.mark.heavy
@pytest.mark.parametrize("p_ranks, d_ranks", [(1, 1), (1, 2), (2, 1)])
def test_b101_mla(check, latent, p_ranks, d_ranks):
    """One head, which every rank holds."""
    check(p_ranks, d_ranks, latent)


@pytest.mark.heavy
def test_b101_a_mixture_of_experts(check):
    check(1, 1, {"model": str(Path(os.environ["VLLM_PD_TINY_MODEL"]).with_name("tiny-mixtral"))})


@pytest.mark.heavy
def test_b101_bfloat16(check):
    check(1, 1, {"dtype": "bfloat16"})


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b101_fp8(start, dtype):
    """D computes the last token of a prompt in a step of its own. So does a stock engine whose steps have room for all
    but one: its answers are D's, bit for bit, where D's KV is its own. In other steps it rounds otherwise."""
    size = 700
    many = [prompts(2026, LENGTHS)[LENGTHS.index(size)], *(prompts(seed, (size, ))[0] for seed in range(20))]
    room = {"kv_cache_dtype": "fp8", "dtype": dtype, "max_num_batched_tokens": size - 1}
    mono = start(None, 1, room | {"enable_prefix_caching": False})
    right = [mono.generate([one], tokens=12)[0] for one in many]
    mono.stop()
    start("kv_producer", 1, room)
    d = start("kv_consumer", 1, room)
    wait_for(lambda: d.generate(prompts(1, (300, ))) and done(d), "nothing goes remote")
    before = done(d)
    assert [d.generate([one], tokens=12)[0] for one in many] == right
    assert done(d) == before + len(many)
