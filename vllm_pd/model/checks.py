# SPDX-License-Identifier: Apache-2.0
"""What both engines refuse before the model is loaded: loading takes minutes, and an error after it costs all of them.

The configurations are vLLM's, of any release that this package supports.
"""
from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_pd.errors import ConfigError, TransferError
from vllm_pd.extras import require_extra
from vllm_pd.model.installation import version_of
from vllm_pd.model.layers import check_layers, is_compressed
from vllm_pd.rpc.addresses import AUTO, is_loopback, look_up_broker
from vllm_pd.rpc.locality import is_own
from vllm_pd.rpc.ports import require_free
from vllm_pd.transfer.nixl.devices import check_variables, net_devices
from vllm_pd.transfer.transport import MAX_RANKS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pd.settings.engine import PDConfig

NIXL_TIMEOUT_S = 300  # it takes a second, on a crowded machine over a minute; a broken installation does not end
PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
LIMITS = {
    "tensor_parallel_size": (MAX_RANKS, f"use at most {MAX_RANKS}"),
}
FEATURES = {
    "enable_sleep_mode": "remove it: a sleeping engine's cache is memory that peers write to",
}


def check_limits(values: Mapping[str, int | None], limits: Mapping[str, tuple[int, str]] = LIMITS) -> None:
    """Raises ConfigError for a number in `values` that is above its limit. `limits`: key -> (most, cure)."""
    for key, (most, cure) in limits.items():
        if values[key] is not None and values[key] > most:
            raise ConfigError(key, values[key], cure)


def check_features(values: Mapping[str, Any], refused: Mapping[str, str] = FEATURES) -> None:
    """Raises ConfigError for a feature of vLLM that is on and can't be together with disaggregation. `refused`:
    key -> cure."""
    for key, cure in refused.items():
        if values[key]:
            raise ConfigError(key, values[key], cure)


def check_model(config: VllmConfig, with_states: bool = False, with_bytes: bool = False) -> None:
    """The model must be one whose prompt is nothing but KV, and, with `with_states`, recurrent states of some layers,
    and, with `with_bytes`, what only moves as whole bytes: an index beside the KV of some."""
    model: Any = config.model_config
    for refused, key, cure in (
        (model.runner_type != "generate", "runner_type", "serve a generating model: a pooling one has no decode"),
        (model.is_encoder_decoder, "model", "serve a decoder-only model: cross-attention blocks are not transferred"),
        (model.is_attention_free, "model", "serve a model with attention: there is no KV to transfer"),
        (model.has_inner_state and not with_states, "model",
         "serve a model without recurrent state: it is not in the KV blocks"),
    ):
        if refused:
            raise ConfigError(key, model.model, cure)
    check_layers(config, with_bytes)
    if config.cache_config.sliding_window is not None and not is_compressed(config):  # last: a cure keeps the model
        raise ConfigError("sliding_window", config.cache_config.sliding_window,
                          "add --disable-sliding-window: blocks that slide out have no place in the peer's table")


def check_parallel(config: VllmConfig) -> None:
    """The ranks must be on this host, and share the KV heads evenly."""
    parallel = config.parallel_config
    if parallel.world_size > 1 and parallel.distributed_executor_backend != "mp":
        raise ConfigError("distributed_executor_backend", parallel.distributed_executor_backend,
                          'write "mp": all workers must be on this host' + _of_ray(config))
    ranks, kv_heads = parallel.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if max(ranks, kv_heads) % min(ranks, kv_heads):
        raise ConfigError("tensor_parallel_size", ranks, f"choose one that divides the model's {kv_heads} KV heads")


def check_executor(config: VllmConfig, prefills: bool) -> None:
    """Each rank's process, also that of a single rank, must be EngineCore's or a child of it: they meet at a socket of
    this host, and each must be the process that the other expects. V0's single rank is in the engine's process. The
    engines of a server must stay the same. And where the ranks of a model with experts step together, one must be able
    to wake the others for a peer's job (`prefills`)."""
    backend = config.parallel_config.distributed_executor_backend
    if backend not in ("mp", "uni"):
        raise ConfigError("distributed_executor_backend", backend, 'write "mp", also with --data-parallel-backend ray: '
                          "only a child of EngineCore can be a rank" + _of_ray(config))
    if config.parallel_config.enable_elastic_ep:
        raise ConfigError("enable_elastic_ep", True, "remove it: the server drains and asks the engines that it had at "
                          "its start, and one that is gone never answers")
    parallel = config.parallel_config
    if prefills and parallel.data_parallel_size > 1 and parallel.data_parallel_rank_local is not None:
        raise ConfigError("VLLM_DP_SIZE", parallel.data_parallel_size, "serve the group with vllm serve "
                          "--data-parallel-size, or write kv_consumer: ranks without a server have no coordinator, so "
                          "one that has a peer's job would wait for the others for good")


