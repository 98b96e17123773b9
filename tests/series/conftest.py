# SPDX-License-Identifier: Apache-2.0
"""A toy upstream of three files and a toy series of three patches, in a temporary project of their own.

`adopt` depends on `open` (it changes the line that `open` adds), `mend` depends on nothing.
"""
import hashlib
import importlib.util
import io
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from _series import pin as pins
from _series import source as sources
from _series.git import Repo


def script(name: str):
    """A script of ours as a module (this folder's own name would hide one of them from `import`)."""
    path = Path(sources.__file__).parent.parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


series, upstream = script("series"), script("upstream")
ENGINE = "".join(f"""\
class Part{n}:

    def step(self):
        # first of {n}
        total = {n}
        # last of {n}
        return total


""" for n in range(6))
FILES = {"vllm/__init__.py": "", "vllm/engine.py": ENGINE, "vllm/cpu.py": "def platform():\n    return 'cpu'\n",
         "vllm/_version.py": "version = '1.0'\n", "setup.py": "import sys\n", "README.md": "upstream\n"}
TRAILERS = {"Kind": "seam", "Why-Not-Plugin": "nothing can be registered there.", "Used-By": "a hook",
            "Forwarded": "no (a toy)", "Depends-On": "none", "Drop-When": "never"}
PROSE = "Upstream does not do this, and nothing else can make it do so.\nWith PD off nothing changes."


def sdist(version: str, files: dict) -> bytes:
    """A .tar.gz like a source distribution."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"vllm-{version}/{path}")
            entry.size = len(content.encode())
            tar.addfile(entry, io.BytesIO(content.encode()))
    return out.getvalue()


def message(subject: str, prose: str = PROSE, **changes) -> str:
    """A commit message with all trailers; `changes` by trailer with _ for -, None leaves one out."""
    trailers = {**TRAILERS, **{key.replace("_", "-"): value for key, value in changes.items()}}
    lines = "".join(f"{key}: {value}\n" for key, value in trailers.items() if value is not None)
    return f"{subject}\n\n{prose}\n\n{lines}"


@dataclass
class Project:
    """A project in `root`, its sdist in `cache`, and an imported work tree in `tree` once `take_apart` was called."""

    root: Path
    cache: Path
    tree: Path
    capsys: pytest.CaptureFixture

    @property
    def folder(self) -> Path:
        return self.root / "patches"

    @property
    def pin(self) -> pins.Pin:
        return pins.read(self.root)

    def adopt(self, version: str, files: dict) -> None:
        """Make this the pinned upstream, and put its sdist into the cache."""
        data = sdist(version, files)
        digest = sources.tree_digest(sources.members(data, f"vllm-{version}"))
        pin = pins.Pin(version, "unknown", hashlib.sha256(data).hexdigest(), digest)
        self.root.mkdir(exist_ok=True)
        (self.root / pins.FILE).write_text(pin.text())
        sources.store(self.cache / f"vllm-{version}.tar.gz", data)

    def run(self, *args) -> "tuple[int, str]":
        """Run series.py; its exit status and all that it printed."""
        status = series.main(["--root", str(self.root), "--cache", str(self.cache), *map(str, args)])
        said = self.capsys.readouterr()
        return status, said.out + said.err

    def fetch(self, *args) -> "tuple[int, str]":
        """Run upstream.py; its exit status and all that it printed."""
        status = upstream.main([*map(str, args), "--root", str(self.root), "--cache", str(self.cache)])
        said = self.capsys.readouterr()
        return status, said.out + said.err

    def take_apart(self) -> Repo:
        status, said = self.run("import", self.tree)
        assert status == 0, said
        return Repo(self.tree)

    def commit(self, path: str, old: str, new: str, text: str) -> None:
        """Commit one replacement in the work tree as one patch."""
        file = self.tree / path
        before = file.read_text()
        assert before.count(old) == 1
        file.write_text(before.replace(old, new))
        Repo(self.tree).commit_all(text, "Some One <one@example.org>")

    def state(self) -> dict:
        """Bytes of every file of the project, to see that a refusal wrote nothing."""
        return {str(path.relative_to(self.root)): path.read_bytes()
                for path in sorted(self.root.rglob("*")) if path.is_file()}

    def refused(self, *args) -> str:
        """Run series.py, see that it refuses and writes nothing; what it said."""
        before = self.state()
        status, said = self.run(*args)
        assert status == 2, said
        assert self.state() == before
        return said

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a file of the project on disk."""
        path = self.root / name
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new, 1))


OPEN, ADOPT, MEND = "engine: open the step", "engine: adopt the opening", "fix: mend the platform"
OPEN_FILE, ADOPT_FILE, MEND_FILE = ("engine-open-the-step.patch", "engine-adopt-the-opening.patch",
                                    "fix-mend-the-platform.patch")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The toy project with its three patches, made once; tests work on copies."""
    home = tmp_path_factory.mktemp("model")
    project = Project(home / "project", home / "cache", home / "tree", None)
    project.adopt("1.0", FILES)
    project.folder.mkdir()
    (project.folder / "series").write_text("")
    common = ["--root", str(project.root), "--cache", str(project.cache)]
    assert series.main([*common, "import", str(project.tree)]) == 0
    project.commit("vllm/engine.py", "total = 2\n", "total = 2\n        total += extra(self)\n", message(OPEN))
    project.commit("vllm/engine.py", "extra(self)", "hooks.extra(self)", message(
        ADOPT, Kind="hook", Depends_On=OPEN))
    project.commit("vllm/cpu.py", "'cpu'", "\"cpu\"", message(MEND, Kind="fix"))
    assert series.main([*common, "export", str(project.tree)]) == 0
    shutil.rmtree(project.tree)
    return home


@pytest.fixture
def toy(model, tmp_path, capsys) -> Project:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()
    return Project(tmp_path / "project", tmp_path / "cache", tmp_path / "tree", capsys)
