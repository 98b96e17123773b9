# SPDX-License-Identifier: Apache-2.0
"""The patched scheduler with simulated memory: no model, no peers, milliseconds a step.

Each slot of a block holds what was last written there: the tokens up to its position, as a number. A step writes the
slots that the CPU runner would compute and reads all those before them; reading anything but the sequence's own past is
an error at once. So whatever makes the scheduler or the block manager treat KV as there that is not, or lets two
writers at a block, shows as soon as somebody attends to it.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.inputs import token_inputs
from vllm.sequence import Logprob, Sequence, SequenceGroup, SequenceStatus
from vllm.utils import Device

from vllm_pd.v0.interface import SchedulerBinding
from vllm_pd.v0.pending_blocks import PendingBlocks
from vllm_pd.v0.turns import DecodeTurns

BLOCK_SIZE = 4


@dataclass
class RemoteWork:
    """What a peer may write: the slots of `block_ids` after `cached_tokens`, until the attempt is over."""
    token_ids: list[int]
    block_ids: list[int]
    cached_tokens: int
    aborted: bool = False


class FakePeers(SchedulerBinding):
    """Stands where `V0Handover` stands. `wants_remote` decides; the test says what becomes of the work."""

    def __init__(self, scheduler: Scheduler, wants_remote: Callable[[SequenceGroup], bool]) -> None:
        self.pending_blocks = PendingBlocks(scheduler.block_manager)
        self.wants_remote = wants_remote
        self.wants_prefix: Callable[[SequenceGroup], bool] = lambda group: False
        self.waits: Callable[[SequenceGroup], bool] = lambda group: False
        self.work: dict[str, RemoteWork] = {}
        self.to_send: dict[str, list[int]] = {}
        self.steps = 0
        self.turns = DecodeTurns()
        self._numbers = itertools.count()

    def choose_remote_prefill(self, seq_group: SequenceGroup, num_cached_tokens: int) -> str | None:
        attempt = seq_group.first_seq.remote_decode
        if attempt is not None:
            return attempt if self.wants_prefix(seq_group) else None
        if not self.wants_remote(seq_group):
            return None
        return f"{seq_group.request_id}#{next(self._numbers)}"

    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        return self.waits(seq_group)

    def start_remote_prefill(self, attempt: str, seq_group: SequenceGroup, block_ids: list[int],
                             num_cached_tokens: int) -> None:
        self.work[attempt] = RemoteWork(list(seq_group.first_seq.get_token_ids()), list(block_ids), num_cached_tokens)

    def abort_remote_prefill(self, attempt: str) -> None:
        self.work[attempt].aborted = True

    def start_transfer(self, attempt: str, block_ids: list[int]) -> None:
        self.to_send[attempt] = list(block_ids)

    def allows_prefills(self) -> bool:
        return self.turns.allows_prefills()

    def after_schedule(self, outputs) -> None:
        self.turns.scheduled(outputs.num_prefill_groups)
        self.steps += 1


class SimulatedEngine:
    """Requests in, steps, and what is left in the pool."""

    def __init__(self, *, blocks: int = 64, caching: bool = True, chunk: int | None = None, max_num_seqs: int = 4,
                 max_model_len: int = 128, wants_remote: Callable[[SequenceGroup], bool] = lambda group: True,
                 disagg: bool = True, swap_blocks: int = 0, policy: str = "fcfs", decode_steps: int = 1) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=1.0, swap_space=0, cache_dtype="auto",
                            enable_prefix_caching=caching)
        cache.num_gpu_blocks, cache.num_cpu_blocks = blocks, swap_blocks
        self.scheduler = Scheduler(
            SchedulerConfig("generate", max_num_batched_tokens=chunk or max_model_len * 2, max_num_seqs=max_num_seqs,
                            max_model_len=max_model_len, enable_chunked_prefill=chunk is not None,
                            preemption_mode="swap" if swap_blocks else None, policy=policy,
                            num_scheduler_steps=decode_steps, num_lookahead_slots=decode_steps - 1), cache, None)
        self.peers = FakePeers(self.scheduler, wants_remote)
        if disagg:
            self.scheduler.disagg = self.peers
        self.manager = self.scheduler.block_manager
        self.slots: dict[tuple[int, int], int] = {}
        self.swapped_slots: dict[tuple[int, int], int] = {}
        self.groups: dict[str, SequenceGroup] = {}
        self.computed_tokens = 0
        self.free_at_start = self.manager.get_num_free_gpu_blocks()
        self._seq_ids = itertools.count()

    # Requests.

    def add(self, request_id: str, token_ids: list[int], *, max_tokens: int = 4,
            remote_decode: str | None = None, priority: int = 0) -> None:
        seq = Sequence(next(self._seq_ids), inputs=token_inputs(token_ids), block_size=BLOCK_SIZE)
        seq.remote_decode = remote_decode
        group = SequenceGroup(request_id, seqs=[seq], arrival_time=time.time(),
                              sampling_params=SamplingParams(max_tokens=max_tokens), priority=priority)
        self.groups[request_id] = group
        self.scheduler.add_seq_group(group)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort_seq_group(request_id)
        self.groups.pop(request_id, None)

    def seq(self, request_id: str) -> Sequence:
        return self.groups[request_id].first_seq

    # Steps.

    def step(self, **progress: Iterable[str]) -> list[str]:
        """Schedule, compute and sample. The ids of the requests that were in the batch."""
        if progress.get("finished_prefills"):
            self.peers.turns.resume()
        metadata_list, outputs, _ = self.scheduler.schedule(**progress)
        self.outputs = outputs
        self._copy(outputs.blocks_to_swap_in, self.swapped_slots, self.slots)
        self._copy(outputs.blocks_to_swap_out, self.slots, self.swapped_slots)
        for metadata in metadata_list:
            self._compute(metadata)
        for metadata, scheduled in zip(metadata_list, outputs.scheduled_seq_groups, strict=True):
            group = scheduled.seq_group
            group.update_num_computed_tokens(scheduled.token_chunk_size)
            if metadata.do_sample:
                self._sample(group)
            for _ in range(0 if metadata.is_prompt else self.scheduler.scheduler_config.num_scheduler_steps - 1):
                if not group.is_finished():
                    self._compute(metadata)
                    group.update_num_computed_tokens(1)
                    self._sample(group)
        for group in outputs.ignored_seq_groups:
            self.groups.pop(group.request_id, None)
        self.scheduler.free_finished_seq_groups()
        return [metadata.request_id for metadata in metadata_list]

    def run(self, steps: int = 200) -> None:
        """Until nothing can be scheduled."""
        for _ in range(steps):
            if not self.scheduler.has_schedulable_seqs():
                return
            self.step()
        raise AssertionError("no end in sight")

    def finish(self) -> None:
        """B20: run to the end, which leaves nothing."""
        self.run()
        self.check_at_rest()

    def park(self, request_id: str, token_ids: list[int], **options) -> str:
        """Add a request and have it parked. Its attempt."""
        self.add(request_id, token_ids, **options)
        self.step()
        return self.attempt_of(request_id)

    def arrive(self, attempt: str) -> list[str]:
        """The peer has written all of this attempt, and the next step hears of it. The ids in its batch."""
        self.write_remotely(attempt)
        return self.step(finished_prefills=[attempt])

    def write_remotely(self, attempt: str, tokens: int | None = None) -> None:
        """What the peer of this attempt does: write the slots it was granted, or the first of them."""
        work = self.peers.work[attempt]
        for position in range(work.cached_tokens, len(work.token_ids) if tokens is None else tokens):
            self._write(work.block_ids, work.token_ids, position)

    def attempt_of(self, request_id: str) -> str:
        return next(a for a, group in self.scheduler.remote_prefilling.items() if group.request_id == request_id)

    # Looking.

    def hit(self, token_ids: list[int]) -> int:
        """How many tokens a new request with this prompt would find cached."""
        probe = Sequence(next(self._seq_ids), inputs=token_inputs(token_ids), block_size=BLOCK_SIZE)
        hit = self.manager.get_num_cached_tokens(probe)
        self.manager.remove_seq_from_computed_blocks_tracker(probe)
        return hit

    def references(self) -> dict[int, int]:
        """How often each block is referred to, as the pool counts it."""
        pool = self.manager.block_allocator._allocators[Device.GPU]
        return {block: count for block, count in pool._refcounter._refcounts.items() if count}

    def check_references(self) -> None:
        """The pool's count is that of all block tables, those of quarantined blocks included."""
        counted: dict[int, int] = {}
        for table in (*self.manager.block_tables.values(), *self.scheduler.quarantined.values()):
            for block in table.physical_block_ids:
                counted[block] = counted.get(block, 0) + 1
        assert counted == self.references()

    def check_writers(self) -> None:
        """A block that a peer may write is in one table only."""
        references = self.references()
        for attempt in (*self.scheduler.remote_prefilling, *self.scheduler.quarantined):
            work = self.peers.work[attempt]
            for block in work.block_ids[work.cached_tokens // BLOCK_SIZE:]:
                assert references[block] == 1, f"block {block} of {attempt} is shared"

    def check_at_rest(self) -> None:
        """B20: nothing is held by anybody."""
        scheduler = self.scheduler
        for queue in (scheduler.waiting, scheduler.running, scheduler.swapped, scheduler.remote_prefilling,
                      scheduler.prefill_sending, scheduler.quarantined, self.manager.block_tables,
                      self.manager._computed_blocks_tracker._seq_id_to_blocks_hashes,
                      self.manager._computed_blocks_tracker._seq_id_to_num_tokens_computed,
                      self.manager._last_access_blocks_tracker._seq_last_access):
            assert not queue
        assert not scheduler.has_unfinished_seqs()
        assert scheduler.get_num_unfinished_seq_groups() == 0
        assert self.references() == {}
        assert self.manager.get_num_free_gpu_blocks() == self.free_at_start
        pool = self.manager.block_allocator._allocators[Device.GPU]
        if self.scheduler.cache_config.enable_prefix_caching:
            assert not pool._touched_blocks
            assert not pool._uncomputed_blocks

    # The memory.

    @staticmethod
    def _copy(pairs: list[tuple[int, int]], source: dict, target: dict) -> None:
        for old, new in pairs:
            for slot in range(BLOCK_SIZE):
                target.pop((new, slot), None)
                if (old, slot) in source:
                    target[new, slot] = source[old, slot]

    def _compute(self, metadata) -> None:
        [(seq_id, data)] = metadata.seq_data.items()
        table = metadata.block_tables[seq_id]
        tokens = data.get_token_ids()
        start = data.get_num_computed_tokens() if metadata.is_prompt else data.get_len() - 1
        end = start + (metadata.token_chunk_size if metadata.is_prompt else 1)
        cached = len(metadata.computed_block_nums or ()) * BLOCK_SIZE
        if metadata.is_prompt and cached > start:
            start = cached if cached < end else end - 1
        for position in range(end):
            if position >= start:
                self._write(table, tokens, position)
            self._check(table, tokens, position, metadata.request_id)
        self.computed_tokens += end - start

    def _write(self, table: list[int], tokens: Iterable[int], position: int) -> None:
        self.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = past(tokens, position)

    def _check(self, table: list[int], tokens: Iterable[int], position: int, request_id: str) -> None:
        found = self.slots.get((table[position // BLOCK_SIZE], position % BLOCK_SIZE))
        assert found == past(tokens, position), f"{request_id} attends to KV that is not its own at position {position}"

    def _sample(self, group: SequenceGroup) -> None:
        seq = group.first_seq
        token = hash((tuple(seq.get_token_ids()), 7)) % 50
        seq.append_token_id(token, {token: Logprob(0.0)})
        if seq.get_output_len() >= group.sampling_params.max_tokens or seq.remote_decode is not None:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED
            self.scheduler.free_seq(seq)
            self.groups.pop(group.request_id, None)


def past(tokens: Iterable[int], position: int) -> int:
    return hash(tuple(tokens[:position + 1]))
