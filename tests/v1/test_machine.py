# SPDX-License-Identifier: Apache-2.0
"""B34 on V1's real schedulers: any order of parking, resuming, failing, aborting, preempting and late words.

Hypothesis draws the operations and shrinks what fails. After each one no block that a peer may write belongs to another
request; at the end every request has ended once with the right tokens, and the pool is as it was.
"""
import os
import time

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from vllm.v1.request import RequestStatus

from tests.v1.simulated import BLOCK_SIZE, Engine
from vllm_pd.core.actions import Cancelled, FallbackReason, Prefilled, Released
from vllm_pd.core.measured import StepSpeed
from vllm_pd.core.messages import Timings
from vllm_pd.core.writes import AttemptWrites
from vllm_pd.handover.fence import BlockFence
from vllm_pd.transfer.requests import Read, Write
from vllm_pd.v1.decode import ParkedRequests
from vllm_pd.v1.prefill import InternalRequests
from vllm_pd.v1.scheduler import HandoverScheduling

EXAMPLES = int(os.environ.get("VLLM_PD_V1_EXAMPLES", "60"))
PREFIXES = [[], [1] * (2 * BLOCK_SIZE), [2] * (4 * BLOCK_SIZE)]
ENDED = (Prefilled, Released)


class HandoverMachine(RuleBasedStateMachine):
    """One engine of both roles. The test is its peers: each keeps what the protocol promises to the binding."""

    folder = None
    in_flight = 1

    @initialize(blocks=st.sampled_from([20, 30, 64]), caching=st.booleans(),
                policy=st.sampled_from(["fcfs", "priority"]), overtaking=st.sampled_from([0, 1000]),
                threshold=st.sampled_from([BLOCK_SIZE, "auto"]), chunks=st.booleans())
    def begin(self, blocks, caching, policy, overtaking, threshold, chunks):
        self.engine = Engine(self.folder, self.in_flight, blocks=blocks, batch_tokens=64, caching=caching,
                             policy=policy, max_num_seqs=4, prefix_reads="always", max_prefill_jobs=4,
                             prefill_overtaking=overtaking, threshold=threshold, push_chunks=chunks)
        self.engine.ends_chunks = False
        # With auto: half as fast as a peer, which is better by that unless much is queued there (`queue_changes`).
        self.engine.binding.speed.stepped = lambda *measured: None
        StepSpeed.stepped(self.engine.binding.speed, time.monotonic(), 1000, 0, 1000.0)
        self.numbers = 0
        self.open = {}  # attempts that have neither ended nor fallen back
        self.fenced = []  # fallen back or aborted, not released
        self.over = []  # attempts whose last word was said
        self.jobs = {}  # prompts by attempt

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for _ in range(3000):
            self._follow()
            if self.open:
                self._prefilled(next(iter(self.open)))
            while self.fenced:
                self._release(0)
            for one in engine.transfer.requests:
                if isinstance(one, Read | Write) and one.key not in self.jobs.get("ended", set()):
                    self._end(one, True)
            if not engine.has_work() and not engine.scheduler.requests and not len(engine.binding.fence):
                break
            if engine.has_work():
                engine.turn()
        engine.check_answers()
        engine.check_at_rest()

    # Helpers.

    def _follow(self):
        """Jobs that were submitted, and those that the binding aborted."""
        for attempt in self.engine.protocol.jobs:
            if attempt not in self.open and attempt not in self.fenced and attempt not in self.over:
                self.open[attempt] = None
        for attempt in self.engine.protocol.aborted:
            if attempt in self.open:
                del self.open[attempt]
                self.fenced.append(attempt)

    def _prefilled(self, attempt):
        del self.open[attempt]
        self.over.append(attempt)
        self.engine.write(attempt)
        self.engine.tell(Prefilled(attempt, Timings()))

    def _release(self, index):
        attempt = self.fenced.pop(index)
        self.over.append(attempt)
        self.engine.tell(Released(attempt))

    def _end(self, one, ok):
        engine = self.engine
        self.jobs.setdefault("ended", set()).add(one.key)
        if isinstance(one, Read):
            prompt = self.jobs[one.key.removeprefix("read ")]
            engine.fill(prompt, ok, one)
        else:
            engine.check_sent_write(one, self.jobs[one.key.rpartition(" of ")[2]])
            engine.transfer.end(one.key, ok)

    # Rules.

    @rule(prefix=st.sampled_from(PREFIXES), tail=st.integers(1, 60), tokens=st.integers(1, 40),
          priority=st.integers(0, 2))
    def add(self, prefix, tail, tokens, priority):
        if len(self.engine.scheduler.requests) > 12:
            return
        self.numbers += 1
        self.engine.add(f"r{self.numbers}", prefix + [3 + self.numbers % 900] * tail, tokens, priority=priority)

    @rule(tail=st.integers(0, 40))
    def add_twin(self, tail):
        if self.engine.prompts and len(self.engine.scheduler.requests) <= 12:
            self.numbers += 1
            last = list(self.engine.prompts.values())[-1]
            self.engine.add(f"r{self.numbers}", list(last), 5)

    @rule(turns=st.integers(1, 8))
    def turn(self, turns):
        for _ in range(turns):
            if self.engine.has_work():
                self.engine.turn()
            self._follow()

    @rule()
    def schedule_only(self):
        if self.engine.scheduler.has_requests() and len(self.engine.begun_steps) < self.in_flight:
            self.engine.schedule()
            self._follow()

    @rule(data=st.data())
    def abort(self, data):
        alive = list(self.engine.scheduler.requests.keys() & self.engine.prompts.keys())
        if alive:
            self.engine.abort(data.draw(st.sampled_from(sorted(alive))))
            self._follow()

    @precondition(lambda self: hasattr(self, "open") and self.open)
    @rule(data=st.data())
    def prefilled(self, data):
        self._prefilled(data.draw(st.sampled_from(list(self.open))))

    @precondition(lambda self: hasattr(self, "open") and self.open)
    @rule(data=st.data(), reason=st.sampled_from([FallbackReason.PEER, FallbackReason.LEASE, FallbackReason.DEADLINE]),
          some=st.integers(0, 40))
    def lose(self, data, reason, some):
        attempt = data.draw(st.sampled_from(list(self.open)))
        del self.open[attempt]
        self.fenced.append(attempt)
        self.engine.lost(attempt, reason, data.draw(st.sampled_from(["", "p"])))

    @precondition(lambda self: hasattr(self, "fenced") and self.fenced)
    @rule(data=st.data(), release=st.booleans())
    def late_write(self, data, release):
        index = data.draw(st.integers(0, len(self.fenced) - 1))
        self.engine.write(self.fenced[index])
        if release:
            self._release(index)

    @precondition(lambda self: hasattr(self, "over") and self.over)
    @rule(data=st.data())
    def late_word(self, data):
        attempt = data.draw(st.sampled_from(self.over))
        self.engine.tell(data.draw(st.sampled_from([Prefilled(attempt, Timings()), Released(attempt)])))

    @rule(tokens=st.integers(1, 120), cached=st.integers(0, 3), prefix=st.sampled_from(PREFIXES))
    def job(self, tokens, cached, prefix):
        prompt = prefix + [5 + self.numbers % 900] * tokens
        self.numbers += 1
        cached = min(cached, (len(prompt) - 1) // BLOCK_SIZE)
        self.jobs[str(self.engine.job(prompt, cached, self.numbers))] = prompt

    @rule(data=st.data(), ok=st.booleans())
    def end_transfer(self, data, ok):
        alive = [one for one in self.engine.transfer.requests
                 if isinstance(one, Read | Write) and one.key not in self.jobs.get("ended", ())]
        if alive:
            self._end(data.draw(st.sampled_from(alive)), ok)

    @rule(data=st.data())
    def cancel_job(self, data):
        jobs = list(self.engine.binding.prefill_jobs._jobs)
        if jobs:
            self.engine.tell(Cancelled(data.draw(st.sampled_from(jobs))))

    @rule(peers=st.integers(0, 2))
    def peers_change(self, peers):
        self.engine.protocol.peers = peers

    @rule(tokens=st.sampled_from([0, 10**9]))
    def queue_changes(self, tokens):
        self.engine.protocol.queued_tokens = tokens

    @rule()
    def abort_all(self):
        for request in self.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
            self.engine.ended[request.request_id] = "aborted"
        self._follow()


def search(folder, in_flight: int, examples: int, **more) -> None:
    machine = type("Machine", (HandoverMachine, ), {"folder": folder, "in_flight": in_flight})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=60, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), **more))


