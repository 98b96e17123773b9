# SPDX-License-Identifier: Apache-2.0
"""`BlockStore`: the arena and, if wanted, the file tier below it, as one process of an engine uses them.

Life of a block: `put` copies it into the arena, where all processes of the host can read it at once, and a thread
writes it to a file. When its slot is taken for another block, the file stays; `fetch` brings it back. A file that is
not read goes when the tier is full. Nothing here fails a request: what can't be stored or read is not there.
"""
from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import BlockArena, Buffer, LeasedBlock
from vllm_pd.store.blocks import BlockKey
from vllm_pd.store.files import FileTier
from vllm_pd.store.slots import PutResult

logger = logging.getLogger("vllm.pd")

QUEUED_BLOCKS = 1024  # that wait for their file; more are not written
CLOSE_S = 5.0
FULL_S = 60.0  # without files, after the disk was full


@dataclass(frozen=True)
class _FileJob:
    key: BlockKey
    length: int


class BlockStore:
    """A process's way to the store. Thread-safe. Owns the arena's map and, from the first block on that gets a file, a
    thread; `close` ends them.

    `counts`: by what has become of each call, in `BLOCK_EVENTS`. Of `put` the values of `PutResult`; of `fetch`
    "memory", "file", "missing"; of the thread "written", "no_room", "gone" (before its file was written), "not_queued";
    of either "error".
    """

    def __init__(self, settings: StoreSettings, slot_bytes: int):
        """Raises ConfigError where the arena or the folder can't be used."""
        self.arena = BlockArena(settings.folder, slot_bytes, settings.memory_bytes)
        self.files = None
        self.counts: Counter[str] = Counter()
        self._mutex = threading.Lock()
        self._jobs: queue.Queue[_FileJob | None] = queue.Queue(QUEUED_BLOCKS)
        self._thread = None
        self._known_causes: set[object] = set()
        self._full_until_s = 0.0
        if settings.file_folder is not None:
            try:
                self.files = FileTier(settings.file_folder, settings.file_bytes, slot_bytes)
            except BaseException:
                self.arena.close()
                raise

    def put(self, key: BlockKey, parts: Sequence[Buffer]) -> PutResult:
        """Store a block: the bytes of `parts`, which must not change meanwhile."""
        result = self.arena.put(key, parts)
        self._count(result.value)
        if result is PutResult.STORED and self.files is not None:
            self._start()
            try:
                self._jobs.put_nowait(_FileJob(key, sum(memoryview(part).nbytes for part in parts)))
            except queue.Full:
                self._count("not_queued")
        return result

    def fetch(self, key: BlockKey, length: int) -> LeasedBlock | None:
        """Lease a block of `length` bytes in the arena, where it is brought from its file if need be: that may take as
        long as the disk takes. None if there is none. The caller checks it (`LeasedBlock`) and releases it."""
        held = self.arena.hold(key, length)
        if held is not None:
            self._count("memory")
            return held
        if self._has_file(key):
            try:
                self.arena.put_from(key, length, lambda view: self.files.read(key, view))
            except OSError as error:
                self._note_error(error)
            held = self.arena.hold(key, length)
        self._count("missing" if held is None else "file")
        return held

    def get(self, key: BlockKey, parts: Sequence[Buffer],
            copying: contextlib.AbstractContextManager | None = None) -> bool:
        """Copy a block to `parts`, as long together. Returns False where there is none that is whole and right: then
        what is in `parts` must not be used. A block that is wrong in the arena is sought in its file. `copying` is
        entered around each copy."""
        length = sum(memoryview(part).nbytes for part in parts)
        for _ in range(2):
            held = self.fetch(key, length)
            if held is None:
                return False
            with held, copying or contextlib.nullcontext():
                if held.copy_to(parts):
                    return True
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until the blocks that were put have their files. Returns False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._jobs.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.005)
        return not self._jobs.unfinished_tasks

    def close(self) -> None:
        """Write what is queued, at most for CLOSE_S, end the thread and give the map back. Idempotent."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            try:
                self._jobs.put(None, timeout=CLOSE_S)
                thread.join(CLOSE_S)
            except queue.Full:
                pass
            if thread.is_alive():
                logger.warning("store: %d blocks have no file yet; their slots stay mapped until this process ends",
                               self._jobs.qsize())
                return
        self.arena.close()

    def take_stock(self) -> Counter[str]:
        """A copy of `counts`."""
        with self._mutex:
            return self.counts.copy()

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_files, name="pd-store-files", daemon=True)
                self._thread.start()

    def _count(self, what: str) -> None:
        with self._mutex:
            self.counts[what] += 1

    def _write_files(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._count(self._write_file(job))
            except Exception as error:
                self._note_error(error)
            finally:
                self._jobs.task_done()

    def _has_file(self, key: BlockKey) -> bool:
        try:
            return self.files is not None and self.files.contains(key)
        except OSError as error:
            self._note_error(error)
            return False

    def _note_error(self, error: Exception) -> None:
        """Count it, and log the first of its kind."""
        self._count("error")
        cause = getattr(error, "errno", None) or type(error)
        if cause in (errno.ENOSPC, errno.EDQUOT):
            self._full_until_s = time.monotonic() + FULL_S
        if cause not in self._known_causes:
            self._known_causes.add(cause)
            logger.warning("store: %s, with files in %s; more errors of this kind are only counted "
                           "(vllm:pd_store_blocks_total)", error, self.files.folder,
                           exc_info=not isinstance(error, OSError))

    def _write_file(self, job: _FileJob) -> str:
        if time.monotonic() < self._full_until_s:
            return "no_room"
        held = self.arena.hold(job.key, job.length)
        if held is None:
            return "gone"
        with held:
            return "written" if self.files.write(held.header, held.bytes) else "no_room"
