# SPDX-License-Identifier: Apache-2.0
"""A vLLM that starts and waits as is good for two cores with many engines; what it computes and says stays as it is.

As a command, `vllm serve` with that:

    python tests/v1/quick.py serve MODEL [arguments of vllm serve]
"""
import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from pathlib import Path

SPIN_S = 0.002
LOOK_AGAIN_MS = 50  # vLLM: 5 s; a notification may be lost
SERVE = (sys.executable, __file__, "serve")  # as vllm_pd.ops.launch.plan.SERVE


def make_quick() -> None:
    """The engines that this process starts from now on are forked from it, and rest while they wait."""
    from _chaos.forks import fork_engines, spin_for
    from vllm.distributed.device_communicators import shm_broadcast
    fork_engines()
    spin_for(SPIN_S)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_AGAIN_MS


def end_with_parent() -> None:
    """Kill the process group of this process, its leader, once its parent has ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def leave_listeners() -> None:
    """Listen at none of the TCP sockets of the process that this one was forked from. vLLM's server looks at its end
    for who has its port, and a worker that is a zombie by then makes that an error (psutil.ZombieProcess)."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.family != socket.AF_UNIX
            if listens:
                os.dup2(nothing, int(name))  # what has that number here may still close it
    os.close(nothing)


if __name__ == "__main__":
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: leave_listeners() if os.getppid() == server else None)
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/lab"))
    make_quick()
    from vllm.entrypoints.cli.main import main
    main()
