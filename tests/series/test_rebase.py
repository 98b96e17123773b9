# SPDX-License-Identifier: Apache-2.0
"""The series on another release: what applies, what conflicts, and how one goes on."""
from types import SimpleNamespace

import pytest
from _series import rebase
from _series import source as sources
from _series.git import Repo

from .conftest import ADOPT, FILES, MEND, MEND_FILE, OPEN, OPEN_FILE, sdist, series


@pytest.fixture
def release(toy):
    """Put release 2.0 into the cache, made of 1.0 by replacements in its files; its sum."""
    def make(**changes: "tuple[str, str]") -> None:
        files = dict(FILES)
        for name, (old, new) in changes.items():
            path = f"vllm/{name}.py"
            assert old in files[path]
            files[path] = files[path].replace(old, new)
        sources.store(toy.cache / "vllm-2.0.tar.gz", sdist("2.0", files))
    return make


def words(said: str) -> dict:
    """Word by subject in the table that --try prints."""
    rows = [[cell.strip() for cell in line.split("|")] for line in said.splitlines() if line.startswith("| ")]
    return {row[1]: row[2] for row in rows[1:]}


def test_try_unchanged(toy, release):
    release()
    assert words(toy.run("rebase", "2.0", "--try")[1]) == {OPEN: "clean", ADOPT: "clean", MEND: "clean"}


def test_try_moved(toy, release):
    """Lines that moved are no drift."""
    release(engine=("class Part0:", "import os\n\n\nclass Part0:"))
    assert words(toy.run("rebase", "2.0", "--try")[1])[OPEN] == "clean"


def test_try_drifted(toy, release):
    """A context line three away has changed: nothing that `check` would take, but fuzz would."""
    release(engine=("# first of 2", "# initial of 2"))
    assert words(toy.run("rebase", "2.0", "--try")[1]) == {OPEN: "fuzz", ADOPT: "fuzz", MEND: "clean"}


def test_try_three_way(toy, release):
    """The file has a new name: only a merge that knows both upstreams can follow."""
    files = {("vllm/core.py" if path == "vllm/engine.py" else path): content for path, content in FILES.items()}
    sources.store(toy.cache / "vllm-2.0.tar.gz", sdist("2.0", files))
    assert words(toy.run("rebase", "2.0", "--try")[1]) == {OPEN: "3-way", ADOPT: "3-way", MEND: "clean"}


def test_try_contained_and_conflict(toy, release):
    """What upstream has done itself is told apart from what it has done otherwise; hunks are named, all go on."""
    before = toy.state()
    release(engine=("total = 2", "total = 22"), cpu=("'cpu'", '"cpu"'))
    status, said = toy.run("rebase", "2.0", "--try")
    assert status == 0
    assert words(said) == {OPEN: "conflict", ADOPT: "conflict", MEND: "contained"}
    assert "vllm/engine.py: hunk 1 (@@ -21,6 +21,7 @@)" in said
    assert toy.state() == before


def test_rebase_and_export(toy, release):
    """Without a conflict: the tree, then the patches and the pin are those of the new release."""
    release(engine=("class Part0:", "import os\n\n\nclass Part0:"))
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree, "--commit", "ab" * 20)
    assert status == 0 and "all patches are on vllm-2.0." in said and "export" in said
    assert toy.pin.version == "1.0"
    assert toy.run("export", toy.tree)[0] == 0
    assert (toy.pin.version, toy.pin.commit) == ("2.0", "ab" * 20)
    assert "@@ -24,6 +24,7 @@" in (toy.folder / OPEN_FILE).read_text()
    assert toy.run()[0] == 0


