# SPDX-License-Identifier: Apache-2.0
"""The `vllm-pd` command: the broker, the router, a whole fleet on one machine, orders to engines, a check-up, benches.

Each command imports what it needs by itself, so that the broker starts without an HTTP client and `--help` without
anything.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_pd.errors import PDError

STOP_TIMEOUT_S = 40.0  # a drain, by default 30 s, and the end of the processes
WIDE = 200  # of a table with a column for each router
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Prefill on one vLLM engine, decode on another.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure: the hand-over, the routers, the step sync.")
app.add_typer(bench_app, name="bench")

Bind = Annotated[str, typer.Option(help="Where to listen: tcp://127.0.0.1:PORT.")]
StateFile = Annotated[Path | None, typer.Option(help="Where to write the addresses and process ids as JSON, "
                                                        "once all engines are healthy.")]
Settings = Annotated[list[str] | None, typer.Option("--pd", metavar="KEY=VALUE", help="A setting of every engine, "
                                                       "like max_local_prefill_tokens=500; may be repeated.")]
KeyFile = Annotated[str | None, typer.Option("--keys", metavar="FILE", help="The cluster's key, as `vllm-pd keys` made "
                                             "it; needed beyond the loopback.")]
ENGINE_HELP = "The beginning of its incarnation, or its control address, as `vllm-pd status` without it shows them."
Engine = Annotated[str, typer.Argument(help=ENGINE_HELP)]
MaybeEngine = Annotated[str | None, typer.Argument(help=ENGINE_HELP)]
OfBroker = Annotated[str, typer.Option("--broker", help="The broker where it is registered.")]
NatsCredentials = Annotated[str | None, typer.Option("--nats-credentials", metavar="FILE", help="The NATS user's "
                                                     "file.")]
NatsCa = Annotated[str | None, typer.Option("--nats-ca", metavar="FILE", help="Certificates for tls://.")]
NatsPrefix = Annotated[str, typer.Option("--nats-prefix", help="As in the engines' settings.")]
Urls = Annotated[list[str], typer.Option(help="Its base URL, like http://127.0.0.1:8000.")]


@app.command()
def broker(bind: Bind = "tcp://127.0.0.1:5700",
           ttl_s: Annotated[float, typer.Option(help="Forget an engine that is silent for this long.")] = 5.0,
           keys: KeyFile = None) -> None:
    """Run the broker: the queue of prefill jobs and the list of engines. Ctrl-C ends it."""
    from vllm_pd.addresses import parse_endpoint
    from vllm_pd.broker.server import Broker
    from vllm_pd.config import PDConfig
    from vllm_pd.ports import require_free
    from vllm_pd.rpc.keys import Keys
    ttl_s = PDConfig.check_number("ttl_s", ttl_s, "--ttl-s")
    loaded = None if keys is None else Keys.load(keys, "--keys")
    host, port = parse_endpoint("--bind", bind, keyed=loaded is not None)
    require_free("--bind", host, [port])
    server = Broker(f"tcp://{host}:{port}", ttl_s=ttl_s, keys=loaded)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    typer.echo(f"broker: listening at {server.address}")
    server.run()


@app.command()
def keys(path: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="What to write, or where. Nothing is ever "
                                                                         "overwritten.")]) -> None:
    """Make the key of a cluster: a file that all its brokers and engines share."""
    from vllm_pd.rpc.keys import Keys
    file = Keys.make(path)
    typer.echo(f"{file}: copy it to every machine of the cluster, for its owner alone to read (mode 0600); then\n"
               f'  vllm-pd broker --bind tcp://ADDRESS:5700 --keys {file}\n  and in every engine\'s settings "keys": '
               f'"{file}"')


@app.command()
def up(model: Annotated[str, typer.Argument(help="The model, as `vllm serve` takes it.")],
       serve_args: Annotated[list[str] | None, typer.Argument(
           metavar="[-- ARGS...]", help="What follows -- goes to every `vllm serve`.")] = None,
       prefill: Annotated[int, typer.Option(help="How many prefill engines.")] = 1,
       decode: Annotated[int, typer.Option(help="How many decode engines.")] = 1,
       port: Annotated[int, typer.Option(help="Port of the router, where there is one, else of the first engine; the "
                                              "decode engines come first, the others take the next ports.")] = 8000,
       router: Annotated[bool, typer.Option("--router", help="Start a router in front of the decode engines.")] = False,
       broker_port: Annotated[int, typer.Option(help="Port of the broker; 0 takes a free one.")] = 0,
       state: StateFile = None,
       timeout_s: Annotated[float, typer.Option(help="How long all engines may take to become healthy.")] = 600.0,
       stop_timeout_s: Annotated[float, typer.Option(help="How long engines may take to end before they are killed.")]
       = STOP_TIMEOUT_S,
       stop_on_death: Annotated[bool, typer.Option("--stop-on-death", help="End everything when one engine or the "
                                                   "broker dies; else the others go on.")] = False,
       pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Give each engine cores of its own; by "
                                                   "default where vllm runs on the CPU.")] = None,
       pd: Settings = None) -> None:
    """Start a broker, prefill engines and decode engines; print their addresses; end them all together."""
    from vllm_pd.fleet import UpOptions, engines_run_on_cpu, parse_setting, plan_fleet
    from vllm_pd.up import Fleet
    options = UpOptions(model=model, prefill=prefill, decode=decode, port=port, broker_port=broker_port,
                        pd=dict(map(parse_setting, pd or ())), serve_args=tuple(serve_args or ()), router=router)
    pinned = engines_run_on_cpu() if pin is None else pin
    plan = plan_fleet(options, sorted(os.sched_getaffinity(0)) if pinned else ())
    fleet = Fleet(plan, state=state, timeout_s=timeout_s, stop_timeout_s=stop_timeout_s, stop_on_death=stop_on_death)
    raise typer.Exit(fleet.run())


@app.command()
def router(port: Annotated[int, typer.Option(help="Where to listen.")] = 8000,
           host: Annotated[str, typer.Option(help="The address to listen at; beyond the loopback it needs --api-key.")]
           = "127.0.0.1",
           worker: Annotated[list[str] | None, typer.Option(help="The base URL of an engine, like "
                                                            "http://127.0.0.1:8001; may be repeated.")] = None,
           worker_events: Annotated[list[str] | None, typer.Option(
               metavar="URL=EVENTS[,REPLAY]", help="Where the KV events of that engine are, if it can't be asked (no "
               "/pd/events, as with a stock vLLM); may be repeated, also for each data-parallel rank.")] = None,
           block_size: Annotated[int | None, typer.Option(help="Of the KV blocks of --worker-events; default: as their "
                                                          "events say.")] = None,
           broker: Annotated[str | None, typer.Option(help="Also the decode engines that are registered at this "
                                                      "broker.")] = None,
           policy: Annotated[str, typer.Option(help="kv (prefix overlap less load), round-robin, least-load or "
                                               "consistent-hash.")] = "kv",
           overlap_weight: Annotated[float, typer.Option(help="What a prompt that is held in full counts, in "
                                                         "prefills.")] = 6.0,
           waiting_weight: Annotated[float, typer.Option(help="What the tokens that wait count.")] = 1.0,
           remote_weight: Annotated[float, typer.Option(help="What a remote prefill under way counts.")] = 0.1,
           blocks_weight: Annotated[float, typer.Option(help="What a full KV cache counts.")] = 2.0,
           open_weight: Annotated[float, typer.Option(help="What a request counts that is open at an engine which does "
                                                      "not tell its load.")] = 0.5,
           temperature: Annotated[float, typer.Option(help="0 takes the best score; more also draws others.")] = 0.0,
           tokenizer: Annotated[str | None, typer.Option(help="The model or folder whose tokenizer the prompts get; "
                                                         "`none` for no overlap. Default: what the engines serve.")]
           = None,
           api_key: Annotated[str | None, typer.Option(help="What clients must show; default $VLLM_API_KEY.")] = None,
           worker_api_key: Annotated[str | None, typer.Option(help="What the router shows to engines in place of what "
                                                              "clients have shown.")] = None,
           max_in_flight: Annotated[int, typer.Option(help="How many requests an engine may have open.")] = 1024,
           timeout_s: Annotated[float, typer.Option(help="How long the first byte of an answer may take; 0 for no "
                                                    "bound.")] = 600.0,
           stream_timeout_s: Annotated[float, typer.Option(help="How long an engine may send nothing in the middle of "
                                                           "an answer; 0 for no bound.")] = 300.0,
           max_connections: Annotated[int, typer.Option(help="How many connections clients may have in all.")] = 8192,
           max_body_bytes: Annotated[int, typer.Option(help="How long the body of a request may be.")] = 64 << 20,
           max_bodies_bytes: Annotated[int, typer.Option(help="How long the bodies of all open requests may be "
                                                         "together.")] = 1 << 30,
           header_timeout_s: Annotated[float, typer.Option(help="How long a client's header may take.")] = 10.0,
           body_timeout_s: Annotated[float, typer.Option(help="How long a client's body may take.")] = 60.0,
           write_timeout_s: Annotated[float, typer.Option(help="How long a client may read nothing of its answer.")]
           = 30.0,
           idle_timeout_s: Annotated[float, typer.Option(help="How long a connection may stay between two requests.")]
           = 65.0,
           unready_s: Annotated[float, typer.Option(help="How long after SIGTERM requests are still taken, while "
                                                    "/health says 503.")] = 2.0,
           grace_s: Annotated[float, typer.Option(help="How long requests have then that are open.")] = 30.0,
           probe_interval_s: Annotated[float, typer.Option(help="A silent engine is probed after this long.")] = 5.0,
           probe_timeout_s: Annotated[float, typer.Option(help="How long the token of a probe may take.")] = 15.0,
           keys: KeyFile = None, nats_credentials: NatsCredentials = None, nats_ca: NatsCa = None,
           nats_prefix: NatsPrefix = "vllm_pd") -> None:
    """Stand before several engines: each request goes to the one that holds most of its prompt and has least to do."""
    from vllm_pd.peers import Access
    from vllm_pd.router.options import RouterOptions
    from vllm_pd.router.policy import PolicyConfig
    from vllm_pd.router.server import serve
    serve(RouterOptions(port=port, host=host, workers=tuple(worker or ()), broker=broker,
                        events=tuple(worker_events or ()), block_size=block_size, tokenizer=tokenizer,
                        access=Access(keys, nats_credentials, nats_ca, nats_prefix), api_key=api_key,
                        worker_api_key=worker_api_key, max_in_flight=max_in_flight, timeout_s=timeout_s,
                        stream_timeout_s=stream_timeout_s, max_connections=max_connections,
                        max_body_bytes=max_body_bytes, max_bodies_bytes=max_bodies_bytes,
                        header_timeout_s=header_timeout_s, unready_s=unready_s, grace_s=grace_s,
                        body_timeout_s=body_timeout_s, write_timeout_s=write_timeout_s, idle_timeout_s=idle_timeout_s,
                        probe_interval_s=probe_interval_s, probe_timeout_s=probe_timeout_s),
          PolicyConfig(policy=policy.replace("_", "-"), overlap_weight=overlap_weight, waiting_weight=waiting_weight,
                       remote_weight=remote_weight, blocks_weight=blocks_weight, open_weight=open_weight,
                       temperature=temperature))


@app.command()
def doctor(broker: Annotated[str | None, typer.Option(help="Also ask this broker for its engines.")] = None,
           port: Annotated[list[int] | None, typer.Option(help="Also try whether this port is free; 5700 and "
                                                              "8000 where no --broker is given.")] = None,
           keys: KeyFile = None,
           nats_credentials: NatsCredentials = None, nats_ca: NatsCa = None,
           nats_prefix: NatsPrefix = "vllm_pd") -> None:
    """Check the installation, NIXL, the ports and the engines; say what to do about each fault."""
    from vllm_pd.doctor import examine
    from vllm_pd.peers import Access
    access = Access(keys, nats_credentials, nats_ca, nats_prefix)
    findings = examine(broker, port or ([] if broker else [5700, 8000]), access)
    for finding in findings:
        typer.echo(str(finding))
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def drain(engine: Engine, broker: OfBroker, keys: KeyFile = None,
          timeout_s: Annotated[float, typer.Option(help="How long to wait until nothing is open there.")] = 300.0,
          nats_credentials: NatsCredentials = None, nats_ca: NatsCa = None,
          nats_prefix: NatsPrefix = "vllm_pd") -> None:
    """Have an engine take nothing new, finish what is open and leave; it can be stopped then without harm."""
    from vllm_pd.orders import Operator, describe, find_engine, is_drained
    from vllm_pd.peers import Access
    access = Access(keys, nats_credentials, nats_ca, nats_prefix)
    with Operator(find_engine(engine, broker, access), access) as operator:
        reply = operator.drain(timeout_s)
    typer.echo("\n".join(describe(reply)))
    raise typer.Exit(0 if is_drained(reply) else 1)


@app.command()
def role(engine: Engine, role: Annotated[str, typer.Argument(help="kv_both, kv_producer or kv_consumer.")],
         broker: OfBroker, keys: KeyFile = None, nats_credentials: NatsCredentials = None, nats_ca: NatsCa = None,
         nats_prefix: NatsPrefix = "vllm_pd") -> None:
    """Have a kv_both engine act as only one of both, or as both again. What is open is finished."""
    from vllm_pd.config import KV_ROLES
    from vllm_pd.core.messages import SetRole
    from vllm_pd.errors import ConfigError
    from vllm_pd.orders import Operator, describe, find_engine
    from vllm_pd.peers import Access
    if role not in KV_ROLES:
        raise ConfigError("ROLE", role, f"write one of {', '.join(KV_ROLES)}")
    access = Access(keys, nats_credentials, nats_ca, nats_prefix)
    with Operator(find_engine(engine, broker, access), access) as operator:
        typer.echo("\n".join(describe(operator.tell(SetRole(KV_ROLES[role])))))


@app.command()
def status(broker: OfBroker, engine: MaybeEngine = None, keys: KeyFile = None, nats_credentials: NatsCredentials = None,
           nats_ca: NatsCa = None, nats_prefix: NatsPrefix = "vllm_pd") -> None:
    """Ask an engine what it is doing; without ENGINE, list those that are registered."""
    from vllm_pd.core.messages import Status
    from vllm_pd.orders import Operator, describe, find_engine, introduce
    from vllm_pd.peers import Access, take_census
    access = Access(keys, nats_credentials, nats_ca, nats_prefix)
    if engine is None:
        typer.echo("\n".join(map(introduce, take_census(broker, access=access).members)) or "no engine is registered")
        return
    with Operator(find_engine(engine, broker, access), access) as operator:
        typer.echo("\n".join(describe(operator.tell(Status()))))


@bench_app.command()
def handover(decode: Urls, prefill: Urls,
             requests: Annotated[int, typer.Option(help="How many remote requests to measure, one at a time.")] = 50,
             prompt_tokens: Annotated[int, typer.Option(help="Their length; it must be above the decode engine's "
                                                             "max_local_prefill_tokens.")] = 256,
             max_tokens: Annotated[int, typer.Option(help="How many tokens each answer has.")] = 8,
             warm_up: Annotated[int, typer.Option(help="How many requests before the first that counts.")] = 3,
             seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
             output: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None) -> None:
    """Measure what a remote prefill costs beside the prefill, the transfer and the first decode step."""
    from vllm_pd.bench.handover import HandoverBench, measure
    report = measure(HandoverBench(decode=decode[0], prefill=tuple(prefill), requests=requests,
                                   prompt_tokens=prompt_tokens, max_tokens=max_tokens, warm_up=warm_up, seed=seed))
    text = json.dumps(report, indent=2)
    typer.echo(text)
    if output is not None:
        output.write_text(text + "\n")


@bench_app.command()
def dp(model: Annotated[list[Path], typer.Option(help="The folder of a small model; may be given more than once.")],
       size: Annotated[list[int] | None, typer.Option(help="How many ranks; may be given more than once. Default "
                                                            "2.")] = None,
       other: Annotated[Path | None, typer.Option(help="Also measure the vLLM in this folder, e.g. one without our "
                                                       "patch to its data parallelism.")] = None,
       stop_every: Annotated[int, typer.Option(help="Measure the other one also with waves whose end is looked for at "
                                                    "the first step and then at every N-th; 0: not.")] = 0,
       rim: Annotated[list[str] | None, typer.Option(help="How our ranks talk: shared-memory or network; may be given "
                                                          "more than once. Default shared-memory.")] = None,
       bursts: Annotated[int, typer.Option(help="How many requests, one at a time, from idle to idle.")] = 30,
       requests: Annotated[int, typer.Option(help="How many requests a round under load has.")] = 60,
       rounds: Annotated[int, typer.Option(help="How many rounds under load, of which the median counts.")] = 5,
       seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
       logs: Annotated[Path, typer.Option(help="Folder for the engines' output.")] = Path("."),
       picture: Annotated[Path | None, typer.Option(help="Also draw the ranks' steps, as PNG.")] = None,
       output: Annotated[Path | None, typer.Option(help="Also write all figures as JSON.")] = None) -> None:
    """Measure the step sync of data-parallel V1 engines, which this starts and ends; those of two trees in turns."""
    from rich.console import Console

    from vllm_pd.bench.dp import report
    from vllm_pd.bench.dp.measure import DpBench, measure, variants
    compared = variants(other, rim or ["shared-memory"], stop_every)
    bench = DpBench(tuple(model), tuple(size or [2]), compared, bursts, requests, rounds, seed)
    found = measure(bench, logs, typer.echo)
    Console(width=None).print(report.table(found))
    typer.echo(f"the same tokens from every group of a model: {'yes' if found['same_tokens'] else 'NO'}")
    if picture is not None:
        report.picture(found, picture)
    if output is not None:
        output.write_text(json.dumps(found) + "\n")


@bench_app.command("dp-ranks")
def dp_ranks(ranks: Annotated[list[int] | None, typer.Option(help="How many ranks; may be given more than once. "
                                                                   "Default 16, 64 and 256.")] = None,
             rim: Annotated[str, typer.Option(help="How the ranks talk: shared-memory or network.")] = "network",
             busy: Annotated[int, typer.Option(help="How many ranks have requests.")] = 1,
             requests: Annotated[int, typer.Option(help="How many each has, one after another.")] = 5,
             tokens: Annotated[int, typer.Option(help="How many forward passes a request takes.")] = 40,
             step_ms: Annotated[float, typer.Option(help="How long a forward pass takes at least.")] = 20,
             output: Annotated[Path | None, typer.Option(help="Also write all figures as JSON.")] = None) -> None:
    """Measure the step sync of many ranks, processes whose forward passes are but a barrier, which this starts."""
    from rich.console import Console

    from vllm_pd.bench.dp.ranks import RanksBench, measure, table
    bench = RanksBench(tuple(ranks or [16, 64, 256]), rim, busy, requests, tokens, step_ms / 1000)
    found = measure(bench, typer.echo)
    Console(width=None).print(table(found))
    if output is not None:
        output.write_text(json.dumps(found) + "\n")


@bench_app.command("router")
def bench_router(
        router: Annotated[list[str] | None, typer.Option("--router", metavar="NAME=COMMAND", help="Another router to "
            "measure: how to start it, with {port}, {workers} (one argument for each worker's URL) or "
            "--flag={worker}, and {free} for a free port; may be repeated.")] = None,
        ours: Annotated[list[str] | None, typer.Option(metavar="NAME=ARGS", help="Our router with these arguments "
            "behind `vllm-pd router`; may be repeated. Default: one with no arguments.")] = None,
        workers: Annotated[int | None, typer.Option(help="How many dummy workers: 2, or 4 with --hit-rate.")] = None,
        requests: Annotated[int, typer.Option(help="How many requests, one at a time, of each kind.")] = 500,
        tokens: Annotated[int, typer.Option(help="How many tokens each answer has.")] = 16,
        prompt_tokens: Annotated[int, typer.Option(help="About how long each prompt is.")] = 256,
        clients: Annotated[int, typer.Option(help="Of the closed loop.")] = 32,
        streams: Annotated[int, typer.Option(help="How many clients read paced streams.")] = 16,
        rounds: Annotated[int, typer.Option(help="How many slices of time each router gets in a phase.")] = 5,
        slice_s: Annotated[float, typer.Option(help="How long a slice is.")] = 2.0,
        block_size: Annotated[int, typer.Option(help="Have the workers publish KV events, made up, of blocks of so "
                                                     "many tokens; 0: none.")] = 0,
        seed: Annotated[int, typer.Option(help="Of the prompts and of the order.")] = 0,
        hit_rate: Annotated[bool, typer.Option("--hit-rate", help="Instead: the prefix hits that our policies get out "
            "of a trace on simulated workers, beside what any could get. Of the other options only --workers, --seed, "
            "--picture and --output count.")] = False,
        load_cores: Annotated[str, typer.Option(metavar="0,1", help="Where generator and workers run.")] = "",
        router_cores: Annotated[str, typer.Option(metavar="2,3", help="Where the routers run.")] = "",
        log: Annotated[Path | None, typer.Option(help="A file for the output of everything that is started.")] = None,
        picture: Annotated[Path | None, typer.Option(help="Also draw the figures, as PNG.")] = None,
        output: Annotated[Path | None, typer.Option(help="Also write all figures as JSON.")] = None) -> None:
    """Measure what routers add to a request, ours and others', before dummy workers that this starts and ends."""
    from rich.console import Console

    from vllm_pd.bench import router_report as report
    from vllm_pd.bench.checks import parse_cores
    from vllm_pd.bench.router import RouterBench, measure
    from vllm_pd.bench.servers import RouterCommand
    if hit_rate:
        from vllm_pd.bench.simulation import hits
        found = hits.measure(hits.HitBench.of(workers, seed), typer.echo)
        Console(width=120).print(hits.table(found))
        if picture is not None:
            hits.picture(found, picture)
        if output is not None:
            output.write_text(json.dumps(found) + "\n")
        return
    launches = [*map(RouterCommand.ours, ours or ["vllm-pd="]), *map(RouterCommand.parse, router or ())]
    found = measure(RouterBench(tuple(launches), 2 if workers is None else workers, requests, tokens, prompt_tokens,
                                clients, streams, slice_s, rounds, block_size=block_size, seed=seed,
                                load_cores=parse_cores("--load-cores", load_cores),
                                router_cores=parse_cores("--router-cores", router_cores)), log, typer.echo)
    Console(width=WIDE).print(report.table(found))
    if picture is not None:
        report.picture(found, picture)
    if output is not None:
        output.write_text(json.dumps(found) + "\n")


