# SPDX-License-Identifier: Apache-2.0
"""B50: the patched vLLM is imported without `vllm_pd`; only what starts an engine or a server calls its hooks."""

import subprocess
import sys

PROGRAM = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm_pd":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not [name for name in sys.modules if name.startswith("vllm_pd")]
from vllm.engine.arg_utils import EngineArgs
try:
    EngineArgs(model="none").create_engine_config()
except ModuleNotFoundError as error:
    print("refused:", error)
"""


def test_b50_vllm_is_imported_without_vllm_pd():
    """B50: every module that a patch gives a hook. An engine says which package is missing."""
    modules = ["vllm", "vllm.engine.arg_utils", "vllm.engine.llm_engine", "vllm.engine.async_llm_engine",
               "vllm.core.scheduler", "vllm.entrypoints.launcher", "vllm.v1.engine.core", "vllm.v1.engine.utils"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *modules], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "refused: No module named 'vllm_pd" in done.stdout
