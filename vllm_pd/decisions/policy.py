# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is prefilled: a pure function of the request and the present state of the cluster.

The checks ask in this order: is it worth it, may it, can it. The first "no" is the reason that is counted.
"""
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from vllm_pd.decisions.expected import Expected
from vllm_pd.protocol.holds import PARAMS_KEY

PLACE_KEY = "pd"  # the key of PARAMS_KEY that asks for a place


class AskedPlace(StrEnum):
    """Where a request asks to have its prompt prefilled. All but OTHER may be written in it."""
    REMOTE = "remote"  # by a peer, though it is short
    LOCAL = "local"  # here
    AUTO = "auto"  # where the policy says, as without asking
    OTHER = "other"  # a value that is none of these: as AUTO


PLACES = (AskedPlace.REMOTE, AskedPlace.LOCAL, AskedPlace.AUTO)


class Reason(StrEnum):
    """Why a prompt is prefilled where it is. HELD, LENGTH and ITL are reasons for a peer, TTFT, ASKED and OWN are
    ones for either, the others are reasons to stay here."""
    ASKED = "asked"  # the request asks for this place
    HELD = "held"  # a prefill engine has computed it and holds it
    LENGTH = "length"
    TTFT = "ttft"  # auto: the first token comes sooner there, or sooner here
    ITL = "itl"  # auto: here it would make running decodes wait longer than their target
    OWN = "own"  # the operator's own class wants it there, or here
    THRESHOLD = "threshold"  # too short to be worth it, or to fill a block that could be written
    FEATURE = "feature"  # something in the request can't go remote
    ROLE = "role"  # it asks for a peer, but this engine hands nothing over
    RETRY = "retry"  # it has been remote as often, or as long, as it may
    BROKER = "broker"  # the broker does not answer
    PEER = "peer"  # no prefill engine that fits is alive
    QUEUE = "queue"  # too many jobs wait already; auto: it would not be done there in time
    CAP = "cap"  # too many blocks, or seats in the batch, are set aside already


class PolicyConfig(msgspec.Struct, frozen=True):
    """The operator's bounds; see the configuration keys of the same names. With `auto` the expected times decide, by
    TTFT alone where `itl_target_s` is None, and `max_local_prefill_tokens` only where there are none."""
    max_local_prefill_tokens: int = 1000
    max_queue_length: int = 64
    max_parked_fraction: float = 0.5
    attempts: int = 2
    auto: bool = False
    itl_target_s: float | None = None


class PolicyInput(msgspec.Struct, frozen=True):
    """One request, and the present state. `parked_blocks` counts quarantined ones too; `blocks` are those that this
    request would set aside beyond its prefix hit, and `whole_blocks` those of them that it fills; `total_blocks` is
    the size of the pool, `total_requests` the most that may run at a time. `prefill_peers` are those that have not
    failed at it; `time_left_s` is what is left of the time that all its attempts may take together. `expected` is used
    with `auto` only; None: nothing is measured yet, or there is no peer."""
    prompt_tokens: int
    cached_tokens: int
    blocks: int
    can_go_remote: bool
    attempts_made: int
    time_left_s: float
    broker_up: bool
    prefill_peers: int
    queue_length: int
    parked_blocks: int
    total_blocks: int
    parked_requests: int
    total_requests: int
    expected: Expected | None = None
    asked: AskedPlace = AskedPlace.AUTO
    whole_blocks: int = 1
    has_media_room: bool = True  # whether its images and the like may be out beside those of others


class Decision(msgspec.Struct, frozen=True):
    """Whether a peer is to prefill the prompt, and why. `expected`: what was compared, if anything was."""
    remote: bool
    reason: Reason
    expected: Expected | None = None


class OwnPolicy(Protocol):
    """A class of the operator's, named by the setting `policy` and made with the bounds of the engine's settings. It
    says which prompts are worth a peer; whether one may and can go there is decided as ever."""

    def __init__(self, config: PolicyConfig) -> None: ...

    def wants_peer(self, prompt: PolicyInput) -> bool:
        """Whether a peer is to prefill this prompt. Asked in the step loop, again and again while the prompt waits: it
        must take microseconds, wait for nothing, and change nothing that another answer depends on."""


def asked_place(extra_args: Any) -> AskedPlace:
    """The place that a request asks for, from the `extra_args` of its sampling parameters, which may hold anything."""
    params = extra_args.get(PARAMS_KEY) if isinstance(extra_args, dict) else None
    place = params.get(PLACE_KEY, AskedPlace.AUTO) if isinstance(params, dict) else AskedPlace.AUTO
    return AskedPlace(place) if isinstance(place, str) and place in PLACES else AskedPlace.OTHER


def may_read_hold(request: PolicyInput, config: PolicyConfig) -> bool:
    """Whether a prompt is read from the prefill engine that holds it, by a `request` with 1 in `prefill_peers` if that
    engine can be read from. Not where it asks to be computed here, and not for a single block. How many requests are
    parked does not count: the read is short, the prompt is computed already, and in an engine that reads holds (V1) a
    parked request has no seat in the batch."""
    request = msgspec.structs.replace(request, broker_up=True, queue_length=0, parked_requests=0)
    return (request.asked is not AskedPlace.LOCAL and request.blocks > 1 and _reason_to_stay(request, config) is None)


def decide(request: PolicyInput, config: PolicyConfig, own: OwnPolicy | None = None) -> Decision:
    """Whether this prompt is prefilled by another engine. `own`: the operator's class, which decides what is worth
    it."""
    wanted = worth(request, config, own)
    reason = _reason_to_stay(request, config) if wanted.remote else wanted.reason
    return wanted if reason is None else Decision(False, reason, wanted.expected)


def worth(request: PolicyInput, config: PolicyConfig, own: OwnPolicy | None = None) -> Decision:
    """Where the prompt should be prefilled if it may be prefilled anywhere."""
    expected = request.expected
    if request.asked is AskedPlace.LOCAL:
        return Decision(False, Reason.ASKED, expected)
    if request.whole_blocks < 1:  # a peer's part of a block brings nothing: the last token is computed here anyway
        return Decision(False, Reason.THRESHOLD, expected)
    if request.asked is AskedPlace.REMOTE:
        return Decision(True, Reason.ASKED, expected)
    if own is not None:
        return Decision(own.wants_peer(request), Reason.OWN, expected)
    if not config.auto or expected is None:
        long = request.prompt_tokens - request.cached_tokens > config.max_local_prefill_tokens
        return Decision(long, Reason.LENGTH if long else Reason.THRESHOLD)
    if expected.breaks(config.itl_target_s):
        in_time = expected.there_s < request.time_left_s or request.time_left_s <= 0  # that is reason RETRY
        return Decision(in_time, Reason.ITL if in_time else Reason.QUEUE, expected)
    return Decision(expected.sooner_there, Reason.TTFT, expected)


def _reason_to_stay(request: PolicyInput, config: PolicyConfig) -> "Reason | None":
    """Why a prompt that is worth a peer can't go to one: the first reason, in the module's order; None where it can."""
    if not request.can_go_remote:
        return Reason.FEATURE
    if request.attempts_made >= config.attempts or request.time_left_s <= 0:
        return Reason.RETRY
    if not request.broker_up:
        return Reason.BROKER
    if request.prefill_peers < 1:
        return Reason.PEER
    if request.queue_length >= config.max_queue_length:
        return Reason.QUEUE
    if not request.has_media_room:
        return Reason.CAP
    if request.parked_blocks + request.blocks > config.max_parked_fraction * request.total_blocks:
        return Reason.CAP
    if request.parked_requests + 1 > most_parked_requests(config.max_parked_fraction, request.total_requests):
        return Reason.CAP  # a parked request has a seat in the batch, and others need some, peers' jobs among them
    return None


def most_parked_requests(max_parked_fraction: float, total_requests: int) -> int:
    """How many of `total_requests` seats parked requests may take; one at the least."""
    return max(1, int(max_parked_fraction * total_requests))
