# SPDX-License-Identifier: Apache-2.0
"""What the path between a decode engine and each prefill engine costs a prompt. Pure.

Each hand-over measures its path: the round trip of the claim, and how long the writing of the KV went on after the
prompt was computed. The median of the last ones counts, so that one long pause of an engine changes nothing. A prefill
engine of which nothing was measured counts as those of its zone do on average; in this engine's own zone, and where
nothing is known of its zone, it costs nothing, so that it is tried.

A cost goes to 0, halfway in `HALF_LIFE_S` without a hand-over. So a path that was slow once is tried again: one that
took a hundred times as long as the nearest after about six minutes.
"""
import collections
import statistics
from collections.abc import Collection, Mapping

from vllm_pd.decisions.measured import MIN_TOKENS
from vllm_pd.protocol import messages as m

HALF_LIFE_S = 60.0
LAST_HAND_OVERS = 3  # of one prefill engine
MAX_MEASURED = 1024  # prefill engines; the one that was measured last is forgotten last
# Paths are alike unless one takes so much longer than the nearest: what is measured of equal paths differs as well.
ALIKE_FACTOR = 2.0
ALIKE_S = 0.02
COMPARED_TOKENS = 1000  # of a prompt, where an operator asks how far the prefill engines are


class _Path:
    """The path to one prefill engine, in `zone`, as its last hand-overs have measured it, at `measured_at` the last."""

    def __init__(self) -> None:
        self.zone = ""
        self.measured_at = 0.0
        self._round_trips_s: collections.deque[float] = collections.deque(maxlen=LAST_HAND_OVERS)
        # Of each write after a prompt was computed: seconds, the prompt's tokens, those of this last write.
        self._writes: collections.deque[tuple[float, int, float]] = collections.deque(maxlen=LAST_HAND_OVERS)
        # Of the last hand-overs: the shortest round trip, the last tokens, and the seconds for each token of both.
        self._round_trip_s = self._last_tokens = self._token_s = self._last_token_s = 0.0
        self._rates: collections.deque[float] = collections.deque(maxlen=LAST_HAND_OVERS)

    @property
    def bytes_per_s(self) -> float:
        """The median of the last hand-overs' last writes; 0: not known."""
        return statistics.median(self._rates) if self._rates else 0.0

    def measured(self, now: float, zone: str, tokens: int, timings: m.Timings) -> None:
        """One more hand-over."""
        self.zone, self.measured_at = zone, now
        self._round_trips_s.append(timings.claim_s)
        self._round_trip_s = min(self._round_trips_s)
        if tokens >= MIN_TOKENS:
            share = timings.last_bytes / timings.bytes if timings.bytes and timings.last_bytes else 1.0
            self._writes.append((timings.transfer_s, tokens, share * tokens))
            self._token_s = statistics.median(seconds / size for seconds, size, _ in self._writes)
            self._last_tokens = statistics.median(last for _, _, last in self._writes)
            self._last_token_s = statistics.median(seconds / last for seconds, _, last in self._writes)
            if timings.transfer_s and (last_bytes := timings.last_bytes or timings.bytes):
                self._rates.append(last_bytes / timings.transfer_s)

    def cost_s(self, now: float, tokens: int) -> float:
        """For a prompt of which so many tokens are to be written. The writing takes as long as that of so many tokens,
        or as their last write alone, whichever is longer: as in `DecodeMeasures.there`."""
        write_s = max(tokens * self._token_s, min(tokens, self._last_tokens) * self._last_token_s)
        age_s = max(0.0, now - self.measured_at)
        return (self._round_trip_s + write_s) * 0.5 ** (age_s / HALF_LIFE_S)


class PathCosts:
    """The paths of one decode engine, which is in `zone`; empty: it has none. Times are seconds of the caller's clock.
    `zones`, in the methods: those of the prefill engines that could take the prompt, by incarnation."""

    def __init__(self, zone: str) -> None:
        self._zone = zone
        self._paths: collections.OrderedDict[str, _Path] = collections.OrderedDict()

    def __len__(self) -> int:
        """Prefill engines of which anything was measured."""
        return len(self._paths)

    def handed_over(self, now: float, peer: str, zone: str, tokens: int, timings: m.Timings) -> None:
        """This prefill engine has computed and written so many tokens."""
        self._paths.setdefault(peer, _Path()).measured(now, zone, tokens, timings)
        self._paths.move_to_end(peer)
        if len(self._paths) > MAX_MEASURED:
            self._paths.popitem(last=False)

    def costs_s(self, now: float, tokens: int, zones: Mapping[str, str]) -> dict[str, float]:
        """For each prefill engine how long the path takes, for a prompt with so many tokens to be written. Empty where
        there is nothing to compare: fewer than two engines, or nothing measured of any, nor of its zone."""
        if len(zones) < 2:
            return {}
        known = {name: path.cost_s(now, tokens) for name in zones if (path := self._paths.get(name)) is not None}
        by_zone = self._zone_means_s(now, tokens, {zone for name, zone in zones.items() if name not in known})
        known |= {name: by_zone[zone] for name, zone in zones.items() if name not in known and zone in by_zone}
        return {name: known.get(name, 0.0) for name in zones} if known else {}

    def detours(self, now: float, tokens: int, zones: Mapping[str, str]) -> tuple[tuple[str, float], ...]:
        """The prefill engines whose path is not as the nearest one, and how many seconds more it takes: for a job. At
        most `MAX_DETOURS`, the longest."""
        costs_s = self.costs_s(now, tokens, zones)
        if not costs_s:
            return ()
        nearest = min(costs_s.values())
        alike = max(ALIKE_FACTOR * nearest, nearest + ALIKE_S)
        found = sorted(((name, cost - alike) for name, cost in costs_s.items() if cost > alike),
                       key=lambda one: -one[1])
        return tuple((name, min(m.MAX_SECONDS, more_s)) for name, more_s in found[:m.MAX_DETOURS])

    def report(self, now: float, names: Collection[str]) -> dict[str, tuple[float, float, float]]:
        """For an operator: those of these prefill engines whose path was measured, the farthest first. Of each: the
        bytes per second of its last writes (0: not known), how many seconds more than the nearest of them the path took
        for a prompt of `COMPARED_TOKENS`, and how many seconds ago that was measured. What counts for jobs has aged
        since then."""
        paths = {name: path for name in names if (path := self._paths.get(name)) is not None}
        costs_s = {name: path.cost_s(path.measured_at, COMPARED_TOKENS) for name, path in paths.items()}
        nearest_s = min(costs_s.values(), default=0.0)
        return {name: (min(m.MAX_RATE, paths[name].bytes_per_s), min(m.MAX_SECONDS, cost_s - nearest_s),
                       min(m.MAX_SECONDS, max(0.0, now - paths[name].measured_at)))
                for name, cost_s in sorted(costs_s.items(), key=lambda one: -one[1])}

    def _zone_means_s(self, now: float, tokens: int, zones: set[str]) -> dict[str, float]:
        """What a path to an engine in each of these zones has cost on average, as far as any was measured."""
        zones = zones - {"", self._zone}
        found: dict[str, list[float]] = {}
        for path in self._paths.values() if zones else ():
            if path.zone in zones:
                found.setdefault(path.zone, []).append(path.cost_s(now, tokens))
        return {zone: statistics.fmean(costs_s) for zone, costs_s in found.items()}
