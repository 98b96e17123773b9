# SPDX-License-Identifier: Apache-2.0
"""Numbered cores or GPUs, and how several engines share them."""
import itertools
from collections.abc import Sequence
from typing import Any

from vllm_pd.errors import ConfigError


def parse_numbered(key: str, text: str) -> tuple[int, ...]:
    """The numbers in `0,1`, each once; none in an empty text. Raises ConfigError naming `key`."""
    try:
        numbers = tuple(int(number) for number in text.split(",") if text)
    except ValueError:
        raise ConfigError(key, text, "write numbers, like 0,1") from None
    if min(numbers, default=0) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(key, text, "write each number once, from 0 on, like 0,1")
    return numbers


def split_evenly(numbers: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """`count` disjoint shares of these GPUs or cores, as equal as possible; all empty where there are fewer of them
    than shares."""
    if len(numbers) < count:
        return [()] * count
    ordered = sorted(numbers)
    edges = [len(ordered) * i // count for i in range(count + 1)]
    return [tuple(ordered[start:end]) for start, end in itertools.pairwise(edges)]
