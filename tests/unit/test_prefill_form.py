# SPDX-License-Identifier: Apache-2.0
"""B102: the wire form of the order prefill-first, as the router writes and reads it."""
import json
import re
from pathlib import Path

import pytest

from vllm_pd.router import prefill_form as form
from vllm_pd.router.prefill_form import NotPrefilled, PrefillOutcome

PAGE = Path(__file__).resolve().parents[2] / "docs" / "router.md"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
PLAIN = {"model": "m", "prompt": "a"}
PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [[4, 5]],
          "remote_host": "h", "remote_port": 5600, "tp_size": 1, "of another engine": {"x": 1.50}}


@pytest.mark.parametrize("body", [
    CHAT, PLAIN, CHAT | {"n": 1, "stream": True}, PLAIN | {"n": None, "best_of": 1, "use_beam_search": False},
    PLAIN | {"prompt": [4, 5]}, PLAIN | {"prompt": ["a"]}, PLAIN | {"prompt": [[4, 5]]}, PLAIN | {"prompt": []},
    PLAIN | {"kv_transfer_params": None}, PLAIN | {"echo": False, "prompt_logprobs": None, "logprobs": 3},
    PLAIN | {"prompt_embeds": None}, CHAT | {"prompt": None}])
def test_b102_what_is_covered(body):
    fields = form.read_fields(json.dumps(body).encode())
    assert json.loads(form.decode_body(fields, b"{}")) == body | {"kv_transfer_params": {}}


@pytest.mark.parametrize("body, outcome", [
    (PLAIN | {"kv_transfer_params": {"pd": "local"}}, "asked"), (PLAIN | {"kv_transfer_params": {}}, "asked"),
    (PLAIN | {"kv_transfer_params": "fast"}, "asked"), (PLAIN | {"n": 2}, "samples"), (PLAIN | {"n": "2"}, "samples"),
    (PLAIN | {"best_of": 3}, "samples"), (CHAT | {"use_beam_search": True}, "samples"),
    (PLAIN | {"prompt": ["a", "b"]}, "several"), (PLAIN | {"prompt": [[4], [5, 6]]}, "several"),
    (PLAIN | {"prompt": ["a", "b"], "messages": []}, "several"), (CHAT | PLAIN, "several"),
    (PLAIN | {"truncate_prompt_tokens": -1}, "whole_prompt"),
    (PLAIN | {"prompt_embeds": "AAAA"}, "several"), (PLAIN | {"echo": True}, "whole_prompt"),
    (CHAT | {"prompt_logprobs": 0}, "whole_prompt"), ({"model": "m"}, "unread"), ({}, "unread"),
    ({"prompt": None, "messages": None}, "unread"), ([PLAIN], "unread")])
def test_b102_what_is_not(body, outcome):
    with pytest.raises(NotPrefilled) as caught:
        form.read_fields(json.dumps(body).encode())
    assert caught.value.outcome is PrefillOutcome(outcome)


@pytest.mark.parametrize("body", [
    b"", b"{", b'{"prompt": NaN}', b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"prompt": ["a", }',
    b'{"prompt": "' + b"a" * form.MAX_BODY_BYTES + b'"}'], ids=["empty", "cut", "nan", "deep", "comma", "long"])
def test_b102_what_can_not_be_read_goes_to_d(body):
    with pytest.raises(NotPrefilled) as caught:
        form.read_fields(body)
    assert caught.value.outcome is PrefillOutcome.UNREAD


def test_b102_p_computes_one_token_and_no_stream():
    asked = CHAT | {"max_tokens": 90, "max_completion_tokens": 80, "min_tokens": 7, "stream": True, "n": 1,
                    "stream_options": {"include_usage": True}, "temperature": 0.25, "return_token_ids": True,
                    "seed": 5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1,
                    "repetition_penalty": 2, "length_penalty": 2, "logit_bias": {"4": 3}, "allowed_token_ids": [4],
                    "bad_words": ["a"], "stop": ["b"], "stop_token_ids": [4], "structured_outputs": {"regex": "a*"},
                    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a",
                    "thinking_token_budget": 5, "repetition_detection": {},
                    "logprobs": True, "top_logprobs": -1, "logprob_token_ids": [4], "return_prompt_text": True}
    made = json.loads(form.prefill_body(form.read_fields(json.dumps(asked).encode())))
    assert made == CHAT | {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "stream": False, "n": 1,
                           "temperature": 0, "kv_transfer_params": {
                               "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                               "remote_block_ids": None, "remote_host": None, "remote_port": None}}
    assert "max_completion_tokens" not in json.loads(form.prefill_body(form.read_fields(json.dumps(PLAIN).encode())))


def test_b102_d_gets_what_the_client_and_p_have_written():
    """Not only equal values: numbers stay as they were written, too."""
    fields = form.read_fields(b' {"prompt" : [1,\t2], "n": 2, "n": 1, "seed": 1234567890123456789, "top_p": 0.10}\n')
    params = form.read_params(b'{"id": "x", "kv_transfer_params": {"remote_block_ids": [ 4 ], "x": 1.50} , "a": {}}')
    assert params == b'{"remote_block_ids": [ 4 ], "x": 1.50}'
    body = form.decode_body(fields, params)
    assert body == (b'{"prompt":[1,\t2],"n":1,"seed":1234567890123456789,"top_p":0.10,"kv_transfer_params":'
                    + params + b"}")
    assert json.loads(form.read_params(json.dumps({"kv_transfer_params": PARAMS}).encode())) == PARAMS


@pytest.mark.parametrize("answer, outcome", [
    (b"{}", "no_params"), (b'{"kv_transfer_params": null}', "no_params"), (b'{"kv_transfer_params": {}}', "no_params"),
    (b'{"kv_transfer_params": "x"}', "bad_params"), (b'{"kv_transfer_params": [{"a": 1}]}', "bad_params"),
    (b'{"kv_transfer_params": 5}', "bad_params"), (b'{"kv_transfer_params": {"a": tru', "bad_params"),
    (b"", "bad_params"), (b"[]", "bad_params"),
    (b'{"kv_transfer_params": {"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "bad_params"),
    (b'{"kv_transfer_params": {"a": "' + b"b" * form.MAX_PARAMS_BYTES + b'"}}', "bad_params")],
    ids=["none", "null", "empty", "text", "list", "number", "cut", "no body", "no object", "deep", "long"])
def test_b102_answers_without_parameters_for_d(answer, outcome):
    with pytest.raises(NotPrefilled) as caught:
        form.read_params(answer)
    assert caught.value.outcome is PrefillOutcome(outcome)


def test_each_outcome_is_documented():
    row = next(line for line in PAGE.read_text().splitlines() if "prefill_first_total{outcome}" in line)
    assert {outcome.value for outcome in PrefillOutcome} <= set(re.findall(r"`(\w+)`", row))
