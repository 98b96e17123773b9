# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent with one UCX back end, over the library's bindings.

The bindings and not the library's own Python class, because that class fixes the wait of the progress thread at zero,
and then the thread takes a whole core for ever. With a wait the thread sleeps on UCX's file descriptors: it is awake
at once when something comes, and an idle agent takes less than 0.1 % of a core.

A write ends with a flush, which the receiver must answer; its notice goes out when the sender looks and finds the flush
answered. With the thread at the receiver the answer waits for nobody's model step. But on the sender it fights with the
writing thread for one lock: with a core each and other work around, 184 MB took 54-110 ms without it and 135-290 ms
with it; on the receiver it made no difference to that. So a receiver wants it, and an engine that only sends does not.
"""
from __future__ import annotations

import os
from enum import Enum

import numpy as np

from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import Memory

PROGRESS_WAIT_S = 0.1


class State(Enum):
    """State of a posted transfer."""
    DONE = "done"
    OPEN = "open"
    FAILED = "failed"


class Agent:
    """A NIXL agent. Handles are numbers, owned by the caller. What goes wrong raises TransferError."""

    def __init__(self, name: str, progress_thread: bool) -> None:
        # Both are read once, when the libraries load. Errors reach us as states and exceptions; their log is noise.
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        from nixl import _bindings as nixl
        self._nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = int(PROGRESS_WAIT_S * 1e6)
        self._agent = nixl.nixlAgent(name, config)
        self._backends = [self._agent.createBackend("UCX", {})]

    def metadata(self) -> bytes:
        return self._agent.getLocalMD()

    def register(self, regions: list[tuple[int, int, int]], memory: Memory) -> object:
        """Register (address, bytes, device) regions. The result is for `deregister`."""
        regions_ = self._nixl.nixlRegDList(self._memory(memory), [(*region, "") for region in regions])
        self._call(self._agent.registerMem, regions_, self._backends)
        return regions_

    def deregister(self, registered: object) -> None:
        self._call(self._agent.deregisterMem, registered, self._backends)

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata. Returns the name that its agent has."""
        return self._call(self._agent.loadRemoteMD, metadata).decode()

    def remove_peer(self, name: str) -> None:
        self._call(self._agent.invalidateRemoteMD, name)

    def prepare(self, rows: np.ndarray, memory: Memory, peer: str | None = None) -> int:
        """Prepare strided rows of (address, bytes, device, stride, count), of our memory or of a peer's."""
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        return self._call(self._agent.prepXferDlist, owner, self._memory(memory), rows, self._backends)

    def release_prepared(self, prepared: int) -> None:
        self._call(self._agent.releasedDlistH, prepared)

    def make_write(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray,
                   notice: bytes) -> int:
        """A transfer from descriptors of one prepared list to those of another. Not posted yet."""
        return self._call(self._agent.makeXferReq, self._nixl.NIXL_WRITE, local, local_indices, remote,
                          remote_indices, notice, self._backends)

    def make_read(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray) -> int:
        """The same in the other direction, without a notice."""
        return self._call(self._agent.makeXferReq, self._nixl.NIXL_READ, local, local_indices, remote,
                          remote_indices, b"", self._backends)

    def post(self, handle: int) -> State:
        return self._state(self._call(self._agent.postXferReq, handle))

    def check(self, handle: int) -> State:
        return self._state(self._call(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        self._call(self._agent.releaseXferReq, handle)

    def send_notice(self, peer: str, notice: bytes) -> None:
        self._call(self._agent.genNotif, peer, notice, self._backends)

    def take_notices(self) -> dict[str, list[bytes]]:
        """Notices by the names of their senders."""
        return self._call(self._agent.getNotifs, {}, self._backends)

    def _call(self, function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:  # the library's own share no base class, and it raises Python's too
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error

    def _state(self, status: object) -> State:
        if status == self._nixl.NIXL_SUCCESS:
            return State.DONE
        return State.OPEN if status == self._nixl.NIXL_IN_PROG else State.FAILED

    def _memory(self, memory: Memory) -> object:
        return self._nixl.VRAM_SEG if memory is Memory.VRAM else self._nixl.DRAM_SEG
