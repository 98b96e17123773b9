# SPDX-License-Identifier: Apache-2.0
"""Behaviours of a V1 engine that need its real scheduler only, sync and async, over memory that notices wrong reads."""
import os

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from tests.v1.simulated import Engine
from tests.v1.test_engine_access import Loop, park
from tests.v1.test_hazards import PARKED, end, parked, prompt
from vllm_pd.handover.progress import ArrivalNotice
from vllm_pd.protocol.actions import Released
from vllm_pd.protocol.scope import MAX_SALT_BYTES
from vllm_pd.transfer.requests import Notice
from vllm_pd.v1.adapter_files import AdapterReader
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.features import can_go_remote
from vllm_pd.v1.media import MediaBook


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


@pytest.mark.parametrize("payload", [b"", b"\x00", os.urandom(64), b"x" * 100_000, b"\xc0"], ids=len)
def test_b29_a_malformed_notice_is_counted_and_changes_nothing(engine, payload):
    attempt = parked(engine)
    engine.transfer.progress.notices.append(Notice("peer", payload))
    engine.access.wake()
    engine.run()
    assert not engine.protocol.notices and engine.status("a") is PARKED
    assert ["frames_dropped", "notice_malformed"] in engine.counted()
    engine.transfer.progress.notices.append(Notice("peer", ArrivalNotice(attempt, 0).encode()))
    engine.access.wake()
    engine.run()
    assert engine.protocol.notices == [(attempt, 0)]
    engine.prefilled("a")
    end(engine)


def test_b32_resumed_requests_begin_first_in_first_out_before_new_prompts(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, max_num_seqs=8, blocks=200)
    for name in "abcd":
        parked(engine, name, 60)
    for number in range(8):  # all seats
        engine.add(f"runs{number}", prompt(10), 20)
    for _ in range(3):
        engine.turn()
    for name in "abcd":
        engine.prefilled(name)
    began, turns = [], 0
    while engine.has_work():
        if turns < 40:
            engine.add(f"new{turns}", prompt(10), 6)  # a steady stream
        engine.turn()
        turns += 1
        began += [name for name in engine.outputs if name not in began and not name.startswith("runs")]
    assert began[:4] == list("abcd")
    engine.check_answers()
    engine.check_at_rest()


def request(**fields) -> Request:
    values = {"request_id": "a", "prompt_token_ids": prompt(100), "pooling_params": None,
              "sampling_params": SamplingParams(max_tokens=4), **fields}
    return Request(**values)


IMAGE = MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=PlaceholderRange(0, 4))


@pytest.mark.parametrize("fields, goes", [
    ({}, True),
    ({"sampling_params": SamplingParams(logprobs=3, logit_bias={5: 2.0}, bad_words=[], allowed_token_ids=[1, 2],
                                        presence_penalty=0.5, min_tokens=2, seed=4)}, True),
    ({"sampling_params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*"))}, True),
    ({"sampling_params": SamplingParams(prompt_logprobs=0)}, False),
    ({"sampling_params": SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)}, False),
    ({"sampling_params": SamplingParams(prompt_logprob_token_ids=[[1]] * 99, skip_reading_prefix_cache=False)}, False),
    ({"lora_request": LoRARequest("adapter", 1, "/nowhere")}, False),
    ({"mm_features": [IMAGE]}, False),
    ({"prompt_token_ids": None, "prompt_embeds": torch.zeros(100, 64)}, False),
    ({"resumable": True}, False),
    ({"cache_salt": "s"}, True),
    ({"cache_salt": "ä" * (MAX_SALT_BYTES // 2)}, True),
    ({"cache_salt": "ä" * (MAX_SALT_BYTES // 2) + "s"}, False),
    ({"cache_salt": "\ud800"}, False),
    ({"sampling_params": None, "pooling_params": PoolingParams(task="embed")}, False),
    ({"request_id": "x" * 5000}, False),
], ids=["plain", "sampling", "grammar", "prompt logprobs", "those with a prefix hit", "prompt scores",
        "LoRA", "image", "embeddings", "streaming input", "salt", "longest salt", "longer salt", "no text",
        "pooling", "long id"])
def test_b7_b98_what_another_engine_may_prefill(fields, goes):
    adapters = AdapterBook(None, AdapterReader(lambda: None), is_offering=False)
    assert can_go_remote(request(**fields), adapters, MediaBook()) is goes


def test_b98_a_request_that_stays_is_counted_by_its_reason(engine):
    engine.add("a", prompt(100), lora_request=LoRARequest("adapter", 1, "/nowhere"))
    end(engine)
    assert ["decision", "local", "feature"] in engine.counted() and not engine.protocol.jobs


def test_b96_a_request_that_is_aborted_in_a_pause_leaves_nothing(engine):
    """Parked, resumed and failed ones, while V1 schedules nobody."""
    from vllm.v1.core.sched.interface import PauseState
    attempts = [parked(engine, name) for name in "abc"]
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.prefilled("a")
    engine.lost(attempts[1])
    engine.access.may_sleep = False
    for _ in range(5):
        engine.turn()
    engine.abort("a", "b", "c")
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.access.may_sleep = True
    engine.tell(*map(Released, attempts[1:]))
    assert set(engine.ended.values()) == {"aborted"}
    end(engine)


def call(loop: Loop, name: str, *arguments) -> str | None:
    """A utility call as a front end makes it: what it fails with, or None."""
    from vllm.v1.engine import EngineCoreRequestType
    loop.core.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 7, name, arguments)))
    while True:
        _, outputs = loop.core.output_queue.get(timeout=60)
        if outputs.utility_output is not None:
            return outputs.utility_output.failure_message
        loop.engine.deliver({0: outputs})


@pytest.fixture
def loop(model_folder):
    loop = Loop(model_folder)
    loop.core.mm_receiver_cache = None
    loop.executor.reset_encoder_cache = loop.executor.reset_mm_cache = lambda: None
    yield loop
    loop.stop()


def test_b96_sleep_that_only_pauses_and_wake_up_with_a_parked_request(loop):
    park(loop)
    assert call(loop, "sleep", 0, "keep") is None
    loop.engine.prefilled("a")
    assert call(loop, "wake_up", ["scheduling"]) is None
    loop.wait(lambda: "a" in loop.engine.ended)
    loop.engine.check_answers()


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_b96_a_pause_that_clears_the_cache_fails_while_a_peer_may_write(loop, mode, monkeypatch):
    """As before an update of weights. The engine lives, and the caller may try again."""
    monkeypatch.setattr("vllm_pd.v1.binding.FENCES_S", 0.05)
    attempt = park(loop)
    assert "KV" in call(loop, "pause_scheduler", mode, True)
    if mode == "abort":
        loop.engine.ended["a"] = "aborted"
    loop.engine.tell(Released(attempt))
    assert call(loop, "pause_scheduler", mode, True) is None
    loop.engine.protocol.peers = 0
    assert call(loop, "resume_scheduler") is None
    loop.wait(lambda: "a" in loop.engine.ended)
    loop.wait(loop.sleeps)
    loop.engine.check_answers()
    loop.engine.check_at_rest()
