# SPDX-License-Identifier: Apache-2.0
"""The store in real shared memory and files, with processes that are killed. Its rules alone: tests/proof."""
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vllm_pd.errors import ConfigError
from vllm_pd.settings import store as store_settings
from vllm_pd.settings.store import StoreSettings
from vllm_pd.store import arena as arena_module
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.blocks import HEADER_BYTES, BlockKey
from vllm_pd.store.files import FOLDER, SHARE, FileTier
from vllm_pd.store.slots import PutResult
from vllm_pd.store.store import BlockStore
from vllm_pd.store.view import StoreView

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 100_000  # bytes; not a whole number of pages
CAPACITY = 34 * (1 << 17)
Start = Callable[..., subprocess.Popen]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def arena(memory: Path) -> Iterator[BlockArena]:
    one = BlockArena(memory, BLOCK, CAPACITY)
    yield one
    one.close()


def key_of(number: int, model: bytes = b"m" * 16) -> BlockKey:
    return BlockKey(model, number.to_bytes(32, "little"))


def content_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


def read(store: BlockArena | BlockStore, number: int) -> np.ndarray | None:
    out = np.empty(BLOCK, np.uint8)
    return out if store.get(key_of(number), [out[:10], out[10:]]) else None


def is_right(store: BlockArena | BlockStore, number: int) -> bool:
    return np.array_equal(read(store, number), content_of(number))


@pytest.fixture
def in_child() -> Iterator[Start]:
    """Starts a process that runs `code` and prints a line when it has come to where it waits. It is killed at the end,
    with its children."""
    children: list[subprocess.Popen] = []
    yield lambda code, *arguments: children.append(start(code, *arguments)) or children[-1]
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(60)


def start(code: str, *arguments: object) -> subprocess.Popen:
    """The process, in a process group of its own."""
    child = subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE,
                             start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert child.stdout.readline()
    return child


