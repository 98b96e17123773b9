# SPDX-License-Identifier: Apache-2.0
"""B120: no body that a client may send holds the event loop for long, or takes memory of more than its own size."""
import contextlib
import functools
import json
import os
import time
import tracemalloc

import msgspec
import pytest

from tests.router.test_placing import placing
from vllm_pd.router import prefill_form
from vllm_pd.router.continuation import MAX_BODY_BYTES as MAX_CONTINUED_BYTES
from vllm_pd.router.continuation import ContinuableStream
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.outline import MAX_NAME_BYTES, MAX_SCANNED_BYTES, parse
from vllm_pd.router.placing import MAX_BLOCKS, MAX_KEY_CHARS
from vllm_pd.router.policy import Policy
from vllm_pd.router.prefill_form import NotPrefilled, read_fields
from vllm_pd.router.tokenizer import Tokenizer
from vllm_pd.router.tokens import MAX_TEXT_BYTES, TokenizeRequest

LIMIT = RouterOptions(port=1).max_body_bytes
CPU_S = 0.5  # ten times what is meant, for a busy machine; decoded, these bodies take seconds
NAMES = ("model", "session_id", "prompt", "messages")
LISTS = {"lists": b"[]", "objects": b"{}", "nested": b"[" * 10 + b"]" * 10, "texts": b'""', "numbers": b"1",
         "floats": b"1.2345678901234567890123456789e-300", "huge": b"9" * 4000, "null": b"null"}


