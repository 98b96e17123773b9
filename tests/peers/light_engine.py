# SPDX-License-Identifier: Apache-2.0
"""Engines without a model, each in a process of its own: real control agents, real NIXL transports, real memory.

A prefill "computes" by filling blocks with a number that follows from the prompt; a decode engine looks whether that
number is in all blocks that were reported ready. `Nursery` forks them from a server that has imported everything, so
that a life costs a fraction of a second.
"""
from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import msgspec
import psutil
import torch

from vllm_pd.handover.engine import RETIRE_KEY
from vllm_pd.handover.progress import ArrivalNotice
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol import actions as e
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Cancelled, Fallback, HoldEnded, Prefill, Prefilled, Released
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer import requests as transfer
from vllm_pd.transfer.layout import describe
from vllm_pd.transfer.nixl.generations import NixlGenerations
from vllm_pd.transfer.worker import TransferWorker

BLOCK_SIZE, KV_HEADS, HEAD_SIZE, LAYERS, BLOCKS = 16, 2, 16, 2, 64
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "none", "int32", "int32", BLOCK_SIZE, LAYERS, KV_HEADS, HEAD_SIZE, "hnd")
# Nobody is taken for dead, and no attempt ends, because a busy machine lets a process stand still for some seconds.
PATIENT = {"heartbeat_s": 2.5, "ttl_s": 10.0, "claim_retry_s": 0.5, "lease_s": 60.0, "attempt_deadline_s": 120.0}
PAUSE_S = 0.005
WAIT_S = 100.0
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["psutil", "torch", "vllm_pd.peer.agent", "vllm_pd.transfer.nixl.transport"])


def answer(token_ids: list[int]) -> int:
    """What a prefill of this prompt leaves in every block."""
    return 1 + sum(token_ids) % 1_000_003


@dataclass
class Job:
    """One job on P: fills its blocks at `due`."""
    prefill: Prefill
    due: float
    blocks: list[int] = field(default_factory=list)
    cancelled: bool = False


