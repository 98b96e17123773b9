# SPDX-License-Identifier: Apache-2.0
"""The plan of `vllm-pd up`: the commands of a broker, the engines and perhaps a router. Nothing is started here.

The whole plan is checked before anything starts, because an engine needs half a minute to find out that its port is
taken or that a setting is misspelt.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from vllm_pd.errors import ConfigError
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.launch.kv_events import FLAG as EVENTS_FLAG
from vllm_pd.ops.launch.kv_events import events_arguments
from vllm_pd.ops.launch.router_args import RouterArgs, parse_router_args
from vllm_pd.ops.launch.serve_args import refuse_ours, value_of, without
from vllm_pd.ops.launch.shares import parse_numbered, split_evenly
from vllm_pd.protocol.messages import Role
from vllm_pd.router.options import API_KEY_VARIABLE, METASERVER_PATH, OPERATOR_KEY_VARIABLE, RequestOrder
from vllm_pd.rpc.ports import require_free, take_free
from vllm_pd.settings.engine import PDConfig
from vllm_pd.settings.options import Option

SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
BROKER = (sys.executable, "-m", "vllm_pd.cli", "broker")
ROUTER = (sys.executable, "-m", "vllm_pd.cli", "router")
HOST = "127.0.0.1"
STARTING_AT_ONCE = 2  # starting needs mostly the CPU
STOP_MARGIN_S = 10.0  # for the end of the processes, after a drain
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_MEMORY = 0.8  # of each, for all engines that share it
MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")
SPLITS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
ROLE_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(frozen=True)
class UpOptions:
    """The command line of `vllm-pd up`. `pd` holds settings of PDConfig, `serve_args` goes to every `vllm serve`. With
    `router`, the router listens at `port` and the engines take the next ports."""
    model: Annotated[str, Option("The model, as `vllm serve` takes it.", argument=True)]
    prefill: Annotated[int, Option("How many prefill engines.")] = 1
    decode: Annotated[int, Option("How many decode engines.")] = 1
    port: Annotated[int, Option("Port of the router, or of the first engine where there is no router. The other "
                                "engines take the next ports, decode engines first.")] = 8000
    broker_port: Annotated[int, Option("Port of the broker; 0 takes a free one.")] = 0
    pd: Annotated[Mapping[str, Any], Option(
        "A setting of every engine, like max_local_prefill_tokens=500; may be repeated.", metavar="KEY=VALUE",
        parse=lambda texts: parse_settings(texts))] = field(default_factory=dict)
    gpus: Annotated[str, Option("The GPUs that the engines share, evenly; by default each sees all of them.",
                                metavar="0,1")] = ""
    serve_args: Annotated[Sequence[str], Option("What follows -- goes to every `vllm serve`.", metavar="[-- ARGS...]",
                                                argument=True)] = ()
    router: Annotated[bool, Option("Start a router in front of the decode engines.")] = False
    order: Annotated[RequestOrder, Option(
        "The router's: decode-first or prefill-first.", parse=lambda text: text.replace("_", "-"))
    ] = RequestOrder.DECODE_FIRST
    router_args: Annotated[str, Option(
        'Options for the router, as one text, like "--continue-streams --unready-s 5".', metavar="ARGS")] = ""


@dataclass(frozen=True)
class RouterPlan:
    """The router of a plan. `ending_s`: how long it serves open requests after SIGTERM."""
    port: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    ending_s: float

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """One `vllm serve`. `cores` is empty where the engine is not pinned to any."""
    name: str
    role: Role
    port: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    cores: tuple[int, ...]

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://{HOST}:{self.port}"


@dataclass(frozen=True)
class FleetPlan:
    """Everything that `up` starts. The decode engines come first, as clients talk to them. `drain_timeout_s` is the
    engines' setting."""
    broker_port: int
    broker_command: tuple[str, ...]
    engines: tuple[EnginePlan, ...]
    drain_timeout_s: float
    router: RouterPlan | None = None

    @property
    def ending_s(self) -> float:
        """How long open requests may take after SIGTERM, at the engines or at the router."""
        return max(self.drain_timeout_s, self.router.ending_s if self.router is not None else 0.0)

    @property
    def stop_timeout_s(self) -> float:
        """After how long a process that has not ended is killed, unless the user says otherwise."""
        return self.ending_s + STOP_MARGIN_S

    @property
    def broker_url(self) -> str:
        """The broker's address, as engines need it."""
        return f"tcp://{HOST}:{self.broker_port}"


