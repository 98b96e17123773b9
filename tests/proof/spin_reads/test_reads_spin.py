# SPDX-License-Identifier: Apache-2.0
"""B102, B107: a prompt that P holds and D reads, as a model in Promela under spin (`tests/promela.py`). It is written
from docs/protocol.md, and shares nothing with the protocol's code or the explorer.

A folder of its own, as spin/ beside it (`tests/searches.py`)."""
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

MODEL = Path(__file__).with_name("reads.pml")
PAGE = Path(__file__).parents[3] / "docs/protocol.md"

# name: options, states. Asserted, for a model that has silently become smaller proves less.
GOOD = {
    "a read, D claims too late and again, both are in doubt about others":
        ("-DLAPSES=1 -DRENEWS=1 -DOTHERS=1 -DOWN_OTHERS=1", 4_753_721),
    "a read, all that may go wrong with it, with D and with P, once":
        ("-DLAPSES=1 -DOTHERS=1 -DDRIFTS=1 -DERRORS=1 -DHANGS=1 -DLOSSES=1 -DSILENCES=1 -DDEATHS=1 -DP_DEATHS=1",
         5_195_991),
    "a read, a rank of one of the two can't make its agent, or can't destroy it":
        ("-DLAPSES=1 -DRENEWS=1 -DDRIFTS=1 -DRANK_ERRORS=1", 1_089_094),
    "a D on P's machine, all that may go wrong, once":
        ("-DHERE -DOTHERS=1 -DDRIFTS=1 -DERRORS=1 -DHANGS=1 -DLOSSES=1 -DSILENCES=1 -DDEATHS=1 -DP_DEATHS=1 "
         "-DRANK_ERRORS=1", 1_563_827),
    "two attempts want one hold, P is in doubt about another engine": ("-DATTEMPTS=2 -DSAME -DOTHERS=1", 1_719_916),
    "two attempts want one hold, D claims too late and again": ("-DATTEMPTS=2 -DSAME -DLAPSES=1 -DRENEWS=1", 1_793_431),
    "two Ds want one hold, one dies, one falls silent":
        ("-DATTEMPTS=2 -DREADERS=2 -DSAME -DLOSSES=1 -DSILENCES=1 -DDEATHS=1", 2_050_825),
    "two Ds want one hold, P is in doubt about another engine":
        ("-DATTEMPTS=2 -DREADERS=2 -DSAME -DOTHERS=1", 3_543_634),
    "two Ds want one hold, one of them on P's machine, one falls silent":
        ("-DATTEMPTS=2 -DREADERS=2 -DHERE -DSAME -DOTHERS=1 -DSILENCES=1", 5_827_263),
    "two holds that one D reads": ("-DATTEMPTS=2 -DIN_TIME", 1_191_761),
    "two holds that two Ds read": ("-DATTEMPTS=2 -DREADERS=2 -DIN_TIME", 4_008_063),
    "two holds that two Ds read, one of them on P's machine, one falls silent":
        ("-DATTEMPTS=2 -DREADERS=2 -DHERE -DIN_TIME -DSILENCES=1", 726_574),
}
# What is broken on purpose, and in which scene: the rule that does not hold then.
BROKEN = {
    "-DONE_RANK_IS_ALL -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DERROR_IS_AN_END -DOTHERS=1 -DRANK_ERRORS=1": "no_read_of_reused_blocks_is_used",
    "-DRENEWAL_IS_THE_END -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DSILENCE_IS_DEATH -DLAPSES=1": "no_read_of_reused_blocks_is_used",
    "-DFREES_ALL_DOUBTED -DLAPSES=1 -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DHERE_TOO -DHERE -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DREADS_IN_THE_NEWEST -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DCLAIMS_BACK -DOTHERS=1": "no_read_of_reused_blocks_is_used",
    "-DGRANTS_TWICE -DATTEMPTS=2 -DSAME": "no_read_of_reused_blocks_is_used",
    "-DDONE_OF_ANYBODY -DATTEMPTS=2 -DSAME": "no_read_of_reused_blocks_is_used",
    "-DTAKES_ONE_RANK_FOR_ALL": "no_read_is_used_in_part",
    "-DRELEASES_EARLY": "no_read_lands_in_a_block_of_another",
    "-DTRUSTS_ERRORS -DDRIFTS=1": "no_read_lands_in_a_block_of_another",
    "-DSEEMING_ENDS_READS": "no_read_lands_in_a_block_of_another",
    "-DOWN_ERROR_IS_AN_END -DDRIFTS=1 -DRANK_ERRORS=1": "no_read_lands_in_a_block_of_another",
    "-DKEEPS_ITS_GENERATION -DDRIFTS=1 -DOWN_OTHERS=1": "no_read_lands_in_a_block_of_another",
    "-DFORGETS_A_RANK_THAT_IS_AHEAD -DDRIFTS=1 -DOWN_OTHERS=1": "no_read_lands_in_a_block_of_another",
    "-DGRANTS_DYING -DOTHERS=1": "no_grant_in_a_dying_generation",
    "-DNO_CLOSING -DOTHERS=1": "no_healthy_read_is_cut_off_within_a_lease",
    "-DIGNORES_RENEWALS -DLAPSES=1 -DRENEWS=1": "no_healthy_read_is_cut_off_within_a_lease",
    "-DKEEPS_WHAT_IT_DOUBTS -DSILENCES=1": "renewals_are_bounded",
    "-DASKS_ONCE -DOTHERS=1 -DRANK_ERRORS=1": "old_agents_end",
    "-DNO_LEASE -DSILENCES=1": "each_hold_ends",
    "-DNEVER_ASKS -DHERE -DLOSSES=1": "each_hold_ends",
    "-DNO_OWN_DOUBT -DHANGS=1": "each_read_ends",
}
# options: states. In these each path is looked at for a circle, too.
CIRCLE_FREE = {
    "-DLAPSES=1 -DRENEWS=1 -DRANK_ERRORS=1": 896_155,
    "-DLAPSES=1 -DDRIFTS=1 -DERRORS=1 -DHANGS=1 -DLOSSES=1 -DSILENCES=1 -DDEATHS=1": 1_227_275,
    "-DHERE -DOTHERS=1 -DDRIFTS=1 -DERRORS=1 -DHANGS=1 -DLOSSES=1 -DSILENCES=1": 467_459,
    "-DATTEMPTS=2 -DREADERS=2 -DSAME -DSILENCES=1": 1_593_571,
}


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    require_tools()


