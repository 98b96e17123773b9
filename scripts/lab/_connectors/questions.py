# SPDX-License-Identifier: Apache-2.0
"""The prompts of a comparison and their right answers: those of one stock engine without a connector."""
import asyncio
import json
import random
from dataclasses import dataclass

from _chaos.load import SAFE_MARGIN, VOCABULARY

from vllm_pd.bench.connection import LoadConnection
from vllm_pd.bench.load import TOKEN_ID

ANSWER_TOKENS = 8
AT_ONCE = 4
SPARE = 1.25  # prompts drawn for each that is needed, because some have no answer that no rounding changes


@dataclass(frozen=True)
class Question:
    """A prompt, and the tokens that are its right answer."""
    prompt: list[int]
    expected: tuple[int, ...]


def draw_prompts_between(seed: str, count: int, shortest: int, longest: int) -> list[list[int]]:
    """`count` prompts of that many tokens."""
    draw = random.Random(seed)
    return [draw.choices(VOCABULARY, k=draw.randint(shortest, longest)) for _ in range(count)]


def extended(prompts: list[list[int]], seed: str) -> list[list[int]]:
    """Prompts that share a part of their beginning with one of `prompts` each, and go on with something else."""
    draw = random.Random(seed)
    return [one[:draw.randint(len(one) // 4, len(one) - 1)] + draw.choices(VOCABULARY, k=draw.randint(40, 200))
            for one in prompts]


async def answer_all(url: str, model: str, prompts: list[list[int]], margin: float = SAFE_MARGIN,
                     tokens: int = ANSWER_TOKENS) -> list[Question | None]:
    """The questions of these prompts, with answers of so many tokens, from the engine at `url`; None where a rounding
    could change the answer, because two tokens are closer than `margin` in log-probability. Raises LoadError."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> Question | None:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "logprobs": 2, "return_tokens_as_token_ids": True}
        async with places:
            with await LoadConnection.open(url) as connection:
                answer = await connection.exchange("POST", "/v1/completions", json.dumps(body).encode())
        found = answer.required().json()["choices"][0]["logprobs"]
        best = [sorted(choices.values(), reverse=True) for choices in found["top_logprobs"]]
        if min(first - second for first, second, *_ in best) < margin:
            return None
        return Question(prompt, tuple(int(token.removeprefix(TOKEN_ID)) for token in found["tokens"]))

    return await asyncio.gather(*map(one, prompts))
