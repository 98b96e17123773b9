# SPDX-License-Identifier: Apache-2.0
"""How the registry of a broker is kept equal in many places, by what changes in it. Pure.

The broker numbers the changes (`ChangeLog`), and sends all members what has changed since it last did so: the entries
that came or changed as they are now, and the names of those that are gone. A receiver (`RegistryView`) says in each
heartbeat which version it has. If it has missed an update, it gets what has changed since its version, or the whole
registry if the broker does not remember that. An update holds no steps, so one that comes twice does no harm.
"""
import itertools

from vllm_pd.protocol import messages as m

MAX_CHANGES = 2048


class ChangeLog:
    """Which names have changed in which version, of the last `most` names that did."""

    def __init__(self, most: int = MAX_CHANGES):
        self.version = 1
        self._most = most
        self._changed: dict[str, int] = {}  # the version in which it last changed, the latest last
        self._complete_since = 1  # all that has changed after this version is remembered

    def note(self, name: str) -> None:
        """The entry of this name came, changed or went."""
        self.version += 1
        self._changed.pop(name, None)
        self._changed[name] = self.version
        if len(self._changed) > self._most:
            self._complete_since = self._changed.pop(next(iter(self._changed)))

    def since(self, version: int) -> list[str] | None:
        """The names that have changed after this version; None: that is not known."""
        if not self._complete_since <= version <= self.version:
            return None
        return list(itertools.takewhile(lambda name: self._changed[name] > version, reversed(self._changed)))


class RegistryView:
    """The registry of one broker process as a receiver of its updates has it. To be read only: `broker`, `version` and
    `members`, by incarnation. Version 0: nothing has come of this process; the members are those of another one."""

    def __init__(self) -> None:
        self.broker = ""
        self.version = 0
        self.members: dict[str, m.Member] = {}

    def follow(self, broker: str) -> bool:
        """Updates come from this broker process. Returns whether it is another one than before."""
        if broker == self.broker:
            return False
        self.broker, self.version = broker, 0
        return True

    def apply(self, update: m.Peers) -> bool:
        """An update of the broker that is followed. Returns False, and changes nothing, if an earlier one is missing:
        ask for it, with a heartbeat."""
        if update.since > self.version:
            return False
        if update.since and update.version <= self.version:
            return True  # it comes late, or twice
        if not update.since:
            self.members = {}
        for name in update.gone:
            self.members.pop(name, None)
        self.members.update((member.incarnation, member) for member in update.members)
        self.version = update.version
        return True
