# SPDX-License-Identifier: Apache-2.0
"""A digest of a checkpoint's weights to which every tensor contributes, without reading all bytes.

Two engines whose checkpoints have different digests refuse each other, so a fine-tuned model must not have the digest
of its base. A file is divided into `Stretch`es. Of each stretch the digest has the size and some pieces of
`PIECE_BYTES`: one at its beginning, one at its end, and others between, so that two neighbours begin at most `every`
bytes apart.

- safetensors, GGUF: the whole header, and a stretch for each tensor.
- PyTorch's zip files: the whole directory of members, which has the size and the CRC-32 of each, and a stretch for each
  stored tensor; all other members, such as the tensors' names, whole.
- Anything else: one stretch for the file, with pieces `OPAQUE_EVERY_BYTES` apart.

The digest depends on bytes and file names only, not on the folder, on times or on the machine.
"""
from __future__ import annotations

import functools
import hashlib
import itertools
import json
import mmap
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 16 << 10
TENSOR_EVERY_BYTES = 64 << 20  # most tensors are smaller and have two pieces
OPAQUE_EVERY_BYTES = 1 << 20
READERS = 16  # threads: disks, and even more network file systems, serve several reads at a time
BATCH = 4096
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
INDEX_SUFFIX = ".index.json"  # such a file may select some of the weight files
CODE_SUFFIX = ".py"
_HEADER_MAX_BYTES = 100_000_000  # the limit of the safetensors format


class Stretch(NamedTuple):
    """`size` bytes of a file from `start`, of which a piece is read every `every` bytes."""
    start: int
    size: int
    every: int


def weight_files(path: Path) -> list[Path]:
    """The files of a folder that may hold weights, sorted by name. For the path of a file, that path."""
    return [path] if path.is_file() else _files(path, SUFFIXES)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted((file for file in folder.iterdir() if file.name.endswith(suffixes) and file.is_file()),
                  key=lambda file: file.name)


def index_files(path: Path) -> list[Path]:
    """The index files of a folder, which may select some of its weight files. None for the path of a file."""
    return [] if path.is_file() else _files(path, (INDEX_SUFFIX,))


def state_of_weights(path: Path) -> list[tuple[str, int, int]]:
    """(name, size in bytes, time of the last change in ns since 1970) of each weight and index file, links followed."""
    files = [(file.name, file.stat()) for file in (*weight_files(path), *index_files(path))]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in files]


