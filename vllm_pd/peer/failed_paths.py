# SPDX-License-Identifier: Apache-2.0
"""Which prefill engines an engine leaves alone for a while, because prompts that it had handed over to them came to
nothing on the way. Pure.

The network that carries KV may be cut where the one for messages is not, and nothing but a transfer shows that. So
each prompt that fails so costs time. After one failure the next prompt is handed over as before; after a further one
there is a pause, and it doubles with each, until a prompt arrives, or nothing has failed for a while.
"""
import collections

PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
MAX_PATHS = 1024


class _FailedPath:
    def __init__(self) -> None:
        self.pause_s = 0.0  # after the last failure
        self.newest = -1  # the number of the newest attempt there was then
        self.until = 0.0  # the end of that pause


class FailedPaths:
    """The prefill engines that failed this one lately. Of more than MAX_PATHS the oldest are forgotten. An attempt
    fails within `fails_after_s`. A path is forgotten if it has not failed for that long and the longest pause more."""

    def __init__(self, fails_after_s: float) -> None:
        self._calm_s = MAX_PAUSE_S + fails_after_s
        self._paths: collections.OrderedDict[str, _FailedPath] = collections.OrderedDict()

    def failed(self, now: float, incarnation: str, number: int, newest: int) -> None:
        """The attempt of that number, which this engine had, came to nothing; `newest` is the newest that there is.
        What was on its way when another one failed counts with that one."""
        path = self._paths.get(incarnation)
        if path is None or now >= path.until + self._calm_s:
            path = self._paths[incarnation] = _FailedPath()
        elif number > path.newest:
            path.pause_s = min(MAX_PAUSE_S, 2 * path.pause_s or PAUSE_S)
        else:
            return
        path.newest, path.until = newest, now + path.pause_s
        self._paths.move_to_end(incarnation)
        if len(self._paths) > MAX_PATHS:
            self._paths.popitem(last=False)

    def arrived(self, incarnation: str, number: int) -> None:
        """The attempt of that number has got its KV from this engine."""
        path = self._paths.get(incarnation)
        if path is not None and number > path.newest:
            del self._paths[incarnation]

    def forget(self, incarnation: str) -> None:
        """That engine is gone."""
        self._paths.pop(incarnation, None)

    def avoided(self, now: float) -> set[str]:
        """Who is left alone now."""
        return {name for name, path in self._paths.items() if now < path.until}
