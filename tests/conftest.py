# SPDX-License-Identifier: Apache-2.0
"""How all tests draw examples (the same ones each time, however long the machine takes for one), and how a failure is
judged (tests/verdict.py).

With VLLM_PD_EXAMPLES set, as for a long search, they are drawn at random.
"""
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.searches import pytest_collection_modifyitems, pytest_runtest_call  # noqa: F401
from tests.verdict import (  # noqa: F401  pytest finds hooks in a conftest
    pytest_assertrepr_compare,
    pytest_configure,
    pytest_handlecrashitem,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_sessionfinish,
)

pytest.register_assert_rewrite("tests.bindings")  # before anything imports its tests

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow],
                          derandomize="VLLM_PD_EXAMPLES" not in os.environ)
settings.load_profile("steady")
