# SPDX-License-Identifier: Apache-2.0
"""B105 to B108: a fleet over three machines whose network and power fail again and again, while prompts come. None gets
a wrong answer, none stays unfinished, no block is lost."""
import dataclasses
import itertools
import os
import random
import time

from tests.hosts.fleet import Fleet, HostedEngine
from tests.hosts.rack import Host, Rack

REQUESTS = 500
PROMPT_EVERY_S, WORK_S = 0.2, 0.1
LONGEST_FAULT_S = 12.0
LASTS_S = 300.0  # at most
BACK_S = 40.0


@dataclasses.dataclass
class Machine:
    """A place of the fleet: one machine after another, each at an address of its own, with the same engine."""
    role: str
    host: Host
    engine: HostedEngine


class Chaos:
    """The fleet, and what is done to it. `counts` are the faults."""

    def __init__(self, rack: Rack, seed: int) -> None:
        self._rack, self._random = rack, random.Random(seed)
        self._broker = rack.host("b")
        self._fleet = Fleet(self._broker)
        self._numbers = itertools.count()
        self.places = [self._machine(role) for role in ("kv_producer", "kv_consumer", "kv_both")]
        self.requests = 0
        self.counts: dict[str, int] = {}
        self.engines = [place.engine for place in self.places]

    def _machine(self, role: str) -> Machine:
        host = self._rack.host(f"m{next(self._numbers)}")
        machine = Machine(role, host, self._fleet.engine(host, role).start())
        machine.engine.ask("work", WORK_S)
        if role != "kv_producer":
            machine.engine.ask("load", PROMPT_EVERY_S)
        return machine

    def fault(self) -> None:
        """Something breaks, stays broken for a while, and is mended."""
        kind = self._random.choice(["cut", "cut", "one way", "reject", "slow", "no broker", "power", "gone"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        one, other = self._random.sample(self.places, 2)
        if kind == "power":
            self._replace(one)
            return
        if kind in ("cut", "one way"):
            self._rack.cut(one.host, other.host, one_way=kind == "one way")
        elif kind == "reject":
            one.host.reject(other.host)
        elif kind == "slow":
            one.host.shape("eth0", "4mbit")
        elif kind == "no broker":
            self._rack.cut(one.host, self._broker)
        else:  # somebody is mistaken
            self._fleet.say_gone(self._broker, one.engine.member["incarnation"])
        self.serves(self._random.uniform(0.2, LONGEST_FAULT_S))
        self._rack.heal()
        one.host.accept()
        if kind == "slow":
            one.host.unshape("eth0")

    def _replace(self, place: Machine) -> None:
        """That machine is without power at once, and another one takes its place."""
        place.host.power_off()
        self.places.remove(place)
        self.serves(self._random.uniform(0.2, LONGEST_FAULT_S))
        self.places.append(self._machine(place.role))
        self.engines = [one.engine for one in self.places]

    def serves(self, seconds: float) -> None:
        """Time passes; prompts come and end."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for place in self.places:
                self.requests += len(place.engine.take_ended())
            time.sleep(0.1)

    def end_well(self) -> None:
        """No more prompts come: all end, everything is back, and all work together."""
        self._rack.heal()
        for engine in self.engines:
            engine.ask("load", 0)
        for engine in self.engines:
            engine.rests(BACK_S)
            self.requests += len(engine.take_ended())
        for place in self.places:
            if place.role != "kv_producer":
                place.engine.wait_until(lambda report: report["prefill_peers"] >= 1, "a P is there")
                place.engine.hands_over(10.0)
        for engine in self.engines:
            engine.rests(BACK_S)
            engine.keeps_free_blocks()


def test_b105_b106_b107_b108_no_fault_of_a_network_costs_an_answer_or_a_block(rack):
    """B105, B106, B107, B108. HOSTS_SEED repeats a run, as far as time allows."""
    seed = int(os.environ.get("HOSTS_SEED", random.randrange(1 << 32)))
    print(f"HOSTS_SEED={seed}")
    chaos = Chaos(rack, seed)
    begin = time.monotonic()
    while chaos.requests < REQUESTS or len(chaos.counts) < 5:
        assert time.monotonic() < begin + LASTS_S, (chaos.requests, chaos.counts)
        chaos.fault()
        chaos.serves(chaos._random.uniform(0.2, 4.0))
    chaos.end_well()
    print(f"{chaos.requests} prompts, {chaos.counts}, {time.monotonic() - begin:.0f} s")
