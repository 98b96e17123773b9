# SPDX-License-Identifier: Apache-2.0
"""An answer to a utility call for which nobody waits any more."""
import asyncio
from concurrent.futures import Future

import pytest
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core_client import _process_utility_output


@pytest.mark.parametrize("failure", [None, "Call to sleep method failed"])
async def test_a_caller_that_has_gone_away_does_not_end_the_front_end(failure):
    """Its future is cancelled; setting it would end the task that reads all answers."""
    futures = {1: asyncio.get_running_loop().create_future(), 2: Future()}
    for future in futures.values():
        future.cancel()
    for call in list(futures):
        _process_utility_output(UtilityOutput(call, failure_message=failure), futures)
    assert not futures


async def test_a_caller_that_waits_gets_the_answer():
    futures = {1: asyncio.get_running_loop().create_future(), 2: Future()}
    told = dict(futures)
    _process_utility_output(UtilityOutput(1, result="yes"), futures)
    _process_utility_output(UtilityOutput(2, failure_message="no"), futures)
    assert await told[1] == "yes" and "no" in str(told[2].exception())
