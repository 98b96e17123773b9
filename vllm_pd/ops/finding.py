# SPDX-License-Identifier: Apache-2.0
"""One line of `vllm-pd doctor`'s report, and how it asks a program that may end badly."""

import subprocess
import sys
from dataclasses import dataclass

NATIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Finding:
    """One check of the report. `cure` says what to do; it is empty where nothing is wrong."""
    check: str
    fact: str
    cure: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.cure

    @property
    def lines(self) -> list[str]:
        """As printed: the fact, and the cure if there is one."""
        fact = f"{'ok ' if self.ok else 'BAD'}  {self.check:<9} {self.fact}"
        return [fact] if self.ok else [fact, f"               -> {self.cure}"]


def run_native(check: str, program: str, cure: str) -> Finding:
    """Run a Python program in a process of its own. The finding holds the last line of its output or of its error."""
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=NATIVE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(check, f"no answer within {NATIVE_TIMEOUT_S:g} s", cure)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
    return Finding(check, lines[-1], "" if done.returncode == 0 else cure)
