# SPDX-License-Identifier: Apache-2.0
"""A short run of scripts/lab/chaos.py: two decode and two prefill engines, a blow every few seconds, a lossy network,
and asynchronous output processing on the decode engines, as on CUDA."""

from _chaos.blows import Blow
from _chaos.session import ChaosSettings, chaos
from harness import model_folder

SEED = 88  # its ten blows are of every kind


def test_b20_to_b34_chaos():
    """B20, B21, B22, B23, B25, B26, B29, B34: every request ends, each answer is the one that one engine alone gives,
    and every engine that lives is back at its base."""
    settings = ChaosSettings(model=model_folder("VLLM_PD_TINY_MODEL"), seed=SEED, requests=150, episodes=10,
                             calm_episodes=2, async_output=True)
    result = chaos(settings, print)
    assert not result.faults, f"seed {settings.seed}: {result.faults}"
    figures = result.figures
    assert figures["blows_by_kind"].keys() == {blow.value for blow in Blow}
    assert figures["requests_by_end"]["answered"] >= 120 and figures["fell_back"] > 0
    assert figures["handed_over"] > 30  # it was not all done by D alone
    assert min(figures["messages"][what] for what in ("lost", "doubled", "delayed")) > 0
