# SPDX-License-Identifier: Apache-2.0
"""The wire form of the order prefill-first: which requests it covers, what P is asked, and what D gets. Pure.

It is the form of upstream's NIXL connectors: P gets the request for one token, with `do_remote_decode` in its
`kv_transfer_params`. P holds the prompt's KV blocks, and its answer has `kv_transfer_params` that say where they are.
They go to D unchanged, in the client's own request. The router does not read what is in them.
"""
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from vllm_pd.protocol.holds import PARAMS_KEY
from vllm_pd.router.outline import all_fields

MAX_BODY_BYTES = 3 << 20  # of 800,000 tokens as text, 400,000 as ids; to read the worst one takes the loop 30 ms
MAX_PARAMS_BYTES = 1 << 19  # the numbers of 60,000 blocks
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                 "remote_block_ids": None, "remote_host": None, "remote_port": None}

Fields = Mapping[str, msgspec.Raw]  # of a request's body, each value as it was written


class PrefillOutcome(StrEnum):
    """What became of the prefill of a request that came in the order prefill-first; the label of a counter. Where a try
    at P failed, a `WorkerFailure` is the label (`vllm_pd.router.workers`)."""
    PREFILLED = "prefilled"  # D gets P's parameters
    UNREAD = "unread"  # the body is not read: no JSON object, no prompt, or too long
    ASKED = "asked"  # the client has sent kv_transfer_params
    SAMPLES = "samples"  # several answers, or beam search
    SEVERAL = "several"  # prompts, or one that is no text
    WHOLE_PROMPT = "whole_prompt"  # the answer needs each token of the prompt computed at D, or it may be cut otherwise
    ADAPTER = "adapter"  # LoRA
    NO_PREFILL = "no_prefill"  # no P is up that serves the model and is not full
    NO_DECODE = "no_decode"  # the same of D
    FATAL = "fatal"  # Ps were lost while they had an equal request
    REFUSED = "refused"  # P's status is none of 200, 404, 429, 500 and above
    NO_PARAMS = "no_params"  # P's answer has none
    BAD_PARAMS = "bad_params"  # they are no JSON object, or too long, or the answer can't be read
    CLIENT_GONE = "client_gone"
    CUT = "cut"  # the router is shutting down


class NotPrefilled(Exception):
    """The request goes to D as the client sent it, and D decides. `outcome` is a PrefillOutcome or a WorkerFailure."""

    def __init__(self, outcome: StrEnum) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


_NONE, _NO, _ONE = b"null", b"false", b"1"
# By field: the values with which a request is covered, and why it is not with any other.
_COVERED = {PARAMS_KEY: ((_NONE, ), PrefillOutcome.ASKED),
            "n": ((_NONE, _ONE), PrefillOutcome.SAMPLES), "best_of": ((_NONE, _ONE), PrefillOutcome.SAMPLES),
            "use_beam_search": ((_NONE, _NO), PrefillOutcome.SAMPLES),
            "prompt_embeds": ((_NONE, ), PrefillOutcome.SEVERAL),
            "echo": ((_NONE, _NO), PrefillOutcome.WHOLE_PROMPT),
            "prompt_logprobs": ((_NONE, ), PrefillOutcome.WHOLE_PROMPT),
            "truncate_prompt_tokens": ((_NONE, ), PrefillOutcome.WHOLE_PROMPT)}
# What P gets in place of the client's values. `min_tokens`: an answer that ends with its first token, because that is
# an end of text, would hold no blocks.
_FOR_PREFILL = {"max_tokens": 1, "min_tokens": 1, "temperature": 0, "stream": False, "n": 1}
# Some make P's answer as long as the prompt or the vocabulary. `logprob_token_ids` is an error without `logprobs`.
# The others only choose P's token, which nobody reads; D gets them, and refuses those that are wrong. With a seed a
# prompt of several steps ends a P on the CPU. What may be in the prompt's text stays (`tools`, `response_format`).
_NOT_FOR_PREFILL = ("stream_options", "return_token_ids", "return_prompt_text", "logprobs", "top_logprobs",
                    "logprob_token_ids",
                    "seed", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
                    "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
                    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                    "thinking_token_budget", "repetition_detection")
_one_prompt = msgspec.json.Decoder(tuple[msgspec.Raw])
_params = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _PrefillAnswer(msgspec.Struct):
    """The field that is read of P's answer."""
    kv_transfer_params: msgspec.Raw = msgspec.Raw(_NONE)


_answer = msgspec.json.Decoder(_PrefillAnswer)


def read_fields(body: bytes) -> Fields:
    """The fields of a completion's body. Raises NotPrefilled for a request that this order does not cover."""
    try:
        fields = all_fields(body) if len(body) <= MAX_BODY_BYTES else {}
        count = _prompt_count(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise NotPrefilled(PrefillOutcome.UNREAD) from None
    for name, (values, outcome) in _COVERED.items():
        if name in fields and bytes(fields[name]) not in values:
            raise NotPrefilled(outcome)
    if count != 1:
        raise NotPrefilled(PrefillOutcome.SEVERAL if count else PrefillOutcome.UNREAD)
    return fields


def prefill_body(fields: Fields, params: object = REMOTE_DECODE) -> bytes:
    """The body for P: the client's, for one token and without a stream, with these `kv_transfer_params`."""
    changed = {**_FOR_PREFILL, PARAMS_KEY: params}
    if "max_completion_tokens" in fields:
        changed["max_completion_tokens"] = 1
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
                               | changed)


def decode_body(fields: Fields, params: bytes) -> bytes:
    """The body for D: the client's, with the `kv_transfer_params` of P's answer as P wrote them."""
    return msgspec.json.encode({**fields, PARAMS_KEY: msgspec.Raw(params)})


def read_params(answer: bytes) -> bytes:
    """The `kv_transfer_params` of the body of P's answer, as P wrote them. Raises NotPrefilled where there are none, or
    none that D could read."""
    try:
        params = bytes(_answer.decode(answer).kv_transfer_params)
        too_long = len(params) > MAX_PARAMS_BYTES
        read = None if params == _NONE or too_long else _params.decode(params)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise NotPrefilled(PrefillOutcome.BAD_PARAMS) from None
    if not read:
        raise NotPrefilled(PrefillOutcome.BAD_PARAMS if too_long else PrefillOutcome.NO_PARAMS)
    return params


def _prompt_count(fields: Fields) -> int:
    """How many prompts there are, 2 for more than one. vLLM reads only one of the two fields, and does not mind the
    other. Raises MsgspecError for a list that can't be read."""
    prompt = bytes(fields.get("prompt", _NONE))
    if bytes(fields.get("messages", _NONE)) != _NONE:
        return 1 if prompt == _NONE else 2
    if prompt == _NONE:
        return 0
    if prompt[:1] != b"[" or prompt[1:].lstrip()[:1] not in (b"[", b'"', b"{"):
        return 1
    try:
        return len(_one_prompt.decode(prompt))
    except msgspec.ValidationError:  # at the second one
        return 2
