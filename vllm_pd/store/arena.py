# SPDX-License-Identifier: Apache-2.0
"""The arena: a file in shared memory with slots of one size, which all processes of a host map.

The file: one page that says how it is divided, the headers, the payloads, each at the beginning of a page. All of its
memory is allocated when it is made, so a full /dev/shm is an error then and no SIGBUS later. A new arena appears under
its name only when it is whole.

A slot's lock is an open-file-description lock of the byte with its number: the kernel releases it when the process
ends, however it ends. Within a process `_SlotLocks` does the same for threads.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from vllm_pd.errors import ConfigError
from vllm_pd.settings.store import DEFAULT_FOLDER
from vllm_pd.store.blocks import (
    HEADER_BYTES,
    NAME_OFFSET,
    SEAL_OFFSET,
    USED_OFFSET,
    BlockHeader,
    BlockKey,
    checksummer,
    decode,
)
from vllm_pd.store.folders import require_own
from vllm_pd.store.slots import (
    FillPayload,
    LockSlot,
    PutResult,
    ReadRecord,
    ScanSet,
    SetGeometry,
    SetScan,
    SetSeal,
    SlotRecord,
    Steps,
    SumPayload,
    TouchSlot,
    UnlockSlot,
    Unseal,
    UpgradeLock,
    WriteFields,
    check,
    lease,
    put,
)

Buffer = bytes | bytearray | memoryview | np.ndarray
Fill = Callable[[memoryview], int | None]  # fills a view; gives the checksum, or None for "not whole"

PAGE = 4096
MAKE_S = 300.0  # how long to wait while another process makes the arena
CHUNK_BYTES = 1 << 20  # copied, then summed while it is in a cache
_MAGIC = b"VPDARENA"
_SUPER = struct.Struct("<8sQQQQ")  # magic, version, slot_bytes, slots, ways
_VERSION = 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_WORD = struct.Struct("<Q")
_HEADER_WORDS = np.dtype({"names": ["name", "seal", "used"], "formats": ["<u8"] * 3, "itemsize": HEADER_BYTES,
                          "offsets": [NAME_OFFSET, SEAL_OFFSET, USED_OFFSET]})  # of the name, the first eight bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: allocate; an error where that can't be, and no signal


class ArenaShape(NamedTuple):
    """How the file is divided: `slots` slots of `slot_bytes` bytes at most."""
    slot_bytes: int
    slots: int

    @classmethod
    def fitting(cls, slot_bytes: int, capacity_bytes: int) -> ArenaShape:
        """The shape with the most slots in `capacity_bytes`, whole sets only. Raises ConfigError if none fits."""
        slots = (capacity_bytes - 2 * PAGE) // (HEADER_BYTES + _pages(slot_bytes))
        if slots < 1:
            raise ConfigError("memory_gib", _gib(capacity_bytes), f"a block has {slot_bytes} bytes, and not one fits: "
                              "give more")
        ways = SetGeometry.of(slots).ways
        return cls(slot_bytes, slots // ways * ways)

    @property
    def geometry(self) -> SetGeometry:
        """The sets of its slots."""
        return SetGeometry.of(self.slots)

    @property
    def payloads(self) -> int:
        """Where the first payload is, in bytes from the beginning of the file."""
        return PAGE + _pages(self.slots * HEADER_BYTES)

    @property
    def file_bytes(self) -> int:
        """The size of the whole file."""
        return self.payloads + self.slots * _pages(self.slot_bytes)

    def header_at(self, slot: int) -> int:
        """Where the header of a slot is."""
        return PAGE + slot * HEADER_BYTES

    def payload_at(self, slot: int) -> int:
        """Where the payload of a slot is."""
        return self.payloads + slot * _pages(self.slot_bytes)

    def encode(self) -> bytes:
        """The first bytes of the file."""
        return _SUPER.pack(_MAGIC, _VERSION, self.slot_bytes, self.slots, self.geometry.ways)


def _gib(size: int) -> float:
    """As a user writes it."""
    return round(size / 2**30, 6)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class BlockArena:
    """One process's map of an arena, at `address`. Thread-safe. Owns the map and a file descriptor; `close` gives them
    back.

    In a child that was forked it is closed: it would keep this process's locks alive.
    """

    def __init__(self, folder: str | os.PathLike, slot_bytes: int, capacity_bytes: int):
        """Open the arena for blocks of up to `slot_bytes` bytes in `folder`, or make it with `capacity_bytes` bytes.
        Raises ConfigError where that can't be, or where there is one with another capacity."""
        self.shape = ArenaShape.fitting(slot_bytes, capacity_bytes)
        self.path = Path(folder) / f"arena-{slot_bytes}"
        fd = _open_or_create(self.path, self.shape, capacity_bytes)
        try:
            self._map = _map_file(fd, self.shape.file_bytes)
            # Another file description for the locks: they last as long as it, and a map that a forked child inherits
            # keeps the one that it was made of.
            self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._bytes = memoryview(self._map)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._headers = np.frombuffer(self._map, _HEADER_WORDS, self.shape.slots, PAGE)
        self._words = self._bytes.cast("Q")  # one aligned store for each word
        self._locks = _SlotLocks(self._fd)
        _open_arenas.add(self)

    def put(self, key: BlockKey, parts: Sequence[Buffer]) -> PutResult:
        """Store the bytes of `parts`, one after the other, as one block. They must not change meanwhile."""
        arrays = [_as_bytes(part) for part in parts]
        return self.put_from(key, sum(map(len, arrays)), lambda view: _copy(key, arrays, view, True))

    def put_from(self, key: BlockKey, length: int, fill: Fill) -> PutResult:
        """Store a block of `length` bytes, which `fill` writes into the view it is given. If it raises, nothing is
        stored. ValueError for a block that is larger than a slot."""
        if not 0 < length <= self.shape.slot_bytes:
            raise ValueError(f"{length} bytes; a slot has {self.shape.slot_bytes}")
        return self.run(put(self.shape.geometry, key, length, time.time_ns()), fill)

    def put_checked(self, key: BlockKey, part: Buffer, checksum: int) -> PutResult:
        """Store the bytes of `part`, if they have this checksum where they are and, should they change meanwhile, where
        they have arrived; TORN otherwise."""
        array = _as_bytes(part)
        if _sum(key, memoryview(array)) != checksum:  # before a slot is taken from another block
            return PutResult.TORN

        def fill(view: memoryview) -> int | None:
            return checksum if _copy(key, [array], view, True) == checksum else None

        return self.put_from(key, len(array), fill)

    def hold(self, key: BlockKey, length: int) -> LeasedBlock | None:
        """Lease a block of exactly `length` bytes, or None. It is not replaced before the lease is released, or this
        process has ended."""
        slot = self.run(lease(self.shape.geometry, key, length, time.time_ns()), None)
        return None if slot is None else LeasedBlock(self, slot, key, length)

    def get(self, key: BlockKey, parts: Sequence[Buffer]) -> bool:
        """Copy a block to `parts`, as long together as the block. Returns False where there is none that is whole and
        right: then what is in `parts` must not be used."""
        arrays = [_as_bytes(part) for part in parts]
        held = self.hold(key, sum(map(len, arrays)))
        if held is None:
            return False
        with held:
            return held.copy_to(arrays)

    def contains(self, key: BlockKey) -> bool:
        """Whether the block seems to be there. Takes no lease: it may be gone at once."""
        return key.model in self.models_of(key.name)

    def models_of(self, name: bytes) -> set[bytes]:
        """Of which models there seem to be blocks with this name: they are all in one set. As `contains`."""
        slots = self.shape.geometry.candidates(BlockKey(b"", name))
        begin_so = np.flatnonzero(self._headers["name"][slots.start:slots.stop] == _WORD.unpack_from(name)[0])
        headers = [self.record(slots[index]).header for index in begin_so]
        return {header.key.model for header in headers if header is not None and header.key.name == name}

    def blocks(self) -> int:
        """How many slots hold a block at present. Reads all headers."""
        return sum(self.record(slot).header is not None for slot in range(self.shape.slots))

    def payload(self, slot: int, length: int) -> memoryview:
        """The bytes of a slot that is leased or locked by the caller."""
        start = self.shape.payload_at(slot)
        return self._bytes[start:start + length]

    def unlock(self, slot: int) -> None:
        """End one lease of a slot."""
        self._locks.unlock(slot)

    def run(self, steps: Steps, payload: Fill | None) -> Any:
        """Do what `steps` asks for, until it returns; `payload` copies or sums. If something raises, what was locked
        here is unlocked."""
        if self._fd < 0:
            raise ValueError("this arena is closed")
        locked: set[int] = set()
        answer = None
        try:
            while True:
                step = steps.send(answer)
                answer = self._do(step, payload)
                if isinstance(step, UnlockSlot):
                    locked.discard(step.slot)
                elif answer is True and isinstance(step, LockSlot):
                    locked.add(step.slot)
        except StopIteration as end:
            return end.value
        except BaseException:
            for slot in locked:
                self._locks.unlock(slot)
            raise

    def close(self) -> None:
        """Give the map back, and release all locks. Idempotent. No other call may run, nor come later."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._words.release()
        self._headers = None
        with contextlib.suppress(BufferError):  # a view of a block is still used: the map ends with it
            self._bytes.release()
            self._map.close()

    def _close_in_child(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _scan(self, step: ScanSet) -> SetScan:
        headers = self._headers[step.slots.start:step.slots.stop]
        is_sealed = headers["seal"] != 0
        matches = np.flatnonzero(is_sealed & (headers["name"] == _WORD.unpack_from(step.key.name)[0]))
        return SetScan([step.slots[index] for index in matches], is_sealed, headers["used"].copy())

    def _write_fields(self, step: WriteFields) -> None:
        start = self.shape.header_at(step.slot)
        self._bytes[start:start + SEAL_OFFSET] = step.header.encode()

    def _do(self, step: NamedTuple, payload: Fill | None) -> Any:
        """Carry out one step of `slots`, the pure rules."""
        match step:
            case ScanSet():
                return self._scan(step)
            case ReadRecord():
                return self.record(step.slot)
            case LockSlot():
                return self._locks.lock(step.slot, step.exclusive)
            case UnlockSlot():
                return self._locks.unlock(step.slot)
            case FillPayload() | SumPayload():
                return payload(self.payload(step.slot, step.length))
            case Unseal():
                return self._set_word(step.slot, SEAL_OFFSET, 0)
            case SetSeal():
                return self._set_word(step.slot, SEAL_OFFSET, step.seal)
            case TouchSlot():
                return self._set_word(step.slot, USED_OFFSET, step.now_ns)
            case WriteFields():
                return self._write_fields(step)
            case UpgradeLock():
                return self._locks.upgrade(step.slot)
        raise TypeError(step)

    def record(self, slot: int) -> SlotRecord:
        """What the header of a slot says."""
        start = self.shape.header_at(slot)
        data = bytes(self._bytes[start:start + HEADER_BYTES])
        return SlotRecord(decode(data), _WORD.unpack_from(data, USED_OFFSET)[0])

    def _set_word(self, slot: int, offset: int, value: int) -> None:
        self._words[(self.shape.header_at(slot) + offset) // 8] = value


class LeasedBlock:
    """A lease of a block in an arena. The caller releases it, also after a check that failed; `with` does that."""

    def __init__(self, arena: BlockArena, slot: int, key: BlockKey, length: int):
        self._arena = arena
        self._slot: int | None = slot
        self.key = key
        self.length = length

    @property
    def bytes(self) -> memoryview:
        """The block, unchecked."""
        return self._arena.payload(self._slot, self.length)

    @property
    def address(self) -> int:
        """Where its bytes are in this process."""
        return self._arena.address + self._arena.shape.payload_at(self._slot)

    @property
    def header(self) -> BlockHeader | None:
        """The header that was written with it; None where the block has been found wrong."""
        return self._arena.record(self._slot).header if self._slot is not None else None

    def is_right(self) -> bool:
        """Whether the block, where it lies, is what was put. Where not, the lease is over, and so is the block."""
        return self._checked(lambda view: _sum(self.key, view))

    def copy_to(self, parts: Sequence[Buffer]) -> bool:
        """Copy the block to `parts`, as long together, and check what has arrived there. As `is_right` otherwise."""
        arrays = [_as_bytes(part) for part in parts]
        if sum(map(len, arrays)) != self.length:
            raise ValueError(f"parts of {sum(map(len, arrays))} bytes for a block of {self.length}")
        return self._checked(lambda view: _copy(self.key, arrays, view, False))

    def release(self) -> None:
        """End the lease. Idempotent."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._arena.unlock(slot)

    def _checked(self, payload: Fill) -> bool:
        if self._slot is None:
            return False
        right = self._arena.run(check(self._slot, self.key, self.length), payload)
        if not right:
            self._slot = None
        return right

    def __enter__(self) -> LeasedBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _SlotLocks:
    """The locks of the slots. Between processes the kernel's, which knows one owner, this file description; between the
    threads of this process a count, 0 < n readers, or -1."""

    def __init__(self, fd: int):
        self._fd = fd
        self._held: dict[int, int] = {}
        self._mutex = threading.Lock()  # never held while anything waits

    def lock(self, slot: int, exclusive: bool) -> bool:
        """Try to lock."""
        with self._mutex:
            held = self._held.get(slot, 0)
            if held < 0 or (exclusive and held):
                return False
            if not held and not self._ask(slot, fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK):
                return False
            self._held[slot] = -1 if exclusive else held + 1
            return True

    def upgrade(self, slot: int) -> bool:
        """Try to make the caller's shared lock exclusive."""
        with self._mutex:
            if self._held.get(slot) != 1 or not self._ask(slot, fcntl.F_WRLCK):
                return False
            self._held[slot] = -1
            return True

    def unlock(self, slot: int) -> None:
        """Give one lock back."""
        with self._mutex:
            held = self._held[slot] - 1
            if held > 0:
                self._held[slot] = held
                return
            del self._held[slot]
            self._ask(slot, fcntl.F_UNLCK)

    def _ask(self, slot: int, kind: int) -> bool:
        try:
            _set_lock(self._fd, slot, kind)
        except OSError:  # someone else has it, or the kernel has no room for locks
            return False
        return True


