# SPDX-License-Identifier: Apache-2.0
"""B51 and B52 on the toy: the series holds, and each guard refuses what it is there for."""
import os
import shutil
import subprocess
import sys

import pytest
from _series.git import Repo

from .conftest import ADOPT, ADOPT_FILE, FILES, MEND, MEND_FILE, OPEN_FILE, message


def test_holds(toy):
    """B51: applies with no fuzz, compiles after each, sums and table are up to date; nothing is written."""
    before = toy.state()
    status, said = toy.run()
    assert status == 0 and "3 patches" in said
    assert toy.state() == before


def test_import_then_export_gives_the_same_bytes(toy):
    """B51: taken apart and put together again, no byte has changed."""
    before = toy.state()
    repo = toy.take_apart()
    assert len(repo.run("rev-list", "upstream..HEAD").split()) == 3
    status, said = toy.run("export", toy.tree)
    assert status == 0 and "nothing written" in said
    assert toy.state() == before


def test_bytes_do_not_depend_on_who_exports(toy, monkeypatch):
    """B51: neither the user's git settings nor dates nor hashes get into a patch."""
    before = toy.state()
    repo = toy.take_apart()
    for key, value in {"diff.noprefix": "true", "diff.algorithm": "patience", "diff.context": "9",
                       "core.abbrev": "5", "diff.mnemonicPrefix": "true", "i18n.logOutputEncoding": "latin1"}.items():
        repo.run("config", key, value)
    repo.run("rebase", "--force-rebase", "upstream", env={"GIT_COMMITTER_DATE": "2031-01-01T00:00:00+0300"})
    (repo.path / ".git/info").mkdir(exist_ok=True)
    (repo.path / ".git/info/attributes").write_text("*.py diff=python\n")
    assert toy.run("export", toy.tree)[0] == 0
    assert toy.state() == before


def test_git_am_reads_the_patches(toy):
    """A patch is plain git: `git am` makes the commit that import makes."""
    repo = toy.take_apart()
    wanted = repo.run("log", "--format=%an <%ae>%n%B%T", "upstream..HEAD")
    repo.run("reset", "-q", "--hard", "upstream")
    names = (toy.folder / "series").read_text().split()
    repo.run("am", "-q", "--keep-non-patch", *(str(toy.folder / name) for name in names))
    assert repo.run("log", "--format=%an <%ae>%n%B%T", "upstream..HEAD") == wanted


def test_sums_are_those_of_the_patched_tree(toy):
    """B51: sha256sum itself agrees with SHA256SUMS after the series."""
    repo = toy.take_apart()
    done = subprocess.run(["sha256sum", "--check", "--strict", str(toy.folder / "SHA256SUMS")], cwd=repo.path,
                          capture_output=True, check=False)
    assert done.returncode == 0
    (repo.path / "vllm/cpu.py").write_text(FILES["vllm/cpu.py"])
    done = subprocess.run(["sha256sum", "--check", "--strict", str(toy.folder / "SHA256SUMS")], cwd=repo.path,
                          capture_output=True, check=False)
    assert done.returncode == 1


def test_table_and_diff(toy):
    """The table has a row a patch and the true size; the diff is the whole change at once."""
    status, said = toy.run("table")
    assert status == 0 and "+2 -1 lines in 2 upstream files" in said
    assert f"| [{ADOPT}]({ADOPT_FILE}) | hook | +1 -1 | `vllm/engine.py` |" in said
    status, said = toy.run("diff")
    assert said.count("\n@@ ") == 2 and "+        total += hooks.extra(self)" in said
    assert "\n@@ -21,6 +21,7 @@ class Part2:\n" in said


# B52: a patch that no longer applies.

@pytest.mark.skipif(not (shutil.which("patch") or os.environ.get("CI")), reason="patch missing: apt-get install patch")
def test_hunk_that_needs_fuzz(toy):
    """B51, B52: context that differs in one line is refused, with file and hunk, though `patch` would take it."""
    toy.edit(f"patches/{OPEN_FILE}", "         # first of 2", "         # initial of 2")
    assert toy.fetch(toy.tree)[0] == 0
    plain = subprocess.run(["patch", "-p1", "--dry-run", "-d", str(toy.tree)], capture_output=True, text=True,
                           stdin=(toy.folder / OPEN_FILE).open(), check=False)
    assert plain.returncode == 0 and "fuzz" in plain.stdout, "the patch must be one that fuzz would save"
    said = toy.refused()
    assert f"{OPEN_FILE}: vllm/engine.py: hunk 1 (@@ -21,6 +21,7 @@) does not apply" in said


