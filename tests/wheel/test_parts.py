# SPDX-License-Identifier: Apache-2.0
"""The parts that make wheels: archive, metadata, cache."""

import os
import re
import runpy
import subprocess
import sys
import threading
import zipfile

import pytest
import setuptools
from _wheel import archive, cache, extension, metadata, project, source, targets
from _wheel.process import BuildError, run

from tests.wheel import checks

NAMES = ["demo/plain.py", "demo/E=1,N=2.json", "demo-1.dist-info/WHEEL"]


def write(path, *, order=NAMES):
    writer = archive.WheelWriter(path, "demo-1.dist-info")
    for name in order:
        writer.add(name, name.encode() * 50)
    return writer.close()


def test_archive_does_not_depend_on_order_or_time(tmp_path):
    first, second = write(tmp_path / "a.whl"), write(tmp_path / "b.whl", order=NAMES[::-1])
    assert first.read_bytes() == second.read_bytes()
    assert checks.record_problems(checks.Wheel.read(first)) == []


def test_archive_takes_entries_as_they_are(tmp_path):
    first = write(tmp_path / "a.whl")
    with zipfile.ZipFile(first) as source:
        record = archive.read_record(source.read("demo-1.dist-info/RECORD").decode())
        writer = archive.WheelWriter(tmp_path / "b.whl", "demo-1.dist-info")
        for name in NAMES:
            writer.take(source, source.getinfo(name), record[name])
        writer.add("demo/plain.py", b"replaced")
        second = writer.close()
    assert checks.record_problems(checks.Wheel.read(second)) == []
    with zipfile.ZipFile(second) as wheel:
        assert wheel.testzip() is None
        assert wheel.read("demo/plain.py") == b"replaced"
        assert wheel.read("demo/E=1,N=2.json") == b"demo/E=1,N=2.json" * 50


def test_archive_refuses_a_source_that_is_cut_short(tmp_path):
    first = write(tmp_path / "a.whl")
    with zipfile.ZipFile(first) as source:
        info = source.getinfo(NAMES[0])
        info.compress_size = 1 << 30
        writer = archive.WheelWriter(tmp_path / "b.whl", "demo-1.dist-info")
        writer.take(source, info, ("sha256=x", 1))
        with pytest.raises(zipfile.BadZipFile, match="cut short"):
            writer.close()
    assert not (tmp_path / "b.whl").exists()


def test_override_replaces_leaves_out_and_adds():
    upstream = ["numpy", "torch==2.7.0", "Some_Name[extra]>=1 ; python_version < '3'", "tqdm"]
    assert metadata.override(upstream, {"numpy": "<2.3", "some-name": False, "rich": ">=13"}) == [
        "numpy<2.3", "torch==2.7.0", "tqdm", "rich>=13"]  # fmt: skip


def test_requirements_follow_includes_and_drop_comments():
    files = {"cpu.txt": "# c\n-r common.txt\n--extra-index-url https://x\ntorch==2 # why\n", "common.txt": "numpy\n\n"}
    assert metadata.read_requirements(files, "cpu.txt") == ["numpy", "torch==2"]


def test_metadata_replaces_version_and_requirements_only():
    extra = 'Requires-Dist: b; extra == "x"\n\nRequires-Dist: text\n'
    text = f"Name: vllm\nVersion: 1\nRequires-Python: >=3\nRequires-Dist: a\n{extra}"
    made = metadata.metadata(text, "1+pd", ["c", "d"], "<4")
    assert made == f"Name: vllm\nVersion: 1+pd\nRequires-Python: <4\nRequires-Dist: c\nRequires-Dist: d\n{extra}"
    with pytest.raises(ValueError, match="no requirement"):
        metadata.metadata("Name: vllm\n\n", "1", ["c"], "<4")


def test_target_must_be_known():
    with pytest.raises(ValueError, match="'rocm'.*cpu, cuda"):
        project.version("1", "rocm")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("in_place", [False, True])
