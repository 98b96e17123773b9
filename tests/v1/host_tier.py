# SPDX-License-Identifier: Apache-2.0
"""vLLM's tier in host memory for an engine on the CPU, which vLLM's own refuses: "CPU Offloading is currently only
supported on CUDA-alike and XPU GPUs". The manager, its policy and the connector are vLLM's; what copies is a thread.
"""
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

DELAY_S = 0.02  # of each copy, so that it is under way while steps go on


class HostTierSpec(CPUOffloadingSpec):
    """What `spec_name` names, with this module as `spec_module_path`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostCopies(kv_caches, self.num_chunks)


class HostCopies(OffloadingWorker):
    """Copies blocks of the cache to rows of the tier and back, one job after the other, behind the steps."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._caches = [one.tensor for one in kv_caches.tensors]
        self._rows = [torch.zeros(chunks, one.shape[1], dtype=one.dtype) for one in self._caches]
        self._thread = ThreadPoolExecutor(1)
        self._jobs: dict[int, Future] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, self._caches, src_spec, self._rows, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, self._rows, src_spec, self._caches, dst_spec)

    def _submit(self, job_id, sources, src_spec, targets, dst_spec) -> bool:
        def copy() -> int:
            time.sleep(DELAY_S)
            copied = 0
            for source, target in zip(sources, targets, strict=True):
                for one, other in zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True):
                    target[other] = source[one]
                    copied += source[one].numel()
            return copied

        self._jobs[job_id] = self._thread.submit(copy)
        return True

    def get_finished(self) -> list[TransferResult]:
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [TransferResult(job_id, True, self._jobs.pop(job_id).result(), DELAY_S) for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids & self._jobs.keys():
            self._jobs[job_id].result()

    def shutdown(self) -> None:
        self._thread.shutdown()
