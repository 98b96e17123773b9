# SPDX-License-Identifier: Apache-2.0
"""A run: engines, a broker, clients, and what befalls them; then calm, and a look at what is left."""
import collections
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.messages import Role
from vllm_pd.protocol.prefill import UNPROVEN_KEPT_S, PrefillProtocol
from vllm_pd.settings.engine import PDConfig

from .engine import BLOCK_SIZE, Broken, Engine, LightEngine, require
from .kernel import Faults, Kernel
from .node import BrokerProcess, Node, Post

CALM_S = 2_000.0
FAR_CALM_S = CALM_S + UNPROVEN_KEPT_S  # between machines: P remembers for so long what may land at a D that is gone
BuildEngine = Callable[[Node, Post], Engine]


@dataclass(frozen=True)
class Plan:
    """What a run is made of. `roles` are the engines'; `requests` come at random moments within `load_s`."""
    roles: tuple[Role, ...] = (Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL)
    requests: int = 60
    load_s: float = 30.0
    longest_blocks: int = 6
    max_tokens: int = 12
    blocks: int = 24
    machines: int = 1  # over which the engines are dealt
    faults: Faults = Faults()
    settings: dict[str, Any] = field(default_factory=dict)
    decode_type: type[DecodeProtocol] = DecodeProtocol
    prefill_type: type[PrefillProtocol] = PrefillProtocol
    generations_type: type[Generations] = Generations
    engine_type: type[LightEngine] = LightEngine


@dataclass
class Outcome:
    """What a run came to."""
    trace: str
    steps: collections.Counter
    requests: int
    done_remotely: int
    attempts: collections.Counter
    renewals: int  # of transfer agents
    seconds: float  # of virtual time
    broken: str = ""


