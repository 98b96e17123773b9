# SPDX-License-Identifier: Apache-2.0
"""Command line options from the fields of settings classes.

A settings class is a dataclass or a msgspec.Struct. A field that is annotated with an `Option` is an option of the
command line, with the field's name, type and default. A field whose type is itself a settings class stands for the
options of that class. All other fields are not on the command line. `takes_settings` makes a typer command of a
function that takes such classes.
"""
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

_REPEATED = (tuple, Sequence, Mapping)  # types of fields whose option may be repeated


@dataclass(frozen=True)
class Option:
    """How a field is written on the command line. `flag`: where it is not named as the field; `metavar`: what `--help`
    shows for the value; `argument`: whether it is written without a flag; `parse` makes the field's value of the value
    that was written, or of the tuple of all values where the option may be repeated."""
    help: str
    flag: str | None = None
    metavar: str | None = None
    argument: bool = False
    parse: Callable[[Any], Any] | None = None


def flag_of(field: str) -> str:
    """How a field is written on the command line where its Option names no flag: "--a-b" for `a_b`."""
    return f"--{field.replace('_', '-')}"


class _OptionField(NamedTuple):
    """One field of a settings class. `option` is None where `kind` is a settings class."""
    name: str
    kind: Any
    option: Option | None
    default: Any  # inspect.Parameter.empty where there is none

    @property
    def repeated(self) -> bool:
        """Whether the option may be given more than once."""
        return get_origin(self.kind) in _REPEATED

    def hint(self) -> Any:
        """The option as an annotation for typer."""
        import typer
        kind = self.kind
        if self.repeated:
            kind = list[str] | None
        elif isinstance(kind, type) and issubclass(kind, Enum):
            kind = str  # the settings check it themselves, and their error names the cure
        if self.option.argument:
            return Annotated[kind, typer.Argument(metavar=self.option.metavar, help=self.option.help)]
        flag = self.option.flag or flag_of(self.name)
        return Annotated[kind, typer.Option(flag, metavar=self.option.metavar, help=self.option.help)]

    def parameter(self) -> inspect.Parameter:
        """The option as a parameter for typer."""
        default = self.default.value if isinstance(self.default, Enum) else None if self.repeated else self.default
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=self.hint())

    def value(self, given: Mapping[str, Any]) -> Any:
        """The field's value from what typer has read."""
        if self.option is None:
            return _build(self.kind, given)
        value = given[self.name]
        if self.repeated:
            value = tuple(value or ())
        return value if self.option.parse is None else self.option.parse(value)


def takes_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """A function for typer that calls `command`. Each parameter of `command` whose type is a settings class is replaced
    by the options of that class; `command` gets an object that is made of their values."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        parameters += _parameters(hint) if _is_settings(hint) else [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)]

    def run(**given: Any) -> Any:
        return command(**{name: _build(hint, given) if _is_settings(hint) else given[name]
                          for name, hint in hints.items() if name != "return"})

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def option_hint(settings: type, name: str) -> Any:
    """The annotation that makes a parameter of a typer command the same option as a field of `settings`."""
    return next(field for field in _fields(settings) if field.name == name).hint()


def option_of(settings: type, name: str) -> Option:
    """The Option of a field of `settings`, for a field of another class that means the same."""
    return next(field.option for field in _fields(settings) if field.name == name)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))


def _fields(settings: type) -> Iterator[_OptionField]:
    """The fields that are options or groups of options."""
    struct = issubclass(settings, msgspec.Struct)
    defaults = {field.name: field.default for field in
                (msgspec.structs.fields(settings) if struct else dataclasses.fields(settings))}
    missing = (msgspec.NODEFAULT, dataclasses.MISSING)
    for name, hint in get_type_hints(settings, include_extras=True).items():
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is not None or _is_settings(kind):
            default = defaults[name] if defaults[name] not in missing else inspect.Parameter.empty
            yield _OptionField(name, kind, option, default)


def _parameters(settings: type) -> list[inspect.Parameter]:
    return [parameter for field in _fields(settings)
            for parameter in ([field.parameter()] if field.option else _parameters(field.kind))]


def _build(settings: type, given: Mapping[str, Any]) -> Any:
    return settings(**{field.name: field.value(given) for field in _fields(settings)})
