# SPDX-License-Identifier: Apache-2.0
"""docs/protocol.md names what there is: each message, each case of the search, each broken variant."""
import re
from pathlib import Path

import pytest
from test_explorer import CASES

from vllm_pd.protocol import messages as m

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/protocol.md").read_text()


@pytest.mark.parametrize("message", [*m.TO_DECODE, *m.TO_PREFILL], ids=lambda message: message.__name__)
def test_each_message_between_engines_has_its_line(message):
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert any(re.search(rf"\b{message.__name__}\b", row.split("|")[1]) for row in rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_of_the_search_has_its_line_with_the_depth_that_is_searched(case):
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| {case.name} |"))
    assert int(row.split("|")[2]) == case.depth
    assert int(row.split("|")[3].replace(",", "")) >= case.least


def test_the_files_it_names_exist():
    for name in re.findall(r"`((?:tests|scripts|vllm_pd)/[\w/.]+)`", TEXT):
        assert (ROOT / name).exists(), name
