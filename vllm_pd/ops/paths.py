# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor --from ENGINE`: each path between an engine and its peers, tried by the two themselves.

A path is what one engine must be able to connect to at another by TCP, and each begins its own: a prefill engine to the
control address of a decode engine; each of two to the other's lifeline, and to where the other's ranks listen for KV
now. So the engines are asked twice: where they listen, and what comes of connecting there (`messages.TryAddresses`).
What they know of each other by themselves is added.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq

from vllm_pd.broker.members import Access, list_members
from vllm_pd.errors import ControlError
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.orders import choose_engine, introduce
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.messages import Member, Trial
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.call import Call

# Has engines, by incarnation, try addresses, for so many seconds. Returns the answers of those that give one.
Ask = Callable[[Mapping[str, tuple[str, ...]], float], dict[str, m.AddressesTried]]

ANSWER_S = 5.0
TRIAL_S = 10.0  # for an order: 3 s, and those of others before it
_LET_IN = "let {host} connect to port {port} of {where}"
_WORDS_AND_CURES = {
    Trial.REFUSED: ("is refused", f"nothing listens there any more, or a firewall rejects: {_LET_IN}"),
    Trial.SILENT: ("no answer", f"a firewall drops, there or on the way, or that machine is off: {_LET_IN}"),
    Trial.NO_ROUTE: ("no route, or a firewall forbids it", "if a firewall rejects there, as firewalld does, or on the "
                     f"way: {_LET_IN}; if that machine is off, start it; else give {{host}} a route to {{where}}, or "
                     "that engine an address that {host} reaches (`bind`, UCX_NET_DEVICES)"),
    Trial.FAILED: ("can't be tried from there", "engines of several machines need `keys`, and a `bind` that is no "
                   "loopback; the engine that tries needs free descriptors (ulimit -n)"),
    None: ("was not tried, for that engine answers no more", "run this again; it may have ended, or stand still"),
}
_FAULT_CURE = ("that of the lines above, if there are any; else look again in a minute: it may be over. What stays has "
               "another reason than TCP: an engine that is stopped, another key, a network of KV that is not TCP")


@dataclass(frozen=True)
class Path:
    """What `by` must be able to connect to at `to`. `kind` is "control", "lifeline" or "kv"."""
    kind: str
    by: Member
    to: Member
    address: str

    def judge(self, trial: Trial | None) -> Finding | None:
        """What is wrong where that has come of it, None: nothing was tried. Returns None where it is open."""
        if trial is Trial.OPEN:
            return None
        words, cure = _WORDS_AND_CURES[trial]
        where, port = _split(self.address)
        return Finding(self.kind, f"from {introduce(self.by)} to {self.address} of {introduce(self.to)}: {words}",
                       cure.format(host=_split(self.by.address)[0], port=port, where=where))


def meet(one: Member, other: Member) -> bool:
    """Whether the two are to work together."""
    are_a_pair = one.role.prefills and other.role.decodes or one.role.decodes and other.role.prefills
    return (one.incarnation != other.incarnation and are_a_pair
            and one.fingerprint.first_difference(other.fingerprint) is None)


def paths(by: Member, to: Member, listens: Iterable[str]) -> list[Path]:
    """All from `by` to `to`, whose ranks listen there. An address of the loopback is for engines of that machine."""
    kv = [one for one in listens if not is_loopback(_split(one)[0]) or is_loopback(_split(by.address)[0])]
    control = [Path("control", by, to, to.address)] if by.role.prefills and to.role.decodes else []
    lifeline = [Path("lifeline", by, to, to.lifeline)] if to.lifeline else []
    return [*control, *lifeline, *(Path("kv", by, to, one) for one in kv)]


def check_paths(engine: str, broker: str, access: Access) -> Iterator[Finding]:
    """The paths between that engine and its peers, both ways. Raises ConfigError for an engine that is not registered,
    and what `list_members` raises."""
    members = list_members(broker, ANSWER_S, access).members
    ours = choose_engine(engine, members)
    peers = [member for member in members if meet(ours, member)]
    with EngineCalls(access, [ours, *peers]) as calls:
        yield from judge_paths(ours, peers, calls.ask)


