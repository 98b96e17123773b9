# SPDX-License-Identifier: Apache-2.0
"""B65: which requests can be continued, and what a client gets where a stream breaks anywhere."""
import itertools
import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.token_engine import CHAT, SCRIPT, TEXT, answer, detokenize, ids_of
from vllm_pd.router import continuation
from vllm_pd.router.continuation import COMPLETIONS, MAX_CONTINUATIONS, ContinuableStream

PROMPTS = {COMPLETIONS: {"prompt": "How?"}, CHAT: {"messages": [{"role": "user", "content": "How?"}]}}
USAGE = [{}, {"stream_options": {"include_usage": True}},
         {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
PATHS = [COMPLETIONS, CHAT]


def asked(path: str, **more) -> dict:
    return {"model": "m", "stream": True, "max_tokens": 100, **PROMPTS[path], **more}


def undisturbed(path: str, request: dict, together: int = 1) -> bytes:
    return b"".join(answer(path, request, together=together))


def of_one(out: bytes) -> bytes:
    """What a client gets, under the id of the first engine; that of another one only where nothing came of it."""
    names = set(re.findall(rb'"id":"(\w+-\d)"', out))
    assert len(names) == 1, names
    return out.replace(names.pop(), b"chatcmpl-1" if b"chatcmpl" in out else b"cmpl-1")


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    at = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[begin:end] for begin, end in itertools.pairwise([0, *at, len(data)]) if begin < end]


def gets(path: str, request: dict, cuts: list[int], seed: int = 0, together: int = 1,
         model_len: int | None = None) -> tuple[bytes, list[tuple[str, dict]], bool]:
    """(what the client gets, the requests of the engines, whether it is complete) where the connection to each engine
    but the last breaks after so many bytes of its answer."""
    rng = random.Random(seed)
    body = json.dumps(request).encode()
    stream = ContinuableStream.of(path, body)
    stream.model_len = model_len
    out, sent = b"", [(path, json.loads(stream.body))]
    for number, cut in enumerate([*cuts, None]):
        data = b"".join(answer(*sent[-1], name=str(number + 1), together=together))
        for piece in pieces(data[:cut], rng):
            out += stream.receive(piece)
            assert stream.error is None
        if cut is None or cut >= len(data):
            return out + stream.rest(), sent, True
        ending = stream.end()
        if ending is not None:
            return out + ending, sent, True
        tokens = stream.detokenize_request()
        said = {"prompt": detokenize(json.loads(tokens)["tokens"]) if tokens else ""}
        if not stream.can_go_on or tokens and not stream.is_out(json.dumps(said).encode()):
            return out, sent, False
        target, body = stream.next_request()
        sent.append((target, json.loads(body)))
    raise AssertionError


@pytest.mark.parametrize("more", [*USAGE, {"return_token_ids": True}, USAGE[2] | {"return_token_ids": True}], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_b65_a_break_after_any_byte_is_not_seen(path, more):
    request = asked(path, **more)
    want = undisturbed(path, request)
    sent = list(answer(path, {**request, "return_token_ids": True}))
    begun = len(b"".join(sent[:5])) if more in ({}, USAGE[2]) else 0  # in which the first characters come in parts
    for cut in [*range(begun), *range(begun, len(b"".join(sent)), 23)]:
        out, sent, complete = gets(path, request, [cut], seed=cut)
        assert complete and of_one(out) == want, (cut, out, sent)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), st.sampled_from(USAGE), st.booleans(), st.integers(0, 6000), st.integers(0, 4000),
       st.integers(0, 99), st.sampled_from([100, 30, 5, 1]))
def test_b65_two_breaks_are_not_seen(path, usage, ids, first, second, seed, most):
    request = asked(path, max_tokens=most, **usage, **{"return_token_ids": True} if ids else {})
    out, _, complete = gets(path, request, [first, second], seed)
    assert complete and of_one(out) == undisturbed(path, request)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PATHS), st.integers(0, 4000), st.integers(2, 5), st.integers(0, 99))
