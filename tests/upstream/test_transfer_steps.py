# SPDX-License-Identifier: Apache-2.0
"""A step that moves KV and computes nothing, in the worker classes with the GPU's model input."""
import dataclasses

import pytest
from vllm.attention.backends.torch_sdpa import TorchSDPABackend
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.sequence import ExecuteModelRequest
from vllm.worker import worker_base
from vllm.worker.model_runner import ModelInputForGPUWithSamplingMetadata as GPUInput
from vllm.worker.worker_base import LocalOrDistributedWorkerBase, WorkerInput

REQUESTS = ["a peer is new", "a write"]


class GPURunner:
    """What a GPU's model runner makes of a step without requests: no tokens, so no attention metadata either."""

    def prepare_model_input(self, seq_groups, virtual_engine, finished_requests_ids):
        assert not seq_groups
        sampling = SamplingMetadata.prepare(seq_groups, None, None, "cpu", False)
        return dataclasses.replace(GPUInput(), sampling_metadata=sampling, is_prompt=None)

    def make_model_input_from_broadcasted_tensor_dict(self, tensor_dict):
        return GPUInput.from_broadcasted_tensor_dict(tensor_dict, attn_backend=TorchSDPABackend)


class Rank(LocalOrDistributedWorkerBase):
    """One of several tensor-parallel ranks, whose transfers are noted."""
    do_metadata_broadcast = True
    kv_cache = None
    __abstractmethods__ = frozenset()

    def __init__(self, is_driver_worker: bool) -> None:
        self.is_driver_worker = is_driver_worker
        self.model_runner = GPURunner()
        self.observability_config = None
        self.transfer = self
        self.executed: list = []

    def execute(self, requests) -> None:
        self.executed += requests

    def prepare_worker_input(self, execute_model_req):
        return WorkerInput(num_seq_groups=len(execute_model_req.seq_group_metadata_list))

    def execute_worker(self, worker_input) -> None:
        pass


@pytest.fixture
def broadcasts(monkeypatch) -> list[dict]:
    """What the driver has broadcast and the other rank has not received."""
    sent: list[dict] = []
    monkeypatch.setattr(worker_base, "broadcast_tensor_dict",
                        lambda tensors=None, src=0: sent.pop(0) if tensors is None else sent.append(dict(tensors)))
    return sent


def test_b20_each_rank_of_a_gpu_engine_runs_a_step_of_transfers_alone(broadcasts):
    """The second rank used to end its loop there, as it can't make an input of what a GPU's runner makes of no
    requests: the engine's next step then waited for it for ever."""
    driver, other = Rank(True), Rank(False)
    assert driver.execute_model(ExecuteModelRequest([], memory_transfer_requests=REQUESTS)) == []
    assert other.execute_model() == []
    assert driver.executed == other.executed == REQUESTS and not broadcasts


def test_the_other_ranks_end_their_loop_where_the_driver_says_so(broadcasts):
    driver, other = Rank(True), Rank(False)
    assert driver.execute_model(None) is None
    assert other.execute_model() is None and not other.executed