def test_b34_any_order(model_folder, in_flight):
    search(model_folder, in_flight, EXAMPLES, derandomize="VLLM_PD_V1_EXAMPLES" not in os.environ)


@pytest.mark.parametrize("defect", ["no touch", "released at the fallback", "any word resumes", "sources not held",
                                    "sent before it is computed", "sources of chunks not held",
                                    "answered while a chunk is sent"])
def test_b34_the_search_finds_planted_defects(model_folder, in_flight, defect, monkeypatch):
    if defect == "no touch":
        monkeypatch.setattr(BlockFence, "hold", lambda fence, attempt, block_ids: fence._held.update({attempt: []}))
    elif defect == "released at the fallback":
        leave = ParkedRequests.leave
        monkeypatch.setattr(ParkedRequests, "leave",
                            lambda prefills, attempt: (prefills._fence.release(attempt), leave(prefills, attempt))[1])
    elif defect == "any word resumes":
        monkeypatch.setattr(HandoverScheduling, "fail_parked", HandoverScheduling.resume_parked)
    elif defect == "sent before it is computed":
        step_done = InternalRequests.step_done
        monkeypatch.setattr(InternalRequests, "step_done", lambda jobs, step: step_done(jobs, step + 1))
    elif defect == "sources of chunks not held":
        chunk_computed = InternalRequests.chunk_computed

        def without_hold(jobs, attempt, block_ids):
            jobs._fence.release(attempt, block_ids)
            chunk_computed(jobs, attempt, block_ids)

        monkeypatch.setattr(InternalRequests, "chunk_computed", without_hold)
    elif defect == "answered while a chunk is sent":
        monkeypatch.setattr(AttemptWrites, "close", lambda writes, error="": setattr(writes, "_closed", True))
    else:
        finished = InternalRequests.finished

        def without_fence(jobs, request, block_ids, progress):
            finished(jobs, request, block_ids, progress)
            jobs._fence.release(jobs._attempts[request.request_id])

        monkeypatch.setattr(InternalRequests, "finished", without_fence)
    with pytest.raises(AssertionError):
        search(model_folder, in_flight, 300, phases=[Phase.generate], derandomize=True)
