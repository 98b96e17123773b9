# SPDX-License-Identifier: Apache-2.0
"""The dist-info files of our wheels, made from upstream's so that a newer pin brings its own along.

Requirements start from upstream's list. Those named in ``[tool.vllm-pd.requires]`` are replaced, left out or added:
0.9.2 leaves open what has broken it since (transformers 4.54, numpy 2.3), and the CPU list names packages that are
only on another index.
"""

import configparser
import io
import re

NAME = re.compile(r"[A-Za-z0-9._-]+")
ENTRY_POINT = "vllm-pd = vllm_pd.cli:main"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def override(requirements: list[str], overrides: dict[str, str | bool]) -> list[str]:
    """requirements with those in overrides replaced (string), left out (False), or added at the end."""
    rest = dict(overrides)
    result = []
    for requirement in requirements:
        name = canonical(NAME.match(requirement).group())
        if name not in overrides:
            result.append(requirement)
        elif (specifier := rest.pop(name, False)) is not False:
            result.append(f"{name}{specifier}")
    return result + [f"{name}{specifier}" for name, specifier in rest.items() if specifier is not False]


def read_requirements(files: dict[str, str], name: str) -> list[str]:
    """Lines of a requirements file in files (name -> text), following ``-r``; comments and options dropped."""
    found = []
    for line in files[name].splitlines():
        line = line.split(" #")[0].strip()
        if line.startswith("-r "):
            found += read_requirements(files, line[3:].strip())
        elif line and not line.startswith(("#", "-")):
            found.append(line)
    return found


def metadata(upstream: str, version: str, requirements: list[str], requires_python: str) -> str:
    """METADATA from upstream's (PKG-INFO or METADATA text): version, Python and the unconditional requirements
    replaced."""
    head, _, body = upstream.partition("\n\n")
    lines, written = [], False
    for line in head.splitlines():
        field = line.split(":", 1)[0]
        if field == "Version":
            lines.append(f"Version: {version}")
        elif field == "Requires-Python":
            lines.append(f"Requires-Python: {requires_python}")
        elif field == "Requires-Dist" and "extra ==" not in line:
            if not written:
                lines += [f"Requires-Dist: {r}" for r in requirements]
            written = True
        else:
            lines.append(line)
    if not written:
        raise ValueError("upstream's metadata holds no requirement")
    return "\n".join(lines) + "\n\n" + body


def requirements_of(upstream: str) -> list[str]:
    """The unconditional requirements that a METADATA text names."""
    head = upstream.partition("\n\n")[0]
    rows = [line.split(":", 1)[1].strip() for line in head.splitlines() if line.startswith("Requires-Dist:")]
    return [row for row in rows if "extra ==" not in row]


def entry_points(groups: dict[str, dict[str, str]]) -> str:
    """entry_points.txt: upstream's groups and our console script."""
    config = configparser.ConfigParser(delimiters=("=",))
    config.optionxform = str
    config.read_dict(groups)
    if not config.has_section("console_scripts"):
        config.add_section("console_scripts")
    name, _, function = ENTRY_POINT.partition(" = ")
    config.set("console_scripts", name, function)
    text = io.StringIO()
    config.write(text)
    return text.getvalue().rstrip() + "\n"


def read_entry_points(text: str) -> dict[str, dict[str, str]]:
    config = configparser.ConfigParser(delimiters=("=",))
    config.optionxform = str
    config.read_string(text)
    return {section: dict(config[section]) for section in config.sections()}


def wheel(tags: list[str]) -> str:
    """The WHEEL file: of a wheel with compiled code, unless it is for any platform."""
    pure = str(all(tag.endswith("-any") for tag in tags)).lower()
    lines = ["Wheel-Version: 1.0", "Generator: vllm-pd", f"Root-Is-Purelib: {pure}", *(f"Tag: {tag}" for tag in tags)]
    return "\n".join(lines) + "\n"


def version_module(version: str) -> str:
    """``vllm/_version.py``, with the names that upstream's generated one has."""
    parts = tuple(int(p) if p.isdigit() else p for p in re.split(r"[.+]", version.split("+")[0]))
    if "+" in version:
        parts += (version.split("+")[1],)
    return (
        "# written by the build of the wheel\n"
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = {parts!r}\n"
    )
