# SPDX-License-Identifier: Apache-2.0
"""B80: an engine that can't take part is refused before its model is loaded, whatever the reason."""
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from transformers import LlamaConfig
from vllm.attention.backends.torch_sdpa import TorchSDPABackend
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.llm_engine import LLMEngine
from vllm.executor.executor_base import ExecutorBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from vllm_pd.errors import ConfigError
from vllm_pd.model import checks
from vllm_pd.rpc.keys import Keys
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.layout import Layout
from vllm_pd.v0 import checks as v0_checks
from vllm_pd.v0 import hooks

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Loads(Exception):
    """The engine has begun to load its model."""


@pytest.fixture(autouse=True)
def loads(monkeypatch) -> list[str]:
    """A spy on whatever loads a model: the executor that starts the workers, and the loader in this process."""
    seen: list[str] = []

    def spy(name: str) -> Callable:
        def loading(*arguments, **named):
            seen.append(name)
            raise Loads(name)
        return loading

    monkeypatch.setattr(ExecutorBase, "__init__", spy("executor"))
    monkeypatch.setattr(BaseModelLoader, "load_model", spy("loader"))
    monkeypatch.setenv("VLLM_USE_V1", "0")
    monkeypatch.delenv("VLLM_USE_V1")
    checks.check_nixl.cache_clear()
    return seen


def configuration(extra: dict | None = None, role: str = "kv_both", **more) -> VllmConfig:
    transfer = KVTransferConfig(kv_connector="PDConnector", kv_role=role,
                                kv_connector_extra_config={"broker": "tcp://127.0.0.1:5700", **(extra or {})})
    return EngineArgs(**{"model": os.environ["VLLM_PD_TINY_MODEL"], "dtype": "float32", "max_model_len": 512,
                         "kv_transfer_config": transfer, **more}).create_engine_config()


