# SPDX-License-Identifier: Apache-2.0
"""The members, as one engine sees them in entries that each of them renews. Pure.

An entry is as old as its server says, by the server's clock alone: the newest stamp seen is that clock's present. That
clock may be set back: a stamp of what was sent just before shows it.
"""
import msgspec

from vllm_pd.protocol import messages as m

MAX_MEMBERS = 1024


class _ListedMember(msgspec.Struct):
    member: m.Member
    heard_at: float


class Directory:
    """Entries by key. `version` grows with each change that matters to others; a new load does not."""

    def __init__(self, ttl_s: float, max_members: int = MAX_MEMBERS):
        self.version = 1
        self._ttl_s = ttl_s
        self._max_members = max_members
        self._entries: dict[str, _ListedMember] = {}
        self._offset_s: float | None = None  # the server's clock less ours; too small by the way's time, never too big

    def __len__(self) -> int:
        return len(self._entries)

    def members(self) -> list[m.Member]:
        """Everybody who is there."""
        return [entry.member for entry in self._entries.values()]

    def find(self, incarnation: str) -> m.Member | None:
        """The member of that name."""
        return next((one for one in self.members() if one.incarnation == incarnation), None)

    def age_s(self, now: float, stamp_s: float) -> float:
        """How many seconds ago the server stamped something, as far as is known."""
        return 0.0 if self._offset_s is None else max(0.0, now + self._offset_s - stamp_s)

    def clock_is(self, now: float, server_s: float) -> None:
        """The server's clock showed that at some moment up to now."""
        offset_s = server_s - now
        if self._offset_s is None or offset_s > self._offset_s:
            self._offset_s = offset_s

    def stamped_since(self, sent_at: float, stamp_s: float) -> None:
        """The server has stamped what was sent to it at that moment: its clock showed no less than that since."""
        if self._offset_s is not None:
            self._offset_s = min(self._offset_s, stamp_s - sent_at)

    def heard(self, now: float, key: str, member: m.Member, stamp_s: float) -> bool:
        """An entry with its server's stamp, in seconds of that clock. Returns whether anything has changed."""
        self.clock_is(now, stamp_s)
        heard_at = now - self.age_s(now, stamp_s)
        if now - heard_at >= self._ttl_s:
            return False
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._max_members:
                return False
            self._entries[key] = _ListedMember(member, heard_at)
            return self._changed(True)
        changed = msgspec.structs.replace(member, load=entry.member.load) != entry.member
        entry.member, entry.heard_at = member, max(entry.heard_at, heard_at)
        return self._changed(changed)

    def left(self, key: str) -> bool:
        """The entry was taken away."""
        return self._changed(self._entries.pop(key, None) is not None)

    def expire(self, now: float) -> bool:
        """Forget those that fell silent."""
        silent = [key for key, entry in self._entries.items() if now - entry.heard_at >= self._ttl_s]
        for key in silent:
            del self._entries[key]
        return self._changed(bool(silent))

    def next_timeout(self) -> float | None:
        """When `expire` is next due."""
        return min((entry.heard_at + self._ttl_s for entry in self._entries.values()), default=None)

    def _changed(self, changed: bool) -> bool:
        self.version += changed
        return changed
