# SPDX-License-Identifier: Apache-2.0
"""The store over a disk that fails, hangs or is full: misses, and nobody waits."""
import contextlib
import errno
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_pd.errors import ConfigError
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store import files, loads, view
from vllm_pd.store.blocks import HEADER_BYTES, BlockKey
from vllm_pd.store.loads import BlockLoader
from vllm_pd.store.plan import NamedBlock
from vllm_pd.store.view import FileNames, StoreView
from vllm_pd.store.worker import StoreWorker

MODEL = b"m" * 16
BLOCK, BLOCKS = 50_000, 8
WAIT_S = 30.0


class Setting:
    """Workers and views over one store. The cache of a worker has two layers."""

    def __init__(self, memory: Path, files: Path, closing: contextlib.ExitStack) -> None:
        gib = 64 * (BLOCK + HEADER_BYTES) / 2**30
        self.settings = StoreSettings(str(memory), 40 * (1 << 16) / 2**30, str(files), gib)
        self.memory = memory
        self._closing = closing

    def worker(self, model: bytes = MODEL) -> tuple[StoreWorker, list[np.ndarray]]:
        parts = [np.zeros((BLOCKS, BLOCK // 2), np.uint8) for _ in range(2)]
        made = StoreWorker(self.settings, model, [torch.from_numpy(part) for part in parts], ["0", "1"])
        self._closing.callback(made.close)
        return made, parts

    def view(self, *models: bytes) -> StoreView:
        made = StoreView(self.settings, BLOCK, models or [MODEL])
        self._closing.callback(made.close)
        return made

    def only_in_files(self, *blocks: int, model: bytes = MODEL) -> None:
        """Blocks full of their number."""
        worker, parts = self.worker(model)
        for block in blocks:
            for part in parts:
                part[block] = block
        worker.put([named(block) for block in blocks])
        assert worker.store.flush(WAIT_S)
        worker.close()
        shutil.rmtree(self.memory)


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(loads, "BLOCK_S", 0.2)
    monkeypatch.setattr(view, "REFRESH_S", 0.02)
    memory = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    with contextlib.ExitStack() as closing:
        yield Setting(memory, tmp_path, closing)
    shutil.rmtree(memory, ignore_errors=True)


def named(block: int) -> NamedBlock:
    return NamedBlock(bytes([block]) * 32, block)


def until(holds: Callable[[], object]) -> object:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return found


def ends(worker: StoreWorker | BlockLoader, count: int) -> tuple[set[str], set[str]]:
    """That many loads, and those that failed."""
    ended, failed = set(), set()

    def are_all() -> bool:
        taken = worker.take_ended()
        ended.update(taken.ended)
        failed.update(taken.failed)
        return len(ended) >= count

    until(are_all)
    return ended, failed


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads of files begin, and go on when the event is set."""
    event, read = threading.Event(), os.preadv

    def preadv(*arguments):
        event.wait(WAIT_S)
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    yield event
    event.set()


def test_b104_a_disk_that_hangs_fails_the_loads(setting: Setting, hang: threading.Event, caplog):
    """B104: the load that is at the disk, the one behind it and one that comes then all fail in time, and nothing is
    copied into their blocks later, for they are others' by then. When the disk is back, loads work again."""
    setting.only_in_files(1, 2, 3)
    worker, parts = setting.worker()
    worker.begin_loads({"at the disk": [named(1)], "behind": [named(2)]})
    with caplog.at_level(logging.WARNING):
        assert ends(worker, 2) == ({"at the disk", "behind"}, ) * 2
        worker.begin_loads({"later": [named(3)]})
        assert ends(worker, 1) == ({"later"}, {"later"})
    assert worker.loader.counts == {"overdue": 3}
    assert [record.message for record in caplog.records if "a load failed" in record.message] == [
        "store: a load failed, and its prompt is computed: the disk does not answer. So far {'overdue': 2}; this is "
        "said once in 60 s"]
    hang.set()
    until(lambda: worker.loader._since_s is None)
    assert not any(part.any() for part in parts)
    worker.begin_loads({"again": [named(2)]})
    assert ends(worker, 1) == ({"again"}, set())
    assert all((part[2] == 2).all() for part in parts)


def test_b104_a_disk_that_is_slow_fails_loads_in_time():
    """B104: one that brings each block just in time. No load lasts longer than `LOAD_S`, however many blocks it has, or
    those before it; one that came later goes on."""
    clock, copies, brings = [1000.0], [], threading.Semaphore(0)

    def load_block(block: NamedBlock, load: loads.BlockLoad) -> bool:
        brings.acquire()
        with load:
            copies.append(block)
        return True

    loader = BlockLoader(load_block, lambda: clock[0])
    loader.begin("slow", [named(number) for number in range(100)])
    loader.begin("behind", [named(101)])
    until(lambda: loader._since_s is not None)
    for brought in range(1, 13):
        clock[0] += 9.9
        assert loader.take_ended() == (set(), set())
        brings.release()
        until(lambda brought=brought: len(copies) == brought and loader._since_s == clock[0])
    loader.begin("later", [named(102)])
    clock[0] += 9.9
    assert loader.take_ended() == ({"slow", "behind"}, ) * 2 and loader.counts == {"overdue": 2}
    for _ in range(2):
        brings.release()
    assert ends(loader, 1) == ({"later"}, set()) and copies[12:] == [named(102)]
    assert loader.close(WAIT_S)


def test_b104_a_disk_that_hangs_does_not_hold_up_the_end(setting: Setting, hang: threading.Event, monkeypatch):
    monkeypatch.setattr("vllm_pd.store.worker.CLOSE_S", 0.1)
    setting.only_in_files(1)
    worker, _ = setting.worker()
    worker.begin_loads({"a": [named(1)]})
    until(lambda: worker.loader._since_s is not None)
    began_s = time.monotonic()
    worker.close()
    assert time.monotonic() - began_s < WAIT_S / 2
    hang.set()
    assert worker.loader._thread.join(WAIT_S) is None and not worker.loader._thread.is_alive()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_b104_a_disk_with_errors_is_a_miss(setting: Setting, error: int, monkeypatch: pytest.MonkeyPatch):
    """B104: in EngineCore, where the scheduler asks, and in the worker's thread, which counts them."""
    setting.only_in_files(1)
    seen, (worker, _) = setting.view(), setting.worker()
    assert seen.contains(named(1).name)

    def fails(*arguments, **keywords):
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        for name in ("lstat", "stat", "scandir", "open"):
            patch.setattr(os, name, fails)
        worker.begin_loads({"a": [named(1)]})
        assert ends(worker, 1) == ({"a"}, {"a"})
        until(lambda: not seen.contains(named(1).name))
    assert worker.store.counts["error"] == 1
    until(lambda: seen.contains(named(1).name))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_b104_a_disk_whose_files_can_not_be_read_is_known(call: str, setting: Setting,
                                                          monkeypatch: pytest.MonkeyPatch, caplog):
    """B104: a miss, which is counted and logged as an error of the disk. The files stay."""
    setting.only_in_files(1, 2)
    worker, parts = setting.worker()

    def fails(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fails)
        worker.begin_loads({"a": [named(1), named(2)], "b": [named(1)]})
        assert ends(worker, 2) == ({"a", "b"}, ) * 2
    assert worker.store.counts == {"error": 2, "missing": 2}
    assert sum("Input/output error, with files in" in record.message for record in caplog.records) == 1
    worker.begin_loads({"a": [named(1), named(2)]})
    assert ends(worker, 1) == ({"a"}, set()) and (parts[1][2] == 2).all()


def test_b104_a_disk_that_can_only_be_read_is_read(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    """B104: as the kernel makes it after errors. When a file was used can't be noted there."""
    setting.only_in_files(1)
    worker, parts = setting.worker()

    def fails(*arguments, **keywords):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fails)
    worker.begin_loads({"a": [named(1)]})
    assert ends(worker, 1) == ({"a"}, set()) and (parts[1][1] == 1).all()


def test_b104_the_scheduler_makes_no_system_call(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    """B104: `contains` in its thread only looks at memory; what a hanging disk has said counts for a while."""
    setting.only_in_files(1)
    seen, hanging, here = setting.view(), threading.Event(), threading.get_ident()
    clock = [time.monotonic()]
    monkeypatch.setattr(seen._files[MODEL], "_clock", lambda: clock[0])
    until(lambda: seen._files[MODEL].listed_s == clock[0])

    def hangs(*arguments, **keywords):
        assert threading.get_ident() != here
        hanging.set()
        time.sleep(WAIT_S)

    with monkeypatch.context() as patch:
        for name in ("lstat", "stat", "scandir", "open"):
            patch.setattr(os, name, hangs)
        assert hanging.wait(WAIT_S)
        assert seen.contains(named(1).name) and not seen.contains(named(2).name)
        clock[0] += view.STALE_S
        assert not seen.contains(named(1).name)


def test_b104_a_block_is_there_if_each_rank_has_its_part(setting: Setting):
    """B104: in memory or in a file, each for itself."""
    models = [bytes([rank]) * 16 for rank in range(3)]
    for model in models[:2]:
        setting.only_in_files(1, 2, model=model)
    for model, blocks in zip(models, ((2, 3, 4, 5), (3, 4), (1, 3, 5)), strict=True):
        worker, _ = setting.worker(model)
        worker.put([named(block) for block in blocks])
        assert worker.store.flush(WAIT_S)
    names = [named(block).name for block in range(1, 6)]
    for ranks, there in (([0], (1, 2, 3, 4, 5)), ([1], (1, 2, 3, 4)), ([2], (1, 3, 5)), ([0, 1], (1, 2, 3, 4)),
                         ([1, 2], (1, 3)), ([2, 0], (1, 3, 5)), ([0, 1, 2], (1, 3))):
        seen = setting.view(*(models[rank] for rank in ranks))
        assert [name[0] for name in names if seen.contains(name)] == list(there), ranks
        assert not any(seen.contains(name[:8] + bytes(24)) for name in names), "these are in the same sets"
        seen.close()


@pytest.mark.parametrize("changed_s", [1, 1 << 32], ids=["long ago", "before the clock was set back"])
def test_names_come_and_go(changed_s: int, tmp_path: Path):
    """Of a folder that has not changed nothing is listed, unless it has changed just before."""
    names, path = FileNames(tmp_path), tmp_path / "ab" / ("ab" * 32)
    names.refresh()
    assert bytes.fromhex(path.name) not in names
    path.parent.mkdir()
    path.touch()
    names.refresh()
    assert bytes.fromhex(path.name) in names
    path.unlink()
    names.refresh()
    assert bytes.fromhex(path.name) not in names
    path.touch()
    os.utime(path.parent, (changed_s, changed_s))
    names.refresh()
    path.unlink()
    os.utime(path.parent, (changed_s, changed_s))  # no file system does that
    names.refresh()
    assert bytes.fromhex(path.name) in names


@pytest.mark.parametrize("name", ["ab", "model"])
def test_names_that_could_not_be_listed_once_are_listed_then(name: str, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch):
    """A folder that can't be read is not an empty one, although it has not changed when it can."""
    folder, scandir = tmp_path / "model", os.scandir
    names, path = FileNames(folder), folder / "ab" / ("ab" * 32)
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path.parent, (1, 1))

    def fails(where: str) -> object:
        if Path(where).name == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(where)

    with monkeypatch.context() as short:
        short.setattr(os, "scandir", fails)
        names.refresh()
    names.refresh()
    assert bytes.fromhex(path.name) in names


def test_a_full_disk_is_said_once_and_left_alone(setting: Setting, caplog, monkeypatch: pytest.MonkeyPatch):
    """Not a line for each block. For a while nothing is tried, then again."""
    worker, _ = setting.worker()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for block in range(1, 4):
            worker.put([named(block)])
            assert worker.store.flush(WAIT_S)
    assert worker.store.counts["error"] == 1 and worker.store.counts["no_room"] == 2
    (line, ) = [record for record in caplog.records if record.name == "vllm.pd"]
    assert "No space left on device" in line.message and not line.exc_info
    worker.store._full_until_s = time.monotonic()
    worker.put([named(4)])
    assert worker.store.flush(WAIT_S) and worker.store.counts["written"] == 1
    assert worker.store.files.contains(BlockKey(MODEL, named(4).name))


@pytest.mark.parametrize("name", ["mkdir", "stat", "open"])
@pytest.mark.parametrize("opened", ["worker", "view"])
def test_b104_b80_a_disk_that_hangs_at_the_start_is_named(setting: Setting, name: str, opened: str, monkeypatch):
    """B104, B80: as a network disk whose server is gone. The engine does not hang."""
    answers, folder, call = threading.Event(), setting.settings.file_folder, getattr(os, name)

    def hangs(path, *arguments, **keywords):
        if str(path).startswith(folder):
            answers.wait(WAIT_S)
        return call(path, *arguments, **keywords)

    monkeypatch.setattr(os, name, hangs)
    monkeypatch.setattr(files, "START_S", 0.2)
    try:
        with pytest.raises(ConfigError, match="has not answered within 0.2 s: .* local disk") as caught:
            getattr(setting, opened)()
        assert caught.value.key == "file_folder" and caught.value.value == folder
    finally:
        answers.set()
