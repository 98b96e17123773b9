# SPDX-License-Identifier: Apache-2.0
"""What the prefill engines have to compute, as a decode engine may assume: reports that are up to some heartbeats old,
corrected by what it knows exactly, its own jobs. Pure.

A report may count a job of ours that is computed by now, and may miss one that we have queued since. So what may be
ours in it is taken out, as much as we ever had there in the last `PERIODS` heartbeats, and what we have there now is
put in. So our own jobs are counted once, and those of other decode engines at most too low.
"""
import collections
from collections.abc import Mapping, Sequence

import msgspec

from vllm_pd.protocol import messages as m

PERIODS = 3  # a report of a prefill engine waits up to one at the broker, and may have been made one earlier
START_JOB_TOKENS = 1000.0  # of a job, where none of ours says it
QUEUED = ""  # in the place of an engine: jobs that nobody has claimed

Jobs = Mapping[str, Sequence[int]]  # the tokens of each of our jobs, by who has them


class PrefillLoads(msgspec.Struct, frozen=True):
    """Prompt tokens to be computed: `queued_tokens` that no prefill engine has taken; `busy`, for each prefill engine
    (tokens that it has taken, tokens per second as it has measured, 0 where it has not); `ours`, for each of `busy` our
    jobs among those tokens (tokens, seconds since it has them); `paths_s`, for each of `busy` what its path costs
    (`PathCosts.costs_s`), empty where that is not known."""
    queued_tokens: int
    busy: tuple[tuple[int, float], ...]
    ours: tuple[tuple[tuple[int, float], ...], ...] = ()
    paths_s: tuple[float, ...] = ()


class OwnJobs:
    """One per decode engine, for its own jobs of the last heartbeats. All tokens are those to be computed."""

    def __init__(self) -> None:
        self._most: collections.deque[dict[str, int]] = collections.deque([{}], maxlen=PERIODS)  # by who had them
        self._job_tokens = START_JOB_TOKENS

    def heartbeat(self, jobs: Jobs) -> None:
        """A heartbeat is sent; these jobs are open."""
        self._most.append({})
        self._note(jobs)

    def corrected(self, jobs: Jobs, queue_tokens: int | None, queue_length: int,
                  reported: Sequence[m.PrefillLoad]) -> PrefillLoads:
        """The loads at present. `jobs` are open; the others are the last reports. `queue_tokens` None: the broker has
        only counted the jobs."""
        self._note(jobs)
        if queue_tokens is None:
            queue_tokens = round(queue_length * self._job_tokens)
        return PrefillLoads(self._now(QUEUED, jobs, queue_tokens),
                            tuple((self._now(load.incarnation, jobs, load.job_tokens), load.tokens_per_s)
                                  for load in reported))

    def _note(self, jobs: Jobs) -> None:
        most = self._most[-1]
        for taken_by, tokens in jobs.items():
            most[taken_by] = max(most.get(taken_by, 0), sum(tokens))
        sizes = [size for tokens in jobs.values() for size in tokens]
        if sizes:
            self._job_tokens = sum(sizes) / len(sizes)

    def _now(self, taken_by: str, jobs: Jobs, reported: int) -> int:
        ours_then = max(most.get(taken_by, 0) for most in self._most)
        return max(0, reported - ours_then) + sum(jobs.get(taken_by, ()))
