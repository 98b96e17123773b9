# SPDX-License-Identifier: Apache-2.0
"""Reads batches of KV events as vLLM 0.9.2 to 0.33 writes them.

Up to 0.23 an event is an array, to which later releases have added fields at the end; since 0.24 it is a map. Hashes
are integers or bytes. Events about anything but the engine's own GPU memory (another medium, another machine) are left
out. An event of an unknown kind is left out and noted. A known kind that can't be read becomes an `Unreadable`: after
it, what is known of the engine can't be trusted any more.
"""
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from vllm_pd.events import messages as m
from vllm_pd.rpc.codec import MAX_FRAME_BYTES, UNREADABLE, BadFrame, FrameFault

MAX_REASONS = 16  # different texts that are kept
MAX_REASON_CHARS = 200
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_OWN_MEDIA = (None, "GPU")
_WINDOWS = ("sliding_window", "sliding_window_mla")
_STATES = "mamba"  # recurrent states of any kind
_REMOTE = "REMOTE"


class StoredMap(msgspec.Struct, gc=False, tag="BlockStored"):
    """As `m.BlockStored`, since vLLM 0.24. `lookahead_token_ids` (0.33) are, for each block, tokens after it that its
    hash depends on, too. A block may be stored again when a request hits it (0.27), so repeated ones are not
    counted. `kv_cache_spec_kind` says what the layers of the KV cache group are, `kv_cache_spec_sliding_window` has
    their window in tokens."""
    block_hashes: list[m.Hash]
    parent_block_hash: m.Hash | None
    token_ids: list[m.TokenId]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    counted: ClassVar[bool] = False


class RemovedMap(msgspec.Struct, gc=False, tag="BlockRemoved"):
    """As `m.BlockRemoved`."""
    block_hashes: list[m.Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedMap(msgspec.Struct, gc=False, tag="AllBlocksCleared"):
    """As `m.AllBlocksCleared`."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An event that changed what the engine holds, and could not be read."""


STORED = (m.BlockStored, StoredMap)
REMOVED = (m.BlockRemoved, RemovedMap)
Stored = m.BlockStored | StoredMap
Removed = m.BlockRemoved | RemovedMap
Event = m.KVEvent | StoredMap | RemovedMap | ClearedMap | Unreadable


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_whole = (msgspec.msgpack.Decoder(m.EventBatch), msgspec.msgpack.Decoder(_MapBatch))
_single = (msgspec.msgpack.Decoder(m.KVEvent), msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap))
_raw = msgspec.msgpack.Decoder(_RawBatch)
_any = msgspec.msgpack.Decoder()


def count_unread(unread: Counter[str], reason: str) -> None:
    """Count something that could not be read under `reason`. At most MAX_REASONS different ones are kept, because a
    publisher can cause any number of them."""
    reason = reason[:MAX_REASON_CHARS]
    unread[reason if reason in unread or len(unread) < MAX_REASONS else "other reasons"] += 1


