# SPDX-License-Identifier: Apache-2.0
"""Applies the events of one engine to a prefix index.

Most engines have one KV cache group: stored and removed blocks go into the index as they come. A hybrid model has
several groups, for example one with full attention and some with a sliding window.

*Whole* groups need all blocks of a prefix, *partial* ones only the last blocks before a position: as many as the group
reaches back. A group is partial where its engine says so (`reach_of`), and a whole group is known. A block is in the
index while all whole groups hold it. At the first event of a second whole group everything in the index is forgotten.
A block is marked with a reach while all partial groups with this reach hold it. Such a mark may come before the block,
because an engine reports its groups in any order. It ends with the block: an engine that computes the block again
stores it in all groups.
"""
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    reach_of,
)

MAX_GROUPS = 64
MAX_REACHES = 8  # different ones; groups with others are whole ones
MAX_EARLY_BLOCKS = 16384  # that partial groups hold before the whole ones do

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

    def mark(self, worker: str, reach: int, block_hashes: Iterable[m.Hash]) -> None:
        """The worker's groups with this reach hold these blocks."""

    def unmark(self, worker: str, reach: int, block_hashes: Iterable[m.Hash]) -> None:
        """One of these groups does not hold these blocks any more."""

    def blocks(self, worker: str) -> int:
        """How many blocks the worker holds."""

    def set_lookahead(self, worker: str, blocks: int) -> None:
        """The worker's hashes depend on so many following blocks."""

    def cleared(self, worker: str) -> None:
        """The worker has removed all blocks."""

    def drop(self, worker: str) -> None:
        """Forget the worker."""

    def replacing(self, worker: str, blocks: Iterable[tuple]) -> Iterator[int]:
        """The worker holds exactly these blocks; in steps."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A KV cache group. `reach` is in blocks; None of a whole group."""
    bit: int
    reach: int | None


