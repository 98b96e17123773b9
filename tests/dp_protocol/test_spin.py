# SPDX-License-Identifier: Apache-2.0
"""The Promela model under spin (`tests/promela.py`). The large models, and the broken ones of which test_explored.py
has the same, are heavy."""
from pathlib import Path

import pytest

from tests.dp_protocol import broken
from tests.promela import counted, require_tools, verify

MODEL = Path(__file__).with_name("model.pml")

# options: states. Asserted, for a model that has silently become smaller proves less.
GOOD = {
    "-DN=2 -DREQUESTS=1 -DABORTS=1": 50_383,
    "-DN=3 -DREQUESTS=1 -DABORTS=0": 270_119,
    "-DN=3 -DREQUESTS=1 -DABORTS=0 -DSHM": 478_178,
    "-DN=2 -DREQUESTS=0 -DABORTS=0 -DPARKS=1": 43_248,
    "-DN=2 -DREQUESTS=0 -DABORTS=0 -DPARKS=1 -DSHM": 49_941,
    "-DN=2 -DREQUESTS=1 -DABORTS=0 -DSHM -DLEAVES": 690_269,
    "-DN=2 -DREQUESTS=1 -DABORTS=0 -DSHM -DCALLS=1 -DNO_WAIT": 2_186_537,
}
LARGE = {
    "-DN=2 -DREQUESTS=2 -DABORTS=0": 1_055_320,
    "-DN=2 -DREQUESTS=2 -DABORTS=1 -DSHM": 1_611_851,
    "-DN=3 -DREQUESTS=0 -DABORTS=0 -DPARKS=1": 1_542_850,
    "-DN=2 -DREQUESTS=0 -DABORTS=0 -DPARKS=2 -DSHM": 3_660_555,
    "-DN=2 -DREQUESTS=1 -DABORTS=0 -DSHM -DCALLS=1 -DSTOPS=1": 3_449_426,
    "-DN=2 -DREQUESTS=1 -DABORTS=0 -DSHM -DCALLS=1 -DNO_WAIT -DSHORT -DPOSTPONES=1": 4_038_688,
}
LEAVES, CALL, PARK = "-DSHM -DLEAVES", "-DSHM -DREQUESTS=1 -DABORTS=0 -DCALLS=1", "-DREQUESTS=0 -DABORTS=0 -DPARKS=1"
BROKEN = [f"{PARK} -DPARKED_STEPS", f"{PARK} -DSHM -DPARKED_STEPS", f"{PARK} -DNO_RESUME_WAKEUP",
          f"{PARK} -DSHM -DNO_RESUME_WAKEUP", f"{PARK} -DABORT_UNASKS",
          "-DSHM -DLATE_STORE", f"{LEAVES} -DNO_LEAVE_WAKEUP", f"{CALL} -DNO_CALL_WAKEUP",
          f"{CALL} -DNO_WAIT -DREAD_LAST", f"{CALL} -DPOSTPONES=1 -DSTAYS_READY"]
# What test_explored.py finds in the real code, too.
BROKEN_AND_EXPLORED = {
    "-DONE_SIDED": broken.HorizonOnOneSide,
    "-DSENDER_EXCLUDED": broken.SenderExcluded,
    "-DEDGE_WAKE": broken.EdgeTriggeredWake,
    "-DLATCHED": broken.LatchedRunning,
    "-DCACHED_STOP": broken.CachedStop,
    "-DSHM -DNO_WAKEUP": broken.NoWakeup,
    "-DSHM -DEDGE_WAKE": broken.EdgeTriggeredWakeInMemory,
    "-DSHM -DCACHED_STOP": broken.CachedStop,
    f"{LEAVES} -DLEAVES_AT_ONCE": broken.LeavesAtOnce,
    f"{LEAVES} -DENDS_EARLY": broken.EndsWhenNobodyNeedsIt,
    f"{CALL} -DNO_WAIT -DNOT_FINAL": broken.CallsBeforeTheFinalStep,
    f"{CALL} -DPOSTPONES=1 -DFORGETS": broken.ForgetsPostponedCall,
    f"{CALL} -DSTOPS=1 -DNO_DONE": broken.WatchesNoCall,
}


def heavy(options):
    return [pytest.param(each, marks=pytest.mark.heavy) for each in options]


@pytest.fixture(scope="module", autouse=True)
def tools():
    require_tools()


def spin(folder, options, optimised="-O1"):
    """What the verifier says."""
    stuck = ["-E"] if "-DSTOPS" in options else []  # whoever waits for a stopped rank
    return verify(folder, MODEL, options, *stuck, optimised=optimised)


@pytest.mark.search
@pytest.mark.parametrize("options", [*GOOD, *heavy(LARGE)])
def test_b70_spin_finds_nothing(tmp_path, options):
    report = spin(tmp_path, options)
    states, depth = counted(report)
    print(f"spin {options}: {states} states, {depth} deep")
    assert "errors: 0" in report
    assert states == (GOOD | LARGE)[options]


@pytest.mark.parametrize("options", [*BROKEN, *heavy(BROKEN_AND_EXPLORED)])
def test_spin_finds_a_broken_protocol(tmp_path, options):
    report = spin(tmp_path, options, "-O0")  # most of the time goes into compiling
    assert "errors: 1" in report
    assert "assertion violated" in report
