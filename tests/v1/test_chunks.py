# SPDX-License-Identifier: Apache-2.0
"""B100: KV leaves a V1 prefill engine while it computes, on the real scheduler. No write is posted before the step that
fills its blocks was processed, one write is under way at a time, the last one has the notice, and nothing is said to
the peer while one is."""
import pytest
from vllm.v1.request import RequestStatus

from tests.v1.simulated import BLOCK_SIZE, Engine, is_of
from tests.v1.test_hazards import prompt
from vllm_pd.decisions import job_order
from vllm_pd.handover.progress import ArrivalNotice
from vllm_pd.protocol.actions import Cancelled
from vllm_pd.transfer.requests import CancelTransfer, Write

CHUNK = 64  # tokens of a step: four blocks


class Sender:
    """A prefill engine with a job of this prompt, whose writes are looked at when they are posted."""

    def __init__(self, folder, in_flight: int, tokens: int = 300, cached: int = 0, **settings) -> None:
        self.engine = Engine(folder, in_flight, role="kv_producer", batch_tokens=CHUNK,
                             **{"prefix_reads": "never", **settings})
        self.engine.ends_chunks = False
        self.prompt = prompt(tokens)
        self.posted: list[Write] = []
        execute = self.engine.transfer.execute

        def checked_execute(requests):
            for one in requests:
                if isinstance(one, Write):
                    assert not self.engine.transfer.open_writes, "two writes of one attempt at a time"
                    assert one.after_step == self.engine.binding._processed_step
                    self.engine.check_sent_write(one, self.prompt)
                    self.posted.append(one)
            execute(requests)

        self.engine.transfer.execute = self.engine.binding.prefill_jobs.execute = checked_execute
        self.attempt = self.engine.job(self.prompt, cached)

    def until_posted(self, writes: int) -> Write:
        """Turn until so many were posted; returns the last of them."""
        for _ in range(50):
            if len(self.posted) == writes:
                return self.posted[-1]
            self.engine.turn()
        raise AssertionError(f"{len(self.posted)} writes, not {writes}")

    def end_write(self, ok: bool = True) -> None:
        """The write under way ends; what it sends is right to the last moment."""
        (write, ) = self.engine.transfer.open_writes.values()
        self.engine.check_sent_write(write, self.prompt)
        self.engine.transfer.end(write.key, ok, "" if ok else "broken")

    def send_all(self) -> None:
        """Turn, and end each write as soon as it was posted, until the job is sent."""
        for _ in range(100):
            if self.engine.has_work():
                self.engine.turn()
            if self.engine.transfer.open_writes:
                self.end_write()
            if ("sent", self.attempt) in self.engine.protocol.calls:
                return
        raise AssertionError("it is never sent")

    def preempt(self, at_once: bool = False):
        """V1 takes the job's blocks."""
        scheduler = self.engine.scheduler
        (request, ) = scheduler.running
        scheduler.running.remove(request)
        scheduler._preempt_request(request, 0.0, drop_stale_output=at_once)
        return request

    def finish(self, *calls: str, errors: int = 0) -> None:
        """All is over, and these were said. So many unexpected errors were counted."""
        self.engine.run()
        assert self.engine.protocol.calls == [(call, self.attempt) for call in calls]
        self.engine.check_answers()
        self.engine.check_at_rest(errors)


def raises_once(method, after: bool = False):
    """`method`, which raises the first time that it is called: before or after it has done its work."""
    calls = []

    def raising(*arguments):
        calls.append(arguments)
        if len(calls) > 1 or after:
            method(*arguments)
        if len(calls) == 1:
            raise RuntimeError("planted")

    return raising


@pytest.fixture
def sender(model_folder, in_flight):
    return Sender(model_folder, in_flight)