def test_b104_a_hundred_kills(memory: Path):
    """B104: 100 SIGKILLs of processes that put and read blocks of one store. No reader was given a wrong block, no slot
    is locked by the dead, what is left is right, and the file tier has kept its bound."""
    done = subprocess.run([sys.executable, ROOT / "tests/fakes/store_storm.py", memory, "100"], capture_output=True,
                          text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 100 and counts["half_written"] > 0, counts
    assert not any(counts[name] for name in ("wrong", "died", "left_wrong", "locked", "wrong_files",
                                              "partial_files")), counts
    assert counts["left"] > 0 and 0 < counts["file_bytes"] <= 50 * ((1 << 20) + HEADER_BYTES), counts


def test_b104_what_one_process_puts_another_reads(arena: BlockArena, memory: Path, in_child: Start):
    child = in_child("""
import sys, numpy as np
from vllm_pd.store import arena as arena_module
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.blocks import BlockKey
arena = BlockArena(sys.argv[1], 100_000, int(sys.argv[2]))
for number in range(3):
    content = np.random.default_rng(number).integers(0, 256, 100_000, np.uint8)
    arena.put(BlockKey(b"m" * 16, number.to_bytes(32, "little")), [content[:1], content[1:]])
print("put", flush=True)
""", memory, CAPACITY)
    assert child.wait(60) == 0
    assert all(is_right(arena, number) for number in range(3)) and read(arena, 3) is None
    assert arena.put(key_of(0), [content_of(0)]) is PutResult.PRESENT


def test_b104_a_damaged_block_is_a_miss_and_is_removed(arena: BlockArena):
    """B104: one byte of a block is another: nobody is given it, and it can be put again."""
    arena.put(key_of(1), [content_of(1)])
    with arena.hold(key_of(1), BLOCK) as held:
        held.bytes[BLOCK - 1] ^= 1
    assert read(arena, 1) is None and not arena.contains(key_of(1))
    assert arena.put(key_of(1), [content_of(1)]) is PutResult.STORED and is_right(arena, 1)


def test_b104_another_model_or_length_is_a_miss(arena: BlockArena):
    arena.put(key_of(1), [content_of(1)])
    assert not arena.get(key_of(1, b"another model..."), [np.empty(BLOCK, np.uint8)])
    assert not arena.get(key_of(1), [np.empty(BLOCK - 1, np.uint8)])
    assert is_right(arena, 1)


def test_b104_a_leased_block_is_not_replaced(arena: BlockArena, memory: Path, in_child: Start):
    """A lease of another process, and one of this process, last while many more blocks are put than there is room for;
    that of the other process ends with it."""
    arena.put(key_of(1), [content_of(1)])
    arena.put(key_of(2), [content_of(2)])
    child = in_child("""
import sys, time
from vllm_pd.store import arena as arena_module
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.blocks import BlockKey
held = BlockArena(sys.argv[1], 100_000, int(sys.argv[2])).hold(BlockKey(b"m" * 16, (1).to_bytes(32, "little")), 100_000)
print("held", held, flush=True)
time.sleep(600)
""", memory, CAPACITY)
    with arena.hold(key_of(2), BLOCK) as held:
        for number in range(100, 300):
            assert arena.put(key_of(number), [content_of(0)]) is PutResult.STORED
        assert is_right(arena, 1) and held.is_right() and is_right(arena, 2)
        for number in range(300, 500):
            arena.put(key_of(number), [content_of(0)])
        assert is_right(arena, 1)
    child.send_signal(signal.SIGKILL)
    child.wait(60)
    for number in range(500, 700):
        arena.put(key_of(number), [content_of(0)])
    assert read(arena, 1) is None and read(arena, 2) is None


def test_b104_a_fill_that_raises_leaves_nothing(arena: BlockArena):
    """What can't be copied is not stored, and its slot is free again."""

    def fails(view: memoryview) -> int:
        view[:] = content_of(1).data
        raise OSError("no more")

    for _ in range(arena.shape.slots + 1):
        with pytest.raises(OSError):
            arena.put_from(key_of(1), BLOCK, fails)
    assert read(arena, 1) is None
    assert arena.put(key_of(1), [content_of(1)]) is PutResult.STORED and is_right(arena, 1)


def test_b104_a_forked_child_keeps_no_lease(arena: BlockArena, memory: Path, in_child: Start):
    """The process that leased a block is killed; its child lives on, and has copies of its files."""
    arena.put(key_of(1), [content_of(1)])
    leaser = in_child("""
import os, sys, time
from vllm_pd.store import arena as arena_module
from vllm_pd.store.arena import BlockArena
from vllm_pd.store.blocks import BlockKey
held = BlockArena(sys.argv[1], 100_000, int(sys.argv[2])).hold(BlockKey(b"m" * 16, (1).to_bytes(32, "little")), 100_000)
if os.fork():
    print("held", held, flush=True)
time.sleep(600)
""", memory, CAPACITY)
    leaser.kill()
    leaser.wait(60)
    for number in range(100, 300):
        arena.put(key_of(number), [content_of(0)])
    assert read(arena, 1) is None


def test_an_arena_of_another_size_is_refused(arena: BlockArena, memory: Path):
    with pytest.raises(ConfigError, match=r"memory_gib=0.3 can't be used: .*/arena-100000 is there with 0.00. GiB: "
                                          "give all engines the same"):
        BlockArena(memory, BLOCK, StoreSettings(memory_gib=0.3).memory_bytes)


def test_an_arena_that_does_not_fit_is_refused(memory: Path):
    """A full /dev/shm is an error at the start, and leaves nothing."""
    with pytest.raises(ConfigError, match="folder=.* can't be used: .*with .* GiB free"):
        BlockArena(memory, BLOCK, 1 << 44)
    assert list(memory.iterdir()) == []


def test_arenas_that_are_left_of_blocks_of_other_sizes_are_named(memory: Path, caplog: pytest.LogCaptureFixture):
    """They keep their memory: when there is too little, and in one line at the start of an engine."""
    settings, models = StoreSettings(str(memory), CAPACITY / 2**30), [b"m" * 16]
    with caplog.at_level(logging.INFO):
        StoreView(settings, BLOCK, models).close()
        assert not caplog.records
        BlockArena(memory, 2 * BLOCK, 2 * CAPACITY).close()
        StoreView(settings, BLOCK, models).close()
    assert [record.message for record in caplog.records] == [
        f"store: {memory} also has arenas for blocks of other sizes, which keep their memory until they are removed: "
        "arena-200000 (0.008 GiB)"]
    with pytest.raises(ConfigError, match=r"No space.* GiB free, there and in memory. Remove what no engine uses: "
                                          r"arena-100000 \(0.004 GiB\), arena-200000 \(0.008 GiB\)$"):
        BlockArena(memory, 3 * BLOCK, 1 << 44)


def test_b104_a_folder_on_a_disk_is_refused():
    """B104: nothing waits for a disk. Of a machine's folders /proc is sure to be on no tmpfs."""
    with pytest.raises(ConfigError, match=r"folder='/proc' can't be used: it is on proc: .* tmpfs.*--shm-size"):
        BlockArena("/proc", BLOCK, CAPACITY)


def test_b104_an_arena_is_in_a_folder_of_this_user_alone(memory: Path, monkeypatch: pytest.MonkeyPatch):
    """B104: nobody else may put a block there, or take the name of the folder."""
    (memory / "own").mkdir(mode=0o700)
    (memory / "link").symlink_to(memory / "own")
    with pytest.raises(ConfigError, match="folder=.*link' can't be used: .*link is a link or belongs to another user"):
        BlockArena(memory / "link", BLOCK, CAPACITY)
    (memory / "own").chmod(0o777)
    with pytest.raises(ConfigError, match="folder=.*own' can't be used: all users may write to .* .mode 0777.: write"):
        BlockArena(memory / "own", BLOCK, CAPACITY)
    (memory / "own").chmod(0o755)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="own is a link or belongs to another user"):
        patch.setattr(os, "geteuid", lambda: 12345)
        BlockArena(memory / "own", BLOCK, CAPACITY)
    assert not list((memory / "own").iterdir()), "nothing was made"
    BlockArena(memory / "own", BLOCK, CAPACITY).close()


