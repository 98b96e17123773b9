# SPDX-License-Identifier: Apache-2.0
"""The step sync as vLLM's `DPEngineCoreProc` uses it: one `EngineSync` per engine process of a data-parallel group.

The engine loop runs every forward pass through `forward`, and calls `keep_up` in a step that ran none. It may block on
its input queue while `due` is false, if it has no request or `may_step` is false. It passes every utility call to
`hold`, which keeps the calls that all ranks make together; `make_calls` makes them before a step. While all ranks come
to rest for a call, steps go on, but the scheduler gives them no tokens. So a pipeline still delivers its batches, and
finished requests and KV transfers are still handled. All methods, `close` included, are for the loop's thread, except
`leave`, which is for a signal handler.

When a front end ends, its engine ends too. But where each rank has a front end of its own (`LLM` in a process per
rank), the other ranks may still need this rank's part of their forward passes. Such an engine leaves the group instead
of ending at once: it drops its own requests and keeps running forward passes for the others. It ends when all ranks
have left, when the group has failed, or when no rank has requested a step for `stall_s`. In the last case the group
fails for the ranks that have not left.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd import dp
from vllm_pd.dp.forwards import Forwards
from vllm_pd.dp.group import check_call_wait
from vllm_pd.dp.interface import TOGETHER_S, GroupFailed, StepDecision, SyncOptions, SyncSettings
from vllm_pd.dp.member import end_engine
from vllm_pd.dp.utility import UtilityCalls, UtilityRequest, failed_call, kind_of, name_of
from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import DPEngineCoreProc

SETTINGS_KEY = "dp_sync"  # in VllmConfig.additional_config: the fields of DpSyncOptions
# The methods that reach the workers and may run collectives there, or change what a forward pass uses.
TOGETHER = frozenset({"collective_rpc", "execute_dummy_batch", "sleep", "wake_up"})
RANK_BITS = 16  # the low bits of a call's number, which differ by rank; the high bits are the same on all ranks
LINGER_POLL_S = 0.5  # how often, at most, a rank that has left checks whether it has waited long enough
REST_POLL_S = 0.05  # how often a rank at rest polls for the end of KV transfers, which wake nobody

log = logging.getLogger("vllm.pd")


class DpSyncOptions(SyncOptions, frozen=True, forbid_unknown_fields=True):
    """What a user may set."""

    def sync_settings(self, one_front_end: bool, offline: bool, lockstep: bool = True) -> SyncSettings:
        """The settings that must be equal on all ranks, with the defaults filled in. For the parameters see `wait_s`.
        """
        return self.filled(self.wait_s(one_front_end, offline), lockstep)

    def wait_s(self, one_front_end: bool, offline: bool) -> float:
        """The `call_wait_s` to use, in seconds. `one_front_end`: it calls all ranks at once. `offline`: each rank runs
        the same program, and one may run it long before another. Otherwise each rank has a server of its own, and these
        are called one after another."""
        if self.call_wait_s is not None:
            return self.call_wait_s
        return TOGETHER_S if one_front_end else self.stall_s if offline else 0.0


def settings_of(additional_config: object) -> DpSyncOptions:
    """The options in `--additional-config '{"dp_sync": {...}}'`. Raises ConfigError."""
    given = additional_config.get(SETTINGS_KEY, {}) if isinstance(additional_config, dict) else {}
    try:
        settings = msgspec.convert(given, DpSyncOptions)
    except msgspec.ValidationError as error:
        keys = ", ".join(DpSyncOptions.__struct_fields__)
        raise ConfigError(f"additional_config.{SETTINGS_KEY}", given, f"{error}; the keys are {keys}") from error
    check_call_wait(settings)
    return settings


@contextlib.contextmanager
def ends_at_signals() -> Iterator[None]:
    """In this block SIGINT and SIGTERM end the process at once. Where it waits in C++ for ranks that may never start,
    Python's handlers run only after the wait. Has no effect outside of the main thread."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: handler for number in (signal.SIGINT, signal.SIGTERM)
                    if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def most_steps(scheduler: Scheduler, budget_tokens: int) -> int:
    """The most forward passes that this rank's requests may still need, including the one just scheduled.
    `budget_tokens`: the most tokens of one forward pass."""
    return max((request.max_tokens - request.num_output_tokens
                - (request.num_computed_tokens - request.num_tokens) // budget_tokens
                for request in scheduler.requests.values()), default=1)  # fmt: skip


def common_name(request: UtilityRequest, numbered: bool) -> int:
    """By what name all ranks know this call; 0: each makes it alone.

    `numbered`: a front end that calls all ranks gives these calls one number (RANK_BITS), which is part of the name. So
    a rank that was away while the others gave a call up does not mistake it for the next one, and a call to a single
    rank matches no call of another rank."""
    client, number, method, args = request
    if method not in TOGETHER:
        return 0
    return name_of(kind_of(client, method, args), number >> RANK_BITS if numbered else 0)


