# SPDX-License-Identifier: Apache-2.0
"""The requests of a run: what clients ask, what one engine alone answers, and how each ended."""
import random
from dataclasses import dataclass, field
from enum import Enum

BLOCK = 16
VOCABULARY = range(1000, 40000)  # plain tokens of the models' tokenizer
STEMS = 12
SURPLUS = 1.15  # prompts drawn for each that is used, because some have no safe answer
SAFE_MARGIN = 1e-3  # in log-probability between the first and the second choice; float32 sums differ by 1e-5


class RequestEnd(Enum):
    """How a request ended for its client."""
    OPEN = "open"
    ANSWERED = "answered"
    ABORTED = "aborted"


@dataclass
class ChaosRequest:
    """One client's request. `place`: the slot of the decode engine that has it. `tries`: how many decode engines it was
    sent to, because a client asks again when its engine is gone. Times are `time.monotonic()` seconds."""
    number: int
    token_ids: list[int]
    max_tokens: int
    expected: list[int]
    end: RequestEnd = RequestEnd.OPEN
    place: str = ""
    tries: int = 0
    asked_at: float = 0.0
    ended_at: float = 0.0
    right: bool = False
    token_times: list[float] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    hit_by: set[int] = field(default_factory=set)  # numbers of the blows that affected it

    @property
    def name(self) -> str:
        """The request id of the present try."""
        return f"{self.number}.{self.tries}"

    @property
    def answered(self) -> bool:
        return self.end is RequestEnd.ANSWERED

    @property
    def is_open(self) -> bool:
        return self.end is RequestEnd.OPEN

    @property
    def wrong(self) -> bool:
        return self.answered and not self.right


def draw_prompts(seed: int, count: int, longest: int) -> list[tuple[list[int], int]]:
    """(token ids, tokens to generate) of `count` requests: short ones that stay local, long ones, some that share a
    beginning. `longest`: the model's context."""
    draw = random.Random(f"prompts {seed}")
    stems = [draw.choices(VOCABULARY, k=BLOCK * draw.randint(2, 12)) for _ in range(STEMS)]
    prompts = []
    for _ in range(count):
        kind = draw.random()
        if kind < 0.15:
            token_ids = draw.choices(VOCABULARY, k=draw.randint(1, 32))
        elif kind < 0.40:
            token_ids = draw.choice(stems) + draw.choices(VOCABULARY, k=draw.randint(1, 160))
        elif kind < 0.90:
            token_ids = draw.choices(VOCABULARY, k=draw.randint(33, 400))
        else:
            token_ids = draw.choices(VOCABULARY, k=draw.randint(400, longest - 40))
        prompts.append((token_ids, draw.randint(4, 32)))
    return prompts


def safe(expected: dict, wanted: int) -> bool:
    """Whether no rounding can change an answer; else that of one engine alone could change with its batch."""
    return len(expected["tokens"]) == wanted and expected["margin"] >= SAFE_MARGIN
