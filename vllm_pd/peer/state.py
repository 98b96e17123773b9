# SPDX-License-Identifier: Apache-2.0
"""The state of an engine as others see it: its role, whether it takes new work, whether it has left. Pure.

An engine is born with a role, which says what its memory and its engine are prepared for. An operator may narrow a
`kv_both` one to either part, widen it again, or have the engine drained: then it takes nothing new, finishes what is
open and leaves the registry, for good. This state decides about *new* work only; what was
begun under another role, and what a peer had sent before it could know, is finished as if nothing had changed.
"""
import msgspec

from vllm_pd.protocol import messages as m


class EngineState:
    """The state of one engine. `left`: it has drained and said goodbye to the broker."""

    def __init__(self, member: m.Member):
        self._born = member
        self.role = member.role
        self.draining = False
        self.left = False
        self.paused = False
        self.hangs = False  # its step loop, see `StepWatch`
        self.lost_address = ""  # its own, while its machine does not have it
        self.agents_problem = ""  # why it can make no transfer agents, while it is in doubt about those that it has
        self.has_other_weights = False  # than those of its fingerprint
        self.listed_as_draining = False
        self.http = member.http
        self.scopes = member.scopes
        self.unreached: tuple[str, ...] = ()
        self.is_cut_off = False  # from more decode engines than its entry can name
        self._load: m.Load | None = None

    @property
    def takes_jobs(self) -> bool:
        """Whether others may send prefills here."""
        return self.role.prefills and not (self.draining or self.paused or self.hangs or self.has_lost_peers)

    @property
    def has_lost_peers(self) -> bool:
        """Whether it can do nothing with peers: its machine has lost its address, or it can make no new transfer
        agents, and so can't end a transfer that hangs."""
        return bool(self.lost_address or self.agents_problem)

    @property
    def hands_over(self) -> bool:
        """Whether prefills of our own may go elsewhere."""
        return self.role.decodes and not (self.left or self.has_other_weights or self.has_lost_peers)

    @property
    def can_change_role(self) -> bool:
        """Whether `set_role` may change anything."""
        return self._born.role is m.Role.BOTH and not self.has_other_weights

    def entry(self) -> m.Member:
        """The entry for the registry. A prefill engine that is paused is listed as draining until it goes on: the
        prompts of others do not wait for it. Any other engine has clients, which may wait. One that hangs is listed as
        draining where it would take jobs. So is a prefill engine that has lost its peers, or reaches none of very many
        decode engines and can't say whom; one that has clients as well only decodes meanwhile."""
        is_lost, role = self.has_lost_peers or self.is_cut_off, self.role
        if role is m.Role.PREFILL:
            is_away = self.paused or self.hangs or is_lost
        else:
            is_away = self.hangs and role.prefills
            role = m.Role.DECODE if is_lost else role
        return msgspec.structs.replace(self.member(), draining=self.draining or is_away, role=role)

    def member(self) -> m.Member:
        """This engine at this moment."""
        return msgspec.structs.replace(self._born, role=self.role, draining=self.draining, http=self.http,
                                       load=self._load or m.Load(), unreached=self.unreached, scopes=self.scopes)

    def set_load(self, load: m.Load) -> bool:
        """How busy the engine is. Returns whether this is the first load since the drain began."""
        first, self._load = self._load is None, load
        return first

    def set_paused(self, paused: bool) -> bool:
        """Whether the engine computes nothing that comes now. Returns whether that is a change."""
        changed, self.paused = paused != self.paused, paused
        return changed

    def set_http(self, http: str) -> bool:
        """The front end serves at this URL. Returns whether that is a change."""
        changed, self.http = http != self.http, http
        return changed

    def set_unreached(self, names: list[str]) -> bool:
        """These decode engines can't be reached; the entry names the first. Returns whether that is a change."""
        unreached = tuple(sorted(names)[:m.MAX_UNREACHED])
        changed, self.unreached = unreached != self.unreached, unreached
        was_cut_off, self.is_cut_off = self.is_cut_off, len(names) > m.MAX_UNREACHED
        return changed or was_cut_off is not self.is_cut_off

    def set_role(self, role: m.Role) -> str:
        """Act as `role` from now on. Returns why not, empty where it is done."""
        if role is self.role:
            return ""
        if self.has_other_weights:
            return f"role={role.value!r} can't be used: the weights of this engine were replaced; restart it"
        if not self.can_change_role:
            return (f"role={role.value!r} can't be used: this engine was started as {self._born.role.value}; start it "
                    f"as {m.Role.BOTH.value} to change its role while it runs")
        self.role = role
        return ""

    def weights_replaced(self) -> None:
        """The weights are not those of the fingerprint any more: work with no other engine, for good."""
        self.has_other_weights = True
        if self.role is m.Role.BOTH:
            self.role = m.Role.DECODE

    def drain(self) -> None:
        """Take nothing new from now on. A load from before does not count any more."""
        if not self.draining:
            self.draining = True
            self._load = None

    def listed(self, member: m.Member | None) -> None:
        """The entry of this engine in the registry; None where there is none."""
        self.listed_as_draining = member is not None and member.draining

    def is_drained(self, open_attempts: bool, broker_up: bool) -> bool:
        """Whether nothing is open, and nothing more can come: the broker, if it is up, lists us as draining."""
        if not self.draining or open_attempts or self._load is None or self._load.running or self._load.waiting:
            return False
        return self.listed_as_draining or not broker_up

    def gauges(self) -> dict[str, int]:
        """Gauges for a status."""
        load = self._load or m.Load()
        clients = load.running + load.waiting if load.clients is None else load.clients
        return {"running": load.running, "waiting": load.waiting, "clients": clients, "free_blocks": load.free_blocks,
                "drained": int(self.left), "changes_role": int(self.can_change_role)}
