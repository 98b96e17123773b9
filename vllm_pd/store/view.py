# SPDX-License-Identifier: Apache-2.0
"""What EngineCore asks of the store: whether a block seems to be there, without a system call.

The arena is memory. The names of the files are kept by a thread, which lists the folder every REFRESH_S seconds, of its
parts only those that have changed. A disk that hangs holds up this thread and nobody else: what it listed last counts
for STALE_S seconds.
"""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from vllm_pd.settings.store import StoreSettings
from vllm_pd.store.arena import BlockArena, other_arenas
from vllm_pd.store.files import BLOCK_FORM, SET_FORM, FileTier, named_entries

logger = logging.getLogger("vllm.pd")

REFRESH_S = 1.0
STALE_S = 10.0
SETTLED_NS = 10**9  # a folder that was changed this close to when it was listed may have changed again unseen


class StoreView:
    """The blocks of one engine's model in the store. Owns a map of the arena, `arena`, and, with a file tier, a thread
    for each rank."""

    def __init__(self, settings: StoreSettings, slot_bytes: int, models: Collection[bytes]) -> None:
        """`models`: those of the engine's ranks, each of which has its part of a block. Raises ConfigError where the
        arena or the folder can't be used."""
        self._models = frozenset(models)
        self._files: dict[bytes, FileNames] = {}
        if settings.file_folder is not None:
            tier = FileTier(settings.file_folder, settings.file_bytes, slot_bytes)
            self._files = {model: FileNames(tier.folder / model.hex()) for model in models}
        self.arena = BlockArena(settings.folder, slot_bytes, settings.memory_bytes)
        if others := other_arenas(self.arena.path):
            logger.info("store: %s also has arenas for blocks of other sizes, which keep their memory until they are "
                        "removed: %s", settings.folder, others)
        for files in self._files.values():
            files.start()

    def contains(self, name: bytes) -> bool:
        """Whether each rank's part of the block with this name seems to be there. Any may be gone at once."""
        missing = self._models - self.arena.models_of(name)
        return all(name in self._files.get(model, ()) for model in missing)

    def close(self) -> None:
        """End the threads, unless the disk holds them, and give the map back. Idempotent."""
        for files in self._files.values():
            files.close()
        self.arena.close()


class _ListedSet(NamedTuple):
    changed_ns: int | None  # the folder's time when it was listed; None: list it again
    names: frozenset[bytes]


class FileNames:
    """The names of the blocks in a model's folder. `listed_s`, to be read only: when the list that counts was begun."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._sets: dict[bytes, _ListedSet] = {}  # by the first byte; replaced as a whole
        self.listed_s = -STALE_S
        self._end = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pd-store-names", daemon=True)

    def start(self) -> None:
        """Begin to list the folder. Returns when it is listed for the first time, or after STALE_S."""
        self._thread.start()
        self._first.wait(STALE_S)

    def __contains__(self, name: bytes) -> bool:
        listed = self._sets.get(name[:1])
        return listed is not None and name in listed.names and self._clock() - self.listed_s < STALE_S

    def refresh(self) -> None:
        """List what has changed."""
        began_s = self._clock()
        sets = {}
        with contextlib.suppress(OSError):
            for entry in named_entries(self._folder, SET_FORM, True):
                first = bytes.fromhex(entry.name)
                with contextlib.suppress(OSError):
                    sets[first] = self._list_set(entry.path, self._sets.get(first))
        self._sets, self.listed_s = sets, began_s

    def _list_set(self, path: str, known: _ListedSet | None) -> _ListedSet:
        now_ns, changed_ns = time.time_ns(), Path(path).stat().st_mtime_ns
        if known is not None and known.changed_ns == changed_ns:
            return known
        names = frozenset(bytes.fromhex(one.name) for one in named_entries(path, BLOCK_FORM, False))
        return _ListedSet(changed_ns if abs(now_ns - changed_ns) > SETTLED_NS else None, names)

    def close(self) -> None:
        """End the thread as soon as the disk lets it. Idempotent."""
        self._end.set()

    def _run(self) -> None:
        try:
            while True:
                self.refresh()
                self._first.set()
                if self._end.wait(REFRESH_S):
                    return
        except Exception:
            logger.exception("store: files are not offered any more, for their names can't be listed")
