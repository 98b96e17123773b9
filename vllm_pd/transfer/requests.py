# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of its workers' transports, and what comes back.

Requests ride down to every worker inside a step's execute-model request; its transfer thread runs them, in order. What
became of them is asked of rank 0's (`EngineTransfer`), which hears of all. A `Write` is answered
by exactly one `Finished` with its key, whatever happens. The worker owns nothing of what a request names: the engine
keeps the local blocks untouched and allocated until `Finished`, the peer keeps the remote ones until the notice or our
word that no more bytes will land.
"""
from __future__ import annotations

import msgspec


class AddPeer(msgspec.Struct, frozen=True, tag=True):
    """Make a peer known. `name` is the transport name of the peer, `metadata` what its transport gave."""
    name: str
    metadata: bytes


class DropPeer(msgspec.Struct, frozen=True, tag=True):
    """Forget a peer. Its open writes end as not ok; an unknown name is no error."""
    name: str


class Write(msgspec.Struct, frozen=True, tag=True):
    """Copy our blocks to the peer's, pairwise, then deliver a notice there: of `notices`, that of the rank."""
    key: str
    peer: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    notices: list[bytes]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy the peer's blocks to ours, pairwise. The peer is told nothing and has nothing to do."""
    key: str
    peer: str
    local_block_ids: list[int]
    remote_block_ids: list[int]


class CancelWrite(msgspec.Struct, frozen=True, tag=True):
    """Give a write or a read up. It still ends with one `Finished`, and only once no byte of it can land any more."""
    key: str


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Nothing but progress, for a step without other work."""


class Flush(msgspec.Struct, frozen=True, tag=True):
    """The step reads blocks that a peer has written, or that were read from one: make the device see them."""


TransferRequest = AddPeer | DropPeer | Write | Read | CancelWrite | Poll | Flush


class Finished(msgspec.Struct, frozen=True):
    """The one end of a write or a read. When it is reported no byte of it can land any more."""
    key: str
    ok: bool
    bytes: int = 0  # data moved, without the notice
    seconds: float = 0.0  # from the post to the moment the end was seen
    error: str = ""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A notice that arrived, with the transport name of its sender. The data it speaks of has landed."""
    peer: str
    payload: bytes


class Refusal(msgspec.Struct, frozen=True):
    """A peer that could not be added, and why."""
    peer: str
    reason: str


class TransferProgress(msgspec.Struct):
    """What happened at one worker since it was last asked."""
    finished: list[Finished] = []
    notices: list[Notice] = []
    refused: list[Refusal] = []
