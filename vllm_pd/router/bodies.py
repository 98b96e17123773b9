# SPDX-License-Identifier: Apache-2.0
"""How many bytes of requests a router holds: of one body, and of all that are open together."""
from http import HTTPStatus
from types import TracebackType


class BodyRefused(Exception):
    """A body that is not taken. `final`: not later either."""

    def __init__(self, status: HTTPStatus, text: str, final: bool) -> None:
        super().__init__(text)
        self.status = status
        self.final = final


class BodyBudget:
    """All of a router. Belongs to its event loop."""

    def __init__(self, most_bytes: int, most_bytes_together: int) -> None:
        self.held_bytes = 0
        self.most_bytes = most_bytes
        self.most_bytes_together = most_bytes_together

    def hold(self) -> "HeldBody":
        """Room for one body, until the end of this context."""
        return HeldBody(self)


class HeldBody:
    """One body. Only what has come is counted, whatever its length is said to be."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._bodies = bodies
        self._bytes = 0

    def __enter__(self) -> "HeldBody":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bodies.held_bytes -= self._bytes
        self._bytes = 0

    def announced(self, length: int) -> None:
        """It will have so many bytes. Raises BodyRefused."""
        if length > self._bodies.most_bytes:
            raise BodyRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                              f"the body has more than {self._bodies.most_bytes} bytes", final=True)

    def add(self, count: int) -> None:
        """So many bytes have come. Raises BodyRefused."""
        self._bytes += count
        self._bodies.held_bytes += count
        self.announced(self._bytes)
        if self._bodies.held_bytes > self._bodies.most_bytes_together:
            raise BodyRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"the bodies of all open requests have more than "
                              f"{self._bodies.most_bytes_together} bytes: try again later", final=False)
