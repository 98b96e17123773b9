# SPDX-License-Identifier: Apache-2.0
"""scripts/lab/gpu_kit: what fits, what is kept of a library, what is unpacked. Its scripts are in tests/sockets."""
import io
import json
import lzma
import shutil
import struct
import sys
import tarfile
from importlib.util import cache_from_source
from pathlib import Path

import fits
import make_model
import pytest
import slim_fatbin
import unpack
from fits import KitNeeds, MachineFacts, find_misfits

NEEDS = KitNeeds("3.12", "2.11", "13", 90, 10**9)
FACTS = MachineFacts("3.12", "2.11.0+cu130", "13.0", "13.0", 90, 10**10)


def test_a_machine_as_the_kit_was_made_for_fits():
    assert find_misfits(NEEDS, FACTS) == []


@pytest.mark.parametrize("change", [
    {"torch": "2.11.0"}, {"torch": "2.13.1+cu130"}, {"torch": "3.0"}, {"torch": "2.12.0a0+git1"},
    {"torch_cuda": "13.2"}, {"driver_cuda": "14.1"}, {"free_bytes": 10**9 + fits.SPARE_BYTES},
])
def test_a_newer_machine_fits_too(change):
    assert find_misfits(NEEDS, FACTS._replace(**change)) == []


@pytest.mark.parametrize("change, named, cure", [
    ({"python": "3.11"}, "python: this is 3.11, the kit has packages for 3.12", "PYTHON=FILE"),
    ({"python": "3.13"}, "python: this is 3.13", "PYTHON=FILE"),
    ({"torch": "", "torch_cuda": ""}, "torch: there is none", "install torch 2.11 or later for CUDA 13"),
    ({"torch": "2.9.1+cu130"}, "torch: 2.9.1+cu130 is too old", "install torch 2.11 or later for CUDA 13"),
    ({"torch": "2.11.0+cpu", "torch_cuda": ""}, "torch: 2.11.0+cpu was built without CUDA", "for CUDA 13"),
    ({"torch_cuda": "12.8"}, "torch: it was built for CUDA 12.8, the kit's libraries for 13", "for CUDA 13"),
    ({"driver_cuda": "", "sm": 0}, "gpu: there is no NVIDIA driver", "use a machine with a GPU"),
    ({"driver_cuda": "12.9"}, "gpu: its driver knows CUDA up to 12.9, the kit needs 13", "install a newer driver"),
    ({"sm": 0}, "gpu: the driver finds none", "nvidia-smi"),
    ({"sm": 80}, "gpu: it is an sm_80, the kit has kernels for sm_90", "SM=80"),
    ({"sm": 100}, "gpu: it is an sm_100, the kit has kernels for sm_90", "SM=100"),
    ({"free_bytes": 10**9}, "disk: 1.0 GB are free, the kit needs 2.1 GB", "DEST=FOLDER"),
    ({"processor": "aarch64"}, "machine: it is aarch64", "use such a machine"),
])
def test_each_misfit_is_one_line_with_its_cure(change, named, cure):
    found = find_misfits(NEEDS, FACTS._replace(**change))
    assert len(found) == 1 and found[0].startswith(named) and cure in found[0] and "\n" not in found[0]


def test_all_misfits_are_told_at_once():
    found = find_misfits(NEEDS, MachineFacts("3.10", "2.6.0+cu124", "12.4", "12.4", 80, 0))
    assert [line.split(":")[0] for line in found] == ["python", "torch", "torch", "gpu", "gpu", "disk"]


@pytest.mark.parametrize("written", [None, "", "[]", "{}", '{"python": "3.12"}'])
def test_a_kit_that_is_not_whole_is_one_line(written, tmp_path, monkeypatch, capsys):
    if written is not None:
        (tmp_path / "kit.json").write_text(written)
    monkeypatch.setattr(sys, "argv", ["fits.py", str(tmp_path), str(tmp_path)])
    assert fits.main() == 2
    said = capsys.readouterr().out
    assert said.startswith("does not fit: kit: ") and "make_kit.sh" in said and said.count("\n") == 1


def test_facts_are_of_this_machine(tmp_path):
    facts = fits.read_facts(tmp_path / "not" / "there")
    assert facts.python == f"{sys.version_info[0]}.{sys.version_info[1]}" and facts.free_bytes > 0


