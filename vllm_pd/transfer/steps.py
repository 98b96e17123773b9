# SPDX-License-Identifier: Apache-2.0
"""The order between the kernels of this device and the transfers that read or overwrite their blocks, in V1.

A write is posted by the CPU, so the kernels that fill its blocks must have finished by then. In V0 the step loop posts
it between two steps, after it has waited for the device. In V1 EngineCore requests it at any time, with steps in flight
(async scheduling). So each rank must know when step `n` is done (`Write.after_step`):

- EngineCore requests a write after it has processed the output of step `n`, which computed the last of the prompt. One
  rank, the first or that of the last pipeline stage, makes that output from sampled tokens, whose copy to the host it
  waits for. The copy waits for the stream that runs the model, so everything that was launched there for step `n`
  before the copy is in memory.
- The other ranks send no output. But each took part in the collective after the last attention layer of its stage, or
  sent its result to the next stage, and the tokens depend on that. It had stored its KV before, in the same stream.
- Neither holds for kernels that are launched after the tokens are sampled, such as those of a draft model, nor is it
  vLLM's promise. So it is checked: each rank records an event when step `n` has been launched (`ComputedSteps`), and a
  write waits for it (`StepOrderedTransfer`). As a rule the event is done before the request arrives. Events of later
  steps are not waited for: these do not touch the blocks (the scheduler's references keep them), but for the request's
  next token, after the end of what is sent.
- The blocks that D offers, or P reads a prefix into, are written by a peer outside of the device's order as well. Steps
  in flight do not use them: the scheduler frees a block only when the last step that used it has been processed
  (`defer_block_free`).
"""
from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from vllm_pd.transfer.device import Device, DeviceEvent
from vllm_pd.transfer.requests import Finished, Read, TransferProgress, TransferRequest, Write
from vllm_pd.transfer.worker import TransferWorker

logger = logging.getLogger("vllm.pd")

STEP_S = 10.0  # how long a transfer may wait for the step that computes what it sends


class ComputedSteps:
    """Which steps the device of this rank has finished. Steps are numbered from 1, in the order of their launch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._in_flight: collections.deque[tuple[int, DeviceEvent]] = collections.deque()
        self._done = 0
        self._failed = False

    def launched(self, step: int) -> None:
        """The kernels of this step have been launched. Called in the thread that launches them."""
        event = self._device.record()
        with self._lock:
            if self._failed:
                return
            self._in_flight.append((step, event))
            self._advance()

    def fail(self) -> None:
        """A step was not launched whole. Neither it nor a later one, which may compute from it, is ever done."""
        with self._lock:
            self._failed = True

    def reached(self, step: int) -> bool:
        """Whether that step is done. For step 0, which stands for an unknown one: waits for the device, then True; or
        False if any step has failed."""
        if step == 0:
            self._device.synchronize()
            return not self._failed
        with self._lock:
            self._advance()
            return self._done >= step

    def _advance(self) -> None:
        while self._in_flight and self._in_flight[0][1].query():
            self._done = self._in_flight.popleft()[0]


class StepOrderedTransfer:
    """Has the interface of `TransferWorker`. Runs requests in order on `transfer`, which it owns, but none before the
    step that it names is done. One that waits for longer than STEP_S fails, and the others go on."""

    def __init__(self, transfer: TransferWorker, steps: ComputedSteps,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._transfer = transfer
        self._steps = steps
        self._clock = clock
        self._waiting: collections.deque[tuple[TransferRequest, float]] = collections.deque()  # and its deadline
        self._failed: list[Finished] = []
        self._has_waited = False

    def execute(self, requests: list[TransferRequest]) -> None:
        """Run the requests as soon as they may."""
        self._waiting.extend((request, self._clock() + STEP_S) for request in requests)
        self._advance()

    def take_progress(self) -> TransferProgress:
        """Run what waited, poll the transport, and return all progress since the last call."""
        self._advance()
        progress = self._transfer.take_progress()
        failed, self._failed = self._failed, []
        return TransferProgress(failed + progress.finished, progress.notices, progress.refused, progress.made)

    def synchronize(self) -> None:
        """Do nothing: each request waits for its own step."""

    @property
    def moving(self) -> bool:
        """Whether a transfer is open or waits."""
        return bool(self._waiting) or self._transfer.moving

    @property
    def youngest_s(self) -> float:
        """How long the youngest open transfer has been open; 0 while one waits for its step."""
        return 0.0 if self._waiting else self._transfer.youngest_s

    @property
    def busy(self) -> bool:
        """Whether `take_progress` must be called again, even without another request."""
        return bool(self._waiting or self._failed) or self._transfer.busy

    def live_handles(self) -> int:
        """How many transfers have not been released."""
        return self._transfer.live_handles()

    def close(self) -> bool:
        """Release everything. What waits is never posted. Returns whether it is certain that no more bytes will land.
        """
        self._waiting.clear()
        return self._transfer.close()

    def _advance(self) -> None:
        """Run the requests that wait, in order, up to the first one whose step is not done. After STEP_S such a one is
        dropped and fails, and those after it go on."""
        while self._waiting:
            request, deadline_s = self._waiting[0]
            waits = isinstance(request, Write | Read) and not self._steps.reached(request.after_step)
            if waits:
                if not self._has_waited:
                    self._has_waited = True
                    logger.info("the device had not finished step %d when its output was processed: a transfer waits "
                                "for it", request.after_step)
                if self._clock() < deadline_s:
                    return
            self._waiting.popleft()
            if waits:
                self._failed.append(Finished(request.key, ok=False, error=f"step {request.after_step} is not done "
                                             f"within {STEP_S:g} s"))
            else:
                self._transfer.execute([request])
