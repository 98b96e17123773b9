# SPDX-License-Identifier: Apache-2.0
"""B50: the comparison of upstream's tests on two trees, fed with results that hold regressions of every kind."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import compare_upstream
import pytest
import shadow_hub
from _series.errors import Refusal
from _upstream_tests import lists, results, runner, trees
from _upstream_tests.lists import TestList
from _upstream_tests.results import UpstreamOutcome, UpstreamResult, compare

PASSED, FAILED = UpstreamResult(UpstreamOutcome.PASSED), UpstreamResult(UpstreamOutcome.FAILED, "assert 1 == 2")
SKIPPED, ERROR = UpstreamResult(UpstreamOutcome.SKIPPED, "no GPU"), UpstreamResult(UpstreamOutcome.ERROR, "fixture")

SUITE = {
    "__init__.py": "",
    "test_a.py": """
import pytest
class TestK:
    @pytest.mark.parametrize("x", [1, "a b"])
    def test_in_class(self, x): assert x == 1
def test_plain(): pass
@pytest.mark.skip(reason="never")
def test_skipped(): pass
@pytest.fixture
def sour():
    yield
    raise RuntimeError("teardown")
def test_teardown(sour): pass
@pytest.mark.xfail
def test_expected(): assert False
""",
    "test_b.py": "import no_such_module\n",
    "test_once.py": """
from pathlib import Path
def test_unsteady():
    mark = Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen
""",
    "test_dies.py": "import os\ndef test_before(): pass\ndef test_exits(): os._exit(7)\n",
}


@pytest.fixture
def suite(tmp_path) -> runner.Site:
    """A small suite of tests in place of upstream's."""
    (tmp_path / "suite" / "tests").mkdir(parents=True)
    for name, text in SUITE.items():
        (tmp_path / "suite" / "tests" / name).write_text(text)
    (tmp_path / "out").mkdir()
    return runner.Site(
        "patched", tmp_path, tmp_path / "suite", tmp_path, tmp_path / "out", threading.Event(), run_limit_s=60
    )


def run(site: runner.Site, *arguments: str) -> dict[str, UpstreamResult]:
    return runner.run(site, TestList("v0", arguments), print)


def test_a_run_gives_each_test_its_outcome(suite):
    """B50: classes, parameters, skips, failing teardowns and modules that don't import, all under pytest's own ids."""
    found = {test: result.outcome for test, result in run(suite, "tests/test_a.py", "tests/test_b.py").items()}
    assert found == {
        "tests/test_a.py::TestK::test_in_class[1]": UpstreamOutcome.PASSED,
        "tests/test_a.py::TestK::test_in_class[a b]": UpstreamOutcome.FAILED,
        "tests/test_a.py::test_plain": UpstreamOutcome.PASSED,
        "tests/test_a.py::test_skipped": UpstreamOutcome.SKIPPED,
        "tests/test_a.py::test_teardown": UpstreamOutcome.ERROR,
        "tests/test_a.py::test_expected": UpstreamOutcome.SKIPPED,
        "tests/test_b.py": UpstreamOutcome.ERROR,
    }


def test_a_failure_that_does_not_come_again_is_unsteady(suite):
    """B50: it counts as passed and is marked."""
    result = run(suite, "tests/test_once.py", "tests/test_a.py")["tests/test_once.py::test_unsteady"]
    assert result.passed and result.unsteady
    assert compare("v0", {"t": PASSED}, {"t": result}).unsteady == ["t"]


def test_a_run_that_dies_names_where(suite):
    """B50: a tree that takes pytest down with it is no tree without failures."""
    with pytest.raises(runner.RunDied, match=r"patched.*ended with 7.*test_exits"):
        run(suite, "tests/test_dies.py")


def test_a_run_can_be_stopped(suite):
    """Ctrl-C ends the tests too."""
    suite.stop.set()
    with pytest.raises(runner.RunDied):
        run(suite, "tests/test_a.py")


