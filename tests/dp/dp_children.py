# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes that dp_forked.py has forked. They know nothing of `tests`."""

import atexit
import os
import runpy
import socket
import sys
from multiprocessing.connection import Connection

ENDED = "ended"


def drive(connection: Connection, arguments: list[str], log: str) -> None:
    """In the child: the driver of a group."""
    import dp_driver

    pipes = _settle(connection, 2, log)
    sys.argv = ["driver", *map(str, pipes), *arguments]
    dp_driver.main()


def run(connection: Connection, path: str, arguments: list[str], env: dict[str, str], log: str) -> None:
    """In the child: a program, with the model's class known, and the engines that it starts forked, too."""
    import multiprocessing

    import vllm.v1.engine.utils
    from vllm.model_executor.models import ModelRegistry

    [output] = _settle(connection, 1, log)
    os.dup2(output, 1)
    os.close(output)
    os.environ.update(env)
    for name in ("LlamaForCausalLM", "MixtralForCausalLM"):
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    vllm.v1.engine.utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = [path, *arguments]
    if path.endswith(".py"):
        runpy.run_path(path, run_name="__main__")
    else:
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    atexit._run_exitfuncs()  # a zygote's child goes without
    print(ENDED, flush=True)


def _settle(connection: Connection, count: int, log: str) -> list[int]:
    """A session of its own, the log, all cores for its threads, as a process started by hand has. The files given."""
    with socket.socket(fileno=connection.fileno()) as channel:
        _, files, _, _ = socket.recv_fds(channel, 16, count)
        channel.detach()
    connection.close()
    os.setsid()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "all"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    return list(files)