def test_conflict_stops_and_goes_on(toy, release):
    """B52: a conflict names patch, file and line and says what to do; the same command goes on, the message is kept."""
    release(engine=("total = 2", "total = 22"))
    before = toy.state()
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert status == 1 and toy.state() == before
    assert f"conflict in '{OPEN}'" in said and "vllm/engine.py: conflicts at line 23" in said and "Next: mend" in said
    again = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert again[0] == 1 and "conflicts at line 23" in again[1]
    repo = Repo(toy.tree)
    assert "expected a clean tree" in toy.refused("export", toy.tree)
    text = FILES["vllm/engine.py"].replace("total = 2\n", "total = 22\n        total += extra(self)\n")
    (repo.path / "vllm/engine.py").write_text(text)
    assert "not added yet" in toy.run("rebase", "2.0", "--dir", toy.tree)[1]
    repo.run("add", "vllm/engine.py")
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    if status == 1:
        assert f"conflict in '{ADOPT}'" in said
        (repo.path / "vllm/engine.py").write_text(text.replace("extra", "hooks.extra"))
        repo.run("add", "vllm/engine.py")
        status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert status == 0, said
    assert toy.run("rebase", "2.0", "--dir", toy.tree)[0] == 0, "asking again is harmless"
    prose = (toy.folder / OPEN_FILE).read_text().split("\n---\n")[0]
    assert toy.run("export", toy.tree)[0] == 0
    assert toy.run()[0] == 0
    assert (toy.folder / OPEN_FILE).read_text().split("\n---\n")[0] == prose


@pytest.mark.parametrize("end", ["--abort", "--quit", None])
def test_b52_a_rebase_that_has_picked_nothing_picks_from_the_start(toy, release, end):
    """After git's own abort, or a kill before the first patch: an export then removed all patches."""
    release(engine=("total = 2", "total = 22"))
    if end is None:
        project = series.Project(SimpleNamespace(root=toy.root, cache=toy.cache, sdist=None))
        target = sources.release("2.0", toy.cache, None, "unknown")
        rebase.begin(project.patches(), project.source, target, toy.tree)
    else:
        toy.run("rebase", "2.0", "--dir", toy.tree)
        Repo(toy.tree).run("cherry-pick", end)
        Repo(toy.tree).run("reset", "--hard")
    assert "no commit after the tag `upstream`" in toy.refused("export", toy.tree)
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert status == 1 and f"conflict in '{OPEN}'" in said


def test_the_origin_of_a_sum_is_named(toy, release):
    """Not the index, where the sdist was in the cache."""
    release()
    assert f"(from {toy.cache}/vllm-2.0.tar.gz, see --sha256)" in toy.run("rebase", "2.0", "--try")[1]


def test_contained_is_left_out(toy, release):
    """A patch that upstream contains now is dropped on the way, and named."""
    release(cpu=("'cpu'", '"cpu"'))
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert status == 0
    assert f"these patches are not on vllm-2.0, which contains them, or they were given up:\n  - {MEND}\n" in said
    assert toy.run("rebase", "2.0", "--dir", toy.tree)[1] == said, "asking again is harmless"
    assert toy.run("export", toy.tree)[0] == 0
    assert MEND_FILE not in (toy.folder / "series").read_text()


def test_gives_up_a_patch(toy, release):
    """A conflicting patch may be skipped, even the last."""
    release(cpu=("'cpu'", "'tpu'"))
    assert toy.run("rebase", "2.0", "--dir", toy.tree)[0] == 1
    Repo(toy.tree).run("cherry-pick", "--skip")
    status, said = toy.run("rebase", "2.0", "--dir", toy.tree)
    assert status == 0, said
    assert toy.run("export", toy.tree)[0] == 0
    assert (toy.folder / "series").read_text().split()[-1] != MEND_FILE


def test_refusals(toy, release):
    """B52: no folder, a folder of something else, a wrong sum."""
    release()
    assert "--dir" in toy.refused("rebase", "2.0")
    toy.take_apart()
    assert "found neither" in toy.refused("rebase", "2.0", "--dir", toy.tree)
    assert "expected sha256" in toy.refused("rebase", "2.0", "--try", "--sha256", "1" * 64)
