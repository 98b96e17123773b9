# SPDX-License-Identifier: Apache-2.0
"""The light engine of tests/peers as a program of a host. A line of standard input is a command, `[NAME, ARGUMENTS]` in
JSON; a line of standard output is its answer, `[true, RESULT]` or `[false, TRACEBACK]`. It ends with its input.

    host_engine.py ROLE SETTINGS HEAD_SIZE       SETTINGS: those of an engine, in JSON

Whoever decodes looks at each block of each prompt that was prefilled for it, and of each hold that it has read. Blocks
that are free have a mark, so a write into one of them, or a read that lasts longer than the hold, is found.
"""
from __future__ import annotations

import collections
import json
import logging
import os
import queue
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from light_engine import BLOCK_SIZE, LightEngine, answer

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Fallback, ReadHold, Released, StopRead
from vllm_pd.transfer import requests as transfer

MARK = -1  # in each number of a free block; no prompt has this answer
PAUSE_S = 0.02
ROOM = 8  # jobs of a prefill engine
MOST_OPEN = 30  # prompts under load


class HostEngine(LightEngine):
    """A `LightEngine` that makes its own load, really reads holds, and knows which blocks changed while they were free.
    Commands are the methods `do_*`; what they take and return can be written in JSON."""

    def __init__(self, role: str, settings: dict, head_size: int) -> None:
        # Both halves receive: a peer writes into the one, and reads from the other.
        super().__init__(role, settings, room=ROOM, head_size=head_size, progress_thread=True)
        self.overwritten = 0  # blocks that had changed while they were free when they were allocated
        self.fallen_back: set[m.Attempt] = set()
        self.reading: dict[str, m.Attempt] = {}  # by the key of the transfer
        self.load_every_s = 0.0
        self._next_prompt_at = 0.0
        self._prompts_made = 0
        self._begun: dict[str, float] = {}  # when each prompt came that has not ended
        self._ends: collections.Counter[str] = collections.Counter()
        self._longest_s = 0.0
        for layer in self.memory:
            layer[:] = MARK

    # Commands.

    def do_start(self) -> dict:
        """Take part. The answer: what the registry knows of it."""
        member = super().do_start()
        return {"incarnation": member.incarnation, "address": member.address, "lifeline": member.lifeline}

    def do_load(self, every_s: float) -> None:
        """From now on submit a prompt of its own each `every_s`; 0: none any more."""
        self.load_every_s, self._next_prompt_at = every_s, time.monotonic()

    def do_submit(self, requests: list) -> None:
        """As the light engine's."""
        self._begun |= dict.fromkeys((name for name, _ in requests), time.monotonic())
        super().do_submit(requests)

    def do_figures(self) -> dict:
        """What has come of all prompts since the start: how many ended in each way, how many have not, and the seconds
        that the longest has taken, from when it came."""
        open_s = [time.monotonic() - begun for begun in self._begun.values()]
        return {**{how: self._ends[how] for how in ("remote", "local", "wrong")}, "unfinished": len(self._begun),
                "longest_s": max([self._longest_s, *open_s])}

    def do_hold(self, tokens: list[int]) -> list:
        """As the light engine's, with the prompt's KV in the blocks."""
        hold = super().do_hold(tokens)
        for layer in self.memory:
            layer[:, self.held[hold]] = answer(tokens)
        return list(msgspec.structs.astuple(hold))

    def do_read(self, name: str, hold: list, tokens: list[int]) -> None:
        """Claim a hold of a peer, and read it once. Ends as a prompt."""
        super().do_read(name, m.Attempt(*hold), tokens)

    def do_report(self) -> dict:
        """What a user sees of it, in `gauges` and `degraded`, and what it holds."""
        state = self.do_state()
        status = self.agent.protocol.operators.status(self.agent.thread.count_sockets())
        kept = [len(self.prompts[attempt][2]) for attempt in self.fallen_back]
        return {"free": state["free"], "open": state["open"], "jobs": state["jobs"], "waiting": state["waiting"],
                "handles": state["handles"], "held": len(self.held), "claimed": state["claimed"],
                "reading": len(self.reading), "quarantined": sum(kept), "error": state["error"],
                "moved": state["moved"],
                "reached": len(state["reached"]), "broker_up": state["view"]["broker_up"],
                "prefill_peers": state["view"]["prefill_peers"], "gauges": status.gauges, "degraded": status.degraded,
                "dropped": {name: count for name, count in state["dropped"].items() if count}}

    def do_scribble(self) -> None:
        """Write into a free block, as a peer that is taken for dead may."""
        self.memory[0][1, self.free[-1], -1] = 1

    def do_overwritten(self) -> int:
        """How many blocks have changed while they were free, since the start."""
        self.release(self.allocate(len(self.free)))
        return self.overwritten

    # Blocks.

    def allocate(self, count: int) -> list[int]:
        """As the light engine's."""
        blocks = super().allocate(count)
        if blocks:
            marked = torch.stack([(layer[:, blocks] == MARK).all(dim=2).all(dim=0) for layer in self.memory])
            self.overwritten += int((~marked.all(dim=0)).sum())
        return blocks

    def release(self, blocks: list[int]) -> None:
        """As the light engine's."""
        for layer in self.memory:
            layer[:, blocks] = MARK
        super().release(blocks)

    # The loop.

    def step(self) -> None:
        """As the light engine's."""
        now = time.monotonic()
        if self.load_every_s and now >= self._next_prompt_at and len(self.waiting) + len(self.prompts) < MOST_OPEN:
            self._next_prompt_at = now + self.load_every_s
            self._prompts_made += 1
            self.do_submit([(f"load {self._prompts_made}", random_prompt(10 * BLOCK_SIZE))])
        super().step()
        for name in self._begun.keys() & self.ended.keys():
            self._ends[self.ended[name]] += 1
            self._longest_s = max(self._longest_s, time.monotonic() - self._begun.pop(name))

    def _on_event(self, event: object) -> None:
        if isinstance(event, ReadHold):
            key = f"read {event.attempt}"
            self.reading[key] = event.attempt
            self.worker.execute([transfer.AddTransferPeer(event.peer, event.metadata),
                                 transfer.Read(key, event.peer, event.block_ids, event.remote_block_ids)])
        elif isinstance(event, StopRead):
            self.worker.execute([transfer.CancelTransfer(f"read {event.attempt}")])
        else:
            super()._on_event(event)
        if isinstance(event, Fallback):
            print(f"fallback of {event.attempt}: {event.reason}: {event.detail}", file=sys.stderr, flush=True)
            self.fallen_back.add(event.attempt)
        elif isinstance(event, Released):
            self.fallen_back.discard(event.attempt)

    def _written(self, end: transfer.Finished) -> None:
        attempt = self.reading.pop(end.key, None)
        if attempt is None:
            super()._written(end)
        else:
            self.agent.protocol.decode.read_ended(attempt, "" if end.ok else end.error, end.may_land)


def random_prompt(tokens: int) -> list[int]:
    """Of so many tokens."""
    return [random.randrange(1, 30_000) for _ in range(tokens)]


def main() -> None:
    role, settings, head_size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("vllm.pd").setLevel(logging.INFO)
    torch.set_num_threads(1)
    engine = HostEngine(role, settings, head_size)
    commands: queue.Queue[tuple[str, list]] = queue.Queue(maxsize=1)  # the next one comes after the answer

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
            engine.bell.set()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    _say(True, None)
    while True:
        if not commands.empty():
            name, arguments = commands.get()
            try:
                result = getattr(engine, f"do_{name}")(*arguments)
            except Exception:
                _say(False, traceback.format_exc())
            else:
                _say(True, result)
        if engine.agent.member.address:
            engine.step()
        engine.bell.wait(PAUSE_S)
        engine.bell.clear()


def _say(fine: bool, result: object) -> None:
    print(json.dumps([fine, result]), flush=True)


if __name__ == "__main__":
    main()
