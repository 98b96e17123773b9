# SPDX-License-Identifier: Apache-2.0
"""B52: upstream.py gives the pinned source or nothing."""
import hashlib
import io
import tarfile

import pytest
from _series import pin as pins
from _series import source as sources
from _series.errors import Refusal
from _series.git import Repo
from _wheel import cache as wheel_cache

from .conftest import FILES, Project, sdist


def refuses(project: Project, dest, *args) -> str:
    """Run upstream.py, see that it refuses and leaves nothing behind; what it said."""
    status, said = project.fetch(dest, *args)
    assert status == 2, said
    assert not dest.exists() or not list(dest.iterdir())
    assert not [path for path in dest.parent.iterdir() if path.name.startswith(dest.name + ".")], "half written"
    return said


@pytest.mark.parametrize("variables, found", [
    ({"VLLM_PD_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"), ({"XDG_CACHE_HOME": "/b"}, "/b/vllm-pd"),
    ({"HOME": "/c"}, "/c/.cache/vllm-pd"), ({"HOME": "/c", "VLLM_PD_CACHE": ""}, "/c/.cache/vllm-pd"),
])  # fmt: skip
def test_the_cache_is_that_of_the_wheels(monkeypatch, variables, found):
    for name in ("VLLM_PD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(sources.default_cache()) == str(wheel_cache.root()) == found


def test_unpacks_the_pinned_source(toy, tmp_path):
    """B52, the good case: each file with its bytes, the sum checked."""
    status, said = toy.fetch(tmp_path / "out")
    assert status == 0, said
    found = {str(path.relative_to(tmp_path / "out")): path.read_text()
             for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == FILES


@pytest.mark.parametrize("old, new, named", [
    ("sha256 = ", "sha256 = x", "sha256 must match"),
    ("version = 1.0", "version = latest", "version must match"),
    ("version = 1.0\n", "", "version missing"),
    ("version = 1.0\n", "version = 1.0\nversion = 2.0\n", "found 'version = 2.0'"),
    ("version = 1.0\n", "version = 1.0\nurl = x\n", "found 'url = x'"),
])
def test_bad_pin(toy, tmp_path, old, new, named):
    """B52: a pin that is malformed is refused with its line."""
    toy.edit(pins.FILE, old, new)
    assert named in refuses(toy, tmp_path / "out")


def test_pin_of_something_else(toy, tmp_path):
    """B52: the right file under a wrong pin is refused, both sums are named."""
    right = toy.pin.sha256
    toy.edit(pins.FILE, f"\nsha256 = {right}", "\nsha256 = " + "0" * 64)
    said = refuses(toy, tmp_path / "out")
    assert "0" * 64 in said and right in said


def test_tampered_sdist(toy, tmp_path):
    """B52: one changed byte in the cache is found before anything is unpacked."""
    path = toy.cache / "vllm-1.0.tar.gz"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = refuses(toy, tmp_path / "out")
    assert toy.pin.sha256 in said and hashlib.sha256(data).hexdigest() in said


def test_half_a_download_leaves_no_file(toy, tmp_path, monkeypatch):
    """B52: what the index gives is checked before it enters the cache."""
    path = toy.cache / "vllm-1.0.tar.gz"
    data = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(sources, "download", lambda version: sources.Download(data[:-10], "url", None))
    assert "expected sha256" in refuses(toy, tmp_path / "out")
    assert list(toy.cache.iterdir()) == []
    monkeypatch.setattr(sources, "download", lambda version: sources.Download(data, "url", None))
    assert toy.fetch(tmp_path / "out")[0] == 0
    assert [path.name for path in toy.cache.iterdir()] == ["vllm-1.0.tar.gz"]


def test_destination_in_use(toy, tmp_path):
    """B52: a folder with something in it is left alone."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    status, said = toy.fetch(tmp_path / "out")
    assert status == 2 and "empty" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("name, kind", [("vllm-1.0/../../evil", tarfile.REGTYPE), ("/evil", tarfile.REGTYPE),
                                        ("vllm-1.0/link", tarfile.SYMTYPE), ("other/a", tarfile.REGTYPE)])
def test_archive_that_leads_outside(name, kind):
    """B52: no name of an archive can be written outside the destination."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc" if kind == tarfile.SYMTYPE else ""
        tar.addfile(entry)
    with pytest.raises(Refusal, match="expected regular files under vllm-1.0/"):
        list(sources.members(out.getvalue(), "vllm-1.0"))


@pytest.fixture
def checkout(toy, tmp_path):
    """A git checkout with the toy's content, without what only sdists have."""
    repo = Repo(tmp_path / "checkout")
    repo.create()
    for path, content in FILES.items():
        if path not in sources.GENERATED:
            file = repo.path / path
            file.parent.mkdir(exist_ok=True)
            file.write_text(content)
    repo.commit_all("v1.0\n")
    return repo


def test_checkout_by_content(toy, tmp_path, checkout):
    """B52: a checkout with the pinned content will do, whatever its commit is."""
    status, said = toy.fetch(tmp_path / "out", "--from", checkout.path)
    assert status == 0, said
    assert (tmp_path / "out/vllm/engine.py").read_text() == FILES["vllm/engine.py"]


def test_checkout_by_commit(toy, tmp_path, checkout):
    """B52: so will the pinned commit."""
    toy.edit(pins.FILE, "commit = unknown", f"commit = {checkout.head()}")
    toy.edit(pins.FILE, toy.pin.tree_sha256, "0" * 64)
    assert toy.fetch(tmp_path / "out", "--from", checkout.path)[0] == 0


def test_checkout_of_something_else(toy, tmp_path, checkout):
    """B52: another commit with other content is refused, expected and found are named."""
    (checkout.path / "vllm/cpu.py").write_text("changed\n")
    checkout.commit_all("changed\n")
    said = refuses(toy, tmp_path / "out", "--from", checkout.path)
    assert checkout.head() in said and toy.pin.tree_sha256 in said


@pytest.mark.parametrize("path", ["vllm/cpu.py", "vllm/new.py"])
def test_dirty_checkout(toy, tmp_path, checkout, path):
    """B52: a changed or an untracked file makes a checkout unusable, and is named."""
    (checkout.path / path).write_text("changed\n")
    assert path in refuses(toy, tmp_path / "out", "--from", checkout.path)


def test_no_checkout(toy, tmp_path):
    """B52: a folder without a commit, or inside somebody else's, is no checkout."""
    assert "no such folder" in refuses(toy, tmp_path / "out", "--from", tmp_path / "nowhere")
    repo = Repo(tmp_path / "outer")
    repo.create()
    (repo.path / "vllm").mkdir()
    (repo.path / "vllm/a.py").write_text("")
    repo.commit_all("x\n")
    assert "a folder inside one" in refuses(toy, tmp_path / "out", "--from", repo.path / "vllm")


def test_index_through_pip(toy, tmp_path, monkeypatch):
    """B52: an empty cache is filled by the user's own pip, as the user has configured it."""
    shelf = tmp_path / "shelf"
    toy.cache.rename(shelf)
    sources.store(shelf / "vllm-1.0-py3-none-any.whl", b"a wheel is not the source")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    said = refuses(toy, tmp_path / "out")
    assert "no source distribution of vllm 1.0" in said and "--sdist FILE" in said
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    status, said = toy.fetch(tmp_path / "out")
    assert status == 0, said
    assert (toy.cache / "vllm-1.0.tar.gz").read_bytes() == (shelf / "vllm-1.0.tar.gz").read_bytes()


def test_file_from_elsewhere(toy, tmp_path):
    """B52: --sdist takes a file that the user has, if it is the right one."""
    shelf = toy.cache.rename(tmp_path / "shelf")
    assert toy.fetch(tmp_path / "out", "--sdist", shelf / "vllm-1.0.tar.gz")[0] == 0
    (shelf / "wrong.tar.gz").write_bytes(b"wrong")
    assert "expected sha256" in refuses(toy, tmp_path / "other", "--sdist", shelf / "wrong.tar.gz")


def test_release_with_another_sum(toy):
    """B52: `rebase --sha256` is held against the sdist."""
    sources.store(toy.cache / "vllm-2.0.tar.gz", sdist("2.0", FILES))
    with pytest.raises(Refusal, match="expected sha256 " + "1" * 64):
        sources.release("2.0", toy.cache, "1" * 64, "unknown")