class BatchReader:
    """Reads the batches of one publisher. `unread` counts what could not be read, by reason. `rank` is the publisher's
    data-parallel rank, from its first batch."""

    def __init__(self, unread: Counter[str]) -> None:
        self.unread = unread
        self.rank: int | None = None
        self._whole = _whole

    def read(self, frames: Sequence[bytes]) -> tuple[int, m.EventBatch]:
        """(sequence number, batch) of the three frames of a subscription (topic, number, payload) or a replay (empty,
        number, payload). Raises BadFrame for anything that is no batch."""
        if len(frames) != 3 or len(frames[1]) != 8:
            raise self._bad(FrameFault.SHAPE, f"{len(frames)} frames are not a batch of events")
        if len(frames[2]) > MAX_FRAME_BYTES:
            raise self._bad(FrameFault.SIZE, f"{len(frames[2])} bytes are more than {MAX_FRAME_BYTES}")
        batch = self._decode(frames[2])
        if batch.data_parallel_rank is not None:
            if self.rank is None:
                self.rank = batch.data_parallel_rank
            elif batch.data_parallel_rank != self.rank:
                raise self._bad(FrameFault.CONTENT, f"data-parallel ranks {self.rank} and {batch.data_parallel_rank} "
                                "in one stream: subscribe to each rank's own endpoint")
        return int.from_bytes(frames[1], "big"), m.EventBatch(
            batch.ts, [event for event in map(self._checked, batch.events) if event is not None],
            batch.data_parallel_rank)

    def note(self, reason: str) -> None:
        """Count something that could not be read."""
        count_unread(self.unread, reason)

    def _decode(self, payload: bytes) -> Any:
        """A batch in one of the known formats; that of the last batch is tried first. Where the batch fits none as a
        whole, its events are read one by one, so that an unreadable one costs no others. Raises BadFrame."""
        for decoder in self._whole:
            try:
                batch = decoder.decode(payload)
            except UNREADABLE:
                continue
            if decoder is not self._whole[0]:
                self._whole = self._whole[::-1]
            return batch
        try:
            batch = _raw.decode(payload)
        except UNREADABLE as error:
            raise self._bad(FrameFault.CONTENT, str(error)[:200]) from error
        return _RawBatch(batch.ts, [event for event in map(self._decode_event, batch.events) if event is not None],
                         batch.data_parallel_rank)

    def _decode_event(self, raw: msgspec.Raw) -> Event | None:
        """One event of a batch that could not be decoded as a whole; None for an unknown kind."""
        try:
            event = _any.decode(raw)
        except (*UNREADABLE, TypeError) as error:
            self.note(str(error))
            return Unreadable()
        is_map = isinstance(event, dict)
        try:
            return _single[is_map].decode(raw)
        except UNREADABLE as error:
            kind = event.get("type") if is_map else event[0] if isinstance(event, list) and event else None
            if isinstance(kind, str) and kind not in KINDS:
                self.note(f"an event of an unknown kind, {kind!r}")
                return None
            self.note(f"{kind}: {error}")
            return Unreadable()

    def _checked(self, event: Event) -> Event | None:
        """The event; None where it is not about this engine's GPU memory; Unreadable where it contradicts itself."""
        if isinstance(event, STORED):
            if event.medium not in _OWN_MEDIA or event.locality == _REMOTE:
                return None
            if event.extra_keys is not None and not _has_extras_for_each(event):
                self.note(f"BlockStored: {len(event.extra_keys)} extra_keys for {len(event.block_hashes)} blocks")
                return Unreadable()
            if event.group_idx is None and not m.fits(event):  # with KV cache groups a run may leave out some blocks
                self.note(f"BlockStored: {m.misfit(event)}")
                return Unreadable()
        elif isinstance(event, REMOVED) and (event.medium not in _OWN_MEDIA or event.locality == _REMOTE):
            return None
        return event

    def _bad(self, fault: FrameFault, text: str) -> BadFrame:
        self.note(text)
        return BadFrame(fault, text)


def adapter_of(run: Stored) -> int | str | None:
    """The LoRA adapter's name, or its number where only that is known; None for the base model. With it the
    `extra_keys` of our V0 engines, which distinguish all blocks of the run from those of other requests."""
    adapter = run.lora_name if run.lora_name is not None else run.lora_id
    return f"{adapter}\0{run.extra_keys}" if run.extra_keys and _for_all(run.extra_keys) else adapter


def extras_of(run: Stored) -> list[str | None] | None:
    """For each block, what distinguishes it from blocks with the same adapter and tokens: an image, a cache salt,
    embeddings. None where no block has any."""
    if not run.extra_keys or _for_all(run.extra_keys):
        return None
    found = [_extra(keys, run.lora_name) for keys in run.extra_keys]
    return found if any(found) else None


def reach_of(run: Stored) -> int | None:
    """How many blocks before a position the layers of the run's KV cache group need, of those before it. None where
    they need all, or where the engine does not say. V1's number: the token at the position is in the window, too."""
    if not isinstance(run, StoredMap) or run.block_size < 1:
        return None
    if run.kv_cache_spec_kind == _STATES:
        return 1
    window = run.kv_cache_spec_sliding_window
    if run.kv_cache_spec_kind not in _WINDOWS or window is None or window < 1:
        return None
    return max(1, -(-(window - 1) // run.block_size))


def lookahead_blocks(run: Stored) -> int:
    """How many blocks after a block must be the same for the block to be a hit."""
    if not run.lookahead_token_ids or run.block_size < 1:
        return 0
    return -(-max(map(len, run.lookahead_token_ids)) // run.block_size)


def _extra(keys: Any, lora_name: str | None) -> str | None:
    keys = list(keys) if isinstance(keys, list | tuple) else [] if keys is None else [keys]
    if lora_name is not None and keys and keys[0] == lora_name:
        keys = keys[1:]
    return repr(keys) if keys else None


def _for_all(extra_keys: list[Any]) -> bool:
    """Whether these are of our V0 engines: integers that hold for all blocks of the run."""
    return all(type(key) is int for key in extra_keys)


def _has_extras_for_each(run: Stored) -> bool:
    return _for_all(run.extra_keys) or len(run.extra_keys) == len(run.block_hashes)
