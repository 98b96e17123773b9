# SPDX-License-Identifier: Apache-2.0
"""Part `order`: a transfer is requested right after the kernels were launched that compute, or still use, its blocks.

NIXL knows nothing of the device's queue: a transfer that is posted before the kernels have ended moves what is in
memory then. So `vllm_pd.transfer.steps` holds a transfer back until its step's event is done, and a prefix is offered
for reading when the step's output was processed. Each way is tried as engines do it, which must always be right, and
without the wait, which shows that the wait is needed.

    write       P's step computes the blocks that P writes to D
    read        D's step computes the blocks that P reads from D
    overwrite   P's step still writes to the blocks that P reads D's into
"""
from __future__ import annotations

from typing import Any

from _gpu_check.bits import D_SEED, NEEDS, P_SEED
from _gpu_check.caches import ORDER_LAYOUT
from _gpu_check.child import PartRun, require
from _gpu_check.results import PartFailed

ROUNDS = 25
SPOILT = -1


def check(run: PartRun) -> None:
    """Raises PartFailed where a transfer that has waited is wrong."""
    require(*NEEDS)
    from _gpu_check.ends import two_ends

    with two_ends(run.settings.device) as (p, d):
        p.open(ORDER_LAYOUT.name, P_SEED)
        peer, metadata = d.ask("open", ORDER_LAYOUT.name, D_SEED)
        p.connect(peer, metadata)
        trial = OrderTrial(p, d, peer)
        found: dict[str, Any] = {}
        for way in (trial.write, trial.read, trial.overwrite):
            wrong = {key: sum(not way(number, waits) for number in range(ROUNDS))
                     for key, waits in (("wrong_after_waiting", True), ("wrong_without", False))}
            found[way.__name__] = {"rounds": ROUNDS, **wrong}
            run.note(ways=found)
    refuse(found)
    idle = [way for way, figures in found.items() if not figures["wrong_without"]]
    run.note(not_shown="" if not idle else f"without the wait nothing was wrong either, so this run does not show that "
             f"it is needed: {', '.join(idle)}")


def refuse(found: dict[str, Any]) -> None:
    """Raises PartFailed where a transfer was wrong although it has waited."""
    wrong = {way: figures["wrong_after_waiting"] for way, figures in found.items() if figures["wrong_after_waiting"]}
    if wrong:
        raise PartFailed(f"of {ROUNDS} transfers each, so many moved other data than their step's: {wrong}")


class OrderTrial:
    """The three ways. Each method makes one round and returns whether the right data came. `waits`: as engines do."""

    def __init__(self, p: Any, d: Any, peer: str) -> None:
        self._p, self._d, self._peer = p, d, peer
        self._ids = list(range(1, p.cache.shape.blocks))
        self._value = 0

    def write(self, number: int, waits: bool) -> bool:
        """P computes blocks and writes them to D."""
        from vllm_pd.transfer.requests import Write

        self._value += 1
        self._d.tell("receive_value", self._ids, self._value)
        step = self._p.compute(self._ids, self._value)
        self._p.transfer(Write(f"write {number}", self._peer, self._ids, self._ids, [b"n"], step), ordered=waits)
        right = self._d.answer()
        self._p.steps.device.synchronize()
        return right

    def read(self, number: int, waits: bool) -> bool:
        """D computes blocks and says so, after its output was processed or at once. P reads them."""
        self._value += 1
        self._d.ask("compute_and_process", self._ids, self._value, waits)
        return self._fetch(number, after_step=0, ordered=waits)

    def overwrite(self, number: int, waits: bool) -> bool:
        """P reads D's blocks into some that a step of P in flight writes to."""
        self._value += 1
        self._d.ask("compute_and_process", self._ids, self._value, True)
        step = self._p.compute(self._ids, SPOILT)
        return self._fetch(number, step, ordered=waits)

    def _fetch(self, number: int, after_step: int, ordered: bool) -> bool:
        """P reads D's blocks. Returns whether they are D's then, and stay so."""
        from vllm_pd.transfer.requests import Read

        self._p.transfer(Read(f"read {number}", self._peer, self._ids, self._ids, after_step), ordered=ordered)
        self._p.steps.device.flush()
        right = self._p.holds(self._ids, self._value)
        self._p.steps.device.synchronize()
        return right and self._p.holds(self._ids, self._value)
