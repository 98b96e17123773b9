# SPDX-License-Identifier: Apache-2.0
"""The folder patches/: `series` (the order), the patches, and what is made from them, README.md and SHA256SUMS."""
from pathlib import Path
from typing import Dict, List

from . import readme
from .errors import Refusal, refuse_all
from .git import raw_bytes, text
from .patch import Patch, parse
from .source import store

SERIES = "series"
SUMS = "SHA256SUMS"
README = "README.md"


def names(folder: Path) -> List[str]:
    """File names in the order of `series`; refuses a series that doesn't name exactly the patches that are there."""
    try:
        lines = (folder / SERIES).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Refusal(f"{folder / SERIES}: cannot read the series: {error.strerror}") from error
    listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    there = {path.name for path in folder.glob("*.patch")}
    found = [f"{SERIES} names {name!r} twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    found += [f"{SERIES} names {name!r}, which is not there" for name in listed if name not in there]
    found += [f"{name} is not in {SERIES}" for name in sorted(there.difference(listed))]
    refuse_all(f"{folder}:", found)
    return listed


def load(folder: Path) -> Dict[str, str]:
    """Text of each patch by file name, in the order of the series."""
    return {name: text((folder / name).read_bytes()) for name in names(folder)}


def patches(texts: Dict[str, str]) -> List[Patch]:
    """The patches of `load`; refuses a file whose name is not the one its subject gives."""
    loaded = {name: parse(content, name) for name, content in texts.items()}
    refuse_all("file names must follow from the subjects:",
               [f"{name}: expected {patch.name}" for name, patch in loaded.items() if name != patch.name])
    return list(loaded.values())


def content(series: List[Patch], sums: Dict[str, str], whole: str) -> Dict[str, str]:
    """Every file of the folder: `series` are the patches, `sums` sha256 by path of the touched files after the whole
    series, `whole` its diff as one."""
    made = {patch.name: patch.render() for patch in series}
    made[SERIES] = "".join(patch.name + "\n" for patch in series)
    made[SUMS] = "".join(f"{sums[path]}  {path}\n" for path in sorted(sums))
    made[README] = readme.render(series, whole)
    return made


def differences(folder: Path, made: Dict[str, str]) -> List[str]:
    """Names of the files in `folder` that are not as `made` says, or are not there, or should not be there."""
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    stale = {name for name in present if name.endswith(".patch") and name not in made}
    return sorted(stale.union(
        name for name, value in made.items()
        if name not in present or (folder / name).read_bytes() != raw_bytes(value)))


def write(folder: Path, made: Dict[str, str]) -> List[str]:
    """Make `folder` hold `made`; what changed. Each file is replaced whole, `series` last."""
    changed = differences(folder, made)
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(changed, key=lambda name: (name == SERIES, name)):
        if name in made:
            store(folder / name, raw_bytes(made[name]))
        else:
            (folder / name).unlink()
    return changed
