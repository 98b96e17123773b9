# SPDX-License-Identifier: Apache-2.0
"""A process that imports vLLM from its PYTHONPATH and times steps.

Its argument is a JSON object with the fields of `StepLoad`. Once ready it writes one line of JSON. Then each line on
its stdin is a number of steps, and is answered by one line: the seconds that each step took, wall and CPU, and a digest
of what the steps decided. It ends with its stdin. What vLLM prints goes to stderr.

No request ever finishes, so the decode batch is always full. When its sequences have grown to `context_tokens`, all are
aborted and admitted again, outside the timed steps.
"""

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

TURNS = "turns"  # the argument by which rounds take turns, see `worker_v1`


@dataclass(frozen=True)
class StepLoad:
    """`kind`: "engine" (LLMEngine.step) or "scheduler" (Scheduler.schedule without execution)."""

    kind: str
    model: str
    batch: int
    prompt_tokens: int
    context_tokens: int
    block_size: int
    prefix_caching: bool

    def prompt(self, number: int) -> list[int]:
        """Token ids, different for each request."""
        return [(7919 * number + 31 * place) % 1000 + 100 for place in range(self.prompt_tokens)]


class EngineSteps:
    """LLMEngine.step on a full decode batch."""

    def __init__(self, load: StepLoad) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self.load, self.length, self.admitted = load, 0, 0
        arguments = EngineArgs(model=load.model, dtype="float32", max_model_len=2 * load.context_tokens,
                               max_num_seqs=load.batch, block_size=load.block_size, disable_log_stats=True, seed=0,
                               enable_prefix_caching=load.prefix_caching, enforce_eager=True)
        self.engine = LLMEngine.from_engine_args(arguments)
        self.sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * load.context_tokens)

    def refill(self) -> None:
        """Admits a new batch and prefills it."""
        from vllm.inputs import TokensPrompt

        running = [str(n) for n in range(self.admitted, self.admitted + self.load.batch)] if self.length else []
        self.engine.abort_request(running)
        self.admitted += len(running)
        for number in range(self.load.batch):
            prompt = TokensPrompt(prompt_token_ids=self.load.prompt(number))
            self.engine.add_request(str(self.admitted + number), prompt, self.sampling)
        while len(self.engine.step()) < self.load.batch:
            pass
        self.length = self.load.prompt_tokens + 1

    def step(self) -> object:
        """The batch's newest tokens."""
        self.length += 1
        return [output.outputs[0].token_ids[-1] for output in self.engine.step()]

    def finish(self, tokens: object) -> object:
        """The tokens."""
        return tokens


class SchedulerSteps:
    """Scheduler.schedule, with tokens appended as an engine would."""

    def __init__(self, load: StepLoad) -> None:
        from vllm.config import CacheConfig, SchedulerConfig
        from vllm.core.scheduler import Scheduler

        self.load, self.length, self.admitted = load, 0, 0
        budget = max(load.batch * load.prompt_tokens, 2 * load.context_tokens)
        cache = CacheConfig(load.block_size, 1.0, 1, "auto", enable_prefix_caching=load.prefix_caching)
        cache.num_gpu_blocks = 2 * load.batch * (load.context_tokens // load.block_size + 2)
        cache.num_cpu_blocks = 0
        config = SchedulerConfig("generate", max_num_batched_tokens=budget, max_num_seqs=load.batch,
                                 max_model_len=2 * load.context_tokens)
        self.scheduler = Scheduler(config, cache, None)

    def refill(self) -> None:
        """Admits a new batch and schedules its prefill."""
        from vllm import SamplingParams
        from vllm.inputs import token_inputs
        from vllm.sequence import Sequence, SequenceGroup

        if self.length:
            self.scheduler.abort_seq_group([str(n) for n in range(self.admitted, self.admitted + self.load.batch)])
            self.admitted += self.load.batch
        for number in range(self.admitted, self.admitted + self.load.batch):
            inputs = token_inputs(self.load.prompt(number - self.admitted))
            sequence = Sequence(number, inputs, self.load.block_size)
            self.scheduler.add_seq_group(SequenceGroup(str(number), [sequence], arrival_time=0.0,
                                                       sampling_params=SamplingParams(max_tokens=None)))
        self.advance(self.scheduler.schedule())
        self.length = self.load.prompt_tokens + 1

    def advance(self, decided: tuple) -> None:
        """Appends a token to every sequence that was scheduled."""
        from vllm.sequence import Logprob

        metadata, outputs, _ = decided
        for scheduled, about in zip(outputs.scheduled_seq_groups, metadata, strict=True):
            scheduled.seq_group.update_num_computed_tokens(about.token_chunk_size)
            scheduled.seq_group.first_seq.append_token_id(5, {5: Logprob(0.0)})

    def step(self) -> object:
        """What was decided; `finish` goes on from there."""
        self.length += 1
        return self.scheduler.schedule()

    def finish(self, decided: tuple) -> object:
        """The untimed end of a step: who was scheduled, with how many tokens, into which blocks."""
        metadata, outputs, asynchronous = decided
        scheduled = [(one.request_id, one.token_chunk_size, one.block_tables, one.is_prompt, one.do_sample)
                     for one in metadata]
        self.advance(decided)
        return [scheduled, outputs.num_batched_tokens, len(outputs.blocks_to_copy), asynchronous]


class TimedSteps(Protocol):
    """One kind of steps on a full decode batch. `length`: tokens of each sequence; 0 before the first `refill`."""

    load: StepLoad
    length: int

    def refill(self) -> None:
        """Admits a new batch and prefills it."""

    def step(self) -> object:
        """What is timed."""

    def finish(self, decided: object) -> object:
        """The rest of the step, from what `step` gave. What it has decided."""


def timed(steps: TimedSteps, count: int, cpu_time: Callable[[], float] = time.thread_time) -> dict:
    """Does `count` steps. The seconds of each, wall and CPU (by default this thread's), and the digest of their
    results."""
    if not steps.length or steps.length + count > steps.load.context_tokens:
        steps.refill()
    total = hashlib.sha256()
    wall_s, cpu_s = [], []
    gc.collect()
    gc.disable()
    for _ in range(count):
        wall, cpu = time.perf_counter(), cpu_time()
        out = steps.step()
        cpu_s.append(cpu_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
        total.update(repr(steps.finish(out)).encode())
    gc.enable()
    return {"wall_s": wall_s, "cpu_s": cpu_s, "digest": total.hexdigest()}


def take_turns(load: StepLoad, make: Callable[[StepLoad], TimedSteps], about: Callable[[], dict],
               cpu_time: Callable[[], float] = time.thread_time,
               before_round: Callable[[TimedSteps, int], None] = lambda steps, number: None) -> None:
    """The life of a worker. `make` builds the steps, `about` says what its first line tells. `before_round` is called
    with the number of each round, from 0."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    steps = make(load)
    timed(steps, min(30, load.context_tokens - load.prompt_tokens - 1))  # warm
    print(json.dumps(about()), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        before_round(steps, number)
        print(json.dumps(timed(steps, int(line), cpu_time)), file=answers, flush=True)


def has_plugin(number: int) -> bool:
    """Whether that round of TURNS has the plugin: with, without, without, with, and so on."""
    return number % 4 in (0, 3)


def origin() -> dict:
    """Where this process has vLLM from."""
    import vllm

    return {"vllm": os.path.dirname(vllm.__file__)}


def main() -> int:
    load = StepLoad(**json.loads(sys.argv[1]))
    take_turns(load, {"engine": EngineSteps, "scheduler": SchedulerSteps}[load.kind], origin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
