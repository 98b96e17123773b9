# SPDX-License-Identifier: Apache-2.0
"""Faulty engines and a router before them, in one loop."""
import os
import sys
from collections.abc import Callable

from tests.steady import SteadyLoop

PICKER_FOLDER = os.environ.get("VLLM_PD_PICKER")
if PICKER_FOLDER:  # at the end: what the environment has itself comes first
    sys.path.append(PICKER_FOLDER)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], SteadyLoop]]:
    """The router is tested with limits of tenths of seconds, which a busy machine may not end."""
    return {"steady": SteadyLoop}
