# SPDX-License-Identifier: Apache-2.0
"""What a decode engine does with prompts whose remote prefill failed: another peer, or its own turn, in fresh blocks.

What it does as one of V1 does: tests/bindings/decoding.py.
"""
import dataclasses

import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE, FakePeers
from tests.upstream.decoder import PROMPT, Decoder, lost
from vllm_pd.protocol.actions import FallbackReason, Prefilled, Released, Timed
from vllm_pd.protocol.messages import Timings


@pytest.fixture
def decoder(monkeypatch):
    return Decoder(monkeypatch)


def in_batches_of_one(decoder) -> None:
    """From now on a batch of prompts that are prefilled here is one."""
    decoder.prefills._capacity = dataclasses.replace(decoder.prefills._capacity, batch_tokens=len(PROMPT))


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


def test_fallbacks_leave_the_running_ones_their_share(monkeypatch):
    decoder = Decoder(monkeypatch, max_num_seqs=8, attempts=1)
    in_batches_of_one(decoder)
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
    in_batches_of_one(decoder)
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
    assert decoder.prefills.decide_and_commit(group, 0) is None


@pytest.mark.parametrize("released_first", [False, True])
def test_b25_abort_while_a_fallback_waits_for_its_turn(monkeypatch, released_first):
    decoder = Decoder(monkeypatch, max_num_seqs=8, attempts=1)
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("ab", 1)]
    in_batches_of_one(decoder)
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
