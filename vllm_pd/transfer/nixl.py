# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport (UCX underneath): one-sided writes into the peer's registered cache, and reads from it.

Life of a peer: its metadata is checked against our cache, loaded into the agent, and one descriptor list per side is
prepared at block granularity; the peer's addresses are not looked at again. Life of a write: the block pairs become
indices into those lists, NIXL merges neighbouring descriptors, the transfer is posted with the notice on it, and its
handle is released as soon as it is done or has failed. NIXL sends the notice when all writes are flushed.

What was measured on two cores without RDMA (UCX over CMA), and what follows from it:

- Neighbouring blocks: 7-11 GB/s with prepared lists as with fresh lists of merged runs, and 3 GB/s if nothing merges
  them. Scattered blocks of 12 KiB: 2.8 GB/s either way, but 0.2 ms to make from prepared lists against 0.4 ms. So lists
  are prepared, once per peer, and a write only puts its pairs in the order in which NIXL can merge them.
- Without a progress thread at the receiver a write ends 20 ms later if that polls each 20 ms, and its notice 40 ms
  later; with one (see `agent`) it mostly ends within the post, and the notice waits for one poll.
- Releasing the handle of a pending transfer returns at once and takes nothing back: the bytes landed all the same, only
  the notice did not come. So `cancel` releases nothing; it waits for the end like any other write.
- A peer that stands still leaves writes pending until it goes on or its process ends; that is an error within 3 ms.
- A connection is made in several rounds. A sender without a progress thread does its part of one while it polls, and
  meanwhile the receiver's thread takes a whole core, away from that engine's own work: 0.2 s of it with a poll each
  0.2 s, as between model steps. The rounds themselves take 10 to 20 ms. So the first poll after a new peer goes on for
  `MEET_S`, and the receiver spends 0.02 s.
