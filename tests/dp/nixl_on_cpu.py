# SPDX-License-Identifier: Apache-2.0
"""0.9.2's own NixlConnector where the KV cache is a CPU's, and a probe of what it keeps.

As it is, it refuses a CPU at `register_kv_caches`: a CPU's cache of a layer has 3 dimensions, by which the connector
recognizes MLA (`assert use_mla == self.use_mla`); the device of such a tensor has no index, but NIXL wants a number;
and the memory is registered as "VRAM". So the class here changes the layout (a view of the same memory), the memory
type, and one thing more: the library's progress thread sleeps until something arrives, instead of using a core in each
engine. All else, both sides and the protocol, is the connector's.
"""

from typing import Any
from unittest import mock

from nixl import _bindings as bindings
from nixl._api import nixl_agent
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector import NixlConnector

from vllm_pd.bench.dp.probe import StepProbe

PROGRESS_WAIT_US = 100_000  # the longest that the progress thread sleeps where nothing arrives
OWN_WAIT = bindings.nixlAgentConfig.pthrDelay
COORDINATOR = -1  # the client index of what an engine sends to the coordinator


class SleepingConfig(bindings.nixlAgentConfig):
    """Keeps the progress thread's wait where nixl_agent writes 0."""

    @property
    def pthrDelay(self) -> int:
        return OWN_WAIT.fget(self)

    @pthrDelay.setter
    def pthrDelay(self, wait_us: int) -> None:
        OWN_WAIT.fset(self, max(wait_us, PROGRESS_WAIT_US))


class DramAgent(nixl_agent):
    """Takes what the connector calls VRAM for DRAM."""

    def __init__(self, *arguments: Any) -> None:
        with mock.patch.object(bindings, "nixlAgentConfig", SleepingConfig):
            super().__init__(*arguments)

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """`descs`: (address, bytes, device, name) of each, or what this method gave before."""
        if isinstance(descs, list):
            descs = [(address, size, device or 0, name) for address, size, device, name in descs]
        return super().get_reg_descs(descs, "DRAM")

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> Any:
        """`descs`: (address, bytes, device) of each, or what this method gave before."""
        return super().get_xfer_descs(descs, "DRAM")


nixl_connector.NixlWrapper = DramAgent


class NixlConnectorOnCpu(NixlConnector):
    """For `kv_connector`, with this module as `kv_connector_module_path`."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers views [2, blocks, block size, heads, head size]. How a block is arranged inside doesn't matter, as
        blocks are copied whole."""
        model, parallel = (self.connector_worker.vllm_config.model_config,
                           self.connector_worker.vllm_config.parallel_config)  # fmt: skip
        shape = self.connector_worker.block_size, model.get_num_kv_heads(parallel), model.get_head_size()
        super().register_kv_caches({name: cache.view(2, cache.shape[1], *shape) for name, cache in kv_caches.items()})


class NixlProbe(StepProbe):
    """For `worker_extension_cls`. Counts the steps without tokens, too, and what goes to the coordinator."""

    def probe_start(self) -> None:
        """See StepProbe. Also counts `empty`, steps without tokens, and lists `coordinator`: the fields of each message
        to it."""
        first = vars(self).get("_probe") is None
        super().probe_start()
        self._probe |= {"empty": 0, "coordinator": []}
        if first:
            _count(self)

    def probe_requests(self) -> dict[str, int]:
        """How many requests of this rank are `parked` (wait for KV), `kept` (have ended, but their blocks wait for a
        reader), or `live`: any other."""
        from vllm.v1.request import RequestStatus
        requests = list(self._probe_engine.scheduler.requests.values())
        parked = sum(each.status == RequestStatus.WAITING_FOR_REMOTE_KVS for each in requests)
        kept = sum(each.is_finished() for each in requests)
        return {"parked": parked, "kept": kept, "live": len(requests) - parked - kept}

    def probe_names(self) -> list[str]:
        """The names of all message types, and of the fields, between front ends, engines and the coordinator."""
        from vllm.v1 import engine
        return [*engine.EngineCoreRequestType.__members__, *engine.EngineCoreRequest.__struct_fields__,
                *engine.EngineCoreOutputs.__struct_fields__]  # fmt: skip

    def probe_plant(self, rank: int) -> None:
        """Plants a defect: `rank` runs no forward pass that only another rank needs."""
        from vllm_pd.dp.interface import StepDecision
        member = self._probe_engine.dp_sync._member
        if self._probe_engine.dp_rank != rank:
            return
        own = member.before_step

        def before_step(has_work: bool, *most: Any) -> StepDecision:
            return own(has_work, *most) if has_work else StepDecision.IDLE

        member.before_step = before_step


def _count(worker: Any) -> None:
    """Wraps what runs a step without tokens, and the queue of this engine's outputs, to count both."""
    runner, queue = worker.model_runner, worker._probe_engine.output_queue
    empty, put = runner.kv_connector_no_forward, queue.put_nowait

    def no_forward(scheduler_output: Any) -> Any:
        worker._probe["empty"] += 1
        return empty(scheduler_output)

    def put_nowait(item: Any) -> None:
        if isinstance(item, tuple) and item[0] == COORDINATOR:
            blank = type(item[1])(timestamp=item[1].timestamp)
            worker._probe["coordinator"].append([name for name in blank.__struct_fields__
                                                 if getattr(item[1], name) != getattr(blank, name)])
        put(item)

    runner.kv_connector_no_forward, queue.put_nowait = no_forward, put_nowait
