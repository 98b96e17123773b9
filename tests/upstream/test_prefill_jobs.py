# SPDX-License-Identifier: Apache-2.0
"""A prefill engine's jobs, driven by hand: every way in which one ends tells the peer once and frees the blocks
once."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.sequence import SequenceStatus

from tests.fakes.simulated_engine import BLOCK_SIZE, SimulatedEngine
from vllm_pd.decisions.measured import StepSpeed
from vllm_pd.handover.jobs import JobStage
from vllm_pd.handover.metrics import PDMetrics
from vllm_pd.handover.progress import ArrivalNotice, Progress
from vllm_pd.protocol.actions import AddPeer, Cancelled, DropPeer, Prefill
from vllm_pd.protocol.messages import Attempt
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer import requests as transfer
from vllm_pd.v0.prefill import PrefillJobs

ATTEMPT = Attempt("decode-incarnation", "request", 7)
TOKENS = list(range(40))  # three blocks of 16


class Agent:
    """The control agent's calls, in order."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(has_other_weights=False)
        self.calls: list[tuple] = []
        self.lease_is_over = False
        self.room = -1

    def set_credits(self, jobs: int, queued_tokens: int | None = None) -> None:
        self.room = jobs

    def may_write(self, attempt: Attempt) -> bool:
        return not self.lease_is_over

    lease_stands = may_write

    def lasting_hold_blocks(self) -> int:
        return 0

    def __getattr__(self, name: str):
        return lambda *arguments: self.calls.append((name, *arguments))

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class Engine:
    """As much of LLMEngine as a job needs."""

    def __init__(self, longest: int = 100) -> None:
        self.cached_tokens = 0  # of any prompt
        blocks = SimpleNamespace(get_num_cached_tokens=lambda seq: self.cached_tokens,
                                 remove_seq_from_computed_blocks_tracker=lambda seq: None)
        self.scheduler = [SimpleNamespace(waiting=[], block_manager=blocks)]
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000, dtype=torch.float32,
                                            get_num_layers=lambda parallel: 2, get_total_num_kv_heads=lambda: 2,
                                            get_head_size=lambda: 8)
        self.cache_config = SimpleNamespace(enable_prefix_caching=True, block_size=16, cache_dtype="auto",
                                            num_gpu_blocks=100)
        self.parallel_config = SimpleNamespace(world_size=1)
        self.scheduler_config = SimpleNamespace(policy="fcfs", max_num_batched_tokens=512)
        self.vllm_config = self
        self.aborted: list[str] = []
        self.longest = longest

    def add_request(self, request_id, prompt, params, priority) -> None:
        if len(prompt["prompt_token_ids"]) > self.longest:
            raise ValueError("too long")
        assert params.max_tokens == 1 and params.ignore_eos
        data = SimpleNamespace(get_num_uncomputed_tokens=lambda: len(prompt["prompt_token_ids"]))
        self.scheduler[0].waiting.append(
            SimpleNamespace(request_id=request_id, metrics=SimpleNamespace(first_scheduled_time=None),
                            first_seq=SimpleNamespace(remote_decode=None, status=SequenceStatus.WAITING, data=data)))

    def abort_request(self, request_id: str) -> None:
        self.aborted.append(request_id)


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def jobs(agent, engine):
    config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700", "max_prefill_jobs": 2})
    return PrefillJobs(config, agent, engine, PDMetrics("test"), StepSpeed())


def prefill(token_ids=TOKENS, attempt=ATTEMPT) -> Prefill:
    return Prefill(attempt, token_ids, [21, 22], 1, [20], "decode-incarnation")


def write_of(jobs, progress) -> transfer.Write:
    requests = jobs.take_requests(progress)
    assert [type(request) for request in requests] == [transfer.Write]
    return requests[0]


def end(jobs, finished: transfer.Finished, progress: Progress) -> None:
    """As the transfer thread and then the step loop see it."""
    jobs.report_end(finished)
    jobs.ended(finished, progress)


def test_life_of_a_job(jobs, agent, engine):
    progress = Progress()
    jobs.handle(prefill(), progress)
    assert engine.scheduler[0].waiting[0].first_seq.remote_decode == ATTEMPT
    jobs.set_credits()
    assert agent.room == 1
    assert not jobs.has_requests and not jobs.sending
    jobs.computed(ATTEMPT, [5, 6, 7], progress)
    assert jobs.has_requests
    write = write_of(jobs, progress)
    assert (write.local_block_ids, write.remote_block_ids) == ([6, 7], [21, 22])  # D has the first one
    assert [ArrivalNotice.decode(notice) for notice in write.notices] == [ArrivalNotice(ATTEMPT, 0)]
    assert jobs.sending and jobs.find(ATTEMPT) is JobStage.SENDING
    assert not progress
    finished = transfer.Finished(write.key, True, bytes=100, seconds=0.5)
    jobs.report_end(finished)
    assert agent.names() == ["sent"] and not progress  # the peer need not wait for the step loop
    jobs.ended(finished, progress)
    assert progress.finished_transfers == [ATTEMPT] and not jobs.sending
    assert agent.names() == ["sent"]
    timings = agent.calls[0][2]
    assert (timings.transfer_s, timings.bytes, timings.measured) == (0.5, 100, True)
    jobs.set_credits()
    assert agent.room == 2


