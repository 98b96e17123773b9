# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport (UCX underneath): one-sided writes into the peer's registered cache.

Life of a peer: its metadata is checked against our cache, loaded into the agent, and one descriptor list per side is
prepared at block granularity; the peer's addresses are not looked at again. Life of a write: the block pairs become
indices into those lists, NIXL merges neighbouring descriptors, the transfer is posted with the notice on it, and its
handle is released as soon as it is DONE or ERR. NIXL sends the notice when all writes are flushed.

What was measured on two cores without RDMA (UCX over CMA), and what follows from it:

- A progress thread takes one whole core even when idle; without it an idle agent takes nothing, and a poll each
  millisecond 3 % of a core. So there is none: `write` and `poll` make the progress, and both sides must poll while the
  first write to a peer makes the connection. From then on a write over CMA is over when its post returns.
- Neighbouring blocks: 11 GB/s with prepared lists as with fresh lists of merged runs, and 3 GB/s if nothing merges
  them. Scattered blocks of 12 KiB: 2.8 GB/s either way, but 0.2 ms to make from prepared lists against 0.4 ms. So lists
  are prepared, once per peer, and a write only puts its pairs in the order in which NIXL can merge them.
- Releasing the handle of a pending transfer returns at once and takes nothing back: the bytes landed all the same, only
  the notice did not come. So `cancel` releases nothing; it waits for DONE or ERR like any other write.
- A peer that stands still leaves writes pending until it goes on or its process ends; that becomes ERR in 3 ms.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd.errors import TransferError
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.plan import Lane, descriptor_indices, descriptor_rows, pair_blocks, plan
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.transport import PeerMetadata, Progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LOCAL = "NIXL_INIT_AGENT"


class _Peer(NamedTuple):
    metadata: bytes
    cache: CacheDescription
    lanes: list[Lane]
    local_list: object  # prepared descriptors of our cache, lane by lane, block by block
    remote_list: object


class _Open(NamedTuple):
    """A posted write whose handle is not released."""
    handle: object
    peer: str
    bytes: int
    started_s: float
    cancelled: str  # why it was given up, or ""


