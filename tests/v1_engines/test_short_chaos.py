# SPDX-License-Identifier: Apache-2.0
"""A short run of scripts/lab/chaos.py with V1 engines: two of each role, a blow every few seconds, a lossy network."""
import os

import pytest
from _chaos.session import ChaosSettings, EngineKind, chaos

SEED = 88  # as for V0


@pytest.mark.e2e
@pytest.mark.heavy
@pytest.mark.timeout(3000)
def test_b20_to_b34_chaos():
    """B20 to B23, B25, B26, B29, B34, B90: every request ends, each answer is the one that one stock engine gives, and
    every engine that lives is back at its base."""
    settings = ChaosSettings(model=os.environ["VLLM_PD_TINY_MODEL"], seed=SEED, engine=EngineKind.V1, requests=100,
                             episodes=8, calm_episodes=2)
    result = chaos(settings, print)
    assert not result.faults, f"seed {settings.seed}: {result.faults}"
    assert result.figures["handed_over"] > 20  # it was not all done by D alone
