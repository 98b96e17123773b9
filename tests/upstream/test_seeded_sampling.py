# SPDX-License-Identifier: Apache-2.0
"""B6: a seeded request whose prompt step ran elsewhere begins to draw with its first decode here."""

import torch
from vllm import SamplingParams
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.sequence import SequenceData, SequenceGroupMetadata

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
