# SPDX-License-Identifier: Apache-2.0
"""The arguments of `vllm serve` that the user gives to all engines of a fleet."""
from collections.abc import Sequence

from vllm_pd.errors import ConfigError

OWN_FLAGS = {  # of `vllm serve`, which `up` sets itself, and what to use instead
    "--port": "--port", "--host": "nothing, engines listen on 127.0.0.1", "--kv-transfer-config": "--pd key=value"}


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The value of a flag in a command line, `--flag VALUE` or `--flag=VALUE`; the last one counts."""
    value = None
    for number, argument in enumerate(arguments):
        name, equals, behind = argument.partition("=")
        if name.replace("_", "-") == flag:
            value = behind if equals else next(iter(arguments[number + 1:]), None)
    return value


def without(flag: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments without a flag that has a value, in both forms."""
    left: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name.replace("_", "-") != flag:
            left.append(argument)
        elif not equals:
            next(rest, None)
    return tuple(left)


def refuse_ours(serve_args: Sequence[str]) -> None:
    """Raises ConfigError for a flag of `vllm serve` that whoever starts engines sets for each of them, or that takes
    their server from 127.0.0.1 and plain HTTP."""
    for argument in serve_args:
        name = argument.partition("=")[0].replace("_", "-")
        instead = OWN_FLAGS.get(name)
        if instead is not None:
            raise ConfigError(f"-- {argument}", None, f"this command sets it for each engine: use {instead}")
        if name == "--uds" or name.startswith("--ssl-"):
            raise ConfigError(f"-- {name}", value_of(name, serve_args), "this command reaches each engine by plain "
                              "HTTP at a port of 127.0.0.1: leave it out, and put a server with TLS in front")