def _set_lock(fd: int, byte: int, kind: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))


def _check_locks(fd: int, path: Path, byte: int) -> None:
    """Raises ConfigError where the system has no such locks: each slot would seem to be another process's for ever.
    `byte`: of no slot."""
    try:
        _set_lock(fd, byte, fcntl.F_WRLCK)
        _set_lock(fd, byte, fcntl.F_UNLCK)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) not in (errno.EAGAIN, errno.EACCES):  # another process is at the same
            raise ConfigError("folder", str(path.parent), f"files there can't be locked ({error}): use a Python and a "
                              "kernel, or a container runtime, with F_OFD_SETLK") from error


def _as_bytes(part: Buffer) -> np.ndarray:
    return np.frombuffer(part, np.uint8) if not isinstance(part, np.ndarray) else part.reshape(-1).view(np.uint8)


def _copy(key: BlockKey, arrays: Sequence[np.ndarray], view: memoryview, into_view: bool) -> int:
    """Copy between arrays and view. Returns the checksum of the bytes where they have arrived.

    By `np.positive`, a copy in numpy's vector loops: its own copy is memcpy, for which glibc uses `rep movsb` on some
    processors, up to the size of an L2 cache; out of a tmpfs, mostly in pages of 4 KiB, that can be a third as fast.
    """
    checksum = checksummer(key, len(view))
    at, slot = 0, np.frombuffer(view, np.uint8)
    for array in arrays:
        for start in range(0, len(array), CHUNK_BYTES):
            piece = array[start:start + CHUNK_BYTES]
            in_slot = slot[at:at + len(piece)]
            source, target = (piece, in_slot) if into_view else (in_slot, piece)
            np.positive(source, target)
            checksum.update(target)
            at += len(piece)
    return checksum.intdigest()


