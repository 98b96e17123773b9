# SPDX-License-Identifier: Apache-2.0
"""B60: what V0's block allocator announces, checked against its tables and against the memory itself."""

import itertools
import time
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.core.block.prefix_caching_block import PrefixCachingBlock
from vllm.distributed import kv_events as upstream
from vllm.inputs import token_inputs
from vllm.lora.request import LoRARequest
from vllm.sequence import Sequence, SequenceGroup
from vllm.utils import Device

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine, past
from vllm_pd.events import messages as m
from vllm_pd.events.journal import EventJournal, runs
from vllm_pd.events.sink import BlockSink, Cleared
from vllm_pd.v0.events import bind_sink, explainer, load_reader

PROMPTS = [tuple(range(100, 117)), tuple(range(100, 112)) + tuple(range(200, 209)), tuple(range(300, 308)),
           tuple(range(100, 130))]
LORA = LoRARequest("ada", 7, "/nowhere")


class WatchedEngine(SimulatedEngine):
    """Believes every event, as a strict subscriber would, and compares it with what is there at that moment."""

    def __init__(self, max_queued: int = 65536, **options) -> None:
        super().__init__(wants_remote=lambda group: group.request_id.startswith("remote"), **options)
        self.sink = BlockSink(explain=explainer(self.scheduler), max_queued=max_queued)
        bind_sink(self.scheduler, self.sink)
        self.pool = self.manager.block_allocator._allocators[Device.GPU]
        self.journal = EventJournal(BLOCK_SIZE)
        self.read_load = load_reader(self.scheduler)
        self.announced: dict[int, tuple[int | None, tuple[int, ...], object]] = {}
        self.sums = {"stored": 0, "removed": 0, "cleared": 0, "salted": 0}

    def _copy(self, pairs, source, target) -> None:
        super()._copy(pairs, source, target)
        if target is self.swapped_slots:  # the step is scheduled and not computed: nothing of it may be told
            self.take()

    def step(self, **progress: Iterable[str]) -> list[str]:
        ran = super().step(**progress)
        self.take()
        return ran

    def add_with(self, request_id: str, tokens: Iterable[int], **options) -> None:
        """With an adapter, or with prompt logprobs."""
        seq = Sequence(next(self._seq_ids), inputs=token_inputs(list(tokens)), block_size=BLOCK_SIZE,
                       lora_request=options.pop("lora", None))
        group = SequenceGroup(request_id, seqs=[seq], arrival_time=time.time(),
                              sampling_params=SamplingParams(max_tokens=3, **options))
        self.groups[request_id] = group
        self.scheduler.add_seq_group(group)

    def take(self) -> list[m.KVEvent]:
        ops, everything = self.sink.take(lambda: not self.scheduler.running)
        if everything is not None:
            self.journal.replace(everything)
        self.journal.apply(ops)
        events = self.journal.take()
        for event in events:
            self._believe(event)
        return events

    def _believe(self, event: m.KVEvent) -> None:
        if isinstance(event, m.AllBlocksCleared):
            self.announced.clear()
            self.sums["cleared"] += 1
            return
        if isinstance(event, m.BlockRemoved):
            for block_hash in event.block_hashes:
                del self.announced[block_hash]  # was announced
                self.sums["removed"] += 1
            return
        parent = event.parent_block_hash
        for number, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * BLOCK_SIZE:(number + 1) * BLOCK_SIZE])
            assert len(tokens) == event.block_size == BLOCK_SIZE
            assert block_hash not in self.announced, "stored twice"
            assert parent is None or parent in self.announced, "a child before its parent"
            self.announced[block_hash] = (parent, tokens, event.lora_name)
            self._check_memory(block_hash)
            self.sums["stored"] += 1
            self.sums["salted"] += event.lora_name is not None
            parent = block_hash

    def _check_memory(self, block_hash: int) -> None:
        """The hash is that of those tokens, and their KV is in that block, if it has not been given away since."""
        tokens: list[int] = []
        at: int | None = block_hash
        while at is not None:
            at, chunk, lora = self.announced[at]
            tokens[:0] = chunk
        expected = None
        extra = hash((0, LORA.lora_int_id)) if lora else None
        for start in range(0, len(tokens), BLOCK_SIZE):
            expected = PrefixCachingBlock.hash_block_tokens(start == 0, expected, tokens[start:start + BLOCK_SIZE],
                                                            extra)
        assert expected == block_hash
        block_id = self.pool._cached_blocks.get(block_hash)
        if block_id is not None:
            for slot in range(BLOCK_SIZE):
                position = len(tokens) - BLOCK_SIZE + slot
                assert self.slots.get((block_id, slot)) == past(tokens, position), "announced before its KV is there"

    def check_settled(self, private: bool = False) -> None:
        """What was announced is what a request would hit; `private`: some requests had blocks that no other can."""
        self.scheduler.event_sink.begin_step()
        self.take()
        hits = {block_hash for block_hash, block_id in self.pool._cached_blocks.items()
                if self.pool.block_is_computed(block_id) and not (private and block_hash not in self.sink._ledger)}
        held_back = {block_hash for children in self.journal._orphans.values() for block_hash in children}
        assert set(self.announced) == hits - held_back
        assert set(self.sink._ledger) == hits
        assert all(parent not in self.announced for parent in self.journal._orphans)
        for run in itertools.chain(*runs(self.journal.blocks(), BLOCK_SIZE, 3)):
            parent = run.parent_block_hash
            for number, block_hash in enumerate(run.block_hashes):
                tokens = tuple(run.token_ids[number * BLOCK_SIZE:(number + 1) * BLOCK_SIZE])
                assert self.announced[block_hash] == (parent, tokens, run.lora_name)
                parent = block_hash


