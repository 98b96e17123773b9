# SPDX-License-Identifier: Apache-2.0
"""Random histories of one engine of both roles on V1's real scheduler (tests/v1/simulated.py), under a virtual clock.

The test is the engine's peers: each keeps what the protocol promises to the binding. A seed draws the sizes of the
engine and what happens to it, so a history that fails is played again from its seed, and `shrink` drops from it all
that its failure does not need.
"""
import contextlib
import functools
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.v1 import simulated
from tests.v1.drafting import TOKENS, DraftingEngine, with_drafter
from tests.v1.simulated import BLOCK_SIZE, PEER, Engine, FakeAccess, ScopedTokens, contents, seed_of
from tests.v1.states import DraftingStateEngine, StateEngine
from tests.v1.windows import DraftingWindowEngine, WindowEngine
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.protocol.actions import Cancelled, FallbackReason, HoldEnd, HoldEnded, Prefilled, Released
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.messages import Attempt, Timings
from vllm_pd.protocol.metaserver import request_of
from vllm_pd.protocol.rows import STATE
from vllm_pd.protocol.scope import PromptScope
from vllm_pd.transfer.requests import Read, Write

STEPS = 60  # of a history
STEP_S = 0.02
PREFIXES = [[], [1] * (2 * BLOCK_SIZE), [2] * (4 * BLOCK_SIZE)]
SALTS = ("", "s", "t")
MOST_REQUESTS = 12
TURNS = 3000  # far more than any history needs to end
LOST = (FallbackReason.PEER, FallbackReason.LEASE, FallbackReason.DEADLINE)
GAUGES = ("parked_blocks", "quarantined_blocks", "sending_blocks", "held_blocks")


class Setting(NamedTuple):
    """The sizes of an engine."""
    in_flight: int
    stages: int
    blocks: int
    batch_tokens: int
    seats: int
    caching: bool
    policy: str
    overtaking: int
    threshold: int | str
    chunks: bool
    fraction: float
    reads: str
    ending: str  # what peers do at the end: answer, lose every job, or go, and then all are lost
    is_busy: bool  # at the end there is always a short request of another client
    time_passes: bool  # at the end, in which nothing needs that
    drafter: str = ""  # the method of one with speculative decoding
    windows: tuple[int, ...] = ()  # of each group of layers, 0 with full attention
    sizes: tuple[int, ...] = ()  # of a block of each group in tokens, where they differ
    states: str = ""  # how layers with a recurrent state keep it, where some do (tests/v1/states.py)
    checkpoints: int = 0
    salted: bool = False  # some requests have a salt


class Step(NamedTuple):
    """Something that happens. The numbers are read modulo what there is to choose from, so a step means something in
    any state."""
    name: str
    first: int
    second: int
    third: int


class Clock:
    """In the place of the wall clock, for the binding and for vLLM."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Nobody else does anything meanwhile, so a look each second is enough."""
        self.now += max(seconds, 1.0)


