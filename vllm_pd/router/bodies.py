# SPDX-License-Identifier: Apache-2.0
"""Limits on request bodies: the size of one, and the bytes of all open requests together."""
from http import HTTPStatus
from types import TracebackType


class BodyRefused(Exception):
    """A body over a limit. `final`: it would be refused later, too."""

    def __init__(self, status: HTTPStatus, text: str, final: bool) -> None:
        super().__init__(text)
        self.status = status
        self.final = final


class BodyBudget:
    """Counts the body bytes that open requests hold. `max_bytes` bounds one body, `max_total_bytes` all of them.
    Belongs to the router's event loop."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self.held_bytes = 0
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes

    def hold(self) -> "HeldBody":
        """A context that counts one body, and gives its bytes back at its end."""
        return HeldBody(self)


class HeldBody:
    """The bytes of one body. Bytes that have arrived count, and those of a body that comes in one piece before
    it comes."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._budget.held_bytes -= self._bytes
        self._bytes = 0

    def check_length(self, length: int) -> None:
        """Raises BodyRefused where a body of `length` bytes is over the limit of one body."""
        if length > self._budget.max_bytes:
            raise BodyRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                              f"the body has more than {self._budget.max_bytes} bytes", final=True)

    def settle(self, count: int) -> None:
        """The body, all of which was counted before it came, has come and has `count` bytes. Raises BodyRefused where
        it has more than were counted and exceeds a limit."""
        self.add(count - self._bytes)

    def add(self, count: int) -> None:
        """Count `count` more bytes that have arrived, or will. Raises BodyRefused where a limit is exceeded."""
        self._bytes += count
        self._budget.held_bytes += count
        self.check_length(self._bytes)
        if self._budget.held_bytes > self._budget.max_total_bytes:
            raise BodyRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"the bodies of all open requests have more than "
                              f"{self._budget.max_total_bytes} bytes: try again later", final=False)
