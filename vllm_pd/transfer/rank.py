# SPDX-License-Identifier: Apache-2.0
"""The transfers of a rank that is not in its engine's process.

Requests arrive with a step, in the worker's main thread. The engine can't ask there what became of them. So the rank's
transfer thread reports to the engine over a socket (`vllm_pd.transfer.gather` is at the other end).

When the engine's process is gone, this process ends at once, whatever its main thread waits for. A peer reuses the
blocks that we may write to only when all processes of the engine are gone.
"""
from __future__ import annotations

import collections
import logging
import os
import socket
from collections.abc import Callable

from vllm_pd.transfer.gather import FAREWELL, encode_progress
from vllm_pd.transfer.requests import TransferProgress, TransferRequest
from vllm_pd.transfer.thread import TransferThread, no_context
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

_FRAME_BYTES = 64


class RankThread:
    """The `transfer` of the worker of such a rank. `connection` goes to the engine. This object owns `transfer` and
    `connection`. For `enter` see TransferThread."""

    def __init__(self, transfer: TransferWorker, connection: socket.socket,
                 enter: Callable[[], None] = no_context) -> None:
        self._connection = connection
        self._unsent: collections.deque[bytes] = collections.deque()
        self._held: list[int] = []  # open files, kept as long as this process can write to a peer's memory
        self._thread = TransferThread(transfer, self, enter)
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Queue the requests that came with a step. They run in order."""
        self._thread.execute(requests)

    # For the thread: see ThreadOwner.

    def deliver(self, progress: TransferProgress) -> bool:
        """Send the progress to the engine. False if some of it could not be sent yet."""
        self._unsent.extend(encode_progress(progress.finished, progress.refused))
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:  # the engine does not read now; send the rest later
                return False
            self._unsent.popleft()
        return True

    def filenos(self) -> list[int]:
        """The connection to the engine."""
        return [self._connection.fileno()]

    def receive(self) -> bool:
        """Receive a message of the engine. Returns False after its farewell. Ends this process if the engine is gone.
        """
        try:
            frame, descriptors, _, _ = socket.recv_fds(self._connection, _FRAME_BYTES, 1)
        except BlockingIOError:
            return True
        except OSError:
            frame, descriptors = b"", []
        self._held += descriptors
        if not frame:
            logger.error("the engine of this worker is gone: the worker ends too")
            os._exit(1)
        return frame != FAREWELL

    def released(self, ended: bool) -> None:
        """Close the connection, and the held files if no more bytes can land."""
        while ended and self._held:  # if not ended, only the end of this process may close them
            os.close(self._held.pop())
        self._connection.close()
