# SPDX-License-Identifier: Apache-2.0
"""Copies, canonical forms and the clock of the core's objects, without knowing what they do.

Time stands still at `NOW`: instead of moving the clock, `shift` moves every moment that an object holds into the past.
So two states that differ by nothing but the hour are one state. Each float attribute of the core is named below as a
moment or as a duration; one that is in neither list stops the proof until somebody says which it is.
"""
import collections
from enum import Enum
from typing import Any

import msgspec

from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.messages import Timings

NOW = 10_000.0
PAST_S = 500.0  # what lies further back than this is never asked about

MOMENTS = frozenset({
    # DecodeProtocol, its records
    "_broker_lost_at", "submitted", "deadline", "next_put", "granted_at", "media_sent_at", "lease_until", "next_cancel",
    "peers_lost_at", "writing_at",
    # PrefillProtocol, its jobs, the peers of its Peering
    "claimed_at", "next_claim", "peering_until", "next_renew", "renewed_at", "next_hello", "asked_at",
    "last_heard", "missing_since", "tried_until",
    # Holds
    "due",
    # HoldReads, Generations
    "stopping_at", "cancelled_at", "next_ask", "unproven_until", "_not_before", "_closes_at", "_next_look", "_last_at",
    "_failed_at",
})
DURATIONS = frozenset({"cancel_retry_s", "lease_s", "claim_s", "wait_s", "claim_wait_s", "claim_retry_s", "_pause_s",
                       "add_pause_s", "look_s"})

# What no decision depends on: statistics, texts, and bound methods that every copy has of its own.
SHARED = frozenset({"shape", "_handlers"})
HIDDEN = SHARED | frozenset({"counters", "dropped", "mismatch", "member", "limits", "_generations", "granted_at",
                             "writing_at", "claim_s", "_done", "_done_order"})

_ATOMS = (str, bytes, int, float, bool, type(None), Enum, frozenset)


def clone(value: Any, known: dict[int, Any] | None = None) -> Any:
    """A copy that shares nothing which anybody changes. `known`: the copies of the `Generations` met so far, which the
    parts of an engine share."""
    if isinstance(value, (*_ATOMS, msgspec.Struct)):
        return value
    if isinstance(value, collections.Counter):
        return value.copy()
    known = {} if known is None else known
    if isinstance(value, dict):
        return {key: clone(item, known) for key, item in value.items()}
    if isinstance(value, set):
        return set(value)
    if isinstance(value, collections.deque):
        return collections.deque((clone(item, known) for item in value), value.maxlen)
    if isinstance(value, list):
        return [clone(item, known) for item in value]
    if isinstance(value, tuple):
        items = [clone(item, known) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if not isinstance(value, Generations):
        return _clone_object(value, known)
    if id(value) not in known:
        known[id(value)] = _clone_object(value, known)
    return known[id(value)]


def _clone_object(value: Any, known: dict[int, Any]) -> Any:
    new = object.__new__(type(value))
    for key, item in vars(value).items():
        new.__dict__[key] = item if key in SHARED else clone(item, known)
    if "_handlers" in value.__dict__:
        new._handlers = {kind: getattr(new, handler.__name__) for kind, handler in value._handlers.items()}
    return new


def canonical(value: Any) -> Any:
    """The same for two objects that will behave in the same way, and hashable."""
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Timings):
        return value.measured  # whether P's word has come; the rest is for people
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, *(canonical(item) for item in msgspec.structs.astuple(value))
    if isinstance(value, dict):
        return frozenset((canonical(key), canonical(item)) for key, item in value.items())
    if isinstance(value, set):
        return frozenset(map(canonical, value))
    if isinstance(value, list | tuple | collections.deque):
        return tuple(map(canonical, value))
    hidden = HIDDEN
    if getattr(value, "missing_since", 0.0) is None:  # then it is looked at only after something newer
        hidden = HIDDEN | {"last_heard"}
    return tuple((key, canonical(item)) for key, item in vars(value).items() if key not in hidden)


def shift(value: Any, seconds: float) -> None:
    """Let time pass for an object and all that it holds."""
    if isinstance(value, dict):
        for item in value.values():
            shift(item, seconds)
    elif isinstance(value, list | tuple | collections.deque):
        for item in value:
            shift(item, seconds)
    elif not isinstance(value, (*_ATOMS, msgspec.Struct, set)):
        for key, item in vars(value).items():
            if key in SHARED or key == "_generations":  # whose owner is shifted, too
                continue
            if isinstance(item, float) and not isinstance(item, bool):
                _shift_float(value, key, item, seconds)
            else:
                shift(item, seconds)


def _shift_float(owner: Any, key: str, item: float, seconds: float) -> None:
    assert key in MOMENTS or key in DURATIONS, (
        f"{type(owner).__name__}.{key} is new: say in {__name__} whether it is a moment or a duration")
    if key in MOMENTS and item != 0.0:  # 0.0 stands for never
        setattr(owner, key, max(item - seconds, NOW - PAST_S))
