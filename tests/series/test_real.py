# SPDX-License-Identifier: Apache-2.0
"""B51 on the real pin and the real series. Fetches the sdist once, through the cache folder."""
from pathlib import Path

import pytest
from _series import folder, pin, source, verify
from _series.git import Repo

from .conftest import script

series = script("series")
ROOT = Path(source.__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def upstream() -> source.Source:
    return source.pinned(pin.read(ROOT), source.default_cache())


def test_series_holds(upstream, capsys):
    """B51: applies to the pinned source with no fuzz, each patch alone where it says so; the tree compiles after every
    prefix; bytes, checksums and table are what an export writes."""
    status = series.main(["--root", str(ROOT)])
    assert status == 0, capsys.readouterr().err


def test_import_then_export(upstream, tmp_path, capsys):
    """B51: with the whole real source, taken apart and put together, every byte of patches/ is the same."""
    assert series.main(["--root", str(ROOT), "import", str(tmp_path / "tree")]) == 0
    status = series.main(["--root", str(ROOT), "export", str(tmp_path / "tree")])
    said = capsys.readouterr()
    assert status == 0, said.err
    assert "nothing written" in said.out


def test_pin_names_the_tree(upstream):
    """B52: tree_sha256 is the digest of the pinned sdist's sources, and of nothing less."""
    assert source.tree_digest(upstream.files()) == upstream.pin.tree_sha256
    without = (member for member in upstream.files() if member.path != "vllm/version.py")
    assert source.tree_digest(without) != upstream.pin.tree_sha256


def test_version_file_is_canonical(upstream):
    """`rebase` writes the same file that a person reads here."""
    assert (ROOT / pin.FILE).read_text() == upstream.pin.text()


def test_no_patch_is_superfluous(upstream, tmp_path):
    """Each patch changes the tree, and the sums name every touched file."""
    patches = folder.patches(folder.load(ROOT / "patches"))
    touched = {path for patch in patches for path in patch.paths}
    repo = Repo(tmp_path / "tree")
    repo.create()
    upstream.unpack(repo.path, touched)
    repo.commit_all("upstream\n")
    for patch in patches:
        assert not verify.apply(repo, patch, "--index")
        assert repo.attempt("diff", "--cached", "--quiet").returncode == 1, patch.name
        repo.commit(patch.message)
    sums = (ROOT / "patches" / folder.SUMS).read_text().splitlines()
    assert [line.split("  ")[1] for line in sums] == sorted(touched)