def test_b27_a_failed_transfer_is_told_and_freed(jobs, agent):
    progress = Progress()
    jobs.handle(prefill(), progress)
    jobs.computed(ATTEMPT, [5, 6, 7], progress)
    write = write_of(jobs, progress)
    end(jobs, transfer.Finished(write.key, False, error="ERR"), progress)
    assert agent.names() == ["failed"] and "ERR" in agent.calls[0][2]
    assert progress.finished_transfers == [ATTEMPT]
    end(jobs, transfer.Finished(write.key, True), progress)  # a second end of the same write
    assert agent.names() == ["failed"]


def test_b30_a_job_that_the_scheduler_ignores_is_answered(jobs, agent, engine):
    progress = Progress()
    jobs.handle(prefill(), progress)
    jobs.ignored(engine.scheduler[0].waiting[0].first_seq.remote_decode)
    assert agent.names() == ["failed"]
    assert not progress  # it never had a block


def test_b25_cancelled_while_it_computes(jobs, agent, engine):
    progress = Progress()
    jobs.handle(prefill(), progress)
    jobs.handle(Cancelled(ATTEMPT), progress)
    assert len(engine.aborted) == 1
    assert agent.names() == ["ended"] and progress.finished_transfers == [ATTEMPT], "whatever is held for it"
    progress = Progress()
    jobs.computed(ATTEMPT, [5, 6, 7], progress)  # it had just finished all the same: give the blocks back
    assert progress.finished_transfers == [ATTEMPT]
    assert jobs.take_requests(Progress()) == []


def test_b25_cancelled_before_the_write_is_posted(jobs, agent):
    progress = Progress()
    jobs.handle(prefill(), progress)
    jobs.computed(ATTEMPT, [5, 6, 7], progress)
    jobs.handle(Cancelled(ATTEMPT), progress)
    assert agent.names() == ["ended"]
    assert progress.finished_transfers == [ATTEMPT]
    assert jobs.take_requests(Progress()) == []


def test_requests_of_a_step_that_was_given_up_go_with_the_next(jobs):
    progress = Progress()
    jobs.handle(AddPeer("peer", b"metadata"), progress)
    taken = jobs.take_requests(progress)
    jobs.handle(DropPeer("other"), progress)
    jobs.return_requests(taken)
    assert jobs.take_requests(progress) == [transfer.AddTransferPeer("peer", b"metadata"),
                                            transfer.DropTransferPeer("other")]


def test_b29_what_is_no_notice_is_none():
    for payload in (b"", b"\xc1", b"notice", b"\x92\x01\x02", ArrivalNotice(ATTEMPT, 0).encode() + b"x"):
        assert ArrivalNotice.decode(payload) is None


