# SPDX-License-Identifier: Apache-2.0
"""docs/recipes.md says of each row what `vllm-pd doctor --for` says of its two command lines today."""
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.v1_commands.recipe_models import MODELS, write_models
from vllm_pd.ops.for_command import CommandLine, judge_lines, preview_lines
from vllm_pd.v1.preview import Preview

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
DRAFTERS = {"gpt-oss": "gpt-oss-eagle3"}
STATE = re.compile(r"\*\*(fits|refused|P refused|D refused|differ)\*\*(?:: `([^`]+)`)?")


class Row(NamedTuple):
    """A row of a table of the page: the name of the stand-in, both cells of flags, and the state as it begins."""
    title: str
    model: str
    flags: tuple[str, str]
    state: tuple[str, str | None]


def rows() -> Iterator[Row]:
    """Those of the two tables with recipes."""
    text = PAGE.read_text()
    for line in text[text.index("\n## Dynamo"):text.index("\n## Ask before")].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| ") or cells[2] == "P":
            continue
        title, _, prefill, decode, today = cells
        found = STATE.match(today)
        assert found, f"no state: {today}"
        yield Row(title, re.findall(r"`([^`]+)`", title)[-1], (prefill.strip("`"), decode.strip("`")), found.groups())


def line_of(row: Row, number: int, folders: dict[str, Path]) -> str:
    role = ("kv_producer", "kv_consumer")[number]
    flags = row.flags[number].replace("DRAFT", str(folders[DRAFTERS.get(row.model, row.model)]))
    transfer = json.dumps({"kv_connector": "PDConnector", "kv_role": role,
                           "kv_connector_extra_config": {"broker": "tcp://127.0.0.1:5700"}})
    ours = "" if "--kv-transfer-config" in flags else f"--kv-transfer-config {shlex.quote(transfer)}"
    return f"vllm serve {folders[row.model]} {flags} {ours}"


def state_of(prefill: Preview, decode: Preview) -> tuple[str, str | None]:
    """The page's words for what was found."""
    assert not prefill.usage and not decode.usage
    refusals = {name: one.refusal for name, one in (("P", prefill), ("D", decode)) if one.refusal is not None}
    if refusals:
        name, refusal = next(iter(refusals.items()))
        return ("refused" if len(refusals) == 2 else f"{name} refused", refusal.fact)
    (found, ) = judge_lines([prefill, decode])
    if found.ok:
        return "fits", None
    return "differ", re.search(r"differ in (\w+):", found.fact)[1]


def test_every_model_of_the_page_has_a_stand_in():
    """And each stand-in is on it. The fifteen of Dynamo, and llm-d's."""
    found = list(rows())
    assert len(found) > 20
    assert {row.model for row in found} == MODELS.keys() - set(DRAFTERS.values())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_says_what_the_doctor_says(tmp_path):
    folders = write_models(tmp_path)
    every = list(rows())
    lines = [line_of(row, number, folders) for row in every for number in (0, 1)]
    previews = preview_lines([CommandLine.parse(line) for line in lines])
    wrong = {}
    for row, prefill, decode in zip(every, previews[::2], previews[1::2], strict=True):
        found = state_of(prefill, decode)
        if found != row.state:
            wrong[row.title] = f"the page has {row.state}, the doctor {found}"
    assert not wrong, "\n".join(f"{title}: {both}" for title, both in wrong.items())
