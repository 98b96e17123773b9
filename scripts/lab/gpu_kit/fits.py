#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tell whether a kit fits this machine, before anything is unpacked. Standard library only, and torch is not imported.

    fits.py KIT DEST        one line for each thing that does not fit, with the cure; exit status 2 if there is one
"""
from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import runpy
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

SPARE_BYTES = 1 << 30  # for the weights of a small model, caches and logs
CUDA_SUCCESS = 0
PROCESSOR = "x86_64"  # of all that is carried
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class KitNeeds(NamedTuple):
    """What the kit was made for. `torch` is the oldest that its kernels load under, `cuda` a major version, `sm` 90 for
    compute capability 9.0."""
    python: str
    torch: str
    cuda: str
    sm: int
    unpacked_bytes: int


class MachineFacts(NamedTuple):
    """What is there. `torch` is "" without torch, `torch_cuda` "" where it was built without CUDA. `driver_cuda` is the
    newest CUDA version of the driver, "" without a driver. `sm` is 0 where the driver has no GPU. `free_bytes` includes
    what an earlier call has unpacked."""
    python: str
    torch: str
    torch_cuda: str
    driver_cuda: str
    sm: int
    free_bytes: int
    processor: str = PROCESSOR


def find_misfits(needs: KitNeeds, facts: MachineFacts) -> list[str]:
    """One line for each thing that does not fit, with the cure."""
    if facts.processor != PROCESSOR:
        return [f"machine: it is {facts.processor}, and the kit carries programs for {PROCESSOR}: use such a machine"]
    return [*_python_misfits(needs, facts), *_torch_misfits(needs, facts), *_gpu_misfits(needs, facts),
            *_disk_misfits(needs, facts)]


def _python_misfits(needs: KitNeeds, facts: MachineFacts) -> list[str]:
    if facts.python == needs.python:
        return []
    return [f"python: this is {facts.python}, the kit has packages for {needs.python}: write PYTHON=FILE of a Python "
            f"{needs.python}"]


def _torch_misfits(needs: KitNeeds, facts: MachineFacts) -> list[str]:
    cure = f"install torch {needs.torch} or later for CUDA {needs.cuda}"
    if not facts.torch:
        return [f"torch: there is none for this Python, and the kit does not carry it: {cure}"]
    found = []
    if _numbers(facts.torch) < _numbers(needs.torch):
        found.append(f"torch: {facts.torch} is too old for the kit's kernels: {cure}")
    if not facts.torch_cuda:
        found.append(f"torch: {facts.torch} was built without CUDA: {cure}")
    elif _numbers(facts.torch_cuda)[0] != int(needs.cuda):
        found.append(f"torch: it was built for CUDA {facts.torch_cuda}, the kit's libraries for {needs.cuda}: {cure}")
    return found


def _gpu_misfits(needs: KitNeeds, facts: MachineFacts) -> list[str]:
    if not facts.driver_cuda:
        return ["gpu: there is no NVIDIA driver (libcuda.so.1): use a machine with a GPU, or show its driver to this "
                "container"]
    found = []
    if _numbers(facts.driver_cuda)[0] < int(needs.cuda):
        found.append(f"gpu: its driver knows CUDA up to {facts.driver_cuda}, the kit needs {needs.cuda}: install a "
                     "newer driver")
    if not facts.sm:
        found.append("gpu: the driver finds none: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")
    elif facts.sm != needs.sm:
        found.append(f"gpu: it is an sm_{facts.sm}, the kit has kernels for sm_{needs.sm}: make it with SM={facts.sm}")
    return found


def _disk_misfits(needs: KitNeeds, facts: MachineFacts) -> list[str]:
    needed = needs.unpacked_bytes + SPARE_BYTES
    if facts.free_bytes >= needed:
        return []
    return [f"disk: {facts.free_bytes / 1e9:.1f} GB are free, the kit needs {needed / 1e9:.1f} GB: write DEST=FOLDER "
            "on a larger disk"]


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 11) of "2.11.0+cu130" and of "2.11": as far as it decides."""
    return tuple(int("".join(filter(str.isdigit, one))) for one in version.split("+")[0].split(".")[:2])


def read_needs(kit: Path) -> KitNeeds:
    """From the kit's `kit.json`. Raises OSError, ValueError or KeyError if it has none that is whole."""
    written = json.loads((kit / "kit.json").read_text())
    return KitNeeds(*(written[name] for name in KitNeeds._fields))


def read_facts(dest: Path) -> MachineFacts:
    """Of this machine, this Python, and the disk that `dest` is on, or will be on."""
    driver_cuda, sm = _ask_driver()
    return MachineFacts("{}.{}".format(*sys.version_info[:2]), *_ask_torch(), driver_cuda, sm, _free_bytes(dest),
                        platform.machine())


def _ask_torch() -> tuple[str, str]:
    """Its version and its CUDA version. To import it takes ten seconds, so its file of versions is read instead."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "", ""
    version = runpy.run_path(os.path.join(spec.submodule_search_locations[0], "version.py"))
    return version["__version__"], version.get("cuda") or ""


def _ask_driver() -> tuple[str, int]:
    """The newest CUDA version of the driver, and the first GPU's architecture."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", 0
    version, device, major, minor = (ctypes.c_int() for _ in range(4))
    driver.cuDriverGetVersion(ctypes.byref(version))  # the only call that works before cuInit
    known = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if driver.cuInit(0) != CUDA_SUCCESS or driver.cuDeviceGet(ctypes.byref(device), 0) != CUDA_SUCCESS:
        return known, 0
    driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
    return known, 10 * major.value + minor.value


def _free_bytes(dest: Path) -> int:
    there = next(one for one in (dest, *dest.absolute().parents) if one.is_dir())
    unpacked = sum(one.lstat().st_size for one in dest.rglob("*") if not one.is_dir())
    return shutil.disk_usage(there).free + unpacked


def main() -> int:
    kit, dest = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        needs = read_needs(kit)
    except (OSError, ValueError, LookupError, TypeError) as error:
        misfits = [f"kit: {kit / 'kit.json'} can't be read ({type(error).__name__}: {error}): make the kit with "
                   "make_kit.sh, and carry all of it"]
    else:
        misfits = find_misfits(needs, read_facts(dest))
    for line in misfits:
        print(f"does not fit: {line}")
    return 2 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
