# SPDX-License-Identifier: Apache-2.0
"""The file tier: a file for each block, below the arena. It stays when all engines have ended.

The user names a folder; ours is the one of FOLDER in it, and in that only what has a name as we give them is read,
counted or removed.

A file is the block's sealed header and its bytes, and appears under its name only when all of it was written. There is
no fsync: what a crash of the machine leaves of a file does not pass its check, and is removed when it is read.

The folder is bounded. A process that has written a share of the limit looks at the whole folder and removes the files
that were least recently used. A file lock, which the kernel releases when its owner ends, lets one do it at a time;
where it is taken, blocks are not written rather than waited for.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_pd.errors import ConfigError
from vllm_pd.store.blocks import HEADER_BYTES, BlockHeader, BlockKey, checksummer, decode, encode_sealed, recency
from vllm_pd.store.folders import require_own

READ_BYTES = 256 << 10  # read, then summed while it is in the cache
START_S = 60.0  # how long the disk may take to answer at the start
SHARE = 16  # a process writes 1 / SHARE of the limit before it looks at the folder again
FOLDER = "vllm-pd-store"
_PARTIAL = ".part-"
MODEL_FORM = re.compile(r"[0-9a-f]{32}")  # folders, by the digest of a model
SET_FORM = re.compile(r"[0-9a-f]{2}")  # folders in those, by the first byte of a block's name
BLOCK_FORM = re.compile(r"[0-9a-f]{64}")
_OUR_FORM = re.compile(rf"[0-9a-f]{{64}}|{re.escape(_PARTIAL)}\d+-\d+-[0-9a-f]{{8}}")
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # what is no file must not make us wait


class StoredFile(NamedTuple):
    """A file of the folder. `used_ns`: when it was last read or written."""
    used_ns: int
    size: int
    path: str


def choose_removals(files: Iterable[StoredFile], most_bytes: int, now_ns: int) -> list[StoredFile]:
    """The least recently used of these files, as many as must go until the others have at most `most_bytes` bytes.
    `now_ns`: since 1970."""
    files = sorted(files, key=lambda file: (recency(file.used_ns, now_ns), file))
    excess = sum(file.size for file in files) - most_bytes
    removals = []
    for file in files:
        if excess <= 0:
            break
        removals.append(file)
        excess -= file.size
    return removals


def named_entries(folder: str | os.PathLike, form: re.Pattern, is_folder: bool) -> Iterator[os.DirEntry]:
    """The folders, or else the regular files, in a folder whose names have that form. Follows no link; nothing where
    there is no folder. Raises OSError where it can't be read: it must not pass for an empty one."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if form.fullmatch(entry.name):
                is_wanted = entry.is_dir if is_folder else entry.is_file
                if is_wanted(follow_symlinks=False):
                    yield entry


class FileTier:
    """The files below a folder, as one process sees them. Thread-safe. It keeps no file open between calls."""

    def __init__(self, folder: str | os.PathLike, limit_bytes: int, block_bytes: int):
        """Use or make our folder in `folder`. All processes together keep it below `limit_bytes` if at most two of them
        write; each further one may add 1 / SHARE of it. Raises ConfigError for a folder that can't be written, is
        another user's or does not answer within START_S, or where not SHARE blocks of `block_bytes` bytes fit."""
        if limit_bytes < SHARE * (block_bytes + HEADER_BYTES):
            raise ConfigError("file_gib", round(limit_bytes / 2**30, 6), f"a block has {block_bytes} bytes: give at "
                              f"least {SHARE * (block_bytes + HEADER_BYTES) / 2**30:.6f}")
        self.folder = Path(folder) / FOLDER
        self._limit_bytes = limit_bytes
        self._unseen_bytes = limit_bytes  # written since this process has looked at the folder; at first it must
        self._mutex = threading.Lock()
        self._numbers = itertools.count()
        faults: list[BaseException] = []

        def prepare() -> None:
            try:
                self._prepare(folder)
            except BaseException as fault:
                faults.append(fault)

        # In a thread, because nothing interrupts a call on a disk that hangs. It ends with this process.
        thread = threading.Thread(target=prepare, name="pd-store-folder", daemon=True)
        thread.start()
        thread.join(START_S)
        if thread.is_alive():
            raise ConfigError("file_folder", str(folder), f"its disk has not answered within {START_S:g} s: repair or "
                              "unmount it, or choose a folder on a local disk")
        if faults:
            raise faults[0]

    def _prepare(self, folder: str | os.PathLike) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_own("file_folder", str(folder), self.folder)
            (self.folder / "looking").touch(mode=0o600)
        except OSError as error:
            raise ConfigError("file_folder", str(folder), f"{error.strerror}: it must be a folder that this user can "
                              "write") from error

    def path(self, key: BlockKey) -> Path:
        """Where the block's file is, if there is one."""
        name = key.name.hex()
        return self.folder / key.model.hex() / name[:2] / name

    def contains(self, key: BlockKey) -> bool:
        """Whether the block seems to be there. Raises OSError where the disk does."""
        try:
            return stat.S_ISREG(self.path(key).lstat().st_mode)
        except FileNotFoundError:
            return False

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
        None if there is no block that is whole and right: a file that is not is removed. For `BlockArena.put_from`.
        Raises OSError where the disk does."""
        path = self.path(key)
        try:
            fd = os.open(path, _READ_FLAGS)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):  # none, or a link
                return None
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            checksum = _read_block(fd, key, view)
            if checksum is None:
                path.unlink(missing_ok=True)
            else:
                with contextlib.suppress(OSError):  # a disk that can only be read
                    os.utime(fd)  # used
        finally:
            os.close(fd)
        return checksum

    def files(self) -> Iterator[StoredFile]:
        """All files of ours, in no order. Removes what a killed writer has left of one. Raises OSError where the disk
        does."""
        for model in named_entries(self.folder, MODEL_FORM, True):
            for one_set in named_entries(model.path, SET_FORM, True):
                for entry in named_entries(one_set.path, _OUR_FORM, False):
                    with contextlib.suppress(OSError):  # removed meanwhile
                        if entry.name.startswith(_PARTIAL) and _remove_if_left(entry.path):
                            continue
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(status.st_mtime_ns, status.st_size, entry.path)

    def _has_room(self, size: int) -> bool:
        with self._mutex:
            if self._unseen_bytes + size > self._limit_bytes // SHARE:
                if not self._remove_oldest():
                    return False
                self._unseen_bytes = 0
            self._unseen_bytes += size
            return True

    def _remove_oldest(self) -> bool:
        """Remove files until two shares are free. Returns False if another process is at it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have emptied the user's folder
        fd = os.open(self.folder / "looking", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for file in choose_removals(self.files(), self._limit_bytes - 2 * (self._limit_bytes // SHARE),
                                        time.time_ns()):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True


def _remove_if_left(path: str) -> bool:
    """Remove a file that nobody writes any more."""
    fd = os.open(path, _READ_FLAGS)
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
    """Read the block of a file into `view`. Returns its checksum; None where the file has another block, one of another
    length, or bytes that do not pass the check. What is in `view` must not be used then. Raises OSError."""
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
