# SPDX-License-Identifier: Apache-2.0
"""Prefill first, on P: prompts whose blocks it keeps so that a decode engine reads them.

Life of a hold: P has computed a prompt for a client that will bring it to a decode engine, and keeps its blocks under a
name that only the answer tells (`Holds.add`). The D that the client chose claims it, and gets the ids of the blocks.
From then on D may read them at any moment, so they are free again only by D's HoldDone or by D's death as a fact,
never by time; or, of a D on another machine, once P's generation has ended in which it was claimed (`generations`). P
is in doubt about a D that has not claimed it again for a lease. HoldDone may be lost, so P asks again and again, with
growing pauses, until D has sent it.

A hold that nobody has claimed is free again after `hold_s`, or earlier where the engine drains or needs its blocks:
nobody knows these. A later claim of it is denied. So is one for another prompt, and one by another attempt than that
which has it.

There may be tens of thousands. All that wait equally long for their next deadline are in one queue, in the order of
their deadlines, so that a turn looks at the first of each queue: for `hold_s`, `drain_s`, and the few pauses.
"""
import collections
import itertools
from typing import Any

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, HoldEnd, HoldEnded, ToDecode
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.moments import LONG_AGO, NEVER


class HoldLimits(msgspec.Struct, frozen=True):
    """How long an unclaimed hold lasts (0: nothing is held), also once the engine drains or needs blocks, the pauses
    between two questions to a D, and for how long a D that reads may be silent."""
    hold_s: float = 30.0
    drain_s: float = 3.0
    query_s: float = 1.0
    query_max_s: float = 10.0
    lease_s: float = 30.0


class _Hold:
    """One hold. Times are those of the caller's clock."""

    def __init__(self, name: m.Attempt, digest: bytes, block_ids: list[int]):
        self.name = name
        self.digest = digest
        self.block_ids = block_ids
        self.reader: m.Attempt | None = None  # the attempt that has claimed it
        self.is_cut = False  # its time was shortened
        self.lasts = False  # its D was asked whether it still reads
        self.due = self.wait_s = 0.0  # when its time is over, or D is asked; how long before that this was settled
        self.generation = 0  # of ours, in which it is claimed
        self.is_elsewhere = False  # the D that has claimed it
        self.is_closed = False  # it can't be read any longer
        self.lease_until = 0.0  # until when a D elsewhere need not claim it again; long ago: it seems dead


