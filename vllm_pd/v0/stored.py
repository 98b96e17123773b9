# SPDX-License-Identifier: Apache-2.0
"""The KV store of a V0 engine: what it has becomes a prefix hit, and what the engine computes is put into it.

A load is to the patched scheduler what the read of a peer's prefix is. A waiting group is looked up in the prefix
cache; the store has blocks that follow (`choose`). The group is parked, and a thread fills its blocks (`begin`). At the
end (`take_ended`) they are committed, the group waits again, at the front, and has them as its prefix hit. By that it
is decided who computes the rest. After a load that failed it waits again for fresh blocks. Either way a group is loaded
for once.

Blocks are put between two steps, in the thread of the step loop, if the step that filled them has ended in order:
nobody can write them meanwhile, because the scheduler has not given them to anyone else yet.

For an engine of one rank, whose cache is in host memory and in this process (`vllm_pd.v0.checks`).
"""
from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.utils import Device

from vllm_pd.handover.progress import Progress
from vllm_pd.protocol.hashes import pack_tokens
from vllm_pd.protocol.messages import Attempt
from vllm_pd.store.plan import LATE_BYTES, NamedBlock, StorePlan
from vllm_pd.store.view import StoreView
from vllm_pd.store.worker import StoreWorker
from vllm_pd.v0.features import can_go_remote

if TYPE_CHECKING:
    from vllm.core.block_manager import SelfAttnBlockSpaceManager
    from vllm.core.scheduler import SchedulerOutputs
    from vllm.sequence import SequenceGroup

_OWNER = "store"  # in place of an incarnation: these attempts go to no peer


@dataclass
class _Known:
    """A group. `key`: its name in the plan. `names`: of its full blocks, as far as they were needed."""
    key: str
    names: list[bytes] = field(default_factory=list)
    is_loaded: bool = False


@dataclass
class _Load:
    """A load under way. `first`: the index of its first block. `tokens`: of the group's beginning, with its hit.
    `is_aborted`: whether the group is gone."""
    known: _Known
    first: int
    tokens: int
    is_aborted: bool = False


