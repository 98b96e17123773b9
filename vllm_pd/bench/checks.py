# SPDX-License-Identifier: Apache-2.0
"""Checks of a benchmark's options, before anything is started. All raise ConfigError, which names the option; the
types of argparse raise ArgumentTypeError, to which argparse adds the option.
"""

import argparse
import os
from collections.abc import Iterable

from vllm_pd.errors import ConfigError
from vllm_pd.ops.client import is_healthy
from vllm_pd.ops.launch.shares import parse_numbered


def require_at_least(limits: Iterable[tuple[str, float, float]]) -> None:
    """`limits`: option, its value, the least that measures anything."""
    for key, value, least in limits:
        if value < least:
            raise ConfigError(key, value, f"write at least {least}")


def argument_count(text: str) -> int:
    """The value of an argparse option of which at least 1 is needed: its `type`."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} can't be used: write a whole number, at least 1")
    return count


def require_healthy(key: str, urls: Iterable[str]) -> None:
    """A healthy engine must answer at each of `urls`."""
    for url in urls:
        if not is_healthy(url):
            raise ConfigError(key, url, "no healthy engine answers there: start it, or write its URL")


def parse_cores(key: str, text: str) -> tuple[int, ...]:
    """As `parse_numbered`, for cores. This process must be allowed to run on all of them."""
    cores = parse_numbered(key, text)
    if not set(cores) <= os.sched_getaffinity(0):
        raise ConfigError(key, text, f"this process may run on {sorted(os.sched_getaffinity(0))}")
    return cores
