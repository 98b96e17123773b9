# SPDX-License-Identifier: Apache-2.0
"""An engine of the simulated fleets (tests/proof/simulation) with V1's real scheduler, async or not, and the whole real
binding of both roles, over memory that notices every wrong read.
"""
import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path

from simulation.engine import Engine as FleetEngine
from simulation.engine import require
from simulation.kernel import Kernel
from simulation.node import BLOCK_SIZE, Node, Post

import vllm_pd.handover.decode
import vllm_pd.handover.engine
import vllm_pd.handover.prefill
import vllm_pd.v1.binding
import vllm_pd.v1.decode
import vllm_pd.v1.prefill
from tests.v1.drafting import ENTRIES, DraftingEngine, with_drafter
from tests.v1.simulated import Engine, FakeAccess, FakeTransfer, answer
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.scope import NO_SCOPE
from vllm_pd.transfer.requests import Notice, Read, Write

MAX_NUM_SEQS = 6
SLOTS = (*range(BLOCK_SIZE), *range(ENTRIES, ENTRIES + BLOCK_SIZE))  # of a block: the model's, then a drafter's
_TIMED = (vllm_pd.handover.decode, vllm_pd.handover.engine, vllm_pd.handover.prefill, vllm_pd.v1.binding,
          vllm_pd.v1.decode, vllm_pd.v1.prefill)


@functools.cache
def _config(folder: Path, in_flight: int, blocks: int, caching: bool, chunk: int, drafter: str):
    config = Engine(folder, in_flight, blocks=blocks, caching=caching, batch_tokens=chunk, max_num_seqs=MAX_NUM_SEQS,
                    block_size=BLOCK_SIZE).config
    return with_drafter(config, folder, drafter) if drafter else config


def find_call(node: Node, name: str):
    """What a node has of this name, or its protocol, or a session of that."""
    protocol = node.protocol
    for one in (node, protocol, protocol.decode, protocol.prefill, protocol.operators):
        if hasattr(one, name):
            return getattr(one, name)
    raise AttributeError(name)


class _Protocol:
    """A node as the binding knows it: its protocol and the sessions of that, in one, and the wires that carry what it
    says."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.decode = self.prefill = self.operators = self
        self.jobs: dict = {}
        self.scopes: dict = {}
        self.aborted: list = []

    def __getattr__(self, name: str):
        return find_call(self.node, name)

    def submit(self, attempt, token_ids, block_ids, cached_blocks, avoid=(), deadline_s=None, priority=0,
               scope=NO_SCOPE, media=()):
        self.jobs[attempt], self.scopes[attempt] = (token_ids, block_ids, cached_blocks), scope
        self.node.submit(attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope, media)

    def set_scopes(self, scopes: tuple[str, ...]) -> None:
        """The registry knows them already: they are the node's."""
        self.node.protocol.prefill.scopes = scopes

    def takes_media(self, media_bytes: int) -> bool:
        return True


class _Access(FakeAccess):

    def __init__(self, fleet_engine: "V1FleetEngine", engine: Engine) -> None:
        super().__init__(engine)
        self._fleet_engine = fleet_engine

    def wake(self) -> None:
        self._fleet_engine.wake()

    def wake_at(self, when) -> None:
        engine = self._fleet_engine
        if when is not None and when != self.due:
            engine.kernel.at(max(0.0, when - engine.kernel.now), engine.node, "timer", engine.wake)
        self.due = when


class _Transfer(FakeTransfer):
    """Writes and reads take time, need the processes at both ends, and may fail."""

    def __init__(self, engine: "V1FleetEngine") -> None:
        super().__init__()
        self._engine = engine
        self.open: set[str] = set()

    def execute(self, requests) -> None:
        kernel = self._engine.kernel
        for request in requests:
            if isinstance(request, Write | Read):
                self.open.add(request.key)
                slow = kernel.happens(kernel.faults.slow_writes)
                attempt = self._engine.attempt_of(request)
                kernel.at(kernel.random.uniform(0.001, kernel.faults.slow_write_s if slow else 0.1), None, "write",
                          self._engine.land, request, attempt)


