# SPDX-License-Identifier: Apache-2.0
"""The two ends of a transfer: a `TransferEnd` in this process, and a `RemoteEnd` that is one in another process.

Both have a cache with a pattern and NIXL's transport over it. D has a progress thread, P has none, as in engines.
"""
from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from _gpu_check.caches import LAYOUTS, SHAPES, PatternCache, PatternShape
from _gpu_check.results import PartFailed
from _gpu_check.streams import BusyKernels, CudaSteps, HostSteps, StepQueue
from vllm_pd.transfer.nixl.transport import NixlTransport
from vllm_pd.transfer.requests import AddTransferPeer, DropTransferPeer, Finished, TransferRequest
from vllm_pd.transfer.steps import ComputedSteps, StepOrderedTransfer
from vllm_pd.transfer.worker import TransferWorker

WAIT_S = 30.0
POLL_S = 0.0001


class TransferEnd:
    """One end. `open` comes first, and again for another layout."""

    def __init__(self, device: str, receives: bool) -> None:
        torch.set_num_threads(1)
        self.device = device
        self._receives = receives
        self.steps: StepQueue = CudaSteps() if device == "cuda" else HostSteps()
        self.cache: PatternCache | None = None
        self.name = ""
        self._worker: TransferWorker | None = None
        self._kernels: BusyKernels | None = None
        self._launched = 0

    def open(self, layout: str, seed: int, shape: PatternShape | None = None) -> tuple[str, bytes]:
        """A new cache, of this device's SHAPES by default, and a transport. Returns the transport's name and
        metadata."""
        self.close_transport()
        chosen = next(one for one in LAYOUTS if one.name == layout)
        self.cache = PatternCache(chosen, shape or SHAPES[self.device], seed, self.device)
        self.steps.device.synchronize()  # the transfers know nothing of the kernels that made the pattern
        self.name = f"{'d' if self._receives else 'p'}-{uuid.uuid4().hex}"
        transport = NixlTransport(self.name, self.cache.views, self.cache.description, self._receives)
        self._worker = TransferWorker(transport)
        self._computed = ComputedSteps(self.steps.device)
        self._launched = 0
        self.ordered = StepOrderedTransfer(self._worker, self._computed)
        return self.name, transport.metadata()

    def connect(self, name: str, metadata: bytes) -> None:
        """Add the other end. Raises PartFailed if it is refused."""
        self.worker.execute([AddTransferPeer(name, metadata)])
        refused = self.worker.take_progress().refused
        if refused:
            raise PartFailed(f"{self.cache.layout.name}: the peer is refused: {refused[0].reason}")

    def disconnect(self, name: str) -> None:
        """Forget the other end."""
        self.worker.execute([DropTransferPeer(name)])

    @property
    def worker(self) -> TransferWorker:
        """Runs requests at once; `ordered` runs them after their step, as in V1."""
        return self._worker

    def compute(self, ids: Sequence[int], value: int) -> int:
        """Give the device a step that writes `value` into all of these blocks. Returns the step's number. Does not
        wait."""
        blocks, at = self.cache.blocks, self._at(ids)
        self.steps.launch(lambda: blocks.index_fill_(0, at, value))
        self._launched += 1
        self._computed.launched(self._launched)
        return self._launched

    def compute_and_process(self, ids: Sequence[int], value: int, processed: bool) -> None:
        """`compute`; with `processed` wait until the step's output is on the host."""
        self.compute(ids, value)
        wait = self.steps.output()
        if processed:
            wait()

    def transfer(self, request: TransferRequest, ordered: bool) -> Finished:
        """Run a write or a read and wait for its end: `ordered`, after the step that it names, or at once. Raises
        PartFailed."""
        runner = self.ordered if ordered else self.worker
        runner.execute([request])
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for end in runner.take_progress().finished:
                if not end.ok:
                    raise PartFailed(f"{self.cache.layout.name}: {request.key}: {end.error}")
                return end
            time.sleep(POLL_S)
        raise PartFailed(f"{self.cache.layout.name}: {request.key} has no end after {WAIT_S:g} s")

    def await_notice(self) -> bytes:
        """Wait for one notice and make what came with it visible, as before a step. Raises PartFailed."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            notices = self.worker.take_progress().notices
            if notices:
                self.steps.device.flush()
                return notices[0].payload
            time.sleep(POLL_S)
        raise PartFailed(f"{self.cache.layout.name}: no notice after {WAIT_S:g} s")

    def receive(self, ids: Sequence[int], theirs: Sequence[int], seed: int) -> list[int]:
        """Wait for the notice of a write of the blocks `theirs` of a cache with that seed into `ids`. Returns the
        blocks of the whole cache that are wrong then."""
        wanted = self.cache.pattern_of(seed)[self._at(theirs)]
        self.cache.expected[self._at(ids)] = wanted
        self.await_notice()
        return self.cache.wrong_blocks()

    def receive_value(self, ids: Sequence[int], value: int) -> bool:
        """Wait for a notice. Returns whether every element of these blocks is `value` then."""
        self.await_notice()
        return self.holds(ids, value)

    def holds(self, ids: Sequence[int], value: int) -> bool:
        """Whether every element of these blocks is `value`, to kernels that are launched now."""
        return bool((self.cache.blocks[self._at(ids)] == value).all())

    def start_kernels(self) -> None:
        """Kernels run beside the transfers from now on."""
        self._kernels = BusyKernels(self.cache.blocks[self.cache.busy_block])

    def stop_kernels(self) -> int:
        """How often they ran. Raises PartFailed if their own block is not what they have written."""
        turns, self._kernels = self._kernels.stop(), None
        self.steps.device.synchronize()
        found = self.cache.busy_turns()
        if found != turns:
            raise PartFailed(f"{self.cache.layout.name}: the block that kernels increased {turns} times was increased "
                             f"{'unevenly' if found is None else f'{found} times'}")
        return turns

    def close_transport(self) -> None:
        """Release the transport."""
        if self._kernels is not None:
            self._kernels.stop()
            self._kernels = None
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def close(self) -> None:
        """Release everything."""
        self.close_transport()
        self.steps.close()

    def _at(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, device=self.device)


def serve(pipe: Connection, device: str) -> None:
    """The other process: answers (method of TransferEnd, arguments) until the pipe closes."""
    end = TransferEnd(device, receives=True)
    with contextlib.suppress(EOFError), contextlib.closing(end):
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send((True, getattr(end, method)(*arguments)))
            except PartFailed as failed:
                pipe.send((False, str(failed)))
            except Exception:
                pipe.send((False, traceback.format_exc()))


class RemoteEnd:
    """A `TransferEnd` in another process, in which its methods are called by name."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the method there. `answer` gets what it returns."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Raises PartFailed for an error there, or without an answer in time."""
        try:
            if not self._pipe.poll(2 * WAIT_S):
                raise PartFailed(f"the other process does not answer within {2 * WAIT_S:g} s")
            ok, found = self._pipe.recv()
        except EOFError:
            raise PartFailed("the other process has ended") from None
        if not ok:
            raise PartFailed(f"the other process: {found}")
        return found

    def ask(self, method: str, *arguments: Any) -> Any:
        """Both."""
        self.tell(method, *arguments)
        return self.answer()


@contextlib.contextmanager
def two_ends(device: str) -> Iterator[tuple[TransferEnd, RemoteEnd]]:
    """P in this process and D in another. Both are closed afterwards."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, device), daemon=True)
    process.start()
    theirs.close()
    try:
        with contextlib.closing(TransferEnd(device, receives=False)) as sender:
            yield sender, RemoteEnd(ours)
    finally:
        ours.close()
        process.join(WAIT_S)
        process.kill()