def play(engine: WatchedEngine, operations: list[tuple[str, int]]) -> None:
    """Random operations of an engine's life, each of which is legal whatever came before."""
    names = itertools.count()
    for operation, number in operations:
        prompt = PROMPTS[number % len(PROMPTS)]
        parked = sorted(engine.scheduler.remote_prefilling)
        if operation in ("add", "remote"):
            engine.add(f"{operation}{next(names)}", list(prompt), max_tokens=1 + number % 7)
        elif operation == "lora":
            engine.add_with(f"lora{next(names)}", prompt, lora=LORA)
        elif operation == "logprobs":
            engine.add_with(f"logprobs{next(names)}", prompt, prompt_logprobs=1)
        elif operation == "step":
            engine.step()
        elif operation == "abort" and engine.groups:
            engine.abort(sorted(engine.groups)[number % len(engine.groups)])
            engine.take()
        elif operation == "arrive" and parked:
            attempt = parked[number % len(parked)]
            engine.arrive(attempt)
        elif operation == "fail" and parked:
            attempt = parked[number % len(parked)]
            engine.step(failed_prefills=[attempt])
        elif operation == "fence":
            engine.step(finished_transfers=list(engine.scheduler.quarantined)[:1])
        elif operation == "reset":
            engine.scheduler.reset_prefix_cache()
            engine.take()
        engine.check_references()


OPERATIONS = st.lists(st.tuples(st.sampled_from(
    ["add", "add", "remote", "lora", "logprobs", "step", "step", "step", "abort", "arrive", "arrive", "fail", "fence",
     "reset"]), st.integers(0, 97)), min_size=5, max_size=60)


