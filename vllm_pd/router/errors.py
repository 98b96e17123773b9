# SPDX-License-Identifier: Apache-2.0
"""The router's own errors, in the form of the engines behind it, so that clients see one form only."""
from http import HTTPStatus

from vllm_pd.frontend import errors
from vllm_pd.router.responses import Headers, RouterResponse
from vllm_pd.router.workers import Workers


class RouterErrors:
    """Makes errors. Their form follows the versions that the `workers` have reported; it is that of today's vLLM where
    none has, or where they differ. `path` is that of the client's request."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def _form(self) -> errors.ErrorForm:
        return errors.form_of_versions({worker.version for worker in self._workers})

    def body(self, status: HTTPStatus, text: str, path: str = "") -> bytes:
        """The body of an answer."""
        return errors.error_body(status, text, self._form, path)

    def response(self, status: HTTPStatus, text: str, retry_after_s: float | None = None,
                 path: str = "") -> RouterResponse:
        """A whole answer. `retry_after_s` adds a Retry-After header, of 1 second or more."""
        headers: Headers = [(b"content-type", b"application/json")]
        if retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, round(retry_after_s))).encode()))
        return RouterResponse(status.value, self.body(status, text, path), headers)

    def unplaced(self, any_up: bool, retry_after_s: float, path: str) -> tuple[RouterResponse, str]:
        """The answer to a request that no worker may get, and why; the label of a counter. `any_up`: a worker that is
        full could get it."""
        if any_up:
            return self.response(HTTPStatus.TOO_MANY_REQUESTS, "all workers are full: try again later", retry_after_s,
                                 path), "full"
        return self.response(HTTPStatus.SERVICE_UNAVAILABLE, "no worker is up: try again later", retry_after_s,
                             path), "none_up"

    def event(self, text: str, status: HTTPStatus = HTTPStatus.BAD_GATEWAY, path: str = "") -> bytes:
        """The bytes of the error event that ends a broken stream. No `[DONE]` follows. They begin with an empty line,
        because the stream may have stopped in the middle of an event."""
        return b"\n\n" + errors.error_event(status, text, self._form, path)
