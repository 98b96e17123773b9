# SPDX-License-Identifier: Apache-2.0
"""A host of the store beyond one host, as a program: an arena of its own with some blocks, and a `FarStore` over it.

    far_host.py SETTINGS FIRST COUNT

SETTINGS: those of the store, in JSON. It puts the blocks FIRST to FIRST + COUNT and says "ready". Then each line of
standard input is a number of blocks, which it fetches from the first one on; it answers with how many it has then, all
checked. It ends with its input.
"""
from __future__ import annotations

import json
import sys
import time

import numpy as np

from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.beyond.far import FarStore
from vllm_pd.store.beyond.waits import WaitAnswer
from vllm_pd.store.blocks import BlockKey

BLOCK = 300_000  # bytes; not a whole number of pages
MODELS = (b"a" * 16, b"b" * 16)


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def content_of(model: bytes, number: int) -> np.ndarray:
    return np.random.default_rng([number, model[0]]).integers(0, 256, BLOCK, np.uint8)


def put(arena: BlockArena, first: int, count: int, models: tuple[bytes, ...] = MODELS) -> None:
    for number in range(first, first + count):
        for model in models:
            arena.put(BlockKey(model, name_of(number)), [content_of(model, number)])


def count_right(arena: BlockArena, count: int) -> int:
    """How many of the first blocks are there. Raises AssertionError where one is not what was put."""
    place = np.zeros(BLOCK, np.uint8)
    for number in range(count):
        for model in MODELS:
            if not arena.contains(BlockKey(model, name_of(number))):
                return number
            assert arena.get(BlockKey(model, name_of(number)), [place]), "it is there, and damaged"
            assert np.array_equal(place, content_of(model, number)), "a wrong block"
    return count


class FarHost:
    """The program, and the test's own one."""

    def __init__(self, settings: dict) -> None:
        self.settings = StoreSettings.parse(settings)
        self.arena = BlockArena(self.settings.folder, BLOCK, self.settings.memory_bytes)
        self.far = FarStore(self.settings, self.arena, MODELS)
        self._requests = 0

    def absent(self, count: int) -> list[bytes]:
        """The names of those of the first blocks that are not here, from the first such on."""
        missing = (number for number in range(count)
                   if not set(MODELS) <= self.arena.models_of(name_of(number)))
        first = next(missing, count)
        return [name_of(number) for number in range(first, count)]

    def fetch(self, count: int) -> int:
        """Fetch what is missing of the first blocks. Returns how many are here then, all right."""
        self._requests += 1
        request, until_s = str(self._requests), time.monotonic() + self.settings.wait_s + 1.0
        while self.far.ask(request, lambda: self.absent(count)) is WaitAnswer.WAIT:
            assert time.monotonic() < until_s, "it waits longer than wait_s"
            time.sleep(0.001)
        self.far.end_request(request)
        return count_right(self.arena, count)

    def close(self) -> None:
        assert self.far.close()
        self.arena.close()


def main() -> None:
    host = FarHost(json.loads(sys.argv[1]))
    put(host.arena, int(sys.argv[2]), int(sys.argv[3]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(host.fetch(int(line)), flush=True)
    host.close()


if __name__ == "__main__":
    main()
