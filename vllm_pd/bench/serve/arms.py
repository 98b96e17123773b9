# SPDX-License-Identifier: Apache-2.0
"""What is compared: the arms, and for each of them which engines run where. Nothing is started here.

All arms have the same cores or GPUs. `pd` has prefill and decode engines; `mixed` and `chunked` as many plain engines
behind a router; `alone` has plain engines on the cores that pd's decode engines have, and gets no long prompts;
`single` is one plain engine on everything. `pd-first` is `pd` in the order prefill-first, `nixl` the same with
upstream's NixlConnector, both of V1; the load generator does there what a proxy does. Where an arm has more engines
than cores, each gets one thread, and they take turns on all cores as the operating system lets them.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from vllm_pd.bench.servers import RouterCommand
from vllm_pd.errors import ConfigError
from vllm_pd.ops.launch.kv_events import events_config
from vllm_pd.ops.launch.plan import (
    BROKER,
    HOST,
    SERVE,
    VISIBLE,
    EnginePlan,
    FleetPlan,
    UpOptions,
    gpu_places,
    omp_env,
    plan_fleet,
)
from vllm_pd.ops.launch.serve_args import refuse_ours, value_of
from vllm_pd.ops.launch.shares import split_evenly
from vllm_pd.protocol.messages import Role
from vllm_pd.router.options import NO_TOKENIZER
from vllm_pd.router.policy import Policy
from vllm_pd.rpc.ports import require_free, take_free, take_free_run

BUDGETS = (64, 256, 1024)
DEFAULT = ("alone", "pd", "mixed-rr", "chunked-256")


class ArmKind(Enum):
    """What an arm's engines are. GIVEN: a fleet that somebody else has started."""
    ALONE = "alone"
    PD = "pd"
    PD_FIRST = "pd-first"
    MIXED = "mixed"
    CHUNKED = "chunked"
    SINGLE = "single"
    NIXL = "nixl"
    GIVEN = "given"


@dataclass(frozen=True)
class Arm:
    """One of the compared. `budget`: `max_num_batched_tokens` of a chunked one. Of a given one: `urls`, where requests
    go, and `behind`, the engines behind its router, as far as they are known."""
    name: str
    kind: ArmKind
    policy: Policy = Policy.ROUND_ROBIN
    budget: int = 0
    urls: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def with_long(self) -> bool:
        """Whether it gets the long prompts too."""
        return self.kind is not ArmKind.ALONE


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these names, each once; the default where there are none. Raises ConfigError naming `--arm`."""
    found = {arm.name: arm for name in names or DEFAULT for arm in _parse_arm(name)}
    return tuple(found.values())


def _parse_arm(name: str) -> list[Arm]:
    """The arms of one name; `mixed` and `chunked` are names of several. Raises ConfigError naming `--arm`."""
    mixed = [Arm("mixed-rr", ArmKind.MIXED), Arm("mixed-kv", ArmKind.MIXED, Policy.KV)]
    known = {"alone": [Arm("alone", ArmKind.ALONE)], "pd": [Arm("pd", ArmKind.PD)], "mixed": mixed,
             "mixed-rr": mixed[:1], "mixed-kv": mixed[1:], "single": [Arm("single", ArmKind.SINGLE)],
             "pd-first": [Arm("pd-first", ArmKind.PD_FIRST)], "nixl": [Arm("nixl", ArmKind.NIXL)],
             "chunked": [Arm(f"chunked-{budget}", ArmKind.CHUNKED, budget=budget) for budget in BUDGETS]}
    kind, _, budget = name.partition("-")
    if kind == "chunked" and budget.isdecimal() and int(budget):
        return [Arm(name, ArmKind.CHUNKED, budget=int(budget))]
    if name not in known:
        raise ConfigError("--arm", name, f"write one of {', '.join(known)}, chunked-N")
    return known[name]


@dataclass(frozen=True)
class FleetSettings:
    """What the fleets of all arms have in common. `port` 0: free ones. Engines share the `gpus` (numbers or UUIDs), or
    else `cores`."""
    model: str
    prefill: int = 1
    decode: int = 1
    pd: Mapping[str, Any] = field(default_factory=dict)
    serve_args: tuple[str, ...] = ()
    port: int = 0
    cores: tuple[int, ...] = ()
    gpus: tuple[int | str, ...] = ()
    v1: bool = False
    serve: Sequence[str] = SERVE
    broker: Sequence[str] = BROKER


@dataclass(frozen=True)
class Place:
    """Where an engine runs: its cores, and the variables and arguments that keep it there."""
    cores: tuple[int, ...]
    env: dict[str, str]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArmPlan:
    """How an arm is started. `fleet` where it is disaggregated; else `engines`, with a router in front of several.
    `where`: on what, in words. `prefill_first`: each prompt goes to a prefill engine before its decode engine."""
    engines: tuple[EnginePlan, ...]
    where: str
    fleet: FleetPlan | None = None
    router: RouterCommand | None = None
    router_port: int = 0
    policy: Policy = Policy.ROUND_ROBIN
    prefill_first: bool = False


def plan_arm(arm: Arm, settings: FleetSettings) -> ArmPlan:
    """The plan of one arm. Raises ConfigError for settings that can't be used, and for ports that are in use."""
    if arm.kind in (ArmKind.PD_FIRST, ArmKind.NIXL) and not settings.v1:
        raise ConfigError("--arm", arm.name, "only engine V1 computes prompts first: leave it out, or enter the "
                          "environment of v1")
    if arm.kind in (ArmKind.PD, ArmKind.PD_FIRST):
        return _plan_pd(settings, arm.kind is ArmKind.PD_FIRST)
    refuse_ours(settings.serve_args)
    both = settings.prefill + settings.decode
    count = {ArmKind.ALONE: settings.decode, ArmKind.SINGLE: 1}.get(arm.kind, both)
    spread = places(settings, both)[:count] if arm.kind is ArmKind.ALONE else places(settings, count)
    routed = count > 1 and arm.kind is not ArmKind.NIXL
    taken = count + routed
    if settings.port and not 1 <= settings.port <= 65536 - taken:
        raise ConfigError("--port", settings.port, f"{arm.name} takes that port and the next ones, {taken} in all: "
                          f"write 1 to {65536 - taken}, or 0 for free ones")
    first = settings.port or take_free_run(HOST, taken)
    require_free("--port", HOST, range(first, first + taken))
    engines = tuple(_engine(arm, settings, number, first + routed + number, place)
                    for number, place in enumerate(spread))
    router = _router(arm, settings, engines) if routed else None
    return ArmPlan(engines, described(settings, spread), router=router, router_port=first, policy=arm.policy)


