# SPDX-License-Identifier: Apache-2.0
"""What may break between a broker, a prefill engine P and a decode engine D on hosts of their own, as data, and what
comes of it, as figures.

`FAULTS` are all; tests run those of `in_tests`, `scripts/lab/hosts_faults.py` runs all. `run` breaks one in a fleet of
its own, which works meanwhile, and counts. Nothing in it takes a wrong answer or a lost block for a failure: `judge`
does.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tests.hosts.fleet import BLOCKS, Fleet, HostedEngine
from tests.hosts.rack import NET, Rack
from tests.hosts.wire import Wire
from tests.verdict import Leak, WrongAnswer

WORK_S, PROMPT_EVERY_S = 0.3, 0.25
BACK_S = 30.0  # until every block is back: a lease (5 s), the time to notice, and what a busy machine takes
AGAIN_S = 10.0  # until prompts are handed over again (B107)
TCP_AGAIN_S = 25.0  # where no connection ended: TCP sends again after a pause that has grown as long as the fault was
LOOK_FOR_S = 90.0  # how long that is waited for
AFTERWARDS = 8  # prompts in the end
RETRIES = 6  # of TCP: the kernel gives a silent connection up after about 25 s instead of 15 min
ROLES = {"p": "kv_producer", "d": "kv_consumer"}
_OPEN = ("open", "jobs", "waiting", "handles", "held", "reading")
_OPEN_GAUGES = ("decode_fenced", "holds", "parted")


class Site:
    """A broker, P and D, each on a host of its own, which are `hosts` b, p and d. `engines` are p and d."""

    def __init__(self, rack: Rack, retries: int | None = None) -> None:
        self.rack = rack
        self.hosts = {name: rack.host(name) for name in "bpd"}
        for host in self.hosts.values() if retries is not None else ():
            host.sysctl("ipv4/tcp_retries2", retries)
        self.fleet = Fleet(self.hosts["b"])
        p, d = self.fleet.pair(self.hosts["p"], self.hosts["d"])
        self.engines = {"p": p, "d": d}
        p.ask("work", WORK_S)
        self._ended: list[dict] = []  # the figures of Ds that were started again
        self._overwritten = 0  # in the memory of engines that were

    @property
    def p(self) -> HostedEngine:
        return self.engines["p"]

    @property
    def d(self) -> HostedEngine:
        return self.engines["d"]

    def start_again(self, name: str) -> None:
        """An operator ends that engine and starts another one on its host."""
        before = self.engines[name]
        self._overwritten += before.ask("overwritten")
        if name == "d":
            self._ended.append(before.figures())
        before.kill()
        after = self.engines[name] = self.fleet.engine(self.hosts[name], ROLES[name]).start()
        if name == "p":
            after.ask("work", WORK_S)

    def count_left(self) -> int:
        """How many blocks are not free in the two engines, and how much else is open there, once that is 0 or BACK_S
        have passed."""
        return _soon_none(lambda: sum(_count_left(engine.report()) for engine in self.engines.values()))

    def count_taken(self, but: str) -> int:
        """The same of the other engine than this, for its blocks alone: of one that can't be reached it has to
        remember what it was to do there."""
        [other] = self.engines.keys() - {but}
        return _soon_none(lambda: BLOCKS - self.engines[other].report()["free"])

    def figures(self) -> dict:
        """Those of all prompts, see `HostEngine.do_figures`."""
        all_figures = [*self._ended, self.d.figures()]
        return {**{name: sum(one[name] for one in all_figures) for name in ("remote", "local", "wrong", "unfinished")},
                "longest_s": max(one["longest_s"] for one in all_figures)}

    def count_overwritten(self) -> int:
        """Blocks that were written while they were free."""
        return self._overwritten + sum(engine.ask("overwritten") for engine in self.engines.values())


def _soon_none(count: Callable[[], int]) -> int:
    deadline_s = time.monotonic() + BACK_S
    while (left := count()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def _count_left(report: dict) -> int:
    return (BLOCKS - report["free"] + sum(report[name] for name in _OPEN)
            + sum(report["gauges"][name] for name in _OPEN_GAUGES) + (report["error"] is not None))


@dataclasses.dataclass(frozen=True)
class Fault:
    """`begin` breaks something, and `end` mends it `seconds` later. Prompts are handed over again within `back_s` from
    then. `is_loaded`: prompts come all the time; otherwise only afterwards. `retries`: of TCP. `lost`: the engine
    that is of no use until an operator starts it again, which `end` does; the other one has all blocks before."""
    name: str
    begin: Callable[[Site], None]
    end: Callable[[Site], None]
    seconds: float = 20.0
    back_s: float = AGAIN_S
    is_loaded: bool = True
    retries: int | None = None
    lost: str = ""
    in_tests: bool = True

    def __str__(self) -> str:
        return self.name if self.is_loaded else f"{self.name}, idle"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a fault. `prompts`, of which were prefilled by P `remote`, answered with KV that was not right
    `wrong`, never answered `unfinished`. `leaked`: blocks that did not come back, and what else was left open;
    `overwritten`: blocks that were written while they were free. `longest_s`: the longest prompt. `back_after_s`: from
    the end of the fault until P had prefilled a prompt that came later; None: not within LOOK_FOR_S. `afterwards`: how
    many of AFTERWARDS prompts in the end were handed over. `p_said` and `d_said`: `degraded`, before the end of the
    fault."""
    prompts: int
    remote: int
    wrong: int
    unfinished: int
    leaked: int
    overwritten: int
    longest_s: float
    back_after_s: float | None
    afterwards: int
    p_said: str
    d_said: str


