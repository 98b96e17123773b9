# SPDX-License-Identifier: Apache-2.0
"""Several outputs for one prompt: prefilled once, sent once, and right."""

import pytest
from harness import prompt

BLOCK = 16
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4  # of the tiny model: layers, K and V, heads, head size, float32
SAMPLES = {
    "n": {"n": 3, "temperature": 0.9, "seed": 3},
    "best_of": {"n": 2, "best_of": 3, "temperature": 0.9, "seed": 4},
}


def all_tokens(result: dict) -> list[list[int]]:
    return [part["token_ids"] for part in result["outputs"]]


@pytest.mark.parametrize("length", [50, 3 * BLOCK, BLOCK + 1],
                         ids=["blocks and a rest", "whole blocks", "a block and a token"])
@pytest.mark.parametrize("name", SAMPLES)
def test_b7_one_prefill_and_one_transfer_for_all_samples(name, length, pair, mono):
    """B7: n, and best_of, which samples that many and answers with the likeliest n."""
    tokens, parameters = prompt(length, f"samples {name}"), SAMPLES[name]
    before, before_p = pair.d.counters(), pair.p.counters()
    [got] = pair.d.generate([tokens], **parameters)
    [expected] = mono.generate([tokens], **parameters)
    assert all_tokens(got) == all_tokens(expected)
    assert len(got["outputs"]) == parameters["n"]
    pair.at_rest()
    counted = pair.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == counted["attempts_total:done"] == 1
    assert counted.with_prefix("decisions_total:local") == {}
    assert (pair.p.counters().since(before_p)["transfer_bytes_total"]
            == -(-length // BLOCK) * BLOCK * BYTES_PER_TOKEN)


def test_b7_other_requests_pass_those_that_wait_for_a_sibling(pair, mono):
    """B7: the samples that wait for the first one's KV stand in nobody's way."""
    tokens, other = prompt(60, "held"), prompt(30, "passes")
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens, n=3, temperature=0.9, seed=5)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    assert pair.d.stats()["waiting"] == 2
    with pair.d.policy(max_local_prefill_tokens=1000):
        assert pair.d.tokens([other]) == mono.tokens([other])
    assert pair.d.stats()["waiting"] == 2
    pair.p.do("hold", held=False)
    [got] = pair.d.wait([name])
    [expected] = mono.generate([tokens], n=3, temperature=0.9, seed=5)
    assert all_tokens(got) == all_tokens(expected)


def test_b25_all_samples_go_with_an_abort(pair, mono):
    """B25, B10: the parked one and those that wait for it; then the same prompt again."""
    tokens = prompt(60, "aborted")
    pair.p.do("hold", held=True)
    name = pair.d.add(tokens, n=3, temperature=0.9, seed=6)
    pair.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    pair.d.abort(name)
    stats = pair.d.stats()
    assert (stats["waiting"], stats["remote_prefilling"], stats["split_requests"]) == (0, 0, 0)
    pair.p.do("hold", held=False)
    pair.at_rest()
    [got] = pair.d.generate([tokens], n=3, temperature=0.9, seed=6)
    [expected] = mono.generate([tokens], n=3, temperature=0.9, seed=6)
    assert all_tokens(got) == all_tokens(expected)


def test_b21_samples_whose_prefill_failed_elsewhere(pair, mono):
    """B21, B7: none waits for a sibling that will not come; all are computed here, and only one was tried."""
    tokens = prompt(60, "failed")
    pair.p.execute("import dataclasses; jobs = disagg.prefill_jobs; whole = jobs._capacity")
    pair.p.execute("jobs._capacity = dataclasses.replace(whole, vocab_size=0)")  # so that no job can run there
    before = pair.d.counters()
    try:
        [got] = pair.d.generate([tokens], n=3, temperature=0.9, seed=7)
    finally:
        pair.p.execute("jobs._capacity = whole")
    [expected] = mono.generate([tokens], n=3, temperature=0.9, seed=7)
    assert all_tokens(got) == all_tokens(expected)
    counted = pair.d.counters().since(before)
    assert counted["attempts_total:failed"] == counted["decisions_total:remote,length"] == 1
