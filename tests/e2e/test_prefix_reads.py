# SPDX-License-Identifier: Apache-2.0
"""B5: a prefill engine reads from the decode engine what only that has in its prefix cache."""

import contextlib
from collections.abc import Iterator

import pytest
from harness import EngineProcess, prompt

BLOCK = 16
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4  # of the tiny model: layers, K and V, heads, head size, float32
READS = "prefix_reads_total:"

COUNT_COMPUTED = """
driver.computed = []
driver.original_execute = engine.model_executor.execute_model
def counted(execute_model_req):
    driver.computed += [m.token_chunk_size - len(m.computed_block_nums) * 16
                        for m in execute_model_req.seq_group_metadata_list]
    return driver.original_execute(execute_model_req)
engine.model_executor.execute_model = counted
"""
# The ends of transfers are kept back, as if the bytes were still under way.
KEEP_ENDS = """
driver.kept = []
driver.take = disagg.transfer.take_progress
def take():
    progress = driver.take()
    driver.kept += progress.finished
    progress.finished = []
    return progress
disagg.transfer.take_progress = take
"""
GIVE_ENDS = """
def give():
    progress = driver.take()
    progress.finished = driver.kept + progress.finished
    driver.kept = []
    disagg.transfer.take_progress = driver.take
    return progress
disagg.transfer.take_progress = give
"""


@contextlib.contextmanager
def reading(p: EngineProcess, wanted: str) -> Iterator[None]:
    """P's key `prefix_reads` is this, for a while."""
    p.execute("from vllm_pd.decisions.prefix import PrefixReads; wanted = disagg.prefill_jobs.prefix_cost.wanted; "
              f"disagg.prefill_jobs.prefix_cost.wanted = PrefixReads({wanted!r})")
    try:
        yield
    finally:
        p.execute("disagg.prefill_jobs.prefix_cost.wanted = wanted")


@pytest.fixture
def always(pair) -> Iterator[None]:
    with reading(pair.p, "always"):
        yield


def known_to_d(pair, blocks: int, seed: str) -> list[int]:
    """The beginning of a prompt that D has computed by itself, and P has never seen."""
    stem = prompt(blocks * BLOCK, seed)
    with pair.d.policy(max_local_prefill_tokens=10_000):
        pair.d.generate([stem + prompt(1, seed)])
    return stem


def test_b5_p_reads_what_only_d_has_and_computes_the_rest(pair, mono, always):
    """B5: right tokens, no block of the prefix computed on P or written to D, and P remembers it."""
    stem = known_to_d(pair, 6, "read")
    tokens = stem + prompt(37, "read")
    before, before_d = pair.p.counters(), pair.d.counters()
    pair.p.execute(COUNT_COMPUTED)
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    cached = pair.d.block_ids(name)[:6]
    digests = pair.d.do("block_digests", block_ids=cached)
    pair.p.do("hold", held=False)
    try:
        [result] = pair.d.wait([name])
        computed = pair.p.evaluate("driver.computed")
    finally:
        pair.p.execute("engine.model_executor.execute_model = driver.original_execute")
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    assert pair.d.do("block_digests", block_ids=cached) == digests
    assert computed == [37]
    pair.at_rest()
    counted = pair.p.counters().since(before)
    assert counted[READS + "done"] == 1
    assert counted["prefix_read_bytes_total"] == 6 * BLOCK * BYTES_PER_TOKEN
    assert counted["transfer_bytes_total"] == 3 * BLOCK * BYTES_PER_TOKEN
    assert pair.d.counters().since(before_d)["transfer_bytes_total"] == 3 * BLOCK * BYTES_PER_TOKEN
    assert pair.d.tokens([stem + prompt(21, "again")]) == mono.tokens([stem + prompt(21, "again")])
    assert pair.p.counters().since(before)[READS + "done"] == 1  # the second time P has it
    assert pair.p.hit(stem + prompt(5, "a client of P")) == 6 * BLOCK
    assert pair.p.tokens([stem + prompt(5, "a client of P")]) == mono.tokens([stem + prompt(5, "a client of P")])


