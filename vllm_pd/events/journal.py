# SPDX-License-Identifier: Apache-2.0
"""Turns changes of the prefix cache into KV events, and keeps what was announced so far. Pure.

Consecutive blocks of one prompt become one event. A block is held back while its parent is not announced, because no
request could hit it: so a parent is always announced before its child. It may be removed before its child, as engines
evict in any order.
"""
from collections.abc import Iterable, Iterator

from vllm_pd.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from vllm_pd.events.sink import Change, Cleared, HeldBlock

MAX_RUN_BLOCKS = 4096


class EventJournal:
    """The blocks announced to subscribers. `block_size` is in tokens. `stored` and `removed` count blocks. Not
    thread-safe."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.stored = 0
        self.removed = 0
        self._announced: dict[int, HeldBlock] = {}
        self._orphans: dict[int, dict[int, HeldBlock]] = {}  # held back, by the hash of the parent
        self._events: list[KVEvent] = []
        self._last: HeldBlock | None = None  # the last block of the last event

    def __len__(self) -> int:
        return len(self._announced)

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes, in their order."""
        for change in changes:
            if isinstance(change, HeldBlock):
                self._store(change)
            elif change is Cleared.ALL:
                self._clear()
            else:
                self._remove(change)

    def replace(self, blocks: Iterable[HeldBlock]) -> None:
        """The engine holds exactly these blocks: make the events that lead there."""
        held = {block.block_hash: block for block in blocks}
        gone = [block_hash for block_hash in self._announced if block_hash not in held]
        self._orphans.clear()
        if gone and len(gone) == len(self._announced):
            self._clear()
        else:
            for block_hash in gone:
                self._remove(block_hash)
        for block in held.values():
            self._store(block)

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events, self._last = self._events, [], None
        return events

    def blocks(self) -> list[HeldBlock]:
        """All announced blocks. Events that were made and not taken yet count as announced."""
        return list(self._announced.values())

    def _store(self, block: HeldBlock) -> None:
        """Announce a block, then the blocks held back for it, then those held back for these. It is held back itself
        while its parent is not announced. One that is announced already makes no event."""
        waiting = [block]
        while waiting:
            block = waiting.pop()
            parent_hash = block.parent_hash
            if block.block_hash in self._announced:
                self._announced[block.block_hash] = block
                continue
            if parent_hash is not None and parent_hash not in self._announced:
                self._orphans.setdefault(parent_hash, {})[block.block_hash] = block
                continue
            self._announced[block.block_hash] = block
            self._add(block)
            waiting.extend(self._orphans.pop(block.block_hash, {}).values())

    def _add(self, block: HeldBlock) -> None:
        self.stored += 1
        if follows(self._last, block) and len(self._events[-1].block_hashes) < MAX_RUN_BLOCKS:
            self._events[-1].block_hashes.append(block.block_hash)
            self._events[-1].token_ids.extend(block.token_ids)
        else:
            self._events.append(event_of([block], self.block_size))
        self._last = block

    def _remove(self, block_hash: int) -> None:
        block = self._announced.pop(block_hash, None)
        if block is None:
            self._unorphan(block_hash)
            return
        self.removed += 1
        self._last = None
        if self._events and isinstance(self._events[-1], BlockRemoved):
            self._events[-1].block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash]))

    def _unorphan(self, block_hash: int) -> None:
        """Drop a block that is held back. That is rare and there are few of them, so all are searched."""
        for parent_hash, children in self._orphans.items():
            if children.pop(block_hash, None) is not None:
                if not children:
                    del self._orphans[parent_hash]
                return

    def _clear(self) -> None:
        self.removed += len(self._announced)
        self._announced.clear()
        self._orphans.clear()
        self._events = [AllBlocksCleared()]  # earlier events have no effect any more
        self._last = None


def follows(last: HeldBlock | None, block: HeldBlock) -> bool:
    """Whether `block` can be in one event with `last`, directly after it."""
    return last is not None and block.parent_hash == last.block_hash and block.salt == last.salt


def event_of(blocks: list[HeldBlock], block_size: int) -> BlockStored:
    """One event for these consecutive blocks."""
    first, salt = blocks[0], blocks[0].salt
    stored = BlockStored([block.block_hash for block in blocks], first.parent_hash,
                         [token for block in blocks for token in block.token_ids], block_size)
    if salt is not None:
        stored.lora_id, stored.lora_name = salt.lora_id, salt.lora_name
        stored.extra_keys = None if salt.extra is None else [salt.extra]
    return stored


def runs(blocks: list[HeldBlock], block_size: int, most_blocks: int) -> Iterator[list[BlockStored]]:
    """All blocks, in parts of at most `most_blocks`. Each part has as few events as possible."""
    for start in range(0, len(blocks), most_blocks):
        part: list[list[HeldBlock]] = []
        for block in blocks[start:start + most_blocks]:
            if part and follows(part[-1][-1], block):
                part[-1].append(block)
            else:
                part.append([block])
        yield [event_of(run, block_size) for run in part]