class StoredPrefixes:
    """Used from the step loop only. The caller owns `worker` and `view`."""

    def __init__(self, worker: StoreWorker, view: StoreView, manager: SelfAttnBlockSpaceManager) -> None:
        self._worker = worker
        self._manager = manager
        self._cache = manager.block_allocator._allocators[Device.GPU]
        self._evictor = self._cache.evictor  # a reset of the prefix cache makes another
        self._block_size = manager.block_size
        self._plan: StorePlan | None = StorePlan(self._block_size, view.contains,
                                                 max(1, LATE_BYTES // worker.slot_bytes))
        self._groups: weakref.WeakKeyDictionary[SequenceGroup, _Known] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self._offered: dict[Attempt, _Load] = {}  # of this call of the scheduler
        self._loads: dict[Attempt, _Load] = {}
        self._filled: list[NamedBlock] = []  # by the step under way

    def __len__(self) -> int:
        """How many groups are known."""
        return len(self._groups)

    @property
    def is_loading(self) -> bool:
        """Whether the end of a load is to come."""
        return bool(self._loads)

    def waits(self, seq_group: SequenceGroup) -> bool:
        """Whether blocks are loaded for another group now that this waiting group begins with, too."""
        known = self._known(seq_group) if self._loads else None
        if known is None or known.is_loaded:
            return False
        names = self._names(known, seq_group)
        return any(load.known.names[load.first:load.first + 1] == names[load.first:load.first + 1]
                   for load in self._loads.values() if not load.is_aborted)

    def choose(self, seq_group: SequenceGroup, cached_tokens: int) -> Attempt | None:
        """The attempt under which this waiting group is to be parked while blocks are loaded that follow its prefix hit
        of `cached_tokens` tokens; None where it is not loaded for."""
        self._offered.clear()
        known = self._known(seq_group)
        if known is None or known.is_loaded or seq_group.first_seq.get_output_len():
            return None
        tokens = self._plan.loadable_tokens(known.key, self._names(known, seq_group), seq_group.first_seq.get_len(),
                                            cached_tokens)
        if not tokens:
            return None
        attempt = Attempt(_OWNER, seq_group.request_id, next(self._numbers))
        self._offered[attempt] = _Load(known, cached_tokens // self._block_size, cached_tokens + tokens)
        return attempt

    def begin(self, attempt: Attempt, block_ids: Sequence[int]) -> bool:
        """The group is parked with these blocks, its whole prompt's. False where it is none of ours."""
        load = self._offered.pop(attempt, None)
        if load is None:
            return False
        self._loads[attempt] = load
        load.known.is_loaded = True
        blocks = self._plan.loads(load.known.key, load.known.names, block_ids,
                                  load.tokens - load.first * self._block_size)
        self._worker.begin_loads({str(attempt): blocks})
        return True

    def aborted(self, attempt: Attempt) -> bool:
        """The parked group is gone. The scheduler keeps its blocks until the load has ended. False where it is none of
        ours."""
        load = self._loads.get(attempt)
        if load is not None:
            load.is_aborted = True
            self._worker.stop_loads([str(attempt)])
        return load is not None

    def take_ended(self, progress: Progress) -> bool:
        """Add the ends of loads to the progress. Returns whether there were any."""
        ended, failed = self._worker.take_ended() if self._loads else ((), ())
        for attempt in [one for one in self._loads if str(one) in ended]:
            load = self._loads.pop(attempt)
            if str(attempt) not in failed:
                progress.read_prefixes[attempt] = load.tokens
            else:
                progress.failed_prefills.append(attempt)
                if self._plan is not None:
                    self._plan.failed(load.known.key)
            progress.finished_transfers.append(attempt)
        return bool(ended)

    def scheduled(self, outputs: SchedulerOutputs) -> None:
        """A step was scheduled: note the blocks that it fills."""
        if self._filled:
            self._stop("a step was not computed whole")
        elif self._plan is not None and self._cache.evictor is not self._evictor:
            self._stop("the prefix cache was reset")
        if self._plan is None:
            return
        self._plan.begin_step()
        for scheduled in outputs.scheduled_seq_groups:
            known = self._known(scheduled.seq_group)
            if known is None:
                continue
            seq = scheduled.seq_group.first_seq
            before = seq.data.get_num_computed_tokens()
            after = before + scheduled.token_chunk_size
            self._filled += self._plan.puts(known.key, self._names(known, scheduled.seq_group),
                                            lambda one=seq: self._manager.block_tables[one.seq_id].physical_block_ids,
                                            max(before, seq.data.get_num_cached_tokens()), after)

    def step_ended(self) -> None:
        """The step that was scheduled last was computed: put what it has filled. The scheduler has not run since."""
        filled, self._filled = self._filled, []
        if filled:
            self._worker.put(filled)

    def step_given_up(self) -> None:
        """It was not computed, and the engine goes on: what it would have filled is not put."""
        self._filled = []

    def take_counts(self) -> Mapping[str, int]:
        """For `StoreMetrics`: since the last call."""
        return self._worker.take_counts()

    def _stop(self, why: str) -> None:
        self._plan, self._filled = None, []
        self._worker.stop(why)

    def _known(self, seq_group: SequenceGroup) -> _Known | None:
        """None where its KV does not follow from its tokens alone, and where the store is not used any more."""
        known = self._groups.get(seq_group)
        if known is None and self._plan is not None and can_go_remote(seq_group, ()):
            known = self._groups[seq_group] = _Known(f"{seq_group.request_id}#{next(self._numbers)}")
            self._plan.add(known.key)
            weakref.finalize(seq_group, self._plan.end, known.key).atexit = False
        return known if self._plan is not None else None

    def _names(self, known: _Known, seq_group: SequenceGroup) -> list[bytes]:
        """The names of its full blocks: `block_names` of all its tokens."""
        seq = seq_group.first_seq
        if len(known.names) < seq.get_len() // self._block_size:
            known.names += block_names(seq.get_token_ids()[len(known.names) * self._block_size:], self._block_size,
                                       known.names[-1] if known.names else b"")
        return known.names


def block_names(token_ids: Sequence[int], block_size: int, previous: bytes) -> list[bytes]:
    """The names of the full blocks of these tokens: SHA-256, each over the name before it and its token ids. `previous`
    is the name of the block before the first token; empty at the beginning of a prompt."""
    names = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        previous = hashlib.sha256(previous + pack_tokens(token_ids[start:start + block_size])).digest()
        names.append(previous)
    return names