class TestReading:
    """B5: the peer has two blocks of the prompt, this engine none of them."""

    @pytest.fixture
    def jobs(self, agent, engine):
        config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700", "prefix_reads": "always"})
        return PrefillJobs(config, agent, engine, PDMetrics("test"), StepSpeed())

    @pytest.fixture
    def reading(self, jobs) -> transfer.Read:
        """The job is parked in blocks 5..7, and its read is on its way."""
        jobs.handle(Prefill(ATTEMPT, TOKENS, [22], 2, [20, 21], "decode-incarnation"), Progress())
        assert jobs.wants_prefix(ATTEMPT, 0)
        jobs.read_prefix(ATTEMPT, [5, 6, 7], 0)
        assert jobs.sending  # the loop looks for its end
        [read] = jobs.take_requests(Progress())
        return read

    def test_b5_a_prefix_is_read_once_and_the_rest_computed(self, jobs, agent, reading):
        progress = Progress()
        assert (reading.local_block_ids, reading.remote_block_ids) == ([5, 6], [20, 21])
        end(jobs, transfer.Finished(reading.key, True, bytes=64, seconds=0.1), progress)
        assert progress.read_prefixes == {ATTEMPT: 32} and not progress.failed_prefills
        assert progress.finished_transfers == [ATTEMPT]
        assert not jobs.wants_prefix(ATTEMPT, 0)  # although its blocks may have been evicted since
        jobs.computed(ATTEMPT, [8, 9, 10], progress)
        write = write_of(jobs, progress)
        assert (write.local_block_ids, write.remote_block_ids) == ([10], [22])
        assert agent.calls == []

    def test_b5_only_what_is_not_cached_here(self, jobs):
        jobs.handle(Prefill(ATTEMPT, TOKENS, [22], 2, [20, 21], "decode-incarnation"), Progress())
        assert not jobs.wants_prefix(ATTEMPT, 32)
        assert jobs.wants_prefix(ATTEMPT, 16)
        jobs.read_prefix(ATTEMPT, [5, 6, 7], 16)
        [read] = jobs.take_requests(Progress())
        assert (read.local_block_ids, read.remote_block_ids) == ([6], [21])

    def test_b27_a_read_that_failed_leaves_nothing(self, jobs, agent, reading, caplog):
        progress = Progress()
        end(jobs, transfer.Finished(reading.key, False, error="ERR"), progress)
        assert progress.failed_prefills == progress.finished_transfers == [ATTEMPT] and not progress.read_prefixes
        assert jobs.find(ATTEMPT) is JobStage.COMPUTING and agent.calls == []

    def test_b34_a_read_that_failed_and_may_land_waits_for_the_peers_death(self, jobs, agent, engine, reading):
        progress = Progress()
        engine.abort_request = lambda request_id: jobs.aborted(ATTEMPT)  # as the scheduler calls it, once
        agent.may_land = lambda attempt: attempt == ATTEMPT
        end(jobs, transfer.Finished(reading.key, False, error="ERR", may_land=True), progress)
        jobs.free_unproven(progress)
        assert agent.names() == ["read_unproven"] and not progress and jobs.idle
        agent.may_land = lambda attempt: False
        jobs.free_unproven(progress)
        assert progress.finished_transfers == [ATTEMPT]

    def test_b22_a_read_that_outlived_its_lease_leaves_nothing(self, jobs, agent, reading):
        progress = Progress()
        agent.lease_is_over = True
        jobs.ended(transfer.Finished(reading.key, True, bytes=64, seconds=0.1), progress)
        assert progress.failed_prefills == [ATTEMPT] and not progress.read_prefixes

    def test_b25_cancelled_while_it_reads_waits_for_the_end(self, jobs, agent, engine, reading):
        progress = Progress()
        engine.abort_request = lambda request_id: jobs.aborted(ATTEMPT)  # as the scheduler calls it, once
        jobs.handle(Cancelled(ATTEMPT), progress)
        assert agent.calls == [] and not progress  # bytes may still land
        assert jobs.take_requests(progress) == [transfer.CancelTransfer(reading.key)]
        jobs.handle(Cancelled(ATTEMPT), progress)
        assert jobs.take_requests(progress) == []
        finished = transfer.Finished(reading.key, True, bytes=64, seconds=0.1)
        jobs.report_end(finished)
        assert agent.names() == ["ended"]
        jobs.ended(finished, progress)
        assert progress.failed_prefills == progress.finished_transfers == [ATTEMPT] and not progress.read_prefixes
        assert set(agent.names()) == {"ended"} and jobs.find(ATTEMPT) is None

    def test_b25_b30_given_back_while_it_reads_it_is_over_at_the_end_of_the_read(self, jobs, agent, engine, reading):
        """The protocol keeps a job as long as bytes may land: by that an engine that ends keeps its memory."""
        progress = Progress()
        engine.abort_request = lambda request_id: jobs.aborted(ATTEMPT)  # as the scheduler calls it, once
        jobs.give_back(jobs.reading, "no room", progress)
        assert agent.calls == [] and not jobs.reading and not progress
        assert jobs.take_requests(progress) == [transfer.CancelTransfer(reading.key)]
        jobs.set_credits()
        assert agent.room > 0
        finished = transfer.Finished(reading.key, True, bytes=64, seconds=0.1)
        jobs.report_end(finished)
        assert agent.calls == [("failed", ATTEMPT, "no room")]
        jobs.ended(finished, progress)
        assert progress.failed_prefills == progress.finished_transfers == [ATTEMPT] and not progress.read_prefixes
        assert set(agent.names()) == {"failed"} and jobs.find(ATTEMPT) is None

    def test_b5_without_prefix_caching_nothing_is_read(self, agent, engine):
        engine.cache_config.enable_prefix_caching = False
        config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700", "prefix_reads": "always"})
        jobs = PrefillJobs(config, agent, engine, PDMetrics("test"), StepSpeed())
        jobs.handle(Prefill(ATTEMPT, TOKENS, [22], 2, [20, 21], "decode-incarnation"), Progress())
        assert not jobs.wants_prefix(ATTEMPT, 0)


