# SPDX-License-Identifier: Apache-2.0
"""`max_local_prefill_tokens: auto` on V0's patched scheduler: what is decided, and by which measures."""
import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE
from tests.upstream.decoder import PROMPT, Decoder
from tests.upstream.test_mutual_waits import Ring, tokens
from vllm_pd.decisions import measured
from vllm_pd.peer.own_jobs import PrefillLoads

FAST, SLOW = 1e6, 1.0  # tokens per second of a peer


@pytest.fixture
def decoder(monkeypatch):
    found = Decoder(monkeypatch, max_local_prefill_tokens="auto", log_decisions=True)
    found.agent.prefill_loads = lambda *asked: PrefillLoads(0, ((0, SLOW), ))
    found.prefills.measures._speed.stepped(found.now, 1000, 0, 1.0)
    return found


def test_the_better_place_is_taken(decoder, caplog):
    caplog.set_level("INFO", logger="vllm.pd")
    decoder.engine.add("here", list(PROMPT))
    decoder.run()
    decoder.agent.prefill_loads = lambda *asked: PrefillLoads(0, ((0, FAST), ))
    assert decoder.add("there", 500) is not None
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert [line.partition(": here")[0] for line in lines] == [
        f"request here, {len(PROMPT)} tokens to compute: local, reason ttft",
        f"request there, {len(PROMPT)} tokens to compute: remote, reason ttft"]


def test_prompts_of_the_same_step_are_waited_for_and_decodes_count(decoder):
    seen = []
    measure = decoder.prefills.measures.here

    def here(now, before, decodes, rates):
        seen.append((before, decodes))
        return measure(now, before, decodes, rates)

    decoder.prefills.measures.here = here
    for number in range(3):
        decoder.engine.add(f"r{number}", [100 * number + i for i in range(len(PROMPT))])
    decoder.step()
    assert seen == [(number * len(PROMPT), 0) for number in range(3)]
    decoder.step()
    decoder.engine.add("late", list(PROMPT))
    decoder.step()
    assert seen[-1] == (0, 3)
    decoder.run()


def test_steps_are_measured_by_the_clock(monkeypatch):
    """By the real `V0Handover`: from its step to what the loop asks next."""
    monkeypatch.setattr(measured, "MIN_TOKENS", BLOCK_SIZE)
    ring = Ring(monkeypatch)
    node = ring.add_engine(0.9, blocks=40, max_num_seqs=4)
    step = node.sim.step

    def timed_step(**progress):
        batch = step(**progress)
        ring.now += 0.25
        node.disagg.expects_steps()  # as a step of LLMEngine asks at its end
        return batch

    monkeypatch.setattr(node.sim, "step", timed_step)
    node.ask("a", tokens(0, BLOCK_SIZE), max_tokens=6)
    ring.run()
    assert node.disagg.speed.step_s == pytest.approx(0.25)
    assert node.disagg.speed.tokens_per_s == pytest.approx(BLOCK_SIZE / 0.25), "its first step, before any decode"
