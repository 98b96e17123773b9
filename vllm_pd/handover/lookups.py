# SPDX-License-Identifier: Apache-2.0
"""Look-ups that V1's figures of its prefix cache must not count: those of peers' jobs, those made twice, and those of
prompts whose KV did not come."""
from __future__ import annotations

from typing import Any, NamedTuple


class PrefixLookups(NamedTuple):
    """Look-ups in the prefix cache, and at a peer: how many, of how many tokens, with how many hits."""
    requests: int = 0
    queries: int = 0
    hits: int = 0
    peer_requests: int = 0
    peer_queries: int = 0
    peer_hits: int = 0

    def __add__(self, other: PrefixLookups) -> PrefixLookups:
        return PrefixLookups(*map(sum, zip(self, other, strict=True)))

    def take_out_of(self, stats: Any) -> None:
        """V1 has counted these in `stats`, its SchedulerStats: count them no more."""
        for found, requests, queries, hits in (
                (stats.prefix_cache_stats, self.requests, self.queries, self.hits),
                (stats.connector_prefix_cache_stats, self.peer_requests, self.peer_queries, self.peer_hits)):
            if found is not None and found.requests:  # it counts none where prefix caching is off
                found.requests -= requests
                found.queries -= queries
                found.hits -= hits
                for source in found.hits_by_source:  # a connector of ours has one, V1's own cache none
                    found.hits_by_source[source] -= hits