def test_b65_several_tokens_in_an_event_may_end_within_a_character(path, cut, together, seed):
    """Then nobody goes on. Where one does, text and number of tokens are right."""
    request = asked(path, return_token_ids=True, **USAGE[1])
    out, _, complete = gets(path, request, [cut], seed, together)
    events = [json.loads(one[6:]) for one in out.split(b"\n\n") if one.startswith(b"data: {")]
    texts = "".join((one["choices"][0].get("delta") or {"content": one["choices"][0].get("text")})["content"]
                    for one in events if one["choices"])
    assert TEXT.startswith(texts)
    kept = [token for one in events for choice in one["choices"] for token in choice.get("token_ids") or []]
    assert complete or kept and detokenize(kept) != texts, "else somebody could go on"
    if complete:
        assert texts == TEXT and events[-1]["usage"]["completion_tokens"] == len(SCRIPT)
        assert out.endswith(b"data: [DONE]\n\n")


def test_b65_no_more_than_two_continuations():
    cut = len(b"".join(list(answer(COMPLETIONS, asked(COMPLETIONS, return_token_ids=True)))[:2]))
    assert gets(COMPLETIONS, asked(COMPLETIONS), [cut] * MAX_CONTINUATIONS)[2]
    assert not gets(COMPLETIONS, asked(COMPLETIONS), [cut] * (MAX_CONTINUATIONS + 1))[2]


def after(path: str, events: int, **more) -> tuple[str, dict]:
    """The next engine's request after a break behind so many events of the first one."""
    request = asked(path, **more)
    cut = len(b"".join(list(answer(path, {**request, "return_token_ids": True}))[:events]))
    return gets(path, request, [cut], model_len=more.get("model_len"))[1][1]


def test_b65_the_next_engine_gets_prompt_tokens_and_what_is_left():
    sampling = {"temperature": 0, "top_p": 0.5, "seed": 7, "logit_bias": {"5": 1.0}, "stop_token_ids": [9],
                "repetition_penalty": 1.25, "cache_salt": "s", "stream_options": {"include_usage": True}}
    same = {"model": "m", "stream": True, "return_token_ids": True, **sampling}
    for path, events in (COMPLETIONS, 3), (CHAT, 4):  # of a chat the first one has no token
        target, body = after(path, events, min_tokens=9, n=1, stop=None, add_special_tokens=False, **sampling)
        assert target == COMPLETIONS and body == {**same, "prompt": ids_of(path, asked(path)) + SCRIPT[:3],
                                                  "max_tokens": 97, "min_tokens": 6}
    assert "min_tokens" not in after(COMPLETIONS, 3, min_tokens=3)[1]
    assert after(COMPLETIONS, 3, max_tokens=None)[1]["max_tokens"] == 13, "16 by default"
    assert after(CHAT, 4, max_tokens=50, max_completion_tokens=20)[1]["max_tokens"] == 17
    # The first byte of a character is dropped; it and a special token are generated anew.
    assert after(COMPLETIONS, 2)[1]["prompt"][-1:] == [ord("H")]
    assert after(COMPLETIONS, 10)[1]["prompt"][-2:] == SCRIPT[7:9]


def test_b65_where_no_token_is_out_the_request_itself_is_sent_again():
    for path, events in (COMPLETIONS, 0), (CHAT, 1):
        assert after(path, events) == (path, asked(path) | {"return_token_ids": True})


def test_b65_a_chat_without_a_limit_ends_at_the_models_length():
    request = asked(CHAT, max_tokens=None)
    prompt = len(ids_of(CHAT, request))
    cut = len(b"".join(list(answer(CHAT, {**request, "return_token_ids": True}))[:4]))
    assert gets(CHAT, request, [cut], model_len=prompt + 50)[1][1][1]["max_tokens"] == 47
    assert not gets(CHAT, request, [cut])[2], "of an unknown length nobody knows what is left"


