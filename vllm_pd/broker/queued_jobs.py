# SPDX-License-Identifier: Apache-2.0
"""What a decode engine knows of its jobs in a queue that numbers them, and that many engines use."""
import collections
from typing import NamedTuple

from vllm_pd.protocol import messages as m

MAX_JOBS = 8192


class QueuedJob(NamedTuple):
    """Its number, what is to be computed of its prompt, and since when it is there, on the monotonic clock."""
    number: int
    tokens: int
    since: float


class QueuedJobs:
    """The last jobs that were put and not withdrawn, `MAX_JOBS` at most. `given` is the largest number of a job that
    any prefill engine has got, as far as is known."""

    def __init__(self) -> None:
        self.given = 0
        self._queue = ""
        self._jobs: collections.OrderedDict[m.Attempt, QueuedJob] = collections.OrderedDict()

    def use(self, queue: str) -> None:
        """They are in the queue of this name from now on. What was in another one is forgotten."""
        if queue != self._queue:
            self._queue, self.given = queue, 0
            self._jobs.clear()

    def heard(self, given: int) -> None:
        """By the queue's word. A queue that was made anew, or is behind, knows of less than was given."""
        self.given = max(self.given, given)

    def put(self, job: m.Job, number: int, since: float) -> None:
        """It has got that number."""
        self._jobs[job.attempt] = QueuedJob(number, job.new_tokens, since)
        self._jobs.move_to_end(job.attempt)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)

    def find(self, attempt: m.Attempt) -> QueuedJob | None:
        """None: it is not known."""
        return self._jobs.get(attempt)

    def withdraw(self, attempt: m.Attempt) -> QueuedJob | None:
        """It is to be taken out. Returns what was known of it."""
        return self._jobs.pop(attempt, None)

    def waiting_tokens(self) -> int:
        """Of all that no engine has got yet."""
        return sum(job.tokens for job in self._jobs.values() if job.number > self.given)
