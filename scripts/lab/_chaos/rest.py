# SPDX-License-Identifier: Apache-2.0
"""Whether nothing is open in any engine (B20), and nothing has grown."""
import time
from dataclasses import dataclass

from _chaos.fleet import ChaosFleet

OPEN = ("unfinished", "waiting", "running", "swapped", "remote_prefilling", "prefill_sending", "quarantined",
         "block_tables", "used_blocks", "references", "tracked", "split_requests", "open_attempts", "held_blocks",
         "given_up", "resumed", "jobs", "live_handles", "agent_errors", "parked", "received", "deferred_frees",
         "fences", "parked_ids", "internal_requests", "front_requests")  # of V0, V1 or both
GROWING = ("peers", "sockets", "descriptors", "threads", "memory_bytes")
GROWING_V1 = {"worker_objects"}
REST_S = 100.0
# The allocator's, and vLLM's own caches; a worker's memory is left out on V1 (`looks_v1.count_objects`).
SLACK = {"memory_bytes": 48 << 20, "descriptors": 4, "worker_objects": 500}


@dataclass
class Rest:
    """`left`: what is not at rest, engine -> count -> its value. `stats`: all counts of each engine."""
    left: dict[str, dict[str, int]]
    stats: dict[str, dict[str, int]]

    @property
    def leaked_blocks(self) -> int:
        """The number of KV blocks that are not back in their pools."""
        return sum(counts.get("used_blocks", 0) for counts in self.left.values())


def come_to_rest(fleet: ChaosFleet, slow: float) -> Rest:
    """Waits until nothing is open in any engine, at most `slow` times REST_S."""
    deadline = time.monotonic() + slow * REST_S
    while True:
        stats = {slot.name: fleet.ask(slot, "stats") for slot in fleet.slots.values()}
        left = {name: counts for name in stats if (counts := _left(stats[name]))}
        if not left or time.monotonic() > deadline:
            return Rest(left, stats)
        _go_on(fleet)


def come_to_rest_as(fleet: ChaosFleet, before: Rest, slow: float) -> tuple[Rest, dict[str, dict[str, tuple[int, int]]]]:
    """Waits until all is at rest and nothing has `grown` since `before`, at most `slow` times REST_S: what belonged to
    a dead peer is given back with a delay. The counts at rest, and what has grown."""
    deadline = time.monotonic() + slow * REST_S
    while True:
        after = come_to_rest(fleet, slow)
        growth = grown(fleet, before, after)
        if not growth or time.monotonic() > deadline:
            return after, growth
        _go_on(fleet)


def _go_on(fleet: ChaosFleet) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        fleet.pump(until - time.monotonic())


def _left(stats: dict[str, int]) -> dict[str, int]:
    """What is open. By 0 and not by what the engine began with: a prefill engine has jobs as soon as it is known."""
    return {name: stats[name] for name in OPEN if stats.get(name)}


def grown(fleet: ChaosFleet, before: Rest, after: Rest) -> dict[str, dict[str, tuple[int, int]]]:
    """What is more than the most that any engine of the same role had after the calm run: engine -> count -> (is,
    was)."""
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for name, stats in after.stats.items():
        slot = fleet.slots[name]
        alike = [before.stats[other.name] for other in fleet.slots.values()
                 if other.role is slot.role and other.name in before.stats]
        for count in (*GROWING, *GROWING_V1 & stats.keys()):
            was = max(other[count] for other in alike)
            if stats[count] > was + SLACK.get(count, 0):
                result.setdefault(name, {})[count] = (stats[count], was)
    return result
