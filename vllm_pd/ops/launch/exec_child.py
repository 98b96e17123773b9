# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_pd.ops.launch.exec_child [--cores 0,1] -- COMMAND...` becomes COMMAND, tied to its parent and cores.

The kernel sends the process SIGTERM when its parent ends, in whatever way; so nothing outlives a killed `up`. This is a
program and not a `preexec_fn`, because the parent has threads. It runs before every engine, so it imports only the
standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the command in place of this process. Returns 1 if the parent has ended already."""
    parent = int(os.environ.pop("VLLM_PD_PARENT", os.getppid()))
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1:]
    if options[:1] == ["--cores"]:
        os.sched_setaffinity(0, {int(core) for core in options[1].split(",")})
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return 1  # the parent ended before prctl
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
