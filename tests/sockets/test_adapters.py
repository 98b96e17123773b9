# SPDX-License-Identifier: Apache-2.0
"""B115: real files of adapters, and the thread that looks at them. What follows from a look:
tests/unit/test_adapter_book.py.
"""
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.adapters import write_stub
from tests.waiting import wait_for
from vllm_pd.model.adapters import CHUNK_BYTES, digest_adapter, look_at
from vllm_pd.v1 import adapter_files
from vllm_pd.v1.adapter_files import AdapterReader
from vllm_pd.v1.adapters import AdapterBook

WEIGHTS = "adapter_model.bin"


@pytest.fixture
def folder(tmp_path):
    return write_stub(tmp_path / "a", "first")


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def reader(woken, monkeypatch):
    monkeypatch.setattr(adapter_files, "LOOK_S", 0.01)
    made = AdapterReader(woken.set)
    yield made
    made.close()


def digest(folder: Path, settings: str = "") -> bytes:
    return digest_adapter(folder, look_at(folder), settings)


def test_the_digest_is_of_each_byte_and_of_no_place(folder, tmp_path):
    assert digest(write_stub(tmp_path / "b", "first")) == digest(folder) != digest(folder, "float16")
    (folder / "README.md").write_text("not read")
    assert digest(folder) == digest(tmp_path / "b")
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 16}')
    assert digest(folder) != digest(tmp_path / "b")
    large = bytearray(2 * CHUNK_BYTES + 5)
    found = set()
    for at in (0, 70_001, CHUNK_BYTES, 2 * CHUNK_BYTES + 4):
        large[at] += 1
        (folder / WEIGHTS).write_bytes(large)
        found.add(digest(folder))
    assert len(found) == 4
    os.rename(folder / WEIGHTS, folder / "adapter_model.pt")
    assert digest(folder) not in found


def in_place(path: Path) -> None:
    with open(path, "r+b") as opened:
        opened.write(b"F")


def kept_times(path: Path) -> None:
    """As `cp --preserve` does: size and time of the last change are those of before."""
    status = path.stat()
    in_place(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    status, other = path.stat(), path.with_name("other")
    other.write_bytes(b"F" + path.read_bytes()[1:])
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(other, path)


def another_first(path: Path) -> None:
    """The one that vLLM prefers."""
    path.with_name("adapter_model.safetensors").write_bytes(b"other")


@pytest.mark.parametrize("change", [in_place, kept_times, replaced, another_first])
def test_each_change_is_another_look(folder, change):
    before, first = look_at(folder), digest(folder)
    time.sleep(0.05)  # times of files go by the clock's ticks
    change(folder / WEIGHTS)
    assert look_at(folder) != before and digest(folder) != first


def switched_link(folder: Path, other: Path):
    """The folder's path is a link, which leads to another one for a while."""
    link = folder.with_name("link")
    link.symlink_to(folder)

    def switch():
        for target in (other, folder):
            link.unlink()
            link.symlink_to(target)
    return link, switch


def switched_files(folder: Path, other: Path):
    """As in a hub's cache, whose files are links."""
    real, link = (folder / WEIGHTS).rename(folder.with_name("real")), folder / WEIGHTS
    link.symlink_to(real)

    def switch():
        for target in (other / WEIGHTS, real):
            link.unlink()
            link.symlink_to(target)
    return folder, switch


def switched_folder(folder: Path, other: Path):
    def switch():
        away = folder.rename(folder.with_name("away"))
        other.rename(folder).rename(other)
        away.rename(folder)
    return folder, switch


def switched_parent(folder: Path, other: Path):
    """A folder on the way to it is a link."""
    parent, empty = folder.parent.with_name("parent"), folder.with_name("empty")
    parent.symlink_to(folder.parent)

    def switch():
        for target in (empty, folder.parent):
            parent.unlink()
            parent.symlink_to(target)
    return parent / folder.name, switch


@pytest.mark.parametrize("make", [switched_link, switched_files, switched_folder, switched_parent])
def test_a_path_that_led_elsewhere_for_a_moment_is_seen(folder, tmp_path, make):
    path, switch = make(folder, write_stub(tmp_path / "b", "other"))
    before, first = look_at(path), digest(path)
    assert look_at(path) == before
    time.sleep(0.05)
    switch()
    assert look_at(path) != before and digest(path) == first


@pytest.mark.parametrize("spoil", ["folder", "adapter_config.json", WEIGHTS, "pipe"])
def test_what_is_no_adapter_is_an_error(folder, spoil):
    if spoil == "folder":
        folder = folder / "org" / "name-of-a-hub"
    else:
        (folder / (WEIGHTS if spoil == "pipe" else spoil)).unlink()
    if spoil == "pipe":
        os.mkfifo(folder / WEIGHTS)
    with pytest.raises(OSError):
        look_at(folder)


def test_the_thread_reads_looks_and_ends(reader, folder, woken):
    files = reader.watch(folder, "settings", look_at(folder))
    wait_for(lambda: files.are_unchanged(time.monotonic()), "it is not read")
    assert files.digest == digest(folder, "settings") and woken.is_set()
    woken.clear()
    since = time.monotonic()
    reader.ask()
    assert woken.wait(10)
    wait_for(lambda: files.unchanged_at > since, "there is no further look")
    woken.clear()
    in_place(folder / WEIGHTS)
    assert woken.wait(10) and files.have_changed
    reader.close()
    reader.close()
    assert not reader._thread.is_alive()


def test_a_file_system_that_hangs_holds_up_nobody(folder, woken, monkeypatch):
    monkeypatch.setattr(adapter_files, "LOOK_S", 0.01)
    monkeypatch.setattr(adapter_files, "STALE_S", 0.2)
    monkeypatch.setattr(adapter_files, "JOIN_S", 0.1)
    answers = threading.Event()
    answers.set()

    def look(path):
        answers.wait()
        return look_at(path)

    reader = AdapterReader(woken.set, look)
    files = reader.watch(folder, "", look_at(folder))
    wait_for(lambda: files.are_unchanged(time.monotonic()), "it is not read")
    answers.clear()
    wait_for(lambda: not files.are_unchanged(time.monotonic()), "it is used")
    began = time.monotonic()
    reader.ask()
    reader.unwatch(reader.watch(folder, "", files.look))
    assert time.monotonic() < began + 1
    answers.set()
    wait_for(lambda: files.are_unchanged(time.monotonic()), "it is not used again")
    answers.clear()
    reader.close()
    assert time.monotonic() < began + 60 and reader._thread.daemon
    answers.set()
    wait_for(lambda: not reader._thread.is_alive(), "the thread goes on")


def test_an_error_ends_no_thread(folder, woken, monkeypatch):
    monkeypatch.setattr(adapter_files, "LOOK_S", 0.01)
    errors = [ZeroDivisionError()]

    def look(path):
        if errors:
            raise errors.pop()
        return look_at(path)

    reader = AdapterReader(woken.set, look)
    files = reader.watch(folder, "", look_at(folder))
    wait_for(lambda: files.are_unchanged(time.monotonic()), "it is not read")
    reader.close()
    assert not errors


@pytest.mark.parametrize("path", ["org/name-of-a-hub", "~nobody-is-called-so/a", "a\0b"])
def test_what_is_no_folder_is_left_to_vllm(reader, path):
    book = AdapterBook(SimpleNamespace(max_loras=1, max_cpu_loras=1, lora_dtype="auto", target_modules=None), reader,
                       is_offering=True)
    asked = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path)
    with pytest.raises(ZeroDivisionError):
        book.load(asked, lambda request: 1 // 0)
    assert not book.is_usable(asked)
