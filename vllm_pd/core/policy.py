# SPDX-License-Identifier: Apache-2.0
"""Where a prompt is prefilled: a pure function of the request and the present state of the cluster.

The checks ask in this order: is it worth it, may it, can it. The first "no" is the reason that is counted.
"""
from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Why a prompt is prefilled where it is. LENGTH is the reason for a peer, the others are reasons to stay here."""
    LENGTH = "length"
    THRESHOLD = "threshold"  # too short to be worth it
    FEATURE = "feature"  # something in the request can't go remote
    RETRY = "retry"  # it has been remote as often, or as long, as it may
    BROKER = "broker"  # the broker does not answer
    PEER = "peer"  # no prefill engine that fits is alive
    QUEUE = "queue"  # too many jobs wait already
    CAP = "cap"  # too many blocks, or seats in the batch, are set aside already


class PolicyConfig(msgspec.Struct, frozen=True):
    """The operator's bounds; see the configuration keys of the same names."""
    max_local_prefill_tokens: int = 1000
    max_queue_length: int = 64
    max_parked_fraction: float = 0.5
    attempts: int = 2


class PolicyInput(msgspec.Struct, frozen=True):
    """One request, and the present state. `parked_blocks` counts quarantined ones too; `blocks` are those
    this request would set aside beyond its prefix hit; `total_blocks` is the size of the pool, `total_requests` the
    most that may run at a time. `prefill_peers` are those that have not failed at it; `time_left_s` is what is left
    of the time that all its attempts may take together."""
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


class Decision(msgspec.Struct, frozen=True):
    """Whether a peer is to prefill the prompt, and why."""
    remote: bool
    reason: Reason


def decide(request: PolicyInput, config: PolicyConfig) -> Decision:
    """Whether this prompt is prefilled by another engine."""
    reason = _reason_to_stay(request, config)
    return Decision(True, Reason.LENGTH) if reason is None else Decision(False, reason)


def _reason_to_stay(request: PolicyInput, config: PolicyConfig) -> "Reason | None":
    if request.prompt_tokens - request.cached_tokens <= config.max_local_prefill_tokens:
        return Reason.THRESHOLD
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
    if request.parked_blocks + request.blocks > config.max_parked_fraction * request.total_blocks:
        return Reason.CAP
    if request.parked_requests + 1 > most_parked_requests(config.max_parked_fraction, request.total_requests):
        return Reason.CAP  # a parked request has a seat in the batch, and others need some, peers' jobs among them
    return None


def most_parked_requests(max_parked_fraction: float, total_requests: int) -> int:
    """How many of `total_requests` seats parked requests may take; one at the least."""
    return max(1, int(max_parked_fraction * total_requests))
