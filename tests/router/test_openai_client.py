# SPDX-License-Identifier: Apache-2.0
"""B11 through the router: an `openai` client hears the same from the router as from the engine behind it."""

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest

from tests.router.openai_talk import QUESTION, client, conversation
from vllm_pd.bench.dummy import answer_text
from vllm_pd.bench.servers import RouterCommand, Server, Servers


@dataclass
class Pair:
    router: str
    worker: str


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Servers(lambda *_: None) as servers:
        [worker] = servers.dummies(1)
        router = servers.router(RouterCommand.ours("router=--tokenizer none"), [worker.url], Server.routes)
        yield Pair(router.url, worker.url)


def test_b11_the_same_answers(pair):
    routed, bare = dict(conversation(client(pair.router), "dummy")), dict(conversation(client(pair.worker), "dummy"))
    for asked, answer in bare.items():
        assert routed[asked] == answer, asked
    assert bare["chat"]["id"] == "chatcmpl-of-this-client", "the request's id reached the worker"
    assert bare["chat"]["choices"][0]["message"]["content"] == answer_text(8)
    assert len(bare["chat, stream"]) == 8 + 1 and bare["chat, stream"][-1]["usage"]["completion_tokens"] == 8
    assert bare["no prompt of the right kind"][0] == 400


async def test_b11_async_streams_side_by_side(pair):
    async with openai.AsyncOpenAI(base_url=f"{pair.router}/v1", api_key="none", max_retries=0, timeout=60) as asks:
        streams = [await asks.chat.completions.create(model="dummy", messages=QUESTION, max_tokens=count, stream=True)
                   for count in range(1, 9)]
        for count, stream in enumerate(streams, 1):
            text = "".join([chunk.choices[0].delta.content async for chunk in stream])
            assert text == answer_text(count)