@contextlib.contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """All code in this process reads `clock`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, name, clock.read)
        patch.setattr(time, "sleep", clock.sleep)
        yield


class _Access(FakeAccess):
    """Wakes the engine when its moment has come."""

    def take_wake(self) -> bool:
        if self.due is not None and time.monotonic() >= self.due:
            self.woken, self.due = True, None
        return super().take_wake()


@functools.cache
def _made_config(folder: Path, in_flight: int, stages: int, drafter: str):
    config = Engine(folder, in_flight).config
    return with_drafter(config, folder, drafter) if drafter else config


def _config(folder: Path, setting: Setting):
    """V1 takes most of the time of a history to make one, so it is made once and changed."""
    config = _made_config(folder, setting.in_flight, setting.stages, setting.drafter)
    batch, cache = config.scheduler_config, config.cache_config
    batch.max_num_batched_tokens, batch.max_num_seqs, batch.policy = setting.batch_tokens, setting.seats, setting.policy
    cache.enable_prefix_caching = setting.caching
    return config


class Walk:
    """One engine, and what is known of its peers."""

    def __init__(self, folder: Path, setting: Setting, clock: Clock) -> None:
        self.setting, self.clock = setting, clock
        self.in_flight = setting.in_flight
        make = DraftingEngine if setting.drafter else Engine
        if setting.states:
            make = functools.partial(DraftingStateEngine if setting.drafter else StateEngine, windows=setting.windows,
                                     mode=setting.states, checkpoints=setting.checkpoints)
        elif setting.windows:
            make = functools.partial(DraftingWindowEngine if setting.drafter else WindowEngine, windows=setting.windows,
                                     sizes=setting.sizes)
        self.engine = make(folder, setting.in_flight, blocks=setting.blocks, max_num_seqs=setting.seats,
                           batch_tokens=setting.batch_tokens, config=_config(folder, setting), access=_Access,
                           prefix_reads=setting.reads, max_prefill_jobs=4, prefill_overtaking=setting.overtaking,
                           threshold=setting.threshold, push_chunks=setting.chunks,
                           max_parked_fraction=setting.fraction)
        self.engine.ends_chunks = False
        # With auto: half as fast as a peer, which is better by that unless much is queued there (`queue_changes`).
        self.engine.binding.speed.stepped = lambda *measured: None
        StepSpeed.stepped(self.engine.binding.speed, clock.now, 1000, 0, 1000.0)
        self.numbers = 0
        self.open: dict = {}  # attempts that have neither ended nor fallen back
        self.fenced: list = []  # fallen back or aborted, not released
        self.over: list = []  # attempts whose last word was said
        self.jobs: dict[str, list[int]] = {}  # prompts by attempt
        self.ended: set[str] = set()  # keys of transfers
        self.followed = 0
        self.seen: tuple = ()  # the view of its last step
        self.held: list = []  # names of prompts that the engine keeps

    def take(self, step: Step) -> None:
        """Let this happen."""
        getattr(self, f"_{step.name}")(step.first, step.second, step.third)
        self._follow()

    def settle(self) -> None:
        """All that peers have begun comes to its end; then each request has ended, and nothing is held."""
        engine, setting = self.engine, self.setting
        engine.protocol.lease, engine.protocol.peers = True, 0 if setting.ending == "gone" else 2
        engine.protocol.dead.add(PEER)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.access.wake()
        for turn in range(TURNS):
            self._follow()
            self._end_peers_work(turn)
            if not engine.has_work() and not engine.scheduler.requests and not len(engine.binding.fence):
                break
            if setting.is_busy and not any(name[0] == "b" for name in engine.scheduler.requests):
                self._add_busy()
            if engine.has_work():
                self._turn_once(STEP_S if setting.is_busy or setting.time_passes else 0.0)
            elif engine.access.due is not None:
                self.clock.now = max(self.clock.now, engine.access.due)
        engine.check_answers()
        self._check_usage()
        shown = self._gauges()
        engine.check_at_rest()
        assert not any(shown.values()), f"at rest the gauges show {shown}"

    def _end_peers_work(self, turn: int) -> None:
        """What the peers do in one turn. Where they lose jobs, fences come down as late as that may be."""
        if self.open and self.setting.ending == "answers":
            self._answer(next(iter(self.open)))
        elif self.open:
            self._lose(0, LOST.index(FallbackReason.LEASE), 1)
        while self.fenced and (self.setting.ending == "answers" or turn % 100 == 99 or not self.engine.has_work()):
            self._look_at_sleep()
            self._release(0)
        while self.held:
            self.engine.tell(HoldEnded(self.held.pop(), HoldEnd.EXPIRED))
        for one in self._transfers():
            self._end(one, True)

    def _add_busy(self) -> None:
        """No request waits for those of this client, which come without end, until all others are done."""
        if any(name[0] != "b" for name in self.engine.scheduler.requests) or len(self.engine.binding.fence):
            self.numbers += 1
            self.engine.add(f"b{self.numbers}", [4000], 40, priority=2)

    def _check_usage(self) -> None:
        """Each whole block of a prompt was either cached or has come into the cache, by whatever way."""
        for name, created in self.engine.created.items() if self.setting.caching and not self.setting.windows else ():
            whole = len(self.engine.prompts[name]) // BLOCK_SIZE * BLOCK_SIZE
            assert self.engine.cached[name] + created == whole, f"the usage of {name}"

    def _gauges(self) -> dict[str, float]:
        """What the front end shows. What the engine has not sent yet does not count."""
        return {name: value for data in self.engine.figures for name, *values in data["calls"]
                if name in GAUGES for value in values}

    # The peers.

    def _follow(self) -> None:
        """Jobs that were submitted, and those that the binding aborted; prompts that it keeps."""
        protocol = self.engine.protocol
        for attempt in list(protocol.jobs)[self.followed:]:
            self.open[attempt] = None
            self.followed += 1
            if attempt in protocol.claimed:  # what is read is the KV of the prompt
                prompt, (_, digest) = self.engine.prompts[request_of(attempt)], protocol.claimed[attempt]
                salt = next(one for one in SALTS if token_digest(prompt, PromptScope(one)) == digest)
                protocol.jobs[attempt] = ScopedTokens(prompt, seed_of(salt)), *protocol.jobs[attempt][1:]
        for digest, block_ids in protocol.held.values():
            self._check_held(digest, block_ids)
        self.held += protocol.held
        protocol.held.clear()
        for attempt in self.engine.protocol.aborted:
            if attempt in self.open:
                del self.open[attempt]
                self.fenced.append(attempt)
        self.engine.protocol.aborted.clear()

    def _check_held(self, digest: bytes, block_ids: list[int]) -> None:
        """These blocks, of a prompt with this digest, hold its KV."""
        right = next(contents(ScopedTokens(prompt, seed_of(salt))) for prompt in self.engine.prompts.values()
                     for salt in SALTS if token_digest(prompt, PromptScope(salt)) == digest)
        for at, content in enumerate(right):
            slot = block_ids[at // BLOCK_SIZE], at % BLOCK_SIZE
            assert self.engine.slots.get(slot) == content, f"position {at} is held in {slot}, which has other KV"

    def _answer(self, attempt) -> None:
        del self.open[attempt]
        self.over.append(attempt)
        self.engine.write(attempt)
        self.engine.tell(Prefilled(attempt, Timings()))

    def _release(self, index: int) -> None:
        attempt = self.fenced.pop(index)
        self.over.append(attempt)
        self.engine.tell(Released(attempt))

    def _transfers(self) -> list[Read | Write]:
        return [one for one in self.engine.transfer.requests
                if isinstance(one, Read | Write) and one.key not in self.ended]

    def _end(self, one: Read | Write, ok: bool) -> None:
        engine = self.engine
        self.ended.add(one.key)
        if isinstance(one, Read):
            engine.fill(self.jobs[one.key.removeprefix("read ")], ok, one)
        else:
            engine.check_sent_write(one, self.jobs[one.key.rpartition(" of ")[2]])
            engine.transfer.end(one.key, ok)

    def _turn_once(self, seconds: float) -> None:
        self.clock.now += seconds
        self.engine.turn()
        self.seen = self._view()

    def _view(self) -> tuple:
        """What the engine decides by, and is not woken for."""
        return self.clock.now, self.engine.protocol.peers, self.engine.protocol.queued_tokens

    def _look_at_sleep(self) -> None:
        """An engine that sleeps could do nothing with another step."""
        if self.engine.scheduler.requests and not self.engine.has_work() and self.seen == self._view():
            output = self.engine.schedule()
            assert not output.total_num_scheduled_tokens, "it slept, and could compute"
            self.engine.process()

    def _fitting(self, prompt: list[int], tokens: int) -> list[int]:
        drafts = 2 * TOKENS if self.setting.drafter else 0  # those of a step, and those after it
        sizes = self.setting.sizes or (BLOCK_SIZE, ) * len(self.setting.windows)
        others = sum(-(-(window + self.in_flight * self.setting.batch_tokens) // size) + 1
                     for window, size in zip(self.setting.windows, sizes, strict=True)
                     if window)  # blocks that a request may have of the other groups
        others += TOKENS * self.setting.windows.count(STATE) if self.setting.states and drafts else 0
        full = sum(BLOCK_SIZE / size for window, size in zip(self.setting.windows, sizes, strict=True)
                   if not window) if self.setting.sizes else 1
        return prompt[:int((self.setting.blocks - 1 - others) / full) * BLOCK_SIZE - tokens - 1 - drafts]

    # What may happen.

    def _add(self, first: int, second: int, third: int) -> None:
        tokens = 1 + third % (40 if third // 64 % 4 == 0 else 8)
        self._add_request(self._prompt(first, second), tokens, priority=first // 3 % 3, cache_salt=self._salt(third))

    def _add_twin(self, first: int, second: int, third: int) -> None:
        if self.engine.prompts:
            self._add_request(list(self.engine.prompts.values())[-1], 5, cache_salt=self._salt(first))

    def _salt(self, number: int) -> str | None:
        """That of a request: half of them have one, in some histories."""
        return ((*SALTS, "")[number // 1024 % 4] or None) if self.setting.salted else None

    def _prompt(self, first: int, second: int) -> list[int]:
        """One whose beginning others have, too."""
        return PREFIXES[first % 3] + [4 + self.numbers % 900] * (1 + second % 60)

    def _add_request(self, prompt: list[int], tokens: int, **fields) -> None:
        """As much of the prompt as V1 takes with an answer of so many tokens."""
        if len(self.engine.scheduler.requests) <= MOST_REQUESTS:
            self.numbers += 1
            self.engine.add(f"r{self.numbers}", self._fitting(prompt, tokens), tokens, **fields)

    def _turn(self, first: int, second: int, third: int) -> None:
        for _ in range(1 + first % 8):
            if self.engine.has_work():
                self._turn_once(STEP_S)
            self._follow()

    def _schedule_only(self, first: int, second: int, third: int) -> None:
        if self.engine.scheduler.has_requests() and len(self.engine.begun_steps) < self.in_flight:
            self.engine.schedule()

    def _abort(self, first: int, second: int, third: int) -> None:
        alive = [name for name in self.engine.scheduler.requests if name in self.engine.prompts]
        if alive:
            self.engine.abort(alive[first % len(alive)])

    def _prefilled(self, first: int, second: int, third: int) -> None:
        if self.open:
            self._answer(list(self.open)[first % len(self.open)])

    def _lose(self, first: int, second: int, third: int) -> None:
        if self.open:
            attempt = list(self.open)[first % len(self.open)]
            del self.open[attempt]
            self.fenced.append(attempt)
            self.engine.lost(attempt, LOST[second % len(LOST)], ("", "p")[third % 2])

    def _late_write(self, first: int, second: int, third: int) -> None:
        if self.fenced:
            index = first % len(self.fenced)
            self.engine.write(self.fenced[index])
            if second % 2:
                self._release(index)

    def _late_word(self, first: int, second: int, third: int) -> None:
        if self.over:
            attempt = self.over[first % len(self.over)]
            self.engine.tell((Prefilled(attempt, Timings()), Released(attempt))[second % 2])

    def _job(self, first: int, second: int, third: int) -> None:
        prompt = self._fitting(PREFIXES[first % 3] + [5 + self.numbers % 900] * (1 + second % 120), 1)
        self.numbers += 1
        cached = min(third % 4, (len(prompt) - 1) // BLOCK_SIZE)
        salt = self._salt(second) or ""
        self.jobs[str(self.engine.job(prompt, cached, self.numbers, PromptScope(salt)))] = ScopedTokens(prompt,
                                                                                                         seed_of(salt))

    def _end_transfer(self, first: int, second: int, third: int) -> None:
        if alive := self._transfers():
            self._end(alive[first % len(alive)], bool(second % 2))

    def _cancel_job(self, first: int, second: int, third: int) -> None:
        jobs = list(self.engine.binding.prefill_jobs._jobs)
        if jobs:
            self.engine.tell(Cancelled(jobs[first % len(jobs)]))

    def _peers_change(self, first: int, second: int, third: int) -> None:
        self.engine.protocol.peers = first % 3

    def _queue_changes(self, first: int, second: int, third: int) -> None:
        self.engine.protocol.queued_tokens = (0, 10**9)[first % 2]

    def _abort_all(self, first: int, second: int, third: int) -> None:
        for request in self.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
            self.engine.ended[request.request_id] = "aborted"

    def _pass_time(self, first: int, second: int, third: int) -> None:
        self.clock.now += (0.05, 0.3, 1.5, 40.0)[first % 4]

    def _probe(self, first: int, second: int, third: int) -> None:
        self._look_at_sleep()

    def _lease(self, first: int, second: int, third: int) -> None:
        self.engine.protocol.lease = bool(first % 2)

    def _unproven(self, first: int, second: int, third: int) -> None:
        """A transfer has failed and may still land, until its peer is dead."""
        if alive := self._transfers():
            one = alive[first % len(alive)]
            self.ended.add(one.key)
            self.engine.transfer.end(one.key, False, "silent", may_land=True)

    def _peer_dies(self, first: int, second: int, third: int) -> None:
        """And so do all its jobs."""
        self.engine.protocol.dead.add(PEER)
        self.engine.tell(*map(Cancelled, self.engine.binding.prefill_jobs._jobs))

    def _pause(self, first: int, second: int, third: int) -> None:
        self.engine.scheduler.set_pause_state(list(PauseState)[first % 3 if second % 2 else 0])

    def _reset(self, first: int, second: int, third: int) -> None:
        """V1 raises RuntimeError where it may not go on without one."""
        with contextlib.suppress(RuntimeError):
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=bool(first % 2))

    def _keep(self, first: int, second: int, third: int) -> None:
        """A client's prompt is to be kept for another engine to read."""
        self._ask(self._prompt(first, second), {"do_remote_decode": True}, 1, self._salt(third))

    def _claim(self, first: int, second: int, third: int) -> None:
        """A client names the prompt that a peer keeps, which may be that of the last request."""
        prompts = list(self.engine.prompts.values())
        self._ask(prompts[-1] if prompts and third % 2 else self._prompt(first, second),
                  hold_params(Attempt(PEER, f"held {self.numbers}", 1)), 1 + third % 8, self._salt(second))

    def _ask(self, prompt: list[int], params: dict, tokens: int, salt: str | None) -> None:
        self._add_request(prompt, tokens, cache_salt=salt, params=SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}))

    def _end_hold(self, first: int, second: int, third: int) -> None:
        if self.held:
            self.engine.tell(HoldEnded(self.held.pop(first % len(self.held)), list(HoldEnd)[second % len(HoldEnd)]))


