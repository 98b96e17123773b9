# SPDX-License-Identifier: Apache-2.0
"""B42, B44: over NATS, engines that fit each other share a queue, and others have queues of their own."""
import itertools

import msgspec
import pytest

from vllm_pd.broker.nats_store import group
from vllm_pd.protocol.messages import PROTOCOL, SPLIT_LAYOUTS, Fingerprint

SPLIT = Fingerprint(PROTOCOL, "model", "float32", "float32", 16, 4, 8, 64, SPLIT_LAYOUTS[-1])
WHOLE = msgspec.structs.replace(SPLIT, layout="whole")


@pytest.mark.parametrize("plain", [SPLIT, WHOLE], ids=["split", "whole"])
def test_b44_engines_of_a_queue_fit_each_other(plain):
    """And those of whatever powers of two, and stages, do so where heads can be split."""
    found = [msgspec.structs.replace(plain, tp=tp, pp=pp) for tp in (1, 2, 3, 4, 6, 8) for pp in (1, 2, 4)]
    for one, other in itertools.product(found, found):
        fits = one.first_difference(other) is None
        assert fits or group(one) != group(other), (one, other)
        if fits and one.tp.bit_count() == other.tp.bit_count() == 1:
            assert group(one) == group(other), (one, other)


def test_b42_any_other_difference_parts_them():
    for key, value in (("model", "other"), ("windows", (0, 64)), ("kv_heads", 4), ("engine", "vllm 0.33")):
        assert group(SPLIT) != group(msgspec.structs.replace(SPLIT, **{key: value})), key


def test_b114_with_states_only_as_many_ranks_share_it():
    ours = msgspec.structs.replace(SPLIT, windows=(0, 2), states="MAMBA2 4:float32 in 2+2 layers")
    others = [msgspec.structs.replace(ours, **change) for change in ({"tp": 4}, {"states": "GDN"}, {"states": ""})]
    assert len({group(one) for one in (ours, *others)}) == 4


def test_a_release_that_has_no_windows_shares_it():
    """The name of the queue is what it was before that field was there."""
    assert group(SPLIT) == group(msgspec.structs.replace(SPLIT, windows=()))
    assert group(WHOLE) == "1b76e25af51d7f2d254d7289"
