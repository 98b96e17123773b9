# SPDX-License-Identifier: Apache-2.0
"""One V0 engine under test: the real scheduler, sockets and transport, driven over a pipe.

The loop is that of `MQLLMEngine`: it sleeps in `disagg.poll` with the pipe in place of the front end's socket. Commands
are JSON objects with an `op`. The engine's messages are JSON objects with one key:

    {"ready": I}                            it has the incarnation I
    {"end": [id, tokens, times]}            a request has ended; monotonic time of each token (and the margin, if asked)
    {"fallback": [id, reason, peer, time]}  an attempt ended without the KV
    {"gauges": {...}}                       at most every GAUGES_S
    {"counters": {...}}                     every COUNTERS_S
    {"reply": ...}                          to `stats` and `counters`
"""
import json
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from _chaos.async_output import switch_on
from _chaos.looks import counters_of, margin_of, open_counts, process_counts, watch_fallbacks

POLL_MS = 250
GAUGES_S = 0.2
COUNTERS_S = 2.0


def serve(pipe: Connection, model: str, role: str | None, pd: dict, llm: dict, async_output: bool) -> None:
    """Builds the engine and runs it until the pipe is closed or a `stop` comes."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.llm_engine import LLMEngine
    os.setpgid(0, 0)  # the fleet kills and stops groups
    os.environ["VLLM_USE_V1"] = "0"
    if async_output:
        switch_on()
    if role is not None:
        llm = {**llm, "kv_transfer_config": KVTransferConfig(kv_connector="PDConnector", kv_role=role,
                                                             kv_connector_extra_config=pd)}
    engine = LLMEngine.from_engine_args(EngineArgs(model, **llm))
    served = EngineUnderTest(engine, pipe)
    pipe.send_bytes(json.dumps({"ready": served.incarnation}).encode())
    served.run()
    if engine.disagg is not None:
        engine.disagg.close()


class EngineUnderTest:
    """Owns the engine. The method `op_NAME` carries out the command with that op."""

    def __init__(self, engine, pipe: Connection) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler[0]
        self.disagg = engine.disagg
        self.incarnation = ""
        self._pipe = pipe
        self._times: dict[str, list[float]] = {}
        self._gauges_at = self._counters_at = 0.0
        self._stopping = False
        if self.disagg is not None:
            self.incarnation = self.disagg.agent.member.incarnation
        watch_fallbacks(self.disagg, lambda *fallback: self._send({"fallback": fallback}))

    def run(self) -> None:
        """The engine's loop."""
        while not self._stopping:
            self._wait()
            while self._pipe.poll():
                command = json.loads(self._pipe.recv_bytes())
                operation: Callable = getattr(self, "op_" + command.pop("op"))
                operation(**command)
            self._step()
            self._send_gauges()

    def _wait(self) -> None:
        if self.disagg is not None:
            self.disagg.poll(self._pipe.fileno(), POLL_MS)
        elif not self.engine.has_unfinished_requests():
            self._pipe.poll(POLL_MS / 1000)

    def _step(self) -> None:
        outputs = self.engine.step()
        now = time.monotonic()
        for output in outputs:
            times = self._times.get(output.request_id)
            if times is None:
                continue  # a job for a peer
            tokens = output.outputs[0].token_ids
            times += [now] * (len(tokens) - len(times))
            if output.finished:
                del self._times[output.request_id]
                margin = margin_of(output.outputs[0].logprobs)
                self._send({"end": [output.request_id, list(tokens), times, *margin]})

    # Commands.

    def op_add(self, requests: list, margins: bool = False) -> None:
        """`requests`: [[id, token ids, tokens to generate], ...], greedy. With `margins` an `end` has the answer's
        margin."""
        from vllm import SamplingParams, TokensPrompt
        for request_id, token_ids, max_tokens in requests:
            self._times[request_id] = []
            parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
                                        logprobs=2 if margins else None)
            self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=token_ids), parameters)

    def op_abort(self, ids: list) -> None:
        """Aborts requests."""
        self.engine.abort_request(ids)
        for request_id in ids:
            self._times.pop(request_id, None)

    def op_stats(self) -> None:
        """Is answered by a `reply` with `stats`."""
        self._send({"reply": self.stats()})

    def op_counters(self) -> None:
        """Is answered by a `reply` with the counters."""
        self._send({"reply": counters_of(self.disagg)})

    def op_stop(self) -> None:
        """Ends the engine after this step."""
        self._stopping = True

    # Counts.

    def stats(self) -> dict:
        """All counts that must be back at their start when nothing is open (B20), and those that may not keep
        growing."""
        counts = self.disagg.agent.counts() if self.disagg is not None else {}
        return open_counts(self.engine) | {name: counts[name] for name in ("peers", "sockets") if name in counts} | (
            process_counts())

    def _send_gauges(self) -> None:
        now = time.monotonic()
        if now < self._gauges_at:
            return
        self._gauges_at = now + GAUGES_S
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        gauges = {"time": now, "free": manager.get_num_free_gpu_blocks(), "in_flight": len(self._times)}
        if self.disagg is not None:
            gauges |= {name: sum(map(len, (self._table(group) for group in groups.values())))
                       for name, groups in (("parked", scheduler.remote_prefilling),
                                            ("sending", scheduler.prefill_sending))}
            gauges["quarantined"] = sum(len(table.physical_block_ids) for table in scheduler.quarantined.values())
        self._send({"gauges": gauges})
        if now >= self._counters_at:
            self._counters_at = now + COUNTERS_S
            self._send({"counters": counters_of(self.disagg)})

    def _table(self, group) -> list:
        return self.scheduler.block_manager.get_block_table(group.first_seq)

    def _send(self, message: dict) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())