@pytest.mark.search
@pytest.mark.parametrize("name", GOOD)
def test_b102_each_rule_holds_in_every_order_of_events(tmp_path: Path, name: str) -> None:
    each_rule_holds(tmp_path, MODEL, *GOOD[name])


@pytest.mark.search
@pytest.mark.parametrize("options", CIRCLE_FREE)
def test_b107_no_path_is_a_circle_so_each_comes_to_rest(tmp_path: Path, options: str) -> None:
    """And what must be at rest is a rule."""
    no_path_is_a_circle(tmp_path, MODEL, options, CIRCLE_FREE[options])


@pytest.mark.parametrize("options", BROKEN)
def test_b102_spin_finds_what_is_broken_on_purpose(tmp_path: Path, options: str) -> None:
    rule_is_broken(tmp_path, MODEL, options, BROKEN[options])


def test_b107_a_circle_is_found(tmp_path: Path) -> None:
    """A rank that never can destroy its agents is asked for ever."""
    a_path_is_a_circle(tmp_path, MODEL, "-DNEVER_CAN -DRANK_ERRORS=1 -DOTHERS=1")


@pytest.mark.parametrize("name", GOOD)
def test_the_page_has_the_states_of_each_scene(name: str) -> None:
    page_has_states(PAGE, name, GOOD[name][1])


@pytest.mark.parametrize("options", BROKEN)
def test_the_page_has_each_broken_variant_and_the_rule_that_finds_it(options: str) -> None:
    page_has_variant(PAGE, options, BROKEN[options])
