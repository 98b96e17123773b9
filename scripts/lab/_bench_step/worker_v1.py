# SPDX-License-Identifier: Apache-2.0
"""A process that times steps of engine V1, as `worker` does those of V0.

Its first argument is a JSON object with the fields of `StepLoad`. A second one is the engine's `--kv-transfer-config`.
With a third one, TURNS, its rounds of steps take turns: with the plugin and without it, as `in_turns` says.
The engine and its only rank are in this process, without a front end, so that one clock shows all that a step costs.
CPU time is that of the process: the threads of the plugin count.
"""

import json
import os
import queue
import sys
import threading
import time
from types import SimpleNamespace

from worker import TURNS, StepLoad, has_plugin, origin, take_turns

POOL_TOKENS = 4  # times what the batch needs


class V1Steps:
    """What both kinds share: the configuration, and a batch of requests that never end."""

    def __init__(self, load: StepLoad, transfer: dict | None) -> None:
        from vllm.engine.arg_utils import EngineArgs

        self.load, self.length, self.admitted = load, 0, 0
        self.settings = transfer if transfer and transfer["kv_connector"] == "PDConnector" else None
        blocks = POOL_TOKENS * load.batch * (load.context_tokens // load.block_size + 2)
        self.config = EngineArgs(
            model=load.model, dtype="float32", max_model_len=2 * load.context_tokens, max_num_seqs=load.batch,
            max_num_batched_tokens=2 * load.context_tokens, block_size=load.block_size, seed=0, enforce_eager=True,
            enable_prefix_caching=load.prefix_caching, num_gpu_blocks_override=blocks, kv_transfer_config=transfer,
        ).create_engine_config()
        self.config.cache_config.num_gpu_blocks = blocks

    def refill(self) -> None:
        """Admits a new batch and prefills it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        if self.length:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.admitted += self.load.batch
        for number in range(self.load.batch):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 * self.load.context_tokens)
            self.scheduler.add_request(Request(f"{self.admitted + number:08d}", self.load.prompt(number), sampling,
                                               None, block_hasher=self.hasher))
        self.prefill()
        self.length = self.load.prompt_tokens + 1


class V1EngineSteps(V1Steps):
    """EngineCore's step on a full decode batch: schedule, compute, process the output."""

    def __init__(self, load: StepLoad, transfer: dict | None) -> None:
        super().__init__(load, transfer)
        self.taken_out: tuple = ()
        from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        self.core = EngineCoreProc.__new__(EngineCoreProc)
        self.core.input_queue, self.core.output_queue = queue.Queue(), queue.Queue()
        self.core.engines_running, self.core.shutdown_state = False, EngineShutdownState.RUNNING
        self.config.parallel_config.distributed_executor_backend = "uni"
        EngineCore.__init__(self.core, self.config, UniProcExecutor, log_stats=True)
        self.scheduler, self.hasher = self.core.scheduler, self.core.request_block_hasher
        if self.settings is not None:
            self.scheduler.get_kv_connector().bind_engine(self.core)

    def prefill(self) -> None:
        """Steps until each request has a token."""
        missing = self.load.batch
        while missing:
            missing -= len(self.finish(self.step()))

    def end_batch(self) -> None:
        """Abort all requests, and make the step that tells the rank."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.core.step_fn()

    def step(self) -> object:
        """The outputs of one step."""
        self.length += 1
        return self.core.step_fn()

    def finish(self, decided: tuple) -> object:
        """The batch's newest tokens."""
        outputs, _ = decided
        return [(int(one.request_id) - self.admitted, one.new_token_ids)
                for output in outputs.values() for one in output.outputs]

    def put_plugin(self, back: bool) -> None:
        """Take the plugin out of the steps: then the scheduler is V1's own, and neither it nor the rank has a
        connector. `back`: put it back. Its threads stay."""
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        if not self.taken_out:
            self.taken_out = type(self.scheduler), self.scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        ours, connector, rank = self.taken_out
        stock = AsyncScheduler if issubclass(ours, AsyncScheduler) else Scheduler
        self.scheduler.__class__ = ours if back else stock
        self.scheduler.connector = connector if back else None
        kv_transfer_state._KV_CONNECTOR_AGENT = rank if back else None


class V1SchedulerSteps(V1Steps):
    """Scheduler.schedule and update_from_output, with no model between them."""

    def __init__(self, load: StepLoad, transfer: dict | None) -> None:
        super().__init__(load, transfer)
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.hasher = None
        if load.prefix_caching or transfer is not None:  # as EngineCore does
            self.hasher = get_request_block_hasher(load.block_size, sha256)
        spec = FullAttentionSpec(block_size=load.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(self.config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["l"], spec)])
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config, kv_cache_config=cache, block_size=load.block_size,
            structured_output_manager=StructuredOutputManager(self.config), hash_block_size=load.block_size,
            log_stats=True)
        if self.settings is not None:
            self.bind()

    def bind(self) -> None:
        """What `vllm_pd.v1.start` does, without ranks."""
        from vllm.v1.engine.core import EngineShutdownState

        from vllm_pd.handover.jobs import PrefillCapacity
        from vllm_pd.peer.agent import ControlAgent
        from vllm_pd.peer.liveness.process import local_member
        from vllm_pd.protocol.messages import Fingerprint, Role
        from vllm_pd.settings.engine import PDConfig
        from vllm_pd.transfer.engine import RemoteEngineTransfer
        from vllm_pd.transfer.ranks.gather import RankTransfers
        from vllm_pd.v1.binding import V1Handover
        from vllm_pd.v1.engine_access import EngineAccess
        from vllm_pd.v1.metrics import MetricsRecorder

        engine = SimpleNamespace(input_queue=queue.Queue(), output_queue=queue.Queue(), scheduler=self.scheduler,
                                 is_running=lambda: True, shutdown_state=EngineShutdownState.RUNNING,
                                 _idle_state_callbacks=[], batch_queue=None)
        access = EngineAccess(engine)
        fingerprint = Fingerprint(1, "bench", "float32", "float32", self.load.block_size, 1, 2, 32, "LBHNC")
        config = PDConfig.parse(self.settings["kv_role"], self.settings["kv_connector_extra_config"])
        agent = ControlAgent(config, local_member(Role.BOTH, fingerprint), b"", access.wake)
        agent.start()
        self.scheduler.connector.binding = V1Handover(
            config, self.scheduler, access, agent, RemoteEngineTransfer(RankTransfers({})),
            PrefillCapacity(fingerprint.rows, 4099, 1, 1 << 16, self.load.prefix_caching,
                            self.scheduler.max_num_scheduled_tokens, self.config.cache_config.num_gpu_blocks),
            MetricsRecorder())

    def prefill(self) -> None:
        """Schedules until each request has a token."""
        from vllm.v1.outputs import ModelRunnerOutput

        while any(not request.num_output_tokens for request in self.scheduler.requests.values()):
            output = self.scheduler.schedule()
            ids = list(output.num_scheduled_tokens)
            chunks = [self.scheduler.requests[one].is_prefill_chunk for one in ids]
            self.scheduler.update_from_output(output, ModelRunnerOutput(
                ids, {one: place for place, one in enumerate(ids)}, [[] if chunk else [5] for chunk in chunks]))
        self.output = ModelRunnerOutput(ids, {one: place for place, one in enumerate(ids)}, [[5]] * len(ids))

    def step(self) -> object:
        """What was decided, and what went out."""
        self.length += 1
        decided = self.scheduler.schedule()
        return decided, self.scheduler.update_from_output(decided, self.output)

    def finish(self, decided: tuple) -> object:
        """Who was scheduled, with how many tokens, into which new blocks, and what the clients get."""
        step, outputs = decided
        return [step.num_scheduled_tokens, step.scheduled_cached_reqs.new_block_ids,
                [(one.request_id, one.new_token_ids) for output in outputs.values() for one in output.outputs]]


