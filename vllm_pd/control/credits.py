# SPDX-License-Identifier: Apache-2.0
"""How many more jobs a prefill engine could take, and which number the broker has. Pure."""
from vllm_pd.core import messages as m


class JobCredits:
    """`jobs`: how many the engine could take beyond those that it has taken. `failed`: the last credit was not sent."""

    def __init__(self) -> None:
        self.jobs = 0
        self.failed = False
        self._sent: int | None = None
        self._serial = 0  # of the broker's last offer

    def set(self, jobs: int) -> None:
        """The engine could take so many now."""
        self.jobs = max(0, jobs)

    def use(self, jobs: int) -> None:
        """The engine took so many since the last `set`."""
        self.jobs = max(0, self.jobs - jobs)

    def offered(self, serial: int) -> None:
        """The broker made the offer of this number."""
        self._serial = serial

    def send_again(self, new_broker: bool = False) -> None:
        """The broker may not know the last credit. A new one has offered nothing yet."""
        self._sent = None
        self.failed = False
        if new_broker:
            self._serial = 0

    def update(self, free: int) -> m.Credit | None:
        """What to send to the broker where `free` more jobs could come; None where it knows."""
        return None if free == self._sent else m.Credit(free, self._serial)

    def sent(self, credit: m.Credit) -> None:
        """This was sent to the broker."""
        self._sent = credit.jobs