class EngineSync:
    """Counts this engine's forward passes and keeps their number equal to the other ranks'. `calls`, after `join`: the
    utility calls that wait."""

    lockstep = True

    def __init__(self, engine: DPEngineCoreProc) -> None:
        """The engine calls this before it loads its model."""
        from vllm.v1.engine import EngineCoreRequestType
        self._engine = engine
        self._wake_up = (EngineCoreRequestType.DP_STEP, b"")
        self._most = 0  # the value of most_steps, reduced by 1 at each step
        self._seen: tuple[int, str] | None = None  # the requests for which _most was computed: count, last id
        self._had_batches = False  # whether the pipeline had batches before this step
        self._may_linger = False
        self._leaving = self._left = False
        self._ends_now = False  # the process has got the signal to end at once
        self._linger_s = 0.0
        self._last_due_s = 0.0  # when another rank last requested a step, or this one began to leave
        self._budget: int | None = None  # the scheduler's token budget, kept here while this rank is at rest
        self._rest_until_s = 0.0
        self._has_transfers = False  # whether a connector transfers KV

    def join(self, config: Any) -> EngineSync:
        """Join the group. `config`: the engine's VllmConfig. Returns self. Raises GroupFailed, ConfigError."""
        parallel = config.parallel_config
        self._budget_tokens = config.scheduler_config.max_num_batched_tokens
        self._has_transfers = config.kv_transfer_config is not None
        online = self._engine.publish_dp_lb_stats or parallel.data_parallel_external_lb
        self._may_linger = not online
        settings = settings_of(config.additional_config)
        one_front_end = self._engine.publish_dp_lb_stats
        sync_settings = settings.sync_settings(one_front_end, not online, self.lockstep)
        with ends_at_signals():
            self._engine.dp_group = parallel.stateless_init_dp_group()
        self._linger_s = sync_settings.stall_s
        self._member = dp.join(
            parallel.data_parallel_rank, parallel.data_parallel_size, parallel.data_parallel_master_ip, wake=self._wake,
            exchange=dp.over(self._engine.dp_group), abort=self._abort,
            settings=sync_settings, shared_memory=settings.shared_memory)  # fmt: skip
        self._forwards = Forwards(self._member)
        self.calls = UtilityCalls(self._member, sync_settings.call_wait_s, self._wake,
                                  functools.partial(common_name, numbered=one_front_end), self._fail)
        return self

    @property
    def messages(self) -> int:
        """Messages that this process has sent for the step sync, including those of a coordinator in it."""
        return self._member.messages

    @property
    def due(self) -> bool:
        """Whether the engine loop must not block, even if it has no request."""
        return (self._ends_now or self.calls.overdue or self._member.due or self._leaving and self._leaves_now
                or self._in_flight or self._rest_is_due)

    @property
    def may_step(self) -> bool:
        """Whether this rank may run a forward pass of its own now. False: it comes to rest for a call."""
        return not self.calls or self._member.may_step

    def hold(self, request: UtilityRequest) -> bool:
        """Whether this utility call must wait for the other ranks. If so, it is kept, and `make_calls` makes it."""
        return self.calls.hold(request)

    def make_calls(self, make: Callable[[Any, UtilityRequest], None]) -> None:
        """Make the utility calls that all ranks make now: `make(request type, call)`. Afterwards the scheduler gives
        tokens only if `may_step`. Raises GroupFailed, and SystemExit if the group fails after this rank has left, or if
        the signal to end came during a call: vLLM takes the signal handler's SystemExit there for a failed call."""
        if self._ends_now:
            raise SystemExit
        if self._leaving and not self._left:
            self._go_on_leaving()  # even with requests: nobody waits for their answers any more
        if self.calls:
            with self._ends_if_left():
                self.calls.carry_out(lambda request: self._make(make, request))
        if not self.may_step:
            self._rest()
        elif self._budget is not None:
            self._engine.scheduler.max_num_scheduled_tokens, self._budget = self._budget, None
        self._had_batches = self._has_batches

    @property
    def _has_batches(self) -> bool:
        batches = self._engine.batch_queue
        return batches is not None and not batches.empty()

    def _rest(self) -> None:
        self._forwards.wait()  # before the loop may block, it must read the other ranks' state after its last forward
        scheduler = self._engine.scheduler
        if self._budget is None:
            self._budget, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 0
        now = time.monotonic()
        if self._has_transfers and now >= self._rest_until_s:
            self._rest_until_s = now + REST_POLL_S
            alarm = threading.Timer(REST_POLL_S, self._wake)
            alarm.daemon = True
            alarm.start()

    @property
    def _rest_is_due(self) -> bool:
        """Whether a step without tokens has something to do while this rank is at rest."""
        return self._budget is not None and (self._engine.scheduler.has_finished_requests() or self._has_transfers
                                             and time.monotonic() >= self._rest_until_s)

    @property
    def _in_flight(self) -> bool:
        """Whether a pipeline has forward passes in flight. The loop may block only after their end."""
        return bool(self._forwards) or self._has_batches

    def forward(self, run: Callable, *args: Any) -> Any:
        """Run a forward pass of this rank's own: `run(*args)`. Returns its result."""
        return self._forwards.run(self._most_steps(), run, *args)

    def keep_up(self, dummy: Callable[[], Any]) -> None:
        """In a step without a forward pass: run `dummy` if the other ranks wait for one. Not while a pipeline has
        forward passes of this rank's own in flight, because their results may be work for the next step. Raises
        GroupFailed, and SystemExit when this rank has left and no other rank needs it any more."""
        with self._ends_if_left():
            self._keep_up(dummy)

    @contextlib.contextmanager
    def _ends_if_left(self) -> Iterator[None]:
        """Turn GroupFailed into SystemExit if this rank has left the group: then it is no failure of this rank."""
        try:
            yield
        except GroupFailed as error:
            if not self._left:
                raise
            log.warning("the data-parallel group failed after this rank had left it: %s", error)
            raise SystemExit from error

    def _keep_up(self, dummy: Callable[[], Any]) -> None:
        """See `keep_up`. Here GroupFailed is raised also where this rank has left the group."""
        self._forwards.count_ended()
        if self._leaving:
            self._go_on_leaving()
        if self._had_batches:
            return
        decision = self._member.before_step(False)
        if decision is StepDecision.DUMMY:
            self._last_due_s = time.monotonic()
            dummy()
            self._member.after_step()
        elif decision is StepDecision.END:
            raise SystemExit

    def leave(self, signum: int) -> bool:
        """The front end (SIGTERM) or the user (SIGINT) wants this engine to end. False: it may end now. True: its loop
        will end by itself.

        A signal handler calls this, so it must not take a lock that the interrupted loop may hold.
        """
        if not self._may_linger or signum != signal.SIGTERM:
            self._member.expect_end()
            self._ends_now = True
            return False
        if self._leaving:
            return True
        self._last_due_s, self._leaving = time.monotonic(), True
        threading.Thread(target=self._linger, name="dp-leave", daemon=True).start()
        return True

    def close(self) -> None:
        """Close this rank's member of the group; see GroupMember.close."""
        self._member.close()

    def _make(self, make: Callable[[Any, UtilityRequest], None], request: UtilityRequest) -> None:
        from vllm.v1.engine import EngineCoreRequestType
        self._forwards.wait()
        make(EngineCoreRequestType.UTILITY, request)

    def _fail(self, request: UtilityRequest, failure: str) -> None:
        self._engine.output_queue.put_nowait(failed_call(request, failure))

    def _most_steps(self) -> int:
        requests = self._engine.scheduler.requests
        seen = (len(requests), next(reversed(requests), ""))
        self._most -= 1
        if self._most < 1 or seen != self._seen:
            self._most, self._seen = most_steps(self._engine.scheduler, self._budget_tokens), seen
        return self._most

    def _wake(self) -> None:
        self._engine.input_queue.put_nowait(self._wake_up)

    def _linger(self) -> None:
        """Wake the engine loop so that it leaves, and again when it has waited long enough for the other ranks."""
        while True:
            if self._engine.input_queue.empty():  # otherwise the loop will check anyway
                self._wake()
            time.sleep(max(LINGER_POLL_S, self._last_due_s + self._linger_s - time.monotonic()))

    @property
    def _leaves_now(self) -> bool:
        """Whether this rank must leave now or, after it has left, has waited long enough to end."""
        lingered = time.monotonic() - self._last_due_s > self._linger_s
        return not self._left or lingered and not self._member.engaged

    def _go_on_leaving(self) -> None:
        if not self._left:
            self._left, self._last_due_s = True, time.monotonic()
            self._engine.abort_requests(list(self._engine.scheduler.requests))
            self.calls.expire()
            self._member.leave()
        elif self._leaves_now:
            log.warning("this rank ends, and its data-parallel group with it: it has left, no other rank has requested "
                        "a step for stall_s=%g s, and not all ranks have left", self._linger_s)
            raise SystemExit

    def _abort(self, error: GroupFailed) -> None:
        end_engine(self._engine)
