# SPDX-License-Identifier: Apache-2.0
"""The parts with engines: one stock engine says what is right, then two disaggregated ones must say the same.

Engines are started as `vllm-pd bench serve` starts them. All share the one GPU, or the cores with `--device cpu`. The
environment variables of an engine are set in this process: each part has a process of its own.

Sums in 16 bits differ with the batch they are made in. So only prompts count whose answer no such difference changes:
at each token of it the next best one is less likely by MARGINS, in log-probability.
"""
from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from _gpu_check.child import PartRun, require
from _gpu_check.harness import ANSWERS, STOCK
from _gpu_check.results import PartFailed, PartOutcome, PartSkipped, read_result, write_json

NEEDS = ("torch", "nixl", "msgspec", "zmq", "vllm")
MODEL_TOKENS = 2048
MAX_LOCAL_TOKENS = 40
PROMPT_TOKENS = (50, 900)
GPU_SHARE = "0.40"
SMALL_SHARE = "0.10"  # side by side with all other parts
KV_BYTES = str(2 << 30)  # for parts whose engines start side by side
STOP_RESERVE_S = 10.0
MARGINS = {"cuda": 0.1, "cpu": 1e-3}
DRAWN_FOR_EACH = {"cuda": 3, "cpu": 1.2}  # prompts drawn for each that is still wanted, in each of so many rounds
MOST_ROUNDS = 12
VARIANT_PROMPTS = 20
PAIR_S = 60.0  # how long the engines may take to find each other
CUDA_NVCC = "/usr/local/cuda/bin/nvcc"
MOST_AT_ONCE = "16"  # requests of an engine, so of few sizes a graph is captured
V2_LINE = "Using V2 Model Runner"
RUNNER_LINES = (V2_LINE, "Graph capturing finished")  # of each engine, V1
METRICS = ("vllm:pd_attempts_total", "vllm:pd_handover_seconds", "vllm:pd_parked_seconds", "vllm:pd_transfer_bytes")


