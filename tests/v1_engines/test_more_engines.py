# SPDX-License-Identifier: Apache-2.0
"""More real V1 engines: many prompts, ranks, several peers, other sampling. Tokens as one stock engine says them (B1,
B2, B6, B7, B40, B44, B98). By hand: `heavy`.
"""
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import done, prompts, remote
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1500)]
SETTINGS = {"attempt_deadline_s": 200.0, "lease_s": 10.0, "heartbeat_s": 2.0, "ttl_s": 20.0}
BLOCK = 32
LONGEST = 1900


@pytest.fixture
def fleet(logs, request):
    """Starts engines with a broker of their own: fleet([tensor-parallel size of each P], [of each D])."""
    broker, engines = BrokerProcess(), []

    def start(prefill: list[int], decode: list[int]) -> list[RealEngine]:
        sizes = [("kv_producer", size) for size in prefill] + [("kv_consumer", size) for size in decode]
        for number, (role, size) in enumerate(sizes):
            log = logs / f"{request.node.name}.{number}.log"
            engines.append(RealEngine(role, log, broker.url, SETTINGS, tensor_parallel_size=size).ready())
        for d in engines[len(prefill):]:
            wait_for(lambda d=d: d.generate(prompts(random.randrange(10**6), (300, ))) and done(d),
                     "nothing goes remote")
        return engines

    yield start
    for engine in engines:
        engine.stop()
    broker.stop()


def many_lengths(count: int) -> list[int]:
    edges = [1, 2, LONGEST, *(blocks * BLOCK + off for blocks in (1, 2, 3, 8) for off in (-1, 0, 1))]
    draw = random.Random(2026)
    return edges + [draw.choice((draw.randrange(1, 100), draw.randrange(100, 700), draw.randrange(700, LONGEST)))
                    for _ in range(count - len(edges))]


def test_b1_b2_two_hundred_prompts_of_many_lengths(mono, fleet):
    _, d = fleet([1], [1])
    many, before = prompts(100, many_lengths(200)), done(d)
    long = sum(len(one) > 40 for one in many)
    for first in range(0, 200, 4):  # as many as may be parked at a time: half of the engine's seats
        batch = many[first:first + 4]
        assert d.generate(batch) == mono.generate(batch), [len(one) for one in batch]
    wait_for(lambda: done(d) >= before + 0.8 * long, f"few of the {long} long prompts were prefilled remotely")


@pytest.mark.parametrize("p_ranks, d_ranks", [(2, 2), (1, 2), (2, 1), (2, 4), (4, 2)])
def test_b44_ranks_equal_and_unequal(mono, fleet, p_ranks, d_ranks):
    _, d = fleet([p_ranks], [d_ranks])
    many, before = prompts(200 + 10 * p_ranks + d_ranks, (1, 63, 64, 65, 200, 511, 700, 1300)), done(d)
    assert d.generate(many) == mono.generate(many)
    wait_for(lambda: done(d) >= before + 5, "few of the seven long prompts were prefilled remotely")


def jobs_of(p: RealEngine) -> float:
    p.generate(prompts(302, (5, )))  # its front end takes figures while it serves
    return p.figures().get("vllm:pd_jobs_total:", 0)


def test_b40_two_prefill_and_two_decode_engines(mono, fleet):
    *ps, one, two = fleet([1, 1], [1, 1])
    many, more = (prompts(seed, [random.Random(seed).randrange(50, 700) for _ in range(24)]) for seed in (300, 301))
    right, before = (mono.generate(many), mono.generate(more)), (done(one), done(two))
    jobs = [jobs_of(p) for p in ps]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda pair: pair[0].generate(pair[1]), ((one, many), (two, more))))
    assert tuple(answers) == right
    assert done(one) > before[0] and done(two) > before[1]
    assert all(jobs_of(p) > its for p, its in zip(ps, jobs, strict=True))


def test_b6_b7_b98_sampling_is_the_decode_engines(mono, fleet):
    _, d = fleet([1], [1])
    kinds = [{"temperature": 0.8, "seed": 5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5},
             {"repetition_penalty": 1.3}, {"logit_bias": {1000: 50.0}}, {"allowed_token_ids": [11, 12, 13]},
             {"min_tokens": 4, "stop_token_ids": [2], "ignore_eos": False},
             {"top_k": 1, "temperature": 1.0},  # top_p with a seed ends a stock engine of 0.32 on the CPU
             {"structured_outputs": StructuredOutputsParams(regex="[ab]{40}")}]
    many, before = prompts(400, [150] * len(kinds)), remote(d)
    for half in (slice(4), slice(4, 8)):
        assert d.generate(many[half], params=kinds[half]) == mono.generate(many[half], params=kinds[half])
    assert remote(d) >= before + len(kinds) - 1
    stay = remote(d, "local:feature")
    for kind in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0, "logprobs": 2}):
        one = prompts(401, (150, ))
        assert d.generate(one, params=[kind]) == mono.generate(one, params=[kind])
    assert remote(d, "local:feature") == stay + 2
