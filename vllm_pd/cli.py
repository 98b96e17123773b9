# SPDX-License-Identifier: Apache-2.0
"""The `vllm-pd` command.

Options that are settings come from the settings' classes (`vllm_pd.settings.options`). Whatever else a command needs it
imports by itself, so that the broker starts without an HTTP client and `--help` without an engine. A command that needs
an extra of the distribution (`vllm_pd.extras`) asks for it first.
"""

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vllm_pd.bench.commands import bench_app
from vllm_pd.broker.members import TTL_S, Access
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.extras import require_extra, require_vllm
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.launch.plan import UpOptions
from vllm_pd.ops.options import PlannerOptions, TopOptions, TraceOptions, TrialOptions
from vllm_pd.ops.printing import printable
from vllm_pd.ops.sizing import SizingOptions
from vllm_pd.ops.split import SplitOptions
from vllm_pd.picker.options import PickerOptions
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.settings.options import option_hint, takes_settings

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from vllm_pd.model.installation import find_installation
        from vllm_pd.protocol.messages import PROTOCOL
        typer.echo(f"{find_installation().name}, protocol {PROTOCOL}")
        raise typer.Exit()


@app.callback()
def with_version(version: Annotated[bool, typer.Option(
        "--version", callback=_print_version, is_eager=True,
        help="Print the version and the protocol's, in which all programs of a cluster must be the same.")] = False
                 ) -> None:
    """Prefill on one vLLM engine, decode on another."""


Bind = Annotated[str, typer.Option(help="Where to listen: tcp://127.0.0.1:PORT.")]
StateFile = Annotated[Path | None, typer.Option(help="Where to write the addresses and process ids as JSON, "
                                                        "once all engines are healthy.")]
ENGINE_HELP = "The beginning of its incarnation, or its control address; `vllm-pd status` without it lists both."
Engine = Annotated[str, typer.Argument(help=ENGINE_HELP)]
MaybeEngine = Annotated[str | None, typer.Argument(help=ENGINE_HELP)]
OfBroker = Annotated[str, typer.Option("--broker", help="The broker where it is registered.")]


@app.command()
def broker(bind: Bind = "tcp://127.0.0.1:5700",
           ttl_s: Annotated[float, typer.Option(help="Forget an engine that has sent nothing for this long.")] = TTL_S,
           keys: option_hint(Access, "keys") = None) -> None:
    """Run the broker: the queue of prefill jobs and the list of engines. Ctrl-C ends it."""
    from vllm_pd.broker.server import Broker
    from vllm_pd.rpc.addresses import parse_bind, url_of
    from vllm_pd.rpc.keys import Keys
    from vllm_pd.rpc.ports import require_free
    from vllm_pd.settings.engine import PDConfig
    ttl_s = PDConfig.check_number("ttl_s", ttl_s, "--ttl-s")
    loaded = None if keys is None else Keys.load(keys, "--keys")
    host, port = parse_bind("--bind", bind, keyed=loaded is not None)
    require_free("--bind", host, [port])
    server = Broker(url_of(host, port), ttl_s=ttl_s, keys=loaded)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    typer.echo(f"broker: listening at {server.address}")
    server.run()


@app.command()
def keys(path: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="What to write, or where. Nothing is ever "
                                                                         "overwritten.")]) -> None:
    """Make the key of a cluster, a file that all its brokers and engines share."""
    from vllm_pd.rpc.keys import Keys
    file = Keys.make(path)
    typer.echo(f"{file}: copy it to every machine of the cluster, for its owner alone to read (mode 0600); then\n"
               f'  vllm-pd broker --bind tcp://ADDRESS:5700 --keys {file}\n  and in every engine\'s settings "keys": '
               f'"{file}"')


@app.command()
def digest(folder: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="A model, as `vllm serve` takes it.")]
           ) -> None:
    """Print the digest of a model's weights, for the key weights_digest of engines that load the same ones from
    elsewhere."""
    from vllm_pd.model.weights import SUFFIXES, digest_weights, weight_files
    if not folder.exists() or not weight_files(folder):
        raise ConfigError("FOLDER", str(folder), f"there is no {', '.join(SUFFIXES)} file: write the folder of a "
                          "model, or one such file")
    typer.echo(digest_weights(folder).hex())


