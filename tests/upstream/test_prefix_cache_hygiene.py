# SPDX-License-Identifier: Apache-2.0
"""Only what was computed is ever a prefix hit: upstream's own aborts, and the blocks that a peer fills."""

import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine

TOKENS = list(range(100, 122))  # five full blocks and two tokens
FULL = len(TOKENS) // BLOCK_SIZE * BLOCK_SIZE


def local(**options) -> SimulatedEngine:
    return SimulatedEngine(wants_remote=lambda group: False, **options)


def remote_if_named(**options) -> SimulatedEngine:
    return SimulatedEngine(wants_remote=lambda group: group.request_id.startswith("remote"), **options)


def test_a_completed_prompt_is_a_hit():
    """The guard against marking too little: what one request computed, the next one finds."""
    engine = local()
    engine.add("a", TOKENS)
    engine.run()
    assert engine.hit(TOKENS) == FULL
    computed = engine.computed_tokens
    engine.add("b", TOKENS, max_tokens=1)
    engine.run()
    assert engine.computed_tokens - computed == len(TOKENS) - FULL
    engine.check_at_rest()


@pytest.mark.parametrize("decode_steps", [1, BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_generated_blocks_are_hits_too(decode_steps):
    """Blocks that decoding fills are computed as well; with multi-step scheduling several between two schedules."""
    engine = local(decode_steps=decode_steps)
    engine.add("a", TOKENS, max_tokens=31)
    seq = engine.seq("a")
    while engine.scheduler.has_schedulable_seqs():
        tokens = list(seq.get_token_ids())  # what is sampled after the last schedule is in no block yet
        engine.step()
    assert engine.hit(tokens) == len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    engine.check_at_rest()


@pytest.mark.parametrize("chunk", [4, 6, 8])
def test_b10_an_aborted_chunked_prefill_leaves_hits_on_computed_blocks_only(chunk):
    """B10 and upstream's own defect: blocks of chunks that never ran are no hits, those that ran are."""
    engine = local(chunk=chunk)
    engine.add("a", TOKENS)
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.hit(TOKENS) == 2 * (chunk // BLOCK_SIZE) * BLOCK_SIZE  # chunks end at the edge of a block
    engine.add("b", TOKENS)  # must compute the rest, or its attention fails the simulation
    engine.run()
    assert engine.hit(TOKENS) == FULL
    engine.check_at_rest()


def test_b50_a_free_lists_no_hashes_while_every_block_is_computed(monkeypatch):
    """B50: upstream's free does not list them, and each sequence is freed."""
    engine = local(chunk=8)
    listed = []
    allocator = engine.manager.block_allocator
    forget = allocator.forget_uncomputed_blocks
    monkeypatch.setattr(allocator, "forget_uncomputed_blocks", lambda hashes: listed.append(hashes) or forget(hashes))
    engine.add("a", TOKENS, max_tokens=1)
    engine.run()
    assert not listed
    engine.add("b", TOKENS[::-1])
    engine.step()
    engine.abort("b")  # the guard: here they are needed
    assert [len(hashes) for hashes in listed] == [6]
    engine.check_at_rest()


def test_b10_an_abort_does_not_disturb_another_request_with_the_same_prompt():
    """B10: two requests share registered blocks, one leaves between two chunks."""
    engine = local(chunk=8)
    engine.add("a", TOKENS)
    engine.step()
    engine.add("b", TOKENS)
    engine.step()
    engine.abort("a")
    engine.finish()
    assert engine.hit(TOKENS) == FULL


def test_b10_nothing_runs_between_an_admission_and_its_abort():
    """B10: a whole prompt that was admitted and then aborted before any other step: its one step did compute it."""
    engine = local()
    engine.add("a", TOKENS)
    engine.step()
    engine.abort("a")
    assert engine.hit(TOKENS) == FULL
    engine.check_at_rest()


def test_b9_pending_blocks_are_no_hit_until_the_commit():
    """B9: neither while the peer writes nor when another request is scheduled, but from the commit on."""
    engine = remote_if_named()
    engine.add("remote", TOKENS)
    engine.step()
    assert engine.hit(TOKENS) == 0
    engine.add("other", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    engine.run()
    assert engine.hit(TOKENS) == 0
    engine.add("same", TOKENS)  # computes it by itself, in blocks of its own
    engine.step()
    attempt = engine.attempt_of("remote")
    assert not set(engine.peers.work[attempt].block_ids) & set(engine.manager.get_block_table(engine.seq("same")))
    engine.arrive(attempt)
    assert engine.hit(TOKENS) == FULL
    engine.finish()


def test_b4_a_committed_prompt_is_a_hit_and_survives_its_request():
    """B4: what a peer wrote is found by the next request as if it had been computed here."""
    engine = remote_if_named()
    attempt = engine.park("remote", TOKENS)
    engine.arrive(attempt)
    engine.finish()
    assert engine.hit(TOKENS) == FULL
    computed = engine.computed_tokens
    engine.add("again", TOKENS, max_tokens=1)
    engine.run()
    assert engine.computed_tokens - computed == len(TOKENS) - FULL


def test_b5_a_cached_prefix_is_shared_and_only_the_rest_is_pending():
    """B5: the peer is given the blocks after the hit; those of the hit have a second owner."""
    engine = remote_if_named()
    engine.add("local", TOKENS[:10])
    engine.run()
    engine.add("remote", TOKENS)
    engine.step()
    work = engine.peers.work[engine.attempt_of("remote")]
    assert work.cached_tokens == 8
    engine.add("also", TOKENS[:9])
    engine.step()
    assert engine.manager.get_block_table(engine.seq("also"))[:2] == work.block_ids[:2]
    engine.check_writers()
    attempt = engine.attempt_of("remote")
    engine.arrive(attempt)
    engine.finish()


def test_b9_commit_when_the_same_content_was_cached_meanwhile():
    """B9: the cached block is used, the new one goes back to the pool, and the request goes on."""
    engine = remote_if_named()
    engine.add("remote", TOKENS)
    engine.step()
    engine.add("same", TOKENS)
    engine.run()
    free = engine.manager.get_num_free_gpu_blocks()
    attempt = engine.attempt_of("remote")
    engine.arrive(attempt)
    assert engine.manager.get_num_free_gpu_blocks() == free  # five evictable ones taken, five plain ones returned
    assert engine.manager.get_block_table(engine.seq("remote"))[:5] != engine.peers.work[attempt].block_ids[:5]
    engine.check_references()
    engine.finish()


def test_b9_commit_when_another_sequence_has_registered_but_not_computed_it():
    """B9: a chunked prefill of the same prompt is half-way. Neither may read what the other has not written."""
    engine = remote_if_named(chunk=8)
    engine.add("remote", TOKENS)
    engine.step()
    engine.add("same", TOKENS)
    engine.step()  # eight of 22 tokens computed, all five blocks registered
    attempt = engine.attempt_of("remote")
    engine.arrive(attempt)
    engine.check_references()
    engine.finish()
    assert engine.hit(TOKENS) == FULL


def test_b9_commit_after_the_other_sequence_was_aborted_half_way():
    """B9, B10: as before, but the one that had registered the blocks goes away right before or right after."""
    for abort_first in (True, False):
        engine = remote_if_named(chunk=8)
        engine.add("remote", TOKENS)
        engine.step()
        engine.add("same", TOKENS)
        engine.step()
        attempt = engine.attempt_of("remote")
        engine.write_remotely(attempt)
        if abort_first:
            engine.abort("same")
        engine.step(finished_prefills=[attempt])
        if not abort_first:
            engine.abort("same")
        engine.check_references()
        engine.add("third", TOKENS)
        engine.finish()
        assert engine.hit(TOKENS) == FULL


def test_b10_a_failed_remote_prefill_leaves_no_hit():
    """B10: the peer wrote half of it and gave up; the prompt is computed here, in other blocks."""
    engine = remote_if_named()
    engine.peers.wants_remote = lambda group: not engine.peers.work
    attempt = engine.park("remote", TOKENS)
    engine.write_remotely(attempt, tokens=10)
    engine.step(failed_prefills=[attempt])
    assert attempt in engine.scheduler.quarantined
    assert not set(engine.peers.work[attempt].block_ids) & set(engine.manager.get_block_table(engine.seq("remote")))
    engine.write_remotely(attempt)  # late
    engine.run()
    engine.step(finished_transfers=[attempt])
    engine.check_at_rest()
    assert engine.hit(TOKENS) == FULL  # of the local computation


def test_b10_an_aborted_remote_prefill_leaves_no_hit_even_when_released():
    """B10: aborted, released, and still not a hit for the same prompt."""
    engine = remote_if_named()
    attempt = engine.park("remote", TOKENS)
    engine.abort("remote")
    assert engine.hit(TOKENS) == 0
    engine.write_remotely(attempt)
    engine.step(finished_transfers=[attempt])
    assert engine.hit(TOKENS) == 0
    engine.check_at_rest()


def test_b20_pending_blocks_without_prefix_caching():
    """B20: the plain pool."""
    engine = remote_if_named(caching=False)
    for name in ("remote1", "remote2"):
        engine.add(name, TOKENS)
    engine.step()
    first, second = engine.attempt_of("remote1"), engine.attempt_of("remote2")
    engine.check_writers()
    engine.abort("remote2")
    engine.write_remotely(first)
    engine.step(finished_prefills=[first], finished_transfers=[second])
    engine.finish()


def test_b8_a_preempted_sequence_is_recomputed():
    """B8: pool too small for both to grow. The one that a peer had prefilled gives way, and is computed here."""
    seen: set[str] = set()
    engine = SimulatedEngine(blocks=14, wants_remote=lambda group: group.request_id not in seen)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 20, max_tokens=20)
    engine.step()
    attempts = {name: engine.attempt_of(name) for name in ("a", "b")}
    seen |= {"a", "b"}
    for attempt in attempts.values():
        engine.write_remotely(attempt)
    engine.step(finished_prefills=list(attempts.values()))
    engine.run()
    assert engine.scheduler.num_cumulative_preemption > 0
    engine.check_at_rest()


def test_b62_a_hit_is_contiguous_though_its_first_block_was_evicted():
    """B62: blocks are not always evicted from the end of a prefix; a hit still ends at the first gap. Here the first
    block is looked for least, as a parked request that was aborted is the last to have held it."""
    engine = remote_if_named(blocks=8)
    engine.add("local", TOKENS, max_tokens=1)
    engine.run()
    attempt = engine.park("remote", TOKENS[:6])
    engine.abort("remote")
    engine.step(finished_transfers=[attempt])
    engine.add("other", [1] * 15, max_tokens=1)  # takes the two blocks that are free and two of the cached
    engine.run()
    hit = engine.hit(TOKENS)
    engine.add("again", TOKENS, max_tokens=1)
    engine.run()
    assert hit < FULL
    engine.check_at_rest()
