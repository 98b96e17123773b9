# SPDX-License-Identifier: Apache-2.0
"""The step sync as the engine loop of one rank uses it. All methods are for the loop's thread."""
from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import EngineCoreRequestType

from vllm_pd import dp
from vllm_pd.dp.forwards import Forwards
from vllm_pd.dp.interface import GroupFailed, StepDecision
from vllm_pd.dp.member import end_engine
from vllm_pd.dp.utility import UtilityCalls, UtilityRequest, failed_call, kind_of, name_of
from vllm_pd.extras import version_of
from vllm_pd.v1.lockstep.options import ADDITIONAL_KEY
from vllm_pd.v1.lockstep.store import over_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.engine.core import DPEngineCoreProc
    from vllm.v1.request import Request

    from vllm_pd.v1.lockstep.options import StepSyncOptions

logger = logging.getLogger("vllm.pd")

# What reaches the workers and may run collectives there, or changes what a forward pass uses, and the end of a pause,
# after which a rank may request steps of the others. The beginning of a pause is no call: see `rest`.
RESUMES = frozenset({"resume_scheduler", "wake_up"})
TOGETHER = RESUMES | {"barrier", "collective_rpc", "execute_dummy_batch"}
READS = ("is_", "get_", "list_")  # the beginnings of the names of such calls
LINGER_S = 5.0  # how long a rank that is to end stays for the others at least, where the user has set no drain
_PAUSE = name_of("pause")


def common_name(request: UtilityRequest) -> int:
    """By what name all ranks know this call; 0: each makes it alone. Part of it is what the call is made with, so that
    a rank that was away while the others gave one up does not take the next one for it."""
    client, _, method, args = request
    if method not in TOGETHER:
        return 0
    packed = msgspec.msgpack.encode(args, enc_hook=_named)
    return name_of(f"{kind_of(client, method, args)} {hashlib.blake2b(packed).hexdigest()}")


def _named(value: Any) -> str:
    """What is equal in all processes of something that each has unpickled for itself: its name, or its type's."""
    named = value if callable(value) else type(value)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(value).__name__)}"


def most_steps(scheduler: SchedulerInterface, enough: int) -> int:
    """The most forward passes that this rank's requests may still need, the one just scheduled included; `enough` for
    more, or where some have yet to begin. A request that waits for a peer needs none until it is resumed."""
    if scheduler.waiting:
        return enough
    budget = max(scheduler.max_num_scheduled_tokens, 1)
    most = 1
    for request in scheduler.running:
        most = max(most, _steps_of(request, budget))
        if most >= enough:
            return enough
    return most