@given(OPERATIONS, st.sampled_from([None, 6, 8]), st.sampled_from([14, 20, 64]), st.sampled_from([2, 65536]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_b60_what_is_announced_is_what_is_there(operations, chunk, blocks, max_queued):
    """B60: each full block once, its data in memory at that moment, parent before child; removed on eviction, cleared
    on reset; whatever the requests do, with chunks, remote prefills, aborts, eviction, and a queue that overflows."""
    engine = WatchedEngine(blocks=blocks, chunk=chunk, max_queued=max_queued)
    play(engine, operations)
    for _ in range(200):
        if not engine.scheduler.has_unfinished_seqs() and not engine.scheduler.quarantined:
            break
        for attempt in list(engine.scheduler.remote_prefilling):
            engine.write_remotely(attempt)
        engine.step(finished_prefills=list(engine.scheduler.remote_prefilling),
                    finished_transfers=list(engine.scheduler.quarantined))
    engine.check_settled(private=any(operation == "logprobs" for operation, _ in operations))
    engine.check_at_rest()
    assert engine.read_load() == m.EngineLoad(total_blocks=blocks)
    engine.scheduler.reset_prefix_cache()
    engine.check_settled()
    assert not engine.announced


def test_b60_the_property_sees_every_kind_of_event():
    """The guard of the test above: its operations do lead to all that it checks."""
    engine = WatchedEngine(blocks=10)
    play(engine, [("lora", 2), ("step", 0), ("step", 0), ("step", 0), ("add", 3), *[("step", 0)] * 9, ("remote", 1),
                  ("step", 0), ("arrive", 0), *[("step", 0)] * 5, ("reset", 0)])
    assert all(engine.sums.values()), engine.sums


def test_b60_a_block_is_not_told_of_before_the_step_that_fills_it_is_over():
    engine = WatchedEngine()
    engine.add("a", list(PROMPTS[0]))
    metadata, _, _ = engine.scheduler.schedule()
    assert metadata and engine.take() == []
    engine.sink.begin_step()
    ops, _ = engine.sink.take(lambda: False)
    assert len(ops) == 4


def test_b60_a_reset_is_one_change():
    """B60: not one for each block, which would discard the whole queue for a pool of 100,000."""
    engine = WatchedEngine()
    engine.add("a", list(PROMPTS[0]))
    engine.run()
    assert len(engine.announced) == 5
    assert engine.scheduler.reset_prefix_cache()
    assert engine.sink.take(lambda: True) == ([Cleared.ALL], None)


def test_b60_a_remote_prefill_is_told_of_when_it_has_arrived():
    engine = WatchedEngine()
    engine.add("remote", list(PROMPTS[0]))
    for _ in range(3):
        engine.step()
    assert not engine.announced
    [attempt] = engine.scheduler.remote_prefilling
    engine.arrive(attempt)
    assert len(engine.announced) == 4


def test_b60_blocks_of_an_abandoned_remote_prefill_are_never_told_of():
    engine = WatchedEngine()
    engine.add("remote", list(PROMPTS[0]))
    engine.step()
    engine.abort("remote")
    engine.step(finished_transfers=list(engine.scheduler.quarantined))
    engine.check_settled()
    assert engine.sums["stored"] == 0


def test_b60_adapters_are_told_apart_and_named():
    engine = WatchedEngine()
    engine.add_with("lora", PROMPTS[0], lora=LORA)
    [waiting] = engine.scheduler.waiting
    assert explainer(engine.scheduler)(waiting.first_seq.extra_hash()).lora_name == LORA.lora_name
    engine.add("base", list(PROMPTS[0]), max_tokens=2)
    engine.run()
    engine.check_settled()
    adapters = {hash_: lora for hash_, (_, _, lora) in engine.announced.items()}
    assert sorted(map(str, adapters.values())) == ["None"] * 4 + ["ada"] * 4
    [run] = [run for part in runs(engine.journal.blocks(), BLOCK_SIZE, 100) for run in part if run.lora_name]
    assert run.lora_id == LORA.lora_int_id and run.extra_keys is None


def test_b60_what_nobody_can_hit_is_not_told_of():
    """Blocks of a request with prompt logprobs are its own."""
    engine = WatchedEngine()
    engine.add_with("own", PROMPTS[0], prompt_logprobs=1)
    engine.run()
    engine.check_settled(private=True)
    assert not engine.announced


def test_b60_without_prefix_caching_there_is_nothing_to_tell():
    engine = SimulatedEngine(caching=False)
    bind_sink(engine.scheduler, BlockSink())
    assert engine.scheduler.event_sink is None


def test_the_events_are_upstreams_to_the_byte():
    """Where ours say nothing more, they are vLLM's own; where they do, its readers skip it."""
    batch = m.EventBatch(1.5, [m.BlockStored([1, -2], None, list(range(8)), 4, None), m.BlockRemoved([1]),
                               m.AllBlocksCleared()])
    theirs = upstream.KVEventBatch(1.5, [upstream.BlockStored([1, -2], None, list(range(8)), 4, None),
                                         upstream.BlockRemoved([1]), upstream.AllBlocksCleared()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=upstream.KVEventBatch) == theirs
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=m.EventBatch) == batch
    more = m.EventBatch(1.5, [m.BlockStored([1], None, [1, 2, 3, 4], 4, 7, lora_name="ada", extra_keys=[5])])
    [event] = msgspec.msgpack.decode(msgspec.msgpack.encode(more), type=upstream.KVEventBatch).events
    assert event == upstream.BlockStored([1], None, [1, 2, 3, 4], 4, 7)


@pytest.mark.parametrize("state", ["waiting", "running", "parked", "quarantined", "sending"])
def test_the_load_is_that_of_the_queues(state):
    engine = WatchedEngine()
    load = engine.read_load()
    assert load == m.EngineLoad(total_blocks=64)
    tokens = list(PROMPTS[0])
    if state == "waiting":
        engine.add("a", tokens)
        assert engine.read_load() == m.EngineLoad(waiting=1, queued_prefill_tokens=17, total_blocks=64)
    elif state == "running":
        engine.add("a", tokens)
        engine.step()
        assert engine.read_load() == m.EngineLoad(running=1, used_blocks=5, total_blocks=64)
    elif state == "parked":
        engine.add("remote", tokens)
        engine.step()
        assert engine.read_load() == m.EngineLoad(remote_prefilling=1, parked_blocks=5, used_blocks=5, total_blocks=64)
    elif state == "quarantined":
        engine.add("remote", tokens)
        engine.step()
        engine.abort("remote")
        assert engine.read_load() == m.EngineLoad(quarantined=1, quarantined_blocks=5, used_blocks=5, total_blocks=64)
    else:
        engine.add("job", tokens, remote_decode="attempt")
        engine.step()
        assert engine.read_load() == m.EngineLoad(sending=1, sending_blocks=5, used_blocks=5, total_blocks=64)
