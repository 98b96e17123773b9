# SPDX-License-Identifier: Apache-2.0
"""The thread of an engine that tells others what the engine holds and how busy it is.

It takes changes from the sink and hands the events to vLLM's own publisher, one batch a turn, so that it knows the
number that each batch gets; it reads the load; and it serves the side socket. The engine's thread never waits for it.
Should a turn fail, the epoch changes: subscribers then start anew from a snapshot, which is made anew from the ledger.
"""
from __future__ import annotations

import collections
import logging
import threading
import time
import uuid
from collections.abc import Callable

import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.journal import EventJournal
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink
from vllm_pd.metrics import EventMetrics
from vllm_pd.rpc.sockets import Waker

logger = logging.getLogger("vllm.pd")

PAUSE_S = 0.1  # after a turn that failed


class EventAnnouncer:
    """One of an engine; it owns `side` and the thread. `publish` hands a batch to the publisher: it is called with
    every batch in its order and by nobody else. `read_load`, which may fail, and `is_at_rest` (see `BlockSink.take`)
    are called in the thread."""

    def __init__(self, sink: BlockSink, block_size: int, publish: Callable[[list[m.KVEvent]], None],
                 read_load: Callable[[], m.EngineLoad], is_at_rest: Callable[[], bool], side: SidePort,
                 waker: Waker, metrics: EventMetrics | None = None) -> None:
        self.epoch = uuid.uuid4().hex
        self.counters: collections.Counter[str] = collections.Counter()
        self.load = m.EngineLoad()
        self._sink = sink
        self._journal = EventJournal(block_size)
        self._publish = publish
        self._read_load = read_load
        self._is_at_rest = is_at_rest
        self._side = side
        self._waker = waker
        self._metrics = metrics
        self._next_seq = 0
        self._told: tuple[m.EngineLoad, int] | None = None
        self._next_look = 0.0
        self._next_pulse = 0.0
        self._stopping = False
        self._poller = zmq.Poller()
        self._poller.register(waker.fileno(), zmq.POLLIN)
        side.watch(self._poller)
        self._thread = threading.Thread(target=self._run, name="vllm-pd-events", daemon=True)

    @property
    def address(self) -> str:
        """Of the side socket."""
        return self._side.address

    def start(self) -> None:
        """Run until `close`."""
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, with what there was to tell told. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._waker.set()
            if self._thread.ident is not None:
                self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping:
            try:
                self._poller.poll(pause_s * 1000)
                self._waker.clear()
                pause_s = self._turn(time.monotonic())
            except Exception:
                logger.exception("the thread that announces KV events stumbled; subscribers will start anew")
                self.counters["stumbles"] += 1
                self.epoch = f"{m.life_of(self.epoch)}-{self.counters['stumbles']}"
                self._sink.lose()
                time.sleep(PAUSE_S)
        try:
            self._flush()
        except Exception:
            logger.exception("the last KV events of this engine could not be announced")
        self._side.close()
        self._waker.close()

    def _turn(self, now: float) -> float:
        """Seconds until the next one is due, if nobody wakes us."""
        self._flush()
        more = self._side.turn(now, self._journal, self.epoch, self._next_seq)
        if now >= self._next_look or self._side.has_new():
            self._next_look = now + m.REPORT_MIN_S
            self._look()
            if (self.load, self._next_seq) != self._told or now >= self._next_pulse or self._side.has_new():
                self._told = (self.load, self._next_seq)
                self._next_pulse = now + m.REPORT_S
                self._side.pulse(m.EngineReport(self.epoch, self._next_seq, self._journal.block_size, self.load))
                self._show()
        return 0.0 if more else max(0.0, self._next_look - time.monotonic())

    def _look(self) -> None:
        """Read the load while the engine's thread changes it. Where that fails the last one stands: the events have
        nothing to do with it."""
        try:
            self.load = self._read_load()
        except Exception:
            self.counters["load_failed"] += 1
            if self.counters["load_failed"] == 1:
                logger.exception("the load of this engine could not be read; this is said once and counted")

    def _flush(self) -> None:
        ops, everything = self._sink.take(self._is_at_rest)
        if everything is not None:
            self._journal.replace(everything)
        self._journal.apply(ops)
        events = self._journal.take()
        if events:
            self._publish(events)
            self._next_seq += 1

    def _show(self) -> None:
        counters = self.counters + self._side.counters
        counters.update(batches=self._next_seq, stored_blocks=self._journal.stored,
                        removed_blocks=self._journal.removed, dropped_changes=self._sink.dropped)
        if self._metrics is not None:
            self._metrics.show(self.load, counters, len(self._journal))