def test_b104_the_default_folder_is_each_users_own():
    assert f"/dev/shm/vllm-pd-store-{os.geteuid()}" == store_settings.DEFAULT_FOLDER
    assert store_settings.StoreSettings().folder == store_settings.DEFAULT_FOLDER


def test_where_proc_can_not_be_read_a_folder_is_taken_for_memory(memory: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*arguments, **keywords):
        raise PermissionError

    assert arena_module.file_system_of(memory) == "tmpfs"
    monkeypatch.setattr(Path, "read_text", fails)
    assert arena_module.file_system_of(memory) is None
    BlockArena(memory, BLOCK, CAPACITY).close()


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "there"])
def test_b104_b80_a_system_without_locks_of_file_descriptions_is_refused(memory: Path, is_there: bool,
                                                                         monkeypatch: pytest.MonkeyPatch):
    """B104, B80: or no block would ever be stored, without a word. A lock that another process has is no such error."""
    if is_there:
        BlockArena(memory, BLOCK, CAPACITY).close()
    lock = "F_OFD_SETLK"

    def fails_with(code: int) -> Callable:
        def fails(*arguments: object) -> None:
            raise OSError(code, os.strerror(code))

        return fails

    for code in (errno.EINVAL, errno.ENOLCK, errno.EPERM):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=rf"folder=.* locked \(.Errno.*{lock}"):
            patch.setattr(arena_module.fcntl, "fcntl", fails_with(code))
            BlockArena(memory, BLOCK, CAPACITY)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=rf"folder=.* locked \(module.*{lock}"):
        patch.delattr(arena_module.fcntl, lock)
        BlockArena(memory, BLOCK, CAPACITY)
    assert len(list(memory.iterdir())) == is_there
    for code in (errno.EAGAIN, errno.EACCES):
        with monkeypatch.context() as patch:
            patch.setattr(arena_module.fcntl, "fcntl", fails_with(code))
            BlockArena(memory, BLOCK, CAPACITY).close()


def test_two_engines_that_start_together_make_one_arena(memory: Path, monkeypatch: pytest.MonkeyPatch):
    """With memory for one only. The second waits for it, which must not be for ever."""
    created, create, free = [], arena_module._create, arena_module.ArenaShape.fitting(BLOCK, CAPACITY).file_bytes

    def create_slowly(path: Path, shape: arena_module.ArenaShape) -> None:
        created.append(path)
        monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: free if len(created) < 2 else 0)
        time.sleep(0.3)
        create(path, shape)

    monkeypatch.setattr(arena_module, "_create", create_slowly)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: BlockArena(memory, BLOCK, CAPACITY), range(2)))
    assert len(created) == 1
    both[0].put(key_of(1), [content_of(1)])
    assert is_right(both[1], 1)
    for one in both:
        one.close()
    monkeypatch.setattr(arena_module, "MAKE_S", 0.1)
    monkeypatch.setattr(arena_module, "_create", create)
    monkeypatch.setattr(arena_module, "free_memory_bytes", lambda: 1 << 30)
    with arena_module._only_maker(memory):
        BlockArena(memory, BLOCK, CAPACITY).close()  # it is there
        with pytest.raises(ConfigError, match="folder=.* can't be used: another process has been making an arena"):
            BlockArena(memory, 2 * BLOCK, CAPACITY)
    BlockArena(memory, 2 * BLOCK, CAPACITY).close()


@pytest.mark.parametrize("files, free", [
    ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 5\ninactive_file 300"}, 400),
    ({"memory.max": "max", "memory.current": "900", "memory.stat": "inactive_file 300"}, None), ({}, None),
    ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "900",
      "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50"}, 150)])
