# SPDX-License-Identifier: Apache-2.0
"""Whose a name is, at a server without keys: of the first connection that has used it, for as long as that one stands.
Otherwise any process of the machine could speak in the name of another one, and get what is sent to that.
"""
import collections
import math
from collections.abc import Callable

PROBE_S = 1.0
MAX_PROBED = 4096


class NameOwners:
    """`stands` says whether the connection that has a name still stands; to find out, it sends something there. That is
    done once in PROBE_S for each name: anybody may cause it. `clock` is in seconds."""

    def __init__(self, stands: Callable[[str], bool], clock: Callable[[], float]):
        self._stands = stands
        self._clock = clock
        self._probed_s: collections.OrderedDict[str, float] = collections.OrderedDict()  # the latest last

    def is_anothers(self, name: str, known: bytes | None, route: bytes) -> bool:
        """Whether a message that has come by `route` uses a name that `known` has; None: nobody has it."""
        if known in (None, route):
            return False
        now = self._clock()
        if now - self._probed_s.get(name, -math.inf) < PROBE_S:
            return True
        self._probed_s[name] = now
        self._probed_s.move_to_end(name)
        if len(self._probed_s) > MAX_PROBED:
            self._probed_s.popitem(last=False)
        return self._stands(name)
