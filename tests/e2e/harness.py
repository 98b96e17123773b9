# SPDX-License-Identifier: Apache-2.0
"""The test's end of engine processes and of the broker between them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from _chaos.zygote import Zygote

from tests.fakes.brokers import BrokerProcess
from tests.forked import ForkedProcess, freeze
from tests.verdict import Crash, Leak, mark_answers
from tests.waiting import wait_for

HERE = Path(__file__).resolve().parent
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "lab"  # of which an engine's process has some
START_S = 400
WAIT_S = 150  # nothing here takes a tenth of it, but on a machine that is busy with others
VOCABULARY = range(1000, 40000)  # plain tokens of the models' tokenizer
PROTOCOL = "disagg.protocol"
DEBUG_STATE = f"{PROTOCOL}.operators.debug_state()"
RUNNING_JOBS = f"[known['state'].value for known in {DEBUG_STATE}['prefill'].values()].count('running')"
CANCELLED = "agent:prefill_cancelled"
# Somebody who stands still for some seconds, because others need the machine, is not taken for one that is gone.
PATIENT = {"heartbeat_s": 1.5, "ttl_s": 8, "lease_s": 60}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
AT_REST = {"unfinished": 0, "waiting": 0, "running": 0, "swapped": 0, "remote_prefilling": 0, "prefill_sending": 0,
           "quarantined": 0, "block_tables": 0, "used_blocks": 0, "references": 0, "tracked": 0, "open_attempts": 0,
           "held_blocks": 0, "given_up": 0, "resumed": 0, "jobs": 0, "live_handles": 0, "agent_errors": 0}


class ChildError(AssertionError):
    """An exception in the engine's process."""


def model_folder(variable: str) -> str:
    """The folder of a model, as `scripts/env.sh` leaves it in the environment."""
    folder = os.environ.get(variable)
    if not folder:
        raise RuntimeError(f"{variable} is not set: run the tests by scripts/test.sh, or source scripts/env.sh first")
    return folder


def core(index: int) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[index % len(cores)]


def engine_env(index: int) -> dict[str, str]:
    """The environment of an engine that has one core."""
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": str(core(index)), "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")}


def start_zygote() -> Zygote:
    """The process that engines are forked from: it has imported vLLM once. To be closed by the caller."""
    env = {**engine_env(0), "VLLM_USE_V1": "0", "TQDM_DISABLE": "1"}
    return Zygote({**env, "PYTHONPATH": os.pathsep.join([str(HERE), env["PYTHONPATH"]])})


