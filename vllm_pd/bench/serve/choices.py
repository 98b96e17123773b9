# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm-pd bench serve`, checked before anything is started. All errors are ConfigErrors, which name the
option.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

from vllm_pd.bench.checks import parse_cores, parse_numbered, require_at_least, require_healthy
from vllm_pd.bench.serve import sharegpt
from vllm_pd.bench.serve.arms import Arm, ArmKind, FleetSettings, parse_arms
from vllm_pd.bench.serve.settings import LoadShape, ServeBench, ServeLoad
from vllm_pd.bench.serve.traffic import points, trace_prompts
from vllm_pd.errors import ConfigError
from vllm_pd.model.installation import World, find_installation
from vllm_pd.ops.launch.plan import default_gpu, engines_run_on_cpu
from vllm_pd.ops.launch.state import UpState
from vllm_pd.router.options import parse_worker

ENGINES = {World.PATCHED: "v0", World.PLUGIN: "v1"}


def check_load(load: LoadShape) -> None:
    """Raises ConfigError for sizes that make no load."""
    require_at_least([("--short-tokens", load.short_tokens, 1), ("--answer-tokens", load.answer_tokens, 2),
                      ("--long-tokens", load.long_tokens, 1), ("--long-answer-tokens", load.long_answer_tokens, 1),
                      ("--conversations", load.conversations, 1), ("--turns", load.turns, 1),
                      ("--system-prompts", load.system_prompts, 1), ("--system-tokens", load.system_tokens, 1),
                      ("--pause-s", load.pause_s, 0)])
    if not load.pause_s < math.inf:
        raise ConfigError("--pause-s", load.pause_s, "write a number of seconds")
    for key, value in (("--duration-s", load.duration_s), ("--long-every-s", load.long_every_s)):
        if not 0 < value < math.inf:
            raise ConfigError(key, value, "write a number of seconds above 0")
    if not 0 <= load.long_share <= 1:
        raise ConfigError("--long-share", load.long_share, "write 0 to 1")


def shape_of(bench: ServeBench) -> LoadShape:
    """The load, with the prompts of its trace."""
    check_load(bench.load)
    if (bench.trace is not None) != (bench.load.load is ServeLoad.TRACE):
        raise ConfigError("--trace", bench.trace and str(bench.trace), "the load trace needs a file, and no other load "
                          "has one")
    shape = bench.load if bench.trace is None else replace(bench.load, trace=sharegpt.read(bench.trace))
    rounds = 1 if bench.export is not None else bench.rounds
    if bench.trace is not None:
        _check_trace(bench.trace, shape, rounds)
    for point in (point for turn in range(rounds) for point in points(shape, turn)):
        if not point.chains():
            raise ConfigError("--duration-s", shape.duration_s, f"no request is sent at {point.label}: write more")
    return shape


def _check_trace(path: Path, shape: LoadShape, rounds: int) -> None:
    """Raises ConfigError for a trace that does not have a prompt of its own for each request. A load of one rate and
    one round ends with its trace."""
    needed, parts = trace_prompts(shape, rounds), rounds * len(shape.values)
    if parts > 1 and len(shape.trace) < needed:
        raise ConfigError("--trace", str(path), f"it has {len(shape.trace):,} prompts, and {rounds} x "
                          f"{len(shape.values)} (--rounds, --rate) loads of {shape.duration_s:g} s need {needed:,}, as "
                          "each is sent once: write fewer --rate or --rounds, a smaller --duration-s, or a longer file")


def check(bench: ServeBench) -> None:
    """Raises ConfigError for the first option that can't be used."""
    check_load(bench.load)
    require_at_least([("--rounds", bench.rounds, 1), ("--warm-up", bench.warm_up, 0),
                      ("--prefill", bench.prefill, 1), ("--decode", bench.decode, 1)])
    for key, value in (("--ttft-slo", bench.ttft_slo), ("--itl-slo", bench.itl_slo),
                       ("--timeout-s", bench.timeout_s)):
        if not value > 0:
            raise ConfigError(key, value, "write a number above 0")
    if bench.compare not in ("tokens", "text"):
        raise ConfigError("--compare", bench.compare, "write tokens or text")
    if bench.url and bench.state is not None:
        raise ConfigError("--url", bench.url, "--state names a fleet too: write one of both")
    if bench.given and bench.arms:
        raise ConfigError("--arm", bench.arms[0], "leave it out with --url and --state, which name the fleet")
    if not bench.given and not bench.model:
        raise ConfigError("MODEL", "", "write the model, or --url or --state for a fleet that runs")
    _check_engine(bench.engine)
    if bench.load.load in (ServeLoad.CONCURRENCY, ServeLoad.RATE) and bench.load.long_share == 1 and not bench.given:
        for arm in parse_arms(bench.arms):
            if not arm.with_long:
                raise ConfigError("--long-share", bench.load.long_share, f"the arm {arm.name} gets no long prompts, so "
                                  "it would get nothing: write less than 1, or name other arms with --arm")


def _check_engine(engine: str) -> None:
    if engine and engine not in ENGINES.values():
        raise ConfigError("--engine", engine, f"write one of {', '.join(ENGINES.values())}")
    world = find_installation().world
    if engine and ENGINES.get(world) != engine:
        raise ConfigError("--engine", engine, f"{world.value} is installed here: leave the option out, or "
                          f"enter the environment of {engine}")


def chosen(bench: ServeBench) -> tuple[Arm, ...]:
    """The arms. Raises ConfigError, also for a fleet that does not answer."""
    if not bench.given:
        return parse_arms(bench.arms)
    if bench.state is None:
        key, urls, behind = "--url", (parse_worker("--url", bench.url), ), ()
    else:
        state = UpState.read(bench.state)
        key, urls, behind = "--state", state.entries, state.decode if state.router else ()
    require_healthy(key, (*urls, *behind))
    return (Arm("given", ArmKind.GIVEN, urls=urls, behind=behind), )


def fleet(bench: ServeBench) -> FleetSettings:
    """What the planned fleets have in common. Raises ConfigError."""
    on_cpu = engines_run_on_cpu() and not bench.gpus
    cores = parse_cores("--cores", bench.cores) or tuple(sorted(os.sched_getaffinity(0)))
    gpus = () if on_cpu else parse_numbered("--gpus", bench.gpus) or (default_gpu(), )
    return FleetSettings(bench.model, bench.prefill, bench.decode, bench.pd, tuple(bench.serve_args), bench.port, cores,
                         gpus, find_installation().world is World.PLUGIN, **bench.programs)
