# SPDX-License-Identifier: Apache-2.0
"""What a decode engine does with prompts whose remote prefill failed: another peer, or its own turn, in fresh blocks.

The real scheduler and the real binding; the control thread's part is played by hand.
"""
from types import SimpleNamespace

import pytest
from vllm.core.scheduler import Scheduler

from tests.fakes.simulated_engine import BLOCK_SIZE, FakePeers, SimulatedEngine
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover import decode
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import Progress
from vllm_pd.peer.cluster import QueueView
from vllm_pd.peer.prompt_records import PromptRecords
from vllm_pd.protocol.actions import AttemptEnd, Fallback, FallbackReason, Prefilled, Released, Timed
from vllm_pd.protocol.messages import Attempt, Timings
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
        return self.prefills.choose(seq_group, num_cached_tokens)

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


@pytest.fixture
def decoder(monkeypatch):
    return Decoder(monkeypatch)


def lost(attempt: Attempt, reason=FallbackReason.PEER, peer="p") -> Fallback:
    return Fallback(attempt, reason, AttemptEnd.FAILED, "", peer)


def test_b21_a_second_attempt_goes_to_another_peer_in_fresh_blocks(decoder):
    first = decoder.add("r")
    decoder.now += 30
    decoder.tell(lost(first))
    decoder.step()
    second = decoder.engine.attempt_of("r")
    blocks, avoid, deadline_s = decoder.agent.submitted[second]
    assert second.number > first.number and avoid == ("p", )
    assert deadline_s == 90.0, "all attempts together have the deadline"
    assert not set(blocks) & set(decoder.agent.submitted[first][0]), "the first peer may still write to its blocks"
    decoder.engine.write_remotely(first)  # late
    decoder.engine.write_remotely(second)
    decoder.tell(Prefilled(second, Timings()), Released(first))
    decoder.run()
    decoder.engine.check_at_rest()
    assert not decoder.prefills.waiting_for_peers


def test_b119_an_engine_remembers_what_a_prompt_went_through(decoder):
    def known(name: str) -> tuple:
        record = decoder.agent.prompts.find(name)
        return (record.decision, record.reason, record.attempts, record.peer, record.outcome, record.detail,
                record.timings.measured, record.parked_s, record.first_step_s is not None)

    first = decoder.add("r")
    assert known("r") == ("remote", "length", 1, "", "", "", False, None, False)
    decoder.tell(lost(first), Released(first))
    assert known("r") == ("remote", "length", 1, "p", "failed", "peer: ", False, None, False)
    decoder.step()
    second = decoder.engine.attempt_of("r")
    assert known("r") == ("remote", "length", 2, "", "", "", False, None, False)
    decoder.now += 2.0
    decoder.engine.write_remotely(second)
    decoder.tell(Prefilled(second, Timings(), "q"), Timed(second, Timings(queue_s=1.0, measured=True), "q"))
    decoder.run()
    decoder.prefills.scheduled()
    decoder.prefills.update_metrics()
    assert known("r")[:8] == ("remote", "length", 2, "q", "done", "", True, 2.0)
    decoder.engine.add("short", [1, 2, 3])
    decoder.run()
    assert known("short") == ("local", "threshold", 0, "", "", "", False, None, False)
    stays = decoder.add("s", 300)
    decoder.tell(lost(stays, FallbackReason.DEADLINE, ""), Released(stays))
    assert decoder.step() == ["s"]
    assert known("s") == ("local", "retry", 1, "", "failed", "deadline: ", False, None, False)
    decoder.engine.abort("s")
    gone = decoder.add("t", 600)
    decoder.engine.abort("t")
    decoder.tell(Released(gone))
    assert known("t")[4] == "cancelled"


def test_b21_attempts_are_counted(decoder):
    first = decoder.add("r")
    decoder.tell(lost(first), Released(first))
    decoder.step()
    second = decoder.engine.attempt_of("r")
    decoder.agent.peers.add("s")
    decoder.tell(lost(second, peer="q"), Released(second))
    assert decoder.step() == ["r"], "prefilled here"
    decoder.run()
    decoder.engine.check_at_rest()


@pytest.mark.parametrize("reason", [FallbackReason.BROKER, FallbackReason.QUEUE, FallbackReason.FEATURE,
                                    FallbackReason.DEADLINE, FallbackReason.CONTROL])
def test_no_second_attempt_where_the_peer_was_not_at_fault(decoder, reason):
    attempt = decoder.add("r")
    decoder.tell(lost(attempt, reason, ""), Released(attempt))
    assert decoder.step() == ["r"]