@pytest.mark.parametrize(
    "after, reason",
    [
        ({"a": PASSED, "b": FAILED}, "failed: assert 1 == 2"),
        ({"a": PASSED, "b": ERROR}, "error: fixture"),
        ({"a": PASSED, "b": SKIPPED}, "skipped: no GPU"),
        ({"a": PASSED}, "did not run"),
    ],
)
def test_regressions_are_found(after, reason):
    """B50: a test that passed and now fails, errs, is skipped or is not there."""
    found = compare("v0", {"a": PASSED, "b": PASSED}, after)
    assert found.regressed == {"b": reason}
    assert not found.good


def test_what_is_no_regression():
    """B50: failing in both, newly passing, and tests that only the patched tree has."""
    before = {"a": PASSED, "both": FAILED, "mended": FAILED, "skipped": SKIPPED}
    found = compare("v0", before, {"a": PASSED, "both": FAILED, "mended": PASSED, "skipped": SKIPPED, "new": FAILED})
    assert found.good
    assert (found.mended, found.failing_in_both) == (["mended"], ["both"])
    assert found.failing_anew == {"new": "assert 1 == 2"}


@pytest.mark.parametrize(
    "after, left",
    [
        ({"f::T::a": PASSED, "f::T::b[1]": PASSED}, {}),
        ({"f::T::a": PASSED, "f::T::b[1]": FAILED}, {"f::T::b[1]": "failed: assert 1 == 2"}),
        ({"f::Tother": PASSED}, {"f::T": "did not run"}),
    ],
)
def test_what_must_be_mended(after, left):
    """B50: what the series claims to mend is checked as well, although it never passed unpatched."""
    found = compare("v1", {"a": PASSED}, {"a": PASSED, **after}, ["f::T"])
    assert found.unmended == left
    assert found.good == (not left)


def test_nothing_to_compare_is_refused():
    """B50: an unpatched run in which nothing passes proves nothing."""
    with pytest.raises(Refusal, match="no test passes"):
        compare("v0", {"a": FAILED}, {"a": FAILED})


@pytest.mark.parametrize("outcome, runs", [(PASSED, 1), (SKIPPED, 1), (FAILED, 2), (ERROR, 2)])
def test_unpatched_results_with_a_failure_are_not_kept(tmp_path, monkeypatch, outcome, runs):
    """B50: what failed for want of disk or memory would hide regressions for ever. What the series mends may fail."""
    monkeypatch.setenv("VLLM_PD_CACHE", str(tmp_path))
    found, ran = {"tests/a.py::t": outcome, "tests/a.py::u": PASSED, "tests/a.py::mended": FAILED}, []
    monkeypatch.setattr(runner, "run", lambda site, wanted, say: ran.append(site.name) or found)
    comparison = object.__new__(compare_upstream.ComparisonRun)  # trees are not staged
    vars(comparison).update(key="key", args=SimpleNamespace(fresh=False), site=lambda name: SimpleNamespace(name=name))
    wanted = TestList("v0", ("tests/a.py",), mended=("tests/a.py::mended",))
    assert [comparison.unpatched(wanted) for _ in range(2)] == [found, found]
    assert ran == [compare_upstream.UNPATCHED] * runs


def test_two_comparisons_do_not_run_in_one_folder(tmp_path):
    """B50: they would replace each other's trees while tests run on them."""
    with compare_upstream.only_run(tmp_path / "out"):
        with (pytest.raises(Refusal, match=rf"--out {tmp_path}/out: another comparison"),
              compare_upstream.only_run(tmp_path / "out")):
            pass
        with compare_upstream.only_run(tmp_path / "other"):
            pass
    with compare_upstream.only_run(tmp_path / "out"):
        pass


