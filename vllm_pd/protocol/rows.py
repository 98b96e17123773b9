# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a prompt go from a prefill engine to a decode engine where layers differ in how far they look back.

An engine may keep its layers in several groups, each with a block table of its own: layers with full attention need the
KV of all tokens, those with a sliding window only that of the last ones, and their table has no block for the others.
A *row* is one block of one group. Both sides list the rows of a prompt in the same order, by these functions alone:

    the first group with full attention: all its blocks, from that of the first token on
    then each other group, in order: its blocks that the peer's cache lacks and the next token may read

The first list is what an engine with one group has. `cached_blocks`, the blocks of D's prefix hit, come first in it,
and a window group has no row for them: D has all of its window before the hit's end.

Groups may have blocks of different numbers of tokens (`BlockRows.sizes`). A prefix hit then ends where a block of each
group ends.

A recurrent state (Mamba, GDN, short convolution) is what a window of two tokens would be: of all that came before, the
next token needs the block of the token before it, and that holds the state after that token (`STATE`).

With a window nothing but the tokens *before* the last one may come from a peer (`BlockRows.own_tokens`). D computes the
last one, whose query reads the keys of `window - 1` tokens before it. If D took the KV of the last token too and then
computed it once more, as it does with one group, vLLM would lay its table out for the token after that: where that
token's window begins with a new block, the oldest key of the last token's window is in no block any more. And of states
there is the last one only: that after the last token would be of no use to D, which computes that token from the state
before it. What P's drafter writes for the last of its tokens may depend on the one after it, so D says that one in the
grant (`Grant.next_token`) where there is such a drafter.
"""
from collections.abc import Sequence
from typing import TypeVar

import msgspec

STATE = 2  # the window of a group with a state

B = TypeVar("B")


class BlockRows(msgspec.Struct, frozen=True):
    """The groups of an engine: `block_size` in tokens, and each group's window in tokens, 0 with full attention. No
    windows: one group with full attention. `state_tokens`, if not 0: all other groups have states, and their tables an
    entry for each so many tokens, which is the engine's own matter. `sizes`, if groups differ in them: the tokens of a
    block of each group, that of the leading one being `block_size`."""
    block_size: int
    windows: tuple[int, ...] = ()
    state_tokens: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def lead(self) -> int:
        """The number of the group whose rows come first."""
        return self.windows.index(0) if self.windows else 0

    @property
    def own_tokens(self) -> int:
        """How many tokens at a prompt's end the decode engine always computes itself."""
        return int(any(self.windows))

    def size(self, group: int) -> int:
        """How many tokens an entry of this group's table is for."""
        if self.state_tokens and self.windows[group]:
            return self.state_tokens
        return self.sizes[group] if self.sizes else self.block_size

    def count(self, tokens: int, cached_blocks: int) -> int:
        """How many rows a prompt of so many tokens has, the `cached_blocks` of the first group included."""
        return sum(len(entries) for _, entries in self._entries(tokens, cached_blocks))

    def pick(self, tables: Sequence[Sequence[B]], tokens: int, cached_blocks: int) -> list[B]:
        """The rows of a prompt of so many tokens, from the block table of each group, which has a block or a filler for
        each `size` tokens. Raises ValueError where a table ends before the prompt does."""
        found = self._entries(tokens, cached_blocks)
        if len(tables) != len(found) or any(len(tables[group]) < entries.stop for group, entries in found):
            raise ValueError(f"block tables of {[len(table) for table in tables]} blocks for {tokens} tokens of "
                             f"{self.block_size} a block in {len(found)} groups")
        return [block for group, entries in found for block in tables[group][entries.start:entries.stop]]

    def _entries(self, tokens: int, cached_blocks: int) -> list[tuple[int, range]]:
        """(group, which entries of its table are rows): of the leading group, then of the others in order."""
        windows, found = self.windows or (0, ), []
        for group in (self.lead, *(group for group in range(len(windows)) if group != self.lead)):
            window = windows[group]
            size = self.size(group)
            is_whole = group == self.lead or bool(window and self.state_tokens)
            cached = 0 if is_whole else cached_blocks * self.block_size // size
            end, first = -(-tokens // size), max(cached, first_needed(window, tokens) // size)
            found.append((group, range(min(first, end), end)))
        return found


def first_needed(window: int, tokens: int) -> int:
    """The first token whose KV the token after `tokens` tokens reads in a layer with this window; 0: full attention.
    That token's own key is one of the `window` that it reads (vLLM's SlidingWindowManager.get_num_skipped_tokens)."""
    return max(0, tokens - window + 1) if window else 0
