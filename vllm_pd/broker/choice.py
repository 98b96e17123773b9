# SPDX-License-Identifier: Apache-2.0
"""Which prefill engine gets a job: one that will probably have computed it soon, and has its beginning. Pure.

The expected time is what the engine has queued, and what of this prompt it must compute, over its speed. Both are
tokens: those that the decode engine has cached, and those that the engine was given before (`broker.prompts`), cost
nothing. What is queued there is what the engine last reported, less the part of it that it probably has in its cache,
and the jobs that it was offered since.

Tokens that another engine has already and this one must compute count `COPY_WEIGHT` times more, because a second copy
of a prefix takes KV blocks from other prompts. So a prompt goes where its beginning is, unless the queue there takes
longer than twice the time of computing it elsewhere.

The path comes to it: what the decode engine has measured that it takes longer than the nearest one (`Job.detours`). So
a prompt crosses a slow link only where what is queued on this side of it takes longer than the link. Where nobody on
this side has room, it waits for that, as long as the link would take at most.
"""
import collections
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from vllm_pd.broker.prompts import PromptMemory
from vllm_pd.protocol import messages as m

COPY_WEIGHT = 1.0  # gave the most hits and the shortest times in `vllm-pd bench router --hit-rate --prefill 4`
MAX_OFFERS = 1024  # remembered of one engine; it holds fewer jobs
# Of all engines, where none has measured its own: what they have queued is then compared with detours alone. A power of
# two, so that no rounding decides between two sums of tokens.
START_TOKENS_PER_S = 8192.0


class _OpenOffer(NamedTuple):
    """A job that an engine was offered. It reports `tokens` as queued, of which it probably computes `left`."""
    serial: int
    tokens: int
    left: int


class JobTaker:
    """What is known of one prefill engine: its last credit, the offers made to it, the prompts that it was given.
    `offered` counts the offers, the last of them made at `offered_at`. `incarnation` is empty before `reported`."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.offered = 0
        self.offered_at = 0.0
        self._credit = m.Credit(0, 0)
        self._seen = 0  # the last offer that was seen there before the credit was sent
        self._offers: collections.deque[_OpenOffer] = collections.deque(maxlen=MAX_OFFERS)  # oldest first
        self._queued = 0.0
        self._prompts = PromptMemory()
        self._most_free_blocks = 0
        self._tokens_per_s = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether its credits say what it has queued. Those of an older release do not."""
        return self._credit.tokens is not None

    @property
    def tokens_per_s(self) -> float:
        """How fast it computes prompts; 0: it is not known."""
        return self._tokens_per_s

    @property
    def queued_tokens(self) -> float:
        """What it probably has to compute before a job that it is offered now."""
        return self._queued

    def free_jobs(self) -> int:
        """How many more offers it may get now, by their number."""
        return self._credit.jobs - (self.offered - self._seen)

    def has_room(self) -> bool:
        """Whether it may get one more offer. Then that may have any length: a long prompt waits for no more room than
        a short one, so nothing overtakes it."""
        if self.free_jobs() <= 0:
            return False
        return not self.counts_tokens or self._credit.tokens > sum(offer.tokens for offer in self._unseen())

    def reported(self, member: m.Member) -> None:
        """Its heartbeat. The most KV blocks that it ever had free are about as many as its prefix cache can hold."""
        self.incarnation = member.incarnation
        self._tokens_per_s = member.load.tokens_per_s
        if member.load.free_blocks > self._most_free_blocks:
            self._most_free_blocks = member.load.free_blocks
            self._prompts.limit(self._most_free_blocks * member.fingerprint.block_size)

    def set_credit(self, credit: m.Credit, all_seen: bool = False) -> None:
        """Its credit. `all_seen`: an offer that it has not seen by now was lost."""
        # One that was dropped and came back still has the numbers of its former entry.
        self._seen = self.offered if all_seen else min(credit.serial, self.offered)
        self._credit = credit
        unseen = self._unseen()
        seen = list(self._offers)[:len(self._offers) - len(unseen)]
        queued: collections.deque[_OpenOffer] = collections.deque(maxlen=MAX_OFFERS)
        tokens = 0
        while seen and tokens < credit.queued_tokens:  # those before have been computed
            queued.appendleft(seen.pop())
            tokens += queued[0].tokens
        queued.extend(unseen)
        self._offers = queued
        self._queued = sum(offer.left for offer in queued) + max(0, credit.queued_tokens - tokens)

    def close(self) -> None:
        """An offer could not be sent to it: it gets none before its next credit."""
        self._credit = m.Credit(0, 0, self._credit.tokens, self._credit.queued_tokens)

    def computed_since(self, seconds: float) -> None:
        """It had so long to compute what is queued."""
        self._queued = max(0.0, self._queued - seconds * self._tokens_per_s)

    def left_tokens(self, job: m.Job, names: Sequence[int]) -> int:
        """How many tokens of the job, whose blocks have these names, it probably has to compute."""
        return max(1, min(job.new_tokens, len(job.token_ids) - self._prompts.held_tokens(names)))

    def offer(self, now: float, job: m.Job, names: Sequence[int]) -> int:
        """It is offered this job. Returns the offer's number."""
        self.offered += 1
        self.offered_at = now
        left = self.left_tokens(job, names)
        self._offers.append(_OpenOffer(self.offered, job.new_tokens, left))
        self._queued += left
        self._prompts.add(names)
        return self.offered

    def _unseen(self) -> list[_OpenOffer]:
        return [offer for offer in self._offers if offer.serial > self._seen]


def choose(takers: Sequence[JobTaker], job: m.Job, names: Sequence[int]) -> JobTaker:
    """The one that gets the job, whose blocks have these names; of equal ones that with the most free job slots, then
    the one that has waited longest. Where one of them counts no tokens, these decide alone."""
    def by_slots(taker: JobTaker) -> tuple[int, float]:
        return -taker.free_jobs(), taker.offered_at

    if len(takers) == 1:
        return takers[0]
    if not all(taker.counts_tokens for taker in takers):
        return min(takers, key=by_slots)
    known = [taker.tokens_per_s for taker in takers if taker.tokens_per_s > 0]
    typical = statistics.fmean(known) if known else START_TOKENS_PER_S  # of one that has measured none
    left = [taker.left_tokens(job, names) for taker in takers]
    least = min(left)
    detours = dict(job.detours)

    def cost_s(place: int) -> float:
        expected_s = (takers[place].queued_tokens + left[place]) / (takers[place].tokens_per_s or typical)
        copy_s = COPY_WEIGHT * (left[place] - least) / typical
        return expected_s + copy_s + detours.get(takers[place].incarnation, 0.0)

    return takers[min(range(len(takers)), key=lambda place: (cost_s(place), *by_slots(takers[place])))]


def choose_or_wait(takers: Sequence[JobTaker], full: Sequence[JobTaker], job: m.Job, names: Sequence[int],
                   waited_s: float) -> JobTaker | None:
    """As `choose`, among those with room. None: the job, which waits since `waited_s`, had better wait for one of those
    that are `full`, to which the path is shorter."""
    chosen = choose(takers, job, names)
    detours = dict(job.detours)
    detour_s = detours.get(chosen.incarnation, 0.0)
    if detour_s <= waited_s or waited_s + detour_s >= job.deadline_s:
        return chosen
    nearer = [taker for taker in full if detours.get(taker.incarnation, 0.0) < detour_s]
    return chosen if choose([chosen, *nearer], job, names) is chosen else None
