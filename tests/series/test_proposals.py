# SPDX-License-Identifier: Apache-2.0
"""What is proposed to upstream, and which of our patches its newest release makes superfluous: on a toy release. On the
real one: tests/v1_commands/test_for_upstream.py."""
import hashlib
import re
import subprocess

import pytest
from _series import proposals, source

from .conftest import FILES, message, sdist, series

CONDITION = "upstream steps by itself"
PROPOSAL = """From: vllm-pd <vllm-pd@localhost>
Subject: [Bugfix] Name the platform

Nobody can tell.
---
diff --git a/vllm/cpu.py b/vllm/cpu.py
--- a/vllm/cpu.py
+++ b/vllm/cpu.py
@@ -1,2 +1,2 @@
 def platform():
-    return 'cpu'
+    return 'the cpu'
diff --git a/tests/test_cpu.py b/tests/test_cpu.py
new file mode 100644
--- /dev/null
+++ b/tests/test_cpu.py
@@ -0,0 +1,2 @@
+def test_it():
+    assert True
"""
NAME = "bugfix-name-the-platform"


class Place:
    """A project with one proposal for the toy release 2.0, and a cache with its source."""

    def __init__(self, folder, monkeypatch) -> None:
        self.root, self.cache, self.out = folder / "project", folder / "cache", folder / "out"
        self.folder = self.root / "patches" / proposals.FOLDER
        self.folder.mkdir(parents=True)
        archive = sdist("2.0", FILES)
        source.store(self.cache / "vllm-2.0.tar.gz", archive)
        self.write("RELEASE", f"# a comment\nversion = 2.0\nsha256 = {hashlib.sha256(archive).hexdigest()}\n")
        self.write(f"{NAME}.patch", PROPOSAL)
        self.write("DROP_WHEN", f"{CONDITION} | vllm/engine.py | class Part5\n")
        config = folder / "gitconfig"
        config.write_text("[user]\n\tname = A. Sender\n\temail = a@sender.example\n")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
        monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        monkeypatch.chdir(folder)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str) -> int:
        return series.main(["--root", str(self.root), "--cache", str(self.cache), *arguments])


@pytest.fixture
def place(tmp_path, monkeypatch) -> Place:
    return Place(tmp_path, monkeypatch)


def test_a_proposal_is_a_commit_and_a_file_both_signed_off(place):
    assert place.run("for-upstream", str(place.out)) == 0
    mailed = (place.out / f"{NAME}.patch").read_text()
    assert mailed.startswith("From: A. Sender <a@sender.example>\nSubject: [Bugfix] Name the platform\n")
    assert "\n\nSigned-off-by: A. Sender <a@sender.example>\n---\n" in mailed and "+    return 'the cpu'" in mailed
    tree = place.out / "tree"
    log = subprocess.run(["git", "-c", f"safe.directory={tree}", "-C", str(tree), "log", "--format=%s", NAME],
                         capture_output=True, text=True, check=True).stdout
    assert log.splitlines() == ["[Bugfix] Name the platform", "vllm-2.0"]
    assert (tree / "vllm" / "cpu.py").read_text() == FILES["vllm/cpu.py"], "each is alone on the release"


@pytest.mark.parametrize("old, new, said", [
    ("'cpu'", "'tpu'", "bugfix-name-the-platform"),  # does not apply
    ("+    return 'the cpu'", "+    return the cpu", "invalid syntax"),
    ("tests/test_cpu.py", "docs/test_cpu.py", "changes no file below tests/"),
], ids=["another line", "no Python", "no test"])
def test_a_proposal_that_upstream_could_not_take_is_refused_and_nothing_is_written(place, capsys, old, new, said):
    place.write(f"{NAME}.patch", PROPOSAL.replace(old, new))
    assert place.run("for-upstream", str(place.out)) == 2
    assert said in capsys.readouterr().err and not place.out.exists()
    assert [path.name for path in place.out.parent.iterdir() if path.name.startswith("out")] == []


@pytest.mark.parametrize("text, said", [
    ("version = 2.0\n", "sha256 missing"), ("version = 2\n", "RELEASE:1"),
    ("version = 2.0\nversion = 2.0\n", "RELEASE:2"),
    ("version = 2.0\nsha256 = " + "0" * 64, "expected sha256 000")])
def test_a_release_that_can_t_be_told_or_is_another_is_refused(place, capsys, text, said):
    place.write("RELEASE", text)
    assert place.run("for-upstream", str(place.out)) == 2 and said in capsys.readouterr().err


def test_nobody_signs_off_for_somebody_else(place, monkeypatch, capsys):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    assert place.run("for-upstream", str(place.out)) == 2
    assert "git config user.name is not set" in capsys.readouterr().err


def test_a_folder_that_is_in_use_is_left_alone(place, capsys):
    place.out.mkdir()
    (place.out / "mine").write_text("")
    assert place.run("for-upstream", str(place.out)) == 2 and "is empty" in capsys.readouterr().err
    assert [path.name for path in place.out.iterdir()] == ["mine"]


def with_series(place, drop_when: str) -> None:
    """A series of one patch that waits for this."""
    text = message("fix: step", **{"Drop_When": drop_when})
    place.root.joinpath("patches", "series").write_text("fix-step.patch\n")
    subject, _, body = text.partition("\n\n")
    place.root.joinpath("patches", "fix-step.patch").write_text(
        f"From: a <a@b>\nSubject: {subject}\n\n{body.rstrip()}\n---\ndiff --git a/vllm/cpu.py b/vllm/cpu.py\n")


@pytest.mark.parametrize("how, holds", [
    ("class Part5", True), ("class Part9", False), ("not class Part9", True), ("not class Part5", False)])
def test_a_condition_is_seen_in_the_release(place, capsys, how, holds):
    with_series(place, CONDITION)
    place.write("DROP_WHEN", f"# a comment\n{CONDITION} | vllm/engine.py | {how}\n")
    assert place.run("dropped") == 0
    said = capsys.readouterr().out
    assert ("true, drop fix-step.patch" in said) is holds and ("not yet" in said) is not holds


def test_a_file_that_is_gone(place, capsys):
    with_series(place, CONDITION)
    place.write("DROP_WHEN", f"{CONDITION} | vllm/gone.py | absent\n")
    assert place.run("dropped") == 0 and "true, drop" in capsys.readouterr().out
    place.write("DROP_WHEN", f"{CONDITION} | vllm/gone.py | x\n")
    assert place.run("dropped") == 2 and re.search("vllm/gone.py: say where", capsys.readouterr().err)


@pytest.mark.parametrize("lines, waits_for, said", [
    (f"{CONDITION} | vllm/cpu.py | x\n", "upstream does it", "nothing says how to see 'upstream does it'"),
    (f"{CONDITION} | vllm/cpu.py | x\n", "never", "no patch waits for"),
    (f"{CONDITION} | vllm/cpu.py\n", CONDITION, "DROP_WHEN:1"),
    (f"{CONDITION} | vllm/cpu.py | (\n", CONDITION, "no pattern")])
def test_conditions_and_patches_name_each_other(place, capsys, lines, waits_for, said):
    with_series(place, waits_for)
    place.write("DROP_WHEN", lines)
    assert place.run("dropped") == 2 and said in capsys.readouterr().err
