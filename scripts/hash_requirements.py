#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write beside each pin of requirements/*.txt the SHA-256 of the one file that pip takes for it.

    scripts/hash_requirements.py requirements/cpu.txt ...    after a change; on x86-64 Linux with Python 3.11

pip is asked with no settings of this machine's, so the files are PyPI's. One hash for each line, not those of every
platform's file as `uv pip compile --generate-hashes` writes them: 180 lines that a review can read, not 4,500.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_PIN = re.compile(r"^(?P<pin>(?P<name>[a-z0-9._-]+)==\S+)(?P<hash> --hash=\S+)?$", re.MULTILINE)
_OURS = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name == "PIP_CERT"}


def hashes(pins: list[str]) -> dict[str, str]:
    """SHA-256 by package name. CalledProcessError if pip finds no file for one."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
                   "--index-url", "https://pypi.org/simple", "--report", report, *pins]  # fmt: skip
        subprocess.run(command, check=True, env=_OURS | {"PIP_CONFIG_FILE": os.devnull})
        files = json.loads(report.read_text())["install"]
    return {_normalized(file["metadata"]["name"]): file["download_info"]["archive_info"]["hashes"]["sha256"]
            for file in files}  # fmt: skip


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hashed(text: str) -> str:
    """The requirements file's text with a hash on each pin."""
    pins = [match["pin"] for match in _PIN.finditer(text)]
    found = hashes(pins)
    return _PIN.sub(lambda match: f"{match['pin']} --hash=sha256:{found[_normalized(match['name'])]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        file.write_text(hashed(file.read_text()))
        print(f"{file}: {len(_PIN.findall(file.read_text()))} pins")


if __name__ == "__main__":
    main()