def plan_fleet(options: UpOptions, cores: Sequence[int], *, serve: Sequence[str] = SERVE,
               broker: Sequence[str] = BROKER, router: Sequence[str] = ROUTER) -> FleetPlan:
    """The plan for `options`. Each engine is pinned to its share of `cores`, unless there are fewer cores than engines,
    or runs on its share of the GPUs. `serve`, `broker` and `router` are the beginnings of the commands.

    Raises ConfigError for invalid options and settings, and for ports that are in use.
    """
    for key, value in (("--prefill", options.prefill), ("--decode", options.decode)):
        if value < 1:
            raise ConfigError(key, value, "a prompt is handed from one engine to another: write 1 or more")
    refuse_ours(options.serve_args)
    prefill_first = _is_prefill_first(options)
    count = options.prefill + options.decode
    ports = _parse_ports(options, count)
    if "broker" in options.pd:
        raise ConfigError("--pd broker", options.pd["broker"], "`up` starts the broker itself: use --broker-port")
    configs = {role: PDConfig.parse(role.value, {**options.pd, "broker": f"tcp://{HOST}:1"}) for role in ROLE_NAMES}
    drain_timeout_s = configs[Role.DECODE].drain_timeout_s
    router_args = _router_args(options, drain_timeout_s)
    _check_metaserver(router_args.options.metaserver, options.port, configs[Role.DECODE])
    _check_shared(options, configs[Role.DECODE])
    if prefill_first and not configs[Role.PREFILL].holds_prompts:
        raise ConfigError("--order", options.order, "with these settings no prefill engine keeps a prompt: leave out "
                          "--pd transport=torch and --pd hold_s=0, or --order")
    broker_port = _find_broker_port(options, ports)
    broker_url = f"tcp://{HOST}:{broker_port}"
    roles = [Role.DECODE] * options.decode + [Role.PREFILL] * options.prefill
    gpus = parse_numbered("--gpus", options.gpus)
    shares = split_evenly(() if gpus else cores, count)
    on_gpus = gpu_places(gpus, count, options.serve_args) if gpus else [({}, ())] * count
    numbers = [*range(options.decode), *range(options.prefill)]
    asks_prefills = prefill_first or router_args.options.asks_prefills
    publishes = [not options.router or role.decodes or asks_prefills for role in roles]
    events = events_arguments(options.serve_args, publishes, routed=options.router)
    engines = tuple(
        EnginePlan(name=f"{ROLE_NAMES[role]} {number}", role=role, port=port, cores=share,
                   env=gpu_env or omp_env(share, crowded=0 < len(cores) < count),
                   command=(*serve, options.model, "--host", HOST, "--port", str(port), "--kv-transfer-config",
                            transfer_config(role, broker_url, options.pd), *publishing,
                            *without(EVENTS_FLAG, options.serve_args), *gpu_arguments))
        for role, number, port, share, (gpu_env, gpu_arguments), publishing in zip(
            roles, numbers, ports[options.router:], shares, on_gpus, events, strict=True))
    keys = ("--keys", str(options.pd["keys"])) if "keys" in options.pd else ()
    ttl = ("--ttl-s", str(options.pd["ttl_s"])) if "ttl_s" in options.pd else ()
    order = ("--order", RequestOrder.PREFILL_FIRST.value) if prefill_first else ()
    front = _plan_router(options, router_args, (
        *router, "--port", str(options.port), "--broker", broker_url, *keys, *order)) if options.router else None
    return FleetPlan(broker_port, (*broker, "--bind", broker_url, *keys, *ttl), engines,
                     drain_timeout_s, front)


