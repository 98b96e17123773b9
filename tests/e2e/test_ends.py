# SPDX-License-Identifier: Apache-2.0
"""A slow wire and a prefill engine that computes the next prompt: the end of a write waits for no forward pass (B33).
P's pass for the second prompt lasts until the test says so."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import PATIENT, BrokerProcess, EngineProcess, prompt

from tests.waiting import wait_for

WIRE_S = 0.4
FIRST, SECOND = 600, 601  # tokens: together too many for one pass
SLOW_WIRE = f"""
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport
ranked = disagg.transfer.own.transport
ranked.transport = SlowTransport(ranked.transport, EmulatedWire(delay_s={WIRE_S}), 1)
"""
FAIL_NEXT = """
from faults import Fault, FaultyAgent
nixl = ranked.transport.transport.newest
nixl._agent = FaultyAgent(nixl._agent)
nixl._agent.faults.append(Fault.ERROR)
"""
LONG_PASS = """
runner = engine.model_executor.driver_worker.worker.model_runner
def execute_and_dwell(model_input, *arguments, execute=runner.execute_model, **options):
    if model_input.input_tokens.numel() == {tokens}:
        runner.execute_model = execute
        open({began!r}, "w").close()
        while not os.path.exists({over!r}):
            time.sleep(0.01)
    return execute(model_input, *arguments, **options)
runner.execute_model = execute_and_dwell
"""


@dataclass
class Stage:
    """One engine of each kind. P dwells in its pass for the second prompt from the moment `began` exists until `over`
    does."""
    mono: EngineProcess
    p: EngineProcess
    d: EngineProcess
    began: Path
    over: Path

    def submit(self) -> tuple[list[int], list[int]]:
        """Two prompts, "first" and "second"; returns while the first is on the wire and P computes the second."""
        first, second = prompt(FIRST, "first"), prompt(SECOND, "second")
        self.p.execute(LONG_PASS.format(tokens=SECOND, began=str(self.began), over=str(self.over)))
        self.p.do("hold", held=True)
        self.d.add_all([first, second], ["first", "second"])
        self.d.wait_until("disagg.agent.counts()['decode_granted'] == 2")
        self.p.execute("driver.held = False")
        wait_for(self.began.exists, "P computes the second")
        return first, second


@pytest.fixture
def stage(zygote, mono, tmp_path) -> Iterator[Stage]:
    broker = BrokerProcess()
    p = EngineProcess(zygote, "kv_producer", 1, broker.url, PATIENT, max_num_batched_tokens=1024)
    d = EngineProcess(zygote, "kv_consumer", 0, broker.url, {**PATIENT, "max_local_prefill_tokens": 0})
    try:
        for engine in (p, d):
            engine.ready()
        d.wait_for_peers()
        p.execute(SLOW_WIRE)
        yield Stage(mono, p, d, tmp_path / "began", tmp_path / "over")
    finally:
        (tmp_path / "over").touch()
        for process in (d, p, broker):
            process.stop()


def tokens_of(result: dict) -> list[int]:
    return result["outputs"][0]["token_ids"]


def test_b33_a_prompt_arrives_while_p_computes_the_next_one(stage):
    first, second = stage.submit()
    [result] = stage.d.wait(["first"])
    assert stage.d.counters()["attempts_total:done"] == 1
    stage.over.touch()
    [other] = stage.d.wait(["second"])
    assert [tokens_of(result), tokens_of(other)] == stage.mono.tokens([first, second])
    for engine in (stage.d, stage.p):
        engine.at_rest()


def test_b27_d_hears_of_a_write_that_failed_while_p_computes_the_next_one(stage):
    stage.p.execute(FAIL_NEXT)
    first, _ = stage.submit()
    [result] = stage.d.wait(["first"])
    assert tokens_of(result) == stage.mono.tokens([first])[0]
    assert stage.d.counters()["attempts_total:failed"] == 1
    stage.over.touch()
    stage.d.wait(["second"])
    assert stage.d.stats()["quarantined"] == 1, "what failed may land as long as P lives"
    stage.p.kill()
    stage.d.at_rest()


def test_b25_d_gets_its_blocks_back_while_p_computes_the_next_one(stage):
    stage.submit()
    stage.d.abort("first")
    stage.d.wait_until("not scheduler.quarantined")
    assert stage.d.stats()["remote_prefilling"] == 1
    stage.over.touch()
    stage.d.wait(["second"])
    for engine in (stage.d, stage.p):
        engine.at_rest()