def test_hunk_at_another_line(toy):
    """B51: a patch that applies, but not where it says, is not what an export writes."""
    toy.edit(f"patches/{OPEN_FILE}", "@@ -21,6 +21,7 @@", "@@ -20,6 +20,7 @@")
    assert f"{OPEN_FILE} is not what an export writes" in toy.refused()


def test_file_that_upstream_does_not_have(toy):
    """B52: the missing file is named."""
    patch = toy.folder / MEND_FILE
    patch.write_text(patch.read_text().replace("vllm/cpu.py", "vllm/tpu.py"))
    assert f"{MEND_FILE}: vllm/tpu.py: no such file" in toy.refused()


def test_second_of_two_hunks(toy):
    """B52: the hunk is named by its number within its file."""
    toy.take_apart()
    file = toy.tree / "vllm/engine.py"
    file.write_text(file.read_text().replace("total = 0", "total = 10").replace("total = 5", "total = 50"))
    Repo(toy.tree).commit_all(message("engine: count in tens", Depends_On="none"))
    assert toy.run("export", toy.tree)[0] == 0
    toy.edit("patches/engine-count-in-tens.patch", "-        total = 5", "-        total = 6")
    assert "engine-count-in-tens.patch: vllm/engine.py: hunk 2 (@@ -48,7" in toy.refused()


def test_claim_of_independence(toy):
    """B51: a patch that says it depends on nothing must apply alone."""
    toy.edit(f"patches/{ADOPT_FILE}", "Depends-On: engine: open the step", "Depends-On: none")
    assert f"{ADOPT_FILE}: says Depends-On: none, but with that alone vllm/engine.py: hunk 1" in toy.refused()


def test_prefix_that_does_not_compile(toy):
    """B51: the tree must compile after every prefix, not only at the end."""
    toy.take_apart()
    toy.commit("vllm/cpu.py", "def platform():", "def platform(:", message("cpu: break the platform", Depends_On=MEND))
    toy.commit("vllm/cpu.py", "def platform(:", "def platform(*_):", message(
        "cpu: heal the platform", Depends_On="cpu: break the platform"))
    said = toy.refused("export", toy.tree)
    assert "cpu-break-the-platform.patch: after it vllm/cpu.py does not compile" in said
    assert "cpu-heal" not in said


def test_prefix_that_does_not_import(toy):
    """B51: `check --imports` finds what compiles but cannot be imported."""
    assert toy.run("check", "--imports", sys.executable)[0] == 0
    toy.take_apart()
    toy.commit("vllm/cpu.py", "def platform", "import no_such_thing\n\n\ndef platform", message(
        "cpu: import too much", Depends_On=MEND))
    assert toy.run("export", toy.tree)[0] == 0
    said = toy.refused("check", "--imports", sys.executable)
    assert "cpu-import-too-much.patch: after it vllm.cpu cannot be imported" in said and "no_such_thing" in said


# B52: the folder.

@pytest.mark.parametrize("name", ["README.md", "SHA256SUMS"])
def test_made_file_edited_by_hand(toy, name):
    """B52: README.md and SHA256SUMS are what an export makes of the patches, to the byte."""
    path = toy.folder / name
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert f"{name} is not what an export writes" in toy.refused()
    path.unlink()
    assert f"{name} is not what an export writes" in toy.refused()


def test_series_and_folder_disagree(toy):
    """B52: a patch outside the series, a name without its patch, a name twice."""
    (toy.folder / "stray.patch").write_text("")
    assert "stray.patch is not in series" in toy.refused()
    (toy.folder / "stray.patch").unlink()
    (toy.folder / "series").write_text(f"{OPEN_FILE}\n{OPEN_FILE}\ngone.patch\n{ADOPT_FILE}\n{MEND_FILE}\n")
    said = toy.refused()
    assert f"names '{OPEN_FILE}' twice" in said and "names 'gone.patch', which is not there" in said


def test_wrong_order(toy):
    """B52: a patch before the one it needs is refused for its header and for its hunk."""
    (toy.folder / "series").write_text(f"{ADOPT_FILE}\n{OPEN_FILE}\n{MEND_FILE}\n")
    said = toy.refused()
    assert f"{ADOPT_FILE}: Depends-On:" in said and f"{ADOPT_FILE}: vllm/engine.py: hunk 1" in said


def test_wrong_file_name(toy):
    """B52: the file's name follows from the subject."""
    (toy.folder / OPEN_FILE).rename(toy.folder / "0001-open.patch")
    toy.edit("patches/series", OPEN_FILE, "0001-open.patch")
    assert f"0001-open.patch: expected {OPEN_FILE}" in toy.refused()


