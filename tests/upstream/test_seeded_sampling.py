# SPDX-License-Identifier: Apache-2.0
"""B6: a seeded request whose prompt step ran elsewhere begins to draw with its first decode here."""

from types import SimpleNamespace

import torch
from vllm import SamplingParams
from vllm.engine.llm_engine import LLMEngine, SchedulerContext, SchedulerOutputState
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.sequence import SequenceData, SequenceGroupMetadata

from tests.fakes.simulated_engine import SimulatedEngine

SEED = 5


def prepared(data: SequenceData, generators: dict[str, torch.Generator], seed: int | None = SEED,
             is_prompt: bool = False) -> torch.Generator | None:
    """The generator that the sampler is given for one step of a request with this data."""
    metadata = SequenceGroupMetadata("r", is_prompt=is_prompt, seq_data={3: data}, block_tables={3: [0]},
                                     sampling_params=SamplingParams(seed=seed, temperature=1.0))
    query_len = data.get_len() if is_prompt else 1
    [group] = SamplingMetadata.prepare([metadata], [data.get_len()], [query_len], "cpu", False,
                                       generators=generators).seq_groups
    return group.generator


def first_draw(generator: torch.Generator) -> float:
    return torch.rand(1, generator=generator).item()


def test_b6_the_first_decode_makes_the_generator_that_the_prompt_step_would_have_made():
    """B6: equal draws."""
    data = SequenceData.from_seqs([1, 2, 3])
    here, there = prepared(data, {}), prepared(data, {}, is_prompt=True)
    assert first_draw(here) == first_draw(there)


def test_b6_later_decodes_go_on_with_it():
    """B6: the same object, not one that starts again."""
    generators: dict[str, torch.Generator] = {}
    data = SequenceData.from_seqs([1, 2, 3])
    first = prepared(data, generators)
    data.append_token_id(4, 0.0)
    assert prepared(data, generators) is first


def test_b6_without_a_seed_there_is_none():
    """B6, B50: as upstream."""
    generators: dict[str, torch.Generator] = {}
    assert prepared(SequenceData.from_seqs([1, 2, 3]), generators, seed=None) is None
    assert not generators


def test_b20_the_model_runner_learns_of_each_end_whatever_step_comes_next():
    """B20: it drops the request's generator then. A step that only parks runs nothing, and so tells nobody."""
    told: list[list[str]] = []
    simulated = SimulatedEngine(wants_remote=lambda group: group.request_id == "remote")
    engine = SimpleNamespace(
        scheduler=[simulated.scheduler], scheduler_config=simulated.scheduler.scheduler_config,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), cached_scheduler_outputs=[SchedulerOutputState()],
        scheduler_contexts=[SchedulerContext()], seq_id_to_seq_group={}, _skip_scheduling_next_step=False,
        _has_remaining_steps=lambda metadata: False, _take_transfer_progress=dict, _expects_steps=lambda: True,
        _get_last_sampled_token_ids=lambda virtual_engine: None, _process_model_outputs=lambda ctx: None,
        do_log_stats=lambda *outputs: None, do_tracing=lambda outputs: None,
        model_executor=SimpleNamespace(execute_model=lambda execute_model_req: told.append(
            execute_model_req.finished_requests_ids) or []))
    simulated.add("ends", [1, 2, 3])
    simulated.abort("ends")
    for name in ("remote", "here"):
        simulated.add(name, [4, 5, 6])
        LLMEngine.step(engine)
    assert simulated.attempt_of("remote") and told == [["ends"]]
    assert simulated.scheduler.get_and_reset_finished_requests_ids() == []
