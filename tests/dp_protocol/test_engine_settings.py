# SPDX-License-Identifier: Apache-2.0
"""What the engine's side of the step sync reads from the configuration and from the scheduler."""

from types import SimpleNamespace

import pytest

from vllm_pd.dp.interface import SyncSettings
from vllm_pd.errors import ConfigError
from vllm_pd.v0.dp.engine import most_steps, settings_of


def request(tokens: int, computed: int, most: int, given: int = 0) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=tokens, num_computed_tokens=computed, max_tokens=most, num_output_tokens=given)


def steps(*requests: SimpleNamespace) -> int:
    return most_steps(SimpleNamespace(requests=dict(enumerate(requests))), budget_tokens=100)


def test_settings_default_and_given():
    assert settings_of(None).sync_settings(False, False) == SyncSettings(call_wait_s=0.0, lockstep=True)
    assert settings_of({"other": 1}).shared_memory
    found = settings_of({"dp_sync": {"horizon": 3, "shared_memory": False}})
    assert found.sync_settings(True, False) == SyncSettings(horizon=3, call_wait_s=30.0, lockstep=True)
    assert not found.shared_memory


@pytest.mark.parametrize("given", [{"horizont": 3}, {"horizon": "many"}, 7])
def test_b80_settings_that_cannot_be_used(given):
    """B80: an unknown key or a wrong type: refused; the message names the key and what may be set."""
    with pytest.raises(ConfigError, match=r"additional_config\.dp_sync.*horizon"):
        settings_of({"dp_sync": given})


def test_most_steps_is_exact_for_what_runs_alone():
    """The step just scheduled counts; a prompt in chunks needs one step more for each chunk still to come."""
    assert steps() == 1
    assert steps(request(50, 50, most=1)) == 1  # its whole prompt is in this step
    assert steps(request(50, 50, most=8)) == 8
    assert steps(request(57, 57, most=8, given=7)) == 1  # its last token
    assert steps(request(350, 100, most=1)) == 4  # the first of four chunks
    assert steps(request(50, 50, most=8), request(350, 300, most=20)) == 21
