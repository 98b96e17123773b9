# SPDX-License-Identifier: Apache-2.0
"""Requests to dummy engines: each has a new prompt, and the text of each answer is checked.

The text depends only on the number of tokens (`dummy.answer_text`). So an answer that is cut, doubled or mixed up is an
error, not a fast answer.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_pd.bench.connection import HttpAnswer, LoadConnection, LoadError
from vllm_pd.bench.dummy import answer_text
from vllm_pd.bench.load import RequestTiming

ANSWER_TIMEOUT_S = 60.0
WORDS = ("river", "stone", "cloud", "paper", "light", "music", "seven", "green", "north", "table", "under", "again")
WORDS_PER_TOKEN = 0.75
DRAWN = 256  # texts that follow the numbers
_NUMBER = "#number#"


@dataclass(frozen=True)
class RequestShape:
    """What a request asks for. `prompt_tokens` is an estimate, because the prompt is made of English words."""
    tokens: int
    prompt_tokens: int
    stream: bool = False
    chat: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def bodies(self, draw: random.Random) -> Iterator[bytes]:
        """Requests without end, as JSON. Each prompt begins with a number of its own."""
        drawn = [self._body(draw).split(_NUMBER.encode()) for _ in range(DRAWN)]
        for number in itertools.count():
            before, after = drawn[number % DRAWN]
            yield b"%b%d%b" % (before, number, after)

    def _body(self, draw: random.Random) -> bytes:
        words = draw.choices(WORDS, k=max(1, int(self.prompt_tokens * WORDS_PER_TOKEN)))
        prompt = " ".join([_NUMBER, *words])
        said = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return msgspec.json.encode({"model": "dummy", **said, "max_tokens": self.tokens, "temperature": 0,
                                    "stream": self.stream})

    async def send(self, connection: LoadConnection, body: bytes, name: str = "") -> RequestTiming:
        """Sends one of `bodies`, with `name` as its X-Request-Id. Raises LoadError unless the whole answer comes."""
        answer = await connection.exchange("POST", self.path, body, {"X-Request-Id": name}, ANSWER_TIMEOUT_S)
        self.check(answer.required())
        return RequestTiming(answer.pieces[0][0] - answer.began_s, answer.ended_s - answer.began_s)

    def check(self, answer: HttpAnswer) -> None:
        """Raises LoadError unless `answer` is the whole answer of a dummy to a request of this shape."""
        parts = answer.parts() if self.stream else [answer.json()]
        try:
            text = "".join(map(_text, parts))
        except (KeyError, IndexError, TypeError) as error:
            raise LoadError(f"not an answer ({error!r}): {answer.body[:200]!r}") from error
        if text != answer_text(self.tokens):
            raise LoadError(f"{self.tokens} tokens were asked for, the text is {text[:100]!r} ... {text[-30:]!r}")


def _text(part: dict[str, Any]) -> str:
    choice = part["choices"][0]
    for key in ("delta", "message"):
        if key in choice:
            return choice[key].get("content") or ""
    return choice["text"]
