# SPDX-License-Identifier: Apache-2.0
"""B110: without keys a name is that of the first connection that stands."""
from vllm_pd.rpc.owners import MAX_PROBED, PROBE_S, NameOwners


def test_b110_a_name_is_anothers_while_its_connection_stands():
    now, asked, alive = [0.0], [], {"p"}

    def stands(name):
        asked.append(name)
        return name in alive

    owners = NameOwners(stands, lambda: now[0])
    assert not owners.is_anothers("p", None, b"1") and not owners.is_anothers("p", b"1", b"1") and not asked
    assert owners.is_anothers("p", b"1", b"2") and asked == ["p"]
    alive.clear()
    assert owners.is_anothers("p", b"1", b"2") and asked == ["p"], "it is not asked for each message of anybody"
    now[0] += PROBE_S
    assert not owners.is_anothers("p", b"1", b"2") and asked == ["p", "p"]


def test_names_that_were_asked_about_have_a_bound():
    owners = NameOwners(lambda name: True, lambda: 0.0)
    for number in range(MAX_PROBED + 10):
        assert owners.is_anothers(f"p{number}", b"1", b"2")
    assert len(owners._probed_s) == MAX_PROBED
