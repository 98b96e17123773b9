# SPDX-License-Identifier: Apache-2.0
"""The transfers of a rank that is not in its engine's process.

Requests come with a step, in the worker's main thread; there is nobody to ask what became of them. So the rank's
transfer thread tells the engine over a socket (`vllm_pd.transfer.gather` is its other end).

When the engine's process is gone, this one ends at once, whatever its main thread waits for. A peer takes blocks that
we might write to as free when all processes of the engine are gone, and not before.
"""
from __future__ import annotations

import collections
import logging
import os
import socket
from collections.abc import Callable

from vllm_pd.transfer.gather import FAREWELL, words
from vllm_pd.transfer.requests import TransferProgress, TransferRequest
from vllm_pd.transfer.thread import TransferThread, no_context
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

_FRAME_BYTES = 64


class RankThread:
    """What the worker of such a rank has as its `transfer`. `connection` goes to the engine; both belong to this."""

    def __init__(self, transfer: TransferWorker, connection: socket.socket,
                 enter: Callable[[], None] = no_context) -> None:
        self._connection = connection
        self._unsent: collections.deque[bytes] = collections.deque()
        self._held: list[int] = []  # open files, for as long as this process can write to a peer's memory
        self._thread = TransferThread(transfer, self, enter)
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Have the requests that came with a step run."""
        self._thread.execute(requests)

    # For the thread.

    def deliver(self, progress: TransferProgress) -> bool:
        self._unsent.extend(words(progress.finished, progress.refused))
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:  # the engine stands still; it is told later
                return False
            self._unsent.popleft()
        return True

    def filenos(self) -> list[int]:
        return [self._connection.fileno()]

    def receive(self) -> bool:
        """Take what the engine sent. Does not return where the engine is gone."""
        try:
            frame, descriptors, _, _ = socket.recv_fds(self._connection, _FRAME_BYTES, 1)
        except BlockingIOError:
            return True
        except OSError:
            frame, descriptors = b"", []
        self._held += descriptors
        if not frame:
            logger.error("the engine of this worker is gone: the worker ends as well")
            os._exit(1)
        return frame != FAREWELL

    def released(self, ended: bool) -> None:
        while ended and self._held:  # otherwise the end of the process closes them
            os.close(self._held.pop())
        self._connection.close()
