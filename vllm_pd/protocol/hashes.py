# SPDX-License-Identifier: Apache-2.0
"""Names for the blocks of a prompt, the same in each process: a chain of hashes over token ids.

An engine's block hashes mean nothing outside its process. These name each full block by xxh3 over its token ids,
seeded with the name of the previous block. The seed of a prompt's first block is `root_seed` of its LoRA adapter. So
equal names mean equal prompts from the first token on. Two different prompts get the same name with a chance of 1 in
2^64; that would cost a worse choice of engine, never a wrong answer, because engines match by their own hashes.
"""
import hashlib
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from vllm_pd.errors import ConfigError
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope

TOKEN_BYTES = 4


def root_seed(lora: int | str | None = None) -> int:
    """The seed of a prompt's first block. `lora` is the adapter's name or number in the events, None the base model."""
    return 0 if lora is None else xxh3_64_intdigest(f"lora:{lora}".encode()) or 1


def scope_seed(scope: PromptScope) -> int:
    """The seed of the first block of a job's prompt, for the names by which its prefill engine is chosen."""
    return root_seed(None) if scope == NO_SCOPE else xxh3_64_intdigest(b"scope:" + scope.digest) or 1


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The token ids as bytes, four each. Raises ConfigError where they are not integers from 0 to 2^32-1."""
    try:
        return array("I", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ConfigError("token_ids", _brief(token_ids), f"give integers from 0 to 2^32-1 ({error})") from None


def token_digest(token_ids: Sequence[int], scope: PromptScope = NO_SCOPE) -> bytes:
    """The SHA-256 of the token ids and, where there is one, of the scope: 32 bytes. Unlike the names below it decides
    whose KV a prompt gets, so nobody must be able to make two prompts with the same one. Raises ConfigError as
    `pack_tokens`."""
    # One byte more than whole tokens, so that no tokens alone are the same bytes.
    return hashlib.sha256(pack_tokens(token_ids) + (scope.digest and scope.digest + b"s")).digest()


def claim_number(secret: bytes, count: int) -> int:
    """The number of the claim with this count: 62 bits, which nobody without the secret can tell from chance."""
    return int.from_bytes(hashlib.blake2b(count.to_bytes(8), key=secret, digest_size=8).digest()) >> 2


def chain(data: bytes, block_size: int, seed: int) -> list[int]:
    """The names of the full blocks of `data` (from `pack_tokens`), the first seeded with `seed`. `block_size` is in
    tokens. An incomplete block at the end has no name."""
    step = block_size * TOKEN_BYTES
    names = []
    for start in range(0, len(data) - step + 1, step):
        seed = xxh3_64_intdigest(data[start:start + step], seed)
        names.append(seed)
    return names


def chain_with_extras(data: bytes, block_size: int, seed: int, extras: Sequence[str | None]) -> list[int]:
    """As `chain`. `extras` has one entry for each block, which distinguishes it from blocks with the same tokens."""
    step = block_size * TOKEN_BYTES
    names = []
    for index, extra in enumerate(extras):
        if extra is not None:
            seed = xxh3_64_intdigest(f"extra:{extra}".encode(), seed)
        seed = xxh3_64_intdigest(data[index * step:(index + 1) * step], seed)
        names.append(seed)
    return names


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