class Holdings:
    """The blocks of one engine (`worker` in the index). `note` is called with the reason for each event that can't be
    used."""

    def __init__(self, index: SubscribedIndex, worker: str, note: Callable[[str], None]) -> None:
        self._index = index
        self._worker = worker
        self._note = note
        self._groups: dict[int, _Group] = {}
        self._whole = 0  # bits of the whole groups; of all groups while none is known to be whole
        self._partial: dict[int, int] = {}  # reach -> bits of the partial groups; empty while no whole group is known
        self._marks_all = False  # whether the index still has to get all marks
        self._held: dict[m.Hash, int] = {}  # bits of the groups that hold the block; not of the only whole group
        self._blocks: dict[m.Hash, _Block] = {}  # with several whole groups: the content of their blocks
        self._indexed: set[m.Hash] = set()  # with several whole groups: the blocks in the index

    def forget(self) -> None:
        """Forget everything known here. The caller clears the index."""
        self._groups.clear()
        self._whole = 0
        self._partial.clear()
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
        size = self._index.block_size or run.block_size
        if run.group_idx is not None and run.block_size != size:  # it is no group of ours: no hit waits for its blocks
            self._note(f"KV cache group {run.group_idx} has blocks of {run.block_size} tokens, others have "
                       f"{size}: its blocks are left out")
            return True
        group = self._groups.get(run.group_idx or 0) or self._new_group(run)
        if group is None:
            self._note(f"KV cache group {run.group_idx} is one of more than {MAX_GROUPS}: its blocks are left out")
            return True
        kept = True
        if group.reach is not None:
            kept = self._stored_partial(run, group)
        if group.bit & self._whole:
            kept = self._stored_whole(run, group) and kept
        if self._marks_all:
            self._mark_all()
        return kept

    def _stored_whole(self, run: Stored, group: _Group) -> bool:
        """As `_stored`, for a whole group."""
        if group.bit != self._whole:
            return self._stored_in_group(run, group.bit)
        if not m.fits(run):
            if group.reach is None:
                self._note(f"KV cache group {run.group_idx}: {m.misfit(run)}: its blocks are left out")
            return True
        kept = self._index.stored(self._worker, run.block_hashes, run.parent_block_hash, run.token_ids, run.block_size,
                                  adapter_of(run), extras_of(run), run.counted)
        self._set_lookahead(run)
        return kept

    def _stored_partial(self, run: Stored, group: _Group) -> bool:
        """As `_stored`, for a partial group. Its run may leave out the blocks of any of its tokens, so only the hashes
        say which blocks these are."""
        most = MAX_EARLY_BLOCKS + (self._index.blocks(self._worker) if self._partial else 0)
        bits, complete, kept = self._partial.get(group.reach, 0), [], True
        for block_hash in run.block_hashes:
            held = self._held.get(block_hash, 0)
            if not held and len(self._held) >= most:
                kept = False
                continue
            held = self._held[block_hash] = held | group.bit
            if held & bits == bits:
                complete.append(block_hash)
        if bits:
            self._index.mark(self._worker, group.reach, complete)
        return kept or not bits

    def _stored_in_group(self, run: Stored, bit: int) -> bool:
        """With several whole groups: the one with this bit holds these blocks now, and those that all of them hold go
        into the index. A run may leave out the tokens of some blocks; what they contain is then known from another
        group's run. Returns False if the index could not keep all of them."""
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
        """Put a block into the index that all whole groups hold. False if the index could not keep it."""
        block = self._blocks.get(block_hash)
        if block is None or block_hash in self._indexed or self._held[block_hash] & self._whole != self._whole:
            return True
        parent, token_ids, adapter, extra = block
        self._indexed.add(block_hash)
        return self._index.stored(self._worker, [block_hash], parent, token_ids, len(token_ids), adapter,
                                  [extra] if extra else None, False)

    def _removed(self, run: Removed) -> None:
        """Removed blocks. With several whole groups a block leaves the index when the first of them removes it; its
        tokens are kept while any of them holds it. Of a group that has stored nothing yet nothing is known."""
        group = self._groups.get(run.group_idx or 0)
        if group is None and self._groups:
            return
        if group is not None and not group.bit & self._whole:
            self._let_go(run, ~group.bit)
            self._index.unmark(self._worker, group.reach, run.block_hashes)
            return
        if group is None or group.bit == self._whole:
            self._index.removed(self._worker, run.block_hashes)
        else:
            for reach in self._partial:
                self._index.unmark(self._worker, reach, run.block_hashes)
            removed = [block_hash for block_hash in run.block_hashes if block_hash in self._indexed]
            self._indexed.difference_update(removed)
            self._index.removed(self._worker, removed)
        if self._held and group is not None:
            self._let_go(run, self._whole & ~group.bit)

    def _let_go(self, run: Removed, others: int) -> None:
        """Of the groups that hold these blocks, only those with the bits `others` are left."""
        for block_hash in run.block_hashes:
            held = self._held.pop(block_hash, 0) & others
            if held:
                self._held[block_hash] = held
            if not held & self._whole:
                self._blocks.pop(block_hash, None)

    def _new_group(self, run: Stored) -> _Group | None:
        """The group of this run, which is the first one of it; None if there are too many. Where other groups than
        before are the whole ones, the index begins anew."""
        if len(self._groups) >= MAX_GROUPS:
            return None
        reach, known = reach_of(run), {one.reach for one in self._groups.values()} - {None}
        if reach not in known and len(known) >= MAX_REACHES:
            reach = None
        group = self._groups[run.group_idx or 0] = _Group(1 << len(self._groups), reach)
        whole, partial = 0, {}
        for one in self._groups.values():
            if one.reach is None:
                whole |= one.bit
            else:
                partial[one.reach] = partial.get(one.reach, 0) | one.bit
        of_partial = sum(partial.values())
        if not whole:
            whole, partial = of_partial, {}
        if self._whole not in (0, whole):
            self._index.cleared(self._worker)
            self._blocks.clear()
            self._indexed.clear()
            self._held = {block_hash: held & of_partial for block_hash, held in self._held.items() if held & of_partial}
        self._whole, self._partial, self._marks_all = whole, partial, bool(partial)
        return group

    def _mark_all(self) -> None:
        """Give the index all marks: it may have none, or those of fewer groups."""
        self._marks_all = False
        for reach, bits in self._partial.items():
            self._index.mark(self._worker, reach, [one for one, held in self._held.items() if held & bits == bits])
            self._index.unmark(self._worker, reach, [one for one, held in self._held.items() if held & bits != bits])

    def _forget_blocks(self) -> None:
        self._held.clear()
        self._blocks.clear()
        self._indexed.clear()
        self._marks_all = bool(self._partial)
