# SPDX-License-Identifier: Apache-2.0
"""The `vllm-pd` command: the broker, the router, a whole fleet on one machine, orders to engines, a check-up, benches.

Each command imports what it needs by itself, so that the broker starts without an HTTP client and `--help` without
anything.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vllm_pd.bench.commands import bench_app
from vllm_pd.errors import PDError

STOP_TIMEOUT_S = 40.0  # a drain, by default 30 s, and the end of the processes
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Prefill on one vLLM engine, decode on another.")
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


def main() -> None:
    """The console script. Our own errors are one line and exit status 2."""
    try:
        app(prog_name="vllm-pd")
    except PDError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