def judge_paths(ours: Member, peers: Sequence[Member], ask: Ask) -> Iterator[Finding]:
    """What is wrong between the engine and each of its peers, or that nothing is."""
    if not peers:
        yield Finding("paths", f"{introduce(ours)} has no peer", "start one that fits, with this broker")
    known = ask({member.incarnation: () for member in (ours, *peers)}, ANSWER_S)
    for member in (ours, *peers):
        if member.incarnation not in known:
            yield Finding("control", f"from here to {introduce(member)}: no answer, so it tries nothing, and where it "
                          "listens for KV is not known", "run this where that address can be reached; the engine may "
                          "also stand still, or have another key or an older release")
    trials = _try([path for peer in peers for pair in ((ours, peer), (peer, ours)) for path in _between(*pair, known)],
                  ask)
    for peer in peers:
        yield from _judge_pair(ours, peer, known, trials)


def _between(by: Member, to: Member, known: Mapping[str, m.AddressesTried]) -> list[Path]:
    """The paths from one to the other, if the one can be asked."""
    if by.incarnation not in known:
        return []
    return paths(by, to, known[to.incarnation].listens if to.incarnation in known else ())


def _judge_pair(ours: Member, peer: Member, known: Mapping[str, m.AddressesTried],
                trials: Mapping[Path, Trial]) -> Iterator[Finding]:
    """What is wrong between the two, or that nothing is."""
    wanted = [*_between(ours, peer, known), *_between(peer, ours, known)]
    wrong = [finding for path in wanted if (finding := path.judge(trials.get(path))) is not None]
    for by, to in ((ours, peer), (peer, ours)):
        if by.incarnation in known and (fault := known[by.incarnation].faults.get(to.incarnation)):
            wrong.append(Finding("paths", f"{introduce(by)} says of {introduce(to)}: {fault}", _FAULT_CURE))
    yield from wrong
    if not wrong and {ours.incarnation, peer.incarnation} <= known.keys():
        counts = ", ".join(f"{sum(path.kind == kind for path in wanted)} of {kind}"
                           for kind in ("control", "lifeline", "kv"))
        yield Finding("paths", f"{introduce(ours)} and {introduce(peer)}: all are open, {counts}")


def _try(wanted: Iterable[Path], ask: Ask) -> dict[Path, Trial]:
    """What has come of each path, tried by the engine from which it goes. Those of one that does not answer are left
    out."""
    left: dict[str, list[Path]] = {}
    for path in wanted:
        left.setdefault(path.by.incarnation, []).append(path)
    found: dict[Path, Trial] = {}
    while left:
        now = {name: ones[:m.MAX_TRIED] for name, ones in left.items()}
        answers = ask({name: tuple(path.address for path in ones) for name, ones in now.items()}, TRIAL_S)
        for name, answer in answers.items():
            found.update((path, answer.trials[path.address]) for path in now[name])
        left = {name: ones[m.MAX_TRIED:] for name, ones in left.items()
                if name in answers and len(ones) > m.MAX_TRIED}
    return found


class EngineCalls:
    """Connections to the control sockets of these engines. A context manager."""

    def __init__(self, access: Access, members: Iterable[Member]):
        keys = access.load_keys()
        self._context = zmq.Context()
        self._calls: dict[str, Call] = {}
        for member in members:
            with contextlib.suppress(ControlError):  # what it has registered is no address: it does not answer
                self._calls[member.incarnation] = Call("engine", member.address, keys, only_connected=False,
                                                       context=self._context)

    def __enter__(self) -> EngineCalls:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for call in self._calls.values():
            call.close()
        self._context.term()

    def ask(self, addresses: Mapping[str, tuple[str, ...]], timeout_s: float) -> dict[str, m.AddressesTried]:
        """Have each of these engines try its addresses, all at once. The answers of those that give one in time."""
        deadline = time.monotonic() + timeout_s
        known = {name: ones for name, ones in addresses.items() if name in self._calls}
        for name, ones in known.items():
            self._calls[name].say(m.TryAddresses(ones), deadline)
        answers = {name: self._answer(name, ones, deadline) for name, ones in known.items()}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _answer(self, name: str, addresses: Sequence[str], deadline: float) -> m.AddressesTried | None:
        """That of the engine, to this question."""
        with contextlib.suppress(ControlError):  # another protocol, or no engine
            for sender, answer in self._calls[name].answers(deadline):
                if sender == name and isinstance(answer, m.AddressesTried) and answer.trials.keys() == set(addresses):
                    return answer
        return None


def _split(url: str) -> tuple[str, int]:
    """(host, port) of what an engine says is its address."""
    try:
        parts = urlsplit(url)
        return parts.hostname or url, parts.port or 0
    except ValueError:
        return url, 0