class Holds:
    """All holds of one engine. It counts in the caller's `dropped`. `generations` are the engine's."""

    def __init__(self, limits: HoldLimits, dropped: m.Counters, generations: Generations):
        self.limits = limits
        self.dropped = dropped
        self._generations = generations
        self._closing = False  # no claim is granted any more
        self._holds: dict[m.Attempt, _Hold] = {}
        self._queues: dict[float, dict[m.Attempt, None]] = {}  # by `wait_s`: names in the order of `due`
        self._read_by: dict[str, dict[m.Attempt, None]] = {}  # by incarnation: the names of what a D has claimed
        self._lasting: collections.Counter[int] = collections.Counter()  # in how many holds that last each block is

    # Calls of the engine.

    def add(self, now: float, name: m.Attempt, digest: bytes, block_ids: list[int]) -> None:
        """The caller keeps these blocks of a whole prompt, whose tokens have this digest, until the `HoldEnded` of this
        name, which must be a new one (ValueError)."""
        if name in self._holds:
            raise ValueError(f"there is a hold {name}")
        hold = self._holds[name] = _Hold(name, digest, list(block_ids))
        self._wait(now, hold, self.limits.hold_s)

    def drain(self, now: float) -> None:
        """The engine drains: what nobody has claimed lasts `drain_s` more, at most."""
        for hold in [one for one in self._unclaimed() if one.due > now + self.limits.drain_s]:
            hold.is_cut = True
            self._wait(now, hold, self.limits.drain_s)

    def end_old(self, now: float) -> list[Action]:
        """The engine needs blocks: end what nobody has claimed for `drain_s`. What is newer lasts as long, at most."""
        actions: list[Action] = []
        for hold in self._unclaimed():
            if now >= hold.due - hold.wait_s + self.limits.drain_s:
                actions += self._end(hold, HoldEnd.CLOSED)
        self.drain(now)
        return actions

    def close_unclaimed(self) -> list[Action]:
        """End the holds that nobody has claimed."""
        actions: list[Action] = []
        for hold in self._unclaimed():
            actions += self._end(hold, HoldEnd.CLOSED)
        return actions

    def close(self) -> list[Action]:
        """The engine, and with it the memory of its blocks, is about to end: end what nobody has claimed, and deny what
        is claimed and all that is asked for. The Ds use nothing that their reads bring from then on, and say when those
        have ended: `readers` is empty then."""
        self._closing = True
        actions = self.close_unclaimed()
        for hold in self._holds.values():
            actions += self._deny(hold.reader, hold.name, m.DenyReason.UNKNOWN)
        return actions

    # Messages of a D, and its death.

    def claim(self, now: float, sender: str, message: m.ClaimHold, is_elsewhere: bool = False) -> list[Action]:
        """D claims a hold. The same attempt may do so again, and gets the same answer. One that claims it in a newer
        generation reads nothing in the older one, now or later."""
        if message.attempt.incarnation != sender:
            return self._drop("hold_foreign")
        hold = self._holds.get(message.hold)
        reason = m.DenyReason.UNKNOWN if self._closing else self._reason_to_deny(hold, message)
        if reason is not None:
            self.dropped["hold_" + reason.value] += 1
            return self._deny(message.attempt, message.hold, reason)
        if hold.reader is not None and message.generation < hold.generation:
            return self._drop("hold_claim_old")
        hold.reader, hold.is_elsewhere = message.attempt, is_elsewhere
        hold.generation = message.generation
        if is_elsewhere:
            hold.lease_until = now + self.limits.lease_s
        self._read_by.setdefault(sender, {})[hold.name] = None
        self._wait(now, hold, self.limits.query_s)
        return [ToDecode(sender, m.HoldGrant(message.attempt, hold.name, hold.block_ids, hold.generation,
                                             self.limits.lease_s))]

    def done(self, sender: str, message: m.HoldDone) -> list[Action]:
        """D does not read it under this attempt. Of a hold that nobody has claimed: its claim was lost, or it does not
        want it."""
        hold = self._holds.get(message.hold)
        if message.attempt.incarnation != sender:
            return self._drop("hold_foreign")
        if hold is None or hold.reader not in (None, message.attempt):
            return self._drop("hold_done_unknown")
        return self._end(hold, HoldEnd.DROPPED if hold.reader is None else HoldEnd.DONE)

    def peer_dead(self, incarnation: str) -> list[Action]:
        """The process of a D is gone, as a fact: it reads nothing any more."""
        actions: list[Action] = []
        for name in list(self._read_by.get(incarnation, ())):
            actions += self._end(self._holds[name], HoldEnd.LOST)
        return actions

    def peer_seems_dead(self, incarnation: str) -> None:
        """A D on another machine can't be reached, and may live, and read, all the same."""
        for hold in map(self._holds.__getitem__, self._read_by.get(incarnation, ())):
            hold.lease_until = LONG_AGO

    # Our generations: see `generations.Half`. Of a D on this machine the reads go on through them.

    def doubts_at(self) -> float:
        """See Half."""
        return min((hold.lease_until for hold in self._claimed() if hold.is_elsewhere), default=NEVER)

    def is_busy(self, now: float) -> bool:
        """See Half."""
        return any(not hold.is_elsewhere or now < hold.lease_until for hold in self._closing_ones())

    def close_older(self) -> list[Action]:
        """Older generations are about to end: their readers are to stop."""
        actions: list[Action] = []
        for hold in self._closing_ones():
            hold.is_closed = True
            actions += self._deny(hold.reader, hold.name, m.DenyReason.UNKNOWN)
        return actions

    def retired(self) -> list[Action]:
        """See Half."""
        actions: list[Action] = []
        for hold in [one for one in self._claimed() if one.generation < self._generations.oldest]:
            if hold.is_elsewhere:
                actions += self._deny(hold.reader, hold.name, m.DenyReason.UNKNOWN) + self._end(hold, HoldEnd.LOST)
        return actions

    # Time.

    def handle_timeout(self, now: float) -> list[Action]:
        """Do what is due."""
        actions: list[Action] = []
        for hold in self._due(now):
            end = HoldEnd.CLOSED if hold.is_cut else HoldEnd.EXPIRED
            actions += self._end(hold, end) if hold.reader is None else self._query(now, hold)
        return actions

    def next_timeout(self) -> float | None:
        """When `handle_timeout` is next due; None where nothing is."""
        return min((self._holds[next(iter(queue))].due for queue in self._queues.values()), default=None)

    # State, for the engine and the tests.

    def has_claimed(self, attempt: m.Attempt, hold: m.Attempt) -> bool:
        """Whether this attempt has that hold."""
        found = self._holds.get(hold)
        return found is not None and found.reader == attempt

    def readers(self) -> set[str]:
        """The incarnations of the decode engines that may read here."""
        return set(self._read_by)

    def lasting_blocks(self) -> int:
        """How many blocks decode engines have claimed and not read within `query_s`; one that several holds share
        counts once."""
        return len(self._lasting)

    def states(self) -> dict[m.Attempt, m.Attempt | None]:
        """All holds, and the attempts that have claimed them."""
        return {name: hold.reader for name, hold in self._holds.items()}

    def __len__(self) -> int:
        return len(self._holds)

    # Inside.

    @staticmethod
    def _reason_to_deny(hold: _Hold | None, message: m.ClaimHold) -> m.DenyReason | None:
        if hold is None or hold.is_closed:
            return m.DenyReason.UNKNOWN
        if hold.digest != message.digest:
            return m.DenyReason.TOKENS
        return None if hold.reader in (None, message.attempt) else m.DenyReason.TAKEN

    def _unclaimed(self) -> list[_Hold]:
        return [hold for hold in self._holds.values() if hold.reader is None]

    def _claimed(self) -> list[_Hold]:
        return [self._holds[name] for names in self._read_by.values() for name in names]

    def _closing_ones(self) -> list[_Hold]:
        return [hold for hold in self._claimed() if self._generations.is_closing(hold.generation)]

    @staticmethod
    def _deny(attempt: m.Attempt, hold: m.Attempt, reason: m.DenyReason) -> list[Action]:
        return [ToDecode(attempt.incarnation, m.HoldDenied(attempt, hold, reason))]

    def _query(self, now: float, hold: _Hold) -> list[Action]:
        if not hold.lasts:
            hold.lasts = True
            self._lasting.update(hold.block_ids)
        self._wait(now, hold, min(self.limits.query_max_s, 2 * hold.wait_s))
        return [ToDecode(hold.reader.incarnation, m.HoldQuery(hold.reader, hold.name))]

    def _end(self, hold: _Hold, end: HoldEnd) -> list[Action]:
        del self._holds[hold.name]
        self._take_out(hold.name, hold.wait_s, self._queues)
        if hold.reader is not None:
            self._take_out(hold.name, hold.reader.incarnation, self._read_by)
        for block_id in hold.block_ids if hold.lasts else ():
            self._lasting[block_id] -= 1
            if not self._lasting[block_id]:
                del self._lasting[block_id]
        return [HoldEnded(hold.name, end)]

    def _wait(self, now: float, hold: _Hold, wait_s: float) -> None:
        """The hold is next due in `wait_s`."""
        self._take_out(hold.name, hold.wait_s, self._queues)
        hold.due, hold.wait_s = now + wait_s, wait_s
        self._queues.setdefault(wait_s, {})[hold.name] = None

    @staticmethod
    def _take_out(name: m.Attempt, key: Any, groups: dict[Any, dict[m.Attempt, None]]) -> None:
        """Take the name out of that group, if it is there, and the group away if it is empty then."""
        group = groups.get(key, {})
        group.pop(name, None)
        if not group:
            groups.pop(key, None)

    def _due(self, now: float) -> list[_Hold]:
        due: list[_Hold] = []
        for queue in self._queues.values():
            due += itertools.takewhile(lambda hold: hold.due <= now, map(self._holds.__getitem__, queue))
        return due

    def _drop(self, name: str) -> list[Action]:
        self.dropped[name] += 1
        return []


