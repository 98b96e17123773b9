# SPDX-License-Identifier: Apache-2.0
"""The step sync as vLLM's `DPEngineCoreProc` uses it: one `EngineSync` per engine process of a data-parallel group.

The engine loop hands every forward pass to `forward`, calls `keep_up` where a step ran none, and may block on its input
queue while `due` is false, if it has no request or `may_step` is false. It leaves utility calls with `hold`, which
keeps those that all ranks make together, and `make_calls` makes them before a step. While all come to rest for one,
steps go on, but the scheduler gives them no tokens: what a pipeline still has comes out, and requests that have ended
and transfers of KV are seen to. All of that, `close` included, happens on the loop's thread; only `leave` is called
from a signal handler.

A front end that ends takes its engine with it. Where several front ends own one rank each (`LLM` in a process per
rank), the others may still need this rank's part of their forward passes, so such an engine leaves the group instead
of ending at once: it drops its own requests, goes on with the others', and ends when all have left, when the group has
failed, or when nobody has wanted a step for `stall_s`. In the last case the group fails for those that have not left.
"""
from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd import dp
from vllm_pd.dp.interface import Decision, GroupFailed, Settings
from vllm_pd.dp.utility import Request, UtilityCalls
from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import DPEngineCoreProc

SETTINGS_KEY = "dp_sync"  # in VllmConfig.additional_config: the fields of GroupSettings
TOGETHER_S = 30.0
LINGER_POLL_S = 0.5  # how often, at most, a rank that leaves looks whether it has waited long enough
REST_POLL_S = 0.05  # how often a rank at rest looks after transfers of KV, which tell nobody when they end

log = logging.getLogger("vllm.pd")


class GroupSettings(Settings, frozen=True, forbid_unknown_fields=True):
    """What a user may set: the bounds of the group, and how its ranks talk."""
    shared_memory: bool = True  # false: over the network, even where all ranks are on one machine

    def bounds(self, one_front_end: bool, offline: bool, lockstep: bool = True) -> Settings:
        """What all ranks must have alike, be it said or left to the default."""
        given = {key: getattr(self, key) for key in Settings.__struct_fields__}
        return Settings(**given | {"call_wait_s": self.wait_s(one_front_end, offline), "lockstep": lockstep})

    def wait_s(self, one_front_end: bool, offline: bool) -> float:
        """`call_wait_s`. One front end for all ranks calls all of them at once. Offline ranks run one program, some
        perhaps long before others. Servers of one rank each are called one after another."""
        if self.call_wait_s is not None:
            return self.call_wait_s
        return TOGETHER_S if one_front_end else self.stall_s if offline else 0.0


def settings_of(additional_config: object) -> GroupSettings:
    """What `--additional-config '{"dp_sync": {...}}'` says. Raises ConfigError."""
    given = additional_config.get(SETTINGS_KEY, {}) if isinstance(additional_config, dict) else {}
    try:
        settings = msgspec.convert(given, GroupSettings)
    except msgspec.ValidationError as error:
        keys = ", ".join(GroupSettings.__struct_fields__)
        raise ConfigError(f"additional_config.{SETTINGS_KEY}", given, f"{error}; it may set {keys}") from error
    if settings.call_wait_s is not None and not 0 <= settings.call_wait_s <= 86400:
        raise ConfigError(f"additional_config.{SETTINGS_KEY}.call_wait_s", settings.call_wait_s,
                          "take 0 (each rank makes its calls at once, alone) to 86400 seconds")
    return settings


def most_steps(scheduler: Scheduler, budget_tokens: int) -> int:
    """The most forward passes, the one just scheduled included, that this rank's requests may still need."""
    return max((request.max_tokens - request.num_output_tokens
                - (request.num_computed_tokens - request.num_tokens) // budget_tokens
                for request in scheduler.requests.values()), default=1)  # fmt: skip