def about() -> dict:
    """What the plugin has done to this process."""
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    methods = [EngineCoreProc.run_busy_loop, DPEngineCoreProc.run_busy_loop, EngineCoreProc.preprocess_add_request,
               VllmConfig._verify_kv_transfer_compat]
    return origin() | {"threads": sorted(thread.name for thread in threading.enumerate()),
                       "plugin_modules": sorted(name for name in sys.modules if name.startswith("vllm_pd")),
                       "wrapped": [one.__qualname__ for one in methods if "vllm_pd" in vars(one)]}


def in_turns(steps: V1EngineSteps, number: int) -> None:
    """A round of TURNS begins, on a new batch: all rounds decide the same. The requests of the last one end before."""
    steps.end_batch()
    steps.put_plugin(has_plugin(number))
    steps.refill()


def main() -> int:
    load = StepLoad(**json.loads(sys.argv[1]))
    steps = {"engine": V1EngineSteps, "scheduler": V1SchedulerSteps}[load.kind]
    transfer = json.loads(sys.argv[2]) if len(sys.argv) > 2 else None
    before_round = [in_turns] if TURNS in sys.argv[3:] else []
    take_turns(load, lambda load: steps(load, transfer), about, time.process_time, *before_round)
    return 0


if __name__ == "__main__":
    status = main()
    os._exit(status)  # an engine without its loop does not end in order
