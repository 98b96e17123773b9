# SPDX-License-Identifier: Apache-2.0
"""The file tier: a file for each block, below the arena. It stays when all engines have ended.

A file is the block's sealed header and its bytes, and appears under its name only when all of it was written. There is
no fsync: what a crash of the machine leaves of a file does not pass its check, and is removed when it is read.

The folder is bounded. A process that has written a share of the limit looks at the whole folder and removes the files
that were least recently used. A file lock, which the kernel releases when its owner ends, lets one do it at a time;
where it is taken, blocks are not written rather than waited for.
"""
from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_pd.errors import ConfigError
from vllm_pd.store.blocks import HEADER_BYTES, BlockHeader, BlockKey, checksummer, decode, encode_sealed

READ_BYTES = 256 << 10  # read, then summed while it is in the cache
SHARE = 16  # a process writes 1 / SHARE of the limit before it looks at the folder again
_PARTIAL = ".part-"


class StoredFile(NamedTuple):
    """A file of the folder. `used_ns`: when it was last read or written."""
    used_ns: int
    size: int
    path: str


def choose_removals(files: Iterable[StoredFile], most_bytes: int) -> list[StoredFile]:
    """The least recently used of these files, as many as must go until the others have at most `most_bytes` bytes."""
    files = sorted(files)
    excess = sum(file.size for file in files) - most_bytes
    removals = []
    for file in files:
        if excess <= 0:
            break
        removals.append(file)
        excess -= file.size
    return removals


class FileTier:
    """The files in a folder, as one process sees them. Thread-safe. It keeps no file open between calls."""

    def __init__(self, folder: str | os.PathLike, limit_bytes: int, block_bytes: int):
        """Use or make the folder. All processes together keep it below `limit_bytes` if at most two of them write; each
        further one may add 1 / SHARE of it. Raises ConfigError for a folder that can't be written, or where not SHARE
        blocks of `block_bytes` bytes fit."""
        if limit_bytes < SHARE * (block_bytes + HEADER_BYTES):
            raise ConfigError("file_gib", round(limit_bytes / 2**30, 6), f"a block has {block_bytes} bytes: give at "
                              f"least {SHARE * (block_bytes + HEADER_BYTES) / 2**30:.6f}")
        self.folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._unseen_bytes = limit_bytes  # written since this process has looked at the folder; at first it must
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "looking").touch(mode=0o600)
        except OSError as error:
            raise ConfigError("file_folder", str(folder), f"{error.strerror}: it must be a folder that this user can "
                              "write") from error

    def path(self, key: BlockKey) -> Path:
        """Where the block's file is, if there is one."""
        name = key.name.hex()
        return self.folder / key.model.hex() / name[:2] / name

    def contains(self, key: BlockKey) -> bool:
        """Whether the block seems to be there."""
        return self.path(key).exists()

    def write(self, header: BlockHeader, payload: memoryview) -> bool:
        """Write a block, unless it is there. Returns False if there was no room. Raises OSError."""
        path = self.path(header.key)
        if path.exists():
            return True
        if not self._has_room(HEADER_BYTES + header.length):
            return False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_name(f"{_PARTIAL}{os.getpid()}-{next(self._numbers)}-{path.name[:8]}")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that its writer lives
            _write_all(fd, encode_sealed(header))
            _write_all(fd, payload)
            os.rename(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(fd)
        return True

    def read(self, key: BlockKey, view: memoryview) -> int | None:
        """Fill the view with the block, which must have its length. Returns the checksum of what is now in the view;
        None if there is no block that is whole and right: a file that is not is removed. For `BlockArena.put_from`."""
        path = self.path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            checksum = _read_block(fd, key, view)
            if checksum is None:
                path.unlink(missing_ok=True)
            else:
                os.utime(fd)  # used
        except OSError:
            return None
        finally:
            os.close(fd)
        return checksum

    def files(self) -> Iterator[StoredFile]:
        """All files, in no order. Removes what a killed writer has left of one."""
        for folder, _, names in os.walk(self.folder):
            for name in names if folder != str(self.folder) else ():
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):  # removed meanwhile
                    if name.startswith(_PARTIAL) and _remove_if_left(path):
                        continue
                    status = os.stat(path)
                    yield StoredFile(status.st_mtime_ns, status.st_size, path)

    def _has_room(self, size: int) -> bool:
        with self._mutex:
            if self._unseen_bytes + size > self._limit_bytes // SHARE:
                if not self._make_room():
                    return False
                self._unseen_bytes = 0
            self._unseen_bytes += size
            return True

    def _make_room(self) -> bool:
        """Remove files until there is room for two shares. Returns False if another process is at it."""
        fd = os.open(self.folder / "looking", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in choose_removals(self.files(), self._limit_bytes - 2 * (self._limit_bytes // SHARE)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


def _remove_if_left(path: str) -> bool:
    """Remove a file that nobody writes any more."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _write_all(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view):]


def _read_block(fd: int, key: BlockKey, view: memoryview) -> int | None:
    header = decode(os.pread(fd, HEADER_BYTES, 0))
    if header is None or header.key != key or header.length != len(view):
        return None
    checksum = checksummer(key, len(view))
    at = 0
    while at < len(view):
        got = os.preadv(fd, [view[at:at + READ_BYTES]], HEADER_BYTES + at)
        if not got:
            return None
        checksum.update(view[at:at + got])
        at += got
    return checksum.intdigest() if checksum.intdigest() == header.checksum else None
