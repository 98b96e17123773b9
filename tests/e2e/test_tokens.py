# SPDX-License-Identifier: Apache-2.0
"""The right answers: what two engines make together is what one makes alone."""

import random

import pytest
from harness import prompt, resumed_together

BLOCK = 16
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4  # of the tiny model: layers, K and V, heads, head size, float32


def test_b1_greedy_tokens_equal_those_of_one_engine(pair, mono):
    """B1: 200 prompts of many lengths, all prefilled remotely that have a block."""
    draw = random.Random(1)
    prompts = [prompt(draw.choice([draw.randint(1, 64), draw.randint(1, 400)]), seed) for seed in range(200)]
    remote = sum(len(one) >= BLOCK for one in prompts)
    before = pair.d.counters()
    expected = mono.tokens(prompts)
    with pair.d.policy(max_parked_fraction=1.0):
        got = pair.d.tokens(prompts)
    assert got == expected
    assert len({tuple(tokens) for tokens in expected}) > 150  # or equality would prove little
    counted = pair.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == counted["attempts_total:done"] == remote > 150
    assert counted["decisions_total:local,threshold"] == 200 - remote > 0


def test_b2_every_length_around_a_block(pair, mono):
    """B2: what is sent is ceil(len / bs) blocks, no more, whatever the length; the longest prompt is among them. What
    is less than a block stays, and is decided about once."""
    longest = pair.d.max_model_len - GREEDY["max_tokens"]
    for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, longest, pair.d.max_model_len - 1):
        tokens = prompt(length, 2000)
        before = pair.d.counters()
        parameters = {"max_tokens": min(8, pair.d.max_model_len - length)}
        assert pair.d.tokens([tokens], **parameters) == mono.tokens([tokens], **parameters)
        pair.at_rest()
        counted = pair.d.counters().since(before)
        decided = {"remote,length" if length >= BLOCK else "local,threshold": 1}
        assert counted.with_prefix("decisions_total:") == decided
        blocks = -(-length // BLOCK) if length >= BLOCK else 0
        assert counted["transfer_bytes_total"] == blocks * BLOCK * BYTES_PER_TOKEN


def test_b3_transferred_bytes_equal(pair):
    """B3: every token's keys and values in D are those that P computed, but for the last one's, which D recomputes."""
    tokens = prompt(5 * BLOCK + 5, 3000)
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens, max_tokens=30)
    pair.p.wait_until("scheduler.prefill_sending")
    [theirs] = pair.p.evaluate("[scheduler.block_manager.get_block_table(g.first_seq) "
                               "for g in scheduler.prefill_sending.values()]")
    sent = pair.p.do("block_digests", block_ids=theirs)
    pair.d.do("hold", held=True)  # it steps only while it is waited for: what it is to show is then still there
    pair.p.do("hold", held=False)
    pair.d.wait_until(f"any(g.request_id == {name!r} for g in scheduler.running)")
    received = pair.d.do("block_digests", block_ids=pair.d.block_ids(name)[:6])
    pair.d.do("hold", held=False)
    flat = [slot for block in sent for slot in block][:len(tokens)]
    assert len(set(flat)) == len(tokens)  # a cache of zeros would be equal too
    assert [slot for block in received for slot in block][:len(tokens) - 1] == flat[:-1]
    pair.d.wait([name])


def test_b4_a_prompt_that_d_has_in_its_cache_is_not_handed_over(pair, mono):
    """B4: less than a block is left to compute, so no job is made, whatever the threshold."""
    tokens = prompt(4 * BLOCK + 3, 4000)
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])
    pair.at_rest()
    before = pair.d.counters()
    name = pair.d.add(tokens, max_tokens=20)
    [result] = pair.d.wait([name])
    assert result["outputs"][0]["token_ids"][:8] == mono.tokens([tokens])[0]
    pair.at_rest()
    counted = pair.d.counters().since(before)
    assert counted["transfer_bytes_total"] == counted["attempts_total:done"] == 0
    assert counted["decisions_total:local,threshold"] == 1


def test_b4_a_prompt_that_fits_the_threshold_with_its_hit_stays(pair, mono):
    """B4: with the usual threshold a cached prompt causes no job at all."""
    tokens = prompt(6 * BLOCK + 1, 4100)
    first = pair.d.tokens([tokens])
    before = pair.d.counters()
    with pair.d.policy(max_local_prefill_tokens=10):
        assert pair.d.tokens([tokens]) == first == mono.tokens([tokens])
    assert pair.d.counters().since(before)["decisions_total:local,threshold"] == 1
    assert pair.d.counters().since(before)["attempts_total:done"] == 0


def test_b5_prefix_partly_cached_on_d(pair, mono):
    """B5: only the blocks after the hit are written; those of the hit keep their bytes."""
    stem = prompt(3 * BLOCK, 5000)
    pair.d.generate([stem + prompt(5, 5001)])
    pair.at_rest()
    tokens = stem + prompt(40, 5002)
    before = pair.d.counters()
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    table = pair.d.block_ids(name)
    digests = pair.d.do("block_digests", block_ids=table[:3])
    pair.p.do("hold", held=False)
    [result] = pair.d.wait([name])
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    assert pair.d.do("block_digests", block_ids=table[:3]) == digests
    pair.at_rest()
    assert pair.d.counters().since(before)["transfer_bytes_total"] == 3 * BLOCK * BYTES_PER_TOKEN