def test_piece_is_built_once_and_never_trusted_half_written(empty_cache, in_place):
    calls = []

    def build(folder):
        calls.append(sorted(f.name for f in folder.iterdir()))
        (folder / "half").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.piece("kind", "key", build, "test", in_place=in_place)
    place = cache.piece("kind", "key", build, "test", in_place=in_place)
    assert cache.piece("kind", "key", build, "test", in_place=in_place) == place
    assert calls == [[], []]  # the second began from nothing, there was no third
    assert place.parent.parent == empty_cache and (place / "half").exists()


def test_prune_removes_what_nobody_asked_for(empty_cache):
    for name in ("old", "used"):
        os.utime(cache.piece("wheel", name, lambda folder: None, "test"), (0, 0))
    cache.piece("wheel", "used", lambda folder: None, "test")
    cache.prune(["wheel", "absent"], keep_s=3600)
    assert [f.name for f in (empty_cache / "wheel").iterdir()] == ["used"]


@pytest.mark.parametrize("how", ["loaded", "named", "entered"])
def test_prune_keeps_what_a_process_uses(empty_cache, how):
    """An environment that a server runs from or has been started in, or a model that its command line names."""
    def build(folder):
        (folder / "file").write_text("content")

    place = cache.piece("env", "running", build, "test", in_place=True)
    os.utime(place, (0, 0))
    code = "import mmap, time; kept = mmap.mmap(0, 0, prot=mmap.PROT_READ); print(flush=True); time.sleep(600)"
    opened = place / "file" if how == "loaded" else project.ROOT / "setup.py"
    command = [sys.executable, "-c", code, *([place / "file"] if how == "named" else [])]
    env = os.environ | ({"VLLM_PD_ENV": str(place)} if how == "entered" else {})
    with opened.open() as file, subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, env=env) as server:
        assert server.stdout.readline()
        cache.prune(["env"], keep_s=3600)
        assert (place / cache.MARKER).exists() and (place / "file").exists()
        server.kill()
    cache.prune(["env"], keep_s=3600)
    assert not place.exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_piece_of_which_a_part_was_removed_is_not_trusted(empty_cache, monkeypatch, in_place):
    """Ctrl-C while it is removed. The next run removes the rest."""
    def build(folder):
        for number in range(9):
            (folder / str(number)).touch()

    def interrupted(*args, **kwargs):
        unlink(*args, **kwargs)
        raise KeyboardInterrupt

    place = cache.piece("patched", "key", build, "test", in_place=in_place)
    os.utime(place, (0, 0))
    unlink = os.unlink
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", interrupted)
        cache.prune(["patched"], keep_s=3600)
    assert [left.name for left in place.parent.iterdir()] == ["key.gone"]
    place = cache.piece("patched", "key", build, "test", in_place=in_place)
    assert len(list(place.iterdir())) == 9 + in_place
    cache.prune(["patched"], keep_s=3600)
    assert [left.name for left in place.parent.iterdir()] == ["key"]


def test_tree_key_follows_names_and_contents(tmp_path):
    (tmp_path / "a").write_text("1")
    before = cache.tree_key(tmp_path, [tmp_path / "a"])
    (tmp_path / "a").write_text("1")
    assert cache.tree_key(tmp_path, [tmp_path / "a"]) == before
    (tmp_path / "a").write_text("2")
    changed = cache.tree_key(tmp_path, [tmp_path / "a"])
    (tmp_path / "b").write_text("2")
    assert len({before, changed, cache.tree_key(tmp_path, [tmp_path / "b"])}) == 3


