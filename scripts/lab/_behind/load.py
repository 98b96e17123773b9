# SPDX-License-Identifier: Apache-2.0
"""The steady load: clients that ask one short question after another, and long prompts at random times, all with known
answers.

Three of four answers are streamed. The first bytes of a stream leave an engine before its first token does, so no
gateway can send it to another engine after that; an answer that is not streamed can be asked for again.
"""
import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from _connectors.questions import Question, answer_all, draw_prompts_between

from _behind.gateways import UPSTREAM_HEADER
from vllm_pd.bench.connection import LoadConnection, LoadError
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest, generate

SPARE = 2.0  # prompts drawn for each that is used: those that a rounding could change are left out
STREAMED = 4  # every so many short answers one is not streamed
ANSWER_S = 120.0  # by then a request must have ended, whatever happens
SHORT_TOKENS, LONG_ANSWER_TOKENS = (20, 60), 8


@dataclass(frozen=True)
class LoadShape:
    """What the clients do. Lengths in tokens."""
    clients: int
    answer_tokens: int
    long_tokens: int
    long_every_s: float
    questions: int


@dataclass(frozen=True)
class LoadQuestions:
    """All that is asked, in turn, and the tokens that are the right answers."""
    short: list[Question]
    long: list[Question]


@dataclass(frozen=True)
class AskedRequest:
    """One request. Times are `time.perf_counter()`. `engine`: as the gateway names it, "" where it does not. `begun`:
    whether the answer's header has come. Without an answer `error` says why."""
    long: bool
    stream: bool
    sent_s: float
    ended_s: float
    engine: str
    begun: bool
    answer: GenerationAnswer | None
    expected: tuple[int, ...]
    error: str = ""

    @property
    def changed(self) -> bool:
        """Whether the answer has other tokens than it should have."""
        return self.answer is not None and self.answer.token_ids != self.expected

    def pauses(self) -> Iterator[tuple[float, float]]:
        """(when it ended, its seconds) of each time between two tokens of a streamed answer."""
        if self.answer is not None and self.stream:
            arrivals_s = self.answer.arrivals_s
            for earlier_s, later_s in itertools.pairwise(arrivals_s):
                yield self.sent_s + later_s, later_s - earlier_s


async def draw_questions(url: str, model: str, shape: LoadShape, seed: int) -> LoadQuestions:
    """The questions, with the answers of the stock engine at `url`. Raises LoadError where too few are safe."""
    drawn = []
    for kind, tokens, lengths in (("short", shape.answer_tokens, SHORT_TOKENS),
                                  ("long", LONG_ANSWER_TOKENS, (shape.long_tokens * 3 // 4, shape.long_tokens))):
        prompts = draw_prompts_between(f"{seed} {kind}", round(SPARE * shape.questions), *lengths)
        answered = await answer_all(url, model, prompts, tokens=tokens)
        safe = [one for one in answered if one is not None][:shape.questions]
        if len(safe) < shape.questions // 2:
            raise LoadError(f"only {len(safe)} of {len(prompts)} {kind} prompts have an answer that no rounding "
                            "changes: choose another --seed, or shorter answers")
        drawn.append(safe)
    return LoadQuestions(*drawn)


class NotedConnection(LoadConnection):
    """Says what has come of an answer that did not end well."""

    def header(self) -> tuple[bool, str]:
        """Whether the answer has begun, and the engine that it names."""
        return bool(self._answer.header_lines), self._answer.headers.get(UPSTREAM_HEADER, "")


class SteadyLoad:
    """Sends from `start` to `stop`, in a thread of its own. `asked` has all requests that have ended."""

    def __init__(self, url: str, model: str, shape: LoadShape, questions: LoadQuestions, seed: int) -> None:
        self.asked: list[AskedRequest] = []
        self._url, self._model, self._shape, self._questions, self._seed = url, model, shape, questions, seed
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send()), name="load")
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def stop(self) -> None:
        """Sends nothing new. Returns when all requests have ended. Raises what ended the load before."""
        self._ending.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    async def _send(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._shape.clients):
                    group.create_task(self._follow(number))
                group.create_task(self._send_long(group))
        except BaseException as error:
            self._error = error

    async def _follow(self, client: int) -> None:
        await asyncio.sleep(client / self._shape.clients)  # they shall not run in step
        draw = random.Random(f"{self._seed} client {client}")
        for turn in itertools.count(client):
            if self._ending.is_set():
                return
            await self._ask(draw.choice(self._questions.short), stream=turn % STREAMED > 0)

    async def _send_long(self, group: asyncio.TaskGroup) -> None:
        draw = random.Random(f"{self._seed} long")
        while not self._ending.is_set():
            group.create_task(self._ask(draw.choice(self._questions.long), long=True))
            pause_s = draw.expovariate(1 / self._shape.long_every_s)
            until_s = time.perf_counter() + pause_s
            while not self._ending.is_set() and (left_s := until_s - time.perf_counter()) > 0:
                await asyncio.sleep(min(0.2, left_s))

    async def _ask(self, question: Question, stream: bool = True, long: bool = False) -> None:
        request = GenerationRequest(question.prompt, len(question.expected), stream=stream, ignore_eos=True)
        sent_s, answer, error, begun, engine = time.perf_counter(), None, "", False, ""
        try:
            with await NotedConnection.open(self._url) as connection:
                try:
                    answer = await generate(connection, self._model, request, began_s=sent_s, timeout_s=ANSWER_S)
                finally:
                    begun, engine = connection.header()
        except (OSError, LoadError) as failed:
            error = str(failed)
            await asyncio.sleep(0.2)  # a gateway that refuses all must not be asked without end
        self.asked.append(AskedRequest(long, stream, sent_s, time.perf_counter(), engine, begun, answer,
                                       question.expected, error))