def _steps_of(request: Request, budget: int) -> int:
    """Those of one request: the tokens that no step in flight makes, and the rest of its prompt."""
    in_flight = max(request.num_output_placeholders - 1, 0)
    prompt = -(min(request.num_computed_tokens - request.num_tokens, 0) // budget)
    return request.max_tokens - request.num_output_tokens - in_flight + prompt


class StepSync:
    """One rank of a group. `calls`: what waits until all ranks make it. `makes_calls`: it makes some of them now.
    `is_called`: it makes another one of its front end's, in which there may be steps, but none of these calls."""

    def __init__(self, engine: DPEngineCoreProc, config: VllmConfig, options: StepSyncOptions) -> None:
        """Join the group. Blocks until all ranks have, within `join_s`. Raises GroupFailed, ConfigError."""
        parallel = config.parallel_config
        self._engine = engine
        one_front_end = engine.publish_dp_lb_stats and not parallel.data_parallel_hybrid_lb
        settings = options.settings(one_front_end)
        self.member = dp.join(
            engine.dp_rank, engine.dp_size, parallel.data_parallel_master_ip, wake=self._wake,
            exchange=over_store(engine.dp_store, engine.dp_rank, engine.dp_size, settings.join_s),
            abort=self._abort, settings=settings, shared_memory=options.shared_memory, named=ADDITIONAL_KEY,
            release=version_of("vllm-pd") or "")
        self._horizon = settings.horizon
        self._resume_s = settings.call_wait_s or settings.stall_s
        self._forwards = Forwards(self.member)
        self.calls = UtilityCalls(self.member, settings.call_wait_s, self._wake, common_name, self._fail)
        self.makes_calls = self.is_called = False
        self._had_passes = False  # of its own in flight, before this step
        self._leave_until_s: float | None = None  # when a rank that is to end ends, on the monotonic clock
        self._over = False

    @property
    def forwards(self) -> int:
        """How many forward passes this rank has begun, dummies included: in the end as many as every other rank."""
        return self.member.counters.forwards

    @property
    def due(self) -> bool:
        """Whether the loop must not block, even if it has no request."""
        return not self._over and (self.calls.overdue or self.member.due or bool(self._forwards))

    def hold(self, request: UtilityRequest) -> bool:
        """Whether this call must wait for the other ranks; if so, it is kept. What resumes a rank always waits, also
        where each rank makes its other calls alone: a rank that is paused may be changed while another one steps. What
        only reads waits for nothing."""
        if request[2].startswith(READS):
            return False
        return self.calls.hold(request, self._resume_s if request[2] in RESUMES else None)

    @contextlib.contextmanager
    def step(self, make: Callable[[UtilityRequest], None]) -> Iterator[None]:
        """Around a step: `make` the calls that all ranks make now. While they come to rest for one, the step has no
        tokens unless another rank has requested it. Raises GroupFailed."""
        self._forwards.count_ended()
        if self.calls and not self.is_called:
            self.makes_calls = True
            try:
                self.calls.carry_out(lambda request: (self._forwards.wait(), make(request)))
            finally:
                self.makes_calls = False
        self._had_passes = any(batch[1].total_num_scheduled_tokens for batch in self._engine.batch_queue or ())
        if self.member.may_step and self._leave_until_s is None:
            yield
            return
        scheduler = self._engine.scheduler
        budget, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 0
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = budget

    def forward(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run a forward pass of this rank's own: `run(*args)`. Raises GroupFailed."""
        return self._forwards.run(most_steps(self._engine.scheduler, 2 * self._horizon), run, *args)

    def keep_up(self, dummy: Callable[[], None]) -> None:
        """In a step without a forward pass: run `dummy` if the other ranks wait for one. Not while passes of this
        rank's own are in flight, because their results may be work for the next step. Raises GroupFailed."""
        self._forwards.count_ended()
        if self._had_passes or self._forwards:
            return
        try:
            decision = self.member.before_step(False)
        except GroupFailed as error:
            if self._leave_until_s is None:
                raise
            logger.warning("the data-parallel group failed after this rank had left it: %s", error)
            decision = StepDecision.END
        if decision is StepDecision.DUMMY:
            dummy()
            self.member.after_step()
        self._over = self._over or decision is StepDecision.END

    def rest(self, paused: UtilityRequest) -> None:
        """This rank has come to the end of what it does before a pause: hold that until all ranks have. Then no rank
        requests a step any more, and it is made by all, after the same one."""
        self.calls.hold_until_all(paused, _PAUSE)
        self._wake()  # the loop is about to block

    def stay(self, timeout_s: float) -> bool:
        """Whether this rank, which is to end and has no work, must stay for the forward passes of the others. It does
        so until all are to end, and no longer than `timeout_s`, or LINGER_S if that is longer."""
        if self._leave_until_s is None:
            self._leave_until_s = time.monotonic() + max(timeout_s, LINGER_S)
            self.calls.expire()
            with contextlib.suppress(GroupFailed):  # `keep_up` will see it, too
                self.member.leave()
        return not self._over and time.monotonic() < self._leave_until_s

    def close(self) -> None:
        """Close this rank's member of the group; see `GroupMember.close`."""
        self.member.close()

    def _wake(self) -> None:
        self._engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def _fail(self, request: UtilityRequest, failure: str) -> None:
        self._engine.output_queue.put_nowait(failed_call(request, failure))

    def _abort(self, error: GroupFailed) -> None:
        end_engine(self._engine)