def test_no_second_attempt_without_another_peer_or_without_time(decoder):
    decoder.agent.peers = {"p"}
    attempt = decoder.add("r")
    decoder.tell(lost(attempt), Released(attempt))
    assert decoder.step() == ["r"]
    decoder.run()
    decoder.agent.peers = {"p", "q"}
    attempt = decoder.add("s", 300)
    decoder.now += 120.0
    decoder.tell(lost(attempt), Released(attempt))
    assert decoder.step() == ["s"]


def test_fallbacks_leave_the_running_ones_their_share(monkeypatch):
    decoder = Decoder(monkeypatch, max_num_seqs=8, attempts=1)
    decoder.prefills._batch_tokens = len(PROMPT)  # one prompt a batch
    running = decoder.add("running", 900, max_tokens=16)
    decoder.engine.write_remotely(running)
    decoder.tell(Prefilled(running, Timings()))
    decoder.step()
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("abc", 1)]
    decoder.tell(*map(lost, attempts), *map(Released, attempts))
    assert decoder.step() == ["a"], "in the order in which they came"
    decoder.now += 2.0
    decoder.step()
    decoder.now += 0.5
    for _ in range(2):
        assert set(decoder.step()) == {"running", "a"}
    decoder.now += 1.49
    assert "b" not in decoder.step()
    decoder.now += 0.01
    assert decoder.step() == ["b"]
    decoder.engine.abort("c")  # whose blocks were released long ago
    decoder.run()
    decoder.engine.check_at_rest()
    assert not decoder.prefills.waiting_for_peers


def test_fallbacks_that_hold_each_others_blocks_come_back_all_the_same(monkeypatch):
    """The first one given back finds no free block, for the parked others have them."""
    decoder = Decoder(monkeypatch, max_num_seqs=20, attempts=1)
    attempts = [decoder.add(f"r{number}", 100 * number) for number in range(1, 21)]
    assert decoder.engine.manager.get_num_free_gpu_blocks() < 2 * len(PROMPT) // BLOCK_SIZE
    decoder.tell(*map(lost, attempts))  # no Released yet
    stalled = False
    for _ in range(30):
        batch = decoder.step(stalled)
        stalled = not batch
    assert not decoder.engine.scheduler.remote_prefilling, "all were given back"
    decoder.tell(*map(Released, attempts))
    for _ in range(60):
        decoder.now += 1.0
        decoder.step()
    decoder.engine.check_at_rest()


def test_a_fallback_that_finds_a_peer_after_all_holds_nobody_up(monkeypatch):
    """Given back to be prefilled here, it is parked anew: a prefill engine has come. Its turn is over with that."""
    decoder = Decoder(monkeypatch, max_num_seqs=8)
    decoder.prefills._batch_tokens = len(PROMPT)  # one prompt a batch
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("ab", 1)]
    decoder.agent.peers = set()
    decoder.tell(*map(lost, attempts), *map(Released, attempts))
    decoder.engine.add("others", [7], max_tokens=24)
    decoder.prefills.give_back(decoder.progress, False)  # a, to be prefilled here
    decoder.agent.peers = {"q"}
    decoder.step()
    again = [decoder.engine.attempt_of(name) for name in "ab"]
    decoder.agent.peers = set()
    for attempt in again:
        decoder.tell(lost(attempt, peer="q"), Released(attempt))
    for _ in range(12):
        decoder.now += 10.0
        decoder.step()
    assert not decoder.engine.scheduler.remote_prefilling, "both were given back while others run"
    decoder.run()
    decoder.engine.check_at_rest()


def test_b8_a_preempted_request_is_no_prompt_any_more(decoder):
    """One that never was asked about, as the engine did not hand over then."""
    decoder.engine.add("r", PROMPT, max_tokens=4)
    decoder.engine.scheduler.disagg = FakePeers(decoder.engine.scheduler, lambda group: False)
    decoder.engine.step()
    decoder.engine.step()
    [group] = decoder.engine.scheduler.running
    assert group.first_seq.get_output_len() == 2
    decoder.engine.scheduler.disagg = decoder.engine.peers
    assert decoder.prefills.choose(group, 0) is None


@pytest.mark.parametrize("released_first", [False, True])
def test_b25_abort_while_a_fallback_waits_for_its_turn(monkeypatch, released_first):
    decoder = Decoder(monkeypatch, max_num_seqs=8, attempts=1)
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("ab", 1)]
    decoder.prefills._batch_tokens = len(PROMPT)
    decoder.tell(*map(lost, attempts))
    if released_first:
        decoder.tell(*map(Released, attempts))
    assert decoder.step() == ["a"]
    decoder.engine.abort("b")
    if not released_first:
        decoder.tell(*map(Released, attempts))
    decoder.run()
    decoder.engine.check_at_rest()
    assert not decoder.prefills.waiting_for_peers
