# SPDX-License-Identifier: Apache-2.0
"""How a fixed number of engines is best divided into prefill and decode engines. Pure."""
import msgspec

from vllm_pd.decisions.demand import Demand, FleetLook, Targets

MAX_ENGINES = 64


class SplitChoice(msgspec.Struct, frozen=True):
    """So many engines are to prefill, and why."""
    prefills: int
    reason: str


class SplitPlanner:
    """Divides `count` engines, at most `MAX_ENGINES`, of which at least so many prefill and so many decode. Owned by
    one caller. Raises ValueError for what is not possible."""

    def __init__(self, count: int, prefills: int, targets: Targets, change_s: float = 30.0, least_prefills: int = 1,
                 least_decodes: int = 1) -> None:
        if not 2 <= count <= MAX_ENGINES or min(least_prefills, least_decodes) < 1:
            raise ValueError(f"{count} engines can't be divided: there must be 2 to {MAX_ENGINES}")
        if least_prefills + least_decodes > count:
            raise ValueError(f"{count} engines can't be divided into {least_prefills} and {least_decodes} at least")
        self._targets = targets
        self._choices = range(least_prefills, count - least_decodes + 1)
        self._count = count

    def receive(self, look: FleetLook, demand: Demand, prefills: int) -> SplitChoice:
        """The split after this demand. `prefills`: engines that prefill now, those that change counted at their new
        role."""
        prefill, decode = demand.prefill_engines(), demand.decode_engines(self._targets.itl_s)
        if not prefill or not decode:
            kept = min(max(prefills, self._choices[0]), self._choices[-1])
            return SplitChoice(kept, "nothing comes")
        best = max(self._choices, key=lambda one: min(one / prefill, (self._count - one) / decode))
        return SplitChoice(best, "both have the most to spare")
