# SPDX-License-Identifier: Apache-2.0
"""How many more jobs a prefill engine could take, and which number the broker has. Pure."""
from vllm_pd.protocol import messages as m


class JobCredits:
    """`jobs`: how many the engine could take beyond those that it has taken. `queued_tokens`: what it has to compute
    for those, None where it does not count. It takes no more once these are `max_tokens`. `failed`: the last credit was
    not sent."""

    def __init__(self, max_tokens: int = 0) -> None:
        self.jobs = 0
        self.queued_tokens: int | None = None
        self.failed = False
        self._max_tokens = max_tokens
        self._sent: m.Credit | None = None
        self._serial = 0  # of the broker's last offer

    def set(self, jobs: int, queued_tokens: int | None = None) -> None:
        """The engine could take so many now, and has so much to compute."""
        self.jobs = max(0, jobs)
        self.queued_tokens = queued_tokens

    def use(self, jobs: int, tokens: int = 0) -> None:
        """The engine took so many since the last `set`, with so many tokens together."""
        self.jobs = max(0, self.jobs - jobs)
        if self.queued_tokens is not None:
            self.queued_tokens += tokens

    def offered(self, serial: int) -> None:
        """The broker made the offer of this number."""
        self._serial = serial

    def send_again(self, new_broker: bool = False) -> None:
        """The broker may not know the last credit. A new one has offered nothing yet."""
        self._sent = None
        self.failed = False
        if new_broker:
            self._serial = 0

    def update(self, free: int, coming_tokens: int = 0) -> m.Credit | None:
        """What to send to the broker where `free` more jobs could come, besides those on their way to the engine, which
        have so many tokens; None where it knows."""
        credit = m.Credit(free, self._serial)
        if self.queued_tokens is not None:
            queued = self.queued_tokens + coming_tokens
            credit = m.Credit(free, self._serial, max(0, self._max_tokens - queued), queued)
        return None if self._sent is not None and _content(credit) == _content(self._sent) else credit

    def sent(self, credit: m.Credit) -> None:
        """This was sent to the broker."""
        self._sent = credit


def _content(credit: m.Credit) -> tuple[int, int | None, int]:
    """What the broker needs to know soon. A new serial alone can wait for the next heartbeat."""
    return credit.jobs, credit.tokens, credit.queued_tokens
