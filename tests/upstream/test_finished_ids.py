# SPDX-License-Identifier: Apache-2.0
"""The ids of ended requests, which LLMEngine.step tells the workers, and the same ids in use again: the real function,
scheduler and binding."""
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.engine.llm_engine import LLMEngine, SchedulerContext, SchedulerOutputState
from vllm.sequence import ParallelSampleSequenceGroup, SequenceGroup

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine
from tests.upstream.test_mutual_waits import Node, Ring, tokens


@pytest.fixture
def node(monkeypatch) -> Node:
    ring = Ring(monkeypatch)
    node, _ = ring.add_engine(0.9), ring.add_engine(0.9)
    return node


class SteppedEngine(SimpleNamespace):
    """What LLMEngine.step knows of its engine. `told`: the ids that the workers got with each step they ran."""

    def __init__(self, simulated: SimulatedEngine, split_requests: dict, disagg=None) -> None:
        super().__init__(
            scheduler=[simulated.scheduler], scheduler_config=simulated.scheduler.scheduler_config,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1), disagg=disagg, told=[],
            cached_scheduler_outputs=[SchedulerOutputState()], scheduler_contexts=[SchedulerContext()],
            seq_id_to_seq_group=split_requests, _skip_scheduling_next_step=False, simulated=simulated,
            _take_transfer_progress=disagg.take_progress if disagg else dict,
            _has_remaining_steps=lambda metadata: False, _expects_steps=lambda: True,
            _get_last_sampled_token_ids=lambda virtual_engine: None, _process_model_outputs=lambda ctx: None,
            do_log_stats=lambda *outputs: None, do_tracing=lambda outputs: None,
            model_executor=SimpleNamespace(execute_model=self._execute))

    def _execute(self, execute_model_req) -> list:
        self.told.append(execute_model_req.finished_requests_ids)
        return []

    def _add_processed_request(self, request_id: str, params: SamplingParams) -> SequenceGroup:
        self.simulated.add(request_id, [1, 2, 3])
        return self.simulated.groups[request_id]

    def step(self) -> None:
        LLMEngine.step(self)

    def ask_for_samples(self, request_id: str) -> list[str]:
        """Ask for two samples. The ids of those whose request the engine knows after a step."""
        ParallelSampleSequenceGroup.add_request(request_id, self, SamplingParams(n=2))
        self.step()
        return sorted(self.seq_id_to_seq_group)

    def abort(self, request_id: str) -> None:
        self.scheduler[0].abort_seq_group(request_id, self.seq_id_to_seq_group)


def test_b20_the_workers_learn_of_each_end_whatever_step_comes_next(node):
    """B20: a model runner drops the request's generator then. A step that only parks runs nothing, and tells nobody."""
    engine = SteppedEngine(node.sim, node.seq_id_to_seq_group, node.disagg)
    node.sim.add("ends", [1, 2, 3])
    node.sim.abort("ends")
    node.sim.add("remote", tokens(0, 3 * BLOCK_SIZE))
    engine.step()
    assert node.sim.attempt_of("remote") and engine.told == []
    for _ in range(2):
        node.sim.add("here", [4, 5, 6])
        engine.step()
    assert engine.told == [["ends"], []]


@pytest.mark.parametrize("disaggregation", [False, True])
def test_b25_b50_the_samples_of_a_request_are_known_where_its_id_was_aborted_before(node, disaggregation):
    """A retry with the same id. It got no answer where the end of the first one was told with its own first step."""
    if disaggregation:
        engine = SteppedEngine(node.sim, node.seq_id_to_seq_group, node.disagg)
    else:
        engine = SteppedEngine(SimulatedEngine(disagg=False), {})
    samples = ["r_parallel_sample_0", "r_parallel_sample_1"]
    assert engine.ask_for_samples("r") == samples
    engine.abort("r")
    engine.step()
    assert not engine.seq_id_to_seq_group
    assert engine.ask_for_samples("r") == samples