"""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from vllm_pd.errors import TransferError
from vllm_pd.transfer.agent import Agent, State
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.plan import Lane, descriptor_indices, descriptor_rows, pair_blocks, plan
from vllm_pd.transfer.requests import Finished, Notice
from vllm_pd.transfer.transport import PeerMetadata, Progress

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.pd")

# How long the first poll after a new peer goes on. The worker polls on for a peer that takes longer.
MEET_S = 0.03


class _Peer(NamedTuple):
    metadata: bytes
    cache: CacheDescription
    lanes: list[Lane]
    local_list: int | None  # prepared descriptors of our cache, lane by lane, block by block; None without lanes
    remote_list: int | None


class _Open(NamedTuple):
    """A posted write or read whose handle is not released."""
    handle: int
    peer: str
    bytes: int
    started_s: float
    given_up: str = ""  # why, if it was


class NixlTransport:
    """Transport over NIXL. `name` must be unique among all agents that ever meet: use the incarnation.

    `progress_thread` is for whoever receives. Without it nothing moves but in `write` and `poll`. With it the bytes
    move, but the notice of a write still leaves in one of the two.
    """

    def __init__(self, name: str, caches: list[torch.Tensor], description: CacheDescription,
                 progress_thread: bool = True) -> None:
        self._caches = caches
        self._cache = description
        self._agent: Agent | None = Agent(name, progress_thread)
        self._polls_alone = not progress_thread
        self._meeting = False  # whether a peer was added since the last poll
        self._registered = self._agent.register([(tensor.data_ptr(), tensor.numel() * tensor.element_size(),
                                                  description.device_id) for tensor in caches], description.memory)
        self._metadata = PeerMetadata(name, self._agent.metadata(), description).encode()
        self._peers: dict[str, _Peer] = {}
        self._dropped: set[str] = set()  # peers to be removed when their last write has ended
        self._local_lists: dict[bytes, int] = {}  # by their rows: shared by all peers with the same lanes
        self._open: dict[str, _Open] = {}
        self._finished: list[Finished] = []

    def metadata(self) -> bytes:
        return self._metadata

    def add_peer(self, name: str, metadata: bytes, heads: range | None = None) -> None:
        agent = self._live_agent()
        known = self._peers.get(name)
        if known is not None:
            if known.metadata != metadata:
                raise TransferError(f"peer {name} is known with other metadata; a new life needs a new name")
            self._dropped.discard(name)
            return
        theirs = PeerMetadata.decode(name, metadata)
        lanes = plan(self._cache, theirs.cache, heads)
        loaded = agent.add_peer(theirs.agent)
        try:
            if loaded != name:
                raise TransferError(f"the agent of peer {name} calls itself {loaded}")
            local_list, remote_list = self._prepare(agent, name, lanes, theirs.cache) if lanes else (None, None)
        except TransferError:
            if loaded not in self._peers:
                _quietly(agent.remove_peer, loaded)
            raise
        self._peers[name] = _Peer(metadata, theirs.cache, lanes, local_list, remote_list)
        self._meeting = self._polls_alone

    def drop_peer(self, name: str) -> None:
        if name not in self._peers:
            return
        self._dropped.add(name)
        for key, write in self._open.items():
            if write.peer == name:
                self._give_up(key, "peer dropped")
        self._remove_dropped()

    def write(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int],
              notice: bytes) -> None:
        agent = self._live_agent()
        target, local, remote = self._pairs(key, peer, local_block_ids, remote_block_ids)
        if not (local and target.lanes):
            if notice:
                agent.send_notice(peer, notice)
            self._finished.append(Finished(key=key, ok=True))
            return
        started_s = time.monotonic()
        self._post(key, peer, len(local), started_s,
                   agent.make_write(target.local_list, descriptor_indices(local, target.lanes, self._cache),
                                    target.remote_list, descriptor_indices(remote, target.lanes, target.cache), notice))

    def read(self, key: str, peer: str, local_block_ids: list[int], remote_block_ids: list[int]) -> None:
        agent = self._live_agent()
        source, local, remote = self._pairs(key, peer, local_block_ids, remote_block_ids)
        if not (local and source.lanes):
            self._finished.append(Finished(key=key, ok=True))
            return
        started_s = time.monotonic()
        self._post(key, peer, len(local), started_s,
                   agent.make_read(source.local_list, descriptor_indices(local, source.lanes, self._cache),
                                   source.remote_list, descriptor_indices(remote, source.lanes, source.cache)))

    def cancel(self, key: str) -> None:
        if key in self._open:
            self._give_up(key, "cancelled")

    def is_open(self, key: str) -> bool:
        return key in self._open

    def poll(self) -> Progress:
        notices: list[Notice] = []
        if self._agent is not None:
            for key in list(self._open):
                self._settle(key, self._agent.check)
            self._remove_dropped()
            notices = self._take_notices(self._agent)
            until_s = time.monotonic() + MEET_S * self._meeting
            self._meeting = False
            while time.monotonic() < until_s:
                os.sched_yield()  # the receiver may need this core for its part
                notices += self._take_notices(self._agent)
        finished, self._finished = self._finished, []
        return Progress(finished=finished, notices=notices)

    def live_handles(self) -> int:
        return len(self._open)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Wait up to `timeout_s` for open writes, then release everything. Once more: nothing happens.

        False where a write was still open then: it may land as long as this process lives.
        """
        if self._agent is None:
            return True
        agent, deadline_s = self._agent, time.monotonic() + timeout_s
        while self._open and time.monotonic() < deadline_s:
            for key in list(self._open):
                self._settle(key, agent.check)
            time.sleep(0.001)
        ended = not self._open
        for key in list(self._open):
            self._end(key, "closed")
        for name in list(self._peers):
            self._remove(name)
        for prepared in self._local_lists.values():
            _quietly(agent.release_prepared, prepared)
        self._local_lists.clear()
        _quietly(agent.deregister, self._registered)
        self._agent = None
        return ended

    def _prepare(self, agent: Agent, name: str, lanes: list[Lane], theirs: CacheDescription) -> tuple[int, int]:
        """Descriptor lists of both sides, every block of every lane."""
        ours = descriptor_rows([(lane.local, lane.bytes) for lane in lanes], self._cache)
        shape = ours.tobytes()
        if shape not in self._local_lists:
            self._local_lists[shape] = agent.prepare(ours, self._cache.memory)
        rows = descriptor_rows([(lane.remote, lane.bytes) for lane in lanes], theirs)
        return self._local_lists[shape], agent.prepare(rows, theirs.memory, name)

    def _live_agent(self) -> Agent:
        if self._agent is None:
            raise TransferError("the transport is closed")
        return self._agent

    def _pairs(self, key: str, peer: str, local_block_ids: list[int],
               remote_block_ids: list[int]) -> tuple[_Peer, list[int], list[int]]:
        """The peer and the block pairs of a new transfer. Raises TransferError for one that must not be made."""
        if key in self._open:
            raise TransferError(f"transfer {key} is under way already")
        if peer not in self._peers or peer in self._dropped:
            raise TransferError(f"peer {peer} is not known")
        try:
            return self._peers[peer], *pair_blocks(local_block_ids, remote_block_ids, self._cache,
                                                   self._peers[peer].cache)
        except ValueError as error:
            raise TransferError(f"transfer {key}: {error}") from error

    def _post(self, key: str, peer: str, blocks: int, started_s: float, handle: int) -> None:
        nbytes = blocks * sum(lane.bytes for lane in self._peers[peer].lanes)
        self._open[key] = _Open(handle, peer, nbytes, started_s)
        self._settle(key, self._live_agent().post)

    def _give_up(self, key: str, why: str) -> None:
        """From now on the write ends as not ok; when it ends is not ours to say."""
        if not self._open[key].given_up:
            self._open[key] = self._open[key]._replace(given_up=why)

    def _settle(self, key: str, step: Callable[[int], State]) -> None:
        """Post or check an open write, and end it if that was the last of it."""
        try:
            state = step(self._open[key].handle)
        except TransferError as error:
            self._end(key, str(error))
            return
        if state is not State.OPEN:
            self._end(key, "" if state is State.DONE else "the transfer failed")

    def _end(self, key: str, error: str) -> None:
        write = self._open.pop(key)
        _quietly(self._live_agent().release, write.handle)
        error = write.given_up or error
        self._finished.append(
            Finished(key=key, ok=not error, bytes=0 if error else write.bytes,
                     seconds=time.monotonic() - write.started_s, error=error))

    def _take_notices(self, agent: Agent) -> list[Notice]:
        try:
            arrived = agent.take_notices()
        except TransferError as error:
            logger.warning("Notices can't be read: %s", error)
            return []
        return [Notice(peer, payload) for peer, payloads in arrived.items() for payload in payloads]

    def _remove_dropped(self) -> None:
        busy = {write.peer for write in self._open.values()}
        for name in self._dropped - busy:
            self._remove(name)

    def _remove(self, name: str) -> None:
        self._dropped.discard(name)
        remote_list = self._peers.pop(name).remote_list
        if remote_list is not None:
            _quietly(self._live_agent().release_prepared, remote_list)
        _quietly(self._live_agent().remove_peer, name)


def _quietly(release: Callable[[object], None], what: object) -> None:
    """Release something whose owner may be dead: a failure changes nothing for us."""
    try:
        release(what)
    except TransferError as error:
        logger.debug("Release of %s failed: %s", what, error)