class EngineSync:
    """Counts this engine's forward passes and keeps their number equal to the other ranks'."""

    lockstep = True

    def __init__(self, engine: DPEngineCoreProc) -> None:
        """Called by the engine before its model is loaded."""
        from vllm.v1.engine import EngineCoreRequestType
        self._engine = engine
        self._wake_up = (EngineCoreRequestType.DP_STEP, b"")
        self._most = 0  # as most_steps, one less with each step
        self._seen: tuple[int, str] | None = None  # the requests for which _most was computed
        self._unfinished: deque[Future] = deque()  # forwards of a pipeline that are on their way
        self._had_batches = False  # of a pipeline, before this step
        self._may_linger = False
        self._leaving = self._left = False
        self._linger_s = 0.0
        self._last_due_s = 0.0  # when another rank wanted a step, or this one began to leave
        self._budget: int | None = None  # of the scheduler, while it rests
        self._rest_until_s = 0.0
        self._has_transfers = False  # of KV, by a connector

    def join(self, config: Any) -> EngineSync:
        """Meet the other ranks. `config`: the engine's VllmConfig. Raises GroupFailed, ConfigError."""
        parallel = config.parallel_config
        self._budget_tokens = config.scheduler_config.max_num_batched_tokens
        self._has_transfers = config.kv_transfer_config is not None
        online = self._engine.publish_dp_lb_stats or parallel.data_parallel_external_lb
        self._may_linger = not online
        settings = settings_of(config.additional_config)
        one_front_end = self._engine.publish_dp_lb_stats
        bounds = settings.bounds(one_front_end, not online, self.lockstep)
        self._engine.dp_group = parallel.stateless_init_dp_group()
        self._linger_s = bounds.stall_s
        self._member = dp.join(
            parallel.data_parallel_rank, parallel.data_parallel_size, parallel.data_parallel_master_ip, wake=self._wake,
            exchange=dp.over(self._engine.dp_group), abort=self._abort,
            settings=bounds, shared_memory=settings.shared_memory)  # fmt: skip
        self._calls = UtilityCalls(self._engine, self._member, bounds.call_wait_s, self._wake, numbered=one_front_end)
        return self

    @property
    def messages(self) -> int:
        """Sent by this process for the step sync, the coordinator's among them where it is here."""
        return self._member.messages

    @property
    def due(self) -> bool:
        """Whether the engine loop has something to do here although it may have no request."""
        return (self._calls.overdue or self._member.due or self._leaving and self._leaves_now or self._under_way
                or self._rest_is_due)

    @property
    def may_step(self) -> bool:
        """Whether this rank may run a forward pass of its own now. If not, it comes to rest for a call."""
        return not self._calls or self._member.may_step

    def hold(self, request: Request) -> bool:
        """Whether a utility call, by its message, has to wait for the other ranks; then `make_calls` will make it."""
        return self._calls.hold(request)

    def make_calls(self, make: Callable[[Any, Request], None]) -> None:
        """Make the utility calls that all ranks make now. Afterwards the scheduler gives tokens only if `may_step`.
        Raises GroupFailed, and SystemExit where the group fails after this rank has left."""
        if self._leaving and not self._left:
            self._go_on_leaving()  # also while it has requests: nobody wants their answers any more
        if self._calls:
            with self._ends_if_left():
                self._calls.carry_out(lambda request: self._make(make, request))
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
        self._end_forwards()  # a loop that may block must have read what others say after its last forward
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
        """Whether a step without tokens has something to do while this rank rests."""
        return self._budget is not None and (self._engine.scheduler.has_finished_requests() or self._has_transfers
                                             and time.monotonic() >= self._rest_until_s)

    @property
    def _under_way(self) -> bool:
        """Whether a pipeline has forwards whose end is to be seen: a loop may block only afterwards."""
        return bool(self._unfinished) or self._has_batches

    def forward(self, run: Callable, *args: Any) -> Any:
        """Run a forward pass of this rank's own. Gives what `run` gives."""
        self._member.before_step(True, self._most_steps())
        result = run(*args)
        if isinstance(result, Future):
            self._unfinished.append(result)
            self._count_ended()
        else:
            self._member.after_step()
        return result

    def keep_up(self, dummy: Callable[[], Any]) -> None:
        """Where the loop had no forward pass to run: run the one that the others wait for, if they do. Not while a
        pipeline has forwards of this rank's own: what they give may be work for the next step. Raises GroupFailed, and
        SystemExit when this rank has left and nobody needs it any more."""
        with self._ends_if_left():
            self._keep_up(dummy)

    @contextlib.contextmanager
    def _ends_if_left(self) -> Iterator[None]:
        """The end of a group that this rank has left is no failure of this rank."""
        try:
            yield
        except GroupFailed as error:
            if not self._left:
                raise
            log.warning("this rank had left its group, which has failed since: %s", error)
            raise SystemExit from error

    def _keep_up(self, dummy: Callable[[], Any]) -> None:
        self._count_ended()
        if self._leaving:
            self._go_on_leaving()
        if self._had_batches:
            return
        decision = self._member.before_step(False)
        if decision is Decision.DUMMY:
            self._last_due_s = time.monotonic()
            dummy()
            self._member.after_step()
        elif decision is Decision.END:
            raise SystemExit

    def leave(self, signum: int) -> bool:
        """The front end (SIGTERM) or the user wants this engine to end. False: it may end now. True: its loop will end
        by itself.

        Called by a signal handler, so it takes no lock that the interrupted loop could hold.
        """
        if not self._may_linger or signum != signal.SIGTERM:
            self._member.ends()
            return False
        if self._leaving:
            return True
        self._last_due_s, self._leaving = time.monotonic(), True
        threading.Thread(target=self._linger, name="dp-leave", daemon=True).start()
        return True

    def close(self) -> None:
        self._member.close()

    def _make(self, make: Callable[[Any, Request], None], request: Request) -> None:
        from vllm.v1.engine import EngineCoreRequestType
        self._end_forwards()
        make(EngineCoreRequestType.UTILITY, request)

    def _end_forwards(self) -> None:
        """Wait for what is under way of a pipeline. All of it is agreed, so it ends."""
        for future in self._unfinished:
            with contextlib.suppress(CancelledError):  # the executor was shut down; `wait` would not see that
                future.exception()
        self._count_ended()

    def _count_ended(self) -> None:
        while self._unfinished and self._unfinished[0].done():
            self._unfinished.popleft()
            self._member.after_step()

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
        """Wake the engine loop to leave, and when it has waited for the others long enough."""
        while True:
            if self._engine.input_queue.empty():  # or the loop is elsewhere, or about to look anyway
                self._wake()
            time.sleep(max(LINGER_POLL_S, self._last_due_s + self._linger_s - time.monotonic()))

    @property
    def _leaves_now(self) -> bool:
        """Whether there is something to do about leaving."""
        lingered = time.monotonic() - self._last_due_s > self._linger_s
        return not self._left or lingered and not self._member.engaged

    def _go_on_leaving(self) -> None:
        if not self._left:
            self._left, self._last_due_s = True, time.monotonic()
            self._engine.abort_requests(list(self._engine.scheduler.requests))
            self._calls.expire()
            self._member.leave()
        elif self._leaves_now:
            log.warning("this rank has left its data-parallel group, no other has wanted a step for stall_s=%g s, and "
                        "not all have left: it ends, and with it the group", self._linger_s)
            raise SystemExit

    def _abort(self, error: GroupFailed) -> None:
        """The loop is stuck in a collective that a dead rank will never join: say so to the front ends, and end."""
        try:
            self._engine._send_engine_dead()
        finally:
            os._exit(1)