WEIGHTS = {"add": 12, "add_twin": 3, "turn": 14, "schedule_only": 4, "abort": 3, "prefilled": 7, "lose": 7,
           "late_write": 5, "late_word": 2, "job": 8, "end_transfer": 7, "cancel_job": 2, "peers_change": 3,
           "queue_changes": 2, "abort_all": 1, "pass_time": 3, "lease": 2, "probe": 2, "unproven": 1, "peer_dies": 0.3,
           "pause": 1, "reset": 0.5, "keep": 3, "claim": 3, "end_hold": 2}


SWARM = (0, 0.3, 1, 1, 1, 3)  # each history has more of some steps, and less or none of others


def odd_setting(draw: random.Random) -> Setting:
    """Small sizes that no block or step fits evenly."""
    in_flight, stages = draw.choice([(1, 1), (1, 1), (2, 1), (2, 2)])
    return Setting(in_flight, stages, draw.randint(10, 20), draw.randint(16, 33), draw.randint(2, 4),
                   draw.random() < 0.7, draw.choice(["fcfs", "priority"]), draw.choice([0, 1000]),
                   draw.choice([BLOCK_SIZE, BLOCK_SIZE, "auto"]), draw.random() < 0.5,
                   draw.choice([1.0, 1.0, 0.5]), draw.choice(["always", "always", "never"]),
                   draw.choice(["answers", "loses", "gone"]), draw.random() < 0.4, draw.random() < 0.5)


