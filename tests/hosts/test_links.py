# SPDX-License-Identifier: Apache-2.0
"""B112: a decode engine between a prefill engine beside it and one across a slow link."""
import time

import pytest

from tests.hosts.fleet import BLOCK_SIZE, LARGE_HEAD, PROMPT_BLOCKS, Fleet, HostedEngine
from tests.hosts.nats_fleet import NatsFleet
from vllm_pd.decisions.paths import LAST_HAND_OVERS

PROMPTS = 40
ROUNDS = 5
SLOW = "8mbit"
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * LARGE_HEAD * 4  # layers, keys and values, tokens, heads, sizes of a head, int32
PROMPT_BYTES = PROMPT_BLOCKS * BLOCK_BYTES  # 2.5 s at that rate
REST_S = 30.0


def serve(d: HostedEngine, prefills: list[HostedEngine], prompts: int) -> list[int]:
    """Have D answer so many prompts. Returns how many each of the others has prefilled of them."""
    before, begin = [engine.report()["moved"] for engine in prefills], time.monotonic()
    assert d.serve(prompts) == {"remote": prompts}
    for engine in prefills:
        engine.wait_until(lambda report: not report["jobs"], "its writes have ended")
    jobs = [round((engine.report()["moved"] - moved) / PROMPT_BYTES)
            for engine, moved in zip(prefills, before, strict=True)]
    print(f"{prompts} prompts in {time.monotonic() - begin:.1f} s, by {jobs}")
    assert sum(jobs) == prompts
    return jobs


@pytest.mark.parametrize("kind", [Fleet, NatsFleet])
def test_b112_the_prefill_engine_across_a_slow_link_gets_few_jobs(rack, kind):
    """Two prefill engines have as much to do while both are near. One link becomes slow: what is written over it tells
    so, and from then on nearly all prompts go to the other one. It is no exclusion: once that is gone, the one across
    the link has all."""
    hosts = decode, near_host, far_host = [rack.host(name) for name in ("d", "near", "far")]
    # Messages wait behind the KV.
    fleet = Fleet(decode, lease_s=30.0) if kind is Fleet else NatsFleet([decode], lease_s=30.0)
    d, near, far = engines = [fleet.engine(host, role, LARGE_HEAD) for host, role in zip(
        hosts, ("kv_consumer", "kv_producer", "kv_producer"), strict=True)]
    for engine in engines:
        engine.start()
    d.wait_until(lambda report: report["prefill_peers"] == 2, "both are there")
    serve(d, [near, far], 4)  # connections are made
    equal = serve(d, [near, far], PROMPTS)
    assert min(equal) >= PROMPTS / 5, "about as many"
    far_host.shape("eth0", SLOW)
    across = [serve(d, [near, far], PROMPTS)[1]]
    while across[-1]:
        assert len(across) < ROUNDS, f"it is known to be slow after a few prompts: {across}"
        across.append(serve(d, [near, far], PROMPTS)[1])
    assert 1 <= sum(across) <= LAST_HAND_OVERS + PROMPTS // 4, "it is tried, and soon no more"
    assert serve(d, [near, far], PROMPTS)[1] <= 1
    begin = f"  prefill engine {far.member['incarnation']}: "
    assert any(line.startswith(begin) and "more than the nearest" in line
               for line in fleet.status(decode, d.member["incarnation"])), "an operator sees which one is far"
    near_host.power_off()
    d.wait_until(lambda report: report["prefill_peers"] == 1, "one is left")
    assert serve(d, [far], 2) == [2]
    for engine in (d, far):
        engine.rests(REST_S)
