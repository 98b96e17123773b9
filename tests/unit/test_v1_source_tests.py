# SPDX-License-Identifier: Apache-2.0
"""What scripts/v1_source_tests.py takes for its own options, and what for pytest's."""
import subprocess
import sys

import pytest
import v1_source_tests


@pytest.fixture
def run(monkeypatch):
    """Run the script without a source: whether the extension was copied, and pytest's arguments."""
    def run(*arguments: str) -> tuple[bool, list[str]]:
        copied, started = [], []
        monkeypatch.setattr(sys, "argv", ["v1_source_tests.py", *arguments])
        monkeypatch.setattr(v1_source_tests, "install", lambda *args: None)
        monkeypatch.setattr(v1_source_tests, "copy_extension", copied.append)
        monkeypatch.setattr(subprocess, "run", lambda command, **options: started.append(command)
                            or subprocess.CompletedProcess(command, 0))
        assert v1_source_tests.main() == 0
        (command,) = started
        return bool(copied), command[command.index("-q") + 1:]
    return run


@pytest.mark.parametrize("arguments, copied, options", [
    (["0.33.0"], False, ["-m", "not e2e", "tests/v1"]),
    (["0.33.0", "--", "-k", "hazard or b93"], False, ["-m", "not e2e", "-k", "hazard or b93", "tests/v1"]),
    (["0.33.0", "--extension", "--", "-m", "e2e", "tests/v1/test_real_engines.py"], True,
     ["-m", "e2e", "tests/v1/test_real_engines.py"]),
    (["--extension", "0.33.0", "--", "-m", "e2e"], True, ["-m", "e2e", "tests/v1"]),
])  # fmt: skip
def test_the_examples_of_the_script_run(run, arguments, copied, options):
    assert run(*arguments) == (copied, options)


@pytest.mark.parametrize("status", [0, 1])
def test_packages_that_the_release_needs_are_installed_for_the_run_alone(monkeypatch, capsys, status):
    started = []
    monkeypatch.setattr(sys, "argv", ["v1_source_tests.py", "0.33.0", "--with", "one>=1", "--with", "two"])
    monkeypatch.setattr(v1_source_tests, "install", lambda *args: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: started.append((command, options))
                        or subprocess.CompletedProcess(command, status))
    assert v1_source_tests.main() == (2 if status else 0)
    (pip, _), *tests = started
    folder = pip[pip.index("--target") + 1]
    assert pip[-2:] == ["one>=1", "two"] and len(tests) == (0 if status else 1)
    assert all(options["env"]["PYTHONPATH"].startswith(folder) for _, options in tests)
    assert not status or "--with one>=1 two" in capsys.readouterr().err


def test_options_of_pytest_come_after_two_dashes(run):
    with pytest.raises(SystemExit):
        run("0.33.0", "-x")
