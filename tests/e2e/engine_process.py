# SPDX-License-Identifier: Apache-2.0
"""One `LLM` in a process of its own, stepped by itself and driven over a pipe.

A fork server (scripts/lab/_chaos/zygote.py) calls `serve` in the new process, with a setup {"model": ..., "role":
"kv_consumer" | null, "extra": {...}, "llm": {...}, "async_output": false, "cores": "0|1", one for each rank}.

Each message on the pipe is a JSON object with an `op`, answered by one JSON object: {"result": ...} or {"error": ...}.
Between messages the engine steps as `LLM.generate` does, whether there is anything to do or not, unless it is held.
"""

import hashlib
import json
import os
import time
import traceback
from multiprocessing.connection import Connection

from _chaos import async_output
from _chaos.looks import counters_of, open_counts

IDLE_S = 0.02


def serve(pipe: Connection, setup: dict) -> None:
    """Build the engine and drive it until the other end is closed."""
    os.environ.update({"VLLM_USE_V1": "0", "VLLM_CPU_OMP_THREADS_BIND": setup["cores"]})
    from vllm import LLM
    if setup["async_output"]:
        async_output.switch_on()
    arguments = dict(setup["llm"])
    if setup["role"] is not None:
        arguments["kv_transfer_config"] = {"kv_connector": "PDConnector", "kv_role": setup["role"],
                                           "kv_connector_extra_config": setup["extra"]}
    driver = Driver(LLM(setup["model"], **arguments))
    pipe.send_bytes(b'{"result": "ready"}')
    driver.serve(pipe)