class NixlTransport:
    """Transport over NIXL. `name` must be unique among all agents that ever meet: use the incarnation."""

    def __init__(self, name: str, caches: list[torch.Tensor], description: CacheDescription) -> None:
        # Both are read once, by the libraries' loaders. Errors reach us as states and exceptions; the log is noise.
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        from nixl._api import nixl_agent, nixl_agent_config, nixlBind
        self._errors = _error_types(nixlBind)
        self._name = name
        self._caches = caches
        self._cache = description
        self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._registered = self._agent.register_memory(
            [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), description.device_id, "")
             for tensor in caches], description.memory.value)
        self._metadata = PeerMetadata(name, self._agent.get_agent_metadata(), description).encode()
        self._peers: dict[str, _Peer] = {}
        self._dropped: set[str] = set()  # peers to be removed when their last write has ended
        self._local_lists: dict[bytes, object] = {}  # by their rows: shared by all peers with the same lanes
        self._open: dict[str, _Open] = {}
        self._finished: list[Finished] = []

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, name: str, metadata: bytes) -> None:
        known = self._peers.get(name)
        if known is not None:
            if known.metadata != metadata:
                raise TransferError(f"peer {name} is known with other metadata; a new life needs a new name")
            self._dropped.discard(name)
            return
        theirs = PeerMetadata.decode(name, metadata)
        lanes = plan(self._cache, theirs.cache)
        try:
            loaded = _text(self._agent.add_remote_agent(theirs.agent))
        except self._errors as error:
            raise TransferError(f"peer {name} can't be added: {error}") from error
        try:
            if loaded != name:
                raise TransferError(f"the agent of peer {name} calls itself {loaded}")
            self._peers[name] = self._prepare(name, metadata, theirs.cache, lanes)
        except TransferError:
            if loaded not in self._peers:
                self._quietly(lambda: self._agent.remove_remote_agent(loaded))
            raise

    def drop_peer(self, name: str) -> None:
        if name not in self._peers:
            return
        self._dropped.add(name)
        for key, write in self._open.items():
            if write.peer == name and not write.cancelled:
                self._open[key] = write._replace(cancelled="peer dropped")
        self._remove_dropped()

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes) -> None:
        if key in self._open:
            raise TransferError(f"write {key} is under way already")
        if peer not in self._peers or peer in self._dropped:
            raise TransferError(f"peer {peer} is not known")
        target = self._peers[peer]
        try:
            local, remote = pair_blocks(local_block_ids, remote_block_ids, self._cache, target.cache)
        except ValueError as error:
            raise TransferError(f"write {key}: {error}") from error
        started_s = time.monotonic()
        if not local:
            self._send_notice(key, peer, notice)
            return
        try:
            handle = self._agent.make_prepped_xfer("WRITE", target.local_list,
                                                   descriptor_indices(local, target.lanes, self._cache),
                                                   target.remote_list,
                                                   descriptor_indices(remote, target.lanes, target.cache), notice)
        except self._errors as error:
            raise TransferError(f"write {key} to {peer} can't be made: {error}") from error
        nbytes = len(local) * sum(lane.bytes for lane in target.lanes)
        self._open[key] = _Open(handle, peer, nbytes, started_s, "")
        self._settle(key, self._agent.transfer)

    def cancel(self, key: str) -> None:
        if key in self._open and not self._open[key].cancelled:
            self._open[key] = self._open[key]._replace(cancelled="cancelled")

    def poll(self) -> Progress:
        for key in list(self._open):
            self._settle(key, self._agent.check_xfer_state)
        self._remove_dropped()
        finished, self._finished = self._finished, []
        return Progress(finished=finished, notices=self._notices())

    def live_handles(self) -> int:
        return len(self._open)

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait up to `timeout_s` for open writes, then release everything.

        A write that is still open then may land afterwards: the peer learns of our end from the death of this process.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline_s:
            for name in list(self._peers):
                self.drop_peer(name)
            self.poll()
            time.sleep(0.001)
        for key in list(self._open):
            self._end(key, "closed")
        for name in list(self._peers):
            self._remove(name)
        for prepared in self._local_lists.values():
            self._quietly(prepared.release)
        self._local_lists.clear()
        if self._registered is not None:
            registered, self._registered = self._registered, None
            self._quietly(lambda: self._agent.deregister_memory(registered))

    def _settle(self, key: str, step: Callable[[object], str]) -> None:
        """Post or check an open write, and end it if that was the last of it."""
        try:
            state = step(self._open[key].handle)
        except self._errors as error:
            self._end(key, f"{type(error).__name__}: {error}")
            return
        if state == "DONE":
            self._end(key, "")
        elif state != "PROC":
            self._end(key, f"transfer state {state}")

    def _end(self, key: str, error: str) -> None:
        write = self._open.pop(key)
        self._quietly(write.handle.release)
        error = write.cancelled or error
        self._finished.append(
            Finished(key=key, ok=not error, bytes=0 if error else write.bytes,
                     seconds=time.monotonic() - write.started_s, error=error))

    def _send_notice(self, key: str, peer: str, notice: bytes) -> None:
        try:
            self._agent.send_notif(peer, notice)
        except self._errors as error:
            raise TransferError(f"notice of write {key} to {peer} can't be sent: {error}") from error
        self._finished.append(Finished(key=key, ok=True))

    def _notices(self) -> list[Notice]:
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as error:
            logger.warning("Notices can't be read: %s", error)
            return []
        return [Notice(peer, payload) for peer, payloads in arrived.items() for payload in payloads]

    def _prepare(self, name: str, metadata: bytes, theirs: CacheDescription, lanes: list[Lane]) -> _Peer:
        ours = descriptor_rows([(lane.local, lane.bytes) for lane in lanes], self._cache)
        shape = ours.tobytes()
        try:
            if shape not in self._local_lists:
                self._local_lists[shape] = self._agent.prep_xfer_dlist(_LOCAL, ours, self._cache.memory.value)
            remote_list = self._agent.prep_xfer_dlist(
                name, descriptor_rows([(lane.remote, lane.bytes) for lane in lanes], theirs), theirs.memory.value)
        except self._errors as error:
            raise TransferError(f"the cache of peer {name} can't be addressed: {error}") from error
        return _Peer(metadata, theirs, lanes, self._local_lists[shape], remote_list)

    def _remove_dropped(self) -> None:
        busy = {write.peer for write in self._open.values()}
        for name in self._dropped - busy:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._dropped.discard(name)
        self._quietly(self._peers.pop(name).remote_list.release)
        self._quietly(lambda: self._agent.remove_remote_agent(name))

    def _quietly(self, release: Callable[[], None]) -> None:
        """Release something whose owner may be dead: a failure changes nothing for us."""
        try:
            release()
        except self._errors as error:
            logger.debug("Release failed: %s: %s", type(error).__name__, error)


def _text(name: bytes | str) -> str:
    """An agent's name: annotated as str by the library, and given as bytes."""
    return name.decode() if isinstance(name, bytes) else name


def _error_types(bindings: ModuleType) -> tuple[type[Exception], ...]:
    """What the bindings raise: their errors share no base class, and pybind adds RuntimeError of its own."""
    own = [getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (*own, RuntimeError)
