# SPDX-License-Identifier: Apache-2.0
"""A search that has passed is skipped as long as no code that it sees has changed (tests/searches.py)."""
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import searches

PROJECT = {
    "tests/conftest.py": "", "tests/area/conftest.py": "", "tests/area/model.txt": "1", "patches/SHA256SUMS": "",
    "tests/area/test_it.py": "from world import World\nfrom vllm_pd.low import step\n",
    "tests/area/world.py": "import vllm_pd.pack.far\n",
    "vllm_pd/low/__init__.py": "", "vllm_pd/low/step.py": "def f():\n    from vllm_pd import inner\n",
    "vllm_pd/inner.py": "", "vllm_pd/pack/__init__.py": "", "vllm_pd/pack/far.py": "", "vllm_pd/other.py": ""}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The folder of a small project, with a cache folder of its own."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(searches, "ROOT", tmp_path)
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (searches.imported, searches.code_of, searches.record):
        cached.cache_clear()


def passes(module: Path, name: str, marked: bool = True) -> None:
    """The test of this name runs and passes."""
    item = SimpleNamespace(path=module, name=name, get_closest_marker=lambda marker: marked or None)
    runs = searches.pytest_runtest_call(item)
    next(runs)
    with pytest.raises(StopIteration):
        next(runs)


def test_all_that_is_imported_counts(project):
    found = {file.relative_to(project).as_posix() for file in searches.code_of(project / "tests/area/test_it.py")}
    assert found == PROJECT.keys() - {"vllm_pd/other.py", "patches/SHA256SUMS"}


@pytest.mark.parametrize("name", PROJECT)
def test_it_is_searched_again_when_code_of_it_has_changed(project, name):
    module = project / "tests/area/test_it.py"
    passes(module, "test_a[x]")
    assert searches.proven(module) == {"test_a[x]"}
    (project / name).write_text(PROJECT[name] + "\n# changed\n")
    forget()
    assert searches.proven(module) == (set() if name != "vllm_pd/other.py" else {"test_a[x]"})


def test_a_half_written_line_counts_for_nothing(project):
    module = project / "tests/area/test_it.py"
    passes(module, "test_a")
    with searches.record(module).open("a") as file:
        file.write("test_b")
    assert searches.proven(module) == {"test_a"}


def test_what_is_no_search_is_not_noted(project):
    module = project / "tests/area/test_it.py"
    passes(module, "test_a", marked=False)
    assert not searches.record(module).exists()


@pytest.mark.parametrize("skips", [False, True])
def test_it_is_skipped_only_where_that_is_wanted(project, monkeypatch, skips):
    module, added = project / "tests/area/test_it.py", []
    passes(module, "test_a")
    monkeypatch.delenv(searches.SKIP, raising=False)
    if skips:
        monkeypatch.setenv(searches.SKIP, "1")
    items = [SimpleNamespace(path=module, name=name, get_closest_marker=lambda marker: True,
                             add_marker=lambda mark, name=name: added.append(name)) for name in ("test_a", "test_b")]
    searches.pytest_collection_modifyitems(items)
    assert added == (["test_a"] if skips else [])
