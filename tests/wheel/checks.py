# SPDX-License-Identifier: Apache-2.0
"""What must hold of a wheel file, as functions that return the problems found; each is also fed something bad."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from _wheel.archive import read_record, record_hash


@dataclass(frozen=True)
class Wheel:
    """A wheel file, every entry read once (the CUDA wheel unpacks to more than a gigabyte)."""

    path: Path
    found: dict[str, str]  # entry -> hash as RECORD writes it
    sizes_bytes: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> "Wheel":
        found, sizes = {}, {}
        with zipfile.ZipFile(path) as opened:
            for name in opened.namelist():
                data = opened.read(name)
                found[name], sizes[name] = record_hash(data), len(data)
        return cls(path, found, sizes)

    @property
    def dist_info(self) -> str:
        (folder,) = {name.split("/")[0] for name in self.found if ".dist-info/" in name}
        return folder

    def text(self, name: str) -> str:
        with zipfile.ZipFile(self.path) as opened:
            return opened.read(name).decode()

    def info(self, name: str) -> str:
        """Text of a file in dist-info."""
        return self.text(f"{self.dist_info}/{name}")


def record_problems(wheel: Wheel) -> list[str]:
    """RECORD names every entry but itself, with its hash and size, and nothing else."""
    record = read_record(wheel.info("RECORD"))
    problems = []
    if record.keys() | {f"{wheel.dist_info}/RECORD"} != wheel.found.keys():
        problems.append("RECORD and the entries name different files")
    for name in record.keys() & wheel.found.keys():
        if record[name] != (wheel.found[name], wheel.sizes_bytes[name]):
            problems.append(f"{name}: hash or size in RECORD is wrong")
    return problems


def content_problems(wheel: Wheel, expected: Mapping[str, str]) -> list[str]:
    """Entries outside dist-info that are missing, too many, or not what expected (name -> hash) says."""
    found = {name: digest for name, digest in wheel.found.items() if not name.startswith(f"{wheel.dist_info}/")}
    problems = [f"{name}: missing" for name in expected.keys() - found.keys()]
    problems += [f"{name}: not expected" for name in found.keys() - expected.keys()]
    problems += [f"{name}: differs" for name in expected.keys() & found.keys() if expected[name] != found[name]]
    return sorted(problems)
