# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine that publishes which KV blocks the engine holds, and its load.

It takes the changes from the sink and gives the events to vLLM's own publisher, one batch per turn, so that it knows
each batch's number. It reads the load and serves the side socket. The engine's thread never waits for it. After an
unexpected error in a turn the epoch changes: subscribers then start again from a snapshot, made from the sink's ledger.
"""
from __future__ import annotations

import collections
import logging
import threading
import time
import uuid
from collections.abc import Callable

from vllm_pd.events import messages as m
from vllm_pd.events.journal import EventJournal
from vllm_pd.events.metrics import EventMetrics
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink

logger = logging.getLogger("vllm.pd")

PAUSE_S = 0.1  # after a turn that failed


class EventAnnouncer:
    """One per engine; it owns `side` and the thread. `publish` gives a batch to vLLM's publisher and must have
    no other caller. `read_load`, which may raise, and `is_at_rest` (see `BlockSink.take`) are called in the thread."""

    def __init__(self, sink: BlockSink, block_size: int, publish: Callable[[list[m.KVEvent]], None],
                 read_load: Callable[[], m.EngineLoad], is_at_rest: Callable[[], bool], side: SidePort,
                 metrics: EventMetrics | None = None) -> None:
        self.epoch = uuid.uuid4().hex
        self.counters: collections.Counter[str] = collections.Counter()
        self.load = m.EngineLoad()
        self._sink = sink
        self._journal = EventJournal(block_size)
        self._publish = publish
        self._read_load = read_load
        self._is_at_rest = is_at_rest
        self._side = side
        self._metrics = metrics
        self._next_seq = 0
        self._reported: tuple[m.EngineLoad, int] | None = None  # the last report's load and next number
        self._next_reading = 0.0  # of the load
        self._next_report = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="vllm-pd-events", daemon=True)

    @property
    def address(self) -> str:
        """The address of the side socket."""
        return self._side.address

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Publish what is left and end the thread. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._side.waker.set()
            if self._thread.ident is not None:
                self._thread.join(timeout_s)

    def _run(self) -> None:
        """The thread: turns until `close`, then the last events. Closes the side socket. After an error in a turn there
        is a new epoch, with all blocks of the sink's ledger."""
        pause_s = 0.0
        while not self._stopping:
            try:
                self._side.wait(pause_s)
                pause_s = self._turn(time.monotonic())
            except Exception:
                logger.exception("unexpected error in the thread that publishes KV events; subscribers start again")
                self.counters["errors"] += 1
                self.epoch = f"{m.life_of(self.epoch)}-{self.counters['errors']}"
                self._sink.resync()
                time.sleep(PAUSE_S)
        try:
            self._flush()
        except Exception:
            logger.exception("the last KV events of this engine could not be published")
        self._side.close()

    def _turn(self, now: float) -> float:
        """Returns the time in seconds until the next turn is due."""
        self._flush()
        more = self._side.turn(now, self._journal, self.epoch, self._next_seq)
        if now >= self._next_reading or self._side.has_new_subscriber():
            self._next_reading = now + m.REPORT_MIN_S
            self._update_load()
            if (self.load, self._next_seq) != self._reported or now >= self._next_report \
                    or self._side.has_new_subscriber():
                self._reported = (self.load, self._next_seq)
                self._next_report = now + m.REPORT_S
                self._side.send_report(m.EngineReport(self.epoch, self._next_seq, self._journal.block_size, self.load))
                self._update_metrics()
        return 0.0 if more else max(0.0, self._next_reading - time.monotonic())

    def _update_load(self) -> None:
        """Read the load, which may fail because the engine's thread changes it meanwhile. Then the last one stays, and
        the events go on."""
        try:
            self.load = self._read_load()
        except Exception:
            self.counters["load_failed"] += 1
            if self.counters["load_failed"] == 1:
                logger.exception("the load of this engine could not be read; this is logged once and then counted")

    def _flush(self) -> None:
        changes, all_blocks = self._sink.take(self._is_at_rest)
        if all_blocks is not None:
            self._journal.replace(all_blocks)
        self._journal.apply(changes)
        events = self._journal.take()
        if events:
            self._publish(events)
            self._next_seq += 1

    def _update_metrics(self) -> None:
        counters = self.counters + self._side.counters
        counters.update(batches=self._next_seq, stored_blocks=self._journal.stored,
                        removed_blocks=self._journal.removed, dropped_changes=self._sink.dropped)
        if self._metrics is not None:
            self._metrics.show(self.load, counters, len(self._journal))