def _sum(key: BlockKey, view: memoryview) -> int:
    checksum = checksummer(key, len(view))
    checksum.update(view)
    return checksum.intdigest()


def _map_file(fd: int, size: int) -> mmap.mmap:
    """Map a file, in large pages if they are allowed for those who ask."""
    mapped = mmap.mmap(fd, size)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _open_or_create(path: Path, shape: ArenaShape, capacity_bytes: int) -> int:
    """A descriptor of the arena at `path`, which the caller owns. It is made where there is none. Raises ConfigError
    for a folder that is not this user's, is not on a tmpfs or has not enough memory."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kind = file_system_of(path.parent)
        if kind not in (None, "tmpfs"):
            raise ConfigError("folder", str(path.parent), f"it is on {kind}: choose a folder on a tmpfs, like "
                              f"{DEFAULT_FOLDER}, because engines would wait for a disk. In a container, give /dev/shm "
                              "enough memory (--shm-size)")
        require_own("folder", str(path.parent), path.parent)
        with contextlib.suppress(FileNotFoundError):
            return _open(path, shape, capacity_bytes)
        with _only_maker(path.parent):
            with contextlib.suppress(FileNotFoundError):  # another has made it meanwhile
                return _open(path, shape, capacity_bytes)
            _create(path, shape)
            return _open(path, shape, capacity_bytes)
    except OSError as error:
        others = other_arenas(path) if error.errno == errno.ENOSPC else ""
        raise ConfigError("folder", str(path.parent), f"{error.strerror}: it must be a folder of this user on a tmpfs, "
                          f"like {DEFAULT_FOLDER}, with {shape.file_bytes / 2**30:.2f} GiB free, there and in memory"
                          + (f". Remove what no engine uses: {others}" if others else "")) from error


def other_arenas(path: Path) -> str:
    """The arenas beside this one, each with its memory: for blocks of other sizes. Empty if there are none."""
    found = []
    for other in sorted(path.parent.glob("arena-*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            if other != path:
                found.append(f"{other.name} ({other.lstat().st_size / 2**30:.3f} GiB)")
    return ", ".join(found)


def file_system_of(folder: Path) -> str | None:
    """The type of the file system that a folder is on, as the kernel names it. None where /proc does not say."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        line = mount and re.search(rf"^{mount[1]} .*? - (\S+)", mounts, re.MULTILINE)
    except OSError:
        return None
    finally:
        os.close(fd)
    return line[1] if line else None