@pytest.mark.parametrize("tokens, cached", [(300, 0), (300, 3), (256, 0), (257, 1), (65, 0), (128, 7)])
def test_b100_blocks_leave_after_each_step(model_folder, in_flight, tokens, cached):
    sender = Sender(model_folder, in_flight, tokens, cached)
    sender.send_all()
    writes, blocks = sender.posted, -(-tokens // BLOCK_SIZE)
    assert [block for write in writes for block in write.remote_block_ids] == list(range(100 + cached, 100 + blocks))
    assert len(writes) == -(-tokens // CHUNK) - cached * BLOCK_SIZE // CHUNK
    assert [write.notices for write in writes[:-1]] == [[b""]] * (len(writes) - 1)
    assert [ArrivalNotice.decode(one) for one in writes[-1].notices] == [ArrivalNotice(sender.attempt, 0)]
    assert writes[-1].key == str(sender.attempt) and len({write.key for write in writes}) == len(writes)
    sender.finish("sent")


def test_b100_steps_do_not_wait_for_a_write_and_the_next_one_takes_all_that_came_meanwhile(sender):
    first = sender.until_posted(1)
    assert first.remote_block_ids == [100, 101, 102, 103]
    sender.engine.run()
    assert sender.posted == [first] and not sender.engine.scheduler.requests, "the prompt is computed"
    steps = sender.engine.steps
    sender.end_write()
    assert len(sender.posted) == 2 and sender.engine.steps == steps, "posted by the thread that saw the end"
    assert sender.posted[1].remote_block_ids == list(range(104, 119)) and sender.posted[1].notices != [b""]
    assert not sender.engine.protocol.calls
    sender.end_write()
    assert sender.engine.protocol.calls == [("sent", sender.attempt)] and sender.engine.steps == steps
    sender.finish("sent")


def test_b100_the_timings_say_how_much_the_last_write_had(sender):
    """It alone follows the computation, unless it had to wait for the one before."""
    said, sent = [], sender.engine.protocol.sent
    sender.engine.protocol.sent = lambda attempt, timings: said.append(timings) or sent(attempt, timings)
    sender.send_all()
    (timings, ) = said
    assert (timings.bytes, timings.last_bytes) == (len(sender.posted), 1), "the fake transport counts writes"
    sender.finish("sent")


def test_b100_off_a_prompt_leaves_whole(model_folder, in_flight):
    sender = Sender(model_folder, in_flight, push_chunks=False)
    assert len(sender.until_posted(1).remote_block_ids) == 19 and not sender.engine.scheduler.requests
    sender.end_write()
    sender.finish("sent")


@pytest.mark.parametrize("posted", [1, 2])
def test_b100_b27_a_chunk_that_fails_is_the_attempts_failure_once(sender, posted):
    for number in range(posted):
        sender.until_posted(number + 1)
        sender.end_write(ok=number + 1 < posted)
    assert sender.engine.protocol.calls == [("failed", sender.attempt)], "at once, without a step"
    sender.finish("failed")
    assert len(sender.posted) == posted and sender.engine.tokens_computed < 300, "it is computed no further"


def test_b100_b27_a_chunk_that_fails_after_the_prompt_was_computed(sender):
    sender.until_posted(1)
    sender.engine.run()
    sender.end_write(ok=False)
    assert len(sender.posted) == 1
    sender.finish("failed")


@pytest.mark.parametrize("computed", [False, True], ids=["computing", "computed"])
@pytest.mark.parametrize("ok", [True, False])
def test_b100_b25_a_cancel_is_answered_when_the_chunk_under_way_has_ended(sender, computed, ok):
    write = sender.until_posted(1)
    if computed:
        sender.engine.run()
    sender.engine.tell(Cancelled(sender.attempt))
    sender.engine.run()
    assert CancelTransfer(write.key) in sender.engine.transfer.requests and len(sender.engine.binding.fence) == 1
    assert not sender.engine.protocol.calls and not sender.engine.scheduler.requests
    sender.engine.add("a", prompt(200))
    sender.engine.run()
    sender.end_write(ok)
    assert sender.engine.protocol.calls == [("ended", sender.attempt)] and len(sender.posted) == 1
    sender.finish("ended")


def test_b100_b25_a_cancel_between_two_chunks(sender):
    sender.until_posted(1)
    sender.end_write()
    sender.engine.tell(Cancelled(sender.attempt))
    sender.engine.run()
    assert len(sender.posted) == 1
    sender.finish("ended")


@pytest.mark.parametrize("ended", [True, False], ids=["between two chunks", "under way"])
def test_b100_b22_the_lease_is_asked_for_each_chunk(sender, ended):
    sender.until_posted(1)
    if ended:
        sender.end_write()
    sender.engine.protocol.lease = False
    sender.engine.run()
    if not ended:
        assert not sender.engine.protocol.calls
        sender.end_write()
    assert len(sender.posted) == 1 and sender.engine.protocol.calls == [("failed", sender.attempt)]
    sender.finish("failed")


def test_b100_only_the_last_write_is_announced(sender):
    """D looks for a notice from then on."""
    announced, may_write = [], sender.engine.protocol.may_write
    sender.engine.protocol.may_write = lambda attempt: announced.append(len(sender.posted)) or may_write(attempt)
    sender.send_all()
    assert announced == [len(sender.posted) - 1]
    sender.finish("sent")


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_b100_b96_a_job_that_is_given_up_here_says_so_when_its_chunk_has_ended(sender, how):
    write = sender.until_posted(1)
    if how == "abort":
        sender.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    else:
        sender.engine.binding.prefill_jobs.give_back([sender.attempt], "this engine is paused",
                                                     sender.engine.binding._progress)
    assert not sender.engine.protocol.calls
    sender.engine.run()
    assert CancelTransfer(write.key) in sender.engine.transfer.requests and not sender.engine.scheduler.requests
    sender.end_write(ok=False)
    sender.finish("failed")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("posted, ended, at_once",
                         [(0, False, True), (1, False, True), (1, True, False), (2, False, False)])
def test_b100_a_job_that_is_preempted_goes_on_where_its_writes_were(model_folder, in_flight, caching, posted, ended,
                                                                    at_once):
    """With steps in flight, whose blocks it has lost. What has left is not sent again. `at_once`: V1 computes it anew
    before it has processed those steps, as it does after a reset of the prefix cache."""
    sender = Sender(model_folder, in_flight, caching=caching)
    engine = sender.engine
    for number in range(posted):
        sender.until_posted(number + 1)
        if ended or number + 1 < posted:
            sender.end_write()
    engine.scheduler.has_requests()
    while len(engine.begun_steps) < in_flight:
        engine.schedule()
    sender.preempt(at_once)
    engine.add("a", prompt(100))  # takes what is free
    sender.send_all()
    assert [block for write in sender.posted for block in write.remote_block_ids] == list(range(100, 119))
    sender.finish("sent")


def test_b100_b31_blocks_come_free_with_the_end_of_their_chunk(model_folder, in_flight):
    """A job that was preempted after it had sent nearly all, without a prefix cache: it needs those blocks again, and
    the engine, which sleeps meanwhile, goes on when the write has ended."""
    sender = Sender(model_folder, in_flight, blocks=24, caching=False)
    engine = sender.engine
    sender.until_posted(1)
    sender.end_write()
    sender.until_posted(2)
    request = sender.preempt()
    engine.run()
    assert request.status is RequestStatus.PREEMPTED or len(sender.posted) > 1
    sender.send_all()
    sender.finish("sent")


def test_b100_a_job_whose_blocks_leave_reads_no_prefix_any_more(model_folder, in_flight):
    """It is preempted when the peer's prefix, which it had found here, is evicted. A read would begin with its next
    admission, and the end of that would free the blocks of the write under way."""
    sender = Sender(model_folder, in_flight, cached=2, prefix_reads="always")
    jobs = sender.engine.binding.prefill_jobs
    assert jobs.prefix_cost.worth_reading(2 * BLOCK_SIZE)
    jobs.wants_prefix, wants_prefix = (lambda attempt, cached_tokens: False), jobs.wants_prefix
    sender.until_posted(1)
    jobs.wants_prefix = wants_prefix
    sender.preempt()
    assert not jobs.wants_prefix(sender.attempt, 0)
    sender.send_all()
    assert [block for write in sender.posted for block in write.remote_block_ids] == list(range(102, 119))
    sender.finish("sent")


@pytest.mark.parametrize("jobs", [2, 3])
def test_b100_b22_several_jobs_lose_their_lease_in_one_step(model_folder, in_flight, jobs, monkeypatch):
    monkeypatch.setattr(job_order, "may_begin", lambda turn, begun, step_tokens: True)  # all at once
    engine = Engine(model_folder, in_flight, role="kv_producer", prefix_reads="never")
    engine.binding.prefill_jobs.arrange = lambda: None
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32  # each has some tokens in each step
    engine.protocol.lease = False
    attempts = [engine.job(prompt(200), number=number) for number in range(jobs)]
    engine.run()
    assert set(engine.protocol.calls) == {("failed", attempt) for attempt in attempts}
    assert engine.tokens_computed <= jobs * 32 * (in_flight + 1), "they are computed no further"
    assert not engine.transfer.open_writes and not engine.scheduler.requests
    engine.check_at_rest()


def test_b100_writes_that_end_before_the_step_loop_looks_are_no_failure(sender):
    """The transfer thread posts the last write, and sees its end, between the prompt's end and the next look."""
    jobs = sender.engine.binding.prefill_jobs
    sender.until_posted(1)
    computed = jobs.computed

    def then_all_writes_end(*arguments) -> None:
        computed(*arguments)
        while sender.engine.transfer.open_writes:
            sender.end_write()

    jobs.computed = then_all_writes_end
    sender.finish("sent")


@pytest.mark.parametrize("how", ["cancel", "abort", "pause"])
def test_b100_b20_b82_blocks_that_are_in_no_write_yet_come_free_with_the_job(sender, how):
    """After an unexpected error between the end of a step and the post of its write, the job is given up."""
    engine, jobs = sender.engine, sender.engine.binding.prefill_jobs
    sender.until_posted(1)
    sender.end_write()
    jobs.chunk_computed = raises_once(jobs.chunk_computed, after=True)
    while not jobs._jobs[sender.attempt].writes.unsent_blocks:
        engine.turn()
    if how == "cancel":
        engine.tell(Cancelled(sender.attempt))
    elif how == "abort":
        engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    else:
        jobs.give_back([sender.attempt], "this engine is paused", engine.binding._progress)
        engine.access.wake()
    sender.finish("ended" if how == "cancel" else "failed", errors=1)
    assert len(sender.posted) == 1


@pytest.mark.parametrize("posted", [1, 2])
def test_b100_b20_b82_a_write_that_cannot_be_posted_has_failed(sender, posted):
    """By the thread that saw the end of the one before: no end of it would ever come."""
    for number in range(posted - 1):
        sender.until_posted(number + 1)
        sender.end_write()
    sender.until_posted(posted)
    sender.engine.run()
    jobs = sender.engine.binding.prefill_jobs
    jobs.execute = raises_once(jobs.execute)
    sender.end_write()
    assert sender.engine.protocol.calls == [("failed", sender.attempt)], "at once, without a step"
    sender.finish("failed")


def test_b100_b20_b82_an_error_while_an_end_is_counted_keeps_nothing(sender):
    sender.until_posted(1)
    sender.engine.run()
    sender.end_write()
    sender.engine.run()
    metrics = sender.engine.binding._metrics
    metrics.transfer_bytes = raises_once(metrics.transfer_bytes)
    sender.end_write()
    sender.finish("sent", errors=1)


@pytest.mark.parametrize("chunks", [0, 1], ids=["the first chunk", "the second chunk"])
def test_b100_b20_b82_blocks_that_could_not_be_held_leave_with_the_next_ones(sender, chunks):
    for number in range(chunks):
        sender.until_posted(number + 1)
        sender.end_write()
    fence = sender.engine.binding.fence
    fence.hold = raises_once(fence.hold)
    sender.send_all()
    assert [block for write in sender.posted for block in write.remote_block_ids] == list(range(100, 119))
    sender.finish("sent", errors=1)


@pytest.mark.parametrize("push", [False, True])
def test_b100_b20_b82_a_prompt_whose_blocks_cannot_be_held_has_failed(model_folder, in_flight, push):
    """No step of its request comes any more that would send them."""
    sender = Sender(model_folder, in_flight, tokens=40, push_chunks=push)
    fence = sender.engine.binding.fence
    fence.hold = raises_once(fence.hold)
    sender.finish("failed", errors=1)
    assert not sender.posted


def test_keys_name_their_attempt(sender):
    sender.until_posted(1)
    assert is_of(sender.posted[0].key, sender.attempt) and not is_of(sender.posted[0].key, "other")
    sender.engine.tell(Cancelled(sender.attempt))
    sender.engine.run()
    sender.end_write()
    sender.finish("ended")
