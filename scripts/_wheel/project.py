# SPDX-License-Identifier: Apache-2.0
"""What this repository says itself: ``[tool.vllm-pd]`` of pyproject.toml, the files of ``vllm_pd``, the version."""

import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("cpu", "cuda", "plugin")
PATCHED_ONLY = ("v0", "bench/dp")  # folders of vllm_pd
NAMES = {"plugin": "vllm-pd"}  # of the distributions; the patched wheels replace vllm


@cache
def settings() -> dict:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)["tool"]["vllm-pd"]


def check_target(target: str) -> str:
    """target itself; ValueError that names the choices otherwise."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r}: must be one of {', '.join(TARGETS)}")
    return target


def distribution(target: str) -> str:
    """Name of the distribution that target makes."""
    return NAMES.get(check_target(target), "vllm")


def version(upstream: str, target: str) -> str:
    """Version of our wheel: pin, number of the series' release, target. vLLM chooses the CPU platform by "cpu" in
    it. The plugin has no pin and a version of its own."""
    if target == "plugin":
        return settings()["plugin"]["version"]
    return f"{upstream}+pd.{settings()['release']}.{check_target(target)}"


def overrides(target: str) -> dict[str, str | bool]:
    """Requirement name -> version specifier that replaces upstream's, or False to leave the requirement out."""
    requires = settings()["requires"]
    return requires["common"] | requires[check_target(target)]


def extras() -> dict[str, list[str]]:
    """Extra of the plugin -> its requirements."""
    common = settings()["requires"]["common"]
    return {extra: [f"{name}{common[name] if given is True else given}" for name, given in wanted.items()]
            for extra, wanted in settings()["plugin"]["extras"].items()}


def package_files(target: str) -> list[Path]:
    """Every file of ``vllm_pd`` that goes into the wheel. The plugin has nothing that needs the patched vLLM."""
    package = ROOT / "vllm_pd"
    left_out = [package / name for name in PATCHED_ONLY if target == "plugin"]
    return sorted(f for f in package.rglob("*") if f.is_file() and "__pycache__" not in f.parts and f.suffix != ".pyc"
                  and not any(folder in f.parents for folder in left_out))


def recipe_files() -> list[Path]:
    """What shapes a wheel besides its contents: these modules and the settings."""
    return [ROOT / "pyproject.toml", *sorted((ROOT / "scripts" / "_wheel").glob("*.py"))]
