# SPDX-License-Identifier: Apache-2.0
"""B105, B107: the fence that is the receiver's own act, as a model in Promela under spin (`tests/promela.py`). It is
written from docs/protocol.md, and shares nothing with the protocol's code or the explorer.

A folder of its own: the searches beside it need not run again when the model has changed (`tests/searches.py`)."""
from pathlib import Path

import pytest

from tests.promela import (
    a_path_is_a_circle,
    each_rule_holds,
    no_path_is_a_circle,
    page_has_states,
    page_has_variant,
    require_tools,
    rule_is_broken,
)

MODEL = Path(__file__).with_name("generations.pml")
PAGE = Path(__file__).parents[3] / "docs/protocol.md"

# name: options, states. Asserted, for a model that has silently become smaller proves less.
GOOD = {
    "one attempt, all that may go wrong, once":
        ("-DATTEMPTS=1 -DDRIFTS=1 -DSILENCES=1 -DSEEMS=1 -DOTHERS=1 -DRANK_ERRORS=1 -DERRORS=1 -DDEATHS=1", 512_421),
    "a block that two attempts have in turn, a write fails, and lands later, P falls silent":
        ("-DDRIFTS=1 -DSILENCES=1 -DERRORS=1", 2_730_393),
    "the same block, P can't be reached, a write fails, and lands later": ("-DSEEMS=1 -DDRIFTS=1", 1_504_152),
    "the same block, a rank can't make its agent, or can't destroy it": ("-DRANK_ERRORS=1 -DDRIFTS=1", 2_569_993),
    "the same block, D is in doubt about another engine": ("-DOTHERS=1", 4_068_377),
    "two attempts at once, a write fails, and lands later": ("-DBLOCKS=2 -DDRIFTS=1", 5_167_351),
    "two attempts at once, P falls silent": ("-DBLOCKS=2 -DSILENCES=1", 5_119_081),
    "two attempts at two Ps at once": ("-DPEERS=2 -DBLOCKS=2", 7_091_021),
    "two Ps, one of them on D's machine": ("-DPEERS=2 -DHERE -DBLOCKS=2", 1_132_481),
    "two Ps, one of them on D's machine, both writes fail, and land later, one P dies, one falls silent":
        ("-DPEERS=2 -DHERE -DDRIFTS=2 -DDEATHS=1 -DSILENCES=1", 1_990_816),
    "a P on D's machine, D is in doubt about another engine": ("-DHERE -DOTHERS=1", 107_405),
}
LARGE = {
    "one attempt, all that may go wrong, most of it twice":
        ("-DATTEMPTS=1 -DDRIFTS=2 -DSILENCES=1 -DSEEMS=2 -DOTHERS=2 -DRANK_ERRORS=2 -DERRORS=1 -DDEATHS=1 -DMOST=6",
         5_703_879),
    "two Ps, one of them on D's machine, a write fails, and lands later":
        ("-DPEERS=2 -DHERE -DBLOCKS=2 -DDRIFTS=1", 5_013_769),
}
# What is broken on purpose, and in which scene: the rule that does not hold then. Each scene is in GOOD, or is a part
# of one that is.
BROKEN = {
    "-DONE_RANK_IS_ALL": "no_write_lands_in_a_block_of_another",
    "-DRENEWAL_IS_THE_END": "no_write_lands_in_a_block_of_another",
    "-DERROR_IS_AN_END -DRANK_ERRORS=1": "no_write_lands_in_a_block_of_another",
    "-DSEEMING_IS_DEATH -DSEEMS=1": "no_write_lands_in_a_block_of_another",
    "-DHERE_TOO -DHERE -DOTHERS=1": "no_write_lands_in_a_block_of_another",
    "-DALL_DOUBTS_AT_ONCE -DBLOCKS=2": "no_write_lands_in_a_block_of_another",
    "-DWRITES_IN_THE_NEWEST": "no_write_lands_in_a_block_of_another",
    "-DSTOPS_WHAT_MAY_LAND -DDRIFTS=1": "no_write_lands_in_a_block_of_another",
    "-DTHE_NEW_IS_THE_END -DDRIFTS=1": "no_write_lands_in_a_block_of_another",
    "-DGRANTS_DYING": "no_grant_in_a_dying_generation",
    "-DNO_CLOSING -DATTEMPTS=1 -DOTHERS=1": "no_healthy_write_is_cut_off_within_a_lease",
    "-DPARTED_IS_LIFTED -DBLOCKS=2 -DDRIFTS=1": "no_transfer_begins_where_one_has_failed",
    "-DONE_PARTED_FOR_ALL -DBLOCKS=2 -DDRIFTS=1": "no_transfer_begins_where_one_has_failed",
    "-DBEGINS_WHAT_HAS_ENDED": "no_job_begins_that_d_is_known_to_have_ended",
    "-DPARTED_STAYS -DDRIFTS=1": "renewals_are_bounded",
    "-DDOUBTS_END_WITH_ANY -DBLOCKS=2 -DSILENCES=1": "all_fences_come_down",
}
# options: states. In these each path is looked at for a circle, too.
CIRCLE_FREE = {
    "-DATTEMPTS=1 -DDRIFTS=1 -DSILENCES=1 -DSEEMS=1 -DOTHERS=1 -DRANK_ERRORS=1 -DERRORS=1 -DDEATHS=1": 1_024_841,
    "-DDRIFTS=1": 1_511_669,
    "-DPEERS=2 -DHERE -DBLOCKS=2": 2_264_961,
}


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    require_tools()


@pytest.mark.search
@pytest.mark.parametrize("name", [*GOOD, *(pytest.param(name, marks=pytest.mark.heavy) for name in LARGE)])
def test_b105_each_rule_holds_in_every_order_of_events(tmp_path: Path, name: str) -> None:
    each_rule_holds(tmp_path, MODEL, *(GOOD | LARGE)[name])


@pytest.mark.search
@pytest.mark.parametrize("options", CIRCLE_FREE)
def test_b107_no_path_is_a_circle_so_each_comes_to_rest(tmp_path: Path, options: str) -> None:
    """And what must be at rest is a rule."""
    no_path_is_a_circle(tmp_path, MODEL, options, CIRCLE_FREE[options])


@pytest.mark.parametrize("options", BROKEN)
def test_b105_spin_finds_what_is_broken_on_purpose(tmp_path: Path, options: str) -> None:
    rule_is_broken(tmp_path, MODEL, options, BROKEN[options])


def test_b107_a_circle_is_found(tmp_path: Path) -> None:
    """A rank that never can destroy its agents is asked for ever."""
    a_path_is_a_circle(tmp_path, MODEL, "-DNEVER_CAN -DRANK_ERRORS=1")


@pytest.mark.parametrize("name", GOOD | LARGE)
def test_the_page_has_the_states_of_each_scene(name: str) -> None:
    page_has_states(PAGE, name, (GOOD | LARGE)[name][1])


@pytest.mark.parametrize("options", BROKEN)
def test_the_page_has_each_broken_variant_and_the_rule_that_finds_it(options: str) -> None:
    page_has_variant(PAGE, options, BROKEN[options])