def _parse_ports(options: UpOptions, engines: int) -> range:
    """Those of the router, if there is one, and the engines. Raises ConfigError for these and the broker's."""
    taken = engines + options.router
    if not 1 <= options.port <= 65536 - taken:
        raise ConfigError("--port", options.port, f"the {engines} engines{' and the router' * options.router} take "
                          f"that port and the next ones: write 1 to {65536 - taken}")
    if not 0 <= options.broker_port <= 65535:
        raise ConfigError("--broker-port", options.broker_port, "write 1 to 65535, or 0 for a free one")
    ports = range(options.port, options.port + taken)
    if options.broker_port in ports:
        raise ConfigError("--broker-port", options.broker_port, f"an engine gets that port: write one outside "
                          f"{ports.start}..{ports.stop - 1}, or 0 for a free one")
    return ports


def _check_shared(options: UpOptions, config: PDConfig) -> None:
    """Raises ConfigError for a port of which each engine needs its own."""
    if not config.bind.endswith(":0"):
        raise ConfigError("--pd bind", options.pd["bind"], "each engine needs a control port of its own: write port 0, "
                          "or leave it out")
    if config.lifeline_port:
        raise ConfigError("--pd lifeline_port", options.pd["lifeline_port"], "each engine needs one of its own: leave "
                          "it out")


def _find_broker_port(options: UpOptions, ports: range) -> int:
    """The broker's, beside `ports`. Raises ConfigError where one of them all is in use."""
    require_free("--port", HOST, ports)
    if options.broker_port:
        require_free("--broker-port", HOST, [options.broker_port])
    broker_port = options.broker_port or take_free(HOST)
    while broker_port in ports:  # they are free as yet
        broker_port = take_free(HOST)
    return broker_port


def _plan_router(options: UpOptions, arguments: RouterArgs, command: tuple[str, ...]) -> RouterPlan:
    """`command`: its beginning."""
    keys = {API_KEY_VARIABLE: value_of("--api-key", options.serve_args),
            OPERATOR_KEY_VARIABLE: os.environ.get(OPERATOR_KEY_VARIABLE)}
    return RouterPlan(options.port, (*command, *arguments.words),
                      {variable: key for variable, key in keys.items() if key is not None},
                      arguments.options.unready_s + arguments.options.grace_s)


def _is_prefill_first(options: UpOptions) -> bool:
    """Whether prefill engines get requests first. Raises ConfigError where that is impossible."""
    if options.order not in set(RequestOrder):
        raise ConfigError("--order", options.order, f"write one of {', '.join(RequestOrder)}")
    if options.order == RequestOrder.DECODE_FIRST:
        return False
    if not options.router:
        raise ConfigError("--order", options.order, "it is the router's: add --router, or leave it out")
    if find_installation().world is World.PATCHED:
        raise ConfigError("--order", options.order, "engine V0 computes a prompt first only for a decode engine that "
                          "has asked: leave it out, or use engine V1")
    return True


def _router_args(options: UpOptions, drain_timeout_s: float) -> RouterArgs:
    """What the router is started with besides: requests are open there as long as at the engines. Raises ConfigError.
    """
    if options.router_args and not options.router:
        raise ConfigError("--router-args", options.router_args, "they are the router's: add --router, or leave them "
                          "out")
    if not options.router:
        return RouterArgs()
    return parse_router_args(options.router_args, value_of("--api-key", options.serve_args), drain_timeout_s,
                             options.order)


def _check_metaserver(url: str | None, port: int, decode: PDConfig) -> None:
    """Raises ConfigError for a URL that is not the router's, which has this port, or to which no decode engine would
    post."""
    if url is None:
        return
    if urlsplit(url).port != port:
        raise ConfigError("--router-args --metaserver", url, f"the router has port {port}: write "
                          f"http://{HOST}:{port}{METASERVER_PATH}")
    if url not in decode.metaserver_urls:
        raise ConfigError("--pd metaservers", decode.metaservers, "decode engines post to no other URL: write "
                          f"metaservers={url}")


def transfer_config(role: Role, broker_url: str, pd: Mapping[str, Any]) -> str:
    """The value of --kv-transfer-config for an engine of this role."""
    return json.dumps({"kv_connector": "PDConnector", "kv_role": role.value,
                       "kv_connector_extra_config": {"broker": broker_url, **pd}})


