# SPDX-License-Identifier: Apache-2.0
"""Builds the patched ``vllm`` wheel, or the ``vllm-pd`` plugin: ``pip wheel . --no-deps``, ``python setup.py
bdist_wheel``.

$VLLM_PD_TARGET chooses ``cpu`` (default), ``cuda`` or ``plugin``. The CPU extension is compiled against an installed
torch: inside the environment of scripts/env.sh add ``--no-build-isolation``; with isolation, pip fetches that torch
first (only for cpu, and only while the compiled extension is not in the cache). The work is done by scripts/_wheel;
setuptools only asks for it.
"""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

sys.path.insert(0, str(Path(__file__).resolve().parent / "scripts"))
from _wheel import cache, extension, metadata, plugin, project, source, targets

TARGET = project.check_target(os.environ.get("VLLM_PD_TARGET", "cpu"))
EGG_BASE = tempfile.mkdtemp(prefix="vllm-pd-egg-")
atexit.register(shutil.rmtree, EGG_BASE, ignore_errors=True)


class PatchedWheel(bdist_wheel):
    """Stands in for setuptools' ``bdist_wheel``: same options, but the file is made by scripts/_wheel."""

    def run(self) -> None:
        with cache.lock():
            path = targets.build(TARGET, Path(self.dist_dir))
        self.distribution.dist_files.append(("bdist_wheel", "any", str(path)))


def needed_to_build() -> list[str]:
    """The torch to compile the extension against, if this interpreter has none and the extension is not in the
    cache."""
    if TARGET != "cpu" or find_spec("torch"):
        return []
    with cache.lock():
        if extension.is_cached(source.patched(), sys.executable):
            return []
    return [f"torch=={extension.pinned_torch()}", "numpy<2.3"]


setup(
    name=project.distribution(TARGET),
    version=targets.version(TARGET),
    options={"egg_info": {"egg_base": EGG_BASE}},
    python_requires=targets.requires_python(TARGET),
    packages=[],
    py_modules=[],
    setup_requires=needed_to_build(),
    entry_points={"console_scripts": [metadata.ENTRY_POINT]},
    cmdclass={"bdist_wheel": PatchedWheel},
    # For pip, which asks before the wheel is made. Those of a patched wheel are upstream's: it has them itself.
    install_requires=plugin.requirements() if TARGET == "plugin" else [],
    extras_require=project.extras() if TARGET == "plugin" else {},
)
