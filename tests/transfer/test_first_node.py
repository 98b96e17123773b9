# SPDX-License-Identifier: Apache-2.0
"""B21: a rank on another node, of an engine that ends before it has connected to its ranks, ends too: by torch's own
store, at which the two have met."""
from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_pd.transfer.ranks.process import world_store

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, threading, uuid
from torch import distributed
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.transfer.ranks.process import RankServer
from vllm_pd.transfer.ranks.remote import RankPort
where, rank = sys.argv[1], int(sys.argv[2])
distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
if rank:
    name = uuid.uuid4().hex
    lifeline = Lifeline(name, "127.0.0.1")
    server = RankServer(lambda order: None, (), port=RankPort("127.0.0.1", 0, lifeline, lifeline.address, name))
distributed.barrier()
print("ready", flush=True)
threading.Event().wait()
"""


def test_a_process_that_has_met_no_other_has_no_store():
    assert world_store() is None


def test_b21_the_end_of_rank_0_ends_a_rank_that_waits_on_another_node():
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, where, str(rank)], cwd=ROOT, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
        with pytest.raises(subprocess.TimeoutExpired):
            ranks[1].wait(3.0)
        ranks[0].kill()
        said = ranks[1].communicate(timeout=60)[1]
        assert ranks[1].returncode == 1, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
