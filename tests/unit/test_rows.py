# SPDX-License-Identifier: Apache-2.0
"""B114: which blocks of a prompt go from one engine to the other where layers have windows, or states."""
import pytest

from vllm_pd.protocol.rows import STATE, BlockRows, first_needed

SIZE = 16


def test_one_group_has_the_blocks_of_the_whole_prompt():
    rows = BlockRows(SIZE)
    assert (rows.lead, rows.own_tokens) == (0, 0)
    for tokens in range(1, 70):
        table = list(range(1, 2 + tokens // SIZE))[:-(-tokens // SIZE)]
        assert rows.pick([[*table, 99]], tokens, 2) == table and rows.count(tokens, 2) == len(table)


@pytest.mark.parametrize("windows", [(0, 40), (40, 0), (23, 0, 16), (0, 0, 64), (0, 2)])
@pytest.mark.parametrize("cached", [0, 1, 3])
def test_b114_rows_are_what_the_next_token_reads(windows, cached):
    """Counted token by token, for each length. A table has a filler, 0, where nothing is needed any more."""
    rows = BlockRows(SIZE, windows)
    assert rows.own_tokens == 1 and windows[rows.lead] == 0
    for tokens in range(cached * SIZE + 1, 150):
        blocks = range(-(-tokens // SIZE))
        needed = [[any(not window or tokens - key < window for key in range(n * SIZE, min(tokens, (n + 1) * SIZE)))
                   for n in blocks] for window in windows]
        tables = [[100 * group + n + 1 if needed[group][n] else 0 for n in blocks] for group in range(len(windows))]
        found = rows.pick(tables, tokens, cached)
        lead = tables[rows.lead]
        assert found[:len(lead)] == lead
        others = [block for group, table in enumerate(tables) if group != rows.lead
                  for block in table[cached:] if block]
        assert found[len(lead):] == others and len(found) == rows.count(tokens, cached)


def test_b114_a_table_that_ends_before_the_prompt_is_refused():
    with pytest.raises(ValueError, match="for 17 tokens of 16 a block in 1 groups"):
        BlockRows(SIZE).pick([[1]], 17, 0)
    with pytest.raises(ValueError, match="for 16 tokens .* in 2 groups"):
        BlockRows(SIZE, (0, 40)).pick([[1]], 16, 0)


@pytest.mark.parametrize("cached", [0, 1, 3])
@pytest.mark.parametrize("each", [SIZE, 1024], ids=["an entry for each block", "one entry"])
def test_b114_of_states_the_last_one(cached, each):
    """After D's hit there is always one to come."""
    rows = BlockRows(SIZE, (STATE, 0, STATE), each)
    assert (rows.lead, rows.own_tokens) == (1, 1)
    for tokens in range(cached * SIZE + 1, 150):
        blocks = -(-tokens // SIZE)
        entries = -(-tokens // each)
        tables = [[0] * (entries - 1) + [900], list(range(1, blocks + 1)), [0] * (entries - 1) + [901]]
        assert rows.pick(tables, tokens, cached) == [*tables[1], 900, 901]
        assert rows.count(tokens, cached) == blocks + 2
    with pytest.raises(ValueError, match="for 150 tokens"):
        rows.pick([[], list(range(10)), []], 150, 0)


def test_the_first_token_that_is_read():
    assert [first_needed(0, 9), first_needed(4, 7), first_needed(4, 3), first_needed(1, 5)] == [0, 4, 0, 5]
