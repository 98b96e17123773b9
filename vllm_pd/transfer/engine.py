# SPDX-License-Identifier: Apache-2.0
"""An engine's transfers as its step loop sees them: requests go in with a step, progress is taken between two steps.

In between a thread does the work (`vllm_pd.transfer.thread`). No end waits for the step loop: whom it concerns is told
at once, in the thread that saw it, and the step loop is woken to do its own part.
"""
from __future__ import annotations

import collections
from collections.abc import Callable

from vllm_pd.transfer.gather import GatheredTransfer
from vllm_pd.transfer.requests import Finished, TransferProgress, TransferRequest
from vllm_pd.transfer.thread import TransferThread, no_context
from vllm_pd.transfer.worker import TransferWorker


class EngineTransfer:
    """`own` are the transfers of rank 0, in this process, and `gathered` those of all ranks where there are several."""

    def __init__(self, own: TransferWorker, gathered: GatheredTransfer | None = None,
                 enter: Callable[[], None] = no_context) -> None:
        self.own = own
        self._gathered = gathered
        self._thread = TransferThread(gathered or own, self, enter)
        self._news: collections.deque[TransferProgress] = collections.deque()
        self._wake: Callable[[], None] = no_context
        self._tell: Callable[[Finished], None] = lambda end: None

    def start(self, wake: Callable[[], None], tell: Callable[[Finished], None]) -> None:
        """From now on requests are carried out. Both are called in any thread: `tell` with each end, then `wake` where
        there is something to take."""
        self._wake, self._tell = wake, tell
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Have these run, in order; called with a step."""
        self._thread.execute(requests)

    def look(self) -> None:
        """See now whether notices have come: nothing else looks for those while no transfer of ours is open."""
        self._thread.look()

    def take_progress(self) -> TransferProgress:
        """All that is new since the last call."""
        progress = TransferProgress([], [], [])
        while self._news:
            news = self._news.popleft()
            progress.finished.extend(news.finished)
            progress.notices.extend(news.notices)
            progress.refused.extend(news.refused)
        return progress

    def synchronize(self) -> None:
        """Wait for the device: what it was told to compute is in memory, for a peer to read."""
        self.own.synchronize()

    def hold(self, descriptor: int) -> None:
        """Let every process that can write to a peer's memory hold this open file for as long as it can."""
        if self._gathered is not None:
            self._gathered.hold(descriptor)

    def live_handles(self) -> int:
        """Transfers that have not ended, as far as this process knows."""
        return self._thread.live_handles()

    def close(self) -> bool:
        """Release everything. Whether no byte can land any more. Idempotent."""
        return self._thread.close()

    # For the thread.

    def deliver(self, progress: TransferProgress) -> bool:
        if progress.finished or progress.notices or progress.refused:
            for end in progress.finished:
                self._tell(end)
            self._news.append(progress)
            self._wake()
        return True

    def filenos(self) -> list[int]:
        return self._gathered.filenos() if self._gathered is not None else []

    def receive(self) -> bool:
        return True  # the poll that follows reads it

    def released(self, ended: bool) -> None:
        """Nobody waits for it but `close`."""
