# SPDX-License-Identifier: Apache-2.0
"""Applies the events of one engine to a prefix index.

Most engines have one KV cache group: stored and removed blocks go into the index as they come. A hybrid model has
several groups, for example one with full attention and one with a sliding window, and a request hits a block only if
every group holds it. At the first event of a second group everything known is forgotten. From then on a block is in the
index while all groups seen so far hold it.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from vllm_pd.events import messages as m
from vllm_pd.events.formats import (
    REMOVED,
    STORED,
    Event,
    Removed,
    Stored,
    adapter_of,
    extras_of,
    lookahead_blocks,
)

_Block = tuple[m.Hash | None, list[int], int | str | None, str | None]  # parent, tokens, adapter, extras


class SubscribedIndex(Protocol):
    """The index that a subscriber feeds: `vllm_pd.router.index.PrefixIndex`, which documents these methods."""

    block_size: int

    def stored(self, worker: str, block_hashes: Sequence[m.Hash], parent: m.Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool:
        """The worker has stored these blocks."""

    def removed(self, worker: str, block_hashes: Iterable[m.Hash]) -> None:
        """The worker has removed these blocks."""

    def set_lookahead(self, worker: str, blocks: int) -> None:
        """The worker's hashes depend on so many following blocks."""

    def cleared(self, worker: str) -> None:
        """The worker has removed all blocks."""

    def drop(self, worker: str) -> None:
        """Forget the worker."""

    def replacing(self, worker: str, blocks: Iterable[tuple]) -> Iterator[int]:
        """The worker holds exactly these blocks; in steps."""


class Holdings:
    """The blocks of one engine (`worker` in the index). `note` is called with the reason for each event that can't be
    used."""

    def __init__(self, index: SubscribedIndex, worker: str, note: Callable[[str], None]) -> None:
        self._index = index
        self._worker = worker
        self._note = note
        self._groups: dict[int, int] = {}  # group -> its bit
        self._held: dict[m.Hash, int] = {}  # with several groups: bits of the groups that hold the block
        self._blocks: dict[m.Hash, _Block] = {}  # the content of those blocks, where it is known
        self._indexed: set[m.Hash] = set()  # with several groups: the blocks in the index

    def forget(self) -> None:
        """Forget everything known here. The caller clears the index."""
        self._groups.clear()
        self._forget_blocks()

    def apply(self, event: Event) -> bool:
        """Apply an event. Returns False if the index could not keep all of its blocks."""
        if isinstance(event, STORED):
            return self._stored(event)
        if isinstance(event, REMOVED):
            self._removed(event)
        else:
            self._forget_blocks()
            self._index.cleared(self._worker)
        return True

    def _stored(self, run: Stored) -> bool:
        """A run of stored blocks. Where a KV cache group's run does not fit the index it is noted and left out; without
        groups, blocks of another size raise PeerMismatch. Returns False if the index could not keep all of them."""
        bit = self._bit(run.group_idx)
        size = self._index.block_size or run.block_size
        if run.group_idx is not None and run.block_size != size:
            self._note(f"KV cache group {run.group_idx} has blocks of {run.block_size} tokens, others have "
                       f"{size}: its blocks are left out")
            return True
        if len(self._groups) > 1:
            return self._stored_in_group(run, bit)
        if not m.fits(run):
            self._note(f"KV cache group {run.group_idx}: {m.misfit(run)}: its blocks are left out")
            return True
        kept = self._index.stored(self._worker, run.block_hashes, run.parent_block_hash, run.token_ids, run.block_size,
                                  adapter_of(run), extras_of(run), run.counted)
        self._set_lookahead(run)
        return kept

    def _stored_in_group(self, run: Stored, bit: int) -> bool:
        """With several groups: the group with this bit holds these blocks now, and those that all groups hold go into
        the index. A run may leave out the tokens of some blocks; what they contain is then known from another group's
        run. Returns False if the index could not keep all of them."""
        if m.fits(run):
            parent, size, adapter, extras = run.parent_block_hash, run.block_size, adapter_of(run), extras_of(run)
            for number, block_hash in enumerate(run.block_hashes):
                self._blocks[block_hash] = (parent, run.token_ids[number * size:(number + 1) * size], adapter,
                                            extras[number] if extras else None)
                parent = block_hash
        kept = True
        for block_hash in run.block_hashes:
            self._held[block_hash] = self._held.get(block_hash, 0) | bit
            kept = self._add_if_complete(block_hash) and kept
        self._set_lookahead(run)
        return kept

    def _set_lookahead(self, run: Stored) -> None:
        if lookahead := lookahead_blocks(run):
            self._index.set_lookahead(self._worker, lookahead)

    def _add_if_complete(self, block_hash: m.Hash) -> bool:
        """Put a block into the index that all groups hold. False if the index could not keep it."""
        block = self._blocks.get(block_hash)
        if block is None or block_hash in self._indexed or self._held[block_hash] != (1 << len(self._groups)) - 1:
            return True
        parent, token_ids, adapter, extra = block
        self._indexed.add(block_hash)
        return self._index.stored(self._worker, [block_hash], parent, token_ids, len(token_ids), adapter,
                                  [extra] if extra else None, False)

    def _removed(self, run: Removed) -> None:
        """Removed blocks. With several groups a block leaves the index when the first of them removes it; its tokens
        are kept while any group holds it."""
        bit = self._bit(run.group_idx)
        if len(self._groups) < 2:
            self._index.removed(self._worker, run.block_hashes)
            return
        for block_hash in run.block_hashes:
            if block_hash in self._indexed:
                self._indexed.discard(block_hash)
                self._index.removed(self._worker, [block_hash])
            bits = self._held.pop(block_hash, 0) & ~bit
            if bits:
                self._held[block_hash] = bits
            else:
                self._blocks.pop(block_hash, None)

    def _bit(self, group: int | None) -> int:
        """The group's bit. At the second group, forget everything."""
        group = group or 0
        if group not in self._groups:
            self._groups[group] = 1 << len(self._groups)
            if len(self._groups) > 1:
                self._forget_blocks()
                self._index.cleared(self._worker)
        return self._groups[group]

    def _forget_blocks(self) -> None:
        self._held.clear()
        self._blocks.clear()
        self._indexed.clear()
