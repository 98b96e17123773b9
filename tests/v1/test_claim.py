# SPDX-License-Identifier: Apache-2.0
"""One flag: what the plugin sets where a configuration names PDConnector, and what it refuses (B80, B91, B92)."""
import json
import os
import pickle
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from vllm.config import KVEventsConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.config.diffusion import DiffusionConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from vllm_pd.errors import ConfigError
from vllm_pd.frontend import attach
from vllm_pd.frontend.drain import DrainMiddleware
from vllm_pd.frontend.metaserver import DirectJobMiddleware, SeveralAnswersMiddleware
from vllm_pd.model import checks
from vllm_pd.model.layers import check_index, check_states
from vllm_pd.model.offloading import hybrid_flag
from vllm_pd.model.source_names import Required
from vllm_pd.model.store_checks import check_store
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import take_free_run
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1 import front, required
from vllm_pd.v1.beside import config as beside
from vllm_pd.v1.beside.config import offloading_config
from vllm_pd.v1.beside.connector import PDConnectorBeside
from vllm_pd.v1.claim import SCHEDULER, check_config
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.plugin import register
from vllm_pd.v1.settings import OWN_KEY, front_of_rank, fronts_of_server, read_settings
from vllm_pd.v1.store.with_peers import PDConnectorWithStore

BROKER = {"broker": "tcp://127.0.0.1:5700"}
STORED = {**BROKER, "store": {}}


@pytest.fixture(autouse=True)
def nixl_works(monkeypatch):
    """It takes a process of its own each time, and is no part of what is tested here."""
    monkeypatch.setattr("vllm_pd.v1.claim.check_nixl", lambda host: None)


@pytest.fixture(scope="module", autouse=True)
def activated():
    """The plugin's wrap of `VllmConfig` is there for these tests only: others of this process make a configuration that
    vLLM leaves as it is."""
    upstream = VllmConfig._verify_kv_transfer_compat
    yield
    VllmConfig._verify_kv_transfer_compat = upstream


def transfer(role: str = "kv_consumer", extra: dict | None = None, **more) -> KVTransferConfig:
    return KVTransferConfig(**{"kv_connector": "PDConnector", "kv_role": role,
                               "kv_connector_extra_config": extra or BROKER, **more})


OURS = {"kv_connector": "PDConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": BROKER}
TIER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}


def several(*children: str | dict) -> dict:
    """What `transfer` takes for a MultiConnector of these; of a name alone: ours, or one without settings."""
    each = [one if isinstance(one, dict) else {**OURS, "kv_connector": one} for one in children]
    return {"kv_connector": "MultiConnector", "role": "kv_both", "extra": {"connectors": each}}


def configure(kv: KVTransferConfig | None, **more) -> VllmConfig:
    return EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512, enforce_eager=True,
                      kv_transfer_config=kv, **more).create_engine_config()


POSTING = {**BROKER, "metaservers": "http://127.0.0.1:9/v1/metaserver"}


@pytest.mark.parametrize("role, extra, found", [
    ("kv_consumer", BROKER, set()), ("kv_consumer", POSTING, {SeveralAnswersMiddleware}),
    ("kv_producer", POSTING, {DirectJobMiddleware}), ("kv_both", BROKER, {DirectJobMiddleware}),
    ("kv_both", POSTING, {DirectJobMiddleware, SeveralAnswersMiddleware})])
def test_b100_what_a_server_does_with_jobs_is_its_engine_s_role(role, extra, found, monkeypatch):
    monkeypatch.setattr(front.asyncio, "get_running_loop", lambda: SimpleNamespace(
        add_signal_handler=lambda number, call: None))
    monkeypatch.setattr(attach, "ServerDrain", lambda *arguments: SimpleNamespace(run_job=None, on_sigterm=None))
    monkeypatch.setattr(attach, "limit_headers", lambda config: None)
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(vllm_config=configure(transfer(role, extra)))
    front._attach(app, SimpleNamespace(config=uvicorn.Config(app)))
    attached = {one.cls for one in app.user_middleware}
    assert DrainMiddleware in attached and attached & {DirectJobMiddleware, SeveralAnswersMiddleware} == found


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer", "kv_both"])
def test_b91_one_flag_sets_what_the_binding_needs(role):
    """B91"""
    mine = transfer(role)
    config = configure(mine)
    theirs = config.kv_transfer_config
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert (theirs.kv_role, theirs.kv_load_failure_policy, theirs.engine_id) == ("kv_both", "recompute", mine.engine_id)
    settings = read_settings(config)
    assert (settings.kv_role, settings.extra) == (role, BROKER)
    assert settings.front.startswith("ipc:///")
    assert (mine.kv_role, mine.kv_connector_extra_config) == (role, BROKER), "the user's own object is not changed"