def test_cut_off_junit_is_refused(tmp_path):
    """B50: half a file of results is no result."""
    (tmp_path / "junit.xml").write_text('<testsuites><testsuite><testcase file="tests/test_a.py" name="test_x"/>')
    with pytest.raises(Refusal, match="no junit results"):
        results.read_junit(tmp_path / "junit.xml")


@pytest.mark.parametrize("name", lists.USE_V1)
def test_our_lists_hold_together(name):
    """B50: each list loads, names nothing twice, and every deselected or mended test is in some list."""
    wanted = lists.load(name)
    assert wanted.arguments and len(set(wanted.arguments)) == len(wanted.arguments)
    for file in ("deselect.txt", "mended.txt"):
        entries = lists.reasons((lists.FOLDER / file).read_text(), file)
        assert all(any(lists.load(other).covers(entry) for other in lists.USE_V1) for entry in entries)


def test_bad_lists_are_refused():
    """B50: no reason; a test of no listed file; both left out and required."""
    with pytest.raises(Refusal, match="the reason"):
        lists.reasons("tests/a.py::test_x\n", "deselect.txt")
    with pytest.raises(Refusal, match="in no listed file"):
        TestList("v0", ("tests/a.py",), deselected=("tests/ab.py::test_x",))
    with pytest.raises(Refusal, match="deselected and mended"):
        TestList("v0", ("tests/a.py",), ("tests/a.py::t",), ("tests/a.py::t",))


def test_a_list_is_narrowed():
    """`--only` keeps to the list, and takes along what is said of the tests that stay."""
    whole = TestList("v0", ("tests/core/a.py", "tests/b.py"), ("tests/core/a.py::t",), ("tests/b.py::u",))
    assert whole.narrowed(["tests/core"]) == TestList("v0", ("tests/core/a.py",), ("tests/core/a.py::t",))
    assert whole.narrowed(["tests/b.py::u"]) == TestList("v0", ("tests/b.py::u",), (), ("tests/b.py::u",))
    assert whole.narrowed(["tests/c"]).arguments == ()


EDIT = """
[[edit]]
file = "tests/test_a.py"
old = "assert x"
new = "assert y"
why = "{}"
"""


@pytest.mark.parametrize("text, why", [("assert z", "so"), ("assert x; assert x", "so"), ("assert x", "")])
def test_an_edit_that_cannot_be_made_is_refused(tmp_path, text, why):
    """What is changed in upstream's tests is there, once, and has a reason; else another release is looked at."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(text)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "edits.toml").write_text(EDIT.format(why))
    with pytest.raises(Refusal, match=r"edits.toml: tests/test_a.py: expected 'assert x'"):
        trees.stage_tests(tmp_path, tmp_path / "to", tmp_path / "edits.toml")
    (tmp_path / "edits.toml").write_text(EDIT.format("so"))
    (tmp_path / "tests" / "test_a.py").write_text("assert x")
    trees.stage_tests(tmp_path, tmp_path / "to", tmp_path / "edits.toml")
    assert (tmp_path / "to" / "tests" / "test_a.py").read_text() == "assert y"


def test_the_shadow_hub_answers_for_every_name(tmp_path):
    """The names lead to the model, as the hub's own client sees it offline; again over an old one."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 5, "model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    shadow_hub.make(model, tmp_path / "home", ["a/b"])
    (model / "tokenizer.json").write_text('{"new": 1}')
    shadow_hub.make(model, tmp_path / "home", ["a/b"])
    ask = "import sys, huggingface_hub as h; print(open(h.hf_hub_download('a/b', sys.argv[1])).read())"
    env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    said = [
        subprocess.run([sys.executable, "-c", ask, name], env=env, capture_output=True, text=True, check=True).stdout
        for name in ("tokenizer.json", "config.json")
    ]
    assert said[0].strip() == '{"new": 1}'
    assert f'"max_position_embeddings": {shadow_hub.CONTEXT_TOKENS}' in said[1]
    assert Path(model / "config.json").read_text().startswith('{"max_position_embeddings": 5')
