# SPDX-License-Identifier: Apache-2.0
"""What an engine requests of its workers' transports, and the answers.

Requests travel to every rank, with a step (V0) or by themselves (V1), and its transfer thread runs them in order. The
engine takes the answers of all ranks from its `EngineTransfer`. Every `Write` and `Read` gets exactly one
`Finished` with its key, whatever happens. The worker owns nothing that a request names. The engine keeps the local
blocks allocated and unchanged until `Finished`. The peer keeps its blocks until the notice arrives, or until the engine
has reported to it that no more bytes will land. What is kept after a `Finished` that `may_land`: see there.
"""
from __future__ import annotations

import msgspec


class AddTransferPeer(msgspec.Struct, frozen=True, tag=True):
    """Add a peer. `name` is its transport name, `metadata` what its transport's `metadata()` returned."""
    name: str
    metadata: bytes


class DropTransferPeer(msgspec.Struct, frozen=True, tag=True):
    """Remove a peer. Its open writes and reads end with `ok` false. An unknown name is no error."""
    name: str


class Write(msgspec.Struct, frozen=True, tag=True):
    """Copy our blocks to the peer's, pairwise. Then deliver a notice there: rank `i` sends `notices[i]`, unless that is
    empty.

    `after_step`: only for requests that do not travel with a step. The number of the last step that used the local
    blocks; its output has been processed. 0: not known, so the rank waits for all that its device was given to compute.
    `grant`: under which a two-sided peer takes it (`OpenGrant.key` there).
    """
    key: str
    peer: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    notices: list[bytes]
    after_step: int = 0
    grant: str = ""


class Read(msgspec.Struct, frozen=True, tag=True):
    """Copy the peer's blocks to ours, pairwise. The peer gets no notice and has nothing to do. For `after_step` see
    `Write`."""
    key: str
    peer: str
    local_block_ids: list[int]
    remote_block_ids: list[int]
    after_step: int = 0


class CancelTransfer(msgspec.Struct, frozen=True, tag=True):
    """Cancel a write or a read. It still ends with one `Finished`."""
    key: str


class OpenGrant(msgspec.Struct, frozen=True, tag=True):
    """Let peers write these blocks of ours, with a two-sided transport. Has no `Finished`."""
    key: str
    block_ids: list[int]


class CloseGrant(msgspec.Struct, frozen=True, tag=True):
    """Take no more bytes under this grant. Its `Finished` has `ok` true if no more bytes land in the blocks."""
    key: str


class Flush(msgspec.Struct, frozen=True, tag=True):
    """The step reads blocks that a transfer has filled: make their data visible to the device."""


class Look(msgspec.Struct, frozen=True, tag=True):
    """Look for notices: now, and for `lasts_s` from now with pauses of at most `pause_s`. A later one that lasts
    replaces the former. Only for an engine whose ranks are all in other processes."""
    pause_s: float = 0.0
    lasts_s: float = 0.0


class MakeGeneration(msgspec.Struct, frozen=True, tag=True):
    """Make another transport over the same memory, under this name of the engine, and use it for all that is posted
    from now on. Answered by a `GenerationMade`."""
    name: str


class DestroyOlder(msgspec.Struct, frozen=True, tag=True):
    """Destroy all transports but the newest. What is open in them ends first: a write with `may_land`, a read without.
    The `Finished` of this key comes once nothing of them lands here, or is read here."""
    key: str


TransferRequest = (AddTransferPeer | DropTransferPeer | Write | Read | CancelTransfer | OpenGrant | CloseGrant | Flush
                   | Look | MakeGeneration | DestroyOlder)


class Finished(msgspec.Struct, frozen=True):
    """The only end of a write or a read. No byte of it lands after this was reported, but see `Transport` for a
    two-sided one. Also the answer to a `CloseGrant` and a `DestroyOlder`.

    `may_land`: the exception. It failed, and nothing proves that all of it has stopped. Bytes of it may land later, in
    the peer's blocks or, of a read, in ours, until one of the two engines has ended, or the transport of the one whose
    blocks they are (`DestroyOlder`).
    """
    key: str
    ok: bool
    bytes: int = 0  # data moved, without the notice
    seconds: float = 0.0  # from the post until the end was seen
    error: str = ""
    may_land: bool = False


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A notice that has arrived. Its data has landed. `peer` is the sender's transport name."""
    peer: str
    payload: bytes


class PeerRefusal(msgspec.Struct, frozen=True):
    """A peer that could not be added, and why."""
    peer: str
    reason: str


class GenerationMade(msgspec.Struct, frozen=True):
    """The answer to a `MakeGeneration`: how peers reach the new transport, or why there is none. Of a rank its own
    metadata; of an engine those of all its ranks (`RanksMetadata`)."""
    name: str
    metadata: bytes = b""
    error: str = ""


class TransferProgress(msgspec.Struct):
    """What has happened at one worker, or at all workers of an engine, since the last call."""
    finished: list[Finished] = []
    notices: list[Notice] = []
    refused: list[PeerRefusal] = []
    made: list[GenerationMade] = []