class LightEngine:
    """Lives in its process; `serve` runs it until the pipe closes. It takes part from `do_start` on."""

    def __init__(self, role: str, settings: dict, work_s: float = 0.0, room: int = 4, elsewhere: bool = False,
                 head_size: int = HEAD_SIZE, progress_thread: bool = False) -> None:
        self.memory = [torch.zeros((2, BLOCKS, BLOCK_SIZE * KV_HEADS * head_size), dtype=torch.int32)
                       for _ in range(LAYERS)]
        cache = describe(self.memory, num_blocks=BLOCKS, block_size=BLOCK_SIZE, kv_heads=KV_HEADS, head_size=head_size,
                         platform="cpu", backend="IPEX")
        member = local_member(m.Role(role), msgspec.structs.replace(FINGERPRINT, head_size=head_size))
        if elsewhere:  # as if in another container: nobody can judge it by process id, nor it anybody
            boot = member.host_id.partition("/")[0]
            member = msgspec.structs.replace(member, host_id=f"{boot}/{member.incarnation}")
        config = PDConfig.parse(role, {**PATIENT, **settings})
        self.worker = TransferWorker(NixlGenerations(member.incarnation, self.memory, cache, progress_thread,
                                                     config.transport_host))
        self.bell = threading.Event()
        self.agent = ControlAgent(config, member, self.worker.transport.metadata(), self.bell.set)
        self.work_s, self.room = work_s, room
        self.free = list(range(BLOCKS))
        self.prompts: dict[m.Attempt, tuple[str, list[int], list[int]]] = {}  # name, tokens, blocks
        self.ended: dict[str, str] = {}
        self.waiting: collections.deque[tuple[str, list[int]]] = collections.deque()
        self.jobs: dict[m.Attempt, Job] = {}
        self.held: dict[m.Attempt, list[int]] = {}  # the blocks of each hold
        self.moved = 0

    # Commands.

    def do_start(self) -> m.Member:
        self.agent.start()
        return self.agent.member

    def do_submit(self, requests: list[tuple[str, list[int]]]) -> None:
        self.waiting.extend(requests)

    def do_ended(self) -> dict[str, str]:
        """How each request since the last call ended: remote, local, or wrong."""
        ended, self.ended = self.ended, {}
        return ended

    def do_state(self) -> dict:
        process = psutil.Process()
        operators = self.agent.protocol.operators
        return {"free": len(self.free), "open": len(operators.open_attempts()), "jobs": len(self.jobs),
                "waiting": len(self.waiting) + len(self.prompts), "handles": self.worker.live_handles(),
                "counts": self.agent.counts(), "totals": operators.totals(), "dropped": self.agent.dropped(),
                "view": msgspec.structs.asdict(self.agent.protocol.decode.view()),
                "role": self.agent.protocol.state.role.value, "left": self.agent.protocol.state.left,
                "error": repr(self.agent.error) if self.agent.error else None,
                "fds": process.num_fds(), "threads": process.num_threads(), "rss": process.memory_info().rss,
                "moved": self.moved, "claimed": self.agent.protocol.prefill.is_read(), "reached": self._reached()}

    def _reached(self) -> list[str]:
        """The peers whose lifelines have been found once: from now on their deaths are seen there."""
        return [name for name, peer in list(self.agent.thread.liveness.rules._peers.items()) if peer.reached]

    def do_drain(self) -> None:
        self.agent.protocol.operators.drain()

    def do_role(self, role: str) -> str:
        return self.agent.protocol.operators.set_role(m.Role(role))

    def do_work(self, seconds: float) -> None:
        """How long a prefill takes, those that wait included."""
        self.work_s = seconds
        for job in self.jobs.values():
            job.due = min(job.due, time.monotonic() + seconds)

    def do_notify(self, peer: str, attempt: m.Attempt) -> None:
        """Deliver a notice of that attempt, without a write."""
        job = Job(Prefill(attempt, [0], [], 0, [], peer), 0.0, cancelled=True)
        self.jobs[attempt] = job
        self.worker.execute([transfer.Write(str(attempt), peer, [], [], [ArrivalNotice(attempt, 0).encode()])])

    def do_hold(self, tokens: list[int]) -> m.Attempt:
        """Keep the blocks of a prompt for whoever claims them."""
        hold = m.Attempt(self.agent.member.incarnation, "held", len(tokens))
        blocks = self.allocate(-(-len(tokens) // BLOCK_SIZE))
        assert self.agent.protocol.prefill.hold(hold, token_digest(tokens), blocks)
        self.held[hold] = blocks
        return hold

    def do_read(self, name: str, hold: m.Attempt, tokens: list[int]) -> None:
        """Claim a hold, and read it for ever."""
        blocks = self.allocate(-(-len(tokens) // BLOCK_SIZE))
        attempt = self.agent.protocol.decode.next_attempt(name)
        self.prompts[attempt] = (name, tokens, blocks)
        self.agent.protocol.decode.claim_hold(attempt, hold, token_digest(tokens), blocks, 0, WAIT_S)

    def do_refuse_probes(self) -> None:
        """Whoever connects to the lifeline from now on is refused, as by a firewall of this host that lets open
        connections be: the engine lives, and its other sockets stay."""
        quiet, self._writer = os.pipe()
        os.dup2(quiet, self.agent.lifeline_fileno())  # which the control thread still polls
        os.close(quiet)
        self.agent.protocol.control.wake()  # so that it does not poll what was there before

    def do_quit(self) -> None:
        self.agent.close()
        self.worker.close()
        self.agent.end_lifeline()
        raise SystemExit

    # Blocks.

    def allocate(self, count: int) -> list[int]:
        """So many free ones, of which there are enough."""
        blocks, self.free = self.free[:count], self.free[count:]
        return blocks

    def release(self, blocks: list[int]) -> None:
        """They are free again."""
        self.free += blocks

    # The loop.

    def serve(self, pipe: Connection) -> None:
        while True:
            while pipe.poll():
                name, arguments = pipe.recv()
                try:
                    pipe.send((True, getattr(self, f"do_{name}")(*arguments)))
                except SystemExit:
                    pipe.send((True, None))
                    return
                except Exception:
                    pipe.send((False, traceback.format_exc()))
            if self.agent.member.address:
                self.step()
            self.bell.wait(PAUSE_S)
            self.bell.clear()

    def step(self) -> None:
        self._collect()
        self._start_waiting()
        self._compute()
        queued = sum(len(job.prefill.token_ids) for job in self.jobs.values() if not job.blocks)
        self.agent.protocol.prefill.set_credits(max(0, self.room - len(self.jobs)), queued)
        self.agent.protocol.set_load(m.Load(len(self.prompts) + len(self.jobs), len(self.waiting), len(self.free)))

    def _collect(self) -> None:
        progress = self.worker.take_progress()
        for notice in progress.notices:
            arrival = ArrivalNotice.decode(notice.payload)
            self.agent.protocol.decode.arrived(arrival.attempt, arrival.rank)
        for refusal in progress.refused:
            self.agent.protocol.prefill.peer_unadded(refusal.peer, refusal.reason)
        for made in progress.made:
            if made.error:
                self.agent.protocol.transport.not_renewed(made.error)
            else:
                self.agent.protocol.transport.renewed(made.name, made.metadata)
        for end in progress.finished:
            if end.key == RETIRE_KEY:
                self.agent.protocol.transport.retired(end.ok, end.error)
            else:
                self._written(end)
        for event in iter(self.agent.protocol.poll_event, None):
            self._on_event(event)

    def _on_event(self, event: object) -> None:
        if isinstance(event, e.AddPeer):
            self.worker.execute([transfer.AddTransferPeer(event.name, event.metadata)])
        elif isinstance(event, e.DropPeer):
            self.worker.execute([transfer.DropTransferPeer(event.name)])
        elif isinstance(event, e.RenewTransport):
            self.worker.execute([transfer.MakeGeneration(event.name)])
        elif isinstance(event, e.RetireTransport):
            self.worker.execute([transfer.DestroyOlder(RETIRE_KEY)])
        elif isinstance(event, Prefill):
            self.jobs[event.attempt] = Job(event, time.monotonic() + self.work_s)
        elif isinstance(event, Cancelled):
            self._cancelled(event.attempt)
        elif isinstance(event, Prefilled):
            self._prefilled(event.attempt)
        elif isinstance(event, Fallback):
            self.ended[self.prompts[event.attempt][0]] = "local"
        elif isinstance(event, HoldEnded):
            self.release(self.held.pop(event.hold))
        elif isinstance(event, Released):
            self.release(self.prompts.pop(event.attempt)[2])

    def _start_waiting(self) -> None:
        while self.waiting:
            name, tokens = self.waiting[0]
            count = -(-len(tokens) // BLOCK_SIZE)
            if count > len(self.free):
                return
            self.waiting.popleft()
            view = self.agent.protocol.decode.view()
            if not (self.agent.protocol.state.hands_over and view.broker_up and view.prefill_peers):
                self.ended[name] = "local"
                continue
            blocks = self.allocate(count)
            for layer in self.memory:
                layer[:, blocks] = 0
            attempt = self.agent.protocol.decode.next_attempt(name)
            self.prompts[attempt] = (name, tokens, blocks)
            self.agent.protocol.decode.submit(attempt, tokens, blocks, 0)

    def _prefilled(self, attempt: m.Attempt) -> None:
        name, tokens, blocks = self.prompts.pop(attempt)
        right = all(bool((layer[:, blocks] == answer(tokens)).all()) for layer in self.memory)
        self.ended[name] = "remote" if right else "wrong"
        self.release(blocks)

    def _compute(self) -> None:
        for attempt, job in list(self.jobs.items()):
            count = len(job.prefill.block_ids)
            if job.blocks or job.due > time.monotonic() or count > len(self.free):
                continue
            if not self.agent.protocol.prefill.may_write(attempt):
                del self.jobs[attempt]
                self.agent.protocol.prefill.failed(attempt, "the lease ran out")
                continue
            job.blocks = self.allocate(count)
            for layer in self.memory:
                layer[:, job.blocks] = answer(job.prefill.token_ids)
            self.worker.execute([transfer.Write(str(attempt), job.prefill.peer, job.blocks, job.prefill.block_ids,
                                                [ArrivalNotice(attempt, 0).encode()])])

    def _written(self, end: transfer.Finished) -> None:
        attempt = next(attempt for attempt in self.jobs if str(attempt) == end.key)
        job = self.jobs.pop(attempt)
        self.release(job.blocks)
        self.moved += end.bytes
        if end.may_land:
            self.agent.protocol.prefill.unproven(attempt, f"the transfer failed: {end.error}")
        if job.cancelled:
            self.agent.protocol.prefill.ended(attempt)
        elif end.ok:
            self.agent.protocol.prefill.sent(attempt, m.Timings(transfer_s=end.seconds, bytes=end.bytes, measured=True))
        else:
            self.agent.protocol.prefill.failed(attempt, end.error)

    def _cancelled(self, attempt: m.Attempt) -> None:
        job = self.jobs.get(attempt)
        if job is None or not job.blocks:
            self.jobs.pop(attempt, None)
            self.agent.protocol.prefill.ended(attempt)
        elif not job.cancelled:
            job.cancelled = True
            self.worker.execute([transfer.CancelTransfer(str(attempt))])


def serve(pipe: Connection, role: str, settings: dict, more: dict) -> None:
    """The life of an engine's process."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        LightEngine(role, settings, **more).serve(pipe)
    os._exit(0)


# The test's end.


class Light:
    """One engine process. `start` has it register; until then it gets ready."""

    def __init__(self, role: m.Role, settings: dict, more: dict) -> None:
        self._pipe, theirs = _SERVER.Pipe()
        self._process = _SERVER.Process(target=serve, args=(theirs, role.value, settings, more))
        self._process.start()
        theirs.close()
        self.member: m.Member | None = None

    def start(self) -> Light:
        self.member = self.ask("start")
        return self

    def ask(self, name: str, *arguments: object, timeout_s: float = WAIT_S) -> object:
        self._pipe.send((name, arguments))
        assert self._pipe.poll(timeout_s), f"{name} is not answered by {self._process.pid}"
        fine, result = self._pipe.recv()
        assert fine, result
        return result

    def state(self) -> dict:
        return self.ask("state")

    def wait_until(self, condition, timeout_s: float = WAIT_S) -> dict:
        deadline = time.monotonic() + timeout_s
        while not condition(state := self.state()):
            assert time.monotonic() < deadline, state
            time.sleep(0.02)
        return state

    def wait_for_peers(self, count: int) -> dict:
        return self.wait_until(lambda state: state["view"]["broker_up"] and state["view"]["prefill_peers"] == count)

    def wait_ended(self, names: set[str], timeout_s: float = WAIT_S) -> dict[str, str]:
        """How these ended; nothing else may."""
        ended: dict[str, str] = {}
        deadline = time.monotonic() + timeout_s
        while not ended.keys() >= names:
            assert time.monotonic() < deadline, (names - ended.keys(), self.state())
            ended |= self.ask("ended")
            time.sleep(0.01)
        assert ended.keys() == names
        return ended

    def at_rest(self) -> dict:
        """B20: everything is back."""
        return self.wait_until(lambda state: (state["free"], state["open"], state["jobs"], state["waiting"],
                                              state["handles"], state["error"]) == (BLOCKS, 0, 0, 0, 0, None))

    def send(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """SIGSTOP; returns when each of its threads has stopped."""
        from tests.forked import freeze  # not for the engine's process, which does not find the tests
        freeze(self._process.pid)

    def kill(self) -> None:
        """SIGKILL; returns when nothing of it is left."""
        self._process.kill()
        self._process.join(WAIT_S)
        assert not self._process.is_alive()
        self._pipe.close()

    def quit(self) -> None:
        self.ask("quit")
        self._pipe.close()


class Nursery:
    """Makes engines. A context manager; all that it has made end with it."""

    def __enter__(self) -> Nursery:
        self._made: list[Light] = []
        return self

    def engine(self, role: m.Role, broker: str, settings: dict | None = None, **more: object) -> Light:
        """A new engine's process, registered or about to be."""
        return self.prepare(role, broker, settings, **more).start()

    def prepare(self, role: m.Role, broker: str, settings: dict | None = None, **more: object) -> Light:
        """One that is to be started later, and gets ready until then."""
        self._made.append(Light(role, {"broker": broker, **(settings or {})}, more))
        return self._made[-1]

    def __exit__(self, *exc_info: object) -> None:
        for light in self._made:
            light.kill()
