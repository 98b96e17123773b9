# SPDX-License-Identifier: Apache-2.0
"""The V1 binding, on a stock vLLM 0.32 or later: this folder is run in that environment only."""
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.insert(0, str(Path(__file__).parents[1] / "proof"))  # the fleets and the broken protocols


def pytest_collection_modifyitems(items) -> None:
    """The files with engines come first: what is short runs beside them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder with the configuration of a tiny Llama, for a scheduler without an engine."""
    from tests.v1.simulated import write_model
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["sync", "async", "stages"])
def in_flight(request, monkeypatch) -> int:
    """How many steps are in flight: both of V1's scheduler classes, and the first with two pipeline stages."""
    if request.param == "stages":
        monkeypatch.setattr("tests.v1.simulated.STAGES", 2)
    return 1 if request.param == "sync" else 2


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The folder of real engines' logs. No log may report an unexpected error in a transfer thread: the thread goes on,
    once a second, so no answer shows the error."""
    folder = tmp_path_factory.mktemp("engines")
    yield folder
    failed = [log.name for log in folder.glob("*.log") if "in the transfer thread" in log.read_text(errors="replace")]
    assert not failed, f"unexpected errors in {failed}, in {folder}"


@pytest.fixture(scope="module")
def mono(logs):
    """One stock engine alone: its tokens are the right ones."""
    from tests.v1.real_engines import RealEngine
    engine = RealEngine(None, logs / "mono.log").ready()
    yield engine
    engine.stop()