def of_kind(kind: str, size: int) -> bytes:
    """A body of about this size; `kind` is FIELD:ELEMENT for a field that is a list, or one of the names below."""
    field, _, element = kind.partition(":")
    if element:
        unit = LISTS[element] + b","
        return b'{"%b": [%b0]}' % (field.encode(), unit * ((size - 40) // len(unit)))
    if kind == "keys":
        some = b"".join(b'"%08d":0,' % number for number in range(100_000))
        return b'{%b"a":0}' % (some * (size // len(some)) + some[:size % len(some) // 13 * 13])
    begin, unit, end = {
        "text": (b'{"prompt": "', b"a", b'"}'), "escapes": (b'{"prompt": "', b"\\u0000", b'"}'),
        "model": (b'{"model": "', b"a", b'"}'), "user": (b'{"user": "', b"\\n", b'"}'), "space": (b"{", b" ", b"}"),
        "deep": (b"", b"[", b""), "digits": (b'{"prompt": ', b"1", b"}"), "again": (b"{", b'"model":"",', b'"a":1}'),
        "no end": (b'{"prompt": [', b"[],", b""), "keys tried": (b'{"a": [{', b'"model":"m","a":{', b""),
        "keys in text": (b'{"prompt": "', b'{\\"model\\":\\"m\\",', b'"}'),
        "form": (b"--x\r\n", b'name="model"', b"")}[kind]
    return begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


KINDS = [*(f"{name}:{element}" for name in NAMES for element in LISTS), "keys", "text", "escapes", "model", "user",
         "space", "deep", "digits", "again", "no end", "keys tried", "keys in text", "form"]


def bounded(work, most_bytes: int) -> None:
    """Do it twice: once for its CPU time, once for the memory that it takes."""
    began_s = time.thread_time()
    work()
    assert time.thread_time() - began_s < CPU_S
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [LIMIT, MAX_SCANNED_BYTES])
@pytest.mark.parametrize("kind", KINDS)
def test_b120_the_outline_of_a_body_is_read_in_a_time_without_its_contents(kind, size):
    body = of_kind(kind, size)
    bounded(functools.partial(parse, body), 1 << 20)


@pytest.mark.parametrize("kind", [f"{name}:{element}" for name in ("messages", "prompt") for element in LISTS] + [
    "text", "escapes", "keys"])
def test_b120_a_prompt_that_is_tokenised_is_decoded_within_bounds(kind):
    """In a thread, which holds up the loop as long as it decodes."""
    outline = parse(of_kind(kind, MAX_TEXT_BYTES))

    def decode():
        try:
            return outline.ids() if outline.has_ids else type(outline).prompt.func(outline)
        except (msgspec.MsgspecError, ValueError):
            return None

    bounded(decode, 16 << 20)


@pytest.mark.parametrize("element", ["numbers", "huge"])
def test_b120_many_token_ids_are_read_in_pieces(element):
    outline = parse(of_kind(f"prompt:{element}", MAX_SCANNED_BYTES))
    assert outline.has_ids
    if element == "numbers":
        bounded(lambda: outline.ids(), 24 << 20)
        assert len(outline.ids()) > 1_000_000
    else:
        with pytest.raises(msgspec.MsgspecError):
            outline.ids()


@pytest.mark.parametrize("kind", KINDS)
def test_b120_the_fields_of_a_body_are_split_within_bounds(kind):
    def split():
        ContinuableStream.of("/v1/completions", of_kind(kind, MAX_CONTINUED_BYTES))
        with contextlib.suppress(NotPrefilled):
            read_fields(body)

    body = of_kind(kind, prefill_form.MAX_BODY_BYTES)
    bounded(split, 32 << 20)


async def test_b120_a_prompt_of_very_many_blocks_is_compared_by_its_first_ones():
    async with placing(tokenize_timeout_s=50.0) as (placer, *_):
        plan = await placer.plan([], of_kind("prompt:numbers", MAX_SCANNED_BYTES), True)
        assert [len(hashes) for hashes in plan.hashes.values()] == [MAX_BLOCKS]
        assert plan.request.prompt_tokens > 1_000_000


@pytest.mark.parametrize("sent", [{"user": "u" * (MAX_NAME_BYTES - 2)}, {"session_id": "s" * 2000}])
async def test_b120_a_key_that_is_hashed_for_each_worker_is_short(sent):
    async with placing(Policy.CONSISTENT_HASH) as (placer, *_):
        for headers, more in (([], sent), ([(b"x-session-id", b"s" * 60_000)], {})):
            keys = [(await placer.plan(headers, json.dumps({"prompt": str(number), **more}).encode(), True)).request.key
                    for number in range(2)]
            assert keys[0] == keys[1] and 0 < len(keys[0]) <= MAX_KEY_CHARS


LONG = json.dumps("x" * MAX_SCANNED_BYTES).encode()


@pytest.mark.parametrize("body, model", [
    (b'{"model": "m", "prompt": %b}', "m"), (b'{"prompt": %b, "model": "m"}', "m"),
    (b' { "stream": true, "stop": ["a"], "model" : "m", "prompt": %b, "n": 1 } ', "m"),
    (b'{"prompt": %b, "model": "m", "tools": [{"model": "not"}], "user": "u"}', "m"),
    (b'{"model": "old", "prompt": %b, "model": "m"}', "m"), (b'{"a": {"model": "not"}, "prompt": %b}', None),
    (b'{"prompt": %b, "a": {"b": 1, "model": "not"}}', None), (b'{"model": ["not"], "prompt": %b}', None),
    (b'{"prompt": %b, "text": "{\\"model\\": \\"not\\"}"}', None), (b'{"model": "\\u006d", "prompt": %b}', "m"),
    (b'{"prompt": %b, "model": "' + b"m" * 5000 + b'"}', None)], ids=lambda value: str(value)[:60])
def test_b120_the_model_of_a_long_body_is_found_at_its_ends(body, model):
    assert parse(body % LONG).model == model
    assert not parse(body % LONG).is_scanned
    short = parse(body % b'"x"')
    assert short.is_scanned and short.model == model


def test_b120_the_model_of_a_form_is_found_before_and_after_its_file():
    field = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    file = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"\0\xff" * (1 << 20) + b"\r\n"
    for body in (field + file + b"--b--\r\n", file + field + b"--b--\r\n"):
        assert parse(body).model == "whisper"
    assert parse(file + b"--b--\r\n").model is None


@pytest.mark.parametrize("messages", [
    [{"role": "user", "content": ""}] * 2000 + [{"role": "user", "content": "a b c " * 200}],
    [{"role": "user", "content": "<|im_start|>" * 5000}]])
async def test_b120_the_loop_takes_only_the_first_part_of_a_chat(messages):
    body = json.dumps({"messages": messages}).encode()
    tokenizer = Tokenizer(os.environ["VLLM_PD_TINY_MODEL"])
    async with placing(load=lambda name: tokenizer) as (_, _, pool, _):
        began_s = time.thread_time()
        await pool.tokenize(TokenizeRequest(parse(body), len, len(body)))
        assert time.thread_time() - began_s < CPU_S
