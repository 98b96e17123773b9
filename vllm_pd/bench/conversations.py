# SPDX-License-Identifier: Apache-2.0
"""Conversations with real engines through a router: who says what and when, and what each answer has cost.

A conversation begins at its time with one of a few system prompts, the popular ones more often. Each further prompt is
all that was said so far, the engine's own answers included, and the next question; it comes a drawn pause after the
answer. Everything that is drawn is drawn beforehand, from a seed.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import msgspec

from vllm_pd.errors import PDError

ANSWER_TIMEOUT_S = 180.0
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class ConversationShape:
    """The shape of the trace. Lengths in words, about two tokens each; times in seconds."""
    conversations: int = 20
    conversations_per_s: float = 0.5
    system_prompts: int = 6
    system_words: int = 140
    popularity: float = 1.0  # exponent of the Zipf law by which they are chosen
    turns: int = 3
    question_words: int = 12
    answer_tokens: int = 12
    pause_s: float = 4.0  # mean of an exponential
    seed: int = 0


@dataclass(frozen=True)
class Conversation:
    """All that its user says."""
    number: int
    at_s: float
    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]


@dataclass(frozen=True)
class ConversationTurn:
    """One request and what came of it. Times since the trace began, and since the request."""
    conversation: int
    turn: int
    at_s: float
    ttft_s: float
    total_s: float
    prompt_tokens: int
    answer_tokens: int
    worker: str
    messages: tuple[tuple[str, str], ...] = field(repr=False)  # (role, content), the answer last


def make(chats: ConversationShape) -> list[Conversation]:
    """The conversations in the order in which they begin."""
    draw = random.Random(chats.seed)
    systems = [_words(draw, chats.system_words) for _ in range(chats.system_prompts)]
    weights = [1 / rank**chats.popularity for rank in range(1, len(systems) + 1)]
    at_s, found = 0.0, []
    for number in range(chats.conversations):
        found.append(Conversation(number, at_s, draw.choices(systems, weights)[0],
                                  tuple(_words(draw, chats.question_words) for _ in range(chats.turns)),
                                  tuple(draw.expovariate(1 / chats.pause_s) for _ in range(chats.turns))))
        at_s += draw.expovariate(chats.conversations_per_s)
    return found


def _words(draw: random.Random, count: int) -> str:
    """Words that nobody has said before, so that equal beginnings are meant to be equal."""
    return " ".join("".join(draw.choice(letters) for letters in (CONSONANTS, VOWELS) * draw.choice((1, 2)))
                    for _ in range(count))


async def hold(url: str, model: str, chats: ConversationShape,
               conversations: Sequence[Conversation]) -> list[ConversationTurn]:
    """All of them, each at its time, through the router at `url`. Raises PDError when an answer does not come."""
    turns: list[ConversationTurn] = []
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()

        async def talk(conversation: Conversation) -> None:
            await asyncio.sleep(max(0.0, conversation.at_s - (time.perf_counter() - began)))
            said = [("system", conversation.system)]
            for number, (question, pause_s) in enumerate(zip(conversation.questions, conversation.pauses_s,
                                                             strict=True)):
                if number:
                    await asyncio.sleep(pause_s)
                said.append(("user", question))
                turn = await _ask(session, model, chats, conversation.number, number, said, began)
                said = list(turn.messages)
                turns.append(turn)

        try:
            async with asyncio.TaskGroup() as group:
                for conversation in conversations:
                    group.create_task(talk(conversation))
        except* (aiohttp.ClientError, TimeoutError, PDError) as failed:
            first = failed.exceptions[0]
            problem = f"the conversations can't go on: {first or repr(first)}"
        else:
            problem = ""
    if problem:
        raise PDError(problem)
    return sorted(turns, key=lambda turn: turn.at_s)


async def _ask(session: aiohttp.ClientSession, model: str, chats: ConversationShape, conversation: int, number: int,
               said: Sequence[tuple[str, str]], began: float) -> ConversationTurn:
    body = {"model": model, "messages": [{"role": role, "content": content} for role, content in said],
            "max_tokens": chats.answer_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    sent = time.perf_counter()
    text, usage, ttft_s = "", None, math.nan
    headers = {"X-Session-Id": f"conversation-{conversation}", "X-Vllm-Pd-Explain": "1"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as reply:
        if reply.status != 200:
            raise PDError(f"conversation {conversation}, turn {number}: {reply.status} {(await reply.text())[:300]}")
        async for line in reply.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            part = msgspec.json.decode(line.removeprefix(b"data: "))
            if "error" in part:
                raise PDError(f"conversation {conversation}, turn {number}: {part['error']}")
            usage = part.get("usage") or usage
            for choice in part["choices"]:
                content = choice["delta"].get("content") or ""
                if content and not text:
                    ttft_s = time.perf_counter() - sent
                text += content
        total_s = time.perf_counter() - sent
        worker = reply.headers.get("x-vllm-pd-worker", "")
    if usage is None or not text:
        raise PDError(f"conversation {conversation}, turn {number}: an answer without text or usage")
    return ConversationTurn(conversation, number, sent - began, ttft_s, total_s, usage["prompt_tokens"],
                usage["completion_tokens"], worker, (*said, ("assistant", text)))


def without_words(turn: ConversationTurn) -> dict[str, Any]:
    """For JSON: all but what was said."""
    found = asdict(turn)
    del found["messages"]
    return found