def assert_refused(config: VllmConfig, loads: list[str], words: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        LLMEngine.from_vllm_config(config)
    print(f"refused after {time.monotonic() - began_s:.2f} s")
    assert loads == []


def test_the_spy_sees_an_engine_that_is_not_refused(loads):
    with pytest.raises(Loads):
        LLMEngine.from_vllm_config(configuration())
    assert loads == ["executor"]


@pytest.mark.parametrize("more, words", [
    ({"tensor_parallel_size": 2}, "tensor_parallel_size=2.*leave out the key store, or use V1"),
    ({"enable_prefix_caching": False}, "enable_prefix_caching=False.*leave it on, or leave out the key store"),
], ids=str)
def test_b80_b104_what_the_store_can_not_be_used_with(loads, more, words):
    assert_refused(configuration({"store": {}}, **more), loads, words)
    hooks.check_engine(configuration(**more))


@pytest.mark.parametrize("key, value", [("listen", "tcp://127.0.0.1:5900"), ("hosts", "tcp://127.0.0.1:5900")])
def test_b80_b104_the_store_is_of_one_host(loads, key, value):
    words = f"{key}='{value}'.*leave it out of the object store, or use V1"
    assert_refused(configuration({"store": {key: value}}), loads, words)


def test_b80_b104_the_store_knows_no_cache_on_a_device(loads):
    config = configuration({"store": {}})
    config.device_config.device_type = "cuda"
    with pytest.raises(ConfigError, match="store='cuda'.*leave it out"):
        v0_checks.check_store(config)


def test_kv_heads_that_do_not_divide(loads):
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    assert_refused(configuration(hf_overrides=heads, tensor_parallel_size=2), loads, "tensor_parallel_size=2.*3 KV")


def test_a_sliding_window(loads):
    config = configuration(hf_overrides={"sliding_window": 128}, enable_prefix_caching=False)
    assert_refused(config, loads, "sliding_window=128.*--disable")
    with pytest.raises(NotImplementedError, match="--disable-sliding-window"):  # upstream's own, with prefix caching
        configuration(hf_overrides={"sliding_window": 128})


def test_b101_a_sliding_window_in_some_layers(loads):
    windows = {"sliding_window": [64, None, 64, None]}
    assert_refused(configuration(hf_overrides=windows), loads, r"sliding_window=\[64.*--disable-sliding-window, or")
    hooks.check_engine(configuration(hf_overrides=windows, disable_sliding_window=True, max_model_len=64))


def test_b101_b80_a_sliding_window_that_vllm_can_not_disable(loads):
    """B101, B80: the field that vLLM itself makes otherwise. Its models read it whatever the flag says."""
    own = {"interleaved_sliding_window": [64, None, 64, None]}
    assert_refused(configuration(hf_overrides=own, disable_sliding_window=True), loads,
                   r"interleaved_sliding_window=\[64.*use V1, or serve another model")
    assert_refused(configuration(hf_overrides=own), loads, r"sliding_window=\[64.*or use V1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b101_fp8(loads, dtype):
    """Its answers would be others than those of one engine."""
    config = configuration(dtype=dtype, kv_cache_dtype="fp8_e5m2", enable_prefix_caching=False)
    assert_refused(config, loads, "kv_cache_dtype='fp8_e5m2'.*use auto, or V1")


def longrope(**more) -> VllmConfig:
    """Of a model with LongRoPE that was trained with 256 positions."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    return configuration(hf_overrides={"rope_scaling": {**factors, "original_max_position_embeddings": 256}}, **more)


def test_b1_keys_that_depend_on_the_batch(loads):
    """With LongRoPE, V0's keys of the first 256 positions are others in a step that has a later one: in a whole prompt,
    and not in the first chunk of it."""
    assert_refused(longrope(max_model_len=257), loads, "max_model_len=257.*write at most 256, or use V1.*LongRoPE")
    hooks.check_engine(longrope(max_model_len=256))


def test_b101_layers_whose_kv_differs_in_shape(loads):
    blocks = [{"attention": {"n_heads_in_group": heads}} for heads in (2, 4)]
    assert_refused(configuration(hf_overrides={"block_configs": blocks}), loads, "block_configs=.*one shape")


def test_an_executor_over_several_hosts(loads):
    config = configuration(tensor_parallel_size=2)
    config.parallel_config.distributed_executor_backend = "external_launcher"
    assert_refused(config, loads, "distributed_executor_backend='external_launcher'.*mp")


@pytest.mark.parametrize("changes, words", [
    ({"runner_type": "pooling"}, "runner_type.*generating"), ({"is_encoder_decoder": True}, "decoder-only"),
    ({"is_attention_free": True}, "attention"), ({"has_inner_state": True}, "recurrent"),
], ids=str)
def test_b7_a_model_whose_prompt_is_more_than_kv(loads, monkeypatch, changes, words):
    """B7: pooling, among others."""
    config = configuration()
    for name, value in changes.items():
        if isinstance(getattr(type(config.model_config), name, None), property):
            monkeypatch.setattr(type(config.model_config), name, value)
        else:
            setattr(config.model_config, name, value)
    assert_refused(config, loads, words)


def test_an_attention_back_end_whose_cache_is_not_known(loads, monkeypatch):
    monkeypatch.setattr(TorchSDPABackend, "get_name", staticmethod(lambda: "TRITON_MLA"))
    assert_refused(configuration(), loads, "attention backend='TRITON_MLA'.*layout")


def test_a_cache_in_an_order_that_is_not_known(loads, monkeypatch):
    monkeypatch.setattr(TorchSDPABackend, "get_kv_cache_shape",
                        staticmethod(lambda blocks, size, heads, width: (2, blocks, heads * width, size)))
    assert_refused(configuration(), loads, "kv_cache=.*layout")


@pytest.mark.parametrize("module, words", [
    ("raise ImportError('libucp.so.0: cannot open shared object file')", "libucp.so.0"),
    ("import os; os._exit(3)", "status 3"),
], ids=["import", "dies"])
def test_a_nixl_that_does_not_work(loads, monkeypatch, tmp_path, module, words):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert_refused(configuration(), loads, f"nixl=.*{words}.*pip install")


def test_a_nixl_that_does_not_end(loads, monkeypatch, tmp_path):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(checks, "NIXL_TIMEOUT_S", 3)
    assert_refused(configuration(), loads, "nixl=.*3 s.*pip install")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_a_port_of_kv_events_in_use(loads, taken_port, key):
    events = {"endpoint": "tcp://*:0"} | {key: f"tcp://*:{taken_port}"}
    config = configuration(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **events))
    assert_refused(config, loads, "kv_events_config=.*in use")


def test_a_publisher_that_there_is_not(loads):
    config = configuration(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="nonesuch"))
    assert_refused(config, loads, "kv_events_config=.*nonesuch")


def test_an_address_of_another_machine(loads, tmp_path):
    config = configuration({"bind": "tcp://203.0.113.7:0", "keys": str(Keys.make(tmp_path / "cluster.keys"))})
    assert_refused(config, loads, "bind='tcp://203.0.113.7:0'.*address of its own")


def test_a_broker_on_another_machine_needs_an_address_that_others_reach(loads, tmp_path):
    keys = str(Keys.make(tmp_path / "cluster.keys"))
    config = configuration({"broker": "tcp://203.0.113.7:5700", "keys": keys})
    assert_refused(config, loads, "bind='tcp://127.0.0.1:0'.*the broker is at 203.0.113.7.*an address of its own")


@pytest.mark.parametrize("seats, fraction, words", [
    (1, 0.5, "max_num_seqs=1 .*kv_both.*at least 2"), (1, 0.1, "max_num_seqs=1 "),
    (2, 1.0, "max_parked_fraction=1.0 .*at most 0.5"), (16, 1.0, "max_parked_fraction=1.0 .*at most 0.937"),
], ids=str)
def test_an_engine_of_both_roles_without_a_seat_for_peers(loads, seats, fraction, words):
    config = configuration({"max_parked_fraction": fraction}, max_num_seqs=seats)
    assert_refused(config, loads, words)


@pytest.mark.parametrize("role, seats, fraction", [("kv_consumer", 1, 1.0), ("kv_producer", 1, 1.0),
                                                   ("kv_both", 2, 0.5), ("kv_both", 16, 0.937)], ids=str)
def test_engines_that_have_the_seats_they_need(role, seats, fraction):
    hooks.check_engine(configuration({"max_parked_fraction": fraction}, role=role, max_num_seqs=seats))


@pytest.mark.parametrize("setting, refused", [("expandable_segments:True", True), ("", False),
                                              ("max_split_size_mb:64, expandable_segments : True", True),
                                              ("expandable_segments:False", False)])
@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_of_cuda_that_is_mapped_piece_by_piece(loads, monkeypatch, variable, setting, refused):
    config = configuration()
    monkeypatch.setenv(variable, setting)
    hooks.check_engine(config)  # nothing of it on the CPU
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    if refused:
        assert_refused(config, loads, f"{variable}=.*take expandable_segments:True out")
    else:
        checks.check_memory()


def test_weights_that_no_digest_sees(loads, tmp_path):
    assert_refused(configuration(load_format="tensorizer"), loads, "load_format.*peer")
    config = configuration()
    config.model_config.model = str(tmp_path)
    assert_refused(config, loads, r"model=.*\.safetensors")


def hub_model(commit: str | None) -> VllmConfig:
    config = configuration()
    config.model_config.model = "some/model"
    config.model_config.hf_config = config.model_config.hf_text_config = LlamaConfig(
        architectures=["LlamaForCausalLM"], _commit_hash=commit)
    return config


def test_a_hub_model_without_a_commit(loads):
    assert_refused(hub_model(None), loads, "revision=None.*some/model")


def test_a_hub_model_is_loaded_at_the_commit_that_its_configuration_has(loads):
    config = hub_model(COMMIT)
    hooks.check_engine(config)
    assert config.model_config.revision == COMMIT


def test_b50_with_nothing_of_ours_nothing_is_looked_at(loads, monkeypatch):
    monkeypatch.setattr(v0_checks, "check_config", lambda *arguments: pytest.fail("looked at"))
    config = EngineArgs(model=os.environ["VLLM_PD_TINY_MODEL"], dtype="float32", max_model_len=512
                        ).create_engine_config()
    monkeypatch.setenv("VLLM_USE_V1", "0")
    with pytest.raises(Loads):
        LLMEngine.from_vllm_config(config)


def test_the_sample_has_the_layout_that_the_workers_report(monkeypatch):
    """With IPEX and without: B3's tests compare both with real caches."""
    config = configuration()
    for there, layout in ((True, Layout.HEADS_FIRST), (False, Layout.PACKED)):
        monkeypatch.setattr(v0_checks, "_has_ipex", lambda there=there: there)
        description = v0_checks.sample_cache(config)
        assert (description.layout, description.kv_heads) == (layout, 4)


@pytest.mark.parametrize("role, ranks, refused", [("kv_consumer", 2, True), ("kv_both", 2, True),
                                                  ("kv_producer", 2, False), ("kv_both", 1, False)])
def test_b80_the_torch_transport_needs_a_decode_engine_of_one_rank(role, ranks, refused):
    config = PDConfig.parse(role, {"broker": "tcp://127.0.0.1:5700", "transport": "torch"})
    if refused:
        with pytest.raises(ConfigError, match="transport='torch'.*2 ranks.*write nixl, or use V1"):
            v0_checks.check_transport(config, ranks)
    else:
        v0_checks.check_transport(config, ranks)
