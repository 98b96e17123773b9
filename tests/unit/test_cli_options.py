# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm-pd` are public: each name and default is as cli_options.txt has it.

What is meant to change there changes in that file too, and in CHANGELOG.md:
`python tests/unit/test_cli_options.py > tests/unit/cli_options.txt`."""
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer.testing import CliRunner

from vllm_pd.cli import app
from vllm_pd.settings.options import Option, option_hint, takes_settings

KNOWN = Path(__file__).with_name("cli_options.txt")


def lines(command=None, path: str = "") -> Iterator[str]:
    """Each option and argument of each command, in one line."""
    command = command or typer.main.get_command(app)
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from lines(below, f"{path}{name} ")
    for parameter in [] if hasattr(command, "commands") else command.params:
        if parameter.name == "help":
            continue
        option = parameter.param_type_name == "option"
        parts = ["/".join([*parameter.opts, *parameter.secondary_opts]) if option else "ARGUMENT"]
        parts += [parameter.metavar] if parameter.metavar else []
        parts += ["flag"] if getattr(parameter, "is_flag", False) else []
        parts += ["repeated"] if getattr(parameter, "multiple", False) or parameter.nargs == -1 else []
        parts += ["required"] if parameter.required else [f"= {parameter.default}"]
        yield f"{path}{' '.join(parts)}"


def test_every_option_has_its_name_and_default():
    assert sorted(lines()) == KNOWN.read_text().splitlines()


class Colour(StrEnum):
    RED = "red"


class Weights(msgspec.Struct, frozen=True):
    colour: Annotated[Colour, Option("A colour.", parse=str.lower)] = Colour.RED
    weight: Annotated[float, Option("A number.")] = 1.5


@dataclass(frozen=True)
class Inner:
    names: Annotated[tuple[str, ...], Option("Repeated.", flag="--name", metavar="NAME")] = ()
    hidden: int = 7


@dataclass(frozen=True)
class Outer:
    path: Annotated[str, Option("A path.", argument=True)]
    inner: Inner = Inner()
    loud: Annotated[bool, Option("A flag.")] = False


def run(*arguments: str) -> list[object]:
    """What a command with these settings is called with."""
    called: list[object] = []
    small = typer.Typer()

    @small.command()
    @takes_settings
    def command(outer: Outer, weights: Weights, own: Annotated[int, typer.Option()] = 3) -> None:
        called.extend((outer, weights, own))

    result = CliRunner().invoke(small, arguments)
    assert result.exit_code == (0 if called else 2), result.output
    return called


def test_a_command_gets_objects_of_its_settings():
    assert run("p") == [Outer("p"), Weights(), 3]
    assert run("p", "--name", "a", "--name", "b", "--loud", "--colour", "RED", "--weight", "2", "--own", "4") == [
        Outer("p", Inner(("a", "b")), True), Weights("red", 2.0), 4]


def test_fields_without_an_option_are_none():
    assert run() == run("p", "--hidden", "1") == run("p", "--no-loud") == run("p", "--names", "a") == []
    assert dataclasses.fields(Inner)[1].name == "hidden"


def test_a_parameter_may_be_one_option_of_a_class():
    assert option_hint(Weights, "weight").__metadata__[0].help == "A number."


if __name__ == "__main__":
    print("\n".join(sorted(lines())))
