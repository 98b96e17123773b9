# SPDX-License-Identifier: Apache-2.0
"""The counts of scripts/lab/compare_connectors.py: what is wrong, hangs, dies or leaks is seen."""
import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

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
    tally = FaultTally(dead=bad.get("dead", []), left=bad.get("left", {}), loaded_tokens=100)
    tally.ends.update({AnswerEnd(name): count for name, count in bad.items() if name in ("wrong", "hang")})
    results.add_fault(ConnectorName.PULL, "burst", tally)
    assert results.is_as_promised()
    results.add_fault(ConnectorName.OURS, "burst", tally)
    assert not results.is_as_promised()
    again = compare_connectors.Results(tmp_path, {})
    assert not again.is_as_promised() and (tmp_path / "connectors_v1.png").stat().st_size > 1000
    row = next(row for row in report.rows(again.values) if "burst" in row[0])
    assert sum(map(int, row[1:])) in (1, 7)


def tally_of(loaded_tokens=100, **ends):
    counted = Counter({AnswerEnd(name): count for name, count in ends.items()})
    return FaultTally(ends=counted, loaded_tokens=loaded_tokens)


@pytest.mark.parametrize("connector, fault, tally, promised", [
    (ConnectorName.OURS, "burst", tally_of(right=24), True),
    (ConnectorName.OURS, "burst", tally_of(right=24, loaded_tokens=0), False),
    (ConnectorName.OURS, "burst", tally_of(right=23, error=1), False),
    (ConnectorName.OURS, "d-restarted", tally_of(right=20, error=4), True),
    (ConnectorName.OURS_FIRST, "p-killed", tally_of(right=10, error=10), True),
    (ConnectorName.OURS_FIRST, "p-killed", tally_of(right=10, error=10, loaded_tokens=0), False),
    (ConnectorName.PULL, "burst", tally_of(error=24, loaded_tokens=0), True)])
def test_errors_and_a_fault_that_met_no_transfer_are_no_success(connector, fault, tally, promised, tmp_path):
    results = compare_connectors.Results(tmp_path, {})
    results.add_fault(connector, fault, tally)
    assert results.is_as_promised() is promised


def test_a_fault_that_was_given_up_is_so_until_it_is_carried_out(tmp_path):
    results = compare_connectors.Results(tmp_path, {})
    results.give_up(ConnectorName.OURS, "burst", "no engine")
    results.add_fault(ConnectorName.OURS, "abort", tally_of(right=8))
    assert not results.is_as_promised()
    again = compare_connectors.Results(tmp_path, {})
    again.add_fault(ConnectorName.OURS, "burst", tally_of(right=8))
    assert again.is_as_promised() and not again.values["given_up"]


def test_a_kept_result_keeps_its_settings(tmp_path):
    compare_connectors.Results(tmp_path, {"seed": 0, "rounds": 2}).add_fault(ConnectorName.PULL, "burst", tally_of())
    results = compare_connectors.Results(tmp_path, {"seed": 7, "rounds": 1})
    results.add_fault(ConnectorName.PULL, "abort", tally_of())
    results.add_legs({"model": "/models/tiny", "tokens": 500, "ms": {}, "samples_ms": []})
    faults = results.values["faults"][ConnectorName.PULL.value]
    assert [(one["seed"], one["rounds"], one["pool_blocks"]) for one in (faults["burst"], faults["abort"])] == [
        (0, 2, 96), (7, 1, 96)]
    assert results.values["legs"]["tiny, 500 tokens"]["seed"] == 7


def test_a_prompt_without_a_right_answer_shifts_no_group_of_the_prefix_fault():
    """Each question that shares a part comes four places after the one that it shares it with."""
    fault = faults.FAULTS["prefix"]
    found = [Question(prompt, RIGHT) for prompt in fault.prompts(0, 2, 1.25)]
    for number in (1, 6, 9, 20):
        found[number] = None
    kept = [one.prompt for one in fault.kept(found)]
    assert len(kept) == len(found) - 8 >= 2 * fault.count + faults.AFTERWARDS
    for first in range(0, 2 * fault.count, 8):
        for one, longer in zip(kept[first:first + 4], kept[first + 4:first + 8], strict=True):
            assert longer[:len(one) // 4] == one[:len(one) // 4] and longer != one
    burst = faults.FAULTS["burst"]
    assert burst.kept([None, found[0], None, found[2]]) == [found[0], found[2]]


def test_prompts_of_the_prefix_fault_share_a_part_with_one_that_came_before():
    base = [list(range(100)), list(range(200, 300))]
    for one, longer in zip(base, extended(base, "seed"), strict=True):
        assert longer[:25] == one[:25] and longer[:100] != one
