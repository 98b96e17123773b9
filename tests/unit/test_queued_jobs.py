# SPDX-License-Identifier: Apache-2.0
"""What a decode engine knows of its jobs in a queue on a NATS server."""
from vllm_pd.broker.queued_jobs import MAX_JOBS, QueuedJobs
from vllm_pd.protocol import messages as m


def test_the_jobs_of_an_engine_in_the_queue():
    queued, jobs = QueuedJobs(), [m.Job(m.Attempt("d", "r", number), "", [1, 2, 3], number, 1.0) for number in range(3)]
    for number, job in enumerate(jobs):
        queued.put(job, 10 + number, 0.0)
    assert queued.waiting_tokens() == 3 + 2 + 1
    queued.given = 10
    assert queued.waiting_tokens() == 2 + 1
    assert queued.withdraw(jobs[1].attempt).number == 11 and queued.withdraw(jobs[1].attempt) is None
    queued.put(jobs[0], 20, 5.0)
    assert queued.waiting_tokens() == 1 + 3 and queued.find(jobs[0].attempt) == (20, 3, 5.0)
    for number in range(MAX_JOBS):
        queued.put(m.Job(m.Attempt("d", "s", number), "", [1], 0, 1.0), 30 + number, 0.0)
    assert queued.find(jobs[2].attempt) is None and queued.waiting_tokens() == MAX_JOBS, "bounded"
    queued.use("another")
    assert queued.waiting_tokens() == queued.given == 0


def test_what_was_given_is_never_less_and_another_queue_has_nothing_of_before():
    queued = QueuedJobs()
    queued.use("a")
    queued.put(m.Job(m.Attempt("d", "r", 1), "", [1, 2, 3], 0, 1.0), 10, 0.0)
    queued.heard(10)
    queued.heard(0)
    assert queued.given == 10 and queued.waiting_tokens() == 0
    queued.use("a")
    assert queued.given == 10
    queued.use("b")
    assert queued.given == 0 and queued.find(m.Attempt("d", "r", 1)) is None