def test_b91_engines_beside_it_stay_as_they_are():
    """B91: in the same process, before and after; and a second configuration of one object, which each process of a
    server makes."""
    shared = transfer()
    first, second, third = configure(shared), configure(shared), configure(transfer())
    assert read_settings(first).front == read_settings(second).front != read_settings(third).front
    plain = configure(None)
    assert plain.scheduler_config.scheduler_cls is None and plain.kv_transfer_config is None
    other = configure(KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"))
    assert other.scheduler_config.scheduler_cls is None
    assert other.kv_transfer_config.kv_load_failure_policy == "fail"


def test_b104_the_store_brings_another_class_of_the_same_name():
    """B104: V1 finds it by its module, and PDConnector's own parts find their settings as ever. Without the key all
    stays as it was."""
    config = configure(transfer(extra=STORED))
    config.__post_init__()
    for kv, expected in ((config.kv_transfer_config, PDConnectorWithStore),
                         (configure(transfer()).kv_transfer_config, PDConnector)):
        assert KVConnectorFactory.get_connector_class(kv) is expected
        assert (kv.kv_connector, kv.kv_load_failure_policy) == ("PDConnector", "recompute")
    assert config.scheduler_config.scheduler_cls == SCHEDULER and read_settings(config).extra == STORED


@pytest.mark.parametrize("children", [(OURS, TIER), (TIER, OURS)], ids=["ours first", "ours last"])
def test_b116_a_multiconnector_with_offloading_becomes_one_class_that_owns_both(children):
    """B116: in either order. Ours has its own role and settings, the other its own; the user's object stays."""
    mine = transfer(**several(*children))
    config = configure(mine)
    config.__post_init__()
    kv = config.kv_transfer_config
    assert KVConnectorFactory.get_connector_class(kv) is PDConnectorBeside
    assert (kv.kv_connector, kv.kv_role, kv.kv_load_failure_policy) == ("PDConnector", "kv_both", "recompute")
    assert kv.engine_id == mine.engine_id and config.scheduler_config.scheduler_cls == SCHEDULER
    assert config.scheduler_config.disable_hybrid_kv_cache_manager
    settings = read_settings(config)
    assert (settings.kv_role, settings.extra) == ("kv_consumer", BROKER)
    theirs = offloading_config(pickle.loads(pickle.dumps(config))).kv_transfer_config
    assert (theirs.kv_connector, theirs.kv_connector_module_path) == ("OffloadingConnector", None)
    assert theirs.kv_connector_extra_config == TIER["kv_connector_extra_config"] and theirs.engine_id == mine.engine_id
    assert PDConnectorBeside.get_required_kvcache_layout(config) == "LBHNC"
    assert mine.kv_connector == "MultiConnector" and mine.kv_connector_extra_config == {"connectors": list(children)}


def test_b116_what_a_child_says_of_itself_wins():
    """B116: an engine_id, for the tier alone."""
    config = configure(transfer(**several({**TIER, "engine_id": "its own"}, "PDConnector")))
    assert offloading_config(config).kv_transfer_config.engine_id == "its own" != config.kv_transfer_config.engine_id


def test_b116_ids_that_come_again_are_refused(monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    with pytest.raises(ConfigError, match="VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=True.*unset it"):
        configure(transfer(**several(OURS, TIER)))


def test_a_configuration_that_is_checked_again_stays_the_same():
    config = configure(transfer("kv_producer"))
    before = config.kv_transfer_config
    config.__post_init__()
    assert config.kv_transfer_config is before and read_settings(config).kv_role == "kv_producer"


@pytest.mark.parametrize("kv, more, words", [
    ({}, {"scheduler_cls": "my.Scheduler"}, "scheduler_cls='my.Scheduler'.*remove it"),
    ({}, {"pipeline_parallel_size": 5, "distributed_executor_backend": "mp"},
     "pipeline_parallel_size=5.*use at most 4, the layers"),
    ({"extra": STORED}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
     "speculative_config=.*guessed"),
    ({}, {"hf_overrides": {"sliding_window": 128}}, "sliding_window=128.*--disable-sliding-window"),
    ({}, {"hf_overrides": {"sliding_window": 128, "layer_types": ["sliding_attention"] * 4}}, "sliding_window=128"),
    ({}, {"hf_overrides": {"index_topk": 64}}, "index_topk=64.*beside MLA"),
    ({}, {"hf_overrides": {"swa_head_dim": 64}}, "swa_head_dim=64.*head_dim is 32"),
    ({}, {"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype='int8_per_token_head'.*use one of"),
    ({}, {"kv_cache_dtype_skip_layers": ["0"]}, r"kv_cache_dtype_skip_layers=\['0'\].*one type"),
    ({"extra": {"brokr": "tcp://127.0.0.1:5700"}}, {}, "brokr=.*did you mean broker"),
    ({"extra": {"broker": "tcp://127.0.0.1:5700", "bind": "tcp://127.0.0.1:5701"}},
     {"data_parallel_size": 2}, "bind='tcp://127.0.0.1:5701'.*port 0"),
    ({"extra": {"broker": "tcp://127.0.0.1:5700", "lifeline_port": 5701}},
     {"data_parallel_size": 2}, "lifeline_port=5701.*port 0"),
    ({}, {"weight_transfer_config": {"backend": "nccl"}}, "weight_transfer_config=.*restart engines"),
    ({"enable_permute_local_kv": True}, {}, "enable_permute_local_kv=True.*remove it"),
    ({"kv_connector_module_path": "vllm_pd.v1.activate"}, {}, "kv_connector_module_path=.*remove it"),
    (several("PDConnector"), {}, r"connectors=\['PDConnector'\].*by itself.*\"store\""),
    (several("PDConnector", "PDConnector", TIER), {}, "connectors=.*once each"),
    (several("PDConnector", "PDStoreConnector"), {}, r"connectors=.*by itself.*\"store\""),
    (several("PDConnector", "ExampleConnector"), {}, "connectors=.*OffloadingConnector"),
    (several("PDConnector", TIER, "ExampleConnector"), {}, "connectors=.*once each"),
    (several("PDConnector", {**TIER, "kv_role": "kv_consumer"}), {},
     "kv_role of OffloadingConnector='kv_consumer'.*kv_both"),
    (several("PDConnector", {**TIER, "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1."
                             "offloading_connector"}), {}, "module_path of OffloadingConnector=.*remove it"),
    (several("PDConnector", {**TIER, "kv_connector_extra_config": {"sync_load_budget_bytes": 1}}), {},
     "sync_load_budget_bytes=1.*remove it"),
    (several({**OURS, "kv_connector_module_path": "vllm_pd.v1.activate"}, TIER), {},
     "kv_connector_module_path=.*remove it"),
    (several({**OURS, "kv_connector_extra_config": STORED}, TIER), {}, "store=.*leave it out"),
    (several(TIER, "PDConnector"), {"enable_prefix_caching": False}, "enable_prefix_caching=False.*prefix hit"),
    (several(TIER, "PDConnector"), {"enable_lora": True}, "lora_config=.*told apart"),
    (several(TIER, "PDConnector"), {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
     "speculative_config=.*not tried"),
    (several(TIER, "PDConnector"), {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
     "pipeline_parallel_size=2.*tensor-parallel ranks of one host only"),
    (several(TIER, "PDConnector"), {"data_parallel_size": 2}, "data_parallel_size=2.*ranks of one host only"),
    ({"extra": STORED}, {"enable_prefix_caching": False}, "enable_prefix_caching=False.*prefix hit"),
    ({"extra": STORED}, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
     "pipeline_parallel_size=2.*tensor-parallel ranks of one host"),
    ({"extra": STORED}, {"enable_lora": True}, "lora_config=.*told apart"),
    ({"extra": STORED}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'.*other scales"),
    ({"extra": STORED}, {"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo='xxhash'.*sha256"),
    ({"extra": {**BROKER, "store": {"memory": 4}}}, {}, "memory=4.*memory_gib"),
], ids=str)
def test_b80_what_cannot_work_is_refused_by_name(kv, more, words):
    """B80"""
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        configure(transfer(**kv), **more)


@pytest.mark.parametrize("partition,words", [
    ("2,x", "write the layers of each stage: Invalid partition"), ("1,2,1", "does not match pp_size=2"),
    ("1,2", "does not match num_hidden_layers=4"), ("0,4", "give stage 0 a layer"), ("4,0", "give stage 1 a layer")])
def test_b80_b101_stages_without_layers_are_refused(monkeypatch, partition, words):
    """B80, B101: the tiny model has 4 layers."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    with pytest.raises(ConfigError, match=f"(?s)VLLM_PP_LAYER_PARTITION='{partition}'.*{words}"):
        configure(transfer(), pipeline_parallel_size=2, distributed_executor_backend="mp")


def test_b101_stages_are_taken(monkeypatch):
    """B101: split by vLLM's rule, or as the user says."""
    for partition, sizes in ((None, [2, 2]), ("3,1", [3, 1])):
        if partition is not None:
            monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        config = configure(transfer(), pipeline_parallel_size=2, distributed_executor_backend="mp")
        assert config.scheduler_config.scheduler_cls == SCHEDULER
        assert [len(checks.stage_layers(config, stage)) for stage in range(2)] == sizes


def test_b80_more_ranks_than_metadata_has_room_for_are_refused(monkeypatch):
    """B80: the stages count."""
    monkeypatch.setattr(checks, "MAX_RANKS", 1)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2.*use at most 1 ranks in all: there are 2"):
        configure(transfer(), pipeline_parallel_size=2, distributed_executor_backend="mp")


def test_b80_an_explicit_policy_that_conflicts_is_refused(monkeypatch):
    """B80: vLLM's default is the same word, so only the command line shows who chose it."""
    kv = transfer(kv_load_failure_policy="fail")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", '--kv-transfer-config={"kv_load_failure_policy": "fail"}'])
    with pytest.raises(ConfigError, match="kv_load_failure_policy='fail'.*remove it"):
        configure(kv)
    monkeypatch.setattr("sys.argv", ["vllm", "serve"])
    configure(kv)


OFFLOADING = [["--kv-offloading-size", "4"], ["--kv_offloading_size=4"], ["--kv-offloading-size=4"]]


@pytest.mark.parametrize("named", [['--kv-transfer-config={"kv_connector": "PDConnector"}'],
                                   ["--kv-transfer-config.kv_connector", "PDConnector"],
                                   ["--kv-transfer-config", '{"kv_connector":"PDStoreConnector"}']], ids=str)
@pytest.mark.parametrize("asked", OFFLOADING, ids=str)
def test_b80_offloading_with_which_vllm_replaces_our_connector(monkeypatch, named, asked):
    """B80: vLLM asks for no class of ours then, so the plugin looks at the command line."""
    for words in (named, asked, [*asked, '{"kv_connector": "MyPDConnector"}'],
                  [*named, "--kv-offloading-backend", "x"]):
        monkeypatch.setattr("sys.argv", ["vllm", "serve", *words])
        register()
    for words in ([*named, *asked], [*asked, *named]):
        monkeypatch.setattr("sys.argv", ["vllm", "serve", *words])
        with pytest.raises(ConfigError, match="kv_offloading_size='4'.*kv-transfer-config.*PD(Store)?Connector"):
            register()


IN_FILE = """
kv-transfer-config:
  kv_connector: PDConnector
max-model-len: 512
"""


def at_config(monkeypatch, tmp_path, text: str, *words: str) -> None:
    """A command line whose file is this."""
    file = tmp_path / "options.yaml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--config", str(file), *words])


@pytest.mark.parametrize("name", ["kv-offloading-size", "kv_offloading_size"])
def test_b80_offloading_in_a_file_for_config(monkeypatch, tmp_path, name):
    """B80: the connector and the size, or one of them, and what a broken file has is vLLM's to say."""
    for text, words in ((f"{IN_FILE}{name}: 4\n", ()), (IN_FILE, ["--kv-offloading-size", "4"]),
                        (f"{name}: 4.0", ["--kv-transfer-config", '{"kv_connector": "PDConnector"}'])):
        at_config(monkeypatch, tmp_path, text, *words)
        with pytest.raises(ConfigError, match="kv_offloading_size='4.*kv-transfer-config.*cpu_bytes_to_use.: 4294"):
            register()
    for text in (IN_FILE, f"{name}: 4", f"# {name}: 4{IN_FILE}", f"{IN_FILE}: {name}: 4", f"- PDConnector\n- {name}"):
        at_config(monkeypatch, tmp_path, text)
        register()


@pytest.mark.parametrize("text, words, is_on", [
    ("disable-hybrid-kv-cache-manager: true", (), False), ("disable-hybrid-kv-cache-manager: false", (), True),
    ("disable_hybrid_kv_cache_manager: false", (), None),
    ("no-disable-hybrid-kv-cache-manager: true", (), True), ("max-model-len: 512", (), None),
    ("disable-hybrid-kv-cache-manager: true", ["--no-disable-hybrid-kv-cache-manager"], True)], ids=str)
def test_b114_the_hybrid_manager_s_flag_in_a_file_for_config(monkeypatch, tmp_path, text, words, is_on):
    """B114: the plugin imports our class, as it does for the flag on the command line, which wins."""
    imported = []
    monkeypatch.setattr("vllm_pd.v1.plugin.importlib", SimpleNamespace(import_module=imported.append))
    at_config(monkeypatch, tmp_path, f"{text}{IN_FILE}", *words)
    assert hybrid_flag() is is_on
    register()
    assert imported == ([] if is_on is None else ["vllm_pd.v1.activate"])


def test_b80_offloading_where_our_class_was_imported_before():
    """B80: as with full CUDA graphs, also where nothing is on the command line."""
    configure(transfer())
    with pytest.raises(ConfigError, match="kv_offloading_size=4.*kv-transfer-config.*PDConnector"):
        configure(transfer(), kv_offloading_size=4)
    with pytest.raises(ConfigError, match=f"MultiConnector.*OffloadingConnector.*cpu_bytes_to_use.: {4 << 30}"):
        configure(transfer(**several("PDConnector", TIER)), kv_offloading_size=4)  # vLLM leaves our name inside
    assert configure(None, kv_offloading_size=4).kv_transfer_config.kv_connector == "OffloadingConnector"
    other = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert configure(other, kv_offloading_size=4).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("named", [['--kv-transfer-config={"kv_connector": "PDConnector"}'],
                                   ["--kv-transfer-config.kv_connector", "PDConnector"]], ids=str)
@pytest.mark.parametrize("flag, value", [
    ("--disable-hybrid-kv-cache-manager", True), ("--no-disable-hybrid-kv-cache-manager", False),
    ("--disable_hybrid_kv_cache_manager", True), ("--no-disable-hybrid", False)])
def test_b114_the_hybrid_manager_s_flag_has_the_plugin_import_our_class(monkeypatch, named, flag, value):
    """B114: vLLM does not ask for it with either form, and the model would be loaded before anybody sees that."""
    imported = []
    monkeypatch.setattr("vllm_pd.v1.plugin.importlib", SimpleNamespace(import_module=imported.append))
    for words in (named, [flag], [flag, "--kv-transfer-config", '{"kv_connector": "PDStoreConnector"}'],
                  [flag + "-x", *named]):
        monkeypatch.setattr("sys.argv", ["vllm", "serve", *words])
        register()
    assert not imported
    for words in ([*named, flag], [flag, *named]):
        monkeypatch.setattr("sys.argv", ["vllm", "serve", *words])
        register()
        assert imported.pop() == "vllm_pd.v1.activate" and hybrid_flag() is not value


def events(port: int, replay: int | None = None, host: str = "*") -> dict:
    return {"kv_events_config": KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://{host}:{port}",
        replay_endpoint=None if replay is None else f"tcp://127.0.0.1:{replay}")}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_b80_a_taken_port_of_kv_events_is_found_before_the_model_is_loaded(rank, key):
    """B80: of each data-parallel rank, which adds its number to the port."""
    first = take_free_run("127.0.0.1", 4)
    made = events(first, first + 2)
    configure(transfer(), data_parallel_size=2, **made)
    with socket.create_server(("", first + rank + 2 * (key == "replay_endpoint"))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"kv_events_config.{key}='[0-9.]*:{port}'.*in use"):
            configure(transfer(), data_parallel_size=2, **made)
        configure(None, data_parallel_size=2, **made)  # without PDConnector it is vLLM's own business
        config = configure(transfer(), data_parallel_size=2, _api_process_count=2, _api_process_rank=1, **made)
        assert read_settings(config), "one of several processes of a server, whose engine may have its ports by now"
        with pytest.raises(ConfigError, match="in use"):
            configure(transfer(), data_parallel_size=2, _api_process_count=2, _api_process_rank=-1, **made)


def test_b80_ports_of_kv_events_that_nobody_listens_at():
    """B80: where the publisher connects, has port 0, or is off, nothing is asked. Two sockets at one port: refused."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        configure(transfer(), **events(port, host="127.0.0.1"))
        configure(transfer(), **events(0))
        configure(transfer(), kv_events_config=KVEventsConfig(endpoint=f"tcp://*:{port}"))
    first = take_free_run("127.0.0.1", 3)
    with pytest.raises(ConfigError, match=f"kv_events_config.endpoint=.*port {first + 1} is another socket's"):
        configure(transfer(), data_parallel_size=2, kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True, endpoint=f"tcp://*:{first}", replay_endpoint=f"tcp://*:{first + 1}"))


def test_b43_a_server_of_several_processes_lets_them_drain():
    """B43: and a time that the user has set stays."""
    drain = {**BROKER, "drain_timeout_s": 12.5}
    assert configure(transfer(extra=drain)).shutdown_timeout == 0
    assert configure(transfer(extra=drain), _api_process_count=2).shutdown_timeout == 18
    assert configure(transfer(extra=drain), _api_process_count=2, shutdown_timeout=3).shutdown_timeout == 3


def test_b43_all_processes_of_a_server_meet_the_same_engines():
    """B43: each has a copy of the command line's arguments, and makes a configuration of them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    words = ["--model", os.environ["VLLM_PD_TINY_MODEL"], "--dtype", "float32", "--max-model-len", "512",
             "--kv-transfer-config", json.dumps({"kv_connector": "PDConnector", "kv_role": "kv_consumer",
                                                 "kv_connector_extra_config": BROKER}), "--data-parallel-size", "2"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    fronts = [fronts_of_server(AsyncEngineArgs.from_cli_args(one).create_engine_config())
              for one in (arguments, pickle.loads(pickle.dumps(arguments)))]
    assert fronts[0] == fronts[1] and fronts[0][1] == front_of_rank(fronts[0][0], 1)


@pytest.mark.parametrize("changes, words", [
    ({"runner_type": "pooling"}, "runner_type.*generating"), ({"is_encoder_decoder": True}, "decoder-only"),
    ({"is_attention_free": True}, "attention"),
    ({"attention_chunk_size": 64}, "attention_chunk_size=64.*chunked"),
    ({"enable_sleep_mode": True}, "enable_sleep_mode=True.*remove it"),
    ({"enable_cumem_allocator": True}, "enable_cumem_allocator=True.*remove it"),
], ids=str)
def test_b80_a_model_that_cannot_take_part(monkeypatch, changes, words):
    """B80: by the same function as for V0."""
    config = configure(transfer())
    for name, value in changes.items():
        if isinstance(getattr(type(config.model_config), name, None), property):
            monkeypatch.setattr(type(config.model_config), name, value)
        else:
            setattr(config.model_config, name, value)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        check_config(config, PDConfig.parse("kv_consumer", BROKER))


@pytest.mark.parametrize("part, key, value, words", [
    ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size=2.*use 1: stages of a model with"),
    ("cache_config", "use_replayssm", True, "use_replayssm=True.*remove it: it keeps beside the blocks"),
    ("cache_config", "prefix_match_unit", 16, "prefix_match_unit=16.*whole blocks"),
    ("scheduler_config", "disable_hybrid_kv_cache_manager", True, "disable_hybrid_kv_cache_manager=True.*leave"),
], ids=str)
def test_b114_b80_what_was_not_tried_with_states(monkeypatch, part, key, value, words):
    config = configure(transfer())
    setattr(getattr(config, part) if part else config, key, value)
    check_states(config, False)
    monkeypatch.setattr(type(config.model_config), "has_inner_state", True)
    with pytest.raises(ConfigError, match=words):
        check_states(config, False)


def test_b114_b80_no_store_with_states(monkeypatch):
    config = configure(transfer())
    monkeypatch.setattr(type(config.model_config), "has_inner_state", True)
    check_states(config, False)
    with pytest.raises(ConfigError, match="store=True.*leave it out"):
        check_states(config, True)


@pytest.mark.parametrize("store, offloading, hisparse, words", [
    (True, False, None, "store=True.*leave it out.*index"),
    (False, True, None, "OffloadingConnector=True.*leave it out.*index"),
    (False, False, "cached in the host", "hisparse_config='cached in the host'.*remove it.*index"),
])
def test_b101_b80_what_was_not_tried_with_an_index(store, offloading, hisparse, words):
    config = configure(transfer())
    config.attention_config.hisparse_config = hisparse
    check_index(config, store, offloading)
    config.model_config.hf_text_config.index_topk = 64
    with pytest.raises(ConfigError, match=words):
        check_index(config, store, offloading)
    config.attention_config.hisparse_config = None
    check_index(config, False)


def test_b116_b80_no_tier_beside_an_index():
    config = configure(transfer())
    beside.check_beside(config)
    config.model_config.hf_text_config.index_topk = 64
    with pytest.raises(ConfigError, match="OffloadingConnector=True.*not tried with the index"):
        beside.check_beside(config)


@pytest.mark.parametrize("changes", [{"head_size": 64}, {"total_num_kv_heads": 2}], ids=str)
def test_b101_b80_layers_whose_kv_differs_in_shape(changes):
    """B80, B101: as vLLM has them from the model's configuration."""
    config = configure(transfer())
    config.model_config.model_arch_config.per_layer_overrides = [{}, changes, {}, {}]
    with pytest.raises(ConfigError, match=r"model=.*one shape.*\(KV heads, head size\) are \[.*\(4, 32\)"):
        check_config(config, PDConfig.parse("kv_consumer", BROKER))


WINDOWS = {"hf_overrides": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}}
EAGLE = {"method": "eagle", "model": str(Path(os.environ["VLLM_PD_TINY_MODEL"]).with_name("tiny-eagle")),
         "num_speculative_tokens": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize("asked", [None, False, True])
def test_b114_layers_in_groups_as_vllm_has_them(asked):
    """B114: with either form of the flag, and with none."""
    config = configure(transfer(), disable_hybrid_kv_cache_manager=asked, **WINDOWS)
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is bool(asked)
    for drafter in (NGRAM, EAGLE):
        config = configure(transfer(), speculative_config=drafter, **WINDOWS)
        assert config.scheduler_config.disable_hybrid_kv_cache_manager is False


@pytest.mark.parametrize("extra, more, key", [
    (STORED, {}, "store"), (BROKER, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2")], ids=str)
def test_b114_b80_what_was_not_tried_with_groups(monkeypatch, extra, more, key):
    """B114: all layers are in one group then. B80: both flags together are refused."""
    made = configure(transfer("kv_both", extra), **more)
    assert made.scheduler_config.disable_hybrid_kv_cache_manager is True
    configure(transfer("kv_both", extra), disable_hybrid_kv_cache_manager=True, **more)
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--no-disable-hybrid-kv-cache-manager"])
    with pytest.raises(ConfigError, match=f"disable_hybrid_kv_cache_manager=False.*leave.*{key}"):
        configure(transfer("kv_both", extra), disable_hybrid_kv_cache_manager=False, **more)


@pytest.mark.parametrize("check", [lambda config: check_config(config, PDConfig.parse("kv_consumer", BROKER)),
                                   check_store], ids=["peers", "store"])
@pytest.mark.parametrize("part, key, words", [
    ("aux_output_config", "enable_return_routed_experts", "remove it: the experts"),
    ("parallel_config", "enable_fault_tolerance", "remove it: .*that is given up"),
], ids=str)
def test_b80_what_vllm_has_for_a_gpu_only(part, key, words, check):
    """B80: by the name of the flag."""
    config = configure(transfer())
    setattr(getattr(config, part), key, True)
    with pytest.raises(ConfigError, match=f"(?s){key}=True.*{words}"):
        check(config)


def test_b80_b104_a_model_that_writes_its_blocks_anew():
    """B80, B104: PDConnector refuses it for its scheduler."""
    config = configure(transfer())
    config.diffusion_config = DiffusionConfig(canvas_length=32)
    with pytest.raises(ConfigError, match="diffusion_config=.*one token after the other"):
        check_store(config)


def test_b80_b104_the_store_takes_ranks_of_this_host():
    """B80, B104: they meet in one arena."""
    check_store(configure(transfer(extra=STORED), tensor_parallel_size=2, distributed_executor_backend="mp"))
    config = configure(transfer(), tensor_parallel_size=2, distributed_executor_backend="mp")
    config.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(ConfigError, match="distributed_executor_backend='ray'.*this host; Ray Serve LLM.*vllm serve"):
        check_store(config)


def test_b80_b104_the_store_takes_several_ranks_only_one_step_after_the_other():
    """B80, B104: V1 switches the other off on the CPU, for now."""
    for ranks in (1, 2):
        config = configure(transfer(), tensor_parallel_size=ranks, distributed_executor_backend="mp")
        check_store(config)
        config.scheduler_config.async_scheduling = True
        if ranks == 1:
            check_store(config)
    with pytest.raises(ConfigError, match="async_scheduling=True.*add --no-async-scheduling"):
        check_store(config)


@pytest.mark.parametrize("backend", ["ray", type("MyExecutor", (), {})], ids=str)
def test_b80_a_single_rank_in_a_process_that_is_no_child(backend):
    """B80: EngineCore and such a rank would not take each other for what they are, after the model was loaded."""
    config = configure(transfer())
    for taken in ("mp", "uni"):
        config.parallel_config.distributed_executor_backend = taken
        check_config(config, PDConfig.parse("kv_consumer", BROKER))
    config.parallel_config.distributed_executor_backend = backend
    with pytest.raises(ConfigError, match="distributed_executor_backend=.*\"mp\".*child of EngineCore"):
        check_config(config, PDConfig.parse("kv_consumer", BROKER))


def test_b80_engines_that_join_and_leave_a_server():
    """B80: the server has a connection to each engine that it had at its start, and to no later one. vLLM moves their
    weights by calls of the executor, not of the engine, so `watch_reload` does not see it either."""
    config = configure(transfer())
    config.parallel_config.enable_elastic_ep = True
    with pytest.raises(ConfigError, match="enable_elastic_ep=True.*remove it"):
        check_config(config, PDConfig.parse("kv_consumer", BROKER))


@pytest.mark.parametrize("role, is_taken", [("kv_producer", False), ("kv_both", False), ("kv_consumer", True)])
def test_b80_ranks_without_a_server_that_prefill_for_peers(role, is_taken, monkeypatch):
    """B80: offline ranks of a model with experts have no coordinator. One that begins a peer's job steps alone, and its
    collectives wait for ranks that have nothing to do."""
    for name, value in (("SIZE", 2), ("RANK", 1), ("RANK_LOCAL", 1), ("MASTER_PORT", 1)):
        monkeypatch.setenv(f"VLLM_DP_{name}", str(value))
    monkeypatch.setattr(ModelConfig, "is_moe", True)
    if is_taken:
        assert configure(transfer(role)).parallel_config.data_parallel_size == 2
    else:
        with pytest.raises(ConfigError, match="VLLM_DP_SIZE=2.*vllm serve --data-parallel-size"):
            configure(transfer(role))
    for name in ("SIZE", "RANK", "RANK_LOCAL", "MASTER_PORT"):
        monkeypatch.delenv(f"VLLM_DP_{name}")
    assert configure(transfer(role), data_parallel_size=2).parallel_config.data_parallel_rank_local is None


NODES = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize("node", [0, 1])
def test_b101_an_engine_on_several_nodes(node):
    """B101: each node makes its own configuration."""
    assert configure(transfer(), **NODES, node_rank=node).parallel_config.node_rank_within_dp == node


@pytest.mark.parametrize("kv, more, words", [
    ({"extra": STORED}, {}, "nnodes=2.*tensor-parallel ranks of one host"),
    (several("PDConnector", TIER), {}, "nnodes=2.*tensor-parallel ranks of one host"),
    ({}, {"tensor_parallel_size": 1, "data_parallel_size": 2}, "nnodes=2.*one of a data-parallel group"),
    ({"extra": {**BROKER, "step_sync": True}}, {"tensor_parallel_size": 1, "data_parallel_size": 2}, "nnodes=2"),
    ({}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
     "pipeline_parallel_size=2.*use 1 with --nnodes 2, and a --tensor-parallel-size of 2"),
    ({}, {"master_addr": "10.9.8.7"}, "bind='tcp://127.0.0.1:0'.*first node is 10.9.8.7.*auto"),
], ids=["store", "offloading", "groups", "step sync", "stages", "loopback"])
@pytest.mark.parametrize("node", [0, 1])
def test_b80_several_nodes_with_what_was_not_tried_there(kv, more, words, node):
    """B80: refused on each node, before the model is loaded."""
    with pytest.raises((ConfigError, ValueError), match=f"(?s){words}"):
        configure(transfer(**kv), **{**NODES, **more}, node_rank=node)


def test_b80_shared_memory_between_nodes(monkeypatch):
    """B80: what is not there between machines must not be used by an engine on several."""
    monkeypatch.setenv("UCX_TLS", "tcp,cma")
    with pytest.raises(ConfigError, match="UCX_TLS='tcp,cma'.*take cma out of it"):
        configure(transfer(), **NODES)
    monkeypatch.setenv("UCX_TLS", "tcp")
    configure(transfer(), **NODES)


def test_b80_a_model_for_which_vllm_has_a_scheduler_of_its_own():
    """B80"""
    from vllm_pd.v1.claim import claim
    config = configure(transfer())
    config.scheduler_config.scheduler_cls = "vllm.v1.core.sched.diffusion_scheduler.DiffusionScheduler"
    with pytest.raises(ConfigError, match="scheduler_cls=.*Diffusion.*serve another model"):
        claim(config)


@pytest.mark.parametrize("argument", ["--scheduler-cls", "--scheduler_cls=vllm.v1.core.sched.scheduler.Scheduler",
                                      "vllm serve a --scheduler-cls vllm.v1.core.sched.scheduler.Scheduler"])
def test_b80_a_scheduler_of_vllm_that_the_user_has_named(monkeypatch, argument):
    """B80: as recipes do; also in the command that `doctor --for` is asked about."""
    monkeypatch.setattr(sys, "argv", ["vllm", argument])
    with pytest.raises(ConfigError, match="scheduler_cls=.*remove it"):
        configure(transfer(), scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")


def test_b80_an_engine_without_a_process_of_its_own(monkeypatch):
    """B80"""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(ConfigError, match="VLLM_ENABLE_V1_MULTIPROCESSING.*unset it"):
        configure(transfer())


def test_b80_a_port_in_use():
    """B80"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="bind=.*in use"):
            configure(transfer(extra={**BROKER, "bind": bind}))
        with pytest.raises(ConfigError, match="lifeline_port=.*in use"):
            configure(transfer(extra={**BROKER, "lifeline_port": taken.getsockname()[1]}))


def test_b80_a_broker_on_another_machine_needs_an_address_that_others_reach(tmp_path):
    """B80"""
    extra = {"broker": "tcp://203.0.113.7:5700", "keys": str(Keys.make(tmp_path))}
    with pytest.raises(ConfigError, match="bind='tcp://127.0.0.1:0'.*broker is at 203.0.113.7.*an address of its own"):
        configure(transfer(extra=extra))


def test_all_processes_of_an_engine_get_the_address_that_auto_is():
    config = configure(transfer(extra={**BROKER, "bind": "auto"}))
    assert config.kv_transfer_config.kv_connector_extra_config["bind"] == "tcp://127.0.0.1:0"


def test_b80_an_engine_that_the_plugin_did_not_prepare():
    """B80"""
    config = configure(transfer())
    del config.kv_transfer_config.kv_connector_extra_config[OWN_KEY]
    with pytest.raises(ConfigError, match="the plugin did not prepare"):
        read_settings(config)


def test_b92_the_installed_vllm_has_every_name():
    """B92"""
    required.check_installed()


def test_b92_a_vllm_that_lacks_a_name_is_refused(monkeypatch):
    """B92: with the names and the supported releases."""
    file = "v1/core/block_pool.py"
    more = (Required("BlockPool.touch", "", takes=("blocks", "owner")), Required("BlockPool.pin", ""))
    monkeypatch.setitem(required.REQUIRED, file, more)
    with pytest.raises(ConfigError, match=r"BlockPool\.touch\(blocks\) in vllm/v1/core/block_pool\.py; BlockPool\.pin "
                                          r"in .*0\.32, 0\.33"):
        required.check_installed()


def test_both_engines_share_the_checks():
    from vllm_pd.v1 import claim
    assert claim.check_model is checks.check_model
