# SPDX-License-Identifier: Apache-2.0
"""A seeded trace of prompts that share prefixes as chats do.

Conversations arrive at random. Each begins with one of a few system prompts (the popular ones far more often). Some go
on with one of a number of long documents that others ask about too. Then turns follow: a question, an answer, a pause,
and the next prompt is the whole conversation so far and the next question. Arrival times are part of the trace and do
not depend on how fast it is served, so that every policy and every bound sees the same requests in the same order.
"""
import math
import random

import msgspec

VOCABULARY = 128_000


class TraceConfig(msgspec.Struct, frozen=True):
    """The shape of the trace. Lengths in tokens; `*_sigma` is that of a log-normal around the median before it."""
    seed: int = 0
    conversations: int = 500
    conversations_per_s: float = 1.5
    system_prompts: int = 12
    system_tokens: int = 500
    system_sigma: float = 0.5
    documents: int = 30
    document_tokens: int = 3000
    document_sigma: float = 0.5
    document_share: float = 0.3  # of the conversations that are about one
    popularity: float = 1.0  # exponent of the Zipf law by which system prompts and documents are chosen
    turns: float = 4.0  # mean; at least one, geometric
    question_tokens: int = 60
    question_sigma: float = 0.8
    answer_tokens: int = 150
    answer_sigma: float = 0.6
    answer_s_per_token: float = 0.03  # to generate and read the answer
    pause_s: float = 20.0  # mean of an exponential, after reading
    longest_tokens: int = 16_000


class Arrival(msgspec.Struct, frozen=True):
    """One request: when it comes, its prompt, its answer, as token ids. `conversation` is the key of its session."""
    at_s: float
    conversation: int
    turn: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make(config: TraceConfig) -> list[Arrival]:
    """The trace, in the order of arrival. Equal configurations give equal traces."""
    rng = random.Random(config.seed)
    systems = [_text(rng, _length(rng, config.system_tokens, config.system_sigma))
               for _ in range(config.system_prompts)]
    documents = [_text(rng, _length(rng, config.document_tokens, config.document_sigma))
                 for _ in range(config.documents)]
    arrivals = []
    start_s = 0.0
    for conversation in range(config.conversations):
        start_s += rng.expovariate(config.conversations_per_s)
        prompt = list(_popular(rng, systems, config.popularity))
        if rng.random() < config.document_share:
            prompt += _popular(rng, documents, config.popularity)
        at_s, turn = start_s, 0
        while True:
            prompt += _text(rng, _length(rng, config.question_tokens, config.question_sigma))
            answer = _text(rng, _length(rng, config.answer_tokens, config.answer_sigma))
            if len(prompt) + len(answer) > config.longest_tokens:
                break
            arrivals.append(Arrival(at_s, conversation, turn, tuple(prompt), tuple(answer)))
            if rng.random() < 1 / config.turns:
                break
            prompt += answer
            at_s += len(answer) * config.answer_s_per_token + rng.expovariate(1 / config.pause_s)
            turn += 1
    arrivals.sort(key=lambda a: (a.at_s, a.conversation))
    return arrivals


def _text(rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(VOCABULARY), k=length)


def _length(rng: random.Random, median: int, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))


def _popular(rng: random.Random, texts: list[list[int]], exponent: float) -> list[int]:
    return rng.choices(texts, [1 / (rank + 1) ** exponent for rank in range(len(texts))])[0]
