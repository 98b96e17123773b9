# SPDX-License-Identifier: Apache-2.0
"""B104 in a model of shared memory: readers and writers that are killed after any operation, or within a copy.

What can be seen is whole, what is leased does not change, what a reader is given is right, and what is left when all
have ended is as good as new. Each rule that this stands on is broken once here, and found.
"""
import os
import re
from collections.abc import Callable

import pytest
from simulation.slots import LENGTH, ModelRules, SlotsRun, key_of

from vllm_pd.store import slots
from vllm_pd.store.blocks import BlockHeader, BlockKey, seal_of
from vllm_pd.store.slots import SetGeometry

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "20"))
KILLS = 500  # of each seed


def test_b104_ten_thousand_kills(capsys: pytest.CaptureFixture):
    """B104: 10,000 processes killed, of them thousands while they write or read; nothing wrong is ever seen."""
    outcomes = [SlotsRun(seed).run(KILLS) for seed in range(SEEDS)]
    for seed, outcome in enumerate(outcomes):
        assert outcome.broken is None, f"seed {seed}: {outcome.broken}"
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes)
            for name in ("kills", "killed_writing", "killed_reading", "stored", "read", "refused")}
    with capsys.disabled():
        print(f"\n  {sums}", end="")
    assert sums["kills"] >= KILLS * SEEDS
    assert min(sums["killed_writing"], sums["killed_reading"], sums["stored"], sums["read"]) >= 20 * SEEDS
    assert sums["refused"], "no damaged block was met"


def filtered(rule: Callable[..., slots.Steps], *left_out: type, answer: object = None) -> Callable[..., slots.Steps]:
    """The rule without these operations; each gives `answer`."""

    def broken(*args: object) -> slots.Steps:
        steps, result = rule(*args), None
        while True:
            try:
                step = steps.send(result)
            except StopIteration as end:
                return end.value
            result = answer if isinstance(step, left_out) else (yield step)

    return broken


def publishes_first(geometry: SetGeometry, key: BlockKey, length: int, now_ns: int) -> slots.Steps:
    """Seals the header before the bytes are there, and lets go of the lock."""
    for slot in geometry.candidates(key):
        if (yield slots.LockSlot(slot, True)):
            header = BlockHeader(key, length, 0)
            yield slots.WriteFields(slot, header)
            yield slots.SetSeal(slot, seal_of(header.encode()))
            yield slots.UnlockSlot(slot)
            yield slots.FillPayload(slot, key, length)
            return slots.PutResult.STORED
    return slots.PutResult.BUSY


def believes(slot: int, key: BlockKey, length: int) -> slots.Steps:
    """Takes the bytes and compares nothing."""
    yield slots.SumPayload(slot, key, length)
    return True


@pytest.mark.parametrize("rules, found", [
    (ModelRules(put=publishes_first), "can be seen and is not whole"),
    (ModelRules(put=filtered(slots.put, slots.Unseal)), "can be seen and is not whole"),
    (ModelRules(put=filtered(slots.put, slots.LockSlot, answer=True)), "changed while|not whole"),
    (ModelRules(lease=filtered(slots.lease, slots.LockSlot, answer=True), check=believes), "a reader was given"),
    (ModelRules(check=believes), "a reader was given"),
    (ModelRules(put=filtered(slots.put, slots.UnlockSlot)), "in an arena that nobody else uses|is not there"),
], ids=["publishes first", "keeps the old seal", "writes without a lock", "reads without a lease", "no check",
        "never unlocks"])
def test_b104_a_broken_rule_is_found(rules: ModelRules, found: str):
    """B104: each of the rules is needed; the model sees what goes wrong without it."""
    outcomes = (SlotsRun(seed, rules).run(KILLS) for seed in range(20))
    broken = next((outcome.broken for outcome in outcomes if outcome.broken), "")
    assert broken and re.search(found, broken), broken


def test_b104_a_stopped_writer_holds_back_its_slot_only():
    """A process that is stopped while it writes, and never goes on: others store and read in the rest of the set."""
    run = SlotsRun(1, slots_count=4, ways=4)
    stopped = run.drive(1, slots.put(run.model.geometry, key_of(0), LENGTH, 1), [])
    while run.model.slots[0].writer is None:
        next(stopped)
    for number in range(1, 20):
        assert run.alone(key_of(number), False) is None
        assert run.alone(key_of(number), True) is None
    assert run.model.slots[0].writer == 1


def test_b104_the_least_recently_used_goes_first():
    """A block that is read stays; what was not used for longest is replaced, and never a leased one."""
    run = SlotsRun(1, slots_count=4, ways=4)
    for number in range(4):
        assert run.alone(key_of(number), False) is None
    assert run.alone(key_of(0), True) is None  # read again
    run.model.lock(run.model.slots[1], 7, False)  # leased by another
    assert run.alone(key_of(4), False) is None
    kept = [slot.record().header.key for slot in run.model.slots]
    assert kept == [key_of(0), key_of(1), key_of(4), key_of(3)]