def test_the_memory_of_a_container_is_what_its_limit_leaves(files: dict[str, str], free: int | None, tmp_path: Path):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    found = arena_module.free_memory_bytes(tmp_path)
    assert found == free if free is not None else found > 1 << 20


def store_of(memory: Path, files: Path, file_blocks: int = 64) -> BlockStore:
    gib = (BLOCK + HEADER_BYTES) * file_blocks / 2**30
    return BlockStore(StoreSettings(str(memory), CAPACITY / 2**30, str(files), gib), BLOCK)


def test_b104_a_restart_with_warm_files(memory: Path, tmp_path: Path):
    """The arena is gone, as after a restart of the machine: the blocks come from their files."""
    store = store_of(memory, tmp_path)
    for number in range(20):
        store.put(key_of(number), [content_of(number)])
    assert store.flush(60)
    store.close()
    shutil.rmtree(memory)
    again = store_of(memory, tmp_path)
    assert all(is_right(again, number) for number in range(20)) and read(again, 20) is None
    assert again.counts["file"] == 20 and all(is_right(again, number) for number in range(20))
    assert again.counts["memory"] == 20 and again.counts["error"] == 0
    again.close()


@pytest.mark.parametrize("damage", ["byte", "short", "empty", "other"])
def test_b104_a_damaged_file_is_a_miss_and_is_removed(damage: str, memory: Path, tmp_path: Path):
    """B104: as a crash of the machine may leave it."""
    store = store_of(memory, tmp_path)
    store.put(key_of(1), [content_of(1)])
    store.put(key_of(2), [content_of(2)])
    assert store.flush(60)
    store.close()
    shutil.rmtree(memory)
    again = store_of(memory, tmp_path)
    path = again.files.path(key_of(1))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"byte": data, "short": data[:-1], "empty": b"",
                      "other": again.files.path(key_of(2)).read_bytes()}[damage])
    assert read(again, 1) is None and not path.exists()
    assert is_right(again, 2)
    again.close()


def test_the_file_tier_keeps_its_bound(memory: Path, tmp_path: Path):
    """What was used least recently goes; what is read stays. Part of a file that a killed writer has left goes too."""
    store = store_of(memory, tmp_path, file_blocks=32)
    left = store.files.path(key_of(0)).with_name(".part-1-1-00000000")
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(BLOCK))
    out = memoryview(bytearray(BLOCK))
    for number in range(200):
        store.put(key_of(number), [content_of(number)])
        assert store.flush(60)
        assert number < 1 or store.files.read(key_of(0), out) is not None
        assert sum(file.size for file in store.files.files()) <= 32 * (BLOCK + HEADER_BYTES)
    assert store.files.contains(key_of(0)) and store.files.contains(key_of(199))
    assert not store.files.contains(key_of(1)) and not left.exists()
    assert store.counts["written"] == 200
    store.close()


@pytest.mark.parametrize("ahead_s, kept", [(3600, 10), (300, 1)], ids=["an hour", "a little"])
def test_after_the_clock_was_set_back_what_is_new_stays(arena: BlockArena, ahead_s: int, kept: int,
                                                        monkeypatch: pytest.MonkeyPatch):
    """What was used at times that are yet to come goes first, or each new block would go instead, until then. It does
    not where two processes have read the clock at different moments."""
    now_ns = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now_ns() + ahead_s * 10**9)
        for number in range(arena.shape.slots):
            arena.put(key_of(number), [content_of(0)])
    new = range(1000, 1010)
    for number in new:
        arena.put(key_of(number), [content_of(0)])
    assert sum(arena.contains(key_of(number)) for number in new) == kept
    assert arena.contains(key_of(new[-1])) and arena.blocks() == arena.shape.slots


def test_the_file_tier_keeps_its_bound_where_a_folder_can_not_be_listed(memory: Path, tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch):
    """A process that is short of file descriptors: what it does not see is not room. It writes nothing meanwhile."""
    store, scandir = store_of(memory, tmp_path, file_blocks=32), os.scandir

    def fails(path: str) -> object:
        if len(Path(path).name) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    with monkeypatch.context() as short:
        short.setattr(os, "scandir", fails)
        for number in range(60):
            store.put(key_of(number), [content_of(0)])
            assert store.flush(60)
    assert sum(file.size for file in store.files.files()) <= 32 * (BLOCK + HEADER_BYTES)
    assert store.counts["error"] and not store.files.contains(key_of(59))
    store.put(key_of(60), [content_of(0)])
    assert store.flush(60) and store.files.contains(key_of(60))
    store.close()


