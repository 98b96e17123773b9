# SPDX-License-Identifier: Apache-2.0
"""One data-parallel group with its front end in a process of its own, for tests and `vllm-pd bench dp`."""

import contextlib
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from vllm_pd.errors import PDError
from vllm_pd.rpc.ports import take_free_run

DRIVER = ["-m", "vllm_pd.bench.dp.driver"]
PROBE = "vllm_pd.bench.dp.probe.StepProbe"
# The engine arguments of every group, as fields of AsyncEngineArgs.
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 32,
          "skip_tokenizer_init": True, "disable_log_stats": True, "worker_extension_cls": PROBE}
START_S, ANSWER_S, STOP_S = 240.0, 120.0, 20.0
LAST_BYTES = 2000  # of the log, in an error
MEETINGS = 8  # ports in a row: upstream takes one for each process group of the ranks
Start = Callable[[list[str], tuple[int, int], Path | None], Any]  # gives `pid`, `wait` and `kill` of subprocess.Popen


def environment(tree: Path | None) -> dict[str, str]:
    """The environment of a process that runs engines on this machine, with the vLLM of `tree` (None: the one that is
    imported here)."""
    own = Path(__file__).parents[3]
    path = [str(tree), str(own)] if tree else [str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"VLLM_USE_V1": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1",
                         "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
                         "VLLM_CPU_OMP_THREADS_BIND": "all", "HF_HUB_OFFLINE": "1",
                         "PYTHONPATH": os.pathsep.join(path)}


def start_process(env: dict[str, str], program: list[str], arguments: list[str], pipes: tuple[int, int],
                  log: Path | None) -> subprocess.Popen:
    """A Start, once `env` and `program`, the driver as arguments of Python, are given."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        return subprocess.Popen([sys.executable, *program, *map(str, pipes), *arguments], env=env, pass_fds=pipes,
                                stdout=output, stderr=output, start_new_session=True)


class GroupError(PDError):
    """The group, or one of its requests, ended with an error."""


class GroupEnded(GroupError):
    """The group's front end ended by itself."""


class Group:
    """`size` engines on this machine and their front end. Close it, or use it as a context.

    `tree`: the vLLM to run, a folder that holds `vllm/`; None: the one that is imported here. `arguments` are
    `AsyncEngineArgs` and `stop_every`, see `driver.stop_every`. They may give this front end only a part of the group;
    then `ranks` says which. `start` makes the driver's process from the driver's last argument, the descriptors of its
    pipes, and `log`; None: by the command line.
    """

    def __init__(self, model: Path, size: int, tree: Path | None = None, log: Path | None = None,
                 ranks: list[int] | None = None, start: Start | None = None, **arguments: Any) -> None:
        self.size, self.pids = size, {}
        self.ranks = list(range(size)) if ranks is None else ranks
        self._asked: dict[int, Future] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._gone, self._log = False, log
        self._ready: Future = Future()
        engine = {"model": str(model), "data_parallel_size": size,
                  "ranks_meet_at": take_free_run("127.0.0.1", MEETINGS)} | ENGINE | arguments
        ask_out, ask_in = os.pipe()
        answer_out, answer_in = os.pipe()
        start = start or functools.partial(start_process, environment(tree), DRIVER)
        self.process = start([json.dumps(engine)], (ask_out, answer_in), log)
        os.close(ask_out)
        os.close(answer_in)
        self._asks = os.fdopen(ask_in, "w", buffering=1)
        self._answers = os.fdopen(answer_out)
        threading.Thread(target=self._listen, name="group-answers", daemon=True).start()

    def __enter__(self) -> "Group":
        return self.ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, timeout_s: float = START_S) -> "Group":
        """Waits until every engine is up. Then `pids` has the engine processes by name. Raises GroupError."""
        try:
            self.pids = self._ready.result(timeout_s)
        except TimeoutError:
            raise GroupError(f"the group of {self.size} ranks is not up after {timeout_s:g} s; see its log") from None
        return self

    def submit(self, ask: str, **details: Any) -> Future:
        """Asks the driver for one of `driver.ASKS`. The future holds the answer, or GroupError."""
        future: Future = Future()
        with self._lock:
            if self._gone:
                raise GroupEnded("the group's front end has ended")
            number = next(self._numbers)
            self._asked[number] = future
            self._asks.write(json.dumps({"id": number, "ask": ask} | details) + "\n")
        return future

    def generate(self, prompt: list[int], rank: int | None = None, max_tokens: int = 16, name: str | None = None,
                 abort_after: int = 0, adapter: list | None = None, front: int = 0, kind: str = "DELTA",
                 **params: Any) -> Future:
        """Sends one greedy request to `rank` (None: the front end decides). `adapter`: the fields of a LoRARequest;
        `kind`: the name of a RequestOutputKind. The answer is that of `driver.generate`."""
        name = name or f"r{next(self._numbers)}"
        return self.submit("generate", request=name, prompt=prompt, rank=rank, abort_after=abort_after, adapter=adapter,
                           front=front, kind=kind,
                           params={"max_tokens": max_tokens, "ignore_eos": True} | params)

    def tokens(self, asked: Iterable[Future], timeout_s: float = ANSWER_S) -> list[list[int]]:
        """The token ids of each request."""
        return [future.result(timeout_s)["tokens"] for future in asked]

    def call(self, method: str, *args: Any, ranks: Iterable[int] | None = None, timeout_s: float = ANSWER_S) -> list:
        """The answers of the engine cores of `ranks` (None: all of this front end's) to a utility call."""
        chosen = self.ranks if ranks is None else list(ranks)
        return self.submit("call", method=method, args=args, ranks=chosen).result(timeout_s)

    def start_probe(self) -> None:
        """Starts counting on all ranks, from 0."""
        self.call("collective_rpc", "probe_start")

    def take_probe(self) -> list[dict]:
        """What each rank has done since `start_probe`: see `probe.StepProbe`."""
        return [answer[0] for answer in self.call("collective_rpc", "probe_take")]

    def close(self) -> None:
        """Ends the front end and with it the engines; kills them all where that takes longer than STOP_S."""
        with contextlib.suppress(OSError):
            self._asks.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a session of its own
            self.process.kill()
            self.process.wait(STOP_S)

    def _listen(self) -> None:
        """The thread that reads the driver's answers, one line of JSON each, and completes the future of each. At the
        end of the driver's output all futures that are left fail."""
        for line in self._answers:
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(answer["ready"])
                continue
            with self._lock:
                future = self._asked.pop(answer["id"])
            if "error" in answer:
                future.set_exception(GroupError(answer["error"]))
            else:
                future.set_result(answer["result"])
        with self._lock:
            self._gone, left = True, list(self._asked.values())
        if not self._ready.done():  # a port that was taken meanwhile, memory: not what a group that works does
            self._ready.set_exception(GroupError("the group's front end ended before it was up; its log ends with "
                                                 f"{self._last_words()!r}"))
        for future in left:
            if not future.done():
                future.set_exception(GroupEnded("the group's front end ended without an answer; see its log"))

    def _last_words(self) -> str:
        """The end of its log, as far as it has one of its own."""
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - LAST_BYTES))
            return file.read().decode(errors="replace")
