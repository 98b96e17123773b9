# SPDX-License-Identifier: Apache-2.0
"""What an `openai` client hears from a server, in a form that two servers can be compared by."""

from collections.abc import Iterator
from typing import Any

import openai

QUESTION = [{"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": "Which city is the capital of France?"}]
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 8}
USAGE = {"stream_options": {"include_usage": True}}
TIMES = ("created", )  # what may differ between two answers to one request; ids are given by the client


def client(url: str, key: str = "none") -> openai.OpenAI:
    """No retries: each answer is the server's first."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def conversation(asks: openai.OpenAI, model: str) -> Iterator[tuple[str, Any]]:
    """(what was asked, all that was answered but the times), one after the other."""
    named = {"model": model, "extra_headers": {"X-Request-Id": "of-this-client"}}
    yield "models", [card.id for card in asks.models.list()]
    yield "chat", _kept(asks.chat.completions.create(messages=QUESTION, **GREEDY, **named))
    yield "chat, stream", [*map(_kept, asks.chat.completions.create(messages=QUESTION, stream=True, **GREEDY, **USAGE,
                                                                    **named))]
    yield "completion", _kept(asks.completions.create(prompt=PROMPT, **GREEDY, **named))
    yield "completion, stream", [*map(_kept, asks.completions.create(prompt=PROMPT, stream=True, **GREEDY, **USAGE,
                                                                     **named))]
    yield "token ids", _kept(asks.completions.create(prompt=[100, 200, 300], **GREEDY, **named))
    yield "raw headers", asks.chat.completions.with_raw_response.create(
        messages=QUESTION, **GREEDY, **named).headers.get("content-type")
    yield "no prompt of the right kind", _refused(asks, named, messages="what")


def _refused(asks: openai.OpenAI, named: dict[str, Any], **wrong: Any) -> tuple[int, Any]:
    try:
        asks.chat.completions.create(**wrong, **GREEDY, **named)
    except openai.APIStatusError as error:
        return error.status_code, error.body
    raise AssertionError(f"{wrong} was answered")


def _kept(answer: Any) -> dict[str, Any]:
    return {key: value for key, value in answer.model_dump().items() if key not in TIMES}
