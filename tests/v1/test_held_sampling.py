# SPDX-License-Identifier: Apache-2.0
"""B102, B7: a prefill engine samples nothing for a prompt that it only keeps. With a real engine on the CPU, whose
model runner ends at a seeded prompt that takes several steps.
"""
import types
from types import SimpleNamespace

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, SamplingType, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from tests.fakes.brokers import BrokerProcess
from tests.v1.real_engines import RealEngine
from tests.v1.test_real_engines import prompts
from vllm_pd.bench.prefill_first import REMOTE_DECODE
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.engine_access import _sparing
from vllm_pd.v1.held_sampling import spare_sampling

ASKS = {"kv_transfer_params": {**REMOTE_DECODE, "pd": "auto"}}
EVERYTHING = dict(
    n=1, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.5, temperature=0.7, top_p=0.5, top_k=5,
    min_p=0.1, seed=3, stop=["a"], stop_token_ids=[4, 5], min_tokens=1, logit_bias={4: 1.0}, allowed_token_ids=[4, 5],
    bad_words=["b"], thinking_token_budget=7, structured_outputs=StructuredOutputsParams(regex="a*"),
    repetition_detection=RepetitionDetectionParams(4, 1, 2))


def spared(**fields) -> SamplingParams:
    request = SimpleNamespace(sampling_params=SamplingParams(**fields))
    spare_sampling(request)
    return request.sampling_params


def test_b102_what_only_chooses_the_token_of_a_kept_prompt_is_left_out():
    params = spared(max_tokens=1, extra_args={**ASKS, "of a logits processor": 1}, **EVERYTHING)
    assert params == SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, extra_args=ASKS)
    assert params.sampling_type is SamplingType.GREEDY


@pytest.mark.parametrize("fields", [
    {"logprobs": 3}, {"logprobs": 0, "logprob_token_ids": [4]}, {"prompt_logprobs": 2},
    {"skip_reading_prefix_cache": True}, {"logprobs": 2, "flat_logprobs": True}], ids=str)
def test_b102_what_the_answer_must_have_is_computed(fields):
    params = spared(max_tokens=1, extra_args=ASKS, **EVERYTHING, **fields)
    assert {name: getattr(params, name) for name in fields} == fields and params.seed is None


@pytest.mark.parametrize("fields", [
    {"extra_args": None}, {"extra_args": {}}, {"extra_args": {"kv_transfer_params": {"pd": "local"}}},
    {"extra_args": {"kv_transfer_params": {"do_remote_decode": "yes"}}}], ids=str)
def test_b7_all_other_requests_are_sampled_as_they_ask(fields):
    assert spared(max_tokens=1, **EVERYTHING, **fields) == SamplingParams(max_tokens=1, **EVERYTHING, **fields)


def test_b102_an_answer_of_several_tokens_loses_its_seed_only():
    params = spared(max_tokens=2, extra_args=ASKS, **EVERYTHING)
    assert params == SamplingParams(max_tokens=2, extra_args=ASKS, **{**EVERYTHING, "seed": None})


@pytest.mark.parametrize("ours", [True, False])
def test_b91_no_grammar_is_compiled_for_a_kept_prompt_and_other_engines_stay_as_they_are(ours):
    compiled = []
    connector = object.__new__(PDConnector) if ours else object()
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(get_kv_connector=lambda: connector), mm_receiver_cache=None,
        request_block_hasher=None,
        structured_output_manager=SimpleNamespace(grammar_init=compiled.append))
    prepare = types.MethodType(_sparing(EngineCore.preprocess_add_request, PDConnector), engine)
    made, _ = prepare(EngineCoreRequest(
        request_id="a", prompt_token_ids=[1, 2], mm_features=None, pooling_params=None, arrival_time=0.0,
        lora_request=None, cache_salt=None, data_parallel_rank=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args=ASKS, **EVERYTHING)))
    assert compiled == ([] if ours else [made])
    assert made.use_structured_output is not ours


@pytest.mark.e2e
@pytest.mark.slow
def test_b102_b7_a_seeded_prompt_of_several_steps_does_not_end_a_prefill_engine(logs):
    """The front end takes the answer as it came: with a grammar, logprobs, several samples and a stop string, too."""
    broker = BrokerProcess()
    engine = RealEngine("kv_producer", logs / "sampling_p.log", broker.url)
    kinds = [{}, {"logprobs": 2}, {"stop": ["a"], "detokenize": True}, {"min_tokens": 1, "ignore_eos": False},
             {"bad_words": ["a b"], "logit_bias": {7: 5.0}, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3},
             {"structured_outputs": StructuredOutputsParams(regex="[ab]*")}]
    try:
        engine.ready()
        many = prompts(60, (1200, ) * len(kinds))
        seeded = {"temperature": 1.0, "seed": 1, "extra_args": ASKS}
        answers = engine.generate(many, 1, [{**seeded, **one} for one in kinds])
        assert [len(tokens) for tokens in answers] == [1] * len(kinds)
        assert all(one["remote_request_id"] for one in engine.params()), "some are not kept"
        assert len(engine.generate(prompts(61, (1300, )), 3, [{"temperature": 1.0, "seed": 1, "extra_args": ASKS}])[0])
        assert engine.figures()["vllm:pd_holds_total:made"] == len(kinds) + 1
    finally:
        engine.stop()
        broker.stop()