def _engine(arm: Arm, settings: FleetSettings, number: int, port: int, place: Place) -> EnginePlan:
    """One engine that is not ours to disaggregate."""
    env = place.env if settings.v1 else {"VLLM_USE_V1": "0"} | place.env
    role = Role.BOTH
    if arm.kind is ArmKind.NIXL:
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(take_free(HOST))}
        role = Role.DECODE if number < settings.decode else Role.PREFILL
    command = (*settings.serve, settings.model, "--host", HOST, "--port", str(port), *settings.serve_args,
               *arm_arguments(arm, settings), *place.arguments)
    return EnginePlan(f"{arm.name} {number}", role, port, command, env, place.cores)


def arm_arguments(arm: Arm, settings: FleetSettings) -> tuple[str, ...]:
    """What an arm adds to the command line of its engines. A budget below the number of sequences is refused by
    vLLM."""
    if arm.kind is ArmKind.NIXL:
        device = {} if settings.gpus else {"kv_buffer_device": "cpu"}
        return ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", **device}))
    if arm.policy is Policy.KV and value_of("--kv-events-config", settings.serve_args) is None:
        return ("--kv-events-config", events_config())
    if not arm.budget:
        return ()
    few = () if value_of("--max-num-seqs", settings.serve_args) else ("--max-num-seqs", str(min(arm.budget, 64)))
    return ("--enable-chunked-prefill", "--max-num-batched-tokens", str(arm.budget), *few)


def places(settings: FleetSettings, count: int) -> list[Place]:
    """Where `count` engines run: on shares of the cores or GPUs, or all on all of them where there are too few."""
    cores = settings.cores
    if not settings.gpus:
        crowded = 0 < len(cores) < count
        passive = {"OMP_WAIT_POLICY": "passive"} if cores else {}  # the front ends run on the same cores
        return [Place(share or cores, omp_env(share, crowded=crowded) | passive)
                for share in split_evenly(cores, count)]
    return [Place(cores, env, arguments) for env, arguments in gpu_places(settings.gpus, count, settings.serve_args)]


def described(settings: FleetSettings, spread: Sequence[Place]) -> str:
    """On what the engines of an arm run, in words."""
    numbers, what = (settings.gpus, "GPU") if settings.gpus else (settings.cores, "core")
    shares = {(place.cores, place.env.get(VISIBLE)) for place in spread}
    if len(shares) < len(spread) and numbers:
        return f"{len(spread)} engines, time-sliced on {what} {','.join(map(str, numbers))}"
    used = [place.env.get(VISIBLE) or ",".join(map(str, place.cores)) for place in spread]
    return f"{len(spread)} engine{'s' * (len(spread) > 1)}, {what} {' | '.join(used)}"


def _plan_pd(settings: FleetSettings, prefill_first: bool) -> ArmPlan:
    """The fleet that `vllm-pd up` would start, with each engine at its place. Several decode engines have a router in
    front of them, but not with `prefill_first`, where the load generator does what a proxy does. Raises ConfigError."""
    count, routed = settings.prefill + settings.decode, settings.decode > 1 and not prefill_first
    port = settings.port or take_free_run(HOST, count + routed)
    options = UpOptions(settings.model, settings.prefill, settings.decode, port, pd=settings.pd,
                        serve_args=settings.serve_args, router=routed)
    plan = plan_fleet(options, (), serve=settings.serve, broker=settings.broker)
    spread = places(settings, count)
    engines = tuple(replace(engine, cores=place.cores, env={**engine.env, **place.env},
                            command=(*engine.command, *place.arguments))
                    for engine, place in zip(plan.engines, spread, strict=True))
    return ArmPlan(engines, described(settings, spread), fleet=replace(plan, engines=engines),
                   prefill_first=prefill_first)


def _router(arm: Arm, settings: FleetSettings, engines: Sequence[EnginePlan]) -> RouterCommand:
    """The router of plain engines. A stock V1 engine has no route for the addresses of
    its events, so they go onto the router's command line."""
    tokenizer = shlex.quote(settings.model) if arm.policy is Policy.KV else NO_TOKENIZER
    addresses: list[str] = []
    for engine in engines if settings.v1 and arm.policy is Policy.KV else ():
        events = json.loads(value_of("--kv-events-config", engine.command) or "{}")
        sockets = [events[name] for name in ("endpoint", "replay_endpoint") if name in events]
        addresses.append(shlex.quote(f"--worker-events={engine.url}={','.join(sockets)}"))
    return RouterCommand.ours(" ".join([f"router=--policy {arm.policy.value} --tokenizer {tokenizer}", *addresses]))
