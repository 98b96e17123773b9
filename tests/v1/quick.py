# SPDX-License-Identifier: Apache-2.0
"""A vLLM that starts and waits as is good for two cores with many engines; what it computes and says stays as it is.

As a command, `vllm serve` with that:

    python tests/v1/quick.py serve MODEL [arguments of vllm serve]
"""
import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
import time

SPIN_S = 0.002  # vLLM: 1 s, for which each worker keeps a core busy after each message
STARTING = ("vllm.utils.system_utils", "vllm.v1.engine.coordinator", "vllm.v1.engine.utils",
            "vllm.v1.executor.multiproc_executor")
SERVE = (sys.executable, __file__, "serve")  # as vllm_pd.ops.launch.plan.SERVE
LOOK_AGAIN_MS = 50  # vLLM: 5 s; a notification may be lost


def fork_engines() -> None:
    """From now on the engines of this process are forked from it, and their workers from them, as vLLM does on a GPU.
    On the CPU it starts each of them anew, which takes 9 s of imports a process. Who waits for a message rests."""
    from vllm.distributed.device_communicators import shm_broadcast
    fork = multiprocessing.get_context("fork")
    for name in STARTING:
        importlib.import_module(name).get_mp_context = lambda: fork
    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S, )
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
                os.dup2(nothing, int(name))  # whoever has that number here may still close it
    os.close(nothing)


if __name__ == "__main__":
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: leave_listeners() if os.getppid() == server else None)
    fork_engines()
    from vllm.entrypoints.cli.main import main
    main()
