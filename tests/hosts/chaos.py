# SPDX-License-Identifier: Apache-2.0
"""A fleet over three machines whose network, power, addresses and broker fail again and again, while prompts come. The
tests run a short one, `scripts/lab/hosts_faults.py` a long one."""
from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import time

from tests.hosts.fleet import Fleet, HostedEngine
from tests.hosts.rack import NET, Host, Rack
from tests.hosts.wire import Wire

PROMPT_EVERY_S, WORK_S = 0.2, 0.1
LONGEST_FAULT_S, LONGEST_CALM_S = 12.0, 4.0
BACK_S = 40.0
KINDS = ("cut", "cut", "one way", "reject", "slow", "bad wire", "link down", "address", "no broker", "broker killed",
         "broker stopped", "power", "gone")
FEWEST_KINDS = 5
BAD_WIRE = Wire(delay_s=0.02, loss=0.05, twice=0.05, late=0.1)


@dataclasses.dataclass
class Machine:
    """A place of the fleet: one machine after another, each at an address of its own, with the same engine."""
    role: str
    host: Host
    engine: HostedEngine


class Chaos:
    """The fleet, and what is done to it. `counts` are the faults, `ends` how prompts ended. All that is drawn depends
    on the seed; how long anything takes does not."""

    def __init__(self, rack: Rack, seed: int) -> None:
        self._rack, self._random = rack, random.Random(seed)
        self._broker = rack.host("b")
        self._fleet = Fleet(self._broker)
        self._numbers = itertools.count()
        self.places = [self._machine(role) for role in ("kv_producer", "kv_consumer", "kv_both")]
        self.ends: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def requests(self) -> int:
        """How many prompts have ended."""
        return self.ends.total()

    @property
    def longest_s(self) -> float:
        """The longest prompt of the engines that are there."""
        return max(place.engine.figures()["longest_s"] for place in self.places)

    def run(self, requests: int, lasts_s: float) -> None:
        """Break and mend until so many prompts have ended and FEWEST_KINDS kinds of faults were there; then all ends
        well. Raises AssertionError otherwise, and after `lasts_s`."""
        begin_s = time.monotonic()
        while self.requests < requests or len(self.counts) < FEWEST_KINDS:
            assert time.monotonic() < begin_s + lasts_s, (self.ends, self.counts)
            self._fault()
            self._serves(self._random.uniform(0.2, LONGEST_CALM_S))
        self._end_well()

    def _machine(self, role: str) -> Machine:
        host = self._rack.host(f"m{next(self._numbers)}")
        machine = Machine(role, host, self._fleet.engine(host, role).start())
        machine.engine.ask("work", WORK_S)
        if role != "kv_producer":
            machine.engine.ask("load", PROMPT_EVERY_S)
        return machine

    def _fault(self) -> None:
        """Something breaks, stays broken for a while, and is mended."""
        kind = self._random.choice(KINDS)
        self.counts[kind] += 1
        one, other = self._random.sample(self.places, 2)
        if kind == "power":
            self._replace(one)
            return
        address = one.host.ip
        if kind in ("cut", "one way"):
            self._rack.cut(one.host, other.host, one_way=kind == "one way")
        elif kind == "reject":
            one.host.reject(other.host)
        elif kind == "slow":
            one.host.shape("eth0", "4mbit")
        elif kind == "bad wire":
            self._rack.spoil(one.host, BAD_WIRE)
        elif kind == "link down":
            one.host.switch_off()
        elif kind == "address":  # another one, and then the former one again
            one.host.readdress(f"{NET}.{100 + one.host.number}")
        elif kind == "no broker":
            self._rack.cut(one.host, self._broker)
        elif kind == "broker killed":
            self._fleet.kill_broker()
        elif kind == "broker stopped":
            self._fleet.freeze_broker()
        else:  # somebody is mistaken
            self._fleet.say_gone(self._broker, one.engine.member["incarnation"])
        self._serves(self._random.uniform(0.2, LONGEST_FAULT_S))
        self._rack.heal()
        one.host.accept()
        if kind == "slow":
            one.host.unshape("eth0")
        elif kind == "link down":
            one.host.switch_on()
        elif kind == "address":
            one.host.readdress(address)
        elif kind == "broker killed":
            self._fleet.start_broker(self._broker)
        elif kind == "broker stopped":
            self._fleet.thaw_broker()

    def _replace(self, place: Machine) -> None:
        """That machine is without power at once, and another one takes its place."""
        place.host.power_off()
        self.places.remove(place)
        self._serves(self._random.uniform(0.2, LONGEST_FAULT_S))
        self.places.append(self._machine(place.role))

    def _serves(self, seconds: float) -> None:
        """Time passes; prompts come and end."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for place in self.places:
                self.ends.update(place.engine.take_ended().values())
            time.sleep(0.1)

    def _end_well(self) -> None:
        """No more prompts come: all end, everything is back, and all work together."""
        self._rack.heal()
        engines = [place.engine for place in self.places]
        for engine in engines:
            engine.ask("load", 0)
        for engine in engines:
            engine.rests(BACK_S)
            self.ends.update(engine.take_ended().values())
        for place in self.places:
            if place.role != "kv_producer":
                place.engine.wait_until(lambda report: report["prefill_peers"] >= 1, "a P is there")
                place.engine.hands_over(10.0)
        for engine in engines:
            engine.rests(BACK_S)
            engine.keeps_free_blocks()