def run(rack: Rack, fault: Fault) -> Outcome:
    """Break it in a fleet of its own, mend it, and count. Raises AssertionError where an engine has ended, or answers
    nothing."""
    site = Site(rack, fault.retries)
    if fault.is_loaded:
        site.d.ask("load", PROMPT_EVERY_S)
        site.p.wait_until(lambda report: report["jobs"] > 0, "P has work")
    fault.begin(site)
    time.sleep(fault.seconds)
    said = {name: engine.report()["degraded"] for name, engine in site.engines.items()}
    leaked = 0
    if fault.lost:
        site.d.ask("load", 0)
        leaked = site.count_taken(but=fault.lost)
    fault.end(site)
    back_after_s = _back_after_s(site.d)
    site.d.ask("load", 0)
    leaked += site.count_left()
    before = site.figures()["remote"]
    site.d.submit(AFTERWARDS, blocks=1)
    leaked += site.count_left()
    figures = site.figures()
    return Outcome(
        prompts=sum(figures[name] for name in ("remote", "local", "wrong", "unfinished")), remote=figures["remote"],
        wrong=figures["wrong"], unfinished=figures["unfinished"], leaked=leaked, overwritten=site.count_overwritten(),
        longest_s=round(figures["longest_s"], 2), back_after_s=back_after_s, afterwards=figures["remote"] - before,
        p_said=said["p"], d_said=said["d"])


def _back_after_s(d: HostedEngine) -> float | None:
    """Have D answer one prompt of a block after another until P has prefilled one. Returns the seconds that took."""
    begin_s = time.monotonic()
    how, names = "", set()
    while how != "remote":
        if not names:
            names = d.submit(1, blocks=1)
        time.sleep(0.05)
        if time.monotonic() > begin_s + LOOK_FOR_S:
            return None
        ended = d.ask("ended")
        for name in names & ended.keys():
            how, names = ended[name], set()
    return round(time.monotonic() - begin_s, 2)


def judge(fault: Fault, outcome: Outcome) -> None:
    """Raises AssertionError, or what is more than that, where it is not what must come of the fault."""
    if outcome.wrong or outcome.overwritten:
        raise WrongAnswer(f"{fault}: KV that is not right, or written into free blocks: {outcome}")
    if outcome.leaked:
        raise Leak(f"{fault}: {outcome}")
    assert outcome.unfinished == 0, f"{fault}: {outcome}"
    assert outcome.back_after_s is not None and outcome.back_after_s <= fault.back_s, f"{fault}: {outcome}"
    assert outcome.afterwards == AFTERWARDS, f"{fault}: {outcome}"


