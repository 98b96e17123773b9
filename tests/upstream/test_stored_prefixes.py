# SPDX-License-Identifier: Apache-2.0
"""V0 and the store (B104): the patched scheduler over simulated memory, with `StoredPrefixes` between it and a store
that is a dictionary. Whoever attends to KV that is not its own fails at once (`tests.fakes.simulated_engine`).
"""

import gc
import hashlib
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.simulated_engine import BLOCK_SIZE, FakePeers, RemoteWork, SimulatedEngine
from vllm_pd.handover.progress import Progress
from vllm_pd.store.loads import EndedLoads
from vllm_pd.store.plan import NamedBlock
from vllm_pd.v0.stored import StoredPrefixes, block_names

Slots = dict[int, int]
PROMPT = list(range(10, 30))  # five blocks, of which the last is never loaded


class SlotStore:
    """The worker's end over the slots of a simulated engine. Loads end when the test says so."""
    slot_bytes = 1 << 20

    def __init__(self, engine: SimulatedEngine, blocks: dict[bytes, Slots]) -> None:
        self._slots = engine.slots
        self._blocks = blocks
        self._loads: dict[str, Sequence[NamedBlock]] = {}
        self._ended = EndedLoads(set(), set())
        self.stopped = ""

    def put(self, blocks: Sequence[NamedBlock]) -> None:
        assert not self.stopped
        for name, block in blocks:
            content = {slot: self._slots[block, slot] for slot in range(BLOCK_SIZE)}
            assert self._blocks.setdefault(name, content) == content

    def begin_loads(self, loads: Mapping[str, Sequence[NamedBlock]]) -> None:
        self._loads.update(loads)

    def stop_loads(self, names: Collection[str]) -> None:
        for name in self._loads.keys() & names:
            self._loads[name] = [NamedBlock(b"gone", 0), *self._loads[name]]

    def stop(self, why: str) -> None:
        self.stopped = why

    def end_load(self, number: int = 0, evicts: bool = False) -> None:
        """One of the loads ends: the last block first, up to one that is not there."""
        name = list(self._loads)[number % len(self._loads)]
        blocks = self._loads.pop(name)
        if evicts:
            self._blocks.pop(blocks[len(blocks) // 2].name, None)
        self._ended.ended.add(name)
        for block in reversed(blocks):
            if block.name not in self._blocks:
                self._ended.failed.add(name)
                return
            for slot, content in self._blocks[block.name].items():
                self._slots[block.block_id, slot] = content

    def take_ended(self) -> EndedLoads:
        taken, self._ended = self._ended, EndedLoads(set(), set())
        return taken

    @property
    def open(self) -> int:
        return len(self._loads)


class StorePeers(FakePeers):
    """As `V0Handover` with a store; nothing is handed over."""
    stored: StoredPrefixes

    def choose_remote_prefill(self, seq_group, num_cached_tokens):
        return self.stored.choose(seq_group, num_cached_tokens)

    def waits_for_sibling(self, seq_group):
        return self.stored.waits(seq_group)

    def start_remote_prefill(self, attempt, seq_group, block_ids, num_cached_tokens):
        assert self.stored.begin(attempt, block_ids)
        self.work[attempt] = RemoteWork(list(seq_group.first_seq.get_token_ids()), list(block_ids), num_cached_tokens)

    def abort_remote_prefill(self, attempt):
        assert self.stored.aborted(attempt)

    def after_schedule(self, outputs):
        super().after_schedule(outputs)
        self.stored.scheduled(outputs)


class StoringEngine(SimulatedEngine):

    def __init__(self, stored_blocks: dict[bytes, Slots], **options) -> None:
        super().__init__(disagg=False, **options)
        self.worker = SlotStore(self, stored_blocks)
        self.peers = StorePeers(self.scheduler, lambda group: False)
        self.peers.stored = self.stored = StoredPrefixes(
            self.worker, SimpleNamespace(contains=stored_blocks.__contains__), self.manager)
        self.scheduler.disagg = self.peers

    def step(self, **progress) -> list[str]:
        news = Progress(**progress)
        self.stored.take_ended(news)
        batch = super().step(**news.arguments())
        self.stored.step_ended()
        return batch

    def run(self, steps: int = 200) -> None:
        """Until nothing can be scheduled, and no load has ended."""
        for _ in range(steps):
            if not self.scheduler.has_schedulable_seqs() and self.stored.is_loading <= bool(self.worker.open):
                return
            self.step()
        raise AssertionError("no end in sight")


@pytest.fixture
def blocks() -> dict[bytes, Slots]:
    return {}


@pytest.fixture
def filled(blocks) -> dict[bytes, Slots]:
    """A store with PROMPT and its answer, put by another engine."""
    other = StoringEngine(blocks)
    other.add("other", PROMPT)
    other.finish()
    assert len(blocks) == (len(PROMPT) + 3) // BLOCK_SIZE
    return blocks


def test_b104_names_are_a_chain_of_sha256():
    first = hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest()
    second = hashlib.sha256(first + bytes([3, 0, 0, 0, 0, 1, 0, 0])).digest()
    assert block_names([1, 2, 3, 256, 9], 2, b"") == [first, second]
    assert block_names([3, 256], 2, first) == [second]
    assert block_names([1], 2, b"") == []


@pytest.mark.parametrize("chunk", [None, 8])
class TestLoads:

    def loading(self, filled, chunk, **options) -> StoringEngine:
        engine = StoringEngine(filled, chunk=chunk, **options)
        engine.add("a", PROMPT)
        assert engine.step() == [] and engine.worker.open == 1 and engine.stored.is_loading
        return engine

    def test_b104_what_is_loaded_is_not_computed(self, filled, chunk):
        engine = self.loading(filled, chunk)
        engine.worker.end_load()
        engine.finish()
        assert engine.computed_tokens == BLOCK_SIZE + 3 and not engine.stored.is_loading

    def test_b104_a_load_that_failed_is_computed_and_not_tried_again(self, filled, chunk):
        engine = self.loading(filled, chunk)
        engine.worker.end_load(evicts=True)
        engine.finish()
        assert engine.computed_tokens == len(PROMPT) + 3
        assert len(filled) == (len(PROMPT) + 3) // BLOCK_SIZE  # and put again

    def test_b104_an_abort_keeps_the_blocks_until_the_load_has_ended(self, filled, chunk):
        engine = self.loading(filled, chunk)
        engine.abort("a")
        engine.step()
        assert len(engine.scheduler.quarantined) == 1
        engine.worker.end_load()
        engine.step()
        assert engine.hit(PROMPT) == 0
        engine.check_at_rest()

    def test_b104_an_equal_beginning_waits_for_the_load_and_others_do_not(self, filled, chunk):
        engine = self.loading(filled, chunk)
        engine.add("b", PROMPT[:12] + [1, 2, 3, 4, 5])
        engine.add("c", [1] * 9)
        assert engine.step() in (["c"], ["c", "c"])
        assert engine.worker.open == 1
        engine.worker.end_load()
        engine.finish()
        assert engine.computed_tokens == (BLOCK_SIZE + 3) + (5 + 3) + (9 + 3)

    def test_b104_what_the_prefix_cache_has_is_not_loaded(self, filled, chunk):
        engine = StoringEngine(filled, chunk=chunk)
        engine.add("a", PROMPT[:9])
        engine.step()
        engine.worker.end_load()
        engine.finish()
        engine.add("b", PROMPT)
        engine.step()
        engine.worker.end_load()
        engine.finish()
        assert engine.computed_tokens == (1 + 3) + (BLOCK_SIZE + 3)

    def test_b104_a_pool_without_room_computes_when_there_is_room(self, filled, chunk):
        engine = self.loading(filled, chunk, blocks=9)
        engine.add("c", [1] * 8, max_tokens=12)
        engine.step()
        engine.worker.end_load()
        for _ in range(60):
            engine.step()
        engine.check_at_rest()


@pytest.mark.parametrize("chunk", [None, 8])
class TestPuts:

    def test_b104_nothing_is_put_before_its_step_has_ended(self, blocks, chunk):
        engine = StoringEngine(blocks, chunk=chunk)
        engine.add("a", PROMPT)
        SimulatedEngine.step(engine)
        assert not blocks
        engine.stored.step_ended()
        assert len(blocks) == (chunk or len(PROMPT)) // BLOCK_SIZE

    def test_b104_after_a_step_that_never_ended_nothing_is_put_or_loaded(self, filled, chunk):
        engine, before = StoringEngine(filled, chunk=chunk), dict(filled)
        engine.add("a", [3] * 20)
        SimulatedEngine.step(engine)
        engine.step()
        assert engine.worker.stopped == "a step was not computed whole"
        engine.add("b", PROMPT)
        engine.finish()
        assert filled == before

    def test_b104_a_step_that_was_given_up_fills_nothing(self, blocks, chunk):
        engine = StoringEngine(blocks, chunk=chunk)
        engine.add("a", PROMPT)
        SimulatedEngine.step(engine)
        engine.stored.step_given_up()
        engine.stored.step_ended()
        assert not blocks
        engine.finish()
        assert not engine.worker.stopped

    def test_b104_a_reset_of_the_prefix_cache_ends_the_use_of_the_store(self, filled, chunk):
        engine = StoringEngine(filled, chunk=chunk)
        assert engine.scheduler.reset_prefix_cache()
        engine.add("a", [3] * 20)
        before = dict(filled)
        engine.finish()
        assert engine.worker.stopped == "the prefix cache was reset" and filled == before

    def test_b104_what_a_peer_has_written_is_put_too(self, blocks, chunk):
        """The first step after a remote prefill computes the last token only."""
        engine = StoringEngine(blocks, chunk=chunk)
        choose, begin = engine.peers.choose_remote_prefill, engine.peers.start_remote_prefill
        engine.peers.choose_remote_prefill = lambda group, cached: "remote"
        engine.peers.start_remote_prefill = lambda *arguments: FakePeers.start_remote_prefill(engine.peers, *arguments)
        engine.park("a", PROMPT)
        engine.write_remotely("remote")
        engine.peers.choose_remote_prefill, engine.peers.start_remote_prefill = choose, begin
        engine.step(finished_prefills=["remote"])
        assert len(blocks) == len(PROMPT) // BLOCK_SIZE
        engine.finish()

    def test_b104_prompt_logprobs_are_neither_loaded_nor_stored(self, filled, chunk):
        before = dict(filled)
        engine = StoringEngine(filled, chunk=chunk)
        for number, prompt in enumerate((PROMPT, [3] * 20)):
            engine.add(str(number), prompt)
            engine.groups[str(number)].sampling_params.prompt_logprobs = 1
        engine.finish()
        assert filled == before and engine.computed_tokens == 2 * (20 + 3)


def test_b104_what_is_known_of_a_request_ends_with_it(filled):
    engine = StoringEngine(filled)
    for number in range(30):
        engine.add(str(number), [number] * 30)
        engine.finish()
    gc.collect()
    assert len(engine.stored) == len(engine.stored._plan) <= 3  # which the scheduler keeps to use their objects again


class SharedStore(RuleBasedStateMachine):
    """Two engines, one store, in any order: whatever ends, is aborted or evicted when, all answers attend to their own
    KV, and nothing is left."""

    @initialize(chunk=st.sampled_from([None, 8]), blocks=st.integers(9, 40))
    def begin(self, chunk, blocks):
        self.blocks: dict[bytes, Slots] = {}
        self.engines = [StoringEngine(self.blocks, chunk=chunk, blocks=blocks, max_model_len=32) for _ in range(2)]
        self.numbers = 0

    @rule(which=st.integers(0, 1), stem=st.integers(0, 2), length=st.integers(1, 20), end=st.integers(0, 2),
          answer=st.integers(1, 8))
    def ask(self, which, stem, length, end, answer):
        self.numbers += 1
        prompt = [stem * 50 + index for index in range(length)] + [end]
        self.engines[which].add(f"r{self.numbers}", prompt, max_tokens=answer)

    @rule(which=st.integers(0, 1), steps=st.integers(1, 4))
    def go_on(self, which, steps):
        for _ in range(steps):
            self.engines[which].step()

    @precondition(lambda self: any(engine.worker.open for engine in self.engines))
    @rule(which=st.integers(0, 1), number=st.integers(0, 3), evicts=st.booleans())
    def end_load(self, which, number, evicts):
        if self.engines[which].worker.open:
            self.engines[which].worker.end_load(number, evicts)

    @rule(which=st.integers(0, 1), number=st.integers(0, 9))
    def abort(self, which, number):
        groups = list(self.engines[which].groups)
        if groups:
            self.engines[which].abort(groups[number % len(groups)])

    @precondition(lambda self: self.blocks)
    @rule(number=st.integers(0, 99))
    def evict(self, number):
        del self.blocks[list(self.blocks)[number % len(self.blocks)]]

    @invariant()
    def counted(self):
        for engine in getattr(self, "engines", ()):
            engine.check_references()
            engine.check_writers()

    def teardown(self):
        for engine in getattr(self, "engines", ()):
            for _ in range(400):
                while engine.worker.open:
                    engine.worker.end_load()
                if not engine.scheduler.has_unfinished_seqs() and not engine.stored.is_loading:
                    break
                engine.step()
            engine.step()
            engine.check_at_rest()


SharedStore.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharedStore = SharedStore.TestCase


def test_b104_a_conversation_over_two_engines_computes_its_new_tokens_only(blocks):
    """Each turn goes to the other engine."""
    engines = [StoringEngine(blocks, chunk=8) for _ in range(2)]
    prompt, stored = PROMPT[:9], 0
    for turn in range(6):
        engine = engines[turn % 2]
        before = engine.computed_tokens
        engine.add("turn", prompt)
        seq = engine.seq("turn")
        engine.step()
        if stored > engine.hit(prompt):
            engine.worker.end_load()
        engine.finish()
        assert engine.computed_tokens - before == len(prompt) - stored + 3
        prompt = [*seq.get_token_ids(), 60 + turn, 70 + turn]
        stored = (seq.get_len() - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token of an answer is not computed
