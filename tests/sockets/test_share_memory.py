# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share` reads 10 million tokens within 1 GiB, in a process of its own. Linux counts its peak."""
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOKENS = 10_000_000
VOCABULARY = 128_000


def chats(rng: random.Random) -> Iterator[list[int]]:
    """Each prompt is one of 50 chats that go on, with one of ten system prompts and turns of 200 tokens."""
    systems = [rng.choices(range(VOCABULARY), k=400) for _ in range(10)]
    open_chats: list[list[int]] = []
    while True:
        if len(open_chats) < 50 or rng.random() < 0.2:
            open_chats = [*open_chats[-49:], list(rng.choice(systems))]
        chat = rng.choice(open_chats)
        chat += rng.choices(range(VOCABULARY), k=200)
        yield chat


def short(rng: random.Random) -> Iterator[list[int]]:
    """Prompts of four tokens: the most nodes in the tree."""
    while True:
        yield rng.choices(range(VOCABULARY), k=4)


def new(rng: random.Random) -> Iterator[list[int]]:
    """Nothing repeats: the most distinct blocks."""
    while True:
        yield rng.choices(range(VOCABULARY), k=2000)


def write(prompts: Iterator[list[int]], path: Path, as_text: bool) -> None:
    """A trace of TOKENS tokens. As text each digit counts as one."""
    tokens = 0
    with path.open("w") as file:
        while tokens < TOKENS:
            prompt = next(prompts)
            text = " ".join(map(str, prompt))
            tokens += len(text.replace(" ", "")) if as_text else len(prompt)
            file.write(json.dumps({"prompt": text} if as_text else {"token_ids": prompt}) + "\n")


@pytest.mark.heavy
@pytest.mark.parametrize("prompts, block_size, tokenizer", [
    (chats, 16, False), (chats, 16, True), (short, 16, False), (new, 1, False)])
def test_ten_million_tokens_fit_in_one_gib(prompts, block_size, tokenizer, tmp_path):
    """The tokenizer makes a token of each digit."""
    write(prompts(random.Random(1)), tmp_path / "trace.jsonl", as_text=tokenizer)
    command = [sys.executable, "-m", "vllm_pd.cli", "bench", "share", str(tmp_path / "trace.jsonl"), "--block-size",
               str(block_size), "--cache-blocks", str(TOKENS), "--output", str(tmp_path / "found.json")]
    if tokenizer:
        command += ["--tokenizer", os.environ["VLLM_PD_TINY_MODEL"]]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["unit"] == "tokens" and 0.99 * TOKENS < found["prompt_tokens"] <= TOKENS
    peak_bytes = usage.ru_maxrss * 1024
    print(f"{prompts.__name__}: peak {peak_bytes / 2**20:.0f} MiB")
    assert 32 << 20 < peak_bytes < 1 << 30