class EngineProcess:
    """One engine, forked from the zygote. The first use waits until it is up. With `async_output` it processes the
    output of a step during the next one, as on CUDA, unless its role is against it."""

    def __init__(self, zygote: Zygote, role: str | None, index: int, broker: str = "", extra: dict | None = None,
                 model: str | None = None, async_output: bool = False, **llm) -> None:
        setup = {"model": model or model_folder("VLLM_PD_TINY_MODEL"), "role": role, "async_output": async_output,
                 "extra": {"broker": broker, **(extra or {})},
                 "llm": {"dtype": "float32", "max_model_len": 1024, "block_size": 16, "enable_prefix_caching": True,
                         "num_gpu_blocks_override": 512, "max_num_seqs": 32, **llm}}
        self.role = role
        self.block_size = setup["llm"]["block_size"]
        self.max_model_len = setup["llm"]["max_model_len"]
        cores = [core(index + rank) for rank in range(setup["llm"].get("tensor_parallel_size", 1))]
        setup["cores"] = "|".join(map(str, cores))
        pid, self._pipe = zygote.fork("engine_process:serve", cores, setup=setup)
        self.process = ForkedProcess(pid)
        self._ready = False
        self._numbers = 0

    def ready(self) -> "EngineProcess":
        if self.process.poll() is not None:
            raise Crash(f"the engine {self.role} is dead: {self.process.returncode}")
        if not self._ready:
            self._receive(START_S)
            self._ready = True
        return self

    def do(self, op: str, *, answer_s: float = WAIT_S, **arguments):
        if not self._ready and op != "stats":
            self.ready()
        self._pipe.send_bytes(json.dumps({"op": op, **arguments}).encode())
        return self._receive(answer_s)

    def _receive(self, timeout_s: float):
        if not self._pipe.poll(timeout_s):
            raise ChildError(f"the engine {self.role} (pid {self.process.pid}) gives no answer in {timeout_s} s")
        try:
            reply = json.loads(self._pipe.recv_bytes(), object_hook=mark_answers)
        except EOFError:
            raise Crash(f"the engine {self.role} ended with {self.process.wait(10)}") from None
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply["result"]

    # Requests.

    def add(self, prompt: list[int] | str, request_id: str | None = None, **parameters) -> str:
        return self.add_all([prompt], [request_id], **parameters)[0]

    def add_all(self, prompts: list, ids: list | None = None, **parameters) -> list[str]:
        """All prompts before the engine's next step; greedy unless told otherwise. Their request ids."""
        names = [name or self._new_id() for name in ids or [None] * len(prompts)]
        parameters = {**GREEDY, **parameters}
        self.do("add", requests=[[n, p, parameters] for n, p in zip(names, prompts, strict=True)])
        return names

    def wait(self, ids: Iterable[str], timeout_s: float = WAIT_S) -> list[dict]:
        ids = list(ids)
        results = self.do("wait", ids=ids, timeout_s=timeout_s, answer_s=timeout_s + 10)
        return [results[name] for name in ids]

    def generate(self, prompts: list, timeout_s: float = WAIT_S, **parameters) -> list[dict]:
        return self.wait(self.add_all(prompts, **parameters), timeout_s)

    def tokens(self, prompts: list, **parameters) -> list[list[int]]:
        """The first output of each."""
        return [result["outputs"][0]["token_ids"] for result in self.generate(prompts, **parameters)]

    def abort(self, *ids: str) -> None:
        self.do("abort", ids=list(ids))

    def _new_id(self) -> str:
        self._numbers += 1
        return f"r{self._numbers}"

    # State.

    def stats(self) -> dict:
        return self.do("stats")

    def counters(self) -> "Counters":
        return Counters(self.do("counters"))

    def evaluate(self, expression: str):
        return self.do("evaluate", expression=expression)

    def execute(self, code: str) -> None:
        self.do("execute", code=code)

    def wait_until(self, expression: str, timeout_s: float = WAIT_S) -> float:
        return self.do("wait_until", expression=expression, timeout_s=timeout_s, answer_s=timeout_s + 10)

    def wait_for_peers(self, count: int = 1) -> None:
        self.wait_until(f"{PROTOCOL}.decode.view().broker_up and {PROTOCOL}.decode.view().prefill_peers == {count}")

    def wait_for(self, *peers: "EngineProcess") -> None:
        """Until these prefill engines, and no others, can be used: one that died may count until it is found dead."""
        names = sorted(peer.incarnation() for peer in peers)
        self.wait_until(f"{PROTOCOL}.decode.view().broker_up and {DEBUG_STATE}['prefill_peers'] == {names!r}")

    def incarnation(self) -> str:
        return self.evaluate("disagg.agent.member.incarnation")

    def bring_forward(self, limit: str) -> None:
        """The `deadline`, or the `lease_until`, of every open attempt of this decode engine comes in a moment, even
        where a renewal is on its way. Returns when the control thread has ended them."""
        self.execute(f"""
soon = time.monotonic() + 0.3
while {PROTOCOL}.operators.bring_forward(soon, {limit == "lease_until"}):
    if time.monotonic() > soon + {WAIT_S}:
        raise TimeoutError("attempts outlive their {limit}")
    disagg.protocol.control.wake()
    time.sleep(0.02)
""")

    @contextlib.contextmanager
    def policy(self, **changes) -> Iterator[None]:
        """Other bounds for what goes remote, for a while."""
        self.execute("import msgspec; prefills = disagg.remote_prefills; policy = prefills._policy; "
                     f"prefills._policy = msgspec.structs.replace(policy, **{changes!r})")
        try:
            yield
        finally:
            self.execute("prefills._policy = policy")

    def block_ids(self, request_id: str) -> list[int]:
        """The block table of a live request."""
        return self.evaluate("next((scheduler.block_manager.get_block_table(g.first_seq) for g in (*scheduler.running, "
                             f"*scheduler.remote_prefilling.values()) if g.request_id == {request_id!r}), [])")

    def hit(self, tokens: list[int]) -> int:
        """How many tokens of this prompt a new request would find cached."""
        self.execute("from vllm.inputs import token_inputs\nfrom vllm.sequence import Sequence\n"
                     f"probe = Sequence(1 << 60, token_inputs({tokens!r}), {self.block_size})\n"
                     "hit = scheduler.block_manager.get_num_cached_tokens(probe)\n"
                     "scheduler.block_manager.remove_seq_from_computed_blocks_tracker(probe)")
        return self.evaluate("hit")

    def hear_last_words(self) -> None:
        """Until this decode engine has counted what peers say of a transfer after its end."""
        self.wait_until(f"not {DEBUG_STATE}['awaited_timings']")
        self.do("step", count=1)

    def hear_cancel(self, before: "Counters") -> None:
        """Until the control thread of this prefill engine, which is held, has heard that a job is not wanted any more,
        which it had not `before`."""
        wait_for(lambda: self.counters()[CANCELLED] > before[CANCELLED], "P has heard of it")

    def at_rest(self, timeout_s: float = WAIT_S) -> None:
        """B20: nothing of any request is left."""
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            expected = {key: value for key, value in AT_REST.items() if key in stats}
            left = {key: (stats[key], value) for key, value in expected.items() if stats[key] != value}
            if not left:
                return
            if time.monotonic() > deadline:
                raise Leak(f"{self.role} is not at rest (is, should be): {left}")
            time.sleep(0.05)

    # The process.

    def freeze(self) -> None:
        """Returns when no thread runs any more."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and not a trace of it left."""
        self.process.kill()
        self.process.wait(10)
        self._pipe.close()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.thaw()
        self._pipe.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Pair:
    """A broker, an engine P that prefills and an engine D that decodes (and may do both)."""
    broker: BrokerProcess
    p: EngineProcess
    d: EngineProcess

    def at_rest(self) -> None:
        """B20, on both; and what is counted has been counted."""
        self.d.at_rest()
        self.p.at_rest()
        for engine in (self.d, self.p):
            engine.hear_last_words()


