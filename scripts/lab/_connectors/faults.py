# SPDX-License-Identifier: Apache-2.0
"""The faults, each the same for every connector, and how the requests ended that met it.

Each fault begins with both engines at rest. After it some more requests must be right; then both engines must come to
rest. Where they do not, or one has died, both are started anew before the next fault.
"""
import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from _connectors.pair import HANG_S, LEASE_S, EnginePair
from _connectors.questions import ANSWER_TOKENS, Question, draw_prompts_between, extended
from vllm_pd.bench.connection import LoadError
from vllm_pd.protocol.messages import Role

PAST_LEASE_S = LEASE_S + 3.0
AFTERWARDS = 4  # requests after each fault


class AnswerEnd(Enum):
    """How a request ended for its client. WRONG: status 200, and other tokens than those of one stock engine. HANG: no
    end within HANG_S."""
    RIGHT = "right"
    ERROR = "error"
    HANG = "hang"
    WRONG = "wrong"
    ABORTED = "aborted"


@dataclass
class FaultTally:
    """What one fault did to one connector. `leaked`: blocks in use, and requests, at rest. `dead`: engines that ended
    and were not killed."""
    ends: Counter[AnswerEnd] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    loaded_tokens: int = 0  # whose KV D has got from P: without any the fault has shown nothing

    @property
    def leaked_blocks(self) -> int:
        return sum(count for name, count in self.left.items() if name.endswith("blocks"))

    def as_dict(self) -> dict:
        """Ready for JSON."""
        return {**{end.value: self.ends[end] for end in AnswerEnd}, "dead": self.dead,
                "leaked_blocks": self.leaked_blocks, "left": self.left, "loaded_tokens": self.loaded_tokens,
                "errors": dict(self.errors.most_common(5))}


