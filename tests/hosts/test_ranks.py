# SPDX-License-Identifier: Apache-2.0
"""B21: a rank on another machine than its engine, whose wire is cut: both ends know it in time."""
from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.hosts.fleet import ROOT
from tests.hosts.rack import Rack
from vllm_pd.transfer.ranks.remote import CUT_S

pytestmark = pytest.mark.timeout(300)
LATE_S = 15.0  # for a busy machine
RANK = """
import json, select, sys, time
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.transfer.ranks.remote import RankPort
lifeline = Lifeline("rank", sys.argv[1])
port = RankPort(sys.argv[1], 0, lifeline, lifeline.address, "rank")
address = port.address
print(json.dumps([address.url, address.lifeline, address.name, address.secret.hex()]), flush=True)
while (end := port.accept_one((), 1.0)) is None:
    pass
print("attached", flush=True)
try:
    while True:
        poll = select.poll()
        for fileno in end.filenos():
            poll.register(fileno, select.POLLIN)
        poll.poll()
        end.receive()
except OSError as error:
    print(f"{time.monotonic()} {error}", flush=True)
"""
ENGINE = """
import json, sys, time
from vllm_pd.transfer.ranks.remote import ENGINE, GUARDIAN, RankAddress
url, lifeline, name, secret = json.loads(sys.argv[1])
address = RankAddress(url, lifeline, name, bytes.fromhex(secret))
guardian, engine = address.connect(GUARDIAN), address.connect(ENGINE)
print("attached", flush=True)
try:
    while True:
        engine.wait(60.0)
        engine.receive()
except OSError as error:
    print(f"{time.monotonic()} {error}", flush=True)
"""


def test_b21_a_cut_ends_both_ends_in_time(tmp_path):
    """B21: where nobody sends anything. The clock is that of the machine below."""
    with Rack(tmp_path) as rack:
        there, here = rack.host("there"), rack.host("here")
        environment = {"PYTHONPATH": str(ROOT)}
        rank = there.start([sys.executable, "-c", RANK, there.ip], subprocess.PIPE, tmp_path / "rank.log", environment,
                           text=True)
        address = rank.stdout.readline().strip()
        assert len(json.loads(address)) == 4
        engine = here.start([sys.executable, "-c", ENGINE, address], subprocess.PIPE, tmp_path / "engine.log",
                            environment, text=True)
        assert [one.stdout.readline().strip() for one in (rank, engine)] == ["attached"] * 2
        cut_at = time.monotonic()
        rack.cut(there, here)
        for one in (rank, engine):
            when, why = one.stdout.readline().split(maxsplit=1)
            assert 1.0 < float(when) - cut_at < CUT_S + LATE_S, why  # "timed out" or "no route"