def test_after_the_clock_was_set_back_new_files_stay(memory: Path, tmp_path: Path):
    store = store_of(memory, tmp_path, file_blocks=32)
    for number in range(28):
        store.put(key_of(number), [content_of(0)])
    assert store.flush(60)
    for file in store.files.files():
        os.utime(file.path, ns=(0, file.used_ns + 3600 * 10**9))
    for number in range(100, 120):
        store.put(key_of(number), [content_of(0)])
        assert store.flush(60)
    assert all(store.files.contains(key_of(number)) for number in range(100, 120))
    store.close()


def test_b104_the_users_own_files_stay(memory: Path, tmp_path: Path):
    """A folder with other things in it, some with names that look like ours: the tier that is full removes its own."""
    name = "ab" * 32
    theirs = [tmp_path / "notes", tmp_path / ("c" * 32) / "ab" / name, tmp_path / ".part-1-1-00000000",
              tmp_path / FOLDER / "notes", tmp_path / FOLDER / ("c" * 32) / "notes", tmp_path / FOLDER / "ab" / name,
              tmp_path / FOLDER / ("c" * 32) / "ab" / f"{name}.txt", tmp_path / FOLDER / ("c" * 32) / "ab" / ".part-1"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(20 * BLOCK))
        os.utime(path, (0, 0))
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "ab").mkdir(parents=True)
    (elsewhere / "ab" / name).write_bytes(bytes(20 * BLOCK))
    (tmp_path / FOLDER / ("d" * 32)).symlink_to(elsewhere)
    store = store_of(memory, tmp_path, file_blocks=32)
    for number in range(60):
        store.put(key_of(number), [content_of(number)])
        assert store.flush(60)
    assert store.counts["written"] == 60 and not store.files.contains(key_of(0))
    assert all(path.stat().st_size == 20 * BLOCK for path in [*theirs, elsewhere / "ab" / name])
    assert all(tmp_path / FOLDER in Path(file.path).parents for file in store.files.files())
    store.close()


def test_a_file_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / FOLDER).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="file_folder=.* can't be used: .* is a link or belongs to another user"):
        FileTier(tmp_path / "link", 1 << 30, BLOCK)
    FileTier(tmp_path, 1 << 30, BLOCK)
    (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(ConfigError, match="file_folder=.* can't be used: all users may write to"):
        FileTier(tmp_path, 1 << 30, BLOCK)
    (tmp_path / FOLDER).chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="file_folder=.* can't be used: .* is a link or belongs to another user"):
        FileTier(tmp_path, 1 << 30, BLOCK)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_b104_what_is_no_file_is_a_miss(kind: str, memory: Path, tmp_path: Path):
    """Something else has a block's name: nobody waits for it, follows it or removes it."""
    store = store_of(memory, tmp_path)
    store.put(key_of(1), [content_of(1)])
    assert store.flush(60)
    path = store.files.path(key_of(1))
    real = path.rename(tmp_path / "real")
    {"fifo": lambda: os.mkfifo(path), "folder": path.mkdir, "link": lambda: path.symlink_to(real)}[kind]()
    assert not store.files.contains(key_of(1)) and list(store.files.files()) == []
    assert store.files.read(key_of(1), memoryview(bytearray(BLOCK))) is None and os.path.lexists(path)
    store.close()


def test_files_that_can_not_be_written_are_counted(memory: Path, tmp_path: Path):
    """The thread goes on, and the blocks are in memory."""
    files = tmp_path / FOLDER
    store = store_of(memory, tmp_path)
    shutil.rmtree(files)
    files.write_text("no folder")
    store.put(key_of(1), [content_of(1)])
    assert store.flush(60) and store.counts["error"] == 1 and is_right(store, 1)
    files.unlink()
    store.put(key_of(2), [content_of(2)])
    assert store.flush(60) and store.counts["written"] == 1
    store.close()


def test_a_file_folder_that_is_emptied_is_used_again(memory: Path, tmp_path: Path):
    """Under a running engine, as to free the disk. The bound is kept as before."""
    store = store_of(memory, tmp_path, file_blocks=32)
    for number in range(60):
        if number % 20 == 10:
            shutil.rmtree(tmp_path / FOLDER)
        store.put(key_of(number), [content_of(0)])
        assert store.flush(60)
    assert store.counts["written"] == 60 and not store.counts["error"] and store.files.contains(key_of(59))
    assert sum(file.size for file in store.files.files()) <= 32 * (BLOCK + HEADER_BYTES)
    store.close()


def test_a_file_tier_without_room_for_some_blocks_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="file_gib=.* can't be used: a block has 100000 bytes: give at least"):
        FileTier(tmp_path, SHARE * BLOCK, BLOCK)
