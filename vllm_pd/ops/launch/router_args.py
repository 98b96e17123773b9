# SPDX-License-Identifier: Apache-2.0
"""Options of the router that `vllm-pd up --router` starts, checked as `vllm-pd router` itself checks them."""
import shlex
from dataclasses import dataclass, replace

import typer

from vllm_pd.errors import ConfigError
from vllm_pd.router.options import RouterOptions
from vllm_pd.router.policy import RoutingPolicyConfig
from vllm_pd.settings.options import takes_settings

FLAG = "--router-args"
OURS = {  # what `up` sets itself, and what to use instead
    "--port": "--port", "--host": "nothing, the router listens on 127.0.0.1", "--broker": "--broker-port",
    "--keys": "--pd keys=FILE", "--order": "--order", "--worker": "nothing, it knows the engines from the broker",
    "--prefill-worker": "nothing, it knows the engines from the broker"}
_UsageError = typer.BadParameter.__base__  # typer has a copy of click's, or click itself


@dataclass(frozen=True)
class RouterArgs:
    """Options of a router: as words of its command line, and checked."""
    words: tuple[str, ...] = ()
    options: RouterOptions = RouterOptions()


def parse_router_args(text: str, api_key: str | None = None, grace_s: float = RouterOptions.grace_s,
                      order: str = RouterOptions.order) -> RouterArgs:
    """The options in this text, which is split as in a shell; none in an empty text. `api_key` is the engines', which
    the router gets, too, as it gets `order`. `grace_s` is its --grace-s where the text has none. Raises ConfigError for
    an option that is unknown, wrong or set by `up`."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(FLAG, text, f"{error}: write it like \"--continue-streams --unready-s 5\"") from None
    for word in words:
        flag = word.partition("=")[0]
        if flag in OURS:
            raise ConfigError(f"{FLAG} {flag}", None, f"`up` sets it: use {OURS[flag]}")
    if grace_s != RouterOptions.grace_s:
        words = ("--grace-s", str(grace_s), *words)  # of an option that is given twice, the last one counts

    def check(options: RouterOptions, policy: RoutingPolicyConfig) -> RouterOptions:
        policy.check()
        # The broker is the fleet's own, whose port is not known yet.
        options = replace(options, broker="tcp://127.0.0.1:1", order=order)
        return (replace(options, api_key=api_key) if options.api_key is None else options).checked()

    app = typer.Typer(add_completion=False)
    app.command()(takes_settings(check))
    try:
        checked = typer.main.get_command(app).main(list(words), prog_name=FLAG, standalone_mode=False)
    except _UsageError as error:
        raise ConfigError(FLAG, text, f"{error.format_message().rstrip('.')}; `vllm-pd router --help` lists the "
                          "options") from None
    if not isinstance(checked, RouterOptions):  # --help was written, and has ended the command
        raise ConfigError(FLAG, text, "write options; `vllm-pd router --help` lists them")
    return RouterArgs(words, checked)
