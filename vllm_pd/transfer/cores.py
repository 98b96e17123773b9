# SPDX-License-Identifier: Apache-2.0
"""Which cores the transfer threads of a V1 worker on the CPU use.

vLLM starts such a worker with a list of cores for the model's OpenMP threads, in the environment, and OpenMP binds the
worker's main thread to the first of them. Threads inherit that from the thread that makes them. So all transfers would
run on the core of the model's first thread, for which its other threads wait. vLLM leaves cores free for a connector
(`vllm.utils.ompmultiprocessing`), but does not tell the worker which: they are those that EngineCore may use and the
list does not have.
"""
from __future__ import annotations

import logging
import multiprocessing
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

logger = logging.getLogger("vllm.pd")

OPENMP_LISTS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")  # vLLM sets one, by the OpenMP library


def leave_model_cores() -> None:
    """Move the calling thread to the `spare_cores`, and so all threads that it makes later. Without any it stays where
    it is. Never raises."""
    engine = multiprocessing.parent_process()
    if engine is None:  # the worker is in EngineCore's process, which vLLM does not bind
        return
    try:
        cores = spare_cores(os.environ, os.sched_getaffinity(engine.pid), _numa_nodes())
        if cores and cores != os.sched_getaffinity(0):
            os.sched_setaffinity(0, cores)
            logger.info("the transfer threads of this worker run on the cores %s", sorted(cores))
    except OSError as error:
        logger.warning("the transfer threads of this worker stay on the cores of the model's threads: %s", error)


def spare_cores(environ: Mapping[str, str], allowed: set[int], nodes: Iterable[set[int]]) -> set[int]:
    """The cores of a worker that no OpenMP thread of a model is bound to. Empty if there are none, or nothing is bound.
    Empty, too, if the user has chosen the cores (VLLM_CPU_OMP_THREADS_BIND): all others may be another engine's.

    `environ` is the worker's environment, `allowed` are the cores that its EngineCore may use, `nodes` those of each
    NUMA node. Other ranks' cores are not among them, because each rank has a NUMA node of its own.
    """
    bound = set().union(*(parse_cores(environ.get(name, "")) for name in OPENMP_LISTS))
    is_chosen = environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    if is_chosen or not bound or environ.get("VLLM_CPU_SIM_MULTI_NUMA", "0") != "0":  # there ranks share a node
        return set()
    near = set().union(*(node for node in nodes if node & bound)) or allowed
    return (allowed & near) - bound


def parse_cores(text: str) -> set[int]:
    """All cores in a list of numbers and ranges, whatever is between them: "0-3,8", "0 1|2 3", "{0,1}"."""
    return {core for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)
            for core in range(int(first), int(last or first) + 1)}


def _numa_nodes() -> list[set[int]]:
    """The cores of each NUMA node. Empty where the kernel does not say."""
    return [parse_cores(node.read_text()) for node in Path("/sys/devices/system/node").glob("node*/cpulist")]
