# SPDX-License-Identifier: Apache-2.0
"""Whether a release of another package has the names that ours stands on, read from its source without importing it."""
from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import NamedTuple

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Required(NamedTuple):
    """A class, a method, an attribute of a class or its instances, or a function, with what it is needed for.

    `takes`: the parameters that it is called with; it may have others, if they have defaults. `exactly`: it is replaced
    by ours, so these are all its parameters. None of both: its parameters do not matter."""
    name: str
    reason: str
    takes: tuple[str, ...] | None = None
    exactly: tuple[str, ...] | None = None


def missing_names(wanted: Mapping[str, tuple[Required, ...]], read: Callable[[str], str | None]) -> list[str]:
    """Those of the wanted names, by file, that a vLLM lacks, one text for each. `read` gives the source of a file of
    the package `vllm`, None where there is no such file."""
    missing = []
    for file, names in wanted.items():
        source = read(file)
        if source is None:
            missing.append(f"vllm/{file}")
            continue
        found = _names(ast.parse(source))
        for required in names:
            if required.name not in found:
                missing.append(f"{required.name} in vllm/{file}")
            elif (parameters := _unfit_parameters(found[required.name], required)) is not None:
                missing.append(f"{required.name}({', '.join(parameters)}) in vllm/{file}")
    return missing


def _names(tree: ast.Module) -> dict[str, ast.stmt]:
    """Name -> definition: classes, functions, methods, and whatever a class or its methods assign to it or to self."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) \
                            and target.value.id == "self":
                        found[f"{node.name}.{target.attr}"] = inner
            for line in node.body:
                for target in _targets(line):
                    if isinstance(target, ast.Name):
                        found[f"{node.name}.{target.id}"] = line
                if isinstance(line, _DEFINITIONS):
                    found[f"{node.name}.{line.name}"] = line  # the last one counts, as at run time
    return found


def _targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        return [one for target in node.targets for one in getattr(target, "elts", [target])]  # those of a tuple, too
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _unfit_parameters(node: ast.stmt, required: Required) -> list[str] | None:
    """The parameters, if they are not what is required; None if they are."""
    given = required.takes if required.exactly is None else required.exactly
    if given is None or not isinstance(node, _DEFINITIONS):
        return None
    parameters = _fields(node) if isinstance(node, ast.ClassDef) else _parameters(node)
    must_know = {name for name, has_default in parameters.items() if required.exactly is not None or not has_default}
    return None if must_know <= set(given) <= set(parameters) else list(parameters)


def _fields(node: ast.ClassDef) -> dict[str, bool]:
    """The fields of a struct or dataclass: name -> whether it has a default."""
    return {line.target.id: line.value is not None for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)}


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, bool]:
    """Name -> whether it has a default, without self or cls. Those that collect the rest (`**kwargs`) do not count."""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [False] * (len(positional) - len(node.args.defaults)) + [True] * len(node.args.defaults)
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in node.decorator_list)
    found = dict(zip((one.arg for one in positional), defaults, strict=True))
    if positional and not static and positional[0].arg in ("self", "cls"):
        del found[positional[0].arg]
    return found | {one.arg: default is not None
                    for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)}