@app.command()
@takes_settings
def up(options: UpOptions, state: StateFile = None,
       timeout_s: Annotated[float, typer.Option(help="How long all engines may take to become healthy.")] = 600.0,
       stop_timeout_s: Annotated[float | None, typer.Option(
           help="How long the router, the decode engines and the prefill engines may each take to end before they are "
           "killed. By default 10 s more than what is open may take.")] = None,
       stop_on_death: Annotated[bool, typer.Option("--stop-on-death", help="End everything when one engine or the "
                                                   "broker dies; else the others go on.")] = False,
       pin: Annotated[bool | None, typer.Option("--pin/--no-pin", help="Give each engine cores of its own; by "
                                                   "default where vllm runs on the CPU.")] = None) -> None:
    """Start a broker, prefill engines and decode engines; print their addresses; end them all together."""
    from vllm_pd.ops.launch.plan import cores_to_pin, plan_fleet
    from vllm_pd.ops.launch.up import Fleet, check_times
    require_vllm()
    if options.router:
        require_extra("router")
    plan = plan_fleet(options, cores_to_pin(options, pin))
    check_times(plan, timeout_s, stop_timeout_s)
    fleet = Fleet(plan, state=state, timeout_s=timeout_s, stop_timeout_s=stop_timeout_s, stop_on_death=stop_on_death)
    raise typer.Exit(fleet.run())


@app.command()
@takes_settings
def router(options: RouterOptions, policy: RoutingPolicyConfig) -> None:
    """Run a router: each request goes to the engine that has most of its prompt cached and least to do."""
    require_extra("router")
    from vllm_pd.router.server import serve
    serve(options, policy)


@app.command()
@takes_settings
def picker(options: PickerOptions, policy: RoutingPolicyConfig) -> None:
    """Run an endpoint picker: Envoy, or another gateway, asks it by ext_proc which engine gets a request."""
    require_extra("picker")
    from vllm_pd.picker.server import serve
    serve(options, policy)


@app.command()
@takes_settings
def doctor(access: Access, trial: TrialOptions,
           broker: Annotated[str | None, typer.Option(help="Also check this broker and its engines.")] = None,
           port: Annotated[list[int] | None, typer.Option(help="Also check whether this port is free; 5700 and "
                                                              "8000 where no --broker is given.")] = None,
           from_engine: Annotated[str | None, typer.Option(
               "--from", metavar="ENGINE", help="Check instead the paths between this engine and its peers: each of "
               "them tries to connect to the other. " + ENGINE_HELP)] = None,
           for_lines: Annotated[list[str] | None, typer.Option(
               "--for", metavar="LINE", help="Check instead a command line, `vllm serve MODEL --flags ...`, and start "
               "nothing: what the engine would refuse, and what it would prefill by itself. Of several lines, whether "
               "these engines fit each other. For engine V1.")] = None) -> None:
    """Check the installation, NIXL, ports and engines, and say how to repair each fault."""
    if for_lines:
        _end_preview(for_lines, broker, port, from_engine, trial.checked().url)
    if trial.checked().url is not None:
        _end_trial(trial, broker, port, from_engine)
    from vllm_pd.ops.doctor import examine, examine_paths
    findings = (examine(broker, port or ([] if broker else [5700, 8000]), access) if from_engine is None
                else examine_paths(from_engine, broker, access))
    _end_report(findings)


def _end_trial(trial: TrialOptions, *others: object) -> NoReturn:
    """Carry out `--try`, and end with its status."""
    from vllm_pd.errors import ConfigError
    require_extra("router", "httptools", "aiohappyeyeballs")
    from vllm_pd.ops.trial_requests import try_engine
    if any(others):
        raise ConfigError("--try", trial.url, "leave out --broker, --port and --from: they are checks of their own")
    _end_report(try_engine(trial))


def _end_preview(lines: list[str], *others: object) -> NoReturn:
    """Carry out `--for`, and end with its status."""
    from vllm_pd.errors import ConfigError
    from vllm_pd.ops.for_command import examine_lines
    if any(others):
        raise ConfigError("--for", lines[0], "leave out --broker, --port, --from and --try: they are checks of their "
                          "own")
    _end_report(examine_lines(lines))


def _end_report(findings: list[Finding]) -> NoReturn:
    """Print what was found, and end with the status for it."""
    _show(line for finding in findings for line in finding.lines)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
