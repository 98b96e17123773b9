# SPDX-License-Identifier: Apache-2.0
"""One line of `vllm-pd doctor`'s report, and how it asks a program that may end badly."""

import subprocess
import sys
from dataclasses import dataclass

NATIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Finding:
    """One check of the report. `cure` says what to do; it is empty where nothing is wrong. `hint` says what would make
    more of this host, where nothing is wrong without it."""
    check: str
    fact: str
    cure: str = ""
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.cure

    @property
    def lines(self) -> list[str]:
        """As printed: the fact, and the cure or the hint if there is one."""
        fact = f"{'BAD' if self.cure else '-- ' if self.hint else 'ok '}  {self.check:<9} {self.fact}"
        return [fact, f"               -> {self.cure or self.hint}"] if self.cure or self.hint else [fact]


def run_native(check: str, program: str, cure: str) -> Finding:
    """Run a Python program in a process of its own. The finding holds the last line of its output or of its error."""
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=NATIVE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(check, f"no answer within {NATIVE_TIMEOUT_S:g} s", cure)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [f"exit {done.returncode}"]
    return Finding(check, lines[-1], "" if done.returncode == 0 else cure)
