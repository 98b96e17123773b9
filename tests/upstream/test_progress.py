# SPDX-License-Identifier: Apache-2.0
"""Parked prompts stand in nobody's way, and nobody in theirs: a pool that is nearly full (B31), a stream of new prompts
that never ends (B32)."""

import random

import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.upstream.decoder import Decoder
from vllm_pd.protocol.actions import Prefilled, Released
from vllm_pd.protocol.messages import Timings


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("cap", [0.25, 0.5, 1.0])
def test_b31_running_sequences_grow_while_many_are_parked(monkeypatch, cap, chunk):
    decoder = Decoder(monkeypatch, max_num_seqs=16, chunk=chunk, max_parked_fraction=cap)
    engine, dice = decoder.engine, random.Random(7)
    parked_most = preempted = 0
    waiting_for_peer: list = []
    for number in range(120):
        for part in range(2 if number < 60 else 0):
            first = 1000 * (2 * number + part)
            length = dice.randrange(2, 6 * BLOCK_SIZE)
            engine.add(f"r{number}.{part}", list(range(first, first + length)), max_tokens=2 * BLOCK_SIZE)
        running = set(engine.scheduler.running)
        decoder.step()
        preempted += sum(group in engine.scheduler.waiting for group in running)
        held = decoder.prefills._attempts
        blocks = sum(remote.blocks for remote in held.values())
        parked_most = max(parked_most, blocks)
        assert blocks <= cap * 64
        waiting_for_peer += [a for a in engine.scheduler.remote_prefilling if a not in waiting_for_peer]
        if len(waiting_for_peer) > 3 or number > 60:  # the peers are slow
            for attempt in waiting_for_peer[:1]:
                engine.write_remotely(attempt)
                decoder.tell(Prefilled(attempt, Timings()))
                waiting_for_peer.remove(attempt)
    for _ in range(400):
        for attempt in list(engine.scheduler.remote_prefilling):
            if attempt in held:
                engine.write_remotely(attempt)
                decoder.tell(Prefilled(attempt, Timings()))
        decoder.step()
    assert parked_most > 8 and preempted, "nothing was tight"
    engine.check_at_rest()


def one_step_prompts(engine: SimulatedEngine, count: int) -> None:
    """Prompts that are done with their prefill, as those of peers are: their seats come free at once."""
    for _ in range(count):
        number = one_step_prompts.made = one_step_prompts.made + 1
        engine.add(f"new{number}", [5000 + number], max_tokens=1)


one_step_prompts.made = 0


def test_b32_an_arrived_prompt_decodes_at_once_whatever_comes_after_it(monkeypatch):
    decoder = Decoder(monkeypatch)
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("abc", 1)]
    first_tokens = []
    for step in range(12):
        one_step_prompts(decoder.engine, 4)
        if step % 3 == 1 and attempts:
            attempt = attempts.pop(0)
            decoder.engine.write_remotely(attempt)
            decoder.tell(Prefilled(attempt, Timings()))
            assert attempt.request_id in decoder.step(), "the step in which it is told decodes it"
            first_tokens.append(attempt.request_id)
        else:
            decoder.step()
    assert first_tokens == ["a", "b", "c"]
    decoder.run()
    decoder.engine.check_at_rest()


def test_b32_several_at_once_decode_together_in_the_order_of_their_arrival(monkeypatch):
    decoder = Decoder(monkeypatch)
    attempts = [decoder.add(name, 100 * number) for number, name in enumerate("abc", 1)]
    for attempt in reversed(attempts):
        decoder.engine.write_remotely(attempt)
        decoder.tell(Prefilled(attempt, Timings()))
    one_step_prompts(decoder.engine, 4)
    assert decoder.step() == ["c", "b", "a"]


def test_b32_a_prompt_that_arrives_each_step_leaves_new_ones_every_other_step(monkeypatch):
    decoder = Decoder(monkeypatch, max_num_seqs=16)
    attempts = [decoder.add(f"r{number}", 100 * number) for number in range(1, 11)]
    one_step_prompts(decoder.engine, 4)
    batches = []
    for attempt in attempts:
        decoder.engine.write_remotely(attempt)
        decoder.tell(Prefilled(attempt, Timings()))
        batches.append(decoder.step())
    assert any(name.startswith("new") for name in batches[1]), "the second step is theirs"
    for first, second in zip(batches[2:], batches[3:], strict=False):
        assert any(name.startswith("r") for name in first + second)
    decoder.run()
    decoder.engine.check_at_rest()


def test_b32_new_prompts_are_not_kept_out(monkeypatch):
    """A prompt that arrives each step leaves the new ones every other one at the least."""
    decoder = Decoder(monkeypatch, max_num_seqs=3, max_local_prefill_tokens=BLOCK_SIZE)
    served = 0
    one_step_prompts(decoder.engine, 4)
    for number in range(40):
        first = 10_000 + 100 * number
        decoder.engine.add(f"r{number}", list(range(first, first + 2 * BLOCK_SIZE)), max_tokens=1)
        for attempt in list(decoder.engine.scheduler.remote_prefilling):
            decoder.engine.write_remotely(attempt)
            decoder.tell(Prefilled(attempt, Timings()), Released(attempt))
        served += sum(name.startswith("new") for name in decoder.step())
    assert served == 4
