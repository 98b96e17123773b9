# SPDX-License-Identifier: Apache-2.0
"""The transfers of a rank that is not in its engine's process.

Requests come with a step, in the worker's main thread; there is nobody to ask what became of them. So a thread of ours
looks while something is open, and tells the engine over a socket (`vllm_pd.transfer.gather` is its other end); while
nothing is open it sleeps. Transports take one thread at a time: a lock stands between the two.

When the engine's process is gone, this one ends at once, whatever its main thread waits for. A peer takes blocks that
we might write to as free when all processes of the engine are gone, and not before.
"""
from __future__ import annotations

import collections
import logging
import os
import select
import socket
import threading

from vllm_pd.transfer.gather import FAREWELL, words
from vllm_pd.transfer.requests import TransferRequest
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

LOOK_MIN_S = 0.001
LOOK_MAX_S = 0.02
LOOK_GROWTH = 1.2
STUMBLE_S = 1.0
_FRAME_BYTES = 64


class RankThread:
    """What the worker of such a rank has as its `transfer`. `connection` goes to the engine; both belong to this."""

    def __init__(self, transfer: TransferWorker, connection: socket.socket) -> None:
        self._transfer = transfer
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._held: list[int] = []  # open files, for as long as this process can write to a peer's memory
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._poll.register(connection, select.POLLIN)
        self._thread = threading.Thread(target=self._main, name="vllm-pd-rank", daemon=True)
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests that came with a step."""
        with self._lock:
            self._transfer.execute(requests)
        os.eventfd_write(self._bell, 1)

    def _main(self) -> None:
        pause_s: float | None = None
        while True:
            try:
                ready = {fd for fd, _ in self._poll.poll(None if pause_s is None else 1000 * pause_s)}
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                    pause_s = LOOK_MIN_S
                if self._connection.fileno() in ready and self._is_farewell():
                    break
                self._look()
                busy = self._transfer.busy or bool(self._unsent)
                pause_s = min(LOOK_GROWTH * (pause_s or LOOK_MIN_S), LOOK_MAX_S) if busy else None
            except Exception:  # whatever a peer did: what is open must still come to its end
                logger.exception("a rank's transfers stumbled")
                pause_s = STUMBLE_S
        with self._lock:
            ended = self._transfer.close()
        while ended and self._held:  # otherwise the end of the process closes them
            os.close(self._held.pop())
        self._connection.close()

    def _look(self) -> None:
        with self._lock:
            progress = self._transfer.take_progress()
        self._unsent.extend(words(progress.finished, progress.refused))
        while self._unsent:
            try:
                self._connection.send(self._unsent[0])
            except BlockingIOError:  # the engine stands still; it is told later
                return
            self._unsent.popleft()

    def _is_farewell(self) -> bool:
        """Take what the engine sent. Does not return where the engine is gone."""
        try:
            frame, descriptors, _, _ = socket.recv_fds(self._connection, _FRAME_BYTES, 1)
        except BlockingIOError:
            return False
        except OSError:
            frame, descriptors = b"", []
        self._held += descriptors
        if not frame:
            logger.error("the engine of this worker is gone: the worker ends as well")
            os._exit(1)
        return frame == FAREWELL
