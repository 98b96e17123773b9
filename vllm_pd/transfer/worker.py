# SPDX-License-Identifier: Apache-2.0
"""Runs the transfer requests of one worker on its transport, and collects the progress.

One thread at a time uses it (`vllm_pd.transfer.thread`), in the worker's process. No peer and no transfer can make it
raise: an error of a write or a read becomes its `Finished`, an error of a peer a `PeerRefusal`.
"""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from vllm_pd.errors import PDError, PeerNotAdded
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    CloseGrant,
    DestroyOlder,
    DropTransferPeer,
    Finished,
    GenerationMade,
    MakeGeneration,
    OpenGrant,
    PeerRefusal,
    Read,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.transport import Transport

logger = logging.getLogger("vllm.pd")

SETTLE_S = 0.5  # for how long to poll after a peer was added, or a notice was sent without data
SETTLE_STEP_S = 0.02  # how much of that one poll uses up at most


def _nothing() -> None:
    """The default `synchronize`: the CPU queues no work."""


class TransferWorker:
    """Runs transfer requests on `transport`. `synchronize` waits for the device work that fills the blocks to be
    written. `rank` is this worker's number in its engine, which selects the notice of a write.

    Setting up a connection takes several rounds, and a sender takes part only while it polls. If it stops in between,
    UCX's thread at the receiver uses a whole core until the sender polls again. So this worker is `busy` for SETTLE_S
    after a peer was added, or a notice was sent whose end nobody sees. Time without polls does not count.
    """

    def __init__(self, transport: Transport, synchronize: Callable[[], None] = _nothing, rank: int = 0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.transport = transport
        self._synchronize = synchronize
        self._rank = rank
        self._clock = clock
        self._unsettled_s = 0.0
        self._polled_at = -math.inf
        self._open: dict[str, float] = {}  # when it was opened; the youngest is the last one
        self._finished: list[Finished] = []
        self._refused: list[PeerRefusal] = []
        self._made: list[GenerationMade] = []

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests in order. The device must have computed the blocks that they send: see `synchronize`."""
        for request in requests:
            if isinstance(request, Write | Read):
                self._move(request)
            elif isinstance(request, CancelTransfer):
                self.transport.cancel(request.key)
            elif isinstance(request, OpenGrant):
                self.transport.open_grant(request.key, request.block_ids)
            elif isinstance(request, CloseGrant):
                self._finished.append(Finished(request.key, self.transport.close_grant(request.key)))
            elif isinstance(request, AddTransferPeer):
                self._add_peer(request)
            elif isinstance(request, DropTransferPeer):
                self.transport.drop_peer(request.name)
            elif isinstance(request, MakeGeneration):
                self._made.append(self._renew(request.name))
            elif isinstance(request, DestroyOlder):
                self._retire(request.key)
            else:
                raise TypeError(f"not a transfer request: {request!r}")

    def synchronize(self) -> None:
        """Wait for the device, so that everything it was given to compute is in memory for a peer to read."""
        self._synchronize()

    def take_progress(self) -> TransferProgress:
        """Poll the transport. Returns all progress since the last call."""
        progress = self.transport.poll()
        if self._unsettled_s > 0:
            now = self._clock()
            self._unsettled_s -= min(now - self._polled_at, SETTLE_STEP_S)
            self._polled_at = now
        if progress.unseen:
            self._settle()
        finished, self._finished = self._finished + progress.finished, []
        refused, self._refused = self._refused, []
        made, self._made = self._made, []
        for end in progress.finished:
            self._open.pop(end.key, None)
        return TransferProgress(finished, progress.notices, refused, made)

    @property
    def busy(self) -> bool:
        """Whether `take_progress` must be called again, even without another request."""
        return bool(self._open or self._finished or self._refused or self._made) or self.settling

    @property
    def moving(self) -> bool:
        """Whether a write or a read is open, or older transports are being destroyed."""
        return bool(self._open)

    @property
    def youngest_s(self) -> float:
        """How long the youngest open transfer has been open; 0 without one, or if they move only while polled."""
        if not self._open or self.transport.needs_polls:
            return 0.0
        return self._clock() - next(reversed(self._open.values()))

    @property
    def settling(self) -> bool:
        """Whether the connection to a new peer, or a notice that was sent without data, may still need polls."""
        return self._unsettled_s > 0

    def live_handles(self) -> int:
        """How many transfers have not been released."""
        return self.transport.live_handles()

    def close(self) -> bool:
        """Release everything. Returns whether it is certain that no more bytes will land."""
        return self.transport.close()

    def _move(self, request: Write | Read) -> None:
        """Post a transfer. One that can't be posted ends at once with its error, unless an unexpected error has left it
        open in the transport: then bytes may land, and only the transport knows its end."""
        kind = type(request).__name__
        if request.key in self._open:
            # The engine waits for the end of the first transfer under this key.
            logger.error("%s %s is already open: the second request is ignored", kind, request.key)
            return
        blocks = request.local_block_ids, request.remote_block_ids
        try:
            if isinstance(request, Write):
                self.transport.write(request.key, request.peer, *blocks, request.notices[self._rank],
                                     request.grant)
            else:
                self.transport.read(request.key, request.peer, *blocks)
        except PDError as error:
            logger.warning("%s %s with %s failed: %s", kind, request.key, request.peer, error)
            if isinstance(error, PeerNotAdded):
                self._refused.append(PeerRefusal(request.peer, str(error)))
            self._finished.append(Finished(key=request.key, ok=False, error=str(error)))
        except Exception as error:
            logger.exception("unexpected error in %s %s with %s", kind, request.key, request.peer)
            if self.transport.is_open(request.key):
                self._open[request.key] = self._clock()  # bytes may land, so only the transport knows its end
            else:
                self._finished.append(Finished(key=request.key, ok=False, error=repr(error)))
        else:
            self._open[request.key] = self._clock()

    def _add_peer(self, request: AddTransferPeer) -> None:
        try:
            self.transport.add_peer(request.name, request.metadata)
        except PDError as error:
            logger.warning("peer %s is refused: %s", request.name, error)
            self._refused.append(PeerRefusal(peer=request.name, reason=str(error)))
        except Exception as error:  # the requests that follow in the same step are others'
            logger.exception("unexpected error while peer %s was added", request.name)
            self._refused.append(PeerRefusal(peer=request.name, reason=repr(error)))
        else:
            self._settle()

    def _renew(self, name: str) -> GenerationMade:
        try:
            metadata = self.transport.renew(name)
        except PDError as error:  # the engine says it, and tries again
            return GenerationMade(name, error=str(error))
        except Exception as error:  # it needs an answer for that
            logger.exception("no new generation %s can be made", name)
            return GenerationMade(name, error=str(error) or repr(error))
        self._settle()
        return GenerationMade(name, metadata)

    def _retire(self, key: str) -> None:
        try:
            self.transport.retire(key)
        except Exception as error:  # the engine tries again, and needs an end for that
            logger.exception("older generations can't be destroyed")
            self._finished.append(Finished(key, ok=False, error=str(error) or repr(error)))
        else:
            self._open[key] = self._clock()

    def _settle(self) -> None:
        self._unsettled_s, self._polled_at = SETTLE_S, self._clock()
