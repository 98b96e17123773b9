# SPDX-License-Identifier: Apache-2.0
"""Which jobs of a decode engine go to a metaserver, and not to the broker. Pure.

The protocol puts each job at the broker, again and again until it is claimed, and withdraws it. For an attempt that was
added here the first Put becomes a post, and the broker hears nothing. The post ends with the attempt, however that
ends.
"""
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Action, Fallback, PostJob, Prefilled, Released, StopPost, ToBroker

ANSWER_S = 2.0  # for the metaserver to answer once the prompt is here: the connection may then be used again


class PostedJobs:
    """Belongs to a `PeerCore`, and is used under its lock. Holds an attempt from `add` until its last event."""

    def __init__(self) -> None:
        self._open: dict[m.Attempt, tuple[str, str]] = {}  # the URL and the request id
        self._posts: set[m.Attempt] = set()  # those of them whose post was made, and not ended

    def __len__(self) -> int:
        """The attempts of which anything is kept."""
        return len(self._open.keys() | self._posts)

    def add(self, attempt: m.Attempt, url: str, request_id: str) -> None:
        """The job of this attempt, which is submitted next, is to be posted to `url`."""
        self._open[attempt] = (url, request_id)

    def divert(self, action: Action) -> list[Action]:
        """What is to be done in place of this action: the same, where it is of no job that is posted."""
        if isinstance(action, ToBroker):
            return self._divert_message(action, action.message)
        if not isinstance(action, Fallback | Prefilled | Released):
            return [action]
        attempt = action.attempt
        is_posted = attempt in self._posts
        self._posts.discard(attempt)
        if not isinstance(action, Fallback):
            self._open.pop(attempt, None)
        if not is_posted:
            return [action]
        return [action, StopPost(attempt, ANSWER_S if isinstance(action, Prefilled) else 0.0)]

    def _divert_message(self, action: ToBroker, message: m.Message) -> list[Action]:
        if isinstance(message, m.Withdraw) and message.attempt in self._open:
            return []
        if not isinstance(message, m.Put) or message.job.attempt not in self._open:
            return [action]
        attempt = message.job.attempt
        if attempt in self._posts:
            return []
        self._posts.add(attempt)
        return [PostJob(*self._open[attempt], message.job)]
