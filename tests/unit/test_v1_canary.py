# SPDX-License-Identifier: Apache-2.0
"""B92: scripts/v1_canary.py tells whether a release has the names that the V1 binding stands on."""
import io
import sys
import tarfile

import pytest
import v1_canary

from vllm_pd.model.source_names import Required

SOURCES = {"vllm/engine/core.py": "class Core:\n    def add(self, request): ...\n"}


@pytest.fixture
def canary(monkeypatch):
    """Run the script with two names to look for: the exit status."""
    names = {"engine/core.py": (Required("Core.add", "reason", takes=("request", )), )}
    monkeypatch.setattr(v1_canary, "REQUIRED", names)

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["v1_canary.py", *arguments])
        return v1_canary.main()
    return run


def write_tree(folder, sources: dict[str, str]) -> None:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_b92_a_folder_that_fits_and_one_that_lacks_a_name(canary, tmp_path, capsys):
    """B92: a checkout, and the package itself."""
    write_tree(tmp_path, SOURCES)
    assert canary(str(tmp_path), str(tmp_path / "vllm")) == 0
    assert capsys.readouterr().out.count("has all 1") == 2
    write_tree(tmp_path, {"vllm/engine/core.py": "class Core:\n    def add(self, request, wave): ...\n"})
    assert canary(str(tmp_path)) == 1
    assert "lacks 1 of 1\n    Core.add(request, wave) in vllm/engine/core.py" in capsys.readouterr().out


def test_b92_a_release_from_the_cache(canary, tmp_path, capsys):
    """B92: nothing is fetched where the cache has the sdist."""
    with tarfile.open(tmp_path / "vllm-9.9.9.tar.gz", "w:gz") as archive:
        for name, text in SOURCES.items():
            entry = tarfile.TarInfo(f"vllm-9.9.9/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    assert canary("9.9.9", "--cache", str(tmp_path)) == 0
    assert capsys.readouterr().out == "9.9.9: has all 1\n"


def test_a_folder_without_vllm_is_refused_and_the_others_are_looked_at(canary, tmp_path, capsys):
    write_tree(tmp_path / "good", SOURCES)
    (tmp_path / "bad").mkdir()
    assert canary(str(tmp_path / "bad"), str(tmp_path / "good")) == 2
    said = capsys.readouterr()
    assert "expected the package vllm" in said.err and "has all 1" in said.out
