# SPDX-License-Identifier: Apache-2.0
"""Has vLLM register the model of `llama.py`, and reads what its ranks have counted."""
from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ARCHITECTURE = "LockstepLlamaForCausalLM"
OVERRIDES = {"architectures": [ARCHITECTURE], "num_local_experts": 2}  # of the model's own configuration
FOLDER_VARIABLE = "LOCKSTEP_FOLDER"  # where each rank writes what it has counted
_PLUGIN, _MODEL = "vllm_pd_lockstep_plugin", "vllm_pd_lockstep_llama"


class Counts(NamedTuple):
    """The forward passes of one rank since its process began, those before it serves included."""
    passes: int
    dummies: int


def make_plugin(folder: Path) -> Path:
    """Make a folder that, in PYTHONPATH, has vLLM register the model. Returns it."""
    info = folder / f"{_PLUGIN}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_PLUGIN} = {_PLUGIN}:register\n")
    here = Path(__file__).resolve()
    (folder / f"{_PLUGIN}.py").symlink_to(here)
    (folder / f"{_MODEL}.py").symlink_to(here.with_name("llama.py"))
    return folder


def read_counts(folder: Path) -> list[Counts]:
    """What the ranks of one engine have counted, in their order."""
    files = sorted(folder.iterdir(), key=lambda file: int(file.name.rpartition("_dp")[2]))
    return [Counts(*memoryview(file.read_bytes()).cast("Q")) for file in files]


def register() -> None:
    """vLLM calls this in each of its processes."""
    from vllm import ModelRegistry
    ModelRegistry.register_model(ARCHITECTURE, f"{_MODEL}:LockstepLlama")
