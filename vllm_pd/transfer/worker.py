# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the transfer requests: runs them on a transport and gathers the progress.

Lives in the worker process and is used by one thread at a time (`vllm_pd.transfer.thread`). No peer and no transfer can
make it raise: what goes wrong with a write or a read becomes its `Finished`, what goes wrong with a peer a `Refusal`.
"""
from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from vllm_pd.errors import PDError
from vllm_pd.transfer.requests import (
    AddPeer,
    CancelWrite,
    DropPeer,
    Finished,
    Poll,
    Read,
    Refusal,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.transport import Transport

logger = logging.getLogger("vllm.pd")

SETTLE_S = 0.5
SETTLE_STEP_S = 0.02  # of it, between two polls


def _nothing() -> None:
    """The CPU has no queued work to wait for."""


class TransferWorker:
    """Runs transfer requests. `synchronize` waits for the device work that fills the blocks to be written; `rank` says
    which notice of a write is ours.

    A connection is made in several rounds, and a sender does its part only while it polls. Left in the middle of one,
    UCX's thread at the receiver takes a whole core until the sender polls again. So for `SETTLE_S` after a peer was
    added there is something to poll for; time in which nobody polled does not count.
    """

    def __init__(self, transport: Transport, synchronize: Callable[[], None] = _nothing, rank: int = 0,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._synchronize = synchronize
        self._rank = rank
        self._clock = clock
        self._unsettled_s = 0.0
        self._polled_at = -math.inf
        self._open: set[str] = set()
        self._finished: list[Finished] = []
        self._refused: list[Refusal] = []

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests in order. The device has computed what they send: see `synchronize`."""
        for request in requests:
            if isinstance(request, Write | Read):
                self._move(request)
            elif isinstance(request, CancelWrite):
                self._transport.cancel(request.key)
            elif isinstance(request, AddPeer):
                self._add_peer(request)
            elif isinstance(request, DropPeer):
                self._transport.drop_peer(request.name)
            elif not isinstance(request, Poll):
                raise TypeError(f"not a transfer request: {request!r}")

    def synchronize(self) -> None:
        """Wait for the device: what it was told to compute is in memory, for a peer to read."""
        self._synchronize()

    def take_progress(self) -> TransferProgress:
        """Poll the transport and hand out everything that is new since the last call."""
        progress = self._transport.poll()
        if self._unsettled_s > 0:
            now = self._clock()
            self._unsettled_s -= min(now - self._polled_at, SETTLE_STEP_S)
            self._polled_at = now
        finished, self._finished = self._finished + progress.finished, []
        refused, self._refused = self._refused, []
        self._open.difference_update(end.key for end in progress.finished)
        return TransferProgress(finished=finished, notices=progress.notices, refused=refused)

    @property
    def busy(self) -> bool:
        """Whether `take_progress` has or will have something to tell or to do, without another request."""
        return bool(self._open or self._finished or self._refused) or self.settling

    @property
    def moving(self) -> bool:
        """Whether a write or a read is open."""
        return bool(self._open)

    @property
    def settling(self) -> bool:
        """Whether a peer is so new that its connection may need a poll."""
        return self._unsettled_s > 0

    def live_handles(self) -> int:
        """Transfers that are not released yet."""
        return self._transport.live_handles()

    def close(self) -> bool:
        """Release everything. Whether no byte can land any more."""
        return self._transport.close()

    def _move(self, request: Write | Read) -> None:
        kind = type(request).__name__
        if request.key in self._open:
            # The first one under this key is still open and its end is what the engine waits for.
            logger.error("%s %s is already under way; the second request is ignored", kind, request.key)
            return
        blocks = request.local_block_ids, request.remote_block_ids
        try:
            if isinstance(request, Write):
                self._transport.write(request.key, request.peer, *blocks, request.notices[self._rank])
            else:
                self._transport.read(request.key, request.peer, *blocks)
        except PDError as error:
            logger.warning("%s %s with %s failed: %s", kind, request.key, request.peer, error)
            self._finished.append(Finished(key=request.key, ok=False, error=str(error)))
        except Exception as error:
            logger.exception("unexpected error in %s %s with %s", kind, request.key, request.peer)
            if self._transport.is_open(request.key):
                self._open.add(request.key)  # bytes may land: its end is the transport's to tell
            else:
                self._finished.append(Finished(key=request.key, ok=False, error=repr(error)))
        else:
            self._open.add(request.key)

    def _add_peer(self, request: AddPeer) -> None:
        try:
            self._transport.add_peer(request.name, request.metadata)
        except PDError as error:
            logger.warning("Peer %s is refused: %s", request.name, error)
            self._refused.append(Refusal(peer=request.name, reason=str(error)))
        else:
            self._unsettled_s, self._polled_at = SETTLE_S, self._clock()
