# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pd.launch.exec_child [--cores 0,1] -- COMMAND...` becomes COMMAND, tied to its parent and some cores.

The kernel sends SIGTERM when the process that started us ends, however it ends; so nothing outlives a killed `up`.
It is a program, not a `preexec_fn`, because the parent has threads. Standard library only: it runs before every
engine.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    parent = int(os.environ.pop("VLLM_PD_PARENT", os.getppid()))
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1:]
    if options[:1] == ["--cores"]:
        os.sched_setaffinity(0, {int(core) for core in options[1].split(",")})
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # The parent died before the kernel knew of our wish.
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
