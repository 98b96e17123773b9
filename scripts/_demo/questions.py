# SPDX-License-Identifier: Apache-2.0
"""The questions of the demo: completions and chats, streamed and not, from one line to a chapter.

The texts are plain sentences from a seeded generator, cut to length by the server's own tokenizer, so that a question
is the same wherever the demo runs.
"""

import random
from dataclasses import dataclass

from vllm_pd.bench.connection import call
from vllm_pd.bench.load import GenerationRequest

ANSWER_TOKENS = 8
PLACES = ("the harbour", "the old mill", "the station", "the market", "the library", "the bridge", "the orchard",
          "the workshop", "the observatory", "the bakery", "the school", "the lighthouse")
PEOPLE = ("Anna", "the captain", "a young engineer", "Mr. Weber", "the gardener", "two students", "the baker",
          "our neighbour", "Dr. Okafor", "the night guard")
DEEDS = ("repaired the clock at", "carried seven boxes to", "drew a map of", "waited until evening near",
         "counted the windows of", "read an old letter about", "planted apple trees behind", "painted the door of")
ENDS = ("and nobody asked why.", "although it was raining.", "before the train left.", "because the lamp was broken.",
        "as they had done every spring.", "and wrote the number down.", "while the others slept.")


@dataclass(frozen=True)
class DemoCase:
    """A question, and whether its prompt should be prefilled remotely."""
    name: str
    request: GenerationRequest
    remote: bool

    @property
    def manner(self) -> str:
        """How it is asked, in words."""
        return ("chat" if self.request.chat else "completion") + (", streamed" if self.request.stream else "")


def cases(url: str, model: str) -> list[DemoCase]:
    """All questions, in the order in which they are asked. `url` is a server with the model, for its tokenizer."""

    def text(tokens: int, seed: int) -> str:
        return _text(url, model, tokens, seed)

    middle, long = text(700, seed=5), text(3980, seed=6)

    def completion(text: str, stream: bool = True) -> GenerationRequest:
        return GenerationRequest(text, ANSWER_TOKENS, stream=stream)

    def chat(text: str, stream: bool = True) -> GenerationRequest:
        return GenerationRequest([{"role": "user", "content": text}], ANSWER_TOKENS, chat=True, stream=stream)

    again = "\n\nThe whole story in one sentence:"
    return [
        DemoCase("a line", completion("The capital of France is the city of Paris, and the capital of Italy is the "
                                      "city of", stream=False), remote=False),
        DemoCase("a short chat", chat("What is the capital of France? Answer in one sentence."), remote=False),
        DemoCase("a paragraph", completion(text(250, seed=1)), remote=False),
        DemoCase("a page, as a chat", chat(text(450, seed=2) + "\n\nWho is mentioned first?", stream=False),
             remote=True),
        DemoCase("a page", completion(text(500, seed=3)), remote=True),
        DemoCase("two pages, as a chat", chat(text(600, seed=4) + "\n\nWhat happened at the bridge?"), remote=True),
        DemoCase("two pages", completion(middle, stream=False), remote=True),
        DemoCase("two pages, known by now", completion(middle + again), remote=False),
        DemoCase("a chapter", completion(long), remote=True),
        DemoCase("a chapter, known by now", completion(long + again), remote=False),
    ]


def pause_prompts(url: str, model: str, chapter_tokens: int) -> tuple[str, str]:
    """A short prompt whose answer runs while the other one, a chapter of so many tokens, is prefilled. Neither begins
    like a prompt of `cases`."""
    return "Once upon a time there was a harbour, and", _text(url, model, chapter_tokens, seed=7)


def _text(url: str, model: str, tokens: int, seed: int) -> str:
    """Sentences, cut off after `tokens` tokens."""
    chance = random.Random(seed)

    def sentence() -> str:
        deed = f"{chance.choice(PEOPLE)} {chance.choice(DEEDS)} {chance.choice(PLACES)}"
        return f"On day {chance.randint(1, 999)} {deed}, {chance.choice(ENDS)}"

    ample = " ".join(sentence() for _ in range(tokens // 10))
    token_ids = call(url, "POST", "/tokenize", {"model": model, "prompt": ample})["tokens"]
    return call(url, "POST", "/detokenize", {"model": model, "tokens": token_ids[:tokens]})["prompt"]
