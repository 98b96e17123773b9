# SPDX-License-Identifier: Apache-2.0
"""Readable prompts of a wanted length, drawn from a seed: simple English sentences, all of them different."""

import random

TOKENS_PER_WORD = 1.14  # of the tokenizer of SmolLM2, the full stop included; others are close to it
ADJECTIVES = ("quiet", "bright", "small", "heavy", "early", "narrow", "green", "old", "warm", "simple", "distant",
              "careful", "golden", "empty", "busy", "gentle", "strong", "open", "cold", "young")
NOUNS = ("river", "farmer", "bridge", "market", "teacher", "garden", "letter", "window", "mountain", "sailor", "street",
         "basket", "doctor", "forest", "kitchen", "singer", "harbor", "painter", "village", "engine", "library",
         "child", "winter", "machine", "soldier", "valley", "clock", "student", "island", "neighbor")
VERBS = ("follows", "carries", "paints", "watches", "repairs", "remembers", "crosses", "visits", "describes", "opens",
         "finds", "measures", "answers", "builds", "leaves", "studies", "sells", "protects", "passes", "hears")
PLACES = ("near", "behind", "beside", "above", "before", "beyond", "inside", "around")


def sentence(draw: random.Random) -> str:
    """One sentence of ten words."""
    first, second, third = draw.sample(NOUNS, 3)
    adjectives = draw.sample(ADJECTIVES, 2)
    return (f"The {adjectives[0]} {first} {draw.choice(VERBS)} the {adjectives[1]} {second} {draw.choice(PLACES)} the "
            f"{third}.")


def prose(draw: random.Random, tokens: int) -> str:
    """About `tokens` tokens of sentences, at least one word."""
    words: list[str] = []
    wanted = max(1, round(tokens / TOKENS_PER_WORD))
    while len(words) < wanted:
        words += sentence(draw).split()
    return " ".join(words[:wanted])


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    return round(len(text.split()) * TOKENS_PER_WORD)