@pytest.mark.parametrize("more", USAGE, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_b65_an_answer_whose_tokens_are_all_out_needs_no_engine(path, more):
    """An engine that has sent as many tokens as it may, and not that this is the end."""
    request = asked(path, max_tokens=5, **more)
    want = undisturbed(path, request)
    sent = b"".join(answer(path, {**request, "max_tokens": 6, "return_token_ids": True}))
    stream = ContinuableStream.of(path, json.dumps(request).encode())
    events = sent.split(b"\n\n")[:5 + (path == CHAT)]
    out = stream.receive(b"\n\n".join([*events, b""]))
    got = out + stream.end()
    said = [json.loads(one[6:]) for one in got.split(b"\n\n") if one.startswith(b"data: {")]
    wanted = [json.loads(one[6:]) for one in want.split(b"\n\n") if one.startswith(b"data: {")]
    assert got.endswith(b"data: [DONE]\n\n")
    assert [one.get("usage") for one in said][-1:] == [one.get("usage") for one in wanted][-1:]
    last = [one["choices"][0] for one in said if one["choices"]][-1]
    assert last["finish_reason"] == "length"


def test_b65_only_a_known_end_is_made_up():
    begun = hostile(token_ids=[72], prompt_token_ids=[1])
    ended = hostile(token_ids=[73], finish_reason="stop")
    for more, events, known in [({}, ended, True), (USAGE[1], begun + ended, True), (USAGE[1], ended, False),
                                ({}, begun, False), ({}, ended + hostile(token_ids=[74]), False),
                                ({}, ended + ended, False)]:
        stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS, **more)).encode())
        assert len(stream.receive(events).split(b"\n\n")) == len(events.split(b"\n\n"))
        assert (stream.end() is not None) is known


NOT = [{"n": 2}, {"best_of": 2}, {"logprobs": 1}, {"logprobs": 0}, {"logprobs": True}, {"prompt_logprobs": 0},
       {"echo": True}, {"suffix": "x"}, {"use_beam_search": True}, {"stop": "x"}, {"stop": ["x"]},
       {"presence_penalty": 0.5}, {"frequency_penalty": -1}, {"bad_words": ["x"]}, {"seed": 1},
       {"seed": 1, "temperature": 0.5}, {"response_format": {"type": "json_object"}}, {"guided_json": {}},
       {"structured_outputs": {}}, {"kv_transfer_params": {}}, {"truncate_prompt_tokens": 5}, {"max_tokens": 0},
       {"max_tokens": "5"}, {"max_tokens": 1.5}, {"min_tokens": -1}, {"stream": False}, {"stream": None},
       {"stream_options": {"else": 1}}, {"return_token_ids": False}, {"return_token_ids": None}, {"model": None},
       {"vllm_xargs": {}}, {"logits_processors": []}, {"repetition_detection": {}}, {"thinking_token_budget": 5},
       {"spaces_between_special_tokens": False}, {"prompt_embeds": "x"}, {"never_heard_of": 1}, {"watermarking": False},
       {"tools": []}, {"functions": []}]
NOT_CHAT = [{"top_logprobs": 1}, {"tool_choice": "auto"}, {"include_reasoning": False}, {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}]},
            {"messages": [{"role": "user", "content": "x", "audio": {}}]}, {"messages": "x"}, {"prompt": "x"}]
NOT_COMPLETIONS = [{"prompt": ["a", "b"]}, {"prompt": ["a"]}, {"prompt": [[1]]}, {"prompt": []}, {"prompt": None},
                   {"prompt": 5}, {"prompt": {}}, {"logprobs": False}, {"messages": []}, {"messages": PROMPTS[CHAT]}]


@pytest.mark.parametrize("path, more", [*((path, one) for path in PATHS for one in NOT),
                                        *((CHAT, one) for one in NOT_CHAT),
                                        *((COMPLETIONS, one) for one in NOT_COMPLETIONS)], ids=str)
def test_b65_what_may_mean_something_else_after_a_break_is_not_continued(path, more):
    assert ContinuableStream.of(path, json.dumps(asked(path, **more)).encode()) is None


@pytest.mark.parametrize("path", PATHS)
def test_b65_what_changes_nothing_is_continued(path):
    nulls = {name: None for one in NOT for name in one if name not in ("stream", "model", "return_token_ids")}
    same = {"n": 1, "stop": [], "presence_penalty": 0.0, "frequency_penalty": 0, "echo": False, "best_of": 1}
    for more in (nulls, same, {"temperature": 0, "seed": 5}, {"min_tokens": 5}, {"max_tokens": None}):
        assert ContinuableStream.of(path, json.dumps(asked(path, **more)).encode()) is not None, more


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000, b'{"model": "m"}',
                                  b" " * (continuation.MAX_BODY_BYTES + 1)], ids=lambda body: repr(body[:20]))
