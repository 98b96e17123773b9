#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CPU time that the router saves by tokenising only the new part of a chat, and whether the ids are the library's.

Conversations begin with one of a few system prompts and grow by a question and an answer each turn. Each prompt, made
by the tokenizer's chat template, is tokenised twice: the whole text by the library, and with the pieces of earlier
prompts remembered. The ids must be equal. Conversations take turns, as in front of a router, and so do the two ways. A
figure is the median over all conversations and rounds, without the time to make the text.
"""
import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from transformers import AutoTokenizer

from vllm_pd.bench.outputs import argument_file
from vllm_pd.router.token_cache import TokenCache
from vllm_pd.router.tokenizer import encode


def words(rng: random.Random, count: int) -> str:
    """Text of so many made-up words."""
    return " ".join("".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(count))


def conversations(args: argparse.Namespace, rng: random.Random) -> list[list[dict[str, str]]]:
    """The messages of each conversation, an answer after each question."""
    systems = [words(rng, args.system_words) for _ in range(args.system_prompts)]
    return [[{"role": "system", "content": rng.choice(systems)},
             *({"role": role, "content": words(rng, count)} for _ in range(args.turns)
               for role, count in (("user", args.question_words), ("assistant", args.answer_words)))]
            for _ in range(args.conversations)]


def timed(find: Callable[[str], Sequence[int]], text: str) -> tuple[float, Sequence[int]]:
    """(seconds of CPU, ids)."""
    began_s = time.process_time()
    ids = find(text)
    return time.process_time() - began_s, ids


def measure(args: argparse.Namespace) -> dict[str, list]:
    """For each turn: tokens, and milliseconds of both ways. Raises RuntimeError where the ids differ."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    by_library = functools.partial(encode, tokenizer.backend_tokenizer)
    taken_s: dict[str, list[list[float]]] = {way: [[] for _ in range(args.turns)] for way in ("whole", "pieces")}
    tokens: list[list[int]] = [[] for _ in range(args.turns)]
    for number in range(args.rounds):
        pieces = TokenCache(added, by_library)
        chats = conversations(args, random.Random(args.seed + number))
        for turn in range(args.turns):
            for chat in chats:
                text = tokenizer.apply_chat_template(chat[:2 + 2 * turn], tokenize=False, add_generation_prompt=True)
                whole_s, ids = timed(lambda text: by_library([text])[0], text)
                pieces_s, same = timed(pieces.ids, text)
                if list(same) != list(ids):
                    raise RuntimeError(f"turn {turn}: the ids differ for {text!r}")
                tokens[turn].append(len(ids))
                taken_s["whole"][turn].append(whole_s)
                taken_s["pieces"][turn].append(pieces_s)
    return {"turn": list(range(1, args.turns + 1)), "tokens": [statistics.median(count) for count in tokens],
            **{f"{way}_ms": [round(1e3 * statistics.median(one), 4) for one in found]
               for way, found in taken_s.items()}}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tokenizer", required=True, help="a model's folder or name")
    made.add_argument("--conversations", type=int, default=40)
    made.add_argument("--turns", type=int, default=6)
    made.add_argument("--system-prompts", type=int, default=10)
    made.add_argument("--system-words", type=int, default=200)
    made.add_argument("--question-words", type=int, default=40)
    made.add_argument("--answer-words", type=int, default=80)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", type=argument_file, help="write the figures here, too, as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each turn."""
    args = parser().parse_args(argv)
    found = measure(args)
    print("| turn | tokens | whole, ms | pieces, ms | ratio |\n|---|---|---|---|---|")
    for turn, count, whole, pieces in zip(*found.values(), strict=True):
        print(f"| {turn} | {count:.0f} | {whole:.2f} | {pieces:.2f} | {whole / pieces:.1f} |")
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
