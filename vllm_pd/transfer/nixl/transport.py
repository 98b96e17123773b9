# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport, over UCX: one-sided writes into the peer's registered cache, and reads from it.

Life of a peer: its metadata is checked against our cache and loaded into the agent. One descriptor list per side is
prepared, with one descriptor per block and lane; after that the peer's addresses are not used again. Life of a write:
the block pairs become indices into those lists, and NIXL merges neighbouring descriptors. The transfer is posted with
its notice, and its handle is released as soon as it has ended. NIXL sends the notice when all writes are flushed.

Between token-major caches with other heads there is a lane for each token. Lists for all blocks of them would take
gigabytes, so none are prepared, and a transfer goes in waves of about `WAVE_DESCRIPTORS`: the next one is posted when
the last byte of the one before has landed, and the last one carries the notice. A transfer that is given up ends with
its present wave.

Measured on two cores without RDMA (UCX over CMA; docs/benchmarks.md has the rates), with the consequences:

- Neighbouring blocks: 4 GB/s, with prepared lists as well as with fresh lists of merged runs, and a third of that
  unmerged. Scattered blocks of 12 KiB: 2.5 GB/s either way, but creating the transfer takes 0.2 ms from prepared lists
  and 0.4 ms otherwise. So lists are prepared once per peer, and a write only sorts its pairs so that NIXL can merge
  them.
- A run for each token: about 1 us each for 128 to 1,024 bytes, nearly all of it in UCX's put. Gathering the heads into
  staging memory first, and then writing whole blocks, took 0.2 to 0.7 of that. But it works in one direction only (the
  other one needs a scatter at the receiver, under the fence), and on a CUDA device it is a kernel beside the steps'.
- Without a progress thread at the receiver, which polls every 20 ms, a write ends 20 ms later and its notice arrives
  40 ms later. With the thread (see `agent`) a write mostly ends within the post, and the notice waits for one poll.
- Releasing the handle of a pending transfer returns at once and cancels nothing: the bytes still landed, and only the
  notice did not arrive. So `cancel` releases nothing and waits for the end like any other write.
- Writes to a stopped peer stay pending until it continues or its process ends. The end is an error within 3 ms.
- Over TCP a read is answered by UCX in the process that is read. If the reader's connection ends while it answers,
  because the reader was killed or has destroyed its agent, UCX 1.23 ends that process: "Fatal: unexpected error:
  Endpoint timeout" (`ucp_progress_get_reply` passes an error on that `ucp_request_try_send` takes for impossible). With
  64 MB in 2,048 pieces under way that was 11 of 96 times, and 9 to 11 of 16 where the process that was read had stood
  still. No setting of UCX that was tried changes it. Writes do not have this, nor have reads over CMA.
- Setting up a connection takes several rounds, 10 to 20 ms in all. A sender without a progress thread takes part only
  while it polls. In between, the receiver's thread uses a whole core, which that engine lacks: for 0.2 s if the sender
  polls every 0.2 s, as between model steps. So the first poll after a new peer goes on for `MEET_S`, and the receiver
  spends 0.02 s.
- A notice without data returns no handle. While the connection is being set up, one of a sender without a progress
  thread leaves in a later poll only, and nothing says when. So the worker goes on polling for a while after one.