def test_lock_waits_for_a_command_that_outlives_its_builder(empty_cache):
    """A builder is killed; the command it started goes on. The next builder must wait for that command."""
    builder = "from _wheel import cache, process\n"
    builder += "with cache.lock(): process.run(['sh', '-c', 'echo >started; while [ ! -e go ]; do sleep 0.05; done'])"
    env = {"VLLM_PD_CACHE": str(empty_cache), "PYTHONPATH": str(project.ROOT / "scripts"), "PATH": "/usr/bin:/bin"}
    empty_cache.mkdir()
    process = subprocess.Popen([sys.executable, "-c", builder], env=env, cwd=empty_cache)
    while not (empty_cache / "started").exists():
        assert process.poll() is None
    process.kill()
    process.wait()
    taken = threading.Event()

    def take():
        with cache.lock():
            taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert not taken.wait(1)
    (empty_cache / "go").touch()
    assert taken.wait(60)
    thread.join()


def test_failed_command_says_what_it_said():
    with pytest.raises(BuildError, match="(?s)exit status 3.*the reason"):
        run(["sh", "-c", "echo the reason >&2; exit 3"])
    with pytest.raises(BuildError, match="no-such-command: not found"):
        run(["no-such-command"])


def test_the_extension_is_compiled_as_the_torch_of_this_environment_wants(tmp_path, monkeypatch):
    """With a compiler that only notes what it is asked: a machine that has the extension cached never asks torch."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nwhile [ "$1" != -o ]; do shift; done\ntouch "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    extension.compile_into(tmp_path, tmp_path, sys.executable)
    calls = (tmp_path / "compiler.log").read_text().splitlines()
    assert len(calls) == len(extension.SOURCES) + 1
    assert all("-D_GLIBCXX_USE_CXX11_ABI=" in call and "torch/include" in call for call in calls[:-1])
    assert (tmp_path / extension.FILE).exists()


@pytest.mark.parametrize("version", ["2.7.1+cu126", "2.6.1"])
def test_b53_no_cpu_wheel_is_compiled_against_another_torch_than_it_asks_for(tmp_path, monkeypatch, version):
    monkeypatch.setattr(extension, "torch_version", lambda python: version)
    with pytest.raises(BuildError, match=rf"has torch {re.escape(version)}.*asks for torch 2\.6\.0: build inside"):
        targets.build_cpu(tmp_path, sys.executable)
    monkeypatch.setattr(extension, "torch_version", lambda python: "2.6.0+cpu")
    assert extension.check_torch(sys.executable) == "2.6.0+cpu"


@pytest.fixture
def setup_script(empty_cache, tmp_path, monkeypatch):
    """The names in setup.py, run as in an interpreter without torch, with nothing in the cache."""
    monkeypatch.setenv("VLLM_PD_TARGET", "cpu")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(extension, "torch_version", lambda python: extension.pinned_torch())
    monkeypatch.setattr(source, "patched", lambda: tmp_path)
    (tmp_path / "csrc").mkdir()
    return runpy.run_path(str(project.ROOT / "setup.py"))


def test_b53_pip_fetches_torch_only_to_compile(setup_script, tmp_path):
    """As `pip wheel .` asks, whose build isolation has no torch."""
    needed_to_build = setup_script["needed_to_build"]
    assert needed_to_build() == ["torch==2.6.0", "numpy<2.3"]
    cache.piece("extension", extension.key(tmp_path, "2.6.0"), lambda folder: None, "test")
    assert needed_to_build() == []


def test_setup_leaves_no_folder_behind(tmp_path):
    env = os.environ | {"TMPDIR": str(tmp_path), "VLLM_PD_TARGET": "plugin"}
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=project.ROOT, env=env, capture_output=True,
                          text=True)
    assert done.stdout.split()[-1] == project.version("", "plugin"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_each_pin_of_the_environments_has_its_hash():
    """But a build of torch that PyPI does not have: by itself, for pip refuses a file in which some lines have one."""
    files = {file.name: [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
             for file in (project.ROOT / "requirements").glob("*.txt")}  # fmt: skip
    assert files.pop("v1_torch.txt") == ["torch==2.13.0+cpu"]
    assert sum(map(len, files.values())) > 300
    for name, lines in files.items():
        for line in lines:
            assert re.fullmatch(r"[a-z0-9._-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line), f"{name}: {line}"
