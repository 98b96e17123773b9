# SPDX-License-Identifier: Apache-2.0
"""Which jobs of a decode engine go to a metaserver, and not to the broker. Pure.

The protocol puts each job at the broker, again and again until it is claimed, and withdraws it. For an attempt that was
added here the first Put becomes a post, the others nothing, and the Withdraw the end of the post.
"""
from vllm_pd.core import messages as m
from vllm_pd.core.actions import Action, PostJob, Prefilled, Released, StopPost, ToBroker


class PostedJobs:
    """Belongs to a `PeerProtocol`, and is used under its lock. Holds an attempt from `add` until its last event."""

    def __init__(self) -> None:
        self._open: dict[m.Attempt, PostJob | tuple[str, str]] = {}  # the post; before it, its URL and request id

    def __len__(self) -> int:
        return len(self._open)

    def add(self, attempt: m.Attempt, url: str, request_id: str) -> None:
        """The job of this attempt, which is submitted next, is to be posted to `url`."""
        self._open[attempt] = (url, request_id)

    def divert(self, action: Action) -> Action | None:
        """What is to be done in place of this action, which may be the same; None: nothing."""
        if isinstance(action, Prefilled | Released):
            self._open.pop(action.attempt, None)
        if not isinstance(action, ToBroker):
            return action
        message = action.message
        if isinstance(message, m.Withdraw) and message.attempt in self._open:
            return StopPost(message.attempt)
        if not isinstance(message, m.Put) or message.job.attempt not in self._open:
            return action
        found = self._open[message.job.attempt]
        if isinstance(found, PostJob):
            return None
        post = self._open[message.job.attempt] = PostJob(*found, message.job)
        return post
