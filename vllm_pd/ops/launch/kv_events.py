# SPDX-License-Identifier: Apache-2.0
"""Where the engines of a fleet publish their KV events: the value of --kv-events-config of each.

By default they publish over Unix sockets, as all processes are on one machine. Data-parallel ranks can't share one. On
TCP upstream's publisher listens at all interfaces or none, and what it sends has prompts in it: that is for the user to
decide. Then each engine and each rank has ports of its own, from those on that the user has written.
"""
import itertools
import json
import os
import tempfile
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from vllm_pd.errors import ConfigError
from vllm_pd.events import reach
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.launch.serve_args import value_of

FLAG = "--kv-events-config"
DEFAULT_ENDPOINT = "tcp://*:5557"  # upstream's
EXAMPLE = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": DEFAULT_ENDPOINT,
           "replay_endpoint": "tcp://*:5657"}
MAX_PATH_BYTES = 107  # of a Unix socket


def events_arguments(serve_args: Sequence[str], publishes: Sequence[bool], *, routed: bool) -> list[tuple[str, ...]]:
    """What is added to the command of each engine, where the user gives `serve_args` to all: nothing for those that
    don't publish, and for all where neither a router nor the user wants events. Raises ConfigError."""
    if not routed and value_of(FLAG, serve_args) is None:
        return [()] * len(publishes)
    configs = iter(_configs(serve_args, sum(publishes)))
    return [(FLAG, next(configs)) if each else () for each in publishes]


def events_config() -> str:
    """The value for an engine of one rank, over Unix sockets. A V1 engine gives no snapshots, so it keeps its events
    for those who come later. Raises ConfigError where the folder for temporary files has too long a name."""
    folder = tempfile.gettempdir()
    path = os.path.join(folder, f"vllm-pd-events-{uuid.uuid4().hex}")
    names = {"endpoint": path}
    if find_installation().world is World.PLUGIN:
        names["replay_endpoint"] = f"{path}-replay"
    over = max(len(os.fsencode(name)) for name in names.values()) - MAX_PATH_BYTES
    if over > 0:
        raise ConfigError("TMPDIR", folder, "Unix sockets in it would have too long names: use a folder whose name "
                          f"is at least {over} bytes shorter, like /tmp")
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq",
                       **{key: f"ipc://{name}" for key, name in names.items()}})


def _configs(serve_args: Sequence[str], count: int) -> list[str]:
    """The values for `count` engines that publish. Raises ConfigError."""
    given, (flag, ranks) = value_of(FLAG, serve_args), _ranks(serve_args)
    if given is None:
        if ranks > 1:
            raise ConfigError(flag, ranks, "each rank publishes its KV events for the router at TCP ports of its own: "
                              f"add {FLAG} '{json.dumps(EXAMPLE)}' after --, where no other host can reach these ports "
                              "and the next ones, of which each rank of each engine takes two")
        return [events_config() for _ in range(count)]
    try:
        config = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"-- {FLAG}", given, f"{error}: write it like '{json.dumps(EXAMPLE)}'") from None
    if not isinstance(config, dict):
        raise ConfigError(f"-- {FLAG}", given, f"write it like '{json.dumps(EXAMPLE)}'")
    if not config.get("enable_kv_cache_events"):
        return [given] * count
    listening = _listening(config)
    _require_room(given, listening.values(), count, ranks)
    return [json.dumps({**config, **{key: _of_engine(endpoint, number, ranks) for key, endpoint in listening.items()}})
            for number in range(count)]


def _ranks(serve_args: Sequence[str]) -> tuple[str, int]:
    """The flag for the number of data-parallel ranks, and that number; 1 where vLLM will refuse it."""
    for flag in ("--data-parallel-size", "-dp"):
        value = value_of(flag, serve_args)
        if value is not None:
            return flag, int(value) if value.isdecimal() and len(value) < 10 else 1
    return "--data-parallel-size", 1


def _listening(config: dict[str, Any]) -> dict[str, str]:
    """The endpoints at which a publisher with this configuration listens; it connects to any other."""
    endpoint, replay = config.get("endpoint", DEFAULT_ENDPOINT), config.get("replay_endpoint")
    listens = isinstance(endpoint, str) and reach.listens(endpoint)
    return {**({"endpoint": endpoint} if listens else {}),
            **({"replay_endpoint": replay} if isinstance(replay, str) else {})}


def _of_engine(endpoint: str, number: int, ranks: int) -> str:
    """The endpoint of the first rank of that engine."""
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{number}" if number else endpoint
    return endpoint if reach.lacks_port(endpoint) else reach.of_rank(endpoint, number * ranks)


def _require_room(given: str, endpoints: Collection[str], count: int, ranks: int) -> None:
    """Raises ConfigError where two ranks would listen at one port."""
    ports, taken = sorted(filter(None, map(_port, endpoints))), count * ranks
    if any(after - before < taken for before, after in itertools.pairwise([*ports, 65536])):
        raise ConfigError(f"-- {FLAG}", given, f"{taken} data-parallel ranks take the ports from each endpoint's on: "
                          f"write ports that are {taken} or more apart, and at most {65536 - taken}")
    if ranks > 1 and any(not endpoint.startswith("tcp://") for endpoint in endpoints):
        raise ConfigError(f"-- {FLAG}", given, "data-parallel ranks can't share a Unix socket: write TCP endpoints, "
                          f"like '{json.dumps(EXAMPLE)}'")


def _port(endpoint: str) -> int:
    """The port of a TCP endpoint; 0 where it has none."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdecimal() else 0
