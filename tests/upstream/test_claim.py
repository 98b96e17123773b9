# SPDX-License-Identifier: Apache-2.0
"""B80: what an engine's arguments must be for disaggregation, seen through upstream's own way in."""

import json
import os
import socket
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from vllm import envs
from vllm.config import KVTransferConfig, ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.utils import FlexibleArgumentParser

from vllm_pd.errors import ConfigError
from vllm_pd.frontend import attach
from vllm_pd.frontend.drain import DrainMiddleware
from vllm_pd.frontend.metaserver import DirectJobMiddleware
from vllm_pd.v0 import SETTINGS_KEY, hooks
from vllm_pd.v0.selection import V0Selection

BROKER = {"broker": "tcp://127.0.0.1:5700"}


@pytest.fixture(autouse=True)
def no_engine_chosen(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.delenv("VLLM_USE_V1")


@pytest.fixture
def model() -> str:
    return os.environ["VLLM_PD_TINY_MODEL"]


def arguments(model: str, role: str = "kv_consumer", extra: dict | None = None, **more) -> EngineArgs:
    transfer = KVTransferConfig(kv_connector="PDConnector", kv_role=role,
                                kv_connector_extra_config=BROKER if extra is None else extra)
    return EngineArgs(model=model, dtype="float32", max_model_len=512, kv_transfer_config=transfer, **more)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_the_connector_selects_v0_and_is_taken_from_vllm(model, role):
    config = arguments(model, role).create_engine_config()
    assert not envs.VLLM_USE_V1
    assert config.kv_transfer_config is None
    settings = config.additional_config[SETTINGS_KEY]
    assert (settings["kv_role"], settings["extra"]) == (role, BROKER)
    assert settings["front"].startswith("ipc:///")
    assert config.scheduler_config.max_num_seqs > 0


@pytest.mark.parametrize("role, on", [("kv_consumer", True), ("kv_producer", False), ("kv_both", False)])
def test_an_engine_that_prefills_processes_its_output_at_once(model, role, on, monkeypatch):
    """The end of a job must not wait for the next step, which may be that of another prompt."""
    monkeypatch.setattr(CpuPlatform, "is_async_output_supported", classmethod(lambda cls, eager: True))
    assert arguments(model, role).create_engine_config().model_config.use_async_output_proc is on


def test_a_second_configuration_from_the_same_arguments_is_the_same(model):
    args = arguments(model)
    assert args.create_engine_config().additional_config == args.create_engine_config().additional_config


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_b80_metaservers_are_for_v1(model, role):
    with pytest.raises(ConfigError) as caught:
        arguments(model, role, {**BROKER, "metaservers": "http://a:1/v1/metaserver"}).create_engine_config()
    assert caught.value.key == "metaservers" and "use V1" in str(caught.value)


@pytest.mark.parametrize("rule", ["bounded", "refuse"])
def test_b80_other_fallbacks_are_for_v1(model, rule):
    with pytest.raises(ConfigError) as caught:
        arguments(model, "kv_consumer", {**BROKER, "fallback": rule}).create_engine_config()
    assert caught.value.key == "fallback" and f"={rule!r} can't" in str(caught.value) and "use V1" in str(caught.value)
    arguments(model, "kv_consumer", {**BROKER, "fallback": "local"}).create_engine_config()


def test_b100_a_server_of_v0_takes_no_jobs_of_its_clients(model, monkeypatch):
    monkeypatch.setattr(attach, "ServerDrain", lambda *arguments: SimpleNamespace(run_job=None, on_sigterm=None))
    monkeypatch.setattr(attach, "limit_headers", lambda config: None)
    app = FastAPI()
    app.state.vllm_config = arguments(model, "kv_producer").create_engine_config()
    hooks.attach_server(app, uvicorn.Server(uvicorn.Config(app)), lambda: None)
    attached = [one.cls for one in app.user_middleware]
    assert DrainMiddleware in attached and DirectJobMiddleware not in attached


def test_b50_another_connector_is_left_alone(model):
    transfer = KVTransferConfig(kv_connector="PyNcclConnector", kv_role="kv_producer", kv_rank=0, kv_parallel_size=2)
    args = EngineArgs(model=model, dtype="float32", max_model_len=512, kv_transfer_config=transfer)
    config = args.create_engine_config()
    assert config.kv_transfer_config is transfer
    assert SETTINGS_KEY not in config.additional_config


def test_b50_no_connector_no_trace(model):
    config = EngineArgs(model=model, dtype="float32", max_model_len=512).create_engine_config()
    assert config.kv_transfer_config is None
    assert SETTINGS_KEY not in (config.additional_config or {})


def test_b5_prefix_caching_is_on_where_the_user_said_nothing(model, caplog):
    """B5, B7: without it there are no prefix hits, no prefix reads and no shared prefill of n > 1."""
    config = arguments(model).create_engine_config()
    assert config.cache_config.enable_prefix_caching
    assert "prefix caching is on" in caplog.text and "--no-enable-prefix-caching" in caplog.text


@pytest.mark.parametrize("flag, wanted", [("--enable-prefix-caching", True), ("--no-enable-prefix-caching", False)])
def test_b5_what_the_user_says_of_prefix_caching_wins(model, flag, wanted, caplog):
    """B5: as the command line has it."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    transfer = json.dumps({"kv_connector": "PDConnector", "kv_role": "kv_consumer",
                           "kv_connector_extra_config": BROKER})
    args = EngineArgs.from_cli_args(parser.parse_args(
        ["--model", model, "--dtype", "float32", "--max-model-len", "512", "--kv-transfer-config", transfer, flag]))
    assert args.create_engine_config().cache_config.enable_prefix_caching is wanted
    assert "prefix caching" not in caplog.text


@pytest.mark.parametrize("more", [
    {"enable_lora": True}, {"prefix_caching_hash_algo": "sha256"}, {"enable_prompt_embeds": True},
    {"enable_prompt_adapter": True, "max_prompt_adapter_token": 4},
    {"kv_cache_dtype": "fp8_e5m2"},
], ids=str)
def test_b5_prefix_caching_stays_off_where_v0_has_it_wrong(model, more, caplog):
    """B5: an engine that served these before goes on to, and gives no answer from another prompt's blocks."""
    config = arguments(model, **more).create_engine_config()
    assert not config.cache_config.enable_prefix_caching
    assert "prefix caching stays off" in caplog.text and next(iter(more)) in caplog.text


def test_b50_prefix_caching_is_upstreams_choice_without_the_connector(model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")
    config = EngineArgs(model=model, dtype="float32", max_model_len=512).create_engine_config()
    assert not config.cache_config.enable_prefix_caching


def test_b50_a_configuration_without_the_connector_is_decided_as_if_none_had_had_it(model):
    """B50: VLLM_USE_V1 is one for the whole process; what PDConnector needs of it does not stay behind."""
    plain = EngineArgs(model=model, dtype="float32", max_model_len=512)
    plain.create_engine_config()
    upstreams = os.environ.pop("VLLM_USE_V1")
    assert upstreams == "1", "or nothing is shown here"
    arguments(model).create_engine_config()  # and no engine comes of it
    assert not envs.VLLM_USE_V1
    plain.create_engine_config()
    assert os.environ["VLLM_USE_V1"] == upstreams


class Engine:
    """Can be gone."""


def test_b50_the_selection_of_v0_ends_with_the_last_engine():
    """B50: a program that is started afterwards inherits nothing."""
    selection, first, second = V0Selection(), Engine(), Engine()
    for engine in (first, second):
        selection.select("PDConnector")
        selection.hold(engine)
    del first, engine
    selection.drop()
    assert not envs.VLLM_USE_V1, "the second one lives"
    del second
    assert "VLLM_USE_V1" not in os.environ


def test_the_end_of_an_engine_leaves_the_selection_to_one_that_is_configured():
    """A program that makes its next engine from a VllmConfig, and lets the old one go before."""
    selection, old, new = V0Selection(), Engine(), Engine()
    selection.select("PDConnector")
    selection.hold(old)
    selection.select("PDConnector")
    del old
    assert not envs.VLLM_USE_V1
    selection.hold(new)
    del new
    assert "VLLM_USE_V1" not in os.environ


def test_b50_an_engine_that_was_configured_and_never_built_leaves_nothing():
    selection, old = V0Selection(), Engine()
    selection.select("PDConnector")
    selection.hold(old)
    selection.select("PDConnector")
    del old
    selection.drop()
    assert "VLLM_USE_V1" not in os.environ


def test_b50_v0_by_the_user_stays(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")
    selection, engine = V0Selection(), Engine()
    selection.select("PDConnector")
    selection.hold(engine)
    del engine
    assert os.environ["VLLM_USE_V1"] == "0"


def test_b80_v1_is_refused(model, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_V1.*'?1'?.*unset it"):
        arguments(model).create_engine_config()


@pytest.mark.parametrize("extra, words", [
    ({}, "broker"),
    ({"brokers": "tcp://127.0.0.1:1"}, "brokers.*broker"),
    ({**BROKER, "lease_s": "long"}, "lease_s.*long"),
    ({**BROKER, "max_local_prefill_tokens": -1}, "max_local_prefill_tokens.*-1"),
    ({"broker": "tcp://10.0.0.1:5700"}, "broker.*10.0.0.1"),
    ({**BROKER, "store": {"memory_gib": 0}}, "memory_gib=0.*above 0"),
], ids=str)
def test_b80_a_wrong_setting_names_key_and_value(model, extra, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        arguments(model, extra=extra).create_engine_config()


@pytest.mark.parametrize("more", [
    {"tensor_parallel_size": 128}, {"pipeline_parallel_size": 2}, {"num_scheduler_steps": 8},
    {"enable_sleep_mode": True}, {"calculate_kv_scales": True}, {"preemption_mode": "swap"},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
], ids=str)
def test_b80_what_is_not_built_yet_is_refused_with_a_cure(model, more):
    key = next(iter(more))
    with pytest.raises(ConfigError, match=f"(?s){key}.*(use|remove)"):
        arguments(model, **more).create_engine_config()


def test_b80_a_port_in_use_is_refused_before_anything_starts(model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"(?s)bind.*{address}.*in use"):
            arguments(model, extra={**BROKER, "bind": f"tcp://{address}"}).create_engine_config()


def test_an_engine_that_only_prefills_computes_prompts_in_chunks(model, caplog):
    """A short job need not wait for the end of a long one."""
    scheduler = arguments(model, "kv_producer").create_engine_config().scheduler_config
    assert scheduler.chunked_prefill_enabled and scheduler.max_num_partial_prefills == 2
    assert scheduler.max_num_batched_tokens == 384 and "--no-enable-chunked-prefill" in caplog.text
    scheduler = arguments(model, "kv_producer", max_num_seqs=500).create_engine_config().scheduler_config
    assert scheduler.max_num_batched_tokens == 500
    for role in ("kv_consumer", "kv_both"):
        assert not arguments(model, role).create_engine_config().scheduler_config.chunked_prefill_enabled


def test_b7_no_chunks_of_what_v0_has_to_compute_whole(model, monkeypatch):
    """For a prefill engine's own clients: the second chunk of a prompt would be computed wrongly."""
    def has_chunks(**more) -> bool:
        return arguments(model, "kv_producer", **more).create_engine_config().scheduler_config.chunked_prefill_enabled

    assert not has_chunks(enable_prompt_adapter=True, max_prompt_adapter_token=8, enable_prefix_caching=True)
    monkeypatch.setattr(ModelConfig, "is_multimodal_model", True)
    assert not has_chunks()
    assert has_chunks(enable_chunked_prefill=True), "the user says so"


@pytest.mark.parametrize("more, chunks", [
    ({"enable_chunked_prefill": False}, False), ({"enable_chunked_prefill": True}, True),
    ({"max_num_batched_tokens": 2048}, False), ({"enable_prefix_caching": False}, False),
    ({"kv_cache_dtype": "fp8_e5m2"}, False),
], ids=str)
def test_what_the_user_says_of_chunks_wins_and_obstacles_are_those_of_prefix_caching(model, more, chunks):
    scheduler = arguments(model, "kv_producer", **more).create_engine_config().scheduler_config
    assert scheduler.chunked_prefill_enabled is chunks and scheduler.max_num_partial_prefills == 1
