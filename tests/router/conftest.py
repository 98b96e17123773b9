# SPDX-License-Identifier: Apache-2.0
"""Faulty engines and a router before them, in one loop."""
from collections.abc import Callable

from tests.steady import SteadyLoop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], SteadyLoop]]:
    """The router is tested with limits of tenths of seconds, which a busy machine may not end."""
    return {"steady": SteadyLoop}
