# SPDX-License-Identifier: Apache-2.0
"""The result of each test, and the comparison of two trees. Pure, except that it reads a junit file."""

import enum
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from _series.errors import Refusal

from .lists import within


class UpstreamOutcome(enum.Enum):
    """Best first. Where a test has several (its teardown failed too), the worst counts."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    ERROR = "error"


_WORST = list(UpstreamOutcome)
_CHILDREN = {"skipped": UpstreamOutcome.SKIPPED, "failure": UpstreamOutcome.FAILED, "error": UpstreamOutcome.ERROR}


@dataclass(frozen=True)
class UpstreamResult:
    """Of one test. `message`: the first lines of why it did not pass. `unsteady`: it failed first, and then passed
    alone.
    """

    outcome: UpstreamOutcome
    message: str = ""
    unsteady: bool = False

    @property
    def passed(self) -> bool:
        return self.outcome is UpstreamOutcome.PASSED

    @property
    def failed(self) -> bool:
        return self.outcome in (UpstreamOutcome.FAILED, UpstreamOutcome.ERROR)


Results = Mapping[str, UpstreamResult]  # by pytest node id


def node_id(case: ElementTree.Element) -> str:
    """The node id of a junit test case (family xunit1, which has the file)."""
    file, name, dotted = case.get("file"), case.get("name", ""), case.get("classname", "")
    if file is None:
        raise Refusal(f"junit test case {dotted}.{name}: names no file; expected the family xunit1")
    module = file.removesuffix(".py").replace("/", ".")
    if name == module:  # it could not be imported
        return file
    classes = dotted.removeprefix(module).strip(".")
    return "::".join(part for part in (file, *classes.split("."), name) if part)


def read_junit(path: Path) -> dict[str, UpstreamResult]:
    """The results in a junit file. Raises Refusal if it is missing or cut off, because the run died."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise Refusal(f"{path}: no junit results: {error}") from error
    found: dict[str, UpstreamResult] = {}
    for case in cases:
        ended = [UpstreamResult(_CHILDREN[child.tag], first_lines(child)) for child in case if child.tag in _CHILDREN]
        worst = max([*ended, UpstreamResult(UpstreamOutcome.PASSED)], key=lambda result: _WORST.index(result.outcome))
        test = node_id(case)
        if test not in found or _WORST.index(worst.outcome) > _WORST.index(found[test].outcome):
            found[test] = worst
    return found


def first_lines(child: ElementTree.Element, max_chars: int = 500) -> str:
    """pytest's own short message, else the end of the text."""
    return (child.get("message") or (child.text or "")[-max_chars:]).strip()[:max_chars]


def merged(first: Results, again: Results) -> dict[str, UpstreamResult]:
    """`first`, but a test that passed when it ran again counts as passed, and is marked as unsteady."""
    second = {test: result for test, result in again.items() if result.passed and not first.get(test, result).passed}
    passed = {test: UpstreamResult(UpstreamOutcome.PASSED, first[test].message, unsteady=True) for test in second}
    return {**first, **passed}


def unpassed(results: Results) -> list[str]:
    """Tests worth running again, in order: failed ones, not skipped ones."""
    return [test for test, result in results.items() if result.failed]


def counts(results: Results) -> dict[str, int]:
    """How many tests have each outcome."""
    tally = Counter(result.outcome for result in results.values())
    return {outcome.value: tally[outcome] for outcome in UpstreamOutcome}


@dataclass(frozen=True)
class Comparison:
    """Of two trees' results of one list. Tests by node id, some with the reason."""

    list_name: str
    before: dict[str, int]
    after: dict[str, int]
    regressed: dict[str, str] = field(default_factory=dict)
    unmended: dict[str, str] = field(default_factory=dict)
    mended: list[str] = field(default_factory=list)
    failing_in_both: list[str] = field(default_factory=list)
    failing_anew: dict[str, str] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.regressed and not self.unmended

    def as_dict(self) -> dict:
        return {**asdict(self), "good": self.good}


def compare(list_name: str, before: Results, after: Results, must_mend: Iterable[str] = ()) -> Comparison:
    """Compares `before` (unpatched) with `after` (patched). Every test that passed before must pass after, and every
    test of `must_mend` (node ids, or files and classes) must exist and pass after. Raises Refusal if nothing passed
    before, because then nothing was compared."""
    if not any(result.passed for result in before.values()):
        raise Refusal(f"list {list_name}: no test passes on the unpatched tree; there is nothing to compare with")
    passed_before = {test for test, result in before.items() if result.passed}
    failing = {test: result for test, result in after.items() if result.failed}
    return Comparison(
        list_name,
        counts(before),
        counts(after),
        regressed={test: why(after, test) for test in before if test in passed_before and not passes(after, test)},
        unmended=unmended(after, must_mend),
        mended=sorted(test for test, result in after.items() if result.passed and test not in passed_before),
        failing_in_both=sorted(test for test in failing if test in before and test not in passed_before),
        failing_anew={test: result.message for test, result in failing.items() if test not in before},
        unsteady=sorted(test for results in (before, after) for test, result in results.items() if result.unsteady),
    )


def failing(results: Results, expected: Iterable[str] = ()) -> list[str]:
    """The tests that failed, but for those of `expected` (node ids, or files and classes)."""
    expected = list(expected)
    return [test for test, result in results.items() if result.failed and not any(within(test, e) for e in expected)]


def unmended(after: Results, must_mend: Iterable[str]) -> dict[str, str]:
    """What of `must_mend` does not pass, with the reason."""
    found = {}
    for entry in must_mend:
        inside = [test for test in after if within(test, entry)]
        bad = [test for test in inside if not after[test].passed]
        found.update({test: why(after, test) for test in bad or ([] if inside else [entry])})
    return found


def passes(results: Results, test: str) -> bool:
    """Whether a test exists and passes."""
    return test in results and results[test].passed


def why(results: Results, test: str) -> str:
    """Why a test does not pass."""
    if test not in results:
        return "did not run"
    return f"{results[test].outcome.value}: {results[test].message}"
