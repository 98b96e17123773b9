# SPDX-License-Identifier: Apache-2.0
"""What names a stored block, and the header that goes with its bytes, in shared memory and in a file.

A header is believed only if its seal fits its other fields. The checksum of the payload is seeded with the key and the
length, so bytes of another block, or of another length, never pass for this one.
"""
from __future__ import annotations

import struct
from typing import NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

MAGIC = b"VPDKV\0\0\1"  # the last byte is the version of the format
MODEL_BYTES = 16
NAME_BYTES = 32
HEADER_BYTES = 128
NAME_OFFSET = 24
SEAL_OFFSET = 72
USED_OFFSET = 80
_FIELDS = struct.Struct("<8s16s32sQQ")  # magic, model, name, length, checksum; then the seal
_WORD = struct.Struct("<Q")
AHEAD_NS = 600 * 10**9  # the clock was set back, if a time of use is further ahead of it than this
assert _FIELDS.size == SEAL_OFFSET


Times = TypeVar("Times", int, np.ndarray)


class BlockKey(NamedTuple):
    """The name of a block. `model`: 16 bytes, a digest of all that decides what KV means: model, weights, types, layout
    and rank. `name`: 32 bytes, the chain hash of all tokens up to the end of the block."""
    model: bytes
    name: bytes


class BlockHeader(NamedTuple):
    """What is known of a stored block besides its bytes. `length` is that of the payload, in bytes."""
    key: BlockKey
    length: int
    checksum: int

    def encode(self) -> bytes:
        """The fields without the seal: SEAL_OFFSET bytes."""
        return _FIELDS.pack(MAGIC, self.key.model, self.key.name, self.length, self.checksum)


def seal_of(fields: bytes) -> int:
    """The seal of a header's fields, as from `encode`; never 0, which means that there is no block."""
    return xxh3_64_intdigest(fields) or 1


def encode_sealed(header: BlockHeader) -> bytes:
    """The whole header: HEADER_BYTES bytes."""
    fields = header.encode()
    return (fields + _WORD.pack(seal_of(fields))).ljust(HEADER_BYTES, b"\0")


def decode(data: bytes) -> BlockHeader | None:
    """The header in these HEADER_BYTES bytes; None if there is none, or not a whole one."""
    if len(data) < HEADER_BYTES:
        return None
    seal = _WORD.unpack_from(data, SEAL_OFFSET)[0]
    if not seal or seal != seal_of(data[:SEAL_OFFSET]):
        return None
    magic, model, name, length, checksum = _FIELDS.unpack_from(data)
    return BlockHeader(BlockKey(model, name), length, checksum) if magic == MAGIC else None


def checksummer(key: BlockKey, length: int) -> xxh3_64:
    """What the payload of such a block is to be fed to. Its `intdigest` is the header's `checksum`."""
    return xxh3_64(seed=xxh3_64_intdigest(key.model + key.name + _WORD.pack(length)))


def recency(used_ns: Times, now_ns: int) -> tuple[Times, Times]:
    """By this the least recently used comes first, whether in slots (of an array of times) or in files (of one time).
    A time of use that is yet to come is of a clock that was set back since: what has it comes before all others, or it
    would stay until that time, and what is used now would go instead."""
    return used_ns <= now_ns + AHEAD_NS, used_ns
