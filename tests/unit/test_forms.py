# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab/compare_forms.py`: what counts as an equal answer, and that the page has the number of forms (B11)."""
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

from _forms.answers import FormAnswer, compare
from _forms.forms import LONG_WORDS, all_forms, long_text

ROOT = Path(__file__).resolve().parents[2]
STREAM = "text/event-stream; charset=utf-8"


def json_answer(value: object, status: int = 200) -> FormAnswer:
    return FormAnswer.of(status, "application/json", json.dumps(value).encode())


def stream(*events: object) -> FormAnswer:
    parts = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    return FormAnswer.of(200, STREAM, "".join(parts).encode())


def chunk(text: str, end: str | None = None, index: int = 0, **more: object) -> dict:
    return {"id": text, "created": 5, "choices": [{"index": index, "text": text, "finish_reason": end, **more}]}


def test_ids_and_times_do_not_count():
    one, other = json_answer({"id": "a", "created": 1, "n": 2}), json_answer({"id": "b", "created": 9, "n": 2})
    assert compare(one, other) is None


def test_the_pieces_of_a_stream_do_not_count():
    beside, logprobs = chunk("x", index=1), {"tokens": ["b"]}
    one = stream(chunk("a"), chunk("b", logprobs=logprobs), beside, chunk("c", "length"), "[DONE]")
    other = stream(beside, chunk("ab", logprobs=logprobs), chunk("c"), chunk("", "length"), "[DONE]")
    assert compare(one, other) is None


@pytest.mark.parametrize("other", [
    stream(chunk("a"), chunk("c", "length"), "[DONE]"),
    stream(chunk("a"), chunk("b", "stop"), "[DONE]"),
    stream(chunk("a"), chunk("b", "length")),
    stream(chunk("a"), chunk("b", "length"), {"error": {"message": "x"}}, "[DONE]"),
    stream(chunk("a", index=1), chunk("b", "length"), "[DONE]"),
    FormAnswer.of(200, "application/json", b"{}"),
    FormAnswer.of(500, STREAM, b"data: [DONE]\n\n"),
])
def test_another_stream_is_seen(other):
    assert compare(stream(chunk("a"), chunk("b", "length"), "[DONE]"), other) is not None


@pytest.mark.parametrize(("one", "other", "where"), [
    ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, ".a[1].b: 2 and 3"),
    ({"a": 1}, {"a": 1, "b": None}, ".b is only in the second"),
    ({"a": [1]}, {"a": [1, 2]}, ".a has 1 and 2 elements"),
    ({"a": 1}, {"a": True}, ".a: 1 and True"),
    ({"a": -1.0}, {"a": -1.1}, ".a: -1.0 and -1.1"),
    ({"error": {"message": "no"}}, {"object": "error", "message": "no"}, ".error is only in the first"),
])
def test_a_difference_is_named(one, other, where):
    assert compare(json_answer(one, 400), json_answer(other, 400)) == where


def test_rounding_does_not_count():
    assert compare(json_answer({"logprob": -1.0}), json_answer({"logprob": -1.0005})) is None


def test_the_forms_have_names_of_their_own_and_texts_that_begin_differently():
    forms = all_forms()
    assert len({form.name for form in forms}) == len(forms) >= 224
    texts = [long_text(form.name) for form in forms if form.is_long]
    assert len({text[:40] for text in texts}) == len(texts)
    assert all(len(text.split()) == LONG_WORDS for text in texts)


def test_the_page_has_the_number_of_forms():
    page = (ROOT / "docs" / "testing.md").read_text()
    assert re.search(rf"compare_forms\.py [^|]*\| [^|]*\b{len(all_forms())} forms", page)