def test_b5_only_what_p_lacks_is_read(pair, mono, always):
    """B5: P has the first two blocks, D the first five."""
    stem = known_to_d(pair, 5, "partly")
    pair.p.generate([stem[:2 * BLOCK] + prompt(3, "partly")])
    before = pair.p.counters()
    tokens = stem + prompt(20, "partly rest")
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])
    assert pair.p.counters().since(before)["prefix_read_bytes_total"] == 3 * BLOCK * BYTES_PER_TOKEN


def test_b5_several_reads_at_once(pair, mono, always):
    """B5, B9: jobs of one batch with prefixes of their own, and two that share one."""
    stems = [known_to_d(pair, 3, f"several {number}") for number in range(4)]
    prompts = [stem + prompt(10 + number, "several") for number, stem in enumerate([*stems, stems[0]])]
    assert pair.d.tokens(prompts) == mono.tokens(prompts)
    assert pair.d.tokens(prompts) == mono.tokens(prompts)


def test_b5_never_means_never(pair, mono):
    """B5: the operator's word."""
    with reading(pair.p, "never"):
        tokens = known_to_d(pair, 6, "never") + prompt(9, "never")
        before = pair.p.counters()
        assert pair.d.tokens([tokens]) == mono.tokens([tokens])
        assert pair.p.counters().since(before).with_prefix(READS) == {}


def test_b27_a_read_that_fails_is_made_up_for(pair, mono, always):
    """B27, B5: the prefix is computed after all, and nothing that was not read is a hit."""
    tokens = known_to_d(pair, 6, "fails") + prompt(30, "fails")
    before = pair.p.counters()
    pair.p.execute("from vllm_pd.errors import TransferError\n"
                   "agent = disagg.transfer.own.transport.transport.newest._agent\n"
                   "agent_make = agent.make_read\n"
                   "def make_read(*lists):\n    agent.make_read = agent_make\n"
                   "    raise TransferError('injected')\n"
                   "agent.make_read = make_read")
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])
    counted = pair.p.counters().since(before)
    assert (counted[READS + "failed"], counted[READS + "done"], counted["prefix_read_bytes_total"]) == (1, 0, 0)
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])


def test_b25_cancelled_while_it_reads(pair, mono, always):
    """B25, B10: P says that it is over when the read has ended, and keeps nothing of it."""
    stem = known_to_d(pair, 6, "cancelled")
    tokens = stem + prompt(30, "cancelled")
    before = pair.p.counters()
    pair.p.execute(KEEP_ENDS)
    try:
        pair.d.add(tokens, "x")
        pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
        pair.p.wait_until("driver.kept")
        assert pair.p.stats()["remote_prefilling"] == 1
        pair.d.abort("x")
        pair.p.wait_until("scheduler.quarantined")
        pair.p.do("step", count=3)
        assert pair.d.stats()["quarantined"] == 1  # no word of P's yet
    finally:
        pair.p.execute(GIVE_ENDS)
    pair.at_rest()
    counted = pair.p.counters().since(before)
    assert (counted[READS + "late"], counted[READS + "done"]) == (1, 0)
    assert pair.p.hit(tokens) == 0
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])


def test_b22_a_read_that_outlives_its_lease_is_not_used(pair, mono, always):
    """B22: the data may be as it was, but nobody vouches for it any more."""
    tokens = known_to_d(pair, 6, "late") + prompt(30, "late")
    before = pair.p.counters()
    pair.p.execute(KEEP_ENDS + "stands = disagg.protocol.prefill.lease_stands\n"
                   "disagg.protocol.prefill.lease_stands = lambda attempt: False")
    try:
        pair.d.add(tokens, "x")
        pair.p.wait_until("driver.kept")
    finally:
        pair.p.execute(GIVE_ENDS)
    [result] = pair.d.wait(["x"])
    pair.p.execute("disagg.protocol.prefill.lease_stands = stands")
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    counted = pair.p.counters().since(before)
    assert (counted[READS + "late"], counted[READS + "done"]) == (1, 0)
