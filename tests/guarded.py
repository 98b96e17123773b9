# SPDX-License-Identifier: Apache-2.0
"""An engine with ranks on other nodes, in light processes: `python -m tests.guarded rank` and `... engine`.

Both speak JSON lines with the test. A rank says its `RankAddress`; the engine gets these, starts the guardian, attaches
to the ranks, opens its lifeline and has the guardian hold it.
"""
from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import uuid
from typing import Any

from vllm_pd.peer.liveness.guardian import start_guardian
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.peer.liveness.process import this_process
from vllm_pd.transfer.ranks.gather import RankTransfers
from vllm_pd.transfer.ranks.process import AttachRank, RankServer, connect_ranks
from vllm_pd.transfer.ranks.remote import RankAddress, RankPort
from vllm_pd.transfer.requests import TransferProgress, TransferRequest

HOST = "127.0.0.1"


class NoTransfers:
    """Of a rank that moves nothing. `ends`: what `close` returns."""
    moving, youngest_s, busy = False, 0.0, False

    def __init__(self, ends: bool = True) -> None:
        self.ends = ends
        self.requests: list[TransferRequest] = []

    def execute(self, requests: list[TransferRequest]) -> None:
        self.requests += requests

    def synchronize(self) -> None:
        pass

    def take_progress(self) -> TransferProgress:
        return TransferProgress([], [], [], [])

    def live_handles(self) -> int:
        return 0

    def close(self) -> bool:
        return self.ends


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def to_words(address: RankAddress) -> dict[str, str]:
    return {"url": address.url, "lifeline": address.lifeline, "name": address.name, "secret": address.secret.hex()}


def from_words(words: dict[str, str]) -> RankAddress:
    return RankAddress(words["url"], words["lifeline"], words["name"], bytes.fromhex(words["secret"]))


def rank(kind: str) -> None:
    """`hangs`: its transfers can't be closed. `lingers`: nor does the process end when Python does."""
    name = uuid.uuid4().hex
    lifeline = Lifeline(name, HOST)
    port = RankPort(HOST, 0, lifeline, lifeline.address, name)
    server = RankServer(lambda order: (NoTransfers(not kind), b"metadata"), (), port=port,
                        meeting=lambda: None)
    say(pid=os.getpid(), **to_words(port.address))
    for _ in sys.stdin:
        while server.rank is None:  # it has answered a moment ago
            time.sleep(0.01)
        say(closed=server.rank.close())
        if kind == "lingers":
            libc = ctypes.CDLL(None)
            libc.__cxa_atexit(libc.pause, None, None)
            return
    threading.Event().wait()  # a worker whose node has lost its driver


def engine() -> None:
    ranks = {number: from_words(one) for number, one in enumerate(json.loads(sys.stdin.readline()))}
    guardian, guarding = start_guardian(ranks)
    connections, _ = connect_ranks({number: (0, one) for number, one in ranks.items()}, AttachRank("p", True))
    lost = threading.Event()
    transfers = RankTransfers(connections, guardian, {number: f"rank {number}" for number in ranks}
                              | {len(ranks): "the guardian"}, lambda what: (say(lost=what), lost.set()))
    lifeline = Lifeline("p", HOST)
    transfers.hold(lifeline.fileno())
    own = this_process()
    say(pid=own.pid, processes=[[one.pid, one.start_time] for one in (own, guarding)], lifeline=lifeline.address)
    if json.loads(sys.stdin.readline()) == "watch":
        while not lost.wait(0.02):
            transfers.take_progress()
        sys.stdin.readline()
    transfers.close()
    lifeline.close()
    say(closed=True)
    sys.stdin.readline()


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        engine()
    else:
        rank("".join(sys.argv[2:]))
