# SPDX-License-Identifier: Apache-2.0
"""Which clients of a prefill engine's server wait for the end of a job that they brought. Pure."""
from collections.abc import Set

from vllm_pd.protocol import messages as m

NOT_CLAIMED = "its decode engine did not grant it: it has ended there, or another prefill engine has it"


class DirectJobs:
    """By attempt: the processes of the front end that wait for its end, and what the decode engine was last sent about
    it. Belongs to the control thread. An attempt leaves with its job, so there are never more than jobs."""

    def __init__(self) -> None:
        self._fronts: dict[m.Attempt, set[str]] = {}
        self._problems: dict[m.Attempt, str] = {}

    def __len__(self) -> int:
        return len(self._fronts)

    def add(self, attempt: m.Attempt, front: str) -> None:
        """This process waits for the end of this job, which is open. It may wait for it already."""
        self._fronts.setdefault(attempt, set()).add(front)

    def transmitted(self, message: m.Message) -> None:
        """This went to a decode engine."""
        if isinstance(message, m.Sent | m.Failed | m.GaveUp | m.Stopped) and message.attempt in self._fronts:
            self._problems[message.attempt] = (
                "" if isinstance(message, m.Sent) else
                "its decode engine gave it up" if isinstance(message, m.Stopped) else message.reason)

    def poll(self, jobs: Set[m.Attempt], otherwise: str = NOT_CLAIMED) -> list[tuple[str, m.DirectJobEnd]]:
        """Whom to tell what. `jobs` are open, as of a moment since which everything has been transmitted. `otherwise`:
        why those have ended of which the decode engine was sent nothing."""
        ended = [attempt for attempt in self._fronts if attempt not in jobs]
        return [(front, m.DirectJobEnd(attempt, problem)) for attempt in ended
                for problem in (self._problems.pop(attempt, otherwise),) for front in self._fronts.pop(attempt)]