class V1FleetEngine(FleetEngine):
    """One engine, of either role or both. `drafter`: the method of one with speculative decoding."""

    simulated: Engine | None = None

    def __init__(self, node: Node, post: Post, *, folder: Path, in_flight: int, blocks: int, caching: bool,
                 chunk: int, drafter: str = "") -> None:
        super().__init__(node, post)
        self.transfer = _Transfer(self)
        make = DraftingEngine if drafter else self.engine_type()
        self.simulated = make(folder, in_flight, blocks=blocks, caching=caching, batch_tokens=chunk,
                              max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE, settings=_settings(node),
                              config=_config(folder, in_flight, blocks, caching, chunk, drafter),
                              protocol=_Protocol(node), transfer=self.transfer,
                              access=functools.partial(_Access, self))
        # A step takes no virtual time. So this is what was measured, for max_local_prefill_tokens auto.
        self.simulated.binding.speed.stepped(self.kernel.now, 1000, 0, 10.0)
        self._told: set[str] = set()
        self.landed: collections.Counter[bool] = collections.Counter()  # writes, by whether they were the last ones
        self.wake()

    def engine_type(self) -> Callable[..., Engine]:
        """What makes the engine without a drafter."""
        return Engine

    # The loop.

    def wake(self) -> None:
        if self.simulated is not None:
            self.simulated.access.woken = True
            super().wake()

    def _step(self) -> None:
        self._stepping = False
        simulated = self.simulated
        if simulated.has_work():
            simulated.turn()
        for request_id in simulated.ended.keys() - self._told:
            self._told.add(request_id)
            self.results[request_id] += 1
            if simulated.ended[request_id] == "error":
                require(self.node.config.fallback != "local" and not simulated.outputs[request_id],
                        f"{request_id} of {self.node.name} is refused and should not be")
            elif simulated.ended[request_id] != "aborted":
                right = answer(simulated.prompts[request_id], simulated.wanted[request_id])
                require(simulated.outputs[request_id] == right, f"{request_id} of {self.node.name} is answered wrongly")
        simulated.check()
        if simulated.has_work():
            super().wake()

    def client_asks(self, request_id: str, token_ids: list[int], max_tokens: int) -> None:
        self.simulated.add(request_id, token_ids, max_tokens)
        self.wake()

    def client_leaves(self, request_id: str) -> None:
        self.simulated.abort(request_id)
        self.wake()

    # Transfers.

    def attempt_of(self, request: Write | Read) -> m.Attempt:
        """Whose transfer this is, which is under way."""
        return self.simulated.binding.prefill_jobs._open[request.key].job.prefill.attempt

    def land(self, request: Write | Read, attempt: m.Attempt) -> None:
        """The hardware moves the bytes: it needs no process but must have one, and may wait for it."""
        node, faults = self.node, self.kernel.faults
        if not node.alive:
            return
        if node.stopped and self.kernel.random.random() < 0.5:
            node.backlog.append(("write", self.land, (request, attempt)))
            return
        there = self.engines.get(request.peer)
        broken = there is None or not there.node.alive or self.kernel.happens(faults.write_error)
        if there is not None and there.node.alive:
            count = 1 if broken else len(request.local_block_ids)
            pairs = list(zip(request.local_block_ids, request.remote_block_ids, strict=True))[:count]
            if isinstance(request, Write):
                there.written(attempt, pairs, self.simulated.slots)
                self.landed[request.notices != [b""]] += 1
                if request.notices != [b""] and not broken and not self.kernel.happens(faults.notice_loss):
                    for _ in range(2 if self.kernel.happens(faults.notice_twice) else 1):
                        self.kernel.at(self.kernel.random.uniform(0.0, faults.delay_s), there.node, "notice",
                                       there.noticed, Notice(node.name, request.notices[0]))
            else:
                _copy([(remote, local) for local, remote in pairs], there.simulated.slots, self.simulated.slots)
        self.kernel.at(0.001, node, "write ended", self._ended, request.key, not broken)

    def _ended(self, key: str, ok: bool) -> None:
        self.transfer.open.discard(key)
        self.transfer.end(key, ok)

    def noticed(self, notice: Notice) -> None:
        """A notice has arrived."""
        self.transfer.progress.notices.append(notice)
        self.wake()

    def written(self, attempt: m.Attempt, pairs: list[tuple[int, int]], source: dict) -> None:
        """A peer's write reaches our memory."""
        job = self.simulated.protocol.jobs.get(attempt)
        fenced = self.simulated.binding.fence.block_ids(attempt)
        require(job is not None and {block for _, block in pairs} <= set(fenced[job[2]:]),
                f"a write for {attempt} landed outside its fence")
        _copy(pairs, source, self.simulated.slots)

    def check_at_rest(self) -> None:
        node = self.node
        require(not node.decode.states() and not node.decode.fenced(), f"{node.name} has open attempts")
        require(not node.prefill.states() and not self.transfer.open, f"{node.name} has jobs")
        require(all(count == 1 for count in self.results.values()), f"a request of {node.name} ended more than once")
        self.simulated.check_at_rest()


def _copy(pairs: list[tuple[int, int]], source: dict, target: dict) -> None:
    for old, new in pairs:
        for slot in SLOTS:
            if (old, slot) in source:
                target[new, slot] = source[old, slot]


def _settings(node: Node):
    import dataclasses
    return dataclasses.replace(node.config, role=node.member.role)


@contextlib.contextmanager
def virtual_time(kernel: Kernel) -> Iterator[None]:
    """The binding reads the kernel's clock."""
    clock = types.SimpleNamespace(**dict.fromkeys(("time", "monotonic", "perf_counter"), lambda: kernel.now))
    real = [module.time for module in _TIMED]
    for module in _TIMED:
        module.time = clock
    try:
        yield
    finally:
        for module, before in zip(_TIMED, real, strict=True):
            module.time = before
