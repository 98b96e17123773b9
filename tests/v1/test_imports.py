# SPDX-License-Identifier: Apache-2.0
"""Every module but V0's own imports beside a stock vLLM."""
import subprocess
import sys
from pathlib import Path

from _wheel import project

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import importlib, sys, traceback
failed = 0
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        failed += 1
sys.exit(failed)
"""


def modules() -> list[str]:
    """Those in the plugin's wheel."""
    files = [file.relative_to(ROOT) for file in project.package_files("plugin") if file.suffix == ".py"]
    return [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]


def test_b91_all_modules_import_without_the_patched_vllm():
    """B91: what is shared knows no name of 0.9.2. `activate` changes classes of vLLM, so not in this process. The
    picker's need gRPC, which is not beside an engine; `tests/wheel` imports them."""
    names = [name for name in modules() if not name.startswith("vllm_pd.picker.")]
    assert "vllm_pd.peer.agent" in names and len(names) > 100
    done = subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