@bench_app.command()
def policies(
        worker: Annotated[list[str], typer.Option(help="The base URL of a running engine; at least two.")],
        tokenizer: Annotated[str, typer.Option(help="The engines' model or its folder.")],
        policy: Annotated[list[str] | None, typer.Option(help="May be repeated. Default: kv, round-robin and "
                                                              "least-load.")] = None,
        rounds: Annotated[int, typer.Option(help="How many times each policy gets the conversations.")] = 1,
        conversations: Annotated[int, typer.Option(help="How many.")] = 20,
        conversations_per_s: Annotated[float, typer.Option(help="How many begin in a second.")] = 0.5,
        turns: Annotated[int, typer.Option(help="Questions in each.")] = 3,
        system_prompts: Annotated[int, typer.Option(help="How many different ones.")] = 6,
        system_words: Annotated[int, typer.Option(help="Their length, about half of their tokens.")] = 140,
        seed: Annotated[int, typer.Option(help="Of the conversations and of the order.")] = 0,
        log: Annotated[Path, typer.Option(help="A file for the routers' output.")] = Path(os.devnull),
        picture: Annotated[Path | None, typer.Option(help="Also draw the figures, as PNG.")] = None,
        output: Annotated[Path | None, typer.Option(help="Also write all figures as JSON.")] = None) -> None:
    """Measure hit rate and TTFT of the router's policies before running engines, whose caches this empties."""
    from vllm_pd.bench import policies as bench
    from vllm_pd.bench.conversations import ConversationShape
    from vllm_pd.errors import ConfigError
    from vllm_pd.router.policy import Policy
    wrong = [name for name in policy or () if name not in set(Policy)]
    if wrong:
        raise ConfigError("--policy", wrong[0], f"write one of {', '.join(Policy)}")
    chats = ConversationShape(conversations=conversations, conversations_per_s=conversations_per_s, turns=turns,
                  system_prompts=system_prompts, system_words=system_words, seed=seed)
    chosen = tuple(map(Policy, policy)) if policy else bench.DEFAULT
    found = bench.measure(bench.PolicyBench(tuple(worker), tokenizer, chosen, rounds, chats), log, typer.echo)
    typer.echo(json.dumps(found["policies"], indent=2))
    if picture is not None:
        bench.picture(found, picture)
    if output is not None:
        output.write_text(json.dumps(found) + "\n")


def main() -> None:
    """The console script. Our own errors are one line and exit status 2."""
    try:
        app(prog_name="vllm-pd")
    except PDError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
