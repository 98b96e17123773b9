# SPDX-License-Identifier: Apache-2.0
"""The counts of scripts/compare_connectors.py: what is wrong, hangs, dies or leaks is seen."""
import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import compare_connectors
from _connectors import faults, report
from _connectors.faults import AnswerEnd, FaultRun, FaultTally
from _connectors.pair import ConnectorName
from _connectors.questions import Question, extended

from vllm_pd.bench.connection import LoadError

RIGHT = (1, 2, 3)


class FakePair:
    """Answers in the way that the prompt's first token says."""
    decode_leg_s = 0.01

    async def ask(self, prompt, max_tokens, at_decode):
        at_decode.set()
        match prompt[0]:
            case 0:
                return SimpleNamespace(token_ids=RIGHT)
            case 1:
                return SimpleNamespace(token_ids=(1, 2, 4))
            case 2:
                raise LoadError("status 500: no")
            case _:
                await asyncio.sleep(60)


def test_each_end_of_a_request_is_counted_as_what_it_is(monkeypatch):
    monkeypatch.setattr(faults, "HANG_S", 0.3)
    run = FaultRun(FakePair(), [Question([kind], RIGHT) for kind in (0, 1, 1, 2, 3, 3)], "seed")

    async def all_of_them():
        await run.end([*run.send(5), *run.send_and_leave(1)])

    asyncio.run(all_of_them())
    assert run.tally.ends == {AnswerEnd.RIGHT: 1, AnswerEnd.WRONG: 2, AnswerEnd.ERROR: 1, AnswerEnd.HANG: 1,
                              AnswerEnd.ABORTED: 1}


@pytest.mark.parametrize("bad", [{"wrong": 1}, {"hang": 1}, {"dead": ["decode"]}, {"left": {"decode blocks": 7}}])
def test_a_fault_of_ours_fails_the_run_and_is_shown(bad, tmp_path):
    results = compare_connectors.Results(tmp_path, {})
    tally = FaultTally(dead=bad.get("dead", []), left=bad.get("left", {}))
    tally.ends.update({AnswerEnd(name): count for name, count in bad.items() if name in ("wrong", "hang")})
    results.add_fault(ConnectorName.PULL, "burst", tally)
    assert results.is_as_promised()
    results.add_fault(ConnectorName.OURS, "burst", tally)
    assert not results.is_as_promised()
    again = compare_connectors.Results(tmp_path, {})
    assert not again.is_as_promised() and (tmp_path / "connectors_v1.png").stat().st_size > 1000
    row = next(row for row in report.rows(again.values) if "burst" in row[0])
    assert sum(map(int, row[1:])) in (1, 7)


def test_prompts_of_the_prefix_fault_share_a_part_with_one_that_came_before():
    base = [list(range(100)), list(range(200, 300))]
    for one, longer in zip(base, extended(base, "seed"), strict=True):
        assert longer[:25] == one[:25] and longer[:100] != one
