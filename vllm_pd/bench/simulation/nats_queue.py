# SPDX-License-Identifier: Apache-2.0
"""The job queue without a broker that chooses, as NATS has it, in simulated time.

Each decode engine chooses for its own jobs, by `vllm_pd.broker.preference` and what it reads in the registry, and
writes the engine into the job. A prefill engine with room that gets a job for another one hands it back; so the job
comes to the preferred one if that has room, and else to one that has. Handing back takes no time here.
"""
import collections

import msgspec

from vllm_pd.broker.preference import PrefillPreference
from vllm_pd.protocol import messages as m


class SimNatsQueue:
    """In the place of `vllm_pd.broker.registry.Registry`: takes the same messages, and answers with offers."""

    def __init__(self) -> None:
        self._preferences: collections.defaultdict[str, PrefillPreference] = collections.defaultdict(PrefillPreference)
        self._prefills: dict[str, m.Member] = {}
        self._credits: dict[str, m.Credit] = {}
        self._jobs: collections.deque[m.Job] = collections.deque()
        self._serials: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def receive(self, now: float, sender: str, message: m.Message) -> list[tuple[str, m.Message]]:
        """A message of an engine. Returns what its queue delivers now."""
        if isinstance(message, m.Register) and message.member.role.prefills:
            self._prefills[sender] = message.member
            for preference in self._preferences.values():
                preference.heard(message.member)
        elif isinstance(message, m.Register):
            self._preferences[sender].retain(self._prefills)
        elif isinstance(message, m.Credit):
            self._credits[sender] = message
        elif isinstance(message, m.Put):
            prefer = self._preferences[sender].prefer(now, message.job, list(self._prefills.values()))
            self._jobs.append(msgspec.structs.replace(message.job, prefer=prefer))
        return self._delivered()

    def _delivered(self) -> list[tuple[str, m.Message]]:
        """The oldest jobs, as long as an engine has room; each asks again once it has one."""
        found: list[tuple[str, m.Message]] = []
        open_to = [name for name, credit in self._credits.items() if credit.jobs > 0 and credit.tokens > 0]
        while self._jobs and open_to:
            job = self._jobs.popleft()
            name = job.prefer if job.prefer in open_to else max(open_to, key=lambda one: self._credits[one].jobs)
            open_to.remove(name)
            del self._credits[name]
            self._serials[name] += 1
            found.append((name, m.Offer(job, self._serials[name])))
        return found