def test_b65_what_is_no_request_is_not_continued(body):
    assert ContinuableStream.of(COMPLETIONS, body) is None and ContinuableStream.of(CHAT, body) is None
    assert ContinuableStream.of("/v1/responses", json.dumps(asked(COMPLETIONS)).encode()) is None


def test_b65_the_page_names_the_fields():
    page = (Path(__file__).resolve().parents[2] / "docs" / "router.md").read_text()
    rows = re.findall(r"^\| [^`|]+ \| (`(?:temperature|max_tokens|add_special_tokens|request_id|n)`.*) \|$", page, re.M)
    assert len(rows) == 5
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"role", "content", "name", "null"}
    assert named == (continuation._COPIED | continuation._READ | set(continuation._WITHOUT_EFFECT) | {"logprobs"}) - {
        "model", "prompt", "messages", "stream"}


def test_b65_only_the_ids_are_added_to_a_request():
    for space in "", " \n":
        body = json.dumps(asked(COMPLETIONS), indent=1).encode() + space.encode()
        assert json.loads(ContinuableStream.of(COMPLETIONS, body).body) == asked(COMPLETIONS) | {
            "return_token_ids": True}
    body = json.dumps(asked(COMPLETIONS, return_token_ids=True)).encode()
    assert ContinuableStream.of(COMPLETIONS, body).body is body


HOSTILE = [b"data: {]\n\n", b"data: \xff\n\n", b"event: x\ndata: {}\n\n", b"x\n\n", b"data: {}\n\n", b"data: 5\n\n",
           b"data: {\"choices\": []}\n\n", b"data: " + b"[" * 50_000 + b"\n\n", b": x\r\n\r\n", b"data: x\r\n"]


def hostile(**choice: object) -> bytes:
    head = {"id": "x", "object": "o", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**head, "choices": [{"index": 0, "text": "t", "finish_reason": None, **choice}]}
                                  ).encode() + b"\n\n"


NO_TOKENS = [hostile(), hostile(token_ids=None), hostile(token_ids=[]), hostile(token_ids=["5"]),
             hostile(token_ids=[1.5]), hostile(token_ids=[-1]), hostile(token_ids=[1 << 40]), hostile(token_ids="5"),
             hostile(token_ids=[1], index=1), hostile(token_ids=[1], text=None), hostile(token_ids=[1], text=5)]


@pytest.mark.parametrize("event", [*HOSTILE, *NO_TOKENS], ids=lambda event: event[:90].decode("latin-1"))
def test_b65_what_is_not_understood_is_passed_on_and_nothing_is_continued(event):
    good = b"".join(list(answer(COMPLETIONS, asked(COMPLETIONS)))[:3])  # without ids, too
    for before in (b"", hostile(token_ids=[72], prompt_token_ids=[1]), hostile(token_ids=[72], text="")):
        stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
        out = b"".join(stream.receive(one) for one in (before, event, good)) + stream.rest()
        assert out == re.sub(rb'(token_ids": )\[[\d, ]*\]', rb"\1null", before + event + good)
        assert not stream.can_go_on and stream.end() is None and stream.error is None


@pytest.mark.parametrize("event", [*HOSTILE, *NO_TOKENS, b"data: {\"error\": {\"code\": 400}}\n\n"],
                         ids=lambda event: event[:90].decode("latin-1"))
def test_b65_in_the_rest_of_a_stream_it_is_never_passed_on(event):
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    begun = stream.receive(hostile(token_ids=[72], prompt_token_ids=[1]))
    assert begun and stream.can_go_on
    stream.next_request()
    out = stream.receive(event) + stream.receive(b": more\n\n") + stream.rest()
    assert stream.error is not None and out.strip() in (b"", b": more")
    assert not stream.can_go_on or b"error" in event


