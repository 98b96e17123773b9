# SPDX-License-Identifier: Apache-2.0
"""B26: when a broker counts as away."""

import msgspec
import pytest

from vllm_pd.peer.cluster import SILENT_HEARTBEATS, ClusterView
from vllm_pd.protocol import messages as m

MEMBER = m.Member("d", m.Role.DECODE, "", m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""))


@pytest.fixture
def cluster():
    made = ClusterView(MEMBER, heartbeat_s=1.0, ttl_s=60.0)
    made.heard(100.0, "broker", 0)
    made.check(100.0)
    return made


def away_at(cluster: ClusterView, now: float) -> float:
    """When it is found silent by somebody who looks ten times a second."""
    while cluster.up:
        cluster.check(now)
        now += 0.1
        assert now < 200.0
    return now - 0.1


def test_b26_a_broker_that_is_silent_for_some_heartbeats_is_away(cluster):
    assert away_at(cluster, 100.0) == pytest.approx(100.0 + SILENT_HEARTBEATS, abs=0.11)


def test_b26_a_broker_is_not_silent_while_nobody_listens(cluster):
    """This process was stopped: it has not asked, and its ears were closed. The broker gets the time to answer now."""
    cluster.check(150.0)
    assert cluster.up
    assert away_at(cluster, 150.0) == pytest.approx(150.0 + SILENT_HEARTBEATS - 1, abs=0.11)


@pytest.mark.parametrize("address, stays", [
    ("tcp://127.0.0.1:1", True), ("tcp://[::1]:1", True), ("tcp://203.0.113.7:1", False), ("tcp://somewhere:1", False),
    ("tcp://localhost:1", False), ("tcp://127.0.0.1.evil.example:1", False), ("tcp://[::1:1", False), ("", True),
    ("tcp://10.0.0.5:1@127.0.0.1", False), ("tcp://127.0.0.1:0;10.0.0.5:1", False), ("tcp://127.0.0.1?.a:5", False)])
def test_b110_without_keys_members_beyond_the_loopback_are_left_out(address, stays):
    """B110: whatever the broker sends. An engine's own address is never a name."""
    theirs = msgspec.structs.replace(MEMBER, incarnation="p", address=address)
    for local_only, listed in ((True, stays), (False, True)):
        cluster = ClusterView(MEMBER, 1.0, 60.0, local_only)
        cluster.peers(m.Peers("b", 1, [theirs], 0))
        assert bool(cluster.members()) is listed