class FaultRun:
    """One fault, one connector. `questions` are used up from the front."""

    def __init__(self, pair: EnginePair, questions: Iterable[Question], seed: str) -> None:
        self.pair, self.tally = pair, FaultTally()
        self.draw = random.Random(seed)
        self._questions = iter(questions)

    def send(self, count: int) -> list[asyncio.Task]:
        """Sends the next questions, all at once."""
        return [asyncio.create_task(self._send(next(self._questions), None)) for _ in range(count)]

    def send_and_leave(self, count: int) -> list[asyncio.Task]:
        """Sends the next questions, all at once, from clients that go away while the requests are at D."""
        return [asyncio.create_task(self._send(next(self._questions), self.draw.random() * self.pair.decode_leg_s))
                for _ in range(count)]

    async def end(self, tasks: Iterable[asyncio.Task]) -> None:
        """Waits for requests."""
        await asyncio.gather(*tasks)

    async def moment(self) -> None:
        """Lets a drawn time pass, in which requests come as far as they may."""
        await asyncio.sleep(self.draw.uniform(0.05, 0.5))

    async def _send(self, question: Question, leave_s: float | None) -> None:
        at_decode = asyncio.Event()
        request = asyncio.create_task(self.pair.ask(question.prompt, ANSWER_TOKENS, at_decode))
        try:
            async with asyncio.timeout(HANG_S):
                if leave_s is not None:
                    waiting = asyncio.create_task(at_decode.wait())
                    await asyncio.wait([request, waiting], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
                    done, _ = await asyncio.wait([request], timeout=leave_s)
                    if not done:
                        request.cancel()
                        self.tally.ends[AnswerEnd.ABORTED] += 1
                        return
                answer = await request
            self.tally.ends[AnswerEnd.RIGHT if answer.token_ids == question.expected else AnswerEnd.WRONG] += 1
        except TimeoutError:
            self.tally.ends[AnswerEnd.HANG] += 1
        except (LoadError, OSError) as error:
            self.tally.ends[AnswerEnd.ERROR] += 1
            self.tally.errors[str(error)[:160]] += 1
        finally:
            request.cancel()


async def _abort_while_parked(run: FaultRun) -> None:
    await run.end([*run.send_and_leave(8), *run.send(2)])


async def _p_stopped(run: FaultRun) -> None:
    tasks = run.send(8)
    await run.moment()
    run.pair.signal(Role.PREFILL, signal.SIGSTOP)
    await asyncio.sleep(1.0)
    tasks += run.send(4)
    await asyncio.sleep(PAST_LEASE_S)
    run.pair.signal(Role.PREFILL, signal.SIGCONT)
    await run.end(tasks)


async def _d_stopped(run: FaultRun) -> None:
    """While D is stopped other prompts come, so that P uses blocks again whose lease is over."""
    tasks = run.send(8)
    await run.moment()
    run.pair.signal(Role.DECODE, signal.SIGSTOP)
    tasks += run.send(4)
    await asyncio.sleep(PAST_LEASE_S)
    tasks += run.send(12)
    await asyncio.sleep(3.0)
    run.pair.signal(Role.DECODE, signal.SIGCONT)
    await run.end(tasks)


async def _p_killed(run: FaultRun) -> None:
    tasks = run.send(8)
    await run.moment()
    run.pair.kill(Role.PREFILL)
    await run.end(tasks)
    run.pair.start(Role.PREFILL)


async def _d_restarted(run: FaultRun) -> None:
    tasks = run.send(8)
    await run.moment()
    run.pair.kill(Role.DECODE)
    await run.end(tasks)
    run.pair.start(Role.DECODE)
    await run.end(run.send(4))


async def _prefix_hit(run: FaultRun) -> None:
    """Four prompts, then four that share a part of them."""
    await run.end(run.send(4))
    await run.end(run.send(4))


async def _burst(run: FaultRun) -> None:
    await run.end(run.send(24))


@dataclass(frozen=True)
class Fault:
    """`strike` is one round, which needs `count` prompts of `shortest` to `longest` tokens."""
    name: str
    count: int
    strike: Callable[[FaultRun], Awaitable[None]]
    shortest: int = 150
    longest: int = 450
    shares_prefixes: bool = False

    def prompts(self, seed: int, rounds: int, spare: float) -> list[list[int]]:
        """The prompts, `spare` times as many as are needed, and those for afterwards; with `shares_prefixes` each is
        followed by one that shares a part of it."""
        count = int(spare * (rounds * self.count + AFTERWARDS)) + 4
        prompts = draw_prompts_between(f"{self.name} {seed}", count, self.shortest, self.longest)
        if not self.shares_prefixes:
            return prompts
        tails = extended(prompts, f"{self.name} {seed} tails")
        return [one for pair in zip(prompts, tails, strict=True) for one in pair]

    def kept(self, found: list[Question | None]) -> list[Question]:
        """The questions of those `prompts` that have a right answer, in the order in which they are sent: with
        `shares_prefixes`, groups of four, each followed by the four that share a part of them. There a prompt goes
        with the one that shares a part of it, so that no group is shifted."""
        if not self.shares_prefixes:
            return [one for one in found if one is not None]
        pairs = [pair for pair in zip(found[::2], found[1::2], strict=True) if None not in pair]
        return [one for first in range(0, len(pairs), 4) for four in zip(*pairs[first:first + 4], strict=True)
                for one in four]


FAULTS = {
    "abort": Fault("abort while parked", 10, _abort_while_parked),
    "p-stopped": Fault("P stopped past its lease, then continued", 12, _p_stopped),
    "d-stopped": Fault("D stopped past P's lease, then continued", 24, _d_stopped),
    "p-killed": Fault("P killed in the middle", 8, _p_killed),
    "prefix": Fault("partial prefix hit on D", 8, _prefix_hit, shares_prefixes=True),
    "d-restarted": Fault("D killed and restarted", 12, _d_restarted),
    "burst": Fault("burst beyond the pool", 24, _burst, shortest=200, longest=700),
}


async def strike(fault: Fault, pair: EnginePair, questions: list[Question], rounds: int, seed: int) -> FaultTally:
    """Carries out one fault, `rounds` times. Leaves the engines as they are."""
    run = FaultRun(pair, questions, f"{fault.name} {seed}")
    before = await asyncio.to_thread(pair.loaded_tokens)
    for _ in range(rounds):
        await fault.strike(run)
    run.tally.dead = pair.dead()
    if not run.tally.dead:
        await run.end(run.send(AFTERWARDS))
        run.tally.dead = pair.dead()
    after = await asyncio.to_thread(pair.loaded_tokens)
    run.tally.loaded_tokens = after - before if after >= before else after  # it begins anew with D
    run.tally.left = await asyncio.to_thread(pair.left)
    return run.tally