@contextlib.contextmanager
def _only_maker(folder: Path) -> Iterator[None]:
    """While one process makes an arena, which takes memory, the others wait for it. The kernel ends the lock with the
    process. Raises ConfigError after MAKE_S."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline_s = time.monotonic() + MAKE_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ConfigError("folder", str(folder), f"another process has been making an arena there for "
                                      f"{MAKE_S:g} s: end it, or choose another folder") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _open(path: Path, shape: ArenaShape, capacity_bytes: int) -> int:
    """A descriptor of an existing arena, which the caller owns. Raises ConfigError where it is another user's or has
    another shape, FileNotFoundError where there is none."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise ConfigError("folder", str(path.parent), f"{path} belongs to another user, who could put anything "
                              "into it: choose another folder")
        if status.st_size != shape.file_bytes or os.pread(fd, _SUPER.size, 0) != shape.encode():
            raise ConfigError("memory_gib", _gib(capacity_bytes), f"{path} is there with {status.st_size / 2**30:.3f} "
                              "GiB: give all engines the same, or end those that use it and remove it")
        _check_locks(fd, path, shape.slots)
    except BaseException:
        os.close(fd)
        raise
    return fd


def free_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How much memory may be taken: of the machine's, and within the limit of this container, if it has one. What the
    kernel would give up of files in memory is free."""
    free = psutil.virtual_memory().available
    for limit, used, reclaimable in (("memory.max", "memory.current", "inactive_file"),
                                     ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes",
                                      "total_inactive_file")):
        with contextlib.suppress(OSError, ValueError, KeyError):  # ValueError: "max", for none
            most = int((cgroup / limit).read_text())
            lines = (cgroup / limit).with_name("memory.stat").read_text().splitlines()
            stat = dict(line.split() for line in lines)
            free = min(free, most - int((cgroup / used).read_text()) + int(stat[reclaimable]))
    return free


def _create(path: Path, shape: ArenaShape) -> None:
    """Make the file without a name, so that nothing is left if this process ends, then give it its name. Another may
    have been quicker: then that one is it."""
    space = os.statvfs(path.parent)
    if shape.file_bytes > min(space.f_bavail * space.f_frsize, free_memory_bytes()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before memory is taken from everybody
    fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _check_locks(fd, path, shape.slots)  # before memory is taken
        os.ftruncate(fd, shape.file_bytes)
        with contextlib.suppress(OSError), _map_file(fd, shape.file_bytes) as whole:
            whole.madvise(_POPULATE_WRITE)  # in large pages, where the system has them
        os.posix_fallocate(fd, 0, shape.file_bytes)  # what is not there yet; an error where there is no room
        os.pwrite(fd, shape.encode(), 0)
        try:
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=0)  # with a folder Python follows the link, as is needed
        except FileExistsError:
            return
    finally:
        os.close(fd)


_open_arenas: weakref.WeakSet[BlockArena] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [arena._close_in_child() for arena in list(_open_arenas)])
