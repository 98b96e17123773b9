# SPDX-License-Identifier: Apache-2.0
"""UPSTREAM_VERSION: which upstream release the series belongs to, and how to recognise it."""
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Pattern

from .errors import Refusal

FILE = "UPSTREAM_VERSION"
PROJECT = "vllm"
_SHAPES = {
    "version": re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?"),
    "commit": re.compile(r"[0-9a-f]{40}|unknown"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
    "tree_sha256": re.compile(r"[0-9a-f]{64}"),
}
_COMMENTS = {
    "version": "The one upstream release that patches/ applies to. scripts/upstream.py fetches and verifies it.",
    "commit": "The commit of the release's tag, for `scripts/upstream.py --from GIT_CHECKOUT`.",
    "sha256": "sha256 of the source distribution on the package index.",
    "tree_sha256": "Digest of the sources that the wheel is made of; scripts/_series/source.py says over which files.",
}


@dataclass(frozen=True)
class Pin:
    """One upstream release. `commit` may be "unknown", then only the content identifies a checkout."""

    version: str
    commit: str
    sha256: str
    tree_sha256: str

    @property
    def stem(self) -> str:
        """Name of the sdist without its suffix, which is also the one folder inside it."""
        return f"{PROJECT}-{self.version}"

    def text(self) -> str:
        """The content of UPSTREAM_VERSION."""
        return "".join(f"# {_COMMENTS[key]}\n{key} = {getattr(self, key)}\n" for key in _SHAPES)


def read(root: Path) -> Pin:
    """The pin of the project at `root`."""
    path = root / FILE
    try:
        return parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise Refusal(f"{path}: cannot read the pin: {error.strerror}") from error


def parse(content: str, name: str) -> Pin:
    """A pin from its text. `name` is for the error."""
    return Pin(**parse_pairs(content, name, _SHAPES))


def parse_pairs(content: str, name: str, shapes: Mapping[str, Pattern[str]]) -> Dict[str, str]:
    """The values of lines `key = value`, without comments; every key of `shapes` must be there once and well-formed.
    `name` is for the error."""
    found: Dict[str, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or key not in shapes or key in found:
            raise Refusal(f"{name}:{number}: expected one line `key = value` for each of {', '.join(shapes)}; "
                          f"found {line!r}")
        if not shapes[key].fullmatch(value):
            raise Refusal(f"{name}:{number}: {key} must match {shapes[key].pattern}; found {value!r}")
        found[key] = value
    missing = [key for key in shapes if key not in found]
    if missing:
        raise Refusal(f"{name}: expected the keys {', '.join(shapes)}; {', '.join(missing)} missing")
    return found
