# SPDX-License-Identifier: Apache-2.0
"""What scripts/test.sh does with failures: planted noise is flaky; a planted defect is red, and some kinds at once.
What it does with two lanes, with a pytest that does not end or leaves processes, when it is interrupted, and which
arguments are paths for it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _tests import pytest_run, session

from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from verdict import (pytest_assertrepr_compare, pytest_configure, pytest_handlecrashitem, pytest_runtest_makereport,
                     pytest_runtest_setup, pytest_sessionfinish)
"""
PLANTED = """
import pathlib
import pytest
from verdict import Crash, Leak, TokenIds

def first_time(name):
    seen = pathlib.Path(name)
    try:
        return not seen.exists()
    finally:
        seen.touch()

@pytest.mark.parametrize("value", ["a b", "[::]"])
def test_noise(value):
    assert not first_time("noise" + value.replace(":", "_")), "noise was here"

def test_defect():
    assert 1 == 2

def test_wrong_answer_once():
    answers = [{"token_ids": TokenIds([1, 2])}]
    if first_time("wrong"):
        assert answers == [{"token_ids": [1, 3]}]

@pytest.fixture
def leaky():
    yield
    if first_time("leak"):
        raise Leak("3 blocks")

def test_leak_once(leaky):
    assert not first_time("before the leak")

def test_crash_once():
    if first_time("crash"):
        raise Crash("the engine ended with -11")

@pytest.mark.exact
def test_exact_once():
    assert not first_time("exact")

def test_compares_answers_well_and_fails_by_something_else_once():
    assert TokenIds([1]) == [1]
    assert not first_time("else")
"""
DIES = """
import os, signal
def test_dies():
    os.kill(os.getpid(), signal.SIGSEGV)
"""
ENDS = """
import os
def test_noise():
    assert False
def test_ends():
    os._exit(1)
"""
SKIPS = """
import pathlib, pytest
def test_noise():
    seen = pathlib.Path("seen")
    if seen.exists():
        pytest.skip("not any more")
    seen.touch()
    assert False
"""
WAITS_FOR_THE_OTHERS = """
import pathlib, time
def test_side_by_side():
    pathlib.Path("{own}").touch()
    until = time.monotonic() + 100
    while not all(map(pathlib.Path.exists, map(pathlib.Path, {others}))):
        assert time.monotonic() < until, "the others do not run"
        time.sleep(0.01)
"""
SKIPPED = """
import pytest
@pytest.mark.skip
def test_marked(): pass
def test_by_itself(): pytest.skip()
@pytest.mark.xfail
def test_expected(): assert False
"""
LEAVES_A_PROCESS = """
import os, pathlib, signal, subprocess
def test_leaves():
    pathlib.Path("left").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    {end}
"""
NEVER_ENDS = """
import pathlib, pytest, time
@pytest.fixture
def engine():
    yield
    pathlib.Path("ended").touch()
def test_never_ends(engine):
    pathlib.Path("begun").touch()
    time.sleep(600)
"""
SESSION = """
import sys
from pathlib import Path
from _tests.session import Session
sys.exit(Session(Path.cwd(), ["-p", "no:cacheprovider"], Path("kept")).run({"one": ["first"], "two": ["second"]}))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Run the planted folders of a project, all in one lane if no others are given. (exit status, the session)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes longer than these tests
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")

    def run(lanes: dict[str, list[str]] | None = None, options: dict[str, list[str]] | None = None,
            commands: dict[str, list[str]] | None = None, **folders: str) -> tuple[int, session.Session]:
        for name, text in folders.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "test_planted.py").write_text(text)
        one = session.Session(tmp_path, ["-p", "no:cacheprovider"], tmp_path / "kept", options or {}, commands or {})
        return one.run(lanes or {"only": list(folders)}), one

    return run


def test_noise_is_flaky_and_defects_are_red(project, capfd):
    status, one = project(first=PLANTED, second="def test_good(): pass")
    assert status == 1
    name = "first/test_planted.py::test_"
    assert one.flaky == [f"{name}noise[a b]", f"{name}noise[[::]]",
                         f"{name}compares_answers_well_and_fails_by_something_else_once"]
    assert one.red == [f"{name}wrong_answer_once (wrong answer)", f"{name}leak_once (leak)",
                       f"{name}crash_once (crash)", f"{name}exact_once (exact)", f"{name}defect (twice)"]
    kept = {file.name: file.read_text() for file in one.kept.iterdir()}
    first, second = (next(text for file, text in kept.items() if "noise_a_b_" in file and which in file)
                     for which in (".first.", ".second."))
    assert "noise was here" in first and "1 passed" in second
    assert "3 blocks" in next(text for file, text in kept.items() if "leak" in file)
    printed = capfd.readouterr().out
    assert f"flaky: {name}noise[a b]" in printed and f"red: {name}defect (twice)" in printed
    assert f"outputs: {one.kept}" in printed


def test_only_noise_is_green(project):
    text = PLANTED[: PLANTED.index("def test_defect")]
    status, one = project(first=text)
    assert status == 0 and len(one.flaky) == 2 and not one.red


@pytest.mark.parametrize("text", [DIES, "import nothing_of_that_name"], ids=["crash", "import"])
def test_a_pytest_that_breaks_off_is_red_at_once(project, text):
    status, one = project(first=text, second="def test_good(): pass")
    assert status == 1 and not one.flaky
    assert [line.partition(":")[0] for line in one.red] == ["first"]


def test_a_pytest_that_ends_itself_after_a_failure_is_red(project):
    status, one = project(first=ENDS)
    assert status == 1 and "first: pytest ended with 1" in one.red


def test_a_second_try_that_skips_has_not_passed(project):
    status, one = project(first=SKIPS)
    assert status == 1 and one.red == ["first/test_planted.py::test_noise (twice)"]


@pytest.mark.parametrize("text, result, skipped", [(SKIPPED, "passed", 2), ("", "no tests", 0)])
def test_a_run_in_which_no_test_passed_is_red(project, capfd, text, result, skipped):
    """All are skipped, or the arguments choose none. The table counts the skipped ones, without those that are expected
    to fail. One such folder beside others is green."""
    status, one = project(first=text)
    assert status == 1 and len(one.red) == 1 and one.red[0].startswith("no test has passed")
    assert [(row.result, row.skipped) for row in one.rows] == [(result, skipped)]
    (total,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("total "))
    assert total.split()[1] == str(skipped)
    status, one = project(second="def test_good(): pass", lanes={"only": ["first", "second"]})
    assert status == 0 and not one.red


def test_a_skipped_module_counts(project):
    _, one = project(first="import pytest\npytest.skip(allow_module_level=True)", second="def test_good(): pass")
    assert {row.folder: row.skipped for row in one.rows} == {"first": 1, "second": 0}


@pytest.mark.parametrize("end, status", [("", 0), ("os.kill(os.getpid(), signal.SIGKILL)", 1)], ids=["passes", "dies"])
def test_nothing_outlives_its_pytest(project, tmp_path, end, status):
    assert project(first=LEAVES_A_PROCESS.format(end=end))[0] == status
    left = Path("/proc", (tmp_path / "left").read_text())
    wait_for(lambda: not left.exists() or ") Z " in (left / "stat").read_text())  # a zombie where nobody reaps it


@pytest.mark.parametrize("stop_s", [100.0, 2.0], ids=["interrupted", "killed"])
def test_a_pytest_that_does_not_end_is_red(project, monkeypatch, tmp_path, stop_s):
    """It gets time to tear its fixtures down, then it is killed. The other folders run."""
    def wait(run: pytest_run.PytestRun, limit_s: float) -> pytest_run.Outcome:
        if run.output.name.startswith("first"):
            wait_for((tmp_path / "begun").exists)
            limit_s = 0.1
        return whole(run, limit_s)

    killed = stop_s < 100
    text = NEVER_ENDS.replace("    yield", "    yield\n    time.sleep(600)") if killed else NEVER_ENDS
    whole = pytest_run.PytestRun.wait
    monkeypatch.setattr(pytest_run.PytestRun, "wait", wait)
    monkeypatch.setattr(pytest_run, "STOP_S", stop_s)
    status, one = project(first=text, second="def test_good(): pass")
    assert status == 1 and not one.flaky
    assert one.red == [f"first: pytest ended with {-9 if killed else 2} after the limit of 7200 s"]
    assert (tmp_path / "ended").exists() != killed
    assert [row.result for row in one.rows if row.folder == "second"] == ["passed"]


def test_many_failures_are_no_noise(project, monkeypatch):
    monkeypatch.setattr(session, "MOST_AGAIN", 1)
    status, one = project(first=PLANTED)
    assert status == 1 and not one.flaky
    assert any("too many for noise" in line for line in one.red)


def test_a_worker_that_dies_is_red_at_once(project):
    """With pytest-xdist, where pytest itself lives on."""
    pytest.importorskip("xdist")
    text = DIES + PLANTED[: PLANTED.index("def test_defect")]
    status, one = project(first=text, options={"first": ["-p", "xdist.plugin", "-n", "2"]})
    assert status == 1
    assert one.red == ["first/test_planted.py::test_dies (crash)"]
    assert len(one.flaky) == 2


def test_lanes_run_side_by_side_and_a_lane_that_is_done_helps(project, capfd):
    """Each folder ends only when the other one runs too. The first lane has run its folder, and takes one of the other
    lane's. The output of each folder is in one piece."""
    names = ["second", "third"]
    folders = {name: WAITS_FOR_THE_OTHERS.format(own=name + ".runs", others=[other + ".runs" for other in names])
               for name in names}
    status, one = project(first="def test_good(): pass", **folders, lanes={"one": ["first"], "two": names})
    assert status == 0 and not one.red
    assert {row.folder: row.lane for row in one.rows} == {"first": "one", "second": "two", "third": "one"}
    printed = capfd.readouterr().out
    for name in ("first", *names):
        assert "1 passed" in printed[printed.index(f"== {name} (lane "):].split("\n== ")[0]
    assert printed.index("third") < printed.index("total ")


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """A run of two folders in a process of its own. The first one's test goes on, the second one's is over."""
    for name, text in (("first", NEVER_ENDS), ("second", "def test_good(): pass")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_planted.py").write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'scripts'}:{ROOT / 'tests'}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    with subprocess.Popen([sys.executable, "-c", SESSION], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as run:
        wait_for(lambda: (tmp_path / "begun").exists() and list((tmp_path / "kept").glob("second*")))
        yield run
        run.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_run_ends_all_it_has_started(endless, tmp_path, number):
    """With the status of that signal; the fixtures are torn down, and what pytest has written is printed."""
    endless.send_signal(number)
    printed = endless.communicate(timeout=100)[0]
    assert endless.returncode == 128 + number
    assert (tmp_path / "ended").exists(), printed
    assert "== interrupted: " in printed and "KeyboardInterrupt" in printed and "total " in printed


def test_a_killed_run_leaves_no_pytest(endless, tmp_path):
    """Its pytest tears the fixtures down."""
    endless.kill()
    wait_for((tmp_path / "ended").exists)


def test_a_folder_may_have_a_command_of_its_own(project):
    """In both tries: what starts its pytest counts them."""
    count = f'echo >> starts; export STARTS=$(wc -l < starts); exec "{sys.executable}" -m pytest "$@"'
    status, one = project(first="import os\ndef test_starts(): assert os.environ['STARTS'] == '2'",
                          commands={"first": ["sh", "-c", count, "own"]})
    assert status == 0 and len(one.flaky) == 1


@pytest.fixture
def test_sh(tmp_path):
    """Run a copy of scripts/test.sh: its exit status, and the engine and the arguments of the Python that it starts, or
    what it says."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "test.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "env.sh").write_text('PATH="$PWD:$PATH"')
    (tmp_path / "python").write_text('#!/bin/sh\necho "${VLLM_PD_ENGINE:-v0} $*"\n')
    (tmp_path / "python").chmod(0o755)

    def run(*arguments: str) -> tuple[int, str]:
        env = {name: value for name, value in os.environ.items() if name != "VLLM_PD_ENGINE"}
        done = subprocess.run(["bash", "scripts/test.sh", *(argument.format(here=tmp_path) for argument in arguments)],
                              cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).replace(str(tmp_path), "{here}").strip()

    return run


@pytest.mark.parametrize("arguments, engine", [
    (["tests/unit", "-q", "-x"], "v0"), (["-x", "tests/unit/test_a.py::test_b"], "v0"), (["./tests/unit"], "v0"),
    (["{here}/tests/unit"], "v0"), (["/elsewhere/test_a.py"], "v0"), (["tests/unit", "tests/router"], "v0"),
    (["tests/v1"], "v1"), (["-x", "{here}/tests/v1/test_a.py"], "v1"), (["./tests/v1", "--junitxml", "/r.xml"], "v1"),
    (["/elsewhere/tests/v1/test_a.py"], "v1"), (["--deselect", "tests/unit/test_a.py", "tests/v1"], "v1"),
])  # fmt: skip
def test_a_path_runs_in_its_environment(test_sh, arguments, engine):
    assert test_sh(*arguments) == (0, f"{engine} -m pytest {' '.join(arguments)}")


@pytest.mark.parametrize("arguments", [
    [], ["--fast"], ["--junitxml", "/r.xml"], ["--ignore", "tests/v1"], ["--fast", "-c", "/tmp/b", "-k", "x"],
])  # fmt: skip
def test_the_value_of_an_option_is_no_path(test_sh, arguments):
    assert test_sh(*arguments) == (0, " ".join(["v0 scripts/run_tests.py", *arguments]))


@pytest.mark.parametrize("option", ["--ignore=tests/v1", "--junitxml=/r.xml", "--basetemp=/tmp/b"])
def test_an_option_of_one_pytest_is_refused_for_many(option):
    done = subprocess.run([sys.executable, "scripts/run_tests.py", option], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: {option} can't be used: name what is to run" in done.stderr


@pytest.mark.parametrize("arguments, named", [
    (["tests/unit", "tests/v1/test_a.py"], "tests/v1/test_a.py and tests/unit"),
    (["tests/v1/test_a.py", "-x", "tests/unit/test_b.py"], "tests/v1/test_a.py and tests/unit/test_b.py"),
    (["tests"], "tests/v1 and tests"),
])  # fmt: skip
def test_paths_of_two_environments_are_refused(test_sh, arguments, named):
    assert test_sh(*arguments) == (
        2, f"test.sh: {named} have different environments (engine V1 and V0): name one, or none for all tests")
