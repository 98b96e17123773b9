# SPDX-License-Identifier: Apache-2.0
"""The patched scheduler where a prefill engine reads the beginning of a prompt, and where samples share a prefill."""

import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine

PROMPT = list(range(10, 30))
READ = 12  # tokens: three blocks of five


@pytest.mark.parametrize("chunk", [None, 8])
class TestReads:
    """B5: a job of a peer is parked, read into, and goes on from there."""

    @pytest.fixture
    def engine(self, chunk):
        engine = SimulatedEngine(chunk=chunk, wants_remote=lambda group: False)
        asked = set()
        engine.peers.wants_prefix = lambda group: not (group.request_id in asked or asked.add(group.request_id))
        return engine

    def parked(self, engine) -> None:
        engine.add("job", PROMPT, remote_decode="A")
        engine.step()
        assert list(engine.scheduler.remote_prefilling) == ["A"] and engine.computed_tokens == 0

    def finish(self, engine) -> None:
        engine.run()
        assert list(engine.scheduler.prefill_sending) == ["A"]
        engine.step(finished_transfers=["A"])
        engine.check_at_rest()

    def test_b5_what_was_read_is_not_computed(self, engine):
        self.parked(engine)
        engine.write_remotely("A", READ)
        engine.step(read_prefixes={"A": READ}, finished_transfers=["A"])
        self.finish(engine)
        assert engine.computed_tokens == len(PROMPT) - READ
        assert engine.hit(PROMPT) == len(PROMPT)

    def test_b10_a_read_that_failed_leaves_no_hit(self, engine):
        self.parked(engine)
        engine.write_remotely("A", 7)  # some of it has landed
        assert engine.hit(PROMPT) == 0
        engine.step(failed_prefills=["A"], finished_transfers=["A"])
        self.finish(engine)
        assert engine.computed_tokens == len(PROMPT)

    def test_b25_an_abort_while_it_reads_keeps_the_blocks_until_the_end(self, engine):
        self.parked(engine)
        engine.abort("job")
        assert list(engine.scheduler.quarantined) == ["A"]
        engine.step(read_prefixes={"A": READ}, finished_transfers=["A"])  # it had just arrived: too late
        assert engine.hit(PROMPT) == 0
        engine.check_at_rest()

    def test_b5_others_go_on_meanwhile_and_share_nothing_of_it(self, engine):
        self.parked(engine)
        engine.peers.wants_prefix = lambda group: False
        engine.add("client", PROMPT + [1, 2, 3])
        engine.run()
        engine.write_remotely("A", READ)
        engine.check_writers()
        engine.step(read_prefixes={"A": READ}, finished_transfers=["A"])  # cached by the client by now
        self.finish(engine)

    def test_b5_a_block_that_another_computes_at_that_moment(self, engine, chunk):
        """The client has allocated the blocks and computed none or some of them when the read arrives."""
        self.parked(engine)
        engine.peers.wants_prefix = lambda group: False
        engine.add("client", PROMPT + [1, 2, 3])
        engine.step()
        engine.write_remotely("A", READ)
        engine.step(read_prefixes={"A": READ}, finished_transfers=["A"])
        self.finish(engine)

    def test_b31_where_the_pool_is_full_it_is_computed_when_there_is_room(self, chunk):
        """B31: what was read may be evicted before its turn comes; it is not read again, and ends all the same."""
        engine = SimulatedEngine(blocks=7, chunk=chunk, wants_remote=lambda group: False)
        asked = set()
        engine.peers.wants_prefix = lambda group: not (group.request_id in asked or asked.add(group.request_id))
        self.parked(engine)
        engine.write_remotely("A", READ)
        engine.add("client", [1] * 8, max_tokens=12)
        engine.step(read_prefixes={"A": READ}, finished_transfers=["A"])
        for _ in range(50):
            engine.step(finished_transfers=list(engine.scheduler.prefill_sending))
        engine.check_at_rest()


@pytest.mark.parametrize("chunk", [None, 8])
class TestSamples:
    """B7: groups with one prompt, of which one is prefilled elsewhere while the others wait."""

    @pytest.fixture
    def engine(self, chunk):
        engine = SimulatedEngine(chunk=chunk, wants_remote=lambda group: group.request_id == "s0")
        engine.peers.waits = lambda group: (group.request_id.startswith("s")
                                            and bool(engine.scheduler.remote_prefilling))
        for name in ("s0", "s1", "s2"):
            engine.add(name, PROMPT)
        engine.step()
        return engine

    def test_b7_they_wait_in_their_order_and_hold_nothing(self, engine):
        assert [group.request_id for group in engine.scheduler.waiting] == ["s1", "s2"]
        assert engine.computed_tokens == 0
        engine.add("other", [1] * 10)
        assert engine.step() == ["other"] or engine.step() == ["other"]
        assert [group.request_id for group in engine.scheduler.waiting] == ["s1", "s2"]
        attempt = engine.attempt_of("s0")
        engine.arrive(attempt)
        engine.finish()

    def test_b7_then_their_prompt_is_a_hit(self, engine):
        attempt = engine.attempt_of("s0")
        engine.write_remotely(attempt)
        before = engine.computed_tokens
        engine.step(finished_prefills=[attempt])
        engine.run()
        outputs = 3 * 4
        # One token a step each: of the prompt no more than its last, which samples (or its last block).
        assert engine.computed_tokens - before <= outputs + 2 * BLOCK_SIZE
        engine.check_at_rest()

    def test_b21_the_failure_of_the_first_lets_them_go(self, engine):
        attempt = engine.attempt_of("s0")
        engine.peers.wants_remote = lambda group: False
        engine.step(failed_prefills=[attempt], finished_transfers=[attempt])
        assert not engine.scheduler.waiting or engine.scheduler.waiting[0].request_id != "s0"
        engine.finish()

    def test_b25_the_abort_of_the_first_lets_them_go(self, engine):
        attempt = engine.attempt_of("s0")
        engine.abort("s0")
        engine.step(finished_transfers=[attempt])
        engine.finish()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize("swap_blocks", [0, 32], ids=["recompute", "swap"])
def test_b8_preempted_after_a_remote_prefill(swap_blocks, chunk, caching):
    """B8: by recompute and by swap, with and without caching and chunks: every attention sees its own past only, and
    the tokens are those of an engine with room for all."""
    def run(blocks: int, remote: bool) -> tuple[list, SimulatedEngine]:
        seen: set[str] = set()
        engine = SimulatedEngine(blocks=blocks, chunk=chunk, caching=caching, swap_blocks=swap_blocks,
                                 wants_remote=lambda group: remote and group.request_id not in seen)
        for name in ("a", "b"):
            engine.add(name, [ord(name)] * 20, max_tokens=20)
        sequences = [engine.seq(name) for name in ("a", "b")]
        engine.step()
        if remote:
            seen |= {"a", "b"}
            attempts = [engine.attempt_of(name) for name in ("a", "b")]
            for attempt in attempts:
                engine.write_remotely(attempt)
            engine.step(finished_prefills=attempts)
        swapped = 0
        for _ in range(200):
            if not engine.scheduler.has_schedulable_seqs():
                break
            engine.step()
            swapped += len(engine.scheduler.swapped)
        assert bool(swapped) == bool(swap_blocks and blocks < 20)
        return [list(sequence.get_output_token_ids()) for sequence in sequences], engine

    expected, _ = run(64, remote=False)
    got, engine = run(14, remote=True)
    assert got == expected
    assert engine.scheduler.num_cumulative_preemption > 0
    engine.check_at_rest()
