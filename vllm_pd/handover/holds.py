# SPDX-License-Identifier: Apache-2.0
"""Prefill first: the prompts that an engine keeps for decode engines to read, and its own reads of others'.

On P: a client's request has ended that asked for it (`keep`). Its blocks get references of ours, and its answer the
name of the hold; the references go with the `HoldEnded` of the protocol. Prompts that begin alike share blocks, which
count once. On D: the request is parked and its attempt begun by `vllm_pd.handover.decode`, as any; here its ranks are
asked to read, and the end of that is reported.
"""
from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm_pd.handover.progress import Progress
from vllm_pd.protocol.actions import DropPeer, Event, HoldEnded, ReadHold, StopRead
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import asks_for_hold, hold_params, named_hold
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.scope import PromptScope
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    DropTransferPeer,
    Finished,
    Read,
    TransferRequest,
)

if TYPE_CHECKING:
    from vllm_pd.handover.metrics import PDMetrics
    from vllm_pd.peer.protocol import PeerProtocol
    from vllm_pd.settings.engine import PDConfig

logger = logging.getLogger("vllm.pd")

HELD_PROMPT_EVENTS = (ReadHold, StopRead, HoldEnded, DropPeer)
LEAST_BLOCKS = 2  # of a prompt that is held: the last token is computed again, and with it most of one block


class _KeptPrompt(NamedTuple):
    """The blocks of one hold, and whose sample's it is: `_parent_id` and the digest of the tokens."""
    block_ids: list[int]
    sample: tuple[str, bytes]


class References(Protocol):
    """References on an engine's blocks, by name."""

    def hold(self, attempt: Attempt, block_ids: Iterable[int]) -> None:
        """Take one on each of these blocks."""

    def release(self, attempt: Attempt) -> bool:
        """Give them back."""


class HeldPrompts:
    """All holds and reads of one engine. Used from its step loop only. `execute` passes requests to the engine's ranks,
    in order with all others of this engine about the same peers; `after_step` is the last step whose output was
    processed."""

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
        self._kept: dict[Attempt, _KeptPrompt] = {}
        self._blocks: Counter[int] = Counter()  # in how many holds each block is
        self._samples: dict[tuple[str, bytes], Attempt] = {}  # by `_parent_id` and digest: the hold of all its samples
        self._reads: dict[str, ReadHold] = {}  # by key, until their end
        self._known: set[str] = set()  # the peers that our ranks can read from
        if self._most_blocks and config.max_parked_fraction == 1:
            logger.warning("max_parked_fraction=1 with hold_s=%g: decode engines that are stopped while they read may "
                           "leave no block for this engine's own requests; use less than 1, or hold_s 0",
                           config.hold_s)

    def has_turn(self, extra_args: Any) -> bool:
        """Whether a client's request with these `extra_args` is one of those whose prompts are computed in their turn:
        it is to be kept for a decode engine, and not read from another engine."""
        return bool(self._most_blocks) and asks_for_hold(extra_args) and named_hold(extra_args) is None

    def keep(self, request_id: str, extra_args: Any, token_ids: list[int], scope: PromptScope, block_ids: list[int],
             set_aside: int) -> dict[str, Any] | None:
        """A client's request has ended whose prompt is computed in this scope, and still has these blocks. Keep those
        of the prompt, if its `extra_args` ask for that. `set_aside`: how many blocks this engine has set aside as a
        decode engine. Returns what the answer is to say, None where nothing is kept. The samples of a request with
        n > 1 have one hold together: its answer names that of the sample which ends last."""
        blocks = -(-len(token_ids) // self._block_size)
        if not self._most_blocks or not asks_for_hold(extra_args) or not LEAST_BLOCKS <= blocks <= len(block_ids):
            return None
        digest = token_digest(token_ids, scope)
        sample = _parent_id(request_id), digest
        hold = self._samples.get(sample)
        if hold is None:
            if self._is_full(block_ids[:blocks], set_aside):
                self._metrics.hold("full")
                return None
            hold = self._keep(sample, block_ids[:blocks])
        return None if hold is None else hold_params(hold)

    def handle(self, event: Event, progress: Progress) -> None:
        """Handle one of HELD_PROMPT_EVENTS."""
        if isinstance(event, ReadHold):
            self._read(event)
        elif isinstance(event, StopRead):
            self._execute([CancelTransfer(_key(event.attempt))])
        elif isinstance(event, HoldEnded):
            self._forget(event.hold)
            self._count(event.end.value)
            progress.finished_transfers.append(event.hold)
        elif isinstance(event, DropPeer):
            self._known.discard(event.name)
            if self._tells_ranks:
                self._execute([DropTransferPeer(event.name)])

    def ended(self, end: Finished) -> None:
        """A transfer has ended on all ranks, which may be one of our reads."""
        read = self._reads.pop(end.key, None)
        if read is None:
            return
        if end.ok:
            self._metrics.transfer_bytes(end.bytes)
            self._metrics.handover("transfer", end.seconds)
        else:
            self._known.discard(read.peer)  # its ranks may have dropped it
        self._protocol.decode.read_ended(read.attempt, "" if end.ok else end.error or "the read failed", end.may_land)

    @property
    def blocks(self) -> int:
        """How many blocks are held; one that several holds share counts once."""
        return len(self._blocks)

    def debug_state(self) -> dict[str, int]:
        """How many holds and reads there are, for tests and chaos. Both are 0 at rest."""
        return {"holds": len(self._kept), "hold_reads": len(self._reads)}

    def _is_full(self, block_ids: list[int], set_aside: int) -> bool:
        """Whether these blocks would be too many, or holds of blocks that are shared."""
        new = sum(block_id not in self._blocks for block_id in block_ids)
        return (self.blocks + set_aside + new > self._most_blocks
                or len(self._kept) >= self._most_blocks // LEAST_BLOCKS)

    def _keep(self, sample: tuple[str, bytes], block_ids: list[int]) -> Attempt | None:
        """Hold these blocks. None: not in this engine's state."""
        hold = self._protocol.decode.next_attempt(secrets.token_hex(16))
        self._references.hold(hold, block_ids)
        kept = False
        try:
            kept = self._protocol.prefill.hold(hold, sample[1], block_ids)
        finally:
            if not kept:  # nothing would ever release them
                self._references.release(hold)
        if not kept:
            return None
        self._kept[hold] = _KeptPrompt(block_ids, sample)
        self._blocks.update(block_ids)
        if sample[0]:
            self._samples[sample] = hold
        self._count("made")
        return hold

    def _forget(self, hold: Attempt) -> None:
        kept = self._kept.pop(hold, None)
        if kept is None:
            return
        self._samples.pop(kept.sample, None)
        for block_id in kept.block_ids:
            self._blocks[block_id] -= 1
            if not self._blocks[block_id]:
                del self._blocks[block_id]

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
        self._metrics.held_blocks.set(self.blocks)


def _parent_id(request_id: str) -> str:
    """The id of the request of which this one is a sample; "" where it is none. V1 names the samples of a request with
    n > 1 by their number, an underscore and its id. A client's own id may look so, too: it matters only where another
    request has the same id after another number, and the same prompt."""
    number, _, parent = request_id.partition("_")
    return parent if number.isdecimal() else ""


def _key(attempt: Attempt) -> str:
    return f"hold {attempt}"