def test_what_was_unpacked_counts_as_free(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.so").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    assert fits.read_facts(tmp_path).free_bytes == 1005


def make_library(*fat_binaries: list[tuple[int, int, bytes]]) -> bytes:
    """An ELF file with a section of fat binaries, each a list of (kind, architecture, payload)."""
    content = b""
    for entries in fat_binaries:
        inner = b"".join(slim_fatbin.ENTRY.pack(kind, 1, slim_fatbin.ENTRY.size, len(payload), 0, 0, 0, 0, arch,
                                                *[0] * 5) + payload for kind, arch, payload in entries)
        content += slim_fatbin.FATBIN.pack(slim_fatbin.FATBIN_MAGIC, 1, slim_fatbin.FATBIN.size, len(inner)) + inner
        content += bytes(16)  # between two
    names = b"\0.shstrtab\0.nv_fatbin\0"
    at = 64 + len(names)
    sections = [(0, 0, 0), (1, 64, len(names)), (11, at, len(content))]  # name, offset, size
    table = b"".join(struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, *place, 0, 0, 1, 0) for name, *place in sections)
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, at + len(content))
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections), 1)
    return bytes(header) + names + content + table


def test_other_architectures_are_emptied_and_nothing_moves(tmp_path):
    ptx, machine = slim_fatbin.PTX, slim_fatbin.MACHINE
    library = make_library(
        [(machine, 80, b"A" * 64), (machine, 90, b"B" * 64), (machine, 100, b"C" * 64), (ptx, 90, b"D" * 64)],
        [(machine, 80, b"E" * 64), (ptx, 75, b"F" * 64), (ptx, 80, b"G" * 64), (ptx, 100, b"H" * 64)])
    (tmp_path / "in.so").write_bytes(library)
    counts = slim_fatbin.slim(tmp_path / "in.so", tmp_path / "out.so", 90)
    expected = library
    for emptied in b"ACDEFH":
        expected = expected.replace(bytes([emptied]) * 64, bytes(64))
    assert (tmp_path / "out.so").read_bytes() == expected
    assert counts == {"fat binaries": 2, "with machine code": 1, "with PTX alone": 1, "with neither": 0,
                      "bytes kept": 128, "bytes emptied": 384}


@pytest.mark.parametrize("sm, kept", [(86, {80}), (89, {80}), (90, {90}), (75, set())])
def test_a_gpu_runs_code_of_an_older_one_of_its_generation(sm, kept):
    entries = [slim_fatbin.FatbinEntry(slim_fatbin.MACHINE, arch, arch, 1) for arch in (80, 90, 100)]
    assert {one.arch for one in slim_fatbin.kept(entries, sm)} == kept


def test_a_library_that_is_not_understood_is_refused(tmp_path):
    (tmp_path / "in.so").write_bytes(make_library([(99, 90, b"?" * 64)]))
    with pytest.raises(ValueError, match="unknown"):
        slim_fatbin.slim(tmp_path / "in.so", tmp_path / "out.so", 90)
    with pytest.raises(ValueError, match="no section .text"):
        slim_fatbin.section(make_library([]), ".text")


@pytest.fixture
def kit(tmp_path):
    """A kit with no piece, and a function that puts an archive of files into it."""
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / "kit.json").write_text(json.dumps({"archives": ["a.tar.xz", "b.tar.xz"],
                                                 "files": {"k.so.xz": "site/a/k.so"}}))

    def add(name: str, files: dict[str, str]) -> None:
        with tarfile.open(folder / name, "w:xz") as tar:
            for path, text in files.items():
                about = tarfile.TarInfo(path)
                about.size, about.mtime = len(text), 1
                tar.addfile(about, io.BytesIO(text.encode()))
    return folder, add


def files_in(folder: Path) -> dict[str, str]:
    return {str(one.relative_to(folder)): one.read_text() for one in folder.rglob("*")
            if one.is_file() and "__pycache__" not in one.parts}


def test_pieces_may_come_in_two_calls(kit, tmp_path):
    folder, add = kit
    site = tmp_path / "dest" / "site"
    add("a.tar.xz", {"site/a/x.py": "x = 1\n"})
    assert unpack.unpack(folder, tmp_path / "dest") == ["b.tar.xz", "k.so.xz"]
    assert files_in(site) == {"a/x.py": "x = 1\n"}
    (site / "a" / "x.py").write_text("still here")
    add("b.tar.xz", {"site/b/y.py": "y = 1\n"})
    (folder / "k.so.xz").write_bytes(lzma.compress(b"kernel"))
    assert unpack.unpack(folder, tmp_path / "dest") == []
    assert files_in(site) == {"a/x.py": "still here", "a/k.so": "kernel", "b/y.py": "y = 1\n"}