# How a client carries a hold from P to D: a field of P's answer and of the body for D, as upstream's proxies do it.
PARAMS_KEY = "kv_transfer_params"


def asks_for_hold(extra_args: Any) -> bool:
    """Whether a request asks that its prompt be kept for a decode engine, by the `extra_args` of its sampling
    parameters, which may hold anything."""
    return transfer_params(extra_args).get("do_remote_decode") is True


def named_hold(extra_args: Any) -> m.Attempt | None:
    """The hold whose blocks a request wants to be read; None where it names none. Nothing else in those parameters is
    used: an address that a client names is connected to by nobody."""
    params = transfer_params(extra_args)
    incarnation, name = params.get("remote_engine_id"), params.get("remote_request_id")
    if params.get("do_remote_prefill") is not True or not (isinstance(incarnation, str) and isinstance(name, str)):
        return None
    token, _, number = name.rpartition("#")
    if not (0 < len(incarnation) <= m.MAX_ID_CHARS and 0 < len(token) <= m.MAX_ID_CHARS and len(number) <= 18
            and number.isdigit() and (incarnation + name).isascii()):  # what JSON can hold, UTF-8 may not
        return None
    return m.Attempt(incarnation, token, int(number))


def hold_params(hold: m.Attempt) -> dict[str, Any]:
    """What the answer of P's request says, for D's: the fields that upstream's NixlConnector has there."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": hold.incarnation,
            "remote_request_id": f"{hold.request_id}#{hold.number}", "remote_block_ids": [], "remote_host": None,
            "remote_port": None}


def transfer_params(extra_args: Any) -> dict[str, Any]:
    """The kv_transfer_params among those of a request; empty where there are none, or no object."""
    params = extra_args.get(PARAMS_KEY) if isinstance(extra_args, dict) else None
    return params if isinstance(params, dict) else {}
