# SPDX-License-Identifier: Apache-2.0
"""B117: two decode engines behind gateways that know nothing of prefill engines, while everything behind them changes.
A short run of scripts/lab/behind_gateway.py. Where the gateways can't be installed the tests are skipped, and in CI
they fail.
"""
import os

import pytest
from _behind.gateways import FOLDER_VARIABLE, GatewayName
from _behind.load import LoadShape
from _behind.report import BehindRecord
from _behind.session import SHORT, BehindSettings, PhaseName, behind

from tests.verdict import WrongAnswer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE) and not os.environ.get("CI"),
                                 reason="no gateways are installed")]
LOAD = LoadShape(clients=3, answer_tokens=32, long_tokens=600, long_every_s=1.0, questions=16)


def run(gateway: GatewayName, phases: tuple[PhaseName, ...], tmp_path) -> BehindRecord:
    """The record of a run without a fault."""
    settings = BehindSettings(os.environ["VLLM_PD_TINY_MODEL"], tmp_path / "behind.log", gateway, phases, calm_s=3.0,
                              load=LOAD)
    record = behind(settings, print)
    if record.changed():
        raise WrongAnswer(f"{record.changed()[0]}")
    assert not record.faults(), record.faults()
    assert len(record.asked) > 50
    return record


def test_b117_behind_envoy(tmp_path):
    """Engines come, are replaced by others of another protocol, are killed, and leave; so is the broker. Nothing fails
    and no answer changes; only streams of the decode engine that was killed are cut."""
    record = run(GatewayName.ENVOY, SHORT, tmp_path)
    figures = {phase["phase"]: phase for phase in record.figures()["phases"]}
    for name, phase in figures.items():
        assert phase["cut"] == 0 or name == PhaseName.KILL_D, name
    for name in (PhaseName.ALONE, PhaseName.LEAVE):
        assert figures[name]["decisions"].get("local: peer", 0) > 0, figures[name]
    for name in (PhaseName.COME, PhaseName.OTHER_PROTOCOL, PhaseName.KILL_P):
        assert figures[name]["attempts"].get("done", 0) > 0, figures[name]
    assert set(figures[PhaseName.OTHER_PROTOCOL]["degraded"]) >= {"D0", "D1"}, "old and new ones refuse each other"


@pytest.mark.heavy
def test_b117_behind_vllm_router(tmp_path):
    """The same behind another one, where a decode engine is replaced and none is killed."""
    run(GatewayName.VLLM_ROUTER, (PhaseName.ALONE, PhaseName.COME, PhaseName.ROLL_D, PhaseName.KILL_P, PhaseName.LEAVE),
        tmp_path)
