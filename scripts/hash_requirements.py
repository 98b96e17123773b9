#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write beside each pin of requirements/*.txt the SHA-256 of the files on PyPI that an installer may take for it.

    scripts/hash_requirements.py requirements/cpu.txt ...    after a change; needs the package `packaging`

Those are the wheels for CPython 3.11 on x86-64 Linux, of whatever manylinux, because pip and uv may choose another one;
where there is none, the source. Not those of every platform's file, as `uv pip compile --generate-hashes` writes them:
180 lines that a review can read, not 4,500.
"""

import argparse
import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

INDEX, TIMEOUT_S = "https://pypi.org/simple", 60.0
MINOR = 11  # of Python 3
_PIN = re.compile(r"^(?P<pin>(?P<name>[a-z0-9._-]+)==(?P<version>\S+))(?: --hash=\S+)*$", re.MULTILINE)


def fits(tag: Tag) -> bool:
    """Whether a wheel of this tag runs on CPython 3.11 on x86-64 Linux with glibc."""
    python = re.fullmatch(r"(cp|py)3(\d*)", tag.interpreter)
    newest = python is not None and int(python[2] or 0) == MINOR
    older = python is not None and int(python[2] or 0) < MINOR and (python[1] == "py" or tag.abi in ("abi3", "none"))
    return (newest or older) and bool(re.fullmatch(r"any|(many)?linux.*_x86_64", tag.platform))


def hashes(name: str, version: str) -> list[str]:
    """The SHA-256 of each file. Raises OSError, and ValueError if there is none."""
    asked = urllib.request.Request(f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
        files = {file["filename"]: file["hashes"]["sha256"] for file in json.load(reply)["files"]}
    wheels = sorted(digest for file, digest in files.items() if file.endswith(".whl") and _is_of(file, version))
    sources = sorted(digest for file, digest in files.items() if file.endswith(f"-{version}.tar.gz"))
    if not wheels + sources:
        raise ValueError(f"{name}=={version}: the index has no file of it for Python 3.{MINOR} on x86-64 Linux")
    return wheels or sources


def _is_of(wheel: str, version: str) -> bool:
    if f"-{version}-" not in wheel:
        return False
    return any(map(fits, parse_wheel_filename(wheel)[3]))


def hashed(text: str) -> str:
    """The requirements file's text with the hashes on each pin."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pin: hashes(pin["name"], pin["version"]), _PIN.finditer(text)))
    each = iter(found)
    return _PIN.sub(lambda pin: " ".join([pin["pin"], *(f"--hash=sha256:{digest}" for digest in next(each))]), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        file.write_text(hashed(file.read_text()))
        print(f"{file}: {len(_PIN.findall(file.read_text()))} pins")


if __name__ == "__main__":
    main()