def test_b65_memory_is_bounded():
    most = continuation.MAX_EVENT_BYTES
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    passed = sum(len(stream.receive(b"x" * 60_000)) for _ in range(100))
    assert len(stream._buffer) <= most and passed >= 6_000_000 - most and not stream.can_go_on
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    for _ in range(continuation.MAX_HELD * 3):
        stream.receive(hostile(text="", token_ids=[1] * 1000, prompt_token_ids=[1]))
        assert len(stream._held) <= continuation.MAX_HELD
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    for _ in range(3 * continuation.MAX_TOKENS // 1000):
        stream.receive(hostile(token_ids=[1] * 1000, prompt_token_ids=[1]))
    assert not stream.can_go_on and len(stream._out) <= continuation.MAX_TOKENS + 1000


def test_b65_an_engines_error_is_a_break_where_the_stream_can_go_on():
    died = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n'
    wrong = b'data: {"error": {"message": "wrong", "code": 400}}\n\ndata: [DONE]\n\n'
    first = hostile(token_ids=[72], prompt_token_ids=[1])
    shown = first.replace(b"[72]", b"null").replace(b"[1]", b"null")
    for body, events, error in [(asked(COMPLETIONS), died, "EngineCore died"), (asked(COMPLETIONS), wrong, None)]:
        stream = ContinuableStream.of(COMPLETIONS, json.dumps(body).encode())
        assert stream.receive(first + events) == shown + (b"" if error else events)
        assert stream.error == error and stream.can_go_on is bool(error)
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    assert stream.receive(hostile(token_ids=[72]) + died).endswith(died) and stream.error is None, "as without this"


def spoken(text: str, ids: list[int], path: str = COMPLETIONS) -> ContinuableStream:
    """A stream of which this is out."""
    stream = ContinuableStream.of(COMPLETIONS, json.dumps(asked(COMPLETIONS)).encode())
    stream.receive(hostile(text=text, token_ids=ids, prompt_token_ids=[1]))
    return stream


@pytest.mark.parametrize("text, said, same", [
    ("cat", "cat", True), (" cat", "cat", True), (" cat", " cat", True), ("cat", "<special>cat", True),
    ("cat", "cat\ufffd", False), ("cat", "cat<", False), ("cat", "dog", False), ("cat", "", False),
    (" ", " ", True), (" ", "\ufffd", False), ("cat", None, False), ("cat", 5, False)])
def test_b65_the_next_engine_must_say_the_text_that_is_out(text, said, same):
    stream = spoken(text, [5, 6])
    assert json.loads(stream.detokenize_request()) == {"model": "m", "tokens": [5, 6]}
    assert stream.is_out(json.dumps({"prompt": said}).encode()) is same
    assert not any(stream.is_out(body) for body in (b"", b"{}", b"[]", b"\xff", b'{"prompt": "\xff"}'))


def test_b65_only_the_last_events_are_compared_and_none_before_a_special_token():
    stream = spoken("a", [1])
    for token in range(2, 20):
        stream.receive(hostile(text="b", token_ids=[token]))
    assert json.loads(stream.detokenize_request())["tokens"] == [*range(8, 20)]
    for token, text in (30, ""), (31, ""), (32, "c"):
        stream.receive(hostile(text=text, token_ids=[token]))
    assert json.loads(stream.detokenize_request())["tokens"] == [30, 31, 32]
    stream.receive(hostile(text="", token_ids=[33]))
    assert json.loads(stream.detokenize_request())["tokens"] == [30, 31, 32], "it is not out"


def test_b65_of_a_parser_an_event_without_content_waits_for_text():
    """vLLM sends it only where token ids are asked for."""
    for asks in {}, {"return_token_ids": True}:
        stream = ContinuableStream.of(CHAT, json.dumps(asked(CHAT, **asks)).encode())
        events = list(answer(CHAT, asked(CHAT, return_token_ids=True)))
        empty = events[2].replace(b'{"content":""}', b"{}")
        assert empty != events[2] and stream.receive(events[0] + events[1])
        assert not stream.receive(empty) and stream.can_go_on
        assert (b'"delta":{}' in stream.receive(events[3])) is bool(asks) and stream.can_go_on


def test_b65_a_chat_of_a_parser_is_not_continued():
    """What a reasoning parser makes of the tokens, the rest of a completion does not have."""
    for delta in {"reasoning": "hm"}, {"tool_calls": []}:
        stream = ContinuableStream.of(CHAT, json.dumps(asked(CHAT)).encode())
        events = list(answer(CHAT, asked(CHAT, return_token_ids=True)))
        parsed = events[1].replace(b'{"content":"H"}', msgspec.json.encode(delta))
        assert parsed != events[1]
        out = stream.receive(b"".join([events[0], parsed, *events[2:4]]))
        assert not stream.can_go_on and stream.end() is None
        assert msgspec.json.encode(delta) in out and b'"token_ids":[' not in out