def test_not_a_patch(toy):
    """B52: a file that isn't in our format is refused by name."""
    (toy.folder / MEND_FILE).write_text("--- a/x\n+++ b/x\n")
    assert f"{MEND_FILE}: expected `From:`" in toy.refused()


def test_sdist_is_checked_by_every_command(toy):
    """B52: no command works on a source that isn't the pinned one."""
    (toy.cache / "vllm-1.0.tar.gz").write_bytes(b"x")
    for command in (["check"], ["table"], ["diff"], ["import", toy.tree], ["drop", MEND_FILE]):
        assert "expected sha256" in toy.refused(*command)
    assert not toy.tree.exists()


# B52: the work tree.

@pytest.mark.parametrize("path", ["vllm/cpu.py", "vllm/new.py"])
def test_dirty_tree(toy, path):
    """B52: an uncommitted change is refused and named."""
    toy.take_apart()
    (toy.tree / path).write_text("changed = 1\n")
    assert path in toy.refused("export", toy.tree)


def test_tree_without_upstream(toy):
    """B52: a tree that import did not make is refused."""
    repo = toy.take_apart()
    repo.run("tag", "-d", "upstream")
    assert "expected a git work tree with the tag `upstream`" in toy.refused("export", toy.tree)


def test_tree_on_another_upstream(toy):
    """B52: a change that hides in the upstream commit would be in no patch; the file is named."""
    repo = toy.take_apart()
    (repo.path / "README.md").write_text("changed\n")
    repo.commit_all(message("fix: hide a change"))
    repo.run("tag", "-f", "upstream")
    assert "README.md differs from the pinned source" in toy.refused("export", toy.tree)


def test_merge_and_fixup(toy):
    """B52: only a line of finished commits can be exported."""
    repo = toy.take_apart()
    toy.commit("vllm/cpu.py", "platform", "platform_", f"fixup! {MEND}\n")
    assert "is still a 'fixup! fix: mend the platform'" in toy.refused("export", toy.tree)
    repo.run("reset", "-q", "--hard", "HEAD^")
    repo.run("checkout", "-q", "-b", "side", "HEAD^")
    toy.commit("vllm/engine.py", "total = 4", "total = 40", message("engine: count more"))
    repo.run("checkout", "-q", "main")
    repo.run("merge", "-q", "-m", "merge", "side", env={"GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@x"})
    assert "expected one line of commits" in toy.refused("export", toy.tree)


def test_import_into_something(toy):
    """B52: import takes only a new folder, and leaves none behind when it refuses."""
    toy.tree.mkdir()
    (toy.tree / "mine").write_text("")
    assert "empty" in toy.refused("import", toy.tree)
    (toy.tree / "mine").unlink()
    toy.tree.rmdir()
    toy.edit(f"patches/{OPEN_FILE}", "         # first of 2", "         # initial of 2")
    assert "hunk 1" in toy.refused("import", toy.tree)
    assert not [path for path in toy.tree.parent.iterdir() if path.name.startswith(toy.tree.name)]


# Changing the series.

def test_new(toy):
    """`new` makes a commit that export refuses until its message is written."""
    toy.take_apart()
    assert "nothing has changed" in toy.refused("new", "engine: count more", "--tree", toy.tree)
    file = toy.tree / "vllm/engine.py"
    file.write_text(file.read_text().replace("total = 4", "total = 40"))
    status, said = toy.run("new", "engine: count more", "--tree", toy.tree)
    assert status == 0 and "engine-count-more.patch" in said
    said = toy.refused("export", toy.tree)
    assert "engine-count-more.patch: trailer Kind: has no value yet" in said
    Repo(toy.tree).run("commit", "-q", "--amend", "-F", "-", stdin=message("engine: count more").encode())
    assert toy.run("export", toy.tree)[0] == 0
    assert toy.run()[0] == 0
    assert (toy.folder / "series").read_text().split()[-1] == "engine-count-more.patch"


def test_drop(toy):
    """`drop` takes a patch out and moves what follows; one that others need stays, and the others are named."""
    assert ADOPT_FILE in toy.refused("drop", OPEN_FILE)
    assert "no such patch" in toy.refused("drop", "nothing.patch")
    status, said = toy.run("drop", ADOPT_FILE)
    assert status == 0, said
    assert not (toy.folder / ADOPT_FILE).exists()
    assert toy.run()[0] == 0
    assert toy.run("drop", OPEN_FILE)[0] == 0 and toy.run("drop", MEND_FILE)[0] == 0
    assert toy.run()[0] == 0
    assert (toy.folder / "series").read_text() == (toy.folder / "SHA256SUMS").read_text() == ""