@dataclass(frozen=True)
class EngineVariant:
    """How a pair of engines runs. `environment` and `arguments` are for both. `needs`: what their fingerprints must
    say, `lines`: what each of them must have printed, `never`: what none may have printed."""
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    needs: dict[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


class RunningPair(NamedTuple):
    """Engines that are ready: URLs and process ids, decode engines first, the broker's address ("" without one), and
    what they print, (name, line), as it comes."""
    urls: list[str]
    pids: tuple[int, ...]
    broker: str
    lines: list[tuple[str, str]]


def ask_stock(run: PartRun) -> None:
    """One engine as vLLM starts it, without a connector: what it answers is right for the parts behind this one."""
    v1 = prepare(run)
    stock_answers(run, run.settings.prompts, v1)


def check_b1(run: PartRun) -> None:
    """Two engines at GPU_SHARE of the memory each, `--prompts` prompts. V1 has model runner V1 here: the stock engine
    has the one that vLLM chooses."""
    check_pair(run, plain_pair(run, prepare(run)), run.settings.prompts)


def plain_pair(run: PartRun, v1: bool) -> EngineVariant:
    """Engines without graphs. They have the model runner V1 where the engine has two."""
    return EngineVariant({"VLLM_USE_V2_MODEL_RUNNER": "0"} if v1 else {}, ("--enforce-eager", *own_memory(run, v1)),
                         never=(V2_LINE, ))


def check_runner(run: PartRun) -> None:
    """V1's model runner V2 with CUDA graphs and async scheduling."""
    _require_gpu(run, "CUDA graphs")
    v1 = prepare(run)
    if not v1:
        raise PartSkipped("model runner V2 is one of engine V1, and the patched vLLM is installed here")
    check_pair(run, EngineVariant({"VLLM_USE_V2_MODEL_RUNNER": "1"},
                                  ("--async-scheduling", *memory(run, GPU_SHARE, KV_BYTES)), lines=RUNNER_LINES),
               VARIANT_PROMPTS)


def check_layers_first(run: PartRun) -> None:
    """V1 with memory of its own for each layer, so that a block is one descriptor for each, and not one in all, as the
    plugin asks for. `metrics` has the seconds of its transfers, to be read beside those of b1."""
    _require_gpu(run, "a cache with layers outermost")
    v1 = prepare(run)
    if not v1:
        raise PartSkipped("the layout is one of engine V1, and the patched vLLM is installed here")
    plain = plain_pair(run, v1)
    check_pair(run, replace(plain, environment=plain.environment | {"VLLM_KV_CACHE_LAYOUT": "LBHNC"},
                            lines=("Using LBHNC KV cache layout", )), run.settings.prompts)


def check_flashinfer(run: PartRun) -> None:
    """FlashInfer, whose heads stand before the tokens."""
    _require_gpu(run, "FlashInfer")
    v1 = prepare(run)
    require("flashinfer")
    _require_kernels(v1)
    chosen = ("--attention-backend", "FLASHINFER") if v1 else ()
    environment = {"VLLM_KV_CACHE_LAYOUT": "HND"} | ({} if v1 else {"VLLM_ATTENTION_BACKEND": "FLASHINFER"})
    needs = {"layout": "kv-heads-first" if v1 else "heads-first"} | ({"engine": "FLASHINFER"} if v1 else {})
    memory_ = own_memory(run, v1)
    check_pair(run, EngineVariant(environment, ("--enforce-eager", *chosen, *memory_), needs), VARIANT_PROMPTS)


def check_serve(run: PartRun) -> None:
    """`vllm-pd bench serve`: a disaggregated and a mixed fleet on the same device, a small load."""
    v1 = prepare(run)
    from vllm_pd.bench.serve import command
    from vllm_pd.bench.serve.settings import LoadShape, ServeBench

    gpu = run.settings.device == "cuda"
    load = LoadShape(duration_s=20.0, streams=(8 if gpu else 2, ), long_every_s=2.0 if gpu else 7.0)
    memory_ = own_memory(run, v1)
    bench = ServeBench(model=run.settings.model, arms=("pd", "mixed-rr"), rounds=1, load=load,
                       timeout_s=max(1.0, run.left_s - STOP_RESERVE_S),
                       serve_args=(*engine_arguments(run, v1), *(() if gpu else ("--enforce-eager", )), *memory_))
    out = Path(run.settings.out)
    report = out / "serve_bench.json"
    command.run(bench, out / "serve_engines.log", out / "serve.png", report, print, lambda table: None)
    judge_serve(run, json.loads(report.read_text()))


def judge_serve(run: PartRun, report: dict[str, Any]) -> None:
    """Note the figures of a report of bench serve. Raises PartFailed where an arm was not measured, a request failed,
    or, on the CPU, answers differ: batches of a GPU round in their own ways."""
    points = {name: arm["rounds"][0]["points"][0] for name, arm in report["arms"].items()}
    run.note(arms={name: {"where": report["arms"][name]["where"], "requests": point["requests"],
                          "failed": point["failed"], "itl_ms": point["short"]["itl_ms"],
                          "ttft_short_ms": point["short"]["ttft_ms"], "ttft_long_ms": point["long"]["ttft_ms"],
                          "answer_tokens_per_s": point["answer_tokens_per_s"]} for name, point in points.items()},
             compared=report["compared"], different=len(report["different"]))
    faults = [f"{name}: {error}" for name, error in report["failed"].items()]
    faults += [f"{name}: {point['failed']} requests failed" for name, point in points.items() if point["failed"]]
    if run.settings.device == "cpu":
        faults += report["different"][:5]
    if faults or not points:
        raise PartFailed("\n".join(faults) or "no arm was measured")


def prepare(run: PartRun) -> bool:
    """Refuse what can't run here. Returns whether the engines are of V1. Raises PartSkipped."""
    require(*NEEDS)
    from vllm_pd.model.installation import World, find_installation
    from vllm_pd.ops.launch.plan import engines_run_on_cpu

    world = find_installation().world
    if world not in (World.PATCHED, World.PLUGIN):
        raise PartSkipped(f"{world.value} is installed here")
    if run.settings.at_once and world is World.PATCHED and run.settings.device == "cuda":
        raise PartSkipped("--at-once is for engine V1: those of V0 measure the GPU's memory as they start")
    on_cpu = engines_run_on_cpu()
    if on_cpu != (run.settings.device == "cpu"):
        raise PartSkipped(f"the vllm that is installed here runs on the {'CPU' if on_cpu else 'GPU'}")
    if not (Path(run.settings.model) / "config.json").is_file():
        raise PartSkipped("no model: write --model DIR, or set VLLM_PD_MODEL")
    return world is World.PLUGIN


def _require_gpu(run: PartRun, what: str) -> None:
    if run.settings.device == "cpu":
        raise PartSkipped(f"it is for a GPU: {what}")


def _require_kernels(v1: bool) -> None:
    """FlashInfer compiles its kernels when an engine needs them, unless a package has them. Raises PartSkipped."""
    spec = importlib.util.find_spec("flashinfer")
    compiled = Path(spec.origin).parent / "data" / "aot"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc") or shutil.which(CUDA_NVCC)
    missing = [name for name, path in (("nvcc", nvcc), ("ninja", shutil.which("ninja"))) if path is None]
    if missing and importlib.util.find_spec("flashinfer_jit_cache") is None and not compiled.exists():
        raise PartSkipped(f"FlashInfer can't compile its kernels here: no {', no '.join(missing)}, and "
                          "flashinfer-jit-cache is not installed")
    if v1:
        from vllm.utils.flashinfer import has_flashinfer

        if not has_flashinfer():
            raise PartSkipped("vLLM does not use this FlashInfer (has_flashinfer): it wants flashinfer-cubin, or nvcc "
                              "and ninja")


def engine_arguments(run: PartRun, v1: bool) -> tuple[str, ...]:
    """What every engine is started with."""
    gpu = run.settings.device == "cuda"
    blocks = () if gpu else ("--block-size", "32" if v1 else "16")
    quiet = () if v1 else ("--disable-log-requests", )
    return ("--dtype", "float16" if gpu else "float32", "--max-model-len", str(MODEL_TOKENS),
            "--max-num-seqs", MOST_AT_ONCE, "--enable-prefix-caching", *blocks, *quiet, *run.settings.engine_args)


def memory(run: PartRun, share: str, kv_bytes: str = "") -> tuple[str, ...]:
    """The arguments for an engine's share of the GPU. With `kv_bytes` (V1) its cache has that size, and the engine does
    not measure what is free."""
    if run.settings.device == "cpu":
        return ()
    if kv_bytes and run.settings.at_once:
        share = SMALL_SHARE
    return ("--gpu-memory-utilization", share, *(("--kv-cache-memory-bytes", kv_bytes) if kv_bytes else ()))


def own_memory(run: PartRun, v1: bool) -> tuple[str, ...]:
    """`memory` for one of several engines; those of V1 may start side by side."""
    return memory(run, GPU_SHARE, KV_BYTES if v1 else "")


def check_pair(run: PartRun, variant: EngineVariant, prompts: int) -> None:
    """Ask a decode and a prefill engine what the stock one was asked. Raises PartFailed for a different token, for a
    prompt that was not prefilled remotely, and for blocks that are not given back."""
    from _connectors.questions import answer_all
    from _demo.rest import left_over

    from vllm_pd.bench.connection import served_model

    if not run.settings.at_once:
        known_answers(run, prompts)  # skipped before anything starts
    with started_pair(run, variant) as pair:
        url, model = pair.urls[0], served_model(pair.urls[0])
        questions = known_answers(run, prompts)
        run.note(engines=await_peer(url, model, pair.broker, PAIR_S))
        before, began_s = attempts_done(url), time.monotonic()
        answers = asyncio.run(answer_all(url, model, [prompt for prompt, _ in questions], margin=0.0))
        took_s = time.monotonic() - began_s
        remote = await_count(lambda: attempts_done(url) - before, len(questions))
        wrong = wrong_answers(questions, answers)
        run.note(prompts=len(questions), wrong=wrong, remote=remote, took_s=round(took_s, 2),
                 metrics=metrics_of(url))
        leaks = left_over(dict(zip(("decode", "prefill"), pair.urls, strict=True)), model)
    judge_pair(len(questions), wrong, remote, leaks)
    judge_engines(run, variant, pair.lines)


@contextmanager
def started_pair(run: PartRun, variant: EngineVariant, pd: Mapping[str, Any] | None = None) -> Iterator[RunningPair]:
    """A decode and a prefill engine of that kind, with these settings of PDConnector beside our own."""
    from vllm_pd.bench.serve.arms import Arm, ArmKind

    os.environ.update(variant.environment)
    with started(run, Arm("pd", ArmKind.PD), variant.arguments, pd) as pair:
        yield pair


def judge_pair(prompts: int, wrong: Sequence[int], remote: int, leaks: Sequence[str]) -> None:
    """Raises PartFailed unless all is as it must be."""
    faults = answer_faults(prompts, wrong, leaks)
    if remote != prompts:
        faults.append(f"{remote} of {prompts} prompts were prefilled remotely")
    if faults:
        raise PartFailed("; ".join(faults))


def wrong_answers(questions: Sequence[tuple[list[int], list[int]]], answers: Sequence[Any]) -> list[int]:
    """The numbers of the questions whose answer is not the stock engine's."""
    return [number for number, ((_, right), found) in enumerate(zip(questions, answers, strict=True))
            if list(found.expected) != list(right)]


def answer_faults(prompts: int, wrong: Sequence[int], leaks: Sequence[str]) -> list[str]:
    """In words: what was left over, and which answers are wrong."""
    if not wrong:
        return list(leaks)
    return [*leaks, f"{len(wrong)} of {prompts} answers differ from the stock engine's: prompts {wrong[:10]}"]


def judge_engines(run: PartRun, variant: EngineVariant, lines: Sequence[tuple[str, str]]) -> None:
    """Raises PartFailed where the engines were not of the kind that the variant is for."""
    figures = run.figures["engines"]
    faults = [f"{name}: {key} is {about[key]!r}, not {value!r}" for name, about in figures.items()
              for key, value in variant.needs.items() if value not in about[key]]
    for wanted in variant.lines:
        said = {name for name, line in lines if wanted in line}
        faults += [f"{name} has not said {wanted!r}" for name in figures if not any(name in one for one in said)]
    faults += [f"{name} has said {line!r}" for name, line in lines if any(one in line for one in variant.never)]
    if faults:
        raise PartFailed("; ".join(faults))


def known_answers(run: PartRun, count: int) -> list[tuple[list[int], list[int]]]:
    """`count` prompts with a stock engine's tokens, as part `stock` has left them. Side by side with it this waits.
    Raises PartSkipped where there are none."""
    out = Path(run.settings.out)
    while not (out / ANSWERS).exists():
        stock = read_result(out / f"{STOCK}.json")
        ended = stock is not None and stock.outcome is not PartOutcome.RUNNING
        if not run.settings.at_once or run.left_s < STOP_RESERVE_S or ended:
            raise PartSkipped(f"there are no answers of a stock engine: see part {STOCK}")
        time.sleep(0.2)
    return [(prompt, tokens) for prompt, tokens in json.loads((out / ANSWERS).read_text())[:count]]


def stock_answers(run: PartRun, count: int, v1: bool) -> None:
    """Leave `count` prompts with a stock engine's tokens. Raises PartFailed where too few prompts have an answer that
    no rounding changes."""
    from _connectors.questions import answer_all, draw_prompts_between

    from vllm_pd.bench.connection import served_model
    from vllm_pd.bench.serve.arms import Arm, ArmKind

    known: list[list[list[int]]] = []
    with started(run, Arm("single", ArmKind.SINGLE), ("--enforce-eager", *own_memory(run, v1))) as stock:
        url, model, drawn = stock.urls[0], served_model(stock.urls[0]), 0
        for number in range(MOST_ROUNDS):
            more = math.ceil((count - len(known)) * DRAWN_FOR_EACH[run.settings.device])
            prompts = draw_prompts_between(f"gpu check {number}", more, *PROMPT_TOKENS)
            found = asyncio.run(answer_all(url, model, prompts, MARGINS[run.settings.device]))
            known += [[one.prompt, list(one.expected)] for one in found if one is not None]
            drawn += more
            if len(known) >= count:
                break
        run.note(prompts_drawn=drawn, prompts_with_safe_answers=len(known),
                 runner_v2=any(V2_LINE in line for _, line in stock.lines))
        if len(known) < count:
            raise PartFailed(f"only {len(known)} prompts have an answer that no rounding changes, {count} are needed: "
                             "use a larger model, or write a smaller --prompts")
        write_json(Path(run.settings.out) / ANSWERS, known[:count])


@contextmanager
def started(run: PartRun, arm: Any, arguments: Sequence[str],
            pd: Mapping[str, Any] | None = None) -> Iterator[RunningPair]:
    """Inside the `with` block the arm's engines are ready, with these settings of PDConnector beside our own. Raises
    PDError where one does not start."""
    from vllm_pd.bench.serve.arms import FleetSettings, plan_arm
    from vllm_pd.bench.serve.fleets import running
    from vllm_pd.model.installation import World, find_installation
    from vllm_pd.ops.launch.plan import default_gpu

    v1 = find_installation().world is World.PLUGIN
    gpu = run.settings.device == "cuda"
    settings = FleetSettings(run.settings.model, pd={"max_local_prefill_tokens": MAX_LOCAL_TOKENS, **(pd or {})},
                             serve_args=(*engine_arguments(run, v1), *arguments),
                             cores=tuple(sorted(os.sched_getaffinity(0))), gpus=(default_gpu(), ) if gpu else (), v1=v1)
    plan = plan_arm(arm, settings)
    lines: list[tuple[str, str]] = []

    def say(name: str, line: str) -> None:
        lines.append((name, line))
        print(f"[{name}] {line}", flush=True)

    with running(plan, say, max(1.0, run.left_s - STOP_RESERVE_S)) as fleet:
        yield RunningPair([engine.url for engine in plan.engines], fleet.pids,
                          plan.fleet.broker_url if plan.fleet else "", lines)


def await_peer(url: str, model: str, broker: str, timeout_s: float) -> dict[str, dict[str, str]]:
    """Ask until a prompt was prefilled remotely. Returns layout, attention backend and types of each engine, as they
    have registered. Raises PartFailed."""
    from _chaos.load import VOCABULARY

    from vllm_pd.bench.load import GenerationRequest, ask
    from vllm_pd.broker.members import list_members

    draw, deadline_s = random.Random("warm-up"), time.monotonic() + timeout_s
    while not attempts_done(url):
        if time.monotonic() > deadline_s:
            raise PartFailed(f"no prompt was prefilled remotely within {timeout_s:g} s; registered: "
                             f"{list_members(broker).members}")
        ask(url, model, GenerationRequest(draw.choices(VOCABULARY, k=200), 2, ignore_eos=True), timeout_s=timeout_s)
        await_count(lambda: attempts_done(url), 1, 2.0)
    return {member.role.name.lower(): {key: str(getattr(member.fingerprint, key))
                                       for key in ("layout", "engine", "dtype", "kv_dtype", "block_size")}
            for member in list_members(broker).members}


def attempts_done(url: str) -> int:
    """How many prompts of the engine at `url` were prefilled remotely."""
    return attempts(url, "done")


def attempts(url: str, *outcomes: str) -> int:
    """How many attempts of the engine at `url` have ended so."""
    from vllm_pd.ops.scrape import scrape

    page = scrape(url)
    return int(sum(page.value("vllm:pd_attempts_total", outcome=outcome) for outcome in outcomes))


def await_count(count: Any, wanted: int, timeout_s: float = 10.0) -> int:
    """What `count` returns when it is `wanted`, or after `timeout_s`: an engine counts some things later."""
    deadline_s = time.monotonic() + timeout_s
    while (found := count()) < wanted and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def metrics_of(url: str, names: tuple[str, ...] = METRICS) -> dict[str, float]:
    """What the engine at `url` says: the samples of these names, by default of its hand-overs, without buckets."""
    from vllm_pd.ops.scrape import scrape

    found = {}
    for (name, labels), value in scrape(url).samples.items():
        shown = ",".join(f"{key}={text}" for key, text in sorted(labels) if key not in ("model_name", "engine"))
        if name.startswith(names) and not name.endswith(("_bucket", "_created")):
            found[f"{name}{{{shown}}}"] = round(value, 6)
    return found
