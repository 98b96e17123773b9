# SPDX-License-Identifier: Apache-2.0
"""A decode engine of V0 that a test drives: real scheduler and binding. What a control thread does, the test does."""
from types import SimpleNamespace

from vllm.core.scheduler import Scheduler

from tests.fakes.simulated_engine import BLOCK_SIZE, FakePeers, SimulatedEngine
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover import decode
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.cluster import QueueView
from vllm_pd.peer.prompt_records import PromptRecords
from vllm_pd.protocol.actions import AttemptEnd, Fallback, FallbackReason
from vllm_pd.protocol.messages import Attempt
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0.decode import RemotePrefills

PROMPT = list(range(100, 100 + 3 * BLOCK_SIZE))


class Agent:
    """The control agent as a decode engine's binding knows it; `peers` are the prefill engines there are."""

    def __init__(self) -> None:
        self.peers = {"p", "q"}
        self.state = SimpleNamespace(hands_over=True)
        self.submitted: dict[Attempt, tuple] = {}
        self.aborted: list[Attempt] = []
        prompts = self.prompts = PromptRecords()
        self.prompt_decided, self.note_prompt = prompts.decided, prompts.note

    def view(self, avoid=()) -> QueueView:
        return QueueView(True, 0, len(self.peers.difference(avoid)), None)

    def next_attempt(self, request_id: str) -> Attempt:
        return Attempt("d", request_id, len(self.submitted))

    def submit(self, attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope) -> None:
        self.submitted[attempt] = (block_ids[cached_blocks:], avoid, deadline_s)

    def abort(self, attempt: Attempt) -> None:
        self.aborted.append(attempt)


class Peers(FakePeers):
    """The binding in the scheduler's place for it, with the record of who may write where."""

    def __init__(self, scheduler: Scheduler, prefills: RemotePrefills) -> None:
        super().__init__(scheduler, lambda group: True)
        self.prefills = prefills

    def choose_remote_prefill(self, seq_group, num_cached_tokens):
        return self.prefills.decide_and_commit(seq_group, num_cached_tokens)

    def start_remote_prefill(self, attempt, seq_group, block_ids, num_cached_tokens) -> None:
        super().start_remote_prefill(attempt, seq_group, block_ids, num_cached_tokens)
        self.prefills.start(attempt, seq_group, block_ids, num_cached_tokens)

    def abort_remote_prefill(self, attempt) -> None:
        super().abort_remote_prefill(attempt)
        self.prefills.abort(attempt)


class Decoder:
    """One decode engine. The clock stands still unless it is moved."""

    def __init__(self, monkeypatch, max_num_seqs: int = 4, chunk: int | None = None, **settings) -> None:
        self.now = 1000.0
        monkeypatch.setattr(decode.time, "monotonic", lambda: self.now)
        self.engine = SimulatedEngine(blocks=64, max_num_seqs=max_num_seqs, max_model_len=8 * BLOCK_SIZE,
                                      chunk=chunk)
        self.agent = Agent()
        extra = {"broker": "tcp://127.0.0.1:5700", "max_local_prefill_tokens": 2 * BLOCK_SIZE,
                 "max_parked_fraction": 1.0, **settings}
        self.prefills = RemotePrefills(PDConfig.parse("kv_consumer", extra), self.agent, self.engine.scheduler,
                                       PDMetrics("test"), {}, StepSpeed())
        self.engine.peers = self.engine.scheduler.disagg = Peers(self.engine.scheduler, self.prefills)
        self.progress = Progress()

    def add(self, request_id: str, first_token: int = 100, **more) -> Attempt:
        self.engine.add(request_id, [first_token + i for i in range(len(PROMPT))], **more)
        self.step()
        return self.engine.attempt_of(request_id)

    def tell(self, *events) -> None:
        for event in events:
            self.prefills.handle(event, self.progress)

    def step(self, stalled: bool = False) -> list[str]:
        self.prefills.give_back(self.progress, stalled)
        progress, self.progress = self.progress, Progress()
        batch = self.engine.step(**progress.arguments())
        self.engine.check_references()
        self.engine.check_writers()
        return batch

    def run(self) -> None:
        for _ in range(100):
            self.step()
            if not self.engine.scheduler.has_schedulable_seqs():
                return
        raise AssertionError("no end in sight")


def lost(attempt: Attempt, reason=FallbackReason.PEER, peer="p") -> Fallback:
    return Fallback(attempt, reason, AttemptEnd.FAILED, "", peer)
