# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent with one UCX backend, over the library's bindings.

It uses the bindings and not the library's own Python class. That class sets the wait of the progress thread to zero, so
that the thread uses a whole core all the time. With a wait, the thread sleeps on UCX's file descriptors: it wakes at
once when something arrives, and an idle agent uses less than 0.1 % of a core.

A write ends with a flush that the receiver must answer. The notice leaves when the sender polls and finds the flush
answered. With a progress thread at the receiver the answer waits for no model step. But at the sender that thread
competes with the writing thread for one lock. With one core for each side and other work running, 184 MB took 54-110 ms
without the thread at the sender and 135-290 ms with it; at the receiver it made no difference to that. So a receiver
needs the thread, and an engine that only sends does not.
"""
from __future__ import annotations

import logging
import os
import weakref
from enum import Enum

import numpy as np

from vllm_pd.errors import TransferError
from vllm_pd.rpc.tcp import listening
from vllm_pd.transfer.layout import Memory
from vllm_pd.transfer.nixl.devices import CURE, find_down, only_devices_of

logger = logging.getLogger("vllm.pd")

PROGRESS_WAIT_S = 0.1
# How often the kernel repeats the packet with which UCX begins a connection: it waits 3 s in all. Nothing else goes
# through the agent meanwhile, so a peer whose ports a firewall drops costs that with each try (`protocol.peering`).
SYN_RETRIES = "1"


class TransferState(Enum):
    """State of a posted transfer."""
    DONE = "done"
    OPEN = "open"
    FAILED = "failed"


class NixlAgent:
    """A NIXL agent named `name`, which listens at `host`, an address (`vllm_pd.transfer.nixl.devices`): by TCP at
    `listens`. Every method raises TransferError for any error of the library. After `destroy` no other method may be
    called.

    Handles are integers. The caller owns them and must release them. Descriptor rows are uint64 [n, 5] = address,
    bytes, device, stride in bytes, count: row `i` stands for `count` descriptors of `bytes` bytes, `stride` apart.
    """

    def __init__(self, name: str, progress_thread: bool, host: str = "127.0.0.1") -> None:
        # The libraries read both when they load. Their logs only repeat errors that we get as states and exceptions.
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        # Whatever it was: by multi-node NVLink a GPU of another machine writes here by itself, so that the end of this
        # agent would end nothing (`protocol.generations`).
        os.environ["UCX_CUDA_IPC_ENABLE_MNNVL"] = "n"
        os.environ.setdefault("UCX_TCP_SYN_CNT", SYN_RETRIES)
        from nixl import _bindings as nixl
        self._nixl = nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = int(PROGRESS_WAIT_S * 1e6)
        self._agent = nixl.nixlAgent(name, config)
        self._destroyed: weakref.ref | None = None
        with only_devices_of(host) as devices:
            before = listening()
            try:
                self._backends = [self._agent.createBackend("UCX", {})]
            except Exception as error:  # see `_call`
                down = ", ".join(find_down())
                cure = f"{down} is down, switch it on" if down else f"install nixl again, {CURE}"
                raise TransferError(f"NIXL makes no UCX with {devices}: {error}: {cure}") from error
            self.listens = tuple(sorted(listening() - before))
        logger.info("KV over UCX: %s", devices)

    def destroy(self) -> bool:
        """Destroy the library's agent with its connections, whatever goes on through it. Returns whether it is gone. If
        not, something in this process still refers to it, and a later call may return True.

        The caller has deregistered the memory, and released the handles that it has. The library's destructor holds
        Python's lock: no Python runs in this process meanwhile (`vllm_pd.transfer.nixl.generations` says how long).
        """
        if self._destroyed is None:
            self._destroyed = weakref.ref(self._agent)
            self._agent = None
        return self._destroyed() is None

    def metadata(self) -> bytes:
        """What a peer's agent needs to reach this one, including the memory registered so far."""
        return self._agent.getLocalMD()

    def register(self, regions: list[tuple[int, int, int]], memory: Memory) -> object:
        """Register memory regions (address, bytes, device) for transfers. Returns the registration for `deregister`."""
        regions_ = self._nixl.nixlRegDList(self._memory(memory), [(*region, "") for region in regions])
        self._call(self._agent.registerMem, regions_, self._backends)
        return regions_

    def deregister(self, registered: object) -> None:
        """Undo `register`."""
        self._call(self._agent.deregisterMem, registered, self._backends)

    def add_peer(self, metadata: bytes) -> str:
        """Load the metadata of a peer's agent. Returns that agent's name."""
        return self._call(self._agent.loadRemoteMD, metadata).decode()

    def remove_peer(self, name: str) -> None:
        """Forget the peer's agent of that name."""
        self._call(self._agent.invalidateRemoteMD, name)

    def prepare(self, rows: np.ndarray, memory: Memory, peer: str | None = None) -> int:
        """Prepare a list of descriptors in our memory, or in that of `peer`. `rows` is uint64 [n, 5], see NixlAgent.
        Returns the handle of the list."""
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        return self._call(self._agent.prepXferDlist, owner, self._memory(memory), rows, self._backends)

    def release_prepared(self, prepared: int) -> None:
        """Release a descriptor list."""
        self._call(self._agent.releasedDlistH, prepared)

    def make_write(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray,
                   notice: bytes) -> int:
        """Create a write from our memory to the peer's; `post` starts it. Returns its handle.

        `local` and `remote` are handles of descriptor lists. The indices are int32 [n] into them: descriptor
        `local_indices[i]` is copied to `remote_indices[i]`. The peer gets `notice` after the data, unless it is empty.
        """
        return self._call(self._agent.makeXferReq, self._nixl.NIXL_WRITE, local, local_indices, remote,
                          remote_indices, notice, self._backends)

    def make_read(self, local: int, local_indices: np.ndarray, remote: int, remote_indices: np.ndarray) -> int:
        """Create a read from the peer's memory to ours; `post` starts it. Returns its handle. For the parameters see
        `make_write`. The peer gets no notice."""
        return self._call(self._agent.makeXferReq, self._nixl.NIXL_READ, local, local_indices, remote,
                          remote_indices, b"", self._backends)

    def make_unprepared(self, local: np.ndarray, memory: Memory, remote: np.ndarray, peer_memory: Memory, peer: str,
                        notice: bytes | None) -> int:
        """As `make_write`, or as `make_read` if `notice` is None, without prepared lists. `local` and `remote` are
        descriptors, uint64 [n, 3] = address, bytes, device; each is copied to or from that in the same place."""
        return self._call(self._agent.createXferReq,
                          self._nixl.NIXL_READ if notice is None else self._nixl.NIXL_WRITE,
                          self._call(self._nixl.nixlXferDList, self._memory(memory), local),
                          self._call(self._nixl.nixlXferDList, self._memory(peer_memory), remote),
                          peer, notice or b"", self._backends)

    def post(self, handle: int) -> TransferState:
        """Start a transfer. Returns its state."""
        return self._state(self._call(self._agent.postXferReq, handle))

    def check(self, handle: int) -> TransferState:
        """The state of a posted transfer. Also makes progress if there is no progress thread."""
        return self._state(self._call(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        """Release a transfer. If it is still open, this does not stop it: its bytes may land later."""
        self._call(self._agent.releaseXferReq, handle)

    def send_notice(self, peer: str, notice: bytes) -> None:
        """Send a notice without data."""
        self._call(self._agent.genNotif, peer, notice, self._backends)

    def take_notices(self) -> dict[str, list[bytes]]:
        """The notices that have arrived since the last call, by the name of the sender's agent."""
        return self._call(self._agent.getNotifs, {}, self._backends)

    def _call(self, function, *arguments):
        try:
            return function(*arguments)
        except Exception as error:  # the library's errors have no common base class, and it raises Python's too
            raise TransferError(f"NIXL: {type(error).__name__}: {error}") from error

    def _state(self, status: object) -> TransferState:
        if status == self._nixl.NIXL_SUCCESS:
            return TransferState.DONE
        return TransferState.OPEN if status == self._nixl.NIXL_IN_PROG else TransferState.FAILED

    def _memory(self, memory: Memory) -> object:
        return self._nixl.VRAM_SEG if memory is Memory.VRAM else self._nixl.DRAM_SEG