def test_b30_jobs_that_have_not_begun_can_be_given_back(jobs, agent, engine):
    """What is computed, and what is being computed, goes on."""
    progress = Progress()
    attempts = [Attempt("decode-incarnation", f"request {number}", number) for number in range(3)]
    for attempt in attempts:
        jobs.handle(prefill(attempt=attempt), progress)
    engine.scheduler[0].waiting[0].first_seq.status = SequenceStatus.RUNNING
    jobs.computed(attempts[1], [5, 6, 7], progress)
    assert jobs.waiting == [attempts[2]]
    jobs.give_back(jobs.waiting, "no room", progress)
    assert not jobs.waiting and [jobs.find(attempt) for attempt in attempts] == [JobStage.COMPUTING,
                                                                                  JobStage.COMPUTED, None]
    assert engine.aborted == [f"pd-{attempts[2]}"]
    assert [call[:2] for call in agent.calls] == [("failed", attempts[2])] and "no room" in agent.calls[0][2]
    jobs.set_credits()
    assert agent.room == 0


@pytest.mark.parametrize("overtaking, order", [(8, [0, 2, 3, 1]), (0, [0, 1, 2, 3])])
def test_jobs_become_requests_in_their_turn(agent, engine, overtaking, order):
    """One after the other where each fills a step; the others are unknown to the engine."""
    config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700", "prefill_step_s": 1e-6,
                                            "prefill_overtaking": overtaking})
    jobs, progress = PrefillJobs(config, agent, engine, PDMetrics("test"), StepSpeed()), Progress()
    attempts = [Attempt("decode-incarnation", f"request {number}", number) for number in range(4)]
    for attempt, tokens in zip(attempts, (70, 99, 80, 90), strict=True):
        jobs.handle(Prefill(attempt, [5] * tokens, [21, 22], 0, [], "decode-incarnation"), progress)
    begun = engine.scheduler[0].waiting
    for number in order:
        assert begun[-1].request_id == f"pd-{attempts[number]}"
        jobs.computed(attempts[number], [5, 6, 7], progress)
        jobs.begin()
    assert len(begun) == 4 and not jobs.queued


def test_jobs_whose_beginning_is_cached_begin_together(agent, engine):
    config = PDConfig.parse("kv_producer", {"broker": "tcp://127.0.0.1:5700", "prefill_step_s": 1e-6})
    jobs = PrefillJobs(config, agent, engine, PDMetrics("test"), StepSpeed())
    engine.cached_tokens = 80
    for number in range(6):  # 19 tokens each, and a step has 64
        attempt = Attempt("decode-incarnation", f"request {number}", number)
        jobs.handle(Prefill(attempt, [5] * 99, [21, 22], 0, [], "decode-incarnation"), Progress())
    assert len(engine.scheduler[0].waiting) == 4 and len(jobs.queued) == 2
    assert jobs.job_tokens == 6 * 99, "as reported to the broker and the decode engines"


def test_what_is_cached_is_asked_for_without_a_trace():
    """The real block manager fixes a prompt's hit when it is first asked for; by its turn it may be longer."""
    simulated = SimulatedEngine(wants_remote=lambda group: False)
    tokens = list(range(100, 100 + 3 * BLOCK_SIZE))
    simulated.add("waits", tokens)
    engine = SimpleNamespace(scheduler=[simulated.scheduler])
    job = SimpleNamespace(request=simulated.groups["waits"])
    ask = partial(PrefillJobs._cached_tokens, SimpleNamespace(_engine=engine), job)
    assert ask() == 0
    simulated.scheduler.waiting.clear()
    simulated.add("computes", tokens)
    simulated.run()
    assert ask() == 3 * BLOCK_SIZE
    assert job.request.first_seq.seq_id not in simulated.manager._computed_blocks_tracker._seq_id_to_blocks_hashes


def test_b25_a_job_that_is_cancelled_before_its_turn_was_no_request(jobs, agent, engine):
    long = [5] * 99
    jobs.handle(Prefill(ATTEMPT, long * 6, [21, 22], 0, [], "decode-incarnation"), Progress())
    assert agent.names() == ["failed"], "too long"
    engine.longest = 10_000
    queued = Attempt("decode-incarnation", "queued", 9)
    jobs.handle(Prefill(ATTEMPT, long * 6, [21, 22], 0, [], "decode-incarnation"), Progress())
    jobs.handle(Prefill(queued, long * 7, [21, 22], 0, [], "decode-incarnation"), Progress())
    assert jobs.find(queued) is JobStage.QUEUED and (jobs.waiting, jobs.queued) == ([ATTEMPT], [queued])
    jobs.handle(Cancelled(queued), Progress())
    assert jobs.find(queued) is None and agent.calls[-1] == ("ended", queued) and engine.aborted == [f"pd-{ATTEMPT}"]
