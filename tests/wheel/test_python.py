# SPDX-License-Identifier: Apache-2.0
"""B53: what the wheels' Python does when it runs: the flags of ``vllm serve``, the CUDA wheel without a GPU."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FLAGS = """
import json
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils import FlexibleArgumentParser
import vllm
parser = make_arg_parser(FlexibleArgumentParser())
flags = {s: [str(a.choices), str(a.nargs), str(a.default)] for a in parser._actions for s in a.option_strings}
print(json.dumps([vllm.__file__, flags]))
"""

IMPORTS = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
from importlib.metadata import version
assert version("vllm").endswith(".cuda"), version("vllm")
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
"""
# The control side of the engine, which is also what the series touches; kernels and the CUDA platform need a GPU.
MODULES = ["vllm.sequence", "vllm.config", "vllm.core.scheduler", "vllm.core.block_manager", "vllm.engine.llm_engine",
           "vllm.engine.async_llm_engine", "vllm.engine.multiprocessing.engine", "vllm.entrypoints.openai.api_server",
           "vllm.distributed.kv_events"]  # fmt: skip


def serve_flags(tree: Path) -> dict[str, list[str]]:
    env = os.environ | {"PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", FLAGS], env=env, capture_output=True, text=True, cwd=tree)
    assert done.returncode == 0, done.stderr[-3000:]
    file, flags = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(tree))
    return flags


def import_from(folder: Path, modules: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORTS, str(folder), *modules]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def unpack_python(wheel: Path, folder: Path) -> None:
    """Everything but compiled code (over a gigabyte of it)."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [n for n in opened.namelist() if not n.endswith(".so")])


@pytest.mark.heavy
def test_b53_serve_has_the_flags_of_upstream(wheels, plain, tmp_path):
    unpack_python(wheels["cpu"].path, tmp_path / "ours")
    (tmp_path / "theirs").mkdir()  # without the sdist's egg-info, whose version says no platform
    (tmp_path / "theirs" / "vllm").symlink_to(plain / "vllm")
    theirs, ours = serve_flags(tmp_path / "theirs"), serve_flags(tmp_path / "ours")
    assert "--kv-transfer-config" in theirs and len(theirs) > 100
    assert ours == theirs


def test_b53_cuda_wheels_python_imports_without_a_gpu(wheels, tmp_path):
    unpack_python(wheels["cuda"].path, tmp_path)
    done = import_from(tmp_path, MODULES)
    assert done.returncode == 0, done.stderr[-3000:]


def test_b53_import_check_fails_on_a_broken_module(wheels, tmp_path):
    unpack_python(wheels["cuda"].path, tmp_path)
    (tmp_path / "vllm" / "sequence.py").write_text("import no_such_module\n")
    done = import_from(tmp_path, ["vllm.sequence"])
    assert done.returncode != 0 and "no_such_module" in done.stderr