What an error proves: nothing about the rest of the transfer. A transfer is many requests of UCX, one for each merged
descriptor and one to flush them. NIXL (1.5, `nixlUcxBackendReqH::status`) reports the error of the last request, or of
any other, while others are under way, and releasing the handle stops none of them. Nor does removing the peer prove it:
NIXL closes the connection without waiting, and what a kernel or a network card has taken may arrive after that. So such
an end says `may_land`. The peer is *parted* then: a further transfer is refused before anything is posted, so its end
is certain. It is so until it is dropped, which comes after its death, and in this generation only (`generations`).
"""
from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_pd.errors import PeerNotAdded, TransferError
from vllm_pd.transfer.layout import CacheDescription, Memory, regions
from vllm_pd.transfer.nixl.agent import NixlAgent, TransferState
from vllm_pd.transfer.nixl.identity import DIGEST_BYTES, Identity, Proofs
from vllm_pd.transfer.plan import (
    Lane,
    by_token,
    descriptor_indices,
    descriptor_rows,
    pair_blocks,
    plan,
    run_descriptors,
)
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.transport import PeerMetadata, TransportProgress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.pd")

# How long the first poll after a new peer goes on. For a peer that takes longer the worker keeps polling.
MEET_S = 0.03
_MISTAKEN = "another agent listens where {} did"
WAVE_DESCRIPTORS = 1 << 14  # of one wave, or as many as one block has


class _NixlPeer(NamedTuple):
    """A peer that was added."""
    metadata: bytes
    cache: CacheDescription
    identity: int
    lanes: list[Lane]
    lists: tuple[int, int] | None  # handles of the prepared descriptors of both caches, lane by lane; None without them
    runs: tuple[np.ndarray, np.ndarray] | None  # without lists: the lanes in both caches, for `run_descriptors`


class _PostedTransfer(NamedTuple):
    """A posted write or read whose handle has not been released."""
    handle: int
    peer: str
    bytes: int
    started_s: float
    waves: list[Callable[[], int]]  # each makes a further wave and returns its handle; the next one is last
    is_read: bool
    given_up: str = ""  # why it was given up; "" if it was not

    @property
    def goes_on(self) -> bool:
        """Whether another wave follows the present one."""
        return bool(self.waves) and not self.given_up


class NixlTransport:
    """Transport over NIXL. `name` must differ from the names of all other agents, past ones included: use the
    incarnation. `caches` are the cache tensors, which this object keeps alive; `description` describes them.

    A receiver needs `progress_thread`. Without it nothing moves outside of `write`, `read` and `poll`. With it the
    bytes move, but the notice of a write still leaves in one of these calls.
    """

    def __init__(self, name: str, caches: list[torch.Tensor], description: CacheDescription,
                 progress_thread: bool = True, host: str = "127.0.0.1") -> None:
        self._caches = caches
        self._cache = description
        self._agent: NixlAgent | None = NixlAgent(name, progress_thread, host)
        self._former: NixlAgent | None = None  # after `close`
        self.needs_polls = not progress_thread
        self._meeting = False  # whether a peer was added since the last poll
        self._unseen = False  # whether a notice was sent without data since the last poll
        self._registered = self._agent.register([(address, size, description.device_id)
                                                 for address, size in regions(caches)], description.memory)
        self._identity, self._proofs = Identity(name), Proofs()
        self._registered_proofs = self._agent.register(
            [(self._identity.address, DIGEST_BYTES, 0), (self._proofs.address, self._proofs.size_bytes, 0)],
            Memory.DRAM)
        self._metadata = PeerMetadata(name, self._agent.metadata(), description, self._agent.listens,
                                      self._identity.address).encode()
        self._peers: dict[str, _NixlPeer] = {}
        self._dropped: set[str] = set()  # peers to remove after their last transfer has ended
        self._parted: set[str] = set()  # peers with which a transfer has failed
        self._unproven: set[str] = set()  # those of them, dropped ones included, of whose transfers more may land
        self._local_lists: dict[bytes, int] = {}  # by their rows; peers with the same lanes share a list
        self._open: dict[str, _PostedTransfer] = {}
        self._finished: list[Finished] = []

    def metadata(self) -> bytes:
        """See Transport."""
        return self._metadata

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        """See Transport."""
        agent = self._live_agent()
        known = self._peers.get(name)
        if known is not None:
            if known.metadata != metadata:
                raise TransferError(f"peer {name} is known with other metadata; a new incarnation needs a new name")
            self._dropped.discard(name)
            return
        theirs = PeerMetadata.decode(name, metadata)
        lanes = plan(self._cache, theirs.cache, heads)
        loaded = agent.add_peer(theirs.agent)
        try:
            if loaded != name:
                raise TransferError(f"the agent of peer {name} has the name {loaded}")
            lists = runs = None
            if by_token(lanes, self._cache, theirs.cache):
                runs = (np.array([lane.ours for lane in lanes], dtype=np.uint64),
                        np.array([lane.theirs for lane in lanes], dtype=np.uint64))
            elif lanes:
                lists = self._prepare(agent, name, lanes, theirs.cache)
        except TransferError:
            if loaded not in self._peers:
                _quietly(agent.remove_peer, loaded)
            raise
        self._peers[name] = _NixlPeer(metadata, theirs.cache, theirs.identity, lanes, lists, runs)
        self._meeting = self.needs_polls

    def drop_peer(self, name: str) -> None:
        """See Transport."""
        if name not in self._peers:
            return
        self._dropped.add(name)
        if all(write.peer != name for write in self._open.values()):
            self._unproven.discard(name)  # its engine is dead: until then nobody drops a peer that is parted
        for key, write in self._open.items():
            if write.peer == name:
                self._give_up(key, "peer dropped")
        self._remove_dropped()

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int], notice: bytes,
              grant: str = "") -> None:
        """See Transport."""
        agent = self._live_agent()
        target, local, remote = self._pairs(key, peer, local_block_ids, remote_block_ids)
        if not (local and target.lanes):
            if notice:
                agent.send_notice(peer, notice)
                self._unseen = self.needs_polls
            self._finished.append(Finished(key=key, ok=True))
            return
        self._post(key, peer, local, remote, notice)

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        """See Transport."""
        self._live_agent()
        source, local, remote = self._pairs(key, peer, local_block_ids, remote_block_ids)
        if not (local and source.lanes):
            self._finished.append(Finished(key=key, ok=True))
            return
        self._post(key, peer, local, remote, None)

    def open_grant(self, name: str, block_ids: list[int]) -> None:
        """See Transport. Does nothing."""

    def close_grant(self, name: str) -> bool:
        """See Transport. Always False."""
        return False

    def cancel(self, key: str) -> None:
        """See Transport."""
        if key in self._open:
            self._give_up(key, "cancelled")

    def is_open(self, key: str) -> bool:
        """See Transport."""
        return key in self._open

    def poll(self) -> TransportProgress:
        """See Transport."""
        notices: list[Notice] = []
        if self._agent is not None:
            for key in list(self._open):
                self._settle(key, self._agent.check)
            self._remove_dropped()
            notices = self._take_notices(self._agent)
            until_s = time.monotonic() + MEET_S * self._meeting
            self._meeting = False
            while time.monotonic() < until_s:
                os.sched_yield()  # the receiver may need this core to take part
                notices += self._take_notices(self._agent)
        finished, self._finished = self._finished, []
        unseen, self._unseen = self._unseen, False
        return TransportProgress(finished=finished, notices=notices, unseen=unseen)

    def live_handles(self) -> int:
        """See Transport."""
        return len(self._open)

    def close(self, timeout_s: float = 1.0, reads_end: bool = False) -> bool:
        """Wait up to `timeout_s` for open transfers, then release everything. A second call changes nothing.
        `reads_end`: the memory and the process stay; then no read goes on without this transport.

        Returns False if a transfer was still open, or has failed and its peer was not dropped since: its bytes may land
        as long as this process lives.
        """
        if self._agent is None:
            return True
        agent, deadline_s = self._agent, time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline_s:
            for key in list(self._open):
                self._settle(key, agent.check)
            time.sleep(0.001)
        ended = not self._open and not self._unproven
        for key, transfer in list(self._open.items()):
            self._end(key, "its transfer agent was destroyed" if reads_end else "closed",
                      may_land=not (reads_end and transfer.is_read))
        for name in list(self._peers):
            self._remove(name)
        for prepared in self._local_lists.values():
            _quietly(agent.release_prepared, prepared)
        self._local_lists.clear()
        self._identity.clear()
        for registered in (self._registered, self._registered_proofs):
            _quietly(agent.deregister, registered)
        self._agent, self._former = None, agent
        agent.destroy()
        return ended

    @property
    def is_gone(self) -> bool:
        """Whether it is closed, and its agent is certain to be destroyed."""
        return self._former is not None and self._former.destroy()

    def _prepare(self, agent: NixlAgent, name: str, lanes: list[Lane], theirs: CacheDescription) -> tuple[int, int]:
        """Handles of the descriptor lists of both sides, with every block of every lane."""
        ours = descriptor_rows([lane.ours for lane in lanes], self._cache)
        shape = ours.tobytes()
        if shape not in self._local_lists:
            self._local_lists[shape] = agent.prepare(ours, self._cache.memory)
        rows = descriptor_rows([lane.theirs for lane in lanes], theirs)
        return self._local_lists[shape], agent.prepare(rows, theirs.memory, name)

    def _live_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransferError("the transport is closed")
        return self._agent

    def _pairs(self, key: str, peer: str, local_block_ids: list[int],
               remote_block_ids: list[int]) -> tuple[_NixlPeer, list[int], list[int]]:
        """The peer and the sorted block pairs of a new transfer. Raises TransferError if it is not possible,
        PeerNotAdded where the peer is to be added anew."""
        if key in self._open:
            raise TransferError(f"transfer {key} is already open")
        if peer not in self._peers or peer in self._dropped:
            raise TransferError(f"peer {peer} is not known")
        if peer in self._proofs.mistaken:
            raise PeerNotAdded(_MISTAKEN.format(peer))
        if peer in self._parted:
            raise TransferError(f"an earlier transfer with peer {peer} failed: none begins until one of the two "
                                "engines has new transfer agents, which both make by themselves")
        try:
            return self._peers[peer], *pair_blocks(local_block_ids, remote_block_ids, self._cache,
                                                   self._peers[peer].cache)
        except ValueError as error:
            raise TransferError(f"transfer {key}: {error}") from error

    def _post(self, key: str, peer: str, local: list[int], remote: list[int], notice: bytes | None) -> None:
        """Post the first wave of a transfer: where the peer is not proven yet, what proves it. `notice` is None for a
        read."""
        started_s = time.monotonic()
        target = self._peers[peer]
        blocks = len(local) if target.lists else max(1, WAVE_DESCRIPTORS // len(target.lanes))
        waves: list[Callable[[], int]] = []
        for start in reversed(range(0, len(local), blocks)):
            part = slice(start, start + blocks)
            sent = b"" if waves and notice is not None else notice  # the last wave comes first here
            waves.append(functools.partial(self._make, peer, local[part], remote[part], sent))
        if target.identity and not self._proofs.is_proven(peer):
            waves.append(functools.partial(self._make_proof, peer))
        nbytes = len(local) * sum(lane.bytes for lane in target.lanes)
        self._open[key] = _PostedTransfer(waves.pop()(), peer, nbytes, started_s, waves, notice is None)
        self._settle(key, self._live_agent().post)

    def _make(self, peer: str, local: list[int], remote: list[int], notice: bytes | None) -> int:
        """Make one wave. Returns its handle."""
        agent, target = self._live_agent(), self._peers[peer]
        if target.lists is not None:
            ours, theirs = target.lists
            lists = (ours, descriptor_indices(local, target.lanes, self._cache), theirs,
                     descriptor_indices(remote, target.lanes, target.cache))
            return agent.make_read(*lists) if notice is None else agent.make_write(*lists, notice)
        ours, theirs = target.runs
        return agent.make_unprepared(run_descriptors(local, ours, self._cache), self._cache.memory,
                                     run_descriptors(remote, theirs, target.cache), target.cache.memory, peer, notice)

    def _make_proof(self, peer: str) -> int:
        """Make the read of what proves the peer. Returns its handle."""
        try:
            local = self._proofs.slot(peer)
        except IndexError:
            raise PeerNotAdded("this rank has too many peers") from None
        ours, theirs = (np.array([(address, DIGEST_BYTES, 0)], dtype=np.uint64)
                        for address in (local, self._peers[peer].identity))
        return self._live_agent().make_unprepared(ours, Memory.DRAM, theirs, Memory.DRAM, peer, None)

    def _require_proof(self, peer: str) -> None:
        """Raises TransferError where the first wave has found another agent in the peer's place. Then no transfer with
        it begins until it is added anew."""
        if self._peers[peer].identity and not self._proofs.prove(peer):
            logger.warning("another agent listens where %s did: nothing is sent there", peer)
            raise TransferError(_MISTAKEN.format(peer))

    def _give_up(self, key: str, why: str) -> None:
        """Let the transfer end with `ok` false. This does not end it sooner."""
        if not self._open[key].given_up:
            self._open[key] = self._open[key]._replace(given_up=why)

    def _settle(self, key: str, step: Callable[[int], TransferState]) -> None:
        """Post or check an open transfer with `step`. If its wave is over, post the next one, or end it."""
        try:
            state = step(self._open[key].handle)
            if state is TransferState.DONE and self._open[key].goes_on:
                if not self._make_next(key):
                    return
                state = self._live_agent().post(self._open[key].handle)
        except TransferError as error:
            self._fail(key, str(error))
            return
        if state is TransferState.FAILED:
            self._fail(key, "the transfer failed")
        elif state is TransferState.DONE and not self._open[key].goes_on:
            self._end(key, "")

    def _make_next(self, key: str) -> bool:
        """Make the next wave of a transfer, whose present one is done. If that is not possible, end it, for nothing of
        it is under way. Returns whether it was made."""
        transfer = self._open[key]
        try:
            self._require_proof(transfer.peer)
            handle = transfer.waves[-1]()
        except TransferError as error:
            self._end(key, str(error))
            return False
        transfer.waves.pop()
        _quietly(self._live_agent().release, transfer.handle)
        self._open[key] = transfer._replace(handle=handle)
        return True

    def _fail(self, key: str, error: str) -> None:
        """It has ended in an error, and more of it may land."""
        peer = self._open[key].peer
        if peer not in self._parted:
            logger.warning("a transfer with peer %s failed (%s): none begins until one of the two engines has new "
                           "transfer agents, which both make by themselves within seconds", peer, error)
        self._parted.add(peer)
        self._unproven.add(peer)
        self._end(key, error, may_land=True)

    def _end(self, key: str, error: str, may_land: bool = False) -> None:
        write = self._open.pop(key)
        _quietly(self._live_agent().release, write.handle)
        error = write.given_up or error
        self._finished.append(
            Finished(key=key, ok=not error, bytes=0 if error else write.bytes,
                     seconds=time.monotonic() - write.started_s, error=error, may_land=may_land))

    def _take_notices(self, agent: NixlAgent) -> list[Notice]:
        try:
            arrived = agent.take_notices()
        except TransferError as error:
            logger.warning("can't read notices: %s", error)
            return []
        return [Notice(peer, payload) for peer, payloads in arrived.items() for payload in payloads]

    def _remove_dropped(self) -> None:
        busy = {write.peer for write in self._open.values()}
        for name in self._dropped - busy:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._dropped.discard(name)
        self._parted.discard(name)
        self._proofs.forget(name)
        lists = self._peers.pop(name).lists
        if lists is not None:
            _quietly(self._live_agent().release_prepared, lists[1])
        _quietly(self._live_agent().remove_peer, name)


def _quietly(release: Callable[[object], None], what: object) -> None:
    """Call `release(what)` and ignore a TransferError, because the peer may be dead."""
    try:
        release(what)
    except TransferError as error:
        logger.debug("can't release %s: %s", what, error)
