# SPDX-License-Identifier: Apache-2.0
"""`AdapterReader`: the thread that looks at the files of LoRA adapters and reads them, so that the step loop never
waits for a file system.

An adapter is watched from its load on. Its files count as unchanged while each look equals the one from just before
the load: then all that was read of them since, by the workers, who may load an adapter again at any step, and for the
digest, was the same. One other look, and they have changed for good, whatever later looks are. A look that fails, or
does not end, says nothing: the adapter is not used until the next one that is equal. One that finds no file has found
a change.
"""
from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_pd.model.adapters import Look, digest_adapter, look_at

logger = logging.getLogger("vllm.pd")

LOOK_S = 1.0  # between two looks at each adapter
STALE_S = 5.0  # after which the last look says nothing any more: the file system hangs
JOIN_S = 1.0  # for how long the end of the engine waits for the thread


class AdapterFiles:
    """The files of one adapter, of which `look` was the one just before its load. Its other attributes are set by the
    reader's thread only, and read in any."""

    def __init__(self, folder: Path, settings: str, look: Look) -> None:
        self.folder = folder
        self.settings = settings
        self.look = look
        self.digest = b""  # empty: they have not been read yet
        self.have_changed = False  # for good
        self.unchanged_at = float("-inf")  # when the last look began, on the monotonic clock, unless that failed
        self.read_fails = False

    @property
    def are_as_loaded(self) -> bool:
        """Whether the last look has found them so."""
        return not self.have_changed and self.unchanged_at > float("-inf")

    def are_unchanged(self, now: float) -> bool:
        """Whether they have a digest, and were as at the load a moment ago."""
        return bool(self.digest) and not self.have_changed and now <= self.unchanged_at + STALE_S


class AdapterReader:
    """Owned by the binding, whose `close` ends its thread. That begins with the first adapter, and is a daemon: a file
    system that hangs does not keep the process. `wake` is called in it when a look that was asked for has ended, and
    when what is known of an adapter is another. Whoever calls `watch` bounds how many there are."""

    def __init__(self, wake: Callable[[], None], look: Callable[[Path], Look] = look_at,
                 digest: Callable[..., bytes] = digest_adapter, clock: Callable[[], float] = time.monotonic) -> None:
        self.look = look
        self.clock = clock
        self._wake = wake
        self._digest = digest
        self._watched: list[AdapterFiles] = []
        self._asked = threading.Event()
        self._looked_at = float("-inf")
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def watch(self, folder: Path, settings: str, look: Look) -> AdapterFiles:
        """Look at these files from now on, and read them once. `settings`: see `digest_adapter`."""
        files = AdapterFiles(folder, settings, look)
        self._watched.append(files)
        self.ask()
        if self._thread is None:
            self.start()
        return files

    def unwatch(self, files: AdapterFiles) -> None:
        """These are not used any more."""
        if files in self._watched:
            self._watched.remove(files)

    def ask(self) -> None:
        """Look at all of them at once. `wake` is called when that has ended."""
        self._asked.set()

    def start(self) -> None:
        """Begin the thread."""
        self._thread = threading.Thread(target=self._run, name="vllm-pd-adapters", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent. One that hangs in a file system ends with the process."""
        self._is_closed = True
        self._asked.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def turn(self) -> None:
        """Look at all of them, and read those that were not read: what the thread does again and again."""
        self._look_at_all()
        for files in tuple(self._watched):
            if not files.digest and files.are_as_loaded:
                self._read(files)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self.turn()
            except Exception:  # else it would end, and with it all use of adapters
                logger.exception("unexpected error in the thread that reads adapters")
            self._asked.wait(LOOK_S)

    def _look_at_all(self) -> None:
        was_asked = self._asked.is_set()
        self._asked.clear()  # before the looks: who asks from now on gets others
        self._looked_at = self.clock()
        changes = [self._look_at(files) for files in tuple(self._watched)]
        if was_asked or any(changes):
            self._wake()

    def _look_at(self, files: AdapterFiles) -> bool:
        """Whether that says something else than the look before: they have changed, or can be looked at again."""
        began_at = self.clock()
        try:
            look = self.look(files.folder)
        except (FileNotFoundError, NotADirectoryError):
            look = ()  # nobody knows what was in their place meanwhile
        except OSError:
            files.unchanged_at = float("-inf")
            return False
        if files.have_changed:
            return False
        if look == files.look:
            is_new = files.unchanged_at == float("-inf")
            files.unchanged_at = began_at
            return is_new
        files.have_changed = True
        logger.warning("the files of the LoRA adapter in %s have changed: its prompts stay with this engine, and it "
                       "computes none for others; load changed files by another name or from another path",
                       files.folder)
        return True

    def _read(self, files: AdapterFiles) -> None:
        """The digest is that of the files as they were at the load: the looks before and after it are equal."""
        try:
            digest = self._digest(files.folder, files.look, files.settings, self._go_on_looking)
        except OSError as error:
            if not files.read_fails:
                logger.warning("a LoRA adapter in %s can't be read: %s", files.folder, error)
            files.read_fails = True
            return
        self._look_at(files)
        if files.are_as_loaded:
            files.digest = digest
        self._wake()

    def _go_on_looking(self) -> None:
        """Others are looked at while a large one is read."""
        if self._asked.is_set() or self.clock() >= self._looked_at + LOOK_S:
            self._look_at_all()