def _of_ray(config: VllmConfig) -> str:
    """What to do where Ray Serve LLM has chosen the executor, which on GPUs takes no other."""
    if config.parallel_config.distributed_executor_backend != "ray":
        return ""
    return ("; Ray Serve LLM, which sets ray on GPUs, can't run this engine: start `vllm serve`, by Ray if you like, "
            "and send requests to it")


def check_stages(config: VllmConfig) -> None:
    """Every pipeline stage must have a layer, and an engine must not have too many ranks."""
    parallel, layers = config.parallel_config, config.model_config.get_total_num_hidden_layers()
    stages, ranks = parallel.pipeline_parallel_size, parallel.world_size
    if stages > layers:
        raise ConfigError("pipeline_parallel_size", stages, f"use at most {layers}, the layers of the model")
    if ranks > MAX_RANKS:
        raise ConfigError("pipeline_parallel_size", stages, f"use at most {MAX_RANKS} ranks in all: there are {ranks}")
    partition = os.environ.get(PARTITION_VARIABLE)
    try:
        empty = [stage for stage in range(stages) if not stage_layers(config, stage)]
    except ValueError as error:
        raise ConfigError(PARTITION_VARIABLE, partition, f"write the layers of each stage: {error}") from error
    if empty:
        raise ConfigError(PARTITION_VARIABLE, partition, f"give stage {empty[0]} a layer: it has no KV cache")


def stage_layers(config: VllmConfig, stage: int) -> range:
    """The layers of that pipeline stage, by their numbers in the model, as vLLM splits them. Raises ValueError for a
    partition that is none."""
    from vllm.distributed.utils import get_pp_indices
    layers, stages = config.model_config.get_total_num_hidden_layers(), config.parallel_config.pipeline_parallel_size
    return range(*get_pp_indices(layers, stage, stages))


def check_memory() -> None:
    """The KV cache must lie in memory that can be registered for transfers."""
    from vllm.platforms import current_platform
    for variable in ALLOCATOR_VARIABLES if current_platform.device_type == "cuda" else ():  # ROCm's is "cuda", too
        settings = os.environ.get(variable, "")
        if "expandable_segments:true" in settings.replace(" ", "").lower():
            raise ConfigError(variable, settings, "take expandable_segments:True out of it: memory that is mapped "
                              "piece by piece can't be registered for transfers as one")


def check_bind(bind: str) -> None:
    """The control socket's address must be one of this machine's. Port 0: whether it is free is not asked."""
    host = urlsplit(bind).hostname
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError("bind", bind, f"this machine can't listen there ({error}): write an address of its own"
                          ) from error


def check_meeting(bind: str, broker: str) -> None:
    """The broker's name must be known: one of them, where several servers are named. And an engine that listens at the
    loopback alone must not use a broker of another machine: engines there would connect to their own loopback."""
    for host, addresses in look_up_broker(broker).items():
        if is_loopback(urlsplit(bind).hostname) and not any(map(is_own, addresses)):
            raise ConfigError("bind", bind, f"the broker is at {host}, on another machine, as engines may be, and none "
                              "of these reaches this one's loopback: listen at an address of its own: write "
                              f'"{AUTO}", or one like tcp://10.0.0.6:0')


def require_free_bind(config: PDConfig) -> None:
    """The ports that the settings name must be free now."""
    address = urlsplit(config.bind)
    for key, port in (("bind", address.port), ("lifeline_port", config.lifeline_port)):
        if port:
            require_free(key, address.hostname, [port])


@functools.cache
def check_nixl(host: str) -> None:
    """NIXL must be there and able to make an agent with UCX that listens at `host`, an address. Tried in a process of
    its own: its libraries may touch the device, and workers that are forked after that can't. Raises ConfigError,
    MissingPackage."""
    require_extra("engine", "nixl")
    check_variables()
    try:
        net_devices(host)
    except TransferError as error:
        raise ConfigError("bind", host, str(error)) from error
    program = "import sys; from vllm_pd.transfer.nixl.agent import NixlAgent; NixlAgent('check', False, sys.argv[1])"
    try:
        tried = subprocess.run([sys.executable, "-c", program, host], capture_output=True, text=True,
                               timeout=NIXL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _broken_nixl(f"made no agent in {NIXL_TIMEOUT_S} s") from None
    if tried.returncode:
        lines = tried.stderr.strip().splitlines()
        raise _broken_nixl(lines[-1] if lines else f"ended with status {tried.returncode}")


def _broken_nixl(reason: str) -> ConfigError:
    return ConfigError("nixl", version_of("nixl"), f"{reason}: install the version again that this package requires: "
                       "pip install --force-reinstall nixl==VERSION")


def new_front_address() -> str:
    """Where the control agent and the server's front end, which may be another process, are to meet."""
    from vllm import envs
    return f"ipc://{envs.VLLM_RPC_BASE_PATH}/vllm-pd-{uuid.uuid4().hex}"
