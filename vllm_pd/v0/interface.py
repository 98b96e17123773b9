# SPDX-License-Identifier: Apache-2.0
"""The interface that the patched V0 scheduler and engine call: `Scheduler.disagg` and `LLMEngine.disagg`.

Both are None while disaggregation is off. All methods run in the step loop's thread, and none raises because of
anything that a peer, a message or a transfer did. An *attempt* names one try to have a prompt prefilled elsewhere; the
scheduler keeps it as a key and never looks inside.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq
    from vllm.core.scheduler import SchedulerOutputs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.sequence import SequenceGroup

    from vllm_pd.v0.pending_blocks import PendingBlocks


class SchedulerBinding(ABC):
    """The part that the scheduler calls, in the order of a request's life."""

    pending_blocks: PendingBlocks
    """The scheduler allocates, commits and detaches the blocks of parked prompts with it."""

    @abstractmethod
    def waits_for_sibling(self, seq_group: SequenceGroup) -> bool:
        """Whether a peer prefills the same prompt for another sample of this waiting group's request just now. Then
        the group is passed over, without holding back those behind it."""

    @abstractmethod
    def choose_remote_prefill(self, seq_group: SequenceGroup, num_cached_tokens: int) -> Hashable | None:
        """Decide about the waiting group that would be admitted next; `num_cached_tokens` of its prompt are a prefix
        hit. None: prefill it here. Otherwise the scheduler parks it under the attempt that is returned."""

    @abstractmethod
    def start_remote_prefill(self, attempt: Hashable, seq_group: SequenceGroup, block_ids: list[int],
                             num_cached_tokens: int) -> None:
        """The group is parked with these blocks, its whole prompt's, in order. Those after the cached ones may be
        written by a peer from now on; the scheduler holds them until the attempt is in `finished_prefills`,
        `failed_prefills` or `read_prefixes`, and after a failure or an abort until it is in `finished_transfers`."""

    @abstractmethod
    def abort_remote_prefill(self, attempt: Hashable) -> None:
        """The parked group was aborted. Its blocks stay with the scheduler until `finished_transfers`."""

    @abstractmethod
    def allows_prefills(self) -> bool:
        """Whether this step may run prefills. False for one step where a group whose prompt has arrived would
        otherwise wait for its first token. Asked once a step, without chunked prefill only."""

    @abstractmethod
    def start_transfer(self, attempt: Hashable, block_ids: list[int]) -> None:
        """A group that was prefilled for a peer has finished. The scheduler holds its blocks until
        `finished_transfers`."""

    @abstractmethod
    def after_schedule(self, outputs: SchedulerOutputs) -> None:
        """The step is scheduled. Puts what the workers are to transfer into `outputs.memory_transfer_requests`."""


class EngineBinding(SchedulerBinding):
    """All of it: what the engine and its loops call besides."""

    in_loop: bool
    """Whether an engine loop runs the steps and sleeps in between. `LLM.generate` steps by itself, and only for its own
    requests."""

    @abstractmethod
    def take_progress(self) -> dict[str, Any]:
        """The keyword arguments of the `Scheduler.schedule` that follows: what became of attempts since the last."""

    @abstractmethod
    def return_transfer_requests(self, outputs: SchedulerOutputs) -> None:
        """The step was given up before a worker had it: its transfer requests go with the next one."""

    @abstractmethod
    def keep_finished_ids(self, request_ids: list[str]) -> None:
        """A step that ran nothing was to tell the workers that these requests have ended: the next one is to."""

    @abstractmethod
    def get_num_client_requests(self) -> int:
        """Unfinished requests of this engine's own clients, parked ones included: all but the jobs of peers."""

    @abstractmethod
    def has_client_requests(self) -> bool:
        """Whether there are any. Asked by those who step the engine by themselves: if not, no step follows for now."""

    @abstractmethod
    def expects_steps(self) -> bool:
        """Asked at the end of a step: whether more follow. If not, the workers stop waiting for steps."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything. False where all that is left waits for peers."""

    @abstractmethod
    def serve(self, async_engine: AsyncLLMEngine) -> None:
        """This engine runs in that loop. Wake it for progress."""

    @abstractmethod
    def poll(self, socket: zmq.Socket, timeout_ms: int) -> int:
        """Sleep until the socket has input or there is work. 0 where neither came within the time."""

    @abstractmethod
    def close(self) -> None:
        """Leave the peers and release every transfer. May be called again."""
