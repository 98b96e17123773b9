# SPDX-License-Identifier: Apache-2.0
"""The commands `vllm-pd bench ...` and their options.

Each command imports what it needs by itself, so that `vllm-pd --help` starts without any of it.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_pd.bench.options import ConversationShape, DpLoad, RouterLoad
from vllm_pd.bench.outputs import require_file, require_picture, write_json
from vllm_pd.bench.serve.settings import ServeBench
from vllm_pd.bench.share.options import ShareBench
from vllm_pd.errors import ConfigError
from vllm_pd.extras import require_extra
from vllm_pd.settings.options import takes_settings

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 200  # columns of a table with one for each router
bench_app = typer.Typer(no_args_is_help=True, help="Measure: the hand-over, the routers, the step sync, a trace.")


def _file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The value of an option that names a file to write."""
    require_file(option.opts[0], path)
    return path


def _picture(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The value of an option that names a picture to draw."""
    require_picture(option.opts[0], path)
    return path


Picture = Annotated[Path | None, typer.Option(help="Also draw the figures, as PNG.", callback=_picture)]
Output = Annotated[Path | None, typer.Option(help="Also write all figures as JSON.", callback=_file)]
State = Annotated[Path | None, typer.Option(help="Instead of URLs: the state file of a `vllm-pd up` that runs.")]
MaybeUrls = Annotated[list[str] | None, typer.Option(help="Its base URL, like http://127.0.0.1:8000.")]


def print_table(table: "Table", width: int | None = None) -> None:
    """Prints a table; `width`: characters of a line, by default those of the terminal."""
    from rich.console import Console
    Console(width=width).print(table)


def write(report: Any, output: Path | None) -> None:
    """Writes a report as JSON, if there is a file for it. Raises ConfigError."""
    if output is not None:
        try:
            write_json(output, report)
        except OSError as error:
            raise ConfigError("--output", str(output), f"{error}: write another file") from None


def require_patched(command: str) -> None:
    """Raises ConfigError where the plugin is installed: it has no step sync, and so nothing that measures it."""
    from importlib.util import find_spec
    if find_spec("vllm_pd.v0") is None:
        raise ConfigError("bench", command, "this is the plugin for a stock vLLM, which has no step sync of ours: run "
                          "it in an environment with the patched vLLM 0.9.2")


def known_urls(state: Path | None, given: dict[str, list[str] | None]) -> dict[str, tuple[str, ...]]:
    """The URLs of each option in `given`, or those of a state file. Raises ConfigError."""
    from vllm_pd.ops.launch.state import UpState
    if state is not None:
        for name, urls in given.items():
            if urls:
                raise ConfigError(f"--{name}", urls[0], "--state names the engines already: write one of both")
        found = UpState.read(state)
        return {name: found.prefill if name == "prefill" else found.decode for name in given}
    for name, urls in given.items():
        if not urls:
            raise ConfigError(f"--{name}", None, "write the base URL of an engine, or --state FILE of a `vllm-pd up`")
    return {name: tuple(urls or ()) for name, urls in given.items()}


@bench_app.command()
def handover(decode: MaybeUrls = None, prefill: MaybeUrls = None, state: State = None,
             requests: Annotated[int, typer.Option(help="How many remote requests to measure, one at a time.")] = 50,
             prompt_tokens: Annotated[int, typer.Option(help="Their length; it must be above the decode engine's "
                                                             "max_local_prefill_tokens.")] = 256,
             max_tokens: Annotated[int, typer.Option(help="How many tokens each answer has.")] = 8,
             warm_up: Annotated[int, typer.Option(help="How many requests before the first that counts.")] = 3,
             seed: Annotated[int | None, typer.Option(help="Of the random prompts; default: another one in each run, "
                                                           "which the report has.")] = None,
             output: Annotated[Path | None, typer.Option(help="Also write the JSON here.", callback=_file)] = None
             ) -> None:
    """Measure what a remote prefill costs beside the prefill, the transfer and the first decode step."""
    require_extra("bench")
    from vllm_pd.bench.handover import HandoverBench, measure
    known = known_urls(state, {"decode": decode, "prefill": prefill})
    found = measure(HandoverBench(known["decode"][0], known["prefill"], requests, prompt_tokens, max_tokens, warm_up,
                                  seed))
    text = json.dumps(found, indent=2)
    typer.echo(text)
    if output is not None:
        output.write_text(text + "\n")
    raise typer.Exit(1 if found["failed"] else 0)


@bench_app.command()
@takes_settings
def dp(load: DpLoad,
       model: Annotated[list[Path], typer.Option(help="The folder of a small model; may be given more than once.")],
       size: Annotated[list[int] | None, typer.Option(help="How many ranks; may be given more than once. Default "
                                                            "2.")] = None,
       other: Annotated[Path | None, typer.Option(help="Also measure the vLLM in this folder, e.g. one without our "
                                                       "patch to its data parallelism.")] = None,
       stop_every: Annotated[int, typer.Option(help="Measure the other one also with waves whose end is looked for at "
                                                    "the first step and then at every N-th; 0: not.")] = 0,
       backend: Annotated[list[str] | None, typer.Option(help="How our ranks talk: shared-memory or network; may be "
                                                              "given more than once. Default shared-memory.")] = None,
       logs: Annotated[Path, typer.Option(help="Folder for the engines' output.")] = Path("."),
       picture: Annotated[Path | None, typer.Option(help="Also draw the ranks' steps, as PNG.",
                                                    callback=_picture)] = None,
       output: Output = None) -> None:
    """Start data-parallel V1 engines and measure their step sync. With two trees, their engines take turns."""
    require_patched("dp")
    from vllm_pd.bench.dp import report
    from vllm_pd.bench.dp.measure import DpBench, measure, variants
    compared = variants(other, backend or ["shared-memory"], stop_every)
    bench = DpBench(**vars(load), models=tuple(model), sizes=tuple(size or [2]), variants=compared)
    found = measure(bench, logs, typer.echo)
    print_table(report.table(found))
    typer.echo(f"the same tokens from every group of a model: {'yes' if found['same_tokens'] else 'NO'}")
    if picture is not None:
        report.picture(found, picture)
    write(found, output)
    raise typer.Exit(0 if found["same_tokens"] else 1)


@bench_app.command("dp-ranks")
def dp_ranks(ranks: Annotated[list[int] | None, typer.Option(help="How many ranks; may be given more than once. "
                                                                   "Default 16, 64 and 256.")] = None,
             backend: Annotated[str, typer.Option(help="How the ranks talk: shared-memory or network.")] = "network",
             busy: Annotated[int, typer.Option(help="How many ranks have requests.")] = 1,
             requests: Annotated[int, typer.Option(help="How many each has, one after another.")] = 5,
             tokens: Annotated[int, typer.Option(help="How many forward passes a request takes.")] = 40,
             step_ms: Annotated[float, typer.Option(help="How long a forward pass takes at least.")] = 20,
             output: Output = None) -> None:
    """Start many ranks, processes whose forward pass is only a barrier, and measure their step sync."""
    require_patched("dp-ranks")
    from vllm_pd.bench.dp.ranks import RanksBench, measure, table
    bench = RanksBench(tuple(ranks or [16, 64, 256]), backend, busy, requests, tokens, step_ms / 1000)
    found = measure(bench, typer.echo)
    print_table(table(found))
    write(found, output)


@bench_app.command("router")
@takes_settings
def bench_router(
        load: RouterLoad,
        router: Annotated[list[str] | None, typer.Option("--router", metavar="NAME=COMMAND", help="Another router to "
            "measure: how to start it, with {port}, {workers} (one argument for each worker's URL) or "
            "--flag={worker}, and {free} for a free port; may be repeated.")] = None,
        ours: Annotated[list[str] | None, typer.Option(metavar="NAME=ARGS", help="Our router with these arguments "
            "behind `vllm-pd router`; may be repeated. Default: one with no arguments.")] = None,
        workers: Annotated[int | None, typer.Option(help="How many dummy workers: 2, or 4 with --hit-rate.")] = None,
        hit_rate: Annotated[bool, typer.Option("--hit-rate", help="Instead: the prefix hits that our policies get out "
            "of a trace on simulated workers, beside what any could get. Of the other options only --workers, "
            "--prefill, --seed, --picture and --output count.")] = False,
        prefill: Annotated[int, typer.Option(help="With --hit-rate: so many prefill engines behind the workers, and "
            "what the broker's choice among them is worth.")] = 0,
        load_cores: Annotated[str, typer.Option(metavar="0,1", help="Where generator and workers run.")] = "",
        router_cores: Annotated[str, typer.Option(metavar="2,3", help="Where the routers run.")] = "",
        log: Annotated[Path | None, typer.Option(help="A file for the output of everything that is started.",
                                                 callback=_file)] = None,
        picture: Picture = None,
        output: Output = None) -> None:
    """Measure what routers add to a request, ours and others', before dummy workers that this starts and ends."""
    require_extra("bench")
    from vllm_pd.bench import router_report
    from vllm_pd.bench.checks import parse_cores
    from vllm_pd.bench.router import RouterBench, measure
    from vllm_pd.bench.servers import RouterCommand
    if hit_rate and prefill:
        measure_prefill_hits(prefill, workers, load.seed, output)
        return
    if hit_rate:
        measure_hit_rate(workers, load.seed, picture, output)
        return
    routers = [*map(RouterCommand.ours, ours or ["vllm-pd="]), *map(RouterCommand.parse, router or ())]
    bench = RouterBench(**vars(load), routers=tuple(routers), workers=2 if workers is None else workers,
                        load_cores=parse_cores("--load-cores", load_cores),
                        router_cores=parse_cores("--router-cores", router_cores))
    found = measure(bench, log, typer.echo)
    print_table(router_report.table(found), WIDE)
    if picture is not None:
        router_report.picture(found, picture)
    write(found, output)
    raise typer.Exit(1 if any(entry["errors"] for entry in found["entries"]) else 0)


def measure_hit_rate(workers: int | None, seed: int, picture: Path | None, output: Path | None) -> None:
    """`vllm-pd bench router --hit-rate`."""
    from vllm_pd.bench.simulation import hits
    found = hits.measure(hits.HitBench.of(workers, seed), typer.echo)
    print_table(hits.table(found), 120)
    if picture is not None:
        hits.picture(found, picture)
    write(found, output)


def measure_prefill_hits(prefills: int, workers: int | None, seed: int, output: Path | None) -> None:
    """`vllm-pd bench router --hit-rate --prefill N`."""
    from vllm_pd.bench.simulation import prefill_hits
    found = prefill_hits.measure(prefill_hits.PrefillBench.of(prefills, workers, seed), typer.echo)
    print_table(prefill_hits.table(found), 140)
    write(found, output)


@bench_app.command("policies")
@takes_settings
def bench_policies(
        chats: ConversationShape,
        tokenizer: Annotated[str, typer.Option(help="The engines' model or its folder.")],
        worker: Annotated[list[str] | None, typer.Option(help="The base URL of a running engine; at least "
                                                              "two.")] = None,
        state: State = None,
        policy: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: kv, round-robin and "
                                                              "least-load.")] = None,
        rounds: Annotated[int, typer.Option(help="How many times each policy gets the conversations.")] = 1,
        log: Annotated[Path, typer.Option(help="A file for the routers' output.", callback=_file)] = Path(os.devnull),
        picture: Picture = None,
        output: Output = None) -> None:
    """Measure hit rate and TTFT of the router's policies before running engines, whose caches this empties."""
    require_extra("bench")
    from vllm_pd.bench import policies
    from vllm_pd.router.policy import Policy
    wrong = [name for name in policy or () if name not in set(Policy)]
    if wrong:
        raise ConfigError("--policy", wrong[0], f"write one of {', '.join(Policy)}")
    chosen = tuple(map(Policy, policy)) if policy else policies.DEFAULT
    workers = known_urls(state, {"worker": worker})["worker"]
    found = policies.measure(policies.PolicyBench(workers, tokenizer, chosen, rounds, chats), log, typer.echo)
    typer.echo(json.dumps(found["policies"], indent=2))
    if picture is not None:
        policies.picture(found, picture)
    write(found, output)
    raise typer.Exit(1 if found["failed"] else 0)


@bench_app.command("serve")
@takes_settings
def bench_serve(bench: ServeBench,
                log: Annotated[Path, typer.Option(help="A file for the output of everything that is started.")]
                = Path(os.devnull),
                picture: Picture = None,
                output: Output = None) -> None:
    """Measure disaggregated engines beside mixed ones, which this starts and ends, or a fleet that runs."""
    require_extra("bench")
    from vllm_pd.bench.serve import command
    raise typer.Exit(command.run(bench, log, picture, output, typer.echo, lambda table: print_table(table, WIDE)))


@bench_app.command()
@takes_settings
def share(bench: ShareBench, output: Output = None) -> None:
    """Measure how repetitive recorded prompts are, and what caches of D and P and the router could save of that."""
    require_extra("bench")
    from vllm_pd.bench.share import measure
    found = measure.measure(bench, typer.echo)
    typer.echo(measure.summary(found))
    if found["pruned"]["prefixes"]:
        print_table(measure.prefix_table(found), 120)
    print_table(measure.cache_table(found), 120)
    write(found, output)
