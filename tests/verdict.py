# SPDX-License-Identifier: Apache-2.0
"""Which failures of a test may be noise, and which never are.

`scripts/test.sh` runs a test that failed once more. It does not do so for a wrong answer, a leak or a crash: these are
defects even if they are rare. A test says so by one of the exceptions below, by comparing `TokenIds`, or by the marker
`exact` (no clock, thread or other process takes part, so that a failure can't be noise).

tests/conftest.py imports the hooks. With VLLM_PD_FAILURES set to a file they append one JSON object for each failure:
``test`` (node id), ``phase`` (setup, call, teardown), ``kind`` (what it is, null if it may be noise), ``output``. The
last line says that pytest came to its end: ``code`` (its exit status), ``passed`` and ``skipped`` (how many tests; a
module that is skipped as a whole counts as one).

With pytest-xdist the workers append the failures. The process that started the workers counts the tests, writes the
last line, and records a worker that died as a crash of the test that it ran.
"""

import ctypes
import json
import os
import signal
from collections.abc import Iterator, Mapping

import pytest

FILE = "VLLM_PD_FAILURES"
PR_SET_PDEATHSIG = 1
_COMPARED = pytest.StashKey[bool]()
_PASSED, _SKIPPED = pytest.StashKey[int](), pytest.StashKey[int]()
_CRASHES: list[type[Exception]] = []


class Final(AssertionError):
    """A failure that is never noise. `kind` is its name in reports."""
    kind = "defect"


class WrongAnswer(Final):
    """Tokens, text or KV bytes differ from what they must be."""
    kind = "wrong answer"


class Leak(Final):
    """Blocks, handles, queue entries or processes are left over."""
    kind = "leak"


class Crash(Final):
    """A process that should live has ended."""
    kind = "crash"


class TokenIds(list):
    """Token ids that an engine has answered. A comparison with them that fails is a wrong answer."""


def same_answer(ours: object, theirs: object) -> None:
    """WrongAnswer if two answers (each with a method ``same_as``) differ."""
    if not ours.same_as(theirs):
        raise WrongAnswer(f"the answer is {ours!r}, it should be {theirs!r}")


def same_bytes(same: bool) -> None:
    """WrongAnswer if a comparison of KV bytes found a difference."""
    if not same:
        raise WrongAnswer("KV bytes differ from what was sent")


def mark_answers(decoded: dict) -> dict:
    """An ``object_hook`` for json: every list under ``token_ids`` or ``tokens`` becomes TokenIds."""
    for key in ("token_ids", "tokens"):
        if isinstance(decoded.get(key), list):
            decoded[key] = TokenIds(decoded[key])
    return decoded


def holds_answer(value: object) -> bool:
    """Whether TokenIds are anywhere in this value."""
    if isinstance(value, TokenIds):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_answer, value.values()))
    return isinstance(value, list | tuple) and any(map(holds_answer, value))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COMPARED], config.stash[_PASSED], config.stash[_SKIPPED] = False, 0, 0
    config.pluginmanager.register(Totals(config))
    if os.environ.get(FILE) and not hasattr(config, "workerinput"):  # when scripts/test.sh is killed, end as by Ctrl-C
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    config.addinivalue_line("markers", "exact: no clock, thread or other process takes part; a failure is never noise")


def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> None:
    """Called for each comparison that fails in an assert."""
    if op == "==" and (holds_answer(left) or holds_answer(right)):
        config.stash[_COMPARED] = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_COMPARED] = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed and os.environ.get(FILE):
        failure = {"test": item.nodeid, "phase": report.when, "kind": _kind(item, call.excinfo),
                   "output": "\n".join([report.longreprtext, *("\n".join(section) for section in report.sections)])}
        _write(failure)
    return report


class Totals:
    """A plugin that counts the tests that have passed or were skipped, wherever they have run. One for each pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when == "call":
            self._config.stash[_PASSED] += 1
        self._config.stash[_SKIPPED] += report.skipped and not hasattr(report, "wasxfail")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._config.stash[_SKIPPED] += report.skipped


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    """pytest-xdist calls this where a worker has died in the test `crashitem`."""
    if os.environ.get(FILE):
        _write({"test": crashitem, "phase": "call", "kind": Crash.kind, "output": "the worker of pytest-xdist died"})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get(FILE) and not hasattr(session.config, "workerinput"):
        stash = session.config.stash
        _write({"code": int(exitstatus), "passed": stash[_PASSED], "skipped": stash[_SKIPPED]})


def count_as_crash(error: type[Exception]) -> None:
    """From now on a test that fails by this error has found a crash."""
    _CRASHES.append(error)


def _write(line: dict) -> None:
    """In one call, for several processes append."""
    file = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def _kind(item: pytest.Item, failure: pytest.ExceptionInfo) -> str | None:
    """What this failure is, None if it may be noise."""
    for error in _leaves(failure.value):
        if isinstance(error, Final):
            return error.kind
        if isinstance(error, tuple(_CRASHES)):
            return Crash.kind
    if item.config.stash[_COMPARED] and isinstance(failure.value, AssertionError):
        return WrongAnswer.kind
    if item.get_closest_marker("exact") and "from pytest-timeout" not in str(failure.value):
        return "exact"
    return None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The error, or those in its group."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error