class Fleet:
    """One run."""

    def __init__(self, seed: int, plan: Plan, build: BuildEngine | None = None):
        self.plan = plan
        self.kernel = Kernel(seed, plan.faults)
        self.post = Post(self.kernel)
        self.engines: dict[str, Engine] = {}
        self.asked: dict[str, str] = {}  # request id: engine
        self._gone: list[Engine] = []
        self._build = build or (lambda node, post: plan.engine_type(node, post, plan.blocks))
        settings = {"broker": "tcp://127.0.0.1:5700", "max_local_prefill_tokens": BLOCK_SIZE,
                    "max_prefill_tokens": 3 * BLOCK_SIZE, "lease_s": 6.0,
                    "attempt_deadline_s": 25.0, "claim_retry_s": 1.0, **plan.settings}
        self.config = PDConfig.parse("kv_both", settings)
        self._lives = 0
        self._start_broker()
        for index, role in enumerate(plan.roles):
            self._start(role, f"m{index % plan.machines}" if plan.machines > 1 else "")
        self._plan_clients()
        self._plan_faults()

    def run(self) -> Outcome:
        """All of it. What breaks is told in `broken`."""
        began, broken = self.kernel.now, ""
        try:
            self.kernel.run(lambda: False, self.plan.load_s + 5.0)
            self._calm()
            calm_s = FAR_CALM_S if self.plan.machines > 1 else CALM_S
            require(self.kernel.run(self._all_over, calm_s), f"not over after {calm_s:g} s of calm: {self._left()}")
            for engine in self._living():
                engine.check_at_rest()
        except (Broken, AssertionError) as problem:
            broken = f"{problem} (at {self.kernel.now - began:.6f} s)"
            self.kernel.note(broken)
        attempts: collections.Counter = collections.Counter()
        for engine in (*self._living(), *self._gone):
            attempts.update(engine.node.decode.counters)
        renewals = sum(engine.node.generation for engine in (*self._living(), *self._gone))
        return Outcome(self.kernel.trace, self.kernel.steps, len(self.asked), attempts["done"], attempts, renewals,
                       self.kernel.now - began, broken)

    # Who is there.

    def _start_broker(self) -> None:
        self._lives += 1
        self.post.broker = BrokerProcess(f"b{self._lives}", self.post, self.config.ttl_s)

    def _start(self, role: Role, machine: str) -> None:
        self._lives += 1
        node = Node(f"{role.value[3:4]}{self._lives}", role, self.config, self.post, machine=machine,
                    decode_type=self.plan.decode_type, prefill_type=self.plan.prefill_type,
                    generations_type=self.plan.generations_type)
        engine = self._build(node, self.post)
        self.engines[node.name] = engine
        engine.engines = self.engines

    def _living(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.node.alive]

    # Clients.

    def _plan_clients(self) -> None:
        random = self.kernel.random
        for index in range(self.plan.requests):
            length = random.randint(1, self.plan.longest_blocks * BLOCK_SIZE)
            self.kernel.at(random.uniform(1.0, self.plan.load_s), None, "request", self._ask, f"r{index}", length,
                           random.randint(1, self.plan.max_tokens))

    def _ask(self, request_id: str, length: int, max_tokens: int) -> None:
        random = self.kernel.random
        engines = [e for e in self._living() if e.node.member.role.decodes and not e.node.stopped]
        if not engines:
            return
        engine = random.choice(engines)
        self.asked[request_id] = engine.node.name
        number = int(request_id[1:])
        engine.client_asks(request_id, [1000 + number, *range(length - 1)], max_tokens)
        if self.kernel.happens(self.plan.faults.aborts):
            self.kernel.at(random.expovariate(2.0), engine.node, "abort", engine.client_leaves, request_id)

    # Faults.

    def _plan_faults(self) -> None:
        faults, random = self.plan.faults, self.kernel.random
        for count, kind, call in ((faults.kills, "kill", self._kill), (faults.stops, "stop", self._stop),
                                  (faults.broker_restarts, "broker ends", self._end_broker),
                                  (faults.cuts, "cut", self._cut),
                                  (faults.false_deaths, "false death", self._lose_sight)):
            for _ in range(count):
                self.kernel.at(random.uniform(2.0, self.plan.load_s), None, kind, call)

    def _kill(self) -> None:
        if not self._living():
            return
        engine = self.kernel.random.choice(self._living())
        self._gone.append(engine)
        self.kernel.kill(engine.node)
        del self.post.nodes[engine.node.name]
        for name in [name for name, owner in self.asked.items() if owner == engine.node.name]:
            del self.asked[name]  # its clients know
        for other in self._living():
            see = other.node.is_unreachable if other.node.is_elsewhere(engine.node) else other.node.is_dead
            self.kernel.at(self.kernel.random.uniform(0.05, 0.8), other.node, "death seen", see, engine.node.name)
        self.kernel.at(self.kernel.random.uniform(0.1, 3.0), None, "restart", self._start, engine.node.member.role,
                       engine.node.member.host_id)
        del self.engines[engine.node.name]

    def _stop(self) -> None:
        running = [engine for engine in self._living() if not engine.node.stopped]
        if running:
            engine = self.kernel.random.choice(running)
            self.kernel.stop(engine.node)
            self.kernel.at(self.kernel.random.uniform(0.1, self.plan.faults.stop_s), None, "go on", self.kernel.go_on,
                           engine.node)

    def _end_broker(self) -> None:
        broker = self.post.broker
        if broker is not None:
            self.kernel.kill(broker)
            self.post.broker = None
            self.kernel.at(self.kernel.random.uniform(0.1, 6.0), None, "restart", self._start_broker)

    def _apart(self) -> list[tuple[Engine, Engine]]:
        """All pairs on different machines."""
        return [pair for pair in itertools.permutations(self._living(), 2)
                if pair[0].node.is_elsewhere(pair[1].node)]

    def _cut(self) -> None:
        """Nothing passes between two engines for a while; after some seconds their connection ends."""
        if not (apart := self._apart()):
            return
        one, other = (engine.node for engine in self.kernel.random.choice(apart))
        cut_s = self.kernel.random.uniform(0.1, self.plan.faults.cut_s)
        self.kernel.cut(one, other, self.kernel.now + cut_s)
        ends_s = self.kernel.random.uniform(2.0, 6.0)
        if ends_s < cut_s:
            self.kernel.at(ends_s, one, "disconnected", one.disconnected, other.name)
            self.kernel.at(ends_s, other, "disconnected", other.disconnected, one.name)

    def _lose_sight(self) -> None:
        """Something between two machines refuses one engine the other one, which lives."""
        if apart := self._apart():
            one, other = self.kernel.random.choice(apart)
            self.kernel.at(0.0, one.node, "seems dead", one.node.is_unreachable, other.node.name)

    def _calm(self) -> None:
        """Nothing goes wrong any more, but what is under way goes its way."""
        self.kernel.heal()
        self.kernel.faults = Faults(delay_s=self.plan.faults.delay_s)
        for engine in self._living():
            if engine.node.stopped:
                self.kernel.go_on(engine.node)

    def _all_over(self) -> bool:
        return not self._left()

    def _left(self) -> dict:
        left = {}
        for name, engine in self.engines.items():
            states = {**engine.node.decode.states(), **engine.node.prefill.states()}
            waiting = [r for r, owner in self.asked.items() if owner == name and not engine.results[r]]
            if states or waiting or engine.node.has_news or engine.is_stepping:
                left[name] = (states, waiting)
        return left