def starting_at_once(engines: Sequence[EnginePlan]) -> int:
    """How many of these engines may start at the same time.

    Only one where two of them share a GPU: as vLLM starts, it measures how much memory of the GPU the model needs, and
    counts what another engine takes meanwhile as its own. With --kv-cache-memory-bytes it does not measure.
    """
    inherited = None if engines_run_on_cpu() else os.environ.get(VISIBLE, "all")
    measuring = [engine.env.get(VISIBLE, inherited) for engine in engines
                 if value_of("--kv-cache-memory-bytes", engine.command) is None]
    on_gpus = [one for one in measuring if one is not None]
    return 1 if len(on_gpus) > len(set(on_gpus)) else STARTING_AT_ONCE


def engines_run_on_cpu() -> bool:
    """Whether the installed vllm is built for the CPU. Engines on accelerators are not pinned."""
    found = find_installation()
    return "cpu" in found.distribution or "cpu" in (found.vllm or "")


def cores_to_pin(options: UpOptions, pin: bool | None) -> list[int]:
    """The cores that the engines are pinned to; none where they are not. `pin` is the user's choice, None without one.
    Raises ConfigError for engines on GPUs that are to be pinned, or that would not share their memory."""
    if pin and options.gpus:
        raise ConfigError("--gpus", options.gpus, "engines on GPUs are not pinned: leave out --pin, or --gpus")
    on_cpu = engines_run_on_cpu()
    sized = options.gpus or any(value_of(flag, options.serve_args) is not None for flag in MEMORY_FLAGS)
    if not (on_cpu or sized or find_installation().world in (World.NONE, World.ALONE)):
        raise ConfigError("--gpus", None, "each engine would take nearly all memory of the same GPU: write the GPUs "
                          "that they share, like --gpus 0,1, or all of them on one with --gpus 0")
    return sorted(os.sched_getaffinity(0)) if (on_cpu if pin is None else pin) else []


def parse_setting(text: str) -> tuple[str, Any]:
    """(key, value) of one `--pd KEY=VALUE`. The value is parsed as JSON if it is JSON, else it is a string. Raises
    ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError("--pd", text, "write it as key=value, like lease_s=30")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # ValueError alone: a number of too many digits
        return key, value


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """The settings of several `--pd KEY=VALUE`. Raises ConfigError for an invalid one, and for a key given twice."""
    settings: dict[str, Any] = {}
    for text in texts:
        key, value = parse_setting(text)
        if key in settings:
            raise ConfigError(f"--pd {key}", value, f"it is given before as {settings[key]!r}: write each key once")
        settings[key] = value
    return settings


def default_gpu() -> str:
    """The GPU of a benchmark that is told none: the first of those that this process was given, as the variable has it
    (a number, or the UUID of a GPU or a part of one), or else 0."""
    return os.environ.get(VISIBLE, "0").partition(",")[0]


def gpu_places(gpus: Sequence[int | str], count: int,
               serve_args: Sequence[str]) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """The environment of each of `count` engines that share these GPUs, and what it needs beside `serve_args`: a
    tensor-parallel rank on each of its GPUs, or its part of the memory of one that several engines use."""
    sharing = -(-count // len(gpus))
    split = any(value_of(flag, serve_args) is not None for flag in SPLITS)
    places = []
    for number, share in enumerate(split_evenly(gpus, count)):
        owned = share or (gpus[number % len(gpus)], )
        arguments: tuple[str, ...] = ()
        if len(owned) > 1 and not split:
            arguments += ("--tensor-parallel-size", str(len(owned)))
        if sharing > 1 and value_of("--gpu-memory-utilization", serve_args) is None:
            arguments += ("--gpu-memory-utilization", f"{GPU_MEMORY / sharing:.2f}")
        places.append(({VISIBLE: ",".join(map(str, owned))}, arguments))
    return places


def omp_env(share: Sequence[int], *, crowded: bool) -> dict[str, str]:
    """The environment of an engine's OpenMP threads. They wait for each other, so they must not share cores: an engine
    without cores of its own gets one thread."""
    if crowded:
        unbound = "nobind" if find_installation().world is World.PLUGIN else "all"
        return {"VLLM_CPU_OMP_THREADS_BIND": unbound, "OMP_NUM_THREADS": "1"}
    if not share:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, share)), "OMP_NUM_THREADS": str(len(share))}
