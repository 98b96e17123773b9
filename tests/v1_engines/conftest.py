# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines in all their shapes, of which tests/v1 has one. This folder has the environment of engine V1."""
import os

from tests import stacks
from tests.stacks import pytest_runtest_makereport  # noqa: F401
from tests.v1.conftest import logs, mono  # noqa: F401

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
stacks.prepare()
