# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines on several machines: where there can be none the tests are skipped, and in CI they fail. This folder
is run in the environment of engine V1 only."""
from tests.hosts.conftest import tools  # noqa: F401
