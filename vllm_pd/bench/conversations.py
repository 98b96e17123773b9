# SPDX-License-Identifier: Apache-2.0
"""Conversations with real engines through a router: what their users say and when, and how each request went.

A conversation starts at its time with one of a few system prompts, the popular ones more often. Each further prompt is
the whole conversation so far, with the engine's own answers, and the next question. It comes a random pause after the
answer. Everything random is drawn from a seed before the first request.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.load import GenerationRequest, generate
from vllm_pd.bench.options import ConversationShape
from vllm_pd.errors import PDError

ANSWER_TIMEOUT_S = 180.0
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Conversation:
    """All that its user says. `at_s`: seconds from the beginning of the load to that of the conversation."""
    number: int
    at_s: float
    system: str
    questions: tuple[str, ...]
    pauses_s: tuple[float, ...]


@dataclass(frozen=True)
class ConversationTurn:
    """One request and its answer. `at_s` in seconds since the load began, the other times since the request was
    sent."""
    conversation: int
    turn: int
    at_s: float
    ttft_s: float
    total_s: float
    prompt_tokens: int
    answer_tokens: int
    worker: str
    messages: tuple[tuple[str, str], ...] = field(repr=False)  # (role, content), the answer last

    def figures(self) -> dict[str, Any]:
        """For JSON: all but the messages."""
        found = asdict(self)
        del found["messages"]
        return found


def make(shape: ConversationShape) -> list[Conversation]:
    """The conversations in the order in which they begin."""
    draw = random.Random(shape.seed)
    systems = [_words(draw, shape.system_words) for _ in range(shape.system_prompts)]
    weights = [1 / rank**shape.popularity for rank in range(1, len(systems) + 1)]
    at_s, found = 0.0, []
    for number in range(shape.conversations):
        found.append(Conversation(number, at_s, draw.choices(systems, weights)[0],
                                  tuple(_words(draw, shape.question_words) for _ in range(shape.turns)),
                                  tuple(draw.expovariate(1 / shape.pause_s) for _ in range(shape.turns))))
        at_s += draw.expovariate(shape.conversations_per_s)
    return found


def _words(draw: random.Random, count: int) -> str:
    """Made-up words, so that prompts have equal beginnings only where they are meant to."""
    return " ".join("".join(draw.choice(letters) for letters in (CONSONANTS, VOWELS) * draw.choice((1, 2)))
                    for _ in range(count))


async def hold(url: str, model: str, shape: ConversationShape,
               conversations: Sequence[Conversation]) -> list[ConversationTurn]:
    """Holds all conversations, each at its time, through the router at `url`. The turns in the order in which they were
    sent. Raises PDError when an answer does not come."""
    turns: list[ConversationTurn] = []
    began_s = time.perf_counter()

    async def talk(conversation: Conversation) -> None:
        await asyncio.sleep(max(0.0, conversation.at_s - (time.perf_counter() - began_s)))
        said = [("system", conversation.system)]
        for number, (question, pause_s) in enumerate(zip(conversation.questions, conversation.pauses_s, strict=True)):
            if number:
                await asyncio.sleep(pause_s)
            said.append(("user", question))
            turn = await _take_turn(url, model, shape, conversation.number, number, said, began_s)
            said = list(turn.messages)
            turns.append(turn)

    try:
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(talk(conversation))
    except* (OSError, LoadError) as failed:
        problem = f"the conversations can't go on: {failed.exceptions[0]}"
    else:
        return sorted(turns, key=lambda turn: turn.at_s)
    raise PDError(problem)


async def _take_turn(url: str, model: str, shape: ConversationShape, conversation: int, number: int,
                     said: Sequence[tuple[str, str]], began_s: float) -> ConversationTurn:
    """Sends the conversation so far, `said`, which ends with the question, over a new connection. `began_s`: when the
    load began. Raises LoadError naming the turn, and OSError."""
    request = GenerationRequest([{"role": role, "content": content} for role, content in said], shape.answer_tokens,
                                chat=True, stream=True, ignore_eos=True, token_ids=False)
    headers = {"X-Session-Id": f"conversation-{conversation}", "X-Vllm-Pd-Explain": "1"}
    sent_s = time.perf_counter()
    try:
        with await LoadConnection.open(url) as connection:
            answer = await generate(connection, model, request, headers, sent_s, ANSWER_TIMEOUT_S)
        if not answer.usage[1]:
            raise LoadError("an answer without usage")
    except LoadError as error:
        raise LoadError(f"conversation {conversation}, turn {number}: {error}") from None
    return ConversationTurn(conversation, number, sent_s - began_s, answer.ttft_s, answer.total_s, *answer.usage,
                            answer.headers.get("x-vllm-pd-worker", ""), (*said, ("assistant", answer.text)))