# The faults.


def cut(pair: str, seconds: float, **more: object) -> Fault:
    """Two of b, p and d do not reach each other ("p d"), or the second one not from the first ("p > d")."""
    one, *way, other = pair.split()
    return Fault(f"{pair}: cut for {seconds:g} s", lambda site: site.rack.cut(
        site.hosts[one], site.hosts[other], one_way=bool(way)), lambda site: site.rack.heal(), seconds, **more)


def rejects(one: str, other: str, **more: object) -> Fault:
    """A firewall resets whatever `other` sends to `one`."""
    return Fault(f"{one} rejects {other}", lambda site: site.hosts[one].reject(site.hosts[other]),
                 lambda site: site.hosts[one].accept(), 15.0, **more)


def bad_wire(what: str, at: str, wire: Wire, **more: object) -> Fault:
    """The cable of that host is a bad one."""
    return Fault(f"{what} at {at}", lambda site: site.rack.spoil(site.hosts[at], wire), lambda site: site.rack.heal(),
                 **more)


def without_address(at: str) -> Fault:
    """The address of that host is gone, and comes back, as by a lease that was not renewed in time."""
    return Fault(f"the address of {at} is gone for 15 s", lambda site: site.hosts[at].readdress(),
                 lambda site: site.hosts[at].readdress(site.hosts[at].ip), 15.0)


def other_address(at: str) -> Fault:
    """That host has another address for good, at which the engine does not listen. An operator starts it again."""
    return Fault(f"{at} has another address, started again",
                 lambda site: site.hosts[at].readdress(f"{NET}.{100 + site.hosts[at].number}"),
                 lambda site: site.start_again(at), lost=at, in_tests=False)  # there is a test of its own


def link_down(at: str, **more: object) -> Fault:
    """The interface of that host is down, and both ends of its cable notice it."""
    return Fault(f"the link of {at} is down for 15 s", lambda site: site.hosts[at].switch_off(),
                 lambda site: site.hosts[at].switch_on(), 15.0, **more)


def broker_killed(site: Site) -> None:
    site.fleet.kill_broker()


def broker_started(site: Site) -> None:
    site.fleet.start_broker(site.hosts["b"])


LOSS_5, LOSS_20, HOLE = Wire(loss=0.05), Wire(loss=0.2), Wire(max_bytes=1300)
SHUFFLED, FAR = Wire(twice=0.1, late=0.2), Wire(delay_s=0.05)

FAULTS: Sequence[Fault] = (
    rejects("d", "p", is_loaded=False), rejects("d", "p"), rejects("p", "d"),
    cut("p d", 60.0, is_loaded=False, retries=RETRIES), cut("p d", 60.0, retries=RETRIES), cut("p d", 35.0),
    cut("p > d", 20.0), cut("d > p", 20.0), cut("p b", 20.0), cut("d b", 20.0),
    bad_wire("5 % of all packets lost", "d", LOSS_5, in_tests=False),
    bad_wire("20 % of all packets lost", "d", LOSS_20),
    bad_wire("20 % of all packets lost", "p", LOSS_20, in_tests=False),
    bad_wire("packets of more than 1300 bytes lost", "d", HOLE, back_s=TCP_AGAIN_S),
    bad_wire("packets of more than 1300 bytes lost", "p", HOLE, back_s=TCP_AGAIN_S, in_tests=False),
    bad_wire("10 % of all packets doubled, 20 % out of order", "d", SHUFFLED),
    bad_wire("100 ms there and back", "d", FAR, in_tests=False),
    Fault("broker killed, started again after 20 s", broker_killed, broker_started),
    Fault("broker stopped for 20 s", lambda site: site.fleet.freeze_broker(), lambda site: site.fleet.thaw_broker()),
    without_address("p"), without_address("d"), link_down("p", in_tests=False), link_down("d"),
    other_address("p"), other_address("d"),
)
