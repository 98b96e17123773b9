# SPDX-License-Identifier: Apache-2.0
"""What a decode engine calls: its attempts to have prompts prefilled elsewhere, its reads of what prefill engines hold,
and what it decides by.

An attempt is named by `next_attempt`, begun by `submit` or `claim_hold`, and ended by an event that the engine polls,
or by `abort`. Sans-IO; each method holds the lock.
"""
from collections.abc import Collection
from typing import Any

import msgspec

from vllm_pd.peer.cluster import QueueView
from vllm_pd.peer.core import PeerCore, Session, locked
from vllm_pd.peer.own_jobs import PrefillLoads
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import AttemptEnd, Fallback, FallbackReason, Released, ToPrefill
from vllm_pd.protocol.scope import NO_SCOPE, PromptScope


class DecodeSession(Session):
    """The calls of a decode engine, and of the thread that posts its jobs to metaservers."""

    def __init__(self, core: PeerCore):
        super().__init__(core)
        self._posts = True

    @locked
    def next_attempt(self, request_id: str) -> m.Attempt:
        """A new attempt for this request; its number is larger than that of any before it."""
        self._core.last_number += 1
        return m.Attempt(self.member.incarnation, request_id, self._core.last_number)

    @locked
    def submit(self, attempt: m.Attempt, token_ids: list[int], block_ids: list[int], cached_blocks: int,
               avoid: tuple[str, ...] = (), deadline_s: float | None = None, priority: int = 0,
               scope: PromptScope = NO_SCOPE, media: tuple[bytes, ...] = (), next_token: int | None = None) -> None:
        """Have this prompt prefilled elsewhere, into `block_ids[cached_blocks:]`, by a P that is not to `avoid`. The
        blocks stay the caller's to keep until `Prefilled` or `Released`; exactly one of `Prefilled`, `Fallback` and the
        caller's own `abort` ends it, at the latest after `deadline_s` (the configured deadline where None)."""
        if self._is_shut_for(attempt):
            return
        now = self._clock()
        failed = sorted(self._core.failed_paths.avoided(now).difference(avoid))
        unable = sorted(set(self._cluster.unable(scope)).difference(avoid, failed))  # a broker knows these by itself
        avoid = (*avoid, *failed, *unable[:m.MAX_AVOIDED // 2])[:m.MAX_AVOIDED]
        self._do(self._decode.submit(now, attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority,
                                     scope, media, next_token))

    @locked
    def post_job(self, attempt: m.Attempt, url: str, request_id: str) -> None:
        """The job of this attempt, which is submitted next, goes to the metaserver at `url`, whose proxy knows the
        request as `request_id`, and not to the broker. To the broker all the same after `stop_posting`."""
        if self._posts:
            self._core.posted.add(attempt, url, request_id)

    @locked
    def stop_posting(self) -> None:
        """Nothing can be posted any more."""
        self._posts = False

    @locked
    def unclaimable(self, attempt: m.Attempt, detail: str) -> None:
        """Nobody will claim this attempt, whose job was posted. No effect once somebody has."""
        self._do(self._decode.unclaimable(self._clock(), attempt, detail))

    @locked
    def abort(self, attempt: m.Attempt) -> None:
        """The client is gone; `Released` follows. No effect on an attempt that has ended."""
        self._do(self._decode.abort(self._clock(), attempt) + self._decode.reads.abort(self._clock(), attempt))

    @locked
    def abort_all(self) -> None:
        """The engine ends: nothing that it asked for is wanted any more."""
        for attempt in [*self._decode.states(), *self._decode.reads.states()]:
            self.abort(attempt)

    @locked
    def arrived(self, attempt: m.Attempt, rank: int) -> None:
        """The transfer's notice: all of this rank's data is in our blocks."""
        self._do(self._decode.arrived(self._clock(), attempt, rank))

    @locked
    def grant_closed(self, attempt: m.Attempt) -> None:
        """Our own ranks receive nothing for this attempt any more. Only with a two-sided transport."""
        self._do(self._decode.grant_closed(self._clock(), attempt))

    @locked
    def claim_hold(self, attempt: m.Attempt, hold: m.Attempt, digest: bytes, block_ids: list[int], cached_blocks: int,
                   deadline_s: float) -> None:
        """Read what that prefill engine holds into `block_ids[cached_blocks:]`. As `submit`; `digest` is that of the
        prompt's tokens, which fill all of `block_ids`."""
        if self._is_shut_for(attempt):
            return
        self._do(self._decode.reads.claim(self._clock(), attempt, hold, digest, block_ids, cached_blocks, deadline_s))

    @locked
    def read_ended(self, attempt: m.Attempt, error: str, may_land: bool = False) -> None:
        """The answer to `ReadHold`: no byte of it lands any more, unless it failed and `may_land`. `error`: empty if
        all has arrived."""
        reads, peer = self._decode.reads, self._decode.reads.peer_of(attempt)
        if may_land and peer and not self._cluster.is_dead(peer):
            self._parted.add(peer)
            self._do(reads.unproven(self._clock(), attempt, error))
        else:
            if error and reads.is_wanted(attempt):
                self._core.failed_paths.failed(self._clock(), peer, attempt.number, self._core.last_number)
            self._do(reads.ended(attempt, error))
            self._do(self._prefill.read_ended(self._clock(), peer))

    @locked
    def drop_hold(self, hold: m.Attempt) -> None:
        """This hold, which a client named, is not wanted. Its prefill engine learns it, if it is known."""
        message = m.HoldDone(self.next_attempt(hold.request_id), hold)
        if hold.incarnation == self.member.incarnation:
            self._do(self._prefill.holds.done(hold.incarnation, message))
        elif self._reaches_holder(hold.incarnation):
            self._do([ToPrefill(hold.incarnation, message)])

    @locked
    def knows_holder(self, incarnation: str) -> bool:
        """Whether this engine can read from that prefill engine: over a two-sided transport from none."""
        return (self._reaches_holder(incarnation) and incarnation not in self._parted
                and incarnation not in self._core.failed_paths.avoided(self._clock()))

    @locked
    def prompt_decided(self, request_id: str, again: bool, **fields: Any) -> None:
        """Remember a decision about this request's prompt, `again` after an attempt; `fields` are those of its
        `PromptRecord`."""
        self._core.prompts.decided(request_id, again, **fields)

    @locked
    def note_prompt(self, request_id: str, **fields: Any) -> None:
        """Remember more of a prompt that was decided about; `fields` likewise."""
        self._core.prompts.note(request_id, **fields)

    @locked
    def unable(self, scope: PromptScope) -> tuple[str, ...]:
        """The prefill engines that can't do a job of this scope, and any other."""
        return tuple(self._cluster.unable(scope))

    @locked
    def takes_media(self, media_bytes: int) -> bool:
        """Whether an attempt with media of this size may be begun beside those that are open."""
        return self._decode.media_bytes() + media_bytes <= self._decode.limits.max_media_bytes

    @locked
    def view(self, avoid: Collection[str] = ()) -> QueueView:
        """The cluster as the policy needs it, for a request that is not to go to the Ps in `avoid` again."""
        return self._cluster.view(self._clock(), self._decode.queued(), self._core.greeted(), avoid)

    @locked
    def prefill_loads(self, avoid: Collection[str] = (), tokens: int = 0) -> PrefillLoads:
        """What the prefill engines have to compute at present, without those in `avoid`, and what their paths cost a
        prompt with so many `tokens` to compute. What others have queued is as old as the last reports; what this engine
        has is exact. Raises ValueError with a fixed `max_local_prefill_tokens`."""
        if self._core.own_jobs is None:
            raise ValueError("loads are followed with max_local_prefill_tokens auto only")
        now, cluster, greeted = self._clock(), self._cluster, self._core.greeted()
        taken = self._decode.taken(now)
        reported = cluster.prefill_loads(greeted, avoid)
        paths_s = self._core.paths.costs_s(now, tokens, cluster.zones(greeted, avoid))
        found = self._core.own_jobs.corrected(self._decode.uncomputed(), cluster.queue_tokens, cluster.queue_length,
                                              reported)
        return msgspec.structs.replace(found, ours=tuple(tuple(taken.get(one.incarnation, ())) for one in reported),
                                       paths_s=tuple(paths_s[one.incarnation] for one in reported if paths_s))

    def _is_shut_for(self, attempt: m.Attempt) -> bool:
        """Whether nothing is sent any more. Then the attempt has ended."""
        detail = self._core.shut_detail
        if detail:
            self._do([Fallback(attempt, FallbackReason.CONTROL, AttemptEnd.FAILED, detail), Released(attempt)])
        return bool(detail)

    def _reaches_holder(self, incarnation: str) -> bool:
        """Whether that prefill engine may hold something for this one, and takes messages of this one."""
        return not (self._core.shut_detail or self._decode.limits.own_fence) and self._decode.reads.knows(incarnation)
