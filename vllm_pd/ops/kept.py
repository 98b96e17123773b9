# SPDX-License-Identifier: Apache-2.0
"""Whether what a fleet has on NATS outlives one of the servers."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_pd.broker.members import Access
from vllm_pd.errors import ControlError
from vllm_pd.ops.finding import Finding

if TYPE_CHECKING:
    from vllm_pd.broker.nats_store import Kept

ANSWER_S = 5.0


def check_kept(broker: str, access: Access) -> Iterator[Finding]:
    """On how many servers the registry and the queue are, of a broker at this URL of NATS that has just answered."""
    from vllm_pd.broker.nats_members import find_kept
    try:
        kept = find_kept(access.nats("--broker", broker), ANSWER_S)
    except ControlError as error:
        yield Finding("nats", str(error), "run this again: a moment ago it could be asked for the engines")
    else:
        yield judge_kept(kept)


def judge_kept(kept: Kept) -> Finding:
    """Whether any one server may go. As many replicas as an engine asks for outlive one."""
    from vllm_pd.broker.nats_store import REPLICAS
    said = ", ".join(f"{stream.name} has {stream.current} of {stream.replicas}" for stream in kept.streams)
    fact = (f"{kept.servers} servers in the cluster; replicas that are current: {said}" if kept.servers > 1 else
            f"one server keeps {' and '.join(stream.name for stream in kept.streams)}: without it prompts are "
            "prefilled locally")
    few = [stream.name for stream in kept.streams if stream.replicas < REPLICAS]
    if few:
        add = "" if kept.servers >= REPLICAS else "make it a cluster of three servers, any one of which may go; then "
        return Finding("nats", fact, hint=add + ", ".join(f"nats stream update {name} --replicas={REPLICAS}"
                                                          for name in few))
    if any(stream.current < stream.replicas for stream in kept.streams):
        return Finding("nats", fact, hint="start the servers that are down; one that has just come is current soon")
    return Finding("nats", fact)
