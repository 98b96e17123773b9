# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU extension, ``vllm/_C.abi3.so``: eight of upstream's sources against the installed torch.

Upstream's CMake is not used: its ``find_package(Torch)`` refuses a CUDA build of torch on a machine without CUDA. The
code is built for AVX2 also where the host has AVX-512, since the AVX-512 sources want oneDNN from the network and a
wheel built on one host should run on another. ``VLLM_PD_CXXFLAGS`` adds flags (they are part of the cache key).
"""

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import cache, project
from .process import BuildError, run

SOURCES = [
    "activation", "attention", "cache", "utils", "layernorm", "mla_decode", "pos_encoding", "torch_bindings",
]  # fmt: skip
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-mavx2", "-mf16c", "-mfma",
    "-DVLLM_CPU_EXTENSION", "-DTORCH_EXTENSION_NAME=_C", "-DPy_LIMITED_API=0x030b0000",
]  # fmt: skip
LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-lnuma", "-lgomp"]
FILE = "_C.abi3.so"
TAG = "cp311-abi3-linux_x86_64"

_FACTS = """
import json, sysconfig, torch
from torch.utils import cpp_extension
include = cpp_extension.include_paths() + [sysconfig.get_paths()["include"]]
print(json.dumps({"abi": int(torch._C._GLIBCXX_USE_CXX11_ABI), "include": include,
                  "library": cpp_extension.TORCH_LIB_PATH}))
"""


def sources_key(tree: Path) -> str:
    """Hash of everything under ``csrc/``: all that is compiled or included."""
    files = (f for f in (tree / "csrc").rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return cache.tree_key(tree, files)


def pinned_torch() -> str:
    """Version of the torch that the CPU wheel asks for."""
    return project.overrides("cpu")["torch"].removeprefix("==")


def torch_version(python: str) -> str:
    """Version of the torch that python has, as its distribution says; the pinned one if it has none."""
    code = "from importlib.metadata import version; print(version('torch'))"
    try:
        return run([python, "-c", code]).strip()
    except BuildError:
        return pinned_torch()


def check_torch(python: str) -> str:
    """The version of the torch that python has. BuildError if it is not the pinned one, which the wheel's metadata
    asks for: the extension may not load beside another."""
    found, pinned = torch_version(python), pinned_torch()
    if found.partition("+")[0] != pinned:
        raise BuildError(f"{python} has torch {found}, and the CPU wheel asks for torch {pinned}: build inside the "
                         f"environment of scripts/env.sh (`. scripts/env.sh`), or install torch=={pinned} there")
    return found


def key(tree: Path, torch: str) -> str:
    return cache.key(sources_key(tree), torch, *FLAGS, *LIBRARIES, os.environ.get("VLLM_PD_CXXFLAGS", ""))


def is_cached(tree: Path, python: str) -> bool:
    return cache.has("extension", key(tree, torch_version(python)))


def extension(tree: Path, python: str) -> Path:
    """Path of the compiled file in the cache, compiled first if it is not there (1 to 3 minutes on two cores)."""
    torch = torch_version(python)
    name = key(tree, torch)
    what = f"compiling the CPU extension for torch {torch} (1 to 3 minutes)"
    return cache.piece("extension", name, lambda folder: compile_into(folder, tree, python), what) / FILE


def compile_into(folder: Path, tree: Path, python: str) -> None:
    """Compile and link into folder/FILE, as many compilers at once as there are cores (at most MAX_JOBS)."""
    try:
        facts = json.loads(run([python, "-c", _FACTS]).splitlines()[-1])
    except BuildError as error:
        raise BuildError(
            f"{python} has no torch to compile against: build inside the environment of scripts/env.sh "
            f"(`. scripts/env.sh`), or install the torch that pyproject.toml pins and turn build isolation off\n{error}"
        ) from error
    csrc = tree / "csrc"
    compiler = os.environ.get("CXX", "g++")
    flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={facts['abi']}", *shlex.split(os.environ.get("VLLM_PD_CXXFLAGS", ""))]
    flags += [f"-I{csrc}", *(part for path in facts["include"] for part in ("-isystem", path))]

    def compile_one(name: str) -> str:
        target = folder / f"{name}.o"
        run([compiler, *flags, "-c", str(csrc / "cpu" / f"{name}.cpp"), "-o", str(target)])
        return str(target)

    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    run([compiler, "-shared", "-s", *objects, f"-L{facts['library']}", *LIBRARIES, "-o", str(folder / FILE)])
    for target in objects:
        os.remove(target)