def test_b5_prefix_cached_on_p_is_not_computed_again(pair, mono):
    """B5: D forgets, P remembers: P has only the last block to compute and still sends all."""
    tokens = prompt(10 * BLOCK + 7, 5100)
    pair.d.generate([tokens])
    pair.at_rest()
    assert pair.d.do("reset_prefix_cache")
    pair.p.execute("""
driver.computed = []
original = engine.model_executor.execute_model
def counted(execute_model_req):
    driver.computed += [(m.token_chunk_size, len(m.computed_block_nums))
                        for m in execute_model_req.seq_group_metadata_list]
    return original(execute_model_req)
engine.model_executor.execute_model = counted
driver.original_execute = original
""")
    try:
        before = pair.d.counters()
        assert pair.d.tokens([tokens]) == mono.tokens([tokens])
        computed = pair.p.evaluate("driver.computed")
    finally:
        pair.p.execute("engine.model_executor.execute_model = driver.original_execute")
    assert computed == [[len(tokens), 10]] or computed == [[7, 10]]
    pair.at_rest()
    assert pair.d.counters().since(before)["transfer_bytes_total"] == 11 * BLOCK * BYTES_PER_TOKEN


SAMPLED = {
    "temperature": {"temperature": 0.8, "seed": 7},
    "top_p_and_k": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 8},
    "penalties": {"temperature": 0.7, "seed": 9, "presence_penalty": 0.5, "frequency_penalty": 0.5,
                  "repetition_penalty": 1.2},
    "greedy_penalties": {"repetition_penalty": 1.5},
    "logprobs": {"logprobs": 5},
    "stop_strings": {"temperature": 0.9, "seed": 10, "stop": ["a", "e"], "max_tokens": 30},
    "stop_tokens": {"temperature": 0.9, "seed": 11, "stop_token_ids": list(range(0, 49152, 7)), "max_tokens": 30},
    "min_tokens": {"temperature": 0.9, "seed": 12, "stop_token_ids": list(range(0, 49152, 3)), "min_tokens": 6,
                   "max_tokens": 30},
    "no_ignore_eos": {"temperature": 1.5, "seed": 13, "ignore_eos": False, "max_tokens": 30},
    "logit_bias": {"logit_bias": {"1234": 90.0, "4321": 89.0}},
    "bad_words": {"bad_words": [" the", "ing"]},
    "allowed_token_ids": {"allowed_token_ids": [11, 222, 3333, 4444]},
    "no_detokenize": {"detokenize": False},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_b6_b7_sampling_stays_on_d(name, pair, mono):
    """B6, B7: what only shapes the choice of tokens goes remote and is as on one engine, with several in one batch."""
    parameters = {"max_tokens": 12, **SAMPLED[name]}
    prompts = [prompt(length, f"6000 {name} {length}") for length in (20, 47, 48, 90)]
    before = pair.d.counters()
    expected = mono.generate(prompts, **parameters)
    got = pair.d.generate(prompts, **parameters)
    for one, other in zip(got, expected, strict=True):
        for ours, theirs in zip(one["outputs"], other["outputs"], strict=True):
            entries = list(zip(ours.pop("logprobs") or (), theirs.pop("logprobs") or (), strict=True))
            assert bool(entries) == ("logprobs" in parameters)
            for mine, yours in entries:
                assert mine == pytest.approx(yours, abs=1e-3)  # and the same tokens
        assert one["outputs"] == other["outputs"]
    assert pair.d.counters().since(before)["decisions_total:remote,length"] == 4


def test_b6_a_batch_of_seeded_requests(pair, mono):
    """B6: each has its own generator, from its first token on, whoever else is in the batch."""
    tokens = prompt(33, 6100)
    expected = [mono.tokens([tokens], temperature=1.0, seed=seed)[0] for seed in range(4)]
    names = [pair.d.add(tokens, temperature=1.0, seed=seed) for seed in range(4)]
    assert [r["outputs"][0]["token_ids"] for r in pair.d.wait(names)] == expected
    assert len({tuple(tokens) for tokens in expected}) == 4


GUIDES = {
    "regex": {"regex": r"[0-9]{3}-[a-z]{2}"},
    "choice": {"choice": ["prefill", "decode", "both"]},
    "json": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
}


@pytest.mark.parametrize("name", GUIDES)
def test_b7_guided_decoding(name, pair, mono):
    """B7: the guide is D's business, so it goes remote."""
    guide, tokens = GUIDES[name], prompt(40, f"7000 {name}")
    before = pair.d.counters()
    parameters = {"guided_decoding": guide, "max_tokens": 20, "ignore_eos": False}
    [got] = pair.d.generate([tokens], **parameters)
    [expected] = mono.generate([tokens], **parameters)
    assert got["outputs"] == expected["outputs"]
    assert pair.d.counters().since(before)["decisions_total:remote,length"] == 1


