# SPDX-License-Identifier: Apache-2.0
"""Engines of V1 that start soon and rest while they wait, for a machine with few cores: the same vLLM otherwise."""
import importlib
import multiprocessing

STARTING = ("vllm.utils.system_utils", "vllm.v1.engine.coordinator", "vllm.v1.engine.utils",
            "vllm.v1.executor.multiproc_executor")


def fork_engines() -> None:
    """From now on vLLM forks its engines from this process, and their workers from them, as it does on a GPU. On the
    CPU it starts each of them anew, and its imports take 9 s."""
    fork = multiprocessing.get_context("fork")
    for name in STARTING:
        importlib.import_module(name).get_mp_context = lambda: fork


def spin_for(seconds: float) -> None:
    """From now on a process of vLLM that waits for a message keeps a core busy for so long after the last one, and then
    sleeps. vLLM: 1 s."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    SpinCondition.__init__.__defaults__ = (seconds, )
