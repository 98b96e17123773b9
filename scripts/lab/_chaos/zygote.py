# SPDX-License-Identifier: Apache-2.0
"""A process that imports vLLM once and forks engines on demand.

Importing takes longer than the rest of an engine's start; a fork of a process that has done it is up in a few seconds.
The zygote has no threads, sockets or device state when it forks, and no engine, so a child is the same as a process
that was started by hand: it has its own pid, start time and NIXL agent.

    python zygote.py FD        serves the socket FD: {"target": "module:function", "arguments": {...}, "cores": [...]}
                               with one file descriptor -> {"pid": ...}

The child calls function(Connection, **arguments) with the descriptor, and dies with the zygote, which ends with its
socket.
"""
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from vllm_pd.model.checks import check_nixl
from vllm_pd.model.installation import World, find_installation

PR_SET_PDEATHSIG = 1
MAX_REQUEST_BYTES = 1 << 16
START_S = 300.0
PRELOADED = ("vllm", "vllm.engine.llm_engine", "vllm.engine.arg_utils", "vllm.worker.cpu_worker",
             "vllm.worker.cpu_model_runner", "vllm.executor.uniproc_executor", "vllm.model_executor.models.llama",
             "vllm.core.scheduler", "vllm.v1.core.sched.scheduler", "vllm_pd.v0.engine", "intel_extension_for_pytorch")
PRELOADED_V1 = ("vllm", "vllm.engine.arg_utils", "vllm.v1.engine.async_llm", "vllm.v1.engine.core",
                "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.executor.multiproc_executor",
                "vllm.model_executor.models.llama", "vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server",
                "vllm_pd.v1.connector", "vllm_pd.v1.worker", "_chaos.engine_v1")


class Zygote:
    """The client's end. The first `fork` waits for the imports."""

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        scripts = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([scripts, *filter(None, [env.get("PYTHONPATH")])])
        self.process = subprocess.Popen([sys.executable, "-m", "_chaos.zygote", str(theirs.fileno())],
                                        env={**env, "PYTHONPATH": path}, pass_fds=[theirs.fileno()])
        theirs.close()
        self._socket = ours
        self._socket.settimeout(START_S)

    def fork(self, target: str, cores: Sequence[int], **arguments: object) -> tuple[int, Connection]:
        """Starts a child that runs `target` on these cores. Its pid, and the connection to it. Raises OSError where the
        zygote is gone."""
        ours, theirs = socket.socketpair()
        with contextlib.closing(theirs):
            order = {"target": target, "arguments": arguments, "cores": list(cores)}
            socket.send_fds(self._socket, [json.dumps(order).encode()], [theirs.fileno()])
        reply = self._socket.recv(MAX_REQUEST_BYTES)
        if not reply:
            ours.close()
            raise ConnectionResetError(f"the zygote ended with {self.process.wait(10)}")
        return json.loads(reply)["pid"], Connection(ours.detach())

    def close(self) -> None:
        """Ends it, and with it every child that is left."""
        self._socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    v1 = find_installation().world is World.PLUGIN
    for name in PRELOADED_V1 if v1 else PRELOADED:
        importlib.import_module(name)
    _know_model()
    check_nixl("127.0.0.1")  # once: each engine would start another process for that
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"a process with {threads} threads can't be forked: an import has started some")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children, so they leave no zombies
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 1)
        if not message:
            return
        [descriptor] = descriptors
        zygote, pid = os.getpid(), os.fork()
        if pid == 0:
            channel.close()
            _run(json.loads(message), descriptor, zygote)
        os.close(descriptor)
        channel.send(json.dumps({"pid": pid}).encode())


def _know_model() -> None:
    """Inspects the model's class here, because each child would start another process for that."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)


def _run(order: dict, descriptor: int, zygote: int) -> None:
    """The life of the child of this zygote. Does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            raise EOFError("the zygote has ended before that")
        os.sched_setaffinity(0, order["cores"])
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(order["cores"][0])
        module, function = order["target"].split(":")
        getattr(importlib.import_module(module), function)(Connection(descriptor), **order["arguments"])
        code = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        code = 0  # its client is gone
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