LOCAL = {"prompt_logprobs": {"prompt_logprobs": 2}}


@pytest.mark.parametrize("name", LOCAL)
def test_b7_what_can_not_go_remote_stays(name, pair, mono):
    """B7: counted as such, and right."""
    tokens, parameters = prompt(50, f"7100 {name}"), LOCAL[name]
    before = pair.d.counters()
    [got] = pair.d.generate([tokens], **parameters)
    [expected] = mono.generate([tokens], **parameters)
    assert [part["token_ids"] for part in got["outputs"]] == [part["token_ids"] for part in expected["outputs"]]
    if expected["prompt_logprobs"] is not None:
        assert [list(e or ()) for e in got["prompt_logprobs"]] == [list(e or ()) for e in expected["prompt_logprobs"]]
    counted = pair.d.counters().since(before)
    assert counted["decisions_total:local,feature"] >= 1
    assert counted["decisions_total:remote,length"] == 0


def test_b7_prompt_logprobs_of_a_prompt_that_is_cached(pair, mono):
    """B7: upstream's engine dies of it."""
    tokens = prompt(50, 7150)
    [expected] = mono.generate([tokens], prompt_logprobs=1, **GREEDY)
    pair.d.generate([tokens], **GREEDY)
    for engine in (pair.d, pair.d, pair.p, mono):
        [got] = engine.generate([tokens], prompt_logprobs=1, **GREEDY)
        assert [list(e or ()) for e in got["prompt_logprobs"]] == [list(e or ()) for e in expected["prompt_logprobs"]]
        assert got["outputs"][0]["token_ids"] == expected["outputs"][0]["token_ids"]


def test_b7_beam_search(pair, mono):
    """B7: many requests for one token each."""
    tokens = prompt(30, 7200)
    assert (pair.d.do("beam", prompt=tokens, beam_width=3, max_tokens=5)
            == mono.do("beam", prompt=tokens, beam_width=3, max_tokens=5))


def test_b9_two_requests_whose_shared_prefix_is_in_flight(pair, mono):
    """B9: the second comes while the first one's blocks are being filled."""
    stem = prompt(5 * BLOCK, 9000)
    prompts = [stem + prompt(9, 9001), stem + prompt(20, 9002), stem]
    pair.p.do("hold", held=True)
    names = pair.d.add_all(prompts[:1])
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    names += pair.d.add_all(prompts[1:])
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 3")
    tables = [pair.d.block_ids(name) for name in names]
    assert len({block for table in tables for block in table}) == sum(map(len, tables))
    pair.p.do("hold", held=False)
    assert [r["outputs"][0]["token_ids"] for r in pair.d.wait(names)] == mono.tokens(prompts)
    pair.d.at_rest()
    assert pair.d.tokens(prompts) == mono.tokens(prompts)


def test_b10_the_same_prompt_after_an_abort(pair, mono):
    """B10: nothing of the aborted one is a hit, before P has answered and after."""
    tokens = prompt(6 * BLOCK + 2, 10000)
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    pair.d.abort(name)
    assert pair.d.stats()["quarantined"] == 1
    assert pair.d.hit(tokens) == 0
    again = pair.d.add(tokens)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    assert pair.d.hit(tokens) == 0
    pair.p.do("hold", held=False)
    [result] = pair.d.wait([again])
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    assert pair.d.hit(tokens) == 6 * BLOCK


def test_b8_a_preempted_request_that_was_prefilled_remotely(pair, mono):
    """B8: the pool is too small for all to grow; one is recomputed here, and says what it would have said."""
    prompts = [prompt(3 * BLOCK, 8000 + seed) for seed in range(4)]
    expected = mono.tokens(prompts, max_tokens=70)
    pair.d.do("ballast", free_blocks=24)
    preempted = pair.d.evaluate("scheduler.num_cumulative_preemption")
    before = pair.d.counters()
    try:
        with pair.d.policy(max_parked_fraction=1.0):
            assert resumed_together(pair.d, pair.p, prompts, max_tokens=70) == expected
    finally:
        pair.d.do("ballast", free_blocks=0)
    assert pair.d.evaluate("scheduler.num_cumulative_preemption") > preempted
    counted = pair.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == 4
    assert counted["decisions_total:local,retry"] >= 1


def test_p_serves_its_own_clients_too(pair, mono):
    """A prefill engine is a whole engine: its own requests, beside the jobs of others."""
    prompts = [prompt(length, 11000) for length in (5, 33, 120)]
    mine = pair.p.add_all(prompts)
    theirs = pair.d.add_all(prompts)
    assert [r["outputs"][0]["token_ids"] for r in pair.p.wait(mine)] == mono.tokens(prompts)
    assert [r["outputs"][0]["token_ids"] for r in pair.d.wait(theirs)] == mono.tokens(prompts)