def start_pair(zygote: Zygote, stack: contextlib.ExitStack, settings: dict = PATIENT, p_options: dict | None = None,
               **options) -> Pair:
    """A broker, a P, and a D that sends everything away; `stack` stops them. `options` are those of both engines."""
    broker = BrokerProcess()
    stack.callback(broker.stop)
    p = EngineProcess(zygote, "kv_producer", 0, broker.url, settings, **options, **(p_options or {}))
    stack.callback(p.stop)
    d = EngineProcess(zygote, "kv_consumer", 1, broker.url, {**settings, "max_local_prefill_tokens": 0}, **options)
    stack.callback(d.stop)
    return Pair(broker, p, d)


def lend(pair: Pair) -> Iterator[Pair]:
    """The pair for one test. Whatever a failed test left behind is cleared, and the next one starts from rest."""
    engines = (pair.d, pair.p)
    for engine in engines:
        engine.ready()
    pair.d.wait_for_peers()
    yield pair
    for engine in engines:
        engine.thaw()
        engine.do("hold", held=False)
    try:
        pair.at_rest()
    except AssertionError:
        for engine in engines:
            engine.do("abort_all")
        raise


class Counters(dict):
    """Counters at one moment; what is not there is 0."""

    def __missing__(self, key: str) -> float:
        return 0.0

    def since(self, earlier: "Counters") -> "Counters":
        return Counters({key: value - earlier[key] for key, value in self.items() if value != earlier[key]})

    def with_prefix(self, prefix: str) -> dict[str, float]:
        return {key.removeprefix(prefix): value for key, value in self.items() if key.startswith(prefix)}


def resumed_together(d: EngineProcess, p: EngineProcess, prompts: list[list[int]], **parameters) -> list[list[int]]:
    """What D says to these prompts, which P prefills, when it begins to decode all of them at the same time."""
    p.do("hold", held=True)
    names = d.add_all(prompts, **parameters)
    d.wait_until(f"disagg.agent.counts()['decode_granted'] == {len(prompts)}")
    d.do("hold", held=True)
    p.do("hold", held=False)
    wait_for(lambda: d.evaluate("disagg._collect() or len(disagg._progress.finished_prefills)") == len(prompts),
               "all prompts are there")
    d.do("hold", held=False)
    return [result["outputs"][0]["token_ids"] for result in d.wait(names)]


def prompt(tokens: int, seed: int | str) -> list[int]:
    """A prompt of so many tokens that shares no block with one of another seed."""
    return random.Random(f"{seed}/{tokens}").choices(VOCABULARY, k=tokens)
