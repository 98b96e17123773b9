# SPDX-License-Identifier: Apache-2.0
"""Loads as ShareGPT JSON, which `vllm bench serve --dataset-name sharegpt` reads, and such files as loads.

That tool sends the first thing said of each entry as a prompt, and takes the length of the answer from the second. So
each turn of a conversation is an entry of its own, whose prompt is the whole conversation so far.
"""

import random
from pathlib import Path
from typing import Any

from vllm_pd.bench.serve.settings import LoadShape, ServeLoad, TracedPrompt
from vllm_pd.bench.serve.traffic import points
from vllm_pd.bench.serve.words import prose, tokens_of
from vllm_pd.bench.share.records import read_records, refused
from vllm_pd.errors import ConfigError

ENDLESS = (ServeLoad.CHAT_LONG, ServeLoad.CONCURRENCY)
CURE = ('write a ShareGPT file: a list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", '
        '"value": ...}]}')


def exported(shape: LoadShape) -> list[dict[str, Any]]:
    """The requests of the load's first round. Raises ConfigError for a load that has no end."""
    if shape.load in ENDLESS:
        raise ConfigError("--export", shape.load.value, "its streams have no end: export the load conversations, rate "
                          "or trace")
    return [_entry(request.name, request.prompt, request.max_tokens, f"{point.label}, {request.name}")
            for point in points(shape, 0) for chain in point.chains() for request in chain.requests]


def _entry(seed: str, prompt: str, answer_tokens: int, name: str) -> dict[str, Any]:
    answer = prose(random.Random(f"answer {seed}"), answer_tokens)
    return {"id": name, "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def read(path: Path) -> tuple[TracedPrompt, ...]:
    """The prompts of a ShareGPT file, one JSON list or JSON lines; entries without an answer are left out, as vLLM's
    tool does. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError("--trace", str(path), f"there is no such file: {CURE}")
    found = []
    for number, record in enumerate(read_records(path)):
        try:
            prompt, answer = ([part["value"] for part in record.value["conversations"]] + ["", ""])[:2]
            if prompt.strip() and answer.strip():
                name = str(record.value.get("id", number))
                found.append(TracedPrompt(f"{number}: {name}", prompt, max(1, tokens_of(answer))))
        except (AttributeError, KeyError, TypeError, IndexError):
            raise refused(path, record.line, record.value, CURE) from None
    if not found:
        raise ConfigError("--trace", str(path), f"no prompt with an answer is in it: {CURE}")
    return tuple(found)
