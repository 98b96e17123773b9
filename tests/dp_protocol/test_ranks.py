# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench dp-ranks`: real processes, small groups."""

import pytest

from vllm_pd.bench.dp import ranks
from vllm_pd.errors import ConfigError


@pytest.mark.parametrize("backend", list(ranks.BACKENDS))
def test_what_many_ranks_cost(backend):
    """Two of five ranks have 12 passes each to run, and what is missing to equally many is dummies. Over the network
    a thread of rank 0's tells the ranks what is asked; in shared memory there is none, and all five ranks are woken."""
    bench = ranks.RanksBench((5, ), backend, busy=2, requests=3, tokens=4, step_s=0.001)
    [found] = ranks.measure(bench, show=lambda _: None)
    assert found["forwards"] >= 12 and found["dummies"] == 5 * found["forwards"] - 2 * 12
    if backend == "network":
        assert found["messages"] > found["asks"] > 0 and 0 < found["coordinator_cpu_s"] < found["cpu_s"]
    else:
        assert found["messages"] % 5 == 0 and found["coordinator_cpu_s"] == 0
    assert len(ranks.table([found, found]).columns) == 3


@pytest.mark.parametrize("key, given", [
    ("--backend", {"backend": "pigeons"}), ("--ranks", {"sizes": (16, 1)}), ("--busy", {"busy": 3}),
    ("--requests", {"requests": 0}), ("--step-ms", {"step_s": -0.1}),
])  # fmt: skip
def test_b80_what_cannot_be_measured_is_refused(key, given):
    """B80: the message names the option."""
    with pytest.raises(ConfigError, match=key):
        ranks.RanksBench(**({"sizes": (2, )} | given)).check()