class Driver:
    """Owns the engine. A method named `op_NAME` carries out the message with that op."""

    def __init__(self, llm) -> None:
        self.llm = llm
        self.engine = llm.llm_engine
        self.scheduler = self.engine.scheduler[0]
        self.disagg = self.engine.disagg
        self.held = False
        self.finished: dict[str, dict] = {}
        self.started: set[str] = set()
        self.ballast: list = []
        self.steps = 0
        self.names = {"llm": llm, "engine": self.engine, "scheduler": self.scheduler, "disagg": self.disagg,
                      "driver": self, "time": time, "os": os}

    def serve(self, pipe: Connection) -> None:
        """Until the other end is closed."""
        while True:
            try:
                asleep = self.held or (self.disagg is None and not self.engine.has_unfinished_requests())
                while pipe.poll(IDLE_S if asleep else 0):
                    message = json.loads(pipe.recv_bytes())
                    pipe.send_bytes(json.dumps(self.answer(message)).encode())
            except (EOFError, BrokenPipeError):
                return
            if not self.held:
                self.step()

    def answer(self, message: dict) -> dict:
        op = message.pop("op")
        try:
            return {"result": getattr(self, "op_" + op)(**message)}
        except Exception:
            return {"error": traceback.format_exc()}

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            self.started.add(output.request_id)
            if output.finished:
                self.finished[output.request_id] = as_json(output)

    # Requests.

    def op_add(self, requests: list) -> None:
        """[[id, token ids or text, sampling parameters], ...], all before the next step."""
        for request_id, prompt, parameters in requests:
            self.started.discard(request_id)  # an earlier request may have had that id
            self.finished.pop(request_id, None)
            self.engine.add_request(request_id, as_prompt(prompt), sampling(parameters))

    def op_abort(self, ids: list) -> None:
        self.engine.abort_request(ids)

    def op_abort_all(self) -> None:
        scheduler = self.scheduler
        self.engine.abort_request([group.request_id for group in (*scheduler.waiting, *scheduler.running,
                                                                  *scheduler.remote_prefilling.values())])

    def op_wait(self, ids: list, timeout_s: float) -> dict:
        """Step until all of these have ended; their outputs, which are forgotten here."""
        deadline = time.monotonic() + timeout_s
        while not self.finished.keys() >= set(ids):
            if time.monotonic() > deadline:
                missing = [i for i in ids if i not in self.finished]
                raise TimeoutError(f"{len(missing)} requests have not ended: {missing[:5]}; {self.op_stats()}")
            self.step()
        return {i: self.finished.pop(i) for i in ids}

    def op_wait_until(self, expression: str, timeout_s: float) -> float:
        """Step until the expression is true; how long that took."""
        began = time.monotonic()
        while not self.op_evaluate(expression):
            if time.monotonic() > began + timeout_s:
                raise TimeoutError(f"not within {timeout_s} s: {expression}; {self.op_stats()}")
            self.step()
        return time.monotonic() - began

    def op_beam(self, prompt, beam_width: int, max_tokens: int) -> list:
        from vllm.sampling_params import BeamSearchParams
        [output] = self.llm.beam_search([as_prompt(prompt)], BeamSearchParams(beam_width=beam_width,
                                                                             max_tokens=max_tokens))
        return [sequence.tokens for sequence in output.sequences]

    # Looking and meddling.

    def op_evaluate(self, expression: str):
        """For a test that has to look, or meddle, where no other op does."""
        return eval(expression, self.names)

    def op_execute(self, code: str) -> None:
        exec(code, self.names)

    def op_hold(self, held: bool) -> None:
        """Whether to step no more between messages."""
        self.held = held

    def op_step(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def op_ballast(self, free_blocks: int) -> None:
        """Take blocks from the pool until so many are free; give back what was taken before."""
        from vllm.utils import Device
        allocator = self.scheduler.block_manager.block_allocator
        while self.ballast:
            allocator.free(self.ballast.pop())
        if free_blocks:
            for _ in range(self.scheduler.block_manager.get_num_free_gpu_blocks() - free_blocks):
                self.ballast.append(allocator.allocate_mutable_block(None, Device.GPU))

    def op_reset_prefix_cache(self) -> bool:
        return self.engine.reset_prefix_cache()

    def op_cpu(self) -> list:
        """(wall clock, CPU time of the process) in seconds."""
        return [time.monotonic(), time.process_time()]

    def op_fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def op_block_digests(self, block_ids: list) -> list:
        """Per block a digest of each token slot's keys and values, all layers joined: [[slot, ...], ...]."""
        model = self.engine.model_config
        heads = model.get_num_kv_heads(self.engine.parallel_config)
        size = self.scheduler.cache_config.block_size
        shape = (2, -1, heads, size, model.get_head_size())
        layers = [layer.view(shape) for layer in self.engine.model_executor.driver_worker.worker.kv_cache[0]]
        digests = []
        for block in block_ids:
            slots = []
            for slot in range(size):
                digest = hashlib.sha256()
                for layer in layers:
                    digest.update(layer[:, block, :, slot].contiguous().numpy().tobytes())
                slots.append(digest.hexdigest()[:16])
            digests.append(slots)
        return digests

    def op_stats(self) -> dict:
        """What must be back at its start when all requests have ended."""
        counts = open_counts(self.engine)
        return counts | {"used_blocks": counts["used_blocks"] - len(self.ballast)}

    def op_counters(self) -> dict:
        """The metrics of ours by name and labels, and what the control thread has counted."""
        return counters_of(self.disagg)


def as_prompt(prompt):
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def sampling(parameters: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import GuidedDecodingParams
    parameters = dict(parameters)
    if "guided_decoding" in parameters:
        parameters["guided_decoding"] = GuidedDecodingParams(**parameters["guided_decoding"])
    if "logit_bias" in parameters:
        parameters["logit_bias"] = {int(token): bias for token, bias in parameters["logit_bias"].items()}
    return SamplingParams(**parameters)


def as_json(output) -> dict:
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": logprobs(output.prompt_logprobs),
        "outputs": [{
            "token_ids": list(part.token_ids),
            "text": part.text,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "logprobs": logprobs(part.logprobs),
        } for part in output.outputs],
    }


def logprobs(entries):
    """[{token id: log-probability}, ...], None where there are none."""
    if entries is None:
        return None
    return [entry and {str(token): value.logprob for token, value in entry.items()} for entry in entries]

