# SPDX-License-Identifier: Apache-2.0
"""The requests in a trace's values. Three kinds of values are known, by their keys:

- a request: `prompt` (text, token ids, or a list of either) or `messages`, as in the OpenAI API, or `token_ids`; beside
  them `answer`, where it is known, as text or token ids like the prompt;
- a conversation of ShareGPT: `conversations`, a list of {"from", "value"}. Each turn of the human is a request, whose
  prompt is the conversation up to there, as a chat client sends it;
- a line of an access log: `request_body`, the body of an HTTP request as text or as an object, and perhaps `status`. In
  a log anything may stand beside requests with prompts, so what is none is skipped and counted.
"""
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from vllm_pd.router.tokenizer import Prompt

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "assistant": "assistant", "system": "system"}
FAILED_STATUS = 400
PROMPT_KEYS = ("token_ids", "messages", "prompt")


class Skip(StrEnum):
    """Why something in a trace does not count."""
    NO_BODY = "no_body"  # a logged request without a body
    NO_PROMPT = "no_prompt"  # a logged request whose body has no prompt, or is no JSON
    FAILED = "failed"  # a logged request that got an error as answer
    EMPTY = "empty"  # a prompt without a token, a conversation without a question
    NO_TEXT = "no_text"  # images, or a length that only the engine knows
    REFUSED = "refused"  # by the tokenizer or its chat template


class NoRequestError(ValueError):
    """A value that is no request. `value` is the part that is wrong, the message the cure."""

    def __init__(self, value: object, cure: str) -> None:
        super().__init__(cure)
        self.value = value


class TraceRequest(NamedTuple):
    """One prompt, with its answer where the trace has it. `prompt.prompt` is one text or a list of token ids; None
    where `prompt.messages` has a chat."""
    prompt: Prompt
    answer: str | list[int] | None = None


def requests_of(value: Any) -> list[TraceRequest] | Skip:
    """The requests of one value of a trace. Raises NoRequestError."""
    if not isinstance(value, dict):
        raise NoRequestError(value, "write an object with prompt, messages, token_ids, conversations or request_body")
    if "conversations" in value:
        return list(_turns(value["conversations"])) or Skip.EMPTY
    if "request_body" in value:
        return _logged(value)
    if not any(value.get(key) is not None for key in PROMPT_KEYS):
        raise NoRequestError(sorted(value), "it needs one of the keys prompt, messages, token_ids, conversations or "
                                            "request_body")
    return list(_requests(value)) or Skip.EMPTY


def _requests(body: Mapping[str, Any]) -> Iterator[TraceRequest]:
    """The requests of an object with `messages`, `token_ids` or `prompt`; several where that is a list of prompts. The
    first of the three that is there counts, in the order `messages`, `token_ids`, `prompt`. Raises NoRequestError."""
    answer = body.get("answer")
    if body.get("messages") is not None:
        messages = body["messages"]
        if not _is_list(messages, dict) or not all(isinstance(message.get("role"), str) for message in messages):
            raise NoRequestError(messages, 'write "messages" as a list of {"role": text, "content": text}')
        prompts, kind = [msgspec.structs.replace(msgspec.convert(body, Prompt), prompt=None)], str
    else:
        given = body["prompt"] if body.get("token_ids") is None else body["token_ids"]
        if not isinstance(given, str) and not any(_is_list(given, kind) for kind in (int, str, list)):
            raise NoRequestError(given, "write a prompt as text or as a list of token ids")
        several = not _is_list(given, int) and isinstance(given, list)
        settings = msgspec.convert(body, Prompt)
        prompts = [msgspec.structs.replace(settings, prompt=one) for one in (given if several else [given])]
        kind = str if isinstance(prompts[0].prompt, str) else list
        if not all(isinstance(one.prompt, str) or _is_list(one.prompt, int) for one in prompts):
            raise NoRequestError(given, "write each prompt as text or as a list of token ids")
    if answer is not None and (len(prompts) > 1 or not isinstance(answer, kind)):
        raise NoRequestError(answer, "write \"answer\" as text or token ids, as the prompt is, beside one prompt")
    for prompt in prompts:
        yield TraceRequest(prompt, answer)


def _turns(conversation: Any) -> Iterator[TraceRequest]:
    """A request for each turn of the human. Its answer is the next turn, if that is the assistant's. Raises
    NoRequestError."""
    cure = f'write "conversations" as a list of {{"from": one of {", ".join(ROLES)}, "value": text}}'
    if not isinstance(conversation, list):
        raise NoRequestError(conversation, cure)
    messages = []
    for turn in conversation:
        if not isinstance(turn, dict) or turn.get("from") not in ROLES or not isinstance(turn.get("value"), str):
            raise NoRequestError(turn, cure)
        messages.append({"role": ROLES[turn["from"]], "content": turn["value"]})
    for number, message in enumerate(messages, 1):
        if message["role"] == "user":
            answered = number < len(messages) and messages[number]["role"] == "assistant"
            yield TraceRequest(Prompt(messages=messages[:number]), messages[number]["content"] if answered else None)


def _logged(value: Mapping[str, Any]) -> list[TraceRequest] | Skip:
    """The requests of a line of an access log, or why it does not count. Other traffic is in a log too, so a body that
    is no request is skipped, and not an error."""
    body, status = value["request_body"], str(value.get("status"))
    if status.isdecimal() and int(status) >= FAILED_STATUS:
        return Skip.FAILED
    try:
        if isinstance(body, str) and body.strip() not in ("", "-"):
            body = msgspec.json.decode(body)
        if not isinstance(body, dict):
            return Skip.NO_BODY if not body or isinstance(body, str) else Skip.NO_PROMPT
        if not any(body.get(key) is not None for key in PROMPT_KEYS):
            return Skip.NO_PROMPT
        return list(_requests(body)) or Skip.EMPTY
    except (msgspec.MsgspecError, NoRequestError, RecursionError, UnicodeError):
        return Skip.NO_PROMPT


def _is_list(value: Any, kind: type) -> bool:
    """Whether this is a list that is not empty, and has elements of this kind only."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and all(
        isinstance(one, kind) and not isinstance(one, bool) for one in value)
