# SPDX-License-Identifier: Apache-2.0
"""The router's own names for blocks: a chain of hashes over token ids.

An engine's block hashes mean nothing outside of its process. So each full block is named here by xxh3 over its token
ids, seeded with the name of the block before it; the first one is seeded with what the adapter adds to the key. Equal
names therefore mean equal prompts from the first token on (but for one chance in 2^64 a pair; a collision costs a
worse choice of worker, never a wrong answer, because engines match by their own hashes).
"""
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from vllm_pd.errors import ConfigError

TOKEN_BYTES = 4


def root(lora: int | str | None = None) -> int:
    """The seed of a chain's first block. `lora` is what the events call the adapter; None is the base model."""
    return 0 if lora is None else xxh3_64_intdigest(f"lora:{lora}".encode()) or 1


def packed(token_ids: Sequence[int]) -> bytes:
    """The token ids as bytes, four each. ConfigError for what is no list of token ids."""
    try:
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError("token_ids", _brief(token_ids), f"give integers from 0 to 2^32-1 ({error})") from None


def chain(data: bytes, block_size: int, seed: int) -> list[int]:
    """The names of the full blocks of `data` (what `packed` returned), the first seeded with `seed`. A part of a block
    at the end has no name."""
    step = block_size * TOKEN_BYTES
    names = []
    for start in range(0, len(data) - step + 1, step):
        seed = xxh3_64_intdigest(data[start:start + step], seed)
        names.append(seed)
    return names


def apart(data: bytes, block_size: int, seed: int, extras: Sequence[str | None]) -> list[int]:
    """As `chain`, of blocks that their `extras`, one for each, tell apart from others with the same tokens."""
    step = block_size * TOKEN_BYTES
    names = []
    for number, extra in enumerate(extras):
        if extra is not None:
            seed = xxh3_64_intdigest(f"extra:{extra}".encode(), seed)
        seed = xxh3_64_intdigest(data[number * step:(number + 1) * step], seed)
        names.append(seed)
    return names


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
