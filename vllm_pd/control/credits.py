# SPDX-License-Identifier: Apache-2.0
"""How many more jobs a prefill engine could take, and what the broker knows of it. Pure."""
from vllm_pd.core import messages as m


class JobCredits:
    """`jobs`: what the engine could take beyond those that it has taken."""

    def __init__(self) -> None:
        self.jobs = 0
        self._told: int | None = None
        self._serial = 0  # of the broker's last offer

    def set(self, jobs: int) -> None:
        """The engine's word."""
        self.jobs = max(0, jobs)

    def taken(self, jobs: int) -> None:
        """The engine took so many since its last word."""
        self.jobs = max(0, self.jobs - jobs)

    def offered(self, serial: int) -> None:
        """The broker made this offer."""
        self._serial = serial

    def forget(self, new_broker: bool) -> None:
        """Tell the broker again. A new one has offered nothing yet."""
        self._told = None
        if new_broker:
            self._serial = 0

    def news(self, free: int) -> m.Take | None:
        """What the broker is to hear where `free` more jobs could come; None where it knows."""
        return None if free == self._told else m.Take(free, self._serial)

    def told(self, take: m.Take) -> None:
        """The broker has been sent this."""
        self._told = take.room
