# SPDX-License-Identifier: Apache-2.0
"""A vLLM that starts and waits as is good for two cores with many engines; what it computes and says stays as it is.

As a command, `vllm serve` with that:

    python tests/v1/quick.py serve MODEL [arguments of vllm serve]
"""
import importlib
import multiprocessing
import os
import signal
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


if __name__ == "__main__":
    fork_engines()
    from vllm.entrypoints.cli.main import main
    main()
