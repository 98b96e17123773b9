# SPDX-License-Identifier: Apache-2.0
"""Prefill first: the prompts that an engine keeps for decode engines to read, and its own reads of others'.

On P: a client's request has ended that asked for it (`keep`). Its blocks get references of ours, and its answer the
name of the hold; the references go with the `HoldEnded` of the protocol. On D: the request is parked and its attempt
begun by `vllm_pd.handover.decode`, as any; here its ranks are asked to read, and the end of that is reported.
"""
from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from vllm_pd.core.actions import DropPeer, Event, HoldEnded, ReadHold, StopRead
from vllm_pd.core.hashes import token_digest
from vllm_pd.core.holds import asks_for_hold, hold_params
from vllm_pd.core.messages import Attempt
from vllm_pd.handover.progress import Progress
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    DropTransferPeer,
    Finished,
    Read,
    TransferRequest,
)

if TYPE_CHECKING:
    from vllm_pd.config import PDConfig
    from vllm_pd.control.protocol import PeerProtocol
    from vllm_pd.metrics import PDMetrics

logger = logging.getLogger("vllm.pd")

HOLD_EVENTS = (ReadHold, StopRead, HoldEnded, DropPeer)
LEAST_BLOCKS = 2  # of a prompt that is held: the last token is computed again, and with it most of one block


class References(Protocol):
    """References on an engine's blocks, by name."""

    def hold(self, attempt: Attempt, block_ids: Iterable[int]) -> None:
        """Take one on each of these blocks."""

    def release(self, attempt: Attempt) -> bool:
        """Give them back."""


class HeldPrompts:
    """All holds and reads of one engine. Used from its step loop only. `execute` passes requests to the engine's ranks;
    `after_step` is the last step whose output was processed."""

    def __init__(self, config: PDConfig, protocol: PeerProtocol, references: References, block_size: int,
                 total_blocks: int, metrics: PDMetrics, execute: Callable[[list[TransferRequest]], None]) -> None:
        self._protocol = protocol
        self._references = references
        self._block_size = block_size
        self._most_blocks = int(config.max_parked_fraction * total_blocks) if config.holds_prompts else 0
        self._metrics = metrics
        self._execute = execute
        self._tells_ranks = not config.role.prefills  # else `handover.prefill` tells them which peers are gone
        self.after_step = 0
        self._kept: dict[Attempt, int] = {}  # how many blocks each hold has
        self._reads: dict[str, ReadHold] = {}  # by key, until their end
        self._known: set[str] = set()  # the peers that our ranks can read from

    def keep(self, extra_args: Any, token_ids: list[int], block_ids: list[int]) -> dict[str, Any] | None:
        """A client's request has ended whose prompt is computed, and still has these blocks. Keep those of the prompt,
        if its `extra_args` ask for that. Returns what its answer is to say, None where nothing is kept."""
        blocks = -(-len(token_ids) // self._block_size)
        if not self._most_blocks or not asks_for_hold(extra_args) or not LEAST_BLOCKS <= blocks <= len(block_ids):
            return None
        if sum(self._kept.values()) + blocks > self._most_blocks:
            self._metrics.hold("full")
            return None
        hold = self._protocol.next_attempt(secrets.token_hex(16))
        self._references.hold(hold, block_ids[:blocks])
        if not self._protocol.hold(hold, token_digest(token_ids), block_ids[:blocks]):
            self._references.release(hold)
            return None
        self._kept[hold] = blocks
        self._count("made")
        return hold_params(hold)

    def handle(self, event: Event, progress: Progress) -> None:
        """Handle one of HOLD_EVENTS."""
        if isinstance(event, ReadHold):
            self._read(event)
        elif isinstance(event, StopRead):
            self._execute([CancelTransfer(_key(event.attempt))])
        elif isinstance(event, HoldEnded):
            self._kept.pop(event.hold, None)
            self._count(event.end.value)
            progress.finished_transfers.append(event.hold)
        elif isinstance(event, DropPeer):
            self._known.discard(event.incarnation)
            if self._tells_ranks:
                self._execute([DropTransferPeer(event.incarnation)])

    def ended(self, end: Finished) -> None:
        """A transfer has ended on all ranks. If it is one of our reads, no byte of it lands any more."""
        read = self._reads.pop(end.key, None)
        if read is None:
            return
        if end.ok:
            self._metrics.transfer_bytes(end.bytes)
            self._metrics.handover("transfer", end.seconds)
        else:
            self._known.discard(read.peer)  # it may be that they were told to drop it
        self._protocol.read_ended(read.attempt, "" if end.ok else end.error or "the read failed")

    def debug_state(self) -> dict[str, int]:
        """How many holds and reads there are, for tests and chaos. Both are 0 at rest."""
        return {"holds": len(self._kept), "hold_reads": len(self._reads)}

    def _read(self, event: ReadHold) -> None:
        requests: list[TransferRequest] = []
        if event.peer not in self._known:
            self._known.add(event.peer)
            requests.append(AddTransferPeer(event.peer, event.metadata))
        key = _key(event.attempt)
        self._reads[key] = event
        self._execute([*requests, Read(key, event.peer, event.block_ids, event.remote_block_ids, self.after_step)])

    def _count(self, what: str) -> None:
        self._metrics.hold(what)
        self._metrics.held_blocks.set(sum(self._kept.values()))


def _key(attempt: Attempt) -> str:
    return f"hold {attempt}"
