# SPDX-License-Identifier: Apache-2.0
"""The transfers of an engine, as its step loop sees them. Requests go in; progress is taken between steps.

A thread does the work meanwhile (`vllm_pd.transfer.thread`). The end of a transfer does not wait for the step loop: the
thread that sees it reports it at once, and wakes the step loop to do its part.
"""
from __future__ import annotations

import collections
from collections.abc import Callable

from vllm_pd.transfer.ranks.gather import GatheredRenewals, GatheredTransfer, RankTransfers
from vllm_pd.transfer.requests import Finished, Look, TransferProgress, TransferRequest
from vllm_pd.transfer.thread import TransferThread, no_context
from vllm_pd.transfer.worker import TransferWorker


class EngineTransfer:
    """`own` are the transfers of rank 0, in this process. `gathered` are those of all ranks, if there are others.
    `enter` and `at_once`: see TransferThread. This object owns both transfers."""

    def __init__(self, own: TransferWorker | RankTransfers, gathered: GatheredTransfer | RankTransfers | None = None,
                 enter: Callable[[], None] = no_context, at_once: bool = False) -> None:
        self.own = own
        self._gathered = gathered
        self._thread = TransferThread(gathered or own, self, enter, at_once)
        self._untaken: collections.deque[TransferProgress] = collections.deque()
        self._renewals = GatheredRenewals(1) if gathered is None else None
        self._wake: Callable[[], None] = no_context
        self._report_end: Callable[[Finished], None] = lambda end: None

    def start(self, wake: Callable[[], None], report_end: Callable[[Finished], None]) -> None:
        """Begin to run requests. Both functions may be called in any thread: `report_end` with the end of each
        transfer, then `wake` if there is progress to take."""
        self._wake, self._report_end = wake, report_end
        self._thread.start()

    def execute(self, requests: list[TransferRequest]) -> None:
        """Queue requests. They run in order."""
        self._thread.execute(requests)

    def poll(self) -> None:
        """Check for notices now. Nothing else does that while no transfer of ours is open."""
        self._thread.poll()

    def take_progress(self) -> TransferProgress:
        """All progress since the last call."""
        progress = TransferProgress([], [], [], [])
        while self._untaken:
            part = self._untaken.popleft()
            progress.finished.extend(part.finished)
            progress.notices.extend(part.notices)
            progress.refused.extend(part.refused)
            progress.made.extend(part.made if self._renewals is None else self._renewals.add(0, part.made))
        return progress

    def synchronize(self) -> None:
        """Wait for the device, so that everything it was given to compute is in memory for a peer to read."""
        self.own.synchronize()

    def hold(self, descriptor: int) -> None:
        """Make every other process that can write to a peer's memory hold this open file for as long as it can."""
        if self._gathered is not None:
            self._gathered.hold(descriptor)

    def live_handles(self) -> int:
        """How many transfers have not ended, as far as this process knows."""
        return self._thread.live_handles()

    def close(self) -> bool:
        """Release everything. Returns whether it is certain that no more bytes will land. Idempotent."""
        return self._thread.close()

    # For the thread: see ThreadOwner.

    def deliver(self, progress: TransferProgress) -> bool:
        """Report the ends, keep the progress for the step loop, and wake it."""
        if progress.finished or progress.notices or progress.refused or progress.made:
            for end in progress.finished:
                self._report_end(end)
            self._untaken.append(progress)
            self._wake()
        return True

    def filenos(self) -> list[int]:
        """The sockets of the other ranks."""
        return self._gathered.filenos() if self._gathered is not None else []

    def receive(self) -> bool:
        """Go on: the poll that follows reads the input."""
        return True

    def released(self, ended: bool) -> None:
        """Do nothing: only `close` waits for the thread's end."""


class RemoteEngineTransfer(EngineTransfer):
    """The transfers of an engine whose ranks are all in other processes: V1's. It owns `ranks`.

    `execute`, `poll` and `watch` may be called in any thread and never block. A rank waits for its device by itself, by
    the `after_step` of a request.
    """

    def __init__(self, ranks: RankTransfers) -> None:
        super().__init__(ranks, ranks, at_once=True)

    def poll(self) -> None:
        """Have rank 0 look for notices, which come as progress. It does so by itself only while a transfer of ours is
        open."""
        self.execute([Look()])

    def watch(self, pause_s: float, lasts_s: float) -> None:
        """Have rank 0 look for notices as `Look` says."""
        self.execute([Look(pause_s, lasts_s)])