def history(seed: int, setting: Setting | None = None) -> tuple[Setting, list[Step]]:
    """What this seed stands for. Where a `setting` is given, only the steps are drawn."""
    draw = random.Random(seed)
    drawn = odd_setting(draw)._replace(salted=seed % 3 == 2)
    weights = [weight * draw.choice(SWARM) for weight in WEIGHTS.values()]
    names = draw.choices(list(WEIGHTS), weights, k=STEPS)
    return setting or drawn, [Step(name, *(draw.randrange(1 << 16) for _ in range(3))) for name in names]


class Played(NamedTuple):
    """What a history came to."""
    steps: int
    outputs: dict[str, list[int]]
    ends: dict[str, str]
    seconds: float


def play(folder: Path, setting: Setting, steps: list[Step]) -> Played:
    """The whole history. Raises AssertionError where something that must hold does not."""
    clock = Clock()
    with virtual_time(clock), pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated, "STAGES", setting.stages)
        walk = Walk(folder, setting, clock)
        for step in steps:
            walk.take(step)
        walk.settle()
    return Played(walk.engine.steps, walk.engine.outputs, walk.engine.ended, clock.now)


def failure(folder: Path, setting: Setting, steps: list[Step]) -> str:
    """How the history fails, empty where it does not."""
    try:
        play(folder, setting, steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(folder: Path, setting: Setting, steps: list[Step]) -> list[Step]:
    """A part of the steps that fails in the same way, with whatever numbers, and none of which can be dropped."""
    kind = _kind(failure(folder, setting, steps))
    size = len(steps) // 2
    while size:
        before, at = len(steps), 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size:]
            if _kind(failure(folder, setting, fewer)) == kind:
                steps = fewer
            else:
                at += size
        if size > 1 or len(steps) == before:
            size //= 2
    return steps


def _kind(text: str) -> str:
    return re.sub(r"\d+", "N", text)