def digest_code(path: Path) -> str:
    """The SHA-256 digest, in hex, of a folder's Python files: a model may bring its own code. For the path of a file,
    that of no files."""
    digest = hashlib.sha256()
    for file in [] if path.is_file() else _files(path, (CODE_SUFFIX,)):
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def digest_weights(path: Path) -> bytes:
    """The SHA-256 digest, 32 bytes, of a checkpoint: a folder of weight files, or one file, whose name does not count.

    Raises OSError for a file that can't be read.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(READERS, thread_name_prefix="pd-weights") as readers:
        for file in (*weight_files(path), *index_files(path)):
            digest.update(b"" if file == path else file.name.encode() + b"\0")
            digest.update(file.stat().st_size.to_bytes(8, "big"))
            descriptor = os.open(file, os.O_RDONLY)
            try:
                pieces = (piece for stretch in _stretches(file) for piece in _pieces(stretch))
                while batch := list(itertools.islice(pieces, BATCH)):
                    for answer in readers.map(functools.partial(_digest_piece, descriptor), batch):
                        digest.update(answer)
            finally:
                os.close(descriptor)
    return digest.digest()


def _digest_piece(descriptor: int, piece: tuple[int, int]) -> bytes:
    start, size = piece
    head = start.to_bytes(8, "big") + size.to_bytes(8, "big")
    return hashlib.sha256(head + os.pread(descriptor, size, start)).digest()


def _pieces(stretch: Stretch) -> Iterator[tuple[int, int]]:
    last = max(0, stretch.size - PIECE_BYTES)
    for offset in (*range(0, last, stretch.every), last):
        yield stretch.start + offset, min(PIECE_BYTES, stretch.size)


def _stretches(file: Path) -> list[Stretch]:
    """The stretches of a file. One whose content does not fit its name counts as opaque; vLLM will fail to load it."""
    size = file.stat().st_size
    try:
        if file.name.endswith(".safetensors"):
            return _safetensors(file)
        if file.name.endswith(INDEX_SUFFIX):
            return [_whole(0, size)]
        if zipfile.is_zipfile(file):
            return _zip(file, size)
        with open(file, "rb") as opened:
            if opened.read(4) == b"GGUF":
                return _gguf(file, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zipfile.BadZipFile):
        pass
    return [Stretch(0, size, OPAQUE_EVERY_BYTES)]


def _whole(start: int, end: int) -> Stretch:
    return Stretch(start, end - start, PIECE_BYTES)


def _safetensors(file: Path) -> list[Stretch]:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _HEADER_MAX_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(opened.read(length))
    data = 8 + length
    offsets = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    return [_whole(0, data), *(Stretch(data + first, last - first, TENSOR_EVERY_BYTES) for first, last in offsets)]


def _zip(file: Path, size: int) -> list[Stretch]:
    with zipfile.ZipFile(file) as archive:
        members, directory = sorted(archive.infolist(), key=lambda member: member.header_offset), archive.start_dir
    stretches = [_whole(directory, size)]
    ends = [member.header_offset for member in members[1:]] + [directory]
    for member, end in zip(members, ends, strict=True):
        stored = "/data/" in member.filename
        stretches.append(Stretch(member.header_offset, end - member.header_offset,
                                 TENSOR_EVERY_BYTES if stored else PIECE_BYTES))
    return stretches


def _gguf(file: Path, size: int) -> list[Stretch]:
    """Parsed here because the format's own library takes seconds to build the vocabulary, which is not needed."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _GGUFHeader(data)
        offsets = header.read_offsets()
    ends = [*offsets[1:], size]
    return [_whole(0, offsets[0] if offsets else size),
            *(Stretch(start, end - start, TENSOR_EVERY_BYTES) for start, end in zip(offsets, ends, strict=True))]


class _GGUFHeader:
    """Parses the header of a GGUF file."""
    SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    U32, STRING, ARRAY = 4, 8, 9

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4  # after the magic

    def read_offsets(self) -> list[int]:
        """The offsets of the tensors in the file, in bytes, sorted. Raises ValueError for an invalid header."""
        version, alignment = self._number(4), 32
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensors, pairs = self._number(8), self._number(8)
        for _ in range(pairs):
            key, kind = self._string(), self._number(4)
            if key == b"general.alignment" and kind == self.U32:
                alignment = self._number(4)
            else:
                self._skip(kind)
        offsets = []
        for _ in range(tensors):
            self._string()
            dimensions = self._number(4)
            self._at += 8 * dimensions + 4  # after each of them, and the type
            offsets.append(self._number(8))
        start = -(-self._at // alignment) * alignment
        return sorted(start + offset for offset in offsets)

    def _skip(self, kind: int) -> None:
        """Moves past a value of this type, by its number in the format. Strings, and arrays of them or of arrays, have
        to be read to know their sizes."""
        if kind == self.STRING:
            self._string()
        elif kind == self.ARRAY:
            kind, count = self._number(4), self._number(8)
            if kind in self.SCALAR_BYTES:
                self._at += count * self.SCALAR_BYTES[kind]
            else:
                for _ in range(count):
                    self._skip(kind)
        else:
            self._at += self.SCALAR_BYTES[kind]

    def _string(self) -> bytes:
        length = self._number(8)
        self._at += length
        return self._data[self._at - length:self._at]

    def _number(self, size: int) -> int:
        self._at += size
        if self._at > len(self._data):
            raise ValueError("it ends within its header")
        return int.from_bytes(self._data[self._at - size:self._at], "little")