def test_a_changed_piece_is_unpacked_again_and_nothing_of_the_old_one_stays(kit, tmp_path):
    folder, add = kit
    dest = tmp_path / "dest"
    add("a.tar.xz", {"site/a/x.py": "x = 1\n", "site/a/old.py": "", "site/a/z.py": "z = 1\n"})
    (folder / "k.so.xz").write_bytes(lzma.compress(b"kernel"))
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    old = Path(cache_from_source(dest / "site/a/x.py")).read_bytes()
    add("a.tar.xz", {"site/a/x.py": "x = 2\n", "site/a/z.py": "z = 1\n"})  # as long, and of the same date
    (folder / "k.so.xz").write_bytes(lzma.compress(b"KERNEL"))
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    assert files_in(dest / "site") == {"a/x.py": "x = 2\n", "a/z.py": "z = 1\n", "a/k.so": "KERNEL"}
    assert Path(cache_from_source(dest / "site/a/x.py")).read_bytes() != old


def test_a_damaged_piece_is_unpacked_once_it_is_whole(kit, tmp_path):
    folder, add = kit
    dest = tmp_path / "dest"
    add("a.tar.xz", {"site/a/x.py": "x = 1\n", "site/a/old.py": ""})
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    byte_code = Path(cache_from_source(dest / "site/a/x.py"))
    old = byte_code.read_bytes()
    add("a.tar.xz", {"site/a/x.py": "x = 2\n"})  # as long, and of the same date
    whole = (folder / "a.tar.xz").read_bytes()
    (folder / "a.tar.xz").write_bytes(whole[:len(whole) // 2])
    with pytest.raises((EOFError, lzma.LZMAError, tarfile.TarError)):
        unpack.unpack(folder, dest)
    (folder / "a.tar.xz").write_bytes(whole)
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    assert files_in(dest / "site") == {"a/x.py": "x = 2\n"}
    assert byte_code.read_bytes() != old


def test_what_a_cut_call_has_unpacked_does_not_stay(kit, tmp_path, monkeypatch):
    folder, add = kit
    dest = tmp_path / "dest"

    def cut(tar: tarfile.TarFile, path: Path, **options) -> None:
        for member in tar.getmembers()[:2]:
            tar.extract(member, path, **options)
        raise KeyboardInterrupt

    add("a.tar.xz", {"site/a/x.py": "x = 1\n", "site/a/old.py": ""})
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    old = Path(cache_from_source(dest / "site/a/x.py")).read_bytes()
    add("a.tar.xz", {"site/a/x.py": "x = 2\n", "site/a/new.py": "", "site/a/never.py": ""})
    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "extractall", cut)
        with pytest.raises(KeyboardInterrupt):
            unpack.unpack(folder, dest)
    add("a.tar.xz", {"site/a/x.py": "x = 3\n"})
    unpack.unpack(folder, dest)
    unpack.compile_sources(dest)
    assert files_in(dest / "site") == {"a/x.py": "x = 3\n"}
    assert Path(cache_from_source(dest / "site/a/x.py")).read_bytes() != old


@pytest.mark.parametrize("name", make_model.SHAPES)
def test_heads_divide_what_they_share(name):
    config = make_model.make_config(make_model.SHAPES[name])
    assert config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["head_dim"] in (64, 128, 256)  # FlashInfer has no others


def test_a_model_without_weights_has_a_config_and_an_unpacked_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json.xz").write_bytes(lzma.compress(b"{}"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "b": 1}')
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(tmp_path / "model"), "--tokenizer",
                                      str(tmp_path / "tokenizer"), "--shape", "8b", "--bare"])
    assert make_model.main() == 0
    found = files_in(tmp_path / "model")
    assert found.pop("config.json") == json.dumps(make_model.make_config(make_model.SHAPES["8b"]), indent=1)
    settings = json.loads(found.pop("tokenizer_config.json"))
    assert settings == {"tokenizer_class": "PreTrainedTokenizerFast", "b": 1}, "or text is split in another way"
    assert found == {"tokenizer.json": "{}"}
