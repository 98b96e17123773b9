# SPDX-License-Identifier: Apache-2.0
"""The environment of engine V1 with our plugin, and the same packages without it."""

import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from _series.errors import Refusal
from _upstream_tests import trees


@dataclass(frozen=True)
class BenchInstallation:
    """A Python with vLLM, and the folders before its own. `plugin`: whether vllm-pd is installed there."""
    python: str
    folders: tuple[Path, ...]
    plugin: bool

    def environment(self, *more: Path, **settings: str) -> dict[str, str]:
        """For a process of its own. `more`: further folders for its PYTHONPATH."""
        base = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONHASHSEED": "0",
                "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONUNBUFFERED": "1"}
        return trees.environment([*self.folders, *more], base | settings)


def find_installations(out: Path) -> tuple[BenchInstallation, BenchInstallation]:
    """Stock vLLM, and vLLM with the plugin: this process's. Raises Refusal where the two are not in environments of
    their own, as scripts/env.sh makes them."""
    spec = find_spec("vllm")
    own = Path(sysconfig.get_paths()["purelib"])
    if spec is None or find_spec("vllm_pd.v1") is None:
        raise Refusal("no vLLM with the plugin here: `VLLM_PD_ENGINE=v1 . scripts/env.sh` first")
    packages = Path(spec.origin).parents[1]
    python = packages.parents[2] / "bin" / "python"
    if packages == own or (packages / "vllm_pd").exists() or not python.is_file():
        raise Refusal(f"{packages}: expected packages without vllm-pd in an environment of their own")
    names = out / "stock"  # vllm-cpu lacks the metadata that vLLM asks for, see docs/v1.md
    shutil.rmtree(names, ignore_errors=True)
    for folder in own.glob("vllm-*.dist-info"):
        shutil.copytree(folder, names / folder.name)
    return BenchInstallation(str(python), (names, ), plugin=False), BenchInstallation(sys.executable, (), plugin=True)