@takes_settings
def plan(options: SplitOptions, load: SizingOptions,
         as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")] = False) -> None:
    """Print which rank of a prefill engine sends which layers and KV heads to which rank of a decode engine; with
    --model, how many engines and how fast a link a load needs."""
    import json

    from vllm_pd.ops.sizing import refuse_mix, size
    from vllm_pd.ops.split import report
    refuse_mix(options, load)
    found = size(load) if load.model else report(options)
    typer.echo(json.dumps(found.as_json(), indent=1) if as_json else "\n".join(found.lines()))


@app.command()
@takes_settings
def drain(engine: Engine, broker: OfBroker, access: Access,
          timeout_s: Annotated[float, typer.Option(help="How long to wait until nothing is open there.")] = 300.0
          ) -> None:
    """Make an engine accept nothing new, finish what is open and leave. It can then be stopped without harm."""
    from vllm_pd.ops.orders import Operator, describe, find_engine, is_drained
    with Operator(find_engine(engine, broker, access), access) as operator:
        reply = operator.drain(timeout_s)
    _show(describe(reply))
    raise typer.Exit(0 if is_drained(reply) else 1)


@app.command()
@takes_settings
def role(engine: Engine, role: Annotated[str, typer.Argument(help="kv_both, kv_producer or kv_consumer.")],
         broker: OfBroker, access: Access) -> None:
    """Make a kv_both engine act as only one of both, or as both again. It finishes what is open."""
    from vllm_pd.errors import ConfigError
    from vllm_pd.ops.orders import Operator, describe, find_engine
    from vllm_pd.protocol.messages import SetRole
    from vllm_pd.settings.engine import KV_ROLES
    if role not in KV_ROLES:
        raise ConfigError("ROLE", role, f"write one of {', '.join(KV_ROLES)}")
    with Operator(find_engine(engine, broker, access), access) as operator:
        _show(describe(operator.tell(SetRole(KV_ROLES[role]))))


@app.command()
@takes_settings
def gone(engine: Engine, broker: OfBroker, access: Access) -> None:
    """Tell all engines that the host of this one is off, and stays so. Nothing is waited for that it has. If that was
    a mistake, nothing is lost: it works with the others again when it is heard."""
    from vllm_pd.ops.orders import say_gone
    _show(say_gone(engine, broker, access))


@app.command()
@takes_settings
def status(broker: OfBroker, access: Access, engine: MaybeEngine = None) -> None:
    """Show the status of an engine; without ENGINE, list the registered engines."""
    from vllm_pd.broker.members import list_members
    from vllm_pd.ops.orders import Operator, describe, find_engine, introduce
    from vllm_pd.protocol.messages import Status
    if engine is None:
        _show([*map(introduce, list_members(broker, access=access).members)] or ["no engine is registered"])
        return
    with Operator(find_engine(engine, broker, access), access) as operator:
        _show(describe(operator.tell(Status())))


@app.command()
@takes_settings
def top(broker: OfBroker, access: Access, options: TopOptions) -> None:
    """Show the engines of a fleet in one table that is always new: load, blocks, stages, hits, and who is degraded."""
    require_extra("router", "httptools", "aiohappyeyeballs", "prometheus_client")
    from vllm_pd.ops.top_readings import show_fleet
    try:
        show_fleet(broker, access, options)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
@takes_settings
def planner(broker: OfBroker, access: Access, options: PlannerOptions) -> None:
    """Say how many prefill and decode engines a fleet wants, as metrics for an autoscaler, and how those that are there
    are best divided. With --flip, have engines change their role."""
    require_extra("router", "httptools", "aiohappyeyeballs", "prometheus_client")
    from vllm_pd.ops.planner import plan_fleet
    try:
        plan_fleet(broker, access, options)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command()
@takes_settings
def trace(access: Access, options: TraceOptions,
          broker: Annotated[str | None, typer.Option(help="The broker where the engines are registered.")] = None
          ) -> None:
    """Write what all engines of a fleet do with prompts for some seconds as a timeline, for ui.perfetto.dev."""
    require_extra("router", "httptools", "aiohappyeyeballs")
    from vllm_pd.ops.trace import trace_fleet
    try:
        trace_fleet(broker, access, options, lambda line: _show([line]))
    except KeyboardInterrupt:  # while nothing was read yet, or for the second time
        raise typer.Exit(130) from None


def _show(lines: Iterable[str]) -> None:
    """Print lines that may contain what engines and brokers have sent."""
    for line in lines:
        typer.echo(printable(line))


def main() -> None:
    """The console script. Our own errors are one line and exit status 2."""
    try:
        app(prog_name="vllm-pd")
    except PDError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
