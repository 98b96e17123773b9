# SPDX-License-Identifier: Apache-2.0
"""Which prefill engine a decode engine would choose for its jobs, where no broker chooses for all (NATS). Pure.

The rule is the broker's (`broker.choice`), from less: the loads in the entries of the registry, up to a heartbeat old,
of which each engine has computed some since, by its speed; and the jobs of this decode engine alone. It takes for
granted that the engine that it prefers gets the job.
"""
from collections.abc import Container, Sequence

from vllm_pd.broker.choice import JobTaker, choose
from vllm_pd.broker.prompts import block_names
from vllm_pd.protocol import messages as m


class PrefillPreference:
    """What one decode engine knows of the prefill engines."""

    def __init__(self) -> None:
        self._takers: dict[str, JobTaker] = {}
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._takers)

    def heard(self, member: m.Member) -> None:
        """The entry of an engine. It knows of all jobs that it was given before."""
        if member.role.prefills:
            taker = self._takers.setdefault(member.incarnation, JobTaker())
            taker.reported(member)
            taker.set_credit(m.Credit(0, taker.offered, 0, member.load.job_tokens), all_seen=True)

    def retain(self, incarnations: Container[str]) -> None:
        """All other engines have gone."""
        for name in [name for name in self._takers if name not in incarnations]:
            del self._takers[name]

    def prefer(self, now: float, job: m.Job, fitting: Sequence[m.Member]) -> str:
        """The incarnation of the engine, among these that may take the job, that is to have it; empty where there is
        nothing to choose."""
        for taker in self._takers.values():
            taker.computed_since(now - self._looked_at)
        self._looked_at = now
        known = {name: taker for one in fitting if (taker := self._takers.get(name := one.incarnation)) is not None}
        if len(known) < 2:
            return ""
        names = block_names(job)
        chosen = choose(list(known.values()), job, names)
        chosen.offer(now, job, names)
        return next(name for name, taker in known.items() if taker is chosen)
