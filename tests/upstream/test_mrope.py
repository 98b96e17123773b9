# SPDX-License-Identifier: Apache-2.0
"""B1: the positions of a prompt of text that came from a peer, where the model has three for each token (M-RoPE)."""
from types import SimpleNamespace

import pytest
import torch
from vllm.sequence import SequenceData, SequenceGroupMetadata
from vllm.worker.model_runner import CUDAGraphRunner, ModelInputForGPUBuilder

from vllm_pd.v0.engine import V0Handover

LENGTH = 40
OLD = 7  # a position of an earlier batch


def park(data: SequenceData, on_gpu: bool) -> None:
    """As much of the binding as a prompt meets that goes to a peer."""
    group = SimpleNamespace(first_seq=SimpleNamespace(remote_decode=None, data=data))
    nothing = SimpleNamespace(start=lambda *arguments: None)
    binding = SimpleNamespace(remote_prefills=nothing, _settle_device=lambda: None, _sets_mrope=on_gpu)
    V0Handover.start_remote_prefill(binding, "attempt", group, [0, 1, 2], 0)


def gpu_positions(data: SequenceData) -> torch.Tensor:
    """What the GPU's builder makes of a decode."""
    runner = SimpleNamespace(scheduler_config=SimpleNamespace(is_multi_step=False),
                             model_config=SimpleNamespace(is_encoder_decoder=False))
    step = ModelInputForGPUBuilder.InterDataForSeqGroup(request_id="r", seq_ids=[0], is_prompt=False, block_tables=None,
                                                        computed_block_nums=[])
    metadata = SequenceGroupMetadata("r", False, {0: data}, None, {0: [0, 1, 2]})
    ModelInputForGPUBuilder._compute_lens(SimpleNamespace(runner=runner), step, 0, metadata)
    return torch.tensor((step.mrope_input_positions or step.input_positions)[0])


def replayed(positions: torch.Tensor, batch: int) -> torch.Tensor:
    """With which positions the captured graph of this size runs, after an earlier batch."""
    graph = object.__new__(CUDAGraphRunner)
    torch.nn.Module.__init__(graph)
    graph.backend_name, graph._is_encoder_decoder_model = "NO_ATTENTION", False
    graph.input_buffers = {"input_ids": torch.zeros(batch), "positions": torch.full((3, batch), OLD)}
    graph.output_buffers = {"hidden_states": None}
    graph.attn_state = SimpleNamespace(prepare_graph_input_buffers=lambda *arguments: None)
    graph._graph = SimpleNamespace(replay=lambda: None)
    graph.forward(torch.zeros(batch), None, positions, None)
    return graph.input_buffers["positions"]


@pytest.fixture(autouse=True)
def one_stage(monkeypatch):
    """As in an engine of one pipeline stage, without attention."""
    runner = "vllm.worker.model_runner"
    monkeypatch.setattr(f"{runner}.get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    monkeypatch.setattr(f"{runner}.get_forward_context", lambda: SimpleNamespace(attn_metadata=None))


@pytest.mark.parametrize("batch", [1, 2])
def test_b1_a_graph_gets_all_three_positions(batch):
    """Its prompt step, which ran elsewhere, would have noted that text has the same position three times. Without that
    the graphs of one and two sequences kept two of the three, or one, from an earlier batch."""
    data = SequenceData.from_seqs(list(range(LENGTH)))
    park(data, on_gpu=True)
    data.skip_prefill()
    positions = torch.cat([gpu_positions(data)] * batch, dim=-1)
    assert replayed(positions, batch).tolist() == [[LENGTH - 1] * batch] * 3


def test_b1_the_cpu_notes_nothing_for_text():
    """Nor does its prompt step: it takes the positions of a batch from those that have it, or from none."""
    data = SequenceData.from_seqs(list(range(LENGTH)))
    park(data, on_gpu=False)
    assert data.mrope_position_delta is None
