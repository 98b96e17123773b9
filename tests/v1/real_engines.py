# SPDX-License-Identifier: Apache-2.0
"""Real V1 engines with the tiny model, each in a process tree of its own. It is forked from a server that has made the
imports, most of an engine's start, and has no threads: the tests' process has, whose locks a fork would copy.
"""
import contextlib
import copy
import dataclasses
import functools
import multiprocessing
import os
import re
import signal
import time
import zlib
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil

from tests.v1 import quick
from tests.v1.known_drafts import draft_known

QUEUE = re.compile(r"/dev/shm/(psm_\w+)")  # a message queue of vLLM between EngineCore and its workers
START_S = 600.0
ANSWER_S = 600.0
LABELS = ("model_name", "engine")  # the same in all samples
USAGE = "vllm:kv_cache_usage_perc"  # the share of its blocks that somebody has
PREEMPTIONS = "vllm:num_preemptions_total"
FIGURES = ("vllm:pd_", PREEMPTIONS, "vllm:spec_decode_", "vllm:kv_offload_", USAGE)
_FORK = multiprocessing.get_context("fork")
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["vllm.entrypoints.llm", "vllm_pd.v1.worker"])
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_CI_ENV": "1",
               "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "vllm_pd"}


def kill(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL all processes of an engine, and remove vLLM's message queues between them: none of them can any more."""
    queues = {name for process in processes
              for name in QUEUE.findall(Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"))}
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for name in queues:
        with contextlib.suppress(FileNotFoundError):
            queue = SharedMemory(name)
            queue.close()
            queue.unlink()


def count_tokens() -> Any:
    """From now on an engine that is forked from this process adds up the tokens that its steps compute. Returns the
    sum, shared with it."""
    from vllm.v1.core.sched.scheduler import Scheduler
    schedule, computed = Scheduler.schedule, _FORK.Value("q", 0)

    @functools.wraps(schedule)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        output = schedule(*arguments, **keywords)
        computed.value += output.total_num_scheduled_tokens
        return output

    Scheduler.schedule = counting
    return computed


def note_drafts(file: str) -> None:
    """From now on an engine that is forked from this process appends what its drafter drafts to this file, a line for
    each request and step that samples: a digest of the request's tokens before the step, and the drafts."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    propose = GPUModelRunner.propose_draft_token_ids

    @functools.wraps(propose)
    def noting(runner: Any, step: Any, *arguments: Any, **keywords: Any) -> Any:
        drafts, batch = propose(runner, step, *arguments, **keywords), runner.input_batch
        rows = drafts.tolist() if hasattr(drafts, "tolist") else drafts
        with open(file, "a", encoding="utf-8") as opened:
            for at, name in enumerate(batch.req_ids):
                count = int(batch.num_tokens_no_spec[at])
                if batch.num_computed_tokens_cpu[at] + step.num_scheduled_tokens[name] >= count:
                    opened.write(f"{zlib.crc32(batch.token_ids_cpu[at, :count].tobytes())} {rows[at]}\n")
        return drafts

    GPUModelRunner.propose_draft_token_ids = noting


def lay_all_layers_into_blocks() -> None:
    """From now on an engine that is forked from this process keeps all layers side by side in each block, as vLLM does
    on GPUs, where they may then differ in shape. Its kernels for the CPU take the distance of blocks as it is."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda backend: (KVCacheLayout.BLHNC, ))
    os.environ["VLLM_KV_CACHE_LAYOUT"] = "BLHNC"


def register_loader(folder: str) -> None:
    """From now on an engine that is forked from this process knows the load format `elsewhere`, which reads the weights
    of this folder, whichever the model is."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader("elsewhere")
    class Elsewhere(DefaultModelLoader):

        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="auto"))

        def load_weights(self, model: Any, model_config: Any) -> None:
            config = copy.copy(model_config)
            config.model = folder
            super().load_weights(model, config)


def serve(connection, role: str | None, extra: dict[str, Any], log: str, drafts: str | None = None,
          beside: dict[str, Any] | None = None, weights: str | None = None, known: str | None = None,
          is_mixed: bool = False, **arguments: Any) -> None:
    """The child: an engine that answers what comes over the connection. `role` None: without disaggregation. `drafts`:
    the file of `note_drafts`. `weights`: the folder of `register_loader`, which is used then. `beside`: a connector
    beside ours, which D names first, and P last. `known`: the file of `draft_known`. `is_mixed`: all layers are in each
    block."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setpgid(0, 0)
    os.environ.update(ENVIRONMENT)
    quick.end_with_parent()
    quick.make_quick()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    computed = count_tokens()
    if drafts is not None:
        note_drafts(drafts)
    if known is not None:
        draft_known(known)
    if is_mixed:
        lay_all_layers_into_blocks()
    if weights is not None:
        register_loader(weights)
        arguments["load_format"] = "elsewhere"
    if role is not None:
        arguments["kv_transfer_config"] = {"kv_connector": "PDConnector", "kv_role": role,
                                           "kv_connector_extra_config": extra}
    if beside is not None:
        children = [arguments["kv_transfer_config"], beside][::1 if role == "kv_producer" else -1]
        arguments["kv_transfer_config"] = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
                                           "kv_connector_extra_config": {"connectors": children}}
    if arguments.get("pipeline_parallel_size", 1) > 1:
        # vLLM's CPU worker makes the buffer for what comes from the stage before in its warm-up, which it leaves out in
        # eager mode and with this variable: the first step then ends the engine.
        os.environ["VLLM_CPU_CI_ENV"] = "0"
        arguments |= {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    if "disable_hybrid_kv_cache_manager" in arguments:
        import vllm_pd.v1.activate  # noqa: F401  which the plugin does where the command line has the flag
    if "kv_cache_memory_bytes" in arguments:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]  # it would win
    llm = LLM(**{"model": os.environ["VLLM_PD_TINY_MODEL"], "dtype": "float32", "max_model_len": 2048,
                 "max_num_batched_tokens": 512, "max_num_seqs": 8, "enforce_eager": True, "block_size": 32,
                 "disable_log_stats": False, **arguments})
    connection.send("ready")
    while True:
        order, *values = connection.recv()
        if order == "generate":
            prompts, params, salts, loras = values
            greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
            each = [SamplingParams(**{**greedy, **one}) for one in params]
            salted = [{"cache_salt": salt} if salt else {} for salt in salts]
            asked = [{**(one if isinstance(one, dict) else {"prompt_token_ids": one}), **more}
                     for one, more in zip(prompts, salted, strict=True)]
            adapters = [LoRARequest(*one) if one else None for one in loras]
            outputs = llm.generate(asked, each, use_tqdm=False, lora_request=adapters if any(loras) else None)
            connection.send([(list(one.outputs[0].token_ids), one.num_cached_tokens) for one in outputs])
        elif order == "abort":
            prompts, after_s = values
            ids = [f"aborted-{number}-{time.monotonic()}" for number in range(len(prompts))]
            for request_id, one in zip(ids, prompts, strict=True):
                llm.llm_engine.add_request(request_id, one if isinstance(one, dict) else {"prompt_token_ids": one},
                                           SamplingParams(max_tokens=8))
            time.sleep(after_s)
            llm.llm_engine.abort_request(ids)
            connection.send(None)
        elif order == "forget":
            connection.send(llm.reset_prefix_cache())
        elif order == "load":
            connection.send(llm.llm_engine.add_lora(LoRARequest(*values[0])))
        elif order == "rpc":
            llm.collective_rpc(*values)
            connection.send(None)
        elif order == "computed":
            connection.send(computed.value)
        elif order == "params":
            connection.send([one.kv_transfer_params for one in outputs])
        elif order == "figures":
            from prometheus_client import REGISTRY
            connection.send({f"{sample.name}:{':'.join(v for k, v in sample.labels.items() if k not in LABELS)}":
                             sample.value for family in REGISTRY.collect() for sample in family.samples
                             if sample.name.startswith(FIGURES)})
        else:
            llm.llm_engine.engine_core.shutdown()
            os._exit(0)


class RealEngine:
    """An engine in its processes. `generate` blocks; `ask` and `answer` do it in two steps. `params`: SamplingParams'
    fields for each prompt, over those of a greedy answer of `tokens` tokens. `salts` and `loras`: of each prompt; empty
    and None: none. A prompt is a list of token ids, or what vLLM takes in its place. `arguments`: of `LLM`, over ours.
    """

    def __init__(self, role: str | None, log, broker: str = "", settings: dict[str, Any] | None = None,
                 **arguments: Any) -> None:
        self._connection, theirs = _SERVER.Pipe()
        extra = {"broker": broker, "max_local_prefill_tokens": 40, **(settings or {})}
        self._process = _SERVER.Process(target=serve, args=(theirs, role, extra, str(log)), kwargs=arguments)
        self._process.start()
        theirs.close()

    def ready(self) -> "RealEngine":
        assert self._receive(START_S) == "ready"
        return self

    def ask(self, prompts: list[list[int]], tokens: int = 8, params: list[dict[str, Any]] | None = None,
            salts: Sequence[str] | None = None, loras: Sequence[tuple | None] | None = None) -> None:
        each = params or [{}] * len(prompts)
        self._connection.send(("generate", prompts, [{"max_tokens": tokens, **one} for one in each],
                               salts or [""] * len(prompts), loras or [None] * len(prompts)))

    def answer(self) -> list[tuple[list[int], int]]:
        return self._receive(ANSWER_S)

    def params(self) -> list[dict[str, Any] | None]:
        """The kv_transfer_params of the last answers."""
        self._connection.send(("params", ))
        return self._receive(ANSWER_S)

    def generate(self, prompts: list[list[int]], tokens: int = 8,
                 params: list[dict[str, Any]] | None = None) -> list[list[int]]:
        self.ask(prompts, tokens, params)
        return [tokens for tokens, _ in self.answer()]

    def abort(self, prompts: list[list[int]], after_s: float) -> None:
        """Add requests with these prompts and abort them so many seconds later."""
        self._connection.send(("abort", prompts, after_s))
        self._receive(ANSWER_S)

    def load(self, lora: tuple) -> None:
        """As the front end of a server loads this adapter: (name, number, path)."""
        self._connection.send(("load", lora))
        assert self._receive(ANSWER_S)

    def forget_prefixes(self) -> None:
        """Empty its prefix cache."""
        self._connection.send(("forget", ))
        assert self._receive(ANSWER_S)

    def rpc(self, method: str) -> None:
        """Have the workers do this."""
        self._connection.send(("rpc", method))
        self._receive(ANSWER_S)

    def figures(self) -> dict[str, float]:
        self._connection.send(("figures", ))
        return self._receive(ANSWER_S)

    def used(self) -> float:
        """Which share of its blocks somebody has, a client, a job or a fence. It computes a token first: figures come
        with steps."""
        self.generate([[7, 8, 9]], 1)
        return self.figures()[f"{USAGE}:"]

    def computed_tokens(self) -> int:
        """How many tokens its steps have computed, for whomever."""
        self._connection.send(("computed", ))
        return self._receive(ANSWER_S)

    def processes(self) -> list[psutil.Process]:
        """EngineCore's and the workers', not the client's."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        for process in self.processes():
            os.kill(process.pid, number)

    def kill(self) -> None:
        kill(self.processes())

    def stop(self) -> None:
        if not self._process.is_alive():
            return
        if any(one.status() != psutil.STATUS_ZOMBIE for one in self.processes()):  # else its client may wait for ever
            self._connection.send(("quit", ))
            self._process.join(60)
        if self._process.is_alive():
            kill([*self.processes(), psutil.Process(self._process.pid)])

    def _receive(self, timeout_s: float) -> Any:
        assert self._connection.poll(timeout_s), "no answer"
        return self._connection.recv()
