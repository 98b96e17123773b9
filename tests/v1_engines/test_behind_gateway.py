# SPDX-License-Identifier: Apache-2.0
"""B117: two decode engines behind gateways that know nothing of prefill engines, while everything behind them changes.
A short run of scripts/lab/behind_gateway.py. Where the gateways can't be installed the tests are skipped, and in CI
they fail.
"""
import json
import os
from pathlib import Path

import pytest
from _behind.gateways import (
    FOLDER_VARIABLE,
    GatewayName,
    envoy_command,
    envoy_config,
    gateway_command,
    installed_gateways,
    require_streams,
)
from _behind.load import LoadShape
from _behind.report import BehindRecord
from _behind.session import SHORT, BehindSettings, PhaseName, behind

from tests.verdict import WrongAnswer
from vllm_pd.bench.connection import call
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.bench.servers import HOST, Servers
from vllm_pd.errors import ConfigError
from vllm_pd.rpc.ports import take_free

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(not os.environ.get(FOLDER_VARIABLE) and not os.environ.get("CI"),
                                 reason="no gateways are installed")]
MODEL = "dummy"
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


@pytest.mark.heavy
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


def envoy(servers: Servers, config: dict, folder: Path) -> str:
    """The URL of an Envoy with this configuration, when it answers."""
    port = config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
    file = folder / f"envoy{port}.json"
    file.write_text(json.dumps(config))
    server = servers.start("envoy", port, envoy_command(installed_gateways(), file))
    servers.await_ready(server)
    return server.url


def test_b117_a_gateway_that_buffers_streams(tmp_path):
    """It is refused before the load begins, and one that does not is not."""
    with Servers(lambda *_: None) as servers:
        [worker] = servers.dummies(1)
        call(worker.url, "POST", "/dummy", {"first_s": 0.01, "gap_s": 0.02})
        require_streams(envoy(servers, envoy_config(take_free(HOST), [worker.url]), tmp_path), MODEL)
        config = envoy_config(take_free(HOST), [worker.url])
        [manager] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
        manager["typed_config"]["http_filters"].insert(0, {"name": "buffer", "typed_config": {
            "@type": "type.googleapis.com/"
                     "envoy.extensions.filters.http.file_system_buffer.v3.FileSystemBufferFilterConfig",
            "manager_config": {"thread_pool": {"thread_count": 1}}, "storage_buffer_path": str(tmp_path),
            "response": {"behavior": {"fully_buffer": {}}}}})
        with pytest.raises(ConfigError, match="32 tokens of a stream came within .*buffers answers"):
            require_streams(envoy(servers, config, tmp_path), MODEL)


def test_b117_a_worker_whose_name_resolves_to_nothing(tmp_path):
    """Envoy goes on with the other one, all the more reason to name the one that is never asked."""
    with Servers(lambda *_: None) as servers:
        workers = [*(worker.url for worker in servers.dummies(1)), "http://no-such-engine.invalid:8000"]
        url = envoy(servers, envoy_config(take_free(HOST), workers), tmp_path)
        for _ in range(10):
            ask(url, MODEL, GenerationRequest("Once", 4, token_ids=False))
        with pytest.raises(ConfigError, match="worker='http://no-such-engine.invalid:8000'.*no address is found"):
            gateway_command(GatewayName.ENVOY, take_free(HOST), workers, tmp_path)
